"""The Llama class against transformers, on tiny models with random weights."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from stepping import logits_after, served
from tiny_model import TinyShape, random_weights, transformers_model, write_gguf

from kvledger.errors import ModelRefused
from kvledger.models.config import LlamaConfig

SHAPES = [
    TinyShape(),
    TinyShape(tied=False, rope_base=500_000.0),
    TinyShape(heads=6, kv_heads=2, head_dim=32, hidden=96, layers=3),
    TinyShape(heads=2, kv_heads=2, head_dim=80),
    TinyShape(heads=9, kv_heads=3, head_dim=64, hidden=288),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("budget", [1, 7, 16, 256])
def test_logits_equal_transformers(tmp_path: Path, shape: TinyShape, budget: int) -> None:
    """A wrong permutation, rotation, norm or mask would give other logits than the reference."""
    weights = random_weights(shape, seed=budget)
    reference = transformers_model(shape, weights)
    model = served(
        write_gguf(tmp_path / "tiny.gguf", shape, weights=weights),
        *("--token-budget", str(budget), "--max-sequences", "1", "--kv-format", "f32"),
    )
    random = np.random.default_rng(1)
    for length in (1, 2, 15, 16, 17, 31, 32, 33, 70):
        prompt = random.integers(0, shape.vocabulary, length).tolist()
        with torch.no_grad():
            expected = reference(torch.tensor([prompt])).logits[0, -1]
        assert (logits_after(model, prompt) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("kernels", ["core", "torch"])
@pytest.mark.parametrize("kv_format", ["f32", "bf16"])
@pytest.mark.parametrize("block_tokens", [8, 32])
def test_core_and_torch_kernels_agree(
    tmp_path: Path, kernels: str, kv_format: str, block_tokens: int
) -> None:
    """The reference would be no help in doubt if it read the KV memory in another layout."""
    path = write_gguf(tmp_path / "tiny.gguf", TinyShape(heads=6, head_dim=32))
    arguments = ("--kv-format", kv_format, "--block-tokens", str(block_tokens))
    core = served(path, *arguments)
    other = served(path, *arguments, "--kernels", kernels, "--token-budget", "64")
    prompt = np.random.default_rng(2).integers(0, 256, 75).tolist()
    difference = (logits_after(core, prompt) - logits_after(other, prompt)).abs().max()
    assert difference < (2e-2 if kv_format == "bf16" and kernels == "torch" else 1e-4)


@pytest.mark.parametrize("stored", ["Q8_0", "Q4_0", "Q4_1", "F16", "BF16"])
def test_stored_weights_give_the_same_bits_as_their_floats(tmp_path: Path, stored: str) -> None:
    """`--weights stored` must be the model itself, not nearly the model."""
    quantization = gguf.GGMLQuantizationType[stored]
    path = write_gguf(tmp_path / "tiny.gguf", quantization=quantization)
    prompt = list(b"What is kept is kept exactly.")
    as_stored = logits_after(served(path), prompt)
    as_floats = logits_after(served(path, "--weights", "f32"), prompt)
    assert torch.equal(as_stored, as_floats)


def test_bf16_weights_are_rounded_to_nearest(tmp_path: Path) -> None:
    """Weights that were rounded twice, or cut off, would lie further from the model."""
    exact = write_gguf(tmp_path / "exact.gguf")
    rounded = write_gguf(tmp_path / "rounded.gguf", quantization=gguf.GGMLQuantizationType.BF16)
    prompt = list(b"Nearly.")
    ours = logits_after(served(exact, "--weights", "bf16"), prompt)
    assert torch.equal(ours, logits_after(served(rounded), prompt))
    assert not torch.equal(ours, logits_after(served(exact), prompt))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"general.architecture": "qwen2"}, "architecture is 'qwen2'"),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.block_count": "two"}, "not a whole number"),
        ({"llama.block_count": 0}, "outside 1 to"),
        ({"llama.block_count": 3}, "blk.2.attn_norm.weight is missing"),
        ({"llama.attention.head_count_kv": 3}, "cannot share"),
        ({"llama.attention.key_length": 24}, "multiple of 16"),
        ({"llama.attention.value_length": 32}, "value_length is 32"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count is 8"),
        ({"llama.rope.scaling.type": "yarn"}, "scaling.type is 'yarn'"),
        ({"llama.rope.freq_base": "many"}, "not a number"),
        ({"llama.expert_count": 8}, "experts"),
        ({"llama.attention.sliding_window": 4096}, "does not know"),
        ({"llama.attention.layer_norm_rms_epsilon": 0.0}, "outside"),
        ({"llama.embedding_length": 96}, "expected (261, 96)"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer"),
        ({"tokenizer.ggml.pre": "unheard-of"}, "pre"),
    ],
)
def test_what_it_does_not_know_is_refused(
    tmp_path: Path, changes: dict[str, object], reason: str
) -> None:
    """A model that is nearly a Llama would be computed wrongly, without a word."""
    path = write_gguf(tmp_path / "tiny.gguf", changes=changes)
    with pytest.raises(ModelRefused) as refused:
        served(path)
    assert reason in str(refused.value)


def test_a_missing_rope_base_is_the_documented_default(tmp_path: Path) -> None:
    """Files without the key mean 10000; anything else would garble long prompts."""
    prompt = list(range(60))
    given = served(write_gguf(tmp_path / "given.gguf"))
    missing = served(write_gguf(tmp_path / "missing.gguf", changes={"llama.rope.freq_base": None}))
    assert torch.equal(logits_after(given, prompt), logits_after(missing, prompt))


def test_a_missing_tensor_is_refused(tmp_path: Path) -> None:
    """A model without one of its matrices must not start."""
    path = write_gguf(tmp_path / "tiny.gguf", without="blk.1.ffn_up.weight")
    with pytest.raises(ModelRefused, match=r"blk\.1\.ffn_up\.weight is missing"):
        served(path)


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "rope_freqs.weight", "extra"])
def test_a_tensor_nobody_reads_is_refused(tmp_path: Path, name: str) -> None:
    """A scaling table or a bias that is ignored changes the model."""
    path = write_gguf(tmp_path / "tiny.gguf", extra={name: np.zeros(64, np.float32)})
    with pytest.raises(ModelRefused, match=f"{name} is not part"):
        served(path)


@pytest.mark.parametrize("keep", [0, 3, 100, 5000, -1])
def test_a_file_that_was_cut_is_refused(tmp_path: Path, keep: int) -> None:
    """A download that broke off must be named, not half loaded."""
    path = write_gguf(tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelRefused, match="not a GGUF to trust"):
        served(path)


def test_a_path_that_is_no_file_is_refused(tmp_path: Path) -> None:
    """A misspelt path must be named, with what would have been right."""
    with pytest.raises(ModelRefused, match="neither a file nor a known model"):
        served(tmp_path / "missing.gguf")


def test_deep_tokens_cost_more_by_what_attention_adds() -> None:
    """The cache would keep blocks that cost little, or take all for the same."""
    config = LlamaConfig(
        name="smollm2-135m",
        layers=30,
        hidden=576,
        feed_forward=1536,
        query_heads=9,
        kv_heads=3,
        head_dim=64,
        context_tokens=8192,
        rope_base=100_000.0,
        rms_epsilon=1e-5,
    )
    # As core/reuse_policy.h has it for this model: the cost doubles at some 3,070 tokens.
    assert 1 / config.cost_growth == pytest.approx(3070, rel=0.01)
