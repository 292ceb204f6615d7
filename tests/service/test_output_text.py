from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from kvledger.tokenizer import OutputText, Piece, Tokenizer


@dataclass(frozen=True)
class SmallVocabulary:
    token_bytes: list[bytes]


VOCABULARY = SmallVocabulary(
    [
        b"",
        b"a",
        b"b",
        b"ab",
        b"ba.",
        b". ",
        "é".encode()[:1],
        "é".encode()[1:],
        b"\xff",
        b" Par",
        b"is",
    ]
)
CONTROL, A, B, AB, BA_DOT, DOT, ACCENT_BEGIN, ACCENT_END, BROKEN, PAR, IS = range(11)


def run(ids: list[int], sequences: list[str], size: int) -> tuple[OutputText, list[Piece]]:
    output = OutputText(VOCABULARY, sequences)
    pieces = [output.feed(ids[start : start + size]) for start in range(0, len(ids), size)]
    return output, [*pieces, output.finish()]


def test_a_stop_that_ends_inside_a_token_ends_the_text_before_it() -> None:
    # The answer would contain the stop string, or miss that it occurred.
    output, pieces = run([A, PAR, IS, B], ["Pari"], size=1)
    assert "".join(piece.text for piece in pieces) == "a "
    assert output.stopped
    assert output.token_count == 3
    # The token that completes the stop string is released although only its rest was cut off.
    assert [token for piece in pieces for token in piece.token_ids] == [A, PAR, IS]


def test_a_token_leaves_with_the_last_of_its_text() -> None:
    # Usage counted from pieces would run ahead of the text that a client has.
    output = OutputText(VOCABULARY, ["baba"])
    assert output.feed([AB]) == Piece("a", [])
    assert output.feed([A]) == Piece("", [])
    assert output.feed([A]) == Piece("baa", [AB, A, A])


def test_tokens_without_text_travel_with_what_follows() -> None:
    # A message would hold tokens and no text, and a client would count them before it sees them.
    output = OutputText(VOCABULARY)
    assert output.feed([CONTROL]) == Piece("", [])
    assert output.feed([ACCENT_BEGIN]) == Piece("", [])
    assert output.feed([ACCENT_END]) == Piece("é", [CONTROL, ACCENT_BEGIN, ACCENT_END])
    assert output.feed([A, CONTROL]) == Piece("a", [A])
    assert output.finish() == Piece("", [CONTROL])
    assert output.token_count == 5


def test_finish_flushes_what_was_held_back() -> None:
    # The end of an answer would be lost when it looks like the beginning of a stop string.
    output = OutputText(VOCABULARY, ["ab\N{REPLACEMENT CHARACTER}!"])
    assert output.feed([AB, ACCENT_BEGIN]) == Piece("", [])
    assert output.finish() == Piece("ab\N{REPLACEMENT CHARACTER}", [AB, ACCENT_BEGIN])
    assert not output.stopped


def test_the_flushed_character_can_complete_a_stop_string() -> None:
    # The last message would contain a stop string.
    output = OutputText(VOCABULARY, ["b\N{REPLACEMENT CHARACTER}"])
    output.feed([AB, ACCENT_BEGIN])
    assert output.finish() == Piece("", [AB, ACCENT_BEGIN])
    assert output.stopped


def test_tokens_after_the_stop_are_ignored() -> None:
    # Tokens computed beyond the stop would be shown and charged.
    output = OutputText(VOCABULARY, ["."])
    assert output.feed([A, BA_DOT, B, B]) == Piece("aba", [A, BA_DOT])
    assert output.feed([B]) == Piece("", [])
    assert output.finish() == Piece("", [])
    assert output.token_count == 2


@given(
    st.lists(st.integers(min_value=0, max_value=len(VOCABULARY.token_bytes) - 1), max_size=30),
    st.lists(st.text(alphabet="ab. é", min_size=1, max_size=4), max_size=3),
    st.integers(min_value=1, max_value=8),
)
def test_chunks_change_neither_text_nor_tokens(
    ids: list[int], sequences: list[str], size: int
) -> None:
    # A client's answer and bill would depend on how fast it reads.
    whole, whole_pieces = run(ids, sequences, size=max(1, len(ids)))
    output, pieces = run(ids, sequences, size)
    assert "".join(piece.text for piece in pieces) == "".join(piece.text for piece in whole_pieces)
    released = [token for piece in pieces for token in piece.token_ids]
    assert released == ids[: output.token_count]
    assert (output.token_count, output.stopped) == (whole.token_count, whole.stopped)
    if not output.stopped:
        assert output.token_count == len(ids)
    # No piece holds a token of which some text is still to come.
    text_so_far, tokens_so_far = "", 0
    for piece in pieces[:-1]:
        text_so_far += piece.text
        tokens_so_far += len(piece.token_ids)
        bytes_so_far = b"".join(VOCABULARY.token_bytes[token] for token in ids[:tokens_so_far])
        if not output.stopped:
            assert len(bytes_so_far.decode("utf-8", "replace")) <= len(text_so_far)


def test_stop_over_the_real_vocabulary(tokenizer: Tokenizer) -> None:
    # A stop string that no single token contains would never be found.
    ids = tokenizer.encode_text("The capital of France is Paris, of course.").tolist()
    for size in (1, 4, 8):
        output = OutputText(tokenizer, ["Pari"])
        text = "".join(
            output.feed(ids[start : start + size]).text for start in range(0, len(ids), size)
        )
        assert text + output.finish().text == "The capital of France is "
        assert output.stopped
        assert tokenizer.decode(ids[: output.token_count]) == "The capital of France is Paris"


def test_a_stop_token_ends_the_text_and_is_counted() -> None:
    # The token's text would be sent, or usage not add up to what was computed.
    output = OutputText(VOCABULARY, ["b. "], stop_ids={IS})
    assert output.feed([A, B, PAR]) == Piece("ab Par", [A, B, PAR])
    assert output.feed([B, IS, A]) == Piece("b", [B, IS])
    assert output.stopped
    assert output.token_count == 5
    assert output.feed([A]) == Piece("", [])
    assert output.finish() == Piece("", [])


def test_a_stop_token_ends_a_character_that_is_cut() -> None:
    # Bytes before the stop token would be lost, or wait for ever for the rest of a character.
    output = OutputText(VOCABULARY, stop_ids=[A])
    assert output.feed([ACCENT_BEGIN, A]) == Piece("\N{REPLACEMENT CHARACTER}", [ACCENT_BEGIN, A])


@given(
    ids=st.lists(st.integers(0, len(VOCABULARY.token_bytes) - 1), max_size=20),
    stop_ids=st.sets(st.integers(0, len(VOCABULARY.token_bytes) - 1), max_size=3),
    size=st.integers(1, 7),
)
def test_a_stop_token_is_as_if_the_output_had_ended_before_it(
    ids: list[int], stop_ids: set[int], size: int
) -> None:
    # How many tokens come at once would decide what a client sees of the end.
    output = OutputText(VOCABULARY, [". b"], stop_ids)
    pieces = [output.feed(ids[start : start + size]) for start in range(0, len(ids), size)]
    pieces.append(output.finish())
    place = next((i for i, token in enumerate(ids) if token in stop_ids), len(ids))
    before, wanted = run(ids[:place], [". b"], 1)
    assert "".join(p.text for p in pieces) == "".join(p.text for p in wanted)
    taken = [token for piece in pieces for token in piece.token_ids]
    stops_at_id = place < len(ids) and not before.stopped
    assert taken == ids[: before.token_count + stops_at_id]
    assert output.token_count == len(taken)
    assert output.stopped == (before.stopped or stops_at_id)
