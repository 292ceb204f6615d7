"""The clients in examples/, run against a server over a tiny model."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from started import PATIENCE, PROTOSET, ROOT, Started, environment, run, started
from tiny_model import write_gguf

EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    model = write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")
    options = (
        *("--dev", "--listen", "127.0.0.1:0", "--operators-listen", "none"),
        *("--kv-blocks", "16", "--log-format", "json"),
    )
    with started(["serve", *options, "--model", str(model)]) as server:
        yield server


def test_the_python_client_generates(server: Started) -> None:
    """Whoever starts from the example would start from something that does not work."""
    client = str(EXAMPLES / "python/client.py")
    done = run([sys.executable, client, str(PROTOSET), server.address, "the"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith(" tokens]")


def test_the_python_client_says_why_it_failed(server: Started) -> None:
    """A refusal would look like an empty answer, or be a traceback."""
    client = str(EXAMPLES / "python/client.py")
    done = run([sys.executable, client, str(PROTOSET), server.address, "x" * 5000])
    assert done.returncode == 1
    assert done.stderr.startswith("INVALID_ARGUMENT: ")


def test_the_json_client_reads_what_it_asked_for(server: Started) -> None:
    """Whoever needs an answer for a program would start from something that does not work."""
    pytest.importorskip("llguidance", reason="the extra kvledger[grammar] is not installed")
    client = str(EXAMPLES / "python/json_answer.py")
    done = run([sys.executable, client, str(PROTOSET), server.address, "the"])
    if done.returncode == 0:
        names = [line.partition(":")[0] for line in done.stdout.splitlines()]
        assert names == ["name", "born", "known_for"]
    else:
        # A model of random weights may not come to an end within max_tokens.
        assert done.stderr == "the answer is not complete; raise max_tokens\n"


@pytest.mark.soak
def test_the_go_client_generates(server: Started, tmp_path: Path) -> None:
    """The same for those who generate code; it needs 300 MB of Debian packages, hence not in the
    fast tier."""
    missing = [name for name in ("go", "protoc", "protoc-gen-go-grpc") if not shutil.which(name)]
    if missing:
        pytest.skip(f"{', '.join(missing)} is missing; examples/go/README.md says what to install")
    built = subprocess.run(
        [str(EXAMPLES / "go/build.sh"), str(ROOT / "proto"), str(tmp_path)],
        env={**environment(), "HOME": str(tmp_path), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    client = str(tmp_path / "client")
    done = run([client, server.address, "the"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith(" tokens]")
    done = run([client, server.address, "x" * 5000])
    assert done.returncode == 1
    assert done.stderr.startswith("InvalidArgument: ")


@pytest.mark.soak
def test_the_node_client_generates(server: Started, tmp_path: Path) -> None:
    """The same for those who use grpc-js; it fetches npm packages, hence not in the fast tier."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is missing")
    shutil.copytree(
        EXAMPLES / "node", tmp_path, dirs_exist_ok=True, ignore=lambda *_: ["node_modules"]
    )
    subprocess.run(
        [npm, "install", "--ignore-scripts", "--no-audit", "--no-fund"],
        cwd=tmp_path,
        env={**environment(), "HOME": str(tmp_path), "TMPDIR": str(tmp_path)},
        check=True,
        capture_output=True,
        timeout=4 * PATIENCE,
    )
    done = run(["node", str(tmp_path / "client.js"), str(PROTOSET), server.address, "the"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith(" tokens]")
    done = run(["node", str(tmp_path / "client.js"), str(PROTOSET), server.address, "x" * 5000])
    assert done.returncode == 1
    assert done.stderr.startswith("INVALID_ARGUMENT: ")
