"""Metrics of the engine's steps: what each phase took, read and computed, and how steps lasted.

All of it is read from the core's books when somebody asks (core/step_books.h), so a step costs
nothing more. What only the counts of an interval can tell is worked out from the difference to the
last look and added up: such counters are exact in what they count and estimates in how they are
shared out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvledger import _core
from kvledger.metrics.clock import BooksClock
from kvledger.metrics.families import counter, gauge, histogram
from kvledger.planning.floors import ModelWork

Counts64 = npt.NDArray[np.int64]

# In the order of the core's rows.
PHASES = ("decode", "prefill")
MIXTURES = ("decode", "prefill", "both")
PREEMPTED = ("for_another", "for_itself", "paused")
WAITS = ("place", "memory", "share", "turn")
_DECODE, _PREFILL = 0, 1
_PREFILL_ONLY, _BOTH = 1, 2
# Columns of phases; mixtures and batches have the first three.
_STEPS, _NANOSECONDS, _TOKENS, _KEYS, _SEQUENCES = range(5)
# The first column of durations in rows of mixtures and batches.
_DURATIONS = 3
# Of the core's buckets, a quarter of an octave each, so many make one of a histogram.
_PER_OCTAVE = 4
_BOUNDS = _core.StepBooks.bounds / 1e9  # seconds
OCTAVES: Sequence[float] = (_BOUNDS[::_PER_OCTAVE]).tolist()
# Classes of batches that the core tells apart, the last of all that are larger.
_CLASSES_MAX = 13

_OF_PHASES = (
    ("steps", _STEPS, 1, "Steps that had this phase; a step can have both."),
    (
        "seconds",
        _NANOSECONDS,
        1e9,
        "Time of steps by phase; of a step with both, decoding has what it was expected to take "
        "alone.",
    ),
    ("tokens", _TOKENS, 1, "Tokens that steps computed, those computed again after a preemption."),
    ("keys", _KEYS, 1, "Keys that tokens attended to, one for each token before it and itself."),
    ("sequences", _SEQUENCES, 1, "Sequences in steps, counted in each step."),
)
_OF_FORECASTS = (
    ("steps", 1, "Steps whose time was forecast."),
    ("expected_seconds", 1e9, "Time that these steps were expected to take."),
    ("taken_seconds", 1e9, "Time that these steps took."),
    ("error_seconds", 1e9, "How much more or less than expected each step took, added up."),
)


@dataclass(frozen=True)
class StepCounts:
    """The core's books at one moment, as its bindings describe their rows."""

    phases: Counts64
    mixtures: Counts64
    batches: Counts64
    forecast: Counts64
    preemptions: Counts64
    waited: Counts64

    @classmethod
    def of(cls, books: _core.StepBooks) -> StepCounts:
        """As they are now; each count of some recent moment."""
        return cls(
            books.phases,
            books.mixtures,
            books.batches,
            books.forecast,
            books.preemptions,
            books.waited,
        )

    def since(self, before: StepCounts) -> StepCounts:
        """What came between."""
        return StepCounts(
            *(now - then for now, then in zip(_parts(self), _parts(before), strict=True))
        )


def _parts(counts: StepCounts) -> Iterator[Counts64]:
    yield from vars(counts).values()


class StepMetrics(Collector):
    """Families about steps. Any thread may collect."""

    def __init__(
        self,
        books: Callable[[], _core.StepBooks],
        work: ModelWork,
        sequences_max: int,
        gap_target: float,
        clock: BooksClock,
    ) -> None:
        """`work` is the model's; `gap_target` the seconds in which each token should follow.

        Steps count from here on: whoever tried the core before is no client.
        """
        self._books = books
        self._work = work
        self._clock = clock
        self._classes = batch_classes(sequences_max)
        self._lock = threading.Lock()
        self._start = self._last = StepCounts.of(books())
        self._prefill_kv_bytes = 0.0
        # Output tokens of decode steps, by the bucket of the step's duration, and their time.
        self._gaps = np.zeros(len(_BOUNDS) + 1)
        self._gap_seconds = 0.0
        # Output tokens of steps with prompts too that are not in the gaps yet.
        self._beside_prompts = 0
        # Only whole buckets can be counted.
        self._buckets_in_time = int(np.searchsorted(_BOUNDS, gap_target, side="right"))

    @property
    def gap_target(self) -> float:
        """The target, rounded down to what can be counted; seconds, 0 if it is below all."""
        return float(_BOUNDS[self._buckets_in_time - 1]) if self._buckets_in_time else 0.0

    def describe(self) -> Iterable[Metric]:
        """Nothing: names cannot clash with others, and registering looks at no books."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """The families now."""
        with self._clock.scraping():
            counts = self._look()
            return [
                *self._of_phases(counts),
                *self._of_durations(counts),
                *_of_forecast(counts),
                counter(
                    "kvledger_preemptions",
                    "Sequences that lost their blocks: another one needed room and came before; "
                    "nobody came behind it when it needed room; it was paused when another did.",
                    ["reason"],
                    {
                        (reason,): int(count)
                        for reason, count in zip(PREEMPTED, counts.preemptions, strict=True)
                    },
                ),
                counter(
                    "kvledger_waited_step_seconds",
                    "Time of steps in which somebody waited: for a place among those that run, for "
                    "memory, for room in its own tenant's share, for its prompt's turn.",
                    ["for"],
                    {
                        (what,): int(time) / 1e9
                        for what, time in zip(WAITS, counts.waited, strict=True)
                    },
                ),
            ]

    def gaps(self) -> tuple[npt.NDArray[np.float64], float]:
        """Tokens by octave of the gap before them, the last without a bound; and their seconds."""
        self._look()
        with self._lock:
            return by_octave(self._gaps), self._gap_seconds

    def preemptions(self) -> int:
        """Of all reasons."""
        return int(self._look().preemptions.sum())

    def _look(self) -> StepCounts:
        """All since the start, with what the last interval tells added up."""
        with self._lock:
            now = StepCounts.of(self._books())
            passed, self._last = now.since(self._last), now
            tokens = int(passed.phases[_PREFILL, _TOKENS])
            if tokens:
                # A sequence's chunk reads its keys once for all of its tokens.
                chunk = max(1.0, tokens / max(1, int(passed.phases[_PREFILL, _SEQUENCES])))
                read = int(passed.phases[_PREFILL, _KEYS]) / chunk
                self._prefill_kv_bytes += read * self._work.kv_token_bytes
            for row in passed.batches:
                # Batches of one class differ by less than two times.
                self._add_gaps(row, int(row[_TOKENS]))
            # Steps with prompts have no class: theirs are the tokens that no class has.
            self._beside_prompts += int(
                passed.phases[_DECODE, _TOKENS] - passed.batches[:, _TOKENS].sum()
            )
            if self._beside_prompts > 0 and passed.mixtures[_BOTH, _STEPS] > 0:
                self._add_gaps(passed.mixtures[_BOTH], self._beside_prompts)
                self._beside_prompts = 0
            return now.since(self._start)

    def _add_gaps(self, row: Counts64, tokens: int) -> None:
        """Adds the gaps of steps that made so many tokens, as if each made as many."""
        steps = int(row[_STEPS])
        if steps > 0:
            self._gaps += row[_DURATIONS:] * (tokens / steps)
            self._gap_seconds += int(row[_NANOSECONDS]) / 1e9 * (tokens / steps)

    def _of_phases(self, counts: StepCounts) -> Iterator[Metric]:
        for name, column, unit, meaning in _OF_PHASES:
            yield counter(
                f"kvledger_phase_{name}",
                meaning,
                ["phase"],
                {
                    (phase,): int(row[column]) / unit
                    for phase, row in zip(PHASES, counts.phases, strict=True)
                },
            )
        work = self._work
        with self._lock:
            prefill_kv_bytes = self._prefill_kv_bytes
        decode, prefill = counts.phases.tolist()
        weights = work.layer_bytes + work.head_bytes
        yield counter(
            "kvledger_phase_bytes",
            "Bytes of weights, keys and values that the phase had to read at least; a step with "
            "both reads its weights for its decoding.",
            ["phase"],
            {
                ("decode",): decode[_STEPS] * weights + decode[_KEYS] * work.kv_token_bytes,
                ("prefill",): int(counts.mixtures[_PREFILL_ONLY, 0]) * weights + prefill_kv_bytes,
            },
        )
        yield counter(
            "kvledger_phase_operations",
            "Multiplications and additions of the phase, counted apart: linear layers and "
            "attention.",
            ["phase"],
            {
                ("decode",): _operations(work, decode, decode[_TOKENS]),
                ("prefill",): _operations(work, prefill, prefill[_SEQUENCES]),
            },
        )

    def _of_durations(self, counts: StepCounts) -> Iterator[Metric]:
        yield histogram(
            "kvledger_step_duration_seconds",
            "Time from a step's plan to its commit, by what the step computed.",
            ["mixture"],
            OCTAVES,
            {
                (mixture,): (by_octave(row[_DURATIONS:]), int(row[1]) / 1e9)
                for mixture, row in zip(MIXTURES, counts.mixtures, strict=True)
            },
        )
        batches = list(zip(self._classes, counts.batches, strict=False))
        yield histogram(
            "kvledger_decode_step_duration_seconds",
            "Time of steps that only decode, by how many sequences do.",
            ["batch"],
            OCTAVES,
            {(batch,): (by_octave(row[_DURATIONS:]), int(row[1]) / 1e9) for batch, row in batches},
        )
        yield counter(
            "kvledger_decode_batch_tokens",
            "Tokens of steps that only decode, by how many sequences do.",
            ["batch"],
            {(batch,): int(row[2]) for batch, row in batches},
        )
        with self._lock:
            gaps, seconds = self._gaps.copy(), self._gap_seconds
        yield histogram(
            "kvledger_token_gap_seconds",
            "Time between a running sequence's tokens: that of the step, for each of its tokens.",
            [],
            OCTAVES,
            {(): (by_octave(gaps), seconds)},
        )
        yield counter(
            "kvledger_tokens_in_time",
            "Of the tokens in kvledger_token_gap_seconds, those whose gap met the target.",
            [],
            {(): float(gaps[: self._buckets_in_time].sum())},
        )
        yield gauge(
            "kvledger_token_gap_target_seconds",
            "The target of gaps, rounded down to the bound of a bucket of the core.",
            [],
            {(): self.gap_target},
        )


class PrefillSpeed:
    """How fast prompts are computed, from recent steps that computed some. Any thread may ask."""

    # Half of what is known is of the last so many seconds of such steps.
    _HALF_LIFE = 30.0

    def __init__(self, books: Callable[[], _core.StepBooks]) -> None:
        """Knows from all that the core did so far, also before there were clients."""
        self._books = books
        self._lock = threading.Lock()
        self._last = (0, 0)
        self._tokens = self._seconds = 0.0

    def tokens_per_second(self) -> float | None:
        """None before any prompt was computed."""
        with self._lock:
            books = self._books()
            tokens = int(books.phases[_PREFILL, _TOKENS])
            mixtures = books.mixtures
            nanoseconds = int(mixtures[_PREFILL_ONLY, 1]) + int(mixtures[_BOTH, 1])
            seconds = (nanoseconds - self._last[1]) / 1e9
            if seconds > 0:
                kept = 0.5 ** (seconds / self._HALF_LIFE)
                self._tokens = self._tokens * kept + tokens - self._last[0]
                self._seconds = self._seconds * kept + seconds
                self._last = (tokens, nanoseconds)
            return self._tokens / self._seconds if self._seconds and self._tokens > 0 else None


def batch_classes(sequences_max: int) -> list[str]:
    """The core's classes of batches that can occur: "1", "2", "3-4", "5-8", ... "2049+"."""
    classes: list[str] = []
    first = last = 1
    while len(classes) < _CLASSES_MAX - 1:
        classes.append(str(first) if first == last else f"{first}-{last}")
        if last >= sequences_max:
            return classes
        first, last = last + 1, 2 * last
    return [*classes, f"{first}+"]


def by_octave(durations: npt.NDArray[np.float64] | Counts64) -> npt.NDArray[np.float64]:
    """The core's buckets, coarser: those up to each bound of an octave, the last without one."""
    ends = np.arange(1, len(_BOUNDS) + 1, _PER_OCTAVE)
    reached = np.cumsum(durations)
    return np.diff(np.concatenate(([0], reached[ends - 1], reached[-1:]))).astype(np.float64)


def _operations(work: ModelWork, phase: list[int], heads: int) -> float:
    """Of a phase; `heads` of its tokens, or the ends of its chunks, had their successor wanted."""
    return (
        phase[_TOKENS] * sum(work.layer_operations.values())
        + heads * sum(work.head_operations.values())
        + phase[_KEYS] * work.key_operations
    )


def _of_forecast(counts: StepCounts) -> Iterator[Metric]:
    for (name, unit, meaning), value in zip(_OF_FORECASTS, counts.forecast, strict=True):
        yield counter(f"kvledger_forecast_{name}", meaning, [], {(): int(value) / unit})
