"""How predictions turn out: twenty changes of batch, chunk, pool and threads, each predicted by a
server's diagnosis and then made.

    python -m bench.predictions [--only NAME] [--rounds 2] [--seed 1] [--json FILE]

For each change two servers run, one as it was and one with the change, and get the same kind of
traffic in turn, so that what else the machine does meets both.
`kvledger diagnose --if CHANGE` is asked of the first; what it predicted and what the second then
did is what that one answers to `kvledger diagnose --against FILE`. The error of a figure is
predicted over measured, less one.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import duration_pb2

from bench import machine
from bench.arms.arm import ArmSettings, NotRun, default_cache, default_cores
from bench.arms.kvledger import Kvledger
from bench.arms.process import run_main
from bench.company import Company
from bench.load import OK, CallFailed, Conversation, Words, closed_loop, single_requests
from bench.serve import count
from kvledger import _core
from kvledger.diagnosis.history import GRAIN
from kvledger.v1 import diagnosis_pb2, diagnosis_pb2_grpc

MODEL = "smollm2-135m-instruct"
# What is wanted of the median error over all figures.
ERROR_MAX = 0.10
_TIMEOUT = 120.0
_BLOCKS = 1024
# Of each caller, in a round.
_REQUESTS = 8
# Of a round, in seconds: no caller has had its first answer.
_BEGINNING = 2.0
# Figures that are told but that a change is not about are left out: they would only make the
# median better.
_FIGURES = {
    "max_sequences": ("decode_step_seconds", "tokens_per_second", "requests_per_second"),
    "token_budget": ("prefill_tokens_per_second", "requests_per_second"),
    "kv_blocks": ("decode_step_seconds", "tokens_per_second", "requests_per_second"),
    "threads": (
        "decode_step_seconds",
        "prefill_tokens_per_second",
        "requests_per_second",
    ),
}


@dataclass(frozen=True)
class Case:
    """A change, and the traffic that it meets: requests in a closed loop, lengths in tokens on
    average, from half of that to half as much again."""

    kind: str  # of Change
    before: int
    after: int
    callers: int
    prompt: int
    output: int
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Short, for a table."""
        return f"{self.kind} {self.before} to {self.after}"

    @property
    def traffic(self) -> str:
        """In words."""
        return f"{self.callers} callers, {self.prompt} + {self.output} tokens"

    def arguments(self, value: int) -> list[str]:
        """Of a server with the setting at a value; threads are the arm's own."""
        mine = [] if self.kind == "threads" else [f"--{self.kind.replace('_', '-')}", str(value)]
        # The default depends on other settings, and would change with them.
        pool = [] if self.kind == "kv_blocks" else ["--kv-blocks", str(_BLOCKS)]
        return [*mine, *pool, *self.options]


# Chunks as the budget says: no limit in time makes them smaller. A budget below the number of
# places would make these fewer.
_BY_BUDGET = ("--step-stretch", "0", "--prefill-step", "0", "--max-sequences", "16")
CASES = (
    Case("max_sequences", 4, 8, 12, 120, 60),
    Case("max_sequences", 8, 4, 12, 120, 60),
    Case("max_sequences", 8, 16, 20, 60, 80),
    Case("max_sequences", 16, 8, 20, 60, 80),
    Case("max_sequences", 2, 6, 10, 200, 60),
    Case("max_sequences", 6, 3, 10, 600, 60),
    Case("token_budget", 256, 128, 4, 700, 16, _BY_BUDGET),
    Case("token_budget", 128, 256, 4, 700, 16, _BY_BUDGET),
    Case("token_budget", 128, 32, 4, 500, 24, _BY_BUDGET),
    Case("token_budget", 32, 96, 2, 300, 60, _BY_BUDGET),
    Case("token_budget", 512, 128, 2, 1200, 16, _BY_BUDGET),
    Case("kv_blocks", 40, 80, 12, 150, 60),
    Case("kv_blocks", 80, 40, 12, 150, 60),
    Case("kv_blocks", 60, 90, 16, 200, 60),
    Case("kv_blocks", 120, 60, 16, 200, 60),
    Case("kv_blocks", 100, 400, 6, 300, 60),
    Case("threads", 2, 1, 4, 100, 80),
    Case("threads", 1, 2, 4, 100, 80),
    Case("threads", 2, 1, 2, 800, 16),
    Case("threads", 1, 2, 12, 300, 40),
)


class Server:
    """One server and its operators' door."""

    def __init__(self, case: Case, value: int, cores: tuple[int, ...], folder: Path) -> None:
        threads = value if case.kind == "threads" else len(cores)
        settings = ArmSettings(default_cache(), Path(MODEL), cores, threads)
        self._door = folder / f"door-{value}"
        operators = ("--operators-listen", f"unix:{self._door}")
        self.arm = Kvledger(settings, [*case.arguments(value), *operators])

    async def diagnosis(self, seconds: float, **fields: Any) -> diagnosis_pb2.DiagnoseResponse:
        """Of the last so many."""
        async with grpc.aio.insecure_channel(f"unix:{self._door}") as channel:
            stub = diagnosis_pb2_grpc.DiagnosisServiceStub(channel)  # type: ignore[no-untyped-call]
            interval = duration_pb2.Duration(nanos=round(seconds % 1 * 1e9), seconds=int(seconds))
            request = diagnosis_pb2.DiagnoseRequest(interval=interval, **fields)
            answer: diagnosis_pb2.DiagnoseResponse = await stub.Diagnose(request, timeout=30)
            return answer


async def under_load(
    server: Server, case: Case, words: Words, seed: int, **fields: Any
) -> diagnosis_pb2.DiagnoseResponse:
    """What it says of a round of its traffic, without the beginning and the end of it, where fewer
    callers are there. Raises CallFailed if any of the traffic fails."""
    chance = random.Random(seed)

    def around(mean: int) -> int:
        return chance.randint(mean // 2, mean * 3 // 2)

    lengths = [(around(case.prompt), around(case.output)) for _ in range(_REQUESTS * case.callers)]
    requests = single_requests(words, lengths)
    none_is_left = asyncio.Event()

    def until_none_is_left() -> Iterator[Conversation]:
        yield from requests
        none_is_left.set()

    async def asked() -> diagnosis_pb2.DiagnoseResponse:
        began = time.monotonic()
        await none_is_left.wait()
        # To the grain of what the server keeps: it may begin that much earlier.
        seconds = time.monotonic() - began - _BEGINNING - GRAIN
        if seconds < GRAIN:
            raise NotRun(f"{case.name}: a round takes too short a time")
        return await server.diagnosis(seconds, **fields)

    loop = closed_loop(server.arm, until_none_is_left(), case.callers, _TIMEOUT)
    answer, records = await asyncio.gather(asked(), loop)
    for record in records:
        if record.status != OK:
            raise CallFailed(record.status, record.reason)
    return answer


async def outcomes(
    case: Case, rounds: int, seed: int, cores: tuple[int, ...], folder: Path
) -> tuple[list[diagnosis_pb2.DiagnoseResponse], float]:
    """What the changed server says of the other one's predictions, by round; and what others
    used."""
    was, changed = (Server(case, value, cores, folder) for value in (case.before, case.after))
    words = Words(seed, 40_000)
    change = diagnosis_pb2.Change()
    setattr(change, case.kind, case.after)
    try:
        for server in (was, changed):
            await server.arm.start()
        company = Company(cores, [was.arm.group, changed.arm.group])
        found = []
        for number in range(rounds):
            # Both get the same lengths.
            before = await under_load(was, case, words, seed + number, what_if=[change])
            found.append(await under_load(changed, case, words, seed + number, earlier=before.now))
        return found, company.share()
    finally:
        for server in (was, changed):
            await server.arm.stop()


def figures_of(
    case: Case, responses: Sequence[diagnosis_pb2.DiagnoseResponse]
) -> dict[str, tuple[float, float]]:
    """(predicted, came) by figure, of those that the change is about, on average over the rounds.
    Raises NotRun without any."""
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in _FIGURES[case.kind]}
    for response in responses:
        if not response.outcomes:
            raise NotRun(f"{case.name}: nothing was predicted; {'; '.join(response.changes)}")
        for figure in response.outcomes[0].figures:
            if figure.name in figures:
                figures[figure.name].append((figure.predicted, figure.came))
    figures = {name: pairs for name, pairs in figures.items() if pairs}
    return {
        name: (
            statistics.mean(said for said, _ in pairs),
            statistics.mean(came for _, came in pairs),
        )
        for name, pairs in figures.items()
        if pairs
    }


async def run(options: argparse.Namespace) -> int:
    """The whole program; returns its exit status."""
    cores = default_cores(2)
    header = machine.header(_core.CpuKernels(2))
    print(f"{header}\n{MODEL}; errors are predicted over measured, less one\n", flush=True)
    cases = [case for case in CASES if options.only in case.name]
    errors: dict[str, list[float]] = {}
    rows, failed = [], False
    for number, case in enumerate(cases):
        with tempfile.TemporaryDirectory() as folder:
            try:
                responses, others = await outcomes(
                    case, options.rounds, options.seed + number, cores, Path(folder)
                )
                figures = figures_of(case, responses)
            except (NotRun, CallFailed) as error:
                print(f"bench.predictions: {error}", file=sys.stderr, flush=True)
                failed = True
                continue
        shown = []
        for name, (predicted, came) in figures.items():
            off = predicted / came - 1
            errors.setdefault(case.kind, []).append(abs(off))
            shown.append(f"{name} {predicted:.4g} for {came:.4g} ({off:+.0%})")
        rows.append({"case": case.name, "figures": figures, "others": others})
        print(
            f"{case.name:26} {case.traffic}; others {others:.0%}\n    {', '.join(shown)}",
            flush=True,
        )
    if not errors:
        return 1
    print()
    print(summary(errors))
    if options.json is not None:
        about = {"machine": header, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        options.json.write_text(json.dumps({**about, "cases": rows}, indent=1))
    return int(failed or statistics.median(itertools.chain(*errors.values())) > ERROR_MAX)


def summary(errors: dict[str, list[float]]) -> str:
    """Median and range of the errors, by kind of change and of all."""
    lines = []
    everything: Sequence[float] = list(itertools.chain(*errors.values()))
    for name, values in [*errors.items(), ("all", everything)]:
        lines.append(
            f"{name:16} median error {statistics.median(values):.1%}, from {min(values):.1%} to "
            f"{max(values):.1%}, {len(values)} figures"
        )
    return "\n".join(lines)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only", default="", metavar="NAME", help="changes with this in their name"
    )
    parser.add_argument("--rounds", type=count, default=2, help="of each server")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    sys.exit(run_main(run(parse())))
