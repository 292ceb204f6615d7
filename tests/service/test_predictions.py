"""What the diagnosis says that changes would do, where it is known what they do."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from test_findings import COSTS, SETUP, Interval

from kvledger.diagnosis.counts import DECODE, PREFILL, Counts, EngineCounts, PoolCounts
from kvledger.diagnosis.diagnosis import diagnose
from kvledger.diagnosis.observation import UNKNOWN
from kvledger.diagnosis.predictions import (
    Change,
    Kind,
    Model,
    Prediction,
    fit,
    predict,
    predicted,
)
from kvledger.diagnosis.step_fit import decode_floor, fit_phase, prefill_floor
from kvledger.diagnosis.traffic import TrafficCounts
from kvledger.machine.utilization import ProcessorTimes
from kvledger.rpc.diagnosis_messages import Served, compare, fill
from kvledger.v1.diagnosis_pb2 import DiagnoseResponse

FORMATS = {"bf16": 23_000, "int8": 12_000}


# Kernels that take three times the least that their work needs.
SLOWER = 3.0


def decode_seconds(sequences: int, context: int) -> float:
    return SLOWER * decode_floor(COSTS).seconds(sequences, sequences * context)


def prompt_seconds(tokens: int, context: int) -> float:
    return SLOWER * prefill_floor(COSTS).seconds(tokens, tokens * context)


def served(sequences: int = 4, steps: int = 1000, chunk: int = 128) -> Interval:
    """A minute of a server whose steps take what the two functions above say, whose requests have
    4 chunks of prompt and 100 tokens to make."""
    interval = Interval()
    for context in (150, 200, 300):
        interval.decodes(steps // 3, sequences, context, decode_seconds(sequences, context))
    requests = steps // 3 * 3 * sequences // 100
    for context in (70, 200):
        interval.prompts(2 * requests, chunk, context, prompt_seconds(chunk, context))
    interval.asks(requests, 4 * chunk, 101)
    return is_here(interval, running=sequences)


def is_here(interval: Interval, running: float, waiting: float = 0.0) -> Interval:
    """So many requests are here while a step runs."""
    busy = interval.seen.step_seconds
    counts = interval.traffic
    counts.open_time = counts.waiting_time = 0
    return interval.is_open(busy * (running + waiting), waiting=busy * waiting)


def model_of(interval: Interval) -> Model:
    model = fit(interval.seen, interval.counts)
    assert model is not None
    return model


def told(interval: Interval, kind: Kind, value: int | str) -> Prediction:
    prediction = predicted(model_of(interval), Change(kind, value), FORMATS)
    assert prediction is not None
    return prediction


def test_a_line_is_found_again() -> None:
    """Other batches and contexts would be predicted from something else."""
    interval = Interval()
    for sequences in (1, 2, 4, 8):
        for context in (100, 400, 1500):
            seconds = 0.008 + 0.001 * sequences + 2e-8 * sequences * context
            interval.decodes(20, sequences, context, seconds)
    found = fit_phase(interval.counts, DECODE, COSTS)
    assert found is not None
    assert found.seconds(16, 16 * 800) == pytest.approx(0.024 + 2e-8 * 12_800, rel=0.05)
    assert fit_phase(interval.counts, PREFILL, COSTS) is None


def test_what_one_batch_cannot_tell_comes_from_the_floors() -> None:
    """With one batch size, anything would fit, also that more of them cost nothing."""
    interval = Interval().decodes(500, 4, 200, 3 * 0.006)
    found = fit_phase(interval.counts, DECODE, COSTS)
    assert found is not None
    floor = decode_floor(COSTS)
    assert found.seconds(4, 800) == pytest.approx(0.018, rel=1e-6)
    assert found.token / found.fixed == pytest.approx(floor.token / floor.fixed, rel=0.05)


def test_more_sequences_take_longer_steps_and_give_more() -> None:
    """The advice to raise the batch would promise what does not come."""
    interval = Interval()
    for sequences in (1, 2, 4, 8):
        interval.decodes(100, sequences, 200, 0.008 + 0.001 * sequences)
    model = model_of(interval)
    more = predict(model, FORMATS)[0]
    assert more.change == Change("more_sequences", 8)
    sequences = model.work.sequences + 8
    step = 0.008 + 0.001 * sequences
    assert more.decode_step_seconds == pytest.approx(step, rel=0.05)
    assert more.tokens_per_second == pytest.approx(sequences / step, rel=0.05)


def test_nobody_decodes_who_has_not_come() -> None:
    """Twice the places would promise twice the batch to four callers."""
    alone = served(sequences=4)
    assert told(alone, "max_sequences", 64).sequences is not None
    before = alone.seen.decode.seconds / alone.seen.decode.steps
    assert told(alone, "max_sequences", 64).decode_step_seconds == pytest.approx(before, rel=0.02)
    assert "4.0 run at a time" in told(alone, "max_sequences", 64).caution
    waiting = is_here(served(sequences=4), running=4, waiting=4)
    more = told(waiting, "max_sequences", 8)
    assert more.decode_step_seconds == pytest.approx(decode_seconds(8, 216), rel=0.1)
    fewer = told(waiting, "max_sequences", 2)
    assert fewer.decode_step_seconds == pytest.approx(decode_seconds(2, 216), rel=0.1)


def test_a_larger_pool_helps_who_waits_for_it() -> None:
    """Memory would be bought for a batch that the callers do not fill."""
    alone = served()
    alone.live = 0.3
    assert told(alone, "kv_blocks", 2000).helps == "none"
    crowded = is_here(served(), running=4, waiting=4)
    # Live only while a step ran.
    crowded.live = 0.95 * crowded.seen.step_seconds / 60.0
    larger = told(crowded, "kv_blocks", 2000)
    assert larger.helps == "both"
    assert larger.decode_step_seconds == pytest.approx(decode_seconds(8, 216), rel=0.1)
    smaller = told(crowded, "kv_blocks", 500)
    assert smaller.decode_step_seconds == pytest.approx(decode_seconds(2, 216), rel=0.1)


def test_chunks_cost_a_step_each() -> None:
    """Smaller chunks would look free, and larger ones better than they are."""
    interval = served(chunk=128)
    interval.setup = replace(SETUP, token_budget=128)
    now = 4 * 128 / (4 * prompt_seconds(128, 135))
    half = told(interval, "token_budget", 64).prefill_tokens_per_second
    assert half == pytest.approx(4 * 128 / (8 * prompt_seconds(64, 135)), rel=0.05)
    twice = told(interval, "token_budget", 256)
    assert twice.prefill_tokens_per_second is not None
    assert twice.prefill_tokens_per_second > now
    assert twice.helps == "prefill"
    assert twice.longest_step_seconds is not None
    longest = told(interval, "token_budget", 64).longest_step_seconds
    assert longest is not None
    assert twice.longest_step_seconds > 2 * longest


def test_where_time_limits_chunks_a_larger_budget_changes_nothing() -> None:
    """The wrong setting would be turned."""
    interval = served(chunk=128)  # of a budget of 512, though prompts have four times 128
    interval.setup = replace(SETUP, token_budget=400)
    interval.traffic.requests //= 4  # prompts of 2048
    interval.traffic.ended //= 4
    assert "limit in time" in told(interval, "token_budget", 800).caution
    now = model_of(interval).work.prefill_rate
    assert told(interval, "token_budget", 800).prefill_tokens_per_second == now


def test_threads_count_as_far_as_the_machine_was_measured_with_them() -> None:
    """An extrapolation would promise what two threads of one core cannot give."""
    interval = served()
    interval.sampling = 0.0
    one = told(interval, "threads", 1)
    now = model_of(interval).work
    assert one.decode_step_seconds is not None
    assert one.prefill_tokens_per_second is not None
    assert now.prefill_rate is not None
    # Memory reads 20 : 12, arithmetic 200 : 100.
    assert 20 / 12 < one.decode_step_seconds / now.decode_step < 2.0
    assert now.prefill_rate / one.prefill_tokens_per_second == pytest.approx(2.0, rel=0.01)
    assert predicted(model_of(interval), Change("threads", 4), FORMATS) is None
    interval.setup = replace(SETUP, costs=replace(COSTS, peaks=UNKNOWN))
    assert predicted(model_of(interval), Change("threads", 1), FORMATS) is None


def test_a_smaller_kv_format_helps_where_kv_is_read() -> None:
    """It would be recommended where nothing reads it."""

    def gain(context: int) -> float:
        interval = Interval().decodes(500, 8, context, 0.05)
        step = told(interval, "kv_format", "int8").decode_step_seconds
        assert step is not None
        return 0.05 / step

    # Reading goes with the bytes, the arithmetic of keys stays: as much as the floors say.
    less = replace(COSTS, kv_token_bytes=FORMATS["int8"])
    floors = (decode_floor(costs).seconds(8, 8 * 4000) for costs in (COSTS, less))
    assert gain(4000) == pytest.approx(next(floors) / next(floors), rel=0.01)
    assert gain(4000) > 1.4
    assert gain(20) < 1.05
    assert predicted(model_of(served()), Change("kv_format", "int3"), FORMATS) is None


def test_two_replicas_are_not_twice_as_good() -> None:
    """Weights are read by each of them."""
    interval = served(sequences=8)
    two = told(interval, "replicas", 2)
    now = model_of(interval).work
    assert two.tokens_per_second is not None
    assert 1.0 < two.tokens_per_second * now.decode_step / now.sequences < 2.0


def test_a_request_is_worth_its_decoding_and_its_prompt() -> None:
    """Requests a second would leave out the phase that takes the time."""
    interval = served()
    rate = model_of(interval).work.requests_rate
    steps = interval.seen.decode.seconds + interval.seen.prefill.seconds
    assert rate == pytest.approx(interval.traffic.ended / steps, rel=0.01)


def test_where_no_prompt_was_computed_chunks_change_nothing() -> None:
    """A server whose prompts were all reused would answer INTERNAL."""
    interval = Interval().decodes(500, 4, 200, 0.02).asks(20, 64, 100)
    half = told(interval, "token_budget", 256)
    assert half.prefill_tokens_per_second is None
    assert half.tokens_per_second == pytest.approx(4 / 0.02, rel=0.01)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_was_counted_is_diagnosed(seed: int) -> None:
    """Counts that nobody thought of would end in an error instead of an answer."""
    chance = random.Random(seed)

    def some(most: int = 10**12) -> int:
        return chance.choice([0, 0, 0, 1, chance.randint(0, 20), chance.randint(0, most)])

    def array(*shape: int) -> npt.NDArray[np.int64]:
        values = [some(10**9) for _ in range(math.prod(shape))]
        return np.array(values, np.int64).reshape(shape)

    for _ in range(150):
        traffic = TrafficCounts()
        for name, value in vars(traffic).items():
            if isinstance(value, int):
                setattr(traffic, name, some())
            elif isinstance(value, Counter):
                value.update({key: some(10**9) for key in ("a", "b", "queue_full")})
        counts = Counts(
            at=chance.choice([0, 1, 10**9, 60 * 10**9]),
            phases=array(2, 5),
            mixtures=array(3, 85),
            batches=array(13, 85),
            forecast=array(4),
            fits=array(2, 9).astype(np.float64),
            preemptions=array(3),
            waited=array(4),
            engine=EngineCounts(some(), some(), some()),
            pool=PoolCounts(some(), some(), some(), some(), some()),
            processors=ProcessorTimes(some(), some(), some()),
            traffic=traffic,
        )
        setup = replace(
            SETUP, blocks=chance.choice([1, 1 << 30]), token_budget=chance.choice([1, 512])
        )
        if chance.random() < 0.4:
            setup = replace(setup, costs=replace(COSTS, peaks=UNKNOWN))
        asked = [Change("max_sequences", 3), Change("kv_blocks", 7), Change("threads", 1)]
        message = DiagnoseResponse()
        fill(message.now, diagnose(setup, counts, FORMATS, asked), Served("model", "ff"))
        message.before.CopyFrom(message.now)
        compare(message, message.before)


def test_nothing_is_predicted_of_nothing() -> None:
    """A server without traffic would be given advice."""
    interval = Interval()
    assert fit(interval.seen, interval.counts) is None
