"""Options of a request from a caller's side: penalties, biases, ends, log-probabilities."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from scripted_model import END_OF_TEXT, VOCABULARY, expected
from server_harness import Answer, ServerHarness, refusal_of, request, serving

from kvledger.v1 import generation_pb2 as pb


@pytest_asyncio.fixture
async def server() -> AsyncIterator[ServerHarness]:
    async with serving() as server:
        yield server


async def send(server: ServerHarness, message: pb.GenerateRequest) -> Answer:
    """All of a call that must succeed."""
    answer = Answer()
    async for response in server.generation.Generate(message, timeout=20):
        answer.responses.append(response)
    return answer


def asking(
    text: str, *, stop_ids: tuple[int, ...] = (), min_tokens: int = 0, **fields: Any
) -> pb.GenerateRequest:
    top_logprobs = fields.pop("top_logprobs", None)
    bias = fields.pop("bias", {})
    message = request(text, **fields)
    message.stop.token_ids.extend(stop_ids)
    message.stop.min_tokens = min_tokens
    for token, value in bias.items():
        message.sampling.logit_bias.add(token_id=token, bias=value)
    if top_logprobs is not None:
        message.output.top_logprobs = top_logprobs
    return message


@pytest.mark.parametrize("final_only", [False, True])
async def test_a_stop_token_is_counted_and_its_text_is_not_sent(
    server: ServerHarness, final_only: bool
) -> None:
    """The token that should only end the text would stand in it, or be missing from the bill."""
    message = asking(
        "a", stop_ids=(ord("e"),), max_tokens=20, wants_ids=True, final_only=final_only
    )
    answer = await send(server, message)
    (sample,) = answer.finished.samples
    assert (sample.text if final_only else answer.text) == "bcd"
    ids = list(sample.token_ids) if final_only else answer.token_ids
    assert bytes(ids) == b"bcde"
    assert answer.reason == "STOP"
    assert answer.finished.usage.completion_tokens == 4
    assert answer.finished.receipt.computed_tokens == 1 + 3, "nothing after the stop token"
    assert server.log.reasons == ["stop"]
    await server.require_all_free()


async def test_a_stop_token_at_the_limit_is_a_stop(server: ServerHarness) -> None:
    """A caller that looks for LENGTH would ask for more of a text that is complete."""
    answer = await send(server, asking("a", stop_ids=(ord("e"),), max_tokens=4))
    assert (answer.text, answer.reason) == ("bcd", "STOP")


async def test_a_stop_token_ends_although_ends_of_text_are_ignored(server: ServerHarness) -> None:
    """An end that the caller named would be taken for one that it wants to pass."""
    answer = await send(
        server, asking("!", stop_ids=(END_OF_TEXT,), ignore_eos=True, max_tokens=20)
    )
    assert (answer.reason, answer.finished.usage.completion_tokens) == ("STOP", 1)


async def test_an_output_has_at_least_min_tokens(server: ServerHarness) -> None:
    """A text would end before it is as long as the caller needs it."""
    plain = await send(server, asking("!", max_tokens=20))
    assert plain.finished.usage.completion_tokens == 1
    message = asking("!", min_tokens=6, max_tokens=6, wants_ids=True)
    answer = await send(server, message)
    assert answer.finished.usage.completion_tokens == 6
    assert END_OF_TEXT not in answer.token_ids
    ignoring = asking("!", min_tokens=6, max_tokens=6, ignore_eos=True, wants_ids=True)
    assert (await send(server, ignoring)).token_ids[0] == END_OF_TEXT, "it ends nothing there"


async def test_a_bias_makes_a_token_come_or_not(server: ServerHarness) -> None:
    """A banned word would come, or a wanted one not."""
    banned = await send(server, asking("a", bias={ord("c"): -100.0}, max_tokens=3, wants_ids=True))
    assert banned.token_ids[0] == ord("b")
    assert ord("c") not in banned.token_ids
    wanted = await send(server, asking("a", bias={ord("q"): 30.0}, max_tokens=4))
    assert wanted.text == "qqqq"


@pytest.mark.parametrize(
    "sampling",
    [
        {"repetition_penalty": 10.0, "presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"presence_penalty": 2.0},
    ],
    ids=lambda options: "+".join(options),
)
async def test_penalties_keep_a_text_from_repeating_itself(
    server: ServerHarness, sampling: dict[str, float]
) -> None:
    """A text that turns in circles would go on doing so whatever the caller sets."""

    def flatten(logits: Any, plan: Any) -> None:
        logits *= 0.05  # the script is worth 1: less than a penalty

    server.scripted.after_step = flatten
    server.scripted.following[:] = ord("o")
    circles = await send(server, asking("o", max_tokens=6))
    assert circles.text == "oooooo"
    answer = await send(server, asking("o", max_tokens=6, sampling=sampling, wants_ids=True))
    assert answer.token_ids.count(ord("o")) <= 1


async def test_log_probabilities_come_with_their_tokens(server: ServerHarness) -> None:
    """Numbers would be missing where a delta holds several tokens, or belong to others."""
    message = asking("#", max_tokens=9, top_logprobs=3, wants_ids=True)
    answer = await send(server, message)
    assert answer.text == "🙂" + expected("🙂", 5)
    total = math.log(math.exp(20.0) + VOCABULARY - 1)
    for delta in answer.deltas:
        assert [each.chosen.token_id for each in delta.logprobs] == list(delta.token_ids)
        for each in delta.logprobs:
            assert each.chosen.logprob == pytest.approx(20 - total, abs=1e-6)
            assert [other.token_id for other in each.top] == [each.chosen.token_id, 0, 1]
            assert each.top[0] == each.chosen
            assert each.top[1].logprob == pytest.approx(-total, rel=1e-6)
    chosen_only = await send(server, asking("a", max_tokens=3, top_logprobs=0))
    told = [each for delta in chosen_only.deltas for each in delta.logprobs]
    assert bytes(each.chosen.token_id for each in told) == b"bcd"
    assert not any(each.top for each in told)
    silent = await send(server, asking("a", max_tokens=3))
    assert not any(delta.logprobs for delta in silent.deltas)


async def test_log_probabilities_end_with_the_text(server: ServerHarness) -> None:
    """Numbers of tokens that nobody gets would come, or those held back be lost."""
    stopped = await send(
        server, asking("a", max_tokens=20, stop=("def",), top_logprobs=1, wants_ids=True)
    )
    told = [each.chosen.token_id for delta in stopped.deltas for each in delta.logprobs]
    assert told == stopped.token_ids == list(b"bcdef")
    ended = await send(
        server, asking("a", max_tokens=20, stop_ids=(ord("d"),), top_logprobs=1, wants_ids=True)
    )
    told = [each.chosen.token_id for delta in ended.deltas for each in delta.logprobs]
    assert told == ended.token_ids == list(b"bcd")


async def test_options_that_break_a_limit_are_refused(server: ServerHarness) -> None:
    """A token that does not exist would reach the logits of a whole step."""
    message = asking("a", bias={VOCABULARY: 1.0}, stop_ids=(VOCABULARY,), min_tokens=9)
    message.output.top_logprobs = 21
    refusal = await refusal_of(send(server, message))
    assert refusal.code == grpc.StatusCode.INVALID_ARGUMENT
    assert set(refusal.violations) == {
        *("sampling.logit_bias[0].token_id", "stop.token_ids[0]"),
        *("stop.min_tokens", "output.top_logprobs"),
    }


@pytest.mark.parametrize("count", [0, 2])
async def test_log_probabilities_of_the_prompt_come_before_the_answer(
    server: ServerHarness, count: int
) -> None:
    """A caller that scores texts would get numbers of other places, or none."""
    prompt = "abd" + "e" * 200  # "d" is not what follows "b"; more than one message
    message = request(prompt, max_tokens=3)
    message.output.prompt_logprobs = count
    answer = await send(server, message)
    kinds = answer.kinds
    assert kinds[0] == "accepted"
    assert 1 < kinds.count("prompt") < len(prompt)
    assert "prompt" not in kinds[kinds.index("delta") :]
    told = {
        place: each
        for response in answer.responses
        for place, each in enumerate(response.prompt.logprobs, response.prompt.first)
    }
    assert list(told) == list(range(1, len(prompt)))
    assert [each.chosen.token_id for each in told.values()] == list(prompt[1:].encode())
    assert told[1].chosen.logprob == pytest.approx(0.0, abs=1e-4)
    assert told[2].chosen.logprob == pytest.approx(-20.0, abs=1e-4)
    assert [len(each.top) for each in told.values()] == [count] * len(told)
    if count:
        assert told[2].top[0].token_id == ord("c")
