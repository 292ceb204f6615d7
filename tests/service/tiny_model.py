"""Tiny Llama models with random weights, as GGUF files and as transformers' own models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

CONTROL_TOKENS = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class TinyShape:
    """Sizes of a tiny model; its vocabulary is every byte, "th" and the control tokens."""

    layers: int = 2
    hidden: int = 64
    feed_forward: int = 96
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    context: int = 512
    rope_base: float = 10_000.0
    tied: bool = True

    @property
    def vocabulary(self) -> int:
        return 257 + len(CONTROL_TOKENS)


Weights = dict[str, npt.NDArray[np.float32]]


def random_weights(shape: TinyShape, seed: int) -> Weights:
    """Weights by the names that transformers uses, rows in its order."""
    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> npt.NDArray[np.float32]:
        return (random.standard_normal((rows, columns)) * columns**-0.5).astype(np.float32)

    def norm() -> npt.NDArray[np.float32]:
        return (1.0 + 0.1 * random.standard_normal(shape.hidden)).astype(np.float32)

    width = shape.heads * shape.head_dim
    kv = shape.kv_heads * shape.head_dim
    weights: Weights = {"model.embed_tokens.weight": 2 * matrix(shape.vocabulary, shape.hidden)}
    for i in range(shape.layers):
        name = f"model.layers.{i}."
        weights[name + "input_layernorm.weight"] = norm()
        weights[name + "self_attn.q_proj.weight"] = 2 * matrix(width, shape.hidden)
        weights[name + "self_attn.k_proj.weight"] = 2 * matrix(kv, shape.hidden)
        weights[name + "self_attn.v_proj.weight"] = matrix(kv, shape.hidden)
        weights[name + "self_attn.o_proj.weight"] = matrix(shape.hidden, width)
        weights[name + "post_attention_layernorm.weight"] = norm()
        weights[name + "mlp.gate_proj.weight"] = matrix(shape.feed_forward, shape.hidden)
        weights[name + "mlp.up_proj.weight"] = matrix(shape.feed_forward, shape.hidden)
        weights[name + "mlp.down_proj.weight"] = matrix(shape.hidden, shape.feed_forward)
    weights["model.norm.weight"] = norm()
    if not shape.tied:
        weights["lm_head.weight"] = matrix(shape.vocabulary, shape.hidden)
    return weights


_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


def gguf_name(name: str) -> str:
    """What GGUF calls one of transformers' tensors."""
    if name in _NAMES:
        return _NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest]}"


def _interleaved(matrix: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Rows in the order in which GGUF keeps queries and keys of Llama models."""
    rows, columns = matrix.shape
    halves = matrix.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))


def write_gguf(
    path: Path,
    shape: TinyShape | None = None,
    *,
    seed: int = 0,
    weights: Weights | None = None,
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    changes: Mapping[str, Any] | None = None,
    without: str | None = None,
    extra: Mapping[str, npt.NDArray[np.float32]] | None = None,
) -> Path:
    """Writes a model file.

    `changes` replaces metadata by key, None leaves the key out; `without` leaves a tensor out and
    `extra` adds some, by their names in the file.
    """
    shape = TinyShape() if shape is None else shape
    weights = random_weights(shape, seed) if weights is None else weights
    writer = gguf.GGUFWriter(str(path), "llama")
    metadata: dict[str, Any] = {
        "general.name": "tiny",
        "llama.block_count": np.uint32(shape.layers),
        "llama.context_length": np.uint32(shape.context),
        "llama.embedding_length": np.uint32(shape.hidden),
        "llama.feed_forward_length": np.uint32(shape.feed_forward),
        "llama.attention.head_count": np.uint32(shape.heads),
        "llama.attention.head_count_kv": np.uint32(shape.kv_heads),
        "llama.attention.key_length": np.uint32(shape.head_dim),
        "llama.rope.freq_base": np.float32(shape.rope_base),
        "llama.attention.layer_norm_rms_epsilon": np.float32(1e-5),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.eos_token_id": np.uint32(257),
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
    metadata.update(changes or {})
    for key, value in metadata.items():
        _add(writer, key, value)
    writer.add_token_list([*byte_letters(), "th", *CONTROL_TOKENS])
    writer.add_token_types([1] * 257 + [3] * len(CONTROL_TOKENS))
    writer.add_token_merges(["t h"])
    for name, tensor in weights.items():
        stored = gguf_name(name)
        if stored == without:
            continue
        if ".q_proj" in name:
            tensor = _interleaved(tensor, shape.heads)
        elif ".k_proj" in name:
            tensor = _interleaved(tensor, shape.kv_heads)
        if tensor.ndim == 2 and quantization != gguf.GGMLQuantizationType.F32:
            data = gguf.quants.quantize(tensor, quantization)
            writer.add_tensor(stored, data, raw_dtype=quantization)
        else:
            writer.add_tensor(stored, tensor)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, float | np.floating):
        writer.add_float32(key, float(value))
    else:
        writer.add_uint32(key, int(value))


def byte_letters() -> list[str]:
    """The letters of byte-level BPE, in the order of their bytes."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    return [
        chr(byte) if byte in printing else chr(0x100 + others.index(byte)) for byte in range(256)
    ]


def transformers_model(shape: TinyShape, weights: Weights) -> Any:
    """The same model as transformers computes it, float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.context,
        rope_theta=shape.rope_base,
        rms_norm_eps=1e-5,
        tie_word_embeddings=shape.tied,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).float().eval()
    tensors = {name: torch.from_numpy(tensor) for name, tensor in weights.items()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    return model
