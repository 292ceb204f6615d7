"""Jobs and shares as the core takes them: arrays and numbers, not objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvledger import _core
from kvledger.tenants.shares import CoreShare

if TYPE_CHECKING:
    from kvledger.engine import Job

# What is true of a job's scopes, for the core.
_KEEPS, _REUSES, _HAS_SHARED, _WRITES_SHARED, _STAYS = 1, 2, 4, 8, 16


def as_arrays(jobs: Sequence[Job]) -> _core.Arrivals | None:
    """None for none."""
    if not jobs:
        return None
    lengths = np.array([0, *(len(job.prompt) for job in jobs)], dtype=np.int64)
    return _core.Arrivals(
        ids=np.array([job.sequence for job in jobs], dtype=np.uint64),
        tenants=np.array([job.tenant for job in jobs], dtype=np.uint32),
        arrived_at=np.array([job.arrived_at for job in jobs], dtype=np.int64),
        priorities=np.array([job.priority for job in jobs], dtype=np.int32),
        output_tokens_max=np.array([job.max_tokens for job in jobs], dtype=np.int64),
        ignore_end_of_text=np.array([job.ignore_eos for job in jobs], dtype=np.bool_),
        samples=np.array([job.samples for job in jobs], dtype=np.int64),
        offsets=np.cumsum(lengths, dtype=np.int64),
        tokens=np.concatenate([job.prompt for job in jobs]).astype(np.int32, copy=False),
        own_scopes=np.array([job.scopes.own or 0 for job in jobs], dtype=np.uint32),
        shared_scopes=np.array([job.scopes.shared or 0 for job in jobs], dtype=np.uint32),
        shared_tokens=np.array([job.scopes.shared_tokens for job in jobs], dtype=np.int64),
        scope_flags=np.array([_scope_flags(job) for job in jobs], dtype=np.uint8),
        step_times_max=np.array([job.step_time_max for job in jobs], dtype=np.int64),
    )


def _scope_flags(job: Job) -> int:
    """As the bindings of Arrivals have them."""
    scopes = job.scopes
    if scopes.own is None:
        return 0
    # Who wants to hear how likely the prompt was needs all of it computed.
    reuses = job.prompt_logprobs is None
    return (
        _KEEPS
        | (_REUSES if reuses else 0)
        | (_HAS_SHARED if scopes.shared is not None else 0)
        | (_WRITES_SHARED if scopes.writes_shared else 0)
        | (_STAYS if scopes.keeps else 0)
    )


def share_numbers(shares: Sequence[CoreShare]) -> list[tuple[int, int, int, int, bool]]:
    """Tenant, blocks guaranteed, most blocks of requests, most blocks, sealed."""
    return [
        (
            share.tenant,
            share.guaranteed_blocks,
            share.live_blocks_max,
            share.max_blocks,
            share.sealed,
        )
        for share in shares
    ]
