"""Tiny models of every family as transformers saves them: folders with safetensors."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tiny_model import CHAT_TEMPLATE, CONTROL_TOKENS, byte_letters

VOCABULARY = 257 + len(CONTROL_TOKENS)
# More embeddings than tokens, as several families have.
EMBEDDINGS = VOCABULARY + 3
END = 257


@dataclass(frozen=True)
class HubShape:
    """A tiny model of a family; `changes` are keys of transformers' own configuration."""

    family: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    tied: bool = False

    def __str__(self) -> str:
        return "-".join([self.family, *("tied" if self.tied else "",), *self.changes])


_CLASSES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "smollm3": "SmolLM3",
}


def hub_model(shape: HubShape, seed: int = 0) -> Any:
    """A float32 model of transformers with random weights, norms and biases included."""
    import transformers

    name = _CLASSES[shape.family]
    keys: dict[str, Any] = {
        "vocab_size": EMBEDDINGS,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": None,
        "eos_token_id": END,
        "pad_token_id": None,
        "attn_implementation": "eager",
    }
    if shape.family in ("qwen2", "smollm3"):
        del keys["head_dim"]
    keys.update(shape.changes)
    config = getattr(transformers, f"{name}Config")(**keys)
    model = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            values = torch.randn(weight.shape, generator=generator)
            if weight.dim() == 1:
                values = 0.3 * values + (0.0 if weight_name.endswith("bias") else 1.0)
            else:
                # Attention that looks at few tokens, or a wrong order of them would not show.
                sharp = 2.0 if any(n in weight_name for n in ("q_proj", "k_proj", "embed")) else 1.0
                values = values * sharp * weight.shape[1] ** -0.5
            weight.copy_(values)
    return model


def save_folder(
    folder: Path,
    model: Any,
    *,
    dtype: torch.dtype = torch.float32,
    shard_bytes: int | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Path:
    """Saves a model and a tokenizer; `changes` replaces keys of config.json, ... removes them."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    size = {} if shard_bytes is None else {"max_shard_size": shard_bytes}
    model.to(dtype).save_pretrained(folder, **size)
    write_tokenizer(folder)
    change_json(folder / "config.json", changes or {})
    return folder


def change_json(path: Path, changes: Mapping[str, Any]) -> None:
    """Replaces keys of a JSON object, or removes those that are given as ... ."""
    values = json.loads(path.read_text("utf-8")) if path.exists() else {}
    values.update(changes)
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not ...}), "utf-8")


def tokenizer_rules(control: Sequence[str] = CONTROL_TOKENS, **changes: Any) -> dict[str, Any]:
    """tokenizer.json of byte-level BPE: every byte, "th", and control tokens."""
    vocab = {letter: token_id for token_id, letter in enumerate([*byte_letters(), "th"])}
    rules: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": 257 + place,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for place, text in enumerate(control)
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [["t", "h"]],
        },
    }
    rules.update(changes)
    return rules


def write_tokenizer(folder: Path) -> None:
    """The tokenizer's files of a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_rules()), "utf-8")
    config = {"eos_token": CONTROL_TOKENS[0], "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
