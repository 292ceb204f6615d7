"""What readers that take nothing cost those beside them, and the server's memory.

    python -m bench.stalled [--stalled 200] [--streams 8] [--tokens 400] [--rounds 3]

The service over a stub whose steps take 10 ms streams to some ordinary readers, in turn alone and
beside stalled ones: each of these has a connection of its own, whose stream's window never opens,
and asks for as many tokens as fit into the context. Their sequences pause before anything is
measured. Bars: 1 MiB of the server's memory for each of them, and 10 % of the ordinary readers'
p99 ITL. docs/load.md says more.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from dataclasses import dataclass, field

from bench import machine
from bench.arms.arm import NotRun, default_cores
from bench.arms.kvledger import KvledgerClient
from bench.arms.process import run_main
from bench.company import Company
from bench.front import request
from bench.http2 import GENERATE, StalledReader
from bench.load import OK, CallFailed, percentile, send
from bench.serve import count
from bench.stub_process import StubProcess
from kvledger import _core

MEMORY_BAR = 1 << 20  # bytes for each stalled reader
ITL_BAR = 1.10  # times the p99 without them
_PROMPT = tuple(range(300, 316))
_CONTEXT = 8192
# Nobody is given up while this runs, in seconds.
_STALL_TIMEOUT = 3600
_STEP = 0.01
_TIMEOUT = 120.0


@dataclass
class Findings:
    """Of all rounds."""

    alone: list[float] = field(default_factory=list)  # p99 ITL of each round, in seconds
    beside: list[float] = field(default_factory=list)  # the same beside the stalled readers
    least_bytes: int = 0  # of the server, before the first of them came
    most_bytes: int = 0  # with all of them

    def bytes_each(self, stalled: int) -> float:
        """Memory of the server for each stalled reader."""
        return (self.most_bytes - self.least_bytes) / stalled

    @property
    def ratios(self) -> list[float]:
        """p99 ITL beside the stalled readers, over that alone, of each round."""
        return [with_ / without for with_, without in zip(self.beside, self.alone, strict=True)]


async def ordinary(client: KvledgerClient, streams: int, tokens: int) -> float:
    """p99 ITL of some readers at once, in seconds. Raises CallFailed unless all are answered."""
    now = time.perf_counter()
    records = await asyncio.gather(
        *(send(client, _PROMPT, tokens, now, _TIMEOUT) for _ in range(streams))
    )
    for record in records:
        if record.status != OK:
            raise CallFailed(record.status, record.reason)
    return percentile((gap for record in records for gap in record.gaps), 99)


async def until_only(server: StubProcess, sequences: int) -> None:
    """Waits until steps have so many sequences: all others pause, or have gone."""
    deadline = time.perf_counter() + _TIMEOUT
    while server.last_said("sequences") != sequences:
        if time.perf_counter() > deadline:
            said = server.last_said("sequences")
            raise CallFailed("NOT_PAUSED", f"steps have {said} sequences instead of {sequences}")
        await asyncio.sleep(0.1)


async def beside_stalled(
    server: StubProcess, client: KvledgerClient, options: argparse.Namespace, found: Findings
) -> None:
    """One turn with stalled readers; they are gone at the end."""
    body = request(_CONTEXT - len(_PROMPT))
    readers: list[StalledReader] = []
    try:
        for _ in range(options.stalled):
            reader = await StalledReader.call(server.address, GENERATE, body)
            readers.append(reader)  # at once, so that it is closed whatever comes next
        # Somebody who reads keeps steps going, so that it shows who takes no part in them.
        reading = asyncio.create_task(ordinary(client, 1, _CONTEXT - len(_PROMPT)))
        try:
            await until_only(server, options.stalled + 1)
            await until_only(server, 1)
        finally:
            reading.cancel()
            await asyncio.wait((reading,))
        found.beside.append(await ordinary(client, options.streams, options.tokens))
        found.most_bytes = max(found.most_bytes, server.resident_bytes)
        if ended := sum(reader.ended for reader in readers):
            raise CallFailed("ENDED", f"the server ended {ended} of the stalled readers")
    finally:
        await asyncio.gather(*(reader.close() for reader in readers))


async def measure(options: argparse.Namespace, core: int) -> Findings:
    """Runs all rounds on a server of its own. Raises NotRun, CallFailed."""
    places = str(options.stalled + options.streams + 1)
    server = StubProcess(
        [
            *("paced", "--step", str(_STEP), "--stall-timeout", str(_STALL_TIMEOUT)),
            *("--max-sequences", places, "--max-queued", places, "--token-budget", "1024"),
        ],
        core,
    )
    found, client = Findings(), None
    try:
        await server.start()
        client = KvledgerClient(server.address)
        await ordinary(client, options.streams, options.tokens)  # does not count
        company = Company(default_cores(2), [server.group])
        found.least_bytes = server.resident_bytes
        for _ in range(options.rounds):
            found.alone.append(await ordinary(client, options.streams, options.tokens))
            await beside_stalled(server, client, options, found)
            await ordinary(client, 1, 50)  # until those who went have been cleared away
        print(company.sentence())
    finally:
        if client is not None:
            await client.close()
        await server.stop()
    return found


def report(found: Findings, stalled: int) -> str:
    """Both figures with their bars."""
    each, ratio = found.bytes_each(stalled), statistics.median(found.ratios)
    times = (
        f"{statistics.median(values) * 1e3:.2f} ms ({min(values) * 1e3:.2f} to "
        f"{max(values) * 1e3:.2f})"
        for values in (found.alone, found.beside)
    )
    alone, beside = times
    return (
        f"memory  {found.least_bytes / 2**20:.0f} MiB alone, {found.most_bytes / 2**20:.0f} MiB "
        f"with {stalled} stalled readers: {each / 1024:.0f} KiB each; bar {MEMORY_BAR // 1024} "
        f"KiB: {'kept' if each < MEMORY_BAR else 'MISSED'}\n"
        f"p99 ITL {alone} alone, {beside} beside them: {ratio:.3f} times "
        f"({min(found.ratios):.3f} to {max(found.ratios):.3f}); bar {ITL_BAR:.2f}: "
        f"{'kept' if ratio <= ITL_BAR else 'MISSED'}"
    )


async def run(options: argparse.Namespace) -> int:
    """The whole program; returns its exit status."""
    cores = default_cores(2)
    if len(cores) < 2:
        print("bench.stalled: needs two processors, and may use one", file=sys.stderr)
        return 1
    print(
        f"{machine.header(_core.CpuKernels(2))}\n"
        f"{options.streams} ordinary streams of {options.tokens} tokens, steps of "
        f"{_STEP * 1e3:g} ms, {options.stalled} stalled readers, {options.rounds} rounds; server "
        f"on processor {cores[1]}, clients on {cores[0]}\n",
        flush=True,
    )
    os.sched_setaffinity(0, cores[:1])
    try:
        print(report(await measure(options, cores[1]), options.stalled))
    except (NotRun, CallFailed) as error:
        print(f"bench.stalled: {error}", file=sys.stderr)
        return 1
    finally:
        os.sched_setaffinity(0, cores)
    print(f"afterwards: {machine.state(_core.CpuKernels(2))}")
    return 0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stalled", type=count, default=200, help="readers that take nothing")
    parser.add_argument("--streams", type=count, default=8, help="ordinary ones, at once")
    parser.add_argument("--tokens", type=count, default=400, help="of each ordinary stream")
    parser.add_argument("--rounds", type=count, default=3, help="alone and beside, in turn")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(run_main(run(parse())))
