"""The little of HTTP/1.1 and server-sent events that a load test of a local server needs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from bench.load import CallFailed

UNREACHABLE = "UNREACHABLE"
# Longest line that a server may send, in bytes.
_LINE_MAX = 1 << 22


async def get_status(port: int, path: str) -> int:
    """The status that a server answers a GET with; 0 if nobody answers."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return 0
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n".encode())
        line = await asyncio.wait_for(reader.readline(), 5.0)
        return int(line.split()[1])
    except (OSError, asyncio.TimeoutError, IndexError, ValueError):
        return 0
    finally:
        writer.close()


async def post_events(port: int, path: str, body: Mapping[str, Any]) -> AsyncIterator[Any]:
    """The events of a streamed answer, as JSON values. Raises CallFailed."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=_LINE_MAX)
    except OSError as error:
        raise CallFailed(UNREACHABLE, str(error)) from None
    try:
        content = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        writer.write(head.encode() + content)
        status, chunked = await _read_head(reader)
        if status != 200:
            text = (await reader.read(2000)).decode("utf-8", "replace")
            raise CallFailed(f"HTTP {status}", text)
        async for line in _lines(reader, chunked):
            if line.startswith(b"data: ") and line != b"data: [DONE]":
                event = json.loads(line[6:])
                if "error" in event:
                    raise CallFailed("HTTP stream error", json.dumps(event["error"]))
                yield event
    except (OSError, EOFError, ValueError) as error:
        raise CallFailed("BROKEN STREAM", repr(error)) from None
    finally:
        writer.close()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """(status, whether the body is chunked)."""
    first = await reader.readline()
    if not first:
        raise EOFError("closed before the answer")
    chunked = False
    while (line := (await reader.readline()).strip().lower()) != b"":
        chunked = chunked or line == b"transfer-encoding: chunked"
    return int(first.split()[1]), chunked


async def _lines(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    """The lines of a body as they come."""
    rest = b""
    while True:
        if chunked:
            size = int((await reader.readline()).split(b";")[0], 16)
            data = (await reader.readexactly(size + 2))[:-2]
        else:
            data = await reader.read(1 << 16)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line.strip()
