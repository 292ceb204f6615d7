"""Whether the books of a server that is killed again and again add up, to the nanosecond.

    python tests/soak/conservation.py --minutes 10 --kills 6 --seed 1

`kvledger serve` runs as a process of its own over a tiny model, with a pool that is too small,
tenants with limits, a share group, a public prefix, prices and files of receipts; its callers share
beginnings, ask for several samples, cancel, are late, read slowly or not at all, and are refused.
Some processes are killed in the middle of it, some stop in the middle of it, the last one when
all is quiet. All write into one folder.

Compared are what WatchLedger shows ten times a second, what tenants' statements say between two
looks at the ledger, what callers were told, what the files have, and what `kvledger statement`
makes of them (conserved_books.py). Exit status 1 says that something differs, and what.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [
        str(Path(__file__).parents[1] / folder)
        for folder in ("service", "service/rpc", "integration")
    ]

import grpc
from conserved_books import (
    Files,
    Told,
    compare,
    differing,
    is_quiet,
    last_line_faults,
    ledger_faults,
    order_faults,
    pool_line_faults,
    quiet_faults,
    read_files,
    statement_faults,
    summed,
)
from conserved_traffic import (
    POOL_BLOCKS,
    PUBLIC,
    PUBLIC_TEXT,
    TENANTS,
    Traffic,
    make_tenants,
)
from server_process import PATIENCE, ServerProcess, environment
from tiny_model import write_gguf

from kvledger.v1 import ledger_pb2 as pb
from kvledger.v1 import ledger_pb2_grpc

# A small pool and a small budget: prompts are chunked and sequences preempted.
_PRESSED = (
    *("--kv-blocks", str(POOL_BLOCKS), "--block-tokens", "16", "--token-budget", "24"),
    *("--max-sequences", "16", "--max-queued", "24", "--mailbox-tokens", "8"),
    *("--stall-timeout", "1.0", "--priority-aging", "0.05", "--threads", "1"),
    *("--drain-timeout", "0.2", "--books-file-bytes", "256KiB"),
)
_PRICES = 'unit = "EUR"\nper_device_hour = 2.5\nmemory_share = 0.6\ncompute_share = 0.4\n'
_WATCH_SECONDS = 0.1
# From one quiet moment to the next, at least, in seconds.
_QUIET_SECONDS = 12.0
# How long files may take to have what has ended: mostly 50 ms, but not on a busy machine.
_WRITTEN_SECONDS = 5.0
# What is summed of the files and by `kvledger statement`.
_SUMMED = (
    *("prompt_tokens", "output_tokens", "computed_tokens", "recomputed_tokens", "shared_tokens"),
    *("reused_own_tokens", "reused_group_tokens", "reused_public_tokens", "uncached_tokens"),
    *("held", "reserved", "sharing_saved", "preemptions", "queue", "preempted", "compute"),
)
# How a process ends.
KILL, STOP_BUSY, STOP = "killed", "stopped under load", "stopped"


@dataclass
class Result:
    """What came of a run."""

    seconds: float = 0.0
    ends: Counter[str] = field(default_factory=Counter)  # of processes
    codes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)  # of receipts
    sums: Counter[str] = field(default_factory=Counter)
    messages: int = 0
    statements: int = 0
    quiet: int = 0
    receipts: int = 0
    compared: int = 0
    untold: int = 0
    lost: int = 0
    pool_lines: int = 0
    torn: int = 0
    several_samples: int = 0
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        def counted(counts: Counter[str]) -> str:
            return ", ".join(f"{name} {count}" for name, count in counts.most_common())

        sums = self.sums
        return "\n".join(
            (
                f"{sum(self.codes.values())} requests in {self.seconds:.0f} s: "
                f"{counted(self.codes)}",
                f"processes: {counted(self.ends)}",
                f"{self.receipts} lines of receipts ({counted(self.reasons)}), {self.torn} torn; "
                f"{self.compared} equal to what callers were told, {self.untold} of callers that "
                f"were gone, {self.lost} told in the last second before a kill and not kept",
                f"{self.messages} ledgers watched, {self.statements} statements between two "
                f"ledgers, {self.quiet} quiet moments, {self.pool_lines} lines of the pool",
                f"{sums['preemptions']} preemptions, {sums['reused_own_tokens']} tokens reused of "
                f"tenants, {sums['reused_group_tokens']} of a group, "
                f"{sums['reused_public_tokens']} of a public prefix, "
                f"{sums['sharing_saved'] / 1e9:.3f} block-s saved by sharing, "
                f"{self.several_samples} requests of several samples",
                f"{len(self.wrong)} faults",
            )
        )

    def missing(self) -> list[str]:
        """What the run was to bring about and did not: then it showed nothing."""
        wanted = {
            "a process that was killed": self.ends[KILL],
            "ledgers watched": self.messages,
            "statements": self.statements,
            "quiet moments": self.quiet,
            "receipts compared": self.compared,
            "receipts of callers that were gone": self.untold,
            "requests of several samples": self.several_samples,
            "requests that were refused": self.codes["INVALID_ARGUMENT"],
            "preemptions": self.sums["preemptions"],
            "blocks shared within a tenant": self.sums["sharing_saved"],
            "reuse of a tenant's own blocks": self.sums["reused_own_tokens"],
            "reuse of a group's blocks": self.sums["reused_group_tokens"],
            "reuse of a public prefix": self.sums["reused_public_tokens"],
            "requests that were cancelled": self.reasons["cancelled"],
        }
        return [f"there were no {name}" for name, count in wanted.items() if not count]


class Life:
    """One server process of the run, with its callers and those who look at its books."""

    def __init__(self, run: Run, number: int, workers: int) -> None:
        self._run, self._result = run, run.result
        self._server = ServerProcess(*run.options)
        self._traffic = Traffic("", run.tokens, run.seed, number, workers)
        self._operators = run.operators
        self.files = Files()

    async def run(self, end: str, seconds: float) -> None:
        """From the start to the end."""
        server, traffic = self._server, self._traffic
        try:
            await asyncio.to_thread(server.event, "serving")
            replica = server.event("books_kept")["replica"]
            traffic.address = server.address
            ends = time.monotonic() + seconds
            async with self._looked_at():
                traffic.start()
                while (left := ends - time.monotonic()) > 0:
                    await asyncio.sleep(min(left, _QUIET_SECONDS))
                    if end != KILL or left > 1.5 * _QUIET_SECONDS:
                        await self._quiet(replica)
                        traffic.resume()
                if end == STOP:
                    await traffic.pause()
                    await self._quiet(replica)
                elif end == STOP_BUSY:
                    await asyncio.sleep(0.5)  # so that there is some load
                killed = await self._end(end)
            await traffic.stop()
            self._judge(replica, killed)
        finally:
            server.close()

    async def _end(self, end: str) -> float | None:
        """Ends the process; when, if it was killed."""
        self._result.ends[end] += 1
        if end == KILL:
            killed = time.monotonic()
            self._server.signal(signal.SIGKILL)
            await asyncio.to_thread(self._server.exit_status)
            return killed
        self._server.signal(signal.SIGTERM)
        status = await asyncio.to_thread(self._server.exit_status)
        self._note("exit status", differing("after SIGTERM", 0, status))
        return None

    @contextlib.asynccontextmanager
    async def _looked_at(self) -> AsyncIterator[None]:
        looks = [asyncio.create_task(self._watch()), asyncio.create_task(self._ask())]
        try:
            yield
        finally:
            for look in looks:
                look.cancel()
            for outcome in await asyncio.gather(*looks, return_exceptions=True):
                # The server is gone, which is what ended it, or it was told to go.
                if not isinstance(outcome, grpc.aio.AioRpcError | asyncio.CancelledError):
                    self._note("whoever looks", [repr(outcome)])

    async def _watch(self) -> None:
        """Looks at every message of WatchLedger."""
        async with grpc.aio.insecure_channel(self._operators) as channel:
            request = pb.WatchLedgerRequest()
            request.interval.FromMilliseconds(round(_WATCH_SECONDS * 1000))
            before: pb.Ledger | None = None
            async for response in _ledger(channel).WatchLedger(request):
                ledger = response.ledger
                self._note("watched", ledger_faults(ledger))
                if before is not None:
                    self._note("watched", order_faults(before, ledger))
                before = ledger
                self._result.messages += 1

    async def _ask(self) -> None:
        """Asks for statements between two looks at the ledger, at both doors."""
        async with (
            grpc.aio.insecure_channel(self._operators) as operators,
            grpc.aio.insecure_channel(self._server.address) as clients,
        ):
            before = await self._look(operators)
            while True:
                for name in TENANTS:
                    statement = await self._statement(operators, clients, name)
                    after = await self._look(operators)
                    faults = statement_faults(before, statement, after, after.pool.blocks)
                    self._note("statement", faults)
                    self._result.statements += 1
                    before = after

    async def _statement(self, operators: Any, clients: Any, name: str) -> pb.Statement:
        """At one door or the other, by turns."""
        if self._result.statements % 2:
            request = pb.GetStatementRequest(tenant=name)
            answer = await _ledger(operators).GetStatement(request)
        else:
            token = f"Bearer {self._run.tokens[name]}"
            metadata = (("authorization", token),)
            answer = await _ledger(clients).GetStatement(
                pb.GetStatementRequest(), metadata=metadata
            )
        statement: pb.Statement = answer.statement
        self._note("statement", differing("its tenant", name, statement.tenant))
        return statement

    async def _look(self, operators: Any) -> pb.Ledger:
        answer = await _ledger(operators).GetLedger(pb.GetLedgerRequest())
        ledger: pb.Ledger = answer.ledger
        self._note("looked at", ledger_faults(ledger))
        return ledger

    async def _quiet(self, replica: str) -> None:
        """Waits until all requests have ended, and compares everything."""
        await self._traffic.pause()
        async with (
            grpc.aio.insecure_channel(self._operators) as operators,
            grpc.aio.insecure_channel(self._server.address) as clients,
        ):
            ends = time.monotonic() + PATIENCE
            while not is_quiet(ledger := await self._look(operators)):
                if time.monotonic() > ends:
                    self._note("quiet", [f"something stays open: {ledger.tenants}"])
                    return
                await asyncio.sleep(0.05)
            rows = {row.name: row for row in ledger.tenants}
            for name in TENANTS:
                row = rows.get(name, pb.TenantAccount())
                statement = await self._statement(operators, clients, name)
                for what in ("held", "reserved", "closed_held"):
                    wanted, found = getattr(row, what), getattr(statement, what)
                    self._note("quiet", differing(f"{what} of {name}", wanted, found))
        ends = time.monotonic() + _WRITTEN_SECONDS
        while True:
            files = await asyncio.to_thread(read_files, self._run.folder, replica)
            faults = list(quiet_faults(ledger, files))
            faults += compare(self._traffic.calls, files, None).wrong
            if not faults or time.monotonic() > ends:
                break
            await asyncio.sleep(0.1)
        self._note("quiet", faults)
        self._result.quiet += 1

    def _judge(self, replica: str, killed: float | None) -> None:
        """What the process left, and what its callers were told."""
        result = self._result
        self.files = files = read_files(self._run.folder, replica)
        told: Told = compare(self._traffic.calls, files, killed)
        self._note("receipts", told.wrong)
        self._note("traffic", self._traffic.wrong)
        self._note("files", pool_line_faults(files))
        if killed is None:
            self._note("last line", last_line_faults(files))
            logged = [line["request_id"] for line in self._server.events("request_finished")]
            ids = sorted(line["id"] for line in files.receipts)
            self._note("log", differing("ids of ended requests", ids, sorted(logged)))
            self._note("files", differing("torn lines after a clean stop", 0, files.torn))
        result.compared += told.compared
        result.untold += told.untold
        result.lost += told.lost
        result.torn += files.torn
        result.receipts += len(files.receipts)
        result.pool_lines += len(files.pools)
        result.codes.update(call.code for call in self._traffic.calls)
        for line in files.receipts:
            result.reasons[line["end"]] += 1
            result.sums.update({name: line[name] for name in _SUMMED})
            result.several_samples += line["samples"] > 1

    def _note(self, where: str, faults: Iterable[str]) -> None:
        self._result.wrong += [f"{where}: {fault}" for fault in faults]


class Run:
    """All processes, one after the other, into one folder of books."""

    def __init__(
        self, home: Path, seed: int, say: Callable[[str], None] = lambda text: None
    ) -> None:
        self.seed = seed
        self.result = Result()
        self.folder = home / "books"
        self.operators = f"unix:{home / 'o.sock'}"
        self.tokens = make_tenants(home / "tenants.json")
        self._say = say
        (home / "terms.txt").write_text(PUBLIC_TEXT)
        (home / "prices.toml").write_text(_PRICES)
        self.options = (
            *("--model", str(write_gguf(home / "tiny.gguf", seed=seed))),
            *("--tenants", str(home / "tenants.json"), "--operators-listen", self.operators),
            *("--books", str(self.folder), "--prices", str(home / "prices.toml")),
            *("--public-prefix", f"{PUBLIC}={home / 'terms.txt'}", *_PRESSED),
        )

    async def run(self, seconds: float, kills: int, workers: int) -> Result:
        """So many seconds in all, not counting starts, and so many kills."""
        chance = random.Random(self.seed)
        ends = [KILL] * kills + [STOP_BUSY] * (kills // 3)
        chance.shuffle(ends)
        ends.append(STOP)
        began, lives = time.monotonic(), []
        for number, end in enumerate(ends):
            life = Life(self, number, workers)
            await life.run(end, seconds / len(ends) * chance.uniform(0.8, 1.2))
            lives.append(life.files)
            self._say(f"process {number + 1} of {len(ends)} {end}: {len(self.result.wrong)} faults")
        self.result.seconds = time.monotonic() - began
        statement = self._statement()
        self.result.wrong += [f"sums: {each}" for each in summed(statement, lives, _SUMMED)]
        return self.result

    def _statement(self) -> dict[str, Any]:
        """What the command says of the whole folder."""
        options = ("statement", str(self.folder), "--by", "replica,tenant", "--json")
        result = subprocess.run(
            [sys.executable, "-m", "kvledger", *options],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=True,
        )
        statement: dict[str, Any] = json.loads(result.stdout)
        return statement


def _ledger(channel: Any) -> Any:
    return ledger_pb2_grpc.LedgerServiceStub(channel)  # type: ignore[no-untyped-call]


async def conserved(
    seconds: float, kills: int, seed: int, workers: int, say: Callable[[str], None] = lambda _: None
) -> Result:
    """A whole run in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="kvledger-books-") as home:
        return await Run(Path(home), seed, say).run(seconds, kills, workers)


def main() -> int:
    """0 if everything adds up, and enough happened for that to mean something."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--kills", type=int, default=6, help="processes that are killed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=32, help="callers at once")
    options = parser.parse_args()

    def say(text: str) -> None:
        print(text, flush=True)

    result = asyncio.run(
        conserved(60 * options.minutes, options.kills, options.seed, options.workers, say)
    )
    print(result)
    wrong = result.wrong[:40] + result.missing()
    for fault in wrong:
        print(f"wrong: {fault}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
