"""How long steps take here, fitted to an interval: the time of each phase's steps by their tokens
and keys.

    decode   = fixed + token x sequences + key x keys they read
    prefill  = fixed + token x prompt tokens + key x keys they read

The core keeps the normal equations of these (core/step_books.h), from which the weights of any
interval come by least squares. Steps that are much alike tell weights apart badly: one batch size
says nothing of another. What the interval leaves open is taken from the floors
(planning/floors.py), scaled to the time that the steps took: it is known what a token must compute
and a key must read, and not how well this build does it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvledger.diagnosis.counts import DECODE, PREFILL, Counts64, Sums64
from kvledger.planning.floors import StepCosts

# How much the floors count beside the interval, as a share of what the interval says along each
# weight: little where it tells the weights apart, all where it does not.
_FLOORS_SHARE = 0.01
_ROUNDS = 400


class StepCounts(Protocol):
    """What steps did, as core/step_books.h has it: of an interval, or since the start."""

    @property
    def phases(self) -> Counts64:
        """Sums by phase."""
        ...

    @property
    def fits(self) -> Sums64:
        """Normal equations by phase."""
        ...


@dataclass(frozen=True)
class PhaseFit:
    """Seconds of a step of one phase."""

    fixed: float
    token: float
    key: float

    def seconds(self, tokens: float, keys: float) -> float:
        """A step of so many tokens, which read so many keys in all."""
        return self.fixed + self.token * tokens + self.key * keys

    def times(self, fixed: float, token: float, key: float) -> PhaseFit:
        """With each weight times a factor."""
        return PhaseFit(self.fixed * fixed, self.token * token, self.key * key)


def decode_floor(costs: StepCosts) -> PhaseFit:
    """What a decode step takes at least, if reading and computing do not overlap."""
    peaks = costs.peaks
    return PhaseFit(
        (costs.layer_bytes + costs.head_bytes) / peaks.read_bytes_per_second,
        _computing(costs, costs.layer_operations) + _computing(costs, costs.head_operations),
        key_read(costs) + key_computed(costs),
    )


def prefill_floor(costs: StepCosts) -> PhaseFit:
    """The same of a step that computes prompts; a chunk reads its keys once for all its tokens."""
    return PhaseFit(
        costs.layer_bytes / costs.peaks.read_bytes_per_second,
        _computing(costs, costs.layer_operations),
        key_computed(costs),
    )


def key_read(costs: StepCosts) -> float:
    """Seconds to read a token's keys and values."""
    return costs.kv_token_bytes / costs.peaks.read_bytes_per_second


def key_computed(costs: StepCosts) -> float:
    """Seconds of arithmetic for a token and a key."""
    return costs.key_operations / costs.peaks.operations("f32")


def _computing(costs: StepCosts, operations: object) -> float:
    assert isinstance(operations, dict)
    return float(sum(count / costs.peaks.operations(name) for name, count in operations.items()))


def fit_phase(counts: StepCounts, phase: int, costs: StepCosts) -> PhaseFit | None:
    """The steps of a phase in an interval; None where there were none.

    Over the whole interval they come to the time that the phase took.
    """
    assert phase in (DECODE, PREFILL)
    floor = decode_floor(costs) if phase == DECODE else prefill_floor(costs)
    steps, nanoseconds, tokens, keys, _ = (int(value) for value in counts.phases[phase])
    seconds = nanoseconds / 1e9
    if steps == 0 or seconds <= 0.0:
        return None
    scale = seconds / (floor.fixed * steps + floor.token * tokens + floor.key * keys)
    prior = floor.times(scale, scale, scale)
    found = _solved(counts.fits[phase], prior)
    whole = found.fixed * steps + found.token * tokens + found.key * keys
    return found.times(*([seconds / whole] * 3)) if whole > 0.0 else prior


def _solved(sums: npt.NDArray[np.float64], prior: PhaseFit) -> PhaseFit:
    """Weights without negative ones that fit best, held to `prior` where nothing else is said."""
    ones, ones_tokens, ones_keys, tokens, tokens_keys, keys = (float(each) for each in sums[:6])
    products = np.array(
        [
            [ones, ones_tokens, ones_keys],
            [ones_tokens, tokens, tokens_keys],
            [ones_keys, tokens_keys, keys],
        ]
    )
    values = np.array(sums[6:9], np.float64) / 1e9
    first = np.array([prior.fixed, prior.token, prior.key])
    held = _FLOORS_SHARE * np.diag(products)
    if not np.all(held > 0.0):
        return prior
    products = products + np.diag(held)
    values = values + held * first
    weights = first.copy()
    for _ in range(_ROUNDS):
        for i in range(3):
            rest = values[i] - products[i] @ weights + products[i, i] * weights[i]
            weights[i] = max(0.0, rest / products[i, i])
    return PhaseFit(*(float(weight) for weight in weights))
