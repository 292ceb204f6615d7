"""Prefix reuse of the real model in a process of its own: the same answers, found again."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from server_process import PATIENCE, ServerProcess, generation, request, server_process

from kvledger.v1 import generation_pb2 as pb

TEXT = (
    "The lighthouse keeper wrote down every ship that passed, its flag, its course and the hour. "
    "On calm days there were so few of them that he drew birds in the margins. "
) * 3


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    options = ("--kv-format", "f32", "--block-tokens", "32")
    with server_process(*options, "--kv-blocks", "128", "--token-budget", "64") as server:
        yield server


@pytest.fixture(scope="module")
def channel(server: ServerProcess) -> Iterator[grpc.Channel]:
    with server.channel() as channel:
        yield channel


def asked(text: str, tokens: int, scope: pb.CacheScope.ValueType) -> pb.GenerateRequest:
    message = request(text, tokens)
    message.output.token_ids = True
    message.output.top_logprobs = 2
    message.cache.scope = scope
    return message


def told(channel: grpc.Channel, message: pb.GenerateRequest) -> tuple[list[object], pb.Usage]:
    """Tokens with the log-probabilities of the likeliest, bit for bit."""
    responses = list(generation(channel).Generate(message, timeout=PATIENCE))
    numbers: list[object] = [
        (each.chosen.token_id, each.chosen.logprob, [top.logprob for top in each.top])
        for response in responses
        for each in response.delta.logprobs
    ]
    assert len(numbers) > 0
    return numbers, responses[-1].finished.usage


def test_warm_is_cold(channel: grpc.Channel) -> None:
    """A cached beginning would change what follows (B12, B13)."""
    for cut in (len(TEXT), len(TEXT) - 1, 200):
        text = TEXT[:cut]
        reference, usage = told(channel, asked(text, 12, pb.CACHE_SCOPE_NONE))
        assert usage.cached_prompt_tokens == 0
        for _ in range(2):
            numbers, _ = told(channel, asked(text, 12, pb.CACHE_SCOPE_TENANT))
            assert numbers == reference
        numbers, usage = told(channel, asked(text, 12, pb.CACHE_SCOPE_TENANT))
        assert numbers == reference
        assert usage.prompt_tokens - 16 <= usage.cached_prompt_tokens < usage.prompt_tokens


def test_warm_is_cold_beside_others_of_the_same_beginning(channel: grpc.Channel) -> None:
    """Requests that share what is just being computed would read it too early (B12)."""
    beginning = "In the harbour office " + TEXT
    texts = [beginning + end for end in ("Then", "He", "Nobody", "")]
    alone = [told(channel, asked(text, 8, pb.CACHE_SCOPE_NONE))[0] for text in texts]
    messages = [asked(text, 8, pb.CACHE_SCOPE_TENANT) for text in texts]
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda message: told(channel, message), messages))
    assert [numbers for numbers, _ in answers] == alone
    assert sum(usage.cached_prompt_tokens for _, usage in answers) > 150


def test_a_start_that_reuses_says_so_by_silence(server: ServerProcess) -> None:
    """Every log would have a warning that nobody believes any more (B89)."""
    server.event("serving")
    assert server.events("prefix_reuse_finds_nothing") == []
