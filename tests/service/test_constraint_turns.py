"""Turns: one client's work makes nobody else's wait, and nothing is lost when somebody gives up."""

from __future__ import annotations

import asyncio
import random

import pytest

from kvledger.constraints.turns import Turns


class Stage:
    """Pieces of work that end when the test says so."""

    def __init__(self, places: int) -> None:
        self.turns = Turns(places)
        self.began: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def send(self, *names: str) -> None:
        """Work whose client is the first letter of its name; capitals are another tenant's."""
        for name in names:
            self.ends[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._work(name))
            await asyncio.sleep(0)

    async def _work(self, name: str) -> None:
        async with self.turns.turn(name[0].isupper(), name[0]):
            self.began.append(name)
            await self.ends[name].wait()

    async def end(self, name: str) -> None:
        self.ends[name].set()
        await self.tasks[name]
        await asyncio.sleep(0)


async def test_one_client_has_one_place() -> None:
    """Whoever sends most would have all places, and the others wait for all of it."""
    stage = Stage(2)
    await stage.send("a1", "a2", "a3", "b1")
    assert stage.began == ["a1", "b1"]
    assert (stage.turns.waiting(0, "a"), stage.turns.waiting(0, "b")) == (2, 0)
    await stage.end("b1")
    assert stage.began == ["a1", "b1"], "its own work waits for a's"
    await stage.end("a1")
    assert stage.began[2:] == ["a2"]


async def test_clients_take_turns() -> None:
    """Who came first with much would be served before who came later with little."""
    stage = Stage(1)
    await stage.send("a1", "a2", "a3", "b1", "c1", "b2")
    for name in ("a1", "a2", "b1", "c1", "a3", "b2"):
        assert stage.began[-1] == name
        await stage.end(name)
    assert stage.turns.waiting(0, "a") == 0


async def test_tenants_take_turns_before_their_clients() -> None:
    """A tenant with many addresses would have as many turns as it has addresses."""
    stage = Stage(1)
    await stage.send("a1", "b1", "c1", "d1", "A1", "A2")
    for name in ("a1", "b1", "A1", "c1", "A2", "d1"):
        assert stage.began[-1] == name
        await stage.end(name)


async def test_a_tenant_with_no_place_comes_first() -> None:
    """A tenant with two addresses would have both places again, and another go on waiting."""
    stage = Stage(2)
    await stage.send("a1", "b1", "c1", "A1")
    assert stage.began == ["a1", "b1"]
    await stage.end("a1")
    assert stage.began[2:] == ["A1"]


async def test_who_gives_up_does_not_cost_its_tenant_the_turn() -> None:
    """One client that hangs up would send its tenant's others to the end of the line."""
    stage = Stage(1)
    await stage.send("a1", "b1", "c1", "A1")
    stage.ends["a1"].set()
    stage.tasks["b1"].cancel()  # seen only after a1's place is given on
    await stage.end("a1")
    assert stage.began == ["a1", "c1"]


async def test_who_gives_up_leaves_nothing_behind() -> None:
    """A place would be kept for somebody who is gone, and after some time none be left."""
    stage = Stage(1)
    await stage.send("a1", "a2", "b1", "c1")
    stage.tasks["a2"].cancel()
    stage.tasks["b1"].cancel()
    await asyncio.sleep(0)
    await stage.end("a1")
    assert stage.began == ["a1", "c1"]
    stage.tasks["c1"].cancel()
    await asyncio.sleep(0)
    await stage.send("d1")
    assert stage.began[-1] == "d1"


async def test_work_that_fails_gives_its_place_back() -> None:
    """The same after an error."""
    turns = Turns(1)
    with pytest.raises(ValueError, match="injected"):
        async with turns.turn(0, "a"):
            raise ValueError("injected")
    async with turns.turn(0, "a"):
        pass


@pytest.mark.parametrize("seed", range(20))
async def test_places_are_neither_lost_nor_doubled(seed: int) -> None:
    """Cancellations in any moment, among them the one in which a place is given."""
    draw = random.Random(seed)
    places = draw.randint(1, 3)
    turns = Turns(places)
    inside: list[str] = []

    async def work(client: str) -> None:
        async with turns.turn(client in "cd", client):
            assert client not in inside
            inside.append(client)
            assert len(inside) <= places
            try:
                for _ in range(draw.randint(0, 3)):
                    await asyncio.sleep(0)
            finally:
                inside.remove(client)

    tasks = []
    for _ in range(200):
        tasks.append(asyncio.create_task(work(draw.choice("abcd"))))
        if draw.random() < 0.5:
            draw.choice(tasks).cancel()
        if draw.random() < 0.5:
            await asyncio.sleep(0)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(r) for r in results} <= {type(None), asyncio.CancelledError}
    assert not turns._inside
    assert not turns._waiting
