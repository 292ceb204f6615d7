"""What the prefix index costs: finding a prompt's blocks, and purging a scope.

    python -m bench.index_speed [--rounds 5]

Times are of the core's own calls, the fastest of some rounds. What a found token saves is computing
it: some milliseconds for a small model on a CPU.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import numpy.typing as npt

from kvledger import _core

BLOCK_TOKENS = 32
PROMPTS = (500, 5_000, 50_000)
PURGED_BLOCKS = 100_000
SCOPE = 1


def make_index(blocks: int) -> _core.PrefixIndex:
    """An index with the default policy and room for `blocks`."""
    return _core.PrefixIndex(
        policy="reuse", capacity=blocks, nodes=blocks, block_tokens=BLOCK_TOKENS, seed=1
    )


def put_in(index: _core.PrefixIndex, prompt: npt.NDArray[np.int32]) -> int:
    """Fills the blocks of a prompt as a finished sequence leaves them, and says how many."""
    nodes: list[_core.PrefixNode] = []
    parent = index.root
    for begin in range(0, len(prompt) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        node = index.place(parent, SCOPE, prompt[begin : begin + BLOCK_TOKENS])
        assert node is not None, "the index has too few nodes"
        index.fill(node, len(nodes))
        nodes.append(node)
        parent = node
    for node in reversed(nodes):
        index.unpin(node)
    return len(nodes)


def tokens(count: int, seed: int) -> npt.NDArray[np.int32]:
    """A prompt of `count` tokens from a seed."""
    return np.random.default_rng(seed).integers(0, 49_152, count, dtype=np.int32)


def find_seconds(length: int, rounds: int) -> float:
    """Seconds to find a prompt's blocks in an index that holds ten more of the same length."""
    blocks = length // BLOCK_TOKENS
    index = make_index(11 * blocks)
    for seed in range(11):
        put_in(index, tokens(length, seed))
    prompt = tokens(length, 5)
    repeats = max(1, 200_000 // length)
    best = float("inf")
    for _ in range(rounds):
        begun = time.perf_counter()
        for _ in range(repeats):
            found = index.find_all(SCOPE, prompt)
        best = min(best, (time.perf_counter() - begun) / repeats)
        assert found == blocks, "a block was not found"
    return best


def purge_seconds(blocks: int, prompt_blocks: int, rounds: int) -> float:
    """Seconds to purge `blocks` of one scope, in prompts of `prompt_blocks`."""
    best = float("inf")
    for number in range(rounds):
        index = make_index(blocks)
        for seed in range(blocks // prompt_blocks):
            put_in(index, tokens(prompt_blocks * BLOCK_TOKENS, 1000 * number + seed))
        begun = time.perf_counter()
        freed, pinned = index.purge(SCOPE)
        best = min(best, time.perf_counter() - begun)
        assert (freed, pinned, index.nodes) == (blocks, 0, 0), "the purge left something"
    return best


def main() -> None:
    """Prints nanoseconds for each token found and each block purged."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for length in PROMPTS:
        seconds = find_seconds(length, options.rounds)
        print(
            f"find {length:6} tokens in blocks of {BLOCK_TOKENS}: {1e6 * seconds:8.1f} us, "
            f"{1e9 * seconds / length:5.2f} ns a token",
            flush=True,
        )
    for prompt_blocks in (1, 100, 1_000):
        seconds = purge_seconds(PURGED_BLOCKS, prompt_blocks, options.rounds)
        print(
            f"purge {PURGED_BLOCKS} blocks in prompts of {prompt_blocks:4}: "
            f"{1e3 * seconds:6.1f} ms, {1e9 * seconds / PURGED_BLOCKS:4.0f} ns a block",
            flush=True,
        )


if __name__ == "__main__":
    main()
