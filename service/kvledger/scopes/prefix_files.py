"""The files of public prefixes: which there are, and their texts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvledger.errors import SettingRefused

# Of all public prefixes, and of the text of one, in bytes.
PREFIXES_MAX = 64
TEXT_BYTES_MAX = 1024 * 1024
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


@dataclass(frozen=True)
class PrefixFile:
    """NAME=FILE of --public-prefix, or of --public-system."""

    name: str
    path: Path
    # Whether the text is the content of a system message, instead of a text without a template.
    is_system: bool

    @property
    def option(self) -> str:
        """The setting that names it."""
        return "--public-system" if self.is_system else "--public-prefix"

    def __str__(self) -> str:
        return f"{self.option} {self.name}"

    def text(self) -> str:
        """What it holds, without the line end that ends it. Raises SettingRefused."""
        try:
            with self.path.open("rb") as opened:
                data = opened.read(TEXT_BYTES_MAX + 1)
        except OSError as error:
            raise SettingRefused(f"{self}: {self.path}: {error.strerror or error}") from None
        if len(data) > TEXT_BYTES_MAX:
            raise SettingRefused(f"{self}: it has more than {TEXT_BYTES_MAX} bytes; shorten it")
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise SettingRefused(
                f"{self}: it is no UTF-8 text: byte {error.start} cannot stand there"
            ) from None
        # Editors end a file's last line; who writes a prompt would not.
        text = text.removesuffix("\n").removesuffix("\r")
        if not text.strip():
            raise SettingRefused(f"{self}: it has no text; a prefix needs some")
        return text


def prefix_files(texts: Sequence[str], systems: Sequence[str]) -> list[PrefixFile]:
    """What the two settings name. Raises SettingRefused."""
    files = [_prefix_file(each, False) for each in texts]
    files += [_prefix_file(each, True) for each in systems]
    if len(files) > PREFIXES_MAX:
        raise SettingRefused(
            f"{len(files)} public prefixes are given, at most {PREFIXES_MAX} can be; leave some out"
        )
    seen: set[str] = set()
    for file in files:
        if file.name in seen:
            raise SettingRefused(f"{file}: another public prefix has the same name; rename one")
        seen.add(file.name)
    return files


def _prefix_file(written: str, is_system: bool) -> PrefixFile:
    name, equals, path = written.partition("=")
    file = PrefixFile(name, Path(path), is_system)
    if not equals or not path or _NAME.fullmatch(name) is None:
        raise SettingRefused(
            f"{file.option}: {written!r} is not NAME=FILE, with a name of 1 to 128 letters, "
            f"digits, _, - and ."
        )
    return file
