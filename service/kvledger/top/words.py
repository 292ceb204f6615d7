"""Numbers as people read them, in few columns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Glyphs:
    """What is drawn with; all are one column wide."""

    held: str
    reserved: str
    releasing: str
    cached: str
    free: str
    cut: str
    to: str
    dot: str
    levels: str  # from nothing to all

    @property
    def ascii_only(self) -> bool:
        """Whether the terminal has nothing else."""
        return self.cut.isascii()


BLOCKS = Glyphs("█", "▓", "▒", "░", "·", "…", "→", "·", "▁▂▃▄▅▆▇█")
ASCII = Glyphs("#", "+", "~", ":", ".", ">", ">", "-", "_.,-=+*#")


def glyphs_for(encoding: str | None) -> Glyphs:
    """What a terminal with this encoding can draw."""
    return BLOCKS if (encoding or "").lower().replace("-", "") == "utf8" else ASCII


def count(number: float) -> str:
    """In at most five columns, below 10^13."""
    for size, unit in ((1, ""), (1e3, "k"), (1e6, "M"), (1e9, "G")):
        if round(number / size) < (100_000 if size == 1 else 10_000):
            return f"{number / size:.0f}{unit}"
    return f"{number / 1e12:.0f}T"


def rate(number: float) -> str:
    """A number that may be small, in at most five columns."""
    return f"{number:.1f}" if 0 < number < 99.95 else count(number)


def percent(share: float) -> str:
    """A share from 0 to 1."""
    return f"{share * 100:.0f}%"


def size(number: float) -> str:
    """Bytes."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= unit:
            value = number / unit
            return f"{value:.1f} {name}" if value < 99.95 else f"{value:.0f} {name}"
    return f"{number:.0f} B"


def time(seconds: float) -> str:
    """A short time, such as a step's."""
    if seconds >= 9.95:
        return f"{seconds:.0f} s"
    if seconds >= 0.9995:
        return f"{seconds:.1f} s"
    value = seconds * 1e3
    return f"{value:.0f} ms" if value >= 9.95 else f"{value:.1f} ms"


def span(seconds: float) -> str:
    """A long time, such as the server's."""
    whole = int(seconds)
    if whole < 120:
        return f"{whole} s"
    minutes, hours, days = whole // 60, whole // 3600, whole // 86_400
    if minutes < 120:
        return f"{minutes} min"
    if hours < 48:
        return f"{hours} h {minutes % 60} min"
    return f"{days} d {hours % 24} h"
