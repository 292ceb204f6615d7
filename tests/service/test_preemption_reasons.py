"""What is told of preemptions: to the client, to operators, in the books and in words."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from book_writer import receipt
from log_capture import captured
from scoped_core import ScopedCore
from test_recent_requests import ended

from kvledger import admission
from kvledger.admission import _log_end
from kvledger.books.lines import receipt_line
from kvledger.cli.explain import table, times, why_preempted
from kvledger.rpc.diagnosis import _explained
from kvledger.rpc.translation import preemption_reasons, receipt_message
from kvledger.streams import Receipt

NOON = datetime(2026, 12, 1, 12, tzinfo=timezone.utc)


def preempted(**counts: int) -> Receipt:
    """A receipt of a request that was preempted so often, by what for."""
    changes = {f"preempted_{name}": count for name, count in counts.items()}
    return receipt(
        preemptions=sum(counts.values()), recomputed_tokens=120, requeued=310_000_000, **changes
    )


def test_a_client_is_not_told_who_else_needed_room() -> None:
    """It would learn when others come, or that nobody else is there."""
    others = receipt_message(preempted(own=1, others=2, paused=1), "id", "bf16", 4096)
    itself = receipt_message(preempted(own=1, itself=2, paused=1), "id", "bf16", 4096)
    assert others.preemption_reasons == itself.preemption_reasons
    assert others.preemption_reasons.own_tenant == 1
    assert others.preemption_reasons.shared_capacity == 2
    assert others.preemption_reasons.unread == 1
    assert others.preemptions == 4
    assert not receipt_message(receipt(), "id", "bf16", 4096).HasField("preemption_reasons")


def test_operators_are_told_who_needed_it() -> None:
    """They could not tell a crowded pool from one that is too small for a single request."""
    told = preemption_reasons(preempted(others=2, itself=1), for_client=False)
    assert told is not None
    assert (told.shared_capacity, told.other_tenant, told.stepped_back) == (3, 2, 1)


def test_the_books_have_what_there_was() -> None:
    """Zeros would stand in every line of a server that never preempts."""
    request = ended("id", 1)
    line = receipt_line(replace(request, receipt=preempted(own=2, itself=1)), NOON)
    assert line["preempted_for"] == {"own": 2, "itself": 1}
    assert line["preemptions"] == 3
    assert "preempted_for" not in receipt_line(request, NOON)


def test_the_log_has_them_where_there_were_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator who has no books kept could not tell why a request took so long."""
    entry: Any = SimpleNamespace(request_id="id", tenant="t", samples=1, constraint=None)
    lines = captured(monkeypatch, admission)
    _log_end(entry, preempted(own=2, paused=1))
    _log_end(entry, receipt())
    first, second = lines
    assert first["event"] == second["event"] == "request_finished"
    assert first["preempted_for"] == {"own": 2, "paused": 1}
    assert first["requeued_ms"] == 310.0
    assert "preempted_for" not in second


def test_a_sentence_says_why_and_what_it_cost() -> None:
    """Counts alone would be taken for a fault of the server."""
    request = replace(ended("id", 1), receipt=preempted(own=2, others=1))
    seen = _explained(request, for_client=False)
    assert why_preempted(seen) == (
        "it lost its blocks twice for others of its own tenant, once for another tenant; that cost "
        "it 120 tokens computed again and 310.0 ms of waiting"
    )
    assert table(seen).splitlines()[-1] == why_preempted(seen)
    told = _explained(request, for_client=True)
    assert "once for room that all share" in why_preempted(told)
    assert "another tenant" not in table(told)
    assert "400.0 ms of waiting" in why_preempted(told), "rounded up, as in its receipt"
    calm = _explained(ended("id", 1), for_client=False)
    assert "lost its blocks" not in table(calm)
    assert [times(count) for count in (0, 1, 2, 3)] == ["0 times", "once", "twice", "3 times"]


def reasons_of(asked: Any) -> dict[str, int]:
    names = ("own", "others", "itself", "paused")
    return {name: int(asked.receipt[f"preempted_{name}"]) for name in names}


def test_the_core_says_whose_need_it_was() -> None:
    """Receipts would name the wrong tenant, or nobody."""
    for neighbour, reason in ((1, "own"), (2, "others")):
        core = ScopedCore(blocks=8, context_tokens=64, sequences_max=2, forecast=False)
        first = core.ask(neighbour, neighbour, np.arange(3, 6, dtype=np.int32), 20)
        core.step()
        second = core.ask(1, 1, np.arange(13, 16, dtype=np.int32), 20)
        core.run_out()
        assert int(first.receipt["preemptions"]) == 0
        told = reasons_of(second)
        assert told[reason] == sum(told.values()) == int(second.receipt["preemptions"]) == 1
