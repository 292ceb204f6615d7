"""What the diagnosis takes for what the server was started with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvledger.diagnosis.setup import processors


@pytest.mark.parametrize(
    ("written", "allowed"),
    [
        ("max 100000", None),
        ("100000 100000", 1),
        ("50000 100000", 1),  # half of one is still one
        ("99900000 100000", None),
        ("nonsense", None),
    ],
)
def test_a_containers_limit_counts(tmp_path: Path, written: str, allowed: int | None) -> None:
    """An operator would be told to use processors that it has not got."""
    limit = tmp_path / "cpu.max"
    limit.write_text(written)
    assert processors(limit) == (allowed or len(os.sched_getaffinity(0)))


def test_without_such_a_limit_it_is_the_processors(tmp_path: Path) -> None:
    """Most machines have none."""
    assert processors(tmp_path / "none") == len(os.sched_getaffinity(0))
