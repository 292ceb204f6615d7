"""What came when, in some hundred buckets of time, however long that was.

Buckets begin ten seconds wide. When there are too many, each two become one, so a month takes the
memory of an hour.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvledger.report.steps import LoadSums

_WIDTH = 10.0  # seconds
BUCKETS_MAX = 360


@dataclass
class Span:
    """From the earliest that is told of to the latest: replicas that ran one after the other add up
    in it, those that ran side by side do not. Seconds since 1970."""

    began: float = math.inf
    ended: float = -math.inf

    def add(self, began: float, ended: float) -> None:
        """Some time more."""
        self.began, self.ended = min(self.began, began), max(self.ended, ended)

    @property
    def nanoseconds(self) -> int:
        """How long it is; 0 of nothing."""
        return max(0, round((self.ended - self.began) * 1e9)) if self.ended > self.began else 0


@dataclass
class Bucket:
    """Some time. Memory in byte-nanoseconds."""

    # Nanoseconds that the pool's lines of each replica tell of.
    covered: Counter[str] = field(default_factory=Counter)
    states: Counter[str] = field(default_factory=Counter)
    tenants: Counter[str] = field(default_factory=Counter)
    scopes: int = 0
    load: LoadSums = field(default_factory=LoadSums)
    span: Span = field(default_factory=Span)
    load_span: Span = field(default_factory=Span)  # of lines of load

    def merge(self, other: Bucket) -> None:
        """What came in the time beside it."""
        self.covered.update(other.covered)
        self.states.update(other.states)
        self.tenants.update(other.tenants)
        self.scopes += other.scopes
        self.load.merge(other.load)
        self.span.add(other.span.began, other.span.ended)
        self.load_span.add(other.load_span.began, other.load_span.ended)

    @property
    def time(self) -> int:
        """Nanoseconds that byte-times are divided by."""
        return self.span.nanoseconds

    @property
    def load_time(self) -> int:
        """The same for what lines of load tell."""
        return self.load_span.nanoseconds


@dataclass(frozen=True)
class Memory:
    """What a replica's pool had over some time, in byte-nanoseconds."""

    states: Mapping[str, int]
    tenants: Mapping[str, int]
    scopes: int


class Timeline:
    """See the head of this file. Times are seconds since 1970."""

    def __init__(self) -> None:
        self.width = _WIDTH
        self._buckets: dict[int, Bucket] = {}

    def add_load(self, replica: str, line: Mapping[str, Any], ended: float) -> None:
        """A replica's line of load, which is counted in the middle of its time."""
        time = line["elapsed"] - line["since"]
        bucket = self._at(ended - time / 2e9)
        bucket.load.add(line)
        bucket.load_span.add(ended - time / 1e9, ended)
        self._keep_few()

    def add_memory(self, replica: str, memory: Memory, began: float, ended: float) -> None:
        """What a replica's pool had, divided among the buckets that the time touches."""
        span = ended - began
        while span / self.width > BUCKETS_MAX:
            self._widen()
        place = began
        while place < ended:
            # The next border; a rounding error must not keep it from moving.
            border = max((place // self.width + 1) * self.width, place + 1e-6)
            share = (min(border, ended) - place) / span
            bucket = self._at(place)
            bucket.covered[replica] += round(share * span * 1e9)
            bucket.span.add(place, min(border, ended))
            for name, value in memory.states.items():
                bucket.states[name] += round(share * value)
            for name, value in memory.tenants.items():
                bucket.tenants[name] += round(share * value)
            bucket.scopes += round(share * memory.scopes)
            place = border
        self._keep_few()

    def buckets(self) -> list[tuple[float, Bucket]]:
        """Those with anything, in order, each with the middle of its time."""
        return [
            ((index + 0.5) * self.width, self._buckets[index]) for index in sorted(self._buckets)
        ]

    def _at(self, when: float) -> Bucket:
        return self._buckets.setdefault(int(when // self.width), Bucket())

    def _keep_few(self) -> None:
        while len(self._buckets) > BUCKETS_MAX:
            self._widen()

    def _widen(self) -> None:
        self.width *= 2
        buckets: dict[int, Bucket] = {}
        for index, bucket in self._buckets.items():
            if index // 2 in buckets:
                buckets[index // 2].merge(bucket)
            else:
                buckets[index // 2] = bucket
        self._buckets = buckets
