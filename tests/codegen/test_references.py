"""Formulas against torch, without a kernel: values, updates and declared gradients of every variant, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from codegen.diagnostics import Report
from codegen.evaluate import Env, evaluate, full
from codegen.ir import Graph, Tensor
from codegen.loader import load
from codegen.primitives import Array
from codegen.sample import NoSample, Sampler
from codegen.spec import OpSpec
from codegen.variants import NUMBER_KIND, Variant
from codegen.verify import typed, with_outputs

ROOT = Path(__file__).parents[2]
FOLDERS = ("specs", "tests/ir")
COARSE = {"celu", "hardsigmoid"}
"""torch keeps a constant of these in f32."""


def ops() -> list[OpSpec]:
    report = Report()
    found = load([ROOT / f for f in FOLDERS], report, ROOT)
    assert not report.found, report.render()
    return [op for op in found if op.reference and op.name not in COARSE]


def arranged(tensor: Tensor, env: Env) -> list[int]:
    """The dims of an evaluated array in the tensor's own order, those of axes that it lacks last."""
    own = list(tensor.axes)
    return [env.order.index(a) for a in (*own, *(a for a in env.order if a not in own))]


def passed(tensor: Tensor, array: Array, env: Env) -> torch.Tensor:
    """What a caller passes: one dim for each dim of the declaration, its factors merged."""
    moved = array.transpose(arranged(tensor, env))
    shape, k = [], 0
    for dim in tensor.dims:
        shape.append(int(np.prod(moved.shape[k : k + len(dim.factors)], dtype=np.int64)))
        k += len(dim.factors)
    return torch.from_numpy(np.array(moved.reshape(shape), order="C"))


def position(op: OpSpec, axes: tuple[str, ...], graph: Graph) -> int:
    """Where an axis that an argument places lies in the first tensor that has it, from the end."""
    for tensor in graph.tensors.values():
        places = [k for k, dim in enumerate(tensor.dims) if {f.name for f in dim.factors} & set(axes)]
        if places:
            return places[0] - len(tensor.dims)
    raise AssertionError(op.name)


class Point:
    """One environment of a variant, and the reference called there."""

    def __init__(self, op: OpSpec, graph: Graph, env: Env) -> None:
        self.op, self.graph = op, graph
        self.env = with_outputs(graph, env)
        self.given: dict[str, Any] = {t.name: None for t in op.arguments} | {a.name: None for a in op.attrs}
        for tensor in graph.tensors.values():
            if tensor.role not in ("output", "cotangent"):
                self.given[tensor.name] = passed(tensor, env.tensors[tensor.name], env)
        for attr in op.attrs:
            if attr.name in env.attrs:
                self.given[attr.name] = position(op, attr.axis, graph) if attr.axis else env.attrs[attr.name]
            if attr.keeps:
                self.given[attr.name] = False

    def value(self, node: Any, tensor: Tensor) -> torch.Tensor:
        """A node of the graph as the caller sees it."""
        array = full(evaluate([node], self.env)[node.serial], tensor.axes, self.env)
        return passed(
            tensor, np.broadcast_to(array, np.broadcast_shapes(array.shape, self.env.shape(tensor.axes))), self.env
        )

    def reference(self, wanted: tuple[str, ...] = ()) -> list[torch.Tensor]:
        leaves = {name: self.given[name].detach().requires_grad_() for name in wanted}
        self.given.update(leaves)
        found = eval(self.op.reference, {"torch": torch, **self.given})  # noqa: S307
        return list(found) if isinstance(found, (tuple, list)) else [found]

    def check_values(self) -> None:
        found = self.reference()
        for target, want in zip(self.graph.outputs, found):
            assert target.node is not None
            mine = self.value(target.node, self.graph.tensors[target.name])
            same(f"{self.op.name}: {target.name}", mine, want)
        for target in self.graph.updates:  # torch wrote into what it was given
            assert target.node is not None
            mine = self.value(target.node, self.graph.tensors[target.name])
            same(f"{self.op.name}: {target.name}", mine, self.given[target.name])

    def check_gradients(self) -> None:
        declared = {t.name: t.node for t in self.graph.gradients if t.node is not None and t.kind == "formula"}
        wanted = tuple(declared)
        together = self.derivatives(wanted)
        for name, node in declared.items():
            want = together[name] if together is not None else (self.derivatives((name,)) or {}).get(name)
            if want is None:
                continue
            mine = np.broadcast_to(evaluate([node], self.env)[node.serial], self.env.tensors[name].shape)
            same(f"{self.op.name}: gradient of {name}", passed(self.graph.tensors[name], mine, self.env), want)

    def derivatives(self, names: tuple[str, ...]) -> dict[str, torch.Tensor | None] | None:
        """torch's own, or None where torch has none of one of these."""
        try:
            found = self.reference(names)
            loss = torch.zeros((), dtype=torch.float64)
            for target, out in zip(self.graph.outputs, found):
                cotangent = self.graph.tensors.get(f"d{target.name}")
                if cotangent is not None and out.requires_grad:
                    seed = passed(self.graph.tensors[target.name], self.env.tensors[cotangent.name], self.env)
                    loss = loss + (out * seed).sum()
            if not loss.requires_grad:
                return None
            leaves = [self.given[name] for name in names]
            return dict(zip(names, torch.autograd.grad(loss, leaves, allow_unused=True)))
        except RuntimeError as fault:
            # The last is a fault of torch: a group norm that has a bias and no weight.
            if any(text in str(fault) for text in ("not implemented", "not differentiable", "not have a device")):
                return None
            raise
        finally:
            self.given.update({name: self.given[name].detach() for name in names})


def same(what: str, mine: torch.Tensor, want: torch.Tensor) -> None:
    assert tuple(mine.shape) == tuple(want.shape), f"{what}: {tuple(mine.shape)} for {tuple(want.shape)}"
    torch.testing.assert_close(
        mine.to(torch.float64),
        want.detach().to(torch.float64),
        rtol=1e-9,
        atol=1e-12,
        equal_nan=True,
        msg=lambda m: f"{what}\n{m}",
    )


@pytest.mark.parametrize("op", ops(), ids=lambda op: str(op.name))
def test_values_and_gradients_are_torchs(op: OpSpec) -> None:
    report = Report()
    graphs = typed(op, report).graphs
    assert graphs, report.render()
    tried = 0
    for variant, graph in graphs:
        if variant.get(NUMBER_KIND, "") == "int" and any(a.type == "float" for a in op.attrs):
            continue  # only whole numbers are allowed beside ints
        try:
            points = list(drawn(op, variant, graph))
        except NoSample:
            continue
        for point in points:
            point.check_values()
            point.check_gradients()
            tried += 1
    assert tried


def drawn(op: OpSpec, variant: Variant, graph: Graph) -> list[Point]:
    sampler = Sampler(op, variant, graph, 11)
    return [Point(op, graph, sampler.draw("normal", scale)) for scale in (1.0, 0.5, 2.0)]
