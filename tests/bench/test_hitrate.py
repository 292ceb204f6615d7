"""The hit rates that are printed are those of the policies, and the default one is worth having."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import pytest
from bench.hitrate import POLICIES, Request, agents, belady_share, chats, hit_share, played

REQUESTS = chats(1500, 3)


def plain_lru_share(capacity: int, requests: Sequence[Request]) -> float:
    """LRU as simple as it can be."""
    cache: OrderedDict[tuple[int, int], None] = OrderedDict()
    hits = 0
    for scope, blocks in requests:
        unbroken = True
        for block in blocks:
            unbroken = unbroken and (scope, block) in cache
            hits += unbroken
        for block in reversed(blocks):
            cache.pop((scope, block), None)
            while len(cache) >= capacity:
                cache.popitem(last=False)
            cache[scope, block] = None
    return hits / sum(len(blocks) for _, blocks in requests)


@pytest.mark.parametrize("capacity", [100, 700, 4000])
def test_lru_of_the_index_is_lru(capacity: int) -> None:
    """What the default policy is held against would be something else."""
    assert hit_share("lru", capacity, REQUESTS) == plain_lru_share(capacity, REQUESTS)


@pytest.mark.parametrize("capacity", [100, 700, 4000])
def test_nobody_beats_who_knows_the_future(capacity: int) -> None:
    """A bound that is none would make every policy look bad, or all of them good."""
    best = belady_share(capacity, REQUESTS)
    assert all(hit_share(policy, capacity, REQUESTS) <= best for policy in POLICIES)


def test_everything_is_found_again_where_all_fits() -> None:
    """A cache that loses blocks without need would look like a small one."""
    blocks = {(scope, block) for scope, blocks in REQUESTS for block in blocks}
    asked = sum(len(blocks) for _, blocks in REQUESTS)
    for policy in POLICIES:
        share = hit_share(policy, len(blocks), REQUESTS)
        assert share * asked == pytest.approx(asked - len(blocks))


def test_the_default_policy_is_worth_having() -> None:
    """It would be more code than LRU for nothing."""
    assert hit_share("reuse", 700, REQUESTS) > 1.3 * hit_share("lru", 700, REQUESTS)


def test_a_cache_takes_the_longest_request() -> None:
    """By the papers' rules a request would drop its own beginning, and be played wrongly."""
    with pytest.raises(ValueError, match="a capacity of 19 blocks is less than a request of 20"):
        hit_share("lru", 19, [(1, range(20))])


def test_scopes_share_nothing() -> None:
    """A tenant's blocks would count as found where another one had put them."""
    requests: list[Request] = [(tenant, range(20)) for tenant in (1, 2, 3)]
    assert all(hit_share(policy, 100, requests) == 0 for policy in POLICIES)
    assert belady_share(100, requests) == 0


@pytest.mark.parametrize("requests", [REQUESTS, agents(1500, 3)], ids=["chats", "agents"])
def test_the_default_policy_is_nowhere_worse_than_lru(requests: Sequence[Request]) -> None:
    """Where almost all fits, what was learnt from little would cost hits."""
    for capacity in (400, 1000, 3000, 6000, 10_000, 14_000, 25_000):
        assert hit_share("reuse", capacity, requests) >= hit_share("lru", capacity, requests)


def test_scans_do_not_push_out_what_comes_back() -> None:
    """One tenant that reads long documents once would empty the cache of all others."""
    talks = [(tenant, range(1000 * tenant, 1000 * tenant + 20)) for tenant in range(1, 31)]
    requests: list[Request] = []
    for number in range(3000):
        requests.append(talks[number * 7 % 30])
        requests.append((99, range(10**6 + 60 * number, 10**6 + 60 * number + 60)))
    best = 1 - 60 / 80  # 600 of the capacity's 900 are all that come back
    assert hit_share("lru", 900, requests) == 0
    assert hit_share("reuse", 900, requests) > 0.85 * best


def test_a_policy_that_knows_the_costs_saves_more_compute() -> None:
    """Blocks far behind a long beginning would be dropped like those at the front."""
    growth, requests = 0.1, chats(4000, 3)
    plain = played("reuse", 1500, requests, growth=growth)
    knows = played("reuse", 1500, requests, known=growth, growth=growth)
    assert knows.compute > 1.04 * plain.compute
    assert plain.compute > 1.2 * played("lru", 1500, requests, growth=growth).compute
    assert played("reuse", 1500, requests).compute == pytest.approx(plain.blocks)
