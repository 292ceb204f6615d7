"""GenerationService: one request in, its tokens and its receipt out."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeAlias, TypeVar

import grpc

from kvledger.admission import DEV_CALLER, Admission, Ticket
from kvledger.engine import EndReason, Engine
from kvledger.errors import (
    ModelUnknown,
    QueueTimeout,
    ReaderStalled,
    RequestFailed,
    ServerDraining,
)
from kvledger.limits import check_generate
from kvledger.logprobs import TokenLogprobs
from kvledger.rpc.errors import Metadata, abort
from kvledger.rpc.prompts import PromptEncoder
from kvledger.rpc.translation import (
    duration,
    logprobs_message,
    receipt_message,
    sampling_parameters,
)
from kvledger.served_model import ServedModel
from kvledger.streams import Mail, Receipt
from kvledger.tokenizer import OutputText
from kvledger.v1 import generation_pb2, generation_pb2_grpc

# Trailing metadata that carries the receipt of a request that failed.
RECEIPT_METADATA = "kvledger-receipt-bin"
# Longest wait for the receipt of a request that failed, in seconds.
_RECEIPT_SECONDS = 1.0

_Result = TypeVar("_Result")

_FINISH_REASONS = {
    EndReason.STOP: generation_pb2.FINISH_REASON_STOP,
    EndReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
    EndReason.CONTEXT: generation_pb2.FINISH_REASON_CONTEXT,
}

_Context: TypeAlias = (
    "grpc.aio.ServicerContext[generation_pb2.GenerateRequest, generation_pb2.GenerateResponse]"
)


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """See GenerationService in the contract."""

    def __init__(
        self, model: ServedModel, engine: Engine, admission: Admission, prompts: PromptEncoder
    ) -> None:
        self._model = model
        self._engine = engine
        self._admission = admission
        self._prompts = prompts

    async def Generate(  # noqa: N802  # the contract's name
        self, request: generation_pb2.GenerateRequest, context: _Context
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        """Validates, admits, streams; the blocks come back however the call ends."""
        stream: _Stream | None = None
        try:
            check_generate(request, self._model.tokenizer.vocabulary_size)
            if not self._model.answers_to(request.model):
                raise ModelUnknown
            tokenizer = self._model.tokenizer
            stop_ids = frozenset(request.stop.token_ids)
            output = OutputText(tokenizer, list(request.stop.sequences), stop_ids)
            prompt = await self._prompts.encode(request)
            ticket = self._admission.enter(
                caller=DEV_CALLER,
                prompt=prompt,
                max_tokens=request.stop.max_tokens if request.stop.HasField("max_tokens") else None,
                sampling=sampling_parameters(request, tokenizer.eos_ids),
                priority=request.priority,
                ignore_eos=request.stop.ignore_eos,
                stop_ids=stop_ids,
            )
            stream = _Stream(request, ticket, output, self._model, self._engine, self._admission)
            async for response in stream.responses():
                yield response
        except grpc.aio.AbortError:
            raise
        except asyncio.CancelledError:
            if _is_cancelled_by_caller():
                raise
            # Something that the handler waited for was cancelled; gRPC would send no status at all.
            trailer = await stream.settle() if stream is not None else ()
            await abort(context, ServerDraining(self._admission.retry_after), trailer)
        except Exception as error:
            trailer = await stream.settle() if stream is not None else ()
            await abort(context, error, trailer)
        finally:
            if stream is not None:
                stream.close()


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
        output: OutputText,
        model: ServedModel,
        engine: Engine,
        admission: Admission,
    ) -> None:
        self._ticket = ticket
        self._model = model
        self._engine = engine
        self._admission = admission
        self._wants_ids = request.output.token_ids
        self._final_only = request.output.final_only
        self._queue_timeout: float | None = None
        if request.HasField("queue_timeout"):
            self._queue_timeout = request.queue_timeout.ToTimedelta().total_seconds()
        self._output = output
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        # Of tokens that have come and not left, in order; none where the request did not ask.
        self._logprobs: deque[TokenLogprobs] = deque()
        self._ended = False  # the last mail has come
        self._receipt: Receipt | None = None

    def close(self) -> None:
        """Gives the blocks back if nobody has done so yet."""
        if not self._ended:
            self._engine.end(self._ticket.sequence, EndReason.CANCELLED)

    async def settle(self) -> Metadata:
        """Ends a request that failed: the receipt as trailing metadata, if there is one."""
        if not self._ended:
            self._engine.end(self._ticket.sequence, EndReason.FAILED)
            # The receipt comes after the step that runs. A step that takes long, or hangs, must
            # not keep the caller from its status.
            await self._within(_RECEIPT_SECONDS, self._until_ended())
        if self._receipt is None:
            return ()
        return ((RECEIPT_METADATA, self._receipt_message().SerializeToString()),)

    async def responses(self) -> AsyncIterator[generation_pb2.GenerateResponse]:
        """Accepted, deltas, finished. Raises what the table in rpc.errors maps."""
        mail = await self._admitted()
        if mail.admitted_after is not None:
            yield self._accepted(mail.admitted_after)
        while True:
            for delta in self._deltas(mail):
                yield delta
            if mail.is_last:
                break
            mail = await self._next()
        yield self._finished()

    async def _next(self) -> Mail:
        mail = await self._ticket.mailbox.next()
        if mail.is_last:
            self._ended = True
            self._receipt = mail.receipt
        return mail

    async def _admitted(self) -> Mail:
        """The first mail, within the request's own limit on waiting."""
        if self._queue_timeout is None:
            return await self._next()
        started = time.monotonic()
        mail = await self._within(self._queue_timeout, self._next())
        if mail is None:
            self._engine.end(self._ticket.sequence, EndReason.CANCELLED)
            raise QueueTimeout(time.monotonic() - started, self._admission.retry_after)
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

    def _deltas(self, mail: Mail) -> list[generation_pb2.GenerateResponse]:
        """At most one delta: what of the mail's tokens may be shown now."""
        was_stopped = self._output.stopped
        self._logprobs.extend(mail.logprobs)
        piece = self._output.feed(mail.tokens)
        text, token_ids = piece.text, piece.token_ids
        if mail.is_last and not was_stopped:
            rest = self._output.finish()
            text, token_ids = text + rest.text, token_ids + rest.token_ids
        if self._output.stopped and not was_stopped and not mail.is_last:
            # What the core computes beyond the stop is thrown away.
            self._engine.end(self._ticket.sequence, EndReason.STOP)
        if self._final_only:
            self._texts.append(text)
            self._token_ids.extend(token_ids)
            return []
        if not text and not token_ids:
            return []
        delta = generation_pb2.Delta(text=text, tokens=len(token_ids))
        if self._wants_ids:
            delta.token_ids.extend(token_ids)
        if self._logprobs:
            # Tokens leave in the order in which they came.
            leaving = (self._logprobs.popleft() for _ in token_ids)
            delta.logprobs.extend(logprobs_message(each) for each in leaving)
        return [generation_pb2.GenerateResponse(delta=delta)]

    def _accepted(self, queued: int) -> generation_pb2.GenerateResponse:
        return generation_pb2.GenerateResponse(
            accepted=generation_pb2.Accepted(
                request_id=self._ticket.request_id,
                prompt_tokens=self._ticket.prompt_tokens,
                queue_time=duration(queued),
            )
        )

    def _finished(self) -> generation_pb2.GenerateResponse:
        if self._receipt is None:
            raise RequestFailed(self._ticket.request_id)
        reason = EndReason.STOP if self._output.stopped else self._receipt.end_reason
        if reason == EndReason.CANCELLED and self._ticket.mailbox.gave_up:
            raise ReaderStalled(self._admission.stall_seconds)
        if reason == EndReason.CANCELLED:
            # Nobody but a server that stops ends a request whose client still listens.
            raise ServerDraining(self._admission.retry_after)
        if reason not in _FINISH_REASONS:
            raise RequestFailed(self._ticket.request_id)
        sample = generation_pb2.Sample(finish_reason=_FINISH_REASONS[reason])
        if self._final_only:
            sample.text = "".join(self._texts)
            if self._wants_ids:
                sample.token_ids.extend(self._token_ids)
        return generation_pb2.GenerateResponse(
            finished=generation_pb2.Finished(
                samples=[sample],
                usage=generation_pb2.Usage(
                    prompt_tokens=self._ticket.prompt_tokens,
                    completion_tokens=self._output.token_count,
                ),
                receipt=self._receipt_message(),
            )
        )

    def _receipt_message(self) -> generation_pb2.Receipt:
        assert self._receipt is not None
        return receipt_message(
            self._receipt,
            self._ticket.request_id,
            self._model.kv_format,
            self._model.layout.block_bytes,
        )
