"""The port: taking it, keeping it, and what strangers send to it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from scripted_model import PATIENCE, expected
from server_harness import ServerHarness, refusal_of, serving

from kvledger.errors import SettingRefused
from kvledger.rpc.listener import Listener
from kvledger.v1 import models_pb2

NOT_UTF8 = b"/kvledger.v1.\xff\xfe/Generate"


@asynccontextmanager
async def neighbours(server: ServerHarness) -> AsyncIterator[None]:
    """Four streams that run through all that happens inside, and must come out whole."""
    fields: dict[str, Any] = {"text": "k", "max_tokens": 200, "ignore_eos": True}
    gate = server.gate()
    tasks = [asyncio.create_task(server.answer(**fields)) for _ in range(4)]
    await server.until(lambda: len(server.server._admission.open_requests) == 4)
    gate.let(3)
    await server.until(lambda: gate.arrived == 4)
    yield
    gate.open()
    assert {answer.text for answer in await asyncio.gather(*tasks)} == {expected("k", 200)}
    assert (await server.answer(text="a")).text == "bcde"
    await server.require_all_free()


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
async def test_port_zero_is_a_free_port(host: str) -> None:
    """Several servers on one machine would need somebody who hands out ports."""
    if host == "[::1]" and not _has_ipv6():
        pytest.skip("this machine has no ::1")
    async with serving("--listen", f"{host}:0") as one, serving("--listen", f"{host}:0") as other:
        assert 0 < one.server.port != other.server.port > 0
        assert (await one.answer(text="a")).text == "bcde"
        assert (await other.answer(text="a")).text == "bcde"
        assert one.log.of("serving")[0]["listen"] == one.address


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


async def test_a_taken_port_is_refused_in_one_sentence() -> None:
    """Two servers on one port would share its connections without a word."""
    async with serving() as server:
        with pytest.raises(SettingRefused, match=r"^--listen 127\.0\.0\.1:\d+: the address is in"):
            async with serving("--listen", server.address):
                pass
        with pytest.raises(SettingRefused, match="not this machine's"):
            async with serving("--listen", "192.0.2.1:0"):
                pass
        assert (await server.answer(text="a")).text == "bcde"


GARBAGE = [
    b"GET / HTTP/1.1\r\nHost: canary-4711\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    bytes(range(256)) * 64,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 4096,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x04\x08\x00\x00\x00\x00\x00\x7f\xff\xff\xff",
    b"",
]


async def test_garbage_harms_nobody() -> None:
    """A port scan, or a browser, would end the server or somebody's stream."""
    async with serving() as server, neighbours(server):
        for data in GARBAGE * 3:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.server.port)
            writer.write(data)
            if data:
                with contextlib.suppress(OSError):  # it may have hung up already
                    writer.write_eof()
                    await asyncio.wait_for(reader.read(1 << 16), PATIENCE)
            writer.transport.abort()
        assert "canary" not in str(server.log.lines)


async def test_half_a_call_harms_nobody() -> None:
    """A connection that begins and says no more would keep the server from others."""
    async with serving() as server, neighbours(server):
        writers = []
        for _ in range(20):
            _, writer = await asyncio.open_connection("127.0.0.1", server.server.port)
            writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")
            writers.append(writer)
        models = await server.models.ListModels(models_pb2.ListModelsRequest())
        assert len(models.models) == 1
        for writer in writers:
            writer.transport.abort()


async def test_one_connection_too_many_is_closed_and_harms_nobody() -> None:
    """Connections that do nothing could use up the descriptors of the whole process."""
    async with serving("--max-connections", "3") as server, neighbours(server):  # they share one
        held = [await asyncio.open_connection("127.0.0.1", server.server.port) for _ in range(2)]
        for reader, _ in held:
            assert await asyncio.wait_for(reader.read(9), PATIENCE), "it greets"
        reader, writer = await asyncio.open_connection("127.0.0.1", server.server.port)
        assert await asyncio.wait_for(reader.read(9), PATIENCE) == b""
        for _, held_writer in [*held, (reader, writer)]:
            held_writer.transport.abort()


async def test_a_large_message_is_refused() -> None:
    """One message could fill the memory."""
    async with serving() as server, neighbours(server):
        refusal = await server.refusal(text="x" * (5 << 20))
        assert refusal.code == grpc.StatusCode.RESOURCE_EXHAUSTED
        refusal = await server.refusal(text="x" * (3 << 20))
        assert refusal.code == grpc.StatusCode.INVALID_ARGUMENT, "a smaller one is looked at"


async def test_large_metadata_is_refused() -> None:
    """Headers could fill the memory instead."""
    async with serving() as server, neighbours(server):
        refusal = await server.refusal(text="a", metadata=(("canary", "x" * (100 << 10)),))
        assert refusal.code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "canary" not in str(server.log.lines)


async def test_metadata_within_the_limit_is_fine() -> None:
    """Callers behind a gateway that adds headers could not get in."""
    async with serving() as server:
        answer = await server.answer(text="a", metadata=(("canary", "x" * (8 << 10)),))
        assert answer.text == "bcde"
        assert "canary" not in str(server.log.lines)


async def test_a_method_that_is_no_text_harms_nobody() -> None:
    """grpc.aio ends its server when a client calls such a method: all would be cut off."""
    async with serving() as server:
        port = server.server.port
        async with neighbours(server):
            for round_ in range(1, 4):
                options = (("grpc.use_local_subchannel_pool", 1),)
                async with grpc.aio.insecure_channel(server.address, options=options) as channel:
                    await refusal_of(channel.unary_unary(NOT_UTF8)(b"", timeout=PATIENCE / 4))
                await server.until(lambda n=round_: len(server.log.of("listener_broke")) == n)
                async with grpc.aio.insecure_channel(server.address, options=options) as channel:
                    list_models = channel.unary_unary("/kvledger.v1.ModelService/ListModels")
                    assert await list_models(b"", wait_for_ready=True, timeout=PATIENCE)
        assert server.server.port == port
        assert not server.exit.done()


async def test_who_runs_on_a_broken_listener_gets_a_status_at_the_end() -> None:
    """After a replacement, streams on the old one would be forgotten when the server stops."""
    async with serving("--drain-timeout", "0") as server:
        gate = server.gate()
        call = asyncio.create_task(server.refusal(text="a", max_tokens=200))
        gate.let(2)
        await server.until(lambda: gate.arrived == 3)
        options = (("grpc.use_local_subchannel_pool", 1),)
        async with grpc.aio.insecure_channel(server.address, options=options) as channel:
            await refusal_of(channel.unary_unary(NOT_UTF8)(b"", timeout=PATIENCE / 4))
        await server.until(lambda: server.log.of("listener_broke"))
        server.server.request_stop()
        await server.until(lambda: server.ends)
        gate.let(2)
        refusal = await call
        assert refusal.code == grpc.StatusCode.UNAVAILABLE
        assert refusal.receipt.computed_tokens > 0
        gate.open()
        assert await asyncio.wait_for(server.exit, PATIENCE) == 0


async def test_a_port_that_was_lost_ends_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that nobody can reach any more would run on and look healthy."""
    monkeypatch.setattr("kvledger.rpc.listener._ATTEMPTS", 2)
    listener = Listener("127.0.0.1:0", grpc.aio.server)
    await listener.start()
    watch = asyncio.create_task(listener.watch())

    async def broken(timeout: float) -> bool:
        raise UnicodeDecodeError("utf-8", b"", 0, 1, "injected")

    def taken(self: Listener) -> grpc.aio.Server:
        raise SettingRefused("the address is in use")

    monkeypatch.setattr(Listener, "_bound", taken)
    monkeypatch.setattr(listener._server, "wait_for_termination", broken)
    with pytest.raises(SettingRefused):
        await asyncio.wait_for(watch, PATIENCE)
    await listener.stop(0)
