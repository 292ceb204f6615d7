"""TLS on the listener: who gets in, and certificates that change while it serves."""

from __future__ import annotations

import asyncio
import ssl
from datetime import datetime, timedelta, timezone
from pathlib import Path

import grpc
import pytest
from authorities import Files, authority, credentials, root
from prometheus_client import CollectorRegistry
from scripted_model import PATIENCE, expected
from server_harness import Refusal, ServerHarness, connection, refusal_of, serving
from test_listener import NOT_UTF8

from kvledger.errors import SettingRefused
from kvledger.v1 import models_pb2, models_pb2_grpc


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path).write("ours")


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changed files are seen sooner."""
    monkeypatch.setattr("kvledger.rpc.listener._FILES_INTERVAL", 0.0)


async def asked(server: ServerHarness, who: grpc.ChannelCredentials | None) -> int:
    """Models that the server names to a client with these credentials, on a new connection."""
    async with connection(server.address, who) as channel:
        stub = models_pb2_grpc.ModelServiceStub(channel)  # type: ignore[no-untyped-call]
        answer = await stub.ListModels(models_pb2.ListModelsRequest(), timeout=PATIENCE)
        return len(answer.models)


async def turned_away(server: ServerHarness, who: grpc.ChannelCredentials | None) -> Refusal:
    """How a client ends that must not get in; the server itself never answers it."""
    refusal = await refusal_of(asked(server, who))
    assert refusal.code == grpc.StatusCode.UNAVAILABLE
    assert "grpc-status-details-bin" not in refusal.metadata
    return refusal


async def served_certificate(server: ServerHarness) -> bytes:
    """What a client that connects now is shown, in DER."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection("127.0.0.1", server.server.port, ssl=context)
    shown: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.transport.abort()
    return shown


def in_file(files: Files) -> bytes:
    """The certificate in the file, in DER."""
    first = files.cert.read_text().partition("-----END CERTIFICATE-----")[0]
    return ssl.PEM_cert_to_DER_cert(first + "-----END CERTIFICATE-----\n")


async def test_who_trusts_the_authority_gets_in_and_nobody_else(files: Files) -> None:
    """Prompts would be readable on the wire, or a stranger's server taken for ours."""
    async with serving(*files.options, credentials=credentials("ours")) as server:
        assert (await server.answer(text="a")).text == "bcde"
        assert "CERTIFICATE_VERIFY_FAILED" in (await turned_away(server, credentials("x"))).message
        await turned_away(server, None)
        (line,) = server.log.of("serving")
        assert (line["tls"], line["client_certificates"]) == (True, False)
        assert line["listen"] == server.address


async def test_clients_must_show_a_certificate_when_they_are_asked(files: Files) -> None:
    """Whoever reaches the port could use a server that was closed to all but a few."""
    files.write("ours", clients="theirs")
    async with serving(*files.options, credentials=credentials("ours", "theirs")) as server:
        assert (await server.answer(text="a")).text == "bcde"
        await turned_away(server, credentials("ours"))
        await turned_away(server, credentials("ours", "x"))
        await turned_away(server, credentials("ours", "ours"))
        assert await asked(server, credentials("ours", "theirs")) == 1
        assert server.log.of("serving")[0]["client_certificates"] is True


async def test_a_renewed_certificate_is_served_and_streams_run_on(files: Files) -> None:
    """Each renewal would need a restart, or cut off the answers that people are reading."""
    async with serving(*files.options, credentials=credentials("ours")) as server:
        assert await served_certificate(server) == in_file(files)
        gate = server.gate()
        stream = asyncio.create_task(server.answer(text="k", max_tokens=100, ignore_eos=True))
        gate.let(3)
        await server.until(lambda: gate.arrived == 4)
        files.write("successor")
        await server.until(lambda: server.log.of("certificate_reloaded"))
        assert await served_certificate(server) == in_file(files)
        assert await asked(server, credentials("successor")) == 1
        await turned_away(server, credentials("ours"))
        gate.open()
        assert (await stream).text == expected("k", 100)
        assert (await server.answer(text="a")).text == "bcde", "the old connection is still good"
        assert len(server.log.of("certificate_reloaded")) == 1


async def test_half_a_renewal_keeps_the_old_certificate(files: Files) -> None:
    """Who connects between two writes would be refused; or an operator never hear of the fault."""
    async with serving(*files.options, credentials=credentials("ours")) as server:
        before, key = in_file(files), files.key.read_bytes()
        files.write("ours")
        new_key = files.key.read_bytes()
        files.key.write_bytes(key)
        await server.until(lambda: server.log.of("certificate_kept"))
        assert await served_certificate(server) == before
        # A time in which it looks at the files more than once.
        await asyncio.sleep(0.5)
        (kept,) = server.log.of("certificate_kept")
        assert kept["kind"] == "key_mismatch"
        assert str(files.key) in kept["reason"]
        files.key.write_bytes(new_key)
        await server.until(lambda: server.log.of("certificate_reloaded"))
        assert await served_certificate(server) == in_file(files) != before
        assert "PRIVATE KEY" not in str(server.log.lines)


async def test_authorities_of_clients_can_be_replaced(files: Files) -> None:
    """A client whose authority was withdrawn would go on connecting until a restart."""
    files.write("ours", clients="theirs")
    async with serving(*files.options, credentials=credentials("ours", "theirs")) as server:
        files.client_ca.write_bytes(root("others"))
        await server.until(lambda: server.log.of("certificate_reloaded"))
        assert await asked(server, credentials("ours", "others")) == 1
        await turned_away(server, credentials("ours", "theirs"))


async def test_a_listener_that_broke_comes_back_with_tls(files: Files) -> None:
    """After a hostile call, the port would be open without TLS, or with an old certificate."""
    async with serving(*files.options, credentials=credentials("ours")) as server:
        files.write("successor")
        await server.until(lambda: server.log.of("certificate_reloaded"))
        async with connection(server.address, credentials("successor")) as channel:
            await refusal_of(channel.unary_unary(NOT_UTF8)(b"", timeout=PATIENCE / 4))
        await server.until(lambda: server.log.of("listener_broke"))
        async with connection(server.address, credentials("successor")) as channel:
            list_models = channel.unary_unary("/kvledger.v1.ModelService/ListModels")
            assert await list_models(b"", wait_for_ready=True, timeout=PATIENCE)
        await turned_away(server, None)


async def test_wrong_files_are_refused_at_the_start(files: Files) -> None:
    """A server would come up that no client can talk to."""
    files.key.write_bytes(authority("ours").issue_cert("x").private_key_pem.bytes())
    with pytest.raises(SettingRefused, match="not the key of the certificate"):
        async with serving(*files.options):
            pass


def sample(server: ServerHarness, name: str) -> float | None:
    """What a metric says."""
    registry: CollectorRegistry = server.server._metrics.registry
    return registry.get_sample_value(f"kvledger_certificate_{name}")


async def test_a_failed_renewal_is_counted_once_a_change(files: Files) -> None:
    """Nobody would be woken before the old certificate expires."""
    async with serving(*files.options, credentials=credentials("ours")) as server:
        assert sample(server, "reload_failures_total") == 0
        whole = files.cert.read_bytes()
        for count, data in enumerate((b"", b"no certificate", whole[:100]), 1):
            files.cert.write_bytes(data)
            await server.until(lambda n=count: len(server.log.of("certificate_kept")) == n)
            await asyncio.sleep(0.3)  # it looks again, more than once
            assert sample(server, "reload_failures_total") == count
            assert len(server.log.of("certificate_kept")) == count
        files.write("ours")
        await server.until(lambda: server.log.of("certificate_reloaded"))
        assert sample(server, "reload_failures_total") == 3
        assert await asked(server, credentials("ours")) == 1


async def test_the_end_of_a_certificate_is_told(files: Files) -> None:
    """An operator would learn from clients that a certificate has expired."""
    now = datetime.now(timezone.utc).replace(microsecond=0)
    files.write("ours", begins=now - timedelta(days=90), ends=now + timedelta(days=3))
    async with serving(*files.options, credentials=credentials("ours")) as server:
        (warned,) = server.log.of("certificate_expiry")
        assert warned["kind"] == "expires_soon"
        assert warned["not_after"] == (now + timedelta(days=3)).isoformat()
        assert sample(server, "expiry_timestamp_seconds") == (now + timedelta(days=3)).timestamp()
        files.write("ours", begins=now - timedelta(days=90), ends=now - timedelta(days=1))
        await server.until(lambda: len(server.log.of("certificate_expiry")) == 2)
        assert server.log.of("certificate_expiry")[1]["kind"] == "expired"
        assert sample(server, "expiry_timestamp_seconds") == (now - timedelta(days=1)).timestamp()
        files.write("ours")
        await server.until(lambda: len(server.log.of("certificate_reloaded")) == 2)
        assert len(server.log.of("certificate_expiry")) == 2
