"""The GGUF reader against the format's own Python package, on a small file and on a real model."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from kvledger import _core


def write_small(path: Path) -> None:
    """One entry of each kind and tensors of four types."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    writer.add_uint8("u8", 255)
    writer.add_int8("i8", -128)
    writer.add_uint16("u16", 65535)
    writer.add_int16("i16", -32768)
    writer.add_uint32("u32", 2**32 - 1)
    writer.add_int32("i32", -(2**31))
    writer.add_uint64("u64", 2**64 - 1)
    writer.add_int64("i64", -(2**63))
    writer.add_float32("f32", 0.1)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_bool("no", False)
    writer.add_string("text", "Ġthe 漢字 😀")
    writer.add_array("texts", ["a", "", "Ċ"])
    writer.add_array("integers", [1, -2, 3])
    writer.add_array("floats", [0.5, -0.25])
    writer.add_array("bools", [True, False])
    rows = np.arange(3 * 64, dtype=np.float32).reshape(3, 64)
    writer.add_tensor("f32.weight", rows)
    writer.add_tensor("f16.weight", rows.astype(np.float16).reshape(2, 3, 32))
    for kind in (gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1):
        packed = gguf.quants.quantize(rows, kind)
        writer.add_tensor(f"{kind.name.lower()}.weight", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def check_same(path: Path) -> None:
    """Everything the two readers say about a file is equal."""
    reference = gguf.GGUFReader(path)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        ours = _core.read_gguf(mapped)

    fields = {k: f.contents() for k, f in reference.fields.items() if not k.startswith("GGUF.")}
    assert list(ours.metadata) == list(fields)
    for key, value in ours.metadata.items():
        plain = value.tolist() if isinstance(value, np.ndarray) else value
        assert plain == fields[key], key
    assert ours.version == reference.fields["GGUF.version"].contents()
    assert ours.alignment == reference.alignment

    assert [t.name for t in ours.tensors] == [t.name for t in reference.tensors]
    for tensor, expected in zip(ours.tensors, reference.tensors, strict=True):
        assert tensor.type == expected.tensor_type.name
        assert tensor.shape == tuple(reversed(expected.shape.tolist()))
        assert tensor.offset == expected.data_offset
        assert tensor.bytes == expected.n_bytes


def test_small_file(tmp_path: Path) -> None:
    """If this failed, settings or weights would be read otherwise than they were written."""
    path = tmp_path / "small.gguf"
    write_small(path)
    check_same(path)


def test_real_model(model_file: Path) -> None:
    """If this failed, the model that everything else is tested with would be misread."""
    check_same(model_file)


def test_python_types(tmp_path: Path) -> None:
    """If this failed, code that asks for an int would get a bool, or text as bytes."""
    path = tmp_path / "small.gguf"
    write_small(path)
    file = _core.read_gguf(path.read_bytes())
    metadata = file.metadata
    assert metadata["yes"] is True
    assert type(metadata["u64"]) is int
    assert type(metadata["f32"]) is float
    assert metadata["f32"] == np.float32(0.1)
    assert metadata["text"] == "Ġthe 漢字 😀"
    assert metadata["texts"] == ["a", "", "Ċ"]
    assert metadata["integers"].dtype == np.int32
    assert metadata["floats"].dtype == np.float32
    assert metadata["bools"].dtype == np.bool_
    assert {t.name: t.shape for t in file.tensors}["f16.weight"] == (2, 3, 32)


def test_the_buffer_is_let_go(tmp_path: Path) -> None:
    """If this failed, a model's file would stay mapped, or be read after it was unmapped."""
    path = tmp_path / "small.gguf"
    write_small(path)
    buffer = bytearray(path.read_bytes())
    file = _core.read_gguf(buffer)
    buffer[:] = bytes(len(buffer))
    buffer.clear()  # BufferError while somebody looks at it
    assert file.metadata["integers"].tolist() == [1, -2, 3]
    assert file.metadata["general.architecture"] == "llama"


def test_every_cut_is_refused(tmp_path: Path) -> None:
    """If this failed, a download that broke off would end the server or be served."""
    path = tmp_path / "small.gguf"
    write_small(path)
    whole = path.read_bytes()
    last = max(t.offset + t.bytes for t in _core.read_gguf(whole).tensors)
    for size in range(last):
        with pytest.raises(ValueError, match=r"^GGUF .* \(byte \d+\)$"):
            _core.read_gguf(whole[:size])
    assert len(_core.read_gguf(whole[:last]).tensors) == 4


def text_entry(value: bytes) -> bytes:
    header = struct.pack("<4sIQQ", b"GGUF", 3, 0, 1)
    return header + struct.pack("<Q1sIQ", 1, b"k", 8, len(value)) + value


def is_utf8(text: bytes) -> bool:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def test_utf8_is_what_python_takes_for_it() -> None:
    """If this failed, a string that passed the reader would fail where it becomes a str."""
    edges = [0x00, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC1, 0xC2, 0xDF, 0xE0]
    edges += [0xE1, 0xEC, 0xED, 0xEE, 0xEF, 0xF0, 0xF1, 0xF3, 0xF4, 0xF5, 0xFF]
    texts = [bytes([a, b]) for a in range(256) for b in range(256)]
    texts += [bytes([a, b, c]) for a in edges for b in edges for c in edges]
    texts += [bytes([a, b, c, 0x80]) for a in edges[-8:] for b in edges for c in edges]
    accepted = 0
    for text in texts:
        if is_utf8(text):
            assert _core.read_gguf(text_entry(text)).metadata["k"] == text.decode("utf-8")
            accepted += 1
        else:
            with pytest.raises(ValueError, match="not valid UTF-8") as refused:
                _core.read_gguf(text_entry(text))
            assert not isinstance(refused.value, UnicodeDecodeError)
    assert 16384 < accepted < len(texts)


def test_what_is_no_buffer_is_refused() -> None:
    """If this failed, memory that is not the file's would be read."""
    with pytest.raises(TypeError):
        _core.read_gguf("GGUF")
    with pytest.raises(BufferError):
        _core.read_gguf(memoryview(bytes(64))[::2])
