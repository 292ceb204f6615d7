"""How careful admission is, and how often that changed (core/recompute_governor.h)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvledger.metrics.clock import BooksClock
from kvledger.metrics.families import counter, gauge


class GovernorMetrics(Collector):
    """Families about the margin that admission keeps. Any thread may collect."""

    def __init__(self, governor: Callable[[], tuple[int, int, int]], clock: BooksClock) -> None:
        """`governor` has the level, and how often it was raised and lowered since the start."""
        self._governor = governor
        self._clock = clock

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering looks at nobody's counts."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """The families now."""
        with self._clock.scraping():
            level, raised, lowered = self._governor()
            return [
                gauge(
                    "kvledger_governor_level",
                    "How much more room than expected admission leaves, from 0, where little is "
                    "computed again, to 3.",
                    (),
                    {(): level},
                ),
                counter(
                    "kvledger_governor_moves",
                    "Times that the level was raised, because more than 2 % of the tokens were "
                    "computed again, or lowered, because less than 0.5 % were.",
                    ["direction"],
                    {("raised",): raised, ("lowered",): lowered},
                ),
            ]
