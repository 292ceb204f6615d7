"""The arithmetic of prefix reuse, and that what is timed in the core is what was meant."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from bench.load import Words
from bench.reuse import parse
from bench.reusing.figures import (
    Middle,
    common_beginning,
    jain,
    middle,
    ratios,
    reusable,
    share,
    whole_blocks,
)
from bench.reusing.flood import (
    BLOCK_TOKENS,
    FLOOD_AT_ONCE,
    FLOOD_PROMPT,
    GUARANTEED,
    POOL_BLOCKS,
    hit_rate,
    ttft,
)
from bench.reusing.match import Core, admitting, bookkeeping, prompt_of, waiting
from bench.reusing.servers import Answer


def test_the_interval_is_that_of_the_binomial() -> None:
    """An interval that is too narrow would call noise a result."""
    values = list(range(1, 16))
    # Of 15 values, fewer than 4 lie on one side of the median with a probability of 1.8 %.
    assert middle(values) == Middle(8, 4, 12, 15)
    assert middle(reversed(range(6))) == Middle(2.5, 0, 5, 6)
    assert middle([3.0, 1.0, 2.0]) == Middle(2.0, 1.0, 3.0, 3)
    assert middle([7.0]) == Middle(7.0, 7.0, 7.0, 1)
    assert math.isnan(middle([]).median)


@pytest.mark.parametrize("count", [6, 9, 16, 40])
def test_the_interval_holds_the_true_median_often_enough(count: int) -> None:
    """The 95 % that tables promise would be something else."""
    chance = random.Random(count)
    held = 0
    for _ in range(2000):
        found = middle(chance.expovariate(1.0) for _ in range(count))
        held += found.low <= math.log(2) <= found.high
        assert found.low <= found.median <= found.high
    assert held / 2000 >= 0.94


def test_ratios_are_of_pairs() -> None:
    """A machine that slows down within a run would be taken for a difference."""
    found = ratios([2, 4, 8], [1, 2, 4])
    assert found == Middle(2, 2, 2, 3)
    assert ratios([1, 30], [10, 10]).median == statistics.median([0.1, 3.0])
    with pytest.raises(ValueError, match="shorter"):
        ratios([1, 2], [1])
    assert found.text(2) == "2.00 (2.00 to 2.00, 3)"


def test_jain_and_shares() -> None:
    """Fairness would be read off a wrong scale."""
    assert jain([5, 5]) == 1
    assert jain([5, 0]) == 0.5
    assert jain([3, 1]) == pytest.approx(16 / 20)
    assert math.isnan(jain([0, 0]))
    assert share(1, 4) == 0.25
    assert math.isnan(share(0, 0))


def test_what_a_turn_can_reuse() -> None:
    """The bar of the turns would be too low, or one that nobody can pass."""
    assert whole_blocks(64, 32) == 64
    assert whole_blocks(63, 32) == 32
    assert common_beginning([1, 2, 3], [1, 2, 4]) == 2
    assert common_beginning([1, 2], [1, 2, 4]) == 2
    before = list(range(65))
    # The last token of a turn was never computed: 64 are there.
    assert reusable(before, [*before, 9, 9], 32) == 64
    assert reusable(before[:64], [*before, 9, 9], 32) == 32
    # The last token of a prompt is always computed.
    assert reusable([*before, 7], before[:64], 32) == 32
    assert reusable(before, [*before[:40], 99, *before[41:]], 32) == 32
    assert reusable([], before, 32) == 0


def test_hits_and_times_are_of_all_tokens() -> None:
    """Long prompts would weigh as little as short ones."""
    answers = [
        Answer(sent=10.0, arrivals=[10.5, 11.0], prompt_tokens=100, cached_tokens=0),
        Answer(sent=20.0, arrivals=[20.1], prompt_tokens=300, cached_tokens=300),
    ]
    assert hit_rate(answers) == 0.75
    assert ttft(answers, 99) == pytest.approx(0.5)
    assert ttft(answers, 50) == pytest.approx(0.1)
    # Who never heard anything waited longer than all others, and hit nothing.
    answers.append(Answer(sent=0.0, status="DEADLINE_EXCEEDED"))
    assert hit_rate(answers) == 0.75
    assert ttft(answers, 99) == math.inf


def test_a_flood_is_ten_times_what_is_guaranteed() -> None:
    """A flood that fits would show nothing."""
    held = FLOOD_AT_ONCE * FLOOD_PROMPT / BLOCK_TOKENS
    assert 0 <= held - 10 * GUARANTEED * POOL_BLOCKS < FLOOD_PROMPT / BLOCK_TOKENS
    words = Words(0, 49_152)
    assert words.draw(FLOOD_PROMPT) != words.draw(FLOOD_PROMPT)


def test_admitting_finds_what_is_cached() -> None:
    """The time would be that of a prompt that is not there; `admitting` asserts that it is."""
    found = admitting(640, 3)
    assert 0 < found.prefixes.median < found.plan.median
    assert waiting(640, 3, 4).median > 0
    assert all(bookkeeping(1, times, 80) > 0 for times in (True, False))


@pytest.mark.parametrize("guaranteed", [True, False])
def test_a_guarantee_keeps_hits_through_a_flood(guaranteed: bool) -> None:
    """A tenant that floods would take the quiet one's hits; without a guarantee it does."""
    core = Core(64, 1024)
    if guaranteed:
        core.engine.set_shares([(1, 31, 33, 64, False), (2, 31, 33, 64, False)], 0)
    prompt = prompt_of(641, 1)

    def found() -> int:
        plan, _ = core.plan(core.arrivals([prompt], 1, tenant=2))
        core.commit(plan)
        return len(prompt) - plan.tokens

    core.run(core.arrivals([prompt], 1, tenant=2))
    assert found() == 640
    for number in range(100):  # 25 times the pool
        core.run(core.arrivals([prompt_of(512, 10 + number)], 1, tenant=1))
    assert found() == (640 if guaranteed else 0)
    assert core.engine.prefix_counts["evicted"] > 1400
    assert core.engine.audit() is None


def test_scenarios_have_their_own_defaults() -> None:
    """A scenario would run with the sizes of another."""
    assert parse(["nohits"]).pairs == 10
    assert parse(["warm"]).pairs == 16
    assert parse(["nohits", "--pairs", "3"]).pairs == 3
    assert parse(["match"]).rounds == 50
