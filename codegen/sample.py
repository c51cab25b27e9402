"""Points at which formulas are compared: extents, attrs and tensors that a variant's domain allows.

Takes an `OpSpec`, a `Graph` and a random generator, returns an `Env`. Values are random and non-uniform; `lattice`
draws from a few numbers so that ties and kinks are met; `at_kinks` moves inputs onto the roots of every comparison.

    env = Sampler(op, graph, seed=0).draw("normal", scale=1.0)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from codegen.evaluate import Env, OutOfRange, evaluate
from codegen.ir import Graph, Node, Tensor, walk
from codegen.primitives import TABLE, Array
from codegen.spec import AttrDecl, Call, Number, OpSpec, Unary, spell
from codegen.variants import Variant, conditions, formulas, subexpressions

LATTICE = (-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0)
_TRIES = 400
_NEAR, _FAR = 130, 5000
"""Extents are drawn at written numbers below the first; below the second where nothing else was allowed."""


class NoSample(Exception):
    """No attrs and extents were found that satisfy `requires`, `sizes` and the variant's conditions."""


class Sampler:
    """Draws environments of one variant."""

    def __init__(self, op: OpSpec, variant: Variant, graph: Graph, seed: int) -> None:
        self.op, self.variant, self.graph = op, variant, graph
        self.rng = np.random.default_rng(seed)
        self.pairing = np.random.default_rng(seed + 1)
        self.order = tuple(graph.axes)
        self.domains = {d.name: (d.low, d.high) for d in op.domain}
        said, asked = (
            [float(e.value) for f in exprs for e in subexpressions(f) if isinstance(e, Number)]
            for exprs in (formulas(op), conditions(op))
        )
        self.written = sorted({v for v in (*said, *asked) if abs(v) < 1e6})
        """The numbers of the formulas: what attrs, extents and ints may be compared with."""
        self.infinite = sorted({v for v in asked if math.isinf(v)})
        """The infinities that a condition asks for."""
        self.places = any("size(" in text or "index(" in text for text in map(spell, formulas(op)))
        """Whether a formula asks extents or places."""

    def draw(self, mode: str, scale: float = 1.0, stretch: bool = False) -> Env:
        """One environment. `crowd` is the lattice over many elements, where the op has few axes: rare ties meet.

        Raises:
            NoSample: where no attrs and extents are allowed.
        """
        extents, attrs = self._host(crowded=mode == "crowd")
        env = Env(self.order, extents, {}, attrs)
        tensors = {
            t.name: self._tensor(t, env, mode, scale, stretch)
            for t in self.graph.tensors.values()
            if t.role != "output"
        }
        if mode == "lattice":
            self._twins(tensors)
        return replace(env, tensors=tensors)

    def _twins(self, tensors: dict[str, Array]) -> None:
        """Some rows of a tensor become those of another of the same axes: distances of 0, and equal ones."""
        floats = [t for t in self.graph.tensors.values() if t.kind == "float" and t.role == "input" and t.axes]
        for first, second in itertools.combinations(floats, 2):
            a, b = tensors[first.name], tensors[second.name]
            if a.shape != b.shape or self.domains.get(first.name) != self.domains.get(second.name):
                continue
            along = int(self.pairing.integers(a.ndim))
            shape = tuple(1 if d == along else n for d, n in enumerate(a.shape))
            tensors[second.name] = np.where(self.pairing.random(shape) < 0.2, a, b)

    # -------------------------------------------------------------------------------- extents and attrs

    def _host(self, crowded: bool) -> tuple[dict[str, int], dict[str, Any]]:
        for attempt in range(_TRIES):
            extents = self._extents(crowded, _NEAR if attempt < _TRIES // 2 else _FAR)
            attrs: dict[str, Any] = {}
            try:
                for decl in (*self.op.attrs, *self.op.hosted):
                    if self.variant.get(f"has {decl.name}", True):
                        attrs[decl.name] = self._attr(decl, extents, attrs, attempt)
                if self._solve(extents, attrs):
                    return extents, attrs
            except (ValueError, ZeroDivisionError, OverflowError, OutOfRange):
                continue
        raise NoSample

    def _extents(self, crowded: bool, most: int) -> dict[str, int]:
        many = len(self.order)
        high = 6 if many <= 3 else 5 if many <= 5 else 4
        if crowded and many <= 2:
            low = 300 if many == 1 else 18
            return {a: axis.fixed or int(self.rng.integers(low, low + 9)) for a, axis in self.graph.axes.items()}
        extents = {a: axis.fixed or int(self.rng.integers(2, high)) for a, axis in self.graph.axes.items()}
        near = [int(v) + k for v in self.written for k in (0, 1, 2) if high < v < most]
        # One axis as long as a number that it may be compared with.
        if near and self.places and self.rng.random() < 0.5:
            free = [a for a, axis in self.graph.axes.items() if axis.fixed is None]
            extents[str(self.rng.choice(free))] = int(self.rng.choice(near))
        return extents

    def _attr(self, decl: AttrDecl, extents: dict[str, int], attrs: dict[str, Any], attempt: int) -> Any:
        if decl.size:
            values = tuple(extents[a] for a in decl.size)
            return values if decl.arity is not None else values[0]
        if decl.axis or decl.keeps:
            return 0
        if decl.type in ("enum", "bool"):
            default: Any = getattr(decl.default, "id", None) or getattr(
                decl.default, "value", decl.enum[0] if decl.enum else "false"
            )
            value = self.variant.get(decl.name, default)
            return value if decl.type == "enum" else value in (True, "true", "True")
        if decl.arity is not None:
            items = decl.default.args if isinstance(decl.default, Call) else (decl.default,) * decl.arity
            return tuple(self._number(decl, literal(item), attempt) for item in items)
        return self._number(decl, literal(decl.default), attempt)

    def _number(self, decl: AttrDecl, default: float | None, attempt: int) -> int | float:
        if decl.type == "int" or any(t.or_else == decl.name for t in self.op.tensors):
            pool = [int(default)] if default is not None and math.isfinite(default) else []
            low, high = self.domains.get(decl.name, (-math.inf, math.inf))
            written = [int(v) + k for v in self.written for k in (-1, 0, 1) if abs(v) < 1000]
            if math.isfinite(low) and math.isfinite(high) and self.rng.random() < 0.5:
                return int(self.rng.integers(int(low), int(high) + 1))
            drawn: list[int] = written if written and self.rng.random() < 0.3 else [*pool, 0, 1, 2, 3]
            drawn = [v for v in drawn if low <= v <= high] or [int(np.clip(v, low, high)) for v in drawn]
            return int(self.rng.choice(drawn))
        low, high = self.domains.get(decl.name, (-math.inf, math.inf))
        ends = [v for v in self.infinite if low <= v <= high]
        if ends and self.rng.random() < 0.25:
            return float(self.rng.choice(ends))
        near = [v + k for v in self.written for k in (-1.0, 0.0, 1.0) if low <= v + k <= high]
        if near and self.rng.random() < 0.25:
            return float(self.rng.choice(near))
        pick = self.rng.random()
        if default is not None and pick < 0.3:
            return float(default)
        if pick < 0.4 and low <= 0 <= high:
            return 0.0
        if math.isfinite(low) and math.isfinite(high):
            return float(self.rng.uniform(low, high))
        if default is not None and math.isfinite(default) and default != 0:
            return float(default * self.rng.uniform(0.5, 1.5))
        value = float(self.rng.normal())
        return float(np.clip(abs(value) + low if math.isfinite(low) else value, low, high))

    def _solve(self, extents: dict[str, int], attrs: dict[str, Any]) -> bool:
        for axis, node in self.graph.sizes:
            value = self._host_value(node, extents, attrs)
            if value < 1:
                return False
            extents[axis] = int(value)
        if not all(self._host_value(n, extents, attrs) for _, n in self.graph.requires):
            return False
        return all(bool(self._host_value(n, extents, attrs)) == truth for n, truth in self.graph.conditions)

    def _host_value(self, node: Node, extents: dict[str, int], attrs: dict[str, Any]) -> Any:
        env = Env(self.order, extents, {}, attrs)
        return evaluate([node], env)[node.serial].ravel()[0]

    # -------------------------------------------------------------------------------- tensors

    def _tensor(self, tensor: Tensor, env: Env, mode: str, scale: float, stretch: bool) -> Array:
        shape = env.shape(tensor.axes)
        if tensor.broadcast and stretch:
            shape = tuple(1 if self.rng.random() < 0.5 else n for n in shape)
        if tensor.kind == "bool":
            return self.rng.random(shape) < 0.5
        if tensor.kind == "int":
            return self._ints(tensor, env, shape)
        if tensor.role == "cotangent":
            return self.rng.normal(size=shape) + 0.5
        low, high = self.domains.get(tensor.name, (-math.inf, math.inf))
        return self.floats(shape, low, high, mode, scale, env)

    def _ints(self, tensor: Tensor, env: Env, shape: tuple[int, ...]) -> Array:
        if tensor.indexes is None:
            if tensor.dtype == "i64" and not tensor.axes:  # a seed
                return self.rng.integers(0, 2**62, size=shape)
            low, high = self.domains.get(tensor.name, (-3, 3))
            drawn = self.rng.integers(int(max(low, -100)), int(min(high, 100)) + 1, size=shape)
            near = [int(v) + k for v in self.written for k in (-1, 0, 1) if low <= v + k <= high]
            return np.where(self.rng.random(shape) < 0.3, self.rng.choice(near, size=shape), drawn) if near else drawn
        drawn = self.rng.integers(0, env.extents[tensor.indexes], size=shape)
        if tensor.or_else is not None:
            other = env.attrs[tensor.or_else] if isinstance(tensor.or_else, str) else tensor.or_else
            drawn = np.where(self.rng.random(shape) < 0.3, int(other), drawn)
        return drawn

    def floats(self, shape: tuple[int, ...], low: float, high: float, mode: str, scale: float, env: Env) -> Array:
        """Floats of a domain; infinite ends are open."""
        if mode in ("lattice", "crowd"):
            attrs = [
                v
                for v in env.attrs.values()
                if isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v)
            ]
            points = [float(p) for p in (*LATTICE, *attrs, low, high) if low <= p <= high and math.isfinite(p)]
            return (
                self.rng.choice(points, size=shape) if points else self.floats(shape, low, high, "normal", scale, env)
            )
        if math.isfinite(low) and math.isfinite(high):
            return self.rng.uniform(low, high, size=shape)
        drawn = self.rng.normal(size=shape) * scale
        if math.isfinite(low):
            return low + np.abs(drawn) + 1e-3
        return high - np.abs(drawn) - 1e-3 if math.isfinite(high) else drawn


def literal(expr: Any) -> float | None:
    """The number that an expression is, or None."""
    if isinstance(expr, Number):
        return float(expr.value)
    if isinstance(expr, Unary) and expr.op == "-":
        inner = literal(expr.operand)
        return None if inner is None else -inner
    return None


# ---------------------------------------------------------------------------------------------- kinks

_PAIRS = ("lt", "le", "gt", "ge", "eq", "ne", "maximum", "minimum")
_LOCAL = ("const", "read", "attr", "size", "index", "cast", "expand", "replace", "stop_gradient")


def kinks(graph: Graph, roots: list[Node]) -> Iterator[Node]:
    """Differences whose roots are kinks or jumps of the formulas: `a - b` of every comparison, x of every abs."""
    b = graph.builder
    seen: set[int] = set()
    for node in list(walk(roots)):
        pairs: list[tuple[Node, Node]] = []
        if node.op in _PAIRS and node.args[0].kind != "bool":
            pairs = [(node.args[0], node.args[1])]
        elif node.op in ("abs", "sign", "relu"):
            pairs = [(node.args[0], b.const(0))]
        elif node.op == "clamp":
            pairs = [(node.args[0], node.args[1]), (node.args[0], node.args[2])]
        for left, right in pairs:
            difference = b.op("sub", left, right)
            if not difference.host and difference.kind == "float" and difference.serial not in seen:
                seen.add(difference.serial)
                yield difference


def _local(difference: Node) -> bool:
    """Whether the difference at a point depends on the inputs at that point alone."""
    return all(n.op in TABLE or n.op in _LOCAL for n in walk([difference]))


def at_kink(sampler: Sampler, env: Env, difference: Node) -> Iterator[Env]:
    """Environments with an input moved onto the root of the difference, and to its two nearest neighbours."""
    if not _local(difference):
        yield from _shifted(sampler, env, difference)
        return
    inputs = {
        t.name: t
        for t in sampler.graph.tensors.values()
        if t.kind == "float" and t.role in ("input", "param", "buffer")
    }
    for read in (n for n in walk([difference]) if n.op == "read" and n.params[0] in inputs):
        if read.axes != difference.axes and read.axes:
            continue
        name = read.params[0]
        low, high = sampler.domains.get(name, (-math.inf, math.inf))
        for root_below, root_above in _brackets(env, difference, name, max(low, -1e5), min(high, 1e5)):
            yield from _around(env, name, root_below, root_above, low, high)


def _shifted(sampler: Sampler, env: Env, difference: Node) -> Iterator[Env]:
    """For a difference that reduces: the whole of an input moved to either side of the root."""
    inputs = {
        t.name for t in sampler.graph.tensors.values() if t.kind == "float" and t.role in ("input", "param", "buffer")
    }
    for name in sorted({n.params[0] for n in walk([difference]) if n.op == "read"} & inputs):
        low, high = sampler.domains.get(name, (-math.inf, math.inf))
        base = env.tensors[name]

        def moved(step: float, name: str = name, base: Array = base, low: float = low, high: float = high) -> Env:
            return replace(env, tensors={**env.tensors, name: np.clip(base + step, low, high)})

        def side(step: float) -> float:
            return float(
                np.sign(evaluate([difference], moved(step))[difference.serial].ravel()[:1].sum())
            )  # noqa: B023

        grid = [float(v) for v in _grid(-1e4, 1e4)[::3]]
        sides = [side(v) for v in grid]
        for below, above, first, last in list(zip(grid, grid[1:], sides, sides[1:])):
            if first * last < 0:
                yield from (moved(below), moved(above))
                break


def _around(env: Env, name: str, below: Array, above: Array, low: float, high: float) -> Iterator[Env]:
    """At a root, beside it, and well into the piece on either side."""
    step = np.maximum(1.0, np.abs(above))
    for values in (below, above, below - 1e-6 * step, above + 1e-6 * step, below - 0.25 * step, above + 0.25 * step):
        yield replace(env, tensors={**env.tensors, name: np.clip(values, low, high)})


def _grid(low: float, high: float) -> Array:
    """Points between which roots are looked for: of all magnitudes where the domain is wide."""
    sizes = np.geomspace(1e-4, 1e5, 82)
    points = np.concatenate([-sizes[::-1], [0.0], sizes]) * (1 + 1e-3 * np.sqrt(2))
    inside = points[(points > low) & (points < high)]
    return np.unique(np.concatenate([[low], inside, np.linspace(low, high, 9), [high]]))


def _brackets(env: Env, difference: Node, name: str, low: float, high: float) -> Iterator[tuple[Array, Array]]:
    """Neighbouring floats around the first few roots of the difference, element by element."""
    shape = env.tensors[name].shape

    def at(values: Array) -> Array:
        out = evaluate([difference], replace(env, tensors={**env.tensors, name: values}))[difference.serial]
        lead = values.ndim - len(shape)
        extra = tuple(d for d in range(-len(shape), 0) if out.shape[d] != values.shape[lead + len(shape) + d])
        return np.max(out, axis=extra, keepdims=True) if extra else out

    grid = _grid(low, high)
    signs = np.sign(at(np.broadcast_to(grid.reshape(-1, *[1] * len(shape)), (len(grid), *shape))))
    signs = np.broadcast_to(signs, (len(grid), *shape))
    changes = signs[:-1] != signs[1:]
    order = np.cumsum(changes, axis=0)
    own = env.tensors[name]
    for k in range(1, min(4, int(order.max(initial=0))) + 1):
        here = changes & (order == k)
        good = here.any(axis=0)
        place = np.argmax(here, axis=0)
        below, above = grid[place], grid[np.minimum(place + 1, len(grid) - 1)]
        first = np.take_along_axis(signs, place[None], axis=0)[0]
        for _ in range(70):
            middle = 0.5 * (below + above)
            side = np.broadcast_to(np.sign(at(middle)), shape) == first
            below, above = np.where(side, middle, below), np.where(side, above, middle)
        yield np.where(good, below, own), np.where(good, above, own)
