"""`kvledger simulate`: what it reads, what it prints, and what it says about what is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from book_writer import SECOND, receipt
from planted_books import Planted
from tiny_model import TinyShape, write_gguf

from kvledger import _core
from kvledger.cli import main, simulate
from kvledger.errors import SettingRefused
from kvledger.planning import planned_model
from kvledger.settings import load_settings
from kvledger.simulation.measuring import measured
from kvledger.simulation.recorded import read_books
from kvledger.simulation.trace import read_trace
from kvledger.simulation.traffic import Row

STEPS = ("--decode", "5ms,1.4ms,0", "--prefill", "1.5ms,0.5ms,0")
LOAD = ("--rate", "4", "--requests", "40", "--prompt", "60", "--output", "20")
POOL = ("--kv-blocks", "64")
Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _this_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings in the environment, logging left alone."""
    for name in ("KVLEDGER_MODEL", "KVLEDGER_KV_BLOCKS", "KVLEDGER_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(simulate, "configure", lambda *arguments: None)


def simulated(capsys: Captured, *arguments: str) -> list[dict[str, Any]]:
    assert simulate.run(["--json", *arguments]) == 0
    runs: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["runs"]
    return runs


def refused(capsys: Captured, *arguments: str) -> str:
    assert simulate.run(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("kvledger simulate: ")
    assert shown.err.count("\n") == 1
    return shown.err


def test_runs_stand_side_by_side(capsys: Captured) -> None:
    """Whoever compares settings would compare columns of something else."""
    arguments = (*LOAD, "--rate", "12", *STEPS, *POOL, "--ttft", "500ms")
    arguments += ("--vary", "max_sequences=1,16")
    assert main(["simulate", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["max_sequences=1", "max_sequences=16"]
    rows = {line[:24].strip(): line[24:].split() for line in lines}
    assert rows["requests"] == ["40", "40"]
    assert rows["books"] == ["clean", "clean"]
    few, many = simulated(capsys, *arguments)
    assert (few["run"], many["run"]) == ("max_sequences=1", "max_sequences=16")
    assert few["waited"]["place"] > 0.2 > many["waited"]["place"]
    assert few["good_requests"] < many["good_requests"]


def test_several_changes_are_combined(capsys: Captured) -> None:
    """A table would lack what was asked for."""
    runs = simulated(
        capsys, *STEPS, *POOL, "--callers", "4", "--requests", "20", "--prompt", "40",
        "--output", "10", "--vary", "kv-blocks=32,128", "--vary", "callers=2,8",
    )  # fmt: skip
    assert [run["run"] for run in runs] == [
        f"kv_blocks={blocks} callers={callers}" for blocks in (32, 128) for callers in (2, 8)
    ]
    assert runs[1]["sequences_per_step"] > runs[0]["sequences_per_step"]


def test_a_trace_of_azure_is_read(tmp_path: Path, capsys: Captured) -> None:
    """The best known public trace could not be replayed."""
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    first, second = read_trace(path)
    assert second.at - first.at == pytest.approx(4.3145790)
    assert (first.prompt, first.output, first.tenant) == (374, 44, "all")
    (run,) = simulated(
        capsys, *STEPS, *POOL, "--trace", str(path), "--rate-scale", "2", "--limit", "2"
    )
    assert run["answered"] == 2
    assert run["seconds"] == pytest.approx(2.157 + 0.1 + 109 * 0.0064, rel=0.2)


def test_columns_that_are_there_are_used(tmp_path: Path) -> None:
    """Tenants and prefixes of a trace would be lost."""
    path = tmp_path / "trace.csv"
    path.write_text(
        "tenant,arrived,output_tokens,prompt_tokens,prefix,prefix_tokens,conversation,more\n"
        "a,0.5,3,40,system,16,,x\n,1,4,50,,,c,y\n"
    )
    assert read_trace(path) == [
        Row(0.5, 40, 3, "a", "system", 16, ""),
        Row(1.0, 50, 4, "all", "", 0, "c"),
    ]
    assert len(read_trace(path, 1)) == 1


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "no column arrived"),
        ("arrived,prompt_tokens\n", "no column output_tokens"),
        ("arrived,prompt_tokens,output_tokens\n", "no request"),
        ("arrived,prompt_tokens,output_tokens\n1,2,3\n1,x,3\n", "line 3: prompt_tokens is 'x'"),
        ("arrived,prompt_tokens,output_tokens\n1,2\n", "line 2: output_tokens is ''"),
        ("arrived,prompt_tokens,output_tokens\n1,2,0\n", "from 1 to"),
        ("arrived,prompt_tokens,output_tokens\nnoon,2,1\n", "arrived is 'noon'"),
        ("arrived,prompt_tokens,output_tokens\n2023-13-16 18:15:46,2,1\n", "arrived is '2023-13"),
        ("arrived,prompt_tokens,output_tokens,prefix\n1,2,3,a\n", "needs one prefix_tokens"),
        (
            "arrived,prompt_tokens,output_tokens,prefix,prefix_tokens\n1,2,3,a,5\n",
            "prefix_tokens 5 is more than prompt_tokens 2",
        ),
        ("\udcff,prompt_tokens,output_tokens\n", "no CSV file"),
    ],
)
def test_lines_that_are_wrong_are_named(tmp_path: Path, text: str, sentence: str) -> None:
    """Who has a million lines would look for the wrong one by hand, or simulate without it."""
    path = tmp_path / "trace.csv"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(SettingRefused, match=sentence.replace("(", r"\(")):
        read_trace(path)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (STEPS, "give one of --trace, --books, --rate, --callers"),
        ((*LOAD, *STEPS, "--callers", "3"), "--rate and --callers says what"),
        (LOAD, "nothing says how long steps take"),
        ((*LOAD, "--decode", "1ms,1ms,0"), "give both"),
        ((*LOAD, *STEPS, "--measure"), "give one"),
        ((*LOAD, *STEPS, "--limit", "3"), "--limit is not for --rate"),
        ((*STEPS, "--trace", "x", "--turns", "3"), "--turns is not for --trace"),
        ((*STEPS, *POOL, "--trace", "nowhere.csv"), "No such file"),
        ((*LOAD, "--costs", "nowhere.json", *POOL), "No such file"),
        ((*STEPS, *POOL, "--books", "nowhere"), "no such folder"),
        ((*LOAD, *STEPS, "--vary", "listen=1"), "changes nothing in a simulation"),
        ((*LOAD, *STEPS, "--vary", "callers"), "give values"),
        ((*LOAD, *STEPS, *POOL, "--vary", "max_sequences=4,many"), "--max-sequences"),
        ((*LOAD, *STEPS, "--vary", f"seed={','.join('1' * 40)}"), "at most 32"),
        ((*LOAD, *STEPS, *POOL, "--token-budget", "8"), None),
        ((*LOAD, *STEPS, *POOL, "--token-budget", "8", "--max-sequences", "9"), "raise the one"),
        ((*LOAD, *STEPS, *POOL, "--faults", "slow=1"), "no fault"),
        ((*LOAD, *STEPS, *POOL, "--no-such-option"), "unrecognized"),
        ((*LOAD, *STEPS, *POOL, "--noise", "1"), "from 0 to less than 1"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(
    capsys: Captured, arguments: tuple[str, ...], sentence: str | None
) -> None:
    """An operator would guess what to change."""
    if sentence is None:
        assert simulate.run(arguments) == 0
    else:
        assert sentence in refused(capsys, *arguments)


def diagnosis(**changes: Any) -> dict[str, Any]:
    fit = {"fixed_seconds": 0.005, "token_seconds": 0.0014, "key_seconds": 0.0}
    setup = {
        **{"max_sequences": 3, "token_budget": 128, "kv_blocks": 50, "step_stretch": 2.0},
        **{"prefill_step": 0.05, "prefix_reuse": True, "slots_per_block": 32},
    }
    phases = {name: {"fit": fit} for name in ("decode", "prefill")}
    return {"now": {**phases, "setup": setup, **changes}}


def test_a_diagnosis_gives_costs_and_settings(tmp_path: Path, capsys: Captured) -> None:
    """A simulation of one's own server would be of another."""
    path = tmp_path / "now.json"
    path.write_text(json.dumps(diagnosis()))
    (own,) = simulated(capsys, *LOAD, "--costs", str(path))
    given = ("--kv-blocks", "50", "--max-sequences", "3", "--token-budget", "128")
    fit = "5ms,1.4ms,0"
    (same,) = simulated(capsys, *LOAD, "--decode", fit, "--prefill", fit, *given)
    assert own == same
    (other,) = simulated(capsys, *LOAD, "--costs", str(path), "--max-sequences", "8")
    assert other["sequences_per_step"] > own["sequences_per_step"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("no JSON", "holds no diagnosis"),
        ("{}", "holds no diagnosis"),
        (json.dumps(diagnosis(decode={})), "nobody decoded"),
        (json.dumps(diagnosis(setup={})), "of another version"),
    ],
)
def test_costs_that_are_none_are_refused(
    tmp_path: Path, capsys: Captured, content: str, sentence: str
) -> None:
    """Steps would take no time."""
    path = tmp_path / "now.json"
    path.write_text(content)
    assert sentence in refused(capsys, *LOAD, *POOL, "--costs", str(path))


def test_tenants_of_a_file_have_their_shares(tmp_path: Path, capsys: Captured) -> None:
    """Guarantees would be promised without ever having been tried."""
    path = tmp_path / "tenants.json"
    path.write_text(
        json.dumps(
            {
                "version": 1,
                "tenants": {
                    "quiet": {"limits": {"kv_guaranteed": 0.5}},
                    "flood": {"limits": {"kv_max": 0.25, "running_max": 4}},
                },
            }
        )
    )
    path.chmod(0o600)
    arguments = (*STEPS, *POOL, "--rate", "50", "--requests", "150", "--prompt", "60")
    arguments += ("--output", "20", "--from", "quiet=1,flood=9")
    (free,) = simulated(capsys, *arguments)
    assert simulate.run(["--json", *arguments, "--tenants", str(path)]) == 0
    told = json.loads(capsys.readouterr().out)
    (shared,) = told["runs"]
    assert "running_max" in told["notes"][0]
    assert shared["waited"]["share"] > 0.2 > free["waited"]["share"]
    quiet = [run["tenants"]["quiet"]["ttft"]["p99"] for run in (free, shared)]
    assert quiet[1] < quiet[0]
    strangers = ("--tenants", str(path), "--from", "quiet,loud")
    assert "has no loud" in refused(capsys, *arguments, *strangers)


def test_what_a_server_recorded_is_replayed(tmp_path: Path, capsys: Captured) -> None:
    """The traffic that hurt yesterday could not be tried with other settings."""
    books = tmp_path / "books"
    server = Planted(books)
    for number in range(8):
        spent = {"queued": number * SECOND, "prefill": SECOND, "decode": SECOND, "paused": SECOND}
        line = replace(receipt(), prompt_tokens=90, output_tokens=20, reused_own=64, **spent)
        told = server.ends(line, "a" if number % 2 else "b", at=3.0 + 1.5 * number)
    server.write(told)  # some lines are in two files
    server.ends(None, at=1.0)
    rows = read_books(books).rows
    assert [row.at - rows[0].at for row in rows] == [0.5 * number for number in range(8)]
    assert rows[1] == rows[0]._replace(at=rows[1].at, tenant="a")
    assert (rows[0].prompt, rows[0].output, rows[0].prefix_tokens) == (90, 20, 64)
    (run,) = simulated(capsys, *STEPS, "--books", str(books), "--limit", "6")
    assert run["answered"] == 6
    assert run["waterline_most"] == pytest.approx(0.04, abs=0.04), "of the server's 100 blocks"
    assert run["reused"] == pytest.approx(4 * 64 / (6 * 90), abs=0.01), "its first ones computed it"
    assert "does not say how long steps took" in refused(capsys, "--books", str(books))


def test_what_a_server_recorded_says_how_long_steps_take(tmp_path: Path) -> None:
    """Its own steps would have to be measured again, which nobody can who was not there."""
    server = Planted(tmp_path / "books")
    server.steps.decode(100, 0.010, 4, 100)
    server.steps.prefill(10, 0.050, 200)
    server.passes({"a": 10})
    server.states_load()
    server.ends(replace(receipt(), prompt_tokens=90, output_tokens=20))
    costs = read_books(tmp_path / "books").costs(tmp_path)
    assert costs.decode.seconds(4, 400) == pytest.approx(0.010)
    assert costs.prefill.seconds(200, 20_000) == pytest.approx(0.050)


def test_bytes_are_blocks_of_the_model(tmp_path: Path, capsys: Captured) -> None:
    """A pool would be simulated that is larger or smaller than the server's."""
    model = write_gguf(tmp_path / "tiny.gguf", TinyShape(context=300))
    load = (*LOAD, *STEPS, "--model", str(model), "--kv-format", "f32", "--callers", "6")
    load = tuple(each for each in load if each not in ("--rate", "4"))
    layout = planned_model.served_model(str(model)).config
    block = _core.KvLayout(
        layers=layout.layers, kv_heads=layout.kv_heads, head_dim=layout.head_dim, block_tokens=32
    ).block_bytes
    (by_bytes,) = simulated(capsys, *load, "--kv-bytes", str(20 * block + 5))
    (by_blocks,) = simulated(capsys, *load, "--kv-blocks", "20", "--context", "300")
    assert by_bytes == by_blocks
    (default,) = simulated(capsys, *load)
    assert default["waterline_most"] < by_blocks["waterline_most"], "a quarter of free memory"


def test_steps_can_be_measured_here(tmp_path: Path) -> None:
    """Who has no server yet could not say how long its steps take."""
    model = write_gguf(tmp_path / "tiny.gguf", TinyShape(context=600))
    settings = load_settings(["--model", str(model), "--threads", "1", "--dev"], {})
    costs = measured(settings, 600, seconds=0.3)
    assert 0.0 < costs.decode.seconds(4, 400) < 1.0
    assert costs.prefill.seconds(200, 20_000) > costs.prefill.seconds(1, 1)
