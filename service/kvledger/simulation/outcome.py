"""What came of a run, and its figures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from kvledger import _core
from kvledger.books.load_lines import PREEMPTIONS, WAITS
from kvledger.books.snapshot import STATES
from kvledger.engine import CoreEngine
from kvledger.jobs import EndReason
from kvledger.simulation.traffic import Request

_LIVE = ("reserved", "held", "releasing")


class Ended(NamedTuple):
    """One request that had a receipt; times in seconds from the start of the run."""

    tenant: str
    arrived: float
    first: float | None  # when its first token came
    ended: float
    prompt: int
    output: int
    reason: EndReason
    computed: int  # tokens
    recomputed: int  # of them, computed before and lost to a preemption
    reused: int  # tokens that the prefix index had
    preemptions: int
    held: float  # block-seconds

    @classmethod
    def of(cls, request: Request, first: float | None, now: float, receipt: np.void) -> Ended:
        """What its receipt says."""
        return cls(
            request.tenant,
            request.arrives,
            first,
            now,
            int(receipt["prompt_tokens"]),
            int(receipt["output_tokens"]),
            EndReason(int(receipt["end_reason"])),
            int(receipt["computed_tokens"]),
            int(receipt["recomputed_tokens"]),
            int(receipt["reused_own"]) + int(receipt["reused_shared"]),
            int(receipt["preemptions"]),
            int(receipt["held_seconds"]) + int(receipt["held_nanos"]) / 1e9,
        )

    @property
    def is_answered(self) -> bool:
        """Whether it ended as it should."""
        return self.reason not in (EndReason.CANCELLED, EndReason.FAILED)

    @property
    def ttft(self) -> float | None:
        """Seconds until its first token."""
        return None if self.first is None else self.first - self.arrived

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None where there is none."""
        if self.first is None or self.output < 2:
            return None
        return (self.ended - self.first) / (self.output - 1)


@dataclass(frozen=True)
class Targets:
    """What a request must keep to count as good, in seconds; None: anything is good enough."""

    ttft: float | None = None
    tpot: float | None = None

    def keeps(self, ended: Ended) -> bool:
        """Whether it was answered in time."""
        if not ended.is_answered or ended.ttft is None:
            return False
        if self.ttft is not None and ended.ttft > self.ttft:
            return False
        return self.tpot is None or ended.tpot is None or ended.tpot <= self.tpot


@dataclass
class Outcome:
    """What was counted; `close` adds what the core's books have."""

    blocks: int
    tenants: Sequence[str]
    ended: list[Ended] = field(default_factory=list)
    came: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    failed_steps: int = 0
    step_seconds: float = 0.0
    running: int = 0  # summed over steps
    live_most: int = 0  # blocks
    seconds: float = 0.0
    states: Mapping[str, float] = field(default_factory=dict)  # shares of the pool, on average
    preemptions: Mapping[str, int] = field(default_factory=dict)  # by reason
    waited: Mapping[str, float] = field(default_factory=dict)  # shares of the steps' time
    governor: tuple[int, int, int] = (0, 0, 0)
    # What disagrees in the books; None as it should be.
    audit: str | None = None

    def add_step(self, seconds: float, report: _core.Report) -> None:
        """A step that took so long, and the report after it."""
        self.steps += 1
        self.step_seconds += seconds
        self.running += report.running
        free, _, _, cached, _ = report.balances.tolist()
        self.live_most = max(self.live_most, self.blocks - free - cached)

    def close(self, seconds: float, core: CoreEngine, books: _core.Books) -> None:
        """The run is over after so many seconds."""
        self.seconds = seconds
        times = {
            name: int(row["seconds"]) + int(row["nanos"]) / 1e9
            for name, row in zip(STATES, books.states, strict=True)
        }
        whole = sum(times.values())
        self.states = {name: time / whole if whole else 0.0 for name, time in times.items()}
        steps = core.step_books
        self.preemptions = dict(zip(PREEMPTIONS, steps.preemptions.tolist(), strict=True))
        self.waited = {
            name: time / 1e9 / self.step_seconds if self.step_seconds else 0.0
            for name, time in zip(WAITS, steps.waited.tolist(), strict=True)
        }
        self.governor = core.governor
        self.audit = core.audit()

    def figures(self, targets: Targets = Targets()) -> dict[str, Any]:
        """All that is told of a run, for a table and for programs."""
        answered = [each for each in self.ended if each.is_answered]
        good = [each for each in self.ended if targets.keeps(each)]
        output = sum(each.output for each in self.ended)
        computed = sum(each.computed for each in self.ended)
        reasons = Counter(each.reason for each in self.ended)
        seconds = self.seconds or math.nan
        return {
            "requests": self.came,
            "answered": len(answered),
            "cancelled": reasons[EndReason.CANCELLED],
            "failed": reasons[EndReason.FAILED],
            "refused": dict(self.refused),
            "seconds": self.seconds,
            "steps": self.steps,
            "busy": self.step_seconds / seconds,
            "sequences_per_step": self.running / max(1, self.steps),
            "requests_per_second": len(answered) / seconds,
            "tokens_per_second": output / seconds,
            "good_tokens_per_second": sum(each.output for each in good) / seconds,
            "good_requests": len(good) / max(1, self.came),
            "ttft": quantiles(each.ttft for each in answered),
            "tpot": quantiles(each.tpot for each in answered),
            "waterline": sum(self.states.get(name, 0.0) for name in _LIVE),
            "waterline_most": self.live_most / self.blocks,
            "cached": self.states.get("cached", 0.0),
            "reused": sum(each.reused for each in self.ended)
            / max(1, sum(each.prompt for each in self.ended)),
            "preemptions": sum(self.preemptions.values()),
            "preemptions_by_reason": dict(self.preemptions),
            "preemptions_of_one": max((each.preemptions for each in self.ended), default=0),
            "recomputed": sum(each.recomputed for each in self.ended) / max(1, computed),
            "waited": dict(self.waited),
            "tenants": self._by_tenant(targets),
            "audit": self.audit or "clean",
        }

    def _by_tenant(self, targets: Targets) -> dict[str, dict[str, Any]]:
        mine: dict[str, list[Ended]] = {name: [] for name in self.tenants}
        for each in self.ended:
            mine[each.tenant].append(each)
        tokens = {name: sum(e.prompt + e.output for e in ended) for name, ended in mine.items()}
        held = {name: sum(e.held for e in ended) for name, ended in mine.items()}
        all_tokens, all_held = sum(tokens.values()) or 1, sum(held.values()) or 1.0
        return {
            name: {
                "requests": len(ended),
                "tokens": tokens[name] / all_tokens,
                "memory": held[name] / all_held,
                "good_requests": sum(map(targets.keeps, ended)) / max(1, len(ended)),
                "ttft": quantiles(e.ttft for e in ended if e.is_answered),
            }
            for name, ended in mine.items()
        }


def quantiles(values: Iterable[float | None]) -> dict[str, float | None]:
    """Median and 99th percentile (nearest rank), in seconds; None of none."""
    ordered = sorted(value for value in values if value is not None)
    return {
        f"p{percent}": ordered[math.ceil(percent / 100 * len(ordered)) - 1] if ordered else None
        for percent in (50, 99)
    }
