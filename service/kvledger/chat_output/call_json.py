"""Calls in JSON: which objects are one, and their arguments as the model wrote them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import NamedTuple, NoReturn

_SPACES = " \t\r\n"


class Call(NamedTuple):
    """A call that a model wrote: the name of a tool, and JSON text of an object."""

    name: str
    arguments: str


def call_of(text: str, tools: Collection[str], *, bare: bool = False) -> Call | None:
    """The call that a JSON object is, or None.

    It names one of `tools`, and its arguments are an object, or a string that holds one. Where
    nothing around it says that it is a call (`bare`), they must be there; else none means none.
    """
    try:
        members = dict(_members(text))
    except (ValueError, RecursionError):
        return None
    name = members.get("name", (None, ""))[0]
    if not isinstance(name, str) or name not in tools:
        return None
    given = members.get("arguments", members.get("parameters"))
    if given is None or given[0] is None:
        return None if bare else Call(name, "{}")
    value, written = given
    if isinstance(value, str):
        return Call(name, value.strip(_SPACES)) if is_object(value) else None
    return Call(name, written) if isinstance(value, dict) else None


def calls_of(text: str, tools: Collection[str]) -> list[Call] | None:
    """The calls of a JSON array of objects, or None if one of its values is no call."""
    try:
        calls = [call_of(written, tools) for _, written in _values(text)]
    except (ValueError, RecursionError):
        return None
    found = [call for call in calls if call is not None]
    return found if found and len(found) == len(calls) else None


def is_object(text: str) -> bool:
    """Whether a text is one JSON object."""
    try:
        return isinstance(json.loads(text, parse_constant=_refuse), dict)
    except (ValueError, RecursionError):
        return False


def _refuse(constant: str) -> NoReturn:
    raise ValueError("NaN and Infinity are no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def _members(text: str) -> Iterator[tuple[str, tuple[object, str]]]:
    """The members of an object: key, value, and the value as it is written."""
    place = _past(text, 0, "{")
    while not text.startswith("}", place):
        key, end = _DECODER.raw_decode(text, place)
        if not isinstance(key, str):
            raise ValueError("a key is a string")
        place = _past(text, _blank(text, end), ":")
        value, end = _DECODER.raw_decode(text, place)
        yield key, (value, text[place:end])
        place = _separated(text, end, "}")
    _require_end(text, place + 1)


def _values(text: str) -> Iterator[tuple[object, str]]:
    """The values of an array, each also as it is written."""
    place = _past(text, 0, "[")
    while not text.startswith("]", place):
        value, end = _DECODER.raw_decode(text, place)
        yield value, text[place:end]
        place = _separated(text, end, "]")
    _require_end(text, place + 1)


def _blank(text: str, place: int) -> int:
    while place < len(text) and text[place] in _SPACES:
        place += 1
    return place


def _past(text: str, place: int, character: str) -> int:
    """The place after a character that must stand here, and after the spaces that follow it."""
    if not text.startswith(character, place):
        raise ValueError("another character is needed")
    return _blank(text, place + 1)


def _separated(text: str, end: int, closing: str) -> int:
    """The place of the next member after a comma, or of the closing bracket."""
    place = _blank(text, end)
    if text.startswith(closing, place):
        return place
    place = _past(text, place, ",")
    if text.startswith(closing, place):
        raise ValueError("nothing follows a comma")
    return place


def _require_end(text: str, place: int) -> None:
    if place != len(text):
        raise ValueError("something follows")
