"""The reader of safetensors: what it reads, and that no file can make it read anything else."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from kvledger.errors import ModelRefused
from kvledger.models import safetensors_file
from kvledger.models.json_file import parse_object, read_object
from kvledger.models.safetensors_file import (
    HEADER_BYTES_MAX,
    INDEX,
    SINGLE,
    SafetensorsFile,
    SafetensorsModel,
    parse_header,
)

EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        EMBEDDING: torch.randn(6, 32, generator=generator).to(dtype),
        NORM: torch.randn(32, generator=generator).to(dtype),
    }


def file_of(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(begin: int, end: int, shape: list[int] | None = None, dtype: str = "F32") -> Any:
    shape = [(end - begin) // 4] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def refusal(folder: Path, content: bytes) -> str:
    """The sentence that refuses a file."""
    path = folder / SINGLE
    path.write_bytes(content)
    with pytest.raises(ModelRefused) as refused:
        SafetensorsFile(path)
    sentence = str(refused.value)
    assert str(path) in sentence
    assert "\n" not in sentence
    assert len(sentence) < len(str(path)) + 250
    return sentence


def opened(path: Path) -> SafetensorsFile | str:
    """A file, or the sentence that refuses it."""
    try:
        return SafetensorsFile(path)
    except ModelRefused as refused:
        return str(refused)


# --- What is read ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_the_library_wrote_is_read(tmp_path: Path, dtype: torch.dtype) -> None:
    """Weights would be served that are not those of the file."""
    written = tensors(dtype)
    save_file(written, tmp_path / SINGLE, metadata={"format": "pt"})
    with SafetensorsModel(tmp_path) as model:
        matrix = model.matrix("token_embd.weight", 6, 32)
        assert matrix.data.tobytes() == written[EMBEDDING].view(torch.uint8).numpy().tobytes()
        names = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
        assert matrix.format == names[dtype]
        vector = model.vector("output_norm.weight", 32)
        assert vector.dtype == np.float32
        assert torch.equal(torch.from_numpy(vector), written[NORM].float())
        model.refuse_unread()


def test_nothing_is_read_from_the_file_after_loading(tmp_path: Path) -> None:
    """A file that is replaced under a running server would change, or crash, it."""
    save_file(tensors(), tmp_path / SINGLE)
    with SafetensorsModel(tmp_path) as model:
        data = model.matrix("token_embd.weight", 6, 32).data
    before = data.tobytes()
    (tmp_path / SINGLE).write_bytes(bytes((tmp_path / SINGLE).stat().st_size))
    assert data.tobytes() == before
    assert data.flags.owndata


def test_a_file_that_changes_while_it_is_loaded_is_refused(tmp_path: Path) -> None:
    """Half of the old and half of the new weights would be served under the old fingerprint."""
    path = tmp_path / SINGLE
    save_file(tensors(), path)
    with SafetensorsModel(tmp_path) as model:
        model.matrix("token_embd.weight", 6, 32)
        os.utime(path, ns=(1, 1))
        model.vector("output_norm.weight", 32)
        with pytest.raises(ModelRefused, match="changed while it was loaded"):
            model.refuse_unread()
    with SafetensorsModel(tmp_path) as model:
        os.truncate(path, path.stat().st_size - 60)
        with pytest.raises(ModelRefused, match="became shorter"):
            model.vector("output_norm.weight", 32)


def test_the_fingerprint_is_that_of_the_files_in_order_of_their_names(tmp_path: Path) -> None:
    """Two servers with the same weights could not find out that they have them."""
    shards(tmp_path)
    contents = b"".join(path.read_bytes() for path in sorted(tmp_path.glob("*.safetensors")))
    with SafetensorsModel(tmp_path) as model:
        assert model.fingerprint() == hashlib.sha256(contents).hexdigest()
        assert model.bytes == len(contents)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda model: model.matrix("output.weight", 6, 32), "lm_head.weight is missing"),
        (lambda model: model.matrix("token_embd.weight", 6, 64), r"is \(6, 32\), expected \(6, 64"),
        (lambda model: model.vector("token_embd.weight", 192), "expected"),
        (lambda model: model.matrix("blk.0.attn_q.weight", 6, 32), r"layers\.0\.self_attn\.q_proj"),
        (lambda model: model.refuse_unread(), "embed_tokens.weight' is not part"),
    ],
)
def test_tensors_that_do_not_fit_the_model_are_refused(
    tmp_path: Path, call: Any, reason: str
) -> None:
    """A model that is nearly a Llama would be computed wrongly, without a word."""
    save_file(tensors(), tmp_path / SINGLE)
    with SafetensorsModel(tmp_path) as model, pytest.raises(ModelRefused, match=reason):
        call(model)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.float8_e4m3fn])
def test_types_that_the_kernels_do_not_read_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    """Quantized weights would be taken for other numbers than they stand for."""
    save_file({name: tensor.to(dtype) for name, tensor in tensors().items()}, tmp_path / SINGLE)
    with SafetensorsModel(tmp_path) as model:
        for call in (
            lambda: model.matrix("token_embd.weight", 6, 32),
            lambda: model.vector("output_norm.weight", 32),
        ):
            with pytest.raises(ModelRefused, match="kvledger reads F32, F16, BF16"):
                call()


def test_angles_of_old_files_are_left_out(tmp_path: Path) -> None:
    """The first Llama models would be refused for a table that config.json says as well."""
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file({EMBEDDING: torch.zeros(6, 32), name: torch.ones(8)}, tmp_path / SINGLE)
    with SafetensorsModel(tmp_path) as model:
        model.matrix("token_embd.weight", 6, 32)
        model.refuse_unread()


def test_a_tied_head_may_be_repeated_but_not_differ(tmp_path: Path) -> None:
    """A model would be served with the embedding in the place of the head that it was given."""
    written = tensors()
    save_file({**written, HEAD: written[EMBEDDING].clone()}, tmp_path / SINGLE)
    with SafetensorsModel(tmp_path) as model:
        model.refuse_other_head()
        model.matrix("token_embd.weight", 6, 32)
        model.vector("output_norm.weight", 32)
        model.refuse_unread()
    for other in (written[EMBEDDING] + 1, written[EMBEDDING].half(), torch.zeros(5, 32)):
        save_file({**written, HEAD: other}, tmp_path / SINGLE)
        with SafetensorsModel(tmp_path) as model, pytest.raises(ModelRefused, match="another lm_h"):
            model.refuse_other_head()


# --- Shards ---------------------------------------------------------------------------------


def shards(folder: Path, **changes: Any) -> None:
    """Two shards and their index; `changes` replaces names in the index."""
    written = tensors()
    for place, (name, tensor) in enumerate(written.items()):
        save_file({name: tensor}, folder / f"model-{place}.safetensors")
    weight_map = {name: f"model-{place}.safetensors" for place, name in enumerate(written)}
    weight_map.update(changes.pop("weight_map", {}))
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map, **changes}))


def test_shards_are_one_model(tmp_path: Path) -> None:
    """Models above a few gigabytes, which come in shards, could not be served."""
    shards(tmp_path)
    (tmp_path / "adapter.safetensors").write_bytes(b"not named in the index")
    with SafetensorsModel(tmp_path) as model:
        model.matrix("token_embd.weight", 6, 32)
        model.vector("output_norm.weight", 32)
        model.refuse_unread()


@pytest.mark.parametrize(
    "name",
    [
        *("../secret.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "", "x.bin"),
        *("a\\b.safetensors", "a\0.safetensors", "a\n.safetensors", 5, None, ["m.safetensors"]),
        "é.safetensors",
    ],
)
def test_an_index_cannot_name_files_elsewhere(tmp_path: Path, name: object) -> None:
    """A folder from a stranger would read files of the machine that are none of its business."""
    shards(tmp_path, weight_map={NORM: name})
    with pytest.raises(ModelRefused, match="which is no weight file") as refused:
        SafetensorsModel(tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"weight_map": {NORM: "model-0.safetensors"}}, "model-0.safetensors holds tensor"),
        ({"weight_map": {"other": "model-0.safetensors"}}, "holds tensor 'other'"),
        ({"weight_map": {NORM: "model-7.safetensors"}}, "model-7.safetensors is missing"),
        (
            {"weight_map": {f"t{i}": f"{i}.safetensors" for i in range(1100)}},
            "names 1102 files; the limit is 1024",
        ),
    ],
)
def test_an_index_that_is_wrong_is_refused(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    """Shards of two downloads that do not belong together would be served as one model."""
    shards(tmp_path, **changes)
    with pytest.raises(ModelRefused, match=reason):
        SafetensorsModel(tmp_path)


@pytest.mark.parametrize("text", ["[]", "{", '{"weight_map": []}', '{"weight_map": {}}', "{}", ""])
def test_an_index_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    """A download that broke off would end the start with a traceback."""
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(ModelRefused, match=INDEX.replace(".", r"\.")):
        SafetensorsModel(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    """Which of the two is served would depend on the order of the names."""
    shards(tmp_path)
    save_file(tensors(), tmp_path / "model-1.safetensors")
    with pytest.raises(ModelRefused, match="stands in two weight files"):
        SafetensorsModel(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    """A person who gives the wrong folder would not learn what is missing."""
    with pytest.raises(ModelRefused, match=f"neither {SINGLE} nor {INDEX}"):
        SafetensorsModel(tmp_path)


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    """Opening a pipe would wait for ever."""
    os.mkfifo(tmp_path / SINGLE)
    with pytest.raises(ModelRefused, match="not a regular file"):
        SafetensorsModel(tmp_path)
    os.mkfifo(tmp_path / INDEX)
    with pytest.raises(ModelRefused, match="not a regular file"):
        read_object(tmp_path / INDEX, 100)


def test_refused_files_are_let_go(tmp_path: Path) -> None:
    """A service that tries folders one after the other would run out of file handles."""
    shards(tmp_path)
    (tmp_path / "model-1.safetensors").write_bytes(b"x" * 100)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(ModelRefused):
            SafetensorsModel(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


# --- Hostile headers ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "0 bytes"),
        (b"\0" * 7, "7 bytes"),
        (b"\0" * 8, "line 1"),
        (file_of(b"{}"), "no tensors"),
        (file_of({"__metadata__": {"a": "b"}}), "no tensors"),
        (file_of({"__metadata__": {"a": 1}, "a": entry(0, 4)}, b"1234"), "__metadata__"),
        (file_of({"__metadata__": []}), "__metadata__"),
        (file_of(b"[]"), "not an object"),
        (file_of(b'{"a":'), "line 1"),
        (file_of(b"\xff\xfe"), "not UTF-8"),
        (file_of(b"[" * 100_000), "nested too deep"),
        (file_of({"a": entry(0, 4)}, b"1234", length=1 << 63), "at most"),
        (file_of({"a": entry(0, 4)}, b"1234", length=HEADER_BYTES_MAX + 1), "at most"),
        (file_of({"a": entry(0, 4)}, b"1234", length=1000), "was cut"),
        (file_of({"a": entry(0, 4)}, b"123"), "and the file has"),
        (file_of({"a": entry(0, 4)}, b"12345"), "and the file has"),
        (file_of({"a": entry(4, 8)}, b"12345678"), "4 bytes before tensor 'a' belong to none"),
        (file_of({"a": entry(0, 8), "b": entry(4, 8)}, b"12345678"), "'b' overlaps"),
        (file_of({"a": entry(0, 4), "b": entry(0, 4)}, b"1234"), "overlaps"),
        (file_of({"a": entry(0, 4), "b": entry(8, 12)}, bytes(12)), "belong to none"),
        (file_of({"a": entry(4, 0, [0])}, b"1234"), "begin and an end"),
        (file_of({"a": entry(-4, 0, [1])}, b"1234"), "begin and an end"),
        (file_of({"a": entry(0, 4, [2])}, b"1234"), "4 bytes, and its shape and dtype need 8"),
        (file_of({"a": entry(0, 4, [1 << 40, 1 << 40])}, b"1234"), "its shape and dtype need"),
        (file_of({"a": entry(0, 4, [-1, -1])}, b"1234"), "list of sizes"),
        (file_of({"a": entry(0, 4, [1] * 9)}, b"1234"), "list of sizes"),
        (file_of({"a": entry(0, 4, [True])}, b"1234"), "list of sizes"),
        (file_of({"a": {**entry(0, 4), "shape": 1}}, b"1234"), "list of sizes"),
        (file_of({"a": {**entry(0, 4), "data_offsets": [0, 4, 8]}}, b"1234"), "begin and an end"),
        (file_of({"a": {**entry(0, 4), "data_offsets": [0, 4.0]}}, b"1234"), "begin and an end"),
        (file_of({"a": {**entry(0, 4), "more": 1}}, b"1234"), "not given as"),
        (file_of({"a": 4}, b"1234"), "not given as"),
        (file_of({"a": entry(0, 4, dtype="F31")}, b"1234"), "'F31', which is not known"),
        (file_of({"a": entry(0, 4, dtype=["F32"])}, b"1234"), "not known"),  # type: ignore[arg-type]
        (file_of({"a" * 100_000: 4}), "a text of 100000 characters"),
        (file_of({"\x1b[31m\n": 4}), "a text of 6 characters"),
        (file_of(b'{"a":1,"a":2}'), "'a' stands twice"),
        (file_of(b'{"a":NaN}'), "NaN is no number"),
        (file_of(b'{"a":' + b"9" * 5000 + b"}"), "not a safetensors file to trust"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else "",
)
def test_a_file_that_is_not_to_be_trusted_is_refused(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    """A file from a stranger would crash the server, or make it read other memory as weights."""
    assert reason in refusal(tmp_path, content)


def test_a_header_that_is_too_long_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small file, or a sparse one, would fill the memory of the machine."""
    with (tmp_path / SINGLE).open("wb") as file:
        file.write((1 << 40).to_bytes(8, "little"))
        file.truncate(2 << 40)
    reads: list[int] = []
    real = SafetensorsFile.read

    def read(self: SafetensorsFile, begin: int, end: int) -> Any:
        reads.append(end - begin)
        return real(self, begin, end)

    monkeypatch.setattr(SafetensorsFile, "read", read)
    with pytest.raises(ModelRefused, match="at most"):
        SafetensorsFile(tmp_path / SINGLE)
    assert reads == [8]


@pytest.mark.parametrize("cut", range(0, 1000, 37))
def test_a_file_that_was_cut_is_refused(tmp_path: Path, cut: int) -> None:
    """A download that broke off must be named, not half loaded."""
    content = save(tensors())
    assert cut < len(content)
    refusal(tmp_path, content[:cut])


# --- Properties -----------------------------------------------------------------------------

DTYPES = list(safetensors_file._ELEMENT_BYTES)
NAMES = st.text(max_size=8).filter(lambda name: name != "__metadata__")


@st.composite
def layouts(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """A header whose tensors cover the data exactly, in any order, and the size of the data."""
    names = draw(st.lists(NAMES, min_size=1, max_size=6, unique=True))
    header, at = {}, 0
    for name in names:
        dtype = draw(st.sampled_from(DTYPES))
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        size = int(np.prod(shape, dtype=np.int64)) * safetensors_file._ELEMENT_BYTES[dtype]
        header[name] = entry(at, at + size, shape, dtype)
        at += size
    order = draw(st.permutations(names))
    return {name: header[name] for name in order}, at


@given(layout=layouts(), padding=st.integers(0, 9))
def test_whatever_covers_the_file_is_read(layout: tuple[dict[str, Any], int], padding: int) -> None:
    """Files of other writers, with another order or empty tensors, would be refused."""
    header, size = layout
    text = json.dumps(header).encode() + b" " * padding
    entries = parse_header(text, 100, 100 + size)
    assert entries.keys() == header.keys()
    for name, found in entries.items():
        assert [found.begin - 100, found.end - 100] == header[name]["data_offsets"]
        assert list(found.shape) == header[name]["shape"]


@given(layout=layouts(), change=st.data())
def test_any_other_offset_is_refused(layout: tuple[dict[str, Any], int], change: Any) -> None:
    """One number that is off would give a tensor the bytes of its neighbour."""
    header, size = layout
    name = change.draw(st.sampled_from(sorted(header)))
    offsets = header[name]["data_offsets"]
    place, by = (
        change.draw(st.integers(0, 1)),
        change.draw(st.sampled_from([-8, -1, 1, 4, 1 << 50])),
    )
    offsets[place] += by
    with pytest.raises(ValueError):
        parse_header(json.dumps(header).encode(), 0, size)


VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
NEARLY = st.dictionaries(
    NAMES | st.just("__metadata__"),
    VALUES
    | st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(DTYPES) | VALUES,
            "shape": st.lists(st.integers(-1, 1 << 60) | VALUES, max_size=3) | VALUES,
            "data_offsets": st.lists(st.integers(-9, 40), min_size=2, max_size=2) | VALUES,
        }
    ),
    max_size=4,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(
    content=st.binary(max_size=200)
    | st.builds(file_of, NEARLY, st.binary(max_size=40))
    | st.builds(file_of, st.binary(max_size=60), st.binary(max_size=40), st.integers(0, 1 << 63))
)
def test_no_file_ends_in_anything_but_a_sentence(tmp_path: Path, content: bytes) -> None:
    """A file from a stranger would end the start with a traceback, or worse."""
    path = tmp_path / SINGLE
    path.write_bytes(content)
    file = opened(path)
    if isinstance(file, str):
        assert "\n" not in file
        return
    with_bytes = sorted((found.begin, found.end) for found in file.entries.values())
    file.close()
    # Whoever reads what was accepted stays inside the file, and reads no byte twice.
    assert with_bytes[-1][1] == len(content)
    for (_, end), (begin, _) in itertools.pairwise(with_bytes):
        assert end == begin


@settings(max_examples=200)
@given(flips=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(1, 255)), max_size=4))
def test_a_damaged_file_is_read_whole_or_refused(
    flips: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Bits that rotted in a header would give tensors that reach beyond the file."""
    content = bytearray(save(tensors()))
    for place, bits in flips:
        content[place % len(content)] ^= bits
    path = tmp_path_factory.mktemp("damaged") / SINGLE
    path.write_bytes(content)
    file = opened(path)
    if isinstance(file, str):
        assert "\n" not in file
        return
    for found in file.entries.values():
        assert len(file.read(found.begin, found.end)) == found.end - found.begin
    file.close()


# --- JSON -----------------------------------------------------------------------------------


def test_json_is_bounded(tmp_path: Path) -> None:
    """A configuration of a hundred gigabytes would fill the memory of the machine."""
    path = tmp_path / "config.json"
    path.write_text('{"a": 1}')
    assert read_object(path, 8) == {"a": 1}
    with pytest.raises(ModelRefused, match="larger than 7 bytes"):
        read_object(path, 7)


def test_json_that_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    """A person would not learn which of the files is at fault."""
    path = tmp_path / "config.json"
    with pytest.raises(ModelRefused, match=f"{path} cannot be read: No such file"):
        read_object(path, 100)
    path.write_text('{"a": 1,}')
    with pytest.raises(ModelRefused, match=rf"{path} is not JSON to trust: line 1, column"):
        read_object(path, 100)


@given(st.dictionaries(st.text(), VALUES, max_size=3))
def test_json_objects_are_read_as_they_are(value: dict[str, Any]) -> None:
    """A configuration that another reader understands would be refused, or misread."""
    text = json.dumps(value)
    if "NaN" in text or "Infinity" in text:
        return
    assert parse_object(text.encode()) == value
