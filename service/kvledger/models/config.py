"""The shape of a Llama-class model, and how a GGUF file's metadata says it.

Every key under the architecture's prefix must be one this page knows: a key that would change the
mathematics (rope scaling, experts, a sliding window) is refused, never ignored. How a folder's
config.json says it is in hub_config.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import structlog

from kvledger.errors import ModelRefused
from kvledger.models.json_file import shown

# How weights are kept in memory.
WeightsMode = Literal["stored", "bf16", "f32"]

_log = structlog.get_logger(__name__)

# The rotary base of the first Llama models, which files without the key mean.
_DEFAULT_ROPE_BASE = 10_000.0

# Keys of the architecture that describe the file or repeat what the tensors say.
_HARMLESS = frozenset({"vocab_size"})
_READ = frozenset(
    {
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "rope.freq_base",
        "rope.dimension_count",
        "rope.scaling.type",
        "expert_count",
    }
)


# Query heads that may share a KV head: the rows of the attention kernel (core/cpu/isa/table.h).
_GROUP_MAX = 96


@dataclass(frozen=True)
class RopeScaling:
    """How rotary embedding is stretched to a context longer than the one first trained on.

    `linear` divides all frequencies by `factor`. `llama3` divides those with wave lengths above
    original_context / low_frequency_factor, keeps those below original_context /
    high_frequency_factor, and passes smoothly from one to the other in between.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 1.0
    original_context: int = 0


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama-class model; counts unless a unit is named.

    What sets families apart are the rows at the end; their defaults are the first Llama's.
    """

    name: str
    layers: int
    hidden: int
    feed_forward: int
    query_heads: int
    kv_heads: int
    head_dim: int
    context_tokens: int
    rope_base: float
    rms_epsilon: float
    rope_scaling: RopeScaling | None = None
    # Layers, from 0, whose queries and keys are not turned by their positions.
    layers_without_rope: frozenset[int] = frozenset()
    # Whether queries, keys and values have a bias.
    qkv_bias: bool = False
    # Whether each head of queries and keys is normalized before it is turned.
    qk_norm: bool = False
    # Whether the head is the embedding; None: if there is no other in the file.
    tied_head: bool | None = None

    @property
    def cost_growth(self) -> float:
        """How much more a token costs to compute than the one before it, of what the first costs.

        The multiplications of attention for one key more, over those with the weights.
        """
        queries, keys = self.query_heads * self.head_dim, self.kv_heads * self.head_dim
        weights = self.hidden * (2 * queries + 2 * keys + 3 * self.feed_forward)
        return 2 * queries / weights

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> LlamaConfig:
        """Reads and checks the metadata of an opened file; raises ModelRefused."""
        architecture = metadata.get("general.architecture")
        if architecture != "llama":
            raise ModelRefused(
                f"the model's architecture is {shown(architecture)}; kvledger runs 'llama'"
            )
        keys = _Keys(metadata)
        keys.refuse_unknown()
        heads = keys.count("attention.head_count", 1, 1024)
        hidden = keys.count("embedding_length", 32, 1 << 17)
        head_dim = keys.count("attention.key_length", 16, 256, hidden // heads)
        config = cls(
            name=str(metadata.get("general.name") or "llama"),
            layers=keys.count("block_count", 1, 1024),
            hidden=hidden,
            feed_forward=keys.count("feed_forward_length", 32, 1 << 20),
            query_heads=heads,
            kv_heads=keys.count("attention.head_count_kv", 1, heads, heads),
            head_dim=head_dim,
            context_tokens=keys.count("context_length", 2, 1 << 24),
            rope_base=keys.rope_base(),
            rms_epsilon=keys.number("attention.layer_norm_rms_epsilon", 0.0, 1.0),
        )
        config._check(keys)
        return config

    def _check(self, keys: _Keys) -> None:
        for what, value in (
            ("attention.value_length", self.head_dim),
            ("rope.dimension_count", self.head_dim),
        ):
            found = keys.count(what, 1, 1 << 16, value)
            if found != value:
                raise ModelRefused(
                    f"llama.{what} is {found}; kvledger needs {value}, the head size"
                )
        self.check_sizes()

    def check_sizes(self) -> None:
        """ModelRefused, in one sentence, if the sizes do not fit each other or the kernels."""
        if self.query_heads % self.kv_heads != 0:
            raise ModelRefused(
                f"{self.query_heads} query heads cannot share {self.kv_heads} KV heads equally"
            )
        if self.query_heads // self.kv_heads > _GROUP_MAX:
            raise ModelRefused(
                f"{self.query_heads // self.kv_heads} query heads share a KV head; "
                f"kvledger's kernels take {_GROUP_MAX} at most"
            )
        if self.head_dim % 16 != 0:
            raise ModelRefused(
                f"heads have {self.head_dim} dimensions; kvledger's kernels need a multiple of 16"
            )
        for what, size in (
            ("the hidden size", self.hidden),
            ("the size of the feed-forward part", self.feed_forward),
            ("the number of query heads times their size", self.query_heads * self.head_dim),
        ):
            if size % 32 != 0:
                raise ModelRefused(f"{what} is {size}; kvledger's kernels need a multiple of 32")


class _Keys:
    """Typed access to the keys under `llama.`."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self._values = {
            key.removeprefix("llama."): value
            for key, value in metadata.items()
            if key.startswith("llama.")
        }

    def refuse_unknown(self) -> None:
        unknown = sorted(set(self._values) - _READ - _HARMLESS)
        if unknown:
            raise ModelRefused(
                f"llama.{unknown[0]} is set, and kvledger does not know what it means"
            )
        scaling = self._values.get("rope.scaling.type", "none")
        if scaling != "none":
            raise ModelRefused(
                f"llama.rope.scaling.type is {shown(scaling)}; kvledger scales no rotary embedding"
            )
        if self._values.get("expert_count", 0) != 0:
            raise ModelRefused("the model has experts; kvledger runs dense models")

    def count(self, key: str, least: int, most: int, default: int | None = None) -> int:
        value = self._values.get(key, default)
        if value is None:
            raise ModelRefused(f"llama.{key} is missing")
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelRefused(f"llama.{key} is not a whole number")
        if not least <= value <= most:
            raise ModelRefused(f"llama.{key} is {value}, outside {least} to {most}")
        return value

    def number(self, key: str, above: float, below: float) -> float:
        value = self._values.get(key)
        if value is None:
            raise ModelRefused(f"llama.{key} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelRefused(f"llama.{key} is not a number")
        if not above < value < below:
            raise ModelRefused(f"llama.{key} is {value}, outside {above} to {below}")
        return float(value)

    def rope_base(self) -> float:
        if "rope.freq_base" not in self._values:
            _log.warning("rope_base_missing", using=_DEFAULT_ROPE_BASE)
            return _DEFAULT_ROPE_BASE
        return self.number("rope.freq_base", 1.0, 1e12)
