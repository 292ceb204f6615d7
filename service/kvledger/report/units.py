"""Numbers as people read them, and units that fit a chart's axis."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone

_BYTES = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("bytes", 1))
_SECONDS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))
_RATES = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0))


def bytes_unit(values: Sequence[float]) -> tuple[str, float]:
    """The largest unit in which the largest value is one or more."""
    return _fitting(_BYTES, values)


def seconds_unit(values: Sequence[float]) -> tuple[str, float]:
    """The same for seconds."""
    return _fitting(_SECONDS, values)


def bytes_text(value: float) -> str:
    """Such as 1.5 GiB."""
    unit, size = bytes_unit([value])
    return f"{figure(value / size)} {unit}"


def seconds_text(value: float | None) -> str:
    """Such as 12.5 ms; nothing of nothing."""
    if value is None:
        return ""
    unit, size = seconds_unit([value])
    return f"{figure(value / size)} {unit}"


def rate_text(value: float, unit: str) -> str:
    """Such as 1.5 Gop/s."""
    prefix, size = _fitting(_RATES, [value])
    return f"{figure(value / size)} {prefix}{unit}"


def figure(value: float) -> str:
    """Three figures, and never an exponent."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}" if abs(value) >= 0.001 else f"{value:.6f}"


def time_text(seconds: float) -> str:
    """A moment of UTC, to the second."""
    try:
        when = datetime.fromtimestamp(seconds, timezone.utc)
    except (ValueError, OverflowError, OSError):
        return "(no time)"
    return f"{when:%Y-%m-%d %H:%M:%S}"


def _fitting(units: Sequence[tuple[str, float]], values: Sequence[float]) -> tuple[str, float]:
    most = max((abs(value) for value in values), default=0.0)
    return next((each for each in units if most >= each[1]), units[-1])
