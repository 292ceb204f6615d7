"""A server's books: one line for each request however it ends, costs that add up, labels."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from scripted_model import PATIENCE
from server_harness import ServerHarness, refusal_of, request, running, serving
from stepping import settings
from tenants_harness import TenantsOfTest, bearer
from tiny_model import write_gguf
from tiny_server import TinyServer

from kvledger.books import lines
from kvledger.books.file_statement import Account, state
from kvledger.books.lines import AccountTime, PoolAccount, StepTime
from kvledger.books.pool_account import pool_account
from kvledger.books.prices import read_prices
from kvledger.books.recorder import Recorder
from kvledger.books.snapshot import STATES, Snapshot
from kvledger.errors import SettingRefused
from kvledger.metrics import Metrics
from kvledger.rpc.translation import told_wait
from kvledger.scopes.keys import Owner, ScopeKind
from kvledger.server import BROKE
from kvledger.v1 import generation_pb2 as pb

_PRICES = 'unit = "EUR"\nper_device_hour = 7.13\nmemory_share = 0.37\ncompute_share = 0.63\n'
_NANOS = 10**9


@pytest.fixture
def prices(tmp_path: Path) -> Path:
    path = tmp_path / "prices.toml"
    path.write_text(_PRICES)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "books"


def lines_in(folder: Path, kind: str = "receipt") -> list[dict[str, Any]]:
    """The lines of one kind, in the order of their files."""
    parsed = [
        json.loads(line)
        for path in sorted(folder.iterdir())
        for line in path.read_bytes().splitlines()
    ]
    return [line for line in parsed if line["kind"] == kind]


def block_time(time: pb.BlockTime) -> int:
    return time.seconds * _NANOS + time.nanos


async def test_a_line_says_what_the_client_was_told(folder: Path, prices: Path) -> None:
    """The books and the receipt in a client's hand would be two opinions."""
    async with serving("--books", str(folder), "--prices", str(prices)) as server:
        finished = (await server.answer(text="ab", samples=2)).finished
    (line,), receipt = lines_in(folder), finished.receipt
    assert line == {
        "kind": "receipt",
        "id": receipt.request_id,
        "ended_at": line["ended_at"],
        "tenant": "dev",
        "samples": 2,
        "end": "length",
        "prompt_tokens": finished.usage.prompt_tokens,
        "output_tokens": finished.usage.completion_tokens,
        "computed_tokens": receipt.computed_tokens,
        "recomputed_tokens": 0,
        "shared_tokens": receipt.shared_tokens,
        "reused_own_tokens": 0,
        "reused_group_tokens": 0,
        "reused_public_tokens": 0,
        "uncached_tokens": receipt.uncached_tokens,
        "peak_blocks": receipt.peak_blocks,
        "held": block_time(receipt.held),
        "reserved": block_time(receipt.reserved),
        "shared_scope": 0,
        "sharing_saved": 0,
        "preemptions": 0,
        "queue": line["queue"],
        "preempted": 0,
        "prefill": receipt.prefill_time.ToNanoseconds(),
        "decode": receipt.decode_time.ToNanoseconds(),
        "stall": 0,
        "delayed": 0,
        "compute": receipt.compute_time.ToNanoseconds(),
        "memory_nanos": receipt.cost.memory_nanos,
        "compute_nanos": receipt.cost.compute_nanos,
    }
    # The file has it exactly, the client to a factor of two.
    assert receipt.queue_time.ToNanoseconds() == told_wait(line["queue"]) >= line["queue"] > 0
    assert receipt.cost.unit == "EUR"
    # Two samples of four tokens behind two: 2 + 3 + 4 + 5 each.
    assert receipt.uncached_tokens == 2 * 14
    assert 0 < line["compute"] <= line["prefill"] + line["decode"]


async def _ends_of_all_kinds(server: ServerHarness) -> None:
    """Requests that end in every way there is."""
    await server.answer(text="a")  # LENGTH
    await server.answer(text="x!", ignore_eos=False)  # STOP
    await server.answer(text="a", stop=("d",), max_tokens=None)  # STOP by a text
    await server.answer(text="a", max_tokens=None, ignore_eos=True)  # CONTEXT
    gate = server.gate()
    endless = request(text="a", max_tokens=None)
    # More than run at once: some wait.
    calls = [server.generation.Generate(endless, timeout=PATIENCE) for _ in range(4)]
    await server.until(lambda: gate.arrived)
    await server.until(lambda: len(server.server._admission.open_requests) == 4)
    for call in calls:
        call.cancel()  # CANCELLED, running and waiting
    server.scripted.before_step = lambda plan: None
    gate.open()
    await server.until(lambda: not server.server._admission.open_requests)
    refusal = await refusal_of(server.answer(text="a", seconds_to_wait=0.0, max_tokens=3))
    assert refusal.code is grpc.StatusCode.RESOURCE_EXHAUSTED

    def broken(plan: Any) -> None:
        raise RuntimeError

    server.scripted.before_step = broken
    refusal = await server.refusal(text="a")  # FAILED
    assert refusal.receipt.compute_time.ToNanoseconds() > 0
    server.scripted.before_step = lambda plan: None


async def test_every_request_that_entered_has_one_line(folder: Path, prices: Path) -> None:
    """Who ends a request in some rare way would use the machine for nothing."""
    entered: list[str] = []
    async with serving(
        *("--books", str(folder), "--prices", str(prices)), sequences_max=2
    ) as server:
        enter = server.server._admission.enter

        def counted(*arguments: Any, **options: Any) -> Any:
            ticket = enter(*arguments, **options)
            entered.append(ticket.request_id)
            return ticket

        server.server._admission.enter = counted  # type: ignore[method-assign]
        await _ends_of_all_kinds(server)
        with contextlib.suppress(grpc.RpcError):
            await server.answer(text="a" * 10_000)  # never fits: it does not enter
    found = [line["id"] for line in lines_in(folder)]
    assert sorted(found) == sorted(entered)
    ends = {line["end"] for line in lines_in(folder)}
    assert ends == {"length", "stop", "context", "cancelled", "failed"}
    _require_whole(folder, prices)


def _require_whole(folder: Path, prices: Path) -> None:
    """After a clean stop all adds up: receipts, the replica's own sums, and what it cost."""
    statement = state([folder])
    assert vars(statement.notes) == {
        **{"files": 1, "torn_lines": 0, "damaged_lines": 0, "unknown_lines": 0},
        **{"duplicates": 0, "missing": 0, "lost": 0},
    }
    last = lines_in(folder, "pool")[-1]
    (replica,) = lines_in(folder, "replica")
    told = lines_in(folder)
    assert last["last"]
    for name in ("held", "reserved", "compute", "memory_nanos", "compute_nanos"):
        assert last[name] == sum(line.get(name, 0) for line in told), name
    # All steps are on receipts: nobody ended while one ran.
    assert (last["unclaimed"], last["compute"]) == (0, last["steps"])
    machines = statement.machines
    assert machines.time.all == last["elapsed"]
    assert machines.time.receipts == last["steps"]
    assert machines.time.elsewhere == 0
    # Nobody holds anything any more, so all that was held is on a receipt.
    assert (machines.without_states, machines.blocks.elsewhere) == (0, 0)
    assert machines.blocks.all == replica["blocks"] * last["elapsed"]
    cost, price = machines.cost["EUR"], read_prices(prices)
    assert cost.memory.all == price.memory_nanos(machines.blocks.all, replica["blocks"]) // 1
    assert cost.compute.all == price.compute_nanos(machines.time.all) // 1
    for account in (machines.blocks, machines.time, cost.memory, cost.compute):
        values = dict(vars(account))
        assert values.pop("all") == sum(values.values())
        assert account.idle >= 0
    assert cost.memory.receipts == last["memory_nanos"]
    used = last["held"] + last["reserved"]
    assert last["memory_nanos"] == price.memory_nanos(used, replica["blocks"]) // 1
    assert last["compute_nanos"] == price.compute_nanos(last["compute"]) // 1
    assert cost.compute.receipts == last["compute_nanos"]


async def test_costs_add_up_to_what_the_machine_costs(folder: Path, prices: Path) -> None:
    """Tenants together would pay more or less than the machine took."""
    options = ("--books", str(folder), "--prices", str(prices))
    harness = ServerHarness(*options, blocks=12, sequences_max=6, forecast=False)
    harness.model = replace(harness.model, blocks=12)
    async with running(harness) as server:

        async def one(number: int) -> None:
            text = "abcd" * (1 + number % 9)
            with contextlib.suppress(grpc.RpcError, asyncio.TimeoutError):
                await asyncio.wait_for(
                    server.answer(text=text, max_tokens=5 + 3 * number, samples=1 + number % 3),
                    0.05 if number % 4 == 3 else PATIENCE,
                )

        patient = [one(number) for number in range(24) if number % 4 != 3]
        hurried = [one(number) for number in range(24) if number % 4 == 3]
        load = asyncio.ensure_future(server.at_once(*patient))
        await server.until(lambda: len(server.server._admission.open_requests) == len(patient))
        await asyncio.gather(load, *hurried)
        await server.require_all_free()
    assert len(lines_in(folder)) > 12
    assert sum(line["preemptions"] for line in lines_in(folder)) > 0
    assert sum(line["reserved"] for line in lines_in(folder)) > 0
    _require_whole(folder, prices)


async def test_statements_of_two_replicas_are_their_sums(folder: Path, prices: Path) -> None:
    """A tenant that is served by several machines would get the bill of one."""
    told: list[pb.Receipt] = []
    for count in (3, 5):
        async with serving("--books", str(folder), "--prices", str(prices)) as server:
            answers = [await server.answer(text="a") for _ in range(count)]
        told += [answer.finished.receipt for answer in answers]
    assert len(lines_in(folder, "replica")) == 2
    statement = state([folder])
    (sums,) = statement.groups.values()
    assert sums.requests == 8
    assert sums.counts["held"] == sum(block_time(receipt.held) for receipt in told)
    assert sums.cost["EUR"].compute == sum(receipt.cost.compute_nanos for receipt in told)
    assert statement.machines.replicas == 2


async def test_lines_name_the_tenant(tmp_path: Path, folder: Path) -> None:
    """Nobody could be billed, or the wrong one would be."""
    tenants = TenantsOfTest(tmp_path)
    for name in ("acme", "zoo"):
        tenants.add(name)
    async with serving(*tenants.options(tmp_path), "--books", str(folder)) as server:
        for name in ("zoo", "acme", "zoo"):
            await server.answer(text="a", metadata=bearer(tenants.tokens[name]))
    assert [line["tenant"] for line in lines_in(folder)] == ["zoo", "acme", "zoo"]
    assert "memory_nanos" not in lines_in(folder)[0]  # without prices


async def test_nothing_that_was_said_stands_in_the_files(folder: Path) -> None:
    """The books would be a copy of what people write."""
    async with serving("--books", str(folder)) as server:
        answer = await server.answer(text="secretword", max_tokens=6)
        assert answer.text
    (line,) = lines_in(folder)
    assert "secretword" not in str(line)
    assert answer.text not in str(line)


async def test_the_clients_own_id_stands_in_the_receipt(folder: Path) -> None:
    """Nobody could tell which of their own requests a line of the bill is."""
    async with serving("--books", str(folder)) as server:
        metadata = (("x-request-id", "Order-7:a_b.c"),)
        finished = (await server.answer(text="a", metadata=metadata)).finished
        assert finished.receipt.client_request_id == "Order-7:a_b.c"
        assert (await server.answer(text="a")).finished.receipt.client_request_id == ""
    first, second = lines_in(folder)
    assert first["client_request_id"] == "Order-7:a_b.c"
    assert first["id"] == finished.receipt.request_id
    assert "client_request_id" not in second
    assert "Order-7" not in str(server.log.lines)  # logs have no strings of clients


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([""], "x-request-id: 0 characters, allowed are 1 to 128 of letters"),
        (["a b"], "x-request-id: 3 characters, allowed are 1 to 128 of letters"),
        (['a"b'], "x-request-id: 3 characters"),
        (["a" * 129], "x-request-id: 129 characters"),
        (["a", "b"], "x-request-id: given 2 times, allowed is once"),
    ],
)
async def test_an_id_that_receipts_do_not_repeat_is_refused(values: list[str], said: str) -> None:
    """It would be missing when the bill is checked; or what is no id would stand in files."""
    async with serving() as server:
        metadata = tuple(("x-request-id", value) for value in values)
        refusal = await server.refusal(text="a", metadata=metadata)
        assert refusal.code is grpc.StatusCode.INVALID_ARGUMENT
        assert refusal.message.startswith(said)
        assert list(refusal.violations) == ["x-request-id"]
        await server.answer(text="a", metadata=(("x-request-id", "a" * 128),))


async def test_a_full_disk_stops_no_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service would be gone because a log volume is full."""
    async with serving("--books", str(folder), "--metrics-listen", "127.0.0.1:0") as server:
        files = server.server._books._files
        assert files is not None

        def full(descriptor: int, data: bytes) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(files, "_write_to", full)
        for _ in range(5):
            await server.answer(text="a")
        await server.until(lambda: files.failure_count > 0)
        assert files.waiting_count == 5
        value = server.server._metrics.registry.get_sample_value
        assert value("kvledger_books_receipts_waiting") == 5
        assert value("kvledger_books_receipts_lost_total") == 0
        assert value("kvledger_books_write_failures_total") >= 1
        monkeypatch.undo()
        await server.until(lambda: files.waiting_count == 0)
        assert value("kvledger_books_receipts_written_total") == 5
    assert len(lines_in(folder)) == 5


@pytest.mark.parametrize("returns", [False, True])
async def test_requests_that_a_hanging_engine_keeps_have_a_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, returns: bool
) -> None:
    """They would be missing in every count, and no file would say so."""
    monkeypatch.setattr("kvledger.server._LAST_WORDS", 0.2)
    monkeypatch.setattr("kvledger.books.recorder._SNAPSHOT_SECONDS", 0.2)
    faults: list[Any] = []
    async with serving("--books", str(folder), sequences_max=2) as server:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        await server.answer(text="a")
        gate, books = server.gate(), server.server._books
        calls = [asyncio.create_task(server.refusal(text="a", max_tokens=50)) for _ in range(4)]
        await server.until(lambda: gate.arrived == 1)
        await server.until(lambda: len(server.server._admission.open_requests) == 4)
        gate.let(1)
        await server.until(lambda: gate.arrived == 2)  # by now the engine knows of all
        close = books.close

        async def late_close() -> None:
            if returns:  # the step that hung ends after all, when everybody has been told
                gate.open()
                await asyncio.to_thread(server.server._engine._thread.join, PATIENCE)
            await close()

        monkeypatch.setattr(books, "close", late_close)
        server.server.request_stop()
        server.server.request_stop()
        assert {(await call).code for call in calls} == {grpc.StatusCode.UNAVAILABLE}
        assert await asyncio.wait_for(asyncio.shield(server.exit), PATIENCE) == BROKE
    assert faults == []
    assert [line["end"] for line in lines_in(folder)] == ["length"] + ["lost"] * 4
    last = lines_in(folder, "pool")[-1]
    assert (last["receipts"], last["lost"], last["last"]) == (5, 0, True)
    statement = state([folder])
    assert (statement.total.requests, statement.total.without_numbers) == (5, 4)
    assert statement.notes.missing == 0


async def test_requests_that_an_engine_took_with_it_have_a_line(folder: Path) -> None:
    """They would be missing in every count."""
    async with serving("--books", str(folder)) as server:
        server.core.plan = lambda *arguments: 1 / 0  # type: ignore[method-assign,assignment]
        with contextlib.suppress(grpc.RpcError):
            await server.answer(text="a")
        await asyncio.wait_for(asyncio.shield(server.exit), PATIENCE)
    (line,) = lines_in(folder)
    assert line["end"] in ("lost", "failed")
    assert state([folder]).total.requests == 1


def recorder(*arguments: str, **changes: Any) -> Recorder:
    options: dict[str, Any] = {
        "model": "m",
        "kv_format": "bf16",
        "blocks": 10,
        "block_bytes": 4096,
        "steps": lambda: pytest.fail("nobody asks without --books"),
        "metrics": Metrics(),
    }
    return Recorder(settings(*arguments), **{**options, **changes})


async def test_states_of_blocks_are_stated_where_they_are_known(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cached memory, and what groups hold, would all be called idle."""
    states = {"free": 60, "reserved": 2, "held": 20, "cached": 15, "releasing": 3}
    pool = PoolAccount(
        10, states, [AccountTime("g", True, 7, 0, 5), AccountTime("a", False, 9, 2, 1)]
    )
    began = PoolAccount(
        2, dict.fromkeys(states, 4), [AccountTime("a", False, 4, 2, 1)]
    )  # of whoever tried the core
    answers: list[Any] = [began, pool, ValueError(), asyncio.sleep(60), None]

    async def snapshot() -> PoolAccount | None:
        answer = answers.pop(0)
        if isinstance(answer, ValueError):
            raise answer
        return await answer if asyncio.iscoroutine(answer) else answer

    monkeypatch.setattr("kvledger.books.recorder._SNAPSHOT_SECONDS", 0.05)
    books = recorder("--books", str(folder), steps=StepTime, snapshot=snapshot)
    await books.start()
    found: list[dict[str, Any]] = []
    for count in range(1, 5):
        await books.state_pool(await books.look())
        for _ in range(1000):
            found = lines_in(folder, "pool")
            if len(found) == count:
                break
            await asyncio.sleep(0.005)
    await books.close()
    first, *others = found
    assert first["elapsed"] == 8
    assert first["states"] == {name: time - 4 for name, time in states.items()}
    assert first["accounts"] == [
        {"scope": "g", "held": 7, "reserved": 0, "cached": 5},
        {"tenant": "a", "held": 5, "reserved": 0, "cached": 0},
    ]
    # An engine that is dead, hangs, or cannot say: the rest is told all the same.
    assert len(others) == 3
    assert all("states" not in line and line["elapsed"] > 10 for line in others)


async def test_a_disk_that_was_full_gets_the_states_of_an_engine_that_died_meanwhile(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was cached until then would be known no more."""
    states = {"free": 60, "reserved": 2, "held": 20, "cached": 15, "releasing": 3}
    answers = [PoolAccount(0, dict.fromkeys(states, 0)), PoolAccount(10, states), None, None]

    async def snapshot() -> PoolAccount | None:
        return answers.pop(0)

    books = recorder("--books", str(folder), steps=StepTime, snapshot=snapshot)
    await books.start()
    files = books._files
    assert files is not None
    monkeypatch.setattr(files, "_append", lambda data: (_ for _ in ()).throw(OSError("full")))
    for _ in range(3):
        await books.state_pool(await books.look())
    monkeypatch.undo()
    await books.close()
    stated, unstated = lines_in(folder, "pool")
    assert stated["states"] == states
    assert "states" not in unstated
    assert state([folder]).machines.blocks.cached == 15


async def test_many_accounts_keep_no_stream_waiting(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every stream would stand still for a while, every few seconds."""
    threads = list[threading.Thread]()

    def account(*arguments: Any) -> PoolAccount:
        threads.append(threading.current_thread())
        return pool_account(*arguments)

    monkeypatch.setattr("kvledger.server.pool_account", account)
    encoded = lines.encoded

    def noted(line: Any) -> bytes:
        if line["kind"] == "pool":
            threads.append(threading.current_thread())
        return encoded(line)

    monkeypatch.setattr(lines, "encoded", noted)
    async with serving("--books", str(folder)) as server:
        await server.answer(text="a")
    assert len(threads) >= 3
    assert threading.current_thread() not in threads


class _Names:
    """Two tenants of one name, and a group."""

    def of_tenant(self, number: int) -> str:
        return {1: "acme", 2: "acme"}.get(number, f"t{number}")

    def of_scope(self, number: int) -> Owner | None:
        return Owner(ScopeKind.GROUP, "g", 1) if number == 1 << 31 else None


class _Books:
    """What a core would say of some accounts, each with so many block-nanoseconds."""

    elapsed, empty_slots = 7, 0
    states = np.array([(1, 0, n) for n in range(5)], dtype="i8,u8,u4")

    def __init__(self, accounts: dict[int, tuple[int, int, int]]) -> None:
        names = ("held", "reserved", "cached", "closed")
        fields = [("account", "u4"), ("open_requests", "i8")]
        fields += [(name, "i8") for name in names[:3]]
        fields += [(f"{name}_{unit}", "u8") for unit in ("seconds", "nanos") for name in names]
        rows = [(number, 0, 0, 0, 0, 0, 0, 0, 0, *times, 0) for number, times in accounts.items()]
        self.accounts = np.array(rows, dtype=fields)


def _account_of(accounts: dict[int, tuple[int, int, int]]) -> PoolAccount:
    return pool_account(Snapshot(_Books(accounts)), _Names())  # type: ignore[arg-type]


def test_accounts_of_one_name_are_one() -> None:
    """A tenant that came again would have two lines, one of which is not read."""
    scope = 1 << 31
    account = _account_of({1: (3, 2, 1), 2: (4, 0, 0), 7: (0, 0, 0), scope: (5, 0, 6)})
    assert account.states == dict(zip(STATES, range(5), strict=True))
    assert account.accounts == [
        AccountTime("acme", False, 7, 2, 1),
        AccountTime("g", True, 5, 0, 6),
    ]
    assert _account_of({scope + 1: (1, 0, 0)}).accounts == [AccountTime("(unknown)", True, 1, 0, 0)]


def test_a_line_has_no_more_accounts_than_it_can_bear() -> None:
    """A server of ten thousand tenants would write a megabyte every few seconds."""
    account = _account_of({number: (number, 1, 0) for number in range(10, 5010)})
    assert len(account.accounts) == 1000
    assert sum(each.held for each in account.accounts) == sum(range(10, 5010))
    assert sum(each.reserved for each in account.accounts) == 5000
    assert account.accounts[-1].name == "(others)"
    assert min(each.held for each in account.accounts[:-1]) == 5009 - 998


async def test_what_is_cached_is_stated_apart(folder: Path, tmp_path: Path) -> None:
    """Cached blocks would be called free, or be in somebody's bill."""
    harness = TinyServer(write_gguf(tmp_path / "tiny.gguf"), "--books", str(folder))
    async with running(harness) as server:
        for _ in range(2):
            await server.answer(text="a long beginning " * 8)
    account = lines_in(folder, "pool")[-1]
    assert account["states"]["cached"] > 0
    assert sum(account["states"].values()) == account["blocks"] * account["elapsed"]
    (own,) = [each for each in account["accounts"] if each.get("tenant") == "dev"]
    assert own["held"] == account["held"]
    assert state([folder]).machines.blocks.cached == account["states"]["cached"]


async def test_without_a_folder_nothing_is_written(tmp_path: Path) -> None:
    """Who did not ask for files would find some."""
    books = recorder()
    await books.start()
    await books.watch()
    await books.state_pool(await books.look())
    await books.close()
    assert os.listdir(tmp_path) == []


def test_settings_that_cannot_be_used_are_told_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server would load for minutes, and then not start."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    for arguments, said in (
        (("--prices", "missing.toml"), "--prices missing.toml: No such file"),
        (("--books", "open"), "chmod 0700 open"),
    ):
        with pytest.raises(SettingRefused, match=said):
            settings(*arguments).require_books()
    with pytest.raises(SettingRefused, match="--books-file-bytes"):
        settings("--books-file-bytes", "1KiB")
    assert settings("--books-file-bytes", "1MiB").books_file_bytes == 1 << 20


def test_an_account_has_a_line_for_everything() -> None:
    """A statement would show lines that do not add up to what it calls all."""
    account = Account(all=7, receipts=1, idle=6)
    account.add(Account(all=3, elsewhere=3))
    assert vars(account)["all"] == 10
    assert (account.receipts, account.elsewhere, account.idle) == (1, 3, 6)
