"""Every row of the table: its float64 meaning against mpmath, its VJP against numbers. A new row is tested by being one."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest

from codegen.autodiff import gradients
from codegen.diagnostics import Span
from codegen.evaluate import Env, evaluate
from codegen.ir import Axis, Builder, Tensor
from codegen.primitives import RULES, TABLE, Primitive
from codegen.spec import Dim, Factor

HERE = Span("table", 1, 1)
PACK = (Dim("pack", (Factor("...", None, HERE),), HERE),)
POINTS = [-7.5, -3.0, -2.0, -1.0, -0.75, -0.1, -1e-8, 0.0, 1e-8, 0.1, 0.5, 1.0, 2.0, 3.0, 4.25, 20.0]
_WHOLE = ("shl", "shr")
ELEMENTWISE = [r for r in TABLE.values() if r.rule is not RULES["and"] and r.name not in _WHOLE]


def values(row: Primitive) -> list[np.ndarray]:
    """Operands that meet every pair of points."""
    grid = np.array(np.meshgrid(*[POINTS] * min(row.arity, 2))).reshape(min(row.arity, 2), -1)
    if row.name == "where":
        return [grid[0] > 0, grid[0], grid[1]]
    return (
        [grid[0]]
        if row.arity == 1
        else [grid[0], grid[1]] if row.arity == 2 else [grid[0], grid[1] - 1.0, grid[1] + 1.5]
    )


@pytest.mark.parametrize("row", ELEMENTWISE, ids=lambda r: r.name)
def test_float64_meaning_is_mpmaths(row: Primitive) -> None:
    operands = values(row)
    with np.errstate(all="ignore"):
        got = np.asarray(row.numpy(*operands))
    with mpmath.workdps(40):
        for place in range(len(operands[0])):
            args = [bool(o[place]) if o.dtype == bool else mpmath.mpf(float(o[place])) for o in operands]
            want, have = row.mp(*args), got[place]
            if got.dtype == bool:
                assert bool(want) == bool(have), (row.name, args)
            elif math.isnan(have) or math.isinf(have):
                assert mpmath.isnan(want) == math.isnan(have) or mpmath.isinf(want) == math.isinf(have), (
                    row.name,
                    args,
                    want,
                    have,
                )
            else:
                assert abs(mpmath.mpf(float(have)) - want) <= 4e-15 * (abs(want) + 1e-300) + 1e-16 * (
                    row.name in ("sin", "cos", "tan")
                ), (row.name, args, want, have)


def _python(name: str, x: int, n: int) -> int:
    """What Python says; of shifts, in 64 bits, and as torch says beyond them."""
    if name == "shl":
        return ((x << n) + 2**63) % 2**64 - 2**63 if 0 <= n < 64 else 0
    return x >> (n if 0 <= n < 64 else 63)


@pytest.mark.parametrize("name", _WHOLE)
def test_whole_meaning_is_pythons(name: str) -> None:
    for x in (-9, -2, -1, 0, 1, 3, 12):
        for n in (-70, -3, -1, 1, 2, 7, 62, 63, 64, 200):
            assert int(TABLE[name].numpy(np.array([x]), np.array([n]))[0]) == _python(name, x, n), (x, n)


def inside(domain: tuple[float, float], rng: np.random.Generator) -> np.ndarray:
    """Points well within a domain, of both signs where it has both."""
    low, high = domain
    if math.isfinite(high):
        return low + (high - low) * rng.uniform(0.1, 0.9, 64)
    return (
        low + rng.uniform(0.3, 1.9, 64) if math.isfinite(low) else rng.uniform(0.3, 1.9, 64) * rng.choice([-1, 1], 64)
    )


@pytest.mark.parametrize("row", [r for r in TABLE.values() if r.vjp is not None], ids=lambda r: r.name)
def test_vjp_is_the_derivative(row: Primitive) -> None:
    b = Builder({"...": Axis("...", pack=True)}, RULES)
    tensors = [
        Tensor(f"x{k}", "input", PACK, "bool" if row.name == "where" and k == 0 else "float", "float")
        for k in range(row.arity)
    ]
    y = b.op(row.name, *(b.read(t) for t in tensors))
    g = b.read(Tensor("g", "cotangent", PACK, "float", "float"))
    found = gradients(b, {y: g}, [t for t in tensors if t.kind == "float"])
    rng = np.random.default_rng(5)
    data = {t.name: inside(row.domain if k == 0 else (-math.inf, math.inf), rng) for k, t in enumerate(tensors)}
    if row.name == "where":
        data["x0"] = rng.random(64) < 0.5
    data["g"] = rng.normal(size=64)
    for name, node in found.items():
        h = 1e-4
        steps = []
        for move in (h, -h, 2 * h, -2 * h):
            env = Env(("...",), {"...": 64}, {**data, name: data[name] + move}, {})
            steps.append(np.broadcast_to(evaluate([y], env)[y.serial], 64))
        numeric = data["g"] * (8 * (steps[0] - steps[1]) - (steps[2] - steps[3])) / (12 * h)
        zero = np.zeros(64)
        exact = evaluate([node], Env(("...",), {"...": 64}, data, {}))[node.serial] if node is not None else zero
        assert np.abs(np.broadcast_to(exact, 64) - numeric).max() < 1e-7, (row.name, name)


EDGES = [
    ("abs", (0.0,), 0.0), ("relu", (0.0,), 0.0), ("maximum", (1.0, 1.0), 0.5), ("minimum", (1.0, 1.0), 0.5), ("clamp", (0.0, 0.0, 1.0), 1.0),
    ("sqrt", (0.0,), math.inf), ("rsqrt", (0.0,), -math.inf), ("pow", (0.0, 0.0), 0.0), ("pow", (0.0, 2.0), 0.0), ("pow", (0.0, -1.0), -math.inf),
    ("hypot", (0.0, 0.0), 0.0), ("atan2", (0.0, 0.0), 0.0), ("atan2", (0.0, -2.0), -0.5), ("fmod", (6.0, 3.0), 1.0), ("asin", (1.0,), math.inf),
    ("acos", (-1.0,), -math.inf), ("acosh", (1.0,), math.inf), ("atanh", (1.0,), math.inf), ("asinh", (0.0,), 1.0),
]  # fmt: skip


@pytest.mark.parametrize(("name", "point", "want"), EDGES, ids=str)
def test_conventions_at_edges(name: str, point: tuple[float, ...], want: float) -> None:
    b = Builder({"...": Axis("...", pack=True)}, RULES)
    tensors = [Tensor(f"x{k}", "input", PACK, "float", "float") for k in range(len(point))]
    y = b.op(name, *(b.read(t) for t in tensors))
    node = gradients(b, {y: b.const(1.0)}, tensors[:1])["x0"]
    assert node is not None
    env = Env(("...",), {"...": 1}, {f"x{k}": np.array([v]) for k, v in enumerate(point)}, {})
    assert float(evaluate([node], env)[node.serial].ravel()[0]) == want


def test_nan_is_never_hidden() -> None:
    """C016, C017: NaN goes through relu, clamp, maximum and minimum."""
    nan = np.array([np.nan])
    for got in (
        TABLE["relu"].numpy(nan),
        TABLE["clamp"].numpy(nan, 0.0, 1.0),
        TABLE["maximum"].numpy(nan, 1.0),
        TABLE["minimum"].numpy(1.0, nan),
    ):
        assert np.isnan(got).all()


def test_powers_of_huge_exponents_end() -> None:
    """A product of many factors may be an exponent: it is not multiplied out."""
    power = TABLE["pow"].mp
    assert power(mpmath.mpf(-3), mpmath.mpf(2) ** 100) == mpmath.inf
    assert power(mpmath.mpf(-0.5), mpmath.mpf(2) ** 100) == 0
    assert power(mpmath.mpf(-1), mpmath.mpf(2) ** 60) == 1 and power(mpmath.mpf(-1), mpmath.mpf(2**40 + 1)) == -1
