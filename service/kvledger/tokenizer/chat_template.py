"""Renders a conversation with the model's chat template; contents never make control tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeAlias

from jinja2 import Template, TemplateSyntaxError

from kvledger.errors import FieldViolation, InvalidRequest, ModelRefused
from kvledger.tokenizer.control_tokens import (
    ControlTokens,
    RenderedPart,
    control_tokens_of,
    places_of,
)
from kvledger.tokenizer.conversation import (
    ChatMessage,
    ClientText,
    Conversation,
    JsonValue,
    Tool,
    ToolCall,
)
from kvledger.tokenizer.template_environment import CountedEnvironment, TemplateRaisedError
from kvledger.tokenizer.template_work import (
    METER_VARIABLE,
    SENTINEL_VARIABLE,
    NotAllowedError,
    WorkLimitError,
    WorkLimits,
    WorkMeter,
)

TEMPLATE_CHARACTERS_MAX = 65_536

# The limits of one rendering: a part for the template, and a part for each message and each
# character of content. The largest templates in use take about a tenth of them; a hostile one
# takes a few seconds at most with a mebibyte of content in a thousand messages.
_OPERATIONS_BASE = 500_000
_OPERATIONS_PER_MESSAGE = 4_096
_CHARACTERS_BASE = 4_000_000
_CHARACTERS_PER_MESSAGE = 65_536
_CHARACTERS_PER_CONTENT_CHARACTER = 32
# JSON is many short values, each of which costs as much to visit as several characters.
_CHARACTERS_PER_JSON_CHARACTER = 8
# Templates that build a list message by message take work in proportion to the square.
_COUNTED_MESSAGES_MAX = 1_024
_OUTPUT_BASE = 1_000_000
_OUTPUT_PER_MESSAGE = 1_024
_OUTPUT_PER_CONTENT_CHARACTER = 2

_QUOTED_REASON_MAX = 200

# Names under which templates know the tools.
_TOOL_VARIABLES = frozenset({"tools", "xml_tools"})

# What turns one word into another of the same length.
_TURNED = str.maketrans(
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789",
    "bcdefghijklmnopqrstuvwxyzaBCDEFGHIJKLMNOPQRSTUVWXYZA1234567890",
)
# What templates look for in schemas, besides the words that stand in the template itself.
_SCHEMA_WORDS = frozenset(
    {"$ref", "$defs", "additionalProperties", "allOf", "anyOf", "array", "boolean", "const"}
    | {"default", "definitions", "description", "enum", "examples", "format", "integer", "items"}
    | {"maximum", "minimum", "name", "null", "nullable", "number", "object", "oneOf", "parameters"}
    | {"pattern", "prefixItems", "properties", "required", "return", "string", "title", "type"}
)


_Change: TypeAlias = Callable[[str], str]


def _same(text: str) -> str:
    return text


_UNCHANGED = ClientText(_same, _same)


class ChatTemplate:
    """A model's chat template, compiled, with bounded work.

    May be used from several threads at once.
    """

    def __init__(
        self,
        source: str,
        *,
        control_tokens: Collection[str],
        bos_token: str | None,
        eos_token: str,
        clock: Callable[[], datetime] | None = None,
    ) -> None:
        """Compiles `source`; `control_tokens` are the written forms of the model's control tokens.

        With no `clock`, `strftime_now` is undefined and templates use the fixed date they carry.
        Raises ModelRefused if the template is too long, does not compile, does what no chat
        template may do, or passes the limits of work with a conversation of one letter.
        """
        if len(source) > TEMPLATE_CHARACTERS_MAX:
            raise ModelRefused(
                f"tokenizer.chat_template has {len(source)} characters;"
                f" the limit is {TEMPLATE_CHARACTERS_MAX}"
            )
        if any(len(token) < 2 for token in control_tokens):
            raise ModelRefused(
                "a control token is written with less than 2 characters,"
                " so a chat template's use of it cannot be told from text"
            )
        self._environment = CountedEnvironment(clock)
        self._template = _compiled(self._environment, source)
        self._variables: dict[str, Any] = {
            "tools": None,
            "documents": None,
            "eos_token": eos_token,
        }
        if bos_token is not None:
            self._variables["bos_token"] = bos_token
        # Besides the source itself: a constant may write a character as an escape.
        fixed_texts = (source, *self._environment.string_constants)
        self._control_tokens = ControlTokens(control_tokens, fixed_texts)
        self._own_words = _SCHEMA_WORDS | self._environment.string_constants
        self._calls_as_text = False
        self._try_out()

    @property
    def takes_tools(self) -> bool:
        """Whether the template reads the tools that it is given."""
        return not self._environment.names.isdisjoint(_TOOL_VARIABLES)

    @property
    def takes_tool_calls(self) -> bool:
        """Whether the template reads the calls of a message."""
        return "tool_calls" in self._environment.attributes | self._environment.string_constants

    def reads(self, variable: str) -> bool:
        """Whether the template reads a variable of this name."""
        return variable in self._environment.names

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool] = (),
        arguments: Mapping[str, JsonValue] | None = None,
        *,
        invites: bool = True,
    ) -> list[RenderedPart]:
        """The conversation, with an invitation for the model to answer at its end.

        `arguments` are variables of the template. Control tokens are those that the template
        writes; what is written like one in a client's text stays text, also across the border of
        two texts, and in JSON. The text is what the template makes of the texts as they are, with
        two exceptions: it does not find a control token that is written in one, and where a
        character that could begin one in a text would make it write more or fewer control tokens,
        it does not see that either. Unless it `invites`, there is no invitation at the end, but
        for templates that always write one.

        Raises InvalidRequest if the template refuses the messages, fails on them, cannot write
        tools or calls that are there, makes a control token of a name or an id, or passes the
        limits of work.
        """
        conversation = Conversation(messages, tools, arguments or {})
        self._require_support(conversation)
        texts, words = conversation.strings()
        tokens = self._control_tokens
        sentinel = tokens.sentinel_for(texts)

        def rendered(prose: _Change, word: _Change = _same) -> str:
            return self._rendered(conversation, ClientText(prose, word), sentinel, invites)

        def guard(text: str) -> str:
            return tokens.guarded(text, sentinel)

        plain = rendered(_same)
        guarded = rendered(guard)
        parts = tokens.parts(guarded, sentinel)
        if words:
            # A word is short and plain, and templates compare it and count its letters. Instead of
            # being guarded it is exchanged: what changes with it was made of it.
            turned = tokens.parts(rendered(guard, self._turned), sentinel)
            if places_of(turned) != places_of(parts):
                raise _refusal(
                    "chat", "the model's chat template makes a control token of a name or an id"
                )
        if guarded.replace(sentinel, "") != plain:
            # The template looked at something that the sentinels hide from it, such as a closing
            # mark of reasoning. It gets to see the texts with sentinels only where a control
            # token is written in full, unless that brings a control token more or less.
            light = rendered(lambda text: tokens.broken(text, sentinel))
            light_parts = tokens.parts(light, sentinel)
            if control_tokens_of(light_parts) == control_tokens_of(parts):
                parts = light_parts
        return parts

    def _turned(self, word: str) -> str:
        return word if word in self._own_words else word.translate(_TURNED)

    def _require_support(self, conversation: Conversation) -> None:
        if conversation.tools and not self.takes_tools:
            raise _refusal(
                "chat.tools", "the model's chat template cannot write tools; send none to it"
            )
        for place, message in enumerate(conversation.messages):
            if message.tool_calls and not self.takes_tool_calls:
                raise _refusal(
                    f"chat.messages[{place}].tool_calls",
                    "the model's chat template cannot write calls; write them into content",
                )

    def _rendered(
        self,
        conversation: Conversation,
        text: ClientText,
        sentinel: str | None = None,
        invites: bool = True,
    ) -> str:
        meter = WorkMeter(_limits_for(conversation))
        variables = {
            **self._variables,
            "add_generation_prompt": invites,
            **conversation.variables(text, calls_as_text=self._calls_as_text),
            METER_VARIABLE: meter,
            SENTINEL_VARIABLE: sentinel,
        }
        try:
            return "".join(_metered(self._template.generate(variables), meter))
        except TemplateRaisedError as raised:
            raise _refusal("chat.messages", self._reason_of(raised)) from None
        except (WorkLimitError, NotAllowedError) as error:
            raise _TemplateNotRunError(str(error)) from None
        except Exception as error:
            # Whatever a template runs into, its own text may hold contents: only the kind is told.
            kind = type(error).__name__
            raise _refusal(
                "chat.messages", f"the model's chat template fails on these messages ({kind})"
            ) from None

    def _reason_of(self, raised: TemplateRaisedError) -> str:
        refused = "the model's chat template refuses these messages"
        reason = raised.reason
        # A text that stands in the template is not a client's; any other may be made from one.
        if isinstance(reason, str) and reason in self._environment.string_constants:
            return f"{refused}: {_on_one_line(reason)}"
        return refused

    def _try_out(self) -> None:
        try:
            self._rendered(Conversation([ChatMessage("user", "a")]), _UNCHANGED)
        except _TemplateNotRunError as error:
            raise ModelRefused(f"tokenizer.chat_template {error.what}") from None
        except InvalidRequest:
            # Some templates want another conversation than this.
            pass
        if self.takes_tool_calls:
            self._calls_as_text = not self._calls_fit(False) and self._calls_fit(True)

    def _calls_fit(self, as_text: bool) -> bool:
        """Whether the template can write a call whose arguments are text, or are an object."""
        self._calls_as_text = as_text
        call = ToolCall("abcdefghi", "a", {"a": "a"})
        messages = [
            ChatMessage("user", "a"),
            ChatMessage("assistant", "", tool_calls=(call,)),
            ChatMessage("tool", "a", tool_call_id=call.id, name=call.name),
        ]
        try:
            self._rendered(Conversation(messages), _UNCHANGED)
        except InvalidRequest:
            return False
        return True


class _TemplateNotRunError(InvalidRequest):
    """The template passed a limit or did what it may not: no other messages would help."""

    def __init__(self, what: str) -> None:
        super().__init__(
            FieldViolation(
                "chat", f"the model's chat template {what}; send text or token ids instead"
            )
        )
        self.what = what


def _refusal(field: str, reason: str) -> InvalidRequest:
    return InvalidRequest(FieldViolation(field, reason))


def _on_one_line(text: str) -> str:
    printable = "".join(character if character.isprintable() else " " for character in text)
    return printable[:_QUOTED_REASON_MAX]


def _compiled(environment: CountedEnvironment, source: str) -> Template:
    try:
        return environment.from_string(source)
    except NotAllowedError as error:
        raise ModelRefused(f"tokenizer.chat_template {error}") from None
    except TemplateSyntaxError as error:
        reason = f"line {error.lineno}: {_on_one_line(error.message or '')}"
    except Exception as error:
        # A hostile template also gets here by depth (RecursionError) or by a huge numeral.
        reason = type(error).__name__
    raise ModelRefused(f"tokenizer.chat_template does not compile ({reason})")


def _limits_for(conversation: Conversation) -> WorkLimits:
    messages = min(conversation.parts, _COUNTED_MESSAGES_MAX)
    characters = _CHARACTERS_PER_JSON_CHARACTER * conversation.json_characters
    characters += sum(
        len(message.content) + len(message.reasoning) for message in conversation.messages
    )
    characters += sum(len(tool.description) for tool in conversation.tools)
    return WorkLimits(
        operations_max=_OPERATIONS_BASE + _OPERATIONS_PER_MESSAGE * messages,
        characters_max=_CHARACTERS_BASE
        + _CHARACTERS_PER_MESSAGE * messages
        + _CHARACTERS_PER_CONTENT_CHARACTER * characters,
        output_characters_max=_OUTPUT_BASE
        + _OUTPUT_PER_MESSAGE * messages
        + _OUTPUT_PER_CONTENT_CHARACTER * characters,
    )


def _metered(pieces: Iterator[str], meter: WorkMeter) -> Iterator[str]:
    for piece in pieces:
        meter.output(len(piece))
        yield piece
