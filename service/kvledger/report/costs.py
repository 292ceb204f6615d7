"""What each tenant cost, as bars: money where there are prices, else what it is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvledger.books.file_statement import Money, Statement, Sums
from kvledger.books.statement_rows import billionths

TENANTS_MAX = 20


@dataclass(frozen=True)
class Bar:
    """One tenant's: its parts in percent of the longest bar."""

    name: str
    text: str
    parts: Sequence[float]


@dataclass(frozen=True)
class Bars:
    """Those with most, and all others as one."""

    title: str
    parts: Sequence[str]  # what the parts of a bar are
    rows: Sequence[Bar]


def cost_bars(statement: Statement) -> list[Bars]:
    """Of a statement by tenant."""
    if not statement.groups:
        return []

    def priced(unit: str) -> Callable[[Sums], tuple[int, ...]]:
        def parts(sums: Sums) -> tuple[int, ...]:
            money = sums.cost.get(unit, Money())
            return money.memory, money.compute

        return parts

    units = sorted(statement.total.cost)
    if units:
        return [
            _bars(statement, f"{unit} by tenant", ("memory", "compute"), priced(unit))
            for unit in units
        ]
    return [
        _bars(statement, "Block-seconds by tenant", ("held or reserved",), _block_time),
        _bars(statement, "Seconds of compute by tenant", ("compute",), _compute),
    ]


def _block_time(sums: Sums) -> tuple[int, ...]:
    return (sums.counts["held"] + sums.counts["reserved"],)


def _compute(sums: Sums) -> tuple[int, ...]:
    return (sums.counts["compute"],)


def _bars(
    statement: Statement,
    title: str,
    names: Sequence[str],
    parts_of: Callable[[Sums], tuple[int, ...]],
) -> Bars:
    found = sorted(
        ((parts_of(sums), tenant) for (tenant,), sums in statement.groups.items()),
        key=lambda each: (-sum(each[0]), each[1]),
    )
    shown, rest = found[:TENANTS_MAX], found[TENANTS_MAX:]
    if rest:
        others = tuple(map(sum, zip(*(parts for parts, _ in rest), strict=True)))
        shown.append((others, f"{len(rest)} other tenants"))
    most = max(sum(parts) for parts, _ in shown)
    rows = [
        Bar(name, billionths(sum(parts)), [_percent(part, most) for part in parts])
        for parts, name in shown
    ]
    return Bars(title, names, rows)


def _percent(part: int, whole: int) -> float:
    return round(100 * part / whole, 2) if whole else 0.0
