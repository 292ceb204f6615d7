"""Mixed requests against a whole server, every answer and every receipt looked at.

    python tests/soak/mixed_load.py --requests 100000 --seed 1

A tiny model with random weights is computed in float32 by the core's kernels. What each request
asks is answered alone first, on a server that never chunks or preempts; then the requests come many
at once to a server with a small pool and a small token budget, from callers who cancel, run out of
time, read slowly, keep their windows closed, or are mistaken.

Nothing may be wrong at the end: each call ended with one status that its manner allows, each
request that entered has one receipt, the books balance after every step, all blocks are free or
cached, and an answer is the same as alone, or as far as it came, its beginning.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1] / "service" / sub) for sub in ("", "rpc")]

import grpc
import numpy as np
from drawn_requests import Drawn, Manner, draw, templates
from http2_client import Http2Client
from server_harness import connection, running
from stepping import logits_after, served
from tiny_model import write_gguf
from tiny_server import AuditingCore, TinyServer

from kvledger import event_loop
from kvledger.rpc.conversations import conversation_of
from kvledger.v1 import generation_pb2 as pb
from kvledger.v1 import generation_pb2_grpc

# Longest that any call may take, in seconds, on a machine that does much else.
_WATCHDOG = 60.0
# Two logits this close to each other may come in either order.
_TIE = 1e-3
_CHANNELS = 4

# Small enough that prompts are chunked and sequences preempted.
PRESSED = (
    *("--kv-blocks", "40", "--token-budget", "24", "--max-sequences", "16", "--max-queued", "64"),
    *("--mailbox-tokens", "8", "--stall-timeout", "2.0", "--block-tokens", "16"),
    # A level of priority is worth little, or the last would rightly wait for minutes.
    *("--priority-aging", "0.05"),
    *("--threads", "1"),  # a tiny model shares out nothing
)
_ALONE = ("--kv-blocks", "256", "--token-budget", "512", "--max-sequences", "4")

_CODES = {
    Manner.READS: {"OK"},
    Manner.SLOW: {"OK"},
    Manner.CANCELS: {"OK", "CANCELLED"},
    Manner.DEADLINE: {"OK", "DEADLINE_EXCEEDED"},
    Manner.STALLS: {"OK", "ABORTED"},
    Manner.IMPATIENT: {"OK", "RESOURCE_EXHAUSTED"},
    Manner.MISTAKEN: {"INVALID_ARGUMENT"},
}


@dataclass
class Received:
    """What one call brought."""

    code: str = ""
    kinds: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    reason: int = 0

    def take(self, response: pb.GenerateResponse) -> None:
        kind = response.WhichOneof("event")
        assert kind is not None
        self.kinds.append(kind)
        if kind == "delta":
            self.tokens += response.delta.token_ids
            self.text += response.delta.text
        elif kind == "finished":
            (sample,) = response.finished.samples
            self.reason = sample.finish_reason
            self.tokens += sample.token_ids
            self.text += sample.text

    @property
    def is_whole(self) -> bool:
        """Whether the stream is one of those that the contract allows."""
        middle = self.kinds[1:-1]
        ends = self.kinds[:1] == ["accepted"] and self.kinds[-1] == "finished"
        return ends and middle == ["delta"] * len(middle)


class ReceiptLog:
    """Stands for the loggers of the server's modules: keeps counts, and which receipts are due."""

    def __init__(self) -> None:
        self.due: set[str] = set()
        self.entered = 0
        self.reasons: Counter[str] = Counter()
        self.wrong: list[str] = []

    def info(self, event: str, **facts: Any) -> None:
        if event == "request_finished":
            self.reasons[str(facts["reason"])] += 1
            if facts["request_id"] not in self.due:
                self.wrong.append("a receipt that was not due, or a second one")
            self.due.discard(facts["request_id"])

    def warning(self, event: str, **facts: Any) -> None:
        self.info(event, **facts)
        if event not in ("request_finished", "dev_mode", "health_changed"):
            self.wrong.append(f"{event} {facts}")

    error = exception = warning


@dataclass
class Verdict:
    """What came of a run."""

    requests: int = 0
    seconds: float = 0.0
    codes: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    beginnings: int = 0
    ties: int = 0
    steps: int = 0
    preemptions: int = 0
    cut_prompts: int = 0
    receipts: int = 0
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        codes = ", ".join(f"{code} {count}" for code, count in self.codes.most_common())
        return (
            f"{self.requests} requests in {self.seconds:.1f} s: {codes}; {self.receipts} receipts; "
            f"{self.compared} whole answers as alone, {self.beginnings} beginnings, "
            f"{self.ties} ties; {self.steps} steps, {self.preemptions} preemptions, "
            f"{self.cut_prompts} steps that cut a prompt; {len(self.wrong)} faults"
        )


class Load:
    """Sends requests to one server and compares what comes."""

    def __init__(self, server: TinyServer, asked: list[pb.GenerateRequest], path: Path) -> None:
        self._server = server
        self._asked = asked
        self._path = path
        self._alone: list[Received] = []
        self.verdict = Verdict()

    async def answer_alone(self) -> None:
        """Has every template answered with nobody beside it."""
        async with running(TinyServer(self._path, *_ALONE)) as server:
            for message in self._asked:
                received = Received()
                async for response in server.generation.Generate(message):
                    received.take(response)
                self._alone.append(received)

    async def run(self, numbers: Iterator[int], seed: int, workers: int) -> None:
        """Sends the requests of the numbers, so many at once, and waits for the books."""
        log = self._server.log
        assert isinstance(log, ReceiptLog)
        started = time.monotonic()
        channels = [connection(self._server.address) for _ in range(_CHANNELS)]
        stubs: list[Any] = [
            generation_pb2_grpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
            for channel in channels
        ]

        async def work(stub: Any) -> None:
            for number in numbers:
                await self._send(stub, number, draw(self._asked, seed, number))

        with _entries_counted(self._server, log):
            await asyncio.gather(*(work(stubs[w % _CHANNELS]) for w in range(workers)))
            await self._server.until(lambda: not self._server.server._admission.open_requests)
        for channel in channels:
            await channel.close()
        self._look_at_the_books(log)
        self.verdict.seconds += time.monotonic() - started

    def _look_at_the_books(self, log: ReceiptLog) -> None:
        core: Any = self._server.core
        verdict = self.verdict
        verdict.steps, verdict.preemptions = core.steps, core.preemptions
        verdict.cut_prompts = core.prefill_steps_cut
        verdict.receipts = sum(log.reasons.values())
        verdict.wrong += log.wrong + core.audits
        if log.due or verdict.receipts != log.entered:
            verdict.wrong.append(f"{log.entered} entered, {verdict.receipts} receipts")
        if wrong := core.audit():
            verdict.wrong.append(wrong)
        if core.in_use:
            verdict.wrong.append(f"blocks are not free: {core.balances}")
        log.wrong, core.audits = [], []

    async def _send(self, stub: Any, number: int, drawn: Drawn) -> None:
        try:
            call = self._stall(drawn) if drawn.manner == Manner.STALLS else self._call(stub, drawn)
            received = await asyncio.wait_for(call, _WATCHDOG)
        except asyncio.TimeoutError:
            self.verdict.wrong.append(f"request {number} ({drawn.manner.value}) never ended")
            return
        self.verdict.requests += 1
        self.verdict.codes[received.code] += 1
        # Whatever its manner, a request may come to a full queue.
        if received.code not in _CODES[drawn.manner] | {"RESOURCE_EXHAUSTED"}:
            self.verdict.wrong.append(f"request {number} ({drawn.manner.value}): {received.code}")
        if drawn.manner not in (Manner.MISTAKEN, Manner.STALLS):
            self._compare(number, drawn, received)

    async def _call(self, stub: Any, drawn: Drawn) -> Received:
        received = Received()
        timeout = drawn.seconds if drawn.manner == Manner.DEADLINE else None
        call = stub.Generate(drawn.message, timeout=timeout)
        cancelled = False
        if drawn.manner == Manner.CANCELS and drawn.messages == 0:
            await asyncio.sleep(drawn.seconds / 20)
            cancelled = call.cancel()
        try:
            async for response in call:
                received.take(response)
                if drawn.manner == Manner.CANCELS and len(received.kinds) == drawn.messages:
                    cancelled = call.cancel()
                elif drawn.manner == Manner.SLOW:
                    await asyncio.sleep(drawn.seconds)
        except asyncio.CancelledError:
            if not cancelled:  # by the watchdog, not by the caller
                raise
        except grpc.aio.AioRpcError:
            pass
        received.code = (await call.code()).name
        return received

    async def _stall(self, drawn: Drawn) -> Received:
        client = await Http2Client.call(self._server.address, drawn.message)
        await asyncio.sleep(drawn.seconds)
        await client.open_window(1 << 20)
        await client.read_until_closed()
        await client.close()
        status = int(client.trailers.get("grpc-status", "2"))
        return Received(code=next(c.name for c in grpc.StatusCode if c.value[0] == status))

    def _compare(self, number: int, drawn: Drawn, received: Received) -> None:
        alone = self._alone[drawn.template]
        ours = (received.tokens, received.text, received.reason)
        if received.code == "OK":
            if not received.is_whole:
                self.verdict.wrong.append(f"request {number}: a stream of {received.kinds}")
            self.verdict.compared += 1
            same = ours == (alone.tokens, alone.text, alone.reason)
        else:
            self.verdict.beginnings += 1
            same = alone.tokens[: len(received.tokens)] == received.tokens
            same = same and alone.text.startswith(received.text)
        if same:
            return
        if self._is_tie(drawn.message, alone.tokens, received.tokens):
            self.verdict.ties += 1
        else:
            self.verdict.wrong.append(f"request {number} (template {drawn.template}) differs")

    def _is_tie(self, message: pb.GenerateRequest, alone: list[int], ours: list[int]) -> bool:
        """Whether two greedy answers part where the two best logits are as good as equal."""
        changed = message.sampling != pb.SamplingOptions() or message.stop.min_tokens
        place = next((i for i, (a, b) in enumerate(zip(alone, ours, strict=False)) if a != b), None)
        if changed or place is None:
            return False
        model = served(self._path, "--kv-format", "f32")
        kind = message.WhichOneof("prompt")
        if kind == "token_ids":
            prompt = np.array(message.token_ids.ids, np.int32)
        elif kind == "text":
            prompt = model.tokenizer.encode_text(message.text)
        else:
            prompt = model.tokenizer.encode_chat(conversation_of(message.chat).messages)
        best = logits_after(model, [*prompt.tolist(), *alone[:place]]).topk(2).values
        return float(best[0] - best[1]) < _TIE


class _entries_counted:  # noqa: N801  # reads as what it does
    """Notes every request that enters: it is owed a receipt."""

    def __init__(self, server: TinyServer, log: ReceiptLog) -> None:
        self._admission: Any = server.server._admission
        self._log = log

    def __enter__(self) -> None:
        enter = type(self._admission).enter

        def counted(*arguments: Any, **named: Any) -> Any:
            ticket = enter(self._admission, *arguments, **named)
            self._log.entered += 1
            self._log.due.add(ticket.request_id)
            return ticket

        self._admission.enter = counted

    def __exit__(self, *error: object) -> None:
        del self._admission.enter


async def loaded(
    requests: int, seed: int, workers: int, asked: int, minutes: float | None = None
) -> Verdict:
    """A whole run: so many requests, or as many as fit into so many minutes."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_gguf(Path(folder) / "tiny.gguf", seed=seed)
        server = TinyServer(path, *PRESSED, core=AuditingCore, log=ReceiptLog())
        load = Load(server, templates(seed, asked), path)
        await load.answer_alone()
        until = None if minutes is None else time.monotonic() + 60 * minutes
        async with running(server):
            await load.run(numbers(requests, until), seed, workers)
    return load.verdict


def numbers(count: int, until: float | None = None) -> Iterator[int]:
    """From 0 to `count`, as long as it is not later than `until` (of time.monotonic())."""
    for number in range(count):
        if until is not None and time.monotonic() > until:
            return
        if number and number % 10_000 == 0:
            print(f"{number} requests sent", flush=True)
        yield number


def main() -> int:
    """0 if nothing was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--minutes", type=float, help="send no more after so long")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=32, help="callers at once")
    parser.add_argument("--templates", type=int, default=400, help="different requests")
    options = parser.parse_args()
    verdict = event_loop.run(
        loaded(options.requests, options.seed, options.workers, options.templates, options.minutes)
    )
    print(verdict)
    for fault in verdict.wrong[:20]:
        print(f"wrong: {fault}")
    return 1 if verdict.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
