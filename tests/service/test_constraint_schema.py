"""Reading a client's JSON schema: nothing in it is passed over, and no word of it is told."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from kvledger.constraints.refusal import ConstraintRefused
from kvledger.constraints.schema import read_schema

CANARY = "canary4711"

# What pydantic and zod write, with everything that says nothing about what matches.
ORDINARY = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "$id": "https://example.org/x",
    "$comment": "c",
    "$vocabulary": {"https://example.org/v": True},
    "$anchor": "here",
    "title": "T",
    "description": "d",
    "x-order": {"maxItmes": 3},
    "type": "object",
    "properties": {
        "maxItmes": {"type": "string", "format": "date-time", "deprecated": True},
        "not": {"type": "array", "items": {"$ref": "#/$defs/uniqueItems"}, "minItems": 1},
        "$schema": {"default": {"not": 1}, "examples": [{"if": 2}], "readOnly": True},
        "pet": {
            "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
            "discriminator": {"propertyName": "kind", "mapping": {"cat": "#/$defs/cat"}},
        },
        "raw": {"type": "string", "contentEncoding": "base64", "contentSchema": {"not": {}}},
        "fixed": {"const": {"if": 1}, "enum": [{"then": 2}], "writeOnly": False},
    },
    "required": ["maxItmes"],
    "additionalProperties": False,
    "$defs": {
        "uniqueItems": {"anyOf": [{"type": "null"}, {"type": "number", "example": 1}]},
        "cat": {"allOf": [True, {"patternProperties": {"if": {"maxLength": 3}}}]},
        "dog": {"prefixItems": [{"minimum": 1}], "items": False, "externalDocs": {}, "xml": {}},
    },
}


def refusal(schema: Any) -> str:
    """Why a schema is refused."""
    with pytest.raises(ConstraintRefused) as raised:
        read_schema(json.dumps(schema))
    assert CANARY not in str(raised.value)
    return str(raised.value)


def test_an_ordinary_schema_is_taken_as_it_is() -> None:
    """What tools write would be refused, or something of it lost."""
    expected = {key: value for key, value in ORDINARY.items() if key not in ("$schema", "$id")}
    assert read_schema(json.dumps(ORDINARY)) == expected
    assert "$schema" in expected["properties"], "a property of that name is none"


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"maxItmes": 3}, "the schema itself, counted from 0, number 0"),
        ({"type": "array", "maxItmes": 3}, "the schema itself, counted from 0, number 1"),
        ({"a": 1, "type": "null", CANARY: 2}, "the schema itself, counted from 0, number 0, 2"),
        ({f"k{i}": i for i in range(20)}, "number 0, 1, 2, 3, 4, 5, 6, 7;"),
        ({"properties": {"a": {}, CANARY: {CANARY: 1}}}, "properties[1], counted from 0, number 0"),
        ({"$defs": {CANARY: {"items": {"Type": 1}}}}, "$defs[0].items, counted"),
        ({"definitions": {CANARY: {"items": [{}, {"Type": 1}]}}}, "definitions[0].items[1], "),
        ({"patternProperties": {CANARY: {"Type": 1}}}, "patternProperties[0], "),
        ({"anyOf": [{}, {"allOf": [{"oneOf": [{"a": 1}]}]}]}, "anyOf[1].allOf[0].oneOf[0], "),
        ({"prefixItems": [{}, {"a": 1}]}, "prefixItems[1], "),
        ({"items": [], "additionalItems": {"a": 1}}, "additionalItems, "),
        ({"additionalProperties": {"a": 1}}, "additionalProperties, "),
        ({"properties": {"a": {"Type": 1}}, "b": 1}, "the schema itself, counted from 0, number 1"),
        ({"properties": {"a": {"x": 1}, "b": {"x": 1}}}, "properties[0], "),
        ({"$ref": "#/x-a/b~1%7E0", "x-a": {"b/~": {"Type": 1}}}, "of $ref, "),
        ({"items": {"$ref": "#/examples/1"}, "examples": [0, {"Type": 1}]}, "of items.$ref, "),
    ],
    ids=str,
)
def test_a_keyword_that_is_none_is_refused_where_it_is(schema: Any, place: str) -> None:
    """A misspelt bound would bound nothing, and nobody would say so."""
    said = refusal(schema)
    assert said.startswith("has keywords that are none of JSON Schema's: of the keys of ")
    assert place in said


@pytest.mark.parametrize("draft", [None, "draft-04", "draft-06", "draft-07"])
@pytest.mark.parametrize(
    "keyword",
    [
        *("not", "if", "contains", "uniqueItems", "propertyNames", "dependentRequired"),
        *("dependencies", "unevaluatedProperties", "minContains", "$dynamicRef"),
        *("$recursiveAnchor", "nullable"),
    ],
)
def test_a_keyword_that_is_not_supported_is_refused_by_name(
    keyword: str, draft: str | None
) -> None:
    """Under an older draft, which does not have it, the library would pass over it."""
    schema: dict[str, Any] = {"properties": {CANARY: {"items": {keyword: True, "title": CANARY}}}}
    if draft is not None:
        schema["$schema"] = f"http://json-schema.org/{draft}/schema#"
    assert refusal(schema) == f"uses what is not supported in properties[0].items: {keyword}"


def test_names_come_in_one_sentence() -> None:
    """A client would change one keyword after the other."""
    said = refusal({"then": {}, "uniqueItems": True, "if": {}, CANARY: 1})
    assert said == "uses what is not supported in the schema itself: if, then, uniqueItems"


def test_older_drafts_keep_what_they_say() -> None:
    """The library passes over what the draft does not have, such as const in draft 4."""
    written = {"$schema": "http://json-schema.org/draft-04/schema#", "const": 1}
    nested = {"items": {"$schema": "http://json-schema.org/draft-07/schema", "prefixItems": []}}
    assert read_schema(json.dumps(written)) == {"const": 1}
    assert read_schema(json.dumps(nested)) == {"items": {"prefixItems": []}}


@pytest.mark.parametrize(
    "reference",
    [
        *("#/", "#/a", "#/items/0", "#/enum/9", "#/enum/99999999999999999999", "#/enum/x"),
        *("#", "#/enum/\u00b2", "#/%", "#/~", None),
    ],
)
def test_references_that_lead_nowhere_are_left_to_the_library(reference: Any) -> None:
    """Looking for what is not there would end the process."""
    schema = {"$ref": reference, "items": {}, "enum": [1]}
    assert read_schema(json.dumps(schema)) == schema


@pytest.mark.parametrize("reference", ["x", "http://a.b/c#/x-q", "#here", "", 5])
def test_references_to_elsewhere_are_refused(reference: Any) -> None:
    """What lies there would not be looked at, and followed or not as the library likes."""
    said = refusal({"properties": {CANARY: {"$ref": reference}}})
    place = "properties[0]: it must begin with #/"
    assert said == f"uses a reference that is not supported in {place}"


def test_a_schema_has_no_identity_of_its_own() -> None:
    """References inside of it would be looked for in it, and what they find not be looked at."""
    schema = {"properties": {"a": {"$id": "http://a.b/c", "$ref": "#/x-q"}}, "x-q": {"Type": 1}}
    assert "properties[0].$ref, " in refusal(schema)
    inner = {"id": "http://a.b/c", "x-q": {"Type": 1}}
    assert read_schema(json.dumps({"items": inner})) == {"items": {"x-q": {"Type": 1}}}


def test_values_that_are_referred_to_stay_what_they_are() -> None:
    """A client would get another constant than the one it wrote."""
    said = refusal({"const": {"$schema": "x"}, "properties": {"p": {"$ref": "#/const"}}})
    assert said == "has $schema in properties[0].$ref, where only a reference finds it"


def test_of_two_ways_to_write_items_none_is_passed_over() -> None:
    """The library follows one of them, and admits what the other rules out."""
    both = {"items": [{"type": "null"}], "prefixItems": [{"type": "string"}]}
    assert refusal(both) == "has prefixItems beside a list of items in the schema itself"
    assert refusal({"prefixItems": [{}], "additionalItems": False}).startswith(
        "has additionalItems without a list of items in the schema itself; "
    )
    tuple_of_old = {"items": [{"type": "integer"}], "additionalItems": False}
    assert read_schema(json.dumps(tuple_of_old)) == tuple_of_old


def test_references_in_a_circle_end() -> None:
    """A schema of a list or a tree, which refers to itself, would be walked for ever."""
    tree = {"properties": {"next": {"$ref": "#"}, "all": {"items": {"$ref": "#/properties/all"}}}}
    assert read_schema(json.dumps(tree)) == tree


def test_what_is_too_large_says_which_limit_it_meets() -> None:
    """A client would look for a mistake in a schema that has none."""
    deep = '{"items":' * 5000 + "{}" + "}" * 5000
    with pytest.raises(ConstraintRefused, match="more than 64 levels deep"):
        read_schema(deep)
    for number in (2**53 + 1, -(2**53) - 1, 10**100):
        assert "whole number beyond 9007199254740992" in refusal({"maximum": number})
    with pytest.raises(ConstraintRefused, match="whole number beyond"):
        read_schema('{"maximum": ' + "9" * 10_000 + "}")
    assert read_schema(json.dumps({"maximum": 2**53, "minimum": -(2**53)}))


def test_a_long_place_is_cut() -> None:
    """The sentence would not fit into the metadata of a refusal."""
    value: Any = {"Type": 1}
    for _ in range(60):
        value = {"additionalProperties": value}
    said = refusal(value)
    assert "..." in said
    assert len(said) < 600


def test_the_largest_schemas_are_read_in_no_time() -> None:
    """Whoever sends many of them would keep the server from everybody else."""
    wide = {"properties": {str(i): {"$ref": "#/$defs/a"} for i in range(4000)}, "$defs": {"a": {}}}
    text = json.dumps(wide)
    assert len(text) > 100_000
    started = time.process_time()
    read_schema(text)
    assert time.process_time() - started < 1.0
