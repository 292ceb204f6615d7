"""Connections: who vanished is noticed, who asks whether we are there is answered."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest
from http2_client import Http2Client
from scripted_model import PATIENCE
from server_harness import ServerHarness, serving

from kvledger.rpc.connections import KEEPALIVE, Keepalive
from kvledger.v1 import models_pb2

_ROOM = {"context_tokens": 4096, "blocks": 2000}
_LONG = {"text": "a", "max_tokens": 3000, "ignore_eos": True}
_SHORT = Keepalive(ask=0.5, answer=0.3, client_pings=0.2)

_CLIENT = """
import sys, grpc
from kvledger.v1 import generation_pb2 as pb, generation_pb2_grpc
channel = grpc.insecure_channel(sys.argv[1])
request = pb.GenerateRequest(text="a", stop={"max_tokens": 3000, "ignore_eos": True})
responses = generation_pb2_grpc.GenerationServiceStub(channel).Generate(request)
next(responses)
print("started", flush=True)
for response in responses:
    pass
"""


@contextmanager
def client_process(address: str) -> Iterator[subprocess.Popen[str]]:
    """A client with a long answer on the way, in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", _CLIENT, address], stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(PATIENCE)
        assert process.stdout is not None
        process.stdout.close()


async def noticed_after(server: ServerHarness, longest: float) -> float:
    """Seconds until the request of a client that is stopped has ended."""
    # Steps go on, and slowly: the answer is not over before anybody notices.
    server.scripted.before_step = lambda plan: time.sleep(0.02)
    with client_process(server.address) as process:
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == "started\n"
        process.send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        while not server.log.of("request_finished"):
            assert time.monotonic() < stopped + longest, "nobody noticed"
            await asyncio.sleep(0.05)
        seconds = time.monotonic() - stopped
    await server.require_all_free()
    assert server.log.reasons == ["cancelled"]
    assert server.server._front._calls.open_count == 0
    return seconds


async def test_a_client_that_is_stopped_is_noticed() -> None:
    """A machine that lost its power would hold blocks and a connection until TCP gives up."""
    async with serving(keepalive=_SHORT, **_ROOM) as server:
        await noticed_after(server, PATIENCE)


@pytest.mark.soak
async def test_a_client_that_is_stopped_is_noticed_in_35_seconds() -> None:
    """The same with the times that are shipped."""
    async with serving(**_ROOM) as server:
        assert await noticed_after(server, 35.0) > 15.0, "a pause of a moment is no end"


def test_what_is_shipped_notices_in_35_seconds() -> None:
    """The fast test would prove something about other numbers than those in use."""
    assert KEEPALIVE.ask + KEEPALIVE.answer <= 30.0
    assert KEEPALIVE.client_pings < 10.0


async def test_a_client_that_pings_often_enough_to_live_is_not_sent_away() -> None:
    """Clients that keep their connections alive, as many do, would lose them every minute."""
    async with serving(keepalive=Keepalive(client_pings=0.2)) as server:
        client = await Http2Client.call(
            server.address, models_pb2.ListModelsRequest(), "/kvledger.v1.ModelService/ListModels"
        )
        await client.open_window(1 << 16)
        await client.read_until_closed()  # from now on it pings without a call
        for count in range(1, 6):
            await asyncio.sleep(0.3)
            await client.ping()
            while client.pongs < count:
                assert await asyncio.wait_for(client.read_some(), PATIENCE)
        assert client.goaway is None
        await client.close()


async def test_a_client_that_pings_all_the_time_is_sent_away() -> None:
    """The test above would pass with a server that has no limit; and pings cost."""
    async with serving(keepalive=Keepalive(client_pings=60.0)) as server:
        client = await Http2Client.call(
            server.address, models_pb2.ListModelsRequest(), "/kvledger.v1.ModelService/ListModels"
        )
        await client.open_window(1 << 16)
        await client.read_until_closed()
        for _ in range(8):
            if client.goaway is not None:
                break
            await client.ping()
            assert await asyncio.wait_for(client.read_some(), PATIENCE)
            await asyncio.sleep(0.05)
        assert client.goaway == 11, "ENHANCE_YOUR_CALM"
        await client.close()


@pytest.mark.soak
async def test_grpc_clients_that_ping_every_ten_seconds_stay() -> None:
    """The same with gRPC's own client and the times that are shipped."""
    async with serving() as server:
        options = (
            *(("grpc.keepalive_time_ms", 10_000), ("grpc.keepalive_permit_without_calls", 1)),
            *(("grpc.http2.max_pings_without_data", 0), ("grpc.use_local_subchannel_pool", 1)),
        )
        async with grpc.aio.insecure_channel(server.address, options=options) as channel:
            await channel.channel_ready()
            states = [channel.get_state()]
            deadline = time.monotonic() + 45.0
            while time.monotonic() < deadline:
                change = asyncio.create_task(channel.wait_for_state_change(states[-1]))
                await asyncio.wait((change,), timeout=deadline - time.monotonic())
                if change.done():
                    states.append(channel.get_state())
                change.cancel()
            assert states == [grpc.ChannelConnectivity.READY]


async def test_an_ordinary_stream_outlives_the_keepalive() -> None:
    """A client that waits long for its first token would be taken for one that vanished."""
    async with serving(keepalive=_SHORT, **_ROOM) as server:
        gate = server.gate()
        answer = asyncio.create_task(server.answer(**{**_LONG, "max_tokens": 20}))
        await asyncio.sleep(2.0)
        gate.open()
        assert (await answer).reason == "LENGTH"
