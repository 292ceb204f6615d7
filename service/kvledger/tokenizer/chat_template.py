"""Renders a conversation with the model's chat template; contents never make control tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, NamedTuple, get_args

from jinja2 import Template, TemplateSyntaxError

from kvledger.errors import FieldViolation, InvalidRequest, ModelRefused
from kvledger.tokenizer.template_environment import CountedEnvironment, TemplateRaisedError
from kvledger.tokenizer.template_work import (
    METER_VARIABLE,
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
# Templates that build a list message by message take work in proportion to the square.
_COUNTED_MESSAGES_MAX = 1_024
_OUTPUT_BASE = 1_000_000
_OUTPUT_PER_MESSAGE = 1_024
_OUTPUT_PER_CONTENT_CHARACTER = 2

_QUOTED_REASON_MAX = 200

Role = Literal["system", "user", "assistant"]
_ROLES = frozenset(get_args(Role))


@dataclass(frozen=True)
class ChatMessage:
    """One message of a conversation. ValueError for another role: templates write it as it is,
    so it must not come from a client's string."""

    role: Role
    content: str

    def __post_init__(self) -> None:
        if self.role not in _ROLES:
            raise ValueError(f"a message's role is one of {sorted(_ROLES)}")


class RenderedPart(NamedTuple):
    """A run of the rendered conversation: either text, or one control token as it is written."""

    text: str
    is_control_token: bool


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
            "add_generation_prompt": True,
            "tools": None,
            "documents": None,
            "eos_token": eos_token,
        }
        if bos_token is not None:
            self._variables["bos_token"] = bos_token
        # Besides the source itself: a constant may write a character as an escape.
        fixed_texts = (source, *self._environment.string_constants)
        self._control_tokens = _ControlTokens(control_tokens, fixed_texts)
        self._try_out()

    def render(self, messages: Sequence[ChatMessage]) -> list[RenderedPart]:
        """The conversation, with an invitation for the model to answer at its end.

        Control tokens are those that the template writes; what is written like one in a content
        stays text, also across the border of two contents. The text is what the template makes of
        the contents as they are, with two exceptions: it does not find a control token that is
        written in a content, and where a character that could begin one in a content would make
        it write more or fewer control tokens, it does not see that either.

        Raises InvalidRequest if the template refuses the messages, fails on them, or passes the
        limits of work.
        """
        contents = [message.content for message in messages]
        roles = [message.role for message in messages]
        tokens = self._control_tokens
        sentinel = tokens.sentinel_for(contents)
        plain = self._rendered(roles, contents)
        guarded = self._rendered(roles, [tokens.guarded(text, sentinel) for text in contents])
        parts = tokens.parts(guarded, sentinel)
        if guarded.replace(sentinel, "") != plain:
            # The template looked at something that the sentinels hide from it, such as a closing
            # mark of reasoning. It gets to see the contents with sentinels only where a control
            # token is written in full, unless that brings a control token more or less.
            light = self._rendered(roles, [tokens.broken(text, sentinel) for text in contents])
            light_parts = tokens.parts(light, sentinel)
            if _control_tokens_of(light_parts) == _control_tokens_of(parts):
                parts = light_parts
        return parts

    def _rendered(self, roles: Sequence[Role], contents: Sequence[str]) -> str:
        meter = WorkMeter(_limits_for(contents))
        variables = {
            **self._variables,
            "messages": [
                {"role": role, "content": content}
                for role, content in zip(roles, contents, strict=True)
            ],
            METER_VARIABLE: meter,
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
            self._rendered(["user"], ["a"])
        except _TemplateNotRunError as error:
            raise ModelRefused(f"tokenizer.chat_template {error.what}") from None
        except InvalidRequest:
            # Some templates want another conversation than this.
            pass


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


def _limits_for(contents: Sequence[str]) -> WorkLimits:
    messages = min(len(contents), _COUNTED_MESSAGES_MAX)
    characters = sum(map(len, contents))
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


def _control_tokens_of(parts: Sequence[RenderedPart]) -> list[str]:
    return [part.text for part in parts if part.is_control_token]


def _private_characters() -> Iterator[str]:
    # Noncharacters first, which no text may use for itself, then the private areas. None of them
    # is white space or has a case, so they pass through trimming and lower-casing.
    for first, last in (
        (0xFDD0, 0xFDEF),
        (0xE000, 0xF8FF),
        (0xF0000, 0xFFFFD),
        (0x100000, 0x10FFFD),
    ):
        yield from map(chr, range(first, last + 1))


class _ControlTokens:
    """Finds the control tokens that a template wrote, among contents that may look like them.

    A sentinel, a character that occurs nowhere else, is put into the contents before they are
    rendered and taken out after the rendered text is split at the control tokens. A control token
    with a sentinel inside is not one.
    """

    def __init__(self, control_tokens: Collection[str], fixed_texts: Collection[str]) -> None:
        """`fixed_texts` are what the template writes without being given it."""
        # Where several match, the longest is meant.
        tokens = sorted(control_tokens, key=len, reverse=True)
        self._first_characters = sorted({token[0] for token in tokens})
        # An empty alternative list must match nothing.
        self._written = re.compile(f"({'|'.join(map(re.escape, tokens)) or '(?!)'})")
        self._beginning = re.compile(
            "|".join(f"{re.escape(token[0])}(?={re.escape(token[1:])})" for token in tokens)
            or "(?!)"
        )
        self._fixed_characters = frozenset[str]().union(*tokens, *fixed_texts)

    def sentinel_for(self, contents: Sequence[str]) -> str:
        """A character that occurs in no content, in no control token and not in the template."""
        used = self._fixed_characters
        for character in _private_characters():
            if character in used:
                continue
            if not any(character in content for content in contents):
                return character
            # Somebody uses private characters: look at all of them together, once.
            used = used.union(*contents)
        raise _refusal("chat.messages", "the contents use every private character of Unicode")

    def guarded(self, content: str, sentinel: str) -> str:
        """`content` with a sentinel wherever a control token might begin or go on.

        After each character that begins a control token, so that none can begin in the content;
        and before the first visible character, so that none that began before can go on into it.
        """
        visible = content.lstrip()
        if not visible:
            return content
        blank = content[: len(content) - len(visible)]
        for character in self._first_characters:
            visible = visible.replace(character, character + sentinel)
        return blank + sentinel + visible

    def broken(self, content: str, sentinel: str) -> str:
        """`content` with a sentinel in each control token that is written in full."""
        return self._beginning.sub(lambda match: match[0] + sentinel, content)

    def parts(self, rendered: str, sentinel: str) -> list[RenderedPart]:
        """Splits the rendered text at its control tokens and takes the sentinels out."""
        # Splitting at a group gives texts at even places and control tokens at odd ones.
        split = self._written.split(rendered)
        return [
            RenderedPart(text.replace(sentinel, ""), place % 2 == 1)
            for place, text in enumerate(split)
            if text
        ]
