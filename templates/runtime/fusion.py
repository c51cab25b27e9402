"""Fused ops in a recorded graph: where one can stand for several nodes, and where one could be made.

Takes a graph as it is recorded (the mapping that `pullback fuse` reads as JSON) and classes of ops. No torch here.

    matches(graph, {"sum_gate": SumGate, ...})  -> (Replacement(nodes=("sum_1", "gate_1"), op=SumGate, ...),)
    candidates(graph, {"gate": Gate, ...})      -> (("sum_1", "gate_1"),)
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from . import groups
from .groups import Argument, Graph, Member, Node, Operand, Pattern
from .op import RuntimeOp
from .plan import Tensor


@dataclass(frozen=True)
class Replacement:
    """A fused op in the place of several nodes."""

    nodes: tuple[str, ...]
    """The nodes that go, in the order of the graph; among them each `stop_gradient` that the op's own steps have. The fused op
    runs where the last of them stood."""
    op: type[RuntimeOp]
    attrs: Mapping[str, Any]
    """What the op is made with: `op(**attrs)`."""
    operands: Mapping[str, Operand]
    """By the op's inputs and params: a tensor of the graph, a number, or None."""
    outputs: Mapping[str, str]
    """By the op's outputs: the tensor of the graph that it makes. A gradient goes through it: a `stop_gradient` whose result others
    read stays in the graph. Other results of the nodes are no more."""


def matches(graph: Mapping[str, Any], ops: Mapping[str, type[RuntimeOp]]) -> tuple[Replacement, ...]:
    """Where fused ops can stand for nodes of a graph, no node in two.

    A fused op stands for nodes that are its steps, with its constants and choices, if its operands have the dtypes and axes
    that it takes, nothing else reads what it does not give, and gradients are stopped where its steps say so. Ops of more
    steps come first.

    It is for the caller to order what is left. Each fused op stands where the last of its nodes stood. A node before that place
    that reads one of its outputs, and what depends on that node in turn, must wait: at each point, of all nodes whose operands are
    there, the one that stands first runs next. In that order every read of a tensor that a node updates in place is on the same
    side of the update as it was recorded: where it would not be, nothing is replaced.

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
    named = (groups.recorded(read, nodes) for nodes in found)
    return tuple(nodes for nodes in named if not any(set(nodes) <= set(one) for one in done))


def installed() -> dict[str, type[RuntimeOp]]:
    """The ops of this package that stand for others, by name. No other op is imported."""
    package = __package__.rpartition(".")[0]
    out: dict[str, type[RuntimeOp]] = {}
    for name in importlib.import_module(f"{package}.ops").FUSED:
        module = importlib.import_module(f"{package}.ops.{name}")
        own = (v for v in vars(module).values() if isinstance(v, type) and issubclass(v, RuntimeOp))
        out |= {v.name: v for v in own if v.__module__ == module.__name__}
    return out


def _replacements(graph: Graph, ops: Mapping[str, type[RuntimeOp]]) -> Iterable[Replacement]:
    patterns = [_pattern(op) for op in ops.values() if op.fuses]
    for o in groups.occurrences(graph, patterns, lambda node: _inside(ops, node)):
        op, names = ops[o.pattern.op], groups.recorded(graph, o.nodes)
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
    if (
        op.buffers
        or op.sliced
        or any(t.chosen or t.when or not t.differentiable for t in op.outputs)
        or set(op.kinds) - set(attrs)
    ):
        return None
    given = {n: attrs[n] for n in op.kinds}
    arguments = [*(_argument(t, "input") for t in op.inputs), *(_argument(t, "param") for t in op.params)]
    outputs = [_argument(t, "output") for t in op.outputs]
    return groups.declared(
        arguments, outputs, op(**given).axis_position(), {axis: given[n] for axis, n in op.sized.items()}
    )


def _argument(t: Tensor, role: str) -> Argument | None:
    if t.indexes:
        return None
    return groups.argument(t.name, t.dims, t.dtypes, role, bool(t.broadcast), t.optional, t.scalar)
