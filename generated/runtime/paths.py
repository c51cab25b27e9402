"""The way of every gradient through a graph: which tensors it goes through, and what stops it.

Paths(graph, nodes, leaves, seeds).lost()    # {"w": "node `argmax_1` (argmax) has no backward"}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .executor import Executor
from .graph import Graph, Node, SymTensor, is_float
from .lowering import Model
from .op import RuntimeOp
from .shaping import StopGradient


class GradientPathError(ValueError):
    """Gradients that a graph loses; `lost` has for each param or input the reason."""

    def __init__(self, lost: Mapping[str, str]) -> None:
        self.lost = dict(lost)
        super().__init__(
            "gradients would be lost:\n"
            + "\n".join(f"  `{name}`: {why}" for name, why in self.lost.items())
            + "\nwrite `.stop_gradient()` where a node is to stop them, or give the param `trainable=False`"
        )


@dataclass(frozen=True)
class TrainingModel(Model):
    """A model that is trained."""

    seeds: tuple[str, ...] = ()
    """Outputs that a backward begins with."""
    wanted: tuple[str, ...] = ()
    """Params and inputs that get a gradient."""

    def load(self, device: object = "cuda", batch: int | None = None, seed: int = 0, share: Executor | None = None,
             master: str | None = None, **sizes: int) -> Any:  # fmt: skip
        """Memory, params and launches on a device: see `training.Trainer`."""
        from .training import Trainer

        return Trainer(self, device, sizes if batch is None else {"batch": batch, **sizes}, seed, share, master)

    def __str__(self) -> str:
        return f"{super().__str__()}\nbackward from {', '.join(self.seeds)}"


def lower_for_training(model: Model, outputs: Sequence[SymTensor], seeds: Sequence[SymTensor] | None,
                       input_gradients: Sequence[SymTensor]) -> TrainingModel:  # fmt: skip
    """The model with the way of every gradient: see `lowering.lower`."""
    graph, begins = model.graph, _seeds(outputs, seeds)
    inputs = tuple(i.name for i in input_gradients)
    for name in inputs:
        if graph.tensors[name].role != "input" or not is_float(graph.tensors[name].dtype):
            raise ValueError(f"`{name}` is no input of floats: it has no input gradient")
    leaves = [n for n, t in graph.tensors.items() if t.role == "param" and t.trainable] + list(inputs)
    paths = Paths(graph, model.nodes, leaves, begins)
    if lost := paths.lost():
        raise GradientPathError(lost)
    reached = tuple(n for n in leaves if n in paths.useful)
    return TrainingModel(
        graph, model.mode, model.nodes, model.outputs, model.replaced, frozenset(paths.useful), begins, reached
    )


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
