"""Traffic whose receipts are counted: callers of several tenants, drawn from a seed.

They begin alike, so that blocks are shared within a tenant, in a share group and in a public
prefix; ask for several samples; cancel, run out of time, read slowly, keep their windows closed,
wait in the queue no longer than they like, or ask for what is refused. What each was told is kept.
"""

from __future__ import annotations

import asyncio
import base64
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import grpc
from http2_client import Http2Client

from kvledger.tenants import editing
from kvledger.v1 import generation_pb2 as pb
from kvledger.v1 import generation_pb2_grpc

RECEIPT = "kvledger-receipt-bin"
# Longest that any call may take, in seconds, on a machine that does much else.
_WATCHDOG = 90.0
# How long a caller that was refused stays away, in seconds.
_BACK_OFF = 0.02

# No "th": then each letter is a token.
_LETTERS = "abcdefg ijklmnopqrsuvwxyz"
PUBLIC = "terms"
PUBLIC_TEXT = "all use is logged and ends when we say so; ask nobody, and read every clause again. "
GROUP = "pair"
_GROUP_TEXT = "we pool our beginnings, you and i, for as long as both of us are members of it. "

# Of a pool of POOL_BLOCKS blocks: one tenant has some for itself, one may not take all, one is held
# at the door, one is refused now and then, and one lives in its own.
POOL_BLOCKS = 48
_LIMITS: Mapping[str, Mapping[str, object]] = {
    "acme": {"kv_guaranteed": 0.2},
    "beta": {"kv_max": 0.5, "running_max": 6},
    "gamma": {"queued_max": 3, "tokens_per_second": 400.0},
    "delta": {"kv_guaranteed": 0.25, "sealed": True},
    "eps": {},
}
TENANTS = tuple(_LIMITS)


class Manner(Enum):
    """How a caller behaves."""

    READS = "reads to the end"
    CANCELS = "cancels after some messages, or before the first"
    DEADLINE = "has a deadline that may pass"
    SLOW = "waits before it reads each message"
    STALLS = "keeps its window closed for a while"
    IMPATIENT = "names a longest wait in the queue"
    MISTAKEN = "asks for what is not allowed"


_WEIGHTS = {
    Manner.READS: 620,
    Manner.CANCELS: 140,
    Manner.DEADLINE: 80,
    Manner.SLOW: 60,
    Manner.STALLS: 12,
    Manner.IMPATIENT: 50,
    Manner.MISTAKEN: 38,
}


@dataclass
class Call:
    """One request of the run, and what its caller was told. Times are of time.monotonic()."""

    label: str  # its x-request-id
    tenant: str
    samples: int
    manner: Manner
    request_id: str = ""  # as in Accepted
    receipt: pb.Receipt | None = None
    code: str = ""
    ended: float = 0.0
    # Whether the status came from the server: not from a caller that left or a line that broke.
    was_told: bool = False


@dataclass(frozen=True)
class Drawn:
    """What one request asks, and how its caller behaves."""

    tenant: str
    message: pb.GenerateRequest
    manner: Manner
    messages: int  # that it reads before it cancels
    seconds: float  # its deadline, or how long it waits


def make_tenants(path: Path) -> dict[str, str]:
    """A file of tenants; their tokens by name."""
    tokens = {}
    for name, limits in _LIMITS.items():

        def edit(values: dict[str, Any], name: str = name, limits: Any = limits) -> str | None:
            token = editing.add(values, name, ("client",), (), True)
            editing.set_limits(values, name, dict(limits))
            return token

        tokens[name] = str(editing.change(path, edit, create=True))
    editing.change(path, lambda values: editing.set_list(values, "groups", GROUP, TENANTS[:2]))
    return tokens


def draw(seed: int, number: int) -> Drawn:
    """The request of a number; the same for the same seed, whatever came before."""
    chance = random.Random(f"{seed} {number}")
    tenant = chance.choice(TENANTS)
    message = pb.GenerateRequest()
    _begin(chance, tenant, message)
    message.text += "".join(chance.choices(_LETTERS, k=chance.choice((1, 5, 20, 60))))
    message.stop.max_tokens = chance.randint(1, 32)
    message.stop.ignore_eos = chance.random() < 0.7
    if chance.random() < 0.25:
        message.samples = chance.randint(2, 4)
        message.sampling.temperature = 1.0
        message.sampling.seed = chance.getrandbits(64)
    message.priority = chance.randint(-3, 3)
    (manner,) = chance.choices(list(_WEIGHTS), list(_WEIGHTS.values()))
    seconds = chance.uniform(0.002, 0.4)
    if manner == Manner.IMPATIENT:
        message.queue_timeout.FromMilliseconds(chance.randint(0, 60))
    elif manner == Manner.MISTAKEN:
        message.priority = 11
    elif manner == Manner.SLOW:
        seconds = chance.uniform(0.0, 0.03)
    elif manner == Manner.STALLS:
        seconds = chance.uniform(0.0, 1.5)
        message.stop.max_tokens = 64  # more than the mailbox takes
        message.stop.ignore_eos = True
    return Drawn(tenant, message, manner, chance.randint(0, 6), seconds)


def _begin(chance: random.Random, tenant: str, message: pb.GenerateRequest) -> None:
    """The beginning of a prompt: nobody's, or one of those that others have too."""
    kind = chance.random()
    if kind < 0.2:
        message.text = PUBLIC_TEXT
        message.cache.shared_scope = PUBLIC
        message.cache.shared_tokens = len(PUBLIC_TEXT) - 4
    elif kind < 0.4 and tenant in TENANTS[:2]:
        message.text = _GROUP_TEXT
        message.cache.shared_scope = GROUP
        message.cache.shared_tokens = len(_GROUP_TEXT) - 4
    elif kind < 0.8:
        document = chance.randrange(3)
        length = 60 + 50 * document
        message.text = (f"{tenant} {document} {_LETTERS}" * 8)[:length]
    elif kind < 0.85:
        message.cache.scope = pb.CACHE_SCOPE_NONE
    elif kind < 0.95:
        message.cache.scope = pb.CACHE_SCOPE_NAMESPACE
        message.cache.namespace = f"user-{chance.randrange(3)}"
        message.text = _LETTERS * 2


@dataclass
class Traffic:
    """Callers of one server process, as many as `workers`, until it is gone or they shall stop."""

    address: str
    tokens: Mapping[str, str]
    seed: int
    life: int  # which process of the run it is
    workers: int
    calls: list[Call] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    _number: int = 0
    _open: int = 0
    _may_send: asyncio.Event = field(default_factory=asyncio.Event)
    _ended: asyncio.Event = field(default_factory=asyncio.Event)  # none is open
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _channels: list[Any] = field(default_factory=list)

    def start(self) -> None:
        """Begins to send."""
        options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
        self._channels = [grpc.aio.insecure_channel(self.address, options) for _ in range(4)]
        self._may_send.set()
        self._tasks = [asyncio.create_task(self._work(place)) for place in range(self.workers)]

    async def pause(self) -> None:
        """Sends no more, and waits until every call has ended."""
        self._may_send.clear()
        if self._open:
            await self._ended.wait()

    def resume(self) -> None:
        """Goes on."""
        self._may_send.set()

    async def stop(self) -> None:
        """Waits for the calls that are open; no more will be sent."""
        await self.pause()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for channel in self._channels:
            await channel.close()

    async def _work(self, place: int) -> None:
        channel = self._channels[place % len(self._channels)]
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
        while True:
            await self._may_send.wait()
            if not self._may_send.is_set():  # that it was set is told later
                continue
            self._number += 1
            label = f"{self.life}.{self._number}"
            drawn = draw(self.seed, self.life * 1_000_000 + self._number)
            call = Call(label, drawn.tenant, max(1, drawn.message.samples), drawn.manner)
            self.calls.append(call)
            self._open += 1
            self._ended.clear()
            try:
                way = self._stall(drawn, call) if drawn.manner is Manner.STALLS else None
                await asyncio.wait_for(way or self._ask(stub, drawn, call), _WATCHDOG)
            except asyncio.TimeoutError:
                self.wrong.append(f"request {label} ({drawn.manner.value}) never ended")
            finally:
                call.ended = time.monotonic()
                self._open -= 1
                if not self._open:
                    self._ended.set()
            if call.code in ("RESOURCE_EXHAUSTED", "UNAVAILABLE"):
                await asyncio.sleep(_BACK_OFF)

    def _metadata(self, call: Call) -> list[tuple[str, str]]:
        token = self.tokens[call.tenant]
        return [("authorization", f"Bearer {token}"), ("x-request-id", call.label)]

    async def _ask(self, stub: Any, drawn: Drawn, call: Call) -> None:
        timeout = drawn.seconds if drawn.manner is Manner.DEADLINE else None
        stream = stub.Generate(drawn.message, timeout=timeout, metadata=self._metadata(call))
        cancels = drawn.manner is Manner.CANCELS
        cancelled, read = False, 0
        if cancels and not drawn.messages:
            await asyncio.sleep(drawn.seconds / 20)
            cancelled = stream.cancel()
        try:
            async for response in stream:
                _take(call, response)
                read += 1
                if cancels and read == drawn.messages:
                    cancelled = stream.cancel()
                elif drawn.manner is Manner.SLOW:
                    await asyncio.sleep(drawn.seconds)
        except asyncio.CancelledError:
            if not cancelled:  # by the watchdog, not by the caller
                raise
        except grpc.aio.AioRpcError:
            pass
        call.code = (await stream.code()).name
        trailers = dict(await stream.trailing_metadata() or ()) if not cancelled else {}
        if (data := trailers.get(RECEIPT)) is not None:
            _keep(call, pb.Receipt.FromString(data), self.wrong)
        # What a server says has trailers of its own, a line that broke has not.
        call.was_told = bool(trailers) or call.code == "OK"

    async def _stall(self, drawn: Drawn, call: Call) -> None:
        try:
            client = await Http2Client.call(
                self.address, drawn.message, metadata=self._metadata(call)
            )
            await asyncio.sleep(drawn.seconds)
            await client.open_window(1 << 20)
            await client.read_until_closed()
            await client.close()
        except OSError:  # the server is gone
            call.code = "UNAVAILABLE"
            return
        status = int(client.trailers.get("grpc-status", "14"))
        call.code = next(c.name for c in grpc.StatusCode if c.value[0] == status)
        call.was_told = bool(client.trailers)
        data = client.data
        while len(data) >= 5 and len(data) >= 5 + (size := int.from_bytes(data[1:5], "big")):
            _take(call, pb.GenerateResponse.FromString(data[5 : 5 + size]))
            data = data[5 + size :]
        if (text := client.trailers.get(RECEIPT)) is not None:
            padded = text + "=" * (-len(text) % 4)
            _keep(call, pb.Receipt.FromString(base64.b64decode(padded)), self.wrong)


def _take(call: Call, response: pb.GenerateResponse) -> None:
    kind = response.WhichOneof("event")
    if kind == "accepted":
        call.request_id = response.accepted.request_id
    elif kind == "finished":
        call.receipt = response.finished.receipt


def _keep(call: Call, receipt: pb.Receipt, wrong: list[str]) -> None:
    if call.receipt is not None:
        wrong.append(f"request {call.label} was told two receipts")
    call.receipt = receipt
