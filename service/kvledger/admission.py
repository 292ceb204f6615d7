"""The door: what enters, what is refused, and the books' names for it.

A request is refused at once if it can never fit, if too many wait already, or if the server is
draining; everything else waits its turn in the core.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import structlog

from kvledger.engine import EndReason, Engine, Job
from kvledger.errors import QueueFull, ServerDraining
from kvledger.limits import check_prompt_fits
from kvledger.logit_changes import Constraint
from kvledger.sampling import SamplingParameters
from kvledger.streams import Mailbox, MailboxLimits, Receipt, Streams
from kvledger.tenants.registry import DEV_TENANT
from kvledger.tenants.tenant import Tenant

_log = structlog.get_logger(__name__)

# What a refused caller is told to wait, within these bounds, in seconds.
_RETRY_LEAST = 0.1
_RETRY_MOST = 30.0


@dataclass(frozen=True)
class Caller:
    """Who asks: a tenant, with its limits."""

    account: Tenant

    @property
    def tenant(self) -> int:
        """The number that the core books under."""
        return self.account.number

    @property
    def name(self) -> str:
        """The tenant's name."""
        return self.account.name


# The one tenant of a server started with --dev.
DEV_CALLER = Caller(DEV_TENANT)


@dataclass(frozen=True)
class Ticket:
    """A request that entered."""

    request_id: str
    sequence: int
    mailbox: Mailbox
    prompt_tokens: int
    constraint: Constraint | None = None

    @property
    def sequences(self) -> range:
        """Of its samples."""
        return self.mailbox.sequences


@dataclass
class _Entry:
    request_id: str
    tenant: str
    samples: int
    constraint: Constraint | None


class _EngineFlow:
    """The engine as what a full mailbox asks to wait."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def pause(self, sequence: int) -> None:
        self._engine.pause(sequence)

    def resume(self, sequence: int) -> None:
        self._engine.resume(sequence)

    def give_up(self, sequence: int) -> None:
        self._engine.end(sequence, EndReason.CANCELLED)


class Admission:
    """Takes requests in and writes one line in the log when each has ended."""

    def __init__(
        self,
        engine: Engine,
        context_tokens: int,
        queued_max: int,
        mailboxes: MailboxLimits,
        places: int = 0,
    ) -> None:
        """`context_tokens` is the model's context window, `queued_max` the most that may wait.

        `places` is how many sequences may run at once.
        """
        self._engine = engine
        self._context_tokens = context_tokens
        self._queued_max = queued_max
        self._leaving_max = queued_max + places
        self._mailboxes = mailboxes
        self._next_sequence = 1
        self._entries: dict[int, _Entry] = {}
        self._draining = False
        self._finish_interval = 1.0  # seconds from one receipt to the next, smoothed
        self._last_finish = time.monotonic()
        self.streams = Streams(mailboxes, _EngineFlow(engine), self._on_end, places)

    @property
    def open_requests(self) -> Mapping[int, object]:
        """Requests without a receipt yet, by sequence."""
        return self._entries

    @property
    def stall_seconds(self) -> float:
        """How long a reader may leave a full mailbox alone."""
        return self._mailboxes.stall_seconds

    def drain(self) -> None:
        """Refuses everything from now on."""
        self._draining = True

    def end_all(self) -> None:
        """Ends every open request before its time; their receipts follow."""
        for first, entry in self._entries.items():
            for sequence in range(first, first + entry.samples):
                self._engine.end(sequence, EndReason.CANCELLED)

    def enter(
        self,
        caller: Caller,
        prompt: npt.NDArray[np.int32],
        max_tokens: int | None,
        sampling: SamplingParameters,
        priority: int,
        ignore_eos: bool,
        stop_ids: frozenset[int] = frozenset(),
        samples: int = 1,
        prompt_logprobs: int | None = None,
    ) -> Ticket:
        """Submits a request to the engine.

        Raises InvalidRequest, QueueFull or ServerDraining. `max_tokens` None is the room there is.
        """
        arrived_at = time.monotonic_ns()
        if self._draining:
            raise ServerDraining()
        tokens_max = self._engine.sequence_tokens_max
        check_prompt_fits(len(prompt), tokens_max, self._context_tokens)
        self._check_queue()
        # What exceeds the room ends with CONTEXT instead of LENGTH: ask for one token too many.
        room = tokens_max - len(prompt)
        sequence = self._next_sequence
        self._next_sequence += samples
        constraint = sampling.changes.constraint
        entry = _Entry(secrets.token_hex(16), caller.name, samples, constraint)
        if not self._entries:
            # Nothing could finish while nothing ran: that is no sign of a slow queue.
            self._last_finish = time.monotonic()
        self._entries[sequence] = entry
        mailbox = self.streams.open(sequence, samples)
        self._engine.submit(
            Job(
                sequence=sequence,
                tenant=caller.tenant,
                prompt=prompt,
                arrived_at=arrived_at,
                max_tokens=min(max_tokens if max_tokens is not None else room + 1, room + 1),
                sampling=sampling,
                priority=priority,
                ignore_eos=ignore_eos,
                stop_ids=stop_ids,
                samples=samples,
                prompt_logprobs=prompt_logprobs,
            )
        )
        return Ticket(entry.request_id, sequence, mailbox, len(prompt), constraint)

    def _check_queue(self) -> None:
        waiting, leaving = self.streams.waiting_count, self.streams.leaving_count
        # Whom the next step admits does not queue.
        if waiting >= self._queued_max + self.streams.free_places:
            raise QueueFull(waiting, self.retry_after)
        # Who leaves the queue has memory until the step that runs ends.
        if leaving >= self._leaving_max:
            raise QueueFull(waiting + leaving, self.retry_after)

    def end(self, ticket: Ticket, reason: EndReason) -> None:
        """Ends a request before its time; its place in the queue is free at once.

        One that has ended already is left alone.
        """
        for sequence in ticket.sequences:
            self._engine.end(sequence, reason)
        self.streams.leave(ticket.sequence)

    @property
    def retry_after(self) -> float:
        """Seconds until a place in the queue is likely to be free."""
        return min(_RETRY_MOST, max(_RETRY_LEAST, self._finish_interval))

    def _on_end(self, sequence: int, receipt: Receipt | None) -> None:
        now = time.monotonic()
        self._finish_interval += 0.2 * (now - self._last_finish - self._finish_interval)
        self._last_finish = now
        entry = self._entries.pop(sequence)
        if receipt is None:
            _log.error("request_without_receipt", request_id=entry.request_id)
            return
        reason, write = receipt.end_reason.name.lower(), _log.info
        if receipt.end_reason == EndReason.FAILED:
            if entry.constraint is not None and entry.constraint.broken is not None:
                reason = "constraint"
            else:
                write = _log.warning
        write(
            "request_finished",
            request_id=entry.request_id,
            tenant=entry.tenant,
            reason=reason,
            samples=entry.samples,
            prompt_tokens=receipt.prompt_tokens,
            output_tokens=receipt.output_tokens,
            shared_tokens=receipt.shared_tokens,
            recomputed_tokens=receipt.recomputed_tokens,
            preemptions=receipt.preemptions,
            peak_blocks=receipt.peak_blocks,
            held_block_seconds=round(receipt.held_seconds + receipt.held_nanos / 1e9, 6),
            queued_ms=round(receipt.queued / 1e6, 3),
            prefill_ms=round(receipt.prefill / 1e6, 3),
            decode_ms=round(receipt.decode / 1e6, 3),
            stalled_ms=round(receipt.paused / 1e6, 3),
        )
