"""What connections may do to the server: pings, sizes, and many readers that take nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import Counter
from pathlib import Path

import grpc
import h2.events
import h2.exceptions
import pytest
from grpc_channelz.v1 import channelz_pb2
from grpc_channelz.v1.channelz import ChannelzServicer
from http2_client import Http2Client
from scripted_model import PATIENCE
from server_harness import ServerHarness, refusal_of, request, serving

from kvledger.limits import MESSAGE_BYTES_MAX
from kvledger.rpc.connections import Keepalive, newest_server
from kvledger.v1 import models_pb2, models_pb2_grpc


def memory() -> int:
    """Bytes that the process has in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def _goes_away(server: ServerHarness, interval: float, pings: int) -> bool:
    """Whether the server sends a client away that pings so often beside one running call."""
    client = await Http2Client.call(server.address, request("a", max_tokens=200, ignore_eos=True))
    sent_away = asyncio.Event()

    async def listen() -> None:
        with contextlib.suppress(h2.exceptions.ProtocolError):  # after the goodbye more may come
            while data := await client._reader.read(65536):
                for event in client._http2.receive_data(data):
                    if isinstance(event, h2.events.ConnectionTerminated):
                        sent_away.set()
        sent_away.set()

    listening = asyncio.create_task(listen())
    with contextlib.suppress(h2.exceptions.ProtocolError):  # the goodbye came meanwhile
        for _ in range(pings):
            if sent_away.is_set():
                break
            client._http2.ping(b"are you?")
            await client._flush()
            await asyncio.sleep(interval)
    listening.cancel()
    await client.close()
    return sent_away.is_set()


async def test_pings_within_the_limit_are_fine() -> None:
    """A client that asks whether the line stands would be cut off in a long prefill (B117)."""
    async with serving(keepalive=Keepalive(client_pings=1)) as server:
        server.gate()  # nothing is sent meanwhile
        assert not await _goes_away(server, interval=1.6, pings=4)
        assert await _goes_away(server, interval=0.01, pings=100), "what pings too often is not"


def _of_size(size: int) -> bytes:
    """A message with a text of one letter, of so many bytes in all."""
    for text in range(size - 16, size):
        data = request("a" * text, max_tokens=None).SerializeToString()
        if len(data) == size:
            return data
    raise AssertionError("no text makes that size")


async def test_the_largest_message_is_exactly_as_large_as_is_said() -> None:
    """A limit that is set and not kept would refuse what the contract allows (B120)."""
    async with serving() as server:
        call = server.channel.unary_stream("/kvledger.v1.GenerationService/Generate")
        within = await refusal_of(call(_of_size(MESSAGE_BYTES_MAX)).read())
        assert within.code == grpc.StatusCode.INVALID_ARGUMENT, "it came in; its text is too long"
        beyond = await refusal_of(call(_of_size(MESSAGE_BYTES_MAX + 1)).read())
        assert beyond.code == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_fifty_readers_that_take_nothing_take_little_memory() -> None:
    """What nobody reads would pile up in the server until it has no memory (B116)."""
    room = {"context_tokens": 4096, "blocks": 2000, "sequences_max": 64, "token_budget": 64}
    async with serving("--mailbox-tokens", "16", **room) as server:
        await server.answer(text="a")
        before = memory()
        slow = request("a", max_tokens=2000, ignore_eos=True)
        clients = [await Http2Client.call(server.address, slow) for _ in range(50)]
        await server.until(lambda: len(server.core.paused) == 50)
        for _ in range(20):
            assert (await server.answer(text="k", max_tokens=20)).text.startswith("lmno")
        assert memory() - before < 50 << 20
        for client in clients:
            await client.close()
        await server.require_all_free()


def _calls_at_once(address: str, count: int) -> Counter[str]:
    """How so many calls end that come at once on one connection."""
    with grpc.insecure_channel(address) as channel:
        stub = models_pb2_grpc.ModelServiceStub(channel)  # type: ignore[no-untyped-call]
        calls = [stub.ListModels.future(models_pb2.ListModelsRequest()) for _ in range(count)]
        return Counter(call.code().name for call in calls)


def _calls_begun(server: int) -> int:
    """Calls that have come to a server, by gRPC's own number of it."""
    answer = ChannelzServicer.GetServer(channelz_pb2.GetServerRequest(server_id=server), None)
    return int(answer.server.data.calls_started)


def _keep_the_loop_until_called(server: int, count: int, late_seconds: float) -> None:
    """Keeps the event loop, as a long piece of work would, for so long after the calls came."""
    ends = time.monotonic() + PATIENCE
    while _calls_begun(server) < count:
        assert time.monotonic() < ends, f"{_calls_begun(server)} of {count} calls came"
        time.sleep(0.01)
    time.sleep(late_seconds)


@pytest.mark.parametrize(
    "late_seconds", [0.2, pytest.param(32, marks=pytest.mark.soak)], ids=["at once", "for long"]
)
async def test_calls_that_wait_for_a_busy_loop_are_not_dropped(late_seconds: float) -> None:
    """gRPC drops what is not taken in, as CANCELLED, of which nobody is told and tries again."""
    count = 2000  # gRPC by itself begins to drop at 1,000, and what waits for 30 s
    async with serving("--operators-listen", "none") as server:
        calls = asyncio.ensure_future(asyncio.to_thread(_calls_at_once, server.address, count))
        await asyncio.sleep(0)  # the thread starts
        _keep_the_loop_until_called(newest_server(), count, late_seconds)
        assert await calls == {"OK": count}
