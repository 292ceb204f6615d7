"""A model made ready to serve: files, tokenizer, weights, KV pool and core engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import structlog

from kvledger import _core
from kvledger.books.process_memory import LoadedMemory
from kvledger.engine import CoreEngine, make_core
from kvledger.errors import SettingRefused
from kvledger.kept_history import KeptTurn, kept_turns
from kvledger.memory import memory_available, resident
from kvledger.models.config import LlamaConfig, WeightsMode
from kvledger.models.llama import Llama, load_weights
from kvledger.models.opening import open_model
from kvledger.ops import Ops, make_ops
from kvledger.planning.floors import ModelWork
from kvledger.scopes.keys import KvIdentity
from kvledger.settings import Settings
from kvledger.tenants.shares import PoolShape
from kvledger.tokenizer import Tokenizer

_log = structlog.get_logger(__name__)

# The part of free memory that the KV pool takes unless told otherwise.
_DEFAULT_SHARE = 4


@dataclass(frozen=True)
class ServedModel:
    """The model of this process."""

    id: str
    fingerprint: str  # SHA-256 of the weight files
    config: LlamaConfig
    tokenizer: Tokenizer
    weights_mode: WeightsMode
    weight_bytes: int
    layout: _core.KvLayout
    kv_format: str
    blocks: int
    # Most tokens of a sequence: the context window, or one more than the pool has slots.
    tokens_max: int
    core: CoreEngine
    llama: Llama
    memory: LoadedMemory  # what loading it took
    work: ModelWork  # of its steps

    @cached_property
    def kept_turns(self) -> tuple[KeptTurn, ...]:
        """What the chat template keeps of earlier turns; the first time takes some 50 ms."""
        return kept_turns(self.tokenizer)

    @property
    def kv_identity(self) -> KvIdentity:
        """All that keys and values depend on besides their tokens; no adapter yet."""
        return KvIdentity(
            model=self.fingerprint,
            config=f"{self.config!r}, weights {self.weights_mode}",
            kv_format=self.kv_format,
        )

    @property
    def pool(self) -> PoolShape:
        """What tenants share."""
        slots = self.layout.slots_per_block(self.kv_format)
        return PoolShape(self.blocks, self.layout.block_bytes, slots)

    def saved_by_format(self, held: int) -> int:
        """Block-time that keys and values would have been held more as float32, which is what they
        are computed in."""
        slots = self.layout.slots_per_block(self.kv_format)
        plain = self.layout.slots_per_block("f32")
        return held * (slots - plain) // plain

    def answers_to(self, name: str) -> bool:
        """Whether a request that names this model, or none, is meant for it."""
        return name in ("", self.id)


def load(settings: Settings, say: Callable[[str], None] = lambda line: None) -> ServedModel:
    """Loads everything; raises ModelRefused or SettingRefused, each in one sentence."""
    started, before = time.monotonic(), resident().own
    ops = make_ops(
        settings.device, settings.kernels, settings.kernel_threads, settings.instruction_set
    )
    with open_model(settings.model, settings.download, say) as opened:
        config, tokenizer = opened.config, opened.tokenizer
        say(f"loading {opened.where.name}: {config.layers} layers, weights {settings.weights}")
        weights = load_weights(
            opened.tensors,
            config,
            tokenizer.vocabulary_size,
            ops,
            settings.weights,
            _progress(say),
        )
    name, fingerprint, tokenizer_bytes = opened.id, opened.fingerprint, opened.tokenizer_bytes
    del opened  # a GGUF file stands in memory as long as its tensors can be asked for
    layout = _core.KvLayout(
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        block_tokens=settings.block_tokens,
    )
    blocks = pool_blocks(settings, layout, config.context_tokens, memory_available())
    say(f"taking {blocks * layout.block_bytes / 1e9:.2f} GB of memory for {blocks} KV blocks")
    try:
        memory = _core.KvMemory(layout, settings.kv_format, blocks)
    except MemoryError:
        raise SettingRefused(
            f"the system has no {blocks * layout.block_bytes} bytes for the KV pool; "
            f"lower --kv-bytes or --kv-blocks"
        ) from None
    core = make_core(
        blocks=blocks,
        slots_per_block=layout.slots_per_block(settings.kv_format),
        context_tokens=config.context_tokens,
        token_budget=settings.token_budget,
        sequences_max=settings.sequences_max,
        end_of_text=tokenizer.eos_ids,
        priority_aging=settings.priority_aging,
        tpot_target=settings.tpot_target,
        step_stretch=settings.step_stretch,
        prefill_step=settings.prefill_step,
        prefix_reuse=settings.reuses_prefixes,
        cost_growth=config.cost_growth,
    )
    llama = Llama(config, weights, ops, memory, settings.token_budget, core.sequence_tokens_max)
    model = ServedModel(
        id=name,
        fingerprint=fingerprint,
        config=config,
        tokenizer=tokenizer,
        weights_mode=settings.weights,
        weight_bytes=weights.bytes,
        layout=layout,
        kv_format=settings.kv_format,
        blocks=blocks,
        tokens_max=core.sequence_tokens_max,
        core=core,
        llama=llama,
        memory=LoadedMemory(before, resident().own, tokenizer_bytes),
        work=ModelWork.of_model(config, weights, layout.token_bytes(settings.kv_format)),
    )
    _log_loaded(model, ops, time.monotonic() - started)
    return model


def pool_blocks(
    settings: Settings, layout: _core.KvLayout, context_tokens: int, available: int
) -> int:
    """Blocks of the KV pool, with `available` bytes of memory free. Raises SettingRefused."""
    block = layout.block_bytes
    if settings.kv_blocks is not None:
        blocks, said = settings.kv_blocks, f"--kv-blocks {settings.kv_blocks}"
    elif settings.kv_bytes is not None:
        blocks, said = settings.kv_bytes // block, f"--kv-bytes {settings.kv_bytes}"
        if blocks < 1:
            raise SettingRefused(f"{said} is less than one block, {block} bytes")
    else:
        slots = layout.slots_per_block(settings.kv_format)
        useful = settings.sequences_max * -(-(context_tokens - 1) // slots)
        blocks, said = min(useful, available // _DEFAULT_SHARE // block), "the default KV pool"
        if blocks < 1:
            raise SettingRefused(
                f"{available} bytes of memory are free; a quarter of it holds no block of "
                f"{block} bytes; free some, or set --kv-blocks"
            )
    if blocks * block > available:
        raise SettingRefused(
            f"{said} takes {blocks * block} bytes, and {available} are free; lower it"
        )
    return blocks


def _progress(say: Callable[[str], None]) -> Callable[[int, int], None]:
    """Says how far loading is, a line for every tenth."""
    told = 0

    def progress(done: int, total: int) -> None:
        nonlocal told
        tenths = 10 * done // total
        if tenths > told:
            told = tenths
            say(f"loaded {done} of {total} layers")

    return progress


def _log_loaded(model: ServedModel, ops: Ops, seconds: float) -> None:
    slots = model.layout.slots_per_block(model.kv_format)
    _log.info(
        "model_loaded",
        model=model.id,
        fingerprint=model.fingerprint[:16],
        kernels=ops.description,
        weights=model.weights_mode,
        weight_mb=round(model.weight_bytes / 1e6, 1),
        kv_format=model.kv_format,
        kv_blocks=model.blocks,
        kv_block_bytes=model.layout.block_bytes,
        kv_mb=round(model.blocks * model.layout.block_bytes / 1e6, 1),
        kv_tokens=model.blocks * slots,
        sequence_tokens_max=model.tokens_max,
        seconds=round(seconds, 2),
    )
