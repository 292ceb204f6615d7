"""Planted bottlenecks for a moment: those that need seconds, of one seed; `make soak` has all."""

from __future__ import annotations

import pytest
from planted_bottlenecks import Outcome, tried
from planted_cases import CASES, planted

# Seconds of load; more where the machine is too slow for so little to say anything.
_SECONDS = 3.0


@pytest.mark.parametrize("case", ["tiny pool", "healthy"])
def test_what_was_planted_in_a_real_server_is_named_first(case: str) -> None:
    """Operators would change what is not wrong, of a server that the rules' author never saw."""
    outcome = tried(case, seed=1, seconds=_SECONDS)
    assert outcome.is_right, f"{outcome.variant}: {outcome.figures}"


def test_a_seed_draws_the_same_variant_again() -> None:
    """A wrong answer of a long run could not be looked at again."""
    for case in CASES:
        plant = planted(case, 7)
        again = planted(case, 7)
        assert (plant.said, plant.options, plant.warm) == (again.said, again.options, again.warm)
        assert len({planted(case, seed).said for seed in range(10)}) > 3


def test_a_wrong_name_is_not_right() -> None:
    """A run that takes every finding for the right one would praise any rules."""

    def outcome(case: str, *named: str) -> Outcome:
        found = [{"name": name} for name in named]
        return Outcome(case, "", {"findings": found}, None)  # type: ignore[arg-type]

    assert outcome("tiny pool", "pool", "batch").is_right
    assert not outcome("tiny pool", "batch", "pool").is_right
    assert not outcome("tiny pool").is_right
    assert outcome("healthy").is_right
    assert not outcome("healthy", "weights").is_right
