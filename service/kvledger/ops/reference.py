"""The operations written in plain torch: slow, simple, and independent of the core's kernels.

`--kernels torch` serves with them. When an answer is in doubt, both must give it; tests compare
the two, on the same KV memory in the same layout (core/kv_format.h).

Torch's own quantized products are not used for stored weights: of its int4 product, the form that
rounds scales to bf16 is not exact, and the exact one in f32 is slower than multiplying dequantized
weights. So weights are dequantized at load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvledger import _core
from kvledger.models.config import WeightsMode
from kvledger.models.model_file import StoredMatrix
from kvledger.ops.cpu import CpuOps


@dataclass(frozen=True)
class TorchWeight:
    """A dequantized weight: float32 or bfloat16 [outputs, inputs]."""

    format: str
    values: torch.Tensor

    @property
    def outputs(self) -> int:
        """Rows."""
        return self.values.shape[0]

    @property
    def inputs(self) -> int:
        """Columns."""
        return self.values.shape[1]

    @property
    def bytes(self) -> int:
        """Memory of the values."""
        return self.values.numel() * self.values.element_size()


class ReferenceOps:
    """See Ops."""

    def __init__(self, threads: int) -> None:
        self._unpacking = CpuOps(threads)
        torch.set_num_threads(threads)
        self._threads = threads
        self._plan: _core.Plan | None = None
        self._keys = torch.empty(0)
        self._key_shape = torch.Size()  # of one key in one head, as `_keys` splits it
        self._values = torch.empty(0)
        self._memory: _core.KvMemory | None = None
        self._query_heads = 0

    @property
    def description(self) -> str:
        """The kernels in one phrase."""
        return f"torch {torch.__version__} (reference), {self._threads} threads"

    def weight(self, mode: WeightsMode, matrices: Sequence[StoredMatrix]) -> TorchWeight:
        """See Ops.weight; `stored` is dequantized to f32."""
        packed = self._unpacking.weight("stored", matrices)
        values = torch.from_numpy(self._unpacking.kernels.unpack(packed))
        if mode == "bf16":
            return TorchWeight("bf16", values.to(torch.bfloat16))
        return TorchWeight("f32", values)

    def embed(self, weight: TorchWeight, ids: npt.NDArray[np.int32], out: torch.Tensor) -> None:
        """See Ops.embed."""
        out.copy_(weight.values[torch.from_numpy(ids).long()])

    def linear(
        self, x: torch.Tensor, weight: TorchWeight, out: torch.Tensor, accumulate: bool = False
    ) -> None:
        """See Ops.linear; bf16 weights are multiplied in f32."""
        product = torch.nn.functional.linear(x, weight.values.float())
        if accumulate:
            out.add_(product)
        else:
            out.copy_(product)

    def rms_norm(
        self, x: torch.Tensor, weight: npt.NDArray[np.float32], epsilon: float, out: torch.Tensor
    ) -> None:
        """See Ops.rms_norm."""
        scale = torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + epsilon)
        out.copy_(x * scale * torch.tensor(weight))

    def head_norm(self, x: torch.Tensor, weight: npt.NDArray[np.float32], epsilon: float) -> None:
        """See Ops.head_norm."""
        for head in x.unflatten(1, (-1, len(weight))).unbind(1):  # type: ignore[no-untyped-call]
            self.rms_norm(head, weight, epsilon, head)

    def add_bias(self, x: torch.Tensor, bias: npt.NDArray[np.float32]) -> None:
        """See Ops.add_bias."""
        x.add_(torch.tensor(bias))

    def silu_multiply(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """See Ops.silu_multiply."""
        gate, up = x.chunk(2, dim=-1)
        out.copy_(torch.nn.functional.silu(gate) * up)

    def begin_step(self, memory: _core.KvMemory, plan: _core.Plan, query_heads: int) -> None:
        """See Ops.begin_step."""
        if self._memory is not memory:
            self._memory = memory
            self._keys, self._values = _views(memory)
            self._key_shape = self._keys.shape[4:5] + self._keys.shape[6:]
        if plan.copies:
            memory.copy_blocks(plan.copy_from, plan.copy_to)
        self._plan = plan
        self._query_heads = query_heads

    def kv_append(
        self,
        layer: int,
        qkv: torch.Tensor,
        cosine: npt.NDArray[np.float32],
        sine: npt.NDArray[np.float32],
    ) -> None:
        """See Ops.kv_append."""
        assert self._plan is not None
        head_dim = self._values.shape[-1]
        kv_heads = self._values.shape[2]
        tokens = qkv.shape[0]
        heads = qkv.view(tokens, self._query_heads + 2 * kv_heads, head_dim)
        turning = heads[:, : self._query_heads + kv_heads]
        cos = torch.tensor(cosine[self._plan.positions])[:, None, :]
        sin = torch.tensor(sine[self._plan.positions])[:, None, :]
        first, second = turning.chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        turning.copy_(turned)
        keys = heads[:, self._query_heads : self._query_heads + kv_heads]
        values = heads[:, self._query_heads + kv_heads :]
        slots = self._values.shape[3]
        tile = self._keys.shape[5]
        for row, begin, end, context in self._sequences():
            positions = torch.arange(context - (end - begin), context)
            blocks = self._blocks(row, positions // slots)
            slot = positions % slots
            new_keys = keys[begin:end].reshape(end - begin, kv_heads, *self._key_shape)
            self._keys[blocks, layer, :, slot // tile, :, slot % tile] = new_keys.to(
                self._keys.dtype
            )
            self._values[blocks, layer, :, slot] = values[begin:end].to(self._values.dtype)

    def paged_attention(
        self, layer: int, qkv: torch.Tensor, scale: float, out: torch.Tensor
    ) -> None:
        """See Ops.paged_attention."""
        head_dim = self._values.shape[-1]
        kv_heads = self._values.shape[2]
        slots = self._values.shape[3]
        tile = self._keys.shape[5]
        tokens = qkv.shape[0]
        queries = qkv.view(tokens, -1, head_dim)[:, : self._query_heads]
        results = out.view(tokens, self._query_heads, head_dim)
        for row, begin, end, context in self._sequences():
            positions = torch.arange(context)
            blocks = self._blocks(row, positions // slots)
            slot = positions % slots
            keys = self._keys[blocks, layer, :, slot // tile, :, slot % tile].float()
            keys = keys.reshape(context, kv_heads, head_dim)
            values = self._values[blocks, layer, :, slot].float()
            group = self._query_heads // kv_heads
            q = queries[begin:end].view(end - begin, kv_heads, group, head_dim)
            scores = torch.einsum("thgd,chd->thgc", q, keys) * scale
            limit = torch.arange(context - (end - begin), context)[:, None]
            scores.masked_fill_((positions[None, :] > limit)[:, None, None, :], float("-inf"))
            weighted = torch.einsum("thgc,chd->thgd", scores.softmax(dim=-1), values)
            results[begin:end] = weighted.reshape(end - begin, self._query_heads, head_dim)

    def _sequences(self) -> list[tuple[int, int, int, int]]:
        """(row, first token, token after the last, context) of the step's sequences."""
        assert self._plan is not None
        starts = self._plan.query_start.tolist()
        rows = self._plan.rows.tolist()
        contexts = self._plan.context_length.tolist()
        return [
            (rows[s], starts[s], starts[s + 1], contexts[s])
            for s in range(len(rows))
            if starts[s + 1] > starts[s]
        ]

    def _blocks(self, row: int, indices: torch.Tensor) -> torch.Tensor:
        assert self._plan is not None
        table = torch.from_numpy(self._plan.block_tables[row].copy()).long()
        return table[indices]


def _views(memory: _core.KvMemory) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values as strided views of the arena.

    Keys are [block, layer, head, tile, dimension, slot in tile] in f32, and in bf16
    [block, layer, head, tile, pair of dimensions, slot in tile, 2]; values are
    [block, layer, head, slot, dimension].
    """
    layout = memory.layout
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[memory.format]
    size = dtype.itemsize
    elements = torch.from_numpy(memory.bytes).view(dtype)
    slots = layout.slots_per_block(memory.format)
    tile = layout.tile_slots(memory.format)
    block, region = layout.block_bytes // size, layout.region_bytes // size
    outer = (memory.blocks, layout.layers, layout.kv_heads)
    strides = (block, region * layout.kv_heads, region)
    dim = layout.head_dim
    values = elements.as_strided(
        (*outer, slots, dim),
        (*strides, dim, 1),
        layout.value_offset(memory.format) // size,
    )
    if memory.format == "f32":
        keys = elements.as_strided(
            (*outer, slots // tile, dim, tile), (*strides, tile * dim, tile, 1)
        )
        return keys, values
    pairs = elements.as_strided(
        (*outer, slots // tile, dim // 2, tile, 2), (*strides, tile * dim, 2 * tile, 2, 1)
    )
    return pairs, values
