"""One stream's answer in parts: reasoning, text and calls, with the tokens of each piece."""

from __future__ import annotations

import secrets
import string
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

from kvledger.chat_output.parser import ChatParser, Segment, SegmentKind
from kvledger.chat_output.syntax import ChatSyntax
from kvledger.tokenizer import AnsweredCall, OutputText, Piece, TokenIds, Tokenizer

# As some templates ask of the ids of calls that they are given again.
_ID_CHARACTERS = 9
# Tokens at the end of a prompt that are looked at for an open mark of reasoning.
_TAIL_TOKENS = 32


def _new_id() -> str:
    return "".join(
        secrets.choice(string.ascii_letters + string.digits) for _ in range(_ID_CHARACTERS)
    )


class ChatOutput:
    """Like `OutputText`, which it is put around: with reasoning and calls told apart.

    A token still leaves with the piece that holds the last of its text. One whose text is a mark,
    or blanks next to it, leaves with what follows, or at the end. Stop strings are looked for in
    the text as the model wrote it, before it is told apart. Not for use from two threads at once.
    """

    def __init__(
        self,
        output: OutputText,
        parser: ChatParser,
        silent_marks: Mapping[int, str],
        new_id: Callable[[], str] = _new_id,
    ) -> None:
        """`silent_marks`: the ids of control tokens that are marks, and their written forms."""
        self._output = output
        self._parser = parser
        self._silent_marks = silent_marks
        self._new_id = new_id
        # Marks that have come, each with the count of characters that came before it.
        self._marks: deque[tuple[int, str]] = deque()
        self._characters_parsed = 0
        self._characters_told = 0  # up to the end of the last segment
        self._characters_shown = 0  # up to the end of the last segment that is shown
        self._calls = 0

    @classmethod
    def of(
        cls,
        output: OutputText,
        syntax: ChatSyntax,
        tools: Collection[str],
        prompt: TokenIds,
        tokenizer: Tokenizer,
    ) -> ChatOutput:
        """`output` with its parts told apart, as a template's syntax has them.

        `tools` are the names that calls may have, `prompt` the ids of the prompt, int32 [tokens].
        """
        tail = tokenizer.decode(prompt[-_TAIL_TOKENS:], with_control_tokens=True)
        silent = {
            token_id: text
            for token_id, text in tokenizer.control_texts.items()
            if text in syntax.marks
        }
        parser = ChatParser(
            syntax, tools, silent_marks=silent.values(), reasons=syntax.reasons_after(tail)
        )
        return cls(output, parser, silent)

    @property
    def can_stop(self) -> bool:
        """Whether there is a stop string or a stop token."""
        return self._output.can_stop

    @property
    def stopped(self) -> bool:
        """Whether a stop string or a stop token has occurred."""
        return self._output.stopped

    @property
    def token_count(self) -> int:
        """Tokens taken so far, up to and including the one that stopped the output."""
        return self._output.token_count

    def feed(self, token_ids: Sequence[int]) -> Piece:
        """Takes any number of ids; returns what may be sent now.

        Raises IndexError for an id outside the vocabulary.
        """
        segments: list[Segment] = []
        for token_id in token_ids:
            if self._output.stopped:
                break
            place = self._output.characters_decoded
            text = self._output.advance(token_id)
            if token_id in self._silent_marks and not self._output.stopped:
                self._marks.append((place, self._silent_marks[token_id]))
            segments += self._parsed(text)
            if self._output.stopped:
                return self._last_piece(segments)
        return self._piece(segments)

    def finish(self) -> Piece:
        """Ends the stream; returns all that was held back. Feed nothing after it."""
        if self._output.stopped:
            return Piece("", [])
        return self._last_piece(self._parsed(self._output.rest()))

    def _parsed(self, text: str) -> list[Segment]:
        """Segments of text that stop strings have let out, and of the marks within it."""
        segments: list[Segment] = []
        end = self._characters_parsed + len(text)
        while self._marks and self._marks[0][0] <= end:
            place, mark = self._marks.popleft()
            before = max(0, place - self._characters_parsed)
            segments += self._parser.feed(text[:before])
            segments += self._parser.mark(mark)
            text = text[before:]
            self._characters_parsed += before
        segments += self._parser.feed(text)
        self._characters_parsed = end
        return segments

    def _last_piece(self, segments: list[Segment]) -> Piece:
        piece = self._piece(segments + self._parser.finish())
        return piece._replace(token_ids=piece.token_ids + self._output.take_all())

    def _piece(self, segments: Collection[Segment]) -> Piece:
        calls: list[AnsweredCall] = []
        for segment in segments:
            self._characters_told += len(segment.source)
            if segment.kind != SegmentKind.MARKUP:
                self._characters_shown = self._characters_told
            for call in segment.calls:
                calls.append(AnsweredCall(self._calls, self._new_id(), call.name, call.arguments))
                self._calls += 1
        return Piece(
            text=_text_of(segments, SegmentKind.CONTENT),
            token_ids=self._output.take(self._characters_shown),
            reasoning=_text_of(segments, SegmentKind.REASONING),
            tool_calls=tuple(calls),
        )


def _text_of(segments: Collection[Segment], kind: SegmentKind) -> str:
    return "".join(segment.source for segment in segments if segment.kind == kind)
