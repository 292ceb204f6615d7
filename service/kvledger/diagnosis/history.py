"""Counts of earlier moments, so that an interval of the past can be looked at."""

from __future__ import annotations

import bisect
from collections import deque

from kvledger.diagnosis.counts import Counts

_NANOS = 1_000_000_000
# From one kept moment to the next, in seconds, and how far back they go: each is some 15 KB. Older
# ones are kept at a coarser grain.
GRAIN = 5.0
_FINE = 360  # half an hour
_COARSE_EVERY = 24  # of the fine ones: two minutes
_COARSE = 800  # a day, and the interval before it


class History:
    """Belongs to the event loop's thread."""

    def __init__(self, first: Counts) -> None:
        """`first` are the counts when the server began to serve."""
        self._first = first
        self._fine: deque[Counts] = deque(maxlen=_FINE)
        self._coarse: deque[Counts] = deque(maxlen=_COARSE)
        self._notes = 0

    def note(self, counts: Counts) -> None:
        """Keeps a moment."""
        if self._notes % _COARSE_EVERY == 0:
            self._coarse.append(counts)
        self._notes += 1
        self._fine.append(counts)

    def served(self, now: Counts) -> float:
        """Seconds since the first moment."""
        return (now.at - self._first.at) / _NANOS

    def before(self, at: int) -> Counts:
        """The latest kept moment that is not after `at`; the first one if all are."""
        for kept in (self._fine, self._coarse):
            place = bisect.bisect_right(kept, at, key=lambda counts: counts.at)
            if place > 0:
                return kept[place - 1]
        # What is older than all that is kept is the oldest that is: the first moment of a server
        # that has served for weeks would make the interval weeks long.
        return self._coarse[0] if len(self._coarse) == _COARSE else self._first

    def interval(self, now: Counts, seconds: float, ago: float = 0.0) -> Counts:
        """What came in `seconds` that ended `ago` seconds before `now`, to the grain of what is
        kept; less where the server has not served so long."""
        end = now if ago <= 0 else self.before(now.at - round(ago * _NANOS))
        return end.since(self.before(end.at - round(seconds * _NANOS)))
