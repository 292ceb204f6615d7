"""Whether an address is free: unix sockets above all, whose files outlive their servers."""

from __future__ import annotations

import multiprocessing
import socket
from pathlib import Path

import pytest

from kvledger import address
from kvledger.address import (
    SocketLock,
    host_and_port,
    operators_address,
    socket_path,
    why_no_address,
    why_not_free,
)
from kvledger.errors import SettingRefused


def test_an_address_is_one_or_the_other() -> None:
    """A path would be looked up as a host, or a host as a path."""
    assert socket_path("unix:/run/kvledger.sock") == Path("/run/kvledger.sock")
    assert socket_path("unix-host:1") is None
    assert host_and_port("[::1]:5") == ("::1", 5)


@pytest.mark.parametrize("path", ["/a", "/run/kvledger/kvledger.sock", "/a b".replace(" ", "-")])
def test_paths_that_can_be(path: str) -> None:
    """A server could not listen where its operator wants it to."""
    assert why_no_address(f"unix:{path}") is None


@pytest.mark.parametrize(
    "path",
    ["", "a", "a/b", "/", "//a", "/a/", "/a b", "/a%20", "/a?b", "/a#b", "/\u00e4", "/a\n"],
)
def test_paths_that_cannot_be(path: str) -> None:
    """gRPC would make of it another path than the one that was written."""
    assert "is not unix:/path" in str(why_no_address(f"unix:{path}"))


def test_a_long_path_is_refused() -> None:
    """The path would be cut off, or the start end in a traceback."""
    assert why_no_address("unix:/" + "a" * 106) is None
    assert "at most 107 bytes" in str(why_no_address("unix:/" + "a" * 107))


def test_a_socket_that_is_listened_on_is_not_free(tmp_path: Path) -> None:
    """A second server would take the file away from the first."""
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        assert why_not_free(f"unix:{path}") == "another server listens there"
    assert path.exists()
    assert why_not_free(f"unix:{path}") is None, "a file that a dead server left is no obstacle"


def test_what_is_no_socket_is_not_free(tmp_path: Path) -> None:
    """A file named by mistake would be deleted for a socket."""
    path = tmp_path / "s"
    assert why_not_free(f"unix:{path}") is None
    path.write_text("precious")
    assert "no socket" in str(why_not_free(f"unix:{path}"))
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    assert "no socket" in str(why_not_free(f"unix:{path}"))
    assert f"there is no folder {tmp_path / 'x'}" == why_not_free(f"unix:{tmp_path}/x/s")


def test_a_path_has_one_owner(tmp_path: Path) -> None:
    """Of two servers that start at once, the later would take the path from the earlier."""
    path = tmp_path / "s"
    lock = SocketLock(path)
    with pytest.raises(SettingRefused, match=f"^--x unix:{path}: another server listens there$"):
        SocketLock.of("--x", path)
    lock.release()
    assert list(tmp_path.iterdir()) == []
    SocketLock(path).release()


def test_a_lock_of_a_server_that_was_killed_is_free(tmp_path: Path) -> None:
    """After a crash, somebody would have to delete a file before the next start."""
    path = tmp_path / "s"
    process = multiprocessing.get_context("spawn").Process(target=SocketLock, args=(path,))
    process.start()
    process.join(30)
    assert process.exitcode == 0
    assert [found.name for found in tmp_path.iterdir()] == ["s.lock"]
    SocketLock(path).release()


def test_a_lock_that_went_meanwhile_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two servers would each hold a lock, one of them on a file that has no name any more."""
    path = tmp_path / "s"
    taken: list[SocketLock] = []
    opened = address.os.open

    def open_and_lose(*arguments: object) -> int:
        found: int = opened(*arguments)  # type: ignore[arg-type]
        if not taken:  # another server ends, and takes its file away
            (tmp_path / "s.lock").unlink()
            taken.append(None)  # type: ignore[arg-type]
        return found

    monkeypatch.setattr(address.os, "open", open_and_lose)
    lock = SocketLock(path)
    with pytest.raises(BlockingIOError):
        SocketLock(path)
    lock.release()


def test_a_lock_that_cannot_be_is_told(tmp_path: Path) -> None:
    """A start would end in a traceback; or a link of a stranger's be followed."""
    with pytest.raises(SettingRefused, match="there is no folder"):
        SocketLock.of("--x", tmp_path / "x" / "s")
    (tmp_path / "s.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(SettingRefused, match=r"^--x unix:.*: "):
        SocketLock.of("--x", tmp_path / "s")
    assert not (tmp_path / "precious").exists()


@pytest.fixture
def no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment in which there is nowhere to put a socket."""
    monkeypatch.setattr(address, "_MADE_FOLDER", str(tmp_path / "nowhere"))
    return {"TMPDIR": str(tmp_path / "nowhere")}


def test_operators_have_a_socket_beside_the_clients() -> None:
    """Two servers on one machine would want the same path."""
    assert operators_address("unix:/run/k/k.sock") == "unix:/run/k/k.operators.sock"
    assert operators_address("unix:/run/k/k") == "unix:/run/k/k.operators.sock"
    assert operators_address("unix:/" + "k" * 100) is None, "too long for a socket"


def test_operators_have_a_socket_for_each_address(
    tmp_path: Path, no_folder: dict[str, str]
) -> None:
    """The same; and a name that is no path would put it elsewhere."""
    environment = {**no_folder, "XDG_RUNTIME_DIR": str(tmp_path)}
    found = {
        listen: operators_address(listen, environment)
        for listen in ("127.0.0.1:1", "127.0.0.1:2", "[::1]:1", "[fe80::1%eth0]:1", "localhost:1")
    }
    assert len(set(found.values())) == len(found)
    for each in found.values():
        assert each is not None
        assert why_no_address(each) is None
        path = socket_path(each)
        assert path is not None
        assert path.parent == tmp_path / "kvledger"
    assert (tmp_path / "kvledger").stat().st_mode & 0o777 == 0o700


def test_folders_for_the_operators_socket_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service under systemd would put its socket where its supervisor does not look."""
    made = [tmp_path / name for name in ("unit", "package", "user", "temporary")]
    for folder in made:
        folder.mkdir(mode=0o700)
    unit, package, user, temporary = made
    monkeypatch.setattr(address, "_MADE_FOLDER", str(package))
    environment = {
        "RUNTIME_DIRECTORY": f"{tmp_path / 'other'}:{unit}",
        "XDG_RUNTIME_DIR": str(user),
        "TMPDIR": str(temporary),
    }
    name = "operators-h-1.sock"
    assert operators_address("h:1", environment) == f"unix:{unit}/{name}"
    unit.rmdir()
    assert operators_address("h:1", environment) == f"unix:{package}/{name}"
    package.chmod(0o722)
    assert operators_address("h:1", environment) == f"unix:{user}/kvledger/{name}"
    del environment["XDG_RUNTIME_DIR"]
    found = operators_address("h:1", environment)
    assert found is not None
    assert found.startswith(f"unix:{temporary}/kvledger-")


def test_a_folder_that_others_can_write_to_is_not_trusted(
    tmp_path: Path, no_folder: dict[str, str]
) -> None:
    """Among temporary files, a stranger could make the folder first and own the socket."""
    environment = {**no_folder, "XDG_RUNTIME_DIR": str(tmp_path)}
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (tmp_path / "kvledger").symlink_to(elsewhere)
    assert operators_address("h:1", environment) is None
    (tmp_path / "kvledger").unlink()
    (tmp_path / "kvledger").mkdir()
    (tmp_path / "kvledger").chmod(0o777)
    assert operators_address("h:1", environment) is None
    (tmp_path / "kvledger").chmod(0o700)
    assert operators_address("h:1", environment) is not None
    assert operators_address("h:1", no_folder) is None
