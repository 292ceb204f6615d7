"""The client's own name of a request, which its receipt repeats."""

from __future__ import annotations

import re
from collections.abc import Iterable

from kvledger.errors import FieldViolation, InvalidRequest

_KEY = "x-request-id"
_CHARACTERS_MAX = 128
_ALLOWED = re.compile(rf"[A-Za-z0-9_.:-]{{1,{_CHARACTERS_MAX}}}\Z")


def client_request_id(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """What a call's metadata says in `x-request-id`; empty if nothing.

    Raises InvalidRequest for what receipts do not repeat: a name that was dropped would be missed
    when the books are read, long after the call.
    """
    given = [value for key, value in metadata or () if key == _KEY]
    if not given:
        return ""
    if len(given) > 1:
        raise InvalidRequest(FieldViolation(_KEY, f"given {len(given)} times, allowed is once"))
    (value,) = given
    if not isinstance(value, str) or _ALLOWED.match(value) is None:
        raise InvalidRequest(
            FieldViolation(
                _KEY,
                f"{len(value)} characters, allowed are 1 to {_CHARACTERS_MAX} of letters, digits, "
                '"_", "-", "." and ":"',
            )
        )
    return value
