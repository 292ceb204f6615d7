"""Lists are counted before they are decoded: the same limits, without the memory."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from processor_time import takes_at_most

from kvledger.limits import LIMITS
from kvledger.rpc.item_counts import too_many_items
from kvledger.v1 import generation_pb2 as pb

KIND = pb.GenerateRequest.DESCRIPTOR
# Makes a message large enough to be counted.
FILLING = {"text": "x" * 70_000}


def message(**fields: Any) -> bytes:
    return pb.GenerateRequest(**fields).SerializeToString()


def of(path: str, count: int) -> bytes:
    """A large message with so many items in a list."""
    if path == "chat.messages":
        entries = [pb.ChatMessage(role=pb.ROLE_USER, content="x" * 100)] * count
        return message(chat=pb.ChatPrompt(messages=entries))
    if path == "sampling.logit_bias":
        return message(sampling=pb.SamplingOptions(logit_bias=[pb.LogitBias()] * count), **FILLING)
    return message(stop=pb.StopOptions(sequences=["ab"] * count), **FILLING)


@pytest.mark.parametrize("path", ["chat.messages", "sampling.logit_bias", "stop.sequences"])
def test_a_list_may_be_as_long_as_the_table_says(path: str) -> None:
    """What the validator takes would be refused before it, or the other way round (B49, B77)."""
    most = int(LIMITS[path].most)
    assert too_many_items(of(path, most), KIND) is None
    found = too_many_items(of(path, most + 1), KIND)
    assert found is not None
    assert found.field == path
    assert str(most) in found.reason


def test_a_list_in_pieces_counts_as_one() -> None:
    """Protobuf joins what comes in pieces, so many short lists make a long one."""
    piece = pb.GenerateRequest(stop=pb.StopOptions(sequences=["a"] * 10)).SerializeToString()
    filling = message(**FILLING)
    assert too_many_items(piece + filling, KIND) is None
    assert too_many_items(piece + filling + piece, KIND) is not None
    assert len(pb.GenerateRequest.FromString(piece + filling + piece).stop.sequences) == 20


def test_long_lists_of_numbers_are_fine() -> None:
    """The longest prompt of ids would be refused for its length."""
    ids = pb.TokenIds(ids=[300_000 % 49_152] * (256 * 1024))
    assert too_many_items(message(token_ids=ids), KIND) is None


def test_very_many_small_fields_are_refused() -> None:
    """Counting would itself take long."""
    flood = b"\x48\x01" * 2_000_000  # priority, again and again
    with takes_at_most(2):
        found = too_many_items(flood, KIND)
    assert found is not None
    assert found.field == "request"


@pytest.mark.parametrize(
    "hostile",
    [
        message(stop=pb.StopOptions(sequences=["x"] * 1_390_000), text="a"),
        message(chat=pb.ChatPrompt(messages=[pb.ChatMessage()] * 1_000_000)),
        message(sampling=pb.SamplingOptions(logit_bias=[pb.LogitBias()] * 1_000_000)),
    ],
    ids=["stop", "chat", "bias"],
)
def test_a_million_items_are_refused_at_once(hostile: bytes) -> None:
    """One message would take sixty megabytes, and the event loop's time (B49)."""
    tracemalloc.start()
    try:
        with takes_at_most(0.5):
            assert too_many_items(hostile, KIND) is not None
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_whatever_can_be_decoded_and_is_short_passes() -> None:
    """Bytes that are a message would be refused because they are counted wrongly."""
    chance = random.Random(3)
    valid = of("chat.messages", 700)
    for _ in range(300):
        data = bytearray(valid)
        for _ in range(chance.randint(0, 3)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        found = too_many_items(bytes(data), KIND)
        if found is None:
            continue
        try:
            decoded = pb.GenerateRequest.FromString(bytes(data))
        except DecodeError:
            continue
        assert len(decoded.chat.messages) > 1024 or len(decoded.stop.sequences) > 16
