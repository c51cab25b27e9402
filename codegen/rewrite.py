"""Rewrites of graphs: constants folded, absent tensors dropped, derived gradients tidied.

Takes nodes, returns nodes. On declared text only what is exact in IEEE arithmetic runs (`fold`); on derived gradients,
which are nobody's text, real-arithmetic identities too (`tidy`), and the result is verified like a declared one.

    fold:  2 * sqrt(2 / pi)  -> 1.5957691216057308      x * weight, weight absent with default 1 -> x
    tidy:  dy * 1 -> dy      -(-x) -> x      where(c, where(c, a, b), 0) -> where(c, a, 0)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import mpmath

from codegen.ir import Builder, Node, walk
from codegen.primitives import TABLE

Rule = Callable[[Builder, Node], Node | None]


def rebuild(b: Builder, roots: Iterable[Node], rule: Rule) -> dict[int, Node]:
    """Applies a rule bottom-up; returns the new node by the serial of the old one."""
    new: dict[int, Node] = {}
    for node in walk(roots):
        args = tuple(new[a.serial] for a in node.args)
        again = node if args == node.args else b.node(node.op, args, node.params)
        new[node.serial] = rule(b, again) or again
    return new


def fold(b: Builder, roots: Iterable[Node]) -> dict[int, Node]:
    """Constants folded through mpmath and rounded once, arithmetic with absent tensors dropped."""
    roots = list(roots)
    new = rebuild(b, roots, _drop_absent)
    exact: dict[int, Any] = {}
    folded = rebuild(b, [new[r.serial] for r in roots], lambda b, n: _fold_constant(b, n, exact))
    return {old: folded.get(node.serial, node) for old, node in new.items()}


def constant(node: Node) -> bool | int | float | None:
    """The value of a constant node, else None."""
    return node.params[0] if node.op == "const" else None


def _fold_constant(b: Builder, node: Node, exact: dict[int, Any]) -> Node | None:
    """`exact` keeps the unrounded value behind each folded constant, so that a constant expression rounds once."""
    row = TABLE.get(node.op)
    if row is None or not all(a.op == "const" and not a.params[1] for a in node.args):
        return None
    with mpmath.workdps(60):
        values = [exact.get(a.serial, _exact(a.params[0])) for a in node.args]
        value = row.mp(*values)
        if node.kind == "bool":
            return b.const(bool(value))
        if node.kind == "int" and mpmath.isint(value):
            return b.const(int(value))
        result = b.const(float(value))
        exact[result.serial] = value
        return result


def _exact(value: bool | int | float) -> Any:
    return value if isinstance(value, bool) else mpmath.mpf(value)


def _is_default(node: Node, value: float) -> bool:
    return node.op == "const" and bool(node.params[2]) and float(node.params[0]) == value


def _drop_absent(b: Builder, node: Node) -> Node | None:
    """`x + 0`, `x * 1`, `max(x, -inf)` with the constant that stands for an absent tensor: that tensor is not there."""
    if node.op == "reduce" and node.params[0] in ("sum", "mean", "max", "min"):
        inner = node.args[0]
        if inner.op == "const" and inner.params[2] and (node.params[0] != "sum" or inner.params[0] == 0):
            return b.const(inner.params[0], node.axes, default=True)
        return None
    if node.op not in ("add", "sub", "mul", "div", "maximum", "minimum"):
        return None
    left, right = node.args
    neutral = {"add": 0, "sub": 0, "mul": 1, "div": 1, "maximum": -math.inf, "minimum": math.inf}[node.op]
    kept = left if _is_default(right, neutral) else None
    if kept is None and node.op not in ("sub", "div") and _is_default(left, neutral):
        kept = right
    if kept is None and node.op == "mul" and (_is_default(left, 0) or _is_default(right, 0)):
        return b.const(0, node.axes, default=True)
    if kept is not None and kept.kind == node.kind:
        if kept.op == "const":
            return b.const(kept.params[0], node.axes, kept.params[2])
        return b.expand(kept, node.axes)
    return None


# ---------------------------------------------------------------------------------------------- tidying


def tidy(b: Builder, roots: Iterable[Node]) -> dict[int, Node]:
    """Real-arithmetic simplification of derived gradients, to a fixed point of small steps."""
    roots = list(roots)
    total = {n.serial: n for n in walk(roots)}
    for _ in range(8):
        step = rebuild(b, list(total.values()), _tidy)
        after = {old: step[node.serial] for old, node in total.items()}
        if all(after[r.serial] is total[r.serial] for r in roots):
            break
        total = after
    folded = fold(b, total.values())
    return {old: folded[node.serial] for old, node in total.items()}


def _tidy(b: Builder, node: Node) -> Node | None:
    match node.op:
        case "mul":
            return _tidy_mul(b, *node.args)
        case "add":
            return _tidy_add(b, *node.args)
        case "sub":
            return _tidy_sub(b, *node.args)
        case "neg" if node.args[0].op == "neg":
            return node.args[0].args[0]
        case "div" if constant(node.args[1]) in (1, 1.0) and node.args[0].kind == "float":
            return node.args[0]
        case "where":
            return _tidy_where(b, node)
        case "not" if node.args[0].op == "not":
            return node.args[0].args[0]
        case "sum_to" if node.args[0].op == "sum_to" and node.args[0].params == node.params:
            return node.args[0]
    return None


def _tidy_mul(b: Builder, left: Node, right: Node) -> Node | None:
    for one, other in ((left, right), (right, left)):
        if constant(one) == 1 and not one.axes and other.kind == "float":
            return other
        if constant(one) == -1 and not one.axes:
            return b.op("neg", other)
        if one.op == "neg":
            return b.op("neg", b.op("mul", one.args[0], other) if one is left else b.op("mul", other, one.args[0]))
    number, inner = (right, left) if right.op == "const" else (left, right)
    if number.op == "const" and left.op != "const" and left is inner:
        return b.op("mul", number, inner)
    if (
        number.op == "const"
        and inner.op == "mul"
        and inner.args[0].op == "const"
        and not (number.axes | inner.args[0].axes)
    ):
        return b.op("mul", b.const(number.params[0] * inner.args[0].params[0]), inner.args[1])
    return None


def _tidy_add(b: Builder, left: Node, right: Node) -> Node | None:
    if left is right and left.kind == "float":
        return b.op("mul", 2, left)
    for one, other in ((left, right), (right, left)):
        if constant(one) == 0 and not one.axes and other.kind == "float":
            return other
    if left.op == "add" and left.args[1] is right and right.kind == "float":
        return b.op("add", left.args[0], b.op("mul", 2, right))
    if right.op == "neg":
        return b.op("sub", left, right.args[0])
    if left.op == "neg":
        return b.op("sub", right, left.args[0])
    return None


def _tidy_sub(b: Builder, left: Node, right: Node) -> Node | None:
    if right.op == "neg":
        return b.op("add", left, right.args[0])
    if constant(right) == 0 and not right.axes and left.kind == "float":
        return left
    return None


def _tidy_where(b: Builder, node: Node) -> Node | None:
    cond, then, other = node.args
    if cond.op == "not":
        return b.op("where", cond.args[0], other, then)
    if then is other and not cond.axes - then.axes:
        return then
    if then.op == "where" and then.args[0] is cond:
        return b.op("where", cond, then.args[1], other)
    if other.op == "where" and other.args[0] is cond:
        return b.op("where", cond, then, other.args[2])
    return None
