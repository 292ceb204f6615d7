"""Metrics of how full the server is: the pool, the queue, and what a newcomer would wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvledger.machine.peaks import MachinePeaks
from kvledger.metrics.clock import BooksClock
from kvledger.metrics.families import counter, gauge
from kvledger.metrics.steps import PrefillSpeed
from kvledger.tenants.shares import PoolShape

# States of blocks that are under the waterline: the others can be had.
LIVE = ("held", "reserved", "releasing")

# Of prompts that ended lately, the last so many tokens are half of what is known.
_HALF_LIFE_TOKENS = 100_000.0


class ComputedShare:
    """What part of prompts' tokens was not found in cached blocks lately.

    Told in the event loop's thread; any thread may read.
    """

    def __init__(self) -> None:
        self._computed = self._all = 0.0
        self._share = 1.0

    @property
    def share(self) -> float:
        """From 0 to 1; 1 before anything is known."""
        return self._share

    def note(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Learns of a prompt that was looked up."""
        kept = 0.5 ** (prompt_tokens / _HALF_LIFE_TOKENS)
        self._all = self._all * kept + prompt_tokens
        self._computed = self._computed * kept + prompt_tokens - cached_tokens
        if self._all > 0:
            self._share = self._computed / self._all


@dataclass(frozen=True)
class LoadSources:
    """Where the numbers of this moment come from; any thread may ask."""

    blocks: Callable[[], Mapping[str, int]]
    waiting_tokens: Callable[[], int]  # of prompts in the core
    held_tokens: Callable[[], int]  # of prompts at the door, held there by limits of tenants
    requests_running: Callable[[], int]
    sequences_running: Callable[[], int]
    compute_totals: Callable[[], tuple[int, int, int]]
    step_times: Callable[[], tuple[int, int, int]]
    core_books_seconds: Callable[[], float]


class LoadMetrics(Collector):
    """Families about the load. Any thread may collect."""

    def __init__(
        self,
        sources: LoadSources,
        pool: PoolShape,
        speed: PrefillSpeed,
        computed: ComputedShare,
        peaks: MachinePeaks | None,
        clock: BooksClock,
    ) -> None:
        """`peaks` are None where nobody measured this machine, or it was not quiet."""
        self.sources = sources
        self._pool = pool
        self._speed = speed
        self._computed = computed
        self._peaks = peaks
        self._clock = clock

    def waterline(self) -> float:
        """Blocks that are held, reserved or releasing, of all."""
        blocks = self.sources.blocks()
        return sum(blocks.get(state, 0) for state in LIVE) / self._pool.blocks

    def describe(self) -> Iterable[Metric]:
        """Nothing: names cannot clash with others."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """The families now."""
        with self._clock.scraping():
            families = [*self._of_pool(), *self._of_queue(), *self._of_compute(), *self._of_peaks()]
        spent = {"core": self.sources.core_books_seconds(), **self._clock.seconds()}
        return [
            *families,
            counter(
                "kvledger_books_seconds",
                "Time that the books took: the core's, in the engine's thread; counting receipts, "
                "keeping them for files and diagnosis, answering scrapes without writing the text, "
                "and showing the ledger.",
                ["part"],
                {(part,): seconds for part, seconds in spent.items()},
            ),
        ]

    def _of_pool(self) -> Iterable[Metric]:
        return [
            gauge(
                "kvledger_kv_waterline_ratio",
                "Of the pool's blocks, those held, reserved or releasing; cached ones can be had.",
                [],
                {(): self.waterline()},
            ),
            gauge("kvledger_kv_block_bytes", "A block.", [], {(): self._pool.block_bytes}),
            gauge(
                "kvledger_kv_pool_bytes",
                "The pool.",
                [],
                {(): self._pool.block_bytes * self._pool.blocks},
            ),
        ]

    def _of_queue(self) -> Iterable[Metric]:
        # What is held would not run on a larger server either: no reason for more replicas.
        queued = self.sources.waiting_tokens()
        uncached = queued * self._computed.share
        speed = self._speed.tokens_per_second()
        wait: dict[tuple[str, ...], float] = {}
        if speed is not None:
            wait[()] = uncached / speed
        elif not queued:
            wait[()] = 0.0
        return [
            gauge(
                "kvledger_requests_running",
                "Requests that were admitted and have not ended.",
                [],
                {(): self.sources.requests_running()},
            ),
            gauge(
                "kvledger_sequences_running",
                "Sequences with a place in steps; those that were preempted have none.",
                [],
                {(): self.sources.sequences_running()},
            ),
            gauge(
                "kvledger_queued_prompt_tokens",
                "Tokens of prompts of requests that wait in the core to run for the first time.",
                [],
                {(): queued},
            ),
            gauge(
                "kvledger_held_prompt_tokens",
                "Tokens of prompts of requests that wait for others of their tenant to end.",
                [],
                {(): self.sources.held_tokens()},
            ),
            gauge(
                "kvledger_queued_uncached_tokens",
                "Of these, those to be computed if as many are cached as of prompts lately.",
                [],
                {(): uncached},
            ),
            gauge(
                "kvledger_prefill_tokens_per_second",
                "Tokens of prompts that steps with prompts computed in a second lately.",
                [],
                {} if speed is None else {(): speed},
            ),
            gauge(
                "kvledger_predicted_wait_seconds",
                "What computing the prompts that wait would take: how long a newcomer waits if "
                "places and blocks are free.",
                [],
                wait,
            ),
        ]

    def _of_compute(self) -> Iterable[Metric]:
        steps, receipts, unclaimed = self.sources.compute_totals()
        _, forward, sampling = self.sources.step_times()
        return [
            counter(
                "kvledger_engine_forward_seconds",
                "Of the time of steps, computing logits.",
                [],
                {(): forward / 1e9},
            ),
            counter(
                "kvledger_engine_sampling_seconds",
                "Of the time of steps, choosing tokens.",
                [],
                {(): sampling / 1e9},
            ),
            counter(
                "kvledger_compute_seconds",
                "Time of all steps, which is divided among requests.",
                [],
                {(): steps / 1e9},
            ),
            counter(
                "kvledger_compute_receipts_seconds",
                "Of that, what receipts say; the rest is of requests that have not ended.",
                [],
                {(): receipts / 1e9},
            ),
            counter(
                "kvledger_compute_unclaimed_seconds",
                "Of that, of requests that had their receipt while their last step ran.",
                [],
                {(): unclaimed / 1e9},
            ),
        ]

    def _of_peaks(self) -> Iterable[Metric]:
        peaks = self._peaks
        return [
            gauge(
                "kvledger_machine_read_bytes_per_second",
                "The most that this machine reads from memory, where it was measured.",
                [],
                {} if peaks is None else {(): peaks.read_bytes_per_second},
            ),
            gauge(
                "kvledger_machine_operations_per_second",
                "The most that this machine multiplies and adds, where it was measured.",
                ["format"],
                {}
                if peaks is None
                else {(name,): rate for name, rate in peaks.operations_per_second.items()},
            ),
        ]
