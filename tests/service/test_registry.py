"""The registry: numbers, epochs, groups, and what it does when its file changes."""

from __future__ import annotations

import asyncio
import errno
import hmac
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from server_harness import Log, until
from tenants_harness import TenantsOfTest

from kvledger.errors import SettingRefused
from kvledger.tenants import editing, registry
from kvledger.tenants.authentication import Authenticator, Transport
from kvledger.tenants.registry import DEV_TENANT, Registry, Snapshot
from kvledger.tenants.roles import Role
from kvledger.tenants.tenants_file import TenantsFile, TenantsRefused
from kvledger.tenants.tokens import bearer, digest, new_token


@pytest.fixture
def tenants(tmp_path: Path) -> TenantsOfTest:
    found = TenantsOfTest(tmp_path)
    found.add("acme")
    found.add("globex")
    return found


def rewritten(tenants: TenantsOfTest, before: str, after: str) -> None:
    """What somebody changes with an editor."""
    tenants.path.write_text(tenants.path.read_text().replace(before, after))


def without_tokens(text: str) -> str:
    """The file without anybody's tokens."""
    values = json.loads(text)
    for row in values["tenants"].values():
        row["tokens"] = []
    return json.dumps(values)


async def test_numbers_are_given_out_once(tenants: TenantsOfTest) -> None:
    """The core would book one tenant's blocks to another, or find its cached ones."""
    found = Registry(tenants.path)
    acme, globex = found.tenant("acme"), found.tenant("globex")
    assert acme is not None
    assert globex is not None
    assert {acme.number, globex.number} == {1, 2}
    tenants.change(lambda values: editing.set_limits(values, "acme", {"queued_max": 7}))
    await found.refresh()
    changed = found.tenant("acme")
    assert changed is not None
    assert (changed.number, changed.epoch) == (acme.number, 1)
    assert (acme.limits.queued_max, changed.limits.queued_max) == (None, 7)
    seen = {acme.number, globex.number}
    for epoch in (2, 3):
        tenants.remove("acme")
        await found.refresh()
        assert found.tenant("acme") is None
        tenants.add("acme")
        await found.refresh()
        anew = found.tenant("acme")
        assert anew is not None
        assert anew.epoch == epoch
        assert anew.number not in seen
        seen.add(anew.number)
    assert found.tenant("globex") == globex


async def test_made_anew_between_two_looks_is_another(tenants: TenantsOfTest) -> None:
    """A server that did not see it go would take it for the same."""
    found = Registry(tenants.path)
    before = found.tenant("acme")
    tenants.remove("acme")
    tenants.add("acme")
    await found.refresh()
    after = found.tenant("acme")
    assert before is not None
    assert after is not None
    assert (after.epoch, after.number != before.number) == (2, True)
    assert Registry(tenants.path).tenant("acme") is not None


async def test_an_epoch_that_was_in_use_is_refused(tenants: TenantsOfTest) -> None:
    """Who edits by hand would give a new tenant what another has left."""
    found = Registry(tenants.path)
    good = tenants.path.read_text()
    tenants.remove("acme")
    await found.refresh()
    tenants.path.write_text(good)
    with pytest.raises(TenantsRefused, match=r"tenants\.acme\.epoch: 1 was in use .* 2 or more"):
        await found.refresh()
    assert found.tenant("acme") is None
    tenants.path.write_text(good.replace('"acme": {', '"acme": {"epoch": 2,'))
    await found.refresh()
    anew = found.tenant("acme")
    assert anew is not None
    assert anew.epoch == 2


async def test_a_file_that_is_refused_leaves_nothing(tenants: TenantsOfTest) -> None:
    """Every later file would be refused for its epochs, and no revocation act."""
    found = Registry(tenants.path)
    before = found.tenant("acme")
    assert before is not None

    def check(new: Snapshot) -> None:
        if len(new.tenants()) > 2:
            raise SettingRefused("the pool has no room for three")

    found.check = check
    good = tenants.path.read_text()
    tenants.add("third")
    rewritten(tenants, '"acme": {', '"acme": {"epoch": 2,')
    with pytest.raises(TenantsRefused, match="no room for three"):
        await found.refresh()
    tenants.path.write_text(good)
    await found.refresh()
    assert found.tenant("acme") == before, "its number too: its blocks are booked to that"
    found.check = lambda new: None
    tenants.add("third")
    tenants.revoke("acme")
    await found.refresh()
    third = found.tenant("third")
    assert third is not None
    assert third.epoch == 1
    assert found.now.by_token(digest(tenants.tokens["acme"].encode())) is None


async def test_a_role_that_comes_back_has_its_number_again(tenants: TenantsOfTest) -> None:
    """Its blocks would be booked to one that is no more."""
    found = Registry(tenants.path)
    before = found.tenant("acme")
    for role in ("operator", "client"):
        tenants.change(lambda values, role=role: editing.set_access(values, "acme", [role], None))
        await found.refresh()
    assert found.tenant("acme") == before


async def test_who_is_no_client_is_no_tenant(tenants: TenantsOfTest) -> None:
    """Quotas and scopes would be made for who has neither; a gateway be served as itself."""
    tenants.add("operator", roles=["operator"])
    tenants.add("edge")
    tenants.gateway("edge", "acme")
    found = Registry(tenants.path)
    assert {tenant.name for tenant in found.tenants()} == {"acme", "globex"}
    assert found.tenant("edge") is None
    assert found.tenant("operator") is None
    assert found.now.principal("edge") is not None


async def test_groups_have_their_members(tenants: TenantsOfTest) -> None:
    """A tenant would find another's prefixes without being in its group."""
    tenants.change(lambda values: editing.set_list(values, "groups", "g", ["acme", "globex"]))
    found = Registry(tenants.path)
    assert found.members("g") == {"acme", "globex"}
    assert found.members("nothing") == frozenset()
    assert found.now.groups() == ("g",)
    tenants.remove("globex")
    await found.refresh()
    assert found.members("g") == {"acme"}


def test_the_developer_is_number_0(tenants: TenantsOfTest) -> None:
    """A server of --dev would have no tenant, or two of one number."""
    assert Registry(None, dev=True).tenants() == (DEV_TENANT,)
    both = Registry(tenants.path, dev=True)
    assert {tenant.number for tenant in both.tenants()} == {0, 1, 2}
    assert both.tenant("dev") == DEV_TENANT
    assert Registry(tenants.path).tenant("dev") is None
    assert Registry(tenants.path).developer is None


async def test_subscribers_hear_of_both(
    tenants: TenantsOfTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quotas would be those of yesterday; one subscriber's fault would hide a revocation."""
    log = Log()
    monkeypatch.setattr(registry, "_log", log)
    found, heard = Registry(tenants.path), []

    def fails(old: Snapshot, new: Snapshot) -> None:
        raise RuntimeError(old.tenant("acme"))

    def hears(old: Snapshot, new: Snapshot) -> None:
        heard.append((old.tenant("acme"), new.tenant("acme"), found.now is new))

    found.subscribe(fails)
    found.subscribe(hears)
    await found.refresh()
    assert heard == [], "nothing has changed"
    before = found.tenant("acme")
    tenants.remove("acme")
    await found.refresh()
    assert heard == [(before, None, True)]
    assert log.of("tenants_subscriber_failed")[0]["error"] == "RuntimeError"
    assert "Tenant(" not in str(log.lines)


async def test_it_follows_its_file_within_a_second(
    tenants: TenantsOfTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A revocation would act after a restart; a fault end the looking."""
    log, kept = Log(), []
    monkeypatch.setattr(registry, "_log", log)
    found = Registry(tenants.path, on_kept=lambda: kept.append(1))
    watch = asyncio.create_task(found.watch())
    good = tenants.path.read_text()
    tenants.path.write_text("nothing")
    await until(lambda: kept)
    assert found.tenant("acme") is not None
    with monkeypatch.context() as patch:
        patch.setattr(found, "_read", lambda: 1 // 0)
        tenants.path.write_text(good + " ")
        await until(lambda: len(kept) == 2)
    tenants.path.write_text(good)
    started = asyncio.get_running_loop().time()
    tenants.remove("acme")
    await until(lambda: found.tenant("acme") is None)
    assert asyncio.get_running_loop().time() - started < 2.0
    assert [line["kind"] for line in log.of("tenants_kept")] == ["not_valid", "unexpected"]
    watch.cancel()


@pytest.mark.parametrize("kind", ["unreadable", "unexpected"])
async def test_a_fault_that_passes_loses_no_revocation(
    kind: str, tenants: TenantsOfTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No descriptor is free for a moment, and a token that was revoked is good for ever."""
    log, kept, read = Log(), [], []
    monkeypatch.setattr(registry, "_log", log)
    monkeypatch.setattr(registry, "_INTERVAL", 0.01)
    found = Registry(tenants.path, on_kept=lambda: kept.append(1))

    def fails(path: Path) -> TenantsFile:
        read.append(path)
        error = OSError(errno.EMFILE, "too many open files")
        raise TenantsRefused("unreadable", "too many") if kind == "unreadable" else error

    token = digest(tenants.tokens["acme"].encode())
    with monkeypatch.context() as patch:
        patch.setattr(registry.tenants_file, "read", fails)
        watch = asyncio.create_task(found.watch())
        await asyncio.sleep(0.05)
        assert read == [], "nothing has changed"
        tenants.path.write_text(without_tokens(tenants.path.read_text()))
        await until(lambda: len(read) >= 4)
        assert found.now.by_token(token) is not None
    await until(lambda: found.now.by_token(token) is None)
    assert [line["kind"] for line in log.of("tenants_kept")] == [kind]
    assert len(kept) == 1
    reloaded = len(log.of("tenants_reloaded"))
    await asyncio.sleep(0.05)
    assert len(log.of("tenants_reloaded")) == reloaded == 1, "it is not read on and on"
    watch.cancel()


async def test_what_is_not_valid_is_read_once(
    tenants: TenantsOfTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large file that is wrong would be read twice a second for days."""
    found = Registry(tenants.path)
    tenants.path.write_text("nothing")
    with pytest.raises(TenantsRefused):
        await found.refresh()
    monkeypatch.setattr(found, "_read", lambda: 1 // 0)
    await found.refresh()


async def test_a_token_ends_while_the_file_cannot_be_read(
    tenants: TenantsOfTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The streams that it opened would run on."""
    tenants.rotate("acme", 60)
    found, heard = Registry(tenants.path), []
    found.subscribe(lambda old, new: heard.append(old is new))
    ends = found.now.next_expiry
    monkeypatch.setattr("kvledger.tenants.registry.time.time", lambda: ends + 0.001)
    monkeypatch.setattr(found, "_read", lambda: 1 // 0)
    tenants.path.write_text("nothing")
    with pytest.raises(ZeroDivisionError):
        await found.refresh()
    assert heard == [True]


def test_another_owner_is_a_change(tenants: TenantsOfTest) -> None:
    """Who mends by chown what the server cannot read would have to touch it as well."""
    found = Registry(tenants.path)
    before = found._look()
    status = tenants.path.stat()
    os.chown(tenants.path, status.st_uid, status.st_gid)  # any chown changes the time of change
    assert found._look() != before


def test_a_file_that_cannot_be_used_stops_the_start(tmp_path: Path) -> None:
    """A server would serve nobody, or whoever the last version of the file names."""
    with pytest.raises(TenantsRefused, match="no such file"):
        Registry(tmp_path / "tenants.json")


def test_the_comparison_decides_and_always_runs(
    tenants: TenantsOfTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How long a refusal takes would tell a wrong token from one that is nobody's."""
    token = tenants.rotate("acme", 60)
    found = Registry(tenants.path)
    compared: list[tuple[bytes, bytes]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return hmac.compare_digest(one, other)

    class Hmac:
        compare_digest = staticmethod(compare)

    monkeypatch.setattr(registry, "hmac", Hmac)
    good, bad = digest(token.encode()), digest(new_token().encode())
    assert found.now.by_token(good) is found.now.principal("acme")
    assert found.now.by_token(bad) is None
    assert [len(one) == len(other) == 32 for one, other in compared] == [True, True]
    # It is what decides: neither the lookup alone nor the time.
    monkeypatch.setattr(Hmac, "compare_digest", staticmethod(lambda one, other: False))
    assert found.now.by_token(good) is None
    # Nor is what a missing token is compared with somebody's.
    monkeypatch.setattr(Hmac, "compare_digest", staticmethod(lambda one, other: True))
    assert found.now.by_token(bad) is None


def test_a_token_ends_when_the_file_says(
    tenants: TenantsOfTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old token of a rotation would be good for ever."""
    old = tenants.tokens["acme"]
    tenants.rotate("acme", 60)
    found = Registry(tenants.path)
    assert found.now.by_token(digest(old.encode())) is not None
    ends = found.now.next_expiry
    monkeypatch.setattr("kvledger.tenants.registry.time.time", lambda: ends + 0.001)
    assert found.now.by_token(digest(old.encode())) is None


@pytest.mark.parametrize(
    ("header", "token"),
    [
        ("Bearer abc", b"abc"),
        ("bearer abc", b"abc"),
        ("Bearer  abc", None),
        ("Bearer abc ", None),
        (" Bearer abc", None),
        ("Bearer\tabc", None),
        ("Bearer é", None),
        ("Bearer", None),
        ("", None),
        (b"Bearer abc", None),
        ("Bearer " + "a" * 8185, b"a" * 8185),
        ("Bearer " + "a" * 8186, None),
    ],
)
def test_headers(header: Any, token: bytes | None) -> None:
    """Two readers of one header would see two tokens."""
    assert bearer(header) == token


def test_tokens_are_long_and_differ() -> None:
    """Somebody could guess one."""
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert {len(token) for token in tokens} == {4 + 43}
    assert all(token.startswith("kvl_") for token in tokens)


def test_knowing_a_caller_costs_microseconds(tenants: TenantsOfTest) -> None:
    """Each request of each tenant would pay for a slow hash, or for a look at a file."""
    authenticator = Authenticator(Registry(tenants.path), Transport.TLS)
    shown = [("user-agent", "x"), ("authorization", f"Bearer {tenants.tokens['acme']}")]
    rounds, calls = [], 500
    for _ in range(7):
        started = time.thread_time()
        for _ in range(calls):
            authenticator.identify(Role.CLIENT, shown, tuple)
        rounds.append((time.thread_time() - started) / calls)
    assert min(rounds) < 100e-6
