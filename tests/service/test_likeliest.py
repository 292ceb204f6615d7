"""The core's greedy choice against numpy's argmax, from whatever memory the logits lie in."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvledger import _core
from kvledger.sampling import UNUSABLE, Sampler, SamplingParameters

likeliest = _core.Likeliest()
SPECIAL = (np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 3.4e38, -3.4e38, 1e-45)


def expected(logits: npt.NDArray[np.float32]) -> list[int]:
    """By numpy: its argmax finds the first NaN, or else the first of the largest."""
    chosen = logits.argmax(axis=1)
    highest = logits[np.arange(len(logits)), chosen]
    return np.where(np.isfinite(highest), chosen, UNUSABLE).tolist()


@settings(max_examples=300)
@given(
    rows=st.integers(0, 5),
    vocabulary=st.integers(1, 200) | st.sampled_from([1023, 1024, 1025, 3001]),
    seed=st.integers(0, 2**32 - 1),
    planted=st.lists(
        st.tuples(st.integers(0, 10**6), st.integers(0, 10**6), st.sampled_from(SPECIAL)),
        max_size=6,
    ),
    coarse=st.booleans(),
)
def test_it_is_what_numpy_finds(
    rows: int, vocabulary: int, seed: int, planted: list[tuple[int, int, float]], coarse: bool
) -> None:
    """Greedy texts would differ from what they are elsewhere, or nonsense be told as text."""
    logits = np.random.default_rng(seed).standard_normal((rows, vocabulary)).astype(np.float32)
    if coarse:
        logits = logits.round()  # many equals
    for row, column, value in planted:
        if rows:
            logits[row % rows, column % vocabulary] = value
    tokens = likeliest(logits)
    assert tokens.dtype == np.int32
    assert tokens.shape == (rows,)
    assert tokens.tolist() == expected(logits)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_rows_of_nothing_usable_have_no_token(value: float) -> None:
    """A sequence whose logits broke would go on with a made-up token."""
    logits = np.zeros((3, 70), dtype=np.float32)
    logits[1] = value
    assert likeliest(logits).tolist() == [0, UNUSABLE, 0]


def test_logits_may_lie_anywhere() -> None:
    """What is between rows or columns of a slice would be taken for logits."""
    whole = np.random.default_rng(1).standard_normal((12, 300)).astype(np.float32)
    shapes = {
        "wider rows": whole[:, 5:172],
        "every third row": whole[::3, :99],
        "backwards": whole[::-1, :99],
        "columns as rows": whole.T[:99],
        "every other column": whole[:, ::2],
        "columns backwards": whole[:, ::-1],
        "one row again and again": np.broadcast_to(whole[0], (7, 300)),
        "no rows of every other column": whole[:0, ::2],
        "one row of every other column": whole[:1, ::2],
        "one column": whole[:, 17:18],
        "one column of columns": whole.T[17:18],
        "odd address": np.frombuffer(b"x" + whole.tobytes(), np.float32, 3600, 1).reshape(12, 300),
    }
    for name, logits in shapes.items():
        assert likeliest(logits).tolist() == expected(logits), name


def test_big_work_gives_the_same() -> None:
    """Work that lets other threads run meanwhile would differ from work that does not."""
    logits = np.random.default_rng(2).standard_normal((40, 49152)).astype(np.float32)
    logits[7, 49151] = np.nan
    logits[8, 49151] = 99.0
    assert likeliest(logits).tolist() == expected(logits)


@pytest.mark.parametrize("instruction_set", _core.instruction_sets())
def test_every_instruction_set_finds_the_same(instruction_set: str) -> None:
    """A server that is told which instructions to use would use others for this."""
    logits = np.random.default_rng(3).standard_normal((7, 1000)).astype(np.float32).round(1)
    logits[2, 999], logits[4, 500] = np.nan, 77.0
    assert _core.Likeliest(instruction_set)(logits).tolist() == expected(logits)
    tokens = Sampler(7, instruction_set).likeliest(torch.from_numpy(logits))
    assert tokens is not None
    assert tokens.tolist() == expected(logits)


def test_unknown_instructions_are_refused() -> None:
    """A name with a mistake in it would mean whatever the machine has."""
    with pytest.raises(ValueError, match="instruction set"):
        _core.Likeliest("avx1024")


def test_what_are_no_logits_is_refused() -> None:
    """Bytes of something else would be read as numbers."""
    with pytest.raises(ValueError, match="rows, vocabulary"):
        likeliest(np.zeros(5, np.float32))
    with pytest.raises(ValueError, match="vocabulary must be"):
        likeliest(np.zeros((5, 0), np.float32))
    for dtype in (np.float64, np.float16, np.int32, ">f4"):
        with pytest.raises(TypeError):
            likeliest(np.zeros((5, 3), dtype))  # type: ignore[arg-type]


def test_a_sampler_knows_when_that_is_all() -> None:
    """A sequence that draws, or was refused, would get the likeliest token instead."""
    sampler = Sampler(4)
    logits = torch.zeros(2, 9)
    logits[0, 3] = logits[1, 5] = 1.0
    assert_tokens(sampler, logits, [3, 5])
    sampler.assign(1, SamplingParameters(temperature=1.0))
    assert sampler.likeliest(logits) is None
    sampler.release(1)
    assert_tokens(sampler, logits, [3, 5])
    sampler.refuse(0)
    assert sampler.likeliest(logits) is None
    sampler.assign(0, SamplingParameters())
    assert_tokens(sampler, logits, [3, 5])
    sampler.assign(2, SamplingParameters(top_logprobs=0))
    assert sampler.likeliest(logits) is None


def test_the_same_tensor_is_read_again_each_time() -> None:
    """A model that writes into one tensor step after step would repeat the first step's tokens."""
    sampler = Sampler(4)
    logits = torch.zeros(2, 9)
    for place in range(9):
        logits.zero_()
        logits[:, place] = 1.0
        assert_tokens(sampler, logits, [place, place])
    assert_tokens(sampler, logits[:1], [8])
    other = torch.zeros(1, 9)
    other[0, 4] = 1.0
    assert_tokens(sampler, other, [4])
    assert_tokens(sampler, logits, [8, 8])


def assert_tokens(sampler: Sampler, logits: torch.Tensor, wanted: list[int]) -> None:
    tokens = sampler.likeliest(logits)
    assert tokens is not None
    assert tokens.tolist() == wanted
    rows = np.arange(len(wanted), dtype=np.int32)
    assert sampler.sample(logits, rows, rows).tolist() == wanted
