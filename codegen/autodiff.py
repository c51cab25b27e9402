"""Reverse-mode differentiation of a graph: the VJP, as a graph in the same language.

Takes a builder, outputs with their cotangents and the inputs wanted; returns a gradient node an input (None: no path).

    y = x * sigmoid(x)   ->   dx = dy * sigmoid(x) + dy * x * (s * (1 - s))

A contribution under a branch carries its condition until it leaves the branch: `where(x > 0, sqrt(x), x)` at x = -1 has
the derivative 1, where multiplying a zero cotangent with an infinite partial would give NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from codegen import rewrite
from codegen.ir import Builder, Graph, Node, Target, Tensor, check, walk
from codegen.primitives import TABLE, Part


class NoDerivative(Exception):
    """A node whose derivative the table does not hold."""


@dataclass(frozen=True)
class Contribution:
    """`where(cond, value, 0)`, not yet multiplied out; value may have fewer axes than its node: it is broadcast."""

    cond: Node | None
    value: Node
    settled: bool = False
    """Whether the value is 0 already where the condition does not hold."""


def gradients(b: Builder, seeds: Mapping[Node, Node], wanted: Iterable[Tensor]) -> dict[str, Node | None]:
    """The VJP of `seeds` (output node -> cotangent node) with respect to the tensors that are wanted.

    Returns:
        By tensor name, the gradient with a subset of the tensor's axes, or None where nothing flows.
    """
    tensors = {t.name: t for t in wanted}
    order = list(walk(seeds))
    flows = {n.serial for n in order if n.op == "read" and n.params[0] in tensors}
    for node in order:
        if any(a.serial in flows for a in node.args):
            flows.add(node.serial)
    found: dict[int, list[Contribution]] = {}
    for node, cotangent in seeds.items():
        found.setdefault(node.serial, []).append(Contribution(None, cotangent))
    result: dict[str, Node | None] = {name: None for name in tensors}
    for node in reversed(order):
        if node.serial not in flows or node.serial not in found:
            continue
        total = _total(b, found.pop(node.serial))
        if node.op == "read":
            value = _settled(b, total)
            tensor = tensors[node.params[0]]
            result[tensor.name] = b.node("sum_to", (value,), (tensor.name,)) if tensor.broadcast else value
            continue
        for arg, part in zip(node.args, _parts(b, node, total, flows)):
            if part is not None and arg.serial in flows:
                found.setdefault(arg.serial, []).append(part)
    return result


def _settled(b: Builder, c: Contribution) -> Node:
    if c.cond is None or c.settled:
        return c.value
    if c.cond.op == "not":
        return b.op("where", c.cond.args[0], 0.0, c.value)
    return b.op("where", c.cond, c.value, 0.0)


def _total(b: Builder, parts: list[Contribution]) -> Contribution:
    """The sum; parts under one condition stay under it, others settle."""
    if all(p.cond is parts[0].cond for p in parts):
        value = parts[0].value
        for part in parts[1:]:
            value = b.op("add", value, part.value)
        return Contribution(parts[0].cond, value, all(p.settled for p in parts))
    value = _settled(b, parts[0])
    cond = parts[0].cond
    for part in parts[1:]:
        value = b.op("add", value, _settled(b, part))
        cond = None if cond is None or part.cond is None else b.op("or", cond, part.cond)
    return Contribution(cond, value, True)


def _both(b: Builder, outer: Node | None, inner: Node | None) -> Node | None:
    if outer is None or inner is None:
        return outer if inner is None else inner
    return b.op("and", outer, inner)


def _summed(b: Builder, c: Contribution, node_axes: frozenset[str], target: Node) -> Contribution:
    """Sums over the axes that the target lacks: the adjoint of broadcasting."""
    extra = node_axes - target.axes
    if not extra:
        return c
    value = b.sum(_settled(b, c), extra)
    if c.cond is None:
        return Contribution(None, value)
    inside = extra & c.cond.axes
    return Contribution(b.reduce("any", c.cond, inside) if inside else c.cond, value, True)


def _parts(b: Builder, node: Node, total: Contribution, flows: set[int]) -> list[Contribution | None]:
    row = TABLE.get(node.op)
    if row is not None:
        if row.vjp is None or node.kind != "float":
            return [None] * len(node.args)
        raw: tuple[Part, ...] = row.vjp(b, total.value, node.args, node)
        out: list[Contribution | None] = []
        for arg, part in zip(node.args, raw):
            if part is None or arg.serial not in flows or arg.kind != "float":
                out.append(None)
                continue
            cond, value = part if isinstance(part, tuple) else (None, part)
            out.append(_summed(b, Contribution(_both(b, total.cond, cond), value), node.axes, arg))
        return out
    rule = _STRUCTURAL.get(node.op)
    if rule is None:
        raise NoDerivative(f"`{node.op}` has no derivative in the table")
    return rule(b, node, _settled(b, total))


# ---------------------------------------------------------------------------------------------- structural rules

Parts = list["Contribution | None"]


def _plain(*values: Node | None) -> Parts:
    return [None if v is None else Contribution(None, v) for v in values]


def _reduce(b: Builder, node: Node, g: Node) -> Parts:
    name, axes = node.params
    x = node.args[0]
    match name:
        case "sum":
            return _plain(g)
        case "mean":
            return _plain(b.op("div", g, b.size(axes)))
        case "max" | "min":
            hit = b.op("eq", x, node)
            share = b.op("div", g, b.reduce("sum", hit, axes))
            lost = b.op("isnan", node)
            return _plain(b.op("where", lost, float("nan"), b.op("where", hit, share, 0.0)))
        case "prod":
            before = b.scan("cumprod", (x,), axes[0], False, True)
            after = b.scan("cumprod", (x,), axes[0], True, True)
            return _plain(b.op("mul", b.op("mul", g, before), after))
        case "logsumexp":
            return _plain(b.op("mul", g, b.op("exp", b.op("sub", x, node))))
        case "var":
            centred = b.op("sub", x, b.reduce("mean", x, axes))
            free = b.op("maximum", b.op("sub", b.size(axes), node.args[1]), 0)
            return _plain(b.op("div", b.op("mul", b.op("mul", 2, g), centred), free), None)
    return _plain(*[None] * len(node.args))


def _dot(b: Builder, node: Node, g: Node) -> Parts:
    left, right = node.args
    axes = node.axes | frozenset(node.params)

    def side(own: Node, other: Node) -> Node:
        extra = axes - own.axes
        return b.dot(g, other, extra) if extra else b.op("mul", g, other)

    return _plain(side(left, right), side(right, left))


def _scan(b: Builder, node: Node, g: Node) -> Parts:
    name, axis, reverse, exclusive = node.params
    x = node.args[0]
    g = b.expand(g, (axis,))
    if name == "cumsum":
        return _plain(b.scan("cumsum", (g,), axis, not reverse, exclusive))
    step = -1 if reverse else 1
    if name == "linear":
        # r[i] = b[i] + a[i] * r[i - 1]: what reaches r[i] is h[i] = g[i] + a[i + 1] * h[i + 1].
        a, start = node.args
        following = b.at(b.expand(a, (axis,)), {axis: b.op("add", b.index(axis), step)}, b.const(0.0))
        h = b.scan("linear", (following, g), axis, not reverse, False)
        previous = b.at(node, {axis: b.op("sub", b.index(axis), step)}, b.const(0.0))
        both = ((a, b.op("mul", h, previous)), (start, h))
        return [_summed(b, Contribution(None, value), node.axes, arg) for arg, value in both]
    if exclusive:
        raise NoDerivative("an exclusive cumprod has no derivative in the table")
    # dx[i] = (product before i) * w[i], with w[i] = g[i] + x[i + 1] * w[i + 1]: no division, so zeros are no trouble.
    following = b.at(x, {axis: b.op("add", b.index(axis), step)}, b.const(0.0))
    tail = b.scan("linear", (following, g), axis, not reverse, False)
    before = b.scan("cumprod", (x,), axis, reverse, True)
    return _plain(b.op("mul", before, tail))


def _at(b: Builder, node: Node, g: Node) -> Parts:
    names, filled = node.params
    x = node.args[0]
    index = dict(zip(names, node.args[1:]))
    reached = frozenset().union(*(i.axes for i in index.values()))
    summed = reached - (x.axes - frozenset(names))
    present = summed & (g.axes | reached)
    value = b.add_at(g, present, index)
    return _plain(value, *[None] * (len(node.args) - 1))


def _add_at(b: Builder, node: Node, g: Node) -> Parts:
    summed, names = node.params
    x = node.args[0]
    index = dict(zip(names, node.args[1:]))
    axes = x.axes.union(*(i.axes for i in index.values()))
    value = b.at(b.expand(g, names), index, b.const(0.0))
    return _plain(b.sum(value, axes - x.axes) if axes - x.axes else value, *[None] * len(index))


def _stack(b: Builder, node: Node, g: Node) -> Parts:
    (axis,) = node.params
    out: Parts = []
    for k, arg in enumerate(node.args):
        part = b.at(g, {axis: b.const(k)}) if axis in g.axes else g
        out.append(_summed(b, Contribution(None, part), node.axes - {axis}, arg))
    return out


_STRUCTURAL: dict[str, Callable[[Builder, Node, Node], Parts]] = {
    "reduce": _reduce,
    "dot": _dot,
    "scan": _scan,
    "at": _at,
    "add_at": _add_at,
    "stack": _stack,
    "replace": lambda b, n, g: _plain(g, None),
    "stop_gradient": lambda b, n, g: _plain(None),
    "cast": lambda b, n, g: _plain(g if n.args[0].kind == "float" and n.kind == "float" else None),
    "expand": lambda b, n, g: [_summed(b, Contribution(None, g), n.axes, n.args[0])],
    "sum_to": lambda b, n, g: _plain(g),
    "uniform": lambda b, n, g: _plain(None),
}

# ---------------------------------------------------------------------------------------------- of a graph


def derive(graph: Graph) -> dict[str, Node | None]:
    """The gradients of every differentiable input and param of a graph, from the cotangents that are present."""
    b = graph.builder
    seeds: dict[Node, Node] = {}
    for target in graph.outputs:
        cotangent = graph.tensors.get(f"d{target.name}")
        if cotangent is not None and target.node is not None:
            g = b.read(cotangent)
            if target.node in seeds:
                g = b.op("add", seeds[target.node], g)
            # An output stored by broadcast gathers the cotangents of all its copies.
            seeds[target.node] = b.sum(g, frozenset(cotangent.axes) - target.node.axes)
    wanted = [t for t in graph.tensors.values() if t.differentiable and t.role in ("input", "param")]
    return gradients(b, seeds, wanted)


def complete(graph: Graph) -> Graph:
    """The graph with its `auto` gradients written out, tidied; `zero` becomes the number 0."""
    if not any(t.kind in ("auto", "zero") for t in graph.gradients):
        return graph
    derived = derive(graph)
    b = graph.builder
    out: list[Target] = []
    for target in graph.gradients:
        node = target.node
        if target.kind == "zero":
            node = b.const(0.0)
        elif target.kind == "auto":
            found = derived[target.name]
            node = b.const(0.0) if found is None else rewrite.tidy(b, [found])[found.serial]
        out.append(replace(target, node=node))
    done = replace(graph, gradients=tuple(out))
    check(done)
    return done
