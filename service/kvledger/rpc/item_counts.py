"""Counts the items of a message's lists before it is decoded.

Decoded, an empty message of two bytes takes fifty, so one call of 4 MiB could take a hundred.
Where a list is longer than its limit (limits.py), nothing of it is decoded. Only what the limits
name is counted, and counting ends with the first item too many, so it costs little.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from kvledger.errors import FieldViolation
from kvledger.limits import LIMITS

# Smaller messages cannot take much, and are checked once they are decoded.
_SMALL_BYTES = 1 << 16
# Most fields of a message, lists of numbers that are not packed included.
_FIELDS_MAX = 300_000

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class _Known(NamedTuple):
    """A field, as far as counting goes."""

    path: str
    most: float | None  # items, where it is a list that the table limits
    inner: Descriptor | None


class _Malformed(Exception):
    """The bytes are no message; the decoder says so as well."""


def too_many_items(data: bytes, kind: Descriptor) -> FieldViolation | None:
    """The first list that is longer than it may be, in a message of a kind as it came."""
    if len(data) < _SMALL_BYTES:
        return None
    try:
        return _Counter(data).count(kind, "", 0, len(data))
    except (_Malformed, IndexError):
        return None


class _Counter:
    """Walks through one message's fields."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._fields = 0
        # A list may stand in several pieces, also where the message around it does.
        self._counts: dict[str, int] = {}

    def count(self, kind: Descriptor, prefix: str, place: int, end: int) -> FieldViolation | None:
        """Counts the items between two places, which are a message of a kind."""
        known = _known_fields(kind, prefix)
        while place < end:
            self._fields += 1
            if self._fields > _FIELDS_MAX:
                return FieldViolation("request", f"has more than {_FIELDS_MAX} fields")
            tag, place = self._varint(place)
            field = known.get(tag >> 3)
            if field is not None and field.most is not None:
                items = self._counts[field.path] = self._counts.get(field.path, 0) + 1
                if items > field.most:
                    unit = LIMITS[field.path].unit
                    return FieldViolation(field.path, f"more than {field.most:.0f} {unit}")
            begin, place = self._value(tag & 7, place)
            if place > end:
                raise _Malformed
            if field is not None and field.inner is not None and tag & 7 == _BYTES:
                found = self.count(field.inner, f"{field.path}.", begin, place)
                if found is not None:
                    return found
        return None

    def _value(self, wire: int, place: int) -> tuple[int, int]:
        """Where the value at a place begins and ends."""
        if wire == _VARINT:
            return place, self._varint(place)[1]
        if wire == _BYTES:
            size, place = self._varint(place)
            return place, place + size
        if wire in (_FIXED32, _FIXED64):
            return place, place + (4 if wire == _FIXED32 else 8)
        raise _Malformed  # groups: nothing of this contract

    def _varint(self, place: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            byte = self._data[place]
            place += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, place
            shift += 7
            if shift > 63:
                raise _Malformed


@cache
def _known_fields(kind: Descriptor, prefix: str) -> dict[int, _Known]:
    return {field.number: _known(field, prefix) for field in kind.fields}


def _known(field: FieldDescriptor, prefix: str) -> _Known:
    path = prefix + field.name
    limit = LIMITS.get(path) if field.is_repeated else None
    return _Known(path, None if limit is None else limit.most, field.message_type)
