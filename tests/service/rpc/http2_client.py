"""A gRPC client of bare HTTP/2 frames, which decides itself how much it lets the server send."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import h2.config
import h2.connection
import h2.events
import h2.settings
from google.protobuf.message import Message

GENERATE = "/kvledger.v1.GenerationService/Generate"


class Http2Client:
    """One connection with one call; its stream's window is closed until `open_window`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        config = h2.config.H2Configuration(client_side=True, header_encoding="utf-8")
        self._http2 = h2.connection.H2Connection(config)
        self.data = b""
        self.trailers: dict[str, str] = {}
        self.reset: int | None = None
        self.ended = False
        self.goaway: int | None = None
        self.pongs = 0
        self._stream = 1

    @classmethod
    async def call(
        cls,
        address: str,
        request: Message,
        path: str = GENERATE,
        *,
        closed: bool = True,
        metadata: Sequence[tuple[str, str | bytes]] = (),
    ) -> Http2Client:
        """Sends a request and reads nothing of the answer, which it lets nothing of through.

        Unless it is not `closed`: then the window is as large as HTTP/2 has it.
        """
        host, _, port = address.rpartition(":")
        client = cls(*await asyncio.open_connection(host, int(port)))
        http2 = client._http2
        if closed:
            http2.local_settings = h2.settings.Settings(
                client=True, initial_values={h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 0}
            )
        http2.initiate_connection()
        headers = [
            *((":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "test")),
            *(("content-type", "application/grpc"), ("te", "trailers")),
            *metadata,
        ]
        http2.send_headers(client._stream, headers)
        body = request.SerializeToString()
        frame = b"\0" + len(body).to_bytes(4, "big") + body
        http2.send_data(client._stream, frame, end_stream=True)
        await client._flush()
        return client

    async def ping(self) -> None:
        """Asks whether the server is there."""
        self._http2.ping(b"kvledger")
        await self._flush()

    async def open_window(self, size: int) -> None:
        """Lets the server send so many more bytes."""
        self._http2.increment_flow_control_window(size, stream_id=self._stream)
        await self._flush()

    async def read_until_closed(self) -> None:
        """Takes everything until the stream or the connection ends."""
        while not self.trailers and self.reset is None and self.goaway is None:
            if not await self.read_some():
                return

    async def read_some(self) -> bool:
        """Takes what comes next; False at the end of the connection."""
        received = await self._reader.read(65536)
        for event in self._http2.receive_data(received):
            self._take(event)
        await self._flush()
        return bool(received)

    async def close(self) -> None:
        """Goes away."""
        self._writer.close()

    def _take(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.DataReceived):
            self.data += event.data or b""
        elif isinstance(event, h2.events.ResponseReceived):
            headers: dict[str, str] = dict(event.headers or ())  # type: ignore[arg-type]
            if "grpc-status" in headers:
                self.trailers = headers  # a refusal has no others
        elif isinstance(event, h2.events.TrailersReceived):
            self.trailers = dict(event.headers or ())  # type: ignore[arg-type]
        elif isinstance(event, h2.events.StreamReset):
            self.reset = event.error_code
        elif isinstance(event, h2.events.StreamEnded):
            self.ended = True
        elif isinstance(event, h2.events.PingAckReceived):
            self.pongs += 1
        elif isinstance(event, h2.events.ConnectionTerminated):
            self.goaway = int(event.error_code or 0)

    async def _flush(self) -> None:
        self._writer.write(self._http2.data_to_send())
        await self._writer.drain()
