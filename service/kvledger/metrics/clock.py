"""The time that keeping books takes, so that it can be held against the time of steps.

It is processor time of the thread that does it: the clock on the wall would also count waiting for
the interpreter's lock, which the engine's thread has, and for other programs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

_Result = TypeVar("_Result")


class BooksClock:
    """Nanoseconds spent on books, by what for; any thread may add."""

    # Counting what receipts say, and keeping them for files and diagnosis, in the event loop;
    # answering who asks for metrics, in threads of the listener; showing the ledger to who asks.
    PARTS = ("receipts", "records", "scrapes", "looks")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nanoseconds = dict.fromkeys(self.PARTS, 0)

    def scraping(self) -> AbstractContextManager[None]:
        """Counts what is done inside as part of an answer."""
        return self.counting("scrapes")

    @contextmanager
    def counting(self, part: str) -> Iterator[None]:
        """Counts what is done inside as one of PARTS."""
        began = time.thread_time_ns()
        try:
            yield
        finally:
            self._add(part, time.thread_time_ns() - began)

    def counted(self, part: str, function: Callable[..., _Result]) -> Callable[..., _Result]:
        """The same function, whose time counts as one of PARTS."""

        def timed(*arguments: object) -> _Result:
            began = time.thread_time_ns()
            try:
                return function(*arguments)
            finally:
                self._add(part, time.thread_time_ns() - began)

        return timed

    def seconds(self) -> dict[str, float]:
        """Of each part so far."""
        with self._lock:
            return {part: spent / 1e9 for part, spent in self._nanoseconds.items()}

    def _add(self, part: str, nanoseconds: int) -> None:
        with self._lock:
            self._nanoseconds[part] += nanoseconds
