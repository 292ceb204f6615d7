"""Traffic out of a CSV file, one request a line.

Columns by name, in any order, others ignored: `arrived` (seconds, or a date and time),
`prompt_tokens`, `output_tokens`; if there are any `tenant`, `prefix` and `prefix_tokens`,
`conversation` (traffic.Row). The public traces of Azure name the first three
TIMESTAMP, ContextTokens and GeneratedTokens.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path

from kvledger.errors import SettingRefused
from kvledger.simulation.traffic import Row

_NAMES = {
    "arrived": ("arrived", "timestamp"),
    "prompt_tokens": ("prompt_tokens", "contexttokens"),
    "output_tokens": ("output_tokens", "generatedtokens"),
}
_OPTIONAL = ("tenant", "prefix", "prefix_tokens", "conversation")
_TOKENS_MAX = 1 << 24
_ROWS_MAX = 10_000_000
# A date and time; of the fraction of a second Python 3.10 reads no more than six digits.
_MOMENT = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d)?")


def read_trace(path: Path, limit: int | None = None) -> list[Row]:
    """The first `limit` requests of a file. Raises SettingRefused, with the line that is wrong."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            columns = _columns(path, reader.fieldnames)
            rows = list(_rows(path, reader, columns, _ROWS_MAX if limit is None else limit))
    except OSError as error:
        raise SettingRefused(f"--trace {path}: {error.strerror or error}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise SettingRefused(f"--trace {path} is no CSV file: {error}") from None
    if not rows:
        raise SettingRefused(f"--trace {path} has no request below its first line")
    return rows


def _columns(path: Path, header: object) -> dict[str, str]:
    """The name in the file of each column that is read."""
    found = {str(name).strip().lower(): str(name) for name in (header or ())}  # type: ignore[attr-defined]
    columns = {name: found[name] for name in _OPTIONAL if name in found}
    for name, known in _NAMES.items():
        match = next((found[each] for each in known if each in found), None)
        if match is None:
            raise SettingRefused(
                f"--trace {path} has no column {name}; its first line must name arrived, "
                f"prompt_tokens and output_tokens (or TIMESTAMP, ContextTokens, GeneratedTokens)"
            )
        columns[name] = match
    if ("prefix" in columns) != ("prefix_tokens" in columns):
        raise SettingRefused(
            f"--trace {path}: a column prefix needs one prefix_tokens, and the other way round"
        )
    return columns


def _rows(
    path: Path, reader: csv.DictReader[str], columns: Mapping[str, str], limit: int
) -> Iterator[Row]:
    for count, values in enumerate(reader):
        if count >= limit:
            return
        try:
            yield _row({name: (values[column] or "").strip() for name, column in columns.items()})
        except ValueError as error:
            raise SettingRefused(f"--trace {path}, line {reader.line_num}: {error}") from None


def _row(values: Mapping[str, str]) -> Row:
    prompt = _tokens("prompt_tokens", values["prompt_tokens"], 1)
    prefix = values.get("prefix", "")
    prefix_tokens = _tokens("prefix_tokens", values["prefix_tokens"], 0) if prefix else 0
    if prefix_tokens > prompt:
        raise ValueError(
            f"prefix_tokens {prefix_tokens} is more than prompt_tokens {prompt}, which it is a "
            f"part of"
        )
    return Row(
        _moment(values["arrived"]),
        prompt,
        _tokens("output_tokens", values["output_tokens"], 1),
        values.get("tenant", "") or "all",
        prefix,
        prefix_tokens,
        values.get("conversation", ""),
    )


def _tokens(name: str, text: str, least: int) -> int:
    if not text.isascii() or not text.isdigit() or not least <= int(text) <= _TOKENS_MAX:
        raise ValueError(f"{name} is {text!r}, not a whole number from {least} to {_TOKENS_MAX}")
    return int(text)


def _moment(text: str) -> float:
    """Seconds since some time."""
    match = _MOMENT.fullmatch(text)
    try:
        if match is None:
            seconds = float(text)
        else:
            moment = datetime.fromisoformat(
                match.group(1) + (match.group(3) or "").replace("Z", "")
            )
            moment = moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)
            seconds = moment.timestamp() + float(f"0.{match.group(2) or 0}")
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds < 1e12:
        raise ValueError(
            f"arrived is {text!r}, neither seconds nor a time such as 2026-11-30 12:00:00.5"
        )
    return seconds
