"""Samples and prompt log-probabilities over a real model: shared blocks change no number."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_harness import without_forecast
from stepping import logits_after, served
from tiny_model import write_gguf

from kvledger.engine import Engine, Job, StepOutcome
from kvledger.logprobs import PromptLogprobs, token_logprobs
from kvledger.sampling import Sampler, SamplingParameters
from kvledger.served_model import ServedModel

PATIENCE = 60.0
PROMPT = np.arange(3, 3 + 75, dtype=np.int32)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", seed=5)


class Run:
    """An engine over a model of its own, until everything submitted has its receipt."""

    def __init__(self, path: Path, *arguments: str) -> None:
        self.model: ServedModel = served(path, *arguments)
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.prompts: dict[int, list[PromptLogprobs]] = defaultdict(list)
        self.receipts: dict[int, Any] = {}
        self._changed = threading.Condition()
        rows = 8
        self.engine = Engine(self.model.core, self.model.llama, Sampler(rows), self._publish)

    def run(self, *jobs: Job) -> Run:
        for job in jobs:
            self.engine.submit(job)
        self.engine.start()
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.receipts) == len(jobs), PATIENCE)
        self.engine.stop(PATIENCE)
        assert self.model.core.audit() is None
        return self

    def _publish(self, outcome: StepOutcome) -> None:
        with self._changed:
            for sequence, token, _ in outcome.report.tokens.tolist():
                self.tokens[sequence].append(token)
            for sequence, pieces in outcome.prompts.items():
                self.prompts[sequence].extend(pieces)
            for receipt in outcome.report.receipts:
                self.receipts[int(receipt["sequence"])] = receipt
            self._changed.notify_all()


def job(sequence: int, seed: int, prompt: np.ndarray = PROMPT, **fields: Any) -> Job:
    return Job(
        sequence=sequence,
        tenant=0,
        prompt=prompt,
        arrived_at=time.monotonic_ns(),
        max_tokens=fields.pop("max_tokens", 40),
        sampling=SamplingParameters(temperature=1.3, seed=seed),
        ignore_eos=True,
        **fields,
    )


# (arguments, other jobs): one block more or less, chunks that end inside blocks, and a pool in
# which samples lose their blocks again and again.
ARMS = {
    "plenty": ("--max-sequences", "8"),
    "few rows": ("--max-sequences", "3"),
    "chunks": ("--max-sequences", "8", "--token-budget", "11"),
    "thrash": ("--max-sequences", "8", "--kv-blocks", "9"),
}


@pytest.mark.parametrize("kv_format", ["f32", "bf16"])
@pytest.mark.parametrize("arm", ARMS)
def test_a_sample_is_what_a_request_of_its_own_gets(path: Path, arm: str, kv_format: str) -> None:
    """A shared or copied block would hold somebody else's keys and values."""
    own = ("--kv-format", kv_format)
    alone = Run(path, *own).run(*(job(100 + i, seed=7 + i) for i in range(6)))
    together = Run(path, *ARMS[arm], *own).run(job(1, seed=7, samples=6))
    assert [together.tokens[1 + i] for i in range(6)] == [alone.tokens[100 + i] for i in range(6)]
    assert len({tuple(tokens) for tokens in together.tokens.values()}) > 1
    receipt = together.receipts[1]
    assert receipt["shared_tokens"] > 0
    if arm == "plenty":
        assert receipt["computed_tokens"] == len(PROMPT) + 6 * 39
    if arm == "thrash":
        assert receipt["preemptions"] > 0, "this arm means to preempt"


@pytest.mark.parametrize("budget", ["8", "11", "256"])
def test_log_probabilities_of_a_prompt_are_those_of_its_beginnings(path: Path, budget: str) -> None:
    """Numbers would depend on how a prompt was cut, or belong to the token before or after."""
    prompt = PROMPT[:40]
    run = Run(path, "--max-sequences", "8", "--token-budget", budget).run(
        job(1, 1, prompt, prompt_logprobs=3, max_tokens=3, samples=2),
        job(20, 1, prompt[:9], max_tokens=9),
        job(30, 1, prompt[:1], prompt_logprobs=3, max_tokens=2),
    )
    told = [
        (piece.first + row, each)
        for piece in run.prompts[1]
        for row, each in enumerate(piece.rows(0, len(piece.tokens)))
    ]
    assert [place for place, _ in told] == list(range(1, 40)), "each once, in order"
    assert set(run.prompts) == {1}, "who did not ask, or has nothing to tell, is told nothing"
    model = served(path)
    for place, each in told[::6]:
        logits = logits_after(model, prompt[:place].tolist()).numpy()
        found = token_logprobs(logits, int(prompt[place]), 3)
        assert each.token == found.token == prompt[place]
        assert each.logprob == pytest.approx(found.logprob, abs=1e-6)
        assert [token for token, _ in each.top] == [token for token, _ in found.top]


def test_a_preempted_prompt_is_told_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller would get tokens of its prompt twice."""
    without_forecast(monkeypatch)
    run = Run(path, "--max-sequences", "8", "--kv-blocks", "9").run(
        *(job(10 * i, i, prompt_logprobs=0, max_tokens=90) for i in range(1, 5))
    )
    assert sum(int(receipt["preemptions"]) for receipt in run.receipts.values()) > 0
    for i in range(1, 5):
        pieces = run.prompts[10 * i]
        places = [piece.first + row for piece in pieces for row in range(len(piece.tokens))]
        assert places == list(range(1, len(PROMPT)))


def test_prompt_log_probabilities_that_fail_end_their_request_alone(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A neighbour would lose its answer, or the engine its thread."""
    run = Run(path, "--max-sequences", "8")

    def broken(tokens: object) -> None:
        raise RuntimeError("no logits")

    monkeypatch.setattr(run.model.llama, "score", broken)
    run.run(job(1, 1, prompt_logprobs=1, max_tokens=20), job(2, 1, max_tokens=20))
    assert int(run.receipts[1]["end_reason"]) == 5
    assert int(run.receipts[2]["end_reason"]) == 2
    assert len(run.tokens[2]) == 20
