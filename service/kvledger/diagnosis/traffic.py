"""Who asks for what: what arrives, what it waits for, and what it could have reused.

Belongs to the event loop's thread. Costs some microseconds for each request and for each block of
its prompt, nothing for a token.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # readers of books need no engine, which takes seconds to import
    from kvledger.streams import Receipt

# Lengths fall into classes that double: 1, 2, 3 to 4, 5 to 8, ...
CLASSES = 24
# Blocks whose beginnings are remembered: twice as many at most, in two generations.
_REMEMBERED = 1 << 17
# Tenants that are counted apart, and how many of them, those with most, a copy keeps.
_TENANTS = 4096
_TENANTS_KEPT = 64


def class_of(length: int) -> int:
    """The class of a length."""
    return min(max(0, length - 1).bit_length(), CLASSES - 1)


def class_quantile(counts: npt.NDArray[np.int64], share: float) -> int:
    """The upper bound of the class in which a quantile lies; 0 of nothing."""
    total = int(counts.sum())
    if total == 0:
        return 0
    place = int(np.searchsorted(np.cumsum(counts), share * total))
    return 1 << min(place, CLASSES - 1)


@dataclass
class TrafficCounts:
    """What came so far; times in nanoseconds."""

    requests: int = 0
    ended: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # by reason
    prompt_tokens: Counter[str] = field(default_factory=Counter)  # by tenant
    all_prompt_tokens: int = 0  # of tenants that a copy does not keep, too
    # By tenant, requests times the time that they waited in the core, and that they were open.
    queued: Counter[str] = field(default_factory=Counter)
    lives: Counter[str] = field(default_factory=Counter)
    # By tenant, prompt tokens of open requests times time: what it asks for, however long ago it
    # came. And those of all requests that wait in the core.
    asked: Counter[str] = field(default_factory=Counter)
    waiting_tokens: int = 0
    prompts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(CLASSES, np.int64))
    outputs: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(CLASSES, np.int64))
    output_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    reused_tokens: int = 0
    # Of all prompts, what a cache without a limit would have had.
    reusable_tokens: int = 0
    queued_time: int = 0
    requeued_time: int = 0
    life_time: int = 0
    delayed_time: int = 0
    # Requests times the time that they were open; of that waited in the core, and at the door for
    # others of their own tenant to end; and paused because nobody read them. Whoever has not ended
    # is in it too.
    open_time: int = 0
    waiting_time: int = 0
    held_time: int = 0
    stalled_time: int = 0

    def copy(self) -> TrafficCounts:
        """As it is now; of tenants those with most."""

        def copied(value: Any) -> Any:
            if isinstance(value, Counter) and len(value) > _TENANTS_KEPT:
                return Counter(dict(value.most_common(_TENANTS_KEPT)))
            return value.copy() if hasattr(value, "copy") else value

        return TrafficCounts(**{name: copied(value) for name, value in vars(self).items()})

    def since(self, before: TrafficCounts) -> TrafficCounts:
        """What came after `before`."""
        now, then = vars(self), vars(before)
        return TrafficCounts(**{name: _less(now[name], then[name]) for name in now})


def _less(now: Any, then: Any) -> Any:
    if isinstance(now, Counter) and len(then) >= _TENANTS_KEPT:
        # Whoever was not among those that were kept then would bring all of its past into this.
        now = Counter({name: count for name, count in now.items() if name in then})
    return now - then


@dataclass(frozen=True)
class Crowd:
    """Requests that are here now: open ones, and of these who waits in the core or at the door, or
    pauses for its reader."""

    open: int = 0
    waiting: int = 0
    held: int = 0
    stalled: int = 0


@dataclass
class _OfTenant:
    """A tenant's requests that are here, since when their time has not been counted."""

    seen_at: int  # nanoseconds
    open: int = 0
    waiting: int = 0
    # Prompt tokens of these.
    open_tokens: int = 0
    waiting_tokens: int = 0


class Traffic:
    """Counts what comes."""

    def __init__(self, block_tokens: int) -> None:
        """`block_tokens` is how many tokens a prompt must share to reuse anything."""
        self.counts = TrafficCounts()
        self._block_tokens = block_tokens
        self._crowd = Crowd()
        self._seen_at: int | None = None
        self._of_tenants: dict[str, _OfTenant] = {}  # of those with open requests
        # Digests are compared with nothing but each other; nobody can choose texts that collide.
        self._key = secrets.token_bytes(16)
        self._seen: set[int] = set()
        self._seen_before: set[int] = set()

    def pass_time(self, now: int, crowd: Crowd) -> None:
        """Counts those who were here until `now`, nanoseconds; `crowd` is who is from then on."""
        self._pass_time(now, crowd)
        for name in self._of_tenants:
            self._pass_time_of(name, now)

    def changed(
        self, now: int, crowd: Crowd, tenant: str, more_open: int, more_wait: int, tokens: int
    ) -> None:
        """The same where so many more of a tenant's requests are open and wait in the core, with
        prompts of so many tokens.

        Has to be called whenever anything of it changes: who began a moment after it came would be
        taken for one that waits until the next change.
        """
        self._pass_time(now, crowd)
        if more_open or more_wait:
            own = self._of_tenants.setdefault(tenant, _OfTenant(now))
            self._pass_time_of(tenant, now)
            own.open += more_open
            own.waiting += more_wait
            own.open_tokens += more_open * tokens
            own.waiting_tokens += more_wait * tokens
            if own.open <= 0:
                del self._of_tenants[tenant]

    def _pass_time_of(self, tenant: str, now: int) -> None:
        own, counts = self._of_tenants[tenant], self.counts
        passed = max(0, now - own.seen_at)
        counts.queued[tenant] += passed * own.waiting
        counts.lives[tenant] += passed * own.open
        counts.asked[tenant] += passed * own.open_tokens
        counts.waiting_tokens += passed * own.waiting_tokens
        own.seen_at = now

    def _pass_time(self, now: int, crowd: Crowd) -> None:
        if self._seen_at is not None:
            passed, counts = max(0, now - self._seen_at), self.counts
            counts.open_time += passed * self._crowd.open
            counts.waiting_time += passed * self._crowd.waiting
            counts.held_time += passed * self._crowd.held
            counts.stalled_time += passed * self._crowd.stalled
        self._seen_at, self._crowd = now, crowd

    def came(self, tenant: str, scope: str | None, prompt: npt.NDArray[np.int32]) -> None:
        """A request entered; `scope` names whose cached blocks it could begin with, if any."""
        counts = self.counts
        counts.requests += 1
        counts.prompts[class_of(len(prompt))] += 1
        counts.prompt_tokens[tenant] += len(prompt)
        counts.all_prompt_tokens += len(prompt)
        if scope is not None:
            counts.reusable_tokens += self._reusable(scope, prompt)
        if len(counts.prompt_tokens) > 2 * _TENANTS:
            for by_tenant in (counts.prompt_tokens, counts.queued, counts.lives, counts.asked):
                kept = dict(by_tenant.most_common(_TENANTS))
                by_tenant.clear()
                by_tenant.update(kept)

    def refused(self, reason: str) -> None:
        """A request did not enter."""
        self.counts.refused[reason] += 1

    def ended(self, receipt: Receipt) -> None:
        """A request has its receipt."""
        counts = self.counts
        counts.ended += 1
        counts.outputs[class_of(receipt.output_tokens)] += 1
        counts.output_tokens += receipt.output_tokens
        counts.computed_tokens += receipt.computed_tokens
        counts.recomputed_tokens += receipt.recomputed_tokens
        counts.reused_tokens += receipt.cached_prompt_tokens
        counts.queued_time += receipt.queued
        counts.requeued_time += receipt.requeued
        counts.delayed_time += receipt.prefill_delayed + receipt.decode_delayed
        counts.life_time += receipt.life

    def _reusable(self, scope: str, prompt: npt.NDArray[np.int32]) -> int:
        """Tokens of a prompt's beginning that came before in the same scope."""
        known = True
        blocks = 0
        for digest in self._digests(scope, prompt):
            if digest in self._seen or digest in self._seen_before:
                blocks += known
            else:
                known = False
            self._seen.add(digest)
        if len(self._seen) > _REMEMBERED:
            self._seen, self._seen_before = set(), self._seen
        return min(blocks * self._block_tokens, max(0, len(prompt) - 1))

    def _digests(self, scope: str, prompt: npt.NDArray[np.int32]) -> Iterator[int]:
        """One for the prompt up to the end of each of its blocks."""
        size = self._block_tokens
        chain = hashlib.blake2b(f"{scope}\n".encode(), digest_size=8, key=self._key)
        content = np.ascontiguousarray(prompt, dtype=np.int32)
        for first in range(0, len(content) - size + 1, size):
            chain.update(content[first : first + size].tobytes())
            yield int.from_bytes(chain.digest(), "little")


def largest_share(counts: Mapping[str, int]) -> tuple[str, float]:
    """Who has most of it, and how much of all that is; an empty name and 0 of nothing."""
    total = sum(counts.values())
    if total <= 0:
        return "", 0.0
    name = max(counts, key=lambda each: counts[each])
    return name, counts[name] / total
