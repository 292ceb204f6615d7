"""Prompts become token ids off the event loop, and not more of them than may wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scripted_model import PATIENCE

from kvledger.errors import FieldViolation, InvalidRequest, QueueFull
from kvledger.rpc.prompts import PromptEncoder
from kvledger.tokenizer import ChatMessage, Tool, ToolCall
from kvledger.v1 import generation_pb2, models_pb2

LONG = "x" * 5000


class FakeTokenizer:
    """Encodes a text as its bytes; notes the thread, and waits where it is told to."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.chats: list[Sequence[ChatMessage]] = []
        self.others: tuple[Sequence[Tool], Mapping[str, Any]] = ((), {})
        self.entered = threading.Event()
        self.leave = threading.Event()
        self.leave.set()

    def encode_text(self, text: str) -> npt.NDArray[np.int32]:
        self.threads.append(threading.current_thread())
        if len(text) >= len(LONG):
            self.entered.set()
            assert self.leave.wait(PATIENCE)
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)

    def encode_chat(
        self, messages: Sequence[ChatMessage], tools: Sequence[Tool], arguments: Mapping[str, Any]
    ) -> npt.NDArray[np.int32]:
        self.others = (tools, arguments)
        self.chats.append(messages)
        if any(message.content == "refused" for message in messages):
            raise InvalidRequest(FieldViolation("chat", "is refused"))
        return self.encode_text("".join(message.content for message in messages))


@pytest.fixture
def tokenizer() -> FakeTokenizer:
    return FakeTokenizer()


@pytest.fixture
def encoder(tokenizer: FakeTokenizer) -> Iterator[PromptEncoder]:
    encoder = PromptEncoder(tokenizer, waiting_max=2)  # type: ignore[arg-type]
    yield encoder
    tokenizer.leave.set()
    encoder.close()


def text(prompt: str) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(text=prompt)


def chat(*contents: str) -> generation_pb2.GenerateRequest:
    roles = (generation_pb2.ROLE_SYSTEM, generation_pb2.ROLE_USER, generation_pb2.ROLE_ASSISTANT)
    messages = [
        generation_pb2.ChatMessage(role=role, content=content)
        for role, content in zip(roles, contents, strict=False)
    ]
    return generation_pb2.GenerateRequest(chat=generation_pb2.ChatPrompt(messages=messages))


async def until_entered(tokenizer: FakeTokenizer) -> None:
    """Waits, without holding up the event loop, until the thread is at work."""
    assert await asyncio.to_thread(tokenizer.entered.wait, PATIENCE)


async def test_ids_are_used_as_they_are(tokenizer: FakeTokenizer, encoder: PromptEncoder) -> None:
    """Ids that a client chose would be encoded again, or arrive in another width."""
    prompt = generation_pb2.TokenIds(ids=[0, 5, 2**31 - 1])
    ids = await encoder.encode(generation_pb2.GenerateRequest(token_ids=prompt))
    assert ids.dtype == np.int32
    assert ids.tolist() == [0, 5, 2**31 - 1]
    assert tokenizer.threads == []


async def test_texts_are_encoded_whatever_their_length(encoder: PromptEncoder) -> None:
    """A text at the border between the two ways would be encoded twice or never."""
    for length in (1, 511, 512, 513):
        assert (await encoder.encode(text("x" * length))).tolist() == [ord("x")] * length


async def test_a_request_to_tokenize_is_encoded_alike(encoder: PromptEncoder) -> None:
    """Tokenize would not tell the ids that Generate computes."""
    ids = await encoder.encode(models_pb2.TokenizeRequest(text="abc"))
    assert ids.tolist() == list(b"abc")
    ids = await encoder.encode(models_pb2.TokenizeRequest(chat=chat("a", "bc").chat))
    assert ids.tolist() == list(b"abc")


async def test_chats_keep_their_order_and_roles(
    tokenizer: FakeTokenizer, encoder: PromptEncoder
) -> None:
    """The model would read the person's words as its instructions."""
    await encoder.encode(chat("one", "two", "three"))
    assert list(tokenizer.chats[0]) == [
        ChatMessage("system", "one"),
        ChatMessage("user", "two"),
        ChatMessage("assistant", "three"),
    ]


def with_tools(**texts: str) -> generation_pb2.GenerateRequest:
    """A chat with a tool, a call, a result and a variable; `texts` replaces some of their JSON."""
    request = chat("one", "two")
    parameters = texts.get("parameters", '{"type": "object", "properties": {"a": {}}}')
    request.chat.tools.add(name="f", description="does f", parameters=parameters)
    request.chat.tools.add(name="g")
    request.chat.messages.add(role=generation_pb2.ROLE_ASSISTANT, reasoning="hm").tool_calls.add(
        id="1", name="f", arguments=texts.get("arguments", '{"a": [1, "é", null]}')
    )
    request.chat.messages.add(
        role=generation_pb2.ROLE_TOOL, content="ok", tool_call_id="1", name="f"
    )
    request.chat.template_arguments["enable_thinking"] = texts.get("variable", "false")
    return request


async def test_tools_calls_and_results_are_passed_on(
    tokenizer: FakeTokenizer, encoder: PromptEncoder
) -> None:
    """The model would not learn what it may call, or what came of its call."""
    await encoder.encode(with_tools())
    assert list(tokenizer.chats[0])[2:] == [
        ChatMessage(
            "assistant", "", reasoning="hm", tool_calls=(ToolCall("1", "f", {"a": [1, "é", None]}),)
        ),
        ChatMessage("tool", "ok", tool_call_id="1", name="f"),
    ]
    assert tokenizer.others == (
        [
            Tool("f", "does f", {"type": "object", "properties": {"a": {}}}),
            Tool("g", "", {"type": "object", "properties": {}}),
        ],
        {"enable_thinking": False},
    )


CANARY = "what-only-the-client-may-read"


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("parameters", "chat.tools[0].parameters"),
        ("arguments", "chat.messages[2].tool_calls[0].arguments"),
        ("variable", "chat.template_arguments"),
    ],
)
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f'{{"{CANARY}": }}', "is no JSON: character 34 cannot stand there"),
        ("", "is no JSON: character 0 cannot stand there"),
        ("NaN", "holds a number that is too large, or is none"),
        ("1e999", "holds a number that is too large, or is none"),
        ("9" * 5000, "holds a number that is too large, or is none"),
        (f"[{'1,' * 40_000}1]", "holds more values than the 32768 of all JSON in a chat"),
        ("[" * 25 + "]" * 25, "nests values deeper than 24 levels"),
        ('{"a":' * 25 + "1" + "}" * 25, "nests values deeper than 24 levels"),
        ("[" * 200_000, "nests values deeper than 24 levels"),
        (f'["{CANARY}"]', "is no JSON object"),
        ("null", "is no JSON object"),
    ],
)
async def test_text_that_should_be_json_is_refused_with_its_place(
    encoder: PromptEncoder, name: str, field: str, text: str, reason: str
) -> None:
    """A client would get INTERNAL, or a prompt without what it sent."""
    if (name, text) == ("parameters", "") or (name == "variable" and "object" in reason):
        await encoder.encode(with_tools(**{name: text}))  # no parameters, and any JSON
        return
    with pytest.raises(InvalidRequest) as refused:
        await encoder.encode(with_tools(**{name: text}))
    assert refused.value.violations == (FieldViolation(field, reason),)
    assert CANARY not in str(refused.value)


async def test_json_of_the_deepest_level_is_taken(encoder: PromptEncoder) -> None:
    """The documented limit would be refused."""
    await encoder.encode(with_tools(variable="[" * 24 + "]" * 24))
    await encoder.encode(with_tools(arguments='{"a":' * 24 + "1" + "}" * 24))


async def test_values_of_all_json_are_counted(encoder: PromptEncoder) -> None:
    """A mebibyte of empty lists would keep the thread that everybody's prompts need."""
    half = "[" + ",".join(["[]"] * 16_384) + "]"
    request = with_tools(arguments=f'{{"a": {half}}}')
    await encoder.encode(request)
    request.chat.template_arguments["b"] = half
    with pytest.raises(InvalidRequest, match="holds more values than"):
        await encoder.encode(request)


async def test_long_work_leaves_the_event_loop_alone(
    tokenizer: FakeTokenizer, encoder: PromptEncoder
) -> None:
    """Every stream would stand still while one long prompt is encoded."""
    tokenizer.leave.clear()
    long = asyncio.create_task(encoder.encode(text(LONG)))
    await until_entered(tokenizer)  # the loop runs, though the tokenizer has not come back
    assert (await encoder.encode(text("short"))).tolist() == list(b"short")
    assert not long.done()
    tokenizer.leave.set()
    assert len(await long) == len(LONG)
    await encoder.encode(chat("a chat"))
    here = threading.current_thread()
    assert [thread is here for thread in tokenizer.threads] == [False, True, False]


async def test_one_more_than_may_wait_is_refused(
    tokenizer: FakeTokenizer, encoder: PromptEncoder
) -> None:
    """Prompts would pile up in memory before the queue's own limit could count them."""
    tokenizer.leave.clear()
    tasks = [asyncio.create_task(encoder.encode(text(LONG))) for _ in range(2)]
    await until_entered(tokenizer)
    for request in (text(LONG), chat("hello")):
        with pytest.raises(QueueFull) as refused:
            await encoder.encode(request)
        assert refused.value.queued == 2
        assert refused.value.retry_after_seconds > 0
    await encoder.encode(text("short"))  # needs no thread
    tokenizer.leave.set()
    await asyncio.gather(*tasks)
    assert len(await encoder.encode(text(LONG))) == len(LONG), "the places are free again"


async def test_a_refusal_frees_its_place_and_comes_through(encoder: PromptEncoder) -> None:
    """After two chats that the template refuses, every prompt would be refused."""
    for _ in range(5):
        with pytest.raises(InvalidRequest, match="is refused"):
            await encoder.encode(chat("x", "refused"))
    assert (await encoder.encode(chat("fine"))).tolist() == list(b"fine")


async def test_who_gives_up_frees_their_place(
    tokenizer: FakeTokenizer, encoder: PromptEncoder
) -> None:
    """Clients that hang up while they wait would block everybody after them."""
    tokenizer.leave.clear()
    working = asyncio.create_task(encoder.encode(text(LONG)))
    await until_entered(tokenizer)
    for _ in range(5):
        waiting = asyncio.create_task(encoder.encode(text(LONG)))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    tokenizer.leave.set()
    await working
    assert len(tokenizer.threads) == 1, "what nobody waits for is not computed"
    await asyncio.gather(*(encoder.encode(text(LONG)) for _ in range(2)))


async def test_a_tenant_with_many_prompts_keeps_no_other_waiting(
    tokenizer: FakeTokenizer, encoder: PromptEncoder
) -> None:
    """Long texts of one tenant would fill the line, or be all encoded before another's."""
    tokenizer.leave.clear()
    order: list[str] = []

    async def encode(tenant: int, name: str) -> None:
        await encoder.encode(text(LONG), tenant)
        order.append(name)

    tasks = [asyncio.create_task(encode(1, f"one {count}")) for count in range(2)]
    await until_entered(tokenizer)
    with pytest.raises(QueueFull):
        await encoder.encode(text(LONG), 1)
    tasks += [asyncio.create_task(encode(tenant, f"of {tenant}")) for tenant in (2, 3)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await encoder.encode(text(LONG), 2)
    tokenizer.leave.set()
    await asyncio.gather(*tasks)
    assert order == ["one 0", "one 1", "of 2", "of 3"], "each tenant has one in the line"
    assert encoder._waiting == 0
    assert not encoder._own
