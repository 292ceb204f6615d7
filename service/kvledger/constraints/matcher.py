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

from kvledger.constraints.source import (
    ConstraintRefused,
    ConstraintSource,
    lark_of,
    unsupported_keywords,
)

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

# Ends of a matcher that is done, as opposed to one that met a limit.
_DONE = ("NoExtension", "NoExtensionBias", "EndOfSentence")


class ConstraintBroken(Exception):
    """A sequence cannot go on under its constraint. The message quotes nothing."""


class ConstraintState:
    """What one sequence has of its constraint: all that it has said so far."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher
        self._seconds_left = _AT_ONCE_SECONDS

    def fill(self, words: npt.NDArray[np.int32]) -> None:
        """Writes which tokens may come next: int32 [vocabulary / 32, rounded up], a bit a token,
        the lowest first. What may come stays as it is. Raises ConstraintBroken."""
        started = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        # With an error the library says that the text may end here, which would be taken for one
        # that is complete.
        self._check()
        self._seconds_left -= time.thread_time() - started
        if self._seconds_left < 0.0:
            raise ConstraintBroken("its masks take too long")

    def learn(self, token: int) -> None:
        """Takes in the token that came. Raises ConstraintBroken if it may not come here."""
        self._seconds_left = min(_AT_ONCE_SECONDS, self._seconds_left + _TOKEN_SECONDS)
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConstraintBroken("the grammar met a limit, or a token that it does not admit")
        if self._matcher.is_stopped() and self._matcher.stop_reason() not in _DONE:
            raise ConstraintBroken("the grammar met a limit")


class Constraint:
    """A compiled constraint; nothing changes it."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    def start(self) -> ConstraintState:
        """The state of a sequence that has said nothing yet."""
        return ConstraintState(self._matcher.deep_copy())


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
    if "NoExtension" in tried.get_error():
        raise ConstraintRefused("leaves no token that an answer could begin with")
    if tried.is_error():
        raise ConstraintRefused(_TOO_COMPLEX)
    return Constraint(matcher)


_TOO_COMPLEX = "is too complex; make it smaller, or bound fewer things in it"


def _sentence(source: ConstraintSource, error: str) -> str:
    """What to change, from an error of llguidance; it quotes the client, this does not."""
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
    if found := unsupported_keywords(source):
        return f"uses {', '.join(found)} in a way that is not supported"
    return "is not a JSON schema, or uses a format or a reference that is not supported"
