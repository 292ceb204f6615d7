"""Files of --books as tests write them, line by line."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

from kvledger.books import lines
from kvledger.books.lines import EndedRequest, PoolAccount, Replica, StepTime, Totals
from kvledger.books.prices import Meter, Prices
from kvledger.engine import EndReason
from kvledger.streams import Receipt, receipt_of_waiting

START = datetime(2026, 11, 30, 12, 0, tzinfo=timezone.utc)
SECOND = 10**9
BLOCKS = 10
PRICES = Prices(
    unit="EUR",
    per_device_hour=Decimal("3.60"),
    memory_share=Decimal("0.25"),
    compute_share=Decimal("0.75"),
)
_NUMBERS = itertools.count(1)


def fresh_id() -> str:
    """An id that no line has."""
    return f"{next(_NUMBERS):032x}"


def receipt(held: int = 0, compute: int = 0, reserved: int = 0, **changes: Any) -> Receipt:
    """A receipt of some block-nanoseconds, and nanoseconds of steps."""
    return replace(
        receipt_of_waiting(EndReason.STOP, 5, 7),
        output_tokens=3,
        computed_tokens=7,
        held_seconds=held // SECOND,
        held_nanos=held % SECOND,
        reserved_seconds=reserved // SECOND,
        reserved_nanos=reserved % SECOND,
        compute=compute,
        **changes,
    )


class Writer:
    """A replica, and its files as text."""

    def __init__(
        self, folder: Path, model: str = "m", prices: Prices | None = PRICES, **changes: Any
    ) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        number = next(_NUMBERS)
        self.replica = replace(
            Replica(f"{number:016x}", "0.1.0", START, model, "bf16", BLOCKS, 4096, prices),
            **changes,
        )
        self.path = folder / f"books-20261130T120000Z-{self.replica.id}-000001.jsonl"
        self.meter = Meter(prices, self.replica.blocks) if prices is not None else None
        self.totals = Totals()
        self.write(lines.replica_line(self.replica))

    def write(self, line: Mapping[str, object]) -> None:
        with self.path.open("ab") as file:
            file.write(lines.encoded(line))

    def ends(self, receipt: Receipt | None, tenant: str = "a", at: float = 1.0) -> dict[str, Any]:
        if receipt is not None and self.meter is not None:
            block_time = receipt.held_time + receipt.reserved_time
            receipt = replace(receipt, cost=self.meter.cost(block_time, receipt.compute))
        ended = EndedRequest(fresh_id(), tenant, 1, 1, "", False, receipt)
        line = lines.receipt_line(ended, self.replica.started_at + timedelta(seconds=at))
        self.totals.receipts += 1
        if receipt is not None:
            self.totals.add(receipt)
        self.write(line)
        return line

    def pool(
        self,
        elapsed: int,
        steps: int = 0,
        unclaimed: int = 0,
        pool: PoolAccount | None = None,
        last: bool = True,
    ) -> None:
        when = self.replica.started_at + timedelta(microseconds=elapsed // 1000)
        time = StepTime(steps, unclaimed)
        self.write(lines.pool_line(self.replica, when, elapsed, time, self.totals, pool, last))
