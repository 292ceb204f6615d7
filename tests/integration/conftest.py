"""Lets these tests import what the service's tests share, however pytest was called."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parents[1] / "service" / sub) for sub in ("", "rpc")]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a tiny model."""
    from tiny_model import write_gguf  # after the path is set

    return write_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf")
