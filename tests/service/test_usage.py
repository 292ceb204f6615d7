"""Counts of usage against a model that counts everything anew, over many random events."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
from structlog.testing import CapturingLogger
from tenant_door import Door
from test_admission import Clock
from test_streams import outcome

from kvledger import admission
from kvledger.admission import Ticket
from kvledger.engine import EndReason
from kvledger.errors import QueuedTokensFull, QueueFull, TenantLimitReached
from kvledger.tenants.token_bucket import BURST_SECONDS
from kvledger.tenants.usage import Counts, Phase

TENANTS = (1, 2, 3, 4)
QUEUED_MAX, PLACES, QUEUED_TOKENS_MAX = 8, 3, 100


@dataclass
class Known:
    """One request, as the model has it."""

    tenant: int
    tokens: int
    ticket: Ticket
    state: str  # held, waiting, leaving or running
    charged: bool


class Model:
    """What should be so, worked out from the requests alone."""

    def __init__(self, door: Door, clock: Clock) -> None:
        self.door, self.clock = door, clock
        self.open: dict[int, Known] = {}
        self.limits: dict[int, dict[str, Any]] = {tenant: {} for tenant in TENANTS}
        self.levels: dict[int, Fraction] = {}
        self.filled_at: dict[int, Fraction] = {}
        self.receipts: Counter[str] = Counter()

    def of(self, tenant: int | None, *states: str) -> list[Known]:
        return [
            known
            for known in self.open.values()
            if known.state in states and tenant in (None, known.tenant)
        ]

    def in_core(self, tenant: int) -> int:
        return len(self.of(tenant, "waiting", "leaving", "running"))

    def fill(self, tenant: int) -> None:
        rate = self.limits[tenant].get("tokens_per_second")
        if rate is not None:
            now = Fraction(self.clock.seconds)
            level = self.levels[tenant] + rate * (now - self.filled_at[tenant])
            self.levels[tenant] = min(Fraction(rate * BURST_SECONDS), level)
            self.filled_at[tenant] = now

    def must_hold(self, tenant: int) -> bool:
        most = self.limits[tenant].get("running_max")
        return bool(self.of(tenant, "held")) or (most is not None and self.in_core(tenant) >= most)

    def verdict(self, tenant: int, tokens: int) -> str:
        """What should come of a request: held, waiting, or why it is refused."""
        limits, free = self.limits[tenant], self.door.admission.streams.free_places
        waiting = len(self.of(None, "waiting"))
        own = self.of(tenant, "held", "waiting")
        hold = self.must_hold(tenant)
        left = 0 if hold else max(0, free - (waiting - len(self.of(tenant, "waiting"))))
        if len(own) - left >= limits.get("queued_max", 10**9):
            return "queued_max"
        if sum(known.tokens for known in own) + tokens > limits.get("queued_tokens_max", 10**9):
            return "queued_tokens_max"
        self.fill(tenant)
        rate = limits.get("tokens_per_second")
        if rate is not None and self.levels[tenant] < min(tokens, rate * BURST_SECONDS):
            return "tokens_per_second"
        everybody = self.of(None, "held", "waiting")
        queued = len(self.of(None, "held")) + max(0, waiting - free)
        if not self.fair(queued, [known.tenant for known in everybody], tenant, QUEUED_MAX):
            return "queue_full"
        leaving = [known.tenant for known in self.of(None, "leaving")]
        if not self.fair(len(leaving), leaving, tenant, QUEUED_MAX + PLACES):
            return "queue_full"
        if own and sum(known.tokens for known in everybody) + tokens > QUEUED_TOKENS_MAX:
            return "queued_tokens_full"
        return "held" if hold else "waiting"

    @staticmethod
    def fair(total: int, owners: list[int], tenant: int, most: int) -> bool:
        own, tenants = owners.count(tenant), len({*owners, tenant})
        return total < most or own == 0 or (own < most // tenants and total < most + tenants)

    def enter(self, tenant: int, tokens: int) -> str:
        expected = self.verdict(tenant, tokens)
        ticket, came = self.attempt(tenant, tokens)
        assert came in (expected, "entered")
        if ticket is not None:
            assert expected in ("held", "waiting")
            charged = "tokens_per_second" in self.limits[tenant]
            if charged:
                self.levels[tenant] -= tokens
            self.open[ticket.sequence] = Known(tenant, tokens, ticket, expected, charged)
        return expected

    def attempt(self, tenant: int, tokens: int) -> tuple[Ticket | None, str]:
        try:
            return self.door.enter(tenant, tokens), "entered"
        except TenantLimitReached as error:
            return None, error.limit
        except QueueFull:
            return None, "queue_full"
        except QueuedTokensFull:
            return None, "queued_tokens_full"

    def gone(self, sequence: int) -> None:
        known = self.open.pop(sequence)
        if known.state != "running" and known.charged:
            self.fill(known.tenant)
            rate = self.limits[known.tenant].get("tokens_per_second")
            if rate is not None:
                level = self.levels[known.tenant] + known.tokens
                self.levels[known.tenant] = min(Fraction(rate * BURST_SECONDS), level)
        self.release(known.tenant)

    def release(self, tenant: int) -> None:
        most = self.limits[tenant].get("running_max", 10**9)
        while self.of(tenant, "held") and self.in_core(tenant) < most:
            self.of(tenant, "held")[0].state = "waiting"

    def set_limits(self, dice: random.Random) -> None:
        before = self.limits
        for tenant in TENANTS:
            self.fill(tenant)
        self.limits = {
            tenant: {
                name: dice.randrange(1, most)
                for name, most in (
                    ("running_max", 6),
                    ("queued_max", 6),
                    ("queued_tokens_max", 120),
                    ("tokens_per_second", 30),
                )
                if dice.random() < 0.5
            }
            for tenant in TENANTS
        }
        for limits in self.limits.values():
            if "queued_tokens_max" in limits:
                limits["queued_tokens_max"] += 30  # as long as any prompt here
        for tenant, limits in self.limits.items():
            rate = limits.get("tokens_per_second")
            if rate is not None:
                full = Fraction(rate * BURST_SECONDS)
                had = "tokens_per_second" in before[tenant]
                self.levels[tenant] = min(full, self.levels[tenant]) if had else full
                self.filled_at[tenant] = Fraction(self.clock.seconds)
        self.door.limit(**{f"t{tenant}": limits for tenant, limits in self.limits.items()})
        for tenant in TENANTS:
            self.release(tenant)

    def require_agreement(self) -> None:
        """Every count is what counting anew says."""
        quotas = self.door.admission._quotas
        states = ("held", "waiting", "leaving", "running")
        phases = (Phase.HELD, Phase.WAITING, Phase.LEAVING, Phase.RUNNING)
        counted: list[tuple[Counts, int | None]] = [(quotas.usage.counts, None)]
        counted += [(usage.counts, usage.number) for usage in quotas.all()]
        for counts, tenant in counted:
            for state, phase in zip(states, phases, strict=True):
                assert counts[phase] == len(self.of(tenant, state))
            queued = self.of(tenant, "held", "waiting")
            assert counts.queued_tokens == sum(known.tokens for known in queued)
            assert counts.held_tokens == sum(known.tokens for known in self.of(tenant, "held"))
        streams = self.door.admission.streams
        assert streams.waiting_count == len(self.of(None, "held", "waiting"))
        assert streams.leaving_count == len(self.of(None, "leaving"))
        tenants = len({known.tenant for known in self.of(None, "held", "waiting")})
        assert streams.waiting_count <= QUEUED_MAX + PLACES + tenants


class Events:
    """What can happen, one at a time."""

    def __init__(self, model: Model, dice: random.Random) -> None:
        self.model, self.dice, self.door = model, dice, model.door
        self.seen: Counter[str] = Counter()

    def deliver(self, **what: Any) -> None:
        running = len(self.model.of(None, "running"))
        waiting = self.dice.choice([0, 0, len(self.model.of(None, "waiting"))])
        self.door.admission.streams.deliver(outcome(running=running, waiting=waiting, **what))

    def pick(self, *states: str) -> Known | None:
        found = self.model.of(None, *states)
        return self.dice.choice(found) if found else None

    def enter(self) -> None:
        # One of them sends most of all.
        tenant = self.dice.choice([1, 1, 1, *TENANTS])
        self.seen[self.model.enter(tenant, self.dice.randrange(1, 30))] += 1

    def admit(self) -> None:
        if known := self.pick("waiting", "waiting", "leaving"):
            known.state = "running"
            self.deliver(admissions=[(known.ticket.sequence, 0, 0)])

    def emit(self) -> None:
        if known := self.pick("running"):
            if "tokens_per_second" in self.model.limits[known.tenant]:
                self.model.fill(known.tenant)
                self.model.levels[known.tenant] -= 1
            self.deliver(tokens=[(known.ticket.sequence, 7)])

    def finish(self) -> None:
        if known := self.pick("running", "leaving"):
            sequence = known.ticket.sequence
            reason = EndReason.CANCELLED if known.state == "leaving" else EndReason.STOP
            self.deliver(receipts=[(sequence, reason)])
            self.model.gone(sequence)

    def end(self) -> None:
        if known := self.pick("held", "waiting", "running"):
            self.door.admission.end(known.ticket, EndReason.CANCELLED)
            if known.state == "held":
                self.model.gone(known.ticket.sequence)
            elif known.state == "waiting":
                known.state = "leaving"

    def wait(self) -> None:
        self.model.clock.seconds += self.dice.randrange(0, 16) / 8

    def change(self) -> None:
        if self.dice.random() < 0.1:
            self.model.set_limits(self.dice)


def test_counts_are_what_counting_anew_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """A count that drifts would keep a tenant out for good, or let it have more than it may."""
    clock, logger = Clock(), CapturingLogger()
    monkeypatch.setattr(admission, "time", clock)
    monkeypatch.setattr(admission, "_log", logger)
    door = Door(queued_max=QUEUED_MAX, places=PLACES, queued_tokens_max=QUEUED_TOKENS_MAX)
    dice = random.Random(1)
    model = Model(door, clock)
    model.set_limits(dice)
    events = Events(model, dice)
    kinds: list[Callable[[], None]] = [
        *[events.enter] * 5,
        *[events.admit] * 3,
        *[events.finish] * 3,
        *[events.emit] * 2,
        events.end,
        events.wait,
        events.change,
    ]
    for event in range(100_000):
        dice.choice(kinds)()
        if event % 4 == 0:
            model.require_agreement()
    outcomes = ("held", "waiting", "queued_max", "queued_tokens_max", "tokens_per_second")
    for kind in (*outcomes, "queue_full", "queued_tokens_full"):
        assert events.seen[kind] > 200, f"{kind} must have come: {events.seen}"
    while model.open:
        events.admit()
        events.finish()
        model.require_agreement()
    entered = events.seen["held"] + events.seen["waiting"]
    told = [call.kwargs["request_id"] for call in logger.calls]
    assert len(told) == len(set(told)) == entered, "one receipt for everybody who entered"
    assert not door.admission.open_requests
    assert not door.admission._metered
    assert door.admission.streams.meter is None
    assert all(usage.counts.total == 0 and not usage.held for usage in door.admission._quotas.all())
