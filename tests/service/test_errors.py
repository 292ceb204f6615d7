"""The table from exceptions to statuses: complete, decodable, and silent about the unexpected."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from structlog.testing import CapturingLogger

from kvledger import errors
from kvledger.errors import (
    ActingRefused,
    BooksUnavailable,
    ConstraintDeadEnd,
    ConstraintsFull,
    ConstraintsUnavailable,
    ConstraintTooCostly,
    CredentialRevoked,
    DeviceLost,
    FieldViolation,
    InvalidRequest,
    ModelRefused,
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
    SettingRefused,
    SharedScopeDenied,
    TenantClosed,
    TenantLimitReached,
    TenantUnknown,
)
from kvledger.rpc import errors as table
from kvledger.rpc.errors import DOMAIN, Metadata, abort

CANARY = "the prompt of a client"

# One of each that can reach a client, with the code and reason that the contract promises.
EXAMPLES: dict[type, tuple[Exception, grpc.StatusCode, str]] = {
    InvalidRequest: (
        InvalidRequest(FieldViolation("stop.max_tokens", "0"), FieldViolation("priority", "11")),
        grpc.StatusCode.INVALID_ARGUMENT,
        "FIELD_INVALID",
    ),
    ConstraintDeadEnd: (
        ConstraintDeadEnd("constraint.regex", 3),
        grpc.StatusCode.INVALID_ARGUMENT,
        "CONSTRAINT_DEAD_END",
    ),
    ConstraintTooCostly: (
        ConstraintTooCostly("constraint.regex", 3),
        grpc.StatusCode.INVALID_ARGUMENT,
        "CONSTRAINT_TOO_COSTLY",
    ),
    ConstraintsUnavailable: (
        ConstraintsUnavailable("it has none"),
        grpc.StatusCode.FAILED_PRECONDITION,
        "CONSTRAINTS_UNAVAILABLE",
    ),
    ConstraintsFull: (
        ConstraintsFull(4096, 1.5),
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "CONSTRAINTS_FULL",
    ),
    RequestUnknown: (RequestUnknown(), grpc.StatusCode.NOT_FOUND, "REQUEST_UNKNOWN"),
    TenantUnknown: (TenantUnknown(), grpc.StatusCode.NOT_FOUND, "TENANT_UNKNOWN"),
    BooksUnavailable: (
        BooksUnavailable("its loop has ended"),
        grpc.StatusCode.UNAVAILABLE,
        "BOOKS_UNAVAILABLE",
    ),
    ModelUnknown: (ModelUnknown(), grpc.StatusCode.NOT_FOUND, "MODEL_UNKNOWN"),
    SharedScopeDenied: (
        SharedScopeDenied(),
        grpc.StatusCode.PERMISSION_DENIED,
        "SHARED_SCOPE_DENIED",
    ),
    QueueFull: (QueueFull(256, 1.5), grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
    QueuedTokensFull: (
        QueuedTokensFull(4096, 1.5),
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "QUEUE_FULL",
    ),
    TenantLimitReached: (
        TenantLimitReached("four", "queued_max", 2, "2 requests wait", 1.5),
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "TENANT_LIMIT",
    ),
    TenantClosed: (TenantClosed(), grpc.StatusCode.PERMISSION_DENIED, "TENANT_CLOSED"),
    QueueTimeout: (QueueTimeout(2.0, 0.25), grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_TIMEOUT"),
    ReaderStalled: (ReaderStalled(30.0), grpc.StatusCode.ABORTED, "READER_STALLED"),
    ServerDraining: (ServerDraining(0.1), grpc.StatusCode.UNAVAILABLE, "DRAINING"),
    RequestFailed: (RequestFailed("abc123"), grpc.StatusCode.INTERNAL, "REQUEST_FAILED"),
    NotAuthenticated: (
        NotAuthenticated(),
        grpc.StatusCode.UNAUTHENTICATED,
        "CREDENTIAL_INVALID",
    ),
    CredentialRevoked: (
        CredentialRevoked(),
        grpc.StatusCode.UNAUTHENTICATED,
        "CREDENTIAL_REVOKED",
    ),
    RoleMissing: (RoleMissing("client"), grpc.StatusCode.PERMISSION_DENIED, "ROLE_MISSING"),
    ActingRefused: (
        ActingRefused("it came 2 times"),
        grpc.StatusCode.PERMISSION_DENIED,
        "TENANT_NOT_ALLOWED",
    ),
}
# These are for a server's operator: raised before it serves, or when it ends.
FOR_OPERATORS = {DeviceLost, ModelRefused, SettingRefused}


class Aborted(Exception):
    """What the context raises, as gRPC's does."""


class Context:
    """Remembers how the call ended."""

    def __init__(self) -> None:
        self.code: grpc.StatusCode | None = None
        self.message = ""
        self.metadata: Metadata = ()

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()
    ) -> None:
        assert self.code is None, "a call ends once"
        self.code, self.message, self.metadata = code, details, trailing_metadata
        raise Aborted

    @property
    def values(self) -> Mapping[str, Any]:
        """The trailing metadata by key."""
        assert len({key for key, _ in self.metadata}) == len(self.metadata)
        return dict(self.metadata)

    @property
    def details(self) -> dict[str, Message]:
        """The google.rpc details by type, unpacked."""
        status = status_pb2.Status.FromString(self.values["grpc-status-details-bin"])
        assert self.code is not None
        assert (status.code, status.message) == (self.code.value[0], self.message)
        found: dict[str, Message] = {}
        for packed in status.details:
            name = packed.type_url.rpartition(".")[2]
            assert name not in found
            found[name] = getattr(error_details_pb2, name)()
            assert packed.Unpack(found[name])
        return found


async def ended(error: Exception, metadata: Metadata = ()) -> Context:
    """How a call that raised this ends."""
    context = Context()
    with pytest.raises(Aborted):
        await abort(context, error, metadata)  # type: ignore[arg-type]
    return context


def test_every_exception_for_clients_has_a_row() -> None:
    """An exception without a row would come out as our mistake, though it is the caller's."""
    declared = {
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, Exception) and kind.__module__ == errors.__name__
    }
    assert declared - FOR_OPERATORS == set(EXAMPLES)
    assert set(table._TABLE) == set(EXAMPLES)


@pytest.mark.parametrize("kind", EXAMPLES)
async def test_code_and_reason(kind: type) -> None:
    """Clients decide by code and reason whether to mend, to wait or to give up."""
    error, code, reason = EXAMPLES[kind]
    context = await ended(error)
    assert context.code == code
    assert context.message == str(error)
    info = context.details["ErrorInfo"]
    assert isinstance(info, error_details_pb2.ErrorInfo)
    assert (info.reason, info.domain) == (reason, DOMAIN)


async def test_field_violations_are_told_one_by_one() -> None:
    """A client that marks the wrong fields in a form needs their paths, not a sentence."""
    details = (await ended(EXAMPLES[InvalidRequest][0])).details["BadRequest"]
    assert isinstance(details, error_details_pb2.BadRequest)
    assert [(v.field, v.description) for v in details.field_violations] == [
        ("stop.max_tokens", "0"),
        ("priority", "11"),
    ]


async def test_a_full_queue_is_told_as_a_quota() -> None:
    """A client could not tell a full queue from other exhaustion."""
    details = (await ended(QueueFull(256, 1.5))).details["QuotaFailure"]
    assert isinstance(details, error_details_pb2.QuotaFailure)
    assert [v.description for v in details.violations] == ["256 requests are waiting"]


async def test_a_limit_of_a_tenant_says_which_and_whose() -> None:
    """A client could not tell which of its limits to ask its operator about."""
    error = TenantLimitReached("four", "tokens_per_second", 0.5, "a prompt of 9 tokens waits", 1.5)
    details = (await ended(error)).details
    info, quota = details["ErrorInfo"], details["QuotaFailure"]
    assert isinstance(info, error_details_pb2.ErrorInfo)
    facts = {"cause": "OWN_LIMIT", "limit": "tokens_per_second", "value": "0.5"}
    assert dict(info.metadata) == facts
    assert isinstance(quota, error_details_pb2.QuotaFailure)
    assert [(v.subject, v.description) for v in quota.violations] == [
        ("four", "tokens_per_second 0.5: a prompt of 9 tokens waits")
    ]


async def test_a_failed_request_names_its_id() -> None:
    """Whoever reports a failure could not say which."""
    context = await ended(RequestFailed("abc123"))
    details = context.details["RequestInfo"]
    assert isinstance(details, error_details_pb2.RequestInfo)
    assert details.request_id == "abc123"
    assert "abc123" in context.message


@pytest.mark.parametrize(
    ("error", "milliseconds"),
    [
        (QueueFull(1, 0.1), 100),
        (QueueFull(1, 30.0), 30_000),
        (QueuedTokensFull(1, 0.5), 500),
        (TenantLimitReached("four", "queued_max", 2, "2 wait", 0.001), 1),
        (QueueTimeout(2.0, 0.2501), 250),
        (ServerDraining(1.25), 1250),
        (ServerDraining(0.0), 0),
    ],
)
async def test_who_may_come_back_is_told_when(error: Exception, milliseconds: int) -> None:
    """Clients would come back at once, all together; stock ones read the pushback alone."""
    context = await ended(error)
    retry = context.details["RetryInfo"]
    assert isinstance(retry, error_details_pb2.RetryInfo)
    assert retry.retry_delay.ToMilliseconds() == milliseconds
    assert context.values["grpc-retry-pushback-ms"] == str(milliseconds)


@pytest.mark.parametrize("kind", [InvalidRequest, ModelUnknown, TenantClosed, RequestFailed])
async def test_who_should_not_come_back_is_told_nothing_of_it(kind: type) -> None:
    """A request that can never succeed would be sent again and again."""
    context = await ended(EXAMPLES[kind][0])
    assert "RetryInfo" not in context.details
    assert "grpc-retry-pushback-ms" not in context.values


async def test_metadata_of_the_caller_is_kept() -> None:
    """The receipt of a request that failed would be lost."""
    context = await ended(QueueFull(1, 1.0), (("kvledger-receipt-bin", b"\x00\xff"),))
    assert context.values["kvledger-receipt-bin"] == b"\x00\xff"
    assert set(context.values) == {
        *("kvledger-receipt-bin", "grpc-retry-pushback-ms", "grpc-status-details-bin"),
    }


async def test_a_kind_of_a_known_kind_has_its_row() -> None:
    """A more precise exception would be reported as our mistake."""

    class TemplateRefused(InvalidRequest):
        pass

    context = await ended(TemplateRefused(FieldViolation("chat", "is refused")))
    assert context.code == grpc.StatusCode.INVALID_ARGUMENT
    assert "BadRequest" in context.details


def unexpected(kind: type[Exception]) -> Exception:
    """An exception that was raised, from another one, with a text that quotes a client."""
    local = f"local {CANARY}"
    try:
        try:
            raise KeyError(local)
        except KeyError as cause:
            raise kind(CANARY) from cause
    except Exception as error:
        return error


@pytest.mark.parametrize("kind", [ValueError, RuntimeError, AssertionError, ModelRefused, OSError])
async def test_the_unexpected_is_internal_and_says_nothing(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exceptions that nobody thought of quote prompts, paths and keys."""
    logger = CapturingLogger()
    monkeypatch.setattr(table, "_log", logger)
    context = await ended(unexpected(kind))
    assert context.code == grpc.StatusCode.INTERNAL
    sent = context.message.encode() + b"".join(
        value.encode() if isinstance(value, str) else value for _, value in context.metadata
    )
    assert CANARY.encode() not in sent
    assert kind.__name__.encode() not in sent
    (call,) = logger.calls
    assert call.method_name == "error"
    line = json.dumps(call.kwargs)
    assert CANARY not in line
    assert call.kwargs["error"] == kind.__name__
    assert ", in unexpected" in call.kwargs["traceback"]
    assert call.kwargs["incident"] in context.message, "the log is found by what the client quotes"


async def test_incidents_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two people who quote the same id would be shown each other's failure."""
    monkeypatch.setattr(table, "_log", CapturingLogger())
    messages = {(await ended(ValueError(CANARY))).message for _ in range(20)}
    assert len(messages) == 20


async def test_sixteen_violations_fit_into_the_metadata() -> None:
    """A refusal larger than a client takes would come out as another error altogether."""
    many = InvalidRequest(
        *(FieldViolation(f"chat.messages[{i}].role", "r" * 70) for i in range(1000, 1016))
    )
    context = await ended(many)
    size = len(context.message) + len(context.values["grpc-status-details-bin"]) * 4 // 3
    assert size < 8 * 1024


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (QueueFull(5, 1.0), "SHARED_CAPACITY"),
        (QueueFull(64, 1.0, own=True), "OWN_LIMIT"),
        (QueuedTokensFull(100, 1.0), "SHARED_CAPACITY"),
        (QueueTimeout(1.0, 1.0), "SHARED_CAPACITY"),
        (QueueTimeout(1.0, 1.0, own=True), "OWN_LIMIT"),
        (ConstraintsFull(1 << 20, 1.0), "SHARED_CAPACITY"),
        (TenantLimitReached("acme", "running_max", 1, "1 runs", 1.0), "OWN_LIMIT"),
    ],
)
async def test_who_finds_no_room_hears_whether_it_is_its_own_limit(
    error: Exception, cause: str
) -> None:
    """A tenant would ask for more where all share what there is, or wait where it may have more."""
    info = (await ended(error)).details["ErrorInfo"]
    assert isinstance(info, error_details_pb2.ErrorInfo)
    assert info.metadata["cause"] == cause
