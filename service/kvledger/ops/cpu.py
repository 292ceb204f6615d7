"""The operations on the CPU: the core's own kernels over its own thread pool.

Weights of every format are multiplied as the floats they stand for, in one fixed order, so logits
do not depend on the batch, on the chunking, or on whether weights are kept as stored or as f32.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvledger import _core
from kvledger.models.config import WeightsMode
from kvledger.models.model_file import StoredMatrix


class CpuOps:
    """See Ops. One thread at a time may use an instance."""

    def __init__(self, threads: int, instruction_set: str = "auto") -> None:
        self.kernels = _core.CpuKernels(threads, instruction_set)
        # Torch only adds biases in a step; its threads would compete with the core's.
        torch.set_num_threads(1)
        self._view: _core.KvView | None = None
        self._batch: _core.Batch | None = None
        self._query_heads = 0

    @property
    def description(self) -> str:
        """The kernels in one phrase."""
        return f"core {self.kernels.instruction_set}, {self.kernels.threads} threads"

    def weight(self, mode: WeightsMode, matrices: Sequence[StoredMatrix]) -> _core.PackedWeight:
        """See Ops.weight."""
        rows = sum(matrix.rows for matrix in matrices)
        stored = _core.PackedWeight(matrices[0].format, rows, matrices[0].columns)
        first = 0
        for matrix in matrices:
            stored.set_rows(first, matrix.data, matrix.order)
            first += matrix.rows
        if mode in ("stored", stored.format):
            return stored
        kept = _core.PackedWeight(mode, rows, stored.inputs)
        no_order = np.empty(0, dtype=np.int64)
        kept.set_rows(0, _as_bytes(self.kernels.unpack(stored), mode), no_order)
        return kept

    def embed(
        self, weight: _core.PackedWeight, ids: npt.NDArray[np.int32], out: torch.Tensor
    ) -> None:
        """See Ops.embed."""
        self.kernels.embed(weight, ids, out.data_ptr(), out.stride(0))

    def linear(
        self,
        x: torch.Tensor,
        weight: _core.PackedWeight,
        out: torch.Tensor,
        accumulate: bool = False,
    ) -> None:
        """See Ops.linear."""
        self.kernels.linear(
            weight,
            x.data_ptr(),
            x.shape[0],
            x.stride(0),
            out.data_ptr(),
            out.stride(0),
            accumulate,
        )

    def rms_norm(
        self, x: torch.Tensor, weight: npt.NDArray[np.float32], epsilon: float, out: torch.Tensor
    ) -> None:
        """See Ops.rms_norm."""
        self.kernels.rms_norm(
            x.data_ptr(), x.shape[0], x.stride(0), weight, epsilon, out.data_ptr(), out.stride(0)
        )

    def head_norm(self, x: torch.Tensor, weight: npt.NDArray[np.float32], epsilon: float) -> None:
        """See Ops.head_norm."""
        self.kernels.head_norm(x.data_ptr(), x.shape[0], x.shape[1], x.stride(0), weight, epsilon)

    def add_bias(self, x: torch.Tensor, bias: npt.NDArray[np.float32]) -> None:
        """See Ops.add_bias; one addition a float, so torch's order of work changes no bit."""
        x.add_(torch.from_numpy(bias))

    def silu_multiply(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """See Ops.silu_multiply."""
        self.kernels.silu_multiply(
            x.data_ptr(), x.shape[0], out.shape[1], x.stride(0), out.data_ptr(), out.stride(0)
        )

    def begin_step(self, memory: _core.KvMemory, plan: _core.Plan, query_heads: int) -> None:
        """See Ops.begin_step."""
        if self._view is None:
            self._view = memory.view()
        if plan.copies:
            memory.copy_blocks(plan.copy_from, plan.copy_to)
        self._batch = plan.batch()
        self._query_heads = query_heads
        self.kernels.begin_step(self._view, self._batch, query_heads)

    def kv_append(
        self,
        layer: int,
        qkv: torch.Tensor,
        cosine: npt.NDArray[np.float32],
        sine: npt.NDArray[np.float32],
    ) -> None:
        """See Ops.kv_append."""
        self.kernels.kv_append(
            layer, cosine, sine, qkv.data_ptr(), qkv.stride(0), self._query_heads
        )

    def paged_attention(
        self, layer: int, qkv: torch.Tensor, scale: float, out: torch.Tensor
    ) -> None:
        """See Ops.paged_attention."""
        self.kernels.paged_attention(
            layer,
            qkv.data_ptr(),
            qkv.stride(0),
            self._query_heads,
            scale,
            out.data_ptr(),
            out.stride(0),
        )


def _as_bytes(weights: npt.NDArray[np.float32], mode: WeightsMode) -> npt.NDArray[np.uint8]:
    """float32 [rows, columns] as the bytes of `mode`, bf16 rounded to nearest even."""
    if mode == "f32":
        return weights.reshape(-1).view(np.uint8)
    rounded = torch.from_numpy(weights).to(torch.bfloat16)
    return rounded.reshape(-1).view(torch.uint8).numpy()
