"""Lets these tests import what other tests share, however pytest was called."""

from __future__ import annotations

import sys
from pathlib import Path

_TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(_TESTS / folder) for folder in ("service", "service/rpc", "integration")]
