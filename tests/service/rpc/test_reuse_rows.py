"""What went wrong with reused prefixes elsewhere, tried here; each test names its row.

Rows of a second tier of cached blocks (B11's and B14's offloading, B19) cannot happen: there is
none. What of B11 and B14 is left without one is here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio
from reuse_harness import BLOCK, NONE, ReuseServer, found, namespace, prompt, reusing
from server_harness import Answer, until
from test_metrics import scraped

from kvledger.v1 import generation_pb2 as pb

METRICS = ("--metrics-listen", "127.0.0.1:0")


@pytest_asyncio.fixture
async def server() -> AsyncIterator[ReuseServer]:
    async with reusing() as server:
        yield server


async def test_what_is_told_is_what_was_found_when_it_began() -> None:
    """What a request could have begun with while it waited would be told, or read, though it is
    gone (B03)."""
    async with reusing("--kv-blocks", "8") as server:
        ids = prompt("p", 3 * BLOCK + 2)
        await server.ids(ids, max_tokens=1)
        gate = server.gate()
        # It takes five blocks, all but the three that are cached, and then these too.
        first = asyncio.create_task(server.ids(prompt("r1", 36), max_tokens=28))
        await until(lambda: gate.arrived == 1)
        wish = [*ids, *prompt("r2", 2 * BLOCK)]
        second = asyncio.create_task(server.ids(wish))
        await until(lambda: len(server.server._admission.open_requests) == 2)
        gate.let(3)
        await until(lambda: gate.arrived == 4)
        assert server.server._admission.streams.waiting_count == 1
        assert server.counts["evicted"] == 0
        gate.let(20)
        await until(lambda: gate.arrived == 24)
        assert server.server._admission.streams.waiting_count == 1
        assert server.counts["evicted"] > 0
        others = [
            asyncio.create_task(server.ids(prompt(f"r{count}", 10), max_tokens=10))
            for count in range(3, 7)
        ]
        gate.open()
        await asyncio.gather(first, *others)
        answer = await second  # `ids` compares what is told with what was computed
        assert found(answer)[0] < 3 * BLOCK
        assert answer.token_ids == (await server.ids(wish, cache=NONE)).token_ids
        await server.require_nothing_held()


async def test_two_hundred_conversations_keep_their_own_words() -> None:
    """A conversation that had ended would come back in another one (B11, B14)."""
    async with reusing("--kv-blocks", "40") as server:
        ids = {name: prompt(f"chat {name}", 2 * BLOCK + name % BLOCK) for name in range(64)}
        reference = {name: (await server.ids(ids[name], cache=NONE)).token_ids for name in ids}
        places = asyncio.Semaphore(2)

        async def ask(name: int) -> None:
            async with places:
                answer = await server.ids(ids[name], cache=namespace(str(name)))
            assert answer.token_ids == reference[name]
            hits.append(found(answer)[0])

        hits: list[int] = []
        order = [name for turn in range(5) for name in range(turn, 64, 1 + turn % 2)]
        await asyncio.gather(*[ask(name) for name in order])
        assert len(hits) > 200
        again = await asyncio.gather(*[ask(name) for name in (63, 61) * 3])
        assert len(again) == 6
        assert sum(hit > 0 for hit in hits[-6:]) >= 4
        assert server.counts["evicted"] > 0
        await server.require_nothing_held()


async def test_two_systems_do_not_answer_for_each_other(server: ReuseServer) -> None:
    """The second client would hear what the first one's system message says (B12)."""

    async def ask(number: int, **fields: Any) -> Answer:
        chat = [(pb.ROLE_SYSTEM, f"You are Machine {number}"), (pb.ROLE_USER, "who are you?")]
        return await server.answer(
            chat=chat, max_tokens=8, ignore_eos=True, wants_ids=True, **fields
        )

    reference = {number: (await ask(number, cache=NONE)).token_ids for number in (1, 2)}
    assert reference[1] != reference[2]

    async def rounds(number: int) -> None:
        for _ in range(50):
            answer = await ask(number)
            assert answer.token_ids == reference[number]
        assert found(answer)[0] > 3 * BLOCK

    await asyncio.gather(rounds(1), rounds(2))
    await server.require_nothing_held()


async def test_the_same_prompt_again_and_again(server: ReuseServer) -> None:
    """All of it cached and nothing to compute: logits of another place (B13)."""
    told = set()
    for _ in range(10):
        answer = await server.answer(
            text="What a beautiful",
            max_tokens=1,
            ignore_eos=True,
            output=pb.OutputOptions(top_logprobs=1),
            wants_ids=True,
        )
        (delta,) = answer.deltas
        told.add((delta.token_ids[0], delta.logprobs[0].chosen.logprob))
    assert len(told) == 1
    assert found(answer)[0] >= BLOCK


async def test_a_prompt_that_waits_is_looked_up_once() -> None:
    """A hit rate would be that of the scheduler's rounds and not of requests (B87)."""
    async with reusing("--kv-blocks", "20", *METRICS) as server:
        ids = prompt("p", 4 * BLOCK + 1)
        await server.ids(ids, max_tokens=1)
        before = await scraped(server)
        gate = server.gate()
        first = asyncio.create_task(server.ids(prompt("r", 9 * BLOCK), max_tokens=56))
        await until(lambda: gate.arrived == 1)
        second = asyncio.create_task(server.ids([*ids, *prompt("q", 7 * BLOCK - 1)]))
        await until(lambda: len(server.server._admission.open_requests) == 2)
        gate.let(52)
        await until(lambda: gate.arrived == 53)
        assert server.server._admission.streams.waiting_count == 1
        gate.open()
        await first
        assert found(await second)[0] == 4 * BLOCK
        await until(lambda: not server.server._admission.open_requests)
        after = await scraped(server)
        names = ("lookups_total", "evictions_total", "foreign_blocks_total")
        gone = {name: after[f"kvledger_prefix_{name}"] for name in names}
        assert gone["lookups_total"] - before["kvledger_prefix_lookups_total"] == 2
        source = "kvledger_prompt_tokens_total"
        assert after[f"{source} own"] - before[f"{source} own"] == 4 * BLOCK
        assert gone["foreign_blocks_total"] == 0


async def test_a_request_id_of_the_clients_is_nobodys_key(server: ReuseServer) -> None:
    """Twenty clients with one id would hear each other's answers (B79)."""
    ids = [prompt(f"client {count}", BLOCK + count) for count in range(20)]
    reference = [(await server.ids(each, cache=NONE)).token_ids for each in ids]
    same = (("x-request-id", "same"), ("request-id", "same"))
    answers = await asyncio.gather(
        *[
            server.ids(each, metadata=same, cache=namespace(str(count % 2)))
            for count, each in enumerate(ids)
        ]
    )
    assert [answer.token_ids for answer in answers] == reference
    assert len({answer.accepted.request_id for answer in answers}) == 20
