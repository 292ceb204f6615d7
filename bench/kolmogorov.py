"""The two-sample Kolmogorov-Smirnov test: whether two samples could be of one distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

# Terms of the series beyond which nothing changes; below the least argument, it is 1.
_TERMS = 100
_LEAST = 0.2


def distance(first: Sequence[float], second: Sequence[float]) -> float:
    """The largest difference between the two empirical distribution functions."""
    a, b = np.sort(np.asarray(first, float)), np.sort(np.asarray(second, float))
    if not len(a) or not len(b):
        raise ValueError("a sample is empty")
    both = np.concatenate([a, b])
    below_a = np.searchsorted(a, both, side="right") / len(a)
    below_b = np.searchsorted(b, both, side="right") / len(b)
    return float(np.abs(below_a - below_b).max())


def p_value(first: Sequence[float], second: Sequence[float]) -> float:
    """How likely samples of one distribution are at least so far apart: the asymptotic value."""
    effective = len(first) * len(second) / (len(first) + len(second))
    argument = math.sqrt(effective) * distance(first, second)
    if argument < _LEAST:
        return 1.0
    terms = ((-1) ** (k - 1) * math.exp(-2 * (k * argument) ** 2) for k in range(1, _TERMS + 1))
    return min(1.0, max(0.0, 2 * sum(terms)))
