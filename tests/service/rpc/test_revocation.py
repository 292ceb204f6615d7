"""Credentials that are taken back while streams run, and a file that changes under a server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from authorities import Files, credentials
from grpc_health.v1.health_pb2 import HealthCheckRequest
from http2_client import Http2Client
from scripted_model import PATIENCE
from server_harness import (
    Refusal,
    ServerHarness,
    connection,
    refusal_of,
    request,
    serving,
    until,
)
from tenants_harness import TenantsOfTest, bearer

from kvledger.rpc import doors
from kvledger.rpc.calls import Calls
from kvledger.rpc.identity import IdentityRequired
from kvledger.rpc.undecodable import UndecodableRefused
from kvledger.tenants import editing
from kvledger.tenants.authentication import Authenticator, Transport
from kvledger.tenants.registry import Registry
from kvledger.tenants.roles import Role

UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
# What is promised.
SECONDS = 5.0


@pytest.fixture
def tenants(tmp_path: Path) -> TenantsOfTest:
    found = TenantsOfTest(tmp_path)
    found.add("acme")
    found.add("globex")
    return found


@pytest_asyncio.fixture
async def server(tenants: TenantsOfTest, tmp_path: Path) -> AsyncIterator[ServerHarness]:
    async with serving(*tenants.options(tmp_path), context_tokens=1 << 14, blocks=600) as server:
        server.scripted.before_step = lambda plan: _slow()
        yield server


def _slow() -> None:
    """Streams last for as long as a test looks at them."""
    time.sleep(0.01)


def begun(server: ServerHarness, token: str) -> Any:
    """A stream that does not end by itself in time."""
    asked = request(text="a", max_tokens=8000, ignore_eos=True)
    return server.generation.Generate(asked, metadata=bearer(token), timeout=60)


async def end_of(call: Any) -> Refusal:
    async def drain() -> None:
        while await call.read() is not grpc.aio.EOF:
            pass

    return await refusal_of(asyncio.wait_for(drain(), SECONDS))


CHANGES: dict[str, Callable[[TenantsOfTest], Any]] = {
    "revoked": lambda tenants: tenants.revoke("acme"),
    "rotated at once": lambda tenants: tenants.rotate("acme"),
    "rotated with a grace": lambda tenants: tenants.rotate("acme", 1),
    "removed": lambda tenants: tenants.remove("acme"),
    "made anew": lambda tenants: (tenants.remove("acme"), tenants.add("acme")),
    "made an operator": lambda tenants: tenants.change(
        lambda values: editing.set_access(values, "acme", ["operator"], None)
    ),
    "made a gateway": lambda tenants: tenants.gateway("acme", "globex"),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_its_streams_end_and_no_others(
    change: str, server: ServerHarness, tenants: TenantsOfTest
) -> None:
    """Who was thrown out would be served to the end of what it had begun; or others with it."""
    token = tenants.tokens["acme"]
    over, kept = begun(server, token), begun(server, tenants.tokens["globex"])
    for call in (over, kept):
        assert (await call.read()).HasField("accepted")
    held_by_two = server.core.balances["held"]
    CHANGES[change](tenants)
    refusal = await end_of(over)
    assert (refusal.code, refusal.reason) == (UNAUTHENTICATED, "CREDENTIAL_REVOKED")
    assert refusal.receipt.peak_blocks > 0, "every request has its receipt"
    finished = server.log.of("request_finished")
    assert [(facts["tenant"], facts["reason"]) for facts in finished] == [("acme", "cancelled")]
    assert held_by_two > 0
    for _ in range(3):
        assert (await kept.read()).HasField("delta"), "the neighbour goes on"
    again = await refusal_of(server.answer(text="a", metadata=bearer(token)))
    reasons = {"made an operator": "ROLE_MISSING", "made a gateway": "TENANT_NOT_ALLOWED"}
    assert again.reason == reasons.get(change, "CREDENTIAL_INVALID")
    kept.cancel()
    await server.require_all_free()
    assert token not in str(server.log.lines)


async def test_its_blocks_come_back_at_once(server: ServerHarness, tenants: TenantsOfTest) -> None:
    """Memory of somebody who is no tenant any more would be missing to the others."""
    call = begun(server, tenants.tokens["acme"])
    await call.read()
    tenants.revoke("acme")
    assert (await end_of(call)).reason == "CREDENTIAL_REVOKED"
    await asyncio.wait_for(server.require_all_free(), SECONDS)


async def test_one_that_waits_ends_too(tenants: TenantsOfTest, tmp_path: Path) -> None:
    """A request without a place would come in when its tenant is long gone."""
    async with serving(*tenants.options(tmp_path), sequences_max=1) as server:
        gate = server.gate()
        first = begun_short(server, tenants.tokens["globex"])
        await server.until(lambda: gate.arrived)
        second = begun_short(server, tenants.tokens["acme"])
        await server.until(lambda: len(server.server._admission.open_requests) == 2)
        tenants.revoke("acme")
        await server.until(lambda: server.log.of("calls_revoked"))
        gate.open()
        assert (await end_of(second)).reason == "CREDENTIAL_REVOKED"
        async for _ in first:
            pass
        await server.require_all_free()


def begun_short(server: ServerHarness, token: str) -> Any:
    asked = request(text="a", max_tokens=20, ignore_eos=True)
    return server.generation.Generate(asked, metadata=bearer(token), timeout=PATIENCE)


async def test_who_reads_nothing_loses_its_blocks_all_the_same(tenants: TenantsOfTest) -> None:
    """A client could keep memory by leaving its stream alone."""
    async with serving(
        *("--tenants", str(tenants.path), "--mailbox-tokens", "4"), blocks=64
    ) as server:
        token = tenants.tokens["acme"]
        raw = await Http2Client.call(
            server.address,
            request(text="a", max_tokens=200, ignore_eos=True),
            metadata=[("authorization", f"Bearer {token}")],
        )
        await server.until(lambda: server.core.balances["held"])
        tenants.revoke("acme")
        await asyncio.wait_for(server.require_all_free(), SECONDS)
        await raw.close()


async def test_a_rotated_token_is_good_for_its_grace(
    server: ServerHarness, tenants: TenantsOfTest
) -> None:
    """Every client would have to change at the same moment."""
    old = tenants.tokens["acme"]
    new = tenants.rotate("acme", 60)
    call = begun(server, old)
    await call.read()
    await server.until(lambda: server.log.of("tenants_reloaded"))
    await server.answer(text="a", metadata=bearer(old))
    await server.answer(text="a", metadata=bearer(new))
    assert (await call.read()).HasField("delta")
    call.cancel()
    tenants.rotate("acme")
    await server.until(lambda: len(server.log.of("tenants_reloaded")) == 2)
    for token in (old, new):
        refusal = await refusal_of(server.answer(text="a", metadata=bearer(token)))
        assert refusal.reason == "CREDENTIAL_INVALID"


async def test_a_certificate_that_is_taken_out_ends_its_streams(
    tenants: TenantsOfTest, tmp_path: Path
) -> None:
    """Its connection stays: a lost key would be good until it closes."""
    files = Files(tmp_path).write("ours", clients="clients")
    tenants.add("shown", certificates=["dns:acme.example"])
    options = ("--no-dev", *files.options, "--tenants", str(tenants.path))
    theirs = credentials("ours", "clients", names=("acme.example",))
    async with serving(*options, credentials=theirs, context_tokens=1 << 14, blocks=600) as server:
        server.scripted.before_step = lambda plan: _slow()
        asked = request(text="a", max_tokens=8000, ignore_eos=True)
        call = server.generation.Generate(asked, timeout=60)
        await call.read()
        tenants.change(lambda values: editing.set_access(values, "shown", None, []))
        assert (await end_of(call)).reason == "CREDENTIAL_REVOKED"
        assert (await refusal_of(server.answer(text="a"))).reason == "CREDENTIAL_INVALID"


@pytest.mark.parametrize("kind", ["broken", "missing", "mode", "unknown field"])
async def test_a_file_that_cannot_be_used_changes_nothing(
    kind: str, server: ServerHarness, tenants: TenantsOfTest
) -> None:
    """A slip of an editor would throw out everybody, or let a file that all can read be used."""
    good = tenants.path.read_bytes()
    old = bearer(tenants.tokens["acme"])
    call = begun(server, tenants.tokens["acme"])
    await call.read()
    if kind == "missing":
        tenants.path.unlink()
    elif kind == "mode":
        tenants.path.chmod(0o640)
    elif kind == "broken":
        tenants.path.write_bytes(good[:-20])
    else:
        changed = good.replace(b'"tokens"', b'"tokenz"', 1)
        tenants.path.write_bytes(changed)
    await server.until(lambda: server.log.of("tenants_kept"))
    await asyncio.sleep(1.2)
    (line,) = server.log.of("tenants_kept")
    kinds = {"broken": "not_valid", "unknown field": "not_valid"}
    assert line["kind"] == kinds.get(kind, kind)
    assert (await call.read()).HasField("delta")
    await server.answer(text="a", metadata=old)
    # What comes after it acts.
    tenants.path.write_bytes(good)
    tenants.path.chmod(0o600)
    await server.until(lambda: server.log.of("tenants_reloaded"))
    tenants.revoke("acme")
    assert (await end_of(call)).reason == "CREDENTIAL_REVOKED"


SERVICE = "kvledger.v1.Waiting"


async def _waits(request: Any, context: Any) -> Any:
    await asyncio.sleep(60)


async def _streams(request: Any, context: Any) -> AsyncIterator[Any]:
    yield request
    await asyncio.sleep(60)


async def _has_ended(request: Any, context: Any) -> Any:
    await context.abort(grpc.StatusCode.NOT_FOUND, "of its own")


class Waiting:
    """A server of its own, with methods that wait, behind the interceptors of a listener."""

    def __init__(self, registry: Registry) -> None:
        self.calls = Calls(60.0)
        self.server = grpc.aio.server(
            interceptors=(
                self.calls,
                IdentityRequired(Authenticator(registry, Transport.TLS), doors.Port.CLIENTS),
                UndecodableRefused(),
            )
        )
        coders = (HealthCheckRequest.FromString, HealthCheckRequest.SerializeToString)
        single, stream = (
            grpc.unary_unary_rpc_method_handler,
            grpc.unary_stream_rpc_method_handler,
        )
        methods = {
            "Single": single(_waits, *coders),
            "Stream": stream(_streams, *coders),
            "Ended": single(_has_ended, *coders),
        }
        handler = grpc.method_handlers_generic_handler(SERVICE, methods)
        self.server.add_generic_rpc_handlers((handler,))
        self.port = self.server.add_insecure_port("127.0.0.1:0")


@pytest.mark.parametrize("method", ["Single", "Stream"])
async def test_every_kind_of_method_ends(
    method: str, tenants: TenantsOfTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A method that somebody adds would go on for who is nobody, or let strangers in."""
    door = doors.Door(Role.CLIENT, doors.Port.CLIENTS)
    table = {f"/{SERVICE}/{name}": (door,) for name in ("Single", "Stream", "Ended")}
    monkeypatch.setattr(doors, "_TABLE", table)
    registry = Registry(tenants.path)
    waiting = Waiting(registry)
    registry.subscribe(lambda old, new: waiting.calls.end_revoked(new))
    await waiting.server.start()
    async with connection(f"127.0.0.1:{waiting.port}") as channel:
        streams = method == "Stream"
        kind = channel.unary_stream if streams else channel.unary_unary
        path = f"/{SERVICE}/{method}"

        async def ended(metadata: Any) -> Refusal:
            call = kind(path)(b"", metadata=metadata, timeout=PATIENCE)
            return await (end_of(call) if streams else refusal_of(call))

        assert (await ended(())).reason == "CREDENTIAL_INVALID"
        shown = [bearer(tenants.tokens[name]) for name in ("acme", "globex")]
        over, kept = (asyncio.create_task(ended(metadata)) for metadata in shown)
        own = channel.unary_unary(f"/{SERVICE}/Ended")(b"", metadata=shown[0])
        assert (await refusal_of(own)).code == grpc.StatusCode.NOT_FOUND
        await until(lambda: waiting.calls.open_count == 2)
        tenants.revoke("acme")
        await registry.refresh()
        assert (await over).reason == "CREDENTIAL_REVOKED"
        assert not kept.done()
        assert waiting.calls.open_count == 1
        kept.cancel()
    await waiting.server.stop(0)
