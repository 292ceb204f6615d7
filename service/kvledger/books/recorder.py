"""What a server does about its books: prices each receipt, keeps it, and states the pool's account.

Belongs to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import TypeAlias

import structlog

from kvledger import __version__
from kvledger.books import lines
from kvledger.books.lines import EndedRequest, PoolAccount, Replica, StepTime, Totals
from kvledger.books.load_lines import PHASES, Load, load_line
from kvledger.books.options import BooksSettings
from kvledger.books.prices import Meter
from kvledger.books.receipt_files import ReceiptFiles, file_name
from kvledger.diagnosis.counts import Counts
from kvledger.diagnosis.observation import Setup, phase_figures
from kvledger.diagnosis.setup_facts import facts_of
from kvledger.metrics import Metrics
from kvledger.streams import Receipt

_log = structlog.get_logger(__name__)

# How often the pool's account is written, in seconds.
_INTERVAL = 10.0
# Less than this, in nanoseconds, is told by the next line of load.
_LOAD_LEAST = 10**9
# How long the engine may take to state it, in seconds: it does so between two steps.
_SNAPSHOT_SECONDS = 5.0
# How long a server that stops waits for the disk, in seconds.
_CLOSE_SECONDS = 5.0

# Asks for the pool's account; None where nobody can state it now.
Snapshot: TypeAlias = Callable[[], Awaitable[PoolAccount | None]]


@dataclass(frozen=True)
class Moment:
    """How the machine stood at some moment."""

    at: datetime
    elapsed: int  # nanoseconds since the start
    steps: StepTime
    pool: PoolAccount | None  # None: the engine did not say
    load: Load | None = None


class Recorder:
    """The books of one server that are kept outside the core."""

    def __init__(
        self,
        settings: BooksSettings,
        *,
        model: str,
        kv_format: str,
        blocks: int,
        block_bytes: int,
        steps: Callable[[], StepTime],
        metrics: Metrics,
        snapshot: Snapshot | None = None,
        load: Callable[[], Load] | None = None,
        setup: Setup | None = None,
    ) -> None:
        """Raises SettingRefused if the prices cannot be used.

        `steps` says how long all steps took so far. Without `snapshot` the lines of the pool do
        not say in which states its blocks were. `load` says what steps did so far and who is here;
        it needs the `setup`.
        """
        prices = settings.price_list()
        self._meter = Meter(prices, blocks) if prices is not None else None
        self._steps, self._snapshot = steps, snapshot
        self._load, self._setup = load, setup
        self._totals = Totals()
        self._started = time.monotonic_ns()
        started_at = datetime.now(timezone.utc)
        self._replica = Replica(
            id=secrets.token_hex(8),
            version=__version__,
            started_at=started_at,
            model=model,
            kv_format=kv_format,
            blocks=blocks,
            block_bytes=block_bytes,
            prices=prices,
            setup=facts_of(setup) if setup is not None else {},
        )
        self._settings, self._metrics = settings, metrics
        self._files: ReceiptFiles | None = None
        self._before: PoolAccount | None = None  # when it began
        self._load_before: Counts | None = None  # at the last line of load

    async def start(self) -> None:
        """Begins to keep receipts. Raises SettingRefused if the folder cannot be used.

        The pool's account counts from here on, not from when the core was made.
        """
        settings, watch = self._settings, self._metrics.watch_count
        if settings.books is None:
            return
        self._files = files = ReceiptFiles(
            settings.books,
            file_name(self._replica.id, self._replica.started_at),
            lines.encoded(lines.replica_line(self._replica)),
            settings.books_file_bytes,
        )
        self._started, self._before = time.monotonic_ns(), await self._ask()
        self._load_before = self._load().counts if self._load is not None else None
        _log.info("books_kept", replica=self._replica.id)
        self._metrics.watch(
            "kvledger_books_receipts_waiting",
            "Receipts that are not written to a file of --books yet.",
            lambda: files.waiting_count,
        )
        watch(
            "kvledger_books_receipts_written",
            "Receipts written to files of --books.",
            lambda: files.written_count,
        )
        watch(
            "kvledger_books_receipts_lost",
            "Receipts that no file of --books has, because there was no room for them.",
            lambda: files.lost_count,
        )
        watch(
            "kvledger_books_write_failures",
            "Times that a file of --books could not be written.",
            lambda: files.failure_count,
        )

    def price(self, receipt: Receipt) -> Receipt:
        """The same with its cost, where there are prices. Once for each."""
        if self._meter is None:
            return receipt
        block_time = receipt.held_time + receipt.reserved_time
        return replace(receipt, cost=self._meter.cost(block_time, receipt.compute))

    def record(self, ended: EndedRequest) -> None:
        """Keeps what a request came to. It never waits, and never fails."""
        self._totals.receipts += 1
        if ended.receipt is not None:
            self._totals.add(ended.receipt)
        if self._files is not None:
            line = lines.encoded(lines.receipt_line(ended, datetime.now(timezone.utc)))
            self._totals.lost += 0 if self._files.add(line) else 1

    async def watch(self) -> None:
        """States the pool's account now and then, until it is cancelled."""
        while self._files is not None:
            await self.state_pool(await self.look())
            await asyncio.sleep(_INTERVAL)

    async def look(self) -> Moment | None:
        """How the machine stands now; None where nothing is kept."""
        if self._files is None:
            return None
        pool = await self._ask() if self._before is not None else None
        elapsed = time.monotonic_ns() - self._started
        load = self._load() if self._load is not None else None
        return Moment(datetime.now(timezone.utc), elapsed, self._steps(), pool, load)

    async def state_pool(self, moment: Moment | None, is_last: bool = False) -> None:
        """Writes the pool's account of a moment, what receipts come to until now, and the load."""
        if self._files is None or moment is None:
            return
        line = await asyncio.to_thread(self._pool_line, moment, replace(self._totals), is_last)
        # One that does not say how the blocks stood must not push out one that does.
        self._files.add_newest(line, "unstated" if moment.pool is None else "stated")
        if moment.load is not None and self._load_before is not None:
            passed = moment.load.counts.at - self._load_before.at
            if passed >= _LOAD_LEAST or (is_last and passed > 0):
                self._state_load(self._files, moment.at, moment.load, self._load_before)

    def _state_load(self, files: ReceiptFiles, at: datetime, load: Load, before: Counts) -> None:
        """Writes what steps did since the last line that could be kept."""
        assert self._setup is not None
        interval = load.counts.since(before)
        figures = {
            name: phase_figures(self._setup.costs, interval, phase)
            for phase, name in enumerate(PHASES)
        }
        line = lines.encoded(load_line(at, self._started, before, load, figures))
        if files.add_aside(line):  # else the next one tells of this time too
            self._load_before = load.counts

    def _pool_line(self, moment: Moment, totals: Totals, is_last: bool) -> bytes:
        """In a thread of its own: it may have thousands of accounts."""
        pool = moment.pool
        if pool is not None and self._before is not None:
            pool = pool.since(self._before)
        line = lines.pool_line(
            self._replica, moment.at, moment.elapsed, moment.steps, totals, pool, is_last
        )
        return lines.encoded(line)

    async def _ask(self) -> PoolAccount | None:
        """The pool's account since the core was made."""
        if self._snapshot is None:
            return None
        try:
            return await asyncio.wait_for(self._snapshot(), _SNAPSHOT_SECONDS)
        except Exception:  # the engine is gone, or hangs: then the rest is told all the same
            _log.warning("pool_not_stated", exc_info=True)
            return None

    async def close(self) -> None:
        """Brings all that waits to the disk."""
        if self._files is not None:
            await asyncio.to_thread(self._files.close, _CLOSE_SECONDS)
