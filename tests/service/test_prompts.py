"""Prompts become token ids off the event loop, and not more of them than may wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pytest
from scripted_model import PATIENCE

from kvledger.errors import FieldViolation, InvalidRequest, QueueFull
from kvledger.rpc.prompts import PromptEncoder
from kvledger.tokenizer import ChatMessage
from kvledger.v1 import generation_pb2, models_pb2

LONG = "x" * 5000


class FakeTokenizer:
    """Encodes a text as its bytes; notes the thread, and waits where it is told to."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.chats: list[Sequence[ChatMessage]] = []
        self.entered = threading.Event()
        self.leave = threading.Event()
        self.leave.set()

    def encode_text(self, text: str) -> npt.NDArray[np.int32]:
        self.threads.append(threading.current_thread())
        if len(text) >= len(LONG):
            self.entered.set()
            assert self.leave.wait(PATIENCE)
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)

    def encode_chat(self, messages: Sequence[ChatMessage]) -> npt.NDArray[np.int32]:
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
