"""Blocks that are full of NaN whenever they change hands: nothing of it may show.

    python tests/soak/poisoned_memory.py --reuses 1000000 --seed 1

A tiny model answers requests of several tenants in a small pool, with prefixes that are reused,
samples that share blocks, requests that are cancelled, and preemptions. Before a step every block
that it begins to write, or to copy into, is filled with NaN, as all memory is at the start. A
kernel that reads one slot that was not written for its sequence gets NaN, and every sum with it is
NaN. All logits must be numbers, and all answers those of the same run without poison.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1] / "service")]

import numpy as np
import pytest
from engine_harness import without_forecast
from stepping import arrivals, served
from tiny_model import write_gguf

from kvledger.engine import EndReason

# f32 and bf16 with all bits set are NaN.
_NAN = 0xFF
_GROUP = 0x80000001
_KEEPS_AND_REUSES, _SHARES, _WRITES_SHARED = 3, 4, 8
_OPEN_MAX = 10
# Of about as many tokens in each format.
_BLOCKS = {"f32": "40", "bf16": "22"}
_PRESSED = (
    *("--token-budget", "24", "--max-sequences", "8"),
    *("--block-tokens", "16", "--threads", "1"),
)
# What is filled: nothing; what begins to be written; or, to see that it would be found, now and
# then a block that holds what somebody needs.
Poison = Literal["none", "fresh", "needed"]


@dataclass
class Outcome:
    """What a run saw; `answers` are tokens by sequence, of those that ended by themselves."""

    answers: dict[int, list[int]] = field(default_factory=dict)
    steps: int = 0
    reuses: int = 0  # blocks that began to be written and had been written before
    copies: int = 0
    reused_tokens: int = 0
    preemptions: int = 0
    cancelled: int = 0
    not_numbers: int = 0  # steps with logits that are none
    audits: list[str] = field(default_factory=list)


class PoisonedRun:
    """One run; the same seed draws the same requests."""

    def __init__(self, path: Path, kv_format: str, seed: int, poison: Poison) -> None:
        self._chance = random.Random(seed)
        self._model = served(
            path, "--kv-format", kv_format, "--kv-blocks", _BLOCKS[kv_format], *_PRESSED
        )
        memory: Any = self._model.llama._memory.bytes  # a view: what is written there is there
        self._blocks = memory.reshape(-1, self._model.layout.block_bytes)
        self._slots = self._model.layout.slots_per_block(kv_format)
        self._poison = poison
        self._texts = [[self._token() for _ in range(60)] for _ in range(6)]
        self._written: set[int] = set()
        self._open: dict[int, int] = {}  # first sequence of a request to its samples
        self._tokens: dict[int, list[int]] = defaultdict(list)
        self._last = 0
        self.outcome = Outcome()
        if poison != "none":
            self._blocks[:] = _NAN

    def run(self, reuses: int) -> Outcome:
        """Steps until so many blocks have changed hands, and everybody has ended."""
        while self.outcome.reuses < reuses or self._open:
            self._step(more=self.outcome.reuses < reuses)
        return self.outcome

    def _token(self) -> int:
        return self._chance.randrange(1, 250)

    def _step(self, more: bool) -> None:
        core, seen = self._model.core, self.outcome
        seen.steps += 1
        now = seen.steps * 1_000_000
        ends, reasons = self._drawn_ends()
        plan, report = core.plan(now, self._arrivals(now) if more else None, ends, reasons)
        self._note(report)
        if not plan.tokens:
            return
        self._look_at(plan)
        logits = self._model.llama.forward(plan).numpy()
        seen.not_numbers += not bool(np.isfinite(logits).all())
        chosen = np.nan_to_num(logits).argmax(axis=1).astype(np.int32)
        self._note(core.commit(plan.step, chosen, None, now))
        if seen.steps % 64 == 0 and (wrong := core.audit()):
            seen.audits.append(wrong)

    def _arrivals(self, now: int) -> Any:
        if len(self._open) >= _OPEN_MAX or self._chance.random() < 0.4:
            return None
        tenant = self._chance.randint(1, 3)
        text = self._chance.choice(self._texts)[: self._chance.randint(1, 60)]
        prompt = [*text, *(self._token() for _ in range(self._chance.randint(1, 12)))]
        shares = self._chance.random() < 0.3
        samples = self._chance.choice((1, 1, 1, 3))
        first, self._last = self._last + 1, self._last + samples
        self._open[first] = samples
        return arrivals(
            [prompt],
            max_tokens=self._chance.randint(1, 60),
            first_id=first,
            tenants=np.array([tenant], np.uint32),
            arrived_at=np.array([now], np.int64),
            samples=np.array([samples], np.int64),
            own_scopes=np.array([tenant], np.uint32),
            shared_scopes=np.array([_GROUP if shares else 0], np.uint32),
            shared_tokens=np.array([len(text) if shares else 0], np.int64),
            scope_flags=np.array(
                [_KEEPS_AND_REUSES | (_SHARES | _WRITES_SHARED if shares else 0)], np.uint8
            ),
        )

    def _drawn_ends(self) -> tuple[Any, Any]:
        chosen = []
        if self._open and self._chance.random() < 0.03:
            first = self._chance.choice(list(self._open))
            chosen = list(range(first, first + self._open[first]))
            self.outcome.cancelled += 1
        reason = np.full(len(chosen), int(EndReason.CANCELLED), np.uint8)
        return np.array(chosen, np.uint64), reason

    def _look_at(self, plan: Any) -> None:
        """Poisons what this step begins to write."""
        tables, starts = plan.block_tables, plan.query_start
        fresh = [int(block) for block in plan.copy_to]
        needed = []
        for place, row in enumerate(plan.rows.tolist()):
            if starts[place] == starts[place + 1]:
                continue
            begun = int(plan.positions[starts[place]])
            whole, part = divmod(begun, self._slots)
            last = -(-int(plan.context_length[place]) // self._slots)
            fresh += tables[row, whole + (part > 0) : last].tolist()
            needed += tables[row, :whole].tolist()
        self.outcome.copies += int(plan.copies)
        self.outcome.reuses += sum(block in self._written for block in fresh)
        self._written.update(fresh)
        if self._poison != "none" and fresh:
            self._blocks[fresh] = _NAN
        if self._poison == "needed" and needed and self.outcome.steps % 50 == 0:
            self._blocks[needed[0]] = _NAN

    def _note(self, report: Any) -> None:
        self.outcome.preemptions += len(report.preemptions)
        assert len(report.refusals) == 0
        for sequence, token, _ in report.token_list:
            self._tokens[sequence].append(token)
        for receipt in report.receipts:
            first = int(receipt["sequence"])
            self.outcome.reused_tokens += int(receipt["reused_own"] + receipt["reused_shared"])
            for sequence in range(first, first + self._open.pop(first)):
                tokens = self._tokens.pop(sequence, [])
                if receipt["end_reason"] != EndReason.CANCELLED:
                    self.outcome.answers[sequence] = tokens


@dataclass
class Verdict:
    """A run with poison beside the same without."""

    poisoned: Outcome
    wrong: list[str]


def poisoned(reuses: int, seed: int, kv_format: str, poison: Poison = "fresh") -> Verdict:
    """Both runs, and what is wrong."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        without_forecast(patch)  # blocks are to be taken from those that run, too
        path = write_gguf(Path(folder) / "tiny.gguf", seed=seed)
        clean = PoisonedRun(path, kv_format, seed, "none").run(reuses)
        seen = PoisonedRun(path, kv_format, seed, poison).run(reuses)
    wrong = [*clean.audits, *seen.audits]
    if clean.not_numbers or seen.not_numbers:
        wrong.append(f"{seen.not_numbers} steps with logits that are no numbers")
    if clean.answers != seen.answers:
        differ = sum(seen.answers.get(each) != clean.answers[each] for each in clean.answers)
        wrong.append(f"{differ} of {len(clean.answers)} answers differ from those without poison")
    return Verdict(seen, wrong)


def main() -> int:
    """The program; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--reuses", type=int, default=1_000_000, help="in each KV format")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    wrong = []
    for kv_format in ("f32", "bf16"):
        began = time.monotonic()
        verdict = poisoned(options.reuses, options.seed, kv_format)
        seen = verdict.poisoned
        print(
            f"{kv_format}: {seen.reuses} blocks changed hands in {seen.steps} steps; "
            f"{len(seen.answers)} answers, {seen.reused_tokens} tokens reused, {seen.copies} "
            f"blocks copied, {seen.preemptions} preemptions, {seen.cancelled} requests cancelled; "
            f"{time.monotonic() - began:.0f} s",
            flush=True,
        )
        wrong += [f"{kv_format}: {sentence}" for sentence in verdict.wrong]
    print("\n".join(wrong) or "nothing of it shows")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
