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
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from kvledger.engine import EndReason, StepOutcome
from kvledger.logprobs import TokenLogprobs


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


@dataclass
class Mail:
    """What happened to a request since the last mail."""

    # Nanoseconds it had waited when it was admitted; None in all mails but one.
    admitted_after: int | None = None
    tokens: list[int] = field(default_factory=list)
    # One for each token where the request asked, otherwise none.
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    # Set in the last mail.
    receipt: Receipt | None = None
    # The core could not run it at all; also the last mail.
    refused: bool = False

    @property
    def is_last(self) -> bool:
        """Whether nothing follows."""
        return self.receipt is not None or self.refused


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

    def __init__(self, sequence: int, limits: MailboxLimits, flow: Flow) -> None:
        self._sequence = sequence
        self._limits = limits
        self._flow = flow
        self._mail = Mail()
        self._something = asyncio.Event()
        self._stall: asyncio.TimerHandle | None = None  # while the sequence pauses
        self.gave_up = False
        self.is_over = False  # the last mail is in it, or was fetched

    async def next(self) -> Mail:
        """Waits until there is something, and takes all of it."""
        await self._something.wait()
        self._something.clear()
        mail, self._mail = self._mail, Mail()
        if self._stall is not None:
            self._end_stall()
            if not mail.is_last:
                self._flow.resume(self._sequence)
        return mail

    def _give_up(self) -> None:
        self._stall = None
        self.gave_up = True
        self._flow.give_up(self._sequence)

    def _end_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def admit(self, queued: int) -> None:
        """Puts in that the request was admitted; only the first time counts."""
        if self._mail.admitted_after is None:
            self._mail.admitted_after = queued
        self._something.set()

    def add_token(self, token: int, logprobs: TokenLogprobs | None = None) -> None:
        """Puts in one token."""
        self._mail.tokens.append(token)
        if logprobs is not None:
            self._mail.logprobs.append(logprobs)
        self._something.set()
        full = len(self._mail.tokens) >= self._limits.tokens
        if full and self._stall is None and not self.gave_up:
            self._flow.pause(self._sequence)
            self._stall = asyncio.get_running_loop().call_later(
                self._limits.stall_seconds, self._give_up
            )

    def finish(self, receipt: Receipt) -> None:
        """Puts in the receipt."""
        self._end_stall()
        self.is_over = True
        self._mail.receipt = receipt
        self._something.set()

    def refuse(self) -> None:
        """Puts in that the request will never run."""
        self._end_stall()
        self.is_over = True
        self._mail.refused = True
        self._something.set()


class Streams:
    """All open requests, by sequence. Belongs to the event loop's thread."""

    def __init__(
        self, limits: MailboxLimits, flow: Flow, on_end: Callable[[int, Receipt | None], None]
    ) -> None:
        """`on_end` is told each request's sequence and receipt, exactly once.

        There is no receipt for a request that the core refused to take.
        """
        self._limits = limits
        self._flow = flow
        self._on_end = on_end
        self._mailboxes: dict[int, Mailbox] = {}
        self._waiting: set[int] = set()
        self._nobody = asyncio.Event()
        self._nobody.set()

    @property
    def open_count(self) -> int:
        """Requests without a receipt yet."""
        return len(self._mailboxes)

    @property
    def waiting_count(self) -> int:
        """Requests that were never admitted yet."""
        return len(self._waiting)

    def open(self, sequence: int) -> Mailbox:
        """A mailbox for a new request."""
        mailbox = Mailbox(sequence, self._limits, self._flow)
        self._mailboxes[sequence] = mailbox
        self._waiting.add(sequence)
        self._nobody.clear()
        return mailbox

    async def wait_until_empty(self) -> None:
        """Waits until every request has its receipt."""
        await self._nobody.wait()

    def deliver(self, outcome: StepOutcome) -> None:
        """Sorts one outcome into the mailboxes."""
        report = outcome.report
        for sequence, queued, again in report.admissions[["sequence", "queued", "again"]].tolist():
            if not again:
                self._waiting.discard(sequence)
                self._mailboxes[sequence].admit(queued)
        for sequence, token, _ in report.tokens.tolist():
            self._mailboxes[sequence].add_token(token, outcome.logprobs.get(sequence))
        for row in report.receipts:
            sequence = int(row["sequence"])
            self._close(sequence, _receipt(row))
        for refusal in report.refusals:
            sequence = int(refusal["sequence"])
            self._waiting.discard(sequence)
            self._mailboxes.pop(sequence).refuse()
            self._on_end(sequence, None)
        if not self._mailboxes:
            self._nobody.set()

    def fail_all(self) -> None:
        """Ends every request without a receipt: the engine is gone."""
        for sequence, mailbox in list(self._mailboxes.items()):
            mailbox.refuse()
            self._on_end(sequence, None)
        self._mailboxes.clear()
        self._waiting.clear()
        self._nobody.set()

    def _close(self, sequence: int, receipt: Receipt) -> None:
        self._waiting.discard(sequence)
        mailbox = self._mailboxes.pop(sequence)
        mailbox.finish(receipt)
        self._on_end(sequence, receipt)


def _receipt(row: object) -> Receipt:
    values = {name: int(row[name]) for name in row.dtype.names}  # type: ignore[attr-defined,index]
    del values["sequence"], values["tenant"]
    return Receipt(end_reason=EndReason(values.pop("end_reason")), **values)
