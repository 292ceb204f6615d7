"""Whether an address can be served on, found out before anything expensive happens."""

from __future__ import annotations

import socket


def why_not_free(host: str, port: int) -> str | None:
    """What keeps a server from listening there, in a few words; None if nothing does."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family):
            return None
    except (OSError, UnicodeError) as error:  # UnicodeError: no name that a host can have
        return str(getattr(error, "strerror", None) or error)
