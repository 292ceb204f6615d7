"""Numbers of scopes: keys of 256 bits here, numbers of 32 in the core.

A number is never used twice. The table is bounded: beyond its size, whoever has most unused scopes
loses the one that has gone unused for longest, so that a tenant with many namespaces drives out its
own; the core is told to purge what it has cached there. Scopes of open requests stay, and there are
at most two for each. One thread at a time.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from kvledger.scopes.keys import Owner, Scope, ScopeKeys
from kvledger.scopes.prefix_scopes import SHARED_SCOPE

_log = structlog.get_logger(__name__)

# Scopes that are known at once: a few hundred bytes each.
ENTRIES_MAX = 100_000
# Beyond that, this share of an owner's unused scopes goes at once, and no more than so many: who
# has most is looked for among all owners.
_DROPPED_SHARE = 16
_DROPPED_MAX = 64
# Numbers that there are on each side of SHARED_SCOPE.
NUMBERS_MAX = SHARED_SCOPE - 1


@dataclass(slots=True)
class _Entry:
    key: bytes
    number: int
    owner: Owner
    uses: int = 0
    is_revoked: bool = False


class ScopeTable:
    """Gives each scope a number for as long as somebody uses it, and mostly for longer."""

    def __init__(
        self,
        keys: ScopeKeys,
        purge: Callable[[Sequence[int]], None],
        entries_max: int = ENTRIES_MAX,
        numbers_max: int = NUMBERS_MAX,
    ) -> None:
        """`purge` is told the numbers of scopes that nobody can find any more."""
        self._keys = keys
        self._purge = purge
        self._entries_max = entries_max
        self._numbers_max = numbers_max
        self._by_key: dict[bytes, _Entry] = {}  # those that are not revoked
        self._by_number: dict[int, _Entry] = {}
        self._by_owner: dict[Owner, dict[int, None]] = {}  # those that are not revoked
        # Those that nobody uses, unused for longest first; of owners that have any.
        self._idle: dict[Owner, OrderedDict[int, None]] = {}
        self._given = {False: 0, True: 0}  # numbers ever given, by whether they are shared
        self._is_used_up = False
        # Whose the scopes are that were ever shared: the books keep their accounts.
        self._shared: dict[int, Owner] = {}

    def __len__(self) -> int:
        return len(self._by_number)

    def shared_owner(self, number: int) -> Owner | None:
        """Whose a shared scope is or was; None for a number that none has had."""
        return self._shared.get(number)

    @property
    def idle(self) -> int:
        """Scopes that no open request uses."""
        return sum(map(len, self._idle.values()))

    def hold(self, scope: Scope) -> int | None:
        """The scope's number, kept until `release`; None once all numbers have been used."""
        key = self._keys.key(scope)
        entry = self._by_key.get(key) or self._new(key, scope)
        if entry is None:
            return None
        entry.uses += 1
        self._end_idle(entry)
        self._make_room()
        return entry.number

    def release(self, number: int) -> None:
        """Ends one `hold`. KeyError for a number that nobody holds."""
        entry = self._by_number[number]
        if entry.uses < 1:
            raise KeyError(number)
        entry.uses -= 1
        if entry.uses:
            return
        if entry.is_revoked:
            # Requests that were open at the time may have left something since.
            del self._by_number[number]
            self._purge([number])
            return
        self._idle.setdefault(entry.owner, OrderedDict())[number] = None
        self._make_room()

    def revoke(self, owner: Owner) -> None:
        """Forgets all scopes of an owner: what comes with their keys gets other numbers.

        What is cached there is purged now, and once more when the last open request has ended.
        """
        numbers = list(self._by_owner.pop(owner, ()))
        self._idle.pop(owner, None)
        for number in numbers:
            entry = self._by_number[number]
            del self._by_key[entry.key]
            if entry.uses:
                entry.is_revoked = True
            else:
                del self._by_number[number]
        if numbers:
            self._purge(numbers)

    def _new(self, key: bytes, scope: Scope) -> _Entry | None:
        given, owner = self._given[scope.is_shared], scope.owner
        if given >= self._numbers_max:
            if not self._is_used_up:
                self._is_used_up = True
                _log.error("scopes_used_up", meaning="what is new reuses nothing: start again")
            return None
        self._given[scope.is_shared] = given + 1
        number = given + 1 | (SHARED_SCOPE if scope.is_shared else 0)
        entry = _Entry(key, number, owner)
        self._by_key[key] = self._by_number[number] = entry
        self._by_owner.setdefault(owner, {})[number] = None
        if scope.is_shared:
            self._shared[number] = owner
        return entry

    def _end_idle(self, entry: _Entry) -> None:
        idle = self._idle.get(entry.owner)
        if idle is not None and entry.number in idle:
            del idle[entry.number]
            if not idle:
                del self._idle[entry.owner]

    def _make_room(self) -> None:
        dropped: list[int] = []
        while len(self._by_number) > self._entries_max and self._idle:
            idle = max(self._idle.values(), key=len)
            share = min(_DROPPED_MAX, max(1, len(idle) // _DROPPED_SHARE))
            dropped += itertools.islice(idle, share)
            for number in dropped[-share:]:
                self._drop(self._by_number[number])
        if dropped:
            self._purge(dropped)

    def _drop(self, entry: _Entry) -> None:
        self._end_idle(entry)
        del self._by_number[entry.number]
        del self._by_key[entry.key]
        siblings = self._by_owner[entry.owner]
        del siblings[entry.number]
        if not siblings:
            del self._by_owner[entry.owner]
