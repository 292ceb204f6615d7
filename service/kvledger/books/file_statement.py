"""Statements from the files of --books: who used what, and what nobody used, over many replicas.

All numbers are whole and exact. For each replica the lines of the machine add up: what receipts
have, what shared scopes held, what was cached, what was free, and what is on receipts of another
time, is blocks x time; and so for the time of steps, and for what both cost. What cannot be divided
goes to the idle line.

Reading never fails for a line: one that is torn, because its process was killed while it wrote, is
counted, and so is one that says nothing readable. A receipt that stands in several files, because a
disk failed between two attempts, counts once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

from kvledger.books import load_lines
from kvledger.books.file_lines import COUNTS, POOL_COUNTS, Notes, lines_of, paths_of, prices_of
from kvledger.books.lines import LOST, are_counts
from kvledger.books.prices import Prices

# What receipts can be summed by.
KEYS = ("tenant", "model", "replica", "end", "day")

_COSTS = ("memory_nanos", "compute_nanos")
_STATES = ("free", "reserved", "held", "cached", "releasing")
_START = {"states": dict.fromkeys(_STATES, 0)}


@dataclass
class Money:
    """Billionths of a unit."""

    memory: int = 0
    compute: int = 0


@dataclass
class Sums:
    """What some requests came to: nanoseconds, block-nanoseconds, tokens."""

    requests: int = 0
    # Of them, those of which only this is known: the engine was gone.
    without_numbers: int = 0
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    cost: dict[str, Money] = field(default_factory=dict)  # by unit

    def add(self, receipt: Mapping[str, Any], unit: str | None) -> None:
        """One receipt more."""
        self.requests += 1
        if receipt["end"] == LOST:
            self.without_numbers += 1
            return
        for name in COUNTS:
            self.counts[name] += receipt[name]
        if unit is not None:
            money = self.cost.setdefault(unit, Money())
            money.memory += receipt["memory_nanos"]
            money.compute += receipt["compute_nanos"]


@dataclass
class Account:
    """Where a machine's block-time and time went, or what that cost: lines that add up to `all`.

    `idle` is for blocks that were free, or for time in which no step ran; `elsewhere` is on
    receipts of another time, or on none yet, less what these receipts have of another time: so it
    may be negative. `unknown` is of time for which the replica did not say how its blocks stood.
    """

    all: int = 0
    receipts: int = 0
    scopes: int = 0
    cached: int = 0
    releasing: int = 0
    unclaimed: int = 0
    elsewhere: int = 0
    unknown: int = 0
    idle: int = 0

    def add(self, other: Account) -> None:
        """The sums of both."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass
class MachineCost:
    """What the machines of one unit of money cost, in billionths."""

    memory: Account = field(default_factory=Account)
    compute: Account = field(default_factory=Account)


@dataclass
class Machines:
    """All replicas together."""

    replicas: int = 0
    # Their accounts cover this time, as files say it; empty where there is none.
    since: str = ""
    until: str = ""
    blocks: Account = field(default_factory=Account)  # block-nanoseconds
    time: Account = field(default_factory=Account)  # nanoseconds
    cost: dict[str, MachineCost] = field(default_factory=dict)  # by unit
    # Replicas that never said in which states their blocks were: all that is not on their receipts
    # is `unknown`.
    without_states: int = 0
    # Replicas that said nothing of their time: all of it is missing.
    without_account: int = 0


@dataclass
class Statement:
    """Sums over receipts of a time, by what was asked for."""

    groups: dict[tuple[str, ...], Sums] = field(default_factory=dict)
    total: Sums = field(default_factory=Sums)
    machines: Machines = field(default_factory=Machines)
    notes: Notes = field(default_factory=Notes)


@dataclass
class _Replica:
    """One process, over all its files."""

    facts: Mapping[str, Any]
    prices: Prices | None
    own: Sums = field(default_factory=Sums)
    receipts: int = 0  # in its files, of any time
    first: Mapping[str, Any] | None = None  # the newest line of its pool before the time
    last: Mapping[str, Any] | None = None  # and in it
    # The oldest and the newest in the time that say how its blocks stood.
    first_stated: Mapping[str, Any] | None = None
    last_stated: Mapping[str, Any] | None = None

    @property
    def id(self) -> str:
        """Its name in the files."""
        return str(self.facts["replica"])


class Watcher(Protocol):
    """Whoever wants the same lines as the sums, as they are read; each is whole, and of `replica`,
    an id. A replica's lines of one kind come in the order in which they were written."""

    def on_replica(self, line: Mapping[str, Any]) -> None:
        """The first line of a file."""

    def on_pool(self, replica: str, line: Mapping[str, Any]) -> None:
        """How a machine stood, at any time."""

    def on_load(self, replica: str, line: Mapping[str, Any]) -> None:
        """What steps did, at any time; may come twice."""

    def on_receipt(self, replica: str, line: Mapping[str, Any]) -> None:
        """A request that is in the sums."""


def state(
    folders: Sequence[Path],
    by: Sequence[str] = ("tenant", "model"),
    since: str = "",
    until: str = "",
    watcher: Watcher | None = None,
) -> Statement:
    """Sums the files of some folders. Raises SettingRefused if there are none that can be read.

    `since` and `until` are as in the files, the latter not included; empty is no bound. `by` are
    some of KEYS.
    """
    statement, seen = Statement(), set[bytes]()
    replicas: dict[str, _Replica] = {}
    for path in paths_of(folders):
        statement.notes.files += 1
        replica: _Replica | None = None
        for line in lines_of(path, statement.notes):
            kind = line["kind"]
            if kind == "replica":
                replica = replicas.setdefault(line["replica"], _Replica(line, prices_of(line)))
                if watcher is not None:
                    watcher.on_replica(replica.facts)
            elif replica is None or not _is_whole(line, replica):
                statement.notes.damaged_lines += 1
            elif kind == "pool":
                _note_pool(replica, line, since, until)
                if watcher is not None:
                    watcher.on_pool(replica.id, line)
            elif kind == "load":
                if watcher is not None:
                    watcher.on_load(replica.id, line)
            elif (key := bytes.fromhex(line["id"])) in seen:
                statement.notes.duplicates += 1
            else:
                seen.add(key)
                replica.receipts += 1
                if since <= line["ended_at"] and (not until or line["ended_at"] < until):
                    _add_receipt(statement, replica, line, by)
                    if watcher is not None:
                        watcher.on_receipt(replica.id, line)
    for replica in replicas.values():
        _add_machine(statement.machines, replica)
        _add_notes(statement.notes, replica)
    if since or until:
        statement.notes.missing = None
    return statement


def _is_whole(line: Mapping[str, Any], replica: _Replica) -> bool:
    """Whether a line has what those of its replica have, besides what all have."""
    if line["kind"] == "receipt":
        try:
            bytes.fromhex(line["id"])
        except ValueError:
            return False
        return line["end"] == LOST or replica.prices is None or are_counts(line, _COSTS)
    if line["kind"] == "load":
        return load_lines.is_whole(line)
    states = line.get("states")
    if states is None:
        return True
    accounts = line.get("accounts")
    return (
        isinstance(states, dict)
        and are_counts(states, _STATES)
        and sum(states[name] for name in _STATES) == replica.facts["blocks"] * line["elapsed"]
        and isinstance(accounts, list)
        and all(isinstance(each, dict) and are_counts(each, ("held",)) for each in accounts)
    )


def _note_pool(replica: _Replica, line: Mapping[str, Any], since: str, until: str) -> None:
    if until and line["at"] >= until:
        return
    if line["at"] < since:
        if replica.first is None or replica.first["elapsed"] <= line["elapsed"]:
            replica.first = line
        return
    if replica.last is None or replica.last["elapsed"] <= line["elapsed"]:
        replica.last = line
    if line.get("states") is None:
        return
    if replica.first_stated is None or line["elapsed"] < replica.first_stated["elapsed"]:
        replica.first_stated = line
    if replica.last_stated is None or replica.last_stated["elapsed"] <= line["elapsed"]:
        replica.last_stated = line


def _add_receipt(
    statement: Statement, replica: _Replica, line: Mapping[str, Any], by: Sequence[str]
) -> None:
    values = {
        "tenant": line["tenant"],
        "model": replica.facts["model"],
        "replica": replica.facts["replica"],
        "end": line["end"],
        "day": line["ended_at"][:10],
    }
    unit = None if replica.prices is None else replica.prices.unit
    group = tuple(values[key] for key in by)
    for sums in (statement.groups.setdefault(group, Sums()), statement.total, replica.own):
        sums.add(line, unit)


def _add_notes(notes: Notes, replica: _Replica) -> None:
    newest = replica.last
    if newest is None:
        return
    notes.lost += newest["lost"] - (replica.first or {}).get("lost", 0)
    if notes.missing is not None:
        notes.missing += max(0, newest["receipts"] - newest["lost"] - replica.receipts)


def _add_machine(machines: Machines, replica: _Replica) -> None:
    if replica.last is None:
        # One that had ended before the time, or began after it, has no part in it.
        if replica.own.requests:
            machines.without_account += 1
        return
    machines.replicas += 1
    first, last = replica.first or {}, replica.last
    since = first.get("at") or replica.facts["started_at"]
    machines.since = min(machines.since or since, since)
    machines.until = max(machines.until, last["at"])
    used = {name: last[name] - first.get(name, 0) for name in POOL_COUNTS}
    blocks = _block_account(replica, used["elapsed"])
    own = replica.own.counts["compute"]
    time = Account(
        all=used["elapsed"],
        receipts=own,
        unclaimed=used["unclaimed"],
        elsewhere=used["steps"] - own - used["unclaimed"],
        idle=used["elapsed"] - used["steps"],
    )
    machines.blocks.add(blocks)
    machines.time.add(time)
    machines.without_states += 1 if replica.last_stated is None else 0
    if replica.prices is not None:
        _add_cost(machines, replica, replica.prices, blocks, time)


def _block_account(replica: _Replica, elapsed: int) -> Account:
    """Where a replica's block-time went."""
    own = replica.own.counts["held"] + replica.own.counts["reserved"]
    whole = replica.facts["blocks"] * elapsed
    last = replica.last_stated
    if last is None:
        return Account(all=whole, receipts=own, unknown=whole - own)
    # Where the line before the time does not say it, that is known from the first one on that does;
    # at the replica's start all blocks were free.
    first = replica.first or _START
    if first.get("states") is None:
        first = replica.first_stated or last
    states = {name: last["states"][name] - first["states"][name] for name in _STATES}
    scopes = _of_scopes(last) - _of_scopes(first)
    return Account(
        all=whole,
        receipts=own,
        scopes=scopes,
        cached=states["cached"],
        releasing=states["releasing"],
        elsewhere=states["held"] + states["reserved"] - scopes - own,
        unknown=whole - sum(states.values()),
        idle=states["free"],
    )


def _of_scopes(pool: Mapping[str, Any]) -> int:
    return sum(each["held"] for each in pool.get("accounts", ()) if "scope" in each)


def _add_cost(
    machines: Machines, replica: _Replica, prices: Prices, blocks: Account, time: Account
) -> None:
    pool = replica.facts["blocks"]
    money = replica.own.cost.get(prices.unit, Money())
    cost = machines.cost.setdefault(prices.unit, MachineCost())
    memory_rate, compute_rate = prices.memory_nanos(1, pool), prices.compute_nanos(1)
    cost.memory.add(_priced(blocks, memory_rate, money.memory))
    cost.compute.add(_priced(time, compute_rate, money.compute))


def _priced(account: Account, rate: Fraction, receipts: int) -> Account:
    """What an account cost, where its receipts say what they did; `idle` is what remains."""
    priced = Account(**{name: int(value * rate // 1) for name, value in vars(account).items()})
    priced.receipts = receipts
    priced.idle = 0
    lines = sum(vars(priced).values()) - priced.all
    priced.idle = priced.all - lines
    return priced
