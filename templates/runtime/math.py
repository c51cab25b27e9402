"""Functions that `triton.language` lacks, in Triton: the same arithmetic on every device and in the interpreter.

Each takes and returns the compute dtype (f32 or f64). Coefficients: Chebyshev fits computed to 40 digits with mpmath.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)): the power overflows to inf, and the quotient to 0, where x is far below 0."""
    if x.dtype == tl.float64:
        return 1.0 / (1.0 + tl.exp(-x))
    else:
        return 1.0 / (1.0 + tl.exp2(x * -1.4426950408889634))


@triton.jit
def divide(a, b):
    """The quotient as IEEE 754 rounds it: for what is floored, rounded or compared."""
    if a.dtype == tl.float32:
        return tl.div_rn(a, b)
    else:
        return a / b


@triton.jit
def log1p(x):
    """log(1 + x), by the correction of Kahan (HP-15C Advanced Functions Handbook)."""
    u = 1.0 + x
    exact = (u == 1.0) | (u == float("inf"))
    return tl.where(exact, x, tl.log(u) * (x / tl.where(exact, 1.0, u - 1.0)))


@triton.jit
def expm1(x):
    """exp(x) - 1, by the correction of Kahan."""
    u = tl.exp(x)
    v = u - 1.0
    plain = (u == 1.0) | (v == -1.0) | (u == float("inf"))
    fixed = v * (x / tl.where(plain, 1.0, tl.log(u)))
    return tl.where(u == 1.0, x, tl.where(plain, v, fixed))


@triton.jit
def softplus(x):
    """log(1 + exp(x)), without overflow."""
    return relu(x) + log1p(tl.exp(-tl.abs(x)))


@triton.jit
def tanh(x):
    """By expm1: accurate near 0, and 1 far from it."""
    t = expm1(-2.0 * tl.abs(x))
    y = -t / (2.0 + t)
    return tl.where(x < 0, -y, y)


@triton.jit
def relu(x):
    """NaN stays."""
    return tl.where(x <= 0, 0, x)


@triton.jit
def maximum(a, b):
    """NaN stays."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum(a, b):
    """NaN stays."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def clamp(x, low, high):
    """minimum(maximum(x, low), high); NaN stays."""
    return tl.where(x < low, tl.minimum(low, high), tl.where(x > high, high, x))


@triton.jit
def sign(x):
    """-1, 0 or 1; NaN stays."""
    return tl.where(x > 0, 1, tl.where(x < 0, -1, x))


@triton.jit
def square(x):
    """x * x."""
    return x * x


@triton.jit
def isnan(x):
    """Whether x is NaN."""
    return x != x


@triton.jit
def isinf(x):
    """Whether x is infinite."""
    return tl.abs(x) == float("inf")


@triton.jit
def isfinite(x):
    """Whether x is neither infinite nor NaN."""
    return tl.abs(x) < float("inf")


@triton.jit
def floordiv(a, b):
    """Floor of the true quotient: Python's sign."""
    left = a % b
    lower = (left != 0) & ((left < 0) != (b < 0))
    if (a.dtype == tl.float32) | (a.dtype == tl.float64):
        q = round(divide(a - left, b))
        return tl.where(b == 0, a / b, tl.where(lower, q - 1.0, q))
    else:
        return tl.where(lower, a // b - 1, a // b)


@triton.jit
def mod(a, b):
    """a - b * floor(a / b): the sign of the divisor, as in Python."""
    r = a % b
    return tl.where((r != 0) & ((r < 0) != (b < 0)), r + b, r)


@triton.jit
def trunc(x):
    """The integer part."""
    return tl.where(x < 0, tl.ceil(x), tl.floor(x))


@triton.jit
def round(x):
    """The nearest integer, half to even."""
    low = tl.floor(x)
    gap = x - low
    odd = tl.floor(low * 0.5) * 2.0 != low
    return tl.where((gap > 0.5) | ((gap == 0.5) & odd), low + 1.0, low)


@triton.jit
def pow(x, y):
    """x ** y with the edges of IEEE 754; f32 is computed in f64."""
    x, y = tl.broadcast(x, y)
    a = tl.abs(x).to(tl.float64)
    e = y.to(tl.float64)
    size = tl.exp2(e * tl.log2(a))
    whole = tl.floor(e) == e
    odd = whole & (tl.floor(e * 0.5) * 2.0 != e) & (tl.abs(e) < 9007199254740992.0)
    size = tl.where((x < 0) & odd, -size, size)
    size = tl.where((x < 0) & (~whole) & (a != float("inf")), float("nan"), size)
    size = tl.where((a == 1.0) & (tl.abs(e) == float("inf")), 1.0, size)
    size = tl.where((x == 1.0) | (e == 0.0), 1.0, size)
    return size.to(x.dtype)


@triton.jit
def horner_erfcx(t, WIDE: tl.constexpr):
    """(1 + 2 x) exp(x * x) erfc(x) as a polynomial in t = (x - 4) / (x + 4), for x >= 0: 3e-9 in f32, 4e-19 in f64."""
    if WIDE:
        p = 4.1764525159303025e-11 * t - 1.374870279840134e-10
        p = p * t - 5.374375762360343e-10
        p = p * t + 1.7904666592341703e-09
        p = p * t + 3.950112425920452e-09
        p = p * t - 1.4709913302053912e-08
        p = p * t - 2.186722701090701e-08
        p = p * t + 1.1009793741922406e-07
        p = p * t + 7.888049378115379e-08
        p = p * t - 8.249204024913095e-07
        p = p * t + 2.9094559501828337e-07
        p = p * t + 5.7092064219138924e-06
        p = p * t - 1.1220773117347149e-05
        p = p * t - 2.4398944708930552e-05
        p = p * t + 0.0001506213141977052
        p = p * t - 0.00019925677571486832
        p = p * t - 0.0007577732210801952
        p = p * t + 0.005031969992660607
        p = p * t - 0.016197734065725
        p = p * t + 0.037167515535930215
        p = p * t - 0.06633036581166844
        p = p * t + 0.0937328349984382
        p = p * t - 0.10103906603632412
        p = p * t + 0.0680970542546904
        p = p * t + 0.015379652102620024
        p = p * t - 0.1396211168405625
        return p * t + 1.2329951186255526
    else:
        p = 0.00011420817284239764 * t - 0.0002484367302906843
        p = p * t - 0.0007091327872478508
        p = p * t + 0.005082269577976422
        p = p * t - 0.016230391983383954
        p = p * t + 0.03714045869415886
        p = p * t - 0.0663190440889797
        p = p * t + 0.09374020549562148
        p = p * t - 0.10104094077093906
        p = p * t + 0.06809617491082492
        p = p * t + 0.015379768723304961
        p = p * t - 0.13962108647903831
        return p * t + 1.232995117439782


@triton.jit
def erfc(x):
    """1 - erf(x), accurate relative to itself in the tail."""
    a = tl.abs(x)
    a = tl.where(a > 40.0, 40.0, a)
    p = horner_erfcx((a - 4.0) / (a + 4.0), x.dtype == tl.float64) / (1.0 + 2.0 * a)
    high = tl.floor(a * 16.0) * 0.0625  # its square is exact
    y = p * (tl.exp(-high * high) * tl.exp(-(a - high) * (a + high)))
    return tl.where(x < 0, 2.0 - y, y)


@triton.jit
def erf(x):
    """The error function: a polynomial to |x| = 1, the complement beyond."""
    z = tl.where(tl.abs(x) < 1.0, x * x, 0.0)
    p = 5.958930743134941e-11 * z - 1.1373902296430911e-09
    p = p * z + 1.4660051998394848e-08
    p = p * z - 1.6350354461959655e-07
    p = p * z + 1.6461004480962034e-06
    p = p * z - 1.4925595519506043e-05
    p = p * z + 0.00012055331122299266
    p = p * z - 0.0008548326981129666
    p = p * z + 0.005223977624823223
    p = p * z - 0.026866170645077334
    p = p * z + 0.11283791670954882
    p = p * z - 0.3761263890318375
    p = p * z + 1.1283791670955126
    far = 1.0 - erfc(tl.abs(x))
    return tl.where(tl.abs(x) < 1.0, x * p, tl.where(x < 0, -far, far))


@triton.jit
def log10(x):
    """Logarithm to base 10."""
    return tl.log(x) * 0.4342944819032518


@triton.jit
def fmod(a, b):
    """What a / b, rounded toward 0, leaves: the sign of a, as in C."""
    return a % b


@triton.jit
def hypot(x, y):
    """sqrt(x * x + y * y), without overflow."""
    a, b = tl.abs(x), tl.abs(y)
    high, low = maximum(a, b), minimum(a, b)
    ratio = low / tl.where(high == 0.0, 1.0, high)
    return tl.where(high == float("inf"), high, high * tl.sqrt(1.0 + ratio * ratio))


@triton.jit
def tan(x):
    """Tangent."""
    return tl.sin(x) / tl.cos(x)


@triton.jit
def atan(x):
    """Inverse tangent: halved twice, then its series."""
    a = tl.abs(x)
    t = tl.where(a > 1.0, 1.0 / tl.where(a > 1.0, a, 1.0), a)
    t = t / (1.0 + tl.sqrt(1.0 + t * t))
    t = t / (1.0 + tl.sqrt(1.0 + t * t))
    z = t * t
    p = z / 21.0 - 0.05263157894736842
    p = p * z + 0.058823529411764705
    p = p * z - 0.06666666666666667
    p = p * z + 0.07692307692307693
    p = p * z - 0.09090909090909091
    p = p * z + 0.1111111111111111
    p = p * z - 0.14285714285714285
    p = p * z + 0.2
    p = p * z - 0.3333333333333333
    p = p * z + 1.0
    y = 4.0 * t * p
    y = tl.where(a > 1.0, 1.5707963267948966 - y, y)
    return tl.where(x < 0, -y, y)


@triton.jit
def atan2(y, x):
    """Angle of the point (x, y)."""
    a, b = tl.abs(x), tl.abs(y)
    q = atan(tl.where(a == b, 1.0, b / a))
    q = tl.where((y == 0.0) & (x == 0.0), 0.0, q)
    q = tl.where(x < 0, 3.141592653589793 - q, q)
    return tl.where(y < 0, -q, q)


@triton.jit
def asin(x):
    """Inverse sine."""
    return atan(x / tl.sqrt((1.0 - x) * (1.0 + x)))


@triton.jit
def acos(x):
    """Inverse cosine."""
    return 2.0 * atan(tl.sqrt((1.0 - x) / (1.0 + x)))


@triton.jit
def sinh(x):
    """Hyperbolic sine."""
    a = tl.abs(x)
    t = expm1(tl.where(a < 20.0, a, 0.0))
    half = tl.exp(0.5 * a)
    y = tl.where(a < 20.0, 0.5 * (t + t / (t + 1.0)), 0.5 * half * half)
    return tl.where(x < 0, -y, y)


@triton.jit
def cosh(x):
    """Hyperbolic cosine."""
    half = tl.exp(0.5 * tl.abs(x))
    return 0.5 * half * half + 0.5 / half / half


@triton.jit
def asinh(x):
    """Inverse hyperbolic sine."""
    a = tl.abs(x)
    b = tl.where(a < 1e9, a, 0.0)
    y = tl.where(a < 1e9, log1p(b + b * b / (1.0 + tl.sqrt(1.0 + b * b))), tl.log(a) + 0.6931471805599453)
    return tl.where(x < 0, -y, y)


@triton.jit
def acosh(x):
    """Inverse hyperbolic cosine."""
    t = tl.where(x < 1e9, x - 1.0, 0.0)
    y = tl.where(x < 1e9, log1p(t + tl.sqrt(t * (t + 2.0))), tl.log(x) + 0.6931471805599453)
    return tl.where(x < 1.0, float("nan"), y)


@triton.jit
def atanh(x):
    """Inverse hyperbolic tangent."""
    return 0.5 * (log1p(x) - log1p(-x))
