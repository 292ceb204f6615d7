"""Reads one call, or one list of calls, character by character.

Each reader is a generator that is sent one item at a time and keeps all it needs between two of
them, so it cannot matter how a text is cut. An item is a character, the written form of a mark
that is a control token, or "" at the end of the answer. A reader returns the calls that it read;
`[]` if what it read with the last item is no call; None if the last item cannot belong to one.
"""

from __future__ import annotations

from collections.abc import Collection, Generator
from typing import TypeAlias, TypeVar

from kvledger.chat_output.call_json import Call, call_of, calls_of, is_object
from kvledger.chat_output.syntax import ARGUMENTS_FOLLOW, CALL_ID_FOLLOWS

# Brackets inside one another, as in the arguments that a request may hold.
DEPTH_MAX = 24
_SPACES = frozenset(" \t\r\n")
_IN_JSON = frozenset(" \t\r\n0123456789+-.eEtrufalsn,:")
_MARK_CHARACTERS_MAX = max(len(ARGUMENTS_FOLLOW), len(CALL_ID_FOLLOWS))

_Result = TypeVar("_Result")
Reading: TypeAlias = Generator[None, str, _Result]
CallReading: TypeAlias = Reading[list[Call] | None]


def read_object(tools: Collection[str], *, bare: bool = False) -> CallReading:
    """Reads an object that is a call, and what spaces stand before it."""
    item = yield from _after_spaces((yield))
    text = yield from _json_text(item, "{")
    if text is None:
        return None
    call = call_of(text, tools, bare=bare)
    return [] if call is None else [call]


def read_marked(tools: Collection[str]) -> CallReading:
    """Reads a list of calls, or the name of a tool and its arguments."""
    item = yield from _after_spaces((yield))
    if item == "[":
        text = yield from _json_text(item, "[")
        return None if text is None else calls_of(text, tools) or []
    name = ""
    longest = max(map(len, tools), default=0)
    while len(item) == 1 and item not in _SPACES and item not in "[{":
        name += item
        if len(name) > longest:
            return None
        item = yield
    if name not in tools:
        return None
    item = yield from _after_spaces(item)
    while len(item) > 1 or item == "[":
        mark = yield from _mark(item)
        item = yield
        if mark == CALL_ID_FOLLOWS:
            while len(item) == 1 and item.isalnum():
                item = yield
        elif mark != ARGUMENTS_FOLLOW:
            return None
        item = yield from _after_spaces(item)
    arguments = yield from _json_text(item, "{")
    if arguments is None:
        return None
    return [Call(name, arguments)] if is_object(arguments) else []


def _after_spaces(item: str) -> Reading[str]:
    while item in _SPACES:
        item = yield
    return item


def _mark(item: str) -> Reading[str]:
    """Reads a mark, which comes as one item or letter by letter."""
    mark = item
    while len(item) == 1 and item != "]" and len(mark) < _MARK_CHARACTERS_MAX:
        item = yield
        mark += item
    return mark


def _json_text(item: str, opening: str) -> Reading[str | None]:
    """Reads what may be JSON, up to the bracket that closes the first; None if it cannot be."""
    if item != opening:
        return None
    text = [item]
    depth = 1
    in_string = escaped = False
    while depth:
        item = yield
        if len(item) != 1:
            return None
        text.append(item)
        if in_string:
            if item < " ":
                return None
            in_string = escaped or item != '"'
            escaped = not escaped and item == "\\"
        elif item == '"':
            in_string = True
        elif item in "[{":
            depth += 1
            if depth > DEPTH_MAX:
                return None
        elif item in "]}":
            depth -= 1
        elif item not in _IN_JSON:
            return None
    return "".join(text)
