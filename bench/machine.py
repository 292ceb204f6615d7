"""What every benchmark prints about the machine, measured in the same run.

The two processors of a small virtual machine are sometimes near each other and sometimes far
apart, and that changes within minutes: figures compare only within one run and one state.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvledger import _core

# Below this many nanoseconds per meeting, two processors share a cache or a die.
NEAR_NANOSECONDS = 80.0


def median_seconds(work: Callable[[], object], repeats: int) -> float:
    """Median time of `work`, after one run that does not count."""
    work()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def barrier_nanoseconds(kernels: _core.CpuKernels) -> float:
    """What one meeting of all threads takes."""
    rounds = 20_000
    return median_seconds(lambda: kernels.barriers(rounds), 5) / rounds * 1e9


def state(kernels: _core.CpuKernels) -> str:
    """Whether the processors are near or far now."""
    nanoseconds = barrier_nanoseconds(kernels)
    word = "near" if nanoseconds < NEAR_NANOSECONDS else "far"
    return f"processors {word} (barrier {nanoseconds:.0f} ns)"


def read_gigabytes_per_second(kernels: _core.CpuKernels, memory: npt.NDArray[np.uint8]) -> float:
    """Speed of a plain contiguous read of `memory` by all threads."""
    return memory.nbytes / median_seconds(lambda: kernels.read_memory(memory), 3) / 1e9


def last_level_cache_bytes() -> int:
    """Size of the largest cache that the system reports."""
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1], 1)
        sizes.append(int(text.rstrip("KMG")) * factor)
    return max(sizes)


def header(kernels: _core.CpuKernels) -> str:
    """Processor, kernels and state in a few lines, to stand above a table."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return (
        f"{model}, last-level cache {last_level_cache_bytes() / 2**20:.0f} MiB\n"
        f"kernels {kernels.instruction_set}, {kernels.threads} threads, {state(kernels)}"
    )
