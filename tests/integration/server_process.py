"""`kvledger serve` as a process of its own, with the default model, and what it logs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from kvledger.models.catalogue import CATALOGUE
from kvledger.v1 import generation_pb2 as pb
from kvledger.v1 import generation_pb2_grpc, models_pb2_grpc

MODEL = CATALOGUE["smollm2-135m-instruct"]
# How long anything may take on a slow machine, in seconds.
PATIENCE = 60.0


def environment(**changes: str) -> dict[str, str]:
    """This machine's environment without settings for kvledger, and with these."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVLEDGER_")}
    return {**kept, **changes}


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
    """A running server; its log is read as it comes."""

    def __init__(self, *arguments: str, prelude: str = "") -> None:
        options = (
            *("--dev", "--listen", "127.0.0.1:0", "--operators-listen", "none"),
            *("--log-format", "json", *arguments),
        )
        code = f"import sys; {prelude}\nfrom kvledger.cli import main; sys.exit(main(sys.argv[1:]))"
        # The interpreter's own process, not a shell's: signals reach the server.
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, "serve", *options] if prelude else command(*options),
            env=environment(),
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        self.output: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

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
        with self._changed:
            lines = [json.loads(line) for line in self.output if line.startswith("{")]
        return [line for line in lines if line["event"] == name]

    def event(self, name: str) -> dict[str, Any]:
        """The first line of the log with an event's name, once it is there."""
        self.wait(lambda: self.events(name))
        return self.events(name)[0]

    def wait(self, condition: Callable[[], object]) -> None:
        """Waits until the log makes something true."""
        with self._changed:
            if not self._changed.wait_for(
                lambda: condition() or self.process.poll() is not None, PATIENCE
            ):
                raise AssertionError("it did not come")
        assert condition(), "".join(self.output)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def exit_status(self) -> int:
        """Its exit status, once it has ended and all of its log is read."""
        status = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return status

    def close(self) -> None:
        """Ends it if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.exit_status()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._changed:
                self.output.append(line)
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()


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
