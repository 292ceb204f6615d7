"""Running the golden prompts through the engine, in whatever company and order."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvledger.engine import EndReason, Engine, Job, StepOutcome
from kvledger.sampling import Sampler, SamplingParameters
from kvledger.served_model import ServedModel, load
from kvledger.settings import load_settings

GOLDEN = json.loads(
    (Path(__file__).parent.parent / "data" / "smollm2_greedy_fp32.json").read_text("utf-8")
)
ITEMS: list[dict[str, Any]] = GOLDEN["items"]

# Below this gap between the two best logits, another choice is a tie and not an error.
TIE = 1e-3


@dataclass
class Outcome:
    """What became of one sequence."""

    tokens: list[int] = field(default_factory=list)
    end_reason: EndReason | None = None
    preemptions: int = 0
    recomputed_tokens: int = 0


class Harness:
    """An engine with its thread, and a record of everything it publishes."""

    def __init__(self, *arguments: str, tokens: int = GOLDEN["n_new"]) -> None:
        """`tokens` is how many of each continuation are made and compared."""
        self.tokens: int = tokens
        settings = load_settings(["--dev", *arguments])
        self.model: ServedModel = load(settings)
        self.outcomes: dict[int, Outcome] = {}
        self.steps = 0
        self._changed = threading.Condition()
        self._died = False
        self.engine = Engine(
            self.model.core,
            self.model.llama,
            Sampler(settings.sequences_max),
            self._publish,
            self._on_death,
        )

    def __enter__(self) -> Harness:
        self.engine.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self.engine.stop()
        assert self.model.core.audit() is None

    def submit(self, sequence: int, prompt: list[int], max_tokens: int) -> None:
        self.outcomes[sequence] = Outcome()
        self.engine.submit(
            Job(
                sequence=sequence,
                tenant=0,
                prompt=np.array(prompt, dtype=np.int32),
                arrived_at=time.monotonic_ns(),
                max_tokens=max_tokens,
                sampling=SamplingParameters(),
            )
        )

    def wait(self, ready: Callable[[], bool]) -> None:
        """Waits until something published makes `ready` true."""
        with self._changed:
            assert self._changed.wait_for(lambda: ready() or self._died, timeout=600)
        assert not self._died

    def wait_for(self, sequences: Iterable[int]) -> None:
        """Waits until all of them have ended."""
        wanted = list(sequences)
        self.wait(lambda: all(self.outcomes[s].end_reason is not None for s in wanted))

    def all_ended(self) -> bool:
        """Whether nothing runs or waits: then no further step comes."""
        return all(outcome.end_reason is not None for outcome in self.outcomes.values())

    def _publish(self, outcome: StepOutcome) -> None:
        report = outcome.report
        with self._changed:
            for sequence, token, _ in report.tokens.tolist():
                self.outcomes[sequence].tokens.append(token)
            for receipt in report.receipts:
                ended = self.outcomes[int(receipt["sequence"])]
                ended.preemptions = int(receipt["preemptions"])
                ended.recomputed_tokens = int(receipt["recomputed_tokens"])
                ended.end_reason = EndReason(int(receipt["end_reason"]))
            self.steps += 1
            self._changed.notify_all()

    def _on_death(self) -> None:
        with self._changed:
            self._died = True
            self._changed.notify_all()


def submit_item(harness: Harness, index: int) -> None:
    """Submits golden prompt `index` as the sequence of that number."""
    harness.submit(index, ITEMS[index]["prompt_ids"], harness.tokens)


def one_by_one(harness: Harness) -> None:
    """Each prompt alone, the next when it has ended."""
    for index in range(len(ITEMS)):
        submit_item(harness, index)
        harness.wait_for([index])


def all_at_once(harness: Harness) -> None:
    """All prompts in the same moment."""
    for index in range(len(ITEMS)):
        submit_item(harness, index)
    harness.wait_for(range(len(ITEMS)))


def longest_first(harness: Harness) -> None:
    """The longest prompt takes most of the pool, the others share and outgrow the rest."""
    for index in sorted(range(len(ITEMS)), key=lambda i: -len(ITEMS[i]["prompt_ids"])):
        submit_item(harness, index)
    harness.wait_for(range(len(ITEMS)))


def among_cancelled_neighbours(harness: Harness) -> None:
    """Prompts arrive while others run; in between come neighbours that are cancelled, before
    their first token or after some."""
    chance = random.Random(20)
    next_neighbour = 1000
    living: list[tuple[int, int]] = []  # neighbours, and the tokens after which they leave

    def cancel_those_due(everyone: bool = False) -> None:
        for neighbour, after in list(living):
            outcome = harness.outcomes[neighbour]
            if everyone or len(outcome.tokens) >= after or outcome.end_reason is not None:
                harness.engine.end(neighbour, EndReason.CANCELLED)
                living.remove((neighbour, after))

    order = list(range(len(ITEMS)))
    chance.shuffle(order)
    for index in order:
        submit_item(harness, index)
        for _ in range(2):
            prompt = chance.choice(ITEMS[:9])["prompt_ids"]
            harness.submit(next_neighbour, prompt[: chance.randrange(5, len(prompt))], 90)
            living.append((next_neighbour, chance.choice([0, 1, 5, 30])))
            next_neighbour += 1
        until = harness.steps + chance.randrange(1, 20)
        harness.wait(lambda until=until: harness.steps >= until or harness.all_ended())
        cancel_those_due()
    harness.wait_for(range(len(ITEMS)))
    cancel_those_due(everyone=True)
    harness.wait_for(list(harness.outcomes))


@dataclass(frozen=True)
class Difference:
    """The first token of a prompt that is not the golden one."""

    name: str
    step: int
    gap: float  # between the golden file's two best logits there

    def __str__(self) -> str:
        return f"{self.name}: step {self.step}, gap {self.gap:.4f}"


def differences(harness: Harness) -> list[Difference]:
    """Where outputs leave the golden ones, at most once per prompt."""
    found = []
    for index, item in enumerate(ITEMS):
        golden, got = item["output_ids"][: harness.tokens], harness.outcomes[index].tokens
        step = next((i for i, (a, b) in enumerate(zip(golden, got, strict=False)) if a != b), None)
        if step is None and len(golden) != len(got):
            step = min(len(golden), len(got)) - 1
        if step is not None:
            found.append(Difference(item["name"], step, item["top2_gap"][step]))
    return found
