"""From what a client wrote to a constraint that can be used, without harm to anybody.

A source is first compiled by another process (worker.py), which may break. What that has done
within its limits, a thread here does again. The verdict is kept, by tenant and content; the
compiled grammar is not, because requests that shared one would share its faults.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import structlog

from kvledger.constraints.source import ConstraintSource
from kvledger.constraints.turns import Turns
from kvledger.constraints.worker import (
    BROKE,
    CLOCK_SECONDS,
    MEMORY_BYTES,
    TOOK_TOO_LONG,
    Verdict,
    frame,
    frame_length,
)
from kvledger.errors import (
    ConstraintsFull,
    ConstraintsUnavailable,
    FieldViolation,
    InvalidRequest,
    QueueFull,
    ServerDraining,
)
from kvledger.tokenizer import Tokenizer
from kvledger.tokenizer.vocabulary import is_panic

if TYPE_CHECKING:
    from kvledger.constraints.matcher import Constraint
    from kvledger.constraints.vocabulary import Vocabulary

_log = structlog.get_logger(__name__)

# Sources compiled at once; each has a process that tries it first.
_PLACES = 2
# Of one client's, how many may wait.
_WAITING_MAX = 64
# Verdicts that are kept.
_VERDICTS_MAX = 1024
# Memory of the grammars of all open requests, in bytes; _HeldBytes says who may go beyond it.
_HELD_BYTES_MAX = 1024 * 1024 * 1024
# What a caller is told to wait where there is no room, in seconds.
_RETRY_SECONDS = 1.0
# Until a process that tries sources is there, and what it gets beyond its own limit, in seconds.
_START_SECONDS = 30.0
_GRACE_SECONDS = 2.0


class Verdicts:
    """How sources were judged, by tenant. A tenant's never show in what another one is told, nor in
    how long that takes, and the one that has most makes room."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0
        self._by_tenant: dict[int, OrderedDict[bytes, Verdict]] = {}

    def find(self, tenant: int, digest: bytes) -> Verdict | None:
        """The verdict on a source that the tenant has sent before."""
        own = self._by_tenant.get(tenant)
        if own is None or digest not in own:
            return None
        own.move_to_end(digest)
        return own[digest]

    def keep(self, tenant: int, digest: bytes, verdict: Verdict) -> None:
        """Keeps a verdict that would be the same again."""
        own = self._by_tenant.setdefault(tenant, OrderedDict())
        self._count += digest not in own
        own[digest] = verdict
        while self._count > self._most:
            largest = max(self._by_tenant, key=lambda each: len(self._by_tenant[each]))
            self._by_tenant[largest].popitem(last=False)
            self._count -= 1
            if not self._by_tenant[largest]:
                del self._by_tenant[largest]


class _HeldBytes:
    """Memory of compiled grammars, given back by whichever thread lets go of one last.

    While there is room everybody may take some. When there is none, a tenant that has nothing may
    still have one grammar, and more as long as all its own stay within its share, the bound divided
    by the number of tenants that have some, and within what one grammar may take. So each tenant
    adds at most one grammar's MEMORY_BYTES to the bound.
    """

    def __init__(self) -> None:
        # By tenant; those that hold something.
        self._by_tenant: dict[int, int] = {}
        # Entered again where the collector runs inside.
        self._lock = threading.RLock()

    @property
    def total(self) -> int:
        """Bytes that all tenants hold."""
        with self._lock:
            return sum(self._by_tenant.values())

    def take(self, tenant: int, size: int, kept_by: object) -> None:
        """Takes so many bytes for as long as an object lives. Raises ConstraintsFull."""
        if size == 0:
            return
        with self._lock:
            if not self._has_room(tenant, size):
                raise ConstraintsFull(_HELD_BYTES_MAX, _RETRY_SECONDS)
            self._by_tenant[tenant] = self._by_tenant.get(tenant, 0) + size
        weakref.finalize(kept_by, self._give_back, tenant, size).atexit = False

    def _has_room(self, tenant: int, size: int) -> bool:
        own = self._by_tenant.get(tenant, 0)
        if own == 0 or self.total + size <= _HELD_BYTES_MAX:
            return True
        share = _HELD_BYTES_MAX // len(self._by_tenant)
        return own + size <= min(share, MEMORY_BYTES)

    def _give_back(self, tenant: int, size: int) -> None:
        with self._lock:
            self._by_tenant[tenant] -= size
            if self._by_tenant[tenant] == 0:
                del self._by_tenant[tenant]


def _worker_process(channel: int) -> subprocess.Popen[bytes]:
    """Starts worker.py, which reads and writes a file descriptor.

    The event loop would do it by a fork, in which gRPC begins its threads anew, and they may end it
    before it is another program (seen with uvloop and grpcio 1.85.3). Popen uses vfork, in which
    nothing of ours runs, as long as it is given no preexec_fn, user or group.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "kvledger.constraints.worker"],
        stdin=channel,
        stdout=channel,
        stderr=subprocess.DEVNULL,  # the library's words may quote the client
    )


class _Worker:
    """One process that tries sources; started when there is one to try, and again if it ends."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._watched: int | None = None  # a file descriptor that tells of the process's end
        self._closed = False

    async def judge(self, vocabulary: Vocabulary, source: ConstraintSource) -> Verdict:
        """Tries a source; a process that is lost on the way is replaced, once."""
        verdict = await self._judge_if_it_lives(vocabulary, source)
        if verdict is None:
            verdict = await self._judge_if_it_lives(vocabulary, source)
        return verdict if verdict is not None else replace(BROKE, lasting=False)

    async def _judge_if_it_lives(
        self, vocabulary: Vocabulary, source: ConstraintSource
    ) -> Verdict | None:
        """The verdict; None if the process is lost."""
        try:
            if self._process is None or self._process.poll() is not None:
                await self.stop()
                await self._start(vocabulary)
            return await asyncio.wait_for(self._ask(source), CLOCK_SECONDS + _GRACE_SECONDS)
        except asyncio.TimeoutError:
            _log.warning("constraint_worker_hangs")
            await self.stop()
            return TOOK_TOO_LONG
        except (asyncio.IncompleteReadError, ConnectionError):
            _log.warning("constraint_worker_lost")
            await self.stop()
            return None
        except BaseException:
            await self.stop()  # what it would say next belongs to somebody else's question
            raise

    async def _start(self, vocabulary: Vocabulary) -> None:
        if self._closed:
            raise ServerDraining()
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = _worker_process(theirs.fileno())
            self._watch(self._process)
            self._streams = _, writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()
            raise
        if self._closed:  # in the meantime; what raises here is stopped
            raise ServerDraining()
        writer.write(frame(vocabulary.pack()))
        # An empty object costs nothing to compile: its answer means that the process is ready.
        ready = ConstraintSource("json_object")
        verdict = await asyncio.wait_for(self._ask(ready), _START_SECONDS)
        if verdict.refused is not None:
            raise RuntimeError("the process that tries constraints refuses the simplest")

    async def _ask(self, source: ConstraintSource) -> Verdict:
        assert self._streams is not None
        reader, writer = self._streams
        writer.write(frame(json.dumps(asdict(source)).encode()))
        await writer.drain()
        length = frame_length(await reader.readexactly(4))
        return Verdict(**json.loads(await reader.readexactly(length)))

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """Leaves no zombie of a process that ends while nobody asks it anything.

        Where the system has no such watch, the next question or the end takes care of it.
        """

        def ended() -> None:
            self._unwatch()
            process.poll()

        try:
            self._watched = os.pidfd_open(process.pid)
        except (AttributeError, OSError):
            return
        asyncio.get_running_loop().add_reader(self._watched, ended)

    def _unwatch(self) -> None:
        watched, self._watched = self._watched, None
        if watched is not None:
            asyncio.get_running_loop().remove_reader(watched)
            os.close(watched)

    async def close(self) -> None:
        """Ends the process; no other one is started."""
        self._closed = True
        await self.stop()

    async def stop(self) -> None:
        """Ends the process."""
        self._unwatch()
        process, self._process = self._process, None
        streams, self._streams = self._streams, None
        if streams is not None:
            streams[1].close()
        if process is not None:
            process.kill()
            await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, process.wait))


class ConstraintCompiler:
    """Compiles the constraints of all requests. Belongs to the event loop's thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Takes about half a second for 50,000 tokens where llguidance is installed."""
        self._turns = Turns(_PLACES)
        self._verdicts = Verdicts(_VERDICTS_MAX)
        self._workers = tuple(_Worker() for _ in range(_PLACES))
        self._idle = list(self._workers)
        self._threads = ThreadPoolExecutor(_PLACES, thread_name_prefix="constraint")
        self._held = _HeldBytes()
        self._unavailable: str | None = None
        try:
            self._prepare(tokenizer)
        except ImportError:
            self._unavailable = "its operator has to install the extra kvledger[grammar]"
        except BaseException as error:
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            # A vocabulary that no model in use has: it is served, without constraints.
            _log.exception("constraints_unavailable")
            self._unavailable = "llguidance cannot use the model's vocabulary"

    def _prepare(self, tokenizer: Tokenizer) -> None:
        from kvledger.constraints.vocabulary import Vocabulary

        controls = {id_: text.encode() for id_, text in tokenizer.control_texts.items()}
        self._vocabulary = Vocabulary(tokenizer.token_bytes, controls, sorted(tokenizer.eos_ids))
        self._prepared = self._vocabulary.prepared()

    async def compile(self, source: ConstraintSource, tenant: int, client: Hashable) -> Constraint:
        """The constraint of a source that keeps the limits on a request, within seconds.

        Tenants take turns, and so do a tenant's clients. Raises InvalidRequest,
        ConstraintsUnavailable, ConstraintsFull, QueueFull or ServerDraining.
        """
        if self._unavailable is not None:
            raise ConstraintsUnavailable(self._unavailable)
        waiting = self._turns.waiting(tenant, client)
        if waiting >= _WAITING_MAX:
            raise QueueFull(waiting, _RETRY_SECONDS, own=True)
        began = asyncio.Event()
        job = asyncio.create_task(self._in_turn(source, tenant, client, began))
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            # What has begun is finished: a process that is told to stop has to be started again.
            if not began.is_set():
                job.cancel()
            job.add_done_callback(_look_at)
            raise

    async def stop(self) -> None:
        """Ends the processes, and the threads once they have nothing to do."""
        for worker in self._workers:
            await worker.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _in_turn(
        self, source: ConstraintSource, tenant: int, client: Hashable, began: asyncio.Event
    ) -> Constraint:
        from kvledger.constraints.matcher import compile_constraint

        async with self._turns.turn(tenant, client):
            began.set()
            verdict = await self._judge(source, tenant)
            if verdict.refused is not None:
                raise InvalidRequest(FieldViolation(source.field, verdict.refused))
            constraint = await asyncio.get_running_loop().run_in_executor(
                self._threads, compile_constraint, self._prepared, source
            )
            self._held.take(tenant, verdict.size, constraint)
        return constraint

    async def _judge(self, source: ConstraintSource, tenant: int) -> Verdict:
        digest = source.digest
        verdict = self._verdicts.find(tenant, digest)
        if verdict is None:
            worker = self._idle.pop()
            try:
                verdict = await worker.judge(self._vocabulary, source)
            finally:
                self._idle.append(worker)
            if verdict.lasting:
                self._verdicts.keep(tenant, digest, verdict)
        return verdict


def _look_at(job: asyncio.Task[Constraint]) -> None:
    """Takes the result of a job that nobody waits for, or asyncio would complain of its error."""
    if not job.cancelled():
        job.exception()
