"""Limits of tenants at the door: each holds, says which it is, and harms nobody else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tenant_door import Door, caller
from test_admission import Clock
from test_streams import outcome

from kvledger.engine import EndReason
from kvledger.errors import (
    InvalidRequest,
    QueuedTokensFull,
    QueueFull,
    SettingRefused,
    TenantClosed,
)
from kvledger.sampling import SamplingParameters
from kvledger.tenants.shares import CoreShare, PoolShape
from kvledger.tenants.token_bucket import BURST_SECONDS

POOL = PoolShape(blocks=10, block_bytes=1000, slots_per_block=8)


pytestmark = pytest.mark.usefixtures("door_clock", "door_log")


def test_requests_that_wait_have_a_limit_of_the_tenant() -> None:
    """One tenant could fill the queue."""
    door = Door()
    door.limit(t1={"queued_max": 2}, t2={})
    first = door.enter(1)
    door.enter(1)
    reached = door.reached(1)
    assert (reached.limit, reached.value) == ("queued_max", 2)
    assert "2 requests wait" in str(reached)
    for _ in range(3):
        door.enter(2)
    door.admit(first)
    door.enter(1)
    assert door.reached(1).limit == "queued_max"


def test_whom_the_next_step_admits_does_not_queue() -> None:
    """An idle server would refuse what it could begin at once."""
    door = Door(places=4)
    door.limit(t1={"queued_max": 1}, t2={})
    door.enter(2)
    for _ in range(3 + 1):
        door.enter(1)
    assert door.reached(1).limit == "queued_max"
    door.admission.streams.deliver(outcome(running=1, waiting=4))
    assert door.reached(1).limit == "queued_max"


def test_prompt_tokens_that_wait_have_a_limit_of_the_tenant() -> None:
    """A few long prompts would take as long as many short ones."""
    door = Door()
    door.limit(t1={"queued_tokens_max": 60}, t2={})
    first = door.enter(1, 40)
    reached = door.reached(1, 21)
    assert (reached.limit, reached.value) == ("queued_tokens_max", 60)
    assert "have 40 tokens, this one 21" in str(reached)
    door.enter(1, 20)
    door.enter(2, 90)
    door.admit(first)
    door.enter(1, 40)


def test_the_rate_is_charged_for_prompts_and_for_output(door_clock: Clock) -> None:
    """Long answers would be free, or be charged twice."""
    door = Door()
    door.limit(t1={"tokens_per_second": 4}, t2={})
    assert BURST_SECONDS == 10
    ticket, other = door.enter(1, 30), door.enter(2, 30)
    door.admit(ticket, other)
    for token in range(15):
        door.admission.streams.deliver(
            outcome(tokens=[(ticket.sequence, token), (other.sequence, token)])
        )
    reached = door.reached(1, 7)  # 40 - 30 - 15 is -5
    assert (reached.limit, reached.value) == ("tokens_per_second", 4)
    assert reached.retry_after_seconds == 3.0
    assert "7 tokens may enter in 3 s" in str(reached)
    door_clock.seconds += 2.875
    assert door.reached(1, 7).retry_after_seconds == 0.125
    door_clock.seconds += 0.125
    again = door.enter(1, 7)
    assert door.reached(1, 1).retry_after_seconds == 0.25
    door.finish(ticket)
    assert door.reached(1, 1).retry_after_seconds == 0.25, "an end changes nothing"
    for _ in range(20):
        door.enter(2, 90)
    door.finish(again, EndReason.CANCELLED)
    door.enter(1, 7)  # what never ran costs nothing


def test_samples_are_charged_for_all_their_output(door_clock: Clock) -> None:
    """A tenant would get sixteen answers for the price of one."""
    door = Door()
    door.limit(t1={"tokens_per_second": 1})
    ticket = door.enter(1, 6, samples=2)
    door.admit(ticket)
    first, second = ticket.sequences
    for _ in range(2):
        door.admission.streams.deliver(outcome(tokens=[(first, 1), (second, 2)]))
    assert door.reached(1, 3).retry_after_seconds == 3.0


def test_a_rate_holds_for_those_that_run_when_it_is_set() -> None:
    """A stream without an end would escape every later limit."""
    door = Door()
    ticket = door.enter(1, 30)
    door.admit(ticket)
    door.limit(t1={"tokens_per_second": 1})
    door.admission.streams.deliver(outcome(tokens=[(ticket.sequence, 1)] * 12))
    assert door.reached(1, 1).retry_after_seconds == 3.0
    door.limit(t1={})
    door.admission.streams.deliver(outcome(tokens=[(ticket.sequence, 1)]))
    door.enter(1, 90)
    door.finish(ticket)


@pytest.mark.parametrize(
    ("limits", "most", "words"),
    [
        ({"queued_tokens_max": 50}, 50, "queued_tokens_max of the tenant"),
        ({"kv_bytes_max": 3999}, 24, "kv_bytes_max, 3999 bytes"),
        ({"kv_max": 0.5}, 40, "share of the KV pool, 5 blocks"),
        ({"kv_guaranteed": 0.2, "sealed": True}, 16, "share of the KV pool, 2 blocks"),
    ],
)
def test_what_can_never_fit_is_refused_with_the_limit(
    limits: dict[str, Any], most: int, words: str
) -> None:
    """It would wait, or come back, for ever."""
    door = Door(pool=POOL)
    door.limit(t1=limits, t2={})
    with pytest.raises(InvalidRequest) as refused:
        door.enter(1, most + 1)
    assert words in str(refused.value)
    assert f"{most + 1} tokens, at most {most} " in str(refused.value)
    assert door.refusals == ["never_fits"]
    assert not door.admission.open_requests
    door.enter(1, most)
    door.enter(2, 60)


def test_an_answer_has_room_in_the_tenants_share_alone() -> None:
    """A sequence would grow past what its tenant may hold, and end for another reason."""
    door = Door(pool=POOL)
    door.limit(t1={"kv_bytes_max": 2000}, t2={})
    door.admission.enter(
        caller(1), np.arange(10, dtype=np.int32), None, SamplingParameters(), 0, False
    )
    assert door.engine.jobs[0].max_tokens == 2 * 8 + 1 - 10 + 1


def test_what_others_guarantee_themselves_is_no_room() -> None:
    """A prompt would wait for blocks that are never free for it."""
    door = Door(pool=POOL)
    door.limit(t1={"kv_guaranteed": 0.6}, t2={})
    door.enter(1, 80)
    door.enter(2, 32)
    with pytest.raises(InvalidRequest, match="4 blocks"):
        door.enter(2, 33)


def test_a_tenant_floods_and_others_enter() -> None:
    """Whoever sends most would have the queue to itself."""
    door = Door(queued_max=10)
    door.limit(t1={}, t2={}, t3={})
    flood = [door.enter(1) for _ in range(10)]
    with pytest.raises(QueueFull):
        door.enter(1)
    door.enter(2)
    door.enter(2)  # 12 wait, two tenants: nobody more but who has nothing here
    for tenant in (1, 2):
        with pytest.raises(QueueFull) as refused:
            door.enter(tenant)
        assert refused.value.queued == 10, "not what others have beyond it"
    door.enter(3)
    for ticket in flood[:2]:
        door.admit(ticket)
    with pytest.raises(QueueFull):
        door.enter(1)
    door.enter(2)
    door.enter(3)
    assert door.admission.streams.waiting_count == 13, "10 and one for each tenant"
    assert set(door.refusals) == {"queue_full"}


def test_who_comes_and_goes_keeps_nobody_out() -> None:
    """A tenant that cancels at once could fill what those that leave may hold."""
    door = Door(queued_max=2)
    door.limit(t1={}, t2={})
    for _ in range(2):
        door.admission.end(door.enter(1), EndReason.CANCELLED)
    with pytest.raises(QueueFull):
        door.enter(1)
    door.enter(2)


def test_prompt_tokens_of_all_tenants_have_a_limit() -> None:
    """Long prompts would make everybody wait longer than the number of requests says."""
    door = Door(queued_tokens_max=70)
    door.limit(t1={}, t2={})
    first = door.enter(1, 60)
    with pytest.raises(QueuedTokensFull) as refused:
        door.enter(1, 11)
    assert refused.value.retry_after_seconds == door.admission.retry_after(first)
    with pytest.raises(InvalidRequest, match="max-queued-tokens"):
        door.enter(2, 71)
    door.enter(2, 70)  # its first one always may
    with pytest.raises(QueuedTokensFull):
        door.enter(2, 1)
    assert door.refusals == ["queued_tokens_full", "never_fits", "queued_tokens_full"]


def test_limits_that_cannot_be_used_change_nothing() -> None:
    """Half of a change would hold."""
    door = Door(pool=POOL)
    door.limit(t1={"queued_max": 1})
    wrong: list[dict[str, Any]] = [
        {"kv_guaranteed": 1.0},
        {"running_max": -1},
        {"tokens_per_second": 0},
        {"tokens_per_second": float("nan")},
    ]
    for limits in wrong:
        with pytest.raises(SettingRefused, match=next(iter(limits))):
            door.limit(t1={}, t2=limits)
    assert len(door.shares) == 1
    door.enter(1)
    assert door.reached(1).limit == "queued_max"


def test_the_core_is_told_of_the_shares_when_they_change() -> None:
    """Limits would hold at the door and not in the pool."""
    door = Door(pool=POOL)
    door.limit(t1={"kv_guaranteed": 0.25, "kv_bytes_max": 6500}, t2={"kv_max": 0.5})
    assert door.shares == [
        [CoreShare(1, 2, 10, False, 6), CoreShare(2, 0, 5, False, 5)],
    ]


def test_shares_that_the_core_refuses_change_nothing() -> None:
    """The door would let in what the pool has no room for."""

    def refuse(shares: Sequence[CoreShare]) -> None:
        raise SettingRefused("no")

    door = Door(pool=POOL)
    door.limit(t1={"kv_max": 0.5})
    door.admission._set_shares = refuse
    with pytest.raises(SettingRefused):
        door.limit(t1={}, t2={})
    with pytest.raises(InvalidRequest):
        door.enter(1, 41)
    with pytest.raises(TenantClosed):
        door.enter(2)


def test_the_advice_is_of_the_tenants_own_requests(door_clock: Clock) -> None:
    """A tenant could tell from it how fast others are served, and from that what is cached."""
    door = Door(queued_max=1)
    door.limit(t1={"queued_max": 1}, t2={})
    for _ in range(60):
        fast = door.enter(2)
        door.admit(fast)
        door_clock.seconds += 0.2
        door.finish(fast)
    door.enter(1)
    assert door.reached(1).retry_after_seconds == 1.0
    door.enter(2)
    with pytest.raises(QueueFull) as full:
        door.enter(2)
    assert full.value.retry_after_seconds == pytest.approx(0.2, rel=0.01)
