"""Figures as SVG that is part of a page: its fonts, its colours in light and dark, no reference to
anything outside.

Made by matplotlib, which is asked for colours that stand for others: each becomes a variable of the
page's style. Every figure comes in a wide and in a narrow version, so that its texts can be read on
a telephone; the style shows one of them. No text of the books is ever drawn: names of tenants stand
in legends, which are HTML.
"""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from kvledger.errors import SettingRefused

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The page's variables, by the colour that stands for each while it is drawn.
SERIES = tuple(f"series-{number}" for number in range(1, 8))
_NAMES = (*SERIES, "rest", "cached", "ink", "muted", "grid", "ground")
_STAND_IN = {name: f"#fe01{number:02x}" for number, name in enumerate(_NAMES)}
_POINTS_PER_INCH = 72  # one of them is one unit of the SVG
_DAY = 86400.0


def colour(name: str) -> str:
    """What to draw with, so that the page shows it in a colour of its style."""
    return _STAND_IN[name]


@dataclass(frozen=True)
class Size:
    """Of a figure, in CSS pixels; its panels stand side by side, or one under the other."""

    name: str
    width: int
    panel_height: int
    is_wide: bool


WIDE = Size("wide", 860, 300, True)
NARROW = Size("narrow", 360, 250, False)

Draw = Callable[["Sequence[Axes]", Size], None]


def require_library() -> None:
    """Raises SettingRefused if figures cannot be drawn here."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise SettingRefused(
            "its charts need matplotlib, which is not installed; pip install 'kvledger[report]' "
            "(or matplotlib alone)"
        ) from None
    # It tells of caches that it makes, which is nothing that anybody asked for.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)


def drawn(name: str, title: str, description: str, panels: int, draw: Draw) -> str:
    """A figure of some panels in both sizes, as HTML."""
    return "".join(_svg(name, title, description, panels, draw, size) for size in (WIDE, NARROW))


def time_axis(axes: Axes, ticks: int, first: float, last: float) -> None:
    """Makes its x values, which are days since 1970, times of UTC, between two moments."""
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    axes.set_xlim(days(first), days(last))
    # With fewer of at most five there are lengths of time that it has no interval for.
    locator = AutoDateLocator(minticks=3 if ticks > 5 else 2, maxticks=ticks)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))


def days(seconds: float) -> float:
    """A moment as time axes have it."""
    return seconds / _DAY


def _svg(name: str, title: str, description: str, panels: int, draw: Draw, size: Size) -> str:
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    identity = f"{name}-{size.name}"
    rows, columns = (1, panels) if size.is_wide else (panels, 1)
    with matplotlib.rc_context(rc=_style(identity)):
        figure = Figure(
            figsize=(
                size.width / _POINTS_PER_INCH,
                rows * size.panel_height / _POINTS_PER_INCH,
            ),
            layout="constrained",
        )
        FigureCanvasSVG(figure)
        axes = figure.subplots(rows, columns, squeeze=False)
        draw(list(axes.flat), size)
        written = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(written, format="svg", transparent=True, metadata=nothing)
    return _inlined(written.getvalue(), identity, title, description, size)


def _style(salt: str) -> dict[str, object]:
    """Of all figures; without what a file of matplotlib's settings may say on this machine."""
    import matplotlib

    ink, muted, grid = (_STAND_IN[name] for name in ("ink", "muted", "grid"))
    # The backend is the one thing that setting it back would do something about.
    defaults = {key: value for key, value in matplotlib.rcParamsDefault.items() if key != "backend"}
    return {
        **defaults,
        "svg.fonttype": "none",
        "svg.hashsalt": salt,
        "font.size": 12,
        "axes.titlesize": 12,
        "axes.labelsize": 12,
        "text.color": ink,
        "axes.labelcolor": muted,
        "axes.titlecolor": ink,
        "axes.titlelocation": "left",
        "axes.edgecolor": muted,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": grid,
        "grid.linewidth": 0.8,
        "xtick.color": muted,
        "ytick.color": muted,
        "xtick.minor.size": 0,
        "ytick.minor.size": 0,
        "lines.linewidth": 1.8,
        "hatch.linewidth": 0.6,
        "timezone": "UTC",
        "date.epoch": "1970-01-01T00:00:00",
    }


def _inlined(text: str, identity: str, title: str, description: str, size: Size) -> str:
    """The figure's element, with a title and a description, and without what names the web."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<style\b.*?</style>", "", text, flags=re.DOTALL)
    text = text.replace("xlink:href", "href")
    text = re.sub(r"font: [\d.]+px [^;\"]*", lambda found: _font(found.group()), text)
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text)
    for name, stand_in in _STAND_IN.items():
        text = text.replace(stand_in, f"var(--{name})")
    text = re.sub(r' transform="rotate\(-0 [^"]*"', "", text)
    # A tenth of a pixel is more than anybody sees, and half of the bytes.
    text = re.sub(r' (?:d|x|y|transform)="[^"]*"', lambda found: _shorter(found.group()), text)
    # The same marker has one id in all figures, and a page has each id once.
    text = re.sub(r'( id="|"#|url\(#)', rf"\1{identity}-", text)
    # Ids of groups, which nothing refers to, would stand in the page many times.
    text = re.sub(r'<g id="[^"]*">', "<g>", text)
    text = re.sub(r"\s*\n\s*", "\n", text)
    opening, rest = text.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', opening)
    assert box is not None, "matplotlib writes one"
    return (
        f'<svg class="{size.name}" {box.group()} role="img" aria-labelledby="{identity}-title '
        f'{identity}-text"><title id="{identity}-title">{escape(title)}</title>'
        f'<desc id="{identity}-text">{escape(description)}</desc>{rest}'
    )


def _shorter(attribute: str) -> str:
    return re.sub(r"\d+\.\d+", lambda found: f"{float(found.group()):.1f}", attribute)


def _font(style: str) -> str:
    found = re.match(r"font: ([\d.]+)px", style)
    assert found is not None
    return f"font-size: {found.group(1)}px"
