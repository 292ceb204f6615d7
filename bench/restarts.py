"""Restarts of a server under load: no request that had not started may fail.

    python -m bench.restarts [--seconds 600] [--restarts 3] [--drain-timeout 10] [--rate 0.5]
                             [--streams 2 --stream-tokens 4000] [--serve="OPTIONS"] [--json FILE]

A server on a fixed port gets short requests at the times of a Poisson process, and a few long
streams beside them that outlast a drain. At equal distances it gets SIGTERM, and as soon as it has
ended another one is started on the same port. Requests that are not accepted yet and end with
UNAVAILABLE are sent again: after the RetryInfo's delay, or a short one where there is no server.
docs/load.md has the bars and the definitions.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import shlex
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench import machine, report
from bench.arms.arm import ArmSettings, NotRun, default_cache, default_cores
from bench.arms.kvledger import Kvledger
from bench.arms.process import free_port, run_main
from bench.duress import Bar, bars_text
from bench.load import OK, STOPPED, CallFailed, Words, percentiles
from bench.retrying import Asked, RetryingClient
from bench.serve import count, positive
from kvledger import _core

# Seconds beyond --drain-timeout in which a server must have ended; it needs some to say goodbye.
_GOODBYE = 15.0
# The lengths of long streams, as shares: not all of them may be near their end at one time.
_SHARES = (1.0, 0.6, 0.8)
# How much sooner than --drain-timeout a stream may seem to be cut, for two clocks that tick.
_TICK = 0.05


@dataclass
class Restart:
    """One of them; times in s of perf_counter."""

    asked: float  # when SIGTERM was sent
    ended: float = math.nan  # when the process had ended
    exit_status: int | None = None  # None: it did not end by itself
    serving: float = math.nan  # when the next one said that it serves

    def first_accepted(self, requests: Sequence[Asked]) -> float:
        """When the next server accepted the first request; nan if it never did."""
        times = (asked.accepted for asked in requests if asked.accepted is not None)
        return min((at for at in times if at > self.ended), default=math.nan)

    def running(self, requests: Sequence[Asked]) -> int:
        """Requests that were accepted and not done when it was asked to end."""
        return sum(
            asked.accepted is not None
            and asked.accepted < self.asked
            and (asked.ended is None or asked.ended > self.asked)
            for asked in requests
        )


@dataclass
class Restarts:
    """What a run showed."""

    restarts: list[Restart] = field(default_factory=list)
    short: list[Asked] = field(default_factory=list)
    long: list[Asked] = field(default_factory=list)

    @property
    def requests(self) -> list[Asked]:
        """All of both kinds that were not ended by this program."""
        return [asked for asked in (*self.short, *self.long) if asked.status != STOPPED]

    @property
    def not_started(self) -> list[Asked]:
        """Those that failed before they were accepted, all attempts included."""
        return [a for a in self.requests if a.status != OK and a.accepted is None]

    @property
    def cut(self) -> list[Asked]:
        """Those that failed after they were accepted."""
        return [a for a in self.requests if a.status != OK and a.accepted is not None]

    def cut_after(self, asked: Asked) -> float:
        """Seconds from the last SIGTERM before its end to its end; nan if there was none."""
        assert asked.ended is not None
        signals = [r.asked for r in self.restarts if r.asked <= asked.ended]
        return asked.ended - max(signals, default=math.nan)


async def short_requests(
    client: RetryingClient, words: Words, result: Restarts, stop: asyncio.Event, options: Any
) -> None:
    """Sends short requests at the times of a Poisson process until `stop`; waits for their ends."""
    chance = random.Random(options.seed)
    tasks = []
    due = time.perf_counter()
    while not stop.is_set():
        asked = Asked(due, options.output)
        result.short.append(asked)
        tasks.append(asyncio.create_task(client.ask(words.draw(options.prompt), asked)))
        due += chance.expovariate(options.rate)
        await asyncio.sleep(due - time.perf_counter())
    await asyncio.gather(*tasks)


async def long_streams(
    client: RetryingClient, words: Words, result: Restarts, place: int, options: Any
) -> None:
    """One long stream after the other until it is cancelled; the last is then STOPPED."""
    output = max(1, round(options.stream_tokens * _SHARES[place % len(_SHARES)]))
    while True:
        asked = Asked(time.perf_counter(), output)
        result.long.append(asked)
        try:
            await client.ask(words.draw(options.prompt), asked)
        except asyncio.CancelledError:
            asked.status = STOPPED
            raise


async def supervise(arm: Kvledger, result: Restarts, started: float, options: Any) -> None:
    """Ends the server and starts another one, so often, at equal distances. Raises NotRun."""
    for number in range(1, options.restarts + 1):
        at = started + options.seconds * number / (options.restarts + 1)
        await asyncio.sleep(at - time.perf_counter())
        restart = Restart(time.perf_counter())
        result.restarts.append(restart)
        restart.exit_status = await arm.drain(options.drain_timeout + _GOODBYE)
        restart.ended = time.perf_counter()
        await arm.start()
        restart.serving = time.perf_counter()
        print(
            f"restart {number}: ended after {restart.ended - restart.asked:.1f} s with status "
            f"{restart.exit_status}, loaded in {restart.serving - restart.ended:.1f} s",
            flush=True,
        )
    await asyncio.sleep(started + options.seconds - time.perf_counter())


async def put_load(arm: Kvledger, port: int, options: argparse.Namespace) -> Restarts:
    """The whole run on a server that is started. Raises NotRun and CallFailed."""
    result = Restarts()
    vocabulary = (await arm.client.model()).vocabulary_tokens
    client = RetryingClient(f"127.0.0.1:{port}", options.patience, options.seed)
    words, stop = Words(options.seed, vocabulary), asyncio.Event()
    short = asyncio.create_task(short_requests(client, words, result, stop, options))
    long = [
        asyncio.create_task(long_streams(client, words, result, place, options))
        for place in range(options.streams)
    ]
    try:
        await supervise(arm, result, time.perf_counter(), options)
        stop.set()
        await short
    finally:
        for task in (short, *long):
            task.cancel()
        await asyncio.gather(short, *long, return_exceptions=True)
        await client.close()
    return result


def bars(result: Restarts, drain_timeout: float) -> list[Bar]:
    """What the run had to show."""
    cut = [result.cut_after(asked) for asked in result.cut]
    earliest = min(cut, default=math.nan)
    in_time = sum(not seconds >= drain_timeout - _TICK for seconds in cut)
    others = sum(asked.status != "UNAVAILABLE" for asked in result.cut)
    statuses = [restart.exit_status for restart in result.restarts]
    running = [restart.running(result.requests) for restart in result.restarts]
    retries = sum(asked.told + asked.untold for asked in result.requests)
    return [
        Bar(
            "no error before a stream is accepted",
            not result.not_started and retries > 0,
            f"{len(result.not_started)} of {len(result.requests)} requests, {retries} retries",
            "none, and at least one retry",
        ),
        Bar(
            "streams are cut by the drain's end alone",
            in_time == 0 and others == 0,
            f"{len(cut)} cut, the first {earliest:.2f} s after SIGTERM, {others} not UNAVAILABLE",
            f"none before {drain_timeout:g} s, all UNAVAILABLE",
        ),
        Bar(
            "something ran at every SIGTERM",
            all(running) and bool(cut),
            f"{running} running, {len(cut)} of them longer than the drain",
            "at least one each, and one that is cut",
        ),
        Bar(
            "servers end well",
            all(status == 0 for status in statuses),
            f"exit statuses {statuses}",
            "all 0",
        ),
        Bar(
            "servers come back",
            all(r.first_accepted(result.requests) >= r.ended for r in result.restarts),
            f"{len(result.restarts)} restarts",
            "a request accepted after each",
        ),
    ]


def counts(result: Restarts) -> dict[str, Any]:
    """The figures of a run, for the eye and for --json."""
    requests = result.requests
    waits = [a.accepted - a.due for a in result.short if a.accepted is not None]
    return {
        "requests": len(requests),
        "statuses": dict(Counter(asked.status for asked in requests)),
        "reasons": {a.status: a.reason for a in reversed(requests) if a.status != OK},
        "retried_requests": sum(asked.told + asked.untold > 0 for asked in requests),
        "retries_told": sum(asked.told for asked in requests),
        "retries_untold": sum(asked.untold for asked in requests),
        "errors_before_accepted": len(result.not_started),
        "errors_after_accepted": len(result.cut),
        "cut_after_seconds": [result.cut_after(asked) for asked in result.cut],
        "short_wait": {**percentiles(waits), "most": max(waits, default=math.nan)},
        "restarts": [
            {
                "drain_seconds": restart.ended - restart.asked,
                "exit_status": restart.exit_status,
                "start_seconds": restart.serving - restart.ended,
                "running": restart.running(requests),
                "without_server_seconds": restart.first_accepted(requests) - restart.asked,
            }
            for restart in result.restarts
        ],
    }


def counts_text(found: dict[str, Any]) -> str:
    """The same for a terminal."""
    lines = [
        report.status_line(found["statuses"], found["reasons"]),
        f"retries {found['retries_told'] + found['retries_untold']} of "
        f"{found['retried_requests']} requests: {found['retries_told']} told when, "
        f"{found['retries_untold']} without a server",
        f"errors before accepted {found['errors_before_accepted']}, "
        f"after {found['errors_after_accepted']}",
        f"short requests waited to be accepted: p50 {found['short_wait']['p50']:.2f} s, "
        f"p99 {found['short_wait']['p99']:.2f} s, at most {found['short_wait']['most']:.2f} s",
        f"{'restart':10}{'running':>10}{'drain s':>10}{'start s':>10}{'without s':>12}{'exit':>8}",
    ]
    for number, row in enumerate(found["restarts"], 1):
        lines.append(
            f"{number:<10}{row['running']:>10}{row['drain_seconds']:>10.1f}"
            f"{row['start_seconds']:>10.1f}{row['without_server_seconds']:>12.1f}"
            f"{row['exit_status']!s:>8}"
        )
    return "\n".join(lines)


async def run(options: argparse.Namespace) -> int:
    """The whole program; returns its exit status, which is 0 only if all bars were passed."""
    cores = default_cores(options.threads)
    settings = ArmSettings(default_cache(), Path(options.model), cores, options.threads)
    header = machine.header(_core.CpuKernels(options.threads))
    port = free_port()
    extra = [f"--drain-timeout={options.drain_timeout:g}", *shlex.split(options.serve)]
    arm = Kvledger(settings, extra, port)
    workload = (
        f"open loop, {options.rate:g} a second for {options.seconds:g} s: prompts of "
        f"{options.prompt}, answers of {options.output} tokens; {options.streams} streams of up "
        f"to {options.stream_tokens}; {options.restarts} restarts; seed {options.seed}"
    )
    print(f"{header}\n{arm.described}\n{workload}\n", flush=True)
    try:
        await arm.start()
        result = await put_load(arm, port, options)
    except (NotRun, CallFailed, ValueError) as error:
        print(f"bench.restarts: {error}", file=sys.stderr)
        return 1
    finally:
        await arm.stop()
    figures, found = counts(result), bars(result, options.drain_timeout)
    print(f"\n{counts_text(figures)}\n\n{bars_text(found)}")
    if options.json is not None:
        about = {"command": sys.argv[1:], "machine": header, "server": arm.described}
        about |= {"workload": workload, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        content = {**about, **figures, "bars": [asdict(bar) for bar in found]}
        report.save_json(options.json, content)
        print(f"saved: {options.json}")
    return 0 if all(bar.passed for bar in found) else 1


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=positive, default=600.0, help="of the whole run")
    parser.add_argument("--restarts", type=count, default=3)
    parser.add_argument("--drain-timeout", type=positive, default=10.0, help="of the server")
    parser.add_argument("--rate", type=positive, default=0.5, help="short requests a second")
    parser.add_argument("--prompt", type=count, default=64, help="tokens of a prompt")
    parser.add_argument("--output", type=count, default=32, help="tokens of a short answer")
    parser.add_argument("--streams", type=count, default=2, help="long ones at once")
    parser.add_argument("--stream-tokens", type=count, default=4000, help="of the longest")
    parser.add_argument(
        "--patience", type=positive, default=120.0, help="seconds until a retry is the last"
    )
    parser.add_argument("--serve", default="", metavar="OPTIONS", help="more of the server's")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--threads", type=count, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(run_main(run(parse())))
