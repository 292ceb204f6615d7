"""A model without weights: what follows a token is known, so is every text."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from kvledger import _core

VOCABULARY = 261  # of the tiny model, whose first 256 ids are bytes
END_OF_TEXT = 257
# How long a test's thread waits for what must come, in seconds.
PATIENCE = 20.0


def alphabet() -> npt.NDArray[np.int64]:
    """What follows each id: letters in their order, then from the start.

    "!" ends the text; "#" begins an emoji of four bytes; every other id is followed by an "a".
    """
    following = np.full(VOCABULARY, ord("a"), dtype=np.int64)
    following[ord("a") : ord("z")] = np.arange(ord("b"), ord("z") + 1)
    following[ord("!")] = END_OF_TEXT
    smile = [ord("#"), *"🙂".encode()]
    following[smile[:-1]] = smile[1:]
    return following


class Gate:
    """Lets steps through one by one, so that a test knows in which step things happen."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._allowed = 0
        self.arrived = 0  # steps that came to the gate
        self._open = False

    def wait(self) -> None:
        """Called in each step, by the engine's thread."""
        with self._condition:
            self.arrived += 1
            self._condition.notify_all()
            assert self._condition.wait_for(lambda: self._open or self._allowed > 0, PATIENCE), (
                "nobody let the step through"
            )
            self._allowed -= 0 if self._open else 1

    def let(self, steps: int) -> None:
        """Lets so many steps through."""
        with self._condition:
            self._allowed += steps
            self._condition.notify_all()

    def open(self) -> None:
        """Lets everything through from now on."""
        with self._condition:
            self._open = True
            self._condition.notify_all()

    def wait_for_arrival(self, count: int) -> None:
        """Waits until so many steps have come to the gate."""
        with self._condition:
            assert self._condition.wait_for(lambda: self.arrived >= count, PATIENCE)


class ScriptedModel:
    """See Llama.forward. `before_step` runs in the engine's thread and may wait or raise."""

    def __init__(self, vocabulary: int = VOCABULARY) -> None:
        self.following = alphabet()
        self.vocabulary = vocabulary
        self.workspace_bytes = 0
        self._tokens = np.empty(0, dtype=np.int32)  # of the last step
        self.before_step: Callable[[_core.Plan], None] = lambda plan: None
        self.after_step: Callable[[torch.Tensor, _core.Plan], None] = lambda logits, plan: None

    def forward(self, plan: _core.Plan, beat: Callable[[], None] = lambda: None) -> torch.Tensor:
        self.before_step(plan)
        beat()
        self._tokens = plan.token_ids.copy()
        logits = self.score(plan.logit_tokens.astype(np.int64))
        self.after_step(logits, plan)
        return logits

    def score(self, tokens: npt.NDArray[np.int64]) -> torch.Tensor:
        """See Llama.score."""
        logits = torch.zeros(len(tokens), self.vocabulary)
        following = torch.from_numpy(self.following[self._tokens[tokens]])
        logits[np.arange(len(tokens)), following] = 20.0
        return logits


def expected(prompt: str, tokens: int) -> str:
    """The text of so many tokens after a prompt of the model with `alphabet`, no end in it."""
    following, last, out = alphabet(), prompt.encode()[-1], []
    for _ in range(tokens):
        last = int(following[last])
        out.append(last)
    return bytes(out).decode()
