"""The operations on heads and biases: the core's kernels against plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvledger import _core
from kvledger.ops import Ops
from kvledger.ops.cpu import CpuOps
from kvledger.ops.reference import ReferenceOps

EPSILON = 1e-5


def all_ops() -> list[Ops]:
    return [*(CpuOps(2, name) for name in _core.instruction_sets()), ReferenceOps(1)]


def random_rows(tokens: int, columns: int) -> torch.Tensor:
    return torch.randn(tokens, columns, generator=torch.Generator().manual_seed(tokens))


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
@pytest.mark.parametrize("tokens", [1, 3, 8, 9, 100])
def test_each_head_is_normalized_by_itself(head_dim: int, tokens: int) -> None:
    """Models that normalize heads would attend to other tokens than they learned to."""
    heads, after = 3, 32
    whole = random_rows(tokens, heads * head_dim + after)
    weight = np.linspace(0.5, 2.0, head_dim, dtype=np.float32)
    by_head = whole[:, : heads * head_dim].double().view(tokens, heads, head_dim)
    scale = torch.rsqrt(by_head.pow(2).mean(-1, keepdim=True) + EPSILON)
    expected = (by_head * scale * torch.from_numpy(weight)).view(tokens, -1)
    for ops in all_ops():
        ours = whole.clone()
        ops.head_norm(ours[:, : heads * head_dim], weight, EPSILON)
        assert (ours[:, : heads * head_dim] - expected).abs().max() < 2e-6, ops.description
        assert torch.equal(ours[:, heads * head_dim :], whole[:, heads * head_dim :])


def test_a_head_does_not_depend_on_its_neighbours() -> None:
    """The same prompt would be answered differently in company than alone."""
    weight = np.ones(64, dtype=np.float32)
    whole = random_rows(40, 5 * 64)
    for ops in all_ops():
        together = whole.clone()
        ops.head_norm(together, weight, EPSILON)
        for token in (0, 7, 8, 39):
            alone = whole[token : token + 1].clone()
            ops.head_norm(alone, weight, EPSILON)
            assert torch.equal(alone[0], together[token])


def test_columns_that_are_no_whole_heads_are_refused() -> None:
    """The last head would be normalized with floats of another token."""
    x = random_rows(2, 40)
    with pytest.raises(ValueError, match="not whole heads"):
        CpuOps(1).head_norm(x, np.ones(16, dtype=np.float32), EPSILON)


@pytest.mark.parametrize(
    "weight",
    [
        np.ones(16, dtype=np.float64),
        np.ones(16, dtype=">f4"),
        np.ones(32, dtype=np.float32)[::2],
        np.ones((16, 2), dtype=np.float32)[:, 0],
    ],
    ids=["float64", "big-endian", "every other", "a column"],
)
def test_weights_that_a_kernel_cannot_read_in_place_are_refused(weight: np.ndarray) -> None:
    """They would be copied in each layer of each step, or read as other numbers."""
    ops, x = CpuOps(1), torch.ones(2, 16)
    with pytest.raises(TypeError, match="contiguous float32"):
        ops.rms_norm(x, weight, EPSILON, torch.empty_like(x))
    with pytest.raises(TypeError, match="contiguous float32"):
        ops.head_norm(x, weight, EPSILON)
    angles = np.ones((4, 8), dtype=np.float32)
    for cosine, sine in ((weight, angles), (angles, weight)):
        with pytest.raises(TypeError, match="contiguous float32"):
            ops.kernels.kv_append(0, cosine, sine, x.data_ptr(), 16, 1)


def test_a_bias_is_added_to_each_row_of_a_slice() -> None:
    """Models with biases would be computed without, or with those of another layer."""
    whole = random_rows(9, 80)
    bias = np.arange(48, dtype=np.float32)
    for ops in all_ops():
        ours = whole.clone()
        ops.add_bias(ours[:, :48], bias)
        assert torch.equal(ours[:, :48], whole[:, :48] + torch.from_numpy(bias))
        assert torch.equal(ours[:, 48:], whole[:, 48:])
