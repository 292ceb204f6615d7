"""Where a server listens: host:port or unix:/path, and whether that is free.

Found out before anything expensive happens. A unix socket's path belongs to whoever holds the lock
file beside it: two servers that start at once would each find a file that nobody listens on, and
the later one would take the path away from the earlier.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import re
import socket
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvledger.errors import SettingRefused

_PORT = re.compile("[0-9]{1,5}")
_HOST = re.compile(r"[^\s\[\]/:]+")
_UNIX = "unix:"
# gRPC reads the path as part of a URI: in it, %, ? and # would mean something else.
_SOCKET_PATH = re.compile(r"/[\w.~@:+,=-][\w./~@:+,=-]*", re.ASCII)
# Where a package or an image may have made a folder for sockets.
_MADE_FOLDER = "/run/kvledger"
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


class SocketLock:
    """The right to listen on a unix socket's path, until `release` or the end of the process."""

    def __init__(self, path: Path) -> None:
        """BlockingIOError if somebody else has it, OSError if it cannot be asked for."""
        self._path = path.with_name(path.name + ".lock")
        while True:
            self._file = os.open(
                self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
            )
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_the_file_of_that_name():
                    return
            except BaseException:
                os.close(self._file)
                raise
            os.close(self._file)

    @classmethod
    def of(cls, option: str, path: Path) -> SocketLock:
        """The lock of a path that this option names; SettingRefused if it cannot be had."""
        try:
            return cls(path)
        except BlockingIOError:
            reason = "another server listens there"
        except FileNotFoundError:
            reason = f"there is no folder {path.parent}"
        except OSError as error:
            reason = _words(error)
        raise SettingRefused(f"{option} unix:{path}: {reason}")

    def release(self) -> None:
        """Lets others have it; the file goes while nobody else can hold it."""
        self._path.unlink(missing_ok=True)
        os.close(self._file)

    def _is_the_file_of_that_name(self) -> bool:
        """Whether nobody took the file away between its opening and its locking."""
        try:
            return os.path.samestat(os.fstat(self._file), self._path.lstat())
        except FileNotFoundError:
            return False


@contextlib.contextmanager
def for_the_owner_only() -> Iterator[None]:
    """A socket that is made meanwhile has mode 0600: there is no moment for others to connect."""
    mask = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(mask)


def operators_address(clients: str, environment: Mapping[str, str] | None = None) -> str | None:
    """Where operators are listened to unless told otherwise; None if there is no place for it.

    It follows from where clients are listened to, so that two servers on one machine have two:
    beside their unix socket, else in a folder that only this user can enter.
    """
    path = socket_path(clients)
    if path is not None:
        return _if_it_fits(path.with_name(path.name.removesuffix(".sock") + ".operators.sock"))
    folder = _runtime_folder(os.environ if environment is None else environment)
    if folder is None:
        return None
    host, port = host_and_port(clients)
    name = re.sub(r"[^\w.-]", "_", host, flags=re.ASCII)
    return _if_it_fits(folder / f"operators-{name}-{port}.sock")


def _if_it_fits(path: Path) -> str | None:
    address = f"{_UNIX}{path}"
    return address if why_no_address(address) is None else None


def _runtime_folder(environment: Mapping[str, str]) -> Path | None:
    """A folder for sockets that belongs to this user; made if need be, below one that is there."""
    # What systemd made for the service, perhaps several; the user's own; among everybody's
    # temporary files.
    for made in (*environment.get("RUNTIME_DIRECTORY", "").split(":"), _MADE_FOLDER):
        if made and _is_ours(Path(made)):
            return Path(made)
    above = environment.get("XDG_RUNTIME_DIR")
    places = [Path(above, "kvledger")] if above else []
    places.append(Path(environment.get("TMPDIR") or "/tmp", f"kvledger-{os.getuid()}"))  # noqa: S108
    for place in places:
        with contextlib.suppress(OSError):
            place.mkdir(mode=0o700, exist_ok=True)
            if _is_ours(place):
                return place
    return None


def _is_ours(folder: Path) -> bool:
    """Whether it is a folder of this user's, no link, that nobody else can write to."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return (
        stat.S_ISDIR(found.st_mode)
        and found.st_uid == os.getuid()
        and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        and os.access(folder, os.W_OK | os.X_OK)
    )


def _words(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)


def _is_ipv6(host: str) -> bool:
    try:
        return isinstance(ipaddress.ip_address(host), ipaddress.IPv6Address)
    except ValueError:
        return False
