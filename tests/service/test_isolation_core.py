"""Tenants before the real core: what one has cached is nothing to another, however they come."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from scoped_core import REUSES, SLOTS, Asked, ScopedCore, Tokens

from kvledger.scopes.claims import CacheWish, Scopes
from kvledger.scopes.groups import MembershipList
from kvledger.scopes.keys import KvIdentity
from kvledger.scopes.prefix_scopes import PrefixScopes
from kvledger.tenants.tenant import Tenant

NAMES = [f"t{number}" for number in range(1, 41)]
PAIRS = 10_000
NAMESPACE = CacheWish(scope="namespace", namespace="the same word")


class Derived:
    """The scopes of tenants as the service derives them."""

    def __init__(self) -> None:
        self._scopes = Scopes(KvIdentity("m", "c", "bf16"), lambda numbers: None)
        self._scopes.change_members(MembershipList(dict.fromkeys(NAMES, 1), {}))

    def of(self, tenant: int, wish: CacheWish, prompt: Tokens) -> PrefixScopes:
        who = Tenant(NAMES[tenant - 1], tenant, 1)
        return self._scopes.claim(who, wish, prompt).hold()


def draw_prompt(chance: random.Random) -> Tokens:
    """Of one block to five, and not always whole ones."""
    length = chance.randint(SLOTS + 1, 5 * SLOTS)
    return np.array([chance.randint(1, 2**15) for _ in range(length)], np.int32)


def whole(prompt: Tokens) -> int:
    """Tokens of a prompt's blocks that may be reused: the last token never is."""
    return (len(prompt) - 1) // SLOTS * SLOTS


def test_ten_thousand_pairs_of_tenants_share_nothing() -> None:
    """One tenant would begin with what another computed of the same text (S01)."""
    core, derived, chance = ScopedCore(blocks=512, sequences_max=8), Derived(), random.Random(1)
    own_hits = 0
    for turn in range(PAIRS // 8):
        first, second = [], []
        for _ in range(8):
            a, b = chance.sample(range(1, len(NAMES) + 1), 2)
            prompt, wish = draw_prompt(chance), chance.choice((CacheWish(), NAMESPACE))
            first.append((a, derived.of(a, wish, prompt), prompt))
            second.append((b, derived.of(b, wish, prompt), prompt))
        firsts = [core.ask(*one) for one in first]
        if turn % 2 == 1:
            core.run_out()  # else others come while the first are being computed
        others = [core.ask(*one) for one in second]
        core.run_out()
        again = [core.ask(asked.tenant, asked.scope, asked.prompt) for asked in firsts]
        core.run_out()
        for asked, other, once_more in zip(firsts, others, again, strict=True):
            assert other.receipt["reused_own"] == 0
            assert other.receipt["reused_shared"] == 0
            assert other.receipt["computed_tokens"] == len(other.prompt)
            # A block that is not full is nobody's once its sequence has ended, and either may have
            # ended first.
            kept = [set(one.blocks[: len(one.prompt) // SLOTS]) for one in (asked, other)]
            assert all(kept)
            assert not kept[0] & kept[1]
            # The arm that must hit, in the very blocks that the other did not get.
            assert once_more.receipt["reused_own"] >= whole(asked.prompt)
            kept = whole(asked.prompt) // SLOTS
            assert once_more.blocks[:kept] == asked.blocks[:kept]
            own_hits += 1
        core.forget()
    assert own_hits == PAIRS
    assert core.engine.prefix_counts["foreign"] == 0
    assert core.engine.audit() is None


def test_two_names_of_one_tenant_are_two_scopes() -> None:
    """Who serves many people behind one name could not keep them apart (S01)."""
    core, derived = ScopedCore(), Derived()
    prompt = np.arange(4 * SLOTS, dtype=np.int32)
    found = []
    wishes = [CacheWish(), NAMESPACE, CacheWish(scope="namespace", namespace="another")]
    for wish in [*wishes, *wishes]:
        asked = core.ask(1, derived.of(1, wish, prompt), prompt)
        core.run_out()
        found.append(int(asked.receipt["reused_own"]))
    # All whole blocks before the last, and of that the tokens before the prompt's last one.
    assert found == [0, 0, 0, *[len(prompt) - 1] * 3]


def test_a_scope_that_is_given_to_two_tenants_is_still_no_way_through() -> None:
    """One mistake in the service would open every tenant's cache (S01).

    The books know whose a block is: it is not used, and counted for operators to see.
    """
    core = ScopedCore()
    prompt = np.arange(1, 30, dtype=np.int32)
    own = core.ask(1, 7, prompt)
    core.run_out()
    other = core.submit(Asked(2, 7, prompt, flags=REUSES))
    core.run_out()
    assert other.receipt["reused_own"] == 0
    assert other.receipt["computed_tokens"] == len(prompt)
    assert not set(other.blocks) & set(own.blocks[: len(prompt) // SLOTS])
    assert core.engine.prefix_counts["foreign"] > 0
    again = core.ask(1, 7, prompt)
    core.run_out()
    assert again.receipt["reused_own"] == len(prompt) - 1
    assert core.engine.audit() is None


def test_two_tenants_that_write_into_one_scope_end_the_process() -> None:
    """It would go on with an index in which nobody knows whose is what."""
    program = (
        "import numpy as np; from scoped_core import ScopedCore; core = ScopedCore()\n"
        "for tenant in (1, 1, 2):\n"
        "    core.ask(tenant, 7, np.arange(1, 30, dtype=np.int32)); core.run_out()\n"
        "    print(tenant, flush=True)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.stdout.split() == ["1", "1"], ended.stderr
    assert ended.returncode == -signal.SIGABRT
    assert "broken invariant" in ended.stderr


# --- Order ----------------------------------------------------------------------------------

A, B = 1, 2
TEXTS = 6


class Replay:
    """Requests of B that are the same each time, after A has filled the cache in some manner."""

    def __init__(self, seed: int, manner: str, *, a_goes_on: bool, sealed: bool) -> None:
        chance = random.Random(seed)
        # Small enough that what is cached goes, and requests wait for blocks and for rows.
        self.core = ScopedCore(
            blocks=chance.randint(40, 50) if sealed else chance.randint(20, 30),
            sequences_max=chance.randint(3, 5),
            token_budget=chance.randint(6, 20),
            context_tokens=80,
            forecast=seed % 2 == 0,  # who looks ahead hardly ever preempts
        )
        if sealed:
            self.core.engine.set_shares([(B, 18, 18, 18, True)], 0)
        texts = [draw_text(chance) for _ in range(TEXTS)]
        strange = [text + 2**16 for text in texts]
        self._warm(manner, texts, strange)
        begin, before = self.core.steps, len(self.core.asked)
        self.probes: list[Asked] = []
        due = self._drawn(chance, texts, a_goes_on)
        while due or any(asked.receipt is None for asked in self.core.asked.values()):
            while due and due[0][0] <= self.core.steps - begin:
                _, tenant, prompt, tokens = due.pop(0)
                asked = self.core.ask(tenant, tenant, prompt, tokens)
                if tenant == B:
                    self.probes.append(asked)
            self.core.step()
        self.seen = [
            (asked.admitted_at - begin, int(asked.receipt["preemptions"])) for asked in self.probes
        ]
        names = {number: number - before for number in self.core.asked if number > before}
        self.computed = [
            (
                step - begin,
                *(
                    (names[number], tokens, context)
                    for number, tokens, context in chunks
                    if number in names and self.core.asked[number].tenant == B
                ),
            )
            for step, *chunks in self.core.plans
            if step > begin
        ]

    def _warm(self, manner: str, texts: Sequence[Tokens], strange: Sequence[Tokens]) -> None:
        """Before B comes: the texts that B will ask for, others of the same lengths, or none."""
        for text, other in zip(texts, strange, strict=True):
            if manner == "nothing":
                return
            tenant = B if manner == "own" else A
            self.core.ask(tenant, tenant, text if manner in ("warm", "own") else other)
            self.core.run_out()

    def _drawn(
        self, chance: random.Random, texts: Sequence[Tokens], a_goes_on: bool
    ) -> list[tuple[int, int, Tokens, int]]:
        """When, who, what, and how many tokens it wants."""
        due: list[tuple[int, int, Tokens, int]] = []
        for _ in range(14):
            # Probes of what A may have sent, between requests of new texts, as an attacker would.
            known = chance.random() < 0.5
            text = chance.choice(texts) if known else draw_text(chance) + 2**17
            due.append((chance.randint(0, 12), B, text, chance.randint(1, 24)))
        for _ in range(6):
            other = (chance.randint(0, 12), A, draw_text(chance) + 2**18, chance.randint(1, 24))
            if a_goes_on:
                due.append(other)
        return sorted(due, key=lambda entry: entry[:2])


def draw_text(chance: random.Random) -> Tokens:
    return np.array(
        [chance.randint(1, 2**15) for _ in range(chance.randint(SLOTS, 8 * SLOTS))], np.int32
    )


@pytest.mark.parametrize("sealed", [False, True], ids=["shared pool", "sealed"])
@pytest.mark.parametrize("a_goes_on", [False, True], ids=["alone", "beside A"])
def test_what_another_has_cached_moves_nobody_in_the_queue(a_goes_on: bool, sealed: bool) -> None:
    """A probe that another's cache holds would come sooner than its neighbours (S07).

    Admissions, chunks and preemptions of B are the same, step by step, whether A has sent the very
    texts of B's probes or others. Where B itself had sent them, they are not. In blocks that are
    its alone B does not even notice whether A has sent anything before; while A goes on, whose
    turn it is depends on what A was given, as it must.
    """
    differs = preempted = 0
    for seed in range(100):
        warm, cold, nothing, own = (
            Replay(seed, manner, a_goes_on=a_goes_on, sealed=sealed)
            for manner in ("warm", "cold", "nothing", "own")
        )
        assert warm.seen == cold.seen, seed
        assert warm.computed == cold.computed, seed
        if sealed and not a_goes_on:
            assert nothing.seen == cold.seen, seed
            assert nothing.computed == cold.computed, seed
        assert warm.core.engine.audit() is None
        differs += own.computed != cold.computed
        preempted += any(times for _, times in warm.seen)
    assert differs > 60, "the arm that must differ"
    assert preempted > 10, "nothing was scarce"


# --- Shares ---------------------------------------------------------------------------------


def reused_share(*, flooded: bool, guaranteed: int) -> float:
    """Of B's prompt tokens, those that it found cached: it asks for the same texts again and again.

    A asks ten times as often, for something new each time.
    """
    core, chance = ScopedCore(blocks=120, context_tokens=80, sequences_max=8), random.Random(5)
    if guaranteed:
        core.engine.set_shares([(B, guaranteed, guaranteed, guaranteed, False)], 0)
    texts = [draw_text(chance) for _ in range(8)]
    asked: list[Asked] = []
    for _ in range(150):
        for _ in range(10 if flooded else 0):
            core.ask(A, A, draw_text(random.Random(core.steps)) + 2**17)
            core.step()
        asked.append(core.ask(B, B, chance.choice(texts), max_tokens=2))
        core.run_out()
    found = sum(int(one.receipt["reused_own"]) for one in asked)
    assert core.engine.audit() is None
    return found / sum(len(one.prompt) for one in asked)


def test_a_flood_does_not_drive_out_what_is_guaranteed() -> None:
    """One tenant would make all others compute everything again (S13)."""
    solo = reused_share(flooded=False, guaranteed=60)
    beside = reused_share(flooded=True, guaranteed=60)
    assert solo > 0.7
    assert beside > solo - 0.05, (solo, beside)
    # The arm that must differ: without a guarantee there is a flood.
    assert reused_share(flooded=True, guaranteed=0) < solo - 0.2


# --- Purge ----------------------------------------------------------------------------------


def test_a_full_pool_is_purged_at_once() -> None:
    """A tenant that is gone would leave what it said, or stop everybody while it goes (S23)."""
    blocks, slots = 20_000, 16
    core = ScopedCore(blocks=blocks, slots_per_block=slots, context_tokens=8192, token_budget=8192)
    chance = np.random.default_rng(1)
    kept = core.ask(2, 2, chance.integers(1, 2**15, 20 * slots, dtype=np.int32))
    core.run_out()
    while core.balances["free"] > 256:
        core.ask(1, 1, chance.integers(1, 2**15, 4096, dtype=np.int32))
        core.run_out()
    cached = core.balances["cached"]
    assert cached > 0.98 * blocks
    started = time.perf_counter()
    purged = core.purge(1)
    seconds = time.perf_counter() - started
    core.step()
    assert purged == cached - 20
    assert core.balances["cached"] == 20
    assert core.engine.purge(np.array([1], np.uint32), core.now) == 0, "0 blocks are left"
    assert core.engine.audit() is None
    assert seconds < 0.1, f"{seconds * 1e3:.1f} ms"
    again = core.ask(2, 2, kept.prompt)
    core.run_out()
    assert again.receipt["reused_own"] == len(kept.prompt) - 1, "another's stay"


def test_what_runs_is_purged_when_it_ends() -> None:
    """Its blocks would stay in the cache for whoever has the scope next (S23)."""
    core = ScopedCore(token_budget=8)
    prompt = np.arange(1, 30, dtype=np.int32)
    running = core.ask(1, 1, prompt, max_tokens=8)
    for _ in range(3):
        core.step()
    core.purge(1)
    core.run_out()
    assert running.receipt["computed_tokens"] >= len(prompt)
    again = core.ask(1, 1, prompt)
    core.run_out()
    assert again.receipt["reused_own"] == 0
    once_more = core.ask(1, 1, prompt)
    core.run_out()
    assert once_more.receipt["reused_own"] > 0, "the arm that must hit"
