"""The terminal: shows pictures on a screen of their own, tells keys, is left as it was found.

However the program ends: by a key, a signal or an exception. A stop (Ctrl-Z) gives the terminal
back too, and takes it again when the program goes on.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

# What arrow keys send, as the keys that do the same.
_ARROWS = {b"\x1b[A": "k", b"\x1b[B": "j", b"\x1bOA": "k", b"\x1bOB": "j"}
# Signals that end the program, once the terminal is as it was.
_ENDINGS = (signal.SIGTERM, signal.SIGHUP)
_CHUNK = 1024


class Ended(Exception):
    """A signal asks the program to end; `number` is that signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = number


class Terminal:
    """The terminal of standard output, and of standard input where that is one."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, markup=False, emoji=False)
        self._keys = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        self._before: list[Any] | None = None  # of termios
        self._live: Live | None = None
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._signals: set[int] = set()

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines."""
        return self._console.size.width, self._console.size.height

    @property
    def encoding(self) -> str:
        """Of what is written to it."""
        return self._console.encoding

    def wake(self) -> None:
        """Ends `wait`; any thread may call it."""
        with contextlib.suppress(OSError):  # full is as good as written; closed: nobody waits
            os.write(self._write, b".")

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """The terminal is ours meanwhile."""
        numbers = (*_ENDINGS, signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH)
        before = {number: signal.signal(number, self._note) for number in numbers}
        try:
            self._take()
            yield
        finally:
            self._give_back()
            for number, handler in before.items():
                signal.signal(number, handler)

    def show(self, lines: Sequence[Text]) -> None:
        """Shows a picture in place of the last one."""
        if self._live is not None:
            self._live.update(Group(*lines), refresh=True)

    def wait(self, seconds: float) -> list[str]:
        """Keys that were pressed, after `wake`, a signal, or so many seconds at the latest.

        Raises Ended where a signal asks for it, or the terminal is gone.
        """
        watched = [self._read] + ([self._keys] if self._keys is not None else [])
        ready, _, _ = select.select(watched, [], [], seconds)
        if self._read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._read, _CHUNK)
        self._act_on_signals()
        return self._pressed() if self._keys in ready else []

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Notes a signal; what it asks for is done in `wait`, where nothing is half drawn."""
        del frame
        self._signals.add(number)
        self.wake()

    def _act_on_signals(self) -> None:
        signals, self._signals = self._signals, set()
        for number in _ENDINGS:
            if number in signals:
                raise Ended(number)
        if signal.SIGTSTP in signals:
            self._stop()
        elif signal.SIGCONT in signals:  # it was stopped by something that nobody can note
            self._give_back()
            self._take()

    def _stop(self) -> None:
        self._give_back()
        noted = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)  # until somebody lets it go on
        signal.signal(signal.SIGTSTP, noted)
        self._signals.discard(signal.SIGCONT)
        self._take()

    def _pressed(self) -> list[str]:
        assert self._keys is not None
        try:
            data = os.read(self._keys, _CHUNK)
        except OSError:
            data = b""
        if not data:
            raise Ended(signal.SIGHUP)
        for sequence, key in _ARROWS.items():
            data = data.replace(sequence, key.encode())
        # What begins with an escape otherwise is no key of ours, and neither is what follows it.
        return [chr(byte) for byte in data.partition(b"\x1b")[0] if 0x20 <= byte < 0x7F]

    def _take(self) -> None:
        if self._keys is not None:
            self._before = termios.tcgetattr(self._keys)
            tty.setcbreak(self._keys)
        self._live = Live(
            console=self._console,
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def _give_back(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            # The terminal may be gone: then there is nothing to give back.
            with contextlib.suppress(OSError):
                live.stop()
        if self._before is not None and self._keys is not None:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self._keys, termios.TCSADRAIN, self._before)
            self._before = None


def run(
    terminal: Terminal,
    draw: Callable[[int, int], Sequence[Text]],
    press: Callable[[str], bool],
    has_ended: Callable[[], bool],
    seconds: float,
) -> None:
    """Draws and tells keys until `press` or `has_ended`, which is asked before each picture,
    returns True; draws again after `seconds` at the latest."""
    with terminal.taken():
        while not has_ended():
            terminal.show(draw(*terminal.size))
            for key in terminal.wait(seconds):
                if press(key):
                    return
