"""What the engine is asked to compute, and why it stops."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from kvledger.sampling import SamplingParameters
from kvledger.scopes import NO_REUSE, PrefixScopes


class EndReason(IntEnum):
    """Why a sequence ended; as in core/sequence.h."""

    STOP = 1
    LENGTH = 2
    CONTEXT = 3
    CANCELLED = 4
    FAILED = 5


@dataclass(frozen=True)
class Job:
    """A request to compute: one sequence for each of its samples.

    `prompt` is int32 [tokens]; `arrived_at` is time.monotonic_ns() when the request came in;
    `sequence` and the numbers of the other samples, which follow it, are never used twice.
    """

    sequence: int
    tenant: int
    prompt: npt.NDArray[np.int32]
    arrived_at: int
    max_tokens: int
    sampling: SamplingParameters
    priority: int = 0
    ignore_eos: bool = False
    # Tokens that end it, besides those that end every text.
    stop_ids: frozenset[int] = frozenset()
    samples: int = 1
    # How many of the likeliest tokens to tell with each token of the prompt; None tells nothing.
    prompt_logprobs: int | None = None
    # Whose cached prefixes it may begin with, and where its own are kept.
    scopes: PrefixScopes = NO_REUSE
    # Nanoseconds of the longest step while it decodes; 0 is the server's target.
    step_time_max: int = 0

    @property
    def sequences(self) -> range:
        """The numbers of all its samples."""
        return range(self.sequence, self.sequence + self.samples)

    def without(self, ended: Collection[int]) -> Job:
        """The same where these scopes have ended."""
        scopes = self.scopes.without(ended)
        return self if scopes is self.scopes else replace(self, scopes=scopes)
