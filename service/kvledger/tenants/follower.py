"""Tells the door, the scopes and the core who the tenants are, now and whenever that changes."""

from __future__ import annotations

from kvledger.admission import Admission
from kvledger.scopes.claims import Scopes
from kvledger.scopes.groups import MembershipList
from kvledger.tenants.registry import Registry, Snapshot


class TenantsFollower:
    """Belongs to the event loop's thread."""

    def __init__(self, registry: Registry, admission: Admission, scopes: Scopes) -> None:
        self._registry = registry
        self._admission = admission
        self._scopes = scopes

    def start(self) -> None:
        """Raises SettingRefused if the tenants' shares of the pool cannot be."""
        self._apply(self._registry.now)
        self._registry.check = self._check
        self._registry.subscribe(self._change)

    def _check(self, new: Snapshot) -> None:
        self._admission.check_tenants(new.tenants())

    def _change(self, old: Snapshot, new: Snapshot) -> None:
        if new is not old:  # only a token's time has come
            self._apply(new)

    def _apply(self, now: Snapshot) -> None:
        self._admission.set_tenants(now.tenants())
        self._scopes.change_members(
            MembershipList(
                epochs={tenant.name: tenant.epoch for tenant in now.tenants()},
                groups={group: now.members(group) for group in now.groups()},
            )
        )
