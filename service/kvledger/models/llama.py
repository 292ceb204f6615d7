"""The Llama class of models, written once over `ops`.

Touvron et al. 2023 (arXiv 2302.13971): RMS norm before each part, rotary embedding, grouped query
heads, SiLU-gated feed-forward. The families that follow it (Mistral, Qwen, SmolLM) differ by rows
of the configuration: a bias, a norm of each head, scaled or missing rotary embedding.

Activations are float32 [tokens, ...]; the tokens of all sequences of a step stand side by side, so
one pass serves prefill chunks and decode tokens alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvledger import _core
from kvledger.models.config import LlamaConfig, RopeScaling, WeightsMode
from kvledger.models.model_file import StoredMatrix, Tensors
from kvledger.ops import Ops


@dataclass(frozen=True)
class StackedLinear:
    """Linear layers that read the same input, side by side in one output.

    Neighbours stored in the same format share one weight; each of `parts` is a weight and the
    column at which its outputs begin.
    """

    parts: tuple[tuple[Any, int], ...]

    @classmethod
    def load(cls, ops: Ops, mode: WeightsMode, matrices: list[StoredMatrix]) -> StackedLinear:
        """Stacks the matrices in order."""
        parts: list[tuple[Any, int]] = []
        begin, column = 0, 0
        for end in range(1, len(matrices) + 1):
            if end < len(matrices) and matrices[end].format == matrices[begin].format:
                continue
            run = matrices[begin:end]
            parts.append((ops.weight(mode, run), column))
            column += sum(matrix.rows for matrix in run)
            begin = end
        return cls(tuple(parts))

    def apply(self, ops: Ops, x: torch.Tensor, out: torch.Tensor) -> None:
        """Computes the outputs of all parts into out [tokens, all outputs]."""
        for weight, column in self.parts:
            ops.linear(x, weight, out[:, column : column + weight.outputs])

    @property
    def bytes(self) -> int:
        """Memory of all parts."""
        return sum(weight.bytes for weight, _ in self.parts)


@dataclass(frozen=True)
class LlamaLayer:
    """Weights of one layer."""

    attention_norm: npt.NDArray[np.float32]
    qkv: StackedLinear
    attention_output: Any
    feed_forward_norm: npt.NDArray[np.float32]
    gate_up: StackedLinear
    down: Any
    # Of families that have them: added to queries, keys and values; applied to each of their heads.
    qkv_bias: npt.NDArray[np.float32] | None = None
    query_norm: npt.NDArray[np.float32] | None = None
    key_norm: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True)
class LlamaWeights:
    """All weights of a model."""

    embedding: Any
    layers: tuple[LlamaLayer, ...]
    output_norm: npt.NDArray[np.float32]
    head: Any  # the embedding itself where the file ties them

    @property
    def bytes(self) -> int:
        """Memory of the weights; norms are too small to count."""
        total: int = self.embedding.bytes
        if self.head is not self.embedding:
            total += self.head.bytes
        for layer in self.layers:
            total += layer.qkv.bytes + layer.attention_output.bytes
            total += layer.gate_up.bytes + layer.down.bytes
        return total


def load_weights(
    file: Tensors,
    config: LlamaConfig,
    vocabulary: int,
    ops: Ops,
    mode: WeightsMode,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> LlamaWeights:
    """Takes all tensors out of the file; ModelRefused if one is missing, misshapen or unknown.

    `progress` is called with the number of layers that are loaded, and that there are.
    """
    embedding_matrix = file.matrix("token_embd.weight", vocabulary, config.hidden)
    embedding = ops.weight(mode, [embedding_matrix])
    del embedding_matrix  # packed now; for a moment the largest tensor stood in memory twice
    layers = []
    for i in range(config.layers):
        progress(i, config.layers)
        layers.append(_load_layer(file, f"blk.{i}.", config, ops, mode))
    output_norm = file.vector("output_norm.weight", config.hidden)
    tied = config.tied_head
    if tied is None:
        tied = not file.has("output.weight")
    head = embedding
    if not tied:
        head = ops.weight(mode, [file.matrix("output.weight", vocabulary, config.hidden)])
    file.refuse_unread()
    progress(config.layers, config.layers)
    return LlamaWeights(embedding, tuple(layers), output_norm, head)


def _load_layer(
    file: Tensors, name: str, config: LlamaConfig, ops: Ops, mode: WeightsMode
) -> LlamaLayer:
    hidden, width, head_dim = config.hidden, config.feed_forward, config.head_dim
    query_rows, kv_rows = config.query_heads * head_dim, config.kv_heads * head_dim
    query_order = key_order = None
    if file.has_neighbouring_pairs:
        query_order = _half_split_order(config.query_heads, head_dim)
        key_order = _half_split_order(config.kv_heads, head_dim)
    qkv_bias = query_norm = key_norm = None
    if config.qkv_bias:
        rows = (("q", query_rows), ("k", kv_rows), ("v", kv_rows))
        qkv_bias = np.concatenate([file.vector(f"{name}attn_{x}.bias", n) for x, n in rows])
    if config.qk_norm:
        query_norm = file.vector(name + "attn_q_norm.weight", head_dim)
        key_norm = file.vector(name + "attn_k_norm.weight", head_dim)
    return LlamaLayer(
        attention_norm=file.vector(name + "attn_norm.weight", hidden),
        qkv=StackedLinear.load(
            ops,
            mode,
            [
                file.matrix(name + "attn_q.weight", query_rows, hidden, query_order),
                file.matrix(name + "attn_k.weight", kv_rows, hidden, key_order),
                file.matrix(name + "attn_v.weight", kv_rows, hidden),
            ],
        ),
        attention_output=ops.weight(
            mode, [file.matrix(name + "attn_output.weight", hidden, query_rows)]
        ),
        feed_forward_norm=file.vector(name + "ffn_norm.weight", hidden),
        gate_up=StackedLinear.load(
            ops,
            mode,
            [
                file.matrix(name + "ffn_gate.weight", width, hidden),
                file.matrix(name + "ffn_up.weight", width, hidden),
            ],
        ),
        down=ops.weight(mode, [file.matrix(name + "ffn_down.weight", hidden, width)]),
        qkv_bias=qkv_bias,
        query_norm=query_norm,
        key_norm=key_norm,
    )


def _half_split_order(heads: int, head_dim: int) -> npt.NDArray[np.int64]:
    """Stored rows in the order that rotary embedding by halves wants.

    GGUF stores queries and keys of this architecture with the two dimensions that turn together
    side by side; here dimension i turns with dimension i + head_dim / 2.
    """
    one_head = np.arange(head_dim, dtype=np.int64).reshape(head_dim // 2, 2).T.reshape(-1)
    first_rows = np.arange(heads, dtype=np.int64)[:, None] * head_dim
    return np.ascontiguousarray((first_rows + one_head).reshape(-1))


class Llama:
    """A model ready to compute steps. One thread at a time."""

    def __init__(
        self,
        config: LlamaConfig,
        weights: LlamaWeights,
        ops: Ops,
        memory: _core.KvMemory,
        tokens_max: int,
        positions_max: int,
    ) -> None:
        """`tokens_max` is the most tokens in a step, `positions_max` in a sequence."""
        self._config = config
        self._weights = weights
        self._ops = ops
        self._memory = memory
        self._scale = config.head_dim**-0.5
        turning = rotary_tables(config, positions_max)
        # A layer without rotary embedding turns by no angle: the kernels need not know.
        standing = turning
        if config.layers_without_rope:
            standing = np.ones_like(turning[0]), np.zeros_like(turning[1])
        self._rotary = tuple(
            standing if layer in config.layers_without_rope else turning
            for layer in range(config.layers)
        )
        attended = config.query_heads * config.head_dim
        kv = config.kv_heads * config.head_dim
        # Zeros, not empty: memory is there from the start, and none is lacking in the first step.
        self._hidden = torch.zeros(tokens_max, config.hidden)
        self._normed = torch.zeros(tokens_max, config.hidden)
        self._qkv = torch.zeros(tokens_max, attended + 2 * kv)
        self._attended = torch.zeros(tokens_max, attended)
        self._gate_up = torch.zeros(tokens_max, 2 * config.feed_forward)
        self._feed = torch.zeros(tokens_max, config.feed_forward)
        self._vocabulary = int(weights.head.outputs)
        self._logits_memory = torch.empty(0, self._vocabulary)
        self._logits = self._logits_memory  # the rows of it that the last step wanted

    @property
    def workspace_bytes(self) -> int:
        """Memory that steps compute with, besides weights and KV pool; logits may make it grow."""
        buffers = (
            *(self._hidden, self._normed, self._qkv, self._attended),
            *(self._gate_up, self._feed, self._logits_memory),
        )
        # Most layers have the same tables.
        tables = {id(table): table.nbytes for pair in self._rotary for table in pair}
        return sum(buffer.nbytes for buffer in buffers) + sum(tables.values())

    def forward(self, plan: _core.Plan, beat: Callable[[], None] = lambda: None) -> torch.Tensor:
        """Computes a step; logits are float32 [plan.logits, vocabulary], valid until the next.

        `beat` is called once a layer, to show that work goes on.
        """
        ops, weights, config = self._ops, self._weights, self._config
        tokens = plan.tokens
        x, normed = self._hidden[:tokens], self._normed[:tokens]
        qkv, attended = self._qkv[:tokens], self._attended[:tokens]
        gate_up, feed = self._gate_up[:tokens], self._feed[:tokens]
        ops.begin_step(self._memory, plan, config.query_heads)
        ops.embed(weights.embedding, plan.token_ids, x)
        for index, layer in enumerate(weights.layers):
            ops.rms_norm(x, layer.attention_norm, config.rms_epsilon, normed)
            layer.qkv.apply(ops, normed, qkv)
            self._adjust(layer, qkv)
            ops.kv_append(index, qkv, *self._rotary[index])
            ops.paged_attention(index, qkv, self._scale, attended)
            ops.linear(attended, layer.attention_output, x, accumulate=True)
            ops.rms_norm(x, layer.feed_forward_norm, config.rms_epsilon, normed)
            layer.gate_up.apply(ops, normed, gate_up)
            ops.silu_multiply(gate_up, feed)
            ops.linear(feed, layer.down, x, accumulate=True)
            beat()
        return self._head(x, plan)

    def score(self, tokens: npt.NDArray[np.int64]) -> torch.Tensor:
        """Logits after other tokens of the step computed last: float32 [len(tokens), vocabulary].

        `tokens` are indices into the plan's; valid until the next step.
        """
        logits = torch.empty(len(tokens), self._vocabulary)
        rows = self._hidden[torch.from_numpy(tokens)]
        self._ops.rms_norm(rows, self._weights.output_norm, self._config.rms_epsilon, rows)
        self._ops.linear(rows, self._weights.head, logits)
        return logits

    def _adjust(self, layer: LlamaLayer, qkv: torch.Tensor) -> None:
        """What some families do to queries, keys and values before they are turned and stored."""
        if layer.qkv_bias is not None:
            self._ops.add_bias(qkv, layer.qkv_bias)
        if layer.query_norm is not None and layer.key_norm is not None:
            config = self._config
            queries = config.query_heads * config.head_dim
            keys = slice(queries, queries + config.kv_heads * config.head_dim)
            self._ops.head_norm(qkv[:, :queries], layer.query_norm, config.rms_epsilon)
            self._ops.head_norm(qkv[:, keys], layer.key_norm, config.rms_epsilon)

    def _head(self, x: torch.Tensor, plan: _core.Plan) -> torch.Tensor:
        wanted = plan.logits
        if self._logits.shape[0] != wanted:
            if self._logits_memory.shape[0] < wanted:
                self._logits_memory = torch.empty(wanted, self._vocabulary)
            self._logits = self._logits_memory[:wanted]
        logits = self._logits
        if wanted > 0:
            rows = x[torch.from_numpy(plan.logit_tokens).long()]
            self._ops.rms_norm(rows, self._weights.output_norm, self._config.rms_epsilon, rows)
            self._ops.linear(rows, self._weights.head, logits)
        return logits


def rotary_tables(
    config: LlamaConfig, positions: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Cosines and sines of each position's angles, float32 [positions, head_dim / 2].

    Su et al. 2021 (arXiv 2104.09864); computed in float64, because at position 8,000 an angle in
    float32 is off by a thousandth.
    """
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    frequencies = _scaled(config.rope_base**-exponents, config.rope_scaling)
    angles = np.outer(np.arange(positions, dtype=np.float64), frequencies)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _scaled(
    frequencies: npt.NDArray[np.float64], scaling: RopeScaling | None
) -> npt.NDArray[np.float64]:
    """Angles per position, float64 [head_dim / 2], stretched as the model was trained."""
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    # 1 where a wave fits into the original context often enough to be kept, 0 where it hardly does.
    waves = scaling.original_context * frequencies / (2 * np.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept = np.clip((waves - low) / (high - low), 0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / scaling.factor)
