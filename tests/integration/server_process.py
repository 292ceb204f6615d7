"""`kvledger serve` as a process of its own, with the default model, and what it logs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvledger.models.catalogue import CATALOGUE
from kvledger.v1 import generation_pb2 as pb
from kvledger.v1 import generation_pb2_grpc, models_pb2_grpc

MODEL = CATALOGUE["smollm2-135m-instruct"]
# How long anything may take on a slow machine, in seconds.
PATIENCE = 60.0
# How often it is looked for what a log shall say, in seconds.
_INTERVAL = 0.01
# What is read of a log at a time, in bytes.
_PIECE = 1 << 20


def environment(**changes: str) -> dict[str, str]:
    """This machine's environment without settings for kvledger, and with these."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVLEDGER_")}
    # What a machine can do takes two seconds to measure.
    return {**kept, "KVLEDGER_MACHINE_PEAKS": "skip", **changes}


def command(*arguments: str) -> list[str]:
    """The command line of a server."""
    return [sys.executable, "-m", "kvledger", "serve", *arguments]


def refused_start(*arguments: str, **variables: str) -> str:
    """What a server says that must not start; its exit status must be 2."""
    result = subprocess.run(
        command(*arguments),
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    return result.stderr


class ServerProcess:
    """A running server and its log."""

    def __init__(self, *arguments: str, prelude: str = "") -> None:
        options = (
            *("--dev", "--listen", "127.0.0.1:0", "--operators-listen", "none"),
            *("--log-format", "json", *arguments),
        )
        code = f"import sys; {prelude}\nfrom kvledger.cli import main; sys.exit(main(sys.argv[1:]))"
        # A file takes every line. The server drops those that a pipe has no room for, and a test
        # that keeps this process busy reads too late.
        with tempfile.NamedTemporaryFile("ab") as written:
            self._log = os.open(written.name, os.O_RDONLY)
            # The interpreter's own process, not a shell's: signals reach the server.
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, "serve", *options] if prelude else command(*options),
                env=environment(),
                stderr=written,
                stdout=subprocess.DEVNULL,
            )
        self._lines: list[str] = []
        self._part = b""  # of a line that is being written
        self._reading = threading.Lock()

    @property
    def output(self) -> list[str]:
        """The lines of its log so far."""
        with self._reading:
            self._read()
            return list(self._lines)

    @property
    def address(self) -> str:
        """host:port, once it serves."""
        return str(self.event("serving")["listen"])

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def channel(self) -> grpc.Channel:
        """A connection of its own."""
        options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
        return grpc.insecure_channel(self.address, options=options)

    def events(self, name: str) -> list[dict[str, Any]]:
        """The lines of the log with an event's name, so far."""
        lines = [json.loads(line) for line in self.output if line.startswith("{")]
        return [line for line in lines if line["event"] == name]

    def event(self, name: str) -> dict[str, Any]:
        """The first line of the log with an event's name, once it is there."""
        self.wait(lambda: self.events(name))
        return self.events(name)[0]

    def wait(self, condition: Callable[[], object]) -> None:
        """Waits until the log makes something true."""
        ends = time.monotonic() + PATIENCE
        while self.process.poll() is None and not condition():
            if time.monotonic() >= ends:
                raise AssertionError("it did not come")
            time.sleep(_INTERVAL)
        assert condition(), "".join(self.output)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def exit_status(self) -> int:
        """Its exit status, once it has ended."""
        return self.process.wait(PATIENCE)

    def close(self) -> None:
        """Ends it if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.exit_status()
        with self._reading:
            self._read()
            os.close(self._log)
            self._log = -1

    def _read(self) -> None:
        while self._log >= 0 and (data := os.read(self._log, _PIECE)):
            *lines, self._part = (self._part + data).split(b"\n")
            self._lines += [f"{line.decode()}\n" for line in lines]


@contextmanager
def server_process(*arguments: str, prelude: str = "") -> Iterator[ServerProcess]:
    """A server that serves; skips where its model is not there.

    `prelude` is Python that runs in its process before anything else.
    """
    if not MODEL.is_fetched:
        pytest.skip(f"{MODEL.name} is not fetched; kvledger models fetch does it")
    server = ServerProcess(*arguments, prelude=prelude)
    try:
        server.event("serving")
        yield server
    finally:
        server.close()


def generation(channel: grpc.Channel) -> Any:
    return generation_pb2_grpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]


def models(channel: grpc.Channel) -> Any:
    return models_pb2_grpc.ModelServiceStub(channel)  # type: ignore[no-untyped-call]


def request(text: str, max_tokens: int | None = 8, **fields: Any) -> pb.GenerateRequest:
    """A request for a greedy continuation, with token ids."""
    message = pb.GenerateRequest(text=text, **fields)
    if max_tokens is not None:
        message.stop.max_tokens = max_tokens
    message.output.token_ids = True
    return message


def text_of(responses: list[pb.GenerateResponse]) -> str:
    """The text of a stream that must be whole."""
    kinds = [response.WhichOneof("event") for response in responses]
    assert kinds == ["accepted", *["delta"] * (len(kinds) - 2), "finished"]
    return "".join(response.delta.text for response in responses[1:-1])


def answer(channel: grpc.Channel, message: pb.GenerateRequest) -> str:
    """The text of a call that must succeed."""
    return text_of(list(generation(channel).Generate(message, timeout=PATIENCE)))


@contextmanager
def tiny_server(model: Path, *arguments: str, prelude: str = "") -> Iterator[ServerProcess]:
    """A server of a tiny model with 64 blocks, ready."""
    options = ("--model", str(model), "--kv-blocks", "64", "--threads", "1", *arguments)
    server = ServerProcess(*options, prelude=prelude)
    try:
        server.event("serving")
        yield server
    finally:
        server.close()
