"""Finds the control tokens that a template wrote, among client text that may look like them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from kvledger.errors import FieldViolation, InvalidRequest


class RenderedPart(NamedTuple):
    """A run of the rendered conversation: either text, or one control token as it is written."""

    text: str
    is_control_token: bool


class GuardedText(str):
    """A client's text with sentinels in it, which also stand in its written form as they are.

    Python writes a private character as an escape where a template writes a list or an object
    without `tojson`. Sentinels could then neither be found nor taken out.
    """

    sentinel: str

    @classmethod
    def of(cls, text: str, sentinel: str) -> str:
        """`text`, which may hold sentinels."""
        if sentinel not in text:
            return text
        guarded = cls(text)
        guarded.sentinel = sentinel
        return guarded

    def __repr__(self) -> str:
        text = self.replace(self.sentinel, "")
        # The whole text decides which quotes there are, and so which are escaped in its parts.
        quote = repr(text)[0]
        other = "'" if quote == '"' else '"'
        parts = (repr(part + other)[1:-2] for part in self.split(self.sentinel))
        return f"{quote}{self.sentinel.join(parts)}{quote}"


def control_tokens_of(parts: Sequence[RenderedPart]) -> list[str]:
    """The control tokens, in order."""
    return [part.text for part in parts if part.is_control_token]


def places_of(parts: Sequence[RenderedPart]) -> list[tuple[int, str]]:
    """The control tokens, each with the count of characters before it."""
    places: list[tuple[int, str]] = []
    characters = 0
    for part in parts:
        if part.is_control_token:
            places.append((characters, part.text))
        characters += len(part.text)
    return places


def _private_characters() -> Iterator[str]:
    # Noncharacters first, which no text may use for itself, then the private areas. None of them
    # is white space or has a case, so they pass through trimming and lower-casing.
    for first, last in (
        (0xFDD0, 0xFDEF),
        (0xE000, 0xF8FF),
        (0xF0000, 0xFFFFD),
        (0x100000, 0x10FFFD),
    ):
        yield from map(chr, range(first, last + 1))


class ControlTokens:
    """The control tokens of a model, and what keeps client text from being taken for one.

    A sentinel, a character that occurs nowhere else, is put into the contents before they are
    rendered and taken out after the rendered text is split at the control tokens. A control token
    with a sentinel inside is not one.
    """

    def __init__(self, control_tokens: Collection[str], fixed_texts: Collection[str]) -> None:
        """`fixed_texts` are what the template writes without being given it."""
        # Where several match, the longest is meant.
        tokens = sorted(control_tokens, key=len, reverse=True)
        self._first_characters = sorted({token[0] for token in tokens})
        # An empty alternative list must match nothing.
        self._written = re.compile(f"({'|'.join(map(re.escape, tokens)) or '(?!)'})")
        self._beginning = re.compile(
            "|".join(f"{re.escape(token[0])}(?={re.escape(token[1:])})" for token in tokens)
            or "(?!)"
        )
        self._fixed_characters = frozenset[str]().union(*tokens, *fixed_texts)

    def sentinel_for(self, contents: Sequence[str]) -> str:
        """A character that occurs in no content, in no control token and not in the template."""
        used = self._fixed_characters
        for character in _private_characters():
            if character in used:
                continue
            if not any(character in content for content in contents):
                return character
            # Somebody uses private characters: look at all of them together, once.
            used = used.union(*contents)
        raise InvalidRequest(
            FieldViolation("chat.messages", "the contents use every private character of Unicode")
        )

    def guarded(self, content: str, sentinel: str) -> str:
        """`content` with a sentinel wherever a control token might begin or go on.

        After each character that begins a control token, so that none can begin in the content;
        and before the first visible character, so that none that began before can go on into it.
        """
        visible = content.lstrip()
        if not visible:
            return content
        blank = content[: len(content) - len(visible)]
        for character in self._first_characters:
            visible = visible.replace(character, character + sentinel)
        return GuardedText.of(blank + sentinel + visible, sentinel)

    def broken(self, content: str, sentinel: str) -> str:
        """`content` with a sentinel in each control token that is written in full."""
        broken = self._beginning.sub(lambda match: match[0] + sentinel, content)
        return GuardedText.of(broken, sentinel)

    def parts(self, rendered: str, sentinel: str) -> list[RenderedPart]:
        """Splits the rendered text at its control tokens and takes the sentinels out."""
        # Splitting at a group gives texts at even places and control tokens at odd ones.
        split = self._written.split(rendered)
        return [
            RenderedPart(text.replace(sentinel, ""), place % 2 == 1)
            for place, text in enumerate(split)
            if text
        ]
