"""Formulas against torch, without a kernel: values, updates and declared gradients of every variant, in float64."""

from __future__ import annotations

from functools import cache
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


@cache
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


# ---------------------------------------------------------------------------------------------- at the edges

INF, NAN = float("inf"), float("nan")


def at_point(
    name: str, tensors: dict[str, Any], choices: dict[str, Any] | None = None, **attrs: Any
) -> tuple[Array, dict[str, Array]]:
    """The loss and the declared gradients at one point, every cotangent 1 unless given, in float64. Packs are one dim."""
    (op,) = [o for o in ops() if o.name == name]
    asked = {"reduction": "none", **(choices or {})}
    wanted = asked | {f"has {t.name}": t.name in tensors for t in op.arguments if t.optional}
    variant, graph = next(
        (v, g) for v, g in typed(op, Report()).graphs if all(wanted.get(k, given) == given for k, given in v.values)
    )
    env = Sampler(op, variant, graph, 3).draw("normal")
    extents = dict(env.extents)
    given: dict[str, Array] = {}
    for tensor in graph.tensors.values():
        if tensor.name in tensors:
            extents.update(zip(tensor.axes, np.asarray(tensors[tensor.name]).shape))
    order = tuple(graph.axes)
    base = Env(order, extents, {}, {**env.attrs, **asked, **attrs})
    for tensor in graph.tensors.values():
        if tensor.role == "output":
            continue
        shape = base.shape(tensor.axes)
        value = np.asarray(tensors.get(tensor.name, 1.0), dtype=np.int64 if tensor.kind == "int" else np.float64)
        own = [base.extents[a] for a in tensor.axes]
        places = [tensor.axes.index(a) for a in order if a in tensor.axes]
        given[tensor.name] = np.broadcast_to(value, own).transpose(places).reshape(shape)
    env = with_outputs(graph, Env(order, extents, given, base.attrs))
    gradients = {t.name: t.node for t in graph.gradients if t.node is not None}
    values = evaluate(gradients.values(), env)
    out = {n: np.squeeze(np.broadcast_to(values[g.serial], given[n].shape)) for n, g in gradients.items()}
    return np.squeeze(env.tensors[graph.outputs[0].name]), out


@pytest.mark.parametrize("name", ["nll_loss", "cross_entropy"])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_where_every_target_is_ignored(name: str, reduction: str) -> None:
    """C037: the mean is NaN, and its gradient 0."""
    given = {"x": np.arange(6.0).reshape(2, 3, 1), "target": [[-100], [-100]]}
    off = {"label_smoothing == 0": True, "has softcap": False} if name == "cross_entropy" else {}
    loss, gradient = at_point(name, given, {"reduction": reduction, **off}, ignore_index=-100)
    assert (np.isnan(loss) if reduction == "mean" else loss == 0).all()
    assert (gradient["x"] == 0).all()


def test_a_cotangent_of_its_own_for_each_row() -> None:
    """C038."""
    logits = np.array([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])[:, :, None]
    off = {"label_smoothing == 0": True, "has softcap": False}
    _, gradient = at_point(
        "cross_entropy",
        {"x": logits, "target": [[2], [0]], "dloss": [[2.0], [3.0]]},
        off,
        z_loss=0.0,
        ignore_index=-100,
    )
    np.testing.assert_allclose(gradient["x"], [[0.1801, 0.4895, -0.6695], [-2.7299, 0.7342, 1.9957]], atol=1e-4)


def test_large_logits_and_classes_without_probability() -> None:
    """C033: no exp overflows; a class that is masked out has no part in the loss without smoothing."""
    off = {"label_smoothing == 0": True, "has softcap": False}
    logits = np.array([[1000.0, 0.0, -INF]])[:, :, None]
    loss, gradient = at_point("cross_entropy", {"x": logits, "target": [[0]]}, off, z_loss=0.0, ignore_index=-100)
    assert loss == 0 and gradient["x"].tolist() == [0, 0, 0]
    soft, by = at_point(
        "cross_entropy_soft", {"x": logits, "target": np.array([[1.0, 0.0, 0.0]])[:, :, None]}, label_smoothing=0.0
    )
    assert soft == 0 and by["x"].tolist() == [0, 0, 0]


def test_logarithms_of_nothing() -> None:
    loss, by = at_point("kl_div", {"x": [[-1.0, -INF]], "target": [[0.0, 0.0]]}, {"log_target": False})
    assert loss.tolist() == [0, 0] and by["target"].tolist() == [0, 0]
    loss, by = at_point("kl_div", {"x": [[-1.0, -INF]], "target": [[-INF, -INF]]}, {"log_target": True})
    assert loss.tolist() == [0, 0] and by["target"].tolist() == [0, 0] and (by["x"] == 0).all()
    # Students and teachers that rule a class out, one of them or both.
    x, target = [[np.log(0.5), np.log(0.5), -INF, -INF]], [[-INF, 0.0, -INF, -INF]]
    off = {"beta == 0": False, "beta == 1": False}
    loss, by = at_point("jsd_loss", {"x": x, "target": target}, off, beta=0.5)
    want = 0.5 * np.log(1 / 0.75) + 0.5 * (0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75))
    np.testing.assert_allclose(loss, want, rtol=1e-14)
    assert np.isfinite(by["x"]).all() and np.isfinite(by["target"]).all()


def test_distributions_that_hardly_differ() -> None:
    """The divergence is of second order: (p - q) ** 2 / 8 over p, where differences of logarithms would cancel."""
    p, gap = np.array([0.25, 0.75]), np.array([1e-6, -1e-6])
    off = {"beta == 0": False, "beta == 1": False}
    loss, _ = at_point("jsd_loss", {"x": np.log([p + gap]), "target": np.log([p])}, off, beta=0.5)
    np.testing.assert_allclose(loss, (gap**2 / (8 * p)).sum(), rtol=1e-3)


def test_probabilities_of_0_and_1() -> None:
    x, target = np.array([0.0, 0.0, 1.0, 1.0]), np.array([0.0, 1.0, 0.0, 1.0])
    loss, by = at_point("binary_cross_entropy", {"x": x, "target": target})
    leaf = torch.tensor(x, requires_grad=True)
    want = torch.nn.functional.binary_cross_entropy(leaf, torch.tensor(target), reduction="none")
    want.sum().backward()
    assert loss.tolist() == want.tolist() and leaf.grad is not None
    np.testing.assert_allclose(by["x"], leaf.grad.numpy(), rtol=1e-8)  # torch keeps its bound in f32
    assert np.isfinite(by["target"]).all()


def test_small_losses_of_logits_keep_their_digits() -> None:
    loss, by = at_point("binary_cross_entropy_with_logits", {"x": [-40.0, 40.0, -800.0], "target": [0.0, 1.0, 1.0]})
    np.testing.assert_allclose(loss, [np.exp(-40), np.exp(-40), 800], rtol=1e-14)
    np.testing.assert_allclose(by["x"], [np.exp(-40), -np.exp(-40), -1], rtol=1e-14)


def test_rows_without_a_direction() -> None:
    """C023: zero vectors, and points that coincide, have finite gradients."""
    zero = [[0.0, 0.0]]
    loss, by = at_point("cosine_embedding_loss", {"x1": zero, "x2": zero, "target": [1.0]}, margin=0.0)
    assert loss == 1 and (by["x1"] == 0).all() and (by["x2"] == 0).all()
    row = [[0.5, -0.5]]
    for square in (True, False):
        choice = {"p == 2": square, "swap": True}
        loss, by = at_point(
            "triplet_margin_loss",
            {"anchor": row, "positive": row, "negative": row},
            choice,
            p=2.0 if square else 1.5,
            eps=0.0,
            margin=1.0,
        )
        assert loss == 1 and all((g == 0).all() for g in by.values())


@pytest.mark.parametrize("zeros", [0, 1, 2])
def test_products_with_zeros(zeros: int) -> None:
    x = np.array([[2.0, -3.0, 0.5, 4.0]])
    x[0, :zeros] = 0
    _, by = at_point("prod", {"x": x})
    want = [np.prod(np.delete(x[0], k)) for k in range(4)]
    np.testing.assert_allclose(by["x"], want, rtol=1e-15)
    _, by = at_point("cumprod", {"x": x})
    leaf = torch.tensor(x[0], requires_grad=True)
    torch.cumprod(leaf, 0).sum().backward()
    assert leaf.grad is not None
    np.testing.assert_allclose(by["x"], leaf.grad.numpy(), rtol=1e-15)


def test_positions_of_ties_and_of_nan() -> None:
    x = [[1.0, 3.0, 3.0, 0.0, 0.0], [1.0, NAN, 3.0, NAN, 0.0]]
    assert at_point("argmax", {"x": x}, {"kind of number": "float"})[0].tolist() == [1, 1]
    assert at_point("argmin", {"x": x}, {"kind of number": "float"})[0].tolist() == [3, 1]
