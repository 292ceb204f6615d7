"""Tells reasoning and tool calls apart from the text of an answer, while it comes."""

from __future__ import annotations

from kvledger.chat_output.output import ChatOutput
from kvledger.chat_output.parser import ChatParser
from kvledger.chat_output.syntax import CallSyntax, ChatSyntax

__all__ = ["CallSyntax", "ChatOutput", "ChatParser", "ChatSyntax"]
