"""Sums of steps, as lines of load state them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvledger.books.load_lines import BUCKETS, MIXTURES, PHASES


def bound_of(bucket: int) -> float:
    """Seconds that a step in a bucket of durations took at most; of the last one the least."""
    return float(2.0 ** (16 + min(bucket, BUCKETS - 2) / 4) / 1e9)


@dataclass
class Steps:
    """Some steps: nanoseconds, tokens, and how many took how long."""

    steps: int = 0
    time: int = 0
    tokens: int = 0
    durations: Counter[int] = field(default_factory=Counter)  # by bucket

    def add(self, line: Mapping[str, Any]) -> None:
        """Those of a line's mixture or class of batches."""
        self.steps += line["steps"]
        self.time += line["time"]
        self.tokens += line["tokens"]
        for bucket, count in line["durations"].items():
            self.durations[int(bucket)] += count

    def merge(self, other: Steps) -> None:
        """Those of another sum."""
        self.steps += other.steps
        self.time += other.time
        self.tokens += other.tokens
        self.durations.update(other.durations)

    def quantile(self, share: float) -> float | None:
        """Seconds that a share of the steps took at most, to a fifth; None of no steps."""
        wanted, seen = share * self.durations.total(), 0
        for bucket in sorted(self.durations):
            seen += self.durations[bucket]
            if seen >= wanted:
                return bound_of(bucket)
        return None

    @property
    def row(self) -> list[int]:
        """As the core has it: steps, nanoseconds, tokens, and each bucket."""
        durations = [self.durations[bucket] for bucket in range(BUCKETS)]
        return [self.steps, self.time, self.tokens, *durations]


@dataclass
class LoadSums:
    """What lines of load come to, over some time and any number of replicas."""

    covered: int = 0  # nanoseconds, of all replicas together
    step_time: int = 0
    forward_time: int = 0
    sampling_time: int = 0
    phases: dict[str, Counter[str]] = field(
        default_factory=lambda: {name: Counter() for name in PHASES}
    )
    mixtures: dict[str, Steps] = field(default_factory=lambda: {name: Steps() for name in MIXTURES})
    batches: dict[int, Steps] = field(default_factory=dict)  # by their most sequences
    forecast: Counter[str] = field(default_factory=Counter)
    preemptions: Counter[str] = field(default_factory=Counter)
    waited: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    came: int = 0
    # Requests times nanoseconds.
    open_time: int = 0
    waiting_time: int = 0
    held_time: int = 0
    delayed_time: int = 0
    reusable_tokens: int = 0
    # The most requests that any line said were waiting then, in the core or at the door.
    waiting_most: int = 0

    def add(self, line: Mapping[str, Any]) -> None:
        """One line more."""
        self.covered += line["elapsed"] - line["since"]
        for name in ("step_time", "forward_time", "sampling_time", "reusable_tokens"):
            setattr(self, name, getattr(self, name) + line[name])
        requests = line["requests"]
        for name in ("came", "open_time", "waiting_time", "held_time", "delayed_time"):
            setattr(self, name, getattr(self, name) + requests[name])
        self.waiting_most = max(self.waiting_most, requests["waiting"] + requests["held"])
        self.refused.update(requests["refused"])
        self.preemptions.update(line["preemptions"])
        self.waited.update(line["waited"])
        self.forecast.update(line["forecast"])
        for name, phase in self.phases.items():
            phase.update(line["phases"][name])
        for name, steps in line["mixtures"].items():
            self.mixtures[name].add(steps)
        for most, steps in line["batches"].items():
            self.batches.setdefault(int(most), Steps()).add(steps)

    def merge(self, other: LoadSums) -> None:
        """Those of another time, or of another replica."""
        for name, value in vars(other).items():
            own = getattr(self, name)
            if isinstance(own, Counter):
                own.update(value)
            elif isinstance(own, int):
                setattr(self, name, max(own, value) if name == "waiting_most" else own + value)
        for name, phase in other.phases.items():
            self.phases[name].update(phase)
        for name, steps in other.mixtures.items():
            self.mixtures[name].merge(steps)
        for most, steps in other.batches.items():
            self.batches.setdefault(most, Steps()).merge(steps)

    @property
    def waits(self) -> int:
        """Requests times nanoseconds that they waited, in the core or at the door."""
        return self.waiting_time + self.held_time

    @property
    def busy(self) -> float:
        """Of the time, that in which a step ran."""
        return self.step_time / self.covered if self.covered else 0.0
