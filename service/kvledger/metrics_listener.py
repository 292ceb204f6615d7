"""Serves metrics over plain HTTP, on an address of their own: `GET /metrics`.

A few threads answer, each for a few seconds at most, so that nobody who connects can keep the
server busy or its descriptors taken.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from kvledger.address import (
    SocketLock,
    for_the_owner_only,
    host_and_port,
    socket_path,
    why_not_free,
)
from kvledger.errors import SettingRefused

# Requests answered at once; one more is closed.
_REQUESTS_MAX = 8
# How long one request may take, in seconds.
_SECONDS_MAX = 5.0
# How often the thread looks whether it is to stop, in seconds.
_POLL_SECONDS = 0.05


class MetricsListener:
    """Answers on one address from its making until `close`."""

    def __init__(self, address: str, registry: CollectorRegistry) -> None:
        """SettingRefused if the address is taken."""
        self._path = socket_path(address)
        self._lock: SocketLock | None = None
        if self._path is not None:
            self._lock = SocketLock.of("--metrics-listen", self._path)
        try:
            if (reason := why_not_free(address)) is not None:
                raise SettingRefused(f"--metrics-listen {address}: {reason}")
            self._server = self._bound(address)
        except BaseException:
            if self._lock is not None:
                self._lock.release()
            raise
        self.address = address
        if self._path is None:
            host = address.rpartition(":")[0]
            self.address = f"{host}:{self._server.server_address[1]}"
        self._server.set_app(make_wsgi_app(registry))
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_SECONDS,), name="metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stops answering; whoever is being answered is cut off."""
        self._server.shutdown()
        self._server.server_close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        if self._lock is not None:
            self._lock.release()

    def _bound(self, address: str) -> WSGIServer:
        try:
            if self._path is None:
                host, port = host_and_port(address)
                kind = _HttpOverIpv6 if ":" in host else _Http
                return kind((host, port), _Handler)
            self._path.unlink(missing_ok=True)  # of a server that was killed
            with for_the_owner_only():
                return _HttpOverUnix(str(self._path), _Handler)
        except OSError as error:
            reason = error.strerror or "cannot be listened on"
            raise SettingRefused(f"--metrics-listen {address}: {reason}") from None


class _Handler(WSGIRequestHandler):
    timeout = _SECONDS_MAX

    def log_message(self, format: str, *arguments: Any) -> None:
        """Says nothing: what is asked for is a stranger's string."""

    def address_string(self) -> str:
        """Nothing: a unix socket's client has no address."""
        return ""


class _Http(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, *arguments: Any) -> None:
        self._places = threading.BoundedSemaphore(_REQUESTS_MAX)
        super().__init__(*arguments)

    def server_bind(self) -> None:
        """Without the lookup of the host's name that http.server makes."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = "kvledger", 0
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answers in a thread if there is one free."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address or ("", 0))

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """One request, from its first byte to its last, within its time."""
        timer = threading.Timer(_SECONDS_MAX, _cut, (request,))
        timer.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            timer.cancel()
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that broke off is no event."""


class _HttpOverIpv6(_Http):
    address_family = socket.AF_INET6


class _HttpOverUnix(_Http):
    address_family = socket.AF_UNIX


def _cut(request: socket.socket) -> None:
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)
