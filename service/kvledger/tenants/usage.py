"""What each tenant has at the door and in the core at this moment, counted in one place.

A request is in one phase at a time and moves on; every count follows from those moves, so they end
at zero when the last request has gone.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import IntEnum

from kvledger.engine import Job
from kvledger.tenants.shares import CoreShare
from kvledger.tenants.tenant import TenantLimits
from kvledger.tenants.token_bucket import TokenBucket


class Phase(IntEnum):
    """Where a request is."""

    HELD = 0  # waits at the door for another one of its tenant to end
    WAITING = 1  # in the core, never admitted yet
    LEAVING = 2  # told to end while it waited in the core, which has not done so yet
    RUNNING = 3  # admitted, once at least


_QUEUED = (Phase.HELD, Phase.WAITING)
_IN_CORE = (Phase.WAITING, Phase.LEAVING, Phase.RUNNING)


class Counts:
    """Requests by phase, and the prompt tokens of those that wait."""

    def __init__(self) -> None:
        self._requests = [0] * len(Phase)
        self.held_tokens = 0
        self.waiting_tokens = 0

    def __getitem__(self, phase: Phase) -> int:
        """Requests in a phase."""
        return self._requests[phase]

    @property
    def queued(self) -> int:
        """Requests that wait, at the door or in the core."""
        return sum(self._requests[phase] for phase in _QUEUED)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of requests that wait, at the door or in the core."""
        return self.held_tokens + self.waiting_tokens

    @property
    def in_core(self) -> int:
        """Requests that the core has, or will find at its next look."""
        return sum(self._requests[phase] for phase in _IN_CORE)

    @property
    def total(self) -> int:
        """Requests without a receipt yet."""
        return sum(self._requests)

    def count(self, phase: Phase | None, tokens: int, sign: int) -> None:
        """Puts a request in (sign 1) or takes it out (-1)."""
        if phase is None:
            return
        self._requests[phase] += sign
        if phase == Phase.HELD:
            self.held_tokens += sign * tokens
        elif phase == Phase.WAITING:
            self.waiting_tokens += sign * tokens


@dataclass(eq=False)
class TenantUsage:
    """One tenant: what it may use, and what it does."""

    number: int
    name: str
    limits: TenantLimits
    # None where nobody shares the pool out.
    share: CoreShare | None = None
    bucket: TokenBucket | None = None
    # It is gone from the table: nothing more enters.
    is_closed: bool = False
    counts: Counts = field(default_factory=Counts)
    # By sequence, in the order that they came.
    held: OrderedDict[int, Job] = field(default_factory=OrderedDict)
    # Seconds from one end of its requests to the next, smoothed.
    finish_interval: float = 1.0
    last_finish: float = 0.0

    @property
    def must_hold(self) -> bool:
        """Whether another request would wait at the door."""
        most = self.limits.running_max
        return bool(self.held) or (most is not None and self.counts.in_core >= most)

    @property
    def may_release(self) -> bool:
        """Whether one that waits at the door may go on to the core."""
        most = self.limits.running_max
        return bool(self.held) and (most is None or self.counts.in_core < most)

    def note_finish(self, now: float) -> None:
        """Learns that one of its requests ended, at a time in seconds."""
        self.finish_interval += 0.2 * (now - self.last_finish - self.finish_interval)
        self.last_finish = now


@dataclass(eq=False)
class Place:
    """Where one request is counted, and how much it counts."""

    usage: TenantUsage
    tokens: int  # of its prompt
    phase: Phase | None = None  # None before it enters and after it has gone
    is_charged: bool = False  # to the tenant's tokens per second
    has_run: bool = False


class Usage:
    """The sums over all tenants, and every move of a request."""

    def __init__(self) -> None:
        self.counts = Counts()
        # Tenants with requests that wait, and with some that are leaving.
        self._queuing = 0
        self._leaving = 0

    def queuing_with(self, usage: TenantUsage) -> int:
        """Tenants with requests that wait, this one in any case."""
        return self._queuing + (usage.counts.queued == 0)

    def leaving_with(self, usage: TenantUsage) -> int:
        """Tenants with requests that are leaving, this one in any case."""
        return self._leaving + (usage.counts[Phase.LEAVING] == 0)

    def move(self, place: Place, phase: Phase | None) -> None:
        """Counts a request in another phase from now on; None is gone."""
        own = place.usage.counts
        queuing, leaving = own.queued > 0, own[Phase.LEAVING] > 0
        for counts in (own, self.counts):
            counts.count(place.phase, place.tokens, -1)
            counts.count(phase, place.tokens, 1)
        self._queuing += (own.queued > 0) - queuing
        self._leaving += (own[Phase.LEAVING] > 0) - leaving
        place.phase = phase
        place.has_run |= phase == Phase.RUNNING
