"""Health and what keeps a server from stopping: watchers and other calls that only wait."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from http2_client import Http2Client
from scripted_model import PATIENCE
from server_harness import Refusal, serving

_Status = health_pb2.HealthCheckResponse
_WATCH = "/grpc.health.v1.Health/Watch"


async def test_a_watcher_that_reads_nothing_holds_nobody_up() -> None:
    """One client could keep health from ever changing, and the server from draining."""
    async with serving("--heartbeat-timeout", "1.0") as server:
        client = await Http2Client.call(server.address, health_pb2.HealthCheckRequest(), _WATCH)
        await server.until(lambda: server.server._front._calls.open_count == 1)
        watch = server.health.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == _Status.SERVING
        gate = server.gate()
        answer = asyncio.create_task(server.answer(text="a"))
        assert (await asyncio.wait_for(watch.read(), PATIENCE)).status == _Status.NOT_SERVING
        gate.open()
        assert (await asyncio.wait_for(watch.read(), PATIENCE)).status == _Status.SERVING
        assert (await answer).text == "bcde"
        server.server.request_stop()
        assert (await asyncio.wait_for(watch.read(), PATIENCE)).status == _Status.NOT_SERVING
        await client.close()


async def test_open_watches_and_reflection_do_not_delay_a_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every stop of a server with a probe that watches would take all of its last words."""
    monkeypatch.setattr("kvledger.server._LAST_WORDS", PATIENCE)
    async with serving() as server:
        watches = [server.health.Watch(health_pb2.HealthCheckRequest()) for _ in range(3)]
        for watch in watches:
            assert (await watch.read()).status == _Status.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(server.channel).ServerReflectionInfo()
        await reflection.write(reflection_pb2.ServerReflectionRequest(list_services="*"))
        assert (await reflection.read()).list_services_response.service
        started = time.monotonic()
        server.server.request_stop()
        assert await asyncio.wait_for(server.exit, PATIENCE) == 0
        assert time.monotonic() - started < PATIENCE / 4
        for watch in watches:
            assert (await watch.read()).status == _Status.NOT_SERVING
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await watch.read()
            refusal = Refusal(raised.value)
            assert refusal.code == grpc.StatusCode.UNAVAILABLE
            assert refusal.reason == "DRAINING"
            assert refusal.retry_seconds > 0
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await reflection.read()
        assert raised.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_every_service_is_listed_and_no_other() -> None:
    """A tool that lists first would not find what it may ask for."""
    async with serving() as server:
        listed = await server.health.List(health_pb2.HealthListRequest())
        assert sorted(listed.statuses) == [
            *("", "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"),
            *("kvledger.v1.DiagnosisService", "kvledger.v1.GenerationService"),
            *("kvledger.v1.LedgerService", "kvledger.v1.ModelService"),
        ]
        assert {each.status for each in listed.statuses.values()} == {_Status.SERVING}


async def test_an_unknown_service_is_watched_as_such() -> None:
    """A watcher would take a service that is not there for one that is well."""
    async with serving() as server:
        watch = server.health.Watch(health_pb2.HealthCheckRequest(service="not.there"))
        assert (await watch.read()).status == _Status.SERVICE_UNKNOWN
        watch.cancel()


async def test_draining_stays_although_the_heart_beats() -> None:
    """Callers would come back to a server that is about to go."""
    async with serving() as server:
        health = server.server._front.health
        health.drain()
        health.set_serving(True)
        checked = await server.health.Check(health_pb2.HealthCheckRequest())
        assert checked.status == _Status.NOT_SERVING


@pytest.mark.parametrize("symbol", ["Generate", ""])
async def test_reflection_finds_methods(symbol: str) -> None:
    """`grpcurl describe` of a method would say that there is no such symbol."""
    service = "kvledger.v1.GenerationService"
    name = f"{service}.{symbol}" if symbol else service
    async with serving() as server:
        asked = [
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=name),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=f"{service}.Nothing"),
        ]
        stub = reflection_pb2_grpc.ServerReflectionStub(server.channel)
        found, missing = [answer async for answer in stub.ServerReflectionInfo(iter(asked))]
        files = found.file_descriptor_response.file_descriptor_proto
        assert any(b"GenerationService" in file for file in files)
        assert missing.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
