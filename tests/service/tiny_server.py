"""A whole server in the test's process that computes a tiny model with random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine_harness import BLOCK_STATES, RecordingCore
from server_harness import Log, ServerHarness, until
from stepping import settings

from kvledger import _core
from kvledger.rpc.connections import KEEPALIVE
from kvledger.served_model import load


class AuditingCore:
    """A core whose books are looked at after every call; it remembers nothing else."""

    def __init__(self, core: _core.Engine) -> None:
        self.core = core
        self.audits: list[str] = []
        self.balances = dict.fromkeys(BLOCK_STATES, 0)
        self.plans = 0
        self.preemptions = 0
        self.steps = 0
        self.prefill_steps_cut = 0  # steps whose last prompt was not read to its end

    def __getattr__(self, name: str) -> Any:
        return getattr(self.core, name)  # what changes no books

    def plan(self, *arguments: Any) -> Any:
        plan, report = self.core.plan(*arguments)
        self.plans += 1
        self.steps += 1 if plan.tokens else 0
        self.prefill_steps_cut += 1 if plan.logits < plan.sequences else 0
        self._look_at(report)
        return plan, report

    def commit(self, *arguments: Any) -> Any:
        return self._look_at(self.core.commit(*arguments))

    def abandon(self, *arguments: Any) -> Any:
        return self._look_at(self.core.abandon(*arguments))

    @property
    def in_use(self) -> int:
        """Blocks that somebody has: cached ones go to whoever needs room."""
        states = self.balances
        return sum(states.values()) - states["free"] - states["cached"]

    def _look_at(self, report: _core.Report) -> _core.Report:
        self.preemptions += len(report.preemptions)
        self.balances = dict(zip(BLOCK_STATES, report.balances.tolist(), strict=True))
        if wrong := self.core.audit():
            self.audits.append(wrong)
        return report


class TinyServer(ServerHarness):
    """A harness around a model that is loaded from a file and computed for real."""

    def __init__(
        self,
        path: Path,
        *arguments: str,
        core: Callable[[_core.Engine], Any] = RecordingCore,
        log: Any = None,
    ) -> None:
        self.keepalive = KEEPALIVE
        self.settings = settings(
            *("--listen", "127.0.0.1:0", "--operators-listen", "none"),
            *("--model", str(path), "--kv-format", "f32"),
            *arguments,
        )
        loaded = load(self.settings)
        self.core = core(loaded.core)
        self.model = replace(loaded, core=self.core)
        self.log = Log() if log is None else log
        self.gates = []
        self.ends = []

    async def require_all_free(self) -> None:
        """As above; what is cached is nobody's: whoever needs a block takes it."""
        await until(lambda: not self.server._admission.open_requests)
        await until(
            lambda: not any(self.core.balances[s] for s in ("reserved", "held", "releasing"))
        )
        assert self.core.audits == []
