"""Whether an address is free: unix sockets above all, whose files outlive their servers."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from kvledger.address import host_and_port, socket_path, why_no_address, why_not_free


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
