"""Statements from files: exact sums, machines that add up, and lines that cannot be read."""

from __future__ import annotations

import itertools
import json
import random
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from book_writer import BLOCKS, PRICES, SECOND, START, Writer, fresh_id, receipt

from kvledger.books import lines
from kvledger.books.file_statement import Account, Money, state
from kvledger.books.lines import AccountTime, PoolAccount, timestamp
from kvledger.cli.statement import run
from kvledger.errors import SettingRefused


def adds_up(account: Account) -> bool:
    """Whether the lines of an account are all of it."""
    values = dict(vars(account))
    return values.pop("all") == sum(values.values())


def test_sums_by_tenant_and_model_over_replicas(tmp_path: Path) -> None:
    """A tenant's bill would have another's requests, or not all of its own."""
    first, second = Writer(tmp_path / "one"), Writer(tmp_path / "two", model="n")
    first.ends(receipt(5 * SECOND, 11, preemptions=1), "a")
    first.ends(receipt(7, 13, reserved=2), "b")
    second.ends(receipt(1 << 100, 17), "a")
    first.ends(receipt(3, 19), "a")
    statement = state([tmp_path / "one", tmp_path / "two"])
    assert set(statement.groups) == {("a", "m"), ("b", "m"), ("a", "n")}
    sums = statement.groups["a", "m"]
    assert (sums.requests, sums.counts["held"], sums.counts["compute"]) == (2, 5 * SECOND + 3, 30)
    assert (sums.counts["output_tokens"], sums.counts["preemptions"]) == (6, 1)
    assert statement.groups["b", "m"].counts["reserved"] == 2
    assert statement.groups["a", "n"].counts["held"] == 1 << 100  # beyond any float
    assert statement.total.requests == 4
    assert statement.total.counts["held"] == (1 << 100) + 5 * SECOND + 10
    assert statement.notes.files == 2
    by_tenant = state([tmp_path / "one", tmp_path / "two"], by=("tenant",))
    assert {group: sums.requests for group, sums in by_tenant.groups.items()} == {
        ("a",): 3,
        ("b",): 1,
    }


def test_a_machine_adds_up_by_hand(tmp_path: Path) -> None:
    """Idle memory would be in somebody's bill, or in nobody's sight."""
    writer = Writer(tmp_path / "books")
    writer.ends(receipt(20 * SECOND, 2 * SECOND, reserved=SECOND))
    states = {"free": 50, "reserved": 2, "held": 30, "cached": 15, "releasing": 3}
    accounts = (
        AccountTime("a", False, 24 * SECOND, 2 * SECOND, 10 * SECOND),
        AccountTime("g", True, 6 * SECOND, 0, 5 * SECOND),
    )
    pool = PoolAccount(10 * SECOND, {k: v * SECOND for k, v in states.items()}, accounts)
    writer.pool(10 * SECOND, 4 * SECOND, SECOND // 2, pool)
    machines = state([tmp_path / "books"]).machines
    blocks = {name: value / SECOND for name, value in vars(machines.blocks).items()}
    assert blocks == {
        **{"all": 100, "receipts": 21, "scopes": 6, "cached": 15, "releasing": 3},
        **{"unclaimed": 0, "elsewhere": 26 - 21, "unknown": 0, "idle": 50},
    }
    time = {name: value / SECOND for name, value in vars(machines.time).items()}
    assert time == {
        **{"all": 10, "receipts": 2, "unclaimed": 0.5, "elsewhere": 1.5, "idle": 6},
        **{"scopes": 0, "cached": 0, "releasing": 0, "unknown": 0},
    }
    # A thousandth of a unit a second: a quarter of it for ten blocks, three for steps.
    cost = machines.cost["EUR"]
    assert (cost.memory.all, cost.memory.receipts) == (2_500_000, 525_000)
    assert (cost.memory.idle, cost.memory.scopes) == (1_250_000, 150_000)
    assert (cost.compute.all, cost.compute.receipts) == (7_500_000, 1_500_000)
    assert cost.compute.idle == 4_500_000
    assert machines.without_states == 0


def test_machines_add_up_whatever_happens(tmp_path: Path) -> None:
    """Costs of all lines together would be more or less than the machines cost."""
    drawn = random.Random(3)
    for number in range(20):
        folder = tmp_path / f"{number}"
        for _ in range(drawn.randrange(1, 4)):
            writer = Writer(folder)
            elapsed = steps = 0
            states = dict.fromkeys(("free", "reserved", "held", "cached", "releasing"), 0)
            scope = 0
            for _ in range(drawn.randrange(2, 6)):
                for _ in range(drawn.randrange(4)):
                    held, compute = drawn.randrange(10**9), drawn.randrange(10**8)
                    writer.ends(receipt(held, compute), at=elapsed / SECOND)
                more = drawn.randrange(1, 10**11)
                elapsed += more
                steps += drawn.randrange(more)
                cuts = sorted(drawn.randrange(BLOCKS * more + 1) for _ in range(4))
                parts = [b - a for a, b in itertools.pairwise([0, *cuts, BLOCKS * more])]
                for name, part in zip(states, parts, strict=True):
                    states[name] += part
                scope += drawn.randrange(parts[2] + 1)
                accounts = (AccountTime("g", True, scope, 0, 0),)
                writer.pool(elapsed, steps, steps // 7, PoolAccount(elapsed, states, accounts))
        for since in ("", timestamp(START + timedelta(seconds=drawn.randrange(100)))):
            machines = state([folder], since=since).machines
            assert adds_up(machines.blocks)
            assert adds_up(machines.time)
            for cost in machines.cost.values():
                assert adds_up(cost.memory)
                assert adds_up(cost.compute)


def test_costs_of_receipts_are_summed_as_they_stand(tmp_path: Path) -> None:
    """A statement would say something else than the receipts that clients have."""
    writer = Writer(tmp_path / "books")
    told = [writer.ends(receipt(held, held // 3)) for held in range(0, 10**8, 10**6 + 7)]
    statement = state([tmp_path / "books"])
    money = statement.total.cost["EUR"]
    assert money == Money(
        sum(line["memory_nanos"] for line in told), sum(line["compute_nanos"] for line in told)
    )
    assert money.memory == PRICES.memory_nanos(statement.total.counts["held"], BLOCKS) // 1


def test_units_are_never_added_to_one_another(tmp_path: Path) -> None:
    """Euros and credits would make one number that means nothing."""
    credits = PRICES.model_copy(update={"unit": "credits"})
    for prices in (PRICES, credits, None):
        writer = Writer(tmp_path / "books", prices=prices)
        writer.ends(receipt(SECOND, SECOND))
        writer.pool(SECOND, SECOND)
    statement = state([tmp_path / "books"])
    assert statement.total.requests == 3
    assert set(statement.total.cost) == set(statement.machines.cost) == {"EUR", "credits"}
    assert statement.machines.without_states == 3


def test_a_torn_line_is_counted_and_hurts_no_other(tmp_path: Path) -> None:
    """A crash would take the bill of a day with it."""
    writer = Writer(tmp_path / "books")
    writer.ends(receipt(1))
    whole = writer.path.read_bytes()
    line = lines.encoded(writer.ends(receipt(2)))
    for size in range(1, len(line)):
        writer.path.write_bytes(whole + line[:size])
        statement = state([tmp_path / "books"])
        assert (statement.notes.torn_lines, statement.total.requests) == (1, 1)
    assert statement.notes.damaged_lines == 0


@pytest.mark.parametrize(
    "damage",
    [
        b"\0" * 40,
        b"{",
        b"[]",
        b"1" * 5000,
        b'{"kind":"receipt"}',
        b'{"kind":7}',
        b'{"kind":"load","at":"x","since":1,"elapsed":2}',
        b'{"kind":"pool","at":"x","elapsed":1}',
        b"[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_a_line_that_says_nothing_is_counted(tmp_path: Path, damage: bytes) -> None:
    """A file system's accident in one line would keep all others from being read."""
    writer = Writer(tmp_path / "books")
    with writer.path.open("ab") as file:
        file.write(damage + b"\n")
    writer.ends(receipt(2))
    statement = state([tmp_path / "books"])
    assert (statement.notes.damaged_lines, statement.total.requests) == (1, 1)


def test_a_line_of_a_later_kind_is_passed_over(tmp_path: Path) -> None:
    """Each kind of line that a later version adds would look like damage."""
    writer = Writer(tmp_path / "books")
    writer.write({"kind": "weather", "at": timestamp(START)})
    writer.ends(receipt(2))
    notes = state([tmp_path / "books"]).notes
    assert (notes.unknown_lines, notes.damaged_lines) == (1, 0)


def test_files_of_the_first_format_are_read(tmp_path: Path) -> None:
    """Last year's bills could not be made any more."""
    writer = Writer(tmp_path / "books")
    facts = {**lines.replica_line(writer.replica), "format": 1}
    writer.path.write_bytes(lines.encoded(facts))
    writer.ends(receipt(2))
    assert state([tmp_path / "books"]).total.requests == 1


@pytest.mark.parametrize(
    "change",
    [
        {"held": -1},
        {"held": True},
        {"held": "1"},
        {"compute": 1.5},
        {"tenant": 7},
        {"id": "xyz"},
        {"memory_nanos": None},
    ],
)
def test_a_receipt_with_a_number_that_is_none_is_in_no_sum(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    """One bad number would make all sums wrong, or end the reading."""
    writer = Writer(tmp_path / "books")
    line = writer.ends(receipt(2))
    writer.write({**line, "id": fresh_id(), **change})
    statement = state([tmp_path / "books"])
    assert (statement.notes.damaged_lines, statement.total.requests) == (1, 1)
    assert statement.total.counts["held"] == 2


def test_a_receipt_that_stands_twice_counts_once(tmp_path: Path) -> None:
    """What a failing disk made the server write twice would be paid twice."""
    writer = Writer(tmp_path / "books")
    line = writer.ends(receipt(2))
    writer.write(line)
    second = Writer(tmp_path / "books")
    second.write(line)
    statement = state([tmp_path / "books", tmp_path / "books" / ".." / "books"])
    assert (statement.notes.duplicates, statement.total.requests) == (2, 1)
    assert statement.notes.files == 2  # and the same folder twice is one


def test_what_replicas_counted_and_no_file_has_is_said(tmp_path: Path) -> None:
    """A file that was deleted would make a bill smaller, and nobody would know."""
    writer = Writer(tmp_path / "books")
    for _ in range(5):
        writer.ends(receipt(2))
    writer.totals.receipts += 3
    writer.totals.lost = 1
    writer.pool(SECOND)
    notes = state([tmp_path / "books"]).notes
    assert (notes.missing, notes.lost) == (2, 1)
    assert state([tmp_path / "books"], since=timestamp(START)).notes.missing is None


def test_an_account_that_does_not_add_up_is_not_believed(tmp_path: Path) -> None:
    """What is missing in it would be called idle."""
    writer = Writer(tmp_path / "books")
    states = dict.fromkeys(("free", "reserved", "held", "cached", "releasing"), 2 * SECOND)
    writer.pool(SECOND, 0, 0, PoolAccount(SECOND, states))
    assert state([tmp_path / "books"]).machines.blocks.idle == 2 * SECOND
    writer.pool(2 * SECOND, 0, 0, PoolAccount(2 * SECOND, states))
    statement = state([tmp_path / "books"])
    assert statement.notes.damaged_lines == 1
    assert statement.machines.time.all == SECOND


def test_a_part_of_the_time(tmp_path: Path) -> None:
    """A month's bill would have the next month's requests, or its idle time."""
    writer = Writer(tmp_path / "books")
    free = lambda seconds: PoolAccount(  # noqa: E731
        seconds * SECOND,
        {"free": 8 * seconds * SECOND, "held": 2 * seconds * SECOND}
        | dict.fromkeys(("reserved", "cached", "releasing"), 0),
    )
    for second in range(1, 11):
        writer.ends(receipt(SECOND, 5), at=second - 0.5)
        writer.pool(second * SECOND, second * SECOND // 2, 0, free(second), last=second == 10)
    since, until = (timestamp(START + timedelta(seconds=at)) for at in (2.7, 6.7))
    statement = state([tmp_path / "books"], since=since, until=until)
    assert statement.total.requests == 4  # at 3.5, 4.5, 5.5 and 6.5
    machines = statement.machines
    assert machines.since == timestamp(START + timedelta(seconds=2))
    assert machines.until == timestamp(START + timedelta(seconds=6))
    assert machines.time.all == 4 * SECOND
    assert machines.blocks.idle == 4 * 8 * SECOND
    assert machines.blocks.elsewhere == 4 * SECOND  # held, and on receipts of another time
    assert adds_up(machines.blocks)
    parts = [state([tmp_path / "books"], since=a, until=b) for a, b in (("", since), (since, ""))]
    assert sum(part.total.requests for part in parts) == 10
    assert sum(part.machines.time.all for part in parts) == 10 * SECOND


def stated(seconds: int) -> PoolAccount:
    """So far seven blocks were cached, of two held one by a group, and one was free."""
    states = {"free": 1, "reserved": 0, "held": 2, "cached": 7, "releasing": 0}
    times = {name: blocks * seconds * SECOND for name, blocks in states.items()}
    group = AccountTime("g", True, seconds * SECOND, 0, 0)
    return PoolAccount(seconds * SECOND, times, (group,))


def test_an_engine_that_goes_takes_only_the_end_of_the_account_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A month of cached memory would be called idle because of its last seconds."""
    writer = Writer(tmp_path / "books")
    writer.pool(90 * SECOND, pool=stated(90), last=False)
    writer.pool(100 * SECOND)
    machines = state([tmp_path / "books"]).machines
    blocks = {name: value / SECOND for name, value in vars(machines.blocks).items() if value}
    assert blocks == {
        **{"all": 1000, "cached": 630, "scopes": 90, "elsewhere": 90, "idle": 90},
        "unknown": 100,
    }
    assert machines.without_states == 0
    assert machines.cost["EUR"].memory.unknown == 2_500_000
    assert machines.cost["EUR"].memory.idle == 2_250_000
    assert run([str(tmp_path / "books")]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "not stated" in line]
    assert row.split()[-2:] == ["100.000000000", "0.002500000"]


def test_what_was_not_stated_at_a_border_is_unknown_on_both_sides(tmp_path: Path) -> None:
    """Two months would come to more or less memory than both together."""
    writer = Writer(tmp_path / "books")
    for second in (10, 20, 30, 40, 50):
        pool = None if second in (30, 50) else stated(second)
        writer.pool(second * SECOND, pool=pool, last=second == 50)
    border = timestamp(START + timedelta(seconds=35))
    before = state([tmp_path / "books"], until=border).machines.blocks
    after = state([tmp_path / "books"], since=border).machines.blocks
    assert (before.all, before.cached, before.unknown) == (300 * SECOND, 140 * SECOND, 100 * SECOND)
    # What is known again after 40 s is no part of the ten seconds before it.
    assert (after.all, after.cached, after.unknown) == (200 * SECOND, 0, 200 * SECOND)
    writer.pool(60 * SECOND, pool=stated(60))
    after = state([tmp_path / "books"], since=border).machines.blocks
    assert (after.all, after.cached, after.unknown) == (300 * SECOND, 140 * SECOND, 100 * SECOND)
    for account in (before, after):
        assert adds_up(account)


def test_what_was_lost_before_the_time_is_not_lost_in_it(tmp_path: Path) -> None:
    """A month in which all was kept would seem to lack receipts."""
    writer = Writer(tmp_path / "books")
    writer.totals.receipts = writer.totals.lost = 50
    writer.pool(10 * SECOND, last=False)
    writer.totals.receipts = writer.totals.lost = 53
    writer.pool(20 * SECOND)
    for seconds, lost in ((0, 53), (15, 3), (25, 0)):
        since = timestamp(START + timedelta(seconds=seconds))
        assert state([tmp_path / "books"], since=since).notes.lost == lost


@pytest.mark.parametrize("change", [{"blocks": 0}, {"started_at": 5}, {"started_at": None}])
def test_a_replica_that_cannot_be_is_a_damaged_line(tmp_path: Path, change: dict[str, Any]) -> None:
    """One bad line would end the reading of all files."""
    writer = Writer(tmp_path / "books")
    writer.path.write_bytes(lines.encoded(lines.replica_line(writer.replica) | change))
    writer.pool(SECOND)
    Writer(tmp_path / "books").pool(2 * SECOND)
    statement = state([tmp_path / "books"])
    assert (statement.notes.damaged_lines, statement.machines.replicas) == (2, 1)


def test_states_that_are_null_are_none(tmp_path: Path) -> None:
    """One bad line would end the reading of all files."""
    writer = Writer(tmp_path / "books")
    pool = {"elapsed": SECOND, "steps": 0, "unclaimed": 0, "receipts": 0, "lost": 0}
    writer.write({"kind": "pool", "at": timestamp(START), **pool, "states": None})
    assert state([tmp_path / "books"]).machines.without_states == 1


def test_a_request_without_numbers_counts_as_one(tmp_path: Path) -> None:
    """Requests that an engine took with it would vanish."""
    writer = Writer(tmp_path / "books")
    writer.ends(None)
    writer.ends(receipt(1))
    total = state([tmp_path / "books"]).total
    assert (total.requests, total.without_numbers, total.counts["held"]) == (2, 1, 1)


def test_what_cannot_be_summed_is_refused_in_a_sentence(tmp_path: Path) -> None:
    """A wrong folder would look like a month without requests."""
    with pytest.raises(SettingRefused, match="there is no such folder"):
        state([tmp_path / "missing"])
    with pytest.raises(SettingRefused, match="no files of --books"):
        state([tmp_path])
    writer = Writer(tmp_path / "books")
    writer.write({**lines.replica_line(writer.replica), "format": 3})
    with pytest.raises(SettingRefused, match="format 3, this version reads 1 and 2;"):
        state([tmp_path / "books"])
    other = Writer(tmp_path / "other")
    facts = lines.replica_line(other.replica)
    other.path.write_bytes(lines.encoded({**facts, "prices": {"unit": "EUR"}}))
    with pytest.raises(SettingRefused, match=r"its prices .* cannot be read"):
        state([tmp_path / "other"])


def test_the_command_prints_a_page_and_exact_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The numbers that an operator sees would not be those of the files."""
    writer = Writer(tmp_path / "books")
    writer.ends(receipt(1_500_000_000, 250_000_000), "acme")
    writer.ends(receipt((1 << 60) + 1, 1), "zoo")
    writer.pool(2 * SECOND, SECOND)
    assert run([str(tmp_path / "books")]) == 0
    page = capsys.readouterr().out
    (row,) = [line.split() for line in page.splitlines() if line.startswith("acme")]
    assert row == ["acme", "m", *"15370", "1.500000000", "0.250000000", "0.000225000"]
    assert "1 replica(s)" in page
    assert "idle: no step ran" in page
    assert "torn" not in page
    assert run([str(tmp_path / "books"), "--json", "--by", "tenant"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [group["tenant"] for group in facts["groups"]] == ["acme", "zoo"]
    assert facts["groups"][1]["held"] == (1 << 60) + 1
    assert facts["groups"][0]["cost"] == {"EUR": {"memory": 37_500, "compute": 187_500}}
    assert facts["notes"]["torn_lines"] == 0
    with writer.path.open("ab") as file:
        file.write(b'{"kind":"rec')
    assert run([str(tmp_path / "books"), "--to", "2026-11-30"]) == 0
    page = capsys.readouterr().out
    assert "1 line(s) were torn" in page
    assert page.splitlines()[1].split() == ["total", *["0"] * 5, *["0.000000000"] * 2]
    assert run([str(tmp_path)]) == 2
    assert "no files of --books" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--from", "yesterday"], "'yesterday' is no time such as 2026-11-30"),
        (["--by", "tenants"], "'tenants' is none of tenant,model"),
        (["--by", "tenant,tenant"], "names one twice"),
    ],
)
def test_a_wrong_option_says_what_to_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    """A traceback would be all that an operator is told."""
    with pytest.raises(SystemExit) as raised:
        run([str(tmp_path), *arguments])
    assert raised.value.code == 2
    assert said in capsys.readouterr().err


def test_times_may_have_zones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A day's bill would begin at the wrong hour."""
    Writer(tmp_path / "books").ends(receipt(1), at=0)
    for since, requests in (
        ("2026-11-30T13:00:00+01:00", 1),
        ("2026-11-30T12:00:00Z", 1),
        ("2026-11-30T12:00:00", 1),
        ("2026-11-30T12:00:00-01:00", 0),
    ):
        assert run([str(tmp_path / "books"), "--json", "--from", since]) == 0
        assert json.loads(capsys.readouterr().out)["total"]["requests"] == requests
