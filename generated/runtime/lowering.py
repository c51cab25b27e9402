"""From a graph to a model: the nodes that its outputs need, and for training the way of every gradient.

    model = graph.lower(loss, LoweringMode.TRAINING)
    model = graph.lower(logits, LoweringMode.INFERENCE)      # no backward kernel, no activation kept

A path on which a gradient would be lost in silence is an error, which names the node and what it holds back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from . import fusion
from .custom import CustomOp
from .graph import Graph, Node, SymTensor
from .op import RuntimeOp

if TYPE_CHECKING:
    from .executor import Executor


class LoweringMode(Enum):
    """What a model is for."""

    INFERENCE = "inference"
    TRAINING = "training"


@dataclass(frozen=True)
class Model:
    """A graph as it will run."""

    graph: Graph
    mode: LoweringMode
    nodes: tuple[Node, ...]
    """What the outputs need, in the order recorded; and what updates a buffer."""
    outputs: tuple[str, ...]
    replaced: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Fused ops, and the recorded nodes for which each stands."""
    requires: frozenset[str] = frozenset()
    """Tensors of which something is kept for later: where a model is trained, those that a gradient goes through."""

    def load(self, device: object = "cuda", batch: int | None = None, seed: int = 0, share: Executor | None = None,
             **sizes: int) -> Any:  # fmt: skip
        """Memory, params and launches on a device: see `executor.Executor`."""
        from .executor import Executor

        return Executor(self, device, sizes if batch is None else {"batch": batch, **sizes}, seed, share)

    def __str__(self) -> str:
        """The graph as it runs, and what it is for."""
        whole = Graph(self.graph.tensors, list(self.nodes), self.graph.sizes)
        return f"{whole}\nfor {self.mode.value}, gives {', '.join(self.outputs)}"

    def fusions(self) -> str:
        """Which nodes run as one op, and which could: one line each."""
        known = _generated(self.graph)
        done = [f"{', '.join(nodes)}: run as {op}" for op, nodes in self.replaced]
        data = self.graph.to_dict(self.outputs)
        could = [
            f"{', '.join(nodes)}: could be one op, see `pullback fuse`" for nodes in fusion.candidates(data, known)
        ]
        return "\n".join([*done, *could])


def lower(graph: Graph, outputs: SymTensor | Sequence[SymTensor], mode: LoweringMode,
          seeds: Sequence[SymTensor] | None = None, input_gradients: Sequence[SymTensor] = (), fuse: bool = True) -> Model:  # fmt: skip
    """What a run of the graph computes, as it was recorded so far.

    Args:
        outputs: what it returns.
        seeds: the outputs that a backward begins with; without, the one of one value, or if there is none all that are floats.
        input_gradients: the inputs that get a gradient as params do.
        fuse: whether fused ops of the package run where their steps were recorded.

    Raises:
        paths.GradientPathError: for training, where a gradient would be lost.
        ValueError, TypeError: an output of another graph, a seed that is no output, a model of several uses.
    """
    mode = LoweringMode(mode)
    wanted = [outputs] if isinstance(outputs, SymTensor) else list(outputs)
    if not wanted:
        raise ValueError("a model has outputs: none is given")
    for out in (*wanted, *(seeds or ()), *input_gradients):
        if not isinstance(out, SymTensor):
            raise TypeError(f"{out!r} is no recorded tensor")
        if out.graph is not graph:
            raise ValueError(f"`{out.name}` is of another graph")
    names = tuple(o.name for o in wanted)
    graph, replaced = _fused(graph, names) if fuse else (graph.copy(), ())
    nodes = _needed(graph, names)
    if mode is LoweringMode.INFERENCE:
        if seeds or input_gradients:
            raise ValueError("an inference model has no gradients: lower it for training")
        return Model(graph, mode, nodes, names, replaced)
    from .paths import lower_for_training

    return lower_for_training(Model(graph, mode, nodes, names, replaced), wanted, seeds, input_gradients)


def _generated(graph: Graph) -> dict[str, type[RuntimeOp]]:
    """The ops of a graph that have specs."""
    ops = (n.op for n in graph.nodes)
    return {op.name: type(op) for op in ops if isinstance(op, RuntimeOp) and not isinstance(op, CustomOp)}


def _fused(graph: Graph, outputs: Sequence[str]) -> tuple[Graph, tuple[tuple[str, tuple[str, ...]], ...]]:
    """The graph with a fused op, where one is installed, in the place of its steps."""
    known = _generated(graph)
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
    """Each node after those that make what it reads, reads and updates of a buffer as they were; else in the order given."""
    out: list[Node] = []
    waiting, there = list(nodes), set[str]()
    while waiting:
        read, written = set[str](), set[str]()
        for node in waiting:  # the first for which nothing that waits before it counts
            own = node.updated
            free = not (own & (read | written) or written & set(node.operands))
            if free and all(v in there or v not in made for v in node.operands):
                break
            read, written = read | set(node.operands), written | own
        waiting.remove(node)
        out.append(node)
        there |= set(node.outputs.values())
    return out


def _needed(graph: Graph, outputs: Sequence[str]) -> tuple[Node, ...]:
    needed, out = set(outputs), []
    for node in reversed(graph.nodes):
        if node.updated or needed & set(node.outputs.values()):
            out.append(node)
            needed |= set(node.operands)
    return tuple(out[::-1])
