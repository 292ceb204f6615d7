"""The arithmetic of what the books cost."""

from __future__ import annotations

import pytest
from bench.books_price import CoreLoad, counted, ratio_of, shares, shares_text, turns


def test_arms_take_turns_so_that_a_trend_cancels() -> None:
    """A machine that becomes slower would make the arm that always comes second dearer."""
    assert list(turns(3)) == [
        *((0, True), (0, False)),
        *((1, False), (1, True)),
        *((2, True), (2, False)),
    ]


def test_an_interval_is_about_the_median_and_narrows() -> None:
    """A ratio that chance made would be quoted as a price."""
    few = ratio_of([0.9, 1.0, 1.1])
    assert (few.least, few.median, few.most) == (0.9, 1.0, 1.1)
    many = ratio_of([0.9, 1.0, 1.1] + [1.0] * 30)
    assert (many.least, many.median, many.most) == (1.0, 1.0, 1.0)
    shifted = ratio_of([1.2, 1.21, 1.22, 1.23, 1.24])
    assert 1.0 < shifted.least <= shifted.median <= shifted.most
    assert ratio_of([1.2, 1.3, 1.25]) == ratio_of([1.2, 1.3, 1.25]), "the same for the same seed"


PAGE = """\
# HELP kvledger_books_seconds_total Time.
# TYPE kvledger_books_seconds_total counter
kvledger_books_seconds_total{part="core"} %s
kvledger_books_seconds_total{part="records"} %s
# HELP kvledger_engine_step_seconds_total Time.
# TYPE kvledger_engine_step_seconds_total counter
kvledger_engine_step_seconds_total %s
"""


def test_the_share_is_of_the_time_between_two_looks() -> None:
    """What starting took would stand in the share of serving."""
    before = counted(PAGE % (1.0, 2.0, 10.0))
    after = counted(PAGE % (1.25, 2.5, 110.0))
    parts = shares(before, after)
    assert parts == pytest.approx({"core": 0.0025, "records": 0.005, "all": 0.0075})
    assert "0.750%" in shares_text(parts)
    assert "kept" in shares_text(parts)
    assert "MISSED" in shares_text({**parts, "all": 0.011})


def test_the_core_alone_keeps_its_books_while_requests_come_and_end() -> None:
    """The price would be that of an engine that does nothing."""
    timed, untimed = CoreLoad(8, True), CoreLoad(8, False)
    for load in (timed, untimed):
        load.run(100)
        assert load.receipts > 8
    assert timed.receipts == untimed.receipts
    assert untimed.books_seconds == 0
    assert 0 < timed.books_seconds < timed.seconds
