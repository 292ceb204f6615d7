"""Files of receipts: one JSON line each, written by a thread of their own.

Whoever adds a line never waits for the disk. The thread writes what came within a few hundredths of
a second and brings it to the disk within half a second, so a process that is killed loses less than
a second, and a machine that loses power hardly more.

A disk that is full or failing stops nothing: lines wait in memory, up to a bound, and are written
when there is room again. What goes beyond the bound is lost, counted and told. No file is ever
written by two processes, and a line that could be written in part only is cut off again, so a torn
line can only be the last one of its file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path

import structlog

from kvledger.errors import SettingRefused

_log = structlog.get_logger(__name__)

# How long lines are collected before they are written, in seconds.
_COLLECT_SECONDS = 0.05
# How long what is written may not be on the disk yet, in seconds.
_SYNC_SECONDS = 0.4
# How long a failing disk is left alone, in seconds.
_RETRY_SECONDS = 1.0
# What is written at a time, in bytes.
_PIECE_BYTES = 64 << 10
# What lines that are no receipts may take of the memory for lines that wait, in bytes.
_ASIDE_BYTES_MAX = 1 << 20


class _PartlyWritten(OSError):
    """A write that failed; so many whole lines of it are in the file."""

    def __init__(self, error: OSError, lines: int) -> None:
        super().__init__(error.errno, error.strerror)
        self.lines = lines


class _Aside(bytes):
    """A line that is no receipt: what is counted and told is of receipts."""


def _receipts(lines: Iterable[bytes]) -> int:
    return sum(not isinstance(line, _Aside) for line in lines)


class ReceiptFiles:
    """The files of one process in a folder. `add` and the counts are for any thread."""

    def __init__(
        self,
        folder: Path,
        name: str,
        header: bytes,
        file_bytes: int,
        *,
        file_seconds: float = 3600.0,
        waiting_bytes_max: int = 64 << 20,
        write: Callable[[int, bytes], int] = os.write,
        sync: Callable[[int], None] = os.fsync,
    ) -> None:
        """Makes the first file, which begins with the line `header`, as all do.

        `name` is the beginning of their names, nobody else's. A file has at most `file_bytes`, if
        no line alone is longer, and is written for at most `file_seconds`. Raises SettingRefused if
        the folder cannot be used.
        """
        self._folder, self._name, self._header = folder, name, header
        self._file_bytes, self._file_seconds = file_bytes, file_seconds
        self._waiting_bytes_max = waiting_bytes_max
        self._write_to, self._sync_to = write, sync
        self._changed = threading.Condition()
        # Guarded by it:
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = self._aside_bytes = 0
        self._waiting_receipts = 0
        self._newest: dict[str, bytes] = {}  # by kind
        self._lost = self._written = self._failures = 0
        self._stopping = self._given_up = False
        # The thread's own:
        self._descriptor: int | None = None
        self._number = 0
        self._size = 0
        self._opened_at = 0.0
        self._unsynced: list[bytes] = []
        self._unsynced_since: float | None = None
        self._failing = False
        self._is_torn = False  # the file ends with a part of a line
        require_folder(folder)
        try:
            self._open()
        except OSError as error:
            raise SettingRefused(f"--books {folder}: {error.strerror or error}") from None
        self._thread = threading.Thread(target=self._run, name="books", daemon=True)
        self._thread.start()

    @property
    def waiting_count(self) -> int:
        """Receipts that are not written yet."""
        return self._waiting_receipts

    @property
    def lost_count(self) -> int:
        """Receipts that could not be kept until there was room for them."""
        return self._lost

    @property
    def written_count(self) -> int:
        """Receipts written; lines of `add_aside` and `add_newest` are not counted."""
        return self._written

    @property
    def failure_count(self) -> int:
        """Times that a file could not be written."""
        return self._failures

    def add(self, line: bytes) -> bool:
        """Takes a receipt, which ends with a newline; False if it is lost for lack of room."""
        with self._changed:
            if self._given_up or self._waiting_bytes + len(line) > self._waiting_bytes_max:
                self._lost += 1
                return False
            self._put(line)
        return True

    def add_aside(self, line: bytes) -> bool:
        """Takes a line that is no receipt; False, and nothing is counted, if there is no room."""
        with self._changed:
            if (
                self._given_up
                or self._aside_bytes + len(line) > _ASIDE_BYTES_MAX
                or self._waiting_bytes + len(line) > self._waiting_bytes_max
            ):
                return False
            self._put(_Aside(line))
        return True

    def _put(self, line: bytes) -> None:
        # Only the first is news: while some wait, the thread collects more, or writes and looks
        # again. To be woken for each would cost more than writing them.
        if not self._waiting:
            self._changed.notify()
        self._waiting.append(line)
        self._count_waiting([line], 1)

    def _count_waiting(self, lines: Sequence[bytes], sign: int) -> None:
        """Lines that came to those that wait, or (-1) left them."""
        self._waiting_bytes += sign * sum(map(len, lines))
        self._waiting_receipts += sign * _receipts(lines)
        self._aside_bytes += sign * sum(len(line) for line in lines if isinstance(line, _Aside))

    def add_newest(self, line: bytes, kind: str = "") -> None:
        """Takes a line that says all that earlier ones of its kind said: only it is kept."""
        with self._changed:
            self._newest[kind] = line
            self._changed.notify()

    def close(self, seconds: float) -> None:
        """Writes what waits, for at most so long, and ends the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(seconds)
        with self._changed:
            self._given_up = True
            self._lost += self._waiting_receipts
            lost = self._lost
        if self._thread.is_alive() or lost:
            _log.error("receipts_lost", lines=lost)

    def _run(self) -> None:
        while not self._given_up:
            try:
                lines, newest, stopping = self._next()
                self._write_all(lines, newest)
                if self._unsynced_since is not None and (
                    stopping or time.monotonic() >= self._unsynced_since + _SYNC_SECONDS
                ):
                    self._sync()
                self._works()
            except OSError as error:
                self._fails(error)
                if not self._leaves_file(error):
                    with contextlib.suppress(OSError):  # what did fit should be on the disk
                        self._sync()
                    self._pause()
                continue
            except Exception:  # whatever it is, receipts wait, and the next attempt may do
                _log.exception("books_thread_failed")
                self._pause()
                continue
            if stopping and not self._waiting and not self._newest:
                self._close_file()
                return

    def _next(self) -> tuple[list[bytes], dict[str, bytes], bool]:
        """What to write now, and whether it is the last; comes back when something is due."""
        with self._changed:
            while not self._stopping and not self._waiting and not self._newest:
                due = None
                if self._unsynced_since is not None:
                    due = self._unsynced_since + _SYNC_SECONDS - time.monotonic()
                    if due <= 0:
                        break
                self._changed.wait(due)
            if not self._stopping and (self._waiting or self._newest):
                self._changed.wait_for(lambda: self._stopping, _COLLECT_SECONDS)
            return list(self._waiting), dict(self._newest), self._stopping

    def _pause(self) -> None:
        with self._changed:
            if not self._stopping:
                self._changed.wait_for(lambda: self._stopping, _RETRY_SECONDS)
                return
        time.sleep(_COLLECT_SECONDS)  # while `close` waits, more may fit at any moment

    def _write_all(self, lines: list[bytes], newest: dict[str, bytes]) -> None:
        done = 0
        while done < len(lines):
            count = self._fitting(lines, done)
            self._write(lines[done : done + count])
            done += count
        for kind, line in newest.items():
            self._fitting([line], 0)
            self._append(line)
            with self._changed:
                if self._newest[kind] is line:
                    del self._newest[kind]

    def _write(self, lines: list[bytes]) -> None:
        """Writes the first lines that wait; what was written as a whole counts even if it fails."""
        kept = 0
        try:
            self._append(b"".join(lines))
            kept = len(lines)
        except _PartlyWritten as error:
            kept = error.lines
            raise
        finally:
            self._unsynced += lines[:kept]
            with self._changed:
                self._count_waiting([self._waiting.popleft() for _ in range(kept)], -1)
                self._written += _receipts(lines[:kept])

    def _fitting(self, lines: list[bytes], first: int) -> int:
        """How many lines are for one write; begins a new file where this one is full."""
        if self._descriptor is None:
            self._open()
        elif self._is_full(len(lines[first])):
            self._sync()
            self._close_file()
            self._open()
        room = min(_PIECE_BYTES, self._file_bytes - self._size)
        count, size = 1, len(lines[first])
        while first + count < len(lines) and size + len(lines[first + count]) <= room:
            size += len(lines[first + count])
            count += 1
        return count

    def _is_full(self, more: int) -> bool:
        return self._size > len(self._header) and (
            self._size + more > self._file_bytes
            or time.monotonic() >= self._opened_at + self._file_seconds
        )

    def _append(self, data: bytes) -> None:
        """Writes lines. What fails is cut off behind the last whole one; raises _PartlyWritten."""
        assert self._descriptor is not None
        done = 0
        try:
            while done < len(data):
                done += self._write_to(self._descriptor, data[done:])
        except OSError as error:
            kept = data.rfind(b"\n", 0, done) + 1
            self._cut_off(self._size + kept)
            self._note_written(kept)
            raise _PartlyWritten(error, data.count(b"\n", 0, kept)) from error
        self._note_written(done)

    def _note_written(self, size: int) -> None:
        self._size += size
        if size and self._unsynced_since is None:
            self._unsynced_since = time.monotonic()

    def _cut_off(self, size: int) -> None:
        assert self._descriptor is not None
        try:
            os.ftruncate(self._descriptor, size)
        except OSError:
            self._is_torn = True

    def _leaves_file(self, error: OSError) -> bool:
        """Whether the next file may take at once what this one did not."""
        if self._is_torn:
            self._abandon_file()
            return False
        if error.errno != errno.EFBIG or self._size <= len(self._header):
            return False
        # The limit of one file, not of the disk.
        with contextlib.suppress(OSError):  # then all that it had not on the disk comes again
            self._sync()
        self._close_file()
        return True

    def _sync(self) -> None:
        """Brings what is written to the disk. What may not have come there is written again."""
        if self._descriptor is None:
            return
        try:
            self._sync_to(self._descriptor)
            if os.fstat(self._descriptor).st_nlink == 0:
                raise OSError(errno.ENOENT, "the file was removed while it was written")
        except OSError:
            # After a failure the system may have forgotten what it could not write.
            self._abandon_file()
            raise
        self._unsynced.clear()
        self._unsynced_since = None

    def _abandon_file(self) -> None:
        """Leaves a file as it is; its newest lines go into the next one again."""
        with self._changed:
            self._waiting.extendleft(reversed(self._unsynced))
            self._count_waiting(self._unsynced, 1)
            self._written -= _receipts(self._unsynced)
        self._close_file()

    def _close_file(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):  # all of it is on the disk, or written again
                os.close(self._descriptor)
        self._descriptor, self._is_torn = None, False
        self._unsynced.clear()
        self._unsynced_since = None

    def _open(self) -> None:
        """Begins the next file."""
        _make_folder(self._folder)
        number = self._number + 1
        path = self._folder / f"{self._name}-{number:06}.jsonl"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(path, flags, 0o600)
        self._number, self._size, self._opened_at = number, 0, time.monotonic()
        try:
            self._append(self._header)
            _sync_folder(self._folder)
        except OSError:
            self._close_file()
            with contextlib.suppress(OSError):
                path.unlink()
            raise

    def _works(self) -> None:
        if self._failing:
            self._failing = False
            _log.info("books_written_again", waiting=self.waiting_count, lost=self.lost_count)

    def _fails(self, error: OSError) -> None:
        with self._changed:
            self._failures += 1
            self._given_up = self._given_up or (self._stopping and not self._waiting)
        if not self._failing:
            self._failing = True
            _log.error(
                "books_not_written",
                reason=errno.errorcode.get(error.errno or 0, "unknown"),
                waiting=self.waiting_count,
            )


def file_name(replica: str, started: datetime) -> str:
    """The beginning of the names of a process's files."""
    return f"books-{started.astimezone(timezone.utc):%Y%m%dT%H%M%SZ}-{replica}"


def require_folder(folder: Path) -> None:
    """Makes it if it is not there. SettingRefused if it cannot be, or is open to others."""
    try:
        _make_folder(folder)
        mode = folder.stat().st_mode
    except OSError as error:
        raise SettingRefused(f"--books {folder}: {error.strerror or error}") from None
    if not stat.S_ISDIR(mode):
        raise SettingRefused(f"--books {folder}: it is no folder; name one")
    if stat.S_IMODE(mode) & 0o077:
        raise SettingRefused(
            f"--books {folder}: it is open to others (mode {stat.S_IMODE(mode):04o}), and receipts "
            f"say who used what; chmod 0700 {folder}"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SettingRefused(f"--books {folder}: {os.strerror(errno.EACCES)}")


def _make_folder(folder: Path) -> None:
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)


def _sync_folder(folder: Path) -> None:
    """So that a file's name is there after a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
