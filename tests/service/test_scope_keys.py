"""Keys of scopes: different scopes have different keys, whatever strings their parts are."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvledger.scopes.keys import (
    KEY_BYTES,
    KvIdentity,
    Owner,
    Part,
    Scope,
    ScopeKeys,
    ScopeKind,
    encoded,
)

KV = KvIdentity(model="m" * 64, config="Llama(2)", kv_format="bf16", adapter=None)
SECRET = bytes(range(32))

# Strings that meet each other where parts are only put in a row.
_PIECES = ("", "a", "b", "ab", "c", "bc", "7", "\0", "s", "n", "tenant", "group", "é", "None")


def drawn_string(chance: random.Random) -> str:
    return "".join(chance.choices(_PIECES, k=chance.randrange(4)))


def drawn_scope(chance: random.Random) -> Scope:
    name, detail, age = drawn_string(chance), drawn_string(chance), chance.randrange(300)
    return chance.choice(
        (
            Scope.of_tenant(name, age),
            Scope.of_namespace(name, age, detail),
            Scope.of_group(name, age),
            Scope.of_public(name, detail.encode()),
        )
    )


def drawn_kv(chance: random.Random) -> KvIdentity:
    adapter = chance.choice((None, drawn_string(chance)))
    return KvIdentity(*(drawn_string(chance) for _ in range(3)), adapter)


def test_a_hundred_thousand_scopes_have_a_hundred_thousand_keys() -> None:
    """Two scopes with one key are one scope: each would begin with what the other left (S03)."""
    chance = random.Random(1)
    seen: dict[bytes, tuple[Scope, KvIdentity]] = {}
    cases: set[tuple[Scope, KvIdentity]] = set()
    while len(cases) < 100_000:
        case = (drawn_scope(chance), drawn_kv(chance))
        if case in cases:
            continue
        cases.add(case)
        key = ScopeKeys(case[1], SECRET).key(case[0])
        assert len(key) == KEY_BYTES
        assert key not in seen, (case, seen[key])
        seen[key] = case


PARTS = st.lists(
    st.none() | st.text(max_size=4) | st.binary(max_size=4) | st.integers(-(2**70), 2**70),
    max_size=5,
)


@settings(max_examples=2000)
@given(a=PARTS, b=PARTS)
def test_different_parts_are_different_bytes(a: list[Part], b: list[Part]) -> None:
    """What is hashed would be the same before any hash is asked."""
    same = [(type(part), part) for part in a] == [(type(part), part) for part in b]
    assert (encoded(a) == encoded(b)) == same


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (("ab", "c"), ("a", "bc")),
        (("a", "b"), ("ab",)),
        (("a",), ("a", "")),
        (("",), (None,)),
        (("7",), (7,)),
        (("7",), (b"7",)),
        ((7,), (b"\x07",)),
        ((0,), (b"",)),
        ((-1,), (255,)),
        ((127,), (-129,)),
        ((), ("",)),
        # A string that spells out how another list begins.
        (("a", "b"), ("a" + encoded(["b"]).decode(),)),
        ((encoded(["a"]),), ("a",)),
    ],
)
def test_crafted_parts_do_not_meet(a: tuple[Part, ...], b: tuple[Part, ...]) -> None:
    """These pairs met in other servers, or would with one rule less (S03, B08, B09)."""
    assert encoded(a) != encoded(b)


def test_no_part_is_taken_for_a_number() -> None:
    """True would be 1, and a float whatever it is rounded to."""
    for part in (True, 1.0, [1]):
        with pytest.raises(TypeError):
            encoded([part])  # type: ignore[list-item]


def keys_of(*cases: tuple[Scope, KvIdentity]) -> set[bytes]:
    return {ScopeKeys(kv, SECRET).key(scope) for scope, kv in cases}


def test_crafted_scopes_do_not_meet() -> None:
    """A client names its namespace, or an operator an adapter, like something else's salt (B09)."""
    with_adapter = replace(KV, adapter="salt")
    cases = [
        (Scope.of_tenant("a", 1), KV),
        (Scope.of_tenant("a", 1), with_adapter),
        (Scope.of_namespace("a", 1, "salt"), KV),
        (Scope.of_namespace("a", 1, ""), KV),
        (Scope.of_namespace("a", 1, "1"), KV),
        (Scope.of_namespace("a1", 1, ""), KV),
        (Scope.of_tenant("a1", 1), KV),
        (Scope.of_tenant("a", 11), KV),
        (Scope.of_group("a", 1), KV),
        (Scope.of_public("a", b""), KV),
        (Scope.of_public("a", b"salt"), KV),
        (Scope.of_namespace("ab", 1, "c"), KV),
        (Scope.of_namespace("a", 1, "bc"), KV),
        (Scope.of_namespace("a", 1, "tenant"), KV),
        (Scope.of_tenant("a", 1), replace(KV, kv_format="bf16salt")),
        (Scope.of_tenant("a", 1), replace(KV, kv_format="bf1", adapter="6")),
        (Scope.of_tenant("a", 1), replace(KV, adapter="")),
        (Scope.of_tenant("a", 1), replace(KV, adapter="None")),
    ]
    assert len(keys_of(*cases)) == len(cases)


def test_each_field_changes_the_key() -> None:
    """Blocks of another model, format or adapter would be read as one's own (S12, B20)."""
    scope = Scope.of_namespace("a", 1, "n")
    kvs = [
        KV,
        replace(KV, model="other"),
        replace(KV, config="other"),
        replace(KV, kv_format="other"),
        replace(KV, adapter="other"),
    ]
    scopes = [
        scope,
        Scope.of_namespace("b", 1, "n"),
        Scope.of_namespace("a", 2, "n"),
        Scope.of_namespace("a", 1, "o"),
        replace(scope, kind=ScopeKind.TENANT),
        replace(scope, owner=Owner(ScopeKind.GROUP, "a", 1)),
    ]
    cases = list(itertools.product(scopes, kvs))
    assert len(keys_of(*cases)) == len(cases) == 30


def test_every_field_of_a_scope_and_of_what_blocks_depend_on_is_tried() -> None:
    """A field that is added later, and forgotten in the key, would change nothing."""
    assert set(KvIdentity.__dataclass_fields__) == {"model", "config", "kv_format", "adapter"}
    assert set(Scope.__dataclass_fields__) == {"kind", "owner", "detail"}
    assert set(Owner.__dataclass_fields__) == {"kind", "name", "age"}


def test_keys_are_the_secrets() -> None:
    """Who knows the names could work out the keys; or two processes share them."""
    scope = Scope.of_tenant("a", 1)
    drawn = {ScopeKeys(KV).key(scope) for _ in range(20)}
    assert len(drawn) == 20
    assert ScopeKeys(KV, SECRET).key(scope) == ScopeKeys(KV, SECRET).key(scope)
    for length in (0, 31, 33):
        with pytest.raises(ValueError, match="32 bytes"):
            ScopeKeys(KV, bytes(length))


def test_only_what_several_tenants_may_use_is_shared() -> None:
    """The core lets other tenants hang their blocks below shared ones."""
    assert not Scope.of_tenant("a", 1).is_shared
    assert not Scope.of_namespace("a", 1, "n").is_shared
    assert Scope.of_group("a", 1).is_shared
    assert Scope.of_public("a", b"").is_shared
