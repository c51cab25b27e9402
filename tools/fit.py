"""Fits the polynomials of the runtime: `python tools/fit.py > templates/runtime/polynomials.py` (seconds).

Each is the polynomial of its degree whose largest weighted error is least (Remez's exchange, with mpmath at 80 digits).
The weight is the reciprocal of what the error is relative to. A row of `TABLE` gives a function of the module: its
variable, its meaning, its interval, and the degree in each form: f64, f32, and half for results stored in 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpmath import mp, mpf

mp.dps = 80
Real = Callable[[Any], Any]


def remez(f: Real, low: Any, high: Any, degree: int, weight: Real, grid: int = 400) -> tuple[list[Any], Any]:
    """Coefficients, lowest first, and the largest weighted error."""
    low, high, n = mpf(low), mpf(high), degree + 2
    to_x = lambda u: (low + high) / 2 + (high - low) / 2 * u  # noqa: E731
    us = [mp.cos(mp.pi * (n - 1 - k) / (n - 1)) for k in range(n)]
    fine = [mp.cos(mp.pi * (grid - k) / grid) for k in range(grid + 1)]
    values = [f(to_x(u)) for u in fine]
    weights = [weight(to_x(u)) for u in fine]
    best: tuple[list[Any], Any] = ([], mp.inf)
    for _ in range(12):
        rows = mp.matrix(n, n)
        right = mp.matrix(n, 1)
        for k, u in enumerate(us):
            for j in range(degree + 1):
                rows[k, j] = mp.chebyt(j, u)
            rows[k, degree + 1] = (-1) ** k / weight(to_x(u))
            right[k] = f(to_x(u))
        solved = mp.lu_solve(rows, right)
        cheb = [solved[j] for j in range(degree + 1)]
        errors = [(clenshaw(cheb, u) - v) * w for u, v, w in zip(fine, values, weights)]
        worst = max(abs(e) for e in errors)
        if worst < best[1]:
            best = (cheb, worst)
        peaks: list[int] = []  # the largest error between each two changes of sign
        for k, e in enumerate(errors):
            if peaks and (e > 0) == (errors[peaks[-1]] > 0):
                if abs(e) > abs(errors[peaks[-1]]):
                    peaks[-1] = k
            else:
                peaks.append(k)
        while len(peaks) > n:
            peaks.pop(0 if abs(errors[peaks[0]]) < abs(errors[peaks[-1]]) else -1)
        if len(peaks) < n or worst < abs(solved[degree + 1]) * mpf("1.02"):
            break
        us = [fine[k] for k in peaks]
    return to_powers(best[0], low, high), best[1]


def clenshaw(cheb: list[Any], u: Any) -> Any:
    a = b = mpf(0)
    for c in reversed(cheb[1:]):
        a, b = 2 * u * a - b + c, a
    return u * a - b + cheb[0]


def to_powers(cheb: list[Any], low: Any, high: Any) -> list[Any]:
    """From Chebyshev's polynomials on the interval to powers of x."""

    def mul_u(p: list[Any]) -> list[Any]:
        return add([-(low + high) / (high - low) * c for c in p], [0] + [2 / (high - low) * c for c in p])

    t: list[list[Any]] = [[mpf(1)], mul_u([mpf(1)])]
    while len(t) < len(cheb):
        t.append(add([2 * c for c in mul_u(t[-1])], [-c for c in t[-2]]))
    total: list[Any] = [mpf(0)]
    for c, p in zip(cheb, t):
        total = add(total, [c * v for v in p])
    return total


def add(p: list[Any], q: list[Any]) -> list[Any]:
    size = max(len(p), len(q))
    return [(p[k] if k < len(p) else 0) + (q[k] if k < len(q) else 0) for k in range(size)]


# ---------------------------------------------------------------------------------------------- what is fitted


@dataclass(frozen=True)
class Fit:
    """One function of the module. `degrees` by form, or `(degree, low, high)` where the interval is the form's own."""

    name: str
    variable: str
    doc: str
    f: Real
    low: Any
    high: Any
    degrees: dict[str, Any]
    weight: Real | None = None
    """None: the error is relative to the function itself."""


def at_root(f: Real) -> Real:
    """A function of z = x * x."""
    return lambda z: f(mp.sqrt(z))


def erfcx(a: Any) -> Any:
    return mp.exp(a * a) * mp.erfc(a)


def is_tail(z: Any) -> Any:
    """The weight of q in x + x * z * q(z): the error counts relative to x."""
    return max(z, mpf("0.01"))


def single(value: Any) -> Any:
    """A number as f32 has it."""
    return mpf(float(np.float32(float(value))))


def log4_rest(f: Any) -> Any:
    """What is left of log4(1 + f) / f after three coefficients, of which `math.py` has the second and third as f32."""
    quotient = mp.log1p(f) / f / mp.log(4)
    return (((quotient - 1 / mp.log(4)) / f + single(1 / mp.log(16))) / f - single(1 / mp.log(64))) / f


HALF_LN2 = mp.log(2) / 2
THIRD = mpf(1) / 3
SLIM = 1 + mpf(2) ** -9  # intervals reach a little beyond what the reductions leave

TABLE = (
    Fit("exp_tail", "r", "(exp(r) - 1 - r) / r**2 for |r| <= log(2) / 2", lambda r: (mp.exp(r) - 1 - r) / r**2,
        -HALF_LN2 * SLIM, HALF_LN2 * SLIM, {"f64": 10, "f32": 4}, lambda r: max(abs(r), mpf("0.01"))),
    Fit("exp_near", "r", "exp(r) for |r| <= log(2) / 2", mp.exp, -HALF_LN2 * SLIM, HALF_LN2 * SLIM, {"f32": 6}),
    Fit("exp_slope", "r", "(exp(r) - 1) / r for |r| <= log(2) / 2", lambda r: (mp.exp(r) - 1) / r,
        -HALF_LN2 * SLIM, HALF_LN2 * SLIM, {"f32": 5}, lambda r: max(abs(r), mpf("0.01")) / mp.exp(r)),
    Fit("log2_quotient", "f", "log2(1 + f) / f for |f| <= 1/3", lambda f: mp.log1p(f) / f / mp.log(2),
        -THIRD, THIRD, {"f32": 8, "half": 5}),
    Fit("log4_rest", "f", "(((log4(1 + f) / f - c0) / f - c1) / f - c2) / f for -0.31 <= f <= 0.38", log4_rest, mpf("-0.31"), mpf("0.38"), {"f32": 8},
        lambda f: max(abs(f), mpf("0.001")) ** 3),
    Fit("log1p_near", "f", "log1p(f) / f for |f| <= 1/3", lambda f: mp.log1p(f) / f, -THIRD, THIRD, {"half": 5}),
    Fit("log1p_tail", "f", "(log1p(f) - f) / f**2 for |f| <= 1/3", lambda f: (mp.log1p(f) - f) / f**2,
        -THIRD, THIRD, {"f32": 7}, lambda f: max(abs(f), mpf("0.01"))),
    Fit("log1p_quotient", "e", "log1p(e) / e for 0 <= e <= 1", lambda e: mp.log1p(e) / e, 0, 1, {"f32": 9, "half": 5}),
    Fit("atanh_third", "z", "((atanh(s) / s - 1) / z - 1/3) / z for z = s * s <= 0.0296",
        at_root(lambda s: ((mp.atanh(s) / s - 1) / s**2 - THIRD) / s**2), 0, mpf("0.0296"), {"f64": 7},
        lambda z: mpf(1)),
    Fit("atan_tail", "z", "(atan(t) / t - 1) / z for z = t * t <= 1", at_root(lambda t: (mp.atan(t) / t - 1) / t**2),
        0, 1, {"f64": 19, "f32": 7, "half": 3}, is_tail),
    Fit("asin_tail", "z", "(asin(s) / s - 1) / z for z = s * s <= 0.3165 (half: 1/4)",
        at_root(lambda s: (mp.asin(s) / s - 1) / s**2), 0, mpf("0.3165"),
        {"f64": 14, "f32": 5, "half": (1, 0, mpf(1) / 4)}, is_tail),
    Fit("sinh_tail", "z", "(sinh(x) / x - 1) / z for z = x * x <= 1 (half: 0.04)",
        at_root(lambda x: (mp.sinh(x) / x - 1) / x**2), 0, 1,
        {"f64": 6, "f32": 3, "half": (0, 0, mpf("0.04"))}, is_tail),
    Fit("tanh_tail", "z", "(tanh(x) / x - 1) / z for z = x * x <= 0.36 (half: 1/64)",
        at_root(lambda x: (mp.tanh(x) / x - 1) / x**2), 0, mpf("0.36"),
        {"f64": 10, "f32": 4, "half": (0, 0, mpf(1) / 64)}, is_tail),
    Fit("tanh_gap_cubic", "z", "(x - tanh(x)) / x**3 for z = x * x <= 1.5625 (half: 0.25)",
        at_root(lambda x: (1 - mp.tanh(x) / x) / x**2), 0, mpf("1.5625"), {"f32": 8, "half": (2, 0, mpf("0.25"))}),
    Fit("tanh_gap_tail", "z", "(3 (x - tanh(x)) / x**3 - 1) / z for z = x * x <= 1.5625",
        at_root(lambda x: (3 * (1 - mp.tanh(x) / x) / x**2 - 1) / x**2), 0, mpf("1.5625"), {"f64": 17}, is_tail),
    Fit("sin_tail", "z", "(sin(r) / r - 1) / z for z = r * r <= 2.5", at_root(lambda r: (mp.sin(r) / r - 1) / r**2),
        0, mpf("2.5"), {"half": 2}, is_tail),
    Fit("tan_tail", "z", "(tan(r) / r - 1) / z for z = r * r <= 0.63", at_root(lambda r: (mp.tan(r) / r - 1) / r**2),
        0, mpf("0.63"), {"half": 3}, is_tail),
    Fit("asinh_tail", "z", "(asinh(x) / x - 1) / z for z = x * x <= 0.09",
        at_root(lambda x: (mp.asinh(x) / x - 1) / x**2), 0, mpf("0.09"), {"half": 1}, is_tail),
    Fit("erf_excess", "z", "erf(x) / x - 1 for z = x * x <= 1", at_root(lambda x: mp.erf(x) / x - 1),
        0, 1, {"f64": 11, "f32": 6}, lambda z: mpf(1)),
    Fit("erf_quotient", "z", "erf(x) / x for z = x * x <= 9", at_root(lambda x: mp.erf(x) / x), 0, 9, {"half": 8}),
    Fit("log2_erfc", "a", "log2(erfc(a)) for 1 <= a <= 4, as 1 - erfc needs it (half: for a <= 9.2)",
        lambda a: mp.log(mp.erfc(a), 2), 1, 4, {"f32": 5, "half": (9, 0, mpf("9.2"))}, None),
    Fit("erfcx_by_slope", "t", "(1 + 2 a) exp(a * a) erfc(a) - 1 in t = (a - 4) / (a + 4), for 0 <= a <= 28",
        lambda t: (1 + 2 * (4 * (1 + t) / (1 - t))) * erfcx(4 * (1 + t) / (1 - t)) - 1, -1, mpf("0.75"),
        {"f64": 24}, lambda t: mpf(1)),
    Fit("erfcx_by_rcp", "t", "2**-64 (1 + a) exp(a * a) erfc(a) in t = 1 / (1 + a) - 1/2, for 0 <= a <= 10.1",
        lambda t: erfcx(1 / (t + 0.5) - 1) / (t + 0.5) * mpf(2) ** -64, 1 / mpf("11.1") - 0.5, mpf("0.5"), {"f32": 11}),
)  # fmt: skip


def fitted(row: Fit, form: str) -> tuple[list[Any], Any]:
    degree, low, high = row.degrees[form], row.low, row.high
    if isinstance(degree, tuple):
        degree, low, high = degree
    f = lambda x: row.f(x if abs(x) > 1e-20 else mpf(10) ** -20)  # noqa: E731  # the limit at 0
    weight = row.weight or (lambda x: 1 / f(x))
    if row.name == "log2_erfc":
        weight = lambda a: mp.erfc(a) if form == "f32" else mpf(1)  # noqa: E731
    return remez(f, low, high, degree, weight)


# ---------------------------------------------------------------------------------------------- the module

HEAD = '"""Polynomials of `math.py`, by Horner\'s rule. Written by the generator\'s `tools/fit.py`: how they are fitted."""'


def body(coefficients: list[Any], form: str, variable: str) -> list[str]:
    """Horner's rule, a line a coefficient; each is written with the fewest digits that mean its float."""
    texts = [decimal(c, form) for c in coefficients]
    if len(texts) == 1:
        return [f"p = {texts[0]}"]
    lines = [f"p = {texts[-1]} * {variable} {signed(texts[-2])}"]
    return lines + [f"p = p * {variable} {signed(t)}" for t in reversed(texts[:-2])]


def decimal(c: Any, form: str) -> str:
    return repr(float(c)) if form == "f64" else str(np.float32(float(c)))


def signed(text: str) -> str:
    return f"- {text[1:]}" if text.startswith("-") else f"+ {text}"


TESTS = {"f64": "{v}.dtype == tl.float64", "half": "HALF"}


def function(row: Fit) -> str:
    """A jit function: its forms in turn, each with its largest error."""
    forms = list(row.degrees)
    kinds = {form: fitted(row, form) for form in forms}
    errors = ", ".join(f"{form} 2**{float(mp.log(kinds[form][1], 2)):.1f}" for form in forms)
    half = ", HALF: tl.constexpr = False" if "half" in forms and len(forms) > 1 else ""
    lines = ["@triton.jit", f"def {row.name}({row.variable}{half}):", f'    """{row.doc}. Errors: {errors}."""']
    order = [form for form in ("f64", "half", "f32") if form in forms]
    for k, form in enumerate(order):
        last = k == len(order) - 1
        test = "else:" if last else f"{'el' if k else ''}if {TESTS[form].format(v=row.variable)}:"
        indent = "    " if len(order) == 1 else "        "
        lines += [] if len(order) == 1 else [f"    {test}"]
        lines += [indent + line for line in body(kinds[form][0], form, row.variable)]
    return "\n".join([*lines, "    return p"])


def main() -> None:
    imports = "from __future__ import annotations\n\nimport triton\nimport triton.language as tl"
    print("\n\n\n".join(["\n\n".join([HEAD, imports]), *(function(row) for row in TABLE)]))


if __name__ == "__main__":
    main()
