"""Faults injected into a whole server over a real, tiny model; docs/testing.md lists them."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from hub_models import HubShape, hub_model, save_folder
from scripted_model import expected
from server_harness import Proxy, request, serving, until
from server_harness import running as running_server
from tiny_model import write_gguf
from tiny_server import TinyServer

from kvledger.errors import DeviceLost
from kvledger.ops.cpu import CpuOps
from kvledger.rpc.connections import Keepalive
from kvledger.server import BROKE
from kvledger.tokenizer import Tokenizer
from kvledger.v1 import generation_pb2_grpc

PLAIN: dict[str, Any] = {"text": "Once upon", "max_tokens": 8, "ignore_eos": True}
LONG: dict[str, Any] = {"text": "a" * 120, "max_tokens": 300, "ignore_eos": True}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest_asyncio.fixture
async def server(tiny: Path) -> AsyncIterator[TinyServer]:
    harness = TinyServer(tiny, "--kv-blocks", "64", "--token-budget", "32", "--max-sequences", "8")
    async with running_server(harness) as running:
        yield running


class Breaking:
    """Makes a kernel's wrapper raise at one of its calls."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str, error: Exception) -> None:
        whole = getattr(CpuOps, name)
        self.calls = 0
        self.at = 0  # the call that raises; 0 is none

        def broken(ops: CpuOps, *arguments: Any, **named: Any) -> Any:
            self.calls += 1
            if self.calls == self.at:
                raise error
            return whole(ops, *arguments, **named)

        patch.setattr(CpuOps, name, broken)


# --- F6: an exception in a kernel's wrapper at step k ----------------------------------------


@pytest.mark.parametrize("kernel", ["embed", "linear", "kv_append", "paged_attention", "rms_norm"])
async def test_a_kernel_that_raises_fails_the_step_it_is_in(
    server: TinyServer, monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    """One failed call would end the server, or leave numbers behind that spoil later answers."""
    plain = (await server.answer(**PLAIN)).text
    breaking = Breaking(monkeypatch, kernel, RuntimeError("injected"))
    assert (await server.answer(**PLAIN)).text == plain
    calls, failed = breaking.calls, 0
    for at in range(1, calls + 1, max(1, calls // 8)):  # in the first step, in later ones
        breaking.calls, breaking.at = 0, at
        refusal = await server.refusal(**PLAIN)
        assert refusal.code == grpc.StatusCode.INTERNAL
        assert refusal.receipt.request_id in refusal.message
        assert "injected" not in refusal.everything()
        failed += 1
        breaking.at = 0
        assert (await server.answer(**PLAIN)).text == plain
    assert failed > 4
    assert len(server.log.of("step_failed")) == failed
    await server.require_all_free()


# --- F13: a device that is lost --------------------------------------------------------------


async def test_a_lost_device_ends_the_server_with_its_reason(
    server: TinyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every later step would fail, in a server that looks healthy and takes more requests."""
    breaking = Breaking(monkeypatch, "paged_attention", DeviceLost("the device fell off the bus"))
    await server.answer(**PLAIN)
    tasks = [asyncio.create_task(server.refusal(**LONG)) for _ in range(10)]
    await server.until(lambda: len(server.server._admission.open_requests) == 10)
    breaking.at = breaking.calls + 20
    refusals = await asyncio.gather(*tasks)
    assert {refusal.code for refusal in refusals} == {grpc.StatusCode.INTERNAL}
    assert {refusal.receipt.kv_format for refusal in refusals} == {"f32"}, "each has a receipt"
    assert await asyncio.wait_for(server.exit, 20) == BROKE
    assert len(server.log.of("engine_died")) == 1
    assert server.log.of("step_failed") == []
    assert server.log.reasons == ["length", *["failed"] * 10]
    await server.require_all_free()


# --- F8: a tokenizer that throws -------------------------------------------------------------


@pytest.mark.parametrize("text", ["short", "long " * 300])
async def test_a_tokenizer_that_throws_fails_its_request_alone(
    server: TinyServer, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """A text that some library cannot bear would end the server, or the thread that encodes."""
    neighbour = asyncio.create_task(server.answer(**PLAIN))
    whole = Tokenizer.encode_text

    def broken(tokenizer: Tokenizer, given: str) -> Any:
        if given == text:
            raise RuntimeError(f"cannot bear {text}")
        return whole(tokenizer, given)

    monkeypatch.setattr(Tokenizer, "encode_text", broken)
    for _ in range(3):
        refusal = await server.refusal(text=text)
        assert refusal.code == grpc.StatusCode.INTERNAL
        assert "cannot bear" not in refusal.everything()
    assert (await server.answer(**PLAIN)).text == (await neighbour).text
    assert server.log.reasons == ["length"] * 2, "who never entered has no receipt"


# --- F1, F2: clients that vanish --------------------------------------------------------------


async def test_a_line_that_is_cut_while_the_prompt_is_read_gives_the_blocks_back() -> None:
    """A prompt of many chunks would be computed to its end for nobody (B81)."""
    async with (
        serving(context_tokens=2000, blocks=256) as server,
        Proxy.before(server.server.port) as proxy,
    ):
        gate = server.gate()
        async with grpc.aio.insecure_channel(proxy.address) as channel:
            stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
            call = stub.Generate(request("a" * 1500, max_tokens=9))
            gate.let(3)
            assert (await call.read()).WhichOneof("event") == "accepted"
            await server.until(lambda: gate.arrived == 4)
            proxy.reset()
            await server.until(lambda: server.ends)
        ((sequence, _, plans),) = server.ends
        gate.let(2)
        await server.until(lambda: server.log.reasons)
        assert server.core.receipts[sequence] <= plans + 2
        (line,) = server.log.of("request_finished")
        assert line["output_tokens"] == 0
        await server.require_all_free()


class Silent(Proxy):
    """A line on which, from some time on, nothing comes through and nothing is said."""

    def fall_silent(self) -> None:
        for writer in self._writers:
            transport: Any = writer.transport
            if not transport.is_closing():
                transport.pause_reading()
                writer.write = lambda data: None  # type: ignore[method-assign]


async def test_a_client_that_falls_silent_is_noticed() -> None:
    """A machine without power would hold its blocks until its whole answer is computed."""
    async with (
        serving(keepalive=Keepalive(ask=1, answer=1)) as server,
        Silent.before(server.server.port) as proxy,
    ):
        gate = server.gate()
        async with grpc.aio.insecure_channel(proxy.address) as channel:
            stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
            call = stub.Generate(request("a", max_tokens=200, ignore_eos=True))
            gate.let(1)
            await call.read()
            await call.read()
            proxy.fall_silent()  # type: ignore[attr-defined]
            silent_since = time.monotonic()
            await server.until(lambda: server.ends)
            assert time.monotonic() - silent_since < 10, "asked after 1 s, closed 1 s later"
        gate.open()
        await server.until(lambda: server.log.reasons)
        assert server.log.reasons == ["cancelled"]
        await server.require_all_free()


# --- F4: a pool that is full for long ---------------------------------------------------------


async def test_a_pool_that_stays_full_keeps_nobody_for_ever() -> None:
    """Whoever waits would wait without an answer, or be forgotten when there is room again."""
    async with serving(blocks=33, context_tokens=260) as server:
        gate = server.gate()
        full = asyncio.create_task(server.answer(text="a" * 250, max_tokens=9))
        gate.let(9)
        await server.until(lambda: gate.arrived == 10)
        patient = [asyncio.create_task(server.answer(text="k" * 100)) for _ in range(6)]
        await server.until(lambda: len(server.server._admission.open_requests) == 7)
        for _ in range(3):
            refusal = await server.refusal(text="k" * 100, seconds_to_wait=0.05)
            assert refusal.code == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert refusal.reason == "QUEUE_TIMEOUT"
            assert refusal.retry_seconds > 0
        gate.open()
        assert (await full).text == expected("a", 9)
        assert {answer.text for answer in await asyncio.gather(*patient)} == {expected("k", 4)}
        await server.require_all_free()


# --- F12: a model file that changes under the server ------------------------------------------


@pytest.fixture(params=["gguf", "folder"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "gguf":
        yield write_gguf(tmp_path / "tiny.gguf")
    else:
        yield save_folder(tmp_path / "tiny", hub_model(HubShape("llama")))


def damage(model: Path, fault: str) -> None:
    """Does something to every file of a model."""
    for path in [model] if model.is_file() else [*model.iterdir()]:
        if fault == "cut":
            os.truncate(path, 10)
        elif fault == "overwritten":
            with path.open("r+b") as file:
                file.write(b"\xff" * path.stat().st_size)
        else:
            path.unlink()


@pytest.mark.parametrize("fault", ["cut", "overwritten", "removed"])
async def test_a_model_file_that_changes_changes_nothing(model: Path, fault: str) -> None:
    """A server that reads through a mapping would die of SIGBUS, or serve somebody else's bytes."""
    async with running_server(TinyServer(model, "--kv-blocks", "64")) as server:
        before = (await server.answer(**PLAIN)).text
        damage(model, fault)
        for _ in range(3):
            assert (await server.answer(**PLAIN)).text == before
        assert (await server.answer(**LONG)).reason == "LENGTH"


# --- F14: very many streams ---------------------------------------------------------------------


async def test_very_many_streams_on_one_connection_all_end(tiny: Path) -> None:
    """A gateway's one connection would make the server forget some of its calls, or fall."""
    arguments = ("--kv-blocks", "64", "--threads", "1", "--max-queued", "200")
    async with running_server(TinyServer(tiny, *arguments)) as server:
        codes: dict[str, int] = {}

        async def one() -> None:
            call = server.generation.Generate(request("a", max_tokens=1))
            try:
                async for _ in call:
                    pass
            except grpc.aio.AioRpcError:
                pass
            name = (await call.code()).name
            codes[name] = codes.get(name, 0) + 1

        await asyncio.gather(*(one() for _ in range(600)))
        assert sum(codes.values()) == 600
        assert set(codes) <= {"OK", "RESOURCE_EXHAUSTED"}
        assert codes["OK"] >= 200
        await until(lambda: not server.server._admission.open_requests)
        assert len(server.log.reasons) == codes["OK"]
        await server.require_all_free()
