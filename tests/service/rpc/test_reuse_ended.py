"""Requests that begin with cached blocks and end before their time give everything back, and what
they had computed stays for who comes next."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from reuse_harness import BLOCK, NONE, ReuseServer, found, prompt, reusing
from scripted_model import PATIENCE
from server_harness import Answer, Proxy, connection, until

from kvledger.v1 import generation_pb2 as pb
from kvledger.v1 import generation_pb2_grpc

PROMPT = prompt("p", 20 * BLOCK + 3)


@pytest_asyncio.fixture
async def server() -> AsyncIterator[ReuseServer]:
    async with reusing() as server:
        yield server


def call(server: ReuseServer, ids: list[int], max_tokens: int, **fields: Any) -> Any:
    message = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=ids),
        stop=pb.StopOptions(max_tokens=max_tokens, ignore_eos=True),
        output=pb.OutputOptions(token_ids=True),
    )
    return server.generation.Generate(message, **{"timeout": PATIENCE, **fields})


async def test_what_a_cancelled_request_had_computed_stays(server: ReuseServer) -> None:
    """A person who stops an answer and asks on would wait for the whole prompt again (B85)."""
    stream = call(server, PROMPT, 300)
    ids: list[int] = []
    while len(ids) < 20:
        ids += (await stream.read()).delta.token_ids
    stream.cancel()
    await server.require_nothing_held()
    turn = [*PROMPT, *ids[:10], *prompt("turn", 9)]
    warm = await server.ids(turn)
    assert found(warm)[0] >= (len(PROMPT) + 9) // BLOCK * BLOCK
    assert warm.token_ids == (await server.ids(turn, cache=NONE)).token_ids


async def test_a_prompt_that_was_half_read_is_half_there(server: ReuseServer) -> None:
    """What was read of a long prompt would be lost with who asked for it (B85)."""
    gate = server.gate()
    stream = call(server, PROMPT, 4)
    gate.let(3)  # of 32 tokens
    await until(lambda: gate.arrived == 4)
    stream.cancel()
    await until(lambda: server.ends)
    gate.open()
    await server.require_nothing_held()
    assert server.core.balances["cached"] >= 3 * 32 // BLOCK
    warm = await server.ids(PROMPT)
    assert 3 * 32 <= found(warm)[0] <= 4 * 32
    assert warm.token_ids == (await server.ids(PROMPT, cache=NONE)).token_ids


@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_a_warm_request_that_ends_early_gives_all_back(server: ReuseServer, how: str) -> None:
    """Cached blocks would stay pinned by somebody who is gone, and no room ever come of them."""
    cold = await server.ids(PROMPT)
    cached = server.core.balances["cached"]
    gate = server.gate()
    stream = call(server, PROMPT, 300, timeout=0.5 if how == "deadline" else PATIENCE)
    gate.let(4)
    await until(lambda: gate.arrived == 5)
    assert server.core.balances["held"] >= 20
    if how == "cancel":
        stream.cancel()
    else:
        assert await stream.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: server.ends)
    gate.open()
    await server.require_nothing_held()
    assert server.core.balances["cached"] >= cached
    (line,) = [line for line in server.log.of("request_finished") if line["reason"] == "cancelled"]
    assert line["reused_own_tokens"] >= 20 * BLOCK
    assert line["recomputed_tokens"] == 0
    # All of the pool is there for somebody else.
    big = await server.ids(prompt("big", 480), max_tokens=None)
    assert big.reason == "CONTEXT"
    assert (await server.ids(PROMPT)).token_ids == cold.token_ids
    await server.require_nothing_held()


async def test_warm_lines_that_are_cut(server: ReuseServer) -> None:
    """Each lost client would leave blocks pinned, or harm those who begin with the same ones (B81,
    B83)."""
    reference = (await server.ids(PROMPT, max_tokens=60)).token_ids
    others = [asyncio.create_task(server.ids(PROMPT, max_tokens=60)) for _ in range(3)]
    async with Proxy.before(server.server.port) as proxy:
        for count in range(30):
            async with connection(proxy.address) as channel:
                stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
                message = pb.GenerateRequest(
                    token_ids=pb.TokenIds(ids=PROMPT),
                    stop=pb.StopOptions(max_tokens=300, ignore_eos=True),
                )
                message.output.final_only = count % 2 == 1
                stream = stub.Generate(message, timeout=PATIENCE)
                for _ in range(1 if message.output.final_only else 3):
                    await stream.read()
                proxy.reset()
    assert [answer.token_ids for answer in await asyncio.gather(*others)] == [reference] * 3
    await server.require_nothing_held()
    assert server.log.reasons.count("cancelled") >= 25
    assert (await server.ids(PROMPT, max_tokens=60)).token_ids == reference


async def test_a_step_that_fails_leaves_nothing_that_is_wrong(server: ReuseServer) -> None:
    """Blocks of a step that broke off would be found as if they had been written."""
    gate = server.gate()
    task = asyncio.create_task(server.refusal(ids=PROMPT))
    gate.let(2)
    await until(lambda: gate.arrived == 3)

    def fail(plan: Any) -> None:
        server.scripted.before_step = lambda plan: None
        raise RuntimeError

    server.scripted.before_step = fail
    gate.open()
    refusal = await task
    assert refusal.code == grpc.StatusCode.INTERNAL
    await server.require_nothing_held()
    warm = await server.ids(PROMPT)
    assert found(warm)[0] <= 4 * 32
    assert warm.token_ids == (await server.ids(PROMPT, cache=NONE)).token_ids


async def test_a_drain_lets_warm_requests_end(server: ReuseServer) -> None:
    """A server that stops would break off who runs, or leave blocks in its books."""
    cold = await server.ids(PROMPT, max_tokens=20)
    gate = server.gate()
    task: asyncio.Task[Answer] = asyncio.create_task(server.ids(PROMPT, max_tokens=20))
    await until(lambda: gate.arrived == 1)
    server.server.request_stop()
    await until(lambda: server.log.of("draining"))
    gate.open()
    warm = await task
    assert found(warm)[0] >= 20 * BLOCK
    assert warm.token_ids == cold.token_ids
    assert await server.exit == 0
    assert server.core.audits == []
    assert server.core.balances["held"] == 0
