"""Metrics of requests, observed once for each: when its receipt comes, or it ends without one."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import Counter, Histogram

from kvledger.metrics import Metrics
from kvledger.metrics.clock import BooksClock
from kvledger.metrics.tenants import CONSTRAINT, NO_RECEIPT, REASONS, TenantMetrics
from kvledger.streams import Receipt

_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0),
    *(100.0, 250.0, 500.0, 1000.0),
)
_TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2),
    *(0.3, 0.5, 1.0, 2.5, 10.0),
)
_TOKENS = tuple(float(4**power) for power in range(11))

_NANOSECONDS = 1e9


class RequestMetrics:
    """Histograms and counters that receipts fill. Belongs to the event loop's thread."""

    def __init__(self, metrics: Metrics, tenants: TenantMetrics, clock: BooksClock) -> None:
        self._metrics = metrics
        self._tenants = tenants
        ended = metrics.counter(
            "kvledger_requests_ended", "Requests that ended, by why.", "reason", REASONS
        )
        self._ended: dict[str, Counter] = {reason: ended.labels(reason) for reason in REASONS}
        self.first_token = self._histogram(
            "kvledger_time_to_first_token_seconds",
            "From a request's arrival to its first token, of those that had one; of preempted "
            "ones, what they waited and computed again later is in it.",
            _SECONDS,
        )
        self.per_token = self._histogram(
            "kvledger_time_per_output_token_seconds",
            "Mean time of a request's output tokens after the first, of those with several.",
            _TOKEN_SECONDS,
        )
        self.duration = self._histogram(
            "kvledger_request_duration_seconds", "From arrival to end.", _SECONDS
        )
        self.queue = self._histogram(
            "kvledger_request_queue_seconds",
            "Of that, waiting to run, the first time and after preemptions.",
            _SECONDS,
        )
        self.prefill = self._histogram(
            "kvledger_request_prefill_seconds",
            "Of that, while tokens were computed that its next output needs.",
            _SECONDS,
        )
        self.decode = self._histogram(
            "kvledger_request_decode_seconds", "Of that, while output was made.", _SECONDS
        )
        self.prompt = self._histogram(
            "kvledger_request_prompt_tokens", "Tokens of the prompts of requests.", _TOKENS
        )
        self.output = self._histogram(
            "kvledger_request_output_tokens",
            "Output tokens of requests, all samples together.",
            _TOKENS,
        )
        self._output_tokens = self._counter(
            "kvledger_output_tokens", "Output tokens of requests that have ended."
        )
        self._recomputed = self._counter(
            "kvledger_recomputed_tokens",
            "Tokens that requests, which have ended, computed again after preemptions.",
        )
        self.ended = clock.counted("receipts", self._count)

    @property
    def output_tokens(self) -> float:
        """Of requests that have ended."""
        return _value(self._output_tokens)

    def ended_count(self, reason: str) -> float:
        """Requests that ended for one of REASONS."""
        return _value(self._ended[reason])

    def _count(
        self, tenant: str, samples: int, receipt: Receipt | None, broke_constraint: bool = False
    ) -> None:
        """Counts a request of a tenant that has ended."""
        if receipt is None:
            reason = NO_RECEIPT
        elif broke_constraint:
            reason = CONSTRAINT
        else:
            reason = receipt.end_reason.name.lower()
        self._ended[reason].inc()
        self._tenants.request_ended(tenant, reason, receipt)
        if receipt is None:
            return
        whole = receipt.queued + receipt.prefill + receipt.decode + receipt.paused
        self.duration.observe(whole / _NANOSECONDS)
        self.queue.observe(receipt.queued / _NANOSECONDS)
        self.prompt.observe(receipt.prompt_tokens)
        self._recomputed.inc(receipt.recomputed_tokens)
        if receipt.output_tokens:
            self.prefill.observe(receipt.prefill / _NANOSECONDS)
            self.decode.observe(receipt.decode / _NANOSECONDS)
            self.output.observe(receipt.output_tokens)
            self.first_token.observe((receipt.queued + receipt.prefill) / _NANOSECONDS)
            self._output_tokens.inc(receipt.output_tokens)
        after_first = receipt.output_tokens / samples - 1
        if after_first > 0:
            self.per_token.observe(receipt.decode / after_first / _NANOSECONDS)

    def _histogram(self, name: str, meaning: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, meaning, buckets=buckets, registry=self._metrics.registry)

    def _counter(self, name: str, meaning: str) -> Counter:
        return Counter(name, meaning, registry=self._metrics.registry)


def _value(counter: Counter) -> float:
    (family,) = counter.collect()
    return float(family.samples[0].value)
