"""A line in the log for each time that admission becomes more careful, or less."""

from __future__ import annotations

from typing import Protocol

import structlog

_log = structlog.get_logger(__name__)


class Governed(Protocol):
    """What the core says of its governor (core/recompute_governor.h)."""

    @property
    def governor(self) -> tuple[int, int, int]:
        """Its level, and how often that was raised, and lowered."""

    @property
    def recomputed_share(self) -> float:
        """Of the recent work, the part that had been done before."""


class GovernorLog:
    """Tells each move once. Belongs to the engine's thread."""

    def __init__(self, core: Governed) -> None:
        self._core = core
        self._told = core.governor

    def look(self) -> None:
        """Tells the moves since the last look; a step makes one at most, unless it is very long."""
        now = self._core.governor
        if now == self._told:
            return
        _, raised_before, lowered_before = self._told
        level, raised, lowered = self._told = now
        share = round(self._core.recomputed_share, 4)
        for event, moves in (
            ("governor_raised", raised - raised_before),
            ("governor_lowered", lowered - lowered_before),
        ):
            for _ in range(moves):
                _log.info(event, level=level, recomputed_share=share)
