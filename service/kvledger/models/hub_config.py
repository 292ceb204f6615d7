"""The shape of a Llama-class model, read from the config.json of a model's folder.

A family is a row of differences from the first Llama. Every key of the file must be known, to be
read or to change nothing: a key that nobody looked at may be the one that changes the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import structlog

from kvledger.errors import ModelRefused
from kvledger.models.config import LlamaConfig, RopeScaling
from kvledger.models.json_file import shown

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Family:
    """What sets a family apart. Defaults stand for keys that its config.json leaves out."""

    architecture: str
    qkv_bias: bool = False
    qk_norm: bool = False
    rope_base: float = 10_000.0
    head_dim: int | None = None  # None: the hidden size shared among the query heads
    tied_head: bool = False
    # Whether layers may see a window of the context: in all layers, or where a flag and the kinds
    # of the layers say so.
    window: Literal["none", "all", "some"] = "none"
    window_tokens: int | None = None
    has_layers_without_rope: bool = False


FAMILIES = {
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM", window="all", window_tokens=4096),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, window="some", window_tokens=4096),
    "qwen3": Family(
        "Qwen3ForCausalLM", qk_norm=True, head_dim=128, window="some", window_tokens=4096
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        rope_base=2_000_000.0,
        tied_head=True,
        window="some",
        has_layers_without_rope=True,
    ),
}

_READ = frozenset(
    {
        *("model_type", "architectures", "vocab_size", "hidden_size", "intermediate_size"),
        *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
        *("max_position_embeddings", "rms_norm_eps", "hidden_act", "tie_word_embeddings"),
        *("rope_theta", "rope_scaling", "rope_parameters"),
        # Read elsewhere: what ends an answer.
        "eos_token_id",
    }
)
_READ_FOR_WINDOW = {
    "none": frozenset[str](),
    "all": frozenset({"sliding_window"}),
    "some": frozenset({"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}),
}
_READ_FOR_ROPE_LAYERS = frozenset({"no_rope_layers", "no_rope_layer_interval"})

# Keys about training, files, other programs, or a way of computing that gives the same result.
_HARMLESS = frozenset(
    {
        *("torch_dtype", "dtype", "transformers_version", "_name_or_path"),
        *("bos_token_id", "pad_token_id"),  # what begins a text is up to the tokenizer
        *("initializer_range", "attention_dropout", "pretraining_tp", "is_llama_config"),
        *("use_cache", "transformers.js_config", "unsloth_fixed", "unsloth_version"),
        *("max_length", "do_sample", "temperature", "top_p"),
        *("_attn_implementation_autoset", "chunk_size_feed_forward", "return_dict"),
        *("output_attentions", "output_hidden_states", "torchscript", "id2label", "label2id"),
    }
)
# Keys that change the result unless they have this value, which all models here are known with.
_ONLY = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "rope_interleaved": False,
    "use_mrope": False,
    "add_cross_attention": False,
    "is_encoder_decoder": False,
}


def llama_config(values: Mapping[str, object], name: str) -> tuple[LlamaConfig, int]:
    """The configuration of a model and the number of its embeddings, from config.json.

    `name` is what the model is called. Raises ModelRefused, in one sentence, for a family, a key
    or a value that kvledger does not compute.
    """
    kind = values.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise ModelRefused(
            f"config.json: model_type is {shown(kind)}; kvledger runs {', '.join(FAMILIES)}"
        )
    keys = _Keys(values)
    keys.refuse_unknown(family)
    heads = keys.count("num_attention_heads", 1, 1024)
    hidden = keys.count("hidden_size", 32, 1 << 17)
    layers = keys.count("num_hidden_layers", 1, 1024)
    base, scaling = _rope(keys, family)
    config = LlamaConfig(
        name=name,
        layers=layers,
        hidden=hidden,
        feed_forward=keys.count("intermediate_size", 32, 1 << 20),
        query_heads=heads,
        kv_heads=keys.count("num_key_value_heads", 1, heads, heads),
        head_dim=keys.count("head_dim", 16, 256, family.head_dim or hidden // heads),
        context_tokens=_context(keys, family, layers),
        rope_base=base,
        rms_epsilon=keys.number("rms_norm_eps", 0.0, 1.0),
        rope_scaling=scaling,
        layers_without_rope=_layers_without_rope(keys, family, layers),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        tied_head=keys.flag("tie_word_embeddings", family.tied_head),
    )
    config.check_sizes()
    return config, keys.count("vocab_size", 2, 1 << 24)


class _Keys:
    """Typed access to an object of config.json. A key that is null counts as left out."""

    def __init__(self, values: Mapping[str, object], prefix: str = "") -> None:
        self._values = {key: value for key, value in values.items() if value is not None}
        self._nulls = values.keys() - self._values.keys()
        self._prefix = prefix

    def refuse_unknown(self, family: Family) -> None:
        known = _READ | _HARMLESS | _ONLY.keys() | _READ_FOR_WINDOW[family.window]
        if family.has_layers_without_rope:
            known |= _READ_FOR_ROPE_LAYERS
        self.refuse_others(known)
        for key, only in _ONLY.items():
            value = self._values.get(key, only)
            if value != only or isinstance(value, bool) != isinstance(only, bool):
                raise ModelRefused(
                    f"config.json: {key} is {shown(value)}; kvledger computes only {shown(only)}"
                )
        architectures = self._values.get("architectures", [family.architecture])
        if architectures != [family.architecture]:
            raise ModelRefused(
                f"config.json: architectures is not [{family.architecture!r}]: "
                f"the folder holds no language model of this family"
            )

    def refuse_others(self, known: frozenset[str]) -> None:
        unknown = sorted(self._values.keys() - known)
        if unknown:
            raise ModelRefused(
                f"config.json: {self._prefix}{_plain(unknown[0])} is set, "
                f"and kvledger does not know what it means for this model"
            )

    def get(self, key: str) -> object:
        return self._values.get(key)

    def is_null(self, key: str) -> bool:
        return key in self._nulls

    def entries(self, key: str, length: int) -> list[object] | None:
        value = self._values.get(key)
        if value is not None and (not isinstance(value, list) or len(value) != length):
            raise ModelRefused(f"config.json: {key} is not a list with one entry a layer")
        return value

    def text(self, key: str, default: str) -> str:
        value = self._values.get(key, default)
        if not isinstance(value, str):
            raise ModelRefused(f"config.json: {self._prefix}{key} is not a text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._values.get(key, default)
        if not isinstance(value, bool):
            raise ModelRefused(f"config.json: {self._prefix}{key} is neither true nor false")
        return value

    def count(self, key: str, least: int, most: int, default: int | None = None) -> int:
        value = self._values.get(key, default)
        if value is None:
            raise ModelRefused(f"config.json: {self._prefix}{key} is missing")
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelRefused(f"config.json: {self._prefix}{key} is not a whole number")
        if not least <= value <= most:
            raise ModelRefused(
                f"config.json: {self._prefix}{key} is {shown(value)}, outside {least} to {most}"
            )
        return value

    def number(self, key: str, above: float, below: float, default: float | None = None) -> float:
        value = self._values.get(key, default)
        if value is None:
            raise ModelRefused(f"config.json: {self._prefix}{key} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelRefused(f"config.json: {self._prefix}{key} is not a number")
        if not above < value < below:
            raise ModelRefused(
                f"config.json: {self._prefix}{key} is {shown(value)}, outside {above} to {below}"
            )
        return float(value)

    def inner(self, key: str) -> _Keys | None:
        value = self._values.get(key)
        if value is not None and not isinstance(value, dict):
            raise ModelRefused(f"config.json: {key} is not an object")
        return None if value is None else _Keys(value, f"{key}.")


def _rope(keys: _Keys, family: Family) -> tuple[float, RopeScaling | None]:
    """Base and scaling of rotary embedding.

    Older files have rope_theta and rope_scaling, newer ones both in rope_parameters.
    """
    base = keys.number("rope_theta", 1.0, 1e12, family.rope_base)
    older, newer = keys.inner("rope_scaling"), keys.inner("rope_parameters")
    if older is not None and newer is not None:
        raise ModelRefused("config.json: rope_scaling and rope_parameters are both set")
    scaling = older or newer
    if scaling is None:
        return base, None
    inner = scaling.number("rope_theta", 1.0, 1e12, base)
    if keys.get("rope_theta") is not None and inner != base:
        raise ModelRefused("config.json: rope_theta is given twice, with two values")
    return inner, _scaling(scaling)


def _scaling(keys: _Keys) -> RopeScaling | None:
    partial = keys.number("partial_rotary_factor", 0.0, 1e3, 1.0)
    if partial != 1.0:
        raise ModelRefused(
            f"config.json: partial_rotary_factor is {partial}; kvledger turns whole heads"
        )
    kind = keys.text("rope_type", keys.text("type", "default"))
    common = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
    if kind == "default":
        keys.refuse_others(common)
        return None
    if kind == "linear":
        keys.refuse_others(common | {"factor"})
        return RopeScaling("linear", keys.number("factor", 0.0, 1e6))
    if kind != "llama3":
        raise ModelRefused(
            f"config.json: the rope scaling is {shown(kind)}; kvledger knows 'linear' and 'llama3'"
        )
    factors = ("factor", "low_freq_factor", "high_freq_factor")
    keys.refuse_others(common | {*factors, "original_max_position_embeddings"})
    factor, low, high = (keys.number(name, 0.0, 1e6) for name in factors)
    if low >= high:
        raise ModelRefused(
            f"config.json: rope's low_freq_factor {low} is not below its high_freq_factor {high}"
        )
    context = keys.count("original_max_position_embeddings", 1, 1 << 24)
    return RopeScaling("llama3", factor, low, high, context)


def _context(keys: _Keys, family: Family, layers: int) -> int:
    """Most tokens of a sequence: the model's, or its sliding window if that is less.

    Up to the window, a window hides nothing, so the model is computed exactly. Beyond it, kvledger
    would show tokens to layers that were trained without.
    """
    context = keys.count("max_position_embeddings", 2, 1 << 24)
    window = _window(keys, family, layers)
    if window is None or window >= context:
        return context
    _log.warning("context_capped_at_sliding_window", window=window, context=context)
    return window


def _window(keys: _Keys, family: Family, layers: int) -> int | None:
    """The sliding window of any layer, None if all layers see everything."""
    if family.window == "none":
        return None
    if family.window == "some":
        used = keys.flag("use_sliding_window", False)
        kinds = keys.entries("layer_types", layers)
        known = ("full_attention", "sliding_attention") if used else ("full_attention",)
        for kind in kinds or ():
            if kind not in known:
                raise ModelRefused(
                    f"config.json: layer_types has {shown(kind)}; kvledger computes full attention"
                )
        if not used:
            return None
    if keys.is_null("sliding_window"):
        return None
    if keys.get("sliding_window") is None and family.window_tokens is None:
        return None
    return keys.count("sliding_window", 2, 1 << 24, family.window_tokens)


def _layers_without_rope(keys: _Keys, family: Family, layers: int) -> frozenset[int]:
    if not family.has_layers_without_rope:
        return frozenset()
    flags = keys.entries("no_rope_layers", layers)
    if flags is None:
        interval = keys.count("no_rope_layer_interval", 1, 1 << 20, 4)
        return frozenset(range(interval - 1, layers, interval))
    if any(flag not in (0, 1) for flag in flags):
        raise ModelRefused("config.json: no_rope_layers is not a list of 0 and 1")
    return frozenset(layer for layer, flag in enumerate(flags) if flag == 0)


def _plain(key: str) -> str:
    """A key of a file for an operator's eyes."""
    return shown(key).strip("'")
