"""The typed graph: interned expressions over named axes, and the ordered bindings beside it.

Takes operations on nodes (`Builder`), returns nodes that are identical when they mean the same text. A node knows its
operation, operands, static parameters and type, never a name or a place: names live in `Bound`, places in spans.

    b = Builder(axes)
    x = b.read(tensor)                      # float{..., N}
    rstd = b.op("rsqrt", b.reduce("mean", x * x, ("N",)))
    assert rstd.type == Type("float", frozenset({"..."}))

Operations
    const read attr size index uniform                                        leaves
    every elementwise row of the primitive table                              axes: the union of the operands' axes
    reduce(name, axes) dot(axes) scan(name, axis, reverse, exclusive)         axes: fewer, fewer, the same
    at(axes, filled) add_at(summed, axes) stack(axis) replace cast expand sum_to
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from codegen.diagnostics import Span
from codegen.spec import PACK, AttrDecl, Dim

KINDS = ("bool", "int", "float")


class TypeFault(Exception):
    """An operation that its operands' types do not allow. Inference adds the place."""

    def __init__(self, code: str, text: str, hint: str = "") -> None:
        super().__init__(text)
        self.code, self.text, self.hint = code, text, hint


@dataclass(frozen=True)
class Axis:
    """A named axis, a pack of adjacent axes (collapsed to one here), or one of fixed extent."""

    name: str
    pack: bool = False
    fixed: int | None = None


@dataclass(frozen=True)
class Type:
    """A value's kind (bool, int or float) and its set of axes. Order of dims belongs to storage alone."""

    kind: str
    axes: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return f"{self.kind}{{{', '.join(sorted(self.axes))}}}"


@dataclass(frozen=True)
class Tensor:
    """A tensor of one variant of an op: its storage dims and what its values are."""

    name: str
    role: str
    """input, param, buffer, state, output or cotangent."""
    dims: tuple[Dim, ...]
    kind: str
    dtype: str
    broadcast: bool = False
    scalar: bool = False
    indexes: str | None = None
    or_else: str | int | None = None
    differentiable: bool = False

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(f.name for d in self.dims for f in d.factors)

    @property
    def type(self) -> Type:
        return Type(self.kind, frozenset(self.axes))


@dataclass(frozen=True, eq=False)
class Node:
    """One value. Equal nodes are identical objects within a `Builder`."""

    op: str
    args: tuple[Node, ...]
    params: tuple[Any, ...]
    type: Type
    serial: int
    host: bool
    """Depends on attrs, sizes and numbers alone: computed on the host, in float64."""

    @property
    def axes(self) -> frozenset[str]:
        return self.type.axes

    @property
    def kind(self) -> str:
        return self.type.kind

    def __repr__(self) -> str:
        return f"<{spell(self)} : {self.type}>"


TypeRule = Callable[["Builder", tuple[Node, ...], tuple[Any, ...]], Type]


@dataclass
class Builder:
    """Interns nodes. `axes` are the axes of the op, `rules` the type rules by operation (the primitive table's)."""

    axes: dict[str, Axis]
    rules: dict[str, TypeRule]
    _table: dict[tuple[Any, ...], Node] = field(default_factory=dict)

    def node(self, op: str, args: Iterable[Node] = (), params: tuple[Any, ...] = ()) -> Node:
        args = tuple(args)
        key = (op, tuple(a.serial for a in args), tuple((type(p), repr(p)) for p in params))
        found = self._table.get(key)
        if found is None:
            host = all(a.host for a in args) and op in HOST_OPS or op in ("attr", "size")
            found = Node(op, args, params, self.rules[op](self, args, params), len(self._table), host)
            self._table[key] = found
        return found

    # Shorthands, so that rules read like formulas.

    def const(self, value: bool | int | float, axes: Iterable[str] = (), default: bool = False) -> Node:
        """A number; with `axes` the value of an absent tensor, `default` marking it neutral (see `rewrite`)."""
        return self.node("const", (), (value, tuple(sorted(axes)), default))

    def read(self, tensor: Tensor) -> Node:
        return self.node("read", (), (tensor.name, tensor.kind, tensor.axes))

    def attr(self, decl: AttrDecl, item: int | None = None) -> Node:
        return self.node("attr", (), (decl.name, decl.type, item))

    def size(self, axes: Iterable[str]) -> Node:
        return self.node("size", (), tuple(sorted(axes)))

    def index(self, axis: str) -> Node:
        return self.node("index", (), (axis,))

    def op(self, name: str, *args: Node | int | float) -> Node:
        return self.node(name, [self.const(a) if isinstance(a, (int, float)) else a for a in args])

    def reduce(self, name: str, x: Node, axes: Iterable[str], *extra: Node) -> Node:
        axes = tuple(sorted(axes))
        return self.node("reduce", (x, *extra), (name, axes)) if axes else x

    def sum(self, x: Node, axes: Iterable[str]) -> Node:
        """Sum over `axes`: an axis that x lacks counts as often as it is long."""
        axes = frozenset(axes)
        absent = axes - x.axes
        total = self.reduce("sum", x, axes & x.axes)
        return self.op("mul", total, self.size(absent)) if absent else total

    def dot(self, a: Node, b: Node, axes: Iterable[str]) -> Node:
        axes = frozenset(axes)
        if not axes & (a.axes & b.axes):
            return self.sum(self.op("mul", a, b), axes)
        inner = axes & (a.axes | b.axes)
        result = self.node("dot", (a, b), tuple(sorted(inner)))
        return self.op("mul", result, self.size(axes - inner)) if axes - inner else result

    def at(self, x: Node, index: dict[str, Node], fill: Node | None = None) -> Node:
        names = tuple(sorted(index))
        args = (x, *(index[n] for n in names), *((fill,) if fill is not None else ()))
        return self.node("at", args, (names, fill is not None))

    def add_at(self, g: Node, summed: Iterable[str], index: dict[str, Node]) -> Node:
        names = tuple(sorted(index))
        return self.node("add_at", (g, *(index[n] for n in names)), (tuple(sorted(summed)), names))

    def scan(self, name: str, args: Iterable[Node], axis: str, reverse: bool, exclusive: bool) -> Node:
        return self.node("scan", args, (name, axis, reverse, exclusive))

    def expand(self, x: Node, axes: Iterable[str]) -> Node:
        missing = frozenset(axes) - x.axes
        return self.node("expand", (x,), tuple(sorted(missing))) if missing else x


HOST_OPS: set[str] = {"const"}
"""Operations that the host can do; the primitive table adds its elementwise rows."""


@dataclass(frozen=True)
class Bound:
    """A statement: `name = node  # comment`, as the spec has it."""

    name: str
    node: Node
    span: Span
    comment: str = ""
    above: tuple[str, ...] = ()


@dataclass(frozen=True)
class Target:
    """What a formula is stored to: an output, an updated buffer, or the gradient of an input."""

    name: str
    node: Node | None
    span: Span
    kind: str = "formula"
    """For gradients also `auto`, `zero`, `not_differentiable` (then `node` is None)."""
    comment: str = ""


@dataclass(frozen=True)
class Graph:
    """One variant of one op, typed. `let` and `gradients` are the declared backward, empty where there is none."""

    builder: Builder
    tensors: dict[str, Tensor]
    """Arguments that are present, outputs, and cotangents (`d<output>`)."""
    bindings: tuple[Bound, ...]
    outputs: tuple[Target, ...]
    updates: tuple[Target, ...] = ()
    update_let: tuple[Bound, ...] = ()
    let: tuple[Bound, ...] = ()
    gradients: tuple[Target, ...] = ()
    sizes: tuple[tuple[str, Node], ...] = ()
    requires: tuple[tuple[str, Node], ...] = ()
    conditions: tuple[tuple[Node, bool], ...] = ()
    """What the variant takes for granted of attrs and sizes: comparisons and their truth."""

    @property
    def axes(self) -> dict[str, Axis]:
        return self.builder.axes

    @property
    def statements(self) -> tuple[Bound, ...]:
        """Every named value, forward before update before backward."""
        return (*self.bindings, *self.update_let, *self.let)

    def roots(self) -> list[Node]:
        targets = (*self.outputs, *self.updates, *self.gradients)
        return [t.node for t in targets if t.node is not None]

    def mapped(self, new: Mapping[int, Node]) -> Graph:
        """The graph with other nodes in all its statements and targets: `new` has each by the serial of the old one."""

        def bound(items: tuple[Bound, ...]) -> tuple[Bound, ...]:
            return tuple(replace(i, node=new[i.node.serial]) for i in items)

        def target(items: tuple[Target, ...]) -> tuple[Target, ...]:
            return tuple(replace(t, node=t.node and new[t.node.serial]) for t in items)

        return replace(
            self, bindings=bound(self.bindings), update_let=bound(self.update_let), let=bound(self.let),
            outputs=target(self.outputs), updates=target(self.updates), gradients=target(self.gradients),
        )  # fmt: skip


def walk(roots: Iterable[Node]) -> Iterator[Node]:
    """Every node below the roots once, operands before what uses them."""
    seen: set[int] = set()
    stack = [(n, False) for n in reversed(list(roots))]
    while stack:
        node, ready = stack.pop()
        if ready:
            yield node
        elif node.serial not in seen:
            seen.add(node.serial)
            stack.append((node, True))
            stack += [(a, False) for a in reversed(node.args)]


def check(graph: Graph) -> None:
    """Types every node again by its rule. Runs after every pass; a mismatch is a fault of Pullback, not of a spec."""
    for node in walk(graph.roots()):
        again = graph.builder.rules[node.op](graph.builder, node.args, node.params)
        assert again == node.type, f"{node!r} is typed {node.type}, its rule says {again}"


# ---------------------------------------------------------------------------------------------- printing

INFIX = {
    "or": ("|", 5), "xor": ("^", 6), "and": ("&", 7), "shl": ("<<", 8), "shr": (">>", 8), "add": ("+", 9), "sub": ("-", 9),
    "mul": ("*", 10), "div": ("/", 10), "floordiv": ("//", 10), "mod": ("%", 10), "lt": ("<", 4), "le": ("<=", 4),
    "gt": (">", 4), "ge": (">=", 4), "eq": ("==", 4), "ne": ("!=", 4),
}  # fmt: skip
"""The sign of each infix operation and how tightly it binds, as in Python."""
SIGN, POWER, ATOM = 11, 12, 14
"""The levels of a sign before an operand, of `**`, and of what needs no parentheses anywhere."""


def number(value: bool | int | float) -> str:
    """A number as the language writes it."""
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if value != value else "inf" if value > 0 else "-inf"
    return repr(value)


def spell(node: Node, names: dict[int, str] | None = None) -> str:
    """The node as a formula of the language; `names` maps the serials of bound nodes to their names."""
    return _spell(node, names or {})[0]


def _spell(node: Node, names: dict[int, str]) -> tuple[str, int]:
    if node.serial in names:
        return names[node.serial], ATOM
    words = [_spell(a, names) for a in node.args]
    if node.op in INFIX:
        sign, level = INFIX[node.op]
        left = words[0][0] if words[0][1] >= level + (level == 4) else f"({words[0][0]})"
        right = words[1][0] if words[1][1] > level else f"({words[1][0]})"
        return f"{left} {sign} {right}", level
    if node.op in ("neg", "not"):
        inner = words[0][0] if words[0][1] >= SIGN else f"({words[0][0]})"
        return ("-" if node.op == "neg" else "~") + inner, SIGN
    if node.op == "pow":
        left = words[0][0] if words[0][1] > POWER else f"({words[0][0]})"
        right = words[1][0] if words[1][1] >= SIGN else f"({words[1][0]})"
        return f"{left} ** {right}", POWER
    if node.op == "const":
        text = number(node.params[0])
        return text, SIGN if text.startswith("-") else ATOM
    return _call(node, [w[0] for w in words]), ATOM


def _call(node: Node, words: list[str]) -> str:
    p = node.params
    match node.op:
        case "read":
            return str(p[0])
        case "largest":
            return f"largest({p[0]})"
        case "attr":
            return p[0] if p[2] is None else f"{p[0]}[{p[2]}]"
        case "size" | "index":
            return f"{node.op}({', '.join(p)})"
        case "reduce":
            words, name = [words[0], *p[1], *([f"correction={words[1]}"] if len(words) > 1 else [])], p[0]
        case "dot" | "stack" | "expand":
            words, name = [*words, *p], node.op
        case "scan":
            flags = [f"{k}=True" for k, on in (("reverse", p[2]), ("exclusive", p[3])) if on]
            words, name = [*words, p[1], *flags], p[0]
        case "at":
            pairs = [f"{a}={w}" for a, w in zip(p[0], words[1:])]
            words, name = [words[0], *pairs, *([f"fill={words[-1]}"] if p[1] else [])], "at"
        case "add_at":
            words, name = [words[0], *p[0], *(f"{a}={w}" for a, w in zip(p[1], words[1:]))], "add_at"
        case "uniform":
            words, name = [words[0], *p[0], *([f"stream={p[1]}"] if p[1] else [])], "uniform"
        case "cast" | "sum_to":
            words, name = [words[0], p[0]], node.op
        case _:
            name = node.op
    return f"{name}({', '.join(words)})"


def pretty(bindings: Iterable[Bound], targets: Iterable[Target], before: Iterable[Bound] = ()) -> str:
    """A printable graph: one typed line a statement that a target needs. `before` are statements with names known already."""
    targets = list(targets)
    live = {n.serial for n in walk([t.node for t in targets if t.node is not None])}
    names: dict[int, str] = {}
    for bound in before:
        if bound.node.op not in ("const", "read", "attr"):
            names.setdefault(bound.node.serial, bound.name)
    rows = []
    for bound in bindings:
        if bound.node.serial in live and bound.node.serial not in names:
            rows.append((bound.name, spell(bound.node, names), str(bound.node.type)))
            if bound.node.op not in ("const", "read", "attr"):
                names[bound.node.serial] = bound.name
    for target in targets:
        if target.node is None:
            rows.append((target.name, target.kind, ""))
        elif names.get(target.node.serial) != target.name:
            rows.append((target.name, spell(target.node, names), str(target.node.type)))
    width = min(88, max((len(n) + len(t) for n, t, _ in rows), default=0))
    return "\n".join(f"{n} = {t}{' ' * (width - len(n) - len(t))}   {ty}".rstrip() for n, t, ty in rows)


__all__ = ["PACK", "Axis", "Bound", "Builder", "Graph", "Node", "Target", "Tensor", "Type", "TypeFault"]
