"""All that a server shows the world: its clients' listener, its operators', and their health.

The clients' listener has nothing of the operators' on it, and the operators' answers while the
clients' is full.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from kvledger.address import operators_address
from kvledger.metrics import Metrics
from kvledger.rpc import connections
from kvledger.rpc.calls import Calls, remember_starters
from kvledger.rpc.doors import Port
from kvledger.rpc.hang_up import hang_up
from kvledger.rpc.health import HealthServicer
from kvledger.rpc.listener import Listener, warn_of_validity
from kvledger.rpc.services import Service, channelz_service, health_service, maker, names
from kvledger.settings import NOWHERE, Settings
from kvledger.tenants.authentication import Authenticator
from kvledger.tenants.registry import Registry, Snapshot

_log = structlog.get_logger(__name__)

# How often it is looked whether the last calls have ended, and what gRPC gets to write their last
# bytes, in seconds.
_STOP_INTERVAL = 0.02

# Calls of clients are counted, those of probes and tools are not.
_COUNTED = "/kvledger."


class Front:
    """The listeners of one server. Belongs to the event loop's thread."""

    def __init__(
        self,
        settings: Settings,
        services: Sequence[Service],
        metrics: Metrics,
        registry: Registry,
        keepalive: connections.Keepalive = connections.KEEPALIVE,
        *,
        operators_services: Sequence[Service] = (),
    ) -> None:
        """`services` are those of clients; health, reflection and channelz come by themselves.

        Callers are those of the registry; who is so no more loses its calls.

        Raises LookupError for a method without a row in the table of doors.
        """
        self._settings = settings
        self._metrics = metrics
        reflects = settings.reflects
        ours = [service.descriptor.full_name for service in services]
        self.health = HealthServicer(
            [*ours, *names([health_service(HealthServicer(()))], reflects=reflects)]
        )
        health = health_service(self.health)
        self._calls = Calls(settings.stall_timeout, self._count)
        self._make_clients = maker(
            Port.CLIENTS,
            [*services, health],
            self._calls,
            Authenticator(registry, settings.transport),
            reflects=reflects,
            connections_max=settings.max_connections,
            keepalive=keepalive,
            queued_max=settings.max_queued,
        )
        self._operators_calls = Calls(settings.stall_timeout)
        self._make_operators = maker(
            Port.OPERATORS,
            [health, channelz_service(), *operators_services],
            self._operators_calls,
            Authenticator(registry, settings.operators_transport),
            reflects=reflects,
            connections_max=connections.OPERATOR_CONNECTIONS_MAX,
            keepalive=keepalive,
        )
        registry.subscribe(self._end_revoked)
        self._clients: Listener | None = None
        self._operators: Listener | None = None

    @property
    def clients(self) -> Listener:
        """The clients' listener, once it has started."""
        assert self._clients is not None
        return self._clients

    @property
    def operators(self) -> Listener | None:
        """The operators' listener, if there is one."""
        return self._operators

    async def start(self) -> None:
        """Takes the addresses and begins to serve. SettingRefused if one is taken."""
        asyncio.get_running_loop().set_task_factory(remember_starters)
        settings, kept = self._settings, self._metrics.certificate_kept
        files = settings.certificates()
        operators_files = settings.operators_certificates()
        self._clients = Listener(
            settings.listen, self._make_clients, files, on_certificate_kept=kept
        )
        try:
            await self._clients.start()
            if (address := self._operators_address()) is not None:
                self._operators = Listener(
                    address,
                    self._make_operators,
                    operators_files,
                    option="--operators-listen",
                    on_certificate_kept=kept if files is None else lambda: None,
                )
                await self._operators.start()
        except BaseException:
            await self._clients.stop(0)
            raise
        if (used := files or operators_files) is not None:
            warn_of_validity(used)
            self._metrics.watch(
                "kvledger_certificate_expiry_timestamp_seconds",
                "When the certificate in use, or one of its chain, expires.",
                lambda: used.current.validity.ends.timestamp(),
            )
        self._metrics.watch(
            "kvledger_connections_open",
            "Connections of clients.",
            lambda: self.clients.connections_open,
        )
        self._metrics.watch(
            "kvledger_calls_not_taken",
            "Calls of clients that came and were never taken in, and those that wait for it now.",
            # In this order: what comes in between counts as taken.
            lambda: max(0, self.clients.calls_come - self._calls.taken_count),
        )
        self._metrics.watch(
            "kvledger_connections_limit",
            "Most connections of clients; one more is closed.",
            lambda: settings.max_connections,
        )

    async def watch(self) -> None:
        """Mends what breaks and ends what is lost. SettingRefused if an address is lost."""
        watches = [self._clients, self._operators, self._calls, self._operators_calls]
        tasks = [asyncio.ensure_future(each.watch()) for each in watches if each is not None]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def stop(self, grace: float) -> None:
        """Ends what only waits, gives the rest `grace` seconds, and leaves the addresses."""
        self.health.close()
        kinds = (self._calls, self._operators_calls)
        for calls in kinds:
            calls.stop_listening()
        ends = asyncio.get_running_loop().time() + grace
        while any(calls.open_count for calls in kinds):
            if asyncio.get_running_loop().time() >= ends:
                break
            await asyncio.sleep(_STOP_INTERVAL)
        await asyncio.sleep(_STOP_INTERVAL)
        listeners = [each for each in (self._clients, self._operators) if each is not None]
        for listener in listeners:
            hang_up(listener.address)
        # Nobody hears more of this server: what still runs is only to be cleared away.
        await asyncio.gather(*(each.stop(0) for each in listeners))

    def _end_revoked(self, old: Snapshot, new: Snapshot) -> None:
        del old  # also a token that has expired changes who its callers are
        for calls in (self._calls, self._operators_calls):
            calls.end_revoked(new)

    def _operators_address(self) -> str | None:
        asked = self._settings.operators_listen
        if asked is not None:
            return None if asked == NOWHERE else asked
        found = operators_address(self.clients.address)
        if found is None:
            _log.warning(
                "no_operators_listener",
                reason="no folder for its socket; give --operators-listen unix:/path, or none",
            )
        return found

    def _count(self, method: str, status: str) -> None:
        if method.startswith(_COUNTED):
            self._metrics.request_ended(status)
