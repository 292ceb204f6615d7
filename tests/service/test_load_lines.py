"""Lines of load: what steps did, exactly, in few bytes, and what is no such line."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planted_books import COSTS, SETUP, Planted, Steps
from server_harness import serving
from test_recorder import lines_in, recorder

from kvledger import _core
from kvledger.books import lines
from kvledger.books.file_statement import state
from kvledger.books.lines import StepTime
from kvledger.books.load_lines import BUCKETS, Load, is_whole, load_line
from kvledger.diagnosis.counts import duration_quantile
from kvledger.diagnosis.observation import phase_figures
from kvledger.diagnosis.setup_facts import facts_of, setup_from
from kvledger.diagnosis.traffic import Crowd, TrafficCounts
from kvledger.report.steps import LoadSums, bound_of

SECOND = 10**9
NOW = datetime(2026, 11, 30, tzinfo=timezone.utc)


def busy() -> Steps:
    """Some seconds of everything."""
    steps = Steps()
    for sequences in (1, 2, 3, 4, 7, 8, 12, 16, 25, 32):
        for spread in (0.8, 0.9, 1.0, 1.3, 2.0):
            steps.decode(9, spread * (0.01 + 0.001 * sequences), sequences, 4000)
    for spread in (0.7, 1.0, 1.1, 1.6):
        steps.prefill(3, 0.1 * spread, 256)
        steps.prefill(7, 0.12 * spread, 200, beside=9)
    return steps


def line_of(steps: Steps, traffic: TrafficCounts | None = None) -> dict[str, Any]:
    """What a server would write that did this in ten seconds."""
    nothing = Steps().counts(0, TrafficCounts())
    counts = steps.counts(10 * SECOND, traffic or TrafficCounts())
    figures = {
        name: phase_figures(COSTS, counts, phase)
        for phase, name in enumerate(("decode", "prefill"))
    }
    line = load_line(NOW, 0, nothing, Load(counts, Crowd(5, 2, 1), 4), figures)
    parsed: dict[str, Any] = json.loads(lines.encoded(line))
    return parsed


def test_what_steps_did_is_in_the_line_whole() -> None:
    """A report would be about other steps than those that ran."""
    steps, traffic = busy(), TrafficCounts(requests=9, open_time=7, waiting_time=3)
    traffic.refused["queue_full"] = 2
    line = line_of(steps, traffic)
    assert is_whole(line)
    assert (line["since"], line["elapsed"]) == (0, 10 * SECOND)
    for at, name in enumerate(("decode", "prefill")):
        row = [line["phases"][name][each] for each in ("steps", "time", "tokens", "keys")]
        assert row == steps.phases[at, :4].tolist()
    for at, name in enumerate(("decode", "prefill", "both")):
        counted = line["mixtures"][name]
        assert [counted[each] for each in ("steps", "time", "tokens")] == (
            steps.mixtures[at, :3].tolist()
        )
        found = np.zeros(BUCKETS, np.int64)
        for bucket, count in counted["durations"].items():
            found[int(bucket)] = count
        assert found.tolist() == steps.mixtures[at, 3:].tolist()
    assert set(line["batches"]) == {"1", "2", "4", "8", "16", "32"}
    assert sum(each["tokens"] for each in line["batches"].values()) == steps.mixtures[0, 2]
    requests = line["requests"]
    assert (requests["came"], requests["refused"]) == (9, {"queue_full": 2})
    assert (requests["open"], requests["waiting"], requests["held"]) == (5, 2, 1)
    weights = (COSTS.layer_bytes + COSTS.head_bytes) * int(steps.phases[0, 0])
    assert line["phases"]["decode"]["weight_bytes"] == weights
    assert line["phases"]["decode"]["kv_bytes"] == steps.phases[0, 3] * COSTS.kv_token_bytes


def test_a_line_is_small() -> None:
    """Ten thousand of them a day would be larger than the receipts."""
    assert len(lines.encoded(line_of(busy()))) < 2048
    everything = Steps()
    for rows in (everything.mixtures, everything.batches):
        rows[:, :3], rows[:, 3:] = 82 * 99, 99
    line = line_of(everything)
    assert is_whole(line)
    assert len(line["batches"]) == 13
    assert len(lines.encoded(line)) < 4096  # of steps of all lengths in batches of all sizes


def test_what_is_left_out_of_a_line_is_not_its_tail() -> None:
    """The slowest steps are what somebody looks for."""
    steps = Steps()
    for at in range(40):
        steps.decode(10, 0.0001 * 1.25**at, 4, 100)
    counted = line_of(steps)["batches"]["4"]
    assert len(counted["durations"]) == 8
    assert sum(counted["durations"].values()) == counted["steps"] == 400
    sums = LoadSums()
    sums.add(line_of(steps))
    right = duration_quantile(steps.batches[2], 0.99)
    assert sums.batches[4].quantile(0.99) == pytest.approx(right)


def test_a_bucket_is_as_long_as_the_core_says() -> None:
    """All times in reports would be off by one bucket."""
    for bucket, bound in enumerate(_core.StepBooks.bounds.tolist()):
        assert bound_of(bucket) == pytest.approx(bound / 1e9, rel=2e-5)


@pytest.mark.parametrize(
    "path",
    [
        ("since",),
        ("step_time",),
        ("phases",),
        ("phases", "decode"),
        ("phases", "prefill", "keys"),
        ("mixtures", "decode", "durations"),
        ("batches", "32", "tokens"),
        ("forecast", "off"),
        ("preemptions", "paused"),
        ("waited", "memory"),
        ("requests", "refused"),
        ("requests", "came"),
        ("reusable_tokens",),
    ],
)
def test_a_line_with_a_part_that_is_none_is_damaged(tmp_path: Path, path: tuple[str, ...]) -> None:
    """One bad number would end the reading of all files, or make every chart wrong."""
    for damage in (None, -1, 1.5, True, "7", [], {"x": -1}, 1 << 63):
        line = line_of(busy())
        part = line
        for name in path[:-1]:
            part = part[name]
        part[path[-1]] = damage
        assert not is_whole(line), damage
    books = Planted(tmp_path / "books")
    books.write({"kind": "load", "at": "2026-11-30", **line})
    books.write(line_of(busy()))
    assert state([tmp_path / "books"]).notes.damaged_lines == 1


@pytest.mark.parametrize(
    "change",
    [
        {"since": 11 * SECOND},
        {"batches": {"x": {}}},
        {"batches": {"8192": {"steps": 1, "time": 1, "tokens": 1, "durations": {"1": 1}}}},
        {"mixtures": {"all": {"steps": 1, "time": 1, "tokens": 1, "durations": {"1": 1}}}},
        {"mixtures": {"both": {"steps": 1, "time": 1, "tokens": 1, "durations": {}}}},
        {"mixtures": {"both": {"steps": 1, "time": 1, "tokens": 1, "durations": {"82": 1}}}},
        {"mixtures": {"both": {"steps": 1, "time": 1, "tokens": 1, "durations": {"-1": 1}}}},
    ],
)
def test_a_line_that_names_what_there_is_not_is_damaged(change: dict[str, Any]) -> None:
    """It would end the reading of all files."""
    assert is_whole(line_of(busy()))
    assert not is_whole(line_of(busy()) | change)


def test_a_setup_comes_back_from_a_file() -> None:
    """Findings would be about another machine, or other settings."""
    line = json.loads(json.dumps({"blocks": SETUP.blocks, "kv_format": "bf16", **facts_of(SETUP)}))
    assert setup_from(line) == SETUP
    del line["peaks"]
    found = setup_from(line)
    assert found is not None
    assert not found.is_measured
    assert facts_of(found).keys() == {"settings", "work"}
    for damage in ({"settings": 5}, {"work": {}}, {"settings": {}}, {"work": []}):
        assert setup_from({**line, **damage}) is None
    for rates in ({}, {"f32": 0}, {"f32": "x"}, [1], None):
        peaks = {"read_bytes_per_second": 1, "operations_per_second": rates}
        assert setup_from({**line, "peaks": peaks}) is None


async def test_a_server_writes_what_its_steps_did(tmp_path: Path) -> None:
    """The books would have lines of load about nothing."""
    folder = tmp_path / "books"
    async with serving("--books", str(folder)) as server:
        for _ in range(3):
            await server.answer(text="abcd", max_tokens=6)
        books = server.server._engine.step_books
    (line,) = lines_in(folder, "load")
    (replica,) = lines_in(folder, "replica")
    assert is_whole(line)
    assert line["requests"]["came"] == line["requests"]["ended"] == 3
    assert line["phases"]["decode"]["tokens"] == int(books.phases[0, 2]) == 15
    assert line["phases"]["prefill"]["tokens"] == int(books.phases[1, 2]) > 0
    assert line["step_time"] == server.server._engine.step_times[0] > 0
    setup = setup_from(replica)
    assert setup is not None
    assert setup.sequences_max == replica["settings"]["sequences_max"] > 0


async def test_what_cannot_be_kept_is_told_by_the_next_line(tmp_path: Path) -> None:
    """With a full disk for an hour, an hour of load would be missing in every sum."""
    steps, passed = Steps(), [0]

    def load() -> Load:
        return Load(steps.counts(passed[0], TrafficCounts()), Crowd(), 0)

    folder = tmp_path / "books"
    books = recorder("--books", str(folder), steps=StepTime, load=load, setup=SETUP)
    await books.start()
    assert books._files is not None
    for kept in (True, False, False, True):
        steps.decode(5, 0.01, 4, 100)
        passed[0] += 10 * SECOND
        with pytest.MonkeyPatch.context() as patch:
            if not kept:
                patch.setattr(books._files, "add_aside", lambda line: False)
            await books.state_pool(await books.look())
    await books.close()
    first, second = lines_in(folder, "load")
    assert (first["mixtures"]["decode"]["steps"], second["mixtures"]["decode"]["steps"]) == (5, 15)
    assert second["elapsed"] - second["since"] == 30 * SECOND
    assert second["since"] == first["elapsed"]
