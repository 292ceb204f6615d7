"""From a ChatPrompt to a conversation: what of it is JSON text is parsed here."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any, NoReturn

from kvledger.errors import FieldViolation, InvalidRequest
from kvledger.limits import JSON_DEPTH_MAX, JSON_VALUES_MAX
from kvledger.tokenizer import ChatMessage, Conversation, Role, Tool, ToolCall
from kvledger.v1 import generation_pb2

_ROLES: dict[int, Role] = {
    generation_pb2.ROLE_SYSTEM: "system",
    generation_pb2.ROLE_USER: "user",
    generation_pb2.ROLE_ASSISTANT: "assistant",
    generation_pb2.ROLE_TOOL: "tool",
}


def conversation_of(chat: generation_pb2.ChatPrompt) -> Conversation:
    """The conversation of a ChatPrompt that is within the limits on its size.

    Raises InvalidRequest where text that should be JSON is none, or holds too much.
    """
    reader = _JsonReader()
    return Conversation(
        messages=[
            _message(f"chat.messages[{i}]", each, reader) for i, each in enumerate(chat.messages)
        ],
        tools=[_tool(f"chat.tools[{i}]", each, reader) for i, each in enumerate(chat.tools)],
        # In an order of their own: a map of the contract has none.
        arguments={
            name: reader.value("chat.template_arguments", chat.template_arguments[name])
            for name in sorted(chat.template_arguments)
        },
    )


def _message(path: str, message: generation_pb2.ChatMessage, reader: _JsonReader) -> ChatMessage:
    return ChatMessage(
        role=_ROLES[message.role],
        content=message.content,
        reasoning=message.reasoning,
        tool_calls=tuple(
            ToolCall(
                call.id,
                call.name,
                reader.object(f"{path}.tool_calls[{place}].arguments", call.arguments),
            )
            for place, call in enumerate(message.tool_calls)
        ),
        tool_call_id=message.tool_call_id,
        name=message.name,
    )


def _tool(path: str, tool: generation_pb2.Tool, reader: _JsonReader) -> Tool:
    parameters: dict[str, Any] = {"type": "object", "properties": {}}
    if tool.parameters:
        parameters = reader.object(f"{path}.parameters", tool.parameters)
    return Tool(tool.name, tool.description, parameters)


class _JsonReader:
    """Parses the JSON texts of one request, within the limits of depth and of values."""

    def __init__(self) -> None:
        self._values_left = JSON_VALUES_MAX

    def object(self, path: str, text: str) -> dict[str, Any]:
        """The object that a field's text stands for. Raises InvalidRequest."""
        value = self.value(path, text)
        if not isinstance(value, dict):
            raise InvalidRequest(FieldViolation(path, "is no JSON object"))
        return value

    def value(self, path: str, text: str) -> Any:
        """The value that a field's text stands for. Raises InvalidRequest."""
        try:
            value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
            reason = self._reason_against(value)
        except json.JSONDecodeError as error:
            reason = f"is no JSON: character {error.pos} cannot stand there"
        except ValueError:
            reason = "holds a number that is too large, or is none"
        except RecursionError:
            reason = _TOO_DEEP
        if reason is not None:
            raise InvalidRequest(FieldViolation(path, reason))
        return value

    def _reason_against(self, value: Any) -> str | None:
        level = _containers([value])
        for _ in range(JSON_DEPTH_MAX):
            self._values_left -= sum(map(len, level))
            if self._values_left < 0:
                return f"holds more values than the {JSON_VALUES_MAX} of all JSON in a chat"
            level = _containers(
                part
                for parent in level
                for part in (parent.values() if isinstance(parent, dict) else parent)
            )
        return _TOO_DEEP if level else None


_TOO_DEEP = f"nests values deeper than {JSON_DEPTH_MAX} levels"


def _refuse(constant: str) -> NoReturn:
    raise ValueError


def _finite(numeral: str) -> float:
    number = float(numeral)
    if not math.isfinite(number):
        raise ValueError
    return number


def _containers(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if isinstance(value, (dict, list))]
