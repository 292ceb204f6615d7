"""Metrics: named by the rules, true, and served to who may ask without harm to the server."""

from __future__ import annotations

import asyncio
import http.client
import re
import socket
import stat
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families
from scripted_model import PATIENCE
from server_harness import ServerHarness, serving

from kvledger import metrics_listener
from kvledger.errors import SettingRefused
from kvledger.metrics import Metrics
from kvledger.metrics_listener import MetricsListener
from kvledger.rpc import connections

_ABBREVIATED = re.compile(r"_(?:ms|us|ns|s|sec|secs|kb|mb|gb|kib|mib|gib|pct|percent)(?:_|$)")


@pytest_asyncio.fixture
async def server() -> AsyncIterator[ServerHarness]:
    async with serving("--metrics-listen", "127.0.0.1:0", sequences_max=1) as server:
        yield server


class OverUnix(http.client.HTTPConnection):
    """An HTTP client of a unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=PATIENCE)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)


def fetched(address: str, method: str = "GET") -> str:
    """What a collector gets."""
    path = address.removeprefix("unix:")
    connection = OverUnix(path) if path != address else http.client.HTTPConnection(address)
    connection.request(method, "/metrics")
    response = connection.getresponse()
    assert response.status == 200
    text = response.read().decode()
    connection.close()
    return text


async def scraped(server: ServerHarness) -> dict[str, float]:
    """Every sample, by its name and labels."""
    address = server.server.metrics_address
    assert address is not None
    text = await asyncio.to_thread(fetched, address)
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_names_follow_the_rules(server: ServerHarness) -> None:
    """Dashboards and alerts that people have would not fit, or mix up units."""
    address = server.server.metrics_address
    assert address is not None
    text = await asyncio.to_thread(fetched, address)
    families = list(text_string_to_metric_families(text))
    ours = [family for family in families if family.name.startswith("kvledger_")]
    assert len(ours) >= 7
    for family in families:
        assert re.fullmatch("[a-z][a-z0-9_]*", family.name), family.name
        assert not _ABBREVIATED.search(family.name), family.name
        assert family.documentation, family.name
        assert (family.type == "counter") == any(
            sample.name.endswith("_total") for sample in family.samples
        ), family.name
        assert family.name.startswith(("kvledger_", "process_")), family.name
        if "seconds" in family.name:
            assert re.search("_seconds$", family.name), family.name
        words = set(family.name.split("_"))
        assert words.isdisjoint({"gauge", "counter", "histogram", "summary"}), family.name
        assert not re.search("_(?:total|count|sum|bucket|info)$", family.name), family.name
        for sample in family.samples:
            assert all(re.fullmatch("[a-z][a-z0-9_]*", label) for label in sample.labels)
            assert family.type == "histogram" or "le" not in sample.labels, family.name


async def test_they_say_what_is_so(server: ServerHarness) -> None:
    """An operator would look at a chart of something else."""
    idle = await scraped(server)
    assert idle["kvledger_kv_blocks free"] == 64
    assert idle["kvledger_requests_total OK"] == 0
    assert idle["kvledger_requests_total UNAVAILABLE"] == 0, "it is there before it happens"
    assert idle["kvledger_certificate_reload_failures_total"] == 0
    assert "kvledger_certificate_expiry_timestamp_seconds" not in idle
    assert idle["kvledger_connections_limit"] == 1024
    gate = server.gate()
    tasks = [asyncio.create_task(server.answer(text="a" * 30, max_tokens=8)) for _ in range(4)]
    await server.until(lambda: len(server.server._admission.open_requests) == 4)
    gate.let(1)
    await server.until(lambda: gate.arrived == 2)
    await server.until(lambda: server.server._admission.streams.waiting_count == 3)
    busy = await scraped(server)
    assert busy["kvledger_request_queue_length"] == 3
    assert busy["kvledger_connections_open"] == 1
    states = ("free", "reserved", "held", "cached", "releasing")
    blocks = {state: busy[f"kvledger_kv_blocks {state}"] for state in states}
    assert sum(blocks.values()) == 64
    assert blocks["held"] >= 4
    await asyncio.sleep(0.3)
    assert (await scraped(server))["kvledger_engine_heartbeat_age_seconds"] >= 0.3
    gate.open()
    await asyncio.gather(*tasks)
    await server.until(lambda: server.server._front._calls.open_count == 0)
    done = await scraped(server)
    assert done["kvledger_requests_total OK"] == 4
    assert done["kvledger_request_queue_length"] == 0
    await server.require_all_free()


async def test_time_of_steps_and_of_the_prefix_index_is_counted() -> None:
    """Nobody could tell what looking for prefixes costs where nothing is ever found."""
    names = ("kvledger_engine_step_seconds_total", "kvledger_prefix_index_seconds_total")
    timed = {"reuses_prefixes": True, "times_prefixes": True}
    async with serving("--metrics-listen", "127.0.0.1:0", **timed) as server:
        before = await scraped(server)
        assert before[names[0]] == 0
        began = time.monotonic()
        await server.answer(text="a" * 40, max_tokens=8)
        elapsed = time.monotonic() - began
        after = await scraped(server)
        assert before[names[1]] < after[names[1]] < after[names[0]] < elapsed
        await server.answer(text="b" * 40, max_tokens=8)
        later = await scraped(server)
        assert all(later[name] > after[name] for name in names)


async def test_time_of_the_cores_books_is_counted() -> None:
    """Bookkeeping would become dear, and nobody could tell it from the model."""
    core, steps = "kvledger_books_seconds_total core", "kvledger_engine_step_seconds_total"
    async with serving("--metrics-listen", "127.0.0.1:0", times_books=True) as server:
        before = await scraped(server)
        await server.answer(text="a" * 40, max_tokens=8)
        after = await scraped(server)
        assert 0 <= before[core] < after[core] < after[steps]
        await server.answer(text="b" * 40, max_tokens=8)
        assert (await scraped(server))[core] > after[core]


def _call_while_nothing_is_taken_in(address: str, count: int) -> None:
    """Calls that all come while the event loop, whose thread this is, stands still."""
    with grpc.insecure_channel(address) as channel:
        grpc.channel_ready_future(channel).result(PATIENCE)
        list_models = channel.unary_unary("/kvledger.v1.ModelService/ListModels")
        calls = [list_models.future(b"", timeout=PATIENCE) for _ in range(count)]
        time.sleep(0.5)
        del calls


async def test_calls_that_grpc_drops_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients would be turned away under load, and no line or number say so."""
    few = (
        ("grpc.server.max_pending_requests", 3),
        ("grpc.server.max_pending_requests_hard_limit", 3),
    )
    monkeypatch.setattr(connections, "_untaken", lambda most: few)
    async with serving("--metrics-listen", "127.0.0.1:0") as server:
        assert (await scraped(server))["kvledger_calls_not_taken"] == 0
        for _ in range(3):
            await server.answer(text="a")
        await server.refusal(text="")
        assert (await scraped(server))["kvledger_calls_not_taken"] == 0
        _call_while_nothing_is_taken_in(server.address, 50)
        # Those that waited in time were taken in, though nobody listens to them any more.
        await server.until(lambda: server.server._front._calls.taken_count > 4)
        await asyncio.sleep(0.1)
        taken = server.server._front._calls.taken_count - 4
        assert 1 <= taken < 25
        assert (await scraped(server))["kvledger_calls_not_taken"] == 50 - taken
        # A listener that broke is replaced, and gRPC forgets what came to it.
        listener = server.server._front.clients
        before = listener.calls_come
        await listener._replace()
        await server.until(lambda: not listener._retired)
        assert listener.calls_come >= before >= 54
        assert (await scraped(server))["kvledger_calls_not_taken"] == 50 - taken


async def test_they_are_nowhere_unless_asked_for() -> None:
    """A server would open a port that nobody knows of."""
    async with serving() as server:
        assert server.server.metrics_address is None
        assert server.log.of("serving")[0]["metrics"] is None


async def test_a_unix_socket_serves_its_owner(tmp_path: Path) -> None:
    """Other users of the machine could watch; or an old socket keep a server from starting."""
    path = tmp_path / "metrics.sock"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    async with serving("--metrics-listen", f"unix:{path}") as server:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert "kvledger_kv_blocks free" in await scraped(server)
        with pytest.raises(SettingRefused, match="another server listens there"):
            MetricsListener(f"unix:{path}", Metrics().registry)
    assert list(tmp_path.iterdir()) == []  # noqa: ASYNC240


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> MetricsListener:
    monkeypatch.setattr(metrics_listener, "_SECONDS_MAX", 0.3)
    monkeypatch.setattr(metrics_listener, "_REQUESTS_MAX", 3)
    return MetricsListener("127.0.0.1:0", Metrics().registry)


def test_who_says_nothing_is_cut_off(listener: MetricsListener) -> None:
    """Connections that do nothing could take every thread and descriptor."""
    try:
        host, port = listener.address.split(":")
        silent = [socket.create_connection((host, int(port)), PATIENCE) for _ in range(3)]
        late = socket.create_connection((host, int(port)), PATIENCE)
        assert late.recv(1) == b"", "one too many"
        for each in silent:
            assert each.recv(1) == b"", "its time is over"
        assert "kvledger_requests_total" in fetched(listener.address)
    finally:
        listener.close()


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff" * 4096, b"GET " + b"x" * 100_000, b"POST / HTTP/1.1\r\n\r\n", b"GET /\r\n"],
)
def test_garbage_harms_nobody(
    listener: MetricsListener, data: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    """A port scan would fill the log with a stranger's strings, or end the thread."""
    try:
        host, port = listener.address.split(":")
        with socket.create_connection((host, int(port)), PATIENCE) as client:
            try:
                client.sendall(data)
                client.shutdown(socket.SHUT_WR)
                while client.recv(65536):
                    pass
            except TimeoutError:
                raise
            except OSError:
                pass  # it may hang up before it has read all
        assert "kvledger_requests_total" in fetched(listener.address)
    finally:
        listener.close()
    shown = capfd.readouterr()
    assert shown.out + shown.err == ""


def test_a_taken_address_is_refused_in_one_sentence() -> None:
    """The start would end in a traceback."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(SettingRefused, match=f"^--metrics-listen {address}: .*in use"):
            MetricsListener(address, Metrics().registry)
    with pytest.raises(SettingRefused, match="there is no folder"):
        MetricsListener("unix:/nowhere/at/all.sock", Metrics().registry)
