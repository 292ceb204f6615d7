"""A plan as a table for people, and as JSON for programs. docs/plan.md describes both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from kvledger.planning.floors import Floor
from kvledger.planning.plan import Alternative, Plan, Times

_LABEL = 42
_WORDS = {"weights": "reading the weights", "kv": "reading KV", "compute": "arithmetic"}


def as_json(plan: Plan) -> dict[str, Any]:
    """Everything, in bytes, tokens, seconds and operations; names are stable."""
    question, pool, layout = plan.question, plan.pool, plan.pool.layout
    config, peaks = plan.config, plan.question.peaks
    bind_until, then = plan.costs.weights_bind_until(question.lengths.living)
    return {
        "model": {
            "name": question.model.name,
            "layers": config.layers,
            "query_heads": config.query_heads,
            "kv_heads": config.kv_heads,
            "head_dim": config.head_dim,
            "hidden": config.hidden,
            "feed_forward": config.feed_forward,
            "vocabulary_tokens": question.model.vocabulary,
            "context_tokens": config.context_tokens,
            "weights": question.settings.weights,
        },
        "question": {
            "lengths": asdict(question.lengths),
            "concurrency": plan.sequences,
            "targets": asdict(question.targets),
            "token_budget": question.settings.token_budget,
            "max_sequences": question.settings.sequences_max,
        },
        "machine": {
            "read_bytes_per_second": peaks.read_bytes_per_second,
            "operations_per_second": dict(peaks.operations_per_second),
            "balance": peaks.balance,
            "barrier_seconds": peaks.barrier_seconds,
            "processor_share": peaks.processor_share,
            "measured_at": peaks.measured_at.isoformat() if peaks.measured_at else None,
            "machine": asdict(peaks.machine) if peaks.machine else None,
        },
        "memory": {**asdict(plan.memory), "left": plan.memory.left},
        "pool": {
            "format": pool.kv_format,
            "blocks": pool.blocks,
            "block_bytes": layout.block_bytes,
            "bytes": pool.bytes,
            "tokens": pool.tokens,
            "tokens_per_block": pool.slots_per_block,
            "bytes_per_token": layout.token_bytes(pool.kv_format),
            "pool_bytes_per_token": layout.block_bytes / pool.slots_per_block,
            "default_blocks": plan.default_blocks,
            "sequence_tokens_max": pool.sequence_tokens_max,
            "fit": asdict(plan.fit),
        },
        "floors": {
            "mean": _times(plan.mean),
            "most": _times(plan.most),
            "weights_bind_until": {"sequences": bind_until, "then": then},
        },
        "formats": [_alternative(each) for each in plan.formats],
        "groups": [_alternative(each) for each in plan.groups],
    }


def _times(times: Times) -> dict[str, Any]:
    return {
        "decode": _floor(times.decode),
        "prefill": _floor(times.prefill),
        "first_token_beside_seconds": times.first_beside_seconds,
        "first_token_of_all_seconds": times.first_of_all_seconds,
        "tokens_per_second": times.tokens_per_second,
        "concurrency_reach": asdict(times.concurrency),
        "context_reach": asdict(times.context),
    }


def _floor(floor: Floor) -> dict[str, Any]:
    return {
        **asdict(floor),
        "seconds": floor.seconds,
        "binds": floor.binds,
        "intensity": floor.intensity,
    }


def _alternative(each: Alternative) -> dict[str, Any]:
    if each.missing:
        return {"name": each.name, "kv_heads": each.kv_heads, "missing": each.missing}
    values = asdict(each)
    del values["missing"]
    return values


def as_text(plan: Plan) -> str:
    """The table."""
    parts = (_head, _memory, _sequences, _floors, _reaches, _changes, _advice)
    return "\n".join(line.rstrip() for part in parts for line in part(plan))


def _head(plan: Plan) -> Iterator[str]:
    config, question = plan.config, plan.question
    lengths, peaks = question.lengths, question.peaks
    yield (
        f"{question.model.name}: {config.layers} layers, {config.query_heads} query heads on "
        f"{config.kv_heads} KV heads of {config.head_dim}, hidden {config.hidden}, vocabulary "
        f"{question.model.vocabulary}, context {config.context_tokens}"
    )
    most = ""
    if lengths.total_most != lengths.total:
        most = f" (at most {lengths.prompt_most} and {lengths.output_most})"
    yield (
        f"prompts of {lengths.prompt} tokens, outputs of {lengths.output}{most}; "
        f"{plan.sequences} at a time"
    )
    rates = (
        f"reads {peaks.read_bytes_per_second / 1e9:.4g} GB/s, multiplies "
        f"{peaks.operations('f32') / 1e9:.4g} Gop/s, balance {peaks.balance:.3g} operations a byte"
    )
    if peaks.machine is None or peaks.measured_at is None:
        yield f"the machine as given: {rates}"
    else:
        of = peaks.machine
        yield (
            f"this machine ({of.processor}, {of.threads} threads, {of.instruction_set}; measured "
            f"{peaks.measured_at:%Y-%m-%d %H:%M} UTC): {rates}"
        )
        if peaks.is_disturbed:
            yield (
                "  measured while other programs ran, so too low, and times below too long: "
                "plan again when it is quiet"
            )


def _memory(plan: Plan) -> Iterator[str]:
    memory, pool, settings = plan.memory, plan.pool, plan.question.settings
    asked = "all that remains"
    if settings.kv_blocks is not None:
        asked = "--kv-blocks"
    elif settings.kv_bytes is not None:
        asked = "--kv-bytes"
    yield from ("", "Memory")
    yield _row("all", _bytes(memory.all))
    yield _row(f"weights, {settings.weights}", _bytes(memory.weights))
    yield _row("the server beside them", _bytes(memory.process + memory.step))
    yield _row("remains for KV", _bytes(memory.left))
    yield _row(
        f"the pool: {asked}",
        f"{pool.blocks} blocks of {pool.layout.block_bytes} bytes, {_bytes(pool.bytes)}",
    )
    yield _row(
        f"a token in {pool.kv_format}",
        f"{pool.layout.token_bytes(pool.kv_format)} bytes; "
        f"{pool.layout.block_bytes / pool.slots_per_block:.10g} with the block's padding",
    )
    yield _row("the pool holds", f"{pool.tokens} tokens, {pool.slots_per_block} to a block")
    yield _row("a sequence can have", f"{pool.sequence_tokens_max} tokens")


def _sequences(plan: Plan) -> Iterator[str]:
    lengths, fit = plan.question.lengths, plan.fit
    yield from ("", "Sequences that fit at a time")
    yield _row("mean lengths, at all ages (optimistic)", f"{fit.living}")
    yield _row(f"mean lengths, at their end ({lengths.total} tokens)", f"{fit.mean}")
    yield _row(f"the most, at its end ({lengths.total_most} tokens; safe)", f"{fit.most}")


def _floors(plan: Plan) -> Iterator[str]:
    mean, most, lengths = plan.mean, plan.most, plan.question.lengths
    until, then = plan.costs.weights_bind_until(lengths.living)

    def both(label: str, values: list[str]) -> str:
        return _row(label, f"{values[0]:>22}{values[1]:>22}")

    yield from ("", f"Times at least, {plan.sequences} at a time")
    yield both("", ["mean lengths", "the most"])
    yield both("context of a sequence", [f"{lengths.living}", f"{lengths.total_most}"])
    pairs = [mean, most]
    yield both("decode step", [_seconds(t.decode.seconds) for t in pairs])
    yield both("  reading takes", [_seconds(t.decode.memory_seconds) for t in pairs])
    yield both("  arithmetic takes", [_seconds(t.decode.compute_seconds) for t in pairs])
    yield both("  bound by", [_WORDS[t.decode.binds] for t in pairs])
    yield both("  operations a byte", [f"{t.decode.intensity:.3g}" for t in pairs])
    yield both("prefill of a prompt alone", [_seconds(t.prefill.seconds) for t in pairs])
    yield both("  bound by", [_WORDS[t.prefill.binds] for t in pairs])
    yield both("  operations a byte", [f"{t.prefill.intensity:.3g}" for t in pairs])
    yield both("  while the others decode", [_seconds(t.first_beside_seconds) for t in pairs])
    yield both("  the last, if all come at once", [_seconds(t.first_of_all_seconds) for t in pairs])
    yield both("tokens/s at most", [f"{t.tokens_per_second:.4g}" for t in pairs])
    yield _row("the weights bind decode", f"below {until} sequences; then {_WORDS[then]}")


def _reaches(plan: Plan) -> Iterator[str]:
    targets = plan.question.targets
    told = [
        f"{name} {_seconds(value)}"
        for name, value in (("TTFT", targets.ttft), ("TPOT", targets.tpot))
        if value is not None
    ]
    yield from ("", f"Reach at best, {' and '.join(told) or 'without targets (--ttft, --tpot)'}")
    for label, times in (("mean lengths", plan.mean), ("the most", plan.most)):
        reach = times.concurrency
        text = f"{reach.most} sequences" if reach.most else "not even one sequence"
        yield _row(f"{label}, at a time", f"{text}; then {reach.stopped_by}")
    reach = plan.mean.context
    text = f"{reach.most} tokens" if reach.most else "none"
    yield _row(f"context of {plan.sequences} at a time", f"{text}; then {reach.stopped_by}")


def _changes(plan: Plan) -> Iterator[str]:
    yield from ("", "With another KV format, in the same pool")
    yield from _table(plan.formats, "format")
    yield from ("", "With other KV heads, weights and pool in as many bytes together")
    yield from _table(plan.groups, "heads")


def _table(rows: tuple[Alternative, ...], first: str) -> Iterator[str]:
    titles = ("bytes a token", "optimistic", "safe", "decode step")
    yield f"  {first:<12}" + "".join(f"{title:>16}" for title in titles)
    for each in rows:
        name = each.name if first == "format" else f"{each.kv_heads} ({each.name})"
        if each.missing:
            yield f"  {name:<12}   {each.missing}"
            continue
        cells = (
            f"{each.token_bytes}",
            f"{each.fit.living}",
            f"{each.fit.most}",
            _seconds(each.decode_seconds),
        )
        yield f"  {name:<12}" + "".join(f"{cell:>16}" for cell in cells)


def _advice(plan: Plan) -> Iterator[str]:
    settings, pool = plan.question.settings, plan.pool
    if settings.kv_blocks is None and settings.kv_bytes is None:
        yield ""
        default = f"{plan.default_blocks} blocks" if plan.default_blocks else "none, and not start"
        yield f"serve takes this pool with --kv-blocks {pool.blocks}; told nothing, {default}"
    if plan.sequences > plan.fit.most:
        yield ""
        yield (
            f"{plan.sequences} at a time do not all fit at their most: {plan.fit.most} do, the "
            f"others wait or are preempted and computed again"
        )


def _row(label: str, value: str) -> str:
    return f"  {label:<{_LABEL}}  {value}"


def _bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} bytes"


def _seconds(seconds: float) -> str:
    if seconds >= 1.0:
        return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:.0f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"
