"""How exactly a tenant is told how long it waited."""

from __future__ import annotations

import pytest

from kvledger.rpc.translation import told_wait

MS = 1_000_000


@pytest.mark.parametrize(
    ("waited", "told"),
    [
        (0, 0),
        (1, 100 * MS),
        (100 * MS, 100 * MS),
        (100 * MS + 1, 200 * MS),
        (200 * MS, 200 * MS),
        (200 * MS + 1, 400 * MS),
        (399 * MS, 400 * MS),
        (401 * MS, 800 * MS),
        (3_600_000 * MS, 6_553_600 * MS),
    ],
)
def test_waits_are_rounded_up_to_doublings_of_a_tenth_of_a_second(waited: int, told: int) -> None:
    """What others do could be read off one's own receipts."""
    assert told_wait(waited) == told
