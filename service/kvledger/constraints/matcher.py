"""A constraint made ready, and what it leaves to one sequence, token after token.

llguidance's own copies of a matcher share its lexer: what breaks one breaks all. So a `Constraint`
is made anew for each request, never kept for the next, and its states are one request's alone.
"""

from __future__ import annotations

import json
import re
import time

import llguidance
import numpy as np
import numpy.typing as npt

from kvledger.constraints.refusal import ConstraintRefused
from kvledger.constraints.source import ConstraintSource, lark_of
from kvledger.errors import ConstraintDeadEnd, ConstraintTooCostly, InvalidRequest

# What one grammar may cost, counted by llguidance in numbers that depend on the grammar and the
# tokens alone: the first two bound compiling, the next three a step (some milliseconds), the last
# memory, at about 1.2 kB a state.
_LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=500_000,
    max_grammar_size=200_000,
    max_items_in_row=1000,
    step_lexer_fuel=100_000,
    step_max_items=25_000,
    max_lexer_states=20_000,
    verbose_errors=False,  # they would quote the grammar and the output
)

# What the masks of one sequence may take of the engine's thread, in seconds of its processor: so
# much at once, and so much more with each token. Ordinary grammars take a twentieth of it.
_AT_ONCE_SECONDS = 0.5
_TOKEN_SECONDS = 0.004

# How llguidance's errors begin where no token is left, and where a limit of _LIMITS is met.
_DEAD_END = "NoExtension"
_LIMITS_MET = ("lexer error: ", "parser error: ")

# Ends of a matcher that is done, as opposed to one that met a limit.
_DONE = ("NoExtension", "NoExtensionBias", "EndOfSentence")


class ConstraintBroken(Exception):
    """The library failed, or a token came that its mask ruled out. The message quotes nothing."""


class ConstraintState:
    """What one sequence has of its constraint: all that it has said so far.

    A constraint that leads nowhere, or takes too much, leaves no token from there on, and says why
    in `Constraint.broken`.
    """

    def __init__(self, matcher: llguidance.LLMatcher, constraint: Constraint) -> None:
        self._matcher = matcher
        self._constraint = constraint
        self._seconds_left = _AT_ONCE_SECONDS
        self._tokens = 0
        self._is_lost = False

    def fill(self, words: npt.NDArray[np.int32]) -> None:
        """Writes which tokens may come next: int32 [vocabulary / 32, rounded up], a bit a token,
        the lowest first. What may come stays as it is. Raises ConstraintBroken."""
        if not self._is_lost:
            started = time.thread_time()
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            self._check()
            self._seconds_left -= time.thread_time() - started
            if self._seconds_left < 0.0:
                self._lose(ConstraintTooCostly)
        if self._is_lost:
            # The library's own mask says that the text may end here, as if it were complete.
            words[:] = 0

    def learn(self, token: int) -> None:
        """Takes in the token that came. Raises ConstraintBroken if it may not come here."""
        self._tokens += 1
        self._seconds_left = min(_AT_ONCE_SECONDS, self._seconds_left + _TOKEN_SECONDS)
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        error = self._matcher.get_error() if self._matcher.is_error() else ""
        if error.startswith(_DEAD_END):
            self._lose(ConstraintDeadEnd)
        elif error.startswith(_LIMITS_MET):
            self._lose(ConstraintTooCostly)
        elif error:
            raise ConstraintBroken("the grammar does not admit a token, or the library failed")
        elif self._matcher.is_stopped() and self._matcher.stop_reason() not in _DONE:
            self._lose(ConstraintTooCostly)

    def _lose(self, why: type[ConstraintDeadEnd] | type[ConstraintTooCostly]) -> None:
        self._is_lost = True
        self._constraint.note_loss(why, self._tokens)


class Constraint:
    """A compiled constraint; nothing changes the grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, field: str) -> None:
        """`field` is its path in a request."""
        self._matcher = matcher
        self._field = field
        self._loss: tuple[type[ConstraintDeadEnd] | type[ConstraintTooCostly], int] | None = None

    @property
    def broken(self) -> InvalidRequest | None:
        """Why a sequence of its request has no token left, the first one that had none.

        Made anew each time: an exception that was raised leads to all that its raiser knew, and
        kept here it would keep the grammar's memory.
        """
        if self._loss is None:
            return None
        why, tokens = self._loss
        return why(self._field, tokens)

    def note_loss(
        self, why: type[ConstraintDeadEnd] | type[ConstraintTooCostly], tokens: int
    ) -> None:
        """Learns that a sequence has no token left; called by the thread that fills masks."""
        if self._loss is None:
            self._loss = why, tokens

    def start(self) -> ConstraintState:
        """The state of a sequence that has said nothing yet."""
        return ConstraintState(self._matcher.deep_copy(), self)


def compile_constraint(tokenizer: llguidance.LLTokenizer, source: ConstraintSource) -> Constraint:
    """Compiles a constraint, up to what it leaves at the beginning, without the GIL.

    Raises ConstraintRefused. Some sources end the process, or keep it busy: only one that another
    process has compiled may be compiled in a server's.
    """
    grammar = json.dumps({"grammars": [{"lark_grammar": lark_of(source)}]})
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
    if matcher.is_error():
        raise ConstraintRefused(_sentence(source, matcher.get_error()))
    words = np.zeros((tokenizer.vocab_size + 31) // 32, dtype=np.int32)
    tried = matcher.deep_copy()
    tried.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
    if tried.get_error().startswith(_DEAD_END):
        raise ConstraintRefused("leaves no token that an answer could begin with")
    if tried.is_error():
        raise ConstraintRefused(_TOO_COMPLEX)
    return Constraint(matcher, source.field)


# Where an error goes on with what the client wrote: the grammar, line by line, or a value.
_QUOTES = re.compile(r"\n\s*1 \| %llguidance |(?:Invalid type|Unknown format): |segment '|, got ")

_TOO_COMPLEX = "is too complex; make it smaller, or bound fewer things in it"


def _sentence(source: ConstraintSource, error: str) -> str:
    """What to change, from an error of llguidance; it quotes the client, this does not."""
    if "JSON schema: Unknown format: " in error:
        return "uses a format that is not supported"
    error = _QUOTES.split(error, maxsplit=1)[0]
    if re.search(r"fuel|too (?:big|large|many|complex)|[Ll]imit|exceed", error):
        return _TOO_COMPLEX
    if source.kind == "regex":
        return (
            "is not a regular expression, or uses what is not supported, such as look-around or "
            "back-references"
        )
    if source.kind == "lark_grammar":
        place = re.match(r"(\d+)\((\d+)\): ", error)
        where = f", see line {int(place[1]) - 1}, column {place[2]}" if place else ""
        return f"is not a grammar in llguidance's variant of Lark{where}"
    if "Unsatisfiable" in error:
        return "is a schema that nothing matches"
    if "oneOf constraints are not supported" in error:
        return "uses oneOf in a way that is not supported: more than one branch may match"
    return "is not a JSON schema, or uses a reference that is not supported"
