"""What paging costs and saves, by block size, for short sequences and for a real trace's lengths.

    python -m bench.paging [--lengths CSV] [--threads 2]

For sequences of 8 to 96 tokens and, with --lengths, for those of a trace (CSV with the columns
ContextTokens and GeneratedTokens), and for blocks of 8 to 64 tokens:

  unused       slots allocated and not used, of a sequence at its full length and over its life
  bookkeeping  time in plan and commit per token, prompt and output, 64 sequences at a time
  attention    append and decode attention of 64 sequences in a step, against the same kernels on
               contiguous KV memory ([layer][token], every sequence in one piece)
  fit          sequences in a pool, against reserving the longest length for each of them

docs/paging.md says what to make of it.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench import machine
from bench.attention import HEAD_DIM, KV_HEADS, LAYERS, QUERY_HEADS, fill_with_numbers
from kvledger import _core

SHORT = (8, 16, 32, 64, 96)
BLOCKS = (8, 16, 32, 64)
BATCH = 64
CONTEXT = 8192
Lengths = npt.NDArray[np.int64]


def trace_lengths(path: Path) -> tuple[Lengths, Lengths]:
    """Prompt and output lengths of a trace, those that fit into CONTEXT."""
    with path.open(newline="") as file:
        rows = [(int(r["ContextTokens"]), int(r["GeneratedTokens"])) for r in csv.DictReader(file)]
    fitting = np.array([row for row in rows if row[0] > 0 and row[1] > 0 and sum(row) <= CONTEXT])
    return fitting[:, 0], fitting[:, 1]


def unused_share(prompts: Lengths, outputs: Lengths, block: int) -> tuple[float, float]:
    """Unused of allocated slots, at full length and summed over every decode step."""
    full = prompts + outputs - 1  # the last token needs no slot
    at_end = 1 - full.sum() / (-(-full // block) * block).sum()
    used = allocated = 0
    for prompt, output in zip(prompts.tolist(), outputs.tolist(), strict=True):
        lengths = np.arange(prompt, prompt + output)
        used += int(lengths.sum())
        allocated += int((-(-lengths // block) * block).sum())
    return float(at_end), 1 - used / allocated


def bookkeeping_ns(prompts: Lengths, outputs: Lengths, block: int) -> float:
    """Nanoseconds of plan and commit per token, with BATCH sequences running."""
    count = len(prompts)
    engine = _core.Engine(
        blocks=int((-(-(prompts + outputs) // block)).sum()) + 1,
        slots_per_block=block,
        context_tokens=CONTEXT,
        token_budget=256,
        sequences_max=BATCH,
        end_of_text=[],
        now=0,
    )
    pending: _core.Arrivals | None = _core.Arrivals(
        ids=np.arange(count, dtype=np.uint64),
        tenants=np.zeros(count, np.uint32),
        arrived_at=np.zeros(count, np.int64),
        priorities=np.zeros(count, np.int32),
        output_tokens_max=outputs.astype(np.int64),
        ignore_end_of_text=np.ones(count, np.bool_),
        samples=np.ones(count, np.int64),
        offsets=np.concatenate(([0], np.cumsum(prompts))).astype(np.int64),
        tokens=np.full(int(prompts.sum()), 5, np.int32),
    )
    nobody, no_reasons = np.empty(0, np.uint64), np.empty(0, np.uint8)
    spent, now = 0.0, 0
    while True:
        now += 1_000_000
        started = time.perf_counter()
        plan, _ = engine.plan(now, pending, nobody, no_reasons)
        spent += time.perf_counter() - started if pending is None else 0.0
        pending = None
        if plan.tokens == 0:
            return spent / float((prompts + outputs - 1).sum()) * 1e9
        wanted = plan.logits
        tokens, offsets = np.full(wanted, 7, np.int32), np.arange(wanted + 1, dtype=np.int32)
        started = time.perf_counter()
        engine.commit(plan.step, tokens, offsets, now)
        spent += time.perf_counter() - started


class Batch:
    """BATCH sequences in KV memory of one block size, for one decode step."""

    def __init__(self, lengths: Lengths, block: int) -> None:
        layout = _core.KvLayout(
            layers=LAYERS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, block_tokens=block
        )
        per_sequence = -(-lengths // block)
        total = int(per_sequence.sum())
        self.memory = _core.KvMemory(layout, "bf16", total)
        fill_with_numbers(self.memory)
        width = int(per_sequence.max())
        self.in_order = np.zeros((len(lengths), width), np.int32)
        self.shuffled = np.zeros((len(lengths), width), np.int32)
        order = np.random.default_rng(3).permutation(total).astype(np.int32)
        first = 0
        for row, count in enumerate(per_sequence.tolist()):
            self.in_order[row, :count] = np.arange(first, first + count)
            self.shuffled[row, :count] = order[first : first + count]
            first += count
        self.lengths = lengths.astype(np.int32)
        self.qkv = np.full(
            (len(lengths), (QUERY_HEADS + 2 * KV_HEADS) * HEAD_DIM), 0.01, np.float32
        )
        self.out = np.empty((len(lengths), QUERY_HEADS * HEAD_DIM), np.float32)
        self.cosine = np.ones((CONTEXT, HEAD_DIM // 2), np.float32)
        self.sine = np.zeros((CONTEXT, HEAD_DIM // 2), np.float32)

    def step(
        self, kernels: _core.CpuKernels, view: _core.KvView, tables: npt.NDArray[np.int32]
    ) -> None:
        """Append and attention of one token of every sequence, in all layers."""
        count = len(self.lengths)
        batch = _core.Batch(
            query_start=np.arange(count + 1, dtype=np.int32),
            context_length=self.lengths,
            rows=np.arange(count, dtype=np.int32),
            positions=self.lengths - 1,
            block_tables=tables,
        )
        kernels.begin_step(view, batch, QUERY_HEADS)
        for layer in range(LAYERS):
            address, stride = self.qkv.ctypes.data, self.qkv.shape[1]
            kernels.kv_append(layer, self.cosine, self.sine, address, stride, QUERY_HEADS)
            kernels.paged_attention(
                layer,
                address,
                stride,
                QUERY_HEADS,
                HEAD_DIM**-0.5,
                self.out.ctypes.data,
                self.out.shape[1],
            )


def attention_ratio(
    kernels: _core.CpuKernels, lengths: Lengths, block: int, repeats: int
) -> tuple[float, float]:
    """(milliseconds of a paged step, contiguous speed over paged speed), medians of pairs."""
    batch = Batch(lengths, block)
    paged, contiguous = batch.memory.view(), batch.memory.contiguous_view()
    pairs = []
    for repeat in range(repeats + 1):
        started = time.perf_counter()
        batch.step(kernels, paged, batch.shuffled)
        middle = time.perf_counter()
        batch.step(kernels, contiguous, batch.in_order)
        ended = time.perf_counter()
        if repeat:
            pairs.append((middle - started, (middle - started) / (ended - middle)))
    return statistics.median(p[0] for p in pairs) * 1e3, statistics.median(p[1] for p in pairs)


def main() -> None:
    """Prints one table per kind of length."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lengths", type=Path, help="CSV of a trace")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    kernels = _core.CpuKernels(options.threads)
    print(machine.header(kernels))
    kinds: list[tuple[str, Lengths, Lengths]] = [
        (f"{length} tokens", np.full(256, length // 2), np.full(256, length - length // 2 + 1))
        for length in SHORT
    ]
    if options.lengths is not None:
        prompts, outputs = trace_lengths(options.lengths)
        chosen = np.random.default_rng(0).permutation(len(prompts))[:512]
        kinds.append((options.lengths.stem, prompts[chosen], outputs[chosen]))
    print(
        "\nsequences            block   unused at end   over life   bookkeeping ns/token   "
        "attention ms/step   price of paging   fit against longest"
    )
    for name, prompts, outputs in kinds:
        longest = CONTEXT
        for block in BLOCKS:
            at_end, over_life = unused_share(prompts, outputs, block)
            booked = bookkeeping_ns(prompts, outputs, block)
            full = prompts + outputs - 1
            step, ratio = attention_ratio(kernels, full[:BATCH], block, options.repeats)
            fit = longest / float((-(-full // block) * block).mean())
            print(
                f"{name:20} {block:5}   {at_end:13.1%}   {over_life:9.1%}   {booked:20.0f}   "
                f"{step:17.2f}   {ratio - 1:15.1%}   {fit:18.1f}x"
            )
    print("\n" + machine.state(kernels))


if __name__ == "__main__":
    main()
