from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvledger.tokenizer import StopStrings

# Few letters, so that stop strings overlap with themselves and with one another.
SHORT_TEXTS = st.text(alphabet="ab", max_size=40)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4)


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    borders = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(borders)]


def naive_cut(text: str, sequences: list[str]) -> int | None:
    """Where the text ends: before the occurrence with the first end, the longest of those."""
    occurrences = [
        (text.find(sequence) + len(sequence), text.find(sequence))
        for sequence in sequences
        if sequence in text
    ]
    return min(occurrences)[1] if occurrences else None


def naive_held(text: str, sequences: list[str]) -> int:
    """Characters of the longest suffix of the text that begins a stop string."""
    beginnings = {sequence[:length] for sequence in sequences for length in range(len(sequence))}
    return max(
        length for length in range(len(text) + 1) if text[len(text) - length :] in beginnings | {""}
    )


@given(SHORT_TEXTS, STOPS, st.lists(st.integers(min_value=0, max_value=1000), max_size=8))
def test_every_split_gives_what_a_search_of_the_whole_text_gives(
    text: str, sequences: list[str], cuts: list[int]
) -> None:
    # The text a client gets would depend on how the tokens happened to be batched.
    stops = StopStrings(sequences)
    fed = ""
    out = ""
    for piece in pieces_of(text, cuts):
        out += stops.feed(piece)
        fed += piece
        if not stops.stopped:
            # With less held back a stop string gets out in part, with more the text is late.
            assert out == fed[: len(fed) - naive_held(fed, sequences)]
    cut = naive_cut(text, sequences)
    assert stops.stopped == (cut is not None)
    assert out + stops.finish() == text[:cut]


def test_of_several_with_the_same_end_the_longest_wins() -> None:
    # The beginning of the longer stop string would be sent as if it were an answer.
    stops = StopStrings(["c", "bc", "abc"])
    assert stops.feed("xab") == "x"
    assert stops.feed("cd") == ""
    assert stops.stopped


def test_first_end_wins_over_an_earlier_start() -> None:
    # The stream would wait for a longer stop string though a shorter one has been completed.
    stops = StopStrings(["abcd", "bc"])
    assert stops.feed("abcd") == "a"
    assert stops.stopped


def test_nothing_comes_out_after_a_stop() -> None:
    # Text behind the stop string would reach the client.
    stops = StopStrings(["."])
    assert stops.feed("One. Two") == "One"
    assert stops.feed(" Three") == ""
    assert stops.finish() == ""


def test_finish_releases_what_only_began_a_stop_string() -> None:
    # The last characters of an answer would be lost.
    stops = StopStrings(["</end>"])
    assert stops.feed("done</en") == "done"
    assert stops.finish() == "</en"
    assert not stops.stopped


def test_without_stop_strings_text_passes_at_once() -> None:
    # Every stream would be delayed by a feature that it does not use.
    stops = StopStrings([])
    assert stops.feed("any text") == "any text"
    assert stops.finish() == ""


def test_an_empty_stop_string_is_refused() -> None:
    # It would stop every answer before its first character.
    with pytest.raises(ValueError, match="at least 1 character"):
        StopStrings(["a", ""])


def test_work_does_not_grow_with_number_or_length_of_stop_strings() -> None:
    # A client could slow everybody down with long stop strings that nearly match.
    text = "ab" * 20_000
    few = StopStrings(["abc"])
    many = StopStrings(["ab" * 127 + "a" + chr(ord("c") + number) for number in range(16)])

    def seconds(stops: StopStrings) -> float:
        started = time.perf_counter()
        for start in range(0, len(text), 4):
            stops.feed(text[start : start + 4])
        return time.perf_counter() - started

    few_seconds = min(seconds(few) for _ in range(3))
    many_seconds = min(seconds(many) for _ in range(3))
    # Quadratic work would be some 250 times as much.
    assert many_seconds < 10 * few_seconds + 0.05
