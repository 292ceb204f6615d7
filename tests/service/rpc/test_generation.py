"""Generate from a caller's side: what comes, in which order, and with which numbers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import torch
from scripted_model import END_OF_TEXT, expected
from server_harness import CONTEXT_TOKENS, ServerHarness, request, serving

from kvledger import _core
from kvledger.engine import EndReason
from kvledger.v1 import generation_pb2 as pb
from kvledger.v1 import models_pb2


@pytest_asyncio.fixture
async def server() -> AsyncIterator[ServerHarness]:
    async with serving() as server:
        yield server


@pytest.mark.parametrize(
    ("prompt", "prompt_tokens"),
    [
        ({"text": "hello"}, 5),
        ({"ids": list(b"hello")}, 5),
        ({"chat": [(pb.ROLE_SYSTEM, "be kind"), (pb.ROLE_USER, "hello")]}, 7 + 5 + 2 * 2 + 1),
    ],
    ids=["text", "token_ids", "chat"],
)
async def test_a_stream_is_accepted_then_deltas_then_finished(
    server: ServerHarness, prompt: dict[str, Any], prompt_tokens: int
) -> None:
    """A client that reads in the promised order would hang or lose text."""
    answer = await server.answer(**prompt, max_tokens=6, wants_ids=True)
    assert answer.kinds == ["accepted", *["delta"] * len(answer.deltas), "finished"]
    last = "x" if "chat" in prompt else "hello"  # anything but a letter is followed by an "a"
    text = "abcdef" if "chat" in prompt else expected(last, 6)
    assert answer.text == text
    assert answer.token_ids == list(text.encode())
    assert [delta.index for delta in answer.deltas] == [0] * len(answer.deltas)
    assert all(delta.tokens == len(delta.token_ids) for delta in answer.deltas)
    assert answer.accepted.prompt_tokens == prompt_tokens
    assert answer.reason == "LENGTH"
    assert answer.finished.samples[0].text == "", "the text came in the deltas"


async def test_the_first_token_is_sent_before_the_last_is_computed(server: ServerHarness) -> None:
    """A stream that comes in one piece at the end is no stream."""
    gate = server.gate()
    call = server.generation.Generate(request("a", max_tokens=3))
    gate.let(1)
    assert (await call.read()).WhichOneof("event") == "accepted"
    assert (await call.read()).delta.text == "b"
    assert gate.arrived <= 2


async def test_usage_and_receipt_say_what_was_computed(server: ServerHarness) -> None:
    """A caller would be told a price that has nothing to do with the request."""
    answer = await server.answer(text="a" * 20, max_tokens=5)
    usage, receipt = answer.finished.usage, answer.finished.receipt
    assert (usage.prompt_tokens, usage.completion_tokens) == (20, 5)
    assert receipt.computed_tokens == 20 + 4, "the last token is never computed"
    assert receipt.peak_blocks == 3, "24 tokens in blocks of 8"
    assert receipt.request_id == answer.accepted.request_id
    assert receipt.kv_format == server.model.kv_format
    assert receipt.block_bytes == server.model.layout.block_bytes
    assert (receipt.recomputed_tokens, receipt.preemptions) == (0, 0)
    held = receipt.held.seconds * 10**9 + receipt.held.nanos
    alive = receipt.prefill_time.ToNanoseconds() + receipt.decode_time.ToNanoseconds()
    assert 0 < held <= 3 * alive, "at most three blocks for as long as it ran"
    assert receipt.queue_time == answer.accepted.queue_time


async def test_time_in_the_queue_is_told(server: ServerHarness) -> None:
    """Waiting and computing would be one number, and nobody could tell which is slow."""
    gate = server.gate()
    running = [asyncio.create_task(server.answer(text="a", max_tokens=2)) for _ in range(8)]
    await server.until(lambda: len(server.server._admission.open_requests) == 8)
    gate.let(1)
    await server.until(lambda: gate.arrived == 2)
    waiting = asyncio.create_task(server.answer(text="k"))
    await server.until(lambda: len(server.server._admission.open_requests) == 9)
    gate.open()
    answer = await waiting
    others = [task.result() for task in running if task.done()]
    queued = answer.accepted.queue_time.ToNanoseconds()
    assert queued > 0
    assert answer.finished.receipt.queue_time.ToNanoseconds() == queued
    assert len(others) == 8, "it waited for a place"


async def test_one_receipt_and_one_line_for_each_request(server: ServerHarness) -> None:
    """Books with a request twice, or without one, are wrong for ever."""
    answers = [
        await server.answer(text="a"),
        await server.answer(text="!"),
        await server.answer(text="a" * 250, max_tokens=None),
    ]
    assert [answer.reason for answer in answers] == ["LENGTH", "STOP", "CONTEXT"]
    lines = server.log.of("request_finished")
    assert server.log.reasons == ["length", "stop", "context"]
    assert [line["request_id"] for line in lines] == [a.accepted.request_id for a in answers]
    assert len({line["request_id"] for line in lines}) == 3
    assert lines[2]["prompt_tokens"] == 250
    await server.require_all_free()


async def test_whole_characters_only(server: ServerHarness) -> None:
    """An emoji made of several tokens would come as pieces that no terminal can show (B53)."""
    answer = await server.answer(text="#", max_tokens=6, wants_ids=True)
    assert answer.text == "🙂ab"
    assert answer.deltas[0].text.startswith("🙂")
    assert answer.token_ids == [*"🙂ab".encode()]
    assert all(delta.text for delta in answer.deltas)


async def test_a_cut_character_ends_the_text_as_a_replacement(server: ServerHarness) -> None:
    """Bytes that are no character would be lost, and the counts of tokens not add up."""
    answer = await server.answer(text="#", max_tokens=2, wants_ids=True)
    assert answer.text == "\ufffd"
    assert answer.token_ids == list("🙂".encode()[:2])
    assert sum(delta.tokens for delta in answer.deltas) == 2


@pytest.mark.parametrize("text", ["#", "a", "x", "~"])
async def test_the_joined_stream_is_the_unary_text(server: ServerHarness, text: str) -> None:
    """Two ways to ask would give two answers (B55)."""
    stream = await server.answer(text=text, max_tokens=9, wants_ids=True)
    whole = await server.answer(text=text, max_tokens=9, wants_ids=True, final_only=True)
    assert whole.kinds == ["accepted", "finished"]
    assert whole.finished.samples[0].text == stream.text
    assert list(whole.finished.samples[0].token_ids) == stream.token_ids
    assert whole.finished.usage == stream.finished.usage


async def test_a_reader_that_was_behind_gets_the_same_text(server: ServerHarness) -> None:
    """Text that comes several tokens at once would differ from text that comes one by one (B57)."""
    deliver = server.server._admission.streams.deliver
    pile: list[Any] = []

    def in_piles_of_three(outcome: Any) -> None:
        pile.append(outcome)
        if len(pile) == 3 or outcome.report.receipts.size:
            for held in pile:
                deliver(held)
            pile.clear()

    server.server._admission.streams.deliver = in_piles_of_three  # type: ignore[method-assign]
    # Slow enough for the reader to take some before the last comes.
    server.scripted.before_step = lambda plan: time.sleep(0.003)
    piled = await server.answer(text="#", max_tokens=40)
    assert piled.text == "🙂" + expected("🙂", 36)
    assert max(delta.tokens for delta in piled.deltas[1:]) >= 2, "they came in piles"


@pytest.mark.parametrize("final_only", [False, True])
@pytest.mark.parametrize("wants_ids", [False, True])
async def test_a_stop_string_across_tokens_ends_the_text_before_it(
    server: ServerHarness, final_only: bool, wants_ids: bool
) -> None:
    """The stop string would be sent, or be missed because no single token holds it (B51)."""
    answer = await server.answer(
        text="a", max_tokens=20, stop=("efg", "zz"), final_only=final_only, wants_ids=wants_ids
    )
    (sample,) = answer.finished.samples
    assert (sample.text if final_only else answer.text) == "bcd"
    assert answer.reason == "STOP"
    assert answer.finished.usage.completion_tokens == 6, "those of the stop string included"
    ids = list(sample.token_ids) if final_only else answer.token_ids
    assert ids == (list(b"bcdefg") if wants_ids else [])
    await server.require_all_free()


async def test_a_stop_string_ends_the_work_too(server: ServerHarness) -> None:
    """A stopped request would be computed, and paid, to its limit."""
    gate = server.gate()
    task = asyncio.create_task(server.answer(text="a", max_tokens=200, stop=("c",)))
    gate.let(2)
    await server.until(lambda: server.ends)
    gate.let(2)
    assert (await task).text == "b"
    ((sequence, reason, plans),) = server.ends
    assert reason == EndReason.STOP
    assert server.core.receipts[sequence] <= plans + 2
    assert server.log.reasons == ["stop"]
    await server.require_all_free()


async def test_text_held_back_for_a_stop_string_is_sent_at_the_end(server: ServerHarness) -> None:
    """The last characters would be lost when they begin a stop string."""
    answer = await server.answer(text="a", max_tokens=4, stop=("de!",), wants_ids=True)
    assert answer.text == "bcde"
    assert answer.token_ids == list(b"bcde")
    assert answer.reason == "LENGTH"


async def test_end_of_text_is_counted_and_has_no_text(server: ServerHarness) -> None:
    """The token that ends a text would be shown, or be missing from the bill."""
    answer = await server.answer(text="!", max_tokens=9, wants_ids=True)
    assert answer.text == ""
    assert answer.token_ids == [END_OF_TEXT]
    assert answer.finished.usage.completion_tokens == 1
    assert answer.reason == "STOP"


async def test_ignore_eos_gives_exactly_what_was_asked_for(server: ServerHarness) -> None:
    """A benchmark would measure shorter outputs than it asked for (B73)."""
    answer = await server.answer(text="!", max_tokens=200, ignore_eos=True)
    assert answer.finished.usage.completion_tokens == 200
    assert answer.reason == "LENGTH"


@pytest.mark.parametrize("prompt_tokens", [CONTEXT_TOKENS - 1, CONTEXT_TOKENS, CONTEXT_TOKENS + 1])
async def test_the_edge_of_the_context(server: ServerHarness, prompt_tokens: int) -> None:
    """A prompt one token too long would hang, or one that fits be refused (B43)."""
    ids = [97] * prompt_tokens
    if prompt_tokens < CONTEXT_TOKENS:
        assert (await server.answer(ids=ids, max_tokens=1)).text == "b"
        return
    refusal = await server.refusal(ids=ids, max_tokens=1)
    assert refusal.violations == {
        "prompt": f"{prompt_tokens} tokens, at most {CONTEXT_TOKENS - 1} leave room for an answer "
        "in the context window"
    }


async def test_without_a_limit_it_ends_with_the_context(server: ServerHarness) -> None:
    """Generation past the context window would never end (B45)."""
    answer = await server.answer(text="a" * 240, max_tokens=None, ignore_eos=True)
    assert answer.reason == "CONTEXT"
    assert answer.finished.usage.completion_tokens == CONTEXT_TOKENS - 240


async def test_a_prompt_that_never_fits_is_refused_with_the_limit() -> None:
    """It would wait at the head of the queue for ever and block everybody (B30)."""
    async with serving(blocks=8, slots_per_block=8) as server:
        refusal, answer = await asyncio.gather(
            server.refusal(ids=[97] * 65), server.answer(text="a" * 20)
        )
        assert refusal.code.name == "INVALID_ARGUMENT"
        assert refusal.reason == "FIELD_INVALID"
        assert refusal.violations == {
            "prompt": "65 tokens, at most 64 leave room for an answer in the whole KV pool"
        }
        assert answer.text == "bcde"
        assert (await server.answer(ids=[97] * 64, max_tokens=1)).text == "b"
        assert len(server.log.of("request_finished")) == 2, "what is not admitted has no receipt"


def _flat(logits: torch.Tensor, plan: _core.Plan) -> None:
    """Makes every token nearly as likely as the scripted one."""
    logits *= 0.1


async def test_a_seed_gives_the_same_text_alone_and_in_company(server: ServerHarness) -> None:
    """A seeded answer would change with whoever runs beside it (B71)."""
    server.scripted.after_step = _flat
    seeded: dict[str, Any] = {
        "text": "a",
        "max_tokens": 16,
        "ignore_eos": True,
        "wants_ids": True,
        "sampling": {"seed": 42, "temperature": 0.8, "top_p": 0.9},
    }
    alone = await server.answer(**seeded)
    neighbour: dict[str, Any] = {"text": "zz", "max_tokens": 60, "ignore_eos": True}
    for sampling in ({"temperature": 5.0, "top_k": 7}, {"temperature": 0.9, "seed": 42}, {}):
        other, again = await asyncio.gather(
            server.answer(**neighbour, sampling=sampling), server.answer(**seeded)
        )
        assert again.token_ids == alone.token_ids
        assert other.reason == "LENGTH"
    different = await server.answer(**{**seeded, "sampling": {"seed": 43, "temperature": 0.8}})
    assert different.token_ids != alone.token_ids


async def test_an_unset_seed_is_drawn(server: ServerHarness) -> None:
    """Everybody without a seed would get the same text."""
    server.scripted.after_step = _flat
    fields: dict[str, Any] = {"text": "a", "max_tokens": 24, "ignore_eos": True, "wants_ids": True}
    first = await server.answer(**fields, sampling={"temperature": 1.0})
    second = await server.answer(**fields, sampling={"temperature": 1.0})
    assert first.token_ids != second.token_ids
    zero = [await server.answer(**fields, sampling={"temperature": 1.0, "seed": 0}) for _ in "ab"]
    assert zero[0].token_ids == zero[1].token_ids, "a seed of zero is a seed"


@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-5, 1e-6, 1e-12, 1e-38, 0.0])
async def test_tiny_temperatures_are_greedy(server: ServerHarness, temperature: float) -> None:
    """Dividing by next to nothing would overflow and give noise (B68)."""
    answer = await server.answer(text="a", sampling={"temperature": temperature, "seed": 7})
    assert answer.text == "bcde"


async def test_twenty_callers_with_one_name_get_their_own_answers(server: ServerHarness) -> None:
    """A name that a client chose would mix up whose answer goes where (B79)."""
    metadata = (("x-request-id", "same"),)
    letters = "abcdefghijklmnopqrst"
    answers = await asyncio.gather(
        *(server.answer(text=letter, metadata=metadata) for letter in letters)
    )
    assert [answer.text for answer in answers] == [expected(letter, 4) for letter in letters]
    assert len({answer.accepted.request_id for answer in answers}) == 20
    assert "same" not in {answer.accepted.request_id for answer in answers}


async def test_more_requests_than_room_all_end() -> None:
    """Under pressure everybody would preempt everybody, and nothing come out (B32)."""
    async with serving(blocks=10, slots_per_block=4, context_tokens=64, forecast=False) as server:
        answers = await server.at_once(
            *(server.answer(text="a" * 9, max_tokens=20, ignore_eos=True) for _ in range(12))
        )
        assert {answer.text for answer in answers} == {expected("a", 20)}
        receipts = [answer.finished.receipt for answer in answers]
        assert all(answer.kinds.count("accepted") == 1 for answer in answers)
        assert sum(receipt.preemptions for receipt in receipts) > 0, "it was tight"
        assert max(receipt.preemptions for receipt in receipts) <= 3
        for receipt in receipts:
            why = receipt.preemption_reasons
            assert receipt.HasField("preemption_reasons") == (receipt.preemptions > 0)
            assert why.own_tenant + why.shared_capacity + why.unread == receipt.preemptions
        assert any(receipt.preemption_reasons.own_tenant for receipt in receipts)
        assert sum(receipt.recomputed_tokens for receipt in receipts) > 0
        await server.require_all_free()


async def test_all_cross_the_edge_of_a_block_in_one_step() -> None:
    """Enough free tokens in half-filled blocks would be taken for enough free blocks (B40)."""
    async with serving(blocks=36, slots_per_block=8, sequences_max=32, forecast=False) as server:
        gate = server.gate()
        fields: dict[str, Any] = {"text": "a", "max_tokens": 24, "ignore_eos": True}
        tasks = [asyncio.create_task(server.answer(**fields)) for _ in range(32)]
        await server.until(lambda: len(server.server._admission.open_requests) == 32)
        gate.open()
        answers = await asyncio.gather(*tasks)
        assert {answer.text for answer in answers} == {expected("a", 24)}
        assert sum(answer.finished.receipt.preemptions for answer in answers) > 0, "it was tight"
        await server.require_all_free()


async def test_a_small_request_passes_a_large_one_that_waits() -> None:
    """A large prompt at the head of the queue would block all small ones (B36)."""
    async with serving(blocks=16, slots_per_block=4, context_tokens=65) as server:
        gate = server.gate()
        ended: list[str] = []

        async def answer(name: str, **fields: Any) -> None:
            await server.answer(**fields)
            ended.append(name)

        tasks = [asyncio.create_task(answer("running", ids=[97] * 30, max_tokens=8))]
        await server.until(lambda: gate.arrived == 1)
        tasks.append(asyncio.create_task(answer("large", ids=[97] * 50, max_tokens=2)))
        await server.until(lambda: len(server.server._admission.open_requests) == 2)
        small = {"ids": [97] * 3, "max_tokens": 1}
        tasks += [asyncio.create_task(answer("small", **small)) for _ in range(5)]
        await server.until(lambda: len(server.server._admission.open_requests) == 7)
        gate.open()
        await asyncio.gather(*tasks)
        assert ended.index("large") > ended.index("small")
        assert sorted(ended) == ["large", "running", *["small"] * 5]


async def test_what_tokenize_says_is_what_generate_counts(server: ServerHarness) -> None:
    """A caller who counts tokens beforehand would be wrong about the limit."""
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role=pb.ROLE_USER, content="the <|end|> th")])
    tokens = await server.models.Tokenize(models_pb2.TokenizeRequest(chat=chat))
    answer = await server.answer(chat=[(pb.ROLE_USER, "the <|end|> th")])
    assert answer.accepted.prompt_tokens == len(tokens.token_ids)


async def test_the_request_may_name_the_model(server: ServerHarness) -> None:
    """The id that ListModels gives would be refused."""
    answer = await server.answer(text="a", model=server.model.id)
    assert answer.text == "bcde"


async def test_the_log_and_the_receipt_say_the_same(server: ServerHarness) -> None:
    """An operator and a customer would argue about two different bills."""
    answers = await asyncio.gather(*(server.answer(text="a" * 9) for _ in range(6)))
    lines = {line["request_id"]: line for line in server.log.of("request_finished")}
    assert len(lines) == 6
    for answer in answers:
        receipt, line = answer.finished.receipt, lines[answer.accepted.request_id]
        assert 0 < receipt.held.nanos < 10**9
        assert line["held_block_seconds"] == round(receipt.held.nanos / 1e9, 6)
        assert line["peak_blocks"] == receipt.peak_blocks == 2
        assert line["prompt_tokens"] == answer.finished.usage.prompt_tokens
        assert line["output_tokens"] == answer.finished.usage.completion_tokens
