"""Requests that say something of the cache, for several tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvledger.v1 import generation_pb2 as pb


def chat_of(messages: int) -> pb.ChatPrompt:
    return pb.ChatPrompt(messages=[pb.ChatMessage(role=pb.ROLE_USER, content="x")] * messages)


def cached(prompt: pb.ChatPrompt | list[int] | str = "x", **options: Any) -> pb.GenerateRequest:
    """A request with these CacheOptions."""
    request = pb.GenerateRequest(cache=pb.CacheOptions(**options))
    if isinstance(prompt, str):
        request.text = prompt
    elif isinstance(prompt, list):
        request.token_ids.ids.extend(prompt)
    else:
        request.chat.CopyFrom(prompt)
    return request


# As test_limits.ROWS: a request by the row's value, the path that is named, and the first refused
# values below and above.
CACHE_ROWS: dict[str, tuple[Callable[[Any], Any], str, float | None, float | None]] = {
    "cache.namespace": (
        lambda n: cached(scope=pb.CACHE_SCOPE_NAMESPACE, namespace="n" * n),
        "cache.namespace",
        0,
        257,
    ),
    "cache.shared_scope": (
        lambda n: cached(shared_scope="g" * n, shared_tokens=1),
        "cache.shared_scope",
        None,  # an empty one is none
        257,
    ),
    "cache.shared_messages": (
        lambda n: cached(chat_of(min(n, 1024) or 1), shared_scope="g", shared_messages=n),
        "cache.shared_messages",
        0,
        1025,
    ),
    "cache.shared_tokens": (
        lambda n: cached(shared_scope="g", shared_tokens=n),
        "cache.shared_tokens",
        0,
        256 * 1024 + 1,
    ),
}
