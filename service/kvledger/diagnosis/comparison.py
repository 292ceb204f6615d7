"""Two diagnoses side by side: what is different now, and how predictions turned out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvledger.diagnosis.findings import percent
from kvledger.diagnosis.predictions import Change

# What differs by less than this factor is the same.
_SAME = 1.25
# Shares that differ by less than this are the same.
_SAME_SHARE = 0.05
# Sequences that decode differ by no more than this share from what a prediction is about.
_SAME_SEQUENCES = 0.1

# Settings that a Change can be about, as they are called in both.
CHANGEABLE = ("max_sequences", "token_budget", "kv_blocks", "threads", "kv_format")

# Figures of a prediction that an interval has as well.
FIGURES = (
    "decode_step_seconds",
    "tokens_per_second",
    "prefill_tokens_per_second",
    "requests_per_second",
)

# What differs without being an option of the server.
_NOT_OPTIONS = {
    "model": "The model is",
    "fingerprint": "Its weights are",
    "version": "The server's version is",
    "processors": "Processors are",
}

Value = int | float | str | bool | None


@dataclass(frozen=True)
class Picture:
    """What is compared of a diagnosis."""

    settings: Mapping[str, Value]
    # By the words that say what they are: the value, and its unit; of rates those that are known.
    rates: Mapping[str, tuple[float, str]]
    shares: Mapping[str, tuple[float, str]]
    sequences: float  # that decode in a step
    figures: Mapping[str, float]  # those of FIGURES that are known
    predictions: Sequence[tuple[Change, Mapping[str, float]]]


@dataclass(frozen=True)
class Outcome:
    """How a prediction turned out: by figure, what was predicted and what came."""

    change: Change
    figures: Mapping[str, tuple[float, float]]


def changes(now: Picture, before: Picture) -> list[str]:
    """What is different now, in sentences: settings first, then traffic, then what came of it."""
    said = [
        f"{_NOT_OPTIONS.get(name) or _option(name)} {_shown(new)}, not {_shown(old)}."
        for name, new, old in _differing(now, before)
    ]
    for what, (new, unit) in now.rates.items():
        old, _ = before.rates.get(what, (None, unit))
        if old is None:
            continue  # nothing was counted of it then
        if max(new, old) > 0 and (min(new, old) <= 0 or max(new, old) / min(new, old) > _SAME):
            said.append(f"{what} {new:.3g} {unit}, not {old:.3g}.")
    for what, (new, unit) in now.shares.items():
        old = before.shares[what][0]
        if abs(new - old) > _SAME_SHARE:
            said.append(f"{what} {percent(new)} {unit}, not {percent(old)}.")
    return said or ["Nothing that is counted differs by a quarter."]


def outcomes(now: Picture, before: Picture) -> list[Outcome]:
    """How those predictions of `before` turned out that are about what was changed since.

    A prediction is about one change: where several settings differ, none has turned out.
    """
    differing = _differing(now, before)
    if len(differing) > 1:
        return []
    found = []
    for change, predicted in before.predictions:
        if differing:
            name, value, _ = differing[0]
            is_it = change.kind == name and change.value == value
        else:
            is_it = change.kind == "more_sequences" and _has(now, before, int(change.value))
        figures = {
            name: (predicted[name], now.figures[name])
            for name in FIGURES
            if name in predicted and name in now.figures
        }
        if is_it and figures:
            found.append(Outcome(change, figures))
    return found


def _has(now: Picture, before: Picture, more: int) -> bool:
    """Whether as many more sequences decode at a time."""
    wanted = before.sequences + more
    return abs(now.sequences - wanted) <= _SAME_SEQUENCES * wanted


def _differing(now: Picture, before: Picture) -> list[tuple[str, Value, Value]]:
    return list(_differences(now.settings, before.settings))


def _differences(
    now: Mapping[str, Value], before: Mapping[str, Value]
) -> Iterator[tuple[str, Value, Value]]:
    for name, value in now.items():
        if before.get(name) != value:
            yield name, value, before.get(name)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')} is"


def _shown(value: Value) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)
