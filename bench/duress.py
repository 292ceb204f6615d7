"""What the benchmarks of a server under duress share: bars, answers with their ends, its memory."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.load import Client, Limits, Record, Words, percentile, poisson_times, send

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Seconds from one look at the memory to the next.
_LOOK_INTERVAL = 1.0
# Most of a phase that counts as its first or last part when memory is compared, in seconds.
_MEMORY_WINDOW = 60.0


@dataclass(frozen=True)
class Bar:
    """One thing that a run has to show, with what it showed."""

    name: str
    passed: bool
    found: str
    wanted: str


def bars_text(bars: Sequence[Bar]) -> str:
    """A line a bar, and how many were passed."""
    wide = max(len(bar.name) for bar in bars)
    lines = [
        f"{'pass' if bar.passed else 'FAIL'}  {bar.name:{wide}}  {bar.found} ({bar.wanted})"
        for bar in bars
    ]
    passed = sum(bar.passed for bar in bars)
    return "\n".join([*lines, f"{passed} of {len(bars)} bars passed"])


@dataclass(frozen=True)
class Answer:
    """A request, when it really was sent and when its call had ended, in s of perf_counter."""

    record: Record
    sent: float
    ended: float


@dataclass(frozen=True)
class Shape:
    """What all requests of a run look like, in tokens, and the seconds that one may take."""

    prompt: int
    output: int
    timeout: float


async def ask(client: Client, words: Words, shape: Shape, due: float) -> Answer:
    """One request, to its end."""
    prompt = words.draw(shape.prompt)
    sent = time.perf_counter()
    record = await send(client, prompt, shape.output, due, shape.timeout)
    return Answer(record, sent, time.perf_counter())


def due_times(started: float, rate: float, seconds: float, seed: int) -> Iterator[float]:
    """Times of a Poisson process from `started` on, `rate` a second, for so many seconds."""
    # Twice as many as there should be: a process that ends early would be a lighter load.
    for due in poisson_times(2 * round(rate * seconds) + 16, rate, seed):
        if due >= seconds:
            return
        yield started + due


async def offer(
    client: Client, words: Words, shape: Shape, times: Iterator[float]
) -> list[asyncio.Task[Answer]]:
    """Open loop: sends a request at each time; returns when the last is sent, not answered."""
    tasks = []
    for due in times:
        await asyncio.sleep(due - time.perf_counter())
        tasks.append(asyncio.create_task(ask(client, words, shape, due)))
    return tasks


async def saturate(
    client: Client, words: Words, shape: Shape, concurrency: int, seconds: float
) -> list[Answer]:
    """Closed loop: `concurrency` requests at once, none begun after so many seconds."""
    answers: list[Answer] = []
    ends = time.perf_counter() + seconds

    async def worker(late: float) -> None:
        # A queue that is short would refuse some of those who come all at once.
        await asyncio.sleep(late)
        while (now := time.perf_counter()) < ends:
            answers.append(await ask(client, words, shape, now))
            if not answers[-1].record.arrivals:
                await asyncio.sleep(late)

    await asyncio.gather(*(worker(0.1 * (place + 1)) for place in range(concurrency)))
    return answers


def good_tokens_per_second(
    answers: Sequence[Answer], limits: Limits, start: float, end: float
) -> float:
    """Tokens that came from `start` to `end`, of requests answered in full and within limits."""
    good = [answer.record for answer in answers if limits.keeps(answer.record)]
    return sum(start <= time < end for r in good for time in r.arrivals) / (end - start)


def group_bytes(group: int) -> int:
    """Resident memory of all processes of a group now."""
    return sum(_bytes_in_group(path, group) for path in Path("/proc").glob("[0-9]*"))


def _bytes_in_group(process: Path, group: int) -> int:
    try:
        fields = (process / "stat").read_text().rpartition(")")[2].split()
        if int(fields[2]) != group:
            return 0
        return int((process / "statm").read_text().split()[1]) * _PAGE_BYTES
    except OSError:  # it has just ended
        return 0


class MemoryWatch:
    """Looks once a second while a block of `async with` runs. `samples` are (time, bytes)."""

    def __init__(self, look: Callable[[], int]) -> None:
        self.samples: list[tuple[float, int]] = []
        self._look = look
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> MemoryWatch:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self._task is not None
        self._task.cancel()

    async def _watch(self) -> None:
        while True:
            self.samples.append((time.perf_counter(), self._look()))
            await asyncio.sleep(_LOOK_INTERVAL)


def memory_growth(samples: Sequence[tuple[float, int]], start: float, end: float) -> float:
    """Share by which the median of a phase's last minute is above that of its first.

    Of a phase shorter than three minutes, thirds count instead; nan without samples in both.
    """
    window = min(_MEMORY_WINDOW, (end - start) / 3)
    first = percentile((size for at, size in samples if start <= at < start + window), 50)
    last = percentile((size for at, size in samples if end - window <= at < end), 50)
    return last / first - 1
