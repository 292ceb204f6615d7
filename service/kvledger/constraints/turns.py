"""Whose work is next where several clients want what only few can have at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager


class Turns:
    """Lets some at once into a piece of work, one of each client, clients in turn.

    Who sends work without end keeps one place busy and makes nobody else wait for more than the
    work that runs. Belongs to the event loop's thread.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._inside: set[Hashable] = set()
        # Clients that wait, the next one first; each with its own in their order.
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}

    def waiting(self, client: Hashable) -> int:
        """How much of a client's work waits."""
        return sum(not turn.cancelled() for turn in self._waiting.get(client, ()))

    @asynccontextmanager
    async def turn(self, client: Hashable) -> AsyncIterator[None]:
        """Waits for a place, and has it."""
        if client in self._inside or len(self._inside) >= self._places:
            await self._wait(client)
        else:
            self._inside.add(client)
        try:
            yield
        finally:
            self._inside.discard(client)
            self._let_in()

    async def _wait(self, client: Hashable) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the place was given in this very moment
                self._inside.discard(client)
            elif turn in self._waiting.get(client, ()):
                self._waiting[client].remove(turn)
            self._let_in()
            raise

    def _let_in(self) -> None:
        for client in [c for c in self._waiting if c not in self._inside]:
            if len(self._inside) >= self._places:
                return
            # Its next work waits behind everybody else's.
            mine = deque(turn for turn in self._waiting.pop(client) if not turn.cancelled())
            if mine:
                self._inside.add(client)
                mine.popleft().set_result(None)
            if mine:
                self._waiting[client] = mine
