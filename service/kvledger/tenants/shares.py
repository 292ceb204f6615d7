"""Tenants' shares of the KV pool, as the core is told of them: in blocks.

A share of the pool is rounded down to blocks. What is guaranteed to a tenant is left to it by all
others; a sealed tenant lives in its guaranteed blocks alone, and nobody else's blocks, cached ones
included, ever lie there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvledger.errors import SettingRefused
from kvledger.tenants.tenant import Tenant


@dataclass(frozen=True)
class PoolShape:
    """What the KV pool is made of."""

    blocks: int
    block_bytes: int
    # Tokens in a block, in the format that the server uses.
    slots_per_block: int


@dataclass(frozen=True)
class CoreShare:
    """What one tenant may have of the KV pool, in blocks."""

    tenant: int  # its number
    # What all others leave to it.
    guaranteed_blocks: int
    # The most that it takes, cached blocks included.
    max_blocks: int
    sealed: bool
    # The most that its requests hold or have reserved; at most `max_blocks`.
    live_blocks_max: int

    def sequence_tokens_max(self, slots_per_block: int) -> int:
        """Most tokens of a sequence, prompt and output: the last one needs no slot."""
        return self.live_blocks_max * slots_per_block + 1


def core_shares(
    tenants: Iterable[Tenant], pool: PoolShape, more_may_come: bool
) -> Sequence[CoreShare]:
    """Every tenant's share, in the order given.

    `more_may_come` says that tenants without a guarantee may be added later. Raises SettingRefused,
    with the numbers, if the shares cannot all hold or one of them cannot hold a block.
    """
    listed = list(tenants)
    guaranteed = {tenant.number: _guaranteed_blocks(tenant, pool) for tenant in listed}
    total = sum(guaranteed.values())
    others = more_may_come or not all(guaranteed.values())
    most = pool.blocks - 1 if others and total else pool.blocks
    if total > most:
        left = ", one of which stays for tenants without a guarantee" if most < pool.blocks else ""
        raise SettingRefused(
            f"kv_guaranteed of all tenants adds up to {total} blocks, and the KV pool has "
            f"{pool.blocks}{left}; lower some of them, or raise --kv-bytes"
        )
    sealed = sum(guaranteed[tenant.number] for tenant in listed if tenant.limits.sealed)
    return [_share(tenant, guaranteed[tenant.number], total, sealed, pool) for tenant in listed]


def _guaranteed_blocks(tenant: Tenant, pool: PoolShape) -> int:
    limits = tenant.limits
    for name, share in (("kv_guaranteed", limits.kv_guaranteed), ("kv_max", limits.kv_max)):
        if not 0.0 <= share <= 1.0:  # nan as well
            raise SettingRefused(f"tenant {tenant.name}: {name} is {share}, allowed are 0 to 1")
    if limits.kv_guaranteed > limits.kv_max:
        raise SettingRefused(
            f"tenant {tenant.name}: kv_guaranteed {limits.kv_guaranteed:g} is more than kv_max "
            f"{limits.kv_max:g}; raise the one or lower the other"
        )
    return _blocks_of(limits.kv_guaranteed, pool)


def _share(
    tenant: Tenant, guaranteed: int, all_guaranteed: int, all_sealed: int, pool: PoolShape
) -> CoreShare:
    limits = tenant.limits
    if limits.sealed:
        most = guaranteed
        if most < 1:
            raise SettingRefused(
                f"tenant {tenant.name}: it is sealed, and kv_guaranteed {limits.kv_guaranteed:g} "
                f"of {pool.blocks} blocks is not one; raise it"
            )
    else:
        most = min(_blocks_of(limits.kv_max, pool), pool.blocks - all_sealed)
        if most < 1:
            raise SettingRefused(
                f"tenant {tenant.name}: kv_max {limits.kv_max:g} of {pool.blocks} blocks is not "
                f"one; raise it"
            )
    live = min(most, pool.blocks - (all_guaranteed - guaranteed))
    if limits.kv_bytes_max is not None:
        if limits.kv_bytes_max < pool.block_bytes:
            raise SettingRefused(
                f"tenant {tenant.name}: kv_bytes_max {limits.kv_bytes_max} is less than one "
                f"block, {pool.block_bytes} bytes; raise it"
            )
        live = min(live, limits.kv_bytes_max // pool.block_bytes)
    return CoreShare(tenant.number, guaranteed, most, limits.sealed, live)


def _blocks_of(share: float, pool: PoolShape) -> int:
    # 0.29 of 100 is 29 blocks, though the product of the floats is a little less.
    return math.floor(round(share * pool.blocks, 6))
