"""Memory of constraints: shared among tenants, and bounded also where it is full."""

from __future__ import annotations

import contextlib
import gc
import random
from typing import Any

import pytest

from kvledger.constraints import compiler as module
from kvledger.errors import ConstraintsFull


class Grammar:
    """Something that holds memory for as long as it lives."""


def held_by(held: Any, tenant: int, size: int) -> Grammar:
    grammar = Grammar()
    held.take(tenant, size, grammar)
    return grammar


def test_a_full_memory_has_room_for_those_below_their_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second constraint would be refused as long as somebody else's many are open."""
    monkeypatch.setattr(module, "_HELD_BYTES_MAX", 1000)
    monkeypatch.setattr(module, "MEMORY_BYTES", 400)
    held = module._HeldBytes()
    kept = [held_by(held, 1, 250) for _ in range(4)]
    kept += [held_by(held, 2, 200), held_by(held, 2, 150)]
    with pytest.raises(ConstraintsFull, match="more than 1000 bytes"):
        held_by(held, 2, 51)  # 401: more than one constraint beyond the bound, if below 500
    kept += [held_by(held, 3, 300), held_by(held, 3, 33)]
    with pytest.raises(ConstraintsFull):
        held_by(held, 3, 1)  # 334: more than a third
    kept.append(held_by(held, 4, 400))  # its first
    with pytest.raises(ConstraintsFull):
        held_by(held, 1, 1)
    assert held.total == 1000 + 350 + 333 + 400
    del kept
    gc.collect()
    assert held.total == 0
    assert not held._by_tenant


def test_what_tenants_have_beyond_the_bound_is_one_constraint_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory would have no limit that an operator could count with."""
    monkeypatch.setattr(module, "_HELD_BYTES_MAX", 1000)
    monkeypatch.setattr(module, "MEMORY_BYTES", 250)
    draw = random.Random(5)
    held = module._HeldBytes()
    kept: list[Grammar] = []
    most = 0
    for _ in range(5000):
        with contextlib.suppress(ConstraintsFull):
            kept.append(held_by(held, draw.randrange(6), draw.randint(1, 250)))
        if kept and draw.random() < 0.4:
            kept.pop(draw.randrange(len(kept)))
        most = max(most, held.total)
    assert 1000 < most <= 1000 + 6 * 250
