"""Choosing tokens from logits, for all sequences of a step in one vectorized call.

The order is temperature, top_k, top_p, min_p. Randomness is counter-based: the number drawn for a
token depends on the request's seed and on the token's position, on nothing else, so a preempted
sequence goes on as if nothing had happened and neighbours do not matter.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

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

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < TEMPERATURE_FLOOR


class Sampler:
    """Parameters by row of the block tables, and the draw. One thread at a time."""

    def __init__(self, rows: int) -> None:
        """`rows` is the number of rows of the block tables."""
        self._temperature = np.zeros(rows, dtype=np.float32)
        self._top_k = np.zeros(rows, dtype=np.int64)
        self._top_p = np.ones(rows, dtype=np.float32)
        self._min_p = np.zeros(rows, dtype=np.float32)
        self._seed = np.zeros(rows, dtype=np.uint64)

    def assign(self, row: int, parameters: SamplingParameters) -> None:
        """Sets the parameters of the sequence that now has `row`."""
        self._temperature[row] = 0.0 if parameters.greedy else parameters.temperature
        self._top_k[row] = parameters.top_k
        self._top_p[row] = parameters.top_p
        self._min_p[row] = parameters.min_p
        self._seed[row] = parameters.seed

    def sample(
        self,
        logits: torch.Tensor,
        rows: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
    ) -> npt.NDArray[np.int32]:
        """Draws one token for each row of logits.

        logits: float32 [n, vocabulary]. rows: int32 [n], whose parameters apply. positions: int32
        [n], of the tokens drawn. Returns int32 [n]; UNUSABLE where a row's largest logit is not
        finite.
        """
        values = logits.numpy()
        chosen: npt.NDArray[np.int32] = values.argmax(axis=1).astype(np.int32)  # NaN comes first
        highest = values[np.arange(len(rows)), chosen]
        usable = np.isfinite(highest)
        drawn = np.flatnonzero((self._temperature[rows] > 0.0) & usable)
        if drawn.size:
            scores = logits[torch.from_numpy(drawn)] - torch.from_numpy(highest[drawn])[:, None]
            chosen[drawn] = self._draw(scores, rows[drawn], positions[drawn])
        chosen[~usable] = UNUSABLE
        return chosen

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
