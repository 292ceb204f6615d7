"""`kvledger models`: what is known by name, and fetching it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvledger.errors import ModelRefused
from kvledger.models.catalogue import CATALOGUE, fetch


def run(arguments: Sequence[str]) -> int:
    """Lists known models, or fetches those named after `fetch` (all, if none is)."""
    if not arguments:
        for model in CATALOGUE.values():
            state = "fetched" if model.is_fetched else "not fetched"
            print(f"{model.name}  {model.bytes / 1e6:.0f} MB  {state}  {model.path}")
        return 0
    names = list(arguments[1:]) or list(CATALOGUE)
    unknown = [name for name in names if name not in CATALOGUE]
    if arguments[0] != "fetch" or unknown:
        print("usage: kvledger models [fetch [NAME ...]]", file=sys.stderr)
        return 2
    try:
        for name in names:
            if not CATALOGUE[name].is_fetched:
                fetch(CATALOGUE[name], lambda line: print(f"kvledger: {line}", file=sys.stderr))
    except ModelRefused as error:
        print(f"kvledger models: {error}", file=sys.stderr)
        return 1
    return 0
