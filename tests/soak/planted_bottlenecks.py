"""Whether `kvledger diagnose` names a bottleneck that was planted, in servers of their own.

    python tests/soak/planted_bottlenecks.py --seed 1 --rounds 5

Each case of planted_cases.py starts `kvledger serve`, lets callers of real gRPC load it, and asks
with the command that an operator has. Right is when the first finding has the planted cause's name,
and for the controls when nothing is found.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [
        str(Path(__file__).parents[1] / sub) for sub in ("integration", "service", "service/rpc")
    ]

import grpc
import server_process as server_process_module
from planted_cases import CASES, Caller, Plant, planted
from server_process import PATIENCE, environment, server_process
from tenants_harness import TenantsOfTest, bearer

from kvledger.v1 import generation_pb2_grpc

# Processors that a server of these tests may use, whatever the machine has.
_PROCESSORS = 2
# What the server keeps of the past has a grain of 5 s: an interval may begin so much earlier.
_GRAIN = 5.5
# Real clients may ask for little at a time; this one wants no more than it reads.
_SLOW = (
    ("grpc.http2.lookahead_bytes", 1024),
    ("grpc.http2.bdp_probe", 0),
)
_OPERATOR = "operator"
# Steps of an interval that says something, and seconds after which it is judged all the same.
_STEPS = 60
_LONGEST = 60.0


@dataclass
class Came:
    """What callers got."""

    answers: int = 0
    tokens: int = 0
    refused: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds if self.seconds else 0.0


class Load:
    """Callers of one server."""

    def __init__(self, address: str, plant: Plant, tokens: dict[str, str], seed: int) -> None:
        self._address = address
        self._plant = plant
        self._tokens = tokens
        self._seed = seed
        self._coming = Came()
        self.came = Came()  # until the last diagnosis was asked for

    async def warm(self) -> None:
        """Asks what shall be cached."""
        async with self._channel(()) as channel:
            for prompt in self._plant.warm:
                caller = Caller((1, 1), (1, 1), (prompt,))
                await self._ask(channel, caller, random.Random(0), 0)

    async def run(self, seconds: float, asks: Sequence[str]) -> dict[str, Any]:
        """Loads the server for so long, and asks for a diagnosis while it still does.

        Longer where the machine does so much else that hardly anything has happened by then.
        """
        crowd = [caller for caller in self._plant.callers if caller.in_crowds]
        calling = [
            asyncio.create_task(self._call(number, caller))
            for number, caller in enumerate(self._plant.callers)
            if not caller.in_crowds
        ]
        if crowd:
            calling.append(asyncio.create_task(self._call_together(crowd)))
        self._coming = Came()
        began = time.monotonic()
        diagnosis: dict[str, Any] = {}
        while not diagnosis or not (self._is_enough(diagnosis) or self.came.seconds > _LONGEST):
            done, _ = await asyncio.wait(
                calling, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION
            )
            for task in done:
                task.result()  # nobody ends by itself
            self.came = replace(self._coming, seconds=time.monotonic() - began)
            passed = self.came.seconds - (_GRAIN if self._plant.warm else 0.0)
            diagnosis = await asyncio.to_thread(diagnosed, asks, passed)
        for task in calling:
            task.cancel()
        await asyncio.gather(*calling, return_exceptions=True)
        return diagnosis

    def _is_enough(self, diagnosis: dict[str, Any]) -> bool:
        callers = self._plant.callers
        steps = int(diagnosis["decode"]["steps"]) + int(diagnosis["prefill"]["steps"])
        if any(caller.reads_every for caller in callers):
            return steps >= _STEPS // 2  # they stand still, and end late
        return steps >= _STEPS and 2 * (self.came.answers + self.came.refused) > len(callers)

    def _channel(self, options: Sequence[tuple[str, Any]]) -> Any:
        own = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
        return grpc.aio.insecure_channel(self._address, options=(*own, *options))

    async def _call(self, number: int, caller: Caller) -> None:
        draw = random.Random(f"{self._seed} {number}")
        async with self._channel(_SLOW if caller.reads_every else ()) as channel:
            turn = 0
            while True:
                began = time.monotonic()
                await self._ask(channel, caller, draw, turn)
                turn += 1
                await asyncio.sleep((time.monotonic() - began) * draw.uniform(*caller.thinks))

    async def _call_together(self, crowd: Sequence[Caller]) -> None:
        draw, turn = random.Random(self._seed), 0
        async with self._channel(()) as channel:
            while True:
                began = time.monotonic()
                asked = (self._ask(channel, caller, draw, turn) for caller in crowd)
                for came in await asyncio.gather(*asked, return_exceptions=True):
                    if isinstance(came, grpc.aio.AioRpcError):
                        if came.code() != grpc.StatusCode.RESOURCE_EXHAUSTED:
                            raise came
                        self._coming.refused += 1
                    elif came is not None:
                        raise came
                turn += 1
                await asyncio.sleep((time.monotonic() - began) * draw.uniform(*crowd[0].thinks))

    async def _ask(self, channel: Any, caller: Caller, draw: random.Random, turn: int) -> None:
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
        shown = bearer(self._tokens[caller.tenant]) if caller.tenant else None
        async for response in stub.Generate(caller.request(draw, turn), metadata=shown):
            self._coming.tokens += response.delta.tokens
            if caller.reads_every:
                await asyncio.sleep(caller.reads_every)
        self._coming.answers += 1


@contextmanager
def _serving(
    plant: Plant, folder: Path, more: Sequence[str]
) -> Iterator[tuple[str, dict[str, str], list[str]]]:
    """A server; its address, its tenants' tokens, and how an operator asks it."""
    operators = f"unix:{folder / 'operators.sock'}"
    asks = ["--server", operators]
    options, tokens = [*plant.options, "--operators-listen", operators, *more], {}
    if plant.tenants:
        tenants = TenantsOfTest(folder)
        for name in plant.tenants:
            tenants.add(name)
        token = folder / "token"
        token.write_text(tenants.add(_OPERATOR, roles=("operator",)))
        token.chmod(0o600)
        asks += ["--token-file", str(token)]
        tokens = tenants.tokens
        options += tenants.options(folder)
    these = sorted(os.sched_getaffinity(0))[:_PROCESSORS]
    pinned = f"import os; os.sched_setaffinity(0, {these})"
    with server_process(*options, prelude=pinned) as server:
        try:
            yield server.address, tokens, asks
        finally:
            for fault in server.events("unexpected_error"):
                print(f"the server: {fault['error']}{fault.get('traceback', '')}", file=sys.stderr)


def diagnosed(asks: Sequence[str], seconds: float) -> dict[str, Any]:
    """What the command says of the last seconds."""
    interval = f"{max(1.0, seconds):.1f}"
    command = [sys.executable, "-m", "kvledger", "diagnose", "--json", "--interval", interval]
    result = subprocess.run(
        [*command, *asks],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    diagnosis: dict[str, Any] = json.loads(result.stdout)["now"]
    return diagnosis


@dataclass(frozen=True)
class Outcome:
    """What came of a case."""

    case: str
    variant: str
    diagnosis: dict[str, Any]
    came: Came

    @property
    def named(self) -> list[str]:
        """The findings, the gravest first."""
        return [finding["name"] for finding in self.diagnosis["findings"]]

    @property
    def is_right(self) -> bool:
        """Whether the planted cause is the first, or nothing is found where nothing is short."""
        cause = CASES[self.case][1]
        return self.named[:1] == ([] if cause is None else [cause])

    @property
    def figures(self) -> str:
        """What the diagnosis rests on, in a line or two."""
        seen, came = self.diagnosis, self.came
        traffic, decode, prefill = seen["traffic"], seen["decode"], seen["prefill"]
        found = ", ".join(f"{each['name']} {each['weight']:.2f}" for each in seen["findings"])
        return (
            f"{found or 'nothing'}; busy {seen['busy']:.2f}, of that prompts "
            f"{seen['prefill_share']:.2f}; waterline {seen['waterline']:.2f}, cached "
            f"{seen['cached']:.2f}; waiting {traffic['waiting']:.2f}, in others' prompts "
            f"{traffic['delayed']:.2f}; {traffic['reused']:.2f} of {traffic['reusable']:.2f} "
            f"reused; {decode['steps']} steps decode {decode['sequences']:.1f} sequences, KV "
            f"{decode['kv_share']:.2f}, {decode['step_median'] * 1e3:.1f} ms; {prefill['steps']} "
            f"steps have {prefill['tokens']} prompt tokens, {prefill['step_median'] * 1e3:.1f} ms; "
            f"{came.answers} answers, {came.tokens} tokens, {came.refused} refusals in "
            f"{came.seconds:.0f} s"
        )


def tried(case: str, seed: int, seconds: float, more: Sequence[str] = ()) -> Outcome:
    """Plants a case's variant, in a server with `more` options, and asks what is wrong."""
    plant = planted(case, seed)
    with (
        tempfile.TemporaryDirectory() as folder,
        _serving(plant, Path(folder), more) as (address, tokens, asks),
    ):
        load = Load(address, plant, tokens, seed)

        async def run() -> dict[str, Any]:
            await load.warm()
            return await load.run(seconds, asks)

        diagnosis = asyncio.run(run())
    return Outcome(case, plant.said, diagnosis, load.came)


def _tried_in_vain(before: Outcome, seed: int, seconds: float) -> bool:
    """Makes the change that the finding warns of; whether it is the first finding all the same."""
    change = planted(before.case, seed).in_vain
    after = tried(before.case, seed, seconds, change)
    print(f"     after {' '.join(change)} (in vain): {after.figures}", flush=True)
    return after.is_right


def main() -> int:
    """0 if every cause was named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1, help="seeds, from --seed on")
    parser.add_argument("--cases", default=",".join(CASES), help="names, separated by commas")
    parser.add_argument("--seconds", type=float, default=12.0, help="of load for each case")
    parser.add_argument(
        "--in-vain", action="store_true", help="make also the changes that findings warn of"
    )
    parser.add_argument("--figures", action="store_true", help="print them for what is right too")
    options = parser.parse_args()
    server_process_module.PATIENCE = 300.0  # of a machine that may do much else
    right: Counter[str] = Counter()
    cases = options.cases.split(",")
    helped = 0
    for seed in range(options.seed, options.seed + options.rounds):
        for case in cases:
            outcome = tried(case, seed, options.seconds)
            right[case] += outcome.is_right
            print(
                f"{seed:4} {case:19}{'right' if outcome.is_right else 'WRONG':6} "
                f"{', '.join(outcome.named) or 'nothing':42} {outcome.variant}",
                flush=True,
            )
            if options.figures or not outcome.is_right:
                print(f"     {outcome.figures}", flush=True)
            if options.in_vain and outcome.is_right and planted(case, seed).in_vain:
                helped += not _tried_in_vain(outcome, seed, options.seconds)
    for case in cases:
        print(f"{case:19} {right[case]} of {options.rounds}")
    print(f"in all {sum(right.values())} of {options.rounds * len(cases)}")
    return 1 if helped or sum(right.values()) < options.rounds * len(cases) else 0


if __name__ == "__main__":
    sys.exit(main())
