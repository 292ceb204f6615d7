"""What is tried before anybody is served.

One token from a model, without a server: what `kvledger doctor` proves. And one prompt twice,
before a server begins: the second time must begin with what the first one left. And conversations,
through the chat template alone: what their next turns begin with.
"""

from __future__ import annotations

import queue
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import structlog

from kvledger import _core
from kvledger.engine import EndReason, Engine, Job, StepOutcome
from kvledger.kept_history import first_losses, told_history
from kvledger.sampling import Sampler, SamplingParameters
from kvledger.scopes import PrefixScopes
from kvledger.served_model import ServedModel, load
from kvledger.settings import Settings

_log = structlog.get_logger(__name__)

# Numbers that nobody else is ever given: of the first request, of a tenant, of a scope.
_FIRST_SEQUENCE = 2**63
TENANT = _core.SERVER_TENANTS
_SCOPE = 0
# How long the core may take to forget what was tried, in seconds.
_FORGET_SECONDS = 5.0


@dataclass(frozen=True)
class TriedModel:
    """What a model did that was loaded for a moment."""

    # The token that it computed; None if its output is unusable.
    token: int | None
    # What its chat template keeps of a conversation, in sentences; nothing if it has none.
    history: tuple[str, ...]


def try_model(settings: Settings) -> TriedModel:
    """Loads the model with the smallest useful pool and computes one token of a short prompt.

    Raises ModelRefused or SettingRefused.
    """
    small = settings.model_copy(update={"kv_blocks": 4, "kv_bytes": None})
    model = load(small)
    token = _one_token(small, model)
    return TriedModel(token, told_history(model.kept_turns, model.tokenizer))


def _one_token(small: Settings, model: ServedModel) -> int | None:
    outcomes: queue.SimpleQueue[StepOutcome | None] = queue.SimpleQueue()
    engine = Engine(
        model.core,
        model.llama,
        Sampler(small.sequences_max),
        publish=outcomes.put,
        on_death=lambda: outcomes.put(None),
    )
    engine.start()
    try:
        engine.submit(
            Job(
                sequence=1,
                tenant=0,
                prompt=model.tokenizer.encode_text("The capital of France is")[
                    : model.tokens_max - 1
                ],
                arrived_at=time.monotonic_ns(),
                max_tokens=1,
                sampling=SamplingParameters(),
            )
        )
        while (outcome := outcomes.get()) is not None:
            if outcome.report.tokens.size:
                return int(outcome.report.tokens[0]["token"])
            if outcome.report.receipts.size or outcome.report.refusals.size:
                return None
        return None
    finally:
        engine.stop()


def tell_history(settings: Settings, model: ServedModel) -> None:
    """Says in the log, once for each kind of conversation, what its next turn cannot reuse.

    Nothing where all is kept, or nothing is reused. It is looked at in any case: so that no client
    waits for it later.
    """
    losses = first_losses(model.kept_turns)
    if not settings.reuses_prefixes:
        return
    for turn in losses:
        _log.info(
            "chat_history_rewritten",
            conversation=turn.conversation,
            turn=turn.turn,
            turn_tokens=turn.tokens,
            kept_tokens=turn.kept,
            computed=model.tokenizer.decode(turn.computed_ids, with_control_tokens=True),
            written=model.tokenizer.decode(turn.written_ids, with_control_tokens=True),
        )


def warn_unless_reused(settings: Settings, model: ServedModel) -> None:
    """Says in the log if `--prefix-reuse` is on and nothing is found again, with the reason.

    The core must not be driven by anybody else yet. It costs a block of tokens, computed once.
    """
    if not settings.reuses_prefixes:
        return
    reason = _why_nothing_is_reused(settings, model)
    if reason is not None:
        _log.warning("prefix_reuse_finds_nothing", reason=reason)


def _why_nothing_is_reused(settings: Settings, model: ServedModel) -> str | None:
    slots = model.pool.slots_per_block
    if slots + 1 >= model.tokens_max:
        return (
            f"a block has {slots} tokens and prompts at most {model.tokens_max - 1}: whole blocks "
            f"are reused, and the last token never; lower --block-tokens, or raise --kv-bytes"
        )
    outcomes: queue.SimpleQueue[StepOutcome | None] = queue.SimpleQueue()
    engine = Engine(
        model.core,
        model.llama,
        Sampler(settings.sequences_max, settings.instruction_set),
        publish=outcomes.put,
        on_death=lambda: outcomes.put(None),
    )
    letters = model.tokenizer.encode_text("The same words, said twice. ")
    prompt = np.resize(letters, slots + 1).astype(np.int32)
    engine.start()
    try:
        for sequence in (_FIRST_SEQUENCE, _FIRST_SEQUENCE + 1):
            engine.submit(
                Job(
                    sequence=sequence,
                    tenant=TENANT,
                    prompt=prompt,
                    arrived_at=time.monotonic_ns(),
                    max_tokens=1,
                    sampling=SamplingParameters(),
                    scopes=PrefixScopes(own=_SCOPE),
                )
            )
            receipt = _next_receipt(outcomes)
            if receipt is None or receipt["end_reason"] == EndReason.FAILED:
                return "a prompt could not be computed; see the log"
        _forget(engine)
    finally:
        engine.stop()
    found = int(receipt["reused_own"])
    if found < slots:
        return f"a prompt of {slots + 1} tokens, sent twice, began with {found} of them"
    return None


def _next_receipt(outcomes: queue.SimpleQueue[StepOutcome | None]) -> Any:
    """The next receipt; None if the core refuses the request or the engine ends."""
    while (outcome := outcomes.get()) is not None:
        if outcome.report.receipts.size:
            return outcome.report.receipts[0]
        if outcome.report.refusals.size:
            return None
    return None


def _forget(engine: Engine) -> None:
    engine.purge([_SCOPE])
    deadline = time.monotonic() + _FORGET_SECONDS
    while engine.blocks["cached"] and time.monotonic() < deadline:
        time.sleep(0.001)
