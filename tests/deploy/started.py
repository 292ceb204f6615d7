"""`kvledger` as a process of its own over a tiny model, started with a command line from a file."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PROTOSET = ROOT / "service/kvledger/v1/kvledger.protoset"
# How long anything may take on a slow machine, in seconds.
PATIENCE = 60.0


def environment() -> dict[str, str]:
    """What a read-only container offers: no home, and nowhere for temporary files."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVLEDGER_")}
    nowhere = dict.fromkeys(("HOME", "TMPDIR", "XDG_CACHE_HOME"), "/nonexistent")
    return {**kept, **nowhere, "PYTHONDONTWRITEBYTECODE": "1"}


def kvledger(*arguments: str) -> list[str]:
    """The command line of a kvledger command, for this interpreter."""
    return [sys.executable, "-m", "kvledger", *arguments]


def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """A command that ends by itself, and what it printed."""
    return subprocess.run(
        command,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


class Started:
    """A server that serves."""

    def __init__(self, process: subprocess.Popen[str], address: str, lines: list[str]) -> None:
        self.process = process
        self.address = address
        self.lines = lines

    @property
    def events(self) -> list[dict[str, Any]]:
        """The lines of its log so far."""
        return [json.loads(line) for line in self.lines if line.startswith("{")]


@contextlib.contextmanager
def started(arguments: Sequence[str]) -> Iterator[Started]:
    """Runs kvledger with these arguments, whose log must be JSON, until the block ends."""
    process = subprocess.Popen(
        kvledger(*arguments),
        env=environment(),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert process.stderr is not None
    lines: list[str] = []
    addresses: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in process.stderr or ():
            lines.append(line)
            if line.startswith("{") and json.loads(line)["event"] == "serving":
                addresses.put(json.loads(line)["listen"])
        addresses.put(None)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        address = addresses.get(timeout=PATIENCE)
        assert address is not None, "".join(lines)
        yield Started(process, address, lines)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(PATIENCE)
        reader.join(PATIENCE)
        process.stderr.close()
