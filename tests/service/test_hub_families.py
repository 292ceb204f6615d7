"""Every family that a folder can hold, against transformers on tiny random models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hub_models import (
    EMBEDDINGS,
    END,
    HubShape,
    change_json,
    hub_model,
    save_folder,
    write_tokenizer,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from log_capture import captured
from stepping import logits_after, served
from tiny_model import TinyShape, random_weights, transformers_model, write_gguf

from kvledger.errors import ModelRefused
from kvledger.models import hub_config
from kvledger.models.hub_config import FAMILIES, llama_config
from kvledger.models.json_file import read_object
from kvledger.models.llama import rotary_tables

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.5}
SHAPES = [
    HubShape("llama"),
    HubShape("llama", tied=True),
    HubShape("llama", {"rope_parameters": LLAMA3}),
    HubShape("llama", {"rope_parameters": LINEAR}),
    HubShape("llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-3}),
    HubShape("mistral", {"head_dim": 32, "sliding_window": None}),
    HubShape("mistral", {"sliding_window": 71}),
    HubShape("qwen2"),
    HubShape("qwen2", tied=True),
    HubShape("qwen2", {"use_sliding_window": True, "sliding_window": 72, "max_window_layers": 1}),
    HubShape("qwen3"),
    HubShape("qwen3", {"head_dim": 32, "num_attention_heads": 6}, tied=True),
    HubShape("smollm3", {"no_rope_layers": [1, 0, 1]}, tied=True),
    HubShape("smollm3", {"no_rope_layer_interval": 2}),
]
PROMPT = np.random.default_rng(1).integers(0, 257, 70).tolist()


def all_logits(model: Any, prompt: list[int]) -> torch.Tensor:
    """float32 [prompt, vocabulary] of transformers: the logits after each of its tokens."""
    with torch.no_grad():
        return model(torch.tensor([prompt])).logits[0]


def with_chunks(folder: Path, chunk: int, *arguments: str) -> Any:
    budget = ("--token-budget", str(chunk), "--max-sequences", "1")
    return served(folder, *budget, "--kv-format", "f32", *arguments)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_logits_equal_transformers(tmp_path: Path, shape: HubShape) -> None:
    """Whoever serves a model of a family would get answers of another model, and a prompt that ends
    with its block or chunk those of one beside it (B23).
    """
    reference = hub_model(shape)
    expected = all_logits(reference, PROMPT)
    folder = save_folder(tmp_path / "tiny", reference)
    for chunk in (1, 7, 16):
        model = with_chunks(folder, chunk)
        assert model.tokenizer.vocabulary_size == EMBEDDINGS
        # A prompt in steps of one token takes the same steps whatever its length.
        lengths = range(1, 71) if chunk > 1 else (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 70)
        for length in lengths:
            difference = (logits_after(model, PROMPT[:length]) - expected[length - 1]).abs().max()
            assert difference < 1e-4, f"chunks of {chunk}, {length} tokens"


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "smollm3"])
def test_torch_kernels_agree(tmp_path: Path, family: str) -> None:
    """The reference would be no help in doubt if it knew other families than the kernels."""
    folder = save_folder(tmp_path / "tiny", hub_model(HubShape(family)))
    ours = logits_after(with_chunks(folder, 16), PROMPT)
    theirs = logits_after(with_chunks(folder, 16, "--kernels", "torch"), PROMPT)
    assert (ours - theirs).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_stored_weights_give_the_same_bits_as_their_floats(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    """`--weights stored` must be the model itself, not nearly the model."""
    import transformers

    folder = save_folder(tmp_path / "tiny", hub_model(HubShape("qwen3")), dtype=dtype)
    as_stored = served(folder)
    as_floats = served(folder, "--weights", "f32")
    assert as_stored.weight_bytes == as_floats.weight_bytes // 2
    assert torch.equal(logits_after(as_stored, PROMPT), logits_after(as_floats, PROMPT))
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = all_logits(reference.eval(), PROMPT)[-1]
    exact = logits_after(with_chunks(folder, 16), PROMPT)
    assert (exact - expected).abs().max() < 1e-4


def test_a_folder_and_a_gguf_file_of_the_same_model_agree_to_the_bit(tmp_path: Path) -> None:
    """The same weights would answer differently, for queries and keys lie in another order."""
    shape = TinyShape(heads=6, kv_heads=3, head_dim=32, hidden=96)
    weights = random_weights(shape, seed=3)
    file = write_gguf(tmp_path / "tiny.gguf", shape, weights=weights)
    folder = tmp_path / "tiny"
    transformers_model(shape, weights).save_pretrained(folder)
    write_tokenizer(folder)
    change_json(folder / "config.json", {"eos_token_id": END})
    change_json(folder / "generation_config.json", {"eos_token_id": END})
    assert torch.equal(logits_after(served(file), PROMPT), logits_after(served(folder), PROMPT))


def test_shards_are_the_same_model_as_one_file(tmp_path: Path) -> None:
    """A large model, which comes in shards, would answer differently from a small one."""
    one = save_folder(tmp_path / "one", hub_model(HubShape("llama")))
    many = save_folder(tmp_path / "many", hub_model(HubShape("llama")), shard_bytes=60_000)
    assert len(list(many.glob("*.safetensors"))) > 2
    assert torch.equal(logits_after(served(one), PROMPT), logits_after(served(many), PROMPT))


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ({"rope_theta": 5e5}, {"rope_theta": 5e5, "rope_type": "default"}),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.5}},
            LINEAR,
        ),
        (
            {"rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"}},
            LLAMA3,
        ),
        ({"rope_theta": 1e4, "rope_scaling": LLAMA3}, LLAMA3),
        ({}, {"rope_theta": 1e4, "rope_type": "default"}),
        ({"rope_scaling": None}, {"rope_theta": 1e4, "rope_type": "default"}),
    ],
)
def test_older_files_say_the_same_in_other_words(
    tmp_path: Path, older: dict[str, Any], newer: dict[str, Any]
) -> None:
    """Published models, most of which are older, would be refused, or turned wrongly."""
    reference = hub_model(HubShape("llama", {"rope_parameters": newer}))
    expected = all_logits(reference, PROMPT)[-1]
    folder = save_folder(tmp_path / "tiny", reference, changes={"rope_parameters": ..., **older})
    assert (logits_after(with_chunks(folder, 16), PROMPT) - expected).abs().max() < 1e-4


# --- The sliding window ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "changes", "context"),
    [
        ("mistral", {"sliding_window": 100}, 100),
        ("mistral", {"sliding_window": 512}, 512),
        ("mistral", {"sliding_window": 5000}, 512),
        ("mistral", {"sliding_window": None}, 512),
        ("mistral", {"sliding_window": ..., "max_position_embeddings": 9000}, 4096),
        ("qwen2", {"sliding_window": 100}, 512),
        ("qwen2", {"sliding_window": 100, "use_sliding_window": True, "layer_types": ...}, 100),
        ("qwen3", {"sliding_window": None, "use_sliding_window": True}, 512),
        ("smollm3", {"sliding_window": ..., "use_sliding_window": True}, 512),
        ("smollm3", {"sliding_window": 100, "use_sliding_window": True}, 100),
    ],
)
def test_the_context_ends_where_a_window_would_hide_tokens(
    tmp_path: Path, family: str, changes: dict[str, Any], context: int
) -> None:
    """Beyond its window a model would see tokens that it was trained without."""
    values = config_values(tmp_path, family, changes)
    assert llama_config(values, "tiny")[0].context_tokens == context


def test_a_capped_context_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator would not learn why long prompts are refused."""
    lines = captured(monkeypatch, hub_config)
    llama_config(config_values(tmp_path, "mistral", {"sliding_window": 100}), "tiny")
    assert lines == [
        {
            "event": "context_capped_at_sliding_window",
            "log_level": "warning",
            "window": 100,
            "context": 512,
        }
    ]


# --- What is refused ------------------------------------------------------------------------


def config_values(folder: Path, family: str, changes: dict[str, Any]) -> dict[str, Any]:
    """config.json of a tiny model, with some keys replaced, or removed with ... ."""
    path = folder / "config.json"
    path.unlink(missing_ok=True)
    hub_model(HubShape(family)).config.save_pretrained(folder)
    change_json(path, changes)
    return read_object(path, 1 << 20)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("llama", {"model_type": "gemma2"}, "model_type is 'gemma2'; kvledger runs llama, mistral"),
        ("llama", {"model_type": "x" * 1000}, "a text of 1000 characters; kvledger runs"),
        ("llama", {"model_type": ["llama"]}, "model_type is a list"),
        ("llama", {"model_type": ...}, "model_type is missing"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "no language model"),
        ("llama", {"architectures": "LlamaForCausalLM"}, "no language model"),
        ("llama", {"attention_bias": True}, "attention_bias is true; kvledger computes only false"),
        ("qwen3", {"attention_bias": True}, "attention_bias is true"),
        ("smollm3", {"attention_bias": True}, "attention_bias is true"),
        ("llama", {"attention_bias": 0}, "attention_bias is 0"),
        ("llama", {"mlp_bias": True}, "mlp_bias is true"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; kvledger computes only 'silu'"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ("llama", {"rope_interleaved": True}, "rope_interleaved is true"),
        ("qwen2", {"use_mrope": True}, "use_mrope is true"),
        ("llama", {"sliding_window": 100}, "sliding_window is set, and kvledger does not know"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config is set"),
        ("llama", {"auto_map": {"AutoModel": "x.Y"}}, "auto_map is set"),
        ("llama", {"num_local_experts": 8}, "num_local_experts is set"),
        ("llama", {"no_rope_layers": [1, 1, 1]}, "no_rope_layers is set"),
        ("llama", {"x" * 1000: 1}, "a text of 1000 characters is set"),
        ("mistral", {"layer_types": ["full_attention"] * 3}, "layer_types is set"),
        ("llama", {"rms_norm_eps": ...}, "rms_norm_eps is missing"),
        ("llama", {"rms_norm_eps": 0}, "rms_norm_eps is 0, outside"),
        ("llama", {"rms_norm_eps": "1e-5"}, "rms_norm_eps is not a number"),
        ("llama", {"hidden_size": ...}, "hidden_size is missing"),
        ("llama", {"hidden_size": 64.0}, "hidden_size is not a whole number"),
        ("llama", {"num_hidden_layers": 1 << 40}, "outside 1 to 1024"),
        ("llama", {"num_hidden_layers": True}, "not a whole number"),
        ("llama", {"vocab_size": 0}, "vocab_size is 0, outside"),
        ("llama", {"num_key_value_heads": 3}, "4 query heads cannot share 3 KV heads"),
        ("llama", {"head_dim": 24}, "24 dimensions; kvledger's kernels need a multiple of 16"),
        ("llama", {"intermediate_size": 100}, "feed-forward part is 100"),
        (
            "llama",
            {"num_attention_heads": 200, "num_key_value_heads": 2},
            "100 query heads share a KV head",
        ),
        ("llama", {"tie_word_embeddings": "yes"}, "neither true nor false"),
        ("llama", {"rope_parameters": []}, "rope_parameters is not an object"),
        ("llama", {"rope_parameters": {"rope_type": "yarn"}}, "the rope scaling is 'yarn'"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic"}}, "the rope scaling is 'dynamic'"),
        ("llama", {"rope_parameters": {"rope_type": 5}}, "rope_parameters.rope_type is not a text"),
        ("llama", {"rope_parameters": {"beta": 5}}, "rope_parameters.beta is set"),
        ("llama", {"rope_parameters": {**LINEAR, "beta": 5}}, "rope_parameters.beta is set"),
        ("llama", {"rope_parameters": {**LLAMA3, "beta": 5}}, "rope_parameters.beta is set"),
        ("llama", {"rope_parameters": {**LINEAR, "factor": 0}}, "factor is 0, outside"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "factor is missing"),
        ("llama", {"rope_parameters": {**LLAMA3, "low_freq_factor": 4.0}}, "is not below"),
        (
            "llama",
            {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": None}},
            "original_max_position_embeddings is missing",
        ),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.25}}, "turns whole heads"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "are both set"),
        ("llama", {"rope_theta": 5.0}, "rope_theta is given twice"),
        ("mistral", {"sliding_window": 0}, "sliding_window is 0, outside"),
        ("mistral", {"sliding_window": "all"}, "sliding_window is not a whole number"),
        (
            "qwen2",
            {"layer_types": ["sliding_attention"] * 3},
            "layer_types has 'sliding_attention'",
        ),
        ("qwen2", {"layer_types": ["full_attention"] * 2}, "one entry a layer"),
        (
            "qwen2",
            {"use_sliding_window": True, "layer_types": ["chunked_attention"] * 3},
            "layer_types has 'chunked_attention'",
        ),
        ("smollm3", {"no_rope_layers": [1, 0]}, "one entry a layer"),
        ("smollm3", {"no_rope_layers": [1, 0, 2]}, "not a list of 0 and 1"),
        ("smollm3", {"no_rope_layers": [1, 0, [0]]}, "not a list of 0 and 1"),
        ("smollm3", {"no_rope_layers": ..., "no_rope_layer_interval": 0}, "interval is 0, outside"),
    ],
)
def test_a_configuration_it_does_not_compute_is_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], reason: str
) -> None:
    """A model that is nearly of the family would be computed wrongly, without a word."""
    values = config_values(tmp_path, family, changes)
    with pytest.raises(ModelRefused) as refused:
        llama_config(values, "tiny")
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 250


@settings(max_examples=300)
@given(
    family=st.sampled_from(sorted(FAMILIES)),
    changes=st.dictionaries(
        st.sampled_from(
            [
                *sorted(hub_config._READ | hub_config._ONLY.keys()),
                *["sliding_window", "use_sliding_window", "layer_types", "no_rope_layers"],
            ]
        ),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.sampled_from([*LLAMA3, "type", "x"]), inner, max_size=3)
            ),
            max_leaves=4,
        ),
        min_size=1,
        max_size=3,
    ),
)
def test_no_configuration_ends_in_anything_but_a_sentence(
    family: str, changes: dict[str, Any]
) -> None:
    """A folder from a stranger would end the start with a traceback."""
    values = {
        "model_type": family,
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
    }
    assert llama_config(values, "tiny")[0].kv_heads == 4
    sentence = ""
    try:
        llama_config({**values, **changes}, "tiny")
    except ModelRefused as refused:
        sentence = str(refused)
    assert "\n" not in sentence


def test_layers_without_rotary_embedding_are_counted_as_the_reference_does() -> None:
    """A model without the list, but with the interval, would be turned in the wrong layers."""
    import transformers

    for interval in (1, 2, 3, 4, 7):
        keys: dict[str, Any] = {"num_hidden_layers": 8, "no_rope_layer_interval": interval}
        expected = transformers.SmolLM3Config(**keys)
        values = expected.to_dict() | {"architectures": None, "no_rope_layers": None}
        del values["id2label"], values["label2id"]
        found = llama_config(values, "tiny")[0].layers_without_rope
        assert found == {i for i, flag in enumerate(expected.no_rope_layers) if not flag}


@pytest.mark.parametrize("length", [1, 20, 300])
@pytest.mark.parametrize("parameters", [LLAMA3, LINEAR])
def test_scaled_angles_are_those_of_the_reference(length: int, parameters: dict[str, Any]) -> None:
    """Long prompts, for which the scaling is made, would be read in another order."""
    import transformers
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=2, rope_parameters=parameters
    )
    rotary = LlamaRotaryEmbedding(config)
    cosine, sine = rotary(torch.zeros(1), torch.arange(length)[None])
    values = config.to_dict() | {"architectures": None}
    for key in ("id2label", "label2id"):
        values.pop(key, None)
    ours = rotary_tables(llama_config(values, "tiny")[0], length)
    for expected, table in zip((cosine, sine), ours, strict=True):
        assert np.abs(expected[0, :, :64].numpy() - table).max() < 1e-4
