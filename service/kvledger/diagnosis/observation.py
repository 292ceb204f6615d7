"""An interval in rates: what each phase did, and what of the machine's most that was.

Prefill and decode are judged apart: the one is bound by arithmetic, the other by memory, and what
helps the one seldom helps the other. Bytes and operations are the least that the work needs
(planning/floors.py), so a share of a peak is a share of what could be had.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from kvledger.diagnosis.counts import (
    BOTH,
    DECODE,
    DECODE_ONLY,
    PREFILL,
    PREFILL_ONLY,
    Counts,
    duration_quantile,
)
from kvledger.diagnosis.traffic import TrafficCounts, class_quantile
from kvledger.machine.peaks import MachinePeaks
from kvledger.metrics.steps import PREEMPTED, WAITS
from kvledger.planning.floors import StepCosts

# Of a machine that nobody measured: so fast that shares of it are nothing, and ten operations to a
# byte as processors have, so that what is twice as much work still takes twice as long.
UNKNOWN = MachinePeaks.given(1e18, 1e19)


@dataclass(frozen=True)
class Setup:
    """What the server was started with, as far as it matters here."""

    costs: StepCosts
    threads: int
    processors: int
    token_budget: int
    sequences_max: int
    blocks: int
    block_tokens: int
    step_stretch: float
    prefill_step: float
    tpot_target: float | None
    reuses_prefixes: bool
    kv_format: str
    # What this machine can do with other numbers of threads, where that was measured.
    by_threads: Mapping[int, MachinePeaks]

    @property
    def is_measured(self) -> bool:
        """Whether the machine's peaks are known."""
        return self.costs.peaks is not UNKNOWN


@dataclass(frozen=True)
class PhaseFigures:
    """One phase, over an interval."""

    steps: int
    seconds: float
    tokens: int
    keys: int
    sequences: float  # in a step, on average
    weight_bytes: int
    kv_bytes: int
    operations: float
    # The least time that it could have taken, by what binds.
    memory_seconds: float
    compute_seconds: float

    @property
    def bytes_per_second(self) -> float:
        """Achieved."""
        return (self.weight_bytes + self.kv_bytes) / self.seconds if self.seconds else 0.0

    @property
    def operations_per_second(self) -> float:
        """Achieved."""
        return self.operations / self.seconds if self.seconds else 0.0

    @property
    def memory_share(self) -> float:
        """Of the speed at which memory can be read."""
        return self.memory_seconds / self.seconds if self.seconds else 0.0

    @property
    def compute_share(self) -> float:
        """Of the operations that can be done in a second."""
        return self.compute_seconds / self.seconds if self.seconds else 0.0

    @property
    def binds(self) -> Literal["memory", "compute"]:
        """Which of the two it is nearer to."""
        return "memory" if self.memory_seconds >= self.compute_seconds else "compute"

    @property
    def kv_share(self) -> float:
        """Of the bytes that it reads, those of keys and values."""
        whole = self.weight_bytes + self.kv_bytes
        return self.kv_bytes / whole if whole else 0.0

    @property
    def tokens_per_step(self) -> float:
        """On average."""
        return self.tokens / self.steps if self.steps else 0.0


@dataclass(frozen=True)
class Observation:
    """What the server did over an interval."""

    setup: Setup
    seconds: float
    step_seconds: float
    sampling_seconds: float
    forward_seconds: float
    decode: PhaseFigures
    prefill: PhaseFigures
    # Durations of steps, in seconds: medians and the 99th percentile.
    decode_step: tuple[float, float]
    both_step: tuple[float, float]
    prefill_step: tuple[float, float]
    mixed_steps: int  # steps of both phases
    # Steps of decoding alone and of both, in seconds on average: what disturbs the machine makes
    # both longer.
    decode_mean: float
    both_mean: float
    waterline: float  # of the pool, on average
    cached: float
    preemptions: Mapping[str, int]  # by reason, where there were any
    # Of the steps' time, that in which somebody waited, by what for: counts.WAITS.
    waited_for: Mapping[str, float]
    forecast_error: float | None  # of a step's time, on average
    # Of the processors' time, what the operating system counted as used: by this process, of those
    # that it may use; and of the machine by anybody, None where that is not counted.
    utilization: float
    machine_utilization: float | None
    processors_of_machine: int | None
    traffic: TrafficCounts

    @property
    def busy(self) -> float:
        """Of the time, that in which a step ran."""
        return min(1.0, self.step_seconds / self.seconds) if self.seconds else 0.0

    @property
    def prefill_share(self) -> float:
        """Of the steps' time, that of prompts."""
        whole = self.prefill.seconds + self.decode.seconds
        return self.prefill.seconds / whole if whole else 0.0

    @property
    def arrivals(self) -> int:
        """Requests that came, those refused included."""
        return self.traffic.requests + sum(self.traffic.refused.values())

    @property
    def prompts(self) -> int:
        """Tokens of prompts that came."""
        return self.traffic.all_prompt_tokens

    @property
    def waiting(self) -> float:
        """Of the requests' time, that in which they waited in the core; open ones included."""
        traffic = self.traffic
        return traffic.waiting_time / traffic.open_time if traffic.open_time else 0.0

    @property
    def preempted(self) -> int:
        """Sequences that lost their blocks."""
        return sum(self.preemptions.values())

    @property
    def held(self) -> float:
        """The same at the door, for others of their own tenant to end."""
        return self.traffic.held_time / self.traffic.open_time if self.traffic.open_time else 0.0

    @property
    def stalled(self) -> float:
        """And paused because nobody read them."""
        return self.traffic.stalled_time / self.traffic.open_time if self.traffic.open_time else 0.0

    @property
    def running(self) -> float:
        """Requests that had a place, on average over the whole time."""
        traffic = self.traffic
        ran = traffic.open_time - traffic.waiting_time - traffic.held_time
        return ran / 1e9 / self.seconds if self.seconds else 0.0

    @property
    def computed_prompt(self) -> float:
        """Tokens of a prompt that were computed, on average."""
        return self.prefill.tokens / max(1, self.traffic.requests)

    def of_life(self, nanoseconds: int) -> float:
        """A time as a share of that from arrival to end, of all requests that ended."""
        return nanoseconds / self.traffic.life_time if self.traffic.life_time else 0.0

    @property
    def prompt_lengths(self) -> tuple[int, int]:
        """Median and 95th percentile of prompts' tokens, to a factor of two."""
        return class_quantile(self.traffic.prompts, 0.5), class_quantile(self.traffic.prompts, 0.95)

    @property
    def output_lengths(self) -> tuple[int, int]:
        """The same of answers."""
        return class_quantile(self.traffic.outputs, 0.5), class_quantile(self.traffic.outputs, 0.95)


def observe(setup: Setup, counts: Counts) -> Observation:
    """`counts` are of an interval."""
    costs = setup.costs
    pool_time = max(1, setup.blocks * counts.at)
    steps, _, taken, off = (int(value) for value in counts.forecast)
    means = counts.mixtures[:, 1] / 1e9 / counts.mixtures[:, 0].clip(1)
    decode_quantiles, prefill_quantiles, both_quantiles = (
        (
            duration_quantile(counts.mixtures[mixture], 0.5),
            duration_quantile(counts.mixtures[mixture], 0.99),
        )
        for mixture in (DECODE_ONLY, PREFILL_ONLY, BOTH)
    )
    return Observation(
        setup=setup,
        seconds=counts.at / 1e9,
        step_seconds=counts.engine.steps / 1e9,
        sampling_seconds=counts.engine.sampling / 1e9,
        forward_seconds=counts.engine.forward / 1e9,
        decode=phase_figures(costs, counts, DECODE),
        prefill=phase_figures(costs, counts, PREFILL),
        decode_step=decode_quantiles,
        both_step=both_quantiles,
        prefill_step=prefill_quantiles,
        mixed_steps=int(counts.mixtures[BOTH, 0]),
        decode_mean=float(means[DECODE_ONLY]),
        both_mean=float(means[BOTH]),
        waterline=counts.pool.live / pool_time,
        cached=counts.pool.cached / pool_time,
        preemptions={
            reason: int(count)
            for reason, count in zip(PREEMPTED, counts.preemptions, strict=True)
            if count
        },
        waited_for={
            name: min(1.0, int(time) / max(1, counts.engine.steps))
            for name, time in zip(WAITS, counts.waited, strict=True)
        },
        forecast_error=off / taken if steps and taken else None,
        utilization=counts.processors.own / (max(1, counts.at) * setup.processors),
        machine_utilization=counts.processors.busy / counts.processors.whole
        if counts.processors.whole > 0
        else None,
        processors_of_machine=round(counts.processors.whole / max(1, counts.at)) or None,
        traffic=counts.traffic,
    )


def phase_figures(costs: StepCosts, counts: Counts, phase: int) -> PhaseFigures:
    """What a phase, a row of `counts.phases`, did in an interval."""
    steps, nanoseconds, tokens, keys, sequences = (int(value) for value in counts.phases[phase])
    # A step of both phases reads its weights for its decoding; its prompts ride on that.
    alone = steps if phase == DECODE else int(counts.mixtures[PREFILL_ONLY, 0])
    weight_bytes = alone * (costs.layer_bytes + costs.head_bytes)
    # A sequence's chunk reads its keys once for all of its tokens.
    read = keys if phase == DECODE else keys / max(1.0, tokens / max(1, sequences))
    operations = {
        **{name: tokens * each for name, each in costs.layer_operations.items()},
    }
    heads = tokens if phase == DECODE else sequences
    for name, each in costs.head_operations.items():
        operations[name] = operations.get(name, 0.0) + heads * each
    operations["f32"] = operations.get("f32", 0.0) + keys * costs.key_operations
    kv_bytes = round(read * costs.kv_token_bytes)
    return PhaseFigures(
        steps=steps,
        seconds=nanoseconds / 1e9,
        tokens=tokens,
        keys=keys,
        sequences=sequences / steps if steps else 0.0,
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
        operations=sum(operations.values()),
        memory_seconds=(weight_bytes + kv_bytes) / costs.peaks.read_bytes_per_second,
        compute_seconds=sum(
            count / costs.peaks.operations(name) for name, count in operations.items()
        ),
    )
