"""The door: what enters, what is refused, and the books' names for it.

A request is refused at once if it can never fit, if too many wait already, if its tenant uses as
much as it may, or if the server is draining. One whose tenant has as many in the core as may run
waits here, in the order of coming, until one of those ends; everything else waits its turn in the
core.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import structlog

from kvledger.books.lines import EndedRequest
from kvledger.engine import EndReason, Engine, Job
from kvledger.errors import (
    InvalidRequest,
    QueuedTokensFull,
    QueueFull,
    ServerDraining,
    TenantClosed,
    TenantLimitReached,
)
from kvledger.limits import check_prompt_fits
from kvledger.logit_changes import Constraint
from kvledger.sampling import SamplingParameters
from kvledger.scopes import PrefixScopes
from kvledger.scopes.claims import NO_CLAIM, ScopeClaim
from kvledger.streams import Mailbox, MailboxLimits, Receipt, Streams, receipt_of_waiting
from kvledger.tenants.quotas import Quotas
from kvledger.tenants.registry import DEV_TENANT
from kvledger.tenants.shares import CoreShare, PoolShape
from kvledger.tenants.tenant import Tenant
from kvledger.tenants.usage import Phase, Place, TenantUsage
from kvledger.tpot_targets import step_time_max

_log = structlog.get_logger(__name__)

Prompt: TypeAlias = "npt.NDArray[np.int32]"

_REFUSALS: Mapping[type[Exception], str] = {
    InvalidRequest: "never_fits",
    ServerDraining: "draining",
    TenantClosed: "tenant_closed",
    QueueFull: "queue_full",
    QueuedTokensFull: "queued_tokens_full",
}
_REFUSED: tuple[type[Exception], ...] = (*_REFUSALS, TenantLimitReached)


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
    usage: TenantUsage  # of its tenant
    constraint: Constraint | None = None
    scopes: ScopeClaim = NO_CLAIM
    label: str = ""

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
    place: Place
    scopes: ScopeClaim
    label: str
    trace: str
    is_chat: bool


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
        *,
        queued_tokens_max: int | None = None,
        pool: PoolShape | None = None,
        tpot_target: float | None = None,
        set_shares: Callable[[Sequence[CoreShare]], None] = lambda shares: None,
        on_refusal: Callable[[str], None] = lambda reason: None,
        on_receipt: Callable[[Receipt, bool], None] = lambda receipt, shares_public: None,
        price: Callable[[Receipt], Receipt] = lambda receipt: receipt,
        record: Callable[[EndedRequest], None] = lambda ended: None,
        on_arrival: Callable[[Tenant, PrefixScopes, Prompt], None] = lambda *arrival: None,
        on_crowd: Callable[[str, int, int, int], None] = lambda *change: None,
    ) -> None:
        """`context_tokens` is the model's context window, `queued_max` the most that may wait.

        `places` is how many sequences may run at once. `queued_tokens_max` are the prompt tokens
        that may wait over all tenants, `tpot_target` the server's target in seconds. With a `pool`,
        `set_shares` is told what tenants may have of it whenever that changes. `on_refusal` is told
        why a request did not enter: one of metrics.REFUSALS. `on_receipt` is told each receipt, and
        whether what the request shares is a public prefix; `record` each request that has ended,
        with a receipt or not; `price` puts its cost into each receipt; `on_arrival` is told each
        request that enters: whose it is, which cached blocks it could begin with, and its prompt.
        `on_crowd` is told whenever `crowd` has changed: whose requests, and how many more of them
        are open and wait in the core.
        """
        self._engine = engine
        self._context_tokens = context_tokens
        self._quotas = Quotas(queued_max, queued_tokens_max, places, pool)
        self._tpot_target = tpot_target
        self._set_shares = set_shares
        self._on_refusal = on_refusal
        self._on_receipt = on_receipt
        self._record = record
        self._on_arrival = on_arrival
        self._on_crowd = on_crowd
        self._mailboxes = mailboxes
        self._next_sequence = 1
        self._entries: dict[int, _Entry] = {}
        self._metered: dict[int, TenantUsage] = {}  # by sequence, where tokens are counted
        self._draining = False
        self.streams = Streams(
            mailboxes,
            _EngineFlow(engine),
            self._on_end,
            places,
            self._on_begin,
            price,
            lambda: on_crowd("", 0, 0, 0),
        )

    @property
    def open_requests(self) -> Mapping[int, object]:
        """Requests without a receipt yet, by sequence."""
        return self._entries

    def usage_of(self, tenant: int) -> TenantUsage | None:
        """What a tenant may and does use, by its number; None if it has nothing here."""
        return self._quotas.find(tenant)

    @property
    def usages(self) -> Iterable[TenantUsage]:
        """Of every tenant that may enter or still has requests here."""
        return self._quotas.all()

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of requests that wait in the core; any thread may ask."""
        return self._quotas.usage.counts.waiting_tokens

    @property
    def held_tokens(self) -> int:
        """Of those that wait at the door for others of their tenant; any thread may ask."""
        return self._quotas.usage.counts.held_tokens

    @property
    def crowd(self) -> tuple[int, int, int, int]:
        """Requests that are open, and of them those that wait in the core and at the door, and
        those that pause because nobody reads them."""
        counts = self._quotas.usage.counts
        waiting, held = counts[Phase.WAITING], counts[Phase.HELD]
        return counts.total, waiting, held, self.streams.paused_count

    @property
    def stall_seconds(self) -> float:
        """How long a reader may leave a full mailbox alone."""
        return self._mailboxes.stall_seconds

    def set_tenants(self, tenants: Iterable[Tenant], more_may_come: bool = True) -> None:
        """Sets who may enter, and within which limits, from now on.

        Before the first call everybody may, without limits. What runs or waits stays, whatever the
        new limits; who is not named here any more enters no more. `more_may_come` says that tenants
        may be added later: then not all of the pool can be guaranteed. Raises SettingRefused, or
        what `set_shares` raises, and then nothing has changed here.
        """
        listed = list(tenants)
        shares = self._quotas.shares(listed, more_may_come)
        self._set_shares(shares)
        self._quotas.set_tenants(listed, shares, time.monotonic_ns())
        self._metered = {
            sequence: entry.place.usage
            for first, entry in self._entries.items()
            if entry.place.usage.bucket is not None
            for sequence in range(first, first + entry.samples)
        }
        self._turn_meter()
        for usage in self._quotas.all():
            self._end_what_fits_no_more(usage)
            self._release(usage)

    def check_tenants(self, tenants: Iterable[Tenant], more_may_come: bool = True) -> None:
        """Whether `set_tenants` could be called with these; raises SettingRefused."""
        self._quotas.shares(list(tenants), more_may_come)

    def set_pool(self, pool: PoolShape) -> None:
        """What tenants have shares of, before the first `set_tenants`."""
        self._quotas.pool = pool

    def drain(self) -> None:
        """Refuses everything from now on."""
        self._draining = True

    def end_all(self) -> None:
        """Ends every open request before its time; their receipts follow."""
        for first, entry in list(self._entries.items()):
            if entry.place.phase == Phase.HELD:
                self._end_held(first, entry.place.usage, EndReason.CANCELLED)
                continue
            for sequence in range(first, first + entry.samples):
                self._engine.end(sequence, EndReason.CANCELLED)

    def fail_all(self) -> None:
        """Ends every open request, because the engine is gone, and lets no more in.

        Those that it never heard of get their receipts; the others had theirs, if it could.
        """
        self.drain()
        for first, entry in list(self._entries.items()):
            if entry.place.phase == Phase.HELD:
                self._end_held(first, entry.place.usage, EndReason.FAILED)
        for job in self._engine.take_back():
            self._end_unheard(job, EndReason.FAILED)
        self.streams.fail_all()

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
        scopes: ScopeClaim = NO_CLAIM,
        label: str = "",
        trace: str = "",
        is_chat: bool = False,
        tpot_target: float | None = None,
    ) -> Ticket:
        """Submits a request to the engine, or lets it wait for others of its tenant to end.

        Raises InvalidRequest, TenantClosed, TenantLimitReached, QueueFull, QueuedTokensFull or
        ServerDraining. `max_tokens` None is the room there is.
        `scopes` is held until the request has its receipt; `label` is its client's name for it,
        `trace` what it is a part of. `tpot_target` are the seconds that it asks for
        (tpot_targets.py).
        """
        arrived_at = time.monotonic_ns()
        step_max = step_time_max(self._tpot_target, caller.account.limits, tpot_target)
        try:
            usage = self._let_in(caller, len(prompt), arrived_at)
        except _REFUSED as error:
            self._on_refusal(_why_refused(error))
            raise
        # What exceeds the room ends with CONTEXT instead of LENGTH: ask for one token too many.
        room = self._tokens_max(usage) - len(prompt)
        sequence = self._next_sequence
        self._next_sequence += samples
        constraint = sampling.changes.constraint
        place = Place(usage, len(prompt))
        prefix_scopes = scopes.hold()
        self._on_arrival(caller.account, prefix_scopes, prompt)
        request_id = secrets.token_hex(16)
        entry = _Entry(
            request_id, caller.name, samples, constraint, place, scopes, label, trace, is_chat
        )
        self._entries[sequence] = entry
        mailbox = self.streams.open(sequence, samples)
        job = Job(
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
            scopes=prefix_scopes,
            step_time_max=step_max,
        )
        self._take_in(job, place, arrived_at)
        return Ticket(request_id, sequence, mailbox, len(prompt), usage, constraint, scopes, label)

    def _let_in(self, caller: Caller, tokens: int, now: int) -> TenantUsage:
        """The caller's tenant, if a prompt of so many tokens may enter."""
        if self._draining:
            raise ServerDraining()
        usage = self._quotas.tenant(caller.tenant, caller.name)
        check_prompt_fits(tokens, self._engine.sequence_tokens_max, self._context_tokens)
        self._quotas.check_fits(usage, tokens)
        self._quotas.check_now(usage, tokens, self.streams.free_places, now)
        return usage

    def _tokens_max(self, usage: TenantUsage) -> int:
        return self._quotas.sequence_tokens_max(usage, self._engine.sequence_tokens_max)

    def _take_in(self, job: Job, place: Place, now: int) -> None:
        usage = place.usage
        if usage.counts.total == 0:
            # Nothing could finish while nothing ran: that is no sign of a slow queue.
            usage.last_finish = time.monotonic()
        if usage.bucket is not None:
            usage.bucket.charge(place.tokens, now)
            place.is_charged = True
            self._metered.update(dict.fromkeys(job.sequences, usage))
            self._turn_meter()
        if usage.must_hold:
            usage.held[job.sequence] = job
            self._move(place, Phase.HELD)
        else:
            self._move(place, Phase.WAITING)
            self._engine.submit(job)

    def _move(self, place: Place, phase: Phase | None) -> None:
        before = place.phase
        self._quotas.usage.move(place, phase)
        more_open = (phase is not None) - (before is not None)
        more_wait = (phase == Phase.WAITING) - (before == Phase.WAITING)
        self._on_crowd(place.usage.name, more_open, more_wait, place.tokens)

    def _release(self, usage: TenantUsage) -> None:
        """Hands to the engine what waited for others of its tenant to end."""
        while usage.may_release and self._engine.takes_jobs:
            sequence, job = usage.held.popitem(last=False)
            self._move(self._entries[sequence].place, Phase.WAITING)
            self._engine.submit(job)

    def end_scopes(self, ended: Sequence[int]) -> None:
        """Lets what waits neither find nor leave anything in these scopes any more."""
        for usage in self._quotas.all():
            for sequence, job in usage.held.items():
                usage.held[sequence] = job.without(ended)
        self._engine.purge(ended)

    def _end_what_fits_no_more(self, usage: TenantUsage) -> None:
        """Ends what waits at the door and is longer than its tenant's new limits let it be."""
        most = self._tokens_max(usage)
        # All of them first: the end of one lets others go on to the core.
        unfit = [job for job in usage.held.values() if len(job.prompt) >= most]
        for job in unfit:
            del usage.held[job.sequence]
        for job in unfit:
            self._end_unheard(job, EndReason.CONTEXT)

    def end(self, ticket: Ticket, reason: EndReason) -> None:
        """Ends a request before its time; its place in the queue is free at once.

        One that has ended already is left alone.
        """
        first = ticket.sequence
        entry = self._entries.get(first)
        if entry is None:
            return
        if entry.place.phase == Phase.HELD:
            self._end_held(first, entry.place.usage, reason)
            return
        for sequence in ticket.sequences:
            self._engine.end(sequence, reason)
        if entry.place.phase == Phase.WAITING:
            self._move(entry.place, Phase.LEAVING)
        self.streams.leave(first)

    def _end_held(self, first: int, usage: TenantUsage, reason: EndReason) -> None:
        self._end_unheard(usage.held.pop(first), reason)

    def _end_unheard(self, job: Job, reason: EndReason) -> None:
        """Ends a request that the core never heard of: it cost nothing but its waiting."""
        queued = time.monotonic_ns() - job.arrived_at
        self.streams.finish(job.sequence, receipt_of_waiting(reason, len(job.prompt), queued))

    def is_held(self, ticket: Ticket) -> bool:
        """Whether a request waits for others of its tenant to end."""
        return ticket.sequences[0] in ticket.usage.held

    def retry_after(self, ticket: Ticket) -> float:
        """Seconds until one of the requests of a ticket's tenant is likely to have ended."""
        return self._quotas.retry_after(ticket.usage)

    def _turn_meter(self) -> None:
        self.streams.meter = self._charge if self._metered else None

    def _charge(self, tokens: Sequence[tuple[int, int, int]]) -> None:
        """Charges the output of a step to the tenants whose tokens are counted."""
        used: dict[TenantUsage, int] = {}
        for sequence, _, _ in tokens:
            usage = self._metered.get(sequence)
            if usage is not None:
                used[usage] = used.get(usage, 0) + 1
        now = time.monotonic_ns()
        for usage, count in used.items():
            if usage.bucket is not None:
                usage.bucket.charge(count, now)

    def _on_begin(self, first: int) -> None:
        self._move(self._entries[first].place, Phase.RUNNING)

    def _on_end(self, sequence: int, receipt: Receipt | None) -> None:
        entry = self._entries.pop(sequence)
        place, usage = entry.place, entry.place.usage
        entry.scopes.release()
        shares_public = entry.scopes.shares_public
        if receipt is not None:
            self._on_receipt(receipt, shares_public)
        self._record(
            EndedRequest(
                entry.request_id,
                entry.tenant,
                usage.number,
                entry.samples,
                entry.label,
                shares_public,
                receipt,
                _broke_constraint(entry, receipt),
                entry.trace,
                entry.is_chat,
            )
        )
        self._move(place, None)
        usage.note_finish(time.monotonic())
        if self._metered:
            for each in range(sequence, sequence + entry.samples):
                self._metered.pop(each, None)
            self._turn_meter()
        if usage.bucket is not None and place.is_charged and not place.has_run:
            usage.bucket.give_back(place.tokens, time.monotonic_ns())
        self._release(usage)
        self._quotas.forget_if_gone(usage)
        _log_end(entry, receipt)


def _broke_constraint(entry: _Entry, receipt: Receipt | None) -> bool:
    """Whether the request failed because of what its client asked for."""
    if receipt is None or receipt.end_reason != EndReason.FAILED:
        return False
    return entry.constraint is not None and entry.constraint.broken is not None


def _log_end(entry: _Entry, receipt: Receipt | None) -> None:
    if receipt is None:
        _log.error("request_without_receipt", request_id=entry.request_id)
        return
    reason, write = receipt.end_reason.name.lower(), _log.info
    if _broke_constraint(entry, receipt):
        reason = "constraint"
    elif receipt.end_reason == EndReason.FAILED:
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
        reused_own_tokens=receipt.reused_own,
        reused_shared_tokens=receipt.reused_shared,
        recomputed_tokens=receipt.recomputed_tokens,
        preemptions=receipt.preemptions,
        peak_blocks=receipt.peak_blocks,
        held_block_seconds=round(receipt.held_seconds + receipt.held_nanos / 1e9, 6),
        queued_ms=round(receipt.queued / 1e6, 3),
        prefill_ms=round(receipt.prefill / 1e6, 3),
        decode_ms=round(receipt.decode / 1e6, 3),
        stalled_ms=round(receipt.paused / 1e6, 3),
        **_why_preempted(receipt),
    )


def _why_preempted(receipt: Receipt) -> dict[str, Any]:
    """What a request's preemptions were for, and its waits after them; nothing without any."""
    if not receipt.preemptions:
        return {}
    return {
        "preempted_for": receipt.preempted_for,
        "requeued_ms": round(receipt.requeued / 1e6, 3),
    }


def _why_refused(error: Exception) -> str:
    """One of metrics.REFUSALS."""
    if isinstance(error, TenantLimitReached):
        return error.limit
    return _REFUSALS[type(error)]
