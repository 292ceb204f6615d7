"""Traffic that never hits: what looking and keeping costs where nothing is ever found."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence

from bench.arms.arm import NotRun
from bench.duress import Bar
from bench.load import Words
from bench.reusing.figures import middle, ratios
from bench.reusing.servers import Asker, MeasuredServer, require_ok

SHARE_MOST = 0.005  # of the time of steps
INDEX = "kvledger_prefix_index_seconds_total"
STEPS = "kvledger_engine_step_seconds_total"
# Pairs of the A/B run that do not count: caches and threads settle.
_WARMUP = 1


async def drive(
    asker: Asker, prompts: Sequence[Sequence[int]], concurrency: int, output: int
) -> float:
    """Sends all, so many at once; seconds that it took. Raises NotRun if one of them hit."""
    waiting = iter(prompts)
    started = time.perf_counter()

    async def worker() -> None:
        for prompt in waiting:
            answer = await asker.ask(prompt, output)
            require_ok([answer])
            if answer.cached_tokens:
                raise NotRun(f"{answer.cached_tokens} tokens of a new prompt were reused")

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return time.perf_counter() - started


async def measure(
    on: MeasuredServer, off: MeasuredServer, options: argparse.Namespace
) -> list[Bar]:
    """Pairs of the same traffic on two servers, the order changing from pair to pair."""
    words = Words(options.seed, (await on.client.model()).vocabulary_tokens)
    askers = {on: on.asker(), off: off.asker()}
    seconds: dict[MeasuredServer, list[float]] = {on: [], off: []}
    shares: list[float] = []
    on.suspend()
    off.suspend()
    try:
        for pair in range(-_WARMUP, options.pairs):
            prompts = [words.draw(options.prompt) for _ in range(options.requests)]
            for server in (on, off) if pair % 2 else (off, on):
                server.resume()
                index, steps = await server.metric(INDEX), await server.metric(STEPS)
                took = await drive(askers[server], prompts, options.concurrency, options.output)
                index = await server.metric(INDEX) - index
                steps = await server.metric(STEPS) - steps
                server.suspend()
                if pair < 0:
                    continue
                seconds[server].append(took)
                if server is on:
                    shares.append(index / steps)
                    print(f"  {index * 1e3:.2f} ms of {steps:.2f} s: {shares[-1]:.4%}", flush=True)
    finally:
        for asker in askers.values():
            await asker.close()
    part = middle(shares)
    ratio = ratios(seconds[on], seconds[off])
    print(f"time of the same traffic, reuse on over off: {ratio.text()}")
    print(f"on {middle(seconds[on]).text(2)} s, off {middle(seconds[off]).text(2)} s")
    return [
        Bar(
            "index over steps",
            part.high <= SHARE_MOST,
            f"{part.median:.4%} ({part.low:.4%} to {part.high:.4%}, {part.count})",
            f"at most {SHARE_MOST:.1%}",
        )
    ]
