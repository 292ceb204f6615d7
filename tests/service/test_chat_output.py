"""Answers told apart keep their tokens: each leaves once, in order, not before its text."""

from __future__ import annotations

import json
import string
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from kvledger.chat_output import ChatOutput, ChatParser, ChatSyntax
from kvledger.tokenizer import AnsweredCall, OutputText, Piece

TEXTS = [
    *("<", "think", ">", "</", "tool_", "call", "a", " b", "\n", "\n\n", ". "),
    *('{"name": ', '"f"', ', "arguments": ', '{"x": "', '"}}', "}", "f", "{}", "["),
]
SILENT = {len(TEXTS) + 3: "[TOOL_CALLS]", len(TEXTS) + 4: "[/THINK]", len(TEXTS) + 5: "[ARGS]"}
ACCENT_BEGIN, ACCENT_END, OTHER_CONTROL = range(len(TEXTS), len(TEXTS) + 3)
MARKS = {text: token for token, text in SILENT.items()}
TAGGED, MARKED = ChatSyntax.of("<tool_call> </think>"), ChatSyntax.of("[TOOL_CALLS] [/THINK]")


@dataclass(frozen=True)
class SmallVocabulary:
    token_bytes: list[bytes]


VOCABULARY = SmallVocabulary(
    [*(text.encode() for text in TEXTS), "é".encode()[:1], "é".encode()[1:], *[b""] * 4]
)


def ids(*texts: str) -> list[int]:
    return [MARKS[text] if text in MARKS else TEXTS.index(text) for text in texts]


def output_of(
    syntax: ChatSyntax, stops: tuple[str, ...] = (), stop_ids: frozenset[int] = frozenset()
) -> ChatOutput:
    count = iter(range(1000))
    return ChatOutput(
        OutputText(VOCABULARY, stops, stop_ids),
        ChatParser(syntax, ["f"], silent_marks=SILENT.values()),
        SILENT,
        lambda: f"id{next(count)}",
    )


OPEN = ids("<", "think", ">")
CLOSE = ids("</", "think", ">")
CALL_BEGINS = ids("<", "tool_", "call", ">", '{"name": ', '"f"', ', "arguments": ', '{"x": "')
CALL_ENDS = ids("</", "tool_", "call", ">")


def test_tokens_of_marks_leave_with_what_follows() -> None:
    # Counts would run ahead of what a client has, or a delta hold tokens and nothing else.
    output = output_of(TAGGED)
    assert output.feed(OPEN) == Piece("", [])
    assert output.feed(ids("\n")) == Piece("", [])
    assert output.feed(ids("a")) == Piece("", [*OPEN, *ids("\n", "a")], "a")
    assert output.feed(ids(" b")) == Piece("", ids(" b"), " b")
    assert output.feed([*ids("\n"), *CLOSE, *ids("\n\n")]) == Piece("", [])
    text = output.feed(ids("a"))
    assert text == Piece("a", [*ids("\n"), *CLOSE, *ids("\n\n", "a")])
    assert output.token_count == 12


def test_a_call_leaves_with_its_tokens_when_it_is_known() -> None:
    # A client would get half a call of what turns out to be none.
    output = output_of(TAGGED)
    assert output.feed(ids("a", "\n")) == Piece("a", ids("a"))
    assert output.feed(CALL_BEGINS) == Piece("", [])
    ends = output.feed(ids('"}}'))
    call = AnsweredCall(0, "id0", "f", '{"x": ""}')
    assert ends == Piece("", [*ids("\n"), *CALL_BEGINS, *ids('"}}')], "", (call,))
    assert output.feed([*CALL_ENDS, *ids("\n")]) == Piece("", [])
    again = output.feed([*CALL_BEGINS, *ids('"}}'), OTHER_CONTROL])
    assert [(made.place, made.id) for made in again.tool_calls] == [(1, "id1")]
    assert again.token_ids == [*CALL_ENDS, *ids("\n"), *CALL_BEGINS, *ids('"}}')]
    assert output.finish() == Piece("", [OTHER_CONTROL])


def test_marks_without_text_are_seen_where_they_stand() -> None:
    # Models whose marks are control tokens would never call anything.
    output = output_of(MARKED)
    pieces = [output.feed([token]) for token in ids("a", "[TOOL_CALLS]", "f", "[ARGS]", "{}")]
    assert pieces[0] == Piece("a", ids("a"))
    assert pieces[1:4] == [Piece("", [])] * 3
    (call,) = pieces[4].tool_calls
    assert call[2:] == ("f", "{}")
    assert pieces[4].token_ids == ids("[TOOL_CALLS]", "f", "[ARGS]", "{}")


def test_a_stop_string_is_looked_for_in_what_the_model_wrote() -> None:
    # Text behind a stop string would be sent, or a mark in it change where it is found.
    output = output_of(MARKED, stops=("a b",))
    piece = output.feed(ids("a", "[TOOL_CALLS]", " b", "a"))
    assert piece == Piece("", ids("a", "[TOOL_CALLS]", " b"))
    assert output.stopped
    assert output.finish() == Piece("", [])
    cut = output_of(TAGGED, stops=("x",))
    piece = cut.feed(CALL_BEGINS)
    assert piece.text == '<tool_call>{"name": "f", "arguments": {"'
    assert piece.token_ids == CALL_BEGINS


def test_a_stop_token_ends_a_call() -> None:
    # What was held back would be lost, and the tokens with it.
    output = output_of(TAGGED, stop_ids=frozenset(ids(". ")))
    piece = output.feed([*CALL_BEGINS, *ids(". ", "a")])
    assert piece.text == '<tool_call>{"name": "f", "arguments": {"x": "'
    assert piece.token_ids == [*CALL_BEGINS, *ids(". ")]
    mark = output_of(MARKED, stop_ids=frozenset(ids("[TOOL_CALLS]")))
    assert mark.feed(ids("a", "[TOOL_CALLS]", "f")) == Piece("a", ids("a", "[TOOL_CALLS]"))


def test_ids_of_calls_are_nine_letters_and_digits() -> None:
    # Some templates refuse other ids when the call comes back with its result.
    made = set()
    for _ in range(50):
        parser = ChatParser(TAGGED, ["f"])
        output = ChatOutput(OutputText(VOCABULARY), parser, {})
        (call,) = output.feed([*CALL_BEGINS, *ids('"}}')]).tool_calls
        assert len(call.id) == 9
        assert set(call.id) <= set(string.ascii_letters + string.digits)
        made.add(call.id)
    assert len(made) == 50


GROUPS = [*([token] for token in range(len(VOCABULARY.token_bytes))), OPEN, CLOSE, CALL_ENDS]
GROUPS += [[*CALL_BEGINS, *ids('"}}')], ids("[TOOL_CALLS]", "f", "{}"), CALL_BEGINS]


@settings(max_examples=300)
@given(
    syntax=st.sampled_from([TAGGED, MARKED]),
    groups=st.lists(st.sampled_from(GROUPS), max_size=12),
    stops=st.lists(st.sampled_from([". a", "\n<", "tool", "a b", "é"]), max_size=2),
    stop_ids=st.sets(st.integers(0, len(VOCABULARY.token_bytes) - 1), max_size=1),
    size=st.integers(1, 7),
)
def test_chunks_change_neither_parts_nor_tokens(
    syntax: ChatSyntax, groups: list[list[int]], stops: list[str], stop_ids: set[int], size: int
) -> None:
    # A client's answer and bill would depend on how fast it reads.
    tokens = [token for group in groups for token in group]

    def answered(size: int) -> tuple[ChatOutput, list[Piece]]:
        output = output_of(syntax, tuple(stops), frozenset(stop_ids))
        pieces = [output.feed(tokens[i : i + size]) for i in range(0, len(tokens), size)]
        return output, [*pieces, output.finish()]

    whole, whole_pieces = answered(max(1, len(tokens)))
    output, pieces = answered(size)
    joined = Piece.joined(pieces)
    assert joined == Piece.joined(whole_pieces)
    assert joined.token_ids == tokens[: output.token_count]
    assert (output.token_count, output.stopped) == (whole.token_count, whole.stopped)
    plain = OutputText(VOCABULARY, stops, stop_ids)
    expected = Piece.joined([plain.feed(tokens), plain.finish()])
    assert joined.token_ids == expected.token_ids
    if not joined.tool_calls and not joined.reasoning and syntax is MARKED:
        assert joined.text.split() == expected.text.split()
    assert all(isinstance(json.loads(call.arguments), dict) for call in joined.tool_calls)
    for piece in pieces[:-1]:
        if not output.stopped and piece.token_ids:
            assert piece.text or piece.reasoning or piece.tool_calls
