"""What of an answer goes into which field: text, reasoning and tool calls."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvledger.chat_output import ChatOutput, ChatParser, ChatSyntax
from kvledger.tokenizer import OutputText, Piece, Tokenizer
from kvledger.v1 import generation_pb2, models_pb2

AnswerOutput: TypeAlias = OutputText | ChatOutput

# Tokens at the end of a prompt that are looked at for an open mark of reasoning.
_TAIL_TOKENS = 32


def answer_output(
    request: generation_pb2.GenerateRequest,
    output: OutputText,
    prompt: npt.NDArray[np.int32],
    tokenizer: Tokenizer,
) -> AnswerOutput:
    """The output of one sample of a validated request: `output`, or that with its parts told apart.

    `prompt` are the ids of the prompt, int32 [tokens].
    """
    syntax = ChatSyntax.of(tokenizer.chat_template_source)
    if not request.output.parse_chat or not syntax.marks:
        return output
    tail = tokenizer.decode(prompt[-_TAIL_TOKENS:], with_control_tokens=True)
    silent = {
        token_id: text for token_id, text in tokenizer.control_texts.items() if text in syntax.marks
    }
    parser = ChatParser(
        syntax,
        [tool.name for tool in request.chat.tools],
        silent_marks=silent.values(),
        reasons=syntax.reasons_after(tail),
    )
    return ChatOutput(output, parser, silent)


def fill_delta(delta: generation_pb2.Delta, piece: Piece) -> None:
    """Puts text, reasoning and calls of a piece into a Delta."""
    if piece.text:
        delta.text = piece.text
    if piece.reasoning:
        delta.reasoning = piece.reasoning
    for call in piece.tool_calls:
        delta.tool_calls.add(index=call.place, id=call.id, name=call.name, arguments=call.arguments)


def fill_sample(sample: generation_pb2.Sample, answer: Piece) -> None:
    """Puts text, reasoning and calls of a whole answer into a Sample."""
    sample.text = answer.text
    sample.reasoning = answer.reasoning
    for call in answer.tool_calls:
        sample.tool_calls.add(id=call.id, name=call.name, arguments=call.arguments)


def chat_support(tokenizer: Tokenizer) -> models_pb2.ChatSupport:
    """What a model's chat template can write, and what of its answers can be told apart."""
    template = tokenizer.chat_template
    syntax = ChatSyntax.of(tokenizer.chat_template_source)
    return models_pb2.ChatSupport(
        tools=template is not None and template.takes_tools,
        tool_calls=template is not None and template.takes_tool_calls,
        call_syntax="" if syntax.calls is None else syntax.calls.value,
        reasoning=syntax.reasoning is not None,
    )
