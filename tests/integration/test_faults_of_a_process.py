"""Faults that only a process of its own can have: logs that block, lost devices, signals."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from http2_client import Http2Client
from server_process import (
    PATIENCE,
    answer,
    command,
    environment,
    generation,
    models,
    request,
    tiny_server,
)

from kvledger.v1 import generation_pb2 as pb
from kvledger.v1 import models_pb2

# --- F11: a log that takes nothing ------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.parametrize("log", ["full disk", "blocked pipe"])
def test_a_log_that_takes_nothing_stops_nothing(tiny: Path, log: str) -> None:
    """A full disk, or a collector that hangs, would take the service from everybody."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    reading, writing = os.pipe() if log == "blocked pipe" else (-1, os.open("/dev/full", os.O_RDWR))
    options = ("--dev", "--listen", f"127.0.0.1:{port}", "--model", str(tiny), "--kv-blocks", "8")
    process = subprocess.Popen(
        command(*options, "--log-format", "json"),
        env=environment(),
        stderr=writing,
        stdout=subprocess.DEVNULL,
    )
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            listed = models_pb2.ListModelsRequest()
            models(channel).ListModels(listed, wait_for_ready=True, timeout=PATIENCE)
            first = answer(channel, request("a", 2))
            # Each writes a line: more than a pipe holds.
            for _ in range(200 if log == "blocked pipe" else 10):
                assert answer(channel, request("a", 2)) == first
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.wait()
        for descriptor in (reading, writing):
            if descriptor >= 0:
                os.close(descriptor)


# --- F7, F13: an engine that hangs, a device that is lost --------------------------------------

_AT_CALL = """
from kvledger.ops.cpu import CpuOps
whole, calls = CpuOps.paged_attention, []
def attention(*arguments):
    calls.append(1)
    if len(calls) == 60:
        {fault}
    return whole(*arguments)
CpuOps.paged_attention = attention
"""


def _endless() -> pb.GenerateRequest:
    message = request("a", None)
    message.stop.ignore_eos = True
    return message


def test_a_lost_device_ends_the_process_with_its_reason(tiny: Path) -> None:
    """A process that computes nothing any more would go on taking requests."""
    fault = "from kvledger.errors import DeviceLost; raise DeviceLost('it fell off the bus')"
    with (
        tiny_server(tiny, prelude=_AT_CALL.format(fault=fault)) as server,
        server.channel() as channel,
    ):
        with pytest.raises(grpc.RpcError) as raised:
            list(generation(channel).Generate(_endless(), timeout=PATIENCE))
        assert raised.value.code() == grpc.StatusCode.INTERNAL
        trailers = {item.key: item.value for item in raised.value.trailing_metadata()}
        assert pb.Receipt.FromString(trailers["kvledger-receipt-bin"]).computed_tokens > 10
        assert server.exit_status() == 70
        (line,) = server.events("engine_died")
        assert (line["error"], line["reason"]) == ("DeviceLost", "it fell off the bus")


@pytest.mark.soak
def test_an_engine_that_hangs_is_seen_and_does_not_keep_the_process(tiny: Path) -> None:
    """A step without an end would look healthy, and no signal would end the process."""
    fault = "import time; time.sleep(10**6)"
    with (
        tiny_server(
            tiny, "--heartbeat-timeout", "1.0", prelude=_AT_CALL.format(fault=fault)
        ) as server,
        server.channel() as channel,
    ):
        call = generation(channel).Generate(_endless(), timeout=PATIENCE)
        next(call)
        health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        until_silent = (r for r in health if r.status == health_pb2.HealthCheckResponse.NOT_SERVING)
        next(until_silent)
        health.cancel()
        started = time.monotonic()
        server.signal(signal.SIGTERM)
        server.event("draining")
        server.signal(signal.SIGTERM)
        with pytest.raises(grpc.RpcError) as raised:
            list(call)
        assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
        assert server.exit_status() == 70
        assert time.monotonic() - started < 20
        assert len(server.events("engine_hangs")) == 1


# --- F14: very many connections -----------------------------------------------------------------


async def _ended(client: Http2Client) -> str:
    await client.read_until_closed()
    return client.trailers.get("grpc-status", "")


async def _answers(address: str, count: int) -> list[str]:
    """The status of one call on each of so many connections, all open at once."""
    clients: list[Http2Client] = []
    answers: list[asyncio.Task[str]] = []
    for begin in range(0, count, 100):
        these = range(begin, min(count, begin + 100))
        new = await asyncio.gather(*(Http2Client.call(address, request("a", 1)) for _ in these))
        clients += new
        # They read at once: who does not answer pings while the others come has vanished.
        answers += [asyncio.create_task(_ended(client)) for client in new]
    for client, answered in zip(clients, answers, strict=True):
        if not answered.done():  # with a refusal, which needs no window
            await client.open_window(1 << 16)
    statuses = await asyncio.gather(*answers)
    for client in clients:
        await client.close()
    return list(statuses)


def _connect(tiny: Path, count: int) -> None:
    options = ("--max-connections", str(count + 10), "--max-queued", str(count))
    # The first must be there yet when the last comes, and their windows are closed until then.
    with tiny_server(tiny, *options, "--stall-timeout", "600") as server:
        statuses = asyncio.run(_answers(server.address, count))
        assert set(statuses) == {"0"}, {status: statuses.count(status) for status in set(statuses)}
        server.wait(lambda: len(server.events("request_finished")) == count)
        with server.channel() as channel:
            assert answer(channel, request("a", 2))
        server.signal(signal.SIGTERM)
        assert server.exit_status() == 0


@pytest.mark.soak
def test_many_connections_with_a_stream_each(tiny: Path) -> None:
    """Many clients at once would make the server forget some of them, or fall."""
    _connect(tiny, 300)


@pytest.mark.soak
def test_ten_thousand_connections_with_a_stream_each(tiny: Path) -> None:
    """The same, as far as this machine lets a process have descriptors."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    count = min(10_000, most - 300)
    print(f"{count} connections; the limit on descriptors is {most}")
    _connect(tiny, count)


# --- S15, S22: what a server opens and imports --------------------------------------------------


def _listening(pid: int) -> set[int]:
    """TCP ports on which a process listens."""
    links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and columns[9] in inodes:
                ports.add(int(columns[1].rpartition(":")[2], 16))
    return ports


def test_a_server_listens_on_the_port_it_was_given_and_no_other(tiny: Path) -> None:
    """A way in that nobody asked for would be open on every machine (S22)."""
    with tiny_server(tiny) as server:
        assert _listening(server.process.pid) == {server.port}


def test_serving_imports_nothing_that_reads_pickles_by_itself() -> None:
    """A file or a message could run its sender's program (S15)."""
    code = (
        "import sys; import kvledger.server, kvledger.served_model, kvledger.cli.serve;"
        "print(*(n for n in ('dill', 'cloudpickle', 'joblib', 'yaml', 'transformers',"
        "'zmq') if n in sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    assert result.stdout.split() == []
