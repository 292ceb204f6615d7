"""What must be equal in the books of a server: as it shows them, as its files have them, and as its
callers were told. Whole numbers, and no tolerance.

Each function returns sentences that say what differs; none if nothing does.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from conserved_traffic import Call

from kvledger.v1 import generation_pb2 as pb
from kvledger.v1 import ledger_pb2

STATES = ("free", "reserved", "held", "cached", "releasing")
# Whose receipts no file has: they are from before the files were begun.
SELF_TEST = "(self-test)"
# Whom public prefixes are computed for.
SERVER = "(server)"
# What a killed server may have lost, in seconds before its end.
LOST_SECONDS = 1.0
# A request whose caller left ends when the server notices, in seconds.
NOTICED_SECONDS = 3.0


def nanos(time: pb.BlockTime) -> int:
    """Block-nanoseconds."""
    return time.seconds * 1_000_000_000 + time.nanos


def differing(what: str, wanted: object, found: object) -> list[str]:
    """A sentence if two things are not the same."""
    return [] if wanted == found else [f"{what}: {found}, and not {wanted}"]


def ledger_faults(ledger: ledger_pb2.Ledger) -> list[str]:
    """Of one moment: accounts add up to the pool, and the pool to blocks x elapsed."""
    pool = ledger.pool
    elapsed = ledger.elapsed.ToNanoseconds()
    wrong = []
    states = {name: getattr(pool, name) for name in STATES}
    blocks = sum(state.blocks for state in states.values())
    wrong += differing("blocks of all states", pool.blocks, blocks)
    times = sum(nanos(state.time) for state in states.values())
    wrong += differing("block-time of all states", pool.blocks * elapsed, times)
    for name in ("held", "reserved", "cached"):
        rows: list[Any] = [*ledger.tenants]
        rows += [] if name == "reserved" else ledger.scopes
        balances = [getattr(row, name) for row in rows]
        wrong += differing(
            f"{name} blocks of all accounts", states[name].blocks, sum(b.blocks for b in balances)
        )
        wrong += differing(
            f"{name} block-time of all accounts",
            nanos(states[name].time),
            sum(nanos(balance.time) for balance in balances),
        )
    accounts = nanos(pool.free.time) + nanos(pool.releasing.time)
    for tenant in ledger.tenants:
        accounts += sum(nanos(getattr(tenant, name).time) for name in STATES[1:4])
        if nanos(tenant.closed_held) > nanos(tenant.held.time):
            wrong.append(f"receipts of {tenant.name} have more than it held")
    accounts += sum(nanos(scope.held.time) + nanos(scope.cached.time) for scope in ledger.scopes)
    wrong += differing("block-time of all accounts", pool.blocks * elapsed, accounts)
    return wrong


def _times(ledger: ledger_pb2.Ledger) -> dict[str, int]:
    """Everything that only grows."""
    times = {"elapsed": ledger.elapsed.ToNanoseconds()}
    times |= {name: nanos(getattr(ledger.pool, name).time) for name in STATES}
    for tenant in ledger.tenants:
        key = f"tenant {tenant.number}"
        times |= {f"{key} {name}": nanos(getattr(tenant, name).time) for name in STATES[1:4]}
        times[f"{key} closed"] = nanos(tenant.closed_held)
    for scope in ledger.scopes:
        times |= {f"scope {scope.number} {n}": nanos(getattr(scope, n).time) for n in STATES[2:4]}
    return times


def order_faults(earlier: ledger_pb2.Ledger, later: ledger_pb2.Ledger) -> list[str]:
    """Of two moments: no integral runs back, and no account is gone."""
    before, after = _times(earlier), _times(later)
    return [
        f"{name}: {time}, and later {after.get(name)}"
        for name, time in before.items()
        if after.get(name, -1) < time
    ]


def statement_faults(
    earlier: ledger_pb2.Ledger,
    statement: ledger_pb2.Statement,
    later: ledger_pb2.Ledger,
    blocks: int,
) -> list[str]:
    """Of a tenant's statement that was asked for between two looks at the whole."""
    wrong = []
    name = statement.tenant
    first, last = (
        next((row for row in ledger.tenants if row.name == name), ledger_pb2.TenantAccount())
        for ledger in (earlier, later)
    )
    spans = [
        high.elapsed.ToNanoseconds() - low.elapsed.ToNanoseconds()
        for low, high in ((earlier, statement), (statement, later))
    ]
    for what in ("held", "reserved", "cached"):
        times = [nanos(getattr(row, what).time) for row in (first, statement, last)]
        for span, (low, high) in zip(spans, pairwise(times), strict=True):
            if not 0 <= high - low <= blocks * span:
                wrong.append(f"{what} of {name}: from {low} to {high} in {span} ns")
    closed = [nanos(row.closed_held) for row in (first, statement, last)]
    if closed != sorted(closed):
        wrong.append(f"closed_held of {name}: {closed}")
    return wrong


@dataclass
class Files:
    """What the files of one process say."""

    receipts: list[dict[str, Any]] = field(default_factory=list)
    pools: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    torn: int = 0

    def by_tenant(self, name: str) -> Counter[str]:
        """Sums of a number over receipts, by tenant."""
        sums: Counter[str] = Counter()
        for line in self.receipts:
            sums[line["tenant"]] += line[name]
        return sums


def read_files(folder: Path, replica: str) -> Files:
    """All lines of a process, in order. What is not a line is an error, but for the last."""
    found = Files()
    for path in sorted(folder.glob(f"books-*-{replica}-*.jsonl")):
        *lines, rest = path.read_bytes().split(b"\n")
        found.torn += bool(rest)
        for data in lines:
            line = json.loads(data)
            if line["kind"] == "receipt":
                found.receipts.append(line)
            elif line["kind"] == "pool":
                found.pools.append(line)
            elif line["kind"] == "replica":
                found.facts = line
    return found


def told_numbers(receipt: pb.Receipt) -> dict[str, object]:
    """What a receipt that a caller has says, by the names of the files."""
    block_times = {
        "held": receipt.held,
        "reserved": receipt.reserved,
        "shared_scope": receipt.shared_scope,
        "sharing_saved": receipt.sharing_saved,
    }
    durations = {
        "queue": receipt.queue_time,
        "preempted": receipt.preempted_time,
        "prefill": receipt.prefill_time,
        "decode": receipt.decode_time,
        "stall": receipt.stall_time,
        "compute": receipt.compute_time,
    }
    counts = (
        *("computed_tokens", "recomputed_tokens", "shared_tokens", "reused_own_tokens"),
        *("reused_group_tokens", "reused_public_tokens", "uncached_tokens", "peak_blocks"),
        *("preemptions", "client_request_id"),
    )
    return {
        "id": receipt.request_id,
        **{name: nanos(time) for name, time in block_times.items()},
        **{name: duration.ToNanoseconds() for name, duration in durations.items()},
        **{name: getattr(receipt, name) for name in counts},
        "memory_nanos": receipt.cost.memory_nanos,
        "compute_nanos": receipt.cost.compute_nanos,
    }


# Of these tenants are told powers of two times 100 ms, rounded up: exactly, they would tell how
# busy others are.
_ROUNDED = ("queue", "preempted")


def _as_told(name: str, number: Any) -> Any:
    """A number of the files as a caller is told it."""
    if name not in _ROUNDED or not number:
        return number
    told = 100_000_000
    while told < number:
        told *= 2
    return told


@dataclass
class Told:
    """How the callers of one process and its files compare."""

    wrong: list[str] = field(default_factory=list)
    compared: int = 0  # receipts that are equal, number by number
    untold: int = 0  # lines of requests whose callers were gone
    lost: int = 0  # told in the last second before a kill, and not in the files


def compare(calls: Sequence[Call], files: Files, killed: float | None) -> Told:
    """Every caller's receipt with its line. `killed` is when, of time.monotonic()."""
    told = Told()
    lines = {line["id"]: line for line in files.receipts}
    if len(lines) < len(files.receipts):
        told.wrong.append(f"{len(files.receipts) - len(lines)} lines stand twice")
    of_labels: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in files.receipts:
        if line["tenant"] != SERVER:
            of_labels[line.get("client_request_id", "")].append(line)
    for call in calls:
        told.wrong += _call_faults(call, of_labels.pop(call.label, []), killed, told)
    told.wrong += [f"a line of nobody's request: {label!r}" for label in of_labels]
    return told


def _call_faults(
    call: Call, lines: list[dict[str, Any]], killed: float | None, told: Told
) -> Iterator[str]:
    who = f"request {call.label} of {call.tenant} ({call.manner.value}, {call.code})"
    if len(lines) > 1:
        yield f"{who} has {len(lines)} lines"
    if call.code == "OK" and call.receipt is None:
        yield f"{who} has no receipt"
    if call.request_id and call.was_told and call.receipt is None:
        yield f"{who} was accepted, and told its end without a receipt"
    for line in lines:
        wanted = {"tenant": call.tenant, "samples": call.samples}
        if call.request_id:
            wanted["id"] = call.request_id
        if call.receipt is not None:
            wanted |= told_numbers(call.receipt)
            told.compared += 1
        else:
            told.untold += 1
        for name, value in wanted.items():
            yield from differing(f"{who}: {name}", value, _as_told(name, line.get(name)))
        if call.was_told and call.receipt is None:
            yield f"{who} was refused, and has a line"
    if lines:
        return
    if call.receipt is not None:
        if killed is None or call.ended < killed - LOST_SECONDS:
            yield f"{who}: its receipt is not in the files"
        else:
            told.lost += 1
    elif call.request_id and (killed is None or call.ended < killed - NOTICED_SECONDS):
        yield f"{who} was accepted, and has no line"


def pool_line_faults(files: Files) -> Iterator[str]:
    """Each line of the pool: its states, its accounts, and its sums over receipts so far."""
    sums: Counter[str] = Counter()
    place = 0
    for line in files.pools:
        at = f"the pool's line after {line['elapsed']} ns"
        while place < line["receipts"] and place < len(files.receipts):
            for name in ("held", "reserved", "compute", "memory_nanos", "compute_nanos"):
                sums[name] += files.receipts[place][name]
            place += 1
        yield from differing(f"{at}: receipts before it", line["receipts"], place)
        for name, value in sums.items():
            yield from differing(f"{at}: {name} of receipts", value, line[name])
        states = line["states"]
        whole = line["blocks"] * line["elapsed"]
        yield from differing(f"{at}: all states", whole, sum(states.values()))
        for name in ("held", "reserved", "cached"):
            accounts = sum(account[name] for account in line["accounts"])
            yield from differing(f"{at}: {name} of all accounts", states[name], accounts)


def last_line_faults(files: Files) -> Iterator[str]:
    """After a clean stop the last line of the pool has nothing but what receipts have."""
    last = files.pools[-1]
    yield from differing("the last line says so", True, last["last"])
    yield from differing("receipts that the server counted", last["receipts"], len(files.receipts))
    compute = sum(line["compute"] for line in files.receipts)
    yield from differing("time of steps on receipts", last["steps"], compute + last["unclaimed"])
    for name in ("held", "reserved"):
        receipts = {tenant: time for tenant, time in files.by_tenant(name).items() if time}
        accounts = {a["tenant"]: a[name] for a in last["accounts"] if a.get("tenant") and a[name]}
        yield from differing(f"{name} of tenants and of their receipts", accounts, receipts)
    scopes = sum(account["held"] for account in last["accounts"] if "scope" in account)
    states = last["states"]
    parts = sum(line["held"] + line["reserved"] for line in files.receipts)
    parts += scopes + states["free"] + states["cached"] + states["releasing"]
    yield from differing("all parts", last["blocks"] * last["elapsed"], parts)


def is_quiet(ledger: ledger_pb2.Ledger) -> bool:
    """Whether nobody has anything open."""
    balances = [ledger.pool.reserved, ledger.pool.releasing]
    balances += [tenant.held for tenant in ledger.tenants]
    busy = any(tenant.open_requests or tenant.waiting_requests for tenant in ledger.tenants)
    return not busy and not any(balance.blocks for balance in balances)


def quiet_faults(ledger: ledger_pb2.Ledger, files: Files) -> Iterator[str]:
    """While nobody has anything open: all that tenants had is on receipts, and the rest adds up."""
    pool = ledger.pool
    held, reserved = files.by_tenant("held"), files.by_tenant("reserved")
    parts = nanos(pool.free.time) + nanos(pool.releasing.time) + nanos(pool.cached.time)
    parts += sum(nanos(scope.held.time) for scope in ledger.scopes)
    for tenant in ledger.tenants:
        who = f"of {tenant.name}"
        had = nanos(tenant.held.time)
        yield from differing(f"closed_held {who}", had, nanos(tenant.closed_held))
        if tenant.name == SELF_TEST:
            parts += had + nanos(tenant.reserved.time)
            continue
        yield from differing(f"held {who} and its receipts", had, held[tenant.name])
        yield from differing(
            f"reserved {who} and its receipts", nanos(tenant.reserved.time), reserved[tenant.name]
        )
        parts += held[tenant.name] + reserved[tenant.name]
    whole = pool.blocks * ledger.elapsed.ToNanoseconds()
    yield from differing("receipts, scopes, cached, free, releasing", whole, parts)


def summed(
    statement: Mapping[str, Any], lives: Iterable[Files], names: Sequence[str]
) -> Iterator[str]:
    """What `kvledger statement --by replica,tenant --json` says, and the lines of the files."""
    wanted: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for files in lives:
        for line in files.receipts:
            sums = wanted[files.facts["replica"], line["tenant"]]
            sums["requests"] += 1
            for name in names:
                sums[name] += line[name]
    groups = {(row["replica"], row["tenant"]): row for row in statement["groups"]}
    yield from differing("rows of the statement", sorted(wanted), sorted(groups))
    for key, sums in wanted.items():
        row = groups.get(key, {})
        for name, value in sums.items():
            yield from differing(f"the statement's {name} of {key}", value, row.get(name))
    total: Counter[str] = sum(wanted.values(), Counter())
    for name, value in total.items():
        yield from differing(f"the statement's {name}", value, statement["total"][name])
    notes = statement["notes"]
    for name in ("damaged_lines", "duplicates", "missing", "lost"):
        yield from differing(f"{name} of the statement", 0, notes[name])
    yield from differing(
        "torn lines of the statement", sum(files.torn for files in lives), notes["torn_lines"]
    )
    machines = statement["machines"]
    for name in ("blocks", "time"):
        account = dict(machines[name])
        whole = account.pop("all")
        yield from differing(f"the statement's {name}", whole, sum(account.values()))
