"""OpenVINO GenAI's continuous batching pipeline, with the model exported to int8.

It has no server in a package of its own, so a small program of ours (openvino_worker.py) drives the
pipeline in the peer's environment and passes tokens through pipes, which costs it less than HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from bench.arms.arm import Arm, ArmSettings, NotRun, Say
from bench.arms.process import ServerProcess, make_environment, on_cores, run_step
from bench.arms.vllm import make_hf_folder
from bench.load import CallFailed

PACKAGES = (
    "openvino==2026.4.1",
    "openvino-genai==2026.4.1.0",
    "openvino-tokenizers==2026.4.1.0",
    "optimum-intel[openvino]==2.2.0",
    "torch==2.13.0+cpu",
)
_PATIENCE = 300.0


class OpenVino(Arm):
    """The pipeline in a process of its own."""

    name = "openvino"

    def __init__(self, settings: ArmSettings) -> None:
        super().__init__(settings)
        self._process: ServerProcess | None = None
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Queue[dict[str, Any]]] = {}
        self._ready = asyncio.Event()

    @classmethod
    def set_up(cls, settings: ArmSettings, say: Say) -> None:
        """Installs about 2 GB into an environment of its own; converts and exports the model."""
        settings.cache.mkdir(parents=True, exist_ok=True)
        log = settings.cache / "openvino.log"
        folder = settings.cache / "openvino"
        make_environment(folder, PACKAGES, log, say)
        make_hf_folder(settings, say)
        exported = settings.cache / "openvino-int8"
        if not (exported / "openvino_model.bin").exists():
            command = [str(folder / "bin" / "optimum-cli"), "export", "openvino"]
            command += ["--model", str(settings.cache / "hf"), "--weight-format", "int8"]
            command += ["--task", "text-generation-with-past", str(exported)]
            run_step(command, log, say, {"HF_HUB_OFFLINE": "1"})

    @property
    def _pipeline(self) -> dict[str, int]:
        return {
            "threads": self.settings.threads,
            "cache_gigabytes": 1,
            "sequences": self.settings.sequences,
        }

    @property
    def described(self) -> str:
        """The settings of its pipeline."""
        pipeline = ", ".join(f"{name} {value}" for name, value in self._pipeline.items())
        return f"ContinuousBatchingPipeline of {PACKAGES[1]}, int8 weights: {pipeline}"

    async def start(self) -> None:
        """Starts the worker and waits until its pipeline is there."""
        python = self.settings.cache / "openvino" / "bin" / "python"
        folder = self.settings.cache / "openvino-int8"
        if not (folder / "openvino_model.bin").exists():
            raise NotRun("not set up; python -m bench.peers setup openvino does it")
        worker = Path(__file__).with_name("openvino_worker.py")
        # Isolated: this folder has a module named openvino too.
        command = [str(python), "-I", str(worker), str(folder), json.dumps(self._pipeline)]
        self._process = ServerProcess(
            on_cores(command, self.settings.cores), {"PYTHONPATH": None}, pipes=True
        )
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, args=(loop,), daemon=True).start()
        for _ in range(int(_PATIENCE / 0.1)):
            self._process.check_alive()
            if self._ready.is_set():
                return
            await asyncio.sleep(0.1)
        raise NotRun(f"not ready after {_PATIENCE:.0f} s: {self._process.last_words()}")

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        assert self._process is not None
        assert self._process.process.stdout is not None
        for line in self._process.process.stdout:
            if line.startswith(b"{"):  # libraries may print what they like
                loop.call_soon_threadsafe(self._deliver, json.loads(line))
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._deliver, {"closed": True})

    def _deliver(self, event: dict[str, Any]) -> None:
        if "ready" in event:
            self._ready.set()
        elif "closed" in event:
            for queue in self._answers.values():
                queue.put_nowait({"error": "the worker has ended"})
        elif event["id"] in self._answers:
            self._answers[event["id"]].put_nowait(event)

    def _tell(self, **message: Any) -> None:
        assert self._process is not None
        assert self._process.process.stdin is not None
        try:
            self._process.process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.process.stdin.flush()
        except OSError as error:
            raise CallFailed("UNREACHABLE", str(error)) from None

    async def stream(
        self, prompt: Sequence[int], output: int, ignore_eos: bool = True
    ) -> AsyncIterator[Sequence[int]]:
        """Token ids of a greedy answer as they come. Raises CallFailed."""
        number = next(self._numbers)
        queue = self._answers[number] = asyncio.Queue()
        ended = False
        try:
            self._tell(id=number, prompt=list(prompt), output=output, ignore_eos=ignore_eos)
            while not ended:
                event = await queue.get()
                ended = "tokens" not in event
                if "error" in event:
                    raise CallFailed("PIPELINE ERROR", event["error"])
                if not ended:
                    yield event["tokens"]
        finally:
            del self._answers[number]
            if not ended:
                self._tell(cancel=number)

    @property
    def group(self) -> int:
        """The id of its process group, once started."""
        assert self._process is not None
        return self._process.process.pid

    async def stop(self) -> None:
        """Ends the worker."""
        if self._process is not None:
            await self._process.stop()
