"""A prompt's answer is the same, number for number, whether it was cached or computed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from engine_harness import without_forecast
from reuse_harness import BLOCK, NONE, ReuseServer, found, prompt, reusing
from server_harness import Answer

from kvledger.v1 import generation_pb2 as pb

# Around the edges of blocks, and of what a step computes.
LENGTHS = sorted(
    {BLOCK * blocks + more for blocks in (1, 2, 3, 8) for more in (-1, 0, 1)}
    | {2, 32 - 1, 32 + 1, 3 * 32, 100}
)


@pytest_asyncio.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ReuseServer]:
    without_forecast(monkeypatch)
    async with reusing() as server:
        yield server


def numbers(answer: Answer) -> list[Any]:
    """Every token with its log-probability and those of the likeliest, bit for bit."""
    told = [
        (
            each.chosen.token_id,
            each.chosen.logprob,
            [(top.token_id, top.logprob) for top in each.top],
        )
        for delta in answer.deltas
        for each in delta.logprobs
    ]
    assert [token for token, _, _ in told] == answer.token_ids
    assert len(told) > 0
    return told


async def asked(server: ReuseServer, ids: list[int], **fields: Any) -> Answer:
    fields = {"max_tokens": BLOCK + 2, **fields}
    return await server.ids(ids, output=pb.OutputOptions(top_logprobs=3), **fields)


def whole_blocks(tokens: int) -> int:
    """Of a prompt, without its last token, which is always computed."""
    return (tokens - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("tokens", LENGTHS)
async def test_at_every_edge_of_blocks(server: ReuseServer, tokens: int) -> None:
    """A prompt that ends at a block's edge would have no logits, or those of another place (B13,
    B23)."""
    ids = prompt("p", tokens)
    reference = numbers(await asked(server, ids, cache=NONE))
    cold = await asked(server, ids)
    assert sum(found(cold)) == 0
    assert numbers(cold) == reference
    for _ in range(3):
        warm = await asked(server, ids)
        # The answer filled the block in which the prompt ends: its beginning is copied.
        assert whole_blocks(tokens) <= found(warm)[0] <= tokens - 1
        assert numbers(warm) == reference
    await server.require_nothing_held()


@pytest.mark.parametrize("known", [3, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 5, 47])
@pytest.mark.parametrize("same", [1.0, 0.5])
async def test_where_only_a_part_was_there(server: ReuseServer, known: int, same: float) -> None:
    """The rest would be computed behind the wrong beginning, or a copied tail be too long."""
    ids = prompt("p", 6 * BLOCK + 4)
    reference = numbers(await asked(server, ids, cache=NONE))
    beginning = ids[: round(known * same)] + prompt("other", known - round(known * same))
    before = await asked(server, beginning, max_tokens=2 * BLOCK)
    half = await asked(server, ids)
    alike = round(known * same)
    assert found(half)[0] >= alike // BLOCK * BLOCK
    assert found(half)[0] <= known + len(before.token_ids)
    assert numbers(half) == reference
    # What was there before is as it was: nobody wrote into it.
    assert numbers(await asked(server, beginning)) == numbers(
        await asked(server, beginning, cache=NONE)
    )
    await server.require_nothing_held()


async def test_a_copied_tail(server: ReuseServer) -> None:
    """Tokens of a block in which two prompts part would be read from the other prompt."""
    one = prompt("p", 4 * BLOCK)
    for alike in range(1, BLOCK):
        other = one[: 2 * BLOCK + alike] + prompt(f"other {alike}", BLOCK)
        reference = numbers(await asked(server, other, cache=NONE))
        await asked(server, one)
        warm = await asked(server, other)
        assert found(warm)[0] >= 2 * BLOCK + alike
        assert numbers(warm) == reference
    await server.require_nothing_held()


async def test_the_next_turn_of_a_conversation(server: ReuseServer) -> None:
    """A conversation would go on behind another one's answer."""
    ids, length = prompt("p", 2 * BLOCK + 5), 0
    for turn in range(5):
        reference = numbers(await asked(server, ids, cache=NONE))
        answer = await asked(server, ids)
        assert numbers(answer) == reference
        assert found(answer)[0] >= length - 1 - BLOCK
        length = len(ids) + len(answer.token_ids)
        ids = [*ids, *answer.token_ids, *prompt(f"turn {turn}", 6)]
    await server.require_nothing_held()


async def test_while_others_with_the_same_prompt_run(server: ReuseServer) -> None:
    """Who begins in blocks that another is just writing would read what is not there yet (B12)."""
    ids = prompt("p", 12 * BLOCK + 3)
    reference = numbers(await asked(server, ids, cache=NONE))
    answers = await asyncio.gather(*[asked(server, ids) for _ in range(4)])
    assert [numbers(answer) for answer in answers] == [reference] * 4
    computed = sum(answer.finished.receipt.computed_tokens for answer in answers)
    assert computed < 2 * len(ids) + 4 * BLOCK, "it was computed once, about"
    # One that comes later, and parts from them.
    late = ids[: 7 * BLOCK + 2] + prompt("late", 20)
    alone = numbers(await asked(server, late, cache=NONE))
    running = [asyncio.create_task(asked(server, ids, max_tokens=60)) for _ in range(2)]
    assert numbers(await asked(server, late)) == alone
    for task in running:
        assert numbers(await task)[: BLOCK + 2] == reference
    await server.require_nothing_held()


async def test_after_a_preemption(server: ReuseServer) -> None:
    """Who comes back would find its blocks changed, or somebody else's."""
    prompts = [prompt(f"p{place}", 60) for place in range(8)]
    references = [numbers(await asked(server, ids, cache=NONE, max_tokens=40)) for ids in prompts]
    answers = await server.at_once(*[asked(server, ids, max_tokens=40) for ids in prompts])
    assert [numbers(answer) for answer in answers] == references
    again = await server.at_once(*[asked(server, ids, max_tokens=40) for ids in prompts])
    assert [numbers(answer) for answer in again] == references
    receipts = [answer.finished.receipt for answer in (*answers, *again)]
    assert sum(receipt.preemptions for receipt in receipts) > 0
    back = [receipt for receipt in receipts if receipt.preemptions]
    assert any(receipt.reused_own_tokens for receipt in back)
    await server.require_nothing_held()


async def test_the_prompts_own_probabilities(server: ReuseServer) -> None:
    """They would be missing for what was not computed (B13), or be those of another prompt."""
    ids = prompt("p", 5 * BLOCK + 2)

    async def scored() -> tuple[list[Any], Answer]:
        answer = Answer()
        message = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=ids),
            stop=pb.StopOptions(max_tokens=4, ignore_eos=True),
            output=pb.OutputOptions(prompt_logprobs=2, token_ids=True),
        )
        async for response in server.generation.Generate(message):
            answer.responses.append(response)
        told = [
            (place.chosen.token_id, place.chosen.logprob, [top.logprob for top in place.top])
            for response in answer.responses
            if response.HasField("prompt")
            for place in response.prompt.logprobs
        ]
        return told, answer

    cold, _ = await scored()
    assert len(cold) == len(ids) - 1
    for _ in range(2):
        warm, answer = await scored()
        assert warm == cold
        assert found(answer) == (0, 0, 0), "all of it is computed, though it is cached"
        assert answer.finished.receipt.computed_tokens == len(ids) + 3
    # What it computed is there for others.
    assert found(await asked(server, ids))[0] == 5 * BLOCK
    await server.require_nothing_held()


@pytest.mark.parametrize("tokens", [5 * BLOCK, 5 * BLOCK + 3])
async def test_samples_of_a_warm_prompt(server: ReuseServer, tokens: int) -> None:
    """Samples would write into the blocks that others begin with."""
    ids = prompt("p", tokens)
    sampling = {"temperature": 3.0, "seed": 5}

    async def sampled(**fields: Any) -> list[str]:
        answer = await server.ids(ids, samples=4, sampling=sampling, max_tokens=12, **fields)
        answers.append(answer)
        parts: list[list[int]] = [[] for _ in range(4)]
        for delta in answer.deltas:
            parts[delta.index] += delta.token_ids
        return [str(part) for part in parts]

    answers: list[Answer] = []
    reference = await sampled(cache=NONE)
    assert len(set(reference)) > 1
    for _ in range(3):
        assert await sampled() == reference
    for warm in answers[2:]:
        receipt = warm.finished.receipt
        assert whole_blocks(tokens) <= receipt.reused_own_tokens < tokens, "once for all samples"
        assert receipt.shared_tokens == 3 * tokens
        assert warm.finished.usage.cached_prompt_tokens == receipt.reused_own_tokens
    plain = await server.ids(ids)
    assert plain.token_ids == (await server.ids(ids, cache=NONE)).token_ids
    await server.require_nothing_held()
