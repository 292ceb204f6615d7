"""How much memory this process may use: the machine's, or its container's where that is less."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

_Made = TypeVar("_Made")

# What cgroup v1 writes for "no limit" is a number near 2^63.
_NO_LIMIT = 1 << 60


def memory_limit(root: Path = Path("/")) -> int:
    """Bytes that this process and its neighbours in the container may use together."""
    return min([_meminfo("MemTotal", root), *(limit for limit, _ in _cgroups(root))])


def memory_available(root: Path = Path("/")) -> int:
    """Bytes that can still be taken without swapping or meeting a container's limit."""
    rooms = [limit - used for limit, used in _cgroups(root)]
    return max(0, min([_meminfo("MemAvailable", root), *rooms]))


@dataclass(frozen=True)
class Resident:
    """Memory of this process that is in the machine's, in bytes."""

    # Its own, and what it shares with others by name.
    own: int = 0
    # Pages of files: programs and libraries, for nothing else is mapped when a server serves.
    files: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.own + self.files


def resident(root: Path = Path("/")) -> Resident:
    """What of this process is resident now, as the system counts it."""
    text = (root / "proc/self/status").read_text()
    sizes = {name: value for name, _, value in (line.partition(":") for line in text.splitlines())}

    def size(field: str) -> int:
        return int(sizes[field].split()[0]) * 1024 if field in sizes else 0

    files = size("RssFile")
    return Resident(size("VmRSS") - files, files)


def measured(make: Callable[[], _Made]) -> tuple[_Made, int]:
    """What is made, and how many bytes of this process's own memory that took.

    Right as far as nothing else takes or gives back memory meanwhile.
    """
    before = resident().own
    made = make()
    return made, max(0, resident().own - before)


def _meminfo(field: str, root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise OSError(f"/proc/meminfo has no {field}")


def _cgroups(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, in use) of every control group above this process that has a memory limit."""
    for folder in _cgroup_folders(root):
        for limit_name, used_name, reclaimable in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit = _number(folder / limit_name)
            if limit is not None and limit < _NO_LIMIT:
                used = _number(folder / used_name) or 0
                yield limit, max(0, used - _stat(folder / "memory.stat", reclaimable))


def _cgroup_folders(root: Path) -> Iterator[Path]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("" if controllers == "" else "memory")
        folder = base / path.lstrip("/")
        # Inside a container the path may be the host's; then only the mount itself exists.
        while folder != base:
            yield folder
            folder = folder.parent
        yield base


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _stat(path: Path, field: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        name, _, value = line.partition(" ")
        if name == field and value.isdigit():
            return int(value)
    return 0
