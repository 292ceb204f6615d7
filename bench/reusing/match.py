"""What admitting a prompt costs whose beginning is cached: the core alone, no model.

Beside it, what those cost that cannot be admitted, for they are matched anew at each step; and what
it costs that the core times its prefix cache.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bench.duress import Bar
from bench.reusing.figures import Middle, middle
from kvledger import _core

BLOCK_TOKENS = 32
LENGTHS = (5_000, 20_000, 50_000)
SHARE_MOST = 0.01  # of what computing a token takes
COMPUTE_SECONDS = 0.003  # a token of the default model
_SCOPE = 7
_KEEPS_AND_REUSES = 3
_NOBODY = np.empty(0, dtype=np.uint64)
_NO_REASONS = np.empty(0, dtype=np.uint8)
_CANCELLED = 4


class Core:
    """A core with room, driven as the engine does, with tokens of no model."""

    def __init__(self, blocks: int, context: int, rows: int = 16, times: bool = True) -> None:
        self.engine = _core.Engine(
            blocks=blocks,
            slots_per_block=BLOCK_TOKENS,
            context_tokens=context,
            token_budget=context,
            sequences_max=rows,
            end_of_text=[],
            reuses_prefixes=True,
            seed=1,
            times_prefixes=times,
            now=0,
        )
        self._now = 0
        self._next = 0

    def arrivals(
        self,
        prompts: list[npt.NDArray[np.int32]],
        output: int,
        keeps: bool = True,
        tenant: int = 0,
    ) -> _core.Arrivals:
        """Prompts that come at once, each tenant's in a scope of its own."""
        count = len(prompts)
        ids = np.arange(self._next, self._next + count, dtype=np.uint64)
        self._next += count
        return _core.Arrivals(
            ids=ids,
            tenants=np.full(count, tenant, np.uint32),
            arrived_at=np.full(count, self._now, np.int64),
            priorities=np.zeros(count, np.int32),
            output_tokens_max=np.full(count, output, np.int64),
            ignore_end_of_text=np.ones(count, np.bool_),
            samples=np.ones(count, np.int64),
            offsets=np.cumsum([0, *map(len, prompts)], dtype=np.int64),
            tokens=np.concatenate(prompts),
            own_scopes=np.full(count, _SCOPE + tenant, np.uint32),
            shared_scopes=np.zeros(count, np.uint32),
            shared_tokens=np.zeros(count, np.int64),
            scope_flags=np.full(count, _KEEPS_AND_REUSES if keeps else 0, np.uint8),
        )

    def plan(self, arrivals: _core.Arrivals | None = None) -> tuple[_core.Plan, float]:
        """The next step, and the seconds that planning it took."""
        self._now += 1_000_000
        started = time.perf_counter()
        plan, _ = self.engine.plan(self._now, arrivals, _NOBODY, _NO_REASONS)
        return plan, time.perf_counter() - started

    def commit(self, plan: _core.Plan) -> None:
        """Gives every sequence that wants one the same token."""
        tokens = np.full(plan.logits, 5, np.int32)
        self.engine.commit(plan.step, tokens, None, self._now)

    def run(self, arrivals: _core.Arrivals) -> None:
        """Steps until nothing is left."""
        plan, _ = self.plan(arrivals)
        while plan.tokens:
            self.commit(plan)
            plan, _ = self.plan()

    @property
    def prefix_seconds(self) -> float:
        """Time of the prefix cache's calls so far."""
        return self.engine.prefix_counts["nanoseconds"] / 1e9


@dataclass(frozen=True)
class Admitting:
    """Seconds a token of the plan that admits a prompt, and of the prefix cache in it."""

    plan: Middle
    prefixes: Middle


def prompt_of(tokens: int, seed: int) -> npt.NDArray[np.int32]:
    """Random token ids."""
    return np.random.default_rng(seed).integers(0, 49_152, tokens, dtype=np.int32)


def admitting(length: int, rounds: int) -> Admitting:
    """Time to admit a prompt of `length` tokens that a sequence before has left in the cache."""
    blocks = length // BLOCK_TOKENS
    core = Core(12 * (blocks + 2), length + BLOCK_TOKENS)
    for seed in range(10):  # others beside it
        core.run(core.arrivals([prompt_of(length, seed)], 1))
    prompt = prompt_of(length, 5)
    plans, prefixes = [], []
    for _ in range(rounds):
        arrivals = core.arrivals([prompt], 1)
        before = core.prefix_seconds
        plan, seconds = core.plan(arrivals)
        prefixes.append((core.prefix_seconds - before) / length)
        plans.append(seconds / length)
        least = length - (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        assert plan.tokens <= least, "the beginning was computed"
        core.commit(plan)
    return Admitting(middle(plans), middle(prefixes))


def waiting(length: int, count: int, rounds: int) -> Middle:
    """Seconds of a plan while `count` prompts wait whose beginnings are cached, for rows."""
    blocks = length // BLOCK_TOKENS
    # Room for what is cached and for one that runs, and not for another's own block beside it.
    core = Core(blocks + 12, length + 4096, rows=count + 2)
    prompt = prompt_of(length, 5)
    core.run(core.arrivals([prompt], 1))
    # It takes what is left, reuses nothing, and decodes on.
    runner = prompt_of(9 * BLOCK_TOKENS + 1, 77)
    plan, _ = core.plan(core.arrivals([runner], 4 * BLOCK_TOKENS, keeps=False))
    core.commit(plan)
    tails = [prompt_of(5 * BLOCK_TOKENS, 100 + i) for i in range(count)]
    arrivals: _core.Arrivals | None = core.arrivals([np.concatenate([prompt, t]) for t in tails], 1)
    times = []
    for index in range(rounds):
        plan, seconds = core.plan(arrivals)
        arrivals = None
        assert plan.tokens == 1, f"{plan.tokens} tokens: somebody was admitted"
        core.commit(plan)
        if index:
            times.append(seconds)
    return middle(times)


def bookkeeping(count: int, times: bool, steps: int) -> float:
    """Median seconds of plan and commit of a step in which `count` sequences decode."""
    context = 2 * BLOCK_TOKENS * count + steps + count
    core = Core(count * ((steps + count) // BLOCK_TOKENS + 4), context, rows=count, times=times)
    prompts = [prompt_of(2 * BLOCK_TOKENS, seed) for seed in range(count)]
    arrivals: _core.Arrivals | None = core.arrivals(prompts, steps + count)
    taken: list[float] = []
    while len(taken) < steps:
        started = time.perf_counter()
        plan, _ = core.plan(arrivals)
        core.commit(plan)
        arrivals = None
        if plan.decode_tokens == count:
            taken.append(time.perf_counter() - started)
    return middle(taken).median


def timing(count: int, rounds: int) -> Middle:
    """Seconds a step that timing the prefix cache adds, of pairs with and without."""
    return middle(
        bookkeeping(count, True, 200) - bookkeeping(count, False, 200) for _ in range(rounds)
    )


def measure(options: argparse.Namespace) -> list[Bar]:
    """Prints a line for each length; the bar is about the worst."""
    found = {length: admitting(length, options.rounds) for length in LENGTHS}
    for length, times in found.items():
        print(
            f"{length:6} tokens: plan {times.plan.median * 1e9:6.1f} ns a token "
            f"({times.plan.low * 1e9:.1f} to {times.plan.high * 1e9:.1f}), of it prefixes "
            f"{times.prefixes.median * 1e9:5.1f}; {times.plan.median / COMPUTE_SECONDS:.5%} of "
            f"computing one",
            flush=True,
        )
    worst = max(times.plan.high for times in found.values())
    length, count = LENGTHS[-1], 8
    times = waiting(length, count, max(20, options.rounds))
    print(
        f"a step beside {count} that wait with {length} cached tokens each: plan "
        f"{times.median * 1e6:.0f} us ({times.low * 1e6:.0f} to {times.high * 1e6:.0f})"
    )
    for count in (1, 16, 64):
        added = timing(count, 11)
        print(
            f"timing it adds {added.median * 1e6:.2f} us ({added.low * 1e6:.2f} to "
            f"{added.high * 1e6:.2f}) to a step in which {count} decode",
            flush=True,
        )
    return [
        Bar(
            "admitting a cached token",
            worst / COMPUTE_SECONDS <= SHARE_MOST,
            f"{worst / COMPUTE_SECONDS:.5%} of computing it",
            f"under {SHARE_MOST:.0%} of {COMPUTE_SECONDS * 1e3:g} ms",
        )
    ]
