"""Turns: tenants go round, one piece of work at a time, and whoever goes away is passed over."""

from __future__ import annotations

import asyncio
import random

import pytest

from kvledger.tenants.turns import Turns


class Work:
    """Pieces of work that end when the test says so, and the order in which they began."""

    def __init__(self) -> None:
        self.turns = Turns()
        self.began: list[str] = []
        self.at_once = 0
        self.most_at_once = 0
        self.ends: dict[str, asyncio.Event] = {}

    def start(self, tenant: int, name: str) -> asyncio.Task[None]:
        self.ends[name] = asyncio.Event()
        return asyncio.create_task(self._do(tenant, name))

    async def _do(self, tenant: int, name: str) -> None:
        async with self.turns.turn(tenant):
            self.began.append(name)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            try:
                await self.ends[name].wait()
            finally:
                self.at_once -= 1

    def end_all(self) -> None:
        for event in self.ends.values():
            event.set()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_tenants_go_round() -> None:
    """A tenant with a long line would be served to its end before anybody else."""
    work = Work()
    tasks = [work.start(1, f"1-{count}") for count in range(4)]
    await settle()
    tasks += [work.start(tenant, f"{tenant}-{count}") for tenant in (2, 3) for count in range(2)]
    await settle()
    assert work.began == ["1-0"]
    work.end_all()
    await asyncio.gather(*tasks)
    assert work.began == ["1-0", "1-1", "2-0", "3-0", "1-2", "2-1", "3-1", "1-3"]
    assert work.most_at_once == 1


@pytest.mark.parametrize("when", ["before the turn", "as the turn comes", "with the turn"])
async def test_who_goes_away_is_passed_over(when: str) -> None:
    """A client that hangs up would stop the line for everybody."""
    work = Work()
    first, gone, last = work.start(1, "first"), work.start(1, "gone"), work.start(2, "last")
    await settle()
    if when == "before the turn":
        gone.cancel()
        await settle()
        work.end_all()
    elif when == "as the turn comes":
        work.ends["first"].set()
        gone.cancel()
    else:
        work.ends["first"].set()
        await settle()
        assert work.began == ["first", "gone"]
        gone.cancel()
    work.ends["last"].set()
    await asyncio.wait_for(asyncio.gather(first, last), 10)
    assert gone.cancelled()
    assert work.began[-1] == "last"
    another = work.start(3, "another")
    work.end_all()
    await asyncio.wait_for(another, 10)


async def test_whatever_is_cancelled_the_line_goes_on() -> None:
    """One cancellation at a bad moment would end all encoding."""
    dice = random.Random(2)
    work = Work()
    tasks: list[asyncio.Task[None]] = []
    for count in range(3000):
        tasks.append(work.start(dice.randrange(4), str(count)))
        for _ in range(dice.randrange(3)):
            dice.choice(tasks[-10:]).cancel()
        for name in dice.sample(sorted(work.ends), min(3, len(work.ends))):
            work.ends[name].set()
        if work.began:
            work.ends[work.began[-1]].set()
        for _ in range(dice.randrange(3)):
            await asyncio.sleep(0)
    work.end_all()
    await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
    assert work.most_at_once == 1
    assert sum(not task.cancelled() for task in tasks) > 500
    assert sum(task.cancelled() for task in tasks) > 500
    another = work.start(9, "another")
    work.end_all()
    await asyncio.wait_for(another, 10)
