"""The table of owners: who has what of the pool, who waits, and how it changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from kvledger.top.blocks import OTHERS, by_memory
from kvledger.top.names import fit
from kvledger.top.picture import Books, Frame, Owner
from kvledger.top.sections import Paper
from kvledger.top.words import count, percent, rate

# How rows can be ordered, in the order of the key that changes it.
SORTS = ("memory", "cached", "waiting", "growth", "prompts", "name")
_NAME_LEAST = 12
_NAME_MOST = 40


@dataclass(frozen=True)
class _Rates:
    """What can be told of an owner only from two pictures, or from the load."""

    growth: Mapping[str, float]  # blocks a second, by key
    prompts: Mapping[str, float]  # tokens of open requests, by name
    blocks: int

    def growth_of(self, owner: Owner) -> float:
        return self.growth.get(owner.key, 0.0)

    def prompts_of(self, owner: Owner) -> float:
        is_asking = owner.kind == "tenant" and owner.is_served
        return self.prompts.get(owner.name, 0.0) if is_asking else 0.0


@dataclass(frozen=True)
class _Column:
    head: str
    width: int
    worth: int  # those worth least go first where there is no room
    text: Callable[[Owner, _Rates], str]


def _signed(number: float) -> str:
    return "" if abs(number) < 0.05 else ("+" if number > 0 else "-") + rate(abs(number))


def _or_dash(number: int) -> str:
    return count(number) if number else "-"


_COLUMNS = (
    _Column("held", 6, 9, lambda owner, rates: count(owner.held)),
    _Column("resv", 6, 4, lambda owner, rates: count(owner.reserved)),
    _Column("cached", 7, 7, lambda owner, rates: count(owner.cached)),
    _Column("share", 6, 9, lambda owner, rates: percent(owner.live / max(1, rates.blocks))),
    _Column("+-/s", 6, 6, lambda owner, rates: _signed(rates.growth_of(owner))),
    _Column("guar", 6, 3, lambda owner, rates: _or_dash(owner.guaranteed)),
    _Column("max", 6, 3, lambda o, rates: "-" if o.most is None else count(o.most)),
    _Column("open", 6, 8, lambda owner, rates: count(owner.open)),
    _Column("wait", 6, 8, lambda owner, rates: count(owner.waiting)),
    _Column("asks", 9, 5, lambda owner, rates: rate(rates.prompts_of(owner))),
)


def table(frame: Frame, books: Books, paper: Paper, room: int | None) -> list[Text]:
    """At most `room` lines, the head among them; all rows if it is None."""
    rates = _rates(frame, books)
    rows = ordered(frame, books, rates)
    columns = _columns(paper.width)
    name_width = min(_NAME_MOST, paper.width - 2 - sum(column.width for column in columns))
    head = "  " + "owner".ljust(name_width)
    head += "".join(column.head.rjust(column.width) for column in columns)
    lines = [paper.line((head, "bold underline"))]
    if not rows:
        lines.append(paper.line(("  no tenant has blocks or requests", "dim")))
    first = min(max(0, frame.first), max(0, len(rows) - 1))
    shown = rows[first:]
    if room is not None and len(shown) > room - 1:
        shown = shown[: max(0, room - 2)]
    lines += [_row(owner, frame, rates, columns, name_width, paper) for owner in shown]
    if rest := rows[first + len(shown) :]:
        lines.append(paper.line((_rest(rest, paper), "dim")))
    return lines


def ordered(frame: Frame, books: Books, rates: _Rates | None = None) -> list[Owner]:
    """Rows as they are shown: whoever floods is the first, whatever the order."""
    known = _rates(frame, books) if rates is None else rates
    keys: dict[str, Callable[[Owner], float | str]] = {
        "memory": lambda owner: 0,
        "cached": lambda owner: -owner.cached,
        "waiting": lambda owner: -owner.waiting,
        "growth": lambda owner: -known.growth_of(owner),
        "prompts": lambda owner: -known.prompts_of(owner),
        "name": lambda owner: owner.name,
    }
    rows = [owner for owner in by_memory(books.owners) if not owner.is_nobody]
    rows.sort(key=keys[frame.sort])
    return sorted(rows, key=lambda owner: not _floods(owner, frame))


def _rates(frame: Frame, books: Books) -> _Rates:
    growth: dict[str, float] = {}
    earlier = frame.earlier
    if earlier is not None and books.elapsed > earlier.elapsed:
        then = {owner.key: owner.live for owner in earlier.owners}
        passed = books.elapsed - earlier.elapsed
        growth = {o.key: (o.live - then.get(o.key, 0)) / passed for o in books.owners}
    load = frame.load
    prompts: dict[str, float] = {}
    if load is not None and load.seconds > 0:
        prompts = dict(load.open_tokens)
    return _Rates(growth, prompts, books.blocks)


def _columns(width: int) -> list[_Column]:
    columns = list(_COLUMNS)
    while columns and width - 2 - sum(column.width for column in columns) < _NAME_LEAST:
        columns.remove(min(columns, key=lambda column: column.worth))
    return columns


def _floods(owner: Owner, frame: Frame) -> bool:
    return (
        frame.load is not None
        and owner.kind == "tenant"
        and owner.is_served
        and owner.name == frame.load.flooding
    )


def _row(
    owner: Owner,
    frame: Frame,
    rates: _Rates,
    columns: list[_Column],
    name_width: int,
    paper: Paper,
) -> Text:
    has_blocks = bool(owner.live or owner.cached)
    letter, colour = frame.letters.get(owner.key, (OTHERS if has_blocks else " ", "white"))
    floods = _floods(owner, frame)
    name = paper.shown(owner.name)
    if owner.kind != "tenant":
        name = f"{owner.kind} {name}"
    tag = " FLOODS" if floods else "" if owner.is_served or owner.kind != "tenant" else " (gone)"
    name = fit(name, min(name_width - len(tag), cell_len(name)), paper.glyphs.cut) + tag
    text = "".join(column.text(owner, rates).rjust(column.width) for column in columns)
    is_at_most = owner.most is not None and owner.live + owner.cached >= owner.most
    style = "bold red" if floods else "yellow" if is_at_most else ""
    return paper.line(
        (letter, f"bold black on {colour}" if has_blocks and letter != OTHERS else ""),
        " ",
        (fit(name, name_width, paper.glyphs.cut), style),
        (text, style),
    )


def _rest(rest: list[Owner], paper: Paper) -> str:
    live = sum(owner.live for owner in rest)
    cached, waiting = (sum(getattr(o, name) for o in rest) for name in ("cached", "waiting"))
    return (
        f"{paper.glyphs.cut} {len(rest)} more: {count(live)} held or reserved, {count(cached)} "
        f"cached, {count(waiting)} waiting"
    )
