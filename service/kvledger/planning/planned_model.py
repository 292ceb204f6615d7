"""The model that a plan is about: its sizes, and its weights without their numbers.

The weights' sizes are not written down a second time: the server's own loader runs over tensors
without content and operations that only count, and the core says what a packed tile weighs. So a
plan's bytes are those that a server will report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt

from kvledger import _core
from kvledger.errors import ModelRefused
from kvledger.models.catalogue import CATALOGUE, model_path
from kvledger.models.config import LlamaConfig, WeightsMode
from kvledger.models.hub_config import llama_config
from kvledger.models.json_file import read_object
from kvledger.models.llama import LlamaWeights, load_weights
from kvledger.models.model_file import ModelFile, StoredMatrix, Tensors
from kvledger.models.opening import model_folder
from kvledger.models.safetensors_file import SafetensorsModel
from kvledger.ops import Ops
from kvledger.tokenizer import Tokenizer, VocabularySource

_CONFIG_BYTES_MAX = 4 << 20
_HEAD = "output.weight"
_NO_ORDER = np.empty(0, dtype=np.int64)
_NO_DATA = np.empty(0, dtype=np.uint8)
# How config.json calls what its weights are stored as.
_STORED = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class SizedWeight:
    """A weight of a linear layer that has a size and no numbers."""

    format: str
    outputs: int
    inputs: int

    @property
    def bytes(self) -> int:
        """Memory that it takes packed, padding of its last tile included."""
        tile_outputs, group_inputs, group_bytes = _tile(self.format)
        return -(-self.outputs // tile_outputs) * (self.inputs // group_inputs) * group_bytes


@dataclass(frozen=True)
class PlannedModel:
    """A model's sizes, and the format that each of its matrices is stored in."""

    name: str
    config: LlamaConfig
    vocabulary: int
    formats: Mapping[str, str]  # by the tensor's name; "" stands for all others
    has_head: bool  # the files hold one beside the embedding

    def weights(self, mode: WeightsMode) -> LlamaWeights:
        """The weights as a server keeps them with --weights `mode`, without numbers."""
        tensors = _Formats(self.formats, self.has_head)
        return _sized(tensors, self.config, self.vocabulary, mode)

    def with_kv_heads(self, kv_heads: int) -> PlannedModel:
        """The same model with another number of KV heads. ModelRefused if kernels run no such."""
        config = replace(self.config, kv_heads=kv_heads)
        config.check_sizes()
        return replace(self, config=config)


def served_model(
    model: str, download: bool = False, say: Callable[[str], None] = lambda line: None
) -> PlannedModel:
    """What `kvledger serve --model` would serve. Raises ModelRefused; reads no weights of a folder.

    A GGUF file is read whole, as the server does.
    """
    folder = model_folder(model, download, say)
    if folder is not None:
        return _of_folder(folder)
    path = model_path(model, say)
    file = ModelFile(path)
    config = LlamaConfig.from_gguf(file.metadata)
    vocabulary = Tokenizer(VocabularySource.from_gguf(file.metadata)).vocabulary_size
    name = model if model in CATALOGUE else path.stem
    return _recorded(name, config, vocabulary, file)


def configured_model(path: Path, stored: str | None) -> PlannedModel:
    """The model of a config.json without its weights, which are `stored` in one format.

    None takes the format that the file names, or bf16. Raises ModelRefused.
    """
    values = read_object(path, _CONFIG_BYTES_MAX)
    name = path.parent.name if path.name == "config.json" else path.stem
    config, vocabulary = llama_config(values, name or "model")
    named = values.get("dtype", values.get("torch_dtype"))
    if stored is None:
        stored = _STORED.get(named, "") if isinstance(named, str) else "bf16"
        if not stored:
            raise ModelRefused(
                f"config.json: kvledger reads no weights of its dtype; say with --stored how "
                f"they will be stored ({', '.join(_STORED.values())} or a GGUF format)"
            )
    return plain_model(config, vocabulary, stored)


def plain_model(config: LlamaConfig, vocabulary: int, stored: str) -> PlannedModel:
    """A model all of whose matrices are stored in one format."""
    return PlannedModel(config.name, config, vocabulary, {"": stored}, not config.tied_head)


def _of_folder(folder: Path) -> PlannedModel:
    values = read_object(folder / "config.json", _CONFIG_BYTES_MAX)
    config, vocabulary = llama_config(values, folder.name)
    with _HeadersOnly(folder) as tensors:
        if config.tied_head:
            tensors.refuse_other_head()
        return _recorded(folder.name, config, vocabulary, tensors)


def _recorded(name: str, config: LlamaConfig, vocabulary: int, file: Tensors) -> PlannedModel:
    """The model of a file whose tensors the loader finds complete and of the right shapes."""
    recording = _Recording(file)
    _sized(recording, config, vocabulary, "stored")
    return PlannedModel(name, config, vocabulary, recording.formats, file.has(_HEAD))


def _sized(
    tensors: Tensors, config: LlamaConfig, vocabulary: int, mode: WeightsMode
) -> LlamaWeights:
    # Loading uses nothing of the operations but `weight`.
    return load_weights(tensors, config, vocabulary, cast(Ops, _Counting()), mode)


class _Counting:
    """The operations as far as loading needs them; see CpuOps.weight for what it stands for."""

    def weight(self, mode: WeightsMode, matrices: Sequence[StoredMatrix]) -> SizedWeight:
        kept = matrices[0].format if mode == "stored" else mode
        return SizedWeight(kept, sum(m.rows for m in matrices), matrices[0].columns)


class _Formats:
    """Tensors that are only known by the format they are stored in."""

    has_neighbouring_pairs = False

    def __init__(self, formats: Mapping[str, str], has_head: bool) -> None:
        self._formats = formats
        self._has_head = has_head

    def has(self, name: str) -> bool:
        return name != _HEAD or self._has_head

    def matrix(
        self, name: str, rows: int, columns: int, order: npt.NDArray[np.int64] | None = None
    ) -> StoredMatrix:
        del order  # rows in another order take as much
        stored = self._formats.get(name, self._formats.get("", ""))
        return StoredMatrix(name, stored, rows, columns, _NO_DATA, _NO_ORDER)

    def vector(self, name: str, length: int) -> npt.NDArray[np.float32]:
        del name
        return np.zeros(length, dtype=np.float32)

    def refuse_unread(self) -> None:
        """There are no tensors to be left unread."""


class _Recording:
    """A file's tensors, and the formats of the matrices that were asked for."""

    def __init__(self, file: Tensors) -> None:
        self._file = file
        self.formats: dict[str, str] = {}

    @property
    def has_neighbouring_pairs(self) -> bool:
        return self._file.has_neighbouring_pairs

    def has(self, name: str) -> bool:
        return self._file.has(name)

    def matrix(
        self, name: str, rows: int, columns: int, order: npt.NDArray[np.int64] | None = None
    ) -> StoredMatrix:
        matrix = self._file.matrix(name, rows, columns, order)
        self.formats[name] = matrix.format
        return matrix

    def vector(self, name: str, length: int) -> npt.NDArray[np.float32]:
        return self._file.vector(name, length)

    def refuse_unread(self) -> None:
        self._file.refuse_unread()


class _HeadersOnly(SafetensorsModel):
    """A folder's tensors without the content of matrices: gigabytes that a plan has no use for."""

    def matrix(
        self, name: str, rows: int, columns: int, order: npt.NDArray[np.int64] | None = None
    ) -> StoredMatrix:
        del order
        name, _, entry = self._tensor(name, (rows, columns))
        stored = entry.dtype.lower()  # F32, F16, BF16: _tensor refuses every other
        return StoredMatrix(name, stored, rows, columns, _NO_DATA, _NO_ORDER)


@cache
def _tile(weight_format: str) -> tuple[int, int, int]:
    """Outputs in a tile, inputs in a group, and bytes of a tile's group, as the core has them."""
    inputs = 32
    many = 1024
    group = _core.PackedWeight(weight_format, 1, inputs).bytes
    return many * group // _core.PackedWeight(weight_format, many, inputs).bytes, inputs, group
