"""Log lines: well formed, without anything of a client's in them, and never a reason to end."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TextIO

import pytest
import structlog

from kvledger import log
from kvledger.errors import SettingRefused

CANARY = "the prompt of a client"


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """What stands in for standard error; logging is as it was afterwards."""
    root = logging.getLogger()
    before = root.handlers[:], root.level, os.environ.get("GRPC_VERBOSITY")
    yield io.StringIO()
    structlog.reset_defaults()
    root.handlers[:], root.level = before[0], before[1]
    if before[2] is None:
        os.environ.pop("GRPC_VERBOSITY", None)


def configure(
    stream: TextIO | None, format: log.LogFormat = "json", level: log.LogLevel = "info"
) -> None:
    """Configures logging as if the stream were standard error."""
    with contextlib.redirect_stderr(stream):
        log.configure(format, level)


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    """JSON lines, read; a line that is none fails."""
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def fail(text: str) -> None:
    """Raises with a text and a local variable, and with a cause, that quote a client."""
    local = f"local {text}"
    try:
        raise KeyError(local)
    except KeyError as error:
        error.add_note(text) if hasattr(error, "add_note") else None
        raise ValueError(text) from error


def test_a_json_line_is_an_object_with_time_and_level(stream: io.StringIO) -> None:
    """Whatever collects the log could not read it."""
    configure(stream, "json")
    structlog.get_logger("x").info("serving", port=50051, name='a "b"\nc')
    (line,) = lines(stream)
    assert line["event"] == "serving"
    assert (line["level"], line["port"], line["name"]) == ("info", 50051, 'a "b"\nc')
    assert line["timestamp"].endswith("Z")


@pytest.mark.parametrize("format", ["json", "console"])
def test_exceptions_are_told_without_their_text(
    stream: io.StringIO, format: Literal["json", "console"]
) -> None:
    """A prompt that some library quotes in an exception would stand in the log."""
    configure(stream, format, "debug")
    try:
        fail(CANARY)
    except ValueError as error:
        structlog.get_logger("x").exception("step_failed", step=7)
        structlog.get_logger("x").error("given", exc_info=error)
        structlog.get_logger("x").error("as_tuple", exc_info=sys.exc_info())
        structlog.get_logger("x").error("as_flag", exc_info=True)
    shown = stream.getvalue()
    assert CANARY not in shown
    assert shown.count("ValueError") == 2 * 4, "as the kind, and in the line that raised it"
    assert shown.count(", in fail") == 4, "the place is told"
    assert "step_failed" in shown
    assert "7" in shown


def test_our_own_refusals_are_told_with_their_text(stream: io.StringIO) -> None:
    """An operator would read that the port was lost, but not which one and why."""
    configure(stream, "json")
    try:
        raise SettingRefused("--listen 127.0.0.1:1: the address is in use")
    except SettingRefused:
        structlog.get_logger("x").exception("listener_lost")
    (line,) = lines(stream)
    assert line["error"] == "SettingRefused"
    assert line["reason"] == "--listen 127.0.0.1:1: the address is in use"


def test_exc_info_without_an_exception_is_nothing(stream: io.StringIO) -> None:
    """A line would be lost because nothing was being handled when it was written."""
    configure(stream, "json")
    structlog.get_logger("x").error("quiet", exc_info=True)
    structlog.get_logger("x").error("quiet", exc_info=None)
    structlog.get_logger("x").error("quiet", exc_info=(None, None, None))
    assert [line["event"] for line in lines(stream)] == ["quiet"] * 3
    assert all("error" not in line for line in lines(stream))


@pytest.mark.parametrize("format", ["json", "console"])
def test_messages_of_libraries_are_told_by_place_and_kind(
    stream: io.StringIO, format: Literal["json", "console"]
) -> None:
    """A library's sentence may quote a client: its message, its arguments, its exception."""
    configure(stream, format, "debug")
    library = logging.getLogger("some.library")
    library.warning("got %s", CANARY)
    library.critical(CANARY)
    library.error("%d", CANARY)  # the arguments do not fit the message
    try:
        fail(CANARY)
    except ValueError:
        library.exception("failed on %s", CANARY, extra={"request": CANARY}, stack_info=True)
    shown = stream.getvalue()
    assert CANARY not in shown
    assert shown.count("library_message") == 4
    assert "some.library" in shown
    assert "test_log:" in shown
    assert "ValueError" in shown


def test_levels_of_libraries_are_kept(stream: io.StringIO) -> None:
    """A library's error would look like a warning, or its chatter fill the log."""
    configure(stream, "json")
    library = logging.getLogger("some.library")
    for write in (library.debug, library.info, library.warning, library.error):
        write("x")
    assert [line["level"] for line in lines(stream)] == ["warning", "error"]


@pytest.mark.parametrize(
    ("level", "count"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)]
)
def test_the_level_is_a_floor(stream: io.StringIO, level: log.LogLevel, count: int) -> None:
    """--log-level would drop errors, or keep what it should drop."""
    configure(stream, "json", level)
    logger = structlog.get_logger("x")
    for write in (logger.debug, logger.info, logger.warning, logger.error):
        write("x")
    assert len(lines(stream)) == count


def test_auto_is_json_unless_somebody_looks(stream: io.StringIO) -> None:
    """A log collector would get lines for people, or people lines for a collector."""
    configure(stream, "auto")
    structlog.get_logger("x").info("first")
    assert lines(stream)[0]["event"] == "first"
    terminal = Terminal()
    configure(terminal, "auto")
    structlog.get_logger("x").info("second")
    assert "second" in terminal.getvalue()
    assert not terminal.getvalue().startswith("{")


@pytest.mark.parametrize("format", ["auto", "json", "console"])
def test_a_closed_stream_loses_lines_and_nothing_else(
    stream: io.StringIO, format: log.LogFormat
) -> None:
    """A server would fail requests, or not start, because nobody reads its log."""
    configure(stream, format)
    before = structlog.get_logger("x")
    stream.close()
    before.error("lost")
    configure(stream, format)
    structlog.get_logger("x").error("lost")
    logging.getLogger("some.library").error("lost")
    configure(None, format)
    structlog.get_logger("x").error("lost")
    logging.getLogger("some.library").error("lost")


@pytest.mark.usefixtures("stream")
def test_a_reader_who_has_gone_loses_lines_and_nothing_else() -> None:
    """`kvledger serve 2>&1 | head` would end the server with its log's reader."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    # Line by line, as standard error is: a line that could not be written is not tried again.
    with open(write_end, "w", buffering=1, closefd=False) as pipe:
        configure(pipe)
        for _ in range(3):
            structlog.get_logger("x").error("lost")
        logging.getLogger("some.library").error("lost")
        os.dup2(os.open(os.devnull, os.O_WRONLY), write_end)
    os.close(write_end)


@pytest.mark.usefixtures("stream")
def test_a_reader_who_stands_still_loses_lines_and_nothing_else() -> None:
    """A log collector that hangs would stop the server, every stream and the engine with it."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    data = b""
    with open(writing, "w", encoding="utf-8") as stream, open(reading, "rb", 0) as reader:
        configure(stream)
        log = structlog.get_logger("x")
        for number in range(12_000):  # far more than a pipe holds
            log.info("line", number=number, text="x" * 100)
        data += reader.readall() or b""
        log.info("after", text="y" * 100_000)  # more than a pipe takes at once
        for _ in range(5):
            data += reader.read(1 << 20) or b""
            log.info("done")
        data += reader.read(1 << 20) or b""
    whole = [json.loads(line) for line in data.splitlines()]
    assert [line["event"] for line in whole].count("after") == 1
    numbers = [line["number"] for line in whole if line["event"] == "line"]
    assert numbers == list(range(len(numbers))), "in order, and each line whole"
    assert 100 < len(numbers) < 12_000
    told = next(line["lines_lost"] for line in whole if "lines_lost" in line)
    assert told >= 12_000 - len(numbers)


@pytest.mark.usefixtures("stream")
@pytest.mark.skipif(not hasattr(fcntl, "F_GETPIPE_SZ"), reason="pipes of this system have one size")
def test_a_collector_may_be_a_while_late() -> None:
    """A collector that starts anew would miss the receipts of a few seconds."""
    if int(Path("/proc/sys/fs/pipe-max-size").read_text()) < 1 << 20:
        pytest.skip("this system's pipes may not hold a MiB")
    reading, writing = os.pipe()
    before = fcntl.fcntl(writing, fcntl.F_GETPIPE_SZ)
    with open(writing, "w", encoding="utf-8") as stream, open(reading, "rb", 0) as reader:
        configure(stream)
        if fcntl.fcntl(writing, fcntl.F_GETPIPE_SZ) == before:
            pytest.skip("this user's pipes have all that they may hold together")
        for number in range(3000):
            structlog.get_logger("x").info("line", number=number, text="x" * 100)
        os.set_blocking(reading, False)
        told = [json.loads(line) for line in (reader.read(1 << 20) or b"").splitlines()]
        assert [line["number"] for line in told] == list(range(3000))
        configure(stream)
        assert fcntl.fcntl(writing, fcntl.F_GETPIPE_SZ) == 1 << 20


@pytest.mark.usefixtures("stream")
@pytest.mark.skipif(not hasattr(fcntl, "F_SETPIPE_SZ"), reason="pipes of this system have one size")
def test_a_pipe_that_may_hold_no_more_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server would not start because somebody else's pipes are many; or shrink a large one."""
    reading, writing = os.pipe()
    control = fcntl.fcntl
    asked: list[int] = []

    def refusing(descriptor: int, command: int, size: int = 0) -> int:
        if command == fcntl.F_SETPIPE_SZ:
            asked.append(size)
            raise PermissionError
        return control(descriptor, command, size)

    with open(writing, "w", encoding="utf-8") as stream, open(reading, "rb", 0) as reader:
        monkeypatch.setattr(fcntl, "fcntl", refusing)
        configure(stream)
        structlog.get_logger("x").info("line")
        assert json.loads(reader.read(4096) or b"")["event"] == "line"
        monkeypatch.setattr(log, "_PIPE_BYTES", 4096)
        configure(stream)
    assert asked == [1 << 20]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_full_disk_loses_lines_and_nothing_else() -> None:
    """A server would fail requests because its log has no room."""
    with contextlib.suppress(OSError), open("/dev/full", "w", encoding="utf-8") as stream:
        configure(stream)
        structlog.get_logger("x").info("line")
        structlog.get_logger("x").warning("line")


def test_characters_that_the_stream_lacks_end_nothing() -> None:
    """A path with an umlaut would end a server that runs in an ASCII locale."""
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    configure(narrow, "console")
    structlog.get_logger("x").error("first", path="\u00fc")
    structlog.get_logger("x").error("second")
    assert b"second" in narrow.buffer.getvalue()  # type: ignore[attr-defined]


def test_grpc_stays_silent(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC's own lines, in no format, would quote clients; who asks for them gets them."""
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    configure(stream, "json")
    assert os.environ["GRPC_VERBOSITY"] == "NONE"
    monkeypatch.setenv("GRPC_VERBOSITY", "DEBUG")
    configure(stream, "json")
    assert os.environ["GRPC_VERBOSITY"] == "DEBUG"


def test_frames_are_places_and_no_text() -> None:
    """The traceback under an incident's id would quote what the exception quotes."""
    try:
        fail(CANARY)
    except ValueError as error:
        shown = log.frames(error.__traceback__)
    assert "in fail" in shown
    assert CANARY not in shown
    assert log.frames(None) == ""
