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


@dataclass(frozen=True)
class PromptLogprobs:
    """How likely some tokens of a prompt were, compactly: a long prompt has thousands.

    Row i is about the token at `first` + i: `tokens` is int32 and `logprobs` float32, both
    [n, 1 + count]; the token that stands there comes first, then the likeliest. Where there are
    fewer, the token is -1.
    """

    first: int
    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]

    def rows(self, start: int, count: int) -> list[TokenLogprobs]:
        """Some of the rows, one after the other."""
        part = slice(start, start + count)
        rows = zip(self.tokens[part].tolist(), self.logprobs[part].tolist(), strict=True)
        return [
            TokenLogprobs(
                token=tokens[0],
                logprob=logprobs[0],
                top=tuple(
                    (token, logprob)
                    for token, logprob in zip(tokens[1:], logprobs[1:], strict=True)
                    if token >= 0
                ),
            )
            for tokens, logprobs in rows
        ]


def prompt_logprobs(
    logits: npt.NDArray[np.float32], prompt: npt.NDArray[np.int32], first: int, count: int
) -> PromptLogprobs:
    """Of the tokens of `prompt` from `first` on, one for each row of logits [n, vocabulary].

    Raises ValueError where a row has no usable number.
    """
    tokens = np.full((len(logits), 1 + count), -1, dtype=np.int32)
    logprobs = np.zeros((len(logits), 1 + count), dtype=np.float32)
    for row, values in enumerate(logits):
        if not np.isfinite(values.max()):
            raise ValueError("logits of a prompt hold no usable number")
        found = token_logprobs(values, int(prompt[first + row]), count)
        told = ((found.token, found.logprob), *found.top)
        tokens[row, : len(told)] = [token for token, _ in told]
        logprobs[row, : len(told)] = [logprob for _, logprob in told]
    return PromptLogprobs(first, tokens, logprobs)
