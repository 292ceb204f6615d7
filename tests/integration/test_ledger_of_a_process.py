"""The books of a real server: its memory is all explained, and they add up under load."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
from server_process import PATIENCE, ServerProcess, answer, request, server_process

from kvledger.v1 import ledger_pb2 as pb
from kvledger.v1 import ledger_pb2_grpc


def ledger_of(channel: grpc.Channel) -> pb.Ledger:
    stub: Any = ledger_pb2_grpc.LedgerServiceStub(channel)  # type: ignore[no-untyped-call]
    ledger: pb.Ledger = stub.GetLedger(pb.GetLedgerRequest(), timeout=PATIENCE).ledger
    return ledger


def resident_of(server: ServerProcess) -> int:
    """What the system says, in bytes."""
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("VmRSS:")]
    return int(line.split()[1]) * 1024


def require_explained(memory: pb.ProcessMemory, resident: int) -> None:
    """The parts that have a name add up to the process's memory within 2 %."""
    named = (
        *(memory.weights, memory.workspace, memory.pool, memory.host_arena),
        *(memory.runtime, memory.tokenizer, memory.constraints, memory.service),
    )
    assert sum(named) + memory.other == memory.resident
    assert sum(named) == pytest.approx(resident, rel=0.02), memory
    assert memory.resident == pytest.approx(resident, rel=0.01)


def test_memory_and_blocks_add_up(tmp_path: Path) -> None:
    """An operator would look for memory that nobody owns to, or plan with some that is not there.

    After a load as well, with many streams at once and long prompts."""
    operators = f"unix:{tmp_path / 'o.sock'}"
    options = ("--operators-listen", operators, "--kv-bytes", "256MiB", "--threads", "1")
    with server_process(*options) as server, grpc.insecure_channel(operators) as channel:
        first = ledger_of(channel)
        pool = first.pool
        assert pool.blocks * pool.block_bytes == first.memory.pool
        assert first.memory.pool <= 256 << 20 < first.memory.pool + pool.block_bytes
        require_explained(first.memory, resident_of(server))
        texts = [f"{number}: {'all work and no play ' * 12}" for number in range(12)]
        with server.channel() as clients:
            asking = [
                threading.Thread(target=answer, args=(clients, request(text, 24))) for text in texts
            ]
            for thread in asking:
                thread.start()
            seen = []
            while any(thread.is_alive() for thread in asking):
                seen.append(ledger_of(channel))
            for thread in asking:
                thread.join()
        for ledger in seen:
            states = [getattr(ledger.pool, s) for s in ("free", "reserved", "held", "cached")]
            states.append(ledger.pool.releasing)
            assert sum(state.blocks for state in states) == pool.blocks
            times = sum(state.time.seconds * 10**9 + state.time.nanos for state in states)
            assert times == pool.blocks * ledger.elapsed.ToNanoseconds()
        assert max(ledger.pool.held.blocks for ledger in seen) >= 4, "or it was no load"
        last = ledger_of(channel)
        require_explained(last.memory, resident_of(server))
        (row,) = [tenant for tenant in last.tenants if tenant.name == "dev"]
        assert row.closed_held == row.held.time
