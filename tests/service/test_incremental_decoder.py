from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvledger.tokenizer import IncrementalDecoder, Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# One token for each byte, then two longer ones and one without bytes, like a control token.
BYTE_TOKENS = [bytes([byte]) for byte in range(256)] + [b"ab", "日".encode(), b""]


def chunks(ids: list[int], size: int) -> list[list[int]]:
    return [ids[start : start + size] for start in range(0, len(ids), size)]


def decoded(token_bytes: list[bytes], pieces: list[list[int]]) -> str:
    decoder = IncrementalDecoder(token_bytes)
    return "".join(map(decoder.feed, pieces)) + decoder.finish()


@given(
    st.lists(st.integers(min_value=0, max_value=len(BYTE_TOKENS) - 1), max_size=60),
    st.lists(st.integers(min_value=0, max_value=1000), max_size=8),
)
def test_every_split_gives_the_text_of_the_joined_bytes(ids: list[int], cuts: list[int]) -> None:
    # A streamed answer would differ from the same answer sent at once.
    borders = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    pieces = [ids[start:end] for start, end in itertools.pairwise(borders)]
    whole = b"".join(BYTE_TOKENS[token_id] for token_id in ids).decode("utf-8", "replace")
    assert decoded(BYTE_TOKENS, pieces) == whole


@given(st.text())
def test_only_whole_characters_come_out(text: str) -> None:
    # A reader would see U+FFFD in place of a character that arrives in two tokens.
    decoder = IncrementalDecoder(BYTE_TOKENS)
    out = ""
    for byte in text.encode("utf-8", "replace"):
        out += decoder.feed([byte])
        assert text.encode("utf-8", "replace").startswith(out.encode())
    assert not decoder.unfinished
    assert decoder.finish() == ""


def test_an_unfinished_character_comes_out_at_the_end() -> None:
    # An answer cut inside a character would lose the fact that something was there.
    decoder = IncrementalDecoder(BYTE_TOKENS)
    assert decoder.feed(list("é".encode())[:1]) == ""
    assert decoder.unfinished
    assert decoder.finish() == REPLACEMENT


@pytest.mark.parametrize("token_id", [-1, len(BYTE_TOKENS)])
def test_an_id_outside_the_vocabulary_raises(token_id: int) -> None:
    # A wrong id would read another token's text.
    with pytest.raises(IndexError):
        IncrementalDecoder(BYTE_TOKENS).feed([token_id])


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_a_character_over_several_tokens_is_never_broken(tokenizer: Tokenizer, size: int) -> None:
    # Chinese and Japanese answers would lose characters at the borders of messages.
    ids = [23274, 115, 40993, 179, 120, 248]
    assert decoded(tokenizer.token_bytes, chunks(ids, size)) == "日本語"


@pytest.mark.parametrize("size", [1, 4, 8])
def test_a_rare_letter_in_a_stream_suppresses_nothing_after_it(
    tokenizer: Tokenizer, size: int
) -> None:
    # All text after the letter would be missing from a stream, though not from a whole answer.
    ids = [*tokenizer.encode_text("Repeat: ").tolist(), 143, 233, 143, 233, 143, 233]
    ids += tokenizer.encode_text(" abc").tolist()
    assert decoded(tokenizer.token_bytes, chunks(ids, size)) == "Repeat: ďďď abc"


@settings(max_examples=50)
@given(data=st.data())
def test_any_ids_in_any_chunks_equal_the_whole(tokenizer: Tokenizer, data: st.DataObject) -> None:
    # A token would decode differently alone than among its neighbours.
    last = tokenizer.vocabulary_size - 1
    ids = data.draw(st.lists(st.integers(min_value=0, max_value=last), max_size=40))
    size = data.draw(st.integers(min_value=1, max_value=9))
    assert decoded(tokenizer.token_bytes, chunks(ids, size)) == tokenizer.decode(ids)
