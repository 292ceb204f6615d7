"""Predictions against what the core then does, in simulated time: the same on every machine."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass, replace
from functools import cache

import pytest
from test_findings import COSTS, SETUP

from kvledger.books.snapshot import STATES
from kvledger.diagnosis.counts import Counts, EngineCounts, PoolCounts
from kvledger.diagnosis.observation import Observation, observe
from kvledger.diagnosis.predictions import Change, Kind, Model, fit, predicted
from kvledger.diagnosis.step_fit import PhaseFit
from kvledger.diagnosis.traffic import TrafficCounts
from kvledger.machine.utilization import ProcessorTimes
from kvledger.simulation.costs import Costs
from kvledger.simulation.loop import CoreSettings, Run, Simulation
from kvledger.simulation.traffic import MadeUp, Shape

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


# What a step takes is not in proportion to the floors that the diagnosis knows.
STEPS = Costs(PhaseFit(0.0, 0.0014, 0.0), PhaseFit(0.0015, 0.0005, 0.0), step=0.00525)


class SimulatedServer:
    """A simulation, and the traffic as a server counts it."""

    def __init__(self, settings: Settings, callers: Callers) -> None:
        self._callers = callers
        self._traffic = TrafficCounts()
        core = CoreSettings(
            blocks=settings.kv_blocks,
            slots_per_block=BLOCK,
            token_budget=settings.token_budget,
            sequences_max=settings.max_sequences,
            step_stretch=settings.step_stretch,
            prefix_reuse=False,
        )
        shape = Shape(self._lengths, callers=callers.count, requests=1 << 30)
        self._simulation = Simulation(core, MadeUp(shape, 1), STEPS, Run(noise=0.05, exact=True))

    def _lengths(self, chance: random.Random) -> tuple[int, int]:
        prompt, output = self._callers.prompt, self._callers.output
        tokens = chance.randint(prompt // 2, prompt * 3 // 2)
        self._traffic.requests += 1
        self._traffic.prompt_tokens["a"] += tokens
        return tokens, chance.randint(output // 2, output * 3 // 2)

    def run(self) -> None:
        """Some time of it."""
        simulation, traffic = self._simulation, self._traffic
        while simulation.now < SECONDS:
            before, running = simulation.now, simulation.outcome.running
            simulation.advance()
            passed = round((simulation.now - before) * NANOS)
            waiting = self._callers.count - (simulation.outcome.running - running)
            traffic.open_time += passed * self._callers.count
            traffic.waiting_time += passed * waiting
        traffic.ended = len(simulation.outcome.ended)

    @property
    def counts(self) -> Counts:
        simulation = self._simulation
        books, steps = simulation.core.books(simulation.clock), simulation.core.step_books
        step_time = round(simulation.outcome.step_seconds * NANOS)
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
            engine=EngineCounts(step_time, step_time, 0),
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
