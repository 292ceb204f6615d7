"""What is counted while the server runs, at one moment; the difference of two is an interval."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvledger import _core
from kvledger.diagnosis.traffic import TrafficCounts
from kvledger.machine.utilization import ProcessorTimes

Counts64 = npt.NDArray[np.int64]
Sums64 = npt.NDArray[np.float64]

DECODE, PREFILL = 0, 1
DECODE_ONLY, PREFILL_ONLY, BOTH = 0, 1, 2
_DURATIONS = 3  # the first column of them


@dataclass(frozen=True)
class EngineCounts:
    """What the engine did so far; times in nanoseconds."""

    steps: int
    forward: int
    sampling: int


@dataclass(frozen=True)
class PoolCounts:
    """Block-nanoseconds so far, by state."""

    free: int
    reserved: int
    held: int
    cached: int
    releasing: int

    @property
    def live(self) -> int:
        """What the waterline is of."""
        return self.reserved + self.held + self.releasing


@dataclass(frozen=True)
class Counts:
    """Everything, at one moment."""

    at: int  # time.monotonic_ns()
    phases: Counts64  # as in core/step_books.h, like the six that follow
    mixtures: Counts64
    batches: Counts64
    forecast: Counts64
    fits: Sums64
    preemptions: Counts64
    waited: Counts64
    engine: EngineCounts
    pool: PoolCounts
    processors: ProcessorTimes
    traffic: TrafficCounts

    @classmethod
    def now(
        cls,
        at: int,
        books: _core.StepBooks,
        engine: EngineCounts,
        pool: PoolCounts,
        traffic: TrafficCounts,
    ) -> Counts:
        """As they are."""
        return cls(
            at,
            books.phases,
            books.mixtures,
            books.batches,
            books.forecast,
            books.fits,
            books.preemptions,
            books.waited,
            engine,
            pool,
            ProcessorTimes.now(),
            traffic.copy(),
        )

    def since(self, before: Counts) -> Counts:
        """What came between; `at` is how long that was."""
        return Counts(
            at=self.at - before.at,
            phases=self.phases - before.phases,
            mixtures=self.mixtures - before.mixtures,
            batches=self.batches - before.batches,
            forecast=self.forecast - before.forecast,
            fits=self.fits - before.fits,
            preemptions=self.preemptions - before.preemptions,
            waited=self.waited - before.waited,
            engine=EngineCounts(
                *(
                    now - then
                    for now, then in zip(
                        vars(self.engine).values(), vars(before.engine).values(), strict=True
                    )
                )
            ),
            pool=PoolCounts(
                *(
                    now - then
                    for now, then in zip(
                        vars(self.pool).values(), vars(before.pool).values(), strict=True
                    )
                )
            ),
            processors=self.processors.since(before.processors),
            traffic=self.traffic.since(before.traffic),
        )


def duration_quantile(row: Counts64, share: float) -> float:
    """Seconds that a share of the steps of a row of durations took at most; 0.0 of no steps.

    Of a row of `mixtures` or `batches`: right to a fifth, the width of a bucket.
    """
    durations = row[_DURATIONS:]
    total = int(durations.sum())
    if total == 0:
        return 0.0
    bounds = _core.StepBooks.bounds
    place = int(np.searchsorted(np.cumsum(durations), share * total))
    return float(bounds[min(place, len(bounds) - 1)]) / 1e9
