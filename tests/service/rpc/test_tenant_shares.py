"""Tenants' shares of the KV pool, from the file of tenants to what their requests get."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from engine_harness import without_forecast
from reuse_harness import BLOCK, NONE, TenantsServer, found, prompt, reusing, reusing_tenants
from scripted_model import Gate
from server_harness import Answer, refusal_of, until
from tenants_harness import TenantsOfTest

from kvledger.errors import SettingRefused
from kvledger.tenants import editing

BLOCKS = 64
# A quarter of the pool.
QUARTER = BLOCKS // 4 * BLOCK
BLOCK_BYTES = 4608  # of the tiny model


def limit(tenants: TenantsOfTest, **limits: Mapping[str, Any]) -> None:
    """Changes limits of tenants by their names, all in one change of the file."""

    def edit(values: dict[str, Any]) -> None:
        for name, changes in limits.items():
            editing.set_limits(values, name, dict(changes))

    tenants.change(edit)


async def limited(their: TenantsServer, **limits: Mapping[str, Any]) -> None:
    await their.changed(lambda: limit(their.tenants, **limits))


def start(their: TenantsServer, who: str, ids: list[int], **fields: Any) -> asyncio.Task[Answer]:
    return asyncio.create_task(their.ask(who, ids, **fields))


async def stepped(gate: Gate, condition: Callable[[], object]) -> None:
    """Lets steps through, one after the other, until something is so."""

    while not condition():
        came = gate.arrived
        gate.let(1)
        await until(lambda came=came: condition() or gate.arrived > came)


@pytest.mark.parametrize(
    ("limits", "most"),
    [
        ({"kv_max": 0.25}, QUARTER + 1),
        ({"kv_guaranteed": 0.125, "kv_max": 0.25}, QUARTER + 1),
        ({"kv_guaranteed": 0.25, "sealed": True}, QUARTER + 1),
        ({"kv_bytes_max": 3 * BLOCK_BYTES + 5}, 3 * BLOCK + 1),
    ],
)
async def test_a_tenant_at_its_limit_ends_at_exactly_that_many_tokens(
    tmp_path: Path, limits: dict[str, Any], most: int
) -> None:
    """It would take what others count on, or less than it is told that it may."""
    async with reusing_tenants(tmp_path) as their:
        await limited(their, acme=limits)
        for _ in range(2):  # cold and warm alike
            ids = prompt("p", 2 * BLOCK + 3)
            answer = await their.ask("acme", ids, max_tokens=None)
            assert answer.reason == "CONTEXT"
            assert len(ids) + len(answer.token_ids) == most
        assert found(answer)[0] >= 2 * BLOCK
        assert their.server.model.pool.block_bytes == BLOCK_BYTES
        refused = await refusal_of(their.ask("acme", prompt("q", most)))
        assert f"at most {most - 1} leave room" in refused.violations["prompt"]
        others = await their.ask("globex", ids, max_tokens=None, cache=NONE)
        assert len(ids) + len(others.token_ids) > most
        await their.server.require_nothing_held()


async def test_what_is_guaranteed_is_there_whatever_others_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenant would wait for, or be preempted by, those who may not have its share."""
    without_forecast(monkeypatch)
    async with reusing_tenants(tmp_path) as their:
        await limited(their, acme={"kv_guaranteed": 0.25})
        gate = their.server.gate()
        # Others ask for more than the pool, cached blocks and all.
        flood = [
            start(their, who, prompt(f"{who} {count}", 100), max_tokens=150)
            for count in range(3)
            for who in ("globex", "initech")
        ]
        await until(lambda: len(their.server.server._admission.open_requests) == 6)
        await stepped(gate, lambda: their.server.core.balances["free"] <= BLOCKS // 4 + 1)
        ids = prompt("p", QUARTER - 10)
        mine = start(their, "acme", ids, max_tokens=10)
        await until(lambda: len(their.server.server._admission.open_requests) == 7)
        gate.open()
        answer = await mine
        assert answer.finished.receipt.preemptions == 0
        assert not all(task.done() for task in flood), "it did not wait for those before it"
        answers = await asyncio.gather(*flood)
        assert {each.reason for each in answers} == {"LENGTH"}
        assert answer.token_ids == (await their.ask("acme", ids, max_tokens=10)).token_ids
        await their.server.require_nothing_held()


async def test_a_lower_limit_drains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that can never fit any more would wait for ever, or what runs be broken off."""
    without_forecast(monkeypatch)
    async with reusing_tenants(tmp_path) as their:
        gate = their.server.gate()
        running = start(their, "acme", prompt("r", 40), max_tokens=100)
        # They have all the other places, so that those after them wait.
        places = [
            start(their, "globex", prompt(f"g{count}", 10), max_tokens=50) for count in range(7)
        ]
        streams = their.server.server._admission.streams
        await until(lambda: len(their.server.server._admission.open_requests) == 8)
        await stepped(gate, lambda: streams.waiting_count == 0)
        long = start(their, "acme", prompt("w", 200), max_tokens=5)
        short = start(their, "acme", prompt("s", 20), max_tokens=5)
        await until(lambda: len(their.server.server._admission.open_requests) == 10)
        gate.let(1)
        assert streams.waiting_count == 2
        await limited(their, acme={"kv_max": 0.125})
        gate.let(2)
        ended = await asyncio.wait_for(long, 10)
        assert not any(task.done() for task in (running, *places))
        assert ended.reason == "CONTEXT"
        assert ended.token_ids == []
        assert ended.finished.receipt.computed_tokens == 0
        gate.open()
        assert (await short).reason == "LENGTH"
        assert (await running).reason == "CONTEXT", "as far as its tenant's blocks reach"
        assert {each.reason for each in await asyncio.gather(*places)} == {"LENGTH"}
        assert len((await running).token_ids) <= 100
        await their.server.require_nothing_held()


async def test_a_lower_limit_ends_what_waits_at_the_door(tmp_path: Path) -> None:
    """It would go on to the core, which cannot run it, and end with INTERNAL."""
    async with reusing_tenants(tmp_path) as their:
        await limited(their, acme={"running_max": 1})
        gate = their.server.gate()
        running = start(their, "acme", prompt("r", 10), max_tokens=5)
        await until(lambda: gate.arrived == 1)
        long = start(their, "acme", prompt("w", 200), max_tokens=5)
        short = start(their, "acme", prompt("s", 20), max_tokens=5)
        await until(lambda: len(their.server.server._admission.open_requests) == 3)
        await limited(their, acme={"running_max": 1, "kv_max": 0.125})
        gate.open()
        assert (await running).reason == "LENGTH"
        ended = await long
        assert (ended.reason, ended.token_ids) == ("CONTEXT", [])
        assert (await short).reason == "LENGTH"
        assert sorted(their.server.log.reasons) == ["context", "length", "length"]
        await their.server.require_nothing_held()


async def test_a_sealed_tenant_lives_in_its_share_alone(tmp_path: Path) -> None:
    """Others' cached blocks would lie there, and their going could be told by its time."""
    async with reusing_tenants(tmp_path) as their:
        await limited(their, acme={"kv_guaranteed": 0.25, "sealed": True})
        for count in range(12):
            await their.ask("globex", prompt(f"flood {count}", 10 * BLOCK))
        balances = their.server.core.balances
        assert balances["cached"] > 30
        assert balances["free"] >= BLOCKS // 4
        evicted = their.server.counts["evicted"]
        for count in range(4):
            await their.ask("acme", prompt(f"mine {count}", 3 * BLOCK + 1))
        assert their.server.counts["evicted"] == evicted
        # Its own flood costs it its own blocks alone.
        for count in range(6):
            await their.ask("acme", prompt(f"more {count}", 10 * BLOCK))
        assert found(await their.ask("globex", prompt("flood 11", 10 * BLOCK)))[0] == 79
        await their.server.require_nothing_held()


TOO_MUCH = "kv_guaranteed of all tenants adds up to"


async def test_guarantees_that_do_not_add_up_stop_the_start(tmp_path: Path) -> None:
    """A server would promise more than it has."""
    tenants = TenantsOfTest(tmp_path)
    for name in ("acme", "globex"):
        tenants.add(name)
    # Half of 64 blocks each, and one of these stays for tenants to come.
    limit(tenants, acme={"kv_guaranteed": 0.5}, globex={"kv_guaranteed": 0.5})
    with pytest.raises(SettingRefused, match=f"^{TOO_MUCH} 64 blocks, and the KV pool has 64, one"):
        async with reusing(*tenants.options(tmp_path)):
            pass


async def test_guarantees_that_do_not_add_up_are_kept_out(tmp_path: Path) -> None:
    """A change of the file would take away what others were promised."""
    async with reusing_tenants(tmp_path, "--metrics-listen", "127.0.0.1:0") as their:
        await limited(their, acme={"kv_guaranteed": 0.5})
        limit(their.tenants, globex={"kv_guaranteed": 0.5})
        await until(lambda: their.server.log.of("tenants_kept"))
        (line,) = their.server.log.of("tenants_kept")
        assert TOO_MUCH in line["reason"]
        # The old one stays: who is not guaranteed anything reaches half of the pool.
        answer = await their.ask("globex", prompt("p", 20), max_tokens=None)
        assert (answer.reason, 20 + len(answer.token_ids)) == ("CONTEXT", 32 * BLOCK + 1)
        await limited(their, globex={"kv_guaranteed": 0.25})
        answer = await their.ask("initech", prompt("p", 20), max_tokens=None)
        assert (answer.reason, 20 + len(answer.token_ids)) == ("CONTEXT", 16 * BLOCK + 1)


async def test_public_prefixes_are_in_nobodys_share(tmp_path: Path) -> None:
    """What stays with them would be promised to somebody as well."""
    (tmp_path / "terms").write_text("a" * 16 * BLOCK)
    option = ("--public-prefix", f"terms={tmp_path / 'terms'}")
    async with reusing_tenants(tmp_path, *option) as their:
        assert their.server.core.balances["held"] == 16
        answer = await their.ask("acme", prompt("p", 20), max_tokens=None)
        assert 20 + len(answer.token_ids) == 48 * BLOCK + 1
        limit(their.tenants, globex={"kv_guaranteed": 1.0})
        await until(lambda: their.server.log.of("tenants_kept"))
        assert f"{TOO_MUCH} 48 blocks" in their.server.log.of("tenants_kept")[0]["reason"]
        await limited(their, globex={"kv_guaranteed": 0.5})
        answer = await their.ask("acme", prompt("p", 20), max_tokens=None)
        assert 20 + len(answer.token_ids) == 24 * BLOCK + 1
        await their.server.require_nothing_held(staying=16)
