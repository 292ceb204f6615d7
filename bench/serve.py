"""Load on a kvledger server over gRPC: times of tokens, throughput, goodput.

    python -m bench.serve [--concurrency 8 | --rate 2] [--requests 32] [--prompt 128] [--output 64]
                          [--lengths CSV] [--shared-prefix 512 --prefixes 4] [--turns 4]
                          [--interference 4 --long 2048] [--ttft 1 --tpot 0.1]
                          [--server HOST:PORT | --serve="OPTIONS"] [--json FILE] [--png FILE]

Closed loop: --concurrency requests at once, the next one as soon as one ends. Open loop: --rate
requests a second on average, at the times of a Poisson process, however slow the answers are.
Prompts are random token ids and the end-of-text token does not end an answer, so lengths are as
asked: fixed, or with --lengths those of a trace (CSV with ContextTokens and GeneratedTokens).
--interference lets so many streams decode and then sends one prompt of --long tokens.

Without --server it starts `kvledger serve --dev` on a free port, with the options of --serve, and
ends it afterwards. What the figures mean is in docs/load.md.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import machine, report
from bench.arms.arm import ArmSettings, NotRun, default_cache, default_cores
from bench.arms.kvledger import Kvledger, KvledgerClient
from bench.arms.process import run_main
from bench.company import Company
from bench.load import (
    OK,
    CallFailed,
    Client,
    Conversation,
    InterferencePlan,
    Limits,
    Record,
    Words,
    chats,
    closed_loop,
    interference,
    open_loop,
    read_trace,
    single_requests,
    summarize,
)
from kvledger import _core

_WARMUP_SEED = 1 << 20


def workload(options: argparse.Namespace, words: Words, context: int) -> list[Conversation]:
    """The conversations that the options describe. Raises ValueError."""
    extra = options.shared_prefix
    if options.lengths is not None:
        room = (context - extra) // options.turns
        lengths = read_trace(options.lengths, room, options.requests, options.seed)
    else:
        lengths = [(options.prompt, options.output)] * options.requests
    longest = max(prompt + output for prompt, output in lengths) * options.turns + extra
    if longest > context:
        raise ValueError(f"{longest} tokens do not fit into the model's {context}")
    if options.turns > 1:
        return chats(words, lengths, options.turns, extra)
    return single_requests(words, lengths, extra, options.prefixes)


def describe(options: argparse.Namespace) -> str:
    """The workload in one line."""
    if options.interference:
        return (
            f"{options.interference} streams of {options.prompt} tokens decoding, then one prompt "
            f"of {options.long} tokens; {options.rounds} rounds"
        )
    way = f"open loop, {options.rate:g} a second" if options.rate else "closed loop"
    if not options.rate:
        way += f", {options.concurrency} at once"
    if options.lengths is not None:
        lengths = f"lengths of {options.lengths.name}"
    else:
        lengths = f"prompts of {options.prompt}, answers of {options.output} tokens"
    kind = "requests" if options.turns == 1 else f"conversations of {options.turns} turns"
    prefix = ""
    if options.shared_prefix:
        prefix = f", behind one of {options.prefixes} prefixes of {options.shared_prefix} tokens"
    return f"{way}: {options.requests} {kind}, {lengths}{prefix}; seed {options.seed}"


async def warm_up(client: Client, words: Words, count: int) -> None:
    """Requests that do not count. Raises CallFailed if the first ones fail already."""
    lengths = [(64, 16)] * count
    records = await closed_loop(client, single_requests(words, lengths), max(1, count // 2), 120)
    for record in records:
        if record.status != OK:
            raise CallFailed(record.status, f"in the warm-up: {record.reason}")


async def measure(client: KvledgerClient, options: argparse.Namespace) -> dict[str, Any]:
    """Runs the workload and prints its figures; returns them for --json."""
    model = await client.model()
    words = Words(options.seed, model.vocabulary_tokens)
    await warm_up(client, Words(_WARMUP_SEED, model.vocabulary_tokens), options.warmup)
    content: dict[str, Any] = {"model": model.id, "weights": model.weights}
    if options.interference:
        plan = InterferencePlan(
            streams=options.interference,
            prompt=options.prompt,
            long=options.long,
            rounds=options.rounds,
            output_max=model.context_tokens - options.prompt - 1,
        )
        found, records = await interference(client, words, plan, options.timeout)
        print(report.interference_text(found))
        content["interference"] = {"plan": asdict(plan), **found.as_json()}
    else:
        records = await run_load(client, workload(options, words, model.context_tokens), options)
        limits = Limits(options.ttft, options.tpot)
        summary = summarize(records, limits)
        print(report.summary_text(summary, limits))
        content["limits"], content["summary"] = asdict(limits), summary.as_json()
    started = min((record.due for record in records), default=0.0)
    content["requests"] = [report.record_json(record, started) for record in records]
    if options.png is not None:
        print(report.save_png(options.png, records, describe(options)))
    return content


async def run_load(
    client: Client, conversations: list[Conversation], options: argparse.Namespace
) -> list[Record]:
    """Open or closed loop, as the options say."""
    if options.rate:
        return await open_loop(
            client, conversations, options.rate, options.seed, options.timeout, options.think
        )
    return await closed_loop(
        client, conversations, options.concurrency, options.timeout, options.think
    )


async def run(options: argparse.Namespace) -> int:
    """The whole program; returns its exit status."""
    cores = default_cores(options.threads)
    settings = ArmSettings(default_cache(), Path(options.model), cores, options.threads)
    header = machine.header(_core.CpuKernels(options.threads))
    arm = Kvledger(settings, shlex.split(options.serve)) if options.server is None else None
    served_by = arm.described if arm is not None else f"the server at {options.server}"
    print(f"{header}\n{served_by}\n{describe(options)}\n", flush=True)
    client = None
    try:
        if arm is not None:
            await arm.start()
        client = arm.client if arm is not None else KvledgerClient(options.server)
        company = Company(cores, [arm.group] if arm is not None else [])
        content = await measure(client, options)
        # A server that is not ours is nobody else's business here: its time cannot be told apart.
        content["others"] = company.share() if arm is not None else None
        if arm is not None:
            print("\n" + company.sentence())
    except (NotRun, CallFailed, ValueError) as error:
        print(f"bench.serve: {error}", file=sys.stderr)
        return 1
    finally:
        if arm is not None:
            await arm.stop()
        elif client is not None:
            await client.close()
    if options.json is not None:
        about = {"command": sys.argv[1:], "machine": header, "server": served_by}
        about |= {"workload": describe(options), "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        report.save_json(options.json, {**about, **content})
        print(f"saved: {options.json}")
    return 0


def positive(text: str) -> float:
    """A number above 0."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def count(text: str) -> int:
    """A whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    loop = parser.add_mutually_exclusive_group()
    loop.add_argument("--concurrency", type=count, default=8, help="closed loop: so many at once")
    loop.add_argument("--rate", type=positive, help="open loop: so many a second on average")
    parser.add_argument("--requests", type=count, default=32, help="or conversations")
    parser.add_argument("--prompt", type=count, default=128, help="tokens of a prompt or turn")
    parser.add_argument("--output", type=count, default=64, help="tokens of an answer")
    parser.add_argument("--lengths", type=Path, metavar="CSV", help="a trace instead of these two")
    parser.add_argument("--shared-prefix", type=int, default=0, help="tokens before each prompt")
    parser.add_argument("--prefixes", type=count, default=1, help="how many different ones")
    parser.add_argument("--turns", type=count, default=1, help="turns of a conversation")
    parser.add_argument("--think", type=float, default=0.0, help="seconds between turns")
    parser.add_argument("--interference", type=int, default=0, metavar="STREAMS")
    parser.add_argument("--long", type=count, default=2048, help="tokens of the newcomer's prompt")
    parser.add_argument("--rounds", type=count, default=3, help="of the interference scenario")
    parser.add_argument("--ttft", type=positive, help="limit for goodput, seconds")
    parser.add_argument("--tpot", type=positive, help="limit for goodput, seconds")
    parser.add_argument("--timeout", type=positive, default=300.0, help="seconds for a request")
    parser.add_argument("--warmup", type=int, default=4, help="requests that do not count")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--server", metavar="HOST:PORT", help="one that runs already")
    parser.add_argument("--serve", default="", metavar="OPTIONS", help="of the server to start")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--threads", type=count, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--png", type=Path, metavar="FILE")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(run_main(run(parse())))
