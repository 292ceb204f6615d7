"""Simulated servers with settings and traffic of a seed: is everybody answered, do the books hold.

    python tests/soak/simulated_servers.py --seeds 1000 --steps 10000 [--seed 1]

Each seed runs so many steps and then until everybody has ended. A failure prints its seed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "service"))

from simulated import drawn, wrong_with


def main() -> int:
    """The whole program; its exit status is 0 only if nothing was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    began, counts = time.monotonic(), Counter[str]()
    for seed in range(options.seed, options.seed + options.seeds):
        simulation = drawn(seed, options.steps)
        if wrong := wrong_with(simulation):
            print(f"seed {seed}: {'; '.join(wrong)}", file=sys.stderr)
            return 1
        outcome = simulation.outcome
        counts["steps"] += outcome.steps
        counts["requests"] += outcome.came
        counts["refused"] += outcome.refused.total()
        counts["preemptions"] += sum(ended.preemptions for ended in outcome.ended)
        counts["failed steps"] += outcome.failed_steps
    seconds = time.monotonic() - began
    print(f"{options.seeds} seeds from {options.seed}: {dict(counts)}, {seconds:.0f} s")
    if min(counts.values()) == 0:
        print("a run that meets no fault and no pressure proves nothing", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
