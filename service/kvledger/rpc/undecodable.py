"""Requests that are not to be decoded: INVALID_ARGUMENT, like any other mistake.

They are no message of their method's type, for which gRPC itself would answer UNKNOWN with the text
of a Python exception, or hold lists so long that decoding them would take much memory.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from kvledger.errors import FieldViolation, InvalidRequest
from kvledger.rpc.errors import abort
from kvledger.rpc.item_counts import too_many_items


class UndecodableRefused(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses what cannot be decoded, before the method sees it."""

    def __init__(self) -> None:
        self._handlers: dict[str, Any] = {}

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """The method's handler with a decoder that does not raise; None for an unknown method."""
        known = self._handlers.get(handler_call_details.method)
        if known is None:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None
            known = self._handlers[handler_call_details.method] = _careful(handler)
        return known


class _Undecodable:
    """Stands for a request that was not decoded."""

    def __init__(self, violation: FieldViolation) -> None:
        self.violation = violation


_NO_MESSAGE = FieldViolation("request", "is no message of the type that the method takes")


def _careful(handler: Any) -> Any:
    deserializer = handler.request_deserializer
    kind = getattr(getattr(deserializer, "__self__", None), "DESCRIPTOR", None)
    assert kind is not None, "the deserializer is a message class's own"

    def decode(data: bytes) -> Any:
        violation = too_many_items(data, kind)
        if violation is not None:
            return _Undecodable(violation)
        try:
            return deserializer(data)
        except DecodeError:
            return _Undecodable(_NO_MESSAGE)

    coders = (decode, handler.response_serializer)
    if handler.request_streaming and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(_both(handler.stream_stream), *coders)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(_answers(handler.unary_stream), *coders)
    assert not handler.request_streaming, "no method streams requests to a single response"
    return grpc.unary_unary_rpc_method_handler(_answer(handler.unary_unary), *coders)


async def _require_decoded(request: Any, context: Any) -> None:
    if isinstance(request, _Undecodable):
        await abort(context, InvalidRequest(request.violation))


def _answer(method: Any) -> Any:
    async def answer(request: Any, context: Any) -> Any:
        await _require_decoded(request, context)
        return await method(request, context)

    return answer


def _answers(method: Any) -> Any:
    if not inspect.isasyncgenfunction(method):
        return _answer(method)  # it writes its answers to the context

    def answers(request: Any, context: Any) -> AsyncIterator[Any]:
        # The method's own generator: one around it would cost every message of every stream.
        if isinstance(request, _Undecodable):
            return _refuse(request, context)
        responses: AsyncIterator[Any] = method(request, context)
        return responses

    return answers


async def _refuse(request: _Undecodable, context: Any) -> AsyncIterator[Any]:
    await abort(context, InvalidRequest(request.violation))
    yield  # never comes here, and makes it a generator


def _both(method: Any) -> Any:
    async def answers(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async def decoded() -> AsyncIterator[Any]:
            async for request in requests:
                await _require_decoded(request, context)
                yield request

        async with aclosing(method(decoded(), context)) as responses:
            async for response in responses:
                yield response

    return answers
