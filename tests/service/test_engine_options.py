"""A request's options in the engine's loop: among neighbours, and when it is preempted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from engine_harness import Harness
from scripted_model import END_OF_TEXT, Gate, expected

from kvledger import _core
from kvledger.engine import EndReason, StepOutcome
from kvledger.logit_changes import ChangeOptions, LogitChanges
from kvledger.logprobs import TokenLogprobs
from kvledger.sampling import SamplingParameters

PENALTIES = ChangeOptions(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.8)


def flatten(logits: torch.Tensor, plan: _core.Plan) -> None:
    """Makes the script a mere tendency, so that penalties decide."""
    logits *= 0.1


def penalized(seed: int, **others: Any) -> SamplingParameters:
    return SamplingParameters(temperature=0.9, seed=seed, changes=PENALTIES, **others)


@pytest.fixture
def harness() -> Iterator[Harness]:
    harness = Harness()
    yield harness
    harness.close()


def test_a_stop_token_ends_its_sequence_without_another_step(harness: Harness) -> None:
    """The caller would pay for tokens after the end that it had set itself."""
    gate = Gate()
    harness.model.before_step = lambda plan: gate.wait()
    harness.submit(1, "a", max_tokens=50, stop_ids=frozenset({ord("d")}))
    harness.engine.start()
    gate.open()
    assert harness.reason(1) == EndReason.STOP
    assert bytes(harness.tokens[1]) == b"bcd"
    assert gate.arrived == 3
    harness.require_all_free()


def test_a_stop_token_of_one_is_nothing_to_another(harness: Harness) -> None:
    """A neighbour's text would end where somebody else's should."""
    harness.submit(1, "a", max_tokens=9, stop_ids=frozenset({ord("d"), ord("e")}))
    harness.submit(2, "a", max_tokens=9)
    harness.submit(3, "a", max_tokens=9, stop_ids=frozenset({ord("z")}))
    harness.engine.start()
    for sequence, reason in ((1, EndReason.STOP), (2, EndReason.LENGTH), (3, EndReason.LENGTH)):
        assert harness.reason(sequence) == reason
    assert bytes(harness.tokens[1]) == b"bcd"
    assert bytes(harness.tokens[2]).decode() == expected("a", 9)
    assert harness.tokens[3] == harness.tokens[2]


def test_an_end_that_may_not_come_yet_comes_when_it_may(harness: Harness) -> None:
    """A text would end before the length that its caller asked for, or never."""
    changes = ChangeOptions(min_tokens=5, ending_ids=(END_OF_TEXT, ord("f")))
    options = SamplingParameters(changes=changes)
    stop_ids = frozenset({ord("f")})
    harness.submit(1, "!", max_tokens=50, sampling=options, stop_ids=stop_ids)
    harness.submit(2, "d", max_tokens=50, sampling=options, stop_ids=stop_ids)
    harness.submit(3, "c" * 40 + "a", max_tokens=50, sampling=options, stop_ids=stop_ids)
    harness.engine.start()
    for sequence in (1, 2, 3):
        assert harness.reason(sequence) == EndReason.STOP
        tokens = harness.tokens[sequence]
        assert tokens[-1] in (END_OF_TEXT, ord("f"))
        assert not {END_OF_TEXT, ord("f")} & set(tokens[:5])
    assert bytes(harness.tokens[3][:4]) == b"bcde"
    assert len(harness.tokens[3]) > 5


def test_penalties_and_seeds_survive_preemption() -> None:
    """Whoever is preempted would repeat itself, or get other tokens than without."""
    found = []
    for blocks in (64, 10):
        harness = Harness(
            blocks=blocks, slots_per_block=4, context_tokens=64, sequences_max=8, forecast=False
        )
        harness.model.after_step = flatten
        for sequence in range(12):
            harness.submit(
                sequence,
                "abcabcabc",
                max_tokens=20,
                ignore_eos=True,
                sampling=penalized(sequence) if sequence % 3 else SamplingParameters(),
            )
        harness.engine.start()
        for sequence in range(12):
            assert harness.reason(sequence) == EndReason.LENGTH
        preemptions = sum(int(harness.receipt(s)["preemptions"]) for s in range(1, 12, 3))
        found.append({sequence: harness.tokens[sequence] for sequence in range(12)})
        harness.close()
        assert not harness.engine._open, "nothing is kept of who has ended"
        assert not harness.engine._owners
        assert not harness.engine._sampler._changes
    assert preemptions > 0, "it was tight"
    assert found[0] == found[1]
    alone = Harness()
    alone.model.after_step = flatten
    alone.submit(1, "abcabcabc", max_tokens=20, ignore_eos=True, sampling=penalized(7))
    alone.engine.start()
    alone.receipt(1)
    alone.close()
    assert alone.tokens[1] == found[0][7]


def test_a_request_whose_options_break_fails_alone(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request would end the engine, or all requests that run beside it."""
    make = LogitChanges.__init__

    def broken(self: LogitChanges, options: ChangeOptions, prompt: Any) -> None:
        if options.min_tokens == 13:
            raise MemoryError("injected")
        make(self, options, prompt)
        if options.min_tokens == 14:
            del self.bias_ids  # every step with it raises

    monkeypatch.setattr(LogitChanges, "__init__", broken)
    harness.model.after_step = flatten
    harness.submit(1, "abc", max_tokens=20, ignore_eos=True, sampling=penalized(3))
    harness.engine.start()
    harness.receipt(1)
    for sequence, least in ((2, 13), (3, 14)):
        options = ChangeOptions(presence_penalty=1.0, min_tokens=least)
        harness.submit(sequence, "abc", sampling=SamplingParameters(changes=options))
    harness.submit(4, "abc", max_tokens=20, ignore_eos=True, sampling=penalized(3))
    for sequence in (2, 3):
        assert harness.reason(sequence) == EndReason.FAILED
        assert harness.tokens[sequence] == []
    assert harness.reason(4) == EndReason.LENGTH
    assert harness.tokens[4] == harness.tokens[1]
    assert harness.engine.alive
    harness.require_all_free()


def test_log_probabilities_go_to_who_asked_with_the_token(harness: Harness) -> None:
    """A caller would get the numbers of somebody else's tokens."""
    told: dict[int, list[TokenLogprobs]] = {1: [], 2: [], 3: []}

    def note(outcome: StepOutcome) -> None:
        for sequence, logprobs in outcome.logprobs.items():
            told[sequence].append(logprobs)

    harness.publish_hook = note
    harness.model.after_step = flatten
    for sequence, count in ((1, 2), (2, None), (3, 0)):
        sampling = SamplingParameters(temperature=2.0, seed=sequence, top_logprobs=count)
        harness.submit(
            sequence, "ghi"[sequence - 1], max_tokens=12, ignore_eos=True, sampling=sampling
        )
    harness.engine.start()
    for sequence in (1, 2, 3):
        harness.receipt(sequence)
    harness.close()
    assert told[2] == []
    total = np.log(np.exp(2.0) + 260)
    for sequence in (1, 3):
        tokens, last = harness.tokens[sequence], ord("ghi"[sequence - 1])
        assert [logprobs.token for logprobs in told[sequence]] == tokens
        for logprobs, token in zip(told[sequence], tokens, strict=True):
            follows = int(harness.model.following[last])
            wanted = (2.0 if token == follows else 0.0) - total
            assert logprobs.logprob == pytest.approx(wanted, abs=1e-6)
            if sequence == 1:
                assert [other for other, _ in logprobs.top] == [follows, 0]
            last = token
