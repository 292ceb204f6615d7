"""A quiet tenant beside one that floods: what is left of its hits and of its times.

Both have the same guarantee of the pool. The quiet one has conversations, some users at a time, who
think between turns; the other sends long prompts that never come again, ten times as many at once
as its guarantee holds. Phases alone and beside the flood come in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import report
from bench.arms.arm import ArmSettings
from bench.company import Company
from bench.duress import Bar
from bench.load import OK, Words, percentile
from bench.reusing.figures import jain, middle, ratios, share
from bench.reusing.servers import Answer, Asker, TenantServer, require_ok
from kvledger.tenants import editing

GUARANTEED = 0.49  # of each: one block of the pool stays for tenants without a guarantee
POOL_BLOCKS = 512
BLOCK_TOKENS = 32
HITS_LOST_MOST = 0.05
TTFT_MOST = 1.3  # beside the flood over alone
JAIN_LEAST = 0.95
FLOOD_PROMPT, FLOOD_OUTPUT = 1024, 8
# As many of these as hold ten times what is guaranteed.
FLOOD_AT_ONCE = math.ceil(10 * GUARANTEED * POOL_BLOCKS * BLOCK_TOKENS / FLOOD_PROMPT)
SYSTEM, TURN, ANSWER = 256, 48, 16  # tokens of the quiet tenant's conversations
_PATIENCE = 60.0  # seconds after which the quiet tenant gives a request up
_SETTLING = 6.0  # seconds that a flood runs before it counts
# Seconds after which a refused request comes again: when it was asked to, within these.
_AGAIN_LEAST, _AGAIN_MOST = 0.5, 10.0


@dataclass(frozen=True)
class Setting:
    """What an operator sets against a flood."""

    meaning: str
    limits: Mapping[str, Any] = field(default_factory=dict)  # of who floods
    serve: tuple[str, ...] = ()
    priority: int = 0  # of the quiet tenant's requests


SETTINGS = {
    "shares": Setting("guarantees alone"),
    "one": Setting("and running_max 1", {"running_max": 1}),
    "small": Setting(
        "and running_max 1, steps of 64 tokens",
        {"running_max": 1},
        ("--token-budget", "64", "--max-sequences", "32"),
    ),
    "urgent": Setting(
        "and running_max 1, steps of 64 tokens, the quiet tenant's priority -3",
        {"running_max": 1},
        ("--token-budget", "64", "--max-sequences", "32"),
        -3,
    ),
    "rate": Setting(
        "and running_max 1, steps of 64 tokens, 20 tokens a second",
        {"running_max": 1, "tokens_per_second": 20},
        ("--token-budget", "64", "--max-sequences", "32"),
    ),
}


@asynccontextmanager
async def served(
    settings: ArmSettings, limits: Mapping[str, Mapping[str, Any]], serve: tuple[str, ...]
) -> AsyncIterator[dict[str, Asker]]:
    """A server for tenants with these limits, besides their guarantees; a client for each."""
    with tempfile.TemporaryDirectory(prefix="kvledger-bench-") as name:
        folder = Path(name)
        file = folder / "tenants.json"
        tokens: dict[str, str] = {}

        def write(values: dict[str, Any]) -> None:
            for tenant, own in limits.items():
                token = editing.add(values, tenant, ["client"], [], True)
                assert token is not None
                tokens[tenant] = token
                values["tenants"][tenant]["limits"] = {"kv_guaranteed": GUARANTEED, **own}

        editing.change(file, write, create=True)
        extra = ("--kv-blocks", str(POOL_BLOCKS), *serve)
        server = TenantServer(settings, str(file), str(folder / "socket"), extra)
        askers: dict[str, Asker] = {}
        try:
            await server.start()
            askers = {tenant: server.asker(token) for tenant, token in tokens.items()}
            print(server.described, flush=True)
            company = Company(settings.cores, [server.group])
            yield askers
            print(company.sentence(), flush=True)
        finally:
            for asker in askers.values():
                await asker.close()
            await server.stop()


class Flood:
    """Keeps FLOOD_AT_ONCE requests of a tenant going while a block of `async with` runs."""

    def __init__(self, asker: Asker, words: Words) -> None:
        self.answers: list[Answer] = []
        self._asker, self._words = asker, words
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Flood:
        self._tasks = [asyncio.create_task(self._work()) for _ in range(FLOOD_AT_ONCE)]
        return self

    async def __aexit__(self, *exception: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _work(self) -> None:
        while True:
            answer = await self._asker.ask(self._words.draw(FLOOD_PROMPT), FLOOD_OUTPUT)
            self.answers.append(answer)
            if answer.status != OK:
                await asyncio.sleep(max(_AGAIN_LEAST, min(answer.come_back, _AGAIN_MOST)))


async def converse(
    asker: Asker, words: Words, system: tuple[int, ...], options: argparse.Namespace, priority: int
) -> list[Answer]:
    """One conversation, each turn with all that was said before."""
    history = list(system)
    answers = []
    for _ in range(options.turns):
        history.extend(words.draw(TURN))
        answer = await asker.ask(history, ANSWER, priority=priority, timeout=_PATIENCE)
        answers.append(answer)
        if answer.status != OK:
            break
        history.extend(answer.tokens)
        await asyncio.sleep(options.think)
    return answers


async def quiet_phase(
    asker: Asker, words: Words, options: argparse.Namespace, priority: int
) -> list[Answer]:
    """The quiet tenant's users, one after the other begins; all with the same system prompt."""
    system = words.draw(SYSTEM)

    async def user(late: float) -> list[Answer]:
        await asyncio.sleep(late)
        return await converse(asker, words, system, options, priority)

    spread = options.think / options.users
    lists = await asyncio.gather(*(user(spread * index) for index in range(options.users)))
    return [answer for answers in lists for answer in answers]


def hit_rate(answers: list[Answer]) -> float:
    """Share of prompt tokens that were not computed."""
    return share(
        sum(answer.cached_tokens for answer in answers),
        sum(answer.prompt_tokens for answer in answers),
    )


async def measure(settings: ArmSettings, options: argparse.Namespace) -> list[Bar]:
    """The chosen settings, a server each."""
    bars: list[Bar] = []
    for name in options.settings:
        setting = SETTINGS[name]
        limits = {"quiet": {}, "flood": setting.limits}
        print(f"\n--- {name}: {setting.meaning}")
        async with served(settings, limits, setting.serve) as askers:
            bars += await rounds(name, askers, options, setting.priority)
    return bars


async def rounds(
    name: str, askers: Mapping[str, Asker], options: argparse.Namespace, priority: int
) -> list[Bar]:
    """Phases alone and beside the flood in turn; prints what they showed."""
    words = Words(options.seed, 49_152)
    alone: list[list[Answer]] = []
    beside: list[list[Answer]] = []
    require_ok([await askers["quiet"].ask(words.draw(64), 8)])
    done = refused = given_up = 0
    for _ in range(options.rounds):
        alone.append(await quiet_phase(askers["quiet"], words, options, priority))
        require_ok(alone[-1])
        async with Flood(askers["flood"], words) as flood:
            await asyncio.sleep(_SETTLING)
            beside.append(await quiet_phase(askers["quiet"], words, options, priority))
        done += sum(answer.status == OK for answer in flood.answers)
        refused += sum(answer.status != OK for answer in flood.answers)
        given_up += sum(answer.status != OK for answer in beside[-1])
        print(
            f"  hits {hit_rate(alone[-1]):.1%} alone, {hit_rate(beside[-1]):.1%} beside; TTFT p50 "
            f"{report.milliseconds(ttft(alone[-1], 50))} and "
            f"{report.milliseconds(ttft(beside[-1], 50))} ms; flood: {done} answered, "
            f"{refused} refused so far; {given_up} quiet ones not answered within "
            f"{_PATIENCE:g} s",
            flush=True,
        )
        await asyncio.sleep(1.0)  # what was cancelled is gone
    lost = middle(hit_rate(a) - hit_rate(b) for a, b in zip(alone, beside, strict=True))
    bars = [
        Bar(f"{name}: all answered", given_up == 0, f"{given_up} given up", "none"),
        Bar(
            f"{name}: hits lost",
            lost.high < HITS_LOST_MOST,
            f"{lost.median:+.2%} ({lost.low:+.2%} to {lost.high:+.2%})",
            f"less than {HITS_LOST_MOST:.0%}",
        ),
    ]
    for percent in (50, 99):
        every = [[a for phase in phases for a in phase] for phases in (alone, beside)]
        pooled = ttft(every[1], percent) / ttft(every[0], percent)
        each = ratios([ttft(b, percent) for b in beside], [ttft(a, percent) for a in alone])
        bars.append(
            Bar(
                f"{name}: TTFT p{percent}",
                pooled <= TTFT_MOST,
                f"{pooled:.2f} times of {report.milliseconds(ttft(every[0], percent))} ms "
                f"(rounds {each.low:.2f} to {each.high:.2f}; {len(every[0])} requests each)",
                f"at most {TTFT_MOST:g} times alone",
            )
        )
    return bars


def ttft(answers: list[Answer], percent: float) -> float:
    """A percentile of the times to the first token."""
    return percentile((answer.ttft for answer in answers), percent)


async def measure_fairness(settings: ArmSettings, options: argparse.Namespace) -> list[Bar]:
    """Two equal tenants who both flood: how equal their block-seconds are."""
    limits: dict[str, dict[str, Any]] = {"left": {}, "right": {}}
    async with served(settings, limits, ()) as askers:
        words = Words(options.seed, 49_152)
        async with (
            Flood(askers["left"], words) as left,
            Flood(askers["right"], words) as right,
        ):
            await asyncio.sleep(_SETTLING)
            begin = time.perf_counter()
            await asyncio.sleep(options.fair_seconds)
        sums, counts = [], []
        for flood in (left, right):
            ended = [a for a in flood.answers if a.status == OK and a.arrivals[-1] >= begin]
            sums.append(sum(answer.held_seconds for answer in ended))
            counts.append(len(ended))
    index = jain(sums)
    print(
        f"requests answered {counts[0]} and {counts[1]}, blocks held "
        f"{sums[0]:.0f} and {sums[1]:.0f} block-seconds in {options.fair_seconds:g} s"
    )
    return [
        Bar(
            "Jain's index of block-seconds",
            index >= JAIN_LEAST,
            f"{index:.4f}",
            f"at least {JAIN_LEAST:g}",
        )
    ]
