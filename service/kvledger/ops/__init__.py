"""The operations a model is written in, by name; the device decides which kernels they reach.

Matrices are float32 torch tensors [rows, columns] whose rows are contiguous; they may be slices of
wider ones. Operations write into tensors of the caller and allocate nothing. What one raises fails
the step that it is part of; errors.DeviceLost says that every later step would fail as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvledger import _core
from kvledger.errors import SettingRefused
from kvledger.models.config import WeightsMode
from kvledger.models.model_file import StoredMatrix


class Weight(Protocol):
    """Weights of a linear layer, in whatever form the kernels want."""

    @property
    def format(self) -> str:
        """Name of the format they are kept in."""
        ...

    @property
    def outputs(self) -> int:
        """Rows of the weight matrix."""
        ...

    @property
    def inputs(self) -> int:
        """Columns of the weight matrix."""
        ...

    @property
    def bytes(self) -> int:
        """Memory they take."""
        ...


class Ops(Protocol):
    """What every device provides. `Any` stands for the device's own Weight."""

    @property
    def description(self) -> str:
        """The kernels in one phrase, for the log."""
        ...

    def weight(self, mode: WeightsMode, matrices: Sequence[StoredMatrix]) -> Any:
        """Weights of matrices stacked on top of each other, all of one format, kept by `mode`."""
        ...

    def embed(self, weight: Any, ids: npt.NDArray[np.int32], out: torch.Tensor) -> None:
        """out[i] = row ids[i] of the weight."""
        ...

    def linear(
        self, x: torch.Tensor, weight: Any, out: torch.Tensor, accumulate: bool = False
    ) -> None:
        """out = x W^T, or out += x W^T."""
        ...

    def rms_norm(
        self, x: torch.Tensor, weight: npt.NDArray[np.float32], epsilon: float, out: torch.Tensor
    ) -> None:
        """out = x * weight / sqrt(mean(x^2) + epsilon), row by row."""
        ...

    def head_norm(self, x: torch.Tensor, weight: npt.NDArray[np.float32], epsilon: float) -> None:
        """The same for each head of x [tokens, heads * head_dim], in place; weight [head_dim]."""
        ...

    def add_bias(self, x: torch.Tensor, bias: npt.NDArray[np.float32]) -> None:
        """x += bias [columns], row by row."""
        ...

    def silu_multiply(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """out = silu(left half of x) * right half of x."""
        ...

    def begin_step(self, memory: _core.KvMemory, plan: _core.Plan, query_heads: int) -> None:
        """Takes up the sequences of a step; the three operations below are about them.

        Blocks that the plan wants copied are copied first.
        """
        ...

    def kv_append(
        self,
        layer: int,
        qkv: torch.Tensor,
        cosine: npt.NDArray[np.float32],
        sine: npt.NDArray[np.float32],
    ) -> None:
        """Turns queries and keys of qkv [tokens, (query + 2 kv heads) * head_dim] by their
        positions' angles (cosine and sine [positions, head_dim / 2]) and stores keys and values."""
        ...

    def paged_attention(
        self, layer: int, qkv: torch.Tensor, scale: float, out: torch.Tensor
    ) -> None:
        """out [tokens, query heads * head_dim] = attention of qkv's queries over their context."""
        ...


def make_ops(device: str, kernels: str, threads: int, instruction_set: str) -> Ops:
    """The operations for a device. SettingRefused if this build or machine has not got them."""
    if device != "cpu":
        raise SettingRefused(
            f"--device {device}: this build of kvledger has no CUDA kernels; use --device cpu"
        )
    if kernels == "torch":
        from kvledger.ops.reference import ReferenceOps

        return ReferenceOps(threads)
    from kvledger.ops.cpu import CpuOps

    try:
        return CpuOps(threads, instruction_set)
    except ValueError as error:
        raise SettingRefused(f"--instruction-set: {error}") from None
