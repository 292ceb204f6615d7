"""Where other threads ask the engine's thread for the books, and where it answers.

The core belongs to the engine's thread, so the books are read there, between two steps. While
nobody asks, that costs the loop one look.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import Protocol

from kvledger import _core
from kvledger.errors import BooksUnavailable


class BookKeeper(Protocol):
    """What the engine's thread reads the books from: its core."""

    def books(self, now: int) -> _core.Books:
        """The books at a time of time.monotonic_ns()."""


class BooksDesk:
    """The desk of one engine."""

    def __init__(self, wakeup: threading.Condition) -> None:
        """`wakeup` is what the engine's thread waits on when it has nothing to do."""
        self._wakeup = wakeup
        # One whole object at any time, so it can be looked at without the lock.
        self.asked: list[Future[_core.Books]] = []
        self._is_closed = False

    def ask(self) -> Future[_core.Books]:
        """The books at a time after this call, once the engine has got to it. Any thread.

        The future runs as soon as the engine reads them. It fails with BooksUnavailable where no
        answer can come any more.
        """
        answer: Future[_core.Books] = Future()
        with self._wakeup:
            if self._is_closed:
                answer.set_exception(BooksUnavailable("its loop has ended"))
            else:
                self.asked = [*self.asked, answer]
                self._wakeup.notify()
        return answer

    def answer(self, keeper: BookKeeper) -> None:
        """Tells all who have asked. Only the engine's thread, between two steps."""
        with self._wakeup:
            asked, self.asked = self.asked, []
        waiting = [each for each in asked if each.set_running_or_notify_cancel()]
        if not waiting:
            return
        try:
            books = keeper.books(time.monotonic_ns())
        except Exception as error:  # such as no memory: nothing in the books has changed
            for each in waiting:
                each.set_exception(error)
            return
        for each in waiting:
            each.set_result(books)

    def close(self) -> None:
        """Nobody will answer any more."""
        with self._wakeup:
            self._is_closed = True
            asked, self.asked = self.asked, []
        for each in asked:
            if each.set_running_or_notify_cancel():
                each.set_exception(BooksUnavailable("its loop has ended"))
