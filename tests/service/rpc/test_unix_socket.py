"""A listener on a unix socket: its file, and who may take it over."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from pathlib import Path

import grpc
import pytest
from scripted_model import PATIENCE
from server_harness import connection, refusal_of, serving, until
from test_listener import NOT_UTF8, neighbours

from kvledger.errors import SettingRefused


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kvledger.sock"


def mode(path: Path) -> int | None:
    """Who may use a file; None if there is none."""
    return stat.S_IMODE(path.stat().st_mode) if path.exists() else None


async def test_it_serves_its_owner_and_leaves_nothing_behind(path: Path) -> None:
    """Other users of the machine could send prompts; or every start would find an old file."""
    mask = os.umask(0)
    os.umask(mask)
    async with serving("--listen", f"unix:{path}") as server:
        assert mode(path) == 0o600
        assert server.server.address == server.log.of("serving")[0]["listen"] == f"unix:{path}"
        assert (await server.answer(text="a")).text == "bcde"
        assert os.umask(mask) == mask, "files that the process makes later would be closed to all"
    assert mode(path) is None


async def test_a_second_server_is_refused_and_the_first_goes_on(path: Path) -> None:
    """The second would take the file away: the first would serve on, and nobody reach it."""
    async with serving("--listen", f"unix:{path}") as server:
        with pytest.raises(SettingRefused, match=f"^--listen unix:{path}: another server listens"):
            async with serving("--listen", f"unix:{path}"):
                pass
        async with connection(server.address) as channel:
            assert await channel.unary_unary("/kvledger.v1.ModelService/ListModels")(b"")


async def test_a_file_that_a_killed_server_left_is_replaced(path: Path) -> None:
    """After a crash, somebody would have to delete a file before the next start."""
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
        killed.listen()
    async with serving("--listen", f"unix:{path}") as server:
        assert mode(path) == 0o600
        assert (await server.answer(text="a")).text == "bcde"


async def test_a_file_that_is_no_socket_is_left_alone(path: Path) -> None:
    """A path that was mistyped would cost somebody a file."""
    await asyncio.to_thread(path.write_text, "precious")
    with pytest.raises(SettingRefused, match="no socket"):
        async with serving("--listen", f"unix:{path}"):
            pass
    assert await asyncio.to_thread(path.read_text) == "precious"


async def test_a_listener_that_broke_takes_its_socket_again(path: Path) -> None:
    """One hostile call would leave a server that nobody can reach."""
    async with serving("--listen", f"unix:{path}") as server, neighbours(server):
        for round_ in range(1, 4):
            async with connection(server.address) as channel:
                refusal = await refusal_of(channel.unary_unary(NOT_UTF8)(b"", timeout=PATIENCE / 4))
                assert refusal.code != grpc.StatusCode.OK
            await server.until(lambda n=round_: len(server.log.of("listener_broke")) == n)
            async with connection(server.address) as channel:
                list_models = channel.unary_unary("/kvledger.v1.ModelService/ListModels")
                assert await list_models(b"", wait_for_ready=True, timeout=PATIENCE)
            assert mode(path) == 0o600
    assert mode(path) is None


async def test_of_two_servers_that_start_at_once_one_serves(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both would find a file that nobody listens on; the later would take it from the earlier."""
    monkeypatch.setattr("kvledger.rpc.listener.why_not_free", lambda address: None)
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))

    async def started(ready: asyncio.Event, done: asyncio.Event) -> str:
        try:
            async with serving("--listen", f"unix:{path}") as server:
                ready.set()
                await done.wait()
                async with connection(server.address) as channel:
                    await channel.unary_unary("/kvledger.v1.ModelService/ListModels")(b"")
                return "served"
        except SettingRefused as refused:
            return str(refused)

    ready, done = asyncio.Event(), asyncio.Event()
    tasks = [asyncio.create_task(started(ready, done)) for _ in range(3)]
    await asyncio.wait_for(ready.wait(), PATIENCE)
    await until(lambda: sum(task.done() for task in tasks) == 2)
    done.set()
    results = sorted(await asyncio.gather(*tasks))
    refused = f"--listen unix:{path}: another server listens there"
    assert results == [refused, refused, "served"]
    assert await asyncio.to_thread(lambda: list(path.parent.iterdir())) == []
