"""Several samples of one prompt, from a caller's side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio
from scripted_model import expected
from server_harness import Answer, ServerHarness, request, serving

from kvledger.v1 import generation_pb2 as pb


@pytest_asyncio.fixture
async def server() -> AsyncIterator[ServerHarness]:
    async with serving() as server:
        yield server


def texts(answer: Answer) -> list[str]:
    """Of each sample, in order."""
    found = [""] * len(answer.finished.samples)
    for delta in answer.deltas:
        found[delta.index] += delta.text
    return found


async def test_each_sample_is_a_stream_of_its_own(server: ServerHarness) -> None:
    """Texts of different answers would run into each other."""
    answer = await server.answer(text="ab", samples=3, max_tokens=6, wants_ids=True)
    assert texts(answer) == [expected("ab", 6)] * 3
    assert answer.kinds[0] == "accepted"
    assert answer.kinds.count("accepted") == 1
    assert answer.kinds[-1] == "finished"
    assert [sample.index for sample in answer.finished.samples] == [0, 1, 2]
    reasons = {sample.finish_reason for sample in answer.finished.samples}
    assert reasons == {pb.FINISH_REASON_LENGTH}
    assert answer.finished.usage.prompt_tokens == 2
    assert answer.finished.usage.completion_tokens == 18
    await server.require_all_free()


async def test_the_whole_texts_come_by_sample(server: ServerHarness) -> None:
    """final_only would give one text for all."""
    sampling = {"temperature": 60.0, "seed": 3}
    streamed = await server.answer(text="ab", samples=4, max_tokens=8, sampling=sampling)
    whole = await server.answer(
        text="ab", samples=4, max_tokens=8, sampling=sampling, final_only=True
    )
    assert [sample.text for sample in whole.finished.samples] == texts(streamed)
    assert len(set(texts(streamed))) > 1, "samples of such a temperature differ"


async def test_a_sample_is_what_a_request_with_its_seed_gets(server: ServerHarness) -> None:
    """An answer could not be asked for again."""
    last = 2**64 - 1  # the seed of the second sample begins anew
    sampling = {"temperature": 60.0, "seed": last}
    together = await server.answer(text="ab", samples=3, max_tokens=8, sampling=sampling)
    alone = [
        await server.answer(text="ab", max_tokens=8, sampling={"temperature": 60.0, "seed": seed})
        for seed in (last, 0, 1)
    ]
    assert texts(together) == [answer.text for answer in alone]


async def test_one_receipt_and_one_line_for_all_samples(server: ServerHarness) -> None:
    """The books would hold a request several times."""
    answer = await server.answer(text="a" * 20, samples=4, max_tokens=5)
    receipt = answer.finished.receipt
    assert receipt.computed_tokens == 20 + 4 * 4
    assert receipt.shared_tokens == 3 * 20
    assert receipt.peak_blocks == 2 + 4, "two full blocks for all, and one for each"
    (line,) = server.log.of("request_finished")
    assert (line["samples"], line["output_tokens"], line["shared_tokens"]) == (4, 20, 60)


async def test_a_stop_string_ends_one_sample_alone(server: ServerHarness) -> None:
    """The other answers would be cut off, or the blocks of the one kept."""
    sampling = {"temperature": 60.0, "seed": 5}
    free = await server.answer(
        text="ab", samples=4, max_tokens=12, sampling=sampling, ignore_eos=True
    )
    words = texts(free)
    stop = next(
        word[place]
        for word in words
        for place in range(1, len(word))
        if word[place].isascii() and any(word[place] not in other for other in words)
    )
    answer = await server.answer(
        text="ab", samples=4, max_tokens=12, sampling=sampling, stop=(stop,), ignore_eos=True
    )
    for text, word, sample in zip(texts(answer), words, answer.finished.samples, strict=True):
        assert text == word.split(stop)[0]
        ended = pb.FINISH_REASON_STOP if stop in word else pb.FINISH_REASON_LENGTH
        assert sample.finish_reason == ended
    assert {s.finish_reason for s in answer.finished.samples} == {
        pb.FINISH_REASON_STOP,
        pb.FINISH_REASON_LENGTH,
    }
    await server.require_all_free()


async def test_samples_beyond_the_rows_are_served_too(server: ServerHarness) -> None:
    """A request for more samples than run at once would never end."""
    answer = await server.answer(text="ab", samples=16, max_tokens=5)
    assert texts(answer) == [expected("ab", 5)] * 16
    assert answer.finished.usage.completion_tokens == 80
    await server.require_all_free()


async def test_log_probabilities_stay_with_their_sample(server: ServerHarness) -> None:
    """Numbers of one answer would be told of another."""
    message = request(
        "ab", samples=3, max_tokens=6, wants_ids=True, sampling={"temperature": 60.0, "seed": 9}
    )
    message.output.top_logprobs = 1
    async for response in server.generation.Generate(message, timeout=20):
        if response.HasField("delta"):
            told = [each.chosen.token_id for each in response.delta.logprobs]
            assert told == list(response.delta.token_ids)


async def test_a_caller_that_leaves_ends_all_samples(server: ServerHarness) -> None:
    """Answers that nobody reads would be computed to their end."""
    gate = server.gate()
    call = server.generation.Generate(request("ab", samples=4, max_tokens=200))
    gate.let(2)
    await call.read()
    call.cancel()
    await server.until(lambda: len(server.ends) == 4)
    gate.open()
    await server.until(lambda: server.log.reasons == ["cancelled"])
    await server.require_all_free()


async def test_the_number_of_samples_is_limited(server: ServerHarness) -> None:
    """A request for a million answers would fill the queue."""
    for samples in (0, 17):
        refusal = await server.refusal(text="ab", samples=samples)
        assert refusal.code == grpc.StatusCode.INVALID_ARGUMENT
        assert set(refusal.violations) == {"samples"}


@pytest.mark.parametrize("samples", [1, 3])
async def test_a_server_that_stops_tells_who_is_not_done(
    server: ServerHarness, samples: int
) -> None:
    """A cut-off answer would look like a whole one."""
    gate = server.gate()
    call = asyncio.create_task(server.refusal(text="ab", samples=samples, max_tokens=200))
    gate.let(3)
    await server.until(lambda: gate.arrived >= 3)
    server.server._admission.end_all()
    gate.open()
    assert (await call).code == grpc.StatusCode.UNAVAILABLE
