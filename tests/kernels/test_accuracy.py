"""The runtime's functions: their errors against mpmath, form by form, and their edges.

The bounds are `benchmarks.accuracy.BOUNDS`; `python -m benchmarks.accuracy` measures more points.
"""

from __future__ import annotations

import inspect
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import accuracy, primitive_kernels
from benchmarks.accuracy import BINARY, BOUNDS, PRIMITIVES, UNARY, bound, cases, computed, function
from codegen.primitives import TABLE, Primitive

INF, NAN = math.inf, math.nan
POINTS = 400


@pytest.mark.parametrize(("name", "form"), cases())
def test_errors_stay_within_their_bounds(name: str, form: str) -> None:
    row = accuracy.measure(name, form, POINTS)
    assert row["max_ulp"] <= bound(name, form), f"{row['max_ulp']} ulp at {row['at']}"


# ---------------------------------------------------------------------------------------------- edges

HALF_PI, PI = math.pi / 2, math.pi
# Operand and result; -0.0 and 0.0 differ. What is not exact is compared to a thousandth.
EDGES: dict[str, list[tuple[float, float]]] = {
    "exp": [(-INF, 0.0), (INF, INF), (0.0, 1.0), (-0.0, 1.0), (1e4, INF), (-1e4, 0.0)],
    "exp2": [(-INF, 0.0), (INF, INF), (0.0, 1.0), (10.0, 1024.0), (1e4, INF), (-1e4, 0.0)],
    "expm1": [(-INF, -1.0), (INF, INF), (0.0, 0.0), (-0.0, -0.0), (1e4, INF), (-1e4, -1.0)],
    "log": [(0.0, -INF), (-0.0, -INF), (1.0, 0.0), (INF, INF), (-1.0, NAN), (-INF, NAN)],
    "log2": [(0.0, -INF), (-0.0, -INF), (1.0, 0.0), (INF, INF), (-1.0, NAN), (-INF, NAN)],
    "log10": [(0.0, -INF), (-0.0, -INF), (1.0, 0.0), (INF, INF), (-1.0, NAN), (-INF, NAN)],
    "log1p": [(-1.0, -INF), (0.0, 0.0), (-0.0, -0.0), (INF, INF), (-1.5, NAN), (-INF, NAN)],
    "sqrt": [(0.0, 0.0), (4.0, 2.0), (INF, INF), (-1.0, NAN)],
    "rsqrt": [(0.0, INF), (4.0, 0.5), (INF, 0.0), (-1.0, NAN)],
    "sin": [(0.0, 0.0), (-0.0, -0.0), (INF, NAN), (-INF, NAN)],
    "cos": [(0.0, 1.0), (INF, NAN), (-INF, NAN)],
    "tan": [(0.0, 0.0), (-0.0, -0.0), (INF, NAN), (-INF, NAN)],
    "asin": [(0.0, 0.0), (-0.0, -0.0), (1.0, HALF_PI), (-1.0, -HALF_PI), (1.5, NAN), (INF, NAN), (-INF, NAN)],
    "acos": [(1.0, 0.0), (0.0, HALF_PI), (-1.0, PI), (1.5, NAN), (-1.5, NAN), (INF, NAN), (-INF, NAN)],
    "atan": [(0.0, 0.0), (-0.0, -0.0), (INF, HALF_PI), (-INF, -HALF_PI)],
    "sinh": [(0.0, 0.0), (-0.0, -0.0), (INF, INF), (-INF, -INF), (1e4, INF), (-1e4, -INF)],
    "cosh": [(0.0, 1.0), (INF, INF), (-INF, INF), (-1e4, INF)],
    "tanh": [(0.0, 0.0), (-0.0, -0.0), (INF, 1.0), (-INF, -1.0), (1e4, 1.0), (-1e4, -1.0)],
    "asinh": [(0.0, 0.0), (-0.0, -0.0), (INF, INF), (-INF, -INF)],
    "acosh": [(1.0, 0.0), (INF, INF), (0.5, NAN), (-2.0, NAN), (-1e10, NAN), (-INF, NAN)],
    "atanh": [(0.0, 0.0), (-0.0, -0.0), (1.0, INF), (-1.0, -INF), (1.5, NAN), (-1e20, NAN), (INF, NAN), (-INF, NAN)],
    "erf": [(0.0, 0.0), (-0.0, -0.0), (INF, 1.0), (-INF, -1.0), (1e4, 1.0)],
    "erfc": [(0.0, 1.0), (INF, 0.0), (-INF, 2.0), (1e4, 0.0), (-1e4, 2.0)],
    "sigmoid": [(0.0, 0.5), (INF, 1.0), (-INF, 0.0), (1e4, 1.0), (-1e4, 0.0)],
    "tanh_gap": [(0.0, 0.0), (-0.0, -0.0), (INF, INF), (-INF, -INF), (1e4, 9999.0), (-1e4, -9999.0)],
    "softplus": [(0.0, math.log(2)), (INF, INF), (-INF, 0.0), (1e4, 1e4), (-1e4, 0.0)],
}
PAIRS: dict[str, list[tuple[float, float, float]]] = {
    "pow": [
        (0.0, -1.0, INF), (-0.0, -1.0, -INF), (-0.0, -2.0, INF), (-0.0, -0.5, INF), (0.0, 0.5, 0.0), (-0.0, 3.0, -0.0),
        (-0.0, 2.0, 0.0), (NAN, 0.0, 1.0), (INF, 0.0, 1.0), (0.0, 0.0, 1.0), (1.0, NAN, 1.0), (1.0, INF, 1.0),
        (-1.0, INF, 1.0), (-1.0, -INF, 1.0), (0.5, INF, 0.0), (0.5, -INF, INF), (-2.0, INF, INF), (2.0, -INF, 0.0),
        (-2.0, 3.0, -8.0), (-2.0, 2.0, 4.0), (-2.0, -1.0, -0.5), (-2.0, 0.5, NAN), (-INF, 3.0, -INF), (-INF, 2.0, INF),
        (-INF, -3.0, -0.0), (-INF, 0.5, INF), (INF, -1.0, 0.0), (0.0, INF, 0.0), (0.0, -INF, INF), (NAN, 1.0, NAN),
        (2.0, NAN, NAN), (2.0, 1e30, INF), (2.0, -1e30, 0.0), (-1.0, 1e30, 1.0), (-1.0, 16777215.0, -1.0),
        (0.0, 1e-30, 0.0), (0.0, -1e-30, INF), (INF, 1e-30, INF), (INF, -1e-30, 0.0), (-1.0, NAN, NAN), (NAN, INF, NAN),
        (-1.0, 1e-30, NAN), (0.5, 150.0, 2.0**-150), (2.0, -149.0, 2.0**-149), (0.99999994, 3e38, 0.0),
        (-1.0, 16777218.0, 1.0), (-2.0, 16777218.0, INF), (-1.0, 2.0**48 + 2.0**25, 1.0), (-0.5, 2.0**60, 0.0), (-0.0, -3.0, -INF),
    ],
    "atan2": [
        (0.0, 0.0, 0.0), (-0.0, 0.0, -0.0), (0.0, -0.0, PI), (-0.0, -0.0, -PI), (0.0, 1.0, 0.0), (-0.0, 1.0, -0.0),
        (0.0, -1.0, PI), (-0.0, -1.0, -PI), (1.0, 0.0, HALF_PI), (-1.0, -0.0, -HALF_PI), (1.0, INF, 0.0),
        (-1.0, INF, -0.0), (1.0, -INF, PI), (-1.0, -INF, -PI), (INF, 1.0, HALF_PI), (-INF, 1.0, -HALF_PI),
        (INF, INF, PI / 4), (INF, -INF, 3 * PI / 4), (-INF, INF, -PI / 4), (-INF, -INF, -3 * PI / 4),
        (NAN, 1.0, NAN), (1.0, NAN, NAN), (INF, NAN, NAN),
    ],
    "hypot": [
        (3.0, 4.0, 5.0), (0.0, 0.0, 0.0), (-0.0, -0.0, 0.0), (INF, NAN, INF), (NAN, -INF, INF), (1.0, NAN, NAN),
        (NAN, 1.0, NAN), (INF, INF, INF), (3e38, 1.0, 3e38),
    ],
    "fmod": [
        (5.5, 2.0, 1.5), (-5.5, 2.0, -1.5), (5.5, -2.0, 1.5), (-4.0, 2.0, -0.0), (0.0, 2.0, 0.0), (-0.0, 2.0, -0.0),
        (1.0, 0.0, NAN), (INF, 1.0, NAN), (1.0, INF, 1.0), (-1.0, -INF, -1.0), (INF, INF, NAN), (NAN, 1.0, NAN),
        (1.0, NAN, NAN), (NAN, INF, NAN), (-0.0, INF, -0.0),
    ],
    "mod": [
        (5.5, 2.0, 1.5), (-5.5, 2.0, 0.5), (5.5, -2.0, -0.5), (-5.5, -2.0, -1.5), (4.0, 2.0, 0.0), (1.0, 0.0, NAN),
        (INF, 1.0, NAN), (1.0, INF, 1.0), (-1.0, INF, INF), (1.0, -INF, -INF), (NAN, 1.0, NAN), (1.0, NAN, NAN),
        (-3.410618100789362e-32, 1.9211048047319435e-38, 1.8665578607096357e-38),
    ],
    "floordiv": [
        (5.5, 2.0, 2.0), (-5.5, 2.0, -3.0), (5.5, -2.0, -3.0), (-5.5, -2.0, 2.0), (4.0, 2.0, 2.0), (-4.0, 2.0, -2.0),
        (1.0, 0.0, INF), (-1.0, 0.0, -INF), (0.0, 0.0, NAN), (INF, 0.0, INF), (-INF, 0.0, -INF), (INF, -0.0, -INF),
        (INF, 1.0, NAN), (INF, INF, NAN), (1.0, INF, 0.0), (-1.0, INF, -1.0), (1.0, -INF, -1.0), (NAN, 1.0, NAN),
        (1.0, NAN, NAN), (7.0, 7.0, 1.0),
    ],
}  # fmt: skip


def same(got: float, want: float, form: str) -> bool:
    if want != want or got != got:
        return want != want and got != got
    if want == 0 or math.isinf(want):
        got = 0 * got if form == "half" and abs(got) <= 2.0**-126 else got  # as the form allows
        return got == want and math.copysign(1, got) == math.copysign(1, want)
    if form == "half" and abs(want) < 2.0**-134:  # nothing in either half type
        return abs(got) <= 2.0**-126
    return abs(got - want) <= abs(want) * (1e-3 if form == "half" else 1e-6)


def arrays_of(rows: list[tuple[float, ...]], form: str) -> list[np.ndarray]:
    dtype = accuracy.FORMATS[form].dtype
    return [np.array(column, np.float64).astype(dtype) for column in zip(*rows)]


@pytest.mark.parametrize(("name", "form"), [case for case in cases() if case[0] in UNARY])
def test_edges(name: str, form: str) -> None:
    rows = [*EDGES[name], (NAN, NAN)]
    *operands, wanted = arrays_of(rows, form)
    got = computed(name, form, *operands)
    wrong = [(row, float(g)) for row, g in zip(rows, got) if not same(float(g), row[-1], form)]
    assert not wrong


@pytest.mark.parametrize(("name", "form"), [case for case in cases() if case[0] in BINARY])
def test_edges_of_two_operands(name: str, form: str) -> None:
    rows = PAIRS[name]
    *operands, wanted = arrays_of(rows, form)
    got = computed(name, form, *operands)
    wrong = [(row, float(g)) for row, g, w in zip(rows, got, wanted) if not same(float(g), float(w), form)]
    assert not wrong


@pytest.mark.parametrize("form", ["f32", "f64"])
def test_odd_functions_keep_the_smallest_operands(form: str) -> None:
    least = 2.0**-149 if form == "f32" else 2.0**-1074
    for name in "expm1 log1p sin tan asin atan sinh tanh asinh atanh".split():
        (x,) = arrays_of([(least,), (-least,), (3 * least,)], form)
        assert np.array_equal(computed(name, form, x), x), name


@pytest.mark.parametrize("form", ["f32", "f64"])
def test_a_remainder_of_any_two_floats_is_exact(form: str) -> None:
    kind = accuracy.FORMATS[form]
    high, low = float(np.finfo(kind.dtype).max), float(np.finfo(kind.dtype).smallest_subnormal)
    rows = [(high, low), (-high, 3 * low), (high, 7.0), (1e30, 1e-30), (high, high), (low, high), (5 * low, 3 * low)]
    a, b = arrays_of(rows, form)
    assert np.array_equal(computed("fmod", form, a, b), np.fmod(a, b))
    assert np.array_equal(computed("mod", form, a, -b), np.fmod(a, b) - np.where(np.fmod(a, b) > 0, b, 0))


@pytest.mark.parametrize("name", PRIMITIVES)
def test_scalars_and_blocks_of_two_dimensions(name: str) -> None:
    arity = 2 if name in BINARY else 1
    x = torch.linspace(1.0, 1e8 if name in ("fmod", "mod", "tan") else 2.0, 256)
    x = x.cuda() if accuracy.ON_GPU else x
    out = torch.empty_like(x)
    primitive_kernels.square_block[(1,)](x, out, F=function(name), ARITY=arity, SIDE=16)
    operands = [x.cpu().numpy()] + ([x[:16].repeat(16).cpu().numpy()] if arity == 2 else [])
    want = computed(name, "f32", *operands)
    assert np.array_equal(out.cpu().numpy(), want, equal_nan=True)
    one = torch.empty_like(x[:1])
    primitive_kernels.single[(1,)](x, one, F=function(name), ARITY=arity)
    want = computed(name, "f32", *[o[k : k + 1] for k, o in enumerate([operands[0]] * arity)])
    assert one.item() == want[0] or (one.item() != one.item() and want[0] != want[0])


@pytest.mark.parametrize("form", ["f32", "f64"])
@pytest.mark.parametrize("name", BINARY)
def test_an_operand_may_be_a_number(name: str, form: str) -> None:
    x = np.linspace(0.25, 4.0, 16).astype(accuracy.FORMATS[form].dtype)
    number = np.full_like(x, 2.5)
    there = torch.from_numpy(x).cuda() if accuracy.ON_GPU else torch.from_numpy(x)
    for first in (False, True):
        out = torch.empty_like(there)
        primitive_kernels.beside_number[(1,)](there, out, F=function(name), FIRST=first, SIDE=16)
        want = computed(name, form, *((number, x) if first else (x, number)))
        assert np.array_equal(out.cpu().numpy(), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clamp_keeps_every_nan(dtype: torch.dtype) -> None:
    values = [-2.0, -0.5, 0.5, 2.0, INF, -INF, NAN]
    x, low, high = (
        torch.tensor(v, dtype=dtype) for v in zip(*((a, b, c) for a in values for b in values for c in values))
    )
    got = clamped(x, low, high)
    assert torch.equal(torch.nan_to_num(got, 7.0), torch.nan_to_num(torch.clamp(x, low, high), 7.0))


def clamped(x: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    there = [t.cuda() if accuracy.ON_GPU else t for t in (x, low, high)]
    out = torch.empty_like(there[0])
    primitive_kernels.clamps[(1,)](*there, out, x.numel(), F=function("clamp"), BLOCK=512)
    return out.cpu()


def test_the_polynomials_are_those_that_are_fitted() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "tools/fit.py"], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == (root / "templates/runtime/polynomials.py").read_text()


def test_every_form_compiles_for_sm_90() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).parent / "compile_primitives.py")],
        cwd=Path(__file__).parents[2], env={"PATH": "/usr/bin:/bin", "HOME": str(Path.home())},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == len(cases())


@pytest.mark.parametrize("row", [r for r in TABLE.values() if r.triton.startswith("math.")], ids=lambda r: r.name)
def test_cheaper_forms_are_those_that_the_table_states(row: Primitive) -> None:
    own = function(row.triton.removeprefix("math."))
    assert (list(inspect.signature(own.fn).parameters)[-1] == "HALF") == (row.coarse > 0)
    assert 0 <= row.coarse <= BOUNDS["half"]
    assert row.coarse == 0 or row.name in PRIMITIVES, "nobody measures it"
