"""How busy the operating system counts the processors."""

from __future__ import annotations

import time
from pathlib import Path

from kvledger.machine.utilization import ProcessorTimes

LINE = "cpu  100 10 50 800 40 5 5 10 99 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n"


def test_waiting_for_a_disk_is_not_work(tmp_path: Path) -> None:
    """A machine that waits would look full, and guests would count twice."""
    stat = tmp_path / "stat"
    stat.write_text(LINE)
    times = ProcessorTimes.now(stat)
    assert times.busy == 180 * 10_000_000
    assert times.whole == 1020 * 10_000_000
    stat.write_text(LINE.replace("100", "130", 1))
    assert ProcessorTimes.now(stat).since(times).busy == 30 * 10_000_000


def test_own_work_is_counted() -> None:
    """The server would seem to do nothing."""
    before = ProcessorTimes.now()
    ends = time.process_time() + 0.05
    while time.process_time() < ends:
        pass
    assert ProcessorTimes.now().since(before).own >= 40_000_000


def test_where_nobody_counts_there_is_nothing(tmp_path: Path) -> None:
    """Another operating system would end the diagnosis."""
    assert ProcessorTimes.now(tmp_path / "none").whole == 0
    nonsense = tmp_path / "stat"
    nonsense.write_text("what is this")
    assert ProcessorTimes.now(nonsense).busy == 0
