"""How vocabularies write bytes as text: the letters of byte-level BPE, and names like <0x0A>."""

from __future__ import annotations

import re


def _letters() -> dict[int, int]:
    """Maps each letter of the byte alphabet to its byte.

    Bytes that print as one character in Latin-1 stand for themselves; the others, in order, are
    the characters from U+0100 on.
    """
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printing]
    letters = {byte: byte for byte in printing}
    letters.update({0x100 + place: byte for place, byte in enumerate(others)})
    # What prints as nothing is no letter: it must not pass for the byte of the same number.
    letters.update(dict.fromkeys(others, 0xFFFD))
    return letters


_BYTE_OF_LETTER = _letters()
_BYTE_NAME = re.compile("<0x([0-9A-Fa-f]{2})>")


def bytes_of_letters(token: str) -> bytes:
    """The bytes of a token in the byte alphabet; one that is not written in it, as it is."""
    try:
        return token.translate(_BYTE_OF_LETTER).encode("latin-1")
    except UnicodeEncodeError:
        # Tokens added after training are written as they are, and some files call them normal.
        return token.encode("utf-8", "replace")


def bytes_of_byte_token(token: str) -> bytes | None:
    """The byte that a token such as <0x0A> stands for, None if it is no such token."""
    match = _BYTE_NAME.fullmatch(token)
    return None if match is None else bytes.fromhex(match[1])
