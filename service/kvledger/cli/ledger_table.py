"""The books as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from kvledger.cli.client import printable
from kvledger.v1 import generation_pb2, ledger_pb2

_MB = 1_000_000

_KINDS = {
    ledger_pb2.SCOPE_KIND_GROUP: "group",
    ledger_pb2.SCOPE_KIND_PUBLIC: "public",
}


def ledger_table(ledger: ledger_pb2.Ledger) -> str:
    """All of it: the pool, tenants, shared scopes, memory."""
    parts = [_pool(ledger), _tenants(ledger), _scopes(ledger), _memory(ledger.memory)]
    return "\n\n".join(part for part in parts if part)


def statement_table(statement: ledger_pb2.Statement) -> str:
    """One tenant's account."""
    block = statement.block_bytes
    rows = [
        [name, str(balance.blocks), _mb(balance.blocks * block), _time(balance.time)]
        for name, balance in (
            ("held", statement.held),
            ("reserved", statement.reserved),
            ("cached", statement.cached),
        )
    ]
    return "\n".join(
        [
            f"tenant {printable(statement.tenant)}: {statement.open_requests} open requests, "
            f"{statement.waiting_requests} waiting; {_uptime(statement.elapsed.ToNanoseconds())}",
            _columns([["", "blocks", "MB", "block-seconds"], *rows]),
            f"of held, {_time(statement.closed_held)} block-seconds stand in receipts",
        ]
    )


def _pool(ledger: ledger_pb2.Ledger) -> str:
    pool = ledger.pool
    whole = pool.blocks * ledger.elapsed.ToNanoseconds()
    rows = []
    for name in ("free", "reserved", "held", "cached", "releasing"):
        balance = getattr(pool, name)
        share = _nanos(balance.time) / whole if whole else 0.0
        row = [name, str(balance.blocks), _mb(balance.blocks * pool.block_bytes)]
        rows.append([*row, _time(balance.time), f"{share:.1%}"])
    empty = pool.empty_slots / pool.held_slots if pool.held_slots else 0.0
    formats = ", ".join(f"{each.format} of {each.slots_per_block} slots" for each in ledger.formats)
    return "\n".join(
        [
            f"KV pool: {pool.blocks} blocks of {pool.block_bytes} bytes ({formats}); "
            f"waterline {pool.waterline:.1%}; {_uptime(ledger.elapsed.ToNanoseconds())}",
            _columns([["", "blocks", "MB", "block-seconds", "of all"], *rows]),
            f"slots of held blocks: {pool.held_slots}, {pool.empty_slots} empty ({empty:.1%})",
        ]
    )


def _tenants(ledger: ledger_pb2.Ledger) -> str:
    head = ["tenant", "held", "reserved", "cached", "held x s", "cached x s"]
    rows = [[*head, "guaranteed", "most", "open", "waiting"]]
    for each in ledger.tenants:
        most = str(each.max_blocks) if each.HasField("max_blocks") else "-"
        rows.append(
            [
                printable(each.name) + ("" if each.is_served else " *"),
                *(str(b.blocks) for b in (each.held, each.reserved, each.cached)),
                *(_time(b.time) for b in (each.held, each.cached)),
                *(str(each.guaranteed_blocks), most),
                *(str(each.open_requests), str(each.waiting_requests)),
            ]
        )
    if len(rows) == 1:
        return ""
    others = any(not each.is_served for each in ledger.tenants)
    return _columns(rows) + ("\n* may not call" if others else "")


def _scopes(ledger: ledger_pb2.Ledger) -> str:
    rows = [["shared by", "held", "cached", "held x s", "cached x s"]]
    for each in ledger.scopes:
        name = f"{_KINDS.get(each.kind, '?')} {printable(each.name)} ({each.number})"
        balances = (each.held, each.cached)
        counts = [str(b.blocks) for b in balances]
        rows.append([name, *counts, *(_time(b.time) for b in balances)])
    return _columns(rows) if len(rows) > 1 else ""


def _memory(memory: ledger_pb2.ProcessMemory) -> str:
    names = ("weights", "workspace", "pool", "host_arena", "runtime", "tokenizer", "constraints")
    rows = [["memory of the process", "MB"]]
    rows += [
        [name.replace("_", " "), _mb(getattr(memory, name))]
        for name in (*names, "service", "other")
    ]
    return _columns([*rows, ["resident", _mb(memory.resident)]])


def _columns(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [text.rjust(width) for text, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]))
    return "\n".join(lines)


def _nanos(time: generation_pb2.BlockTime) -> int:
    return time.seconds * 1_000_000_000 + time.nanos


def _time(time: generation_pb2.BlockTime) -> str:
    return f"{time.seconds + time.nanos / 1e9:.3f}"


def _mb(count: int) -> str:
    return f"{count / _MB:.1f}"


def _uptime(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e9:.1f} s since the pool was taken"
