"""Limits of tenants as their clients see them, in a whole server with several tenants at once."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from scripted_model import PATIENCE, Gate, expected
from server_harness import Answer, Refusal, ServerHarness, request, serving
from tenant_door import caller
from test_metrics import scraped

from kvledger.admission import Admission, Ticket
from kvledger.server import BROKE
from kvledger.tenants.tenant import Tenant, TenantLimits

LONG: dict[str, Any] = {"text": "a", "max_tokens": 50}


@pytest.fixture(autouse=True)
def tenants_by_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request's priority names its tenant."""
    enter = Admission.enter

    def enter_as_tenant(self: Admission, **asked: Any) -> Ticket:
        whose = caller(asked["priority"])
        return enter(self, **{**asked, "caller": whose, "priority": 0})

    monkeypatch.setattr(Admission, "enter", enter_as_tenant)


def limit(server: ServerHarness, **limits: dict[str, Any]) -> None:
    server.server._admission.set_tenants(
        [
            Tenant(name, int(name[1:]), limits=TenantLimits(**given))
            for name, given in limits.items()
        ]
    )


def start(server: ServerHarness, tenant: int, **fields: Any) -> asyncio.Task[Answer]:
    return asyncio.create_task(server.answer(priority=tenant, **{**LONG, **fields}))


def start_refused(server: ServerHarness, tenant: int, **fields: Any) -> asyncio.Task[Refusal]:
    return asyncio.create_task(server.refusal(priority=tenant, **{**LONG, **fields}))


async def open_count(server: ServerHarness, count: int) -> None:
    await server.until(lambda: len(server.server._admission.open_requests) == count)


def require_limit(refusal: Refusal, limit: str, value: str) -> None:
    """That it says which limit, whose, and when to come back."""
    assert refusal.code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert refusal.kinds == {"ErrorInfo", "QuotaFailure", "RetryInfo"}
    info = refusal.detail(error_details_pb2.ErrorInfo)
    facts = {"cause": "OWN_LIMIT", "limit": limit, "value": value}
    assert (info.reason, dict(info.metadata)) == ("TENANT_LIMIT", facts)
    (violation,) = refusal.detail(error_details_pb2.QuotaFailure).violations
    assert violation.subject == "t1"
    assert violation.description.startswith(f"{limit} {value}: ")
    assert f"{limit} of the tenant is {value}" in refusal.message
    assert refusal.retry_seconds > 0
    pushback = refusal.metadata["grpc-retry-pushback-ms"]
    assert int(pushback) == round(refusal.retry_seconds * 1000)


@pytest.mark.parametrize(
    ("limits", "prompt", "most"),
    [
        ({"queued_max": 2}, "a", "2"),
        ({"queued_tokens_max": 4}, "aa", "4"),
        # 20 tokens of burst: four prompts of 4 and three tokens of output.
        ({"tokens_per_second": 2.0}, "aaaa", "2"),
    ],
)
async def test_each_limit_is_named_and_harms_nobody_else(
    limits: dict[str, Any], prompt: str, most: str
) -> None:
    """A client would not know what to ask for, or pay for another tenant's flood."""
    (name,) = limits
    arguments = ("--metrics-listen", "127.0.0.1:0")
    async with serving(*arguments, sequences_max=1) as server:
        limit(server, t1=limits, t2={})
        gate = server.gate()
        entered = [start(server, 1, text=prompt)]
        await server.until(lambda: gate.arrived == 1)
        await server.until(lambda: server.server._admission.streams.waiting_count == 0)
        gate.let(3)
        await server.until(lambda: gate.arrived == 4)
        others = [start(server, 2, text="k", max_tokens=4) for _ in range(4)]
        await open_count(server, 5)
        room = 3 if name == "tokens_per_second" else 2
        entered += [start(server, 1, text=prompt, max_tokens=4) for _ in range(room)]
        await open_count(server, 5 + room)
        for _ in range(3):
            refusal = await server.refusal(text=prompt, priority=1)
            require_limit(refusal, name, most)
        others += [start(server, 2, text="k", max_tokens=4)]
        await open_count(server, 6 + room)
        gate.open()
        assert {answer.text for answer in await asyncio.gather(*others)} == {expected("k", 4)}
        assert {answer.reason for answer in await asyncio.gather(*entered)} == {"LENGTH"}
        assert len(server.log.reasons) == 6 + room, "one receipt for each that entered"
        metrics = await scraped(server)
        assert metrics[f"kvledger_refusals_total {name}"] == 3
        assert metrics["kvledger_refusals_total draining"] == 0
        await server.require_all_free()


async def test_a_flood_of_one_tenant_keeps_no_other_out() -> None:
    """Whoever sends most would have the queue to itself."""
    async with serving("--max-queued", "3", sequences_max=1) as server:
        limit(server, t1={}, t2={}, t3={})
        gate = server.gate()
        flood = [start(server, 1)]
        await server.until(lambda: gate.arrived == 1)
        await server.until(lambda: server.server._admission.streams.waiting_count == 0)
        flood += [start(server, 1, max_tokens=2) for _ in range(3)]
        await open_count(server, 4)
        assert (await server.refusal(text="a", priority=1)).reason == "QUEUE_FULL"
        others = [start(server, tenant, text="k", max_tokens=4) for tenant in (2, 3)]
        await open_count(server, 6)
        assert (await server.refusal(text="a", priority=1)).reason == "QUEUE_FULL"
        gate.open()
        assert {answer.text for answer in await asyncio.gather(*others)} == {expected("k", 4)}
        await asyncio.gather(*flood)
        assert server.log.reasons == ["length"] * 6
        await server.require_all_free()


async def test_what_can_never_fit_is_refused_with_the_limit() -> None:
    """A client would come back again and again with what can never be served."""
    # The core's blocks have as many tokens as the tiny model's.
    async with serving("--max-queued-tokens", "100", slots_per_block=32) as server:
        block = server.model.pool
        limit(server, t1={"kv_bytes_max": 2 * block.block_bytes - 1}, t2={})
        most = block.slots_per_block
        refusal = await server.refusal(text="a" * (most + 1), priority=1)
        assert refusal.code == grpc.StatusCode.INVALID_ARGUMENT
        assert refusal.violations == {
            "prompt": f"{most + 1} tokens, at most {most} leave room for an answer in the tenant's "
            f"kv_bytes_max, {2 * block.block_bytes - 1} bytes"
        }
        refusal = await server.refusal(text="a" * 101, priority=2)
        assert "at most 100 may wait here: --max-queued-tokens" in refusal.violations["prompt"]
        assert (await server.answer(text="a" * (most - 4), priority=1)).text == "bcde"
        assert (await server.answer(text="a" * 100, priority=2)).text == expected("a", 4)


async def test_more_than_may_run_is_served_in_turn_beside_others() -> None:
    """A tenant could run as much as there is room for, or its requests would be refused."""
    async with serving() as server:
        limit(server, t1={"running_max": 2}, t2={})
        most = 0
        all_are_here = threading.Event()
        all_are_here.set()

        def look(plan: Any) -> None:
            nonlocal most
            assert all_are_here.wait(PATIENCE)
            most = max(most, plan.sequences)

        server.scripted.before_step = look
        answers = await asyncio.gather(*[start(server, 1) for _ in range(9)])
        assert most == 2
        assert {answer.text for answer in answers} == {expected("a", 50)}
        waits = [answer.accepted.queue_time.ToNanoseconds() for answer in answers]
        assert max(waits) > 3 * 49 * 10_000, "they waited for three others, at the door"
        most = 0
        all_are_here.clear()
        asked = [start(server, tenant) for tenant in (1, 2) for _ in range(4)]
        await open_count(server, 8)
        all_are_here.set()
        await asyncio.gather(*asked)
        assert most > 4, "who has no such limit runs beside"
        assert server.log.reasons == ["length"] * 17
        await server.require_all_free()


async def _one_runs(server: ServerHarness) -> tuple[Gate, asyncio.Task[Answer]]:
    limit(server, t1={"running_max": 1}, t2={})
    gate = server.gate()
    running = start(server, 1)
    await server.until(lambda: gate.arrived == 1)
    await server.until(lambda: server.server._admission.streams.waiting_count == 0)
    return gate, running


async def test_waiting_at_the_door_has_the_limit_that_the_request_names() -> None:
    """A request's queue_timeout would begin only in the core."""
    async with serving() as server:
        gate, running = await _one_runs(server)
        refusal = await server.refusal(text="k", priority=1, seconds_to_wait=0.05)
        assert refusal.reason == "QUEUE_TIMEOUT"
        assert refusal.detail(error_details_pb2.ErrorInfo).metadata["cause"] == "OWN_LIMIT"
        assert refusal.receipt.computed_tokens == 0
        assert refusal.receipt.queue_time.ToNanoseconds() >= 50_000_000
        late = await server.refusal(text="k", priority=1, seconds_to_wait=0.0)
        assert late.reason == "QUEUE_TIMEOUT"
        assert server.log.reasons == ["cancelled"] * 2
        assert server.ends == [], "the core never heard of them"
        gate.open()
        assert (await running).reason == "LENGTH"
        assert (await server.answer(text="k", priority=1)).text == expected("k", 4)
        await server.require_all_free()


@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_who_goes_while_waiting_at_the_door_leaves_nothing(how: str) -> None:
    """Requests that nobody waits for would be computed, or hold up those behind them."""
    async with serving() as server:
        gate, running = await _one_runs(server)
        if how == "cancel":
            gone = start(server, 1, text="m")
            await open_count(server, 2)
            behind = start(server, 1, text="k", max_tokens=4)
            await open_count(server, 3)
            gone.cancel()
        else:
            call = server.generation.Generate(request(text="m", priority=1), timeout=0.3)
            reading = asyncio.create_task(call.read())
            await open_count(server, 2)
            behind = start(server, 1, text="k", max_tokens=4)
            await open_count(server, 3)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await reading
            assert raised.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await open_count(server, 2)
        assert server.log.reasons == ["cancelled"]
        gate.open()
        assert (await running).text == expected("a", 50)
        assert (await behind).text == expected("k", 4)
        assert server.log.reasons == ["cancelled", "length", "length"]
        await server.require_all_free()


async def test_a_drain_serves_those_at_the_door() -> None:
    """Requests that had entered would be dropped by every deployment."""
    async with serving() as server:
        gate, running = await _one_runs(server)
        held = [start(server, 1, text="k", max_tokens=4) for _ in range(3)]
        await open_count(server, 4)
        server.server.request_stop()
        await server.until(lambda: server.log.of("draining"))
        gate.open()
        assert {answer.text for answer in await asyncio.gather(*held)} == {expected("k", 4)}
        assert (await running).reason == "LENGTH"
        assert await asyncio.wait_for(server.exit, PATIENCE) == 0
        assert server.log.reasons == ["length"] * 4


async def test_a_hard_stop_gives_those_at_the_door_their_receipts() -> None:
    """A stop would wait for them, or end them without a word."""
    async with serving() as server:
        limit(server, t1={"running_max": 1}, t2={})
        gate = server.gate()
        tasks = [start_refused(server, 1) for _ in range(3)]
        await open_count(server, 3)
        await server.until(lambda: gate.arrived == 1)
        server.server.request_stop()
        server.server.request_stop()
        await server.until(lambda: server.ends)
        gate.open()
        refusals = await asyncio.gather(*tasks)
        assert {refusal.reason for refusal in refusals} == {"DRAINING"}
        assert sorted(refusal.receipt.computed_tokens > 0 for refusal in refusals) == [
            *(False, False, True)
        ]
        assert await asyncio.wait_for(server.exit, PATIENCE) == 0
        assert server.log.reasons == ["cancelled"] * 3


async def test_when_the_engine_dies_those_at_the_door_have_receipts() -> None:
    """They would be handed to an engine that is gone, and wait for ever."""
    async with serving() as server:
        limit(server, t1={"running_max": 1}, t2={})
        gate = server.gate()
        tasks = [start_refused(server, tenant) for tenant in (1, 1, 1, 2)]
        await open_count(server, 4)
        gate.let(2)
        await server.until(lambda: gate.arrived == 3)
        await server.until(lambda: server.server._admission.streams.waiting_count == 2)
        tasks.append(start_refused(server, 2))  # comes while the last step runs
        await open_count(server, 5)

        def die(*arguments: object) -> object:
            raise SystemExit("injected")

        server.core.commit = die  # type: ignore[method-assign, assignment]
        gate.open()
        refusals = await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE)
        assert {refusal.code for refusal in refusals} == {grpc.StatusCode.INTERNAL}
        assert len({refusal.receipt.request_id for refusal in refusals}) == 5
        assert await asyncio.wait_for(server.exit, PATIENCE) == BROKE
        assert server.log.reasons == ["failed"] * 5
        assert server.log.of("request_without_receipt") == []


async def test_a_limit_that_is_lowered_drains() -> None:
    """An operator's change would end streams that people are reading."""
    async with serving() as server:
        limit(server, t1={}, t2={})
        gate = server.gate()
        running = [start(server, 1) for _ in range(4)]
        await open_count(server, 4)
        await server.until(lambda: gate.arrived == 1)
        limit(server, t1={"running_max": 1, "queued_max": 1}, t2={})
        gate.let(3)
        await server.until(lambda: server.server._admission.streams.waiting_count == 0)
        held = start(server, 1, text="k", max_tokens=4)
        await open_count(server, 5)
        require_limit(await server.refusal(text="a", priority=1), "queued_max", "1")
        gate.open()
        assert {answer.text for answer in await asyncio.gather(*running)} == {expected("a", 50)}
        assert (await held).text == expected("k", 4)
        await server.require_all_free()
