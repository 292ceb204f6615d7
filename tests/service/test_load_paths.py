"""Every way in which weights come into memory, measured by the model's own perplexity (B103)."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hub_models import change_json, write_tokenizer
from stepping import logits_after, served
from tiny_model import TinyShape, Weights, random_weights, transformers_model, write_gguf

SHAPE = TinyShape()
Kind = gguf.GGMLQuantizationType


@pytest.fixture(scope="module")
def weights() -> Weights:
    return random_weights(SHAPE, 3)


@pytest.fixture(scope="module")
def text(weights: Weights) -> list[int]:
    """What the model says by another implementation: a text that it finds likely."""
    model = transformers_model(SHAPE, weights)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        said = model.generate(
            torch.tensor([[72, 101, 108, 108, 111]]),
            max_new_tokens=40,
            do_sample=True,
            temperature=0.6,
            pad_token_id=0,
            eos_token_id=None,
        )
    return [int(token) for token in said[0]]


def perplexity(path: Path, text: list[int], *arguments: str) -> float:
    """Of the text's tokens after the fifth, each given those before it."""
    model = served(path, "--kv-format", "f32", *arguments)
    lost = [
        -float(logits_after(model, text[:place]).log_softmax(-1)[text[place]])
        for place in range(5, len(text))
    ]
    return math.exp(sum(lost) / len(lost))


def reference(weights: Weights, text: list[int]) -> float:
    """The same by transformers, in float32."""
    with torch.no_grad():
        logits = transformers_model(SHAPE, weights)(torch.tensor([text])).logits[0]
    lost = -logits.log_softmax(-1)[torch.arange(4, len(text) - 1), torch.tensor(text[5:])]
    return math.exp(float(lost.mean()))


def as_gguf(kind: gguf.GGMLQuantizationType) -> Callable[[Path, Weights], Path]:
    return lambda folder, weights: write_gguf(
        folder / "m.gguf", SHAPE, weights=weights, quantization=kind
    )


def as_folder(dtype: torch.dtype) -> Callable[[Path, Weights], Path]:
    def write(folder: Path, weights: Weights) -> Path:
        transformers_model(SHAPE, weights).to(dtype).save_pretrained(folder / "m")
        write_tokenizer(folder / "m")
        for name in ("config.json", "generation_config.json"):
            change_json(folder / "m" / name, {"eos_token_id": 257, "bos_token_id": ...})
        return folder / "m"

    return write


def kept(weights: Weights, kind: gguf.GGMLQuantizationType) -> Weights:
    """What a format keeps of the matrices."""
    return {
        name: gguf.quants.dequantize(gguf.quants.quantize(tensor, kind), kind).astype(np.float32)
        if tensor.ndim == 2
        else tensor
        for name, tensor in weights.items()
    }


_PATHS = {
    "gguf f32": (as_gguf(Kind.F32), Kind.F32),
    "gguf f16": (as_gguf(Kind.F16), Kind.F16),
    "gguf bf16": (as_gguf(Kind.BF16), Kind.BF16),
    "gguf q8_0": (as_gguf(Kind.Q8_0), Kind.Q8_0),
    "gguf q4_0": (as_gguf(Kind.Q4_0), Kind.Q4_0),
    "gguf q4_1": (as_gguf(Kind.Q4_1), Kind.Q4_1),
    "safetensors f32": (as_folder(torch.float32), Kind.F32),
    "safetensors f16": (as_folder(torch.float16), Kind.F16),
    "safetensors bf16": (as_folder(torch.bfloat16), Kind.BF16),
}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *((name, "stored") for name in _PATHS),
        *(("gguf q4_1", "f32"), ("gguf q8_0", "bf16"), ("safetensors f16", "bf16")),
    ],
)
def test_every_load_path_gives_the_same_model(
    name: str, mode: str, weights: Weights, text: list[int], tmp_path: Path
) -> None:
    """One path that forgets to reorder rows gives a model that talks nonsense (B103)."""
    write, kind = _PATHS[name]
    found = perplexity(write(tmp_path, weights), text, "--weights", mode)
    expected = reference(kept(weights, kind), text)
    assert abs(found / expected - 1) < 0.05, f"{found} for {expected}"
    if mode != "bf16" and name != "safetensors bf16":  # there, norms are rounded as well
        assert abs(found / expected - 1) < 0.005


def test_a_wrong_order_of_rows_is_far_beyond_every_tolerance(
    weights: Weights, text: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tolerances that a wrong model passes would prove nothing."""
    monkeypatch.setattr("tiny_model._interleaved", lambda matrix, heads: matrix)
    wrong = perplexity(as_gguf(Kind.F32)(tmp_path, weights), text)
    assert wrong > 2 * reference(weights, text)
