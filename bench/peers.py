"""kvledger beside other servers: same model, same prompts, same processors, in turn in one run.

    python -m bench.peers setup llama.cpp vllm openvino        (once; each takes 5 to 50 minutes)
    python -m bench.peers run [llama.cpp vllm openvino] [--scenarios one eight ...] [--lengths CSV]
                              [--repeats 3] [--threads 2] [--json FILE]

setup builds or installs each peer in a folder of its own ($BENCH_PEERS, else kvledger-peers in the
user's cache). run starts all servers on the same processors, compares their greedy answers to one
question, and then repeats: every scenario, each server in turn, one at a time. It prints medians,
and ratios kvledger / peer as the median (least to most) of the ratios of each repeat. Above 1 is
better for tokens/s, below 1 for times. A server that cannot run has rows that say why.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import machine, report
from bench.arms.arm import Arm, ArmSettings, NotRun, default_cache, default_cores
from bench.arms.kvledger import Kvledger, KvledgerBf16, KvledgerClient
from bench.arms.llama_cpp import LlamaCpp
from bench.arms.openvino import OpenVino
from bench.arms.process import run_main
from bench.arms.vllm import Vllm
from bench.company import Company, group_seconds
from bench.load import (
    OK,
    STOPPED,
    CallFailed,
    Client,
    Conversation,
    Interference,
    InterferencePlan,
    Summary,
    Words,
    chats,
    closed_loop,
    interference,
    percentile,
    read_trace,
    single_requests,
    summarize,
)
from kvledger import _core
from kvledger.errors import ModelRefused
from kvledger.models.catalogue import model_path

PEERS: dict[str, type[Arm]] = {arm.name: arm for arm in (LlamaCpp, Vllm, OpenVino, KvledgerBf16)}
OURS = Kvledger.name
QUESTION = "Name the planets of the solar system, beginning with the one nearest to the sun."
ANSWER_TOKENS = 24
# With fewer equal tokens at the beginning of the answer, a peer is taken to compute another model.
EQUAL_TOKENS_MIN = 8
TIMEOUT = 600.0
# A server that uses more of a processor than this while it has no requests disturbs the others.
IDLE_SHARE_MAX = 0.05
# Seconds from a server's waking to its first request.
SETTLE = 0.5

Metrics = dict[str, float]


@dataclass
class Outcome:
    """What one server did in one scenario once."""

    metrics: Metrics
    statuses: dict[str, int]
    reasons: dict[str, str]


Run = Callable[[Client, Words], Awaitable[Outcome]]


@dataclass(frozen=True)
class Scenario:
    """A workload by name."""

    name: str
    meaning: str
    run: Run


@dataclass
class Entry:
    """An arm and what is known of it."""

    arm: Arm
    not_run: str = ""
    answer: list[int] = field(default_factory=list)
    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)  # by scenario, one a repeat


def load_metrics(summary: Summary) -> Metrics:
    """The figures of a load scenario; times in milliseconds."""
    return {
        "tokens/s": summary.output_tokens_per_second,
        "TTFT p50": summary.ttft["p50"] * 1e3,
        "TPOT p50": summary.tpot["p50"] * 1e3,
        "ITL p99": summary.itl["p99"] * 1e3,
        "stall": summary.longest_stall * 1e3,
    }


def interference_metrics(found: Interference) -> Metrics:
    """The figures of the interference scenario, in milliseconds."""
    return {
        "gap before": percentile(found.before, 50) * 1e3,
        "gap p50": percentile(found.during, 50) * 1e3,
        "gap p99": percentile(found.during, 99) * 1e3,
        "gap max": max(found.during, default=math.nan) * 1e3,
        "TTFT alone": percentile(found.alone, 50) * 1e3,
        "TTFT loaded": percentile(found.loaded, 50) * 1e3,
    }


def loop(make: Callable[[Words], list[Conversation]], concurrency: int) -> Run:
    """A closed loop over conversations."""

    async def run(client: Client, words: Words) -> Outcome:
        records = await closed_loop(client, make(words), concurrency, TIMEOUT)
        summary = summarize(records)
        return Outcome(load_metrics(summary), summary.statuses, summary.reasons)

    return run


def fixed(count: int, prompt: int, output: int, prefix: int = 0) -> Callable[[Words], Any]:
    """A maker of requests of fixed lengths."""
    return lambda words: single_requests(words, [(prompt, output)] * count, prefix)


async def run_long(client: Client, words: Words) -> Outcome:
    """A long prompt arrives beside eight streams."""
    plan = InterferencePlan(streams=8, prompt=64, long=4096, warm=24, rounds=1, output_max=4096)
    found, _ = await interference(client, words, plan, TIMEOUT)
    return Outcome(interference_metrics(found), found.statuses, found.reasons)


def scenarios(lengths: Path | None) -> list[Scenario]:
    """All scenarios; short ones, because they are repeated for every server."""
    known = [
        Scenario(
            "one", "one stream: 3 requests, prompts 128, answers 128", loop(fixed(3, 128, 128), 1)
        ),
        Scenario(
            "eight", "8 at once: 16 requests, prompts 128, answers 64", loop(fixed(16, 128, 64), 8)
        ),
        Scenario(
            "sixteen",
            "16 at once: 32 requests, prompts 128, answers 128",
            loop(fixed(32, 128, 128), 16),
        ),
        Scenario(
            "thirty-two",
            "32 at once: 64 requests, prompts 128, answers 128",
            loop(fixed(64, 128, 128), 32),
        ),
        Scenario(
            "prompt", "one at a time: 2 prompts of 2048, answers 2", loop(fixed(2, 2048, 2), 1)
        ),
        Scenario(
            "prefix",
            "4 at once: 8 requests behind one prefix of 512, prompts 32, answers 16",
            loop(fixed(8, 32, 16, 512), 4),
        ),
        Scenario(
            "chats",
            "2 at once: 2 conversations of 3 turns, prompts 64, answers 32",
            loop(lambda words: chats(words, [(64, 32)] * 2, 3), 2),
        ),
        Scenario("long", "a prompt of 4096 arrives beside 8 streams", run_long),
    ]
    if lengths is not None:
        drawn = read_trace(lengths, 2048, 16, 0)
        meaning = f"8 at once: 16 requests, lengths of {lengths.name} up to 2048"
        known.append(
            Scenario("trace", meaning, loop(lambda words: single_requests(words, drawn), 8))
        )
    return known


async def start(entry: Entry) -> None:
    """Starts a server; a reason why it does not is noted in the entry."""
    print(f"starting {entry.arm.name}", file=sys.stderr, flush=True)
    try:
        await entry.arm.start()
    except NotRun as error:
        entry.not_run = str(error)
        failed = failure_file(entry.arm.settings, entry.arm.name)
        if failed.exists():
            entry.not_run = f"set-up failed: {failed.read_text().strip()}"
        await entry.arm.stop()


async def greet(entry: Entry, question: Sequence[int], vocabulary: int) -> None:
    """Asks a server the question and warms it up; a failure is noted in the entry."""
    try:
        async for tokens in entry.arm.stream(question, ANSWER_TOKENS, ignore_eos=False):
            entry.answer.extend(tokens)
    except CallFailed as error:
        entry.not_run = f"it starts but does not answer: {error}"
        await entry.arm.stop()
        return
    words = Words(1 << 20, vocabulary)
    await closed_loop(entry.arm, single_requests(words, [(64, 16)] * 4), 2, TIMEOUT)


async def say_idle_shares(entries: Sequence[Entry]) -> None:
    """Measures for two seconds whether servers without requests leave the processors alone."""
    groups = {entry.arm.name: entry.arm.group for entry in entries if not entry.not_run}
    before = {name: group_seconds(group) for name, group in groups.items()}
    await asyncio.sleep(2.0)
    for name, group in groups.items():
        share = (group_seconds(group) - before[name]) / 2.0
        if share > IDLE_SHARE_MAX:
            print(f"NOTE: {name} uses {share:.0%} of a processor without requests; it is stopped")


def equal_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens are equal before the first that differs."""
    for index, (mine, yours) in enumerate(zip(one, other, strict=False)):
        if mine != yours:
            return index
    return min(len(one), len(other))


async def say_answers(entries: Sequence[Entry], client: KvledgerClient) -> None:
    """Prints every greedy answer, and which peer seems to compute another model."""
    print(f"\ngreedy answers to {QUESTION!r}:")
    ours = entries[0].answer
    for entry in entries:
        if entry.not_run:
            print(f"  {entry.arm.name:14} not run: {entry.not_run}")
            continue
        equal = equal_tokens(ours, entry.answer)
        text = await client.text(entry.answer)
        doubt = "" if equal >= min(EQUAL_TOKENS_MIN, len(ours)) else "  ANOTHER MODEL?"
        print(f"  {entry.arm.name:14} {equal:2} of {len(ours)} tokens equal{doubt}: {text!r}")


async def run_all(
    entries: Sequence[Entry], chosen: Sequence[Scenario], repeats: int, vocabulary: int
) -> None:
    """Every scenario, each server in turn, again and again; the first server changes each time.

    The servers whose turn it is not are stopped: some use half a processor while they wait.
    """
    running = [entry for entry in entries if not entry.not_run]
    for entry in running:
        entry.arm.suspend()
    try:
        await take_turns(running, chosen, repeats, vocabulary)
    finally:
        for entry in running:
            entry.arm.resume()
    print("\r" + " " * 60 + "\r", end="", flush=True)


async def take_turns(
    running: Sequence[Entry], chosen: Sequence[Scenario], repeats: int, vocabulary: int
) -> None:
    """Every scenario on servers that are stopped between their turns."""
    for repeat in range(repeats):
        for number, scenario in enumerate(chosen):
            first = (repeat + number) % len(running)
            for entry in running[first:] + running[:first]:
                # Fresh prompts every time: what a prefix cache keeps must not help a repeat.
                words = Words(1000 * repeat + number, vocabulary)
                entry.arm.resume()
                await asyncio.sleep(SETTLE)
                outcome = await scenario.run(entry.arm, words)
                entry.arm.suspend()
                entry.outcomes.setdefault(scenario.name, []).append(outcome)
                print(f"\r{repeat + 1}/{repeats} {scenario.name} {entry.arm.name:20}", end="")


def median_metrics(outcomes: Sequence[Outcome]) -> Metrics:
    """The median of each figure, over the repeats that have it; nan if none has."""
    medians = {}
    for name in outcomes[0].metrics:
        values = [o.metrics[name] for o in outcomes if not math.isnan(o.metrics[name])]
        medians[name] = statistics.median(values) if values else math.nan
    return medians


def ratios(
    ours: Sequence[Outcome], theirs: Sequence[Outcome]
) -> dict[str, tuple[float, float, float]]:
    """(median, least, most) of ours / theirs over the repeats, for each figure."""
    found = {}
    for name in ours[0].metrics:
        values = [
            a.metrics[name] / b.metrics[name]
            for a, b in zip(ours, theirs, strict=True)
            if b.metrics[name] > 0 and not math.isnan(a.metrics[name])
        ]
        if values:
            found[name] = (statistics.median(values), min(values), max(values))
    return found


def failures(outcomes: Sequence[Outcome]) -> str:
    """What did not end well, counted over all repeats; empty if nothing."""
    counts: dict[str, int] = {}
    for outcome in outcomes:
        for status, count in outcome.statuses.items():
            if status not in (OK, STOPPED):
                counts[status] = counts.get(status, 0) + count
    if not counts:
        return ""
    reasons = {s: r for outcome in outcomes for s, r in outcome.reasons.items()}
    return "; ".join(f"{count} x {s}: {reasons.get(s, '')[:120]}" for s, count in counts.items())


def scenario_table(scenario: Scenario, entries: Sequence[Entry]) -> str:
    """Medians of every server, then the ratios."""
    ours = entries[0].outcomes[scenario.name]
    names = list(ours[0].metrics)
    lines = [f"{scenario.name}: {scenario.meaning}"]
    lines.append(f"  {'':24}" + "".join(f"{name:>20}" for name in names))
    for entry in entries:
        if entry.not_run:
            lines.append(f"  {entry.arm.name:24}not run: {entry.not_run}")
            continue
        medians = median_metrics(entry.outcomes[scenario.name])
        shown = "".join(f"{'-' if math.isnan(v) else f'{v:.1f}':>20}" for v in medians.values())
        lines.append(f"  {entry.arm.name:24}{shown}")
        if bad := failures(entry.outcomes[scenario.name]):
            lines.append(f"  {'':24}ERRORS: {bad}")
    for entry in entries[1:]:
        if entry.not_run:
            continue
        found = ratios(ours, entry.outcomes[scenario.name])
        cells = []
        for name in names:
            if name in found:
                middle, least, most = found[name]
                cells.append(f"{f'{middle:.2f} ({least:.2f}-{most:.2f})':>20}")
            else:
                cells.append(f"{'-':>20}")
        lines.append(f"  {f'{OURS} / {entry.arm.name}':24}" + "".join(cells))
    return "\n".join(lines)


def failure_file(settings: ArmSettings, name: str) -> Path:
    """Where the reason of a set-up that failed is kept."""
    return settings.cache / f"{name}.failed"


def set_up(settings: ArmSettings, names: Sequence[str]) -> int:
    """Sets peers up; a failure is kept for the tables and does not keep the others from it."""
    settings.cache.mkdir(parents=True, exist_ok=True)
    status = 0
    for name in names:
        print(f"{name}: setting up in {settings.cache}", flush=True)
        failed = failure_file(settings, name)
        failed.unlink(missing_ok=True)
        started = time.monotonic()
        try:
            PEERS[name].set_up(settings, lambda line: print(line, flush=True))
        except NotRun as error:
            failed.write_text(f"{error}\n")
            print(f"{name}: FAILED: {error}", flush=True)
            status = 1
        else:
            print(f"{name}: ready after {time.monotonic() - started:.0f} s", flush=True)
    return status


async def run(settings: ArmSettings, options: argparse.Namespace) -> int:
    """Starts everything, measures, prints; 1 if kvledger itself could not run."""
    header = machine.header(_core.CpuKernels(settings.threads))
    ours = Kvledger(settings, ("--kv-blocks", str(settings.kv_tokens // 32)))
    entries = [Entry(ours), *(Entry(PEERS[name](settings)) for name in options.peers)]
    print(f"{header}\nservers on processors {settings.cores}, model {settings.model.name}")
    for entry in entries:
        print(f"  {entry.arm.name:14} {entry.arm.described}")
    chosen = [s for s in scenarios(options.lengths) if s.name in options.scenarios]
    try:
        for entry in entries:
            await start(entry)
        if entries[0].not_run:
            raise NotRun(entries[0].not_run)
        question = await ours.client.chat_ids(QUESTION)
        vocabulary = (await ours.client.model()).vocabulary_tokens
        for entry in entries:
            if not entry.not_run:
                await greet(entry, question, vocabulary)
        if entries[0].not_run:
            raise NotRun(entries[0].not_run)
        await say_answers(entries, ours.client)
        await say_idle_shares(entries)
        company = Company(settings.cores, [e.arm.group for e in entries if not e.not_run])
        await run_all(entries, chosen, options.repeats, vocabulary)
        others = company.sentence()
    except NotRun as error:
        print(f"bench.peers: kvledger does not run: {error}", file=sys.stderr)
        return 1
    finally:
        for entry in entries:
            if not entry.not_run:
                await entry.arm.stop()
    print(f"\nmedians of {options.repeats} repeats; times in ms; ratio: median (least-most)")
    for scenario in chosen:
        print("\n" + scenario_table(scenario, entries))
    print(f"\n{machine.state(_core.CpuKernels(settings.threads))}\n{others}")
    if options.json is not None:
        report.save_json(options.json, {**as_json(header, settings, entries), "others": others})
        print(f"saved: {options.json}")
    return 0


def as_json(header: str, settings: ArmSettings, entries: Sequence[Entry]) -> dict[str, Any]:
    """Everything that was measured."""
    return {
        "command": sys.argv[1:],
        "machine": header,
        "cores": settings.cores,
        "arms": {
            entry.arm.name: {
                "settings": entry.arm.described,
                "not_run": entry.not_run or None,
                "answer": entry.answer,
                "scenarios": {
                    name: [{"metrics": o.metrics, "statuses": o.statuses} for o in outcomes]
                    for name, outcomes in entry.outcomes.items()
                },
            }
            for entry in entries
        },
    }


def main() -> int:
    """Sets up or runs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("action", choices=("setup", "run"))
    parser.add_argument("peers", nargs="*", help=f"of {', '.join(PEERS)}; none: all but the last")
    parser.add_argument("--scenarios", nargs="+", help="default: all")
    parser.add_argument("--lengths", type=Path, metavar="CSV", help="adds the scenario trace")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    options.peers = options.peers or list(PEERS)[:-1]
    if unknown := [name for name in options.peers if name not in PEERS]:
        parser.error(f"no peer {', '.join(unknown)}; there are {', '.join(PEERS)}")
    known = [s.name for s in scenarios(options.lengths)]
    options.scenarios = options.scenarios or known
    if unknown := [name for name in options.scenarios if name not in known]:
        parser.error(f"no scenario {', '.join(unknown)}; there are {', '.join(known)}")
    try:
        model = model_path(options.model)
    except ModelRefused as error:
        parser.error(str(error))
    cores = default_cores(options.threads)
    settings = ArmSettings(default_cache(), model, cores, options.threads)
    if options.action == "setup":
        return set_up(settings, options.peers)
    return run_main(run(settings, options))


if __name__ == "__main__":
    sys.exit(main())
