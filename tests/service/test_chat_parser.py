"""Answers of the known families, told apart: what is reasoning, what a call, and what is text."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvledger.chat_output import ChatParser, ChatSyntax
from kvledger.chat_output.parser import (
    BLANKS_MAX,
    CALL_CHARACTERS_MAX,
    CALLS_MAX,
    Segment,
    SegmentKind,
)
from kvledger.chat_output.reading import DEPTH_MAX

TAGGED = ChatSyntax.of("<tool_call> </think>")
BARE = ChatSyntax.of('ipython {"name": "a", "parameters": {}}')
MARKED = ChatSyntax.of("[TOOL_CALLS] [/THINK]")
TOOLS = ("add", "get_weather")
ADD = '{"name": "add", "arguments": {"a": 1, "b": [2, {"c": "}"}]}}'
ADD_ARGUMENTS = '{"a": 1, "b": [2, {"c": "}"}]}'


def run(
    syntax: ChatSyntax,
    pieces: Sequence[str],
    *,
    tools: Sequence[str] = TOOLS,
    silent: Sequence[str] = (),
    reasons: bool = False,
) -> list[Segment]:
    """Segments of an answer; a piece that is one of `silent` is that control token."""
    parser = ChatParser(syntax, tools, silent_marks=silent, reasons=reasons)
    segments: list[Segment] = []
    for piece in pieces:
        segments += parser.mark(piece) if piece in silent else parser.feed(piece)
    return segments + parser.finish()


def told(segments: Sequence[Segment]) -> tuple[str, str, list[tuple[str, str]]]:
    """Reasoning, content, and calls."""
    texts = {
        kind: "".join(segment.source for segment in segments if segment.kind == kind)
        for kind in SegmentKind
    }
    calls = [tuple(call) for segment in segments for call in segment.calls]
    return texts[SegmentKind.REASONING], texts[SegmentKind.CONTENT], calls  # type: ignore[return-value]


# --- Which family ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "calls", "reasoning"),
    [
        ("{{ messages }}", None, None),
        ("return <tool_call>\n{}\n</tool_call>", "tagged_json", None),
        ("<tool_call> {% if '</think>' in content %}", "tagged_json", "<think>"),
        ("<tool_call>\n<function=example>", None, None),
        ('Environment: ipython {"name": x, \'"parameters": \'}', "bare_json", None),
        ("<|python_tag|>", "bare_json", None),
        ("[TOOL_CALLS]{{ name }}[ARGS] [THINK] [/THINK]", "marked", "[THINK]"),
        (None, None, None),
    ],
)
def test_the_family_is_found_in_the_template(
    template: str | None, calls: str | None, reasoning: str | None
) -> None:
    """Calls of a known model would be text, or text of another be cut up."""
    syntax = ChatSyntax.of(template)
    assert (syntax.calls and syntax.calls.value) == calls
    assert (syntax.reasoning and syntax.reasoning[0]) == reasoning


def test_a_prompt_that_opens_reasoning_is_seen() -> None:
    """All of the thoughts would be taken for the answer."""
    assert TAGGED.reasons_after("<|im_start|>assistant\n<think>\n")
    assert not TAGGED.reasons_after("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not BARE.reasons_after("<think>")


# --- What is what ---------------------------------------------------------------------------

CASES: dict[str, tuple[ChatSyntax, str, str, str, list[tuple[str, str]]]] = {
    # syntax, answer, reasoning, content, calls
    "plain": (TAGGED, "Hello <b>you</b>.\n", "", "Hello <b>you</b>.\n", []),
    "reasoning": (TAGGED, "<think>\nhm, 1 < 2\n</think>\n\nYes.", "hm, 1 < 2", "Yes.", []),
    "reasoning without an end": (TAGGED, "<think>\nhm\n", "hm\n", "", []),
    "a call in reasoning": (
        TAGGED,
        f"<think><tool_call>{ADD}</think>",
        f"<tool_call>{ADD}",
        "",
        [],
    ),
    "reasoning later is text": (TAGGED, "So <think>x</think>", "", "So <think>x</think>", []),
    "a call": (TAGGED, f"<tool_call>\n{ADD}\n</tool_call>", "", "", [("add", ADD_ARGUMENTS)]),
    "text, then calls": (
        TAGGED,
        f"I look.\n<tool_call>\n{ADD}\n</tool_call>\n<tool_call>{ADD}</tool_call>\nDone.",
        "",
        "I look.Done.",
        [("add", ADD_ARGUMENTS)] * 2,
    ),
    "reasoning, then a call": (
        TAGGED,
        f"<think>\nhm\n</think>\n\n<tool_call>\n{ADD}\n</tool_call>",
        "hm",
        "",
        [("add", ADD_ARGUMENTS)],
    ),
    "without an end mark": (TAGGED, f"<tool_call>\n{ADD}", "", "", [("add", ADD_ARGUMENTS)]),
    "no arguments": (TAGGED, '<tool_call>{"name": "add"}', "", "", [("add", "{}")]),
    "arguments as a string": (
        TAGGED,
        '<tool_call>{"name": "add", "arguments": " {\\"a\\": 1}"}</tool_call>',
        "",
        "",
        [("add", '{"a": 1}')],
    ),
    "end mark in a string": (
        TAGGED,
        '<tool_call>{"name": "add", "arguments": {"a": "</tool_call>"}}</tool_call>x',
        "",
        "x",
        [("add", '{"a": "</tool_call>"}')],
    ),
    "escapes as they were written": (
        TAGGED,
        '<tool_call>{"arguments": {"a": "\\ud83d\\"\\u00e9}"}, "name": "a\\u0064d"}</tool_call>',
        "",
        "",
        [("add", '{"a": "\\ud83d\\"\\u00e9}"}')],
    ),
    "numbers as they were written": (
        TAGGED,
        '<tool_call>{"name": "add", "arguments": {"a": 1.50e400}}',
        "",
        "",
        [("add", '{"a": 1.50e400}')],
    ),
    "a tool that is none": (
        TAGGED,
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
        "",
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
        [],
    ),
    "bad JSON, then a call": (
        TAGGED,
        f'<tool_call>{{"name": add}}</tool_call><tool_call>{ADD}</tool_call>',
        "",
        '<tool_call>{"name": add}</tool_call>',
        [("add", ADD_ARGUMENTS)],
    ),
    "not closed, then a call": (
        TAGGED,
        f'<tool_call>{{"name": "add", "arguments": {{<tool_call>{ADD}</tool_call>',
        "",
        '<tool_call>{"name": "add", "arguments": {',
        [("add", ADD_ARGUMENTS)],
    ),
    "cut off": (TAGGED, f"<tool_call>\n{ADD[:-1]}", "", f"<tool_call>\n{ADD[:-1]}", []),
    "cut off in a mark": (TAGGED, "Yes\n<tool_c", "", "Yes\n<tool_c", []),
    "constants that are no JSON": (
        TAGGED,
        '<tool_call>{"name": "add", "arguments": {"a": NaN}}',
        "",
        '<tool_call>{"name": "add", "arguments": {"a": NaN}}',
        [],
    ),
    "arguments that are a list": (
        TAGGED,
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        "",
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        [],
    ),
    "bare": (BARE, ADD.replace("arguments", "parameters"), "", "", [("add", ADD_ARGUMENTS)]),
    "bare, several": (BARE, f"{ADD}; {ADD}\n{ADD}", "", "", [("add", ADD_ARGUMENTS)] * 3),
    "bare, then text": (BARE, f"\n{ADD} Done; {ADD}", "", f"Done; {ADD}", [("add", ADD_ARGUMENTS)]),
    "bare, then a semicolon": (BARE, f"{ADD}; no", "", "; no", [("add", ADD_ARGUMENTS)]),
    "bare later is text": (BARE, f"So {ADD}", "", f"So {ADD}", []),
    "bare without arguments": (BARE, '{"name": "add"}', "", '{"name": "add"}', []),
    "bare JSON of another kind": (BARE, '{"a": {"b": 1}} ', "", '{"a": {"b": 1}} ', []),
    "python tag": (BARE, f"So <|python_tag|>{ADD}", "", "So", [("add", ADD_ARGUMENTS)]),
    "python tag with code": (BARE, "<|python_tag|>print(1)", "", "<|python_tag|>print(1)", []),
    "a list": (MARKED, f"[TOOL_CALLS] [{ADD}, {ADD}]", "", "", [("add", ADD_ARGUMENTS)] * 2),
    "a list with what is none": (
        MARKED,
        f"[TOOL_CALLS] [{ADD}, 1]",
        "",
        f"[TOOL_CALLS] [{ADD}, 1]",
        [],
    ),
    "an empty list": (MARKED, "[TOOL_CALLS][]", "", "[TOOL_CALLS][]", []),
    "names": (
        MARKED,
        'x[TOOL_CALLS]add{"a": 1}[TOOL_CALLS]get_weather[ARGS]{}',
        "",
        "x",
        [("add", '{"a": 1}'), ("get_weather", "{}")],
    ),
    "names and ids": (
        MARKED,
        '[THINK]hm[/THINK][TOOL_CALLS]add[CALL_ID]Vv0D9mTxy[ARGS]{"a": 1}',
        "hm",
        "",
        [("add", '{"a": 1}')],
    ),
    "a name that is none": (MARKED, "[TOOL_CALLS]rm{}", "", "[TOOL_CALLS]rm{}", []),
    "a mark that is none": (MARKED, "[TOOL_CALLS]add[X]{}", "", "[TOOL_CALLS]add[X]{}", []),
}


@pytest.mark.parametrize("name", CASES)
def test_an_answer_is_told_apart(name: str) -> None:
    """A gateway would show marks to people, or run what is no call."""
    syntax, answer, *expected = CASES[name]
    segments = run(syntax, [answer])
    assert list(told(segments)) == expected
    assert "".join(segment.source for segment in segments) == answer
    for _, arguments in told(segments)[2]:
        assert isinstance(json.loads(arguments), dict)


def test_reasoning_that_the_prompt_has_opened() -> None:
    """Thoughts would be shown as the answer where the template opens them."""
    segments = run(TAGGED, ["\nhm\n</think>\n\nYes"], reasons=True)
    assert told(segments) == ("hm", "Yes", [])
    assert told(run(TAGGED, ["hm"], reasons=True)) == ("hm", "", [])


def test_without_tools_nothing_is_a_call() -> None:
    """Somebody who asked for JSON, or about marks, would get calls of tools that are not there."""
    for syntax, answer in ((BARE, ADD), (TAGGED, f"<tool_call>{ADD}"), (MARKED, "[TOOL_CALLS]")):
        assert told(run(syntax, [answer], tools=())) == ("", answer, [])


def test_marks_that_are_control_tokens() -> None:
    """Marks without text would be missed; and text that looks like one would be taken for it."""
    marks = ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]")
    pieces = ["[THINK]", "h[/THIN", "K]m", "[/THINK]", "a", "[TOOL_CALLS]", "add", "[ARGS]", "{}"]
    assert told(run(MARKED, pieces, silent=marks)) == ("h[/THINK]m", "a", [("add", "{}")])
    written = ["[TOOL", "_CALLS]add{}"]
    assert told(run(MARKED, written, silent=marks)) == ("", "[TOOL_CALLS]add{}", [])
    failed = ["a", "[TOOL_CALLS]", " no", "[ARGS]", "{}"]
    assert told(run(MARKED, failed, silent=marks)) == ("", "a no{}", [])
    tagged = ["<tool_call>", ADD, "</tool_call>", "\n", "<tool_call>", ADD, "</tool_call>"]
    silent = ("<tool_call>", "</tool_call>")
    assert told(run(TAGGED, tagged, silent=silent)) == ("", "", [("add", ADD_ARGUMENTS)] * 2)
    opened = ["<think>", "\nhm", "</think>", "\n\nYes"]
    assert told(run(TAGGED, opened, silent=("<think>", "</think>"))) == ("hm", "Yes", [])
    tag = ["<|python_tag|>", ADD]
    assert told(run(BARE, tag, silent=("<|python_tag|>",))) == ("", "", [("add", ADD_ARGUMENTS)])


def test_blanks_next_to_marks_are_part_of_them() -> None:
    """Every answer would begin with empty lines; or text that is all blanks be lost."""
    blanks = "\n" * (BLANKS_MAX + 5)
    segments = run(TAGGED, [f"a{blanks}<tool_call>{ADD}</tool_call>{blanks}b{blanks}"])
    assert told(segments)[1] == "a" + "\n" * 5 + "b" + blanks
    assert told(run(TAGGED, [" \n"]))[1] == " \n"


# --- Bounds ---------------------------------------------------------------------------------


def test_a_call_that_is_too_long_is_text() -> None:
    """A model that never closes a bracket would be kept in memory, and nothing be shown."""
    begin = '<tool_call>{"name": "add", "arguments": {"a": "'
    answer = begin + "x" * CALL_CHARACTERS_MAX
    parser = ChatParser(TAGGED, TOOLS)
    shown = "".join(segment.source for segment in parser.feed(answer))
    assert len(shown) > CALL_CHARACTERS_MAX - len(begin)
    assert shown + "".join(segment.source for segment in parser.finish()) == answer


def test_calls_are_counted() -> None:
    """A model that turns in circles would make calls without end."""
    one = '<tool_call>{"name": "add"}</tool_call>'
    _, content, calls = told(run(TAGGED, [one * (CALLS_MAX + 2)]))
    assert len(calls) == CALLS_MAX
    assert content == one * 2


@pytest.mark.parametrize("levels", [DEPTH_MAX - 1, DEPTH_MAX, 100_000])
def test_depth_is_bounded(levels: int) -> None:
    """Brackets without end would use up the stack of the thread that serves everybody."""
    nested = "[" * (levels - 2) + "]" * (levels - 2)
    answer = f'<tool_call>{{"name": "add", "arguments": {{"a": {nested}}}}}</tool_call>'
    _, content, calls = told(run(TAGGED, [answer]))
    assert (len(calls), content) == ((1, "") if levels <= DEPTH_MAX else (0, answer))
    text = json.dumps("[" * levels)
    quoted = f'<tool_call>{{"name": "add", "arguments": {text}}}</tool_call>'
    assert told(run(TAGGED, [quoted])) == ("", quoted, [])


@pytest.mark.parametrize(
    ("syntax", "unit"),
    [
        (TAGGED, "<tool_call>"),
        (TAGGED, "<tool_call>{"),
        (TAGGED, '<tool_call>{"'),
        (TAGGED, " "),
        (TAGGED, "<"),
        (TAGGED, "<tool_call>{}"),
        (BARE, "<|python_tag|>"),
        (BARE, ";{}"),
        (MARKED, "[TOOL_CALLS]add"),
        (MARKED, "[TOOL_CALLS][{},"),
    ],
)
def test_time_grows_with_the_length_alone(syntax: ChatSyntax, unit: str) -> None:
    """A model that repeats the beginning of a call would stop every stream."""

    def seconds(count: int) -> float:
        best = 1e9
        for _ in range(3):
            parser = ChatParser(syntax, TOOLS)
            started = time.process_time()
            for _ in range(count):
                parser.feed(unit)
            parser.finish()
            best = min(best, time.process_time() - started)
        return best

    assert seconds(16_000) < 20 * seconds(2_000) + 0.05


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    arguments=st.dictionaries(st.text(), JSON_VALUES, max_size=4),
    others=st.dictionaries(st.text(min_size=1), JSON_VALUES, max_size=3),
    indent=st.none() | st.integers(0, 3),
    ascii_only=st.booleans(),
)
def test_arguments_are_what_the_model_wrote(
    arguments: dict[str, Any], others: dict[str, Any], indent: int | None, ascii_only: bool
) -> None:
    """A tool would be called with other numbers or texts than the model chose."""
    call = {**others, "name": "add", "arguments": arguments}
    text = json.dumps(call, indent=indent, ensure_ascii=ascii_only)
    ((name, written),) = told(run(TAGGED, [f"<tool_call>{text}</tool_call>"]))[2]
    assert name == "add"
    assert json.loads(written) == arguments
    assert written in text


@given(text=st.text(alphabet='{}[]",:1ae\\ n', max_size=30))
def test_what_is_no_json_is_no_call(text: str) -> None:
    """Arguments that no JSON reader takes would reach a gateway."""
    answer = f'<tool_call>{{"name": "add", "arguments": {text}}}'
    for _, arguments in told(run(TAGGED, [answer]))[2]:
        assert isinstance(json.loads(arguments), dict)


# --- However it is cut ----------------------------------------------------------------------

FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_", "call>", "<", "\n", "  "),
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "<|python_tag|>", ";", "add"),
    *(ADD, f"[{ADD}]", ADD[:20], ADD[20:], "{", "}", "[", "]", '"', "\\", ",", "é🙂", "Vv0"),
    '{"name": "get_weather", "parameters": {}}',
]
SILENT = ("[TOOL_CALLS]", "[ARGS]", "[/THINK]", "</tool_call>", "<|python_tag|>")


@settings(max_examples=300)
@given(
    syntax=st.sampled_from([TAGGED, BARE, MARKED, ChatSyntax()]),
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=12),
    silent=st.sets(st.sampled_from(SILENT)),
    reasons=st.booleans(),
    data=st.data(),
)
def test_no_cut_changes_anything_and_nothing_is_lost(
    syntax: ChatSyntax, fragments: list[str], silent: set[str], reasons: bool, data: st.DataObject
) -> None:
    """What a client sees would depend on how fast tokens come, or some of it never come."""
    marks = tuple(silent & syntax.marks)
    whole = run(syntax, fragments, silent=marks, reasons=reasons)
    cut: list[str] = []
    for fragment in fragments:
        if fragment in marks:
            cut.append(fragment)
            continue
        place = data.draw(st.integers(0, len(fragment)))
        cut += [fragment[:place], *fragment[place:]]
    pieces = run(syntax, cut, silent=marks, reasons=reasons)
    assert told(pieces) == told(whole)
    source = "".join(fragment for fragment in fragments if fragment not in marks)
    assert "".join(segment.source for segment in pieces) == source
    for segment in pieces:
        assert bool(segment.calls) == (segment.kind == SegmentKind.CALLS)
        for call in segment.calls:
            assert call.name in TOOLS
            assert isinstance(json.loads(call.arguments), dict)
        if segment.kind == SegmentKind.MARKUP:
            assert segment.source.strip() in ("", *syntax.marks)
    if syntax.reasoning is None:
        assert not told(pieces)[0]
