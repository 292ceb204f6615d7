"""What the diagnosis takes for what the server was started with."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from server_harness import tiny

from kvledger.diagnosis.setup import processors, setup_of
from kvledger.machine.peaks import MachinePeaks
from kvledger.settings import load_settings


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


def test_only_what_was_measured_alone_is_a_measure() -> None:
    """Threads would be judged by what other programs left of them."""
    quiet = MachinePeaks(1e9, {"f32": 1e9}, 0.0, 0.99)
    busy = replace(quiet, processor_share=0.5)
    settings = load_settings(["--dev", "--threads", "2"])
    setup = setup_of(settings, tiny(), quiet, {1: quiet, 4: busy})
    assert setup.is_measured
    assert set(setup.by_threads) == {1}
    assert not setup_of(settings, tiny(), busy, {}).is_measured
