"""The commands that talk to a server: over TLS, over a unix socket, and `kvledger health`."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from authorities import Files, authority, root
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from test_client_commands import Captured, FakeService, type_in

from kvledger.cli import main
from kvledger.cli.client import channel
from kvledger.v1 import generation_pb2_grpc

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Fake:
    """A server that listens in every way, and its health."""

    def __init__(self, folder: Path) -> None:
        self.health = health.HealthServicer()
        self.server = grpc.server(futures.ThreadPoolExecutor(2))
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(FakeService(), self.server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.server)
        files = Files(folder).write("ours")
        pair = [(files.key.read_bytes(), files.cert.read_bytes())]
        self.plain = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.tls = self._secured(grpc.ssl_server_credentials(pair))
        self.mutual = self._secured(grpc.ssl_server_credentials(pair, root("theirs"), True))
        self.socket = f"unix:{folder / 's'}"
        assert self.server.add_insecure_port(self.socket)
        self.server.start()

    def _secured(self, credentials: grpc.ServerCredentials) -> str:
        return f"127.0.0.1:{self.server.add_secure_port('127.0.0.1:0', credentials)}"


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fake]:
    fake = Fake(tmp_path_factory.mktemp("fake"))
    yield fake
    fake.server.stop(None).wait()


@pytest.fixture
def ca(tmp_path: Path) -> str:
    """The option that trusts the server's authority."""
    path = tmp_path / "ca.crt"
    path.write_bytes(root("ours"))
    return f"--tls-ca={path}"


@pytest.fixture
def own(tmp_path: Path) -> list[str]:
    """The options that show a certificate which the server trusts."""
    leaf = authority("theirs").issue_cert("me")
    cert, key = tmp_path / "me.crt", tmp_path / "me.key"
    cert.write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
    key.write_bytes(leaf.private_key_pem.bytes())
    return [f"--tls-cert={cert}", f"--tls-key={key}"]


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_they_talk_over_every_kind_of_connection(
    fake: Fake,
    ca: str,
    own: list[str],
    command: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
) -> None:
    """A server that is closed to strangers would be closed to our own commands."""
    for address, options in (
        (fake.plain, []),
        (fake.socket, []),
        (fake.tls, [ca]),
        (fake.mutual, [ca, *own]),
    ):
        type_in(monkeypatch, b"hello\n")
        assert main([command, "--server", address, *options]) == 0
        assert capsys.readouterr().out == "Hello you\n"


def test_a_server_that_nobody_vouches_for_is_told(
    fake: Fake, tmp_path: Path, capsys: Captured
) -> None:
    """A person would be told to start the server that has just answered."""
    wrong = tmp_path / "wrong.crt"
    wrong.write_bytes(root("x"))
    assert main(["generate", "--server", fake.tls, f"--tls-ca={wrong}", "x"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"kvledger generate: no TLS with {fake.tls}: ")


def test_a_client_without_a_certificate_is_turned_away(
    fake: Fake, ca: str, capsys: Captured
) -> None:
    """A refused connection would look like an empty answer."""
    assert main(["generate", "--server", fake.mutual, ca, "x"]) == 1
    assert capsys.readouterr().err.startswith("kvledger generate: ")


@pytest.mark.parametrize("command", ["generate", "chat", "health"])
def test_options_of_tls_that_cannot_be_are_refused(
    fake: Fake,
    ca: str,
    own: list[str],
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
) -> None:
    """A prompt would go over the wire in the clear because an option was forgotten."""
    text = tmp_path / "text"
    text.write_text("no certificate")
    for options, reason in (
        ([own[0], ca], "--tls-cert and --tls-key go together"),
        ([own[1], ca], "--tls-cert and --tls-key go together"),
        (own, "--tls-cert needs --tls-ca"),
        ([f"--tls-ca={tmp_path / 'x'}"], f"--tls-ca {tmp_path / 'x'}: No such file"),
        ([f"--tls-ca={text}"], f"--tls-ca {text}: it is not PEM"),
        ([ca, f"--tls-cert={text}", own[1]], f"--tls-cert {text}: it is not PEM"),
        ([ca, "--server", fake.socket], "there is no TLS on a unix socket"),
    ):
        type_in(monkeypatch, b"hello\n")
        assert main([command, "--server", fake.tls, *options]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"kvledger {command}: ")
        assert reason in line


def test_health_is_told_by_its_exit_status(
    fake: Fake, ca: str, own: list[str], capsys: Captured
) -> None:
    """A probe would restart a server that is well, or leave one that is not."""
    for address, options in (
        (fake.plain, []),
        (fake.socket, []),
        (fake.tls, [ca]),
        (fake.mutual, [ca, *own]),
    ):
        for status, code in ((SERVING, 0), (NOT_SERVING, 1)):
            fake.health.set("", status)
            assert main(["health", "--server", address, *options]) == code
            name = health_pb2.HealthCheckResponse.ServingStatus.Name(status)
            assert capsys.readouterr().out == f"{name}\n"


def test_health_of_a_service_is_its_own(fake: Fake, capsys: Captured) -> None:
    """A probe that asks for one service would hear of another."""
    fake.health.set("", SERVING)
    fake.health.set("one", NOT_SERVING)
    assert main(["health", "--server", fake.plain, "--service", "one"]) == 1
    assert capsys.readouterr().out == "NOT_SERVING\n"
    assert main(["health", "--server", fake.plain, "--service", "other"]) == 1
    assert capsys.readouterr().err.startswith("kvledger health: NOT_FOUND: ")


def test_health_of_nobody_ends_in_time(tmp_path: Path, capsys: Captured) -> None:
    """A probe would hang, and the probes after it pile up."""
    assert main(["health", "--server", f"unix:{tmp_path / 's'}", "--timeout", "2"]) == 1
    assert "no server answers" in capsys.readouterr().err


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A port that the environment calls a proxy for everything."""
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy", "grpc_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{listening.getsockname()[1]}")
        listening.settimeout(10)
        yield listening


@pytest.mark.parametrize("kind", ["plain", "socket", "tls"])
def test_a_token_for_this_machine_goes_to_no_proxy(
    fake: Fake, kind: str, ca: str, proxy: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever runs the proxy could read it, and it would connect to another machine."""
    monkeypatch.setenv("KVLEDGER_TOKEN", "kvl_secret")
    options = [ca] if kind == "tls" else []
    assert main(["generate", *options, "--server", getattr(fake, kind), "Hi"]) == 0
    proxy.settimeout(0)
    with pytest.raises(BlockingIOError):
        proxy.accept()


def test_what_is_elsewhere_is_reached_by_the_proxy(proxy: socket.socket) -> None:
    """Where a proxy is the only way out, no server would be found."""
    options = argparse.Namespace(
        server="kvledger.invalid:50051", tls_ca=None, tls_cert=None, tls_key=None
    )
    with channel(options) as connection:
        ready = grpc.channel_ready_future(connection)
        asked, _ = proxy.accept()
        with asked:
            assert asked.recv(4096).startswith(b"CONNECT kvledger.invalid:50051 ")
        ready.cancel()
