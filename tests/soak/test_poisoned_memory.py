"""Freed memory is full of NaN, for a moment: nothing of it shows, and it would."""

from __future__ import annotations

import pytest
from poisoned_memory import poisoned


@pytest.mark.parametrize("kv_format", ["f32", "bf16"])
def test_what_a_block_held_before_is_never_read(kv_format: str) -> None:
    """A tenant's answer would be made of what another one's block held (S09, S10)."""
    verdict = poisoned(2000, 1, kv_format)
    assert verdict.wrong == []
    seen = verdict.poisoned
    assert seen.reuses >= 2000
    assert len(seen.answers) > 150
    # What makes it hard did happen.
    assert seen.reused_tokens > 800
    assert seen.copies > 50
    assert seen.preemptions > 5
    assert seen.cancelled > 10


def test_what_is_read_is_found() -> None:
    """The run would praise kernels whatever they read."""
    verdict = poisoned(300, 2, "bf16", poison="needed")
    assert len(verdict.wrong) == 2, verdict.wrong
    assert verdict.poisoned.not_numbers > 0
