"""Warm against cold: the time to the first token of a prompt whose beginning is there."""

from __future__ import annotations

import argparse

from bench import report
from bench.arms.arm import NotRun
from bench.duress import Bar
from bench.load import Words
from bench.reusing.figures import middle, ratios
from bench.reusing.servers import MeasuredServer, require_ok

TTFT_MOST = 0.15  # warm over cold


async def measure(server: MeasuredServer, options: argparse.Namespace) -> list[Bar]:
    """Pairs, each with a beginning of its own: the first of a pair computes it, the second not."""
    words = Words(options.seed, (await server.client.model()).vocabulary_tokens)
    asker = server.asker()
    cold, warm = [], []
    try:
        for pair in range(-1, options.pairs):  # the first one warms the server up
            shared = words.draw(options.shared)
            answers = [await asker.ask(shared + words.draw(options.own), 1) for _ in range(2)]
            require_ok(answers)
            if answers[0].cached_tokens != 0 or answers[1].cached_tokens < options.shared - 31:
                raise NotRun(f"reused {[answer.cached_tokens for answer in answers]} tokens")
            if pair >= 0:
                cold.append(answers[0].ttft)
                warm.append(answers[1].ttft)
    finally:
        await asker.close()
    ratio = ratios(warm, cold)
    print(
        f"TTFT of {options.shared} shared and {options.own} own tokens, {options.pairs} pairs: "
        f"cold {report.milliseconds(middle(cold).median)} ms, "
        f"warm {report.milliseconds(middle(warm).median)} ms; "
        f"warm / cold {ratio.text()}"
    )
    bar = Bar(
        "warm TTFT", ratio.high <= TTFT_MOST, ratio.text(), f"at most {TTFT_MOST:g} times cold"
    )
    return [bar]
