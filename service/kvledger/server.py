"""One server process: the engine thread, the gRPC server, and how they start and stop.

Start: load, start the engine, serve. Stop: SIGTERM makes health NOT_SERVING, refuses new requests
and gives running streams `drain_timeout` to end; a second signal stops at once. If the engine's
loop ever dies, open requests fail and the process exits with a reason. Requests that are still
open when it stops get their receipts and end with UNAVAILABLE.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import structlog

from kvledger import self_test
from kvledger.admission import Admission, Prompt
from kvledger.books.account_names import AccountNames
from kvledger.books.lines import EndedRequest, PoolAccount, StepTime
from kvledger.books.load_lines import Load
from kvledger.books.pool_account import pool_account
from kvledger.books.process_memory import ProcessMemory
from kvledger.books.reader import BooksReader
from kvledger.books.recent import RecentRequests
from kvledger.books.recorder import Recorder
from kvledger.constraints.compiler import ConstraintCompiler
from kvledger.diagnosis.counts import Counts, EngineCounts, PoolCounts
from kvledger.diagnosis.observation import Setup
from kvledger.diagnosis.present import Present
from kvledger.diagnosis.setup import kv_formats, setup_of
from kvledger.diagnosis.traffic import Crowd, Traffic
from kvledger.engine import Engine, StepOutcome
from kvledger.errors import SettingRefused
from kvledger.machine.peaks import MachinePeaks
from kvledger.memory import measured
from kvledger.metrics import Metrics
from kvledger.metrics.server import WorkMetrics
from kvledger.metrics_listener import MetricsListener
from kvledger.prefix_metrics import PrefixMetrics
from kvledger.public_prefixes import SERVER, compute_public_prefixes
from kvledger.rpc.connections import KEEPALIVE, Keepalive
from kvledger.rpc.diagnosis import DiagnosisServicer
from kvledger.rpc.diagnosis_messages import Served
from kvledger.rpc.front import Front
from kvledger.rpc.generation import GenerationServicer
from kvledger.rpc.ledger import LedgerServicer
from kvledger.rpc.models import ModelServicer
from kvledger.rpc.prompts import PromptEncoder
from kvledger.rpc.services import (
    diagnosis_service,
    explanation_service,
    generation_service,
    ledger_service,
    model_service,
    statement_service,
)
from kvledger.sampling import Sampler
from kvledger.scopes import PrefixScopes
from kvledger.scopes.claims import Scopes
from kvledger.scopes.public_prefixes import load_public_prefixes
from kvledger.served_model import ServedModel
from kvledger.settings import Settings
from kvledger.streams import MailboxLimits
from kvledger.telemetry import telemetry
from kvledger.tenants.follower import TenantsFollower
from kvledger.tenants.tenant import Tenant

_log = structlog.get_logger(__name__)

# Exit status of a server whose engine died or hangs, or who lost its port (EX_SOFTWARE).
BROKE = 70

# How often health looks at the engine's heartbeat, in seconds.
_HEALTH_INTERVAL = 0.25
# What handlers get to send their last message once their requests have ended, in seconds.
_LAST_WORDS = 2.0
# How long a server that is done still answers callers, so that who is on the way hears UNAVAILABLE
# with the reason; gRPC itself would only cancel them. In seconds.
_LAME_DUCK = 0.25

# Whom the server's own work is booked to.
_OWN_TENANTS = {SERVER.number: SERVER.name, self_test.TENANT: "(self-test)"}


class Server:
    """Serves one model until it is told to stop."""

    def __init__(
        self,
        settings: Settings,
        model: ServedModel,
        keepalive: Keepalive = KEEPALIVE,
        peaks: MachinePeaks | None = None,
        peaks_by_threads: Mapping[int, MachinePeaks] | None = None,
    ) -> None:
        """`peaks` are what the machine can do at most, None where nobody measured it;
        `peaks_by_threads` the same with other numbers of threads."""
        self._settings = settings
        self._model = model
        self._loop: asyncio.AbstractEventLoop | None = None
        self._metrics = Metrics()
        self.registry = settings.registry(self._metrics.tenants_kept)
        sampler = Sampler(settings.sequences_max, settings.instruction_set)
        self._engine = Engine(model.core, model.llama, sampler, self._publish, self._engine_died)
        self._prefix_metrics = PrefixMetrics(
            self._metrics, lambda: self._engine.prefix_counts, lambda: len(self._scopes)
        )
        self._work_metrics = WorkMetrics(
            self._metrics, settings, model, self._engine, self._prefix_metrics, peaks
        )
        setup = setup_of(settings, model, peaks, peaks_by_threads or {})
        self._books = self._make_books(setup)
        self._telemetry = telemetry(settings.otlp, model.id)
        self._traffic = Traffic(model.pool.slots_per_block)
        self._recent = RecentRequests()
        self._admission = self._make_admission()
        self._scopes = _scopes_of(settings, model, self._admission)
        self._prompts = PromptEncoder(model.tokenizer, settings.max_queued)
        self._constraints, constraints_bytes = measured(lambda: ConstraintCompiler(model.tokenizer))
        self._watch_metrics()
        self._memory = _memory_of(model, constraints_bytes)
        self._reader = _reader_of(self._engine, settings)
        self._names = AccountNames(self.registry, self._scopes.shared_owner, _OWN_TENANTS)
        self._ledger = LedgerServicer(
            self._reader,
            self._names,
            self._admission,
            self._memory,
            model.pool,
            model.kv_format,
            self._work_metrics.clock,
        )
        self._diagnosis = DiagnosisServicer(
            setup,
            self._engine,
            self._traffic,
            self._reader,
            self._recent,
            kv_formats(model),
            self._crowd,
            Served(model.id, model.fingerprint),
            self._present,
        )
        self._front = self._make_front(keepalive)
        self._metrics_listener: MetricsListener | None = None
        self._stop_requested = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._broke = False

    def _make_books(self, setup: Setup) -> Recorder:
        """Raises SettingRefused if what it is told to use cannot be used."""
        model, engine = self._model, self._engine

        def steps() -> StepTime:
            steps, _, unclaimed = engine.compute_totals
            return StepTime(steps, unclaimed)

        return Recorder(
            self._settings,
            model=model.id,
            kv_format=model.kv_format,
            blocks=model.blocks,
            block_bytes=model.layout.block_bytes,
            steps=steps,
            metrics=self._metrics,
            snapshot=self._pool_account,
            load=self._load,
            setup=setup,
        )

    def _make_admission(self) -> Admission:
        settings = self._settings
        return Admission(
            self._engine,
            self._model.config.context_tokens,
            settings.max_queued,
            MailboxLimits(settings.mailbox_tokens, settings.stall_timeout),
            settings.sequences_max,
            queued_tokens_max=settings.max_queued_tokens,
            pool=self._model.pool,
            tpot_target=settings.tpot_target,
            set_shares=self._engine.set_shares,
            on_refusal=self._on_refusal,
            on_receipt=self._work_metrics.on_receipt,
            price=self._work_metrics.clock.counted("records", self._books.price),
            record=self._work_metrics.recording(self._record),
            on_arrival=self._on_arrival,
            on_crowd=self._note_crowd,
        )

    def _make_front(self, keepalive: Keepalive) -> Front:
        return Front(
            self._settings,
            [
                generation_service(
                    GenerationServicer(
                        self._model,
                        self._engine,
                        self._admission,
                        self._prompts,
                        self._constraints,
                        self._scopes,
                    )
                ),
                model_service(ModelServicer(self._model, self._prompts)),
                statement_service(self._ledger),
                explanation_service(self._diagnosis),
            ],
            self._metrics,
            self.registry,
            keepalive,
            operators_services=[
                ledger_service(self._ledger),
                diagnosis_service(self._diagnosis),
            ],
        )

    def _on_arrival(self, tenant: Tenant, scopes: PrefixScopes, prompt: Prompt) -> None:
        scope = str(scopes.own) if scopes.own is not None else None
        if not self._settings.reuses_prefixes:
            scope = f"tenant {tenant.number}"  # what reuse would find there
        self._traffic.came(tenant.name, scope, prompt)

    def _note_crowd(self, tenant: str, more_open: int, more_wait: int, tokens: int) -> None:
        now = time.monotonic_ns()
        self._traffic.changed(now, self._crowd(), tenant, more_open, more_wait, tokens)

    def _crowd(self) -> Crowd:
        return Crowd(*self._admission.crowd)

    def _present(self) -> Present:
        crowd, streams = self._crowd(), self._admission.streams
        return Present(
            waiting_requests=crowd.waiting,
            waiting_tokens=self._admission.waiting_tokens,
            held_requests=crowd.held,
            running_requests=streams.running_count,
            paused_requests=streams.paused_count,
            running_sequences=self._engine.sequences_running,
        )

    def _on_refusal(self, reason: str) -> None:
        self._metrics.refused(reason)
        self._traffic.refused(reason)

    def _record(self, ended: EndedRequest) -> None:
        self._books.record(ended)
        self._recent.note(ended)
        if ended.receipt is not None:
            self._traffic.ended(ended.receipt)
        try:
            self._telemetry.ended(ended)
        except Exception:
            # A library's mistake about a span is no reason to lose a request's place.
            _log.exception("telemetry_failed")

    @property
    def port(self) -> int:
        """The port that it serves on, once it is ready; 0 for a unix socket."""
        return self._front.clients.port

    @property
    def address(self) -> str:
        """host:port or unix:/path that it serves on, once it is ready."""
        return self._front.clients.address

    @property
    def operators_address(self) -> str | None:
        """Where operators are listened to, once it is ready; None if nowhere."""
        return self._front.operators.address if self._front.operators else None

    @property
    def metrics_address(self) -> str | None:
        """Where metrics are served, once it is ready; None if nowhere."""
        return self._metrics_listener.address if self._metrics_listener else None

    async def run(self, ready: Callable[[], None] = lambda: None) -> int:
        """Serves until stopped; returns the process's exit status. `ready` is called once."""
        self._loop = asyncio.get_running_loop()
        # First of all: it is the one that can be refused without anything to undo.
        if self._settings.metrics_listen is not None:
            self._metrics_listener = MetricsListener(
                self._settings.metrics_listen, self._metrics.registry
            )
        self._engine.start()
        self._front.health.set_serving(True)
        try:
            await self._let_tenants_in()
        except BaseException:
            self._engine.stop(_LAST_WORDS)
            self._close_metrics()
            await self._books.close()
            raise
        # What is loaded stays: the collector need not look at it again and again.
        gc.collect()
        gc.freeze()
        # A kernel's thread that wants the GIL back should not wait 5 ms for it.
        sys.setswitchinterval(0.0005)
        self._handle_signals()
        watches = (
            asyncio.create_task(self._watch_heartbeat()),
            asyncio.create_task(self._watch_front()),
            asyncio.create_task(self.registry.watch()),
            asyncio.create_task(self._books.watch()),
            asyncio.create_task(self._diagnosis.watch()),
        )
        _log.info(
            "serving",
            listen=self.address,
            tls=self._settings.tls_cert is not None,
            client_certificates=self._settings.tls_client_ca is not None,
            operators=self.operators_address,
            metrics=self.metrics_address,
            model=self._model.id,
            tenants=len(self.registry.tenants()),
        )
        if self._settings.dev:
            _log.warning("dev_mode", meaning="callers without identity are served as one tenant")
        self._memory.serving()
        ready()
        await self._stop_requested.wait()
        await self._drain()
        for watch in watches:
            watch.cancel()
        await self._end_open_requests()
        self._ledger.close()
        await self._front.stop(_LAST_WORDS)
        last = await self._books.look()  # while the engine can say it
        await self._stop_engine()
        await self._books.state_pool(last, is_last=True)
        self._prompts.close()
        self._close_metrics()
        await self._constraints.stop()
        await self._books.close()
        await self._telemetry.close()
        _log.info("stopped", open_requests=len(self._admission.open_requests))
        return BROKE if self._broke else 0

    async def _stop_engine(self) -> None:
        if not self._engine.stop(_LAST_WORDS):
            _log.error("engine_hangs", silence_seconds=round(self._engine.silence_seconds, 1))
            self._broke = True
        await asyncio.sleep(0)  # what it published until now is delivered
        if self._admission.open_requests:
            self._admission.fail_all()  # so that each has its line in the books

    async def _let_tenants_in(self) -> None:
        await self._books.start()
        await compute_public_prefixes(self._scopes, self._admission)
        shareable = self._engine.shareable_blocks
        self._admission.set_pool(replace(self._model.pool, blocks=shareable))
        TenantsFollower(self.registry, self._admission, self._scopes).start()
        await self._front.start()

    def request_stop(self) -> None:
        """Drains; asked again, stops at once."""
        if self._stop_requested.is_set():
            self._stop_now.set()
        self._stop_requested.set()

    def _load(self) -> Load:
        """What steps did so far, and who is here."""
        now, crowd = time.monotonic_ns(), self._crowd()
        self._traffic.pass_time(now, crowd)
        counts = Counts.now(
            now,
            self._engine.step_books,
            EngineCounts(*self._engine.step_times),
            PoolCounts(0, 0, 0, 0, 0),  # the lines of the pool have it
            self._traffic.counts,
        )
        return Load(counts, crowd, self._engine.sequences_running)

    async def _pool_account(self) -> PoolAccount:
        snapshot = await self._reader.read()
        # There may be many thousands of accounts, and streams that must not wait for them.
        return await asyncio.to_thread(pool_account, snapshot, self._names)

    def _watch_metrics(self) -> None:
        self._work_metrics.watch(self._admission)
        streams = self._admission.streams
        watch = self._metrics.watch
        watch(
            "kvledger_request_queue_length",
            "Requests that wait to run for the first time.",
            lambda: streams.waiting_count,
        )
        watch(
            "kvledger_engine_heartbeat_age_seconds",
            "Time since the engine's loop last made progress.",
            lambda: self._engine.silence_seconds,
        )
        self._metrics.watch_count(
            "kvledger_engine_step_seconds",
            "Time of the engine's steps, from plan to commit.",
            lambda: self._engine.step_seconds,
        )
        self._metrics.watch_count(
            "kvledger_prefix_index_seconds",
            "Of the engine's time, what finding, keeping and evicting prefixes took.",
            lambda: self._engine.prefix_seconds,
        )
        self._metrics.watch_by(
            "kvledger_kv_blocks",
            "Blocks of the KV pool, by who has them, after the last step.",
            "state",
            lambda: self._engine.blocks,
        )

    def _close_metrics(self) -> None:
        if self._metrics_listener is not None:
            self._metrics_listener.close()

    def _publish(self, outcome: StepOutcome) -> None:
        assert self._loop is not None
        # Once in each step, so no context manager, which would cost as much as the call.
        try:  # noqa: SIM105
            self._loop.call_soon_threadsafe(self._admission.streams.deliver, outcome)
        except RuntimeError:
            pass  # the loop may be gone when the last step ends during a hard stop

    def _engine_died(self) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._give_up)

    def _give_up(self) -> None:
        self._broke = True
        self._admission.fail_all()  # who enters now would wait for an engine that is gone
        self.request_stop()

    def _handle_signals(self) -> None:
        assert self._loop is not None
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(ValueError, NotImplementedError):  # not the main thread
                self._loop.add_signal_handler(number, self.request_stop)

    async def _watch_heartbeat(self) -> None:
        """Health says what the engine's loop does, not what somebody hopes."""
        previous = True
        while True:
            silent = self._engine.silence_seconds > self._settings.heartbeat_timeout
            serving = self._engine.alive and not silent
            if serving != previous:
                self._front.health.set_serving(serving)
                _log.warning("health_changed", serving=serving)
                previous = serving
            self._prefix_metrics.look()
            await asyncio.sleep(_HEALTH_INTERVAL)

    async def _watch_front(self) -> None:
        try:
            await self._front.watch()
        except SettingRefused:
            _log.exception("listener_lost")
            self._broke = True
            self.request_stop()

    async def _drain(self) -> None:
        self._front.health.drain()
        self._admission.drain()
        streams = self._admission.streams
        _log.info("draining", open_requests=streams.open_count)
        empty = asyncio.create_task(streams.wait_until_empty())
        now = asyncio.create_task(self._stop_now.wait())
        await asyncio.wait(
            (empty, now),
            timeout=self._settings.drain_timeout,
            return_when=asyncio.FIRST_COMPLETED,
        )
        empty.cancel()
        await asyncio.wait((now,), timeout=_LAME_DUCK)
        now.cancel()

    async def _end_open_requests(self) -> None:
        """What still runs gets its receipt, and its caller UNAVAILABLE."""
        self._admission.end_all()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._admission.streams.wait_until_empty(), _LAST_WORDS)


def _reader_of(engine: Engine, settings: Settings) -> BooksReader:
    return BooksReader(engine.books.ask, lambda: engine.silence_seconds, settings.heartbeat_timeout)


def _memory_of(model: ServedModel, constraints: int) -> ProcessMemory:
    pool = model.blocks * model.layout.block_bytes
    return ProcessMemory(
        model.memory,
        model.weight_bytes,
        pool,
        lambda: model.llama.workspace_bytes,
        constraints,
    )


def _scopes_of(settings: Settings, model: ServedModel, admission: Admission) -> Scopes:
    """Raises SettingRefused if a public prefix cannot be used."""
    public = load_public_prefixes(settings.public_files(), model.tokenizer, model.tokens_max)
    return Scopes(model.kv_identity, admission.end_scopes, public, reuses=settings.reuses_prefixes)
