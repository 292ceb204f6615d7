"""Weights in safetensors files: one, or the shards that an index names.

A file is 8 bytes of header length, a JSON header that says where each tensor lies, and the tensors.
Every claim of the header is checked before a byte of a tensor is read: shapes against sizes, and
that the tensors cover the file without gap or overlap. Tensors are read one at a time into memory
of their own, so a model never stands in memory twice, and nothing is read through a mapping.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from kvledger.errors import ModelRefused
from kvledger.models.json_file import parse_object, read_object, shown
from kvledger.models.model_file import StoredMatrix

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

HEADER_BYTES_MAX = 16 << 20
_INDEX_BYTES_MAX = 16 << 20
_SHARDS_MAX = 1024
_DIMENSIONS_MAX = 8
_CHUNK = 1 << 20

# Bytes of an element. All kinds are known, because a file may hold tensors that are not used.
_ELEMENT_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
# The kinds that the kernels read, and their names there.
_FORMATS = {"F32": "f32", "F16": "f16", "BF16": "bf16"}

# What a layer's tensors are called in GGUF, and in safetensors of all families here.
_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
# Old files keep the angles of rotary embedding, which follow from config.json.
_COMPUTED = ".self_attn.rotary_emb.inv_freq"


class Entry(NamedTuple):
    """Where a tensor lies: `begin` and `end` are bytes of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def parse_header(header: bytes, first: int, file_bytes: int) -> dict[str, Entry]:
    """The tensors of a file by name, from its JSON header.

    `first` is the byte after the header, where the tensors begin. Raises ValueError, with the
    reason in a few words, unless the tensors cover the rest of the file exactly, one after the
    other, each as large as its shape and type say.
    """
    entries: dict[str, Entry] = {}
    for name, value in parse_object(header).items():
        if name == "__metadata__":
            if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
                raise ValueError("its __metadata__ is not an object of texts")
            continue
        entries[name] = _entry(name, value, first)
    if not entries:
        raise ValueError("it holds no tensors")
    expected = first
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin < expected:
            raise ValueError(f"tensor {shown(name)} overlaps the one before it")
        if entry.begin > expected:
            raise ValueError(
                f"{entry.begin - expected} bytes before tensor {shown(name)} belong to none"
            )
        expected = entry.end
    if expected != file_bytes:
        raise ValueError(f"its tensors end at byte {expected}, and the file has {file_bytes}")
    return entries


def _entry(name: str, value: object, first: int) -> Entry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {shown(name)} is not given as dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ELEMENT_BYTES:
        raise ValueError(f"tensor {shown(name)} has dtype {shown(dtype)}, which is not known")
    if not _are_sizes(shape) or len(shape) > _DIMENSIONS_MAX:
        raise ValueError(f"the shape of tensor {shown(name)} is not a list of sizes")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"the data_offsets of tensor {shown(name)} are not a begin and an end")
    begin, end = offsets
    wanted = math.prod(shape) * _ELEMENT_BYTES[dtype]
    if end - begin != wanted:
        raise ValueError(
            f"tensor {shown(name)} has {end - begin} bytes, and its shape and dtype need {wanted}"
        )
    return Entry(dtype, tuple(shape), first + begin, first + end)


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(size, int) and not isinstance(size, bool) and 0 <= size < 1 << 48
        for size in value
    )


class SafetensorsFile:
    """One file, open, with its header read and checked.

    Raises ModelRefused, in one sentence, for a file that cannot be read or is not to be trusted.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if not path.is_file():  # opening a pipe would wait for somebody to write into it
                raise ModelRefused(f"the weight file {path} is missing or not a regular file")
            self._file: BinaryIO = path.open("rb", buffering=0)
        except OSError as error:
            reason = error.strerror or "it cannot be opened"
            raise ModelRefused(f"the weight file {path} cannot be read: {reason}") from None
        try:
            self._state = self._state_now()
            self.entries = self._read_entries()
        except ValueError as error:
            self.close()
            raise ModelRefused(
                f"the weight file {path} is not a safetensors file to trust: {error}"
            ) from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Lets go of the file; nothing can be read afterwards."""
        self._file.close()

    def read(self, begin: int, end: int) -> npt.NDArray[np.uint8]:
        """The bytes from `begin` to `end` of the file, uint8 [end - begin], in own memory."""
        data = np.empty(end - begin, dtype=np.uint8)
        view, done = data.data, 0
        try:
            self._file.seek(begin)
            while done < len(view):
                count = self._file.readinto(view[done:])  # type: ignore[attr-defined]
                if not count:
                    raise ModelRefused(f"the weight file {self.path} became shorter while read")
                done += count
        except OSError as error:
            reason = error.strerror or "a part of it is unreadable"
            raise ModelRefused(f"the weight file {self.path} cannot be read: {reason}") from None
        return data

    def add_to(self, digest: hashlib._Hash) -> None:
        """Puts the whole content of the file into a digest."""
        size = self._state[0]
        for begin in range(0, size, _CHUNK):
            digest.update(self.read(begin, min(begin + _CHUNK, size)).data)

    def refuse_changed(self) -> None:
        """ModelRefused if the file was written since it was opened: the parts may not fit."""
        if self._state_now() != self._state:
            raise ModelRefused(f"the weight file {self.path} changed while it was loaded")

    def _state_now(self) -> tuple[int, int]:
        status = os.fstat(self._file.fileno())
        return status.st_size, status.st_mtime_ns

    def _read_entries(self) -> dict[str, Entry]:
        size = self._state[0]
        if size < 8:
            raise ValueError(f"it has {size} bytes, less than the length of its header takes")
        length = int.from_bytes(self.read(0, 8).tobytes(), "little")
        if length > HEADER_BYTES_MAX:
            raise ValueError(f"its header says {length} bytes, and at most {HEADER_BYTES_MAX} do")
        if length > size - 8:
            raise ValueError(f"its header says {length} bytes, and the file has {size}: it was cut")
        return parse_header(self.read(8, 8 + length).tobytes(), 8 + length, size)


class SafetensorsModel:
    """The tensors of a model's folder, by the names that `load_weights` asks for.

    Hold it with `with`: it keeps the files open. Raises ModelRefused, in one sentence.
    """

    # Queries and keys turn as the kernels want them, dimension i with i + head_dim / 2.
    has_neighbouring_pairs = False

    def __init__(self, folder: Path) -> None:
        self._files: list[SafetensorsFile] = []
        self._tensors: dict[str, tuple[SafetensorsFile, Entry]] = {}
        names, wanted = _weight_files(folder)
        try:
            for name in names:
                self._add(SafetensorsFile(folder / name))
            self._check_index(folder / INDEX, wanted)
        except BaseException:
            self.close()
            raise
        self._unread = {name for name in self._tensors if not name.endswith(_COMPUTED)}

    def __enter__(self) -> SafetensorsModel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the files."""
        for file in self._files:
            file.close()

    @property
    def bytes(self) -> int:
        """Size of all files together."""
        return sum(file._state[0] for file in self._files)

    def fingerprint(self) -> str:
        """SHA-256 of the files' contents, one after the other in the order of their names."""
        digest = hashlib.sha256()
        for file in sorted(self._files, key=lambda file: file.path.name):
            file.add_to(digest)
        return digest.hexdigest()

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        return _name_here(name) in self._tensors

    def matrix(
        self, name: str, rows: int, columns: int, order: npt.NDArray[np.int64] | None = None
    ) -> StoredMatrix:
        """The matrix of that name; ModelRefused if it is missing, misshapen or of unknown type."""
        name, file, entry = self._tensor(name, (rows, columns))
        no_order = np.empty(0, dtype=np.int64)
        return StoredMatrix(
            name,
            _FORMATS[entry.dtype],
            rows,
            columns,
            file.read(entry.begin, entry.end),
            no_order if order is None else order,
        )

    def vector(self, name: str, length: int) -> npt.NDArray[np.float32]:
        """The vector of that name as float32 [length], exactly the stored numbers."""
        _, file, entry = self._tensor(name, (length,))
        data = file.read(entry.begin, entry.end)
        if entry.dtype == "F32":
            return data.view("<f4").astype(np.float32, copy=False)
        if entry.dtype == "F16":
            return data.view("<f2").astype(np.float32)
        # The upper half of a float32.
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)

    def refuse_unread(self) -> None:
        """ModelRefused if there are tensors that nobody asked for, or the files have changed."""
        if self._unread:
            raise ModelRefused(
                f"tensor {shown(min(self._unread))} is not part of a model that kvledger runs"
            )
        for file in self._files:
            file.refuse_changed()

    def refuse_other_head(self) -> None:
        """For a tied head: ModelRefused if the files hold another one than the embedding."""
        if not self.has("output.weight"):
            return
        embedding = self._tensors.get(_NAMES["token_embd.weight"])
        head = self._tensors[_NAMES["output.weight"]]
        if embedding is None or not _are_equal(embedding, head):
            raise ModelRefused(
                "config.json says that the head is the embedding (tie_word_embeddings), "
                "and the weight files hold another lm_head.weight"
            )
        self._unread.discard(_NAMES["output.weight"])

    def _add(self, file: SafetensorsFile) -> None:
        self._files.append(file)
        for name, entry in file.entries.items():
            if name in self._tensors:
                raise ModelRefused(f"tensor {shown(name)} stands in two weight files")
            self._tensors[name] = file, entry

    def _check_index(self, index: Path, wanted: Mapping[str, str] | None) -> None:
        """What an index says has to be so: a shard of another model would fit by chance."""
        for name, shard in (wanted or {}).items():
            if name not in self._tensors or self._tensors[name][0].path.name != shard:
                raise ModelRefused(
                    f"{index} says that {shard} holds tensor {shown(name)}, and it does not"
                )

    def _tensor(self, name: str, shape: Sequence[int]) -> tuple[str, SafetensorsFile, Entry]:
        name = _name_here(name)
        if name not in self._tensors:
            raise ModelRefused(f"tensor {name} is missing from the weight files")
        file, entry = self._tensors[name]
        if entry.shape != tuple(shape):
            raise ModelRefused(f"tensor {name} is {entry.shape}, expected {tuple(shape)}")
        if entry.dtype not in _FORMATS:
            raise ModelRefused(
                f"tensor {name} is stored as {entry.dtype}; kvledger reads {', '.join(_FORMATS)}"
            )
        self._unread.discard(name)
        return name, file, entry


def _name_here(name: str) -> str:
    if name.startswith("blk."):
        _, layer, rest = name.split(".", 2)
        return f"model.layers.{layer}.{_LAYER_NAMES[rest]}"
    return _NAMES[name]


def _are_equal(one: tuple[SafetensorsFile, Entry], other: tuple[SafetensorsFile, Entry]) -> bool:
    """Whether two tensors are the same to the bit."""
    if (one[1].dtype, one[1].shape) != (other[1].dtype, other[1].shape):
        return False
    pairs = zip(_pieces(*one), _pieces(*other), strict=True)
    return all(np.array_equal(ours, theirs) for ours, theirs in pairs)


def _pieces(file: SafetensorsFile, entry: Entry) -> Iterator[npt.NDArray[np.uint8]]:
    for begin in range(entry.begin, entry.end, _CHUNK):
        yield file.read(begin, min(begin + _CHUNK, entry.end))


def _weight_files(folder: Path) -> tuple[list[str], dict[str, str] | None]:
    """Names of the weight files, and by tensor the one that it is in, if there is an index."""
    if (folder / SINGLE).exists():
        return [SINGLE], None
    if not (folder / INDEX).exists():
        raise ModelRefused(f"the folder {folder} has neither {SINGLE} nor {INDEX}")
    index = read_object(folder / INDEX, _INDEX_BYTES_MAX)
    wanted = index.get("weight_map")
    if not isinstance(wanted, dict) or not wanted:
        raise ModelRefused(f"{folder / INDEX} has no weight_map")
    files: dict[str, str] = {}
    for tensor, name in wanted.items():
        # A name with a folder in it would reach files outside of this one.
        if not isinstance(name, str) or not name.endswith(".safetensors") or name != _plain(name):
            raise ModelRefused(f"{folder / INDEX} names {shown(name)}, which is no weight file")
        files[tensor] = name
    names = sorted(set(files.values()))
    if len(names) > _SHARDS_MAX:
        raise ModelRefused(f"{folder / INDEX} names {len(names)} files; the limit is {_SHARDS_MAX}")
    return names, files


def _plain(name: str) -> str:
    """The name without what is no letter, digit, point, dash or underscore."""
    return "".join(c for c in name if c.isascii() and (c.isalnum() or c in "._-"))
