"""GenerationService: one request in, its tokens and its receipt out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import grpc
import numpy as np
import numpy.typing as npt

from kvledger.admission import Admission, Caller, Ticket
from kvledger.constraints.compiler import ConstraintCompiler
from kvledger.engine import EndReason, Engine
from kvledger.errors import (
    CredentialRevoked,
    ModelUnknown,
    QueueTimeout,
    ReaderStalled,
    RequestFailed,
    ServerDraining,
)
from kvledger.limits import check_generate
from kvledger.logit_changes import Constraint
from kvledger.logprobs import TokenLogprobs
from kvledger.rpc.answers import answer_output
from kvledger.rpc.calls import this_call
from kvledger.rpc.errors import Metadata, abort
from kvledger.rpc.labels import client_request_id
from kvledger.rpc.prompts import PromptEncoder
from kvledger.rpc.samples import PlainDeltas, SampleStream
from kvledger.rpc.translation import (
    cache_wish,
    constraint_source,
    duration,
    ignores_end_of_text,
    prompt_messages,
    receipt_message,
    sampling_parameters,
    told_wait,
)
from kvledger.scopes.claims import ScopeClaim, Scopes
from kvledger.served_model import ServedModel
from kvledger.streams import Mail, News, Receipt
from kvledger.telemetry import trace_parent
from kvledger.tenants.tenant import Tenant
from kvledger.tokenizer import OutputText
from kvledger.v1 import generation_pb2, generation_pb2_grpc

# Trailing metadata that carries the receipt of a request that failed.
RECEIPT_METADATA = "kvledger-receipt-bin"
# Longest wait for the receipt of a request that failed, in seconds.
_RECEIPT_SECONDS = 1.0

_Result = TypeVar("_Result")

_Context: TypeAlias = (
    "grpc.aio.ServicerContext[generation_pb2.GenerateRequest, generation_pb2.GenerateResponse]"
)


def add_to_server(servicer: GenerationServicer, server: grpc.aio.Server) -> None:
    """As the generated function does; but answers come serialized, most of them ready made."""
    (method,) = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].methods
    handler = grpc.unary_stream_rpc_method_handler(
        servicer.Generate,
        request_deserializer=generation_pb2.GenerateRequest.FromString,
        response_serializer=None,
    )
    service, handlers = method.containing_service.full_name, {method.name: handler}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    # Without it gRPC would take these calls in apart from the others, and hold the last one for as
    # long as no other of them comes: a client that is let go would not hear of it.
    server.add_registered_method_handlers(service, handlers)


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """See GenerationService in the contract."""

    def __init__(
        self,
        model: ServedModel,
        engine: Engine,
        admission: Admission,
        prompts: PromptEncoder,
        constraints: ConstraintCompiler,
        scopes: Scopes,
    ) -> None:
        self._model = model
        self._engine = engine
        self._admission = admission
        self._prompts = prompts
        self._constraints = constraints
        self._scopes = scopes
        self._plain_deltas = PlainDeltas(model.tokenizer)

    async def Generate(  # noqa: N802  # the contract's name
        self, request: generation_pb2.GenerateRequest, context: _Context
    ) -> None:
        """Validates, admits, streams; the blocks come back however the call ends.

        Writes GenerateResponses that are serialized already.
        """
        call, write, now = this_call(), context.write, asyncio.get_running_loop().time
        stream: _Stream | None = None
        try:
            check_generate(request, self._model.tokenizer.vocabulary_size)
            label = client_request_id(context.invocation_metadata())
            if not self._model.answers_to(request.model):
                raise ModelUnknown
            tokenizer = self._model.tokenizer
            stop_ids = frozenset(request.stop.token_ids)
            tenant = call.tenant
            prompt, shared_tokens = await self._prompts.encode_shared(request, tenant.number)
            constraint = await self._constraint(request, context)
            samples = self._samples(request, prompt, stop_ids)
            ticket = self._admission.enter(
                caller=Caller(tenant),
                prompt=prompt,
                max_tokens=request.stop.max_tokens if request.stop.HasField("max_tokens") else None,
                sampling=sampling_parameters(request, tokenizer.eos_ids, constraint),
                priority=request.priority,
                ignore_eos=ignores_end_of_text(request),
                stop_ids=stop_ids,
                samples=len(samples),
                prompt_logprobs=_prompt_logprobs(request),
                scopes=self._claim(request, tenant, prompt, shared_tokens),
                label=label,
                trace=trace_parent(context.invocation_metadata()),
                is_chat=request.HasField("chat"),
                tpot_target=_tpot_target(request),
            )
            # While tokens are made for it, its mailbox says how long it may leave them.
            call.at_work = lambda: not ticket.mailbox.is_over
            stream = _Stream(request, ticket, samples, self._model, self._engine, self._admission)
            tokens, news = await stream.admitted()
            # No generator or coroutine of the stream's own: each layer costs each message.
            while True:
                for message in stream.messages(tokens, news):
                    call.writing_since = now()
                    await write(message)
                    call.writing_since = None
                if news is not None and news.is_last:
                    break
                if (arrival := stream.arrival()) is not None:
                    await arrival
                tokens, news = stream.take()
        except grpc.aio.AbortError:
            raise
        except asyncio.CancelledError:
            if not call.revoked and (_is_cancelled_by_caller() or call.writing_since is not None):
                raise
            # Something that the handler waited for was cancelled; gRPC would send no status at all.
            reason = EndReason.CANCELLED if call.revoked else EndReason.FAILED
            trailer = await stream.settle(reason) if stream is not None else ()
            await abort(context, CredentialRevoked() if call.revoked else ServerDraining(), trailer)
        except Exception as error:
            if call.writing_since is not None:
                raise  # the write failed: gRPC has ended the call, or will
            trailer = await stream.settle() if stream is not None else ()
            await abort(context, error, trailer)
        finally:
            if stream is not None:
                stream.close()

    def _samples(
        self,
        request: generation_pb2.GenerateRequest,
        prompt: npt.NDArray[np.int32],
        stop_ids: frozenset[int],
    ) -> list[SampleStream]:
        tokenizer = self._model.tokenizer
        return [
            SampleStream(
                index,
                answer_output(
                    request,
                    OutputText(tokenizer, list(request.stop.sequences), stop_ids),
                    prompt,
                    tokenizer,
                ),
                request.output,
                self._plain_deltas,
            )
            for index in range(request.samples if request.HasField("samples") else 1)
        ]

    def _claim(
        self,
        request: generation_pb2.GenerateRequest,
        tenant: Tenant,
        prompt: npt.NDArray[np.int32],
        shared_tokens: int,
    ) -> ScopeClaim:
        return self._scopes.claim(tenant, cache_wish(request.cache, shared_tokens), prompt)

    async def _constraint(
        self, request: generation_pb2.GenerateRequest, context: _Context
    ) -> Constraint | None:
        if not request.HasField("constraint"):
            return None
        # Connections of one machine are one client.
        client = context.peer().rpartition(":")[0]
        source = constraint_source(request.constraint)
        return await self._constraints.compile(source, this_call().tenant.number, client)


def _prompt_logprobs(request: generation_pb2.GenerateRequest) -> int | None:
    output = request.output
    return output.prompt_logprobs if output.HasField("prompt_logprobs") else None


def _tpot_target(request: generation_pb2.GenerateRequest) -> float | None:
    if not request.HasField("tpot_target"):
        return None
    return request.tpot_target.ToTimedelta().total_seconds()


def _is_cancelled_by_caller() -> bool:
    """Whether the handler's own task was cancelled; before Python 3.11 nobody can tell."""
    cancelling = getattr(asyncio.current_task(), "cancelling", None)
    return cancelling is None or cancelling() > 0


class _Stream:
    """One admitted request on its way out."""

    def __init__(
        self,
        request: generation_pb2.GenerateRequest,
        ticket: Ticket,
        samples: Sequence[SampleStream],
        model: ServedModel,
        engine: Engine,
        admission: Admission,
    ) -> None:
        self._ticket = ticket
        self._model = model
        self._engine = engine
        self._admission = admission
        self._samples = samples
        self._queue_timeout: float | None = None
        if request.HasField("queue_timeout"):
            self._queue_timeout = request.queue_timeout.ToTimedelta().total_seconds()
        self._stopped: set[int] = set()  # samples whose end was asked for
        self._was_accepted = False  # its caller was told so
        self._ended = False  # the last mail has come
        self.arrival = ticket.mailbox.arrival  # what to wait for before `take`
        self._receipt: Receipt | None = None

    def close(self) -> None:
        """Gives the blocks back if nobody has done so yet."""
        if not self._ended:
            self._end_all(EndReason.CANCELLED)

    def _end_all(self, reason: EndReason) -> None:
        self._admission.end(self._ticket, reason)

    async def settle(self, reason: EndReason = EndReason.FAILED) -> Metadata:
        """Ends a request that failed: the receipt as trailing metadata, if there is one."""
        if not self._ended:
            self._end_all(reason)
            # The receipt comes after the step that runs. A step that takes long, or hangs, must
            # not keep the caller from its status.
            await self._within(_RECEIPT_SECONDS, self._until_ended())
        if self._receipt is None:
            return ()
        return ((RECEIPT_METADATA, self._receipt_message().SerializeToString()),)

    def messages(self, tokens: Sequence[int], news: News | None) -> Iterable[bytes]:
        """What its caller is told of a mail, serialized; of each sample at most one delta.

        Raises, after all that may be told, what the table in rpc.errors maps.
        """
        if news is not None:
            return (response.SerializeToString() for response in self._responses(tokens, news))
        sample = self._samples[0]  # the only one: tokens of several are never without news
        delta = sample.feed_tokens(tokens)
        if sample.can_stop:
            self._end_where_stopped(sample)
        return () if delta is None else (delta,)

    def _responses(
        self, tokens: Sequence[int], news: News
    ) -> Iterator[generation_pb2.GenerateResponse]:
        if news.admitted_after is not None:
            self._was_accepted = True
            yield self._accepted(news.admitted_after)
        for logprobs in news.prompt:
            for message in prompt_messages(logprobs):
                yield generation_pb2.GenerateResponse(prompt=message)
        for sample in self._samples:
            delta = self._feed(sample, tokens, news)
            if delta is not None:
                yield delta
        if news.is_last:
            last = self._finished()
            if not self._was_accepted:
                # Its tenant's limits were lowered while it waited: it never ran.
                assert self._receipt is not None
                yield self._accepted(self._receipt.queued)
            yield last

    def take(self) -> Mail:
        """What the mailbox holds."""
        mail = _, news = self._ticket.mailbox.take()
        if news is not None and news.is_last:
            self._ended = True
            self._receipt = news.receipt
        return mail

    async def _next(self) -> Mail:
        if (arrival := self.arrival()) is not None:
            await arrival
        return self.take()

    async def admitted(self) -> Mail:
        """The first mail, within the request's own limit on waiting. Raises QueueTimeout."""
        if self._queue_timeout is None:
            return await self._next()
        started = time.monotonic()
        mail = await self._within(self._queue_timeout, self._next())
        if mail is None:
            is_held = self._admission.is_held(self._ticket)
            self._end_all(EndReason.CANCELLED)
            retry_after = self._admission.retry_after(self._ticket)
            raise QueueTimeout(time.monotonic() - started, retry_after, own=is_held)
        return mail

    async def _until_ended(self) -> None:
        while not self._ended:
            await self._next()

    @staticmethod
    async def _within(seconds: float, work: Coroutine[Any, Any, _Result]) -> _Result | None:
        """The result, or None if it takes longer.

        Not asyncio.wait_for: before Python 3.12 it may swallow the caller's cancellation.
        """
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task,), timeout=seconds)
            return task.result() if task.done() else None
        finally:
            task.cancel()

    def _feed(
        self, sample: SampleStream, tokens: Sequence[int], news: News
    ) -> generation_pb2.GenerateResponse | None:
        logprobs: Sequence[TokenLogprobs] = news.logprobs
        if len(self._samples) > 1:
            own = [place for place, index in enumerate(news.samples) if index == sample.index]
            tokens = [tokens[place] for place in own]
            logprobs = [logprobs[place] for place in own] if logprobs else ()
        delta = sample.feed(tokens, logprobs, news.ends.get(sample.index), news.is_last)
        if sample.can_stop and not news.is_last:
            self._end_where_stopped(sample)
        return delta

    def _end_where_stopped(self, sample: SampleStream) -> None:
        """What the core computes beyond a stop is thrown away."""
        if sample.stopped and sample.index not in self._stopped:
            self._stopped.add(sample.index)
            self._engine.end(self._ticket.sequences[sample.index], EndReason.STOP)

    def _accepted(self, queued: int) -> generation_pb2.GenerateResponse:
        return generation_pb2.GenerateResponse(
            accepted=generation_pb2.Accepted(
                request_id=self._ticket.request_id,
                prompt_tokens=self._ticket.prompt_tokens,
                queue_time=duration(told_wait(queued)),
            )
        )

    def _finished(self) -> generation_pb2.GenerateResponse:
        """The last message. Raises what the table in rpc.errors maps."""
        if self._receipt is None:
            raise RequestFailed(self._ticket.request_id)
        reasons = [sample.reason(self._receipt) for sample in self._samples]
        if EndReason.FAILED in (*reasons, self._receipt.end_reason):
            raise self._failure()
        if EndReason.CANCELLED in reasons and self._ticket.mailbox.gave_up:
            raise ReaderStalled(self._admission.stall_seconds)
        if EndReason.CANCELLED in reasons:
            # Nobody but a server that stops ends a request whose client still listens.
            raise ServerDraining()
        return generation_pb2.GenerateResponse(
            finished=generation_pb2.Finished(
                samples=map(SampleStream.message, self._samples, reasons),
                usage=generation_pb2.Usage(
                    prompt_tokens=self._ticket.prompt_tokens,
                    cached_prompt_tokens=self._receipt.cached_prompt_tokens,
                    completion_tokens=sum(sample.token_count for sample in self._samples),
                ),
                receipt=self._receipt_message(),
            )
        )

    def _failure(self) -> Exception:
        constraint = self._ticket.constraint
        broken = None if constraint is None else constraint.broken
        return broken or RequestFailed(self._ticket.request_id)

    def _receipt_message(self) -> generation_pb2.Receipt:
        assert self._receipt is not None
        return receipt_message(
            self._receipt,
            self._ticket.request_id,
            self._model.kv_format,
            self._model.layout.block_bytes,
            self._ticket.scopes.shares_public,
            self._ticket.label,
            self._model.saved_by_format(self._receipt.held_time),
        )
