"""Options of the cache that contradict each other, or the prompt, are refused with their fields."""

from __future__ import annotations

import pytest
from cache_requests import cached, chat_of

from kvledger.errors import InvalidRequest
from kvledger.limits import check_generate, check_shared_fits
from kvledger.v1 import generation_pb2 as pb

VOCABULARY = 1000
CANARY = "what-only-the-client-may-read"
TENANT, NAMESPACE, NONE = pb.CACHE_SCOPE_TENANT, pb.CACHE_SCOPE_NAMESPACE, pb.CACHE_SCOPE_NONE


@pytest.mark.parametrize(
    "request_",
    [
        cached(),
        cached(scope=TENANT),
        cached(scope=NONE),
        cached(scope=NAMESPACE, namespace="é" * 128),
        cached([1, 2, 3], shared_scope="g", shared_tokens=3),
        cached("abc", shared_scope="g", shared_tokens=1000),  # counted when it is encoded
        cached(chat_of(2), shared_scope="g", shared_messages=2),
        cached(chat_of(2), scope=NAMESPACE, namespace="n", shared_scope="g", shared_messages=1),
    ],
)
def test_what_makes_sense_passes(request_: pb.GenerateRequest) -> None:
    """A documented way of sharing would be refused."""
    check_generate(request_, VOCABULARY)


@pytest.mark.parametrize(
    ("request_", "field", "reason"),
    [
        (cached(scope=7), "cache.scope", "7 is no scope"),
        (cached(scope=-1), "cache.scope", "-1 is no scope"),
        (cached(namespace=CANARY), "cache.namespace", "is for CACHE_SCOPE_NAMESPACE alone"),
        (cached(scope=TENANT, namespace=CANARY), "cache.namespace", "alone"),
        (cached(scope=NONE, namespace=CANARY), "cache.namespace", "alone"),
        (cached(scope=NAMESPACE), "cache.namespace", "0 bytes, allowed are 1 to 256"),
        (cached(scope=NAMESPACE, namespace="é" * 129), "cache.namespace", "258 bytes"),
        (cached(shared_scope=CANARY), "cache.shared_tokens", "0 tokens, allowed are 1 to 262144"),
        (cached(chat_of(1), shared_scope=CANARY), "cache.shared_messages", "0 messages"),
        (cached(shared_tokens=1), "cache.shared_tokens", "cache.shared_scope, which is not set"),
        (cached(chat_of(1), shared_messages=1), "cache.shared_messages", "which is not set"),
        (
            cached(scope=NONE, shared_scope=CANARY, shared_tokens=1),
            "cache.shared_scope",
            "CACHE_SCOPE_NONE reuses nothing",
        ),
        (
            cached(chat_of(3), shared_scope=CANARY, shared_messages=4),
            "cache.shared_messages",
            "4 messages, and the prompt has 3",
        ),
        (
            cached([1, 2], shared_scope=CANARY, shared_tokens=3),
            "cache.shared_tokens",
            "3 tokens, and the prompt has 2",
        ),
        (
            cached(chat_of(3), shared_scope=CANARY, shared_messages=2**32 - 1),
            "cache.shared_messages",
            "4294967295 messages, allowed are 1 to 1024",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(
    request_: pb.GenerateRequest, field: str, reason: str
) -> None:
    """A request would share less than its caller believes, or more."""
    with pytest.raises(InvalidRequest) as refused:
        check_generate(request_, VOCABULARY)
    (violation,) = refused.value.violations
    assert violation.field == field
    assert reason in violation.reason
    assert CANARY not in str(refused.value)


@pytest.mark.parametrize("prompt", [chat_of(2), [1, 2], "ab"])
def test_both_counts_are_one_too_many(prompt: pb.ChatPrompt | list[int] | str) -> None:
    """One of two contradicting borders would be used."""
    request = cached(prompt, shared_scope="g", shared_messages=1, shared_tokens=1)
    with pytest.raises(InvalidRequest) as refused:
        check_generate(request, VOCABULARY)
    (violation,) = refused.value.violations
    other = "cache.shared_tokens" if isinstance(prompt, pb.ChatPrompt) else "cache.shared_messages"
    assert violation.field == other


def test_the_count_of_the_wrong_kind_is_named_and_the_right_one_asked_for() -> None:
    """A caller who counts messages of a text would not learn what to count."""
    with pytest.raises(InvalidRequest) as refused:
        check_generate(cached(shared_scope="g", shared_messages=1), VOCABULARY)
    assert [v.field for v in refused.value.violations] == [
        "cache.shared_messages",
        "cache.shared_tokens",
    ]
    assert "set cache.shared_tokens" in refused.value.violations[0].reason


def test_a_text_may_turn_out_shorter_than_what_it_shares() -> None:
    """The core would be told of a border behind the prompt's end."""
    check_shared_fits(3, 3)
    with pytest.raises(InvalidRequest, match="4 tokens, and the prompt has 3"):
        check_shared_fits(4, 3)
