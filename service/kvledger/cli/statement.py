"""`kvledger statement`: what the files of --books come to."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvledger.books.file_statement import KEYS, Statement, Sums, state
from kvledger.books.statement_rows import compute_rows, memory_rows, notes_of, sums_rows
from kvledger.cli.moments import moment
from kvledger.errors import SettingRefused


def run(arguments: Sequence[str]) -> int:
    """Prints the sums; 0, or 2 if there is nothing that can be summed."""
    options = _parser().parse_args(list(arguments))
    try:
        statement = state(options.folder, options.by, options.since or "", options.until or "")
    except SettingRefused as error:
        print(f"kvledger statement: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(_facts(statement, options), indent=2))
    else:
        print("\n".join(_page(statement, options.by)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvledger statement",
        description="Sums receipts that servers kept with --books, and says what stood idle.",
    )
    parser.add_argument("folder", metavar="DIR", type=Path, nargs="+", help="a folder of --books")
    parser.add_argument(
        "--from",
        dest="since",
        metavar="T",
        type=moment,
        help="requests that ended then or later: 2026-11-30, or 2026-11-30T12:00:00+01:00; UTC "
        "unless it says otherwise",
    )
    parser.add_argument(
        "--to", dest="until", metavar="T", type=moment, help="that ended before then"
    )
    parser.add_argument(
        "--by",
        type=_keys,
        default=("tenant", "model"),
        metavar="KEYS",
        help=f"some of {','.join(KEYS)}; default: tenant,model",
    )
    parser.add_argument("--json", action="store_true", help="exact whole numbers, for programs")
    return parser


def _keys(text: str) -> tuple[str, ...]:
    keys = tuple(text.split(","))
    for key in keys:
        if key not in KEYS:
            raise argparse.ArgumentTypeError(f"{key!r} is none of {','.join(KEYS)}")
    if len(set(keys)) < len(keys):
        raise argparse.ArgumentTypeError(f"{text!r} names one twice")
    return keys


def _facts(statement: Statement, options: argparse.Namespace) -> dict[str, Any]:
    machines = asdict(statement.machines)
    return {
        "from": options.since,
        "to": options.until,
        "by": list(options.by),
        "groups": [
            dict(zip(options.by, group, strict=True)) | _sums_facts(sums)
            for group, sums in sorted(statement.groups.items())
        ],
        "total": _sums_facts(statement.total),
        "machines": machines,
        "notes": asdict(statement.notes),
    }


def _sums_facts(sums: Sums) -> dict[str, Any]:
    return {
        "requests": sums.requests,
        "without_numbers": sums.without_numbers,
        **sums.counts,
        "cost": {unit: asdict(money) for unit, money in sorted(sums.cost.items())},
    }


def _page(statement: Statement, by: Sequence[str]) -> list[str]:
    heads, rows = sums_rows(statement, by)
    page = [*_table(heads, rows, len(by)), ""]
    machines = statement.machines
    if not machines.replicas:
        page.append("No replica stated its account in this time: what stood idle is not known.")
    else:
        page += [f"{machines.replicas} replica(s), {machines.since} to {machines.until}", ""]
        page += [*_table(*memory_rows(machines), 1), "", *_table(*compute_rows(machines), 1)]
    notes = notes_of(statement)
    return [*page, "", *notes] if notes else page


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], texts: int) -> list[str]:
    """Aligned columns, of which the first `texts` are no numbers."""
    table = [list(heads), *map(list, rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(heads))]
    return [
        "  ".join(
            cell.ljust(width) if column < texts else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]
