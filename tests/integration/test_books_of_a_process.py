"""The books of a server process that is killed, has no room, or stops as it should."""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from server_process import PATIENCE, ServerProcess, generation, request, tiny_server

from kvledger.books.file_statement import state

# What a server that is killed may lose, in seconds.
_LOST_SECONDS = 1.0


class Load:
    """Clients that ask one thing after the other, and when each was told that it is finished."""

    def __init__(self, server: ServerProcess, clients: int) -> None:
        self.finished: dict[str, float] = {}
        self._server = server
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(clients)]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Waits until the server is gone."""
        for thread in self._threads:
            thread.join(PATIENCE)

    def _run(self, number: int) -> None:
        with self._server.channel() as channel:
            while True:
                message = request("ab" * (1 + number), 1 + 2 * number)
                try:
                    *_, last = generation(channel).Generate(message, timeout=PATIENCE)
                except grpc.RpcError:
                    return
                self.finished[last.finished.receipt.request_id] = time.monotonic()


def ids_in(folder: Path) -> list[str]:
    """The ids of all whole lines of receipts."""
    found = []
    for path in sorted(folder.iterdir()):
        for data in path.read_bytes().split(b"\n")[:-1]:
            line: dict[str, Any] = json.loads(data)
            if line["kind"] == "receipt":
                found.append(line["id"])
    return found


def test_a_killed_server_has_kept_what_was_finished_a_second_before(
    tiny: Path, tmp_path: Path
) -> None:
    """A crash would take receipts that clients have in their hands."""
    folder = tmp_path / "books"
    for _ in range(2):  # into one folder, one after the other
        with tiny_server(tiny, "--books", str(folder), "--books-file-bytes", "64KiB") as server:
            load = Load(server, 6)
            server.wait(lambda load=load: len(load.finished) > 100)
            time.sleep(1.5)
            killed = time.monotonic()
            server.signal(signal.SIGKILL)
            load.join()
        assert server.exit_status() == -signal.SIGKILL
        kept = set(ids_in(folder))
        old = {name for name, at in load.finished.items() if at < killed - _LOST_SECONDS}
        assert len(old) > 50
        assert old <= kept
    assert len(list(folder.iterdir())) > 3  # and files were begun meanwhile
    statement = state([folder])
    assert statement.notes.damaged_lines == statement.notes.duplicates == 0
    assert statement.notes.torn_lines <= 2
    assert statement.notes.missing == 0
    assert statement.total.requests == len(ids_in(folder))
    assert statement.machines.replicas == 2


def test_a_server_that_stops_has_kept_all(tiny: Path, tmp_path: Path) -> None:
    """Each restart would lose the last second."""
    folder = tmp_path / "books"
    with tiny_server(tiny, "--books", str(folder)) as server:
        load = Load(server, 4)
        server.wait(lambda: len(load.finished) > 50)
        server.signal(signal.SIGTERM)
        assert server.exit_status() == 0
        load.join()
        ended = [line["request_id"] for line in server.events("request_finished")]
    assert set(load.finished) <= set(ended)
    assert sorted(ids_in(folder)) == sorted(ended)
    statement = state([folder])
    assert statement.notes.missing == statement.notes.torn_lines == 0
    assert statement.machines.time.elsewhere == statement.machines.time.unclaimed == 0


@pytest.mark.soak
def test_a_limit_on_files_stops_no_service(tiny: Path, tmp_path: Path) -> None:
    """With a limit of the system on files, the first long one would be the end of the service."""
    folder = tmp_path / "books"
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (70_000, 70_000))"
    with tiny_server(tiny, "--books", str(folder), prelude=limit) as server:
        load = Load(server, 4)
        server.wait(lambda: len(load.finished) > 250)
        server.signal(signal.SIGTERM)
        assert server.exit_status() == 0
        load.join()
    assert set(load.finished) <= set(ids_in(folder))
    sizes = [path.stat().st_size for path in folder.iterdir()]
    assert len(sizes) > 1
    assert max(sizes) <= 70_000
