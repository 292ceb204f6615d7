"""What replicas ran with, and what was changed between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kvledger.report.recorded import ReplicaRecord
from kvledger.report.units import bytes_text, rate_text, time_text

REPLICAS_MAX = 100
_TEXT_MAX = 200

# What a replica's line states, and what it is called.
_LINE = {
    "version": "version",
    "model": "model",
    "kv_format": "KV format",
    "blocks": "blocks of the pool",
    "block_bytes": "bytes of a block",
    "prices": "prices",
}
_SETTINGS = {
    "threads": "--threads",
    "processors": "processors of the process",
    "token_budget": "--token-budget",
    "sequences_max": "--max-sequences",
    "block_tokens": "tokens of a block",
    "step_stretch": "--step-stretch",
    "prefill_step": "--prefill-step, s",
    "tpot_target": "--tpot-target, s",
    "prefix_reuse": "--prefix-reuse",
}


@dataclass(frozen=True)
class Settings:
    """As texts: the replicas, what the first ran with, and sentences about what changed."""

    replicas: list[list[str]]
    more_replicas: int
    first: list[tuple[str, str]]
    changes: list[str]


def settings_of(records: Sequence[ReplicaRecord]) -> Settings:
    """`records` by when they started."""
    return Settings(
        replicas=[_row(each) for each in records[:REPLICAS_MAX]],
        more_replicas=max(0, len(records) - REPLICAS_MAX),
        first=list(_facts(records[0]).items()) if records else [],
        changes=_changes(records),
    )


def _row(record: ReplicaRecord) -> list[str]:
    started, last = record.started, record.last_at
    end = "stopped" if record.stopped else "no last line: it runs on, or was killed"
    return [
        record.id,
        "" if started is None else time_text(started),
        "" if last is None else time_text(last),
        "no line of its pool in this time" if last is None else end,
    ]


def _changes(records: Sequence[ReplicaRecord]) -> list[str]:
    """What each replica has that differs from the one that started before it."""
    said = []
    for before, now in pairwise(records):
        had, has = _facts(before), _facts(now)
        differences = [
            f"{name} {has.get(name, 'not stated')}, not {had.get(name, 'not stated')}"
            for name in {**had, **has}
            if had.get(name) != has.get(name)
        ]
        if differences:
            when = "" if now.started is None else f" (started {time_text(now.started)})"
            said.append(f"Replica {now.id}{when}: {'; '.join(differences)}.")
    return said[:REPLICAS_MAX]


def _facts(record: ReplicaRecord) -> dict[str, str]:
    line, settings = record.facts, record.facts.get("settings")
    facts = {words: _text(line.get(name)) for name, words in _LINE.items()}
    if isinstance(settings, dict):
        facts |= {words: _text(settings.get(name)) for name, words in _SETTINGS.items()}
    facts["the machine at most"] = _peaks(line.get("peaks"))
    return {name: text for name, text in facts.items() if text}


def _peaks(peaks: Any) -> str:
    try:
        read = bytes_text(float(peaks["read_bytes_per_second"]))
        return f"{read}/s, {rate_text(float(peaks['operations_per_second']['f32']), 'op/s')} (f32)"
    except (TypeError, KeyError, ValueError, OverflowError):
        return ""


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items())[:_TEXT_MAX]
    return str(value)[:_TEXT_MAX]
