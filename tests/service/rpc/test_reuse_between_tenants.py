"""Who finds whose cached prefixes in a whole server: tenants, groups, public prefixes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
from reuse_harness import (
    BLOCK,
    NONE,
    TenantsServer,
    found,
    namespace,
    prompt,
    reusing,
    reusing_tenants,
    set_group,
    shared,
)
from scripted_model import PATIENCE
from server_harness import refusal_of, until
from tenants_harness import bearer

from kvledger.errors import SettingRefused
from kvledger.v1 import generation_pb2 as pb

# Five whole blocks, and something behind them.
PROMPT = prompt("p", 5 * BLOCK + 3)


async def read_all(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_nobody_but_the_tenant_itself_begins_with_its_blocks(tmp_path: Path) -> None:
    """Time to the first token would tell one tenant what another has sent (B08, B09, B12)."""
    async with reusing_tenants(tmp_path) as their:
        cold = await their.ask("acme", PROMPT)
        assert found(cold) == (0, 0, 0)
        assert found(await their.ask("globex", PROMPT)) == (0, 0, 0)
        warm = await their.ask("acme", PROMPT)
        assert found(warm) == (5 * BLOCK, 0, 0)
        assert warm.finished.usage.cached_prompt_tokens == 5 * BLOCK
        assert warm.token_ids == cold.token_ids
        assert found(await their.ask("globex", PROMPT)) == (5 * BLOCK, 0, 0)
        assert found(await their.ask("initech", PROMPT)) == (0, 0, 0)
        await their.server.require_nothing_held()


async def test_a_namespace_is_found_in_itself_alone(tmp_path: Path) -> None:
    """Whom a gateway keeps apart by namespaces would see each other; a name that looks like another
    scope would be that scope (B08, B09)."""
    async with reusing_tenants(tmp_path) as their:
        assert found(await their.ask("acme", PROMPT)) == (0, 0, 0)
        for name in ("x", "acme", "team"):
            cold = await their.ask("acme", PROMPT, cache=namespace(name))
            assert found(cold) == (0, 0, 0), name
            warm = await their.ask("acme", PROMPT, cache=namespace(name))
            assert found(warm) == (5 * BLOCK, 0, 0)
            assert found(await their.ask("globex", PROMPT, cache=namespace(name))) == (0, 0, 0)
        assert found(await their.ask("acme", PROMPT)) == (5 * BLOCK, 0, 0)
        await their.server.require_nothing_held()


async def test_a_request_without_a_scope_finds_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    """What somebody wanted nobody to find would be found."""
    async with reusing_tenants(tmp_path) as their:
        assert found(await their.ask("acme", PROMPT, cache=NONE)) == (0, 0, 0)
        assert their.server.core.balances["cached"] == 0
        assert found(await their.ask("acme", PROMPT)) == (0, 0, 0), "it left nothing"
        cached = their.server.core.balances["cached"]
        assert found(await their.ask("acme", PROMPT, cache=NONE)) == (0, 0, 0), "it finds nothing"
        assert their.server.core.balances["cached"] == cached
        assert found(await their.ask("acme", PROMPT)) == (5 * BLOCK, 0, 0)


async def test_a_group_shares_up_to_the_border_and_nothing_behind_it(tmp_path: Path) -> None:
    """A member would find what another one wrote behind what they share."""
    async with reusing_tenants(tmp_path) as their:
        border = 3 * BLOCK + 5  # whole blocks count
        team = shared("team", border)
        cold = await their.ask("acme", PROMPT, cache=team)
        assert found(cold) == (0, 0, 0)
        other = await their.ask("globex", PROMPT, cache=team)
        assert found(other) == (0, 3 * BLOCK, 0)
        assert other.token_ids == cold.token_ids
        # What follows is there twice, once for each.
        for who in ("acme", "globex"):
            assert found(await their.ask(who, PROMPT, cache=team)) == (2 * BLOCK, 3 * BLOCK, 0)
        # Who says nothing of the group finds nothing that lies in it or below it.
        assert found(await their.ask("acme", PROMPT)) == (0, 0, 0)
        assert found(await their.ask("globex", PROMPT, cache=namespace("x"))) == (0, 0, 0)
        # A later border is the group's from where the first one ended.
        later = shared("team", 5 * BLOCK)
        assert found(await their.ask("globex", PROMPT, cache=later)) == (0, 3 * BLOCK, 0)
        assert found(await their.ask("acme", PROMPT, cache=later)) == (0, 5 * BLOCK, 0)
        await their.server.require_nothing_held()


async def test_what_is_generated_never_enters_the_group(tmp_path: Path) -> None:
    """An answer would be the group's, though only its prompt was counted."""
    async with reusing_tenants(tmp_path) as their:
        counted = PROMPT[: 3 * BLOCK]
        team = shared("team", len(counted))
        answer = await their.ask("acme", counted, cache=team, max_tokens=3 * BLOCK)
        turn = [*counted, *answer.token_ids, 7, 7, 7]
        other = await their.ask("globex", turn, cache=shared("team", 5 * BLOCK))
        assert found(other) == (0, 3 * BLOCK, 0)
        # The one who asked has it for the next turn, without the block that was not filled.
        assert found(await their.ask("acme", turn, cache=team)) == (2 * BLOCK, 3 * BLOCK, 0)
        assert other.token_ids == (await their.ask("acme", turn, cache=NONE)).token_ids


async def test_who_leaves_a_group_finds_nothing_from_then_on(tmp_path: Path) -> None:
    """A tenant that an operator took out would go on reading what the others share."""
    async with reusing_tenants(tmp_path) as their:
        team = shared("team", 5 * BLOCK)
        await their.ask("acme", PROMPT, cache=team)
        assert found(await their.ask("globex", PROMPT, cache=team)) == (0, 5 * BLOCK, 0)
        held_up = their.server.gate()
        running = their.server.generation.Generate(
            pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=PROMPT),
                stop=pb.StopOptions(max_tokens=6, ignore_eos=True),
                cache=team,
            ),
            metadata=bearer(their.tenants.tokens["globex"]),
            timeout=PATIENCE,
        )
        await until(lambda: held_up.arrived == 1)
        await their.changed(lambda: set_group(their.tenants, "team", "acme", "initech"))
        held_up.open()
        responses = [response async for response in running]
        assert responses[-1].finished.receipt.reused_group_tokens == 5 * BLOCK, "it goes on"
        denied = await refusal_of(their.ask("globex", PROMPT, cache=team))
        assert denied.code == grpc.StatusCode.PERMISSION_DENIED
        assert found(await their.ask("globex", PROMPT)) == (0, 0, 0)
        # The old group's blocks are nobody's: who joined does not find them either.
        assert found(await their.ask("initech", PROMPT, cache=team)) == (0, 0, 0)
        assert found(await their.ask("acme", PROMPT, cache=team)) == (0, 5 * BLOCK, 0)
        assert sum(line["blocks"] for line in their.server.log.of("scopes_purged")) >= 5
        await their.server.require_nothing_held()


async def test_a_removed_tenants_blocks_go_and_its_successor_begins_cold(tmp_path: Path) -> None:
    """Who gets the name of somebody who left would get what that one had sent."""
    async with reusing_tenants(tmp_path) as their:
        await their.ask("acme", PROMPT)
        await their.ask("acme", PROMPT, cache=namespace("x"))
        await their.ask("globex", PROMPT)
        cached = their.server.core.balances["cached"]
        assert cached == 3 * 5
        await their.changed(lambda: their.tenants.remove("acme"))
        await until(lambda: their.server.core.balances["cached"] == 5)
        (line,) = their.server.log.of("scopes_purged")
        assert (line["scopes"], line["blocks"]) == (2, 10)
        await their.changed(lambda: their.tenants.add("acme"))
        assert found(await their.ask("acme", PROMPT)) == (0, 0, 0)
        assert found(await their.ask("acme", PROMPT, cache=namespace("x"))) == (0, 0, 0)
        assert found(await their.ask("globex", PROMPT)) == (5 * BLOCK, 0, 0)
        await their.server.require_nothing_held()


async def test_what_a_removed_tenant_still_computes_goes_with_its_last_request(
    tmp_path: Path,
) -> None:
    """Blocks of a scope that nobody can name would stay for ever."""
    async with reusing_tenants(tmp_path) as their:
        gate = their.server.gate()
        call = their.server.generation.Generate(
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT)),
            metadata=bearer(their.tenants.tokens["acme"]),
            timeout=PATIENCE,
        )
        gate.let(1)
        await until(lambda: gate.arrived == 2)
        assert their.server.core.balances["held"] >= 4, "some of it stands in the index"
        await their.changed(lambda: their.tenants.remove("acme"))
        gate.open()
        assert (await refusal_of(read_all(call))).reason == "CREDENTIAL_REVOKED"
        await their.server.require_nothing_held()
        await until(lambda: their.server.core.balances["cached"] == 0)
        await until(lambda: len(their.server.log.of("scopes_purged")) == 2)


async def test_reuse_that_is_off_keeps_and_finds_nothing() -> None:
    """An operator who turned it off would still have it."""
    async with reusing("--prefix-reuse", "off") as server:
        for _ in range(2):
            assert found(await server.ids(PROMPT)) == (0, 0, 0)
        assert server.core.balances["cached"] == 0
        assert set(server.counts.values()) == {0}
        await server.require_nothing_held()


# --- Public prefixes ------------------------------------------------------------------------

TERMS = "Our terms, which nobody ever reads, are:"  # each letter is a token
assert len(TERMS) == 5 * BLOCK
TERM_IDS = [*TERMS.encode()]


def terms(folder: Path, text: str = TERMS, name: str = "terms") -> tuple[str, str]:
    (folder / name).write_text(text)
    return ("--public-prefix", f"{name}={folder / name}")


async def flood(their: TenantsServer, who: str) -> None:
    """Prompts that together need more than the pool."""
    for count in range(12):
        await their.ask(who, prompt(f"flood {count}", 10 * BLOCK))


async def test_a_public_prefix_is_there_for_everybody_from_the_first_request(
    tmp_path: Path,
) -> None:
    """The first requests of each tenant, or those after a flood, would compute it."""
    async with reusing_tenants(tmp_path, *terms(tmp_path)) as their:
        server = their.server
        assert server.core.balances["held"] == 5
        asked = shared("terms", len(TERM_IDS))
        for who in ("acme", "globex", "initech"):
            assert found(await their.ask(who, [*TERM_IDS, 1, 2, 3], cache=asked)) == (0, 0, 40)
        assert server.counts["evicted"] == 0
        await flood(their, "acme")
        assert server.counts["evicted"] > 60
        warm = await their.ask("initech", [*TERM_IDS, 9, 9], cache=asked)
        assert found(warm) == (0, 0, 40)
        cold = await their.ask("initech", [*TERM_IDS, 9, 9], cache=NONE)
        assert warm.token_ids == cold.token_ids
        # What follows it is its tenant's own, and who does not name it does not find it.
        long = [*TERM_IDS, *prompt("q", 2 * BLOCK + 1)]
        assert found(await their.ask("acme", long, cache=asked)) == (0, 0, 40)
        assert found(await their.ask("acme", long, cache=asked)) == (2 * BLOCK, 0, 40)
        assert found(await their.ask("globex", long, cache=asked)) == (0, 0, 40)
        assert found(await their.ask("globex", long)) == (0, 0, 0)
        await server.require_nothing_held(staying=5)


async def test_a_public_prefix_of_exactly_the_prompt_leaves_its_last_token(tmp_path: Path) -> None:
    """A prompt of nothing but cached blocks would have no logits (B13)."""
    async with reusing_tenants(tmp_path, *terms(tmp_path)) as their:
        asked = shared("terms", len(TERM_IDS))
        answers = [await their.ask("acme", TERM_IDS, cache=asked) for _ in range(3)]
        cold = await their.ask("acme", TERM_IDS, cache=NONE)
        assert {tuple(answer.token_ids) for answer in answers} == {tuple(cold.token_ids)}
        for answer in answers:
            assert found(answer) == (0, 0, len(TERM_IDS) - 1)


@pytest.mark.parametrize(
    ("blocks", "texts"),
    [
        ("8", [TERMS]),  # half of it is 4 blocks
        ("20", [TERMS, TERMS[::-1] + TERMS]),  # the second one finds 15 left, and 10 may be public
        ("14", [TERMS, TERMS[::-1] + TERMS]),  # the second one has more tokens than are left
    ],
)
async def test_a_public_prefix_that_does_not_fit_stops_the_start(
    tmp_path: Path, blocks: str, texts: list[str]
) -> None:
    """A server would serve without what its operator believes is shared."""
    files = [part for i, text in enumerate(texts) for part in terms(tmp_path, text, f"t{i}")]
    last = len(texts) - 1
    said = f"^public prefix t{last}: {len(texts[last])} tokens do not fit, public prefixes may take"
    with pytest.raises(SettingRefused, match=said):
        async with reusing("--kv-blocks", blocks, *files):
            pass
