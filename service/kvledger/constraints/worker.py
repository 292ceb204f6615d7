"""The process that compiles what clients send before the server does, and may break of it.

Native code that takes in somebody's grammar can overflow its stack, take memory without end or not
come back. Here that ends one child: for each source this process forks one with limits on memory,
processor and time, with a stack smaller than any thread of the server has, and tells how it went.
What a child has compiled within its limits the server can compile as well.

It speaks over its standard input and output in frames: four bytes with the length, then so many.
First comes the vocabulary, then sources; each is answered with a verdict, in JSON.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import struct
import sys
import threading
import time
from dataclasses import asdict, dataclass
from typing import BinaryIO

# What compiling one source may take: seconds of a processor and of a clock, bytes.
PROCESSOR_SECONDS = 3
CLOCK_SECONDS = 10.0
MEMORY_BYTES = 256 * 1024 * 1024

# Of what compiles: whoever computes tokens comes first.
_NICENESS = 5
# Of the thread that compiles; the threads of a server have 2 MiB or more.
_STACK_BYTES = 1024 * 1024
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class Verdict:
    """How compiling one source went."""

    # Completes "the constraint ..."; None where it can be compiled.
    refused: str | None = None
    # Whether the same source would be refused again.
    lasting: bool = True
    # Bytes of memory that it took and kept.
    size: int = 0


TOOK_TOO_LONG = Verdict(
    f"takes more than {PROCESSOR_SECONDS} s to compile; make it smaller", lasting=False
)
BROKE = Verdict(
    f"nests too deeply, or takes more than {MEMORY_BYTES >> 20} MiB to compile; make it smaller"
)


def frame(payload: bytes) -> bytes:
    """A payload as it goes through the socket."""
    return _LENGTH.pack(len(payload)) + payload


def frame_length(head: bytes) -> int:
    """The payload's length, from the four bytes before it."""
    return int(_LENGTH.unpack(head)[0])


def main() -> None:
    """Answers until its input ends."""
    # It ends when the server has ended, not when a supervisor or a terminal tells both to.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Imported by this process alone: a server that never sees a constraint does without.
    from kvledger.constraints.vocabulary import Vocabulary

    packed = _read(sys.stdin.buffer)
    if packed is None:
        return
    tokenizer = Vocabulary.unpack(packed).prepared()
    while (source := _read(sys.stdin.buffer)) is not None:
        verdict = _verdict(tokenizer, json.loads(source))
        sys.stdout.buffer.write(frame(json.dumps(asdict(verdict)).encode()))
        sys.stdout.buffer.flush()


def _read(stream: BinaryIO) -> bytes | None:
    head = stream.read(_LENGTH.size)
    return stream.read(frame_length(head)) if len(head) == _LENGTH.size else None


def _verdict(tokenizer: object, source: dict[str, str]) -> Verdict:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            _compile_within_limits(tokenizer, source, writer)
        finally:
            os._exit(1)
    os.close(writer)
    try:
        readable, _, _ = select.select((reader,), (), (), CLOCK_SECONDS)
        told = os.read(reader, 64 * 1024) if readable else b""
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)  # it stays ours, ended or not, until the next line
        _, status = os.waitpid(child, 0)
    if not readable or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU):
        return TOOK_TOO_LONG
    return Verdict(**json.loads(told)) if told else BROKE


def _compile_within_limits(tokenizer: object, source: dict[str, str], writer: int) -> None:
    """Tells the verdict, unless a limit ends the process first."""
    os.nice(_NICENESS)
    pages, resident = _memory()
    memory = pages + MEMORY_BYTES
    seconds = int(time.process_time()) + PROCESSOR_SECONDS
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_compile, args=(tokenizer, source, resident, writer))
    thread.start()
    thread.join()


def _compile(tokenizer: object, source: dict[str, str], resident: int, writer: int) -> None:
    from kvledger.constraints.matcher import compile_constraint
    from kvledger.constraints.refusal import ConstraintRefused
    from kvledger.constraints.source import ConstraintSource

    try:
        kept = compile_constraint(tokenizer, ConstraintSource(**source))  # type: ignore[arg-type]
    except ConstraintRefused as refusal:
        verdict = Verdict(str(refusal))
    except BaseException:
        # A panic of the library's, or no memory. Its text may quote the client.
        verdict = BROKE
    else:
        verdict = Verdict(size=max(0, _memory()[1] - resident))
        del kept
    os.write(writer, json.dumps(asdict(verdict)).encode())


def _memory() -> tuple[int, int]:
    """Bytes of address space and of memory that this process has."""
    with open("/proc/self/statm") as file:
        pages, resident = file.read().split()[:2]
    return int(pages) * resource.getpagesize(), int(resident) * resource.getpagesize()


if __name__ == "__main__":
    main()
