"""Twice what a server can do, for minutes: goodput, refusals, memory, and the way back.

    python -m bench.overload [--seconds 300] [--ttft 5 --tpot 0.25] [--prompt 64 --output 32]
                             [--max-sequences 8 --max-queued 4] [--serve="OPTIONS"] [--json FILE]

First the most goodput of the server is found, in closed loops with more and more requests at once.
Then come, in one open loop without a pause: half of that rate, twice that rate for --seconds, and
half of it again. Whoever finds no place is refused, and is not asked again.

The bound on the queue alone does not keep answers in time: sequences that run share the steps, and
a prompt waits for its turn among those that decode. What is in the server altogether does, which is
--max-sequences and --max-queued: divided by the requests a second that it completes, it is the time
that a request takes. docs/load.md has the bars and the definitions.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench import machine, report
from bench.arms.arm import ArmSettings, NotRun, default_cache, default_cores
from bench.arms.kvledger import Kvledger
from bench.arms.process import run_main
from bench.company import Company
from bench.duress import (
    Answer,
    Bar,
    MemoryWatch,
    Shape,
    bars_text,
    due_times,
    good_tokens_per_second,
    group_bytes,
    memory_growth,
    offer,
    saturate,
)
from bench.load import OK, CallFailed, Client, Limits, Summary, Words, percentile, summarize
from bench.serve import count, positive, warm_up
from kvledger import _core

REFUSED = "RESOURCE_EXHAUSTED"
GOODPUT_LEAST = 0.9  # of the best
REFUSAL_STEPS = 2.0  # median steps that the p99 of refusals may take
GROWTH_MOST = 0.03  # of memory, over the overload
RECOVERY_MOST = 1.2  # median TTFT after the overload over that before
RECOVERY_SECONDS = 10.0  # until then
OVERLOAD = 2.0  # offered, over the best rate
NORMAL = 0.5  # the same before and after
# What does not count at the beginning of a phase: the server fills. In seconds, and as a share.
_SETTLING = 5.0
_SETTLING_SHARE = 0.25
# Added to the run's seed.
_NORMAL_SEED, _OVERLOAD_SEED, _WARMUP_SEED = 1, 2, 1 << 20


@dataclass
class Overload:
    """What the phases of a run showed; times in s of perf_counter."""

    best: dict[int, float]  # tokens/s of goodput by requests at once
    before: list[Answer] = field(default_factory=list)
    during: list[Answer] = field(default_factory=list)
    after: list[Answer] = field(default_factory=list)
    started: float = 0.0  # the overload
    ended: float = 0.0
    memory: list[tuple[float, int]] = field(default_factory=list)

    @property
    def most(self) -> float:
        """The best goodput, tokens/s."""
        return max(self.best.values())


def settled(start: float, end: float) -> float:
    """When a phase from `start` to `end` begins to count."""
    return start + min(_SETTLING, (end - start) * _SETTLING_SHARE)


def steps_until_full(sequences: int, queued: int) -> list[int]:
    """Requests at once to find the best goodput with: few, doubled, up to those that may run.

    And half of those more that may wait; as many as may would be refused now and then.
    """
    doubled = itertools.takewhile(lambda n: n < sequences, (2**power for power in range(1, 32)))
    return sorted({*list(doubled)[-2:], sequences, sequences + queued // 2})


async def find_best(
    client: Client, words: Words, shape: Shape, limits: Limits, options: argparse.Namespace
) -> dict[int, float]:
    """Goodput in tokens/s for each number of requests at once, printed as it is found."""
    found: dict[int, float] = {}
    for concurrency in steps_until_full(options.max_sequences, options.max_queued):
        started = time.perf_counter()
        answers = await saturate(client, words, shape, concurrency, options.capacity_seconds)
        ended = started + options.capacity_seconds
        begin = settled(started, ended)
        found[concurrency] = good_tokens_per_second(answers, limits, begin, ended)
        ttft = percentile((a.record.ttft for a in answers if a.record.ttft is not None), 90)
        print(
            f"{concurrency:4} at once: goodput {found[concurrency]:6.1f} tokens/s, "
            f"TTFT p90 {report.milliseconds(ttft)} ms",
            flush=True,
        )
    return found


async def overload(
    client: Client, words: Words, shape: Shape, result: Overload, options: argparse.Namespace
) -> None:
    """The phases before, during and after, one behind the other without a pause."""
    best = result.most / shape.output  # requests a second
    calm = RECOVERY_SECONDS + options.normal_seconds
    begin = time.perf_counter()
    result.started = begin + calm
    result.ended = result.started + options.seconds
    # Before and after come at the same times: half of a median's noise is that of arrivals.
    normal = (NORMAL * best, calm, options.seed + _NORMAL_SEED)
    heavy = (OVERLOAD * best, options.seconds, options.seed + _OVERLOAD_SEED)
    before = await offer(client, words, shape, due_times(begin, *normal))
    during = await offer(client, words, shape, due_times(result.started, *heavy))
    after = await offer(client, words, shape, due_times(result.ended, *normal))
    result.before = list(await asyncio.gather(*before))
    result.during = list(await asyncio.gather(*during))
    result.after = list(await asyncio.gather(*after))


def median_ttft(answers: Sequence[Answer], start: float) -> float:
    """Of the requests due from `start` on."""
    records = (a.record for a in answers if a.record.due >= start and a.record.status == OK)
    return percentile((r.ttft for r in records if r.ttft is not None), 50)


def summary_of(answers: Sequence[Answer], limits: Limits) -> Summary:
    """The usual figures."""
    return summarize([answer.record for answer in answers], limits)


def bars(result: Overload, limits: Limits) -> list[Bar]:
    """What the run had to show. A figure that is missing fails."""
    during = summary_of(result.during, limits)
    begin = settled(result.started, result.ended)
    goodput = good_tokens_per_second(result.during, limits, begin, result.ended)
    refusals = [a.ended - a.sent for a in result.during if a.record.status == REFUSED]
    refusal, step = percentile(refusals, 99), during.itl["p50"]
    growth = memory_growth(result.memory, result.started, result.ended)
    calm = result.started - RECOVERY_SECONDS
    calm_began = min((a.record.due for a in result.before), default=calm) + RECOVERY_SECONDS
    before = median_ttft(result.before, calm_began)
    after = median_ttft(result.after, result.ended + RECOVERY_SECONDS)
    answers = (*result.before, *result.during, *result.after)
    others = sum(a.record.status not in (OK, REFUSED) for a in answers)
    calm_refused = sum(a.record.status == REFUSED for a in result.before)
    return [
        Bar(
            "goodput",
            goodput >= GOODPUT_LEAST * result.most,
            f"{goodput:.1f} tokens/s, {goodput / result.most:.0%} of the best",
            f"at least {GOODPUT_LEAST:.0%} of {result.most:.1f}",
        ),
        Bar(
            "refusals are answered at once",
            refusal <= REFUSAL_STEPS * step,
            f"p99 {report.milliseconds(refusal)} ms of {len(refusals)}",
            f"at most {REFUSAL_STEPS:g} steps of {report.milliseconds(step)} ms, and some",
        ),
        Bar(
            "memory is flat",
            growth < GROWTH_MOST,
            f"{growth:+.2%}, the overload's end against its beginning",
            f"less than {GROWTH_MOST:.0%} more",
        ),
        Bar(
            "back to normal",
            after <= RECOVERY_MOST * before,
            f"TTFT p50 {report.milliseconds(after)} ms, before {report.milliseconds(before)} ms",
            f"from {RECOVERY_SECONDS:g} s after the overload on at most {RECOVERY_MOST:g} times",
        ),
        Bar(
            "answered or refused, nothing else",
            others == 0 and calm_refused == 0,
            f"{others} ended otherwise, {calm_refused} were refused before the overload",
            "none of either",
        ),
    ]


async def measure(arm: Kvledger, options: argparse.Namespace) -> tuple[list[Bar], dict[str, Any]]:
    """Runs all phases and prints what they showed; returns the bars and what --json gets."""
    client = arm.client
    model = await client.model()
    words = Words(options.seed, model.vocabulary_tokens)
    shape = Shape(options.prompt, options.output, options.timeout)
    limits = Limits(options.ttft, options.tpot)
    await warm_up(client, Words(options.seed + _WARMUP_SEED, model.vocabulary_tokens), 2)
    result = Overload(await find_best(client, words, shape, limits, options))
    if result.most <= 0:
        raise NotRun("no request kept the limits; give others with --ttft and --tpot")
    async with MemoryWatch(lambda: group_bytes(arm.group)) as watch:
        await overload(client, words, shape, result, options)
    result.memory = watch.samples
    content: dict[str, Any] = {"model": model.id, "weights": model.weights, "best": result.best}
    for name in ("before", "during", "after"):
        summary = summary_of(getattr(result, name), limits)
        print(f"\n--- {name}\n{report.summary_text(summary, limits)}")
        content[name] = summary.as_json()
    # A machine that became slower meanwhile looks like a server that bears no overload.
    words = Words(options.seed + 1, model.vocabulary_tokens)
    again, ended = time.perf_counter(), time.perf_counter() + options.capacity_seconds
    at_once = max(result.best, key=lambda n: result.best[n])
    answers = await saturate(client, words, shape, at_once, options.capacity_seconds)
    content["best_again"] = good_tokens_per_second(answers, limits, settled(again, ended), ended)
    print(f"\nthe best, again after it all: {content['best_again']:.1f} tokens/s\n")
    found = bars(result, limits)
    content["limits"] = asdict(limits)
    content["bars"] = [asdict(bar) for bar in found]
    content["memory"] = [(at - result.started, size) for at, size in result.memory]
    content["refusals"] = [
        round(a.ended - a.sent, 6) for a in result.during if a.record.status == REFUSED
    ]
    return found, content


async def run(options: argparse.Namespace) -> int:
    """The whole program; returns its exit status, which is 0 only if all bars were passed."""
    cores = default_cores(options.threads)
    settings = ArmSettings(default_cache(), Path(options.model), cores, options.threads)
    header = machine.header(_core.CpuKernels(options.threads))
    bounds = [f"--max-sequences={options.max_sequences}", f"--max-queued={options.max_queued}"]
    arm = Kvledger(settings, [*bounds, *shlex.split(options.serve)])
    workload = (
        f"prompts of {options.prompt}, answers of {options.output} tokens; good within TTFT "
        f"{options.ttft:g} s and TPOT {options.tpot:g} s; seed {options.seed}"
    )
    print(f"{header}\n{arm.described}\n{workload}\n", flush=True)
    try:
        await arm.start()
        company = Company(cores, [arm.group])
        found, content = await measure(arm, options)
        content["others"] = company.share()
        print(bars_text(found))
        print("\n" + company.sentence())
    except (NotRun, CallFailed, ValueError) as error:
        print(f"bench.overload: {error}", file=sys.stderr)
        return 1
    finally:
        await arm.stop()
    if options.json is not None:
        about = {"command": sys.argv[1:], "machine": header, "server": arm.described}
        about |= {"workload": workload, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        report.save_json(options.json, {**about, **content})
        print(f"saved: {options.json}")
    return 0 if all(bar.passed for bar in found) else 1


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=positive, default=300.0, help="of overload")
    parser.add_argument(
        "--normal-seconds",
        type=positive,
        default=40.0,
        help=f"before and after it, besides {RECOVERY_SECONDS:g} that do not count",
    )
    parser.add_argument(
        "--capacity-seconds", type=positive, default=30.0, help="for each number at once"
    )
    parser.add_argument("--prompt", type=count, default=64, help="tokens of a prompt")
    parser.add_argument("--output", type=count, default=32, help="tokens of an answer")
    parser.add_argument("--ttft", type=positive, default=5.0, help="limit for goodput, seconds")
    parser.add_argument("--tpot", type=positive, default=0.25, help="limit for goodput, seconds")
    parser.add_argument("--timeout", type=positive, default=120.0, help="seconds for a request")
    parser.add_argument("--max-sequences", type=count, default=8, help="of the server")
    parser.add_argument("--max-queued", type=count, default=4, help="of the server")
    parser.add_argument("--serve", default="", metavar="OPTIONS", help="more of the server's")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--threads", type=count, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(run_main(run(parse())))
