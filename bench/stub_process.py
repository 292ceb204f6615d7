"""A server of bench.stub_server, as a process of its own on one processor."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.arms.arm import NotRun
from bench.arms.process import ServerProcess, on_cores

# Seconds that starting may take; a fingerprint of weights is made meanwhile.
_PATIENCE = 60.0


class StubProcess:
    """Use: start, call at `address`, stop."""

    def __init__(self, arguments: Sequence[str], core: int) -> None:
        self._command = on_cores([sys.executable, "-m", "bench.stub_server", *arguments], [core])
        self._process: ServerProcess | None = None
        self.address = ""

    @property
    def _running(self) -> ServerProcess:
        assert self._process is not None
        return self._process

    @property
    def group(self) -> int:
        """The id of its process, which is that of its group."""
        return self._running.process.pid

    @property
    def resident_bytes(self) -> int:
        """Memory of its own that it has now; not that of files, which the system may take back."""
        for line in Path(f"/proc/{self.group}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        raise NotRun("the system does not say how much memory the server has")

    def last_said(self, name: str) -> int | str | None:
        """What it said last under a name."""
        said: int | str | None = None
        for line in self._running.said().splitlines():
            if line.startswith("{"):
                said = json.loads(line).get(name, said)
        return said

    async def start(self) -> None:
        """Starts it and waits until it says where it listens. Raises NotRun."""
        self._process = ServerProcess(self._command)
        for _ in range(int(_PATIENCE / 0.05)):
            self._process.check_alive()
            if (address := self.last_said("listen")) is not None:
                self.address = str(address)
                return
            await asyncio.sleep(0.05)
        raise NotRun(f"not ready after {_PATIENCE:.0f} s: {self._process.last_words()}")

    async def stop(self) -> None:
        """Ends it, also if it was never started."""
        if self._process is not None:
            await self._process.stop()
