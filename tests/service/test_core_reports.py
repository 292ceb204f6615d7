"""Plans and reports of the core as Python sees them: for how long, and in which forms."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from engine_harness import make_core
from stepping import NO_REASONS, NOBODY, arrivals

from kvledger import _core
from kvledger.engine import EndReason

KINDS = ("admissions", "preemptions", "refusals", "tokens", "receipts")


def started(**changes: Any) -> tuple[_core.Engine, _core.Plan, _core.Report]:
    """A core with two sequences in their first step."""
    core = make_core(**changes)
    return core, *core.plan(
        1, arrivals([[5, 6, 7], [8, 9]], 2, ignore_end_of_text=np.zeros(2, np.bool_))
    )


def ids(*numbers: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.array(numbers, dtype=np.uint64)


def test_a_list_and_an_array_say_the_same() -> None:
    """What streams get would differ from what is counted."""
    core, plan, report = started()
    assert report.token_list == []
    assert report.tokens.tolist() == []
    first = core.commit(plan.step, np.array([40, 257], np.int32), None, 2)
    assert first.token_list == [(0, 40, 0), (1, 257, EndReason.STOP)]
    assert first.token_list == first.tokens.tolist()
    assert all(type(value) is int for token in first.token_list for value in token)


def test_without_offsets_everybody_has_one_token() -> None:
    """A step would give somebody another's token."""
    reports = []
    for offsets in (None, np.arange(3, dtype=np.int32)):
        core, plan, _ = started()
        reports.append(core.commit(plan.step, np.array([40, 41], np.int32), offsets, 2))
    assert reports[0].token_list == reports[1].token_list == [(0, 40, 0), (1, 41, 0)]


def test_a_plan_needs_no_more_than_the_time() -> None:
    """Saying nothing and saying that there is nothing would differ."""
    reports = []
    for nothing in ((), (None,), (None, NOBODY, NO_REASONS), (None, None, None, NOBODY, NOBODY)):
        core, plan, _ = started()
        core.commit(plan.step, np.array([40, 41], np.int32), None, 2)
        plan, report = core.plan(3, *nothing)
        assert plan.tokens == 2
        assert report.is_empty
        reports.append((plan.token_ids.tolist(), report.running, report.balances.tolist()))
    assert reports == reports[:1] * 4


def test_ends_need_ids_and_reasons() -> None:
    """Half of what an end needs would be read beyond its array, or be ignored."""
    core = make_core()
    for half in ((ids(1), None), (None, np.array([1], np.uint8)), (ids(1, 2), NO_REASONS)):
        with pytest.raises(ValueError, match="end"):
            core.plan(1, None, *half)


def test_other_numbers_than_int32_are_no_tokens() -> None:
    """Bytes of something else would be committed."""
    core, plan, _ = started()
    for tokens in (
        np.array([40, 41], np.int64),
        np.array([40, 41], np.float32),
        np.array([40, 41], ">i4"),
        np.array([40, 0, 41], np.int32)[::2],
    ):
        with pytest.raises(TypeError):
            core.commit(plan.step, tokens, None, 2)  # type: ignore[arg-type]
    assert core.commit(plan.step, np.array([40, 41], np.int32), None, 2).token_list


def test_a_report_says_whether_anything_ended() -> None:
    """Who ended would be kept for ever, or every step be searched for ends."""
    core, plan, admitted = started()
    assert not admitted.is_empty
    assert not admitted.has_ends
    tokens = core.commit(plan.step, np.array([40, 41], np.int32), None, 2)
    assert not tokens.is_empty
    assert not tokens.has_ends
    _, ended = core.plan(3, None, ids(1), np.array([EndReason.CANCELLED], np.uint8))
    assert ended.has_ends
    assert ended.receipts["sequence"].tolist() == [1]
    refusing = make_core()
    _, refused = refusing.plan(1, arrivals([[]]))
    assert refused.has_ends
    assert refused.refusals["sequence"].tolist() == [0]


def test_a_report_stays_what_it_was() -> None:
    """The event loop reads a report while the engine is steps ahead, or gone."""
    core, plan, admitted = started()
    first = core.commit(plan.step, np.array([40, 41], np.int32), None, 2)
    tokens, balances = first.tokens, first.balances.tolist()
    plan, _ = core.plan(3)
    last = core.commit(plan.step, np.array([42, 43], np.int32), None, 4)
    assert last.receipts.size == 2
    receipts = last.receipts
    del core, plan, last
    gc.collect()
    assert tokens["token"].tolist() == [40, 41]
    assert first.balances.tolist() == balances
    assert admitted.admissions["sequence"].tolist() == [0, 1]
    assert receipts["output_tokens"].tolist() == [2, 2]


def test_arrays_outlive_their_report() -> None:
    """A receipt that somebody keeps would turn into other bytes."""
    core, plan, report = started()
    arrays = {kind: getattr(report, kind) for kind in KINDS}
    expected = {kind: array.tolist() for kind, array in arrays.items()}
    del report
    gc.collect()
    core.commit(plan.step, np.array([40, 41], np.int32), None, 2)
    assert {kind: array.tolist() for kind, array in arrays.items()} == expected


def test_a_plan_keeps_its_engine() -> None:
    """A model that computes a step would read memory that somebody else has by now."""
    core, plan, _ = started()
    ids_before = plan.token_ids.tolist()
    array, tables = plan.token_ids, plan.block_tables
    del core
    gc.collect()
    assert plan.token_ids.tolist() == ids_before
    del plan
    gc.collect()
    assert array.tolist() == ids_before
    assert tables.shape[0] == 8


def test_engines_do_not_stay_for_their_plans() -> None:
    """A core and its one plan would hold each other, and no test or reload would free a pool."""

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    def make() -> None:
        core = make_core(blocks=400_000, sequences_max=8, slots_per_block=8)
        core.plan(1, arrivals([[1, 2]]))

    make()
    gc.collect()
    before = resident()
    for _ in range(20):
        make()
    gc.collect()
    assert resident() - before < 40 * 2**20


def test_prefixes_are_timed_where_that_was_asked_for() -> None:
    """The core reads no clock by itself, and a metric of nothing would look like no cost."""
    for times in (False, True):
        core, plan, planned = started(reuses_prefixes=True, times_prefixes=times)
        committed = core.commit(plan.step, np.array([40, 41], np.int32), None, 2)
        assert (0 < planned.prefix_nanoseconds < committed.prefix_nanoseconds) == times
        assert core.prefix_counts["nanoseconds"] == committed.prefix_nanoseconds


def test_the_books_are_timed_where_that_was_asked_for() -> None:
    """The price of the books would be shown as nothing."""
    for times in (False, True):
        core, plan, planned = started(times_books=times)
        committed = core.commit(plan.step, np.array([40, 41], np.int32), None, 2)
        assert (0 < planned.books_nanoseconds < committed.books_nanoseconds) == times
