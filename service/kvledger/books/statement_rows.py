"""A statement as rows of texts, for whoever prints them: nothing in them is rounded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from kvledger.books.file_statement import Account, Machines, Money, Statement, Sums

# Heads, and rows with as many cells.
Rows: TypeAlias = tuple[list[str], list[list[str]]]

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


def sums_rows(statement: Statement, by: Sequence[str]) -> Rows:
    """What requests came to, by `by`, whose texts come first in each row; the last is of all."""
    heads = [*by, "requests", "prompt", "output", "computed", "reused", "block-s", "compute s"]
    units = sorted(statement.total.cost)
    heads += units
    rows = [[*group, *_cells(sums, units)] for group, sums in sorted(statement.groups.items())]
    rows.append(["total", *[""] * (len(by) - 1), *_cells(statement.total, units)])
    return heads, rows


def memory_rows(machines: Machines) -> Rows:
    """Where the block-time of the machines went, and what that cost."""
    units = sorted(machines.cost)
    costs = [machines.cost[unit].memory for unit in units]
    states_are_known = machines.without_states < machines.replicas
    heads = ["memory", "block-s", *units]
    return heads, _account_rows(machines.blocks, costs, 0, states_are_known)


def compute_rows(machines: Machines) -> Rows:
    """Where the machines' time went, and what that cost."""
    units = sorted(machines.cost)
    costs = [machines.cost[unit].compute for unit in units]
    return ["compute", "s", *units], _account_rows(machines.time, costs, 1)


def notes_of(statement: Statement) -> list[str]:
    """Sentences about what could not be read, or is not known."""
    notes, machines = statement.notes, statement.machines
    told = {
        "line(s) were torn: a process was killed while it wrote, or writes now": notes.torn_lines,
        "line(s) could not be read, and are in no sum": notes.damaged_lines,
        "line(s) are of a kind that a later version writes, and were passed over": (
            notes.unknown_lines
        ),
        "receipt(s) stand in the files more than once, and count once": notes.duplicates,
        "receipt(s) are missing: replicas counted them, and no file has them": notes.missing or 0,
        "receipt(s) were lost for lack of room, as replicas say": notes.lost,
        "request(s) have no numbers: their engine was gone": statement.total.without_numbers,
        "replica(s) have receipts and no account of their time": machines.without_account,
    }
    return [f"{count} {what}" for what, count in told.items() if count]


def billionths(value: int) -> str:
    """A whole number of billionths, as a decimal number; nothing is rounded."""
    whole, rest = divmod(abs(value), 10**9)
    return f"{'-' if value < 0 else ''}{whole}.{rest:09}"


def _cells(sums: Sums, units: Sequence[str]) -> list[str]:
    counts = sums.counts
    reused = sum(counts[f"reused_{whose}_tokens"] for whose in ("own", "group", "public"))
    return [
        *map(str, (sums.requests, counts["prompt_tokens"], counts["output_tokens"])),
        *map(str, (counts["computed_tokens"], reused)),
        billionths(counts["held"] + counts["reserved"]),
        billionths(counts["compute"]),
        *(_money(sums.cost.get(unit, Money())) for unit in units),
    ]


def _money(money: Money) -> str:
    return billionths(money.memory + money.compute)


def _account_rows(
    account: Account, costs: Sequence[Account], column: int, states_are_known: bool = True
) -> list[list[str]]:
    accounts = [account, *costs]
    rows = [
        [names[column], *(billionths(getattr(each, line)) for each in accounts)]
        for line, names in _LINES.items()
        if names[column]
        and (states_are_known or line == "receipts")
        and (account.unknown or line != "unknown")
    ]
    if not states_are_known:
        rest = (billionths(each.all - each.receipts) for each in accounts)
        rows.append(["free, cached, or on no receipt yet", *rest])
    rows.append(["all", *(billionths(each.all) for each in accounts)])
    return rows
