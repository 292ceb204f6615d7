"""The limits of one machine that every step of a model runs into, measured or given.

Measured with what the server itself runs: the core's thread pool, its plain read of memory and its
linear layers. Each figure is the best of several runs, because a bound has to hold also when the
machine is quiet; on a busy machine the best is still less than it could be, so measure on a quiet
one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

import numpy as np

from kvledger import _core
from kvledger.memory import memory_available

# The formats of weights that are tried. The kernels turn each into floats and multiply those, so
# with many rows all are bound by the same arithmetic, and the best stands for all.
_MULTIPLIED_AS_F32 = ("f32", "bf16", "q4_1")

_SECONDS_MULTIPLYING = 1.2
_READS = 10
# A measurement that gets less of its processors was made on a busy machine.
_SHARE_LEAST = 0.9
_BARRIERS = 4096
# A tile of weights of so many inputs lies in a core's own cache beside the rows that meet it.
_INPUTS = 512
_ROWS = 256
_TILE_OUTPUTS = 32
_TILES_PER_THREAD = 8
_TILES_LEAST = 32
_READ_LEAST = 256 << 20
_READ_MOST = 1 << 30
# A read of a few times the largest cache comes from memory for the most part.
_CACHES = 4


@dataclass(frozen=True)
class Machine:
    """What figures belong to: on another one, or with other kernels, they are others."""

    processor: str
    threads: int
    instruction_set: str


@dataclass(frozen=True)
class MachinePeaks:
    """What a machine can do at most.

    `operations_per_second` counts multiplications and additions apart, in linear layers of many
    rows, by what is multiplied: "f32" is always there. `barrier_seconds` is one meeting of all
    threads. `processor_share` is how much of its processors' time the measurement got, 1 where no
    other program ran. All but the first two are None for figures that somebody gave.
    """

    read_bytes_per_second: float
    operations_per_second: Mapping[str, float]
    barrier_seconds: float | None = None
    processor_share: float | None = None
    measured_at: datetime | None = None
    machine: Machine | None = None

    @classmethod
    def given(cls, read_bytes_per_second: float, operations_per_second: float) -> MachinePeaks:
        """The figures of a machine that is not at hand."""
        return cls(read_bytes_per_second, {"f32": operations_per_second})

    def operations(self, weight_format: str) -> float:
        """Operations a second with weights of a format.

        Weights without a figure of their own are multiplied as f32, whatever they are kept as.
        """
        rates = self.operations_per_second
        return rates.get(weight_format, rates["f32"])

    @property
    def is_disturbed(self) -> bool:
        """Whether other programs took so much of the processors that the figures are too low."""
        return self.processor_share is not None and self.processor_share < _SHARE_LEAST

    @property
    def balance(self) -> float:
        """Operations for each byte read at which memory and arithmetic take equally long."""
        return self.operations("f32") / self.read_bytes_per_second


def this_machine(kernels: _core.CpuKernels) -> Machine:
    """The machine as these kernels use it."""
    return Machine(_processor(), kernels.threads, kernels.instruction_set)


def measure(kernels: _core.CpuKernels) -> MachinePeaks:
    """Measures for about two seconds with all threads of `kernels`.

    Takes 256 MiB to 1 GiB of memory for that time, a quarter of what is free at most.
    """
    wall, used = time.perf_counter(), time.process_time()
    operations = _multiply_rate(kernels)
    wall, used = time.perf_counter() - wall, time.process_time() - used
    return MachinePeaks(
        read_bytes_per_second=_read_rate(kernels, _read_bytes()),
        operations_per_second={"f32": operations},
        processor_share=min(1.0, used / (wall * kernels.threads)),
        barrier_seconds=_barrier_seconds(kernels),
        measured_at=datetime.now(timezone.utc).replace(microsecond=0),
        machine=this_machine(kernels),
    )


def _read_bytes() -> int:
    wanted = max(_READ_LEAST, _CACHES * _largest_cache_bytes())
    return max(1 << 20, min(wanted, _READ_MOST, memory_available() // 4))


def _read_rate(kernels: _core.CpuKernels, size: int) -> float:
    memory = np.full(size, 1, dtype=np.uint8)  # written, or all pages would be the same empty one
    return size / min(_seconds(lambda: kernels.read_memory(memory)) for _ in range(_READS))


def _multiply_rate(kernels: _core.CpuKernels) -> float:
    """Operations a second of linear layers with many rows, as the best of all calls."""
    tiles = max(_TILES_LEAST, _TILES_PER_THREAD * kernels.threads)
    outputs = tiles * _TILE_OUTPUTS
    weights = [_core.PackedWeight(name, outputs, _INPUTS) for name in _MULTIPLIED_AS_F32]
    x = np.ones((_ROWS, _INPUTS), dtype=np.float32)
    y = np.zeros((_ROWS, outputs), dtype=np.float32)

    def multiply(weight: _core.PackedWeight) -> None:
        kernels.linear(weight, x.ctypes.data, _ROWS, _INPUTS, y.ctypes.data, outputs, False)

    best, ends = math.inf, time.perf_counter() + _SECONDS_MULTIPLYING
    while time.perf_counter() < ends:
        for weight in weights:  # in turn: a quiet moment is good for one as for the others
            best = min(best, _seconds(partial(multiply, weight)))
    return 2.0 * _ROWS * _INPUTS * outputs / best


def _barrier_seconds(kernels: _core.CpuKernels) -> float:
    """Time of one meeting of all threads; 0 for one thread, which meets nobody."""
    if kernels.threads == 1:
        return 0.0
    return min(_seconds(lambda: kernels.barriers(_BARRIERS)) for _ in range(5)) / _BARRIERS


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return "unknown"
    found = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(found, "unknown")


def _largest_cache_bytes(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Size of the largest cache that the system reports; 0 if it reports none."""
    sizes = [0]
    for path in folder.glob("index*/size"):
        text = path.read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
        digits = text.rstrip("KMG")
        sizes.append(int(digits) * unit if digits.isdigit() else 0)
    return max(sizes)
