"""Two diagnoses side by side, in sentences."""

from __future__ import annotations

from kvledger.diagnosis.comparison import Picture, changes

STEP = "A step of decoding takes"


def picture(**rates: float) -> Picture:
    named = {STEP if name == "step" else name: (value, "ms") for name, value in rates.items()}
    return Picture(settings={}, rates=named, shares={}, sequences=1.0, figures={}, predictions=())


def test_what_differs_by_a_quarter_is_said() -> None:
    """An operator would look for what changed in two long lists."""
    assert changes(picture(step=14.1), picture(step=9.98)) == [f"{STEP} 14.1 ms, not 9.98."]
    assert changes(picture(step=14.1), picture(step=12)) != [f"{STEP} 14.1 ms, not 12."]


def test_what_was_not_counted_is_no_change() -> None:
    """Steps that nobody saw would be said to take no time at all."""
    assert changes(picture(step=14.1), picture()) == changes(picture(), picture(step=14.1))
    assert STEP not in changes(picture(step=14.1), picture())[0]
