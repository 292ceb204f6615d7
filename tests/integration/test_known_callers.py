"""A real server that asks who calls, and the commands that an operator and a client use."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import PATIENCE, ServerProcess, environment, refused_start
from tiny_model import write_gguf


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture
def tenants(tmp_path: Path) -> Path:
    return tmp_path / "tenants.json"


def kvledger(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """One command."""
    return subprocess.run(
        [sys.executable, "-m", "kvledger", *arguments],
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def token_of(tenants: Path, *arguments: str) -> str:
    """What a command prints that makes a token."""
    result = kvledger("tenants", *arguments, "--file", str(tenants))
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.fixture
def server(tiny: Path, tenants: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    token_of(tenants, "add", "nobody", "--no-token")
    options = ("--model", str(tiny), "--kv-blocks", "64", "--threads", "1", "--no-dev")
    listen = ("--listen", f"unix:{tmp_path / 's.sock'}", "--tenants", str(tenants))
    server = ServerProcess(*options, *listen)
    try:
        server.event("serving")
        yield server
    finally:
        server.close()


def test_a_token_is_made_used_and_revoked(server: ServerProcess, tenants: Path) -> None:
    """What an operator does on the first day, with the commands that the pages name."""
    token = token_of(tenants, "add", "acme")
    server.wait(lambda: server.events("tenants_reloaded"))
    ask = ("generate", "--raw", "--server", server.address, "--max-tokens", "3", "a")
    known = kvledger(*ask, KVLEDGER_TOKEN=token)
    assert known.returncode == 0, known.stderr
    stranger = kvledger(*ask)
    assert stranger.returncode == 1
    assert stranger.stderr.startswith("kvledger generate: UNAUTHENTICATED: authorization: no valid")
    token_of(tenants, "revoke", "acme")
    server.wait(lambda: len(server.events("tenants_reloaded")) == 2)
    revoked = kvledger(*ask, KVLEDGER_TOKEN=token)
    assert (revoked.returncode, revoked.stderr) == (1, stranger.stderr)
    assert [line["tenant"] for line in server.events("request_finished")] == ["acme"]
    assert token not in "".join(server.output)
    assert token not in known.stderr + revoked.stderr


def test_a_server_that_could_not_tell_callers_apart_does_not_start(
    tenants: Path, tmp_path: Path
) -> None:
    """It would serve whoever comes, or show tokens to whoever listens on the line."""
    token_of(tenants, "add", "acme")
    known = ("--tenants", str(tenants))
    socket = ("--listen", f"unix:{tmp_path / 's.sock'}")
    assert "needs --tls-cert and --tls-key" in refused_start("--listen", "127.0.0.1:0", *known)
    assert "--tenants FILE says who may call" in refused_start(*socket)
    assert "there is no such file" in refused_start(*socket, "--tenants", str(tmp_path / "x"))
    tenants.chmod(0o640)
    assert "mode 0640 lets others at it; chmod 600" in refused_start(*socket, *known)
    tenants.chmod(0o600)
    tenants.write_text('{"version": 1, "tenantz": {}}')
    said = refused_start(*socket, *known)
    assert said == f"kvledger serve: {tenants}: tenantz: there is no such field\n"
