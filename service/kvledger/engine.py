"""The engine loop: one thread that plans, computes, samples and commits, step after step.

In a server it alone makes and drives the core's Engine; simulation/loop.py drives others. Requests
come in through `submit` and `end`, which any thread may call; what happened goes out as one
StepOutcome per crossing, through the `publish` function given at the start. No step of plain tokens
loops over sequences here.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import structlog
import torch

from kvledger import _core
from kvledger.arrivals import as_arrays, share_numbers
from kvledger.books.desk import BooksDesk
from kvledger.errors import DeviceLost
from kvledger.governor_log import GovernorLog
from kvledger.jobs import EndReason, Job
from kvledger.logit_changes import LogitChanges
from kvledger.logprobs import PromptLogprobs, TokenLogprobs
from kvledger.models.llama import Llama
from kvledger.prompt_scores import PromptScores
from kvledger.sampling import Sampler, SamplingParameters
from kvledger.tenants.shares import CoreShare

__all__ = ["BLOCK_STATES", "CoreEngine", "EndReason", "Engine", "Job", "StepOutcome", "make_core"]

_log = structlog.get_logger(__name__)

CoreEngine: TypeAlias = _core.Engine

# How long an idle engine sleeps before it shows a sign of life again, in seconds.
_IDLE_SECONDS = 0.25

# What most steps have to tell besides their tokens.
_NO_LOGPROBS: Mapping[int, TokenLogprobs] = MappingProxyType({})
_NO_PROMPTS: Mapping[int, Sequence[PromptLogprobs]] = MappingProxyType({})

# What a block can be, in the order of the core's balances.
BLOCK_STATES = ("free", "reserved", "held", "cached", "releasing")


class StepOutcome(NamedTuple):
    """What one crossing into the core changed: structured arrays as in core/step_report.h."""

    report: _core.Report
    # By sequence: of its token in the report, where its request asked.
    logprobs: Mapping[int, TokenLogprobs] = _NO_LOGPROBS
    # By request, of tokens of its prompt.
    prompts: Mapping[int, Sequence[PromptLogprobs]] = _NO_PROMPTS


class _News(NamedTuple):
    """What other threads asked for since the last look."""

    arrivals: list[Job]
    ends: list[tuple[int, EndReason]]
    pauses: dict[int, bool]  # what was asked last, by sequence
    purges: list[int]
    shares: list[CoreShare] | None


def make_core(
    *,
    blocks: int,
    slots_per_block: int,
    context_tokens: int,
    token_budget: int,
    sequences_max: int,
    end_of_text: Collection[int],
    priority_aging: float,
    tpot_target: float | None,
    step_stretch: float,
    prefill_step: float = 0.0,
    prefix_reuse: bool = True,
    cost_growth: float = 0.0,
    forecast: bool = True,
    replayed: tuple[int, int] | None = None,
) -> CoreEngine:
    """Scheduler, pool and ledger for one model.

    `priority_aging` is the seconds of waiting that one level of priority is worth; `tpot_target`
    (seconds) and `step_stretch` (times the step of decoding alone, 0 for no limit) say how long a
    step may become by prompts, and `prefill_step` (seconds, 0 for no limit) one of prompts alone;
    `prefix_reuse` whether computed blocks are kept for others of their scopes; `cost_growth` how
    much more each token costs to compute than the one before it, of what the first one costs;
    `forecast` whether admission looks ahead; the others are counts of blocks and tokens, and the
    ids that end a text. `replayed` is the seed and the time, in nanoseconds, of a simulation, which
    is to be the same each time.
    """
    # Where things lie in the index must not be known to who chooses the tokens.
    seed, now = replayed or (secrets.randbits(64), time.monotonic_ns())
    return CoreEngine(
        blocks=blocks,
        slots_per_block=slots_per_block,
        context_tokens=context_tokens,
        token_budget=token_budget,
        sequences_max=sequences_max,
        end_of_text=sorted(end_of_text),
        aging_per_priority=round(priority_aging * 1e9),
        step_time_max=round((tpot_target or 0.0) * 1e9),
        step_stretch=round(step_stretch * 1000),
        prefill_time_max=round(prefill_step * 1e9),
        reuses_prefixes=prefix_reuse,
        cost_growth=cost_growth,
        seed=seed,
        times_prefixes=replayed is None,
        times_books=replayed is None,
        forecast=forecast,
        now=now,
    )


@dataclass
class _Open:
    """What the loop keeps of a sequence until its receipt."""

    sampling: SamplingParameters
    stop_ids: frozenset[int]
    samples: range  # of its request
    # Kept until the changes are made from it, where there are any to make.
    prompt: npt.NDArray[np.int32] | None
    changes: LogitChanges | None = None
    row: int | None = None  # it has, or had last


class Engine:
    """Owns the core engine, the model and the sampler, and the thread that runs them."""

    def __init__(
        self,
        core: CoreEngine,
        model: Llama,
        sampler: Sampler,
        publish: Callable[[StepOutcome], None],
        on_death: Callable[[], None] = lambda: None,
    ) -> None:
        """`publish` and `on_death` are called from the engine's thread and must not block."""
        self._core = core
        self._model = model
        self._sampler = sampler
        self._publish = publish
        self._on_death = on_death
        self._wakeup = threading.Condition()
        self._arrivals: list[Job] = []
        self._ends: list[tuple[int, EndReason]] = []
        self._pauses: dict[int, bool] = {}  # what was asked last, by sequence
        self._purges: list[int] = []
        self._shares: list[CoreShare] | None = None  # set last, and not taken yet
        self._shares_set: list[CoreShare] = []
        self._shares_after = 0  # arrivals that came before them
        self.books = BooksDesk(self._wakeup)
        self._stopping = False
        self._died = False
        self._open: dict[int, _Open] = {}
        self._uncommitted: int | None = None  # the step that is being computed
        self._owners: dict[int, int] = {}  # sequence that was admitted to a row last, by row
        self._scores = PromptScores()
        self._stoppable: set[int] = set()  # sequences with tokens of their own that end them
        self._last_report: _core.Report | None = None
        self._governor_log = GovernorLog(core)
        self._compute_before = core.compute_totals  # of whoever tried the core
        self._step_nanoseconds = 0
        self._forward_nanoseconds = 0  # of that, the model
        self._sampling_nanoseconds = 0  # and choosing tokens
        self._last_beat = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def sequence_tokens_max(self) -> int:
        """Most tokens of a sequence, prompt and output."""
        return self._core.sequence_tokens_max

    @property
    def silence_seconds(self) -> float:
        """Time since the loop last made progress."""
        return time.monotonic() - self._last_beat

    @property
    def blocks(self) -> dict[str, int]:
        """Blocks of the pool by their state, after the last step; empty before the first."""
        report = self._last_report
        if report is None:
            return {}
        return dict(zip(BLOCK_STATES, report.balances.tolist(), strict=True))

    @property
    def prefix_counts(self) -> dict[str, int]:
        """The core's PrefixCounts after the last step, for any thread; empty before the first."""
        report = self._last_report
        return {} if report is None else report.prefix_counts

    @property
    def step_seconds(self) -> float:
        """Time of all steps so far, each from its plan to its commit."""
        return self._step_nanoseconds / 1e9

    @property
    def step_times(self) -> tuple[int, int, int]:
        """Nanoseconds of all steps so far: whole, computing logits, choosing tokens."""
        return self._step_nanoseconds, self._forward_nanoseconds, self._sampling_nanoseconds

    @property
    def step_books(self) -> _core.StepBooks:
        """What all steps so far did; any thread may look."""
        return self._core.step_books

    @property
    def governor(self) -> tuple[int, int, int]:
        """How careful admission is; how often that was raised, and lowered. Any thread may look."""
        return self._core.governor

    @property
    def sequences_running(self) -> int:
        """Sequences that had a place after the last step."""
        report = self._last_report
        return 0 if report is None else report.running

    @property
    def prefix_seconds(self) -> float:
        """Of that and of commits, what finding, keeping and evicting prefixes took."""
        report = self._last_report
        return report.prefix_nanoseconds / 1e9 if report is not None else 0.0

    @property
    def books_seconds(self) -> float:
        """Of the time of its thread, what the core's books took: postings, dividing steps' time."""
        report = self._last_report
        return report.books_nanoseconds / 1e9 if report is not None else 0.0

    @property
    def compute_totals(self) -> tuple[int, int, int]:
        """Nanoseconds of its steps, of them on receipts, and of them on nobody's; any thread."""
        report = self._last_report
        if report is None:
            return (0, 0, 0)
        steps, closed, unclaimed = report.compute_totals
        before = self._compute_before
        return (steps - before[0], closed - before[1], unclaimed - before[2])

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def takes_jobs(self) -> bool:
        """Whether its loop still goes; once it does not, a job would get no receipt."""
        return not self._died

    def start(self) -> None:
        """Starts the thread."""
        self._last_beat = time.monotonic()
        self._thread.start()

    def stop(self, timeout: float | None = None) -> bool:
        """Ends the thread after the step it is in; what still runs is abandoned.

        False if the thread has not ended within `timeout` seconds: the step hangs.
        """
        with self._wakeup:
            self._stopping = True
            self._wakeup.notify()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def submit(self, job: Job) -> None:
        """Takes in a job. One receipt for all its samples will be published, exactly once."""
        with self._wakeup:
            self._arrivals.append(job)
            self._wakeup.notify()

    def take_back(self) -> list[Job]:
        """Jobs that its loop, which has ended, never looked at: no receipt comes for them."""
        with self._wakeup:
            arrivals, self._arrivals = self._arrivals, []
        return arrivals

    def end(self, sequence: int, reason: EndReason) -> None:
        """Ends a sequence before its time; one that has ended already is left alone.

        With FAILED, the other samples of its request end as well.
        """
        with self._wakeup:
            self._ends.append((sequence, reason))
            self._wakeup.notify()

    def pause(self, sequence: int) -> None:
        """Leaves a sequence out of steps from now on; its blocks are the first to be taken."""
        with self._wakeup:
            self._pauses[sequence] = True
            self._wakeup.notify()

    def resume(self, sequence: int) -> None:
        """Takes a paused sequence into steps again."""
        with self._wakeup:
            self._pauses[sequence] = False
            self._wakeup.notify()

    @property
    def shareable_blocks(self) -> int:
        """Blocks of the pool that do not stay with public prefixes. Only while nothing runs."""
        return self._core.shareable_blocks

    def set_shares(self, shares: Sequence[CoreShare]) -> None:
        """Sets what tenants may have of the pool, before the next step is planned."""
        with self._wakeup:
            if list(shares) == self._shares_set:
                return
            self._shares = self._shares_set = list(shares)
            self._shares_after = len(self._arrivals)
            self._wakeup.notify()

    def purge(self, scopes: Sequence[int]) -> None:
        """Lets nobody begin with what is kept in these scopes; what runs goes on with its own.

        It takes effect before the next step is planned, for jobs that were submitted before too.
        """
        with self._wakeup:
            self._purges += scopes
            self._arrivals = [job.without(scopes) for job in self._arrivals]
            self._wakeup.notify()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._beat()
                if not self._step():
                    self._sleep()
        except BaseException:
            self._died = True
            try:
                _log.exception("engine_died")
                self._close_the_books()
            except BaseException:
                _log.exception("books_left_open")
            finally:
                self._on_death()
        finally:
            self.books.close()

    def _close_the_books(self) -> None:
        """Ends what the core still has, so that everybody gets a receipt for what it took.

        Whatever ended the loop may have done so in the middle of a posting: then no receipt is
        better than a wrong one.
        """
        now = time.monotonic_ns()
        if self._uncommitted is not None:
            self._publish(StepOutcome(self._core.abandon(self._uncommitted, now)))
        if wrong := self._core.audit():
            _log.error("books_disagree", reason=wrong)
            return
        ids = np.array(sorted(self._open), dtype=np.uint64)
        reasons = np.full(len(ids), EndReason.FAILED, dtype=np.uint8)
        _, report = self._core.plan(now, None, ids, reasons)
        self._publish(StepOutcome(report))

    def _beat(self) -> None:
        self._last_beat = time.monotonic()

    def _sleep(self) -> None:
        with self._wakeup:
            if not self._has_news() and not self._stopping:
                self._wakeup.wait(_IDLE_SECONDS)

    def _has_news(self) -> bool:
        return (
            bool(self._arrivals or self._ends or self._pauses or self._purges or self.books.asked)
            or self._shares is not None
        )

    def _step(self) -> bool:
        """Plans and computes one step; False if there was nothing to compute."""
        # What is here runs with cold caches, for everything else ran since the last step: it costs
        # what it touches. So a step of nothing but tokens asks for no lock and makes no array.
        #
        # A look without the lock may be taken for true: each of these is one whole object at any
        # time, and what comes just after the look is found by the next one, for the loop sleeps
        # only after a look with the lock.
        began = time.monotonic_ns()
        if self._has_news():
            plan, report = self._plan_with(self._take_news())
        else:
            plan, report = self._core.plan(began)
        self._uncommitted = step = plan.step if plan.tokens else None
        if report.is_empty:
            self._last_report = report
        else:
            for sequence, row in report.admissions[["sequence", "row"]].tolist():
                self._admit(sequence, row)
            self._hand_out(report)
        if step is None:
            return False
        try:
            tokens, logprobs = self._compute(plan)
        except DeviceLost:
            raise
        except Exception:
            _log.exception("step_failed", step=step, sequences=plan.sequences)
            report = self._core.abandon(step, time.monotonic_ns())
            self._uncommitted = None
            self._hand_out(report)
            return True
        prompts = self._score_prompts(plan) if self._scores.asked else _NO_PROMPTS
        ended = time.monotonic_ns()
        report = self._core.commit(step, tokens, None, ended)
        self._step_nanoseconds += ended - began
        self._governor_log.look()
        self._uncommitted = None
        if self._stoppable:
            self._end_at_stop_ids(report)
        self._hand_out(report, logprobs, prompts)
        return True

    def _score_prompts(self, plan: _core.Plan) -> Mapping[int, Sequence[PromptLogprobs]]:
        return self._scores.of_step(
            plan,
            lambda row: self._open[self._owners[row]].samples.start,
            self._model.score,
            self._fail,
        )

    def _fail(self, request: int) -> None:
        _log.error("prompt_logprobs_failed", exc_info=True, sequences=1)
        self.end(request, EndReason.FAILED)

    def _admit(self, sequence: int, row: int) -> None:
        """Tells the sampler who has a row from now on.

        What a sequence has said is kept with the sequence, so one that comes back after a
        preemption finds it in whatever row it gets.
        """
        entry = self._open[sequence]
        self._leave_row(sequence, entry)
        entry.row = row
        self._owners[row] = sequence
        try:
            if entry.prompt is not None:
                entry.changes = LogitChanges(entry.sampling.changes, entry.prompt)
                entry.prompt = None
            self._sampler.assign(row, entry.sampling, entry.changes)
        except Exception:
            _log.exception("sampling_failed", sequences=1)
            self._sampler.refuse(row)

    def _end_at_stop_ids(self, report: _core.Report) -> None:
        """Ends the sequences to which one of their own ends came, before the next plan.

        It comes before the report goes out: the ends of the next plan are taken first, so no step
        computes what follows.
        """
        found = [
            (sequence, EndReason.STOP)
            for sequence, token, _ in report.token_list
            if sequence in self._stoppable and token in self._open[sequence].stop_ids
        ]
        if found:
            with self._wakeup:
                self._ends += found

    def _take_news(self) -> _News:
        with self._wakeup:
            arrivals, self._arrivals = self._arrivals, []
            ends, self._ends = self._ends, []
            pauses, self._pauses = self._pauses, {}
            purges, self._purges = self._purges, []
            shares, self._shares = self._shares, None
            before, self._shares_after = self._shares_after, 0
            if shares is not None and before:
                # What came before them was let in by the shares of its time: the core takes it
                # first, and ends it then if it can never fit. What came after them waits for them.
                self._shares, shares = shares, None
                self._arrivals = arrivals[before:]
                arrivals = arrivals[:before]
            if ends and (arrivals or self._arrivals):
                # A job that ends before the core has seen it must arrive first: ends that name an
                # arrival of this very moment wait for the next step.
                new = {
                    sequence for job in (*arrivals, *self._arrivals) for sequence in job.sequences
                }
                self._ends = [end for end in ends if end[0] in new]
                ends = [end for end in ends if end[0] not in new]
        self._open_all(arrivals)
        return _News(arrivals, ends, pauses, purges, shares)

    def _open_all(self, arrivals: list[Job]) -> None:
        for job in arrivals:
            wants_changes = job.sampling.changes.changes_anything
            for index, sequence in enumerate(job.sequences):
                # A sample draws what a request of its own with this seed would.
                seed = (job.sampling.seed + index) % 2**64
                self._open[sequence] = _Open(
                    replace(job.sampling, seed=seed),
                    job.stop_ids,
                    job.sequences,
                    job.prompt if wants_changes else None,
                )
                if job.stop_ids:
                    self._stoppable.add(sequence)
            if job.prompt_logprobs is not None:
                self._scores.ask(job.sequence, job.prompt, job.prompt_logprobs)

    def _plan_with(self, news: _News) -> tuple[_core.Plan, _core.Report]:
        self.books.answer(self._core)
        if news.shares is not None:
            self._core.set_shares(share_numbers(news.shares), time.monotonic_ns())
        if news.purges:
            # Before the arrivals, and with no step under way.
            blocks = self._core.purge(np.array(news.purges, dtype=np.uint32), time.monotonic_ns())
            _log.info("scopes_purged", scopes=len(news.purges), blocks=blocks)
        pauses = [sequence for sequence, paused in news.pauses.items() if paused]
        resumes = [sequence for sequence, paused in news.pauses.items() if not paused]
        return self._core.plan(
            time.monotonic_ns(),
            as_arrays(news.arrivals),
            np.array([sequence for sequence, _ in news.ends], dtype=np.uint64),
            np.array([reason for _, reason in news.ends], dtype=np.uint8),
            np.array(pauses, dtype=np.uint64),
            np.array(resumes, dtype=np.uint64),
        )

    def _compute(
        self, plan: _core.Plan
    ) -> tuple[npt.NDArray[np.int32], Mapping[int, TokenLogprobs]]:
        """The step's tokens, and log-probabilities by sequence where they were asked for."""
        began = time.monotonic_ns()
        logits = self._model.forward(plan, self._beat)
        computed = time.monotonic_ns()
        self._forward_nanoseconds += computed - began
        try:
            return self._choose(plan, logits)
        finally:
            self._sampling_nanoseconds += time.monotonic_ns() - computed

    def _choose(
        self, plan: _core.Plan, logits: torch.Tensor
    ) -> tuple[npt.NDArray[np.int32], Mapping[int, TokenLogprobs]]:
        tokens = self._sampler.likeliest(logits)
        if tokens is not None:
            return tokens, _NO_LOGPROBS
        drawn = self._sampler.draw(logits, plan.logit_rows, plan.output_positions)
        if not drawn.logprobs:
            return drawn.tokens, _NO_LOGPROBS
        return drawn.tokens, {
            self._owners[int(plan.logit_rows[place])]: logprobs
            for place, logprobs in drawn.logprobs.items()
        }

    def _hand_out(
        self,
        report: _core.Report,
        logprobs: Mapping[int, TokenLogprobs] = _NO_LOGPROBS,
        prompts: Mapping[int, Sequence[PromptLogprobs]] = _NO_PROMPTS,
    ) -> None:
        self._last_report = report
        if report.is_empty and not prompts:
            return
        if report.has_ends:
            for ended in (*report.receipts, *report.refusals):
                for sequence in self._open[int(ended["sequence"])].samples:
                    self._forget(sequence)
        self._publish(StepOutcome(report, logprobs, prompts))

    def _forget(self, sequence: int) -> None:
        self._stoppable.discard(sequence)
        self._scores.forget(sequence)
        entry = self._open.pop(sequence, None)
        if entry is not None:
            self._leave_row(sequence, entry)

    def _leave_row(self, sequence: int, entry: _Open) -> None:
        # After a preemption somebody else may have the row by now.
        if entry.row is not None and self._owners.get(entry.row) == sequence:
            del self._owners[entry.row]
            self._sampler.release(entry.row)
