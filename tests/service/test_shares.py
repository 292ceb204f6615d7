"""Shares of the KV pool in blocks: they add up, or are refused with the sum."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvledger.errors import SettingRefused
from kvledger.tenants.shares import CoreShare, PoolShape, core_shares
from kvledger.tenants.tenant import Tenant, TenantLimits

POOL = PoolShape(blocks=100, block_bytes=1000, slots_per_block=16)


def tenant(number: int, **limits: Any) -> Tenant:
    return Tenant(f"tenant-{number}", number, limits=TenantLimits(**limits))


def shares(*tenants: Tenant, pool: PoolShape = POOL, more: bool = True) -> list[CoreShare]:
    return list(core_shares(tenants, pool, more))


def test_without_limits_everybody_may_have_the_pool() -> None:
    """A server without limits would refuse what fits."""
    assert shares(tenant(1), tenant(2)) == [
        CoreShare(1, 0, 100, False, 100),
        CoreShare(2, 0, 100, False, 100),
    ]


def test_what_is_guaranteed_is_left_by_all_others() -> None:
    """Others' live blocks would lie where a guarantee says that there is room."""
    one, two, three = shares(
        tenant(1, kv_guaranteed=0.25),
        tenant(2, kv_guaranteed=0.29, kv_max=0.5),
        tenant(3, kv_max=0.9),
    )
    assert (one.guaranteed_blocks, one.max_blocks, one.live_blocks_max) == (25, 100, 71)
    assert (two.guaranteed_blocks, two.max_blocks, two.live_blocks_max) == (29, 50, 50)
    assert (three.guaranteed_blocks, three.max_blocks, three.live_blocks_max) == (0, 90, 46)


def test_nobody_elses_blocks_lie_in_a_sealed_share() -> None:
    """What others cached would have to be evicted to keep a promise, or be told by its time."""
    sealed, other = shares(tenant(1, kv_guaranteed=0.3, sealed=True), tenant(2))
    assert sealed == CoreShare(1, 30, 30, True, 30)
    assert other == CoreShare(2, 0, 70, False, 70)


def test_bytes_are_whole_blocks() -> None:
    """A tenant would hold a block more than its bytes."""
    (share,) = shares(tenant(1, kv_bytes_max=7999))
    assert (share.live_blocks_max, share.max_blocks) == (7, 100)
    assert share.sequence_tokens_max(16) == 7 * 16 + 1
    (most,) = shares(tenant(1, kv_bytes_max=10**9))
    assert most.live_blocks_max == 100


@pytest.mark.parametrize(
    ("tenants", "more", "words"),
    [
        ([{"kv_guaranteed": 0.6}, {"kv_guaranteed": 0.5}], False, ["110 blocks", "has 100"]),
        ([{"kv_guaranteed": 0.6}, {"kv_guaranteed": 0.4}], True, ["100 blocks", "one of which"]),
        ([{"kv_guaranteed": 1.0}, {}], False, ["100 blocks", "one of which stays"]),
        ([{"kv_guaranteed": 0.6, "kv_max": 0.5}], False, ["kv_guaranteed 0.6", "kv_max 0.5"]),
        ([{"kv_guaranteed": -0.1}], False, ["kv_guaranteed", "-0.1"]),
        ([{"kv_max": 1.01}], False, ["kv_max", "1.01"]),
        ([{"kv_max": float("nan")}], False, ["kv_max", "nan"]),
        ([{"kv_max": 0.001}], False, ["kv_max 0.001", "100 blocks"]),
        ([{"sealed": True}], False, ["sealed", "kv_guaranteed 0"]),
        ([{"kv_bytes_max": 999}], False, ["kv_bytes_max 999", "1000 bytes"]),
    ],
)
def test_what_cannot_hold_is_refused_with_its_numbers(
    tenants: list[dict[str, Any]], more: bool, words: list[str]
) -> None:
    """Promises would be broken under load, when nobody looks at the settings."""
    with pytest.raises(SettingRefused) as refused:
        shares(*(tenant(i, **limits) for i, limits in enumerate(tenants)), more=more)
    for word in words:
        assert word in str(refused.value)


def test_all_of_the_pool_may_be_guaranteed_where_nobody_else_comes() -> None:
    """A pool that two tenants have to themselves could not be divided."""
    one, two = shares(tenant(1, kv_guaranteed=0.6), tenant(2, kv_guaranteed=0.4), more=False)
    assert (one.live_blocks_max, two.live_blocks_max) == (60, 40)


def test_any_shares_that_are_taken_can_all_be_had_at_once() -> None:
    """Rounding would promise one block twice."""
    dice, taken = random.Random(3), 0
    for _ in range(2000):
        pool = PoolShape(dice.randrange(1, 200), 4096, 16)
        listed = []
        for number in range(dice.randrange(1, 6)):
            guaranteed = dice.choice([0.0, dice.random() * 0.5])
            listed.append(
                tenant(
                    number,
                    kv_guaranteed=guaranteed,
                    kv_max=dice.uniform(guaranteed, 1.0),
                    sealed=dice.random() < 0.2,
                    kv_bytes_max=dice.choice([None, dice.randrange(4096, 10**6)]),
                )
            )
        try:
            given = core_shares(listed, pool, dice.random() < 0.5)
        except SettingRefused:
            continue
        taken += 1
        sealed = sum(share.guaranteed_blocks for share in given if share.sealed)
        total = sum(share.guaranteed_blocks for share in given)
        assert total <= pool.blocks
        for share in given:
            others = total - share.guaranteed_blocks
            assert 1 <= share.live_blocks_max <= share.max_blocks <= pool.blocks
            assert share.live_blocks_max + others <= pool.blocks
            assert share.max_blocks + sealed - share.sealed * share.guaranteed_blocks <= pool.blocks
            assert share.guaranteed_blocks <= share.max_blocks
    assert taken > 500
