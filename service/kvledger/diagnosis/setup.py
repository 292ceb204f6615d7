"""What a server was started with, as the diagnosis needs it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from kvledger import _core
from kvledger.diagnosis.observation import UNKNOWN, Setup
from kvledger.machine.peaks import MachinePeaks
from kvledger.planning.floors import StepCosts
from kvledger.served_model import ServedModel
from kvledger.settings import Settings


def setup_of(
    settings: Settings,
    model: ServedModel,
    peaks: MachinePeaks | None,
    by_threads: Mapping[int, MachinePeaks],
) -> Setup:
    """`peaks` are None where nobody measured the machine; `by_threads` are its peaks with other
    numbers of threads.

    What was measured beside other programs is too little, and no measure.
    """
    if peaks is None or peaks.is_disturbed:
        peaks = UNKNOWN
    return Setup(
        costs=StepCosts(**vars(model.work), peaks=peaks),
        threads=settings.kernel_threads,
        # A GPU's steps do not take more processors.
        processors=processors() if settings.device == "cpu" else settings.kernel_threads,
        token_budget=settings.token_budget,
        sequences_max=settings.sequences_max,
        blocks=model.pool.blocks,
        block_tokens=model.pool.slots_per_block,
        step_stretch=settings.step_stretch,
        prefill_step=settings.prefill_step,
        tpot_target=settings.tpot_target,
        reuses_prefixes=settings.reuses_prefixes,
        kv_format=model.kv_format,
        by_threads={
            threads: other for threads, other in by_threads.items() if not other.is_disturbed
        },
    )


def processors(limit: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Processors that this process may keep busy: those it may run on, and as the container's limit
    allows."""
    most = len(os.sched_getaffinity(0))
    try:
        quota, period = limit.read_text().split()
        return most if quota == "max" else max(1, min(most, int(quota) // int(period)))
    except (OSError, ValueError):
        return most


def kv_formats(model: ServedModel) -> dict[str, int]:
    """Bytes of a token's keys and values, by the KV formats of this build."""
    return {name: model.layout.token_bytes(name) for name in _core.KV_FORMATS}
