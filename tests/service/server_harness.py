"""A whole server in the test's process, over a scripted model, and what its callers see."""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import grpc
import pytest
from engine_harness import RecordingCore, make_core
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2_grpc
from scripted_model import PATIENCE, Gate, ScriptedModel
from stepping import served, settings
from tiny_model import write_gguf

from kvledger.engine import EndReason, Engine
from kvledger.rpc.connections import KEEPALIVE, Keepalive
from kvledger.rpc.generation import RECEIPT_METADATA
from kvledger.served_model import ServedModel
from kvledger.server import Server
from kvledger.tokenizer import Tokenizer
from kvledger.v1 import generation_pb2 as pb
from kvledger.v1 import generation_pb2_grpc, models_pb2_grpc

CONTEXT_TOKENS = 256  # as in engine_harness.make_core
_LOGGING_MODULES = (
    *("admission", "engine", "server"),
    *("rpc.calls", "rpc.errors", "rpc.front", "rpc.listener", "tenants.registry"),
)
_DETAILS = (
    error_details_pb2.BadRequest,
    error_details_pb2.ErrorInfo,
    error_details_pb2.QuotaFailure,
    error_details_pb2.RequestInfo,
    error_details_pb2.RetryInfo,
)

_T = TypeVar("_T")
_Detail = TypeVar("_Detail", bound=Message)


@cache
def tiny() -> ServedModel:
    """A tiny model, loaded once; its tokenizer and shape are used, never its weights."""
    with tempfile.TemporaryDirectory() as folder:
        return served(write_gguf(Path(folder) / "tiny.gguf"))


class Log:
    """Stands for the loggers of the server's modules and keeps their lines."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def info(self, event: str, **facts: Any) -> None:
        self.lines.append((event, facts))

    warning = error = exception = info

    def of(self, event: str) -> list[dict[str, Any]]:
        """What the lines of one event say."""
        return [facts for name, facts in self.lines if name == event]

    @property
    def reasons(self) -> list[str]:
        """How requests ended, in order."""
        return [str(facts["reason"]) for facts in self.of("request_finished")]


@dataclass
class Answer:
    """Everything that one call to Generate sent."""

    responses: list[pb.GenerateResponse] = field(default_factory=list)

    @property
    def kinds(self) -> list[str | None]:
        return [response.WhichOneof("event") for response in self.responses]

    @property
    def accepted(self) -> pb.Accepted:
        assert self.kinds[0] == "accepted"
        return self.responses[0].accepted

    @property
    def deltas(self) -> list[pb.Delta]:
        return [response.delta for response in self.responses[1:-1]]

    @property
    def finished(self) -> pb.Finished:
        assert self.kinds[-1] == "finished"
        return self.responses[-1].finished

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def token_ids(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def reason(self) -> str:
        (sample,) = self.finished.samples
        return pb.FinishReason.Name(sample.finish_reason).removeprefix("FINISH_REASON_")


class Refusal:
    """The status that a call ended with, and what came with it."""

    def __init__(self, error: grpc.RpcError) -> None:
        call = cast(Any, error)
        self.code: grpc.StatusCode = call.code()
        self.message: str = call.details() or ""
        self.metadata: dict[str, str | bytes] = dict(call.trailing_metadata() or ())
        packed = self.metadata.get("grpc-status-details-bin", b"")
        assert isinstance(packed, bytes)
        self.status = status_pb2.Status.FromString(packed)

    def detail(self, kind: type[_Detail]) -> _Detail:
        """The one detail of a kind."""
        found = [kind() for detail in self.status.details if detail.Is(kind.DESCRIPTOR)]
        (message,) = found
        next(d for d in self.status.details if d.Is(kind.DESCRIPTOR)).Unpack(message)
        return message

    @property
    def kinds(self) -> set[str]:
        """Names of the details' types; each must be one that callers are promised."""
        names = {detail.TypeName().rpartition(".")[2] for detail in self.status.details}
        assert names <= {kind.DESCRIPTOR.name for kind in _DETAILS}
        return names

    @property
    def reason(self) -> str:
        return self.detail(error_details_pb2.ErrorInfo).reason

    @property
    def violations(self) -> dict[str, str]:
        """What is wrong, by field."""
        found = self.detail(error_details_pb2.BadRequest).field_violations
        return {violation.field: violation.description for violation in found}

    @property
    def retry_seconds(self) -> float:
        delay = self.detail(error_details_pb2.RetryInfo).retry_delay
        return delay.ToTimedelta().total_seconds()

    @property
    def receipt(self) -> pb.Receipt:
        packed = self.metadata[RECEIPT_METADATA]
        assert isinstance(packed, bytes)
        return pb.Receipt.FromString(packed)

    def everything(self) -> str:
        """All that the caller was told, to search for what should not be in it."""
        return f"{self.message} {self.status} {self.metadata}"


class ServerHarness:
    """One running server, a channel to it, and a look behind the scenes."""

    def __init__(
        self,
        *arguments: str,
        tokenizer: Tokenizer | None = None,
        operators: str | None = "none",
        keepalive: Keepalive = KEEPALIVE,
        **core_changes: Any,
    ) -> None:
        self.keepalive = keepalive
        self.core = RecordingCore(make_core(**core_changes))
        self.scripted = ScriptedModel()
        context = core_changes.get("context_tokens", CONTEXT_TOKENS)
        self.model: ServedModel = replace(
            tiny(),
            config=replace(tiny().config, context_tokens=context),
            tokenizer=tiny().tokenizer if tokenizer is None else tokenizer,
            core=self.core,  # type: ignore[arg-type]
            llama=self.scripted,  # type: ignore[arg-type]
            blocks=core_changes.get("blocks", tiny().blocks),
            tokens_max=self.core.sequence_tokens_max,
        )
        self.log = Log()
        self.gates: list[Gate] = []
        self.ends: list[tuple[int, EndReason, int]] = []  # sequence, reason, plans made until then
        sequences_max = str(core_changes.get("sequences_max", 8))
        self.settings = settings(
            *("--listen", "127.0.0.1:0", "--max-sequences", sequences_max),
            *(() if operators is None else ("--operators-listen", operators)),
            *arguments,
        )
        self.server: Server
        self.channel: grpc.aio.Channel
        self.exit: asyncio.Task[int]

    @property
    def address(self) -> str:
        return self.server.address

    @property
    def generation(self) -> Any:
        return generation_pb2_grpc.GenerationServiceStub(self.channel)  # type: ignore[no-untyped-call]

    @property
    def models(self) -> Any:
        return models_pb2_grpc.ModelServiceStub(self.channel)  # type: ignore[no-untyped-call]

    @property
    def health(self) -> Any:
        return health_pb2_grpc.HealthStub(self.channel)

    def gate(self) -> Gate:
        """Makes every step wait for the test from now on."""
        gate = Gate()
        self.scripted.before_step = lambda plan: gate.wait()
        self.gates.append(gate)
        return gate

    async def answer(self, *, metadata: Any = None, **fields: Any) -> Answer:
        """All of one call to Generate that must succeed."""
        answer = Answer()
        call = self.generation.Generate(request(**fields), metadata=metadata, timeout=PATIENCE)
        async for response in call:
            answer.responses.append(response)
        return answer

    async def at_once(self, *asked: Coroutine[Any, Any, _T]) -> list[_T]:
        """The answers to requests, nobody else's, that all come before any of them is computed.

        However slowly calls come in: else there might be room for each.
        """
        gate = self.gate()
        answers = asyncio.gather(*asked)
        await self.until(lambda: len(self.server._admission.open_requests) == len(asked))
        gate.open()
        return await answers

    async def refusal(self, **fields: Any) -> Refusal:
        """How one call to Generate ends that must fail."""
        return await refusal_of(self.answer(**fields))

    async def until(self, condition: Callable[[], object]) -> None:
        """Waits until something is so."""
        await until(condition)

    async def require_all_free(self) -> None:
        """Every block comes back and the books are right."""
        await until(lambda: not self.server._admission.open_requests)
        await until(lambda: self.core.in_use == 0 and sum(self.core.balances.values()) > 0)
        assert self.core.audits == []


async def until(condition: Callable[[], object]) -> None:
    """Waits until something is so, without keeping anybody from making it so."""
    deadline = asyncio.get_running_loop().time() + PATIENCE
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "it did not come"
        await asyncio.sleep(0.002)


def request(
    text: str | None = None,
    *,
    ids: list[int] | None = None,
    chat: list[tuple[int, str]] | None = None,
    max_tokens: int | None = 4,
    stop: tuple[str, ...] = (),
    ignore_eos: bool = False,
    seconds_to_wait: float | None = None,
    wants_ids: bool = False,
    final_only: bool = False,
    sampling: dict[str, Any] | None = None,
    **fields: Any,
) -> pb.GenerateRequest:
    """A GenerateRequest, written shortly."""
    message = pb.GenerateRequest(**fields)
    if text is not None:
        message.text = text
    if ids is not None:
        message.token_ids.ids.extend(ids)
    if chat is not None:
        message.chat.SetInParent()
        for role, content in chat:
            message.chat.messages.add(role=pb.Role.ValueType(role), content=content)
    if max_tokens is not None:
        message.stop.max_tokens = max_tokens
    message.stop.sequences.extend(stop)
    message.stop.ignore_eos = ignore_eos
    message.output.token_ids = wants_ids
    message.output.final_only = final_only
    message.sampling.CopyFrom(pb.SamplingOptions(**(sampling or {})))
    if seconds_to_wait is not None:
        message.queue_timeout.FromMilliseconds(round(seconds_to_wait * 1000))
    return message


async def refusal_of(call: Any) -> Refusal:
    """The status of a call that must fail."""
    with pytest.raises(grpc.RpcError) as raised:
        await call
    return Refusal(raised.value)


@asynccontextmanager
async def serving(
    *arguments: str,
    credentials: grpc.ChannelCredentials | None = None,
    tokenizer: Tokenizer | None = None,
    **core_changes: Any,
) -> AsyncIterator[ServerHarness]:
    """A running server; `core_changes` are for engine_harness.make_core, or for the harness.

    `tokenizer` takes the place of the tiny model's; it has as many ids. `credentials` are those of
    the harness's own channel, for a server with TLS.
    """
    harness = ServerHarness(*arguments, tokenizer=tokenizer, **core_changes)
    async with running(harness, credentials):
        yield harness


_Harness = TypeVar("_Harness", bound=ServerHarness)


@asynccontextmanager
async def running(
    harness: _Harness, credentials: grpc.ChannelCredentials | None = None
) -> AsyncIterator[_Harness]:
    """The server of a harness, running."""
    with _spied(harness), _process_settings_kept():
        harness.server = Server(harness.settings, harness.model, harness.keepalive)
        ready = asyncio.Event()
        harness.exit = asyncio.create_task(harness.server.run(ready.set))
        starting = asyncio.create_task(ready.wait())
        await asyncio.wait((harness.exit, starting), return_when=asyncio.FIRST_COMPLETED)
        starting.cancel()
        if harness.exit.done():
            harness.exit.result()  # says why it did not start
        harness.channel = connection(harness.address, credentials)
        try:
            yield harness
        finally:
            await harness.channel.close()
            for gate in harness.gates:
                gate.open()
            harness.server.request_stop()
            harness.server.request_stop()
            await asyncio.wait_for(harness.exit, PATIENCE)


def connection(
    address: str, credentials: grpc.ChannelCredentials | None = None
) -> grpc.aio.Channel:
    """A channel with a connection of its own."""
    options = (("grpc.use_local_subchannel_pool", 1),)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


@contextmanager
def _spied(harness: ServerHarness) -> Iterator[None]:
    submit_end = Engine.end

    def end(engine: Engine, sequence: int, reason: EndReason) -> None:
        harness.ends.append((sequence, reason, harness.core.plans))
        submit_end(engine, sequence, reason)

    with pytest.MonkeyPatch.context() as patch:
        for module in _LOGGING_MODULES:
            patch.setattr(f"kvledger.{module}._log", harness.log)
        patch.setattr(Engine, "end", end)
        # Collecting and freezing the whole test run would take most of the time.
        patch.setattr("kvledger.server.gc", SimpleNamespace(collect=int, freeze=int))
        yield


@contextmanager
def _process_settings_kept() -> Iterator[None]:
    """A server changes what belongs to its whole process."""
    interval = sys.getswitchinterval()
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


class Proxy:
    """Passes bytes between a client and a server until it cuts the line with a TCP reset."""

    def __init__(self) -> None:
        self._writers: list[asyncio.StreamWriter] = []
        self._listener: asyncio.Server
        self._port = 0

    @classmethod
    @asynccontextmanager
    async def before(cls, port: int) -> AsyncIterator[Proxy]:
        """A proxy before the server on a port of this machine."""
        proxy = cls()
        proxy._port = port
        proxy._listener = await asyncio.start_server(proxy._connected, "127.0.0.1", 0)
        try:
            yield proxy
        finally:
            proxy.reset()
            proxy._listener.close()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    def reset(self) -> None:
        """Cuts every connection: the server sees RST, not an orderly end."""
        for writer in self._writers:
            raw = writer.get_extra_info("socket")
            if raw is not None and raw.fileno() >= 0:
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        self._writers.clear()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, other_writer]
        await asyncio.gather(_pass_on(reader, other_writer), _pass_on(other_reader, writer))


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except (ConnectionError, OSError):
        pass
    finally:
        writer.close()
