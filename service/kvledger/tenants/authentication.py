"""From what a caller shows to who it is: credentials in, an identity out, or a refusal.

Nothing that a caller merely says makes it a tenant. The one exception is a gateway, which has shown
who it is over a way that nobody else can use, and names one of the tenants on its list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import NamedTuple

from kvledger.errors import ActingRefused, NotAuthenticated, RoleMissing
from kvledger.tenants.registry import Principal, Registry, Snapshot, certificate_name
from kvledger.tenants.roles import Role
from kvledger.tenants.tenant import Tenant
from kvledger.tenants.tokens import PREFIX, bearer, digest

# Metadata that names a credential, and the tenant that a gateway acts for.
AUTHORIZATION = "authorization"
TENANT_ID = "x-tenant-id"

_PREFIX = PREFIX.encode("ascii")


class Transport(Enum):
    """How callers reach a listener."""

    PLAIN = "plain"
    TLS = "tls"
    MUTUAL_TLS = "mutual_tls"
    UNIX = "unix"


# Where a gateway is believed: nobody else can be on the line, or use what it has shown.
_GATEWAYS_ON = (Transport.MUTUAL_TLS, Transport.UNIX)

# Looks again, in a later snapshot, for whom the same credential names.
_Again = Callable[[Snapshot], Principal | None]


class Identity(NamedTuple):
    """Who calls, as which tenant, and whether that is still so."""

    principal: Principal
    # What the method that it calls asks for.
    role: Role
    # Whom it acts as; None for who is no client.
    tenant: Tenant | None
    again: _Again

    def holds_in(self, snapshot: Snapshot) -> bool:
        """Whether the same credential makes the same caller in a later snapshot."""
        found, before = self.again(snapshot), self.principal
        if found is None or (found.name, found.epoch) != (before.name, before.epoch):
            return False
        if self.role not in found.roles or (found.acts_for is None) != (before.acts_for is None):
            return False
        if self.tenant is None or found is before:
            return True
        if found.acts_for is None:
            return found.tenant is not None
        now = snapshot.tenant(self.tenant.name) if self.tenant.name in found.acts_for else None
        return now is not None and now.epoch == self.tenant.epoch


class Authenticator:
    """Says who callers of one listener are. Belongs to the event loop's thread."""

    def __init__(self, registry: Registry, transport: Transport) -> None:
        self._registry = registry
        self._transport = transport

    def identify(
        self,
        role: Role,
        metadata: Iterable[tuple[str, str | bytes]],
        certificate: Callable[[], Iterable[str]],
    ) -> Identity:
        """Who calls a method that asks for this role.

        `certificate` gives the names in the certificate that the caller showed, such as dns:host;
        it is asked only where callers have one. Raises NotAuthenticated, RoleMissing or
        ActingRefused.
        """
        credentials, named = [], []
        for key, value in metadata:
            if key == AUTHORIZATION:
                credentials.append(value)
            elif key == TENANT_ID:
                named.append(value)
        principal, again = self._principal(credentials, certificate)
        if role not in principal.roles:
            raise RoleMissing(role.value)
        return Identity(principal, role, self._acting_as(principal, role, named), again)

    def _principal(
        self, credentials: list[str | bytes], certificate: Callable[[], Iterable[str]]
    ) -> tuple[Principal, _Again]:
        registry = self._registry
        developer = registry.developer
        if not registry.knows_callers and developer is not None:
            return developer, lambda snapshot: developer
        found: tuple[Principal | None, _Again] | None = None
        if self._transport is Transport.MUTUAL_TLS:
            names = frozenset(map(certificate_name, certificate()))
            if (by_names := registry.now.by_certificate(names)) is not None:
                found = by_names, lambda snapshot: snapshot.by_certificate(names)
        if credentials:
            shown = self._by_header(credentials)
            # Who shows two things that are not one and the same may have borrowed one of them.
            if found is not None and found[0] is not shown[0]:
                raise NotAuthenticated
            found = shown
        if found is None and developer is not None:
            return developer, lambda snapshot: developer
        if found is None or found[0] is None:
            raise NotAuthenticated
        return found[0], found[1]

    def _by_header(self, credentials: list[str | bytes]) -> tuple[Principal | None, _Again]:
        token = bearer(credentials[0]) if len(credentials) == 1 else None
        if token is None:
            raise NotAuthenticated
        now = self._registry.now
        if not token.startswith(_PREFIX):
            signed = now.by_signed_token(token)
            if signed is None:
                raise NotAuthenticated
            principal, key_id = signed
            name = principal.name
            return principal, lambda snapshot: snapshot.by_key(key_id, name)
        key = digest(token)
        return now.by_token(key), lambda snapshot: snapshot.by_token(key)

    def _acting_as(
        self, principal: Principal, role: Role, named: list[str | bytes]
    ) -> Tenant | None:
        if principal.acts_for is None:
            if named:
                raise ActingRefused("only a gateway may send it; leave it out")
            return principal.tenant if role is Role.CLIENT else None
        if self._transport not in _GATEWAYS_ON:
            raise ActingRefused("a gateway is believed over mutual TLS or a unix socket only")
        if len(named) != 1:
            raise ActingRefused(f"a gateway sends it exactly once; it came {len(named)} times")
        (name,) = named
        tenant = None
        if isinstance(name, str) and name in principal.acts_for:
            tenant = self._registry.tenant(name)
        if tenant is None:
            raise ActingRefused("it names no tenant that this gateway may act for")
        return tenant
