"""What a server tries before it serves: one prompt twice (B89)."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from server_harness import Log
from stepping import settings
from tiny_model import TinyShape, random_weights, write_gguf

from kvledger import self_test
from kvledger.cli import serve
from kvledger.self_test import warn_unless_reused
from kvledger.served_model import load


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    log = Log()
    monkeypatch.setattr(self_test, "_log", log)
    return log


def reasons(log: Log) -> list[str]:
    return [facts["reason"] for facts in log.of("prefix_reuse_finds_nothing")]


@pytest.mark.parametrize("blocks", ["2", "64"])
@pytest.mark.parametrize("format", ["f32", "bf16"])
def test_a_server_that_reuses_says_nothing_and_forgets_it(
    tiny: Path, log: Log, blocks: str, format: str
) -> None:
    """Every start would warn, or what was tried stay in the pool."""
    asked = settings("--model", str(tiny), "--kv-blocks", blocks, "--kv-format", format)
    model = load(asked)
    warn_unless_reused(asked, model)
    assert log.lines == []
    assert model.core.prefix_counts["lookups"] == 2
    assert model.core.prefix_counts["reused_tokens"] == model.pool.slots_per_block
    _, report = model.core.plan(time.monotonic_ns())
    assert report.balances.tolist() == [int(blocks), 0, 0, 0, 0]
    assert model.core.audit() is None


def test_a_server_that_finds_nothing_says_so(tiny: Path, log: Log) -> None:
    """Reuse would be on, nothing ever found, and nobody be told (B89)."""
    asked = settings("--model", str(tiny), "--kv-blocks", "8")
    model = load(settings("--model", str(tiny), "--kv-blocks", "8", "--prefix-reuse", "off"))
    warn_unless_reused(asked, model)
    slots = model.pool.slots_per_block
    assert reasons(log) == [f"a prompt of {slots + 1} tokens, sent twice, began with 0 of them"]


def test_blocks_that_no_prompt_fills_are_named(tiny: Path, log: Log) -> None:
    """Whole blocks are reused: with blocks as long as any prompt there are none."""
    asked = settings("--model", str(tiny), "--kv-blocks", "1")
    warn_unless_reused(asked, load(asked))
    (reason,) = reasons(log)
    assert "a block has 32 tokens and prompts at most 32" in reason
    assert "--block-tokens" in reason


def test_reuse_that_is_off_is_not_tried(tiny: Path, log: Log) -> None:
    """A warning would tell an operator what that one wanted."""
    asked = settings("--model", str(tiny), "--kv-blocks", "1", "--prefix-reuse", "off")
    warn_unless_reused(asked, load(asked))
    assert log.lines == []


def test_a_prompt_that_cannot_be_computed_is_no_end(tmp_path: Path, log: Log) -> None:
    """A check would keep a server from starting, or wait for ever."""
    weights = random_weights(TinyShape(), seed=0)
    weights["model.norm.weight"][:] = float("nan")
    path = write_gguf(tmp_path / "broken.gguf", weights=weights)
    asked = settings("--model", str(path), "--kv-blocks", "8")
    model = load(asked)
    warn_unless_reused(asked, model)
    assert reasons(log) == ["a prompt could not be computed; see the log"]
    assert model.core.audit() is None


def test_every_start_tries_it(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check would be there and never run."""
    tried = []

    class Served(Exception):
        pass

    def check(asked: object, model: object) -> None:
        tried.append(model)
        raise Served

    monkeypatch.setattr(self_test, "warn_unless_reused", check)
    monkeypatch.setattr(serve, "configure", lambda *arguments: None)
    with pytest.raises(Served):
        serve.run(["--dev", "--listen", "127.0.0.1:0", "--model", str(tiny), "--kv-blocks", "4"])
    assert len(tried) == 1
