"""How many blocks the prefix index finds again, by policy and capacity, against the best possible.

    python -m bench.hitrate [--trace FILE.jsonl] [--capacities 1000 3000] [--policies reuse lru]

Every request is walked through the core's own index, block by block: a block is a hit when it and
all before it are there. Then the request's blocks are used or put in, and where there is no room
the policy says what goes. Three workloads:

  trace   requests of a file of Mooncake's form: a JSON object a line with `hash_ids`, each one
          standing for one full block; in file order, time ignored
  chats   conversations of many tenants, made from a seed: turns of drawn lengths after drawn
          pauses, system prompts of each tenant's own, and many that come once
  agents  a long beginning for each of many tenants, now and then a new one, with short ends that
          come once behind it; and scans of long documents that come once

Two tables for each: blocks found again, where all cost the same; and the share of compute that was
saved, where a token costs more the more there are before it (attention), with the default policy
knowing that and not.

LRU and S3-FIFO are played by their papers' rules, without regard for what the request itself needs;
they are what the trace's published figures were computed with. Belady's policy knows the future:
whatever is needed last goes first.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvledger import _core

CAPACITIES = (1000, 3000, 5859, 10000, 30000, 50000, 100000)
POLICIES = ("reuse", "lru", "s3_fifo")
# How a token's cost grows with each one before it, as the default model's does
# (core/reuse_policy.h), and how many tokens a block of the trace has.
COST_GROWTH = 2 * 30 * 576 / 106e6
BLOCK_TOKENS = 512
# Nodes without a block that a policy may leave behind, for each block of the capacity and beside.
_NODES_FOR_EACH, _NODES_BESIDE = 8, 200_000

# One request: its scope and the ids of its blocks.
Request = tuple[int, Sequence[int]]


def read_trace(path: Path) -> list[Request]:
    """The requests of a trace file, all in one scope."""
    with path.open() as lines:
        return [(1, json.loads(line)["hash_ids"]) for line in lines]


class _NewBlocks:
    """Ids of blocks that were never there before."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self, count: int) -> list[int]:
        self._next += count
        return list(range(self._next - count, self._next))


def chats(requests: int, seed: int) -> list[Request]:
    """Requests of conversations that go on after pauses, and of prompts that come once."""
    chance, new_blocks = random.Random(seed), _NewBlocks()
    tenants = 40
    systems = [new_blocks(chance.randint(1, 12)) for _ in range(tenants)]
    due: list[tuple[float, int, int, list[int]]] = []  # when, a tie breaker, tenant, blocks so far
    made: list[Request] = []
    now = 0.0
    while len(made) < requests:
        now += chance.expovariate(1.0)
        while due and due[0][0] <= now:
            _, _, tenant, blocks = heapq.heappop(due)
            _turn(chance, due, made, now, tenant, blocks + new_blocks(chance.randint(1, 8)))
        tenant = min(int(chance.expovariate(0.15)), tenants - 1)
        if chance.random() < 0.5:
            made.append((tenant + 1, new_blocks(chance.randint(4, 40))))
        else:
            begun = systems[tenant] + new_blocks(chance.randint(1, 20))
            _turn(chance, due, made, now, tenant, begun)
    return made[:requests]


def _turn(
    chance: random.Random,
    due: list[tuple[float, int, int, list[int]]],
    made: list[Request],
    now: float,
    tenant: int,
    blocks: list[int],
) -> None:
    made.append((tenant + 1, blocks))
    if chance.random() < 0.75:
        pause = chance.lognormvariate(5.0, 1.0)
        heapq.heappush(due, (now + pause, len(made), tenant, blocks))


def agents(requests: int, seed: int) -> list[Request]:
    """Requests of agents: a long beginning that all of a tenant share, short ends, and scans."""
    chance, new_blocks = random.Random(seed), _NewBlocks()
    tenants = 60
    tools = [new_blocks(chance.randint(20, 120)) for _ in range(tenants)]
    made: list[Request] = []
    while len(made) < requests:
        tenant = int(chance.paretovariate(0.7) - 1) % tenants
        if chance.random() < 0.1:
            made.append((tenant + 1, new_blocks(chance.randint(30, 300))))
        elif chance.random() < 0.02:
            tools[tenant] = new_blocks(chance.randint(20, 120))
        else:
            made.append((tenant + 1, tools[tenant] + new_blocks(chance.randint(1, 8))))
    return made


class Shares(NamedTuple):
    """Of all blocks asked for those that were there, and of all compute what they saved."""

    blocks: float
    compute: float


class Cache:
    """Blocks behind the core's prefix index; each costs `growth` more than the one before it."""

    def __init__(self, policy: str, capacity: int, growth: float = 0.0) -> None:
        self._policy = policy
        self._free = capacity
        self._index = _core.PrefixIndex(
            policy=policy,
            capacity=capacity,
            nodes=_NODES_FOR_EACH * capacity + _NODES_BESIDE,
            block_tokens=1,
            seed=1,
            cost_growth=growth,
        )

    def play(self, request: Request) -> int:
        """How many of a request's blocks were there; afterwards they are, as far as they fit."""
        scope, blocks = request
        path = list(self._path(scope, np.array(blocks, dtype=np.int32)))
        filled = [self._index.block_of(node) is not None for node in path]
        hits = filled.index(False) if False in filled else len(path)
        if self._policy == "reuse":
            self._take_in(path, hits)
        else:
            self._take_in_by_the_book(path, filled)
        return hits

    def check(self) -> None:
        """Raises AssertionError if the index is not what it should be."""
        assert self._index.audit() is None

    def _path(self, scope: int, ids: npt.NDArray[np.int32]) -> Iterator[_core.PrefixNode]:
        parent = self._index.root
        for i in range(len(ids)):
            node = self._index.place(parent, scope, ids[i : i + 1])
            assert node is not None, "the index has too few nodes for this policy"
            parent = node
            yield node

    def _make_room(self) -> bool:
        if self._free > 0:
            self._free -= 1
            return True
        return self._index.evict() is not None

    def _take_in(self, path: list[_core.PrefixNode], hits: int) -> None:
        """As a server does it: what a request uses stays while it runs, its tail is the oldest."""
        for node in reversed(path[:hits]):
            self._index.use(node)
        for node in path[hits:]:
            if self._index.block_of(node) is None:
                if not self._make_room():
                    break
                self._index.fill(node, 0)
        for node in reversed(path):
            self._index.unpin(node)

    def _take_in_by_the_book(self, path: list[_core.PrefixNode], filled: list[bool]) -> None:
        """The last block first; any block may go for another, the request's own too."""
        for node, was_filled in zip(reversed(path), reversed(filled), strict=True):
            if was_filled:
                self._index.unpin(node)
        for node, was_filled in zip(reversed(path), reversed(filled), strict=True):
            if self._index.block_of(node) is not None:
                self._index.use(node)
            else:
                assert self._make_room()
                self._index.fill(node, 0)
            if not was_filled:
                self._index.unpin(node)


def played(
    policy: str,
    capacity: int,
    requests: Sequence[Request],
    *,
    known: float = 0.0,
    growth: float = 0.0,
) -> Shares:
    """What a policy saves where a block costs `growth` more than the one before it.

    The policy believes that it costs `known` more. Raises ValueError if the longest request does
    not fit.
    """
    longest = max(len(blocks) for _, blocks in requests)
    if capacity < longest:
        raise ValueError(f"a capacity of {capacity} blocks is less than a request of {longest}")

    def cost(blocks: int) -> float:
        return blocks + growth * blocks * (blocks - 1) / 2

    cache = Cache(policy, capacity, known)
    hits = [cache.play(request) for request in requests]
    cache.check()
    asked = [len(blocks) for _, blocks in requests]
    return Shares(sum(hits) / sum(asked), sum(map(cost, hits)) / sum(map(cost, asked)))


def hit_share(policy: str, capacity: int, requests: Sequence[Request]) -> float:
    """Hits over blocks asked for. Raises ValueError if the longest request does not fit."""
    return played(policy, capacity, requests).blocks


def belady_share(capacity: int, requests: Sequence[Request]) -> float:
    """The same for whoever knows the future."""
    accesses = [(scope, block) for scope, blocks in requests for block in blocks]
    never = len(requests)
    following = [never] * len(accesses)
    latest: dict[tuple[int, int], int] = {}
    at = len(accesses)
    for number in range(len(requests) - 1, -1, -1):
        scope, blocks = requests[number]
        for block in reversed(blocks):
            at -= 1
            following[at] = latest.get((scope, block), never)
        for block in blocks:
            latest[scope, block] = number
    resident: dict[tuple[int, int], int] = {}  # until which request it is not needed
    furthest: list[tuple[int, int, tuple[int, int]]] = []
    hits, at = 0, 0
    for scope, blocks in requests:
        unbroken = True
        for depth, block in enumerate(blocks):
            unbroken = unbroken and (scope, block) in resident
            hits += unbroken
            resident[scope, block] = following[at + depth]
            heapq.heappush(furthest, (-following[at + depth], -depth, (scope, block)))
        at += len(blocks)
        while len(resident) > capacity:
            needed, _, key = heapq.heappop(furthest)
            if resident.get(key) == -needed:
                del resident[key]
    return hits / len(accesses)


def print_hits(
    requests: Sequence[Request], capacities: Sequence[int], policies: Sequence[str]
) -> None:
    """Blocks found again, and in brackets the share of Belady's."""
    print(f"{'capacity':>10}  {'Belady':>8}", *(f"{policy:>15}" for policy in policies))
    for capacity in capacities:
        best = belady_share(capacity, requests)
        shares = [hit_share(policy, capacity, requests) for policy in policies]
        told = (f"{share:8.4f} ({share / best:4.0%})" for share in shares)
        print(f"{capacity:10}  {best:8.4f}", *told, flush=True)
    print()


def print_compute(requests: Sequence[Request], capacities: Sequence[int], growth: float) -> None:
    """Compute saved, and in brackets the blocks found again."""
    arms = {"reuse, knows": ("reuse", growth), "reuse": ("reuse", 0.0), "lru": ("lru", 0.0)}
    print(f"{'capacity':>10}", *(f"{name:>16}" for name in arms))
    for capacity in capacities:
        shares = [
            played(policy, capacity, requests, known=known, growth=growth)
            for policy, known in arms.values()
        ]
        told = (f"{share.compute:8.4f} ({share.blocks:.4f})" for share in shares)
        print(f"{capacity:10}", *told, flush=True)
    print()


def main() -> None:
    """Prints two tables for each workload."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", type=Path, help="a file of requests with hash_ids")
    parser.add_argument("--capacities", type=int, nargs="+", default=CAPACITIES)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument("--requests", type=int, default=12_000, help="of the made workloads")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--block-tokens", type=int, default=BLOCK_TOKENS)
    parser.add_argument("--cost-growth", type=float, default=COST_GROWTH, help="for each token")
    options = parser.parse_args()
    workloads = {
        "chats": chats(options.requests, options.seed),
        "agents": agents(options.requests, options.seed),
    }
    if options.trace is not None:
        workloads = {"trace": read_trace(options.trace), **workloads}
    for name, requests in workloads.items():
        lengths = [len(blocks) for _, blocks in requests]
        print(
            f"{name}: {len(requests)} requests, {sum(lengths)} blocks, the longest {max(lengths)}\n"
        )
        capacities = [capacity for capacity in options.capacities if capacity >= max(lengths)]
        if len(capacities) < len(options.capacities):
            print("capacities that the longest request does not fit in are left out\n")
        print_hits(requests, capacities, options.policies)
        print_compute(requests, capacities, options.cost_growth * options.block_tokens)


if __name__ == "__main__":
    main()
