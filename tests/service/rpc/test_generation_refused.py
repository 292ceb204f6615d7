"""Requests that Generate refuses: what is wrong, what may be done, and nothing of their text."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.rpc import error_details_pb2
from scripted_model import PATIENCE, VOCABULARY
from server_harness import ServerHarness, serving

from kvledger.v1 import generation_pb2 as pb

CANARY = "canary-4711"


@pytest_asyncio.fixture
async def server() -> AsyncIterator[ServerHarness]:
    async with serving() as server:
        yield server


@pytest.mark.parametrize(
    ("fields", "violated"),
    [
        ({}, {"prompt": "is not set; give text, token_ids or chat"}),
        ({"text": ""}, {"text": "0 bytes, allowed are 1 to 1048576"}),
        ({"ids": [VOCABULARY]}, {"token_ids.ids[0]": "261 is outside the vocabulary"}),
        ({"ids": [1, 2**32 - 1]}, {"token_ids.ids[1]": "4294967295 is outside the vocabulary"}),
        ({"chat": [(0, CANARY)]}, {"chat.messages[0].role": "0 is not a role"}),
        ({"chat": [(9, CANARY)]}, {"chat.messages[0].role": "9 is not a role"}),
        ({"chat": []}, {"chat.messages": "0 messages, allowed are 1 to 1024"}),
        ({"max_tokens": 0}, {"stop.max_tokens": "0 tokens, allowed are 1 to 2147483647"}),
        ({"max_tokens": 2**32 - 1}, {"stop.max_tokens": "allowed are 1 to 2147483647"}),
        ({"stop": ("",)}, {"stop.sequences[0]": "0 bytes, allowed are 1 to 256"}),
        ({"stop": ("x", CANARY * 30)}, {"stop.sequences[1]": "330 bytes, allowed are 1 to 256"}),
        ({"stop": (CANARY,) * 17}, {"stop.sequences": "17 sequences, allowed are 0 to 16"}),
        ({"sampling": {"temperature": -0.5}}, {"sampling.temperature": "-0.5, allowed are 0"}),
        ({"sampling": {"temperature": 100.5}}, {"sampling.temperature": "100.5, allowed are 0"}),
        ({"sampling": {"temperature": float("nan")}}, {"sampling.temperature": "is not a finite"}),
        ({"sampling": {"temperature": float("inf")}}, {"sampling.temperature": "is not a finite"}),
        ({"sampling": {"top_p": 0.0}}, {"sampling.top_p": "0 keeps no token"}),
        ({"sampling": {"top_p": 1.5}}, {"sampling.top_p": "1.5, allowed are 0 to 1"}),
        ({"sampling": {"top_k": 2**31}}, {"sampling.top_k": "allowed are 0 to 2147483647"}),
        ({"sampling": {"min_p": -1.0}}, {"sampling.min_p": "-1, allowed are 0 to 1"}),
        ({"priority": 11}, {"priority": "11, allowed are -10 to 10"}),
        ({"priority": -11}, {"priority": "-11, allowed are -10 to 10"}),
        ({"seconds_to_wait": -1.0}, {"queue_timeout": "-1 seconds, allowed are 0 to 3600"}),
        ({"seconds_to_wait": 1e7}, {"queue_timeout": "seconds, allowed are 0 to 3600"}),
        ({"model": CANARY * 100}, {"model": "1100 bytes, allowed are 0 to 256"}),
    ],
)
async def test_what_is_wrong_is_named(
    server: ServerHarness, fields: dict[str, Any], violated: dict[str, str]
) -> None:
    """A caller would have to guess, or find its own text in somebody's error log."""
    prompted = {"text", "ids", "chat"} & set(fields) or not fields
    refusal = await server.refusal(**({} if prompted else {"text": CANARY}), **fields)
    assert refusal.code == grpc.StatusCode.INVALID_ARGUMENT
    assert refusal.reason == "FIELD_INVALID"
    assert set(refusal.violations) == set(violated)
    for field, reason in violated.items():
        assert reason in refusal.violations[field]
        assert field in refusal.message
    assert CANARY not in refusal.everything()
    assert CANARY not in str(server.log.lines)
    assert (await server.answer(text="a")).text == "bcde"
    assert len(server.log.reasons) == 1, "a refused request has no receipt"


async def test_everything_that_is_wrong_is_named_at_once(server: ServerHarness) -> None:
    """A caller would mend one field after the other, each with a call of its own (B47)."""
    refusal = await server.refusal(
        max_tokens=0, priority=99, sampling={"top_p": 7.0, "temperature": -1.0}, stop=("",)
    )
    assert list(refusal.violations) == [
        "prompt",
        "sampling.temperature",
        "sampling.top_p",
        "stop.max_tokens",
        "stop.sequences[0]",
        "priority",
    ]


async def test_a_thousand_mistakes_still_make_a_readable_answer(server: ServerHarness) -> None:
    """The list of mistakes would be too large for the metadata, and the status be lost."""
    refusal = await server.refusal(chat=[(0, CANARY)] * 1000)
    assert refusal.code == grpc.StatusCode.INVALID_ARGUMENT
    assert len(refusal.violations) == 16


def _lists(count: int) -> list[tuple[str, dict[str, Any]]]:
    return [
        ("token_ids.ids", {"ids": [97] * count}),
        ("chat.messages", {"chat": [(pb.ROLE_USER, "")] * count}),
        ("stop.sequences", {"text": "a", "stop": ("x",) * count}),
    ]


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        *[row for row in _lists(17) if row[0] == "stop.sequences"],
        *[row for row in _lists(1025) if row[0] == "chat.messages"],
        *[row for row in _lists(256 * 1024 + 1) if row[0] == "token_ids.ids"],
        *[row for row in _lists(100_000) if row[0] != "token_ids.ids"],
    ],
)
async def test_lists_have_limits(server: ServerHarness, field: str, fields: dict[str, Any]) -> None:
    """A limit that this way in does not know would let anybody fill the memory (B77)."""
    refusal = await server.refusal(**fields)
    assert set(refusal.violations) == {field}


async def test_lists_at_their_limits_are_taken(server: ServerHarness) -> None:
    """A limit that is one too low breaks what the contract promises (B77)."""
    answer = await server.answer(text="a", stop=tuple(f"{n}!" for n in range(16)))
    assert answer.text == "bcde"
    for field, fields in (_lists(256 * 1024)[0], _lists(1024)[1]):
        refusal = await server.refusal(**fields)
        assert set(refusal.violations) == {"prompt"}, f"{field} is fine, but the prompt is long"


async def test_another_model_is_not_found(server: ServerHarness) -> None:
    """A request for another model would be answered by this one."""
    refusal = await server.refusal(text="a", model=CANARY)
    assert refusal.code == grpc.StatusCode.NOT_FOUND
    assert refusal.reason == "MODEL_UNKNOWN"
    assert CANARY not in refusal.everything()


async def _fill(server: ServerHarness, count: int) -> list[asyncio.Task[Any]]:
    """Requests that run at a closed gate, each in the engine's hands."""
    tasks = [asyncio.create_task(server.answer(text="a", max_tokens=50)) for _ in range(count)]
    await server.until(lambda: len(server.server._admission.open_requests) == count)
    return tasks


async def test_a_full_queue_says_when_to_come_back() -> None:
    """Clients would try again at once, all together, and find it full again."""
    async with serving("--max-queued", "2", sequences_max=1) as server:
        gate = server.gate()
        tasks = await _fill(server, 1)
        await server.until(lambda: server.server._admission.streams.waiting_count == 0)
        tasks += await _fill_more(server, 2)
        refusal = await server.refusal(text=CANARY)
        assert refusal.code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refusal.reason == "QUEUE_FULL"
        assert refusal.kinds == {"ErrorInfo", "QuotaFailure", "RetryInfo"}
        (violation,) = refusal.detail(error_details_pb2.QuotaFailure).violations
        assert "2 requests are waiting" in violation.description
        assert 0.1 <= refusal.retry_seconds <= 30.0
        pushback = refusal.metadata["grpc-retry-pushback-ms"]
        assert int(pushback) == round(refusal.retry_seconds * 1000)
        assert CANARY not in refusal.everything()
        gate.open()
        assert {answer.reason for answer in await asyncio.gather(*tasks)} == {"LENGTH"}
        assert (await server.answer(text="a")).text == "bcde", "there is room again"
        assert len(server.log.reasons) == 4, "who was refused has no receipt"


async def test_who_cancels_while_waiting_makes_room_before_the_step_ends() -> None:
    """Others would be refused for as long as a step takes, which nobody waits for."""
    async with serving("--max-queued", "1", sequences_max=1) as server:
        gate = server.gate()
        tasks = await _fill(server, 1)
        await server.until(lambda: server.server._admission.streams.waiting_count == 0)
        (waiting,) = await _fill_more(server, 1)
        assert (await server.refusal(text=CANARY)).reason == "QUEUE_FULL"
        waiting.cancel()
        # The gate stays closed: no step ends.
        await server.until(lambda: server.server._admission.streams.waiting_count == 0)
        tasks += await _fill_more(server, 1)
        gate.open()
        assert {answer.reason for answer in await asyncio.gather(*tasks)} == {"LENGTH"}
        assert sorted(server.log.reasons) == ["cancelled", "length", "length"]
        await server.require_all_free()


async def test_a_burst_takes_the_free_places_before_it_queues() -> None:
    """An idle server would refuse requests that it could begin at once."""
    async with serving("--max-queued", "2", sequences_max=4) as server:
        gate = server.gate()
        tasks = await _fill(server, 4 + 2)
        assert (await server.refusal(text=CANARY)).reason == "QUEUE_FULL"
        gate.open()
        assert {answer.reason for answer in await asyncio.gather(*tasks)} == {"LENGTH"}
        await server.require_all_free()


async def _fill_more(server: ServerHarness, count: int) -> list[asyncio.Task[Any]]:
    tasks = [asyncio.create_task(server.answer(text="a", max_tokens=2)) for _ in range(count)]
    await server.until(lambda: server.server._admission.streams.waiting_count == count)
    return tasks


async def test_waiting_has_the_limit_that_the_request_names() -> None:
    """A caller who would rather go elsewhere would be kept waiting."""
    async with serving(sequences_max=1) as server:
        gate = server.gate()
        tasks = await _fill(server, 1)
        waiting = asyncio.create_task(server.refusal(text=CANARY, seconds_to_wait=0.05))
        await server.until(lambda: server.ends)
        gate.let(2)
        refusal = await waiting
        assert refusal.code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refusal.reason == "QUEUE_TIMEOUT"
        assert refusal.retry_seconds >= 0.1
        assert int(refusal.metadata["grpc-retry-pushback-ms"]) >= 100
        assert CANARY not in refusal.everything()
        gate.open()
        assert (await tasks[0]).reason == "LENGTH"
        assert sorted(server.log.reasons) == ["cancelled", "length"]
        await server.require_all_free()


async def test_the_limit_on_waiting_holds_while_a_step_hangs() -> None:
    """A caller would wait as long as the slowest step, whatever limit it named."""
    async with serving(sequences_max=1) as server:
        gate = server.gate()
        tasks = await _fill(server, 1)
        await server.until(lambda: gate.arrived == 1)
        refusal = await asyncio.wait_for(
            server.refusal(text="a", seconds_to_wait=0.05), PATIENCE / 2
        )
        assert refusal.reason == "QUEUE_TIMEOUT"
        gate.open()
        assert (await tasks[0]).reason == "LENGTH"
        await server.require_all_free()
        assert sorted(server.log.reasons) == ["cancelled", "length"]


async def test_the_limit_on_waiting_is_none_on_running(server: ServerHarness) -> None:
    """A request that runs longer than it may wait would be cut off."""
    gate = server.gate()
    over = time.monotonic() + 1.1
    task = asyncio.create_task(server.answer(text="a", seconds_to_wait=1.0))
    gate.let(1)
    await server.until(lambda: gate.arrived == 2)
    await server.until(lambda: time.monotonic() > over)
    gate.open()
    assert (await task).text == "bcde"


async def test_a_chat_for_a_model_without_a_template_is_refused() -> None:
    """A model that cannot chat would be fed some other model's format."""
    async with serving() as server:
        tokenizer = server.model.tokenizer
        template, tokenizer._template = tokenizer._template, None
        try:
            refusal = await server.refusal(chat=[(pb.ROLE_USER, CANARY)])
        finally:
            tokenizer._template = template
        assert refusal.code == grpc.StatusCode.INVALID_ARGUMENT
        assert CANARY not in refusal.everything()
        assert set(refusal.violations) == {"chat"}
