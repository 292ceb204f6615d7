"""Penalties, biases and least lengths against a plain reference, alone and in any company."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvledger.logit_changes import ChangeOptions, LogitChanges, change_logits
from kvledger.sampling import UNUSABLE, Sampler, SamplingParameters

VOCABULARY = 40


@dataclass
class Case:
    """A sequence: its options, prompt, output so far, and the model's logits after it."""

    options: ChangeOptions
    prompt: list[int]
    output: list[int]
    logits: npt.NDArray[np.float32]

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.output)

    def changes(self) -> LogitChanges:
        changes = LogitChanges(self.options, np.array(self.prompt, dtype=np.int32))
        for token in self.output:
            changes.learn(token)
        return changes


def plainly(case: Case) -> npt.NDArray[np.float32]:
    """The contract, word by word, one token after the other."""
    options, values = case.options, case.logits.astype(np.float32).copy()
    for token in range(len(values)):
        value = values[token]
        if token in case.prompt or token in case.output:
            factor = np.float32(options.repetition_penalty)
            value = value / factor if value > 0 else value * factor
        if token in case.output:
            count = np.float32(case.output.count(token))
            value -= count * np.float32(options.frequency_penalty) + np.float32(
                options.presence_penalty
            )
        for biased, bias in options.logit_bias:
            if biased == token:
                value += np.float32(bias)
        if token in options.ending_ids and len(case.output) < options.min_tokens:
            value = np.float32(-np.inf)
        values[token] = value
    return values


def changed(cases: list[Case]) -> npt.NDArray[np.float32]:
    values = np.stack([case.logits for case in cases])
    positions = np.array([case.position for case in cases], dtype=np.int32)
    change_logits(values, [case.changes() for case in cases], positions)
    return values


tokens = st.integers(0, VOCABULARY - 1)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    logits = draw(
        st.lists(
            st.floats(-30, 30, width=32) | st.just(float("-inf")),
            min_size=VOCABULARY,
            max_size=VOCABULARY,
        )
    )
    options = ChangeOptions(
        repetition_penalty=draw(st.just(1.0) | st.floats(0.125, 10, width=32)),
        presence_penalty=draw(st.just(0.0) | st.floats(-2, 2, width=32)),
        frequency_penalty=draw(st.just(0.0) | st.floats(-2, 2, width=32)),
        logit_bias=tuple(
            draw(st.dictionaries(tokens, st.floats(-100, 100, width=32), max_size=5)).items()
        ),
        min_tokens=draw(st.integers(0, 12)),
        ending_ids=tuple(draw(st.sets(tokens, max_size=4))),
    )
    return Case(
        options,
        draw(st.lists(tokens, min_size=1, max_size=20)),
        draw(st.lists(tokens, max_size=20)),
        np.array(logits, dtype=np.float32),
    )


@settings(max_examples=60, deadline=None)
@given(batch=st.lists(cases(), min_size=1, max_size=4))
def test_logits_are_changed_as_the_contract_says_in_any_company(batch: list[Case]) -> None:
    """A client's penalties would do something else, or something to its neighbours' texts."""
    together = changed(batch)
    for case, row in zip(batch, together, strict=True):
        np.testing.assert_allclose(row, plainly(case), rtol=1e-6, atol=1e-5)
        # Not a bit of difference: a seed promises the same tokens alone and in a batch.
        assert row.tobytes() == changed([case])[0].tobytes()


def test_more_tokens_than_there_were_places_for_are_counted() -> None:
    """Long answers would lose the counts of their first tokens when room is made for more."""
    output = list(range(200)) * 2 + [7]
    options = ChangeOptions(frequency_penalty=0.5, repetition_penalty=2.0)
    case = Case(options, [3, 3, 900], output, np.ones(1000, dtype=np.float32))
    np.testing.assert_allclose(changed([case])[0], plainly(case))


@pytest.mark.parametrize("factor", [1e-45, 1e-38, 10.0])
def test_finite_logits_stay_finite(factor: float) -> None:
    """An allowed penalty would make logits infinite, and the client be told that we failed."""
    logits = np.array([3e38, -3e38, 5.0, -5.0, 0.0, -np.inf], dtype=np.float32)
    options = ChangeOptions(repetition_penalty=factor, logit_bias=((0, 100.0),))
    case = Case(options, [0, 1, 2, 3, 4, 5], [], logits)
    row = changed([case])[0]
    assert np.isfinite(row[:5]).all()
    assert row[5] == -np.inf, "what the model rules out stays out"


def parameters(options: ChangeOptions, **others: float) -> SamplingParameters:
    return SamplingParameters(changes=options, **others)  # type: ignore[arg-type]


def flat_logits(position: int) -> torch.Tensor:
    """Nearly even, so that what was said before decides."""
    random = np.random.default_rng(position)
    return torch.from_numpy(random.standard_normal((1, VOCABULARY)).astype(np.float32))


def run(sampler: Sampler, row: int, start: int, count: int) -> list[int]:
    """So many tokens of the sequence in a row, each position with its own logits."""
    rows = np.array([row], dtype=np.int32)
    out = []
    for position in range(start, start + count):
        at = np.array([position], dtype=np.int32)
        out.append(int(sampler.sample(flat_logits(position), rows, at)[0]))
    return out


OPTIONS = ChangeOptions(
    repetition_penalty=1.4, presence_penalty=0.7, frequency_penalty=0.9, logit_bias=((4, 2.0),)
)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_sampler_tells_the_changes_what_it_chose(temperature: float) -> None:
    """Penalties would never see the output that they are for."""
    chosen = parameters(OPTIONS, temperature=temperature, seed=5)
    prompt = [1, 2, 3]
    sampler = Sampler(2)
    sampler.assign(1, chosen, LogitChanges(OPTIONS, np.array(prompt, dtype=np.int32)))
    out = run(sampler, 1, 3, 40)
    plain = Sampler(1)
    plain.assign(0, SamplingParameters(temperature=temperature, seed=5))
    zero = np.zeros(1, dtype=np.int32)
    for index, token in enumerate(out):
        logits = flat_logits(3 + index)
        case = Case(OPTIONS, prompt, out[:index], logits[0].numpy())
        wanted = plain.sample(
            torch.from_numpy(plainly(case))[None], zero, np.array([3 + index], dtype=np.int32)
        )
        assert token == wanted[0]
    assert max(out.count(token) for token in out) < 12, "they do something"


def test_a_sequence_goes_on_in_another_row_as_if_it_had_not_been_away() -> None:
    """A preempted request would repeat itself, or differ from the same request undisturbed."""
    chosen = parameters(OPTIONS, temperature=1.0, seed=8)
    prompt = np.array([1, 2, 3], dtype=np.int32)
    whole = Sampler(3)
    whole.assign(0, chosen, LogitChanges(OPTIONS, prompt))
    expected = run(whole, 0, 3, 30)
    parts = Sampler(3)
    changes = LogitChanges(OPTIONS, prompt)
    parts.assign(0, chosen, changes)
    first = run(parts, 0, 3, 13)
    parts.assign(0, parameters(OPTIONS, seed=1), LogitChanges(OPTIONS, prompt))
    run(parts, 0, 3, 5)  # somebody else has the row meanwhile
    parts.assign(2, chosen, changes)
    assert first + run(parts, 2, 16, 17) == expected


@pytest.mark.parametrize("way", ["assign", "release"])
def test_nothing_passes_to_the_next_sequence_of_a_row(way: str) -> None:
    """A request would be penalized for what somebody else has said."""
    sampler = Sampler(1)
    options = ChangeOptions(presence_penalty=2.0, logit_bias=((4, 100.0),), min_tokens=3)
    told = parameters(options, temperature=3.0, seed=1)
    sampler.assign(0, told, LogitChanges(options, np.array([1], dtype=np.int32)))
    run(sampler, 0, 1, 20)
    if way == "release":
        sampler.release(0)
    sampler.assign(0, SamplingParameters())
    assert run(sampler, 0, 1, 20) == [int(flat_logits(p).argmax()) for p in range(1, 21)]


def mixed(count: int) -> tuple[Sampler, torch.Tensor]:
    """A sampler whose rows have every kind of option, and logits for them."""
    sampler = Sampler(count)
    for row in range(count):
        chosen = parameters(OPTIONS, temperature=float(row % 3), seed=row)
        changes = LogitChanges(OPTIONS, np.array([row, 5], dtype=np.int32)) if row % 2 else None
        sampler.assign(row, chosen, changes)
    return sampler, torch.cat([flat_logits(row) for row in range(count)])


def test_a_row_that_cannot_be_sampled_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request that breaks the sampler would end all that run beside it."""
    rows = np.arange(8, dtype=np.int32)
    sampler, logits = mixed(8)
    expected = sampler.sample(logits, rows, rows + 2)
    sampler, _ = mixed(8)
    # Whoever looks at them raises, and all rows of the step are looked at together.
    monkeypatch.setattr(sampler._changes[3], "options", None)
    found = sampler.sample(logits, rows, rows + 2)
    assert found[3] == UNUSABLE
    others = rows != 3
    assert found[others].tolist() == expected[others].tolist()


def test_a_row_that_cannot_be_told_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose penalties have lost a token would go on with wrong ones."""

    def broken(token: int) -> None:
        raise MemoryError("injected")

    rows = np.arange(8, dtype=np.int32)
    sampler, logits = mixed(8)
    expected = sampler.sample(logits, rows, rows + 2)
    sampler, _ = mixed(8)
    monkeypatch.setattr(sampler._changes[5], "learn", broken)
    found = sampler.sample(logits, rows, rows + 2)
    assert np.flatnonzero(found != expected).tolist() == [5]
    assert found[5] == UNUSABLE


def test_a_refused_row_yields_nothing_until_it_is_assigned() -> None:
    """A request without its options would be answered as if it had none."""
    sampler, logits = mixed(4)
    rows = np.arange(4, dtype=np.int32)
    sampler.refuse(2)
    assert np.flatnonzero(sampler.sample(logits, rows, rows) == UNUSABLE).tolist() == [2]
    sampler.assign(2, SamplingParameters())
    assert sampler.sample(logits, rows, rows)[2] == int(logits[2].argmax())


def test_steps_without_options_look_at_no_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody would pay in every step for options that somebody else uses."""
    sampler, logits = mixed(8)
    plain = np.array([0, 2, 4, 6], dtype=np.int32)

    def never(*arguments: object) -> None:
        raise AssertionError("not for these rows")

    monkeypatch.setattr("kvledger.sampling.change_logits", never)
    assert UNUSABLE not in sampler.sample(logits[plain], plain, plain)


def test_the_models_logits_are_left_as_they_are() -> None:
    """Log-probabilities would be those of the penalized distribution."""
    sampler, logits = mixed(8)
    before = logits.clone()
    rows = np.arange(8, dtype=np.int32)
    sampler.sample(logits, rows, rows + 2)
    assert torch.equal(logits, before)
