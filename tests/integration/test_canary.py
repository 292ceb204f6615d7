"""A word that a client says anywhere: it stays between the two of them."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from server_process import PATIENCE, ServerProcess, environment, generation, models
from tiny_model import write_gguf

from kvledger.v1 import generation_pb2 as pb
from kvledger.v1 import models_pb2

CANARY = "kanarienvogel-4711"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all that the server writes lies."""
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    tiny = write_gguf(folder / "tiny.gguf")
    options = ("--model", str(tiny), "--kv-blocks", "4096", "--threads", "1")
    logs = ("--log-level", "debug", "--metrics-listen", "127.0.0.1:0", "--books", _books(folder))
    aliases = ("--metrics-aliases", "vllm", "--operators-listen", _operators(folder))
    server = ServerProcess(*options, *logs, *aliases)
    try:
        server.event("serving")
        yield server
    finally:
        server.close()


def _books(folder: Path) -> str:
    return str(folder / "books")


def _operators(folder: Path) -> str:
    return f"unix:{folder / 'operators.sock'}"


def chat(content: str) -> pb.ChatPrompt:
    return pb.ChatPrompt(messages=[pb.ChatMessage(role=pb.ROLE_USER, content=content)])


def said(**fields: Any) -> pb.GenerateRequest:
    request = pb.GenerateRequest(**fields)
    request.stop.max_tokens = 3
    return request


# By the field that holds the word, and the status that such a call ends with.
PLACES: dict[str, tuple[pb.GenerateRequest, str]] = {
    "text": (said(text=CANARY), "OK"),
    "chat": (said(chat=chat(CANARY)), "OK"),
    "stop": (said(text="a", stop=pb.StopOptions(sequences=[CANARY])), "OK"),
    "namespace": (
        said(text="a", cache=pb.CacheOptions(scope=pb.CACHE_SCOPE_NAMESPACE, namespace=CANARY)),
        "OK",
    ),
    "shared scope": (
        said(text="a", cache=pb.CacheOptions(shared_scope=CANARY, shared_tokens=1)),
        "PERMISSION_DENIED",
    ),
    "model": (said(text="a", model=CANARY), "NOT_FOUND"),
    "a prompt that is too long": (said(text=CANARY * 100), "INVALID_ARGUMENT"),
    "a pattern": (
        said(text="a", constraint=pb.Constraint(regex=f"({CANARY}")),
        "INVALID_ARGUMENT",
    ),
}


def status_of(call: Any) -> tuple[str, str]:
    """How a stream ends, and all that it says if it is refused."""
    try:
        list(call)
    except grpc.RpcError as error:
        trailers = b" ".join(
            value if isinstance(value, bytes) else value.encode()
            for _, value in error.trailing_metadata() or ()
        )
        return error.code().name, f"{error.details()} {trailers!r}"
    return "OK", ""


@pytest.mark.parametrize("place", PLACES)
def test_what_a_client_says_is_in_no_log_metric_or_refusal(
    server: ServerProcess, place: str
) -> None:
    """Who reads the log, or a client's own log of errors, would read prompts (S11)."""
    request, status = PLACES[place]
    everywhere = (("kvledger-trace", CANARY), ("user-agent", CANARY))
    with server.channel() as channel:
        stub = generation(channel)
        for metadata in ((), everywhere):
            ended, refusal = status_of(stub.Generate(request, metadata=metadata, timeout=PATIENCE))
            assert ended == status, refusal
            assert CANARY not in refusal
        models(channel).Tokenize(models_pb2.TokenizeRequest(text=CANARY), timeout=PATIENCE)
    server.wait(lambda: server.events("request_finished"))
    metrics = f"http://{server.event('serving')['metrics']}/metrics"
    with urllib.request.urlopen(metrics, timeout=PATIENCE) as response:
        text = response.read().decode()
    assert "kvledger_requests_total" in text
    assert CANARY not in text
    assert CANARY not in "".join(server.output)
    assert server.output, "there is a log to look at"


def test_what_a_client_says_is_in_no_page_or_file_for_operators(
    server: ServerProcess, folder: Path
) -> None:
    """Books are kept for years, and diagnoses are sent to colleagues: ids, not texts."""
    with server.channel() as channel:
        for place in ("text", "chat", "stop", "namespace"):
            message = PLACES[place][0]
            *_, last = generation(channel).Generate(message, timeout=PATIENCE)
            request_id = last.finished.receipt.request_id
        spoken = models_pb2.TokenizeRequest(text=CANARY)
        tokens = models(channel).Tokenize(spoken, timeout=PATIENCE).token_ids
    pages = _commands(folder, request_id)
    # A file of the books is written within a second.
    server.wait(lambda: request_id in _files(folder))
    pages["files"] = _files(folder)
    for name, text in pages.items():
        assert len(text) > 50, f"{name} says nothing"
        assert CANARY not in text, name
        assert CANARY.encode().hex() not in text, name
        for between in (", ", ",", " "):
            assert between.join(map(str, tokens)) not in text, f"{name} has the token ids"


def _commands(folder: Path, request_id: str) -> dict[str, str]:
    """What the commands for operators print, as programs read it and as people do."""
    server = ("--server", _operators(folder))
    asked = {
        "diagnose": ("diagnose", *server),
        "diagnose as JSON": ("diagnose", *server, "--json"),
        "ledger": ("ledger", *server),
        "ledger as JSON": ("ledger", *server, "--json"),
        "explain": ("explain", request_id, *server),
        "statement": ("statement", _books(folder), "--by", "tenant,model,replica,end"),
    }
    return {
        name: subprocess.run(
            [sys.executable, "-m", "kvledger", *arguments],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=True,
        ).stdout
        for name, arguments in asked.items()
    }


def _files(folder: Path) -> str:
    """All that the server wrote into its books."""
    found = sorted(Path(_books(folder)).rglob("*"))
    return "".join(path.read_text("utf-8") for path in found if path.is_file())


def test_the_pool_is_left_out_of_core_dumps(server: ServerProcess) -> None:
    """Keys and values give back what was said to whoever reads a core dump (S11)."""
    pool_bytes = float(server.event("model_loaded")["kv_mb"]) * 1e6
    left_out, size = 0, 0
    for line in Path(f"/proc/{server.process.pid}/smaps").read_text().splitlines():
        if line.startswith("Size:"):
            size = int(line.split()[1]) << 10
        elif line.startswith("VmFlags:") and " dd" in line:
            left_out += size
    assert pool_bytes > 30e6
    assert left_out >= 0.99 * pool_bytes
