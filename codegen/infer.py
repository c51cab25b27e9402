"""Inference: formulas of one variant become a typed graph.

Takes an `OpSpec` and a `Variant`, returns a `Graph` (or None, with diagnostics at the very names and operators).

    y = x * rsqrt(mean(x * x, N) + eps)    with x: [..., N]
    -> y = x * rsqrt(mean(x * x, N) + eps)   float{..., N}

One fault a statement is reported; a name whose statement failed is known and silent from then on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from codegen import rewrite
from codegen.diagnostics import Report, Span, nearest
from codegen.ir import Axis, Bound, Builder, Graph, Node, Target, Tensor, TypeFault, check
from codegen.kinds import mixed
from codegen.primitives import MONOIDS, RULES, SCANS, TABLE
from codegen.spec import (
    PACK,
    AttrDecl,
    Axes,
    AxesChoice,
    Backward,
    Binary,
    Binding,
    Call,
    Compare,
    Dim,
    Dots,
    Entry,
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
)  # fmt: skip
from codegen.variants import KINDS, NUMBER_KIND, Variant, atoms, has, holds, late

F32_MAX = 3.4028234663852886e38

_BINARY = {
    "+": "add",
    "-": "sub",
    "*": "mul",
    "/": "div",
    "//": "floordiv",
    "%": "mod",
    "**": "pow",
    "&": "and",
    "|": "or",
    "^": "xor",
    "<<": "shl",
    ">>": "shr",
}
_COMPARE = {"<": "lt", "<=": "le", ">": "gt", ">=": "ge", "==": "eq", "!=": "ne"}
_STRUCTURAL = (
    *MONOIDS, *SCANS, "dot", "at", "add_at", "stack", "index", "size", "uniform", "one_hot", "replace", "stop_gradient",
    "cast", "largest",
)  # fmt: skip
FUNCTIONS = tuple(sorted([row.name for row in TABLE.values() if row.listed] + list(_STRUCTURAL)))
"""Every name that may stand before `(`."""


class Fault(Exception):
    """A fault of a formula at a place. `absent` marks a use of a tensor that this variant has not."""

    def __init__(self, span: Span, code: str, text: str, hint: str = "", absent: bool = False) -> None:
        super().__init__(text)
        self.span, self.code, self.text, self.hint, self.absent = span, code, text, hint, absent


@dataclass(frozen=True)
class _Poisoned:
    """A name without a value: its statement failed (reported), or needs what this variant lacks (`fault`)."""

    fault: Fault | None


Scope = dict[str, "Node | _Poisoned"]


@dataclass
class Usage:
    """Which names each statement read, over all variants: what is never read is a fault of the spec."""

    reads: dict[str, set[str]] = field(default_factory=dict)
    spans: dict[str, Span] = field(default_factory=dict)
    roots: set[str] = field(default_factory=set)

    def unused(self) -> list[tuple[str, Span]]:
        live, pending = set(self.roots), list(self.roots)
        while pending:
            for name in self.reads.get(pending.pop(), ()):
                if name not in live:
                    live.add(name)
                    pending.append(name)
        return [(n, s) for n, s in self.spans.items() if n not in live]


def report_unused(usage: Usage, report: Report) -> None:
    """An unused statement is a formula that somebody meant to use."""
    for name, span in usage.unused():
        report.error(span, "unused-name", f"`{name}` is set and never used", "use it, or delete the statement")


def infer(op: OpSpec, variant: Variant, report: Report, usage: Usage | None = None) -> Graph | None:
    """Types every formula of the op in this variant.

    Returns:
        The graph, or None where a formula has a fault (each is in `report`).
    """
    before = len(report.errors)
    work = _Inference(op, variant, report, usage or Usage())
    graph = work.run()
    return None if graph is None or len(report.errors) > before else graph


def constant_of(expr: Expr, span: Span) -> bool | int | float | None:
    """The value of an expression of constants, in high precision and rounded once; None where it has none. Raises `Fault`."""
    work = _Inference(OpSpec("", span, ""), Variant(()), Report(), Usage())
    node = work.value(expr)
    return rewrite.constant(rewrite.fold(work.builder, [node])[node.serial])


def defaults_of(op: OpSpec, variant: Variant) -> dict[str, tuple[Node, ...]]:
    """The attrs whose defaults the host computes of earlier attrs: each with its value, or those of its items."""
    work = _Inference(op, variant, Report(), Usage())
    own = [a for a in op.attrs if a.computed and a.name not in late(op)]
    return {a.name: tuple(work.defaulted(a, k) for k in ([None] if a.arity is None else range(a.arity))) for a in own}


def kind_of(dtype: str, variant: Variant) -> str:
    """float, int or bool: what a dtype class holds in a variant."""
    if dtype in KINDS:
        return str(variant.get(NUMBER_KIND, KINDS[dtype][0]))
    return {"int": "int", "i32": "int", "i64": "int", "bool": "bool"}.get(dtype, "float")


class _Inference:
    def __init__(self, op: OpSpec, variant: Variant, report: Report, usage: Usage) -> None:
        self.op, self.variant, self.report, self.usage = op, variant, report, usage
        self.tensors: dict[str, Tensor] = {}
        self.scope: Scope = {}
        self.reading: set[str] = set()
        self.builder = Builder({}, RULES)
        self.decls = {a.name: a for a in op.attrs}
        self.late = late(op)

    # -------------------------------------------------------------------------------- the whole op

    def run(self) -> Graph | None:
        before = len(self.report.errors)
        if not self._declare():
            return None
        forward = self._bindings(self.op.forward)
        outputs = self._outputs()
        update_let, updates = self._updates()
        let, gradients = self._backward()
        sizes = [(s.axis, n) for s in self.op.sizes if (n := self._guarded(s.expr, f"size {s.axis}")) is not None]
        for axis, node in sizes:
            if node.kind != "int":
                span = next(s.expr.span for s in self.op.sizes if s.axis == axis)
                self.report.error(
                    span, "extent-not-int", f"the extent of `{axis}` is no int", "`//` divides whole numbers"
                )
        requires = [(r.text, n) for r in self.op.requires if (n := self._guarded(r.expr, "requires")) is not None]
        conditions = list(self._conditions())
        self._defaults()
        if len(self.report.errors) > before:
            return None
        graph = Graph(
            self.builder, self.tensors, tuple(forward), tuple(outputs), tuple(updates), tuple(update_let), tuple(let),
            tuple(gradients), tuple(sizes), tuple(requires), tuple(conditions),
        )  # fmt: skip
        graph = _folded(graph)
        check(graph)
        self._one_compute_dtype(graph)
        return graph

    def _one_compute_dtype(self, graph: Graph) -> None:
        target = None if self.op.schedule == "none" else mixed(self.op, self.variant, graph)
        if target is not None:
            kind = str(self.variant[NUMBER_KIND])
            text = f"`{target.name}` is {graph.tensors[target.name].kind} of {kind} tensors, which the formula also computes with as floats"
            hint = "a kernel computes in one dtype: give both an op of their own, or the tensors the class `float` or `int`"
            self.report.error(target.span, "mixed-kinds", text, hint)

    def _guarded(self, expr: Expr, reader: str) -> Node | None:
        self.reading = set()
        try:
            node = self.value(expr)
            if not node.host:
                raise Fault(
                    expr.span, "not-on-the-host", "`requires` and `sizes` are about attrs and sizes, not tensors"
                )
            return node
        except Fault as fault:
            self.report.error(fault.span, fault.code, fault.text, fault.hint)
            return None
        finally:
            self.usage.reads.setdefault(reader, set()).update(self.reading)
            self.usage.roots.add(reader)

    def _defaults(self) -> None:
        """Types what attrs are where nobody gives them."""
        for decl in self.op.attrs:
            for item in ([None] if decl.arity is None else range(decl.arity)) if decl.computed else ():
                try:
                    self.reading = set()
                    self.defaulted(decl, item)
                except Fault as fault:
                    self.report.error(fault.span, fault.code, fault.text, fault.hint)
                    break

    def defaulted(self, decl: AttrDecl, item: int | None = None) -> Node:
        """The default of an attr, or of an item of it, as an expression over extents and the attrs before it."""
        expr = decl.default
        assert expr is not None
        if item is not None and isinstance(expr, Name) and self.decls[expr.id].arity is not None:
            expr = Item(expr, item, expr.span)
        node = self.value(expr)
        if not node.host:
            text, hint = (
                f"the default of `{decl.name}` is no number of the host",
                "it may ask `size(A)` and the attrs before it",
            )
            raise Fault(expr.span, "not-on-the-host", text, hint)
        whole = decl.type == "int" or self.variant.get(NUMBER_KIND, "float") == "int"
        if node.kind == "bool" or node.kind == "float" and (decl.type == "int" or whole and decl.name in self.late):
            text = f"`{decl.name}` is {'int' if whole else 'float'} here, its default is {node.kind}"
            raise Fault(expr.span, "bad-default", text, "write `cast(..., int)`" if node.kind == "float" else "")
        if whole or node.kind == "float":
            return node
        return self._typed(lambda: self.builder.node("cast", (node,), ("float",)), expr.span)

    def _conditions(self) -> Iterator[tuple[Node, bool]]:
        for atom in atoms(self.op, Report()):
            if atom.kind == "condition" and atom.expr is not None:
                node = self._guarded(atom.expr, "condition")
                if node is not None:
                    yield node, bool(self.variant[atom.key])

    # -------------------------------------------------------------------------------- declarations

    def _declare(self) -> bool:
        before = len(self.report.errors)
        for decl in self.op.tensors:
            axes = self._chosen(decl.axes)
            if self._present(decl):
                self._declare_tensor(decl, axes)
            for dim in axes.dims:
                self._declare_axes(dim)
        for attr in self.op.attrs:
            for name in (*attr.size, *attr.axis, *((attr.keeps,) if attr.keeps else ())):
                if name not in self.builder.axes:
                    self.builder.axes[name] = Axis(name)
        for size in self.op.sizes:
            self.builder.axes.setdefault(size.axis, Axis(size.axis))
        self._check_axes()
        self._fill_scope()
        return len(self.report.errors) == before

    def _chosen(self, axes: Axes | AxesChoice) -> Axes:
        while isinstance(axes, AxesChoice):
            axes = axes.then if holds(axes.cond, self.variant) else axes.other
        return axes

    def _present(self, decl: TensorDecl) -> bool:
        if decl.optional and not self.variant[has(decl.name)]:
            return False
        return decl.when is None or holds(decl.when, self.variant)

    def _declare_tensor(self, decl: TensorDecl, axes: Axes) -> None:
        kind = kind_of(decl.dtype, self.variant)
        differentiable = kind == "float" and decl.differentiable and decl.role in ("input", "param", "output")
        tensor = Tensor(
            decl.name, decl.role, axes.dims, kind, decl.dtype, decl.broadcast, decl.scalar, decl.indexes, decl.or_else,
            differentiable,
        )  # fmt: skip
        self.tensors[decl.name] = tensor
        if decl.role == "output" and differentiable and self.variant.get(has(f"d{decl.name}"), True):
            name = f"d{decl.name}"
            self.tensors[name] = Tensor(name, "cotangent", axes.dims, kind, decl.dtype)

    def _declare_axes(self, dim: Dim) -> None:
        for factor in dim.factors:
            new = Axis(factor.name, dim.kind == "pack", factor.fixed)
            old = self.builder.axes.get(factor.name)
            if old is not None and old.pack != new.pack:
                self.report.error(factor.span, "axis-or-pack", f"`{factor.name}` is an axis here and a pack elsewhere",
                                  f"write `{factor.name}...` in both places, or in neither")  # fmt: skip
            elif old is not None and None not in (old.fixed, new.fixed) and old.fixed != new.fixed:
                self.report.error(
                    factor.span, "axis-extent", f"`{factor.name}` has extent {new.fixed} here and {old.fixed} elsewhere"
                )
            elif old is None or new.fixed is not None:
                self.builder.axes[factor.name] = new

    def _check_axes(self) -> None:
        """Every axis of an output, and of a grouped dim, must be determined by what the caller gives."""
        known = {a.name for a in self.builder.axes.values() if a.fixed is not None}
        known |= {s.axis for s in self.op.sizes} | {n for a in self.op.attrs for n in a.size}
        dims = [d for t in self.op.arguments for d in self._chosen(t.axes).dims]
        for dim in dims:
            if len(dim.factors) == 1:
                known.add(dim.factors[0].name)
        pending = [d for d in dims if len(d.factors) > 1]
        progress = True
        while progress:
            progress = False
            for dim in list(pending):
                unknown = [f for f in dim.factors if f.name not in known]
                if len(unknown) <= 1:
                    known |= {f.name for f in unknown}
                    pending.remove(dim)
                    progress = True
        for dim in pending:
            names = [f.name for f in dim.factors if f.name not in known]
            self.report.error(dim.span, "underdetermined", f"the extents of {' and '.join(f'`{n}`' for n in names)} cannot be told apart",
                              f"give one by an attr: `{{size: {names[0]}}}`")  # fmt: skip
        for decl in self.op.outputs:
            for dim in self._chosen(decl.axes).dims:
                for factor in dim.factors:
                    if factor.name not in known and dim not in pending:
                        self.report.error(factor.span, "undetermined-axis", f"nothing determines the extent of `{factor.name}`",
                                          nearest(factor.name, known) or "give it under `sizes:`")  # fmt: skip

    def _fill_scope(self) -> None:
        hosted = {a.name: a for a in self.op.hosted}
        for decl in self.op.arguments:
            if decl.name in hosted:
                self.scope[decl.name] = self.builder.attr(hosted[decl.name])
            elif decl.name in self.tensors:
                self.scope[decl.name] = self.builder.read(self.tensors[decl.name])
            elif decl.default is not None:
                kind = kind_of(decl.dtype, self.variant)
                value = float(decl.default.value) if kind == "float" else decl.default.value
                axes = [f.name for d in self._chosen(decl.axes).dims for f in d.factors]
                self.scope[decl.name] = self.builder.const(value, axes, default=True)
            else:
                fault = Fault(decl.span, "absent-tensor", f"`{decl.name}` may be absent where it is used here",
                              f"ask first: `... if {decl.name} is None else ...`, or give it a `default`", absent=True)  # fmt: skip
                self.scope[decl.name] = _Poisoned(fault)

    # -------------------------------------------------------------------------------- statements

    def _bindings(self, formula: Iterable[Binding]) -> list[Bound]:
        out = []
        for binding in formula:
            self.reading = set()
            self.usage.spans.setdefault(binding.name, binding.span)
            if binding.name in self.scope:
                self.report.error(
                    binding.span, "set-twice", f"`{binding.name}` is set twice", "give each value a name of its own"
                )
                continue
            try:
                node = self.value(binding.expr)
                self.scope[binding.name] = node
                out.append(Bound(binding.name, node, binding.span, binding.comment, binding.above))
            except Fault as fault:
                if not fault.absent:
                    self.report.error(fault.span, fault.code, fault.text, fault.hint)
                self.scope[binding.name] = _Poisoned(fault if fault.absent and fault.code else None)
            self.usage.reads.setdefault(binding.name, set()).update(self.reading)
        return out

    def _entry(self, entry: Entry) -> Node | None:
        assert entry.expr is not None
        self.reading = set()
        try:
            return self.value(entry.expr)
        except Fault as fault:
            self.report.error(fault.span, fault.code, fault.text, fault.hint)
            return None
        finally:
            self.usage.roots |= self.reading

    def _outputs(self) -> list[Target]:
        out = []
        for decl in self.op.outputs:
            self.usage.roots.add(decl.name)
            tensor, value = self.tensors.get(decl.name), self.scope.get(decl.name)
            if tensor is None or value is None:
                continue
            span = next((b.expr.span for b in self.op.forward if b.name == decl.name), decl.span)
            if isinstance(value, _Poisoned):
                if value.fault is not None:
                    self.report.error(value.fault.span, value.fault.code, value.fault.text, value.fault.hint)
                continue
            if self._fits(value, tensor, span, decl.name):
                out.append(Target(decl.name, value, span))
        return out

    def _fits(self, value: Node, tensor: Tensor, span: Span, name: str) -> bool:
        extra = sorted(value.axes - frozenset(tensor.axes))
        if extra:
            there = ", ".join(tensor.axes) or "none"
            self.report.error(span, "extra-axes", f"`{name}` has the axes {there}; its formula also has {', '.join(extra)}",
                              f"reduce it: `sum(..., {', '.join(extra)})`")  # fmt: skip
            return False
        if value.kind != tensor.kind and (value.kind, tensor.kind) != ("int", "float"):
            self.report.error(span, "wrong-kind", f"`{name}` is {tensor.kind}, its formula is {value.kind}",
                              "write `where(condition, 1, 0)`" if value.kind == "bool" else f"write `cast(..., {tensor.kind})`")  # fmt: skip
            return False
        return True

    def _updates(self) -> tuple[list[Bound], list[Target]]:
        update = self.op.update
        if update is None:
            return [], []
        let = self._bindings(update.let)
        if update.when is not None and not holds(update.when, self.variant):
            for entry in update.entries:
                self._dry(entry)
            return let, []
        out = []
        for entry in update.entries:
            if entry.name not in self.tensors:
                self._dry(entry)
                continue
            node = self._entry(entry)
            if node is not None and self._fits(node, self.tensors[entry.name], entry.value_span, entry.name):
                out.append(Target(entry.name, node, entry.span, comment=entry.comment))
        return let, out

    def _dry(self, entry: Entry) -> None:
        """An entry that this variant has not: its names count as read, its faults belong to other variants."""
        self.reading = set()
        try:
            if entry.expr is not None:
                self.value(entry.expr)
        except Fault:
            pass
        self.usage.roots |= self.reading

    def _backward(self) -> tuple[list[Bound], list[Target]]:
        backward = self.op.backward
        roles = {t.role for t in self.tensors.values() if t.differentiable or t.role == "cotangent"}
        if (
            backward is None
            or not backward.differentiable
            or not roles & {"input", "param"}
            or "cotangent" not in roles
        ):
            return [], []
        self._add_cotangents()
        self._add_residuals(backward)
        let = self._bindings(backward.let)
        out = []
        for entry in backward.entries:
            tensor = self.tensors.get(entry.name)
            if tensor is None or not tensor.differentiable:
                if entry.expr is not None:
                    self._dry(entry)
                continue
            if entry.kind != "formula":
                out.append(Target(entry.name, None, entry.value_span, entry.kind, entry.comment))
                continue
            node = self._entry(entry)
            if node is not None and self._fits(node, tensor, entry.value_span, entry.name):
                node = self.builder.node("sum_to", (node,), (entry.name,)) if tensor.broadcast else node
                out.append(Target(entry.name, node, entry.value_span, comment=entry.comment))
        return let, out

    def _add_residuals(self, backward: Backward) -> None:
        """An output that a gradient names is read again as it was stored, unless `save:` lists other values alone."""
        saved = None if backward.save is None else {s.name for s in backward.save}
        for decl in self.op.outputs:
            if (
                decl.name in self.tensors
                and isinstance(self.scope.get(decl.name), Node)
                and (saved is None or decl.name in saved)
            ):
                self.scope[decl.name] = self.builder.read(self.tensors[decl.name])

    def _add_cotangents(self) -> None:
        for decl in self.op.outputs:
            name = f"d{decl.name}"
            if name in self.tensors:
                self.scope[name] = self.builder.read(self.tensors[name])
            elif decl.name in self.tensors and self.tensors[decl.name].differentiable:
                self.scope[name] = self.builder.const(0.0, self.tensors[decl.name].axes, default=True)

    # -------------------------------------------------------------------------------- expressions

    def value(self, expr: Expr) -> Node:
        """The typed node of an expression; raises `Fault`."""
        match expr:
            case Number(value, text, span):
                if isinstance(value, float) and F32_MAX < abs(value) < math.inf:
                    raise Fault(span, "literal-range", f"{text} is beyond the range of float32")
                if isinstance(value, int) and abs(value) >= 2**63:
                    raise Fault(span, "literal-range", f"{text} is beyond the range of int64")
                return self.builder.const(value)
            case Name(id, span):
                return self._name(id, span)
            case Item(name, index, span):
                return self._item(name, index, span)
            case Unary("not", operand, span):
                return self._host_logic("not", [operand], span)
            case Unary(op, operand, span):
                return self._make({"-": "neg", "~": "not", "+": "neg"}[op], [operand], span)
            case Binary(op, left, right, span):
                return self._make(_BINARY[op], [left, right], span)
            case Compare(op, left, right, span):
                return self._make(_COMPARE[op], [left, right], span)
            case Logic(op, left, right, span):
                return self._host_logic(op, [left, right], span)
            case IfElse(cond, then, other, _):
                self._count_condition(cond)
                return self.value(then if holds(cond, self.variant) else other)
            case Call():
                return self._call(expr)
            case IsNone(name, _, span):
                raise Fault(
                    span,
                    "misplaced-condition",
                    f"`{name.id} is None` is a condition",
                    "write `a if ... is None else b`",
                )
            case Text(value, span):
                raise Fault(span, "misplaced-text", f'"{value}" is a text: compare it with an enum attr')
            case Dots(span):
                raise Fault(
                    span,
                    "misplaced-axis",
                    "`...` is a pack of axes, not a value",
                    "the number of its elements is `size(...)`",
                )
        raise AssertionError(expr)

    def _count_condition(self, cond: Expr) -> None:
        match cond:
            case Name(id, _):
                self.reading.add(id)

    def _make(self, op: str, operands: list[Expr], span: Span) -> Node:
        args = [self.value(o) for o in operands]
        return self._typed(lambda: self.builder.node(op, args), span)

    def _typed(self, build: Callable[[], Node], span: Span) -> Node:
        try:
            return build()
        except TypeFault as fault:
            raise Fault(span, fault.code, fault.text, fault.hint) from None

    def _host_logic(self, op: str, operands: list[Expr], span: Span) -> Node:
        args = [self.value(o) for o in operands]
        if not all(a.host for a in args):
            raise Fault(span, "logic-on-tensors", f"`{op}` over tensor elements",
                        "write `&`, `|`, `~` with parentheses: `(0 <= x) & (x <= 1)`")  # fmt: skip
        return self._typed(lambda: self.builder.node(op, args), span)

    def _name(self, id: str, span: Span) -> Node:
        self.reading.add(id)
        found = self.scope.get(id)
        if isinstance(found, Node):
            return found
        if isinstance(found, _Poisoned):
            if found.fault is None:
                raise Fault(span, "", "", absent=True)
            raise Fault(span, "absent-tensor", found.fault.text, found.fault.hint, absent=True)
        if id in self.decls:
            return self._attr(self.decls[id], span)
        if id in self.builder.axes:
            raise Fault(
                span,
                "axis-as-value",
                f"`{id}` is an axis, not a value",
                f"the extent is `size({id})`, the coordinate `index({id})`",
            )
        raise Fault(span, "unknown-name", f"`{id}` is not defined here", self._hint(id))

    def _hint(self, id: str) -> str:
        later = [b for b in self._all_bindings() if b.name == id]
        if later:
            return f"it is set in line {later[0].span.line}: a name is used below the line that sets it"
        if id in FUNCTIONS:
            return f"`{id}` is a function: `{id}(...)`"
        if id.startswith("d") and any(o.name == id[1:] for o in self.op.outputs):
            return "a cotangent exists in `backward` alone, and only of a differentiable float output"
        if id.startswith("d") and len(id) <= 3:
            return f"the cotangents are {', '.join(f'`d{o.name}`' for o in self.op.outputs)}"
        return nearest(id, [*self.scope, *self.decls])

    def _all_bindings(self) -> list[Binding]:
        out = list(self.op.forward)
        out += list(self.op.update.let) if self.op.update else []
        return out + (list(self.op.backward.let) if self.op.backward else [])

    def _attr(self, decl: AttrDecl, span: Span) -> Node:
        if decl.type == "enum":
            raise Fault(span, "enum-as-value", f"`{decl.name}` is a choice, not a number",
                        f'ask: `... if {decl.name} == "{decl.enum[0]}" else ...`')  # fmt: skip
        if decl.arity is not None:
            raise Fault(span, "tuple-as-value", f"`{decl.name}` is a tuple of {decl.arity}", f"write `{decl.name}[0]`")
        if decl.type == "bool":
            raise Fault(
                span, "flag-as-value", f"`{decl.name}` is a flag, not a number", f"ask: `... if {decl.name} else ...`"
            )
        if decl.name in self.late and not self.variant.get(has(decl.name), True):
            return self.defaulted(decl)
        if decl.optional and not self.variant.get(has(decl.name), True):
            text, hint = f"`{decl.name}` may be None here", f"ask first: `... if {decl.name} is None else ...`"
            raise Fault(span, "absent-attr", text, hint, absent=True)
        if decl.type == "float" and self.variant.get(NUMBER_KIND, "float") == "int":
            return self.builder.attr(
                replace(decl, type="int")
            )  # weak, like a literal; the host checks that it is whole
        return self.builder.attr(decl)

    def _item(self, name: Name, index: int, span: Span) -> Node:
        decl = self.decls.get(name.id)
        if decl is None or decl.arity is None:
            raise Fault(
                span,
                "not-a-tuple",
                f"`{name.id}` is not a tuple attr",
                nearest(name.id, [n for n, d in self.decls.items() if d.arity]),
            )
        if not 0 <= index < decl.arity:
            raise Fault(span, "tuple-index", f"`{name.id}` has {decl.arity} items, counted from 0")
        if name.id in self.late and not self.variant.get(has(name.id), True):
            return self.defaulted(decl, index)
        return self.builder.attr(decl, index)

    # -------------------------------------------------------------------------------- calls

    def _call(self, call: Call) -> Node:
        func = call.func
        if func in TABLE and TABLE[func].listed:
            return self._elementwise(call)
        if func in MONOIDS:
            return self._reduction(call)
        if func in SCANS:
            return self._scan(call)
        if func not in _STRUCTURAL:
            raise Fault(call.func_span, "unknown-function", f"`{func}` is not a function", nearest(func, FUNCTIONS))
        node: Node = getattr(self, f"_call_{func}")(call)
        return node

    def _elementwise(self, call: Call) -> Node:
        row = TABLE[call.func]
        self._keywords(call)
        if len(call.args) != row.arity:
            raise Fault(call.span, "wrong-arity", f"`{call.func}` takes {_count(row.arity, 'operand')}, not {len(call.args)}",
                        f"`{row.doc}`" if row.doc else "")  # fmt: skip
        return self._make(call.func, list(call.args), call.span)

    def _keywords(self, call: Call, *allowed: str) -> dict[str, Expr]:
        out: dict[str, Expr] = {}
        for keyword in call.keywords:
            if keyword.name not in allowed:
                raise Fault(
                    keyword.span,
                    "unknown-keyword",
                    f"`{call.func}` has no keyword `{keyword.name}`",
                    nearest(keyword.name, allowed),
                )
            if keyword.name in out:
                raise Fault(keyword.span, "keyword-twice", f"`{keyword.name}` is given twice")
            out[keyword.name] = keyword.value
        return out

    def _axes_of(self, call: Call, exprs: Iterable[Expr]) -> tuple[str, ...]:
        out: list[str] = []
        for expr in exprs:
            name = PACK if isinstance(expr, Dots) else expr.id if isinstance(expr, Name) else None
            if name is None:
                other = {"max": "of two values: `maximum(a, b)`", "min": "of two values: `minimum(a, b)`"}
                raise Fault(expr.span, "not-an-axis", f"`{call.func}` wants axes here",
                            other.get(call.func, "name them: `sum(x, N)`, `sum(x, ...)`"))  # fmt: skip
            if name not in self.builder.axes:
                hint = nearest(name, self.builder.axes) or f"the op's axes: {', '.join(self.builder.axes)}"
                raise Fault(expr.span, "unknown-axis", f"`{name}` is not an axis of this op", hint)
            if name in out:
                raise Fault(expr.span, "axis-twice", f"`{name}` is listed twice")
            out.append(name)
        return tuple(out)

    def _operands(self, call: Call, count: int) -> list[Node]:
        if len(call.args) < count:
            raise Fault(
                call.span,
                "wrong-arity",
                f"`{call.func}` takes {_count(count, 'operand')} and axes, not {len(call.args)}",
            )
        return [self.value(a) for a in call.args[:count]]

    def _some_axes(self, call: Call, exprs: tuple[Expr, ...]) -> tuple[str, ...]:
        if not exprs:
            hint = {"max": "of two values: `maximum(a, b)`", "min": "of two values: `minimum(a, b)`"}
            raise Fault(
                call.span, "no-axes", f"`{call.func}` without axes", hint.get(call.func, f"`{call.func}(x, N)`")
            )
        return self._axes_of(call, exprs)

    def _reduction(self, call: Call) -> Node:
        given = self._keywords(call, *(("correction",) if call.func == "var" else ()))
        (x,) = self._operands(call, 1)
        axes = self._some_axes(call, call.args[1:])
        extra = (
            [self.value(given["correction"])]
            if "correction" in given
            else [self.builder.const(1)] if call.func == "var" else []
        )
        if call.func == "prod":  # one axis after the other: its adjoint scans each
            for axis in axes[:-1]:
                x = self._typed(partial(self.builder.reduce, "prod", x, (axis,)), call.span)
            axes = axes[-1:]
        return self._typed(lambda: self.builder.reduce(call.func, x, axes, *extra), call.span)

    def _scan(self, call: Call) -> Node:
        keywords = ("reverse",) if call.func == "linear" else ("reverse", "exclusive")
        given = self._keywords(call, *keywords)
        count = 2 if call.func == "linear" else 1
        operands = self._operands(call, count)
        axes = self._some_axes(call, call.args[count:])
        if len(axes) != 1:
            raise Fault(call.span, "wrong-arity", f"`{call.func}` runs along one axis")
        reverse, exclusive = (self._flag(call, given[k]) if k in given else False for k in ("reverse", "exclusive"))
        return self._typed(lambda: self.builder.scan(call.func, operands, axes[0], reverse, exclusive), call.span)

    def _flag(self, call: Call, expr: Expr) -> bool:
        if isinstance(expr, Name) and expr.id in ("True", "False"):
            return expr.id == "True"
        raise Fault(expr.span, "not-a-flag", f"a keyword of `{call.func}` is True or False")

    def _call_dot(self, call: Call) -> Node:
        self._keywords(call)
        a, b = self._operands(call, 2)
        axes = self._some_axes(call, call.args[2:])
        return self._typed(lambda: self.builder.node("dot", (a, b), tuple(sorted(axes))), call.span)

    def _index_map(self, call: Call, *others: str) -> tuple[dict[str, Node], dict[str, Expr]]:
        index: dict[str, Node] = {}
        rest: dict[str, Expr] = {}
        for keyword in call.keywords:
            if keyword.name in others:
                rest[keyword.name] = keyword.value
            elif keyword.name in index:
                raise Fault(keyword.span, "keyword-twice", f"`{keyword.name}` is given twice")
            elif keyword.name not in self.builder.axes:
                raise Fault(
                    keyword.span,
                    "unknown-axis",
                    f"`{keyword.name}` is not an axis of this op",
                    nearest(keyword.name, self.builder.axes),
                )
            else:
                index[keyword.name] = self.value(keyword.value)
        if not index:
            raise Fault(call.span, "no-axes", f"`{call.func}` without an index", f"`{call.func}(x, N=i)`")
        return index, rest

    def _call_at(self, call: Call) -> Node:
        (x,) = self._operands(call, 1)
        if len(call.args) > 1:
            raise Fault(
                call.args[1].span, "wrong-arity", "`at` takes one value and an index by keyword", "`at(x, N=i)`"
            )
        index, rest = self._index_map(call, "fill")
        fill = self.value(rest["fill"]) if "fill" in rest else None
        built = self._typed(lambda: self.builder.at(x, index, fill), call.span)
        if fill is None:
            for axis, i in index.items():
                self._bounded(call, x, axis, i)
        if x.op == "const" and x.params[1]:  # an absent tensor is the same everywhere
            axes = (x.axes - frozenset(index)).union(*(i.axes for i in index.values()))
            return self.builder.const(x.params[0], axes, x.params[2])
        return built

    def _bounded(self, call: Call, x: Node, axis: str, i: Node) -> None:
        """Without `fill` an index from a tensor needs the contract `indexes:`."""
        reads = {n.params[0] for n in _reads(i)}
        for name in reads:
            decl = next((t for t in self.op.arguments if t.name == name), None)
            if decl is not None and decl.indexes is None:
                raise Fault(call.span, "unbounded-index", f"nothing bounds `{name}`, an index along `{axis}`",
                            f"declare it `{{indexes: {axis}}}`, or give `fill=`")  # fmt: skip
        extent = self.builder.axes[axis].fixed
        constant = rewrite.constant(i)
        if extent is not None and isinstance(constant, int) and not 0 <= constant < extent:
            raise Fault(
                call.span,
                "index-range",
                f"index {constant} along `{axis}`, which has extent {extent}",
                "negative indices never wrap",
            )

    def _call_add_at(self, call: Call) -> Node:
        (g,) = self._operands(call, 1)
        axes = self._axes_of(call, call.args[1:])
        index, _ = self._index_map(call)
        return self._typed(lambda: self.builder.add_at(g, axes, index), call.span)

    def _call_stack(self, call: Call) -> Node:
        self._keywords(call)
        if len(call.args) < 2:
            raise Fault(
                call.span, "wrong-arity", "`stack` takes values and an axis of fixed extent", "`stack(a, b, S)`"
            )
        (axis,) = self._axes_of(call, call.args[-1:])
        values = [self.value(a) for a in call.args[:-1]]
        return self._typed(lambda: self.builder.node("stack", values, (axis,)), call.span)

    def _call_index(self, call: Call) -> Node:
        self._keywords(call)
        axes = self._some_axes(call, call.args)
        if len(axes) != 1:
            raise Fault(call.span, "wrong-arity", "`index` takes one axis")
        return self.builder.index(axes[0])

    def _call_size(self, call: Call) -> Node:
        self._keywords(call)
        return self.builder.size(self._some_axes(call, call.args))

    def _call_uniform(self, call: Call) -> Node:
        given = self._keywords(call, "stream")
        (seed,) = self._operands(call, 1)
        axes = self._some_axes(call, call.args[1:])
        stream = given.get("stream")
        if stream is not None and not (isinstance(stream, Number) and isinstance(stream.value, int)):
            raise Fault(stream.span, "not-a-literal", "`stream` is a whole number")
        number = stream.value if isinstance(stream, Number) else 0
        return self._typed(lambda: self.builder.node("uniform", (seed,), (axes, number)), call.span)

    def _call_one_hot(self, call: Call) -> Node:
        self._keywords(call)
        (i,) = self._operands(call, 1)
        axes = self._some_axes(call, call.args[1:])
        if len(axes) != 1 or i.kind != "int":
            raise Fault(call.span, "wrong-arity", "`one_hot` takes an int index and one axis")
        return self.builder.op("where", self.builder.op("eq", self.builder.index(axes[0]), i), 1, 0)

    def _call_replace(self, call: Call) -> Node:
        self._keywords(call)
        x, v = self._exactly(call, 2)
        return self._typed(lambda: self.builder.node("replace", (x, v)), call.span)

    def _call_stop_gradient(self, call: Call) -> Node:
        self._keywords(call)
        (v,) = self._exactly(call, 1)
        return self.builder.node("stop_gradient", (v,))

    def _call_cast(self, call: Call) -> Node:
        self._keywords(call)
        kind = call.args[1] if len(call.args) == 2 else None
        if not isinstance(kind, Name) or kind.id not in ("int", "float", "bool"):
            raise Fault(call.span, "wrong-arity", "`cast` takes a value and int, float or bool", "`cast(x, int)`")
        return self.builder.node("cast", (self.value(call.args[0]),), (kind.id,))

    def _call_largest(self, call: Call) -> Node:
        self._keywords(call)
        (x,) = self._exactly(call, 1)
        tensor = self.tensors.get(str(x.params[0])) if x.op == "read" else None
        if tensor is None or tensor.kind != "float" or tensor.scalar:
            raise Fault(call.args[0].span, "not-a-tensor", "`largest` takes a float tensor that is always there")
        return self.builder.node("largest", (), (tensor.name,))

    def _exactly(self, call: Call, count: int) -> list[Node]:
        if len(call.args) != count:
            raise Fault(
                call.span, "wrong-arity", f"`{call.func}` takes {_count(count, 'operand')}, not {len(call.args)}"
            )
        return self._operands(call, count)


def _reads(node: Node) -> list[Node]:
    """The tensors that an index is read from, not those that index further inside."""
    if node.op == "read":
        return [node]
    if node.op in ("where", "reduce", "at", "cast", "clamp", "minimum", "mod"):
        return []  # bounded by its condition or construction; the evaluator enforces it
    return [r for a in node.args for r in _reads(a)]


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" + ("" if n == 1 else "s")


def _folded(graph: Graph) -> Graph:
    """Constants folded and absent tensors dropped, in every statement alike."""
    others = [n for _, n in (*graph.sizes, *graph.requires)]
    new = rewrite.fold(graph.builder, [s.node for s in graph.statements] + graph.roots() + others)
    return replace(
        graph.mapped(new), sizes=tuple((a, new[n.serial]) for a, n in graph.sizes),
        requires=tuple((t, new[n.serial]) for t, n in graph.requires),
    )  # fmt: skip
