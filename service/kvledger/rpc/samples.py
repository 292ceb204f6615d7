"""One sample of an answer: what of its tokens may be shown, and how it ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from kvledger.engine import EndReason
from kvledger.logprobs import TokenLogprobs
from kvledger.rpc.answers import AnswerOutput, fill_delta, fill_sample
from kvledger.rpc.translation import logprobs_message
from kvledger.streams import Receipt
from kvledger.tokenizer import OutputText, Piece, TokenBytes
from kvledger.v1 import generation_pb2

_FINISH_REASONS = {
    EndReason.STOP: generation_pb2.FINISH_REASON_STOP,
    EndReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
    EndReason.CONTEXT: generation_pb2.FINISH_REASON_CONTEXT,
}


class PlainDeltas(dict[int, bytes]):
    """Serialized messages whose delta is one token that is ASCII text, and nothing else; by its id.

    Each is made when its token first comes: at most about 150 bytes for each of a vocabulary.
    """

    def __init__(self, vocabulary: TokenBytes) -> None:
        super().__init__()
        self._token_bytes = vocabulary.token_bytes

    def __missing__(self, token_id: int) -> bytes:
        delta = generation_pb2.Delta(text=self._token_bytes[token_id].decode("ascii"), tokens=1)
        self[token_id] = data = generation_pb2.GenerateResponse(delta=delta).SerializeToString()
        return data


class SampleStream:
    """From tokens to deltas; or, where the whole comes at the end, to one Sample."""

    def __init__(
        self,
        index: int,
        output: AnswerOutput,
        options: generation_pb2.OutputOptions,
        plain_deltas: PlainDeltas,
    ) -> None:
        self.index = index
        self._output = output
        # Whether the request named anything that may end it here.
        self.can_stop = output.can_stop
        self._wants_ids = options.token_ids
        self._final_only = options.final_only
        self._plain_deltas = plain_deltas
        # What takes a token whose delta has its text and nothing else; None where there is more.
        self._takes_plain: Callable[[Sequence[int]], bool] | None = None
        if isinstance(output, OutputText) and not (index or self._wants_ids or self._final_only):
            self._takes_plain = output.takes_plain
        # Why the core ended it, where a token of its own did.
        self._end: EndReason | None = None
        self._finished = False
        self._calls_tools = False
        self._pieces: list[Piece] = []  # of the whole answer, where it comes at the end
        # Of tokens that have come and not left, in order; none where the request did not ask.
        self._logprobs: deque[TokenLogprobs] = deque()

    @property
    def stopped(self) -> bool:
        """Whether a stop string or a stop token has occurred: what follows is thrown away."""
        return self._output.stopped

    @property
    def token_count(self) -> int:
        """Tokens of the answer so far."""
        return self._output.token_count

    def feed(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        end: EndReason | None,
        is_last: bool,
    ) -> generation_pb2.GenerateResponse | None:
        """Takes tokens; a message with what of them, and of those before, may be shown now.

        `end` is why the sample ends with them, if it does; `is_last`: nothing follows at all.
        """
        self._end = self._end or end
        if logprobs:
            self._logprobs.extend(logprobs)
        piece = self._output.feed(tokens)
        if (is_last or self._end is not None) and not self._finished:
            self._finished = True
            piece = Piece.joined([piece, self._output.finish()])
        if piece.tool_calls:
            self._calls_tools = True
        if self._final_only:
            self._pieces.append(piece)
            return None
        return self._message(piece) if any(piece) else None

    def feed_tokens(self, tokens: Sequence[int]) -> bytes | None:
        """The same, serialized, for tokens of which there is nothing else to say."""
        if self._takes_plain is not None and self._takes_plain(tokens):
            return self._plain_deltas[tokens[0]]
        response = self.feed(tokens, (), None, is_last=False)
        return None if response is None else response.SerializeToString()

    def _message(self, piece: Piece) -> generation_pb2.GenerateResponse:
        response = generation_pb2.GenerateResponse()
        delta = response.delta  # filled in place: a Delta of its own would be copied
        delta.tokens = len(piece.token_ids)
        if self.index:
            delta.index = self.index
        fill_delta(delta, piece)
        if self._wants_ids:
            delta.token_ids.extend(piece.token_ids)
        if self._logprobs:
            # Tokens leave in the order in which they came.
            leaving = (self._logprobs.popleft() for _ in piece.token_ids)
            delta.logprobs.extend(logprobs_message(each) for each in leaving)
        return response

    def reason(self, receipt: Receipt) -> EndReason:
        """Why it ended; `receipt` says why the request's last sample did."""
        if self._output.stopped:
            return EndReason.STOP
        return self._end or receipt.end_reason

    def message(self, reason: EndReason) -> generation_pb2.Sample:
        """How it ended, and all of it where no deltas were sent."""
        sample = generation_pb2.Sample(index=self.index, finish_reason=_FINISH_REASONS[reason])
        if reason == EndReason.STOP and self._calls_tools:
            sample.finish_reason = generation_pb2.FINISH_REASON_TOOL_CALLS
        if self._final_only:
            answer = Piece.joined(self._pieces)
            fill_sample(sample, answer)
            if self._wants_ids:
                sample.token_ids.extend(answer.token_ids)
        return sample
