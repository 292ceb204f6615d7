"""Memory limits of machines and containers, from folders that look like theirs."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvledger.memory import memory_available, memory_limit

GIB = 1 << 30
TOTAL, FREE = 64 * GIB, 48 * GIB
NO_V1_LIMIT = 9223372036854771712


def machine(root: Path, cgroup: str | None, total: int = TOTAL, free: int = FREE) -> Path:
    """A machine's /proc; `cgroup` is the text of /proc/self/cgroup."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal:       {total // 1024} kB\nMemFree:  1 kB\n"
        f"MemAvailable:   {free // 1024} kB\nHugePages_Total:       0\n"
    )
    if cgroup is not None:
        (root / "proc/self/cgroup").write_text(cgroup)
    return root


def v2(root: Path, group: str, limit: int | str, used: int = 0, inactive: int = 0) -> None:
    """A control group of the second kind."""
    folder = root / "sys/fs/cgroup" / group
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    stat = f"anon 5\nfile 7\nactive_file 9\ninactive_file {inactive}\n"
    (folder / "memory.stat").write_text(stat)


def v1(root: Path, group: str, limit: int, used: int = 0, inactive: int = 0) -> None:
    """A control group of the first kind."""
    folder = root / "sys/fs/cgroup/memory" / group
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    stat = f"cache 5\ninactive_file 3\ntotal_inactive_file {inactive}\n"
    (folder / "memory.stat").write_text(stat)


def figures(root: Path) -> tuple[int, int]:
    return memory_limit(root), memory_available(root)


@pytest.mark.parametrize("cgroup", [None, "", "0::/\n", "3:cpuset:/x\n1:name=systemd:/y\n"])
def test_without_a_limit_the_machine_counts(tmp_path: Path, cgroup: str | None) -> None:
    """A server outside of any container would find no memory, or not start."""
    assert figures(machine(tmp_path, cgroup)) == (TOTAL, FREE)


def test_a_limit_of_max_is_none(tmp_path: Path) -> None:
    """A container without a limit would be taken for one with a limit of nothing."""
    root = machine(tmp_path, "0::/app\n")
    v2(root, "app", "max", 5 * GIB)
    assert figures(root) == (TOTAL, FREE)


def test_a_limit_of_the_second_kind(tmp_path: Path) -> None:
    """The default KV pool would be sized for the machine, and the container be killed."""
    root = machine(tmp_path, "0::/app\n")
    v2(root, "app", 8 * GIB, used=3 * GIB, inactive=1 * GIB)
    assert figures(root) == (8 * GIB, 8 * GIB - 3 * GIB + 1 * GIB)


def test_a_limit_of_the_first_kind(tmp_path: Path) -> None:
    """On older hosts the container would be killed instead."""
    root = machine(tmp_path, "9:cpu,cpuacct:/c\n4:memory:/docker/abc\n1:name=systemd:/d\n0::/\n")
    v1(root, "docker/abc", 8 * GIB, used=3 * GIB, inactive=1 * GIB)
    v1(root, "", NO_V1_LIMIT, used=40 * GIB)
    assert figures(root) == (8 * GIB, 6 * GIB)


def test_no_limit_of_the_first_kind_is_a_huge_number(tmp_path: Path) -> None:
    """The number that means "none" would be printed as a limit."""
    root = machine(tmp_path, "4:memory:/docker/abc\n")
    v1(root, "docker/abc", NO_V1_LIMIT, used=3 * GIB)
    assert figures(root) == (TOTAL, FREE)


def test_the_tightest_of_nested_groups_counts(tmp_path: Path) -> None:
    """A pod's limit above the container's own would be overlooked, and the pod be killed."""
    root = machine(tmp_path, "0::/pods/pod/container\n")
    v2(root, "pods", "max")
    v2(root, "pods/pod", 4 * GIB, used=1 * GIB)
    v2(root, "pods/pod/container", 16 * GIB, used=GIB // 2)
    assert figures(root) == (4 * GIB, 3 * GIB)


def test_room_is_least_where_it_is_least_not_where_the_limit_is(tmp_path: Path) -> None:
    """A large parent that neighbours have filled would be taken for roomy."""
    root = machine(tmp_path, "0::/pod/container\n")
    v2(root, "pod", 32 * GIB, used=31 * GIB)
    v2(root, "pod/container", 8 * GIB, used=1 * GIB)
    assert figures(root) == (8 * GIB, 1 * GIB)


@pytest.mark.parametrize("path", ["/kubepods/pod123/abc", "/../../elsewhere", "/.."])
def test_a_path_of_the_host_leads_to_the_mount(tmp_path: Path, path: str) -> None:
    """Inside a container the path is often the host's: its limit stands at the mount itself."""
    root = machine(tmp_path, f"0::{path}\n")
    v2(root, "", 2 * GIB, used=1 * GIB)
    assert figures(root) == (2 * GIB, 1 * GIB)


def test_both_kinds_at_once(tmp_path: Path) -> None:
    """On hosts that mix both kinds, the one that limits would be missed."""
    root = machine(tmp_path, "5:cpu,memory:/app\n0::/app\n")
    v1(root, "app", 6 * GIB)
    v2(root, "app", 7 * GIB)
    assert figures(root) == (6 * GIB, 6 * GIB)


def test_a_controller_that_only_sounds_like_memory_is_none(tmp_path: Path) -> None:
    """The group of another controller would be read as the memory's."""
    root = machine(tmp_path, "5:memory_other:/app\n")
    v1(root, "app", 1 * GIB)
    assert memory_limit(root) == TOTAL


def test_the_machine_counts_where_it_has_less(tmp_path: Path) -> None:
    """A container's limit above what the machine has left would be believed."""
    root = machine(tmp_path, "0::/app\n", total=4 * GIB, free=1 * GIB)
    v2(root, "app", 8 * GIB)
    assert figures(root) == (4 * GIB, 1 * GIB)


def test_room_is_never_negative(tmp_path: Path) -> None:
    """A limit that was lowered below the use would size a pool with a negative number."""
    root = machine(tmp_path, "0::/app\n")
    v2(root, "app", 1 * GIB, used=2 * GIB)
    assert memory_available(root) == 0


def test_more_inactive_than_used_is_no_extra_room(tmp_path: Path) -> None:
    """Two files read a moment apart would promise more than the limit."""
    root = machine(tmp_path, "0::/app\n")
    v2(root, "app", 4 * GIB, used=1 * GIB, inactive=2 * GIB)
    assert memory_available(root) == 4 * GIB


def test_a_group_with_a_limit_alone_counts(tmp_path: Path) -> None:
    """Where the use cannot be read, the limit would be ignored with it."""
    root = machine(tmp_path, "0::/app\n")
    folder = root / "sys/fs/cgroup/app"
    folder.mkdir(parents=True)
    (folder / "memory.max").write_text(f"{3 * GIB}\n")
    assert figures(root) == (3 * GIB, 3 * GIB)


def test_a_machine_that_says_nothing_is_an_error(tmp_path: Path) -> None:
    """A pool of unknown size would be taken for one of no size."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemFree: 1 kB\n")
    with pytest.raises(OSError, match="MemTotal"):
        memory_limit(tmp_path)


def test_this_machine_has_memory() -> None:
    """The real files might look otherwise than those that the tests make."""
    assert 0 < memory_available() <= memory_limit()
