"""A server as a process of its own on fixed processors, and the commands that set servers up."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.arms.arm import NotRun, Say

# Seconds until a server that was asked to end is ended.
_LAST_WORDS = 10.0


def run_main(program: Coroutine[Any, Any, int]) -> int:
    """Runs a program to its end; a signal that ends it lets it end its servers first."""

    async def guarded() -> int:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await program

    try:
        return asyncio.run(guarded())
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def on_cores(command: Sequence[str], cores: Sequence[int]) -> list[str]:
    """The command, kept to some processors with taskset."""
    if shutil.which("taskset") is None:
        raise NotRun("taskset is missing; it comes with the package util-linux")
    return ["taskset", "--cpu-list", ",".join(map(str, cores)), *command]


class ServerProcess:
    """A process in its own group, with what it says in a file. None unsets a variable."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str | None] | None = None,
        pipes: bool = False,
    ) -> None:
        changed = {**os.environ, **(environment or {})}
        self.log = Path(tempfile.mkstemp(prefix="kvledger-bench-", suffix=".log")[1])
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                list(command),
                env={name: value for name, value in changed.items() if value is not None},
                stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipes else log,
                stderr=log,
                start_new_session=True,
            )

    def said(self) -> str:
        """All that it has said so far."""
        return self.log.read_text("utf-8", "replace")

    def last_words(self) -> str:
        """The end of what it said, in one line."""
        lines = [line.strip() for line in self.said().splitlines() if line.strip()]
        return " | ".join(lines[-3:])[-400:]

    def check_alive(self) -> None:
        """Raises NotRun if it has ended."""
        status = self.process.poll()
        if status is not None:
            raise NotRun(f"it ended with status {status}: {self.last_words()}")

    async def stop(self) -> None:
        """Asks it to end, then ends it and all that it started."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            for _ in range(int(_LAST_WORDS / 0.05)):
                if self.process.poll() is not None:
                    break
                await asyncio.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):  # nobody of the group is left
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.log.unlink(missing_ok=True)


def run_step(
    command: Sequence[str], log: Path, say: Say, environment: Mapping[str, str] | None = None
) -> None:
    """One command of a set-up, at low priority; raises NotRun with the end of what it said."""
    say("  $ " + " ".join(map(str, command)))
    with log.open("ab") as file:
        result = subprocess.run(
            ["nice", "-n", "10", *command],
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if result.returncode != 0:
        lines = log.read_text("utf-8", "replace").splitlines()
        shown = [line.strip() for line in lines if line.strip() and "WARNING" not in line]
        raise NotRun(
            f"{Path(command[0]).name} ended with status {result.returncode}: "
            + " | ".join(shown[-3:])[-400:]
        )


def make_environment(folder: Path, packages: Sequence[str], log: Path, say: Say) -> Path:
    """A virtual environment with some packages; returns its Python. Raises NotRun."""
    python = folder / "bin" / "python"
    if not python.exists():
        run_step([sys.executable, "-m", "venv", str(folder)], log, say)
    run_step([str(python), "-m", "pip", "install", "--quiet", *packages], log, say)
    # Wheels of these come with CUDA in them, do not load beside a torch without it, and what wants
    # them for pictures and sound makes no use of them for text.
    others = ["torchvision", "torchaudio", "torchcodec"]
    run_step([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *others], log, say)
    return python
