"""kvledger itself as an arm: `kvledger serve --dev` as a process of its own, over gRPC."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Sequence

import grpc

from bench.arms.arm import Arm, ArmSettings, NotRun
from bench.arms.process import ServerProcess, on_cores
from bench.load import CallFailed
from kvledger.v1 import generation_pb2, generation_pb2_grpc, models_pb2, models_pb2_grpc

# Seconds that loading a model may take.
_PATIENCE = 300.0


def generate_request(
    prompt: Sequence[int], output: int, ignore_eos: bool = True
) -> generation_pb2.GenerateRequest:
    """Asks for a greedy answer to token ids, as token ids."""
    return generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=prompt),
        stop=generation_pb2.StopOptions(max_tokens=output, ignore_eos=ignore_eos),
        output=generation_pb2.OutputOptions(token_ids=True),
    )


class KvledgerClient:
    """Streams tokens from a kvledger server; one connection for all calls."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = grpc.aio.insecure_channel(address, options=(("grpc.enable_retries", 0),))
        self._generation = generation_pb2_grpc.GenerationServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._models = models_pb2_grpc.ModelServiceStub(self._channel)  # type: ignore[no-untyped-call]

    async def model(self) -> models_pb2.Model:
        """The server's model. Raises CallFailed."""
        try:
            answer = await self._models.GetModel(models_pb2.GetModelRequest(), timeout=30)
        except grpc.aio.AioRpcError as error:
            raise CallFailed(error.code().name, error.details() or "") from None
        model: models_pb2.Model = answer.model
        return model

    async def chat_ids(self, question: str) -> list[int]:
        """A question as the model's chat template and tokenizer put it."""
        message = generation_pb2.ChatMessage(role=generation_pb2.ROLE_USER, content=question)
        prompt = generation_pb2.ChatPrompt(messages=[message])
        answer = await self._models.Tokenize(models_pb2.TokenizeRequest(chat=prompt), timeout=30)
        return list(answer.token_ids)

    async def text(self, ids: Sequence[int]) -> str:
        """The text that token ids stand for."""
        request = models_pb2.DetokenizeRequest(token_ids=ids)
        return str((await self._models.Detokenize(request, timeout=30)).text)

    async def stream(
        self, prompt: Sequence[int], output: int, ignore_eos: bool = True
    ) -> AsyncIterator[Sequence[int]]:
        """Token ids of a greedy answer as they come. Raises CallFailed."""
        request = generate_request(prompt, output, ignore_eos)
        try:
            async for response in self._generation.Generate(request):
                if response.HasField("delta"):
                    yield response.delta.token_ids
        except grpc.aio.AioRpcError as error:
            raise CallFailed(error.code().name, error.details() or "") from None

    async def close(self) -> None:
        """Ends the connection."""
        await self._channel.close()


class Kvledger(Arm):
    """The shipped defaults, with the threads, room and processors that all arms get."""

    name = "kvledger"
    extra: tuple[str, ...] = ()

    def __init__(self, settings: ArmSettings, extra: Sequence[str] = (), port: int = 0) -> None:
        """`extra` are further options; `port` 0 is one that is free at each start."""
        super().__init__(settings)
        self._listen = f"127.0.0.1:{port}"
        self._extra = [*self.extra, *extra]
        self._process: ServerProcess | None = None
        self._client: KvledgerClient | None = None

    @property
    def _arguments(self) -> list[str]:
        return [
            *("serve", "--dev", "--listen", self._listen, "--model", str(self.settings.model)),
            *("--threads", str(self.settings.threads), *self._extra),
        ]

    @property
    def described(self) -> str:
        """Its command line, without the path of the model."""
        shown = [self.settings.model.name if "/" in a else a for a in self._arguments]
        return shlex.join(["kvledger", *shown])

    @property
    def client(self) -> KvledgerClient:
        """The connection, once started."""
        assert self._client is not None
        return self._client

    async def start(self) -> None:
        """Starts the server and waits until it says where it listens."""
        command = [sys.executable, "-m", "kvledger", *self._arguments, "--log-format", "json"]
        unset = {name: None for name in os.environ if name.startswith("KVLEDGER_")}
        self._process = ServerProcess(on_cores(command, self.settings.cores), unset)
        for _ in range(int(_PATIENCE / 0.05)):
            self._process.check_alive()
            for line in self._process.said().splitlines():
                if line.startswith("{") and (event := json.loads(line))["event"] == "serving":
                    self._client = KvledgerClient(event["listen"])
                    return
            await asyncio.sleep(0.05)
        raise NotRun(f"not ready after {_PATIENCE:.0f} s: {self._process.last_words()}")

    def stream(
        self, prompt: Sequence[int], output: int, ignore_eos: bool = True
    ) -> AsyncIterator[Sequence[int]]:
        """Token ids of a greedy answer as they come. Raises CallFailed."""
        return self.client.stream(prompt, output, ignore_eos)

    @property
    def group(self) -> int:
        """The id of its process group, once started."""
        assert self._process is not None
        return self._process.process.pid

    async def drain(self, patience: float) -> int | None:
        """Asks the server to end and lets it finish; its exit status, None after `patience` s.

        `start` begins another one afterwards.
        """
        assert self._process is not None
        process = self._process.process
        process.send_signal(signal.SIGTERM)
        for _ in range(int(patience / 0.01)):
            if process.poll() is not None:
                break
            await asyncio.sleep(0.01)
        status = process.returncode
        await self.stop()
        self._client = self._process = None
        return status

    async def stop(self) -> None:
        """Ends the connection and the server."""
        if self._client is not None:
            await self._client.close()
        if self._process is not None:
            await self._process.stop()


class KvledgerBf16(Kvledger):
    """The same with weights in bf16, which is what vLLM's CPU build computes with."""

    name = "kvledger-bf16"
    extra = ("--weights", "bf16")
