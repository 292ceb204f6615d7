"""Which cached prefixes a request may begin with, and where its own are kept."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

# Scopes that several tenants may begin their prompts with have this bit, as in core/types.h.
SHARED_SCOPE = 1 << 31


@dataclass(frozen=True)
class PrefixScopes:
    """What the core is told of a request's scopes, by their numbers there.

    The first `shared_tokens` tokens lie in `shared`, what follows and all that is generated in
    `own`.
    """

    # None: nothing is looked up and nothing is kept.
    own: int | None = None
    shared: int | None = None
    shared_tokens: int = 0
    # Whether what is computed of the shared part is kept there, or only looked up.
    writes_shared: bool = False
    # Whether the blocks of its prompt stay pinned when it has ended, until the scope is purged.
    keeps: bool = False

    def without(self, ended: Collection[int]) -> PrefixScopes:
        """The same for a request that is here when these scopes end."""
        if self.own in ended:
            return NO_REUSE
        if self.shared is not None and self.shared in ended:
            return replace(self, shared=None, shared_tokens=0, writes_shared=False)
        return self


# A request that reuses nothing and leaves nothing.
NO_REUSE = PrefixScopes()
