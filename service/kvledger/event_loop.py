"""The event loop that the server runs on."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

_Result = TypeVar("_Result")


def run(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Like asyncio.run.

    uvloop in place of asyncio's own loop, which is Python: with it a streamed token costs a third
    more of the processor that the engine needs too (docs/benchmarks.md, the front end).
    """
    return uvloop.run(work)
