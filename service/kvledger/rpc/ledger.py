"""LedgerService: the books, for operators; a tenant's own account, for its clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import grpc

from kvledger.admission import Admission
from kvledger.books.account_names import AccountNames
from kvledger.books.process_memory import ProcessMemory
from kvledger.books.reader import BooksReader
from kvledger.books.snapshot import Account, Balance, Snapshot
from kvledger.errors import FieldViolation, InvalidRequest, ServerDraining, TenantUnknown
from kvledger.metrics.clock import BooksClock
from kvledger.rpc.calls import this_call
from kvledger.rpc.errors import abort
from kvledger.rpc.translation import block_time, duration
from kvledger.scopes.keys import Owner, ScopeKind
from kvledger.tenants.roles import Role
from kvledger.tenants.shares import PoolShape
from kvledger.tenants.usage import Phase, TenantUsage
from kvledger.v1 import ledger_pb2, ledger_pb2_grpc

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_NANOS = 1_000_000_000
# From one message of WatchLedger to the next, in seconds.
_INTERVAL = 1.0
_INTERVAL_LEAST = 0.1
_INTERVAL_MOST = 3600.0

_KINDS = {
    ScopeKind.GROUP: ledger_pb2.SCOPE_KIND_GROUP,
    ScopeKind.PUBLIC: ledger_pb2.SCOPE_KIND_PUBLIC,
}


@dataclass(frozen=True)
class _Facts:
    """What the event loop knows of a tenant besides its account."""

    name: str
    is_served: bool
    held: int  # requests at the door
    queued: int  # requests in the core that never ran
    guaranteed: int
    most: int | None  # blocks; None: as many as there are


class LedgerServicer(ledger_pb2_grpc.LedgerServiceServicer):
    """See LedgerService in the contract. Belongs to the event loop's thread."""

    def __init__(
        self,
        reader: BooksReader,
        names: AccountNames,
        admission: Admission,
        memory: ProcessMemory,
        pool: PoolShape,
        kv_format: str,
        clock: BooksClock,
    ) -> None:
        """`clock` counts what making messages takes."""
        self._reader = reader
        self._names = names
        self._admission = admission
        self._memory = memory
        self._pool = pool
        self._kv_format = kv_format
        self._clock = clock
        self._closing = asyncio.Event()
        # The last snapshot that was asked for, and its message: whoever watches shares it.
        self._made: tuple[Snapshot, asyncio.Task[ledger_pb2.Ledger]] | None = None

    def close(self) -> None:
        """Ends every WatchLedger with UNAVAILABLE: the server goes."""
        self._closing.set()

    async def GetLedger(  # noqa: N802  # the contract's name
        self, request: ledger_pb2.GetLedgerRequest, context: _Context
    ) -> ledger_pb2.GetLedgerResponse:
        """The books now."""
        del request
        try:
            return ledger_pb2.GetLedgerResponse(ledger=await self._ledger())
        except Exception as error:
            await abort(context, error)

    async def WatchLedger(  # noqa: N802  # the contract's name
        self, request: ledger_pb2.WatchLedgerRequest, context: _Context
    ) -> AsyncIterator[ledger_pb2.WatchLedgerResponse]:
        """The books now and at intervals. While a message is not taken, none is made."""
        now = asyncio.get_running_loop().time
        try:
            interval = _interval(request)
            while not self._closing.is_set():
                due = now() + interval
                yield ledger_pb2.WatchLedgerResponse(ledger=await self._ledger())
                closing = asyncio.ensure_future(self._closing.wait())
                try:
                    await asyncio.wait((closing,), timeout=max(0.0, due - now()))
                finally:
                    closing.cancel()
            raise ServerDraining
        except Exception as error:
            await abort(context, error)

    async def GetStatement(  # noqa: N802  # the contract's name
        self, request: ledger_pb2.GetStatementRequest, context: _Context
    ) -> ledger_pb2.GetStatementResponse:
        """One tenant's account."""
        try:
            # Before the engine is asked: what is refused takes no time that could tell anything.
            name, number = self._tenant(request.tenant)
            books = await self._reader.read()
            with self._clock.counting("looks"):
                statement = self._statement(name, number, books)
            return ledger_pb2.GetStatementResponse(statement=statement)
        except Exception as error:
            await abort(context, error)

    def _tenant(self, asked: str) -> tuple[str, int]:
        """The name and the number of a tenant that the caller may ask about."""
        call = this_call()
        assert call.identity is not None, "the method's door is open to anyone"
        if call.identity.role is Role.CLIENT:
            # Nothing is looked up: a name that is not its own is like any other.
            own = call.tenant
            if asked not in ("", own.name):
                raise TenantUnknown
            return own.name, own.number
        if not asked:
            raise InvalidRequest(FieldViolation("tenant", "is empty; name the tenant"))
        number = self._names.number_of(asked)
        if number is None:
            raise TenantUnknown
        return asked, number

    def _statement(self, name: str, number: int, books: Snapshot) -> ledger_pb2.Statement:
        account, usage = books.account(number), self._admission.usage_of(number)
        return ledger_pb2.Statement(
            tenant=name,
            elapsed=duration(books.elapsed),
            held=_balance(account.held),
            reserved=_balance(account.reserved),
            cached=_balance(account.cached),
            closed_held=block_time(account.closed_held),
            open_requests=account.open_requests,
            waiting_requests=0 if usage is None else usage.counts[Phase.HELD],
            block_bytes=self._pool.block_bytes,
        )

    async def _ledger(self) -> ledger_pb2.Ledger:
        snapshot = await self._reader.read()
        if self._made is None or self._made[0] is not snapshot:
            making = asyncio.ensure_future(self._make(snapshot))
            self._made = snapshot, making
        # One caller that goes must not take the message from the others.
        return await asyncio.shield(self._made[1])

    async def _make(self, books: Snapshot) -> ledger_pb2.Ledger:
        with self._clock.counting("looks"):
            facts = {usage.number: self._facts(usage) for usage in self._admission.usages}
            message = ledger_pb2.Ledger(
                elapsed=duration(books.elapsed),
                pool=_pool_account(books, self._pool),
                formats=[
                    ledger_pb2.FormatAccount(
                        format=self._kv_format,
                        slots_per_block=self._pool.slots_per_block,
                        held=_balance(books.states["held"]),
                        cached=_balance(books.states["cached"]),
                    )
                ],
                memory=self._memory_message(),
            )
        # There may be many thousands of tenants, and streams that must not wait for them.
        await asyncio.to_thread(
            self._clock.counted("looks", self._add_accounts), message, books, facts
        )
        return message

    def _facts(self, usage: TenantUsage) -> _Facts:
        share, most, guaranteed = usage.share, None, 0
        if share is not None:
            most = None if share.max_blocks >= self._pool.blocks else share.max_blocks
            guaranteed = share.guaranteed_blocks
        held, queued = usage.counts[Phase.HELD], usage.counts[Phase.WAITING]
        return _Facts(usage.name, not usage.is_closed, held, queued, guaranteed, most)

    def _add_accounts(
        self, message: ledger_pb2.Ledger, books: Snapshot, facts: Mapping[int, _Facts]
    ) -> None:
        left = dict(facts)
        for account in books.accounts():
            if account.is_shared_scope:
                message.scopes.append(_scope_account(account, self._names.of_scope(account.number)))
            else:
                found = left.pop(account.number, None) or self._gone(account.number)
                message.tenants.append(_tenant_account(account, found))
        message.tenants.extend(
            _tenant_account(Account(number), found)
            for number, found in left.items()
            if found.guaranteed or found.held or found.queued
        )
        message.tenants.sort(key=lambda tenant: tenant.number)

    def _gone(self, number: int) -> _Facts:
        """A tenant that may not enter any more, or never could."""
        names = self._names
        return _Facts(names.of_tenant(number), names.is_served(number), 0, 0, 0, None)

    def _memory_message(self) -> ledger_pb2.ProcessMemory:
        parts = self._memory.parts()
        return ledger_pb2.ProcessMemory(resident=parts.resident, **asdict(parts))


def _interval(request: ledger_pb2.WatchLedgerRequest) -> float:
    """Seconds. Raises InvalidRequest."""
    if not request.HasField("interval"):
        return _INTERVAL
    seconds = float(request.interval.seconds + request.interval.nanos / _NANOS)
    if not _INTERVAL_LEAST <= seconds <= _INTERVAL_MOST:
        reason = f"{seconds:g} s, allowed are {_INTERVAL_LEAST:g} s to {_INTERVAL_MOST:g} s"
        raise InvalidRequest(FieldViolation("interval", reason))
    return seconds


def _balance(balance: Balance) -> ledger_pb2.Balance:
    return ledger_pb2.Balance(blocks=balance.blocks, time=block_time(balance.time))


def _pool_account(books: Snapshot, pool: PoolShape) -> ledger_pb2.PoolAccount:
    return ledger_pb2.PoolAccount(
        blocks=books.blocks,
        block_bytes=pool.block_bytes,
        waterline=books.waterline,
        empty_slots=books.empty_slots,
        held_slots=books.states["held"].blocks * pool.slots_per_block,
        **{state: _balance(balance) for state, balance in books.states.items()},
    )


def _tenant_account(account: Account, facts: _Facts) -> ledger_pb2.TenantAccount:
    return ledger_pb2.TenantAccount(
        name=facts.name,
        number=account.number,
        is_served=facts.is_served,
        held=_balance(account.held),
        reserved=_balance(account.reserved),
        cached=_balance(account.cached),
        open_requests=account.open_requests,
        waiting_requests=facts.held,
        queued_requests=facts.queued,
        closed_held=block_time(account.closed_held),
        guaranteed_blocks=facts.guaranteed,
        max_blocks=facts.most,
    )


def _scope_account(account: Account, owner: Owner | None) -> ledger_pb2.ScopeAccount:
    return ledger_pb2.ScopeAccount(
        kind=ledger_pb2.SCOPE_KIND_UNSPECIFIED if owner is None else _KINDS[owner.kind],
        name="" if owner is None else owner.name,
        number=account.number,
        held=_balance(account.held),
        cached=_balance(account.cached),
    )
