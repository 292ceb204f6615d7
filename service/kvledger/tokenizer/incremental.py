"""Turns a stream of token ids into text, whole characters only."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class IncrementalDecoder:
    """Decodes one stream of token ids piece by piece.

    A token of a byte-level vocabulary is a run of bytes, so a character may begin in one token
    and end in another, and no token has a text of its own. The bytes are therefore joined before
    they are decoded: the joined output equals `Tokenizer.decode` of all ids, however the ids are
    split among the calls. Broken UTF-8 becomes U+FFFD.

    Not for use from two threads at once.
    """

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        """`token_bytes` holds the bytes of each token id, as `Tokenizer.token_bytes` does."""
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_ids: Sequence[int]) -> str:
        """Takes any number of ids; returns the characters that they complete.

        Raises IndexError for an id outside the vocabulary.
        """
        return "".join([self.feed_token(token_id) for token_id in token_ids])

    def feed_token(self, token_id: int) -> str:
        """Takes one id, like `feed`."""
        # A negative id would quietly count from the end of the table.
        if token_id < 0:
            raise IndexError(f"token id {token_id} is negative")
        return self._utf8.decode(self._token_bytes[token_id])

    @property
    def unfinished(self) -> bool:
        """Whether the last bytes begin a character that is still without an end."""
        return len(self._utf8.getstate()[0]) > 0

    def finish(self) -> str:
        """Ends the stream: an unfinished character comes out as U+FFFD. Feed nothing after it."""
        return self._utf8.decode(b"", final=True)
