"""Whose work is next where several clients want what only few can have at once."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager

_Futures = deque[asyncio.Future[None]]


class Turns:
    """Lets some at once into a piece of work, one of each client: tenants in turn, and of each
    tenant its clients in turn.

    A client that sends work without end keeps one place busy and makes nobody else wait for more
    than the work that runs; a tenant with many clients has no more turns than one with few.
    Belongs to the event loop's thread.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        # Tenants and clients that have a place.
        self._inside: set[tuple[int, Hashable]] = set()
        # Tenants that wait, the next one first; each with its clients, the next one first, and
        # each of these with its own in their order. Neither a tenant nor a client has nothing.
        self._waiting: dict[int, dict[Hashable, _Futures]] = {}

    def waiting(self, tenant: int, client: Hashable) -> int:
        """How much of a client's work waits."""
        line = self._waiting.get(tenant, {}).get(client, ())
        return sum(not turn.cancelled() for turn in line)

    @asynccontextmanager
    async def turn(self, tenant: int, client: Hashable) -> AsyncIterator[None]:
        """Waits for a place, and has it."""
        if (tenant, client) in self._inside or len(self._inside) >= self._places:
            await self._wait(tenant, client)
        else:
            self._inside.add((tenant, client))
        try:
            yield
        finally:
            self._inside.discard((tenant, client))
            self._let_in()

    async def _wait(self, tenant: int, client: Hashable) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, {}).setdefault(client, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._leave(tenant, client, turn)
            else:  # the place was given in this very moment
                self._inside.discard((tenant, client))
            self._let_in()
            raise

    def _leave(self, tenant: int, client: Hashable, turn: asyncio.Future[None]) -> None:
        clients = self._waiting.get(tenant, {})
        line = clients.get(client, deque())
        if turn not in line:
            return  # it was passed over between its cancellation and now
        line.remove(turn)
        if not line:
            del clients[client]
        if not clients:
            del self._waiting[tenant]

    def _let_in(self) -> None:
        while len(self._inside) < self._places and (found := self._next()) is not None:
            tenant, client = found
            clients = self._waiting[tenant]
            mine = deque(turn for turn in clients.pop(client) if not turn.cancelled())
            if mine:
                self._inside.add(found)
                mine.popleft().set_result(None)
                # Its next work waits behind everybody else's.
                self._waiting[tenant] = self._waiting.pop(tenant)
            if mine:
                clients[client] = mine
            if not clients:
                del self._waiting[tenant]

    def _next(self) -> tuple[int, Hashable] | None:
        """Whose turn it is: of the tenants with fewest places, the one that waited longest."""
        has = Counter(tenant for tenant, _ in self._inside)
        for tenant in sorted(self._waiting, key=has.__getitem__):
            for client in self._waiting[tenant]:
                if (tenant, client) not in self._inside:
                    return tenant, client
        return None
