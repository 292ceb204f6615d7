"""Lets these tests import what the service's tests share, however pytest was called."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "service" / sub) for sub in ("", "rpc")]
