"""The least time that steps can take: what they must read over the memory's speed, and what they
must compute over the arithmetic's (Williams et al. 2009, the roofline).

A floor is a bound from below. It counts the weights once for each step, keys and values once for
each sequence that reads them, and no activations, no meetings of threads, no bookkeeping. What a
largest cache keeps from one step to the next need not be read again, so a model that fits into it
can be faster than the part of its floor that memory sets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvledger.machine.peaks import MachinePeaks

if TYPE_CHECKING:  # readers of books need no model, which takes seconds to import
    from kvledger.models.config import LlamaConfig
    from kvledger.models.llama import LlamaWeights
    from kvledger.ops import Weight

Operations = Mapping[str, float]  # by the format of the weights; "f32" for attention


@dataclass(frozen=True)
class Floor:
    """What must be read and computed, and how long that takes at least. Bytes and seconds."""

    weight_bytes: int
    kv_bytes: int
    operations: float
    memory_seconds: float
    compute_seconds: float

    @property
    def seconds(self) -> float:
        """The bound: reading and computing can overlap, so the longer of the two."""
        return max(self.memory_seconds, self.compute_seconds)

    @property
    def binds(self) -> Literal["weights", "kv", "compute"]:
        """What the bound comes from; for memory, the larger part of what is read."""
        if self.compute_seconds >= self.memory_seconds:
            return "compute"
        return "weights" if self.weight_bytes >= self.kv_bytes else "kv"

    @property
    def intensity(self) -> float:
        """Operations for each byte that is read."""
        return self.operations / (self.weight_bytes + self.kv_bytes)


@dataclass(frozen=True)
class ModelWork:
    """What steps of a model must read and compute. Bytes, and operations."""

    layer_bytes: int  # weights of all layers
    head_bytes: int
    layer_operations: Operations  # for each token
    head_operations: Operations  # for each token whose successor is wanted
    key_operations: float  # for each token and key that it reads, in all layers
    kv_token_bytes: int

    @classmethod
    def of_model(cls, config: LlamaConfig, weights: LlamaWeights, kv_token_bytes: int) -> ModelWork:
        """Of a model with these weights; of the embedding one row a token is read."""
        matrices: list[Weight] = [
            matrix
            for layer in weights.layers
            for matrix in (
                *(part for part, _ in (*layer.qkv.parts, *layer.gate_up.parts)),
                *(layer.attention_output, layer.down),
            )
        ]
        return ModelWork(
            layer_bytes=sum(matrix.bytes for matrix in matrices),
            head_bytes=weights.head.bytes,
            layer_operations=_by_format(matrices),
            head_operations=_by_format([weights.head]),
            # Scores and weighted values: two times a multiplication and an addition.
            key_operations=4.0 * config.layers * config.query_heads * config.head_dim,
            kv_token_bytes=kv_token_bytes,
        )


@dataclass(frozen=True)
class StepCosts(ModelWork):
    """That, and the machine that does it."""

    peaks: MachinePeaks

    @classmethod
    def of(
        cls, config: LlamaConfig, weights: LlamaWeights, kv_token_bytes: int, peaks: MachinePeaks
    ) -> StepCosts:
        """The costs of a model with these weights on this machine."""
        return cls(**vars(ModelWork.of_model(config, weights, kv_token_bytes)), peaks=peaks)

    def decode(self, sequences: int, context: float) -> Floor:
        """A step that makes one token for each of some sequences of `context` tokens."""
        return self._floor(
            weight_bytes=self.layer_bytes + self.head_bytes,
            keys=sequences * context,
            layer_tokens=sequences,
            head_tokens=sequences,
            attended=sequences * context,
        )

    def prefill(
        self, prompt: int, token_budget: int, beside: int = 0, beside_context: float = 0.0
    ) -> Floor:
        """All steps of one prompt, from its first token to the output's first.

        `beside` others, of `beside_context` tokens, make a token in each of these steps, whose
        budget they share.
        """
        chunk = max(1, token_budget - beside)
        steps = -(-prompt // chunk)
        # Each chunk reads the keys of those before it; the last one ends at the whole prompt.
        again = chunk * steps * (steps - 1) / 2
        return self._floor(
            weight_bytes=steps * self.layer_bytes + (steps if beside else 1) * self.head_bytes,
            keys=again + steps * beside * beside_context,
            layer_tokens=prompt + steps * beside,
            head_tokens=1 + steps * beside,
            attended=prompt * (prompt + 1) / 2 + steps * beside * beside_context,
        )

    def weights_bind_until(self, context: float) -> tuple[int, Literal["kv", "compute"]]:
        """The first number of sequences with which reading the weights is not what takes longest
        in a decode step, and what is instead."""
        weights = (self.layer_bytes + self.head_bytes) / self.peaks.read_bytes_per_second
        kv = context * self.kv_token_bytes / self.peaks.read_bytes_per_second
        compute = self.decode(1, context).compute_seconds
        return math.ceil(weights / max(kv, compute)), "compute" if compute >= kv else "kv"

    def tokens_per_second_max(
        self, sequences: int, prompt: int, output: int, context: float, token_budget: int
    ) -> float:
        """Output tokens a second of all sequences, the computing of each one's prompt included."""
        step, first = self.decode(sequences, context), self.prefill(prompt, token_budget)
        steps = output - 1  # the prompt's last step makes the first token
        # Prompts can ride on steps that read the weights anyway.
        read = max(steps * step.memory_seconds, first.memory_seconds)
        computed = steps * step.compute_seconds + sequences * first.compute_seconds
        return sequences * output / max(read, computed)

    def _floor(
        self,
        *,
        weight_bytes: int,
        keys: float,
        layer_tokens: int,
        head_tokens: int,
        attended: float,
    ) -> Floor:
        kv_bytes = round(keys * self.kv_token_bytes)
        attention = attended * self.key_operations
        linear = (
            (layer_tokens, self.layer_operations),
            (head_tokens, self.head_operations),
            (1, {"f32": attention}),
        )
        return Floor(
            weight_bytes=weight_bytes,
            kv_bytes=kv_bytes,
            operations=sum(tokens * sum(each.values()) for tokens, each in linear),
            memory_seconds=(weight_bytes + kv_bytes) / self.peaks.read_bytes_per_second,
            compute_seconds=sum(
                tokens * count / self.peaks.operations(weight_format)
                for tokens, each in linear
                for weight_format, count in each.items()
            ),
        )


def _by_format(matrices: Iterable[Weight]) -> dict[str, float]:
    """Operations of one row through weights, by their format."""
    total: dict[str, float] = {}
    for matrix in matrices:
        total[matrix.format] = total.get(matrix.format, 0.0) + 2.0 * matrix.outputs * matrix.inputs
    return total
