"""How a model writes reasoning and tool calls, found out from its own chat template.

A template says to the model how to write a call, and writes earlier calls the same way. So the
marks that stand in it are those that the model's answers have.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class CallSyntax(enum.Enum):
    """A way of writing tool calls; the value is its name in the contract."""

    # <tool_call>{"name": ..., "arguments": {...}}</tool_call>, as Hermes, Qwen and SmolLM3 do.
    TAGGED_JSON = "tagged_json"
    # {"name": ..., "parameters": {...}} as the whole answer, or after <|python_tag|>, as Llama 3.
    BARE_JSON = "bare_json"
    # [TOOL_CALLS] [{"name": ..., "arguments": {...}}] or [TOOL_CALLS]name{...}, as Mistral.
    MARKED = "marked"


CALL_OPENS = "<tool_call>"
CALL_CLOSES = "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
CALLS_FOLLOW = "[TOOL_CALLS]"
CALL_ID_FOLLOWS = "[CALL_ID]"
ARGUMENTS_FOLLOW = "[ARGS]"

_CALL_MARKS = {
    CallSyntax.TAGGED_JSON: (CALL_OPENS, CALL_CLOSES),
    CallSyntax.BARE_JSON: (PYTHON_TAG,),
    CallSyntax.MARKED: (CALLS_FOLLOW, CALL_ID_FOLLOWS, ARGUMENTS_FOLLOW),
}
_REASONING_MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


@dataclass(frozen=True)
class ChatSyntax:
    """What of a model's answers can be told apart; nothing where its template has no known mark."""

    calls: CallSyntax | None = None
    # What opens and what closes reasoning.
    reasoning: tuple[str, str] | None = None

    @classmethod
    def of(cls, template: str | None) -> ChatSyntax:
        """The syntax that a chat template goes by, from its source; None is no template."""
        if template is None:
            return cls()
        return cls(
            calls=_calls_of(template),
            reasoning=next((marks for marks in _REASONING_MARKS if marks[1] in template), None),
        )

    @property
    def marks(self) -> frozenset[str]:
        """Every mark; in some vocabularies one is a control token, which has no text."""
        calls = () if self.calls is None else _CALL_MARKS[self.calls]
        return frozenset((*calls, *(self.reasoning or ())))

    def reasons_after(self, prompt: str) -> bool:
        """Whether an answer begins inside reasoning: the prompt, control tokens written out, ends
        with the mark that opens it, as some templates write it."""
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning[0])


def _calls_of(template: str) -> CallSyntax | None:
    if CALLS_FOLLOW in template:
        return CallSyntax.MARKED
    if CALL_OPENS in template:
        # The same tags with <function=name> in them are another language.
        return None if "<function=" in template else CallSyntax.TAGGED_JSON
    if PYTHON_TAG in template or ("ipython" in template and '"parameters"' in template):
        return CallSyntax.BARE_JSON
    return None
