"""LedgerService in a whole server: what adds up, who may see it, and who may not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from engine_harness import without_forecast
from google.protobuf import duration_pb2
from http2_client import Http2Client
from reuse_harness import BLOCK, TenantsServer, operated_tenants, prompt, shared
from scripted_model import PATIENCE
from server_harness import Refusal, connection, refusal_of, serving, until
from tenants_harness import TenantsOfTest, bearer

from kvledger.books.reader import BooksReader
from kvledger.books.snapshot import Snapshot
from kvledger.cli import main
from kvledger.v1 import generation_pb2 as generation
from kvledger.v1 import ledger_pb2 as pb
from kvledger.v1 import ledger_pb2_grpc

STATES = ("free", "reserved", "held", "cached", "releasing")
SERVICE = "/kvledger.v1.LedgerService/"


def nanos(time: generation.BlockTime) -> int:
    return time.seconds * 10**9 + time.nanos


def require_balanced(ledger: pb.Ledger) -> None:
    """What a reader can check: blocks, block-time, and the same again over all accounts."""
    pool, elapsed = ledger.pool, ledger.elapsed.ToNanoseconds()
    balances = {state: getattr(pool, state) for state in STATES}
    assert sum(balance.blocks for balance in balances.values()) == pool.blocks
    assert sum(nanos(balance.time) for balance in balances.values()) == pool.blocks * elapsed
    for state in ("held", "reserved", "cached"):
        owners: list[Any] = [*ledger.tenants, *(ledger.scopes if state != "reserved" else ())]
        parts = [getattr(owner, state) for owner in owners]
        assert sum(part.blocks for part in parts) == balances[state].blocks, state
        assert sum(nanos(part.time) for part in parts) == nanos(balances[state].time), state
    taken = sum(balances[state].blocks for state in ("held", "reserved", "releasing"))
    assert pool.waterline == taken / pool.blocks
    (kv_format,) = ledger.formats
    assert pool.held_slots == pool.held.blocks * kv_format.slots_per_block
    assert pool.empty_slots <= pool.held_slots
    memory = ledger.memory
    parts_of_memory = [field.name for field in memory.DESCRIPTOR.fields if field.name != "resident"]
    assert sum(getattr(memory, name) for name in parts_of_memory) == memory.resident


class Books:
    """The two ways to ask a server of tenants."""

    def __init__(self, their: TenantsServer, operators: grpc.aio.Channel) -> None:
        self.their = their
        self.operators = stub_of(operators)
        self.clients = stub_of(their.server.channel)

    def shown(self, who: str) -> Any:
        return bearer(self.their.tenants.tokens[who])

    async def ledger(self, who: str = "ops") -> pb.Ledger:
        request = pb.GetLedgerRequest()
        answer = await self.operators.GetLedger(request, metadata=self.shown(who), timeout=PATIENCE)
        require_balanced(answer.ledger)
        ledger: pb.Ledger = answer.ledger
        return ledger

    async def own(self, who: str, name: str = "") -> pb.Statement:
        request = pb.GetStatementRequest(tenant=name)
        answer = await self.clients.GetStatement(
            request, metadata=self.shown(who), timeout=PATIENCE
        )
        statement: pb.Statement = answer.statement
        return statement

    async def any(self, who: str, name: str) -> pb.Statement:
        request = pb.GetStatementRequest(tenant=name)
        answer = await self.operators.GetStatement(
            request, metadata=self.shown(who), timeout=PATIENCE
        )
        statement: pb.Statement = answer.statement
        return statement


def stub_of(channel: grpc.aio.Channel) -> Any:
    return ledger_pb2_grpc.LedgerServiceStub(channel)  # type: ignore[no-untyped-call]


@pytest_asyncio.fixture
async def books(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Books]:
    without_forecast(monkeypatch)
    async with operated_tenants(tmp_path) as (their, channel):
        yield Books(their, channel)


async def leave_early(books: Books, who: str, ids: list[int]) -> None:
    """A client that goes in the middle of its answer."""
    request = generation.GenerateRequest()
    request.token_ids.ids.extend(ids)
    request.stop.max_tokens = 60
    request.stop.ignore_eos = True
    call = books.their.server.generation.Generate(request, metadata=books.shown(who))
    await call.read()
    await call.read()
    call.cancel()


async def test_the_books_add_up_while_everything_happens(books: Books) -> None:
    """An operator would be told of blocks that are not there, or miss some that are."""
    their, answers = books.their, []
    gate, over = their.server.gate(), asyncio.Event()

    async def look() -> list[pb.Ledger]:
        """Every few steps, however slowly this process runs: none is let through for nobody."""
        seen = []
        while not over.is_set():
            looking = asyncio.create_task(books.ledger())
            while not looking.done():
                gate.let(1)
                await asyncio.wait([looking], timeout=0.005)
            seen.append(await looking)
        gate.open()
        return seen

    async def ask(who: str, number: int) -> None:
        ids = [*prompt("t", 2 * BLOCK), *prompt(f"{who}{number}", 30)]
        fields: dict[str, Any] = {"max_tokens": 40, "samples": 1 + number % 2}
        if who != "initech" and number % 3 == 0:
            fields["cache"] = shared("team", 2 * BLOCK)
        answers.append((who, await their.ask(who, ids, **fields)))

    looking = asyncio.create_task(look())
    everybody = ("acme", "globex", "initech")
    asked = [ask(who, number) for number in range(6) for who in everybody]
    left = [leave_early(books, who, prompt(f"gone{who}", 40)) for who in everybody]
    await their.server.at_once(*asked, *left)
    over.set()
    seen = await looking
    await until(lambda: not their.server.server._admission.open_requests)
    # It was a load: blocks were held, reserved and cached, shared and taken away.
    assert max(ledger.pool.waterline for ledger in seen) > 0.5
    assert any(ledger.pool.cached.blocks for ledger in seen)
    assert any(ledger.pool.empty_slots for ledger in seen)
    assert any(scope.held.blocks for ledger in seen for scope in ledger.scopes)
    assert sum(answer.finished.receipt.preemptions for _, answer in answers) > 0
    last = await books.ledger()
    assert last.pool.held.blocks == last.pool.reserved.blocks == 0
    (scope,) = last.scopes
    assert (scope.kind, scope.name) == (pb.SCOPE_KIND_GROUP, "team")
    assert nanos(scope.held.time) > 0
    for who in everybody:
        statement = await books.own(who)
        (row,) = [tenant for tenant in last.tenants if tenant.name == who]
        assert row.is_served
        assert row.open_requests == statement.open_requests == 0
        assert row.held == statement.held
        # All of it stands in receipts: those of who stayed, and of the one who left.
        assert nanos(statement.closed_held) == nanos(statement.held.time) == nanos(row.closed_held)
        receipts = sum(nanos(a.finished.receipt.held) for name, a in answers if name == who)
        assert receipts < nanos(statement.held.time)


async def test_what_looking_costs_is_counted(books: Books) -> None:
    """Somebody who watches would make the books dearer, and nobody would see it."""
    clock = books.their.server.server._work_metrics.clock
    assert clock.seconds()["looks"] == 0
    await books.ledger()
    one = clock.seconds()["looks"]
    await books.own("acme")
    assert 0 < one < clock.seconds()["looks"]


async def test_a_tenants_statement_is_exactly_its_receipts(books: Books) -> None:
    """A bill could not be checked against what each request was told."""
    their, held = books.their, 0
    for number in range(3):
        answer = await their.ask("acme", prompt(f"p{number}", 20), max_tokens=6)
        held += nanos(answer.finished.receipt.held)
        statement = await books.own("acme")
        assert nanos(statement.closed_held) == held, "at once, not some time later"
    assert statement.tenant == "acme"
    assert statement.block_bytes == their.server.model.layout.block_bytes
    assert statement.cached.blocks > 0
    assert (await books.own("globex")).held.time == generation.BlockTime()
    assert nanos((await books.any("ops", "acme")).closed_held) == held


async def test_requests_that_run_and_wait_are_in_the_account(books: Books) -> None:
    """A tenant could not see what it is paying for at this moment."""
    their = books.their
    await their.changed(
        lambda: their.tenants.change(
            lambda values: values["tenants"]["acme"].update(
                limits={"running_max": 1, "kv_guaranteed": 0.25, "kv_max": 0.5}
            )
        )
    )
    gate = their.server.gate()
    asked = [asyncio.create_task(their.ask("acme", prompt(f"x{n}", 20))) for n in range(3)]
    await until(lambda: gate.arrived == 1)
    await until(lambda: len(their.server.server._admission.open_requests) == 3)
    reading = asyncio.create_task(books.ledger("eye"))
    await asyncio.sleep(0.1)
    gate.let(1)
    ledger = await reading
    (row,) = [tenant for tenant in ledger.tenants if tenant.name == "acme"]
    assert (row.open_requests, row.waiting_requests, row.queued_requests) == (1, 2, 0)
    assert row.held.blocks == 3
    assert (row.guaranteed_blocks, row.max_blocks) == (6, 12)
    assert nanos(row.closed_held) == 0 < nanos(row.held.time)
    others = [tenant for tenant in ledger.tenants if tenant.name != "acme"]
    assert not any(tenant.HasField("max_blocks") for tenant in others)
    gate.open()
    await asyncio.gather(*asked)


async def test_a_tenant_that_is_gone_keeps_its_account(books: Books) -> None:
    """Block-time of a tenant that was removed would be missing from the sum, or its successor's."""
    their = books.their
    answer = await their.ask("initech", prompt("i", 20))
    await their.changed(lambda: their.tenants.remove("initech"))
    await their.changed(lambda: their.tenants.add("initech"))
    ledger = await books.ledger()
    rows = [tenant for tenant in ledger.tenants if tenant.name == "initech"]
    assert [row.is_served for row in rows] == [False]
    assert rows[0].closed_held == answer.finished.receipt.held
    assert (await books.own("initech")).held.time == generation.BlockTime()
    # A group whose members have changed has another account.
    await their.ask("acme", prompt("g", 20), cache=shared("team", 2 * BLOCK))
    await their.changed(lambda: their.tenants.remove("globex"))
    await their.ask("acme", prompt("g", 20), cache=shared("team", 2 * BLOCK))
    scopes = (await books.ledger()).scopes
    assert [scope.name for scope in scopes] == ["team", "team"]
    assert scopes[0].number != scopes[1].number


def counted_reads(monkeypatch: pytest.MonkeyPatch) -> list[BooksReader]:
    """Grows each time that somebody reads the books."""
    reads: list[BooksReader] = []
    read = BooksReader.read

    async def counted(reader: BooksReader) -> Snapshot:
        reads.append(reader)
        return await read(reader)

    monkeypatch.setattr(BooksReader, "read", counted)
    return reads


async def end_of(watch: Any) -> Refusal:
    """How a stream ends that must not end well."""

    async def read_all() -> None:
        while await watch.read() is not grpc.aio.EOF:
            pass

    return await refusal_of(read_all())


def everything(refusal: Refusal) -> tuple[Any, ...]:
    """All that a caller is sent, byte for byte."""
    return (
        refusal.code,
        refusal.message,
        sorted(refusal.metadata.items()),
        refusal.status.SerializeToString(),
    )


async def test_anothers_account_is_refused_like_nobodys(
    books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenant could find out who else is served, and what they use."""
    their = books.their
    await their.ask("globex", prompt("g", 20))
    reads = counted_reads(monkeypatch)
    names = ("globex", "nobody", "ops", "dev", "(server)", "team", "ACME", "acme ", "x" * 5000)
    refusals = [everything(await refusal_of(books.own("acme", name))) for name in names]
    assert len(set(map(repr, refusals))) == 1
    code, message, *_ = refusals[0]
    assert code == grpc.StatusCode.NOT_FOUND
    assert "globex" not in message
    assert reads == [], "nothing is asked for whom nothing is shown: no time to measure"
    assert (await books.own("acme", "acme")).tenant == "acme"
    assert len(reads) == 1


async def test_each_role_sees_what_is_its_own(books: Books) -> None:
    """A client could read the whole server's books, or an operator nothing."""
    their = books.their
    assert (await books.any("eye", "acme")).tenant == "acme"
    assert (await books.any("ops", "(server)")).open_requests == 0
    await books.ledger("eye")
    unknown = await refusal_of(books.any("ops", "nobody"))
    assert (unknown.code, unknown.reason) == (grpc.StatusCode.NOT_FOUND, "TENANT_UNKNOWN")
    assert (await refusal_of(books.any("ops", ""))).violations == {
        "tenant": "is empty; name the tenant"
    }
    for refused in (books.any("acme", "acme"), books.ledger("acme"), books.own("ops", "acme")):
        refusal = await refusal_of(refused)
        assert (refusal.code, refusal.reason) == (
            grpc.StatusCode.PERMISSION_DENIED,
            "ROLE_MISSING",
        )
    watch = books.operators.WatchLedger(pb.WatchLedgerRequest(), metadata=books.shown("acme"))
    assert (await refusal_of(watch.read())).reason == "ROLE_MISSING"
    for name in ("GetLedger", "WatchLedger"):
        for who in ("acme", "ops"):
            call = their.server.channel.unary_unary(SERVICE + name)
            refusal = await refusal_of(call(b"", metadata=books.shown(who), timeout=PATIENCE))
            assert refusal.code == grpc.StatusCode.UNIMPLEMENTED
    for stub in (books.clients, books.operators):
        stranger = await refusal_of(stub.GetStatement(pb.GetStatementRequest(tenant="acme")))
        assert stranger.code == grpc.StatusCode.UNAUTHENTICATED


async def test_a_watcher_sees_time_go_by(books: Books) -> None:
    """An operator would look at a picture that stands still."""
    interval = duration_pb2.Duration(nanos=100_000_000)
    watch = books.operators.WatchLedger(
        pb.WatchLedgerRequest(interval=interval), metadata=books.shown("eye")
    )
    seen = [(await watch.read()).ledger for _ in range(4)]
    for ledger in seen:
        require_balanced(ledger)
    times = [ledger.elapsed.ToNanoseconds() for ledger in seen]
    steps = [later - earlier for earlier, later in pairwise(times)]
    assert min(steps) > 50_000_000
    await books.their.changed(lambda: books.their.tenants.revoke("eye"))
    assert (await end_of(watch)).code == grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    ("seconds", "fraction"), [(0, 0), (0, 99_999_999), (-1, 0), (3600, 1), (315576000000, 0)]
)
async def test_an_interval_has_bounds(seconds: int, fraction: int, tmp_path: Path) -> None:
    """A watcher could make the engine write its books all the time."""
    path = f"unix:{tmp_path / 'o.sock'}"
    async with (
        serving("--operators-listen", path) as server,
        connection(str(server.server.operators_address)) as channel,
    ):
        interval = duration_pb2.Duration(seconds=seconds, nanos=fraction)
        watch = stub_of(channel).WatchLedger(pb.WatchLedgerRequest(interval=interval))
        refusal = await refusal_of(watch.read())
        assert set(refusal.violations) == {"interval"}
        assert "allowed are 0.1 s to 3600 s" in refusal.violations["interval"]


async def test_a_watcher_that_reads_nothing_has_nothing_made_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Books of hours ago would pile up in the server, and be read one by one."""
    reads = counted_reads(monkeypatch)
    async with serving(operators="127.0.0.1:0") as server:
        watch = pb.WatchLedgerRequest(interval=duration_pb2.Duration(nanos=100_000_000))
        address = str(server.server.operators_address)
        client = await Http2Client.call(address, watch, SERVICE + "WatchLedger")
        await until(lambda: reads)
        await asyncio.sleep(1.0)
        waited = len(reads)
        assert waited <= 3, "one in gRPC's hands, one behind it, and not ten"
        began = asyncio.get_running_loop().time()
        await client.open_window(1 << 20)
        messages: list[pb.Ledger] = []
        while len(messages) < waited + 2:
            assert await client.read_some()
            messages = messages_in(client.data)
        times = [ledger.elapsed.ToNanoseconds() / 1e9 for ledger in messages]
        assert times[waited] - times[waited - 1] > 0.8, "what lies between was never made"
        assert asyncio.get_running_loop().time() - began < PATIENCE
        await client.close()


def messages_in(data: bytes) -> list[pb.Ledger]:
    """The whole messages of a stream's bytes."""
    found = []
    while len(data) >= 5 and len(data) >= 5 + int.from_bytes(data[1:5], "big"):
        size = int.from_bytes(data[1:5], "big")
        found.append(pb.WatchLedgerResponse.FromString(data[5 : 5 + size]).ledger)
        data = data[5 + size :]
    return found


async def test_a_hanging_engine_is_told_and_a_watch_ends_with_the_server(tmp_path: Path) -> None:
    """An operator who looks for what is wrong would wait; a server that stops would wait for him.

    The engine hangs in its step; then it goes on, and the server stops."""
    path = f"unix:{tmp_path / 'o.sock'}"
    options = ("--operators-listen", path, "--heartbeat-timeout", "1")
    async with serving(*options) as server, connection(path) as channel:
        stub = stub_of(channel)
        watch = stub.WatchLedger(pb.WatchLedgerRequest())
        assert (await watch.read()).ledger.pool.blocks == 64
        gate = server.gate()
        answer = asyncio.create_task(server.answer(text="a"))
        await until(lambda: gate.arrived)
        refusal = await refusal_of(stub.GetLedger(pb.GetLedgerRequest(), timeout=PATIENCE))
        assert (refusal.code, refusal.reason) == (
            grpc.StatusCode.UNAVAILABLE,
            "BOOKS_UNAVAILABLE",
        )
        assert refusal.retry_seconds > 0
        own = server.channel.unary_unary(SERVICE + "GetStatement")
        assert (await refusal_of(own(b"", timeout=PATIENCE))).reason == "BOOKS_UNAVAILABLE"
        assert (await end_of(watch)).reason == "BOOKS_UNAVAILABLE"
        gate.open()
        await answer
        require_balanced((await stub.GetLedger(pb.GetLedgerRequest(), timeout=PATIENCE)).ledger)
        watch = stub.WatchLedger(pb.WatchLedgerRequest())
        await watch.read()
        server.server.request_stop()
        assert (await end_of(watch)).reason == "DRAINING"


async def test_an_engine_that_died_is_told(tmp_path: Path) -> None:
    """Who looks at a server that breaks would wait until the process is gone."""
    path = f"unix:{tmp_path / 'o.sock'}"
    async with serving("--operators-listen", path) as server, connection(path) as channel:
        stub = stub_of(channel)
        gate = server.gate()

        def die(plan: Any) -> None:
            gate.wait()
            raise SystemExit

        server.scripted.before_step = die
        watching = asyncio.create_task(server.refusal(text="a"))
        await until(lambda: gate.arrived)
        asked = asyncio.create_task(
            refusal_of(stub.GetLedger(pb.GetLedgerRequest(), timeout=PATIENCE))
        )
        await asyncio.sleep(0.1)
        gate.open()
        refusal = await asked
        assert refusal.reason == "BOOKS_UNAVAILABLE"
        assert "its loop has ended" in refusal.message
        await watching


async def test_the_command_shows_all_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first thing an operator types would show nothing, or another server."""
    tenants = TenantsOfTest(tmp_path)
    tenants.add("acme")
    tenants.add("ops", roles=("operator",))
    options = (*tenants.options(tmp_path), "--operators-listen", f"unix:{tmp_path / 'o.sock'}")
    async with serving(*options) as server:
        await server.answer(text="a" * 20, metadata=bearer(tenants.tokens["acme"]))

        async def shown(who: str, *arguments: str) -> tuple[int, str, str]:
            monkeypatch.setenv("KVLEDGER_TOKEN", tenants.tokens[who])
            status = await asyncio.to_thread(main, ["ledger", *arguments])
            captured = capsys.readouterr()
            return status, captured.out, captured.err

        operators = ("--server", f"unix:{tmp_path / 'o.sock'}")
        status, out, err = await shown("ops", *operators)
        assert (status, err) == (0, "")
        assert out.startswith("KV pool: 64 blocks of ")
        for word in ("releasing", "waterline 0.0%", "acme", "resident", "host arena"):
            assert word in out
        status, out, _ = await shown("ops", *operators, "--json")
        ledger = json.loads(out)
        assert ledger["pool"]["blocks"] == 64
        assert [row["name"] for row in ledger["tenants"]] == ["acme"]
        assert int(ledger["pool"]["held"]["time"]["nanos"]) > 0
        status, out, _ = await shown("ops", *operators, "--tenant", "acme")
        assert out.startswith("tenant acme: 0 open requests")
        status, own, _ = await shown("acme", "--server", server.address, "--tenant", "")
        assert own.startswith("tenant acme: 0 open requests")
        status, out, err = await shown("acme", "--server", server.address)
        assert (status, out) == (1, "")
        assert "does not show the books; ask where operators are listened to" in err
        status, out, err = await shown("acme", "--server", server.address, "--tenant", "ops")
        assert status == 1
        assert err.startswith("kvledger ledger: NOT_FOUND: tenant: none of this name")
        with pytest.raises(SystemExit):
            await shown("ops", "--interval", "0.01")
