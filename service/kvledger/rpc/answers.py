"""What of an answer goes into which field: text, reasoning and tool calls."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvledger.chat_output import ChatOutput, ChatSyntax
from kvledger.served_model import ServedModel
from kvledger.tokenizer import OutputText, Piece, Tokenizer
from kvledger.v1 import generation_pb2, models_pb2

AnswerOutput: TypeAlias = OutputText | ChatOutput


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
    names = [tool.name for tool in request.chat.tools]
    return ChatOutput.of(output, syntax, names, prompt, tokenizer)


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


def chat_support(model: ServedModel) -> models_pb2.ChatSupport:
    """What a model's chat template can write, and what of its answers can be told apart."""
    tokenizer = model.tokenizer
    template = tokenizer.chat_template
    syntax = ChatSyntax.of(tokenizer.chat_template_source)
    return models_pb2.ChatSupport(
        tools=template is not None and template.takes_tools,
        tool_calls=template is not None and template.takes_tool_calls,
        call_syntax="" if syntax.calls is None else syntax.calls.value,
        reasoning=syntax.reasoning is not None,
        history=[
            models_pb2.ChatHistory(
                conversation=turn.conversation,
                turn=turn.turn,
                turn_tokens=turn.tokens,
                kept_tokens=turn.kept,
                computed_ids=turn.computed_ids,
                written_ids=turn.written_ids,
            )
            for turn in model.kept_turns
        ],
    )
