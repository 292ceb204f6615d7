"""How busy the operating system counts the processors: what every monitor shows.

A processor that waits for memory, or spins until another thread is ready, counts as busy. So this
stands beside what was computed, and does not replace it.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

_STAT = Path("/proc/stat")
# Fields of a line of processors in /proc/stat, proc(5): those in which it had nothing to do, and
# guests' time, which is in user's already.
_IDLE = (3, 4)
_FIELDS = 8


@dataclass(frozen=True)
class ProcessorTimes:
    """Nanoseconds of processors so far; those of the machine are 0 where nobody counts them."""

    own: int  # of this process, all its threads
    busy: int  # of the machine, whoever used it
    whole: int  # of the machine, used or not

    @classmethod
    def now(cls, stat: Path = _STAT) -> ProcessorTimes:
        """As they are."""
        own = time.process_time_ns()
        try:
            fields = stat.read_text("ascii").split("\n", 1)[0].split()[1 : 1 + _FIELDS]
            ticks = [int(field) for field in fields]
            idle = sum(ticks[place] for place in _IDLE)
        except (OSError, ValueError, IndexError):
            return cls(own, 0, 0)
        tick = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
        return cls(own, (sum(ticks) - idle) * tick, sum(ticks) * tick)

    def since(self, before: ProcessorTimes) -> ProcessorTimes:
        """What came after `before`."""
        return ProcessorTimes(
            self.own - before.own, self.busy - before.busy, self.whole - before.whole
        )
