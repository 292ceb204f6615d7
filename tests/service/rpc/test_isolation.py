"""Two tenants of one server: neither learns from any byte what the other has said."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from server_harness import Answer, Refusal, connection, refusal_of, running
from tenants_harness import TenantsOfTest, bearer
from test_metrics import fetched
from tiny_model import write_gguf
from tiny_server import TinyServer

from kvledger.rpc.generation import RECEIPT_METADATA
from kvledger.v1 import generation_pb2 as pb
from kvledger.v1 import models_pb2

PATIENCE = 60.0
# Everything that may differ from one time to the next: ids, and how long things took. The list in
# docs/security.md is this one.
TIMES = {
    "Accepted": ("request_id", "queue_time"),
    "Receipt": (
        *("request_id", "queue_time", "prefill_time", "decode_time", "stall_time"),
        *("held", "reserved", "shared_scope", "sharing_saved", "format_saved"),
        *("preempted_time", "compute_time", "cost"),
    ),
    "RequestInfo": ("request_id",),
    "RetryInfo": ("retry_delay",),
}
SLOTS = 16  # of a block in f32


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture
def tenants(tmp_path: Path) -> TenantsOfTest:
    made = TenantsOfTest(tmp_path)
    for name in ("a", "b", "c"):
        made.add(name)
    made.add("ops", roles=("viewer",))
    made.change(lambda values: values["groups"].update(others=["a", "c"]))
    return made


def tiny_server(tiny: Path, tenants: TenantsOfTest, folder: Path, *more: str) -> TinyServer:
    metrics = ("--metrics-listen", f"unix:{folder / 'm.sock'}")
    options = (*tenants.options(folder), *metrics, "--kv-blocks", "256", "--threads", "1")
    return TinyServer(tiny, *options, *more)


class Caller:
    """One tenant's calls."""

    def __init__(self, server: TinyServer, token: str) -> None:
        self.server = server
        self.metadata = bearer(token)

    async def answer(self, **fields: Any) -> Answer:
        return await self.server.answer(metadata=self.metadata, **fields)

    async def refusal(self, **fields: Any) -> Refusal:
        return await refusal_of(self.answer(**fields))


# --- Hits -----------------------------------------------------------------------------------


async def test_tenants_do_not_hit_each_others_prefixes(
    tiny: Path, tenants: TenantsOfTest, tmp_path: Path
) -> None:
    """A tenant would begin with what another computed of the same text (S01)."""
    chance = random.Random(1)
    async with running(tiny_server(tiny, tenants, tmp_path)) as server:
        callers = {name: Caller(server, tenants.tokens[name]) for name in "abc"}
        for turn in range(60):
            names = chance.sample("abc", 2)
            # Each begins in a way of its own, or tenants would find some of what they said before.
            ids = [turn + 1, *(chance.randrange(1, 250) for _ in range(chance.randint(31, 99)))]
            cache = pb.CacheOptions()
            if turn % 3 == 0:
                cache.scope, cache.namespace = pb.CACHE_SCOPE_NAMESPACE, "the same"
            first, other, again = [
                (await callers[name].answer(ids=ids, max_tokens=2, cache=cache)).finished
                for name in (*names, names[0])
            ]
            for one in (first, other):
                assert one.usage.cached_prompt_tokens == 0
                receipt = one.receipt
                assert receipt.reused_own_tokens == 0
                assert receipt.reused_group_tokens == 0
                assert receipt.computed_tokens == len(ids) + 1
            assert again.usage.cached_prompt_tokens >= (len(ids) - 1) // SLOTS * SLOTS
        assert server.core.prefix_counts["foreign"] == 0
        assert server.core.audits == []


# --- Bytes ----------------------------------------------------------------------------------


def without_times(message: Message) -> Message:
    """A copy without what TIMES names, at any depth."""
    copied = type(message)()
    copied.CopyFrom(message)
    _clear_times(copied)
    return copied


def _clear_times(message: Message) -> None:
    for name in TIMES.get(message.DESCRIPTOR.name, ()):
        message.ClearField(name)
    for field, value in message.ListFields():
        if field.message_type is not None:
            for each in value if field.is_repeated else (value,):
                _clear_times(each)


def of_answer(answer: Answer) -> list[Any]:
    """All messages; how text is cut into deltas depends on when it is read."""
    whole = pb.Delta()
    for delta in answer.deltas:
        whole.MergeFrom(pb.Delta(token_ids=delta.token_ids, logprobs=delta.logprobs))
    tokens = sum(delta.tokens for delta in answer.deltas)
    ends = (answer.responses[0], answer.responses[-1])
    return [answer.text, tokens, whole, *map(without_times, ends)]


_KINDS = (
    *(error_details_pb2.BadRequest, error_details_pb2.ErrorInfo, error_details_pb2.QuotaFailure),
    *(error_details_pb2.RequestInfo, error_details_pb2.RetryInfo),
)


def of_refusal(refusal: Refusal) -> list[Any]:
    """Code, words, every detail and every trailer."""
    status = status_pb2.Status()
    status.CopyFrom(refusal.status)
    details = []
    for packed in status.details:
        kind = next(kind for kind in _KINDS if packed.Is(kind.DESCRIPTOR))
        detail = kind()
        packed.Unpack(detail)
        details.append(without_times(detail))
    trailers = {
        name: value
        for name, value in refusal.metadata.items()
        if name not in ("grpc-status-details-bin", RECEIPT_METADATA)
    }
    receipts = [without_times(refusal.receipt)] if RECEIPT_METADATA in refusal.metadata else []
    return [refusal.code, refusal.message, status.code, status.message, details, trailers, receipts]


TEXTS = ["th" * 70, "the manual says nothing of it " * 3, "abc" * 40]
SEEDED = {"temperature": 0.9, "seed": 11}
CHAT = [(pb.ROLE_SYSTEM, "be kind " * 8), (pb.ROLE_USER, "hello")]


async def answers(caller: Caller) -> list[Any]:
    """What a tenant gets for prompts of all kinds."""
    seen: list[Any] = []
    for text in (*TEXTS, TEXTS[0]):
        for sampling in ({}, SEEDED):
            fields: dict[str, Any] = {"text": text, "max_tokens": 12, "sampling": sampling}
            output = pb.OutputOptions(token_ids=True, top_logprobs=2)
            seen.append(of_answer(await caller.answer(**fields, output=output)))
    seen.append(of_answer(await caller.answer(chat=CHAT, max_tokens=5)))
    for namespace in ("x", "y", "x"):
        cache = pb.CacheOptions(scope=pb.CACHE_SCOPE_NAMESPACE, namespace=namespace)
        seen.append(of_answer(await caller.answer(text=TEXTS[1], cache=cache)))
    return seen


MISTAKES: tuple[dict[str, Any], ...] = (
    {"text": "a", "cache": pb.CacheOptions(shared_scope="others", shared_tokens=1)},
    {"text": "a", "cache": pb.CacheOptions(shared_scope="nobody", shared_tokens=1)},
    {"text": "a", "cache": pb.CacheOptions(namespace="x")},
    {"text": "a", "model": "another"},
    {"text": ""},
    {"ids": [1] * 600},
    {"text": "a", "sampling": {"temperature": -1.0}},
)


async def everything(caller: Caller) -> list[Any]:
    """What a tenant gets from all that it can reach."""
    seen = await answers(caller)
    refusals = [await caller.refusal(**fields) for fields in MISTAKES]
    models, shown = caller.server.models, {"metadata": caller.metadata, "timeout": PATIENCE}
    return [
        *seen,
        *map(of_refusal, refusals),
        await models.ListModels(models_pb2.ListModelsRequest(), **shown),
        await models.GetModel(models_pb2.GetModelRequest(), **shown),
        await models.Tokenize(models_pb2.TokenizeRequest(text=TEXTS[1]), **shown),
        await models.Detokenize(models_pb2.DetokenizeRequest(token_ids=[80, 81]), **shown),
    ]


async def beside(caller: Caller, other: Caller | None) -> list[Any]:
    """The script, after and while another tenant says the same words and more, or alone."""
    if other is None:
        return await everything(caller)
    await answers(other)

    async def go_on() -> None:
        while True:
            for text in TEXTS:
                await other.answer(text=text + "and more " * 4, max_tokens=20)

    noise = [asyncio.create_task(go_on()) for _ in range(2)]
    try:
        return await everything(caller)
    finally:
        for task in noise:
            task.cancel()
        await asyncio.gather(*noise, return_exceptions=True)


def same(first: Sequence[Any], second: Sequence[Any]) -> list[int]:
    """Places at which two runs differ."""
    assert len(first) == len(second)
    return [place for place in range(len(first)) if first[place] != second[place]]


async def test_no_byte_tells_of_another_tenant(
    tiny: Path, tenants: TenantsOfTest, tmp_path: Path
) -> None:
    """What another has said, or that it was there, would show in some field (S06)."""
    runs = {}
    for manner in ("alone", "beside a", "beside itself"):
        async with running(tiny_server(tiny, tenants, tmp_path)) as server:
            a, b = (Caller(server, tenants.tokens[name]) for name in "ab")
            other = {"alone": None, "beside a": a, "beside itself": b}[manner]
            runs[manner] = await beside(b, other)
            if other is not None:
                assert len(server.log.of("request_finished")) > 2 * 12
    assert same(runs["alone"], runs["beside a"]) == []
    # The arm that must differ: what it has said itself is cached, and its usage says so.
    assert len(same(runs["alone"], runs["beside itself"])) > 5


# --- What is for operators ------------------------------------------------------------------


async def test_the_pool_is_for_operators_to_see(
    tiny: Path, tenants: TenantsOfTest, tmp_path: Path
) -> None:
    """A tenant would watch the pool fill as others speak (S08)."""
    async with running(tiny_server(tiny, tenants, tmp_path)) as server:
        b = Caller(server, tenants.tokens["b"])
        shown = {"metadata": b.metadata, "timeout": PATIENCE}
        before = await server.models.GetModel(models_pb2.GetModelRequest(), **shown)
        pool = f'kvledger_kv_blocks{{state="{"cached"}"}} '
        for text in TEXTS:
            await Caller(server, tenants.tokens["a"]).answer(text=text)
        # Operators do see it.
        assert server.server.metrics_address is not None
        text = await asyncio.to_thread(fetched, server.server.metrics_address)
        (line,) = [line for line in text.splitlines() if line.startswith(pool)]
        assert float(line.removeprefix(pool)) > 0
        assert "kvledger_prefix_foreign_blocks_total 0.0" in text
        named = [
            name for line in text.splitlines() for name in tenants.tokens if f'"{name}"' in line
        ]
        shown_as = [f'tenant="{name}"' for name in tenants.tokens]
        assert len(named) == sum(text.count(label) for label in shown_as), "only as what they are"
        # Tenants do not.
        assert await server.models.GetModel(models_pb2.GetModelRequest(), **shown) == before
        async with connection(server.address) as channel:
            stub: Any = channelz_pb2_grpc.ChannelzStub(channel)  # type: ignore[no-untyped-call]
            call = stub.GetServers(channelz_pb2.GetServersRequest(), **shown)
            refused = await refusal_of(call)
        assert refused.code == grpc.StatusCode.UNIMPLEMENTED


# --- Neighbours -----------------------------------------------------------------------------

BAD_CACHE = [
    pb.CacheOptions(namespace="x"),
    pb.CacheOptions(scope=pb.CACHE_SCOPE_NAMESPACE),
    pb.CacheOptions(scope=pb.CACHE_SCOPE_NAMESPACE, namespace="n" * 257),
    pb.CacheOptions(scope=9),  # type: ignore[arg-type]
    pb.CacheOptions(shared_scope="others", shared_tokens=3),
    pb.CacheOptions(shared_scope="s" * 257, shared_tokens=3),
    pb.CacheOptions(shared_scope="mine", shared_tokens=2**31),
    pb.CacheOptions(shared_scope="mine", shared_messages=1),
    pb.CacheOptions(shared_tokens=1),
    pb.CacheOptions(shared_scope="mine"),
]


async def test_bad_wishes_for_the_cache_harm_no_neighbour(
    tiny: Path, tenants: TenantsOfTest, tmp_path: Path
) -> None:
    """One tenant's mistake would change what another is told (S16)."""
    tenants.change(lambda values: values["groups"].update(mine=["b"]))
    async with running(tiny_server(tiny, tenants, tmp_path)) as server:
        a, b = (Caller(server, tenants.tokens[name]) for name in "ab")
        prompts = [text[:30] + chr(97 + place) for place in range(7) for text in TEXTS[:1]]
        asked: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "wants_ids": True}
        alone = [(await a.answer(text=prompt, **asked)).token_ids for prompt in prompts]
        neighbours = [asyncio.create_task(a.answer(text=prompt, **asked)) for prompt in prompts]
        refused = []
        while not all(task.done() for task in neighbours):
            for cache in BAD_CACHE:
                refusal = await b.refusal(text="abcdef", cache=cache)
                refused.append(refusal.code)
        assert len(refused) >= len(BAD_CACHE)
        assert set(refused) == {
            grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.PERMISSION_DENIED,
        }
        assert [(await task).token_ids for task in neighbours] == alone
