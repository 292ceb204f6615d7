"""One stream's output: its text, and the tokens that go with each piece of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, Protocol

from kvledger.tokenizer.incremental import IncrementalDecoder
from kvledger.tokenizer.stop_strings import StopStrings


class AnsweredCall(NamedTuple):
    """A function that the model calls; see ToolCallDelta in the contract."""

    place: int  # among the calls of its answer, from 0
    id: str
    name: str
    arguments: str


class Piece(NamedTuple):
    """What may be sent now: text, and the ids of the tokens whose text has all been sent.

    Reasoning and calls are told apart from the text by `chat_output` alone.
    """

    text: str
    token_ids: list[int]
    reasoning: str = ""
    tool_calls: tuple[AnsweredCall, ...] = ()

    @classmethod
    def joined(cls, pieces: Iterable[Piece]) -> Piece:
        """Consecutive pieces as one."""
        pieces = list(pieces)
        return cls(
            text="".join(piece.text for piece in pieces),
            token_ids=[token_id for piece in pieces for token_id in piece.token_ids],
            reasoning="".join(piece.reasoning for piece in pieces),
            tool_calls=tuple(call for piece in pieces for call in piece.tool_calls),
        )


class TokenBytes(Protocol):
    """A vocabulary, as far as output needs it: `Tokenizer`, or a small table in a test."""

    @property
    def token_bytes(self) -> Sequence[bytes]:
        """The bytes that each id adds to a text, by id; none for a control token."""


class OutputText:
    """Decodes one stream, watches for its stop strings, and keeps text and tokens in step.

    A token leaves with the piece that holds the last of its text. So a token whose text is held
    back for a stop string is held back too, and a token without text of its own (a control
    token, or one that ends inside a character) travels with the text that follows.

    Once a stop string has occurred, the tokens up to the one that completed it are released and
    later ones are ignored. A stop token ends the output too: it is released like the others, and
    its text is not. Not for use from two threads at once.
    """

    def __init__(
        self,
        vocabulary: TokenBytes,
        stop_sequences: Sequence[str] = (),
        stop_ids: Collection[int] = (),
    ) -> None:
        """Raises ValueError for an empty stop sequence."""
        self._token_bytes = vocabulary.token_bytes
        self._decoder = IncrementalDecoder(vocabulary.token_bytes)
        self._stops = StopStrings(stop_sequences)
        self._stop_ids = frozenset(stop_ids)
        # Where nothing can stop it, what is text by itself may be sent at once.
        self.can_stop = bool(stop_sequences or stop_ids)
        self._ended = False  # by a stop token
        self._characters_decoded = 0
        self._characters_released = 0
        # Tokens in order: first those whose text is known, each with the count of characters
        # after which it may leave, then those that wait for the text that follows them.
        self._held: deque[tuple[int, int]] = deque()
        self._waiting: list[int] = []
        self._token_count = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string or a stop token has occurred."""
        return self._ended or self._stops.stopped

    @property
    def token_count(self) -> int:
        """Tokens taken so far, up to and including the one that stopped the output."""
        return self._token_count

    @property
    def characters_decoded(self) -> int:
        """Characters of the text so far, those that are held back included."""
        return self._characters_decoded

    def feed(self, token_ids: Sequence[int]) -> Piece:
        """Takes any number of ids; returns what may be sent now.

        Raises IndexError for an id outside the vocabulary.
        """
        if self.takes_plain(token_ids):
            return Piece(self._token_bytes[token_ids[0]].decode("ascii"), [token_ids[0]])
        released: list[str] = []
        for token_id in token_ids:
            if self.stopped:
                break
            released.append(self.advance(token_id))
        return self._piece("".join(released))

    def takes_plain(self, token_ids: Sequence[int]) -> bool:
        """Takes one token whose bytes are all that may be sent now; most are. Otherwise none.

        They are ASCII, and nothing is held back before them.
        """
        if len(token_ids) != 1 or self.can_stop or self._waiting or token_ids[0] < 0:
            return False
        data = self._token_bytes[token_ids[0]]
        if not data or not data.isascii():
            return False
        self._token_count += 1
        self._characters_decoded += len(data)
        self._characters_released += len(data)
        return True

    def finish(self) -> Piece:
        """Ends the stream; returns all that was held back. Feed nothing after it."""
        if self.stopped:
            return Piece("", [])
        return Piece(self.rest(), self.take_all())

    def advance(self, token_id: int) -> str:
        """Takes one id of a stream that has not stopped; returns the text that may be sent now.

        For whoever sends less than that: the tokens of what was sent are then asked of `take`.
        Raises IndexError for an id outside the vocabulary.
        """
        if token_id in self._stop_ids:
            self._token_count += 1
            self._waiting.append(token_id)
            # Nothing follows that could complete a character or a stop string.
            rest = self.rest()
            self._ended = True
            return rest
        text = self._decoder.feed_token(token_id)
        self._token_count += 1
        self._enter(token_id, text)
        return self._stops.feed(text) if text else ""

    def rest(self) -> str:
        """What is held back, once no token follows."""
        return self._stops.feed(self._decoder.finish()) + self._stops.finish()

    def take(self, characters: int) -> list[int]:
        """Ids of the tokens whose text lies within so many characters; each id comes once."""
        token_ids: list[int] = []
        while self._held and self._held[0][1] <= characters:
            token_ids.append(self._held.popleft()[0])
        return token_ids

    def take_all(self) -> list[int]:
        """Ids of all tokens that have not been taken, once no token follows."""
        token_ids = [token_id for token_id, _ in self._held] + self._waiting
        self._held.clear()
        self._waiting = []
        return token_ids

    def _enter(self, token_id: int, text: str) -> None:
        if text:
            # What waits is completed by this text's first character, or stands right before it.
            if self._waiting:
                first = self._characters_decoded + 1
                self._held.extend((waiting, first) for waiting in self._waiting)
                self._waiting.clear()
            self._characters_decoded += len(text)
            if not self._decoder.unfinished:
                self._held.append((token_id, self._characters_decoded))
                return
        self._waiting.append(token_id)

    def _piece(self, text: str) -> Piece:
        if self.stopped:
            return Piece(text, self.take_all())
        self._characters_released += len(text)
        return Piece(text, self.take(self._characters_released))
