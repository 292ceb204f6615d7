"""What a caller may be."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum


class Role(Enum):
    """What a method asks of its caller, or what a caller has."""

    CLIENT = "client"
    # Looks at what is for operators, and changes nothing.
    VIEWER = "viewer"
    OPERATOR = "operator"
    # Needs no identity: probes and tools call it before they have one.
    ANYONE = "anyone"


# What a caller can be given. An operator may all that a viewer may; neither is a client by that.
GIVEN = (Role.CLIENT, Role.VIEWER, Role.OPERATOR)


def with_implied(roles: Iterable[Role]) -> frozenset[Role]:
    """These, and those that they include."""
    found = frozenset(roles)
    return found | {Role.VIEWER} if Role.OPERATOR in found else found
