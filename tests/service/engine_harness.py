"""The engine's loop over the real core and a scripted model, and everything that it published."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scripted_model import END_OF_TEXT, PATIENCE, ScriptedModel

from kvledger import _core
from kvledger.engine import EndReason, Engine, Job, StepOutcome
from kvledger.sampling import Sampler, SamplingParameters

BLOCK_STATES = ("free", "reserved", "held", "cached", "releasing")


def make_core(**changes: Any) -> _core.Engine:
    """A small core engine."""
    settings: dict[str, Any] = {
        "blocks": 64,
        "slots_per_block": 8,
        "context_tokens": 256,
        "token_budget": 32,
        "sequences_max": 8,
        "end_of_text": [END_OF_TEXT],
        "now": time.monotonic_ns(),
    }
    return _core.Engine(**{**settings, **changes})


def without_forecast(patch: pytest.MonkeyPatch) -> None:
    """Lets servers admit whatever fits now: for tests that mean to fill the pool, or to preempt."""
    patch.setattr("kvledger.engine.CoreEngine", _engine_without_forecast)


def _engine_without_forecast(**settings: Any) -> _core.Engine:
    return _core.Engine(**{**settings, "forecast": False})


class RecordingCore:
    """A core that remembers, for each plan, who ended in it and how the blocks stood after it."""

    def __init__(self, core: _core.Engine) -> None:
        self.core = core
        self.plans = 0
        self.ended: list[tuple[int, int]] = []  # (plan, sequence) of every end that came in
        self.receipts: dict[int, int] = {}  # sequence to the plan in or after which it ended
        self.balances = dict.fromkeys(BLOCK_STATES, 0)
        self.steps: list[tuple[int, int]] = []  # decode tokens and all tokens of each step
        self.audits: list[str] = []
        self.paused: set[int] = set()

    @property
    def sequence_tokens_max(self) -> int:
        return self.core.sequence_tokens_max

    def plan(
        self, now: int, arrivals: Any = None, ids: Any = None, reasons: Any = None, *pausing: Any
    ) -> Any:
        self.plans += 1
        self.ended += [(self.plans, int(sequence)) for sequence in (() if ids is None else ids)]
        plan, report = self.core.plan(now, arrivals, ids, reasons, *pausing)
        if pausing:
            self.paused |= {int(sequence) for sequence in pausing[0]}
            self.paused -= {int(sequence) for sequence in pausing[1]}
        if plan.tokens:
            self.steps.append((plan.decode_tokens, plan.tokens))
        self._note(report)
        return plan, report

    def commit(self, *arguments: Any) -> Any:
        report = self.core.commit(*arguments)
        self._note(report)
        return report

    def abandon(self, *arguments: Any) -> Any:
        report = self.core.abandon(*arguments)
        self._note(report)
        return report

    def books(self, now: int) -> _core.Books:
        return self.core.books(now)

    def audit(self) -> str | None:
        return self.core.audit()

    @property
    def in_use(self) -> int:
        """Blocks that somebody has: cached ones go to whoever needs room."""
        states = self.balances
        return sum(states.values()) - states["free"] - states["cached"]

    @property
    def shareable_blocks(self) -> int:
        return self.core.shareable_blocks

    @property
    def compute_totals(self) -> tuple[int, int, int]:
        return self.core.compute_totals

    @property
    def prefix_counts(self) -> dict[str, int]:
        return self.core.prefix_counts

    @property
    def step_books(self) -> _core.StepBooks:
        return self.core.step_books

    @property
    def governor(self) -> tuple[int, int, int]:
        return self.core.governor

    @property
    def recomputed_share(self) -> float:
        return self.core.recomputed_share

    def set_shares(self, *arguments: Any) -> None:
        self.core.set_shares(*arguments)

    def purge(self, *arguments: Any) -> int:
        return self.core.purge(*arguments)

    def _note(self, report: _core.Report) -> None:
        for receipt in report.receipts:
            self.receipts[int(receipt["sequence"])] = self.plans
        self.balances = dict(zip(BLOCK_STATES, report.balances.tolist(), strict=True))
        if wrong := self.core.audit():
            self.audits.append(wrong)


class Harness:
    """An engine of its own; `close` it."""

    def __init__(self, **core_changes: Any) -> None:
        self.core = RecordingCore(make_core(**core_changes))
        self.model = ScriptedModel()
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.receipts: dict[int, list[Any]] = defaultdict(list)
        self.admitted: dict[int, int] = defaultdict(int)
        self.refused: list[int] = []
        self.deaths = 0
        self.publish_hook: Callable[[StepOutcome], None] = lambda outcome: None
        self._changed = threading.Condition()
        self.engine = Engine(
            self.core,  # type: ignore[arg-type]
            self.model,  # type: ignore[arg-type]
            Sampler(core_changes.get("sequences_max", 8)),
            self._publish,
            self._died,
        )

    def submit(self, sequence: int, prompt: str | list[int] = "a", **changes: Any) -> None:
        ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
        job: dict[str, Any] = {
            "tenant": 0,
            "prompt": np.array(ids, np.int32),
            "arrived_at": time.monotonic_ns(),
            "max_tokens": 4,
            "sampling": SamplingParameters(),
        }
        self.engine.submit(Job(sequence=sequence, **{**job, **changes}))

    def wait(self, until: Callable[[], object]) -> None:
        """Waits until something published makes it true."""
        with self._changed:
            assert self._changed.wait_for(until, PATIENCE), "it did not come"

    def receipt(self, sequence: int) -> Any:
        """The one receipt of a sequence, once it is there."""
        self.wait(lambda: self.receipts[sequence])
        (receipt,) = self.receipts[sequence]
        return receipt

    def reason(self, sequence: int) -> EndReason:
        return EndReason(int(self.receipt(sequence)["end_reason"]))

    def close(self) -> None:
        self.engine.stop(PATIENCE)

    def require_all_free(self) -> None:
        """Every block is back and the books are right."""
        assert self.core.audits == []
        others = {state: count for state, count in self.core.balances.items() if count}
        # Cached blocks are nobody's: whoever needs one takes it.
        assert set(others) - {"cached"} == {"free"}, others

    def _publish(self, outcome: StepOutcome) -> None:
        report = outcome.report
        with self._changed:
            for admission in report.admissions:
                self.admitted[int(admission["sequence"])] += 1
            for sequence, token, _ in report.tokens.tolist():
                self.tokens[sequence].append(token)
            for receipt in report.receipts:
                self.receipts[int(receipt["sequence"])].append(receipt)
            self.refused += [int(refusal["sequence"]) for refusal in report.refusals]
            self._changed.notify_all()
        self.publish_hook(outcome)

    def _died(self) -> None:
        with self._changed:
            self.deaths += 1
            self._changed.notify_all()
