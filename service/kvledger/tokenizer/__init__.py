"""Text in, token ids out, and back: vocabulary, chat template, incremental output, stop strings."""

from __future__ import annotations

from kvledger.tokenizer.chat_template import ChatTemplate
from kvledger.tokenizer.control_tokens import RenderedPart
from kvledger.tokenizer.conversation import ChatMessage, Conversation, Role, Tool, ToolCall
from kvledger.tokenizer.incremental import IncrementalDecoder
from kvledger.tokenizer.output import AnsweredCall, OutputText, Piece, TokenBytes
from kvledger.tokenizer.stop_strings import StopStrings
from kvledger.tokenizer.vocabulary import TokenIds, Tokenizer, Vocabulary, VocabularySource

__all__ = [
    "AnsweredCall",
    "ChatMessage",
    "ChatTemplate",
    "Conversation",
    "IncrementalDecoder",
    "OutputText",
    "Piece",
    "RenderedPart",
    "Role",
    "StopStrings",
    "TokenBytes",
    "TokenIds",
    "Tokenizer",
    "Tool",
    "ToolCall",
    "Vocabulary",
    "VocabularySource",
]
