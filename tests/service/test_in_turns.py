"""How many decode of those that run: against the steps of a naive simulation, and at its ends."""

from __future__ import annotations

import random

import pytest

from kvledger.diagnosis.turns import Request, Turns, in_turns


def request(output: float, prompt: float, beside: float, alone: float = 256.0) -> Request:
    return Request(output, prompt, keys=0.0, chunks=1.0, beside=beside, alone=alone)


def stepped(running: int, asked: Request, steps: int = 20_000) -> Turns:
    """The same, step by step: lengths from half to half as much again, prompts in equal parts."""
    chance = random.Random(7)
    # What is left of each: prompt tokens, then output tokens.
    left = [[asked.prompt * chance.uniform(0.5, 1.5), 0.0] for _ in range(running)]
    decoded = decode_steps = prompt_steps = ended = 0
    for _ in range(steps):
        decoding = [each for each in left if each[0] <= 0.0]
        prompts = [each for each in left if each[0] > 0.0]
        decode_steps += bool(decoding)
        prompt_steps += bool(prompts)
        decoded += len(decoding)
        for each in prompts:
            each[0] -= (asked.beside if decoding else asked.alone) / len(prompts)
            if each[0] <= 0.0:
                each[1] = asked.output * chance.uniform(0.5, 1.5)
        for each in decoding:
            each[1] -= 1.0
            if each[1] <= 0.0:
                each[0] = asked.prompt * chance.uniform(0.5, 1.5)
                ended += 1
    return Turns(decoded / decode_steps, prompt_steps / ended)


@pytest.mark.parametrize("running", [2, 4, 8, 16])
@pytest.mark.parametrize(
    "asked",
    [
        request(60, 120, beside=9),
        request(60, 120, beside=40),
        request(80, 60, beside=12),
        request(60, 600, beside=9),
        request(16, 1200, beside=256),
    ],
    ids=lambda asked: f"{asked.prompt}+{asked.output} by {asked.beside}",
)
def test_it_is_what_comes_of_the_steps(running: int, asked: Request) -> None:
    """Operators would be told of decoding sequences that wait for their prompts."""
    said, came = in_turns(running, asked), stepped(running, asked)
    assert said.decoding == pytest.approx(came.decoding, rel=0.12)
    assert said.chunks == pytest.approx(came.chunks, rel=0.15)


def test_alone_nobody_waits() -> None:
    """The least there can be would depend on chunks that it does not have."""
    turns = in_turns(1, request(60, 512, beside=1))
    assert turns == Turns(decoding=1.0, chunks=2.0)


def test_without_prompts_all_decode() -> None:
    """A chat whose history is all cached would seem to be held up."""
    assert in_turns(8, request(60, 0, beside=0, alone=0)).decoding == pytest.approx(8.0)


def test_more_places_than_prompts_can_fill_stay_empty() -> None:
    """Somebody would buy places that only hold prompts."""
    most = 60 / (120 / 9)
    for running in (64, 400, 512, 513, 5_000_000):
        turns = in_turns(running, request(60, 120, beside=9))
        # A little more than that, for when nobody decodes prompts come faster.
        assert most <= turns.decoding < 1.02 * most


def test_between_whole_numbers_it_is_in_between() -> None:
    """An average of 3.5 that run would be taken for 3."""
    asked = request(60, 120, beside=9)
    three, four = in_turns(3, asked), in_turns(4, asked)
    assert in_turns(3.5, asked).decoding == pytest.approx((three.decoding + four.decoding) / 2)
    assert in_turns(0.2, asked) == in_turns(1, asked)
