"""Scopes by what they are, and their keys: 256 bits that name a scope and that nobody can guess.

A key is a keyed BLAKE2b over typed, length-prefixed parts, so two different lists of parts never
make the same bytes: neither ("ab", "c") and ("a", "bc"), nor "7" and 7, nor "" and nothing. All
that keys and values depend on is in it, and what a client chooses has a place of its own.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

# Bytes of the server's secret, and of a key.
SECRET_BYTES = KEY_BYTES = 32
# Tells these hashes from any other use of a secret. BLAKE2b takes 16 bytes.
_DOMAIN = b"kvledger scope 1"
_LENGTH_BYTES = 8

Part: TypeAlias = str | int | bytes | None


class ScopeKind(Enum):
    """Who is in a scope."""

    TENANT = "tenant"
    NAMESPACE = "namespace"
    GROUP = "group"
    PUBLIC = "public"


@dataclass(frozen=True)
class Owner:
    """What scopes are revoked by, all at once: a tenant of one epoch, a group of one generation.

    `age` is the epoch or the generation; of a public prefix, which does not end, it is 0.
    """

    kind: ScopeKind
    name: str
    age: int


@dataclass(frozen=True)
class Scope:
    """One scope, by what it is."""

    kind: ScopeKind
    owner: Owner
    # What tells it from the other scopes of its owner.
    detail: str | bytes | None = None

    @property
    def is_shared(self) -> bool:
        """Whether several tenants may begin their prompts with it."""
        return self.kind in (ScopeKind.GROUP, ScopeKind.PUBLIC)

    @classmethod
    def of_tenant(cls, tenant: str, epoch: int) -> Scope:
        """All of a tenant's requests that name no other."""
        return cls(ScopeKind.TENANT, tenant_owner(tenant, epoch))

    @classmethod
    def of_namespace(cls, tenant: str, epoch: int, namespace: str) -> Scope:
        """A tenant's requests that name the same namespace."""
        return cls(ScopeKind.NAMESPACE, tenant_owner(tenant, epoch), namespace)

    @classmethod
    def of_group(cls, group: str, generation: int) -> Scope:
        """A share group for as long as its members stay the same."""
        return cls(ScopeKind.GROUP, group_owner(group, generation))

    @classmethod
    def of_public(cls, name: str, digest: bytes) -> Scope:
        """A public prefix; `digest` is that of its text and of the form it is written in."""
        return cls(ScopeKind.PUBLIC, Owner(ScopeKind.PUBLIC, name, 0), digest)


def tenant_owner(tenant: str, epoch: int) -> Owner:
    """Of a tenant's scope and of its namespaces."""
    return Owner(ScopeKind.TENANT, tenant, epoch)


def group_owner(group: str, generation: int) -> Owner:
    """Of a group's scope."""
    return Owner(ScopeKind.GROUP, group, generation)


@dataclass(frozen=True)
class KvIdentity:
    """All that keys and values depend on besides their tokens."""

    # SHA-256 of the weights.
    model: str
    # Sizes, rotary embedding and what else the model is computed by.
    config: str
    kv_format: str
    adapter: str | None = None


class ScopeKeys:
    """Makes the keys of one process."""

    def __init__(self, kv: KvIdentity, secret: bytes | None = None) -> None:
        """`secret` has 32 bytes; without one it is drawn. ValueError for another length."""
        self._kv = kv
        self._secret = secrets.token_bytes(SECRET_BYTES) if secret is None else secret
        if len(self._secret) != SECRET_BYTES:
            raise ValueError(f"a secret has {SECRET_BYTES} bytes, not {len(self._secret)}")

    def key(self, scope: Scope) -> bytes:
        """32 bytes."""
        kv, owner = self._kv, scope.owner
        parts = (
            *(scope.kind.value, owner.kind.value, owner.name, owner.age, scope.detail),
            *(kv.model, kv.config, kv.kv_format, kv.adapter),
        )
        return hashlib.blake2b(
            encoded(parts), digest_size=KEY_BYTES, key=self._secret, person=_DOMAIN
        ).digest()


def encoded(parts: Iterable[Part]) -> bytes:
    """The parts as bytes, each with its type and its length before it. TypeError for others."""
    made = bytearray()
    for part in parts:
        kind, body = _typed(part)
        made += kind + len(body).to_bytes(_LENGTH_BYTES, "little") + body
    return bytes(made)


def _typed(part: Part) -> tuple[bytes, bytes]:
    if isinstance(part, str):
        return b"s", part.encode("utf-8", "surrogatepass")
    if isinstance(part, bytes):
        return b"b", part
    if part is None:
        return b"n", b""
    if type(part) is int:
        return b"i", part.to_bytes(part.bit_length() // 8 + 1, "little", signed=True)
    raise TypeError(f"a part of a key is no {type(part).__name__}")
