"""Simulations: small ones by arithmetic, all of them again from their seed, none that hangs."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from simulated import EVERYTHING, PLAIN, drawn, made_up, replayed, wrong_with

from kvledger.diagnosis.step_fit import PhaseFit
from kvledger.jobs import EndReason
from kvledger.simulation.costs import Costs, phase_fit, seconds_of
from kvledger.simulation.faults import Chance, Faults
from kvledger.simulation.loop import CoreSettings, Run, Simulation
from kvledger.simulation.outcome import Outcome, Targets
from kvledger.simulation.traffic import LogNormal, MadeUp, Replay, Row, Shape

POISSON = {"rate": 8.0}


def test_one_request_takes_its_prompt_and_a_step_for_each_token() -> None:
    """Every figure of every run would be off."""
    outcome = replayed(Row(0.0, 100, 5)).run()
    (ended,) = outcome.ended
    assert ended.ttft == pytest.approx(0.105)  # 5 ms and 100 times 1 ms
    assert ended.tpot == pytest.approx(0.010)
    assert (ended.prompt, ended.output, ended.reason) == (100, 5, EndReason.STOP)
    assert outcome.steps == 5
    assert outcome.seconds == pytest.approx(0.145)
    assert outcome.figures()["tokens_per_second"] == pytest.approx(5 / 0.145)
    assert outcome.figures()["busy"] == pytest.approx(1.0)


def test_keys_cost_the_same_however_a_prompt_is_cut() -> None:
    """Long prompts would seem cheaper in small chunks."""
    by_keys = Costs(PLAIN.decode, PhaseFit(0.0, 0.0, 1e-6))
    for budget, steps in ((256, 1), (40, 3), (7, 15)):
        outcome = replayed(
            Row(0.0, 100, 1), costs=by_keys, token_budget=budget, sequences_max=4
        ).run()
        assert outcome.steps == steps
        assert outcome.seconds == pytest.approx(100 * 101 / 2 * 1e-6)


def test_decoding_reads_what_stands_before_each_token() -> None:
    """Long contexts would cost nothing."""
    by_keys = Costs(PhaseFit(0.0, 0.0, 1e-3), PhaseFit(0.001, 0.0, 0.0))
    outcome = replayed(Row(0.0, 10, 4), costs=by_keys).run()
    assert outcome.seconds == pytest.approx(0.001 + (11 + 12 + 13) * 1e-3)


def test_who_comes_together_decodes_together() -> None:
    """Batches would cost as much as one after the other."""
    costs = Costs(PhaseFit(0.010, 0.001, 0.0), PhaseFit(0.0, 0.0005, 0.0))
    together = replayed(Row(0.0, 10, 3), Row(0.0, 10, 3), costs=costs).run()
    assert together.seconds == pytest.approx(0.010 + 2 * 0.012)
    alone = replayed(Row(0.0, 10, 3), Row(0.0, 10, 3), costs=costs, sequences_max=1).run()
    assert alone.seconds == pytest.approx(2 * (0.005 + 2 * 0.011))
    assert alone.waited["place"] > 0.3
    assert together.waited["place"] == 0.0


def test_time_passes_until_the_next_one_comes() -> None:
    """An idle server would seem busy, or its requests early."""
    outcome = replayed(Row(3.0, 10, 1), Row(8.0, 10, 1)).run()
    assert [ended.arrived for ended in outcome.ended] == [0.0, 5.0]
    assert outcome.seconds == pytest.approx(5.015)
    assert outcome.figures()["busy"] == pytest.approx(0.030 / 5.015)


def test_conversations_begin_with_what_was_said() -> None:
    """Chats would compute all of their context at every turn, or nothing of it."""
    shape = {"callers": 1, "turns": 3, "requests": 3, "lengths": LogNormal(40, 8)}
    kept = made_up(shape).run()
    assert [ended.prompt for ended in kept.ended] == [40, 88, 136]
    # Whole blocks of 8 tokens of what stood there, the last token of which was never computed.
    assert [ended.reused for ended in kept.ended] == [0, 40, 88]
    forgotten = made_up(shape, prefix_reuse=False).run()
    assert [ended.reused for ended in forgotten.ended] == [0, 0, 0]
    assert forgotten.seconds > kept.seconds


def test_rows_of_a_trace_share_what_they_name() -> None:
    """A trace with prefixes would be simulated as if there were none, or shared with strangers."""
    rows = [
        Row(0.0, 40, 2, "a", "system", 24),
        Row(1.0, 48, 2, "a", "system", 24),
        Row(2.0, 40, 2, "b", "system", 24),
        Row(3.0, 40, 2, "a", conversation="c"),
        Row(4.0, 64, 2, "a", conversation="c"),
    ]
    outcome = replayed(*rows).run()
    assert [ended.reused for ended in outcome.ended] == [0, 24, 0, 0, 40]


def test_who_finds_the_queue_full_is_refused_and_comes_again() -> None:
    """Overload would look like patience."""
    rows = [Row(0.0, 50, 5)] * 10
    outcome = replayed(*rows, sequences_max=1, max_queued=3).run()
    assert outcome.refused == {"queue full": 7}
    assert len(outcome.ended) == 3
    closed = made_up({"callers": 8, "requests": 30}, sequences_max=1, max_queued=3).run()
    assert closed.refused["queue full"] > 0
    assert closed.came == 30 == len(closed.ended) + closed.refused.total()


def test_what_never_fits_is_refused() -> None:
    """A trace with one long request would never end."""
    outcome = replayed(Row(0.0, 100, 5), Row(0.0, 20, 5), blocks=4).run()
    assert outcome.refused == {"too long": 1}
    assert [ended.prompt for ended in outcome.ended] == [20]


def test_a_limit_ends_what_would_be_longer() -> None:
    """Callers' limits would change nothing."""
    outcome = replayed(Row(0.0, 10, 50), run=Run(max_tokens=8)).run()
    assert (outcome.ended[0].output, outcome.ended[0].reason) == (8, EndReason.LENGTH)
    exact = replayed(Row(0.0, 10, 50), run=Run(exact=True)).run()
    assert (exact.ended[0].output, exact.ended[0].reason) == (50, EndReason.LENGTH)


def test_who_is_preempted_makes_its_answer_all_the_same() -> None:
    """Preemptions would make answers longer, and first tokens late."""
    shape = {"callers": 8, "lengths": LogNormal(30, 60), "requests": 40}
    outcome = made_up(shape, costs=PLAIN, blocks=30, forecast=False).run()
    assert sum(ended.preemptions for ended in outcome.ended) > 5
    assert {ended.output for ended in outcome.ended} == {60}
    # Each token after the first one takes a step.
    assert all(ended.tpot >= 0.00999 for ended in outcome.ended)
    assert outcome.figures()["recomputed"] > 0.0


def test_what_lies_between_steps_takes_its_time() -> None:
    """A server that does more than compute would be simulated too fast."""
    outcome = replayed(Row(0.0, 100, 5), run=Run(gap=0.002)).run()
    (ended,) = outcome.ended
    assert ended.tpot == pytest.approx(0.012)
    assert outcome.figures()["busy"] == pytest.approx(0.145 / 0.155, rel=0.001)


def test_noise_is_on_both_sides() -> None:
    """Noise would make a server slower on average."""
    outcome = replayed(Row(0.0, 10, 2000), run=Run(noise=0.5)).run()
    assert outcome.seconds == pytest.approx(0.015 + 1999 * 0.010, rel=0.02)
    assert outcome.seconds != pytest.approx(0.015 + 1999 * 0.010, rel=1e-6)


def test_goodput_is_of_those_within_the_targets() -> None:
    """A server that is slow for everybody would look as good as it is busy."""
    outcome = replayed(Row(0.0, 100, 5), Row(1.0, 10, 5)).run()
    assert outcome.figures(Targets(ttft=0.05))["good_requests"] == 0.5
    assert outcome.figures(Targets(tpot=0.009))["good_requests"] == 0.0
    good = outcome.figures(Targets(ttft=0.05, tpot=0.0101))["good_tokens_per_second"]
    assert good == pytest.approx(outcome.figures()["tokens_per_second"] / 2)


def test_tenants_come_by_their_weights_and_are_told_apart() -> None:
    """Who floods would be anybody."""
    shape = {"callers": 6, "requests": 200, "tenants": {"quiet": 1.0, "flood": 9.0}}
    figures = made_up(shape).run().figures()
    assert 0.8 < figures["tenants"]["flood"]["tokens"] < 0.98
    assert sum(each["tokens"] for each in figures["tenants"].values()) == pytest.approx(1.0)
    assert sum(each["requests"] for each in figures["tenants"].values()) == 200


def test_a_tenants_own_target_keeps_its_steps_short() -> None:
    """What a tenant was promised could not be tried before it is promised."""
    rows = [Row(0.0, 10, 200, "chat"), *(Row(0.1 * n, 200, 2, "batch") for n in range(10))]
    settings = CoreSettings(blocks=512, slots_per_block=8, step_stretch=0.0)
    gaps = []
    for target in ({}, {"chat": 20_000_000}):
        traffic = Replay(rows, 1)
        outcome = Simulation(settings, traffic, PLAIN, step_times=target).run()
        gaps.append(next(e.tpot for e in outcome.ended if e.tenant == "chat"))
    assert gaps[1] < 0.02 < gaps[0]


def signature(outcome: Outcome) -> tuple[object, ...]:
    return outcome.seconds, outcome.steps, tuple(outcome.ended), tuple(outcome.waited.values())


def test_a_seed_gives_the_same_run_again() -> None:
    """What an operator saw could not be looked at a second time."""

    def run(seed: int) -> Outcome:
        how = Run(seed=seed, noise=0.1, faults=EVERYTHING)
        return made_up({**POISSON, "turns": 3, "think": 1.0}, run=how, blocks=40).run()

    assert signature(run(3)) == signature(run(3))
    assert signature(run(3)) != signature(run(4))


def test_other_settings_are_asked_for_the_same() -> None:
    """Runs side by side would differ by their traffic, and not by what was changed."""
    few, many = (made_up({"callers": 5}, sequences_max=places).run() for places in (2, 8))
    assert Counter(e.prompt for e in few.ended) == Counter(e.prompt for e in many.ended)


def test_a_slow_step_takes_longer() -> None:
    """Stragglers would go unnoticed."""
    plain, slow = (
        replayed(Row(0.0, 100, 5), run=Run(faults=faults)).run()
        for faults in (Faults(), Faults(slow_step=Chance(1.0, 10.0)))
    )
    assert slow.seconds == pytest.approx(10 * plain.seconds)


def test_a_step_that_fails_ends_who_was_in_it() -> None:
    """A device that fails would cost nothing."""
    outcome = made_up(POISSON, run=Run(faults=Faults(fail_step=Chance(0.1)))).run()
    reasons = Counter(ended.reason for ended in outcome.ended)
    assert outcome.failed_steps > 3
    assert reasons[EndReason.FAILED] >= outcome.failed_steps
    assert reasons[EndReason.STOP] > 0
    assert outcome.audit is None


def test_callers_who_leave_are_not_answered() -> None:
    """Work for nobody would count as work."""
    faults = Faults(cancel=Chance(0.5, 0.2))
    outcome = made_up({"callers": 20}, run=Run(faults=faults), sequences_max=4).run()
    cancelled = [e for e in outcome.ended if e.reason is EndReason.CANCELLED]
    assert len(cancelled) > 10
    assert any(ended.first is None for ended in cancelled), "some while they waited"
    assert any(ended.first is not None for ended in cancelled), "some while they were answered"
    assert outcome.figures()["cancelled"] == len(cancelled)
    assert outcome.audit is None


def test_who_is_not_read_stands_still() -> None:
    """Slow readers would not hold memory."""
    (ended,) = replayed(Row(0.0, 10, 5), run=Run(faults=Faults(stall=Chance(1.0, 3.0)))).run().ended
    assert ended.tpot == pytest.approx((3.0 + 0.04) / 4, rel=0.02)


@pytest.mark.parametrize("seconds", [2.0, -2.0])
def test_a_clock_that_jumps_harms_nobody(seconds: float) -> None:
    """A clock that is set would end requests, or the books."""
    jumping = made_up(POISSON, run=Run(faults=Faults(clock_jump=Chance(0.2, seconds))))
    outcome = jumping.run()
    assert (jumping.clock / 1e9 - 1e6 - outcome.seconds) / seconds > 5
    assert {ended.reason for ended in outcome.ended} == {EndReason.STOP}
    assert outcome.audit is None


def test_everything_ends_with_clean_books() -> None:
    """A pool that is too small would starve somebody, or take one sequence's blocks for ever."""
    preempted = failed = 0
    for seed in range(1, 41):
        simulation = drawn(seed, steps=300)
        assert wrong_with(simulation) == [], f"seed {seed}"
        preempted += sum(ended.preemptions for ended in simulation.outcome.ended)
        failed += simulation.outcome.failed_steps
    assert preempted > 30, "pools were to be too small"
    assert failed > 10


def test_what_is_wrong_is_found() -> None:
    """Runs that find nothing would prove nothing."""
    simulation = drawn(1, steps=50)
    outcome = simulation.outcome
    outcome.ended[0] = outcome.ended[0]._replace(preemptions=4)
    outcome.came += 1
    outcome.audit = "a block has two owners"
    assert len(wrong_with(simulation)) == 3


def test_lengths_have_their_mean() -> None:
    """Traffic would be heavier or lighter than what was asked for."""
    shape = Shape(LogNormal(500, 200, 0.7), rate=3.0, requests=3000)
    traffic = MadeUp(shape, 1)
    requests = [traffic.take() for _ in range(3000)]
    assert traffic.next_at == math.inf
    assert np.mean([len(request.prompt) for request in requests]) == pytest.approx(500, rel=0.05)
    assert np.mean([request.output for request in requests]) == pytest.approx(200, rel=0.05)
    assert requests[-1].arrives == pytest.approx(1000, rel=0.1)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("slow=0.1", "no fault; there are slow_step"),
        ("slow_step", "is not slow_step=PROBABILITY"),
        ("slow_step=2", "between 0 and 1"),
        ("slow_step=0.1x-1", "is not more than 0"),
        ("fail_step=0.1x2", "leave out x2"),
        ("cancel=nan", "between 0 and 1"),
    ],
)
def test_faults_that_are_none_are_refused(text: str, sentence: str) -> None:
    """A fault that is misspelt would prove that a server bears it."""
    with pytest.raises(ValueError, match=sentence):
        Faults.parse(text)


def test_faults_and_costs_are_read_as_they_are_written() -> None:
    """A unit that is misread is a thousand times off."""
    assert Faults.parse("slow_step=0.01x3, cancel=0.5") == Faults(
        slow_step=Chance(0.01, 3.0), cancel=Chance(0.5, 5.0)
    )
    assert phase_fit("5ms,1.4ms,20ns") == PhaseFit(0.005, 0.0014, pytest.approx(2e-8))
    assert [seconds_of(text) for text in ("2", "2s", "3us")] == [2.0, 2.0, pytest.approx(3e-6)]
    for text in ("5ms", "1,2", "1,2,x", "0,0,1ns", "1..2,3,4", "-1,2,3"):
        with pytest.raises(ValueError, match=r"such as|no time"):
            phase_fit(text)
