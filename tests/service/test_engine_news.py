"""What other threads ask of the engine, at the moments at which it could be overlooked.

The engine looks for it without a lock and sleeps only after a look with one. Here it would sleep
for an hour, so whatever it overlooks is not done in time.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engine_harness import Harness
from scripted_model import PATIENCE

from kvledger.engine import EndReason
from kvledger.scopes import PrefixScopes
from kvledger.tenants.shares import CoreShare


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    monkeypatch.setattr("kvledger.engine._IDLE_SECONDS", 3600.0)
    made = Harness()
    yield made
    made.close()


def just_after_a_look(
    harness: Harness, when: Callable[[Any], bool], ask: Callable[[], None]
) -> threading.Event:
    """Another thread asks while the engine plans: it has just looked, and may sleep next."""
    plan, asked = harness.core.plan, threading.Event()

    def planning(*arguments: Any) -> Any:
        result = plan(*arguments)
        if not asked.is_set() and when(result[0]):
            asking = threading.Thread(target=ask)
            asking.start()
            asking.join(PATIENCE)
            assert not asking.is_alive(), "who asks must not wait for a step"
            asked.set()
        return result

    harness.core.plan = planning  # type: ignore[method-assign]
    return asked


def is_idle(plan: Any) -> bool:
    return bool(plan.tokens == 0)


def test_a_job_is_seen(harness: Harness) -> None:
    """A request would wait until another one comes."""
    just_after_a_look(harness, is_idle, lambda: harness.submit(1, max_tokens=3))
    harness.engine.start()
    assert harness.reason(1) == EndReason.LENGTH


def test_an_end_is_seen(harness: Harness) -> None:
    """A sequence whose client has gone would keep its blocks."""
    harness.submit(1)
    harness.engine.pause(1)
    just_after_a_look(harness, is_idle, lambda: harness.engine.end(1, EndReason.CANCELLED))
    harness.engine.start()
    assert harness.reason(1) == EndReason.CANCELLED


def test_a_resume_is_seen(harness: Harness) -> None:
    """A reader that caught up would get nothing any more."""
    harness.submit(1, max_tokens=3)
    harness.engine.pause(1)
    just_after_a_look(harness, is_idle, lambda: harness.engine.resume(1))
    harness.engine.start()
    assert harness.reason(1) == EndReason.LENGTH
    assert len(harness.tokens[1]) == 3


def test_a_pause_is_seen(harness: Harness) -> None:
    """A reader that is behind would be given more and more."""
    harness.submit(1, max_tokens=200)
    at = []

    def pause() -> None:
        at.append(len(harness.tokens[1]))
        harness.engine.pause(1)

    asked = just_after_a_look(harness, lambda plan: len(harness.tokens[1]) == 5, pause)
    harness.engine.start()
    assert asked.wait(PATIENCE)
    # Another sequence runs to its end meanwhile, so the steps go on without the first.
    harness.submit(2, max_tokens=20)
    assert harness.reason(2) == EndReason.LENGTH
    assert len(harness.tokens[1]) <= at[0] + 1, "the step that was planned already, and no other"
    harness.engine.resume(1)
    assert harness.reason(1) == EndReason.LENGTH


def test_a_stop_is_seen(harness: Harness) -> None:
    """A server that stops would hang until the engine wakes by itself."""
    stopping = threading.Thread(target=harness.engine.stop, args=(PATIENCE,))
    asked = just_after_a_look(harness, is_idle, lambda: stopping.start())
    harness.engine.start()
    assert asked.wait(PATIENCE)
    stopping.join(PATIENCE)
    assert not harness.engine.alive


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_lost_whenever_it_comes(harness: Harness, seed: int) -> None:
    """Somewhere among many threads that ask at once, something would be forgotten."""
    cancelled: set[int] = set()

    def wait_for_admission(sequence: int) -> None:
        harness.wait(lambda: harness.admitted[sequence])

    def client(first: int) -> None:
        chance = random.Random(first * 10 + seed)
        for sequence in range(first, first + 40):
            harness.submit(sequence, max_tokens=chance.randint(1, 8))
            what = chance.randrange(4)
            if what == 1:
                if chance.random() < 0.5:
                    wait_for_admission(sequence)
                harness.engine.pause(sequence)
                harness.engine.resume(sequence)
            elif what == 2:
                cancelled.add(sequence)
                harness.engine.end(sequence, EndReason.CANCELLED)
            elif what == 3:
                harness.receipt(sequence)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        harness.engine.start()
        clients = [threading.Thread(target=client, args=(1000 * n,)) for n in range(1, 5)]
        for each in clients:
            each.start()
        for each in clients:
            each.join()
        for first in range(1000, 5000, 1000):
            for sequence in range(first, first + 40):
                reason = harness.reason(sequence)
                assert reason == EndReason.LENGTH or sequence in cancelled
    finally:
        sys.setswitchinterval(before)
    assert harness.deaths == 0
    harness.require_all_free()


def test_a_job_that_came_before_lower_shares_is_ended_and_not_refused() -> None:
    """Its caller was let in by the shares of its time, and would hear of a fault of ours."""
    harness = Harness(reuses_prefixes=True)
    try:
        harness.submit(1, "a" * 100)
        harness.engine.set_shares([CoreShare(0, 0, 4, False, 4)])
        harness.submit(2, "a" * 20)
        harness.engine.start()
        assert harness.reason(2) == EndReason.LENGTH
        assert harness.receipt(1) is not None
        assert harness.refused == []
        # Who comes now is refused: the door should have known.
        harness.submit(3, "a" * 100)
        harness.wait(lambda: harness.refused)
        assert harness.refused == [3]
    finally:
        harness.close()
    harness.require_all_free()


def test_a_job_that_came_after_higher_shares_is_taken_by_them() -> None:
    """Its caller was let in by the new shares, and would hear of a fault of ours."""
    harness = Harness()
    try:
        harness.core.set_shares([(0, 0, 2, 64, False)], time.monotonic_ns())
        harness.submit(1, "a" * 8, max_tokens=2)
        harness.engine.set_shares([CoreShare(0, 0, 64, False, 64)])
        harness.submit(2, "a" * 40, max_tokens=2)
        harness.engine.end(2, EndReason.CANCELLED)
        harness.submit(3, "a" * 40, max_tokens=2)
        harness.engine.start()
        assert harness.reason(1) == EndReason.LENGTH
        assert harness.reason(2) == EndReason.CANCELLED
        assert harness.reason(3) == EndReason.LENGTH
        assert harness.refused == []
    finally:
        harness.close()


def test_a_job_that_the_core_has_not_seen_loses_scopes_that_end() -> None:
    """It would leave something where nobody may find it any more, and find it (S04)."""
    harness = Harness(reuses_prefixes=True)
    try:
        scopes = PrefixScopes(own=5)
        harness.submit(1, "a" * 20, max_tokens=1, scopes=scopes)
        harness.engine.purge([5])
        harness.submit(2, "a" * 20, max_tokens=1, scopes=scopes)
        harness.engine.start()
        assert harness.reason(1) == harness.reason(2) == EndReason.LENGTH
        assert int(harness.receipt(2)["reused_own"]) == 0
        harness.submit(3, "a" * 20, max_tokens=1, scopes=scopes)
        assert int(harness.receipt(3)["reused_own"]) == 16, "its two whole blocks"
    finally:
        harness.close()
