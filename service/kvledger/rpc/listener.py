"""The gRPC server on its port, and another one in its place if it breaks.

grpc.aio ends its server, though not the process, when a client calls a method whose name is no
UTF-8 (seen with grpcio 1.85.3). Nothing a client sends may end the service, so a broken server is
replaced within a moment on the same port; calls that run on it go on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import grpc
import structlog

from kvledger.errors import SettingRefused

_log = structlog.get_logger(__name__)

# How often the server is looked at, in seconds.
_INTERVAL = 0.1
# How long calls may go on in a server that broke, in seconds.
_BROKEN_GRACE = 24 * 3600.0
# Attempts to take the port again, an interval apart.
_ATTEMPTS = 50


class Listener:
    """Serves on one address until `stop`. Belongs to the event loop's thread."""

    def __init__(self, address: str, make: Callable[[], grpc.aio.Server]) -> None:
        """`make` gives a server with all services and no port."""
        self._host = address.rpartition(":")[0]
        self._make = make
        self._broken: set[asyncio.Task[None]] = set()
        self._retired: set[grpc.aio.Server] = set()
        self.port = int(address.rpartition(":")[2])
        self._server = self._bound()

    async def start(self) -> None:
        """Begins to serve."""
        await self._server.start()

    async def watch(self) -> None:
        """Replaces the server whenever it breaks; returns once it is stopped.

        Raises SettingRefused if the port cannot be taken again.
        """
        while await self._still_serves():
            pass

    async def stop(self, grace: float) -> None:
        """Refuses new calls and gives running ones `grace` seconds."""
        servers = (self._server, *self._retired)
        await asyncio.gather(*(server.stop(grace) for server in servers))

    async def _still_serves(self) -> bool:
        try:
            timed_out: bool = await self._server.wait_for_termination(_INTERVAL)
        except Exception as error:
            _log.error("listener_broke", error=type(error).__name__)
            await self._replace()
            return True
        return timed_out

    def _bound(self) -> grpc.aio.Server:
        server = self._make()
        address = f"{self._host}:{self.port}"
        try:
            port = server.add_insecure_port(address)
        except RuntimeError:
            port = 0
        if port == 0:
            raise SettingRefused(f"--listen {address}: the address is in use or not this machine's")
        self.port = port
        return server

    async def _replace(self) -> None:
        broken = self._server
        self._retired.add(broken)
        task = asyncio.create_task(broken.stop(_BROKEN_GRACE))
        self._broken.add(task)

        def forget(task: asyncio.Task[None]) -> None:
            self._broken.discard(task)
            self._retired.discard(broken)

        task.add_done_callback(forget)
        await self._take_port_again()
        await self._server.start()

    async def _take_port_again(self) -> None:
        for _ in range(_ATTEMPTS):
            with contextlib.suppress(SettingRefused):
                self._server = self._bound()
                return
            await asyncio.sleep(_INTERVAL)
        self._server = self._bound()
