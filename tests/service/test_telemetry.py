"""What an OpenTelemetry collector hears of requests."""

from __future__ import annotations

import builtins
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.metrics.v1 import metrics_pb2
from opentelemetry.proto.trace.v1 import trace_pb2
from server_harness import ServerHarness, serving
from stepping import settings

from kvledger.errors import SettingRefused
from kvledger.telemetry import telemetry, trace_parent
from kvledger.v1 import generation_pb2 as pb

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
CANARY = "kanarienvogel"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Takes what is sent."""

    def __init__(self) -> None:
        self.traces: list[trace_service_pb2.ExportTraceServiceRequest] = []
        self.metrics: list[metrics_service_pb2.ExportMetricsServiceRequest] = []

    def Export(  # the contract's name
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: Any
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        self.traces.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()

    @property
    def spans(self) -> list[trace_pb2.Span]:
        return [
            span
            for request in self.traces
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    @property
    def histograms(self) -> dict[str, metrics_pb2.HistogramDataPoint]:
        return {
            metric.name: metric.histogram.data_points[0]
            for request in self.metrics
            for resource in request.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    @property
    def everything(self) -> str:
        return "".join(map(str, (*self.traces, *self.metrics)))


class Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def Export(  # the contract's name
        self, request: metrics_service_pb2.ExportMetricsServiceRequest, context: Any
    ) -> metrics_service_pb2.ExportMetricsServiceResponse:
        self._collector.metrics.append(request)
        return metrics_service_pb2.ExportMetricsServiceResponse()


@asynccontextmanager
async def collected() -> AsyncIterator[tuple[Collector, ServerHarness]]:
    """A server that runs inside the block; the collector has heard all of it afterwards."""
    collector = Collector()
    taker = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, taker)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(Metrics(collector), taker)
    port = taker.add_insecure_port("127.0.0.1:0")
    taker.start()
    try:
        async with serving("--otlp", f"http://127.0.0.1:{port}") as server:
            yield collector, server
    finally:
        taker.stop(None)


def facts(span: trace_pb2.Span) -> dict[str, Any]:
    found = {}
    for attribute in span.attributes:
        kind = attribute.value.WhichOneof("value")
        assert kind is not None
        value = getattr(attribute.value, kind)
        if kind == "array_value":
            value = [each.string_value for each in value.values]
        found[attribute.key] = value
    return found


async def test_each_request_is_a_span_of_its_callers_trace() -> None:
    """A gateway's trace would end at our door, or tell other times than the receipt."""
    async with collected() as (collector, server):
        metadata = (("traceparent", f"00-{TRACE}-{PARENT}-01"),)
        answer = await server.answer(text=CANARY, max_tokens=5, metadata=metadata)
        receipt = answer.finished.receipt
    whole = next(span for span in collector.spans if span.name.startswith("text_completion"))
    assert whole.trace_id.hex() == TRACE
    assert whole.parent_span_id.hex() == PARENT
    parts = {span.name: span for span in collector.spans if span.parent_span_id == whole.span_id}
    assert set(parts) == {"queue", "prefill", "decode"}
    for name in ("prefill", "decode"):
        took = parts[name].end_time_unix_nano - parts[name].start_time_unix_nano
        assert took == getattr(receipt, f"{name}_time").ToNanoseconds()
    assert parts["queue"].start_time_unix_nano == whole.start_time_unix_nano
    assert parts["prefill"].start_time_unix_nano == parts["queue"].end_time_unix_nano
    assert parts["decode"].end_time_unix_nano == whole.end_time_unix_nano
    told = facts(whole)
    assert told["gen_ai.response.id"] == receipt.request_id
    assert told["gen_ai.usage.input_tokens"] == len(CANARY)
    assert told["gen_ai.usage.output_tokens"] == 5
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    assert told["kvledger.held_block_seconds"] == pytest.approx(
        receipt.held.seconds + receipt.held.nanos / 1e9
    )
    duration = collector.histograms["gen_ai.server.request.duration"]
    assert duration.count == 1
    life = (whole.end_time_unix_nano - whole.start_time_unix_nano) / 1e9
    assert duration.sum == pytest.approx(life)
    first = collector.histograms["gen_ai.server.time_to_first_token"].sum
    assert 0.0 < first < life
    per_token = collector.histograms["gen_ai.server.time_per_output_token"].sum
    assert per_token == pytest.approx(receipt.decode_time.ToNanoseconds() / 1e9 / 4)
    assert CANARY not in collector.everything
    resource = collector.traces[0].resource_spans[0].resource
    names = {each.key: each.value.string_value for each in resource.attributes}
    assert names["service.name"] == "kvledger"


async def test_chats_and_failures_are_told_apart() -> None:
    """A dashboard would count what failed among what was answered."""
    async with collected() as (collector, server):
        await server.answer(chat=[(pb.ROLE_USER, "a")], max_tokens=2)
        stream = server.generation.Generate(pb.GenerateRequest(text="b"))
        await stream.read()
        stream.cancel()
        await server.until(lambda: not server.server._admission.open_requests)
    by_name = {span.name.split()[0]: span for span in collector.spans if not span.parent_span_id}
    assert set(by_name) == {"chat", "text_completion"}
    assert "error.type" not in facts(by_name["chat"])
    cancelled = by_name["text_completion"]
    assert facts(cancelled)["error.type"] == "cancelled"
    assert cancelled.status.code == trace_pb2.Status.STATUS_CODE_ERROR
    assert "gen_ai.response.finish_reasons" not in facts(cancelled)


async def test_a_collector_that_is_not_there_harms_nobody() -> None:
    """Telemetry would take the service with it."""
    async with serving("--otlp", "http://127.0.0.1:9") as server:
        for _ in range(3):
            await server.answer(text="a")


@pytest.mark.parametrize(
    ("metadata", "parent"),
    [
        ((("traceparent", f"00-{TRACE}-{PARENT}-00"),), True),
        ((), False),
        ((("traceparent", f"01-{TRACE}-{PARENT}-00"),), False),
        ((("traceparent", f"00-{TRACE.upper()}-{PARENT}-00"),), False),
        ((("traceparent", f"00-{'0' * 32}-{PARENT}-00"),), False),
        ((("traceparent", f"00-{TRACE}-{'0' * 16}-00"),), False),
        ((("traceparent", f"00-{TRACE}-{PARENT}-00\n"),), False),
        ((("traceparent", b"00"),), False),
        ((("traceparent", f"00-{TRACE}-{PARENT}-00"),) * 2, False),
    ],
)
def test_only_a_trace_that_can_be_understood_is_continued(metadata: Any, parent: bool) -> None:
    """Whatever a client writes there would stand in the operator's traces."""
    assert (trace_parent(metadata) != "") == parent


@pytest.mark.parametrize("address", ["collector", "ftp://collector:4317", "http://collector", ""])
def test_an_address_that_is_none_is_refused_at_the_start(address: str) -> None:
    """Nothing would arrive, and nobody would know why."""
    with pytest.raises(SettingRefused, match="--otlp"):
        settings("--otlp", address)


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server would end with a traceback."""
    real = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(SettingRefused, match=r"kvledger\[otel\]"):
        telemetry("http://127.0.0.1:4317", "tiny")
