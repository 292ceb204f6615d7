"""The same figures under names of vLLM's metrics, for dashboards and routers that read those.

Only names whose meaning this server can keep are here; docs/metrics.md says how each is worked out.
The others are missing rather than filled with something else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvledger.metrics.clock import BooksClock
from kvledger.metrics.families import counter, gauge, histogram
from kvledger.metrics.load import LoadMetrics
from kvledger.metrics.requests import RequestMetrics
from kvledger.metrics.steps import OCTAVES, StepMetrics

_LABEL = "model_name"

# Why requests end, in vLLM's words.
_REASONS = {
    "stop": ("stop",),
    "length": ("length", "context"),
    "abort": ("cancelled",),
    "error": ("failed", "constraint", "no_receipt"),
}


@dataclass(frozen=True)
class AliasSources:
    """Where the figures come from."""

    load: LoadMetrics
    steps: StepMetrics
    requests: RequestMetrics
    requests_waiting: Callable[[], int]
    prompt_tokens: Callable[[], Mapping[str, float]]  # by their source, of requests that ended


class VllmAliases(Collector):
    """Any thread may collect."""

    def __init__(self, model: str, sources: AliasSources, clock: BooksClock) -> None:
        """`model` is the label's value: the model's name as clients know it."""
        self._model = model
        self._sources = sources
        self._clock = clock

    def describe(self) -> Iterable[Metric]:
        """Nothing: names cannot clash with others."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """The families now."""
        with self._clock.scraping():
            return [*self._gauges(), *self._counters(), *self._histograms()]

    def _gauges(self) -> Iterable[Metric]:
        load = self._sources.load
        for name, meaning, value in (
            ("num_requests_running", "Requests that run.", load.sources.requests_running()),
            ("num_requests_waiting", "Requests that wait.", self._sources.requests_waiting()),
            (
                "kv_cache_usage_perc",
                "Of the pool, held, reserved or releasing, from 0 to 1.",
                load.waterline(),
            ),
        ):
            yield gauge(f"vllm:{name}", meaning, [_LABEL], {(self._model,): value})

    def _counters(self) -> Iterable[Metric]:
        requests = self._sources.requests
        prompts = self._sources.prompt_tokens()
        tokens = sum(prompts.values())
        for name, meaning, value in (
            ("prefix_cache_queries", "Tokens of prompts that were looked up.", tokens),
            ("prefix_cache_hits", "Of these, those found.", tokens - prompts["computed"]),
            ("prompt_tokens", "Tokens of prompts.", tokens),
            ("generation_tokens", "Output tokens.", requests.output_tokens),
            ("num_preemptions", "Preemptions.", float(self._sources.steps.preemptions())),
        ):
            yield counter(f"vllm:{name}", meaning, [_LABEL], {(self._model,): value})
        yield counter(
            "vllm:request_success",
            "Requests that ended, by why.",
            [_LABEL, "finished_reason"],
            {
                (self._model, reason): sum(requests.ended_count(each) for each in ours)
                for reason, ours in _REASONS.items()
            },
        )

    def _histograms(self) -> Iterable[Metric]:
        requests = self._sources.requests
        for name, source in (
            ("time_to_first_token_seconds", requests.first_token),
            ("request_time_per_output_token_seconds", requests.per_token),
            ("e2e_request_latency_seconds", requests.duration),
            ("request_queue_time_seconds", requests.queue),
            ("request_prefill_time_seconds", requests.prefill),
            ("request_decode_time_seconds", requests.decode),
            ("request_prompt_tokens", requests.prompt),
            ("request_generation_tokens", requests.output),
        ):
            yield self._renamed(f"vllm:{name}", source)
        gaps, seconds = self._sources.steps.gaps()
        for name in ("inter_token_latency_seconds", "time_per_output_token_seconds"):
            yield histogram(
                f"vllm:{name}",
                "Time between tokens.",
                [_LABEL],
                OCTAVES,
                {(self._model,): (gaps, seconds)},
            )

    def _renamed(self, name: str, source: Histogram) -> Metric:
        (family,) = source.collect()
        renamed = Metric(name, family.documentation, "histogram")
        for sample in family.samples:
            suffix = sample.name.removeprefix(family.name)
            renamed.add_sample(name + suffix, {_LABEL: self._model, **sample.labels}, sample.value)
        return renamed
