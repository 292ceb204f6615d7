"""The arithmetic of what prefix reuse saves and costs. No network and no server in here."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# How sure an interval is to hold the median, where there are values enough.
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Middle:
    """The median of some values, and the interval that holds the true one with 95 %."""

    median: float
    low: float
    high: float
    count: int

    def text(self, digits: int = 3) -> str:
        """For a table."""
        shown = (f"{value:.{digits}f}" for value in (self.median, self.low, self.high))
        return "{} ({} to {}, {})".format(*shown, self.count)


def middle(values: Iterable[float]) -> Middle:
    """The median with an interval between two of the values, whatever their distribution.

    The true median lies below k of n values with the binomial's probability for one half. With
    fewer than six values no pair of them is sure enough: then it is the least and the most.
    """
    ordered = sorted(values)
    if not ordered:
        return Middle(math.nan, math.nan, math.nan, 0)
    count = len(ordered)
    outside, rank = 0.0, 0
    for k in range(count // 2):
        outside += math.comb(count, k) / 2**count
        if 2 * outside > 1 - _CONFIDENCE:
            break
        rank = k
    return Middle(statistics.median(ordered), ordered[rank], ordered[-1 - rank], count)


def ratios(over: Sequence[float], under: Sequence[float]) -> Middle:
    """Of pairs that were measured beside each other: the ratio in each, and their middle."""
    return middle(a / b for a, b in zip(over, under, strict=True))


def jain(values: Sequence[float]) -> float:
    """Jain's index of fairness: 1 if all have the same, 1 / n if one has everything."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares > 0 else math.nan


def share(part: float, whole: float) -> float:
    """A part of a whole; nan of nothing."""
    return part / whole if whole > 0 else math.nan


def whole_blocks(tokens: int, block: int) -> int:
    """The tokens of the whole blocks among so many computed ones."""
    return tokens // block * block


def common_beginning(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens two lists begin with alike."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))


def reusable(before: Sequence[int], prompt: Sequence[int], block: int) -> int:
    """Tokens of a prompt that whole blocks hold of the turn before it, whose tokens are `before`.

    Of that turn the last token was never computed, and of this prompt the last one always is.
    """
    agree = min(common_beginning(before[:-1], prompt), len(prompt) - 1)
    return whole_blocks(agree, block)
