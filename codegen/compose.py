"""Composition: a group of nodes of a recorded graph becomes the text of one op's spec.

Takes a graph, the places of the group's nodes and the specs of their ops, returns the YAML of an op that does what they do.
Its formulas are those of the specs, its gradients theirs by the chain rule, or `auto`. It is text: whoever uses it loads and
verifies it like any other.

    relu_1 = relu(x), mul_1 = mul(relu_1, w)   ->   - op: relu_mul
                                                      forward: |
                                                        relu_y = relu(x)
                                                        y = relu_y * other
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from codegen.chain import Values, chained, flows
from codegen.formula import RESERVED, identifier_fault
from codegen.fused import Composed, Names, NotFused, Reading, composed, computed, names_in, number, pruned
from codegen.groups import FLOATS, Argument, Graph, Member, Node, Step, axes_of, boundary, label, same
from codegen.spec import (
    PACK,
    AttrDecl,
    Binding,
    Call,
    Domain,
    Expr,
    Name,
    Number,
    OpSpec,
    TensorDecl,
    Text,
    Unary,
    class_name,
    spell,
)

_LONGEST = 48
"""Characters of a name that is made of those of ops."""
_LONGEST_REFERENCE = 400
"""Characters of a reference that is made of those of the steps."""
_TAKEN = ("call", "torch", "math", "triton", "tl")
"""Names that an emitted module uses itself."""


@dataclass(frozen=True)
class Composition:
    """An op that stands for a group: all of its spec but the name."""

    words: str
    """What it would be called."""
    body: str
    """The spec's lines below the first, each indented by two."""

    def text(self, name: str) -> str:
        return f"- op: {name}\n{self.body}"


def compose(
    graph: Graph,
    nodes: Sequence[int],
    specs: Mapping[str, OpSpec],
    members: Mapping[int, Member],
    derived: bool = False,
    kept: bool = False,
) -> Composition:
    """The op that does what these nodes do.

    Args:
        derived: whether its gradients are `auto`, instead of those of the specs, chained.
        kept: whether the result of the op that is not `...` alone is an output too, also where only the group reads it: its
            backward may need it, and cannot compute it again.

    Raises:
        NotFused: where a node says of its op what its spec does not.
    """
    return _Composer(graph, tuple(sorted(nodes)), specs, members, derived, kept).composition()


def op_name(words: str, taken: Collection[str]) -> str:
    """A name that no op has: the words, with a number where another op is called so."""
    classes = {class_name(n).lower() for n in taken}
    tries = (words, *(f"{words}_{k}" for k in range(2, len(taken) + 3)))
    return next(n for n in tries if class_name(n).lower() not in classes)


def _words(ops: Sequence[str]) -> str:
    """The names of the ops in a row; of a long row the first ones and how many more there are."""
    whole = "_".join(ops)
    if len(whole) <= _LONGEST:
        return whole
    for count in range(len(ops) - 1, 0, -1):
        found = f"{'_'.join(ops[:count])}_and_{len(ops) - count}_more"
        if len(found) <= _LONGEST:
            return found
    return f"{ops[0][:30]}_and_{len(ops) - 1}_more"


@dataclass
class _Tensor:
    """A tensor of the fused op."""

    name: str
    dims: tuple[str, ...]
    dtype: str
    param: bool = True
    """Whether every step takes it as a param."""
    init: Number | None = None
    """What a param begins with, by the first step whose spec says it."""
    domain: tuple[float, float] = (-math.inf, math.inf)


@dataclass
class _Attr:
    name: str
    text: str
    domain: tuple[float, float] | None = None


class _Composer:
    def __init__(
        self,
        graph: Graph,
        nodes: tuple[int, ...],
        specs: Mapping[str, OpSpec],
        members: Mapping[int, Member],
        derived: bool,
        kept: bool,
    ) -> None:
        self.derived = derived
        self.graph, self.nodes, self.specs, self.members = graph, nodes, specs, members
        self.outside, self.visible = boundary(graph, nodes)
        self.anchor = next((k for k in nodes if not members[k].plain), None)
        if kept:
            if self.anchor is None:
                raise NotFused("every result is computed again")
            self.visible = tuple(dict.fromkeys((*self.visible, *graph.nodes[self.anchor].outputs.values())))
        self.axes = {} if self.anchor is None else axes_of(graph, members, nodes)
        self.names = Names({*RESERVED, *_TAKEN})
        self.results: dict[str, str] = {}
        self.tensors: dict[str, _Tensor] = {}
        self.attrs: list[_Attr] = []
        self.steps: list[Step] = []

    def composition(self) -> Composition:
        self._name_tensors()
        for k in self.nodes:
            self.steps.append(self._step(k))
        parts, forward = composed(self.steps, self.specs, self.names)
        requires = self._requires(parts)
        entries, let = self._backward(parts, forward)
        outputs = [self.results[t] for t in self.visible]
        read = {n for e in entries.values() for n in _read(e)} | {n for b in let for n in names_in(b.expr)}
        forward = pruned(forward, [*outputs, *read])
        ops = [s.op for s in self.steps]
        lines = self._lines(forward, let, entries, requires, self._reference(parts))
        return Composition(_words(ops), "\n".join(lines) + "\n")

    # -------------------------------------------------------------------------------- names

    def _name_tensors(self) -> None:
        """Results that stay visible first, then what is read, then what is between: the first have their own names."""
        last = self.nodes[-1]
        made = {t: k for k in self.nodes for t in self.graph.nodes[k].outputs.values()}
        for tensor in sorted(self.visible, key=lambda t: (made[t] != last, made[t])):
            node = self.graph.nodes[made[tensor]]
            self.results[tensor] = self._free(output := next(iter(node.outputs)), f"{node.op}_{output}")
        for k in self.nodes:
            for argument in self.members[k].arguments:
                operand = self.graph.nodes[k].inputs.get(argument.name)
                if isinstance(operand, str) and operand in self.outside:
                    self._given(operand, argument, k)
        for k in self.nodes:
            node = self.graph.nodes[k]
            ((output, tensor),) = node.outputs.items()
            if tensor not in self.results:
                self.results[tensor] = self.names.free(output, f"{node.op}_{output}")

    def _given(self, tensor: str, argument: Argument, k: int) -> None:
        """One tensor that the group reads, and one way in which it does."""
        value = self.graph.tensors[tensor]
        if tensor not in self.tensors:
            wish = argument.name if value.role == "node" else identifier(tensor.rpartition(".")[2], argument.name)
            name = self._free(
                wish, identifier(tensor, wish) if value.role != "node" else f"{self.graph.nodes[k].op}_{wish}"
            )
            dtype = "float" if value.dtype in FLOATS else "bool" if value.dtype == "bool" else "int"
            self.tensors[tensor] = _Tensor(name, self._dims(tensor), dtype)
        found = self.tensors[tensor]
        found.param = found.param and argument.role == "param"
        op = self.specs[self.graph.nodes[k].op]
        found.init = found.init or _begins(next(t for t in op.arguments if t.name == argument.name))
        for d in op.domain:
            if d.name == argument.name:
                found.domain = (max(found.domain[0], d.low), min(found.domain[1], d.high))

    def _free(self, wish: str, other: str) -> str:
        """A tensor's name, and with it what is called after it: its gradient, what that is summed in."""
        return self.names.free(wish, other, lambda n: [p + n + s for p in ("", "d") for s in ("", "_sum", "_parts")])

    def _dims(self, tensor: str) -> tuple[str, ...]:
        """The dims in which a tensor is declared."""
        if self.axes is None:
            raise NotFused("its axes are not those of one op")
        if self.anchor is None:
            return ("...",)
        whole = max(self.members[self.anchor].tensors, key=lambda t: len(t.dims))
        there = self.axes[tensor]
        return tuple(w for w in whole.dims if label(w) in there)

    # -------------------------------------------------------------------------------- steps

    def _step(self, k: int) -> Step:
        node, op = self.graph.nodes[k], self.specs[self.graph.nodes[k].op]
        _check_node(node, op)
        names: dict[str, str] = {}
        constants: dict[str, Any] = {}
        for decl in op.arguments:
            operand = node.inputs.get(decl.name)
            if isinstance(operand, str):
                names[decl.name] = self.results.get(operand) or self.tensors[operand].name
            elif operand is not None:
                names[decl.name] = self._number(decl, operand, node)
            elif not decl.optional:
                raise NotFused(f"`{node.name}` leaves out `{decl.name}` of `{op.name}`")
        for attr in op.attrs:
            self._attr(attr, op, node, names, constants)
        (made,) = node.outputs.values()
        inside = set(self.nodes) & set(self.graph.readers[made])
        return Step(self.results[made], op.name, names, constants, bool(inside) and made in self.graph.stopped)

    def _number(self, decl: TensorDecl, value: int | float, node: Node) -> str:
        """A number in a tensor's place is an attr of the fused op: its value is the model's."""
        if not decl.scalar:
            raise NotFused(f"`{node.name}` has a number for `{decl.name}` of `{node.op}`, which takes a tensor")
        name = self.names.free(decl.name, f"{node.op}_{decl.name}")
        kind = "type: int, " if self._is_whole(value, node) else ""
        self.attrs.append(_Attr(name, f"{{{kind}default: {spell(number(value))}}}"))
        return name

    def _attr(self, attr: AttrDecl, op: OpSpec, node: Node, names: dict[str, str], constants: dict[str, Any]) -> None:
        """A choice is taken as the node has it; so is a number that nobody chose. Any other is an attr of the fused op."""
        usual = _usual(attr)
        value = node.attrs.get(attr.name, usual)
        if not _is_of(attr, value):
            raise NotFused(f"`{attr.name}` of `{node.name}` is {value!r}, which `{op.name}` does not take")
        if attr.keeps and not self._gives_reduced(attr.keeps):
            constants[attr.name] = bool(value)
        elif attr.axis or attr.size or attr.keeps:
            names[attr.name] = name = self.names.free(attr.name, f"{op.name}_{attr.name}")
            self.attrs.append(_Attr(name, _structural(attr, value)))
        elif value is None:
            if not attr.optional:
                raise NotFused(f"`{node.name}` does not tell `{attr.name}` of `{op.name}`")
        elif attr.type in ("enum", "bool") or (usual is not None and same(value, usual)):
            constants[attr.name] = value
        else:
            names[attr.name] = name = self.names.free(attr.name, f"{op.name}_{attr.name}")
            kind = "" if attr.type == "float" and not self._is_whole(value, node) else "type: int, "
            kind += "" if attr.arity is None else f"tuple: {attr.arity}, "
            self.attrs.append(_Attr(name, f"{{{kind}default: {_value(value)}}}", _widened(attr, op.domain, value)))

    def _is_whole(self, value: Any, node: Node) -> bool:
        """Whether a number stays an int: one beside ints alone."""
        (made,) = node.outputs.values()
        read = [t for t in (*node.inputs.values(), made) if isinstance(t, str)]
        whole = not isinstance(value, tuple) and float(value).is_integer()
        return whole and not any(self.graph.tensors[t].dtype in FLOATS for t in read)

    def _gives_reduced(self, axis: str) -> bool:
        """Whether a result that others read lacks an axis: then whoever calls the fused op says whether an extent of 1 stays.

        Raises:
            NotFused: where besides it is read beside what has the axis, which holds for extents that stay alone.
        """
        axes = self.axes or {}
        lacking = [t for t in self.visible if axis not in axes[t]]
        for k in self.nodes:
            node = self.graph.nodes[k]
            (made,) = node.outputs.values()
            inner = [t for t in node.inputs.values() if isinstance(t, str) and t in self.results]
            if lacking and axis in axes[made] and any(axis not in axes[t] for t in inner):
                raise NotFused("a result without the reduced axis is given, and read beside what has it")
        return bool(lacking)

    def _requires(self, parts: Sequence[Composed]) -> list[str]:
        out: dict[str, None] = {}
        for part in parts:
            for requirement in part.op.requires:
                expr = part.read(requirement.expr)
                if computed(expr) is None:
                    out[spell(expr)] = None
        return list(out)

    # -------------------------------------------------------------------------------- gradients

    def _backward(
        self, parts: Sequence[Composed], forward: Sequence[Binding]
    ) -> tuple[dict[str, Expr | str], list[Binding]]:
        """The entry of each float tensor, by its name, and the statements that they share."""
        named = {**{t: v.name for t, v in self.tensors.items()}, **self.results}
        axes = {name: self.axes[t] if self.axes else frozenset({PACK}) for t, name in named.items()}
        seeds = tuple(self.results[t] for t in self.visible if self.graph.tensors[t].dtype in FLOATS)
        floats = tuple(t.name for t in self.tensors.values() if t.dtype == "float")
        values = Values(axes, tuple(self.results.values()), seeds, floats)
        flow = flows(parts, values)
        if self.derived:
            return {n: "auto" if kind == "formula" else kind for n, kind in flow.items()}, []
        let, found = chained(parts, forward, values, self.names)
        return {n: found.get(n, "zero" if kind == "formula" else kind) for n, kind in flow.items()}, let

    # -------------------------------------------------------------------------------- text

    def _reference(self, parts: Sequence[Composed]) -> str:
        """The references of the steps, one in the other; nothing where a step has none, or it is too long to be read."""
        texts: dict[str, str] = {}
        results: dict[str, str] = {}
        for part in parts:
            if not part.op.reference:
                return ""
            known = {n: _python(v, texts) for n, v in part.values.items()}
            known |= {
                t.name: "None" for t in part.op.arguments if t.name not in {**part.step.names, **part.step.constants}
            }
            text = ast.unparse(_Replaced(known).visit(ast.parse(part.op.reference, mode="eval")))
            results[part.step.result] = text
            texts[part.step.result] = f"({text}).detach()" if part.step.stopped else text
            if len(text) > _LONGEST_REFERENCE:
                return ""
        given = [results[self.results[t]] for t in self._ordered()]
        whole = given[0] if len(given) == 1 else f"({', '.join(given)})"
        return "" if len(whole) > _LONGEST_REFERENCE or ": " in whole or " #" in whole else whole

    def _lines(
        self,
        forward: Sequence[Binding],
        let: Sequence[Binding],
        entries: Mapping[str, Expr | str],
        requires: Sequence[str],
        reference: str,
    ) -> list[str]:
        out = [f"  doc: {self._doc()}"]
        for key, wanted in (("inputs", False), ("params", True)):
            group = [
                f"{t.name}: {_declared(t.dims, t.dtype, t.init if wanted else None)}"
                for t in self.tensors.values()
                if t.param is wanted
            ]
            out += [f"  {key}: {{{', '.join(group)}}}"] if group else []
        out += ["  attrs:", *(f"    {a.name}: {a.text}" for a in self.attrs)] if self.attrs else []
        out += ["  requires: |", *(f"    {r}" for r in requires)] if requires else []
        named: list[_Tensor | _Attr] = [*self.tensors.values(), *self.attrs]
        domains = [(n.name, n.domain) for n in named if n.domain is not None]
        told = [
            f"    {n}: [{_end(low)}, {_end(high)}]"
            for n, (low, high) in domains
            if (low, high) != (-math.inf, math.inf)
        ]
        out += ["  domain:", *told] if told else []
        out.append(f"  outputs: {{{', '.join(self._output(t) for t in self._ordered())}}}")
        out += ["  forward: |", *_statements(forward)]
        if set(entries.values()) <= {"not_differentiable"}:
            out.append("  backward: not_differentiable")
        else:
            out.append("  backward:")
            out += ["    let: |", *("  " + line for line in _statements(let))] if let else []
            out += [f"    {n}: {e if isinstance(e, str) else spell(e)}" for n, e in entries.items()]
        out += [f"  reference: {reference}"] if reference else []
        return [*out, "  fuses: |", *(f"    {_spelled(s)}" for s in self.steps)]

    def _ordered(self) -> list[str]:
        return [t for k in self.nodes for t in self.graph.nodes[k].outputs.values() if t in self.visible]

    def _output(self, tensor: str) -> str:
        dtype = self.graph.tensors[tensor].dtype
        kind = "float" if dtype in FLOATS else "bool" if dtype == "bool" else "int"
        return f"{self.results[tensor]}: {_declared(self._dims(tensor), kind)}"

    def _doc(self) -> str:
        ops = [s.op for s in self.steps]
        return f"{', '.join(ops[:-1])} and {ops[-1]} in one kernel."


class _Replaced(ast.NodeTransformer):
    """Names replaced by the expressions that they stand for."""

    def __init__(self, known: Mapping[str, str]) -> None:
        self.known = known

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.parse(self.known[node.id], mode="eval").body if node.id in self.known else node


def _python(value: Expr | None, texts: Mapping[str, str]) -> str:
    """A value of a step as Python: the reference of a result in its place."""
    match value:
        case None:
            return "None"
        case Call("stop_gradient", (inner,), _, _, _):
            return _python(inner, texts)
        case Name(id, _) if id in ("true", "false"):
            return id.capitalize()
        case Name(id, _):
            return texts.get(id, id)
        case Call("tuple", args, _, _, _):
            return f"({', '.join(_python(a, texts) for a in args)},)"
        case Number() | Unary():
            return re.sub(r"inf|nan", lambda m: f'float("{m.group()}")', spell(value))
    return spell(value)


def _check_node(node: Node, op: OpSpec) -> None:
    """Raises NotFused where a node gives what its op does not take, or as it must not be."""
    for key in node.inputs:
        if all(t.name != key for t in op.arguments):
            raise NotFused(f"`{node.name}` gives `{key}`, which `{op.name}` does not take")
    for key in node.attrs:
        if all(a.name != key for a in op.attrs):
            raise NotFused(f"`{node.name}` has the attr `{key}`, which `{op.name}` does not")
    given = {a.name: v for a in op.attrs if (v := node.attrs.get(a.name, _usual(a))) is not None and _is_of(a, v)}
    for requirement in op.requires:
        if computed(Reading({n: number(v) for n, v in given.items()}).read(requirement.expr)) is False:
            raise NotFused(f"`{op.name}` requires {requirement.text}")


def _usual(attr: AttrDecl) -> Any:
    """The value of an attr that nobody gives; None where there is none, or it asks extents."""
    if isinstance(attr.default, Text):
        return attr.default.value
    return None if attr.default is None else computed(attr.default)


def _is_of(attr: AttrDecl, value: Any) -> bool:
    """Whether an attr may have this value, or none."""
    if value is None:
        return True
    if attr.type in ("enum", "bool"):
        return value in attr.enum if attr.enum else isinstance(value, bool)
    return all(
        isinstance(v, (int, float)) and not isinstance(v, bool)
        for v in (value if isinstance(value, tuple) else (value,))
    )


def _structural(attr: AttrDecl, value: Any) -> str:
    """An attr that places, sizes or keeps axes stays one, with what the node says as its default."""
    if attr.axis:
        words = [f"axis: {attr.axis[0]}"]
        usual = "all" if value is None and attr.all_axes else None if value is None else _value(value)
    elif attr.keeps:
        words, usual = [f"keeps: {attr.keeps}"], _value(bool(value))
    else:
        words = [f"size: {attr.size[0]}" if len(attr.size) == 1 else f"size: [{', '.join(attr.size)}]"]
        words += [f"tuple: {attr.arity}"] if attr.arity is not None else []
        usual = None if attr.default is None else spell(attr.default)
    return f"{{{', '.join([*words, *([] if usual is None else [f'default: {usual}'])])}}}"


def _widened(attr: AttrDecl, domains: Sequence[Domain], value: Any) -> tuple[float, float] | None:
    """The attr's own domain, and in it the value that the node has."""
    own = next((d for d in domains if d.name == attr.name), None)
    values = [v for v in (value if isinstance(value, tuple) else (value,)) if math.isfinite(v)]
    return None if own is None else (min(own.low, *values), max(own.high, *values)) if values else (own.low, own.high)


def _value(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(spell(number(v)) for v in value)}]"
    return spell(number(value))


def _end(value: float) -> str:
    return spell(number(value))


def identifier(text: str, instead: str) -> str:
    """A name of the graph as one of the language: letters, digits and `_`, the first a small letter."""
    word = re.sub(r"_+", "_", re.sub(r"[^A-Za-z0-9_]", "_", text)).strip("_")[:40].strip("_")
    word = word[:1].lower() + word[1:]
    return instead if not word or identifier_fault(word) or word in RESERVED else word


def _begins(decl: TensorDecl) -> Number | None:
    """What the elements of a param are at first: `init`, or the value for which an absent one stands."""
    return decl.init if isinstance(decl.init, Number) else decl.default


def _declared(dims: Sequence[str], dtype: str, init: Number | None = None) -> str:
    axes = f"[{', '.join(dims)}]"
    words = [*([] if dtype == "float" else [f"dtype: {dtype}"]), *([] if init is None else [f"init: {spell(init)}"])]
    return f"{{axes: {axes}, {', '.join(words)}}}" if words else axes


def _statements(bindings: Sequence[Binding]) -> list[str]:
    out = []
    for b in bindings:
        out += [f"    # {line}" for line in b.above]
        out.append(f"    {b.name} = {spell(b.expr)}" + (f"  # {b.comment}" if b.comment else ""))
    return out


def _spelled(step: Step) -> str:
    """A step as the key `fuses` has it."""
    given = [f"{k}={v}" for k, v in step.names.items()] + [f"{k}={spell(number(v))}" for k, v in step.constants.items()]
    call = f"{step.op}({', '.join(given)})"
    return f"{step.result} = {f'stop_gradient({call})' if step.stopped else call}"


def _read(entry: Expr | str) -> set[str]:
    return set() if isinstance(entry, str) else names_in(entry)
