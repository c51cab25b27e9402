"""Numerical safety: the formulas in float32, over the whole range of floats, against high precision.

Takes a checked variant of a pointwise op, reports where float32 overflows or makes NaN although the true value is fine.
The truth is mpmath's; float64 only picks the points that deserve it.

    x: dy * exp(x) / (1 + exp(x)) ** 2    at x = 100: float32 nan, true value 3.8e-44
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import mpmath
import numpy as np

from codegen.diagnostics import Note, Report, Span
from codegen.evaluate import Env, evaluate, full
from codegen.infer import F32_MAX
from codegen.ir import Graph, Node, spell, walk
from codegen.primitives import TABLE, Array
from codegen.sample import NoSample, Sampler, literal
from codegen.spec import OpSpec
from codegen.variants import Variant
from codegen.verify import with_outputs

_POINTS = 640
_CONFIRMED = 40
_HOLDING = {
    "exp": "`sigmoid`, `softplus`, `tanh` and `logsumexp` hold where formulas in `exp` overflow",
    "pow": "multiply in another order, or bound the base in forward and backward alike",
    "mul": "multiply in another order, `dy * (x / r)`, or bound an operand in forward and backward alike",
    "div": "`where(condition, value, limit)` around the quotient",
    "log": "`log1p`, `softplus`, `logsumexp`",
}


def check_safety(
    op: OpSpec, variant: Variant, graph: Graph, report: Report, accepted: Collection[str] = ()
) -> tuple[str, ...]:
    """Reports `unsafe` formulas of a pointwise variant; other ops are out of its reach.

    Args:
        accepted: outputs and tensors whose formula, or gradient, may be unsafe.

    Returns:
        Those that were reported.
    """
    targets = [
        (t.name, t.node, t.span)
        for t in (*graph.outputs, *graph.gradients)
        if t.node is not None and t.node.kind == "float" and t.name not in accepted
    ]
    if not all(pointwise(n) for _, node, _ in targets for n in walk([node])):
        return ()
    try:
        env64, env32 = grids(op, variant, graph)
    except NoSample:
        return ()
    roots = [node for _, node, _ in targets]
    low, high = evaluate(roots, env32), evaluate(roots, env64)
    return tuple(
        name for name, node, span in targets if _check(op, variant, graph, name, node, span, (low, high), env64, report)
    )


def pointwise(node: Node) -> bool:
    """Whether one element of the node comes of one element of each operand."""
    if node.op == "at":
        return node.args[0].op == "read" and all(i.op == "const" for i in node.args[1:])
    return node.op in TABLE or node.op in (
        "const",
        "read",
        "attr",
        "size",
        "largest",
        "stack",
        "cast",
        "expand",
        "sum_to",
        "replace",
        "stop_gradient",
    )


def grids(op: OpSpec, variant: Variant, graph: Graph) -> tuple[Env, Env]:
    """Every float input over stratified floats along one long axis, the others beside it moderate or stratified too."""
    sampler = Sampler(op, variant, graph, 7)
    base = sampler.draw("normal")
    rng = sampler.rng
    long = max(base.order, key=lambda a: (graph.axes[a].pack, graph.axes[a].fixed is None), default=None)
    if long is None or graph.axes[long].fixed is not None:
        raise NoSample
    extents = {a: _POINTS if a == long else (n if graph.axes[a].fixed else 1) for a, n in base.extents.items()}
    # A number as an attr is a scale that somebody chose: at its default it is not what overflows.
    usual = {a.name: float(v) for a in op.attrs if a.type == "float" and (v := literal(a.default)) is not None}
    attrs = {n: usual.get(n, v) if not isinstance(v, tuple) else v for n, v in base.attrs.items()}
    env = Env(base.order, extents, {}, attrs)
    tensors: dict[str, Array] = {}
    inputs = [t for t in graph.tensors.values() if t.role != "output"]
    for place, tensor in enumerate(inputs):
        shape = env.shape(tensor.axes)
        if tensor.kind == "float" and tensor.role != "cotangent":
            low, high = sampler.domains.get(tensor.name, (-math.inf, math.inf))
            wide = np.clip(stratified(rng, shape), low, high)
            mild = sampler.floats(shape, low, high, "normal", 2.0, env)
            turn = np.arange(int(np.prod(shape))).reshape(shape) % (len(inputs) + 1)
            tensors[tensor.name] = np.where((turn == place) | (turn == len(inputs)), wide, mild).astype(np.float32)
        elif tensor.kind == "float":
            tensors[tensor.name] = (rng.normal(size=shape) + 0.5).astype(np.float32)
        else:
            tensors[tensor.name] = sampler._tensor(tensor, env, "normal", 1.0, False)
    env32 = replace(env, tensors=tensors, dtype=np.float32)
    env64 = replace(env, tensors={k: v.astype(np.float64) if v.dtype == np.float32 else v for k, v in tensors.items()})
    return with_outputs(graph, env64), with_outputs(graph, env32)


def stratified(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Floats of both signs whose exponents are uniform over the range of float32, with 0 and the ends among them."""
    drawn = np.exp2(rng.uniform(-140, 127.9, size=shape)) * np.where(rng.random(shape) < 0.5, -1, 1)
    moderate = np.exp2(rng.uniform(-4, 10, size=shape)) * np.where(rng.random(shape) < 0.5, -1, 1)
    drawn = np.where(rng.random(shape) < 0.5, moderate, drawn)
    special = rng.choice(np.array([0.0, F32_MAX, -F32_MAX, 1e-40, -1e-40]), size=shape)
    return np.where(rng.random(shape) < 0.05, special, drawn)


def _check(op: OpSpec, variant: Variant, graph: Graph, name: str, node: Node, span: Span,
           values: tuple[Mapping[int, Array], Mapping[int, Array]], env: Env, report: Report) -> bool:  # fmt: skip
    low, high = (np.broadcast_to(v[node.serial], full(v[node.serial], node.axes, env).shape) for v in values)
    bad = ~np.isfinite(low)
    with np.errstate(all="ignore"):
        doubtful = bad & (np.isnan(high) | (np.abs(high) < 0.99 * F32_MAX) | np.isnan(low))
    places = np.argwhere(doubtful)
    for where in places[:: max(1, len(places) // _CONFIRMED)]:
        index = tuple(int(i) for i in where)
        with mpmath.workdps(40):
            truth = exact(node, env, index, {t.name: t.node for t in graph.outputs if t.node is not None})
            # In the last twenty binades a product may pass the end on its way; that much is accepted.
            fine = mpmath.isfinite(truth) and abs(truth) < (0.99 if np.isnan(low[index]) else 2.0**-20) * F32_MAX
        if fine:
            first = _first_bad(node, values[0], env, index)
            names = [n for n in env.tensors if n in _inputs(graph, node)]
            point = ", ".join(f"{t} = {_pick(env.tensors[t], index):.9g}" for t in names)
            point += "".join(f", {n} = {v}" for n, v in env.attrs.items())
            report.error(
                span, "unsafe", f"`{name}` overflows in float32 where its true value is {mpmath.nstr(truth, 6)}",
                _HOLDING.get(first.op, "rewrite the formula so that no part of it overflows"),
                [Note(f"at {point}" + (f", with {variant}" if variant.values else "")),
                 Note(f"float32 {low[index]:.9g}; the first part without a finite value: `{spell(first)}`")],
            )  # fmt: skip
            return True
    return False


def _inputs(graph: Graph, node: Node) -> set[str]:
    """The tensors that a value comes of, those behind an output that it reads among them."""
    found = {n.params[0] for n in walk([node]) if n.op == "read"}
    behind = [t.node for t in graph.outputs if t.name in found and t.node is not None]
    return found | {n.params[0] for n in walk(behind) if n.op == "read"}


def _pick(array: Array, index: tuple[int, ...]) -> Any:
    return array[tuple(min(i, n - 1) for i, n in zip(index, array.shape))]


def _first_bad(node: Node, low: Mapping[int, Array], env: Env, index: tuple[int, ...]) -> Node:
    for part in walk([node]):
        if (
            part.kind == "float"
            and part.op not in ("const", "attr", "read")
            and not np.isfinite(_pick(low[part.serial], index))
        ):
            return part
    return node


def exact(node: Node, env: Env, index: tuple[int, ...], outputs: Mapping[str, Node]) -> Any:
    """One element of a pointwise node in mpmath's working precision; an output that is read is computed, not looked up."""
    known: dict[int, Any] = {}
    for part in walk([node]):
        args = [known[a.serial] for a in part.args]
        if part.op == "read" and part.params[0] in outputs:
            known[part.serial] = exact(outputs[part.params[0]], env, index, {})
        else:
            known[part.serial] = _exact_one(part, args, env, index)
    return known[node.serial]


def _exact_one(node: Node, args: list[Any], env: Env, index: tuple[int, ...]) -> Any:
    row = TABLE.get(node.op)
    if row is not None:
        return row.mp(*args)
    match node.op:
        case "read":
            value = _pick(env.tensors[node.params[0]], index)
            return bool(value) if node.kind == "bool" else mpmath.mpf(float(value))
        case "at":
            place = list(index)
            for axis, i in zip(node.params[0], node.args[1:]):
                place[env.order.index(axis)] = i.params[0]
            return mpmath.mpf(float(_pick(env.tensors[node.args[0].params[0]], tuple(place))))
        case "stack":
            return args[index[env.order.index(node.params[0])]]
        case "replace":
            return args[1]
        case "largest":
            return mpmath.mpf(F32_MAX)
        case "const" | "attr" | "size":
            value = evaluate([node], env)[node.serial].ravel()[0]
            return bool(value) if node.kind == "bool" else mpmath.mpf(float(value))
        case "cast":
            return mpmath.floor(args[0]) if node.params[0] == "int" and args[0] >= 0 else args[0]
    return args[0]
