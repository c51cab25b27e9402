"""Rows: what an op that reduces along one set of axes becomes.

Takes the typed variants of an op, returns its `Rows`: the reduced axes, the statistics that the forward keeps, the gradients
that are summed over the rows; and the graphs with every reduction in terms of the few that a kernel has.

    e / sum(e, N)    ->  reduced (N), a pass over a row for each reduction, and one to store
    a norm           ->  reduced (N), keeps rstd; dweight is summed over the rows
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from codegen.ir import Bound, Builder, Graph, Node, Target, walk
from codegen.residuals import residuals
from codegen.rewrite import rebuild
from codegen.spec import OpSpec

REDUCTIONS = ("sum", "mean", "max", "min", "prod", "any", "all")
"""Those that a kernel does itself; the others are written in terms of them."""


class NoRows(Exception):
    """Why an op is no matter of rows."""


@dataclass(frozen=True)
class Rows:
    """The shape of an op's loops."""

    kept: frozenset[str]
    reduced: frozenset[str]
    saved: tuple[str, ...]
    """Statements of the forward that are kept for the backward: one value a row."""
    partial: tuple[str, ...]
    """Gradients that are summed over the rows."""
    needs_elements: bool
    """Whether a reduction has no identity: there must be something to reduce."""


def expanded(graph: Graph) -> Graph:
    """The graph with `var` and `logsumexp` written out: two passes, for a sum of squares less a square loses all digits, and a
    maximum that is taken off before anything is raised."""
    b = graph.builder
    statements = (*graph.bindings, *graph.let)
    new = rebuild(b, [s.node for s in statements] + graph.roots(), _written_out)

    def bound(items: tuple[Bound, ...]) -> tuple[Bound, ...]:
        return tuple(replace(i, node=new[i.node.serial]) for i in items)

    def target(items: tuple[Target, ...]) -> tuple[Target, ...]:
        return tuple(replace(t, node=t.node and new[t.node.serial]) for t in items)

    return replace(
        graph, bindings=bound(graph.bindings), let=bound(graph.let), outputs=target(graph.outputs),
        gradients=target(graph.gradients),
    )  # fmt: skip


def _written_out(b: Builder, node: Node) -> Node | None:
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
    raise NoRows(f"`{name}` has no kernel yet")


def rows(op: OpSpec, written: Iterable[Graph]) -> tuple[Rows, tuple[Graph, ...]]:
    """The one shape of all variants, and their graphs written out. Raises `NoRows` with the reason."""
    written = tuple(written)
    needs_elements = any(n.op == "reduce" and n.params[0] in ("max", "min") for g in written for n in walk(g.roots()))
    graphs = tuple(expanded(g) for g in written)
    reduced = _reduced(graphs)
    whole = frozenset[str]().union(*(g.tensors[o.name].axes for g in graphs for o in g.outputs)) | frozenset[
        str
    ]().union(*(t.axes for g in graphs for t in g.tensors.values()))
    kept = whole - reduced
    saved: dict[str, None] = {}
    partial: dict[str, None] = {}
    for graph in graphs:
        _check(graph, kept, reduced)
        names = {b.name: b.node for b in graph.bindings}
        for r in residuals(op, graph):
            if r.name in graph.tensors:
                continue
            if r.name not in names:
                raise NoRows(f"the backward reads `{r.name}`, which has no name in the forward to be kept by")
            if names[r.name].axes - kept:
                raise NoRows(f"the backward keeps `{r.name}`, which is as large as the operands")
            saved[r.name] = None
        for target in graph.gradients:
            if target.node is not None and summed(target, graph, kept):
                partial[target.name] = None
    return Rows(kept, reduced, tuple(saved), tuple(partial), needs_elements), graphs


def _reduced(graphs: Iterable[Graph]) -> frozenset[str]:
    """The axes that all reductions of the outputs are over."""
    found = {
        frozenset(n.params[1])
        for g in graphs
        for n in walk([t.node for t in g.outputs if t.node is not None])
        if n.op == "reduce"
    }
    if len(found) != 1:
        sets = " and ".join(sorted(f"({', '.join(sorted(axes))})" for axes in found))
        raise NoRows(f"its reductions are over {sets}" if found else "it reduces nothing")
    return found.pop()


def summed(target: Target, graph: Graph, kept: frozenset[str]) -> bool:
    """Whether a gradient is a sum over the rows."""
    node = target.node
    assert node is not None
    return node.op == "reduce" and node.params[0] == "sum" and frozenset(node.params[1]) == kept and bool(kept)


def _check(graph: Graph, kept: frozenset[str], reduced: frozenset[str]) -> None:
    for target in (*graph.outputs, *graph.gradients):
        node = target.node
        if node is None:
            continue
        if node.op == "const":
            continue
        over_rows = target in graph.gradients and summed(target, graph, kept)
        if over_rows:
            node = node.args[0]
            if frozenset(graph.tensors[target.name].axes) != reduced:
                raise NoRows(f"the gradient of `{target.name}` is summed over the rows, and has not the axes of a row")
        elif graph.tensors[target.name].broadcast and target in graph.gradients:
            raise NoRows(f"`{target.name}` may be broadcast, and its gradient would be a sum")
        for part in walk([node]):
            if part.op == "reduce" and frozenset(part.params[1]) != reduced:
                raise NoRows(
                    f"`{target.name}` reduces over ({', '.join(part.params[1])}) beside ({', '.join(sorted(reduced))})"
                )
            if part.op == "size" and frozenset(part.params) not in (kept, reduced, kept | reduced):
                raise NoRows(f"`size({', '.join(part.params)})` is of a part of the axes that are kept or reduced")
            if part.op in ("dot", "scan", "at", "add_at", "stack", "uniform", "index", "sum_to"):
                raise NoRows(f"`{part.params[0] if part.op == 'scan' else part.op}` in rows has no kernel yet")
        axes = frozenset(graph.tensors[target.name].axes)
        if not over_rows and axes not in (kept, kept | reduced):
            raise NoRows(f"`{target.name}` has the axes ({', '.join(sorted(axes))}): neither those of the rows nor all")


def level(node: Node, known: dict[int, int]) -> int:
    """After how many passes over a row the value is known; an element's own, in which pass it can be computed."""
    for part in walk([node]):
        if part.serial not in known:
            most = max((known[a.serial] for a in part.args), default=0)
            known[part.serial] = most + (part.op == "reduce")
    return known[node.serial]
