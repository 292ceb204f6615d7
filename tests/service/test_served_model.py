"""A model made ready to serve: how large its KV pool is, and what is refused in one sentence."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import NoReturn

import pytest
from stepping import served, settings
from tiny_model import CONTROL_TOKENS, TinyShape, write_gguf

from kvledger import _core, served_model
from kvledger.errors import ModelRefused, SettingRefused
from kvledger.models.catalogue import CATALOGUE, KnownModel
from kvledger.self_test import try_model
from kvledger.served_model import load, pool_blocks

LAYOUT = _core.KvLayout(layers=2, kv_heads=2, head_dim=16, block_tokens=32)
BLOCK = LAYOUT.block_bytes
CONTEXT = 512


def blocks(*arguments: str, available: int = 1 << 40, context: int = CONTEXT) -> int:
    return pool_blocks(settings(*arguments), LAYOUT, context, available)


def refusal(*arguments: str, available: int = 1 << 40) -> str:
    """The sentence that refuses a pool."""
    with pytest.raises(SettingRefused) as refused:
        blocks(*arguments, available=available)
    sentence = str(refused.value)
    assert "\n" not in sentence
    return sentence


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


def test_blocks_asked_for_are_given() -> None:
    """An operator who sizes the pool would get another one."""
    assert blocks("--kv-blocks", "7") == 7
    assert blocks("--kv-blocks", "7", available=7 * BLOCK) == 7


@pytest.mark.parametrize(
    ("size", "count"),
    [(BLOCK, 1), (2 * BLOCK - 1, 1), (2 * BLOCK, 2), (100 * BLOCK + 5, 100)],
)
def test_bytes_are_rounded_down_to_blocks(size: int, count: int) -> None:
    """A pool would take more memory than it was given."""
    assert blocks("--kv-bytes", str(size)) == count
    assert blocks("--kv-bytes", str(size), available=count * BLOCK) == count


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1])
def test_less_than_a_block_is_refused(size: int) -> None:
    """A pool without blocks would refuse every request, and nobody know why."""
    sentence = refusal("--kv-bytes", str(size))
    assert f"--kv-bytes {size}" in sentence
    assert f"{BLOCK} bytes" in sentence


@pytest.mark.parametrize(
    ("option", "value", "takes"),
    [
        ("--kv-blocks", "8", 8 * BLOCK),
        ("--kv-bytes", str(8 * BLOCK), 8 * BLOCK),
        ("--kv-blocks", str(2**31 - 1), (2**31 - 1) * BLOCK),
        ("--kv-bytes", "1000000 GiB", (1_000_000 << 30) // BLOCK * BLOCK),
    ],
)
def test_more_than_is_free_is_refused_with_the_numbers(option: str, value: str, takes: int) -> None:
    """The process would be killed in the middle of a request, without a word."""
    available = 8 * BLOCK - 1
    sentence = refusal(option, value, available=available)
    assert option in sentence
    assert str(takes) in sentence
    assert f"{available} are free" in sentence


def test_by_default_no_more_is_taken_than_can_be_used() -> None:
    """A small model on a large machine would take a quarter of its memory for nothing."""
    per_sequence = -(-(CONTEXT - 1) // LAYOUT.slots_per_block("bf16"))
    assert blocks() == 64 * per_sequence
    assert blocks("--max-sequences", "3") == 3 * per_sequence
    assert blocks("--token-budget", "5") == 5 * per_sequence
    in_floats = -(-(CONTEXT - 1) // LAYOUT.slots_per_block("f32"))
    assert blocks("--kv-format", "f32", "--max-sequences", "1") == in_floats
    assert in_floats == 2 * per_sequence


@pytest.mark.parametrize("context", [2, 32, 33, 34, 64, 65, 66])
def test_by_default_a_whole_context_fits(context: int) -> None:
    """The pool would end texts that the model could go on with."""
    slots = LAYOUT.slots_per_block("bf16") * blocks("--max-sequences", "1", context=context)
    # The last token of a text is never computed, so it needs no slot.
    assert context - 1 <= slots < context - 1 + LAYOUT.slots_per_block("bf16")


def test_by_default_a_quarter_of_what_is_free_is_taken() -> None:
    """A server would take all memory of a machine that others use as well."""
    assert blocks(available=4 * 10 * BLOCK) == 10
    assert blocks(available=4 * 10 * BLOCK - 1) == 9
    assert blocks(available=4 * BLOCK) == 1


@pytest.mark.parametrize("available", [0, 1, 4 * BLOCK - 1])
def test_no_room_for_one_block_by_default_is_refused(available: int) -> None:
    """A server on a full machine would start with no pool."""
    sentence = refusal(available=available)
    assert f"{available} bytes of memory are free" in sentence
    assert "--kv-blocks" in sentence


def test_a_model_of_a_path_is_named_after_its_file(tiny: Path) -> None:
    """Clients could not ask for the model by a name."""
    model = served(tiny)
    assert model.id == "tiny"
    assert [model.answers_to(name) for name in ("", "tiny", "Tiny", "tiny.gguf", "x")] == [
        *(True, True, False, False, False),
    ]
    assert model.fingerprint == hashlib.sha256(tiny.read_bytes()).hexdigest()
    assert model.tokenizer.vocabulary_size == 257 + len(CONTROL_TOKENS)


def test_sequences_are_bounded_by_context_and_pool(tiny: Path) -> None:
    """Clients would be told of a context that the pool does not hold."""
    assert load(settings("--model", str(tiny), "--kv-blocks", "64")).tokens_max == CONTEXT
    small = load(settings("--model", str(tiny), "--kv-blocks", "2"))
    assert small.tokens_max == 2 * LAYOUT.slots_per_block("bf16") + 1
    assert small.blocks == 2


def test_loading_is_told(tiny: Path) -> None:
    """A person who waits for a large model would see nothing happen."""
    said: list[str] = []
    load(settings("--model", str(tiny), "--kv-blocks", "4"), said.append)
    assert any("tiny.gguf" in line for line in said)


def known(path: Path, monkeypatch: pytest.MonkeyPatch) -> KnownModel:
    """The catalogue's entry for a file, which is in its place."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(path.parent / "cache"))
    data = path.read_bytes()
    model = KnownModel(
        name="known",
        package="some-package",
        version="1",
        member="m",
        bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
    )
    monkeypatch.setitem(CATALOGUE, "known", model)
    model.path.parent.mkdir(parents=True, exist_ok=True)
    model.path.write_bytes(data)
    return model


def test_a_known_model_is_served_under_its_name(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name that an operator gives would not be the one that clients use."""
    known(tiny, monkeypatch)
    assert load(settings("--model", "known", "--kv-blocks", "4")).id == "known"


def test_a_known_model_that_was_changed_is_refused(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that rotted on the disk, or were exchanged, would be served under the good name."""
    model = known(tiny, monkeypatch)
    data = bytearray(model.path.read_bytes())
    data[-5] ^= 1  # one bit of a weight: the file still loads
    model.path.write_bytes(data)
    load(settings("--model", str(model.path), "--kv-blocks", "4"))
    with pytest.raises(ModelRefused, match="is damaged") as refused:
        load(settings("--model", "known", "--kv-blocks", "4"))
    assert str(model.path) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "content", [b"", b"GGUF", b"#!/bin/sh\nexit 1\n", bytes(4096), b"GGUF\x03\x00\x00\x00" * 64]
)
def test_a_file_that_is_no_model_is_refused(tmp_path: Path, content: bytes) -> None:
    """A wrong path would end the start with a traceback, or worse, not end it."""
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelRefused) as refused:
        load(settings("--model", str(path), "--kv-blocks", "4"))
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_device_this_build_lacks_is_refused_before_loading(tmp_path: Path) -> None:
    """A person would wait for the weights to learn that there are no kernels for them."""
    with pytest.raises(SettingRefused, match="--device cuda"):
        load(settings("--model", str(tmp_path / "missing"), "--device", "cuda"))
    with pytest.raises(SettingRefused, match="--instruction-set"):
        load(settings("--model", str(tmp_path / "missing"), "--instruction-set", "mmx"))


def test_memory_that_the_system_refuses_is_told(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool that does not come would end the start with a traceback."""

    def refuse(*arguments: object) -> NoReturn:
        raise MemoryError

    monkeypatch.setattr(served_model._core, "KvMemory", refuse)
    with pytest.raises(SettingRefused) as refused:
        load(settings("--model", str(tiny), "--kv-blocks", "4"))
    assert f"no {4 * BLOCK} bytes for the KV pool" in str(refused.value)


def test_the_pool_is_sized_by_what_is_free_after_the_weights(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and pool together would be more than the machine has."""
    order: list[str] = []
    real = served_model.load_weights

    def load_weights(*arguments: object, **named: object) -> object:
        order.append("weights")
        return real(*arguments, **named)  # type: ignore[arg-type]

    def memory_available() -> int:
        order.append("memory")
        return 4 * 6 * BLOCK

    monkeypatch.setattr(served_model, "load_weights", load_weights)
    monkeypatch.setattr(served_model, "memory_available", memory_available)
    assert load(settings("--model", str(tiny))).blocks == 6
    assert order == ["weights", "memory"]


def test_one_token_proves_a_model(tiny: Path, tmp_path: Path) -> None:
    """`kvledger doctor` would call a working model broken, or a broken one working."""
    token = try_model(settings("--model", str(tiny), "--kv-bytes", "1TiB")).token
    assert token is not None
    assert 0 <= token < 261
    # The prompt is longer than this context, and is cut.
    short = write_gguf(tmp_path / "short.gguf", TinyShape(context=4))
    assert try_model(settings("--model", str(short))).token is not None


def test_a_model_whose_output_is_no_number_is_found_out(tmp_path: Path) -> None:
    """A file of plausible shape and broken weights would be served."""
    from tiny_model import random_weights

    shape = dataclasses.replace(TinyShape(), layers=1)
    weights = random_weights(shape, seed=0)
    weights["model.norm.weight"][:] = float("nan")
    path = write_gguf(tmp_path / "broken.gguf", shape, weights=weights)
    assert try_model(settings("--model", str(path))).token is None


@pytest.mark.parametrize(("kv_format", "saved"), [("bf16", 10**12 + 7), ("f32", 0)])
def test_what_a_format_saves_is_held_against_what_is_computed(
    tiny: Path, kv_format: str, saved: int
) -> None:
    """Receipts would praise a format for what it does not save."""
    model = served(tiny, "--kv-format", kv_format)
    # A block has twice the tokens in bf16.
    assert model.saved_by_format(10**12 + 7) == saved
