"""gRPC calls in bare HTTP/2 frames: a client that costs little, and one that takes nothing.

A client in Python that handles each message costs as much as a server that sends it, and would be
what is measured. `Calls` only looks for the ends of its streams meanwhile.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Sequence

from bench.load import CallFailed

try:
    import h2.config
    import h2.connection
    import h2.settings
except ImportError as error:
    raise SystemExit("h2 is missing: .venv/bin/pip install h2") from error

GENERATE = "/kvledger.v1.GenerationService/Generate"

_HEADER = struct.Struct(">IBI")  # length and type, flags, stream
_HEADER_BYTES = _HEADER.size
_PREFIX_BYTES = 5  # of a gRPC message: whether it is compressed, and its length
_WINDOW_MAX = 2**31 - 1
_WINDOW_DEFAULT = 65535
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY = 0, 1, 3, 4, 6, 7
_END_STREAM = 1
_ACK = 1  # the same bit, on frames that are no stream's


def frames(buffer: bytes | bytearray) -> tuple[list[tuple[int, int, int, int, int]], int]:
    """The whole frames of a buffer: (type, flags, stream, start and end of the payload).

    Also returns where the frame begins that is not whole yet.
    """
    found: list[tuple[int, int, int, int, int]] = []
    place, size = 0, len(buffer)
    while size - place >= _HEADER_BYTES:
        first, flags, stream = _HEADER.unpack_from(buffer, place)
        start = place + _HEADER_BYTES
        end = start + (first >> 8)
        if end > size:
            break
        found.append((first & 0xFF, flags, stream, start, end))
        place = end
    return found, place


def messages(data: bytes | bytearray) -> list[bytes]:
    """The gRPC messages of a stream's data. Raises ValueError if the last one is not whole."""
    found: list[bytes] = []
    place = 0
    while place < len(data):
        start = place + _PREFIX_BYTES
        place = start + int.from_bytes(data[place + 1 : start], "big")
        if place > len(data):
            raise ValueError(f"a message ends {place - len(data)} bytes after its stream")
        found.append(bytes(data[start:place]))
    return found


def _connection(window: int) -> h2.connection.H2Connection:
    """A client's side of a connection whose streams may be sent so many bytes each."""
    config = h2.config.H2Configuration(client_side=True, header_encoding="utf-8")
    connection = h2.connection.H2Connection(config)
    connection.local_settings = h2.settings.Settings(
        client=True, initial_values={h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window}
    )
    connection.initiate_connection()
    return connection


def _send_call(connection: h2.connection.H2Connection, stream: int, path: str, body: bytes) -> None:
    headers = [
        *((":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "bench")),
        *(("content-type", "application/grpc"), ("te", "trailers")),
    ]
    connection.send_headers(stream, headers)
    frame = b"\0" + len(body).to_bytes(_PREFIX_BYTES - 1, "big") + body
    connection.send_data(stream, frame, end_stream=True)


class Calls:
    """Some calls at once on one connection, whose windows are wide open."""

    def __init__(self, address: str, path: str, bodies: Sequence[bytes], timeout: float) -> None:
        """Sends the requests. `timeout` is how long nothing may come, in seconds."""
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = _connection(_WINDOW_MAX)
        connection.increment_flow_control_window(_WINDOW_MAX - _WINDOW_DEFAULT)
        self._data: dict[int, bytearray] = {}
        for index, body in enumerate(bodies):
            stream = 2 * index + 1
            _send_call(connection, stream, path, body)
            self._data[stream] = bytearray()
        self._open = set(self._data)
        self.started = time.perf_counter()
        self._socket.sendall(connection.data_to_send())

    def read(self) -> list[bytearray]:
        """Waits until all have ended; the data of each. Raises CallFailed."""
        buffer = bytearray()
        try:
            while self._open:
                received = self._socket.recv(1 << 18)
                if not received:
                    raise CallFailed("UNAVAILABLE", "the server closed the connection")
                buffer += received
                found, end = frames(buffer)
                for kind, flags, stream, start, stop in found:
                    if kind == _DATA:
                        self._data[stream] += memoryview(buffer)[start:stop]
                    else:
                        self._take(kind, flags, bytes(buffer[start:stop]))
                    if kind in (_DATA, _HEADERS) and flags & _END_STREAM:
                        self._open.discard(stream)
                del buffer[:end]
        except TimeoutError:
            raise CallFailed("TIMEOUT", f"{len(self._open)} streams did not end") from None
        finally:
            self._socket.close()
        return list(self._data.values())

    def _take(self, kind: int, flags: int, payload: bytes) -> None:
        if kind in (_RESET, _GOAWAY):
            what = "a stream" if kind == _RESET else "the connection"
            raise CallFailed("ABORTED", f"the server ended {what}")
        if kind in (_SETTINGS, _PING) and not flags & _ACK:
            answer = payload if kind == _PING else b""
            self._socket.sendall(_HEADER.pack(len(answer) << 8 | kind, _ACK, 0) + answer)


class StalledReader:
    """A connection with one call, of whose answer it never takes a byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._connection = _connection(0)
        self._task: asyncio.Task[None] | None = None
        self.ended = False  # by the server

    @classmethod
    async def call(cls, address: str, path: str, body: bytes) -> StalledReader:
        """Sends the request, and from then on only answers whether anybody is there."""
        host, _, port = address.rpartition(":")
        stalled = cls(*await asyncio.open_connection(host, int(port)))
        _send_call(stalled._connection, 1, path, body)
        await stalled._flush()
        stalled._task = asyncio.create_task(stalled._answer_pings())
        return stalled

    async def close(self) -> None:
        """Goes away."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        self._writer.close()

    async def _answer_pings(self) -> None:
        while received := await self._reader.read(65536):
            events = self._connection.receive_data(received)
            ends = ("StreamReset", "StreamEnded", "ConnectionTerminated")
            if any(type(event).__name__ in ends for event in events):
                break
            await self._flush()
        self.ended = True

    async def _flush(self) -> None:
        self._writer.write(self._connection.data_to_send())
        await self._writer.drain()
