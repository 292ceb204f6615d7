"""The servers of bench.front and bench.stalled, each a process of its own.

    python -m bench.stub_server lockstep | paced [OPTIONS OF kvledger serve]
    python -m bench.stub_server bare --messages FILE [--uvloop]

The first two are the whole service with a stub in place of the model, which always says the same
token. `lockstep` computes a step as soon as all readers have fetched what the last one gave them,
so nobody is ever given two tokens at once; `paced` takes --step seconds for each step. `bare` is
what grpc.aio offers and nothing else, on asyncio's own loop unless --uvloop is given; it answers
every call with the messages of a file.

Prints {"listen": HOST:PORT} when it is ready, and {"sequences": N} when a step of `paced` has
another number of sequences than the one before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import grpc
import torch

from bench.http2 import messages
from kvledger import _core, event_loop
from kvledger.books.process_memory import LoadedMemory
from kvledger.engine import make_core
from kvledger.log import configure
from kvledger.models.config import LlamaConfig
from kvledger.models.llama import Llama
from kvledger.models.opening import open_model
from kvledger.planning.floors import ModelWork
from kvledger.served_model import ServedModel
from kvledger.server import Server
from kvledger.settings import Settings, load_settings
from kvledger.streams import Mail, Mailbox
from kvledger.tokenizer import Tokenizer
from kvledger.v1 import generation_pb2, generation_pb2_grpc

# What the stub always says: an ordinary word, in a message of an ordinary size.
_WORD = b" the"
# How long readers may take to fetch a token in lock step, in seconds.
_PATIENCE = 20.0
_BLOCK_SLOTS = 32


class Pace(Protocol):
    """When a step may be computed."""

    def wait(self, plan: _core.Plan) -> None:
        """Called in each step, by the engine's thread."""
        ...


class LockStep:
    """Keeps each step back until readers have fetched all tokens of those before."""

    def __init__(self) -> None:
        self._made = 0  # tokens, by the engine's thread
        self._fetched = 0  # tokens, by the event loop's
        # Let go of when all are fetched. An Event would do, and cost what is not the front end's.
        self._waiting = threading.Lock()
        self._waiting.acquire()

    def wait(self, plan: _core.Plan) -> None:
        """See Pace."""
        while self._fetched < self._made:
            if not self._waiting.acquire(timeout=_PATIENCE):
                raise RuntimeError(f"{self._made - self._fetched} tokens are not fetched")
        self._made += plan.logits

    def fetched(self, tokens: int) -> None:
        """A reader has so many more; called by the event loop's thread."""
        self._fetched += tokens
        if self._fetched >= self._made and self._waiting.locked():
            self._waiting.release()

    def watch_mailboxes(self) -> None:
        """Counts what readers fetch from now on, in this process."""
        take = Mailbox.take

        def counted(mailbox: Mailbox) -> Mail:
            mail = tokens, _ = take(mailbox)
            self.fetched(len(tokens))
            return mail

        Mailbox.take = counted  # type: ignore[method-assign]


class FixedPace:
    """Steps of one length, whoever reads or does not."""

    def __init__(self, seconds: float, say: Callable[[int], None]) -> None:
        """`say` is told how many sequences a step has, whenever that changes."""
        self._seconds, self._say = seconds, say
        self._sequences = 0

    def wait(self, plan: _core.Plan) -> None:
        """See Pace."""
        if plan.sequences != self._sequences:
            self._sequences = plan.sequences
            self._say(plan.sequences)
        time.sleep(self._seconds)


class StubModel:
    """Takes the place of Llama: after everything comes the same token, at once or at a pace."""

    def __init__(self, rows: int, token: int, pace: Pace) -> None:
        # No wider than it must be: what the sampler does with logits is not the front end's.
        self._logits = torch.zeros(rows, token + 1)
        self._logits[:, token] = 1.0
        self._pace = pace
        self._rows = rows
        self.workspace_bytes = 0

    def forward(self, plan: _core.Plan, beat: Callable[[], None] = lambda: None) -> torch.Tensor:
        """See Llama.forward."""
        self._pace.wait(plan)
        beat()
        # A view costs as much as many tokens, and is not the front end's.
        full = plan.logits == self._rows
        return self._logits if full else self._logits[: plan.logits]


def stub_model(
    settings: Settings, config: LlamaConfig, tokenizer: Tokenizer, pace: Pace
) -> ServedModel:
    """A ServedModel without weights and without KV memory; its pool has room for everybody."""
    blocks = settings.sequences_max * -(-config.context_tokens // _BLOCK_SLOTS)
    core = make_core(
        blocks=blocks,
        slots_per_block=_BLOCK_SLOTS,
        context_tokens=config.context_tokens,
        token_budget=settings.token_budget,
        sequences_max=settings.sequences_max,
        end_of_text=tokenizer.eos_ids,
        priority_aging=settings.priority_aging,
        tpot_target=settings.tpot_target,
        step_stretch=settings.step_stretch,
    )
    token = list(tokenizer.token_bytes).index(_WORD)
    return ServedModel(
        id="stub",
        fingerprint="",
        config=config,
        tokenizer=tokenizer,
        weights_mode=settings.weights,
        weight_bytes=0,
        layout=_core.KvLayout(layers=1, kv_heads=1, head_dim=64, block_tokens=_BLOCK_SLOTS),
        kv_format=settings.kv_format,
        blocks=blocks,
        tokens_max=core.sequence_tokens_max,
        core=core,
        llama=cast(Llama, StubModel(settings.sequences_max, token, pace)),
        work=ModelWork(0, 0, {}, {}, 0.0, 0),
        memory=LoadedMemory(),
    )


def say(**facts: Any) -> None:
    """A line for the program that started this one."""
    print(json.dumps(facts), flush=True)


def serve_stub(kind: str, step: float, arguments: Sequence[str]) -> int:
    """The whole service over a stub; returns its exit status."""
    fixed = ["--dev", "--listen", "127.0.0.1:0", "--operators-listen", "none"]
    settings = load_settings([*fixed, *arguments], {})
    configure(settings.log_format, settings.log_level)
    pace: Pace
    if kind == "lockstep":
        pace = LockStep()
        pace.watch_mailboxes()
    else:
        pace = FixedPace(step, lambda sequences: say(sequences=sequences))
    with open_model(settings.model, settings.download) as opened:
        model = stub_model(settings, opened.config, opened.tokenizer, pace)
    del opened  # a GGUF file stands in memory as long as it can be asked for tensors

    async def run() -> int:
        server = Server(settings, model)
        return await server.run(lambda: say(listen=server.address))

    return event_loop.run(run())


async def serve_bare(recorded: bytes) -> int:
    """Nothing but grpc.aio, with the settings that it has by itself."""
    answer = [generation_pb2.GenerateResponse.FromString(message) for message in messages(recorded)]

    class Bare(generation_pb2_grpc.GenerationServiceServicer):
        async def Generate(  # noqa: N802  # the contract's name
            self, request: generation_pb2.GenerateRequest, context: object
        ) -> AsyncIterator[generation_pb2.GenerateResponse]:
            for message in answer:
                yield message

    server = grpc.aio.server()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(Bare(), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    say(listen=f"127.0.0.1:{port}")
    await server.wait_for_termination()
    return 0


def main() -> int:
    """The program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=("lockstep", "paced", "bare"))
    parser.add_argument("--messages", type=Path)
    parser.add_argument("--uvloop", action="store_true", help="the loop of `bare`")
    parser.add_argument("--step", type=float, default=0.01, help="seconds, of `paced`")
    options, rest = parser.parse_known_args()
    if options.kind == "bare":
        run = event_loop.run if options.uvloop else asyncio.run
        return run(serve_bare(options.messages.read_bytes()))
    return serve_stub(options.kind, options.step, rest)


if __name__ == "__main__":
    sys.exit(main())
