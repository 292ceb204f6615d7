"""What a change would do to the steps: how long one takes, how many tokens a second come, how many
requests can be answered.

How long steps take is fitted to the interval (step_fit.py). A change of what a step computes is
another place on the same line; a change of the machine or of the KV format moves the line by what
it does to the floors. How many requests run at a time follows from how many are here: nobody can
decode who has not come. `kvledger diagnose --against FILE` says how a prediction turned out, and
docs/benchmarks.md how good they are over a set of changes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from kvledger.diagnosis.counts import DECODE, PREFILL, Counts
from kvledger.diagnosis.observation import Observation, Setup
from kvledger.diagnosis.step_fit import (
    PhaseFit,
    decode_floor,
    fit_phase,
)

# Requests that ended, from which an interval tells what one takes.
_ENDED_LEAST = 3
# Of the pool's blocks, those that can be live at a time: the last ones are seldom got.
_POOL_USABLE = 0.95

Kind = Literal[
    "more_sequences",
    "max_sequences",
    "token_budget",
    "kv_blocks",
    "threads",
    "kv_format",
    "replicas",
]


@dataclass(frozen=True)
class Change:
    """One thing that an operator could do."""

    kind: Kind
    value: int | str

    @property
    def words(self) -> str:
        """As people say it."""
        if self.kind == "more_sequences":
            return f"{self.value} more sequences at a time"
        if self.kind == "kv_format":
            return f"KV in {self.value}"
        if self.kind == "replicas":
            return f"{self.value} replicas, equal parts"
        return f"--{self.kind.replace('_', '-')} {self.value}"


@dataclass(frozen=True)
class Prediction:
    """What a change would come to."""

    change: Change
    helps: str  # "prefill", "decode", "both" or "none"
    decode_step_seconds: float | None  # on average
    tokens_per_second: float | None  # of all streams, while they decode
    prefill_tokens_per_second: float | None
    requests_per_second: float | None  # answered, if there are always enough
    longest_step_seconds: float | None  # one with as many prompt tokens as it may have
    sequences: int | None  # that fit, with the context of now
    caution: str = ""


@dataclass(frozen=True)
class Work:
    """What runs: the figures that a change changes."""

    decode: PhaseFit
    prefill: PhaseFit | None
    sequences: float  # that decode in a step
    context: float  # tokens before each token
    # Of a request, on average: tokens that are made in decode steps, prompt tokens that are
    # computed, the keys that these read, and the steps in which they are computed. None where too
    # few ended.
    request: Request | None
    chunk_most: float  # prompt tokens that a step has at most

    @property
    def decode_step(self) -> float:
        """Seconds, on average."""
        return self.decode.seconds(self.sequences, self.sequences * self.context)

    @property
    def prefill_rate(self) -> float | None:
        """Prompt tokens a second."""
        if self.prefill is None or self.request is None:
            return None
        seconds = self._prefill_seconds(self.prefill, self.request)
        return self.request.prompt / seconds if seconds > 0.0 else None

    @property
    def prompt_seconds(self) -> float:
        """Of steps, for one request's prompt."""
        if self.prefill is None or self.request is None:
            return 0.0
        return self._prefill_seconds(self.prefill, self.request)

    @property
    def requests_rate(self) -> float | None:
        """Requests a second while a step runs."""
        if self.request is None or self.sequences <= 0.0:
            return None
        seconds = self.request.output * self.decode_step / self.sequences + self.prompt_seconds
        return 1.0 / seconds if seconds > 0.0 else None

    @property
    def longest_step(self) -> float | None:
        """Seconds of a step in which all decode and a prompt has its most tokens."""
        if self.prefill is None:
            return None
        keys = self.chunk_most * (self.chunk_most + 1) / 2
        return self.decode_step + self.prefill.seconds(self.chunk_most, keys)

    @staticmethod
    def _prefill_seconds(fit: PhaseFit, request: Request) -> float:
        return fit.fixed * request.chunks + fit.token * request.prompt + fit.key * request.keys


@dataclass(frozen=True)
class Request:
    """See Work."""

    output: float
    prompt: float
    keys: float
    chunks: float


@dataclass(frozen=True)
class Crowd:
    """Requests in the core while a step runs, on average."""

    here: float
    running: float
    # Blocks of one that runs.
    blocks: float


@dataclass(frozen=True)
class Model:
    """What an interval says of the server."""

    setup: Setup
    work: Work
    crowd: Crowd
    # Of the steps' time, what kernels took; choosing tokens and bookkeeping are the rest.
    kernels_share: float
    # Of a decode step's kernels, the part in which memory is what binds.
    memory_share: float
    # Whether prompts are computed beside those who decode, and in chunks as long as these can bear.
    is_beside: bool
    is_stretched: bool

    @property
    def fits(self) -> float:
        """Sequences of the context of now that the pool holds."""
        return self.setup.blocks * self.setup.block_tokens / max(1.0, self.work.context)


def fit(seen: Observation, counts: Counts) -> Model | None:
    """The model of an interval; None where nobody decoded in it."""
    costs = seen.setup.costs
    decode = fit_phase(counts, DECODE, costs)
    if decode is None or seen.decode.tokens == 0:
        return None
    work = Work(
        decode=decode,
        prefill=fit_phase(counts, PREFILL, costs),
        sequences=seen.decode.tokens / seen.decode.steps,
        context=seen.decode.keys / seen.decode.tokens,
        request=_request(seen),
        chunk_most=_chunk_most(seen),
    )
    return Model(
        setup=seen.setup,
        work=work,
        crowd=_crowd(seen),
        kernels_share=min(1.0, seen.forward_seconds / seen.step_seconds)
        if seen.step_seconds
        else 1.0,
        memory_share=min(1.0, seen.decode.memory_share) if seen.setup.is_measured else 0.5,
        is_beside=_is_beside(seen),
        is_stretched=_is_stretched(seen),
    )


def _request(seen: Observation) -> Request | None:
    ended = seen.traffic.ended
    if ended < _ENDED_LEAST:
        return None
    return Request(
        output=seen.decode.tokens / ended,
        prompt=seen.prefill.tokens / ended,
        keys=seen.prefill.keys / ended,
        chunks=seen.prefill.steps / ended,
    )


def _chunk_most(seen: Observation) -> float:
    """Prompt tokens that a step may have: the budget, unless prompts are in smaller ones."""
    budget = float(seen.setup.token_budget)
    mean = seen.computed_prompt
    # Long prompts fill their steps, so if they do not, a limit in time is what binds.
    if mean > 2 * budget and seen.prefill.tokens_per_step < 0.5 * budget:
        return max(1.0, seen.prefill.tokens_per_step)
    return budget


def _is_beside(seen: Observation) -> bool:
    return seen.mixed_steps > 0.5 * seen.prefill.steps


def _is_stretched(seen: Observation) -> bool:
    most = min(float(seen.setup.token_budget), seen.computed_prompt)
    return _is_beside(seen) and seen.prefill.tokens_per_step < 0.8 * most


def _crowd(seen: Observation) -> Crowd:
    traffic, busy = seen.traffic, seen.step_seconds * 1e9
    if busy <= 0.0:
        return Crowd(0.0, 0.0, 0.0)
    here = max(0, traffic.open_time - traffic.held_time)
    running = max(0, here - traffic.waiting_time)
    live = seen.waterline * seen.setup.blocks * seen.seconds * 1e9
    return Crowd(here / busy, running / busy, live / running if running > 0 else 0.0)


# --- Changes ----------------------------------------------------------------------------------


def predict(
    model: Model, formats: Mapping[str, int], asked: tuple[Change, ...] = ()
) -> list[Prediction]:
    """What changes would do: those that were asked about first, then the usual ones.

    `formats` are bytes of a token by KV format that the build has.
    """
    changes = list(dict.fromkeys((*asked, *_usual(model, formats))))
    found = (predicted(model, change, formats) for change in changes)
    return [prediction for prediction in found if prediction is not None]


def _usual(model: Model, formats: Mapping[str, int]) -> list[Change]:
    setup = model.setup
    changes = [Change("more_sequences", 8), Change("kv_blocks", 2 * setup.blocks)]
    changes += [
        Change("token_budget", budget)
        for budget in (setup.token_budget // 2, setup.token_budget * 2)
        if budget >= 1
    ]
    changes += [Change("threads", threads) for threads in sorted(setup.by_threads)]
    changes += [Change("kv_format", name) for name in formats if name != setup.kv_format]
    return [*changes, Change("replicas", 2)]


def predicted(model: Model, change: Change, formats: Mapping[str, int]) -> Prediction | None:
    """What a change would do; None where nothing is known about it."""
    if isinstance(change.value, str):
        return _other_format(model, change, formats)
    if change.kind == "more_sequences":
        return _more(model, change, change.value)
    if change.kind == "max_sequences":
        return _places(model, change, change.value)
    if change.kind == "kv_blocks":
        return _pool(model, change, change.value)
    if change.kind == "token_budget":
        return _chunks(model, change, change.value)
    if change.kind == "threads":
        return _threads(model, change, change.value)
    if change.kind == "replicas":
        return _replicas(model, change, change.value)
    return None


def _told(change: Change, helps: str, work: Work, fits: float | None, caution: str) -> Prediction:
    return Prediction(
        change,
        helps,
        work.decode_step,
        work.sequences / work.decode_step,
        work.prefill_rate,
        work.requests_rate,
        work.longest_step,
        None if fits is None else math.floor(fits),
        caution,
    )


def _running(model: Model, most: int, blocks: int) -> float:
    """Sequences that run, with so many places and blocks and the requests of now."""
    crowd = model.crowd
    room = _POOL_USABLE * blocks / crowd.blocks if crowd.blocks > 0.0 else math.inf
    return min(crowd.here, float(most), room)


def _settled(model: Model, work: Work, running: float, slower: float = 1.0) -> Work:
    """`work` with as many sequences decoding as there will be of so many that run.

    Who runs computes its prompt or decodes. Prompts share what steps have for them, so they are a
    queue: who comes finds those that are in it and takes as much longer (mean value analysis, in
    Schweitzer's approximation of 1979). What one takes alone follows from how many are in it now;
    `slower` is how much longer that will be.
    """
    crowd, now = model.crowd, model.work
    rate = now.requests_rate
    if crowd.running <= 0.0 or rate is None:
        share = running / crowd.running if crowd.running > 0.0 else 1.0
        return replace(work, sequences=max(1.0, now.sequences * share))
    prompts = max(0.0, crowd.running - now.sequences)
    alone = slower * prompts / (1.0 + prompts * _others(crowd.running)) / rate

    def in_prompts(each: float) -> float:
        """Of `running`, those in their prompts, with so many requests a second."""
        left = 1.0 - each * alone * _others(running)
        return each * alone / left if left > 0.0 else math.inf

    # Beside those who decode prompts get no more of a step than it may be stretched by: if they
    # need more they queue, and no more decode, however many places there are.
    stretch = model.setup.step_stretch
    prompts_most = 1.0
    if stretch > 1.0 and model.is_beside:
        prompts_most = max((stretch - 1) / stretch, rate * now.prompt_seconds)
    settled = work
    for _ in range(3):  # chunks depend on who decodes, and who decodes on the chunks
        low, high = min(1.0, running), max(1.0, running)
        for _ in range(50):
            middle = (low + high) / 2
            tried = replace(settled, sequences=middle)
            told = tried.requests_rate or 0.0
            fits = (
                middle + in_prompts(told) < running and told * tried.prompt_seconds < prompts_most
            )
            low, high = (middle, high) if fits else (low, middle)
        settled = replace(
            settled, sequences=low, request=_stretched(model, work, low) or settled.request
        )
    return settled


def _others(running: float) -> float:
    """Of those that run, the share that one of them sees."""
    return max(0.0, running - 1.0) / running if running > 0.0 else 0.0


def _stretched(model: Model, work: Work, sequences: float) -> Request | None:
    """A request's chunks where a step with prompts may take so many times as long as decoding
    alone: the more decode, the longer they may be. None where something else limits them."""
    setup, request, fit = model.setup, work.request, work.prefill
    if request is None or fit is None or fit.token <= 0.0 or request.prompt <= 0.0:
        return None
    stretch = setup.step_stretch
    if stretch <= 1.0 or setup.tpot_target is not None or not model.is_stretched:
        return None

    def chunk(decoding: float) -> float:
        step = work.decode.seconds(decoding, decoding * work.context)
        room = ((stretch - 1) * step - fit.fixed) / fit.token
        return min(max(1.0, room), work.chunk_most, request.prompt)

    longer = chunk(sequences) / chunk(model.work.sequences)
    return replace(request, chunks=max(1.0, request.chunks / longer))


def _more(model: Model, change: Change, more: int) -> Prediction:
    sequences = model.work.sequences + more
    caution = ""
    if sequences > model.fits:
        caution = f"only {model.fits:.0f} of this context fit into the pool"
    return _told(change, "decode", replace(model.work, sequences=sequences), model.fits, caution)


def _places(model: Model, change: Change, most: int) -> Prediction:
    running = _running(model, most, model.setup.blocks)
    caution = ""
    if running < 0.9 * most:
        caution = f"of the requests of now {running:.1f} run at a time"
    return _told(change, "decode", _settled(model, model.work, running), model.fits, caution)


def _pool(model: Model, change: Change, blocks: int) -> Prediction:
    running = _running(model, model.setup.sequences_max, blocks)
    is_same = abs(running - model.crowd.running) < 0.1 * model.crowd.running
    return _told(
        change,
        "none" if is_same else "both",
        model.work if is_same else _settled(model, model.work, running),
        model.fits * blocks / model.setup.blocks,
        "the requests of now would not use it; it helps where requests wait for blocks or lose them"
        if is_same
        else "what fewer lost blocks save comes on top",
    )


def _chunks(model: Model, change: Change, budget: int) -> Prediction:
    work, now = model.work, model.setup.token_budget
    most = min(float(budget), work.chunk_most) if work.chunk_most < now else float(budget)
    caution = "decode steps alone stay as they are; the longest step changes with the chunk"
    changed, request = replace(work, chunk_most=most), work.request
    if most == work.chunk_most:
        caution = "prompts are in smaller chunks already, because of a limit in time"
    elif request is not None and request.prompt > 0.0 and request.chunks > 0.0:
        # As many more or fewer as the same prompt has alone.
        had, gets = (math.ceil(request.prompt / size) for size in (work.chunk_most, most))
        chunks = request.chunks * gets / had
        changed = replace(changed, request=replace(request, chunks=chunks))
        # Each chunk waits for those who decode beside it.
        slower = (chunks * work.decode_step + changed.prompt_seconds) / (
            request.chunks * work.decode_step + work.prompt_seconds
        )
        changed = _settled(model, changed, model.crowd.running, slower)
    return _told(change, "prefill" if budget > now else "none", changed, None, caution)


def _threads(model: Model, change: Change, threads: int) -> Prediction | None:
    setup = model.setup
    other = setup.by_threads.get(threads)
    if other is None or not setup.is_measured:
        return None
    peaks = setup.costs.peaks
    arithmetic = peaks.operations("f32") / other.operations("f32")
    reading = peaks.read_bytes_per_second / other.read_bytes_per_second
    # What memory does not bind goes with the arithmetic, and so does what reads less than it could.
    memory = model.memory_share
    kernels = model.kernels_share
    decode = kernels * (memory * reading + (1 - memory) * arithmetic) + 1 - kernels
    prefill = kernels * arithmetic + 1 - kernels
    work = model.work
    changed = replace(
        work,
        decode=work.decode.times(decode, decode, decode),
        prefill=work.prefill.times(prefill, prefill, prefill) if work.prefill else None,
    )
    helps = "both" if threads > setup.threads else "none"
    return _told(change, helps, changed, model.fits, "")


def _replicas(model: Model, change: Change, replicas: int) -> Prediction:
    part = max(1.0, model.work.sequences / replicas)  # of a step that runs somebody decodes
    work = replace(model.work, sequences=part)
    one = _told(change, "both", work, model.fits, "the figures are of all replicas together")

    def all_of(value: float | None) -> float | None:
        return None if value is None else replicas * value

    busy = model.work.sequences >= replicas
    return replace(
        one,
        tokens_per_second=all_of(one.tokens_per_second) if busy else None,
        prefill_tokens_per_second=all_of(one.prefill_tokens_per_second),
        requests_per_second=all_of(one.requests_per_second) if busy else None,
        sequences=math.floor(replicas * model.fits),
    )


def _other_format(model: Model, change: Change, formats: Mapping[str, int]) -> Prediction | None:
    assert isinstance(change.value, str)
    token_bytes = formats.get(change.value)
    if token_bytes is None:
        return None
    costs = model.setup.costs
    other = replace(costs, kv_token_bytes=token_bytes)
    before, after = decode_floor(costs), decode_floor(other)
    work = model.work
    changed = replace(
        work,
        decode=work.decode.times(1.0, 1.0, after.key / before.key),
    )
    less = token_bytes < costs.kv_token_bytes
    return _told(
        change,
        "decode" if less else "none",
        changed,
        model.fits * costs.kv_token_bytes / token_bytes,
        "what it costs in accuracy is not said here",
    )
