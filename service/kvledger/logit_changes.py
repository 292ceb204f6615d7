"""What a request's options do to the model's logits before a token is chosen.

Per sequence: which tokens it has, how often each came out, biases, the tokens that may not come
yet, and what its constraint leaves. A sequence keeps its own from its first admission to its end,
so nothing is lost when it is preempted and nothing passes to the next one in its row.

The arithmetic is one pass over the tokens that matter, for all sequences of a step together. It
works element by element in float32, so a sequence's logits do not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvledger.errors import InvalidRequest

_LARGEST = np.finfo(np.float32).max
# Places for tokens of the output in a sequence that has none yet; they double.
_FIRST_PLACES = 64


class ConstraintState(Protocol):
    """What a constraint leaves to one sequence; its methods raise where it is broken."""

    def fill(self, words: npt.NDArray[np.int32]) -> None:
        """Writes which tokens may come next: a bit a token, the lowest first."""

    def learn(self, token: int) -> None:
        """Takes in the token that came."""


class Constraint(Protocol):
    """What a sequence must match."""

    @property
    def broken(self) -> InvalidRequest | None:
        """Why it left a sequence no token; None while it leaves some."""

    def start(self) -> ConstraintState:
        """The state of a sequence that has said nothing yet."""


@dataclass(frozen=True)
class ChangeOptions:
    """The options that change logits; see SamplingOptions and StopOptions in the contract."""

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    # Tokens that cannot come among the first `min_tokens`: those that would end the output.
    ending_ids: tuple[int, ...] = ()
    constraint: Constraint | None = None
    # Under a constraint, tokens that come only where it leaves no others.
    last_ids: tuple[int, ...] = ()

    @property
    def penalizes(self) -> bool:
        """Whether it matters which tokens a sequence has."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def changes_anything(self) -> bool:
        """Whether logits are ever other than the model's."""
        return bool(
            self.penalizes
            or self.logit_bias
            or (self.min_tokens and self.ending_ids)
            or self.constraint is not None
        )


class LogitChanges:
    """One sequence's changes: its options, and what it has said so far."""

    def __init__(self, options: ChangeOptions, prompt: npt.NDArray[np.int32]) -> None:
        """`prompt` is int32 [tokens]."""
        self.options = options
        self.bias_ids = np.array([token for token, _ in options.logit_bias], dtype=np.int64)
        self.biases = np.array([bias for _, bias in options.logit_bias], dtype=np.float32)
        self.ending_ids = np.array(options.ending_ids, dtype=np.int64)
        self.last_ids = np.array(options.last_ids, dtype=np.int64)
        self.state = options.constraint.start() if options.constraint is not None else None
        # Position of the first token that may end the output.
        self.open_from = len(prompt) + options.min_tokens if options.ending_ids else 0
        # Distinct tokens and how often each stands in the output: first those of the prompt, in
        # their order, where only the repetition penalty asks for them; then others as they come.
        known = np.unique(prompt) if options.repetition_penalty != 1.0 else prompt[:0]
        self._prompt_count = self._count = len(known)
        self._ids = np.empty(len(known) + _FIRST_PLACES, dtype=np.int64)
        self._ids[: len(known)] = known
        self._times = np.zeros(len(self._ids), dtype=np.int32)
        self._places: dict[int, int] = {}

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """The tokens whose logits penalties change, each once."""
        return self._ids[: self._count]

    @property
    def times(self) -> npt.NDArray[np.int32]:
        """How often each of `ids` stands in the output."""
        return self._times[: self._count]

    def learn(self, token: int) -> None:
        """Counts a token of the output."""
        if self.state is not None:
            self.state.learn(token)
        if not self.options.penalizes:
            return
        place = self._places.get(token)
        if place is None:
            place = self._new_place(token)
            self._places[token] = place
        self._times[place] += 1

    def _new_place(self, token: int) -> int:
        place = int(np.searchsorted(self._ids[: self._prompt_count], token))
        if place < self._prompt_count and self._ids[place] == token:
            return place
        if self._count == len(self._ids):
            self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
            self._times = np.concatenate((self._times, np.zeros_like(self._times)))
        place = self._count
        self._ids[place] = token
        self._count += 1
        return place


def change_logits(
    values: npt.NDArray[np.float32],
    changes: Sequence[LogitChanges],
    positions: npt.NDArray[np.int32],
) -> None:
    """Changes logits in place: float32 [n, vocabulary], one row for each of `changes`.

    `positions` int32 [n] are those of the tokens to be chosen. What the model rules out (minus
    infinity) stays so, and a finite logit stays finite. A row of a sequence with a constraint that
    is broken raises.
    """
    _penalize(values, changes)
    rows, ids = _flat([each.bias_ids for each in changes])
    if ids.size:
        # No token has two biases: each place is written once.
        values[rows, ids] += np.concatenate([each.biases for each in changes])
    nothing = np.empty(0, dtype=np.int64)
    rows, ids = _flat(
        [
            each.ending_ids if position < each.open_from and each.state is None else nothing
            for each, position in zip(changes, positions.tolist(), strict=True)
        ]
    )
    values[rows, ids] = -np.inf
    for row, (each, position) in enumerate(zip(changes, positions.tolist(), strict=True)):
        if each.state is not None:
            _constrain(values[row], each, each.state, position)


def _constrain(
    values: npt.NDArray[np.float32], changes: LogitChanges, state: ConstraintState, position: int
) -> None:
    """Rules out what a constraint does, in one row.

    A least length yields to it: where it leaves nothing but the end, the end comes.
    """
    words = np.empty((len(values) + 31) // 32, dtype=np.int32)
    state.fill(words)
    bits = np.unpackbits(words.view(np.uint8), count=len(values), bitorder="little")
    put_off = changes.last_ids
    if position < changes.open_from:
        put_off = np.concatenate((put_off, changes.ending_ids))
    if put_off.size:
        without = bits.copy()
        without[put_off] = 0
        bits = without if without.any() else bits
    values[bits == 0] = -np.inf


def _penalize(values: npt.NDArray[np.float32], changes: Sequence[LogitChanges]) -> None:
    rows, ids = _flat([each.ids for each in changes])
    if not ids.size:
        return
    times = np.concatenate([each.times for each in changes]).astype(np.float32)
    factors, presence, frequency = (
        np.array(column, dtype=np.float32)[rows]
        for column in zip(
            *(
                (o.repetition_penalty, o.presence_penalty, o.frequency_penalty)
                for o in (each.options for each in changes)
            ),
            strict=True,
        )
    )
    before = values[rows, ids]
    # A factor next to nothing is allowed, and divides beyond what float32 holds.
    with np.errstate(all="ignore"):
        after = np.where(before > 0, before / factors, before * factors)
        after -= times * frequency + (times > 0) * presence
    values[rows, ids] = np.where(np.isfinite(before), np.clip(after, -_LARGEST, _LARGEST), before)


def _flat(
    lists: Sequence[npt.NDArray[np.int64]],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Row of each id, and the ids, one list after the other."""
    counts = [len(ids) for ids in lists]
    return np.repeat(np.arange(len(lists)), counts), np.concatenate(lists)
