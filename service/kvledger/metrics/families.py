"""Families of samples that are made when somebody asks, from counts that others keep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

# The values of a family's labels, in the order of the labels.
Values = Mapping[tuple[str, ...], float]


def counter(name: str, meaning: str, labels: Sequence[str], values: Values) -> Metric:
    """A counter; `name` is without `_total`."""
    family = CounterMetricFamily(name, meaning, labels=labels)
    for label_values, value in values.items():
        family.add_metric(label_values, value)
    return family


def gauge(name: str, meaning: str, labels: Sequence[str], values: Values) -> Metric:
    """A gauge; without values it is known and has no sample."""
    family = GaugeMetricFamily(name, meaning, labels=labels)
    for label_values, value in values.items():
        family.add_metric(label_values, value)
    return family


def histogram(
    name: str,
    meaning: str,
    labels: Sequence[str],
    bounds: Sequence[float],
    rows: Mapping[tuple[str, ...], tuple[Iterable[float], float]],
) -> Metric:
    """A histogram from counts of each bucket and a sum.

    The last bucket has no bound, so there is one count more than there are `bounds`.
    """
    family = HistogramMetricFamily(name, meaning, labels=labels)
    limits = [*(repr(float(bound)) for bound in bounds), "+Inf"]
    for label_values, (counts, total) in rows.items():
        reached, buckets = 0.0, []
        for limit, count in zip(limits, counts, strict=True):
            reached += count
            buckets.append((limit, reached))
        family.add_metric(label_values, buckets, total)
    return family
