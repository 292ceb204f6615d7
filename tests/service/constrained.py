"""What tests of constraints share: sources, ready constraints, and masks as sets."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from server_harness import tiny

from kvledger.constraints.source import ConstraintSource

pytest.importorskip("llguidance", reason="the extra kvledger[grammar] is not installed")

from kvledger.constraints.matcher import (  # needs llguidance
    Constraint,
    ConstraintState,
    compile_constraint,
)
from kvledger.constraints.vocabulary import Vocabulary

# Properties that a wrong mask would break: types, bounds, escapes, an order, nothing else.
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "bé", '"']}, "maxItems": 2},
        "alive": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "alive"],
    "additionalProperties": False,
}


def require_person(text: str) -> None:
    """That a text is JSON and has the schema PERSON, checked by hand."""
    value = json.loads(text)
    assert list(value) == ["name", "age", "tags", "alive"]
    assert isinstance(value["name"], str)
    assert 1 <= len(value["name"]) <= 8
    assert type(value["age"]) is int
    assert 0 <= value["age"] <= 130
    assert len(value["tags"]) <= 2
    assert set(value["tags"]) <= {"a", "bé", '"'}
    assert type(value["alive"]) is bool


def regex(text: str) -> ConstraintSource:
    return ConstraintSource("regex", text)


def lark(text: str) -> ConstraintSource:
    return ConstraintSource("lark_grammar", text)


def schema(value: object) -> ConstraintSource:
    return ConstraintSource("json_schema", json.dumps(value))


def vocabulary(
    tokens: Sequence[bytes], controls: Mapping[int, bytes], end_ids: Sequence[int]
) -> Any:
    """A small vocabulary, prepared."""
    return Vocabulary(tokens, controls, end_ids).prepared()


@cache
def tiny_vocabulary() -> Any:
    """That of the tiny model, whose first 256 ids are bytes."""
    tokenizer = tiny().tokenizer
    controls = {id_: text.encode() for id_, text in tokenizer.control_texts.items()}
    return vocabulary(tokenizer.token_bytes, controls, sorted(tokenizer.eos_ids))


def ready(source: ConstraintSource) -> Constraint:
    """A constraint for the tiny model, compiled in this process."""
    return compile_constraint(tiny_vocabulary(), source)


def allowed(state: ConstraintState, size: int) -> set[int]:
    """The tokens that may come next, of a vocabulary of some size."""
    words = np.zeros((size + 31) // 32, dtype=np.int32)
    state.fill(words)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    assert not bits[size:].any(), "no token beyond the last"
    return set(np.flatnonzero(bits).tolist())
