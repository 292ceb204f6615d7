"""The parts of the view above the table: each is some lines of at most the terminal's width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.cells import cell_len
from rich.text import Text

from kvledger.top.blocks import FREE, RELEASING, cells
from kvledger.top.names import fit, fit_end, shown, wrapped
from kvledger.top.picture import Books, Finding, Frame, Load, Marks, Phase
from kvledger.top.words import Glyphs, count, percent, rate, size, span, time

LABEL = 10
_LABEL_STYLE = "cyan"
_BAD, _WARN, _GOOD = "bold red", "bold yellow", "green"
# From here on the pool is short, or nearly.
_HIGH, _FULL = 0.75, 0.95
_WATERLINES = 20  # how many of the last ones are drawn
# Columns from which on there is room for more than what matters most.
_WIDE = 110
_ADDRESS_LEAST = 16
# Lines for each text from which on there is room for what would not help.
_ROOMY = 3


@dataclass(frozen=True)
class Paper:
    """What is drawn on."""

    width: int
    glyphs: Glyphs

    def shown(self, text: str) -> str:
        """Text of others, harmless."""
        return shown(text, ascii_only=self.glyphs.ascii_only)

    def line(self, *parts: str | tuple[str, str] | Text) -> Text:
        """One line, cut at the width."""
        text = Text.assemble(*parts, no_wrap=True)
        if cell_len(text.plain) > self.width:
            text.truncate(self.width - 1)
            text.append(self.glyphs.cut)
        return text

    def labelled(self, label: str, *parts: str | tuple[str, str]) -> Text:
        """A line with a word before it."""
        return self.line((label.ljust(LABEL), _LABEL_STYLE), *parts)

    def paragraph(self, label: str, text: str, lines: int, style: str = "") -> list[Text]:
        """Text in at most so many lines beside a word."""
        found = wrapped(self.shown(text), self.width - LABEL, lines, self.glyphs.cut)
        return [
            self.labelled(label if place == 0 else "", (part, style))
            for place, part in enumerate(found)
        ]


def header(frame: Frame, paper: Paper) -> list[Text]:
    """Which server this is, and how old what is shown is."""
    late = frame.trouble or frame.books is None
    age = f"{frame.age:.1f} s old" if frame.age < 9.95 else f"{span(frame.age)} old"
    state = "no picture yet" if frame.books is None else age
    if frame.is_paused:
        state = f"PAUSED, {state}"
    right = paper.width - cell_len(state) - 2
    style = _BAD if late else _WARN if frame.is_paused else _GOOD
    title = fit(_title(frame, paper, right), right, paper.glyphs.cut)
    lines = [paper.line((title, "bold"), "  ", (state, style))]
    if frame.trouble:
        said = wrapped(paper.shown(frame.trouble), paper.width, 2, paper.glyphs.cut)
        lines += [
            paper.line((fit(part, paper.width, paper.glyphs.cut), "bold white on red"))
            for part in said
        ]
    return lines


def _title(frame: Frame, paper: Paper, room: int) -> str:
    """The most that fits; of a long address its end, which tells servers apart."""
    load, server = frame.load, paper.shown(frame.server)
    parts: list[tuple[str, ...]] = [("kvledger top",)]
    if load is not None:
        model, up = paper.shown(load.model), f"up {span(load.served)}"
        parts = [
            ("kvledger top", f"{model} {paper.shown(load.version)}", up),
            ("kvledger top", model, up),
            ("kvledger top", up),
        ]
    for each in parts:
        left = "  ".join(each)
        if (rest := room - cell_len(left) - 2) >= min(_ADDRESS_LEAST, cell_len(server)):
            return f"{left}  {fit_end(server, rest, paper.glyphs.cut)}"
    return "  ".join(parts[-1])


def memory(frame: Frame, books: Books, paper: Paper) -> list[Text]:
    """The waterline as a bar and in numbers."""
    glyphs, waterline = paper.glyphs, books.waterline
    style = _BAD if waterline >= _FULL else _WARN if waterline >= _HIGH else _GOOD
    course = "".join(
        glyphs.levels[min(len(glyphs.levels) - 1, int(each * len(glyphs.levels)))]
        for each in frame.waterlines[-_WATERLINES:]
    )
    said = f"{percent(waterline)} of {size(books.blocks * books.block_bytes)} "
    room = paper.width - LABEL - len(said) - 1 - _WATERLINES
    bar = _bar(books, room, glyphs)
    lines = [paper.labelled("memory", (said, style), *bar, " ", (course.rjust(_WATERLINES), style))]
    parts: list[str | tuple[str, str]] = []
    for mark, name, number, colour in _states(books, glyphs):
        if parts:
            parts.append("  ")
        parts += [(mark, colour), f" {name} {count(number)}"]
    if paper.width >= _WIDE and books.held_slots:
        empty = books.empty_slots / books.held_slots
        parts.append(f"  ({percent(empty)} of the slots in held blocks are empty)")
    length = sum(len(p if isinstance(p, str) else p[0]) for p in parts)
    return [*lines, paper.line(" " * max(0, min(LABEL, paper.width - length)), *parts)]


def _states(books: Books, glyphs: Glyphs) -> list[tuple[str, str, int, str]]:
    return [
        (glyphs.held, "held", books.held, "bold"),
        (glyphs.reserved, "reserved", books.reserved, "bold yellow"),
        (glyphs.releasing, "releasing", books.releasing, "magenta"),
        (glyphs.cached, "cached", books.cached, "cyan"),
        (glyphs.free, "free", books.free, "green"),
    ]


def _bar(books: Books, room: int, glyphs: Glyphs) -> list[tuple[str, str]]:
    """One mark for so many blocks; what there is of a state is seen, however little it is."""
    states = [state for state in _states(books, glyphs) if state[2] > 0]
    if not states or room < len(states):
        return []
    whole = sum(number for _, _, number, _ in states)
    widths = [max(1, round(number * room / whole)) for _, _, number, _ in states]
    widths[widths.index(max(widths))] += room - sum(widths)
    return [
        (mark * width, colour) for (mark, _, _, colour), width in zip(states, widths, strict=True)
    ]


def block_map(frame: Frame, books: Books, paper: Paper, rows: int) -> list[Text]:
    """Whose the blocks are."""
    found, each = cells(books, frame.letters, rows * paper.width)
    lines = []
    for first in range(0, len(found), paper.width):
        parts = []
        for cell, run in groupby(found[first : first + paper.width]):
            style = cell.colour or ("dim" if cell.mark == FREE else "magenta")
            if cell.is_live and cell.colour:
                style = f"bold black on {cell.colour}"
            parts.append((cell.mark * len(list(run)), style))
        lines.append(paper.line(*parts))
    cell_is = f"a cell is {count(each)} blocks" if each > 1 else "a cell is a block"
    key = (
        f"{cell_is} ({size(each * books.block_bytes)}): CAPITAL held, small cached, "
        f"{RELEASING} releasing, {FREE} free"
    )
    return [*lines, paper.line((key, "dim"))]


def requests(load: Load, paper: Paper) -> list[Text]:
    """Who runs and who waits."""
    tokens = f" ({count(load.waiting_tokens)} tokens)" if load.waiting else ""
    parts: list[str | tuple[str, str]] = [
        (f"{load.running} running", "bold"),
        f" in {load.sequences} of {load.sequences_max} places, ",
        (f"{load.paused} paused", _WARN if load.paused else ""),
        ", ",
        (f"{load.waiting} waiting", _WARN if load.waiting else ""),
        tokens if paper.width >= _WIDE else "",
        ", ",
        (f"{load.at_door} at the door", _WARN if load.at_door else ""),
    ]
    return [paper.labelled("requests", *parts)]


def phases(load: Load, paper: Paper) -> list[Text]:
    """What prefill and decode do, and what binds them."""
    idle = max(0.0, 1.0 - load.prefill.share - load.decode.share)
    head = (
        f"{f'last {load.seconds:.0f} s':<{LABEL}}{'time':>6}{'tokens/s':>10}"
        f"{'step median':>13}{'p99':>9}{'batch':>8}  bound by, of its peak"
    )
    if paper.width >= _WIDE:
        head += f"   (no step ran {percent(idle)} of the time)"
    return [
        paper.line((head, "dim")),
        _phase("prefill", load.prefill, paper),
        _phase("decode", load.decode, paper),
    ]


def _phase(name: str, phase: Phase, paper: Paper) -> Text:
    if phase.share == phase.tokens_per_second == 0:
        return paper.labelled(name, f"{'-':>6}{'-':>10}{'-':>13}{'-':>9}{'-':>8}")
    # Where all steps had the other phase too there are none to measure alone.
    median, p99 = (time(t) if t > 0 else "-" for t in (phase.step_median, phase.step_p99))
    figures = (
        f"{percent(phase.share):>6}{rate(phase.tokens_per_second):>10}{median:>13}{p99:>9}"
        f"{phase.sequences:>8.1f}  "
    )
    bound = f"{phase.bound_by} {percent(phase.of_peak)}" if phase.bound_by else "not measured"
    return paper.labelled(name, figures, (bound, "bold"))


def limits(load: Load, paper: Paper, lines: int, most: int) -> list[Text]:
    """What limits the service and what to change first: `most` findings, each text in `lines`."""
    if not load.findings:
        return paper.paragraph("limits", load.summary, lines, _GOOD)
    out: list[Text] = []
    for finding in load.findings[:most]:
        name = f"{paper.shown(finding.name)} {percent(finding.weight)}:"
        said = paper.paragraph("limits", f"{name} {finding.sentence}", lines)
        said[0].stylize(_BAD, LABEL, LABEL + len(name))
        out += [*said, *paper.paragraph("  first", finding.remedy, lines)]
        if lines >= _ROOMY and finding.in_vain:
            out += paper.paragraph("  not", finding.in_vain, lines)
    if others := load.findings[most:]:
        out.append(paper.labelled("  also", (_names(others, paper), _WARN)))
    return out


def _names(findings: Sequence[Finding], paper: Paper) -> str:
    return ", ".join(f"{paper.shown(each.name)} {percent(each.weight)}" for each in findings)


def losses(load: Load, paper: Paper) -> list[Text]:
    """Who was refused, and who lost its blocks; as many reasons as fit."""
    line = Text()
    for most in ((9, 9), (3, 3), (2, 2), (2, 1), (1, 2), (1, 1), (1, 0), (0, 0)):
        line = _losses(load, paper, *most)
        if cell_len(line.plain) <= paper.width:
            break
    return [paper.line(line)]


def _losses(load: Load, paper: Paper, most_refused: int, most_preempted: int) -> Text:
    refused, preempted = sum(load.refused.values()), sum(load.preempted.values())
    of = f" of {count(load.requests + refused)}" if refused and paper.width >= _WIDE else ""
    return Text.assemble(
        ("lost".ljust(LABEL), _LABEL_STYLE),
        (f"refused {count(refused)}{of}", _BAD if refused else ""),
        _reasons(load.refused, paper, most_refused),
        ", ",
        (f"preempted {count(preempted)}", _WARN if preempted else ""),
        _reasons(load.preempted, paper, most_preempted),
    )


def _reasons(counts: Mapping[str, int], paper: Paper, most: int) -> str:
    found = sorted((item for item in counts.items() if item[1]), key=lambda item: -item[1])
    if not found or not most:
        return ""
    named = ", ".join(f"{paper.shown(name)} {count(number)}" for name, number in found[:most])
    return f" ({named}{f' {paper.glyphs.cut}' if len(found) > most else ''})"


def trend(load: Load, paper: Paper) -> list[Text]:
    """Whether it gets worse."""
    if load.before is None:
        served = f"nothing to compare with yet: the server has served {span(load.served)}"
        return [paper.labelled("trend", (served, "dim"))]
    now, then, to = load.marks, load.before, paper.glyphs.to
    worse, better = _is_worse(then, now), _is_worse(now, then)
    verdict, style = (
        ("mixed", _WARN)
        if worse and better
        else ("WORSE", _BAD)
        if worse
        else ("better", _GOOD)
        if better
        else ("steady", "")
    )
    said = (
        f"waterline {_moved(percent(then.waterline), percent(now.waterline), to)}, waiting "
        f"{_moved(percent(then.waiting), percent(now.waiting), to)}, decode "
        f"{_moved(rate(then.decode_rate), rate(now.decode_rate), to)}/s"
    )
    if paper.width >= _WIDE:
        said += (
            f", p99 {_moved(time(then.decode_p99), time(now.decode_p99), to)}, refused "
            f"{_moved(percent(then.refused), percent(now.refused), to)}"
        )
    return [paper.labelled("trend", (verdict, style), f" in {span(load.ago)}: {said}")]


def _moved(then: str, now: str, to: str) -> str:
    return now if then == now else f"{then}{to}{now}"


def _is_worse(then: Marks, now: Marks) -> bool:
    """Whether somebody would notice."""
    slower = now.decode_p99 > 1.25 * then.decode_p99 > 0
    more = (
        now.waterline - then.waterline,
        now.waiting - then.waiting,
        now.refused - then.refused,
    )
    return slower or any(each > 0.05 for each in more)
