"""The books between the engine's thread and whoever asks for them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from engine_harness import Harness, make_core
from scripted_model import PATIENCE, Gate
from tenants_harness import TenantsOfTest

from kvledger import _core
from kvledger.books import reader as reader_module
from kvledger.books.account_names import AccountNames
from kvledger.books.desk import BooksDesk
from kvledger.books.process_memory import LoadedMemory, MemoryParts, ProcessMemory
from kvledger.books.reader import BooksReader
from kvledger.books.snapshot import Account, Balance, Snapshot
from kvledger.errors import BooksUnavailable
from kvledger.memory import Resident, resident
from kvledger.tenants.registry import Registry

SECOND = 1_000_000_000


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    """An engine that sleeps for an hour when it is idle: whatever it overlooks is not done."""
    monkeypatch.setattr("kvledger.engine._IDLE_SECONDS", 3600.0)
    made = Harness()
    yield made
    made.close()


def snapshot(harness: Harness) -> Snapshot:
    return Snapshot(harness.engine.books.ask().result(PATIENCE))


def require_balanced(books: Snapshot, blocks: int) -> None:
    """Blocks and block-time add up, over states and over accounts."""
    assert books.blocks == blocks
    assert sum(balance.time for balance in books.states.values()) == blocks * books.elapsed
    accounts = list(books.accounts())
    for state in ("held", "reserved", "cached"):
        of_accounts = [getattr(account, state) for account in accounts]
        whole = books.states[state]
        assert sum(balance.blocks for balance in of_accounts) == whole.blocks
        assert sum(balance.time for balance in of_accounts) == whole.time


def test_an_idle_engine_wakes_and_tells(harness: Harness) -> None:
    """An operator would look at nothing while nobody generates."""
    harness.engine.start()
    first = snapshot(harness)
    require_balanced(first, 64)
    assert first.states["free"].blocks == 64
    assert snapshot(harness).elapsed > first.elapsed


def test_what_runs_is_in_the_books(harness: Harness) -> None:
    """The books would be those of another engine, or of another time."""
    gate = Gate()
    harness.model.before_step = lambda plan: gate.wait()
    harness.engine.start()
    harness.submit(1, "a" * 20, max_tokens=8, tenant=7)
    gate.wait_for_arrival(1)
    asked = harness.engine.books.ask()
    assert not asked.running(), "a step is under way"
    gate.let(1)
    books = Snapshot(asked.result(PATIENCE))
    require_balanced(books, 64)
    account = books.account(7)
    assert (account.held.blocks, account.open_requests) == (3, 1)
    assert account.held.time > 0
    assert books.empty_slots == 3 * 8 - 20
    assert books.waterline == (3 + account.reserved.blocks) / 64
    gate.open()
    receipt = harness.receipt(1)
    after = snapshot(harness).account(7)
    held = int(receipt["held_seconds"]) * SECOND + int(receipt["held_nanos"])
    assert (after.held.blocks, after.open_requests) == (0, 0)
    assert after.held.time == after.closed_held == held
    assert snapshot(harness).account(8) == Account(8), "nobody's is empty"


def test_all_who_wait_for_a_step_get_the_same(harness: Harness) -> None:
    """Each would cost the engine a look of its own."""
    gate = Gate()
    harness.model.before_step = lambda plan: gate.wait()
    harness.engine.start()
    harness.submit(1)
    gate.wait_for_arrival(1)
    asked = [harness.engine.books.ask() for _ in range(3)]
    asked[1].cancel()
    gate.open()
    assert asked[0].result(PATIENCE) is asked[2].result(PATIENCE)
    assert asked[1].cancelled()


def test_an_engine_that_died_says_so(harness: Harness) -> None:
    """Who asks would wait for ever, before its death and after."""
    gate = Gate()

    def step(plan: _core.Plan) -> None:
        gate.wait()
        raise SystemExit  # what ends its loop, not only a step

    harness.model.before_step = step
    harness.engine.start()
    harness.submit(1)
    gate.wait_for_arrival(1)
    before = harness.engine.books.ask()
    gate.open()
    for asked in (before, harness.engine.books.ask()):
        with pytest.raises(BooksUnavailable, match="its loop has ended"):
            asked.result(PATIENCE)


def test_an_engine_that_was_stopped_says_so(harness: Harness) -> None:
    """A server that stops would wait for who watches."""
    harness.engine.start()
    assert harness.engine.stop(PATIENCE)
    with pytest.raises(BooksUnavailable):
        harness.engine.books.ask().result(PATIENCE)


def test_books_that_cannot_be_read_end_nothing() -> None:
    """A machine that is short of memory would lose its engine to who looks at it."""

    class Keeper:
        def books(self, now: int) -> _core.Books:
            raise MemoryError

    desk = BooksDesk(threading.Condition())
    asked = desk.ask()
    desk.answer(Keeper())
    with pytest.raises(MemoryError):
        asked.result(0)
    assert desk.asked == []


def reading(desk: BooksDesk, silence: Callable[[], float] = lambda: 0.0) -> BooksReader:
    return BooksReader(desk.ask, silence, 0.05)


async def soon(condition: Callable[[], object]) -> None:
    ends = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < ends
        await asyncio.sleep(0.001)


async def test_callers_share_what_is_still_to_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant that asks again and again would keep the engine from everybody's steps."""
    monkeypatch.setattr(reader_module, "_INTERVAL", 0.3)
    desk, core = BooksDesk(threading.Condition()), make_core()
    reader = reading(desk)
    callers = [asyncio.create_task(reader.read()) for _ in range(20)]
    await soon(lambda: desk.asked)
    assert len(desk.asked) == 1
    callers[0].cancel()
    desk.answer(core)
    first = {await caller for caller in callers[1:]}
    assert len(first) == 1
    # The next one is not asked for at once, and then it is newer.
    began = time.monotonic()
    again = asyncio.create_task(reader.read())
    await soon(lambda: desk.asked)
    assert time.monotonic() - began > 0.2
    desk.answer(core)
    assert (await again).elapsed > first.pop().elapsed


async def test_who_comes_after_the_reading_gets_what_is_so_then() -> None:
    """Who has just ended a request would not find it in the account."""
    asked: list[Future[_core.Books]] = []

    def ask() -> Future[_core.Books]:
        asked.append(Future())
        return asked[-1]

    reader = BooksReader(ask, lambda: 0.0, PATIENCE)
    core = make_core()
    early = asyncio.create_task(reader.read())
    await soon(lambda: asked)
    asked[0].set_running_or_notify_cancel()  # the engine reads them just now
    late = asyncio.create_task(reader.read())
    await soon(lambda: len(asked) == 2)
    books = [core.books(time.monotonic_ns()) for _ in range(2)]
    for future, each in zip(asked, books, strict=True):
        future.set_result(each)
    assert (await early).elapsed < (await late).elapsed


async def test_a_slow_step_is_waited_for_and_a_hanging_one_is_not() -> None:
    """An engine with a large model would seem dead; a dead one would keep its callers."""
    silent = 0.0
    desk = BooksDesk(threading.Condition())
    reader = reading(desk, lambda: silent)
    caller = asyncio.create_task(reader.read())
    await asyncio.sleep(0.2)  # four times the patience, with a heart that beats
    assert not caller.done()
    silent = 0.06
    with pytest.raises(BooksUnavailable, match=r"no progress for 0\.1 s"):
        await caller
    # And it may come back.
    desk.answer(make_core())
    silent = 0.0
    again = asyncio.create_task(reader.read())
    await soon(lambda: desk.asked)
    desk.answer(make_core())
    assert (await again).blocks == 64


async def test_a_caller_after_a_failure_asks_anew() -> None:
    """One failure would be told to everybody for good."""
    desk = BooksDesk(threading.Condition())
    failing = reading(desk)
    caller = asyncio.create_task(failing.read())
    await soon(lambda: desk.asked)
    (asked,) = desk.asked
    desk.asked = []
    asked.set_exception(MemoryError())
    with pytest.raises(MemoryError):
        await caller
    again = asyncio.create_task(failing.read())
    await soon(lambda: desk.asked)
    desk.answer(make_core())
    assert (await again).states["free"] != Balance()


async def test_names_follow_the_tenants_file(tmp_path: Path) -> None:
    """Blocks of a tenant that was removed would be booked to nobody, or to its successor."""
    tenants = TenantsOfTest(tmp_path)
    tenants.add("acme")
    tenants.add("globex")
    registry = Registry(tenants.path)
    names = AccountNames(registry, lambda number: None, {99: "(server)"})
    first = names.number_of("acme")
    assert first is not None
    assert names.of_tenant(first) == "acme"
    assert names.is_served(first)
    tenants.remove("acme")
    await registry.refresh()
    assert names.of_tenant(first) == "acme"
    assert names.number_of("acme") == first
    assert not names.is_served(first)
    tenants.add("acme")
    await registry.refresh()
    second = names.number_of("acme")
    assert second is not None
    assert second != first
    assert (names.of_tenant(first), names.of_tenant(second)) == ("acme", "acme")
    assert names.number_of("nobody") is None
    assert (names.of_tenant(99), names.number_of("(server)")) == ("(server)", 99)


def test_every_byte_of_the_process_is_in_one_part() -> None:
    """Memory would be counted twice, or what grows would hide in another part."""
    now = Resident(own=1000, files=50)
    workspace = 30
    memory = ProcessMemory(
        LoadedMemory(before=100, after=800, tokenizer=20),
        weights=300,
        pool=250,
        workspace=lambda: workspace,
        constraints=15,
        look=lambda: now,
    )
    now = Resident(own=900, files=70)
    workspace = 40
    memory.serving()  # 100 more since it was loaded, 10 the workspace's, 15 the constraints'
    parts = memory.parts()
    assert parts == MemoryParts(
        weights=300,
        workspace=40,
        pool=250,
        host_arena=0,
        runtime=170,
        tokenizer=20,
        constraints=15,
        service=75,
        other=100,
    )
    assert parts.resident == 970
    now, workspace = Resident(own=950, files=75), 60
    grown = memory.parts()
    assert (grown.workspace, grown.runtime, grown.service) == (60, 175, 75)
    assert grown.other == 130
    assert grown.resident == 1025


@pytest.mark.parametrize("has_kinds", [True, False])
def test_resident_memory_is_read_as_the_system_writes_it(tmp_path: Path, has_kinds: bool) -> None:
    """All parts would be measured wrong."""
    (tmp_path / "proc/self").mkdir(parents=True)
    kinds = "RssAnon:\t    6000 kB\nRssFile:\t    3000 kB\nRssShmem:\t    1000 kB\n"
    text = f"Name:\tx\nVmHWM:\t   99999 kB\nVmRSS:\t   10000 kB\n{kinds if has_kinds else ''}"
    (tmp_path / "proc/self/status").write_text(text)
    files = 3000 * 1024 if has_kinds else 0
    assert resident(tmp_path) == Resident(10000 * 1024 - files, files)
    own: Any = resident()
    assert own.total > 10 << 20
