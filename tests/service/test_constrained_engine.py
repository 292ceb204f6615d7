"""Constraints in the engine's loop: among neighbours, preempted, with other options, and broken."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from constrained import PERSON, lark, ready, regex, require_person, schema
from engine_harness import Harness
from scripted_model import END_OF_TEXT, expected
from structlog.testing import CapturingLogger

from kvledger import _core, sampling
from kvledger.engine import EndReason, StepOutcome
from kvledger.errors import ConstraintDeadEnd
from kvledger.logit_changes import ChangeOptions, Constraint, ConstraintState
from kvledger.logprobs import TokenLogprobs
from kvledger.sampling import SamplingParameters


def flatten(logits: torch.Tensor, plan: _core.Plan) -> None:
    """Makes every token as likely as any other."""
    logits *= 0.0


def under(constraint: Constraint, seed: int | None = None, **changes: Any) -> SamplingParameters:
    """Greedy without a seed, else hot."""
    temperature = 0.0 if seed is None else 1.5
    return SamplingParameters(
        temperature=temperature,
        seed=seed or 0,
        changes=ChangeOptions(constraint=constraint, **changes),
    )  # fmt: skip


def text_of(tokens: list[int]) -> str:
    return b"".join(b"th" if t == 256 else bytes([t]) if t < 256 else b"" for t in tokens).decode()


@pytest.fixture
def harness() -> Iterator[Harness]:
    harness = Harness(blocks=256, context_tokens=1024)
    yield harness
    harness.close()


def test_an_output_matches_and_then_ends(harness: Harness) -> None:
    """A program would read what it cannot parse, or tokens after the end."""
    harness.model.after_step = flatten
    for seed in range(8):
        harness.submit(seed, "x", max_tokens=600, sampling=under(ready(schema(PERSON)), seed))
        harness.submit(
            100 + seed, "x", max_tokens=600, sampling=under(ready(regex("[a-f]+(th){2,3}!")), seed)
        )
    harness.engine.start()
    for seed in range(8):
        assert harness.reason(seed) == EndReason.STOP
        require_person(text_of(harness.tokens[seed]))
        assert harness.reason(100 + seed) == EndReason.STOP
        assert re.fullmatch("[a-f]+(th){2,3}!", text_of(harness.tokens[100 + seed]))
        assert harness.tokens[seed][-1] == harness.tokens[100 + seed][-1] == END_OF_TEXT
    harness.require_all_free()


def test_a_greedy_choice_is_constrained_too(harness: Harness) -> None:
    """The likeliest token would come although it leads away."""
    harness.submit(1, "a", max_tokens=20, sampling=under(ready(regex("[b-d]{2}z[a-z]{3}"))))
    harness.submit(2, "a", max_tokens=3)
    harness.engine.start()
    assert harness.reason(1) == EndReason.STOP
    assert bytes(harness.tokens[1][:6]) == b"bczabc"
    assert harness.reason(2) == EndReason.LENGTH
    assert bytes(harness.tokens[2]) == b"bcd"


def test_tokens_are_the_same_alone_in_company_and_after_preemption() -> None:
    """Whoever is preempted in the middle would begin its JSON anew, or get other tokens."""
    found = []
    preemptions = 0
    for blocks in (256, 24):
        harness = Harness(
            blocks=blocks,
            slots_per_block=8,
            context_tokens=160,
            sequences_max=8,
            forecast=False,
        )
        harness.model.after_step = flatten
        for sequence in range(10):
            constraint = ready(regex("([a-z]{3}-){20}!"))
            options = under(constraint, sequence) if sequence % 3 else SamplingParameters()
            harness.submit(sequence, "abcabc", max_tokens=90, sampling=options)
        harness.engine.start()
        for sequence in range(10):
            harness.receipt(sequence)
            if sequence % 3:
                assert harness.reason(sequence) == EndReason.STOP
                assert re.fullmatch("([a-z]{3}-){20}!", text_of(harness.tokens[sequence]))
        preemptions = sum(int(harness.receipt(s)["preemptions"]) for s in range(10) if s % 3)
        found.append({sequence: harness.tokens[sequence] for sequence in range(10)})
        harness.close()
        assert not harness.engine._open, "nothing is kept of who has ended"
        assert not harness.engine._sampler._changes
    assert preemptions > 0, "it was tight"
    assert found[0] == found[1]
    alone = Harness()
    alone.model.after_step = flatten
    alone.submit(1, "abcabc", max_tokens=90, sampling=under(ready(regex("([a-z]{3}-){20}!")), 7))
    alone.engine.start()
    alone.receipt(1)
    alone.close()
    assert alone.tokens[1] == found[0][7]


class Breaking:
    """A constraint whose states raise in a step of theirs, or leave nothing."""

    broken = None

    def __init__(self, how: str, after: int) -> None:
        self.how = how
        self.after = after

    def start(self) -> ConstraintState:
        if self.how == "start":
            raise MemoryError("injected")
        return _BreakingState(self.how, self.after)


class _BreakingState:
    def __init__(self, how: str, steps_left: int) -> None:
        self._how = how
        self._steps_left = steps_left

    def fill(self, words: npt.NDArray[np.int32]) -> None:
        if self._how == "fill" and not self._steps_left:
            raise RuntimeError("injected")
        words[:] = 0 if self._how == "nothing" and not self._steps_left else -1

    def learn(self, token: int) -> None:
        if self._how == "learn" and not self._steps_left:
            raise RuntimeError("injected")
        self._steps_left -= 1


@pytest.mark.parametrize("how", ["start", "fill", "learn", "nothing"])
def test_a_broken_constraint_ends_its_request_alone(harness: Harness, how: str) -> None:
    """One grammar would end all requests of a step, or change their tokens."""
    harness.model.after_step = flatten
    person = schema(PERSON)
    harness.submit(1, "x", max_tokens=300, sampling=under(ready(person), 5))
    harness.submit(2, "abc", max_tokens=40, sampling=SamplingParameters(temperature=1.0, seed=3))
    harness.engine.start()
    before = [harness.receipt(s) and list(harness.tokens[s]) for s in (1, 2)]
    harness.submit(11, "x", max_tokens=300, sampling=under(ready(person), 5))
    harness.submit(13, "x", max_tokens=300, sampling=under(Breaking(how, 7), 1))
    harness.submit(14, "x", max_tokens=300, sampling=under(Breaking(how, 0)))
    harness.submit(12, "abc", max_tokens=40, sampling=SamplingParameters(temperature=1.0, seed=3))
    for sequence, tokens in ((13, 7), (14, 0)):
        assert harness.reason(sequence) == EndReason.FAILED
        assert len(harness.tokens[sequence]) == (0 if how == "start" else tokens)
    for sequence, earlier in zip((11, 12), before, strict=True):
        harness.receipt(sequence)
        assert harness.tokens[sequence] == earlier
    assert harness.engine.alive
    harness.require_all_free()


def test_what_leads_nowhere_ends_its_request_without_a_fault(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client's own grammar would be told as the server's error, and its neighbours' step be done
    again, row by row."""
    faults = CapturingLogger()
    monkeypatch.setattr(sampling, "_log", faults)
    harness.model.after_step = flatten
    nowhere = ready(lark('start: "aaa" B\nB: /b.{3}/ & /c.{3}/\n'))
    hot = SamplingParameters(temperature=1.0, seed=3)
    harness.submit(1, "abc", max_tokens=40, sampling=hot)
    harness.submit(2, "x", max_tokens=300, sampling=under(nowhere, 1))
    harness.submit(3, "x", max_tokens=300, sampling=under(ready(schema(PERSON)), 5))
    harness.engine.start()
    assert harness.reason(2) == EndReason.FAILED
    assert bytes(harness.tokens[2]) == b"aaa"
    assert isinstance(nowhere.broken, ConstraintDeadEnd)
    assert harness.reason(1) == EndReason.LENGTH
    assert harness.reason(3) == EndReason.STOP
    require_person(text_of(harness.tokens[3]))
    assert faults.calls == []
    harness.require_all_free()


def test_a_least_length_yields_to_the_constraint(harness: Harness) -> None:
    """A constraint that is complete would have no token left, and its request fail."""
    ends = {"min_tokens": 5, "ending_ids": (END_OF_TEXT, ord("c"))}
    harness.submit(1, "a", max_tokens=20, sampling=under(ready(regex("bc")), **ends))
    harness.submit(2, "a", max_tokens=20, sampling=under(ready(regex("[a-z]*")), **ends))
    harness.model.after_step = flatten
    harness.engine.start()
    assert harness.reason(1) == EndReason.STOP
    assert harness.reason(2) == EndReason.LENGTH
    assert harness.tokens[1] == [ord("b"), ord("c"), END_OF_TEXT]
    assert not {END_OF_TEXT, ord("c")} & set(harness.tokens[2][:5])


def test_ends_that_are_ignored_come_when_nothing_else_can(harness: Harness) -> None:
    """Text would follow what is complete, or a request without an end fail."""
    last = {"last_ids": (END_OF_TEXT,)}
    harness.submit(1, "!", max_tokens=20, sampling=under(ready(regex("b{0,5}")), **last))
    harness.submit(2, "!", max_tokens=20, sampling=under(ready(regex("b{0,5}"))))
    harness.engine.start()
    assert harness.reason(1) == harness.reason(2) == EndReason.STOP
    assert harness.tokens[1] == [*b"bbbbb", END_OF_TEXT]
    assert harness.tokens[2] == [END_OF_TEXT]


def test_no_bias_brings_back_what_is_ruled_out(harness: Harness) -> None:
    """A caller's own bias would break its own constraint; among the rest it counts."""
    bias = {"logit_bias": ((ord("z"), 100.0), (ord("c"), 50.0))}
    harness.submit(1, "a", max_tokens=9, sampling=under(ready(regex("[a-d]{4}")), **bias))
    harness.engine.start()
    assert harness.reason(1) == EndReason.STOP
    assert bytes(harness.tokens[1][:4]) == b"cccc"


def test_a_stop_token_and_a_length_end_it_where_it_is(harness: Harness) -> None:
    """They would be ignored until the constraint is complete."""
    harness.submit(
        1,
        "a",
        max_tokens=9,
        sampling=under(ready(regex("[a-z]{9}"))),
        stop_ids=frozenset({ord("d")}),
    )
    harness.submit(2, "a", max_tokens=4, sampling=under(ready(regex("[a-z]{9}"))))
    harness.engine.start()
    assert harness.reason(1) == EndReason.STOP
    assert bytes(harness.tokens[1]) == b"bcd"
    assert harness.reason(2) == EndReason.LENGTH
    assert bytes(harness.tokens[2]).decode() == expected("a", 4)


def test_log_probabilities_stay_the_model_s(harness: Harness) -> None:
    """A caller would read how likely a token is among those left, which is 1 for most."""
    told: list[TokenLogprobs] = []

    def note(outcome: StepOutcome) -> None:
        told.extend(outcome.logprobs.values())

    harness.publish_hook = note
    options = SamplingParameters(
        top_logprobs=1, changes=ChangeOptions(constraint=ready(regex("zz")))
    )
    harness.submit(1, "a", max_tokens=9, sampling=options)
    harness.engine.start()
    harness.receipt(1)
    harness.close()
    assert told[0].token == ord("z")
    assert told[0].logprob == pytest.approx(-20.0, abs=1e-4)
    assert told[0].top[0][0] == ord("b")
