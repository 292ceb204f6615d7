"""What the core's books said at one moment.

Everything in a snapshot is of that moment, so it adds up: blocks over all states to the pool, and
block-time to blocks times elapsed time, exactly; held, reserved and cached over all accounts to
what the pool has of them. Block-time is whole block-nanoseconds. A snapshot may be read by any
thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvledger import _core
from kvledger.scopes.prefix_scopes import SHARED_SCOPE

_NANOS = 1_000_000_000
# Accounts that are made into objects at a time.
_PIECE = 256

# What a block can be, in the order of the core's rows.
STATES = ("free", "reserved", "held", "cached", "releasing")


class Balance(NamedTuple):
    """Blocks now, and block-nanoseconds since the pool was taken."""

    blocks: int = 0
    time: int = 0


class Account(NamedTuple):
    """What a tenant or a shared scope has of the pool."""

    number: int
    open_requests: int = 0
    held: Balance = Balance()
    reserved: Balance = Balance()
    cached: Balance = Balance()
    # Part of the held block-time that requests have receipts for, in block-nanoseconds.
    closed_held: int = 0

    @property
    def is_shared_scope(self) -> bool:
        """Whether it is no tenant's."""
        return self.number >= SHARED_SCOPE


class Snapshot:
    """See the head of this file."""

    def __init__(self, books: _core.Books) -> None:
        # Nanoseconds since the pool was taken.
        self.elapsed = books.elapsed
        # Slots of held blocks in which no token stands.
        self.empty_slots = books.empty_slots
        rows = books.states.tolist()
        self.states = {
            state: Balance(blocks, seconds * _NANOS + nanos)
            for state, (blocks, seconds, nanos) in zip(STATES, rows, strict=True)
        }
        # By number. Objects are made of what is asked for: there may be many thousands.
        self._rows = books.accounts
        self._numbers: npt.NDArray[np.uint32] = np.ascontiguousarray(self._rows["account"])

    def __len__(self) -> int:
        """How many accounts there are."""
        return len(self._numbers)

    @property
    def blocks(self) -> int:
        """Of the pool."""
        return sum(balance.blocks for balance in self.states.values())

    @property
    def waterline(self) -> float:
        """The share of the blocks that somebody has, from 0 to 1; cached ones can be had."""
        taken = ("held", "reserved", "releasing")
        return sum(self.states[state].blocks for state in taken) / self.blocks

    def account(self, number: int) -> Account:
        """A tenant's or a shared scope's; with nothing in it if the books have none."""
        place = int(np.searchsorted(self._numbers, number))
        if place == len(self._numbers) or int(self._numbers[place]) != number:
            return Account(number)
        return self._account(self._rows[place].item())

    def accounts(self) -> Iterator[Account]:
        """All that the books have, by number."""
        # In pieces: numpy gives no other thread its turn while it makes a list.
        for first in range(0, len(self), _PIECE):
            yield from map(self._account, self._rows[first : first + _PIECE].tolist())

    def _account(self, row: tuple[int, ...]) -> Account:
        # Numpy's own rows would take twenty times as long.
        fields = dict(zip(self._rows.dtype.names or (), row, strict=True))

        def time(name: str) -> int:
            return fields[f"{name}_seconds"] * _NANOS + fields[f"{name}_nanos"]

        return Account(
            number=fields["account"],
            open_requests=fields["open_requests"],
            held=Balance(fields["held"], time("held")),
            reserved=Balance(fields["reserved"], time("reserved")),
            cached=Balance(fields["cached"], time("cached")),
            closed_held=time("closed"),
        )
