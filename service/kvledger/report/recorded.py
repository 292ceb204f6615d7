"""What the lines of the books come to, collected while they are read: nothing grows with how long
that is but the names of tenants and replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from kvledger.books.lines import LOST
from kvledger.diagnosis.traffic import TrafficCounts, class_of
from kvledger.report.steps import LoadSums
from kvledger.report.timeline import Memory, Timeline

# A sum of so many byte-nanoseconds or nanoseconds cannot be of a machine; charts pass over it.
_MOST = 1 << 100
_OTHERS = "(others)"
# The year 2242: no clock is that far off, and there are times that charts have no room for.
_LATEST = 1 << 33


@dataclass
class ReplicaRecord:
    """One process, as far as the time goes."""

    facts: Mapping[str, Any]
    started: float | None  # seconds since 1970; None if the line does not say it
    # When the first and the last line in the time were written.
    first_at: float | None = None
    last_at: float | None = None
    stopped: bool = False  # it said that a line is its last
    load: LoadSums = field(default_factory=LoadSums)
    traffic: TrafficCounts = field(default_factory=TrafficCounts)
    states: Counter[str] = field(default_factory=Counter)  # block-nanoseconds

    @property
    def id(self) -> str:
        """Its name in the files."""
        return str(self.facts["replica"])


class Recorded:
    """A watcher of books/file_statement.py."""

    def __init__(self, since: str = "", until: str = "") -> None:
        """`since` and `until` as the files have them, the latter not included."""
        self.timeline = Timeline()
        self.replicas: dict[str, ReplicaRecord] = {}
        self.unplaced_lines = 0  # whole, but their time or their numbers cannot be
        self._since, self._until = since, until
        self._stated: dict[str, tuple[float, Mapping[str, Any]]] = {}
        self._elapsed: dict[str, int] = {}  # where the last line of load ended

    def on_replica(self, line: Mapping[str, Any]) -> None:
        """The first line of a file."""
        if line["replica"] not in self.replicas:
            record = ReplicaRecord(line, _seconds(line["started_at"]))
            self.replicas[line["replica"]] = record

    def on_pool(self, replica: str, line: Mapping[str, Any]) -> None:
        """How a machine stood."""
        when, record = _seconds(line["at"]), self.replicas[replica]
        if when is None:
            self.unplaced_lines += 1
            return
        if self._is_in_time(line["at"]):
            self._note_time(record, when)
            record.stopped = record.stopped or line.get("last") is True
        if line.get("states") is None:
            return
        before = self._stated.get(replica) or self._beginning(record)
        if before is not None and line["elapsed"] <= before[1]["elapsed"]:
            return
        self._stated[replica] = (when, line)
        if before is not None and self._is_in_time(line["at"]):
            self._add_memory(record, before, (when, line))

    def on_load(self, replica: str, line: Mapping[str, Any]) -> None:
        """What steps did."""
        if line["since"] < self._elapsed.get(replica, 0):
            return  # a failing disk made the server write it twice
        self._elapsed[replica] = line["elapsed"]
        if not self._is_in_time(line["at"]):
            return
        when, record = _seconds(line["at"]), self.replicas[replica]
        if when is None:
            self.unplaced_lines += 1
            return
        self._note_time(record, when)
        record.load.add(line)
        self.timeline.add_load(replica, line, when)

    def on_receipt(self, replica: str, line: Mapping[str, Any]) -> None:
        """A request that is in the sums."""
        counts = self.replicas[replica].traffic
        if line["end"] == LOST or max(map(_number, line.values())) > _MOST:
            return
        tenant = line["tenant"]
        reused = sum(line[f"reused_{whose}_tokens"] for whose in ("own", "group", "public"))
        life = sum(_number(line.get(name)) for name in ("queue", "prefill", "decode", "stall"))
        counts.ended += 1
        counts.prompts[class_of(line["prompt_tokens"])] += 1
        counts.outputs[class_of(line["output_tokens"])] += 1
        counts.prompt_tokens[tenant] += line["prompt_tokens"]
        counts.all_prompt_tokens += line["prompt_tokens"]
        counts.output_tokens += line["output_tokens"]
        counts.computed_tokens += line["computed_tokens"]
        counts.recomputed_tokens += line["recomputed_tokens"]
        counts.reused_tokens += reused
        counts.queued_time += line["queue"]
        counts.requeued_time += line["preempted"]
        # Lines of load do not say it: whoever has not ended is missing.
        counts.stalled_time += _number(line.get("stall"))
        counts.life_time += life
        counts.queued[tenant] += line["queue"]
        counts.lives[tenant] += life
        counts.asked[tenant] += life * line["prompt_tokens"]
        counts.waiting_tokens += line["queue"] * line["prompt_tokens"]

    @property
    def has_load(self) -> bool:
        """Whether any line says what steps did."""
        return any(record.load.covered for record in self.replicas.values())

    @property
    def present(self) -> list[ReplicaRecord]:
        """The replicas that said anything in the time, by when they started."""
        found = [
            each
            for each in self.replicas.values()
            if each.last_at is not None or each.traffic.ended
        ]
        return sorted(found, key=lambda each: (str(each.facts["started_at"]), each.id))

    def _is_in_time(self, at: str) -> bool:
        return self._since <= at and (not self._until or at < self._until)

    def _beginning(self, record: ReplicaRecord) -> tuple[float, Mapping[str, Any]] | None:
        """A replica's start, when all its blocks were free; None if that was before the time."""
        if record.started is None or record.facts["started_at"] < self._since:
            return None
        return record.started, {"elapsed": 0, "states": dict.fromkeys(_STATES, 0)}

    def _note_time(self, record: ReplicaRecord, when: float) -> None:
        if record.first_at is None:
            record.first_at = when
        record.last_at = max(record.last_at or when, when)

    def _add_memory(
        self,
        record: ReplicaRecord,
        before: tuple[float, Mapping[str, Any]],
        now: tuple[float, Mapping[str, Any]],
    ) -> None:
        """What the pool had between two lines."""
        elapsed = now[1]["elapsed"] - before[1]["elapsed"]
        size, blocks = record.facts["block_bytes"], record.facts["blocks"]
        states = {name: now[1]["states"][name] - before[1]["states"][name] for name in _STATES}
        tenants, scopes = _accounts(before[1], now[1])
        rest = states["held"] + states["reserved"] - scopes - sum(tenants.values())
        # Clocks are set; how long it was is what the machine's own said.
        began, ended = now[0] - min(elapsed, _MOST) / 1e9, now[0]
        if began < 0 or size * blocks * elapsed > _MOST or min(rest, *states.values()) < 0:
            self.unplaced_lines += 1
            return
        record.states.update(states)
        if rest > 0:
            tenants[_OTHERS] = rest
        memory = Memory(
            {name: time * size for name, time in states.items()},
            {name: time * size for name, time in tenants.items()},
            scopes * size,
        )
        self.timeline.add_memory(record.id, memory, began, ended)


_STATES = ("free", "reserved", "held", "cached", "releasing")


def _accounts(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[dict[str, int], int]:
    """Block-nanoseconds between two lines that tenants had, and that shared scopes had.

    Only of accounts that are in both lines, or cannot have been in an earlier one's `(others)`.
    """
    had = {_key(each): _had(each) for each in before.get("accounts", ())}
    had_all = not any(name == _OTHERS for _, name in had)
    tenants: dict[str, int] = {}
    scopes = 0
    for each in now.get("accounts", ()):
        is_scope, name = _key(each)
        if name == _OTHERS or not ((is_scope, name) in had or had_all):
            continue
        more = max(0, _had(each) - had.get((is_scope, name), 0))
        if is_scope:
            scopes += more
        elif more:
            tenants[name] = more
    return tenants, scopes


def _key(account: Mapping[str, Any]) -> tuple[bool, str]:
    is_scope = "scope" in account
    return is_scope, str(account["scope"] if is_scope else account.get("tenant"))


def _had(account: Mapping[str, Any]) -> int:
    return _number(account["held"]) + _number(account.get("reserved"))


def _number(value: Any) -> int:
    return value if type(value) is int and value >= 0 else 0


def _seconds(at: str) -> float | None:
    """Seconds since 1970 of a moment as the files have it; None if no clock can have said it."""
    try:
        # Python 3.10 does not read the Z.
        when = datetime.fromisoformat(at[:-1] + "+00:00" if at.endswith("Z") else at)
        seconds = (when if when.tzinfo else when.replace(tzinfo=timezone.utc)).timestamp()
    except (ValueError, OverflowError):
        return None
    return seconds if 0 <= seconds < _LATEST else None
