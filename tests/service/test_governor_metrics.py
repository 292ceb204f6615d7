"""What operators see of how careful admission is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from engine_harness import Harness
from log_capture import captured
from prometheus_client import CollectorRegistry

from kvledger import governor_log
from kvledger.governor_log import GovernorLog
from kvledger.metrics.clock import BooksClock
from kvledger.metrics.governor import GovernorMetrics


def test_level_and_moves_are_shown_as_they_are() -> None:
    """A dashboard would show a server that recomputes as one where all is well."""
    now = (0, 0, 0)
    registry = CollectorRegistry()
    registry.register(GovernorMetrics(lambda: now, BooksClock()))
    assert registry.get_sample_value("kvledger_governor_level") == 0
    now = (2, 3, 1)
    assert registry.get_sample_value("kvledger_governor_level") == 2
    moves = {
        direction: registry.get_sample_value(
            "kvledger_governor_moves_total", {"direction": direction}
        )
        for direction in ("raised", "lowered")
    }
    assert moves == {"raised": 3, "lowered": 1}


def test_an_engine_that_computes_again_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures would be made up: the core's governor would never be asked."""
    harness = Harness(
        blocks=10, slots_per_block=4, context_tokens=64, sequences_max=8, forecast=False
    )
    assert harness.engine.governor == (0, 0, 0)
    for sequence in range(12):
        harness.submit(sequence, "abcabcabc", max_tokens=20, ignore_eos=True)
    lines = captured(monkeypatch, governor_log)
    harness.engine.start()
    again = sum(int(harness.receipt(sequence)["recomputed_tokens"]) for sequence in range(12))
    harness.close()
    assert again > 0
    level, raised, lowered = harness.engine.governor
    assert (level, raised, lowered) == (1, 1, 0)
    (moved,) = [line for line in lines if line["event"].startswith("governor_")]
    assert (moved["event"], moved["level"]) == ("governor_raised", 1)
    assert 0.02 < moved["recomputed_share"] < 1


def test_each_move_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator would look for the minute in which it began among lines of every step."""
    core = SimpleNamespace(governor=(0, 0, 0), recomputed_share=0.0)
    log = GovernorLog(core)
    lines = captured(monkeypatch, governor_log)
    log.look()
    core.governor, core.recomputed_share = (1, 1, 0), 0.031415926
    log.look()
    log.look()
    core.governor, core.recomputed_share = (0, 1, 1), 0.004
    log.look()
    assert [(line["event"], line["level"], line["recomputed_share"]) for line in lines] == [
        ("governor_raised", 1, 0.0314),
        ("governor_lowered", 0, 0.004),
    ]
