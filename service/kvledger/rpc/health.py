"""grpc.health.v1: how the server and each of its services is, without waiting for who listens.

The library's own service tells its watchers under a lock, which a watcher who reads nothing holds
for ever: then no status changes any more and the server never begins to drain. And its watchers
keep a server that stops waiting for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any, TypeAlias

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvledger.errors import ServerDraining
from kvledger.rpc.errors import abort

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_Status = health_pb2.HealthCheckResponse


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """One status for all services. Belongs to the event loop's thread."""

    def __init__(self, service_names: Iterable[str]) -> None:
        """`service_names` are those that it knows, besides the server itself."""
        self._names = frozenset(("", *service_names))
        self._serving = False
        self._draining = False
        self._closed = False
        # Set and replaced whenever something changes: who waits for it looks again.
        self._changed = asyncio.Event()

    def set_serving(self, serving: bool) -> None:
        """What everybody is told from now on."""
        if serving != self._serving and not self._draining:
            self._serving = serving
            self._wake()

    def drain(self) -> None:
        """NOT_SERVING from now on, whatever else is said."""
        self.set_serving(False)
        self._draining = True

    def close(self) -> None:
        """Ends every Watch with UNAVAILABLE: the server goes."""
        self._closed = True
        self._wake()

    async def Check(  # noqa: N802  # the contract's name
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> health_pb2.HealthCheckResponse:
        """The status now; NOT_FOUND for a service that it does not have."""
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return _Status(status=self._status(request.service))

    async def List(  # noqa: N802  # the contract's name
        self, request: health_pb2.HealthListRequest, context: _Context
    ) -> health_pb2.HealthListResponse:
        """The status of every service."""
        del request, context
        return health_pb2.HealthListResponse(
            statuses={name: _Status(status=self._status(name)) for name in self._names}
        )

    async def Watch(  # noqa: N802  # the contract's name
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The status now and at every change; changes that a slow reader missed are left out."""
        told: int | None = None
        while not self._closed:
            changed = self._changed
            status = self._status(request.service)
            if status != told:
                told = status
                yield _Status(status=status)
            else:
                await changed.wait()
        await abort(context, ServerDraining())

    def _status(self, name: str) -> health_pb2.HealthCheckResponse.ServingStatus:
        if name not in self._names:
            return _Status.SERVICE_UNKNOWN
        return _Status.SERVING if self._serving else _Status.NOT_SERVING

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
