"""DiagnosisService: what limits the service, for operators; where a request's time went."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import grpc
import structlog
from google.protobuf import duration_pb2

from kvledger.books.lines import EndedRequest
from kvledger.books.reader import BooksReader
from kvledger.books.recent import RecentRequests
from kvledger.books.snapshot import Snapshot
from kvledger.diagnosis.counts import Counts, EngineCounts, PoolCounts
from kvledger.diagnosis.diagnosis import Diagnosis, diagnose
from kvledger.diagnosis.findings import percent
from kvledger.diagnosis.history import GRAIN, History
from kvledger.diagnosis.observation import Setup
from kvledger.diagnosis.predictions import Change
from kvledger.diagnosis.present import Present
from kvledger.diagnosis.traffic import Crowd, Traffic
from kvledger.engine import Engine
from kvledger.errors import BooksUnavailable, FieldViolation, InvalidRequest, RequestUnknown
from kvledger.rpc.calls import this_call
from kvledger.rpc.diagnosis_messages import Served, changes_of, compare, fill
from kvledger.rpc.errors import abort
from kvledger.rpc.translation import duration, preemption_reasons, told_wait
from kvledger.tenants.roles import Role
from kvledger.v1 import diagnosis_pb2, diagnosis_pb2_grpc

_log = structlog.get_logger(__name__)

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_INTERVAL = 60.0
_INTERVAL_MOST = 86_400.0
_NANOS = 1_000_000_000


class DiagnosisServicer(diagnosis_pb2_grpc.DiagnosisServiceServicer):
    """See DiagnosisService in the contract. Belongs to the event loop's thread."""

    def __init__(
        self,
        setup: Setup,
        engine: Engine,
        traffic: Traffic,
        reader: BooksReader,
        recent: RecentRequests,
        formats: Mapping[str, int],
        crowd: Callable[[], Crowd],
        served: Served,
        present: Callable[[], Present],
    ) -> None:
        """`formats` are bytes of a token by the KV formats that the build has; `crowd` and
        `present` are who is here now."""
        self._crowd = crowd
        self._served = served
        self._present = present
        self._setup = setup
        self._engine = engine
        self._traffic = traffic
        self._reader = reader
        self._recent = recent
        self._formats = formats
        self._history = History(self._counts(None))

    async def watch(self) -> None:
        """Keeps counts now and then, until it is cancelled."""
        while True:
            await asyncio.sleep(GRAIN)
            try:
                self._history.note(self._counts(await self._reader.read()))
            except BooksUnavailable:
                continue  # the engine's end is told elsewhere
            except Exception:
                _log.exception("counts_not_kept")

    async def Diagnose(  # noqa: N802  # the contract's name
        self, request: diagnosis_pb2.DiagnoseRequest, context: _Context
    ) -> diagnosis_pb2.DiagnoseResponse:
        """What limits the service."""
        try:
            seconds = _seconds(request.interval, "interval", _INTERVAL)
            asked = request.HasField("against")
            if asked and request.HasField("earlier"):
                raise InvalidRequest(FieldViolation("earlier", "is set beside against"))
            ago = _seconds(request.against, "against", _INTERVAL) if asked else 0.0
            what_if = changes_of(request.what_if)
            now = self._counts(await self._reader.read())
            diagnosis = self._diagnose(now, seconds, what_if=what_if)
            response = diagnosis_pb2.DiagnoseResponse()
            fill(response.now, diagnosis, self._served)
            self._fill_present(response.present, now)
            if asked and (served := self._history.served(now)) <= ago:
                response.changes.append(
                    f"Nothing is kept of {ago:.0f} s ago: the server began {served:.0f} s ago."
                )
            elif asked:
                before = self._diagnose(now, seconds, ago)
                fill(response.before, before, self._served)
                compare(response, response.before)
            elif request.HasField("earlier"):
                compare(response, request.earlier)
            return response
        except Exception as error:
            await abort(context, error)

    async def Explain(  # noqa: N802  # the contract's name
        self, request: diagnosis_pb2.ExplainRequest, context: _Context
    ) -> diagnosis_pb2.ExplainResponse:
        """Where a request's time went."""
        try:
            call = this_call()
            assert call.identity is not None, "the method's door is open to anyone"
            is_client = call.identity.role is Role.CLIENT
            own = call.tenant.number if is_client else None
            ended = self._recent.find(request.request_id, own)
            if ended is None:
                raise RequestUnknown
            return _explained(ended, for_client=is_client)
        except Exception as error:
            await abort(context, error)

    def _diagnose(
        self, now: Counts, seconds: float, ago: float = 0.0, what_if: Sequence[Change] = ()
    ) -> Diagnosis:
        interval = self._history.interval(now, seconds, ago)
        return diagnose(self._setup, interval, self._formats, what_if)

    def _counts(self, snapshot: Snapshot | None) -> Counts:
        times = (
            {state: balance.time for state, balance in snapshot.states.items()}
            if snapshot is not None
            else dict.fromkeys(("free", "reserved", "held", "cached", "releasing"), 0)
        )
        now = time.monotonic_ns()
        self._traffic.pass_time(now, self._crowd())
        return Counts.now(
            now,
            self._engine.step_books,
            EngineCounts(*self._engine.step_times),
            PoolCounts(**times),
            self._traffic.counts,
        )

    def _fill_present(self, message: diagnosis_pb2.Present, now: Counts) -> None:
        for name, value in vars(self._present()).items():
            setattr(message, name, value)
        message.served.CopyFrom(duration(round(self._history.served(now) * _NANOS)))


def _seconds(asked: duration_pb2.Duration, field: str, default: float) -> float:
    seconds = asked.seconds + asked.nanos / 1e9
    if seconds == 0.0:
        return default
    if not 0.0 < seconds <= _INTERVAL_MOST:
        raise InvalidRequest(
            FieldViolation(field, f"is {seconds:g} s, allowed are more than 0 to 86400")
        )
    return seconds


def _explained(ended: EndedRequest, *, for_client: bool) -> diagnosis_pb2.ExplainResponse:
    receipt = ended.receipt
    assert receipt is not None
    delayed = receipt.prefill_delayed + receipt.decode_delayed
    parts = {
        "queued": receipt.queued - receipt.requeued,
        "preempted": receipt.requeued,
        "prefill": receipt.prefill - receipt.prefill_delayed,
        "decode": receipt.decode - receipt.decode_delayed,
        "delayed": delayed,
        "stalled": receipt.paused,
    }
    if for_client:
        # What others' prompts took is not its to know, nor how long exactly it waited for them;
        # the rest stands in its receipt.
        parts.update(prefill=receipt.prefill, decode=receipt.decode, delayed=0)
        parts.update(queued=told_wait(parts["queued"]), preempted=told_wait(parts["preempted"]))
    total = sum(parts.values())
    response = diagnosis_pb2.ExplainResponse(
        request_id=ended.request_id,
        tenant="" if for_client else ended.tenant,
        total=duration(total),
        summary=_summary(parts, total),
        prompt_tokens=receipt.prompt_tokens,
        output_tokens=receipt.output_tokens,
        reused_tokens=receipt.cached_prompt_tokens,
        preemptions=receipt.preemptions,
        recomputed_tokens=receipt.recomputed_tokens,
        preemption_reasons=preemption_reasons(receipt, for_client=for_client),
    )
    for name, part in parts.items():
        getattr(response, name).CopyFrom(duration(part))
    return response


_WORDS = {
    "queued": "waiting for room",
    "preempted": "waiting for room again after it was preempted",
    "prefill": "computing its prompt",
    "decode": "making its tokens",
    "delayed": "waiting for the prompts of others in the same steps",
    "stalled": "standing still because its tokens were not read",
}


def _summary(parts: Mapping[str, int], total: int) -> str:
    if total == 0:
        return "It took no time."
    name = max(parts, key=lambda each: parts[each])
    return f"{percent(parts[name] / total)} of its {total / 1e9:.3g} s went into {_WORDS[name]}."
