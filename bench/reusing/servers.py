"""Servers and clients of the scenarios: who asks, how long it took, what was reused."""

from __future__ import annotations

import asyncio
import http.client
import json
import math
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc

from bench.arms.arm import ArmSettings, NotRun
from bench.arms.kvledger import Kvledger, generate_request
from bench.load import OK
from kvledger.v1 import generation_pb2, generation_pb2_grpc

SCOPE_NONE = generation_pb2.CACHE_SCOPE_NONE
_NANOS = 1e-9


@dataclass
class Answer:
    """One request: when it was sent and its tokens came, in s of perf_counter, and what it cost."""

    sent: float
    status: str = OK
    reason: str = ""
    arrivals: list[float] = field(default_factory=list)  # one a token
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    held_seconds: float = 0.0  # blocks, summed over time
    come_back: float = 0.0  # seconds after which the server asks who was refused to come again

    @property
    def ttft(self) -> float:
        """Seconds until the first token; inf if none came."""
        return self.arrivals[0] - self.sent if self.arrivals else math.inf


class Asker:
    """Sends requests of one tenant, and tells what they reused."""

    def __init__(self, address: str, token: str | None = None) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=(("grpc.enable_retries", 0),))
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._metadata = () if token is None else (("authorization", f"Bearer {token}"),)

    async def ask(
        self,
        prompt: Sequence[int],
        output: int,
        scope: int = generation_pb2.CACHE_SCOPE_UNSPECIFIED,
        priority: int = 0,
        timeout: float | None = None,
    ) -> Answer:
        """A greedy answer of `output` tokens to token ids. Errors are in its status."""
        request = generate_request(prompt, output)
        request.cache.scope = scope
        request.priority = priority
        return await self.send(request, timeout)

    async def chat(self, messages: Sequence[tuple[int, str]], output: int) -> Answer:
        """The greedy answer to a conversation of (role, text), which may end by itself."""
        request = generation_pb2.GenerateRequest(
            chat=generation_pb2.ChatPrompt(
                messages=[
                    generation_pb2.ChatMessage(role=role, content=text) for role, text in messages
                ]
            ),
            stop=generation_pb2.StopOptions(max_tokens=output),
            output=generation_pb2.OutputOptions(token_ids=True),
        )
        return await self.send(request)

    async def send(
        self, request: generation_pb2.GenerateRequest, timeout: float | None = None
    ) -> Answer:
        """One request, to its end, or until so many seconds have passed."""
        answer = Answer(time.perf_counter())
        try:
            async for response in self._stub.Generate(
                request, metadata=self._metadata, timeout=timeout
            ):
                if response.HasField("delta"):
                    now = time.perf_counter()
                    answer.arrivals.extend([now] * len(response.delta.token_ids))
                    answer.tokens.extend(response.delta.token_ids)
                    answer.text += response.delta.text
                elif response.HasField("finished"):
                    _note_end(answer, response.finished)
        except grpc.aio.AioRpcError as error:
            answer.status, answer.reason = error.code().name, error.details() or ""
            for key, value in error.trailing_metadata() or ():
                if key == "grpc-retry-pushback-ms":
                    answer.come_back = float(value) / 1e3
        return answer

    async def close(self) -> None:
        """Ends the connection."""
        await self._channel.close()


def _note_end(answer: Answer, finished: generation_pb2.Finished) -> None:
    answer.prompt_tokens = finished.usage.prompt_tokens
    answer.cached_tokens = finished.usage.cached_prompt_tokens
    held = finished.receipt.held
    answer.held_seconds = held.seconds + held.nanos * _NANOS


def require_ok(answers: Sequence[Answer]) -> None:
    """Raises NotRun if one of them failed: figures of the others would mean something else."""
    for answer in answers:
        if answer.status != OK:
            raise NotRun(f"a request ended with {answer.status}: {answer.reason}")


class AskedServer(Kvledger):
    """`kvledger serve` with clients that hear what they reused."""

    @property
    def started(self) -> bool:
        """Whether its process runs."""
        return self._process is not None and self._process.process.poll() is None

    def asker(self, token: str | None = None) -> Asker:
        """A client, once started."""
        return Asker(self.addresses["listen"], token)

    @property
    def addresses(self) -> dict[str, str]:
        """What the server says when it is ready."""
        assert self._process is not None
        for line in self._process.said().splitlines():
            if line.startswith("{"):
                event: dict[str, str] = json.loads(line)
                if event["event"] == "serving":
                    return event
        raise NotRun("the server never said where it listens")


class MeasuredServer(AskedServer):
    """The same, and its metrics can be read."""

    def __init__(self, settings: ArmSettings, extra: Sequence[str] = ()) -> None:
        super().__init__(settings, ["--metrics-listen", "127.0.0.1:0", *extra])

    async def metric(self, name: str) -> float:
        """The value of a metric without labels."""
        text = await asyncio.to_thread(_fetch, self.addresses["metrics"])
        for line in text.splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[1])
        raise NotRun(f"the server has no metric {name}")


class TenantServer(AskedServer):
    """The same for tenants of a file, on a unix socket, which needs no TLS."""

    def __init__(
        self, settings: ArmSettings, tenants: str, listen: str, extra: Sequence[str] = ()
    ) -> None:
        super().__init__(settings, extra)
        self._identity = ["--tenants", tenants, "--listen", f"unix:{listen}"]

    @property
    def _arguments(self) -> list[str]:
        common = ["--model", str(self.settings.model), "--threads", str(self.settings.threads)]
        return ["serve", *self._identity, *common, *self._extra]

    @property
    def described(self) -> str:
        """Its command line, without paths."""
        return shlex.join(
            [
                *("kvledger", "serve", "--tenants", "tenants.json", "--listen", "unix:socket"),
                *("--model", self.settings.model.name, "--threads", str(self.settings.threads)),
                *self._extra,
            ]
        )


def _fetch(address: str) -> str:
    connection = http.client.HTTPConnection(address, timeout=30)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode()
    finally:
        connection.close()
