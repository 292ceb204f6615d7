"""The timing audit: it sees a leak, says when it is blind, and lets go what is apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from bench.audit import (
    Beginnings,
    Sample,
    Samples,
    collect,
    draw_order,
    joined,
    parse,
    report,
    report_of,
    smallest_leak,
    verdict,
    verdict_of,
)
from bench.kolmogorov import distance, p_value
from bench.load import Words
from bench.random_model import HIDDEN, LAYERS, VOCABULARY, write_random_model

from kvledger.models.opening import open_model

BLOCK = 16


def test_the_distance_of_two_samples() -> None:
    """The test would compare something else."""
    assert distance([1, 2, 3, 4], [1, 2, 3, 4]) == 0
    assert distance([1, 2], [3, 4]) == 1
    assert distance(range(1, 11), range(6, 16)) == 0.5
    assert distance([1, 1, 1, 2], [1, 2, 2, 2]) == 0.5, "equal values step together"
    assert distance([5, 1, 3], [4, 2]) == distance([4, 2], [1, 3, 5])
    with pytest.raises(ValueError, match="empty"):
        distance([], [1])


def test_known_values_of_the_distribution() -> None:
    """A p-value would be none."""
    # By hand: the effective number is 5, the argument the root of 1.25.
    series = 2 * (math.exp(-2.5) - math.exp(-10) + math.exp(-22.5))
    assert p_value(range(1, 11), range(6, 16)) == pytest.approx(series, rel=1e-9)
    # Smirnov's table: 1.3581 at 5 %, 1.6276 at 1 %.
    many = 2_000_000
    for argument, level in ((1.3581, 0.05), (1.6276, 0.01)):
        shift = round(argument / math.sqrt(many / 2) * many)
        p = p_value(np.arange(many), np.arange(many) + shift)
        assert p == pytest.approx(level, rel=0.01)
    assert p_value([1, 2, 3], [1, 2, 3]) == 1
    assert p_value(range(200), range(1000, 1200)) < 1e-80


def test_samples_of_one_distribution_are_seldom_told_apart() -> None:
    """Servers that are apart would be called leaky, or leaky ones apart."""
    chance = np.random.default_rng(1)
    ps = [p_value(chance.normal(size=80), chance.normal(size=80)) for _ in range(600)]
    assert 0.02 < np.mean(np.array(ps) < 0.05) < 0.07


class FakeServer:
    """Takes a second for each 1,000 tokens that it computes, and some noise."""

    def __init__(self, shares: float = 0.0, reuses: bool = True, tells: bool = True) -> None:
        """`shares` is how much of a prefix that another sent is not computed."""
        self._shares, self._reuses, self._tells = shares, reuses, tells
        self._sent: dict[str, list[tuple[int, ...]]] = {"A": [], "B": []}
        self._chance = np.random.default_rng(3)

    async def ask(self, tenant: str, prompt: Sequence[int]) -> tuple[float, int]:
        own = self._longest(tenant, prompt) if self._reuses else 0
        other = int(self._shares * self._longest("A" if tenant == "B" else "B", prompt))
        self._sent[tenant].append(tuple(prompt))
        reused = max(own, other)
        seconds = (len(prompt) - reused) / 1000 * self._chance.normal(1, 0.05)
        return seconds, reused if self._tells else own

    def _longest(self, tenant: str, prompt: Sequence[int]) -> int:
        found = 0
        for sent in self._sent[tenant][-1:]:
            while found < len(prompt) and sent[found] == prompt[found]:
                found += 1
        return found // BLOCK * BLOCK


async def audited(server: FakeServer, requests: int = 100) -> Samples:
    order = draw_order(requests, 40, 1)
    return await collect(server.ask, Words(1, 50_000), 200, order)


async def test_tenants_that_are_apart_pass() -> None:
    """Nobody would run an audit that always fails."""
    samples = await audited(FakeServer())
    assert verdict(samples) == []
    assert [len(samples[kind].seconds) for kind in ("other", "fresh", "own")] == [100, 100, 40]
    leak = smallest_leak(samples)
    assert leak is not None
    assert 0.001 < leak < 0.03
    assert "smallest leak that it would see" in report(samples)


LEAKS: dict[str, tuple[Callable[[], FakeServer], str]] = {
    "in time and usage": (lambda: FakeServer(shares=1.0), "began with cached tokens"),
    "in time alone": (lambda: FakeServer(shares=1.0, tells=False), "the times of what A had sent"),
    "a fifth of the prefix": (lambda: FakeServer(0.2, tells=False), "the times of what A had sent"),
    "nothing is reused": (lambda: FakeServer(reuses=False), "the audit cannot tell"),
}


@pytest.mark.parametrize("leak", LEAKS)
async def test_leaks_and_blindness_are_found(leak: str) -> None:
    """A server that lets time tell what others say would be called safe."""
    make, sentence = LEAKS[leak]
    assert sentence in " ".join(verdict(await audited(make())))


def test_what_begins_alike_by_chance_is_told_apart() -> None:
    """Ten runs would end with a leak that is none: B itself began two prompts with one word."""
    sent = Beginnings()
    sent.add((5, 6, 7, 8, 9, 10))
    sent.add((1, 2))
    common = [sent.common(prompt) for prompt in ((5, 6, 1, 1), (5, 6, 7, 8, 9), (2, 1), (1, 3), ())]
    assert common == [2, 4, 0, 1, 0]


async def test_a_word_of_its_own_is_no_leak() -> None:
    """The same, and what B has not sent would pass for chance."""

    class FewWords(FakeServer):
        async def ask(self, tenant: str, prompt: Sequence[int]) -> tuple[float, int]:
            seconds, reused = await super().ask(tenant, prompt)
            alike = any(sent[0] == prompt[0] for sent in self._sent[tenant][:-1])
            return seconds, max(reused, int(alike))

    async def foreign(server: FakeServer) -> int:
        order = draw_order(100, 40, 1)
        samples = await collect(server.ask, Words(1, 300), 200, order)
        assert sum(samples["fresh"].reused) > 5 or not isinstance(server, FewWords)
        return samples["other"].foreign + samples["fresh"].foreign

    assert await foreign(FewWords()) == 0
    assert await foreign(FakeServer(shares=0.1)) == 100


async def test_one_run_in_ten_may_differ_by_chance() -> None:
    """Ten runs would pass with a leak in each, or fail by the chance that a test at 1 % has."""
    apart = [await audited(FakeServer()) for _ in range(9)]
    leaky = await audited(FakeServer(0.2, tells=False))
    blind = await audited(FakeServer(reuses=False))
    assert verdict_of([*apart, leaky]) == []
    assert "differ in 2 of 10 runs; 1 may be chance" in verdict_of([*apart[1:], leaky, leaky])[0]
    assert "differ in 1 of 9 runs; 0 may be chance" in verdict_of([*apart[1:], leaky])[0]
    assert len(verdict_of([*apart, blind])) == 2, "being blind is no chance"
    told = report_of([*apart, leaky])
    assert "9 of 10 runs: p > 0.01" in told
    assert "n = 100 + 100, own 40" in told
    assert len(joined([*apart, leaky])["fresh"].seconds) == 1000


def test_the_random_model_can_be_served(tmp_path: Path) -> None:
    """The long audit would not start, or of another model at each run."""
    with open_model(str(write_random_model(tmp_path / "one"))) as opened:
        assert (opened.config.layers, opened.config.hidden) == (LAYERS, HIDDEN)
        assert opened.tokenizer.vocabulary_size == VOCABULARY
        assert opened.config.context_tokens > 1001
        fingerprint = opened.fingerprint
    with open_model(str(write_random_model(tmp_path / "two"))) as opened:
        assert opened.fingerprint == fingerprint


def test_a_whole_prefix_that_saves_nothing_shows_nothing() -> None:
    """It would be said that a leak of 0 ms would be seen."""
    same = [float(value) for value in range(50)]
    samples = {kind: Sample(list(same), [0] * 50) for kind in ("other", "fresh", "own")}
    assert smallest_leak(samples) is None
    assert "more than the whole prefix" in report(samples)


def test_the_options(tmp_path: Path) -> None:
    """A server would be audited with one tenant only."""
    assert (parse([]).requests, parse([]).prompt) == (500, 1000)
    assert (parse(["--quick"]).requests, parse(["--quick"]).prompt) == (60, 200)
    both = ["--server", "unix:/x", "--token-file", str(tmp_path), "--token-file", str(tmp_path)]
    assert len(parse(both).token_file) == 2
    assert parse(["--random-model", "--runs", "10"]).runs == 10
    for wrong in (both[:2], both[:4], both[2:], [*both, "--random-model"], ["--runs", "0"]):
        with pytest.raises(SystemExit):
            parse(wrong)
