"""Whether a server that works for long grows: memory, descriptors, threads and held blocks.

    python tests/soak/drift.py --minutes 60

The load of mixed_load.py runs in four quarters. After each, when every request has its receipt, the
process is looked at; what it has after the fourth must be what it had after the first. Server and
callers share the process, so the callers must not grow either.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1] / "service" / sub) for sub in ("", "rpc")]

from drawn_requests import templates
from mixed_load import PRESSED, Load, ReceiptLog, Verdict
from server_harness import running
from tiny_model import write_gguf
from tiny_server import AuditingCore, TinyServer

from kvledger import event_loop

_QUARTERS = 4
# What may be more after the last quarter than after the first.
RSS_GROWTH_MAX = 0.02
RSS_SLACK_BYTES = 8 << 20  # what allocators keep differs by this much from look to look
DESCRIPTORS_MORE_MAX = 4
THREADS_MORE_MAX = 4  # of pools that make theirs when they need them


@dataclass(frozen=True)
class Look:
    """What the process has while nobody is served."""

    rss: int
    descriptors: int
    threads: int
    blocks_in_use: int
    open_requests: int

    def __str__(self) -> str:
        return (
            f"{self.rss / 1e6:.1f} MB, {self.descriptors} descriptors, {self.threads} threads, "
            f"{self.blocks_in_use} blocks in use, {self.open_requests} requests open"
        )


def look_at(server: TinyServer) -> Look:
    """The process and its books now."""
    gc.collect()
    fields = Path("/proc/self/statm").read_text().split()
    core: Any = server.core
    return Look(
        rss=int(fields[1]) * os.sysconf("SC_PAGE_SIZE"),
        descriptors=len(os.listdir("/proc/self/fd")),
        threads=len(os.listdir("/proc/self/task")),
        blocks_in_use=sum(core.balances.values()) - core.balances["free"] - core.balances["cached"],
        open_requests=len(server.server._admission.open_requests),
    )


def grown(first: Look, last: Look) -> list[str]:
    """What is more than it may be."""
    wrong = []
    if last.rss > first.rss * (1 + RSS_GROWTH_MAX) + RSS_SLACK_BYTES:
        wrong.append(f"memory grew from {first.rss} to {last.rss} bytes")
    if last.descriptors > first.descriptors + DESCRIPTORS_MORE_MAX:
        wrong.append(f"descriptors grew from {first.descriptors} to {last.descriptors}")
    if last.threads > first.threads + THREADS_MORE_MAX:
        wrong.append(f"threads grew from {first.threads} to {last.threads}")
    if last.blocks_in_use or last.open_requests:
        wrong.append(f"something is still held: {last}")
    return wrong


async def drift(
    minutes: float, seed: int, workers: int, asked: int, most: int = 1 << 40
) -> tuple[Verdict, list[Look]]:
    """Four quarters of load, of `most` requests each at most, and a look after each."""
    looks = []
    with tempfile.TemporaryDirectory() as folder:
        path = write_gguf(Path(folder) / "tiny.gguf", seed=seed)
        server = TinyServer(path, *PRESSED, core=AuditingCore, log=ReceiptLog())
        load = Load(server, templates(seed, asked), path)
        await load.answer_alone()
        sent = itertools.count()
        async with running(server):
            for quarter in range(_QUARTERS):
                until = time.monotonic() + 60 * minutes / _QUARTERS
                this = itertools.takewhile(lambda _, end=until: time.monotonic() < end, sent)
                await load.run(itertools.islice(this, most), seed, workers)
                server.ends.clear()  # the harness's own notes
                looks.append(look_at(server))
                print(f"after quarter {quarter + 1}: {looks[-1]}", flush=True)
    return load.verdict, looks


def main() -> int:
    """0 if nothing grew and nothing was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=24)
    parser.add_argument("--templates", type=int, default=200)
    options = parser.parse_args()
    verdict, looks = event_loop.run(
        drift(options.minutes, options.seed, options.workers, options.templates)
    )
    print(verdict)
    wrong = verdict.wrong[:20] + grown(looks[0], looks[-1])
    for fault in wrong:
        print(f"wrong: {fault}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
