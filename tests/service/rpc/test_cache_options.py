"""Options of the cache from a caller's side, and what of them reaches the engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from server_harness import ServerHarness, serving

from kvledger.engine import EndReason, Engine, Job
from kvledger.rpc.translation import receipt_message
from kvledger.scopes import NO_REUSE, SHARED_SCOPE
from kvledger.scopes.groups import MembershipList
from kvledger.streams import Receipt
from kvledger.v1 import generation_pb2 as pb

SYSTEM = "You answer questions about the manual."


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """What the engine is given."""
    given: list[Job] = []
    submit = Engine.submit

    def spy(engine: Engine, job: Job) -> None:
        given.append(job)
        submit(engine, job)

    monkeypatch.setattr(Engine, "submit", spy)
    return given


@pytest_asyncio.fixture
async def server(jobs: list[Job], tmp_path: Path) -> AsyncIterator[ServerHarness]:
    """A server with a public prefix of each form, whose one tenant is in the group `team`."""
    (tmp_path / "text").write_text("The manual says\n")
    (tmp_path / "system").write_text(SYSTEM)
    files = (
        *("--public-prefix", f"text={tmp_path / 'text'}"),
        *("--public-system", f"system={tmp_path / 'system'}"),
    )
    async with serving(*files) as server:
        server.server._scopes.change_members(MembershipList({"dev": 1}, {"team": ["dev"]}))
        assert [job.scopes.keeps for job in jobs] == [True, True], "it computed them"
        jobs.clear()
        yield server


def options(**fields: object) -> pb.CacheOptions:
    return pb.CacheOptions(**fields)  # type: ignore[arg-type]


async def test_requests_have_scopes_and_let_go_of_them(
    server: ServerHarness, jobs: list[Job]
) -> None:
    """Nothing would be reused; or scopes of ended requests be kept for ever."""
    await server.answer(text="a")
    await server.answer(text="b", cache=options(scope=pb.CACHE_SCOPE_TENANT))
    for name in "xyx":
        wish = options(scope=pb.CACHE_SCOPE_NAMESPACE, namespace=name)
        await server.answer(text="a", cache=wish)
    await server.answer(text="a", cache=options(scope=pb.CACHE_SCOPE_NONE))
    tenant, again, x, y, x_again, none = (job.scopes for job in jobs)
    assert tenant == again
    assert x == x_again
    assert len({tenant.own, x.own, y.own}) == 3
    assert none == NO_REUSE
    await server.require_all_free()
    table = server.server._scopes._table
    assert (len(table), table.idle) == (2 + 3, 3), "public ones are kept"


async def test_a_group_shares_the_counted_messages(server: ServerHarness, jobs: list[Job]) -> None:
    """What is meant for the group would stay with the tenant, or the other way round."""
    chat = [(pb.ROLE_SYSTEM, "be kind"), (pb.ROLE_USER, "hello")]
    for count in (1, 2):
        await server.answer(chat=chat, cache=options(shared_scope="team", shared_messages=count))
    await server.answer(ids=[1, 2, 3], cache=options(shared_scope="team", shared_tokens=2))
    one, two, ids = (job.scopes for job in jobs)
    assert one.shared == two.shared == ids.shared
    assert one.shared is not None
    assert one.shared > SHARED_SCOPE
    # Each message is a control token, its letters, and an end; the invitation is in no message.
    assert (one.shared_tokens, two.shared_tokens, ids.shared_tokens) == (7 + 2, 7 + 5 + 4, 2)
    assert one.writes_shared


async def test_a_scope_that_is_not_the_tenants_is_denied(
    server: ServerHarness, jobs: list[Job]
) -> None:
    """A tenant would read what others share, or learn which groups there are."""
    server.server._scopes.change_members(
        MembershipList({"dev": 1, "other": 1}, {"others": ["other"]})
    )
    seen = set()
    for name in ("others", "nobody"):
        refusal = await server.refusal(
            text="abc", cache=options(shared_scope=name, shared_tokens=1)
        )
        assert refusal.code == grpc.StatusCode.PERMISSION_DENIED
        assert refusal.reason == "SHARED_SCOPE_DENIED"
        assert name not in refusal.everything()
        seen.add(refusal.message)
    assert len(seen) == 1
    assert jobs == []
    assert len(server.server._scopes) == 2, "the public ones"


async def test_public_prefixes_are_looked_up_and_never_written(
    server: ServerHarness, jobs: list[Job]
) -> None:
    """A client could put its own tokens into what everybody begins with."""
    await server.answer(
        text="The manual says nothing", cache=options(shared_scope="text", shared_tokens=15)
    )
    await server.answer(
        chat=[(pb.ROLE_SYSTEM, SYSTEM), (pb.ROLE_USER, "What?")],
        cache=options(shared_scope="system", shared_messages=1),
    )
    # "th" is one token.
    for job, count in zip(jobs, (15, len(SYSTEM) - 1 + 2), strict=True):
        assert job.scopes.shared is not None
        assert not job.scopes.writes_shared
        assert job.scopes.shared_tokens == count
    assert jobs[0].scopes.shared != jobs[1].scopes.shared


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        (
            {
                "chat": [(pb.ROLE_SYSTEM, SYSTEM + "!"), (pb.ROLE_USER, "What?")],
                "cache": options(shared_scope="system", shared_messages=1),
            },
            "cache.shared_messages",
        ),
        (
            {
                "chat": [(pb.ROLE_SYSTEM, SYSTEM), (pb.ROLE_USER, "What?")],
                "cache": options(shared_scope="system", shared_messages=2),
            },
            "cache.shared_messages",
        ),
        (
            {"text": "The manual", "cache": options(shared_scope="text", shared_tokens=50)},
            "cache.shared_tokens",
        ),
    ],
)
async def test_what_does_not_begin_with_the_public_prefix_is_refused(
    server: ServerHarness, jobs: list[Job], fields: dict[str, object], field: str
) -> None:
    """A person's message would lie in the public scope."""
    refusal = await server.refusal(**fields)
    assert refusal.code == grpc.StatusCode.INVALID_ARGUMENT
    assert set(refusal.violations) == {field}
    assert jobs == []


async def test_reuse_that_is_off_is_off_for_everybody(jobs: list[Job]) -> None:
    """An operator who turned it off would still have it."""
    async with serving("--prefix-reuse", "off") as server:
        await server.answer(text="a")
        wish = options(scope=pb.CACHE_SCOPE_NAMESPACE, namespace="x")
        await server.answer(text="a", cache=wish)
    assert [job.scopes for job in jobs] == [NO_REUSE] * 2


def receipt(**changes: int) -> Receipt:
    names = ("prompt_tokens", "output_tokens", "computed_tokens", "recomputed_tokens")
    others = ("preemptions", "peak_blocks", "queued", "prefill", "decode")
    times = ("held_seconds", "held_nanos", "reserved_seconds", "reserved_nanos")
    values = {**dict.fromkeys((*names, *others, *times), 0), **changes}
    return Receipt(end_reason=EndReason.STOP, **values)


def test_a_receipt_says_whose_blocks_were_reused() -> None:
    """A tenant would take a group's work for its own, or pay for it as if it were."""
    told = receipt(
        prompt_tokens=100, reused_own=10, reused_shared=64, scope_seconds=3, scope_nanos=5
    )
    group = receipt_message(told, "id", "bf16", 4096)
    public = receipt_message(told, "id", "bf16", 4096, shares_public=True)
    for message, shared in ((group, (64, 0)), (public, (0, 64))):
        assert message.reused_own_tokens == 10
        assert (message.reused_group_tokens, message.reused_public_tokens) == shared
        assert (message.shared_scope.seconds, message.shared_scope.nanos) == (3, 5)
    assert told.cached_prompt_tokens == 74
    assert receipt(prompt_tokens=50, reused_own=40, reused_shared=30).cached_prompt_tokens == 50
    nothing = receipt_message(receipt(), "id", "bf16", 4096)
    assert nothing.reused_own_tokens + nothing.reused_group_tokens == 0
