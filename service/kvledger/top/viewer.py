"""What the operator looks at: what came last, some of what came before, and what keys changed."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from kvledger.top.blocks import Letters
from kvledger.top.picture import Books, Frame, Load
from kvledger.top.table import SORTS

# Rates are over so many seconds, if that much is known: what changed in one would flicker.
_RATE_SECONDS = 10.0
_WATERLINES = 600
_PICTURES = 128


class Viewer:
    """Belongs to one thread. Times are time.monotonic()."""

    def __init__(self, server: str, now: float) -> None:
        self._server = server
        self._letters = Letters()
        self._given: Mapping[str, tuple[str, str]] = {}
        self._books: deque[Books] = deque(maxlen=_PICTURES)
        self._waterlines: deque[float] = deque(maxlen=_WATERLINES)
        self._load: Load | None = None
        self._came_at = now
        self._trouble = self._load_trouble = ""
        self._sort = 0
        self._first = 0
        self._paused: Frame | None = None
        self._paused_at = 0.0
        self._shows_help = False
        self.has_ended = False

    def show_books(self, books: Books, at: float) -> None:
        """New books came."""
        if self._books and books.elapsed <= self._books[-1].elapsed:
            self._books.clear()  # another server: nothing can be held against it
            self._waterlines.clear()
            self._letters = Letters()
            self._load = None
        self._books.append(books)
        while len(self._books) > 2 and books.elapsed - self._books[1].elapsed >= _RATE_SECONDS:
            self._books.popleft()
        self._waterlines.append(books.waterline)
        self._given = self._letters.give(books.owners)
        self._came_at = at
        self._trouble = ""

    def show_load(self, load: Load) -> None:
        """A new diagnosis came."""
        self._load, self._load_trouble = load, ""

    def show_load_trouble(self, why: str) -> None:
        """There is no new diagnosis."""
        self._load_trouble = why

    def show_trouble(self, why: str) -> None:
        """Nothing comes any more, until books do."""
        self._trouble = why

    def press(self, key: str, now: float) -> None:
        """A key was pressed."""
        if key == "q":
            self.has_ended = True
        elif key == "s":
            self._sort = (self._sort + 1) % len(SORTS)
        elif key in ("?", "h"):
            self._shows_help = not self._shows_help
        elif key == "p":
            if self._paused is None:
                self._paused, self._paused_at = self.frame(now), now
            else:
                self._paused = None
        elif key in ("j", "k"):
            rows = len(self._books[-1].owners) if self._books else 0
            self._first = min(max(0, self._first + (1 if key == "j" else -1)), max(0, rows - 1))

    def frame(self, now: float) -> Frame:
        """All that is to be shown now."""
        kept = self._paused
        if kept is None:
            kept = Frame(
                server=self._server,
                books=self._books[-1] if self._books else None,
                earlier=self._books[0] if len(self._books) > 1 else None,
                load=self._load,
                age=max(0.0, now - self._came_at),
                trouble=self._trouble,
                load_trouble=self._load_trouble,
                waterlines=tuple(self._waterlines),
                letters=self._given,
            )
        age = kept.age + (now - self._paused_at if self._paused is not None else 0.0)
        return Frame(
            **{
                **vars(kept),
                "age": age,
                "trouble": self._trouble,  # also while the picture stands still
                "sort": SORTS[self._sort],
                "first": self._first,
                "is_paused": self._paused is not None,
                "shows_help": self._shows_help,
            }
        )
