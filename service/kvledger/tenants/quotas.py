"""Tenants' limits at the door: who can never enter, who must come back later, and when.

Nothing here looks at what is cached: a reused token costs what a computed one does, and the time
that a refused tenant is told comes from its own bucket or from how its own requests end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvledger.errors import (
    FieldViolation,
    InvalidRequest,
    QueuedTokensFull,
    QueueFull,
    SettingRefused,
    TenantClosed,
    TenantLimitReached,
)
from kvledger.tenants.fair_queue import has_room
from kvledger.tenants.shares import CoreShare, PoolShape, core_shares
from kvledger.tenants.tenant import Tenant, TenantLimits
from kvledger.tenants.token_bucket import TokenBucket
from kvledger.tenants.usage import Phase, TenantUsage, Usage

# What a refused caller is told to wait where its own requests say how long, in seconds.
_RETRY_LEAST = 0.1
_RETRY_MOST = 30.0


class Quotas:
    """Every tenant's limits and usage, and the bounds on all of them together."""

    def __init__(
        self, queued_max: int, queued_tokens_max: int | None, places: int, pool: PoolShape | None
    ) -> None:
        """At most `queued_max` requests wait, with `queued_tokens_max` prompt tokens; None is any.

        `places` is how many sequences may run at once. Without a `pool` nobody has a share of it.
        """
        self.usage = Usage()
        self._queued_max = queued_max
        self._queued_tokens_max = queued_tokens_max
        self._leaving_max = queued_max + places
        self.pool = pool
        self._tenants: dict[int, TenantUsage] = {}
        self._knows_tenants = False

    def shares(self, tenants: Sequence[Tenant], more_may_come: bool) -> Sequence[CoreShare]:
        """What tenants may have of the pool. Raises SettingRefused for limits that cannot be."""
        for tenant in tenants:
            _require_usable(tenant)
        if len({tenant.number for tenant in tenants}) < len(tenants):
            raise SettingRefused("two tenants have one number; give each its own")
        return () if self.pool is None else core_shares(tenants, self.pool, more_may_come)

    def set_tenants(self, tenants: Sequence[Tenant], shares: Sequence[CoreShare], now: int) -> None:
        """Sets who may enter and how much; before the first call everybody may, without limits.

        `shares` are those of `tenants`. What waits or runs stays.
        """
        share_of = {share.tenant: share for share in shares}
        self._knows_tenants = True
        gone = self._tenants.keys() - {tenant.number for tenant in tenants}
        for number in gone:
            self._tenants[number].is_closed = True
            self.forget_if_gone(self._tenants[number])
        for tenant in tenants:
            self._set(tenant, share_of.get(tenant.number), now)

    def _set(self, tenant: Tenant, share: CoreShare | None, now: int) -> None:
        usage = self._tenants.get(tenant.number)
        if usage is None:
            usage = TenantUsage(tenant.number, tenant.name, tenant.limits)
            self._tenants[tenant.number] = usage
        rate = tenant.limits.tokens_per_second
        if rate is None:
            usage.bucket = None
        elif usage.bucket is None:
            usage.bucket = TokenBucket(rate, now)
        elif rate != usage.limits.tokens_per_second:
            usage.bucket.change_rate(rate, now)
        usage.limits, usage.share, usage.is_closed = tenant.limits, share, False

    def all(self) -> Iterable[TenantUsage]:
        """Every tenant that may enter or still has requests here."""
        return list(self._tenants.values())

    def find(self, number: int) -> TenantUsage | None:
        """One of them."""
        return self._tenants.get(number)

    def tenant(self, number: int, name: str) -> TenantUsage:
        """The tenant of a caller. Raises TenantClosed for one that is not in the table."""
        usage = self._tenants.get(number)
        if usage is None and not self._knows_tenants:
            usage = self._tenants[number] = TenantUsage(number, name, TenantLimits())
        if usage is None or usage.is_closed:
            raise TenantClosed
        return usage

    def forget_if_gone(self, usage: TenantUsage) -> None:
        """Lets go of a tenant that is not in the table, once nothing of it is left."""
        if usage.is_closed and usage.counts.total == 0:
            self._tenants.pop(usage.number, None)

    def sequence_tokens_max(self, usage: TenantUsage, most: int) -> int:
        """Most tokens of a tenant's sequence, where anybody's has at most `most`."""
        if usage.share is None or self.pool is None:
            return most
        return min(most, usage.share.sequence_tokens_max(self.pool.slots_per_block))

    def check_fits(self, usage: TenantUsage, tokens: int) -> None:
        """Raises InvalidRequest for a prompt that cannot enter however long it waits."""
        bounds = []
        if usage.share is not None and self.pool is not None:
            most = usage.share.sequence_tokens_max(self.pool.slots_per_block) - 1
            blocks = usage.share.live_blocks_max
            live = usage.limits.kv_bytes_max
            if live is not None and live // self.pool.block_bytes == blocks:
                where = f"the tenant's kv_bytes_max, {live} bytes"
            else:
                where = f"the tenant's share of the KV pool, {blocks} blocks"
            bounds.append((most, f"leave room for an answer in {where}"))
        if usage.limits.queued_tokens_max is not None:
            most = usage.limits.queued_tokens_max
            bounds.append((most, "may wait: queued_tokens_max of the tenant"))
        if self._queued_tokens_max is not None:
            bounds.append((self._queued_tokens_max, "may wait here: --max-queued-tokens"))
        for most, why in bounds:
            if tokens > most:
                reason = f"{tokens} tokens, at most {most} {why}"
                raise InvalidRequest(FieldViolation("prompt", reason))

    def check_now(self, usage: TenantUsage, tokens: int, free_places: int, now: int) -> None:
        """Raises TenantLimitReached, QueueFull or QueuedTokensFull if a prompt may not enter now.

        `free_places` is how many sequences the next step may admit. The tenant's own limits come
        first: who is over one of them hears nothing of the others' load.
        """
        self._check_own(usage, tokens, free_places, now)
        self._check_all(usage, tokens, free_places)

    def _check_own(self, usage: TenantUsage, tokens: int, free_places: int, now: int) -> None:
        limits, counts = usage.limits, usage.counts
        if limits.queued_max is not None:
            # Whom the next step admits does not queue; others' requests may have those places.
            others = self.usage.counts[Phase.WAITING] - counts[Phase.WAITING]
            free = 0 if usage.must_hold else max(0, free_places - others)
            if counts.queued >= limits.queued_max + free:
                raise self._reached(
                    usage, "queued_max", limits.queued_max, f"{counts.queued} requests wait"
                )
        most = limits.queued_tokens_max
        if most is not None and counts.queued_tokens + tokens > most:
            raise self._reached(
                usage,
                "queued_tokens_max",
                most,
                f"prompts that wait have {counts.queued_tokens} tokens, this one {tokens}",
            )
        if usage.bucket is not None and (wait := usage.bucket.wait_for(tokens, now)):
            milliseconds = -(-wait // 10**6)
            raise self._reached(
                usage,
                "tokens_per_second",
                limits.tokens_per_second or 0.0,
                f"a prompt of {tokens} tokens may enter in {milliseconds / 1000:g} s",
                milliseconds / 1000,
            )

    def _reached(
        self, usage: TenantUsage, limit: str, value: float, state: str, retry: float | None = None
    ) -> TenantLimitReached:
        seconds = self.retry_after(usage) if retry is None else retry
        return TenantLimitReached(usage.name, limit, value, state, seconds)

    def _check_all(self, usage: TenantUsage, tokens: int, free_places: int) -> None:
        everybody, own = self.usage.counts, usage.counts
        queued = everybody[Phase.HELD] + max(0, everybody[Phase.WAITING] - free_places)
        if not has_room(queued, own.queued, self._queued_max, self.usage.queuing_with(usage)):
            # What others have in the queue beyond its bound is not told.
            raise QueueFull(max(self._queued_max, own.queued), self.retry_after(usage))
        # Who leaves the queue has memory until the step that runs ends.
        leaving, own_leaving = everybody[Phase.LEAVING], own[Phase.LEAVING]
        if not has_room(leaving, own_leaving, self._leaving_max, self.usage.leaving_with(usage)):
            told = max(self._queued_max, own.queued + own_leaving)
            raise QueueFull(told, self.retry_after(usage))
        most = self._queued_tokens_max
        if most is not None and own.queued and everybody.queued_tokens + tokens > most:
            raise QueuedTokensFull(most, self.retry_after(usage))

    @staticmethod
    def retry_after(usage: TenantUsage) -> float:
        """Seconds until one of the tenant's requests is likely to have ended."""
        return min(_RETRY_MOST, max(_RETRY_LEAST, usage.finish_interval))


def _require_usable(tenant: Tenant) -> None:
    limits = tenant.limits
    for name in ("running_max", "queued_max", "queued_tokens_max", "kv_bytes_max"):
        value = getattr(limits, name)
        if value is not None and value < 0:
            raise SettingRefused(f"tenant {tenant.name}: {name} is {value}; it is 0 or more")
    rate = limits.tokens_per_second
    if rate is not None and not 0.001 <= rate <= 1e12:  # nan as well
        raise SettingRefused(
            f"tenant {tenant.name}: tokens_per_second is {rate}; allowed are 0.001 to 1e12"
        )
