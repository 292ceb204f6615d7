"""Metrics of requests and tenants: each request once, and few series however many tenants."""

from __future__ import annotations

import asyncio
import threading
import time
from functools import partial
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from server_harness import serving
from test_metrics import scraped
from test_prefix_metrics import receipt

from kvledger.engine import EndReason
from kvledger.machine.peaks import MachinePeaks
from kvledger.metrics import Metrics
from kvledger.metrics.clock import BooksClock
from kvledger.metrics.families import counter
from kvledger.metrics.load import ComputedShare
from kvledger.metrics.requests import RequestMetrics
from kvledger.metrics.tenants import OTHER, TenantMetrics
from kvledger.server import Server
from kvledger.streams import Receipt

MILLI = 10**6


class Counted:
    """The metrics alone."""

    def __init__(self, tenants_max: int = 3) -> None:
        self.clock = BooksClock()
        self.metrics = Metrics()
        self.tenants = TenantMetrics(tenants_max, self.clock)
        self.metrics.registry.register(self.tenants)
        self.requests = RequestMetrics(self.metrics, self.tenants, self.clock)

    @property
    def registry(self) -> CollectorRegistry:
        return self.metrics.registry

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"kvledger_{name}", labels)

    def end(self, tenant: str = "acme", samples: int = 1, **changes: int) -> None:
        self.requests.ended(tenant, samples, receipt(**changes))

    def compute(self) -> dict[str, float]:
        """Seconds by tenant, as far as they have series."""
        return {
            sample.labels["tenant"]: sample.value
            for family in self.registry.collect()
            if family.name == "kvledger_tenant_compute_seconds"
            for sample in family.samples
        }


def test_a_receipt_is_observed_once() -> None:
    """Latencies on a chart would be others than those that callers saw."""
    counted = Counted()
    counted.end(
        queued=30 * MILLI,
        prefill=20 * MILLI,
        decode=90 * MILLI,
        paused=5 * MILLI,
        prompt_tokens=12,
        output_tokens=10,
        recomputed_tokens=4,
    )
    assert counted.value("time_to_first_token_seconds_sum") == pytest.approx(0.05)
    assert counted.value("time_per_output_token_seconds_sum") == pytest.approx(0.01)
    assert counted.value("request_duration_seconds_sum") == pytest.approx(0.145)
    assert counted.value("request_queue_seconds_sum") == pytest.approx(0.03)
    assert counted.value("output_tokens_total") == 10
    assert counted.value("recomputed_tokens_total") == 4
    assert counted.value("requests_ended_total", reason="stop") == 1
    # Two samples of five tokens each: what one of them took for four.
    counted.end(samples=2, decode=80 * MILLI, output_tokens=10)
    assert counted.value("time_per_output_token_seconds_sum") == pytest.approx(0.03)


def test_who_got_nothing_has_no_first_token() -> None:
    """Requests that were cancelled in the queue would make the service look quick."""
    counted = Counted()
    counted.end(end_reason=EndReason.CANCELLED, queued=10 * MILLI, prompt_tokens=5)
    counted.end(prefill=10 * MILLI, output_tokens=1)
    assert counted.value("time_to_first_token_seconds_count") == 1
    assert counted.value("time_per_output_token_seconds_count") == 0
    assert counted.value("request_duration_seconds_count") == 2
    counted.requests.ended("acme", 1, None)
    assert counted.value("requests_ended_total", reason="no_receipt") == 1
    assert counted.value("tenant_requests_total", tenant="acme", reason="no_receipt") == 1
    assert counted.value("request_duration_seconds_count") == 2


def test_tenants_are_told_what_theirs_cost() -> None:
    """A bill could not be compared with what was charted."""
    counted = Counted()
    counted.end(
        prompt_tokens=100,
        reused_own=64,
        computed_tokens=45,
        output_tokens=10,
        held_seconds=2,
        held_nanos=500 * MILLI,
        reserved_seconds=1,
        compute=7 * MILLI,
        queued=MILLI,
    )
    kinds = ("computed", "reused", "output")
    assert [counted.value("tenant_tokens_total", tenant="acme", kind=kind) for kind in kinds] == [
        *(36, 64, 10)
    ]
    held = counted.value("tenant_block_seconds_total", tenant="acme", state="held")
    assert held == 2.5
    assert counted.value("tenant_block_seconds_total", tenant="acme", state="reserved") == 1.0
    assert counted.value("tenant_compute_seconds_total", tenant="acme") == 0.007
    assert counted.value("tenant_queue_seconds_total", tenant="acme") == 0.001
    assert counted.value("tenant_requests_total", tenant="acme", reason="stop") == 1


def test_series_of_tenants_are_few_and_none_goes_down() -> None:
    """Thousands of tenants would fill the collector, or a chart show peaks that never were."""
    counted = Counted(tenants_max=2)
    second = 10**9
    for name in ("a", "b", "c", "d"):
        counted.end(name, compute=second)
    assert counted.compute() == {"a": 1, "b": 1, OTHER: 2}
    counted.end("d", compute=second // 10)
    assert OTHER in counted.compute()
    assert "d" not in counted.compute(), "a little more is no reason to change"
    counted.end("d", compute=5 * second)
    assert counted.compute() == {"b": 1, "d": 0, OTHER: pytest.approx(7.1)}
    counted.end("d", compute=second)
    counted.end("a", compute=20 * second)
    # What it had shown before goes on; b, which used least, is gone.
    assert counted.compute() == {"a": 1, "d": 1, OTHER: pytest.approx(27.1)}
    counted.end("a", compute=second)
    assert counted.compute()["a"] == 2
    assert len(counted.compute()) == 3


def test_what_is_remembered_of_tenants_is_bounded() -> None:
    """Names that come and go for years would take all memory."""
    counted = Counted(tenants_max=2)
    for index in range(1000):
        counted.end(f"tenant{index}", compute=index)
    assert len(counted.tenants._tenants) <= 201
    assert "tenant999" in counted.compute(), "who uses most was forgotten"


def test_requests_end_while_an_answer_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """With thousands of tenants all streams would stand still at each scrape."""
    counted = Counted()
    counted.end(output_tokens=3)
    ended: list[bool] = []

    def slowly(*family: Any) -> Metric:
        thread = threading.Thread(target=counted.end)
        thread.start()
        thread.join(timeout=2)
        ended.append(not thread.is_alive())
        return counter(*family)

    monkeypatch.setattr("kvledger.metrics.tenants.counter", slowly)
    families = list(counted.tenants.collect())
    monkeypatch.undo()
    assert ended
    assert all(ended), "a request waited for the answer"
    (requests,) = [each for each in families if each.name == "kvledger_tenant_requests"]
    values = {tuple(each.labels.values()): each.value for each in requests.samples}
    assert values["acme", "stop"] == 1, "families of one answer are of different moments"
    assert counted.value("tenant_requests_total", tenant="acme", reason="stop") == 1 + len(ended)


def test_tenants_can_have_no_metrics() -> None:
    """An operator who may not tell names to whoever reads charts could not use any."""
    counted = Counted(tenants_max=0)
    counted.end("acme", compute=5)
    assert counted.compute() == {}
    assert counted.value("requests_ended_total", reason="stop") == 1


def test_the_share_of_what_is_computed_follows_prompts() -> None:
    """A wait would be predicted for prompts that are cached."""
    computed = ComputedShare()
    assert computed.share == 1.0, "what nobody knows is no saving"
    computed.note(1000, 750)
    assert computed.share == pytest.approx(0.25)
    for _ in range(1000):
        computed.note(1000, 0)
    assert computed.share > 0.99


async def test_a_server_tells_its_load() -> None:
    """An autoscaler would add replicas for nothing, or none."""
    arguments = ("--metrics-listen", "127.0.0.1:0", "--metrics-aliases", "vllm")
    async with serving(*arguments, sequences_max=1) as server:
        await server.answer(text="a" * 30, max_tokens=8)
        gate = server.gate()
        tasks = [asyncio.create_task(server.answer(text="a" * 30, max_tokens=8)) for _ in range(3)]
        await server.until(lambda: server.server._admission.streams.waiting_count == 2)
        gate.let(1)
        await server.until(lambda: gate.arrived == 2)
        busy = await scraped(server)
        gate.open()
        await asyncio.gather(*tasks)
        await server.until(lambda: not server.server._admission.open_requests)
        done = await scraped(server)
    assert busy["kvledger_requests_running"] == busy["vllm:num_requests_running tiny"] == 1
    assert busy["vllm:num_requests_waiting tiny"] == 2
    assert busy["kvledger_queued_prompt_tokens"] == busy["kvledger_queued_uncached_tokens"] == 60
    speed = busy["kvledger_prefill_tokens_per_second"]
    assert busy["kvledger_predicted_wait_seconds"] == pytest.approx(60 / speed)
    used = sum(busy[f"kvledger_kv_blocks {state}"] for state in ("held", "reserved", "releasing"))
    assert used > 0
    assert busy["kvledger_kv_waterline_ratio"] == used / 64 == busy["vllm:kv_cache_usage_perc tiny"]
    assert busy["kvledger_phase_tokens_total prefill"] == 60
    assert done["kvledger_kv_waterline_ratio"] == done["kvledger_predicted_wait_seconds"] == 0
    assert done["kvledger_requests_ended_total length"] == 4
    assert done["vllm:request_success_total length tiny"] == 4
    assert done["vllm:prompt_tokens_total tiny"] == 120
    assert done["vllm:prefix_cache_hits_total tiny"] == 0
    assert done["vllm:generation_tokens_total tiny"] == 32
    assert done["vllm:time_to_first_token_seconds_count tiny"] == 4
    assert done["vllm:inter_token_latency_seconds_count tiny"] == 4 * 7
    assert done["kvledger_phase_tokens_total decode"] == 4 * 7
    compute = done["kvledger_compute_seconds_total"]
    assert compute == pytest.approx(done["kvledger_compute_receipts_seconds_total"])
    assert compute == pytest.approx(done["kvledger_tenant_compute_seconds_total dev"])
    phases = [done[f"kvledger_phase_seconds_total {phase}"] for phase in ("decode", "prefill")]
    assert sum(phases) == pytest.approx(compute)
    assert 0 < done["kvledger_books_seconds_total receipts"] < 0.1
    assert done["kvledger_books_seconds_total scrapes"] > 0
    assert done["kvledger_books_seconds_total looks"] == 0, "nobody looked at the ledger"


async def test_requests_that_never_ran_are_counted_by_tenant_and_reason() -> None:
    """Clients that give up in the queue would be in no chart."""
    async with serving("--metrics-listen", "127.0.0.1:0", sequences_max=1) as server:
        gate = server.gate()
        first = asyncio.create_task(server.answer(text="a", max_tokens=2))
        await server.until(lambda: gate.arrived == 1)
        second = asyncio.create_task(server.answer(text="a", max_tokens=2))
        await server.until(lambda: server.server._admission.streams.waiting_count == 1)
        second.cancel()
        await server.until(lambda: server.server._admission.streams.waiting_count == 0)
        gate.open()
        await first
        await server.until(lambda: not server.server._admission.open_requests)
        told = await scraped(server)
    assert told["kvledger_requests_ended_total cancelled"] == 1
    # Labels in the text are in the order of their names.
    assert told["kvledger_tenant_requests_total cancelled dev"] == 1


@pytest.mark.parametrize(("processor_share", "shown"), [(0.6, False), (0.99, True), (None, True)])
async def test_peaks_of_a_busy_machine_are_not_shown(
    processor_share: float | None, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server would look as if memory's speed bound it, on a machine that was busy once."""
    peaks = MachinePeaks(20e9, {"f32": 160e9}, processor_share=processor_share)
    monkeypatch.setattr("server_harness.Server", partial(Server, peaks=peaks))
    async with serving("--metrics-listen", "127.0.0.1:0") as server:
        told = await scraped(server)
    assert ("kvledger_machine_read_bytes_per_second" in told) == shown
    assert ("kvledger_machine_operations_per_second f32" in told) == shown


def test_counting_a_receipt_is_cheap() -> None:
    """The event loop would spend on charts what it owes to streams."""
    counted = Counted()
    ended: list[tuple[str, int, Receipt]] = [
        (f"tenant{index % 5}", 1, receipt(output_tokens=9, decode=index)) for index in range(2000)
    ]
    began = time.thread_time()  # as the clock of the books has it: without other programs
    for each in ended:
        counted.requests.ended(*each)
    spent = time.thread_time() - began
    assert spent / len(ended) < 0.001
    assert counted.clock.seconds()["receipts"] == pytest.approx(spent, rel=0.5)
