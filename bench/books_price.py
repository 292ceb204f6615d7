"""What the books cost: counted in the process, and by the same traffic with and without them.

    python -m bench.books_price [--model random] [--rounds 12] [--seconds 6] [--at-once 16]
    python -m bench.books_price --core [--sequences 64] [--rounds 12]

Two servers take turns (A B B A ...), each on one processor, the client on the other; whose turn it
is not stands still. One keeps all books that there are: files of receipts, prices, metrics that are
scraped once a second, a ledger that is watched ten times a second, a diagnosis every 5 s. The other
has all of that off; what cannot be turned off, the core's ledger and the receipts, it has too. In
each pair of rounds both get the same requests. A ratio is that of a pair, shown is the median with
an interval in which it lies with 95 % (bootstrap over pairs).

The share that the server counts itself has what the other server has too: the core's books and
counting receipts. It is that of the metric kvledger_books_seconds_total over
kvledger_engine_step_seconds_total.

--core has no server: the calls of plan and commit alone, with requests that come and end all the
time, which is the worst case for the core's books: nothing is computed. Arms are an engine that
times its books and one that does not, so it also shows what the timing costs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from bench import machine
from bench.arms.arm import ArmSettings, NotRun, default_cache, default_cores
from bench.arms.kvledger import Kvledger
from bench.arms.process import free_port, run_main
from bench.company import Company, group_seconds
from bench.load import OK, CallFailed, Words, send
from bench.random_model import write_random_model
from bench.scheduler import NO_REASONS, NOBODY, make_arrivals
from bench.serve import count, positive
from kvledger import _core
from kvledger.v1 import diagnosis_pb2, diagnosis_pb2_grpc, ledger_pb2, ledger_pb2_grpc

# What can be on or off.
PARTS = ("files", "scrape", "watch", "diagnose")
_SCRAPE_SECONDS = 1.0
_WATCH_MILLISECONDS = 100
_DIAGNOSE_SECONDS = 5.0
_RESAMPLES = 2000
_BEGINNINGS = 8
# Steps of a round of --core, and how many of its rounds are as much as one with servers.
_CORE_STEPS, _CORE_ROUNDS = 200, 10
# Seconds that a request may take.
_PATIENCE = 120.0
_PRICES = 'unit = "EUR"\nper_device_hour = 2.5\nmemory_share = 0.6\ncompute_share = 0.4\n'
# Of what the books may take of the steps' time.
BAR = 0.01


@dataclass(frozen=True)
class Turn:
    """What one server did in one round."""

    tokens: int
    seconds: float
    cpu_seconds: float  # of the server's processes

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    @property
    def cpu(self) -> float:
        """Processor seconds for a token."""
        return self.cpu_seconds / self.tokens


@dataclass(frozen=True)
class Ratio:
    """The median of ratios, and in what interval it lies."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.median:.4f} ({self.least:.4f} to {self.most:.4f})"


def ratio_of(values: Sequence[float], seed: int = 1) -> Ratio:
    """The median with its interval of 95 %, by drawing as many values again and again."""
    chance = random.Random(seed)
    medians = sorted(
        statistics.median(chance.choices(values, k=len(values))) for _ in range(_RESAMPLES)
    )
    edge = round(0.025 * _RESAMPLES)
    return Ratio(statistics.median(values), medians[edge], medians[-1 - edge])


def turns(rounds: int) -> Iterator[tuple[int, bool]]:
    """(pair, whether the books are on): A B, B A, A B, ..."""
    for pair in range(rounds):
        first = pair % 2 == 0
        yield from ((pair, first), (pair, not first))


def counted(page: str) -> dict[str, float]:
    """Seconds that a server says of its books, by part, and of its steps, by ""."""
    seconds = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == "kvledger_books_seconds_total":
                seconds[sample.labels["part"]] = sample.value
            elif sample.name == "kvledger_engine_step_seconds_total":
                seconds[""] = sample.value
    return seconds


def shares(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Of the time of steps between two looks, what each part of the books took, and `all`."""
    steps = after[""] - before[""]
    parts = {name: (after[name] - before[name]) / steps for name in after if name}
    return {**parts, "all": sum(parts.values())}


@dataclass
class Books:
    """The server that keeps all of them, and those who look."""

    folder: Path
    on: Sequence[str]  # some of PARTS
    port: int = field(default_factory=free_port)

    @property
    def options(self) -> list[str]:
        """Of its command line."""
        (self.folder / "prices.toml").write_text(_PRICES)
        kept = ["--books", str(self.folder / "books"), "--prices", str(self.folder / "prices.toml")]
        return [
            *(kept if "files" in self.on else ()),
            *("--operators-listen", self.operators, "--metrics-listen", f"127.0.0.1:{self.port}"),
        ]

    @property
    def operators(self) -> str:
        """Where operators are listened to."""
        return f"unix:{self.folder / 'operators.sock'}"

    def scrape(self) -> str:
        """The page of its metrics."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as page:
            return str(page.read().decode())

    @asynccontextmanager
    async def looked_at(self) -> AsyncIterator[None]:
        """Everybody looks meanwhile."""
        async with grpc.aio.insecure_channel(self.operators) as channel:
            all_looks: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
                "scrape": lambda: _again(_SCRAPE_SECONDS, lambda: asyncio.to_thread(self.scrape)),
                "watch": lambda: _watch(channel),
                "diagnose": lambda: _again(_DIAGNOSE_SECONDS, lambda: _diagnose(channel)),
            }
            looks = [
                asyncio.create_task(look()) for name, look in all_looks.items() if name in self.on
            ]
            try:
                yield
            finally:
                for look in looks:
                    look.cancel()
                for outcome in await asyncio.gather(*looks, return_exceptions=True):
                    if not isinstance(outcome, asyncio.CancelledError):
                        raise NotRun(f"who looks at the books could not: {outcome}")


async def _again(seconds: float, look: Callable[[], Awaitable[object]]) -> None:
    while True:
        await look()
        await asyncio.sleep(seconds)


async def _watch(channel: Any) -> None:
    stub: Any = ledger_pb2_grpc.LedgerServiceStub(channel)  # type: ignore[no-untyped-call]
    request = ledger_pb2.WatchLedgerRequest()
    request.interval.FromMilliseconds(_WATCH_MILLISECONDS)
    async for _ in stub.WatchLedger(request):
        pass


async def _diagnose(channel: Any) -> object:
    stub: Any = diagnosis_pb2_grpc.DiagnosisServiceStub(channel)  # type: ignore[no-untyped-call]
    return await stub.Diagnose(diagnosis_pb2.DiagnoseRequest())


async def take_turn(arm: Kvledger, options: argparse.Namespace, seed: int) -> Turn:
    """As many requests as fit into a round, the same for the same seed."""
    vocabulary = (await arm.client.model()).vocabulary_tokens
    words = Words(seed, vocabulary)
    # Half of each prompt comes again and again, so that blocks are shared and reused.
    beginnings = Words(options.seed, vocabulary)
    shared = [beginnings.draw(options.prompt // 2) for _ in range(_BEGINNINGS)]
    cpu, began = group_seconds(arm.group), time.perf_counter()
    ends = began + options.seconds
    tokens = 0

    async def worker() -> None:
        nonlocal tokens
        while (now := time.perf_counter()) < ends:
            prompt = shared[words.draw(1)[0] % _BEGINNINGS]
            prompt += words.draw(options.prompt - len(prompt))
            record = await send(arm.client, prompt, options.output, now, _PATIENCE)
            if record.status != OK:
                raise CallFailed(record.status, record.reason)
            tokens += len(record.arrivals)

    await asyncio.gather(*(worker() for _ in range(options.at_once)))
    return Turn(tokens, time.perf_counter() - began, group_seconds(arm.group) - cpu)


async def compare(
    on: Kvledger, off: Kvledger, books: Books, options: argparse.Namespace
) -> dict[str, Any]:
    """All rounds; prints what they showed."""
    found: dict[bool, list[Turn]] = {True: [], False: []}
    for arm in (on, off):
        arm.resume()
        await take_turn(arm, options, options.seed)  # does not count
        arm.suspend()
    before: dict[str, float] = {}
    for pair, is_on in turns(options.rounds):
        arm = on if is_on else off
        arm.resume()
        if is_on:
            before = before or counted(books.scrape())
            async with books.looked_at():
                turn = await take_turn(arm, options, options.seed + 1 + pair)
        else:
            turn = await take_turn(arm, options, options.seed + 1 + pair)
        arm.suspend()
        found[is_on].append(turn)
    on.resume()
    parts = shares(before, counted(books.scrape()))
    pairs = list(zip(found[True], found[False], strict=True))
    rate = ratio_of([with_books.rate / without.rate for with_books, without in pairs])
    cpu = ratio_of([with_books.cpu / without.cpu for with_books, without in pairs])
    for name, arm_turns in (("on", found[True]), ("off", found[False])):
        rates = statistics.median(turn.rate for turn in arm_turns)
        each = statistics.median(turn.cpu for turn in arm_turns)
        print(f"{name:4}{rates:9.1f} tokens/s, {each * 1e6:8.1f} us of processor time a token")
    print(f"tokens/s, on over off              {rate}")
    print(f"processor time a token, on over off {cpu}")
    print("counted, of the time of steps: " + shares_text(parts))
    return {"rate": vars(rate), "cpu": vars(cpu), "counted": parts}


def shares_text(parts: Mapping[str, float]) -> str:
    """The sum, what it is made of, and whether it is little enough."""
    listed = ", ".join(f"{name} {share:.3%}" for name, share in parts.items() if name != "all")
    word = "kept" if parts["all"] <= BAR else "MISSED"
    return f"{parts['all']:.3%} ({listed}); bar {BAR:.0%}: {word}"


async def run_servers(options: argparse.Namespace) -> int:
    """Starts both servers and compares them; 1 if that could not be done."""
    cores = default_cores(2)
    if len(cores) < 2:
        print("bench.books_price: needs two processors, and may use one", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="kvledger-price-") as home:
        model = Path(options.model)
        if options.model == "random":
            model = write_random_model(Path(home) / "random")
        settings = ArmSettings(default_cache(), model, cores[1:], 1)
        books = Books(Path(home), options.on)
        shared = ["--kv-blocks", str(options.kv_blocks), "--max-sequences", str(options.at_once)]
        on = Kvledger(settings, [*shared, *books.options])
        off = Kvledger(settings, [*shared, "--operators-listen", "none"])
        print(
            f"{machine.header(_core.CpuKernels(2))}\n{off.described}\n"
            f"{options.rounds} pairs of rounds of {options.seconds:g} s, {options.at_once} at "
            f"once, prompts of {options.prompt}, answers of {options.output} tokens\n",
            flush=True,
        )
        started = []
        try:
            for arm in (on, off):
                await arm.start()
                started.append(arm)
                arm.suspend()
            company = Company(cores, [on.group, off.group])
            content = await compare(on, off, books, options)
            print(company.sentence())
        except (NotRun, CallFailed) as error:
            print(f"bench.books_price: {error}", file=sys.stderr)
            return 1
        finally:
            for arm in started:
                arm.resume()
            for arm in (on, off):
                await arm.stop()
    if options.json is not None:
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0


class CoreLoad:
    """An engine whose sequences come, decode and end all the time, with tokens of no model."""

    OUTPUT = 32

    def __init__(self, sequences: int, times_books: bool) -> None:
        self._sequences = sequences
        self._engine = _core.Engine(
            blocks=sequences * 5 // 2,  # some are preempted
            slots_per_block=32,
            context_tokens=8192,
            token_budget=4 * sequences,
            sequences_max=sequences,
            end_of_text=[],
            times_books=times_books,
            now=0,
        )
        self._now = self._next = 0
        self._due = 0.0  # requests that shall come
        self.seconds = 0.0  # in plan and commit
        self.steps = self.receipts = 0
        self.books_seconds = 0.0

    def run(self, steps: int) -> float:
        """So many steps; the seconds that their calls took."""
        tokens = np.full(self._sequences, 7, np.int32)
        before = self.seconds
        for _ in range(steps):
            self._now += 1_000_000
            # As many come as end, on average, once there are enough.
            self._due += self._sequences / self.OUTPUT
            more = int(self._due) if self._next else self._sequences // 4
            self._due -= int(self._due)
            arrivals = make_arrivals(more, self.OUTPUT, self._next) if more else None
            self._next += more
            began = time.perf_counter()
            plan, report = self._engine.plan(self._now, arrivals, NOBODY, NO_REASONS)
            planned = time.perf_counter()
            wanted = plan.logits
            chosen, offsets = tokens[:wanted], np.arange(wanted + 1, dtype=np.int32)
            self._now += 1_000_000
            resumed = time.perf_counter()
            committed = self._engine.commit(plan.step, chosen, offsets, self._now)
            self.seconds += planned - began + time.perf_counter() - resumed
            self.receipts += len(report.receipts) + len(committed.receipts)
            self.books_seconds = committed.books_nanoseconds / 1e9
        self.steps += steps
        return self.seconds - before


def run_core(options: argparse.Namespace) -> int:
    """The calls of the core alone."""
    print(machine.header(_core.CpuKernels(1)))
    timed, untimed = CoreLoad(options.sequences, True), CoreLoad(options.sequences, False)
    for load in (timed, untimed):
        load.run(10 * _CORE_STEPS)  # does not count
    begun = timed.seconds, timed.books_seconds
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for _, is_timed in turns(_CORE_ROUNDS * options.rounds):
        seconds[is_timed].append((timed if is_timed else untimed).run(_CORE_STEPS))
    ratio = ratio_of([a / b for a, b in zip(seconds[True], seconds[False], strict=True)])
    spent = timed.seconds - begun[0]
    books = timed.books_seconds - begun[1]
    steps = _CORE_ROUNDS * options.rounds * _CORE_STEPS
    print(
        f"{options.sequences} sequences, {steps} steps, {timed.receipts} receipts: plan and commit "
        f"take {spent / steps * 1e6:.1f} us a step, the books are {books / steps * 1e6:.2f} us of "
        f"that: {books / spent:.1%}\nwith timing over without: {ratio}"
    )
    return 0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--core", action="store_true", help="the core's calls alone")
    parser.add_argument("--sequences", type=count, default=64, help="of --core")
    parser.add_argument("--model", default="random", help="random, or as of kvledger serve")
    parser.add_argument(
        "--on", nargs="+", choices=PARTS, default=PARTS, help="of the server that keeps books"
    )
    parser.add_argument("--rounds", type=count, default=12, help="pairs of them")
    parser.add_argument("--seconds", type=positive, default=6.0, help="of a round")
    parser.add_argument("--at-once", type=count, default=16, help="requests")
    parser.add_argument("--prompt", type=count, default=64, help="tokens of a prompt")
    parser.add_argument("--output", type=count, default=32, help="tokens of an answer")
    parser.add_argument("--kv-blocks", type=count, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    parsed = parse()
    sys.exit(run_core(parsed) if parsed.core else run_main(run_servers(parsed)))
