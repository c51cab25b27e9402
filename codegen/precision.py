"""Precision: which calls of a formula may take their cheaper form where the results are stored in half precision.

Takes a typed pointwise variant, returns the calls that may not. A row of the primitives' table says how large the error of a
cheaper form is. Whether a formula passes it on or magnifies it is measured: each call is disturbed by so much, over the
whole range of floats, and what it moves is compared with the result.

    tanh in  y = x * tanh(softplus(x))    moves y by as much as itself: it may
    tanh in  y = x - tanh(x)              moves y by far more than y where x is small: it may not
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from codegen.evaluate import Env, evaluate
from codegen.ir import Graph, Node, spell, walk
from codegen.primitives import TABLE, Array
from codegen.safety import grids, pointwise
from codegen.sample import NoSample, Sampler
from codegen.spec import OpSpec
from codegen.stages import Part, Stage
from codegen.variants import Variant
from codegen.verify import with_outputs

_ULP = 2.0**-10
"""A unit in the last place of float16, relative to the number."""
_MOST = 0.125 * _ULP
"""How far a result may move, relative to itself: a quarter of what the rounding at the store may add."""
_INPUTS = 2.0**-12
"""The rounding of an input to float16, relative: half of the largest. Where that moves a result as far, as it does near a root,
the call is not what spoils it."""
_SCALES = (0.25, 1.0, 1.0, 4.0, 4.0, 16.0)
"""How large the operands of a reduction are drawn."""
_STRAY = 0.005
"""The share of points that do not count: where a branch changes under the disturbance, a difference says nothing."""


def coarse_calls(stage: Stage) -> Iterator[tuple[Part, Node, bool]]:
    """Each call of a stage that has a cheaper form, the part that it is in, and whether it may take it."""
    for part in stage.parts:
        for node in walk([s.node for s in part.stores]):
            if node.op in TABLE and TABLE[node.op].coarse and not node.host:
                yield part, node, spell(node) not in stage.exacting


def exacting(op: OpSpec, variant: Variant, graph: Graph, roots: Iterable[Node]) -> frozenset[str]:
    """The spelling of each call below the roots that must keep full precision, however the results are stored."""
    roots = [r for r in roots if r.kind == "float"]
    calls = [n for n in walk(roots) if n.op in TABLE and TABLE[n.op].coarse and n.kind == "float" and not n.host]
    if not calls:
        return frozenset()
    try:
        if all(pointwise(n) for n in walk(roots)):
            return _spoilt(graph, roots, calls, grids(op, variant, graph)[0])
        sampler = Sampler(op, variant, graph, 11)
        draws = [with_outputs(graph, sampler.draw("normal", scale)) for scale in _SCALES]
    except NoSample:
        return frozenset(spell(n) for n in calls)
    return frozenset().union(*(_spoilt(graph, roots, calls, env) for env in draws))


def _spoilt(graph: Graph, roots: list[Node], calls: list[Node], env: Env) -> frozenset[str]:
    """The calls whose disturbance moves a result too far at these points."""
    exact = evaluate(roots, env)
    given = [
        _rounded(graph, env, n) for n, t in graph.tensors.items() if t.kind == "float" and t.role in ("input", "param")
    ]
    nearby = [evaluate(roots, other) for other in given]
    slack = {r.serial: _furthest(exact[r.serial], [v[r.serial] for v in nearby]) for r in roots}
    found = set()
    for call in calls:
        for sign in (1, -1):
            moved = evaluate(roots, env, {call.serial: partial(_disturbed, 1 + sign * TABLE[call.op].coarse * _ULP)})
            if any(_magnified(exact[r.serial], moved[r.serial], slack[r.serial]) for r in roots):
                found.add(spell(call))
    return frozenset(found)


def _disturbed(factor: float, value: Array) -> Array:
    """A value with the error of a cheaper form. Where it is a whole number in float32 (1 far out in a sigmoid) it has none.

    Neighbours err to opposite sides, or a quotient of two sums would hide it.
    """
    sides = 1 - 2 * (np.arange(value.size).reshape(value.shape) % 2)
    with np.errstate(all="ignore"):
        single = value.astype(np.float32)
        return np.where(single == np.rint(single), value, value * (1 + (factor - 1) * sides))


def _rounded(graph: Graph, env: Env, name: str) -> Env:
    """The points with one input a little off, and with the outputs that follow."""
    return with_outputs(graph, replace(env, tensors={**env.tensors, name: env.tensors[name] * (1 + _INPUTS)}))


def _furthest(exact: Array, others: list[Array]) -> Array:
    with np.errstate(all="ignore"):
        moves = [np.nan_to_num(np.abs(o - exact), nan=0.0, posinf=0.0) for o in others]
    return np.maximum.reduce(moves) if moves else np.zeros_like(exact)


def _magnified(exact: Array, moved: Array, slack: Array) -> bool:
    with np.errstate(all="ignore"):
        move = np.abs(moved - exact)
        far = np.isfinite(exact) & np.isfinite(moved) & (move > _MOST * np.abs(exact)) & (move > slack)
    return bool(far.mean() > _STRAY)
