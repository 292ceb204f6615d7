"""Metrics by tenant, for so many of them: those that use most; the rest are one series.

Names are those of the operator's own table, never a client's string. A tenant has its series from
when it is among those that use most; what it used before is in the rest's, and stays there. One
that is no longer among them loses its series; when it comes back the series goes on where it was,
so no series goes down while its tenant is remembered.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvledger.engine import EndReason
from kvledger.metrics.clock import BooksClock
from kvledger.metrics.families import counter
from kvledger.streams import Receipt

# No name of a tenant has parentheses.
OTHER = "(other)"
# Why requests end; without a receipt because the core refused them or the engine is gone.
NO_RECEIPT = "no_receipt"
# Of those that failed, those whose own constraint left no token: no fault of the server.
CONSTRAINT = "constraint"
REASONS = (*(reason.name.lower() for reason in EndReason), CONSTRAINT, NO_RECEIPT)
KINDS = ("computed", "reused", "output")
HELD = ("held", "reserved")

# A tenant takes another's series when it has used so much more: or two would swap at every look.
_MORE = 1.25
# Tenants that are remembered for each that has a series.
_REMEMBERED = 100


@dataclass(frozen=True)
class _Used:
    """What is shown of one tenant, or of the rest. Times in nanoseconds, of blocks in theirs.

    Never changed, only replaced: whoever has it may read on without a lock.
    """

    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    block_time: dict[str, int] = field(default_factory=lambda: dict.fromkeys(HELD, 0))
    compute: int = 0
    queued: int = 0
    requests: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))

    def with_ended(self, reason: str, receipt: Receipt | None) -> _Used:
        """This and a request that ended."""
        requests = {**self.requests, reason: self.requests[reason] + 1}
        if receipt is None:
            return replace(self, requests=requests)
        reused = receipt.cached_prompt_tokens
        computed = min(receipt.computed_tokens, receipt.prompt_tokens - reused)
        return _Used(
            tokens={
                "computed": self.tokens["computed"] + computed,
                "reused": self.tokens["reused"] + reused,
                "output": self.tokens["output"] + receipt.output_tokens,
            },
            block_time={
                "held": self.block_time["held"] + receipt.held_time,
                "reserved": self.block_time["reserved"] + receipt.reserved_time,
            },
            compute=self.compute + receipt.compute,
            queued=self.queued + receipt.queued,
            requests=requests,
        )


@dataclass
class _Tenant:
    use: int = 0  # nanoseconds of steps, by which tenants are ordered
    shown: _Used = field(default_factory=_Used)


class TenantMetrics(Collector):
    """Counts in the event loop's thread; any thread may collect."""

    def __init__(self, tenants_max: int, clock: BooksClock) -> None:
        """At most `tenants_max` tenants have series of their own; with 0 there are no such."""
        self._tenants_max = tenants_max
        self._clock = clock
        self._lock = threading.Lock()
        self._tenants: dict[str, _Tenant] = {}
        self._named: set[str] = set()
        # Without series of their own, and with more use than at the last look.
        self._candidates: set[str] = set()
        self._other = _Used()

    def request_ended(self, name: str, reason: str, receipt: Receipt | None) -> None:
        """Counts a request of a tenant."""
        if self._tenants_max == 0:
            return
        with self._lock:
            tenant = self._tenants.get(name)
            if tenant is None:
                if len(self._named) < self._tenants_max:
                    self._named.add(name)
                elif len(self._tenants) > _REMEMBERED * self._tenants_max:
                    self._forget_half()  # of those before it: it has used nothing yet
                tenant = self._tenants[name] = _Tenant()
            if receipt is not None:
                tenant.use += receipt.compute
            if name in self._named:
                tenant.shown = tenant.shown.with_ended(reason, receipt)
            else:
                self._other = self._other.with_ended(reason, receipt)
                self._candidates.add(name)

    def describe(self) -> Iterable[Metric]:
        """Nothing: names cannot clash with others."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """The families now."""
        if self._tenants_max == 0:
            return []
        with self._clock.scraping():
            # The event loop waits for this lock: thousands of series are made without it.
            with self._lock:
                self._choose()
                used = [(name, self._tenants[name].shown) for name in self._named]
                other = self._other
            used.sort(key=lambda each: each[0])
            return list(_families([*used, (OTHER, other)]))

    def _choose(self) -> None:
        """Gives series to those that use much more than some that have one.

        Who had too little at the last look, and has used nothing since, has too little now.
        """
        if not self._candidates:
            return
        outside = sorted(self._candidates, key=lambda name: (-self._tenants[name].use, name))
        self._candidates.clear()
        inside = sorted(self._named, key=lambda name: (self._tenants[name].use, name))
        for comes, goes in zip(outside, inside, strict=False):
            if self._tenants[comes].use <= _MORE * self._tenants[goes].use:
                break
            self._named.remove(goes)
            self._named.add(comes)

    def _forget_half(self) -> None:
        outside = sorted(
            (name for name in self._tenants if name not in self._named),
            key=lambda name: self._tenants[name].use,
        )
        for name in outside[: len(outside) // 2]:
            del self._tenants[name]
            self._candidates.discard(name)


def _families(used: list[tuple[str, _Used]]) -> Iterator[Metric]:
    yield counter(
        "kvledger_tenant_tokens",
        "Tokens of requests that have ended: of prompts, computed or found in cached blocks, each "
        "once; and of output.",
        ["tenant", "kind"],
        {(name, kind): tokens for name, of in used for kind, tokens in of.tokens.items()},
    )
    yield counter(
        "kvledger_tenant_block_seconds",
        "Blocks that requests which have ended held, or had reserved, times seconds.",
        ["tenant", "state"],
        {(name, state): time / 1e9 for name, of in used for state, time in of.block_time.items()},
    )
    yield counter(
        "kvledger_tenant_compute_seconds",
        "Time of steps that was for requests which have ended.",
        ["tenant"],
        {(name,): of.compute / 1e9 for name, of in used},
    )
    yield counter(
        "kvledger_tenant_queue_seconds",
        "Time that requests which have ended waited to run.",
        ["tenant"],
        {(name,): of.queued / 1e9 for name, of in used},
    )
    yield counter(
        "kvledger_tenant_requests",
        "Requests that ended, by why.",
        ["tenant", "reason"],
        {(name, reason): count for name, of in used for reason, count in of.requests.items()},
    )
