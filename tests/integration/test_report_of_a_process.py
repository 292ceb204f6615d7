"""A report about a server process that ran, out of what it wrote."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import grpc
import pytest
from server_process import PATIENCE, generation, request, tiny_server

from kvledger.books.load_lines import is_whole
from kvledger.cli.report import run
from kvledger.cli.statement import run as run_statement

_REQUESTS = 25


def lines_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    found = [
        json.loads(line)
        for path in sorted(folder.iterdir())
        for line in path.open(encoding="utf-8")
    ]
    return [line for line in found if line["kind"] == kind]


def test_what_a_server_did_is_in_its_report(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What servers write and what reports read would be two formats."""
    folder, page = tmp_path / "books", tmp_path / "page.html"
    with tiny_server(tiny, "--books", str(folder)) as server:
        with server.channel() as channel:
            calls = generation(channel)
            for number in range(_REQUESTS):
                list(calls.Generate(request("ab" * (1 + number % 4), 12), timeout=PATIENCE))
            with pytest.raises(grpc.RpcError):
                list(calls.Generate(request("ab" * 5000, 1), timeout=PATIENCE))
        server.signal(signal.SIGTERM)
        assert server.exit_status() == 0
    loads, receipts = lines_of(folder, "load"), lines_of(folder, "receipt")
    (replica,) = lines_of(folder, "replica")
    assert loads
    assert all(is_whole(line) for line in loads)
    assert sum(line["requests"]["came"] for line in loads) == len(receipts) == _REQUESTS
    refused = [line["requests"]["refused"] for line in loads]
    assert sum(sum(each.values()) for each in refused) == 1  # what can never fit
    # The first token of each comes out of its prompt's last step.
    decoded = sum(line["phases"]["decode"]["tokens"] for line in loads)
    assert decoded == sum(line["output_tokens"] for line in receipts) - _REQUESTS
    times = [line["phases"][phase]["time"] for line in loads for phase in ("decode", "prefill")]
    assert sum(times) == lines_of(folder, "pool")[-1]["steps"]
    assert replica["settings"]["threads"] == 1
    assert run([str(folder), "--output", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    for name in ("memory", "decode", "roofline", "batches", "steps", "queue"):
        assert f'<svg class="wide" viewBox="0 0 860 300" role="img" aria-labelledby="{name}' in text
    assert "--machine-peaks measures it" in text  # the test's servers leave that out
    assert "that cannot be, and are in no chart" not in text
    capsys.readouterr()
    assert run_statement([str(folder), "--by", "tenant"]) == 0
    statement = capsys.readouterr().out
    for cell in statement.splitlines()[1].split():
        assert f"<td>{cell}</td>" in text or f"<td><bdi>{cell}</bdi></td>" in text
