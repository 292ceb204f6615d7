"""Choosing tokens from logits, for all sequences of a step in one vectorized call.

What a request's options change in its logits comes first (logit_changes.py); then the order is
temperature, top_k, top_p, min_p. Randomness is counter-based: the number drawn for a
token depends on the request's seed and on the token's position, on nothing else, so a preempted
sequence goes on as if nothing had happened and neighbours do not matter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import structlog
import torch

from kvledger import _core
from kvledger.logit_changes import ChangeOptions, LogitChanges, change_logits
from kvledger.logprobs import TokenLogprobs, token_logprobs

_log = structlog.get_logger(__name__)

# Dividing logits by less than this would only amplify rounding: it is greedy.
TEMPERATURE_FLOOR = 0.01

# Candidates that top_p looks at before it sorts the whole vocabulary.
_NUCLEUS_TRIAL = 256

# Output of a row whose logits hold no usable number.
UNUSABLE = -1


@dataclass(frozen=True)
class SamplingParameters:
    """How one sequence chooses its tokens; see SamplingOptions in the contract."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    changes: ChangeOptions = field(default_factory=ChangeOptions)
    # How many of the likeliest tokens to tell with each token; None tells nothing.
    top_logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < TEMPERATURE_FLOOR


class Drawn(NamedTuple):
    """What was chosen in a step."""

    # int32 [n]; UNUSABLE where a row's largest logit is not finite, or choosing failed.
    tokens: npt.NDArray[np.int32]
    # By place in `tokens`, for the rows that asked.
    logprobs: dict[int, TokenLogprobs]


class Sampler:
    """Parameters by row of the block tables, and the draw. One thread at a time."""

    def __init__(self, rows: int, instruction_set: str = "auto") -> None:
        """`rows` is the number of rows of the block tables.

        `instruction_set` is one of `_core.instruction_sets()`, or "auto".
        """
        self._likeliest = _core.Likeliest(instruction_set)
        self._temperature = np.zeros(rows, dtype=np.float32)
        self._top_k = np.zeros(rows, dtype=np.int64)
        self._top_p = np.ones(rows, dtype=np.float32)
        self._min_p = np.zeros(rows, dtype=np.float32)
        self._seed = np.zeros(rows, dtype=np.uint64)
        self._top_logprobs = np.full(rows, -1, dtype=np.int32)
        # Who has changes, twice: a step in which nobody has any looks at no object.
        self._has_changes = np.zeros(rows, dtype=np.bool_)
        self._changes: dict[int, LogitChanges] = {}
        self._refused = np.zeros(rows, dtype=np.bool_)
        # Rows that take more than their likeliest token.
        self._special: set[int] = set()
        # Logits seen last, and their memory as an array: a model has the same tensor for as long as
        # a step has as many rows as the one before, and asking torch costs as much as the choice.
        self._seen: torch.Tensor | None = None
        self._seen_values = np.empty((0, 0), dtype=np.float32)

    def assign(
        self, row: int, parameters: SamplingParameters, changes: LogitChanges | None = None
    ) -> None:
        """Sets the parameters of the sequence that now has `row`.

        `changes` are those of that sequence, with all it has said before: the sampler tells them
        each token that it chooses.
        """
        self.release(row)
        self._temperature[row] = 0.0 if parameters.greedy else parameters.temperature
        self._top_k[row] = parameters.top_k
        self._top_p[row] = parameters.top_p
        self._min_p[row] = parameters.min_p
        self._seed[row] = parameters.seed
        if parameters.top_logprobs is not None:
            self._top_logprobs[row] = parameters.top_logprobs
        if changes is not None:
            self._changes[row] = changes
            self._has_changes[row] = True
        if changes is not None or not parameters.greedy or parameters.top_logprobs is not None:
            self._special.add(row)

    def refuse(self, row: int) -> None:
        """Makes every token of the sequence that now has `row` UNUSABLE."""
        self.release(row)
        self._refused[row] = True
        self._special.add(row)

    def release(self, row: int) -> None:
        """Forgets what belongs to the sequence that had `row`."""
        self._special.discard(row)
        self._temperature[row] = 0.0
        self._refused[row] = False
        self._changes.pop(row, None)
        self._has_changes[row] = False
        self._top_logprobs[row] = -1

    def sample(
        self,
        logits: torch.Tensor,
        rows: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
    ) -> npt.NDArray[np.int32]:
        """The tokens of `draw` alone."""
        return self.draw(logits, rows, positions).tokens

    def likeliest(self, logits: torch.Tensor) -> npt.NDArray[np.int32] | None:
        """What `draw` chooses while nobody who has a row wants more; None if somebody does.

        logits: float32 [n, vocabulary]. The tokens are int32 [n], UNUSABLE where a row's largest
        logit is not finite. Most steps need nothing else, and this touches nothing else.
        """
        if self._special:
            return None
        if logits is not self._seen:
            self._see(logits)
        return self._likeliest(self._seen_values)

    def draw(
        self,
        logits: torch.Tensor,
        rows: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
    ) -> Drawn:
        """Draws one token for each row of logits, and tells it to that row's changes.

        logits: float32 [n, vocabulary], left as they are. rows: int32 [n], whose parameters apply.
        positions: int32 [n], of the tokens drawn.
        """
        try:
            drawn = self._choose(logits, rows, positions)
        except Exception:
            _log.exception("sampling_failed", sequences=len(rows))
            drawn = self._choose_one_by_one(logits, rows, positions)
        self._learn(drawn.tokens, rows)
        return drawn

    def _choose_one_by_one(
        self,
        logits: torch.Tensor,
        rows: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
    ) -> Drawn:
        """The same tokens, for each depends on its row alone; a row that fails is UNUSABLE."""
        tokens = np.full(len(rows), UNUSABLE, dtype=np.int32)
        logprobs: dict[int, TokenLogprobs] = {}
        for place in range(len(rows)):
            one = slice(place, place + 1)
            try:
                drawn = self._choose(logits[one], rows[one], positions[one])
            except Exception:  # noqa: S112  # told already, with the whole step
                continue
            tokens[place] = drawn.tokens[0]
            if drawn.logprobs:
                logprobs[place] = drawn.logprobs[0]
        return Drawn(tokens, logprobs)

    def _learn(self, tokens: npt.NDArray[np.int32], rows: npt.NDArray[np.int32]) -> None:
        if not self._changes:
            return
        for place in np.flatnonzero(self._has_changes[rows] & (tokens != UNUSABLE)).tolist():
            if not self._tell(int(rows[place]), int(tokens[place])):
                tokens[place] = UNUSABLE  # what it would draw next could be wrong

    def _tell(self, row: int, token: int) -> bool:
        try:
            self._changes[row].learn(token)
        except Exception:
            _log.exception("sampling_failed", sequences=1)
            return False
        return True

    def _see(self, logits: torch.Tensor) -> None:
        self._seen_values = logits.numpy()
        self._seen = logits

    def _choose(
        self,
        logits: torch.Tensor,
        rows: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
    ) -> Drawn:
        """Changes nothing, so it can be tried again."""
        values = logits.numpy()
        chosen = self._likeliest(values)
        highest = values[np.arange(len(rows)), chosen]
        usable = (chosen != UNUSABLE) & ~self._refused[rows]
        changed = np.flatnonzero(self._has_changes[rows] & usable)
        if changed.size:
            own = values[changed]  # a copy: log-probabilities are the model's
            change_logits(
                own, [self._changes[row] for row in rows[changed].tolist()], positions[changed]
            )
            chosen[changed] = self._likeliest(own)
            highest[changed] = own.max(axis=1)
            usable[changed] = chosen[changed] != UNUSABLE
        drawn = np.flatnonzero((self._temperature[rows] > 0.0) & usable)
        if drawn.size:
            scores = logits[torch.from_numpy(drawn)]
            if changed.size:
                # Both are in rising order, so what they share is in the same order on both sides.
                both = torch.from_numpy(np.isin(drawn, changed))
                scores[both] = torch.from_numpy(own[np.isin(changed, drawn)])
            scores -= torch.from_numpy(highest[drawn])[:, None]
            chosen[drawn] = self._draw(scores, rows[drawn], positions[drawn])
        chosen[~usable] = UNUSABLE
        asked = np.flatnonzero((self._top_logprobs[rows] >= 0) & usable)
        logprobs = {
            place: token_logprobs(
                values[place], int(chosen[place]), int(self._top_logprobs[rows[place]])
            )
            for place in asked.tolist()
        }
        return Drawn(chosen, logprobs)

    def _draw(
        self,
        scores: torch.Tensor,
        rows: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
    ) -> npt.NDArray[np.int32]:
        """Scores [n, vocabulary] are logits less their row's largest; they are overwritten."""
        scores /= torch.from_numpy(self._temperature[rows])[:, None]
        _keep_top_k(scores, self._top_k[rows])
        _keep_top_p(scores, self._top_p[rows])
        least = torch.from_numpy(np.log(np.maximum(self._min_p[rows], 1e-30)))
        scores.masked_fill_(scores < least[:, None], float("-inf"))
        # Sums in float64: the last token must be reachable in a vocabulary of any size.
        sums = scores.double().exp_().cumsum(dim=1)
        uniform = torch.from_numpy(uniforms(self._seed[rows], positions))
        # The first token whose cumulated weight passes the drawn one has weight above zero.
        points = torch.minimum(uniform * sums[:, -1], torch.nextafter(sums[:, -1], sums[:, -1] * 0))
        found = torch.searchsorted(sums, points[:, None], right=True)[:, 0]
        return found.numpy().astype(np.int32)


def _keep_top_k(scores: torch.Tensor, top_k: npt.NDArray[np.int64]) -> None:
    """Drops what is less likely than the k-th most likely token of its row; ties with it stay."""
    limited = np.flatnonzero((top_k > 0) & (top_k < scores.shape[1]))
    if not limited.size:
        return
    rows = torch.from_numpy(limited)
    subset = scores[rows]
    best = subset.topk(int(top_k[limited].max()), dim=1).values
    least = best.gather(1, torch.from_numpy(top_k[limited])[:, None] - 1)
    scores[rows] = subset.masked_fill(subset < least, float("-inf"))


def _keep_top_p(scores: torch.Tensor, top_p: npt.NDArray[np.float32]) -> None:
    """Keeps the most likely tokens that together reach top_p; ties with the last of them stay."""
    limited = np.flatnonzero(top_p < 1.0)
    if not limited.size:
        return
    rows = torch.from_numpy(limited)
    subset = scores[rows]
    mass = torch.from_numpy(top_p[limited]).double() * subset.double().exp().sum(dim=1)
    count = min(_NUCLEUS_TRIAL, subset.shape[1])
    least = torch.empty(len(limited), dtype=subset.dtype)
    open_rows = torch.arange(len(limited))
    while open_rows.numel():
        best = subset[open_rows].topk(count, dim=1).values
        reached = best.double().exp().cumsum(dim=1) >= mass[open_rows, None]
        reached[:, -1] |= count == subset.shape[1]
        done = reached.any(dim=1)
        last = reached.int().argmax(dim=1)
        least[open_rows[done]] = best[done].gather(1, last[done, None])[:, 0]
        open_rows = open_rows[~done]
        count = min(count * 16, subset.shape[1])
    scores[rows] = subset.masked_fill(subset < least[:, None], float("-inf"))


def uniforms(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int32]
) -> npt.NDArray[np.float64]:
    """A number in [0, 1) for each pair of seed and position: float64 [n].

    SplitMix64 (Steele, Lea and Flood 2014) is a counter through a mixing function; the seed is
    mixed first, so that seeds next to each other share no numbers.
    """
    with np.errstate(over="ignore"):
        counter = positions.astype(np.uint64) + np.uint64(1)
        state = _mix(seeds) + counter * np.uint64(0x9E3779B97F4A7C15)
        return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
