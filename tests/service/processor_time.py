"""How long something may take, on a machine that others use too."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

# What `_fixed_work` takes on the machine that the tests' bounds are meant for, in seconds.
_FIXED_WORK_SECONDS = 0.05
# A machine that is slower than this tells nothing: then too long is too long.
_SLOWNESS_MAX = 4.0


def _fixed_work() -> float:
    """Seconds of this thread for calls and small objects, which is what the tests' subjects do."""
    started = time.thread_time()
    kept = [(number, str(number)) for number in range(200_000)]
    assert len(kept) == 200_000
    return time.thread_time() - started


@contextmanager
def takes_at_most(seconds: float) -> Iterator[None]:
    """Fails if what is inside takes this thread more than so many seconds of a processor.

    What other tests left in memory does not count, nor do their threads; and a machine that is
    slower just now, by a measure of fixed work right afterwards, gets so much longer.
    """
    gc.freeze()
    try:
        started = time.thread_time()
        yield
        used = time.thread_time() - started
        slowness = 1.0
        if used >= seconds:
            measured = statistics.median(_fixed_work() for _ in range(3))
            slowness = min(max(1.0, measured / _FIXED_WORK_SECONDS), _SLOWNESS_MAX)
    finally:
        gc.unfreeze()
    assert used < seconds * slowness, (
        f"{used:.2f} s of processor time; {seconds} s were allowed, "
        f"on a machine that is {slowness:.1f} times slower than meant"
    )
