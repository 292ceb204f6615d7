"""What requests ask of the cache becomes scopes: their own, a group's, a public one, or none."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from kvledger.errors import InvalidRequest, SharedScopeDenied
from kvledger.scopes import NO_REUSE, SHARED_SCOPE, PrefixScopes
from kvledger.scopes.claims import NO_CLAIM, CacheWish, ScopeClaim, Scopes
from kvledger.scopes.groups import MembershipList
from kvledger.scopes.keys import KvIdentity, Scope, ScopeKeys
from kvledger.scopes.public_prefixes import PublicPrefix
from kvledger.scopes.table import ScopeTable
from kvledger.tenants.tenant import Tenant

KV = KvIdentity("m", "c", "bf16")
A, B, C = (Tenant(name, number) for number, name in enumerate("abc"))
PROMPT = np.arange(20, dtype=np.int32)
PUBLIC = PublicPrefix("manual", Scope.of_public("manual", b"digest"), PROMPT[:10])


class Purged(list[int]):
    def __call__(self, numbers: list[int]) -> None:
        self.extend(numbers)


@pytest.fixture
def purged() -> Purged:
    return Purged()


@pytest.fixture
def scopes(purged: Purged) -> Scopes:
    """Tenants a, b and c, of whom a and b share `team`; and one public prefix."""
    made = Scopes(KV, purged, {"manual": PUBLIC})
    made.change_members(members("ab"))
    return made


def members(team: str, **epochs: int) -> MembershipList:
    return MembershipList({"a": 1, "b": 1, "c": 1, **epochs}, {"team": list(team)})


def held(
    scopes: Scopes,
    tenant: Tenant = A,
    prompt: npt.NDArray[np.int32] = PROMPT,
    **wish: object,
) -> PrefixScopes:
    """What the core is told of a request with this wish."""
    return scopes.claim(tenant, CacheWish(**wish), prompt).hold()  # type: ignore[arg-type]


def test_without_a_wish_it_is_the_tenants(scopes: Scopes) -> None:
    """Requests would reuse nothing, or one tenant begin with another's (S01)."""
    mine = held(scopes)
    assert mine == held(scopes) == PrefixScopes(own=mine.own)
    assert mine.own is not None
    assert mine.own < SHARED_SCOPE
    others = {held(scopes, tenant).own for tenant in (B, C, Tenant("a", 0, epoch=2))}
    assert len({mine.own, *others}) == 4


def test_a_namespace_is_the_tenants_alone(scopes: Scopes) -> None:
    """Two end users of a gateway, or of two gateways, would share."""
    numbers = {
        held(scopes, tenant, scope=scope, namespace=name).own
        for tenant, scope, name in (
            (A, "namespace", "x"),
            (A, "namespace", "y"),
            (B, "namespace", "x"),
            (A, "tenant", ""),
            (B, "tenant", ""),
        )
    }
    assert len(numbers) == 5
    again = held(scopes, scope="namespace", namespace="x").own
    assert again in numbers


def test_none_is_nothing(scopes: Scopes) -> None:
    """What should leave no trace would leave one."""
    before = len(scopes)
    assert held(scopes, scope="none") == NO_REUSE
    assert len(scopes) == before


def test_members_of_a_group_share_and_write_it(scopes: Scopes) -> None:
    """The group's blocks would be found by nobody, or be made by nobody."""
    wish = {"shared_scope": "team", "shared_tokens": 8}
    a, b = held(scopes, A, **wish), held(scopes, B, **wish)
    assert a.shared is not None
    assert a.shared == b.shared > SHARED_SCOPE
    assert (a.shared_tokens, a.writes_shared, a.keeps) == (8, True, False)
    assert a.own != b.own
    assert a.own == held(scopes, A).own
    assert not scopes.claim(A, CacheWish(**wish), PROMPT).shares_public  # type: ignore[arg-type]


def test_who_is_in_no_such_group_hears_the_same_whether_there_is_one(scopes: Scopes) -> None:
    """Group names, and so who works with whom, could be found out by asking."""
    said, before = set(), len(scopes)
    for name in ("team", "unknown", "tea", "Team", "team "):
        with pytest.raises(SharedScopeDenied) as denied:
            held(scopes, C, shared_scope=name, shared_tokens=8)
        said.add(str(denied.value))
    assert len(said) == 1
    assert len(scopes) == before


def test_a_border_at_the_very_beginning_shares_nothing(scopes: Scopes) -> None:
    """The core would be told of a scope with no tokens in it."""
    assert held(scopes, shared_scope="team", shared_tokens=0) == held(scopes)


def test_leaving_ends_it_at_once(scopes: Scopes, purged: Purged) -> None:
    """A leaver would go on finding what its former group writes (S04)."""
    wish = {"shared_scope": "team", "shared_tokens": 8}
    before = held(scopes, A, **wish)
    scopes.change_members(members("a"))
    assert purged == [before.shared]
    with pytest.raises(SharedScopeDenied):
        held(scopes, B, **wish)
    after = held(scopes, A, **wish)
    assert after.shared != before.shared
    assert after.own == before.own


def test_a_tenant_made_anew_has_nothing_of_its_predecessors(scopes: Scopes, purged: Purged) -> None:
    """Somebody new with an old name would begin with the old one's prompts (S02, S23)."""
    before = [held(scopes), held(scopes, scope="namespace", namespace="x")]
    other = held(scopes, B)
    scopes.change_members(members("ab", a=2))
    assert set(purged) == {each.own for each in before}
    anew = Tenant("a", 7, epoch=2)
    after = [held(scopes, anew), held(scopes, anew, scope="namespace", namespace="x")]
    assert not {each.own for each in after} & {each.own for each in before}
    assert held(scopes, B) == other


def test_a_public_prefix_is_for_everybody_and_written_by_the_operator(scopes: Scopes) -> None:
    """A tenant could put something into what all others begin with."""
    wish = {"shared_scope": "manual", "shared_tokens": 10}
    numbers = set()
    for tenant in (A, B, C):
        claim = scopes.claim(tenant, CacheWish(**wish), PROMPT)  # type: ignore[arg-type]
        assert claim.shares_public
        told = claim.hold()
        assert (told.shared_tokens, told.writes_shared, told.keeps) == (10, False, False)
        numbers.add(told.shared)
    (job,) = scopes.start_jobs()
    assert job.name == "manual"
    assert job.prompt.tolist() == PUBLIC.tokens.tolist()
    assert numbers == {job.claim.hold().own}
    assert job.claim.hold() == PrefixScopes(own=numbers.pop(), keeps=True)


@pytest.mark.parametrize(
    ("prompt", "count", "reason"),
    [
        (PROMPT, 11, "counts 11 tokens of the prompt, and the public prefix has 10"),
        (np.array([0, 1, 9, 3], np.int32), 4, "only the first 2 of the public prefix's 10"),
        (PROMPT[1:], 1, "only the first 0 of"),
    ],
)
@pytest.mark.parametrize("field", ["cache.shared_messages", "cache.shared_tokens"])
def test_a_prompt_that_does_not_begin_with_it_is_refused_with_the_place(
    scopes: Scopes, prompt: npt.NDArray[np.int32], count: int, reason: str, field: str
) -> None:
    """A tenant's own tokens would lie in the public scope; or a typo cost all reuse unseen."""
    wish = CacheWish(shared_scope="manual", shared_tokens=count, count_field=field)
    with pytest.raises(InvalidRequest) as refused:
        scopes.claim(A, wish, prompt)
    (violation,) = refused.value.violations
    assert violation.field == field
    assert reason in violation.reason


def test_a_part_of_a_public_prefix_may_be_shared(scopes: Scopes) -> None:
    """The last tokens of a text may become others when it goes on."""
    own = np.array([*range(9), 99, 98], np.int32)
    told = held(scopes, A, own, shared_scope="manual", shared_tokens=9)
    assert told.shared_tokens == 9


def test_a_public_prefix_hides_a_group_of_its_name(purged: Purged) -> None:
    """Members would write where everybody reads."""
    made = Scopes(KV, purged, {"team": PUBLIC})
    made.change_members(members("ab"))
    told = held(made, shared_scope="team", shared_tokens=10)
    assert not told.writes_shared


def test_switched_off_nothing_is_reused_and_everything_still_checked(purged: Purged) -> None:
    """A request that is wrong would be found out only when the switch is turned."""
    made = Scopes(KV, purged, {"manual": PUBLIC}, reuses=False)
    made.change_members(members("ab"))
    for wish in ({}, {"scope": "namespace", "namespace": "x"}):
        assert held(made, **wish) == NO_REUSE  # type: ignore[arg-type]
    assert held(made, shared_scope="team", shared_tokens=8) == NO_REUSE
    with pytest.raises(SharedScopeDenied):
        held(made, C, shared_scope="team", shared_tokens=8)
    with pytest.raises(InvalidRequest):
        held(made, A, PROMPT[1:], shared_scope="manual", shared_tokens=8)
    assert made.start_jobs() == []
    assert len(made) == 0


def test_a_claim_holds_until_it_is_released_and_once(purged: Purged) -> None:
    """Scopes of ended requests would fill the table, or those of open ones go."""
    made = Scopes(KV, purged, entries_max=1)
    first = made.claim(A, CacheWish(), PROMPT)
    assert len(made) == 0, "a claim that never enters costs nothing"
    number = first.hold().own
    second = made.claim(B, CacheWish(), PROMPT)
    second.hold()
    assert purged == []
    first.release()
    assert purged == [number]
    first.release()
    second.release()
    assert len(made) == 1
    NO_CLAIM.release()
    assert NO_CLAIM.hold() == NO_REUSE
    assert not NO_CLAIM.shares_public


def test_a_public_scope_stays_however_many_others_come(purged: Purged) -> None:
    """Its blocks, computed once at the start, would be gone until the next one."""
    made = Scopes(KV, purged, {"manual": PUBLIC}, entries_max=2)
    (job,) = made.start_jobs()
    number = job.claim.hold().own
    job.claim.release()
    for name in range(20):
        claim = made.claim(A, CacheWish("namespace", str(name)), PROMPT)
        claim.hold()
        claim.release()
    assert number not in purged
    assert len(purged) == 19
    told = held(made, B, shared_scope="manual", shared_tokens=10)
    assert told.shared == number


def test_without_numbers_left_nothing_is_reused() -> None:
    """A request would be told a scope that is another's."""
    table = ScopeTable(ScopeKeys(KV), lambda numbers: None, 10, numbers_max=1)
    group, own = Scope.of_group("g", 1), Scope.of_tenant("a", 1)
    told = ScopeClaim(table, own, group, shared_tokens=5).hold()
    assert told.own == 1
    other = ScopeClaim(table, Scope.of_tenant("b", 1), group, shared_tokens=5)
    assert other.hold() == NO_REUSE
    other.release()
    third = ScopeClaim(table, own, Scope.of_group("h", 1), shared_tokens=5)
    assert third.hold() == PrefixScopes(own=1)
