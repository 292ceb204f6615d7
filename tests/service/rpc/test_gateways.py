"""Gateways: who acts for a tenant, over which way, and for whom not."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from authorities import Files, credentials
from scripted_model import PATIENCE
from server_harness import ServerHarness, refusal_of, request, serving
from tenants_harness import TenantsOfTest, bearer

from kvledger.tenants import editing

DENIED = grpc.StatusCode.PERMISSION_DENIED

Metadata = tuple[tuple[str, str], ...]


@pytest.fixture
def tenants(tmp_path: Path) -> TenantsOfTest:
    """A gateway for two of three, who shows a token or a certificate."""
    found = TenantsOfTest(tmp_path)
    for name in ("acme", "globex", "other"):
        found.add(name)
    found.add("hall", certificates=["dns:hall.example"])
    found.add("hall2")
    found.gateway("hall", "acme", "globex")
    found.gateway("hall2", "other")
    return found


def named(*tenants: str) -> Metadata:
    return tuple(("x-tenant-id", tenant) for tenant in tenants)


async def require_denied(server: ServerHarness, metadata: Metadata) -> str:
    """That it is refused as one who may not; the sentence."""
    refusal = await refusal_of(server.answer(text="a", metadata=metadata))
    assert (refusal.code, refusal.reason) == (DENIED, "TENANT_NOT_ALLOWED")
    assert server.log.of("request_finished") == []
    for _, value in metadata:
        assert len(value) < 2 or value not in refusal.everything(), "it quotes what was sent"
    return refusal.message


# What a gateway may not send, and what it is told.
REFUSED = {
    "none": ((), "it came 0 times"),
    "twice": (("acme", "globex"), "it came 2 times"),
    "twice the same": (("acme", "acme"), "it came 2 times"),
    "not on its list": (("other",), "no tenant that this gateway"),
    "itself": (("hall",), "no tenant that this gateway"),
    "another gateway": (("hall2",), "no tenant that this gateway"),
    "nobody": (("nobody",), "no tenant that this gateway"),
    "empty": (("",), "no tenant that this gateway"),
    "a list": (("acme,globex",), "no tenant that this gateway"),
    "another case": (("Acme",), "no tenant that this gateway"),
    "a developer": (("dev",), "no tenant that this gateway"),
    "very long": (("a" * 8000,), "no tenant that this gateway"),
}


@pytest.mark.parametrize("kind", REFUSED)
async def test_over_a_unix_socket(kind: str, tenants: TenantsOfTest, tmp_path: Path) -> None:
    """One tenant's requests would be another's, or those of a gateway that is none."""
    shown = bearer(tenants.tokens["hall"])
    names, why = REFUSED[kind]
    async with serving(*tenants.options(tmp_path)) as server:
        assert why in await require_denied(server, (*shown, *named(*names)))
        for tenant in ("globex", "acme"):
            await server.answer(text="a", metadata=(*shown, *named(tenant)))
        finished = server.log.of("request_finished")
        assert [facts["tenant"] for facts in finished] == ["globex", "acme"]


@pytest.mark.parametrize("kind", REFUSED)
async def test_over_mutual_tls(kind: str, tenants: TenantsOfTest, tmp_path: Path) -> None:
    """The same, of a gateway that shows a certificate and nothing else."""
    files = Files(tmp_path).write("ours", clients="clients")
    theirs = credentials("ours", "clients", names=("hall.example",))
    options = ("--no-dev", *files.options, "--tenants", str(tenants.path))
    names, why = REFUSED[kind]
    async with serving(*options, credentials=theirs) as server:
        assert why in await require_denied(server, named(*names))
        await server.answer(text="a", metadata=named("globex"))
        assert [facts["tenant"] for facts in server.log.of("request_finished")] == ["globex"]


@pytest.mark.parametrize("transport", ["plain", "tls"])
async def test_where_others_may_be_on_the_line(
    transport: str, tenants: TenantsOfTest, tmp_path: Path
) -> None:
    """Who finds a gateway's token would be every tenant at once."""
    tls = transport == "tls"
    options = Files(tmp_path).write("ours").options if tls else []
    shown = bearer(tenants.tokens["hall"])
    async with serving(
        *options,
        *("--tenants", str(tenants.path)),
        credentials=credentials("ours") if tls else None,
    ) as server:
        for names in ((), ("acme",)):
            sentence = await require_denied(server, (*shown, *named(*names)))
            assert "mutual TLS or a unix socket only" in sentence
        await server.answer(text="a", metadata=bearer(tenants.tokens["acme"]))


@pytest.mark.parametrize("names", [("acme",), ("globex",), ("",), ("acme", "acme")])
async def test_who_is_no_gateway_may_not_name_a_tenant(
    names: tuple[str, ...], tenants: TenantsOfTest, tmp_path: Path
) -> None:
    """A client that thinks it acts for somebody would be served as itself without a word."""
    shown = bearer(tenants.tokens["acme"])
    async with serving(*tenants.options(tmp_path)) as server:
        assert "only a gateway" in await require_denied(server, (*shown, *named(*names)))
        await server.answer(text="a", metadata=shown)
    async with serving() as server:  # nor a developer
        assert "only a gateway" in await require_denied(server, named(*names))
        await server.answer(text="a")


async def test_what_is_taken_from_its_list_ends_what_runs_for_it(
    tenants: TenantsOfTest, tmp_path: Path
) -> None:
    """A gateway would go on for a tenant that has left it; or its others would lose theirs."""
    shown = bearer(tenants.tokens["hall"])
    async with serving(*tenants.options(tmp_path)) as server:
        calls = {}
        for name in ("acme", "globex"):
            metadata = (*shown, *named(name))
            asked = request(text="a", max_tokens=100, ignore_eos=True)
            calls[name] = server.generation.Generate(asked, metadata=metadata, timeout=PATIENCE)
        gate = server.gate()
        await server.until(lambda: len(server.server._admission.open_requests) == 2)
        tenants.change(lambda v: editing.set_list(v, "gateways", "hall", ["globex"]))
        await server.until(lambda: server.log.of("calls_revoked"))
        gate.open()
        ended = await asyncio.gather(*(drained(call) for call in calls.values()))
        assert ended == [grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.OK]
        await require_denied_now(server, (*shown, *named("acme")))
        await server.require_all_free()


async def drained(call: grpc.aio.UnaryStreamCall) -> grpc.StatusCode:
    """How a call ends."""
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def require_denied_now(server: ServerHarness, metadata: Metadata) -> None:
    refusal = await refusal_of(server.answer(text="a", metadata=metadata))
    assert (refusal.code, refusal.reason) == (DENIED, "TENANT_NOT_ALLOWED")
