"""Log-probabilities of prompts, gathered while their chunks are computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvledger import _core
from kvledger.logprobs import PromptLogprobs, prompt_logprobs

# Tokens whose logits are looked at together: a row is as long as the vocabulary.
_ROWS = 32

Score = Callable[[npt.NDArray[np.int64]], torch.Tensor]


@dataclass
class _Asked:
    prompt: npt.NDArray[np.int32]
    count: int
    # The first token that was not told yet; a chunk that is computed again is not told again.
    next: int = 1


class PromptScores:
    """Requests that want their prompts' log-probabilities. One thread at a time."""

    def __init__(self) -> None:
        # By request; empty in most steps, which look at it without a call.
        self.asked: dict[int, _Asked] = {}

    def ask(self, request: int, prompt: npt.NDArray[np.int32], count: int) -> None:
        """Begins to tell, with `count` of the likeliest tokens in each place."""
        if len(prompt) > 1:
            self.asked[request] = _Asked(prompt, count)

    def forget(self, request: int) -> None:
        """Tells nothing more of a request that has ended."""
        self.asked.pop(request, None)

    def of_step(
        self,
        plan: _core.Plan,
        request_of_row: Callable[[int], int],
        score: Score,
        fail: Callable[[int], None],
    ) -> dict[int, list[PromptLogprobs]]:
        """What the step just computed says about prompts, by request.

        `score` gives logits after tokens of the plan. A request whose log-probabilities cannot be
        computed is told to `fail` and forgotten.
        """
        told: dict[int, list[PromptLogprobs]] = {}
        for index, row in enumerate(plan.rows.tolist()):
            request = request_of_row(row)
            asked = self.asked.get(request)
            if asked is None:
                continue
            first, last = plan.query_start[index : index + 2].tolist()
            try:
                pieces = _pieces(asked, first, last, int(plan.positions[first]), score)
            except Exception:
                self.forget(request)
                fail(request)
                continue
            if pieces:
                told.setdefault(request, []).extend(pieces)
            if asked.next == len(asked.prompt):
                self.forget(request)
        return told


def _pieces(
    asked: _Asked, first: int, last: int, position: int, score: Score
) -> list[PromptLogprobs]:
    """Of the tokens `first` to `last` of a plan; `position` is the first one's."""
    pieces = []
    # The logits after a token are about the one that follows it.
    begin = max(asked.next, position + 1)
    end = min(len(asked.prompt), position + 1 + last - first)
    for start in range(begin, end, _ROWS):
        places = np.arange(start, min(start + _ROWS, end), dtype=np.int64)
        logits = score(places - 1 - position + first).numpy()
        pieces.append(prompt_logprobs(logits, asked.prompt, start, asked.count))
    asked.next = max(asked.next, end)
    return pieces
