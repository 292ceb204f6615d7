"""The door: who enters, who is refused and told when to come back, and what the log says."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
from structlog.testing import CapturingLogger
from test_streams import outcome

from kvledger.admission import DEV_CALLER, Admission, Caller, Ticket
from kvledger.engine import EndReason, Job
from kvledger.errors import InvalidRequest, QueueFull, ServerDraining
from kvledger.sampling import SamplingParameters
from kvledger.scopes import PrefixScopes
from kvledger.scopes.claims import ScopeClaim
from kvledger.scopes.keys import KvIdentity, Scope, ScopeKeys
from kvledger.scopes.table import ScopeTable
from kvledger.streams import MailboxLimits
from kvledger.tenants.tenant import Tenant

CONTEXT = 100
MAILBOXES = MailboxLimits(tokens=100, stall_seconds=100.0)


class FakeEngine:
    """Remembers what it was asked."""

    def __init__(self, sequence_tokens_max: int = CONTEXT) -> None:
        self.sequence_tokens_max = sequence_tokens_max
        self.jobs: list[Job] = []
        self.ends: list[tuple[int, EndReason]] = []
        self.takes_jobs = True
        self.untaken: list[Job] = []
        self.purged: list[int] = []

    def purge(self, scopes: Sequence[int]) -> None:
        self.purged += scopes

    def submit(self, job: Job) -> None:
        self.jobs.append(job)

    def take_back(self) -> list[Job]:
        return self.untaken

    def end(self, sequence: int, reason: EndReason) -> None:
        self.ends.append((sequence, reason))


class Clock:
    """Time that goes when it is told to."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def monotonic(self) -> float:
        return self.seconds

    def monotonic_ns(self) -> int:
        return round(self.seconds * 1e9)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def door(engine: FakeEngine, door_clock: Clock, door_log: CapturingLogger) -> Admission:
    """A door with two places in its queue."""
    del door_clock, door_log
    return Admission(engine, CONTEXT, 2, MAILBOXES)  # type: ignore[arg-type]


def enter(door: Admission, tokens: int = 10, max_tokens: int | None = 5) -> Ticket:
    """A request with a prompt of so many tokens."""
    return door.enter(
        caller=DEV_CALLER,
        prompt=np.arange(tokens, dtype=np.int32),
        max_tokens=max_tokens,
        sampling=SamplingParameters(temperature=0.5, seed=7),
        priority=-3,
        ignore_eos=True,
    )


def admit(door: Admission, *tickets: Ticket) -> None:
    door.streams.deliver(outcome(admissions=[(t.sequence, 0, 0) for t in tickets]))


def finish(door: Admission, ticket: Ticket, reason: EndReason = EndReason.STOP) -> None:
    door.streams.deliver(outcome(receipts=[(ticket.sequence, reason)]))


def test_what_enters_reaches_the_engine_as_it_was_asked(
    door: Admission, engine: FakeEngine, door_clock: Clock
) -> None:
    """A request would run for another tenant, with another's parameters, or late."""
    ticket = door.enter(
        caller=Caller(Tenant("four", 4)),
        prompt=np.array([5, 6], dtype=np.int32),
        max_tokens=9,
        sampling=SamplingParameters(temperature=0.5, seed=7),
        priority=-3,
        ignore_eos=True,
    )
    (job,) = engine.jobs
    assert (job.sequence, job.tenant, job.max_tokens) == (ticket.sequence, 4, 9)
    assert job.prompt.tolist() == [5, 6]
    assert job.sampling == SamplingParameters(temperature=0.5, seed=7)
    assert (job.priority, job.ignore_eos) == (-3, True)
    assert job.arrived_at == door_clock.monotonic_ns()
    assert ticket.prompt_tokens == 2


def test_every_change_of_who_is_here_is_told(engine: FakeEngine, door_log: CapturingLogger) -> None:
    """Who began at once would be counted as waiting until somebody else comes or ends."""
    del door_log
    told: list[tuple[tuple[int, ...], tuple[str, int, int, int]]] = []
    door = Admission(
        engine,  # type: ignore[arg-type]
        CONTEXT,
        2,
        MAILBOXES,
        on_crowd=lambda *change: told.append((door.crowd, change)),
    )
    first, second = enter(door), enter(door)
    admit(door, first)
    finish(door, first)
    door.end(second, EndReason.CANCELLED)
    finish(door, second)
    name, tokens = DEV_CALLER.name, first.prompt_tokens
    assert told == [
        ((1, 1, 0, 0), (name, 1, 1, tokens)),
        ((2, 2, 0, 0), (name, 1, 1, tokens)),
        ((2, 1, 0, 0), (name, 0, -1, tokens)),
        ((1, 1, 0, 0), (name, -1, 0, tokens)),
        ((1, 0, 0, 0), (name, 0, -1, tokens)),
        ((0, 0, 0, 0), (name, -1, 0, tokens)),
    ]


def test_sequences_and_ids_are_never_used_twice(door: Admission) -> None:
    """Two requests would share a mailbox or a receipt."""
    tickets = []
    for _ in range(50):
        tickets.append(enter(door))
        finish(door, tickets[-1])
    assert len({ticket.sequence for ticket in tickets}) == 50
    assert len({ticket.request_id for ticket in tickets}) == 50


@pytest.mark.parametrize(
    ("prompt", "asked", "given"),
    [
        (10, None, 91),
        (10, 1, 1),
        (10, 89, 89),
        (10, 90, 90),
        (10, 91, 91),
        (10, 2**31 - 1, 91),
        (99, None, 2),
        (99, 1, 1),
    ],
)
def test_asking_for_more_than_there_is_ends_with_context(
    door: Admission, engine: FakeEngine, prompt: int, asked: int | None, given: int
) -> None:
    """What fits exactly would end with CONTEXT, or what does not with LENGTH."""
    enter(door, prompt, asked)
    assert engine.jobs[0].max_tokens == given


@pytest.mark.parametrize("tokens", [0, 100, 101, 5000])
def test_what_can_never_fit_is_refused_at_once(
    door: Admission, engine: FakeEngine, tokens: int
) -> None:
    """It would wait for ever at the head of the queue."""
    with pytest.raises(InvalidRequest, match="prompt"):
        enter(door, tokens)
    assert engine.jobs == []
    assert door.streams.open_count == 0
    assert not door.open_requests


def test_a_small_pool_is_named_as_the_limit(door_clock: Clock, door_log: CapturingLogger) -> None:
    """The client would be told that the model is too small, and ask for another."""
    door = Admission(FakeEngine(40), CONTEXT, 2, MAILBOXES)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"at most 39 .* the whole KV pool"):
        enter(door, 40)
    enter(door, 39)


def test_one_more_than_may_wait_is_refused(door: Admission, engine: FakeEngine) -> None:
    """The queue would grow without an end, or be full while requests only run."""
    first, second = enter(door), enter(door)
    with pytest.raises(QueueFull) as refused:
        enter(door)
    assert refused.value.queued == 2
    assert len(engine.jobs) == 2
    assert door.streams.open_count == 2
    admit(door, first)
    third = enter(door)
    admit(door, second, third)
    enter(door)
    enter(door)
    with pytest.raises(QueueFull):
        enter(door)


def test_who_gave_up_waiting_frees_their_place(door: Admission) -> None:
    """Cancelled requests would fill the queue for good."""
    for _ in range(10):
        finish(door, enter(door), EndReason.CANCELLED)
    enter(door)
    enter(door)


def test_who_gives_up_waiting_leaves_at_once(door: Admission, engine: FakeEngine) -> None:
    """Others would be refused for as long as a step takes, for nobody's sake."""
    tickets = [enter(door), enter(door)]
    door.end(tickets[0], EndReason.CANCELLED)
    assert engine.ends == [(tickets[0].sequence, EndReason.CANCELLED)]
    assert (door.streams.waiting_count, door.streams.open_count) == (1, 2)
    enter(door)
    with pytest.raises(QueueFull) as refused:
        enter(door)
    assert refused.value.queued == 2
    finish(door, tickets[0], EndReason.CANCELLED)
    with pytest.raises(QueueFull):
        enter(door)  # its receipt makes no second place


def test_who_comes_and_goes_fills_no_memory(door: Admission, engine: FakeEngine) -> None:
    """A client that cancels at once could pile up prompts without end while a step runs."""
    gone = [enter(door) for _ in range(2)]
    for ticket in gone:
        door.end(ticket, EndReason.CANCELLED)
    with pytest.raises(QueueFull):
        enter(door)
    assert len(engine.jobs) == 2
    admit(door, gone[0])  # the step had taken it in when it was told to end
    finish(door, gone[1], EndReason.CANCELLED)
    assert door.streams.leaving_count == 0
    enter(door)
    enter(door)


def test_who_runs_or_has_ended_leaves_no_queue(door: Admission) -> None:
    """A request would be counted as leaving for ever, and the queue seem full."""
    for _ in range(10):
        ticket = enter(door)
        admit(door, ticket)
        door.end(ticket, EndReason.CANCELLED)
        finish(door, ticket, EndReason.CANCELLED)
        door.end(ticket, EndReason.CANCELLED)
    assert door.streams.leaving_count == 0
    enter(door)


def test_a_request_that_can_never_fit_is_told_so_even_if_the_queue_is_full(
    door: Admission,
) -> None:
    """The client would come back again and again with what can never be served."""
    enter(door)
    enter(door)
    with pytest.raises(InvalidRequest):
        enter(door, 100)


def test_a_draining_server_takes_nothing_new(door: Admission, engine: FakeEngine) -> None:
    """A server that should stop would go on for as long as clients come."""
    ticket = enter(door)
    door.drain()
    with pytest.raises(ServerDraining) as refused:
        enter(door)
    assert refused.value.retry_after_seconds > 0
    assert len(engine.jobs) == 1
    finish(door, ticket)
    assert not door.open_requests


def test_ending_all_cancels_what_is_open(door: Admission, engine: FakeEngine) -> None:
    """A request would outlive the server's last moment without a receipt."""
    finish(door, enter(door))
    first, second = enter(door), enter(door)
    door.end_all()
    assert engine.ends == [
        (first.sequence, EndReason.CANCELLED),
        (second.sequence, EndReason.CANCELLED),
    ]


def test_the_advice_follows_how_fast_places_become_free(door: Admission, door_clock: Clock) -> None:
    """Refused clients would come back too early, in vain, or much too late."""
    for seconds in (2.0, 0.5):
        tickets = []
        for _ in range(60):
            tickets.append(enter(door))
            admit(door, tickets[-1])
        for ticket in tickets:
            door_clock.seconds += seconds
            finish(door, ticket)
        assert door.retry_after(tickets[0]) == pytest.approx(seconds, rel=0.01)


@pytest.mark.parametrize(("seconds", "advice"), [(0.0, 0.1), (1e-6, 0.1), (1e6, 30.0)])
def test_the_advice_stays_within_bounds(
    door: Admission, door_clock: Clock, seconds: float, advice: float
) -> None:
    """Clients would be told to come back in no time, or next week."""
    tickets = []
    for _ in range(100):
        tickets.append(enter(door))
        admit(door, tickets[-1])
    for ticket in tickets:
        door_clock.seconds += seconds
        finish(door, ticket)
    assert door.retry_after(tickets[0]) == advice


def test_a_quiet_night_is_no_slow_queue(door: Admission, door_clock: Clock) -> None:
    """After hours without requests the first refused client would be sent away for 30 s."""
    ticket = enter(door)
    before = door.retry_after(ticket)
    door_clock.seconds += before
    finish(door, ticket)
    door_clock.seconds += 8 * 3600
    ticket = enter(door)
    door_clock.seconds += before
    finish(door, ticket)
    assert door.retry_after(ticket) == pytest.approx(before)


def test_each_end_is_one_line_without_the_prompt(
    door: Admission, door_log: CapturingLogger
) -> None:
    """Who was served what, and at which cost, could not be told from the log; or too much could."""
    ticket = enter(door, 77)
    finish(door, ticket, EndReason.LENGTH)
    (call,) = door_log.calls
    assert call.method_name == "info"
    assert call.args == ("request_finished",)
    assert call.kwargs["request_id"] == ticket.request_id
    assert call.kwargs["tenant"] == "dev"
    assert call.kwargs["reason"] == "length"
    assert "prompt" not in call.kwargs
    assert all(isinstance(value, (str, int, float)) for value in call.kwargs.values())
    json.dumps(call.kwargs)


def test_the_line_has_the_receipts_numbers(door: Admission, door_log: CapturingLogger) -> None:
    """Costs in the log would be off by the unit they are told in."""
    ticket = enter(door)
    built = outcome(receipts=[(ticket.sequence, EndReason.STOP)])
    (row,) = built.report.receipts
    row["held_seconds"], row["held_nanos"] = 3, 250_000_000
    row["queued"], row["prefill"], row["decode"] = 1_500_000, 2_000_000, 4_000_000_000
    row["peak_blocks"], row["output_tokens"] = 6, 9
    door.streams.deliver(built)
    told = door_log.calls[0].kwargs
    assert told["held_block_seconds"] == 3.25
    assert (told["queued_ms"], told["prefill_ms"], told["decode_ms"]) == (1.5, 2.0, 4000.0)
    assert (told["peak_blocks"], told["output_tokens"]) == (6, 9)


def test_failures_stand_out_in_the_log(door: Admission, door_log: CapturingLogger) -> None:
    """A failure would look like any other end."""
    finish(door, enter(door), EndReason.FAILED)
    door.streams.deliver(outcome(refusals=[enter(door).sequence]))
    assert [call.method_name for call in door_log.calls] == ["warning", "error"]
    assert not door.open_requests


def test_a_server_without_its_engine_ends_every_request_once(
    door: Admission, door_log: CapturingLogger
) -> None:
    """Requests would stay open for ever when the engine dies."""
    tickets = [enter(door), enter(door)]
    door.streams.fail_all()
    assert not door.open_requests
    told = {call.kwargs["request_id"] for call in door_log.calls}
    assert told == {ticket.request_id for ticket in tickets}


def test_scopes_are_held_from_the_door_to_the_receipt(door: Admission, engine: FakeEngine) -> None:
    """A scope would be purged while its request runs, or be kept when nobody needs it."""
    table = ScopeTable(ScopeKeys(KvIdentity("m", "c", "bf16")), lambda numbers: None)

    def enter_scope(tokens: int = 10) -> Ticket:
        return door.enter(
            caller=DEV_CALLER,
            prompt=np.arange(tokens, dtype=np.int32),
            max_tokens=5,
            sampling=SamplingParameters(),
            priority=0,
            ignore_eos=False,
            scopes=ScopeClaim(table, Scope.of_namespace("a", 1, str(len(table)))),
        )

    with pytest.raises(InvalidRequest):
        enter_scope(CONTEXT)
    assert len(table) == 0
    done, refused = enter_scope(), enter_scope()
    with pytest.raises(QueueFull):
        enter_scope()
    assert [job.scopes for job in engine.jobs] == [PrefixScopes(own=1), PrefixScopes(own=2)]
    assert (len(table), table.idle) == (2, 0)
    finish(door, done)
    assert table.idle == 1
    door.streams.deliver(outcome(refusals=[refused.sequence]))
    assert table.idle == 2
    enter_scope()
    door.streams.fail_all()
    assert table.idle == len(table) == 3
