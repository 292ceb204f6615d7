"""Rewrites a parsed chat template so that running it counts its work.

Every round of a loop and every body of a macro counts its nodes. Static text, which Jinja writes
directly, becomes constants, which pass through the environment's `finalize`. Operations that
Jinja compiles to plain Python (comparing, slicing, joining with `~`) count what they touch, and a
value that is assigned counts what it holds.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.runtime import Context
from jinja2.visitor import NodeTransformer

from kvledger.tokenizer.template_operations import refuse_unless
from kvledger.tokenizer.template_work import meter_of, shallow_size

# Deepest tree of nodes that is compiled; Jinja's compiler recurses several calls a level.
_NODE_DEPTH_MAX = 100
# What counting costs itself, against one evaluated node, in time.
_COUNTING_OPERATIONS = 4
# Jinja's compiler takes time in proportion to the product of nodes and names.
_NODE_COUNT_MAX = 10_000
_NAME_COUNT_MAX = 500

_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "gteq": operator.ge,
    "lt": operator.lt,
    "lteq": operator.le,
    "in": lambda left, right: left in right,
    "notin": lambda left, right: left not in right,
}

# The rewritten template calls these as filters. No template can: names have no spaces in them,
# and where a filter is named by a string (`map`), these do nothing but count.
_COUNT_NODES = "count nodes"
_READ_VALUE = "read value"
_READ_ELEMENTS = "read elements"
_KEEP_VALUE = "keep value"
_COMPARE = "compare"


@pass_context
def _count_nodes(context: Context, node_count: int) -> bool:
    meter_of(context).operations(max(1, node_count))
    return True


@pass_context
def _read_value(context: Context, value: Any) -> Any:
    meter_of(context).reads(value)
    return value


@pass_context
def _read_elements(context: Context, value: Any) -> Any:
    meter_of(context).characters(shallow_size(value))
    return value


@pass_context
def _keep_value(context: Context, value: Any) -> Any:
    meter_of(context).keeps(value)
    return value


@pass_context
def _compare(context: Context, left: Any, right: Any, comparison: str) -> Any:
    work = meter_of(context)
    if comparison in ("in", "notin"):
        # A dict is not walked through: the left side is hashed and looked up.
        work.reads(left, *(() if isinstance(right, dict) else (right,)))
    else:
        work.compares(left, right)
    return _COMPARISONS[comparison](left, right)


COUNTING_FILTERS: dict[str, Callable[..., Any]] = {
    _COUNT_NODES: _count_nodes,
    _READ_VALUE: _read_value,
    _READ_ELEMENTS: _read_elements,
    _KEEP_VALUE: _keep_value,
    _COMPARE: _compare,
}

_ALLOWED_NODES: frozenset[type[nodes.Node]] = frozenset(
    {nodes.Template, nodes.Output, nodes.Scope, nodes.With, nodes.If, nodes.For, nodes.Break}
    | {nodes.Continue, nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.ExprStmt}
    | {nodes.Assign, nodes.AssignBlock, nodes.NSRef, nodes.Name, nodes.Const, nodes.TemplateData}
    | {nodes.Tuple, nodes.List, nodes.Dict, nodes.Pair, nodes.Keyword, nodes.CondExpr}
    | {nodes.Filter, nodes.Test, nodes.Call, nodes.Getitem, nodes.Getattr, nodes.Slice}
    | {nodes.Concat, nodes.Compare, nodes.Operand, nodes.And, nodes.Or, nodes.Not}
    | {nodes.Add, nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod, nodes.Pow}
    | {nodes.Neg, nodes.Pos}
)


def check_nodes(template: nodes.Template) -> None:
    """Raises NotAllowedError for what no chat template needs.

    That is other files, blocks, private attributes, and more nodes or names than the largest
    templates in use have.
    """
    names: set[str] = set()
    node_count = 0
    pending: list[tuple[nodes.Node, int]] = [(template, 1)]
    while pending:
        node, depth = pending.pop()
        node_count += 1
        refuse_unless(depth <= _NODE_DEPTH_MAX, f"nesting over {_NODE_DEPTH_MAX} levels")
        refuse_unless(type(node) in _ALLOWED_NODES, f"a statement of kind {type(node).__name__}")
        if isinstance(node, (nodes.Getattr, nodes.NSRef)):
            refuse_unless(not node.attr.startswith("_"), "an attribute that begins with _")
        if isinstance(node, nodes.Name):
            names.add(node.name)
        pending.extend((child, depth + 1) for child in node.iter_child_nodes())
    refuse_unless(node_count <= _NODE_COUNT_MAX, f"over {_NODE_COUNT_MAX} operations")
    refuse_unless(len(names) <= _NAME_COUNT_MAX, f"over {_NAME_COUNT_MAX} names")


def _node_count(body: list[nodes.Node]) -> int:
    """Nodes that one run through `body` evaluates at most, without bodies that count themselves."""
    count = 0
    pending = list(body)
    while pending:
        node = pending.pop()
        count += 1
        counts_itself = isinstance(node, (nodes.For, nodes.Macro, nodes.CallBlock))
        pending.extend(node.iter_child_nodes(exclude=("body",) if counts_itself else ()))
    return count


def _filtered(value: nodes.Expr, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, name, list(args), [], None, None, lineno=value.lineno)


class CountingRewriter(NodeTransformer):
    """Rewrites a whole template, from the leaves up."""

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        """Returns the node that takes the place of `node`."""
        self.generic_visit(node)
        rewrite = _REWRITES.get(type(node))
        return node if rewrite is None else rewrite(node)


def _count_body(node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
    node.body.insert(0, nodes.ExprStmt(_counted(node.body, node.lineno), lineno=node.lineno))
    return node


def _count_loop(node: nodes.For) -> nodes.Node:
    if node.test is not None:
        # A round that the loop's condition leaves out does not reach the body.
        counted = _counted([node.test], node.lineno)
        node.test = nodes.And(counted, node.test, lineno=node.lineno)
    return _count_body(node)


def _counted(body: list[nodes.Node], line: int) -> nodes.Expr:
    count = _node_count(body) + _COUNTING_OPERATIONS
    return _filtered(nodes.Const(count, lineno=line), _COUNT_NODES)


def _write_as_constant(node: nodes.TemplateData) -> nodes.Node:
    return nodes.Const(node.data, lineno=node.lineno)


def _read_joined(node: nodes.Concat) -> nodes.Node:
    node.nodes = [_filtered(part, _READ_VALUE) for part in node.nodes]
    return node


def _read_key(node: nodes.Pair) -> nodes.Node:
    if not isinstance(node.key, nodes.Const):
        node.key = _filtered(node.key, _READ_VALUE)
    return node


def _read_sliced(node: nodes.Getitem) -> nodes.Node:
    if isinstance(node.arg, nodes.Slice):
        node.node = _filtered(node.node, _READ_ELEMENTS)
    return node


def _keep_assigned(node: nodes.Assign) -> nodes.Node:
    assert isinstance(node.node, nodes.Expr)
    node.node = _filtered(node.node, _KEEP_VALUE)
    return node


def _read_unpacked(node: nodes.Call | nodes.Filter | nodes.Test) -> nodes.Node:
    if node.dyn_args is not None:
        node.dyn_args = _filtered(node.dyn_args, _READ_ELEMENTS)
    if node.dyn_kwargs is not None:
        node.dyn_kwargs = _filtered(node.dyn_kwargs, _READ_ELEMENTS)
    return node


def _read_compared(node: nodes.Compare) -> nodes.Node:
    if len(node.ops) > 1:
        node.expr = _filtered(node.expr, _READ_VALUE)
        for operand in node.ops:
            operand.expr = _filtered(operand.expr, _READ_VALUE)
        return node
    right, comparison = node.ops[0].expr, node.ops[0].op
    # Comparing stops at the end of the shorter side, and a constant is short. Searching does not.
    left_is_short = isinstance(node.expr, nodes.Const) and comparison not in ("in", "notin")
    if left_is_short or isinstance(right, nodes.Const) or _is_list_of_constants(right):
        return node
    return _filtered(node.expr, _COMPARE, right, nodes.Const(comparison, lineno=node.lineno))


def _is_list_of_constants(node: nodes.Expr) -> bool:
    return isinstance(node, (nodes.List, nodes.Tuple)) and all(
        isinstance(item, nodes.Const) for item in node.items
    )


_REWRITES: dict[type[nodes.Node], Callable[[Any], nodes.Node]] = {
    nodes.For: _count_loop,
    nodes.Macro: _count_body,
    nodes.CallBlock: _count_body,
    nodes.TemplateData: _write_as_constant,
    nodes.Concat: _read_joined,
    nodes.Pair: _read_key,
    nodes.Getitem: _read_sliced,
    nodes.Assign: _keep_assigned,
    nodes.Call: _read_unpacked,
    nodes.Filter: _read_unpacked,
    nodes.Test: _read_unpacked,
    nodes.Compare: _read_compared,
}
