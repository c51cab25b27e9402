"""The meaning of a graph in numpy: float64, float32 or complex, any number of points at once.

Takes nodes and an `Env` (extents of axes, arrays, attrs), returns an array a node. Every array has one dim for each axis
of the op, in the op's order, of extent 1 where the value lacks the axis or a tensor is stretched; a leading dim of
probes may stand before them. So broadcasting is numpy's own and a reduction keeps its dims.

    env = Env(("...", "N"), {"...": 3, "N": 5}, {"x": array of (3, 5)}, {"eps": 1e-6})
    evaluate([y], env)[y.serial]    # (3, 5)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from codegen.ir import Node, walk
from codegen.primitives import TABLE, Array


class OutOfRange(Exception):
    """An index without `fill` left its axis: the spec's contract is broken."""


@dataclass(frozen=True)
class Env:
    """What the leaves of a graph are worth."""

    order: tuple[str, ...]
    extents: Mapping[str, int]
    tensors: Mapping[str, Array]
    attrs: Mapping[str, Any]
    dtype: Any = np.float64
    """Of floats; complex tensors stay complex."""
    anchors: Mapping[int, Array] = field(default_factory=dict)
    """Base values of nodes, by serial: with them `replace(x, v)` is `v0 + (x - x0)`, so that probing it follows x."""

    def dim(self, axis: str) -> int:
        """The position of an axis from the end, so that leading probes do not move it."""
        return self.order.index(axis) - len(self.order)

    def shape(self, axes: Iterable[str]) -> tuple[int, ...]:
        axes = set(axes)
        return tuple(self.extents[a] if a in axes else 1 for a in self.order)


def evaluate(
    roots: Iterable[Node], env: Env, disturbed: Mapping[int, Callable[[Array], Array]] | None = None
) -> dict[int, Array]:
    """Every node below the roots, by serial. `disturbed` says what becomes of the values of some."""
    disturbed = disturbed or {}
    values: dict[int, Array] = {}
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        warnings.simplefilter("ignore", np.exceptions.ComplexWarning)
        for node in _order(tuple(roots)):
            args = [values[a.serial] for a in node.args]
            if not node.host:
                args = [_lowered(v, a, env) for v, a in zip(args, node.args)]
            values[node.serial] = _value(node, args, env)
            if node.serial in disturbed:
                values[node.serial] = disturbed[node.serial](values[node.serial])
    return values


@lru_cache(maxsize=256)
def _order(roots: tuple[Node, ...]) -> tuple[Node, ...]:
    """The same roots are evaluated at thousands of points."""
    return tuple(walk(roots))


def _lowered(value: Array, node: Node, env: Env) -> Array:
    """A host value enters the kernel in the compute dtype."""
    return value.astype(env.dtype) if node.host and node.kind == "float" else value


def _value(node: Node, args: list[Array], env: Env) -> Array:
    row = TABLE.get(node.op)
    if row is not None:
        if node.kind == "float" and any(a.kind == "int" for a in node.args):
            args = [_floated(v, a, node, env) for v, a in zip(args, node.args)]
        return np.asarray(row.numpy(*args))
    value: Array = _STRUCTURAL[node.op](node, args, env)
    return value


def _floated(value: Array, node: Node, user: Node, env: Env) -> Array:
    """An int operand of a float operation: on the host a float64, in a kernel a number of the compute dtype."""
    return value.astype(np.float64 if user.host else env.dtype) if node.kind == "int" else value


def full(value: Array, axes: Iterable[str], env: Env) -> Array:
    """The value stretched to the full extents of these axes."""
    shape = env.shape(axes)
    lead = value.shape[: value.ndim - len(shape)]
    own = value.shape[len(lead) :]
    return np.broadcast_to(value, lead + tuple(max(a, b) if a == 1 else a for a, b in zip(own, shape)))


# ---------------------------------------------------------------------------------------------- leaves


def _const(node: Node, args: list[Array], env: Env) -> Array:
    value = node.params[0]
    return np.full((1,) * len(env.order), value, dtype=np.float64 if isinstance(value, float) else None)


def _attr(node: Node, args: list[Array], env: Env) -> Array:
    name, kind, item = node.params
    value = env.attrs[name] if item is None else env.attrs[name][item]
    dtype = {"float": np.float64, "int": np.int64, "bool": np.bool_}[kind]
    return np.full((1,) * len(env.order), value, dtype=dtype)


def _size(node: Node, args: list[Array], env: Env) -> Array:
    count = 1
    for axis in node.params:
        count *= env.extents[axis]
    return np.full((1,) * len(env.order), count, dtype=np.int64)


def _index(node: Node, args: list[Array], env: Env) -> Array:
    axis = node.params[0]
    return np.arange(env.extents[axis], dtype=np.int64).reshape(env.shape((axis,)))


def _uniform(node: Node, args: list[Array], env: Env) -> Array:
    axes, stream = node.params
    count = 1
    for axis in axes:
        count *= env.extents[axis]
    flat = philox_uniform(int(args[0].ravel()[0]), stream, count).astype(env.dtype)
    listed = flat.reshape([env.extents[a] for a in axes])
    ordered = sorted(axes, key=env.order.index)
    return listed.transpose([axes.index(a) for a in ordered]).reshape(env.shape(axes))


def philox_uniform(seed: int, stream: int, count: int) -> Array:
    """`count` floats in [0, 1) of 24 bits: words of Philox4x32-10 (Salmon et al., 2011), counter (i // 4, stream), key `seed`."""
    words = (count + 3) // 4
    low = np.uint64(0xFFFFFFFF)
    i = np.arange(words, dtype=np.uint64)
    c = [
        i & low,
        i >> np.uint64(32),
        np.full(words, stream & 0xFFFFFFFF, np.uint64),
        np.full(words, (stream >> 32) & 0xFFFFFFFF, np.uint64),
    ]
    k0, k1 = np.uint64(seed & 0xFFFFFFFF), np.uint64((seed >> 32) & 0xFFFFFFFF)
    with np.errstate(over="ignore"):
        for _ in range(10):
            p0, p1 = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
            c = [(p1 >> np.uint64(32)) ^ c[1] ^ k0, p1 & low, (p0 >> np.uint64(32)) ^ c[3] ^ k1, p0 & low]
            k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return (np.stack(c, axis=-1).reshape(-1)[:count] >> np.uint64(8)).astype(np.float64) * 2.0**-24


# ---------------------------------------------------------------------------------------------- reductions, scans


def _dims(axes: Iterable[str], env: Env) -> tuple[int, ...]:
    return tuple(sorted(env.dim(a) for a in axes))


def _reduce(node: Node, args: list[Array], env: Env) -> Array:
    name, axes = node.params
    x = full(args[0], node.args[0].axes, env)
    dims = _dims(axes, env)
    match name:
        case "sum":
            return np.asarray(np.sum(x, axis=dims, keepdims=True))
        case "mean":
            return np.asarray(np.mean(x, axis=dims, keepdims=True))
        case "max" | "min":
            return np.asarray(getattr(np, name)(x, axis=dims, keepdims=True))
        case "prod" | "any" | "all":
            return np.asarray(getattr(np, name)(x, axis=dims, keepdims=True))
        case "argmax" | "argmin":
            return _flat_arg(getattr(np, name), x, axes, env)
        case "logsumexp":
            top = np.max(np.where(np.isfinite(x), x.real, -np.inf), axis=dims, keepdims=True)
            top = np.where(np.isfinite(top), top, 0).astype(x.real.dtype)
            return np.asarray(top + np.log(np.sum(np.exp(x - top), axis=dims, keepdims=True)))
        case "var":
            count = np.prod([x.shape[d] for d in dims], dtype=np.int64)
            centred = x - np.mean(x, axis=dims, keepdims=True)
            free = np.maximum(count - _floated(args[1], node.args[1], node, env), 0)
            return np.asarray(np.sum(centred * centred, axis=dims, keepdims=True) / free)
    raise AssertionError(name)


def _flat_arg(pick: Any, x: Array, axes: tuple[str, ...], env: Env) -> Array:
    """Row-major over several axes, in the op's order."""
    dims = [env.dim(a) + x.ndim for a in sorted(axes, key=env.order.index)]
    rest = [d for d in range(x.ndim) if d not in dims]
    moved = x.transpose(rest + dims).reshape([x.shape[d] for d in rest] + [-1])
    shape = [1 if d in dims else x.shape[d] for d in range(x.ndim)]
    return np.asarray(pick(moved, axis=-1)).reshape(shape)


def _dot(node: Node, args: list[Array], env: Env) -> Array:
    product = full(args[0] * args[1], node.args[0].axes | node.args[1].axes, env)
    return np.asarray(np.sum(product, axis=_dims(node.params, env), keepdims=True))


def _scan(node: Node, args: list[Array], env: Env) -> Array:
    name, axis, reverse, exclusive = node.params
    dim = env.dim(axis)
    axes = frozenset().union(*(a.axes for a in node.args))
    parts = [np.flip(full(a, axes, env), dim) if reverse else full(a, axes, env) for a in args]
    if name == "linear":
        out = _linear_scan(parts[0], parts[1], dim)
    else:
        out = (np.cumsum if name == "cumsum" else np.cumprod)(parts[0], axis=dim)
    if exclusive:
        first = np.zeros_like(np.take(out, [0], dim)) if name != "cumprod" else np.ones_like(np.take(out, [0], dim))
        out = np.concatenate([first, np.take(out, np.arange(out.shape[dim] - 1), dim)], axis=dim)
    return np.flip(out, dim) if reverse else out


def _linear_scan(a: Array, b: Array, dim: int) -> Array:
    """r[i] = b[i] + a[i] * r[i - 1]."""
    a, b = (np.moveaxis(p, dim, 0) for p in np.broadcast_arrays(a, b))
    out = np.empty(a.shape, dtype=np.result_type(a, b))
    carry = np.zeros(a.shape[1:], dtype=out.dtype)
    for i in range(a.shape[0]):
        carry = b[i] + a[i] * carry
        out[i] = carry
    return np.moveaxis(out, 0, dim)


# ---------------------------------------------------------------------------------------------- reads at an index


def _coordinates(
    shape: tuple[int, ...], axes: frozenset[str], index: Mapping[str, Array], env: Env, lead: int
) -> tuple[Array, ...]:
    """One index array per dim of an array of this shape: the given ones, the coordinate itself, or 0."""
    out: list[Array] = []
    rank = len(shape)
    for d, extent in enumerate(shape):
        axis = env.order[d - lead] if d >= lead else None
        if axis is not None and axis in index:
            out.append(index[axis])
        else:
            step = np.arange(extent) if axis is None or (axis in axes and extent > 1) else np.zeros(1, np.int64)
            out.append(step.reshape([-1 if k == d else 1 for k in range(rank)]))
    return tuple(out)


def _inside(index: Mapping[str, Array], env: Env) -> Array:
    within: Array = np.ones((1,) * len(env.order), dtype=bool)
    for axis, i in index.items():
        within = within & (i >= 0) & (i < env.extents[axis])
    return within


def _at(node: Node, args: list[Array], env: Env) -> Array:
    names, filled = node.params
    x = full(args[0], names, env)
    index = {n: full(i, a.axes, env) for n, i, a in zip(names, args[1:], node.args[1:])}
    within = _inside(index, env)
    if not filled and not within.all():
        raise OutOfRange(", ".join(names))
    if x.size == 0 or any(i.size == 0 for i in index.values()):
        return np.zeros(env.shape(node.axes), x.dtype)
    clipped = {a: np.clip(i, 0, env.extents[a] - 1) for a, i in index.items()}
    lead = x.ndim - len(env.order)
    taken = x[_coordinates(x.shape, node.args[0].axes, clipped, env, lead)]
    return np.where(within, taken, args[-1]) if filled else taken


def _add_at(node: Node, args: list[Array], env: Env) -> Array:
    summed, names = node.params
    index = {n: full(i, a.axes, env) for n, i, a in zip(names, args[1:], node.args[1:])}
    axes = node.args[0].axes.union(*(a.axes for a in node.args[1:]))
    g = full(args[0], axes, env)
    within = np.broadcast_to(_inside(index, env), g.shape)
    clipped = {a: np.clip(i, 0, max(0, env.extents[a] - 1)) for a, i in index.items()}
    lead = g.ndim - len(env.order)
    out = np.zeros(g.shape[:lead] + env.shape(node.axes), dtype=g.dtype)
    if out.size and g.size:
        loop = (axes - frozenset(summed)) | frozenset(names)
        shape = tuple(1 if d >= lead and env.order[d - lead] in summed and env.order[d - lead] not in loop else e
                      for d, e in enumerate(g.shape))  # fmt: skip
        np.add.at(out, _coordinates(shape, loop, clipped, env, lead), np.where(within, g, 0))
    return out


def _stack(node: Node, args: list[Array], env: Env) -> Array:
    axis = node.params[0]
    shape = np.broadcast_shapes(*(a.shape for a in args))
    return np.concatenate([np.broadcast_to(a, shape) for a in args], axis=env.dim(axis))


def _cast(node: Node, args: list[Array], env: Env) -> Array:
    dtype = {"int": np.int64, "bool": np.bool_}.get(node.params[0])
    x = args[0]
    if dtype is None:
        return x if np.iscomplexobj(x) else x.astype(np.float64 if node.host else env.dtype)
    return x.real.astype(dtype)


def _sum_to(node: Node, args: list[Array], env: Env) -> Array:
    """Sums over what the tensor, as it lies in `env`, is stretched along."""
    tensor = env.tensors[node.params[0]]
    own = tensor.shape[tensor.ndim - len(env.order) :]
    x = full(args[0], node.axes, env)
    dims = tuple(d - len(own) for d, extent in enumerate(own) if extent == 1 and x.shape[d - len(own)] != 1)
    return np.asarray(np.sum(x, axis=dims, keepdims=True)) if dims else x


def _replace(node: Node, args: list[Array], env: Env) -> Array:
    x, v = node.args
    if x.serial in env.anchors:
        return np.asarray(env.anchors[v.serial] + (args[0] - env.anchors[x.serial]))
    return args[1]


_STRUCTURAL: dict[str, Callable[[Node, list[Array], Env], Array]] = {
    "const": _const,
    "read": lambda n, a, e: e.tensors[n.params[0]],
    "attr": _attr,
    "size": _size,
    "largest": lambda n, a, e: np.full((1,) * len(e.order), np.finfo(e.dtype).max, dtype=e.dtype),
    "index": _index,
    "uniform": _uniform,
    "reduce": _reduce,
    "dot": _dot,
    "scan": _scan,
    "at": _at,
    "add_at": _add_at,
    "stack": _stack,
    "cast": _cast,
    "expand": lambda n, a, e: full(a[0], n.params, e),
    "sum_to": _sum_to,
    "replace": _replace,
    "stop_gradient": lambda n, a, e: e.anchors.get(n.args[0].serial, a[0]),
}
