"""Mailboxes between the engine's thread and the streams that read them.

The engine publishes one outcome per crossing; the event loop sorts it into one mailbox per request.
A mailbox holds what its reader has not fetched yet, so a reader that is behind gets more tokens at
once: deltas coalesce by themselves. When a mailbox is full its sequence pauses, and goes on once
the reader has fetched; a reader that fetches nothing for too long is given up.

Every request has one entry from `open` until its receipt, whether or not anybody still listens, and
each receipt is told exactly once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from kvledger.books.prices import Cost
from kvledger.engine import EndReason, StepOutcome
from kvledger.logprobs import PromptLogprobs, TokenLogprobs

# Nanoseconds.
_SECOND = 10**9


@dataclass(frozen=True)
class Receipt:
    """What one request cost; times in nanoseconds, see Receipt in the contract."""

    end_reason: EndReason
    prompt_tokens: int
    output_tokens: int
    computed_tokens: int
    recomputed_tokens: int
    preemptions: int
    peak_blocks: int
    queued: int
    prefill: int
    decode: int
    held_seconds: int
    held_nanos: int
    reserved_seconds: int
    reserved_nanos: int
    paused: int = 0
    shared_tokens: int = 0
    # Tokens that cached blocks held: of the request's own scope, and of what it shares.
    reused_own: int = 0
    reused_shared: int = 0
    # Block-time of the shared scope's blocks, at full weight.
    scope_seconds: int = 0
    scope_nanos: int = 0
    # Of `queued`, after preemptions.
    requeued: int = 0
    # Its part of the time of steps.
    compute: int = 0
    # Tokens that would have been computed without kept keys and values.
    uncached_tokens: int = 0
    # Block-time that sharing with others of its tenant saved.
    saved_seconds: int = 0
    saved_nanos: int = 0
    # Of `prefill` and `decode`, what the time for others' prompts in these steps was.
    prefill_delayed: int = 0
    decode_delayed: int = 0
    # Of `preemptions`, by what for (core/request.h): its own tenant's sequences or limit, another
    # tenant's, itself because nobody behind it had blocks to give, while its reader was behind.
    preempted_own: int = 0
    preempted_others: int = 0
    preempted_itself: int = 0
    preempted_paused: int = 0
    cost: Cost | None = None

    @property
    def life(self) -> int:
        """Nanoseconds from arrival to end."""
        return self.queued + self.prefill + self.decode + self.paused

    @property
    def preempted_for(self) -> dict[str, int]:
        """Preemptions by what for, where there were any."""
        counts = {
            "own": self.preempted_own,
            "others": self.preempted_others,
            "itself": self.preempted_itself,
            "paused": self.preempted_paused,
        }
        return {reason: count for reason, count in counts.items() if count}

    @property
    def held_time(self) -> int:
        """Block-nanoseconds held."""
        return self.held_seconds * _SECOND + self.held_nanos

    @property
    def reserved_time(self) -> int:
        """Block-nanoseconds reserved and not held."""
        return self.reserved_seconds * _SECOND + self.reserved_nanos

    @property
    def scope_time(self) -> int:
        """Block-nanoseconds of the shared scope's blocks, at full weight."""
        return self.scope_seconds * _SECOND + self.scope_nanos

    @property
    def saved_time(self) -> int:
        """Block-nanoseconds that it did not hold because it shared blocks."""
        return self.saved_seconds * _SECOND + self.saved_nanos

    @property
    def cached_prompt_tokens(self) -> int:
        """Tokens of the prompt that cached blocks held; no more than it has, though a preempted
        request finds them again."""
        return min(self.prompt_tokens, self.reused_own + self.reused_shared)


@dataclass(slots=True)
class News:
    """What happened to a request besides its tokens."""

    # Nanoseconds it had waited when it was admitted; None in all mails but one.
    admitted_after: int | None = None
    # The sample that each token of the mail belongs to; empty where the request has only one.
    samples: list[int] = field(default_factory=list)
    # One for each token of the mail where the request asked, otherwise none.
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    # Samples that ended with a token of theirs, and why.
    ends: dict[int, EndReason] = field(default_factory=dict)
    # Of tokens of the prompt, in order.
    prompt: list[PromptLogprobs] = field(default_factory=list)
    # Set in the last mail.
    receipt: Receipt | None = None
    # The core could not run it at all; also the last mail.
    refused: bool = False
    # It was not the core's choice: the engine is gone.
    lost: bool = False

    @property
    def is_last(self) -> bool:
        """Whether nothing follows."""
        return self.receipt is not None or self.refused


# What happened to a request since the last mail: its tokens, mostly one, and mostly nothing else.
Mail: TypeAlias = tuple[list[int], News | None]


class Flow(Protocol):
    """Who makes tokens, and can be asked to wait."""

    def pause(self, sequence: int) -> None:
        """No more tokens for now."""

    def resume(self, sequence: int) -> None:
        """Go on."""

    def give_up(self, sequence: int) -> None:
        """Nobody will fetch them."""


@dataclass(frozen=True)
class MailboxLimits:
    """How far a reader may be behind."""

    tokens: int  # before its sequence pauses
    stall_seconds: float  # before it is given up


class Mailbox:
    """The reader's end of one request."""

    def __init__(
        self,
        sequences: range,
        limits: MailboxLimits,
        flow: Flow,
        on_stall: Callable[[int], None] = lambda change: None,
    ) -> None:
        """`sequences` are the request's samples; `on_stall` is told 1 when they pause, and -1 when
        they pause no longer."""
        self.sequences = sequences
        self.has_samples = len(sequences) > 1
        self._tokens_max = limits.tokens * len(sequences)
        self._stall_seconds = limits.stall_seconds
        self._flow = flow
        self._on_stall = on_stall
        self._admitted = False
        self._tokens: list[int] = []
        self._news: News | None = None
        self._reader: asyncio.Future[None] | None = None  # what it waits for, or waited for last
        self._stall: asyncio.TimerHandle | None = None  # while the sequence pauses
        self.gave_up = False
        self.is_over = False  # the last mail is in it, or was fetched

    def arrival(self) -> asyncio.Future[None] | None:
        """What to wait for until there is something to take; None where there is something.

        For one reader at a time. A future and no coroutine: most tokens are waited for.
        """
        if self._tokens or self._news is not None:
            return None
        self._reader = asyncio.get_running_loop().create_future()
        return self._reader

    def take(self) -> Mail:
        """All that there is."""
        tokens, news = self._tokens, self._news
        self._tokens, self._news = [], None
        if self._stall is not None:
            self._end_stall()
            if news is None or not news.is_last:
                for sequence in self.sequences:
                    self._flow.resume(sequence)
        return tokens, news

    def _wake(self) -> None:
        reader = self._reader
        if reader is not None and not reader.done():
            reader.set_result(None)

    def _more_news(self) -> News:
        """Where to put what is not a token; wakes the reader."""
        if self._news is None:
            self._news = News()
        self._wake()
        return self._news

    def _give_up(self) -> None:
        self._end_stall()
        self.gave_up = True
        for sequence in self.sequences:
            self._flow.give_up(sequence)

    def _end_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
            self._on_stall(-1)

    def admit(self, queued: int) -> None:
        """Puts in that a sample was admitted; only the first one counts."""
        if self._admitted:
            return
        self._admitted = True
        self._more_news().admitted_after = queued

    def add_prompt(self, logprobs: Sequence[PromptLogprobs]) -> None:
        """Puts in what is known of the prompt."""
        self._more_news().prompt.extend(logprobs)

    def add_token(self, token: int) -> None:
        """Puts in one token, where it is all that there is to say."""
        tokens = self._tokens
        tokens.append(token)
        reader = self._reader
        if reader is not None and not reader.done():
            reader.set_result(None)
        if len(tokens) >= self._tokens_max:
            self._pause()

    def add_token_of_sample(
        self,
        sequence: int,
        token: int,
        logprobs: TokenLogprobs | None,
        end_reason: EndReason | None,
    ) -> None:
        """Puts in one token of a sample, and why the sample ends with it, if it does."""
        news, sample = self._more_news(), sequence - self.sequences.start
        if self.has_samples:
            news.samples.append(sample)
        if logprobs is not None:
            news.logprobs.append(logprobs)
        if end_reason is not None:
            news.ends[sample] = end_reason
        self.add_token(token)

    def _pause(self) -> None:
        if self._stall is None and not self.gave_up:
            for sequence in self.sequences:
                self._flow.pause(sequence)
            self._stall = asyncio.get_running_loop().call_later(self._stall_seconds, self._give_up)
            self._on_stall(1)

    def finish(self, receipt: Receipt) -> None:
        """Puts in the receipt."""
        self._end_stall()
        self.is_over = True
        self._more_news().receipt = receipt

    def refuse(self, *, lost: bool = False) -> None:
        """Puts in that the request will never run; `lost` because the engine is gone."""
        self._end_stall()
        self.is_over = True
        news = self._more_news()
        news.refused, news.lost = True, lost


class Streams:
    """All open requests, by the sequences of their samples. Belongs to the event loop's thread."""

    def __init__(
        self,
        limits: MailboxLimits,
        flow: Flow,
        on_end: Callable[[int, Receipt | None], None],
        places: int = 0,
        on_begin: Callable[[int], None] = lambda first: None,
        price: Callable[[Receipt], Receipt] = lambda receipt: receipt,
        on_stall: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_end` is told each request's first sequence and its receipt, exactly once.

        There is no receipt for a request that the core refused to take. `places` is how many
        sequences may run at once. `on_begin` is told each request that was admitted, once. `price`
        says what a receipt costs, once for each, before anybody is told of it. `on_stall` is
        called when a request has paused for its reader, or pauses no longer.
        """
        self._limits = limits
        self._flow = flow
        self._on_end = on_end
        self._on_begin = on_begin
        self._price = price
        self._on_stall = on_stall
        self._paused_count = 0
        # Is shown (sequence, token, end reason) of every token that comes, where somebody counts.
        self.meter: Callable[[Sequence[tuple[int, int, int]]], None] | None = None
        self._mailboxes: dict[int, Mailbox] = {}
        self._open_count = 0
        self._waiting: set[int] = set()
        self._leaving: set[int] = set()  # they waited, and were told to end
        self._places = self._free_places = places
        self._has_failed = False
        self._nobody = asyncio.Event()
        self._nobody.set()

    @property
    def open_count(self) -> int:
        """Requests without a receipt yet."""
        return self._open_count

    @property
    def running_count(self) -> int:
        """Requests that were admitted and have no receipt yet."""
        return max(0, self._open_count - len(self._waiting) - len(self._leaving))

    @property
    def waiting_count(self) -> int:
        """Requests that were never admitted yet, and still want to be."""
        return len(self._waiting)

    @property
    def paused_count(self) -> int:
        """Requests that stand still because their tokens are not read."""
        return self._paused_count

    @property
    def leaving_count(self) -> int:
        """Requests that ended while they waited, until the step that runs has made room."""
        return len(self._leaving)

    @property
    def free_places(self) -> int:
        """Sequences that the next step may admit, as far as is known; 0 where others wait."""
        return self._free_places

    def open(self, sequence: int, samples: int = 1) -> Mailbox:
        """A mailbox for a new request, whose samples are `sequence` and those that follow it."""
        these = range(sequence, sequence + samples)
        mailbox = Mailbox(these, self._limits, self._flow, self._note_stall)
        self._mailboxes.update(dict.fromkeys(mailbox.sequences, mailbox))
        self._open_count += 1
        self._waiting.add(sequence)
        self._nobody.clear()
        return mailbox

    def leave(self, first: int) -> None:
        """Counts a request that was told to end no longer among those that wait.

        The next plan ends it before it admits anybody, unless it came after the last one: then it
        may take part in one step.
        """
        if first in self._waiting:
            self._waiting.discard(first)
            self._leaving.add(first)

    async def wait_until_empty(self) -> None:
        """Waits until every request has its receipt."""
        await self._nobody.wait()

    def deliver(self, outcome: StepOutcome) -> None:
        """Sorts one outcome into the mailboxes."""
        if self._has_failed:
            return  # of a step that hung, and came back after all: everybody has been told
        report = outcome.report
        self._free_places = 0 if report.waiting else max(0, self._places - report.running)
        admissions = report.admissions
        # Most steps admit nobody, and taking columns costs as much as many tokens.
        columns = admissions[["sequence", "queued", "again"]].tolist() if admissions.size else ()
        for sequence, queued, again in columns:
            if not again:
                mailbox = self._mailboxes[sequence]
                self._begin(mailbox.sequences.start)
                mailbox.admit(queued)
        for sequence, logprobs in outcome.prompts.items():
            self._mailboxes[sequence].add_prompt(logprobs)
        mailboxes, logprobs_of, tokens = self._mailboxes, outcome.logprobs, report.token_list
        if self.meter is not None and tokens:
            self.meter(tokens)
        for sequence, token, end_reason in tokens:
            mailbox = mailboxes[sequence]
            if end_reason or sequence in logprobs_of or mailbox.has_samples:
                mailbox.add_token_of_sample(
                    sequence,
                    token,
                    logprobs_of.get(sequence),
                    EndReason(end_reason) if end_reason else None,
                )
            else:
                mailbox.add_token(token)
        for row in report.receipts:
            sequence = int(row["sequence"])
            self._close(sequence, _receipt(row))
        for refusal in report.refusals:
            sequence = int(refusal["sequence"])
            self._remove(sequence).refuse()
            self._on_end(sequence, None)
        if not self._mailboxes:
            self._nobody.set()

    def finish(self, first: int, receipt: Receipt) -> None:
        """Ends a request that the engine never heard of."""
        self._close(first, receipt)
        if not self._mailboxes:
            self._nobody.set()

    def fail_all(self) -> None:
        """Ends every request without a receipt: the engine is gone."""
        self._has_failed = True
        for mailbox in {id(mailbox): mailbox for mailbox in self._mailboxes.values()}.values():
            self._remove(mailbox.sequences.start).refuse(lost=True)
            self._on_end(mailbox.sequences.start, None)
        self._nobody.set()

    def _note_stall(self, change: int) -> None:
        self._paused_count += change
        self._on_stall()

    def _begin(self, first: int) -> None:
        if first in self._waiting or first in self._leaving:
            self._waiting.discard(first)
            self._leaving.discard(first)
            self._on_begin(first)

    def _close(self, sequence: int, receipt: Receipt) -> None:
        receipt = self._price(receipt)
        self._remove(sequence).finish(receipt)
        self._on_end(sequence, receipt)

    def _remove(self, first: int) -> Mailbox:
        """Forgets a request."""
        self._waiting.discard(first)
        self._leaving.discard(first)
        self._open_count -= 1
        mailbox = self._mailboxes[first]
        for sequence in mailbox.sequences:
            del self._mailboxes[sequence]
        return mailbox


def receipt_of_waiting(end_reason: EndReason, prompt_tokens: int, queued: int) -> Receipt:
    """Of a request that ended before the core heard of it, after `queued` nanoseconds."""
    return Receipt(
        end_reason=end_reason,
        prompt_tokens=prompt_tokens,
        output_tokens=0,
        computed_tokens=0,
        recomputed_tokens=0,
        preemptions=0,
        peak_blocks=0,
        queued=queued,
        prefill=0,
        decode=0,
        held_seconds=0,
        held_nanos=0,
        reserved_seconds=0,
        reserved_nanos=0,
    )


def _receipt(row: object) -> Receipt:
    values: dict[str, Any] = {name: int(row[name]) for name in row.dtype.names}  # type: ignore[attr-defined,index]
    del values["sequence"], values["tenant"]
    return Receipt(end_reason=EndReason(values.pop("end_reason")), **values)
