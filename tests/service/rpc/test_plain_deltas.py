"""Deltas by the short way: the same bytes as by the long one."""

from __future__ import annotations

import random

import pytest

from kvledger.rpc.samples import PlainDeltas, SampleStream
from kvledger.tokenizer import OutputText, Tokenizer
from kvledger.v1 import generation_pb2 as pb

TEXTS = ["Once upon a time, the end.\n\n", "naïve 日本 \U0001f642 x", "a" * 40]
OPTIONS = {
    "plain": (pb.OutputOptions(), []),
    "ids": (pb.OutputOptions(token_ids=True), []),
    "whole": (pb.OutputOptions(final_only=True), []),
    "stops": (pb.OutputOptions(), ["the", "\n\n"]),
}


@pytest.mark.parametrize("index", [0, 3])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_short_way_says_what_the_long_one_says(
    tokenizer: Tokenizer, name: str, index: int
) -> None:
    """A client would be told another text, or a count that does not add up to what it pays for."""
    options, stops = OPTIONS[name]
    deltas = PlainDeltas(tokenizer)
    for seed in range(30):
        chance = random.Random(seed)
        text = chance.choice(TEXTS)
        tokens = [*tokenizer.encode_text(text).tolist(), min(tokenizer.eos_ids)] * 2
        tokens += [chance.randrange(tokenizer.vocabulary_size) for _ in range(200)]
        short, long = (
            SampleStream(index, OutputText(tokenizer, stops), options, deltas) for _ in range(2)
        )
        said, place = [], 0
        while place < len(tokens):
            some = tokens[place : place + chance.choice([1, 1, 1, 2, 5])]
            place += len(some)
            expected = long.feed(some, (), None, is_last=False)
            data = short.feed_tokens(some)
            assert data == (None if expected is None else expected.SerializeToString())
            said.append(data)
        assert short.token_count == long.token_count
        assert short.stopped == long.stopped
        if name == "plain":
            messages = [pb.GenerateResponse.FromString(data) for data in said if data]
            assert sum(message.delta.tokens for message in messages) >= len(tokens) - 8
    assert bool(deltas) == (name == "plain" and index == 0)


def test_ready_made_deltas_take_little_memory(tokenizer: Tokenizer) -> None:
    """A long-lived server would keep more for its vocabulary than for its streams."""
    deltas = PlainDeltas(tokenizer)
    plain = [i for i, data in enumerate(tokenizer.token_bytes) if data and data.isascii()]
    assert len(plain) > 10_000
    total = sum(len(deltas[token]) + 33 for token in plain)
    assert len(deltas) == len(plain)
    assert (total + deltas.__sizeof__()) / len(plain) < 150
