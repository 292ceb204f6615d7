"""A JSON schema as a client wrote it: read within limits, and nothing in it that nobody follows.

llguidance passes over every keyword that it does not know, and over those that the draft named by
`$schema` does not have. What the client meant to rule out would come. So each keyword is one of
these: followed, without a say in what matches, or refused with its place. A place is told by
keywords of the standard and by numbers, for names of properties are the client's.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn, TypeAlias
from urllib.parse import unquote

from kvledger.constraints.refusal import ConstraintRefused

# Levels of objects and arrays in a schema. Compiling recurses in native code.
SCHEMA_NESTING_MAX = 64

# Whole numbers beyond this one are not kept as they are: llguidance reads them as floats.
_WHOLE_NUMBER_MAX = 2**53

# Keywords that hold schemas: one, a list of them, or an object of them by names of the client's.
_HOLDS_ONE = frozenset({"items", "additionalItems", "additionalProperties"})
_HOLDS_LIST = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
_HOLDS_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_HOLDS = _HOLDS_ONE | _HOLDS_LIST | _HOLDS_NAMED

# The other keywords that llguidance follows.
_FOLLOWED = frozenset(
    {"type", "enum", "const", "$ref", "required", "format", "pattern", "multipleOf"}
    | {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
    | {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
)

# Those that say nothing about what matches: the standard's, and some of OpenAPI's.
_SAY_NOTHING = frozenset(
    {"$schema", "$id", "id", "$anchor", "$vocabulary", "$comment", "title", "description"}
    | {"default", "examples", "deprecated", "readOnly", "writeOnly"}
    | {"contentMediaType", "contentEncoding", "contentSchema"}
    | {"discriminator", "example", "externalDocs", "xml"}
)

# Taken out: by an older draft llguidance would pass over what that draft does not have, and from an
# identity of its own it would look for references elsewhere than here.
_IDENTITIES = ("$schema", "$id", "id")

# Those that somebody may mean, and that are not supported. Names from here may be told.
_UNSUPPORTED = (
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems"),
    *("propertyNames", "dependentRequired", "dependentSchemas", "dependencies"),
    *("unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$dynamicAnchor"),
    *("$recursiveRef", "$recursiveAnchor", "nullable"),
)

_KNOWN = _HOLDS | _FOLLOWED | _SAY_NOTHING

# Names of extensions, which anybody may add, begin with it.
_EXTENSION = "x-"

# Keys of one schema, and steps of its place, that are told at most.
_KEYS_TOLD = 8
_STEPS_TOLD = 16

# Steps from the schema to one inside it, the last one first; none for the whole.
_Place: TypeAlias = "tuple[_Place, str] | None"


def read_schema(text: str) -> dict[str, Any]:
    """A schema of draft 2020-12, in which every keyword has the meaning that the standard gives it.

    Older drafts' ways to say the same are in it as they were. Raises ConstraintRefused.
    """
    try:
        schema = json.loads(text, parse_constant=_no_constant, parse_int=_whole_number)
        json.dumps(schema, allow_nan=False)  # 1e999 is read as infinity
    except RecursionError:
        raise ConstraintRefused(_TOO_DEEP) from None
    except ValueError:
        raise ConstraintRefused("is not JSON; it must be a JSON schema") from None
    if schema is True:
        return {}
    if schema is False:
        raise ConstraintRefused("is the schema false, which nothing matches")
    if not isinstance(schema, dict):
        raise ConstraintRefused("is JSON and no schema; a schema is an object, true or false")
    if _is_deeper(schema, SCHEMA_NESTING_MAX):
        raise ConstraintRefused(_TOO_DEEP)
    if "x-guidance" in schema:
        raise ConstraintRefused("sets x-guidance, which belongs to the server")
    for place, part in list(_schemas_in(schema)):
        _check_keywords(place, part)
        _check_arrays(place, part)
        _check_reference(place, part)
        _drop_identities(place, part)
    return schema


_TOO_DEEP = f"nests objects and arrays more than {SCHEMA_NESTING_MAX} levels deep"


def _no_constant(name: str) -> NoReturn:
    raise ValueError


def _whole_number(text: str) -> int:
    if len(text) > 20 or abs(int(text)) > _WHOLE_NUMBER_MAX:
        raise ConstraintRefused(f"has a whole number beyond {_WHOLE_NUMBER_MAX}")
    return int(text)


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether a value has more levels of objects and arrays; level by level, without recursion."""
    level = [value]
    for _ in range(levels):
        level = [part for each in level for part in _parts(each)]
    return any(isinstance(part, dict | list) for part in level)


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _schemas_in(schema: dict[str, Any]) -> Iterator[tuple[_Place, dict[str, Any]]]:
    """Every schema in a schema, each once, with its place: in their order, and then those that lie
    where only a reference finds them."""
    seen: set[int] = set()
    references: deque[tuple[_Place, str]] = deque()
    pending: list[tuple[_Place, Any]] = [(None, schema)]
    while pending or references:
        if not pending:
            place, pointer = references.popleft()
            pending.append((place, _target(schema, pointer)))
        place, part = pending.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        reference = part.get("$ref")
        if isinstance(reference, str) and reference.startswith("#/"):
            references.append(((place, "$ref"), reference))
        if not _HOLDS.isdisjoint(part):
            held = [((place, step), each) for step, each in _held_by(part)]
            pending += reversed(held)
        yield place, part


def _held_by(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """What a schema holds in places of schemas, with the steps that lead there."""
    for keyword, value in schema.items():
        if keyword in _HOLDS_NAMED and isinstance(value, dict):
            yield from ((f"{keyword}[{i}]", each) for i, each in enumerate(value.values()))
        elif keyword in _HOLDS_LIST and isinstance(value, list):
            yield from ((f"{keyword}[{i}]", each) for i, each in enumerate(value))
        elif keyword in _HOLDS_ONE:
            yield keyword, value


def _target(schema: dict[str, Any], pointer: str) -> Any:
    """Where a reference points to; None where there is nothing, which llguidance refuses."""
    value: Any = schema
    for step in unquote(pointer[2:]).split("/"):
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict):
            value = value.get(step)
        elif isinstance(value, list) and step.isascii() and step.isdigit():
            value = value[int(step)] if len(step) < 8 and int(step) < len(value) else None
        else:
            return None
    return value


def _check_keywords(place: _Place, schema: dict[str, Any]) -> None:
    if _KNOWN.issuperset(schema):
        return
    if unsupported := [keyword for keyword in _UNSUPPORTED if keyword in schema]:
        names = ", ".join(unsupported)
        raise ConstraintRefused(f"uses what is not supported in {_told(place)}: {names}")
    unknown = [
        index
        for index, keyword in enumerate(schema)
        if keyword not in _KNOWN and not keyword.startswith(_EXTENSION)
    ]
    if unknown:
        numbers = ", ".join(map(str, unknown[:_KEYS_TOLD]))
        raise ConstraintRefused(
            f"has keywords that are none of JSON Schema's: of the keys of {_told(place)}, counted "
            f"from 0, number {numbers}; names of extensions begin with x-"
        )


def _drop_identities(place: _Place, schema: dict[str, Any]) -> None:
    found = [keyword for keyword in _IDENTITIES if keyword in schema]
    if found and _is_by_reference(place):
        # It may be a value as well, which nobody may change.
        raise ConstraintRefused(
            f"has {', '.join(found)} in {_told(place)}, where only a reference finds it"
        )
    for keyword in found:
        del schema[keyword]


def _is_by_reference(place: _Place) -> bool:
    while place is not None:
        place, step = place
        if step == "$ref":
            return True
    return False


def _check_arrays(place: _Place, schema: dict[str, Any]) -> None:
    """llguidance follows one of two ways to write what each item is, and passes over the other."""
    items = schema.get("items")
    if isinstance(items, list) and "prefixItems" in schema:
        raise ConstraintRefused(f"has prefixItems beside a list of items in {_told(place)}")
    if "additionalItems" in schema and not isinstance(items, list):
        raise ConstraintRefused(
            f"has additionalItems without a list of items in {_told(place)}; after prefixItems "
            f"it is items that says what follows"
        )


def _check_reference(place: _Place, schema: dict[str, Any]) -> None:
    reference = schema.get("$ref")
    if reference is None:
        return
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise ConstraintRefused(
            f"uses a reference that is not supported in {_told(place)}: it must begin with #/"
        )


def _told(place: _Place) -> str:
    steps: list[str] = []
    while place is not None:
        place, step = place
        steps.append(step)
    if not steps:
        return "the schema itself"
    cut = "..." if len(steps) > _STEPS_TOLD else ""
    return cut + ".".join(reversed(steps[:_STEPS_TOLD]))
