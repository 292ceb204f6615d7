"""From the core's books to the pool's account in files: nothing is lost on the way."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from reuse_harness import BLOCK, prompt, reusing_tenants, shared
from server_harness import until


def pool_lines(folder: Path) -> list[dict[str, Any]]:
    found = [
        json.loads(line)
        for path in sorted(folder.iterdir())
        for line in path.read_text().splitlines()
    ]
    return [line for line in found if line["kind"] == "pool"]


async def test_a_servers_files_say_in_which_states_its_blocks_were(tmp_path: Path) -> None:
    """Cached and shared memory would be called idle, and a tenant made anew be another's debtor.

    A tenant is removed and made anew, and a group loses a member, while the books are kept."""
    folder = tmp_path / "books"
    async with reusing_tenants(tmp_path, "--books", str(folder)) as their:
        for who in ("acme", "globex", "initech"):
            await their.ask(who, prompt(who, 20))
        for who in ("acme", "globex"):
            await their.ask(who, prompt("g", 20), cache=shared("team", 2 * BLOCK))
        await their.changed(lambda: their.tenants.remove("initech"))
        await their.changed(lambda: their.tenants.add("initech"))
        await their.ask("initech", prompt("again", 20))
        await their.changed(lambda: their.tenants.remove("globex"))
        await their.ask("acme", prompt("g", 20), cache=shared("team", 2 * BLOCK))
        await until(lambda: not their.server.server._admission.open_requests)
        await asyncio.sleep(0)
    line = pool_lines(folder)[-1]
    assert line["last"] is True
    states, accounts = line["states"], line["accounts"]
    assert sum(states.values()) == line["blocks"] * line["elapsed"]
    for state in ("held", "reserved", "cached"):
        assert sum(account[state] for account in accounts) == states[state]
    assert min(states["held"], states["cached"]) > 0
    names = [account.get("tenant") or account["scope"] for account in accounts]
    assert sorted(names) == ["acme", "globex", "initech", "team"], "each once"
    (team,) = [account for account in accounts if account.get("scope") == "team"]
    assert team["held"] > 0
    # What stands in receipts is what tenants held.
    tenants = [account for account in accounts if "tenant" in account]
    assert sum(account["held"] for account in tenants) == line["held"]
