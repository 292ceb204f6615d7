"""What can go wrong, sorted by who has to act on it.

Every exception that may reach a caller is declared here, carries its facts as numbers and field
paths (never a client's strings), and says what to change. `rpc.errors` maps each to one status.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class ModelRefused(Exception):
    """The model cannot be served. The message is one sentence for the operator."""


class SettingRefused(Exception):
    """A setting cannot be used. The message is one sentence for the operator."""


class DeviceLost(Exception):
    """A device that computes no more in this process, whatever is asked of it.

    Operations raise it where an error is of the kind that stays: no later step can succeed, so the
    process ends. The message is one sentence for the operator.
    """


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
        self.violations: Sequence[FieldViolation] = violations


class ConstraintDeadEnd(InvalidRequest):
    """Under the request's own constraint no token can follow what there is, and it may not end."""

    def __init__(self, field: str, tokens: int) -> None:
        """`field` is the constraint's path, `tokens` the length of the output."""
        reason = (
            f"leaves no token that could follow the first {tokens} of the output; change it so "
            f"that whatever it lets begin can also end"
        )
        super().__init__(FieldViolation(field, reason))


class ConstraintTooCostly(InvalidRequest):
    """Following the request's own constraint takes more than one request may take."""

    def __init__(self, field: str, tokens: int) -> None:
        """`field` is the constraint's path, `tokens` the length of the output."""
        reason = (
            f"takes too much work after {tokens} tokens of the output; make it smaller, or bound "
            f"fewer things in it"
        )
        super().__init__(FieldViolation(field, reason))


class ModelUnknown(Exception):
    """The request names a model that this server does not run."""

    def __init__(self) -> None:
        super().__init__("model: not served here; ListModels names the one that is")


class SharedScopeDenied(Exception):
    """The request names a scope that its tenant does not share, or that there is not.

    The two are not told apart: who is in which group is nobody else's business.
    """

    def __init__(self) -> None:
        super().__init__(
            "cache.shared_scope: neither a public prefix nor a share group of this tenant; "
            "leave it out, or ask the operator"
        )


class QueueFull(Exception):
    """As many requests wait as may; the caller can come back.

    `own`: as many of the caller's own as may, whatever others do.
    """

    def __init__(self, queued: int, retry_after_seconds: float, own: bool = False) -> None:
        super().__init__(f"{queued} requests are waiting, as many as may; try again later")
        self.queued = queued
        self.own = own
        self.retry_after_seconds = retry_after_seconds


class QueuedTokensFull(Exception):
    """As many prompt tokens wait as may, over all tenants; the caller can come back."""

    def __init__(self, tokens_max: int, retry_after_seconds: float) -> None:
        super().__init__(
            f"prompts that wait would have more than {tokens_max} tokens, as many as may; try "
            f"again later"
        )
        self.tokens_max = tokens_max
        self.retry_after_seconds = retry_after_seconds


class TenantLimitReached(Exception):
    """The caller's tenant uses as much as it may; the caller can come back.

    `limit` is the limit's name and `value` what it is set to; `state` says what is used of it.
    """

    def __init__(
        self, tenant: str, limit: str, value: float, state: str, retry_after_seconds: float
    ) -> None:
        super().__init__(f"{limit} of the tenant is {value:.12g}: {state}; try again later")
        self.tenant = tenant
        self.limit = limit
        self.value = value
        self.state = state
        self.retry_after_seconds = retry_after_seconds


class TenantClosed(Exception):
    """The caller's tenant was taken from the table after the caller was let in."""

    def __init__(self) -> None:
        super().__init__("the tenant is not served here any more; ask the server's operator")


class ConstraintsUnavailable(Exception):
    """The request has a constraint, and this server can follow none."""

    def __init__(self, why: str) -> None:
        super().__init__(f"constraint: this server follows none: {why}")


class ConstraintsFull(Exception):
    """The constraints of open requests have all the memory that they may have."""

    def __init__(self, bytes_max: int, retry_after_seconds: float) -> None:
        super().__init__(
            f"constraints of open requests would hold more than {bytes_max} bytes, as many as "
            f"may; try again later"
        )
        self.bytes_max = bytes_max
        self.retry_after_seconds = retry_after_seconds


class QueueTimeout(Exception):
    """The request's own limit on waiting passed before there was room.

    `own`: it waited for others of its tenant to end.
    """

    def __init__(
        self, waited_seconds: float, retry_after_seconds: float, own: bool = False
    ) -> None:
        super().__init__(f"no room within queue_timeout ({waited_seconds:.3f} s); try again later")
        self.waited_seconds = waited_seconds
        self.own = own
        self.retry_after_seconds = retry_after_seconds


class ReaderStalled(Exception):
    """The caller took none of its tokens for too long."""

    def __init__(self, stalled_seconds: float) -> None:
        super().__init__(
            f"tokens were left unread for {stalled_seconds:g} s; read the stream as it comes"
        )


class BooksUnavailable(Exception):
    """The engine, which alone can read the books, does not answer."""

    def __init__(self, why: str, retry_after_seconds: float = 1.0) -> None:
        super().__init__(
            f"the engine does not answer: {why}; ask again, or see the server's health"
        )
        self.retry_after_seconds = retry_after_seconds


class TenantUnknown(Exception):
    """The request names a tenant that there is not, or that its caller may not ask about.

    The two are not told apart: who else is served is nobody's business.
    """

    def __init__(self) -> None:
        super().__init__(
            "tenant: none of this name that this caller may ask about; clients leave it out"
        )


class RequestUnknown(Exception):
    """No request of this id is kept, or it is not its caller's to ask about; not told apart."""

    def __init__(self) -> None:
        super().__init__(
            "request_id: no request of this id that has ended and that this caller may ask about; "
            "the last 1,000 of a tenant are kept, and 20,000 of all"
        )


class ServerDraining(Exception):
    """The server finishes what it has and takes nothing new."""

    # Another server answers at once; one that starts again takes seconds.
    def __init__(self, retry_after_seconds: float = 1.0) -> None:
        super().__init__("the server is shutting down; try another one or come back")
        self.retry_after_seconds = retry_after_seconds


class RequestFailed(Exception):
    """Something inside the server failed while it served this request."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"the request failed inside the server; quote id {request_id}")
        self.request_id = request_id


class NotAuthenticated(Exception):
    """The caller has not shown who it is; what exactly is wrong with what it showed is not said."""

    def __init__(self) -> None:
        super().__init__(
            "authorization: no valid credential; send one Bearer token that is good now, or use a "
            "client certificate that the operator has entered for you, not two that differ"
        )


class CredentialRevoked(Exception):
    """What the caller has shown when it called is good no longer."""

    def __init__(self) -> None:
        super().__init__(
            "authorization: the credential of this call is no longer valid; get another one"
        )


class RoleMissing(Exception):
    """The caller is known, and may not call this method."""

    def __init__(self, role: str) -> None:
        super().__init__(
            f"this method is for callers with the role {role}; ask the operator for a credential "
            f"that has it"
        )


class ActingRefused(Exception):
    """The caller names a tenant that it may not name, or not in this way, or none where it must."""

    def __init__(self, why: str) -> None:
        super().__init__(f"x-tenant-id: {why}")
