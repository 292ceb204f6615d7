"""A small Llama with random weights, for what depends on how a server works, not on what it says.

Its answers are noise. A prompt costs it so little that thousands can be sent in minutes, and yet
enough that a beginning that need not be computed shows.
"""

from __future__ import annotations

import logging
from pathlib import Path

LAYERS, HIDDEN, FEED_FORWARD, HEADS, KV_HEADS = 2, 128, 256, 2, 1
# Most ids stand for nothing. With few of them, prompts would begin alike by chance.
VOCABULARY = 32_000
CONTEXT = 4096
SEED = 1
DESCRIBED = (
    f"a random Llama: {LAYERS} layers, hidden size {HIDDEN}, feed-forward {FEED_FORWARD}, "
    f"{HEADS} heads, {KV_HEADS} for keys and values, {VOCABULARY} ids, float32, seed {SEED}"
)


def write_random_model(folder: Path) -> Path:
    """Writes the model as transformers does, with a tokenizer of single bytes; returns `folder`.

    ImportError where transformers is missing.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    logging.getLogger("transformers").setLevel(logging.ERROR)
    end = _write_tokenizer(folder)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=FEED_FORWARD,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HIDDEN // HEADS,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        LlamaForCausalLM(config).float().save_pretrained(folder)
    return folder


def _write_tokenizer(folder: Path) -> int:
    """tokenizer.json of byte-level BPE without merges; returns the id that ends an answer."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: place for place, letter in enumerate(letters)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}', "utf-8")
    return len(letters)
