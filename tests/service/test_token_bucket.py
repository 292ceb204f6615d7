"""Tokens per second: exact to the nanosecond, and never more than is promised."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from kvledger.tenants.token_bucket import BURST_SECONDS, TokenBucket

SECOND = 10**9


def test_a_full_bucket_has_its_burst() -> None:
    """A tenant would have to wait before its first request, or could use more than is said."""
    bucket = TokenBucket(7.0, 0)
    assert bucket.burst_tokens == 7 * BURST_SECONDS
    assert bucket.tokens(0) == bucket.burst_tokens
    assert bucket.tokens(3600 * SECOND) == bucket.burst_tokens
    assert bucket.wait_for(7 * BURST_SECONDS, 0) == 0


@pytest.mark.parametrize("rate", [0.001, 0.5, 1.0, 3.0, 99.999, 12_345.678])
def test_who_waits_as_long_as_told_enters_and_no_sooner(rate: float) -> None:
    """Clients that obey would be refused again, or others would wait for nothing."""
    bucket = TokenBucket(rate, 0)
    bucket.charge(round(bucket.burst_tokens) + 17, 0)
    for tokens in (1, 5, 40):
        wait = bucket.wait_for(tokens, 0)
        assert wait > 0
        exact = (Fraction(min(tokens, bucket.burst_tokens)) - Fraction(bucket.tokens(0))) / (
            Fraction(round(rate * 1000), 1000 * SECOND)
        )
        assert abs(wait - exact) <= 1 + exact / 10**9
    wait = bucket.wait_for(5, 0)
    assert bucket.wait_for(5, wait - 1) == 1
    assert bucket.wait_for(5, wait) == 0


def test_output_may_overdraw_and_keeps_the_next_ones_out() -> None:
    """A stream would be cut off in its middle, or cost nothing."""
    bucket = TokenBucket(2.0, 0)
    bucket.charge(20, 0)  # all of it
    for second in range(5):
        bucket.charge(4, second * SECOND)  # twice its rate
    assert bucket.tokens(4 * SECOND) == -12
    assert bucket.wait_for(1, 4 * SECOND) == 13 * SECOND // 2


def test_a_prompt_longer_than_the_burst_enters_on_a_full_bucket() -> None:
    """It could never enter, or enter again and again."""
    bucket = TokenBucket(1.0, 0)
    assert bucket.wait_for(25, 0) == 0
    bucket.charge(25, 0)
    assert bucket.tokens(0) == -15
    assert bucket.wait_for(25, 0) == 25 * SECOND, "until it is full again"
    assert bucket.wait_for(25, 25 * SECOND) == 0


def test_what_comes_back_does_not_overfill_it() -> None:
    """Requests that are cancelled at once would save up tokens."""
    bucket = TokenBucket(1.0, 0)
    bucket.charge(6, 0)
    bucket.give_back(6, 3 * SECOND)
    assert bucket.tokens(3 * SECOND) == bucket.burst_tokens


def test_another_rate_counts_from_when_it_is_set() -> None:
    """A tenant would get in hindsight what it was not allowed, or lose what it had."""
    bucket = TokenBucket(1.0, 0)
    bucket.charge(10, 0)
    bucket.change_rate(4.0, 2 * SECOND)
    assert bucket.tokens(2 * SECOND) == 2
    assert bucket.tokens(3 * SECOND) == 6
    bucket.change_rate(0.1, 3 * SECOND)
    assert bucket.tokens(3 * SECOND) == 1, "no more than its burst"


def test_time_that_goes_back_brings_nothing() -> None:
    """Two threads' times a little apart would fill it twice."""
    bucket = TokenBucket(1.0, 5 * SECOND)
    bucket.charge(10, 5 * SECOND)
    assert bucket.tokens(4 * SECOND) == 0
    assert bucket.tokens(6 * SECOND) == 1


def test_over_any_time_it_lets_through_what_it_promises() -> None:
    """Charges at awkward moments would let rounding add up."""
    dice = random.Random(5)
    for rate in (0.37, 3.0, 1234.567):
        bucket, now, used, last = TokenBucket(rate, 0), 0, 0, 0
        for _ in range(5000):
            now += dice.randrange(0, 3 * SECOND)
            prompt = dice.randrange(1, max(2, round(4 * rate)))
            if bucket.wait_for(prompt, now) == 0:
                bucket.charge(prompt, now)
                last = dice.randrange(0, 5)
                bucket.charge(last, now)
                used += prompt + last
        exact = Fraction(round(rate * 1000), 1000) * (BURST_SECONDS + Fraction(now, SECOND))
        assert used <= exact + last
        assert used > exact / 3, "the arm that must be able to fail"
