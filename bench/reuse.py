"""What prefix reuse saves and costs, with the real model.

    python -m bench.reuse SCENARIO [--pairs N] [--rounds N] [--serve="OPTIONS"] ...

warm      time to first token of a prompt whose beginning is there, against one that is new
streams   throughput of streams with one beginning, against --prefix-reuse off and CACHE_SCOPE_NONE
nohits    traffic that never hits: the index's time over that of steps; the same traffic on and off
match     the core alone: admitting a prompt of up to 50,000 cached tokens, and those that wait
turns     a conversation through the chat template: what each turn reuses of the last one
flood     a quiet tenant's hits and times beside a tenant that floods, with several settings
fair      two tenants that both flood: Jain's index of their block-seconds

Each prints the machine, the servers and its bars, and ends with 0 only if all were passed. Arms
take turns, and the server whose turn it is not is stopped; ratios are of pairs, given as the median
and the interval that holds the true one with 95 % (least and most, where there are fewer than 6).
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from bench import machine
from bench.arms.arm import ArmSettings, NotRun, default_cache, default_cores
from bench.arms.process import run_main
from bench.company import Company
from bench.duress import Bar, bars_text
from bench.load import CallFailed
from bench.reusing import flood, match, nohits, streams, turns, warm
from bench.reusing.servers import MeasuredServer
from bench.serve import count, positive
from kvledger import _core


async def serve_and_measure(settings: ArmSettings, options: argparse.Namespace) -> list[Bar]:
    """One scenario, with the servers that it wants."""
    serve = shlex.split(options.serve)
    servers = [MeasuredServer(settings, serve)]
    if options.scenario in ("streams", "nohits"):
        servers.append(MeasuredServer(settings, [*serve, "--prefix-reuse", "off"]))
    try:
        for server in servers:
            print(server.described, flush=True)
            await server.start()
        company = Company(settings.cores, [server.group for server in servers])
        if options.scenario == "streams":
            bars = await streams.measure(servers[0], servers[1], options)
        elif options.scenario == "nohits":
            bars = await nohits.measure(servers[0], servers[1], options)
        elif options.scenario == "warm":
            bars = await warm.measure(servers[0], options)
        else:
            bars = await turns.measure(servers[0], options)
        print(company.sentence())
        return bars
    finally:
        for server in servers:
            if server.started:
                server.resume()
            await server.stop()


async def run(options: argparse.Namespace) -> int:
    """The whole program; returns its exit status, which is 0 only if all bars were passed."""
    cores = default_cores(options.threads)
    settings = ArmSettings(default_cache(), Path(options.model), cores, options.threads)
    print(machine.header(_core.CpuKernels(options.threads)), flush=True)
    try:
        if options.scenario == "match":
            bars = match.measure(options)
        elif options.scenario == "flood":
            bars = await flood.measure(settings, options)
        elif options.scenario == "fair":
            bars = await flood.measure_fairness(settings, options)
        else:
            bars = await serve_and_measure(settings, options)
    except (NotRun, CallFailed, ValueError) as error:
        print(f"bench.reuse: {error}", file=sys.stderr)
        return 1
    print("\n" + bars_text(bars))
    return 0 if all(bar.passed for bar in bars) else 1


# What scenarios take differently, unless told otherwise.
_DEFAULTS = {
    "streams": {"rounds": 3, "output": 32},
    "nohits": {"pairs": 10, "output": 32},
    "match": {"rounds": 50},
    "turns": {"output": 96},
    "flood": {"rounds": 3, "turns": 6},
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    scenarios = ("warm", "streams", "nohits", "match", "turns", "flood", "fair")
    parser.add_argument("scenario", choices=scenarios)
    parser.add_argument("--pairs", type=count, default=16, help="of warm and nohits")
    parser.add_argument("--rounds", type=count, default=3, help="of streams, match and flood")
    parser.add_argument("--shared", type=count, default=1024, help="tokens of a beginning")
    parser.add_argument("--own", type=count, default=64, help="tokens behind it")
    parser.add_argument("--output", type=count, default=32, help="tokens of an answer")
    parser.add_argument("--streams", type=count, default=16)
    parser.add_argument("--prompt", type=count, default=256, help="tokens of prompts of nohits")
    parser.add_argument("--requests", type=count, default=12, help="of nohits, each time")
    parser.add_argument("--concurrency", type=count, default=4, help="of nohits")
    parser.add_argument("--users", type=count, default=4, help="of the quiet tenant of flood")
    parser.add_argument("--turns", type=count, default=6, help="of each of them")
    parser.add_argument("--think", type=positive, default=2.0, help="seconds between turns")
    parser.add_argument(
        "--settings", nargs="+", choices=flood.SETTINGS, default=list(flood.SETTINGS)
    )
    parser.add_argument("--fair-seconds", type=positive, default=90.0)
    parser.add_argument("--serve", default="", metavar="OPTIONS", help="more of the server's")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--threads", type=count, default=2)
    parser.add_argument("--seed", type=int, default=0)
    first = parser.parse_args(arguments)
    parser.set_defaults(**_DEFAULTS.get(first.scenario, {}))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(run_main(run(parse())))
