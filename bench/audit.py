"""Whether a tenant can tell by time what another one has sent: an audit of a running server.

    python -m bench.audit [--requests 500] [--prompt 1000] [--quick]
    python -m bench.audit --random-model --runs 10
    python -m bench.audit --server ADDRESS --token-file FILE_A --token-file FILE_B

The method of "Auditing Prompt Caching in Language Model APIs" (arXiv 2502.07776). Tenant B sends
prompts, one at a time, in random order: half of them begin as a prompt that tenant A has sent just
before, half as none. A sends before each of them, so that nothing but the text differs. If the
times to B's first token could be of one distribution (two-sample Kolmogorov-Smirnov), B learns
nothing. A third kind begins as a prompt that B itself has sent just before: there the same test
must see it, or it sees nothing at all. Without --server it starts one, with two tenants, on a unix
socket; with --random-model one that computes a small model with random weights, for which ten runs
take minutes. Where times are equal the test says they differ once in a hundred runs: of ten runs,
one may.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from bench.arms.arm import NotRun
from bench.arms.kvledger import generate_request
from bench.arms.process import ServerProcess, run_main
from bench.kolmogorov import distance, p_value
from bench.load import Words, percentile
from bench.random_model import DESCRIBED, write_random_model
from bench.serve import count
from kvledger.tenants import editing
from kvledger.v1 import generation_pb2_grpc, models_pb2, models_pb2_grpc

# What the audit wants: no difference between tenants, and a plain one within a tenant.
P_BETWEEN = 0.01
P_WITHIN = 1e-8
# Share of a prompt that was sent before.
_PREFIX = 0.95
# In so many runs, one may be wrong by chance.
_RUNS_FOR_A_CHANCE = 10
# How finely the smallest leak is looked for: steps of what a whole prefix saves.
_LEAK_STEPS = 200
_PATIENCE = 300.0
KINDS = ("other", "fresh", "own")

# Seconds to the first token and tokens reused, of a tenant's prompt.
Ask = Callable[[str, Sequence[int]], Awaitable[tuple[float, int]]]


@dataclass
class Sample:
    """Of one kind: seconds to the first token, and tokens of the prompts that were reused."""

    seconds: list[float] = field(default_factory=list)
    reused: list[int] = field(default_factory=list)
    # Prompts of which more was reused than B itself had sent.
    foreign: int = 0

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.seconds)


Samples = dict[str, Sample]


class Beginnings:
    """The first tokens of what B has sent: prompts drawn by chance begin alike now and then."""

    _TOKENS = 4

    def __init__(self) -> None:
        self._sent: set[tuple[int, ...]] = set()

    def add(self, prompt: Sequence[int]) -> None:
        """One more prompt."""
        self._sent.update(tuple(prompt[: count + 1]) for count in range(self._TOKENS))

    def common(self, prompt: Sequence[int]) -> int:
        """Tokens that one of them begins with alike, up to 4."""
        alike = (tuple(prompt[: count + 1]) in self._sent for count in range(self._TOKENS))
        return sum(itertools.takewhile(bool, alike))


def draw_order(requests: int, within: int, seed: int) -> list[str]:
    """The kinds of all requests: `requests` of other and of fresh, `within` of own, shuffled."""
    order = ["other"] * requests + ["fresh"] * requests + ["own"] * within
    random.Random(seed).shuffle(order)
    return order


async def collect(
    ask: Ask, words: Words, prompt: int, order: Sequence[str], sent: Beginnings | None = None
) -> Samples:
    """One request of B for each kind in `order`, each after one that prepares it.

    `sent` has what B has sent to this server before.
    """
    sent = Beginnings() if sent is None else sent
    samples: Samples = {kind: Sample() for kind in KINDS}
    shared = int(prompt * _PREFIX)
    for kind in order:
        prefix = words.draw(shared)
        before = prefix if kind != "fresh" else words.draw(shared)
        await ask("B" if kind == "own" else "A", before + words.draw(prompt - shared))
        seconds, reused = await ask("B", prefix + words.draw(prompt - shared))
        samples[kind].seconds.append(seconds)
        samples[kind].reused.append(reused)
        samples[kind].foreign += kind != "own" and reused > sent.common(prefix)
        sent.add(prefix)
    return samples


def smallest_leak(samples: Samples) -> float | None:
    """Seconds by which prompts that A sent would have to be faster for the audit to see it.

    None if not even what a whole prefix saves would be seen.
    """
    other, fresh = samples["other"].seconds, samples["fresh"].seconds
    saved = samples["fresh"].median - samples["own"].median
    for step in range(1, _LEAK_STEPS + 1):
        leak = saved * step / _LEAK_STEPS
        if p_value([seconds - leak for seconds in other], fresh) < P_BETWEEN:
            return leak
    return None


def verdict(samples: Samples) -> list[str]:
    """What is wrong with a run; nothing if the tenants are apart and the audit can see."""
    wrong = faults(samples)
    if differs(samples):
        p = p_value(samples["other"].seconds, samples["fresh"].seconds)
        wrong.append(f"the times of what A had sent differ: p = {p:.2g}")
    return wrong


def differs(samples: Samples) -> bool:
    """Whether the times of what A had sent could hardly be those of what nobody had."""
    return p_value(samples["other"].seconds, samples["fresh"].seconds) < P_BETWEEN


def faults(samples: Samples) -> list[str]:
    """What no chance excuses: tokens of another's that were reused, or an audit that is blind."""
    wrong = []
    fresh = samples["fresh"].seconds
    if samples["other"].foreign or samples["fresh"].foreign:
        wrong.append("a prompt of B began with cached tokens that B had not sent")
    if not all(samples["own"].reused):
        wrong.append("a prompt of B did not begin with what B had sent: nothing is shown")
    if (p := p_value(samples["own"].seconds, fresh)) > P_WITHIN:
        wrong.append(f"the audit cannot tell what B itself had sent: p = {p:.2g}; nothing is shown")
    return wrong


def verdict_of(runs: Sequence[Samples]) -> list[str]:
    """What is wrong with all runs together: one in ten may call equal times different."""
    wrong = [sentence for samples in runs for sentence in faults(samples)]
    different = sum(map(differs, runs))
    allowed = len(runs) // _RUNS_FOR_A_CHANCE
    if different > allowed:
        wrong.append(
            f"the times of what A had sent differ in {different} of {len(runs)} runs; "
            f"{allowed} may be chance"
        )
    return wrong


def row(samples: Samples) -> str:
    """A run in one line: medians, both tests, and the smallest leak that it would see."""
    fresh, leak = samples["fresh"], smallest_leak(samples)
    medians = "".join(f"{samples[kind].median * 1e3:9.2f}" for kind in KINDS)
    between, within = (p_value(samples[kind].seconds, fresh.seconds) for kind in ("other", "own"))
    saved = fresh.median - samples["own"].median
    seen = "more than all" if leak is None else f"{leak * 1e3:.2f} ms, {leak / saved:.1%}"
    return f"{medians}{between:10.3f}{within:12.1e}   {seen}"


def report_of(runs: Sequence[Samples]) -> str:
    """The table of several runs, and all of them as one."""
    head = "".join(f"{kind:>9}" for kind in KINDS)
    lines = [
        f"n = {len(runs[0]['other'].seconds)} + {len(runs[0]['fresh'].seconds)}, own "
        f"{len(runs[0]['own'].seconds)}; TTFT of B, p50, ms",
        f"run{head}{'p other':>10}{'p own':>12}   would see",
        *(f"{number:3}{row(samples)}" for number, samples in enumerate(runs, 1)),
        f"{sum(not differs(samples) for samples in runs)} of {len(runs)} runs: p > {P_BETWEEN}",
        f"all{row(joined(runs))}",
    ]
    return "\n".join(lines)


def joined(runs: Sequence[Samples]) -> Samples:
    """The samples of all runs."""
    samples: Samples = {kind: Sample() for kind in KINDS}
    for run in runs:
        for kind, sample in run.items():
            samples[kind].seconds += sample.seconds
            samples[kind].reused += sample.reused
            samples[kind].foreign += sample.foreign
    return samples


def report(samples: Samples) -> str:
    """The table, the tests, and what they could see."""
    fresh = samples["fresh"]
    lines = [f"{'TTFT of B, ms':34}{'n':>6}{'p10':>9}{'p50':>9}{'p90':>9}{'reused':>9}"]
    meaning = {"other": "begins as A had sent", "fresh": "begins as nobody had", "own": "as B had"}
    for kind, sample in samples.items():
        times = "".join(f"{percentile(sample.seconds, p) * 1e3:9.1f}" for p in (10, 50, 90))
        reused = statistics.mean(sample.reused)
        lines.append(f"{meaning[kind]:34}{len(sample.seconds):6}{times}{reused:9.1f}")
    for kind, wanted in (("other", f"> {P_BETWEEN}"), ("own", f"< {P_WITHIN}")):
        seconds = samples[kind].seconds
        far, p = distance(seconds, fresh.seconds), p_value(seconds, fresh.seconds)
        lines.append(f"{kind} against fresh: KS distance {far:.4f}, p = {p:.3g} (wanted {wanted})")
    saved = fresh.median - samples["own"].median
    leak = smallest_leak(samples)
    if leak is None:
        lines.append("smallest leak that it would see: more than the whole prefix")
    else:
        lines.append(
            f"smallest leak that it would see: {leak * 1e3:.1f} ms, {leak / saved:.1%} of the "
            f"{saved * 1e3:.0f} ms that the whole prefix saves"
        )
    return "\n".join(lines)


class Client:
    """Two tenants of one server."""

    def __init__(self, address: str, tokens: Sequence[str]) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=(("grpc.enable_retries", 0),))
        self._shown = {
            name: (("authorization", f"Bearer {token}"),)
            for name, token in zip("AB", tokens, strict=True)
        }
        stub: Any = generation_pb2_grpc.GenerationServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._generate = stub.Generate

    async def vocabulary(self) -> int:
        """Token ids of the model, once the server answers."""
        stub: Any = models_pb2_grpc.ModelServiceStub(self._channel)  # type: ignore[no-untyped-call]
        request = models_pb2.GetModelRequest()
        answer = await stub.GetModel(
            request, metadata=self._shown["B"], wait_for_ready=True, timeout=_PATIENCE
        )
        return int(answer.model.vocabulary_tokens)

    async def ask(self, tenant: str, prompt: Sequence[int]) -> tuple[float, int]:
        """Sends one prompt for one token: see Ask."""
        request, first, reused = generate_request(prompt, 1), 0.0, 0
        sent = time.perf_counter()
        async for response in self._generate(
            request, metadata=self._shown[tenant], timeout=_PATIENCE
        ):
            if response.HasField("delta") and not first:
                first = time.perf_counter() - sent
            elif response.HasField("finished"):
                reused = response.finished.usage.cached_prompt_tokens
        return first, reused

    async def close(self) -> None:
        """Ends the connection."""
        await self._channel.close()


async def started(
    folder: Path, options: argparse.Namespace
) -> tuple[ServerProcess, str, list[str]]:
    """A server of its own with two tenants: the process, its address, and their tokens."""
    path, tokens = folder / "tenants.json", []
    for name in ("a", "b"):
        token = editing.change(
            path,
            lambda values, name=name: editing.add(values, name, ("client",), (), True),
            create=True,
        )
        tokens.append(str(token))
    command = [
        *(sys.executable, "-m", "kvledger", "serve", "--tenants", str(path)),
        *("--listen", f"unix:{folder / 'audit.sock'}", "--operators-listen", "none"),
        *("--model", options.model, "--threads", str(options.threads), "--log-format", "json"),
    ]
    process = ServerProcess(command)
    for _ in range(int(_PATIENCE / 0.05)):
        process.check_alive()
        for line in process.said().splitlines():
            if line.startswith("{") and (event := json.loads(line))["event"] == "serving":
                return process, str(event["listen"]), tokens
        await asyncio.sleep(0.05)
    raise NotRun(f"not ready after {_PATIENCE:.0f} s: {process.last_words()}")


async def audit(options: argparse.Namespace) -> list[Samples]:
    """Collects the samples of all runs from the server that the options name, or one of its own."""
    with tempfile.TemporaryDirectory(prefix="kvledger-audit-") as folder:
        process: ServerProcess | None = None
        if options.server is None:
            if options.random_model:
                options.model = str(write_random_model(Path(folder) / "random-model"))
            process, address, tokens = await started(Path(folder), options)
        else:
            address = options.server
            tokens = [path.read_text().strip() for path in options.token_file]
        client = Client(address, tokens)
        try:
            vocabulary = await client.vocabulary()
            sent = Beginnings()
            return [
                await one_run(client, Words(options.seed + run, vocabulary), options, run, sent)
                for run in range(options.runs)
            ]
        finally:
            await client.close()
            if process is not None:
                await process.stop()


async def one_run(
    client: Client, words: Words, options: argparse.Namespace, number: int, sent: Beginnings
) -> Samples:
    """A run, counted from 0, with words and an order of its own."""
    for tenant in ("A", "B", "A", "B"):  # do not count
        prompt = words.draw(options.prompt)
        await client.ask(tenant, prompt)
        if tenant == "B":
            sent.add(prompt)
    order = draw_order(options.requests, max(40, options.requests // 4), options.seed + number)
    began = time.monotonic()
    samples = await collect(client.ask, words, options.prompt, order, sent)
    if options.runs > 1:
        print(f"{number + 1:3}{row(samples)}   {time.monotonic() - began:.0f} s", flush=True)
    return samples


async def run(options: argparse.Namespace) -> int:
    """The whole program; 0 if the tenants are apart, 1 if not, or if nothing is shown."""
    began = time.monotonic()
    try:
        runs = await audit(options)
    except (NotRun, OSError) as error:
        print(f"bench.audit: {error}", file=sys.stderr)
        return 1
    except grpc.aio.AioRpcError as error:
        print(f"bench.audit: {error.code().name}: {error.details()}", file=sys.stderr)
        return 1
    several = len(runs) > 1
    model = f"{DESCRIBED}; " if options.random_model else ""
    print(
        f"{model}prompts of {options.prompt} tokens, {_PREFIX:.0%} of them sent before; seed "
        f"{options.seed}; {time.monotonic() - began:.0f} s\n"
        f"{report_of(runs) if several else report(runs[0])}"
    )
    wrong = verdict_of(runs) if several else verdict(runs[0])
    print("\n".join(f"WRONG: {sentence}" for sentence in wrong) or "the tenants are apart")
    return 1 if wrong else 0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=count, help="of B, of each of two kinds (500)")
    parser.add_argument("--prompt", type=count, help="tokens of a prompt (1000)")
    parser.add_argument("--quick", action="store_true", help="60 of each kind, of 200 tokens")
    parser.add_argument("--server", help="host:port or unix:/path of one that runs, without TLS")
    parser.add_argument(
        "--token-file", type=Path, action="append", default=[], help="twice: of A and of B"
    )
    parser.add_argument("--model", default="smollm2-135m-instruct", help="as `kvledger serve` has")
    parser.add_argument("--random-model", action="store_true", help="a small one, made for this")
    parser.add_argument("--runs", type=count, default=1, help="one after the other")
    parser.add_argument("--threads", type=count, default=2)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    if (options.server is None) != (not options.token_file) or len(options.token_file) not in (
        0,
        2,
    ):
        parser.error("--server goes with --token-file twice, for two tenants")
    if options.random_model and options.server is not None:
        parser.error("--random-model is for a server of its own, not for --server")
    options.requests = options.requests or (60 if options.quick else 500)
    options.prompt = options.prompt or (200 if options.quick else 1000)
    return options


if __name__ == "__main__":
    sys.exit(run_main(run(parse())))
