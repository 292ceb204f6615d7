"""Requests beyond a tenant's running_max: in order, at the door, with every end that there is."""

from __future__ import annotations

import pytest
from structlog.testing import CapturingLogger
from tenant_door import Door
from test_admission import Clock

from kvledger.engine import EndReason
from kvledger.errors import TenantClosed
from kvledger.scopes import NO_REUSE, SHARED_SCOPE, PrefixScopes
from kvledger.scopes.claims import ScopeClaim

GROUP = SHARED_SCOPE | 7

pytestmark = pytest.mark.usefixtures("door_clock", "door_log")


def test_more_than_may_run_waits_in_the_order_of_coming() -> None:
    """Requests would overtake each other at the door, or fill the core's queue."""
    door = Door()
    door.limit(t1={"running_max": 2}, t2={})
    tickets = [door.enter(1) for _ in range(5)]
    others = [door.enter(2) for _ in range(3)]
    order = [ticket.sequence for ticket in tickets]
    assert door.submitted == order[:2] + [ticket.sequence for ticket in others]
    assert door.admission.streams.waiting_count == 8
    door.admit(*tickets[:2])
    door.finish(tickets[1])
    assert door.submitted[5:] == order[2:3]
    door.finish(tickets[0])
    door.admission.end(tickets[3], EndReason.CANCELLED)  # runs: leaves after the step
    assert door.submitted[5:] == order[2:4]
    door.finish(tickets[3], EndReason.CANCELLED)
    assert door.submitted[5:] == order[2:5]
    for ticket in (tickets[2], tickets[4], *others):
        door.finish(ticket)
    assert not door.admission.open_requests


def test_who_waits_at_the_door_keeps_the_time_of_coming(door_clock: Clock) -> None:
    """It would wait once more, behind all who came to the core meanwhile."""
    door = Door()
    door.limit(t1={"running_max": 1})
    first, came = door.enter(1), door_clock.monotonic_ns()
    door.enter(1)
    door_clock.seconds += 7
    door.finish(first)
    assert [job.arrived_at for job in door.engine.jobs] == [came, came]


def test_who_waits_at_the_door_counts_as_waiting() -> None:
    """The limit on waiting would hold nobody who may not run."""
    door = Door(places=8)
    door.limit(t1={"running_max": 1, "queued_max": 2, "queued_tokens_max": 100})
    door.admit(door.enter(1))
    door.enter(1, 40)
    assert door.reached(1, 61).limit == "queued_tokens_max"
    door.enter(1, 10)
    assert door.reached(1, 10).limit == "queued_max"


def test_who_is_held_back_by_its_own_limit_waits_for_no_machine() -> None:
    """One tenant at its limit would call for replicas for everybody, and page the operator."""
    door = Door()
    door.limit(t1={"running_max": 1}, t2={})
    first, held, other = door.enter(1, 10), door.enter(1, 40), door.enter(2, 7)

    def tokens() -> tuple[int, int]:
        return door.admission.held_tokens, door.admission.waiting_tokens

    assert tokens() == (40, 17)
    door.admit(first, other)
    assert tokens() == (40, 0)
    door.finish(first)
    assert tokens() == (0, 40), "it waits in the core now"
    door.admit(held)
    assert tokens() == (0, 0)


def test_who_is_cancelled_at_the_door_has_a_receipt_at_once(
    door_clock: Clock, door_log: CapturingLogger
) -> None:
    """The caller would wait for a core that never heard of the request."""
    door = Door()
    door.limit(t1={"running_max": 1})
    running, held = door.enter(1), door.enter(1, 33)
    door_clock.seconds += 2.5
    door.admission.end(held, EndReason.CANCELLED)
    door.admission.end(held, EndReason.FAILED)
    assert door.engine.ends == []
    _, news = held.mailbox.take()
    assert news is not None
    receipt = news.receipt
    assert receipt is not None
    assert (receipt.end_reason, receipt.prompt_tokens) == (EndReason.CANCELLED, 33)
    assert (receipt.queued, receipt.output_tokens) == (2_500_000_000, 0)
    assert [call.kwargs["reason"] for call in door_log.calls] == ["cancelled"]
    door.finish(running)
    assert door.submitted == [running.sequence]
    assert not door.admission.open_requests


def test_lower_limits_let_go_on_what_is_there() -> None:
    """An operator's change would end requests, or count what is there as if it were not."""
    door = Door()
    door.limit(t1={})
    tickets = [door.enter(1) for _ in range(4)]
    door.admit(*tickets[:3])
    door.limit(t1={"running_max": 2, "queued_max": 2})
    tickets += [door.enter(1)]
    assert door.submitted == [ticket.sequence for ticket in tickets[:4]]
    assert door.engine.ends == []
    assert door.reached(1).limit == "queued_max"
    door.finish(tickets[0])
    door.finish(tickets[1])
    assert len(door.submitted) == 4, "two are in the core still"
    door.finish(tickets[2])
    assert door.submitted[4:] == [tickets[4].sequence]
    door.admit(tickets[3], tickets[4])
    held = door.enter(1)
    door.limit(t1={"running_max": 3})
    assert door.submitted[5:] == [held.sequence], "a higher limit lets go on at once"


def test_who_is_taken_from_the_table_ends_what_it_has() -> None:
    """A tenant that an operator takes away could go on, or its streams would break."""
    door = Door()
    door.limit(t1={"running_max": 1}, t2={})
    first, held = door.enter(1), door.enter(1)
    door.limit(t2={})
    with pytest.raises(TenantClosed):
        door.enter(1)
    with pytest.raises(TenantClosed):
        door.enter(3)
    assert door.refusals == ["tenant_closed"] * 2
    door.finish(first)
    assert door.submitted == [first.sequence, held.sequence]
    door.finish(held)
    assert [usage.number for usage in door.admission._quotas.all()] == [2]
    door.limit(t1={})
    door.enter(1)


def reasons(door_log: CapturingLogger) -> dict[str, str]:
    """How each request ended, by its id; each once."""
    told = [(str(call.kwargs["request_id"]), call) for call in door_log.calls]
    assert len(dict(told)) == len(told)
    return {request: str(call.kwargs.get("reason")) for request, call in told}


def test_a_server_that_stops_lets_those_at_the_door_run_as_long_as_it_can(
    door_log: CapturingLogger,
) -> None:
    """They would be forgotten by a drain, or outlive the server without a receipt."""
    door = Door()
    door.limit(t1={"running_max": 1})
    tickets = [door.enter(1) for _ in range(4)]
    door.admission.drain()
    door.finish(tickets[0])
    assert door.submitted == [ticket.sequence for ticket in tickets[:2]]
    door.admission.end_all()
    assert door.engine.ends == [(tickets[1].sequence, EndReason.CANCELLED)]
    assert len(door.submitted) == 2
    door.finish(tickets[1], EndReason.CANCELLED)
    assert list(reasons(door_log).values()).count("cancelled") == 3
    assert not door.admission.open_requests


async def test_a_server_is_empty_when_the_last_one_at_the_door_has_gone() -> None:
    """A server that stops would wait for nobody."""
    door = Door()
    door.limit(t1={"running_max": 0})
    ticket = door.enter(1)
    door.admission.end(ticket, EndReason.CANCELLED)
    await door.admission.streams.wait_until_empty()


def test_when_the_engine_dies_those_at_the_door_have_receipts(door_log: CapturingLogger) -> None:
    """They would be handed to an engine that is gone, and end without a receipt."""
    door = Door()
    door.limit(t1={"running_max": 1}, t2={})
    tickets = [door.enter(1) for _ in range(3)]
    door.engine.takes_jobs = False
    door.finish(tickets[0], EndReason.FAILED)  # as the dying engine's last report says
    assert door.submitted == [tickets[0].sequence]
    tickets.append(door.enter(2))
    door.engine.untaken = door.engine.jobs[-1:]
    door.admission.fail_all()
    assert reasons(door_log) == {ticket.request_id: "failed" for ticket in tickets}
    for ticket in tickets:
        _, news = ticket.mailbox.take()
        assert news is not None
        assert news.receipt is not None
    assert not door.admission.open_requests


class Claim(ScopeClaim):
    """Scopes by their numbers."""

    def __init__(self, own: int) -> None:
        super().__init__()
        self._scopes = PrefixScopes(own, GROUP, shared_tokens=8, writes_shared=True)

    def hold(self) -> PrefixScopes:
        return self._scopes


def test_what_waits_at_the_door_loses_scopes_that_end() -> None:
    """Who has left a group would begin with what a member computes afterwards (S04)."""
    door = Door()
    door.limit(t1={"running_max": 1})
    tickets = [door.enter(1, scopes=Claim(own)) for own in (1, 2, 3)]
    door.admission.end_scopes([GROUP, 3])
    assert door.engine.purged == [GROUP, 3]
    for ticket in tickets:
        door.admit(ticket)
        door.finish(ticket)
    running, waited, ended = (job.scopes for job in door.engine.jobs)
    assert running.shared == GROUP, "the core has it, and ends it there"
    assert waited == PrefixScopes(own=2)
    assert ended == NO_REUSE
