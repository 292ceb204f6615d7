"""What the diagnosis says of intervals whose bottleneck is known, and what it predicts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from kvledger import _core
from kvledger.diagnosis.counts import Counts, EngineCounts, PoolCounts, duration_quantile
from kvledger.diagnosis.diagnosis import diagnose
from kvledger.diagnosis.findings import findings
from kvledger.diagnosis.observation import UNKNOWN, Observation, Setup, observe
from kvledger.diagnosis.traffic import (
    CLASSES,
    Crowd,
    Traffic,
    TrafficCounts,
    class_of,
    class_quantile,
)
from kvledger.engine import EndReason
from kvledger.machine.peaks import MachinePeaks
from kvledger.machine.utilization import ProcessorTimes
from kvledger.metrics.steps import WAITS
from kvledger.planning.floors import StepCosts
from kvledger.streams import receipt_of_waiting

SECOND = 10**9
COSTS = StepCosts(
    layer_bytes=60_000_000,
    head_bytes=30_000_000,
    layer_operations={"q4_1": 200e6},
    head_operations={"q4_1": 60e6},
    key_operations=35_000.0,
    kv_token_bytes=23_000,
    peaks=MachinePeaks.given(20e9, 200e9),
)
SETUP = Setup(
    costs=COSTS,
    threads=2,
    processors=2,
    token_budget=512,
    sequences_max=64,
    blocks=1000,
    block_tokens=32,
    step_stretch=2.0,
    prefill_step=0.05,
    tpot_target=None,
    reuses_prefixes=True,
    kv_format="bf16",
    by_threads={1: MachinePeaks.given(12e9, 100e9)},
)


def bucket(seconds: float) -> int:
    return int(np.searchsorted(_core.StepBooks.bounds, seconds * 1e9))


class Interval:
    """A minute of a server that does what a test says, and nothing else."""

    def __init__(self) -> None:
        self.phases = np.zeros((2, 5), np.int64)
        self.mixtures = np.zeros((3, 3 + 82), np.int64)
        self.batches = np.zeros((13, 3 + 82), np.int64)
        self.fits = np.zeros((2, 9), np.float64)
        self.traffic = TrafficCounts()
        self.preemptions = np.zeros(3, np.int64)
        self.waited = dict.fromkeys(WAITS, 0.0)  # shares of the steps' time
        self.sampling = 0.0
        self.live = 0.3
        self.setup = SETUP

    def decodes(self, steps: int, sequences: int, context: int, seconds: float) -> Interval:
        """Steps of decoding alone, of `seconds` each."""
        self._add(0, steps, sequences, sequences * context, sequences, seconds)
        self._fit(0, steps, sequences, sequences * context, seconds)
        self._step(self.mixtures[0], steps, sequences, seconds)
        self._step(self.batches[(sequences - 1).bit_length()], steps, sequences, seconds)
        return self

    def prompts(self, steps: int, tokens: int, context: int, seconds: float) -> Interval:
        """Steps of one prompt's chunk alone."""
        self._add(1, steps, tokens, tokens * context, 1, seconds)
        self._fit(1, steps, tokens, tokens * context, seconds)
        self._step(self.mixtures[1], steps, tokens, seconds)
        return self

    def both(
        self, steps: int, sequences: int, tokens: int, seconds: float, decode: float
    ) -> Interval:
        """Steps of both; `decode` is the part of their time that is decoding's."""
        self._add(0, steps, sequences, sequences * 200, sequences, decode)
        self._add(1, steps, tokens, tokens * 200, 1, seconds - decode)
        self._fit(1, steps, tokens, tokens * 200, seconds - decode)
        self._step(self.mixtures[2], steps, sequences + tokens, seconds)
        return self

    def asks(self, requests: int, prompt: int, output: int, tenant: str = "a") -> Interval:
        """Requests that came and ended, half a second of decoding each."""
        counts = self.traffic
        counts.requests += requests
        counts.ended += requests
        counts.prompts[class_of(prompt)] += requests
        counts.outputs[class_of(output)] += requests
        counts.prompt_tokens[tenant] += requests * prompt
        counts.all_prompt_tokens += requests * prompt
        counts.computed_tokens += requests * (prompt + output)
        counts.output_tokens += requests * output
        counts.queued[tenant] += 0
        counts.life_time += requests * SECOND // 2
        counts.open_time += requests * SECOND // 2
        counts.lives[tenant] += requests * SECOND // 2
        counts.asked[tenant] += requests * prompt * SECOND // 2
        return self

    def waits(self, seconds: float, tenant: str = "a") -> Interval:
        time, counts = round(seconds * SECOND), self.traffic
        counts.queued_time += time
        counts.queued[tenant] += time
        counts.life_time += time
        counts.lives[tenant] += time
        self._wait(time)
        counts.open_time += time
        return self

    def is_open(
        self, seconds: float, waiting: float = 0.0, held: float = 0.0, stalled: float = 0.0
    ) -> Interval:
        """Requests that have not ended."""
        self.traffic.open_time += round(seconds * SECOND)
        self._wait(round(waiting * SECOND))
        self.traffic.held_time += round(held * SECOND)
        self.traffic.stalled_time += round(stalled * SECOND)
        return self

    def _wait(self, time: int) -> None:
        """Prompts of those that wait are as long as those that came, on average."""
        counts = self.traffic
        counts.waiting_time += time
        counts.waiting_tokens += (
            time * sum(counts.prompt_tokens.values()) // max(1, counts.requests)
        )

    def _add(
        self, phase: int, steps: int, tokens: int, keys: int, rows: int, seconds: float
    ) -> None:
        self.phases[phase] += np.array(
            [steps, round(steps * seconds * SECOND), steps * tokens, steps * keys, steps * rows]
        )

    def _fit(self, phase: int, steps: int, tokens: int, keys: int, seconds: float) -> None:
        """As core/step_books.h adds them up."""
        features = np.array([1.0, tokens, keys]) / (1.0 + tokens / 16 + keys / 16384)
        self.fits[phase, :6] += steps * np.outer(features, features)[np.triu_indices(3)]
        told = seconds * SECOND / (1.0 + tokens / 16 + keys / 16384)
        self.fits[phase, 6:] += steps * features * told

    def _step(self, row: np.ndarray, steps: int, tokens: int, seconds: float) -> None:
        row[:3] += np.array([steps, round(steps * seconds * SECOND), steps * tokens])
        row[3 + bucket(seconds)] += steps

    @property
    def counts(self) -> Counts:
        steps = int(self.mixtures[:, 1].sum())
        pool = self.setup.blocks * 60 * SECOND
        return Counts(
            at=60 * SECOND,
            phases=self.phases,
            mixtures=self.mixtures,
            batches=self.batches,
            forecast=np.zeros(4, np.int64),
            fits=self.fits,
            preemptions=self.preemptions,
            waited=np.array([round(steps * self.waited[name]) for name in WAITS], np.int64),
            engine=EngineCounts(steps, steps, round(self.sampling * steps)),
            pool=PoolCounts(round(pool * (1 - self.live)), 0, round(pool * self.live), 0, 0),
            processors=ProcessorTimes(54 * SECOND, 90 * SECOND, 120 * SECOND),
            traffic=self.traffic,
        )

    @property
    def seen(self) -> Observation:
        return observe(self.setup, self.counts)

    @property
    def named(self) -> list[str]:
        return [finding.name for finding in findings(self.seen)]


def healthy() -> Interval:
    return Interval().decodes(1500, 4, 200, 0.012).prompts(60, 100, 60, 0.08).asks(60, 100, 100)


def test_a_healthy_server_is_told_so() -> None:
    """Operators would tune what is not broken."""
    assert healthy().named == []
    assert Interval().named == []


def test_a_full_queue_is_named() -> None:
    """Somebody buys memory where a limit refuses."""
    interval = healthy()
    interval.traffic.refused["queue_full"] = 30
    assert interval.named[0] == "queue_limit"
    assert "30 of 90" in findings(interval.seen)[0].sentence


@pytest.mark.parametrize("how", ["recomputed", "waiting"])
def test_a_pool_that_is_too_small_is_named(how: str) -> None:
    """More processors are bought where blocks are short."""
    interval = healthy()
    interval.live = 0.95
    if how == "recomputed":
        interval.traffic.recomputed_tokens = interval.traffic.computed_tokens // 5
        interval.preemptions[0] = 40
    else:
        interval.waits(60.0)
        interval.waited["memory"] = 0.9
    assert interval.named[0] == "pool"


def test_a_pool_that_holds_one_request_and_a_half_is_named() -> None:
    """Its waterline is low, for what is free nobody can have: prompts would be blamed."""
    interval = Interval().prompts(600, 64, 200, 0.07).decodes(1000, 1, 300, 0.012)
    interval.asks(100, 384, 10).is_open(60.0).is_open(180.0, waiting=180.0)
    interval.live, interval.setup = 0.6, replace(SETUP, blocks=20)
    interval.waited["memory"] = 0.8
    assert interval.named[0] == "pool"
    interval.waited = dict.fromkeys(WAITS, 0.0) | {"turn": 0.8}
    assert "pool" not in interval.named, "they wait for their turn"


def test_readers_that_do_not_read_are_named() -> None:
    """The model is blamed for a client's network."""
    interval = healthy().is_open(30.0, stalled=20.0)
    assert interval.named[0] == "slow_reader"


def test_readers_that_hold_all_places_come_before_what_is_short_then() -> None:
    """The batch would be raised for readers that stand still in a larger one as well."""
    interval = Interval().decodes(1000, 1, 200, 0.011).is_open(620.0, waiting=390.0, stalled=200.0)
    interval.setup = replace(SETUP, sequences_max=4)
    interval.waited["place"] = 0.95
    interval.traffic.refused["queue_full"] = 500
    interval.traffic.requests = 100
    assert interval.named == ["slow_reader", "batch", "queue_limit"]


def test_a_tenant_that_floods_is_named() -> None:
    """Everybody's limits are lowered because of one."""
    interval = healthy().asks(500, 1000, 8, "greedy").waits(400.0, "a").waits(500.0, "greedy")
    found = findings(interval.seen)[0]
    assert found.name == "flooding_tenant"
    assert "greedy" in found.sentence


def test_a_flood_that_came_long_ago_is_named_and_not_its_victim() -> None:
    """The tenant that waits would be limited, and memory guaranteed to the one in its way."""
    interval = healthy().asks(100, 80, 40, "victim").waits(400.0, "victim")
    interval.traffic.prompt_tokens = Counter(victim=8000)  # nothing else came in this minute
    interval.traffic.asked["flood"] += 8 * 1800 * 60 * SECOND
    found = findings(interval.seen)[0]
    assert found.name == "flooding_tenant"
    assert "tenant flood's" in found.sentence
    assert found.remedy.startswith("Give flood ")


def test_a_pool_is_short_for_those_that_wait_not_for_those_that_came() -> None:
    """Short prompts of others would hide that nothing is left for long ones."""
    interval = healthy().asks(2000, 40, 20, "small").is_open(600.0, waiting=600.0)
    interval.live, interval.setup = 0.6, replace(SETUP, blocks=120)
    interval.waited["memory"] = 0.9
    interval.traffic.waiting_tokens = 600 * SECOND * 1800
    found = findings(interval.seen)[0]
    assert found.name == "pool"
    assert "one that waits needs 56 blocks" in found.sentence
    assert "lost their blocks" not in found.sentence, "none did"


def test_whoever_waits_is_not_told_that_nothing_is_short() -> None:
    """An operator whose users complain would close the ticket."""
    interval = healthy().is_open(600.0, waiting=500.0)
    interval.live = 0.0
    diagnosis = diagnose(SETUP, interval.counts, {})
    assert not diagnosis.findings
    assert diagnosis.summary.startswith("Nothing that is known explains the waiting")
    assert diagnose(SETUP, healthy().counts, {}).summary.startswith("Nothing is short")


def test_a_batch_that_is_kept_small_is_named() -> None:
    """A GPU is added where a setting has to be raised."""
    interval = Interval().decodes(5000, 2, 200, 0.011).asks(60, 100, 100).waits(100.0)
    interval.setup = replace(SETUP, sequences_max=2)
    interval.waited["place"] = 0.9
    assert interval.named[0] == "batch"
    interval.waited["memory"] = 0.95
    assert "batch" not in interval.named, "there is no memory for more"


def test_a_tenant_that_waits_for_its_own_floods_nobody() -> None:
    """A tenant would be limited that harms only itself."""
    interval = healthy().asks(500, 1000, 8, "greedy").waits(500.0, "greedy")
    assert "flooding_tenant" not in interval.named


def test_requests_that_have_not_ended_wait_too() -> None:
    """A server whose queue stands still would be called healthy."""
    interval = Interval().decodes(5000, 1, 200, 0.011).is_open(600.0, waiting=550.0)
    interval.setup = replace(SETUP, sequences_max=1)
    interval.waited["place"] = 1.0
    assert interval.named[0] == "batch"


def test_a_tenants_own_limit_is_named() -> None:
    """Memory is bought for a tenant that may not run more."""
    found = findings(healthy().is_open(100.0, held=90.0).seen)[0]
    assert found.name == "tenant_limit"
    assert "running_max" in found.remedy


def test_expensive_sampling_is_named() -> None:
    """Kernels are made faster that take less than the sampler."""
    interval = healthy()
    interval.sampling = 0.5
    assert interval.named[0] == "sampling"


def test_too_few_threads_are_named() -> None:
    """Half of the machine stays idle unseen."""
    interval = Interval().decodes(4000, 4, 200, 0.012).asks(60, 100, 100)
    interval.setup = replace(SETUP, threads=1, processors=4)
    assert interval.named[0] == "threads"


@pytest.mark.parametrize(
    ("setup", "remedy"),
    [
        (replace(SETUP, token_budget=8), "--token-budget"),
        (replace(SETUP, step_stretch=1.05), "--step-stretch"),
        (replace(SETUP, tpot_target=0.001), "--tpot-target"),
    ],
)
def test_chunks_that_are_too_small_are_named(setup: Setup, remedy: str) -> None:
    """Prompts crawl while the machine's arithmetic is hardly used."""
    interval = Interval().both(3000, 3, 5, 0.018, 0.012).asks(30, 800, 8)
    interval.setup = setup
    found = findings(interval.seen)[0]
    assert found.name == "chunk_too_small"
    assert remedy in found.sentence + found.remedy


def test_prompts_that_get_next_to_nothing_are_named() -> None:
    """The less a limit leaves to prompts, the less of the time they take."""
    interval = Interval().both(3000, 5, 4, 0.022, 0.020).asks(30, 300, 60)
    interval.setup = replace(SETUP, tpot_target=0.001)
    assert interval.named[0] == "chunk_too_small"


@pytest.mark.parametrize(
    "setup", [SETUP, replace(SETUP, step_stretch=0.0), replace(SETUP, token_budget=64)]
)
def test_few_tokens_beside_decoding_are_no_small_chunks(setup: Setup) -> None:
    """Prompts get half of each step, and somebody is told to give them more."""
    interval = Interval().both(3000, 1, 5, 0.024, 0.012).asks(30, 800, 8)
    interval.setup = setup
    assert "chunk_too_small" not in interval.named


def test_prompts_that_come_now_and_then_are_not_held_up() -> None:
    """A target that is kept beside a prompt now and then would be called too tight."""
    interval = Interval().both(300, 3, 5, 0.018, 0.012).decodes(1000, 3, 200, 0.012)
    interval.prompts(100, 5, 100, 0.08).asks(30, 80, 8)
    interval.setup = replace(SETUP, step_stretch=1.05)
    assert "chunk_too_small" not in interval.named


def test_short_rests_of_prompts_are_no_small_chunks() -> None:
    """Good reuse would be taken for a wrong setting."""
    interval = Interval().prompts(1000, 8, 700, 0.012).asks(1000, 700, 8)
    assert "chunk_too_small" not in interval.named
    assert "long_prompts" not in interval.named


def test_a_limit_that_is_off_is_not_to_be_raised() -> None:
    """The advice could not be followed."""
    interval = Interval().prompts(3000, 8, 300, 0.012).asks(30, 800, 8)
    interval.setup = replace(SETUP, prefill_step=0.0)
    assert "chunk_too_small" not in interval.named
    interval = Interval().decodes(1000, 8, 200, 0.015).both(60, 8, 500, 0.4, 0.015)
    interval.asks(60, 500, 100)
    interval.traffic.delayed_time = 20 * SECOND
    interval.setup = replace(SETUP, step_stretch=0.0)
    assert findings(interval.seen)[0].remedy.startswith("Set --tpot-target")


@pytest.mark.parametrize("stretch", [0.0, 20.0])
def test_chunks_that_are_too_large_are_named(stretch: float) -> None:
    """Streams stutter, and the model is blamed."""
    interval = Interval().decodes(1000, 8, 200, 0.015).both(60, 8, 500, 0.4, 0.015)
    interval.asks(60, 500, 100)
    interval.traffic.delayed_time = 20 * SECOND
    interval.setup = replace(SETUP, step_stretch=stretch)
    assert interval.named[0] == "chunk_too_large"
    interval.setup = SETUP
    assert "chunk_too_large" not in interval.named, "no step is let to be so long"


@pytest.mark.parametrize("reuses", [True, False])
def test_beginnings_that_are_computed_again_are_named(reuses: bool) -> None:
    """The cheapest speed there is stays unused."""
    interval = Interval().prompts(400, 64, 500, 0.06).decodes(1000, 2, 300, 0.012).asks(50, 900, 20)
    interval.traffic.reusable_tokens = 40_000
    interval.setup = replace(SETUP, reuses_prefixes=reuses)
    if reuses:
        assert "cold_prefix" not in interval.named, "there is room: nothing was evicted"
        interval.live = 0.95
    found = findings(interval.seen)[0]
    assert found.name == "cold_prefix"
    assert ("--prefix-reuse on" in found.remedy) is not reuses


def test_long_prompts_are_bound_by_arithmetic_and_named() -> None:
    """Quantized KV is tried where nothing reads it."""
    found = findings(Interval().prompts(700, 64, 900, 0.07).asks(20, 2000, 4).seen)[0]
    assert found.name == "long_prompts"
    assert "bound by compute" in found.sentence


def test_shares_of_what_nobody_measured_are_not_told() -> None:
    """0 % of the machine's arithmetic would be read as a fault."""
    for interval in (
        Interval().prompts(700, 64, 900, 0.07).asks(20, 2000, 4),
        Interval().decodes(1000, 8, 2000, 0.05).asks(20, 1500, 400),
    ):
        interval.setup = replace(SETUP, costs=replace(COSTS, peaks=UNKNOWN))
        (found, *_) = findings(interval.seen)
        assert "at 0 %" not in found.sentence
        assert "peak" not in found.sentence


def test_long_contexts_are_bound_by_memory_and_named() -> None:
    """Compute that is idle is taken for starvation."""
    found = findings(Interval().decodes(1000, 8, 2000, 0.05).asks(20, 1500, 400).seen)[0]
    assert found.name == "long_contexts"
    assert "bound by memory" in found.sentence
    assert "KV is 80 % of the bytes" in found.sentence


def test_a_server_that_is_asked_for_too_much_is_not_called_healthy() -> None:
    """Prompts too short to be long ones, in places that no batch would multiply: callers wait, and
    the operator is told that nothing is short."""
    interval = Interval().prompts(2000, 20, 60, 0.025).decodes(500, 4, 80, 0.014)
    interval.asks(600, 66, 4).is_open(400.0, waiting=300.0)
    assert interval.named == ["overload"]
    interval.sampling = 30.0
    assert interval.named == ["sampling"], "it says why"


def test_every_finding_names_what_would_not_help() -> None:
    """An operator tries the tempting change first."""
    interval = healthy()
    interval.traffic.refused["queue_full"] = 30
    interval.sampling = 0.5
    for finding in findings(interval.seen):
        assert finding.remedy
        assert finding.in_vain
        assert finding.helps in ("prefill", "decode", "both", "none")
        assert 0.0 < finding.weight <= 1.0


# --- Figures ----------------------------------------------------------------------------------


def test_phases_are_held_against_the_roofline() -> None:
    """A share of a peak would be of something else."""
    seen = Interval().decodes(100, 4, 1000, 0.02).seen
    decode = seen.decode
    assert decode.weight_bytes == 100 * 90_000_000
    assert decode.kv_bytes == 100 * 4 * 1000 * 23_000
    assert decode.seconds == pytest.approx(2.0)
    assert decode.memory_share == pytest.approx((0.009e12 + 0.0092e12) / 20e9 / 2.0)
    assert decode.operations == pytest.approx(100 * 4 * (260e6 + 35e6))
    assert decode.binds == "memory"
    assert seen.prefill.seconds == 0.0
    assert seen.busy == pytest.approx(2 / 60)


def test_quantiles_are_right_to_a_bucket() -> None:
    """The 99th percentile would be anybody's guess."""
    interval = Interval().decodes(990, 1, 10, 0.010).decodes(10, 1, 10, 0.080)
    row = interval.mixtures[0]
    assert 0.010 <= duration_quantile(row, 0.5) <= 0.0119
    assert 0.080 <= duration_quantile(row, 0.995) <= 0.0952
    assert duration_quantile(np.zeros(85, np.int64), 0.5) == 0.0


def test_an_interval_is_what_came_between() -> None:
    """Yesterday's traffic would hide today's."""
    before = healthy().counts
    later = healthy().decodes(100, 8, 50, 0.02).asks(7, 60, 5)
    counts = replace(later.counts, at=before.at + 5 * SECOND).since(before)
    assert counts.at == 5 * SECOND
    assert counts.phases[0].tolist() == [100, 2 * SECOND, 800, 40_000, 800]
    assert counts.traffic.requests == 7
    assert counts.traffic.prompt_tokens == Counter(a=420)


# --- Traffic ----------------------------------------------------------------------------------


def test_what_could_be_reused_is_counted_by_scope() -> None:
    """The promise of a cache would include what other tenants sent."""
    traffic = Traffic(block_tokens=4)
    text = np.arange(1, 14, dtype=np.int32)  # three blocks and a token
    traffic.came("a", "1", text)
    assert traffic.counts.reusable_tokens == 0
    traffic.came("b", "2", text)
    assert traffic.counts.reusable_tokens == 0
    traffic.came("a", "1", text)
    assert traffic.counts.reusable_tokens == 12
    other = text.copy()
    other[5] = 99
    traffic.came("a", "1", other)
    assert traffic.counts.reusable_tokens == 16
    traffic.came("a", "1", text[:4])  # its last token is always computed
    assert traffic.counts.reusable_tokens == 19
    traffic.came("a", None, text)  # it wants nothing of a cache
    assert traffic.counts.reusable_tokens == 19
    assert traffic.counts.prompt_tokens == Counter(a=56, b=13)


def test_requests_are_counted_while_they_are_open() -> None:
    """Whoever waits would be seen when it has waited."""
    traffic = Traffic(4)
    traffic.pass_time(1000, Crowd(open=4, waiting=2, held=1, stalled=1))
    traffic.pass_time(1500, Crowd())
    traffic.pass_time(9000, Crowd())
    counts = traffic.counts
    assert (counts.open_time, counts.waiting_time) == (2000, 1000)
    assert (counts.held_time, counts.stalled_time) == (500, 500)


def test_tenants_that_still_wait_are_counted_apart() -> None:
    """A tenant that a flood keeps out for minutes would be seen when it comes in."""
    traffic = Traffic(4)
    traffic.changed(1000, Crowd(1, 1), "quiet", 1, 1, 10)
    traffic.changed(1200, Crowd(2, 1), "flood", 1, 0, 900)
    traffic.pass_time(1500, Crowd(2, 1))
    assert traffic.counts.queued == Counter(quiet=500, flood=0)
    assert traffic.counts.lives == Counter(quiet=500, flood=300)
    traffic.changed(1600, Crowd(2, 0), "quiet", 0, -1, 10)
    traffic.changed(1700, Crowd(1, 0), "quiet", -1, 0, 10)
    traffic.pass_time(9700, Crowd(1, 0))
    assert traffic.counts.queued == Counter(quiet=600, flood=0)
    assert traffic.counts.lives == Counter(quiet=700, flood=8500)
    assert traffic.counts.waiting_time == 600
    assert traffic.counts.asked == Counter(quiet=7000, flood=8500 * 900)
    assert traffic.counts.waiting_tokens == 6000


def test_a_moment_that_is_kept_names_the_largest_tenants_only() -> None:
    """A day of moments would hold every tenant's name a thousand times."""
    traffic = Traffic(4)
    for number in range(200):
        traffic.came(f"t{number}", None, np.zeros(number + 1, np.int32))
    first = traffic.counts.copy()
    assert len(first.prompt_tokens) == 64
    assert first.prompt_tokens["t199"] == 200
    # One that was not kept then, and is now, came with more than this interval's.
    traffic.came("t0", None, np.zeros(1000, np.int32))
    since = traffic.counts.copy().since(first)
    assert since.all_prompt_tokens == 1000
    assert "t0" not in since.prompt_tokens


def test_a_receipt_is_counted_once() -> None:
    """Shares of time would not be of all time."""
    traffic = Traffic(4)
    traffic.ended(receipt_of_waiting(EndReason.CANCELLED, 5, 1000))
    assert traffic.counts.ended == 1
    assert traffic.counts.life_time == traffic.counts.queued_time == 1000


def test_lengths_are_known_to_a_factor_of_two() -> None:
    """A profile of the traffic would be off by more than it says."""
    assert [class_of(length) for length in (0, 1, 2, 3, 4, 5, 1024, 1025)] == [
        *(0, 0, 1, 2, 2, 3, 10, 11)
    ]
    counts = np.zeros(CLASSES, np.int64)
    counts[3], counts[10] = 95, 5
    assert class_quantile(counts, 0.5) == 8
    assert class_quantile(counts, 0.99) == 1024
    assert class_quantile(np.zeros(CLASSES, np.int64), 0.5) == 0
