"""What the front end costs: the whole service over a stub, against a bare grpc.aio server.

    python -m bench.front [--streams 16] [--tokens 1500] [--rounds 5]

All servers stream the very same messages, one token in each, to the same client: so many streams
at once on one connection, each of so many tokens. Each server has one processor, the same one, and
the client another. They take turns in one run; ratios are those of a round. The bar is 75 % of the
messages a second of a bare server as gRPC's documentation has it; one on the event loop that the
service uses is shown beside it. docs/load.md says more.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import machine
from bench.arms.arm import NotRun, default_cores
from bench.arms.process import run_main
from bench.company import Company, group_seconds
from bench.http2 import GENERATE, Calls, messages
from bench.load import CallFailed
from bench.serve import count
from bench.stub_process import StubProcess
from kvledger import _core
from kvledger.v1 import generation_pb2

BAR = 0.75
# A server that used less of its processor waited for the client, which then is what was measured.
_BUSY_MIN = 0.9
_PROMPT = tuple(range(300, 316))
# How long nothing may come, in seconds.
_TIMEOUT = 60.0


@dataclass(frozen=True)
class Turn:
    """What one server did in one round."""

    messages: int
    seconds: float
    cpu_seconds: float  # of the server's process

    @property
    def rate(self) -> float:
        """Messages a second."""
        return self.messages / self.seconds

    @property
    def cpu_microseconds(self) -> float:
        """Processor time of the server for a message."""
        return self.cpu_seconds / self.messages * 1e6

    @property
    def busy(self) -> float:
        """Share of its processor that the server used."""
        return self.cpu_seconds / self.seconds


def request(tokens: int) -> bytes:
    """A GenerateRequest for so many tokens."""
    return generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=_PROMPT),
        stop=generation_pb2.StopOptions(max_tokens=tokens, ignore_eos=True),
    ).SerializeToString()


def check_answer(answer: Sequence[bytes], tokens: int) -> None:
    """Accepted, so many deltas of exactly one token, Finished. Raises CallFailed."""
    responses = [generation_pb2.GenerateResponse.FromString(message) for message in answer]
    kinds = [response.WhichOneof("event") for response in responses]
    if kinds != ["accepted", *["delta"] * tokens, "finished"]:
        raise CallFailed("OTHER_MESSAGES", f"{len(kinds)} messages for {tokens} tokens")
    if any(response.delta.tokens != 1 for response in responses[1:-1]):
        raise CallFailed("COALESCED", "a delta has more than one token")


def take_turn(server: StubProcess, streams: int, tokens: int) -> tuple[Turn, bytes]:
    """One round of one server; also the data of its first stream. Raises CallFailed."""
    cpu = group_seconds(server.group)
    calls = Calls(server.address, GENERATE, [request(tokens)] * streams, _TIMEOUT)
    answers = calls.read()
    seconds = time.perf_counter() - calls.started
    cpu = group_seconds(server.group) - cpu
    for answer in answers:
        check_answer(messages(answer), tokens)
    return Turn(streams * (tokens + 2), seconds, cpu), bytes(answers[0])


def median_text(values: Sequence[float], form: str) -> str:
    """The median, and in brackets the least and the most."""
    least, most = min(values), max(values)
    return f"{statistics.median(values):{form}} ({least:{form}} to {most:{form}})"


def report(service: Sequence[Turn], bare: Sequence[Turn], bare_uvloop: Sequence[Turn]) -> str:
    """The table of all rounds."""
    lines = []
    named = (("service", service), ("bare grpc.aio", bare), ("bare on uvloop", bare_uvloop))
    for name, turns in named:
        busy = statistics.median(turn.busy for turn in turns)
        lines.append(
            f"{name:15}{median_text([turn.rate for turn in turns], ',.0f')} messages/s, "
            f"{median_text([turn.cpu_microseconds for turn in turns], '.1f')} us of processor "
            f"time a message, {busy:.0%} of its processor used"
        )
        if busy < _BUSY_MIN:
            lines.append(f"VOID: {name} waited, for the client or for other programs")
    ratios = [ours.rate / theirs.rate for ours, theirs in zip(service, bare, strict=True)]
    word = "kept" if statistics.median(ratios) >= BAR else "MISSED"
    lines.append(f"service / bare {median_text(ratios, '.3f')}; bar {BAR:.2f}: {word}")
    ratios = [ours.rate / theirs.rate for ours, theirs in zip(service, bare_uvloop, strict=True)]
    lines.append(f"service / bare on uvloop {median_text(ratios, '.3f')}")
    return "\n".join(lines)


async def measure(options: argparse.Namespace, core: int) -> str:
    """Starts the servers, lets them take turns, and returns the table.

    Raises NotRun, CallFailed.
    """
    streams, tokens = options.streams, options.tokens
    sequences = ["--max-sequences", str(streams), "--max-queued", str(streams)]
    with tempfile.TemporaryDirectory() as folder:
        recorded = Path(folder) / "messages"
        service = StubProcess(["lockstep", *sequences], core)
        bare = StubProcess(["bare", "--messages", str(recorded)], core)
        bare_uvloop = StubProcess(["bare", "--messages", str(recorded), "--uvloop"], core)
        servers = [service, bare, bare_uvloop]
        try:
            await service.start()
            _, answer = take_turn(service, streams, tokens)  # does not count
            recorded.write_bytes(answer)
            for server in servers[1:]:
                await server.start()
                take_turn(server, streams, tokens)  # does not count
            company = Company(default_cores(2), [server.group for server in servers])
            turns: dict[StubProcess, list[Turn]] = {server: [] for server in servers}
            for _ in range(options.rounds):
                for server in servers:
                    turns[server].append(take_turn(server, streams, tokens)[0])
                servers = [*servers[1:], servers[0]]  # another one first each time
            sentence = company.sentence()
        finally:
            for server in servers:
                await server.stop()
    deltas = len(servers) * (options.rounds + 1) * streams * tokens
    return f"{report(*turns.values())}\neach of {deltas:,} deltas had exactly one token\n{sentence}"


async def run(options: argparse.Namespace) -> int:
    """The whole program; returns its exit status."""
    cores = default_cores(2)
    if len(cores) < 2:
        print("bench.front: needs two processors, and may use one", file=sys.stderr)
        return 1
    print(
        f"{machine.header(_core.CpuKernels(2))}\n"
        f"{options.streams} streams of {options.tokens} tokens at once, {options.rounds} rounds; "
        f"servers on processor {cores[1]}, client on {cores[0]}\n",
        flush=True,
    )
    os.sched_setaffinity(0, cores[:1])
    try:
        print(await measure(options, cores[1]))
    except (NotRun, CallFailed) as error:
        print(f"bench.front: {error}", file=sys.stderr)
        return 1
    finally:
        os.sched_setaffinity(0, cores)
    print(f"afterwards: {machine.state(_core.CpuKernels(2))}")
    return 0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=count, default=16, help="at once, on one connection")
    parser.add_argument("--tokens", type=count, default=1500, help="and messages of each stream")
    parser.add_argument("--rounds", type=count, default=5)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(run_main(run(parse())))
