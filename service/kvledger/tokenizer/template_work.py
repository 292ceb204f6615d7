"""Counts what a chat template does, and ends it at a limit.

A chat template is a program from a model file that runs on contents from clients; either may be
hostile. Its work is counted in numbers that depend on the template and the messages alone, never
on the clock, so the same request is always rendered or always refused.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, KeysView, Sized, ValuesView
from dataclasses import dataclass

from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, LoopContext

# What one element of a container counts in characters: about what it costs to visit.
ELEMENT_CHARACTERS = 16

# Deeper values than this serve no template, and hashing or comparing them recurses in C.
NESTING_MAX = 32


# The meter travels among the template's variables under a name that no template can write.
METER_VARIABLE = "work meter"
# So does the character that keeps client text apart, or None; it must not be written as an escape.
SENTINEL_VARIABLE = "sentinel of client text"


class WorkLimitError(Exception):
    """The template passed a limit. The message completes "the template ..." and has no text of
    the template or the messages in it."""


class NotAllowedError(SecurityError):
    """The template did what no chat template needs. Completes "the template ..." likewise."""

    def __init__(self, what: str) -> None:
        super().__init__(f"uses {what}, which no chat template may")


@dataclass(frozen=True)
class WorkLimits:
    """The most that one rendering may do."""

    # Evaluated nodes of the template; a call counts for several.
    operations_max: int
    # Characters read or written by all operations together.
    characters_max: int
    output_characters_max: int
    # Macros and recursive loops inside one another.
    call_depth_max: int = 32


class OneShotIterator(Iterator[object]):
    """What a filter with a lazy result returns: can be walked once, like a generator, but what is
    left of it can be measured without walking it."""

    def __init__(self, elements: list[object]) -> None:
        # Backwards, so that taking the next one is a pop.
        self.remaining = elements[::-1]

    def __next__(self) -> object:
        if not self.remaining:
            raise StopIteration
        return self.remaining.pop()


class WorkMeter:
    """The work of one rendering so far. Every method raises WorkLimitError beyond the limits."""

    def __init__(self, limits: WorkLimits) -> None:
        self._limits = limits
        self._operations_left = limits.operations_max
        self._characters_left = limits.characters_max
        self._output_left = limits.output_characters_max
        self._call_depth = 0
        self._known_depths: dict[int, tuple[object, int]] = {}

    def operations(self, count: int) -> None:
        """Counts `count` evaluated nodes."""
        self._operations_left -= count
        if self._operations_left < 0:
            raise WorkLimitError(f"takes more than {self._limits.operations_max} operations")

    def characters(self, count: int) -> None:
        """Counts `count` characters, before they are read or written where that is possible."""
        self._characters_left -= count
        if self._characters_left < 0:
            raise WorkLimitError(f"handles more than {self._limits.characters_max} characters")

    def output(self, count: int) -> None:
        """Counts `count` characters of the rendered text."""
        self._output_left -= count
        if self._output_left < 0:
            raise WorkLimitError(
                f"writes more than {self._limits.output_characters_max} characters"
            )

    def enter_call(self) -> None:
        """Counts a level of calls; `leave_call` gives it back."""
        self._call_depth += 1
        if self._call_depth > self._limits.call_depth_max:
            raise WorkLimitError(
                f"calls itself more than {self._limits.call_depth_max} levels deep"
            )

    def leave_call(self) -> None:
        """Gives back a level of calls."""
        self._call_depth -= 1

    def measure(self, value: object) -> int:
        """Size of all that `value` holds; stops counting where it would pass the limit anyway."""
        return measured_size(value, self._characters_left)

    def reads(self, *values: object) -> None:
        """Counts an operation that walks through all that the values hold."""
        for value in values:
            self.characters(self.measure(value))

    def compares(self, left: object, right: object) -> None:
        """Counts an operation that walks through two values until one ends or differs."""
        if _is_container(left):
            left, right = right, left
        size = self.measure(left)
        # With two containers the first was walked through to measure it, so it counts whole.
        self.characters(1 + (size if _is_container(left) else measured_size(right, size)))

    def keeps(self, value: object) -> None:
        """Counts a value that outlives its expression; refuses one nested too deep."""
        if self._depth(value, NESTING_MAX) > NESTING_MAX:
            raise WorkLimitError(f"nests values more than {NESTING_MAX} levels deep")

    def _depth(self, value: object, depth_max: int) -> int:
        """Levels of containers in `value`, or some number over `depth_max`."""
        if not _is_container(value):
            return 0
        known = self._known_depths.get(id(value))
        if known is not None:
            return known[1]
        self.characters(ELEMENT_CHARACTERS * _element_count(value))
        depth = 1
        if depth_max > 0:
            deepest = max(
                (self._depth(part, depth_max - 1) for part in _elements(value)), default=0
            )
            depth += deepest
        # Nothing can change a container, and while it is held its id is not given to another.
        if depth <= depth_max:
            self._known_depths[id(value)] = (value, depth)
        return depth


def meter_of(context: Context) -> WorkMeter:
    """The meter of the rendering that `context` belongs to."""
    meter = context.parent[METER_VARIABLE]
    assert isinstance(meter, WorkMeter)
    return meter


def measured_size(value: object, size_max: int) -> int:
    """Characters in `value` with all that it contains, ELEMENT_CHARACTERS for each element.

    What is contained twice counts twice, as an operation would walk through it twice. Returns
    some number above `size_max` once it is passed: lists of the same list grow exponentially.
    """
    if isinstance(value, str):
        return len(value)
    size = 0
    pending = [value]
    while pending and size <= size_max:
        item = pending.pop()
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, int):
            size += 1 + item.bit_length() // 3
        else:
            size += shallow_size(item)
            if size <= size_max and _is_container(item):
                pending.extend(_elements(item))
    return size


def shallow_size(value: object) -> int:
    """Characters of a string, or ELEMENT_CHARACTERS for each element of anything else.

    Raises NotAllowedError for a running loop, whose elements cannot be counted.
    """
    if isinstance(value, str):
        return len(value)
    if isinstance(value, LoopContext):
        raise NotAllowedError("a running loop as a value")
    return ELEMENT_CHARACTERS * _element_count(value)


def _is_container(value: object) -> bool:
    # Most values are these, and asking for the abstract kinds below takes much longer.
    if value is None or isinstance(value, (str, int, float)):
        return False
    kinds = (dict, list, tuple, KeysView, ValuesView, ItemsView, OneShotIterator)
    return isinstance(value, kinds)


def _element_count(value: object) -> int:
    if isinstance(value, OneShotIterator):
        return 1 + len(value.remaining)
    if isinstance(value, dict):
        return 1 + 2 * len(value)
    if isinstance(value, Sized):
        return 1 + len(value)
    return 1


def _elements(container: object) -> Iterable[object]:
    if isinstance(container, OneShotIterator):
        return container.remaining
    if isinstance(container, dict):
        return [*container.keys(), *container.values()]
    if isinstance(container, Iterable):
        return container
    return ()
