"""Small simulations, as several tests have them."""

from __future__ import annotations

import random
from typing import Any

from kvledger.diagnosis.step_fit import PhaseFit
from kvledger.simulation.costs import Costs
from kvledger.simulation.faults import Chance, Faults
from kvledger.simulation.loop import PLAIN_RUN, CoreSettings, Run, Simulation
from kvledger.simulation.traffic import LogNormal, MadeUp, Replay, Row, Shape

# Ten milliseconds for decoding; five and one for each token of a prompt.
PLAIN = Costs(PhaseFit(0.010, 0.0, 0.0), PhaseFit(0.005, 0.001, 0.0))
# Something for everything.
FULL = Costs(PhaseFit(0.005, 0.0014, 2e-8), PhaseFit(0.0015, 0.0005, 1e-8))


def replayed(*rows: Row, costs: Costs = PLAIN, run: Run = PLAIN_RUN, **settings: Any) -> Simulation:
    """Rows, with a pool that is large enough unless told otherwise."""
    core = CoreSettings(**{"blocks": 256, "slots_per_block": 8, **settings})
    return Simulation(core, Replay(rows, run.seed), costs, run)


def made_up(
    shape: dict[str, Any], costs: Costs = FULL, run: Run = PLAIN_RUN, **settings: Any
) -> Simulation:
    """Traffic of a shape; prompts of 60 and outputs of 20 tokens unless told otherwise."""
    core = CoreSettings(**{"blocks": 64, "slots_per_block": 8, **settings})
    asked = {"lengths": LogNormal(60, 20, 0.5), "requests": 60, **shape}
    return Simulation(core, MadeUp(Shape(**asked), run.seed), costs, run)


EVERYTHING = Faults(
    Chance(0.05, 10.0), Chance(0.01), Chance(0.1, 0.5), Chance(0.1, 0.3), Chance(0.02, -2.0)
)


def drawn(seed: int, steps: int) -> Simulation:
    """A server with settings and traffic of a seed, in which everybody who came in so many steps
    has ended. Most pools are too small for what is asked of them."""
    chance = random.Random(seed)
    places = chance.randint(1, 12)
    core = CoreSettings(
        blocks=chance.randint(4, 40),
        slots_per_block=chance.choice((4, 8, 16)),
        context_tokens=512,
        token_budget=chance.randint(places, 96),
        sequences_max=places,
        priority_aging=chance.choice((0.0, 5.0)),
        tpot_target=chance.choice((None, 0.02)),
        step_stretch=chance.choice((0.0, 1.5, 4.0)),
        prefill_step=chance.choice((0.0, 0.02)),
        prefix_reuse=chance.random() < 0.7,
        max_queued=chance.choice((4, 64)),
        forecast=chance.random() < 0.5,
    )
    is_open = chance.random() < 0.5
    shape = Shape(
        LogNormal(chance.randint(4, 40), chance.randint(4, 60), 0.8),
        rate=chance.choice((2.0, 8.0, 30.0)) if is_open else None,
        callers=None if is_open else chance.randint(1, 24),
        requests=1 << 30,
        turns=chance.randint(1, 3),
        think=chance.choice((0.0, 0.5)),
        tenants={"a": 1.0, "b": 3.0, "c": 1.0},
    )
    how = Run(seed, 0.1, 0.0, chance.choice((Faults(), EVERYTHING)), chance.choice((None, 20)))
    traffic = MadeUp(shape, seed)
    simulation = Simulation(core, traffic, FULL, how)
    simulation.run(steps=steps)
    traffic.stop()
    simulation.run()
    return simulation


def wrong_with(simulation: Simulation) -> list[str]:
    """What must never be after any traffic."""
    outcome = simulation.outcome
    wrong = []
    if simulation.open_requests or len(outcome.ended) + outcome.refused.total() != outcome.came:
        wrong.append(f"{outcome.came} came, {len(outcome.ended)} ended, {outcome.refused} refused")
    if outcome.audit is not None:
        wrong.append(outcome.audit)
    most = max((ended.preemptions for ended in outcome.ended), default=0)
    if most > 3:
        wrong.append(f"one sequence was preempted {most} times")
    if simulation.live_blocks:
        wrong.append(f"{simulation.live_blocks} blocks are nobody's and not free")
    return wrong
