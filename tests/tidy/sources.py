"""The project's files, as the tidy tests read them."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def tracked() -> tuple[Path, ...]:
    """Every file that belongs to the project, relative to its root."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return tuple(Path(line) for line in listed.stdout.splitlines() if (ROOT / line).is_file())


def files(*suffixes: str, under: str = "") -> list[Path]:
    """Tracked files with one of the suffixes, below a folder."""
    return [path for path in tracked() if path.suffix in suffixes and str(path).startswith(under)]


@cache
def text(path: Path) -> str:
    """A file's text."""
    return (ROOT / path).read_text("utf-8")


@dataclass(frozen=True)
class Function:
    """A function and its size."""

    path: Path
    name: str
    line: int
    length: int


def python_functions() -> Iterator[Function]:
    """Every Python function; docstrings do not count as length."""
    for path in files(".py"):
        for node in ast.walk(ast.parse(text(path))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[0]
                documented = ast.get_docstring(node) is not None
                assert node.end_lineno is not None
                start = (first.end_lineno or node.lineno) if documented else node.lineno
                yield Function(path, node.name, node.lineno, node.end_lineno - start)


# A definition begins at the margin or inside a namespace, ends with the brace at the same place.
_DEFINITION = re.compile(r"^(?P<indent> {0,2})(?P<head>[\w:<>,&*~\[\]\s]+\(.*)$")


def cpp_functions() -> Iterator[Function]:
    """Every C++ function, as clang-format lays them out: from its first line to a lone brace."""
    for path in files(".cc", ".h"):
        lines = text(path).splitlines()
        for start, line in enumerate(lines):
            if not re.match(r"^[A-Za-z_].*[({,]$|^[A-Za-z_].*\{$", line) or line.startswith(
                ("namespace", "struct", "class", "enum", "#", "using", "template", "extern")
            ):
                continue
            end = next((i for i in range(start + 1, len(lines)) if lines[i].startswith("}")), start)
            yield Function(path, line[:60], start + 1, end - start)


def imports(path: Path) -> Iterator[str]:
    """Modules that a Python file imports, anywhere in it."""
    for node in ast.walk(ast.parse(text(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def includes(path: Path) -> Iterator[str]:
    """Headers that a C++ file includes."""
    yield from re.findall(r'^#include [<"]([^>"]+)[>"]', text(path), re.MULTILINE)
