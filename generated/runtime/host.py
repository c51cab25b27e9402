"""Functions of attrs, computed on the host in float64, as a formula means them: IEEE's infinities and NaN, never an exception.

Each takes and returns Python numbers. What `math` raises for, a pole, a value off the domain or an overflow, has its limit or
NaN here; whole numbers stay whole where the formula keeps them so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

Number = Any
_INF, _NAN = math.inf, math.nan


def _total(function: Callable[..., float], overflow: Callable[..., float] = lambda *x: _INF) -> Callable[..., float]:
    """`function` with NaN where it is undefined, and `overflow` of the operands where its value is too large."""

    def call(*operands: Number) -> float:
        try:
            return function(*operands)
        except ValueError:
            return _NAN
        except OverflowError:
            return overflow(*operands)

    return call


def _at_pole(function: Callable[[float], float], pole: float, value: float) -> Callable[[Number], float]:
    """`function` with its limit at a pole."""
    total = _total(function)
    return lambda x: value if x == pole else total(x)


def _signed(x: Number, *rest: Number) -> float:
    return math.copysign(_INF, x)


exp, exp2, expm1 = (_total(f) for f in (math.exp, lambda x: math.pow(2.0, x), math.expm1))
log, log2, log10 = (_at_pole(f, 0, -_INF) for f in (math.log, math.log2, math.log10))
log1p = _at_pole(math.log1p, -1, -_INF)
sin, cos, tan, asin, acos = (_total(f) for f in (math.sin, math.cos, math.tan, math.asin, math.acos))
atan, atan2, tanh, asinh, erf, erfc, hypot = (
    math.atan,
    math.atan2,
    math.tanh,
    math.asinh,
    math.erf,
    math.erfc,
    math.hypot,
)
sinh, cosh, acosh = _total(math.sinh, _signed), _total(math.cosh), _total(math.acosh)
sqrt = _total(math.sqrt)
isnan, isinf, isfinite = math.isnan, math.isinf, math.isfinite
fmod = _total(math.fmod)


def atanh(x: Number) -> float:
    """Infinite at -1 and 1."""
    return _signed(x) if abs(x) == 1 else _total(math.atanh)(x)


def rsqrt(x: Number) -> float:
    """Infinite at 0."""
    return _signed(x) if x == 0 else 1 / sqrt(x)


def div(a: Number, b: Number) -> float:
    """By 0: infinite, with the signs of both, or NaN."""
    if b != 0:
        return float(a / b)
    return _NAN if a == 0 or a != a else math.copysign(_INF, a) * math.copysign(1.0, b)


def floordiv(a: Number, b: Number) -> Number:
    """The floor of the quotient; by 0 as `div`, and of whole numbers 0."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b else 0
    return div(a, b) if b == 0 else a // b


def mod(a: Number, b: Number) -> Number:
    """The sign of the divisor; by 0 NaN, and of whole numbers 0."""
    if isinstance(a, int) and isinstance(b, int):
        return a % b if b else 0
    return _NAN if b == 0 else a % b


def pow(a: Number, b: Number) -> Number:
    """Whole where both are and b is not negative; else as IEEE 754 has it."""
    if isinstance(a, int) and isinstance(b, int) and b >= 0:
        return a**b
    if a == 0 and b < 0:
        return math.copysign(_INF, a) if float(b).is_integer() and b % 2 else _INF
    odd = float(b).is_integer() and b % 2 == 1
    return _total(math.pow, lambda x, y: -_INF if x < 0 and odd else _INF)(a, b)


def _rounded(function: Callable[[float], int]) -> Callable[[Number], Number]:
    return lambda x: float(function(x)) if math.isfinite(x) else x


floor, ceil, trunc, round = (_rounded(f) for f in (math.floor, math.ceil, math.trunc, round))


def maximum(a: Number, b: Number) -> Number:
    """NaN stays."""
    return _NAN if a != a or b != b else max(a, b)


def minimum(a: Number, b: Number) -> Number:
    """NaN stays."""
    return _NAN if a != a or b != b else min(a, b)


def clamp(x: Number, low: Number, high: Number) -> Number:
    """NaN stays."""
    return minimum(maximum(x, low), high)


def abs_(x: Number) -> Number:
    return abs(x)


def sign(x: Number) -> Number:
    """NaN stays."""
    return x if x != x else (x > 0) - (x < 0)


def square(x: Number) -> Number:
    return x * x


def relu(x: Number) -> Number:
    """NaN stays."""
    return 0 if x <= 0 else x


def sigmoid(x: Number) -> float:
    """1 / (1 + exp(-x)), without overflow."""
    e = math.exp(-abs(x))
    return (1.0 if x >= 0 else e) / (1 + e) if x == x else _NAN


def tanh_gap(x: Number) -> float:
    """x - tanh(x); a continued fraction below 1, where that cancels."""
    if not abs(x) < 1:
        return x - math.tanh(x)
    z = x * x
    high = 11486475 + z * (810810 + z * (12870 + 44 * z))
    return x * z * high / (34459425 + z * (16216200 + z * (945945 + z * (13860 + 45 * z))))


def softplus(x: Number) -> float:
    """log(1 + exp(x)), without overflow."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x))) if x == x else _NAN


def shl(x: int, n: int) -> int:
    """0 where the shift is negative or not below 64."""
    return ((x << n) + 2**63) % 2**64 - 2**63 if 0 <= n < 64 else 0


def shr(x: int, n: int) -> int:
    """All sign bits where the shift is negative or not below 63."""
    return x >> (n if 0 <= n < 63 else 63)


def whole(x: Number) -> int:
    """`cast(x, int)`: toward 0. ValueError for what is not finite."""
    if not math.isfinite(x):
        raise ValueError(f"{x} is no whole number")
    return int(x)
