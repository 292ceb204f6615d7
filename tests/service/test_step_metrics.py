"""Metrics of steps: what the core's books say, divided as they promise."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from kvledger import _core
from kvledger.metrics.clock import BooksClock
from kvledger.metrics.load import ComputedShare, LoadMetrics, LoadSources
from kvledger.metrics.steps import OCTAVES, PrefillSpeed, StepMetrics, batch_classes, by_octave
from kvledger.planning.floors import ModelWork
from kvledger.tenants.shares import PoolShape

BOUNDS = _core.StepBooks.bounds
WORK = ModelWork(
    layer_bytes=1000,
    head_bytes=100,
    layer_operations={"q4_1": 50.0, "q6_k": 10.0},
    head_operations={"q6_k": 7.0},
    key_operations=3.0,
    kv_token_bytes=20,
)


def _rows(count: int) -> Any:
    return np.zeros((count, 3 + len(BOUNDS) + 1), dtype=np.int64)


@dataclass
class Books:
    """What a test says that steps did; as core/step_books.h counts it."""

    phases: Any = field(default_factory=lambda: np.zeros((2, 5), dtype=np.int64))
    mixtures: Any = field(default_factory=lambda: _rows(3))
    batches: Any = field(default_factory=lambda: _rows(13))
    forecast: Any = field(default_factory=lambda: np.zeros(4, dtype=np.int64))
    preemptions: Any = field(default_factory=lambda: np.zeros(3, dtype=np.int64))
    waited: Any = field(default_factory=lambda: np.zeros(4, dtype=np.int64))

    def step(self, nanoseconds: int, decode: int = 0, keys: int = 0) -> None:
        """One that decodes so many sequences, and nothing else."""
        self._count(self.phases[0], nanoseconds, decode, keys, decode)
        place = max(0, int(decode - 1).bit_length())
        for row in (self.mixtures[0], self.batches[place]):
            self._last(row, nanoseconds, decode)

    def both(self, nanoseconds: int, decode: int, tokens: int) -> None:
        """One that decodes so many sequences and computes a chunk; half of its time for each."""
        self._count(self.phases[0], nanoseconds // 2, decode, decode, decode)
        self._count(self.phases[1], nanoseconds // 2, tokens, tokens, 1)
        self._last(self.mixtures[2], nanoseconds, decode + tokens)

    def prompt(self, nanoseconds: int, tokens: int, keys: int, mixture: int = 1) -> None:
        """A step that computes one chunk of a prompt; with mixture 2 as its part of both."""
        self._count(self.phases[1], nanoseconds, tokens, keys, 1)
        self._last(self.mixtures[mixture], nanoseconds, tokens)

    @staticmethod
    def _count(row: Any, nanoseconds: int, tokens: int, keys: int, sequences: int) -> None:
        row += np.array([1, nanoseconds, tokens, keys, sequences])

    @staticmethod
    def _last(row: Any, nanoseconds: int, tokens: int) -> None:
        row[:3] += np.array([1, nanoseconds, tokens])
        row[3 + int(np.searchsorted(BOUNDS, nanoseconds))] += 1

    def copy(self) -> Books:
        return Books(*(array.copy() for array in vars(self).values()))


class Steps:
    """The metrics alone, over books that a test writes."""

    def __init__(self, books: Books | None = None, target: float = 0.1) -> None:
        self.books = Books() if books is None else books
        self.registry = CollectorRegistry()
        looked = self._look
        self.metrics = StepMetrics(looked, WORK, 64, target, BooksClock())  # type: ignore[arg-type]
        self.registry.register(self.metrics)

    def _look(self) -> Books:
        return self.books.copy()

    def value(self, name: str, **labels: str) -> float:
        value = self.registry.get_sample_value(f"kvledger_{name}", labels)
        assert value is not None, name
        return value


def test_bytes_and_operations_are_those_of_the_model() -> None:
    """An operator would be told that memory binds where arithmetic does."""
    steps = Steps()
    steps.books.step(2_000_000, decode=4, keys=400)
    steps.books.step(3_000_000, decode=2, keys=300)
    steps.books.prompt(5_000_000, tokens=100, keys=5050)
    # Its weights are read for the decoding of the same step.
    steps.books.prompt(1_000_000, tokens=50, keys=1275, mixture=2)
    assert steps.value("phase_bytes_total", phase="decode") == 2 * 1100 + 700 * 20
    assert steps.value("phase_bytes_total", phase="prefill") == pytest.approx(
        1100 + (5050 + 1275) / 75 * 20
    )
    assert steps.value("phase_operations_total", phase="decode") == 6 * (60 + 7) + 700 * 3
    assert steps.value("phase_operations_total", phase="prefill") == 150 * 60 + 2 * 7 + 6325 * 3
    assert steps.value("phase_seconds_total", phase="decode") == 0.005
    assert steps.value("phase_sequences_total", phase="decode") == 6


def test_no_counter_goes_down_between_two_looks() -> None:
    """A collector would take it for a restart, and draw a peak that never was."""
    steps = Steps()
    steps.books.prompt(10**7, tokens=32, keys=32 * 4000)
    before = steps.value("phase_bytes_total", phase="prefill")
    # Long chunks of short contexts: the mean of all, times all chunks, would become less.
    steps.books.prompt(10**7, tokens=2048, keys=2048)
    after = steps.value("phase_bytes_total", phase="prefill")
    assert after == pytest.approx(before + 1100 + 20)


def test_what_tried_the_core_before_is_no_clients() -> None:
    """The first rate after a start would be that of the server's own check."""
    books = Books()
    books.step(10**6, decode=1, keys=9)
    books.preemptions[0] = 3
    steps = Steps(books)
    assert steps.value("phase_steps_total", phase="decode") == 0
    assert steps.value("preemptions_total", reason="for_another") == 0
    books.preemptions += np.array([1, 2, 4])
    books.waited += np.array([1, 2, 4, 8]) * 500_000_000
    for what, seconds in (("place", 0.5), ("memory", 1.0), ("share", 2.0), ("turn", 4.0)):
        assert steps.value("waited_step_seconds_total", **{"for": what}) == seconds
    for reason, count in (("for_another", 1), ("for_itself", 2), ("paused", 4)):
        assert steps.value("preemptions_total", reason=reason) == count


def test_durations_fall_into_octaves() -> None:
    """A quantile of steps would be that of others."""
    steps = Steps()
    for nanoseconds in (50_000, 2**16, 2**16 + 1, 2**20, 2**20 + 1, 2**37):
        steps.books.step(nanoseconds, decode=3)
    name = "step_duration_seconds_bucket"
    reached = [steps.value(name, mixture="decode", le=repr(bound)) for bound in OCTAVES]
    assert reached[:6] == [2, 3, 3, 3, 4, 5]
    assert reached[-1] == 5
    assert steps.value(name, mixture="decode", le="+Inf") == 6
    assert steps.value("step_duration_seconds_count", mixture="decode") == 6
    assert steps.value("decode_step_duration_seconds_count", batch="3-4") == 6
    assert steps.value("decode_batch_tokens_total", batch="3-4") == 18
    assert steps.value("decode_batch_tokens_total", batch="33-64") == 0
    assert by_octave(np.arange(82)).sum() == np.arange(82).sum()


@pytest.mark.parametrize(
    ("sequences_max", "last", "count"),
    [(1, "1", 1), (2, "2", 2), (3, "3-4", 3), (64, "33-64", 7), (4096, "2049+", 13)],
)
def test_only_batches_that_can_be_have_series(sequences_max: int, last: str, count: int) -> None:
    """Hundreds of series would always be 0, or the largest batches be missing."""
    classes = batch_classes(sequences_max)
    assert (classes[-1], len(classes)) == (last, count)


def test_tokens_are_in_time_if_their_step_was() -> None:
    """The share of tokens within the target would say that all is well, or never."""
    steps = Steps(target=0.05)
    target = steps.value("token_gap_target_seconds")
    assert 0.05 / 2**0.25 < target <= 0.05
    steps.books.step(int(target * 1e9) - 10, decode=8)
    assert steps.value("tokens_in_time_total") == 8
    steps.books.step(int(target * 1e9) + 10_000, decode=2)
    steps.books.step(10**9, decode=1)
    assert steps.value("tokens_in_time_total") == 8
    assert steps.value("token_gap_seconds_count") == 11
    assert steps.value("token_gap_seconds_sum") == pytest.approx(10 * target + 1.0, rel=1e-3)


def test_tokens_that_wait_for_prompts_have_their_gap() -> None:
    """The gaps that callers notice most, those with a prompt in them, would be in no chart."""
    steps = Steps(target=0.05)
    steps.books.step(10**7, decode=4)
    steps.books.both(10**9, decode=4, tokens=512)
    steps.books.both(10**9, decode=2, tokens=512)
    assert steps.value("token_gap_seconds_count") == 10
    assert steps.value("token_gap_seconds_sum") == pytest.approx(4 * 0.01 + 6.0)
    assert steps.value("tokens_in_time_total") == 4
    steps.books.both(10**9, decode=3, tokens=512)
    assert steps.value("token_gap_seconds_count") == 13
    assert steps.value("tokens_in_time_total") == 4
    # What they took says nothing of their batch.
    assert steps.value("decode_step_duration_seconds_count", batch="3-4") == 1
    assert steps.value("decode_batch_tokens_total", batch="3-4") == 4


def test_a_step_that_ends_between_two_counts_is_counted_once() -> None:
    """Gaps would go down, or be there twice, when a step ends while somebody looks."""
    steps = Steps()
    steps.books.both(10**7, decode=4, tokens=8)
    assert steps.value("token_gap_seconds_count") == 4
    late = Books()
    late.step(10**7, decode=2)
    steps.books.batches += late.batches  # seen after its phase was looked at
    steps.books.both(10**7, decode=1, tokens=8)
    assert steps.value("token_gap_seconds_count") == 6
    steps.books.phases += late.phases
    steps.books.mixtures += late.mixtures
    steps.books.both(10**7, decode=1, tokens=8)
    assert steps.value("token_gap_seconds_count") == 8


def test_a_target_that_is_a_buckets_bound_stays_as_it_is() -> None:
    """A target of a round number of buckets would be a fifth stricter than what was set."""
    assert Steps(target=OCTAVES[9]).metrics.gap_target == OCTAVES[9]
    assert Steps(target=1e-6).metrics.gap_target == 0.0, "no bucket is so short"


def test_forecasts_are_told_with_their_error() -> None:
    """Nobody could see that the scheduler plans with wrong times."""
    steps = Steps()
    steps.books.forecast += np.array([4, 2 * 10**9, 3 * 10**9, 10**9])
    assert steps.value("forecast_steps_total") == 4
    assert steps.value("forecast_expected_seconds_total") == 2
    assert steps.value("forecast_taken_seconds_total") == 3
    assert steps.value("forecast_error_seconds_total") == 1


def test_the_speed_of_prompts_is_that_of_lately() -> None:
    """A wait would be predicted from what a machine did yesterday."""
    books = Books()
    speed = PrefillSpeed(books.copy)  # type: ignore[arg-type]
    assert speed.tokens_per_second() is None
    books.step(10**9, decode=5)
    assert speed.tokens_per_second() is None, "nothing is known from decoding"
    books.prompt(10**9, tokens=1000, keys=1000)
    assert speed.tokens_per_second() == pytest.approx(1000)
    assert speed.tokens_per_second() == pytest.approx(1000), "asking is no news"
    for _ in range(10):
        books.prompt(30 * 10**9, tokens=3000, keys=3000, mixture=2)
        latest = speed.tokens_per_second()
    assert latest == pytest.approx(100, rel=0.01)


def test_load_counts_what_cannot_be_had_and_what_is_not_cached() -> None:
    """A full pool would look half empty, or cached prompts call for more replicas."""
    books = Books()
    books.prompt(10**9, tokens=500, keys=500)
    computed = ComputedShare()
    computed.note(400, 300)
    blocks = {"free": 1, "reserved": 2, "held": 4, "cached": 8, "releasing": 16}
    load = LoadMetrics(
        LoadSources(
            lambda: blocks,
            lambda: 2000,
            lambda: 70_000,
            int,
            int,
            lambda: (5, 3, 1),
            lambda: (5, 4, 1),
            lambda: 0.25,
        ),
        PoolShape(31, 100, 32),
        PrefillSpeed(books.copy),  # type: ignore[arg-type]
        computed,
        None,
        BooksClock(),
    )
    assert load.waterline() == 22 / 31
    told = {family.name: family.samples[0].value for family in load.collect() if family.samples}
    assert told["kvledger_queued_prompt_tokens"] == 2000
    assert told["kvledger_held_prompt_tokens"] == 70_000
    assert told["kvledger_queued_uncached_tokens"] == 500, "more replicas help who is held"
    assert told["kvledger_predicted_wait_seconds"] == 1.0
    assert told["kvledger_kv_pool_bytes"] == 3100
    assert "kvledger_machine_read_bytes_per_second" not in told, "nobody measured it"
    assert told["kvledger_books_seconds"] == 0.25, "the first part is the core's"
    books.phases[:] = 0
    books.mixtures[:] = 0
    load._speed = PrefillSpeed(books.copy)  # type: ignore[arg-type]
    waits = {family.name: family.samples for family in load.collect()}
    assert waits["kvledger_predicted_wait_seconds"] == [], "a guess would be taken for a figure"
