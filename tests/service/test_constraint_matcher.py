"""Masks against brute force on small vocabularies, and what a grammar's sentence says."""

from __future__ import annotations

import contextlib
import gc
import json
import random
import re
import weakref

import pytest
from constrained import PERSON, allowed, lark, ready, regex, require_person, schema, vocabulary
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLParserLimits
from scripted_model import END_OF_TEXT, VOCABULARY

from kvledger.constraints.matcher import (
    Constraint,
    ConstraintBroken,
    ConstraintState,
    compile_constraint,
)
from kvledger.constraints.refusal import ConstraintRefused
from kvledger.constraints.source import ConstraintSource
from kvledger.errors import ConstraintDeadEnd, ConstraintTooCostly

# Characters of one to four bytes, so that tokens end inside some.
LETTERS = "ab/é€🙂"
texts = st.text(LETTERS, min_size=1, max_size=6)
BYTES = sorted(set("".join(LETTERS).encode()))


def repeat(state: ConstraintState, token: int, times: int) -> None:
    """Lets the same token come again and again."""
    for _ in range(times):
        assert token in allowed(state, VOCABULARY)
        state.learn(token)


def _sources(language: set[str]) -> list[ConstraintSource]:
    """The same finite language in every way to write one."""
    ordered = sorted(language)
    return [
        regex("|".join(ordered)),
        lark("start: " + " | ".join(json.dumps(t, ensure_ascii=False) for t in ordered) + "\n"),
        lark("start: " + " | ".join(f"w{i}" for i in range(len(ordered))) + "\n"
             + "".join(f'w{i}: "{t[:1]}" "{t[1:]}"\n' for i, t in enumerate(ordered))),
    ]  # fmt: skip


@settings(max_examples=60)
@given(
    language=st.sets(texts, min_size=1, max_size=6),
    longer=st.lists(st.lists(st.sampled_from(BYTES), min_size=1, max_size=5), max_size=12),
    seed=st.integers(0, 2**32),
)
def test_a_mask_is_what_the_language_leaves(
    language: set[str], longer: list[list[int]], seed: int
) -> None:
    """A token that leads away would come, or a right one never."""
    # An id that stands for nothing, a control token, two ends, and the same bytes twice.
    tokens = [b"", b"", b"", b"", *(bytes([b]) for b in BYTES), *map(bytes, longer), b"a"]
    prepared = vocabulary(tokens, {1: b"<|x|>", 2: b"<|end|>", 3: b"<|stop|>"}, [2, 3])
    whole = {text.encode() for text in language}
    for source in _sources(language):
        state = compile_constraint(prepared, source).start()
        draw = random.Random(seed)
        said = b""
        while True:
            wanted = {
                id_
                for id_, token in enumerate(tokens)
                if token and any(text.startswith(said + token) for text in whole)
            }
            wanted |= {2, 3} if said in whole else set()
            assert allowed(state, len(tokens)) == wanted, (source, said)
            assert wanted, "no dead end"
            token = draw.choice(sorted(wanted))
            state.learn(token)
            if token in (2, 3):
                break
            said += tokens[token]


@settings(max_examples=30)
@given(
    values=st.lists(
        st.text(max_size=4)
        | st.integers(-(2**53), 2**53)
        | st.integers(-(10**9), 10**9).map(lambda whole: whole / 1000)
        | st.none(),
        min_size=1,
        max_size=5,
    )
)
def test_an_enumeration_admits_its_values_alone(values: list[object]) -> None:
    """A value of a schema would come out as another one, or cut short."""
    constraint = ready(schema({"enum": values}))
    for value in values:
        # Control characters have several ways to be written; the value is what counts.
        state = constraint.start()
        said = b""
        draw = random.Random(repr(value))
        while END_OF_TEXT not in (left := allowed(state, VOCABULARY)):
            token = draw.choice(sorted(left))
            state.learn(token)
            said += b"th" if token == 256 else bytes([token])
        assert json.loads(said) in values


@pytest.mark.parametrize("seed", range(12))
def test_any_way_through_a_schema_is_a_value_of_it(seed: int) -> None:
    """What a program parses would sometimes not parse."""
    state = ready(schema(PERSON)).start()
    draw = random.Random(seed)
    said = b""
    while END_OF_TEXT not in (left := allowed(state, VOCABULARY)):
        token = draw.choice(sorted(left))
        state.learn(token)
        said += b"th" if token == 256 else bytes([token])
        assert len(said) < 2000
    require_person(said.decode())


def test_white_space_has_an_end() -> None:
    """A model that likes spaces would fill its whole answer with them."""
    state = ready(schema(PERSON)).start()
    state.learn(ord("{"))
    count = 0
    while ord(" ") in allowed(state, VOCABULARY):
        state.learn(ord(" "))
        count += 1
    assert count == 32
    assert allowed(state, VOCABULARY) == {ord('"')}


def test_after_the_end_only_the_end_may_come() -> None:
    """A text would go on after what it should be."""
    state = ready(regex("ab")).start()
    for token in b"ab":
        state.learn(token)
    assert allowed(state, VOCABULARY) == {END_OF_TEXT}
    state.learn(END_OF_TEXT)
    assert allowed(state, VOCABULARY) == {END_OF_TEXT}


def test_a_grammar_can_ask_for_a_control_token() -> None:
    """Text that looks like one would come instead."""
    state = ready(lark('start: "a" <|user|> "b"\n')).start()
    state.learn(ord("a"))
    assert allowed(state, VOCABULARY) == {258}
    state.learn(258)
    assert allowed(state, VOCABULARY) == {ord("b")}


@pytest.mark.parametrize(
    "text", ["a/b", "a\nstart: /b/", r"a\/b", r"a\\/", "//", "a/i", "/*a*/", "# a"]
)
def test_an_expression_stays_one(text: str) -> None:
    """What a client writes between slashes would become the grammar around them."""
    state = ready(regex(text)).start()
    said = b""
    while END_OF_TEXT not in (left := allowed(state, VOCABULARY)):
        token = min(left)
        state.learn(token)
        said += bytes([token])
    assert re.fullmatch(text, said.decode())


def test_states_know_nothing_of_each_other() -> None:
    """What one sample has said would rule out tokens of another."""
    constraint = ready(regex("a+b|c+d"))
    first, second = constraint.start(), constraint.start()
    first.learn(ord("a"))
    second.learn(ord("c"))
    assert allowed(first, VOCABULARY) == {ord("a"), ord("b")}
    assert allowed(second, VOCABULARY) == {ord("c"), ord("d")}
    assert allowed(constraint.start(), VOCABULARY) == {ord("a"), ord("c")}


def test_a_token_that_may_not_come_breaks_it() -> None:
    """A sequence would go on under a constraint that nobody follows any more."""
    state = ready(regex("ab")).start()
    with pytest.raises(ConstraintBroken):
        state.learn(ord("x"))
    # The library's own mask says then that the text may end: that it is whole.
    with pytest.raises(ConstraintBroken):
        allowed(state, VOCABULARY)


def test_what_leads_nowhere_leaves_nothing_and_says_so() -> None:
    """A text that is cut in the middle would end as if it were whole, or as the server's fault."""
    constraint = ready(lark('start: "aaa" B\nB: /b.{3}/ & /c.{3}/\n'))
    state, other = constraint.start(), constraint.start()
    repeat(state, ord("a"), 3)
    assert constraint.broken is None
    for _ in range(2):
        assert allowed(state, VOCABULARY) == set()
        assert isinstance(constraint.broken, ConstraintDeadEnd)
        assert str(constraint.broken).startswith(
            "constraint.lark_grammar: leaves no token that could follow the first 3 of the output"
        )
    assert allowed(other, VOCABULARY) == {ord("a")}, "another sample goes on"


def test_a_broken_constraint_gives_its_memory_back() -> None:
    """Clients with grammars that lead nowhere would fill the room that all constraints share."""
    constraint = ready(lark('start: "aaa" B\nB: /b.{3}/ & /c.{3}/\n'))
    state = constraint.start()
    repeat(state, ord("a"), 3)
    assert allowed(state, VOCABULARY) == set()

    def tell(constraint: Constraint) -> None:
        assert constraint.broken is not None
        raise constraint.broken

    with contextlib.suppress(ConstraintDeadEnd):
        tell(constraint)
    gone = weakref.ref(constraint)
    gc.disable()  # what is left in a ring of references stays until somebody looks for it
    try:
        del state, constraint
        assert gone() is None
    finally:
        gc.enable()


def test_what_no_token_spells_leads_nowhere() -> None:
    """A vocabulary without some bytes cannot say every text; that is no fault of the server's."""
    prepared = vocabulary([b"a", b"b", b""], {2: b"<|end|>"}, [2])
    constraint = compile_constraint(prepared, regex("ab€|b"))
    state = constraint.start()
    state.learn(0)
    state.learn(1)
    assert allowed(state, 3) == set()
    assert isinstance(constraint.broken, ConstraintDeadEnd)


def test_a_limit_on_the_way_breaks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library ends a text that met a limit as if it were whole."""
    few = LLParserLimits(max_lexer_states=40, verbose_errors=False)
    monkeypatch.setattr("kvledger.constraints.matcher._LIMITS", few)
    constraint = ready(regex("a{1,200}"))
    state, count = constraint.start(), 0
    while ord("a") in allowed(state, VOCABULARY):
        state.learn(ord("a"))
        count += 1
    assert count < 199
    assert allowed(state, VOCABULARY) == set(), "not the end either"
    assert isinstance(constraint.broken, ConstraintTooCostly)
    assert f"constraint.regex: takes too much work after {count} tokens" in str(constraint.broken)


def test_masks_that_take_too_long_break_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One grammar would slow down everybody's steps for as long as it runs."""
    seconds = 0.0

    def slow_clock() -> float:
        nonlocal seconds
        seconds += 0.01
        return seconds

    monkeypatch.setattr("kvledger.constraints.matcher.time.thread_time", slow_clock)
    constraint = ready(regex("[a-z]+"))
    state = constraint.start()
    # 0.5 s at once and 0.004 s with each token, of which each takes 0.01 s.
    repeat(state, ord("a"), round(0.5 / 0.006) - 2)
    assert constraint.broken is None
    for _ in range(4):
        left = allowed(state, VOCABULARY)
        state.learn(ord("a"))
    assert left == set()
    assert isinstance(constraint.broken, ConstraintTooCostly)


CANARY = "canary4711"


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (ConstraintSource("json_schema", "{" + CANARY), "is not JSON"),
        (ConstraintSource("json_schema", '{"const": NaN}'), "is not JSON"),
        (ConstraintSource("json_schema", '{"const": 1e999}'), "is not JSON"),
        (ConstraintSource("json_schema", "[" * 100_000), "arrays more than 64 levels deep"),
        (ConstraintSource("json_schema", f'["{CANARY}"]'), "is JSON and no schema"),
        (schema(False), "is the schema false, which nothing matches"),
        (schema({"type": CANARY}), "is not a JSON schema"),
        (schema({"x-guidance": {"lenient": True}}), "sets x-guidance"),
        (schema({"not": {"const": CANARY}}), "not supported in the schema itself: not"),
        (
            schema({"properties": {CANARY: {"contains": {}, "uniqueItems": True}}}),
            "uses what is not supported in properties[0]: contains, uniqueItems",
        ),
        (schema({"maxItmes": 3, "type": "array"}), "the schema itself, counted from 0, number 0;"),
        (schema({"oneOf": [{"type": "string"}, {"const": CANARY}]}), "more than one branch may"),
        (schema({"properties": {"limit": {"type": "too large"}}}), "is not a JSON schema"),
        (schema({"format": "too large"}), "uses a format that is not supported"),
        (schema({"$ref": f"https://{CANARY}.example/"}), "a reference that is not supported"),
        (schema({"$ref": f"#/$defs/{CANARY}"}), "a reference that is not supported"),
        (schema({"$ref": "#"}), "leaves no token that an answer could begin with"),
        (schema({"type": "string", "format": CANARY}), "uses a format"),
        (schema({"type": "integer", "minimum": 5, "maximum": 3}), "that nothing matches"),
        (regex(f"({CANARY}"), "is not a regular expression"),
        (regex(rf"({CANARY})\1"), "look-around or back-references"),
        (regex(f"(?={CANARY})"), "look-around or back-references"),
        (regex(f"{CANARY}\\"), "is not a regular expression"),
        (regex("(" * 2000 + "a" + ")" * 2000), "is too complex"),
        (lark(f"start: {CANARY}\n"), "is not a grammar in llguidance's variant of Lark"),
        (lark(f'start: "a"\n| "{CANARY}\n'), "see line 2, column"),
        (lark("start: start\n"), "leaves no token"),
        (lark(f'start: <|{CANARY}|>\n'), "is not a grammar"),
        (lark("start: " + "(" * 5000 + '"a"' + ")" * 5000), "is not a grammar"),
        (lark(json.dumps({"grammars": [{"json_schema": {}}]})), "see line 1, column 1"),
        (lark("start: A\nA: /a.{3}/ & /b.{3}/\n"), "leaves no token"),
        (
            schema(
                {"allOf": [{"anyOf": [{"properties": {f"{n}{i}": {}}} for n in "ab"]}
                           for i in range(30)]}
            ),
            "is too complex",
        ),
        (schema({"const": [2**53 + 1]}), "whole number beyond 9007199254740992"),
    ],
    ids=lambda value: None if isinstance(value, str) else f"{value.kind}-{value.text[:24]}",
)  # fmt: skip
def test_what_cannot_be_followed_is_refused(source: ConstraintSource, sentence: str) -> None:
    """A caller would not know what to change, or find its text in somebody's log."""
    with pytest.raises(ConstraintRefused) as raised:
        ready(source)
    assert sentence in str(raised.value)
    assert CANARY not in str(raised.value)


def test_nesting_has_a_limit_of_its_own() -> None:
    """Native code that recurses would decide how deep a schema may be."""

    def nested(levels: int) -> object:
        value: object = True
        for _ in range(levels - 1):
            value = {"items": value}
        return value if levels > 1 else {}

    ready(schema(nested(64)))
    with pytest.raises(ConstraintRefused, match="more than 64 levels deep"):
        ready(schema(nested(66)))
    with pytest.raises(ConstraintRefused, match="more than 64 levels deep"):
        ready(schema({"const": json.loads("[" * 64 + "]" * 64)}))
