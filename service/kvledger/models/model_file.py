"""A GGUF file, read whole into memory.

Nothing is read through a file mapping after loading: a file that is cut or replaced while the
server runs cannot hurt it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvledger import _core
from kvledger.errors import ModelRefused

# How GGUF calls the formats that the kernels read, and their names here.
_FORMATS = {
    "F32": "f32",
    "F16": "f16",
    "BF16": "bf16",
    "Q8_0": "q8_0",
    "Q4_0": "q4_0",
    "Q4_1": "q4_1",
}


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix as the file stores it.

    `data` is uint8 [bytes], rows one after the other; `format` one of the kernels' weight formats.
    `order` (int64 [rows], or empty for none) says which stored row stands for row i.
    """

    name: str
    format: str
    rows: int
    columns: int
    data: npt.NDArray[np.uint8]
    order: npt.NDArray[np.int64]


class Tensors(Protocol):
    """The tensors of a model, wherever they lie, by the names that GGUF gives them.

    Raises ModelRefused, in one sentence, for a tensor that is missing, misshapen or of a type that
    the kernels do not read.
    """

    @property
    def has_neighbouring_pairs(self) -> bool:
        """Whether rows 2i and 2i + 1 of a head's queries and keys turn together; else i turns
        with i + head_dim / 2."""
        ...

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        ...

    def matrix(
        self, name: str, rows: int, columns: int, order: npt.NDArray[np.int64] | None = None
    ) -> StoredMatrix:
        """The matrix of that name; `order` (int64 [rows]) says which stored row is row i."""
        ...

    def vector(self, name: str, length: int) -> npt.NDArray[np.float32]:
        """The vector of that name, float32 [length]."""
        ...

    def refuse_unread(self) -> None:
        """ModelRefused if there are tensors that nobody asked for: they would be ignored."""
        ...


class ModelFile:
    """Metadata and tensors of one GGUF file.

    Raises ModelRefused, in one sentence, for a file that cannot be read or is no GGUF.
    """

    has_neighbouring_pairs = True

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._bytes = np.fromfile(path, dtype=np.uint8)
        except OSError as error:
            reason = error.strerror or "it cannot be opened"
            raise ModelRefused(f"the model file {path} cannot be read: {reason}") from None
        try:
            parsed = _core.read_gguf(self._bytes)
        except ValueError as error:
            raise ModelRefused(f"the model file {path} is not a GGUF to trust: {error}") from None
        self.metadata = parsed.metadata
        self._tensors = {tensor.name: tensor for tensor in parsed.tensors}
        self._unread = set(self._tensors)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the whole file, in hexadecimal."""
        return hashlib.sha256(self._bytes.data).hexdigest()

    def has(self, name: str) -> bool:
        """Whether the file has a tensor of that name."""
        return name in self._tensors

    def matrix(
        self, name: str, rows: int, columns: int, order: npt.NDArray[np.int64] | None = None
    ) -> StoredMatrix:
        """The matrix of that name; ModelRefused if it is missing, misshapen or of unknown type."""
        tensor = self._tensor(name, (rows, columns))
        data = self._bytes[tensor.offset : tensor.offset + tensor.bytes]
        no_order = np.empty(0, dtype=np.int64)
        return StoredMatrix(
            name, self._format(tensor), rows, columns, data, no_order if order is None else order
        )

    def vector(self, name: str, length: int) -> npt.NDArray[np.float32]:
        """The vector of that name as float32 [length]; it must be stored as F32."""
        tensor = self._tensor(name, (length,))
        if tensor.type != "F32":
            raise ModelRefused(f"tensor {name} is stored as {tensor.type}; kvledger needs F32")
        data = self._bytes[tensor.offset : tensor.offset + tensor.bytes]
        return np.frombuffer(data.tobytes(), dtype="<f4")

    def refuse_unread(self) -> None:
        """ModelRefused if the file holds tensors that nobody asked for: they would be ignored."""
        if self._unread:
            name = min(self._unread)
            raise ModelRefused(f"tensor {name} is not part of a llama model that kvledger runs")

    def _tensor(self, name: str, shape: Sequence[int]) -> _core.GgufTensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelRefused(f"tensor {name} is missing from the model file")
        if tuple(tensor.shape) != tuple(shape):
            raise ModelRefused(f"tensor {name} is {tuple(tensor.shape)}, expected {tuple(shape)}")
        self._unread.discard(name)
        return tensor

    @staticmethod
    def _format(tensor: _core.GgufTensor) -> str:
        known = _FORMATS.get(tensor.type)
        if known is None:
            raise ModelRefused(
                f"tensor {tensor.name} is stored as {tensor.type}; "
                f"kvledger reads {', '.join(_FORMATS)}"
            )
        return known
