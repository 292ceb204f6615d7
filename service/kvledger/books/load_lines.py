"""The lines of load in the files of --books: what steps did since the line before, and who waited.

Counts are exact. Durations of steps stand in buckets: `{"23": 12}` says that 12 steps took at most
2^(16 + 23/4) nanoseconds and more than the bucket before; bucket 81 has no bound
(core/step_books.h). A line covers `since` to `elapsed`; one that could not be kept leaves its time
to the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from kvledger.books.lines import are_counts, timestamp

if TYPE_CHECKING:  # readers of the lines need no engine, which takes seconds to import
    from kvledger.diagnosis.counts import Counts, Counts64
    from kvledger.diagnosis.observation import PhaseFigures
    from kvledger.diagnosis.traffic import Crowd

# In the order of the core's rows.
PHASES = ("decode", "prefill")
MIXTURES = ("decode", "prefill", "both")
PREEMPTIONS = ("for_another", "for_itself", "paused")
WAITS = ("place", "memory", "share", "turn")
FORECAST = ("steps", "expected", "taken", "off")
BUCKETS = 82
# A line's buckets of one mixture, and of one class of batches: what is shorter than those that are
# kept is counted in the first of them, so that a line stays small and its tail is right.
_MIXTURE_BUCKETS = 24
_BATCH_BUCKETS = 8

_STEPS = ("steps", "time", "tokens")
_PHASE = (*_STEPS, "keys", "sequences", "weight_bytes", "kv_bytes", "operations")
_TIMES = ("since", "elapsed", "step_time", "forward_time", "sampling_time")
_REQUESTS = ("came", "ended", "open", "waiting", "held", "sequences_running")
_REQUEST_TIMES = ("open_time", "waiting_time", "held_time", "delayed_time")
_MOST = 1 << 63


@dataclass(frozen=True)
class Load:
    """What was counted until one moment, and who is here at it."""

    counts: Counts
    crowd: Crowd
    sequences_running: int


def load_line(
    when: datetime, started: int, before: Counts, now: Load, figures: Mapping[str, PhaseFigures]
) -> dict[str, object]:
    """What came between two moments.

    `started` is when the replica began to keep its books, as time.monotonic_ns(); `figures` are of
    both phases in between.
    """
    counts = now.counts.since(before)
    return {
        "kind": "load",
        "at": timestamp(when),
        "since": before.at - started,
        "elapsed": now.counts.at - started,
        "step_time": counts.engine.steps,
        "forward_time": counts.engine.forward,
        "sampling_time": counts.engine.sampling,
        "phases": {
            name: dict(zip(_PHASE, row.tolist(), strict=False))
            | {
                "weight_bytes": figures[name].weight_bytes,
                "kv_bytes": figures[name].kv_bytes,
                "operations": round(figures[name].operations),
            }
            for name, row in zip(PHASES, counts.phases, strict=True)
        },
        "mixtures": {
            name: _steps(row, _MIXTURE_BUCKETS)
            for name, row in zip(MIXTURES, counts.mixtures, strict=True)
            if row[0]
        },
        "batches": {
            str(1 << number): _steps(row, _BATCH_BUCKETS)
            for number, row in enumerate(counts.batches)
            if row[0]
        },
        "forecast": dict(zip(FORECAST, counts.forecast.tolist(), strict=True)),
        "preemptions": dict(zip(PREEMPTIONS, counts.preemptions.tolist(), strict=True)),
        "waited": dict(zip(WAITS, counts.waited.tolist(), strict=True)),
        "requests": _requests(now, counts),
        "reusable_tokens": counts.traffic.reusable_tokens,
    }


def _requests(now: Load, counts: Counts) -> dict[str, object]:
    traffic = counts.traffic
    return {
        "came": traffic.requests,
        "ended": traffic.ended,
        "refused": dict(+traffic.refused),
        "open": now.crowd.open,
        "waiting": now.crowd.waiting,
        "held": now.crowd.held,
        "sequences_running": now.sequences_running,
        **{name: getattr(traffic, name) for name in _REQUEST_TIMES},
    }


def _steps(row: Counts64, buckets: int) -> dict[str, object]:
    values = row.tolist()
    return {
        **dict(zip(_STEPS, values, strict=False)),
        "durations": _sparse(values[len(_STEPS) :], buckets),
    }


def _sparse(durations: list[int], most: int) -> dict[str, int]:
    """The buckets that have any, the `most` longest; shorter steps are in the first of those."""
    filled = [(bucket, count) for bucket, count in enumerate(durations) if count]
    shorter, kept = filled[:-most], filled[-most:]
    sparse = {str(bucket): count for bucket, count in kept}
    if shorter:
        sparse[str(kept[0][0])] += sum(count for _, count in shorter)
    return sparse


def is_whole(line: Mapping[str, Any]) -> bool:
    """Whether a line of load says all that `load_line` does, as such numbers."""
    try:
        return (
            _are(line, (*_TIMES, "reusable_tokens"))
            and line["since"] <= line["elapsed"]
            and all(_are(line["phases"][name], _PHASE) for name in PHASES)
            and _are(line["forecast"], FORECAST)
            and _are(line["preemptions"], PREEMPTIONS)
            and _are(line["waited"], WAITS)
            and _are(line["requests"], (*_REQUESTS, *_REQUEST_TIMES))
            and _are(line["requests"]["refused"], tuple(line["requests"]["refused"]))
            and set(line["mixtures"]) <= set(MIXTURES)
            and all(1 <= int(size) <= 1 << 12 for size in line["batches"])
            and all(
                _are(row, _STEPS) and _are_durations(row["durations"], row["steps"])
                for rows in (line["mixtures"], line["batches"])
                for row in rows.values()
            )
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return False


def _are(values: Mapping[str, Any], names: tuple[str, ...]) -> bool:
    return (
        isinstance(values, dict)
        and are_counts(values, names)
        and all(values[name] < _MOST for name in names)
    )


def _are_durations(durations: Mapping[str, Any], steps: int) -> bool:
    return (
        _are(durations, tuple(durations))
        and all(0 <= int(bucket) < BUCKETS for bucket in durations)
        and sum(durations.values()) == steps
    )
