"""The lines of the files of --books: what they say, for whoever writes and whoever reads them.

A line is a JSON object whose `kind` says what it is of: `replica`, the first line of each file;
`receipt`, one for each request; `pool` and `load` (books/load_lines.py), now and then and at the
end. They hold ids, names that the operator gave, and whole numbers: nanoseconds, block-nanoseconds,
tokens, billionths of a unit of money; of settings also others. Nothing that a client sent stands
there but the id that it gave its request. Readers pass over kinds that they do not know.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from kvledger.books.prices import Prices

if TYPE_CHECKING:  # readers of the lines need no engine, which takes seconds to import
    from kvledger.streams import Receipt

VERSION = 2
# Version 1 had no lines of load, and its readers took them for damage.
READABLE = (1, 2)

# json.dumps makes one for each line, which takes as long as the line.
_ENCODER = json.JSONEncoder(separators=(",", ":"))

# How a request ended that has no receipt, because the engine was gone.
LOST = "lost"


@dataclass(frozen=True)
class Replica:
    """The process that writes, and what it serves."""

    id: str
    version: str
    started_at: datetime
    model: str
    kv_format: str
    blocks: int
    block_bytes: int
    prices: Prices | None
    # Its settings and its machine, as diagnosis/setup_facts.py states them.
    setup: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class EndedRequest:
    """A request that had entered and has ended; `receipt` is None if the engine was gone."""

    request_id: str
    tenant: str
    tenant_number: int
    samples: int
    # The client's own id of it; empty if it gave none.
    label: str
    # Whether what it shares is a public prefix, and not a group's.
    shares_public: bool
    receipt: Receipt | None
    # Whether it failed because its own constraint left no token: no fault of the server.
    broke_constraint: bool = False
    # What the call said that it is a part of, for traces; and whether its prompt was a chat.
    trace: str = ""
    is_chat: bool = False


@dataclass(frozen=True)
class AccountTime:
    """What a tenant or a shared scope had of the pool so far, in block-nanoseconds."""

    name: str
    is_scope: bool
    held: int
    reserved: int
    cached: int


@dataclass(frozen=True)
class PoolAccount:
    """The pool's account since the start: block-nanoseconds by state, all of one moment.

    The times of all states add up to `elapsed` nanoseconds times the blocks of the pool.
    """

    elapsed: int
    states: Mapping[str, int]
    accounts: Sequence[AccountTime] = ()

    def since(self, earlier: PoolAccount) -> PoolAccount:
        """What came after an earlier moment of the same pool."""
        before = {(each.is_scope, each.name): each for each in earlier.accounts}
        nothing = AccountTime("", False, 0, 0, 0)
        accounts = []
        for each in self.accounts:
            had = before.get((each.is_scope, each.name), nothing)
            accounts.append(
                AccountTime(
                    each.name,
                    each.is_scope,
                    each.held - had.held,
                    each.reserved - had.reserved,
                    each.cached - had.cached,
                )
            )
        states = {name: time - earlier.states[name] for name, time in self.states.items()}
        return PoolAccount(self.elapsed - earlier.elapsed, states, accounts)


@dataclass(frozen=True)
class StepTime:
    """Nanoseconds of all steps so far, and of them those that nobody's receipt will have."""

    steps: int = 0
    unclaimed: int = 0


@dataclass
class Totals:
    """Sums over all receipts of a replica so far."""

    receipts: int = 0
    # Of them, those that could not be kept for lack of room.
    lost: int = 0
    held: int = 0
    reserved: int = 0
    compute: int = 0
    memory_nanos: int = 0
    compute_nanos: int = 0

    def add(self, receipt: Receipt) -> None:
        """One receipt more."""
        self.held += receipt.held_time
        self.reserved += receipt.reserved_time
        self.compute += receipt.compute
        if receipt.cost is not None:
            self.memory_nanos += receipt.cost.memory_nanos
            self.compute_nanos += receipt.cost.compute_nanos


def encoded(line: Mapping[str, object]) -> bytes:
    """A line as it stands in a file."""
    return _ENCODER.encode(line).encode() + b"\n"


def are_counts(values: Mapping[str, Any], names: Sequence[str]) -> bool:
    """Whether a line has whole numbers of these names, none less than 0."""
    return all(type(values.get(name)) is int and values[name] >= 0 for name in names)


def timestamp(when: datetime) -> str:
    """A moment of UTC, so that later ones sort behind earlier ones."""
    utc = when.astimezone(timezone.utc).replace(tzinfo=None)
    return utc.isoformat(timespec="microseconds") + "Z"


def replica_line(replica: Replica) -> dict[str, object]:
    """The first line of each file."""
    line: dict[str, object] = {
        "kind": "replica",
        "format": VERSION,
        "replica": replica.id,
        "version": replica.version,
        "started_at": timestamp(replica.started_at),
        "model": replica.model,
        "kv_format": replica.kv_format,
        "blocks": replica.blocks,
        "block_bytes": replica.block_bytes,
        **replica.setup,
    }
    if replica.prices is not None:
        line["prices"] = replica.prices.facts()
    return line


def receipt_line(ended: EndedRequest, when: datetime) -> dict[str, object]:
    """The line of one request, which ended at `when`."""
    line: dict[str, object] = {
        "kind": "receipt",
        "id": ended.request_id,
        "ended_at": timestamp(when),
        "tenant": ended.tenant,
        "samples": ended.samples,
    }
    if ended.label:
        line["client_request_id"] = ended.label
    receipt = ended.receipt
    if receipt is None:
        return line | {"end": LOST}
    line |= {
        "end": receipt.end_reason.name.lower(),
        "prompt_tokens": receipt.prompt_tokens,
        "output_tokens": receipt.output_tokens,
        "computed_tokens": receipt.computed_tokens,
        "recomputed_tokens": receipt.recomputed_tokens,
        "shared_tokens": receipt.shared_tokens,
        "reused_own_tokens": receipt.reused_own,
        "reused_group_tokens": 0 if ended.shares_public else receipt.reused_shared,
        "reused_public_tokens": receipt.reused_shared if ended.shares_public else 0,
        "uncached_tokens": receipt.uncached_tokens,
        "peak_blocks": receipt.peak_blocks,
        "held": receipt.held_time,
        "reserved": receipt.reserved_time,
        "shared_scope": receipt.scope_time,
        "sharing_saved": receipt.saved_time,
        "preemptions": receipt.preemptions,
        "queue": receipt.queued,
        "preempted": receipt.requeued,
        "prefill": receipt.prefill,
        "decode": receipt.decode,
        "stall": receipt.paused,
        "delayed": receipt.prefill_delayed + receipt.decode_delayed,
        "compute": receipt.compute,
    }
    if receipt.preemptions:
        line["preempted_for"] = receipt.preempted_for
    if receipt.cost is not None:
        line["memory_nanos"] = receipt.cost.memory_nanos
        line["compute_nanos"] = receipt.cost.compute_nanos
    return line


def pool_line(
    replica: Replica,
    when: datetime,
    elapsed: int,
    steps: StepTime,
    totals: Totals,
    pool: PoolAccount | None,
    is_last: bool,
) -> dict[str, object]:
    """What the pool's account and the sums over receipts come to, `elapsed` after the start.

    Without `pool` it does not say in which states the blocks were.
    """
    line: dict[str, object] = {
        "kind": "pool",
        "at": timestamp(when),
        "blocks": replica.blocks,
        "block_bytes": replica.block_bytes,
        "elapsed": elapsed if pool is None else pool.elapsed,
        "steps": steps.steps,
        "unclaimed": steps.unclaimed,
        "receipts": totals.receipts,
        "lost": totals.lost,
        "held": totals.held,
        "reserved": totals.reserved,
        "compute": totals.compute,
        "last": is_last,
    }
    if replica.prices is not None:
        line["memory_nanos"] = totals.memory_nanos
        line["compute_nanos"] = totals.compute_nanos
    if pool is not None:
        line["states"] = dict(pool.states)
        line["accounts"] = [
            {
                "scope" if account.is_scope else "tenant": account.name,
                "held": account.held,
                "reserved": account.reserved,
                "cached": account.cached,
            }
            for account in pool.accounts
        ]
    return line
