"""What one tenant's load costs another, by the scheduler alone: the real core in simulated time.

    python -m bench.fairness [--seconds N] [--seeds N]

Steps take what a model of a machine says (a part for the step, one for each decoding row, one for
each prompt token), so the figures are the scheduler's and the same on every machine, however busy;
bench.reuse flood and fair measure the whole server.

flood   a quiet tenant, four users who think two seconds between short prompts: its time to the
        first token beside a tenant with 79 prompts of 1,024 tokens in the queue at any time, over
        the same alone
fair    two tenants that flood, one of which comes first, prompts of equal or other lengths: Jain's
        index of the tokens that each was given, and of the block-seconds where lengths are equal
"""

from __future__ import annotations

import argparse
import heapq
import random
import sys
import time
from dataclasses import dataclass, field

import numpy as np

from bench.duress import Bar, bars_text
from bench.reusing.figures import jain
from bench.serve import count, positive
from kvledger.arrivals import as_arrays
from kvledger.engine import Job, make_core
from kvledger.sampling import SamplingParameters

TTFT_MOST = 1.3  # beside the flood over alone
JAIN_LEAST = 0.95
QUIET, FLOOD = 1, 2
FLOOD_AT_ONCE, FLOOD_PROMPT, FLOOD_OUTPUT = 79, 1024, 8
USERS, THINK, QUIET_OUTPUT = 4, 2.0, 16
QUIET_PROMPT = (50, 90)  # tokens that are not cached
_BLOCK_TOKENS = 32
_NOISE = 0.05  # of a step's time


@dataclass(frozen=True)
class Machine:
    """How long a step takes, in seconds."""

    name: str
    step: float
    decode_row: float
    prompt_token: float
    token_budget: int = 512

    def time_of(self, decode_rows: int, prompt_tokens: int) -> float:
        """Of a step with so many of each."""
        return self.step + self.decode_row * decode_rows + self.prompt_token * prompt_tokens


CPU = Machine("two CPU cores", 0.006, 0.002, 0.0008)
GPU = Machine("like a GPU", 0.008, 0.00002, 0.00002, 4096)


@dataclass
class Load:
    """One core, its clock, and who sends what."""

    machine: Machine
    seed: int
    prefill_step: float = 0.05
    now: float = 0.0
    jobs: list[Job] = field(default_factory=list)
    # Of requests that have no token yet, when they came.
    began: dict[int, float] = field(default_factory=dict)
    waits: list[float] = field(default_factory=list)  # times to the first token of QUIET
    ended: list[tuple[int, float, int]] = field(default_factory=list)  # tenant, blocks x s, tokens

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self._next = 1
        self._begin = time.monotonic_ns()
        self._owners: dict[int, int] = {}
        self._core = make_core(
            blocks=4096,
            slots_per_block=_BLOCK_TOKENS,
            context_tokens=8192,
            token_budget=self.machine.token_budget,
            sequences_max=64,
            end_of_text=[2],
            priority_aging=5.0,
            tpot_target=None,
            step_stretch=2.0,
            prefill_step=self.prefill_step,
        )

    def send(self, tenant: int, tokens: int, output: int, came: float) -> int:
        """A request; its number."""
        job = Job(
            sequence=self._next,
            tenant=tenant,
            prompt=np.full(tokens, 5, np.int32),
            arrived_at=self._clock(came),
            max_tokens=output,
            sampling=SamplingParameters(),
            ignore_eos=True,
        )
        self._next += 1
        self.jobs.append(job)
        self._owners[job.sequence] = tenant
        self.began[job.sequence] = came
        return job.sequence

    def _clock(self, seconds: float) -> int:
        return self._begin + round(seconds * 1e9)

    def step(self) -> list[int]:
        """Computes a step and says who ended in it; nobody if there was nothing to compute."""
        plan, _ = self._core.plan(self._clock(self.now), as_arrays(self.jobs))
        self.jobs = []
        if plan.tokens == 0:
            return []
        took = self.machine.time_of(plan.decode_tokens, plan.tokens - plan.decode_tokens)
        self.now += took * (1 + _NOISE * self.random.random())
        tokens = np.full(plan.logits, 7, np.int32)
        report = self._core.commit(plan.step, tokens, None, self._clock(self.now))
        for sequence, _, _ in report.token_list:
            came = self.began.pop(sequence, None)
            if came is not None and self._owners[sequence] == QUIET:
                self.waits.append(self.now - came)
        ended = []
        for row in report.receipts:
            held = int(row["held_seconds"]) + int(row["held_nanos"]) / 1e9
            tokens_given = int(row["prompt_tokens"]) + int(row["output_tokens"])
            self.ended.append((self._owners.pop(int(row["sequence"])), held, tokens_given))
            ended.append(int(row["sequence"]))
        return ended


def quiet_waits(load: Load, seconds: float, flood: int) -> list[float]:
    """Times to the first token of the quiet tenant beside `flood` requests of the other's."""
    due = [(index * THINK / USERS, index) for index in range(USERS)]
    talking: dict[int, int] = {}
    flooding: set[int] = set()
    while load.now < seconds:
        while due and due[0][0] <= load.now:
            came, user = heapq.heappop(due)
            talking[load.send(QUIET, load.random.randint(*QUIET_PROMPT), QUIET_OUTPUT, came)] = user
        while len(flooding) < flood:
            flooding.add(load.send(FLOOD, FLOOD_PROMPT, FLOOD_OUTPUT, load.now))
        for sequence in load.step():
            flooding.discard(sequence)
            if sequence in talking:
                think = THINK * load.random.uniform(0.9, 1.1)
                heapq.heappush(due, (load.now + think, talking.pop(sequence)))
        if not talking and not flooding:
            load.now = max(load.now, due[0][0])
    return load.waits


def two_floods(load: Load, seconds: float, other_prompt: int) -> tuple[float, float]:
    """Jain's index of the tokens, and of the block-seconds, that two flooding tenants were given.

    All of the one's requests stand in the queue before the first of the other's.
    """
    going: dict[int, tuple[int, int]] = {}
    for tenant, tokens in ((FLOOD, FLOOD_PROMPT), (QUIET, other_prompt)):
        for _ in range(FLOOD_AT_ONCE * FLOOD_PROMPT // tokens):
            going[load.send(tenant, tokens, FLOOD_OUTPUT, load.now)] = (tenant, tokens)
    while load.now < seconds:
        for sequence in load.step():
            tenant, tokens = going.pop(sequence)
            going[load.send(tenant, tokens, FLOOD_OUTPUT, load.now)] = (tenant, tokens)
    tokens_of = [sum(t for who, _, t in load.ended if who == tenant) for tenant in (QUIET, FLOOD)]
    blocks_of = [sum(b for who, b, _ in load.ended if who == tenant) for tenant in (QUIET, FLOOD)]
    return jain(tokens_of), jain(blocks_of)


def measure_flood(machine: Machine, prefill_step: float, seconds: float, seeds: int) -> Bar:
    """The quiet tenant's times, alone and beside the flood."""
    alone, beside = [], []
    for seed in range(seeds):
        alone += quiet_waits(Load(machine, seed, prefill_step), seconds, 0)
        beside += quiet_waits(Load(machine, seed, prefill_step), seconds, FLOOD_AT_ONCE)
    before, after = (np.percentile(waits, (50, 99)) for waits in (alone, beside))
    ratio = float(after[1] / before[1])
    return Bar(
        f"{machine.name}, --prefill-step {prefill_step:g}: TTFT p99",
        ratio <= TTFT_MOST,
        f"{ratio:.2f} times of {before[1] * 1e3:.0f} ms (p50 {after[0] / before[0]:.2f} times of "
        f"{before[0] * 1e3:.0f} ms; {len(alone)} and {len(beside)} requests)",
        f"at most {TTFT_MOST:g}",
    )


def measure_fairness(machine: Machine, other_prompt: int, seconds: float) -> list[Bar]:
    """Two tenants that flood; block-seconds are a matter of shapes where prompts differ."""
    indices = two_floods(Load(machine, 0), seconds, other_prompt)
    arm = f"{machine.name}, prompts of {FLOOD_PROMPT} and {other_prompt}: Jain's index of"
    return [
        Bar(f"{arm} {what}", index >= JAIN_LEAST, f"{index:.4f}", f"at least {JAIN_LEAST:g}")
        for what, index in zip(("tokens", "block-seconds"), indices, strict=True)
    ]


def measure(seconds: float, seeds: int) -> list[Bar]:
    """All bars; prints what went before."""
    # Where a step's fixed part is as long as a short prompt takes alone, whoever waits for one
    # step waits for as long again, whatever the scheduler does.
    for machine, prefill_step in ((CPU, 0.0), (GPU, 0.005)):
        other = measure_flood(machine, prefill_step, seconds, seeds)
        print(f"for comparison: {other.name} {other.found}", flush=True)
    return [
        measure_flood(CPU, 0.05, seconds, seeds),
        *measure_fairness(CPU, FLOOD_PROMPT, seconds),
        measure_fairness(CPU, FLOOD_PROMPT // 4, seconds)[0],
    ]


def main(arguments: list[str] | None = None) -> int:
    """The whole program; its exit status is 0 only if all bars were passed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=positive, default=300.0, help="simulated, of each load")
    parser.add_argument("--seeds", type=count, default=3)
    options = parser.parse_args(arguments)
    bars = measure(options.seconds, options.seeds)
    print("\n" + bars_text(bars))
    return 0 if all(bar.passed for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
