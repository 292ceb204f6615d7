"""What a pool that is too small costs, by the scheduler alone: the real core in simulated time.

    python -m bench.pressure [--lengths CSV] [--seconds N] [--pools 0.5 0.25] [--loads 1 2 4]
                             [--seeds N] [--arms before newest now]

Requests come one by one, at a multiple of what the machine answers when memory is no matter, to
pools that are a part of what would be in use then. Their clients set no limit on the output that
says anything; how long it gets is the model's to decide. Who finds the queue full is turned away.
Each load runs in several ways: as it is (`now`); without waiting for blocks that are about to come
back (`prices`); so, and with the newest sequence as the victim, whatever it costs (`newest`); all
of these with admissions that look at nothing but a free block for everybody who runs (`blind`,
`blind prices`, `before`).

good       output tokens a second of requests whose time per output token was below 150 ms
again      of all tokens computed, those that had been computed before a preemption
preempted  how often, and how often one sequence
"""

from __future__ import annotations

import argparse
import csv
import math
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench.duress import Bar, bars_text
from bench.fairness import CPU, GPU, Machine
from bench.serve import positive
from kvledger import _core
from kvledger.arrivals import as_arrays
from kvledger.engine import Job
from kvledger.sampling import SamplingParameters

AGAIN_MOST = 0.03  # of the tokens computed
GOOD_LEAST = 0.9  # of the peak, at the highest load
PREEMPTIONS_MOST = 3
LIMIT_TOKENS = 4096  # of an output, of every request
TPOT_MOST = 0.15
QUEUE, SEQUENCES, TENANTS = 32, 64, 8
SLOTS = 32
LONGEST = 8000  # prompt and output; longer ones of a trace are left out
BLOCKS_LEAST = LONGEST // SLOTS + 20  # every request fits
END, WORD = 2, 7


@dataclass(frozen=True)
class Arm:
    """What of the scheduler is as it is, and not as it was."""

    forecast: bool = True
    priced_victims: bool = True
    wait_steps_max: int = 16


NOW = "now"
ARMS = {
    NOW: Arm(),
    "prices": Arm(wait_steps_max=0),
    "newest": Arm(priced_victims=False, wait_steps_max=0),
    "blind": Arm(forecast=False),
    "blind prices": Arm(forecast=False, wait_steps_max=0),
    "before": Arm(forecast=False, priced_victims=False, wait_steps_max=0),
}

Lengths = Callable[[random.Random], tuple[int, int]]


def made_up_lengths(source: random.Random) -> tuple[int, int]:
    """Prompt and output tokens of a chat: both spread over two orders of magnitude."""
    prompt = round(math.exp(source.gauss(math.log(700), 1.0)))
    output = round(math.exp(source.gauss(math.log(170), 0.8)))
    return min(6000, max(8, prompt)), min(1900, max(2, output))


def lengths_of(path: Path) -> Lengths:
    """Those of a trace with the columns ContextTokens and GeneratedTokens, drawn at random."""
    with path.open(encoding="utf-8") as file:
        rows = [(int(r["ContextTokens"]), int(r["GeneratedTokens"])) for r in csv.DictReader(file)]
    kept = [row for row in rows if sum(row) <= LONGEST and row[1] >= 2]
    return lambda source: source.choice(kept)


@dataclass
class Outcome:
    """What came of one load."""

    seconds: float = 0.0
    ended: int = 0
    tokens: int = 0  # of output
    good: int = 0  # of them, of requests that were fast enough
    refused: int = 0
    computed: int = 0
    again: int = 0
    preempted: int = 0
    preempted_most: int = 0
    running: float = 0.0  # on average
    tpot: list[float] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        """Another run of the same load."""
        seconds = self.seconds + other.seconds
        self.running = (self.running * self.seconds + other.running * other.seconds) / seconds
        self.seconds = seconds
        for name in ("ended", "tokens", "good", "refused", "computed", "again", "preempted"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.preempted_most = max(self.preempted_most, other.preempted_most)
        self.tpot += other.tpot
        self.ttft += other.ttft

    @property
    def wasted(self) -> float:
        """The part of all tokens computed that were computed again."""
        return self.again / max(1, self.computed)

    def row(self) -> str:
        """As one line of a table."""
        tpot = np.percentile(self.tpot, (50, 99)) * 1e3
        ttft = np.percentile(self.ttft, (50, 99))
        return (
            f"{self.good / self.seconds:8.1f} {self.tokens / self.seconds:8.1f} "
            f"{100 * self.wasted:6.2f} % {self.preempted:5d} {self.preempted_most:2d} "
            f"{self.running:6.1f} {tpot[0]:6.0f} {tpot[1]:6.0f} {ttft[0]:7.2f} {ttft[1]:7.2f} "
            f"{self.refused:6d}"
        )


HEAD = (
    f"{'':30} {'good/s':>8} {'tok/s':>8} {'again':>8} {'preempted':>8} {'run':>5} "
    f"{'TPOT p50':>6} {'p99':>5} {'TTFT p50':>7} {'p99':>6} {'refused':>8}"
)


@dataclass
class _Request:
    came: float
    output: int
    first: float | None = None
    made: int = 0


class Load:
    """One core, its clock, and requests that come at random."""

    def __init__(
        self, machine: Machine, blocks: int, lengths: Lengths, seed: int, arm: Arm
    ) -> None:
        self._machine = machine
        self._lengths = lengths
        self._random = random.Random(seed)
        self._sizes = random.Random(seed)  # of those let in: all loads have the same ones
        self._core = _core.Engine(
            blocks=blocks,
            slots_per_block=SLOTS,
            context_tokens=2 * 8192,
            token_budget=machine.token_budget,
            sequences_max=SEQUENCES,
            end_of_text=[END],
            step_stretch=2000,
            prefill_time_max=50_000_000,
            seed=seed,
            reuses_prefixes=False,
            forecast=arm.forecast,
            priced_victims=arm.priced_victims,
            wait_steps_max=arm.wait_steps_max,
            now=0,
        )
        self._open: dict[int, _Request] = {}
        self._waiting: set[int] = set()
        self._rows = np.zeros(SEQUENCES, np.int64)  # whose each is
        self._jobs: list[Job] = []
        self._next = 1
        self.now = 0.0
        self.outcome = Outcome()

    def run(self, rate: float, seconds: float, queue: int = QUEUE) -> Outcome:
        """Requests come for so long, `rate` a second; all that were let in are answered."""
        due, steps = self._random.expovariate(rate), 0
        while self.now < seconds or self._open:
            while due <= self.now and due < seconds:
                self._come(due, queue)
                due += self._random.expovariate(rate)
            if not self._open:
                self.now = due
            elif self._step():
                steps += 1
        self.outcome.seconds = self.now
        self.outcome.running /= max(1, steps)
        return self.outcome

    def _come(self, due: float, queue: int) -> None:
        if len(self._waiting) >= queue:
            self.outcome.refused += 1
            return
        prompt, output = self._lengths(self._sizes)
        tenant = self._sizes.randrange(TENANTS)
        self._jobs.append(
            Job(
                sequence=self._next,
                tenant=tenant,
                prompt=np.full(prompt, WORD, np.int32),
                arrived_at=round(due * 1e9),
                max_tokens=LIMIT_TOKENS,
                sampling=SamplingParameters(),
            )
        )
        self._open[self._next] = _Request(due, output)
        self._waiting.add(self._next)
        self._next += 1

    def _step(self) -> bool:
        """False if there was nothing to compute, which must not be."""
        plan, report = self._core.plan(round(self.now * 1e9), as_arrays(self._jobs))
        self._jobs = []
        for admission in report.admissions:
            self._rows[admission["row"]] = admission["sequence"]
        if plan.tokens == 0:
            raise RuntimeError(f"nothing was planned although {len(self._open)} requests are open")
        self.now += self._machine.time_of(plan.decode_tokens, plan.tokens - plan.decode_tokens)
        tokens = np.full(plan.logits, WORD, np.int32)
        for place, row in enumerate(plan.logit_rows):
            request = self._open[int(self._rows[row])]
            request.made += 1
            request.first = request.first or self.now
            if request.made == request.output:
                tokens[place] = END
        report = self._core.commit(plan.step, tokens, None, round(self.now * 1e9))
        self._waiting.difference_update(sequence for sequence, _, _ in report.token_list)
        self.outcome.running += report.running
        for receipt in report.receipts:
            self._count(receipt)
        return True

    def _count(self, receipt: np.void) -> None:
        request = self._open.pop(int(receipt["sequence"]))
        assert request.first is not None
        outcome = self.outcome
        outcome.ended += 1
        tpot = (self.now - request.first) / max(1, request.output - 1)
        outcome.tpot.append(tpot)
        outcome.ttft.append(request.first - request.came)
        outcome.tokens += request.output
        outcome.good += request.output if tpot <= TPOT_MOST else 0
        outcome.computed += int(receipt["computed_tokens"])
        outcome.again += int(receipt["recomputed_tokens"])
        preemptions = int(receipt["preemptions"])
        outcome.preempted += preemptions
        outcome.preempted_most = max(outcome.preempted_most, preemptions)


def demand(machine: Machine, lengths: Lengths, seconds: float) -> tuple[float, int]:
    """Requests a second where memory is no matter, and the blocks that they use."""
    load = Load(machine, 16384, lengths, 0, ARMS["before"])
    outcome = load.run(rate=1000.0, seconds=seconds, queue=2 * SEQUENCES)
    books = random.Random(1)
    sizes = [lengths(books) for _ in range(4000)]
    # A sequence holds its prompt and, on average over its life, half of its output.
    weights = sum(output for _, output in sizes)
    held = sum(output * (prompt + output / 2) for prompt, output in sizes) / weights
    return outcome.ended / outcome.seconds, round(outcome.running * (held / SLOTS + 0.5))


def measure(machine: Machine, lengths: Lengths, options: argparse.Namespace) -> list[Bar]:
    """Tables of all pools, and the bars of the smallest."""
    rate, blocks = demand(machine, lengths, options.seconds)
    print(f"\n{machine.name}: {rate:.2f} requests a second, {blocks} blocks in use\n{HEAD}")
    bars: list[Bar] = []
    for pool in options.pools:
        arms: dict[str, list[Outcome]] = {arm: [] for arm in options.arms}
        for load in options.loads:
            for arm in options.arms:
                size = max(BLOCKS_LEAST, round(pool * blocks))
                outcome = Outcome()
                for seed in range(1, options.seeds + 1):
                    run = Load(machine, size, lengths, seed, ARMS[arm])
                    outcome.add(run.run(rate * load, options.seconds))
                arms[arm].append(outcome)
                name = f"pool {pool:g}, load {load:g}{'' if arm == NOW else ', ' + arm}"
                print(f"{name:30} {outcome.row()}", flush=True)
        if {NOW, "before"} <= arms.keys():
            bars += bars_of(f"{machine.name}, pool {pool:g}", arms[NOW], arms["before"])
    return bars


def bars_of(name: str, now: list[Outcome], before: list[Outcome]) -> list[Bar]:
    """What must be true of a pool at all loads."""
    again = max(outcome.wasted for outcome in now)
    good = [outcome.good / outcome.seconds for outcome in now]
    most = max(outcome.preempted_most for outcome in now)
    least = min(
        (new.tokens / new.seconds) / (old.tokens / old.seconds)
        for new, old in zip(now, before, strict=True)
    )
    return [
        Bar(
            f"{name}: computed again",
            again <= AGAIN_MOST,
            f"{100 * again:.2f} % (before {100 * max(o.wasted for o in before):.2f} %)",
            f"at most {100 * AGAIN_MOST:g} %",
        ),
        Bar(
            f"{name}: good at the highest load, of the peak",
            good[-1] >= GOOD_LEAST * max(good),
            f"{good[-1] / max(good):.3f}",
            f"at least {GOOD_LEAST:g}",
        ),
        Bar(
            f"{name}: preemptions of one sequence",
            most <= PREEMPTIONS_MOST,
            f"{most}",
            f"at most {PREEMPTIONS_MOST}",
        ),
        Bar(f"{name}: throughput of before", least >= GOOD_LEAST, f"{least:.3f}", "at least 0.9"),
    ]


def main(arguments: list[str] | None = None) -> int:
    """The whole program; its exit status is 0 only if all bars were passed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=Path, help="a CSV with ContextTokens, GeneratedTokens")
    parser.add_argument("--seconds", type=positive, default=1000.0, help="simulated, of each load")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each, added up")
    parser.add_argument("--pools", type=positive, nargs="+", default=[2.0, 0.5, 0.25])
    parser.add_argument("--loads", type=positive, nargs="+", default=[0.5, 1.0, 2.0, 4.0])
    parser.add_argument("--arms", choices=list(ARMS), nargs="+", default=["before", "newest", NOW])
    parser.add_argument("--machine", choices=["cpu", "gpu", "both"], default="both")
    options = parser.parse_args(arguments)
    lengths = lengths_of(options.lengths) if options.lengths else made_up_lengths
    machines = {"cpu": [CPU], "gpu": [GPU], "both": [CPU, GPU]}[options.machine]
    began = time.monotonic()
    bars = [bar for machine in machines for bar in measure(machine, lengths, options)]
    print(f"\n{time.monotonic() - began:.0f} s\n" + bars_text(bars))
    return 0 if all(bar.passed for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
