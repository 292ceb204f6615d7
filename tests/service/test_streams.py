"""Mailboxes: nothing lost, nothing twice, and one receipt for every request."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engine_harness import make_core
from stepping import NO_REASONS, NOBODY

from kvledger.engine import EndReason, StepOutcome
from kvledger.logprobs import TokenLogprobs
from kvledger.streams import Mail, Mailbox, MailboxLimits, News, Receipt, Streams

# An empty report of the real core: its arrays say how the made-up ones must look.
_, EMPTY = make_core().plan(0, None, NOBODY, NO_REASONS)


def outcome(
    admissions: list[tuple[int, int, int]] | None = None,
    tokens: list[tuple[int, int]] | None = None,
    receipts: list[tuple[int, EndReason]] | None = None,
    refusals: list[int] | None = None,
    logprobs: dict[int, TokenLogprobs] | None = None,
    running: int = 0,
    waiting: int = 0,
) -> StepOutcome:
    """What the engine publishes. admissions: (sequence, queued, again); tokens: (sequence, id)."""

    def rows(kind: str, values: list[dict[str, int]]) -> Any:
        array = np.zeros(len(values), dtype=getattr(EMPTY, kind).dtype)
        for row, value in zip(array, values, strict=True):
            for name, number in value.items():
                row[name] = number
        return array

    report = SimpleNamespace(
        admissions=rows(
            "admissions",
            [{"sequence": s, "queued": q, "again": a} for s, q, a in admissions or []],
        ),
        tokens=rows("tokens", [{"sequence": s, "token": t} for s, t in tokens or []]),
        token_list=[(s, t, 0) for s, t in tokens or []],
        receipts=rows("receipts", [{"sequence": s, "end_reason": r} for s, r in receipts or []]),
        refusals=rows("refusals", [{"sequence": s} for s in refusals or []]),
        running=running,
        waiting=waiting,
    )
    return StepOutcome(report, logprobs or {})  # type: ignore[arg-type]


class Ends:
    """What `on_end` was told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, Receipt | None]] = []

    def __call__(self, sequence: int, receipt: Receipt | None) -> None:
        self.told.append((sequence, receipt))

    @property
    def sequences(self) -> list[int]:
        return [sequence for sequence, _ in self.told]


class FakeFlow:
    """What was asked of the engine, in order."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self.gave_up = asyncio.Event()

    def pause(self, sequence: int) -> None:
        self.asked.append(("pause", sequence))

    def resume(self, sequence: int) -> None:
        self.asked.append(("resume", sequence))

    def give_up(self, sequence: int) -> None:
        self.asked.append(("give up", sequence))
        self.gave_up.set()


@pytest.fixture
def ends() -> Ends:
    return Ends()


@pytest.fixture
def flow() -> FakeFlow:
    return FakeFlow()


@pytest.fixture
def streams(ends: Ends, flow: FakeFlow) -> Streams:
    return Streams(MailboxLimits(tokens=1000, stall_seconds=1000.0), flow, ends)


def nothing_there(mailbox: Mailbox) -> bool:
    """Whether a reader would have to wait."""
    return mailbox.arrival() is not None


async def mail_of(mailbox: Mailbox) -> Mail:
    """The next mail."""
    if (arrival := mailbox.arrival()) is not None:
        await arrival
    return mailbox.take()


async def news_of(mailbox: Mailbox) -> News:
    """The news in the next mail, of which there are some."""
    _, news = await mail_of(mailbox)
    assert news is not None
    return news


async def test_log_probabilities_pile_up_with_their_tokens(streams: Streams) -> None:
    """A reader that is behind would get tokens without their numbers, or somebody else's."""
    asked, silent = streams.open(1), streams.open(2)
    told = [TokenLogprobs(token, -0.5 * token, ((3, -0.1),)) for token in (7, 8)]
    for each in told:
        streams.deliver(outcome(tokens=[(2, 1), (1, each.token)], logprobs={1: each}))
    assert await mail_of(asked) == ([7, 8], News(logprobs=told))
    assert await mail_of(silent) == ([1, 1], None)


async def test_what_piled_up_comes_at_once_and_once(streams: Streams) -> None:
    """A reader that is behind would get a message a token, or tokens twice."""
    mailbox = streams.open(1)
    streams.deliver(outcome(admissions=[(1, 777, 0)]))
    for token in range(50):
        streams.deliver(outcome(tokens=[(1, token)]))
    assert await mail_of(mailbox) == (list(range(50)), News(admitted_after=777))
    assert nothing_there(mailbox)
    streams.deliver(outcome(tokens=[(1, 50)]))
    assert await mail_of(mailbox) == ([50], None)
    streams.deliver(outcome(tokens=[(1, 51)], receipts=[(1, EndReason.LENGTH)]))
    tokens, news = await mail_of(mailbox)
    assert tokens == [51]
    assert news is not None
    assert news.is_last
    assert news.receipt is not None
    assert news.receipt.end_reason == EndReason.LENGTH


async def test_a_waiting_reader_is_woken_by_each_kind_of_mail(streams: Streams) -> None:
    """A stream would hang although its token, its admission or its end was there."""
    for deliver in (
        outcome(admissions=[(1, 5, 0)]),
        outcome(tokens=[(1, 5)]),
        outcome(receipts=[(1, EndReason.STOP)]),
        outcome(refusals=[1]),
    ):
        mailbox = streams.open(1)
        reader = asyncio.create_task(mail_of(mailbox))
        await asyncio.sleep(0)
        assert not reader.done()
        streams.deliver(deliver)
        assert await asyncio.wait_for(reader, 20) != ([], None)
        if streams.open_count:
            streams.deliver(outcome(receipts=[(1, EndReason.STOP)]))


async def test_a_reader_that_was_cancelled_loses_nothing(streams: Streams) -> None:
    """Tokens that came in the moment of a timeout would be missing from the answer."""
    mailbox = streams.open(1)
    reader = asyncio.create_task(mail_of(mailbox))
    await asyncio.sleep(0)
    streams.deliver(outcome(tokens=[(1, 9)]))
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert (await mail_of(mailbox))[0] == [9]


async def test_mail_goes_to_its_own_reader(streams: Streams) -> None:
    """One client would read another's answer."""
    mailboxes = {sequence: streams.open(sequence) for sequence in (1, 2, 2**63)}
    streams.deliver(
        outcome(
            admissions=[(sequence, sequence % 1000, 0) for sequence in mailboxes],
            tokens=[(2, 20), (1, 10), (2**63, 30), (2, 21)],
        )
    )
    assert (await mail_of(mailboxes[1]))[0] == [10]
    assert (await mail_of(mailboxes[2]))[0] == [20, 21]
    assert (await mail_of(mailboxes[2**63]))[0] == [30]


async def test_only_the_first_admission_is_told(streams: Streams) -> None:
    """A preempted request would be accepted twice, with two waiting times."""
    mailbox = streams.open(1)
    streams.deliver(outcome(admissions=[(1, 100, 0)]))
    assert (await news_of(mailbox)).admitted_after == 100
    streams.deliver(outcome(admissions=[(1, 900, 1)]))
    assert nothing_there(mailbox)
    assert streams.waiting_count == 0


async def test_an_admission_without_a_wait_is_told(streams: Streams) -> None:
    """A request that never waited would never be told that it was accepted."""
    mailbox = streams.open(1)
    streams.deliver(outcome(admissions=[(1, 0, 0)]))
    news = await news_of(mailbox)
    assert news.admitted_after == 0
    assert not news.is_last


def test_counts_follow_the_requests(streams: Streams) -> None:
    """The queue would count requests that run, or those that were cancelled while they waited."""
    for sequence in range(1, 6):
        streams.open(sequence)
    assert (streams.open_count, streams.waiting_count) == (5, 5)
    streams.deliver(outcome(admissions=[(1, 0, 0), (2, 0, 0)]))
    assert (streams.open_count, streams.waiting_count) == (5, 3)
    streams.deliver(outcome(receipts=[(1, EndReason.STOP), (3, EndReason.CANCELLED)], refusals=[4]))
    assert (streams.open_count, streams.waiting_count) == (2, 1)
    streams.fail_all()
    assert (streams.open_count, streams.waiting_count) == (0, 0)


async def test_admission_token_and_end_of_one_step_come_together(
    streams: Streams, ends: Ends
) -> None:
    """A request of one step would lose its only token or its admission."""
    mailbox = streams.open(1)
    streams.deliver(
        outcome(admissions=[(1, 3, 0)], tokens=[(1, 65)], receipts=[(1, EndReason.LENGTH)])
    )
    tokens, news = await mail_of(mailbox)
    assert news is not None
    assert (news.admitted_after, tokens, news.is_last) == (3, [65], True)
    assert ends.told == [(1, news.receipt)]


async def test_a_refused_request_ends_without_a_receipt(streams: Streams, ends: Ends) -> None:
    """A request that the core does not take would wait for ever."""
    mailbox = streams.open(1)
    streams.deliver(outcome(refusals=[1]))
    news = await news_of(mailbox)
    assert news.is_last
    assert news.refused
    assert not news.lost
    assert news.receipt is None
    assert ends.told == [(1, None)]


async def test_when_the_engine_is_gone_everybody_is_told_once(streams: Streams, ends: Ends) -> None:
    """Streams would hang on an engine that will never answer."""
    mailboxes = [streams.open(sequence) for sequence in (1, 2, 3)]
    streams.deliver(outcome(admissions=[(1, 0, 0)], tokens=[(1, 7)]))
    streams.deliver(outcome(receipts=[(3, EndReason.STOP)]))
    streams.fail_all()
    streams.fail_all()
    streams.deliver(outcome(tokens=[(1, 8)], receipts=[(2, EndReason.STOP)]))  # it comes back
    first, second, third = [await mail_of(mailbox) for mailbox in mailboxes]
    assert first[0] == [7], "what was computed is not lost"
    refused = [news is not None and news.refused for _, news in (first, second, third)]
    assert refused == [True, True, False], "the third had ended before"
    assert first[1] is not None
    assert first[1].lost
    assert sorted(ends.sequences) == [1, 2, 3]
    await asyncio.wait_for(streams.wait_until_empty(), 20)


async def test_waiting_until_empty_ends_with_the_last_request(streams: Streams) -> None:
    """A server that drains would stop too early, or never."""
    await asyncio.wait_for(streams.wait_until_empty(), 20)
    streams.open(1)
    streams.open(2)
    empty = asyncio.create_task(streams.wait_until_empty())
    streams.deliver(outcome(receipts=[(1, EndReason.STOP)]))
    await asyncio.sleep(0)
    assert not empty.done()
    streams.deliver(outcome(refusals=[2]))
    await asyncio.wait_for(empty, 20)
    streams.open(3)
    again = asyncio.create_task(streams.wait_until_empty())
    await asyncio.sleep(0)
    assert not again.done()
    again.cancel()


def test_a_receipt_carries_every_number(streams: Streams, ends: Ends) -> None:
    """A figure would be billed under another's name."""
    streams.open(7)
    built = outcome(receipts=[(7, EndReason.CONTEXT)])
    (row,) = built.report.receipts
    names = [name for name in row.dtype.names if name not in ("sequence", "end_reason")]
    for value, name in enumerate(names, 100):
        row[name] = value
    streams.deliver(built)
    ((sequence, receipt),) = ends.told
    assert sequence == 7
    assert receipt is not None
    assert receipt.end_reason == EndReason.CONTEXT
    told = {name: getattr(receipt, name) for name in names if name != "tenant"}
    assert told == {name: int(row[name]) for name in told}
    assert all(type(value) is int for value in told.values())


@pytest.mark.parametrize("seed", range(20))
async def test_every_request_ends_once_in_whatever_order(seed: int) -> None:
    """Somewhere among many outcomes a receipt would be lost, or told twice."""
    chance, ends = random.Random(seed), Ends()
    streams = Streams(MailboxLimits(1000, 1000.0), FakeFlow(), ends)
    mailboxes = {sequence: streams.open(sequence) for sequence in range(40)}
    open_ones, sent = set(mailboxes), {sequence: [] for sequence in mailboxes}
    while len(open_ones) > 5:
        tokens = [(s, chance.randrange(1000)) for s in sorted(open_ones) if chance.random() < 0.5]
        over = [s for s in sorted(open_ones) if chance.random() < 0.1]
        refused = [s for s in over if not sent[s] and all(s != t for t, _ in tokens)]
        for sequence, token in tokens:
            sent[sequence].append(token)
        receipts = [(s, EndReason.STOP) for s in over if s not in refused]
        streams.deliver(outcome(tokens=tokens, receipts=receipts, refusals=refused))
        open_ones -= set(over)
    streams.fail_all()
    assert sorted(ends.sequences) == sorted(mailboxes)
    for sequence, mailbox in mailboxes.items():
        tokens, news = await mail_of(mailbox)
        assert tokens == sent[sequence]
        assert news is not None
        assert news.is_last
        assert news.receipt == dict(ends.told)[sequence]


def narrow(flow: FakeFlow, ends: Ends, stall_seconds: float = 1000.0) -> Streams:
    """Mailboxes of three tokens."""
    return Streams(MailboxLimits(3, stall_seconds), flow, ends)


async def test_whoever_stands_still_is_counted_as_long_as_it_does(
    flow: FakeFlow, ends: Ends
) -> None:
    """A diagnosis would hear of slow readers when their requests have ended, or never."""
    told: list[int] = []
    limits = MailboxLimits(3, 0.05)
    streams = Streams(limits, flow, ends, on_stall=lambda: told.append(streams.paused_count))
    mailboxes = [streams.open(sequence) for sequence in (1, 2, 3)]
    streams.deliver(outcome(tokens=[(sequence, 5) for sequence in (1, 2, 3) for _ in range(4)]))
    assert told == [1, 2, 3]
    await mail_of(mailboxes[0])
    streams.deliver(outcome(receipts=[(2, EndReason.CANCELLED)]))
    assert told == [1, 2, 3, 2, 1]
    await flow.gave_up.wait()
    assert told == [1, 2, 3, 2, 1, 0]
    assert streams.paused_count == 0


async def test_a_full_mailbox_stops_its_sequence_and_nobody_else(
    flow: FakeFlow, ends: Ends
) -> None:
    """One reader that is behind would fill the memory, or stop the others."""
    streams = narrow(flow, ends)
    slow, other = streams.open(1), streams.open(2)
    streams.deliver(outcome(tokens=[(1, 5), (2, 5), (1, 6)]))
    assert flow.asked == []
    streams.deliver(outcome(tokens=[(1, 7), (1, 8)]))
    assert flow.asked == [("pause", 1)]
    assert streams.paused_count == 1
    assert (await mail_of(other))[0] == [5]
    assert flow.asked == [("pause", 1)]
    assert (await mail_of(slow))[0] == [5, 6, 7, 8]
    assert flow.asked == [("pause", 1), ("resume", 1)]
    assert streams.paused_count == 0
    streams.deliver(outcome(tokens=[(1, 9), (1, 9), (1, 9)]))
    assert flow.asked[2:] == [("pause", 1)]


async def test_a_request_is_paused_once_whatever_its_samples(flow: FakeFlow, ends: Ends) -> None:
    """An operator would be told of more slow readers than there are."""
    streams = narrow(flow, ends)
    streams.open(1, samples=2)
    streams.deliver(outcome(tokens=[(1, 5), (2, 5)] * 3))
    assert flow.asked == [("pause", 1), ("pause", 2)]
    assert streams.paused_count == 1


async def test_a_reader_who_never_comes_is_given_up_once(flow: FakeFlow, ends: Ends) -> None:
    """Its blocks would be held for ever, or its request ended twice."""
    streams = narrow(flow, ends, stall_seconds=0.01)
    mailbox = streams.open(1)
    streams.deliver(outcome(tokens=[(1, 5), (1, 6), (1, 7)]))
    await flow.gave_up.wait()
    assert flow.asked == [("pause", 1), ("give up", 1)]
    assert mailbox.gave_up
    streams.deliver(outcome(tokens=[(1, 8)], receipts=[(1, EndReason.CANCELLED)]))
    tokens, news = await mail_of(mailbox)
    assert tokens == [5, 6, 7, 8]
    assert news is not None
    assert news.is_last
    assert flow.asked == [("pause", 1), ("give up", 1)]
    assert ends.sequences == [1]


async def test_a_reader_who_comes_in_time_is_not_given_up(flow: FakeFlow, ends: Ends) -> None:
    """A timer of an old stall would end a stream that is read."""
    streams = narrow(flow, ends, stall_seconds=0.1)
    mailbox = streams.open(1)
    for _ in range(4):
        streams.deliver(outcome(tokens=[(1, 5), (1, 6), (1, 7)]))
        await mail_of(mailbox)
    await asyncio.sleep(0.15)
    assert ("give up", 1) not in flow.asked


async def test_the_end_of_a_request_ends_its_stall(flow: FakeFlow, ends: Ends) -> None:
    """A request that ended would be ended again, or asked to go on."""
    streams = narrow(flow, ends, stall_seconds=0.01)
    mailbox = streams.open(1)
    streams.deliver(outcome(tokens=[(1, 5), (1, 6), (1, 7)], receipts=[(1, EndReason.LENGTH)]))
    await asyncio.sleep(0.03)
    assert (await news_of(mailbox)).is_last
    assert flow.asked == [("pause", 1)]


def test_places_are_free_unless_somebody_waits_for_memory() -> None:
    """A burst would be refused on an idle server, or a queue grow beyond its bound."""
    streams = Streams(MailboxLimits(1000, 1000.0), FakeFlow(), Ends(), places=4)
    assert streams.free_places == 4
    streams.deliver(outcome(running=1))
    assert streams.free_places == 3
    streams.deliver(outcome(running=1, waiting=1))
    assert streams.free_places == 0
    streams.deliver(outcome(running=4))
    assert streams.free_places == 0
