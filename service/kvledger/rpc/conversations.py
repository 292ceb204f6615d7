"""From a ChatPrompt to a conversation: what of it is JSON text is parsed here."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any, NoReturn

from kvledger.errors import FieldViolation, InvalidRequest
from kvledger.limits import JSON_DEPTH_MAX
from kvledger.tokenizer import ChatMessage, Conversation, Role, Tool, ToolCall
from kvledger.v1 import generation_pb2

_ROLES: dict[int, Role] = {
    generation_pb2.ROLE_SYSTEM: "system",
    generation_pb2.ROLE_USER: "user",
    generation_pb2.ROLE_ASSISTANT: "assistant",
    generation_pb2.ROLE_TOOL: "tool",
}


def conversation_of(chat: generation_pb2.ChatPrompt) -> Conversation:
    """The conversation of a ChatPrompt that is within the limits.

    Raises InvalidRequest where text that should be JSON is none.
    """
    return Conversation(
        messages=[_message(f"chat.messages[{i}]", each) for i, each in enumerate(chat.messages)],
        tools=[_tool(f"chat.tools[{i}]", each) for i, each in enumerate(chat.tools)],
        # In an order of their own: a map of the contract has none.
        arguments={
            name: _json("chat.template_arguments", chat.template_arguments[name])
            for name in sorted(chat.template_arguments)
        },
    )


def _message(path: str, message: generation_pb2.ChatMessage) -> ChatMessage:
    return ChatMessage(
        role=_ROLES[message.role],
        content=message.content,
        reasoning=message.reasoning,
        tool_calls=tuple(
            ToolCall(
                call.id,
                call.name,
                _json_object(f"{path}.tool_calls[{place}].arguments", call.arguments),
            )
            for place, call in enumerate(message.tool_calls)
        ),
        tool_call_id=message.tool_call_id,
        name=message.name,
    )


def _tool(path: str, tool: generation_pb2.Tool) -> Tool:
    parameters: dict[str, Any] = {"type": "object", "properties": {}}
    if tool.parameters:
        parameters = _json_object(f"{path}.parameters", tool.parameters)
    return Tool(tool.name, tool.description, parameters)


def _json_object(path: str, text: str) -> dict[str, Any]:
    value = _json(path, text)
    if not isinstance(value, dict):
        raise InvalidRequest(FieldViolation(path, "is no JSON object"))
    return value


def _json(path: str, text: str) -> Any:
    """The value that JSON text stands for, within the limit of depth."""
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
        depth_fits = _fits(value)
    except json.JSONDecodeError as error:
        reason = f"is no JSON: character {error.pos} cannot stand there"
        raise InvalidRequest(FieldViolation(path, reason)) from None
    except ValueError:
        reason = "holds a number that is too large, or is none"
        raise InvalidRequest(FieldViolation(path, reason)) from None
    except RecursionError:
        depth_fits = False
    if not depth_fits:
        reason = f"nests values deeper than {JSON_DEPTH_MAX} levels"
        raise InvalidRequest(FieldViolation(path, reason))
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError


def _finite(numeral: str) -> float:
    number = float(numeral)
    if not math.isfinite(number):
        raise ValueError
    return number


def _fits(value: Any) -> bool:
    """Whether a value has at most the allowed levels of arrays and objects inside one another."""
    level = _containers([value])
    for _ in range(JSON_DEPTH_MAX):
        level = _containers(
            part
            for parent in level
            for part in (parent.values() if isinstance(parent, dict) else parent)
        )
    return not level


def _containers(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if isinstance(value, (dict, list))]
