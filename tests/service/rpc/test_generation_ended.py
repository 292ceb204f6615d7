"""Requests that end before their time: blocks, receipts and what the caller is told."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
import pytest_asyncio
import torch
from google.rpc import error_details_pb2
from scripted_model import Gate, expected
from server_harness import Proxy, ServerHarness, refusal_of, request, serving

from kvledger import _core
from kvledger.engine import EndReason
from kvledger.streams import Mailbox
from kvledger.v1 import generation_pb2_grpc

LONG: dict[str, Any] = {"text": "a" * 20, "max_tokens": 200, "ignore_eos": True}


@pytest_asyncio.fixture
async def server() -> AsyncIterator[ServerHarness]:
    async with serving() as server:
        yield server


@dataclass
class Caller:
    """Somebody whose long request has its first token, and a way to leave."""

    call: Any
    leave: Callable[[], Awaitable[None]]


Arrival = Callable[[ServerHarness, Gate], Any]


async def _first_token(call: Any, server: ServerHarness, gate: Gate) -> None:
    gate.let(1)
    assert (await call.read()).WhichOneof("event") == "accepted"
    assert (await call.read()).WhichOneof("event") == "delta"
    await server.until(lambda: gate.arrived == 2)


async def who_cancels(server: ServerHarness, gate: Gate) -> AsyncIterator[Caller]:
    call = server.generation.Generate(request(**LONG))
    await _first_token(call, server, gate)

    async def leave() -> None:
        call.cancel()

    yield Caller(call, leave)


async def whose_deadline_passes(server: ServerHarness, gate: Gate) -> AsyncIterator[Caller]:
    call = server.generation.Generate(request(**LONG), timeout=2.0)
    await _first_token(call, server, gate)

    async def leave() -> None:
        assert await call.code() == grpc.StatusCode.DEADLINE_EXCEEDED

    yield Caller(call, leave)


async def whose_line_is_cut(server: ServerHarness, gate: Gate) -> AsyncIterator[Caller]:
    async with (
        Proxy.before(server.server.port) as proxy,
        grpc.aio.insecure_channel(proxy.address) as channel,
    ):
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Generate(request(**LONG))
        await _first_token(call, server, gate)

        async def leave() -> None:
            proxy.reset()

        yield Caller(call, leave)


async def who_reads_one_answer_only(server: ServerHarness, gate: Gate) -> AsyncIterator[Caller]:
    """Like a unary call: nothing is sent to it before the end (B83)."""
    call = server.generation.Generate(request(**LONG, final_only=True))
    gate.let(1)
    assert (await call.read()).WhichOneof("event") == "accepted"
    await server.until(lambda: gate.arrived == 2)

    async def leave() -> None:
        call.cancel()

    yield Caller(call, leave)


@pytest.mark.parametrize(
    "arrive",
    [who_cancels, whose_deadline_passes, whose_line_is_cut, who_reads_one_answer_only],
    ids=lambda arrive: arrive.__name__,
)
async def test_who_leaves_gives_the_blocks_back_within_two_steps(
    server: ServerHarness, arrive: Arrival
) -> None:
    """Memory would stay with somebody who is gone, until the longest answer is computed (B83)."""
    gate = server.gate()
    async for caller in arrive(server, gate):
        assert server.core.balances["held"] >= 3
        await caller.leave()
        await server.until(lambda: server.ends)
        ((sequence, reason, plans),) = server.ends
        assert reason == EndReason.CANCELLED
        gate.let(2)
        await server.until(lambda: server.log.reasons)
        assert server.core.receipts[sequence] <= plans + 2
        assert server.log.reasons == ["cancelled"]
        await server.require_all_free()


async def test_who_stays_keeps_the_blocks(server: ServerHarness) -> None:
    """Blocks that come back by themselves would prove nothing about those who leave."""
    gate = server.gate()
    async for _ in who_cancels(server, gate):
        gate.let(2)
        await server.until(lambda: gate.arrived == 4)
        assert server.ends == []
        assert server.log.reasons == []
        assert server.core.balances["held"] >= 3


async def test_who_leaves_while_waiting_is_never_computed() -> None:
    """A full server would work for people who have given up."""
    async with serving(forecast=False) as server:  # eight places, all taken
        gate = server.gate()
        running = [asyncio.create_task(server.answer(**LONG)) for _ in range(8)]
        await server.until(lambda: len(server.server._admission.open_requests) == 8)
        gate.let(8)
        await server.until(lambda: gate.arrived == 9)
        waiting = server.generation.Generate(request("k", max_tokens=9))
        await server.until(lambda: len(server.server._admission.open_requests) == 9)
        waiting.cancel()
        await server.until(lambda: server.ends)
        gate.open()
        await asyncio.gather(*running)
        (line,) = [
            line for line in server.log.of("request_finished") if line["reason"] == "cancelled"
        ]
        assert (line["output_tokens"], line["held_block_seconds"]) == (0, 0.0)
        await server.require_all_free()


async def test_a_hundred_cut_lines_under_eight_streams() -> None:
    """Each lost client would leave blocks behind, or harm those who stay (B81)."""
    async with (
        serving(sequences_max=16, blocks=256) as server,
        Proxy.before(server.server.port) as proxy,
    ):
        eight = [asyncio.create_task(server.answer(**{**LONG, "text": "k"})) for _ in range(8)]
        for _ in range(100):
            options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
            async with grpc.aio.insecure_channel(proxy.address, options=options) as channel:
                stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
                call = stub.Generate(request(**LONG))
                for _ in range(3):
                    await call.read()
                proxy.reset()
        assert {answer.text for answer in await asyncio.gather(*eight)} == {expected("k", 200)}
        await server.require_all_free()
        assert len(server.log.reasons) == 108
        assert server.log.reasons.count("length") >= 8
        assert server.log.reasons.count("cancelled") > 50
        assert (await server.answer(text="a")).text == "bcde"


async def test_a_failed_step_ends_its_requests_with_a_receipt(server: ServerHarness) -> None:
    """A fault in the model would end the server, or be told without what it cost."""
    failing = asyncio.Event()

    def fail(plan: _core.Plan) -> None:
        if failing.is_set():
            failing.clear()
            raise RuntimeError("secret of the inside")

    server.scripted.before_step = fail
    assert (await server.answer(text="a")).text == "bcde"
    failing.set()
    refusal = await server.refusal(text="a" * 20)
    assert refusal.code == grpc.StatusCode.INTERNAL
    assert refusal.reason == "REQUEST_FAILED"
    (line,) = [line for line in server.log.of("request_finished") if line["reason"] == "failed"]
    told = refusal.detail(error_details_pb2.RequestInfo).request_id
    assert told == refusal.receipt.request_id == line["request_id"]
    assert told in refusal.message
    assert refusal.receipt.peak_blocks == 3
    assert "secret" not in refusal.everything()
    assert len(server.log.of("step_failed")) == 1
    assert (await server.answer(text="k")).text == "lmno"
    assert server.log.reasons == ["length", "failed", "length"]
    await server.require_all_free()


async def test_unusable_numbers_end_one_request_alone(server: ServerHarness) -> None:
    """One request's NaN would come out as text, or spoil its neighbours."""

    def spoil(logits: torch.Tensor, plan: _core.Plan) -> None:
        logits[torch.from_numpy(plan.token_ids[plan.logit_tokens] == ord("P"))] = float("nan")

    server.scripted.after_step = spoil
    refusal, answer = await asyncio.gather(server.refusal(text="P"), server.answer(text="a"))
    assert refusal.code == grpc.StatusCode.INTERNAL
    assert answer.text == "bcde"
    assert refusal.receipt.computed_tokens <= 1


async def test_a_mistake_of_ours_says_nothing_of_the_request(
    server: ServerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unforeseen exception would show the caller, or the log, what somebody wrote."""

    canary = "canary-" + str(4711)  # the traceback shows lines of code

    def break_down(*arguments: object) -> object:
        raise KeyError(canary)

    monkeypatch.setattr("kvledger.rpc.generation.OutputText.feed", break_down)
    refusal = await server.refusal(text=canary, max_tokens=200)
    assert refusal.code == grpc.StatusCode.INTERNAL
    assert canary not in refusal.everything()
    (line,) = server.log.of("unexpected_error")
    assert line["error"] == "KeyError"
    assert line["incident"] in refusal.message
    assert canary not in str(server.log.lines)
    assert refusal.receipt.request_id
    assert len(server.log.reasons) == 1
    await server.require_all_free()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tasks do not say who cancelled them")
async def test_what_is_cancelled_inside_still_gets_a_status(
    server: ServerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC sends nothing for it: a caller without a deadline would wait for ever (B112)."""
    whole, waits = Mailbox.arrival, []

    def cancelled(mailbox: Mailbox) -> asyncio.Future[None] | None:
        arrival = whole(mailbox)
        if arrival is not None:
            waits.append(arrival)
            if len(waits) == 3:
                arrival.cancel()
        return arrival

    monkeypatch.setattr(Mailbox, "arrival", cancelled)
    call = server.generation.Generate(request(**LONG))

    async def read() -> None:
        async for _ in call:
            pass

    refusal = await asyncio.wait_for(refusal_of(read()), 5)
    assert refusal.code == grpc.StatusCode.UNAVAILABLE
    assert refusal.receipt.computed_tokens > 0
    await server.require_all_free()


async def test_a_client_that_goes_at_once_leaves_nothing(server: ServerHarness) -> None:
    """A call that is cancelled before it is accepted would be forgotten in the books."""
    for _ in range(20):
        call = server.generation.Generate(request(**LONG))
        await asyncio.sleep(0)
        call.cancel()
    assert (await server.answer(text="a")).text == "bcde"
    await server.require_all_free()


async def test_a_deadline_while_waiting_is_told_at_once(server: ServerHarness) -> None:
    """A caller whose deadline has passed would go on waiting, and keep its place."""
    gate = server.gate()
    running = asyncio.create_task(server.answer(text="a"))
    await server.until(lambda: gate.arrived == 1)
    call = server.generation.Generate(request("k"), timeout=1.0)
    await server.until(lambda: len(server.server._admission.open_requests) == 2)
    refusal = await refusal_of(call.read())
    assert refusal.code == grpc.StatusCode.DEADLINE_EXCEEDED
    await server.until(lambda: server.ends)
    gate.open()
    assert (await running).text == "bcde"
    await server.until(lambda: "cancelled" in server.log.reasons)
    await server.require_all_free()
