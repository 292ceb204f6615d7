"""bench.simulated_and_real: the simulated side of it, by arithmetic."""

from __future__ import annotations

import pytest
from bench.simulated_and_real import Figures, lengths_of, parse, simulated

from kvledger.diagnosis.step_fit import PhaseFit
from kvledger.simulation.costs import Costs, ServedCosts

SETTINGS = {
    **{"max_sequences": 8, "token_budget": 256, "kv_blocks": 100, "step_stretch": 2.0},
    **{"prefill_step": 0.05, "prefix_reuse": "on", "tpot_target": None},
}


def test_both_get_the_same_lengths() -> None:
    """A ratio would be of two loads."""
    options = parse(["--prompt", "100", "--output", "20", "--each", "3"])
    assert lengths_of(options, 4, 7) == lengths_of(options, 4, 7)
    assert len(lengths_of(options, 4, 7)) == 12
    assert all(50 <= prompt <= 150 and 10 <= out <= 30 for prompt, out in lengths_of(options, 4, 7))


def test_a_server_is_simulated_as_it_was_diagnosed() -> None:
    """The simulation would be blamed, or praised, for other settings and costs."""
    costs = Costs(PhaseFit(0.010, 0.0, 0.0), PhaseFit(0.0, 0.001, 0.0))
    served = ServedCosts(costs, SETTINGS, 32)
    found = simulated(served, 0.002, 8192, [(100, 11)], callers=1)
    assert found.ttft == pytest.approx(0.1)
    assert found.tpot == pytest.approx(0.012)
    assert found.tokens_per_second == pytest.approx(11 / 0.222, rel=0.01)
    slower = Figures(found.tokens_per_second / 2, found.tpot * 2, found.ttft)
    assert slower.over(found) == pytest.approx({"tokens_per_second": 0.5, "tpot": 2.0, "ttft": 1.0})
