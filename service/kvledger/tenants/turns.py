"""Work that is done one piece at a time, for tenants in turn."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """A line for each tenant; whose turn it is goes round. Belongs to the event loop's thread.

    However much a tenant has in its line, another waits for one piece of it at most.
    """

    def __init__(self) -> None:
        self._is_taken = False
        # By tenant, the one whose turn is next first; no line is empty.
        self._lines: OrderedDict[int, OrderedDict[asyncio.Future[None], None]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, tenant: int) -> AsyncIterator[None]:
        """Waits for a turn of the tenant's, and has it."""
        if self._is_taken:
            await self._wait(tenant)
        self._is_taken = True
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, tenant: int) -> None:
        called: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(tenant, OrderedDict())[called] = None
        try:
            await called
        except asyncio.CancelledError:
            if called.cancelled():
                self._leave(tenant, called)
            else:
                self._pass_on()  # it was called, and went before it could come
            raise

    def _leave(self, tenant: int, called: asyncio.Future[None]) -> None:
        line = self._lines.get(tenant)
        if line is None or called not in line:
            return  # it was passed over between its cancellation and now
        del line[called]
        if not line:
            del self._lines[tenant]

    def _pass_on(self) -> None:
        while self._lines:
            tenant, line = self._lines.popitem(last=False)
            called, _ = line.popitem(last=False)
            if line:
                self._lines[tenant] = line
            if not called.cancelled():
                called.set_result(None)
                return
        self._is_taken = False
