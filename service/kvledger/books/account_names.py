"""Names for the numbers that the books know tenants and shared scopes by.

Only names that an operator gave: of tenants, share groups and public prefixes. The books keep an
account for good, so a name is kept for as long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvledger.scopes.keys import Owner
from kvledger.tenants.registry import Registry, Snapshot


class AccountNames:
    """Belongs to the event loop's thread."""

    def __init__(
        self,
        registry: Registry,
        shared_owner: Callable[[int], Owner | None],
        own: Mapping[int, str],
    ) -> None:
        """`shared_owner` says whose a shared scope is; `own` are the server's own tenants."""
        self._shared_owner = shared_owner
        self._names = dict(own)
        self._numbers = {name: number for number, name in own.items()}
        self._served: frozenset[int] = frozenset()
        self._note(registry.now)
        registry.subscribe(lambda old, new: self._note(new))

    def of_tenant(self, number: int) -> str:
        """A tenant's name."""
        return self._names.get(number, "(unknown)")

    def number_of(self, name: str) -> int | None:
        """The number of the last tenant of this name; None if there never was one."""
        return self._numbers.get(name)

    def is_served(self, number: int) -> bool:
        """Whether a tenant may call."""
        return number in self._served

    def of_scope(self, number: int) -> Owner | None:
        """Whose a shared scope is."""
        return self._shared_owner(number)

    def _note(self, now: Snapshot) -> None:
        tenants = {tenant.number: tenant.name for tenant in now.tenants()}
        self._served = frozenset(tenants)
        self._names.update(tenants)
        self._numbers.update((name, number) for number, name in tenants.items())
