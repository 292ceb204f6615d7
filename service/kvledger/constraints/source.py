"""What a client's constraint says, in the words of llguidance: always one Lark grammar."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

Kind = Literal["json_schema", "regex", "lark_grammar", "json_object"]

# Levels of objects and arrays in a schema. Compiling recurses in native code.
SCHEMA_NESTING_MAX = 64

# Whole numbers beyond this one are not kept as they are: llguidance reads them as floats.
_WHOLE_NUMBER_MAX = 2**53

# Between two parts of a JSON text there is white space once, and this much of it at most: enough to
# indent by, and a model that likes spaces does not fill its answer with them.
_WHITE_SPACE = r"[ \n\r\t]{1,32}"

# Tokens are not forced where bytes are: the model chooses among all that spell them. So a mask is
# exactly the set of tokens that the grammar admits, and no text is ever cut into tokens here.
_OPTIONS = '%llguidance {"no_forcing": true}\n'

# Standard keywords that may be met and are not supported; the others of the standard are, or say
# nothing about what matches. Names from this table may be told; a client's own may not.
_KEYWORDS = (
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems"),
    *("propertyNames", "dependentRequired", "dependentSchemas", "dependencies"),
    *("unevaluatedItems", "unevaluatedProperties", "oneOf", "$dynamicRef", "$recursiveRef"),
)


class ConstraintRefused(Exception):
    """A constraint cannot be used. The message completes "the constraint ..." and quotes nothing
    of it but numbers."""


@dataclass(frozen=True)
class ConstraintSource:
    """A constraint as a client wrote it; `json_object` has no text."""

    kind: Kind
    text: str = ""

    @property
    def field(self) -> str:
        """Its path in a request."""
        return f"constraint.{self.kind}"

    @property
    def digest(self) -> bytes:
        """Equal for equal sources alone."""
        return hashlib.sha256(f"{self.kind}:{self.text}".encode("utf-8", "replace")).digest()


def lark_of(source: ConstraintSource) -> str:
    """The grammar of a source. Raises ConstraintRefused if it is none."""
    if source.kind == "lark_grammar":
        return _OPTIONS + source.text
    if source.kind == "regex":
        # Between slashes a slash is written with a backslash, unless it has one already.
        body = re.sub(r"\\.|/|\n", _escaped, source.text, flags=re.DOTALL)
        return f"{_OPTIONS}start: /{body}/\n"
    schema = {"type": "object"} if source.kind == "json_object" else _schema_of(source.text)
    options = {"whitespace_pattern": _WHITE_SPACE}
    written = json.dumps({**schema, "x-guidance": options}, allow_nan=False)
    return f"{_OPTIONS}start: %json {written}\n"


def unsupported_keywords(source: ConstraintSource) -> list[str]:
    """Standard keywords of a schema that are not supported, as far as they are in it."""
    if source.kind != "json_schema":
        return []
    objects = (
        value for value in _everything_in(json.loads(source.text)) if isinstance(value, dict)
    )
    found = {name for value in objects for name in value}
    return [keyword for keyword in _KEYWORDS if keyword in found]


def _escaped(match: re.Match[str]) -> str:
    text = match.group()
    return {"/": r"\/", "\n": r"\n"}.get(text, text)


def _schema_of(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text, parse_constant=_no_constant)
        json.dumps(schema, allow_nan=False)  # 1e999 is read as infinity
    except (ValueError, RecursionError):
        raise ConstraintRefused("is not JSON; it must be a JSON schema") from None
    if schema is True:
        return {}
    if schema is False:
        raise ConstraintRefused("is the schema false, which nothing matches")
    if not isinstance(schema, dict):
        raise ConstraintRefused("is JSON and no schema; a schema is an object, true or false")
    if _is_deeper(schema, SCHEMA_NESTING_MAX):
        raise ConstraintRefused(
            f"nests objects and arrays more than {SCHEMA_NESTING_MAX} levels deep"
        )
    if _largest_whole_number(schema) > _WHOLE_NUMBER_MAX:
        raise ConstraintRefused(f"has a whole number beyond {_WHOLE_NUMBER_MAX}")
    if "x-guidance" in schema:
        raise ConstraintRefused("sets x-guidance, which belongs to the server")
    return schema


def _no_constant(name: str) -> NoReturn:
    raise ValueError


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether a value has more levels of objects and arrays; level by level, without recursion."""
    level = [value]
    for _ in range(levels):
        level = [part for each in level for part in _parts(each)]
    return any(isinstance(part, dict | list) for part in level)


def _largest_whole_number(value: Any) -> int:
    return max((abs(part) for part in _everything_in(value) if isinstance(part, int)), default=0)


def _everything_in(value: Any) -> Iterator[Any]:
    pending = [value]
    while pending:
        part = pending.pop()
        yield part
        pending.extend(_parts(part))


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
