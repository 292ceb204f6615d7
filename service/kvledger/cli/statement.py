"""`kvledger statement`: what the files of --books come to."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from kvledger.books.file_statement import KEYS, Account, Money, Statement, Sums, state
from kvledger.books.lines import timestamp
from kvledger.errors import SettingRefused

# The lines of a machine's account, and what they are called for blocks and for time.
_LINES = {
    "receipts": ("on receipts", "on receipts"),
    "scopes": ("groups and public prefixes", ""),
    "cached": ("cached", ""),
    "releasing": ("given back, in use by a step", ""),
    "unclaimed": ("", "of requests that ended in a step"),
    "elsewhere": ("on other receipts, or on none yet", "on other receipts, or on none yet"),
    "unknown": ("not stated: the engine was gone", ""),
    "idle": ("idle: free", "idle: no step ran"),
}


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
        type=_time,
        help="requests that ended then or later: 2026-11-30, or 2026-11-30T12:00:00+01:00; UTC "
        "unless it says otherwise",
    )
    parser.add_argument(
        "--to", dest="until", metavar="T", type=_time, help="that ended before then"
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


def _time(text: str) -> str:
    """A moment as the files have it."""
    try:
        # Python 3.10 does not read the Z.
        when = datetime.fromisoformat(text[:-1] + "+00:00" if text.endswith("Z") else text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time such as 2026-11-30 or 2026-11-30T12:00:00+01:00"
        ) from None
    return timestamp(when if when.tzinfo is not None else when.replace(tzinfo=timezone.utc))


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
    heads = [*by, "requests", "prompt", "output", "computed", "reused", "block-s", "compute s"]
    units = sorted(statement.total.cost)
    heads += units
    rows = [[*group, *_cells(sums, units)] for group, sums in sorted(statement.groups.items())]
    rows.append(["total", *[""] * (len(by) - 1), *_cells(statement.total, units)])
    return [
        *_table(heads, rows, len(by)),
        "",
        *_machine_page(statement),
        *_notes_page(statement),
    ]


def _cells(sums: Sums, units: Sequence[str]) -> list[str]:
    counts = sums.counts
    reused = sum(counts[f"reused_{whose}_tokens"] for whose in ("own", "group", "public"))
    return [
        *map(str, (sums.requests, counts["prompt_tokens"], counts["output_tokens"])),
        *map(str, (counts["computed_tokens"], reused)),
        _billionths(counts["held"] + counts["reserved"]),
        _billionths(counts["compute"]),
        *(_money(sums.cost.get(unit, Money())) for unit in units),
    ]


def _money(money: Money) -> str:
    return _billionths(money.memory + money.compute)


def _billionths(value: int) -> str:
    """A whole number of billionths, as a decimal number; nothing is rounded."""
    whole, rest = divmod(abs(value), 10**9)
    return f"{'-' if value < 0 else ''}{whole}.{rest:09}"


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


def _machine_page(statement: Statement) -> list[str]:
    machines = statement.machines
    if not machines.replicas:
        return ["No replica stated its account in this time: what stood idle is not known."]
    units = sorted(machines.cost)
    page = [f"{machines.replicas} replica(s), {machines.since} to {machines.until}", ""]
    memory = [machines.cost[unit].memory for unit in units]
    compute = [machines.cost[unit].compute for unit in units]
    states_are_known = machines.without_states < machines.replicas
    page += _account_page("memory", "block-s", machines.blocks, units, memory, 0, states_are_known)
    page.append("")
    page += _account_page("compute", "s", machines.time, units, compute, 1)
    return page


def _account_page(
    title: str,
    unit: str,
    account: Account,
    units: Sequence[str],
    costs: Sequence[Account],
    column: int,
    states_are_known: bool = True,
) -> list[str]:
    accounts = [account, *costs]
    rows = [
        [names[column], *(_billionths(getattr(each, line)) for each in accounts)]
        for line, names in _LINES.items()
        if names[column]
        and (states_are_known or line == "receipts")
        and (account.unknown or line != "unknown")
    ]
    if not states_are_known:
        rest = (_billionths(each.all - each.receipts) for each in accounts)
        rows.append(["free, cached, or on no receipt yet", *rest])
    rows.append(["all", *(_billionths(each.all) for each in accounts)])
    return _table([title, unit, *units], rows, 1)


def _notes_page(statement: Statement) -> list[str]:
    notes, machines = statement.notes, statement.machines
    told = {
        "line(s) were torn: a process was killed while it wrote, or writes now": notes.torn_lines,
        "line(s) could not be read, and are in no sum": notes.damaged_lines,
        "receipt(s) stand in the files more than once, and count once": notes.duplicates,
        "receipt(s) are missing: replicas counted them, and no file has them": notes.missing or 0,
        "receipt(s) were lost for lack of room, as replicas say": notes.lost,
        "request(s) have no numbers: their engine was gone": statement.total.without_numbers,
        "replica(s) have receipts and no account of their time": machines.without_account,
    }
    lines = [f"{count} {what}" for what, count in told.items() if count]
    return ["", *lines] if lines else []
