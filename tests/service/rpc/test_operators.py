"""The operators' listener: what is on it, what is on the clients' only, and who gets in."""

from __future__ import annotations

import asyncio
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from authorities import Files, credentials
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from scripted_model import PATIENCE
from server_harness import ServerHarness, connection, refusal_of, serving
from test_listener import NOT_UTF8

from kvledger.errors import SettingRefused
from kvledger.rpc import doors

CHANNELZ = "/grpc.channelz.v1.Channelz/GetServers"
LIST_MODELS = "/kvledger.v1.ModelService/ListModels"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "operators.sock"


@pytest_asyncio.fixture
async def server(path: Path) -> AsyncIterator[ServerHarness]:
    async with serving("--operators-listen", f"unix:{path}") as server:
        yield server


@pytest_asyncio.fixture
async def operators(server: ServerHarness) -> AsyncIterator[grpc.aio.Channel]:
    assert server.server.operators_address is not None
    async with connection(server.server.operators_address) as channel:
        yield channel


async def code_of(channel: grpc.aio.Channel, method: str) -> grpc.StatusCode:
    """The status of a call without fields."""
    try:
        await channel.unary_unary(method)(b"", timeout=PATIENCE)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def services_of(channel: grpc.aio.Channel) -> list[str]:
    """What reflection names."""
    asked = reflection_pb2.ServerReflectionRequest(list_services="*")
    call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([asked]))
    response = await call.read()
    return sorted(s.name for s in response.list_services_response.service)


async def test_its_socket_is_for_its_owner_and_goes(path: Path) -> None:
    """Other users of the machine could look at connections; or old files would pile up."""
    async with serving("--operators-listen", f"unix:{path}") as server:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600  # noqa: ASYNC240
        assert server.log.of("serving")[0]["operators"] == f"unix:{path}"
    assert list(path.parent.iterdir()) == [], "nothing is left, no lock either"


async def test_each_listener_serves_its_own_and_nothing_else(
    server: ServerHarness, operators: grpc.aio.Channel
) -> None:
    """A client could see who else is connected; or an operator's port be used to generate."""
    assert await code_of(operators, CHANNELZ) == grpc.StatusCode.OK
    assert await code_of(server.channel, CHANNELZ) == grpc.StatusCode.UNIMPLEMENTED
    assert await code_of(server.channel, LIST_MODELS) == grpc.StatusCode.OK
    for method in (LIST_MODELS, "/kvledger.v1.GenerationService/Generate"):
        assert await code_of(operators, method) == grpc.StatusCode.UNIMPLEMENTED
    assert await services_of(operators) == [
        "grpc.channelz.v1.Channelz",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
        "kvledger.v1.DiagnosisService",
        "kvledger.v1.LedgerService",
    ]
    assert "grpc.channelz.v1.Channelz" not in await services_of(server.channel)


async def test_health_there_is_the_servers(
    server: ServerHarness, operators: grpc.aio.Channel
) -> None:
    """A probe of operators would hear of a server that is well when it drains."""
    stub = health_pb2_grpc.HealthStub(operators)
    for name in ("", "kvledger.v1.GenerationService", "grpc.health.v1.Health"):
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=PATIENCE)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    watch = stub.Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    server.server.request_stop()
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_operators_get_in_while_clients_are_too_many(path: Path) -> None:
    """A probe would call a server dead because it is busy, and its restart cut every stream."""
    async with serving("--operators-listen", f"unix:{path}", "--max-connections", "2") as server:
        held = [await asyncio.open_connection("127.0.0.1", server.server.port) for _ in range(3)]
        assert await asyncio.wait_for(held[-1][0].read(9), PATIENCE) == b"", "one too many"
        async with connection(f"unix:{path}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        for _, writer in held:
            writer.transport.abort()


async def test_channelz_shows_connections(
    server: ServerHarness, operators: grpc.aio.Channel
) -> None:
    """An operator could not tell who fills the server with connections."""
    await server.answer(text="a")
    stub = channelz_pb2_grpc.ChannelzStub(operators)
    found = await stub.GetServers(channelz_pb2.GetServersRequest(), timeout=PATIENCE)
    counts = []
    for each in found.server:
        asked = channelz_pb2.GetServerSocketsRequest(server_id=each.ref.server_id)
        counts.append(len((await stub.GetServerSockets(asked)).socket_ref))
    assert len(counts) >= 2
    assert sum(counts) >= 2, "the client's and the operator's"


async def test_it_comes_back_when_it_broke(server: ServerHarness, path: Path) -> None:
    """One wrong call of a tool would leave operators without an eye on the server."""
    async with connection(f"unix:{path}") as channel:
        await refusal_of(channel.unary_unary(NOT_UTF8)(b"", timeout=PATIENCE / 4))
    await server.until(lambda: server.log.of("listener_broke"))
    async with connection(f"unix:{path}") as channel:
        call = channel.unary_unary(CHANNELZ)(b"", wait_for_ready=True, timeout=PATIENCE)
        assert await call
    assert (await server.answer(text="a")).text == "bcde"


async def test_its_own_authorities_let_operators_in(tmp_path: Path) -> None:
    """Every client with a certificate would be an operator."""
    files = Files(tmp_path).write("ours", clients="theirs")
    operators_ca = tmp_path / "operators.crt"
    operators_ca.write_bytes(Files(tmp_path).client_ca.read_bytes())
    files.write("ours", clients="clients")
    options = ("--operators-listen=127.0.0.1:0", f"--operators-client-ca={operators_ca}")
    theirs, clients = credentials("ours", "theirs"), credentials("ours", "clients")
    async with serving(*files.options, *options, credentials=clients) as server:
        address = server.server.operators_address
        assert address is not None
        async with connection(address, theirs) as channel:
            assert await code_of(channel, CHANNELZ) == grpc.StatusCode.OK
        for who in (clients, None):
            async with connection(address, who) as channel:
                assert await code_of(channel, CHANNELZ) == grpc.StatusCode.UNAVAILABLE
        assert await code_of(server.channel, LIST_MODELS) == grpc.StatusCode.OK


@pytest.mark.parametrize("option", ["--operators-listen", "--metrics-listen"])
async def test_a_taken_address_stops_the_start_and_leaves_the_others(option: str) -> None:
    """A server would come up without what its operators look at, or hold ports of a dead one."""
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(SettingRefused, match=f"^{option} {address}: "):
            async with serving("--listen", f"127.0.0.1:{port}", option, address):
                pass
        async with serving("--listen", f"127.0.0.1:{port}") as server:
            assert (await server.answer(text="a")).text == "bcde"


async def test_unless_told_it_takes_a_socket_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator would have to restart a server with another option to look at it."""
    monkeypatch.setattr("kvledger.address._MADE_FOLDER", str(tmp_path / "nowhere"))
    monkeypatch.delenv("RUNTIME_DIRECTORY", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    async with serving(operators=None) as one, serving(operators=None) as other:
        name = f"operators-127.0.0.1-{one.server.port}.sock"
        assert one.server.operators_address == f"unix:{tmp_path}/kvledger/{name}"
        assert other.server.operators_address not in (None, one.server.operators_address)
        for server in (one, other):
            assert server.server.operators_address is not None
            async with connection(server.server.operators_address) as channel:
                assert await code_of(channel, CHANNELZ) == grpc.StatusCode.OK


async def test_without_a_folder_for_it_the_log_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server in a read-only container would not start, or an operator wonder where it is."""
    monkeypatch.setattr("kvledger.rpc.front.operators_address", lambda clients: None)
    async with serving(operators=None) as server:
        assert len(server.log.of("no_operators_listener")) == 1
        assert server.log.of("serving")[0]["operators"] is None
        assert (await server.answer(text="a")).text == "bcde"


async def test_a_method_without_a_row_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that somebody adds would be open before anybody decided for whom."""
    table: dict[str, Any] = dict(doors._TABLE)
    del table[CHANNELZ]
    monkeypatch.setattr(doors, "_TABLE", table)
    with pytest.raises(LookupError, match=CHANNELZ):
        async with serving():
            pass
