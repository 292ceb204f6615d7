"""Lets the tests import `bench`, which is no installed package, however pytest was called."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
