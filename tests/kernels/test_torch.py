"""Where torch has an answer of its own that a reference at interior points does not show: bounds, ties, nothing, no dims."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import generated  # noqa: E402
from generated.runtime.op import RuntimeOp  # noqa: E402
from generated.runtime.testing import DEVICE  # noqa: E402

F = torch.nn.functional
INF, NAN = math.inf, math.nan


def tensor(*values: float, dtype: Any = torch.float64) -> Any:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def same(ours: Callable[..., Any], theirs: Callable[..., Any], *tensors: Any) -> None:
    """Values, and the gradients of a weighted sum."""
    found = []
    for function in (ours, theirs):
        leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors]
        out = function(*leaves)
        seed = torch.linspace(0.5, 1.5, out.numel(), dtype=torch.float64).reshape(out.shape).to(out)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        found.append([out, *torch.autograd.grad(out, wanted, seed)] if out.requires_grad else [out])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14, equal_nan=True)


# ---------------------------------------------------------------------------------------------- normalize


@pytest.mark.parametrize("p", [1, 1.5, 2, 3, 7, INF])
@pytest.mark.parametrize("eps", [1e-12, 0.5])
def test_normalize_by_every_norm(p: float, eps: float) -> None:
    """Zeros, ties of the largest, rows below eps, and of exactly that norm."""
    rows = [[0, 0, 0, 0], [1, -1, 1, 0.5], [0.5, 0, 0, 0], [0.25, -0.125, 0, 0], [3, -4, 0.1, 2]]
    x = torch.tensor(rows, dtype=torch.float64, device=DEVICE)
    same(lambda a: generated.normalize(a, p, 1, eps), lambda a: F.normalize(a, p, 1, eps), x)
    same(lambda a: generated.normalize(a, p, 0, eps), lambda a: F.normalize(a, p, 0, eps), x)


def test_normalize_takes_torchs_arguments_and_no_power_below_1() -> None:
    x = tensor(3, 4).reshape(1, 2)
    assert torch.allclose(generated.normalize(x, 2.0, 1, 1e-12), F.normalize(x, 2.0, 1, 1e-12))
    for p in (0.5, 0.0, -1.0, NAN):
        with pytest.raises(ValueError, match=r"normalize requires p >= 1"):
            generated.normalize(x, p)


# ---------------------------------------------------------------------------------------------- clamp


@pytest.mark.parametrize("low", [None, -1.0, 1.0, NAN, -INF])
@pytest.mark.parametrize("high", [None, 0.5, 2.0, NAN, INF])
def test_clamp_with_every_bound(low: float | None, high: float | None) -> None:
    if low is None and high is None:
        return
    x = tensor(-2, -1, 0, 0.5, 1, 2, 3, INF, -INF)
    if any(bound is not None and math.isnan(bound) for bound in (low, high)):
        # As torch 2.13 has it on the CPU; its versions and devices differ here.
        leaf = x.clone().requires_grad_()
        y = generated.clamp(leaf, low, high)
        assert y.isnan().all() and torch.autograd.grad(y, leaf, torch.ones_like(y))[0].eq(0).all()
    else:
        same(lambda a: generated.clamp(a, low, high), lambda a: torch.clamp(a, low, high), x)
    nan = tensor(NAN)
    assert generated.clamp(nan, low, high).isnan().all()


# ---------------------------------------------------------------------------------------------- nothing at all

SHAPES = [(0, 3, 4), (2, 3, 0), (0, 3, 0), (2, 0, 4), (0, 0, 4), (0, 3, 2, 2)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["batch_norm", "instance_norm"])
def test_statistics_of_nothing_stay(name: str, shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape, device=DEVICE, requires_grad=True)
    mean, var = torch.full(shape[1:2], 0.25, device=DEVICE), torch.full(shape[1:2], 2.0, device=DEVICE)
    weight = torch.ones(shape[1:2], device=DEVICE, requires_grad=True)
    y = getattr(generated, name)(x, mean, var, weight, None, True)
    assert y.shape == shape and (mean == 0.25).all() and (var == 2.0).all()
    y.sum().backward()
    assert x.grad.shape == shape and (weight.grad == 0).all()


@pytest.mark.parametrize(
    ("name", "shape"), [("batch_norm", (1, 3, 1)), ("batch_norm", (1, 3)), ("instance_norm", (2, 3, 1))]
)
def test_one_value_has_no_variance(name: str, shape: tuple[int, ...]) -> None:
    mean, var = torch.zeros(3, device=DEVICE), torch.ones(3, device=DEVICE)
    for function in (getattr(generated, name), getattr(F, name)):
        with pytest.raises(ValueError, match="requires|more than 1"):
            function(torch.zeros(shape, device=DEVICE), mean, var, None, None, True)


# ---------------------------------------------------------------------------------------------- no dims


def along_one_axis(name: str) -> bool:
    """Whether `dim` places one whole axis in the op's tensors."""
    module = importlib.import_module(f"generated.ops.{name}")
    op = next(
        v
        for v in vars(module).values()
        if isinstance(v, type) and issubclass(v, RuntimeOp) and v.__module__ == module.__name__
    )
    return "dim" in op.kinds and op.kinds["dim"] == "int" and all(t.dims == "..., N" for t in op.inputs)


ALONG = [n for n in sorted(dir(generated)) if along_one_axis(n)]


def test_ops_along_one_axis_are_found() -> None:
    assert {"softmax", "log_softmax", "cumsum", "cumprod", "normalize"} <= set(ALONG)


@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("name", ALONG)
def test_a_tensor_of_no_dims_is_an_axis_of_one_element(name: str, dim: int) -> None:
    function = getattr(generated, name)
    module = importlib.import_module(f"generated.ops.{name}")
    op = getattr(module, "".join(w[:1].upper() + w[1:] for w in name.split("_")))
    values = [tensor(0.75 + k)[0] for k in range(len(op.inputs))]
    same(
        lambda *v: function(*v, dim=dim), lambda *v: function(*(a.reshape(1) for a in v), dim=dim).reshape(()), *values
    )
    theirs = getattr(torch, name, None) or getattr(F, name, None)
    if theirs is not None:
        same(lambda *v: function(*v, dim=dim), lambda *v: theirs(*v, dim=dim), *values)
    with pytest.raises(IndexError, match="dim"):
        function(*values, dim=1)
