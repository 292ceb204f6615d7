"""Logging: one line an event, JSON or for a console.

What a client sent is never logged: no prompt, no output, no string of its own. Tracebacks carry no
local variables. Of what libraries log only the place and the kind are told, because their sentences
may quote anything. A line that cannot be written is lost, and nothing else is.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
from types import TracebackType
from typing import Literal, TextIO

import structlog

LogFormat = Literal["auto", "json", "console"]
LogLevel = Literal["debug", "info", "warning", "error"]


def configure(format: LogFormat = "auto", level: LogLevel = "info") -> None:
    """Sends log lines to standard error: `auto` is for a console if that is one, else JSON."""
    # The lines of gRPC's C core are in no format, and quote clients; it reads this when it starts.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    console = format == "console" or (format == "auto" and sys.stderr.isatty())
    processors: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if console:
        processors.append(
            structlog.dev.ConsoleRenderer(
                exception_formatter=structlog.dev.plain_traceback,
                colors=sys.stderr.isatty(),
            )
        )
    else:
        processors.append(
            structlog.processors.ExceptionRenderer(
                structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
            )
        )
        processors.append(structlog.processors.JSONRenderer())
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(_Lines(sys.stderr)),  # type: ignore[arg-type]
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(handlers=[_Libraries()], level=logging.WARNING, force=True)


def frames(trace: TracebackType | None) -> str:
    """A traceback as lines of code, without the exception's own text."""
    return "".join(traceback.format_tb(trace))


class _Lines:
    """A stream whose reader may have gone: the server does not end for want of a log."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # ValueError: it was closed
            self._stream.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()


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
