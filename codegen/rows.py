"""Rows: reductions in terms of the few that a kernel does itself.

Takes typed graphs, returns them with `var`, `logsumexp` and the like written out.

    logsumexp(x, N)  ->  log(sum(exp(x - top), N)) + top, top = max(x, N)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from codegen.ir import Bound, Builder, Graph, Node, Target, spell, walk
from codegen.rewrite import rebuild
from codegen.stages import NoStage

REDUCTIONS = ("sum", "mean", "max", "min", "prod", "any", "all")
"""Those that a kernel does itself; the others are written in terms of them."""


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
    """`var` and `logsumexp` written out: two passes, for a sum of squares less a square loses all digits, and a maximum that is
    taken off before anything is raised."""
    b = graph.builder
    statements = (*graph.bindings, *graph.update_let, *graph.let)

    def rule(b: Builder, node: Node) -> Node | None:
        if node.op == "reduce" and node.params[0] == "mean" and (spell(node.args[0]), node.params[1]) in summed:
            return b.op("div", b.reduce("sum", node.args[0], node.params[1]), b.size(node.params[1]))
        return _written_out(b, node)

    new = rebuild(b, [s.node for s in statements] + graph.roots(), rule)

    def bound(items: tuple[Bound, ...]) -> tuple[Bound, ...]:
        return tuple(replace(i, node=new[i.node.serial]) for i in items)

    def target(items: tuple[Target, ...]) -> tuple[Target, ...]:
        return tuple(replace(t, node=t.node and new[t.node.serial]) for t in items)

    return replace(
        graph, bindings=bound(graph.bindings), update_let=bound(graph.update_let), let=bound(graph.let),
        outputs=target(graph.outputs), updates=target(graph.updates), gradients=target(graph.gradients),
    )  # fmt: skip


def _written_out(b: Builder, node: Node) -> Node | None:
    if node.op == "add_at" and not node.params[0] and len(node.params[1]) == 1:
        return b.op("where", b.op("eq", b.index(node.params[1][0]), node.args[1]), node.args[0], 0)
    if node.op != "reduce" or node.params[0] in REDUCTIONS:
        return None
    name, axes = node.params
    x = node.args[0]
    if name == "logsumexp":
        top = b.reduce("max", x, axes)
        shift = b.op("where", b.op("isinf", top), 0.0, top)  # an infinity less itself would be NaN
        return b.op("add", b.op("log", b.reduce("sum", b.op("exp", b.op("sub", x, shift)), axes)), shift)
    if name == "var":
        off = b.op("sub", x, b.reduce("mean", x, axes))
        total = b.reduce("sum", b.op("mul", off, off), axes)
        free = b.op("sub", b.size(axes), node.args[1])
        return b.op("div", total, b.op("maximum", free, 0))
    raise NoStage(f"`{name}` has no kernel yet")
