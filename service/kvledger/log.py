"""Logging: one line an event, JSON or for a console.

What a client sent is never logged: no prompt, no output, no string of its own. Tracebacks carry no
local variables. Of what libraries log only the place and the kind are told, because their sentences
may quote anything. A line that cannot be written is lost, and nothing else is: neither a full disk
nor a reader that stands still stops the server. The next line that gets through says how many were.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import select
import stat
import sys
import traceback
from types import TracebackType
from typing import Literal, TextIO

import structlog

from kvledger import errors

LogFormat = Literal["auto", "json", "console"]
LogLevel = Literal["debug", "info", "warning", "error"]

# What a pipe takes without blocking once it says that it takes something, in bytes.
_PIECE = select.PIPE_BUF

# What a pipe to a collector may hold, in bytes: the most that Linux gives anybody by default.
_PIPE_BYTES = 1024 * 1024


def quiet_grpc() -> None:
    """Keeps the lines of gRPC's C core away: they have no format, and quote clients.

    It reads this when it starts. Who wants the lines sets GRPC_VERBOSITY.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def configure(format: LogFormat = "auto", level: LogLevel = "info") -> None:
    """Sends log lines to standard error: `auto` is for a console if that is one, else JSON."""
    terminal = _is_terminal(sys.stderr)
    quiet_grpc()
    console = format == "console" or (format == "auto" and terminal)
    _widen_pipe(sys.stderr)
    lines = _Lines(sys.stderr)
    processors: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _without_text,
        lines.count_lost,
    ]
    if console:
        processors.append(_traceback_last)
        processors.append(
            structlog.dev.ConsoleRenderer(
                exception_formatter=structlog.dev.plain_traceback, colors=terminal
            )
        )
    else:
        processors.append(structlog.processors.JSONRenderer())
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(lines),  # type: ignore[arg-type]
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(handlers=[_Libraries()], level=logging.WARNING, force=True)


def frames(trace: TracebackType | None) -> str:
    """A traceback as lines of code, without the exception's own text."""
    return "".join(traceback.format_tb(trace))


def _without_text(
    logger: object, method: str, event: structlog.types.EventDict
) -> structlog.types.EventDict:
    """Puts the kind and the place of an exception where structlog would put all of it.

    Its text is told only if it is one of `kvledger.errors`, which quote no client.
    """
    del logger, method
    error = event.pop("exc_info", None)
    if error and not isinstance(error, BaseException):
        error = error[1] if isinstance(error, tuple) else sys.exc_info()[1]
    if isinstance(error, BaseException):
        event["error"] = type(error).__name__
        event["traceback"] = frames(error.__traceback__)
        if type(error).__module__ == errors.__name__:
            event["reason"] = str(error)
    return event


def _traceback_last(
    logger: object, method: str, event: structlog.types.EventDict
) -> structlog.types.EventDict:
    """A traceback under the line, as people read it, and not in it."""
    del logger, method
    if trace := event.pop("traceback", None):
        event["exception"] = trace.rstrip("\n")
    return event


def _is_terminal(stream: TextIO | None) -> bool:
    """Whether somebody reads there; a process may have been started without the stream."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # it was closed
        return False


class _Lines:
    """A stream whose reader may have gone, or stand still: the server waits for no log.

    One thread at a time writes a line and flushes it; structlog holds a lock meanwhile.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._descriptor = _descriptor(stream)
        self._line = ""  # being written
        self._rest = b""  # of a line that the stream took a part of
        self._lost = 0

    def count_lost(
        self, logger: object, method: str, event: structlog.types.EventDict
    ) -> structlog.types.EventDict:
        """Says in a line how many before it were lost."""
        del logger, method
        if self._lost:
            event["lines_lost"] = self._lost
        return event

    def write(self, text: str) -> None:
        self._line += text

    def flush(self) -> None:
        line, self._line = self._line, ""
        try:
            if self._descriptor is None:
                self._write_to_stream(line)
            elif not self._write_to_descriptor(line, self._descriptor):
                self._lost += 1
                return
        except (OSError, ValueError):  # ValueError: it was closed
            self._lost += 1
            self._rest = b""
            return
        self._lost = 0

    def _write_to_stream(self, line: str) -> None:
        if self._stream is not None:
            self._stream.write(line)
            self._stream.flush()

    def _write_to_descriptor(self, line: str, descriptor: int) -> bool:
        """Whether the line was taken; what did not fit of it goes out before the next one."""
        assert self._stream is not None
        self._rest = _written(self._rest, descriptor)
        if self._rest:
            return False
        data = line.encode(self._stream.encoding, "backslashreplace")
        self._rest = _written(data, descriptor)
        if len(self._rest) == len(data) and data:
            self._rest = b""
            return False
        return True


def _descriptor(stream: TextIO | None) -> int | None:
    """The file descriptor under a stream, if it has one."""
    try:
        return None if stream is None else stream.fileno()
    except (OSError, ValueError):
        return None


def _widen_pipe(stream: TextIO | None) -> None:
    """Lets a pipe hold more than its usual 64 KiB, so that a collector may be late without loss.

    It stays as it is where the system gives no more: this is no reason not to start.
    """
    descriptor = _descriptor(stream)
    if descriptor is None or not hasattr(fcntl, "F_SETPIPE_SZ"):
        return
    with contextlib.suppress(OSError):
        if (
            stat.S_ISFIFO(os.fstat(descriptor).st_mode)
            and fcntl.fcntl(descriptor, fcntl.F_GETPIPE_SZ) < _PIPE_BYTES
        ):
            fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)


def _written(data: bytes, descriptor: int) -> bytes:
    """Writes as much as is taken at once; returns the rest."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    while data and poll.poll(0):
        data = data[os.write(descriptor, data[:_PIECE]) :]
    return data


class _Libraries(logging.Handler):
    """Brings what libraries log into the same lines."""

    def emit(self, record: logging.LogRecord) -> None:
        kind, _, trace = record.exc_info or (None, None, None)
        log = structlog.get_logger(record.name)
        write = log.error if record.levelno >= logging.ERROR else log.warning
        write(
            "library_message",
            library=record.name,
            place=f"{record.module}:{record.lineno}",
            error=kind.__name__ if kind else None,
            traceback=frames(trace) or None,
        )
