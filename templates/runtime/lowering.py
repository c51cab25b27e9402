"""From a graph to a model: the nodes that its outputs need, and for training the way of every gradient.

    model = graph.lower(loss, LoweringMode.TRAINING)
    model = graph.lower(logits, LoweringMode.INFERENCE)      # no backward kernel, no activation kept

A path on which a gradient would be lost in silence is an error, which names the node and what it holds back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from . import fusion
from .graph import Graph, Node, SymTensor, is_float
from .op import RuntimeOp
from .shaping import StopGradient

if TYPE_CHECKING:
    from .executor import Executor


class LoweringMode(Enum):
    """What a model is for."""

    INFERENCE = "inference"
    TRAINING = "training"


class GradientPathError(ValueError):
    """Gradients that a graph loses; `lost` has for each param or input the reason."""

    def __init__(self, lost: Mapping[str, str]) -> None:
        self.lost = dict(lost)
        super().__init__(
            "gradients would be lost:\n"
            + "\n".join(f"  `{name}`: {why}" for name, why in self.lost.items())
            + "\nwrite `.stop_gradient()` where that is meant, or give the param `trainable=False`"
        )


@dataclass(frozen=True)
class Model:
    """A graph as it will run."""

    graph: Graph
    mode: LoweringMode
    nodes: tuple[Node, ...]
    """What the outputs need, in the order recorded; and what updates a buffer."""
    outputs: tuple[str, ...]
    seeds: tuple[str, ...] = ()
    """Outputs that a backward begins with."""
    wanted: tuple[str, ...] = ()
    """Params and inputs that get a gradient."""
    requires: frozenset[str] = frozenset()
    """Tensors that a gradient goes through."""
    replaced: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Fused ops, and the recorded nodes for which each stands."""

    def load(self, device: object = "cuda", batch: int | None = None, seed: int = 0, master: str | None = None,
             **sizes: int) -> Executor:  # fmt: skip
        """Memory, params and launches on a device: see `executor.Executor`."""
        from .executor import Executor

        sizes = sizes if batch is None else {"batch": batch, **sizes}
        return Executor(self, device, sizes, seed, master)

    def fusions(self) -> str:
        """Which nodes run as one op, and which could: one line each."""
        known = {n.op.name: type(n.op) for n in self.graph.nodes if isinstance(n.op, RuntimeOp)}
        done = [f"{', '.join(nodes)}: run as {op}" for op, nodes in self.replaced]
        data = self.graph.to_dict(self.outputs)
        could = [
            f"{', '.join(nodes)}: could be one op, see `pullback fuse`" for nodes in fusion.candidates(data, known)
        ]
        return "\n".join([*done, *could])


def lower(graph: Graph, outputs: SymTensor | Sequence[SymTensor], mode: LoweringMode,
          seeds: Sequence[SymTensor] | None = None, input_gradients: Sequence[SymTensor] = (), fuse: bool = True) -> Model:  # fmt: skip
    """What a run of the graph computes.

    Args:
        outputs: what it returns.
        seeds: the outputs that a backward begins with; without, those of one value, or if there are none all that are floats.
        input_gradients: the inputs that get a gradient as params do.
        fuse: whether fused ops of the package run where their steps were recorded.

    Raises:
        GradientPathError: for training, where a gradient would be lost.
        ValueError, TypeError: an output of another graph, a seed that is no output, a model of several uses.
    """
    wanted = [outputs] if isinstance(outputs, SymTensor) else list(outputs)
    for out in (*wanted, *(seeds or ()), *input_gradients):
        if out.graph is not graph:
            raise ValueError(f"`{out.name}` is of another graph")
    names = tuple(o.name for o in wanted)
    graph, replaced = _fused(graph, names) if fuse else (graph, ())
    nodes = _needed(graph, names)
    if mode is LoweringMode.INFERENCE:
        if seeds or input_gradients:
            raise ValueError("an inference model has no gradients: lower it for training")
        return Model(graph, mode, nodes, names, replaced=replaced)
    begins = _seeds(graph, wanted, seeds)
    inputs = tuple(i.name for i in input_gradients)
    for name in inputs:
        if graph.tensors[name].role != "input" or not is_float(graph.tensors[name].dtype):
            raise ValueError(f"`{name}` is no input of floats: it has no input gradient")
    leaves = [n for n, t in graph.tensors.items() if t.role == "param" and t.trainable] + list(inputs)
    paths = Paths(graph, nodes, leaves, begins)
    if lost := paths.lost():
        raise GradientPathError(lost)
    reached = tuple(n for n in leaves if n in paths.useful)
    return Model(graph, mode, nodes, names, begins, reached, frozenset(paths.useful), replaced)


def _fused(graph: Graph, outputs: Sequence[str]) -> tuple[Graph, tuple[tuple[str, tuple[str, ...]], ...]]:
    """The graph with a fused op, where one is installed, in the place of its steps."""
    known = {n.op.name: type(n.op) for n in graph.nodes if isinstance(n.op, RuntimeOp)}
    found = fusion.matches(graph.to_dict(outputs), {**fusion.installed(), **known})
    gone = {name for r in found for name in r.nodes}
    last = {r.nodes[-1]: r for r in found}
    nodes: list[Node] = []
    for node in graph.nodes:
        if (r := last.get(node.name)) is not None:
            nodes.append(Node(f"{r.op.name}: {' '.join(r.nodes)}", r.op(**r.attrs), dict(r.operands), dict(r.outputs)))
        elif node.name not in gone:
            nodes.append(node)
    made = {v for n in nodes for v in n.outputs.values()}
    tensors = {n: t for n, t in graph.tensors.items() if t.role != "value" or n in made}
    return Graph(tensors, _ordered(nodes, made), graph.sizes), tuple((r.op.name, r.nodes) for r in found)


def _ordered(nodes: Sequence[Node], made: set[str]) -> list[Node]:
    """Each node after those that make what it reads; otherwise in the order given."""
    out: list[Node] = []
    waiting, there = list(nodes), set[str]()
    while waiting:
        ready = next(n for n in waiting if all(v in there or v not in made for v in n.operands))
        waiting.remove(ready)
        out.append(ready)
        there |= set(ready.outputs.values())
    return out


def _needed(graph: Graph, outputs: Sequence[str]) -> tuple[Node, ...]:
    needed, out = set(outputs), []
    for node in reversed(graph.nodes):
        updates = isinstance(node.op, RuntimeOp) and any(isinstance(node.inputs.get(n), str) for n in node.op.updates)
        if updates or needed & set(node.outputs.values()):
            out.append(node)
            needed |= set(node.operands)
    return tuple(out[::-1])


def _seeds(graph: Graph, outputs: Sequence[SymTensor], seeds: Sequence[SymTensor] | None) -> tuple[str, ...]:
    if seeds is not None:
        for seed in seeds:
            if seed.name not in [o.name for o in outputs] or not is_float(seed.dtype):
                raise ValueError(f"`{seed.name}` is no output of floats: no backward begins with it")
        return tuple(s.name for s in seeds)
    floats = [o for o in outputs if is_float(o.dtype)]
    found = tuple(o.name for o in ([o for o in floats if not o.shape] or floats))
    if not found:
        raise ValueError("no output is of floats: there is nothing that a backward could begin with")
    return found


class Paths:
    """Which tensors a gradient goes through, and what stops the others.

    Attributes:
        useful: tensors that depend on a leaf and have a way to a seed.
    """

    def __init__(self, graph: Graph, nodes: Sequence[Node], leaves: Sequence[str], seeds: Sequence[str]) -> None:
        self.graph, self.nodes, self.leaves, self.seeds = graph, nodes, leaves, seeds
        self.readers: dict[str, list[Node]] = {}
        for node in nodes:
            for name in node.operands:
                self.readers.setdefault(name, []).append(node)
        requires = set(leaves)
        for node in nodes:
            if any(n in requires for n in self.sources(node)):
                requires |= {v for t, v in node.outputs.items() if self._differentiable(node, t)}
        self.useful = requires & set(seeds)
        for node in reversed(nodes):
            if self.useful & set(node.outputs.values()):
                self.useful |= {n for n in self.sources(node) if n in requires}

    def sources(self, node: Node) -> list[str]:
        """The operands to which the node's backward has a gradient."""
        if isinstance(node.op, StopGradient):
            return []
        own = node.op.gradients if isinstance(node.op, RuntimeOp) else tuple(node.inputs)
        return [v for n in own if isinstance(v := node.inputs.get(n), str) and is_float(self.graph.tensors[v].dtype)]

    def _differentiable(self, node: Node, result: str) -> bool:
        if not is_float(self.graph.tensors[node.outputs[result]].dtype):
            return False
        if isinstance(node.op, RuntimeOp):
            return node.op.has_backward and any(t.name == result and t.differentiable for t in node.op.outputs)
        return True

    def lost(self) -> dict[str, str]:
        """For each leaf whose gradient the graph would lose, why."""
        out = {}
        for leaf in self.leaves:
            reach, stops = self._onwards(leaf)
            if not reach & set(self.seeds):
                out[leaf] = "no output that a backward begins with depends on it"
                continue
            hard = [(n, why) for n, why in stops if why and self._matters(n)]
            loud = [why for n, why in hard if self._swallows(n)]
            if loud:
                out[leaf] = loud[0]
            elif leaf not in self.useful and hard:
                out[leaf] = hard[0][1]
        return out

    def _onwards(self, leaf: str) -> tuple[set[str], list[tuple[Node, str]]]:
        """All tensors that depend on a leaf, and the nodes that its gradient stops at with the reason; no reason where the graph
        says so."""
        reach, carried = {leaf}, {leaf}
        stops: list[tuple[Node, str]] = []
        for node in self.nodes:
            if not reach & set(node.operands):
                continue
            reach |= set(node.outputs.values())
            if not carried & set(node.operands):
                continue
            if isinstance(node.op, StopGradient):
                stops.append((node, ""))
            elif why := self._refusal(node, carried):
                stops.append((node, why))
            if carried & set(self.sources(node)):
                carried |= {v for t, v in node.outputs.items() if self._differentiable(node, t)}
        return reach, stops

    def _refusal(self, node: Node, carried: set[str]) -> str:
        """Why a gradient does not go from the node's results to the operands that are carried."""
        op = node.op
        if not isinstance(op, RuntimeOp):
            return ""
        if not op.has_backward:
            return f"{node.label} has no backward"
        held = [t for t in op.tensors if node.inputs.get(t.name) in carried and t.name not in op.gradients]
        if held:
            return f"{node.label} has no gradient for `{held[0].public}`"
        if not any(self._differentiable(node, t) for t in node.outputs):
            return f"{node.label} has no result that is differentiable"
        return ""

    def _matters(self, node: Node) -> bool:
        """Whether a seed depends on the node."""
        reach = set(node.outputs.values())
        for other in self.nodes:
            if reach & set(other.operands):
                reach |= set(other.outputs.values())
        return bool(reach & set(self.seeds))

    def _swallows(self, node: Node) -> bool:
        """Whether the node makes floats of what it gives no gradient for: of truths and whole numbers there is none to lose."""
        return any(is_float(self.graph.tensors[v].dtype) for v in node.outputs.values())
