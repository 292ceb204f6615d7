"""The whole picture, as lines: a function of what is shown and of the terminal's size."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from kvledger.top.names import fit
from kvledger.top.picture import Books, Frame
from kvledger.top.sections import (
    Paper,
    block_map,
    header,
    limits,
    losses,
    memory,
    phases,
    requests,
    trend,
)
from kvledger.top.table import table
from kvledger.top.words import Glyphs, count

WIDTH_LEAST, HEIGHT_LEAST = 60, 16
# Of the table: its head, and some rows that must be seen before anything else gets more room.
_TABLE_LEAST = 6
_MAP_ROWS = (2, 3, 4, 6, 8)

_HELP = (
    (
        "memory",
        "The waterline: blocks held, reserved or releasing, of all. Cached ones go when somebody "
        "needs room. At the right: the pictures before this one.",
    ),
    (
        "map",
        "Whose the blocks are, as in the table: first those under the waterline, then cached "
        "ones, then free ones. Owners keep their letters; * and + are all beyond the alphabet.",
    ),
    ("requests", "At the door: waiting for others of their own tenant to end (running_max)."),
    (
        "phases",
        "Time: of all time. Step times: of steps with that phase alone. Bound by memory's speed "
        "or arithmetic: how much of what the machine can do.",
    ),
    ("limits", "What limits the service and what to change first: more in kvledger diagnose."),
    ("trend", "Held against as long a time some minutes ago."),
    (
        "table",
        "share: held and reserved, of the pool. +-/s: blocks more or less a second. guar: "
        "guaranteed. max: the most it may have; yellow if it has that. wait: requests that never "
        "ran yet. asks: prompt tokens of its open requests. FLOODS: asks for most while "
        "others wait.",
    ),
    ("keys", "q quits, s sorts, p pauses, j, k and arrows move the table, ? shows the picture."),
)


def render(frame: Frame, width: int, height: int | None, glyphs: Glyphs) -> list[Text]:
    """Lines of at most `width` columns, exactly `height`; as many as it takes if that is None."""
    paper = Paper(width, glyphs)
    if height is None:
        return _body(frame, paper, None)
    if width < WIDTH_LEAST or height < HEIGHT_LEAST:
        return _too_small(paper, height)
    if frame.shows_help:
        lines = header(frame, paper)
        for label, text in _HELP:
            lines += paper.paragraph(label, text, height)
    else:
        lines = _body(frame, paper, height - 1)
    lines = lines[: height - 1]
    lines += [Text("")] * (height - 1 - len(lines))
    return [*lines, _footer(frame, paper)]


def _too_small(paper: Paper, height: int) -> list[Text]:
    words = f"kvledger top needs {WIDTH_LEAST} x {HEIGHT_LEAST}; this is {paper.width} x {height}"
    lines = [
        Text(words[first : first + paper.width])
        for first in range(0, len(words), max(1, paper.width))
    ]
    return lines[:height] + [Text("")] * (height - len(lines))


def _body(frame: Frame, paper: Paper, height: int | None) -> list[Text]:
    lines = header(frame, paper)
    if frame.books is None:
        return lines
    if height is None:
        above = _above(frame, frame.books, paper, map_rows=2, findings=99, lines=99)
        return [*lines, *above, *table(frame, frame.books, paper, None)]
    room = height - len(lines)
    above = _fitting(frame, frame.books, paper, room)
    return [*lines, *above, *table(frame, frame.books, paper, room - len(above))]


def _fitting(frame: Frame, books: Books, paper: Paper, room: int) -> list[Text]:
    """What stands above the table: the longest that leaves the table what it needs."""
    rows = 1 + max(1, sum(not owner.is_nobody for owner in books.owners))
    best = _above(frame, books, paper, map_rows=1, findings=1, lines=1, is_short=True)
    plans = [(1, 1, 1), (1, 1, 2)] + [
        (map_rows, findings, 2 if map_rows < 4 else 3)
        for map_rows, findings in zip(_MAP_ROWS, (1, 2, 3, 4, 5), strict=True)
    ]
    for map_rows, findings, texts in plans:
        above = _above(frame, books, paper, map_rows=map_rows, findings=findings, lines=texts)
        # Until the map has what it must, the table gets the least; then half of all.
        if len(above) + min(rows, _TABLE_LEAST if map_rows <= 2 else room // 2) > room:
            break
        best = above
    return best


def _above(
    frame: Frame,
    books: Books,
    paper: Paper,
    *,
    map_rows: int,
    findings: int,
    lines: int,
    is_short: bool = False,
) -> list[Text]:
    """All that stands above the table. `is_short` leaves out what is told elsewhere."""
    out = [*memory(frame, books, paper)]
    mapped = block_map(frame, books, paper, map_rows)
    out += mapped[:-1] if is_short else mapped
    load = frame.load
    if load is None:
        why = frame.load_trouble or "asked for, not there yet"
        return out + paper.paragraph("diagnosis", why, 2, "yellow")
    out += requests(load, paper) + phases(load, paper)
    out += limits(load, paper, lines, findings)
    if not is_short:
        out += losses(load, paper)
    out += trend(load, paper)
    if frame.load_trouble:
        out += paper.paragraph("diagnosis", frame.load_trouble, 1, "yellow")
    return out


def _footer(frame: Frame, paper: Paper) -> Text:
    keys = f" q quit   s sort: {frame.sort}   p {'go on' if frame.is_paused else 'pause'}   ? help"
    if frame.first:
        keys += f"   from row {count(frame.first + 1)}"
    return paper.line((fit(keys, paper.width, paper.glyphs.cut), "reverse"))


def plain(lines: Sequence[Text]) -> str:
    """The picture as text alone."""
    return "\n".join(line.plain.rstrip() for line in lines)
