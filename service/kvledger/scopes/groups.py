"""Share groups: who may share beginnings with whom, as of now.

A group's scope belongs to one list of members. Whenever the list changes, by who joins, leaves, is
removed or is made anew, the group gets a new generation and with it a new scope: nobody begins with
what was written before, and who has left finds nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from kvledger.scopes.keys import Owner, group_owner, tenant_owner
from kvledger.tenants.tenant import Tenant


class Membership(Protocol):
    """Who there is, and which groups they are in, at one moment."""

    @property
    def epochs(self) -> Mapping[str, int]:
        """Of every tenant, by its name."""

    @property
    def groups(self) -> Mapping[str, Collection[str]]:
        """Names of tenants, by the group's; a name that no tenant has counts for nothing."""


@dataclass(frozen=True)
class MembershipList:
    """A Membership that is written down."""

    epochs: Mapping[str, int] = field(default_factory=dict)
    groups: Mapping[str, Collection[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Group:
    members: frozenset[tuple[str, int]]  # name and epoch
    generation: int


class ShareGroups:
    """The groups as of the last change. One thread at a time."""

    def __init__(self) -> None:
        self._epochs: dict[str, int] = {}
        self._groups: dict[str, _Group] = {}
        self._generations = 0  # ever given, to any group

    def generation(self, group: str, tenant: Tenant) -> int | None:
        """The group's generation if the tenant is in it now; None if not, or if there is none."""
        found = self._groups.get(group)
        if found is None or (tenant.name, tenant.epoch) not in found.members:
            return None
        return found.generation

    def change(self, new: Membership) -> list[Owner]:
        """Takes in who there is from now on; whose scopes end by it: tenants and groups."""
        epochs = dict(new.epochs)
        ended = [
            tenant_owner(name, epoch)
            for name, epoch in self._epochs.items()
            if epochs.get(name) != epoch
        ]
        groups: dict[str, _Group] = {}
        for name, listed in new.groups.items():
            members = frozenset((each, epochs[each]) for each in listed if each in epochs)
            known = self._groups.get(name)
            if known is not None and known.members == members:
                groups[name] = known
            else:
                self._generations += 1
                groups[name] = _Group(members, self._generations)
        ended += [
            group_owner(name, group.generation)
            for name, group in self._groups.items()
            if groups.get(name) is not group
        ]
        self._epochs, self._groups = epochs, groups
        return ended
