"""What the fuzz programs written in Python share: runs keyed by seed and number, mutations of bytes
and of JSON, and limits on what a run may take.

Every run draws from a generator keyed by seed and run, so a failure, which prints both, is replayed
alone with `--first RUN --runs 1`.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

# Inputs have some kilobytes; whatever takes this long for one of them does not end. Processor time,
# so that a busy machine is no failure.
RUN_SECONDS_MAX = 5.0
# What a whole fuzz program may grow by, whatever sizes its inputs claim to have.
GROWTH_BYTES_MAX = 256 << 20

_WHOLE_NUMBERS = (
    *(
        0,
        1,
        -1,
        2,
        7,
        63,
        64,
        255,
        1 << 16,
        (1 << 31) - 1,
        1 << 31,
        1 << 32,
        (1 << 48) - 1,
        1 << 48,
    ),
    *((1 << 63) - 1, 1 << 63, 1 << 64, -(1 << 63)),
)
NUMBERS: tuple[Any, ...] = (*_WHOLE_NUMBERS, 10**30, 0.5, -0.0, 1e308, 1e-320)
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    "",
    "a",
    "\0",
    "\ud800",
    "x" * 300,
    [],
    {},
    [[]],
    {"": 0},
)


def peak_bytes() -> int:
    """Most memory that the process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def mutate_bytes(chance: random.Random, data: bytes) -> bytes:
    """Flips, cuts, doubles or replaces some of it."""
    out = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4, 16))):
        if not out:
            return bytes(chance.randbytes(chance.randrange(64)))
        place = chance.randrange(len(out))
        kind = chance.randrange(6)
        if kind == 0:
            out[place] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del out[place:]
        elif kind == 2:
            del out[place : place + chance.randrange(1, 64)]
        elif kind == 3:
            run = out[place : place + chance.randrange(1, 64)]
            at = chance.randrange(len(out))
            out[at:at] = run
        elif kind == 4:
            number = chance.choice(_WHOLE_NUMBERS)
            out[place : place + 8] = number.to_bytes(16, "little", signed=True)[:8]
        else:
            out[place : place + 4] = chance.randbytes(4)
    return bytes(out)


def mutate_json(chance: random.Random, value: Any, depth: int = 0) -> Any:
    """The value with something in it changed, removed, doubled, renamed or made huge."""
    if isinstance(value, dict) and value and depth < 8 and chance.random() < 0.85:
        changed = dict(value)
        key = chance.choice(list(changed))
        kind = chance.randrange(8)
        if kind == 0:
            del changed[key]
        elif kind == 1:
            changed[chance.choice(("", "a", key + "x", "__metadata__"))] = changed.pop(key)
        else:
            changed[key] = mutate_json(chance, changed[key], depth + 1)
        return changed
    if isinstance(value, list) and value and depth < 8 and chance.random() < 0.7:
        changed_list = list(value)
        place = chance.randrange(len(changed_list))
        kind = chance.randrange(5)
        if kind == 0:
            del changed_list[place]
        elif kind == 1:
            changed_list *= chance.choice((2, 3))
        else:
            changed_list[place] = mutate_json(chance, changed_list[place], depth + 1)
        return changed_list
    if isinstance(value, int) and not isinstance(value, bool) and chance.random() < 0.5:
        return value + chance.choice((-1, 1, 8, -8, 1 << 32))
    return chance.choice((chance.choice(NUMBERS), chance.choice(VALUES), nested(chance)))


def nested(chance: random.Random) -> Any:
    """Lists in lists."""
    value: Any = []
    for _ in range(chance.choice((1, 10, 500))):
        value = [value]
    return value


def json_bytes(value: Any) -> bytes:
    """As a file holds it; what JSON cannot say comes out in Python's own way."""
    return json.dumps(value, ensure_ascii=True).encode()


def check_sentence(sentence: str) -> None:
    """That a refusal is one line, and no page."""
    assert "\n" not in sentence, sentence
    assert 5 < len(sentence) < 700, sentence


def drive(
    name: str, target: Callable[[random.Random], str], arguments: list[str] | None = None
) -> Counter[str]:
    """Runs a target as the command line says and counts what its runs came to.

    A run fails by raising. Exits with 1 and how to replay it.
    """
    parser = argparse.ArgumentParser(prog=name)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    outcomes: Counter[str] = Counter()
    slowest = 0.0
    target(random.Random(-1))  # what is made once is no growth
    before = peak_bytes()
    for run in range(options.first, options.first + options.runs):
        started = time.process_time()
        try:
            outcomes[target(random.Random(f"{options.seed} {run}"))] += 1
            taken = time.process_time() - started
            assert taken < RUN_SECONDS_MAX, f"a run took {taken:.1f} s"
            assert peak_bytes() - before < GROWTH_BYTES_MAX, "memory grew"
        except BaseException:
            traceback.print_exc()
            print(f"failed; replay with --seed {options.seed} --first {run} --runs 1")
            sys.exit(1)
        slowest = max(slowest, taken)
    counts = ", ".join(f"{outcome} {count}" for outcome, count in outcomes.most_common())
    print(f"{name}: runs {options.runs}, seed {options.seed}; {counts}")
    print(f"{name}: slowest {slowest * 1e3:.1f} ms")
    return outcomes
