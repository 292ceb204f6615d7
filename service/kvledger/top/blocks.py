"""The pool as a map: a cell for so many blocks, with a letter and a colour for whose they are.

In the order of the states: what is under the waterline by owner, then releasing, cached by owner,
and free. So the map fills from its beginning, and what is cached stands apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvledger.top.picture import Books, Owner

RELEASING, FREE = "~", "."
# Owners beyond the alphabet, together.
OTHERS, OTHERS_CACHED = "*", "+"
_ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_COLOURS = ("cyan", "yellow", "magenta", "green", "red", "blue")


class Letters:
    """Who has which letter and colour: owners keep theirs as long as there are enough."""

    def __init__(self) -> None:
        self._given: dict[str, tuple[str, str]] = {}
        self._count = 0

    def give(self, owners: Sequence[Owner]) -> Mapping[str, tuple[str, str]]:
        """Letter and colour by key, of those that have most."""
        most = [owner for owner in by_memory(owners) if owner.live or owner.cached]
        most = most[: len(_ALPHABET)]
        wanted = {owner.key for owner in most}
        for owner in most:
            if owner.key not in self._given:
                free = self._free(wanted)
                letter = _fitting(owner.name, free)
                for key in [k for k, (taken, _) in self._given.items() if taken == letter]:
                    del self._given[key]  # it has nothing any more, or too little
                self._given[owner.key] = letter, _COLOURS[self._count % len(_COLOURS)]
                self._count += 1
        return dict(self._given)

    def _free(self, wanted: Iterable[str]) -> str:
        """Letters that nobody has; if there are none, those of owners that are not wanted."""
        taken = {letter for letter, _ in self._given.values()}
        if free := "".join(letter for letter in _ALPHABET if letter not in taken):
            return free
        return "".join(letter for key, (letter, _) in self._given.items() if key not in set(wanted))


def _fitting(name: str, free: str) -> str:
    """A letter of the name if one is free."""
    return next((letter for letter in name.upper() if letter in free), free[0])


def by_memory(owners: Iterable[Owner]) -> list[Owner]:
    """Whoever has most first."""
    return sorted(owners, key=lambda owner: (-owner.live, -owner.cached, owner.key))


@dataclass(frozen=True)
class Cell:
    """What most of the blocks of one cell are."""

    mark: str
    colour: str  # empty where it is nobody's
    is_live: bool


def cells(
    books: Books, letters: Mapping[str, tuple[str, str]], room: int
) -> tuple[list[Cell], int]:
    """At most `room` cells, and how many blocks each stands for; the last may be of fewer."""
    each = max(1, -(-books.blocks // max(1, room)))
    runs = _runs(books, letters)
    out: list[Cell] = []
    place, left = 0, runs[0][1] if runs else 0
    for first in range(0, books.blocks, each):
        need = min(each, books.blocks - first)
        parts: dict[Cell, int] = {}
        while need and place < len(runs):
            part = min(need, left)
            parts[runs[place][0]] = parts.get(runs[place][0], 0) + part
            need, left = need - part, left - part
            if left == 0:
                place += 1
                left = runs[place][1] if place < len(runs) else 0
        if parts:
            out.append(max(parts, key=lambda cell: parts[cell]))
    return out, each


def _runs(books: Books, letters: Mapping[str, tuple[str, str]]) -> list[tuple[Cell, int]]:
    """Cells and how many blocks in a row are so."""
    runs: list[tuple[Cell, int]] = []
    owners = by_memory(books.owners)
    named = [owner for owner in owners if owner.key in letters]
    others = [owner for owner in owners if owner.key not in letters]
    for owner in named:
        letter, colour = letters[owner.key]
        runs.append((Cell(letter, colour, True), owner.live))
    runs.append((Cell(OTHERS, "white", True), sum(owner.live for owner in others)))
    runs.append((Cell(RELEASING, "", True), books.releasing))
    for owner in named:
        letter, colour = letters[owner.key]
        runs.append((Cell(letter.lower(), colour, False), owner.cached))
    runs.append((Cell(OTHERS_CACHED, "white", False), sum(owner.cached for owner in others)))
    runs.append((Cell(FREE, "", False), books.free))
    return [(cell, number) for cell, number in runs if number > 0]
