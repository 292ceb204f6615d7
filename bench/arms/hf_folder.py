"""A GGUF file of the llama architecture as a folder that Hugging Face's loaders read.

    python -m bench.arms.hf_folder MODEL.gguf FOLDER

Weights become bf16 (a quantized weight is multiplied out, then rounded once); the tokenizer and the
chat template are the file's own. For peers that do not read GGUF files.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

Metadata = dict[str, Any]

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_CONTROL_TOKEN = 3  # in tokenizer.ggml.token_type


def hf_name(name: str) -> str:
    """The name that transformers gives a tensor. Raises KeyError for one it does not have."""
    stem = name.removesuffix(".weight")
    if stem.startswith("blk."):
        _, layer, part = stem.split(".", 2)
        return f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"
    return f"{_OUTER_NAMES[stem]}.weight"


def unpermuted(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Rows of queries or keys in transformers' order: halves of a head, not pairs.

    GGUF files of this architecture turn neighbouring rows, transformers rows half a head apart.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bits of the nearest bf16 numbers, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def tensors(
    reader: gguf.GGUFReader, metadata: Metadata
) -> Iterator[tuple[str, npt.NDArray[np.uint16]]]:
    """All tensors by transformers' names, as bf16 bits."""
    heads = {
        "attn_q": metadata["llama.attention.head_count"],
        "attn_k": metadata["llama.attention.head_count_kv"],
    }
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        part = tensor.name.split(".")[-2]
        if part in heads:
            values = unpermuted(values, heads[part])
        yield hf_name(tensor.name), to_bf16(values)


def write_safetensors(path: Path, items: list[tuple[str, npt.NDArray[np.uint16]]]) -> None:
    """A safetensors file: length of the header, header, data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, values in items:
        end = offset + values.nbytes
        header[name] = {"dtype": "BF16", "shape": values.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, values in items:
            file.write(values.tobytes())


def config(metadata: Metadata, tied: bool) -> Metadata:
    """config.json."""
    heads = metadata["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": metadata["llama.embedding_length"] // heads,
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": metadata["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": metadata["llama.rope.freq_base"],
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
    }


def tokenizer(metadata: Metadata) -> Tokenizer:
    """The file's byte-level BPE vocabulary."""
    kind = metadata["tokenizer.ggml.pre"]
    if kind != "smollm":
        raise SystemExit(f"tokenizer.ggml.pre is {kind!r}; this script knows smollm only")
    words = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    control = [word for word, kind in zip(words, types, strict=True) if kind == _CONTROL_TOKEN]
    made.add_special_tokens([AddedToken(word, special=True) for word in control])
    return made


def write_folder(model: Path, folder: Path) -> None:
    """Writes the folder; its config.json comes last, so a folder that has one is whole."""
    reader = gguf.GGUFReader(model)
    metadata = {name: entry.contents() for name, entry in reader.fields.items()}
    if metadata["general.architecture"] != "llama":
        raise SystemExit(f"{model.name} is no model of the llama architecture")
    folder.mkdir(parents=True, exist_ok=True)
    items = list(tensors(reader, metadata))
    write_safetensors(folder / "model.safetensors", items)
    tokenizer(metadata).save(str(folder / "tokenizer.json"))
    words = metadata["tokenizer.ggml.tokens"]
    about_tokens = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": words[metadata["tokenizer.ggml.bos_token_id"]],
        "eos_token": words[metadata["tokenizer.ggml.eos_token_id"]],
        "pad_token": words[metadata["tokenizer.ggml.padding_token_id"]],
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata.get("tokenizer.chat_template", ""),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about_tokens, indent=1))
    tied = all(name != "lm_head.weight" for name, _ in items)
    (folder / "config.json").write_text(json.dumps(config(metadata, tied), indent=1))


if __name__ == "__main__":
    write_folder(Path(sys.argv[1]), Path(sys.argv[2]))
