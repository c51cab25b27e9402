"""Fused ops in a recorded graph: where one can stand for several nodes, and where one could be made.

Takes a graph as it is recorded (the mapping that `pullback fuse` reads as JSON) and classes of ops. No torch here.

    matches(graph, {"sum_gate": SumGate, ...})  -> (Replacement(nodes=("sum_1", "gate_1"), op=SumGate, ...),)
    candidates(graph, {"gate": Gate, ...})      -> (("sum_1", "gate_1"),)
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import groups
from .groups import Argument, Graph, Member, Node, Operand, Pattern
from .op import RuntimeOp
from .plan import Tensor


@dataclass(frozen=True)
class Replacement:
    """A fused op in the place of several nodes."""

    nodes: tuple[str, ...]
    """The nodes that go, in the order of the graph. The fused op can run where the last of them does."""
    op: type[RuntimeOp]
    attrs: Mapping[str, Any]
    """What the op is made with: `op(**attrs)`."""
    operands: Mapping[str, Operand]
    """By the op's inputs and params: a tensor of the graph, a number, or None."""
    outputs: Mapping[str, str]
    """By the op's outputs: the tensor of the graph that it makes. Other results of the nodes are no more."""


def matches(graph: Mapping[str, Any], ops: Mapping[str, type[RuntimeOp]]) -> tuple[Replacement, ...]:
    """Where fused ops can stand for nodes of a graph, no node in two.

    A fused op stands for nodes that are its steps, with its constants and choices, if its operands have the dtypes and axes
    that it takes, nothing else reads what it does not give, and gradients are stopped where its steps say so. Ops of more
    steps come first.

    Args:
        graph: a recorded graph.
        ops: the class of each op by its name: those with `fuses`, and those of their steps.

    Raises:
        groups.GraphFault: where the mapping is no graph, naming the place.
    """
    return tuple(_replacements(groups.read(graph), ops))


def candidates(graph: Mapping[str, Any], ops: Mapping[str, type[RuntimeOp]]) -> tuple[tuple[str, ...], ...]:
    """Groups of nodes that `pullback fuse` would try to make one op of, and for which no op stands yet.

    Args:
        graph: a recorded graph.
        ops: the class of each op by its name; nodes of other ops are in no group.

    Raises:
        groups.GraphFault: where the mapping is no graph, naming the place.
    """
    read = groups.read(graph)
    done = [r.nodes for r in _replacements(read, ops)]
    found = groups.groups(read, lambda node: _inside(ops, node))
    named = (tuple(read.nodes[k].name for k in nodes) for nodes in found)
    return tuple(nodes for nodes in named if not any(set(nodes) <= set(one) for one in done))


def installed() -> dict[str, type[RuntimeOp]]:
    """The ops of this package that say what they stand for. Found by a look at the text, so that no other is imported."""
    package = __package__.rpartition(".")[0]
    out: dict[str, type[RuntimeOp]] = {}
    for path in sorted((Path(__file__).parents[1] / "ops").glob("*.py")):
        if "\n    fuses = (" in path.read_text(encoding="utf-8"):
            module = importlib.import_module(f"{package}.ops.{path.stem}")
            own = (v for v in vars(module).values() if isinstance(v, type) and issubclass(v, RuntimeOp))
            out |= {v.name: v for v in own if v.__module__ == module.__name__}
    return out


def _replacements(graph: Graph, ops: Mapping[str, type[RuntimeOp]]) -> Iterable[Replacement]:
    patterns = [_pattern(op) for op in ops.values() if op.fuses]
    for o in groups.occurrences(graph, patterns, lambda node: _inside(ops, node)):
        op, names = ops[o.pattern.op], tuple(graph.nodes[k].name for k in o.nodes)
        attrs = {n: int(v) if op.kinds[n] == "int" and isinstance(v, float) else v for n, v in o.attrs.items()}
        yield Replacement(names, op, attrs, o.operands, o.outputs)


def _pattern(op: type[RuntimeOp]) -> Pattern:
    outputs = tuple(t.name for t in op.outputs)
    return Pattern(op.name, op.fuses, outputs, tuple(op.kinds), lambda attrs: member(op, attrs))


def _inside(ops: Mapping[str, type[RuntimeOp]], node: Node) -> Member | None:
    """What a node is to a group: one of an op that is not known, or has several results, ends it."""
    op = ops.get(node.op)
    single = op is not None and len(op.outputs) == 1 and list(node.outputs) == [op.outputs[0].name]
    return member(op, node.attrs) if op is not None and single else None


def member(op: type[RuntimeOp], attrs: Mapping[str, Any]) -> Member | None:
    """What an op with these attrs is to a group; None where it has a kernel beside which no other op has room."""
    if op.buffers or op.sliced or any(t.chosen or not t.differentiable for t in op.outputs):
        return None
    arguments, outputs = (
        [_argument(t, role) for t, role in tensors]
        for tensors in (
            [*((t, "input") for t in op.inputs), *((t, "param") for t in op.params)],
            [(t, "output") for t in op.outputs],
        )
    )
    known = [[a for a in side if a is not None] for side in (arguments, outputs)]
    if len(known[0]) < len(arguments) or len(known[1]) < len(outputs) or set(op.kinds) - set(attrs):
        return None
    attrs = {n: v for n, v in attrs.items() if n in op.kinds}
    axis, at, keeps = op(**attrs).axis_position() or ("", None, False)
    ranks = {a: len(v) if isinstance(v, tuple) else 1 for a, n in op.sized.items() if (v := attrs[n]) is not None}
    return Member(tuple(known[0]), tuple(known[1]), axis, at, keeps, ranks)


def _argument(tensor: Tensor, role: str) -> Argument | None:
    dims = groups.words(tensor.dims)
    if dims is None or tensor.indexes:
        return None
    stretches = bool(tensor.broadcast) and role != "output"
    return Argument(tensor.name, dims, tensor.dtypes, role, stretches, tensor.optional, tensor.scalar)
