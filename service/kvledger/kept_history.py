"""Whether a chat template writes earlier turns as they were computed: what the next turn can reuse.

The blocks of a turn hold its prompt and the tokens of its answer. The next turn's prompt is made
anew by the template, from the text that the client was sent. Where a template then drops earlier
reasoning, trims blanks, or moves the system message or the tools, the tokens differ, and from the
first one that does nothing is found again. Short conversations of the server's own show where.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvledger.chat_output import ChatOutput, ChatSyntax
from kvledger.errors import InvalidRequest
from kvledger.scopes.public_prefixes import common_tokens
from kvledger.tokenizer import ChatMessage, OutputText, Piece, TokenIds, Tokenizer, Tool

# Turns that are followed by another one.
_TURNS = 2
# How many tokens of each side are told from where they differ.
_SHOWN = 4

# No two begin alike, or a place would be named that is behind the one where they part.
_SYSTEM = "Use one word."
_QUESTIONS = ("What is two and two?", "And three and three?", "Now four and four?")
_ANSWERS = ("Four", "Six")
_THOUGHTS = ("A pair of pairs.", "Three more than three.")
_TOOLS = (
    Tool(
        "add",
        "Adds two numbers.",
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    ),
)


@dataclass(frozen=True)
class KeptTurn:
    """One turn that was tried, and the prompt of the turn after it."""

    # What kind of conversation: a key of docs/reuse.md.
    conversation: str
    turn: int  # from 1
    # Prompt and answer as they were computed, and the next prompt; int32 [tokens].
    computed: TokenIds = field(repr=False)
    followed: TokenIds = field(repr=False)

    @property
    def tokens(self) -> int:
        """Of the turn: prompt and answer, without the token that ends it, which is not computed."""
        return len(self.computed)

    @property
    def kept(self) -> int:
        """How many of them the next prompt begins with: the place of the first that differs."""
        return common_tokens(self.computed, self.followed)

    @property
    def lost(self) -> int:
        """How many have to be computed again, as whatever the template writes there now."""
        return self.tokens - self.kept

    @property
    def computed_ids(self) -> list[int]:
        """A few ids from the first that differs on, as they were computed; none if all is kept."""
        return _from(self.computed, self.kept) if self.lost else []

    @property
    def written_ids(self) -> list[int]:
        """The same of what the template writes there in the next prompt."""
        return _from(self.followed, self.kept) if self.lost else []

    def sentence(self, tokenizer: Tokenizer) -> str:
        """What is lost, for a person. The texts in it are the template's and this module's own."""

        def told(ids: Sequence[int]) -> str:
            texts = (tokenizer.decode([each], with_control_tokens=True) for each in ids)
            return " ".join(f"{each} {text!r}" for each, text in zip(ids, texts, strict=True))

        return (
            f"of the {self.tokens} tokens of turn {self.turn} the next one begins with "
            f"{self.kept}; then it has {told(self.written_ids)}, where "
            f"{told(self.computed_ids)} was computed"
        )


def _from(ids: TokenIds, start: int) -> list[int]:
    return [int(each) for each in ids[start : start + _SHOWN]]


@dataclass(frozen=True)
class _Kind:
    """A kind of conversation."""

    name: str
    system: bool = False
    tools: tuple[Tool, ...] = ()
    # Around each answer.
    blanks: tuple[str, str] = ("", "")
    # Whether the model reasons, and whether the client sends that back.
    reasons: bool = False
    returns_reasoning: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)


def kept_turns(tokenizer: Tokenizer) -> tuple[KeptTurn, ...]:
    """Every kind of conversation that the model's template takes, turn by turn.

    Nothing where there is no template. A kind that the template refuses is left out.
    """
    if tokenizer.chat_template is None:
        return ()
    syntax = ChatSyntax.of(tokenizer.chat_template_source)
    found: list[KeptTurn] = []
    for kind in _kinds(tokenizer, syntax):
        # RuntimeError: the vocabulary's rules fail on a text, as they would on a client's.
        with contextlib.suppress(InvalidRequest, RuntimeError):
            found += _Conversation(tokenizer, syntax, kind).turns()
    return tuple(found)


def first_losses(turns: Sequence[KeptTurn]) -> list[KeptTurn]:
    """The first turn of each kind of conversation that the next turn does not wholly begin with."""
    first: dict[str, KeptTurn] = {}
    for turn in turns:
        if turn.lost:
            first.setdefault(turn.conversation, turn)
    return list(first.values())


def told_history(turns: Sequence[KeptTurn], tokenizer: Tokenizer) -> tuple[str, ...]:
    """What `kept_turns` found, for a person; nothing if the model has no chat template."""
    if not tokenizer.has_chat_template:
        return ()
    losses = {turn.conversation: turn for turn in first_losses(turns)}
    kept = [kind for kind in dict.fromkeys(t.conversation for t in turns) if kind not in losses]
    told = [f"{kind}: {turn.sentence(tokenizer)}" for kind, turn in losses.items()]
    if kept:
        told.insert(0, f"{', '.join(kept)}: the next turn begins with all that was computed")
    if not told:
        told = ["the chat template takes none of the conversations that it was tried with"]
    return tuple(told)


def _kinds(tokenizer: Tokenizer, syntax: ChatSyntax) -> list[_Kind]:
    template = tokenizer.chat_template
    assert template is not None
    kinds = [
        _Kind("text"),
        _Kind("system", system=True),
        _Kind("blanks", blanks=(" ", "\n")),
    ]
    if template.takes_tools:
        kinds.append(_Kind("tools", tools=_TOOLS))
    if syntax.reasoning is not None:
        kinds += [
            _Kind("reasoning", reasons=True),
            _Kind("reasoning_returned", reasons=True, returns_reasoning=True),
        ]
    if template.reads("enable_thinking"):
        kinds.append(_Kind("thinking_off", arguments={"enable_thinking": False}))
    return kinds


class _Conversation:
    """One conversation as a client has it that is sent answers in parts and sends them back."""

    def __init__(self, tokenizer: Tokenizer, syntax: ChatSyntax, kind: _Kind) -> None:
        self._tokenizer = tokenizer
        self._syntax = syntax
        self._kind = kind
        self._messages = [ChatMessage("system", _SYSTEM)] if kind.system else []

    def turns(self) -> list[KeptTurn]:
        """Raises InvalidRequest if the template refuses it."""
        found: list[KeptTurn] = []
        before: TokenIds | None = None
        for turn, question in enumerate(_QUESTIONS[: _TURNS + 1]):
            self._messages.append(ChatMessage("user", question))
            prompt = self._encoded(self._messages)
            if before is not None:
                found.append(KeptTurn(self._kind.name, turn, before, prompt))
            if turn < _TURNS:
                answer = self._answer(prompt, turn)
                self._messages.append(self._sent_back(prompt, answer))
                before = np.concatenate([prompt, answer])
        return found

    def _answer(self, prompt: TokenIds, turn: int) -> TokenIds:
        """The ids of an answer as a model of this template would write it."""
        written = self._text(prompt)
        before, after = self._kind.blanks
        content = before + _ANSWERS[turn] + after
        reasons = self._kind.reasons or self._syntax.reasons_after(written)
        text = self._as_template_writes(written, content, _THOUGHTS[turn] if reasons else "")
        if text is None:
            text = content
            if reasons and self._syntax.reasoning is not None:
                opens, closes = self._syntax.reasoning
                begun = self._syntax.reasons_after(written)
                text = f"{'' if begun else opens}\n{_THOUGHTS[turn]}\n{closes}\n\n{content}"
        return self._tokenizer.encode_answer(text, self._syntax.marks)

    def _as_template_writes(self, prompt: str, content: str, thoughts: str) -> str | None:
        """The answer in the template's own writing, which the model has learnt from.

        None if that does not begin where the prompt ends, or has something else before it.
        """
        message = ChatMessage("assistant", content, reasoning=thoughts)
        try:
            told = self._text(self._encoded([*self._messages, message], invites=False))
        except InvalidRequest:
            return None
        if not told.startswith(prompt):
            return None
        before, found, _ = told[len(prompt) :].partition(content)
        is_right = thoughts in before if thoughts else not before.strip()
        return before + content if found and is_right else None

    def _sent_back(self, prompt: TokenIds, answer: TokenIds) -> ChatMessage:
        names = [tool.name for tool in self._kind.tools]
        output = ChatOutput.of(
            OutputText(self._tokenizer), self._syntax, names, prompt, self._tokenizer
        )
        piece = Piece.joined([output.feed(answer.tolist()), output.finish()])
        reasoning = piece.reasoning if self._kind.returns_reasoning else ""
        return ChatMessage("assistant", piece.text, reasoning=reasoning)

    def _encoded(self, messages: list[ChatMessage], *, invites: bool = True) -> TokenIds:
        return self._tokenizer.encode_chat(
            messages, self._kind.tools, self._kind.arguments, invites=invites
        )

    def _text(self, ids: TokenIds) -> str:
        return self._tokenizer.decode(ids, with_control_tokens=True)
