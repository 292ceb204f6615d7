"""How much of the processors other programs took during a measurement.

Other programs do not slow all servers alike. Where threads meet several times a layer, one thread
that lost its processor holds up the rest, and how much that costs depends on how they wait: a
comparison on a machine that is busy otherwise compares nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

# Above this share of the processors, figures are void.
SHARE_MAX = 0.05
_TICKS = os.sysconf("SC_CLK_TCK")


def group_seconds(group: int) -> float:
    """Processor time of all processes of a group so far."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(fields[2]) == group:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICKS


def busy_seconds(cores: Sequence[int], stat: str) -> float:
    """Time that some processors were not idle so far, from the text of /proc/stat.

    What a virtual machine's host took from it counts too: that is another program's as well.
    """
    names = {f"cpu{core}" for core in cores}
    ticks = 0
    for line in stat.splitlines():
        name, *fields = line.split()
        if name in names:
            user, nice, system, _idle, _waiting, interrupts, soft, stolen = map(int, fields[:8])
            ticks += user + nice + system + interrupts + soft + stolen
    return ticks / _TICKS


class Company:
    """Counts from when it is made."""

    def __init__(self, cores: Sequence[int], groups: Sequence[int]) -> None:
        self._cores, self._groups = cores, groups
        self._started = time.perf_counter()
        self._foreign = self._foreign_seconds()

    def _foreign_seconds(self) -> float:
        busy = busy_seconds(self._cores, Path("/proc/stat").read_text())
        return busy - time.process_time() - sum(map(group_seconds, self._groups))

    def share(self) -> float:
        """Share of the processors that neither the servers nor this program used."""
        seconds = (time.perf_counter() - self._started) * len(self._cores)
        return max(0.0, self._foreign_seconds() - self._foreign) / seconds

    def sentence(self) -> str:
        """The share, and what follows from it."""
        share = self.share()
        text = f"other programs used {share:.0%} of the processors meanwhile"
        return text if share <= SHARE_MAX else f"VOID: {text}; at most {SHARE_MAX:.0%} are allowed"
