"""Whether the time of a refusal tells how much of a wrong token is right (S19).

    python -m bench.token_timing [--samples 100000] [--seed 1]

A registry with some tenants looks at tokens that nobody has, as a listener does for each call: from
the metadata to the refusal. Half of them share all but the last letters with a token that is good,
half share nothing but what all tokens begin with; they come in random order, each once. If their
times could be of one distribution (two-sample Kolmogorov-Smirnov), time says nothing of how much is
right. Two more arms say whether that shows anything: a comparison that stops at the first wrong
letter must be told apart, and where nothing is looked at there must be nothing to tell.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.kolmogorov import distance, p_value
from bench.serve import count
from kvledger.errors import NotAuthenticated
from kvledger.tenants import editing
from kvledger.tenants.authentication import AUTHORIZATION, Authenticator, Transport
from kvledger.tenants.registry import Registry
from kvledger.tenants.roles import Role
from kvledger.tenants.tokens import LENGTH, PREFIX

# What is wanted: no difference for the registry, and a plain one for what leaks.
P_SAME = 0.01
P_LEAKY = 1e-8
P_NOTHING = 1e-4
TENANTS = 16
# Letters at the end of a near token that are not the good one's.
_OTHER_LETTERS = 4
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
# Rounds that are not counted.
_WARM_UP = 2_000
# Steps in which the smallest leak is looked for, in nanoseconds: more than a tick of the clock.
# Anything less would be seen at once, because no time is ever measured between two ticks.
_LEAK_STEP = 20
_LEAK_MOST = 20_000

_HEADER = "Bearer "

# Looks at a header with a token that must be refused.
Look = Callable[[str], None]
# Nanoseconds by kind.
Times = dict[str, list[int]]


def wrong_tokens(good: Sequence[str], samples: int, chance: random.Random) -> list[tuple[str, str]]:
    """(kind, token): `samples` of near ones and of far ones, in random order, none of them good."""
    tokens: list[tuple[str, str]] = []
    for _ in range(samples):
        real = chance.choice(good)
        end = "".join(chance.choices(_LETTERS, k=_OTHER_LETTERS))
        # The first letter of the end is surely another one.
        if end[0] == real[-_OTHER_LETTERS]:
            end = chance.choice([each for each in _LETTERS if each != end[0]]) + end[1:]
        tokens.append(("near", real[:-_OTHER_LETTERS] + end))
        rest = "".join(chance.choices(_LETTERS, k=LENGTH - len(PREFIX)))
        tokens.append(("far", PREFIX + rest))
    chance.shuffle(tokens)
    # Made anew, all in the same way and in the order of their use: where in memory a token lies
    # takes time too.
    return [(kind, "".join(list(token))) for kind, token in tokens]


def measure(look: Look, tokens: Sequence[tuple[str, str]]) -> Times:
    """What each look took, after some that are not counted."""
    times: Times = {"near": [], "far": []}
    clock = time.perf_counter_ns
    for _, token in tokens[:_WARM_UP]:
        look(_HEADER + token)
    gc.collect()
    gc.disable()
    try:
        for kind, token in tokens:
            # Before the clock starts: fetching a token from memory is not the registry's time.
            header = _HEADER + token
            began = clock()
            look(header)
            # First of all: what is looked up before the clock is asked again would be timed too.
            took = clock() - began
            times[kind].append(took)
    finally:
        gc.enable()
    return times


def registry_of(folder: Path) -> tuple[Registry, list[str]]:
    """A registry with tenants, and their tokens."""
    path, tokens = folder / "tenants.json", []
    for number in range(TENANTS):
        token = editing.change(
            path,
            lambda values, name=f"tenant-{number}": editing.add(
                values, name, ("client",), (), True
            ),
            create=True,
        )
        tokens.append(str(token))
    return Registry(path), tokens


def refusing(authenticator: Authenticator) -> Look:
    """What a listener does with a header; raises AssertionError for a token that is good."""

    def look(header: str) -> None:
        try:
            authenticator.identify(Role.CLIENT, ((AUTHORIZATION, header),), tuple)
        except NotAuthenticated:
            return
        raise AssertionError("a wrong token was taken")

    return look


def leaky(good: Sequence[str]) -> Look:
    """A comparison with each token that ends at the first letter that differs."""

    headers = [_HEADER + token for token in good]

    def look(header: str) -> None:
        for real in headers:
            for a, b in zip(header, real, strict=True):
                if a != b:
                    break

    return look


def smallest_leak(times: Times) -> int | None:
    """Nanoseconds by which near tokens would have to be slower for the test to see it."""
    near, far = ([each // _LEAK_STEP for each in times[kind]] for kind in ("near", "far"))
    for steps in range(1, _LEAK_MOST // _LEAK_STEP + 1):
        if p_value([each + steps for each in near], far) < P_SAME:
            return steps * _LEAK_STEP
    return None


def verdict(served: Times, leaks: Times, nothing: Times) -> list[str]:
    """What is wrong; nothing if time tells nothing, and the test can see, and sees no ghosts."""
    wrong = []
    if (p := p_value(served["near"], served["far"])) < P_SAME:
        wrong.append(f"near and far tokens take different times: p = {p:.2g}")
    if (p := p_value(leaks["near"], leaks["far"])) > P_LEAKY:
        wrong.append(f"a comparison that leaks is not seen: p = {p:.2g}; nothing is shown")
    if (p := p_value(nothing["near"], nothing["far"])) < P_NOTHING:
        wrong.append(f"taking the time tells them apart: p = {p:.2g}; nothing is shown")
    return wrong


def report(served: Times, leaks: Times, nothing: Times) -> str:
    """The table, and the smallest leak."""
    lines = [f"{'nanoseconds, medians':34}{'near':>9}{'far':>9}{'KS':>9}{'p':>10}"]
    arms = {
        "the registry": served,
        "stops at the first wrong letter": leaks,
        "nothing is looked at": nothing,
    }
    for name, times in arms.items():
        near, far = times["near"], times["far"]
        lines.append(
            f"{name:34}{statistics.median(near):9.0f}{statistics.median(far):9.0f}"
            f"{distance(near, far):9.4f}{p_value(near, far):10.2g}"
        )
    leak = smallest_leak(served)
    lines.append(f"smallest leak that it would see: {leak or f'more than {_LEAK_MOST}'} ns")
    return "\n".join(lines)


def run(options: argparse.Namespace) -> int:
    """The whole program; 0 if time tells nothing, 1 if it does, or if nothing is shown."""
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="kvledger-tokens-") as folder:
        registry, good = registry_of(Path(folder))
        tokens = wrong_tokens(good, options.samples, chance)
        served = measure(refusing(Authenticator(registry, Transport.UNIX)), tokens)
        leaks = measure(leaky(good), tokens)
        nothing = measure(lambda header: None, tokens)
    print(
        f"{options.samples} near and {options.samples} far tokens, {TENANTS} tenants, seed "
        f"{options.seed}\n{report(served, leaks, nothing)}"
    )
    wrong = verdict(served, leaks, nothing)
    print("\n".join(f"WRONG: {sentence}" for sentence in wrong) or "time tells nothing of a token")
    return 1 if wrong else 0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=count, default=100_000, help="of each kind")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(run(parse()))
