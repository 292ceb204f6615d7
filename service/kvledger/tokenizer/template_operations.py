"""What a chat template may call, and how each call counts its work before it runs.

Filters, tests and methods come from these lists; what is not on them is refused. An operation
costs time in proportion to what it reads, except for the few arguments that multiply it: those
count as a product, or are limited here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2 import pass_context
from jinja2.runtime import Context, Undefined

from kvledger.tokenizer.template_work import (
    ELEMENT_CHARACTERS,
    SENTINEL_VARIABLE,
    NotAllowedError,
    WorkMeter,
    shallow_size,
)

# Sorting compares each element with about this many others.
_SORT_COMPARISONS = 20
_NUMERAL_CHARACTERS_MAX = 100
_SEARCHED_CHARACTERS_MAX = 64
_FORMAT_WIDTH_DIGITS_MAX = 3
_INDENT_MAX = 16
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")

Arguments = Sequence[Any]
KeywordArguments = Mapping[str, Any]
# Counts one use of a filter or method on a value, before it runs.
Charge = Callable[[WorkMeter, Any, Arguments, KeywordArguments], None]


def _argument(
    args: Arguments, keywords: KeywordArguments, place: int, name: str, default: object
) -> Any:
    return args[place] if len(args) > place else keywords.get(name, default)


def refuse_unless(condition: bool, what: str) -> None:
    """Raises NotAllowedError, naming `what`, unless the condition holds."""
    if not condition:
        raise NotAllowedError(what)


def charge_nothing(
    work: WorkMeter, value: Any, args: Arguments, keywords: KeywordArguments
) -> None:
    """For what takes the same time whatever it is given."""


def _charge_whole(work: WorkMeter, value: Any, args: Arguments, keywords: KeywordArguments) -> None:
    work.reads(value, *args, *keywords.values())


def _charge_elements(
    work: WorkMeter, value: Any, args: Arguments, keywords: KeywordArguments
) -> None:
    # The arguments are used once for each element: a dotted attribute path, a value to compare.
    arguments_size = sum(work.measure(argument) for argument in (*args, *keywords.values()))
    work.characters(shallow_size(value) * (1 + arguments_size))


def _charge_compared_elements(
    work: WorkMeter, value: Any, args: Arguments, keywords: KeywordArguments
) -> None:
    _charge_elements(work, value, args, keywords)
    work.characters(_SORT_COMPARISONS * work.measure(value))


def _charge_joined(
    work: WorkMeter, value: Any, args: Arguments, keywords: KeywordArguments
) -> None:
    _charge_elements(work, value, args, keywords)
    work.reads(value)


def _charge_escaped(
    work: WorkMeter, value: Any, args: Arguments, keywords: KeywordArguments
) -> None:
    # One character becomes up to five.
    work.characters(5 * work.measure(value))


def _charge_titled(
    work: WorkMeter, value: Any, args: Arguments, keywords: KeywordArguments
) -> None:
    # Jinja does this one in Python, word by word.
    work.characters(ELEMENT_CHARACTERS * work.measure(value))


def _charge_trimmed(
    work: WorkMeter, value: Any, args: Arguments, keywords: KeywordArguments
) -> None:
    # Each character of the value is looked up among the given ones, one by one.
    characters = _argument(args, keywords, 0, "chars", None)
    if characters is not None:
        refuse_unless(
            shallow_size(characters) <= _SEARCHED_CHARACTERS_MAX, "a long set of characters"
        )
    work.reads(value)


def _charge_searched(
    work: WorkMeter, value: Any, args: Arguments, keywords: KeywordArguments
) -> None:
    # Searching from the right takes time in proportion to the product of both lengths.
    for argument in (*args, *keywords.values()):
        refuse_unless(
            not isinstance(argument, str) or len(argument) <= _SEARCHED_CHARACTERS_MAX,
            "a long separator",
        )
    work.reads(*args)
    work.characters(ELEMENT_CHARACTERS * work.measure(value))


def _charge_replaced(
    work: WorkMeter, value: Any, args: Arguments, keywords: KeywordArguments
) -> None:
    _charge_whole(work, value, args, keywords)
    refuse_unless(isinstance(value, (str, Undefined)), "replacing in what is not a string")
    old = _argument(args, keywords, 0, "old", "")
    new = _argument(args, keywords, 1, "new", "")
    counted = isinstance(value, str) and isinstance(old, str) and old
    occurrences = value.count(old) if counted else work.measure(value) + 1
    work.characters(occurrences * (1 + work.measure(new)))


def _charge_indented(
    work: WorkMeter, value: Any, args: Arguments, keywords: KeywordArguments
) -> None:
    width = _argument(args, keywords, 0, "width", 4)
    size = width if isinstance(width, int) else shallow_size(width)
    work.reads(value)
    lines = len(value.splitlines()) if isinstance(value, str) else 1
    work.characters((1 + lines) * max(0, size))


def _charge_rounded(
    work: WorkMeter, value: Any, args: Arguments, keywords: KeywordArguments
) -> None:
    precision = _argument(args, keywords, 0, "precision", 0)
    refuse_unless(isinstance(value, (int, float)), "rounding of what is not a number")
    in_range = isinstance(precision, int) and 0 <= precision <= 20
    refuse_unless(in_range, "a precision outside of 0 to 20")


def _charge_number(
    work: WorkMeter, value: Any, args: Arguments, keywords: KeywordArguments
) -> None:
    # Reading a long numeral takes time in proportion to the square of its length.
    refuse_unless(
        not isinstance(value, str) or len(value) <= _NUMERAL_CHARACTERS_MAX, "a long numeral"
    )
    _charge_whole(work, value, args, keywords)


def _charge_json(work: WorkMeter, value: Any, args: Arguments, keywords: KeywordArguments) -> None:
    indent = _argument(args, keywords, 1, "indent", None)
    width = indent if isinstance(indent, int) else shallow_size(indent or "")
    refuse_unless(width <= _INDENT_MAX, f"an indent over {_INDENT_MAX}")
    separators = _argument(args, keywords, 2, "separators", None)
    refuse_unless(work.measure(separators) <= 4 * _INDENT_MAX, "a long separator")
    # One character becomes up to six, and each element takes a line of its own.
    work.characters((6 + max(0, width)) * work.measure(value))


@pass_context
def json_text(
    context: Context,
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson`. Jinja's own escapes for HTML; models were trained on plain JSON."""
    text = json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if not ensure_ascii or text.isascii():
        return text
    sentinel = context.parent[SENTINEL_VARIABLE]
    return _NOT_ASCII.sub(
        lambda found: found[0] if found[0] == sentinel else json.dumps(found[0])[1:-1], text
    )


# Not listed: what reads the clock, chance or addresses, and what only formats for people.
FILTER_CHARGES: dict[str, Charge] = {
    "abs": _charge_whole,
    "capitalize": _charge_whole,
    "count": charge_nothing,
    "d": charge_nothing,
    "default": charge_nothing,
    "dictsort": _charge_compared_elements,
    "e": _charge_escaped,
    "escape": _charge_escaped,
    "first": charge_nothing,
    "float": _charge_number,
    "indent": _charge_indented,
    "int": _charge_number,
    "items": _charge_elements,
    "join": _charge_joined,
    "last": charge_nothing,
    "length": charge_nothing,
    "list": _charge_elements,
    "lower": _charge_whole,
    "map": _charge_elements,
    "max": _charge_compared_elements,
    "min": _charge_compared_elements,
    "reject": _charge_elements,
    "rejectattr": _charge_elements,
    "replace": _charge_replaced,
    "reverse": _charge_elements,
    "round": _charge_rounded,
    "safe": _charge_whole,
    "select": _charge_elements,
    "selectattr": _charge_elements,
    "sort": _charge_compared_elements,
    "string": _charge_whole,
    "title": _charge_titled,
    "tojson": _charge_json,
    "trim": _charge_trimmed,
    "unique": _charge_compared_elements,
    "upper": _charge_whole,
}

# Tests that look at what kind of value they have, not at what it holds.
KIND_TESTS = frozenset(
    {"boolean", "false", "float", "integer", "none", "number", "string", "true"}
    | {"callable", "defined", "iterable", "mapping", "sameas", "sequence", "undefined"}
)
# Python's `%`, which formats when its left side is a string.
NUMBER_TESTS = frozenset({"divisibleby", "even", "odd"})
COMPARING_TESTS = frozenset(
    {"!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "ge", "greaterthan", "gt"}
    | {"in", "le", "lessthan", "lower", "lt", "ne", "upper"}
)

_READING_STRING_METHODS = (
    {"capitalize", "casefold", "count", "endswith", "find", "index", "lower", "partition"}
    | {"isalnum", "isalpha", "isdecimal", "isdigit", "islower", "isnumeric", "isspace", "isupper"}
    | {"removeprefix", "removesuffix", "split", "splitlines", "startswith", "swapcase"}
    | {"title", "upper"}
)
_STRING_METHODS: dict[str, Charge] = {
    **dict.fromkeys(_READING_STRING_METHODS, _charge_whole),
    "join": lambda work, value, args, keywords: _charge_joined(
        work, args[0] if args else (), (value,), keywords
    ),
    "lstrip": _charge_trimmed,
    "replace": _charge_replaced,
    "rfind": _charge_searched,
    "rindex": _charge_searched,
    "rpartition": _charge_searched,
    "rsplit": _charge_searched,
    "rstrip": _charge_trimmed,
    "strip": _charge_trimmed,
}
_DICT_METHODS: dict[str, Charge] = {
    # The key is hashed, and a tuple is hashed anew each time.
    "get": lambda work, value, args, keywords: work.reads(*args),
    **dict.fromkeys(("items", "keys", "values"), charge_nothing),
}
_LIST_METHODS: dict[str, Charge] = dict.fromkeys(("count", "index"), _charge_whole)
METHOD_CHARGES: tuple[tuple[type, dict[str, Charge]], ...] = (
    (str, _STRING_METHODS),
    (dict, _DICT_METHODS),
    (list, _LIST_METHODS),
    (tuple, _LIST_METHODS),
)
LOOP_ATTRIBUTES = frozenset(
    {"changed", "cycle", "depth", "depth0", "first", "index", "index0", "last", "length"}
    | {"nextitem", "previtem", "revindex", "revindex0"}
)

_FORMAT_DIRECTIVE = re.compile(r"%[^A-Za-z%]*")


def charge_formatting(work: WorkMeter, text: str, values: object) -> None:
    """Counts `text % values`; refuses wide fields, and keys, behind which a width would hide."""
    directives = _FORMAT_DIRECTIVE.findall(text)
    for directive in directives:
        refuse_unless("(" not in directive, "formatting by key")
        refuse_unless("*" not in directive, "a format width that is computed")
        widths = re.findall(r"\d+", directive)
        refuse_unless(
            all(len(width) <= _FORMAT_WIDTH_DIGITS_MAX for width in widths),
            f"a format width over {_FORMAT_WIDTH_DIGITS_MAX} digits",
        )
    work.reads(text, values)
    work.characters(len(directives) * 10**_FORMAT_WIDTH_DIGITS_MAX)
