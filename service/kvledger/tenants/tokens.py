"""Bearer tokens that the server's own command makes: 256 random bits, known only by their hash.

A guess is as good as any other, so a plain SHA-256 is enough: there is nothing to try out that a
slower hash would slow down.
"""

from __future__ import annotations

import hashlib
import secrets

# What tells our tokens from others', in a header and in a file that somebody lost.
PREFIX = "kvl_"
_BYTES = 32
# The prefix and 32 bytes in base64 without padding.
LENGTH = len(PREFIX) + 43
# No header of an identity is longer, a signed token included.
HEADER_CHARACTERS_MAX = 8192


def new_token() -> str:
    """A token that nobody has."""
    return PREFIX + secrets.token_urlsafe(_BYTES)


def digest(token: bytes) -> bytes:
    """What is known of a token: 32 bytes."""
    return hashlib.sha256(token).digest()


def bearer(header: str | bytes) -> bytes | None:
    """The token of an authorization header; None if it holds none that could be one."""
    if not isinstance(header, str) or len(header) > HEADER_CHARACTERS_MAX:
        return None
    scheme, _, token = header.partition(" ")
    if scheme.lower() != "bearer" or not token or not token.isascii() or " " in token:
        return None
    return token.encode("ascii")
