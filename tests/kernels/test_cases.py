"""Inputs that break kernels, each as a kind over every op of the package. The numbers in the docstrings name the
cases.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import generated  # noqa: E402
from codegen.diagnostics import Report  # noqa: E402
from codegen.loader import load  # noqa: E402
from codegen.spec import OpSpec  # noqa: E402
from generated.runtime.device import torch_library  # noqa: E402
from generated.runtime.graph import Graph  # noqa: E402
from generated.runtime.layout import parse_dims  # noqa: E402
from generated.runtime.op import RuntimeOp  # noqa: E402
from generated.runtime.plan import Launch, Limits, Meta  # noqa: E402
from generated.runtime.prepared import Prepared, PreparedLaunch  # noqa: E402
from generated.runtime.testing import DEVICE, EPS, TORCH  # noqa: E402
from generated.runtime.testing_gradients import GradientCase, seed_of  # noqa: E402
from generated.runtime.views import FLOATS, INTS, dense_strides  # noqa: E402

ROOT = Path(__file__).parents[2]
NAN, INF = math.nan, math.inf


def op_class(name: str) -> type[RuntimeOp]:
    module = importlib.import_module(f"generated.ops.{name}")
    return next(
        v
        for v in vars(module).values()
        if isinstance(v, type) and issubclass(v, RuntimeOp) and v.__module__ == module.__name__
    )


OPS = [n for n in sorted(dir(generated)) if op_class(n).outputs]
"""All but steps, which test_optimizers has."""


@cache
def specs() -> dict[str, OpSpec]:
    report = Report()
    found = {op.name: op for op in load([ROOT / "specs"], report, ROOT)}
    assert not report.errors, report.render()
    return found


def case(name: str) -> GradientCase:
    """The op with its reference in torch, as the spec has it."""
    domains = {d.name: (d.low, d.high) for d in specs()[name].domain}
    return GradientCase(getattr(generated, name), op_class(name), domains)


def reference(name: str, given: dict[str, Any], attrs: dict[str, Any]) -> Any:
    return eval(specs()[name].reference, {"torch": torch, **given, **attrs})  # noqa: S307


def attrs_of(name: str) -> dict[str, Any]:
    """The attrs at their defaults; what has none is a number, and of a loss each element's own."""
    one, decls = case(name), {a.name: a for a in specs()[name].attrs}
    values: dict[str, Any] = one._all_attrs({})
    missing = inspect.Parameter.empty
    values = {n: (2 if decls[n].type == "int" else 0.75) if v is missing else v for n, v in values.items()}
    values |= {"reduction": "none"} if "reduction" in values else {}
    return {n: -1 if decls[n].axis else 3 if decls[n].size else v for n, v in values.items()}


def choices(name: str) -> list[dict[str, Any]]:
    """The defaults, and each choice of each enum beside them."""
    usual = attrs_of(name)
    return [
        usual,
        *(
            {**usual, n: v}
            for n, kind in op_class(name).kinds.items()
            if isinstance(kind, tuple)
            for v in kind
            if v != usual[n]
        ),
    ]


def tensors(name: str) -> tuple[Any, ...]:
    op = op_class(name)
    return (*op.inputs, *op.params, *op.buffers)


def takes(name: str, dtype: str) -> bool:
    return all(dtype in t.dtypes or t.dtype in ("bool", "int") for t in tensors(name)) and any(
        dtype in t.dtypes for t in tensors(name)
    )


def stretching(name: str) -> bool:
    """Whether two tensors or more are broadcast against each other, the others having no dims of their own."""
    kinds = [t.dims for t in tensors(name)]
    return kinds.count("...") > 1 and set(kinds) <= {"...", ""}


def floating(name: str) -> bool:
    return takes(name, "f32") and all(t.dtype != "bool" for t in op_class(name).outputs)


def present(*names: str) -> list[str]:
    """Those of the named ops that the package has."""
    return [n for n in names if n in OPS]


UNARY = [n for n in OPS if floating(n) and len(tensors(n)) == 1 and tensors(n)[0].dims == "..."]
PAIRS = [n for n in OPS if len(tensors(n)) == 2 and stretching(n) and all("f32" in t.dtypes for t in tensors(n))]
STRETCHING = [n for n in OPS if stretching(n)]
GRADIENTS = [n for n in OPS if op_class(n).gradients]
FLOATING = [n for n in OPS if floating(n)]
ELEMENTWISE = [n for n in OPS if op_class(n).elementwise]


def tensor(values: Any, dtype: str = "f32") -> Any:
    return torch.tensor(values, dtype=torch.float64).to(DEVICE, TORCH[dtype])


def filled(name: str, shapes: list[tuple[int, ...]], dtype: str = "f32", seed: int = 0) -> dict[str, Any]:
    """Random arguments by the spec's names, each of its own shape, within the domains; `...` has the shape."""
    one = case(name)
    whole = [one._shape(t, s, {}) for t, s in zip(tensors(name), itertools.cycle(shapes))]
    return {t.name: one._values(t, s, dtype, seed + k) for k, (t, s) in enumerate(zip(tensors(name), whole))}


def differentiate(name: str, given: dict[str, Any], attrs: dict[str, Any], dy: Any = None) -> dict[str, Any]:
    """The outputs, and the gradients by name; `dy` is the cotangent of each output, ones by default."""
    one = case(name)
    names = one._differentiable(given)
    leaves = {n: v.detach().requires_grad_(n in names) for n, v in given.items()}
    outputs = one.call(leaves, attrs)
    out = {f"output {k}": y.detach() for k, y in enumerate(outputs)}
    if names:
        seeds = [torch.ones_like(y) if dy is None else dy.to(y.dtype).expand(y.shape) for y in outputs]
        out |= zip((f"d{n}" for n in names), torch.autograd.grad(outputs, [leaves[n] for n in names], seeds))
    return out


def near(got: Any, want: Any, dtype: str, roundings: float = 4) -> Any:
    """Where two agree: equal after rounding to the dtype, within a few roundings of 1 + |value|, or both NaN."""
    rounded = want.to(TORCH[dtype]).double()
    a = got.double()
    error = (a - rounded).abs() <= roundings * EPS[dtype] * (1 + rounded.abs())
    top = torch.finfo(TORCH[dtype]).max
    # In the last units before the end, one rounds to infinity where the other does not.
    end = (a.abs() > 0.99 * top) & (rounded.abs() > 0.99 * top) & (a.sign() == rounded.sign())
    return (a == rounded) | (a.isnan() & rounded.isnan()) | error | end


def same(left: dict[str, Any], right: dict[str, Any], dtype: str = "f32", roundings: float = 64) -> None:
    assert left.keys() == right.keys()
    for key in left:
        assert left[key].shape == right[key].shape and left[key].dtype == right[key].dtype, key
        if left[key].is_floating_point():
            assert near(left[key], right[key], dtype, roundings).all(), (key, left[key], right[key])
        else:
            assert torch.equal(left[key], right[key]), key


# ---------------------------------------------------------------------------------------------- formulas: numerics

FAR = [-1e4, -200.0, -100.0, -88.0, -50.0, -30.0, -10.5, -5.0, -1.0, 0.0, 0.5, 10.5, 18.0, 20.0, 50.0, 88.0, 200.0, 1e4]


@pytest.mark.parametrize("name", UNARY)
def test_values_and_derivatives_far_from_zero(name: str) -> None:
    """C001, C003, C004: the tails of every function of one tensor: nothing is inf / inf, and no derivative is NaN.

    In float32 against the op in float64, and that against torch wherever torch is finite.
    """
    for attrs in choices(name):
        x = tensor(FAR)
        low, high = (differentiate(name, {tensors(name)[0].name: v}, attrs) for v in (x, x.double()))
        for key in low:
            assert near(low[key], high[key], "f32", 64).all(), (key, attrs, low[key], high[key])
        leaf = x.double().requires_grad_()
        expected = reference(name, {tensors(name)[0].name: leaf}, attrs)
        assert near(high["output 0"], expected, "f32")[expected.isfinite()].all()
        if expected.requires_grad and f"d{tensors(name)[0].name}" in high:
            (grad,) = torch.autograd.grad(expected.sum(), leaf)
            smooth = expected.isfinite() & grad.isfinite() & (x != 0)  # 0 may be a kink, where conventions differ
            assert near(high[f"d{tensors(name)[0].name}"], grad, "f32")[smooth].all(), (attrs, high, grad)


RIGHT: list[tuple[str, dict[str, Any], list[float], list[float], list[float]]] = [
    ("silu", {}, [-1e4, -200.0, -100.0, -88.0], [0, 0, -3.72e-42, -5.328e-37], [0, 0, -3.7e-42, -5.268e-37]),
    ("silu", {}, [0.0], [0], [0.5]),
    ("sigmoid", {}, [-125.0, 125.0, 0.0], [0, 1, 0.5], [0, 0, 0.25]),
    ("tanh", {}, [50.0, -50.0], [1, -1], [0, 0]),
    ("gelu", {"approximate": "tanh"}, [10.5, 15.5, 50.0], [10.5, 15.5, 50], [1, 1, 1]),
    ("gelu", {"approximate": "none"}, [10.5, 15.5, 50.0], [10.5, 15.5, 50], [1, 1, 1]),
    ("softplus", {}, [-30.0, 20.0, 50.0, 100.0], [9.3576e-14, 20, 50, 100], [9.3576e-14, 1, 1, 1]),
    ("softplus", {"beta": 5, "threshold": 1e9}, [-30.0, 18.0, 100.0], [1.4e-66, 18, 100], [7.2e-66, 1, 1]),
    ("sqrt", {}, [0.0, 4.0], [0, 2], [INF, 0.25]),
    ("relu", {}, [NAN, -1.0, 0.0, INF], [NAN, 0, 0, INF], [1, 0, 0, 1]),
    ("clamp", {"min": 0, "max": 1}, [NAN, 0.0, 1.0, 2.0], [NAN, 0, 1, 1], [0, 1, 1, 0]),
    ("abs", {}, [0.0, -2.0], [0, 2], [0, -1]),
    ("rsqrt", {}, [0.0, 4.0], [INF, 0.5], [-INF, -0.0625]),
    ("logsigmoid", {}, [-200.0, 200.0, 0.0], [-200, 0, -0.6931472], [1, 0, 0.5]),
    ("expm1", {}, [1e-6, -200.0], [1.0000005e-6, -1], [1.000001, 0]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "attrs", "x", "y", "dx"), [r for r in RIGHT if r[0] in OPS])
def test_right_values_at_the_edges(name: str, attrs: dict[str, Any], x: Any, y: Any, dx: Any) -> None:
    """C001, C003, C004, C017, C023: what mathematics, or a stated convention, gives; small tails keep their digits."""
    found = differentiate(name, {"x": tensor(x)}, {**attrs_of(name), **attrs})
    for got, want in ((found["output 0"], y), (found["dx"], dx)):
        want = tensor(want, "f64")
        close = (got.double() - want).abs() <= 1e-3 * want.abs() + 1e-42
        assert (close | (got == want) | (got.isnan() & want.isnan()) | ((got - want).abs() < 1e-38)).all(), (got, want)
        assert not (got.isnan() & ~want.isnan()).any()


@pytest.mark.parametrize("name", UNARY)
def test_nan_is_never_hidden(name: str) -> None:
    """C016, C017: an op of one float tensor gives NaN for NaN, unless replacing it is what the op is for."""
    for attrs in choices(name):
        for dtype in ("f16", "f32"):
            x = tensor([NAN, 1.0, -NAN], dtype)
            (y,) = case(name).call({tensors(name)[0].name: x}, attrs)
            meant = reference(name, {tensors(name)[0].name: x.float()}, attrs)
            assert (y.isnan() | (y.float() == meant))[::2].all(), (attrs, y, meant)


@pytest.mark.parametrize("name", [n for n in UNARY if n in GRADIENTS])
def test_a_nan_cotangent_goes_on(name: str) -> None:
    """C017: a diverged run shows in the gradients too, wherever the derivative is not 0."""
    given = filled(name, [(9,)])
    plain = differentiate(name, given, attrs_of(name))
    key = f"d{tensors(name)[0].name}"
    found = differentiate(name, given, attrs_of(name), tensor(NAN))[key]
    assert (found.isnan() | (plain[key] == 0)).all()


@pytest.mark.parametrize("name", UNARY)
def test_infinities(name: str) -> None:
    """C016: at infinity the value is torch's wherever torch has one, and so is the derivative."""
    for attrs in choices(name):
        found = differentiate(name, {tensors(name)[0].name: tensor([INF, -INF, 1.0])}, attrs)
        leaf = tensor([INF, -INF, 1.0], "f64").requires_grad_()
        meant = reference(name, {tensors(name)[0].name: leaf}, attrs)
        known = ~meant.isnan()
        assert near(found["output 0"], meant, "f32", 64)[known].all(), (attrs, found, meant)
        if meant.requires_grad and len(found) > 1:
            (grad,) = torch.autograd.grad(meant.sum(), leaf)
            got = found[f"d{tensors(name)[0].name}"]
            assert near(got, grad, "f32", 64)[known & ~grad.isnan()].all(), (attrs, got, grad)


@pytest.mark.parametrize("name", present("maximum", "minimum", "fmax", "fmin"))
def test_ties_and_nan_of_a_choice_between_two(name: str) -> None:
    """C013, C016: equal operands share the cotangent, its total stays 1, and NaN wins whichever side it is on."""
    one, ties = tensor([1.0, 0.0, INF]), tensor([1.0, -0.0, INF])
    leaves = [v.detach().requires_grad_() for v in (one, ties)]
    grads = torch.autograd.grad(getattr(generated, name)(*leaves), leaves, tensor([1.0, 1.0, 1.0]))
    assert grads[0].tolist() == grads[1].tolist() == [0.5, 0.5, 0.5]
    a, b = tensor([NAN, 1.0, NAN]), tensor([1.0, NAN, INF])
    meant = getattr(torch, name)(a, b)
    assert torch.equal(getattr(generated, name)(a, b).isnan(), meant.isnan())


def test_pow_at_base_zero_and_below() -> None:
    """C010: no NaN where the derivative exists, infinities where it is infinite, NaN only below 0."""
    x, y = tensor([0.0, 0, 0, 2, -2, -2], "f64"), tensor([0.0, 2, -1, 0.5, 2, 0.5], "f64")
    for dtype in ("f64", "f32"):
        found = differentiate("pow", {"x": x.to(TORCH[dtype]), "exponent": y.to(TORCH[dtype])}, {})
        dx = tensor([0.0, 0.0, -INF, 0.5 * 2**-0.5, -4.0, NAN], "f64")
        dy = tensor([0.0, 0.0, -INF, 2**0.5 * math.log(2), NAN, NAN], "f64")
        assert near(found["dx"], dx, dtype).all() and near(found["dexponent"], dy, dtype).all(), found
    # Of an infinite base, of -0, and of magnitudes that square out of range: as torch has them.
    x, y = (
        v.flatten()
        for v in torch.meshgrid(
            tensor([INF, -INF, -0.0, 1e-30, 1e30], "f64"),
            tensor([-2.0, -1, 0.25, 0.3, 0.5, 1, 2], "f64"),
            indexing="ij",
        )
    )
    for dtype in ("f64", "f32"):
        given = {"x": x.to(TORCH[dtype]), "exponent": y.to(TORCH[dtype])}
        theirs = [v.double().requires_grad_() for v in given.values()]
        found, meant = differentiate("pow", given, {}), torch.autograd.grad(torch.pow(*theirs).sum(), theirs)
        assert near(found["dx"], meant[0], dtype, 64).all(), (found["dx"], meant[0])
        there = ~meant[1].isnan() | (x < 0)  # an infinity times 0 is nothing that one relies on
        assert near(found["dexponent"], meant[1], dtype, 64)[there].all(), (found["dexponent"], meant[1])
    exponent = tensor([0.0, 1.0, -1.0]).requires_grad_()
    (grad,) = torch.autograd.grad(generated.pow(0.0, exponent).sum(), exponent)
    assert grad.tolist() == [0.0, 0.0, -INF]


@pytest.mark.parametrize("bad", [NAN, INF])
def test_the_side_not_taken_cannot_poison(bad: float) -> None:
    """C012: a value or a cotangent where the other side is taken is selected away, never multiplied by 0."""
    condition = torch.tensor([True, False], device=DEVICE)
    x, other = tensor([1.0, bad]), tensor([bad, 2.0])
    assert generated.where(condition, x, other).tolist() == [1.0, 2.0]
    assert generated.masked_fill(x, ~condition, 3.0).tolist() == [1.0, 3.0]
    found = differentiate("where", {"condition": condition, "x": x, "other": other}, {}, tensor([bad, 1.0]))
    assert found["dx"][1] == 0 and found["dother"][1] == 1 and found["dother"][0] == 0
    found = differentiate("masked_fill", {"x": x, "mask": condition, "value": tensor(0.0)}, {}, tensor([bad, 1.0]))
    assert found["dx"].tolist() == [0.0, 1.0]


@pytest.mark.parametrize("name", FLOATING)
def test_one_rounding_at_the_store(name: str) -> None:
    """C025, C059: half types are computed in float32 and rounded once: the forward is within one unit of the truth."""
    for attrs, dtype in itertools.product(choices(name), ("bf16", "f16")):
        given = filled(name, [(4, 8) if "(" in tensors(name)[0].dims else (257,)], dtype)
        wide = {n: v.double() if v.is_floating_point() else v for n, v in given.items()}
        for got, want in zip(case(name).call(given, attrs), case(name).call(wide, attrs)):
            ulp = EPS[dtype] * torch.exp2(torch.floor(torch.log2(want.abs().clamp_min(2.0**-14))))
            ulp += 16 * EPS["f32"] * max(v.abs().max().item() for v in wide.values() if v.is_floating_point())  # inside
            units = 1.01 if DEVICE == "cpu" and dtype == "bf16" else 0.75  # the interpreter cuts bf16 off
            assert ((got.double() - want).abs() <= units * ulp)[want.isfinite()].all(), attrs


@pytest.mark.parametrize("name", FLOATING)
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_half_types_at_values_whose_powers_overflow(name: str, dtype: str) -> None:
    """C003, C006, C059: 50 cubed is past the end of float16; value and gradients stay those of float64."""
    values = [50.0, -50.0, 40.5, 10.5, -10.5, 13.0, 3.0, -0.125]
    for attrs in choices(name):
        given = {}
        for k, t in enumerate(tensors(name)):
            shape = case(name)._shape(t, (4, 8) if all(u.dims in ("...", "") for u in tensors(name)) else (8,), {})
            if t.dtype in ("bool", "int") or math.prod(shape) == 1:
                given[t.name] = case(name)._values(t, shape, dtype, k)
                continue
            rolled = (values[k:] + values[:k]) * 32
            low, high = case(name).domains.get(t.name, (-INF, INF))
            given[t.name] = tensor(rolled, dtype)[: math.prod(shape)].reshape(shape).clamp(low, high)
        wide = {n: v.double() if v.is_floating_point() else v for n, v in given.items()}
        low, high = differentiate(name, given, attrs), differentiate(name, wide, attrs)
        for key in low:
            assert near(low[key], high[key], dtype, 8).all(), (key, attrs, low[key], high[key])


@pytest.mark.parametrize("name", present("gelu", "geglu", "bias_gelu"))
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_tanh_gelu_of_fifty_in_half_precision(name: str, dtype: str) -> None:
    """C006: y = 50 and dx = 1, although the cube inside is past the end of float16."""
    ones = {t.name: tensor([1.0 if t.name == "up" else 0.0], dtype) for t in tensors(name)[1:]}
    found = differentiate(name, {tensors(name)[0].name: tensor([50.0], dtype), **ones}, {"approximate": "tanh"})
    assert found["output 0"].item() == 50 and found[f"d{tensors(name)[0].name}"].item() == 1


def test_a_quotient_of_floats() -> None:
    """C026: an approximate division may be off by units in the last place, never by more."""
    for dtype, units in (("f32", 2), ("f64", 0)):
        y = generated.div(tensor([4.6875, 1.0, 10.0], dtype), tensor([0.9375, 3.0, 5.0], dtype))
        want = tensor([5.0, 1 / 3, 2.0], "f64").to(TORCH[dtype])
        assert ((y - want).abs() <= units * EPS[dtype] * want).all(), y


@pytest.mark.parametrize("name", present("remainder", "fmod", "floor_divide"))
def test_division_by_zero_is_the_same_every_run(name: str) -> None:
    """C019: of floats NaN or an infinity, as torch has it, and nothing else computed beside it changes that."""
    x, zero = tensor([2.0, -2.0, 0.0]), tensor([0.0, 0.0, 0.0])
    ours, theirs = getattr(generated, name)(x, zero), getattr(torch, name)(x, zero)
    assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0)) and torch.equal(ours.isnan(), theirs.isnan())


def test_bf16_is_computed_on_values() -> None:
    """C067: the interpreter once computed on bit patterns."""
    assert generated.add(tensor([2.5], "bf16"), tensor([2.0], "bf16")).item() == 4.5
    assert generated.maximum(tensor([NAN], "bf16"), tensor([1.0], "bf16")).isnan().item()


# ---------------------------------------------------------------------------------------------- shapes, strides, layout


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_cotangent_of_stride_zero(name: str) -> None:
    """C043: what `sum().backward()` gives, and rows or columns that are repeated, equal their dense copies."""
    given, attrs = filled(name, [(2, 3, 8)]), attrs_of(name)
    whole = case(name).call(given, attrs)[0].shape
    row, column = torch.randn(whole[-1], device=DEVICE), torch.randn(whole[-2], 1, device=DEVICE)
    for view in (torch.full((), 1.5, device=DEVICE), row, column):
        stretched, dense = view.expand(whole), view.expand(whole).contiguous()
        same(differentiate(name, given, attrs, stretched), differentiate(name, given, attrs, dense))


@pytest.mark.parametrize("name", OPS)
def test_operands_of_stride_zero_and_crossed_memory(name: str) -> None:
    """C047, C053: transposed, repeated and every-second operands give what dense ones give, in the tensor returned."""
    given = filled(name, [(4, 6)], "f32" if takes(name, "f32") else case(name).usual)
    views: list[Callable[[Any], Any]] = [
        lambda v: v.mT.contiguous().mT,
        lambda v: torch.stack([v, v], -1)[..., 1],
        lambda v: v[..., :1].expand(v.shape),
        lambda v: v[:1].expand(v.shape),
    ]
    for turn in range(len(views)):  # each operand in each layout, beside others in other layouts
        order = itertools.cycle(views[turn:] + views[:turn])
        laid = {n: view(v) if v.dim() > 1 else v for view, (n, v) in zip(order, given.items())}
        dense = {n: v.clone(memory_format=torch.contiguous_format) for n, v in laid.items()}
        same(differentiate(name, laid, attrs_of(name)), differentiate(name, dense, attrs_of(name)))


@pytest.mark.parametrize("name", [n for n in GRADIENTS if len(op_class(n).gradients) > 1])
def test_each_gradient_goes_to_its_own_argument(name: str) -> None:
    """C049: by name, with operands that differ: against torch's own derivative of the reference in float64."""
    given = filled(name, [(5, 6)], "f64")
    found = differentiate(name, given, attrs_of(name))
    leaves = {n: v.detach().requires_grad_(f"d{n}" in found) for n, v in given.items()}
    names = [n for n in given if f"d{n}" in found]
    try:
        expected = reference(name, leaves, attrs_of(name))
        total = sum(y.sum() for y in (expected if isinstance(expected, tuple) else (expected,)))
        grads = torch.autograd.grad(total, [leaves[n] for n in names])
    except RuntimeError as error:  # torch has no derivative where ours is 0
        assert "is not implemented" in str(error) or "is not differentiable" in str(error)
        return
    for n, grad in zip(names, grads):
        assert near(found[f"d{n}"], grad, "f64", 256)[grad.isfinite()].all(), n


BROADCASTS = [
    [(3, 1), (1, 4)], [(2, 1, 3, 4), (2, 1, 3, 1)], [(), (5,)], [(4,), (2, 3, 4)],
]  # fmt: skip


@pytest.mark.parametrize("name", [n for n in GRADIENTS if stretching(n)])
@pytest.mark.parametrize("shapes", BROADCASTS, ids=str)
def test_a_backward_returns_gradients_of_its_inputs_own_shapes(name: str, shapes: list[tuple[int, ...]]) -> None:
    """C050: autograd would sum a gradient that is too large in silence, so what the backward itself returns is
    looked at.
    """
    one = case(name)
    given = filled(name, shapes)
    names = one._differentiable(given)
    leaves = {n: v.detach().requires_grad_(n in names) for n, v in given.items()}
    y, *_ = one.call(leaves, attrs_of(name))
    node = y.grad_fn
    returned = node._forward_cls.backward(node, *(torch.ones_like(y) for _ in op_class(name).outputs))
    grads = dict(zip(node.call.names, returned[2:], strict=True))
    for n in given:
        assert (grads[n] is not None) == (n in names)
        if n in names:
            assert grads[n].shape == given[n].shape and grads[n].dtype == given[n].dtype, n


def test_gradients_of_an_outer_product() -> None:
    """C050: (3, 1) times (1, 4)."""
    found = differentiate("mul", {"x": tensor([[1.0], [2], [3]]), "other": tensor([[1.0, 2, 3, 4]])}, {})
    assert found["dx"].tolist() == [[10.0], [10.0], [10.0]] and found["dother"].tolist() == [[6.0, 6.0, 6.0, 6.0]]


@pytest.mark.parametrize("name", PAIRS)
def test_the_same_tensor_twice(name: str) -> None:
    """C013: of f(a, a) the gradient is the sum of both, as for two tensors that are equal."""
    a = filled(name, [(7,)])[tensors(name)[0].name].abs() + 0.5
    names = [t.name for t in tensors(name)]
    if len(op_class(name).gradients) < 2:
        given = {n: a for n in names}
        assert torch.equal(case(name).call(given, attrs_of(name))[0], reference(name, given, attrs_of(name)))
        return
    apart = differentiate(name, {names[0]: a, names[1]: a.clone()}, attrs_of(name))
    leaf = a.detach().requires_grad_()
    (y,) = case(name).call({names[0]: leaf, names[1]: leaf}, attrs_of(name))
    (total,) = torch.autograd.grad(y, leaf, torch.ones_like(y))
    both = sum(v for n, v in apart.items() if n[0] == "d")
    assert near(total, both, "f32").all() and torch.equal(y.detach(), apart["output 0"])


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("shape", [(0,), (0, 128), (3, 0), (2, 0, 4)], ids=str)
def test_empty_tensors(name: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """C054: forward and backward give empty tensors, and nothing is launched on a grid of 0 programs."""
    monkeypatch.setattr(Prepared, "_launch", lambda *_: pytest.fail("a launch over nothing"))
    given = filled(name, [shape], "f32" if takes(name, "f32") else case(name).usual)
    found = differentiate(name, given, attrs_of(name))
    for n in given:
        if f"d{n}" in found:
            assert found[f"d{n}"].shape == given[n].shape and not found[f"d{n}"].any(), n
    assert all(0 in v.shape for key, v in found.items() if key.startswith("output"))


@pytest.mark.parametrize("name", [n for n in GRADIENTS if stretching(n)])
def test_sums_over_nothing_are_zero(name: str) -> None:
    """C054: the gradient of a row that no row of the other meets is 0, not memory as it was found."""
    for shapes in ([(0, 128), (128,)], [(128,), (0, 128)], [(3, 0), (3, 1)]):
        given = filled(name, shapes)
        found = differentiate(name, given, attrs_of(name))
        for n in given:
            if f"d{n}" in found:
                assert torch.equal(found[f"d{n}"], torch.zeros_like(given[n])), n


@pytest.mark.parametrize("name", OPS)
def test_there_is_no_argument_for_a_result_of_another_shape(name: str) -> None:
    """C052: results are always new tensors; `out` and `inplace` do not exist, so none is resized or left half
    written.
    """
    assert not {"out", "inplace"} & set(inspect.signature(getattr(generated, name)).parameters)
    with pytest.raises(TypeError):
        getattr(generated, name)(out=None)


# ---------------------------------------------------------------------------------------------- dtypes and scalars

MIXED = [("f16", "bf16"), ("bf16", "f32"), ("f32", "f64"), ("f16", "f16"), ("i32", "i64"), ("i64", "f16"),
         ("bool", "f32"),
         ("bool", "i32"), ("bool", "bool")]  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        n
        for n in STRETCHING
        if len(tensors(n)) == len(op_class(n).inputs) == 2
        and specs()[n].reference
        and "reduction" not in op_class(n).kinds
    ],  # each of torch's losses has a way of its own
)
@pytest.mark.parametrize(("left", "right"), MIXED)
def test_promotion_of_every_op_is_torchs(name: str, left: str, right: str) -> None:
    """C061: for each pair of dtypes that both take, with dims and without, the result's dtype is torch's."""
    a, b = op_class(name).inputs
    if left not in a.dtypes or right not in b.dtypes:
        return
    for first, second in (((3,), (3,)), ((3,), ()), ((), (3,)), ((), ())):
        given = {a.name: tensor(1.0, left).expand(first), b.name: tensor(1.0, right).expand(second)}
        try:
            meant = reference(name, given, attrs_of(name))
        except RuntimeError:  # torch itself has no kernel for it
            continue
        (y,) = case(name).call(given, attrs_of(name))
        assert y.dtype == meant.dtype, (first, second)


@pytest.mark.parametrize(
    "name", [n for n in STRETCHING if op_class(n).gradients and [t.dtype for t in tensors(n)].count("float") > 1]
)
def test_bf16_beside_float64(name: str) -> None:
    """C061: computed in float64, and each gradient in the dtype of its own input, one rounding off."""
    given = case(name).inputs("matrix", "bf16")
    wide = {n: v.double() if v.is_floating_point() else v for n, v in given.items()}
    first = tensors(name)[0].name
    found, right = (case(name)._results(v, attrs_of(name), "f64") for v in ({**wide, first: given[first]}, wide))
    for (key, got), want in zip(found.items(), right.values(), strict=True):
        if key.startswith("gradient"):
            assert got.dtype == (torch.bfloat16 if key == f"gradient of {first}" else torch.float64)
        assert torch.allclose(got.double(), want.double(), rtol=8e-3, atol=1e-6, equal_nan=True), key


NUMBERS = [n for n in STRETCHING if any(t.scalar for t in op_class(n).inputs) and len(op_class(n).inputs) == 2]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("dtype", ["bf16", "f32", "i32", "i64"])
@pytest.mark.parametrize("number", [1, 2, 1.5])
def test_a_number_never_widens_its_own_kind(name: str, dtype: str, number: float) -> None:
    """C061, C064: bf16 with 1.5 stays bf16, int64 with 1.5 is float32, and the integer 1 is like any other."""
    if not takes(name, dtype):
        return
    x, other = op_class(name).inputs
    if not isinstance(number, int) and other.dtype in ("int", "integral"):
        return
    given = {x.name: tensor([1.0, 2.0, 3.0], dtype), other.name: number}
    (y,) = case(name).call(given, attrs_of(name))
    meant = reference(name, given, attrs_of(name))
    assert y.dtype == meant.dtype
    assert near(y, meant, "f32").all() if dtype == "f32" else torch.allclose(y.double(), meant.double(), rtol=1e-2)


def from_inputs(name: str) -> bool:
    """Whether a backward reads no output again, which was rounded when it was stored."""
    op = op_class(name)
    return not set(op.residuals) & {t.name for t in op.outputs}


@pytest.mark.parametrize("name", [n for n in GRADIENTS if op_class(n).params and from_inputs(n)])
def test_parameters_keep_their_own_dtype(name: str) -> None:
    """C062: activations in bf16 with float32 parameters: the output is bf16, each gradient has its tensor's dtype."""
    params = {t.name for t in op_class(name).params}
    given = {n: v.float() if n in params else v.bfloat16() for n, v in filled(name, [(5, 6), (6,)], "f64").items()}
    found = differentiate(name, given, attrs_of(name))
    exact = differentiate(name, {n: v.double() for n, v in given.items()}, attrs_of(name))
    assert found["output 0"].dtype == torch.bfloat16
    for n in params:
        assert found[f"d{n}"].dtype == torch.float32
        assert near(found[f"d{n}"], exact[f"d{n}"], "f32", 64 if DEVICE == "cpu" else 256).all()


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("shape", [(), (1, 1), (5, 1), (1, 7)], ids=str)
def test_extents_and_strides_of_one(name: str, shape: tuple[int, ...]) -> None:
    """C064: an integer argument that equals 1 becomes a constant in Triton: extents and strides of 1 too."""
    shape = shape or () if name in ELEMENTWISE else shape or (1,)
    given = filled(name, [shape], "f32" if takes(name, "f32") else case(name).usual)
    if name == "instance_norm" and math.prod(shape) < 2:  # one value has no variance
        with pytest.raises(ValueError, match=r"requires \(size"):
            differentiate(name, given, attrs_of(name))
        return
    packed = {t.name for t in tensors(name) if "..." in t.dims.split(", ")}
    front = {t.name: next((k for k, d in enumerate(parse_dims(t.dims)) if d.pack), 0) for t in tensors(name)}
    many = {n: torch.stack([v, v], front[n]) if n in packed else v for n, v in given.items()}
    result = next((k for k, d in enumerate(parse_dims(op_class(name).outputs[0].dims)) if d.pack), 0)
    ours, wide = (differentiate(name, values, attrs_of(name)) for values in (given, many))
    for key in ours:
        name_of = key.removeprefix("d") if key.startswith("d") else tensors(name)[0].name
        if name_of in packed:
            first = wide[key].select(front[name_of] if key.startswith("d") else result, 0)
            assert first.shape == ours[key].shape and near(first, ours[key], "f32").all(), key


@pytest.mark.parametrize("name", [n for n in OPS if any(k in ("float", "float?") for k in op_class(n).kinds.values())])
@pytest.mark.parametrize("value", [0, 1, 2, -1])
def test_whole_numbers_as_attrs(name: str, value: int) -> None:
    """C064: an int given for a float attr is that float: 1 is 1.0."""
    kinds = op_class(name).kinds
    given = filled(name, [(9,)], "f32" if takes(name, "f32") else case(name).usual)
    for attr in (n for n, kind in kinds.items() if kind in ("float", "float?")):
        results = []
        for number in (value, float(value)):
            try:
                results.append(differentiate(name, given, {**attrs_of(name), attr: number}))
            except ValueError as error:  # what the op requires of the attr
                assert attr in str(error)
        assert len(results) != 1
        if results:
            same(*results)


# --------------------------------------------------------------------------------------------- overflow, grids, devices


def metas(
    name: str, shape: tuple[int, ...], strides: tuple[int, ...] | None = None, dtype: str = "f32"
) -> dict[str, Any]:
    """Tensors without memory: each of the same shape, or without dims where it has none."""
    out: dict[str, Any] = {}
    for t in tensors(name):
        own = dtype if dtype in t.dtypes else t.dtypes[0]
        whole = case(name)._shape(t, shape, {})
        steps = dense_strides(whole) if strides is None or len(whole) != len(strides) else strides
        out[t.name] = Meta(own, whole, steps) if t.dims != "" else Meta(own, (), ())
    return out


def planned(name: str, given: dict[str, Any], needed: tuple[str, ...] | None = None) -> list[Launch]:
    """The launches of forward and backward."""
    op = op_class(name)(**attrs_of(name))
    forward = op.plan_forward(given)
    out = list(forward.launches)
    if op.has_backward:
        cotangents = {f"d{n}": m for n, m in forward.outputs.items()}
        wanted = needed or tuple(n for n in op.gradients if given[n].dtype in FLOATS)
        out += op.plan_backward({**given, **forward.outputs, **cotangents}, wanted, 132).launches
    return out


@pytest.mark.parametrize("name", OPS)
def test_offsets_past_two_to_the_31_are_planned_wide(name: str) -> None:
    """C068, C070: by extent (3.27e9 elements) or by stride (319 rows of 7,864,320); what is below stays narrow."""
    if any(t.dims not in ("...", "") for t in tensors(name)):
        big: tuple[int, ...] = (65537, 32768)
    else:
        big = (798_000, 4_096)
        forward, *others = planned(name, metas(name, (319, 4), (7_864_320, 2)))
        assert forward.values["WIDE"]
        for launch in others:  # one that reads no such tensor has no such offset
            strided = any(v and 7_864_320 in v for n, v in launch.values.items() if n.endswith("_strides"))
            assert launch.values["WIDE"] == strided
    own = {*metas(name, big), *(t.name for t in op_class(name).outputs)}
    for launch in planned(name, metas(name, big)):
        buffers = {t.name for t in op_class(name).buffers}
        statistics = (
            not ({n.removeprefix("d") for n in launch.pointers.values()} & own) - buffers
        )  # few, and read by themselves
        assert launch.values["WIDE"] or (statistics and buffers)
    for launch in planned(name, metas(name, (1024, 4096))):
        assert not launch.values["WIDE"]


@pytest.mark.parametrize("name", [n for n in GRADIENTS if stretching(n)])
def test_sums_past_two_to_the_31_are_planned_wide(name: str) -> None:
    """C068: a small gradient that is summed over a large tensor walks 64-bit offsets too."""
    given = metas(name, (524_288, 4_096))
    first = next(t.name for t in tensors(name) if t.dims == "..." and t.name in op_class(name).gradients)
    given[first] = Meta("f32", (4_096,), (1,))
    launches = planned(name, given, (first,))
    assert launches[0].values["WIDE"] and launches[1].values["WIDE"]


HUGE = [(2**33,), (2**26, 64), (64, 2**26), (2**20, 2**13), (1, 2**33), (2**33, 1)]


@pytest.mark.parametrize("name", OPS)
def test_grids_stay_within_their_limits_and_cover_everything(name: str) -> None:
    """C056: at most 2**31 - 1 programs along x and 65535 along y; together they reach the last element."""
    for shape in HUGE:
        for launch in planned(name, metas(name, shape)):
            x, y, z = launch.grid
            assert 0 < x < 2**31 and 0 < y < 65536 and z == 1
            if launch.values.get("patch_sizes") is None:
                block = launch.values.get("BLOCK_K", launch.values.get("BLOCK", 0))
                if any(p[0] == "d" and p.endswith("_part_ptr") for p in launch.pointers) and "LOOP" in launch.values:
                    block = launch.values["span"]
                assert x * block >= launch.values.get("n_kept", launch.values.get("n", 0))
    for shape in ((2**26, 128), (128, 2**26), (8, 2**26, 8)) if name in GRADIENTS and stretching(name) else ():
        given = metas(name, shape)
        last = [t.name for t in tensors(name) if t.dims == "..." and t.name in op_class(name).gradients][-1]
        for small in ((shape[-1],), (shape[0], *(1 for _ in shape[1:])), ()):
            given[last] = Meta("f32", small, dense_strides(small))
            for launch in planned(name, given, (last,)):
                x, y, z = launch.grid
                assert 0 < x < 2**31 and 0 < y < 65536 and z == 1
                if "span" in launch.values:
                    assert x * launch.values["BLOCK_K"] >= launch.values["n_kept"]
                    assert y * launch.values["span"] >= launch.values["n_reduced"]


@pytest.mark.parametrize("name", OPS)
def test_warps_fit_every_device(name: str) -> None:
    """C073: a program has 1024 threads at most."""
    assert all(launch.warps <= 32 for launch in planned(name, metas(name, (64, 128))))


def test_wavefronts_of_64_lanes_are_fewer() -> None:
    """C073: where a warp has 64 lanes 16 of them are a program."""
    asked = []

    class Jit:
        fn = staticmethod(test_warps_fit_every_device)

        def __getitem__(self, grid: Any) -> Any:
            return lambda *_, num_warps, **__: asked.append(num_warps)

    jit = Jit()
    launch = op_class("softmax")(dim=-1).plan_forward({"x": Meta("f32", (64, 30000), (30000, 1))}).launches[0]
    assert launch.warps == 32
    for most in (16, 32):
        start = PreparedLaunch(replace(launch, kernel=replace(launch.kernel, function=jit)), {}, Limits(most))
        start([], {}, ())
    assert asked == [16, 32]


def test_tiles_in_hand_fit_the_shared_memory_of_a_device() -> None:
    """C073: of a device that has less of it, fewer are on their way at a time, and one is always there."""
    (launch,) = op_class("softmax")(dim=-1).plan_forward({"x": Meta("f32", (4, 8), (8, 1))}).launches
    many = replace(launch, stage_bytes=64 * 1024, values={**launch.values, "STAGES": 4})
    wanted = {32: 1, 64: 1, 99: 2, 163: 3, 227: 4, 512: 4}
    assert {kib: many.on(Limits(32, kib * 1024)).values["STAGES"] for kib in wanted} == wanted
    assert launch.on(Limits(32, 1024)) == launch


@pytest.mark.parametrize("backward", [False, True])
def test_launches_happen_on_the_tensors_own_device(backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """C071: a guard of the tensor's device stands around the launches of a direction where another device is the current one."""
    entered: list[Any] = []

    class Guard:
        def __init__(self, device: Any) -> None:
            self.device = device

        def __enter__(self) -> None:
            entered.append(self.device)

        def __exit__(self, *_: Any) -> None:
            entered.append(None)

    seen: list[Any] = []
    lib, away, meta, x = torch_library(), torch.device("cuda", 1), Meta("f32", (3,), (1,)), torch.ones(3)
    op = op_class("silu")()
    monkeypatch.setattr(torch.cuda, "device", Guard)
    monkeypatch.setattr(lib, "_limits", {away: Limits()})
    monkeypatch.setattr(Prepared, "_launch", lambda *_: seen.append(entered[-1] if entered else None))
    if backward:
        plan, names = op.plan_backward({"x": meta, "y": meta, "dy": meta}, ["x"], 132), ("x", "dy")
    else:
        plan, names = op.plan_forward({"x": meta}), ("x",)
    prepared = Prepared(plan, names, plan.outputs, {}, away, lib)
    monkeypatch.setattr(prepared, "_empty", lambda shape, strides, dtype, device: torch.empty(shape, dtype=dtype))
    for current, guards in ((0, [away, None]), (1, [])):
        monkeypatch.setattr(torch.cuda, "current_device", lambda current=current: current)
        entered.clear()
        seen.clear()
        prepared.run(op, [x] * len(names))
        assert entered == guards and seen == (guards[:1] or [None])


FAR_AWAY = [DEVICE] if DEVICE == "cuda" and torch.cuda.mem_get_info()[0] > 2**34 else []


@pytest.mark.parametrize("device", FAR_AWAY)
def test_elements_past_two_to_the_31(device: str) -> None:
    """C068: two rows that lie 2**31 elements apart, forward and backward, on a GPU with the memory for it."""
    memory = torch.empty(2**31 + 64, dtype=torch.bfloat16, device=device)
    x = memory.as_strided((2, 8), (2**31 + 16, 2))
    x.copy_(torch.randn(2, 8))
    same(*(differentiate("silu", {"x": v}, {}) for v in (x, x.contiguous())), "bf16")
    row = torch.randn(8, dtype=torch.bfloat16, device=device)
    same(*(differentiate("mul", {"x": v, "other": row}, {}) for v in (x, x.contiguous())), "bf16")


@pytest.mark.parametrize("name", [n for n in STRETCHING if len(op_class(n).inputs) > 1])
def test_mixed_devices_are_named(name: str) -> None:
    """C072: the argument that is elsewhere, and both devices."""
    dtype = "f32" if takes(name, "f32") else case(name).usual
    given = filled(name, [(3,)], dtype)
    last = op_class(name).inputs[-1]
    given[last.name] = given[last.name].to("meta")
    with pytest.raises(ValueError, match=f"{name}: `{last.public}` is on meta, `.*` on {DEVICE}"):
        case(name).call(given, attrs_of(name))


# ---------------------------------------------------------------------------------------------- autograd's contract


@pytest.mark.parametrize("name", GRADIENTS)
def test_nothing_that_autograd_holds_is_written(name: str) -> None:
    """C078: inputs, outputs and the cotangent stay as they were, and a second backward equals the first."""
    one = case(name)
    given = filled(name, [(4, 6), (6,)] if stretching(name) else [(4, 6)])
    names = one._differentiable(given)
    leaves = {n: v.detach().clone().requires_grad_(n in names) for n, v in given.items()}
    outputs = one.call(leaves, attrs_of(name))
    seeds = [torch.randn(y.shape, device=DEVICE).to(y.dtype) for y in outputs]
    kept = [v.detach().clone() for v in (*leaves.values(), *outputs, *seeds)]
    targets = [leaves[n] for n in names]
    first = [g.clone() for g in torch.autograd.grad(outputs, targets, seeds, retain_graph=True)]
    second = torch.autograd.grad(outputs, targets, seeds)
    for a, b in zip((*first, *leaves.values(), *outputs, *seeds), (*second, *kept), strict=True):
        assert torch.equal(a.detach().nan_to_num(7.0), b.nan_to_num(7.0)) and torch.equal(a.isnan(), b.isnan())


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_outputs_are_memory_of_their_own(name: str) -> None:
    """C087: no output is an input, a view of one, or another output, whatever the layout; gradients likewise."""
    dtype = "f32" if takes(name, "f32") else case(name).usual
    for view in (lambda v: v, lambda v: v.mT.contiguous().mT, lambda v: v[:, :1].expand(v.shape)):
        given = {n: view(v) if v.dim() > 1 else v for n, v in filled(name, [(6, 6)], dtype).items()}
        found = differentiate(name, given, attrs_of(name))
        own = [v.untyped_storage().data_ptr() for k, v in found.items() if k.startswith("output")]
        assert not set(own) & {v.untyped_storage().data_ptr() for v in given.values()} and len(set(own)) == len(own)


@pytest.mark.parametrize("name", OPS)
def test_planned_strides_are_real_strides(name: str) -> None:
    """C087: what a plan says of an output, without any memory, is what a call returns."""
    dtype = "f32" if takes(name, "f32") else case(name).usual
    for view in (
        lambda v: v,
        lambda v: v.mT.contiguous().mT,
        lambda v: v.movedim(0, -1).contiguous().movedim(-1, 0),
        lambda v: v[:, :1].expand(v.shape),
    ):
        given = {n: view(v) if v.dim() > 2 else v for n, v in filled(name, [(2, 6, 6)], dtype).items()}
        if any(t.dims not in ("...", "") for t in tensors(name)) and any(v.shape[-1] % 2 for v in given.values()):
            continue
        words = {torch_dtype: word for word, torch_dtype in TORCH.items()}
        shapes = {n: Meta(words[v.dtype], tuple(v.shape), v.stride()) for n, v in given.items()}
        plan = op_class(name)(**attrs_of(name)).plan_forward(shapes)
        for y, meta in zip(case(name).call(given, attrs_of(name)), plan.outputs.values(), strict=True):
            assert (tuple(y.shape), y.stride(), y.dtype) == (meta.shape, meta.strides, TORCH[meta.dtype])


@pytest.mark.parametrize("name", OPS)
def test_no_gradient_is_silently_missing(name: str) -> None:
    """C080, C120: an op gives a gradient, or says at the call that it has none; only steps to bool and int are
    silent.
    """
    given = filled(name, [(4, 6)], "f32" if takes(name, "f32") else case(name).usual)
    leaves = {n: v.requires_grad_() if v.is_floating_point() else v for n, v in given.items()}
    wanting = [n for n, v in leaves.items() if v.requires_grad]
    if not wanting:
        return
    if not op_class(name).gradients and any(t.dtype not in ("bool", "int", *INTS) for t in op_class(name).outputs):
        with pytest.raises(RuntimeError, match="not_differentiable"):
            case(name).call(leaves, attrs_of(name))
        return
    outputs = case(name).call(leaves, attrs_of(name))
    constant = [n for n in wanting if n not in op_class(name).gradients]
    if constant and op_class(name).gradients:
        with pytest.raises(RuntimeError, match=f"{name}: the gradient of `.*` is declared `not_differentiable`"):
            torch.autograd.grad(outputs[0].sum(), [leaves[n] for n in wanting])
        wanting = [n for n in wanting if n not in constant]
        outputs = case(name).call({n: v.detach() if n in constant else v for n, v in leaves.items()}, attrs_of(name))
    assert all(y.requires_grad == y.is_floating_point() for y in outputs)
    if outputs[0].requires_grad:
        grads = torch.autograd.grad(outputs[0].sum(), [leaves[n] for n in wanting])
        assert all(g is not None and g.shape == leaves[n].shape for n, g in zip(wanting, grads))


@pytest.mark.parametrize("name", [n for n in GRADIENTS if len(op_class(n).gradients) > 1])
def test_what_is_frozen_costs_nothing(name: str) -> None:
    """C081: every subset of what may be needed: others stay None and have no pointer; nothing needed, nothing
    recorded.
    """
    given = filled(name, [(4, 6)])
    op = op_class(name)(**attrs_of(name))
    shapes = metas(name, (4, 6))
    forward = op.plan_forward(shapes)
    everything = {**shapes, **forward.outputs, **{f"d{n}": m for n, m in forward.outputs.items()}}
    whole = differentiate(name, given, attrs_of(name))
    for count in range(len(op.gradients) + 1):
        for chosen in itertools.combinations(op.gradients, count):
            leaves = {n: v.detach().requires_grad_(n in chosen) for n, v in given.items()}
            outputs = case(name).call(leaves, attrs_of(name))
            assert outputs[0].requires_grad == bool(chosen)
            if not chosen:
                continue
            plan = op.plan_backward(everything, chosen, 132)
            assert set(plan.outputs) == {f"d{n}" for n in chosen}
            targets = {name for launch in plan.launches for name in launch.pointers.values() if name[0] == "d"}
            assert not targets & {f"d{n}" for n in op.gradients if n not in chosen}
            torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
            assert all((leaves[n].grad is not None) == (n in chosen) for n in op.gradients)
            for n in chosen:
                assert near(leaves[n].grad, whole[f"d{n}"], "f32").all()


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_second_derivative_is_refused(name: str) -> None:
    """C083: a gradient penalty gets an error, never a term that is silently absent."""
    given = filled(name, [(4, 6)])
    names = case(name)._differentiable(given)
    leaves = {n: v.detach().requires_grad_(n in names) for n, v in given.items()}
    y, *_ = case(name).call(leaves, attrs_of(name))
    dy = torch.ones_like(y).requires_grad_()
    grads = torch.autograd.grad(y, [leaves[n] for n in names], dy, create_graph=True)
    passed = op_class(name)(**attrs_of(name)).passes()
    for n, grad in zip(names, grads):
        if n not in passed:
            with pytest.raises(RuntimeError, match="first derivatives only"):
                torch.autograd.grad(grad.sum(), [leaves[n], dy], retain_graph=True, allow_unused=True)


@pytest.mark.parametrize("name", GRADIENTS)
def test_what_is_kept_goes_through_hooks_and_checkpoints(name: str) -> None:
    """C084: tensors are saved where autograd can see them: hooks may move them, a checkpoint computes them again."""
    given, words = filled(name, [(4, 6)]), {dtype: word for word, dtype in TORCH.items()}
    packed: list[Any] = []

    def pack(value: Any) -> Any:
        packed.append(value)
        return value.cpu()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value.to(DEVICE)):
        hooked = differentiate(name, given, attrs_of(name))
    plain = differentiate(name, given, attrs_of(name))
    same(hooked, plain)
    op = op_class(name)(**attrs_of(name))
    kept = op.residual_shapes({n: Meta(words[v.dtype], tuple(v.shape), v.stride()) for n, v in given.items()})
    assert len(packed) == len(kept) or any(t.scalar for t in tensors(name))
    leaves = {n: v.detach().requires_grad_(f"d{n}" in plain) for n, v in given.items()}
    outputs = torch.utils.checkpoint.checkpoint(lambda: case(name).call(leaves, attrs_of(name)), use_reentrant=False)
    torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
    same(
        {f"d{n}": v.grad for n, v in leaves.items() if v.grad is not None},
        {n: v for n, v in plain.items() if n[0] == "d"},
    )


@pytest.mark.parametrize("name", OPS)
def test_vmap_is_refused_and_grad_works(name: str) -> None:
    """C085: torch.func.vmap gets an error that names the op; torch.func.grad gives the gradient."""
    dtype = "f32" if takes(name, "f32") else case(name).usual
    given = filled(name, [(2, 6)], dtype)
    mapped = [n for n, v in given.items() if v.dim() > 1]

    def call(*values: Any) -> Any:
        return case(name).call({**given, **dict(zip(mapped, values))}, attrs_of(name))

    with pytest.raises(RuntimeError, match=f"{name}: kernels do not run under torch.func.vmap"):
        torch.func.vmap(call)(*(given[n] for n in mapped))
    first = next((k for k, n in enumerate(mapped) if n in op_class(name).gradients), None)
    if first is not None:
        values = [given[n] for n in mapped]
        found = torch.func.grad(lambda *v: sum(y.sum() for y in call(*v)), argnums=first)(*values)
        assert near(found, differentiate(name, given, attrs_of(name))[f"d{mapped[first]}"], "f32").all()


# ---------------------------------------------------------------------------------------------- torch.compile

BACKEND = "inductor" if DEVICE == "cuda" else "aot_eager"


@pytest.fixture
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


COMPILED: dict[str, tuple[Callable[..., Any], Callable[..., Any], list[tuple[int, ...]]]] = {
    "one tensor": (lambda x: generated.silu(x * 2) + 1, lambda x: torch.nn.functional.silu(x * 2) + 1, [(4, 8)]),
    "a number": (lambda x: generated.mul(x, 1.5).cos(), lambda x: (x * 1.5).cos(), [(4, 8)]),
    "a sum": (lambda x, w: generated.mul(x.sin(), w), lambda x, w: x.sin() * w, [(4, 8), (8,)]),
    "a choice": (
        lambda x: generated.gelu(x, approximate="tanh"),
        lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        [(3, 5)],
    ),
    "two ops": (
        lambda x, w: generated.tanh(generated.maximum(x, w)),
        lambda x, w: torch.tanh(torch.maximum(x, w)),
        [(2, 3, 4), (4,)],
    ),
    "no derivative": (lambda x, w: x * generated.eq(x, w), lambda x, w: x * (x == w), [(4, 8), (4, 8)]),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.usefixtures("fresh")
def test_compiled_functions_give_the_same_values_and_gradients(name: str) -> None:
    """C089, C091: forward and backward inside torch.compile, with every subset of frozen inputs and with none
    needed.
    """
    ours, theirs, shapes = COMPILED[name]
    compiled = torch.compile(ours, backend=BACKEND)
    values = [torch.randn(s, device=DEVICE) for s in shapes]
    for needed in itertools.product((True, False), repeat=len(values)):
        leaves = [[v.clone().requires_grad_(need) for v, need in zip(values, needed)] for _ in range(2)]
        results = [f(*own) for f, own in zip((compiled, theirs), leaves)]
        assert torch.allclose(*results, rtol=1e-5, atol=1e-5)
        assert results[0].requires_grad == results[1].requires_grad
        if results[1].requires_grad:
            dy = torch.randn_like(results[0])
            for result in results:
                result.backward(dy)
            for a, b in zip(*leaves):
                assert (a.grad is None) == (b.grad is None)
                assert a.grad is None or torch.allclose(a.grad, b.grad, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        assert torch.allclose(compiled(*values), theirs(*values), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("fresh")
def test_compiled_results_have_the_layout_of_eager_ones() -> None:
    """C087: transposed, channels-last and expanded inputs: the strides within a compiled function are the real ones."""
    compiled = torch.compile(lambda v: generated.silu(v), backend=BACKEND)
    base = torch.randn(2, 3, 4, 5, device=DEVICE)
    for x in (base, base.mT, base.to(memory_format=torch.channels_last), base[:, :1].expand(2, 3, 4, 5)):
        y = compiled(x)
        assert y.stride() == generated.silu(x).stride() and torch.allclose(y, torch.nn.functional.silu(x), atol=1e-5)
        assert y.data_ptr() != x.data_ptr()


@pytest.mark.usefixtures("fresh")
def test_a_kernel_is_a_break_in_the_graph_that_says_so() -> None:
    """C091: with fullgraph=True there is an error that names the op and the remedy, not a wrong gradient."""
    x = torch.randn(4, device=DEVICE, requires_grad=True)
    generated.silu(x)
    compiled = torch.compile(lambda v: generated.silu(v), backend=BACKEND, fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="silu: kernels run between the graphs"):
        compiled(x)


def test_eager_calls_do_not_load_the_compiler() -> None:
    """C093: the question whether a graph is being traced costs a plain call nothing to import."""
    code = (
        f"import sys, torch, generated\nx = torch.ones(3, device={DEVICE!r}, requires_grad=True)\n"
        "generated.silu(x)\nprint('torch._dynamo' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "False", done.stdout + done.stderr


# ---------------------------------------------------------------------------------------------- launches


def variant(launch: Launch) -> tuple[Any, ...]:
    """All of a launch's arguments that Triton compiles anew for: constants, absence, 1 and multiples of 16, widths."""

    def of(role: str, value: Any) -> Any:
        if value is None or role == "constexpr":
            return value
        if isinstance(value, tuple):
            return tuple(of("i64", v) for v in value)
        return (value == 1, value % 16 == 0, -(2**31) <= value < 2**31) if role == "i64" else role

    values = launch.arguments({n: n for n in launch.pointers.values()}, {})
    return tuple(of(p.role, values.get(p.name, 0.5)) for p in launch.kernel.abi.params)


LENGTHS = range(1000, 1025)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_lengths_share_their_kernels(name: str) -> None:
    """C092: over 25 neighbouring lengths and over row counts a kernel has the variant of multiples of 16, and one
    more.
    """
    for shapes in ([(n,) for n in LENGTHS], [(n, 64) for n in (3, 16, 17, 48)], [(16, 2 * n) for n in LENGTHS]):
        if any(t.dims not in ("...", "") for t in tensors(name)):
            shapes = [(*s[:-1], 2 * s[-1]) for s in shapes]
        found: dict[str, set[Any]] = {}
        for shape in shapes:
            for place, launch in enumerate(planned(name, metas(name, shape))):
                found.setdefault(f"{launch.kernel.function.fn.__name__} {place}", set()).add(variant(launch))
        assert all(len(variants) <= 2 for variants in found.values()), {k: len(v) for k, v in found.items()}


def settings(name: str) -> Iterator[str]:
    yield from (n for n, kind in op_class(name).kinds.items() if kind == "float")


@pytest.mark.parametrize("name", [n for n in OPS if list(settings(n))])
def test_values_of_attrs_share_a_kernel(name: str) -> None:
    """C092: a number that changes at each step, as a learning rate does, is an argument and no constant."""
    given = metas(name, (64, 128))
    for attr in settings(name):
        found: dict[str, set[Any]] = {}
        low, high = case(name).domains.get(attr, (0.25, 4.0))
        for k in range(9):
            value = max(low, 0.25) + (min(high, 4.0) - max(low, 0.25)) * (k + 0.5) / 9.3
            op = op_class(name)(**{**attrs_of(name), attr: value})
            for launch in op.plan_forward(given).launches:
                assert not {p.name for p in launch.kernel.abi.params if p.role == "constexpr"} & {attr}
                found.setdefault(launch.kernel.function.fn.__name__, set()).add(variant(launch))
        assert all(len(variants) == 1 for variants in found.values())


@pytest.mark.parametrize("name", NUMBERS)
def test_values_of_numbers_share_a_kernel(name: str) -> None:
    """C064, C092: a Python number for a tensor: 1 is compiled as 3 is."""
    op, (x, other) = op_class(name)(**attrs_of(name)), op_class(name).inputs
    dtype = "f32" if takes(name, "f32") else case(name).usual
    found = set()
    for number in (1, 0, 3, -7, 16):
        (launch,) = op.plan_forward({x.name: Meta(dtype, (100,), (1,)), other.name: number}).launches
        found.add(variant(launch))
    assert len(found) == 1


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_plan_is_made_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """C093: a second call of the same shapes plans nothing, whatever its values are."""
    given = filled(name, [(10, 14)])
    differentiate(name, given, attrs_of(name))
    for method in ("_plan_forward", "_plan_backward"):
        monkeypatch.setattr(op_class(name), method, lambda *_: pytest.fail("planned again"))
    again = {n: v.clone() for n, v in given.items()}
    same(differentiate(name, again, attrs_of(name)), differentiate(name, given, attrs_of(name)))


@pytest.mark.parametrize("name", OPS)
def test_every_element_of_a_result_is_written(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """C041, C094: into buffers full of NaN the results are the same, and the same bits in every run."""
    dtype = "f32" if takes(name, "f32") else case(name).usual
    for shapes in ([(300, 6), (6,)],) if stretching(name) else ([(7, 30)],):
        given = filled(name, shapes, dtype)
        plain = differentiate(name, given, attrs_of(name))
        monkeypatch.setenv("PULLBACK_DEBUG", "1")
        poisoned = differentiate(name, given, attrs_of(name))
        monkeypatch.delenv("PULLBACK_DEBUG")
        for key in plain:
            assert torch.equal(plain[key].nan_to_num(7.0), poisoned[key].nan_to_num(7.0)), key
            assert torch.equal(plain[key].isnan(), poisoned[key].isnan()), key


def test_no_kernel_is_tuned_by_running_it() -> None:
    """C094: settings are chosen by the plan; nothing that a kernel writes can be written by a trial first."""
    for path in sorted(Path(generated.__file__).parent.rglob("*.py")):
        if path.name != "testing.py":
            assert "autotune" not in path.read_text() and "tl.atomic" not in path.read_text(), path


SCATTERED = [n for n in GRADIENTS if len(tensors(n)) > 1 or tensors(n)[0].dims != "..."]


@pytest.mark.parametrize("name", SCATTERED)
def test_more_dims_than_a_kernel_takes(name: str) -> None:
    """C046, C053: operands and cotangents of five and six dims that do not merge, named axes beside them or not."""
    given = filled(name, [(2, 3, 2, 2, 3, 2)])
    laid = {
        n: v.movedim(-1, 0).contiguous().movedim(0, -1).mT.contiguous().mT if v.dim() > 4 else v
        for n, v in given.items()
    }
    y = case(name).call(given, attrs_of(name))[0]
    wide = torch.stack([torch.randn(y.shape, device=DEVICE)] * 2, 2).movedim(0, -1).contiguous().movedim(-1, 0)[:, :, 0]
    same(*(differentiate(name, v, attrs_of(name), dy) for v, dy in ((laid, wide), (given, wide.contiguous()))))


ODD = present(
    *"neg abs sin tan asin atan sinh tanh asinh atanh expm1 log1p erf floor ceil round trunc frac sqrt".split()
)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ODD)
def test_a_zero_has_the_sign_that_it_has_in_torch(name: str, dtype: str) -> None:
    """Some versions of Triton take -x for 0 - x."""
    x = tensor([0.0, -0.0], dtype)
    (got,) = case(name).call({tensors(name)[0].name: x}, attrs_of(name))
    want = reference(name, {tensors(name)[0].name: x}, attrs_of(name))
    assert torch.equal(got, want) and torch.equal(torch.signbit(got), torch.signbit(want))


# ---------------------------------------------------------------------------------------------- more dims than a kernel takes

DEEP = {
    "one way": ((2, 3, 2, 3, 2), (1, 3, 1, 3, 1)), "the other way": ((1, 3, 1, 3, 1), (2, 1, 2, 1, 2)),
    "fewer dims": ((3, 1, 3, 1, 3), (2, 3, 1, 3, 1, 1)),
    "sums over more": ((2, 1, 2, 1, 2, 1, 2, 1, 2, 1), (1, 3, 1, 2, 1, 3, 1, 2, 1, 3)),
}  # fmt: skip


def drawn(name: str, shapes: tuple[tuple[int, ...], ...]) -> dict[str, Any]:
    one = case(name)
    return {
        t.name: one._values(t, shapes[k % 2] if t.dims == "..." else (), one.usual, k)
        for k, t in enumerate(tensors(name))
    }


@pytest.mark.parametrize("kind", DEEP)
@pytest.mark.parametrize("name", [n for n in OPS if stretching(n)])
def test_operands_of_many_dims_stretch(name: str, kind: str) -> None:
    """As operands do that were stretched before: values, and gradients that are summed back."""
    given = drawn(name, DEEP[kind])
    whole = torch.broadcast_shapes(*(v.shape for v in given.values()))
    dense = {n: v.expand(whole).contiguous() if v.ndim else v for n, v in given.items()}
    for attrs in choices(name):
        found, wanted = (case(name)._results(g, attrs) for g in (given, dense))
        for key, want in wanted.items():
            shape = found[key].shape
            want = want.sum_to_size(shape) if key.startswith("gradient") and want.shape != shape else want
            torch.testing.assert_close(found[key], want, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("kind", ["one way", "the other way", "fewer dims"])
@pytest.mark.parametrize("name", [n for n in OPS if stretching(n) and op_class(n).has_backward])
def test_operands_of_many_dims_stretch_in_a_model(name: str, kind: str) -> None:
    given, attrs = drawn(name, DEEP[kind]), choices(name)[-1]
    if not case(name)._differentiable(given):
        return
    graph = Graph()
    dtypes = {torch_dtype: dtype for dtype, torch_dtype in TORCH.items()}
    leaves = {n: graph.input(dtypes[v.dtype], v.shape, n) for n, v in given.items()}
    names = case(name)._differentiable(given)
    out = case(name).call(leaves, attrs)
    run = graph.lower(list(out), input_gradients=[leaves[n] for n in names], fuse=False).load(DEVICE)
    wanted = case(name)._results(given, attrs)
    found = run.forward_train(**given)
    first = found if isinstance(found, torch.Tensor) else found[0]
    torch.testing.assert_close(first, wanted["output 0"], rtol=0, atol=0, equal_nan=True)
    run.backward(seed_of(wanted["output 0"], 0))
    for n in names:
        torch.testing.assert_close(
            run.input_grads[n], wanted[f"gradient of {n}"], rtol=1e-12, atol=1e-12, equal_nan=True
        )
