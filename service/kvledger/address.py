"""Where a server listens: host:port or unix:/path, and whether that is free.

Found out before anything expensive happens.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
import stat
from pathlib import Path

_PORT = re.compile("[0-9]{1,5}")
_HOST = re.compile(r"[^\s\[\]/:]+")
_UNIX = "unix:"
# gRPC reads the path as part of a URI: in it, %, ? and # would mean something else.
_SOCKET_PATH = re.compile(r"/[\w.~@:+,=-][\w./~@:+,=-]*", re.ASCII)
# What sun_path holds, less the zero at its end.
_SOCKET_PATH_MAX = 107


def why_no_address(listen: str) -> str | None:
    """What is wrong with how an address is written; None if nothing is."""
    if listen.startswith(_UNIX):
        path = listen.removeprefix(_UNIX)
        if not _SOCKET_PATH.fullmatch(path) or path.endswith("/"):
            return (
                f"{listen!r} is not unix:/path, an absolute path of ASCII letters, digits and "
                f"._~@:+,=-"
            )
        if len(path) > _SOCKET_PATH_MAX:
            return f"{listen!r}: a socket's path has at most {_SOCKET_PATH_MAX} bytes"
        return None
    host, _, port = listen.rpartition(":")
    if not host or not _PORT.fullmatch(port) or int(port) > 65535:
        return f"{listen!r} is neither host:port nor unix:/path"
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        # gRPC would read ::1:0 as an address without a port.
        return f"{listen!r} is not host:port; an IPv6 address stands in brackets, as in [::1]:50051"
    if not (_HOST.fullmatch(host) or _is_ipv6(host.removeprefix("[").removesuffix("]"))):
        return f"{listen!r} names no host that can be"
    return None


def socket_path(listen: str) -> Path | None:
    """The file of a unix socket; None for host:port."""
    return Path(listen.removeprefix(_UNIX)) if listen.startswith(_UNIX) else None


def host_and_port(listen: str) -> tuple[str, int]:
    """What host:port says, without an IPv6 address's brackets."""
    host, _, port = listen.rpartition(":")
    return host.strip("[]"), int(port)


def why_not_free(listen: str) -> str | None:
    """What keeps a server from listening there, in a few words; None if nothing does."""
    path = socket_path(listen)
    if path is not None:
        return _why_socket_not_free(path)
    host, port = host_and_port(listen)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family):
            return None
    except (OSError, UnicodeError) as error:  # UnicodeError: no name that a host can have
        return _words(error)


def _why_socket_not_free(path: Path) -> str | None:
    """The same for a unix socket; a file that nobody listens on any more counts as free."""
    try:
        if not path.parent.is_dir():
            return f"there is no folder {path.parent}"
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return "there is a file of that name that is no socket"
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as probe:
            probe.settimeout(1.0)
            probe.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        return None
    except OSError as error:
        return _words(error)
    return "another server listens there"


def _words(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)


def _is_ipv6(host: str) -> bool:
    try:
        return isinstance(ipaddress.ip_address(host), ipaddress.IPv6Address)
    except ValueError:
        return False
