"""Many streams with one beginning: throughput with reuse against without."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence

from bench.arms.arm import NotRun
from bench.duress import Bar
from bench.load import Words
from bench.reusing.figures import middle, ratios, share
from bench.reusing.servers import SCOPE_NONE, Asker, MeasuredServer, require_ok

THROUGHPUT_LEAST = 3.0  # with reuse over without


async def together(
    asker: Asker, prompts: Sequence[Sequence[int]], output: int, scope: int = 0
) -> tuple[float, float]:
    """Sends all at once: (output tokens per second, share of prompt tokens that was reused)."""
    started = time.perf_counter()
    answers = await asyncio.gather(*(asker.ask(prompt, output, scope) for prompt in prompts))
    seconds = time.perf_counter() - started
    require_ok(answers)
    tokens = sum(len(answer.arrivals) for answer in answers)
    reused = sum(answer.cached_tokens for answer in answers)
    return tokens / seconds, share(reused, sum(answer.prompt_tokens for answer in answers))


async def measure(
    on: MeasuredServer, off: MeasuredServer, options: argparse.Namespace
) -> list[Bar]:
    """Rounds of: cached, cold together, CACHE_SCOPE_NONE on the same server, --prefix-reuse off."""
    words = Words(options.seed, (await on.client.model()).vocabulary_tokens)
    found: dict[str, list[float]] = {"cached": [], "cold": [], "none": [], "off": []}
    askers = (on.asker(), off.asker())
    try:
        for server, asker in zip((on, off), askers, strict=True):
            require_ok([await asker.ask(words.draw(64), 16)])
            server.suspend()
        for _ in range(options.rounds):
            await one_round(on, off, askers, words, found, options)
    finally:
        for asker in askers:
            await asker.close()
    for name, values in found.items():
        print(f"{name:7} {middle(values).text(1)} output tokens/s")
    bars = []
    for name, meaning in (("cached", "beginning cached"), ("cold", "all cold at once")):
        for against, other in (("off", "--prefix-reuse off"), ("none", "CACHE_SCOPE_NONE")):
            ratio = ratios(found[name], found[against])
            bars.append(
                Bar(
                    f"{meaning}, over {other}",
                    ratio.low >= THROUGHPUT_LEAST,
                    ratio.text(2),
                    f"at least {THROUGHPUT_LEAST:g} times",
                )
            )
    return bars


async def one_round(
    on: MeasuredServer,
    off: MeasuredServer,
    askers: tuple[Asker, Asker],
    words: Words,
    found: dict[str, list[float]],
    options: argparse.Namespace,
) -> None:
    """All arms once, each server stopped while the other works."""

    def prompts(shared: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [shared + words.draw(options.own) for _ in range(options.streams)]

    def note(name: str, result: tuple[float, float], least: float, most: float) -> None:
        speed, reused = result
        if not least <= reused <= most:
            raise NotRun(f"{name}: {reused:.1%} of the prompts were reused")
        found[name].append(speed)
        print(f"  {name:7} {speed:6.1f} tokens/s, {reused:.1%} reused", flush=True)

    shared = words.draw(options.shared)
    on.resume()
    require_ok([await askers[0].ask(shared + words.draw(options.own), 1)])
    whole = options.shared / (options.shared + options.own)
    note("cached", await together(askers[0], prompts(shared), options.output), 0.95 * whole, 1.0)
    cold = prompts(words.draw(options.shared))
    # One of them has to compute it.
    least = 0.95 * whole * (1 - 1 / options.streams)
    note("cold", await together(askers[0], cold, options.output), least, whole)
    fresh = prompts(words.draw(options.shared))
    note("none", await together(askers[0], fresh, options.output, SCOPE_NONE), 0.0, 0.0)
    on.suspend()
    off.resume()
    note("off", await together(askers[1], prompts(shared), options.output), 0.0, 0.0)
    off.suspend()
