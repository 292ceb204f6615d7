"""A conversation as a chat template is given it: messages, tools, and variables of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeAlias, get_args

Role = Literal["system", "user", "assistant", "tool"]
_ROLES = frozenset(get_args(Role))

JsonValue: TypeAlias = Any
JsonObject: TypeAlias = Mapping[str, Any]

_WORD = re.compile(r"[A-Za-z0-9_.:$-]*")


@dataclass(frozen=True)
class ClientText:
    """What is done to each string of a client before a template gets it."""

    # To any text.
    prose: Callable[[str], str]
    # To a text of letters, digits, "_", "-", ".", ":" and "$" alone, where it stands as a name, as
    # an id or in JSON.
    word: Callable[[str], str]


@dataclass(frozen=True)
class ToolCall:
    """A call that the model made: an id or "", a name, and arguments, parsed. ValueError for an id
    or a name that is no word."""

    id: str
    name: str
    arguments: JsonObject

    def __post_init__(self) -> None:
        _require_words(self.id, self.name)


@dataclass(frozen=True)
class Tool:
    """A function that the model may call; `parameters` is a JSON schema, parsed. ValueError for a
    name that is no word."""

    name: str
    description: str
    parameters: JsonObject

    def __post_init__(self) -> None:
        _require_words(self.name)


@dataclass(frozen=True)
class ChatMessage:
    """One message of a conversation. ValueError for another role: templates write it as it is,
    so it must not come from a client's string; and for an id or a name that is no word."""

    role: Role
    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    # Of the call that a message of role "tool" answers.
    tool_call_id: str = ""
    name: str = ""

    def __post_init__(self) -> None:
        if self.role not in _ROLES:
            raise ValueError(f"a message's role is one of {sorted(_ROLES)}")
        _require_words(self.tool_call_id, self.name)


@dataclass(frozen=True)
class Conversation:
    """All that a client gives to a chat template."""

    messages: Sequence[ChatMessage]
    tools: Sequence[Tool] = ()
    # Variables of the template by name; no name that the server sets itself.
    arguments: Mapping[str, JsonValue] = field(default_factory=dict)

    def variables(self, text: ClientText, *, calls_as_text: bool = False) -> dict[str, Any]:
        """The variables of the template, each string of the client passed through `text`.

        `calls_as_text`: arguments of calls are JSON text, as a few templates want them.
        """
        variables = {name: _changed(value, text) for name, value in self.arguments.items()}
        variables["messages"] = [
            _message(message, text, calls_as_text) for message in self.messages
        ]
        if self.tools:
            variables["tools"] = variables["xml_tools"] = [_tool(tool, text) for tool in self.tools]
        return variables

    @property
    def parts(self) -> int:
        """Messages, calls and tools."""
        calls = sum(len(message.tool_calls) for message in self.messages)
        return len(self.messages) + calls + len(self.tools)

    @cached_property
    def json_characters(self) -> int:
        """Characters of all that is JSON: schemas, arguments of calls, variables."""
        calls = [call.arguments for message in self.messages for call in message.tool_calls]
        values = [*(tool.parameters for tool in self.tools), *calls, *self.arguments.values()]
        return sum(len(json.dumps(value, ensure_ascii=False)) for value in values)

    def strings(self) -> tuple[list[str], set[str]]:
        """Every string of the client: prose, and words."""
        texts: list[str] = []
        words: set[str] = set()

        def prose(text: str) -> str:
            texts.append(text)
            return text

        def word(text: str) -> str:
            words.add(text)
            return text

        self.variables(ClientText(prose, word))
        return texts, words


def _message(message: ChatMessage, text: ClientText, calls_as_text: bool) -> dict[str, Any]:
    made: dict[str, Any] = {"role": message.role, "content": text.prose(message.content)}
    if message.reasoning:
        # Under the two names that templates know it by.
        made["reasoning_content"] = made["thinking"] = text.prose(message.reasoning)
    if message.tool_calls:
        made["tool_calls"] = [_call(call, text, calls_as_text) for call in message.tool_calls]
    if message.tool_call_id:
        made["tool_call_id"] = text.word(message.tool_call_id)
    if message.name:
        made["name"] = text.word(message.name)
    return made


def _call(call: ToolCall, text: ClientText, as_text: bool) -> dict[str, Any]:
    arguments: Any
    if as_text:
        arguments = text.prose(json.dumps(call.arguments, ensure_ascii=False))
    else:
        arguments = _changed(call.arguments, text)
    made: dict[str, Any] = {
        "type": "function",
        "function": {"name": text.word(call.name), "arguments": arguments},
    }
    if call.id:
        made["id"] = text.word(call.id)
    return made


def _tool(tool: Tool, text: ClientText) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": text.word(tool.name),
            "description": text.prose(tool.description),
            "parameters": _changed(tool.parameters, text),
        },
    }


def _changed(value: JsonValue, text: ClientText) -> JsonValue:
    """A JSON value whose strings, keys included, have passed through `text`."""
    if isinstance(value, str):
        return text.word(value) if is_word(value) else text.prose(value)
    if isinstance(value, Mapping):
        return {_changed(key, text): _changed(item, text) for key, item in value.items()}
    if isinstance(value, list):
        return [_changed(item, text) for item in value]
    return value


def _require_words(*texts: str) -> None:
    if not all(map(is_word, texts)):
        raise ValueError("names and ids are letters, digits, _, -, ., : and $")


def is_word(text: str) -> bool:
    """Whether a text passes through `ClientText.word` where it stands in JSON."""
    return _WORD.fullmatch(text) is not None
