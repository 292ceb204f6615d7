"""A program in a terminal of the test's own, and what stands on its screen."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyte
from scripted_model import PATIENCE

# What a terminal gets when it is taken, and given back: another screen; this one, and its cursor.
TAKES, LEAVES, SHOWS_CURSOR = b"\x1b[?1049h", b"\x1b[?1049l", b"\x1b[?25h"
_IN_TERMINAL = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
_PYTHON = (sys.executable, "-c")
KVLEDGER = (*_PYTHON, f"{_IN_TERMINAL}from kvledger.cli import main; sys.exit(main())")
# The arguments that follow are the command.
ANY = (*_PYTHON, f"{_IN_TERMINAL}os.execvp(sys.argv[1], sys.argv[1:])")


class ScreenProgram:
    """A program that runs in a pseudo terminal. Its screen may be read by any thread."""

    def __init__(
        self, command: Sequence[str], columns: int, lines: int, env: dict[str, str]
    ) -> None:
        self.screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self.screen)
        self._lock = threading.Lock()
        self.output = b""
        self._ours, self.terminal = pty.openpty()
        self._set_size(columns, lines)
        self.before = termios.tcgetattr(self.terminal)
        kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME")}
        self.process = subprocess.Popen(
            command,
            stdin=self.terminal,
            stdout=self.terminal,
            stderr=self.terminal,
            start_new_session=True,
            env={**kept, "TERM": "xterm-256color", "PYTHONUTF8": "1", **env},
        )
        self._is_over = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _set_size(self, columns: int, lines: int) -> None:
        size = struct.pack("HHHH", lines, columns, 0, 0)
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, size)

    def _read(self) -> None:
        while not self._is_over or select.select([self._ours], [], [], 0)[0]:
            if select.select([self._ours], [], [], 0.02)[0]:
                data = os.read(self._ours, 65536)
                with self._lock:
                    self.output += data
                    self._stream.feed(data)

    @property
    def lines(self) -> list[str]:
        """What stands on the screen."""
        with self._lock:
            return [line.rstrip() for line in self.screen.display]

    @property
    def text(self) -> str:
        """The same as one text."""
        return "\n".join(self.lines)

    def resize(self, columns: int, lines: int) -> None:
        """Makes the terminal larger or smaller."""
        with self._lock:
            self.screen.resize(lines, columns)
        self._set_size(columns, lines)

    def press(self, keys: str) -> None:
        """Types."""
        os.write(self._ours, keys.encode())

    async def until(self, condition: Callable[[str], Any]) -> str:
        """Waits until something stands on the screen; returns all of it."""
        deadline = time.monotonic() + PATIENCE
        while not condition(text := self.text):
            assert time.monotonic() < deadline, f"it did not come:\n{text}"
            await asyncio.sleep(0.02)
        return text

    def attributes(self) -> list[Any]:
        """Of the terminal: whether lines are edited, keys echoed, and so on."""
        return termios.tcgetattr(self.terminal)

    async def end(self) -> int:
        """Waits for its end; its exit status, or minus the signal that ended it."""
        deadline = time.monotonic() + PATIENCE
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"it does not end:\n{self.text}"
            await asyncio.sleep(0.02)
        self._is_over = True
        await asyncio.to_thread(self._reader.join)
        assert self.process.returncode is not None
        return self.process.returncode

    @property
    def is_given_back(self) -> bool:
        """Whether the terminal is as it was before the program took it."""
        output = self.output
        left, shown = output.rfind(LEAVES), output.rfind(SHOWS_CURSOR)
        return (
            left > output.rfind(TAKES) >= 0
            and shown > output.rfind(b"\x1b[?25l")
            and self.attributes() == self.before
        )

    def close(self) -> None:
        """Ends it, if it still runs."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._is_over = True
        self._reader.join()
        os.close(self._ours)
        os.close(self.terminal)


@contextlib.contextmanager
def in_terminal(
    *command: str, columns: int = 80, lines: int = 24, **env: str
) -> Iterator[ScreenProgram]:
    """A command line in a terminal; `env` besides what every program needs."""
    program = ScreenProgram(command, columns, lines, env)
    try:
        yield program
    finally:
        program.close()
