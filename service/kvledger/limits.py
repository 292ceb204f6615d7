"""Every limit on what a request may contain, in one table, and the one place that checks them.

The checks run on the message as it arrived, before anything is allocated for it. Violations quote
numbers and field paths, never the client's own strings.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvledger.errors import FieldViolation, InvalidRequest
from kvledger.v1 import generation_pb2, models_pb2

# Largest message the server receives, in bytes; gRPC itself refuses a larger one.
MESSAGE_BYTES_MAX = 4 * 1024 * 1024
# Largest metadata of a call, in bytes.
METADATA_BYTES_MAX = 16 * 1024
# Violations that one refusal names; more would not fit into the metadata that carries it.
_REPORTED_MAX = 16


@dataclass(frozen=True)
class Limit:
    """The numbers from `least` to `most` are allowed for what `field` counts, in `unit`."""

    field: str
    least: float
    most: float
    unit: str


_TABLE = (
    Limit("model", 0, 256, "bytes"),
    Limit("text", 1, 1024 * 1024, "bytes"),
    Limit("token_ids.ids", 1, 256 * 1024, "ids"),
    Limit("chat.messages", 1, 1024, "messages"),
    Limit("chat.messages.content", 0, 1024 * 1024, "bytes in all messages"),
    Limit("sampling.temperature", 0.0, 100.0, ""),
    Limit("sampling.top_p", 0.0, 1.0, ""),
    Limit("sampling.top_k", 0, 2**31 - 1, ""),
    Limit("sampling.min_p", 0.0, 1.0, ""),
    Limit("sampling.repetition_penalty", 0.0, 10.0, ""),
    Limit("sampling.presence_penalty", -2.0, 2.0, ""),
    Limit("sampling.frequency_penalty", -2.0, 2.0, ""),
    Limit("sampling.logit_bias", 0, 512, "entries"),
    Limit("sampling.logit_bias.bias", -100.0, 100.0, ""),
    Limit("stop.max_tokens", 1, 2**31 - 1, "tokens"),
    Limit("stop.sequences", 0, 16, "sequences"),
    Limit("stop.sequences.text", 1, 256, "bytes"),
    Limit("stop.min_tokens", 0, 2**31 - 1, "tokens"),
    Limit("stop.token_ids", 0, 64, "ids"),
    Limit("constraint.json_schema", 1, 128 * 1024, "bytes"),
    Limit("constraint.regex", 1, 8 * 1024, "bytes"),
    Limit("constraint.lark_grammar", 1, 64 * 1024, "bytes"),
    Limit("output.top_logprobs", 0, 20, "tokens"),
    Limit("priority", -10, 10, ""),
    Limit("queue_timeout", 0.0, 3600.0, "seconds"),
)

LIMITS = {limit.field: limit for limit in _TABLE}


def check_generate(request: generation_pb2.GenerateRequest, vocabulary: int) -> None:
    """Raises InvalidRequest with every violation of a GenerateRequest."""
    _raise_if_any(_generate_violations(request, vocabulary))


def check_tokenize(request: models_pb2.TokenizeRequest) -> None:
    """Raises InvalidRequest with every violation of a TokenizeRequest."""
    _raise_if_any(_prompt_violations(request))


def check_detokenize(request: models_pb2.DetokenizeRequest, vocabulary: int) -> None:
    """Raises InvalidRequest with every violation of a DetokenizeRequest."""
    count = len(request.token_ids)
    violations = list(_counted("token_ids", "token_ids.ids", count))
    _raise_if_any(violations or _id_violations("token_ids", request.token_ids, vocabulary))


def check_text_fits(text: str) -> None:
    """Raises InvalidRequest unless a text fits into a response."""
    size = len(text.encode())
    most = MESSAGE_BYTES_MAX - 1024  # room for what else a message holds
    if size > most:
        raise InvalidRequest(
            FieldViolation("token_ids", f"stand for {size} bytes of text, at most {most} fit")
        )


def check_prompt_fits(tokens: int, tokens_max: int, context_tokens: int) -> None:
    """Raises InvalidRequest unless a prompt leaves room for one token.

    `tokens_max` is the most that a prompt and its output may be: the context window
    (`context_tokens`), or what the whole KV pool holds.
    """
    if tokens < 1:
        raise InvalidRequest(FieldViolation("prompt", "has no tokens; at least 1 is needed"))
    if tokens >= tokens_max:
        whose = "the context window" if tokens_max == context_tokens else "the whole KV pool"
        raise InvalidRequest(
            FieldViolation(
                "prompt",
                f"{tokens} tokens, at most {tokens_max - 1} leave room for an answer in {whose}",
            )
        )


def _raise_if_any(violations: Iterable[FieldViolation]) -> None:
    found = list(itertools.islice(violations, _REPORTED_MAX))
    if found:
        raise InvalidRequest(*found)


def _generate_violations(
    request: generation_pb2.GenerateRequest, vocabulary: int
) -> Iterator[FieldViolation]:
    yield from _prompt_violations(request)
    if request.WhichOneof("prompt") == "token_ids":
        count = list(_counted("token_ids.ids", "token_ids.ids", len(request.token_ids.ids)))
        yield from count or _id_violations("token_ids.ids", request.token_ids.ids, vocabulary)
    yield from _sampling_violations(request.sampling)
    yield from _bias_violations(request.sampling, vocabulary)
    yield from _stop_violations(request.stop, vocabulary)
    yield from _output_violations(request.output)
    if request.HasField("constraint"):
        yield from _constraint_violations(request.constraint)
    yield from _counted("priority", "priority", request.priority)
    if request.HasField("queue_timeout"):
        timeout = request.queue_timeout
        yield from _counted("queue_timeout", "queue_timeout", timeout.seconds + timeout.nanos / 1e9)


def _prompt_violations(
    request: generation_pb2.GenerateRequest | models_pb2.TokenizeRequest,
) -> Iterator[FieldViolation]:
    yield from _counted("model", "model", len(request.model.encode()))
    kind = request.WhichOneof("prompt")
    if kind is None:
        yield FieldViolation("prompt", "is not set; give text, token_ids or chat")
    elif kind == "text":
        yield from _counted("text", "text", len(request.text.encode()))
    elif kind == "chat":
        yield from _chat_violations(request.chat)


def _chat_violations(chat: generation_pb2.ChatPrompt) -> Iterator[FieldViolation]:
    count = list(_counted("chat.messages", "chat.messages", len(chat.messages)))
    if count:
        yield from count
        return
    for index, message in enumerate(chat.messages):
        if message.role not in (
            generation_pb2.ROLE_SYSTEM,
            generation_pb2.ROLE_USER,
            generation_pb2.ROLE_ASSISTANT,
        ):
            yield FieldViolation(
                f"chat.messages[{index}].role",
                f"{message.role} is not a role; set ROLE_SYSTEM, ROLE_USER or ROLE_ASSISTANT",
            )
    size = sum(len(message.content.encode()) for message in chat.messages)
    yield from _counted("chat.messages.content", "chat.messages.content", size)


def _sampling_violations(sampling: generation_pb2.SamplingOptions) -> Iterator[FieldViolation]:
    for name in (
        *("temperature", "top_p", "top_k", "min_p"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    ):
        if sampling.HasField(name):
            field = f"sampling.{name}"
            yield from _counted(field, field, getattr(sampling, name))
    if sampling.HasField("top_p") and sampling.top_p == 0.0:
        yield FieldViolation("sampling.top_p", "0 keeps no token; it must be above 0")
    if sampling.HasField("repetition_penalty") and sampling.repetition_penalty == 0.0:
        yield FieldViolation(
            "sampling.repetition_penalty", "0 divides by nothing; it must be above 0, 1 is off"
        )


def _bias_violations(
    sampling: generation_pb2.SamplingOptions, vocabulary: int
) -> Iterator[FieldViolation]:
    name = "sampling.logit_bias"
    count = list(_counted(name, name, len(sampling.logit_bias)))
    if count:
        yield from count
        return
    ids = [entry.token_id for entry in sampling.logit_bias]
    yield from _id_violations(name, ids, vocabulary, ".token_id")
    for index, entry in enumerate(sampling.logit_bias):
        yield from _counted(f"{name}[{index}].bias", f"{name}.bias", entry.bias)
    seen: set[int] = set()
    for index, token in enumerate(ids):
        if token in seen:
            yield FieldViolation(
                f"{name}[{index}].token_id", f"{token} has a bias already; give one a token"
            )
            return
        seen.add(token)


def _stop_violations(stop: generation_pb2.StopOptions, vocabulary: int) -> Iterator[FieldViolation]:
    if stop.HasField("max_tokens"):
        yield from _counted("stop.max_tokens", "stop.max_tokens", stop.max_tokens)
        if stop.min_tokens > stop.max_tokens:
            yield FieldViolation(
                "stop.min_tokens",
                f"{stop.min_tokens} tokens, at most stop.max_tokens, {stop.max_tokens}",
            )
    else:
        yield from _counted("stop.min_tokens", "stop.min_tokens", stop.min_tokens)
    count = list(_counted("stop.token_ids", "stop.token_ids", len(stop.token_ids)))
    yield from count or _id_violations("stop.token_ids", stop.token_ids, vocabulary)
    count = list(_counted("stop.sequences", "stop.sequences", len(stop.sequences)))
    if count:
        yield from count
        return
    for index, text in enumerate(stop.sequences):
        yield from _counted(f"stop.sequences[{index}]", "stop.sequences.text", len(text.encode()))


def _output_violations(output: generation_pb2.OutputOptions) -> Iterator[FieldViolation]:
    if output.HasField("top_logprobs"):
        yield from _counted("output.top_logprobs", "output.top_logprobs", output.top_logprobs)
        if output.final_only:
            # All of a long output's would be larger than any message.
            yield FieldViolation(
                "output.top_logprobs", "comes with deltas; output.final_only sends none"
            )


def _constraint_violations(constraint: generation_pb2.Constraint) -> Iterator[FieldViolation]:
    """What can be seen from outside; whether it can be compiled is found out later."""
    kind = constraint.WhichOneof("kind")
    if kind is None:
        yield FieldViolation(
            "constraint", "is empty; give json_schema, regex, lark_grammar or json_object"
        )
    elif kind != "json_object":
        field = f"constraint.{kind}"
        yield from _counted(field, field, len(getattr(constraint, kind).encode()))


def _id_violations(
    field: str, ids: Iterable[int], vocabulary: int, inside: str = ""
) -> Iterator[FieldViolation]:
    """`inside` is where an id stands in its entry of the list."""
    for index, token in enumerate(ids):
        if token >= vocabulary:
            yield FieldViolation(
                f"{field}[{index}]{inside}",
                f"{token} is outside the vocabulary of {vocabulary} tokens",
            )
            return  # one is enough: there may be many


def _counted(field: str, limit_name: str, value: float) -> Iterator[FieldViolation]:
    limit = LIMITS[limit_name]
    if not math.isfinite(value):
        yield FieldViolation(field, "is not a finite number")
    elif not limit.least <= value <= limit.most:
        unit = f" {limit.unit}" if limit.unit else ""
        yield FieldViolation(
            field, f"{value:.15g}{unit}, allowed are {limit.least:.15g} to {limit.most:.15g}"
        )
