"""What a server was started with, as the diagnosis needs it."""

from __future__ import annotations

import os

from kvledger import _core
from kvledger.diagnosis.observation import Setup
from kvledger.machine.peaks import MachinePeaks
from kvledger.planning.floors import StepCosts
from kvledger.served_model import ServedModel
from kvledger.settings import Settings

# Of a machine that nobody measured: so fast that shares of it are nothing, and ten operations to a
# byte as processors have, so that what is twice as much work still takes twice as long.
UNKNOWN = MachinePeaks.given(1e18, 1e19)


def setup_of(settings: Settings, model: ServedModel, peaks: MachinePeaks | None) -> Setup:
    """`peaks` are None where nobody measured the machine."""
    return Setup(
        costs=StepCosts(**vars(model.work), peaks=peaks if peaks is not None else UNKNOWN),
        threads=settings.kernel_threads,
        processors=len(os.sched_getaffinity(0)),
        token_budget=settings.token_budget,
        sequences_max=settings.sequences_max,
        blocks=model.pool.blocks,
        block_tokens=model.pool.slots_per_block,
        step_stretch=settings.step_stretch,
        prefill_step=settings.prefill_step,
        tpot_target=settings.tpot_target,
        reuses_prefixes=settings.reuses_prefixes,
    )


def kv_formats(model: ServedModel) -> dict[str, int]:
    """Bytes of a token's keys and values, by the KV formats of this build."""
    return {name: model.layout.token_bytes(name) for name in _core.KV_FORMATS}
