"""Connections that a server ends itself: their callers come back, as they should."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections import Counter
from pathlib import Path

import grpc
import pytest
from scripted_model import PATIENCE
from server_harness import request, serving

from kvledger.rpc.hang_up import hang_up
from kvledger.v1 import generation_pb2_grpc

# Callers at once, each of whom asks again as soon as it has its status.
CALLERS = 6
# Stops of a server; in each of them some calls are on the way.
STOPS = 4


def ask_without_pause(address: str, stop: threading.Event, found: Counter[str]) -> None:
    """Counts the statuses of one call after the other, on a connection of its own."""
    with grpc.insecure_channel(address, options=(("grpc.enable_retries", 0),)) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
        while not stop.is_set():
            call = stub.Generate(request(text="a", max_tokens=1), timeout=PATIENCE)
            with contextlib.suppress(grpc.RpcError):
                list(call)
            found[call.code().name] += 1
            if "shutting down" not in (call.details() or ""):
                time.sleep(0.001)  # perhaps nobody is there


async def test_calls_on_the_way_to_a_server_that_stops_are_unavailable() -> None:
    """Clients do not try again after CANCELLED: requests would be lost with every restart."""
    found: Counter[str] = Counter()
    for _ in range(STOPS):
        stop = threading.Event()
        async with serving() as server:
            work = [
                asyncio.create_task(
                    asyncio.to_thread(ask_without_pause, server.address, stop, found)
                )
                for _ in range(CALLERS)
            ]
            try:
                await server.until(lambda: server.log.reasons)
                server.server.request_stop()
                await asyncio.wait_for(server.exit, PATIENCE)
            finally:
                stop.set()
                await asyncio.gather(*work)
    assert found["UNAVAILABLE"] > 0
    assert set(found) == {"OK", "UNAVAILABLE"}, found


@pytest.mark.parametrize("kind", ["port", "file"])
def test_only_connections_of_the_address_end(kind: str, tmp_path: Path) -> None:
    """Whoever listens elsewhere in the process must not notice."""

    def listening(name: str) -> tuple[socket.socket, str]:
        if kind == "port":
            listener = socket.create_server(("127.0.0.1", 0))
            return listener, f"127.0.0.1:{listener.getsockname()[1]}"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(tmp_path / name))
        listener.listen()
        return listener, f"unix:{tmp_path / name}"

    def connected(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
        caller = socket.socket(listener.family)
        caller.settimeout(PATIENCE)
        caller.connect(listener.getsockname())
        return caller, listener.accept()[0]

    (ours, address), (other, _) = listening("ours"), listening("other")
    where = ours.getsockname()
    caller, accepted = connected(ours)
    stranger, kept = connected(other)
    with ours, other, caller, accepted, stranger, kept:
        accepted.sendall(b"last")
        open_before = sorted(os.listdir("/dev/fd"))
        assert hang_up(address) == 1
        assert sorted(os.listdir("/dev/fd")) == open_before, "no copy of a descriptor stays open"
        assert caller.recv(8) == b"last", "what was written arrives"
        assert caller.recv(8) == b""
        gone = ConnectionRefusedError if kind == "port" else FileNotFoundError
        with socket.socket(stranger.family) as late, pytest.raises(gone):
            late.connect(where)
        kept.sendall(b"still here")
        assert stranger.recv(16) == b"still here"
        again, accepted_again = connected(other)
        with again, accepted_again:
            accepted_again.sendall(b"new")
            assert again.recv(8) == b"new"
