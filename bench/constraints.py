"""What constraints cost a step: masks, choosing under them, and learning the token, by rows.

    python -m bench.constraints --model PATH [--steps 60]

Each row has a constraint of its own and goes its own way through it, with logits drawn at random.
What is timed is one greedy call of the sampler for all rows, as in a step of the engine, in seconds
of the processor, so that neighbours on the machine count little; the same call for rows without
constraints stands beside it. Also told: what compiling takes in the server's process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from bench import machine
from kvledger import _core
from kvledger.constraints.matcher import compile_constraint
from kvledger.constraints.source import ConstraintSource
from kvledger.constraints.vocabulary import Vocabulary
from kvledger.logit_changes import ChangeOptions, LogitChanges
from kvledger.models.opening import open_model
from kvledger.sampling import Sampler, SamplingParameters

_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string"},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
SOURCES = {
    "schema": ConstraintSource("json_schema", json.dumps(_SCHEMA)),
    "any object": ConstraintSource("json_object"),
    "regex": ConstraintSource("regex", r"([A-Z][a-z]{2,10} \d{4}-\d{2}; ){1,100}"),
    "lark": ConstraintSource(
        "lark_grammar",
        'start: expr\nexpr: term (("+" | "-") term)*\nterm: /[0-9]+/ | "(" expr ")"\n',
    ),
}
ROWS = (1, 8, 32)


def prepared_vocabulary(model: Path) -> tuple[Vocabulary, int]:
    """The vocabulary of a GGUF file or a folder, and its size."""
    with open_model(str(model)) as opened:
        tokenizer = opened.tokenizer
    controls = {id_: text.encode() for id_, text in tokenizer.control_texts.items()}
    vocabulary = Vocabulary(tokenizer.token_bytes, controls, sorted(tokenizer.eos_ids))
    return vocabulary, tokenizer.vocabulary_size


def step_seconds(changes: list[LogitChanges | None], size: int, steps: int) -> list[float]:
    """Time of the sampler's call in each of some steps, for rows that go their own ways."""
    sampler = Sampler(len(changes))
    for row, each in enumerate(changes):
        sampler.assign(row, SamplingParameters(), each)
    rows = np.arange(len(changes), dtype=np.int32)
    generator = torch.Generator().manual_seed(0)
    times = []
    for step in range(steps):
        logits = torch.randn(len(changes), size, generator=generator)
        started = time.thread_time()
        tokens = sampler.sample(logits, rows, np.full(len(rows), step, dtype=np.int32))
        times.append(time.thread_time() - started)
        assert (tokens >= 0).all(), "no row is broken"
    return times


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    print(machine.header(_core.CpuKernels(1, "auto")))
    vocabulary, size = prepared_vocabulary(options.model)
    started = time.thread_time()
    tokenizer = vocabulary.prepared()
    print(f"vocabulary of {size} tokens prepared in {time.thread_time() - started:.2f} s")
    prompt = np.array([1], dtype=np.int32)
    print(f"{'constraint':12}{'rows':>5}{'compile ms':>12}", end="")
    print(f"{'median ms':>11}{'p95 ms':>9}{'per row us':>12}{'without ms':>12}")
    for name, source in SOURCES.items():
        for rows in ROWS:
            changes: list[LogitChanges | None] = []
            compiling = []
            for _ in range(rows):
                started = time.thread_time()
                constraint = compile_constraint(tokenizer, source)
                compiling.append(time.thread_time() - started)
                changes.append(LogitChanges(ChangeOptions(constraint=constraint), prompt))
            plain = statistics.median(step_seconds([None] * rows, size, options.steps))
            times = step_seconds(changes, size, options.steps)
            median = statistics.median(times)
            print(
                f"{name:12}{rows:5}{statistics.median(compiling) * 1e3:12.1f}{median * 1e3:11.2f}"
                f"{np.quantile(times, 0.95) * 1e3:9.2f}{(median - plain) / rows * 1e6:12.0f}"
                f"{plain * 1e3:12.2f}"
            )


if __name__ == "__main__":
    main()
