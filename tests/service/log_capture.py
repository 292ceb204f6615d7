"""What one module logs, however other tests have set logging up before."""

from __future__ import annotations

from collections.abc import MutableMapping
from types import ModuleType
from typing import Any

import pytest
import structlog


def captured(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> list[MutableMapping[str, Any]]:
    """The lines that a module logs from now on, of every level, until the test ends."""
    capture = structlog.testing.LogCapture()
    log = structlog.wrap_logger(
        structlog.PrintLogger(), processors=[capture], wrapper_class=structlog.BoundLogger
    )
    monkeypatch.setattr(module, "_log", log)
    return capture.entries
