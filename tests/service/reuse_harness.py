"""A whole server that reuses prefixes and computes a tiny model for real, step by step if asked."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import torch
from server_harness import Answer, connection, running, until
from tenants_harness import TenantsOfTest, bearer
from tiny_model import write_gguf
from tiny_server import TinyServer

from kvledger import _core
from kvledger.models.llama import Llama
from kvledger.tenants import editing
from kvledger.v1 import generation_pb2 as pb

# Tokens of a block.
BLOCK = 8
_OPTIONS = (
    *(
        "--block-tokens",
        "16",
    ),  # as bf16 counts them: of f32, which these servers keep, half as many
    *("--kv-blocks", "64", "--token-budget", "32", "--max-sequences", "8", "--threads", "1"),
)

NONE = pb.CacheOptions(scope=pb.CACHE_SCOPE_NONE)


def namespace(name: str) -> pb.CacheOptions:
    return pb.CacheOptions(scope=pb.CACHE_SCOPE_NAMESPACE, namespace=name)


def shared(name: str, tokens: int) -> pb.CacheOptions:
    return pb.CacheOptions(shared_scope=name, shared_tokens=tokens)


def prompt(seed: str, tokens: int) -> list[int]:
    """So many ids, others for each seed; none of them is a control token."""
    start = sum(31**place * ord(letter) for place, letter in enumerate(seed))
    return [(start + 17 * place + place * place) % 250 for place in range(tokens)]


@cache
def model_path() -> Path:
    """A model's file, made once."""
    return write_gguf(Path(tempfile.mkdtemp(prefix="kvledger-test-")) / "tiny.gguf")


@dataclass
class _Steps:
    """See ScriptedModel.before_step."""

    before_step: Callable[[_core.Plan], None] = lambda plan: None


class _SteppedModel:
    """A model whose steps a test may hold up."""

    def __init__(self, model: Llama, steps: _Steps) -> None:
        self._model = model
        self._steps = steps

    @property
    def workspace_bytes(self) -> int:
        return self._model.workspace_bytes

    def forward(self, plan: _core.Plan, beat: Callable[[], None] = lambda: None) -> torch.Tensor:
        self._steps.before_step(plan)
        return self._model.forward(plan, beat)

    def score(self, tokens: Any) -> torch.Tensor:
        return self._model.score(tokens)


class ReuseServer(TinyServer):
    """A server of 64 blocks of 8 tokens; later arguments replace these."""

    def __init__(self, *arguments: str) -> None:
        super().__init__(model_path(), *_OPTIONS, *arguments)
        steps = _Steps()
        self.scripted = steps  # type: ignore[assignment]
        stepped: Any = _SteppedModel(self.model.llama, steps)
        self.model = replace(self.model, llama=stepped)

    @property
    def counts(self) -> dict[str, int]:
        """The core's counts, as far as the engine has told them."""
        return self.server._engine.prefix_counts

    async def ids(self, ids: Sequence[int], **fields: Any) -> Answer:
        """An answer to a prompt of these ids, four tokens long unless told otherwise."""
        answer = await self.answer(ids=list(ids), ignore_eos=True, wants_ids=True, **fields)
        require_whole(answer)
        return answer

    async def require_nothing_held(self, staying: int = 0) -> None:
        """Only cached and free blocks are left, besides those of public prefixes."""
        await until(lambda: not self.server._admission.open_requests)
        busy = ("reserved", "releasing")
        await until(
            lambda: (
                self.core.balances["held"] == staying
                and not any(self.core.balances[state] for state in busy)
            )
        )
        assert self.core.audits == []
        assert self.counts["foreign"] == 0


@asynccontextmanager
async def reusing(*arguments: str) -> AsyncIterator[ReuseServer]:
    """A running server with these arguments besides."""
    async with running(ReuseServer(*arguments)) as server:
        yield server


def found(answer: Answer) -> tuple[int, int, int]:
    """Tokens from cached blocks: its own, a group's, a public prefix's."""
    receipt = answer.finished.receipt
    return (
        receipt.reused_own_tokens,
        receipt.reused_group_tokens,
        receipt.reused_public_tokens,
    )


def require_whole(answer: Answer) -> None:
    """What was found and what was computed are the prompt and the answer, each token once."""
    receipt, usage = answer.finished.receipt, answer.finished.usage
    reused = sum(found(answer))
    assert usage.cached_prompt_tokens == min(reused, usage.prompt_tokens)
    if receipt.preemptions or len(answer.finished.samples) > 1:
        return  # it found or computed some of it several times
    if usage.completion_tokens == 0:  # it never ran
        assert receipt.computed_tokens == reused == 0
        return
    # The last token of the answer is not computed.
    computed = usage.prompt_tokens - reused + usage.completion_tokens - 1
    assert receipt.computed_tokens == computed
    assert reused < usage.prompt_tokens, "the last one is always computed"


class TenantsServer:
    """Asks a server in the name of its tenants."""

    def __init__(self, server: ReuseServer, tenants: TenantsOfTest) -> None:
        self.server = server
        self.tenants = tenants

    async def ask(self, who: str, ids: Sequence[int], **fields: Any) -> Answer:
        return await self.server.ids(ids, metadata=bearer(self.tenants.tokens[who]), **fields)

    async def changed(self, change: Callable[[], Any]) -> None:
        """Makes a change of the tenants' file, and waits until the server has taken it over."""
        seen = len(self.server.log.of("tenants_reloaded"))
        change()
        await until(lambda: len(self.server.log.of("tenants_reloaded")) > seen)


@asynccontextmanager
async def reusing_tenants(
    folder: Path, *arguments: str, names: Sequence[str] = ("acme", "globex", "initech")
) -> AsyncIterator[TenantsServer]:
    """A running server with these tenants, the first two of them in the group `team`."""
    tenants = TenantsOfTest(folder)
    for name in names:
        tenants.add(name)
    set_group(tenants, "team", *names[:2])
    async with reusing(*tenants.options(folder), *arguments) as server:
        yield TenantsServer(server, tenants)


@asynccontextmanager
async def operated_tenants(
    folder: Path, *arguments: str
) -> AsyncIterator[tuple[TenantsServer, grpc.aio.Channel]]:
    """The same with 24 blocks, an operator `ops`, a viewer `eye`, and a channel for them."""
    listen = ("--operators-listen", f"unix:{folder / 'o.sock'}", "--kv-blocks", "24")
    async with reusing_tenants(folder, *listen, *arguments) as their:

        def add() -> None:
            their.tenants.add("ops", roles=("operator",))
            their.tenants.add("eye", roles=("viewer",))

        await their.changed(add)
        address = their.server.server.operators_address
        assert address is not None
        async with connection(address) as channel:
            yield their, channel


def set_group(tenants: TenantsOfTest, name: str, *members: str) -> None:
    tenants.change(lambda values: editing.set_list(values, "groups", name, members))
