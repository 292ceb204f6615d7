"""Who asks for what, and when: traffic that is made up, or replayed row by row.

Times are seconds from the start of the run. Prompts are token ids that begin alike where they would
in a server: the turns of a conversation with all that was said before, and rows of one prefix with
its tokens; all others differ from their first token.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Tokens: TypeAlias = npt.NDArray[np.int32]
# Draws the tokens of a prompt (or of a turn's new part) and of its output.
Lengths: TypeAlias = Callable[[random.Random], tuple[int, int]]

# The token that ends a text, and the one that all outputs are made of; prompts have others.
END, WORD = 2, 7
_FIRST_WORD, _VOCABULARY = 8, 32_768
# How long who was refused waits before the next attempt, in seconds: a server tells it so.
RETRY_SECONDS = 1.0


@dataclass(slots=True)
class Talk:
    """A conversation, or a single request, which is one of one turn."""

    tenant: str
    turns_left: int = 1
    said: Tokens = field(default_factory=lambda: np.empty(0, np.int32))


@dataclass(slots=True)
class Request:
    """One request as it arrives; `output` is how many tokens it makes if nobody ends it before."""

    tenant: str
    arrives: float
    prompt: Tokens
    output: int
    talk: Talk | None = None


class Traffic(Protocol):
    """Requests in the order of their times, some of which follow from how earlier ones ended."""

    @property
    def tenants(self) -> Sequence[str]:
        """All who may ask."""
        ...

    @property
    def next_at(self) -> float:
        """When the next one comes; infinity if none does until another one ends."""
        ...

    def take(self) -> Request:
        """The next one."""
        ...

    def ended(self, request: Request, now: float, answered: bool) -> None:
        """One of them was answered, or it was refused, cancelled or failed."""
        ...


class Words:
    """Token ids drawn at random."""

    def __init__(self, seed: int, vocabulary: int = _VOCABULARY) -> None:
        self._random = np.random.default_rng(seed)
        self._end = vocabulary

    def draw(self, count: int) -> Tokens:
        """So many."""
        return self._random.integers(_FIRST_WORD, self._end, size=count, dtype=np.int32)


@dataclass(frozen=True)
class LogNormal:
    """Lengths around their means; `spread` is the standard deviation of their logarithms."""

    prompt: float
    output: float
    spread: float = 0.0

    def __call__(self, chance: random.Random) -> tuple[int, int]:
        """One of each; at least 1."""
        return self._around(self.prompt, chance), self._around(self.output, chance)

    def _around(self, mean: float, chance: random.Random) -> int:
        if self.spread == 0.0:
            return max(1, round(mean))
        middle = math.log(mean) - self.spread**2 / 2
        return max(1, round(math.exp(chance.gauss(middle, self.spread))))


@dataclass(frozen=True)
class Shape:
    """What made-up traffic is like.

    Exactly one of `rate` (conversations that begin, a second on average) and `callers` (as many as
    there are at any time) is given. `tenants` are weights of who asks.
    """

    lengths: Lengths
    rate: float | None = None
    callers: int | None = None
    requests: int = 1000  # in all
    turns: int = 1
    think: float = 0.0  # seconds between the turns of a conversation, half as much again at most
    tenants: Mapping[str, float] = field(default_factory=lambda: {"all": 1.0})
    vocabulary: int = _VOCABULARY

    def __post_init__(self) -> None:
        if (self.rate is None) == (self.callers is None):
            raise ValueError("traffic has either a rate or callers")


class MadeUp:
    """Traffic of a shape, drawn from a seed."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self._shape = shape
        self._times = random.Random(f"{seed}:times")
        # Apart, so that runs with other settings are asked for the same lengths in the same order.
        self._sizes = random.Random(f"{seed}:sizes")
        self._words = Words(seed, shape.vocabulary)
        self._left = shape.requests
        self._ties = itertools.count()
        self._due: list[tuple[float, int, Talk]] = []
        if shape.callers is not None:
            for _ in range(min(shape.callers, shape.requests)):
                self._begin(0.0)
        else:
            self._begin(0.0)

    def stop(self) -> None:
        """Nobody comes any more."""
        self._left = 0

    @property
    def tenants(self) -> Sequence[str]:
        """All who may ask."""
        return tuple(self._shape.tenants)

    @property
    def next_at(self) -> float:
        """See Traffic."""
        return self._due[0][0] if self._due and self._left > 0 else math.inf

    def take(self) -> Request:
        """See Traffic."""
        at, _, talk = heapq.heappop(self._due)
        self._left -= 1
        if self._shape.rate is not None and len(talk.said) == 0:
            self._begin(at + self._times.expovariate(self._shape.rate))
        new, output = self._shape.lengths(self._sizes)
        prompt = np.concatenate([talk.said, self._words.draw(new)])
        talk.turns_left -= 1
        return Request(talk.tenant, at, prompt, output, talk)

    def ended(self, request: Request, now: float, answered: bool) -> None:
        """See Traffic."""
        talk = request.talk
        assert talk is not None
        if answered and talk.turns_left > 0:
            talk.said = np.concatenate([request.prompt, np.full(request.output, WORD, np.int32)])
            self._push(now + self._shape.think * self._times.uniform(0.5, 1.5), talk)
        elif self._shape.callers is not None:
            self._begin(now if answered else now + RETRY_SECONDS)

    def _begin(self, at: float) -> None:
        weights = self._shape.tenants
        (tenant,) = self._times.choices(tuple(weights), tuple(weights.values()))
        self._push(at, Talk(tenant, self._shape.turns))

    def _push(self, at: float, talk: Talk) -> None:
        heapq.heappush(self._due, (at, next(self._ties), talk))


class Row(NamedTuple):
    """One request of a trace."""

    at: float
    prompt: int
    output: int
    tenant: str = "all"
    # The first `prefix_tokens` of its prompt are those of this prefix of its tenant.
    prefix: str = ""
    prefix_tokens: int = 0
    # It begins with all that was said before in this conversation of its tenant, as far as its
    # prompt reaches.
    conversation: str = ""


class Replay:
    """Rows of a trace at their times, however slow the answers are."""

    def __init__(self, rows: Sequence[Row], seed: int, rate_scale: float = 1.0) -> None:
        """`rate_scale` 2 lets them come twice as fast."""
        ordered = sorted(rows, key=lambda row: row.at)
        first = ordered[0].at if ordered else 0.0
        self._rows = [row._replace(at=(row.at - first) / rate_scale) for row in ordered]
        self._words = Words(seed)
        self._prefixes: dict[tuple[str, str], Tokens] = {}
        self._said: dict[tuple[str, str], Tokens] = {}
        self._place = 0

    @property
    def tenants(self) -> Sequence[str]:
        """All who may ask, in the order in which they come."""
        return tuple(dict.fromkeys(row.tenant for row in self._rows))

    @property
    def next_at(self) -> float:
        """See Traffic."""
        return self._rows[self._place].at if self._place < len(self._rows) else math.inf

    def take(self) -> Request:
        """See Traffic."""
        row = self._rows[self._place]
        self._place += 1
        begin = self._beginning(row)[: row.prompt]
        prompt = np.concatenate([begin, self._words.draw(row.prompt - len(begin))])
        if row.conversation:
            answer = np.full(row.output, WORD, np.int32)
            self._said[row.tenant, row.conversation] = np.concatenate([prompt, answer])
        return Request(row.tenant, row.at, prompt, row.output)

    def ended(self, request: Request, now: float, answered: bool) -> None:
        """Nothing follows from it."""

    def _beginning(self, row: Row) -> Tokens:
        """What its prompt begins with because others did."""
        said = self._said.get((row.tenant, row.conversation)) if row.conversation else None
        if said is not None:
            return said
        if not row.prefix:
            return np.empty(0, np.int32)
        known = self._prefixes.get((row.tenant, row.prefix), np.empty(0, np.int32))
        if len(known) < row.prefix_tokens:
            known = np.concatenate([known, self._words.draw(row.prefix_tokens - len(known))])
            self._prefixes[row.tenant, row.prefix] = known
        return known[: row.prefix_tokens]
