"""Bytes that are no message of the method they are sent to."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from server_harness import ServerHarness, refusal_of, serving

CANARY = b"canary-4711"
# A field of two bytes that ends after one; a string that is no UTF-8; a group never ended.
BROKEN = [b"\x0a\x02x", b"\x0a\x0c\xff" + CANARY, b"\x0b" + CANARY, CANARY]
METHODS = [
    "/kvledger.v1.GenerationService/Generate",
    "/kvledger.v1.ModelService/GetModel",
    "/kvledger.v1.ModelService/Tokenize",
    "/kvledger.v1.ModelService/Detokenize",
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
]


@pytest_asyncio.fixture
async def server() -> AsyncIterator[ServerHarness]:
    async with serving() as server:
        yield server


def _call(server: ServerHarness, method: str, data: bytes) -> Any:
    if method.endswith(("/Generate", "/Watch")):
        return server.channel.unary_stream(method)(data).read()
    return server.channel.unary_unary(method)(data)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("data", BROKEN[:3])
async def test_it_is_the_callers_mistake(server: ServerHarness, method: str, data: bytes) -> None:
    """gRPC would answer UNKNOWN with the text of a Python exception."""
    refusal = await refusal_of(_call(server, method, data))
    assert refusal.code == grpc.StatusCode.INVALID_ARGUMENT
    assert set(refusal.violations) == {"request"}
    assert CANARY.decode() not in refusal.everything()
    assert CANARY.decode() not in str(server.log.lines)
    assert (await server.answer(text="a")).text == "bcde"


async def test_it_is_refused_on_a_stream_of_requests(server: ServerHarness) -> None:
    """Reflection takes a stream; a broken second message would end it with UNKNOWN."""
    method = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    for before in ([], [b"\x3a\x01*"]):

        async def requests(first: list[bytes] = before) -> AsyncIterator[bytes]:
            for data in (*first, BROKEN[0]):
                yield data

        call = server.channel.stream_stream(method)(requests())

        async def read(call: Any = call) -> list[bytes]:
            return [response async for response in call]

        refusal = await refusal_of(read())
        assert refusal.code == grpc.StatusCode.INVALID_ARGUMENT
        assert set(refusal.violations) == {"request"}


async def test_an_unknown_method_is_unimplemented(server: ServerHarness) -> None:
    """A client of a later version would be told that its message is wrong."""
    for method in ("/kvledger.v1.GenerationService/Forget", "/nobody/Knows", "/"):
        refusal = await refusal_of(server.channel.unary_unary(method)(b""))
        assert refusal.code == grpc.StatusCode.UNIMPLEMENTED


async def test_unknown_fields_are_ignored(server: ServerHarness) -> None:
    """A client of a later version could not even ask what it knows."""
    method = "/kvledger.v1.ModelService/ListModels"
    assert await server.channel.unary_unary(method)(b"\xfa\x01\x03abc")
