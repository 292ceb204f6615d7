"""Scopes: who may begin a prompt with the blocks that others left."""

from __future__ import annotations

from kvledger.scopes.prefix_scopes import NO_REUSE, SHARED_SCOPE, PrefixScopes

__all__ = ["NO_REUSE", "SHARED_SCOPE", "PrefixScopes"]
