"""Computes the operator's public prefixes when a server starts, so that they are there for all."""

from __future__ import annotations

import structlog

from kvledger import _core
from kvledger.admission import Admission, Caller
from kvledger.engine import EndReason
from kvledger.errors import InvalidRequest, SettingRefused
from kvledger.sampling import SamplingParameters
from kvledger.scopes.claims import Scopes, StartJob
from kvledger.tenants.tenant import Tenant

_log = structlog.get_logger(__name__)

# Whom this work is booked to: a number that no registry gives out, and a name that none may have.
SERVER = Tenant(name="(server)", number=_core.SERVER_TENANTS + 1)


async def compute_public_prefixes(scopes: Scopes, admission: Admission) -> None:
    """Before anybody may enter. Raises SettingRefused for one that cannot be computed or held."""
    for job in scopes.start_jobs():
        await _compute(job, admission)
        _log.info("public_prefix_computed", tokens=len(job.prompt))


async def _compute(job: StartJob, admission: Admission) -> None:
    try:
        ticket = admission.enter(
            Caller(SERVER),
            prompt=job.prompt,
            max_tokens=1,
            sampling=SamplingParameters(),
            priority=0,
            ignore_eos=True,
            scopes=job.claim,
        )
    except InvalidRequest:  # those before it left too few blocks
        raise _does_not_fit(job) from None
    news = None
    while news is None or not news.is_last:
        if (arrival := ticket.mailbox.arrival()) is not None:
            await arrival
        _, news = ticket.mailbox.take()
    if news.refused and not news.lost:
        raise _does_not_fit(job)
    # Without a receipt the engine is gone.
    if news.receipt is None or news.receipt.end_reason is EndReason.FAILED:
        raise SettingRefused(f"public prefix {job.name}: it could not be computed; see the log")


def _does_not_fit(job: StartJob) -> SettingRefused:
    return SettingRefused(
        f"public prefix {job.name}: {len(job.prompt)} tokens do not fit, public prefixes may "
        f"take half of the KV pool; shorten it, or raise --kv-bytes"
    )
