"""Every call on a listener: counted by how it ended, and ended if its client takes nothing.

A client that leaves its stream's window closed keeps a finished handler waiting in a write that
never ends, with the memory behind it and its place on the connection. gRPC has no timeout for that,
and a status would queue up behind the message that does not leave. What ends such a call is to let
go of it: gRPC ends a stream whose call nobody holds any more (seen with grpcio 1.85.3). Two tasks
hold it, the handler's and the one that started that and waits for the client. The loop that takes
calls in holds the last one too: if that is let go, the wire hears of it with the next call.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

import grpc
import structlog

from kvledger.errors import CredentialRevoked, ServerDraining
from kvledger.rpc.errors import abort
from kvledger.tenants.authentication import Identity
from kvledger.tenants.registry import Snapshot
from kvledger.tenants.tenant import Tenant

_log = structlog.get_logger(__name__)

# How long a call may wait for its client after its work is done and the stall timeout has passed,
# in seconds: who comes back in time is still told the status.
GRACE_SECONDS = 3.0
# How often calls are looked at, in seconds.
_INTERVAL = 0.5

# gRPC's coroutine that starts a handler and waits for its client.
_WAITS_FOR_CLIENT = "_schedule_rpc_coro"
# The task that started each task.
_starters: weakref.WeakKeyDictionary[asyncio.Task[Any], weakref.ref[asyncio.Task[Any]]] = (
    weakref.WeakKeyDictionary()
)


def remember_starters(
    loop: asyncio.AbstractEventLoop,
    work: Coroutine[Any, Any, Any] | Generator[Any, Any, Any],
    **options: Any,
) -> asyncio.Task[Any]:
    """A loop's task factory that knows who started a task."""
    # uvloop says what is not asked for, and not every Python's Task takes it.
    given = {name: value for name, value in options.items() if value is not None}
    task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **given)
    starter = asyncio.current_task(loop)
    if starter is not None:
        _starters[task] = weakref.ref(starter)
    return task


class Call:
    """One call that runs."""

    def __init__(self, task: asyncio.Task[Any], context: Any) -> None:
        self._task = task
        self._context: Any = context
        # Since when it waits for its client to take something; None while it does not. A method
        # that writes to its context by itself sets it around each write.
        self.writing_since: float | None = None
        # Whether something is still being done for it, whose own rules say how long.
        self.at_work: Callable[[], bool] = bool
        self._idle_since: float | None = None
        # Who calls, once that is known and while its method runs; None where nobody asks.
        self.identity: Identity | None = None
        # Its caller's credential has been taken back: the method was cancelled for that.
        self.revoked = False

    @property
    def tenant(self) -> Tenant:
        """Whom its caller acts as. Only of methods for clients."""
        assert self.identity is not None, "the method's door is open to anyone"
        assert self.identity.tenant is not None, "the method's door is not for clients"
        return self.identity.tenant

    def revoke(self) -> None:
        """Ends its method, whose client is then told why."""
        self.revoked, self.identity = True, None
        self._task.cancel()

    def is_lost(self, now: float, stall_seconds: float) -> bool:
        """Whether its client has taken nothing for so long that it is let go."""
        if self._context is None:
            return False  # it was let go
        if self.writing_since is None and self._context.done():
            self.writing_since = now  # a status waits behind what was not taken
        if self.writing_since is None or self.at_work():
            self._idle_since = None
            return False
        if self._idle_since is None:
            self._idle_since = now
        return (
            now - self._idle_since >= GRACE_SECONDS
            and now - self.writing_since >= stall_seconds + GRACE_SECONDS
        )

    def let_go(self) -> None:
        """Ends it without its client: the stream is reset."""
        self._context.set_code(grpc.StatusCode.ABORTED)
        starter = _starters.get(self._task)
        waiting = starter() if starter is not None else None
        # Another version of gRPC may start handlers in another way: never cancel its server's loop.
        if waiting is not None and getattr(waiting.get_coro(), "__name__", "") == _WAITS_FOR_CLIENT:
            waiting.cancel()
        self._task.cancel()
        self.forget()

    def forget(self) -> None:
        """Gives up gRPC's call: who still knows this one must not keep the stream."""
        self._context = None
        self.at_work = bool


_this_call: ContextVar[Call] = ContextVar("kvledger_call")


def this_call() -> Call:
    """The call whose handler asks; LookupError outside of one."""
    return _this_call.get()


class Calls(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """The outermost interceptor of a listener. Belongs to the event loop's thread."""

    def __init__(
        self, stall_seconds: float, on_end: Callable[[str, str], None] = lambda method, status: None
    ) -> None:
        """`on_end` is told the method's path and the name of the status, once for each call.

        `stall_seconds` is how long a client may leave what it is sent.
        """
        self._stall_seconds = stall_seconds
        self._on_end = on_end
        self._handlers: dict[str, Any] = {}
        self._open: set[Call] = set()
        self._stopping = asyncio.Event()
        self.taken_count = 0  # calls that gRPC has handed over

    @property
    def open_count(self) -> int:
        """Calls that run."""
        return len(self._open)

    def stop_listening(self) -> None:
        """Ends calls that wait for their clients' next request with UNAVAILABLE."""
        self._stopping.set()

    def end_revoked(self, snapshot: Snapshot) -> None:
        """Ends calls whose callers are not who they were any more."""
        over = [
            call
            for call in self._open
            if call.identity is not None and not call.identity.holds_in(snapshot)
        ]
        for call in over:
            call.revoke()
        if over:
            _log.warning("calls_revoked", calls=len(over))

    async def watch(self) -> None:
        """Lets go of lost calls, until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_INTERVAL)
            if count := self._let_go_of_lost(loop.time()):
                _log.warning("calls_let_go", calls=count, stall_seconds=self._stall_seconds)

    def _let_go_of_lost(self, now: float) -> int:
        lost = [call for call in self._open if call.is_lost(now, self._stall_seconds)]
        for call in lost:
            call.let_go()
        return len(lost)

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """The method's handler with a watch on it; None for an unknown method."""
        self.taken_count += 1
        path = handler_call_details.method
        known = self._handlers.get(path)
        if known is None:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None
            known = self._handlers[path] = self._watched(path, handler)
        return known

    def _watched(self, path: str, handler: Any) -> Any:
        coders = (handler.request_deserializer, handler.response_serializer)
        if handler.request_streaming and handler.response_streaming:
            method = self._streaming(path, self._until_stopped(handler.stream_stream))
            return grpc.stream_stream_rpc_method_handler(method, *coders)
        if handler.response_streaming:
            method = self._streaming(path, handler.unary_stream)
            return grpc.unary_stream_rpc_method_handler(method, *coders)
        assert not handler.request_streaming, "no method streams requests to a single response"
        method = self._single(path, handler.unary_unary)
        return grpc.unary_unary_rpc_method_handler(method, *coders)

    def _single(self, path: str, method: Any) -> Any:
        async def answer(request: Any, context: Any) -> Any:
            call = self._begin(path, context)
            try:
                return await method(request, context)
            except asyncio.CancelledError:
                await _tell_if_revoked(call, context)
                raise
            finally:
                call.identity = None
                # gRPC sends the answer and the status when this is over.
                call.writing_since = asyncio.get_running_loop().time()

        return answer

    def _streaming(self, path: str, method: Any) -> Any:
        writes_itself = inspect.iscoroutinefunction(method)

        async def answers(requests: Any, context: Any) -> None:
            call = self._begin(path, context)
            now = asyncio.get_running_loop().time
            write = context.write
            try:
                if writes_itself:
                    await method(requests, context)
                    return
                made = method(requests, context)
                assert inspect.isasyncgen(made), "streams are generators"
                async with aclosing(made) as responses:
                    async for response in responses:
                        call.writing_since = now()
                        await write(response)
                        call.writing_since = None
            except asyncio.CancelledError:
                await _tell_if_revoked(call, context)
                raise
            finally:
                call.identity = None
                call.writing_since = now()

        return answers

    def _until_stopped(self, method: Any) -> Any:
        async def answers(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
            async def until_stopped() -> AsyncIterator[Any]:
                stopping = asyncio.ensure_future(self._stopping.wait())
                try:
                    while True:
                        request = asyncio.ensure_future(anext(requests, None))
                        try:
                            await asyncio.wait(
                                (request, stopping), return_when=asyncio.FIRST_COMPLETED
                            )
                        finally:
                            request.cancel()
                        if not request.done():
                            await abort(context, ServerDraining())
                        if request.result() is None:
                            return
                        yield request.result()
                finally:
                    stopping.cancel()

            async with aclosing(method(until_stopped(), context)) as responses:
                async for response in responses:
                    yield response

        return answers

    def _begin(self, path: str, context: Any) -> Call:
        task = asyncio.current_task()
        assert task is not None
        call = Call(task, context)
        self._open.add(call)
        _this_call.set(call)
        task.add_done_callback(functools.partial(self._end, path, call, context))
        return call

    def _end(self, path: str, call: Call, context: Any, task: asyncio.Task[Any]) -> None:
        del task
        self._open.discard(call)
        call.forget()
        with contextlib.suppress(Exception):  # the count is no reason for a call to fail
            self._on_end(path, _status_name(context))


async def _tell_if_revoked(call: Call, context: Any) -> None:
    """The status of a method that was cancelled because of its caller's credential."""
    if call.revoked:
        with contextlib.suppress(grpc.aio.UsageError):  # it has a status already
            await abort(context, CredentialRevoked())


def _status_name(context: Any) -> str:
    """What a call ended with, as gRPC names it."""
    code = context.code()
    if code is not None:
        return str(code.name)
    if context.done():
        return "OK"
    # The client went, or its deadline came: gRPC tells the handler only that it is over.
    return "DEADLINE_EXCEEDED" if context.time_remaining() == 0 else "CANCELLED"
