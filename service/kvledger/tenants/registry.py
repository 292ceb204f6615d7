"""The tenants of this server, as its file says at this moment.

A snapshot never changes; when the file does, there is a new one, and whoever subscribed hears of
both. A file that cannot be used is told once per change, and what was good stays. Belongs to one
thread; a new snapshot is made on another, because for thousands of tenants that takes a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from kvledger.errors import SettingRefused
from kvledger.log import frames
from kvledger.tenants import tenants_file
from kvledger.tenants.roles import GIVEN, Role, with_implied
from kvledger.tenants.signed_tokens import Issuer
from kvledger.tenants.tenant import Tenant
from kvledger.tenants.tenants_file import TenantRow, TenantsFile, TenantsRefused

_log = structlog.get_logger(__name__)

# How often the files are looked at, in seconds. A revocation acts within this and the reading.
_INTERVAL = 0.5

# The one tenant of a server started with --dev, for callers without identity.
DEV_TENANT = Tenant(name=tenants_file.RESERVED_NAME, number=0)

# Kinds of faults that may pass while the files stay as they are: no descriptor was free, say.
_MAY_PASS = frozenset({"unreadable", "unexpected"})

_Stamp = tuple[tuple[int, ...] | None, ...]


@dataclass(frozen=True)
class Principal:
    """Somebody who can show who he is."""

    name: str
    epoch: int
    roles: frozenset[Role]
    # Whom he acts as by himself; None for a gateway, and for who is no client.
    tenant: Tenant | None
    # Of a gateway: the names of the tenants that it may act for.
    acts_for: frozenset[str] | None = None


# Who calls a server of --dev without identity.
DEVELOPER = Principal(DEV_TENANT.name, DEV_TENANT.epoch, frozenset(GIVEN), DEV_TENANT)


@dataclass(frozen=True)
class _Token:
    digest: bytes
    expires_at: float
    principal: Principal | None


# What a token that nobody has is compared with: finding nothing takes the same way.
_NOBODYS = _Token(bytes(32), math.inf, None)


@dataclass(frozen=True)
class Snapshot:
    """All that is known of tenants at one moment."""

    _tenants: Mapping[str, Tenant] = field(default_factory=dict)
    _groups: Mapping[str, frozenset[str]] = field(default_factory=dict)
    _principals: Mapping[str, Principal] = field(default_factory=dict)
    _tokens: Mapping[bytes, _Token] = field(default_factory=dict)
    _certificates: Mapping[str, Principal] = field(default_factory=dict)
    _issuer: Issuer | None = None

    def tenant(self, name: str) -> Tenant | None:
        """A tenant by name; None for whoever is served as none."""
        return self._tenants.get(name)

    def tenants(self) -> tuple[Tenant, ...]:
        """All of them."""
        return tuple(self._tenants.values())

    def members(self, group: str) -> frozenset[str]:
        """The names of a share group's tenants; empty for a group that is not there."""
        return self._groups.get(group, frozenset())

    def groups(self) -> tuple[str, ...]:
        """Names of the share groups."""
        return tuple(self._groups)

    def principals(self) -> tuple[Principal, ...]:
        """Everybody who can show who he is."""
        return tuple(self._principals.values())

    def principal(self, name: str) -> Principal | None:
        """Whoever has this name."""
        return self._principals.get(name)

    def by_token(self, digest: bytes) -> Principal | None:
        """Whose token has this digest; None if it is nobody's, or no longer good."""
        found = self._tokens.get(digest, _NOBODYS)
        same = hmac.compare_digest(digest, found.digest)
        good = time.time() < found.expires_at
        return found.principal if same & good else None

    def by_certificate(self, names: Iterable[str]) -> Principal | None:
        """Whose certificate has these names, such as dns:host; None for nobody, or for several."""
        found = {
            principal.name: principal
            for name in names
            if (principal := self._certificates.get(name)) is not None
        }
        return next(iter(found.values())) if len(found) == 1 else None

    def by_signed_token(self, token: bytes) -> tuple[Principal, str] | None:
        """Whom a signed token names, and by which key; None if it is not to be believed."""
        claim = self._issuer.claim(token) if self._issuer is not None else None
        if claim is None:
            return None
        principal = self.by_key(claim.key_id, claim.tenant)
        return None if principal is None else (principal, claim.key_id)

    def by_key(self, key_id: str, name: str) -> Principal | None:
        """Whom somebody is, of whom a key that is trusted said this name.

        An issuer speaks for tenants only, never for gateways, viewers or operators.
        """
        if self._issuer is None or not self._issuer.has_key(key_id):
            return None
        principal = self._principals.get(name)
        if principal is None or principal.tenant is None or principal.roles != {Role.CLIENT}:
            return None
        return principal

    @property
    def next_expiry(self) -> float:
        """When the first of the tokens ends that end by themselves, in seconds since 1970."""
        now = time.time()
        ends = (token.expires_at for token in self._tokens.values())
        return min((end for end in ends if end > now), default=math.inf)


Subscriber = Callable[[Snapshot, Snapshot], None]


class Registry:
    """Who the tenants are now, and a word to whom it concerns when that changes."""

    def __init__(
        self,
        path: Path | None,
        *,
        issuer_path: Path | None = None,
        dev: bool = False,
        on_kept: Callable[[], None] = lambda: None,
    ) -> None:
        """Reads the files; SettingRefused if they cannot be used. No `path` is no tenants.

        `dev` serves callers without identity. `on_kept` is called once for each change of the
        files that could not be used, and once more if the reason is of another kind then.
        """
        self._path, self._issuer_path = path, issuer_path
        self._on_kept = on_kept
        self.developer = DEVELOPER if dev else None
        # Whether there is anybody whom a credential could name.
        self.knows_callers = path is not None
        self._subscribers: list[Subscriber] = []
        # Raises SettingRefused if a new snapshot cannot be; then what was stays.
        self.check: Callable[[Snapshot], None] = lambda snapshot: None
        self._next_number = DEV_TENANT.number + 1
        # Of each name that ever was in `now`: its last epoch, and its number as a tenant then.
        self._epochs: dict[str, int] = {}
        self._numbers: dict[str, tuple[int, int]] = {}
        self._stamp = self._look()
        # Whether these files may be good in spite of what happened, and which faults were told.
        self._again = False
        self._told: set[str] = set()
        self.now = Snapshot()
        self._adopt(self._read())

    def tenant(self, name: str) -> Tenant | None:
        """A tenant by name; None for whoever is served as none."""
        return self.now.tenant(name)

    def tenants(self) -> tuple[Tenant, ...]:
        """All of them."""
        return self.now.tenants()

    def members(self, group: str) -> frozenset[str]:
        """The names of a share group's tenants; empty for a group that is not there."""
        return self.now.members(group)

    def subscribe(self, subscriber: Subscriber) -> None:
        """It is called after each change with what was and what is, in the order of subscribing.

        Also when a token has come to its end: then both have the same tenants.
        """
        self._subscribers.append(subscriber)

    async def watch(self) -> None:
        """Follows the files until it is cancelled."""
        while True:
            await asyncio.sleep(_INTERVAL)
            try:
                await self.refresh()
            except TenantsRefused as refused:
                self._kept(refused.kind, str(refused))
            except Exception as error:  # whatever it is, a revocation after it must still act
                self._kept("unexpected", f"{type(error).__name__} {frames(error.__traceback__)}")

    async def refresh(self) -> None:
        """Takes over files that changed; TenantsRefused, once per change, if they are no good.

        After a fault that may pass they are read again at every call, until they can be.
        """
        if time.time() >= self._next_expiry:  # not after reading, which may fail each time
            self._replace(self.now)
        stamp = self._look()
        if stamp == self._stamp and not self._again:
            return
        if stamp != self._stamp:
            self._told.clear()
        # Taken before reading: what changes meanwhile is seen the next time.
        self._stamp, self._again = stamp, True
        try:
            new = await asyncio.to_thread(self._read)
            self._check(new)
        except TenantsRefused as refused:
            self._again = refused.kind in _MAY_PASS
            raise
        self._again = False
        self._replace(new)
        _log.info("tenants_reloaded", tenants=len(self.tenants()))

    def _check(self, new: Snapshot) -> None:
        try:
            self.check(new)
        except SettingRefused as refused:
            raise TenantsRefused("not_valid", str(refused)) from None

    def _replace(self, new: Snapshot) -> None:
        old = self.now
        self._adopt(new)
        for subscriber in self._subscribers:
            _tell(subscriber, old, new)

    def _adopt(self, new: Snapshot) -> None:
        """Makes it what is now. Only of such a one are epochs and numbers remembered."""
        self.now = new
        self._next_expiry = new.next_expiry
        for principal in new.principals():
            self._epochs[principal.name] = principal.epoch
            if principal.tenant is not None:
                self._numbers[principal.name] = (principal.epoch, principal.tenant.number)

    def _kept(self, kind: str, reason: str) -> None:
        if kind in self._told:
            return
        self._told.add(kind)
        self._on_kept()
        _log.warning("tenants_kept", kind=kind, reason=reason)

    def _look(self) -> _Stamp:
        """What tells one state of the files from another without reading them."""
        stamps: list[tuple[int, ...] | None] = []
        for path in (self._path, self._issuer_path):
            found = None
            if path is not None:
                with contextlib.suppress(OSError, ValueError):
                    status = path.stat()
                    found = (
                        *(status.st_mtime_ns, status.st_ctime_ns, status.st_size),
                        *(status.st_ino, status.st_mode, status.st_uid),
                    )
            stamps.append(found)
        return tuple(stamps)

    def _read(self) -> Snapshot:
        """What the files hold. One at a time, on whatever thread: names get their numbers here."""
        tenants = {} if self.developer is None else {DEV_TENANT.name: DEV_TENANT}
        issuer = Issuer.read(self._issuer_path) if self._issuer_path is not None else None
        if self._path is None:
            return Snapshot(tenants)
        file = tenants_file.read(self._path)
        self._check_epochs(file)
        principals = {name: self._principal(name, row, file) for name, row in file.tenants.items()}
        tokens: dict[bytes, _Token] = {}
        certificates: dict[str, Principal] = {}
        for name, row in file.tenants.items():
            principal = principals[name]
            if principal.tenant is not None:
                tenants[name] = principal.tenant
            for token in row.tokens:
                digest = bytes.fromhex(token.sha256)
                ends = math.inf if token.expires_at is None else float(token.expires_at)
                tokens[digest] = _Token(digest, ends, principal)
            for certificate in row.certificates:
                certificates[certificate_name(certificate)] = principal
        groups = {name: frozenset(members) for name, members in file.groups.items()}
        return Snapshot(tenants, groups, principals, tokens, certificates, issuer)

    def _principal(self, name: str, row: TenantRow, file: TenantsFile) -> Principal:
        roles = with_implied(Role(role) for role in row.roles)
        acts_for = file.gateways.get(name)
        if acts_for is not None:
            return Principal(name, row.epoch, roles, None, frozenset(acts_for))
        if Role.CLIENT not in roles:
            return Principal(name, row.epoch, roles, None)
        number = self._number(name, row.epoch)
        tenant = Tenant(name, number, row.epoch, row.limits.limits())
        return Principal(name, row.epoch, roles, tenant)

    def _number(self, name: str, epoch: int) -> int:
        """The number of a tenant, given out once; one for a snapshot that is refused is lost."""
        known = self._numbers.get(name)
        if known is not None and known[0] == epoch:
            return known[1]
        number = self._next_number
        self._next_number += 1
        return number

    def _check_epochs(self, file: TenantsFile) -> None:
        """TenantsRefused if a name comes back as if it had never gone, or goes back in time."""
        for name, row in file.tenants.items():
            last = self._epochs.get(name, 0)
            is_there = self.now.principal(name) is not None
            if row.epoch < last or (row.epoch == last and not is_there):
                raise TenantsRefused(
                    "not_valid",
                    f"{self._path}: tenants.{name}.epoch: {row.epoch} was in use before; a tenant "
                    f"that is made anew needs {last + 1} or more",
                )


def _tell(subscriber: Subscriber, old: Snapshot, new: Snapshot) -> None:
    try:
        subscriber(old, new)
    except Exception as error:  # one must not keep the others from hearing
        _log.error(
            "tenants_subscriber_failed",
            error=type(error).__name__,
            traceback=frames(error.__traceback__),
        )


def certificate_name(name: str) -> str:
    """A name of a certificate as it is looked up: those of hosts have no case."""
    return name.lower() if name.startswith("dns:") else name
