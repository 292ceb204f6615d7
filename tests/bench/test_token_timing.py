"""The timing of wrong tokens: a comparison that leaks is seen, and nothing good is called wrong."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from bench.token_timing import (
    TENANTS,
    Times,
    leaky,
    measure,
    parse,
    refusing,
    registry_of,
    report,
    smallest_leak,
    verdict,
    wrong_tokens,
)

from bench import token_timing
from kvledger.tenants.authentication import Authenticator, Transport
from kvledger.tenants.tokens import LENGTH, PREFIX, new_token

GOOD = [new_token() for _ in range(4)]


def drawn(shift: float, seed: int) -> Times:
    """Times in which near tokens take so many nanoseconds longer."""
    chance = np.random.default_rng(seed)
    near, far = (chance.gamma(9, 300, 5000).round() for _ in range(2))
    return {"near": [int(each + shift) for each in near], "far": [int(each) for each in far]}


def common(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=True))
    return next((place for place, (a, b) in pairs if a != b), len(one))


def test_near_tokens_are_nearly_good_and_far_ones_are_not() -> None:
    """Two kinds would be compared that do not differ, or by their length."""
    tokens = wrong_tokens(GOOD, 500, random.Random(1))
    assert sorted(kind for kind, _ in tokens) == ["far"] * 500 + ["near"] * 500
    assert [kind for kind, _ in tokens[:500]] != ["far"] * 500, "in random order"
    for kind, token in tokens:
        assert len(token) == LENGTH
        alike = max(common(token, good) for good in GOOD)
        assert alike == LENGTH - 4 if kind == "near" else alike < len(PREFIX) + 10
    assert len({token for _, token in tokens}) > 990


def test_every_token_passes_through_the_registry(tmp_path: Path) -> None:
    """The time of something else would be taken, or a good token be among the wrong ones."""
    registry, good = registry_of(tmp_path)
    assert len(set(good)) == TENANTS
    look = refusing(Authenticator(registry, Transport.UNIX))
    times = measure(look, wrong_tokens(good, 50, random.Random(1)))
    assert [len(times[kind]) for kind in ("near", "far")] == [50, 50]
    assert min(times["near"] + times["far"]) > 0
    with pytest.raises(AssertionError, match="a wrong token was taken"):
        look(f"Bearer {good[3]}")


def test_a_comparison_that_stops_early_takes_longer_for_near_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The arm that must be seen would leak nothing; by letters looked at, not by a clock."""
    looked = []
    monkeypatch.setattr(
        token_timing, "zip", lambda a, b, strict: looked.append(common(a, b)) or (), raising=False
    )
    look = leaky(GOOD)
    for kind, token in wrong_tokens(GOOD, 20, random.Random(1)):
        looked.clear()
        look(f"Bearer {token}")
        assert len(looked) == len(GOOD)
        assert (max(looked) == len("Bearer ") + LENGTH - 4) == (kind == "near")


def test_leaks_and_blindness_are_called_wrong() -> None:
    """A registry that leaks would be called safe, or one that nobody could see through."""
    same, seen, nothing = drawn(0, 1), drawn(500, 2), drawn(0, 5)
    assert verdict(same, seen, nothing) == []
    assert "take different times" in verdict(drawn(200, 3), seen, nothing)[0]
    assert "that leaks is not seen" in verdict(same, drawn(0, 4), nothing)[0]
    assert "taking the time tells them apart" in verdict(same, seen, drawn(200, 6))[0]
    leak = smallest_leak(same)
    assert leak is not None
    assert 20 <= leak < 100
    ticks = {"near": [100, 110] * 500, "far": [100, 110] * 500}
    assert smallest_leak(ticks) == 20, "not what falls between two ticks"
    assert f"smallest leak that it would see: {leak} ns" in report(same, seen, nothing)
    few = {kind: times[:3] for kind, times in same.items()}
    assert smallest_leak(few) is None


def test_the_options() -> None:
    """The documented size would not be the default."""
    assert parse([]).samples == 100_000
