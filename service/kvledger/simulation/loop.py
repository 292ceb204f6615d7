"""The real core under a virtual clock: plan, let some time pass, commit, step after step.

A step's tokens need no model: each output is as long as its request says, and then comes the token
that ends a text. No step loops over its sequences here, only over those whose state changed.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from kvledger import _core
from kvledger.arrivals import as_arrays, share_numbers
from kvledger.books.snapshot import STATES
from kvledger.engine import CoreEngine, make_core
from kvledger.jobs import EndReason, Job
from kvledger.sampling import SamplingParameters
from kvledger.scopes.prefix_scopes import NO_REUSE, PrefixScopes
from kvledger.simulation.costs import StepCost
from kvledger.simulation.faults import NO_FAULTS, Faults, FaultsDrawn
from kvledger.simulation.outcome import Ended, Outcome
from kvledger.simulation.traffic import END, WORD, Request, Tokens, Traffic
from kvledger.tenants.shares import CoreShare

_GREEDY = SamplingParameters()
_ANSWERED = (EndReason.STOP, EndReason.LENGTH, EndReason.CONTEXT)
# How far the clock can be set back, in seconds: the core's time is never negative.
_EPOCH = 1e6


@dataclass(frozen=True)
class CoreSettings:
    """What of a server's settings the core and its door look at; times in seconds."""

    blocks: int
    slots_per_block: int = 32
    context_tokens: int = 8192
    token_budget: int = 256
    sequences_max: int = 64
    priority_aging: float = 5.0
    tpot_target: float | None = None
    step_stretch: float = 2.0
    prefill_step: float = 0.05
    prefix_reuse: bool = True
    cost_growth: float = 0.0
    max_queued: int = 256
    # Whether admission looks ahead; a server's always does.
    forecast: bool = True


@dataclass(frozen=True)
class Run:
    """What else a run is made of."""

    seed: int = 1
    # Of a step's time, at most so much more or less.
    noise: float = 0.0
    # Seconds from the end of a step to the next one's plan.
    gap: float = 0.0
    faults: Faults = NO_FAULTS
    # The limit on their output that callers set; None is as much as fits.
    max_tokens: int | None = None
    # Callers ask for exactly their output's tokens, as benchmarks do, and the core knows it.
    exact: bool = False


PLAIN_RUN = Run()


class Standstill(RuntimeError):
    """Requests are open, nothing will happen any more, and nothing is computed: a fault of ours."""


@dataclass(slots=True)
class _Open:
    """A request until its receipt."""

    request: Request
    left: int  # tokens of output, as of when it had no row
    row: int | None = None
    first: float | None = None  # when its first token came


class Simulation:
    """One core, its clock, and who asks it. `now` is in seconds from 0, whatever the clock says."""

    def __init__(
        self,
        settings: CoreSettings,
        traffic: Traffic,
        costs: StepCost,
        run: Run = PLAIN_RUN,
        *,
        numbers: Mapping[str, int] | None = None,
        shares: Sequence[CoreShare] = (),
        step_times: Mapping[str, int] = MappingProxyType({}),
        core: CoreEngine | None = None,
        began: int = round(_EPOCH * 1e9),
    ) -> None:
        """`numbers` are tenants' numbers in the core, as `shares` have them; others get the next.
        `step_times` are nanoseconds of the longest step while a tenant decodes, where it has a
        target of its own.

        A `core` that is given must have been made of the same settings, before `began`.
        """
        self.now = 0.0
        self.outcome = Outcome(settings.blocks, traffic.tenants)
        self._settings, self._traffic, self._costs, self._run = settings, traffic, costs, run
        self._began = began
        self._core = core or _made(settings, run.seed, began)
        if shares:
            self._core.set_shares(share_numbers(shares), began)
        self._numbers = dict(numbers or {})
        self._step_times = step_times
        for name in traffic.tenants:
            self._numbers.setdefault(name, 1 + max(self._numbers.values(), default=-1))
        self._faults = FaultsDrawn(run.faults, run.seed)
        self._chance = random.Random(f"{run.seed}:noise")
        self._ahead = 0.0  # the clock, of the time that passed
        self._next = 1 if core is None else began  # never used before in that core either
        self._open: dict[int, _Open] = {}
        self._waiting: set[int] = set()  # those that had no place yet
        self._jobs: list[Job] = []
        self._leaving: list[tuple[float, int]] = []
        self._pausing: list[int] = []
        self._resuming: list[tuple[float, int]] = []
        self._stalls: dict[int, float] = {}  # seconds, from the first token on
        # By row: whose it is, tokens that its output has left, whether it has had none yet.
        self._owners: list[int] = [0] * settings.sequences_max
        self._left = np.zeros(settings.sequences_max, np.int64)
        self._silent = np.zeros(settings.sequences_max, np.bool_)

    @property
    def core(self) -> CoreEngine:
        """The engine, to look at."""
        return self._core

    @property
    def clock(self) -> int:
        """What the core is told, in nanoseconds."""
        return self._at(self.now)

    @property
    def open_requests(self) -> int:
        """Requests that came and have not ended."""
        return len(self._open)

    @property
    def live_blocks(self) -> int:
        """Blocks that are neither free nor cached."""
        blocks = dict(zip(STATES, self._core.books(self.clock).states["blocks"], strict=True))
        return self._settings.blocks - int(blocks["free"]) - int(blocks["cached"])

    def run(self, seconds: float = math.inf, steps: float = math.inf) -> Outcome:
        """Until all are answered, or so much has passed. What came of it so far."""
        while self.now < seconds and self.outcome.steps < steps and self.advance():
            pass
        return self.finish()

    def finish(self) -> Outcome:
        """Reads the core's books into the outcome."""
        self.outcome.close(self.now, self._core, self._core.books(self.clock))
        return self.outcome

    def cancel_all(self) -> None:
        """Ends whoever is open; for a core that is used again afterwards."""
        for job in self._jobs:
            del self._open[job.sequence]
        self._jobs = []
        ids = np.array(sorted(self._open), np.uint64)
        reasons = np.full(len(ids), EndReason.CANCELLED, np.uint8)
        self._note(self._core.plan(self.clock, None, ids, reasons)[1])

    def advance(self) -> bool:
        """One step, or the way to the next event; False when nothing will ever happen again."""
        self._arrive()
        if not self._open and not self._jobs:
            if self._traffic.next_at == math.inf:
                return False
            self.now = max(self.now, self._traffic.next_at)
            return True
        ends = self._due(self._leaving)
        resumes = self._due(self._resuming)
        pauses, self._pausing = self._pausing, []
        plan, report = self._core.plan(
            self.clock,
            as_arrays(self._jobs),
            np.array(ends, np.uint64),
            np.full(len(ends), EndReason.CANCELLED, np.uint8),
            np.array(pauses, np.uint64),
            np.array(resumes, np.uint64),
        )
        self._jobs = []
        self._note(report)
        if plan.tokens == 0:
            self._pass_time()
        else:
            self._compute(plan)
        return True

    def _compute(self, plan: _core.Plan) -> None:
        took = self._costs.seconds(plan) * self._faults.slower()
        if self._run.noise:
            took *= 1.0 + self._run.noise * self._chance.uniform(-1.0, 1.0)
        self.now += took
        if self._faults.fails():
            report = self._core.abandon(plan.step, self.clock)
            self.outcome.failed_steps += 1
        else:
            report = self._core.commit(plan.step, self._tokens(plan), None, self.clock)
        self._note(report)
        self.outcome.add_step(took, report)
        self.now += self._run.gap
        self._ahead = max(self._ahead + self._faults.jump(), -_EPOCH / 2)

    def _tokens(self, plan: _core.Plan) -> Tokens:
        """One for each that wants one: the last one of an output ends it."""
        rows = plan.logit_rows
        self._left[rows] -= 1
        tokens = np.full(len(rows), WORD, np.int32)
        tokens[self._left[rows] <= 0] = END
        for row in rows[self._silent[rows]].tolist():
            sequence = self._owners[row]
            self._open[sequence].first = self.now
            if sequence in self._stalls:
                self._pausing.append(sequence)
                heapq.heappush(self._resuming, (self.now + self._stalls.pop(sequence), sequence))
        self._silent[rows] = False
        return tokens

    def _arrive(self) -> None:
        """Takes in whoever has come by now; who finds the queue full is refused."""
        while self._traffic.next_at <= self.now:
            request = self._traffic.take()
            self.outcome.came += 1
            if len(self._waiting) >= self._settings.max_queued:
                self.outcome.refused["queue full"] += 1
                self._traffic.ended(request, self.now, False)
                continue
            self._accept(request)

    def _accept(self, request: Request) -> None:
        sequence, self._next = self._next, self._next + 1
        tenant, run = self._numbers[request.tenant], self._run
        limit = request.output if run.exact else run.max_tokens or self._settings.context_tokens
        self._jobs.append(
            Job(
                sequence=sequence,
                tenant=tenant,
                prompt=request.prompt,
                arrived_at=self._at(request.arrives),
                max_tokens=limit,
                sampling=_GREEDY,
                ignore_eos=run.exact,
                step_time_max=self._step_times.get(request.tenant, 0),
                scopes=PrefixScopes(own=tenant + 1) if self._settings.prefix_reuse else NO_REUSE,
            )
        )
        self._open[sequence] = _Open(request, request.output)
        self._waiting.add(sequence)
        if (seconds := self._faults.leaves_after()) is not None:
            heapq.heappush(self._leaving, (request.arrives + seconds, sequence))
        if (seconds := self._faults.stalls_for()) is not None:
            self._stalls[sequence] = seconds

    def _note(self, report: _core.Report) -> None:
        """Who lost or got a place, and who ended."""
        if report.is_empty:
            return
        for preemption in report.preemptions:
            entry = self._open[int(preemption["sequence"])]
            assert entry.row is not None
            entry.left, entry.row = int(self._left[entry.row]), None
        for sequence, row in report.admissions[["sequence", "row"]].tolist():
            entry = self._open[sequence]
            entry.row = row
            self._owners[row] = sequence
            self._left[row] = entry.left
            self._silent[row] = entry.first is None
            self._waiting.discard(sequence)
        if report.has_ends:
            for refusal in report.refusals:
                self._end(int(refusal["sequence"]), None)
            for receipt in report.receipts:
                self._end(int(receipt["sequence"]), receipt)

    def _end(self, sequence: int, receipt: np.void | None) -> None:
        entry = self._open.pop(sequence)
        self._waiting.discard(sequence)
        self._stalls.pop(sequence, None)
        if receipt is None:
            self.outcome.refused["too long"] += 1
            self._traffic.ended(entry.request, self.now, False)
            return
        ended = Ended.of(entry.request, entry.first, self.now, receipt)
        self.outcome.ended.append(ended)
        self._traffic.ended(entry.request, self.now, ended.reason in _ANSWERED)

    def _pass_time(self) -> None:
        """To the next event: nothing can be computed before it."""
        if not self._open:
            return
        events = [self._traffic.next_at, *(heap[0][0] for heap in self._heaps if heap)]
        if min(events) == math.inf:
            raise Standstill(
                f"nothing is computed although {len(self._open)} requests are open, at "
                f"{self.now:.6f} s of seed {self._run.seed}"
            )
        self.now = max(self.now, min(events))

    @property
    def _heaps(self) -> tuple[list[tuple[float, int]], ...]:
        return self._leaving, self._resuming

    def _due(self, heap: list[tuple[float, int]]) -> list[int]:
        """Sequences of a heap whose time has come, as far as they are still here.

        The core hears of ends before it hears of arrivals: who comes just now waits for its end.
        """
        due, later = [], []
        new = {job.sequence for job in self._jobs}
        while heap and heap[0][0] <= self.now:
            event = heapq.heappop(heap)
            if event[1] in new:
                later.append(event)
            elif event[1] in self._open:
                due.append(event[1])
        for event in later:
            heapq.heappush(heap, event)
        return due

    def _at(self, seconds: float) -> int:
        return self._began + round((seconds + self._ahead) * 1e9)


def _made(settings: CoreSettings, seed: int, began: int) -> CoreEngine:
    return make_core(
        blocks=settings.blocks,
        slots_per_block=settings.slots_per_block,
        context_tokens=settings.context_tokens,
        token_budget=settings.token_budget,
        sequences_max=settings.sequences_max,
        end_of_text=[END],
        priority_aging=settings.priority_aging,
        tpot_target=settings.tpot_target,
        step_stretch=settings.step_stretch,
        prefill_step=settings.prefill_step,
        prefix_reuse=settings.prefix_reuse,
        cost_growth=settings.cost_growth,
        forecast=settings.forecast,
        replayed=(seed, began),
    )
