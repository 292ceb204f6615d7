"""`kvledger top`: a live view of a server, for who must see at once what is wrong."""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import sys
import time
from collections.abc import Callable, Sequence

import grpc
from rich.text import Text

from kvledger.address import operators_address
from kvledger.cli.client import (
    DEFAULT_SERVER,
    add_identity_arguments,
    add_server_arguments,
    be_lenient,
    identity,
)
from kvledger.cli.diagnose import seconds
from kvledger.cli.ledger import explained, interval
from kvledger.cli.top_source import Asked, Source
from kvledger.errors import SettingRefused
from kvledger.top import terminal, view
from kvledger.top.picture import Books, Frame, Load
from kvledger.top.viewer import Viewer
from kvledger.top.words import glyphs_for

# What is old gets older on the screen, in seconds.
_REDRAW = 1.0
# Columns of a picture that is no terminal's.
_COLUMNS = 100


def run(arguments: Sequence[str]) -> int:
    """Shows the server until the user has seen enough; 0, 1 if the server refuses or, with --once,
    does not answer, 2 for a wrong option."""
    options = _options(arguments)
    be_lenient()
    try:
        if options.once or not _is_screen():
            return _once(options)
        return _watch(options)
    except SettingRefused as error:
        print(f"kvledger top: {error}", file=sys.stderr)
        return 2
    except grpc.RpcError as error:
        print(f"kvledger top: {explained(error, options)}", file=sys.stderr)
        return 1


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="kvledger top",
        description="Shows who fills the KV memory of a server, what limits it, and whether that "
        "gets worse. Asks the operators' listener. Keys: q quits, s sorts, p pauses, ? explains.",
    )
    add_server_arguments(parser, operators_address(DEFAULT_SERVER))
    add_identity_arguments(parser)
    parser.add_argument(
        "--interval",
        type=interval,
        default=1.0,
        metavar="S",
        help="seconds from one picture to the next (%(default)g)",
    )
    parser.add_argument(
        "--over",
        type=seconds,
        default=30.0,
        metavar="S",
        help="seconds that rates and the diagnosis are of (%(default)g)",
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="print one picture as text and end; so it does where the output is no terminal",
    )
    return parser.parse_args(list(arguments))


def _is_screen() -> bool:
    """Whether pictures can take each other's place."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


def _source(
    options: argparse.Namespace,
    on_books: Callable[[Books], None] = lambda books: None,
    on_load: Callable[[Load | str], None] = lambda load: None,
    on_trouble: Callable[[str, bool], None] = lambda why, is_final: None,
) -> Source:
    asked = Asked(options.interval, options.over)
    return Source(options, identity(options), asked, on_books, on_load, on_trouble)


def _once(options: argparse.Namespace) -> int:
    viewer = Viewer(options.server, time.monotonic())
    books, load = _source(options).once()
    now = time.monotonic()
    viewer.show_books(books, now)
    viewer.show_load(load)
    width = shutil.get_terminal_size((_COLUMNS, 24)).columns
    glyphs = glyphs_for(sys.stdout.encoding)
    print(view.plain(view.render(viewer.frame(now), max(view.WIDTH_LEAST, width), None, glyphs)))
    return 0


class _Watch:
    """What the source's thread tells, taken over by the thread that draws."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._viewer = Viewer(options.server, time.monotonic())
        self._news: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.terminal = terminal.Terminal()
        self._glyphs = glyphs_for(self.terminal.encoding)
        self.refused = ""

    def on_books(self, books: Books) -> None:
        at = time.monotonic()
        self._tell(lambda: self._viewer.show_books(books, at))

    def on_load(self, load: Load | str) -> None:
        viewer = self._viewer
        if isinstance(load, str):
            self._tell(lambda: viewer.show_load_trouble(load))
        else:
            self._tell(lambda: viewer.show_load(load))

    def on_trouble(self, why: str, is_final: bool) -> None:
        if is_final:
            self._tell(lambda: self._refuse(why))
        else:
            self._tell(lambda: self._viewer.show_trouble(why))

    def draw(self, width: int, height: int) -> Sequence[Text]:
        return view.render(self._frame(), width, height, self._glyphs)

    def press(self, key: str) -> bool:
        self._viewer.press(key, time.monotonic())
        return self._viewer.has_ended

    def has_ended(self) -> bool:
        """Takes over what was told; whether it is time to end."""
        while not self._news.empty():
            self._news.get()()
        return bool(self.refused)

    def _frame(self) -> Frame:
        return self._viewer.frame(time.monotonic())

    def _refuse(self, why: str) -> None:
        self.refused = why

    def _tell(self, change: Callable[[], None]) -> None:
        self._news.put(change)
        self.terminal.wake()


def _watch(options: argparse.Namespace) -> int:
    watch = _Watch(options)
    source = _source(options, watch.on_books, watch.on_load, watch.on_trouble)
    try:
        source.start()
        terminal.run(watch.terminal, watch.draw, watch.press, watch.has_ended, _REDRAW)
    except terminal.Ended as ended:
        return 128 + ended.number
    finally:
        source.close()
    if watch.refused:
        print(f"kvledger top: {watch.refused}", file=sys.stderr)
        return 1
    return 0
