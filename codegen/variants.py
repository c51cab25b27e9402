"""Choices: the combinations of enum values, flags, optional tensors and conditions that make an op concrete.

Takes an `OpSpec`, returns its `Atom`s and `Variant`s. A variant is one truth assignment; every later stage sees one
concrete graph a variant, and emission merges them again.

    an enum of two      -> Variant(approximate="none"), Variant(approximate="tanh")
    an optional weight  -> Variant(has weight=True), Variant(has weight=False)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass

from codegen.diagnostics import Report, nearest
from codegen.spec import (
    AttrDecl,
    Axes,
    AxesChoice,
    Call,
    Compare,
    Expr,
    IfElse,
    IsNone,
    Item,
    Logic,
    Name,
    Number,
    OpSpec,
    TensorDecl,
    Text,
    Unary,
    spell,
)  # fmt: skip

MOST = 64
"""More reachable combinations than this are refused."""

Value = str | bool


@dataclass(frozen=True)
class Atom:
    """One question that a formula asks. `kind` is enum, flag, tensor, attr, cotangent, condition or number."""

    key: str
    kind: str
    name: str
    values: tuple[Value, ...]
    """The default first."""
    expr: Expr | None = None


@dataclass(frozen=True)
class Variant:
    """An answer to every atom of the op."""

    values: tuple[tuple[str, Value], ...]

    def __getitem__(self, key: str) -> Value:
        return dict(self.values)[key]

    def get(self, key: str, default: Value) -> Value:
        return dict(self.values).get(key, default)

    def __str__(self) -> str:
        return ", ".join(f"{k}={v}" for k, v in self.values) or "the only one"


def has(name: str) -> str:
    """The key of the atom that asks for the presence of a tensor, attr or cotangent."""
    return f"has {name}"


NUMBER_KIND = "kind of number"
KINDS: dict[str, tuple[Value, ...]] = {"number": ("float", "int"), "integral": ("int", "bool")}
"""What tensors of a class of several kinds hold, all of them the same."""


def late(op: OpSpec) -> dict[str, AttrDecl]:
    """The attrs that nobody but a kernel gives the default of, which asks extents or a condition: one given and one absent are two variants."""
    out: dict[str, AttrDecl] = {}
    for attr in op.attrs:
        parts = () if attr.default is None else tuple(subexpressions(attr.default))
        asked = {p.name.id if isinstance(p, Item) else p.id for p in parts if isinstance(p, (Name, Item))}
        if asked & set(out) or any(isinstance(p, IfElse) or isinstance(p, Call) and p.func == "size" for p in parts):
            out[attr.name] = attr
    return out


def conditions(op: OpSpec) -> Iterator[Expr]:
    """Every condition of the op, wherever it stands."""
    for tensor in op.tensors:
        yield from axes_conditions(tensor)
        if tensor.when is not None:
            yield tensor.when
    if op.update is not None and op.update.when is not None:
        yield op.update.when
    for expr in formulas(op):
        for node in subexpressions(expr):
            if isinstance(node, IfElse):
                yield node.cond


def axes_conditions(tensor: TensorDecl) -> Iterator[Expr]:
    """The conditions that choose between the axes of a tensor."""
    pending = [tensor.axes]
    while pending:
        axes = pending.pop()
        if isinstance(axes, AxesChoice):
            yield axes.cond
            pending += [axes.then, axes.other]


def every_axes(tensor: TensorDecl) -> Iterator[Axes]:
    """The axes that a tensor has under one choice or another."""
    pending = [tensor.axes]
    while pending:
        axes = pending.pop()
        if isinstance(axes, AxesChoice):
            pending += [axes.then, axes.other]
        else:
            yield axes


def formulas(op: OpSpec) -> Iterator[Expr]:
    """Every formula of the op, in the order of the file."""
    yield from (s.expr for s in op.sizes)
    yield from (r.expr for r in op.requires)
    yield from (a.default for a in op.attrs if a.default is not None)
    yield from (b.expr for b in op.forward)
    if op.update is not None:
        yield from (b.expr for b in op.update.let)
        yield from (e.expr for e in op.update.entries if e.expr is not None)
    if op.backward is not None:
        yield from (b.expr for b in op.backward.let)
        yield from (e.expr for e in op.backward.entries if e.expr is not None)


def subexpressions(expr: Expr) -> Iterator[Expr]:
    """The expression and everything inside it, in the order of the text."""
    yield expr
    for field in fields(expr):
        value = getattr(expr, field.name)
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, Expr):
                yield from subexpressions(part)
            elif is_dataclass(part) and hasattr(part, "value") and isinstance(part.value, Expr):
                yield from subexpressions(part.value)


def atoms(op: OpSpec, report: Report) -> tuple[Atom, ...]:
    """The questions that the op's conditions ask, those of optional tensors and of cotangents among them."""
    found: dict[str, Atom] = {}
    for tensor in op.arguments:
        if tensor.optional:
            found[has(tensor.name)] = Atom(has(tensor.name), "tensor", tensor.name, (True, False))
    cotangents = [o.name for o in op.outputs if o.differentiable and o.dtype not in ("int", "bool", "i32", "i64")]
    if len(cotangents) > 1 and op.backward is not None and op.backward.differentiable:
        for name in cotangents:
            found[has(f"d{name}")] = Atom(has(f"d{name}"), "cotangent", f"d{name}", (True, False))
    for dtype, kinds in KINDS.items():
        if any(t.dtype == dtype for t in op.tensors):
            found[NUMBER_KIND] = Atom(NUMBER_KIND, "number", "", kinds)
    for name in late(op):
        found[has(name)] = Atom(has(name), "attr", name, (False, True))
    for cond in conditions(op):
        for atom in _atoms_of(cond, op, report):
            found.setdefault(atom.key, atom)
    return tuple(found.values())


def _atoms_of(cond: Expr, op: OpSpec, report: Report) -> Iterator[Atom]:
    attrs = {a.name: a for a in op.attrs}
    match cond:
        case Logic(_, left, right, _):
            yield from _atoms_of(left, op, report)
            yield from _atoms_of(right, op, report)
        case Unary("not", operand, _):
            yield from _atoms_of(operand, op, report)
        case Name("True" | "False" | "true" | "false", _):
            return
        case IsNone(name, _, span):
            tensor = next((t for t in op.arguments if t.name == name.id), None)
            if (tensor and tensor.optional) or (name.id in attrs and attrs[name.id].optional):
                kind = "tensor" if tensor else "attr"
                yield Atom(has(name.id), kind, name.id, (True, False) if tensor else (False, True))
            else:
                known = [t.name for t in op.arguments] + list(attrs)
                text = f"`{name.id}` is never None" if name.id in known else f"`{name.id}` is not an argument of the op"
                report.error(
                    span,
                    "never-none",
                    text,
                    "mark it `optional: true`" if name.id in known else nearest(name.id, known),
                )
        case Name(id, span) if id in attrs and attrs[id].type == "bool":
            given = attrs[id].default
            default = isinstance(given, Name) and given.id.lower() == "true"
            yield Atom(id, "flag", id, (default, not default))
        case Compare("==" | "!=", Name(id, _), Text(value, span), _) | Compare(
            "==" | "!=", Text(value, span), Name(id, _), _
        ):
            if id not in attrs or attrs[id].type != "enum":
                report.error(span, "not-an-enum", f"`{id}` is no enum attr, so it never equals a text")
            elif value not in attrs[id].enum:
                report.error(
                    span, "unknown-choice", f"`{value}` is not a choice of `{id}`", nearest(value, attrs[id].enum)
                )
            else:
                given = attrs[id].default
                first = given.value if isinstance(given, Text) else attrs[id].enum[0]
                yield Atom(id, "enum", id, (first, *(e for e in attrs[id].enum if e != first)))
        case Compare() if not any(isinstance(e, (Name, Item, Call)) for e in subexpressions(cond)):
            report.error(
                cond.span, "constant-condition", f"`{spell(cond)}` is always the same", "write the branch that holds"
            )
        case Compare():
            if _is_host(cond, op, report):
                yield Atom(spell(cond), "condition", spell(cond), (True, False), cond)
        case _:
            report.error(cond.span, "not-a-condition", f"`{spell(cond)}` is not a condition over attrs, sizes and presence",
                         "choose between tensor elements with `where(condition, a, b)`")  # fmt: skip


def _hint(name: str, op: OpSpec) -> str:
    axes = {f.name for t in op.tensors for own in every_axes(t) for d in own.dims for f in d.factors}
    return (
        f"the extent of an axis is `size({name})`"
        if name in axes
        else "choose between tensor elements with `where(condition, a, b)`"
    )


def _is_host(cond: Expr, op: OpSpec, report: Report) -> bool:
    """Whether a comparison reads attrs and sizes alone; reports the first name that is neither."""
    attrs = {a.name for a in op.attrs}
    pending = [cond]
    while pending:
        expr = pending.pop()
        if isinstance(expr, Call) and expr.func == "size":
            continue
        if isinstance(expr, (Name, Item)):
            name = expr.id if isinstance(expr, Name) else expr.name.id
            if name not in attrs:
                report.error(expr.span, "tensor-condition", f"`{name}` is not an attr: a condition is decided before the kernel runs",
                             _hint(name, op))  # fmt: skip
                return False
        for field in fields(expr):
            value = getattr(expr, field.name)
            pending += [p for p in (value if isinstance(value, tuple) else (value,)) if isinstance(p, Expr)]
    return True


def holds(cond: Expr, variant: Variant) -> bool:
    """The truth of a condition in a variant."""
    match cond:
        case Logic("and", left, right, _):
            return holds(left, variant) and holds(right, variant)
        case Logic(_, left, right, _):
            return holds(left, variant) or holds(right, variant)
        case Unary("not", operand, _):
            return not holds(operand, variant)
        case IsNone(name, negated, _):
            return bool(variant[has(name.id)]) == negated
        case Name("True" | "true", _):
            return True
        case Name("False" | "false", _):
            return False
        case Name(id, _):
            return bool(variant[id])
        case Compare(op, Name(id, _), Text(value, _), _) | Compare(op, Text(value, _), Name(id, _), _):
            return (variant[id] == value) == (op == "==")
        case _:
            return bool(variant[spell(cond)])


def variants(op: OpSpec, found: tuple[Atom, ...], report: Report) -> tuple[Variant, ...]:
    """All combinations, the defaults first. One without any cotangent is none."""
    count = 1
    for atom in found:
        count *= len(atom.values)
    if count > MOST:
        report.error(op.span, "too-many-variants", f"{count} combinations of choices, at most {MOST} are supported",
                     "split the op, or drop a choice: " + ", ".join(a.key for a in found))  # fmt: skip
        return ()
    cotangents = [a.key for a in found if a.kind == "cotangent"]
    out = []
    for values in itertools.product(*(a.values for a in found)):
        variant = Variant(tuple(zip((a.key for a in found), values)))
        if not cotangents or any(variant[c] for c in cotangents):
            out.append(variant)
    return tuple(out)


__all__ = ["Atom", "Number", "Variant", "atoms", "conditions", "holds", "variants"]
