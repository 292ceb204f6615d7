"""Messages of a server whose pool one tenant floods, for what `kvledger top` makes of them."""

from __future__ import annotations

from kvledger.v1 import diagnosis_pb2, ledger_pb2

BLOCKS = 353


def balance(blocks: int) -> ledger_pb2.Balance:
    return ledger_pb2.Balance(blocks=blocks)


def tenant(name: str, number: int, blocks: tuple[int, int, int], **fields: object) -> object:
    """`blocks` are held, reserved and cached."""
    held, reserved, cached = map(balance, blocks)
    return ledger_pb2.TenantAccount(
        name=name,
        number=number,
        is_served=True,
        held=held,
        reserved=reserved,
        cached=cached,
        **fields,  # type: ignore[arg-type]
    )


def flooded_ledger(seconds: int = 3600) -> ledger_pb2.Ledger:
    ledger = ledger_pb2.Ledger()
    ledger.elapsed.FromSeconds(seconds)
    pool = ledger.pool
    pool.blocks, pool.block_bytes = BLOCKS, 760_320
    for state, blocks in {
        **{"free": 6, "reserved": 12, "held": 308, "cached": 25, "releasing": 2}
    }.items():
        getattr(pool, state).blocks = blocks
    pool.waterline = 322 / BLOCKS
    pool.held_slots, pool.empty_slots = 308 * 32, 986
    ledger.tenants.extend(
        [
            tenant(  # type: ignore[list-item]
                "acme",
                7,
                (280, 12, 5),
                open_requests=40,
                queued_requests=30,
                waiting_requests=5,
                max_blocks=330,
            ),
            tenant(  # type: ignore[list-item]
                "globex", 8, (18, 0, 9), open_requests=4, queued_requests=3, guaranteed_blocks=88
            ),
            tenant("initech", 9, (6, 0, 3), open_requests=1, queued_requests=1),  # type: ignore[list-item]
            tenant("umbrella-production", 10, (0, 0, 4)),  # type: ignore[list-item]
            ledger_pb2.TenantAccount(name="(self-test)", number=1),
        ]
    )
    ledger.scopes.add(
        kind=ledger_pb2.SCOPE_KIND_GROUP,
        name="team",
        number=3,
        held=balance(4),
        cached=balance(4),
    )
    return ledger


def flooded_diagnosis() -> diagnosis_pb2.DiagnoseResponse:
    response = diagnosis_pb2.DiagnoseResponse()
    now, present, before = response.now, response.present, response.before
    now.interval.FromSeconds(30)
    now.summary = "of the first finding"
    now.findings.add(
        name="pool",
        weight=0.97,
        sentence="12 % of the computed tokens had been computed before, after 12 preemptions; the "
        "waterline was 97 % of 353 blocks.",
        remedy="Give the pool more memory (--kv-bytes), or let fewer sequences run "
        "(--max-sequences).",
    )
    now.findings.add(
        name="flooding_tenant",
        weight=0.92,
        sentence="Tenant acme sent 92 % of the prompt tokens of 3 tenants; the others' requests "
        "waited 38 % of their time.",
        remedy="Give acme running_max, tokens_per_second or kv_max.",
    )
    decode, prefill = now.decode, now.prefill
    decode.steps, decode.seconds, decode.tokens, decode.sequences = 900, 10.8, 6300, 7.8
    decode.step_median, decode.step_p99, decode.bound_by = 0.012, 0.110, "memory"
    decode.memory_share, decode.compute_share = 0.64, 0.2
    prefill.steps, prefill.seconds, prefill.tokens, prefill.sequences = 400, 18.6, 37200, 1.2
    prefill.step_median, prefill.step_p99, prefill.bound_by = 0.048, 0.051, "compute"
    prefill.memory_share, prefill.compute_share = 0.1, 0.71
    now.peaks.bytes_per_second = now.peaks.operations_per_second = 1e12
    now.waterline, now.traffic.waiting, now.traffic.requests = 0.97, 0.38, 34
    now.traffic.refused.update({"queue_full": 120, "queued_max": 3})
    now.preemptions.update({"for_another": 11, "paused": 1})
    now.traffic.open_tokens.update({"acme": 37_200.0, "globex": 1_200.0, "initech": 600.0})
    before.interval.FromSeconds(30)
    before.waterline, before.traffic.waiting, before.traffic.requests = 0.41, 0.03, 40
    before.decode.tokens, before.decode.step_p99 = 6360, 0.030
    now.setup.model, now.setup.version = "smollm2-135m-instruct", "0.1.0"
    present.served.FromSeconds(11_520)
    present.running_requests, present.paused_requests = 9, 1
    present.running_sequences, now.setup.max_sequences = 8, 64
    present.waiting_requests, present.waiting_tokens, present.held_requests = 34, 12_400, 5
    return response
