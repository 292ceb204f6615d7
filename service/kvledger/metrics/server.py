"""All metrics about the work of one server, put together."""

from __future__ import annotations

from collections.abc import Callable

from kvledger.admission import Admission
from kvledger.books.lines import EndedRequest
from kvledger.engine import Engine
from kvledger.machine.peaks import MachinePeaks
from kvledger.metrics import Metrics
from kvledger.metrics.clock import BooksClock
from kvledger.metrics.governor import GovernorMetrics
from kvledger.metrics.load import ComputedShare, LoadMetrics, LoadSources
from kvledger.metrics.requests import RequestMetrics
from kvledger.metrics.steps import PrefillSpeed, StepMetrics
from kvledger.metrics.tenants import TenantMetrics
from kvledger.metrics.vllm import AliasSources, VllmAliases
from kvledger.prefix_metrics import PrefixMetrics
from kvledger.served_model import ServedModel
from kvledger.settings import Settings
from kvledger.streams import Receipt


class WorkMetrics:
    """Steps, requests, tenants and load of one server."""

    def __init__(
        self,
        metrics: Metrics,
        settings: Settings,
        model: ServedModel,
        engine: Engine,
        prefixes: PrefixMetrics,
        peaks: MachinePeaks | None,
    ) -> None:
        """`watch` tells it of the queue once there is one; `peaks` are None if nobody measured.

        Peaks that were measured beside other programs are not shown: shares of them would say
        that the machine is at its limit where it is not.
        """
        self._metrics = metrics
        self._settings = settings
        self._model = model
        self._engine = engine
        self._prefixes = prefixes
        self._peaks = None if peaks is None or peaks.is_disturbed else peaks
        self._clock = BooksClock()
        self._computed = ComputedShare()
        self._tenants = TenantMetrics(settings.metrics_tenants, self._clock)
        self._requests = RequestMetrics(metrics, self._tenants, self._clock)
        self.on_receipt = self._clock.counted("receipts", self._count_prompt)

    @property
    def clock(self) -> BooksClock:
        """What counts the time of the books."""
        return self._clock

    def recording(self, keep: Callable[[EndedRequest], None]) -> Callable[[EndedRequest], None]:
        """What is told each request that has ended, where `keep` is too; its time counts."""
        kept = self._clock.counted("records", keep)

        def record(ended: EndedRequest) -> None:
            kept(ended)
            self._requests.ended(ended.tenant, ended.samples, ended.receipt, ended.broke_constraint)

        return record

    def watch(self, admission: Admission) -> None:
        """Shows what is known, and the queue, from now on."""
        streams, engine, settings = admission.streams, self._engine, self._settings
        steps = StepMetrics(
            lambda: engine.step_books,
            self._model.work,
            settings.sequences_max,
            settings.gap_target,
            self._clock,
        )
        load = LoadMetrics(
            LoadSources(
                blocks=lambda: engine.blocks,
                waiting_tokens=lambda: admission.waiting_tokens,
                held_tokens=lambda: admission.held_tokens,
                requests_running=lambda: streams.running_count,
                sequences_running=lambda: engine.sequences_running,
                compute_totals=lambda: engine.compute_totals,
                step_times=lambda: engine.step_times,
                core_books_seconds=lambda: engine.books_seconds,
            ),
            self._model.pool,
            PrefillSpeed(lambda: engine.step_books),
            self._computed,
            self._peaks,
            self._clock,
        )
        governor = GovernorMetrics(lambda: engine.governor, self._clock)
        for collector in (steps, self._tenants, load, governor):
            self._metrics.registry.register(collector)
        if settings.metrics_aliases == "vllm":
            sources = AliasSources(
                load,
                steps,
                self._requests,
                lambda: streams.waiting_count,
                self._prefixes.prompt_tokens,
            )
            self._metrics.registry.register(VllmAliases(self._model.id, sources, self._clock))

    def _count_prompt(self, receipt: Receipt, shares_public: bool) -> None:
        self._prefixes.request_ended(receipt, shares_public)
        if receipt.computed_tokens or receipt.cached_prompt_tokens:
            self._computed.note(receipt.prompt_tokens, receipt.cached_prompt_tokens)
