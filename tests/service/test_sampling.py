"""Choosing tokens against a plain reference: which can come, how often, and that seeds hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvledger import sampling
from kvledger.sampling import TEMPERATURE_FLOOR, UNUSABLE, Sampler, SamplingParameters, uniforms

DRAWS = 8000
# Distances of the logits that are compared with a border: far from equal, so that rounding in
# float32 decides nothing.
LOGITS = np.array([1.5, -2.0, 3.0, 0.25, 2.0, -0.75, 2.5, -5.0, 1.0, 3.25], dtype=np.float32)


def probabilities(
    logits: npt.NDArray[np.float32], parameters: SamplingParameters
) -> npt.NDArray[np.float64]:
    """float64 [vocabulary]: the contract, word by word: temperature, top_k, top_p, min_p."""
    scores = logits.astype(np.float64) / parameters.temperature
    weights = np.exp(scores - scores.max())
    if parameters.top_k > 0:
        least = np.sort(weights)[::-1][: parameters.top_k].min()
        weights[weights < least] = 0.0
    weights /= weights.sum()
    if parameters.top_p < 1.0:
        together = 0.0
        for token in np.argsort(-weights):
            if together >= parameters.top_p:
                break
            together += weights[token]
            least = weights[token]
        weights[weights < least] = 0.0
    weights[weights < parameters.min_p * weights.max()] = 0.0
    return weights / weights.sum()


def draw(
    logits: npt.NDArray[np.float32],
    parameters: SamplingParameters,
    count: int = DRAWS,
    first_position: int = 0,
) -> npt.NDArray[np.int32]:
    """int32 [count]: a row's tokens at positions one after the other."""
    sampler = Sampler(1)
    sampler.assign(0, parameters)
    rows = torch.from_numpy(logits).expand(count, -1)
    positions = np.arange(first_position, first_position + count, dtype=np.int32)
    return sampler.sample(rows, np.zeros(count, dtype=np.int32), positions)


def check_distribution(tokens: npt.NDArray[np.int32], expected: npt.NDArray[np.float64]) -> None:
    """Nothing that cannot come has come, and the rest as often as it should."""
    seen = np.bincount(tokens, minlength=len(expected))
    assert seen[expected == 0].sum() == 0
    likely = expected * len(tokens) >= 5
    wanted = expected[likely] * len(tokens)
    chi_square = float(((seen[likely] - wanted) ** 2 / wanted).sum())
    freedom = max(1, int(likely.sum()) - 1)
    # Far beyond chance, and the seeds are fixed: it does not flicker.
    assert chi_square < freedom + 8 * (2 * freedom) ** 0.5 + 12


def support(logits: npt.NDArray[np.float32], parameters: SamplingParameters) -> set[int]:
    return set(np.flatnonzero(probabilities(logits, parameters)).tolist())


PARAMETERS = [
    SamplingParameters(temperature=1.0),
    SamplingParameters(temperature=0.3),
    SamplingParameters(temperature=4.0),
    SamplingParameters(temperature=100.0),
    *(SamplingParameters(temperature=1.0, top_k=k) for k in (1, 2, 5, 9, 10, 11, 2**31 - 1)),
    *(SamplingParameters(temperature=1.0, top_p=p) for p in (1e-9, 0.3, 0.6, 0.9, 0.999)),
    *(SamplingParameters(temperature=1.0, min_p=p) for p in (1e-6, 0.1, 0.4, 0.7, 1.0)),
    SamplingParameters(temperature=2.0, top_k=6, top_p=0.8, min_p=0.3),
    SamplingParameters(temperature=0.7, top_k=3, top_p=0.95),
    SamplingParameters(temperature=3.0, top_p=0.5, min_p=0.5),
    SamplingParameters(temperature=3.0, top_k=2, min_p=0.01),
]


@pytest.mark.parametrize("parameters", PARAMETERS, ids=str)
def test_tokens_come_as_often_as_the_contract_says(parameters: SamplingParameters) -> None:
    """A parameter would do something else than its comment says, or the order be another."""
    expected = probabilities(LOGITS, parameters)
    tokens = draw(LOGITS, replace(parameters, seed=11))
    check_distribution(tokens, expected)
    certain = set(np.flatnonzero(expected * DRAWS > 30).tolist())
    assert certain <= set(tokens.tolist())


@settings(max_examples=50)
@given(
    logits=st.lists(st.integers(-40, 40), min_size=2, max_size=30, unique=True),
    temperature=st.sampled_from([0.25, 0.5, 1.0, 2.0, 8.0]),
    top_k=st.integers(0, 31),
    top_p=st.sampled_from([0.123, 0.37, 0.61, 0.87, 0.973, 1.0]),
    min_p=st.sampled_from([0.0, 0.0123, 0.117, 0.53]),
    seed=st.integers(0, 2**64 - 1),
)
def test_nothing_comes_that_the_filters_drop(
    logits: list[int], temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    """A token that the client excluded would come, in a combination that nobody tried."""
    values = np.array(logits, dtype=np.float32) / np.float32(8)
    parameters = SamplingParameters(temperature, top_k, top_p, min_p, seed)
    allowed = support(values, parameters)
    expected = probabilities(values, parameters)
    tokens = set(draw(values, parameters, 200).tolist())
    assert tokens <= allowed
    assert set(np.flatnonzero(expected > 0.2).tolist()) <= tokens


def test_ties_with_the_last_that_is_kept_stay() -> None:
    """Which of two equally likely tokens can come would depend on their numbers."""
    tied = np.array([2.0, 1.0, 1.0, 0.0, 1.0], dtype=np.float32)
    for parameters in (
        SamplingParameters(temperature=1.0, top_k=2),
        SamplingParameters(temperature=1.0, top_p=0.55),
    ):
        assert set(draw(tied, parameters, 2000).tolist()) == {0, 1, 2, 4}
    flat = np.zeros(1000, dtype=np.float32)
    one = SamplingParameters(temperature=1.0, top_k=1)
    assert len(set(draw(flat, one, 2000).tolist())) > 500


@pytest.mark.parametrize("top_p", [0.5, 0.99, 0.9999])
def test_a_wide_nucleus_is_found(top_p: float) -> None:
    """Where thousands of tokens make up the nucleus, some would be lost or others let in."""
    logits = np.linspace(0.0, -3.0, 4500, dtype=np.float32)
    np.random.default_rng(3).shuffle(logits)
    parameters = SamplingParameters(temperature=1.0, top_p=top_p, seed=5)
    expected = probabilities(logits, parameters)
    tokens = draw(logits, parameters, 300)
    assert (expected[tokens] > 0).all()
    kept = np.flatnonzero(expected)
    # The unlikeliest tenth of the nucleus comes about as often as it should.
    rare = kept[np.argsort(expected[kept])[: len(kept) // 10]]
    wanted = expected[rare].sum() * 300
    assert abs(np.isin(tokens, rare).sum() - wanted) < 6 * wanted**0.5 + 6


def test_the_first_and_the_last_token_can_come() -> None:
    """An edge of the vocabulary would never be drawn, whatever the model says."""
    for best in (0, 99_999):
        logits = np.full(100_000, -12.0, dtype=np.float32)
        logits[best] = 3.0
        tokens = draw(logits, SamplingParameters(temperature=1.0, seed=1), 30)
        assert best in tokens.tolist()
        assert ((tokens >= 0) & (tokens < 100_000)).all()


def test_what_the_model_excludes_never_comes() -> None:
    """A token whose logit is minus infinity would be drawn, at either end of the vocabulary."""
    logits = np.full(50, -np.inf, dtype=np.float32)
    logits[[7, 23]] = [0.0, 0.5]
    for parameters in PARAMETERS:
        assert set(draw(logits, parameters, 50).tolist()) <= {7, 23}


def test_huge_logits_do_not_overflow() -> None:
    """Exponentials of what a model may well say would be infinite, and the draw nonsense."""
    for shift in (-3e38, -1e5, 1e5, 3e38):
        logits = np.array([shift, -3.4e38, shift], dtype=np.float32)
        tokens = draw(logits, SamplingParameters(temperature=1.0, seed=2), 400)
        assert set(tokens.tolist()) >= {0, 2}
        assert UNUSABLE not in tokens


def mixed_logits(rows: int, vocabulary: int, seed: int = 0) -> npt.NDArray[np.float32]:
    random = np.random.default_rng(seed)
    return random.standard_normal((rows, vocabulary)).astype(np.float32)


def test_greedy_is_the_most_likely_token() -> None:
    """A request without parameters would not be reproducible."""
    logits = mixed_logits(64, 997)
    sampler = Sampler(64)
    rows = np.arange(64, dtype=np.int32)
    tokens = sampler.sample(torch.from_numpy(logits), rows, rows)
    assert tokens.dtype == np.int32
    assert tokens.tolist() == logits.argmax(axis=1).tolist()


def test_greedy_takes_the_first_of_equals() -> None:
    """Equal logits would be decided by the batch or the machine."""
    logits = np.zeros((3, 100), dtype=np.float32)
    logits[1, [40, 60]] = 1.0
    sampler = Sampler(3)
    rows = np.arange(3, dtype=np.int32)
    assert sampler.sample(torch.from_numpy(logits), rows, rows).tolist() == [0, 40, 0]


@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-5, 1e-6, 1e-12, 1e-38, 1e-45, 0.0, 0.0099])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    """Dividing by nearly nothing would overflow, and the text be noise (B68)."""
    parameters = SamplingParameters(temperature=temperature, top_k=5, top_p=0.9, min_p=0.1, seed=3)
    assert parameters.greedy
    logits = mixed_logits(50, 300) * 10
    best = logits.argmax(axis=1)
    logits[np.arange(50), (best + 1) % 300] = logits.max(axis=1) - 1e-4  # nearly as likely
    sampler = Sampler(1)
    sampler.assign(0, parameters)
    positions = np.arange(50, dtype=np.int32)
    tokens = sampler.sample(torch.from_numpy(logits), np.zeros(50, dtype=np.int32), positions)
    assert tokens.tolist() == logits.argmax(axis=1).tolist()


def test_just_above_the_floor_is_nearly_greedy_and_finite() -> None:
    """The lowest temperature that is drawn would overflow after all."""
    parameters = SamplingParameters(temperature=TEMPERATURE_FLOOR * 1.01)
    assert not parameters.greedy
    assert set(draw(LOGITS * 100, parameters, 200).tolist()) == {9}


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_numbers_are_unusable_alone(poison: float, temperature: float) -> None:
    """A broken row would come out as a token, or spoil its neighbours' draw."""
    logits = mixed_logits(5, 64)
    sampler = Sampler(5)
    for row in range(5):
        sampler.assign(row, SamplingParameters(temperature=temperature, top_p=0.9, seed=row))
    rows = np.arange(5, dtype=np.int32)
    whole = sampler.sample(torch.from_numpy(logits.copy()), rows, rows)
    logits[[1, 3]] = poison
    tokens = sampler.sample(torch.from_numpy(logits), rows, rows)
    assert tokens[[1, 3]].tolist() == [UNUSABLE, UNUSABLE]
    assert tokens[[0, 2, 4]].tolist() == whole[[0, 2, 4]].tolist()


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 30, 63])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_broken_logit_makes_a_row_unusable(
    poison: float, place: int, temperature: float
) -> None:
    """A model whose output is broken in one place would go on as if nothing were wrong."""
    logits = mixed_logits(1, 64)
    logits[0, place] = poison
    sampler = Sampler(1)
    sampler.assign(0, SamplingParameters(temperature=temperature))
    zero = np.zeros(1, dtype=np.int32)
    assert sampler.sample(torch.from_numpy(logits), zero, zero).tolist() == [UNUSABLE]


def test_the_models_logits_are_left_as_they_are() -> None:
    """A second look at the logits would see what the first has made of them."""
    logits = torch.from_numpy(mixed_logits(4, 100))
    before = logits.clone()
    sampler = Sampler(4)
    for row, parameters in enumerate(PARAMETERS[-4:]):
        sampler.assign(row, parameters)
    rows = np.arange(4, dtype=np.int32)
    sampler.sample(logits, rows, rows)
    assert torch.equal(logits, before)


def test_no_rows_are_no_tokens() -> None:
    """A step of nothing but prefill would raise."""
    none = np.empty(0, dtype=np.int32)
    assert Sampler(4).sample(torch.empty(0, 100), none, none).tolist() == []


NEIGHBOURS = [
    *PARAMETERS,
    SamplingParameters(),
    SamplingParameters(temperature=9.0, top_k=7, seed=2**64 - 1),
]


@pytest.mark.parametrize(
    ("vocabulary", "size"), [(261, 2), (261, 3), (261, 8), (261, 17), (49_152, 2), (49_152, 7)]
)
def test_a_seeded_token_does_not_know_its_neighbours(vocabulary: int, size: int) -> None:
    """The same seed would give another answer as soon as somebody else is served (B71)."""
    parameters = SamplingParameters(temperature=0.8, top_k=200, top_p=0.95, min_p=0.001, seed=42)
    zero = np.zeros(1, dtype=np.int32)
    for position in (0, 5000):
        logits = mixed_logits(size, vocabulary, seed=position)
        alone = Sampler(1)
        alone.assign(0, parameters)
        at = np.array([position], dtype=np.int32)
        (expected,) = alone.sample(torch.from_numpy(logits[:1].copy()), zero, at)
        for place in {0, size // 2, size - 1}:
            batch = np.roll(logits, place, axis=0)
            sampler = Sampler(size)
            for row in range(size):
                sampler.assign(row, NEIGHBOURS[(row + position) % len(NEIGHBOURS)])
            rows = np.arange(size, dtype=np.int32)[::-1].copy()  # rows stand in any order
            sampler.assign(int(rows[place]), parameters)
            positions = np.full(size, 77, dtype=np.int32)
            positions[place] = position
            assert sampler.sample(torch.from_numpy(batch), rows, positions)[place] == expected


def test_a_row_forgets_who_had_it() -> None:
    """A request would be sampled with the parameters of the one before it."""
    sampler = Sampler(2)
    sampler.assign(1, SamplingParameters(temperature=5.0, top_k=3, top_p=0.5, min_p=0.9, seed=9))
    sampler.assign(1, SamplingParameters())
    logits = mixed_logits(40, 50)
    rows = np.ones(40, dtype=np.int32)
    tokens = sampler.sample(torch.from_numpy(logits), rows, np.arange(40, dtype=np.int32))
    assert tokens.tolist() == logits.argmax(axis=1).tolist()


def test_parts_of_a_sequence_are_drawn_as_the_whole() -> None:
    """A sequence that was preempted would go on otherwise than without."""
    parameters = SamplingParameters(temperature=1.0, seed=123)
    whole = draw(LOGITS, parameters, 100)
    parts = [draw(LOGITS, parameters, 25, first_position=first) for first in (0, 25, 50, 75)]
    assert np.concatenate(parts).tolist() == whole.tolist()


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 2), (1.0 - 2.0**-53, 5)])
def test_the_ends_of_the_draw_meet_tokens_that_can_come(
    monkeypatch: pytest.MonkeyPatch, uniform: float, token: int
) -> None:
    """Once in very many draws a token would come that the filters drop, or that does not exist."""
    monkeypatch.setattr(sampling, "uniforms", lambda seeds, positions: np.full(1, uniform))
    logits = np.full(8, -np.inf, dtype=np.float32)
    logits[[2, 3, 5]] = [0.3, 0.1, 0.2]
    assert draw(logits, SamplingParameters(temperature=1.0), 1).tolist() == [token]


def test_seeds_a_step_of_the_counter_apart_are_unrelated() -> None:
    """One request's draws would be another's, moved by a token."""
    step = 0x9E3779B97F4A7C15
    positions = np.arange(50, dtype=np.int32)
    first = uniforms(np.full(50, 5, dtype=np.uint64), positions)
    second = uniforms(np.full(50, 5 + step, dtype=np.uint64), positions)
    assert not set(first.tolist()) & set(second.tolist())


def test_other_seeds_and_positions_are_other_draws() -> None:
    """Everybody would get the same answer, or every token the same draw."""
    flat = np.zeros(3000, dtype=np.float32)
    by_seed = [draw(flat, SamplingParameters(temperature=1.0, seed=s), 30) for s in range(30)]
    assert len({tuple(tokens.tolist()) for tokens in by_seed}) == 30
    assert len({int(tokens[0]) for tokens in by_seed}) > 25
    assert all(len(set(tokens.tolist())) > 25 for tokens in by_seed)


@given(
    seeds=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=50),
    position=st.integers(0, 2**31 - 1),
)
def test_drawn_numbers_are_in_range_and_depend_on_their_own_pair(
    seeds: list[int], position: int
) -> None:
    """A number of 1 or more would choose a token that does not exist."""
    array = np.array(seeds, dtype=np.uint64)
    positions = np.full(len(seeds), position, dtype=np.int32)
    together = uniforms(array, positions)
    assert ((together >= 0) & (together < 1)).all()
    alone = [float(uniforms(array[i : i + 1], positions[:1])[0]) for i in range(len(seeds))]
    assert together.tolist() == alone


@pytest.mark.parametrize("first", [0, 1, 2**32 - 300, 2**63, 2**64 - 601])
def test_drawn_numbers_are_even_and_unrelated(first: int) -> None:
    """Seeds next to each other, as people choose them, would give answers that resemble."""
    seeds = np.arange(600, dtype=np.uint64) + np.uint64(first)
    table = np.array([uniforms(seeds, np.full(600, p, dtype=np.int32)) for p in range(600)])
    counts = np.histogram(table, bins=100, range=(0, 1))[0]
    expected = table.size / 100
    assert ((counts - expected) ** 2 / expected).sum() < 99 + 6 * (2 * 99) ** 0.5
    for other in (np.roll(table, 1, axis=0), np.roll(table, 1, axis=1), table.T):
        off = ~np.eye(600, dtype=bool)
        assert abs(np.corrcoef(table[off], other[off])[0, 1]) < 6 / 600
    assert len(np.unique(table)) == table.size
