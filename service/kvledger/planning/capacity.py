"""How many sequences a KV pool holds, and how long one can become: exact, in blocks.

The last token of a sequence is never read again, so its keys and values are not kept: a sequence of
n tokens has n - 1 slots, here as in the core.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvledger import _core


@dataclass(frozen=True)
class Lengths:
    """Tokens of prompts and outputs: their means, and the most that is planned for."""

    prompt: int
    output: int
    prompt_most: int
    output_most: int

    @property
    def total(self) -> int:
        """Tokens of a mean sequence at its end."""
        return self.prompt + self.output

    @property
    def total_most(self) -> int:
        """Tokens of the longest sequence that is planned for, at its end."""
        return self.prompt_most + self.output_most

    @property
    def living(self) -> int:
        """Tokens of a mean sequence, on the average over its decode steps."""
        return self.prompt + (self.output + 1) // 2


@dataclass(frozen=True)
class Pool:
    """Blocks of one layout, for sequences in one format."""

    layout: _core.KvLayout
    kv_format: str
    blocks: int
    context_tokens: int

    @property
    def slots_per_block(self) -> int:
        """Tokens of one sequence in a block."""
        return self.layout.slots_per_block(self.kv_format)

    @property
    def bytes(self) -> int:
        """Memory of all blocks."""
        return self.blocks * self.layout.block_bytes

    @property
    def tokens(self) -> int:
        """Tokens that all blocks hold."""
        return self.blocks * self.slots_per_block

    @property
    def sequence_tokens_max(self) -> int:
        """Most tokens of a sequence that has the pool for itself."""
        return min(self.context_tokens, self.tokens + 1)

    def blocks_of(self, tokens: int) -> int:
        """Blocks of a sequence that has `tokens` tokens."""
        return max(1, -(-(tokens - 1) // self.slots_per_block))

    def fit(self, tokens: int) -> int:
        """Sequences that fit when each has `tokens` tokens."""
        if tokens > self.context_tokens:
            return 0
        return self.blocks // self.blocks_of(tokens)

    def fit_living(self, lengths: Lengths) -> int:
        """Sequences that fit if, at any moment, they are at all ages alike, from prompt to end."""
        held = [self.blocks_of(lengths.prompt + made + 1) for made in range(max(1, lengths.output))]
        return self.blocks * len(held) // sum(held)

    def longest(self, sequences: int) -> int:
        """Most tokens that each of so many sequences can have at the same time; 0 if none."""
        each = self.blocks // sequences
        return min(self.context_tokens, each * self.slots_per_block + 1) if each > 0 else 0
