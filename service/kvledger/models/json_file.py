"""JSON files of a model's folder, read with a bound and without trust.

Python's own reader accepts keys that stand twice, and numbers that JSON does not have; two readers
of such a file may see two models, so here it is refused.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path

from kvledger.errors import ModelRefused

_SHOWN_CHARACTERS = 64


def read_bytes(path: Path, most: int) -> bytes:
    """The content of a regular file of at most `most` bytes. ModelRefused, in one sentence."""
    try:
        # Asked before it is opened: opening a pipe would wait for somebody to write into it.
        if not stat.S_ISREG(path.stat().st_mode):
            raise ModelRefused(f"{path} is not a regular file")
        with path.open("rb") as file:
            content = file.read(most + 1)
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        reason = getattr(error, "strerror", None) or "it cannot be opened"
        raise ModelRefused(f"{path} cannot be read: {reason}") from None
    if len(content) > most:
        raise ModelRefused(f"{path} is larger than {most} bytes, the most kvledger reads of it")
    return content


def read_object(path: Path, most: int) -> dict[str, object]:
    """The JSON object in a file of at most `most` bytes. ModelRefused, in one sentence."""
    try:
        return parse_object(read_bytes(path, most))
    except ValueError as error:
        raise ModelRefused(f"{path} is not JSON to trust: {error}") from None


def parse_object(text: bytes) -> dict[str, object]:
    """A JSON object in UTF-8. ValueError, with a reason in a few words, if it is anything else."""
    try:
        value = json.loads(
            text.decode("utf-8"), object_pairs_hook=_without_doubles, parse_constant=_no_constant
        )
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(
            f"line {error.lineno}, column {error.colno}: {error.msg.lower()}"
        ) from None
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(value, dict):
        raise ValueError("it is not an object")
    return value


def shown(value: object) -> str:
    """A value of a file for an operator's eyes: short and printable, or only its kind."""
    if isinstance(value, str):
        if len(value) <= _SHOWN_CHARACTERS and value.isascii() and value.isprintable():
            return repr(value)
        return f"a text of {len(value)} characters"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float) and abs(value) < 1 << 63:
        return str(value)
    return f"a {type(value).__name__}" if value is not None else "missing"


def _without_doubles(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"{shown(key)} stands twice in one object")
            seen.add(key)
    return values


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is no number of JSON")
