"""Files of receipts: nothing is lost that could be kept, nothing waits for the disk."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from scripted_model import PATIENCE
from server_harness import Log

from kvledger.books import receipt_files
from kvledger.books.receipt_files import ReceiptFiles, require_folder
from kvledger.errors import SettingRefused

HEADER = b'{"kind":"replica"}\n'


@pytest.fixture(autouse=True)
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    """No disk is left alone for long, and what is logged is kept."""
    monkeypatch.setattr(receipt_files, "_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(receipt_files, "_COLLECT_SECONDS", 0.001)
    monkeypatch.setattr(receipt_files, "_SYNC_SECONDS", 0.02)
    log = Log()
    monkeypatch.setattr(receipt_files, "_log", log)
    return log


@contextmanager
def files_in(folder: Path, **changes: Any) -> Iterator[ReceiptFiles]:
    settings: dict[str, Any] = {"file_bytes": 1 << 20}
    files = ReceiptFiles(folder, "books-x", HEADER, **{**settings, **changes})
    try:
        yield files
    finally:
        files.close(PATIENCE)


def line(number: int) -> bytes:
    return b'{"kind":"receipt","number":%06d}\n' % number


def content(folder: Path) -> list[list[bytes]]:
    """The lines of each file, in the order of their making."""
    return [path.read_bytes().splitlines(keepends=True) for path in sorted(folder.iterdir())]


def receipts(folder: Path) -> list[bytes]:
    return [each for file in content(folder) for each in file if each != HEADER]


def wait(until: Callable[[], object]) -> None:
    ends = time.monotonic() + PATIENCE
    while not until():
        assert time.monotonic() < ends, "it did not come"
        time.sleep(0.002)


def test_the_thread_is_woken_by_the_first_line_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each receipt would take the interpreter from the engine, for a thread that does nothing."""
    woken = []
    with files_in(tmp_path / "books") as files:
        notify = files._changed.notify
        monkeypatch.setattr(files._changed, "notify", lambda: (woken.append(1), notify()))
        for first in (0, 100):
            with files._changed:  # so that the thread takes none meanwhile
                for number in range(first, first + 100):
                    files.add(line(number))
            wait(lambda first=first: files.written_count == first + 100)
        assert len(woken) == 2
    assert receipts(tmp_path / "books") == [line(number) for number in range(200)]


def test_lines_come_in_order_behind_the_header(tmp_path: Path) -> None:
    """Receipts would be lost, doubled or mixed up on a disk that works."""
    folder = tmp_path / "books"
    with files_in(folder) as files:
        for number in range(1000):
            assert files.add(line(number))
        wait(lambda: files.written_count == 1000)
        assert files.waiting_count == files.lost_count == files.failure_count == 0
    assert content(folder) == [[HEADER, *(line(number) for number in range(1000))]]


def test_lines_that_are_no_receipts_are_kept_and_not_counted(tmp_path: Path) -> None:
    """Receipts would be reported as written, waiting or lost that nobody ever had."""
    folder = tmp_path / "books"
    with files_in(folder) as files:
        assert files.add(line(1))
        assert files.add_aside(b'{"kind":"load"}\n')
        assert files.add(line(2))
        wait(lambda: files.written_count == 2)
    assert receipts(folder) == [line(1), b'{"kind":"load"}\n', line(2)]
    assert (files.written_count, files.waiting_count, files.lost_count) == (2, 0, 0)


def test_lines_that_are_no_receipts_leave_room_for_those(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a disk is full, lines about load would push receipts out, or be lost unseen."""
    monkeypatch.setattr(receipt_files, "_ASIDE_BYTES_MAX", 40)
    full = threading.Event()
    full.set()

    def write(descriptor: int, data: bytes) -> int:
        if full.is_set() and data != HEADER:
            raise OSError(errno.ENOSPC, "full")
        return os.write(descriptor, data)

    aside = b'{"kind":"load"}\n'
    with files_in(tmp_path / "books", write=write, waiting_bytes_max=100) as files:
        assert [files.add_aside(aside) for _ in range(4)] == [True, True, False, False]
        assert files.add(line(1))
        assert not files.add(line(2))  # no room in all
        assert not files.add_aside(aside)
        assert (files.waiting_count, files.lost_count) == (1, 1)
        full.clear()
        wait(lambda: files.written_count == 1)
        assert files.add_aside(aside)  # there is room again
    assert receipts(tmp_path / "books") == [aside, aside, line(1), aside]
    assert files.lost_count == 1


def test_lines_that_are_no_receipts_come_again_after_a_failure_of_the_disk(tmp_path: Path) -> None:
    """A part of the load would be missing, and nothing would say so."""
    failing = threading.Event()
    failing.set()

    def sync(descriptor: int) -> None:
        if failing.is_set():
            failing.clear()
            raise OSError(errno.EIO, "broken")
        os.fsync(descriptor)

    aside = b'{"kind":"load"}\n'
    with files_in(tmp_path / "books", sync=sync) as files:
        assert files.add_aside(aside)
        wait(lambda: files.failure_count == 1)
        assert files.add(line(1))
    assert content(tmp_path / "books")[-1] == [HEADER, aside, line(1)]
    assert (files.written_count, files.waiting_count) == (1, 0)


def test_folder_and_files_are_the_owners_alone(tmp_path: Path) -> None:
    """Whoever has an account on the machine could read who used what."""
    before = os.umask(0)
    try:
        with files_in(tmp_path / "books"):
            pass
    finally:
        os.umask(before)
    (path,) = (tmp_path / "books").iterdir()
    assert stat.S_IMODE((tmp_path / "books").stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_folder_that_cannot_be_used_says_what_to_change(tmp_path: Path) -> None:
    """The server would start, and its receipts would stand open, or nowhere."""
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o750)
    (tmp_path / "file").touch(0o600)
    for name, said in (
        ("open", f"mode 0750.*chmod 0700 {tmp_path / 'open'}"),
        ("file", "it is no folder"),
        ("missing/books", "No such file"),
    ):
        with pytest.raises(SettingRefused, match=said):
            require_folder(tmp_path / name)


def test_a_file_ends_before_it_is_too_large(tmp_path: Path) -> None:
    """One file would grow until the disk is full, and nothing could be shipped away."""
    with files_in(tmp_path / "books", file_bytes=200) as files:
        for number in range(50):
            files.add(line(number))
    found = content(tmp_path / "books")
    assert len(found) > 5
    assert all(file[0] == HEADER and sum(map(len, file)) <= 200 for file in found)
    assert receipts(tmp_path / "books") == [line(number) for number in range(50)]


def test_a_line_longer_than_a_file_has_a_file_alone(tmp_path: Path) -> None:
    """It would wait forever, and all behind it."""
    long = b'{"a":"%s"}\n' % (b"a" * 300)
    with files_in(tmp_path / "books", file_bytes=200) as files:
        for each in (line(1), long, line(2)):
            files.add(each)
    assert content(tmp_path / "books") == [[HEADER, line(1)], [HEADER, long], [HEADER, line(2)]]


def test_a_file_ends_when_it_is_old(tmp_path: Path) -> None:
    """A quiet server's receipts would stay in a file that nobody may take away."""
    with files_in(tmp_path / "books", file_seconds=0.05) as files:
        files.add(line(1))
        wait(lambda: files.written_count == 1)
        time.sleep(0.06)
        assert len(content(tmp_path / "books")) == 1  # nothing to write, no new file
        files.add(line(2))
    assert content(tmp_path / "books") == [[HEADER, line(1)], [HEADER, line(2)]]


def test_what_is_written_is_on_the_disk_soon(tmp_path: Path) -> None:
    """A loss of power would take more than the newest receipts."""
    synced = threading.Event()

    def sync(descriptor: int) -> None:
        os.fsync(descriptor)
        synced.set()

    with files_in(tmp_path / "books", sync=sync) as files:
        files.add(line(1))
        assert synced.wait(PATIENCE)  # and nobody adds anything


class Disk:
    """A disk with room for so many bytes, or one that fails otherwise."""

    def __init__(self, room: int, error: int = errno.ENOSPC) -> None:
        self.room = room
        self.error = error
        self.fails_sync = False
        self.hangs = threading.Event()
        self.hangs.set()

    def write(self, descriptor: int, data: bytes) -> int:
        self.hangs.wait(PATIENCE)
        if self.room <= 0:
            raise OSError(self.error, os.strerror(self.error))
        # As a real one does: it takes a part, and says so only with the next call.
        size = os.write(descriptor, data[: self.room])
        self.room -= size
        return size

    def sync(self, descriptor: int) -> None:
        if self.fails_sync:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        os.fsync(descriptor)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_disk_without_room_gets_all_of_it_later(tmp_path: Path, log: Log, error: int) -> None:
    """A full disk would cost receipts, or leave half lines among whole ones."""
    disk = Disk(len(HEADER) + 3 * len(line(0)) + 7, error)
    with files_in(tmp_path / "books", write=disk.write) as files:
        for number in range(100):
            assert files.add(line(number))
        wait(lambda: files.failure_count > 3)
        assert files.waiting_count >= 97
        assert all(each.endswith(b"\n") for each in receipts(tmp_path / "books"))
        disk.room = 1 << 20
        wait(lambda: files.waiting_count == 0)
    assert content(tmp_path / "books") == [[HEADER, *map(line, range(100))]]  # in one file
    (told,) = log.of("books_not_written")  # once, not at each attempt
    assert told["reason"] == errno.errorcode[error]
    assert len(log.of("books_written_again")) == 1
    assert log.of("receipts_lost") == []


def test_what_memory_cannot_keep_is_lost_and_told(tmp_path: Path, log: Log) -> None:
    """A disk that stays full would take the server's memory, or receipts without a word."""
    disk = Disk(len(HEADER))
    bound = 10 * len(line(0))
    with files_in(tmp_path / "books", write=disk.write, waiting_bytes_max=bound) as files:
        taken = [files.add(line(number)) for number in range(25)]
        assert taken == [True] * 10 + [False] * 15
        assert (files.waiting_count, files.lost_count) == (10, 15)
        disk.room = 1 << 20
        wait(lambda: files.waiting_count == 0)
        assert files.add(line(25))
    assert receipts(tmp_path / "books") == [*map(line, range(10)), line(25)]
    assert log.of("receipts_lost") == [{"lines": 15}]


def test_a_disk_that_hangs_keeps_nobody(tmp_path: Path) -> None:
    """The event loop would wait for the disk, and every stream with it."""
    disk = Disk(1 << 20)
    with files_in(tmp_path / "books", write=disk.write) as files:
        disk.hangs.clear()
        started = time.monotonic()
        for number in range(1000):
            files.add(line(number))
        files.add_newest(b"{}\n")
        assert time.monotonic() - started < 5
        assert files.written_count == 0
        disk.hangs.set()
    assert receipts(tmp_path / "books") == [*map(line, range(1000)), b"{}\n"]


def test_what_a_sync_may_have_lost_is_written_again(tmp_path: Path) -> None:
    """The system forgets what it could not write; it would say so once, and be believed."""
    disk = Disk(1 << 20)
    with files_in(tmp_path / "books", write=disk.write, sync=disk.sync) as files:
        files.add(line(1))
        wait(lambda: files.written_count == 1)
        time.sleep(0.1)  # it is on the disk
        disk.fails_sync = True
        files.add(line(2))
        wait(lambda: files.failure_count > 0)
        disk.fails_sync = False
        wait(lambda: files.waiting_count == 0)
        assert files.written_count == 2
    first, *others = content(tmp_path / "books")
    assert first == [HEADER, line(1), line(2)]
    assert others[-1] == [HEADER, line(2)]  # twice, for readers to count once


def test_a_file_that_somebody_removes_is_begun_again(tmp_path: Path) -> None:
    """Everything would go into a file without a name until the server ends."""
    with files_in(tmp_path / "books") as files:
        (path,) = (tmp_path / "books").iterdir()
        path.unlink()
        files.add(line(1))
        wait(lambda: files.failure_count == 1 and files.waiting_count == 0)
        wait(lambda: receipts(tmp_path / "books") == [line(1)])


def test_only_the_newest_line_of_its_kind_is_kept(tmp_path: Path) -> None:
    """A full disk would collect accounts of the pool in memory instead of receipts."""
    disk = Disk(len(HEADER))
    with files_in(tmp_path / "books", write=disk.write) as files:
        for number in range(5):
            files.add_newest(b'{"pool":%d}\n' % number)
            wait(lambda seen=files.failure_count: files.failure_count > seen)
        files.add(line(1))
        disk.room = 1 << 20
        wait(lambda: files.waiting_count == 0)
    # Behind the receipts that it counts.
    assert receipts(tmp_path / "books") == [line(1), b'{"pool":4}\n']


def test_a_newer_line_that_comes_meanwhile_is_kept(tmp_path: Path) -> None:
    """The last account of a server that stops would be the one before the last."""
    more = [b'{"pool":2}\n']

    def write(descriptor: int, data: bytes) -> int:
        if data == b'{"pool":1}\n' and more:
            files.add_newest(more.pop())
        return os.write(descriptor, data)

    with files_in(tmp_path / "books", write=write) as files:
        files.add_newest(b'{"pool":1}\n')
        wait(lambda: not more)
    assert receipts(tmp_path / "books") == [b'{"pool":1}\n', b'{"pool":2}\n']


def test_a_stop_does_not_wait_for_a_full_disk(tmp_path: Path, log: Log) -> None:
    """A server whose disk is full could not be stopped."""
    disk = Disk(len(HEADER))
    files = ReceiptFiles(tmp_path / "books", "books-x", HEADER, 1 << 20, write=disk.write)
    for number in range(3):
        files.add(line(number))
    started = time.monotonic()
    files.close(0.2)
    assert time.monotonic() - started < 5
    assert log.of("receipts_lost") == [{"lines": 3}]
    assert not files.add(line(4))


_LIMITED = """
import resource, sys, time
from pathlib import Path
from kvledger.books.receipt_files import ReceiptFiles
limit = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
files = ReceiptFiles(Path(sys.argv[1]), "books-x", b'{"kind":"replica"}\\n', 1 << 20)
for number in range(60):
    files.add(b'{"kind":"receipt","number":%06d}\\n' % number)
ends = time.monotonic() + 30
while files.waiting_count and time.monotonic() < ends:
    time.sleep(0.01)
files.close(30)
print(files.lost_count, files.failure_count)
"""


def test_a_limit_on_the_size_of_files_is_no_end(tmp_path: Path) -> None:
    """With `ulimit -f` below --books-file-bytes, the first full file would be the last."""
    result = subprocess.run(
        [sys.executable, "-c", _LIMITED, str(tmp_path / "books"), "1000"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    lost, failures = result.stdout.split()[-2:]
    assert (lost, int(failures) > 0) == ("0", True)
    assert receipts(tmp_path / "books") == [line(number) for number in range(60)]
    assert all(sum(map(len, file)) <= 1000 for file in content(tmp_path / "books"))


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[None]:
    """A file system of so many bytes; skips where this user may not mount one."""
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", str(folder)],
        capture_output=True,
        check=False,
    )
    if made.returncode != 0:
        pytest.skip("only root may mount a small disk")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_real_full_disk(tmp_path: Path) -> None:
    """What a disk says when it is full may be something else than a test thinks."""
    folder = tmp_path / "disk"
    with small_disk(folder, 64 << 10):
        ballast = folder / "ballast"
        ballast.write_bytes(b"\0" * (48 << 10))
        with files_in(folder, file_bytes=1 << 20) as files:
            for number in range(1200):
                assert files.add(line(number))
            wait(lambda: files.failure_count > 2)
            assert 0 < files.written_count < 1000  # what fits is there already
            ballast.unlink()
            wait(lambda: files.waiting_count == 0)
        assert receipts(folder) == [line(number) for number in range(1200)]
