"""The run about conservation, for a moment; and that each of its comparisons finds what differs."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from typing import Any

import pytest
from conservation import KILL, STOP, conserved
from conserved_books import (
    Files,
    compare,
    last_line_faults,
    ledger_faults,
    nanos,
    order_faults,
    pool_line_faults,
    quiet_faults,
    statement_faults,
    told_numbers,
)
from conserved_traffic import Call, Manner, draw

from kvledger.v1 import generation_pb2
from kvledger.v1 import ledger_pb2 as pb

_SECOND = 1_000_000_000


async def test_the_books_of_a_killed_server_add_up() -> None:
    """An operator would bill what nobody used, or lose what callers have in their hands."""
    result = await conserved(seconds=7.0, kills=1, seed=1, workers=24)
    assert result.wrong == []
    assert result.missing() == []
    assert result.ends == {KILL: 1, STOP: 1}
    assert result.compared > 100
    assert result.pool_lines >= 3


def told(label: str = "0.1", held: int = 5 * _SECOND + 3) -> Call:
    """A caller who has its receipt."""
    receipt = generation_pb2.Receipt(request_id=f"{label}aa", client_request_id=label)
    receipt.held.seconds, receipt.held.nanos = divmod(held, _SECOND)
    receipt.reserved.nanos = 7
    receipt.shared_scope.nanos = 9
    receipt.sharing_saved.nanos = 11
    receipt.compute_time.FromNanoseconds(13)
    for number, name in enumerate(("queue", "prefill", "decode", "stall", "preempted")):
        rounded = name in ("queue", "preempted")
        time_told = 100_000_000 << number if rounded else 20 + number
        getattr(receipt, f"{name}_time").FromNanoseconds(time_told)
    receipt.computed_tokens, receipt.peak_blocks, receipt.preemptions = 30, 31, 32
    receipt.reused_own_tokens, receipt.uncached_tokens = 33, 34
    receipt.cost.memory_nanos, receipt.cost.compute_nanos = 40, 41
    call = Call(label, "acme", 1, Manner.READS, receipt.request_id, receipt, "OK")
    call.was_told, call.ended = True, time.monotonic()
    return call


def line_of(call: Call) -> dict[str, Any]:
    """What the files have of it."""
    assert call.receipt is not None
    return {**told_numbers(call.receipt), "tenant": call.tenant, "samples": 1, "end": "length"}


def test_equal_receipts_are_equal() -> None:
    """Every run would end with faults that are none, and nobody would look any more."""
    call = told()
    found = compare([call], Files([line_of(call)]), None)
    assert (found.wrong, found.compared, found.lost) == ([], 1, 0)


@pytest.mark.parametrize("name", sorted(line_of(told())))
def test_every_number_is_compared(name: str) -> None:
    """A caller and an operator would have different bills for one request."""
    call = told()
    line = line_of(call)
    line[name] = line[name] + 1 if isinstance(line[name], int) else "other"
    found = compare([call], Files([line]), None)
    # How a request ended is not on a receipt.
    assert bool(found.wrong) == (name != "end")


def test_waits_are_told_to_a_factor_of_two() -> None:
    """Everything that a tenant is told of waits would count as equal, or nothing would."""
    call = told()
    line = line_of(call)
    assert (line["queue"], line["preempted"]) == (100_000_000, 1_600_000_000)
    for name, least in (("queue", 1), ("preempted", 800_000_001)):
        assert compare([call], Files([{**line, name: least}]), None).wrong == []
        assert compare([call], Files([{**line, name: least - 1}]), None).wrong
        assert compare([call], Files([{**line, name: line[name] + 1}]), None).wrong


def test_a_receipt_that_is_missing_or_stands_twice_is_found() -> None:
    """The promise of the files would be worth nothing."""
    call = told()
    line = line_of(call)
    assert compare([call], Files([]), None).wrong
    assert compare([call], Files([]), call.ended + 1.1).wrong
    late = compare([call], Files([]), call.ended + 0.9)
    assert (late.wrong, late.lost) == ([], 1)
    assert compare([call], Files([line, line]), None).wrong
    assert compare([call], Files([line, {**line, "id": "another"}]), None).wrong
    assert compare([], Files([line]), None).wrong


def test_who_was_not_told_has_a_line_all_the_same() -> None:
    """Callers that leave would use the machine for nothing."""
    call = told()
    line = line_of(call)
    call.receipt, call.code, call.was_told = None, "CANCELLED", False
    found = compare([call], Files([line]), None)
    assert (found.wrong, found.untold) == ([], 1)
    assert compare([call], Files([]), None).wrong
    assert compare([call], Files([]), call.ended + 1.0).wrong == [], "it may not have been noticed"
    assert compare([call], Files([]), call.ended + 9.0).wrong
    call.was_told = True
    assert compare([call], Files([line]), None).wrong, "it was accepted, and told no receipt"
    call.request_id = ""
    assert compare([call], Files([]), None).wrong == [], "it was refused"
    assert compare([call], Files([line]), None).wrong, "and was billed all the same"


def quiet_ledger() -> pb.Ledger:
    """A pool of 4 blocks after 10 s: one tenant, one scope, all quiet."""
    ledger = pb.Ledger()
    ledger.elapsed.FromNanoseconds(10 * _SECOND)
    pool = ledger.pool
    pool.blocks, pool.free.blocks, pool.cached.blocks, pool.held.blocks = 4, 2, 1, 1
    _put(pool.held, 8 * _SECOND + 3)
    _put(pool.reserved, 7)
    _put(pool.cached, 4 * _SECOND)
    _put(pool.releasing, 5)
    _put(pool.free, 28 * _SECOND - 15)
    tenant = ledger.tenants.add(name="acme", number=1)
    _put(tenant.held, 5 * _SECOND + 3)
    _put(tenant.reserved, 7)
    _put(tenant.cached, 3 * _SECOND)
    tenant.cached.blocks = 1
    tenant.closed_held.CopyFrom(tenant.held.time)
    scope = ledger.scopes.add(name="terms", number=9)
    scope.held.blocks = 1
    _put(scope.held, 3 * _SECOND)
    _put(scope.cached, _SECOND)
    return ledger


def _put(balance: pb.Balance, time: int) -> None:
    balance.time.seconds, balance.time.nanos = divmod(time, _SECOND)


def balances(ledger: pb.Ledger) -> Iterator[pb.Balance]:
    """All that stand in it."""
    pool, (tenant,), (scope,) = ledger.pool, ledger.tenants, ledger.scopes
    yield from (pool.free, pool.reserved, pool.held, pool.cached, pool.releasing)
    yield from (tenant.held, tenant.reserved, tenant.cached, scope.held, scope.cached)


def test_a_nanosecond_that_is_lost_is_found() -> None:
    """The one thing that a ledger is for."""
    assert ledger_faults(quiet_ledger()) == []
    for place in range(len(list(balances(quiet_ledger())))):
        for change in ("blocks", "nanos"):
            ledger = quiet_ledger()
            balance = list(balances(ledger))[place]
            if change == "blocks":
                balance.blocks += 1
            else:
                balance.time.nanos += 1
            assert ledger_faults(ledger), (place, change)
    ledger = quiet_ledger()
    ledger.tenants[0].closed_held.nanos += 1
    assert ledger_faults(ledger)


def test_time_that_runs_back_is_found() -> None:
    """A statement of a month would have less than one of its days."""
    earlier = quiet_ledger()
    assert order_faults(earlier, earlier) == []
    for place in range(len(list(balances(earlier)))):
        later = quiet_ledger()
        balance = list(balances(later))[place]
        _put(balance, nanos(balance.time) - 1)
        assert order_faults(earlier, later), place
    later = quiet_ledger()
    del later.tenants[:]
    assert order_faults(earlier, later)


def test_a_statement_of_another_moment_is_found() -> None:
    """A tenant would be told something else than its operator."""
    ledger = quiet_ledger()
    row = ledger.tenants[0]
    statement = pb.Statement(tenant="acme", elapsed=ledger.elapsed, held=row.held)
    statement.reserved.CopyFrom(row.reserved)
    statement.cached.CopyFrom(row.cached)
    statement.closed_held.CopyFrom(row.closed_held)
    assert statement_faults(ledger, statement, ledger, 4) == []
    for change in (-1, 1):
        for name in ("held", "reserved", "cached"):
            wrong = copy.deepcopy(statement)
            balance = getattr(wrong, name)
            _put(balance, nanos(balance.time) + change)
            assert statement_faults(ledger, wrong, ledger, 4), (name, change)
        wrong = copy.deepcopy(statement)
        wrong.closed_held.nanos += change
        assert statement_faults(ledger, wrong, ledger, 4)


def test_what_receipts_do_not_have_is_found_when_all_is_quiet() -> None:
    """Block-time that nobody pays for would be hidden in the sum."""
    line = line_of(told())
    assert list(quiet_faults(quiet_ledger(), Files([line]))) == []
    for name in ("held", "reserved"):
        assert list(quiet_faults(quiet_ledger(), Files([{**line, name: line[name] - 1}])))
    ledger = quiet_ledger()
    ledger.tenants[0].closed_held.nanos -= 1
    assert list(quiet_faults(ledger, Files([line])))
    assert list(quiet_faults(quiet_ledger(), Files([])))


def last_line() -> dict[str, Any]:
    """The pool's, of the same."""
    ledger = quiet_ledger()
    names = ("free", "reserved", "held", "cached", "releasing")
    times = [getattr(ledger.pool, name).time for name in names]
    return {
        **{"kind": "pool", "blocks": 4, "elapsed": 10 * _SECOND, "steps": 13, "unclaimed": 0},
        **{"receipts": 1, "lost": 0, "held": 5 * _SECOND + 3, "reserved": 7, "compute": 13},
        **{"memory_nanos": 40, "compute_nanos": 41, "last": True},
        "states": {
            name: time.seconds * _SECOND + time.nanos
            for name, time in zip(names, times, strict=True)
        },
        "accounts": [
            {"tenant": "acme", "held": 5 * _SECOND + 3, "reserved": 7, "cached": 3 * _SECOND},
            {"scope": "terms", "held": 3 * _SECOND, "reserved": 0, "cached": _SECOND},
        ],
    }


def test_a_pool_line_that_does_not_add_up_is_found() -> None:
    """The machine's own account in the files would be of nothing."""
    line = line_of(told())
    good = Files([line], [last_line()])
    assert [*pool_line_faults(good), *last_line_faults(good)] == []
    for name in ("elapsed", "receipts", "held", "reserved", "compute", "compute_nanos", "steps"):
        pool = last_line()
        pool[name] += 1
        found = Files([line], [pool])
        assert [*pool_line_faults(found), *last_line_faults(found)], name
    for name in last_line()["states"]:
        pool = last_line()
        pool["states"][name] += 1
        assert list(pool_line_faults(Files([line], [pool]))), name
    for place in (0, 1):
        pool = last_line()
        pool["accounts"][place]["held"] += 1
        assert list(pool_line_faults(Files([line], [pool])))


def test_a_seed_draws_the_same_traffic_again() -> None:
    """A failure of a long run could not be looked at again."""
    drawn = [draw(7, number) for number in range(500)]
    assert drawn == [draw(7, number) for number in range(500)]
    assert {one.manner for one in drawn} == set(Manner)
