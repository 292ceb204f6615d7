"""The table of scopes: numbers are used once, the table is bounded, and what goes is purged."""

from __future__ import annotations

import random

import pytest
from structlog.testing import CapturingLogger

from kvledger.scopes import SHARED_SCOPE, table
from kvledger.scopes.keys import KvIdentity, Scope, ScopeKeys, group_owner, tenant_owner
from kvledger.scopes.table import ScopeTable

KEYS = ScopeKeys(KvIdentity("m", "c", "bf16"))


class Purges:
    """What the core was told."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.told: set[int] = set()

    def __call__(self, numbers: object) -> None:
        self.calls.append(list(numbers))  # type: ignore[call-overload]
        self.told.update(self.calls[-1])

    @property
    def numbers(self) -> list[int]:
        return [number for call in self.calls for number in call]


@pytest.fixture
def purges() -> Purges:
    return Purges()


def made(purges: Purges, entries_max: int = 3, **options: int) -> ScopeTable:
    return ScopeTable(KEYS, purges, entries_max, **options)


def namespace(name: object, tenant: str = "a", epoch: int = 1) -> Scope:
    return Scope.of_namespace(tenant, epoch, str(name))


def test_one_scope_has_one_number_while_it_is_known(purges: Purges) -> None:
    """Nobody would find what the same scope left before."""
    scopes = made(purges)
    first = scopes.hold(namespace(1))
    assert first == scopes.hold(namespace(1))
    assert first != scopes.hold(namespace(2))
    assert first is not None
    scopes.release(first)
    scopes.release(first)
    assert scopes.hold(namespace(1)) == first
    assert purges.calls == []


def test_shared_scopes_have_the_bit(purges: Purges) -> None:
    """The core would not let tenants go on from a shared scope to their own, or let them do so
    from each other's."""
    scopes = made(purges, 10)
    for scope in (namespace(1), Scope.of_tenant("a", 1)):
        number = scopes.hold(scope)
        assert number is not None
        assert 0 < number < SHARED_SCOPE
    for scope in (Scope.of_group("g", 1), Scope.of_public("p", b"")):
        number = scopes.hold(scope)
        assert number is not None
        assert SHARED_SCOPE < number < 2 * SHARED_SCOPE


def test_beyond_its_bound_the_one_unused_for_longest_goes_and_is_purged(purges: Purges) -> None:
    """Namespaces of end users would fill the memory; or the core keep blocks nobody can find."""
    scopes = made(purges)
    numbers = [scopes.hold(namespace(name)) for name in range(3)]
    for number in numbers:
        assert number is not None
        scopes.release(number)
    assert numbers[0] == scopes.hold(namespace(0))  # used again: now 1 is the oldest
    assert numbers[0] is not None
    scopes.release(numbers[0])
    assert scopes.hold(namespace("new")) not in numbers
    assert purges.calls == [[numbers[1]]]
    assert len(scopes) == 3
    again = scopes.hold(namespace(1))
    assert again not in numbers, "a number comes once"


def test_scopes_of_open_requests_stay(purges: Purges) -> None:
    """A request would go on in a scope that is purged under it."""
    scopes = made(purges)
    held = [scopes.hold(namespace(name)) for name in range(5)]
    assert len(scopes) == 5
    assert purges.calls == []
    for number in held:
        assert number is not None
        scopes.release(number)
    assert len(scopes) == 3, "the bound holds as soon as it can"
    assert purges.numbers == held[:2]


def test_a_tenant_with_many_namespaces_drives_out_its_own(purges: Purges) -> None:
    """Anybody could empty a neighbour's cache with names (S13)."""
    scopes = made(purges, 100)
    quiet = [scopes.hold(namespace(name, "quiet")) for name in range(40)]
    group = scopes.hold(Scope.of_group("g", 1))
    for number in (*quiet, group):
        assert number is not None
        scopes.release(number)
    for name in range(5000):
        number = scopes.hold(namespace(name, "loud"))
        assert number is not None
        scopes.release(number)
        assert len(scopes) <= 100
    assert purges.told.isdisjoint({*quiet, group})
    assert [scopes.hold(namespace(name, "quiet")) for name in range(40)] == quiet
    assert scopes.hold(Scope.of_group("g", 1)) == group
    recent = scopes.hold(namespace(4999, "loud"))
    assert recent not in purges.told, "of its own, those unused for longest go"


def test_no_call_purges_many_at_once(purges: Purges) -> None:
    """A step would wait while the core takes out thousands of scopes."""
    scopes = made(purges, 5000)
    for name in range(12_000):
        number = scopes.hold(namespace(name))
        assert number is not None
        scopes.release(number)
    assert max(map(len, purges.calls)) <= 64
    assert len(scopes) > 4900
    assert len(purges.numbers) == 12_000 - len(scopes)
    assert purges.numbers == sorted(purges.numbers), "oldest first"


def test_a_release_too_many_is_no_release(purges: Purges) -> None:
    """A scope would go while a request uses it, or a count become negative."""
    scopes = made(purges)
    number = scopes.hold(namespace(1))
    assert number is not None
    scopes.release(number)
    for wrong in (number, 99):
        with pytest.raises(KeyError):
            scopes.release(wrong)
    assert scopes.hold(namespace(1)) == number


def test_what_is_revoked_is_purged_and_comes_back_with_another_number(purges: Purges) -> None:
    """A tenant that is made anew would begin with what its predecessor left."""
    scopes = made(purges, 10)
    mine = [scopes.hold(namespace(name)) for name in range(3)]
    other = scopes.hold(namespace(0, "b"))
    for number in (*mine, other):
        assert number is not None
        scopes.release(number)
    scopes.revoke(tenant_owner("a", 1))
    assert purges.calls == [mine]
    assert len(scopes) == 1
    assert scopes.hold(namespace(0, "b")) == other
    assert scopes.hold(namespace(0)) not in mine
    scopes.revoke(tenant_owner("nobody", 1))
    scopes.revoke(group_owner("b", 1))
    assert purges.calls == [mine]


def test_what_is_revoked_in_use_is_purged_again_when_nobody_uses_it(purges: Purges) -> None:
    """What an open request writes after the purge would stay for ever."""
    scopes = made(purges)
    number = scopes.hold(namespace(1))
    assert number is not None
    assert scopes.hold(namespace(1)) == number
    scopes.revoke(tenant_owner("a", 1))
    assert purges.calls == [[number]]
    after = scopes.hold(namespace(1))
    assert after != number
    scopes.release(number)
    assert purges.calls == [[number]]
    scopes.release(number)
    assert purges.calls == [[number], [number]]
    assert len(scopes) == 1
    scopes.revoke(tenant_owner("a", 1))
    assert purges.calls[2:] == [[after]]


def test_numbers_end_and_are_not_used_again(
    purges: Purges, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first scope of a process would come to life with blocks of another."""
    logger = CapturingLogger()
    monkeypatch.setattr(table, "_log", logger)
    scopes = made(purges, 1, numbers_max=2)
    numbers = []
    for name in range(2):
        number = scopes.hold(namespace(name))
        assert number is not None
        scopes.release(number)
        numbers.append(number)
    assert numbers == [1, 2]
    assert scopes.hold(namespace("third")) is None
    assert scopes.hold(namespace("fourth")) is None
    assert len(logger.calls) == 1, "said once"
    assert scopes.hold(namespace(1)) == 2, "what has a number keeps it"
    assert scopes.hold(Scope.of_group("g", 1)) == SHARED_SCOPE + 1, "the others are counted apart"


def test_a_long_life_keeps_the_bound_and_tells_every_number_once(purges: Purges) -> None:
    """Over millions of namespaces the table would grow, or a purge be lost."""
    chance = random.Random(7)
    scopes = made(purges, 100)
    held: list[tuple[Scope, int]] = []
    live: dict[Scope, int] = {}  # what the table must know, at least while it is held
    seen: set[int] = set()
    for step in range(20_000):
        if held and (chance.random() < 0.5 or len(held) > 50):
            scopes.release(held.pop(chance.randrange(len(held)))[1])
        else:
            tenant = chance.choice("abc")
            scope = namespace(chance.randrange(500), tenant)
            number = scopes.hold(scope)
            assert number is not None
            assert number not in purges.told
            if live.get(scope) != number:
                assert number not in seen, "a number was used twice"
                assert live.get(scope) is None or live[scope] in purges.told
                seen.add(number)
                live[scope] = number
            held.append((scope, number))
        assert len(scopes) <= 100
        assert scopes.idle == len(scopes) - len({number for _, number in held})
        if step % 4000 == 3999:
            for _, number in held:
                scopes.release(number)
            held.clear()
    assert len(purges.numbers) == len(set(purges.numbers))
    assert len(seen) == len(purges.numbers) + len(scopes), "each is known, or was purged"
