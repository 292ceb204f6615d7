"""Calls whose clients take nothing: they end, whatever they wait in, and count as ended."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from http2_client import GENERATE, Http2Client
from prometheus_client import CollectorRegistry
from scripted_model import PATIENCE
from server_harness import ServerHarness, request, serving

from kvledger.rpc import calls
from kvledger.v1 import models_pb2

_LONG = {"text": "a", "max_tokens": 3000, "ignore_eos": True}
_ROOM = {"context_tokens": 4096, "blocks": 2000}


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits seconds."""
    monkeypatch.setattr(calls, "GRACE_SECONDS", 0.3)
    monkeypatch.setattr(calls, "_INTERVAL", 0.02)


def open_calls(server: ServerHarness) -> int:
    return server.server._front._calls.open_count


async def ended(server: ServerHarness, client: Http2Client) -> None:
    """Waits until the server has let go of the client's call, and the client hears of it."""
    reading = asyncio.create_task(client.read_until_closed())
    deadline = asyncio.get_running_loop().time() + PATIENCE
    while not reading.done() or open_calls(server) > 0:
        assert asyncio.get_running_loop().time() < deadline, "it did not come"
        # gRPC's own loop holds the last call until another one comes.
        await server.health.Check(health_pb2.HealthCheckRequest())
        await asyncio.sleep(0.02)
    assert client.reset is not None or client.trailers["grpc-status"] != "0"
    assert client.goaway is None, "its other streams go on"


def counted(server: ServerHarness, status: str) -> float:
    """Calls of clients that ended so."""
    registry: CollectorRegistry = server.server._metrics.registry
    return registry.get_sample_value("kvledger_requests_total", {"status": status}) or 0.0


async def test_a_stream_whose_window_never_opens_is_reset() -> None:
    """Its handler, what it waits to send, and its place on the connection would be lost."""
    async with serving("--mailbox-tokens", "16", "--stall-timeout", "0.1", **_ROOM) as server:
        client = await Http2Client.call(server.address, request(**_LONG))
        await server.until(lambda: server.log.of("request_finished"))
        await server.require_all_free()
        assert open_calls(server) == 1, "it may still come back"
        await ended(server, client)
        assert counted(server, "ABORTED") == 1
        assert server.log.of("calls_let_go") == [{"calls": 1, "stall_seconds": 0.1}]
        assert (await server.answer(text="a")).text == "bcde"
        await client.close()


async def test_a_short_answer_that_nobody_takes_is_reset_too() -> None:
    """What fits into the mailbox never pauses: it would wait in a write without end."""
    async with serving("--stall-timeout", "0.1") as server:
        client = await Http2Client.call(server.address, request(text="a", max_tokens=8))
        await server.until(lambda: server.log.of("request_finished"))
        assert server.log.reasons == ["length"]
        await ended(server, client)
        await client.close()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/kvledger.v1.ModelService/ListModels", models_pb2.ListModelsRequest()),
        ("/kvledger.v1.ModelService/GetModel", models_pb2.GetModelRequest(model="none")),
        ("/grpc.health.v1.Health/Watch", health_pb2.HealthCheckRequest()),
        (GENERATE, request(text="a", max_tokens=0)),
    ],
    ids=["unary", "refused", "watch", "refused stream"],
)
async def test_no_call_waits_for_ever(path: str, message: Message) -> None:
    """Any other method would do to fill the server with calls that never end."""
    async with serving("--stall-timeout", "0.1") as server:
        client = await Http2Client.call(server.address, message, path)
        await ended(server, client)
        await client.close()


async def test_who_comes_back_in_time_is_told_why() -> None:
    """A client that was busy for a while would see a broken stream instead of a reason."""
    async with serving("--mailbox-tokens", "16", "--stall-timeout", "0.1", **_ROOM) as server:
        client = await Http2Client.call(server.address, request(**_LONG))
        await server.until(lambda: server.log.of("request_finished"))
        await client.open_window(1 << 20)
        await client.read_until_closed()
        assert client.trailers["grpc-status"] == "10"
        await server.until(lambda: counted(server, "ABORTED") == 1)
        assert server.log.of("calls_let_go") == []
        await client.close()


async def test_who_is_slow_but_reads_is_not_let_go() -> None:
    """A reader who takes a little now and then would lose an answer that it still wants."""
    async with serving("--mailbox-tokens", "16", "--stall-timeout", "0.5", **_ROOM) as server:
        fields: dict[str, Any] = {**_LONG, "max_tokens": 120}
        client = await Http2Client.call(server.address, request(**fields))
        reading = asyncio.create_task(client.read_until_closed())
        while not client.trailers:
            await asyncio.sleep(0.1)
            if not client.ended:
                await client.open_window(60)
        await asyncio.wait_for(reading, PATIENCE)
        assert client.trailers["grpc-status"] == "0"
        assert server.log.of("calls_let_go") == []
        await client.close()


async def test_the_connection_of_a_lost_call_goes_on() -> None:
    """A gateway with one connection would lose all its streams with the one that nobody reads."""
    async with serving("--mailbox-tokens", "16", "--stall-timeout", "0.1", **_ROOM) as server:
        client = await Http2Client.call(server.address, request(**_LONG))
        await ended(server, client)
        await client.ping()
        while client.pongs == 0:
            assert await asyncio.wait_for(client.read_some(), PATIENCE)
        assert client.goaway is None
        await client.close()


async def test_what_was_let_go_leaves_no_memory() -> None:
    """Each lost call would keep its context and its messages until the server restarts."""
    kept: list[weakref.ref[calls.Call]] = []
    begin = calls.Calls._begin

    def remember(self: calls.Calls, path: str, context: Any) -> calls.Call:
        call = begin(self, path, context)
        kept.append(weakref.ref(call))
        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls.Calls, "_begin", remember)
        async with serving("--mailbox-tokens", "16", "--stall-timeout", "0.1", **_ROOM) as server:
            clients = [await Http2Client.call(server.address, request(**_LONG)) for _ in range(5)]
            for client in clients:
                await ended(server, client)
            await server.require_all_free()
            gc.collect()
            assert [ref for ref in kept[:5] if ref() is not None] == []
            for client in clients:
                await client.close()


async def test_every_end_is_counted_once() -> None:
    """A chart would show errors that nobody had, or none where everybody had one."""
    async with serving(sequences_max=1) as server:
        await server.answer(text="a")
        await server.refusal(text="a", max_tokens=0)
        with pytest.raises(grpc.aio.AioRpcError):
            await server.models.GetModel(models_pb2.GetModelRequest(model="none"))
        gate = server.gate()
        call = server.generation.Generate(request(**{**_LONG, "max_tokens": 90}))
        await server.until(lambda: gate.arrived)
        call.cancel()
        late = server.generation.Generate(request(**{**_LONG, "max_tokens": 90}), timeout=0.2)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await late.read()
        assert raised.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await server.health.Check(health_pb2.HealthCheckRequest())
        gate.open()
        await server.until(lambda: open_calls(server) == 0)
        statuses = ("OK", "INVALID_ARGUMENT", "NOT_FOUND", "CANCELLED", "DEADLINE_EXCEEDED")
        assert {status: counted(server, status) for status in statuses} == dict.fromkeys(
            statuses, 1.0
        ), "a probe is no request"
