"""What a change would do to the steps: how long one takes, and how many tokens a second come.

A step takes longer than its floor (planning/floors.py) by what kernels, bookkeeping and the machine
add. That factor is taken from the interval itself, apart for each phase, and held: what a change
does is what it does to the floor. Where batches of several sizes were seen, how the time grows with
the batch is taken from them instead of from the floor. Good for changes of a few times the present;
what they turned out to be says how good (`kvledger diagnose --against`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kvledger.diagnosis.counts import Counts
from kvledger.diagnosis.observation import Observation, Setup
from kvledger.planning.floors import StepCosts


@dataclass(frozen=True)
class Prediction:
    """What a change would come to."""

    change: str  # in words
    helps: str  # "prefill", "decode", "both" or "none"
    decode_step_seconds: float | None  # of a step of decoding alone
    tokens_per_second: float | None  # of all streams, while they decode
    prefill_tokens_per_second: float | None
    sequences: int | None  # that fit, with the context of now
    caution: str = ""


@dataclass(frozen=True)
class Model:
    """How long steps take here: fitted to an interval."""

    setup: Setup
    sequences: float  # decoding, now
    context: float  # tokens of each
    # Seconds of a decode step by its sequences: a + b x sequences.
    fixed: float
    each: float
    # What a prompt token takes, over its floor.
    prefill_factor: float | None
    prefill_tokens: float  # in a step, now

    def decode_step(self, sequences: float) -> float:
        """Seconds of a step in which so many decode."""
        return self.fixed + self.each * sequences

    def prefill_rate(self, costs: StepCosts, chunk: int) -> float | None:
        """Prompt tokens a second, in steps of so many."""
        if self.prefill_factor is None or chunk < 1:
            return None
        return chunk / (self.prefill_factor * costs.prefill(chunk, chunk).seconds)


def fit(seen: Observation, counts: Counts) -> Model | None:
    """The model of an interval; None where nobody decoded in it."""
    setup, costs = seen.setup, seen.setup.costs
    if seen.decode.tokens == 0 or seen.decode.steps == 0:
        return None
    sequences = seen.decode.tokens / seen.decode.steps
    context = seen.decode.keys / seen.decode.tokens
    now = seen.decode.seconds / seen.decode.steps
    lines = _batch_line(counts)
    floor = costs.decode(max(1, round(sequences)), context)
    if lines is not None and lines[1] > 0:
        each = lines[1]
    else:
        one, two = costs.decode(1, context).seconds, costs.decode(2, context).seconds
        each = (two - one) * now / floor.seconds
    each = min(each, now / sequences)
    prefill = seen.prefill
    factor = None
    if prefill.tokens > 0 and prefill.seconds > 0:
        chunk = max(1, round(prefill.tokens_per_step))
        alone = costs.prefill(chunk, chunk).seconds * prefill.tokens / chunk
        factor = prefill.seconds / alone if alone > 0 else None
    return Model(
        setup=setup,
        sequences=sequences,
        context=context,
        fixed=now - each * sequences,
        each=each,
        prefill_factor=factor,
        prefill_tokens=prefill.tokens_per_step,
    )


def _batch_line(counts: Counts) -> tuple[float, float] | None:
    """How a decode step's seconds grow with its sequences, over the classes seen; weighted."""
    points = []
    for row in counts.batches:
        steps, nanoseconds, tokens = (int(value) for value in row[:3])
        if steps >= 10:
            points.append((tokens / steps, nanoseconds / steps / 1e9, steps))
    if len(points) < 3:
        return None
    sizes, seconds, weights = (
        np.array(column, dtype=np.float64) for column in zip(*points, strict=True)
    )
    slope, fixed = np.polyfit(sizes, seconds, 1, w=np.sqrt(weights))
    return float(fixed), float(slope)


def predict(model: Model, seen: Observation, formats: dict[str, int]) -> list[Prediction]:
    """What changes would do; `formats` are bytes of a token by KV format that the build has."""
    setup = model.setup
    fits = setup.blocks * setup.block_tokens / max(1.0, model.context)
    now = model.decode_step(model.sequences)
    rate = model.prefill_rate(setup.costs, max(1, round(model.prefill_tokens)))
    half = max(1.0, model.sequences / 2)  # of a step that runs somebody decodes
    return [
        _more_sequences(model, fits, rate),
        _larger_pool(model, fits, now, rate),
        *_chunks(model, now, rate),
        *_formats(model, formats, fits, rate),
        Prediction(
            "one more replica, with half of the traffic each",
            "both",
            model.decode_step(half),
            2 * half / model.decode_step(half) if model.sequences >= 2 else None,
            2 * rate if rate is not None else None,
            round(2 * fits),
        ),
    ]


def _more_sequences(model: Model, fits: float, rate: float | None) -> Prediction:
    more = model.sequences + 8
    step = model.decode_step(more)
    caution = "" if more <= fits else f"only {fits:.0f} of this context fit into the pool"
    return Prediction(
        f"8 more sequences at a time ({more:.0f})",
        "decode",
        step,
        more / step,
        rate,
        round(fits),
        caution,
    )


def _larger_pool(model: Model, fits: float, now: float, rate: float | None) -> Prediction:
    return Prediction(
        "a KV pool of twice the size",
        "both",
        now,
        model.sequences / now,
        rate,
        round(2 * fits),
        "steps stay as they are; it helps where requests wait for blocks or lose them",
    )


def _chunks(model: Model, now: float, rate: float | None) -> list[Prediction]:
    found = []
    for word, chunk in (("half", model.prefill_tokens / 2), ("twice", model.prefill_tokens * 2)):
        tokens = max(1, min(round(chunk), model.setup.token_budget))
        if rate is None or tokens == round(model.prefill_tokens):
            continue
        found.append(
            Prediction(
                f"prompts in chunks of {word} the size ({tokens} tokens)",
                "prefill",
                now,
                model.sequences / now,
                model.prefill_rate(model.setup.costs, tokens),
                None,
                "decode steps alone stay as they are; steps with prompts change with the chunk",
            )
        )
    return found


def _formats(
    model: Model, formats: dict[str, int], fits: float, rate: float | None
) -> list[Prediction]:
    costs = model.setup.costs
    sequences = max(1, round(model.sequences))
    before = costs.decode(sequences, model.context).seconds
    found = []
    for name, token_bytes in formats.items():
        if token_bytes == costs.kv_token_bytes:
            continue
        other = replace(costs, kv_token_bytes=token_bytes)
        step = model.decode_step(model.sequences)
        step *= other.decode(sequences, model.context).seconds / before
        found.append(
            Prediction(
                f"KV in {name}",
                "decode",
                step,
                model.sequences / step,
                rate,
                round(fits * costs.kv_token_bytes / token_bytes),
                "what it costs in accuracy is not said here",
            )
        )
    return found
