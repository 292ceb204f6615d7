"""A word that a client says anywhere: it stays between the two of them."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from server_process import PATIENCE, ServerProcess, generation, models
from tiny_model import write_gguf

from kvledger.v1 import generation_pb2 as pb
from kvledger.v1 import models_pb2

CANARY = "kanarienvogel-4711"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    tiny = write_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf")
    options = ("--model", str(tiny), "--kv-blocks", "4096", "--threads", "1")
    logs = ("--log-level", "debug", "--metrics-listen", "127.0.0.1:0")
    server = ServerProcess(*options, *logs)
    try:
        server.event("serving")
        yield server
    finally:
        server.close()


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
