"""The single table from exceptions to gRPC statuses with google.rpc details.

Whatever is not in the table is our mistake: INTERNAL, with nothing of the exception in it; the log
has the rest under the id that the client is told.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
import structlog
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from kvledger.errors import (
    ActingRefused,
    BooksUnavailable,
    ConstraintDeadEnd,
    ConstraintsFull,
    ConstraintsUnavailable,
    ConstraintTooCostly,
    CredentialRevoked,
    InvalidRequest,
    ModelUnknown,
    NotAuthenticated,
    QueuedTokensFull,
    QueueFull,
    QueueTimeout,
    ReaderStalled,
    RequestFailed,
    RequestUnknown,
    RoleMissing,
    ServerDraining,
    SharedScopeDenied,
    TenantClosed,
    TenantLimitReached,
    TenantUnknown,
)
from kvledger.log import frames

_log = structlog.get_logger(__name__)

# ErrorInfo.domain of every refusal.
DOMAIN = "kvledger.v1"

Metadata = tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True)
class _Row:
    """How one kind of exception looks from outside."""

    code: grpc.StatusCode
    reason: str
    details: Callable[[Any], list[Message]] = lambda error: []
    retry_seconds: Callable[[Any], float] | None = None
    # ErrorInfo.metadata: facts for programs.
    facts: Callable[[Any], dict[str, str]] = lambda error: {}


def _field_violations(error: InvalidRequest) -> list[Message]:
    return [
        error_details_pb2.BadRequest(
            field_violations=[
                error_details_pb2.BadRequest.FieldViolation(
                    field=violation.field, description=violation.reason
                )
                for violation in error.violations
            ]
        )
    ]


def _quota_failure(description: str, subject: str = "server") -> list[Message]:
    violation = error_details_pb2.QuotaFailure.Violation(subject=subject, description=description)
    return [error_details_pb2.QuotaFailure(violations=[violation])]


def _request_info(error: RequestFailed) -> list[Message]:
    return [error_details_pb2.RequestInfo(request_id=error.request_id)]


# Why there is no room, as far as a tenant may know: what it is allowed itself, or what all share.
_OWN_LIMIT = {"cause": "OWN_LIMIT"}
_SHARED_CAPACITY = {"cause": "SHARED_CAPACITY"}


def _cause(error: QueueFull | QueueTimeout) -> dict[str, str]:
    return _OWN_LIMIT if error.own else _SHARED_CAPACITY


_TABLE: dict[type, _Row] = {
    InvalidRequest: _Row(grpc.StatusCode.INVALID_ARGUMENT, "FIELD_INVALID", _field_violations),
    ConstraintDeadEnd: _Row(
        grpc.StatusCode.INVALID_ARGUMENT, "CONSTRAINT_DEAD_END", _field_violations
    ),
    ConstraintTooCostly: _Row(
        grpc.StatusCode.INVALID_ARGUMENT, "CONSTRAINT_TOO_COSTLY", _field_violations
    ),
    ModelUnknown: _Row(grpc.StatusCode.NOT_FOUND, "MODEL_UNKNOWN"),
    SharedScopeDenied: _Row(grpc.StatusCode.PERMISSION_DENIED, "SHARED_SCOPE_DENIED"),
    QueueFull: _Row(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "QUEUE_FULL",
        lambda error: _quota_failure(f"{error.queued} requests are waiting"),
        lambda error: error.retry_after_seconds,
        _cause,
    ),
    QueuedTokensFull: _Row(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "QUEUE_FULL",
        lambda error: _quota_failure(f"at most {error.tokens_max} prompt tokens wait"),
        lambda error: error.retry_after_seconds,
        lambda error: _SHARED_CAPACITY,
    ),
    TenantLimitReached: _Row(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "TENANT_LIMIT",
        lambda error: _quota_failure(
            f"{error.limit} {error.value:.12g}: {error.state}", error.tenant
        ),
        lambda error: error.retry_after_seconds,
        lambda error: {**_OWN_LIMIT, "limit": error.limit, "value": f"{error.value:.12g}"},
    ),
    TenantUnknown: _Row(grpc.StatusCode.NOT_FOUND, "TENANT_UNKNOWN"),
    RequestUnknown: _Row(grpc.StatusCode.NOT_FOUND, "REQUEST_UNKNOWN"),
    BooksUnavailable: _Row(
        grpc.StatusCode.UNAVAILABLE,
        "BOOKS_UNAVAILABLE",
        retry_seconds=lambda error: error.retry_after_seconds,
    ),
    TenantClosed: _Row(grpc.StatusCode.PERMISSION_DENIED, "TENANT_CLOSED"),
    ConstraintsUnavailable: _Row(grpc.StatusCode.FAILED_PRECONDITION, "CONSTRAINTS_UNAVAILABLE"),
    ConstraintsFull: _Row(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "CONSTRAINTS_FULL",
        lambda error: _quota_failure(f"constraints hold at most {error.bytes_max} bytes"),
        lambda error: error.retry_after_seconds,
        lambda error: _SHARED_CAPACITY,
    ),
    QueueTimeout: _Row(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "QUEUE_TIMEOUT",
        lambda error: _quota_failure(f"no room within {error.waited_seconds:.3f} s"),
        lambda error: error.retry_after_seconds,
        _cause,
    ),
    ReaderStalled: _Row(grpc.StatusCode.ABORTED, "READER_STALLED"),
    ServerDraining: _Row(
        grpc.StatusCode.UNAVAILABLE,
        "DRAINING",
        retry_seconds=lambda error: error.retry_after_seconds,
    ),
    RequestFailed: _Row(grpc.StatusCode.INTERNAL, "REQUEST_FAILED", _request_info),
    NotAuthenticated: _Row(grpc.StatusCode.UNAUTHENTICATED, "CREDENTIAL_INVALID"),
    CredentialRevoked: _Row(grpc.StatusCode.UNAUTHENTICATED, "CREDENTIAL_REVOKED"),
    RoleMissing: _Row(grpc.StatusCode.PERMISSION_DENIED, "ROLE_MISSING"),
    ActingRefused: _Row(grpc.StatusCode.PERMISSION_DENIED, "TENANT_NOT_ALLOWED"),
}


async def abort(
    context: grpc.aio.ServicerContext[Any, Any], error: Exception, metadata: Metadata = ()
) -> NoReturn:
    """Ends a call with the status of an exception, and the given trailing metadata."""
    row = _row_of(error)
    if row is None:
        incident = secrets.token_hex(8)
        # The text of an exception that nobody thought of may quote the client.
        _log.error(
            "unexpected_error",
            incident=incident,
            error=type(error).__name__,
            traceback=frames(error.__traceback__),
        )
        error = RequestFailed(incident)
        row = _TABLE[RequestFailed]
    info = error_details_pb2.ErrorInfo(reason=row.reason, domain=DOMAIN, metadata=row.facts(error))
    details = [info, *row.details(error)]
    if row.retry_seconds is not None:
        seconds = row.retry_seconds(error)
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(seconds * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
        # Stock gRPC clients wait as long as this says before they try again.
        metadata += (("grpc-retry-pushback-ms", str(round(seconds * 1000))),)
    status = status_pb2.Status(code=row.code.value[0], message=str(error))
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    metadata += (("grpc-status-details-bin", status.SerializeToString()),)
    await context.abort(row.code, str(error), trailing_metadata=metadata)
    raise AssertionError("abort() always raises")


def _row_of(error: Exception) -> _Row | None:
    """The row of an exception's class, or of the nearest class that it is derived from."""
    return next((_TABLE[kind] for kind in type(error).__mro__ if kind in _TABLE), None)
