"""What operators can chart: the server's metrics, in a registry of their own.

Names follow Prometheus' rules: base units, `_total` for counters, the prefix kvledger_. What the
server already keeps is read when somebody asks (`watch`); what happens is counted as it happens. No
metric has a label whose values a client chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

# A second series for each counter, about when it was made, that nobody charts.
disable_created_metrics()  # type: ignore[no-untyped-call]

# How a call can end: gRPC's statuses, each there from the start so that rates begin at zero.
_STATUSES = (
    *("OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND"),
    *("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "ABORTED", "UNIMPLEMENTED", "INTERNAL"),
    *("UNAVAILABLE", "UNAUTHENTICATED"),
)

# Why the door refuses a request; of limits that a tenant has, their names.
REFUSALS = (
    *("never_fits", "draining", "tenant_closed", "queue_full", "queued_tokens_full"),
    *("queued_max", "queued_tokens_max", "tokens_per_second"),
)


class Metrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # process_*: memory, descriptors, time
        self._requests = Counter(
            "kvledger_requests",
            "Calls of clients that ended, by the status that they ended with.",
            ["status"],
            registry=self.registry,
        )
        for status in _STATUSES:
            self._requests.labels(status)
        self._refusals = Counter(
            "kvledger_refusals",
            "Requests that the door did not let in, by why.",
            ["reason"],
            registry=self.registry,
        )
        for reason in REFUSALS:
            self._refusals.labels(reason)
        self._reload_failures = Counter(
            "kvledger_certificate_reload_failures",
            "Changes of the files of TLS that could not be used; the old set stayed.",
            registry=self.registry,
        )

        self._tenants_kept = Counter(
            "kvledger_tenants_reload_failures",
            "Changes of --tenants or --jwt that could not be used; what was good stayed.",
            registry=self.registry,
        )

    def request_ended(self, status: str) -> None:
        """Counts a call of a client."""
        self._requests.labels(status).inc()

    def refused(self, reason: str) -> None:
        """Counts a request that did not enter, by one of REFUSALS."""
        self._refusals.labels(reason).inc()

    def certificate_kept(self) -> None:
        """Counts files of TLS that changed and could not be used."""
        self._reload_failures.inc()

    def tenants_kept(self) -> None:
        """Counts a file of tenants that changed and could not be used."""
        self._tenants_kept.inc()

    def watch(self, name: str, meaning: str, value: Callable[[], float]) -> None:
        """A gauge whose value is asked for at every scrape; from another thread."""
        Gauge(name, meaning, registry=self.registry).set_function(value)

    def watch_by(
        self, name: str, meaning: str, label: str, values: Callable[[], Mapping[str, float]]
    ) -> None:
        """The same with one value for each value of a label, all of them of one moment."""
        self.registry.register(_Watched(name, meaning, label, values))

    def watch_count(self, name: str, meaning: str, value: Callable[[], float]) -> None:
        """A counter that somebody else keeps, asked for at every scrape; from another thread.

        `name` is without `_total`.
        """
        self.registry.register(_WatchedCount(name, meaning, value))

    def counter(self, name: str, meaning: str, label: str, values: Sequence[str]) -> Counter:
        """A counter for each value of a label, all there from the start."""
        counter = Counter(name, meaning, [label], registry=self.registry)
        for value in values:
            counter.labels(value)
        return counter


class _Watched(Collector):
    """Values of one moment; separate gauges could be read across a step."""

    def __init__(
        self, name: str, meaning: str, label: str, values: Callable[[], Mapping[str, float]]
    ) -> None:
        self._name, self._meaning, self._label, self._values = name, meaning, label, values

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """The metric without values, so that registering asks for none."""
        return [GaugeMetricFamily(self._name, self._meaning, labels=[self._label])]

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """The values now."""
        family = GaugeMetricFamily(self._name, self._meaning, labels=[self._label])
        for label, value in self._values().items():
            family.add_metric([label], value)
        return [family]


class _WatchedCount(Collector):
    """A count that only goes up, kept elsewhere."""

    def __init__(self, name: str, meaning: str, value: Callable[[], float]) -> None:
        self._name, self._meaning, self._value = name, meaning, value

    def describe(self) -> Iterable[CounterMetricFamily]:
        """The metric without a value, so that registering asks for none."""
        return [CounterMetricFamily(self._name, self._meaning)]

    def collect(self) -> Iterable[CounterMetricFamily]:
        """The count now."""
        return [CounterMetricFamily(self._name, self._meaning, value=self._value())]
