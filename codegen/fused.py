"""Fused ops: the formula that their steps make together, and the proof that it is theirs.

Takes the steps of an op and the specs of the steps' ops, returns the composed forward formula, what each op is to a group of
nodes, and reports where a fused op computes another thing than its steps.

    s = sum_of(x=x, other=residual, alpha=1)   ->   s = x + residual
    y = gate(x=s, kind="tanh")                      y = s * tanh(s)
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from codegen import autodiff
from codegen.diagnostics import Note, Report, Span, nearest
from codegen.evaluate import Env, OutOfRange, evaluate, full
from codegen.fusion_steps import constant, steps
from codegen.groups import Argument, Member, Pattern, Step, argument, declared
from codegen.infer import infer
from codegen.ir import Graph
from codegen.primitives import Array
from codegen.safety import check_safety
from codegen.sample import NoSample, Sampler
from codegen.spec import (
    CLASSES,
    AttrDecl,
    Axes,
    Backward,
    Binary,
    Binding,
    Call,
    Compare,
    Dots,
    Entry,
    Expr,
    IfElse,
    IsNone,
    Item,
    Keyword,
    Logic,
    Name,
    Number,
    OpSpec,
    TensorDecl,
    Text,
    Unary,
    spell_dims,
)
from codegen.variants import Atom, Variant, atoms, subexpressions, variants
from codegen.verify import AGREE, point_text

PLACE = Span("fuses", 1, 1)
"""Where composed expressions stand: nowhere, until they are written down."""
_GIVEN = Span("fuses", 1, 2)
"""Of a constant that stands for an attr."""
_ABSENT = Span("fuses", 1, 3)
"""Of a constant that stands for a tensor that is not there."""


class NotFused(Exception):
    """Why steps cannot be composed."""


# ---------------------------------------------------------------------------------------------- what an op is to a group


def member(op: OpSpec, attrs: Mapping[str, Any]) -> Member | None:
    """What an op with these attrs is to a group; None where no kernel can do more beside it."""
    if op.schedule == "none" or op.buffers or op.state or op.sizes:
        return None
    if any(t.when is not None for t in op.outputs):
        return None
    axis = next((a for a in op.attrs if a.axis), None)
    if axis is not None and len(axis.axis) > 1:
        return None
    keeps = next((a for a in op.attrs if a.keeps), None)
    kept = keeps is not None and attrs.get(keeps.name) is True
    placed = None if axis is None else (axis.axis[0], attrs.get(axis.name), kept)
    extents = {x: attrs.get(a.name) for a in op.attrs for x in a.size}
    found = declared([_argument(t) for t in op.arguments], [_argument(t) for t in op.outputs], placed, extents)
    return None if found is not None and found.plain and _asks_axes(op) else found


def _is_plain(op: OpSpec) -> bool:
    found = member(op, {})
    return found is not None and found.plain


def _argument(decl: TensorDecl) -> Argument | None:
    if not isinstance(decl.axes, Axes) or decl.indexes is not None or not decl.differentiable:
        return None
    dims, dtypes = spell_dims(decl.axes.dims), CLASSES.get(decl.dtype, (decl.dtype,))
    return argument(decl.name, dims, dtypes, decl.role, decl.broadcast, decl.optional, decl.scalar)


def _asks_axes(op: OpSpec) -> bool:
    """Whether a formula asks for the axes themselves, which are others in a group that is larger."""
    exprs = [b.expr for b in op.forward] + [r.expr for r in op.requires]
    return any(isinstance(e, Dots) or (isinstance(e, Name) and e.id[0].isupper() and e.id not in ("True", "False"))
               for x in exprs for e in subexpressions(x))  # fmt: skip


def pattern(op: OpSpec) -> Pattern:
    """Where an op with `fuses` can stand in a graph."""
    return Pattern(
        op.name,
        steps(op),
        tuple(o.name for o in op.outputs),
        tuple(a.name for a in op.attrs),
        lambda attrs: member(op, attrs),
    )


# ---------------------------------------------------------------------------------------------- composing


class Names:
    """Names that are free, and readable: the one that is wished for, a longer one, or one with a number."""

    def __init__(self, taken: Collection[str]) -> None:
        self.taken = set(taken)

    def free(self, wish: str, other: str = "", beside: Callable[[str], Collection[str]] = lambda name: ()) -> str:
        """The wished name, the other one, or that with a number; taken from now on, and with it what comes `beside` it."""
        longer = other or wish
        tries = [wish, longer, *(f"{longer}_{k}" for k in range(2, len(self.taken) + 3))]
        found = next(n for n in tries if not self.taken & {n, *beside(n)})
        self.taken |= {found, *beside(found)}
        return found


@dataclass(frozen=True)
class Composed:
    """A step in the names of the fused op."""

    step: Step
    op: OpSpec
    values: Mapping[str, Expr | None]
    """What each name of the step's op is: an expression, or None where it is absent."""
    optional: frozenset[str]
    """Names of the fused op that may be None."""

    @property
    def plain(self) -> bool:
        """Whether all tensors of the step's op are `...`."""
        return _is_plain(self.op)

    def read(self, expr: Expr, more: Mapping[str, Expr] | None = None) -> Expr:
        """An expression of the step's op in the names of the fused op, its choices taken."""
        return Reading({**self.values, **(more or {})}, self.optional).read(expr)

    def statement(self, name: str, binding: Binding, more: Mapping[str, Expr] | None = None) -> Binding:
        """A statement of the step's op under a new name. Its comment goes where a part of it is left out: it may speak of that."""
        reading = Reading({**self.values, **(more or {})}, self.optional)
        expr = reading.read(binding.expr)
        return Binding(name, expr, PLACE, "" if reading.shorter else binding.comment, binding.above)


def composed(
    made: Sequence[Step], known: Mapping[str, OpSpec], names: Names, optional: Collection[str] = ()
) -> tuple[list[Composed], list[Binding]]:
    """The steps, and the forward formula that they make together.

    Raises:
        NotFused: where a step names an op, an argument or an attr that there is not, or leaves one out.
    """
    out: list[Composed] = []
    bindings: list[Binding] = []
    stopped = {s.result for s in made if s.stopped}
    for step in made:
        op = known.get(step.op)
        if op is None:
            raise NotFused(f"no spec declares `{step.op}`")
        if len(op.outputs) != 1 or op.update is not None:
            raise NotFused(f"`{op.name}` has several results, or updates buffers")
        values = {t.name: _tensor(t, step, stopped) for t in op.arguments} | {a.name: _attr(a, step) for a in op.attrs}
        for key in (*step.names, *step.constants):
            if key not in values:
                hint = nearest(key, values)
                raise NotFused(f"`{op.name}` has no argument `{key}`" + (f": {hint}" if hint else ""))
        result = op.outputs[0].name
        inner = {
            b.name: step.result if b.name == result else names.free(b.name, f"{step.op}_{b.name}") for b in op.forward
        }
        values |= {n: Name(new, PLACE) for n, new in inner.items()}
        one = Composed(step, op, values, frozenset(optional))
        out.append(one)
        bindings += [one.statement(inner[b.name], b) for b in op.forward]
    return out, bindings


def pruned(bindings: Sequence[Binding], wanted: Collection[str]) -> list[Binding]:
    """The statements that the wanted names come of."""
    needed = set(wanted)
    out = []
    for b in reversed(bindings):
        if b.name in needed:
            needed |= names_in(b.expr)
            out.append(b)
    return out[::-1]


def names_in(expr: Expr) -> set[str]:
    return {e.id for e in subexpressions(expr) if isinstance(e, Name)}


def _tensor(decl: TensorDecl, step: Step, stopped: Collection[str]) -> Expr | None:
    if decl.name in step.names:
        name = Name(step.names[decl.name], PLACE)
        return Call("stop_gradient", (name,), (), PLACE, PLACE) if name.id in stopped else name
    if decl.name in step.constants:
        return number(step.constants[decl.name])
    if not decl.optional:
        raise NotFused(f"the step `{step.result}` leaves out `{decl.name}` of `{step.op}`")
    return None if decl.default is None else replace(decl.default, span=_ABSENT)


def _attr(decl: AttrDecl, step: Step) -> Expr | None:
    if decl.name in step.names:
        return Name(step.names[decl.name], PLACE)
    if decl.name not in step.constants:
        if not decl.optional and not decl.all_axes:
            raise NotFused(f"the step `{step.result}` leaves out `{decl.name}` of `{step.op}`")
        return None
    value = step.constants[decl.name]
    kinds = {"enum": (str,), "bool": (bool,)}.get(decl.type, (int, float, tuple))
    if not isinstance(value, kinds) or (isinstance(value, bool) and decl.type != "bool"):
        raise NotFused(f"`{decl.name}` of `{step.op}` is no {decl.type}")
    if decl.type == "enum" and value not in decl.enum:
        raise NotFused(f"`{value}` is no choice of `{decl.name}` of `{step.op}`")
    return number(value)


def number(value: Any) -> Expr:
    """A constant as an expression."""
    if isinstance(value, tuple):
        return Call("tuple", tuple(number(v) for v in value), (), _GIVEN, _GIVEN)
    if isinstance(value, str):
        return Text(value, _GIVEN)
    if isinstance(value, bool):
        return Name(str(value).lower(), _GIVEN)
    if value < 0:
        return Unary("-", Number(-value, spelled(-value), _GIVEN), _GIVEN)
    return Number(value, spelled(value), _GIVEN)


def spelled(value: int | float) -> str:
    """A number as a formula has it: whole floats without their point."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    return repr(value)


class Reading:
    """Rewrites expressions: names replaced, conditions decided where they can be, neutral constants dropped."""

    def __init__(self, values: Mapping[str, Expr | None], optional: Collection[str] = ()) -> None:
        self.values, self.optional = values, optional
        self.shorter = False
        """Whether something was left out."""

    def read(self, expr: Expr) -> Expr:
        match expr:
            case Name(id, _):
                if id not in self.values:
                    return expr
                found = self.values[id]
                if found is None:
                    raise NotFused(f"`{id}` is absent, and a formula reads it")
                return found
            case Item(name, index, span):
                found = self.values.get(name.id)
                if isinstance(found, Name):
                    return Item(found, index, span)
                if isinstance(found, Call) and found.func == "tuple":
                    return found.args[index]
                return self.read(name)
            case IfElse(cond, then, other, span):
                decided = self.decide(cond)
                if isinstance(decided, bool):
                    self.shorter = True
                    return self.read(then if decided else other)
                return IfElse(decided, self.read(then), self.read(other), span)
            case Binary(op, left, right, span):
                whole = Binary(op, self.read(left), self.read(right), span)
                left_over = _dropped(whole)
                self.shorter = self.shorter or left_over is not whole
                return left_over
            case Call():
                words = tuple(Keyword(k.name, self.read(k.value), k.span) for k in expr.keywords)
                return replace(expr, args=tuple(self.read(a) for a in expr.args), keywords=words)
        changed: dict[str, Any] = {
            f.name: self.read(v) for f in fields(expr) if isinstance(v := getattr(expr, f.name), Expr)
        }
        return replace(expr, **changed) if changed else expr

    def decide(self, cond: Expr) -> bool | Expr:
        """The truth of a condition, or what is left of it."""
        match cond:
            case Logic(op, left, right, span):
                one, other = self.decide(left), self.decide(right)
                for this, that in ((one, other), (other, one)):
                    if isinstance(this, bool):
                        return that if this == (op == "and") else this
                assert not isinstance(one, bool) and not isinstance(other, bool)
                return Logic(op, one, other, span)
            case Unary("not", operand, span):
                inner = self.decide(operand)
                return not inner if isinstance(inner, bool) else Unary("not", inner, span)
            case IsNone(name, negated, span):
                found = self.values.get(name.id)
                if isinstance(found, Name) and found.id in self.optional:
                    return IsNone(found, negated, span)
                return (found is None or found.span is _ABSENT) != negated
            case Compare(op, left, right, span):
                one, other = self.read(left), self.read(right)
                if (told := computed(Compare(op, one, other, span))) is not None:
                    return bool(told)
                return Compare(op, one, other, span)
        found = self.read(cond)
        told = constant(found)
        return told if isinstance(told, bool) else found


def _dropped(expr: Binary) -> Expr:
    """Arithmetic with a constant that does nothing, where it stands for an attr or an absent tensor."""

    def is_number(part: Expr, value: float) -> bool:
        return isinstance(part, Number) and part.span in (_GIVEN, _ABSENT) and part.value == value

    neutral = {"+": 0, "-": 0, "*": 1, "/": 1, "**": 1}.get(expr.op, math.nan)
    if is_number(expr.right, neutral):
        return expr.left
    if expr.op in ("+", "*") and is_number(expr.left, neutral):
        return expr.right
    if expr.op == "*":
        for part in (expr.left, expr.right):
            if is_number(part, 0) and part.span is _ABSENT:
                return part
    return expr


_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv,
    "%": operator.mod, "**": operator.pow, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
    "==": operator.eq, "!=": operator.ne,
}  # fmt: skip


def computed(expr: Expr) -> Any:
    """The value of an expression of constants alone; None where it holds a name, or has no value."""
    match expr:
        case Binary(op, left, right, _) | Compare(op, left, right, _) if op in _ARITHMETIC:
            one, other = computed(left), computed(right)
            if one is None or other is None:
                return None
            try:
                return _ARITHMETIC[op](one, other)
            except (ArithmeticError, TypeError):
                return None
        case Logic(op, left, right, _):
            one, other = computed(left), computed(right)
            return None if one is None or other is None else (one and other if op == "and" else one or other)
        case Unary("-", operand, _):
            value = computed(operand)
            return None if value is None else -value
    return constant(expr)


# ---------------------------------------------------------------------------------------------- the proof


def confirm(op: OpSpec, known: Mapping[str, OpSpec], report: Report) -> None:
    """Reports where the op is not what its steps are: values and derivatives are compared at points, in float64."""
    if not op.fuses:
        return
    span = op.fuses[0].span
    apart = [s.op for s in steps(op) if s.op in known and not _is_plain(known[s.op])]
    if len(apart) > 1:
        report.error(span, "bad-step", f"`{op.name}` stands for {' and '.join(f'`{n}`' for n in apart)}, whose axes have names of their own",
                     "one step may have other axes than `...`")  # fmt: skip
        return
    try:
        whole = _whole(op, known)
    except NotFused as fault:
        report.error(span, "bad-step", f"`{op.name}` cannot stand for its steps: {fault}")
        return
    asked: dict[str, Atom] = {a.key: a for one in (op, whole) for a in atoms(one, Report())}
    found = 0
    for variant in variants(op, tuple(asked.values()), report):
        pair = [infer(one, variant, Report()) for one in (op, whole)]
        if pair[0] is None or pair[1] is None:
            faults = Report()
            infer(whole, variant, faults)
            report.error(span, "bad-step", f"the steps of `{op.name}` do not fit together",
                         "", [Note(d.text) for d in faults.errors[:1]])  # fmt: skip
            return
        try:
            point = _apart(op, variant, pair[0], pair[1])
        except NoSample:
            continue
        found += 1
        if point:
            report.error(span, "other-formula", f"`{op.name}` computes another thing than its steps",
                         "correct the formula or the steps; `pullback fuse` writes both",
                         [Note(t) for t in point])  # fmt: skip
            return
    if not found:
        report.error(
            span, "no-sample", f"`{op.name}` and its steps cannot be compared: no attrs and extents are allowed"
        )


def unsafe(op: OpSpec, variant: Variant, known: Mapping[str, OpSpec]) -> frozenset[str]:
    """Outputs and tensors whose formula, or gradient, is unsafe in float32 where it is what the steps make: there the chain of
    the steps overflows too."""
    whole = _whole(op, known)
    found = set[str]()
    for one in variants(whole, atoms(whole, Report()), Report()):
        if all(variant.get(key, value) == value for key, value in one.values):
            graph = infer(whole, one, Report())
            found |= set(check_safety(whole, one, autodiff.complete(graph), Report())) if graph is not None else set()
    return frozenset(found)


def _whole(op: OpSpec, known: Mapping[str, OpSpec]) -> OpSpec:
    """The op as its steps would have it, every gradient derived."""
    made = steps(op)
    own = {t.name for t in op.tensors} | {a.name for a in op.attrs}
    defaults = {t.name: t for t in op.arguments if t.optional}
    optional = {*defaults, *(a.name for a in op.attrs if a.optional)}
    results = {s.result for s in made}
    parts, bindings = composed(made, known, Names(own | results | {f"d{o.name}" for o in op.outputs}), optional)
    for part in parts:
        for decl in part.op.arguments:
            mine = defaults.get(part.step.names.get(decl.name, ""))
            if mine is None:
                continue
            if not decl.optional:
                raise NotFused(f"`{mine.name}` may be absent, `{decl.name}` of `{part.step.op}` may not")
            if decl.default is not None and (mine.default is None or mine.default.value != decl.default.value):
                raise NotFused(
                    f"absent, `{decl.name}` of `{part.step.op}` is {decl.default.text}, `{mine.name}` is not"
                )
    bindings = pruned(bindings, [o.name for o in op.outputs])
    entries = tuple(
        Entry(t.name, "auto", None, PLACE, PLACE)
        for t in op.inputs + op.params
        if "f32" in CLASSES.get(t.dtype, (t.dtype,))
    )
    backward = Backward(True, (), entries, None, PLACE) if entries else None
    return replace(op, forward=tuple(bindings), backward=backward)


def _apart(op: OpSpec, variant: Variant, own: Graph, whole: Graph) -> tuple[str, ...]:
    """A point where value or derivative differ, and both of them; nothing where they agree."""
    sampler = Sampler(op, variant, own, 20260401)
    for scale, stretch in ((1.0, False), (2.0, True), (0.3, False), (10.0, False), (1.0, True)):
        env = sampler.draw("normal", scale, stretch)
        one, other = (_values(graph, env) for graph in (own, whole))
        for name in one.keys() | other.keys():
            nothing = np.zeros(())
            mine, theirs = np.broadcast_arrays(one.get(name, nothing), other.get(name, nothing))
            wrong = _differ(mine, theirs)
            if wrong.any():
                at = tuple(int(i) for i in np.argwhere(wrong)[0])
                where = point_text(own, env, name, at)
                return (f"{name} at {where}:", f"{mine[at]:.12g}, of the steps {theirs[at]:.12g}")
    return ()


def _values(graph: Graph, env: Env) -> dict[str, Array]:
    """The outputs, and the derivatives for each tensor."""
    nodes = {o.name: o.node for o in graph.outputs if o.node is not None}
    grads = autodiff.derive(graph) if graph.gradients else {}
    found = {n: v for n, v in grads.items() if v is not None}
    try:
        values = evaluate([*nodes.values(), *found.values()], env)
    except OutOfRange:
        raise NoSample from None
    out = {n: full(values[v.serial], graph.tensors[n].axes, env) for n, v in nodes.items()}
    out |= {
        f"the derivative for `{n}`": np.broadcast_to(values[v.serial], env.tensors[n].shape) for n, v in found.items()
    }
    return {n: np.asarray(v, dtype=np.float64) for n, v in out.items()}


def _differ(mine: Array, theirs: Array) -> Array:
    """Where two values are not one; where the steps have none, the op may have any."""
    with np.errstate(all="ignore"):
        floor = 1e-12 * (1 + float(np.max(np.abs(theirs[np.isfinite(theirs)]), initial=0.0)))
        near = np.abs(mine - theirs) <= AGREE * np.maximum(np.abs(mine), np.abs(theirs)) + floor
    return np.asarray(~(near | (mine == theirs) | np.isnan(theirs)))
