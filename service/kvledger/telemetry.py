"""Traces and metrics of requests for an OpenTelemetry collector: `--otlp` and the extra
`kvledger[otel]`.

One span for each request, made of its receipt when it has ended, so nothing is added to a step or a
token. Names are those of the semantic conventions for generative AI; what they have no name for is
under `kvledger.`. Numbers and names that the operator gave, never what was said. A thread of the
SDK's sends them; what a collector does not take in time is dropped, and the service goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from kvledger import __version__
from kvledger.books.lines import EndedRequest
from kvledger.engine import EndReason
from kvledger.errors import SettingRefused
from kvledger.streams import Receipt

_KEY = "traceparent"
# W3C Trace Context, version 00: version, trace, parent, flags.
_TRACE_PARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}\Z")
_NANOS = 1e9
# From one sending of metrics to the next, and how long the last one may take; milliseconds.
_EVERY = 10_000
_LAST = 2_000
# Bounds that the conventions name, in seconds.
_DURATION = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)

# How an answer ended, as the conventions say it; a request that failed has none.
_FINISH = {EndReason.STOP: "stop", EndReason.LENGTH: "length", EndReason.CONTEXT: "length"}


def trace_parent(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """What a call's metadata says it is a part of; empty if nothing that can be understood.

    The conventions want an unreadable one ignored: the trace then begins here.
    """
    given = [value for key, value in metadata or () if key == _KEY]
    if len(given) != 1 or not isinstance(given[0], str) or not _TRACE_PARENT.match(given[0]):
        return ""
    return given[0]


class Telemetry(Protocol):
    """Whatever wants to hear of requests that have ended."""

    def ended(self, request: EndedRequest) -> None:
        """A request has its receipt, or ended without one."""

    async def close(self) -> None:
        """Sends what is left; takes seconds at most."""


class NoTelemetry:
    """Without `--otlp`."""

    def ended(self, request: EndedRequest) -> None:
        """Nobody wants to know."""

    async def close(self) -> None:
        """There is nothing left."""


def telemetry(endpoint: str | None, model: str) -> Telemetry:
    """Sends to a collector's OTLP/gRPC address such as http://127.0.0.1:4317; nowhere if None.

    What the OTEL_ variables say (headers, certificates, sampling, resource) holds beside it. Raises
    SettingRefused where the extra is not installed.
    """
    if endpoint is None:
        return NoTelemetry()
    try:
        return _Collector(endpoint, model)
    except ImportError:
        raise SettingRefused(
            "--otlp needs OpenTelemetry; install it with: pip install 'kvledger[otel]'"
        ) from None


class _Collector:
    def __init__(self, endpoint: str, model: str) -> None:
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        # Variables of the environment come before these.
        named = Resource.create({"service.name": "kvledger", "service.version": __version__})
        resource = named.merge(OTELResourceDetector().detect())
        self._model = model
        self._traces = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._traces.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        reader = PeriodicExportingMetricReader(
            OTLPMetricExporter(endpoint=endpoint), export_interval_millis=_EVERY
        )
        self._metrics = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
        self._tracer = self._traces.get_tracer("kvledger", __version__)
        meter = self._metrics.get_meter("kvledger", __version__)
        self._duration = meter.create_histogram(
            "gen_ai.server.request.duration",
            "s",
            "From a request's arrival to its end.",
            explicit_bucket_boundaries_advisory=_DURATION,
        )
        self._first_token = meter.create_histogram(
            "gen_ai.server.time_to_first_token",
            "s",
            "From a request's arrival to its first token.",
            explicit_bucket_boundaries_advisory=_FIRST_TOKEN,
        )
        self._per_token = meter.create_histogram(
            "gen_ai.server.time_per_output_token",
            "s",
            "Mean time of a request's tokens after the first.",
            explicit_bucket_boundaries_advisory=_PER_TOKEN,
        )

    def ended(self, request: EndedRequest) -> None:
        """See Telemetry."""
        receipt = request.receipt
        operation = "chat" if request.is_chat else "text_completion"
        labels: dict[str, str] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "kvledger",
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
        }
        if (error := _error_of(request)) is not None:
            labels["error.type"] = error
        end = time.time_ns()
        life = 0 if receipt is None else receipt.life
        self._span(request, labels, error, end - life, end)
        if receipt is None:
            return
        self._duration.record(life / _NANOS, labels)
        if receipt.output_tokens > 0:
            self._first_token.record(first_token_seconds(receipt), labels)
        if receipt.output_tokens > request.samples:
            steps = receipt.output_tokens / request.samples - 1
            self._per_token.record(receipt.decode / _NANOS / steps, labels)

    def _span(
        self,
        request: EndedRequest,
        labels: Mapping[str, str],
        error: str | None,
        start: int,
        end: int,
    ) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        span = self._tracer.start_span(
            f"{labels['gen_ai.operation.name']} {self._model}",
            context=_parent(request.trace),
            kind=SpanKind.SERVER,
            attributes={**labels, **_attributes(request)},
            start_time=start,
        )
        if error is not None:
            span.set_status(Status(StatusCode.ERROR))
        here = set_span_in_context(span)
        for name, begins, ends in _parts(request.receipt, start):
            part = self._tracer.start_span(name, context=here, start_time=begins)
            part.end(ends)
        span.end(end)

    async def close(self) -> None:
        """See Telemetry. A collector that does not answer is not waited for."""
        loop, closed = asyncio.get_running_loop(), asyncio.Event()

        def send() -> None:
            try:
                self._metrics.force_flush(_LAST)
                self._traces.force_flush(_LAST)
            finally:
                with contextlib.suppress(RuntimeError):  # the loop has not waited
                    loop.call_soon_threadsafe(closed.set)
            self._metrics.shutdown()
            self._traces.shutdown()

        # A thread of its own, which ends with the process.
        threading.Thread(target=send, name="telemetry", daemon=True).start()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(closed.wait(), _LAST / 1000)


def first_token_seconds(receipt: Receipt) -> float:
    """From arrival to the first token; of a preempted request, later waits are in it."""
    return (receipt.queued + receipt.prefill) / _NANOS


def _error_of(request: EndedRequest) -> str | None:
    receipt = request.receipt
    if receipt is None:
        return "lost"
    if receipt.end_reason in _FINISH:
        return None
    if request.broke_constraint:
        return "constraint"
    return receipt.end_reason.name.lower()


def _parent(trace: str) -> Any:
    if not trace:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({_KEY: trace})


def _attributes(request: EndedRequest) -> dict[str, str | int | float | list[str]]:
    known: dict[str, str | int | float | list[str]] = {
        "gen_ai.response.id": request.request_id,
        "kvledger.tenant": request.tenant,
        "kvledger.samples": request.samples,
    }
    receipt = request.receipt
    if receipt is None:
        return known
    if (finish := _FINISH.get(receipt.end_reason)) is not None:
        known["gen_ai.response.finish_reasons"] = [finish]
    held = receipt.held_seconds + receipt.held_nanos / _NANOS
    return {
        **known,
        "gen_ai.usage.input_tokens": receipt.prompt_tokens,
        "gen_ai.usage.output_tokens": receipt.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": receipt.cached_prompt_tokens,
        "kvledger.computed_tokens": receipt.computed_tokens,
        "kvledger.recomputed_tokens": receipt.recomputed_tokens,
        "kvledger.preemptions": receipt.preemptions,
        "kvledger.held_block_seconds": held,
        "kvledger.queue_seconds": receipt.queued / _NANOS,
        "kvledger.prefill_seconds": receipt.prefill / _NANOS,
        "kvledger.decode_seconds": receipt.decode / _NANOS,
        "kvledger.stall_seconds": receipt.paused / _NANOS,
        "kvledger.compute_seconds": receipt.compute / _NANOS,
    }


def _parts(receipt: Receipt | None, start: int) -> list[tuple[str, int, int]]:
    """(name, begin, end) of the phases of a request that had each once.

    One that was preempted or paused went back and forth between them: the receipt says how long
    each took in all, and not when.
    """
    if receipt is None or receipt.preemptions or receipt.paused:
        return []
    parts, at = [], start
    for name, took in (
        ("queue", receipt.queued),
        ("prefill", receipt.prefill),
        ("decode", receipt.decode),
    ):
        if took > 0:
            parts.append((name, at, at + took))
        at += took
    return parts
