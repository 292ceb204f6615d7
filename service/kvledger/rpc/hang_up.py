"""Closes the connections of a listener from our side, which gRPC has no call for.

A gRPC server that stops resets the calls that are on their way to it, and their callers hear
CANCELLED, as if they had gone away themselves (seen with grpcio 1.85.3). Callers whose connection
ends hear UNAVAILABLE, which is what they try again after.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from kvledger.address import socket_path

# Descriptors of this process, on Linux and elsewhere.
_DESCRIPTORS = Path("/dev/fd")


def hang_up(address: str) -> int:
    """Ends all connections that came to host:port or unix:/path; returns how many those were.

    What was written already still arrives. Nobody can connect any more: who lost a connection would
    be back at once. The file of a unix socket is gone afterwards.
    """
    path = socket_path(address)
    own: str | int = str(path) if path is not None else int(address.rpartition(":")[2])
    descriptors = [int(entry.name) for entry in _DESCRIPTORS.iterdir()]
    for descriptor in descriptors:
        if _end(descriptor, own, listening=True) and path is not None:
            path.unlink(missing_ok=True)  # gRPC asks the socket for its name, which it has lost
    return sum(_end(descriptor, own, listening=False) for descriptor in descriptors)


def _end(descriptor: int, own: str | int, *, listening: bool) -> bool:
    try:
        # A copy stays what it is, even if gRPC closes the original meanwhile.
        copy = os.dup(descriptor)
    except OSError:  # closed since
        return False
    try:
        found = socket.socket(fileno=copy)
    except OSError:  # no socket
        os.close(copy)
        return False
    with found, contextlib.suppress(OSError):  # the other side may have gone first
        if found.family not in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX):
            return False
        name = found.getsockname()
        listens = bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
        if listens != listening or (name[1] if isinstance(name, tuple) else name) != own:
            return False
        if listening:
            # gRPC goes on to use this number, and closes it: a socket without an address has it
            # from now on. Shut down instead, it would be logged as an error of gRPC.
            with socket.socket(found.family) as nowhere:
                os.dup2(nowhere.fileno(), descriptor, inheritable=False)
        else:
            found.shutdown(socket.SHUT_RDWR)
        return True
    return False
