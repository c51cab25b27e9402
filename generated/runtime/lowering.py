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
from .graph import Graph, Node, SymTensor, is_float
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
    seeds: tuple[str, ...] = ()
    """Outputs that a backward begins with."""
    wanted: tuple[str, ...] = ()
    """Params and inputs that get a gradient."""
    requires: frozenset[str] = frozenset()
    """Tensors that a gradient goes through."""
    replaced: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Fused ops, and the recorded nodes for which each stands."""

    def load(self, device: object = "cuda", batch: int | None = None, seed: int = 0, master: str | None = None,
             share: Executor | None = None, **sizes: int) -> Any:  # fmt: skip
        """Memory, params and launches on a device: an `executor.Executor`, for training a `training.Trainer`."""
        sizes = sizes if batch is None else {"batch": batch, **sizes}
        if self.mode is LoweringMode.INFERENCE:
            from .executor import Executor

            return Executor(self, device, sizes, seed, share)
        from .training import Trainer

        return Trainer(self, device, sizes, seed, share, master)

    def __str__(self) -> str:
        """The graph as it runs, and what it is for."""
        seeds = f"\nbackward from {', '.join(self.seeds)}" if self.seeds else ""
        return f"{Graph(self.graph.tensors, list(self.nodes), self.graph.sizes)}\nfor {self.mode.value}, gives {', '.join(self.outputs)}{seeds}"

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
        return Model(graph, mode, nodes, names, replaced=replaced)
    try:
        from .paths import GradientPathError, Paths
    except ModuleNotFoundError:
        raise RuntimeError("this package was generated for inference: none of its ops has a backward") from None
    begins = _seeds(wanted, seeds)
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


def _seeds(outputs: Sequence[SymTensor], seeds: Sequence[SymTensor] | None) -> tuple[str, ...]:
    if seeds is not None:
        names = tuple(s.name for s in seeds)
        for seed in seeds:
            if seed.name not in [o.name for o in outputs] or not is_float(seed.dtype):
                raise ValueError(f"`{seed.name}` is no output of floats: no backward begins with it")
        if len(set(names)) < len(names):
            raise ValueError(f"seeds name an output twice: {', '.join(names)}")
        return names
    floats = {o.name: o for o in outputs if is_float(o.dtype)}
    single = [n for n, o in floats.items() if not o.shape]
    if len(single) > 1:
        raise ValueError(
            f"several outputs are of one value: {', '.join(single)}; say by `seeds=` with which a backward begins"
        )
    if not floats:
        raise ValueError("no output is of floats: there is nothing that a backward could begin with")
    return tuple(single or floats)
