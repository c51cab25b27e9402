"""The spec as data: what a YAML file says about an op, every part with its place in the file.

Takes nothing; the loader builds these frozen values, every later stage only reads them.

    - op: a_norm                            OpSpec(name="a_norm",
      inputs:  {x: [..., N]}                  inputs=(TensorDecl("x", axes=Axes((Dim("pack", ...), Dim("axis", ...)))),),
      attrs:   {eps: {default: 1e-6}}         attrs=(AttrDecl("eps", "float", default=Number(1e-06)),), ...)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from codegen.diagnostics import Span

PACK = "..."
"""The name of the anonymous pack of axes."""
COUNTER, FRESH = "step", "first"
"""Attrs that whoever keeps the state of an op gives: how many updates a tensor has seen, this one among them, and 1
where its state is new."""

FLOATS = ("f16", "bf16", "f32", "f64")
INTS = ("i32", "i64")
DTYPE_CLASSES = ("float", "int", "bool", "number", "integral", "any", "compute")
DTYPES = (*DTYPE_CLASSES, *FLOATS, *INTS)
CLASSES = {
    "float": FLOATS, "int": INTS, "number": FLOATS + INTS, "integral": (*INTS, "bool"), "any": (*FLOATS, *INTS, "bool"),
    "compute": FLOATS,
}  # fmt: skip
"""The dtypes that a class holds."""

# ---------------------------------------------------------------------------------------------- formulas


@dataclass(frozen=True)
class Number:
    """`0.5`, `3`, and the named numbers `inf`, `nan`, `pi`. `text` is what the author wrote."""

    value: int | float
    text: str
    span: Span


@dataclass(frozen=True)
class Text:
    """`"tanh"`: only ever compared with an enum attr."""

    value: str
    span: Span


@dataclass(frozen=True)
class Name:
    id: str
    span: Span


@dataclass(frozen=True)
class Dots:
    """`...` as an argument: the anonymous pack."""

    span: Span


@dataclass(frozen=True)
class Unary:
    """`-x`, `~m`, `not c` (the last over conditions only)."""

    op: str
    operand: Expr
    span: Span


@dataclass(frozen=True)
class Binary:
    """`+ - * / // % **` on numbers, `& |` on booleans."""

    op: str
    left: Expr
    right: Expr
    span: Span


@dataclass(frozen=True)
class Compare:
    """`< <= > >= == !=`. A chain `a < b < c` is `Logic("and", a < b, b < c)`."""

    op: str
    left: Expr
    right: Expr
    span: Span


@dataclass(frozen=True)
class Logic:
    """`and`, `or`: over conditions only."""

    op: str
    left: Expr
    right: Expr
    span: Span


@dataclass(frozen=True)
class IfElse:
    """`then if cond else other`: cond is a condition over attrs, sizes and presence."""

    cond: Expr
    then: Expr
    other: Expr
    span: Span


@dataclass(frozen=True)
class IsNone:
    """`x is None`, or `x is not None` when negated."""

    name: Name
    negated: bool
    span: Span


@dataclass(frozen=True)
class Item:
    """`pair[0]` of a tuple attr."""

    name: Name
    index: int
    span: Span


@dataclass(frozen=True)
class Keyword:
    name: str
    value: Expr
    span: Span


@dataclass(frozen=True)
class Call:
    """`func(args..., keyword=value)`; axis arguments stay `Name` or `Dots` until inference."""

    func: str
    args: tuple[Expr, ...]
    keywords: tuple[Keyword, ...]
    span: Span
    func_span: Span


Expr = Number | Text | Name | Dots | Unary | Binary | Compare | Logic | IfElse | IsNone | Item | Call


@dataclass(frozen=True)
class Binding:
    """`name = expr  # comment`. Whole-line comments above a statement stand in `above`, one string a line."""

    name: str
    expr: Expr
    span: Span
    comment: str = ""
    above: tuple[str, ...] = ()


Formula = tuple[Binding, ...]

# ---------------------------------------------------------------------------------------------- tensors and attrs


@dataclass(frozen=True)
class Factor:
    """One axis of a dim; `fixed` is the extent in `S=2`, else None."""

    name: str
    fixed: int | None
    span: Span


@dataclass(frozen=True)
class Dim:
    """One dim of a tensor. `kind` is `axis` (one factor), `pack` (`...` or `R...`: one factor, named `...` or `R`),
    or `group` (`(G K)`: row-major factors, slow first)."""

    kind: str
    factors: tuple[Factor, ...]
    span: Span


@dataclass(frozen=True)
class Axes:
    dims: tuple[Dim, ...]
    span: Span


@dataclass(frozen=True)
class AxesChoice:
    """`'[...] if COND else []'`."""

    cond: Expr
    then: Axes | AxesChoice
    other: Axes | AxesChoice
    span: Span


@dataclass(frozen=True)
class TensorDecl:
    """A tensor of the op. `role` is one of input, param, buffer, state, output."""

    name: str
    role: str
    axes: Axes | AxesChoice
    span: Span
    dtype: str = "float"
    broadcast: bool = False
    """Any dim may have extent 1 and `...` fewer axes; set by the loader too where all axes are exactly `[...]`."""
    scalar: bool = False
    optional: bool = False
    default: Number | None = None
    indexes: str | None = None
    or_else: str | int | None = None
    """An attr, or a number, whose value an index may have instead of a place."""
    init: Number | Name | None = None
    """What its elements are at first: a number, or an attr."""
    when: Expr | None = None
    arg: str = ""
    """The public name of the argument; the tensor's own name by default."""
    differentiable: bool = True
    """Written only on outputs. Whether a gradient exists is also a question of dtype."""

    @property
    def on_host(self) -> bool:
        """Whether it is state without axes: a number, which formulas of attrs update on the host."""
        return self.role == "state" and isinstance(self.axes, Axes) and not self.axes.dims


@dataclass(frozen=True)
class AttrDecl:
    """A number, truth value or choice. `type` is float, int, bool or enum. `default` is None where the caller must
    give it (and where `optional`, when it is absent by default)."""

    name: str
    type: str
    span: Span
    default: Expr | None = None
    enum: tuple[str, ...] = ()
    optional: bool = False
    arity: int | None = None
    """How many items a tuple attr has."""
    size: tuple[str, ...] = ()
    """Axes whose extents the attr gives."""
    axis: tuple[str, ...] = ()
    """Axes (or one pack) whose position in the tensors the attr gives."""
    all_axes: bool = False
    """`default: all` of an axis attr over a pack."""
    keeps: str | None = None
    arg: str = ""
    """The public name of the argument, where it is not the attr's own."""

    @property
    def public(self) -> str:
        return self.arg or self.name

    @property
    def computed(self) -> bool:
        """Whether its default is an expression over extents or other attrs: None stands for it."""
        match self.default:
            case (
                None
                | Number()
                | Text()
                | Unary("-", Number(), _)
                | Name("true" | "false", _)
                | Call("tuple", _, _, _, _)
            ):
                return False
        return True

    @property
    def nullable(self) -> bool:
        """Whether None may be given."""
        return self.optional or self.all_axes or self.computed


@dataclass(frozen=True)
class SizeDef:
    axis: str
    expr: Expr
    span: Span


@dataclass(frozen=True)
class Requirement:
    expr: Expr
    text: str
    span: Span


@dataclass(frozen=True)
class Domain:
    """The interval that a tensor's or attr's values are drawn from; infinite ends are open."""

    name: str
    low: float
    high: float
    span: Span


@dataclass(frozen=True)
class Entry:
    """One target of `update` or `backward`. `kind` is `formula`, or in `backward` also `auto`, `zero` and
    `not_differentiable` (then `expr` is None)."""

    name: str
    kind: str
    expr: Expr | None
    span: Span
    """Of the key."""
    value_span: Span
    comment: str = ""


@dataclass(frozen=True)
class Update:
    when: Expr | None
    let: Formula
    entries: tuple[Entry, ...]
    span: Span


@dataclass(frozen=True)
class Saved:
    name: str
    span: Span


@dataclass(frozen=True)
class Backward:
    """`differentiable` is False for `backward: not_differentiable`."""

    differentiable: bool
    let: Formula
    entries: tuple[Entry, ...]
    save: tuple[Saved, ...] | None
    span: Span


@dataclass(frozen=True)
class OpSpec:
    """One op as declared."""

    name: str
    span: Span
    file: str
    doc: str = ""
    inputs: tuple[TensorDecl, ...] = ()
    params: tuple[TensorDecl, ...] = ()
    buffers: tuple[TensorDecl, ...] = ()
    state: tuple[TensorDecl, ...] = ()
    attrs: tuple[AttrDecl, ...] = ()
    sizes: tuple[SizeDef, ...] = ()
    requires: tuple[Requirement, ...] = ()
    domain: tuple[Domain, ...] = ()
    signature: tuple[str, ...] = ()
    """Public order of inputs, params, buffers, state and attrs, by their names in the spec."""
    outputs: tuple[TensorDecl, ...] = ()
    forward: Formula = ()
    update: Update | None = None
    backward: Backward | None = None
    reference: str = ""
    fuses: Formula = ()
    """The ops that a fused op stands for: each statement is one step."""
    schedule: str = ""
    """`none` for an op that is only verified; else chosen by the generator."""

    @property
    def arguments(self) -> tuple[TensorDecl, ...]:
        """Every tensor that the op reads, in the spec's order."""
        return self.inputs + self.params + self.buffers + self.state

    @property
    def tensors(self) -> tuple[TensorDecl, ...]:
        return self.arguments + self.outputs

    @property
    def given(self) -> tuple[AttrDecl, ...]:
        """The attrs that a caller gives: of an op with state all but those that go with the state."""
        return tuple(a for a in self.attrs if not (self.state and a.name in (COUNTER, FRESH)))

    @property
    def hosted(self) -> tuple[AttrDecl, ...]:
        """State without axes: a number of each tensor, which the host keeps and formulas read like an attr."""
        return tuple(AttrDecl(t.name, "float", t.span) for t in self.state if t.on_host)

    def tensor(self, name: str) -> TensorDecl:
        return next(t for t in self.tensors if t.name == name)

    def attr(self, name: str) -> AttrDecl:
        return next(a for a in self.attrs if a.name == name)

    @property
    def family(self) -> str:
        """The stem of the file that declares the op."""
        return self.file.rsplit("/", 1)[-1].rsplit(".", 1)[0]


# ---------------------------------------------------------------------------------------------- spelling

_PRECEDENCE = {"or": 1, "and": 2, "not": 3, "|": 5, "^": 6, "&": 7, "<<": 8, ">>": 8, "+": 9, "-": 9, "*": 10, "/": 10,
               "//": 10, "%": 10}  # fmt: skip


def of_kernels(op: OpSpec, name: str) -> str:
    """What a kernel of the op has under a name, so that no tensor that travels may have it: given, returned or kept. Empty: nothing."""
    made = {f"d{t.name}": f"the gradient of `{t.name}`" for t in (*op.inputs, *op.params)}
    for end in ("_sum", "_parts"):
        base = name.removesuffix(end)
        if base != name and (base in made or f"d{base}" in made):
            return f"what `{base}` is summed in"
    return {**made, "kept": "a word of the kernels' own", "reduced": "a word of the kernels' own"}.get(name, "")


def class_name(op: str) -> str:
    """What the class of an op is called: `two_words` is `TwoWords`."""
    return "".join(w[:1].upper() + w[1:] for w in op.split("_"))


def spell_dims(dims: Sequence[Dim]) -> str:
    """Dims in the spec's spelling."""
    words = []
    for dim in dims:
        factors = [f.name + (f"={f.fixed}" if f.fixed is not None else "") for f in dim.factors]
        words.append(
            f"({' '.join(factors)})"
            if dim.kind == "group"
            else factors[0] + ("..." if dim.kind == "pack" and factors[0] != "..." else "")
        )
    return ", ".join(words)


def spell(expr: Expr) -> str:
    """The formula's text, with no more parentheses than its tree needs: `a - (b - c)`, `(-x) ** 2`."""
    return _spell(expr)[0]


def _spell(expr: Expr) -> tuple[str, int]:
    match expr:
        case Number(_, text, _):
            return text, 14
        case Text(value, _):
            return f'"{value}"', 14
        case Name(id, _):
            return id, 14
        case Dots():
            return "...", 14
        case Item(name, index, _):
            return f"{name.id}[{index}]", 14
        case IsNone(name, negated, _):
            return f"{name.id} is {'not ' if negated else ''}None", 4
        case Call():
            words = [spell(a) for a in expr.args] + [f"{k.name}={spell(k.value)}" for k in expr.keywords]
            return f"{expr.func}({', '.join(words)})", 14
        case Unary("not", operand, _):
            return f"not {_wrapped(operand, 3)}", 3
        case Unary(op, operand, _):
            return f"{op}{_wrapped(operand, 11)}", 11
        case Binary("**", left, right, _):
            return f"{_wrapped(left, 13)} ** {_wrapped(right, 11)}", 12
        case Binary(op, left, right, _) | Logic(op, left, right, _):
            level = _PRECEDENCE[op]
            return f"{_wrapped(left, level)} {op} {_wrapped(right, level + 1)}", level
        case Compare(op, left, right, _):
            return f"{_wrapped(left, 5)} {op} {_wrapped(right, 5)}", 4
        case IfElse(cond, then, other, _):
            return f"{_wrapped(then, 1)} if {_wrapped(cond, 1)} else {_wrapped(other, 0)}", 0


def _wrapped(expr: Expr, level: int) -> str:
    text, own = _spell(expr)
    return text if own >= level else f"({text})"
