"""Who gets in, on real listeners: no identity is refused, and beside it a good one is served."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from authorities import Files, credentials, credentials_of_uri
from http2_client import Http2Client
from scripted_model import PATIENCE
from server_harness import ServerHarness, connection, refusal_of, request, serving
from tenants_harness import TenantsOfTest, bearer

from kvledger.tenants.tokens import new_token

LIST_MODELS = "/kvledger.v1.ModelService/ListModels"
GET_SERVERS = "/grpc.channelz.v1.Channelz/GetServers"
HEALTH = "/grpc.health.v1.Health/Check"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
OK, UNAUTHENTICATED = grpc.StatusCode.OK, grpc.StatusCode.UNAUTHENTICATED
DENIED = grpc.StatusCode.PERMISSION_DENIED

Metadata = tuple[tuple[str, str], ...]


@pytest.fixture
def tenants(tmp_path: Path) -> TenantsOfTest:
    found = TenantsOfTest(tmp_path)
    found.add("acme")
    found.add("globex")
    found.add("gone")
    found.remove("gone")
    return found


@pytest_asyncio.fixture
async def server(tenants: TenantsOfTest, tmp_path: Path) -> AsyncIterator[ServerHarness]:
    operators = f"unix:{tmp_path / 'operators.sock'}"
    async with serving(*tenants.options(tmp_path), operators=operators) as server:
        yield server


async def code_of(
    channel: grpc.aio.Channel, method: str, metadata: Metadata = (), body: bytes = b""
) -> grpc.StatusCode:
    try:
        await channel.unary_unary(method)(body, metadata=metadata, timeout=PATIENCE)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return OK


def no_identities(good: str, other: str, gone: str) -> dict[str, Metadata]:
    """Metadata that shows nobody, made from tokens that are good, and one that was."""
    password = base64.b64encode(f"acme:{good}".encode()).decode()
    one = good.replace(good[-1], "A" if good[-1] != "A" else "B")
    return {
        "nothing": (),
        "another header": (("x-api-key", good),),
        "binary": (("authorization-bin", f"Bearer {good}".encode()),),  # type: ignore[dict-item]
        "a proxy's": (("proxy-authorization", f"Bearer {good}"),),
        "empty": (("authorization", ""),),
        "the scheme alone": (("authorization", "Bearer"),),
        "no token": (("authorization", "Bearer "),),
        "two spaces": (("authorization", f"Bearer  {good}"),),
        "no scheme": (("authorization", good),),
        "basic": (("authorization", f"Basic {password}"),),
        "another scheme": (("authorization", f"Token {good}"),),
        "joined": (("authorization", f"Bearer{good}"),),
        "a colon": (("authorization", f"Bearer: {good}"),),
        "twice the same": (*bearer(good), *bearer(good)),
        "two that are good": (*bearer(good), *bearer(other)),
        "a bad one first": (("authorization", "Bearer x"), *bearer(good)),
        "a bad one second": (*bearer(good), ("authorization", "Bearer x")),
        "two in one": (("authorization", f"Bearer {good}, Bearer {other}"),),
        "something after it": (("authorization", f"Bearer {good} x"),),
        "truncated": bearer(good[:-1]),
        "longer": bearer(good + "A"),
        "one character": bearer(one),
        "upper case": bearer(good.upper()),
        "the prefix alone": bearer("kvl_"),
        "without prefix": bearer(good.removeprefix("kvl_")),
        "10,000 characters": bearer("kvl_" + "A" * 10_000),
        "as long as may": bearer("kvl_" + "A" * 8_000),
        "nobody's": bearer(new_token()),
        "of a tenant that is gone": bearer(gone),
        "a hash": bearer("kvl_" + "0" * 64),
        "a name": bearer("acme"),
        "a name and a tenant": (*bearer("acme"), ("x-tenant-id", "acme")),
        "a tenant alone": (("x-tenant-id", "acme"),),
        "a signed one": bearer("eyJhbGciOiJub25lIn0.eyJ0ZW5hbnQiOiJhY21lIn0."),
    }


KINDS = tuple(no_identities(*[new_token()] * 3))


@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_no_identity_is_refused(
    kind: str, server: ServerHarness, tenants: TenantsOfTest
) -> None:
    """A stranger would be served, perhaps as somebody else."""
    good = tenants.tokens["acme"]
    shown = no_identities(good, tenants.tokens["globex"], tenants.tokens["gone"])[kind]
    nobody = no_identities(good, good, good)["nothing"]
    refusal = await refusal_of(server.answer(text="a", metadata=shown))
    expected = await refusal_of(server.answer(text="a", metadata=nobody))
    assert (refusal.code, refusal.reason) == (UNAUTHENTICATED, "CREDENTIAL_INVALID")
    # One error for all: nobody learns how near a guess was.
    assert refusal.message == expected.message
    assert refusal.status == expected.status
    assert good not in refusal.everything()
    assert await code_of(server.channel, LIST_MODELS, shown) == UNAUTHENTICATED
    assert (await server.answer(text="a", metadata=bearer(good))).text == "bcde"
    assert [facts["tenant"] for facts in server.log.of("request_finished")] == ["acme"]
    assert not any(token in str(server.log.lines) for token in tenants.tokens.values())


@pytest.mark.parametrize(
    "value", [b"Bearer \xff\xfe", "Bearer kvl_é".encode(), b"Bearer kvl_\x7f", b"Bearer kvl_\x01a"]
)
async def test_bytes_that_are_no_text_are_refused(value: bytes, tenants: TenantsOfTest) -> None:
    """A header that no client library sends would break the server, or get in."""
    async with serving("--tenants", str(tenants.path)) as server:
        raw = await Http2Client.call(
            server.address, request(text="a"), closed=False, metadata=[("authorization", value)]
        )
        await asyncio.wait_for(raw.read_until_closed(), PATIENCE)
        assert raw.trailers.get("grpc-status") != "0"
        assert raw.data == b""
        shown = bearer(tenants.tokens["acme"])
        assert (await server.answer(text="a", metadata=shown)).text == "bcde"
        assert len(server.log.of("request_finished")) == 1


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
async def test_a_scheme_has_no_case(
    scheme: str, server: ServerHarness, tenants: TenantsOfTest
) -> None:
    """A client that writes it as its library does would be refused."""
    shown = (("authorization", f"{scheme} {tenants.tokens['acme']}"),)
    assert (await server.answer(text="a", metadata=shown)).text == "bcde"


async def test_each_is_served_as_itself(server: ServerHarness, tenants: TenantsOfTest) -> None:
    """The core would book one tenant's blocks to another."""
    for name in ("globex", "acme", "globex"):
        await server.answer(text="a", metadata=bearer(tenants.tokens[name]))
    finished = server.log.of("request_finished")
    assert [facts["tenant"] for facts in finished] == ["globex", "acme", "globex"]
    numbers = {tenant.name: tenant.number for tenant in server.server.registry.tenants()}
    assert sorted(numbers.values()) == [1, 2], "0 is that of --dev"


async def test_a_stranger_is_heard_before_its_message_is_decoded(
    server: ServerHarness, tenants: TenantsOfTest
) -> None:
    """Strangers could make the server work; or learn what a method takes."""
    broken = b"\xff\xff\xff"
    assert await code_of(server.channel, LIST_MODELS, (), broken) == UNAUTHENTICATED
    shown = bearer(tenants.tokens["acme"])
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    assert await code_of(server.channel, LIST_MODELS, shown, broken) == invalid


async def test_probes_need_no_identity(server: ServerHarness) -> None:
    """A supervisor would restart a server that is well."""
    assert await code_of(server.channel, HEALTH) == OK
    assert await code_of(server.channel, HEALTH, bearer("kvl_wrong")) == OK
    assert server.server.operators_address is not None
    async with connection(server.server.operators_address) as channel:
        assert await code_of(channel, HEALTH) == OK


async def test_roles_by_listener(
    server: ServerHarness, tenants: TenantsOfTest, tmp_path: Path
) -> None:
    """Who may generate could look at everybody's connections, or the other way round."""
    tenants.add("viewer", roles=["viewer"])
    tenants.add("operator", roles=["operator"])
    tenants.add("both", roles=["client", "operator"])
    await server.until(lambda: server.server.registry.tenant("both"))
    expected = {
        "acme": (OK, DENIED),
        "viewer": (DENIED, OK),
        "operator": (DENIED, OK),
        "both": (OK, OK),
        "gone": (UNAUTHENTICATED, UNAUTHENTICATED),
    }
    assert server.server.operators_address is not None
    async with connection(server.server.operators_address) as operators:
        for name, codes in expected.items():
            shown = bearer(tenants.tokens[name])
            found = (
                await code_of(server.channel, LIST_MODELS, shown),
                await code_of(operators, GET_SERVERS, shown),
            )
            assert found == codes, name
        assert await code_of(operators, GET_SERVERS) == UNAUTHENTICATED
    shown = bearer(tenants.tokens["operator"])
    refusal = await refusal_of(server.answer(text="a", metadata=shown))
    assert (refusal.code, refusal.reason) == (DENIED, "ROLE_MISSING")
    assert "role client" in refusal.message


async def test_of_a_method_that_is_not_there_nobody_is_asked(server: ServerHarness) -> None:
    """A client of another version would look for a wrong token."""
    unimplemented = grpc.StatusCode.UNIMPLEMENTED
    assert await code_of(server.channel, "/kvledger.v1.ModelService/Nothing") == unimplemented


async def test_a_developer_needs_none_and_a_wrong_one_is_still_wrong(
    tenants: TenantsOfTest,
) -> None:
    """With --dev somebody with a revoked token would not notice; or a laptop need a file."""
    async with serving("--tenants", str(tenants.path)) as server:
        await server.answer(text="a")
        await server.answer(text="a", metadata=bearer(tenants.tokens["acme"]))
        names = [facts["tenant"] for facts in server.log.of("request_finished")]
        assert names == ["dev", "acme"]
        refusal = await refusal_of(server.answer(text="a", metadata=bearer(new_token())))
        assert refusal.code == UNAUTHENTICATED
        numbers = {tenant.name: tenant.number for tenant in server.server.registry.tenants()}
        assert numbers["dev"] == 0
    async with serving() as server:  # as it was before there were tenants
        await server.answer(text="a", metadata=bearer(new_token()))
        assert server.log.of("request_finished")[0]["tenant"] == "dev"


class TestCertificates:
    """Clients that show certificates."""

    @pytest.fixture
    def files(self, tmp_path: Path) -> Files:
        return Files(tmp_path).write("ours", clients="clients")

    def options(self, files: Files, tenants: TenantsOfTest) -> list[str]:
        return ["--no-dev", *files.options, "--tenants", str(tenants.path)]

    @pytest.mark.parametrize(
        ("entered", "shown"),
        [
            ("dns:acme.example", {"names": ("acme.example",)}),
            ("dns:ACME.example", {"names": ("other.example", "acme.EXAMPLE")}),
            ("cn:acme of old", {"names": ("x.example",), "cn": "acme of old"}),
        ],
    )
    async def test_a_name_that_is_entered_is_a_tenant(
        self, entered: str, shown: dict[str, Any], files: Files, tenants: TenantsOfTest
    ) -> None:
        """A certificate would be worth nothing, or anything."""
        tenants.add("shown", certificates=[entered])
        theirs = credentials("ours", "clients", **shown)
        stranger = credentials("ours", "clients", names=("nobody.example",))
        async with serving(*self.options(files, tenants), credentials=theirs) as server:
            await server.answer(text="a")
            assert server.log.of("request_finished")[0]["tenant"] == "shown"
            async with connection(server.address, stranger) as channel:
                assert await code_of(channel, LIST_MODELS) == UNAUTHENTICATED
                good = bearer(tenants.tokens["acme"])
                assert await code_of(channel, LIST_MODELS, good) == OK

    @pytest.mark.parametrize(
        "shown",
        [
            {"names": ("x.example",), "cn": "acme.example"},  # a host is entered
            {"names": ("acme@acme.example",)},
            {"names": ("sub.acme.example",)},
            {"names": ("*.example",)},
            {"names": ("acme.example", "globex.example")},  # two tenants
        ],
    )
    async def test_a_name_that_only_looks_like_it_is_none(
        self, shown: dict[str, Any], files: Files, tenants: TenantsOfTest
    ) -> None:
        """Who may have a certificate for one kind of name would be whoever has the other."""
        tenants.add("shown", certificates=["dns:acme.example"])
        tenants.add("other", certificates=["dns:globex.example"])
        theirs = credentials("ours", "clients", **shown)
        good = credentials("ours", "clients", names=("acme.example",))
        async with serving(*self.options(files, tenants), credentials=theirs) as server:
            assert (await refusal_of(server.answer(text="a"))).code == UNAUTHENTICATED
            async with connection(server.address, good) as channel:
                assert await code_of(channel, LIST_MODELS) == OK

    async def test_uris_are_names_of_their_own(self, files: Files, tenants: TenantsOfTest) -> None:
        """A workload would be nobody, or another one whose path begins alike."""
        uri = "spiffe://example/acme"
        tenants.add("shown", certificates=[f"uri:{uri}"])
        theirs = credentials_of_uri("ours", "clients", uri)
        async with serving(*self.options(files, tenants), credentials=theirs) as server:
            await server.answer(text="a")
            assert server.log.of("request_finished")[0]["tenant"] == "shown"
            for others in ((uri + "/x",), (uri.upper(),), ("spiffe://example/",)):
                other = credentials_of_uri("ours", "clients", *others)
                async with connection(server.address, other) as channel:
                    assert await code_of(channel, LIST_MODELS) == UNAUTHENTICATED

    async def test_a_certificate_and_a_token_must_be_one(
        self, files: Files, tenants: TenantsOfTest
    ) -> None:
        """A token that was stolen would be as good in another's hands."""
        tenants.add("shown", certificates=["dns:acme.example"])
        theirs = credentials("ours", "clients", names=("acme.example",))
        async with serving(*self.options(files, tenants), credentials=theirs) as server:
            own, other = bearer(tenants.tokens["shown"]), bearer(tenants.tokens["acme"])
            assert await code_of(server.channel, LIST_MODELS, own) == OK
            assert await code_of(server.channel, LIST_MODELS, other) == UNAUTHENTICATED
            wrong = bearer(new_token())
            assert await code_of(server.channel, LIST_MODELS, wrong) == UNAUTHENTICATED

    async def test_without_client_certificates_a_token_is_needed(
        self, tmp_path: Path, tenants: TenantsOfTest
    ) -> None:
        """TLS alone says who the server is, not who calls."""
        files = Files(tmp_path).write("ours")
        async with serving(
            *self.options(files, tenants), credentials=credentials("ours")
        ) as server:
            assert (await refusal_of(server.answer(text="a"))).code == UNAUTHENTICATED
            shown = bearer(tenants.tokens["acme"])
            assert (await server.answer(text="a", metadata=shown)).text == "bcde"
