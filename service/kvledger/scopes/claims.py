"""From what a request asks of the cache to the scopes that the core is told of.

A claim is checked when it is made and takes its numbers when the request enters; in between nothing
may be awaited, so that who has left a group meanwhile gets nothing of it. All of this belongs to
the event loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import structlog

from kvledger.errors import SharedScopeDenied
from kvledger.scopes.groups import Membership, ShareGroups
from kvledger.scopes.keys import KvIdentity, Owner, Scope, ScopeKeys, ScopeKind
from kvledger.scopes.prefix_scopes import NO_REUSE, PrefixScopes
from kvledger.scopes.public_prefixes import PublicPrefix, check_begins_with
from kvledger.scopes.table import ENTRIES_MAX, ScopeTable
from kvledger.tenants.tenant import Tenant

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class CacheWish:
    """What a validated request asks of the cache."""

    scope: Literal["tenant", "namespace", "none"] = "tenant"
    namespace: str = ""
    # A share group, or a public prefix; empty: none.
    shared_scope: str = ""
    # How many of the prompt's first tokens lie in it, and the field that says so.
    shared_tokens: int = 0
    count_field: str = "cache.shared_tokens"


class ScopeClaim:
    """The scopes of one request: named when it is checked, held while it is open."""

    def __init__(
        self,
        table: ScopeTable | None = None,
        own: Scope | None = None,
        shared: Scope | None = None,
        *,
        shared_tokens: int = 0,
        keeps: bool = False,
    ) -> None:
        """Without an `own` scope it reuses nothing and leaves nothing."""
        self._table = table
        self._own = own
        self._shared = shared if shared_tokens else None
        self._shared_tokens = shared_tokens
        self._keeps = keeps
        self._held: list[int] = []

    @property
    def shares_public(self) -> bool:
        """Whether what it shares is a public prefix, and not a group's."""
        return self._shared is not None and self._shared.kind is ScopeKind.PUBLIC

    def hold(self) -> PrefixScopes:
        """What the core is told; the numbers are this request's until `release`."""
        own = self._number(self._own)
        if own is None:
            return NO_REUSE
        shared = self._number(self._shared)
        return PrefixScopes(
            own=own,
            shared=shared,
            shared_tokens=self._shared_tokens if shared is not None else 0,
            # The operator alone writes what is public.
            writes_shared=shared is not None and not self.shares_public,
            keeps=self._keeps,
        )

    def release(self) -> None:
        """Once the core has ended the request; again, it does nothing."""
        held, self._held = self._held, []
        if self._table is not None:
            for number in held:
                self._table.release(number)

    def _number(self, scope: Scope | None) -> int | None:
        if scope is None or self._table is None:
            return None
        number = self._table.hold(scope)
        if number is not None:
            self._held.append(number)
        return number


# Of a request that reuses nothing; it holds nothing, so all may have the same.
NO_CLAIM = ScopeClaim()


@dataclass(frozen=True)
class StartJob:
    """A request that the server makes to itself when it starts: it computes a public prefix."""

    name: str
    prompt: npt.NDArray[np.int32]
    claim: ScopeClaim


class Scopes:
    """All scopes of a process: checks what requests name, and ends what may be used no more."""

    def __init__(
        self,
        kv: KvIdentity,
        purge: Callable[[Sequence[int]], None],
        public: Mapping[str, PublicPrefix] | None = None,
        *,
        reuses: bool = True,
        entries_max: int = ENTRIES_MAX,
    ) -> None:
        """`purge` is told the numbers of scopes that nobody may begin with any more.

        Unless it `reuses`, requests are checked alike and reuse nothing.
        """
        self._table = ScopeTable(ScopeKeys(kv), purge, entries_max)
        self._public = dict(public or {})
        self._groups = ShareGroups()
        self._reuses = reuses
        if reuses:
            # For good: what is pinned there must never be found unused, and purged.
            for prefix in self._public.values():
                self._table.hold(prefix.scope)

    def __len__(self) -> int:
        return len(self._table)

    def shared_owner(self, number: int) -> Owner | None:
        """Whose a shared scope is or was, by its number in the core."""
        return self._table.shared_owner(number)

    def claim(self, tenant: Tenant, wish: CacheWish, prompt: npt.NDArray[np.int32]) -> ScopeClaim:
        """What a request of `tenant` may begin with, to be held at once.

        Raises InvalidRequest if the prompt, int32 [tokens], does not begin with the public prefix
        that it names, and SharedScopeDenied if it names neither one nor a group of the tenant's.
        """
        shared = self._shared(tenant, wish, prompt)
        if not self._reuses or wish.scope == "none":
            return NO_CLAIM
        if wish.scope == "namespace":
            own = Scope.of_namespace(tenant.name, tenant.epoch, wish.namespace)
        else:
            own = Scope.of_tenant(tenant.name, tenant.epoch)
        return ScopeClaim(self._table, own, shared, shared_tokens=wish.shared_tokens)

    def start_jobs(self) -> list[StartJob]:
        """What to submit when the server starts, once, so that public prefixes are cached."""
        if not self._reuses:
            return []
        return [
            StartJob(
                prefix.name,
                prefix.tokens,
                ScopeClaim(self._table, prefix.scope, keeps=True),
            )
            for prefix in self._public.values()
        ]

    def change_members(self, new: Membership) -> None:
        """Takes in who there is from now on, at the start and whenever it changes.

        Scopes of tenants that are gone, or were made anew, and of groups whose members are others
        than before end at once. A group with the name of a public prefix cannot be reached.
        """
        for owner in self._groups.change(new):
            self._table.revoke(owner)
        hidden = len(self._public.keys() & set(new.groups))
        if hidden:
            _log.warning("groups_hidden", groups=hidden, meaning="a public prefix has their name")

    def _shared(
        self, tenant: Tenant, wish: CacheWish, prompt: npt.NDArray[np.int32]
    ) -> Scope | None:
        if not wish.shared_scope:
            return None
        prefix = self._public.get(wish.shared_scope)
        if prefix is not None:
            check_begins_with(prefix, prompt, wish.shared_tokens, wish.count_field)
            return prefix.scope
        generation = self._groups.generation(wish.shared_scope, tenant)
        if generation is None:
            raise SharedScopeDenied
        return Scope.of_group(wish.shared_scope, generation)
