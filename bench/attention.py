"""Decode attention over paged KV memory against a plain contiguous read of as many bytes.

    python -m bench.attention [--context 4096] [--block-tokens 16 32 64] [--chunks 1 8 64]

Sequences lie in blocks of shuffled order, all of them together several times the last-level cache,
so every byte comes from memory. For each block size, in turn and repeated:

  read       all bytes once, contiguous
  paged      decode attention of every layer of every sequence, as the server lays blocks out
  unpaged    the same kernel on [layer][token] memory, which is what paging would have replaced

Then chunks of a prompt, whose tokens share each load of keys and values: operations a second, at 4
for each query head, key and dimension.

The shape is SmolLM2-135M's: 30 layers, 9 query heads over 3 KV heads of 64.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bench import machine
from kvledger import _core

LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM = 30, 9, 3, 64


@dataclass
class Arm:
    """KV memory of one block size, with sequences in it."""

    memory: _core.KvMemory
    shuffled: npt.NDArray[np.int32]  # block tables [sequences, blocks]
    in_order: npt.NDArray[np.int32]
    kv_bytes: int  # of keys and values, without padding

    @classmethod
    def make(cls, block_tokens: int, sequences: int, context: int, format: str) -> Arm:
        layout = _core.KvLayout(
            layers=LAYERS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, block_tokens=block_tokens
        )
        per_sequence = -(-context // layout.slots_per_block(format))
        memory = _core.KvMemory(layout, format, per_sequence * sequences)
        fill_with_numbers(memory)
        blocks = np.arange(per_sequence * sequences, dtype=np.int32)
        shuffled = np.random.default_rng(0).permutation(blocks).astype(np.int32)
        shape = (sequences, per_sequence)
        return cls(
            memory,
            shuffled.reshape(shape),
            blocks.reshape(shape),
            layout.token_bytes(format) * context * sequences,
        )


def fill_with_numbers(memory: _core.KvMemory) -> None:
    """Small finite numbers everywhere, so that no kernel meets NaN or denormals."""
    dtype = np.uint16 if memory.format == "bf16" else np.float32
    values = np.random.default_rng(1).standard_normal(1 << 16).astype(np.float32)
    pattern = (values.view(np.uint32) >> 16).astype(np.uint16) if dtype == np.uint16 else values
    elements = memory.bytes.view(dtype)
    for start in range(0, len(elements), len(pattern)):
        part = elements[start : start + len(pattern)]
        part[:] = pattern[: len(part)]


def attention_pass(
    kernels: _core.CpuKernels,
    view: _core.KvView,
    tables: npt.NDArray[np.int32],
    context: int,
    tokens: int = 1,
) -> None:
    """One step of the last `tokens` tokens of each sequence by itself, attention only."""
    queries = np.full((tokens, (QUERY_HEADS + 2 * KV_HEADS) * HEAD_DIM), 0.01, dtype=np.float32)
    out = np.empty((tokens, QUERY_HEADS * HEAD_DIM), dtype=np.float32)
    for row in range(len(tables)):
        batch = _core.Batch(
            query_start=np.array([0, tokens], dtype=np.int32),
            context_length=np.array([context], dtype=np.int32),
            rows=np.array([row], dtype=np.int32),
            positions=np.arange(context - tokens, context, dtype=np.int32),
            block_tables=tables,
        )
        kernels.begin_step(view, batch, QUERY_HEADS)
        for layer in range(LAYERS):
            kernels.paged_attention(
                layer,
                queries.ctypes.data,
                queries.shape[1],
                QUERY_HEADS,
                HEAD_DIM**-0.5,
                out.ctypes.data,
                out.shape[1],
            )


def measure(kernels: _core.CpuKernels, arm: Arm, context: int, repeats: int) -> dict[str, float]:
    """Median GB/s of each way of reading, taken in turn."""
    paged, unpaged = arm.memory.view(), arm.memory.contiguous_view()
    plain = arm.memory.bytes[: arm.kv_bytes]
    ways = {
        "read": lambda: kernels.read_memory(plain),
        "paged": lambda: attention_pass(kernels, paged, arm.shuffled, context),
        "unpaged": lambda: attention_pass(kernels, unpaged, arm.in_order, context),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            if repeat > 0:
                times[name].append(time.perf_counter() - started)
    return {name: arm.kv_bytes / statistics.median(t) / 1e9 for name, t in times.items()}


def chunk_operations_per_second(
    kernels: _core.CpuKernels, arm: Arm, context: int, tokens: int, repeats: int
) -> float:
    """Median over passes of one sequence's last `tokens` tokens."""
    table = arm.shuffled[:1]
    seconds = machine.median_seconds(
        lambda: attention_pass(kernels, arm.memory.view(), table, context, tokens), repeats
    )
    return 4 * tokens * QUERY_HEADS * HEAD_DIM * context * LAYERS / seconds


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--block-tokens", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--kv-format", default="bf16", choices=_core.KV_FORMATS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--instruction-set", default="auto")
    parser.add_argument("--chunks", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    kernels = _core.CpuKernels(options.threads, options.instruction_set)
    one = 2 * LAYERS * KV_HEADS * HEAD_DIM * (4 if options.kv_format == "f32" else 2)
    wanted = 4 * machine.last_level_cache_bytes()
    sequences = max(4, -(-wanted // (one * options.context)))
    print(machine.header(kernels))
    print(
        f"{sequences} sequences of {options.context} tokens in {options.kv_format}: "
        f"{sequences * one * options.context / 1e9:.2f} GB of keys and values\n"
    )
    chunks: list[str] = []
    print("block tokens   read GB/s   paged GB/s  of read   unpaged GB/s   price of paging   state")
    for block_tokens in options.block_tokens:
        arm = Arm.make(block_tokens, sequences, options.context, options.kv_format)
        speed = measure(kernels, arm, options.context, options.repeats)
        print(
            f"{block_tokens:12}   {speed['read']:9.1f}   {speed['paged']:10.1f}  "
            f"{speed['paged'] / speed['read']:6.1%}   {speed['unpaged']:12.1f}   "
            f"{speed['unpaged'] / speed['paged'] - 1:15.1%}   {machine.state(kernels)}"
        )
        for tokens in options.chunks:
            speed_of_chunk = chunk_operations_per_second(
                kernels, arm, options.context, tokens, options.repeats
            )
            chunks.append(f"{block_tokens:12}   {tokens:6}   {speed_of_chunk / 1e9:7.1f}")
        del arm
    print("\nblock tokens   tokens   GFLOP/s", *chunks, sep="\n")


if __name__ == "__main__":
    main()
