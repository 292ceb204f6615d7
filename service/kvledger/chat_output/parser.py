"""Cuts an answer into segments: content, reasoning, calls, and marks, as its text comes.

It looks at one character after the other, so it cannot matter in which pieces they come, and the
segments' sources, joined, are the text. What is held back until more is known is at most the
beginning of a mark, the blanks before it, and one call.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Collection
from typing import NamedTuple

from kvledger.chat_output.call_json import Call
from kvledger.chat_output.reading import CallReading, read_marked, read_object
from kvledger.chat_output.syntax import (
    CALL_CLOSES,
    CALL_OPENS,
    CALLS_FOLLOW,
    PYTHON_TAG,
    CallSyntax,
    ChatSyntax,
)

# A call, or a list of calls, that is longer is text.
CALL_CHARACTERS_MAX = 65_536
# What looks like a call after so many calls is text.
CALLS_MAX = 128
# Blanks before a mark that belong to it; those before them are text. After it, all of them do.
BLANKS_MAX = 64

_BLANK = frozenset(" \t\r\n")


class SegmentKind(enum.Enum):
    """What a run of an answer's text is."""

    CONTENT = "content"
    REASONING = "reasoning"
    CALLS = "calls"
    # Marks, and blanks next to them: nothing that anybody is shown.
    MARKUP = "markup"


class Segment(NamedTuple):
    """A run of an answer: its text, and for CALLS the calls that it is."""

    kind: SegmentKind
    source: str
    calls: tuple[Call, ...] = ()


class _Place(enum.Enum):
    """What may come next."""

    # Nothing but blanks has come.
    START = enum.auto()
    REASONING = enum.auto()
    # Nothing but blanks has come since a call, or since reasoning ended.
    AFTER_CALL = enum.auto()
    AFTER_REASONING = enum.auto()
    CONTENT = enum.auto()


class ChatParser:
    """Parses one answer. Not for use from two threads at once."""

    def __init__(
        self,
        syntax: ChatSyntax,
        tools: Collection[str] = (),
        *,
        silent_marks: Collection[str] = (),
        reasons: bool = False,
    ) -> None:
        """`tools` are the names that a call may have; where there are none, nothing is a call.

        `silent_marks` are control tokens, which have no text: they come through `mark` alone, and
        what is written like one is text. `reasons`: the prompt has opened the reasoning.
        """
        self._tools = frozenset(tools)
        self._calls = syntax.calls if self._tools else None
        self._reasoning = syntax.reasoning
        self._silent = frozenset(silent_marks)
        self._segments: list[tuple[SegmentKind, list[str], tuple[Call, ...]]] = []
        self._blanks = ""  # held back, before what may become a mark
        self._match = ""  # held back, the beginning of a mark
        self._after_mark = reasons  # blanks are dropped until something else comes
        self._reading: CallReading | None = None
        self._source: list[str] = []  # of the call that is read
        self._calls_read = 0
        self._place = _Place.START
        self._marks: tuple[str, ...] = ()
        self._plain = re.compile("(?!)")  # what is surely no part of a mark
        self._move(_Place.REASONING if reasons and syntax.reasoning else _Place.START)

    def feed(self, text: str) -> list[Segment]:
        """Takes the next text; returns what is known now."""
        place = 0
        while place < len(text):
            if self._reading is None and not self._match:
                # Most characters are neither blank nor the beginning of a mark.
                plain = self._plain.match(text, place)
                if plain is not None:
                    self._pass_on(plain[0])
                    place = plain.end()
                    continue
            self._item(text[place])
            place += 1
        return self._taken()

    def mark(self, written: str) -> list[Segment]:
        """Takes a control token that is one of the syntax's marks."""
        self._item(written)
        return self._taken()

    def finish(self) -> list[Segment]:
        """Ends the answer; returns all that was held back. Feed nothing after it."""
        if self._reading is not None:
            self._read("")
        self._let_out()
        return self._taken()

    def _taken(self) -> list[Segment]:
        segments = [Segment(kind, "".join(texts), calls) for kind, texts, calls in self._segments]
        self._segments = []
        return segments

    def _put(self, kind: SegmentKind, text: str, calls: tuple[Call, ...] = ()) -> None:
        last = self._segments[-1] if self._segments else None
        if last is not None and last[0] == kind and kind != SegmentKind.CALLS:
            last[1].append(text)
        elif text or calls:
            self._segments.append((kind, [text], calls))

    def _move(self, place: _Place) -> None:
        """Goes to a place, and works out which marks have a meaning there."""
        self._place = place
        marks: list[str] = []
        opens, closes = self._reasoning or ("", "")
        if place == _Place.REASONING:
            marks.append(closes)
        else:
            marks += self._call_marks(place)
            if place == _Place.START and opens:
                marks.append(opens)
        self._marks = tuple(mark for mark in marks if mark not in self._silent)
        first = "".join(mark[0] for mark in self._marks)
        self._plain = re.compile(f"[^ \\t\\r\\n{re.escape(first)}]+")

    def _call_marks(self, place: _Place) -> list[str]:
        if self._calls is None:
            return []
        marks: list[str] = []
        if self._calls == CallSyntax.TAGGED_JSON:
            marks += [CALL_OPENS]
            if place == _Place.AFTER_CALL:
                marks += [CALL_CLOSES]
        elif self._calls == CallSyntax.MARKED:
            marks += [CALLS_FOLLOW]
        else:
            marks += [PYTHON_TAG]
            if place != _Place.CONTENT:
                marks += ["{"]
            if place == _Place.AFTER_CALL:
                marks += [";"]
        if self._calls_read >= CALLS_MAX:
            marks = [mark for mark in marks if mark == CALL_CLOSES]
        return marks

    def _item(self, item: str) -> None:
        """Takes a character, or a control token that is a mark."""
        if self._reading is not None and self._read(item):
            return
        if len(item) > 1:
            self._silent_mark(item)
            return
        self._match += item
        while self._match and not any(mark.startswith(self._match) for mark in self._marks):
            first, self._match = self._match[0], self._match[1:]
            self._pass_on(first)
        if self._match in self._marks:
            mark, self._match = self._match, ""
            self._found(mark, mark)

    def _silent_mark(self, mark: str) -> None:
        """A control token: whatever was held back as the beginning of another mark is none."""
        held, self._match = self._match, ""
        for character in held:
            self._pass_on(character)
        opens, closes = self._reasoning or ("", "")
        starts_call = mark in (CALLS_FOLLOW, PYTHON_TAG, CALL_OPENS)
        known = (
            mark == closes
            if self._place == _Place.REASONING
            else mark == opens
            or (mark == CALL_CLOSES and self._place == _Place.AFTER_CALL)
            or (starts_call and self._calls is not None and self._calls_read < CALLS_MAX)
        )
        if known:
            self._found(mark, "")

    def _pass_on(self, text: str) -> None:
        """A blank, or a run of other characters, that is part of no mark."""
        if text in _BLANK:
            if self._after_mark:
                self._put(SegmentKind.MARKUP, text)
                return
            self._blanks += text
            if len(self._blanks) > BLANKS_MAX:
                self._put(self._kind, self._blanks[0])
                self._blanks = self._blanks[1:]
            return
        self._put(self._kind, self._blanks + text)
        self._blanks = ""
        self._after_mark = False
        if self._place not in (_Place.REASONING, _Place.CONTENT):
            self._move(_Place.CONTENT)

    @property
    def _kind(self) -> SegmentKind:
        reasoning = self._place == _Place.REASONING
        return SegmentKind.REASONING if reasoning else SegmentKind.CONTENT

    def _found(self, mark: str, text: str) -> None:
        """A mark with a meaning here; `text` is what of it is text."""
        opens, closes = self._reasoning or ("", "")
        blanks, self._blanks = self._blanks, ""
        if mark in (opens, closes, CALL_CLOSES):
            self._put(SegmentKind.MARKUP, blanks + text)
            self._after_mark = True
            if mark == opens:
                self._move(_Place.REASONING)
            elif mark == closes:
                self._move(_Place.AFTER_REASONING)
            return
        self._source = [blanks, text]
        if self._calls == CallSyntax.MARKED:
            self._reading = read_marked(self._tools)
        else:
            self._reading = read_object(self._tools, bare=self._calls == CallSyntax.BARE_JSON)
        next(self._reading)
        if mark == "{":
            self._source = [blanks]
            self._read(mark)

    def _read(self, item: str) -> bool:
        """Goes on with a call; False if the item is not part of it and nothing is read any more."""
        assert self._reading is not None
        letter = item if len(item) == 1 else ""
        calls: list[Call] | None = None
        try:
            if len(self._source) < CALL_CHARACTERS_MAX:
                self._reading.send(item)
                if item:
                    self._source.append(letter)
                    return True
        except StopIteration as end:
            calls = end.value
        self._reading.close()
        self._reading = None
        source, self._source = "".join(self._source), []
        if calls and self._calls_read + len(calls) <= CALLS_MAX:
            self._put(SegmentKind.CALLS, source + letter, tuple(calls))
            self._calls_read += len(calls)
            self._after_mark = True
            self._move(_Place.AFTER_CALL)
            return True
        # No call: it is text, and nothing in it is looked at again.
        self._put(SegmentKind.CONTENT, source + (letter if calls is not None else ""))
        self._after_mark = False
        self._move(_Place.CONTENT)
        return calls is not None

    def _let_out(self) -> None:
        held, self._match = self._match, ""
        for character in held:
            self._pass_on(character)
        self._put(self._kind, self._blanks)
        self._blanks = ""
