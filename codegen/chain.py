"""The chain rule over steps: the gradients that the specs of several ops declare become those of one op.

Takes the steps in the names of the fused op and the axes of its values, returns the entries of its `backward` and the
statements that they share. What an author wrote for one op, with its care for float32, stays what is computed. Where a
spec's gradient cannot be read so, the entries are `auto`.

    s = x + other, y = relu(s)   ->   let: d_s = where(s <= 0, 0, dy)      x: d_s      other: d_s
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from codegen.fused import PLACE, Composed, Names, NotFused, names_in, pruned
from codegen.primitives import MONOIDS, SCANS, TABLE
from codegen.spec import PACK, Binary, Binding, Call, Dots, Expr, Name

STRONGER = ("formula", "zero", "not_differentiable")
"""Kinds of entries: a gradient, one that is 0, none."""
_POINTWISE = {row.name for row in TABLE.values()} | {"stop_gradient", "replace"}


@dataclass(frozen=True)
class Values:
    """What a fused op computes: the axes of its tensors and results by name, and which are which."""

    axes: Mapping[str, frozenset[str]]
    results: tuple[str, ...]
    seeds: tuple[str, ...]
    """Outputs that have a cotangent."""
    targets: tuple[str, ...]
    """Tensors that may have a gradient."""


def flows(parts: Sequence[Composed], values: Values) -> dict[str, str]:
    """What comes to each target: one of `STRONGER`."""
    found = dict.fromkeys(values.seeds, "formula")
    for part in reversed(parts):
        for name, kind in _passed(part, found.get(part.step.result, "not_differentiable")):
            found[name] = min(found.get(name, "not_differentiable"), kind, key=STRONGER.index)
    return {t: found.get(t, "not_differentiable") for t in values.targets}


def _passed(part: Composed, flow: str) -> list[tuple[str, str]]:
    """What a step hands on to each of the names that it reads."""
    backward = part.op.backward
    if flow == "not_differentiable" or backward is None or not backward.differentiable:
        return []
    out = []
    for entry in backward.entries:
        value = part.values.get(entry.name)
        if isinstance(value, Name):  # what is stopped is no plain name
            kind = "formula" if entry.kind == "auto" else entry.kind
            out.append((value.id, max(flow, kind, key=STRONGER.index)))
    return out


def chained(
    parts: Sequence[Composed], forward: Sequence[Binding], values: Values, names: Names
) -> tuple[list[Binding], dict[str, Expr]]:
    """Shared statements, and the gradient of each target that has one.

    Raises:
        NotFused: where a spec's gradient is `auto`, or its axes cannot be told from its text.
    """
    known = dict(values.axes)
    for b in forward:
        known.setdefault(b.name, value_axes(b.expr, known))
    found: dict[str, Expr] = {}
    for name in values.seeds:
        found[name] = Name(f"d{name}", PLACE)
        known[f"d{name}"] = values.axes[name]
    let: list[Binding] = []

    def add(binding: Binding) -> Name:
        let.append(binding)
        known[binding.name] = value_axes(binding.expr, known)
        return Name(binding.name, PLACE)

    for part in reversed(parts):
        total, backward = found.pop(part.step.result, None), part.op.backward
        if total is None or backward is None or not backward.differentiable:
            continue
        if not isinstance(total, Name):
            total = add(Binding(names.free(f"d_{part.step.result}"), total, PLACE))
        more: dict[str, Expr] = {f"d{part.op.outputs[0].name}": total}
        for b in backward.let:
            more[b.name] = add(part.statement(names.free(b.name, f"{part.op.name}_{b.name}"), b, more))
        for entry in backward.entries:
            target = part.values.get(entry.name)
            if entry.kind == "auto":
                raise NotFused(f"the gradient of `{entry.name}` of `{part.op.name}` is `auto`")
            if entry.expr is not None and isinstance(target, Name) and target.id in (*values.targets, *values.results):
                value = _summed(part.read(entry.expr, more), target.id, part, values, known)
                found[target.id] = Binary("+", found[target.id], value, PLACE) if target.id in found else value
    kept = {n: v for n, v in found.items() if n in values.targets}
    return pruned(let, {n for v in kept.values() for n in names_in(v)}), kept


def _summed(value: Expr, target: str, part: Composed, values: Values, known: Mapping[str, frozenset[str]]) -> Expr:
    """A contribution summed over the axes along which a step that is `...` alone stretched its operand."""
    own, whole = values.axes[target], values.axes[part.step.result]
    lost = whole - own
    if not lost or not part.plain:
        return value
    there = value_axes(value, known)
    over = [_axis(a) for a in sorted(lost & there)]
    if over:
        value = Call("sum", (value, *over), (), PLACE, PLACE)
    if lost - there:
        count = Call("size", tuple(_axis(a) for a in sorted(lost - there)), (), PLACE, PLACE)
        value = Binary("*", value, count, PLACE)
    return value


def _axis(name: str) -> Expr:
    return Dots(PLACE) if name == PACK else Name(name, PLACE)


def value_axes(expr: Expr, known: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """The axes of an expression's value.

    Raises:
        NotFused: where a structural function makes axes of its own.
    """
    match expr:
        case Name(id, _):
            return known.get(id, frozenset())
        case Call(func, args, _, _, _) if func in MONOIDS:
            return value_axes(args[0], known) - _labels(args[1:])
        case Call("dot", args, _, _, _):
            return (value_axes(args[0], known) | value_axes(args[1], known)) - _labels(args[2:])
        case Call("cast", args, _, _, _):
            return value_axes(args[0], known)
        case Call("size" | "largest", _, _, _, _):
            return frozenset()
        case Call("index", args, _, _, _):
            return _labels(args)
        case Call(func, args, _, _, _) if func in SCANS:
            return frozenset[str]().union(*(value_axes(a, known) for a in args[:-1]))
        case Call(func, _, _, _, _) if func not in _POINTWISE:
            raise NotFused(f"the axes of `{func}` are not told by its text")
    return frozenset[str]().union(*(value_axes(e, known) for e in _operands(expr)))


def _operands(expr: Expr) -> list[Expr]:
    if isinstance(expr, Call):
        return list(expr.args)
    return [v for f in fields(expr) if isinstance(v := getattr(expr, f.name), Expr) and f.name != "cond"]


def _labels(args: Sequence[Expr]) -> frozenset[str]:
    return frozenset(PACK if isinstance(a, Dots) else a.id for a in args if isinstance(a, (Dots, Name)))
