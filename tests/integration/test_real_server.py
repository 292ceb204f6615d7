"""A real server with the default model: strangers, pressure, its log, and how it starts and stops.

The last test stops the server that all others share.
"""

from __future__ import annotations

import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from server_process import (
    PATIENCE,
    ServerProcess,
    answer,
    generation,
    models,
    refused_start,
    request,
    server_process,
    text_of,
)

from kvledger.v1 import generation_pb2 as pb
from kvledger.v1 import models_pb2

CANARY = "canary-4711"
FRANCE = "The capital of France is"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    # A small budget: prompts are read in many chunks.
    with server_process("--kv-blocks", "64", "--token-budget", "64") as server:
        yield server


@pytest.fixture(scope="module")
def channel(server: ServerProcess) -> Iterator[grpc.Channel]:
    with server.channel() as channel:
        yield channel


@pytest.fixture(autouse=True)
def _lives_and_serves(server: ServerProcess, channel: grpc.Channel) -> Iterator[None]:
    """Whatever a test did, the server is well and gives the next one the right answer."""
    yield
    if server.process.poll() is None and not server.events("draining"):
        assert health(channel) == health_pb2.HealthCheckResponse.SERVING
        assert answer(channel, request(FRANCE, 3)) == " Paris.\n"


def health(channel: grpc.Channel) -> int:
    """What the server says of itself."""
    response = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    return int(response.status)


def memory_peak(server: ServerProcess) -> int:
    """Most memory that the process ever had, in bytes."""
    for line in Path(f"/proc/{server.process.pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM")


def test_a_stop_string_inside_a_token(channel: grpc.Channel) -> None:
    """The stop string is no token of the model's: the whole word would be sent (B51, B59)."""
    message = request(FRANCE, 8)
    message.stop.sequences.append("Pari")
    responses = list(generation(channel).Generate(message, timeout=PATIENCE))
    assert text_of(responses) == " "
    (sample,) = responses[-1].finished.samples
    assert sample.finish_reason == pb.FINISH_REASON_STOP


def test_text_joined_is_text_in_one_piece(channel: grpc.Channel) -> None:
    """Characters of several tokens would be broken, or stop the stream (B53, B55)."""
    message = request("Repeat: \u010f \u010f \u010f abc\nRepeat: \u010f \u010f \u010f abc", 12)
    streamed = answer(channel, message)
    message.output.final_only = True
    *_, last = generation(channel).Generate(message, timeout=PATIENCE)
    assert last.finished.samples[0].text == streamed
    assert "\ufffd" not in streamed


def test_tiny_temperatures_are_greedy(channel: grpc.Channel) -> None:
    """Dividing by next to nothing would overflow and give noise (B68)."""
    greedy = answer(channel, request("San Francisco is a", 4))
    for temperature in (1e-3, 1e-6, 1e-12, 1e-38):
        sampling = pb.SamplingOptions(temperature=temperature, seed=3)
        assert answer(channel, request("San Francisco is a", 4, sampling=sampling)) == greedy


def test_a_seed_gives_the_same_text_in_company(channel: grpc.Channel) -> None:
    """A seeded answer would depend on who else is served (B71)."""
    sampling = pb.SamplingOptions(temperature=0.8, seed=42)
    seeded = request("Once upon a time", 12, sampling=sampling)
    alone = answer(channel, seeded)
    other = request("Sunday", 30, sampling=pb.SamplingOptions(temperature=2.0, top_k=50))
    with ThreadPoolExecutor() as pool:
        neighbours = [pool.submit(answer, channel, other) for _ in range(3)]
        assert answer(channel, seeded) == alone
        for neighbour in neighbours:
            neighbour.result()


def test_a_long_prompt_stops_nobody(channel: grpc.Channel) -> None:
    """While a long prompt is read, streams would stand still and short prompts wait (B27, B29)."""
    long = request(" a" * 480, 1)
    order: list[str] = []
    gaps: list[float] = []
    reading = threading.Event()

    def watch() -> None:
        message = request("Count: 1 2 3", 24)
        message.stop.ignore_eos = True
        last = 0.0
        for response in generation(channel).Generate(message, timeout=PATIENCE):
            now = time.monotonic()
            if response.HasField("delta"):
                if last:
                    gaps.append(now - last)
                last = now
                reading.set()

    def run(name: str, message: pb.GenerateRequest) -> pb.Finished:
        finished = pb.Finished()
        for response in generation(channel).Generate(message, timeout=PATIENCE):
            if response.HasField("delta"):
                order.append(name)
            finished = response.finished
        return finished

    with ThreadPoolExecutor() as pool:
        watching = pool.submit(watch)
        assert reading.wait(PATIENCE)
        prefill = pool.submit(run, "long", long)
        time.sleep(0.05)  # as in the report; the order below holds whatever it is
        run("short", request("The sky is", 1))
        watching.result()
        spent = prefill.result().receipt.prefill_time.ToTimedelta().total_seconds()
    assert order == ["short", "long"]
    assert max(gaps) < spent * 0.75, "eight chunks, and a token after each"


def test_a_message_of_a_million_items_takes_no_memory(
    server: ServerProcess, channel: grpc.Channel
) -> None:
    """One client could fill the memory with one message (B49)."""
    answer(channel, request(FRANCE, 1))
    before = memory_peak(server)
    for message in (
        pb.GenerateRequest(text="a", stop=pb.StopOptions(sequences=["x"] * 1_390_000)),
        pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage()] * 1_000_000)),
    ):
        with pytest.raises(grpc.RpcError) as raised:
            list(generation(channel).Generate(message, timeout=PATIENCE))
        assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert memory_peak(server) - before < 50 << 20


def test_lines_that_are_cut_give_their_blocks_back(
    server: ServerProcess, channel: grpc.Channel
) -> None:
    """Memory would stay with clients that are gone (B81, B83)."""
    ended = len(server.events("request_finished"))
    message = request("Tell me a story", 1000)
    message.stop.ignore_eos = True
    for _ in range(5):
        with server.channel() as leaving:
            call = generation(leaving).Generate(message)
            next(call)
            next(call)
            call.cancel()
    server.wait(lambda: len(server.events("request_finished")) == ended + 5)
    lines = server.events("request_finished")[ended:]
    assert {line["reason"] for line in lines} == {"cancelled"}
    assert all(line["output_tokens"] < 500 for line in lines)


def test_strangers_harm_nobody(server: ServerProcess, channel: grpc.Channel) -> None:
    """A port scan, a browser or a broken client would end the server or somebody's stream."""
    with ThreadPoolExecutor() as pool:
        alone = answer(channel, request("Once", 25))
        stream = pool.submit(answer, channel, request("Once", 25))
        for data in (
            f"GET /{CANARY} HTTP/1.1\r\nHost: {CANARY}\r\n\r\n".encode(),
            CANARY.encode() + bytes(range(256)) * 64,
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + CANARY.encode() * 999,
        ):
            _send_and_reset(server.port, data)
        assert stream.result() == alone
    for message, metadata, code in (
        (request("x" * (5 << 20)), (), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (request("a"), ((CANARY, "x" * (100 << 10)),), grpc.StatusCode.RESOURCE_EXHAUSTED),
    ):
        with pytest.raises(grpc.RpcError) as raised:
            list(generation(channel).Generate(message, metadata=metadata, timeout=PATIENCE))
        assert raised.value.code() == code


def _send_and_reset(port: int, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raw.sendall(data)


def test_a_method_that_is_no_text_is_survived(server: ServerProcess) -> None:
    """One such call would make the server unreachable for all."""
    with server.channel() as channel, pytest.raises(grpc.RpcError):
        channel.unary_unary(b"/" + CANARY.encode() + b"\xff\xfe")(b"", timeout=5)
    server.event("listener_broke")
    with server.channel() as channel:
        listed = models(channel).ListModels(
            models_pb2.ListModelsRequest(), wait_for_ready=True, timeout=PATIENCE
        )
        assert len(listed.models) == 1


def test_a_port_that_is_taken_is_told_in_one_sentence(server: ServerProcess) -> None:
    """A second server on the port would share its callers without a word."""
    said = refused_start("--dev", "--listen", server.address, "--kv-blocks", "4")
    assert said.lower().startswith(
        f"kvledger serve: --listen {server.address}: address already in use"
    )
    assert said.count("\n") == 1


def test_what_is_set_wrong_is_told_in_one_sentence() -> None:
    """An operator would read a traceback, or a server would start without what was asked."""
    said = refused_start("--listen", "127.0.0.1:0")
    assert said.startswith("kvledger serve: --tenants FILE says who may call")
    assert said.count("\n") == 1
    said = refused_start("--dev", KVLEDGER_X="1")
    assert said.startswith("kvledger serve: the environment variable KVLEDGER_X is no setting")
    assert said.count("\n") == 1
    said = refused_start("--dev", "--tls-cert", "/nowhere/c", "--tls-key", "/nowhere/k")
    assert said == "kvledger serve: --tls-cert /nowhere/c: there is no such file\n"


def test_a_dead_engine_ends_the_process() -> None:
    """Nothing would start the server again, and callers would wait on it for ever."""
    prelude = "import kvledger.engine; kvledger.engine.Engine._compute = lambda *_: sys.exit(1)"
    options = ("--kv-blocks", "4", "--prefix-reuse", "off")  # the check at the start computes too
    with server_process(*options, prelude=prelude) as broken:
        with broken.channel() as channel, pytest.raises(grpc.RpcError) as raised:
            list(generation(channel).Generate(request(CANARY), timeout=PATIENCE))
        assert raised.value.code() == grpc.StatusCode.INTERNAL
        assert broken.exit_status() == 70
        assert len(broken.events("engine_died")) == 1
        assert CANARY not in "".join(broken.output)


def test_the_log_knows_no_clients_words(server: ServerProcess, channel: grpc.Channel) -> None:
    """What people write would lie in the log of every machine."""
    ended = len(server.events("request_finished"))
    metadata: Any = ((CANARY, CANARY), (CANARY + "-bin", CANARY.encode()))
    assert list(generation(channel).Generate(request(CANARY, 3), metadata=metadata))
    for message in (
        request(CANARY, 0),
        request(CANARY, model=CANARY),
        request(CANARY, 3, stop=pb.StopOptions(sequences=[CANARY] * 99)),
    ):
        with pytest.raises(grpc.RpcError):
            list(generation(channel).Generate(message, metadata=metadata))
    for data in (b"\x0a\x0c\xff" + CANARY.encode(), CANARY.encode()):
        call = channel.unary_unary("/kvledger.v1.ModelService/Tokenize")
        with pytest.raises(grpc.RpcError):
            call(data, metadata=metadata)
    with pytest.raises(grpc.RpcError):
        channel.unary_unary(f"/{CANARY}/{CANARY}")(b"", metadata=metadata)
    message = request(CANARY, 500)
    message.stop.ignore_eos = True
    cancelled = generation(channel).Generate(message, metadata=metadata)
    next(cancelled)
    cancelled.cancel()
    server.wait(lambda: len(server.events("request_finished")) == ended + 2)
    assert CANARY not in "".join(server.output)
    assert len(server.output) > 10


def test_sigterm_drains_and_again_stops_at_once(
    server: ServerProcess, channel: grpc.Channel
) -> None:
    """A new version could not be rolled out without cutting answers or waiting for ever."""
    endless = request("Tell me a long story", None)
    endless.stop.ignore_eos = True
    short, long = (generation(channel).Generate(m) for m in (request("Once", 25), endless))
    assert next(long).HasField("accepted")
    first = next(short)
    server.signal(signal.SIGTERM)
    server.event("draining")
    with pytest.raises(grpc.RpcError) as refused:
        list(generation(channel).Generate(request("Too late"), timeout=PATIENCE))
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
    trailers = {item.key: item.value for item in refused.value.trailing_metadata()}
    assert int(trailers["grpc-retry-pushback-ms"]) > 0
    assert text_of([first, *short])
    assert server.process.poll() is None, "the other stream still runs"
    server.signal(signal.SIGTERM)
    with pytest.raises(grpc.RpcError) as ended:
        list(long)
    assert ended.value.code() == grpc.StatusCode.UNAVAILABLE
    trailers = {item.key: item.value for item in ended.value.trailing_metadata()}
    receipt = pb.Receipt.FromString(trailers["kvledger-receipt-bin"])
    assert receipt.computed_tokens > 25
    assert server.exit_status() == 0
    assert server.events("stopped")[0]["open_requests"] == 0
    assert CANARY not in "".join(server.output)
    ids = [line["request_id"] for line in server.events("request_finished")]
    assert len(ids) == len(set(ids)), "one line for each request"
    assert "Traceback" not in "".join(server.output)
