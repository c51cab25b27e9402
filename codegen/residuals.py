"""Residuals: what the forward keeps for the backward.

Takes a graph with its gradients, returns the values that are saved and why. An input, param or output that a gradient
reads is kept as it is; an intermediate with fewer axes than the op (a row statistic) is saved in the compute dtype; a
full-size one is computed again, unless a dot, scan, reduction or gather stands in its way; what the forward does not compute is
computed by the backward. `save:` overrides: it names what of the forward is kept.

    a norm -> x (an input), weight (a param), rstd (fewer axes: [...], compute dtype)
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from codegen.ir import Graph, Node, walk
from codegen.spec import OpSpec

_BARRIERS = ("dot", "scan", "reduce", "add_at")


@dataclass(frozen=True)
class Residual:
    """A value that the backward reads again."""

    name: str
    why: str
    axes: tuple[str, ...]
    dtype: str
    """A dtype, a class, or `compute`."""

    def bytes_per_element(self, item: int) -> int:
        """Bytes of one of its elements where tensors have `item` bytes: an intermediate is kept in f32 or f64."""
        return {"bool": 1, "i32": 4, "i64": 8, "int": 8, "compute": max(item, 4)}.get(self.dtype, item)


def residuals(op: OpSpec, graph: Graph) -> tuple[Residual, ...]:
    """The residuals of one variant, inputs first, in the spec's order."""
    return _Finder(op, graph).find()


class _Finder:
    def __init__(self, op: OpSpec, graph: Graph) -> None:
        self.graph = graph
        self.names = {b.node.serial: b.name for b in reversed(graph.bindings) if b.node.op not in ("const", "read")}
        backward = op.backward
        self.listed = None if backward is None or backward.save is None else {s.name for s in backward.save}
        self.whole = max((frozenset(t.axes) for t in graph.tensors.values()), key=len, default=frozenset())
        self.found: dict[str, Residual] = {}
        self.late = {
            n.serial for n in walk(graph.roots())
            if n.op == "read" and graph.tensors[n.params[0]].role == "cotangent"
        }  # fmt: skip
        self.forward = {n.serial for n in walk([t.node for t in graph.outputs if t.node is not None])}
        for node in walk(graph.roots()):
            if any(a.serial in self.late for a in node.args):
                self.late.add(node.serial)

    def find(self) -> tuple[Residual, ...]:
        seen: set[int] = set()
        pending = [t.node for t in self.graph.gradients if t.node is not None]
        while pending:
            node = pending.pop()
            if node.serial in seen:
                continue
            seen.add(node.serial)
            if not self._kept(node):
                pending += node.args
        order = [*self.graph.tensors, *(b.name for b in self.graph.bindings)]
        return tuple(sorted(self.found.values(), key=lambda r: order.index(r.name) if r.name in order else len(order)))

    def _kept(self, node: Node) -> bool:
        if node.op == "read":
            tensor = self.graph.tensors[node.params[0]]
            if tensor.role != "cotangent":
                word = {"output": "an output, free", "input": "an input, as it is", "param": "a param, as it is"}.get(
                    tensor.role, f"a {tensor.role}"
                )
                self._keep(tensor.name, word, tensor.axes, tensor.dtype)
            return True
        name = self.names.get(node.serial)
        if node.host or node.serial in self.late:
            return node.host
        kind = "compute" if node.kind == "float" else node.kind
        if name is not None and self.listed is not None and name in self.listed:
            return self._keep(name, "listed under `save`", node.axes, kind)
        if node.serial not in self.forward or (node.op == "reduce" and name is None):
            return False  # the backward's own, or without a name to be kept by: a second pass over what it reads anyway
        if name is not None and self.listed is not None:
            return False
        if name is None or not self._crosses(node):
            return self._barrier(node) and self._keep(name or node.op, "a reduction stands in its way", node.axes, kind)
        smaller = node.axes < self.whole
        why = "fewer axes than the op" if smaller else "a dot, scan, reduction or gather stands in its way"
        return self._keep(name, why, node.axes, kind)

    def _keep(self, name: str, why: str, axes: Collection[str], dtype: str) -> bool:
        ordered = tuple(a for a in self.graph.axes if a in axes)
        self.found.setdefault(name, Residual(name, why, ordered, dtype))
        return True

    def _barrier(self, node: Node) -> bool:
        return node.op in _BARRIERS or (
            node.op == "at" and any(n.op == "read" for i in node.args[1:] for n in walk([i]))
        )

    def _crosses(self, node: Node) -> bool:
        """Whether the node's own statement, down to the next named values, holds a barrier."""
        pending = [node]
        while pending:
            part = pending.pop()
            if self._barrier(part):
                return True
            pending += [a for a in part.args if a.serial not in self.names]
        return False
