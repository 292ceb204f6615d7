"""What can go wrong, sorted by who has to act on it.

Every exception that may reach a caller is declared here, carries its facts as numbers and field
paths (never a client's strings), and says what to change. `rpc.errors` maps each to one status.
"""

from __future__ import annotations

from dataclasses import dataclass


class ModelRefused(Exception):
    """The model cannot be served. The message is one sentence for the operator."""


class SettingRefused(Exception):
    """A setting cannot be used. The message is one sentence for the operator."""


@dataclass(frozen=True)
class FieldViolation:
    """One field of a request that breaks a limit.

    `field` is its path in the request, such as `stop.max_tokens`; `reason` quotes the value as a
    number, and the limit.
    """

    field: str
    reason: str


class InvalidRequest(Exception):
    """The caller has to change the request: one violation or more."""

    def __init__(self, *violations: FieldViolation) -> None:
        super().__init__("; ".join(f"{v.field}: {v.reason}" for v in violations))
        self.violations = violations
