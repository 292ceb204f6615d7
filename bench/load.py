"""What a load test sends, and the arithmetic of what comes back. No network and no server in here.

A workload is a list of conversations, most of one turn. A driver sends them to a client in a closed
loop (so many at once) or an open one (at the times of a Poisson process), and returns a record of
each request with the arrival time of every token. docs/load.md defines the figures made of them.
"""

from __future__ import annotations

import asyncio
import csv
import itertools
import math
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

OK = "OK"
# A stream that this program ended itself, as planned.
STOPPED = "STOPPED"
# A stream that ended well, but with fewer or more tokens than asked for.
INCOMPLETE = "INCOMPLETE"
# A turn of a conversation whose earlier turn failed.
NOT_SENT = "NOT_SENT"
TIMEOUT = "TIMEOUT"
PERCENTILES = (50, 90, 99)


class CallFailed(Exception):
    """A call that ended with an error; `status` is the name to count it by."""

    def __init__(self, status: str, sentence: str = "") -> None:
        super().__init__(f"{status}: {sentence}" if sentence else status)
        self.status = status


class Client(Protocol):
    """Whatever can stream the tokens of a greedy answer."""

    def stream(
        self, prompt: Sequence[int], output: int, ignore_eos: bool = True
    ) -> AsyncIterator[Sequence[int]]:
        """Token ids as they come, in lists of one or more. Raises CallFailed."""
        ...


@dataclass(frozen=True)
class Turn:
    """New tokens of a conversation, and how many to generate after them."""

    tokens: tuple[int, ...]
    output: int


Conversation = tuple[Turn, ...]


@dataclass
class Record:
    """What one request asked for and when each of its tokens came, in seconds of perf_counter."""

    prompt_tokens: int
    wanted_tokens: int
    due: float  # when it was sent, or in an open loop should have been
    status: str = OK
    reason: str = ""
    arrivals: list[float] = field(default_factory=list)  # one a token
    tokens: list[int] = field(default_factory=list)

    @property
    def ttft(self) -> float | None:
        """Seconds until the first token."""
        return self.arrivals[0] - self.due if self.arrivals else None

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None for an answer of one token."""
        if len(self.arrivals) < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (len(self.arrivals) - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between each token and the next. Tokens of one message have none between them."""
        return [after - before for before, after in itertools.pairwise(self.arrivals)]


@dataclass(frozen=True)
class Limits:
    """What a request must keep to count as good, in seconds; None: anything is good enough."""

    ttft: float | None = None
    tpot: float | None = None

    def keeps(self, record: Record) -> bool:
        """Whether a request was answered in full and in time."""
        if record.status != OK or record.ttft is None:
            return False
        if self.ttft is not None and record.ttft > self.ttft:
            return False
        return self.tpot is None or record.tpot is None or record.tpot <= self.tpot


def percentile(values: Iterable[float], percent: float) -> float:
    """The least value that `percent` % of all values do not exceed (nearest rank); nan of none."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def percentiles(values: Iterable[float]) -> dict[str, float]:
    """p50, p90 and p99."""
    ordered = sorted(values)
    return {f"p{percent}": percentile(ordered, percent) for percent in PERCENTILES}


@dataclass(frozen=True)
class Summary:
    """The figures of a run; times in seconds."""

    requests: int
    statuses: dict[str, int]
    reasons: dict[str, str]  # of each status but OK, the first sentence that came with it
    seconds: float  # from the first request to the last token
    prompt_tokens: int  # of the answers that are complete, as are the next two
    output_tokens: int
    output_tokens_per_second: float
    ttft: dict[str, float]
    tpot: dict[str, float]
    itl: dict[str, float]
    longest_stall: float
    good_requests: int
    goodput: float  # good requests per second

    def as_json(self) -> dict[str, Any]:
        """For json.dump."""
        return asdict(self)


def summarize(records: Sequence[Record], limits: Limits = Limits()) -> Summary:
    """The figures of a run. Requests that failed are counted, and have no part in the times."""
    done = [record for record in records if record.status == OK]
    started = min((record.due for record in records), default=0.0)
    ended = max((r.arrivals[-1] for r in records if r.arrivals), default=started)
    seconds = ended - started
    gaps = [gap for record in done for gap in record.gaps]
    output = sum(len(record.arrivals) for record in done)
    good = sum(limits.keeps(record) for record in records)
    reasons: dict[str, str] = {}
    for record in records:
        if record.status != OK:
            reasons.setdefault(record.status, record.reason)
    return Summary(
        requests=len(records),
        statuses=dict(Counter(record.status for record in records)),
        reasons=reasons,
        seconds=seconds,
        prompt_tokens=sum(record.prompt_tokens for record in done),
        output_tokens=output,
        output_tokens_per_second=output / seconds if seconds > 0 else math.nan,
        ttft=percentiles(r.ttft for r in done if r.ttft is not None),
        tpot=percentiles(r.tpot for r in done if r.tpot is not None),
        itl=percentiles(gaps),
        longest_stall=max(gaps, default=math.nan),
        good_requests=good,
        goodput=good / seconds if seconds > 0 else math.nan,
    )


def split_gaps(
    arrivals: Sequence[float], steady: float, sent: float, first: float
) -> tuple[list[float], list[float]]:
    """The gaps of a running stream (before, while) a newcomer waits for its first token.

    A gap belongs to the wait if any of it lies between `sent` and `first`, even if it began before
    or ended after: a stream that stands still for the whole wait has just one such gap. Gaps that
    began before `steady`, when other streams were still reading their prompts, belong to neither.
    """
    before, during = [], []
    for start, end in itertools.pairwise(arrivals):
        if start < steady:
            continue
        if end <= sent:
            before.append(end - start)
        elif start < first:
            during.append(end - start)
    return before, during


def read_trace(path: Path, context: int, count: int, seed: int) -> list[tuple[int, int]]:
    """`count` (prompt, output) lengths of a trace that fit into a context, drawn with the seed.

    The trace is a CSV with the columns ContextTokens and GeneratedTokens. Raises ValueError.
    """
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        missing = {"ContextTokens", "GeneratedTokens"} - set(reader.fieldnames or ())
        if missing:
            raise ValueError(f"{path.name} has no column {' and no '.join(sorted(missing))}")
        rows = [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in reader]
    fitting = [row for row in rows if row[0] > 0 and row[1] > 0 and sum(row) <= context]
    if not fitting:
        raise ValueError(f"{path.name} has no request that fits into {context} tokens")
    return random.Random(seed).choices(fitting, k=count)


class Words:
    """Random token ids of the commoner half of a vocabulary, without the special ones before."""

    def __init__(self, seed: int, vocabulary: int) -> None:
        self._random = random.Random(seed)
        self._least = min(1000, vocabulary // 4)
        self._most = vocabulary // 2 - 1

    def draw(self, count: int) -> tuple[int, ...]:
        """So many ids."""
        return tuple(self._random.randint(self._least, self._most) for _ in range(count))


def single_requests(
    words: Words, lengths: Sequence[tuple[int, int]], prefix_tokens: int = 0, prefixes: int = 1
) -> list[Conversation]:
    """One request for each (prompt, output); the prompts begin with one of the shared prefixes."""
    shared = [words.draw(prefix_tokens) for _ in range(prefixes)]
    return [
        (Turn(shared[index % prefixes] + words.draw(prompt), output),)
        for index, (prompt, output) in enumerate(lengths)
    ]


def chats(
    words: Words, lengths: Sequence[tuple[int, int]], turns: int, system_tokens: int = 0
) -> list[Conversation]:
    """A conversation for each (prompt, output), which are the lengths of every turn of it."""
    system = words.draw(system_tokens)
    return [
        tuple(
            Turn((system if turn == 0 else ()) + words.draw(prompt), output)
            for turn in range(turns)
        )
        for prompt, output in lengths
    ]


async def send(
    client: Client, prompt: Sequence[int], output: int, due: float, timeout: float
) -> Record:
    """One request, to its end; whatever happens to it is in the record."""
    record = Record(len(prompt), output, due)
    try:
        await asyncio.wait_for(_receive(client, prompt, record), timeout)
    except CallFailed as error:
        record.status, record.reason = error.status, str(error)
    except asyncio.TimeoutError:
        record.status, record.reason = TIMEOUT, f"not done after {timeout:g} s"
    if record.status == OK and len(record.arrivals) != output:
        record.status = INCOMPLETE
        record.reason = f"{len(record.arrivals)} tokens instead of {output}"
    return record


async def _receive(client: Client, prompt: Sequence[int], record: Record) -> None:
    async for tokens in client.stream(prompt, record.wanted_tokens):
        record.arrivals.extend([time.perf_counter()] * len(tokens))
        record.tokens.extend(tokens)


async def converse(
    client: Client, conversation: Conversation, due: float, think: float, timeout: float
) -> list[Record]:
    """The turns of a conversation, one after the other, each with all that was said before."""
    history: list[int] = []
    records: list[Record] = []
    for index, turn in enumerate(conversation):
        history.extend(turn.tokens)
        record = await send(client, history, turn.output, due, timeout)
        records.append(record)
        if record.status != OK:
            now = time.perf_counter()
            rest = conversation[index + 1 :]
            records.extend(
                Record(0, t.output, now, NOT_SENT, "an earlier turn failed") for t in rest
            )
            break
        history.extend(record.tokens)
        if index + 1 < len(conversation):
            await asyncio.sleep(think)
        due = time.perf_counter()
    return records


async def closed_loop(
    client: Client,
    conversations: Iterable[Conversation],
    concurrency: int,
    timeout: float,
    think: float = 0.0,
) -> list[Record]:
    """Keeps `concurrency` conversations going until none is left."""
    waiting = iter(conversations)
    records: list[Record] = []

    async def worker() -> None:
        for conversation in waiting:
            now = time.perf_counter()
            records.extend(await converse(client, conversation, now, think, timeout))

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return records


def poisson_times(count: int, rate: float, seed: int) -> list[float]:
    """Seconds from the start at which `count` requests are due; `rate` a second on average."""
    chance = random.Random(seed)
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += chance.expovariate(rate)
    return times


async def open_loop(
    client: Client,
    conversations: Sequence[Conversation],
    rate: float,
    seed: int,
    timeout: float,
    think: float = 0.0,
) -> list[Record]:
    """Begins conversations at the times of a Poisson process, however slow the answers are.

    What a request waits because this program was late counts as its own waiting.
    """
    started = time.perf_counter()

    async def later(conversation: Conversation, seconds: float) -> list[Record]:
        due = started + seconds
        await asyncio.sleep(due - time.perf_counter())
        return await converse(client, conversation, due, think, timeout)

    times = poisson_times(len(conversations), rate, seed)
    lists = await asyncio.gather(
        *(later(c, t) for c, t in zip(conversations, times, strict=True)),
    )
    return [record for records in lists for record in records]


@dataclass
class Interference:
    """What a long prompt does to streams that are decoding; seconds."""

    before: list[float]  # of each stream, the longest gap before the long prompt was sent
    during: list[float]  # the same while the long prompt waited for its first token
    alone: list[float]  # time to first token of a long prompt with nothing else running
    loaded: list[float]  # the same beside the streams
    statuses: dict[str, int]
    reasons: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        """For json.dump."""
        return asdict(self)


@dataclass(frozen=True)
class InterferencePlan:
    """Sizes of the interference scenario."""

    streams: int = 4
    prompt: int = 64  # tokens of a stream's prompt
    long: int = 2048  # tokens of the newcomer's
    warm: int = 32  # tokens that every stream must have had before the newcomer comes
    rounds: int = 3
    output_max: int = 2048  # a stream's output, which is to be more than is needed


async def interference(
    client: Client, words: Words, plan: InterferencePlan, timeout: float
) -> tuple[Interference, list[Record]]:
    """Runs the scenario; also returns the records of the last round, the newcomer's last."""
    result = Interference([], [], [], [], {}, {})
    statuses: Counter[str] = Counter()
    records: list[Record] = []
    for _ in range(plan.rounds):
        now = time.perf_counter()
        alone = await send(client, words.draw(plan.long), 1, now, timeout)
        streams, newcomer = await _interfere(client, words, plan, timeout)
        records = [*streams, newcomer]
        for record in (alone, *records):
            statuses[record.status] += 1
            if record.status not in (OK, STOPPED):
                result.reasons.setdefault(record.status, record.reason)
        if alone.ttft is not None and alone.status == OK:
            result.alone.append(alone.ttft)
        if newcomer.ttft is None or newcomer.status != OK:
            continue
        result.loaded.append(newcomer.ttft)
        steady = max((s.arrivals[0] for s in streams if s.arrivals), default=0.0)
        sent, first = newcomer.due, newcomer.arrivals[0]
        for stream in streams:
            before, during = split_gaps(stream.arrivals, steady, sent, first)
            if before and during:
                result.before.append(max(before))
                result.during.append(max(during))
    result.statuses = dict(statuses)
    return result, records


async def _interfere(
    client: Client, words: Words, plan: InterferencePlan, timeout: float
) -> tuple[list[Record], Record]:
    """One round: (the streams' records, the newcomer's)."""
    records: list[Record] = []
    tasks: list[asyncio.Task[None]] = []
    for _ in range(plan.streams):
        prompt = words.draw(plan.prompt)
        record = Record(len(prompt), plan.output_max, time.perf_counter())
        records.append(record)
        tasks.append(asyncio.create_task(_receive(client, prompt, record)))
    await _until(tasks, records, [plan.warm] * plan.streams, timeout)
    now = time.perf_counter()
    newcomer = await send(client, words.draw(plan.long), 1, now, timeout)
    # The gap in which the newcomer's first token came must end before the streams may.
    await _until(tasks, records, [len(record.arrivals) + 2 for record in records], timeout)
    for task in tasks:
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    for record, outcome in zip(records, outcomes, strict=True):
        if isinstance(outcome, asyncio.CancelledError):
            record.status = STOPPED
        elif isinstance(outcome, CallFailed):
            record.status, record.reason = outcome.status, str(outcome)
        elif isinstance(outcome, BaseException):
            raise outcome
        else:
            record.status, record.reason = INCOMPLETE, "the stream ended before the newcomer came"
    return records, newcomer


async def _until(
    tasks: Sequence[asyncio.Task[None]],
    records: Sequence[Record],
    counts: Sequence[int],
    timeout: float,
) -> None:
    """Waits until every stream has so many tokens, or has ended; for `timeout` seconds at most."""
    deadline = time.perf_counter() + timeout
    while time.perf_counter() < deadline:
        short = [len(r.arrivals) < count for r, count in zip(records, counts, strict=True)]
        if not any(s and not task.done() for s, task in zip(short, tasks, strict=True)):
            return
        await asyncio.sleep(0.002)
