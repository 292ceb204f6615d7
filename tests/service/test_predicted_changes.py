"""Predictions against what the core then does, in simulated time: the same on every machine."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
from test_findings import COSTS, SETUP

from kvledger.arrivals import as_arrays
from kvledger.books.snapshot import STATES
from kvledger.diagnosis.counts import Counts, EngineCounts, PoolCounts
from kvledger.diagnosis.observation import Observation, observe
from kvledger.diagnosis.predictions import Change, Kind, Model, fit, predicted
from kvledger.diagnosis.traffic import TrafficCounts
from kvledger.engine import Job, make_core
from kvledger.machine.utilization import ProcessorTimes
from kvledger.sampling import SamplingParameters

NANOS = 1_000_000_000
SECONDS = 60.0
BLOCK = 32


@dataclass(frozen=True)
class Callers:
    """As many requests as there are callers, at any time; tokens on average, lengths from half of
    it to half as much again."""

    count: int
    prompt: int
    output: int


@dataclass(frozen=True)
class Settings:
    max_sequences: int = 32
    token_budget: int = 512
    kv_blocks: int = 1024
    step_stretch: float = 2.0


def step_seconds(decoding: int, prompt: int, noise: float) -> float:
    """What a step takes: not in proportion to the floors that the diagnosis knows."""
    whole = 0.005 + 0.0014 * decoding + (0.0015 + 0.0005 * prompt if prompt else 0.0)
    return whole * (1.0 + 0.1 * noise)


class SimulatedServer:
    """The core, a clock, and callers who ask again as soon as they are answered."""

    def __init__(self, settings: Settings, callers: Callers) -> None:
        self._settings, self._callers = settings, callers
        self._random = random.Random(1)
        self._core = make_core(
            blocks=settings.kv_blocks,
            slots_per_block=BLOCK,
            context_tokens=8192,
            token_budget=settings.token_budget,
            sequences_max=settings.max_sequences,
            end_of_text=[2],
            priority_aging=5.0,
            tpot_target=None,
            step_stretch=settings.step_stretch,
            prefill_step=0.05,
        )
        # The core's own clock began when it was made.
        self._began = self._now = time.monotonic_ns()
        self._traffic = TrafficCounts()
        self._numbers = iter(range(1, 1 << 30))
        self._jobs = [self._job() for _ in range(callers.count)]
        self._step_time = 0

    def _job(self) -> Job:
        callers, chance = self._callers, self._random
        prompt = chance.randint(callers.prompt // 2, callers.prompt * 3 // 2)
        self._traffic.requests += 1
        self._traffic.prompt_tokens["a"] += prompt
        return Job(
            sequence=next(self._numbers),
            tenant=1,
            prompt=np.full(prompt, 5, np.int32),
            arrived_at=self._now,
            max_tokens=chance.randint(callers.output // 2, callers.output * 3 // 2),
            sampling=SamplingParameters(),
            ignore_eos=True,
        )

    def run(self) -> None:
        """Some time of it."""
        while self._now < self._began + SECONDS * NANOS:
            plan, _ = self._core.plan(self._now, as_arrays(self._jobs))
            prompt = plan.tokens - plan.decode_tokens
            took = step_seconds(plan.decode_tokens, prompt, self._random.random())
            passed = round(took * NANOS)
            self._now += passed
            tokens = np.full(plan.logits, 7, np.int32)
            report = self._core.commit(plan.step, tokens, None, self._now)
            self._step_time += passed
            self._traffic.open_time += passed * self._callers.count
            self._traffic.waiting_time += passed * (self._callers.count - report.running)
            self._traffic.ended += len(report.receipts)
            self._jobs = [self._job() for _ in report.receipts]

    @property
    def counts(self) -> Counts:
        books, steps = self._core.books(self._now), self._core.step_books
        pool = {
            name: int(row["seconds"]) * NANOS + int(row["nanos"])
            for name, row in zip(STATES, books.states, strict=True)
        }
        return Counts(
            at=books.elapsed,
            phases=steps.phases,
            mixtures=steps.mixtures,
            batches=steps.batches,
            forecast=steps.forecast,
            fits=steps.fits,
            preemptions=steps.preemptions,
            waited=steps.waited,
            engine=EngineCounts(self._step_time, self._step_time, 0),
            pool=PoolCounts(**pool),
            processors=ProcessorTimes(0, 0, 0),
            traffic=self._traffic,
        )


@cache
def served(settings: Settings, callers: Callers) -> tuple[Observation, Model]:
    """What a server's diagnosis would be made of."""
    server = SimulatedServer(settings, callers)
    server.run()
    setup = replace(
        SETUP,
        costs=COSTS,
        token_budget=settings.token_budget,
        sequences_max=settings.max_sequences,
        blocks=settings.kv_blocks,
        block_tokens=BLOCK,
        step_stretch=settings.step_stretch,
    )
    seen = observe(setup, server.counts)
    model = fit(seen, server.counts)
    assert model is not None
    return seen, model


def errors(
    kind: Kind, before: int, after: int, callers: Callers, base: Settings
) -> dict[str, float]:
    """How far off each figure was that was predicted, as a share of what came."""
    _, model = served(replace(base, **{kind: before}), callers)
    seen, _ = served(replace(base, **{kind: after}), callers)
    foretold = predicted(model, Change(kind, after), {})
    assert foretold is not None
    busy = seen.decode.seconds + seen.prefill.seconds
    came = {
        "decode_step_seconds": seen.decode.seconds / seen.decode.steps,
        "tokens_per_second": seen.decode.tokens / seen.decode.seconds,
        "prefill_tokens_per_second": seen.prefill.tokens / seen.prefill.seconds,
        "requests_per_second": seen.traffic.ended / busy,
    }
    return {name: abs(getattr(foretold, name) / value - 1.0) for name, value in came.items()}


HEAVY = Callers(12, 300, 40)  # more places than prompts let fill
SHORT, LONG = Callers(12, 120, 60), Callers(4, 700, 16)
CROWD = Callers(12, 150, 60)
BASE = Settings()
BY_BUDGET = Settings(step_stretch=0.0)
CHANGES: list[tuple[Kind, int, int, Callers, Settings]] = [
    ("max_sequences", 4, 8, SHORT, BASE),
    ("max_sequences", 8, 4, SHORT, BASE),
    ("max_sequences", 8, 12, CROWD, BASE),
    ("max_sequences", 4, 8, HEAVY, BASE),
    ("max_sequences", 8, 4, HEAVY, BASE),
    ("token_budget", 256, 128, LONG, BY_BUDGET),
    ("token_budget", 128, 256, LONG, BY_BUDGET),
    ("kv_blocks", 40, 80, CROWD, BASE),
    ("kv_blocks", 80, 40, CROWD, BASE),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: "-".join(map(str, change[:3])))
def test_a_change_does_what_was_predicted(change: tuple[Kind, int, int, Callers, Settings]) -> None:
    """Operators would pay for what does not come."""
    found = errors(*change)
    assert found["requests_per_second"] < 0.15, "what a change is made for"
    assert max(found.values()) < 0.4


def test_over_all_changes_half_of_the_figures_are_within_a_tenth() -> None:
    """What docs/diagnosis.md says of predictions would be wrong."""
    found = [error for change in CHANGES for error in errors(*change).values()]
    assert statistics.median(found) < 0.1
