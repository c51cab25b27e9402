"""`python -m benchmarks.accuracy [--out FILE]`: errors of the runtime's functions against mpmath, in every form.

Operands are stratified: exponents uniform over the dtype's whole range and over moderate values, both signs, and
neighbours of the points where a function or its form changes. An error counts in units in the last place (ulp) of
the dtype that a result is stored in: of f16 for the half form, whose results are f32 yet to be rounded.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import math
import os
import platform
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import triton  # noqa: E402

from benchmarks import primitive_kernels  # noqa: E402
from codegen.primitives import TABLE  # noqa: E402

runtime = importlib.import_module("generated.runtime.math")
mp = mpmath.mp
Array = np.ndarray[Any, Any]

# The one table of bounds, in ulp.
BOUNDS = {"f32": 4.0, "f64": 2.0, "half": 0.125}
"""Of the half form the bound is what its row of the primitives' table states, and that is at most this."""

UNARY = (
    "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan "
    "sinh cosh tanh asinh acosh atanh erf erfc sigmoid softplus tanh_gap"
).split()
BINARY = ("atan2", "pow", "hypot", "fmod", "mod", "floordiv")
PRIMITIVES = (*UNARY, *BINARY)


def function(name: str) -> Any:
    """The runtime's."""
    return getattr(runtime, name)


def bound(name: str, form: str) -> float:
    return min(BOUNDS["half"], TABLE[name].coarse) if form == "half" else BOUNDS[form]


def has_half(name: str) -> bool:
    return "HALF" in inspect.signature(function(name).fn).parameters


def cases() -> list[tuple[str, str]]:
    """Every primitive in every form that it has."""
    return [(name, form) for name in PRIMITIVES for form in ("f32", "f64", "half") if form != "half" or has_half(name)]


# ---------------------------------------------------------------------------------------------- the reference


def _mp_fmod(a: Any, b: Any) -> Any:
    if mpmath.isinf(a) or b == 0:
        return mpmath.nan
    return a if mpmath.isinf(b) else mpmath.mpf(math.fmod(float(a), float(b)))


def _mp_mod(a: Any, b: Any) -> Any:
    r = _mp_fmod(a, b)
    return r + b if r != 0 and (r < 0) != (b < 0) else r


# Meanings that take more than the precision of those in `codegen.primitives.TABLE`.
EXACT: dict[str, Callable[..., Any]] = {"fmod": _mp_fmod, "mod": _mp_mod}


def reference(name: str) -> Callable[..., Any]:
    """The meaning on mpmath numbers."""
    if name in EXACT:
        return EXACT[name]
    return TABLE[name].mp


# ---------------------------------------------------------------------------------------------- operands


@dataclass(frozen=True)
class Format:
    dtype: Any
    digits: int
    lowest: int
    highest: int


FORMATS = {
    "f32": Format(np.float32, 24, -126, 127),
    "f64": Format(np.float64, 53, -1022, 1023),
    "half": Format(np.float32, 11, -126, 127),
}
"""`half` keeps f32's exponents: bf16 has them."""

# Where functions or their forms change, reach the end of a range, or cancel.
SWITCHES = (
    "1e-38 1e-17 1e-8 0.01 0.125 0.2 0.25 0.3 0.3333333 0.3466 0.45 0.5 0.6 0.6666667 0.7071068 0.75 1 1.0397 "
    "1.3333334 1.4142135 1.5707964 2 3 3.1415927 3.92 4 4.712389 9.2 10.05 16 26.5 27.2 50 87.33 88.72 88.73 89.4 "
    "103.97 120 126 128 149 150 500000 708.4 709.78 710.4 745.1 1022 1024 1074 8388608 16777216 1.1529215e18 1e38 3e38"
).split()


def operands(name: str, form: str, count: int, rng: np.random.Generator) -> Array:
    """Stratified floats."""
    dtype = FORMATS[form].dtype
    real = FORMATS["f32" if form == "half" else form]
    third = count // 3
    exponents = [rng.integers(real.lowest - real.digits + 1, real.highest + 1, third), rng.integers(-12, 10, third)]
    spread = [rng.uniform(1, 2, len(e)) * np.exp2(e.astype(np.float64)) for e in exponents]
    switches = np.array([float(s) for s in SWITCHES])
    near = rng.choice(switches, count - 2 * third)
    near = near * (1 + rng.integers(-8, 9, len(near)) * np.exp2(-rng.integers(3, real.digits, len(near)).astype(float)))
    values = np.concatenate([*spread, near]) * rng.choice([-1.0, 1.0], count)
    if name in ("log", "log2", "log10", "sqrt", "rsqrt", "acosh"):
        values = abs(values)
    if name == "acosh":
        values[::2] = 1 + abs(values[::2])
    if name in ("asin", "acos", "atanh", "log1p"):
        values[::2] = np.sign(values[::2]) * np.minimum(1, np.exp2(-abs(values[::2]) % 30))
        values[::4] = np.sign(values[::4]) * (1 - abs(values[::4]))
    if name == "exp2":
        values[::2] = np.fmod(values[::2], 1100 if form == "f64" else 150)
    return finite(values, dtype)


def finite(values: Array, dtype: Any) -> Array:
    """Rounded to a dtype, and nothing beyond its range or, for mpmath has one zero, 0."""
    facts = np.finfo(dtype)
    values = np.where(abs(values) < facts.smallest_subnormal, facts.smallest_subnormal, values)
    return np.clip(values, -facts.max, facts.max).astype(dtype)


def pairs(name: str, form: str, count: int, rng: np.random.Generator) -> tuple[Array, Array]:
    a = operands(name, form, count, rng)
    b = rng.permutation(operands(name, form, count, rng))
    near = slice(0, None, 2)
    if name == "pow":
        # Exponents for which the power is within range, whole ones, bases near 1, and of others large exponents.
        a = np.where(rng.random(count) < 0.7, abs(a), a)
        a[1::4] = (1 + np.exp2(-rng.uniform(1, 20, len(a[1::4])))).astype(a.dtype)
        a[3::4] = rng.uniform(0.69, 1.39, len(a[3::4])).astype(a.dtype)
        limit = (1074.0 if form == "f64" else 150.0) / np.maximum(abs(np.log2(abs(a.astype(np.float64)))), 1e-12)
        b[near] = (rng.uniform(-1, 1, count) * np.minimum(limit, 1e30))[near]
        b[3::4] = (rng.choice([-1, 1], count) * rng.uniform(0.9, 1, count) * np.minimum(limit, 1e30))[3::4]
        whole = rng.random(count) < 0.3
        b = np.where(whole, np.rint(np.minimum(abs(b), 2.0**20)) * np.sign(b), b).astype(b.dtype)
    else:  # comparable sizes
        beside = np.sign(b) * abs(a.astype(np.float64)) * np.exp2(rng.uniform(-30, 10, count))
        b[near] = finite(beside[near], b.dtype)
    return a, b


# ---------------------------------------------------------------------------------------------- measuring


def computed(name: str, form: str, *arrays: Array) -> Array:
    """What the runtime's function gives, on a GPU where there is one."""
    tensors = [torch.from_numpy(np.ascontiguousarray(a)) for a in arrays]
    tensors = [t.cuda() if ON_GPU else t for t in tensors]
    out = torch.empty_like(tensors[0])
    n = out.numel()
    block = min(64 if form == "half" else 1024 if ON_GPU else 65536, triton.next_power_of_2(n))
    kernel = primitive_kernels.binary if len(arrays) == 2 else primitive_kernels.unary
    with np.errstate(all="ignore"):
        kernel[(triton.cdiv(n, block),)](*tensors, out, n, F=function(name), SHORT=form == "half", BLOCK=block)
    result: Array = out.cpu().numpy()
    return result


def error(value: float, exact: Any, form: str) -> float:
    """In ulp; inf where one is NaN and the other is not."""
    kind = FORMATS[form]
    if mpmath.isnan(exact) or value != value:
        return 0.0 if mpmath.isnan(exact) and value != value else math.inf
    if form == "half" and abs(exact) < 2.0**-126 and abs(value) <= 2.0**-126:
        return 0.0
    top = mpmath.ldexp(1, kind.highest + 1)  # what overflows counts as the power of 2 beyond the range
    exact = max(-top, min(top, exact))
    got = max(-top, min(top, mpmath.mpf(float(value))))
    exponent = max(kind.lowest, min(kind.highest, mpmath.frexp(exact)[1] - 1 if exact else kind.lowest))
    return float(abs(got - exact) / mpmath.ldexp(1, exponent - kind.digits + 1))


def measure(name: str, form: str, count: int) -> dict[str, Any]:
    """The largest error of a primitive in a form, and where it is."""
    rng = np.random.default_rng(zlib.crc32(f"{name} {form}".encode()))
    with np.errstate(all="ignore"):
        arrays = pairs(name, form, count, rng) if name in BINARY else (operands(name, form, count, rng),)
        if form == "half":  # where a tile has no large operand or quotient some forms take a shorter way
            order = np.argsort(abs(arrays[0] / arrays[-1]) if len(arrays) > 1 else abs(arrays[0]))
            arrays = tuple(a[order] for a in arrays)
    values = computed(name, form, *arrays)
    meaning = reference(name)
    worst, at = 0.0, tuple(float(a[0]) for a in arrays)
    with mp.workprec(120):
        for k, value in enumerate(values):
            point = tuple(float(a[k]) for a in arrays)
            off = error(float(value), meaning(*(mpmath.mpf(p) for p in point)), form)
            if off > worst:
                worst, at = off, point
    return {"primitive": name, "form": form, "points": count, "max_ulp": worst, "at": at, "bound": bound(name, form)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="primitives (all)")
    parser.add_argument("--points", type=int, default=3000, help="operands a primitive and form (3000)")
    parser.add_argument("--out", type=Path, help="a file for JSON")
    options = parser.parse_args(arguments)
    machine = torch.cuda.get_device_name() if ON_GPU else f"{platform.machine()}, Triton's interpreter"
    print(f"{machine}, torch {torch.__version__}, triton {triton.__version__}\n")
    print(f"{'primitive':10s} {'form':5s} {'max ulp':>9s} {'bound':>6s}  at")
    rows = []
    for name, form in cases():
        if options.names and name not in options.names:
            continue
        row = measure(name, form, options.points)
        rows.append(row)
        mark = "" if row["max_ulp"] <= row["bound"] else "  OVER"
        at = ", ".join(repr(v) for v in row["at"])
        print(f"{name:10s} {form:5s} {row['max_ulp']:9.4f} {row['bound']:6.3f}  {at}{mark}", flush=True)
    if options.out:
        facts = {"machine": machine, "torch": torch.__version__, "triton": triton.__version__, "rows": rows}
        options.out.write_text(json.dumps(facts, indent=1) + "\n")
    sys.exit(any(row["max_ulp"] > row["bound"] for row in rows))


if __name__ == "__main__":
    main()
