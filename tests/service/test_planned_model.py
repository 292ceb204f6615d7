"""The models of plans: their weights weigh what the core's packed ones do."""

from __future__ import annotations

from pathlib import Path

import pytest
from hub_models import HubShape, change_json, hub_model, save_folder
from hypothesis import given
from hypothesis import strategies as st

from kvledger import _core
from kvledger.errors import ModelRefused, SettingRefused
from kvledger.planning.plan import make_layout
from kvledger.planning.planned_model import (
    SizedWeight,
    configured_model,
    plain_model,
    served_model,
)
from kvledger.planning.shapes import SHAPES, shape_of

FORMATS = ("f32", "bf16", "f16", "q8_0", "q4_0", "q4_1")


@given(st.sampled_from(FORMATS), st.integers(1, 400), st.integers(1, 20))
def test_a_weight_weighs_what_the_core_says(name: str, outputs: int, groups: int) -> None:
    """A plan would give the pool memory that the weights take, or leave some unused."""
    inputs = 32 * groups
    packed = _core.PackedWeight(name, outputs, inputs).bytes
    assert SizedWeight(name, outputs, inputs).bytes == packed


@pytest.mark.parametrize(
    ("name", "gigabytes", "token_bytes"),
    [
        ("qwen2.5-0.5b", 0.99, None),
        ("qwen3-0.6b", 1.19, 114_688),
        ("qwen2.5-7b", 15.23, 57_344),
        ("qwen3-8b", 16.38, 147_456),
        ("llama-3-8b", 16.06, 131_072),
        ("llama-3-70b", 141.1, 327_680),
    ],
)
def test_published_models_weigh_what_is_published(
    name: str, gigabytes: float, token_bytes: int | None
) -> None:
    """A plan for a machine that is still to be bought would be wrong."""
    shape = SHAPES[name]
    model = plain_model(shape.config(name), shape.vocabulary, "bf16")
    assert model.weights("stored").bytes / 1e9 == pytest.approx(gigabytes, abs=0.006 * gigabytes)
    assert model.weights("f32").bytes == 2 * model.weights("bf16").bytes
    if token_bytes is not None:
        assert make_layout(model.config, 32).token_bytes("bf16") == token_bytes


def test_sizes_replace_those_of_a_named_shape() -> None:
    """A person who asks what GQA would save would be told of the model as it is."""
    shape = shape_of("llama-3-8b", {"kv_heads": 1, "tied_head": True})
    assert (shape.kv_heads, shape.layers, shape.tied_head) == (1, 32, True)
    with pytest.raises(SettingRefused, match="--kv-heads, --heads"):
        shape_of(None, {"layers": 3})
    with pytest.raises(SettingRefused, match="known are"):
        shape_of("gpt", {})


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "smollm3"])
def test_a_configuration_alone_is_the_folder(tmp_path: Path, family: str) -> None:
    """Who plans before downloading would get another machine."""
    folder = save_folder(tmp_path / "m", hub_model(HubShape(family)))
    whole, alone = served_model(str(folder)), configured_model(folder / "config.json", None)
    assert alone.config == whole.config
    assert alone.vocabulary == whole.vocabulary
    assert alone.weights("stored").bytes == whole.weights("stored").bytes
    assert alone.weights("bf16").bytes == whole.weights("bf16").bytes
    assert configured_model(folder / "config.json", "q4_0").weights("stored").bytes < (
        alone.weights("stored").bytes / 6
    )


def test_a_type_that_is_not_read_is_asked_about(tmp_path: Path) -> None:
    """float64 would be planned as if it were bfloat16."""
    folder = save_folder(tmp_path / "m", hub_model(HubShape("llama")))
    change_json(folder / "config.json", {"dtype": "float64", "torch_dtype": "float64"})
    with pytest.raises(ModelRefused, match="--stored"):
        configured_model(folder / "config.json", None)
    change_json(folder / "config.json", {"dtype": ..., "torch_dtype": ...})
    assert set(configured_model(folder / "config.json", None).formats.values()) == {"bf16"}


def test_no_matrix_of_a_folder_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan for a large model would read all of it from the disk."""
    from kvledger.models.safetensors_file import SafetensorsFile

    folder = save_folder(tmp_path / "m", hub_model(HubShape("llama")))
    read: list[int] = []
    real = SafetensorsFile.read

    def counted(self: SafetensorsFile, begin: int, end: int) -> object:
        read.append(end - begin)
        return real(self, begin, end)

    monkeypatch.setattr(SafetensorsFile, "read", counted)
    served_model(str(folder))
    header = read[1]
    assert sum(read) - 8 - header <= 7 * 64 * 4, "norms alone"


def test_heads_that_kernels_do_not_run_are_refused() -> None:
    """A plan would praise what cannot be served."""
    shape = shape_of("smollm2-135m", {"heads": 128, "kv_heads": 128, "head_dim": 16})
    model = plain_model(shape.config("many"), shape.vocabulary, "bf16")
    assert model.with_kv_heads(2).config.kv_heads == 2
    with pytest.raises(ModelRefused, match="96 at most"):
        model.with_kv_heads(1)
