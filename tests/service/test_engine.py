"""The engine's loop: what comes in, what goes out, and what happens when something breaks."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine_harness import Harness
from scripted_model import END_OF_TEXT, PATIENCE, Gate, expected

from kvledger import _core
from kvledger.engine import EndReason
from kvledger.errors import DeviceLost
from kvledger.sampling import SamplingParameters


@pytest.fixture
def harness() -> Iterator[Harness]:
    harness = Harness()
    yield harness
    harness.close()


@pytest.fixture
def gated(harness: Harness) -> Iterator[Gate]:
    """The harness's steps wait at this gate."""
    gate = Gate()
    harness.model.before_step = lambda plan: gate.wait()
    yield gate
    gate.open()


def text(tokens: list[int]) -> str:
    return bytes(tokens).decode()


def test_tokens_and_one_receipt_come_out(harness: Harness) -> None:
    """A request would get other tokens than the model's, or its receipt twice or never."""
    harness.submit(1, "hello", max_tokens=5)
    harness.engine.start()
    assert harness.reason(1) == EndReason.LENGTH
    assert text(harness.tokens[1]) == expected("hello", 5)
    receipt = harness.receipt(1)
    assert (receipt["prompt_tokens"], receipt["output_tokens"]) == (5, 5)
    assert receipt["computed_tokens"] == 5 + 4
    assert harness.admitted[1] == 1
    harness.require_all_free()


def test_end_of_text_ends_and_can_be_ignored(harness: Harness) -> None:
    """A text would run past its end, or ignore_eos would be ignored (B73)."""
    harness.submit(1, "!", max_tokens=50)
    harness.submit(2, "!", max_tokens=50, ignore_eos=True)
    harness.engine.start()
    assert harness.reason(1) == EndReason.STOP
    assert harness.tokens[1] == [END_OF_TEXT]
    assert harness.reason(2) == EndReason.LENGTH
    assert len(harness.tokens[2]) == 50


def test_the_context_ends_what_nothing_else_ends(harness: Harness) -> None:
    """Generation past the window would never end (B45)."""
    harness.submit(1, "a" * 250, max_tokens=1 << 40, ignore_eos=True)
    harness.engine.start()
    assert harness.reason(1) == EndReason.CONTEXT
    assert len(harness.tokens[1]) == 6


def test_a_prompt_that_never_fits_is_refused_and_harms_nobody(harness: Harness) -> None:
    """One that can never fit would block the queue for ever (B30)."""
    harness.submit(1, "a" * 256)
    harness.submit(2, [])
    harness.submit(3)
    harness.engine.start()
    harness.receipt(3)
    assert sorted(harness.refused) == [1, 2]
    assert not harness.receipts[1]
    harness.require_all_free()


def test_cancel_before_the_core_saw_the_request(harness: Harness) -> None:
    """An end that overtakes its own arrival would be lost, and the request run to its limit."""
    harness.submit(1, max_tokens=200)
    harness.engine.end(1, EndReason.CANCELLED)
    harness.engine.start()
    assert harness.reason(1) == EndReason.CANCELLED
    assert harness.core.plans <= 3
    harness.require_all_free()


def test_cancel_in_the_queue(harness: Harness, gated: Gate) -> None:
    """A waiting request that was given up would still be computed, or get no receipt."""
    for sequence in range(1, 9):
        harness.submit(sequence, max_tokens=100)
    harness.submit(9, max_tokens=100)
    harness.engine.start()
    gated.wait_for_arrival(1)
    harness.engine.end(9, EndReason.CANCELLED)
    gated.let(1)
    assert harness.reason(9) == EndReason.CANCELLED
    assert harness.receipt(9)["output_tokens"] == 0
    assert harness.receipt(9)["held_nanos"] == 0
    assert harness.admitted[9] == 0


def test_cancel_while_running_gives_blocks_back_in_the_next_plan(
    harness: Harness, gated: Gate
) -> None:
    """A cancelled request would hold its blocks for longer than two steps."""
    harness.submit(1, "a" * 20, max_tokens=200)
    harness.engine.start()
    gated.let(2)
    gated.wait_for_arrival(3)
    asked_in = harness.core.plans
    harness.engine.end(1, EndReason.CANCELLED)
    gated.let(3)
    assert harness.reason(1) == EndReason.CANCELLED
    assert harness.core.receipts[1] <= asked_in + 2
    harness.require_all_free()


def test_cancel_between_plan_and_commit_drops_the_step_of_that_request_only(
    harness: Harness, gated: Gate
) -> None:
    """Ending one request of a step that runs would spoil the others of that step."""
    harness.submit(1, "aa", max_tokens=20)
    harness.submit(2, "kk", max_tokens=20)
    harness.engine.start()
    gated.let(3)
    gated.wait_for_arrival(4)
    harness.engine.end(1, EndReason.CANCELLED)
    gated.open()
    assert harness.reason(2) == EndReason.LENGTH
    assert text(harness.tokens[2]) == expected("kk", 20)
    assert text(harness.tokens[1]) == expected("aa", len(harness.tokens[1]))
    harness.require_all_free()


def test_ending_what_has_ended_or_never_was_is_nothing(harness: Harness) -> None:
    """A cancel that comes too late would fail somebody else, or yield a second receipt."""
    harness.submit(1)
    harness.engine.start()
    harness.receipt(1)
    for sequence in (1, 1, 77, 2**63):
        harness.engine.end(sequence, EndReason.CANCELLED)
    harness.submit(2)
    assert harness.reason(2) == EndReason.LENGTH
    assert len(harness.receipts[1]) == 1


def test_a_step_that_raises_ends_its_requests_alone(harness: Harness) -> None:
    """A failed kernel call would end the server, leak blocks, or take later requests with it."""
    first = threading.Event()

    def break_once(plan: _core.Plan) -> None:
        if not first.is_set():
            first.set()
            raise RuntimeError("injected")

    harness.model.before_step = break_once
    harness.submit(1, "a" * 20)
    harness.submit(2, "b" * 5)
    harness.engine.start()
    assert harness.reason(1) == EndReason.FAILED
    assert harness.reason(2) == EndReason.FAILED
    harness.submit(3, "x")
    assert harness.reason(3) == EndReason.LENGTH
    assert text(harness.tokens[3]) == expected("x", 4)
    assert harness.engine.alive
    harness.require_all_free()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_a_row_without_usable_logits_fails_alone(harness: Harness, poison: float) -> None:
    """One sequence's NaN would end its neighbours, or come out as a token."""

    def spoil(logits: torch.Tensor, plan: _core.Plan) -> None:
        spoilt = plan.token_ids[plan.logit_tokens] == ord("p")
        logits[torch.from_numpy(spoilt)] = poison

    harness.model.after_step = spoil
    harness.submit(1, "n", max_tokens=20)
    harness.submit(2, "b", max_tokens=20)
    harness.engine.start()
    assert harness.reason(1) == EndReason.FAILED
    assert text(harness.tokens[1]) == "op"
    assert harness.reason(2) == EndReason.FAILED, "it comes to a p as well, twelve tokens later"
    assert text(harness.tokens[2]) == "cdefghijklmnop"
    harness.require_all_free()


def test_death_of_the_loop_is_told_once(harness: Harness) -> None:
    """A server whose engine is gone would say nothing and look healthy."""

    def die(*arguments: object) -> object:
        raise SystemExit("injected")

    harness.core.commit = die  # type: ignore[method-assign, assignment]
    harness.submit(1)
    harness.engine.start()
    harness.wait(lambda: harness.deaths)
    harness.engine.stop(PATIENCE)
    assert not harness.engine.alive
    assert harness.deaths == 1
    assert harness.reason(1) == EndReason.FAILED
    harness.require_all_free()


@pytest.mark.parametrize("place", ["plan", "commit", "forward", "publish"])
def test_a_loop_that_dies_closes_the_books(harness: Harness, gated: Gate, place: str) -> None:
    """Whoever was being served would never learn what it cost."""
    for sequence in range(1, 12):  # more than may run: some still wait
        harness.submit(sequence, "a" * 20, max_tokens=50, ignore_eos=True)
    harness.engine.start()
    gated.let(5)
    gated.wait_for_arrival(6)
    whole = {"plan": harness.core.plan, "commit": harness.core.commit}
    died = threading.Event()

    def die_once(*arguments: object) -> object:
        if not died.is_set():
            died.set()
            raise MemoryError("injected")
        return whole[place](*arguments) if place in whole else None

    if place in whole:
        setattr(harness.core, place, die_once)
    elif place == "publish":
        harness.publish_hook = die_once
    else:
        error = DeviceLost("the device fell off the bus")

        def lose(*arguments: object) -> object:
            raise error

        harness.model.after_step = lose
    gated.open()
    harness.wait(lambda: harness.deaths)
    assert {sequence for sequence, told in harness.receipts.items() if told} == {*range(1, 12)}
    assert {harness.reason(sequence) for sequence in range(1, 12)} == {EndReason.FAILED}
    harness.require_all_free()


def test_books_that_disagree_give_no_receipts(
    harness: Harness, gated: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bill made from wrong books is worse than none."""
    lines: list[tuple[str, dict[str, object]]] = []
    monkeypatch.setattr(
        "kvledger.engine._log",
        SimpleNamespace(
            exception=lambda event, **facts: lines.append((event, facts)),
            error=lambda event, **facts: lines.append((event, facts)),
        ),
    )
    harness.submit(1, "a" * 20, max_tokens=50)
    harness.submit(2, "b", max_tokens=50)
    harness.engine.start()
    gated.let(1)
    gated.wait_for_arrival(2)

    def die(*arguments: object) -> object:
        raise MemoryError("injected")

    harness.core.commit = harness.core.abandon = die  # type: ignore[method-assign, assignment]
    gated.open()
    harness.wait(lambda: harness.deaths)
    assert [event for event, _ in lines] == ["engine_died", "books_left_open"]
    assert not harness.receipts[1]


def test_a_clock_that_jumps_harms_nobody(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour forwards or back would end requests, or be on a bill as less than nothing."""
    jumps = itertools.cycle((0, 3600, -3600, 7200, -7200, 1))
    real = time.monotonic_ns

    def jumping() -> int:
        return real() + next(jumps) * 10**9

    monkeypatch.setattr(
        "kvledger.engine.time", SimpleNamespace(monotonic_ns=jumping, monotonic=time.monotonic)
    )
    harness.engine.start()
    for sequence in range(1, 31):
        harness.submit(sequence, "a", max_tokens=20, arrived_at=jumping())
    receipts = [harness.receipt(sequence) for sequence in range(1, 31)]
    assert {text(harness.tokens[sequence]) for sequence in range(1, 31)} == {expected("a", 20)}
    for receipt in receipts:
        times = [int(receipt[name]) for name in ("queued", "prefill", "decode", "paused")]
        assert min(times) >= 0
        assert sum(times) < 24 * 3600 * 10**9
    harness.require_all_free()


def test_death_is_told_even_if_the_log_breaks(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk would turn a dead engine into a server that waits for ever."""

    class BrokenLog:
        def exception(self, *arguments: object) -> None:
            raise OSError("no space left")

    def die(*arguments: object) -> object:
        raise ValueError("injected")

    monkeypatch.setattr("kvledger.engine._log", BrokenLog())
    monkeypatch.setattr(threading, "excepthook", lambda details: None)
    harness.core.plan = die  # type: ignore[method-assign, assignment]
    harness.engine.start()
    harness.wait(lambda: harness.deaths)


def test_stop_lets_the_step_finish_and_ends_the_thread(harness: Harness, gated: Gate) -> None:
    """A server that stops would cut a step in two, or leave the thread behind."""
    harness.submit(1, max_tokens=200)
    harness.engine.start()
    gated.let(1)
    gated.wait_for_arrival(2)
    assert not harness.engine.stop(0.01), "the step waits at the gate: the thread cannot be over"
    gated.open()
    assert harness.engine.stop(PATIENCE)
    assert not harness.engine.alive
    assert harness.engine.stop(), "a second stop is nothing"


def test_the_heart_beats_while_idle_and_stops_in_a_hanging_step(harness: Harness) -> None:
    """Health would call an idle server dead, or a hanging one alive."""
    inside, leave = threading.Event(), threading.Event()

    def hang(plan: _core.Plan) -> None:
        inside.set()
        assert leave.wait(PATIENCE)

    harness.model.before_step = hang
    harness.engine.start()
    deadline = time.monotonic() + PATIENCE
    beats = set()
    while len(beats) < 3 and time.monotonic() < deadline:
        beats.add(harness.engine._last_beat)
        time.sleep(0.01)
    assert len(beats) >= 3, "an idle engine shows signs of life"
    harness.submit(1)
    assert inside.wait(PATIENCE)
    silent = harness.engine.silence_seconds
    time.sleep(0.05)
    assert harness.engine.silence_seconds >= silent + 0.05
    leave.set()
    harness.receipt(1)
    assert harness.engine.silence_seconds < silent + PATIENCE


def test_running_streams_get_a_token_in_every_step_of_a_long_prefill(
    harness: Harness, gated: Gate
) -> None:
    """A long prompt would hold up everybody who is already being answered (B27)."""
    for sequence in range(1, 8):
        harness.submit(sequence, "a", max_tokens=60)
    harness.engine.start()
    gated.let(4)
    gated.wait_for_arrival(5)
    assert all(len(harness.tokens[s]) > 2 for s in range(1, 8))
    harness.submit(8, "x" * 240, max_tokens=1)
    gated.open()
    harness.receipt(8)
    with_prefill = [decode for decode, tokens in harness.core.steps if tokens == 32]
    assert len(with_prefill) >= 240 // 32
    assert set(with_prefill) == {7}


def test_a_short_prompt_does_not_wait_for_a_long_one(harness: Harness, gated: Gate) -> None:
    """The first token of a short prompt would come after the whole prefill of a long one (B29)."""
    harness.submit(1, "x" * 250, max_tokens=1)
    harness.engine.start()
    gated.wait_for_arrival(1)
    harness.submit(2, "a" * 10, max_tokens=1)
    gated.let(2)
    harness.receipt(2)
    assert not harness.receipts[1]


def test_a_seed_gives_the_same_tokens_whoever_runs_beside_it(harness: Harness) -> None:
    """A seeded answer would depend on the neighbours' parameters (B71)."""

    def flatten(logits: torch.Tensor, plan: _core.Plan) -> None:
        logits *= 0.1

    harness.model.after_step = flatten
    seeded = SamplingParameters(temperature=0.8, top_p=0.9, seed=42)
    harness.submit(1, "a", max_tokens=16, sampling=seeded, ignore_eos=True)
    harness.engine.start()
    harness.receipt(1)
    for sequence, neighbour in (
        (10, SamplingParameters(temperature=5.0, top_k=7, seed=1)),
        (20, SamplingParameters()),
        (30, SamplingParameters(temperature=1.0, min_p=0.3, seed=42)),
    ):
        harness.submit(sequence, "zzz", max_tokens=30, sampling=neighbour, ignore_eos=True)
        harness.submit(sequence + 1, "a", max_tokens=16, sampling=seeded, ignore_eos=True)
        harness.receipt(sequence + 1)
        assert harness.tokens[sequence + 1] == harness.tokens[1]
    assert len(set(harness.tokens[1])) > 8, "the draw is no greedy choice in disguise"


def test_many_more_requests_than_room_all_end(harness: Harness) -> None:
    """Under pressure everybody would preempt everybody, and nothing come out (B32)."""
    small = Harness(
        blocks=10, slots_per_block=4, context_tokens=64, sequences_max=8, forecast=False
    )
    for sequence in range(12):
        small.submit(sequence, "a" * 9, max_tokens=20, ignore_eos=True)
    small.engine.start()
    for sequence in range(12):
        assert small.reason(sequence) == EndReason.LENGTH
        assert small.receipt(sequence)["preemptions"] <= 3
        assert text(small.tokens[sequence]) == expected("a", 20)
    assert sum(int(small.receipt(s)["preemptions"]) for s in range(12)) > 0, "it was tight"
    small.require_all_free()
    small.close()


def test_small_requests_pass_a_large_one_that_waits_and_it_does_not_starve() -> None:
    """A large request at the head would block all, or be passed for ever (B36)."""
    harness = Harness(blocks=16, slots_per_block=4, context_tokens=65, sequences_max=8)
    gate = Gate()
    harness.model.before_step = lambda plan: gate.wait()
    harness.submit(1, "a" * 30, max_tokens=8)
    harness.submit(2, "b" * 50, max_tokens=2)
    for sequence in range(3, 8):
        harness.submit(sequence, "c" * 3, max_tokens=1)
    harness.engine.start()
    gate.wait_for_arrival(1)
    gate.let(4)
    harness.wait(lambda: all(harness.receipts[s] for s in range(3, 8)))
    assert not harness.receipts[2]
    gate.open()
    assert harness.reason(2) == EndReason.LENGTH
    harness.close()


def test_outcomes_that_nobody_waits_for_are_not_published(harness: Harness) -> None:
    """Every prefill step would wake the event loop for nothing."""
    outcomes = []
    harness.publish_hook = outcomes.append
    harness.submit(1, "x" * 200, max_tokens=1)  # seven steps of prefill
    harness.engine.start()
    harness.receipt(1)
    assert len(outcomes) == 2, "one with the admission, one with the token and the receipt"
    assert np.sum([outcome.report.tokens.size for outcome in outcomes]) == 1
