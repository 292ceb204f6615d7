"""Requests field by field: each has a limit in the one table, or a reason for none."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.descriptor import FieldDescriptor as Field

from kvledger.errors import InvalidRequest
from kvledger.limits import LIMITS, check_generate
from kvledger.v1 import generation_pb2 as pb

VOCABULARY = 1000

# Fields that the table need not name, and what holds instead.
_ELSEWHERE = {
    "token_ids.ids": "each below the vocabulary, besides their count",
    "stop.token_ids": "each below the vocabulary, besides their count",
    "sampling.logit_bias.token_id": "below the vocabulary",
    "chat.messages.role": "one of four",
    "cache.scope": "one of four",
    "sampling.seed": "any number is a seed",
    "queue_timeout.seconds": "queue_timeout",
    "queue_timeout.nanos": "queue_timeout",
    "tpot_target.seconds": "tpot_target",
    "tpot_target.nanos": "tpot_target",
}
# What the table calls the limit of a field, where that is not the field's path.
_NAMES = {
    "stop.sequences": ("stop.sequences", "stop.sequences.text"),
    "chat.messages.reasoning": ("chat.messages.content",),
    "chat.messages.name": ("chat.messages.content",),
    "chat.messages.tool_call_id": ("chat.messages.content",),
    "chat.messages.tool_calls.id": ("chat.messages.content",),
    "chat.messages.tool_calls.name": ("chat.messages.content",),
    "chat.messages.tool_calls.arguments": ("chat.messages.content",),
    "chat.tools.name": ("chat.tools.definitions",),
    "chat.tools.description": ("chat.tools.definitions",),
    "chat.tools.parameters": ("chat.tools.definitions",),
    "chat.template_arguments.key": ("chat.template_arguments.values",),
    "chat.template_arguments.value": ("chat.template_arguments.values",),
}


def leaves(message: Descriptor, prefix: str = "") -> Iterator[tuple[str, Field]]:
    """Every field that holds a value or is a list, by its path."""
    for field in message.fields:
        path = prefix + field.name
        if field.message_type is None:
            yield path, field
            continue
        if field.is_repeated:
            yield path, field
        yield from leaves(field.message_type, f"{path}.")


def test_every_field_of_a_request_has_a_limit() -> None:
    """A new number or list would come in without one (S17)."""
    without = []
    for path, field in leaves(pb.GenerateRequest.DESCRIPTOR):
        if field.type == Field.TYPE_BOOL or path in _ELSEWHERE:
            continue
        if not all(name in LIMITS for name in _NAMES.get(path, (path,))):
            without.append(path)
    assert without == [], "give each a row in limits.py"


def test_reasons_for_no_limit_are_of_fields_that_exist() -> None:
    """A renamed field would keep an exception that nobody looks at."""
    paths = {path for path, _ in leaves(pb.GenerateRequest.DESCRIPTOR)}
    assert paths >= _ELSEWHERE.keys() | _NAMES.keys()


def lists() -> list[str]:
    """Paths of every list in a request."""
    return [path for path, field in leaves(pb.GenerateRequest.DESCRIPTOR) if field.is_repeated]


def add_entries(request: pb.GenerateRequest, path: str, count: int) -> None:
    """Fills a list with that many entries, each of them valid."""
    chat = request.chat if path.startswith("chat.") else pb.ChatPrompt()
    if path == "chat.messages":
        chat.messages.extend([pb.ChatMessage(role=pb.ROLE_USER)] * count)
    elif path.startswith("chat."):
        message = chat.messages.add(role=pb.ROLE_ASSISTANT)
        if path == "chat.tools":
            chat.tools.extend(pb.Tool(name=f"t{i}", parameters="{}") for i in range(count))
        elif path == "chat.messages.tool_calls":
            call = pb.ToolCall(id="1", name="t", arguments="{}")
            message.tool_calls.extend([call] * count)
        else:
            chat.template_arguments.update({f"a{i}": "1" for i in range(count)})
    elif path == "sampling.logit_bias":
        biases = (pb.LogitBias(token_id=i % VOCABULARY) for i in range(count))
        request.sampling.logit_bias.extend(biases)
    else:
        holder, name = request, path
        if "." in path:
            parent, name = path.split(".")
            holder = getattr(request, parent)
        entries = ["a"] * count if path == "stop.sequences" else [1] * count
        getattr(holder, name).extend(entries)


@pytest.mark.parametrize("path", lists())
def test_every_list_is_refused_beyond_its_limit(path: str) -> None:
    """A list would be walked through, and kept, however long it is (S17)."""
    most = int(LIMITS[path].most)
    for count, allowed in (
        (most, True),
        (most + 1, False),
        (100 * most if most < 9999 else most + 2, False),
    ):
        request = pb.GenerateRequest()
        add_entries(request, path, count)
        if request.WhichOneof("prompt") is None:
            request.text = "a"
        if allowed:
            check_generate(request, VOCABULARY)
            continue
        with pytest.raises(InvalidRequest) as refused:
            check_generate(request, VOCABULARY)
        violation = refused.value.violations[0]
        assert re.sub(r"\[\d+\]", "", violation.field) == path
        assert str(most) in violation.reason


@pytest.mark.parametrize(
    ("seconds", "nanos"),
    [
        *((3600, 1), (2**62, 0), (-(2**62), 0), (0, -1), (3599, 1_000_000_001), (-1, 999_999_999)),
        *((1, 2_000_000_000), (1, -5), (0, 1_000_000_000)),
    ],
)
def test_waiting_is_bounded_however_it_is_written(seconds: int, nanos: int) -> None:
    """A duration whose parts are odd would slip past the limit, or raise further down."""
    request = pb.GenerateRequest(text="x")
    request.queue_timeout.seconds, request.queue_timeout.nanos = seconds, nanos
    with pytest.raises(InvalidRequest) as refused:
        check_generate(request, VOCABULARY)
    (violation,) = refused.value.violations
    within = 0 <= seconds + nanos / 1e9 <= 3600
    assert violation.field == ("queue_timeout.nanos" if within else "queue_timeout")
