"""What is timed is done: every block found, every block purged."""

from __future__ import annotations

from bench.index_speed import find_seconds, make_index, purge_seconds, put_in, tokens


def test_times_are_of_walks_that_find_and_purges_that_purge() -> None:
    """A walk that stops at once would be the fastest one."""
    assert find_seconds(500, 1) > 0
    assert purge_seconds(200, 10, 1) > 0


def test_a_walk_finds_the_beginning_that_is_there() -> None:
    """Time would be that of another walk than the scheduler's."""
    index = make_index(100)
    assert put_in(index, tokens(500, 1)) == 15
    assert index.find_all(1, tokens(500, 1)) == 15
    assert index.find_all(1, tokens(500, 2)) == 0
    assert index.find_all(2, tokens(500, 1)) == 0
    half = tokens(500, 1)
    half[200] += 1
    assert index.find_all(1, half) == 6
