"""What a report collects while it reads: sums that stay sums, however long the time is."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from book_writer import SECOND, START, receipt
from planted_books import Planted, ends_some

from kvledger.books.file_statement import state
from kvledger.books.lines import timestamp
from kvledger.report.diagnoses import diagnosis_of
from kvledger.report.recorded import Recorded
from kvledger.report.timeline import BUCKETS_MAX, Memory, Timeline


def read(folder: Path, since: str = "", until: str = "") -> Recorded:
    recorded = Recorded(since, until)
    state([folder], ("tenant",), since, until, recorded)
    return recorded


def sums_of(timeline: Timeline) -> dict[str, Any]:
    """Over all buckets."""
    tenants: Counter[str] = Counter()
    states: Counter[str] = Counter()
    steps = came = covered = scopes = 0
    for _, bucket in timeline.buckets():
        tenants.update(bucket.tenants)
        states.update(bucket.states)
        steps += bucket.load.mixtures["decode"].steps
        came += bucket.load.came
        covered += bucket.covered.total()
        scopes += bucket.scopes
    return {
        **{"tenants": dict(tenants), "states": dict(states), "steps": steps, "came": came},
        **{"covered": covered, "scopes": scopes},
    }


def test_sums_of_a_long_time_are_those_of_its_parts(tmp_path: Path) -> None:
    """A report of a month would show other memory, or other steps, than its days did."""
    books = Planted(tmp_path / "books", block_bytes=1000)
    rounds = 3 * BUCKETS_MAX
    for _ in range(rounds):
        books.passes({"acme": 20, "zoo": 10}, cached=30, scopes={"group": 5})
        books.steps.decode(7, 0.01, 4, 100)
        books.came(3)
        books.looks()
    recorded = read(tmp_path / "books")
    assert len(recorded.timeline.buckets()) <= BUCKETS_MAX
    sums = sums_of(recorded.timeline)
    time = rounds * 10 * SECOND
    assert (sums["steps"], sums["came"]) == (7 * rounds, 3 * rounds)
    assert sums["covered"] == pytest.approx(time, rel=1e-9)
    assert sums["tenants"] == pytest.approx({"acme": 20_000 * time, "zoo": 10_000 * time}, rel=1e-9)
    assert sums["scopes"] == pytest.approx(5000 * time, rel=1e-9)
    assert sums["states"]["cached"] == pytest.approx(30_000 * time, rel=1e-9)
    assert sums["states"]["free"] == pytest.approx(35_000 * time, rel=1e-9)


def test_memory_is_divided_among_the_time_that_it_is_of() -> None:
    """An hour's line would stand as one high tower beside nothing."""
    timeline = Timeline()
    timeline.add_memory("r", Memory({"held": 4000}, {"a": 4000}, 0), 95.0, 135.0)
    shares = {when: bucket.tenants["a"] for when, bucket in timeline.buckets()}
    assert shares == {95.0: 500, 105.0: 1000, 115.0: 1000, 125.0: 1000, 135.0: 500}
    assert timeline.buckets()[0][1].time == 5 * SECOND
    timeline.add_memory("r", Memory({"held": 9}, {"a": 9}, 0), 0.0, 1e8)  # three years
    assert len(timeline.buckets()) <= BUCKETS_MAX
    assert sum(bucket.tenants["a"] for _, bucket in timeline.buckets()) == pytest.approx(4009, 0.1)


def test_tenants_that_come_out_of_the_others_are_not_counted_from_their_beginning(
    tmp_path: Path,
) -> None:
    """With thousands of tenants, one of them would seem to take all the pool for ten seconds."""
    books = Planted(tmp_path / "books", block_bytes=1)
    for _ in range(3):
        books.passes({"acme": 20, "(others)": 30})
        books.looks()
    books.accounts[False, "late"] = Counter(held=books.accounts[False, "(others)"]["held"] // 2)
    books.accounts[False, "(others)"]["held"] //= 2
    books.passes({"acme": 20, "(others)": 10, "late": 20})
    books.looks()
    sums = sums_of(read(tmp_path / "books").timeline)
    assert sums["tenants"] == pytest.approx(
        {"acme": 20 * 40 * SECOND, "(others)": 30 * 40 * SECOND}
    )


def test_a_line_of_load_that_stands_twice_counts_once(tmp_path: Path) -> None:
    """What a failing disk made the server write twice would be twice as much traffic."""
    books = Planted(tmp_path / "books")
    for _ in range(2):
        books.passes({"a": 1})
        books.came(4)
        books.looks()
    whole = books.path.read_bytes().splitlines(keepends=True)
    books.path.write_bytes(b"".join([*whole, whole[-1]]))
    assert sum(each.load.came for each in read(tmp_path / "books").present) == 8


def test_only_lines_of_the_time_count(tmp_path: Path) -> None:
    """A report of yesterday would have today's trouble in it."""
    books = Planted(tmp_path / "books")
    for at in range(6):
        books.passes({"a": 1})
        books.came(1 << at)
        books.looks()
        ends_some(books, {"a": 1}, at * 10 + 9.0)
    since, until = (timestamp(START.replace(second=second)) for second in (20, 45))
    recorded = read(tmp_path / "books", since, until)
    (record,) = recorded.present
    # Lines at 20, 30 and 40 s.
    assert record.load.came == 2 + 4 + 8
    assert record.traffic.ended == 2  # at 29 and 39 s
    assert record.states.total() == 100 * 30 * SECOND
    assert not record.stopped


def test_lines_whose_numbers_cannot_be_are_in_no_chart(tmp_path: Path) -> None:
    """One damaged line would end the reading, or be all that a chart shows."""
    books = Planted(tmp_path / "books")
    for _ in range(2):
        books.passes({"a": 1})
        books.looks()
    *_, pool, load = books.path.read_text().splitlines()
    with books.path.open("a") as file:
        file.write(pool.replace('"at":"2026', '"at":"x2026') + "\n")
        file.write(pool.replace('"at":"2026', '"at":"9999') + "\n")
        file.write(load.replace('"at":"2026', '"at":"x2026').replace('"since":1', '"since":2'))
        file.write("\n")
    huge = Planted(tmp_path / "books")
    huge.write({**_facts(huge), "replica": "f" * 16, "blocks": 10**400})
    huge.setup = huge.setup.__class__(**{**vars(huge.setup), "blocks": 10**400})
    for _ in range(2):
        huge.passes({"a": 1})
        huge.states_pool()
    books.passes({"a": 1})
    books.accounts[False, "a"]["held"] = 10**400
    books.states_pool()
    books.ends(receipt(1 << 200, 1 << 200), "a")
    recorded = read(tmp_path / "books")
    assert recorded.unplaced_lines == 6
    assert len(recorded.timeline.buckets()) == 2
    assert recorded.replicas[books.replica.id].traffic.ended == 0


def _facts(books: Planted) -> dict[str, Any]:
    from kvledger.books import lines

    return lines.replica_line(books.replica)


def test_the_diagnosis_sees_what_lines_counted(tmp_path: Path) -> None:
    """The findings of a report would be about nothing, or about another hour."""
    books = Planted(tmp_path / "books")
    for at in range(30):
        books.passes({"a": 40})
        books.steps.decode(400, 0.02, 20, 300)  # 8 s
        books.came(20, waiting=4, open_=24, queue_full=5)
        ends_some(books, {"a": 1}, at * 10 + 5.0)
        books.looks()
    (record,) = read(tmp_path / "books").present
    diagnosis = diagnosis_of(record)
    assert diagnosis is not None
    seen = diagnosis.seen
    assert seen.seconds == 300
    assert seen.decode.steps == 30 * 400
    assert seen.decode.sequences == 20
    assert seen.busy == pytest.approx(0.8)
    assert seen.waiting == pytest.approx(4 / 24)
    assert seen.waterline == pytest.approx(0.4)
    assert seen.traffic.ended == 30
    assert seen.decode_step[0] == pytest.approx(0.02, rel=0.2)
    assert diagnosis.findings[0].name == "queue_limit"
    assert "150 of 750 requests" in diagnosis.findings[0].sentence
    record.facts = {"replica": "r"}
    assert diagnosis_of(record) is None
