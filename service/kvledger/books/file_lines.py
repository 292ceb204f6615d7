"""Reading the files of --books line by line: which are whole, and what one of a kind must have."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvledger.books.lines import LOST, READABLE, are_counts
from kvledger.books.prices import Prices
from kvledger.errors import SettingRefused

KINDS = ("replica", "receipt", "pool", "load")

# Of a receipt's line: what is summed.
COUNTS = (
    *("prompt_tokens", "output_tokens", "computed_tokens", "recomputed_tokens", "shared_tokens"),
    *("reused_own_tokens", "reused_group_tokens", "reused_public_tokens", "uncached_tokens"),
    *("held", "reserved", "sharing_saved", "preemptions", "queue", "preempted", "compute"),
)
POOL_COUNTS = ("elapsed", "steps", "unclaimed", "receipts", "lost")
_REPLICA_TEXTS = ("replica", "model", "started_at")


@dataclass
class Notes:
    """What a reader of the sums should know."""

    files: int = 0
    torn_lines: int = 0
    damaged_lines: int = 0
    # Of kinds that a later version writes.
    unknown_lines: int = 0
    duplicates: int = 0
    # Receipts that a replica counted and no file has, lost ones apart. Not known for a part of the
    # time.
    missing: int | None = 0
    lost: int = 0


def paths_of(folders: Sequence[Path]) -> list[Path]:
    """The files in some folders, in the order in which each replica wrote its own.

    Raises SettingRefused if there are none that can be read.
    """
    found: dict[Path, None] = {}
    for folder in folders:
        if not folder.is_dir():
            raise SettingRefused(f"{folder}: there is no such folder; give that of --books")
        try:
            paths = sorted(path for path in folder.iterdir() if path.match("books-*.jsonl"))
        except OSError as error:
            raise SettingRefused(f"{folder}: {error.strerror or error}") from None
        found.update(dict.fromkeys(path.resolve() for path in paths))
    if not found:
        raise SettingRefused(f"{folders[0]}: it has no files of --books")
    # Names have when a replica started, its id and a number; folders may each have a part of them.
    return sorted(found, key=lambda path: path.name)


def lines_of(path: Path, notes: Notes) -> Iterator[dict[str, Any]]:
    """The readable lines of a file, each with a kind; the others are counted."""
    try:
        with path.open("rb") as file:
            for data in file:
                if not data.endswith(b"\n"):
                    notes.torn_lines += 1
                    return
                line = _parsed(data)
                if line is None:
                    notes.damaged_lines += 1
                    continue
                if line["kind"] == "replica" and line["format"] not in READABLE:
                    raise SettingRefused(
                        f"{path}: format {line['format']}, this version reads "
                        f"{' and '.join(map(str, READABLE))}; "
                        "use the version of kvledger that wrote it"
                    )
                if line["kind"] not in KINDS:
                    notes.unknown_lines += 1
                    continue
                yield line
    except OSError as error:
        raise SettingRefused(f"{path}: {error.strerror or error}") from None


def _parsed(data: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict):
        return None
    kind = line.get("kind")
    texts: tuple[str, ...]
    numbers: tuple[str, ...]
    if kind == "replica":
        texts, numbers = _REPLICA_TEXTS, ("format", "blocks", "block_bytes")
    elif kind == "pool":
        texts, numbers = ("at",), POOL_COUNTS
    elif kind == "receipt":
        texts = ("id", "ended_at", "tenant", "end")
        numbers = () if line.get("end") == LOST else COUNTS
    elif kind == "load":
        texts, numbers = ("at",), ("since", "elapsed")
    else:
        return line if isinstance(kind, str) else None
    if not all(isinstance(line.get(name), str) for name in texts):
        return None
    if not are_counts(line, numbers) or (kind == "replica" and line["blocks"] == 0):
        return None
    return line


def prices_of(line: Mapping[str, Any]) -> Prices | None:
    """What a replica's line says of prices. SettingRefused if that cannot be read."""
    facts = line.get("prices")
    try:
        return None if facts is None else Prices.of(facts)
    except (ValueError, ArithmeticError, KeyError, AttributeError, TypeError):
        raise SettingRefused(
            f"replica {line['replica']}: its prices {facts!r} cannot be read; put its files into "
            "another folder"
        ) from None
