"""The same load against a real server and in a simulation of it: does `kvledger simulate` tell what
comes?

    python -m bench.simulated_and_real [--callers 8] [--prompt 200] [--output 60] [--rounds 3]
                                       [--seed 1] [--serve="OPTIONS"] [--json FILE]

A closed loop of callers, lengths from half the mean to half as much again. The server is first put
under another load of the kind, with half as many callers and then with all; what a diagnosis then
says of its steps and settings, and the time between steps, is all that the simulation knows. Then
both get the same lengths in the same order, once a round. Ratios are simulated over real.

A machine that others use as well is seldom as fast as it was a minute ago, so the simulation runs a
second time, `knowing` how long the steps of that very round took: what is off then is its own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import duration_pb2
from google.protobuf.json_format import MessageToJson

from bench import machine
from bench.arms.arm import ArmSettings, NotRun, default_cache, default_cores
from bench.arms.kvledger import Kvledger
from bench.arms.process import run_main
from bench.company import Company
from bench.load import OK, CallFailed, Words, closed_loop, single_requests, summarize
from bench.serve import count
from kvledger import _core
from kvledger.simulation.costs import ServedCosts, costs_from
from kvledger.simulation.loop import CoreSettings, Run, Simulation
from kvledger.simulation.traffic import MadeUp, Shape
from kvledger.v1 import diagnosis_pb2, diagnosis_pb2_grpc

MODEL = "smollm2-135m-instruct"
# How far off throughput and the median time per output token may be.
ERROR_MAX = 0.10
_TIMEOUT = 300.0
_VOCABULARY = 40_000
Lengths = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Figures:
    """Of one load; times in seconds."""

    tokens_per_second: float
    tpot: float  # medians
    ttft: float

    def over(self, other: Figures) -> dict[str, float]:
        """Each as a multiple of the other's."""
        return {name: value / getattr(other, name) for name, value in vars(self).items()}


def lengths_of(options: argparse.Namespace, callers: int, seed: int) -> Lengths:
    """Prompts and outputs of a round, in tokens."""
    chance = random.Random(seed)

    def around(mean: int) -> int:
        return chance.randint(max(2, mean // 2), mean * 3 // 2)

    return [(around(options.prompt), around(options.output)) for _ in range(options.each * callers)]


async def real(arm: Kvledger, lengths: Lengths, callers: int, seed: int) -> tuple[Figures, float]:
    """What the server did, and seconds that it took. Raises CallFailed."""
    requests = single_requests(Words(seed, _VOCABULARY), lengths)
    records = await closed_loop(arm, requests, callers, _TIMEOUT)
    for record in records:
        if record.status != OK:
            raise CallFailed(record.status, record.reason)
    found = summarize(records)
    figures = Figures(found.output_tokens_per_second, found.tpot["p50"], found.ttft["p50"])
    return figures, found.seconds


def simulated(
    served: ServedCosts, gap: float, context: int, lengths: Lengths, callers: int
) -> Figures:
    """What the simulation says of the same."""
    settings, sizes = served.settings, iter(lengths)
    assert served.block_tokens is not None
    core = CoreSettings(
        blocks=settings["kv_blocks"],
        slots_per_block=served.block_tokens,
        context_tokens=context,
        token_budget=settings["token_budget"],
        sequences_max=settings["max_sequences"],
        tpot_target=settings["tpot_target"],
        step_stretch=settings["step_stretch"],
        prefill_step=settings["prefill_step"],
        prefix_reuse=settings["prefix_reuse"] == "on",
    )
    shape = Shape(lambda chance: next(sizes), callers=callers, requests=len(lengths))
    run = Run(gap=gap, exact=True)
    figures = Simulation(core, MadeUp(shape, 1), served.costs, run).run().figures()
    return Figures(figures["tokens_per_second"], figures["tpot"]["p50"], figures["ttft"]["p50"])


async def diagnosed(door: Path, seconds: float = 86_400.0) -> diagnosis_pb2.DiagnoseResponse:
    """Of the time just gone; of all that the server has served unless told otherwise."""
    async with grpc.aio.insecure_channel(f"unix:{door}") as channel:
        stub = diagnosis_pb2_grpc.DiagnosisServiceStub(channel)  # type: ignore[no-untyped-call]
        interval = duration_pb2.Duration()
        interval.FromMilliseconds(round(seconds * 1000))
        request = diagnosis_pb2.DiagnoseRequest(interval=interval)
        answer: diagnosis_pb2.DiagnoseResponse = await stub.Diagnose(request, timeout=30)
        return answer


async def calibrated(
    arm: Kvledger, door: Path, options: argparse.Namespace
) -> tuple[ServedCosts, float]:
    """What the server's diagnosis says after another load, and the time between steps."""
    await real(arm, [(64, 16)] * 4, 2, options.seed)  # what is slow the first time
    before = (await diagnosed(door)).now
    seconds = 0.0
    for callers in (max(1, options.callers // 2), options.callers):
        lengths = lengths_of(options, callers, options.seed + 1000 + callers)
        _, took = await real(arm, lengths, callers, options.seed + 1000 + callers)
        seconds += took
    answer = await diagnosed(door)
    now = answer.now
    busy = sum(phase.seconds for phase in (now.decode, now.prefill)) - sum(
        phase.seconds for phase in (before.decode, before.prefill)
    )
    gap = max(0.0, seconds - busy) / max(1, now.steps - before.steps)
    return _served(answer), gap


async def knowing(door: Path, seconds: float) -> tuple[ServedCosts, float]:
    """What the diagnosis says of a round that has just ended and took so long."""
    answer = await diagnosed(door, seconds)
    now = answer.now
    interval = now.interval.ToMilliseconds() / 1000
    return _served(answer), (1.0 - now.busy) * interval / max(1, now.steps)


def _served(answer: diagnosis_pb2.DiagnoseResponse) -> ServedCosts:
    text = MessageToJson(
        answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return costs_from(Path("the diagnosis"), text)


async def run(options: argparse.Namespace) -> int:
    """The whole program; returns its exit status."""
    cores = default_cores(2)
    header = machine.header(_core.CpuKernels(2))
    settings = ArmSettings(default_cache(), Path(MODEL), cores, len(cores))
    rounds: dict[str, list[dict[str, float]]] = {"simulated": [], "knowing": []}
    with tempfile.TemporaryDirectory() as folder:
        door = Path(folder) / "door"
        extra = [*shlex.split(options.serve), "--operators-listen", f"unix:{door}"]
        arm = Kvledger(settings, extra)
        print(f"{header}\n{arm.described}", flush=True)
        try:
            await arm.start()
            model = await arm.client.model()
            served, gap = await calibrated(arm, door, options)
            print(f"{served.costs.words} --gap {gap * 1e6:.0f}us\n")
            company = Company(cores, [arm.group])
            for number in range(options.rounds):
                seed = options.seed + number
                lengths = lengths_of(options, options.callers, seed)
                came, took = await real(arm, lengths, options.callers, seed)
                known = await knowing(door, took)
                print(_line("real", came), flush=True)
                for name, costs in (("simulated", (served, gap)), ("knowing", known)):
                    told = simulated(*costs, model.context_tokens, lengths, options.callers)
                    rounds[name].append(told.over(came))
                    print(_line(name, told), flush=True)
            print("\n" + company.sentence())
        except (NotRun, CallFailed) as error:
            print(f"bench.simulated_and_real: {error}", file=sys.stderr)
            return 1
        finally:
            await arm.stop()
    medians = {name: _medians(ratios) for name, ratios in rounds.items()}
    for name, ratios in medians.items():
        print(f"{name:10} " + ", ".join(f"{what} {ratio:.3f}" for what, ratio in ratios.items()))
    if options.json is not None:
        content: dict[str, Any] = {"machine": header, "command": sys.argv[1:], "rounds": rounds}
        content |= {"medians": medians, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        options.json.write_text(json.dumps(content, indent=1))
    found = [medians["simulated"][name] for name in ("tokens_per_second", "tpot")]
    return int(any(abs(ratio - 1) > ERROR_MAX for ratio in found))


def _medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


def _line(name: str, figures: Figures) -> str:
    return (
        f"{name:10} {figures.tokens_per_second:7.1f} tokens/s, TPOT p50 "
        f"{1e3 * figures.tpot:6.1f} ms, TTFT p50 {1e3 * figures.ttft:7.0f} ms"
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--callers", type=count, default=8)
    parser.add_argument("--prompt", type=count, default=200, help="tokens on average")
    parser.add_argument("--output", type=count, default=60, help="tokens on average")
    parser.add_argument("--each", type=count, default=6, help="requests of a caller, a round")
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--serve", default="", metavar="OPTIONS", help="of the server to start")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    sys.exit(run_main(run(parse())))
