"""bench.fairness: the promises between tenants, in simulated time."""

from __future__ import annotations

from bench.fairness import CPU, FLOOD_PROMPT, measure_fairness, measure_flood


def test_a_quiet_tenant_hardly_notices_a_flood() -> None:
    """A conversation would wait for whatever another tenant has in the queue (S13)."""
    bar = measure_flood(CPU, prefill_step=0.05, seconds=120.0, seeds=1)
    assert bar.passed, bar.found


def test_without_a_limit_for_prompts_alone_it_does() -> None:
    """The test above could not fail."""
    bar = measure_flood(CPU, prefill_step=0.0, seconds=120.0, seeds=1)
    assert not bar.passed, bar.found


def test_two_floods_are_given_the_same() -> None:
    """Who comes first, or asks for less at a time, would be given all or nothing (S14)."""
    equal = measure_fairness(CPU, FLOOD_PROMPT, seconds=60.0)
    assert all(bar.passed for bar in equal), equal
    tokens, _ = measure_fairness(CPU, FLOOD_PROMPT // 4, seconds=60.0)
    assert tokens.passed, tokens.found
