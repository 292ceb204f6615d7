"""What the scheduler costs: plan and commit per step and per sequence, against the model's step.

    python -m bench.scheduler [--sequences 64 1000] [--model NAME_OR_PATH] [--threads 2]

Sequences decode side by side, one token each a step, and cross block edges as they go. The time is
that of the calls from Python, arrays included: what the engine's thread spends on bookkeeping. The
model's step is that of the default model with as many sequences, in the same run.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import numpy.typing as npt

from bench import machine
from kvledger import _core
from kvledger.log import configure
from kvledger.sampling import Sampler
from kvledger.served_model import ServedModel, load
from kvledger.settings import load_settings

PROMPT_TOKENS = 20
NOBODY = np.empty(0, dtype=np.uint64)
NO_REASONS = np.empty(0, dtype=np.uint8)


def make_arrivals(count: int, max_tokens: int, first: int = 0) -> _core.Arrivals:
    """`count` prompts of PROMPT_TOKENS tokens, with ids from `first` on."""
    return _core.Arrivals(
        ids=np.arange(first, first + count, dtype=np.uint64),
        tenants=(np.arange(count) % 7).astype(np.uint32),
        arrived_at=np.zeros(count, np.int64),
        priorities=np.zeros(count, np.int32),
        output_tokens_max=np.full(count, max_tokens, np.int64),
        ignore_end_of_text=np.ones(count, np.bool_),
        samples=np.ones(count, np.int64),
        offsets=(np.arange(count + 1) * PROMPT_TOKENS).astype(np.int64),
        tokens=np.full(count * PROMPT_TOKENS, 5, np.int32),
    )


def bookkeeping(count: int, steps: int) -> tuple[float, float]:
    """Median seconds of plan and of commit while `count` sequences decode."""
    slots = 32
    blocks = count * (-(-(PROMPT_TOKENS + steps + 100) // slots) + 2)
    engine = _core.Engine(
        blocks=blocks,
        slots_per_block=slots,
        context_tokens=8192,
        token_budget=2 * count,
        sequences_max=count,
        end_of_text=[],
        now=0,
    )
    pending: _core.Arrivals | None = make_arrivals(count, 8000)
    plans, commits, now = [], [], 0
    tokens = np.full(count, 7, np.int32)
    while len(plans) < steps:
        now += 1_000_000
        started = time.perf_counter()
        plan, _ = engine.plan(now, pending, NOBODY, NO_REASONS)
        planned = time.perf_counter()
        pending = None
        wanted = plan.logits
        chosen, offsets = tokens[:wanted], np.arange(wanted + 1, dtype=np.int32)
        before = time.perf_counter()
        engine.commit(plan.step, chosen, offsets, now)
        committed = time.perf_counter()
        if plan.decode_tokens == count:
            plans.append(planned - started)
            commits.append(committed - before)
    return statistics.median(plans), statistics.median(commits)


def model_step(model: ServedModel, count: int, steps: int) -> float:
    """Median seconds of forward and sampling with `count` sequences decoding."""
    sampler = Sampler(count)
    pending: _core.Arrivals | None = make_arrivals(count, 1000)
    times: list[float] = []
    while len(times) < steps:
        plan, _ = model.core.plan(time.monotonic_ns(), pending, NOBODY, NO_REASONS)
        pending = None
        started = time.perf_counter()
        logits = model.llama.forward(plan)
        rows: npt.NDArray[np.int32] = plan.logit_rows
        chosen = sampler.sample(logits, rows, plan.positions[plan.logit_tokens])
        ended = time.perf_counter()
        offsets = np.arange(len(chosen) + 1, dtype=np.int32)
        model.core.commit(plan.step, chosen, offsets, time.monotonic_ns())
        if plan.decode_tokens == count:
            times.append(ended - started)
    return statistics.median(times)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sequences", type=int, nargs="+", default=[64, 256, 1000])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    configure("json", "error")
    print(machine.header(_core.CpuKernels(options.threads)), "\n")
    print("sequences   plan us   commit us   ns per sequence   model step ms   share of the step")
    for count in options.sequences:
        plan, commit = bookkeeping(count, 2000 if count <= 100 else 400)
        settings = load_settings(
            [
                *("--dev", "--model", options.model, "--threads", str(options.threads)),
                *("--max-sequences", str(count), "--token-budget", str(2 * count)),
                *("--kv-blocks", str(6 * count + 8)),
            ],
            {},
        )
        step = model_step(load(settings), count, 20 if count <= 100 else 3)
        total = plan + commit
        print(
            f"{count:9}   {plan * 1e6:7.1f}   {commit * 1e6:9.1f}   {total / count * 1e9:15.0f}   "
            f"{step * 1e3:13.1f}   {total / step:17.3%}"
        )


if __name__ == "__main__":
    main()
