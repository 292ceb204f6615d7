"""Books of servers that never ran: what their steps did is made up, and known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from book_writer import PRICES, SECOND, START, Writer, receipt

from kvledger import _core
from kvledger.books.lines import AccountTime, PoolAccount
from kvledger.books.load_lines import PHASES, Load, load_line
from kvledger.books.prices import Prices
from kvledger.diagnosis.counts import Counts, EngineCounts, PoolCounts
from kvledger.diagnosis.observation import Setup, phase_figures
from kvledger.diagnosis.setup_facts import facts_of
from kvledger.diagnosis.traffic import Crowd, TrafficCounts
from kvledger.machine.peaks import MachinePeaks
from kvledger.machine.utilization import ProcessorTimes
from kvledger.planning.floors import StepCosts

STATES = ("free", "reserved", "held", "cached", "releasing")
COSTS = StepCosts(
    layer_bytes=80_000_000,
    head_bytes=20_000_000,
    layer_operations={"q4_1": 2.0e8},
    head_operations={"q4_1": 5.0e7},
    key_operations=70_000.0,
    kv_token_bytes=23_040,
    peaks=MachinePeaks.given(20e9, 400e9),
)
SETUP = Setup(
    costs=COSTS,
    threads=8,
    processors=8,
    token_budget=256,
    sequences_max=32,
    blocks=100,
    block_tokens=32,
    step_stretch=2.0,
    prefill_step=0.2,
    tpot_target=None,
    reuses_prefixes=True,
    kv_format="bf16",
    by_threads={},
)


@dataclass
class Steps:
    """What a server did so far, as the core counts it."""

    phases: Any = field(default_factory=lambda: np.zeros((2, 5), np.int64))
    mixtures: Any = field(default_factory=lambda: np.zeros((3, 85), np.int64))
    batches: Any = field(default_factory=lambda: np.zeros((13, 85), np.int64))

    def decode(self, steps: int, seconds: float, sequences: int, context: int) -> None:
        """Steps that decode alone."""
        time = round(seconds * SECOND)
        tokens = steps * sequences
        self.phases[0] += [steps, steps * time, tokens, tokens * context, tokens]
        for row in (self.mixtures[0], self.batches[(sequences - 1).bit_length()]):
            self._book(row, steps, time, tokens)

    def prefill(self, steps: int, seconds: float, tokens: int, beside: int = 0) -> None:
        """Steps that compute prompts of so many tokens a step, alone or beside others."""
        time = round(seconds * SECOND)
        alone = time // 4 if beside else 0
        self.phases[1] += [steps, steps * (time - alone), steps * tokens,
                           steps * tokens * tokens // 2, steps]  # fmt: skip
        if beside:
            self.phases[0] += [steps, steps * alone, steps * beside, steps * beside * 300,
                               steps * beside]  # fmt: skip
        self._book(self.mixtures[2 if beside else 1], steps, time, steps * (tokens + beside))

    @property
    def time(self) -> int:
        """Nanoseconds of all of them."""
        return int(self.mixtures[:, 1].sum())

    @staticmethod
    def _book(row: Any, steps: int, time: int, tokens: int) -> None:
        row[:3] += [steps, steps * time, tokens]
        row[3 + int(np.searchsorted(_core.StepBooks.bounds, time))] += steps

    def counts(self, at: int, traffic: TrafficCounts) -> Counts:
        """As a server looks at them."""
        return Counts(
            at=at,
            phases=self.phases.copy(),
            mixtures=self.mixtures.copy(),
            batches=self.batches.copy(),
            forecast=np.zeros(4, np.int64),
            fits=np.zeros((2, 9)),
            preemptions=np.zeros(3, np.int64),
            waited=np.zeros(4, np.int64),
            engine=EngineCounts(self.time, self.time // 2, self.time // 10),
            pool=PoolCounts(0, 0, 0, 0, 0),
            processors=ProcessorTimes(0, 0, 0),
            traffic=traffic.copy(),
        )


class Planted(Writer):
    """A replica whose steps, memory and traffic a test makes up, ten seconds at a time."""

    def __init__(
        self,
        folder: Path,
        after: float = 0.0,
        prices: Prices | None = PRICES,
        setup: Setup = SETUP,
        block_bytes: int = 1 << 20,
    ) -> None:
        """It starts `after` seconds behind START."""
        super().__init__(
            folder,
            "small-model",
            prices,
            blocks=setup.blocks,
            block_bytes=block_bytes,
            started_at=START + timedelta(seconds=after),
            setup=facts_of(setup),
        )
        self.setup = setup
        self.elapsed = 0
        self.steps, self.traffic = Steps(), TrafficCounts()
        self.crowd = Crowd()
        self.states: Counter[str] = Counter()
        self.accounts: dict[tuple[bool, str], Counter[str]] = {}
        self._before = self.steps.counts(0, self.traffic)

    def passes(
        self,
        held: Mapping[str, int],
        cached: int = 0,
        scopes: Mapping[str, int] | None = None,
        seconds: float = 10.0,
    ) -> None:
        """Time in which tenants, and scopes, hold so many blocks each."""
        time = round(seconds * SECOND)
        self.elapsed += time
        for is_scope, holders in ((False, held), (True, scopes or {})):
            for name, blocks in holders.items():
                self.accounts.setdefault((is_scope, name), Counter())["held"] += blocks * time
                self.states["held"] += blocks * time
        self.states["cached"] += cached * time
        whole = self.setup.blocks * self.elapsed
        self.states["free"] = 0
        self.states["free"] = whole - self.states.total()

    def looks(self, last: bool = False) -> None:
        """Writes the lines of the pool and of load."""
        self.states_pool(last)
        self.states_load()

    def states_pool(self, last: bool = False) -> None:
        accounts = [
            AccountTime(name, is_scope, had["held"], 0, 0)
            for (is_scope, name), had in self.accounts.items()
        ]
        states = {name: self.states[name] for name in STATES}
        account = PoolAccount(self.elapsed, states, accounts)
        self.pool(self.elapsed, self.steps.time, pool=account, last=last)

    def states_load(self) -> None:
        now = self.steps.counts(self.elapsed, self.traffic)
        interval = now.since(self._before)
        figures = {
            name: phase_figures(self.setup.costs, interval, phase)
            for phase, name in enumerate(PHASES)
        }
        when = self.replica.started_at + timedelta(microseconds=self.elapsed // 1000)
        load = Load(now, self.crowd, 0)
        self.write(load_line(when, 0, self._before, load, figures))
        self._before = now

    def came(self, requests: int, waiting: float = 0.0, open_: float = 1.0, **refused: int) -> None:
        """Requests of the last ten seconds, and how many were here on average."""
        self.traffic.requests += requests
        self.traffic.open_time += round(open_ * 10 * SECOND)
        self.traffic.waiting_time += round(waiting * 10 * SECOND)
        self.traffic.refused.update(refused)
        self.crowd = Crowd(round(open_), round(waiting), 0)


def slower(setup: Setup) -> Setup:
    """The same server with another setting."""
    return replace(setup, sequences_max=16)


def ends_some(replica: Planted, tenants: Mapping[str, int], at: float) -> None:
    """A few requests of some tenants."""
    for tenant, weight in tenants.items():
        told = receipt(weight * 3 * SECOND + 7, weight * SECOND // 5 + 3)
        replica.ends(replace(told, prompt_tokens=100, reused_own=32), tenant, at)
