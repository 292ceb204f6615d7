"""Share groups: only members share, and who joins, leaves or is made anew begins with nothing."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest

from kvledger._core import PrefixIndex
from kvledger.errors import SharedScopeDenied
from kvledger.scopes import PrefixScopes
from kvledger.scopes.claims import CacheWish, ScopeClaim, Scopes
from kvledger.scopes.groups import MembershipList, ShareGroups
from kvledger.scopes.keys import KvIdentity, group_owner, tenant_owner
from kvledger.tenants.tenant import Tenant

KV = KvIdentity("m", "c", "bf16")
BLOCK = 4
PROMPT = np.arange(4 * BLOCK, dtype=np.int32)


def tenant(name: str, epoch: int = 1) -> Tenant:
    return Tenant(name, 1, epoch)


def groups_of(**groups: str) -> MembershipList:
    """Tenants a, b and c of epoch 1, and these groups of them."""
    listed = {name: tuple(members) for name, members in groups.items()}
    return MembershipList({"a": 1, "b": 1, "c": 1}, listed)


def test_only_who_is_on_the_list_is_in_the_group() -> None:
    """A tenant would begin with what others left because it knows a name (S04)."""
    groups = ShareGroups()
    groups.change(groups_of(g="ab"))
    generation = groups.generation("g", tenant("a"))
    assert generation is not None
    assert groups.generation("g", tenant("b")) == generation
    for stranger in (tenant("c"), tenant("a", 2), tenant("nobody")):
        assert groups.generation("g", stranger) is None
    assert groups.generation("h", tenant("a")) is None


def test_each_change_of_members_is_a_new_generation() -> None:
    """What a leaver wrote or could read would be found by those who stay, or who come (S04)."""
    groups = ShareGroups()
    seen = set()
    for members in ("ab", "abc", "bc", "abc", "", "abc"):
        before = groups.generation("g", tenant("b"))
        ended = groups.change(groups_of(g=members, other="a"))
        after = groups.generation("g", tenant("b"))
        assert after not in seen
        assert ended == ([] if not seen and before is None else ended)
        if before is not None:
            assert ended == [group_owner("g", before)]
        if after is not None:
            seen.add(after)
    assert len(seen) == 5


def test_what_stays_the_same_stays() -> None:
    """Reading the same file again would empty every cache."""
    groups = ShareGroups()
    assert groups.change(groups_of(g="ab", h="c")) == []
    before = groups.generation("g", tenant("a"))
    assert groups.change(groups_of(h="c", g="ba")) == []
    assert groups.change(groups_of(h="cc", g=("a", "b", "nobody"))) == []  # type: ignore[arg-type]
    assert groups.generation("g", tenant("a")) == before


def test_a_group_that_went_and_came_is_another() -> None:
    """Its scope would come to life again."""
    groups = ShareGroups()
    groups.change(groups_of(g="ab"))
    before = groups.generation("g", tenant("a"))
    assert before is not None
    assert groups.change(groups_of()) == [group_owner("g", before)]
    assert groups.generation("g", tenant("a")) is None
    groups.change(groups_of(g="ab"))
    assert groups.generation("g", tenant("a")) not in (None, before)


def test_a_tenant_that_goes_or_is_made_anew_ends_its_scopes_and_its_groups() -> None:
    """Somebody else with its name would begin with what it left."""
    for later in ({"b": 1, "c": 1}, {"a": 2, "b": 1, "c": 1}):
        groups = ShareGroups()
        groups.change(groups_of(g="ab", h="bc"))
        generation = groups.generation("g", tenant("b"))
        assert generation is not None
        ended = groups.change(MembershipList(later, {"g": ["a", "b"], "h": ["b", "c"]}))
        assert ended == [tenant_owner("a", 1), group_owner("g", generation)]
        assert groups.generation("g", tenant("a")) is None


@dataclass
class FakeRegistry:
    """Tenants and groups that change, and who is told of it."""

    scopes: Scopes
    epochs: dict[str, int] = field(default_factory=dict)
    groups: dict[str, set[str]] = field(default_factory=dict)
    last_epochs: Counter[str] = field(default_factory=Counter)

    def tell(self) -> None:
        copied = {name: frozenset(members) for name, members in self.groups.items()}
        self.scopes.change_members(MembershipList(dict(self.epochs), copied))

    def tenant(self, name: str) -> Tenant:
        return Tenant(name, 1, self.epochs[name])

    def add(self, name: str) -> None:
        self.last_epochs[name] += 1
        self.epochs[name] = self.last_epochs[name]
        self.tell()


@dataclass(frozen=True)
class Writer:
    """Who wrote a block: the tenant, and the group's list at that time, if it was in a group."""

    tenant: str
    epoch: int
    group: str | None
    change: int  # how often that group's list had changed


class Cache:
    """The core's prefix index, and who wrote each of its blocks and when."""

    def __init__(self) -> None:
        self.index = PrefixIndex(
            policy="lru", capacity=4096, nodes=8192, block_tokens=BLOCK, seed=1
        )
        self.blocks = 0
        self.writers: dict[int, Writer] = {}

    def purge(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.index.purge(number)

    def reused(self, scopes: PrefixScopes, prompt: npt.NDArray[np.int32]) -> list[int]:
        """The blocks that a prompt may begin with."""
        node, found = self.index.root, []
        for scope, tokens in self._blocks(scopes, prompt):
            child = self.index.find(node, scope, tokens)
            block = None if child is None else self.index.block_of(child)
            if child is None or block is None:
                break
            node = child
            found.append(block)
        return found

    def write(self, scopes: PrefixScopes, prompt: npt.NDArray[np.int32], writer: Writer) -> None:
        """Keeps the prompt's blocks that are not there yet."""
        node, pinned = self.index.root, []
        for scope, tokens in self._blocks(scopes, prompt):
            child = self.index.place(node, scope, tokens)
            assert child is not None
            pinned.append(child)
            if self.index.block_of(child) is None:
                self.blocks += 1
                self.index.fill(child, self.blocks)
                self.writers[self.blocks] = writer
            node = child
        for each in reversed(pinned):
            self.index.unpin(each)
        while self.index.filled > 2000:
            assert self.index.evict() is not None

    @staticmethod
    def _blocks(
        scopes: PrefixScopes, prompt: npt.NDArray[np.int32]
    ) -> list[tuple[int, npt.NDArray[np.int32]]]:
        assert scopes.own is not None
        shared = scopes.shared_tokens // BLOCK
        made = []
        for place in range(len(prompt) // BLOCK):
            scope = scopes.own if place >= shared else scopes.shared
            assert scope is not None
            made.append((scope, prompt[place * BLOCK : (place + 1) * BLOCK]))
        return made


class World:
    """Tenants that come and go, join and leave, and ask; it knows by itself who may find what."""

    names, groups = "abcd", ("g", "h")

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.cache = Cache()
        self.scopes = Scopes(KV, self.cache.purge, entries_max=40)
        self.registry = FakeRegistry(self.scopes)
        self.changes: Counter[str] = Counter()  # of each group's list
        self.counted: Counter[str] = Counter()
        self.open: list[tuple[ScopeClaim, PrefixScopes, Writer]] = []
        for name in self.names:
            self.registry.add(name)
        self.registry.groups.update({group: set(self.names) for group in self.groups})
        self.registry.tell()

    def lists(self) -> dict[str, frozenset[tuple[str, int]]]:
        """Members of each group with their epochs."""
        epochs = self.registry.epochs
        return {
            group: frozenset((name, epochs[name]) for name in members if name in epochs)
            for group, members in self.registry.groups.items()
        }

    def change(self) -> None:
        """One change of who there is, or of who is in a group."""
        registry, chance, before = self.registry, self.chance, self.lists()
        kind, name = chance.randrange(5), chance.choice(self.names)
        group = chance.choice(self.groups)
        if kind == 0:
            registry.epochs.pop(name, None)
        elif kind == 1 and name not in registry.epochs:
            registry.add(name)
        elif kind == 2:
            registry.groups.setdefault(group, set()).add(name)
        elif kind == 3:
            registry.groups.get(group, set()).discard(name)
        elif chance.random() < 0.2:
            registry.groups.pop(group, None)
        registry.tell()
        for each in self.groups:
            if before.get(each) != self.lists().get(each):
                self.changes[each] += 1
                self.counted["changes"] += 1

    def ask(self) -> None:
        """A request: whatever it finds must be meant for it. Then it writes."""
        name = self.chance.choice(self.names)
        if name not in self.registry.epochs:
            return
        who = self.registry.tenant(name)
        group = self.chance.choice((None, *self.groups, "unknown"))
        wish = CacheWish(
            scope=self.chance.choice(("tenant", "namespace")),
            namespace=self.chance.choice("xy"),
            shared_scope=group or "",
            shared_tokens=2 * BLOCK if group else 0,
        )
        is_member = group is None or (name, who.epoch) in self.lists().get(group, ())
        try:
            claim = self.scopes.claim(who, wish, PROMPT)
        except SharedScopeDenied:
            assert not is_member
            self.counted["denied"] += 1
            return
        assert is_member
        held = claim.hold()
        for place, block in enumerate(self.cache.reused(held, PROMPT)):
            self.check_found(block, who, group if place < 2 else None)
        writer = Writer(name, who.epoch, group, self.changes[group or ""])
        self.cache.write(held, PROMPT, writer)
        self.open.append((claim, held, writer))

    def check_found(self, block: int, who: Tenant, group: str | None) -> None:
        """A block that a request may begin with; of a group's part, or of its own."""
        writer = self.cache.writers[block]
        if group is None:
            assert (writer.tenant, writer.epoch) == (who.name, who.epoch)
            self.counted["private hits"] += 1
        else:
            assert (writer.group, writer.change) == (group, self.changes[group])
            whose = "own" if writer.tenant == who.name else "others"
            self.counted[f"hits of {whose}"] += 1

    def go_on(self) -> None:
        """An open request writes once more, perhaps into a scope that has ended; some end."""
        chosen = claim, held, writer = self.chance.choice(self.open)
        self.cache.write(held, PROMPT, writer)
        if len(self.open) > 10 or self.chance.random() < 0.3:
            self.open.remove(chosen)
            claim.release()

    def end(self) -> None:
        """Everybody goes."""
        for claim, _, _ in self.open:
            claim.release()
        self.registry.epochs.clear()
        self.registry.tell()


@pytest.mark.parametrize("seed", [1, 2])
def test_five_thousand_steps_of_joining_leaving_and_asking(seed: int) -> None:
    """One step at which a leaver, a joiner or a stranger finds what is not for them (S04)."""
    world = World(seed)
    for _ in range(5000):
        kind = world.chance.random()
        if kind < 0.05:
            world.change()
        elif kind < 0.25 and world.open:
            world.go_on()
        else:
            world.ask()
        while len(world.open) > 12:
            world.go_on()
        assert len(world.scopes) <= 40 + 2 * len(world.open)
    assert world.cache.index.audit() is None
    world.end()
    assert world.cache.index.nodes == 0, "nobody is left, and neither is anything of theirs"
    # The arms that must succeed: sharing and refusing both happened, many times.
    counted = world.counted
    assert counted["hits of own"] > 100, counted
    assert counted["hits of others"] > 100, counted
    assert counted["private hits"] > 200, counted
    assert counted["denied"] > 200, counted
    assert counted["changes"] > 60, counted
