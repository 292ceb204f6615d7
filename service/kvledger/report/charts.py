"""What is common to the charts of a report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from kvledger.report.drawing import Size, colour, days, time_axis
from kvledger.report.recorded import Recorded
from kvledger.report.units import figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

NO_LOAD = (
    "Nothing is recorded of what steps did in this time: the files have no lines of load, which "
    "servers write since format 2 of the books, every ten seconds."
)


Shape: TypeAlias = Literal["area", "line", "dashed", "dotted", "point", "square"]


@dataclass(frozen=True)
class Key:
    """One entry of a legend."""

    colour: str  # a variable of the page's style
    name: str
    shape: Shape = "area"


@dataclass(frozen=True)
class Chart:
    """A figure and the numbers in it; or, in its place, what it lacks."""

    name: str
    title: str
    reading: str = ""  # how to read it, in a sentence
    figure: str = ""  # HTML
    keys: Sequence[Key] = ()
    heads: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = field(default_factory=list)
    missing: str = ""


@dataclass(frozen=True)
class Marks:
    """What all charts over time share: from when to when they go, and when replicas started and
    ended, in seconds since 1970."""

    first: float
    last: float
    starts: Sequence[float]
    ends: Sequence[float]

    @classmethod
    def of(cls, recorded: Recorded) -> Marks:
        """Those in the time between the first and the last bucket."""
        buckets = recorded.timeline.buckets()
        if not buckets:
            return cls(0.0, 0.0, (), ())
        width = recorded.timeline.width
        first, last = buckets[0][0] - width / 2, buckets[-1][0] + width / 2
        records = recorded.present
        starts = [each.started for each in records if each.started is not None]
        # One that wrote until the end of the time may go on behind it.
        ends = [each.last_at for each in records if each.last_at is not None and each.stopped]
        within = ([at for at in found if first <= at <= last] for found in (starts, ends))
        return cls(first, last, *within)

    def draw(self, axes: Axes) -> None:
        """As lines from bottom to top."""
        for moments, style in ((self.starts, (0, (1, 2))), (self.ends, (0, (6, 3)))):
            for moment in moments:
                axes.axvline(days(moment), color=colour("muted"), linestyle=style, linewidth=1.0)

    @property
    def keys(self) -> list[Key]:
        """For the legend."""
        found = [Key("muted", "a replica started", "dotted")] if self.starts else []
        return [*found, *([Key("muted", "a replica stopped", "dashed")] if self.ends else [])]


def over_time(
    axes: Axes,
    points: Sequence[tuple[float, float | None]],
    width: float,
    name: str,
    style: str = "-",
) -> None:
    """A line through values of buckets of `width` seconds; it breaks where nothing is known."""
    x: list[float] = []
    y: list[float] = []
    before: float | None = None
    for when, value in points:
        if before is not None and when - before > 2.5 * width:
            x.append(days(when))
            y.append(math.nan)
        if value is not None:
            x.append(days(when))
            y.append(value)
            before = when
    marker = "o" if len(x) <= 60 else ""
    axes.plot(x, y, style, color=colour(name), marker=marker, markersize=3.5)


def finish_time(
    axes: Axes, size: Size, marks: Marks, title: str, unit: str, panels: int = 1
) -> None:
    """What all panels over time have; `panels` is how many there are."""
    marks.draw(axes)
    time_axis(axes, 8 if size.is_wide and panels < 3 else 5, marks.first, marks.last)
    axes.set_title(title)
    axes.set_ylabel(unit)


def plain(axis: Axis) -> None:
    """Numbers without exponents at a logarithmic axis, several also where it is short."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = sorted(axis.get_view_interval())
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 500 * low else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: figure(value)))
    axis.set_minor_formatter(NullFormatter())
