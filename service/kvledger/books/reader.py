"""Snapshots of the books for the event loop, as many as are good for the engine.

Who asks while a snapshot is still to be taken shares it, and there are at most twenty a second: no
number of callers keeps the engine from its steps. Who asks gets what is so after the call, never
something older.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future

from kvledger import _core
from kvledger.books.snapshot import Snapshot
from kvledger.errors import BooksUnavailable

# From one snapshot to the next, at least, in seconds; and for each account in it, so that where
# there are many thousands the engine still spends a hundredth of its time on them at most.
_INTERVAL = 0.05
_INTERVAL_OF_ACCOUNT = 20e-6


class BooksReader:
    """Belongs to the event loop's thread."""

    def __init__(
        self,
        ask: Callable[[], Future[_core.Books]],
        silence: Callable[[], float],
        patience: float,
    ) -> None:
        """`ask` is a desk's, `silence` the seconds since its engine last made progress.

        Callers wait as long as a step takes, but for an engine that is silent for `patience`
        seconds no longer.
        """
        self._ask = ask
        self._silence = silence
        self._patience = patience
        self._next: asyncio.Task[Snapshot] | None = None
        self._asked: Future[_core.Books] | None = None  # by that one
        self._due = 0.0

    async def read(self) -> Snapshot:
        """The books at a time after this call.

        Raises BooksUnavailable if the engine has ended, or hangs.
        """
        if self._next is None or self._next.done() or self._is_taken():
            self._asked = None
            self._next = asyncio.ensure_future(self._take())
            self._next.add_done_callback(_looked_at)
        snapshot = self._next
        while not snapshot.done():
            await asyncio.wait((snapshot,), timeout=self._patience)
            if not snapshot.done() and (silence := self._silence()) >= self._patience:
                raise BooksUnavailable(f"it has made no progress for {silence:.1f} s")
        return snapshot.result()

    def _is_taken(self) -> bool:
        """Whether the engine has begun to read what was asked for, so that it may be too old."""
        return self._asked is not None and (self._asked.running() or self._asked.done())

    async def _take(self) -> Snapshot:
        now = asyncio.get_running_loop().time
        if (wait := self._due - now()) > 0:
            await asyncio.sleep(wait)
        asked = self._asked = self._ask()
        self._due = now() + _INTERVAL
        snapshot = Snapshot(await asyncio.wrap_future(asked))
        self._due = max(self._due, now() + _INTERVAL_OF_ACCOUNT * len(snapshot))
        return snapshot


def _looked_at(task: asyncio.Task[Snapshot]) -> None:
    """Those who waited may all have gone: then nobody else asks for the exception."""
    if not task.cancelled():
        task.exception()
