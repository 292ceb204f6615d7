"""How far a machine reaches before a target is missed or memory ends, as floors say.

Floors are bounds from below, so what they rule out is out, and what they allow is the most that
could be hoped for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvledger.planning.capacity import Pool
from kvledger.planning.floors import StepCosts


@dataclass(frozen=True)
class Targets:
    """Seconds to the first token and for each further one; None for no target."""

    ttft: float | None = None
    tpot: float | None = None

    def missed(self, ttft: float, tpot: float) -> str | None:
        """The target that such times miss."""
        if self.tpot is not None and tpot > self.tpot:
            return "tpot"
        if self.ttft is not None and ttft > self.ttft:
            return "ttft"
        return None


@dataclass(frozen=True)
class Reach:
    """The largest value that can be, and what stops the next: "memory", "tpot", "ttft",
    "token budget" or "context window". 0 if not even the first can be."""

    most: int
    stopped_by: str


@dataclass(frozen=True)
class Reaching:
    """What reaches are asked about: costs of steps, a pool, targets, and tokens in a step."""

    costs: StepCosts
    pool: Pool
    targets: Targets
    token_budget: int

    def concurrency(self, prompt: int, output: int, context: int, fit: int) -> Reach:
        """Most sequences at a time.

        Each has a prompt of `prompt` tokens and, while it decodes, `context`; memory holds `fit`.
        """

        def stopped(sequences: int) -> str | None:
            if sequences > fit:
                return "memory"
            if sequences > self.token_budget:
                return "token budget"
            return self._missed(sequences, prompt, output, context)

        return _largest(stopped, 1, max(fit, 1))

    def context(self, sequences: int, output: int) -> Reach:
        """Most tokens that each of some sequences can have, the last `output` of them made."""

        def stopped(tokens: int) -> str | None:
            if tokens > self.pool.context_tokens:
                return "context window"
            if tokens > self.pool.longest(sequences):
                return "memory"
            return self._missed(sequences, max(1, tokens - output), output, tokens)

        return _largest(stopped, 2, self.pool.context_tokens)

    def _missed(self, sequences: int, prompt: int, output: int, context: int) -> str | None:
        first = self.costs.prefill(prompt, self.token_budget, sequences - 1, context)
        step = self.costs.decode(sequences, context).seconds if output > 1 else 0.0
        return self.targets.missed(first.seconds, step)


def _largest(stopped: Callable[[int], str | None], least: int, most: int) -> Reach:
    """The largest number from `least` to `most` that nothing stops; what is stopped stays so."""
    if (why := stopped(least)) is not None:
        return Reach(0, why)
    good, bad = least, most + 1
    while bad - good > 1:
        middle = (good + bad) // 2
        if stopped(middle) is None:
            good = middle
        else:
            bad = middle
    why = stopped(bad)
    assert why is not None, "a limit lies above what may be asked for"
    return Reach(good, why)
