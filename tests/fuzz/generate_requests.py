"""Fuzz program of Generate: whatever bytes come, a documented status goes back, and nobody else
notices.

    python tests/fuzz/generate_requests.py --runs 100000 --seed 1

Messages are made field by field from the contract's own descriptors, with the numbers at which
limits lie, or are bytes that are hardly a message. All go to a whole server over a tiny model;
every so often a plain request must get exactly the tokens that it got at first. `--no-server` asks
only the validator, a hundred times faster.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1] / "service"), str(Path(__file__).parent)]

import grpc
from driver import mutate_bytes
from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import DecodeError, Message
from server_harness import request, running
from tiny_model import TinyShape, write_gguf
from tiny_server import AuditingCore, TinyServer

from kvledger import event_loop
from kvledger.errors import InvalidRequest
from kvledger.limits import LIMITS, check_generate
from kvledger.v1 import generation_pb2 as pb

VOCABULARY = TinyShape().vocabulary
# What a caller may hear; INTERNAL and UNKNOWN would be our mistakes.
DOCUMENTED = {
    *("OK", "INVALID_ARGUMENT", "NOT_FOUND", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED"),
    "CANCELLED",
}
# Addresses of memory, paths, and names of Python's own say something about the server's inside.
_INSIDE = re.compile(r"0x[0-9a-f]{6,}|/[a-z]+/[\w.]+/|\.py\b|Traceback|object at|Error\b")
_CANARY = "canary4711"
_TEXTS = (
    "",
    "a",
    "Once upon a time",
    _CANARY,
    "\0",
    "é\U0001f642",
    "<|end|>",
    "{}",
    '{"type": "object", "enable_thinking": false}',
    "x" * 257,
    "a " * 400,
)

_SIGNED = (0, 1, -1, 9, 10, 11, -10, -11, (1 << 31) - 1, -(1 << 31))
_UNSIGNED = (0, 1, 2, 19, 20, 21, 63, 64, 65, 256, 257, VOCABULARY - 1, VOCABULARY, (1 << 32) - 1)
_FLOATS = (
    *(0.0, -0.0, 1.0, 0.5, -1.0, 2.0, -2.0, 2.0001, 100.0, 100.1, 10.0, 1e-38, 1e38),
    *(math.nan, math.inf, -math.inf),
)
_COUNTS = (0, 1, 2, 3, 16, 17, 64, 65)
_SHORT = (0, 1, 2)
_Kind = dict[int, tuple[Any, ...]]
_VALUES: _Kind = {
    Field.TYPE_INT32: _SIGNED,
    Field.TYPE_INT64: (*_SIGNED, (1 << 63) - 1, -(1 << 63)),
    Field.TYPE_UINT32: _UNSIGNED,
    Field.TYPE_UINT64: (*_UNSIGNED, (1 << 64) - 1),
    Field.TYPE_FLOAT: _FLOATS,
    Field.TYPE_DOUBLE: _FLOATS,
    Field.TYPE_BOOL: (True, False),
    Field.TYPE_STRING: _TEXTS,
    Field.TYPE_BYTES: (b"", b"a", b"\xff"),
    Field.TYPE_ENUM: (0, 1, 2, 3, 4, -1, 99),
}


def fill(
    chance: random.Random, message: Message, likely: float, counts: tuple[int, ...] = _COUNTS
) -> None:
    """Sets fields of a message, each with a chance, to values at the edges of what is allowed.

    Lists are as long as one of `counts`; lists inside of them are short.
    """
    for field in message.DESCRIPTOR.fields:
        if chance.random() > likely:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            entries = getattr(message, field.name)
            entries.update({chance.choice(_TEXTS): chance.choice(_TEXTS) for _ in range(3)})
        elif field.message_type is not None and field.is_repeated:
            for _ in range(chance.choice(counts)):
                fill(chance, getattr(message, field.name).add(), 0.8, _SHORT)
        elif field.message_type is not None:
            inner = getattr(message, field.name)
            inner.SetInParent()
            fill(chance, inner, likely, counts)
        elif field.is_repeated:
            values = chance.choices(_VALUES[field.type], k=chance.choice(_COUNTS))
            getattr(message, field.name).extend(values)
        else:
            setattr(message, field.name, chance.choice(_VALUES[field.type]))


def drawn_bytes(chance: random.Random) -> bytes:
    """A request as it comes over the wire."""
    message = pb.GenerateRequest()
    fill(chance, message, chance.choice((0.1, 0.3, 0.6, 1.0)))
    if chance.random() < 0.5:  # else most would fail for want of a model or a prompt
        message.model = ""
        message.text = "abc"
    if chance.random() < 0.3:
        message.sampling.Clear()
    data = message.SerializeToString()
    kind = chance.random()
    if kind < 0.2:
        return mutate_bytes(chance, data)
    return chance.randbytes(chance.randrange(200)) if kind < 0.25 else data


def check_bytes(data: bytes) -> str:
    """What the validator says of a message, in one word."""
    try:
        message = pb.GenerateRequest.FromString(data)
        check_generate(message, VOCABULARY)
    except DecodeError:
        return "undecodable"
    except InvalidRequest as refused:
        _check_refusal(refused)
        return "refused"
    _check_kept(message)
    return "taken"


def _check_refusal(refused: InvalidRequest) -> None:
    assert 1 <= len(refused.violations) <= 16
    assert _CANARY not in str(refused)
    for violation in refused.violations:
        assert re.fullmatch(r"[a-z_.\[\]0-9]+", violation.field), violation.field


def _check_kept(message: pb.GenerateRequest) -> None:
    """A request that was taken keeps the numbers of the table."""
    for name in ("temperature", "top_p", "top_k", "min_p", "presence_penalty"):
        limit = LIMITS[f"sampling.{name}"]
        assert limit.least <= getattr(message.sampling, name) <= limit.most, name
    assert len(message.stop.sequences) <= LIMITS["stop.sequences"].most
    assert len(message.stop.token_ids) <= LIMITS["stop.token_ids"].most
    assert all(token < VOCABULARY for token in message.token_ids.ids)
    assert message.WhichOneof("prompt") is not None


class Server:
    """The server and what it must go on saying."""

    def __init__(self, harness: TinyServer) -> None:
        self._harness = harness
        call = harness.channel.unary_stream("/kvledger.v1.GenerationService/Generate")
        self._call: Any = call
        self._plain: list[int] = []

    async def send(self, data: bytes) -> str:
        """The name of the status that a message ends with."""
        call = self._call(data, timeout=60.0)
        received = 0
        try:
            async for _ in call:
                received += 1
                if received == 4:  # nobody waits for an answer of four billion tokens
                    call.cancel()
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            if not call.done():
                raise
        code = await call.code()
        told = f"{await call.details()} {await call.trailing_metadata()}"
        name = str(code.name)
        assert name in DOCUMENTED, f"{name}: {told}"
        assert _CANARY not in told
        assert code in (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED) or not _INSIDE.search(
            str(await call.details())
        ), told
        return name

    async def is_the_same(self) -> None:
        """A plain request gets the tokens that it got at first."""
        message = request("Once upon", max_tokens=12, ignore_eos=True, wants_ids=True)
        tokens: list[int] = []
        async for response in self._harness.generation.Generate(message):
            tokens += response.delta.token_ids
        assert len(tokens) == 12
        self._plain = self._plain or tokens
        assert tokens == self._plain, "a stranger's request changed somebody's answer"


async def fuzz_server(runs: int, first: int, seed: int, at_once: int = 8) -> Counter[str]:
    """Sends the messages of the runs and counts their statuses. Raises what is wrong."""
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        path = write_gguf(Path(folder) / "tiny.gguf")
        harness = TinyServer(path, "--kv-blocks", "64", "--threads", "1", core=AuditingCore)
        async with running(harness):
            server = Server(harness)
            await server.is_the_same()
            for begin in range(first, first + runs, at_once):
                these = range(begin, min(begin + at_once, first + runs))
                drawn = [drawn_bytes(random.Random(f"{seed} {run}")) for run in these]
                try:
                    outcomes.update(await asyncio.gather(*map(server.send, drawn)))
                    if begin // at_once % 8 == 0:
                        await server.is_the_same()
                except BaseException:
                    print(f"failed; replay with --seed {seed} --first {begin} --runs {at_once}")
                    raise
            await harness.require_all_free()
            for event in ("step_failed", "unexpected_error", "engine_died", "sampling_failed"):
                assert harness.log.of(event) == [], event
    return outcomes


def fuzz_validator(runs: int, first: int, seed: int) -> Counter[str]:
    """Asks the validator about the messages of the runs. Raises what is wrong."""
    outcomes: Counter[str] = Counter()
    run = first
    try:
        for run in range(first, first + runs):
            outcomes[check_bytes(drawn_bytes(random.Random(f"{seed} {run}")))] += 1
    except BaseException:
        print(f"failed; replay with --no-server --seed {seed} --first {run} --runs 1")
        raise
    return outcomes


def main() -> int:
    """0 if nothing was wrong; a fault is an exception."""
    parser = argparse.ArgumentParser(prog="generate_requests")
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-server", action="store_true")
    options = parser.parse_args()
    started = time.monotonic()
    if options.no_server:
        outcomes = fuzz_validator(options.runs, options.first, options.seed)
    else:
        outcomes = event_loop.run(fuzz_server(options.runs, options.first, options.seed))
    counts = ", ".join(f"{outcome} {count}" for outcome, count in outcomes.most_common())
    seconds = time.monotonic() - started
    print(f"generate_requests: runs {options.runs}, seed {options.seed}, {seconds:.0f} s; {counts}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
