"""Text in, token ids out, and back: vocabulary, chat template, incremental output, stop strings."""

from __future__ import annotations

from kvledger.tokenizer.chat_template import ChatMessage, ChatTemplate, RenderedPart, Role
from kvledger.tokenizer.incremental import IncrementalDecoder
from kvledger.tokenizer.output import OutputText, Piece
from kvledger.tokenizer.stop_strings import StopStrings
from kvledger.tokenizer.vocabulary import TokenIds, Tokenizer, Vocabulary, VocabularySource

__all__ = [
    "ChatMessage",
    "ChatTemplate",
    "IncrementalDecoder",
    "OutputText",
    "Piece",
    "RenderedPart",
    "Role",
    "StopStrings",
    "TokenIds",
    "Tokenizer",
    "Vocabulary",
    "VocabularySource",
]
