"""A client that asks again: what a service in front of kvledger does when a server restarts.

Only requests whose stream has not been accepted are sent again; who has tokens must decide itself.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
from google.rpc import error_details_pb2, status_pb2

from bench.arms.kvledger import generate_request
from bench.load import INCOMPLETE, OK
from kvledger.v1 import generation_pb2_grpc

# Seconds until the next attempt where the server does not say.
_BACKOFF = 0.2
# A wait is longer by up to this share of it, so that those who were told the same come apart.
_SPREAD = 0.5
_OPTIONS = (
    # gRPC's own attempts would hide what is counted here.
    ("grpc.enable_retries", 0),
    # It waits up to 2 minutes before it tries to connect again; a restart takes seconds.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
)


@dataclass
class Asked:
    """One request with all its attempts; times in s of perf_counter."""

    due: float
    wanted_tokens: int
    tokens: int = 0
    told: int = 0  # attempts that the server refused with a RetryInfo
    untold: int = 0  # attempts that found no server, or lost it
    accepted: float | None = None
    ended: float | None = None  # None while it runs
    status: str = OK
    reason: str = ""


def retry_delay(error: grpc.aio.AioRpcError) -> float | None:
    """Seconds of the RetryInfo in an error's details; None without one."""
    for name, value in error.trailing_metadata() or ():
        if name == "grpc-status-details-bin":
            for detail in status_pb2.Status.FromString(bytes(value)).details:
                info = error_details_pb2.RetryInfo()
                if detail.Unpack(info):
                    return float(info.retry_delay.ToTimedelta().total_seconds())
    return None


class RetryingClient:
    """Streams from one address on one connection, which is made again when it is lost."""

    def __init__(self, address: str, patience: float, seed: int) -> None:
        """`patience` is how many seconds a request is tried before its error counts."""
        self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        self._generation = generation_pb2_grpc.GenerationServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._patience = patience
        self._chance = random.Random(seed)

    async def ask(self, prompt: Sequence[int], asked: Asked) -> None:
        """Sends a request until it is accepted and writes down what happens to it."""
        while (error := await self._attempt(prompt, asked)) is not None:
            delay = retry_delay(error)
            late = time.perf_counter() - asked.due > self._patience
            if asked.accepted or late or error.code() != grpc.StatusCode.UNAVAILABLE:
                asked.status, asked.reason = error.code().name, error.details() or ""
                break
            if delay is None:
                asked.untold += 1
            else:
                asked.told += 1
            wait = _BACKOFF if delay is None else delay
            await asyncio.sleep(wait * (1 + _SPREAD * self._chance.random()))
        if asked.status == OK and asked.tokens != asked.wanted_tokens:
            asked.status = INCOMPLETE
            asked.reason = f"{asked.tokens} tokens instead of {asked.wanted_tokens}"
        asked.ended = time.perf_counter()

    async def _attempt(self, prompt: Sequence[int], asked: Asked) -> grpc.aio.AioRpcError | None:
        """One call to its end, and the error that it ended with."""
        try:
            async for response in self._generation.Generate(
                generate_request(prompt, asked.wanted_tokens)
            ):
                if response.HasField("accepted"):
                    asked.accepted = time.perf_counter()
                elif response.HasField("delta"):
                    asked.tokens += len(response.delta.token_ids)
        except grpc.aio.AioRpcError as error:
            return error
        return None

    async def close(self) -> None:
        """Ends the connection."""
        await self._channel.close()
