"""Rows: reductions in terms of the few that a kernel does itself.

Takes typed graphs, returns them with `var` and the like written out.

    var(x, N)  ->  sum(off * off, N) / maximum(size(N) - correction, 0), off = x - mean(x, N)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from codegen.ir import Builder, Graph, Node, spell, walk
from codegen.primitives import TABLE
from codegen.rewrite import rebuild
from codegen.stages import NoStage

REDUCTIONS = ("sum", "mean", "max", "min", "prod", "any", "all", "logsumexp")
"""Those that a kernel does itself; the others are written in terms of them."""
EXTREMES = {"max": -(2**63), "min": 2**63 - 1}
"""What integers begin with: nothing is less, or more."""


def expanded(graphs: Iterable[Graph]) -> tuple[Graph, ...]:
    """The variants of an op with every reduction in terms of those. What one variant sums, no other takes the mean of: that is
    the sum, divided."""
    graphs = tuple(graphs)
    summed = {
        (spell(n.args[0]), n.params[1])
        for g in graphs
        for n in walk(g.roots())
        if n.op == "reduce" and n.params[0] == "sum"
    }
    return tuple(_expanded(g, summed) for g in graphs)


def _expanded(graph: Graph, summed: Collection[tuple[str, tuple[str, ...]]]) -> Graph:
    """`var` written out: two passes, for a sum of squares less a square loses all digits."""

    def rule(b: Builder, node: Node) -> Node | None:
        if node.op == "reduce" and node.params[0] == "mean" and (spell(node.args[0]), node.params[1]) in summed:
            return b.op("div", b.reduce("sum", node.args[0], node.params[1]), b.size(node.params[1]))
        return _written_out(b, node)

    return graph.mapped(rebuild(graph.builder, [s.node for s in graph.statements] + graph.roots(), rule))


def _written_out(b: Builder, node: Node) -> Node | None:
    if node.op == "at" and len(node.params[0]) == 1:
        return _taken(b, node.args[0], node.params[0][0], node.args[1], node.args[2:])
    if node.op == "add_at" and not node.params[0] and len(node.params[1]) == 1:
        return b.op("where", b.op("eq", b.index(node.params[1][0]), node.args[1]), node.args[0], 0)
    if node.op != "reduce" or node.params[0] in REDUCTIONS:
        return None
    name, axes = node.params
    x = node.args[0]
    if name == "var":
        off = b.op("sub", x, b.reduce("mean", x, axes))
        total = b.reduce("sum", b.op("mul", off, off), axes)
        free = b.op("sub", b.size(axes), node.args[1])
        return b.op("div", total, b.op("maximum", free, 0))
    if name in ("argmax", "argmin"):
        return _place(b, name[3:], x, axes)
    raise NoStage(f"`{name}` has no kernel yet")


def _place(b: Builder, extreme: str, x: Node, axes: Sequence[str]) -> Node:
    """Where the first of the largest (smallest) elements stands, row-major over the axes: the least of their indices. A NaN is
    larger than any, and smaller."""
    top = b.reduce(extreme, x, axes)
    hit = b.op("eq", x, top)
    if x.kind == "float":
        hit = b.op("or", hit, b.op("isnan", x))  # beside a NaN nothing equals the largest, which is NaN
    place: Node | None = None
    for axis in sorted(axes, key=list(b.axes).index):
        here = b.index(axis)
        place = here if place is None else b.op("add", b.op("mul", place, b.size((axis,))), here)
    assert place is not None
    return b.reduce("min", b.op("where", hit, place, EXTREMES["min"]), axes)


def _taken(b: Builder, x: Node, axis: str, index: Node, fill: tuple[Node, ...]) -> Node:
    """One element along an axis: of a formula, the formula of one element of each of its tensors."""
    if axis not in x.axes:
        return x
    if x.op == "const":
        return b.const(x.params[0], x.axes - {axis}, x.params[2])
    if x.op in TABLE and not fill:
        return b.node(x.op, [_taken(b, a, axis, index, ()) for a in x.args], x.params)
    return b.at(x, {axis: index}, fill[0] if fill else None)
