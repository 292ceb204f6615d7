"""A Jinja environment for chat templates whose every operation is counted.

Jinja's sandbox keeps a template from reaching Python's internals; this adds a bound on its work:
the template is rewritten before it is compiled, so that it counts what it does, and it may call
only what is listed. Nothing is evaluated when it is compiled, so loading a template costs no more
than its size allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from kvledger.tokenizer.template_operations import (
    COMPARING_TESTS,
    FILTER_CHARGES,
    KIND_TESTS,
    LOOP_ATTRIBUTES,
    METHOD_CHARGES,
    NUMBER_TESTS,
    Charge,
    charge_formatting,
    charge_nothing,
    json_text,
    refuse_unless,
)
from kvledger.tokenizer.template_rewriting import (
    COUNTING_FILTERS,
    CountingRewriter,
    check_nodes,
)
from kvledger.tokenizer.template_work import (
    NotAllowedError,
    OneShotIterator,
    meter_of,
    shallow_size,
)

# A call of a Python function against one evaluated node, in time.
_CALL_OPERATIONS = 5
_INTEGER_BITS_MAX = 64
_DATE_FORMAT_CHARACTERS_MAX = 64


class TemplateRaisedError(Exception):
    """The template refused the messages with `raise_exception`."""

    def __init__(self, reason: object) -> None:
        super().__init__()
        self.reason = reason


class GenerationTag(Extension):
    """`{% generation %}` marks what the model wrote, for training; the text is the same."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """Keeps the marked statements, in a scope of their own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class ListedAttributesEnvironment(ImmutableSandboxedEnvironment):
    """Allows the attributes that `template_operations` lists, and fails at once on others."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may read attribute `attr` of `obj`."""
        if attr.startswith("_"):
            return False
        if isinstance(obj, LoopContext):
            return attr in LOOP_ATTRIBUTES
        if isinstance(obj, Namespace):
            return True
        return any(isinstance(obj, kind) and attr in names for kind, names in METHOD_CHARGES)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        """Raises NotAllowedError: without a use, Jinja's own answer would print as nothing."""
        raise NotAllowedError("an attribute that is not listed")

    def getitem(self, obj: Any, argument: Any) -> Any:
        """`obj[argument]`; raises NotAllowedError for a key that costs time to hash."""
        refuse_unless(
            isinstance(argument, (str, int, float, Undefined, type(None))),
            "a key that is no string or number",
        )
        return super().getitem(obj, argument)


# Runs the filters once they are counted. It hands itself to those that look up attributes.
_UNCOUNTED = ListedAttributesEnvironment()
_UNCOUNTED.filters["tojson"] = json_text


class CountedEnvironment(ListedAttributesEnvironment):
    """Compiles one template so that each rendering counts into its own WorkMeter.

    Rendering needs the meter among the variables, as METER_VARIABLE. Renderings may run in
    several threads at once.
    """

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])

    def __init__(self, clock: Callable[[], datetime] | None) -> None:
        """With no `clock`, `strftime_now` is undefined, and templates fall back to a fixed date."""
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=_counted_output,
            extensions=[GenerationTag, LoopControlExtension],
        )
        # Of the template that was compiled: its constants, the names that it reads, and the
        # attributes that it reads with a dot.
        self.string_constants: frozenset[str] = frozenset()
        self.names: frozenset[str] = frozenset()
        self.attributes: frozenset[str] = frozenset()
        self.filters = {
            **{name: _counted_filter(name, charge) for name, charge in FILTER_CHARGES.items()},
            **COUNTING_FILTERS,
        }
        self.tests = {
            **{name: _counted_test(name, compares=False) for name in KIND_TESTS},
            **{name: _counted_test(name, compares=True) for name in COMPARING_TESTS},
            **{name: _number_test(name) for name in NUMBER_TESTS},
        }
        self.globals = {
            "range": range,
            "dict": _new_dict,
            "namespace": _new_namespace,
            "raise_exception": _raise_exception,
        }
        if clock is not None:
            self.globals["strftime_now"] = _strftime_of(clock)
        self._functions = tuple(self.globals.values())

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        check_nodes(template)
        self.string_constants = frozenset(
            constant.value
            for constant in template.find_all(nodes.Const)
            if isinstance(constant.value, str)
        )
        self.names = frozenset(
            name.name for name in template.find_all(nodes.Name) if name.ctx == "load"
        )
        self.attributes = frozenset(read.attr for read in template.find_all(nodes.Getattr))
        counted = CountingRewriter().visit(template)
        counted.set_environment(self)
        assert isinstance(counted, nodes.Template)
        return counted

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls a macro, a listed function or a listed method; NotAllowedError for others."""
        work = meter_of(context)
        work.operations(_CALL_OPERATIONS)
        if isinstance(obj, (Macro, LoopContext)):
            work.enter_call()
            try:
                return super().call(context, obj, *args, **kwargs)
            finally:
                work.leave_call()
        owner = getattr(obj, "__self__", None)
        for kind, names in METHOD_CHARGES:
            if isinstance(owner, kind):
                names[obj.__name__](work, owner, args, kwargs)
                result = super().call(context, obj, *args, **kwargs)
                work.characters(shallow_size(result))
                return result
        listed = isinstance(owner, LoopContext) or any(obj is known for known in self._functions)
        refuse_unless(listed or isinstance(obj, Undefined), "a call of what is not listed")
        for argument in (*args, *kwargs.values()):
            work.reads(argument)
            work.keeps(argument)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Computes `left operator right`; integers are limited to 64 bits."""
        work = meter_of(context)
        work.operations(_CALL_OPERATIONS)
        if isinstance(left, (int, float)) and isinstance(right, (int, float)):
            return self._computed(context, operator, left, right)
        if operator == "%" and isinstance(left, str):
            charge_formatting(work, left, right)
        elif operator == "*" and isinstance(right, int):
            work.characters(shallow_size(left) * max(0, right))
        elif operator == "*" and isinstance(left, int):
            work.characters(shallow_size(right) * max(0, left))
        elif operator == "+":
            work.characters(shallow_size(left) + shallow_size(right))
        else:
            work.reads(left, right)
        return super().call_binop(context, operator, left, right)

    def _computed(
        self, context: Context, operator: str, left: int | float, right: int | float
    ) -> Any:
        bits = [value.bit_length() for value in (left, right) if isinstance(value, int)]
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            bits.append(left.bit_length() * max(0, right))
        refuse_unless(
            max(bits, default=0) <= _INTEGER_BITS_MAX, f"a number over {_INTEGER_BITS_MAX} bits"
        )
        return super().call_binop(context, operator, left, right)


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


class _TemplateNamespace(Namespace):
    # Jinja's own prints all that it holds, which could be anything, itself included.
    def __repr__(self) -> str:
        return "<Namespace>"


def _new_namespace(*args: Any, **kwargs: Any) -> Namespace:
    return _TemplateNamespace(*args, **kwargs)


def _raise_exception(reason: object = "") -> None:
    raise TemplateRaisedError(reason)


def _strftime_of(clock: Callable[[], datetime]) -> Callable[[str], str]:
    def strftime_now(date_format: str) -> str:
        refuse_unless(len(date_format) <= _DATE_FORMAT_CHARACTERS_MAX, "a long date format")
        return clock().strftime(date_format)

    return strftime_now


@pass_context
def _counted_output(context: Context, value: Any) -> Any:
    # Anything else prints an address in memory, which differs from run to run.
    written = (str, int, float, type(None), list, tuple, dict, range, Undefined, Namespace)
    refuse_unless(isinstance(value, written), "the written form of what has none")
    work = meter_of(context)
    work.operations(1)
    work.reads(value)
    return value


def _counted_filter(name: str, charge: Charge) -> Callable[..., Any]:
    @pass_context
    def counted(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        work = meter_of(context)
        work.operations(_CALL_OPERATIONS)
        charge(work, value, args, kwargs)
        result = _UNCOUNTED.call_filter(name, value, args, kwargs, context)
        if isinstance(result, Iterator) and charge is not charge_nothing:
            return OneShotIterator(list(result))
        if isinstance(result, (str, list)) and charge is not charge_nothing:
            work.characters(shallow_size(result))
        return result

    return counted


def _counted_test(name: str, compares: bool) -> Callable[..., Any]:
    @pass_context
    def counted(context: Context, value: Any, *args: Any) -> Any:
        work = meter_of(context)
        work.operations(_CALL_OPERATIONS)
        if compares:
            work.reads(value, *args)
        return _UNCOUNTED.call_test(name, value, args, {}, context)

    return counted


def _number_test(name: str) -> Callable[..., Any]:
    @pass_context
    def counted(context: Context, value: Any, *args: Any) -> Any:
        meter_of(context).operations(_CALL_OPERATIONS)
        for number in (value, *args):
            refuse_unless(isinstance(number, (int, float)), "division of what is not a number")
        return _UNCOUNTED.call_test(name, value, args, {}, context)

    return counted
