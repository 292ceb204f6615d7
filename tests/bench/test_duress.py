"""What decides over pass and fail of the benchmarks of a server under duress."""

from __future__ import annotations

import math
import os
import time
from collections.abc import AsyncIterator, Sequence

import grpc
import pytest
from bench.duress import (
    Answer,
    MemoryWatch,
    Shape,
    bars_text,
    due_times,
    good_tokens_per_second,
    group_bytes,
    memory_growth,
    offer,
    saturate,
)
from bench.load import OK, CallFailed, Limits, Record, Words
from bench.overload import REFUSED, Overload, steps_until_full
from bench.overload import bars as overload_bars
from bench.restarts import Restart, Restarts
from bench.restarts import bars as restart_bars
from bench.retrying import Asked, RetryingClient, retry_delay
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from kvledger.v1 import generation_pb2

LIMITS = Limits(ttft=1.0, tpot=1.0)


def answered(due: float, *arrivals: float) -> Answer:
    """A request that was answered with tokens at these times."""
    record = Record(4, len(arrivals), due, OK, "", list(arrivals), [5] * len(arrivals))
    return Answer(record, due, arrivals[-1])


def refused(due: float, seconds: float, status: str = REFUSED) -> Answer:
    """A request that was refused after so many seconds."""
    return Answer(Record(4, 2, due, status, "full"), due, due + seconds)


class FullServer:
    """Refuses every other request, answers the rest with two tokens."""

    def __init__(self) -> None:
        self.calls = 0

    async def stream(
        self, prompt: Sequence[int], output: int, ignore_eos: bool = True
    ) -> AsyncIterator[Sequence[int]]:
        del prompt, ignore_eos
        self.calls += 1
        if self.calls % 2 == 0:
            raise CallFailed(REFUSED, "full")
        yield [1] * output


def test_goodput_counts_tokens_of_the_window_of_good_requests_alone() -> None:
    """Tokens of requests that came too late are heat; those outside the window flatter it."""
    answers = [
        answered(0.0, 0.5, 1.5, 2.4),  # two of its tokens lie in the window
        answered(1.0, 2.5, 2.6),  # its first came too late
        refused(1.0, 0.1),
    ]
    assert good_tokens_per_second(answers, LIMITS, 1.0, 3.0) == pytest.approx(2 / 2.0)


def test_memory_grows_from_the_first_minute_to_the_last() -> None:
    """A leak that is compared with the wrong samples is flat."""
    leaking = [(float(at), 1000 + at) for at in range(-50, 400)]
    assert memory_growth(leaking, 0.0, 300.0) == pytest.approx(240 / 1029)
    assert memory_growth(leaking, 0.0, 30.0) == pytest.approx(20 / 1004)
    assert math.isnan(memory_growth([], 0.0, 300.0))


async def test_memory_is_that_of_the_process() -> None:
    """A figure that is always the same is always flat."""
    async with MemoryWatch(lambda: group_bytes(os.getpgrp())) as watch:
        await offer(FullServer(), Words(0, 9000), Shape(4, 2, 9), iter([time.perf_counter() + 0.1]))
    (_, size), *_ = watch.samples
    assert size > 20e6
    assert group_bytes(2**30) == 0


def test_times_of_a_phase_keep_the_rate_and_end_with_it() -> None:
    """An overload that stops early is none."""
    times = list(due_times(100.0, rate=20.0, seconds=200.0, seed=3))
    assert len(times) / 200.0 == pytest.approx(20.0, rel=0.1)
    assert 100.0 <= times[0] < times[-1] < 300.0
    assert times[-1] > 295.0


async def test_loads_count_answers_and_refusals() -> None:
    """Who is refused must be counted, with the time that it took, and not be asked again."""
    server, words, shape = FullServer(), Words(0, 9000), Shape(4, 2, 9)
    now = time.perf_counter()
    tasks = await offer(server, words, shape, iter([now, now, now + 0.05, now + 0.05]))
    answers = [await task for task in tasks]
    assert sorted(a.record.status for a in answers) == [OK, OK, REFUSED, REFUSED]
    assert all(a.ended >= a.sent >= a.record.due for a in answers)
    found = await saturate(server, words, shape, concurrency=2, seconds=0.3)
    assert {a.record.status for a in found} == {OK, REFUSED}


def test_the_best_is_looked_for_up_to_what_may_run() -> None:
    """More at once than the server takes would be refused, fewer would not be its best."""
    assert steps_until_full(8, 4) == [2, 4, 8, 10]
    assert steps_until_full(1, 1) == [1]
    assert steps_until_full(64, 8) == [16, 32, 64, 68]


def overload() -> Overload:
    """A run that passes: steps of 0.1 s, 10 tokens/s of 10."""
    calm = [answered(at / 2, at / 2 + 0.2, at / 2 + 0.3) for at in range(40)]
    heavy = [answered(20 + at / 5, 20 + at / 5 + 0.3, 20 + at / 5 + 0.4) for at in range(100)]
    after = [answered(40 + at / 2, 40 + at / 2 + 0.2, 40 + at / 2 + 0.3) for at in range(40)]
    memory = [(float(at), 1000) for at in range(60)]
    during = [*heavy, refused(25.0, 0.19)]
    return Overload({4: 9.0, 8: 10.0}, calm, during, after, 20.0, 40.0, memory)


def test_overload_that_is_borne_passes() -> None:
    """A bar that nothing passes is none."""
    assert all(bar.passed for bar in overload_bars(overload(), LIMITS))


@pytest.mark.parametrize("failing", range(5))
def test_each_bar_of_the_overload_fails_alone(failing: int) -> None:
    """A bar that cannot fail shows nothing."""
    run = overload()
    if failing == 0:
        run.best[8] = 12.0
    elif failing == 1:
        run.during[-1] = refused(25.0, 0.21)
    elif failing == 2:
        run.memory = [(at, 1000 + round(at)) for at, _ in run.memory]
        run.memory = [(at, size + (100 if at > 35 else 0)) for at, size in run.memory]
    elif failing == 3:
        run.after = [
            answered(a.record.due, a.record.due + 0.25, a.record.due + 0.35) for a in run.after
        ]
    else:
        run.after.append(refused(41.0, 0.1, "CANCELLED"))
    found = overload_bars(run, LIMITS)
    assert [bar.passed for bar in found] == [place != failing for place in range(5)]
    assert "4 of 5" in bars_text(found)


def test_an_overload_without_refusals_was_none() -> None:
    """Nothing was shown of how a server refuses."""
    run = overload()
    run.during.pop()
    assert not overload_bars(run, LIMITS)[1].passed


def restarts() -> Restarts:
    """A run that passes: SIGTERM at 10, a drain of 5 s, a stream that is cut, one retry."""
    cut = Asked(5.0, 100, 9, accepted=6.0, ended=15.2, status="UNAVAILABLE")
    late = Asked(11.0, 2, 2, told=3, untold=2, accepted=21.0, ended=22.0)
    restart = Restart(asked=10.0, ended=15.5, exit_status=0, serving=20.0)
    return Restarts([restart], [Asked(1.0, 2, 2, accepted=1.1, ended=2.0), late], [cut])


def test_restarts_that_are_borne_pass() -> None:
    """A bar that nothing passes is none."""
    run = restarts()
    assert all(bar.passed for bar in restart_bars(run, 5.0))
    assert run.restarts[0].first_accepted(run.requests) == 21.0


@pytest.mark.parametrize("failing", range(5))
def test_each_bar_of_the_restarts_fails_alone(failing: int) -> None:
    """A bar that cannot fail shows nothing."""
    run = restarts()
    if failing == 0:
        run.short.append(Asked(15.0, 2, status="CANCELLED", ended=15.3))
    elif failing == 1:
        run.short.append(Asked(9.0, 9, 1, accepted=9.5, ended=12.0, status="UNAVAILABLE"))
    elif failing == 2:
        run.long[0].status = OK
    elif failing == 3:
        run.restarts[0].exit_status = None
    else:
        run.short[-1].accepted = 12.0
    found = restart_bars(run, 5.0)
    assert [bar.passed for bar in found] == [place != failing for place in range(5)]


def unavailable(delay: float | None) -> grpc.aio.AioRpcError:
    """An error as a server that drains gives it, or as there is without a server."""
    details = status_pb2.Status(code=14)
    if delay is not None:
        info, packed = error_details_pb2.RetryInfo(), any_pb2.Any()
        info.retry_delay.FromMilliseconds(round(delay * 1000))
        packed.Pack(info)
        details.details.append(packed)
    metadata = grpc.aio.Metadata(("grpc-status-details-bin", details.SerializeToString()))
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), metadata, "gone")


async def asked(*outcomes: object, wanted: int = 2) -> tuple[Asked, int]:
    """What a client notes whose calls end like this, one after the other, and how many it made."""
    client = RetryingClient("127.0.0.1:1", patience=5.0, seed=0)
    calls = iter(outcomes)
    made = 0

    async def generate(request: object) -> AsyncIterator[generation_pb2.GenerateResponse]:
        nonlocal made
        del request
        made += 1
        outcome = next(calls)
        if not isinstance(outcome, grpc.aio.AioRpcError) or outcome.details() == "cut":
            yield generation_pb2.GenerateResponse(accepted=generation_pb2.Accepted())
            yield generation_pb2.GenerateResponse(delta=generation_pb2.Delta(token_ids=[1, 2]))
        if isinstance(outcome, grpc.aio.AioRpcError):
            raise outcome

    client._generation.Generate = generate
    noted = Asked(time.perf_counter(), wanted)
    await client.ask([1], noted)
    await client.close()
    return noted, made


async def test_only_what_was_not_accepted_is_sent_again() -> None:
    """A stream sent twice would be paid for twice; one not sent again is lost with a restart."""
    assert retry_delay(unavailable(0.25)) == 0.25
    assert retry_delay(unavailable(None)) is None
    noted, made = await asked(unavailable(0.01), unavailable(None), "answer")
    assert (noted.status, noted.told, noted.untold, made) == (OK, 1, 1, 3)
    assert noted.accepted is not None
    cut = grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "cut"
    )
    noted, made = await asked(cut, "answer")
    assert (noted.status, made) == ("UNAVAILABLE", 1)
    other = grpc.aio.AioRpcError(
        grpc.StatusCode.CANCELLED, grpc.aio.Metadata(), grpc.aio.Metadata(), "gone"
    )
    noted, made = await asked(other, "answer")
    assert (noted.status, noted.accepted, made) == ("CANCELLED", None, 1)
    noted, _ = await asked("answer", wanted=3)
    assert noted.status == "INCOMPLETE"
