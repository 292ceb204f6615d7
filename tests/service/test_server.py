"""A server's life: health, draining, stopping, and what it does when its engine fails it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from scripted_model import PATIENCE, expected
from server_harness import ServerHarness, serving

from kvledger.errors import SettingRefused
from kvledger.rpc.listener import Listener
from kvledger.server import BROKE

SERVICES = [
    "grpc.health.v1.Health",
    "grpc.reflection.v1alpha.ServerReflection",
    "kvledger.v1.DiagnosisService",
    "kvledger.v1.GenerationService",
    "kvledger.v1.LedgerService",
    "kvledger.v1.ModelService",
]
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
LONG: dict[str, Any] = {"text": "a", "max_tokens": 200, "ignore_eos": True}


@pytest_asyncio.fixture
async def server() -> AsyncIterator[ServerHarness]:
    async with serving() as server:
        yield server


@pytest_asyncio.fixture
async def full() -> AsyncIterator[ServerHarness]:
    """A server whose eight places are taken whatever is going to happen to its memory."""
    async with serving(forecast=False) as server:
        yield server


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that hang are given up sooner."""
    monkeypatch.setattr("kvledger.server._LAST_WORDS", 0.2)


async def checked(server: ServerHarness, service: str = "") -> int:
    """What health says of a service."""
    response = await server.health.Check(health_pb2.HealthCheckRequest(service=service))
    return int(response.status)


async def exit_status(server: ServerHarness) -> int:
    """The server's exit status, once it has stopped."""
    return await asyncio.wait_for(server.exit, PATIENCE)


class Watch:
    """What a caller of Health.Watch hears."""

    def __init__(self, server: ServerHarness, service: str = "") -> None:
        self._call = server.health.Watch(health_pb2.HealthCheckRequest(service=service))

    async def next(self) -> int:
        """The next status that it is told."""
        response = await asyncio.wait_for(self._call.read(), PATIENCE)
        assert response is not grpc.aio.EOF
        return int(response.status)


async def test_health_knows_every_service(server: ServerHarness) -> None:
    """A probe that asks for a service by name would think that it is down."""
    for service in ("", *SERVICES):
        assert await checked(server, service) == SERVING
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await checked(server, "kvledger.v1.Nothing")
    assert raised.value.code() == grpc.StatusCode.NOT_FOUND


async def test_reflection_lists_every_service(server: ServerHarness) -> None:
    """Tools such as grpcurl could not call what they cannot see."""
    stub = reflection_pb2_grpc.ServerReflectionStub(server.channel)
    asked = reflection_pb2.ServerReflectionRequest(list_services="*")
    call = stub.ServerReflectionInfo(iter([asked]))
    response = await call.read()
    assert sorted(s.name for s in response.list_services_response.service) == SERVICES


async def test_reflection_can_be_turned_off() -> None:
    """A server in production would tell everybody what it can be asked."""
    async with serving("--no-reflection") as server:
        stub = reflection_pb2_grpc.ServerReflectionStub(server.channel)
        asked = reflection_pb2.ServerReflectionRequest(list_services="*")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.ServerReflectionInfo(iter([asked])).read()
        assert raised.value.code() == grpc.StatusCode.UNIMPLEMENTED
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await checked(server, "grpc.reflection.v1alpha.ServerReflection")
        assert raised.value.code() == grpc.StatusCode.NOT_FOUND, "it is not there to be well"
        assert await checked(server, "kvledger.v1.GenerationService") == SERVING
        assert (await server.answer(text="a")).text == "bcde"


async def test_health_follows_the_heartbeat() -> None:
    """A server that hangs would go on getting requests, or never get any again."""
    async with serving("--heartbeat-timeout", "1.0") as server:
        gate = server.gate()
        watches = [Watch(server), Watch(server, "kvledger.v1.GenerationService")]
        assert [await watch.next() for watch in watches] == [SERVING] * 2
        answer = asyncio.create_task(server.answer(text="a"))
        assert [await watch.next() for watch in watches] == [NOT_SERVING] * 2
        assert await checked(server) == NOT_SERVING
        assert not answer.done()
        gate.open()
        assert [await watch.next() for watch in watches] == [SERVING] * 2
        assert (await answer).text == "bcde"
        changes = server.log.of("health_changed")
        assert [change["serving"] for change in changes] == [False, True]


async def test_an_idle_server_is_healthy() -> None:
    """Without requests there are no steps: that must not look like an engine that hangs."""
    async with serving("--heartbeat-timeout", "1.0") as server:
        beats = set()

        def beaten() -> bool:
            beats.add(server.server._engine._last_beat)
            return len(beats) > 6

        await server.until(beaten)
        assert server.log.of("health_changed") == []


async def test_draining_lets_streams_end_and_refuses_new_ones(server: ServerHarness) -> None:
    """Every deployment would cut off the answers that people are reading."""
    gate = server.gate()
    watch = Watch(server)
    assert await watch.next() == SERVING
    running = [asyncio.create_task(server.answer(**LONG)) for _ in range(8)]
    await server.until(lambda: len(server.server._admission.open_requests) == 8)
    waiting = asyncio.create_task(server.answer(text="k"))
    await server.until(lambda: len(server.server._admission.open_requests) == 9)
    server.server.request_stop()
    assert await watch.next() == NOT_SERVING
    refusal = await server.refusal(text="a")
    assert refusal.code == grpc.StatusCode.UNAVAILABLE
    assert refusal.reason == "DRAINING"
    assert refusal.retry_seconds > 0
    assert "grpc-retry-pushback-ms" in refusal.metadata
    gate.open()
    assert {answer.text for answer in await asyncio.gather(*running)} == {expected("a", 200)}
    assert (await waiting).text == "lmno", "it had entered before"
    assert await exit_status(server) == 0
    assert server.log.reasons == ["length"] * 9
    (stopped,) = server.log.of("stopped")
    assert stopped["open_requests"] == 0


@pytest.mark.parametrize("hurry", ["second signal", "drain_timeout"])
async def test_streams_that_do_not_end_get_their_receipt(hurry: str) -> None:
    """A stop would take for ever, or cut streams without a word about what they cost."""
    timeout = "30" if hurry == "second signal" else "0.1"
    async with serving("--drain-timeout", timeout, sequences_max=2) as server:
        gate = server.gate()
        tasks = [asyncio.create_task(server.refusal(**LONG)) for _ in range(3)]
        await server.until(lambda: len(server.server._admission.open_requests) == 3)
        gate.let(3)
        await server.until(lambda: gate.arrived == 4)
        server.server.request_stop()
        if hurry == "second signal":
            await server.until(lambda: server.log.of("draining"))
            server.server.request_stop()
        await server.until(lambda: len(server.ends) == 3)
        gate.let(2)
        refusals = await asyncio.gather(*tasks)
        assert {refusal.code for refusal in refusals} == {grpc.StatusCode.UNAVAILABLE}
        assert {refusal.reason for refusal in refusals} == {"DRAINING"}
        assert all(refusal.retry_seconds > 0 for refusal in refusals)
        computed = sorted(refusal.receipt.computed_tokens for refusal in refusals)
        assert computed[0] == 0, "one never ran"
        assert computed[1] >= 3
        assert await exit_status(server) == 0
        assert server.log.reasons == ["cancelled"] * 3
        assert server.core.balances["free"] == sum(server.core.balances.values())


@pytest.mark.usefixtures("impatient")
async def test_an_engine_that_hangs_cannot_keep_the_server_from_ending() -> None:
    """Somebody would have to kill it, and would never know why it did not stop."""
    async with serving() as server:
        gate = server.gate()
        task = asyncio.create_task(server.refusal(**LONG))
        await server.until(lambda: gate.arrived == 1)
        server.server.request_stop()
        server.server.request_stop()
        refusal = await task
        assert refusal.code == grpc.StatusCode.UNAVAILABLE
        assert await exit_status(server) == BROKE
        assert len(server.log.of("engine_hangs")) == 1


async def test_death_of_the_engine_ends_streams_and_the_server(full: ServerHarness) -> None:
    """Callers would wait for ever on a server that looks healthy and computes nothing."""
    server = full
    gate = server.gate()
    watch = Watch(server)
    assert await watch.next() == SERVING
    tasks = [asyncio.create_task(server.refusal(**LONG)) for _ in range(9)]
    await server.until(lambda: len(server.server._admission.open_requests) == 9)
    gate.let(2)
    await server.until(lambda: gate.arrived == 3)

    def die(*arguments: object) -> object:
        raise SystemExit("injected")

    server.core.commit = die  # type: ignore[method-assign, assignment]
    gate.open()
    refusals = await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE)
    assert {refusal.code for refusal in refusals} == {grpc.StatusCode.INTERNAL}
    assert {refusal.reason for refusal in refusals} == {"REQUEST_FAILED"}
    computed = sorted(refusal.receipt.computed_tokens for refusal in refusals)
    assert computed[0] == 0, "one never ran"
    assert computed[1] >= 1
    assert server.log.reasons == ["failed"] * 9
    assert server.log.of("request_without_receipt") == []
    assert await watch.next() == NOT_SERVING
    assert await exit_status(server) == BROKE
    assert len(server.log.of("engine_died")) == 1
    assert server.log.of("stopped")[0]["open_requests"] == 0


async def test_after_the_death_of_the_engine_nobody_enters(server: ServerHarness) -> None:
    """Who comes between the death and the end would wait for an engine that is gone."""

    def die(*arguments: object) -> object:
        raise MemoryError("injected")

    server.core.plan = die  # type: ignore[method-assign, assignment]
    refusal = await server.refusal(text="a")
    assert refusal.code == grpc.StatusCode.INTERNAL
    late = await server.refusal(text="a")
    assert late.code == grpc.StatusCode.UNAVAILABLE
    assert await exit_status(server) == BROKE


async def test_a_lost_port_ends_the_server(
    server: ServerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would run on where nobody can reach it."""

    async def lost(self: Listener) -> bool:
        raise SettingRefused("the address is in use")

    answer = asyncio.create_task(server.answer(**LONG))
    await server.until(lambda: server.server._admission.open_requests)
    monkeypatch.setattr(Listener, "_still_serves", lost)
    assert (await answer).text == expected("a", 200), "who runs may end"
    assert await exit_status(server) == BROKE
    assert len(server.log.of("listener_lost")) == 1


async def test_stopping_an_idle_server_takes_no_time(server: ServerHarness) -> None:
    """An operator would wait for drain_timeout with nobody connected."""
    server.server.request_stop()
    assert await asyncio.wait_for(server.exit, PATIENCE / 2) == 0
    assert server.log.of("draining")[0]["open_requests"] == 0


async def test_a_prompt_that_is_still_read_when_draining_begins_is_refused(
    server: ServerHarness,
) -> None:
    """A request that enters after the door was closed would be cut off, or never end."""
    chat = [(1, "x" * 500_000)]
    late = asyncio.create_task(server.refusal(chat=chat))
    await server.until(lambda: server.server._prompts._waiting == 1)
    server.server.request_stop()
    refusal = await asyncio.wait_for(late, PATIENCE)
    assert refusal.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INVALID_ARGUMENT)
    assert await exit_status(server) == 0
