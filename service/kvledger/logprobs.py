"""Log-probabilities of chosen tokens and of the likeliest others, as the model itself has them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class TokenLogprobs:
    """How likely a token was, and others in its place; see TokenLogprobs in the contract."""

    token: int
    logprob: float
    # (token, log-probability), the likeliest first.
    top: tuple[tuple[int, float], ...] = ()


def token_logprobs(logits: npt.NDArray[np.float32], token: int, count: int) -> TokenLogprobs:
    """Of one row of logits, float32 [vocabulary], whose largest is finite.

    Sums in float64 and looks at this row alone, so the numbers do not depend on the batch.
    """
    highest = float(logits.max())
    # Less the largest first: next to a huge logit the sum's logarithm would be rounded away.
    total = float(np.log(np.exp(logits.astype(np.float64) - highest).sum()))
    likeliest: list[int] = []
    if count:
        least = np.partition(logits, -count)[-count] if count < len(logits) else -np.inf
        # In the order of ids, so that a stable sort puts the smaller id first of equals.
        candidates = np.flatnonzero((logits >= least) & np.isfinite(logits))
        order = np.argsort(-logits[candidates], kind="stable")[:count]
        likeliest = candidates[order].tolist()
    return TokenLogprobs(
        token=token,
        logprob=float(logits[token]) - highest - total,
        top=tuple((other, float(logits[other]) - highest - total) for other in likeliest),
    )
