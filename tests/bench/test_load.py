"""The arithmetic behind every quoted figure of a load test, and its drivers on a paper client."""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from bench.arms.hf_folder import hf_name, to_bf16, unpermuted
from bench.arms.http import UNREACHABLE, post_events
from bench.arms.process import free_port
from bench.company import busy_seconds
from bench.load import (
    INCOMPLETE,
    NOT_SENT,
    OK,
    STOPPED,
    TIMEOUT,
    CallFailed,
    InterferencePlan,
    Limits,
    Record,
    Turn,
    Words,
    chats,
    closed_loop,
    interference,
    open_loop,
    percentile,
    poisson_times,
    read_trace,
    send,
    single_requests,
    split_gaps,
    summarize,
)
from bench.peers import Outcome, equal_tokens, median_metrics, ratios

from bench import report


def record(due: float, *arrivals: float, status: str = OK, prompt: int = 10) -> Record:
    """A request whose tokens came at these times."""
    return Record(prompt, len(arrivals), due, status, "", list(arrivals), [5] * len(arrivals))


class PaperClient:
    """Answers with tokens at fixed intervals; fails or falls silent where it is told to."""

    def __init__(self, pause: float = 0.001, fail_at: int = -1, per_message: int = 1) -> None:
        self.prompts: list[list[int]] = []
        self.running = self.most_running = 0
        self._pause, self._fail_at, self._per_message = pause, fail_at, per_message

    async def stream(
        self, prompt: Sequence[int], output: int, ignore_eos: bool = True
    ) -> AsyncIterator[Sequence[int]]:
        del ignore_eos
        self.prompts.append(list(prompt))
        number = len(self.prompts) - 1
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            for start in range(0, output, self._per_message):
                await asyncio.sleep(self._pause)
                if number == self._fail_at:
                    raise CallFailed("RESOURCE_EXHAUSTED", "the queue is full")
                yield range(100 + start, 100 + min(output, start + self._per_message))
        finally:
            self.running -= 1


def test_percentiles_are_values_that_were_measured() -> None:
    """An interpolated p99 of few requests is a time that nobody waited, and flatters the worst."""
    values = [float(v) for v in range(1, 101)]
    assert [percentile(values, p) for p in (50, 90, 99, 100)] == [50, 90, 99, 100]
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([1.0, 9.0], 99) == 9.0
    assert percentile([4.0], 1) == 4.0
    assert math.isnan(percentile([], 50))


def test_times_of_one_request() -> None:
    """All other figures are made of these three; an error here falsifies every table."""
    one = record(10.0, 10.5, 10.6, 10.6, 10.9)
    assert one.ttft == pytest.approx(0.5)
    assert one.tpot == pytest.approx(0.4 / 3)
    assert one.gaps == pytest.approx([0.1, 0.0, 0.3])
    assert record(1.0, 2.0).tpot is None
    assert record(1.0).ttft is None


def test_summary_counts_failures_and_keeps_them_out_of_times() -> None:
    """A server that refuses half of the requests must not look fast because of it."""
    records = [
        record(0.0, 1.0, 1.5, 2.0),
        record(1.0, 2.0, 4.0),
        record(0.5, 0.6, status="RESOURCE_EXHAUSTED"),
        record(0.5, status="UNAVAILABLE"),
    ]
    records[3].reason = "gone"
    summary = summarize(records, Limits(ttft=1.0, tpot=1.0))
    assert summary.statuses == {OK: 2, "RESOURCE_EXHAUSTED": 1, "UNAVAILABLE": 1}
    assert summary.reasons["UNAVAILABLE"] == "gone"
    assert summary.requests == 4
    assert summary.output_tokens == 5
    assert summary.prompt_tokens == 20
    assert summary.seconds == pytest.approx(4.0)
    assert summary.output_tokens_per_second == pytest.approx(5 / 4)
    assert summary.ttft == {"p50": 1.0, "p90": 1.0, "p99": 1.0}
    assert summary.longest_stall == pytest.approx(2.0)
    assert summary.good_requests == 1
    assert summary.goodput == pytest.approx(1 / 4)


def test_summary_of_nothing() -> None:
    """A run in which everything failed must end in a report, not in a division by zero."""
    empty = summarize([])
    assert empty.requests == 0
    assert math.isnan(empty.output_tokens_per_second)
    failed = summarize([record(0.0, status="UNAVAILABLE")])
    assert failed.statuses == {"UNAVAILABLE": 1}
    assert math.isnan(failed.ttft["p99"])
    assert "UNAVAILABLE 1" in report.summary_text(failed, Limits())


def test_goodput_needs_both_limits_and_a_whole_answer() -> None:
    """Goodput that forgives a limit, or half an answer, is throughput with a nicer name."""
    limits = Limits(ttft=0.5, tpot=0.1)
    assert limits.keeps(record(0.0, 0.5, 0.6))
    assert not limits.keeps(record(0.0, 0.51, 0.6))
    assert not limits.keeps(record(0.0, 0.4, 0.6))
    assert not limits.keeps(record(0.0, 0.4, 0.45, status=INCOMPLETE))
    assert not limits.keeps(record(0.0))
    assert limits.keeps(record(0.0, 0.3))  # one token has no time per further token
    assert Limits().keeps(record(0.0, 99.0, 199.0))


def test_a_gap_over_the_whole_wait_belongs_to_it() -> None:
    """A stream that stands still from before to after the wait is the very stall to be found."""
    assert split_gaps([1.0, 2.0, 9.0, 10.0], steady=0.0, sent=3.0, first=8.0) == ([1.0], [7.0])


def test_gaps_before_and_while_a_newcomer_waits() -> None:
    """A gap in the wrong column would blame the newcomer for others' stalls, or hide its own."""
    arrivals = [0.0, 2.0, 3.0, 4.0, 5.5, 6.0, 7.0]
    before, during = split_gaps(arrivals, steady=2.0, sent=4.0, first=5.6)
    assert before == [1.0, 1.0]  # that from 0 to 2 began before all streams were decoding
    assert during == [1.5, 0.5]  # that from 6 to 7 began after the wait
    assert split_gaps([1.0], 0.0, 2.0, 3.0) == ([], [])


def test_traces_keep_what_fits(tmp_path: Path) -> None:
    """A request that the model cannot hold would be refused, and count as the server's failure."""
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\na,100,20\nb,5000,20\nc,0,5\nd,30,0\ne,40,60\n"
    )
    drawn = read_trace(path, 120, 50, seed=1)
    assert len(drawn) == 50
    assert set(drawn) == {(100, 20), (40, 60)}
    assert drawn == read_trace(path, 120, 50, seed=1)
    assert drawn != read_trace(path, 120, 50, seed=2)


def test_traces_that_cannot_be_used_say_so(tmp_path: Path) -> None:
    """A wrong file must not become a run over nothing."""
    path = tmp_path / "trace.csv"
    path.write_text("ContextTokens,Other\n1,2\n")
    with pytest.raises(ValueError, match="no column GeneratedTokens"):
        read_trace(path, 100, 1, 0)
    path.write_text("ContextTokens,GeneratedTokens\n1000,2\n")
    with pytest.raises(ValueError, match="no request that fits into 100 tokens"):
        read_trace(path, 100, 1, 0)


def test_prompts_are_the_seeds_and_share_only_prefixes() -> None:
    """Prompts that are equal by accident let a prefix cache win a race it was not to run."""
    made = single_requests(Words(3, 49152), [(20, 4)] * 6, prefix_tokens=8, prefixes=2)
    assert made == single_requests(Words(3, 49152), [(20, 4)] * 6, prefix_tokens=8, prefixes=2)
    prompts = [conversation[0].tokens for conversation in made]
    assert {len(prompt) for prompt in prompts} == {28}
    assert len({prompt[:8] for prompt in prompts}) == 2
    assert len({prompt[8:] for prompt in prompts}) == 6
    assert all(1000 <= token < 24576 for prompt in prompts for token in prompt)
    assert all(token < 50 for token in Words(0, 100).draw(1000))


def test_poisson_times_are_the_seeds_and_keep_the_rate() -> None:
    """An open loop at another rate than it says makes every latency curve wrong."""
    times = poisson_times(4000, 5.0, seed=2)
    assert times == poisson_times(4000, 5.0, seed=2)
    assert times[0] == 0.0
    assert times == sorted(times)
    assert len(times) / times[-1] == pytest.approx(5.0, rel=0.1)


async def test_closed_loop_keeps_its_number() -> None:
    """More at once than asked for would be another experiment."""
    client = PaperClient()
    records = await closed_loop(client, single_requests(Words(0, 9000), [(4, 5)] * 7), 3, 10)
    assert [r.status for r in records] == [OK] * 7
    assert [len(r.arrivals) for r in records] == [5] * 7
    assert client.most_running == 3


async def test_open_loop_counts_from_when_a_request_was_due() -> None:
    """A load test that is late itself and does not say so hides the longest waits."""

    class Blocking(PaperClient):
        async def stream(
            self, prompt: Sequence[int], output: int, ignore_eos: bool = True
        ) -> AsyncIterator[Sequence[int]]:
            time.sleep(0.05)  # noqa: ASYNC251  # the whole program stands still, as when overloaded
            yield [1]

    conversations = single_requests(Words(0, 9000), [(4, 1)] * 5)
    records = await open_loop(Blocking(), conversations, rate=1000.0, seed=0, timeout=10)
    waits = sorted(r.ttft for r in records if r.ttft is not None)
    assert len(waits) == 5
    assert waits[-1] > 0.2


async def test_turns_carry_what_was_said() -> None:
    """A chat that forgets its answers is no test of what a conversation costs."""
    client = PaperClient(per_message=2)
    (conversation,) = chats(Words(0, 9000), [(4, 3)], turns=3, system_tokens=5)
    records = await closed_loop(client, [conversation], 1, 10)
    assert [r.prompt_tokens for r in records] == [9, 16, 23]
    first, second, third = client.prompts
    assert second == [*first, 100, 101, 102, *conversation[1].tokens]
    assert third[: len(second)] == second


async def test_what_a_failed_turn_prevents_is_counted() -> None:
    """Turns that were never sent would otherwise vanish from the count of requests."""
    conversation = (Turn((1, 2), 2), Turn((3,), 2), Turn((4,), 2))
    records = await closed_loop(PaperClient(fail_at=1), [conversation], 1, 10)
    assert [r.status for r in records] == [OK, "RESOURCE_EXHAUSTED", NOT_SENT]
    assert records[1].reason == "RESOURCE_EXHAUSTED: the queue is full"


async def test_a_short_answer_is_no_success() -> None:
    """A server that stops early would otherwise have the best times of all."""

    class Short(PaperClient):
        async def stream(
            self, prompt: Sequence[int], output: int, ignore_eos: bool = True
        ) -> AsyncIterator[Sequence[int]]:
            yield [1, 2]

    answered = await send(Short(), [1], 3, time.perf_counter(), 10)
    assert answered.status == INCOMPLETE
    assert answered.reason == "2 tokens instead of 3"


async def test_silence_ends_in_a_timeout() -> None:
    """A server that hangs must not hang the program that measures it."""
    answered = await send(PaperClient(pause=60), [1], 3, time.perf_counter(), 0.05)
    assert answered.status == TIMEOUT


async def test_interference_stops_its_streams_and_finds_their_gaps() -> None:
    """Streams that end before the newcomer comes would make every server look undisturbed."""
    client = PaperClient(pause=0.002)
    plan = InterferencePlan(streams=3, prompt=4, long=50, warm=4, rounds=2, output_max=10_000)
    found, records = await interference(client, Words(0, 9000), plan, 10)
    assert found.statuses == {OK: 4, STOPPED: 6}
    assert len(found.before) == len(found.during) == 6
    assert len(found.alone) == len(found.loaded) == 2
    assert [r.status for r in records] == [STOPPED] * 3 + [OK]
    assert client.running == 0
    assert "max" in report.interference_text(found)


async def test_interference_says_when_streams_ended_too_early() -> None:
    """A scenario that measured nothing must say so."""
    plan = InterferencePlan(streams=2, prompt=4, long=50, warm=4, rounds=1, output_max=6)
    found, _ = await interference(PaperClient(pause=0.005), Words(0, 9000), plan, 10)
    assert found.statuses.get(INCOMPLETE, 0) + found.statuses.get(STOPPED, 0) == 2
    assert "the stream ended" in found.reasons.get(INCOMPLETE, "the stream ended")


def test_ratios_compare_within_a_repeat() -> None:
    """A machine that slows down between repeats must not make one server the winner."""
    ours = [Outcome({"tokens/s": t, "stall": s}, {}, {}) for t, s in ((10, 1), (20, 2), (5, 9))]
    theirs = [Outcome({"tokens/s": t, "stall": s}, {}, {}) for t, s in ((5, 1), (10, 1), (2, 0))]
    found = ratios(ours, theirs)
    assert found["tokens/s"] == (2.0, 2.0, 2.5)
    assert found["stall"] == (1.5, 1.0, 2.0)  # a repeat without a stall has no ratio


def test_time_of_others_counts_what_the_host_took() -> None:
    """A run beside other programs is void, and only this figure shows that it was one."""
    stat = "cpu 9 9 9 9 9 9 9 9 0 0\ncpu0 100 20 30 999 7 4 6 40 0 0\ncpu1 5 0 0 1 0 0 0 0 0 0\n"
    ticks = os.sysconf("SC_CLK_TCK")
    assert busy_seconds([0], stat) == 200 / ticks
    assert busy_seconds([0, 1], stat) == 205 / ticks


def test_medians_skip_repeats_without_a_figure() -> None:
    """A server that failed once would otherwise have a median at random, or none at all."""
    times = (math.nan, 3.0, 1.0, 2.0)
    outcomes = [Outcome({"stall": time, "gap": math.nan}, {}, {}) for time in times]
    assert median_metrics(outcomes)["stall"] == 2.0
    assert math.isnan(median_metrics(outcomes)["gap"])


def test_equal_beginnings() -> None:
    """The guard against a peer with another model stands on this count."""
    assert equal_tokens([1, 2, 3], [1, 2, 4]) == 2
    assert equal_tokens([1, 2, 3], [1, 2]) == 2
    assert equal_tokens([], [1]) == 0


def test_saved_files_are_json_for_everyone(tmp_path: Path) -> None:
    """NaN is no JSON, and a file that other programs cannot read was not saved."""
    path = tmp_path / "run.json"
    report.save_json(path, {"summary": summarize([record(0.0, status="X")]).as_json()})
    content = json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(word))
    assert content["summary"]["longest_stall"] is None


def test_converted_weights_are_the_same_model() -> None:
    """A peer with wrongly ordered heads would answer something, only not as this model does."""
    heads, head_dim = 2, 4
    hub = np.arange(heads * head_dim * 3, dtype=np.float32).reshape(-1, 3)
    # As the converter of GGUF files orders rows.
    stored = hub.reshape(heads, 2, head_dim // 2, 3).swapaxes(1, 2).reshape(hub.shape)
    assert not np.array_equal(stored, hub)
    assert np.array_equal(unpermuted(stored, heads), hub)
    assert hf_name("blk.7.attn_output.weight") == "model.layers.7.self_attn.o_proj.weight"
    assert hf_name("token_embd.weight") == "model.embed_tokens.weight"
    values = np.array([1.0, -2.5, 1.00390625, 1.01171875, 3.1415927], dtype=np.float32)
    wide = to_bf16(values).astype(np.uint32) << 16
    assert wide.view(np.float32).tolist() == [1.0, -2.5, 1.0, 1.015625, 3.140625]


async def test_events_of_a_streamed_answer() -> None:
    """A reader that loses an event at the edge of a chunk loses tokens of a peer."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert head.startswith("POST /events HTTP/1.1")
        for part in (b'data: {"n": 1}\n\ndata: {"n', b'": 2}\r\n\r\n', b"data: [DONE]\n\n"):
            writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert [event async for event in post_events(port, "/events", {})] == [{"n": 1}, {"n": 2}]


async def test_refusals_over_http_are_failures_by_status() -> None:
    """A peer that answers 503 or nothing is to be counted, not to end the run."""

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nfull")
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(CallFailed, match="full") as caught:
            [event async for event in post_events(port, "/", {})]
    assert caught.value.status == "HTTP 503"
    with pytest.raises(CallFailed) as caught:
        [event async for event in post_events(free_port(), "/", {})]
    assert caught.value.status == UNREACHABLE
