"""The gRPC server on its port or socket, and another one in its place if it breaks.

grpc.aio ends its server, though not the process, when a client calls a method whose name is no
UTF-8 (seen with grpcio 1.85.3). Nothing a client sends may end the service, so a broken server is
replaced within a moment on the same port; calls that run on it go on. With TLS, a handshake gets
the certificate that the files hold at that time; connections that exist keep theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import grpc
import structlog

from kvledger.address import SocketLock, for_the_owner_only, socket_path, why_not_free
from kvledger.certificates import CertificateFiles, CertificateRefused, Certificates
from kvledger.errors import SettingRefused
from kvledger.rpc import connections

_log = structlog.get_logger(__name__)

# How often the server is looked at, in seconds.
_INTERVAL = 0.1
# How often the files of certificates are looked at, in seconds.
_FILES_INTERVAL = 1.0
# How long calls may go on in a server that broke, in seconds.
_BROKEN_GRACE = 24 * 3600.0
# Attempts to take the port again, an interval apart.
_ATTEMPTS = 50


class Listener:
    """Serves on one address until `stop`. Belongs to the event loop's thread."""

    def __init__(
        self,
        address: str,
        make: Callable[[], grpc.aio.Server],
        certificates: CertificateFiles | None = None,
        *,
        option: str = "--listen",
        on_certificate_kept: Callable[[], None] = lambda: None,
    ) -> None:
        """`make` gives a server with all services and no port. SettingRefused if it is taken.

        `option` names the setting that the address comes from; `on_certificate_kept` is called
        once for each change of the certificates' files that could not be used.
        """
        self.address = address
        self._option = option
        self._on_certificate_kept = on_certificate_kept
        self._socket = socket_path(address)
        self._make = make
        self._certificates = certificates
        self._files_seen_at = 0.0
        self._broken: set[asyncio.Task[None]] = set()
        self._retired: set[grpc.aio.Server] = set()
        self._channelz_ids: dict[grpc.aio.Server, int] = {}
        # The most that channelz said of each server, also of those that are gone.
        self._calls_seen: dict[int, int] = {}
        self._lock = SocketLock.of(option, self._socket) if self._socket is not None else None
        try:
            self._server = self._bound()
        except BaseException:
            self._release()
            raise

    @property
    def port(self) -> int:
        """The port that it serves on; 0 for a unix socket."""
        return 0 if self._socket else int(self.address.rpartition(":")[2])

    @property
    def connections_open(self) -> int:
        """Connections that are open now."""
        return sum(connections.open_count(server) for server in list(self._channelz_ids.values()))

    @property
    def calls_come(self) -> int:
        """Calls that ever came, also those that gRPC ended before a handler heard of them."""
        self._count_calls()
        return sum(list(self._calls_seen.values()))

    def _count_calls(self) -> None:
        for number in list(self._channelz_ids.values()):
            known = self._calls_seen.get(number, 0)
            self._calls_seen[number] = max(known, connections.calls_come(number))

    async def start(self) -> None:
        """Begins to serve."""
        await self._server.start()

    async def watch(self) -> None:
        """Replaces the server whenever it breaks; returns once it is stopped.

        Raises SettingRefused if the port cannot be taken again.
        """
        while await self._still_serves():
            self._look_at_files()

    async def stop(self, grace: float) -> None:
        """Refuses new calls and gives running ones `grace` seconds."""
        servers = (self._server, *self._retired)
        await asyncio.gather(*(server.stop(grace) for server in servers))
        self._release()

    async def _still_serves(self) -> bool:
        try:
            timed_out: bool = await self._server.wait_for_termination(_INTERVAL)
        except Exception as error:
            _log.error("listener_broke", error=type(error).__name__)
            await self._replace()
            return True
        return timed_out

    def _bound(self) -> grpc.aio.Server:
        if self._socket is not None and (reason := why_not_free(self.address)) is not None:
            # gRPC would take the file away from a server that lives.
            raise SettingRefused(f"{self._option} {self.address}: {reason}")
        server = self._make()
        self._channelz_ids[server] = connections.newest_server()
        mode = for_the_owner_only() if self._socket is not None else contextlib.nullcontext()
        with mode, contextlib.suppress(RuntimeError):
            if port := self._add_port(server):
                if self._socket is None:
                    self.address = f"{self.address.rpartition(':')[0]}:{port}"
                return server
        raise SettingRefused(
            f"{self._option} {self.address}: the address is in use or not this machine's"
            + (", or gRPC cannot use the certificate" if self._certificates else "")
        )

    def _add_port(self, server: grpc.aio.Server) -> int:
        """The port, or for a socket something that is not 0; 0 or RuntimeError if it cannot be."""
        if self._certificates is None:
            return int(server.add_insecure_port(self.address))
        return int(server.add_secure_port(self.address, _credentials(self._certificates)))

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _look_at_files(self) -> None:
        """Takes over certificates that changed; says so, or why not, once per change."""
        now = asyncio.get_running_loop().time()
        if self._certificates is None or now < self._files_seen_at + _FILES_INTERVAL:
            return
        self._files_seen_at = now
        try:
            if self._certificates.refresh():
                _log.info("certificate_reloaded")
                warn_of_validity(self._certificates)
        except CertificateRefused as refused:
            self._on_certificate_kept()
            _log.warning("certificate_kept", kind=refused.kind, reason=str(refused))

    async def _replace(self) -> None:
        broken = self._server
        self._count_calls()  # channelz forgets the server with its end
        self._retired.add(broken)
        task = asyncio.create_task(broken.stop(_BROKEN_GRACE))
        self._broken.add(task)

        def forget(task: asyncio.Task[None]) -> None:
            self._broken.discard(task)
            self._retired.discard(broken)
            self._channelz_ids.pop(broken, None)

        task.add_done_callback(forget)
        await self._take_port_again()
        await self._server.start()

    async def _take_port_again(self) -> None:
        for _ in range(_ATTEMPTS):
            # The broken server takes its socket's file away; a new one there would go with it.
            if self._socket is None or not self._socket.exists():
                with contextlib.suppress(SettingRefused):
                    self._server = self._bound()
                    return
            await asyncio.sleep(_INTERVAL)
        self._server = self._bound()


def warn_of_validity(files: CertificateFiles) -> None:
    """Says in the log if the certificate in use has expired, or soon will, or is not valid yet."""
    validity = files.current.validity
    if (kind := validity.why_not_well()) is not None:
        _log.warning(
            "certificate_expiry",
            kind=kind,
            not_before=validity.begins.isoformat(),
            not_after=validity.ends.isoformat(),
        )


def _credentials(files: CertificateFiles) -> grpc.ServerCredentials:
    """Credentials that follow the files; for one server."""
    used = files.current

    def newer() -> grpc.ServerCertificateConfiguration | None:
        """gRPC asks before every handshake, on a thread of its own and one at a time."""
        nonlocal used
        current = files.current
        if current is used:
            return None
        used = current
        return _configuration(current)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(used), newer, require_client_authentication=used.client_ca is not None
    )


def _configuration(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(certificates.key, certificates.chain)], root_certificates=certificates.client_ca
    )
