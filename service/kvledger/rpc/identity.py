"""Who calls: asked of every call whose door is not open to anyone, before it is decoded."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import grpc

from kvledger.errors import ActingRefused, NotAuthenticated, RoleMissing
from kvledger.rpc.calls import this_call
from kvledger.rpc.doors import Port, role_for
from kvledger.rpc.errors import abort
from kvledger.tenants.authentication import Authenticator
from kvledger.tenants.roles import Role

# gRPC's names for what it found in a client's certificate, and ours. The lists are typed: a host
# cannot be taken for a URI that is written like it.
_CERTIFICATE_NAMES = (("peer_dns", "dns:"), ("peer_uri", "uri:"), ("x509_common_name", "cn:"))

_REFUSALS = (NotAuthenticated, RoleMissing, ActingRefused)


class IdentityRequired(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses who is not known, or may not; the call of a handler then has the caller.

    Stands between `Calls`, which it tells, and what decodes requests.
    """

    def __init__(self, authenticator: Authenticator, port: Port) -> None:
        """`port` is whose listener it stands on: roles may differ between the two."""
        self._authenticator = authenticator
        self._port = port
        self._handlers: dict[str, Any] = {}

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """The method's handler with a look at the caller before it; None for an unknown method."""
        path = handler_call_details.method
        known = self._handlers.get(path)
        if known is None:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None
            role = role_for(path, self._port)
            known = handler if role is Role.ANYONE else self._guarded(handler, role)
            self._handlers[path] = known
        return known

    def _guarded(self, handler: Any, role: Role) -> Any:
        assert not handler.request_streaming, "no method with a role streams requests"
        # Of a stranger's message nothing is decoded: gRPC hands over its bytes.
        decode, encode = handler.request_deserializer, handler.response_serializer
        if handler.response_streaming:
            method = self._stream(handler.unary_stream, role, decode)
            return grpc.unary_stream_rpc_method_handler(method, None, encode)
        method = self._single(handler.unary_unary, role, decode)
        return grpc.unary_unary_rpc_method_handler(method, None, encode)

    def _single(self, method: Any, role: Role, decode: Callable[[bytes], Any]) -> Any:
        async def answer(data: bytes, context: Any) -> Any:
            try:
                self._admit(role, context)
            except _REFUSALS as refusal:
                await abort(context, refusal)
            return await method(decode(data), context)

        return answer

    def _stream(self, method: Any, role: Role, decode: Callable[[bytes], Any]) -> Any:
        if inspect.iscoroutinefunction(method):
            return self._single(method, role, decode)  # it writes its answers to the context

        def answers(data: bytes, context: Any) -> AsyncIterator[Any]:
            # The method's own generator: one around it would cost every message of every stream.
            try:
                self._admit(role, context)
            except _REFUSALS as refusal:
                return _refuse(refusal, context)
            responses: AsyncIterator[Any] = method(decode(data), context)
            return responses

        return answers

    def _admit(self, role: Role, context: Any) -> None:
        this_call().identity = self._authenticator.identify(
            role, context.invocation_metadata(), lambda: _certificate_names(context)
        )


def _certificate_names(context: Any) -> Iterator[str]:
    """The names in the certificate that the caller showed, which gRPC has verified."""
    shown = context.auth_context()
    for key, kind in _CERTIFICATE_NAMES:
        for name in shown.get(key, ()):
            yield kind + name.decode("utf-8", "replace")


async def _refuse(refusal: Exception, context: Any) -> AsyncIterator[Any]:
    await abort(context, refusal)
    yield  # never comes here, and makes it a generator
