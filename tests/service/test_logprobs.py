"""Log-probabilities against a plain log-softmax."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvledger.logit_changes import ChangeOptions, LogitChanges
from kvledger.logprobs import token_logprobs
from kvledger.sampling import Sampler, SamplingParameters


def log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """float64 [vocabulary], the definition."""
    values = logits.astype(np.float64)
    weights = np.exp(values - values.max())
    return np.log(weights / weights.sum())


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.integers(-240, 240), min_size=1, max_size=60),
    count=st.integers(0, 20),
    data=st.data(),
)
def test_numbers_are_those_of_the_definition(
    steps: list[int], count: int, data: st.DataObject
) -> None:
    """Whoever scores answers by their log-probabilities would choose wrong ones."""
    logits = np.array(steps, dtype=np.float32) / np.float32(8)
    token = data.draw(st.integers(0, len(logits) - 1))
    found = token_logprobs(logits, token, count)
    wanted = log_softmax(logits)
    assert found.token == token
    assert found.logprob == pytest.approx(wanted[token], abs=1e-9)
    order = sorted(range(len(logits)), key=lambda other: (-logits[other], other))[:count]
    assert [other for other, _ in found.top] == order
    np.testing.assert_allclose([p for _, p in found.top], wanted[order], atol=1e-9)


def test_what_the_model_rules_out_is_not_told() -> None:
    """A client would get minus infinity where it expects a number."""
    logits = np.array([-np.inf, 1.0, -np.inf, 2.0], dtype=np.float32)
    assert [token for token, _ in token_logprobs(logits, 3, 4).top] == [3, 1]
    assert [token for token, _ in token_logprobs(logits, 3, 3).top] == [3, 1]


def test_huge_logits_do_not_overflow() -> None:
    """Exponentials of what a model may well say would be infinite, and every number NaN."""
    found = token_logprobs(np.array([3e38, 3e38, -3e38], dtype=np.float32), 0, 2)
    assert found.logprob == pytest.approx(-np.log(2))


def test_they_are_the_models_whatever_the_request_does_to_its_logits() -> None:
    """Numbers of two requests could not be compared: each would have its own temperature."""
    random = np.random.default_rng(4)
    logits = random.standard_normal((6, 300)).astype(np.float32) * 3
    options = ChangeOptions(repetition_penalty=3.0, presence_penalty=2.0, logit_bias=((9, 50.0),))
    sampler = Sampler(6)
    rows = np.arange(6, dtype=np.int32)
    for row in range(6):
        parameters = SamplingParameters(
            temperature=float(row % 2) * 5,
            top_k=3,
            changes=options,
            top_logprobs=None if row == 4 else row,
        )
        sampler.assign(row, parameters, LogitChanges(options, np.array([1, 2], dtype=np.int32)))
    drawn = sampler.draw(torch.from_numpy(logits), rows, rows + 2)
    assert sorted(drawn.logprobs) == [0, 1, 2, 3, 5], "row 4 did not ask"
    for place, found in drawn.logprobs.items():
        wanted = log_softmax(logits[place])
        assert found.token == drawn.tokens[place]
        assert found.logprob == pytest.approx(wanted[found.token], abs=1e-6)
        assert len(found.top) == place
        for token, logprob in found.top:
            assert logprob == pytest.approx(wanted[token], abs=1e-6)
    sampler.assign(0, SamplingParameters())
    assert 0 not in sampler.draw(torch.from_numpy(logits), rows, rows + 2).logprobs
