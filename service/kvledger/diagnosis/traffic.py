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

import numpy as np
import numpy.typing as npt

from kvledger.streams import Receipt

# Lengths fall into classes that double: 1, 2, 3 to 4, 5 to 8, ...
CLASSES = 24
# Blocks whose beginnings are remembered: twice as many at most, in two generations.
_REMEMBERED = 1 << 17


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
    queued: Counter[str] = field(default_factory=Counter)  # by tenant
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
    paused_time: int = 0
    life_time: int = 0
    delayed_time: int = 0

    def copy(self) -> TrafficCounts:
        """As it is now."""
        values = dict(vars(self))
        return TrafficCounts(
            **{
                name: value.copy() if hasattr(value, "copy") else value
                for name, value in values.items()
            }
        )

    def since(self, before: TrafficCounts) -> TrafficCounts:
        """What came after `before`."""
        now, then = vars(self), vars(before)
        return TrafficCounts(**{name: now[name] - then[name] for name in now})


class Traffic:
    """Counts what comes."""

    def __init__(self, block_tokens: int) -> None:
        """`block_tokens` is how many tokens a prompt must share to reuse anything."""
        self.counts = TrafficCounts()
        self._block_tokens = block_tokens
        # Digests are compared with nothing but each other; nobody can choose texts that collide.
        self._key = secrets.token_bytes(16)
        self._seen: set[int] = set()
        self._seen_before: set[int] = set()

    def came(self, tenant: str, scope: int, prompt: npt.NDArray[np.int32]) -> None:
        """A request entered; `scope` is whose cached blocks it could begin with."""
        counts = self.counts
        counts.requests += 1
        counts.prompts[class_of(len(prompt))] += 1
        counts.prompt_tokens[tenant] += len(prompt)
        counts.reusable_tokens += self._reusable(scope, prompt)

    def refused(self, reason: str) -> None:
        """A request did not enter."""
        self.counts.refused[reason] += 1

    def ended(self, tenant: str, receipt: Receipt) -> None:
        """A request has its receipt."""
        counts = self.counts
        counts.ended += 1
        counts.outputs[class_of(receipt.output_tokens)] += 1
        counts.output_tokens += receipt.output_tokens
        counts.computed_tokens += receipt.computed_tokens
        counts.recomputed_tokens += receipt.recomputed_tokens
        counts.reused_tokens += receipt.reused_own + receipt.reused_shared
        counts.queued_time += receipt.queued
        counts.queued[tenant] += receipt.queued
        counts.requeued_time += receipt.requeued
        counts.paused_time += receipt.paused
        counts.delayed_time += receipt.prefill_delayed + receipt.decode_delayed
        counts.life_time += receipt.queued + receipt.prefill + receipt.decode + receipt.paused

    def _reusable(self, scope: int, prompt: npt.NDArray[np.int32]) -> int:
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

    def _digests(self, scope: int, prompt: npt.NDArray[np.int32]) -> Iterator[int]:
        """One for the prompt up to the end of each of its blocks."""
        size = self._block_tokens
        chain = hashlib.blake2b(scope.to_bytes(8, "little"), digest_size=8, key=self._key)
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
