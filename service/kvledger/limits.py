"""Every limit on what a request may contain, in one table, and the one place that checks them.

The checks run on the message as it arrived, before anything is allocated for it. Violations quote
numbers and field paths, never the client's own strings.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from google.protobuf import duration_pb2

from kvledger.errors import FieldViolation, InvalidRequest
from kvledger.v1 import generation_pb2, models_pb2

# Largest message the server receives, in bytes; gRPC itself refuses a larger one.
MESSAGE_BYTES_MAX = 4 * 1024 * 1024
# Largest metadata of a call, in bytes.
METADATA_BYTES_MAX = 16 * 1024
# Arrays and objects inside one another, in what is JSON text. Templates may put them into others.
JSON_DEPTH_MAX = 24
# Elements and members in all JSON of a chat: each takes as much work as many characters.
JSON_VALUES_MAX = 32 * 1024
# Names of tools, ids of calls, and names of a template's variables. What they are made of can be
# told from a control token by what a template puts around it.
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_CALL_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_ARGUMENT_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_NAMES = {
    _TOOL_NAME: "it is 1 to 128 of letters, digits, _, - and .",
    _CALL_ID: "it is 1 to 128 of letters, digits, _, -, . and :",
    _ARGUMENT_NAME: "it is a letter and up to 63 of letters, digits and _",
}
# Variables and functions of templates that the server provides itself.
_SERVERS_OWN_NAMES = frozenset(
    {"messages", "tools", "xml_tools", "documents", "add_generation_prompt"}
    | {"continue_final_message", "bos_token", "eos_token", "unk_token", "pad_token"}
    | {"range", "dict", "namespace", "raise_exception", "strftime_now", "loop", "self", "caller"}
    | {"varargs", "kwargs", "lipsum", "cycler", "joiner"}
)
_SCOPES = frozenset(generation_pb2.CacheScope.values())
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
    # Reasoning, calls, ids and names included.
    Limit("chat.messages.content", 0, 1024 * 1024, "bytes in all messages"),
    Limit("chat.messages.tool_calls", 0, 64, "calls"),
    Limit("chat.tools", 0, 128, "tools"),
    Limit("chat.tools.definitions", 0, 256 * 1024, "bytes in all tools"),
    Limit("chat.template_arguments", 0, 32, "arguments"),
    Limit("chat.template_arguments.values", 0, 16 * 1024, "bytes in all arguments"),
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
    Limit("cache.namespace", 1, 256, "bytes"),
    Limit("cache.shared_scope", 1, 256, "bytes"),
    Limit("cache.shared_messages", 1, 1024, "messages"),
    Limit("cache.shared_tokens", 1, 256 * 1024, "tokens"),
    Limit("output.top_logprobs", 0, 20, "tokens"),
    Limit("output.prompt_logprobs", 0, 20, "tokens"),
    Limit("samples", 1, 16, "samples"),
    Limit("priority", -10, 10, ""),
    Limit("queue_timeout", 0.0, 3600.0, "seconds"),
    Limit("tpot_target", 0.001, 60.0, "seconds"),
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


def check_shared_fits(shared_tokens: int, tokens: int) -> None:
    """Raises InvalidRequest if more tokens are to be shared than a prompt turned out to have."""
    if shared_tokens > tokens:
        raise InvalidRequest(
            FieldViolation(
                "cache.shared_tokens", f"{shared_tokens} tokens, and the prompt has {tokens}"
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
    if request.HasField("samples"):
        yield from _counted("samples", "samples", request.samples)
    if request.output.parse_chat and request.WhichOneof("prompt") != "chat":
        yield FieldViolation(
            "output.parse_chat", "is for answers to a chat; send the prompt as one"
        )
    if request.HasField("constraint"):
        yield from _constraint_violations(request.constraint)
    yield from _cache_violations(request)
    yield from _counted("priority", "priority", request.priority)
    for field in ("queue_timeout", "tpot_target"):
        if request.HasField(field):
            yield from _duration_violations(field, getattr(request, field))


def _duration_violations(field: str, duration: duration_pb2.Duration) -> Iterator[FieldViolation]:
    found = list(_counted(field, field, duration.seconds + duration.nanos / 1e9))
    if not found and not 0 <= duration.nanos < 10**9:
        found.append(
            FieldViolation(f"{field}.nanos", f"{duration.nanos}, allowed are 0 to 999999999")
        )
    yield from found


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
            generation_pb2.ROLE_TOOL,
        ):
            yield FieldViolation(
                f"chat.messages[{index}].role",
                f"{message.role} is not a role; set ROLE_SYSTEM, ROLE_USER, ROLE_ASSISTANT or "
                f"ROLE_TOOL",
            )
        else:
            yield from _message_violations(f"chat.messages[{index}]", message)
    size = sum(map(_message_bytes, chat.messages))
    yield from _counted("chat.messages.content", "chat.messages.content", size)
    yield from _tools_violations(chat)
    yield from _argument_violations(chat)


def _message_bytes(message: generation_pb2.ChatMessage) -> int:
    texts = [message.content, message.reasoning, message.tool_call_id, message.name]
    for call in message.tool_calls:
        texts += [call.id, call.name, call.arguments]
    return sum(len(text.encode()) for text in texts)


def _message_violations(path: str, message: generation_pb2.ChatMessage) -> Iterator[FieldViolation]:
    """What a message of one role has that belongs to another, and names that are none."""
    if message.role != generation_pb2.ROLE_ASSISTANT:
        for name in ("reasoning", "tool_calls"):
            if getattr(message, name):
                yield FieldViolation(f"{path}.{name}", "is for ROLE_ASSISTANT alone")
    if message.role == generation_pb2.ROLE_TOOL:
        yield from _named(f"{path}.tool_call_id", message.tool_call_id, _CALL_ID)
        if message.name:
            yield from _named(f"{path}.name", message.name, _TOOL_NAME)
    else:
        for name in ("tool_call_id", "name"):
            if getattr(message, name):
                yield FieldViolation(f"{path}.{name}", "is for ROLE_TOOL alone")
    count = list(
        _counted(f"{path}.tool_calls", "chat.messages.tool_calls", len(message.tool_calls))
    )
    yield from count
    for place, call in enumerate(() if count else message.tool_calls):
        if call.id:
            yield from _named(f"{path}.tool_calls[{place}].id", call.id, _CALL_ID)
        yield from _named(f"{path}.tool_calls[{place}].name", call.name, _TOOL_NAME)


def _tools_violations(chat: generation_pb2.ChatPrompt) -> Iterator[FieldViolation]:
    count = list(_counted("chat.tools", "chat.tools", len(chat.tools)))
    if count:
        yield from count
        return
    texts = (text for tool in chat.tools for text in (tool.name, tool.description, tool.parameters))
    size = sum(len(text.encode()) for text in texts)
    yield from _counted("chat.tools", "chat.tools.definitions", size)
    first_places: dict[str, int] = {}
    for place, tool in enumerate(chat.tools):
        yield from _named(f"chat.tools[{place}].name", tool.name, _TOOL_NAME)
        first = first_places.setdefault(tool.name, place)
        if first != place:
            yield FieldViolation(
                f"chat.tools[{place}].name", f"is that of chat.tools[{first}] as well"
            )


def _argument_violations(chat: generation_pb2.ChatPrompt) -> Iterator[FieldViolation]:
    field = "chat.template_arguments"
    arguments = chat.template_arguments
    count = list(_counted(field, field, len(arguments)))
    if count:
        yield from count
        return
    size = sum(len(name.encode()) + len(text.encode()) for name, text in arguments.items())
    yield from _counted(field, "chat.template_arguments.values", size)
    for name in sorted(arguments):
        if name in _SERVERS_OWN_NAMES:
            yield FieldViolation(field, f"{name} is set by the server")
        else:
            yield from _named(field, name, _ARGUMENT_NAME)


def _named(field: str, name: str, pattern: re.Pattern[str]) -> Iterator[FieldViolation]:
    if pattern.fullmatch(name) is None:
        yield FieldViolation(
            field, f"has {len(name.encode())} bytes that are no name: {_NAMES[pattern]}"
        )


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
    for name in ("top_logprobs", "prompt_logprobs"):
        if not output.HasField(name):
            continue
        field = f"output.{name}"
        yield from _counted(field, field, getattr(output, name))
        if output.final_only:
            # All of a long text's would be larger than any message.
            yield FieldViolation(field, "comes in messages of its own; output.final_only has none")


def _cache_violations(request: generation_pb2.GenerateRequest) -> Iterator[FieldViolation]:
    cache = request.cache
    if cache.scope not in _SCOPES:
        yield FieldViolation(
            "cache.scope",
            f"{cache.scope} is no scope; set CACHE_SCOPE_TENANT, CACHE_SCOPE_NAMESPACE or "
            f"CACHE_SCOPE_NONE",
        )
    if cache.scope == generation_pb2.CACHE_SCOPE_NAMESPACE:
        yield from _counted("cache.namespace", "cache.namespace", len(cache.namespace.encode()))
    elif cache.namespace:
        yield FieldViolation("cache.namespace", "is for CACHE_SCOPE_NAMESPACE alone")
    if cache.shared_scope:
        yield from _shared_scope_violations(request)
        return
    for name in ("shared_messages", "shared_tokens"):
        if getattr(cache, name):
            yield FieldViolation(
                f"cache.{name}", "counts what lies in cache.shared_scope, which is not set"
            )


def _shared_scope_violations(request: generation_pb2.GenerateRequest) -> Iterator[FieldViolation]:
    """Of a request that names a shared scope: exactly one count, of what there is."""
    cache, kind = request.cache, request.WhichOneof("prompt")
    size = len(cache.shared_scope.encode())
    yield from _counted("cache.shared_scope", "cache.shared_scope", size)
    if cache.scope == generation_pb2.CACHE_SCOPE_NONE:
        yield FieldViolation("cache.shared_scope", "is reused, and CACHE_SCOPE_NONE reuses nothing")
    if kind == "chat":
        field, unit, most = "cache.shared_messages", "messages", len(request.chat.messages)
        if cache.shared_tokens:
            yield FieldViolation("cache.shared_tokens", f"is not for chat prompts; set {field}")
    else:
        field, unit, most = "cache.shared_tokens", "tokens", len(request.token_ids.ids)
        if cache.shared_messages:
            yield FieldViolation("cache.shared_messages", f"is for chat prompts; set {field}")
    count = cache.shared_messages if kind == "chat" else cache.shared_tokens
    found = list(_counted(field, field, count))
    if not found and kind in ("chat", "token_ids") and count > most:
        found.append(FieldViolation(field, f"{count} {unit}, and the prompt has {most}"))
    yield from found


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
