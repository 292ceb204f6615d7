"""The plan: what a model takes of a memory, how many fit, and how fast they can be at most."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvledger import _core
from kvledger.errors import ModelRefused, SettingRefused
from kvledger.machine.peaks import MachinePeaks
from kvledger.models.config import LlamaConfig
from kvledger.planning.capacity import Lengths, Pool
from kvledger.planning.floors import Floor, StepCosts
from kvledger.planning.planned_model import PlannedModel
from kvledger.planning.targets import Reach, Reaching, Targets
from kvledger.served_model import pool_blocks
from kvledger.settings import Settings

# What a server's process takes beside weights, pool and the matrices of a step: the interpreter,
# torch, gRPC. Measured with the default model: 0.33 GB while one request ran.
PROCESS_BYTES = 400_000_000
# KV formats that are spoken of; whether there is one, the core says.
KNOWN_FORMATS = ("f32", "bf16", "int8", "int4")
# Most blocks of a pool, as --kv-blocks has it.
_BLOCKS_MAX = 2**31 - 1


@dataclass(frozen=True)
class Question:
    """What a plan is asked for. `memory` is in bytes; `concurrency` None for as many as fit."""

    model: PlannedModel
    settings: Settings
    lengths: Lengths
    memory: int
    peaks: MachinePeaks
    concurrency: int | None = None
    targets: Targets = field(default_factory=Targets)


@dataclass(frozen=True)
class Memory:
    """Where the bytes go."""

    all: int
    weights: int
    process: int
    step: int  # matrices of a step of the token budget, angles of rotary embedding

    @property
    def left(self) -> int:
        """What remains for KV."""
        return self.all - self.weights - self.process - self.step


@dataclass(frozen=True)
class Fit:
    """Sequences that fit at a time: of mean lengths at all ages alike, of mean lengths at their
    end, of the most that is planned for at its end."""

    living: int
    mean: int
    most: int

    @classmethod
    def of(cls, pool: Pool, lengths: Lengths) -> Fit:
        """What fits into a pool."""
        return cls(pool.fit_living(lengths), pool.fit(lengths.total), pool.fit(lengths.total_most))


@dataclass(frozen=True)
class Alternative:
    """The same with another KV format or other KV heads; `missing` says why there is none."""

    name: str
    kv_heads: int
    missing: str = ""
    token_bytes: int = 0  # without padding
    token_pool_bytes: float = 0.0  # a token's part of a block
    weight_bytes: int = 0
    fit: Fit = Fit(0, 0, 0)
    decode_seconds: float = 0.0


@dataclass(frozen=True)
class Times:
    """Floors at the planned concurrency: at mean lengths, or at the most."""

    decode: Floor
    prefill: Floor  # one prompt alone
    first_beside_seconds: float  # to its first token, while the others decode
    first_of_all_seconds: float  # to the last one's first token, if all come at once
    tokens_per_second: float
    concurrency: Reach
    context: Reach


@dataclass(frozen=True)
class Plan:
    """The answer."""

    question: Question
    config: LlamaConfig
    memory: Memory
    pool: Pool
    default_blocks: int  # that `serve` takes unless it is told
    fit: Fit
    sequences: int
    costs: StepCosts
    mean: Times
    most: Times
    formats: tuple[Alternative, ...]
    groups: tuple[Alternative, ...]


def make_plan(question: Question) -> Plan:
    """Works it out. Raises SettingRefused or ModelRefused, in one sentence."""
    settings, lengths, model = question.settings, question.lengths, question.model
    _check(question)
    weights = model.weights(settings.weights)
    layout = make_layout(model.config, settings.block_tokens)
    memory = Memory(question.memory, weights.bytes, PROCESS_BYTES, _step_bytes(model, settings))
    pool = _pool(question, layout, memory)
    fit = Fit.of(pool, lengths)
    sequences = question.concurrency or max(1, min(fit.most, settings.sequences_max))
    token_bytes = layout.token_bytes(settings.kv_format)
    costs = StepCosts.of(model.config, weights, token_bytes, question.peaks)
    reaching = Reaching(costs, pool, question.targets, settings.token_budget)
    plan = Plan(
        question=question,
        config=model.config,
        memory=memory,
        pool=pool,
        default_blocks=_default_blocks(settings, layout, model.config, memory.left),
        fit=fit,
        sequences=sequences,
        costs=costs,
        mean=_times(
            reaching, sequences, lengths.prompt, lengths.output, lengths.living, fit.living
        ),
        most=_times(
            reaching,
            sequences,
            lengths.prompt_most,
            lengths.output_most,
            lengths.total_most,
            fit.most,
        ),
        formats=(),
        groups=(),
    )
    return replace(plan, formats=_formats(plan), groups=_groups(plan))


def make_layout(config: LlamaConfig, block_tokens: int) -> _core.KvLayout:
    """The core's own arithmetic of blocks. ModelRefused for a head that it has no kernels for."""
    try:
        return _core.KvLayout(
            layers=config.layers,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            block_tokens=block_tokens,
        )
    except ValueError as error:
        raise ModelRefused(f"the KV layout: {error}") from None


def _check(question: Question) -> None:
    lengths, context = question.lengths, question.model.config.context_tokens
    if lengths.total_most > context:
        raise SettingRefused(
            f"prompt and output are {lengths.total_most} tokens together, and the context window "
            f"of {question.model.name} has {context}; plan for less"
        )
    running = question.settings.sequences_max
    if question.concurrency is not None and question.concurrency > running:
        raise SettingRefused(
            f"--concurrency {question.concurrency}: the server runs {running} sequences at once; "
            f"give --max-sequences {question.concurrency} too, and a --token-budget of as many"
        )


def _pool(question: Question, layout: _core.KvLayout, memory: Memory) -> Pool:
    """The pool that the settings ask for, or all that remains."""
    settings, context = question.settings, question.model.config.context_tokens
    if memory.left < layout.block_bytes:
        raise SettingRefused(
            f"of {memory.all} bytes of memory, weights take {memory.weights} and the server "
            f"{memory.process + memory.step}; that leaves no room for a KV block of "
            f"{layout.block_bytes} bytes; plan for more --memory, or for smaller weights"
        )
    blocks = min(memory.left // layout.block_bytes, _BLOCKS_MAX)
    if settings.kv_blocks is not None or settings.kv_bytes is not None:
        blocks = pool_blocks(settings, layout, context, memory.left)
    return Pool(layout, settings.kv_format, blocks, context)


def _default_blocks(
    settings: Settings, layout: _core.KvLayout, config: LlamaConfig, left: int
) -> int:
    """The pool of a server that is told no size; 0 if it would not start."""
    untold = settings.model_copy(update={"kv_blocks": None, "kv_bytes": None})
    try:
        return pool_blocks(untold, layout, config.context_tokens, left)
    except SettingRefused:
        return 0


def _step_bytes(model: PlannedModel, settings: Settings) -> int:
    """Memory of a step's matrices, float32, as the model takes it; and of the angles."""
    config = model.config
    queries, keys = config.query_heads * config.head_dim, config.kv_heads * config.head_dim
    columns = 2 * config.hidden + 2 * queries + 2 * keys + 3 * config.feed_forward
    floats = settings.token_budget * columns + settings.sequences_max * model.vocabulary
    return 4 * (floats + config.context_tokens * config.head_dim)


def _times(
    reaching: Reaching, sequences: int, prompt: int, output: int, context: int, fit: int
) -> Times:
    costs, budget = reaching.costs, reaching.token_budget
    prefill = costs.prefill(prompt, budget)
    return Times(
        decode=costs.decode(sequences, context),
        prefill=prefill,
        first_beside_seconds=costs.prefill(prompt, budget, sequences - 1, context).seconds,
        first_of_all_seconds=max(prefill.seconds, sequences * prefill.compute_seconds),
        tokens_per_second=costs.tokens_per_second_max(sequences, prompt, output, context, budget),
        concurrency=reaching.concurrency(prompt, output, context, fit),
        context=reaching.context(sequences, output),
    )


def _formats(plan: Plan) -> tuple[Alternative, ...]:
    """The pool with sequences in every KV format."""
    others = [name for name in _core.KV_FORMATS if name not in KNOWN_FORMATS]
    found = []
    for name in (*KNOWN_FORMATS, *others):
        if name not in _core.KV_FORMATS:
            heads = plan.config.kv_heads
            found.append(Alternative(name, heads, missing="not available in this build"))
            continue
        found.append(_alternative(plan, name, plan.question.model, plan.pool.blocks, name))
    return tuple(found)


def _groups(plan: Plan) -> tuple[Alternative, ...]:
    """As many bytes for weights and pool with other numbers of KV heads, all that divide."""
    config, model = plan.config, plan.question.model
    found = []
    for kv_heads in range(1, config.query_heads + 1):
        if config.query_heads % kv_heads != 0:
            continue
        name = {1: "MQA", config.query_heads: "MHA"}.get(kv_heads, "GQA")
        try:
            other = model.with_kv_heads(kv_heads)
        except ModelRefused as error:
            found.append(Alternative(name, kv_heads, missing=str(error)))
            continue
        layout = make_layout(other.config, plan.pool.layout.block_tokens)
        weights = other.weights(plan.question.settings.weights).bytes
        room = plan.pool.bytes + plan.memory.weights - weights
        blocks = max(0, room) // layout.block_bytes
        found.append(_alternative(plan, name, other, blocks, plan.pool.kv_format))
    return tuple(found)


def _alternative(
    plan: Plan, name: str, model: PlannedModel, blocks: int, kv_format: str
) -> Alternative:
    layout = make_layout(model.config, plan.pool.layout.block_tokens)
    pool = Pool(layout, kv_format, blocks, model.config.context_tokens)
    weights = model.weights(plan.question.settings.weights)
    token_bytes = layout.token_bytes(kv_format)
    costs = StepCosts.of(model.config, weights, token_bytes, plan.question.peaks)
    return Alternative(
        name=name,
        kv_heads=model.config.kv_heads,
        token_bytes=token_bytes,
        token_pool_bytes=layout.block_bytes / pool.slots_per_block,
        weight_bytes=weights.bytes,
        fit=Fit.of(pool, plan.question.lengths),
        decode_seconds=costs.decode(plan.sequences, plan.question.lengths.living).seconds,
    )
