"""From the contract's messages to what `kvledger top` shows."""

from __future__ import annotations

from kvledger.top.picture import Books, Finding, Load, Marks, Owner, Phase
from kvledger.v1 import diagnosis_pb2, ledger_pb2

_KINDS = {ledger_pb2.SCOPE_KIND_GROUP: "group", ledger_pb2.SCOPE_KIND_PUBLIC: "public"}


def books_of(ledger: ledger_pb2.Ledger) -> Books:
    """The pool and who has what of it."""
    pool = ledger.pool
    return Books(
        elapsed=ledger.elapsed.ToNanoseconds() / 1e9,
        blocks=pool.blocks,
        block_bytes=pool.block_bytes,
        free=pool.free.blocks,
        reserved=pool.reserved.blocks,
        held=pool.held.blocks,
        cached=pool.cached.blocks,
        releasing=pool.releasing.blocks,
        empty_slots=pool.empty_slots,
        held_slots=pool.held_slots,
        owners=(*map(_tenant, ledger.tenants), *map(_scope, ledger.scopes)),
    )


def _tenant(account: ledger_pb2.TenantAccount) -> Owner:
    return Owner(
        key=f"t{account.number}",
        name=account.name,
        is_served=account.is_served,
        held=account.held.blocks,
        reserved=account.reserved.blocks,
        cached=account.cached.blocks,
        guaranteed=account.guaranteed_blocks,
        most=account.max_blocks if account.HasField("max_blocks") else None,
        open=account.open_requests,
        queued=account.queued_requests,
        at_door=account.waiting_requests,
    )


def _scope(account: ledger_pb2.ScopeAccount) -> Owner:
    return Owner(
        key=f"s{account.number}",
        name=account.name,
        kind=_KINDS.get(account.kind, "shared"),
        is_served=False,  # shown while it has blocks
        held=account.held.blocks,
        cached=account.cached.blocks,
    )


def load_of(response: diagnosis_pb2.DiagnoseResponse, ago: float) -> Load:
    """What the server did; `ago` is how many seconds before now what it is held against ended."""
    now, present = response.now, response.present
    setup = now.setup
    seconds = now.interval.ToNanoseconds() / 1e9
    measured = now.HasField("peaks")
    return Load(
        seconds=seconds,
        model=setup.model,
        version=setup.version,
        served=present.served.ToNanoseconds() / 1e9,
        running=present.running_requests,
        paused=present.paused_requests,
        sequences=present.running_sequences,
        sequences_max=setup.max_sequences,
        waiting=present.waiting_requests,
        waiting_tokens=present.waiting_tokens,
        at_door=present.held_requests,
        prefill=_phase(now.prefill, seconds, measured),
        decode=_phase(now.decode, seconds, measured),
        summary=now.summary,
        marks=_marks(now),
        findings=[
            Finding(each.name, each.weight, each.sentence, each.remedy, each.in_vain)
            for each in now.findings
        ],
        requests=now.traffic.requests,
        refused=dict(now.traffic.refused),
        preempted=dict(now.preemptions),
        open_tokens=dict(now.traffic.open_tokens),
        before=_marks(response.before) if response.HasField("before") else None,
        ago=ago,
    )


def _phase(phase: diagnosis_pb2.Phase, seconds: float, measured: bool) -> Phase:
    if not phase.steps or seconds <= 0:
        return Phase()
    by_memory = phase.bound_by == "memory"
    return Phase(
        share=min(1.0, phase.seconds / seconds),
        tokens_per_second=phase.tokens / seconds,
        step_median=phase.step_median,
        step_p99=phase.step_p99,
        sequences=phase.sequences,
        bound_by=phase.bound_by if measured else "",
        of_peak=phase.memory_share if by_memory else phase.compute_share,
    )


def _marks(diagnosis: diagnosis_pb2.Diagnosis) -> Marks:
    seconds = diagnosis.interval.ToNanoseconds() / 1e9
    refused = sum(diagnosis.traffic.refused.values())
    came = diagnosis.traffic.requests + refused
    return Marks(
        waterline=diagnosis.waterline,
        waiting=diagnosis.traffic.waiting + diagnosis.traffic.held,
        decode_rate=diagnosis.decode.tokens / seconds if seconds > 0 else 0.0,
        decode_p99=diagnosis.decode.step_p99,
        refused=refused / came if came else 0.0,
    )
