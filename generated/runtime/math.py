"""Functions that `triton.language` lacks or computes too coarsely: the same on every device and in the interpreter.

Each takes and returns the compute dtype. In f64 a result is off by at most 2 units in the last place; in f32, by at
most 4, whatever `/`, `tl.exp2` and `tl.sqrt` of a GPU round to. `HALF=True`, for f32 whose result is stored in 16 bits,
is a cheaper form: off by at most 1/8 of a unit in the last place of f16, and 0 or as small for what is below 2**-126. The generator's
`benchmarks/accuracy.py` measures all of it.

No line depends on whether a compiler fuses a * b + c: where a product must be exact, its factors have few bits, or it is `fma`'s.
The polynomials are in `polynomials.py`.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl
from triton.language.extra import libdevice

from . import polynomials

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")
"""Triton's interpreter calls no libdevice: there NumPy stands in."""

# ---------------------------------------------------------------------------------------------- pieces


@triton.jit
def alike(x, y):
    """Two operands in one shape and dtype. `tl.broadcast` takes no numbers and leaves dtypes alone; `where` unites both, and what
    it selects by is always true, so that no instruction is left."""
    known = (x == x) & (y == y)
    x = tl.where(known, x, x)
    y = tl.where(known, y, y)
    return x.to(tl.where(known, x, y).dtype), y.to(tl.where(known, x, y).dtype)


@triton.jit
def negative(x):
    """Whether the sign bit is set: also that of -0."""
    if x.dtype == tl.float64:
        return x.to(tl.int64, bitcast=True) < 0
    else:
        return x.to(tl.int32, bitcast=True) < 0


@triton.jit
def negated(x):
    """-x, with the sign of a zero turned too: some versions of Triton take -x for 0 - x."""
    return x * -1


@triton.jit
def copysign(size, x):
    """A size that is not negative, with the sign bit of x."""
    if x.dtype == tl.float64:
        sign_bit = x.to(tl.int64, bitcast=True) & -0x8000000000000000
        return (size.to(tl.int64, bitcast=True) | sign_bit).to(tl.float64, bitcast=True)
    else:
        sign_bit = x.to(tl.int32, bitcast=True) & -0x80000000
        return (size.to(tl.int32, bitcast=True) | sign_bit).to(tl.float32, bitcast=True)


@triton.jit
def high_bits(x):
    """The first 26 (f64) or 12 (f32) significant bits of x: products of two such numbers are exact."""
    if x.dtype == tl.float64:
        return (x.to(tl.int64, bitcast=True) & -0x8000000).to(tl.float64, bitcast=True)
    else:
        return (x.to(tl.int32, bitcast=True) & -0x1000).to(tl.float32, bitcast=True)


@triton.jit
def fma(a, b, c):
    """a * b + c for f32, rounded once: what an error term needs (`b` and `c` may be numbers). Some of Triton's interpreters round twice;
    in f64 the product is exact."""
    if INTERPRETED:
        return (a.to(tl.float64) * b + c).to(tl.float32)
    else:
        return tl.fma(a, b, c)


@triton.jit
def rcp_short(x):
    """1 / x to 2**-21 for 0 <= x: a GPU has an instruction for 1 / sqrt(x), and Triton reaches none for 1 / x."""
    r = tl.rsqrt(x)
    return r * r


@triton.jit
def exp2_short(x):
    """2 ** x to 2**-22, and 0 below 2**-126: one instruction of a GPU."""
    return tl.exp2(x)


@triton.jit
def exp_sum(x, low, SHIFT: tl.constexpr = 0):
    """exp(x + low) / 2**SHIFT by Cody and Waite: `low` small, -104 <= x <= 90 (f64: -746, 711), or it is 0 or inf."""
    # Adding 1.5 * 2**52 rounds to a whole number n; 2 * bias more leaves n + 2 * bias in the last bits, which halves
    # into the exponent fields of two factors. (A constant with a name would be rounded to f32.)
    if x.dtype == tl.float64:
        t = (x + low) * 1.4426950408889634 + 6755399441057790.0  # of a power, `low` is up to 0.2
        n = t - 6755399441057790.0
        r = (x - n * 0.6931471805598903) - (n * 5.497923018708371e-14 - low)
        bits = t.to(tl.int64, bitcast=True)
        half = bits >> 1
        first = (half << 52).to(tl.float64, bitcast=True)
        second = ((bits - half - SHIFT) << 52).to(tl.float64, bitcast=True)
    else:
        t = x * 1.4426950408889634 + 12583166.0
        n = t - 12583166.0
        r = (x - n * 0.693145751953125) - (n * 1.4286068e-06 - low)
        bits = t.to(tl.int32, bitcast=True)
        half = bits >> 1
        first = (half << 23).to(tl.float32, bitcast=True)
        second = ((bits - half - SHIFT) << 23).to(tl.float32, bitcast=True)
        return polynomials.exp_near(r) * first * second
    return (1.0 + (r + r * r * polynomials.exp_tail(r))) * first * second


@triton.jit
def exp_parts(x, low):
    """r and 2**(n + 64) in f32, for exp(x + low) is 2**n * exp(r): -104 <= x <= 0, so that the power is a normal number."""
    t = x * 1.4426950408889634 + 12583103.0  # 1.5 * 2**23 + 127 + 64
    n = t - 12583103.0
    r = (x - n * 0.693145751953125) - (n * 1.4286068e-06 - low)
    return r, (t.to(tl.int32, bitcast=True) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exp_fall(x, low):
    """2**64 * exp(x + low) in f32 for -104 <= x <= 0."""
    r, power = exp_parts(x, low)
    return polynomials.exp_near(r) * power


@triton.jit
def exp_less(a, HALF: tl.constexpr = False):
    """exp(-a) for a >= 0."""
    if a.dtype == tl.float64:
        return tl.exp(-a)
    elif HALF:
        return exp2_short(a * -1.4426950408889634)
    else:
        return exp_fall(-minimum(a, 104.0), 0.0) * 5.421010862427522e-20


@triton.jit
def exp_halved(a):
    """exp(a) / 2 for a >= 0, which overflows later than exp."""
    if a.dtype == tl.float64:
        return exp_sum(minimum(a, 711.0), 0.0, 1)
    else:
        return exp_sum(minimum(a, 90.0), 0.0, 1)


@triton.jit
def log_short(x, NATURAL: tl.constexpr):
    """log(x) or log2(x) of every f32, to 2**-16: x = 2**k * (1 + f), |f| <= 1/3."""
    tiny = x < 1.1754943508222875e-38
    less: tl.constexpr = 15.942385152878742 if NATURAL else 23.0
    scaled = tl.where(tiny, x * 8388608.0 + 0.0, x)  # without the sign of -0
    # 1 / sqrt is infinite at 0 and NaN below it, and too small to count elsewhere
    edge = tl.rsqrt(scaled) * 1.401298464324817e-45
    return (log_plain(scaled, tl.where(tiny, -less, 0.0), NATURAL) - edge) + lasting(x)


@triton.jit
def log_plain(x, plus, NATURAL: tl.constexpr):
    """`log_short` plus a number, for a finite positive x that is not subnormal."""
    bits = x.to(tl.int32, bitcast=True)
    k = (bits - 0x3F2AAAAB) & -0x800000
    f = (bits - k).to(tl.float32, bitcast=True) - 1.0
    if NATURAL:
        return f * polynomials.log1p_near(f) + (k.to(tl.float32) * 8.262958294867817e-08 + plus)
    else:
        return f * polynomials.log2_quotient(f, True) + (k.to(tl.float32) * 1.1920928955078125e-07 + plus)


@triton.jit
def lasting(x):
    """What infinity and NaN add to a logarithm in f32, and other numbers do not: at most 2**-21. A `where` that selects x itself would
    have each result converted to 16 bits alone, and not two at once."""
    return x * 1.401298464324817e-45


@triton.jit
def log4(a):
    """Half of log2(a) for every f32 a >= 0: a number good to 2 units in the last place, and what it lacks to 30 bits (NaN where it is
    infinite)."""
    tiny = a < 1.1754943508222875e-38
    edge = tl.where(tiny, tl.where(a == 0, float("-inf"), -11.5), tl.where(a < float("inf"), 0.0, a))
    bits = tl.where(tiny, a * 8388608.0, a).to(tl.int32, bitcast=True)
    k = (bits - 0x3F30A3D7) & -0x800000
    f = (bits - k).to(tl.float32, bitcast=True) - 1.0
    n = k.to(tl.float32) * 5.960464477539063e-08 + edge
    # The terms of the first three coefficients are sums of two. What an fma made, less the larger that it added to, is
    # exact; a second fma then finds what the first one lost.
    rest = polynomials.log4_rest(f)
    c = fma(f, rest, 0.24044917523860931)
    low = fma(f, rest, 0.24044917523860931 - c)
    b = fma(f, c, -0.3606737554073334)
    low = fma(f, low, fma(f, c, -0.3606737554073334 - b))
    a = fma(f, b, 0.7213475108146667)
    low = fma(f, low, fma(f, b, 0.7213475108146667 - a)) + 9.629814955633087e-09
    s = n + fma(f, a, 0.0)  # in two steps: s may be below n / 2, where n - s is exact for a sum of two floats
    return s, fma(f, low, fma(f, a, n - s))


@triton.jit
def atan_core(t, HALF: tl.constexpr):
    """atan(t) for 0 <= t <= 1."""
    z = t * t
    return t + t * z * polynomials.atan_tail(z, HALF)


@triton.jit
def quarter_less(y):
    """pi / 2 - y."""
    if y.dtype == tl.float64:
        return 1.5707963267948966 - (y - 6.123233995736766e-17)
    else:
        return 1.5707964 - (y + 4.371139e-08)


@triton.jit
def half_turn_less(y):
    """pi - y."""
    if y.dtype == tl.float64:
        return 3.141592653589793 - (y - 1.2246467991473532e-16)
    else:
        return 3.1415927 - (y + 8.742278e-08)


# ---------------------------------------------------------------------------------------------- exponentials


@triton.jit
def exp(x, HALF: tl.constexpr = False):
    """e ** x: Cody and Waite in f32, for a GPU's own is exp2(x * log2(e)), 44 units off at x = 88."""
    if x.dtype == tl.float64:
        return tl.exp(x)
    elif HALF:
        return exp2_short(x * 1.4426950408889634)
    else:
        return exp_sum(tl.clamp(x, -104.0, 90.0, propagate_nan=tl.PropagateNan.ALL), 0.0)


@triton.jit
def exp2(x, HALF: tl.constexpr = False):
    """2 ** x: `tl.exp2`, kept from the subnormal results that a GPU flushes to 0."""
    if x.dtype == tl.float64 or HALF:
        return tl.exp2(x)
    else:
        low = x < -120.0
        return tl.exp2(tl.where(low, x + 32.0, x)) * tl.where(low, 2.3283064365386963e-10, 1.0)


@triton.jit
def expm1(x, HALF: tl.constexpr = False):
    """exp(x) - 1: 2**n * expm1(r) + (2**n - 1), with n and r of Cody and Waite."""
    if x.dtype == tl.float64:
        c = tl.clamp(x, -50.0, 710.0, propagate_nan=tl.PropagateNan.ALL)
        t = c * 1.4426950408889634 + 6755399441056766.0
        n = t - 6755399441056766.0
        r = (c - n * 0.6931471805598903) - n * 5.497923018708371e-14
        half = (t.to(tl.int64, bitcast=True) << 52).to(tl.float64, bitcast=True)  # 2**(n - 1) does not overflow
        y = (half * (r + r * r * polynomials.exp_tail(r)) + (half - 0.5)) * 2.0
        return tl.where(tl.abs(x) < 1e-17, x, y)
    elif HALF:
        return tl.where(tl.abs(x) < 0.01, x * (0.5 * x + 1.0), exp2_short(x * 1.4426950408889634) - 1.0)
    else:
        c = tl.clamp(x, -20.0, 89.0, propagate_nan=tl.PropagateNan.ALL)
        t = c * 1.4426950408889634 + 12583038.0
        n = t - 12583038.0
        r = (c - n * 0.693145751953125) - n * 1.4286068e-06
        half = (t.to(tl.int32, bitcast=True) << 23).to(tl.float32, bitcast=True)
        y = (half * (r + r * r * polynomials.exp_tail(r)) + (half - 0.5)) * 2.0
        return tl.where(tl.abs(x) < 1e-8, x, y)


@triton.jit
def sigmoid(x, HALF: tl.constexpr = False):
    """1 / (1 + exp(-x)), as e / (1 + e) below 0: accurate far below it too."""
    if x.dtype == tl.float32 and HALF:
        return rcp_short(1.0 + exp2_short(x * -1.4426950408889634))
    else:
        e = exp_less(tl.abs(x))
        return tl.where(x < 0, e, 1.0) / (1.0 + e)


@triton.jit
def softplus(x, HALF: tl.constexpr = False):
    """log(1 + exp(x)) = max(x, 0) + log1p(exp(-|x|)), without overflow."""
    e = exp_less(tl.abs(x), HALF)
    if x.dtype == tl.float64:
        return maximum(x, 0.0) + log1p(e)
    else:
        return maximum(x, 0.0) + e * polynomials.log1p_quotient(e, HALF)


@triton.jit
def sinh(x, HALF: tl.constexpr = False):
    """(exp(x) - exp(-x)) / 2; an odd polynomial near 0."""
    if x.dtype == tl.float32 and HALF:
        t = x * 1.4426950408889634
        z = x * x
        far = exp2_short(t - 1.0) - exp2_short(-1.0 - t)
        return tl.where(tl.abs(x) < 0.2, x + x * z * polynomials.sinh_tail(z, True), far)
    else:
        a = tl.abs(x)
        z = tl.where(a < 1.0, x * x, 0.0)
        h = exp_halved(a)
        if x.dtype == tl.float64:
            far = h - 0.25 / h
        else:
            far = h - tl.exp2(a * -1.4426950408889634 - 1.0)
        return tl.where(a < 1.0, x + x * (z * polynomials.sinh_tail(z)), copysign(far, x))


@triton.jit
def cosh(x, HALF: tl.constexpr = False):
    """(exp(x) + exp(-x)) / 2, halved before it can overflow."""
    if x.dtype == tl.float32 and HALF:
        t = x * 1.4426950408889634
        return exp2_short(t - 1.0) + exp2_short(-1.0 - t)
    else:
        a = tl.abs(x)
        h = exp_halved(a)
        if x.dtype == tl.float64:
            return h + 0.25 / h
        else:
            return h + tl.exp2(a * -1.4426950408889634 - 1.0)


@triton.jit
def tanh(x, HALF: tl.constexpr = False):
    """1 - 2 / (1 + exp(2 x)); an odd polynomial near 0, where that cancels."""
    if x.dtype == tl.float32 and HALF:
        z = x * x
        far = 1.0 - 2.0 * rcp_short(1.0 + exp2_short(x * 2.8853900817779268))
        return tl.where(tl.abs(x) < 0.125, x * (1.0 + z * polynomials.tanh_tail(z, True)), far)
    else:
        a = tl.abs(x)
        z = tl.where(a < 0.6, x * x, 0.0)
        if x.dtype == tl.float64:
            far = 1.0 - 2.0 / (1.0 + tl.exp(a + a))
        else:
            far = 1.0 - 2.0 / (1.0 + tl.exp2(a * 2.8853900817779268))
        return copysign(tl.where(a < 0.6, a + a * (z * polynomials.tanh_tail(z)), far), x)


@triton.jit
def tanh_gap(x, HALF: tl.constexpr = False):
    """x - tanh(x): |x| - 1 + 2 / (1 + exp(2 |x|)); an odd polynomial near 0, where that cancels."""
    a = tl.abs(x)
    if x.dtype == tl.float64:
        b = tl.where(a < 1.25, a, 0.0)
        z = b * b
        cube = b * z
        if INTERPRETED:  # its fused product rounds twice
            bh = high_bits(b)
            zh = high_bits(z)
            square_lost = (bh * bh - z) + (b - bh) * (b + bh)
            lost = b * square_lost + ((bh * zh - cube) + (b * (z - zh) + (b - bh) * zh))
        else:
            lost = tl.fma(b, tl.fma(b, b, -z), tl.fma(b, z, -cube))
        near = (cube + (cube * (z * polynomials.tanh_gap_tail(z)) + lost)) * 0.3333333333333333
        y = tl.where(a < 1.25, near, (a - 1.0) + 2.0 / (1.0 + tl.exp(a + a)))
    elif HALF:
        z = x * x
        far = (a - 1.0) + 2.0 * rcp_short(1.0 + exp2_short(a * 2.8853900817779268))
        y = tl.where(a < 0.5, a * z * polynomials.tanh_gap_cubic(z, True), far)
    else:
        z = tl.where(a < 1.25, x * x, 0.0)
        far = (a - 1.0) + 2.0 / (1.0 + tl.exp2(a * 2.8853900817779268))
        y = tl.where(a < 1.25, a * z * polynomials.tanh_gap_cubic(z), far)
    return copysign(y, x)


# ---------------------------------------------------------------------------------------------- logarithms


@triton.jit
def log(x, HALF: tl.constexpr = False):
    """The natural logarithm."""
    if x.dtype == tl.float32 and HALF:
        return log_short(x, True)
    else:
        return tl.log(x)


@triton.jit
def log2(x, HALF: tl.constexpr = False):
    """The logarithm to base 2; in f32 that which `pow` of the same x computes too."""
    if x.dtype == tl.float32 and HALF:
        return log_short(x, False)
    elif x.dtype == tl.float32:
        s, low = log4(tl.abs(x))
        return tl.where(x < 0, float("nan"), s + s)
    else:
        return tl.log2(x)


@triton.jit
def log10(x, HALF: tl.constexpr = False):
    """The logarithm to base 10, from the natural one."""
    if x.dtype == tl.float32 and HALF:
        return log_short(x, False) * 0.3010299956639812
    else:
        return tl.log(x) * 0.4342944819032518


@triton.jit
def log1p(x, HALF: tl.constexpr = False):
    """log(1 + x)."""
    if x.dtype == tl.float64:
        return log1p_sum(x, 0.0)
    else:
        y = tl.where(x > -1.0, log1p_core(x, 0.0, HALF), tl.where(x == -1.0, float("-inf"), float("nan")))
        return y + lasting(x)


@triton.jit
def log1p_sum(x, low):
    """log(1 + x + low) in f64: the log of the rounded sum u, mended by what it lost, over u."""
    u = 1.0 + x
    lost = tl.where(x < 1.0, x - (u - 1.0), 1.0 - (u - x)) + low
    inside = (u > 0) & (u < float("inf"))
    y = tl.log(u) + tl.where(inside, lost, 0.0) / tl.where(inside, u, 1.0)
    return tl.where(u == 1.0, x, y)


@triton.jit
def log1p_core(x, plus, HALF: tl.constexpr):
    """log(1 + x) + plus in f32 for finite x > -1; the sign of 0 stays if `plus` is 0."""
    # 1 + x = 2**k * (1 + m), |m| <= 1/3, and m from x itself: x * 2**-k - (1 - 2**-k); -k, for -0 to stay
    less = (0x3FAAAAAA - (1.0 + x).to(tl.int32, bitcast=True)) & -0x800000
    twice = (0x40000000 + less).to(tl.float32, bitcast=True)  # 2 * 2**-k; 0 where k = 128
    m = (x.to(tl.int32, bitcast=True) + less).to(tl.float32, bitcast=True) - (1.0 - 0.5 * twice)
    n = less.to(tl.float32)
    if HALF:
        return m * polynomials.log1p_near(m) - (n * 8.262958294867817e-08 - plus)
    else:
        return (m + (m * m * polynomials.log1p_tail(m) - n * 1.7030314e-13)) - (n * 8.262941264808194e-08 - plus)


@triton.jit
def asinh(x, HALF: tl.constexpr = False):
    """sign(x) * log1p(a + a**2 / (1 + sqrt(1 + a**2))), a = |x|."""
    a = tl.abs(x)
    z = a * a
    if x.dtype == tl.float64:
        big = a > 1152921504606846976.0
        w = tl.where(big, a, a + z / (1.0 + tl.sqrt(1.0 + z)))
        return copysign(log1p(w) + tl.where(big, 1.0, 0.0).to(x.dtype) * 0.6931471805599453, x)
    elif HALF:
        half = 0.5 * a + tl.where(a > 1e9, 0.5 * a, tl.sqrt(0.25 * z + 0.25))
        far = log_plain(half, 0.6931471805599453, True) + lasting(a)
        return copysign(tl.where(a < 0.3, a + a * z * polynomials.asinh_tail(z), far), x)
    else:
        # the coarse quotient is a smaller part of what the logarithm takes the less the logarithm lessens its error
        w = a + tl.where(z < float("inf"), a * (a * rcp_short(1.0 + tl.sqrt(1.0 + z))), 0.0)
        y = log1p_core(w, tl.where(z < float("inf"), 0.0, 0.6931471805599453), False)
        return copysign(y + lasting(a), x)


@triton.jit
def acosh(x, HALF: tl.constexpr = False):
    """log1p(t + sqrt(2 t + t**2)), t = x - 1."""
    t = x - 1.0
    if x.dtype == tl.float64:
        big = x > 1152921504606846976.0
        s = tl.sqrt(2.0 * t + t * t)
        w = tl.where(big, x, s + t)
        y = log1p_sum(w, tl.where(big, 0.0, t - (w - s))) + tl.where(big, 1.0, 0.0).to(x.dtype) * 0.6931471805599453
        return tl.where(x < 1.0, float("nan"), y)
    else:
        z = t * (tl.abs(t) + 2.0)  # negative wherever t is: NaN is the root
        big = z == float("inf")
        w = t + tl.where(big, 0.0, tl.sqrt(z))
        return log1p_core(w, tl.where(big, 0.6931471805599453, 0.0), HALF) + lasting(w)


@triton.jit
def atanh(x, HALF: tl.constexpr = False):
    """sign(x) * log1p(2 a + 2 a**2 / (1 - a)) / 2, a = |x|."""
    a = tl.abs(x)
    twice = a + a
    if x.dtype == tl.float64:
        y = 0.5 * log1p(twice + twice * a / (1.0 - a))
        return copysign(tl.where(a > 1.0, float("nan"), y), x)
    else:
        # the coarse quotient is a smaller part of what the logarithm takes the less the logarithm lessens its error
        w = twice + twice * (a * rcp_short(1.0 - a))
        return copysign(0.5 * log1p_core(w, 0.0, HALF) + lasting(w), x)


# ---------------------------------------------------------------------------------------------- trigonometry


@triton.jit
def turned(x, h, SIDES: tl.constexpr):
    """x - h * pi / SIDES (1 or 2) in f32, pi in three parts: 2 h is a whole number below 2**17. All parts are above 0, so that of no
    turn it is x itself, -0 too."""
    if SIDES == 1:
        return fma(h, -1.0780605906948477e-14, fma(h, -1.5099578831723193e-07, fma(h, -3.141592502593994, x)))
    else:
        return fma(h, -5.390302953474238e-15, fma(h, -7.549789415861596e-08, fma(h, -1.570796251296997, x)))


@triton.jit
def sine_of(r, turns):
    """sin(r) for |r| <= pi / 2, its sign turned where the last bit of `turns` is set; for results in 16 bits."""
    z = r * r
    y = r * (1.0 + z * polynomials.sin_tail(z))
    return (y.to(tl.int32, bitcast=True) ^ (turns.to(tl.int32, bitcast=True) << 31)).to(tl.float32, bitcast=True)


@triton.jit
def sin(x, HALF: tl.constexpr = False):
    """`tl.sin`, kept from the subnormal operands that a GPU flushes to 0. Half: of r = x - n pi, where all of a tile is below 1e5."""
    if x.dtype == tl.float32 and HALF:
        t = x * 0.31830987 + 12582912.0  # 1.5 * 2**23 rounds to a whole number
        y = sine_of(turned(x, t - 12582912.0, 1), t)
        if tl.max(tl.abs(x)) > 1e5:
            y = tl.sin(x)
        return y
    else:
        return tl.where(tl.abs(x) < 1e-20, x, tl.sin(x))


@triton.jit
def cos(x, HALF: tl.constexpr = False):
    """`tl.cos`. Half: as for `sin`, of r = x - (n + 1/2) pi."""
    if x.dtype == tl.float32 and HALF:
        t = (x * 0.31830987 - 0.5) + 12582913.0  # one more, for the sign
        y = sine_of(turned(x, (t - 12582913.0) + 0.5, 1), t)
        if tl.max(tl.abs(x)) > 1e5:
            y = tl.cos(x)
        return y
    else:
        return tl.cos(x)


@triton.jit
def tan(x, HALF: tl.constexpr = False):
    """The tangent: libdevice's, for only there can one lane take the long way of a large angle and its neighbours not. Half: as for
    `sin`, of r = x - n pi / 2."""
    if x.dtype == tl.float32 and HALF:
        t = x * 0.63661975 + 12582912.0
        r = turned(x, t - 12582912.0, 2)
        z = r * r
        y = r * (1.0 + z * polynomials.tan_tail(z))
        odd = (t.to(tl.int32, bitcast=True) & 1) != 0
        y = tl.where(odd, copysign(rcp_short(tl.abs(y)), negated(y)), y)
        if tl.max(tl.abs(x)) > 1e5:
            y = tan_careful(x)
        return y
    else:
        return tl.where(tl.abs(x) < 1e-20, x, tan_careful(x))  # libdevice flushes subnormals


@triton.jit
def tan_careful(x):
    """The tangent of any angle, but for subnormal ones."""
    if INTERPRETED:
        return tl.sin(x) / tl.cos(x)
    else:
        return libdevice.tan(x)


@triton.jit
def beyond_half(a, HALF: tl.constexpr):
    """Where asin and acos halve the angle: late enough that what pi / 2 is lessened by is below 1, so rounds finely."""
    if HALF:
        return a > 0.5
    else:
        return a > 0.5625


@triton.jit
def asin(x, HALF: tl.constexpr = False):
    """An odd polynomial to 9/16; pi / 2 - 2 asin(sqrt((1 - |x|) / 2)) beyond."""
    a = tl.abs(x)
    far = beyond_half(a, HALF)
    z = tl.where(far, 0.5 - 0.5 * a, x * x)
    s = tl.where(far, tl.sqrt(z), a)
    y = s + s * (z * polynomials.asin_tail(z, HALF))
    return copysign(tl.where(far, quarter_less(y + y), y), x)


@triton.jit
def acos(x, HALF: tl.constexpr = False):
    """pi / 2 - asin(x) to 9/16; 2 asin(sqrt((1 - |x|) / 2)) beyond, from pi where x is negative."""
    a = tl.abs(x)
    far = beyond_half(a, HALF)
    z = tl.where(far, 0.5 - 0.5 * a, x * x)
    s = tl.where(far, tl.sqrt(z), x)
    y = s + s * (z * polynomials.asin_tail(z, HALF))
    return tl.where(far, tl.where(x < 0, half_turn_less(y + y), y + y), quarter_less(y))


@triton.jit
def atan(x, HALF: tl.constexpr = False):
    """An odd polynomial to 1; pi / 2 - atan(1 / |x|) beyond."""
    a = tl.abs(x)
    far = a > 1.0
    if x.dtype == tl.float32 and HALF:
        y = atan_core(tl.where(far, rcp_short(a), a), True)
    else:
        y = atan_core(tl.where(far, 1.0 / a, a), False)
    return copysign(tl.where(far, quarter_less(y), y), x)


@triton.jit
def atan2(y, x, HALF: tl.constexpr = False):
    """The angle of (x, y): atan of the smaller over the larger, then turned; the edges of IEEE 754."""
    y, x = alike(y, x)
    ay = tl.abs(y)
    ax = tl.abs(x)
    steep = ay > ax
    top = tl.where(steep, ax, ay)
    bottom = tl.where(steep, ay, ax)
    if x.dtype == tl.float32 and HALF:
        few = bottom < 1.1754943508222875e-38
        top = tl.where(few, top * 16777216.0, top)
        bottom = tl.where(few, bottom * 16777216.0, bottom)
        root = tl.rsqrt(bottom)
        t = top * root * root
    else:
        t = top / bottom
    t = tl.where(top == bottom, tl.where(top == 0, 0.0, 1.0), t)
    angle = atan_core(t, HALF)
    angle = tl.where(steep, quarter_less(angle), angle)
    return copysign(tl.where(negative(x), half_turn_less(angle), angle), y)


# ---------------------------------------------------------------------------------------------- error function


@triton.jit
def erf(x, HALF: tl.constexpr = False):
    """An odd polynomial to |x| = 1 (half: all the way to 3, where it is 1), the complement beyond."""
    if x.dtype == tl.float32 and HALF:
        c = tl.clamp(x, -3.0, 3.0, propagate_nan=tl.PropagateNan.ALL)
        return c * polynomials.erf_quotient(c * c)
    else:
        a = tl.abs(x)
        z = tl.where(a < 1.0, x * x, 0.0)
        if x.dtype == tl.float64:
            far = 1.0 - erfc(a)
        else:
            far = 1.0 - tl.exp2(polynomials.log2_erfc(minimum(a, 4.0)))
        return tl.where(a < 1.0, x + x * polynomials.erf_excess(z), copysign(far, x))


@triton.jit
def erfc(x, HALF: tl.constexpr = False):
    """1 - erf(x), accurate relative to itself in the tail: exp(-a**2), the square in two parts, times a polynomial."""
    a = tl.abs(x)
    if x.dtype == tl.float64:
        a = minimum(a, 27.5)
        high = high_bits(a)
        d = 1.0 + 2.0 * a
        lost = tl.where(a < 0.5, 2.0 * a - (d - 1.0), 1.0 - (d - 2.0 * a))
        e = exp_sum(-high * high, (high - a) * (high + a) - lost / d)
        y = (e + e * polynomials.erfcx_by_slope((a - 4.0) / (a + 4.0))) / d
        z = tl.where(a < 0.45, x * x, 0.0)
        near = 1.0 - (x + x * polynomials.erf_excess(z))
        return tl.where(a < 0.45, near, tl.where(x < 0, 2.0 - y, y))
    elif HALF:
        y = exp2_short(polynomials.log2_erfc(minimum(a, 9.2), True))
        return tl.where(x < 0, 2.0 - y, y)
    else:
        a = minimum(a, 10.1)
        less = negated(a)  # -a would be an instruction of its own
        top = fma(less, a, 0.0)  # no product that a compiler may fuse: the next line is what it lacks
        q = rcp_short(1.0 + a)
        lost = fma(less, q, 1.0) - q  # 1 / (1 + a) is q * exp(lost), but for lost**2
        r, power = exp_parts(top, fma(less, a, negated(top)) + lost)
        y = q * polynomials.erfcx_by_rcp((q - 0.5) + q * lost) * power
        y = y + y * (r * polynomials.exp_slope(r))
        return tl.where(x < 0, 2.0 - y, y)


# ---------------------------------------------------------------------------------------------- powers and roots


@triton.jit
def sqrt(x):
    """`tl.sqrt`, kept from the subnormal operands that a GPU flushes to 0."""
    if x.dtype == tl.float64:
        return tl.sqrt(x)
    else:
        tiny = x < 1.1754943508222875e-38
        return tl.sqrt(tl.where(tiny, x * 16777216.0, x)) * tl.where(tiny, 0.000244140625, 1.0)


@triton.jit
def rsqrt(x):
    """`tl.rsqrt`, kept from the subnormal operands that a GPU flushes to 0."""
    if x.dtype == tl.float64:
        return tl.rsqrt(x)
    else:
        tiny = x < 1.1754943508222875e-38
        return tl.rsqrt(tl.where(tiny, x * 16777216.0, x)) * tl.where(tiny, 4096.0, 1.0)


@triton.jit
def pow(x, y, HALF: tl.constexpr = False):
    """x ** y = 2 ** (y log2 |x|) with the edges of IEEE 754; log2 has 5 bits more than the result (half: none). A number 2 squares x."""
    shape: tl.constexpr = getattr(y, "shape", [1])
    number: tl.constexpr = len(shape) == 1 and shape[0] == 1
    x, y = alike(x, y)
    a = tl.abs(x)
    if x.dtype == tl.float64:
        size = pow_wide(a, y)
    else:
        size = pow_narrow(a, y, HALF)
    if number:
        size = tl.where(y == 2.0, x * x, size)  # what people check by heart
    size = tl.where((a == 1.0) | (y == 0.0), 1.0, size)
    d = tl.abs(past_even(y))
    size = tl.where(negative(x) & (d == 1.0), negated(size), size)
    whole = d * d >= d  # of 0 and 1; not of NaN, either
    return tl.where(below_zero(x) & ~whole, float("nan"), size)


@triton.jit
def below_zero(x):
    """Whether x is finite and negative. By its bits: of two comparisons a compiler makes seven instructions."""
    x = x + 0.0  # -0 is not
    if x.dtype == tl.float64:
        return x.to(tl.int64, bitcast=True) < -0x10000000000000
    else:
        return x.to(tl.int32, bitcast=True) < -0x800000


@triton.jit
def past_even(y):
    """y less the nearest even number, for |y|: of a whole y, 0 or 1 or -1; floats this large are even, so they may stop."""
    if y.dtype == tl.float64:
        y = minimum(tl.abs(y), 9007199254740992.0)
        return y - ((y * 0.5 + 4503599627370496.0) - 4503599627370496.0) * 2.0
    else:
        y = minimum(tl.abs(y), 16777216.0)
        return y - ((y * 0.5 + 8388608.0) - 8388608.0) * 2.0


@triton.jit
def pow_narrow(a, y, HALF: tl.constexpr):
    """a ** y in f32 for a >= 0; where a is 1 or y is 0, it may be NaN. log2(a) and its product with y are sums of two f32 (half: f32)."""
    if HALF:
        tiny = a < 1.1754943508222875e-38
        edge = tl.where(tiny, tl.where(a == 0, float("-inf"), -23.0), tl.where(a < float("inf"), 0.0, a))
        bits = tl.where(tiny, a * 8388608.0, a).to(tl.int32, bitcast=True)
        k = (bits - 0x3F2AAAAB) & -0x800000
        f = (bits - k).to(tl.float32, bitcast=True) - 1.0
        n = k.to(tl.float32) * 1.1920928955078125e-07 + edge
        return exp2_short(y * (f * polynomials.log2_quotient(f) + n))
    else:
        s, low = log4(a)
        # y * log4(a) = j + r, j whole: 1.5 * 2**23 + 127 leaves it in the last bits, which become the exponent of 2**j. It
        # may stop where all has left the range. There r is no rest, and `low` not a number.
        t = tl.clamp(fma(y, s, 12583039.0), 12582962.0, 12583116.0, propagate_nan=tl.PropagateNan.ALL)
        r = fma(y, s, 12583039.0 - t)
        r = tl.where(tl.abs(r) > 1.0, 0.0, fma(y, low, r))
        root = (t.to(tl.int32, bitcast=True) << 23).to(tl.float32, bitcast=True)
        return tl.exp2(r + r) * root * root


@triton.jit
def pow_wide(a, y):
    """a ** y in f64 for a >= 0: log(a) = k log(2) + 2 atanh(f / (2 + f)) as a sum of two f64 with 66 bits."""
    tiny = a < 2.2250738585072014e-308
    bits = tl.where(tiny, a * 18014398509481984.0, a).to(tl.int64, bitcast=True)
    k = (bits - 0x3FE6A09E667F3BCD) & -0x10000000000000
    m = (bits - k).to(tl.float64, bitcast=True)
    n = (k >> 52).to(tl.float64) - tl.where(tiny, 54.0, 0.0)
    # s = (m - 1) / (m + 1) = sh + sl
    f = m - 1.0
    g = m + 1.0
    s = f / g
    sh = high_bits(s)
    gh = high_bits(g)
    sl = ((f - sh * gh) - sh * (m - (gh - 1.0))) / g
    # atanh(s) = s * (1 + c), c = ch + cl = z / 3 + z**2 * tail, z = s**2 = zh + zl
    square_sh = sh * sh
    z = square_sh + sl * (s + sh)
    zh = high_bits(square_sh)
    zl = (square_sh - zh) + sl * (s + sh)
    product = zh * 0.3333333283662796
    ch = high_bits(product)
    cl = (product - ch) + (zl * 0.3333333333333333 + (zh * 4.967053731282552e-09 + z * z * polynomials.atanh_third(z)))
    sch = sh * ch
    first = sh + sch
    rest = (sch - (first - sh)) + (sl + (sl * ch + s * cl))
    # the sum with k log(2)
    nh = n * 0.6931471805598903
    lh = nh + 2.0 * first
    ll = (2.0 * first - (lh - nh)) + (2.0 * rest + n * 5.497923018708371e-14)
    # times y, which may stop where every a but 1 has left the range
    y = tl.clamp(y, -1e24, 2e24, propagate_nan=tl.PropagateNan.ALL)  # equal sizes fail to compile in f64
    head = high_bits(lh)
    yh = high_bits(y)
    product = yh * head
    low = y * ((lh - head) + ll) + (y - yh) * head
    low = tl.where(tl.abs(product) < 800.0, low, 0.0)
    size = exp_sum(tl.clamp(product, -746.0, 711.0, propagate_nan=tl.PropagateNan.ALL), low)
    edge = (a == 0) | (a == float("inf"))
    size = tl.where(edge & (y == y), tl.where((a == 0) == (y < 0), float("inf"), 0.0), size)
    return tl.where(a == a, size, a)


@triton.jit
def hypot(x, y):
    """sqrt(x**2 + y**2), scaled by a power of 2; infinite where either is, NaN beside it or not."""
    x, y = alike(x, y)
    a = tl.abs(x)
    b = tl.abs(y)
    top = tl.maximum(a, b)
    if x.dtype == tl.float64:
        e = top.to(tl.int64, bitcast=True) & 0x7FF0000000000000
        e = tl.minimum(tl.maximum(e, 0x0010000000000000), 0x7FD0000000000000)
        up = (0x7FE0000000000000 - e).to(tl.float64, bitcast=True)
        down = e.to(tl.float64, bitcast=True)
    else:
        e = top.to(tl.int32, bitcast=True) & 0x7F800000
        e = tl.minimum(tl.maximum(e, 0x00800000), 0x7E800000)
        up = (0x7F000000 - e).to(tl.float32, bitcast=True)
        down = e.to(tl.float32, bitcast=True)
    a *= up
    b *= up
    size = tl.sqrt(a * a + b * b) * down
    return tl.where(top == float("inf"), float("inf"), size)


# ---------------------------------------------------------------------------------------------- division


@triton.jit
def divide(a, b):
    """The quotient as IEEE 754 rounds it: for what is floored, rounded or compared, and for one value a row."""
    if a.dtype == tl.float32:
        return tl.div_rn(a, b)
    else:
        return a / b


@triton.jit
def fmod(a, b, HALF: tl.constexpr = False):
    """What a / b leaves, rounded toward 0: exact, with the sign of a, as in C.

    The cheaper form may take a subnormal b for 2**-126, for what either leaves is below that.
    """
    a, b = alike(a, b)
    if a.dtype.is_int():
        return a % b
    elif a.dtype == tl.float32 and HALF:
        d = tl.abs(b)
        r, far = near_left(tl.abs(a), d)
        r = copysign(tl.where(r < 0, r + d, r), a)
        if far:
            r = far_left(a, b)
        return r
    elif INTERPRETED:
        return a % b
    elif a.dtype == tl.float64:
        return libdevice.fmod(a, b)
    else:
        # First by 2**64 b where b is near them, then what is left and b times 2**64.
        tiny = (tl.abs(b) < 1e-18) & (b != 0)
        d = tl.where(tiny, b * 18446744073709551616.0, b)
        r = tl.where(tl.abs(a) < tl.abs(d), a, libdevice.fmod(a, d))
        rest = libdevice.fmod(tl.where(tiny, r * 18446744073709551616.0, 0.0), d) * 5.421010862427522e-20
        return tl.where(tiny, rest, r)


@triton.jit
def near_left(a, d):
    """f32, d >= 0: a less the nearest whole multiple of d, or the one beside it, exactly but for a last bit where the quotient is next to
    1/2; and whether a tile has to go the long way: for a quotient of 2**17 or more, or a d that is subnormal or above 2**126.
    """
    root = tl.rsqrt(d)
    quotient = a * root * root
    r = fma((quotient + 12582912.0) - 12582912.0, negated(d), a)
    return r, tl.max(tl.maximum(tl.abs(quotient), d * 1e-33 + root * 1e-14)) > 131072.0


@triton.jit
def far_left(a, b):
    """`fmod` of the cheaper form, for any quotient: near subnormals, which libdevice's takes for 0, by 2**64 of both. The exact way is two
    calls, whose registers the short way would lack."""
    if INTERPRETED:
        return a % b
    else:
        size, d = tl.abs(a), tl.abs(b)
        small = (d < 1e-18) & (size < 1e18)
        least = tl.where(b == 0, b, tl.where(small, d * 18446744073709551616.0, maximum(d, 1.1754943508222875e-38)))
        r = libdevice.fmod(tl.where(small, a * 18446744073709551616.0, a), least)
        return tl.where(size < d, a, tl.where(small, r * 5.421010862427522e-20, r))


@triton.jit
def mod(a, b, HALF: tl.constexpr = False):
    """a - b * floor(a / b), rounded once: the sign of the divisor, as in Python."""
    a, b = alike(a, b)
    if a.dtype == tl.float32 and HALF:
        r, far = near_left(a, tl.abs(b))
        if far:
            r = far_left(a, b)
    else:
        r = fmod(a, b, HALF)
    return tl.where((r != 0) & ((r < 0) != (b < 0)), r + b, r)


@triton.jit
def floordiv(a, b):
    """Floor of the true quotient: Python's sign. Where the quotient was rounded up to a whole number, what it leaves says so."""
    a, b = alike(a, b)
    if a.dtype.is_int():
        return tl.where((a % b != 0) & ((a < 0) != (b < 0)), a // b - 1, a // b)
    else:
        q = tl.floor(divide(a, b))
        if INTERPRETED:
            left = a % b  # NumPy has no fused product; the rest is as good, for it is exact
            q = round(divide(a - left, b))
        else:
            left = tl.where(isinf(b), a, tl.fma(-q, b, a))  # exact, or at least of the right sign
        q = tl.where((left != 0) & ((left < 0) != (b < 0)), q - 1.0, q)
        return tl.where(b == 0, a / b, tl.where(isinf(a), float("nan"), q))


# ---------------------------------------------------------------------------------------------- steps and choices


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
    """minimum(maximum(x, low), high); NaN stays, also that of a bound."""
    return minimum(maximum(x, low), high)


@triton.jit
def sign(x):
    """-1, 0 or 1; NaN stays."""
    return tl.where(x > 0, 1, tl.where(x < 0, -1, x))


@triton.jit
def square(x):
    """x * x."""
    return x * x


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
def shift_left(x, n):
    """x << n; 0 where n is negative or not below the width, as in torch."""
    width: tl.constexpr = (x + n).dtype.primitive_bitwidth
    x = x.to((x + n).dtype)
    inside = (n >= 0) & (n < width)
    return tl.where(inside, x << tl.where(inside, n, 0), 0)


@triton.jit
def shift_right(x, n):
    """x >> n with the sign; all sign bits where n is negative or not below the width, as in torch."""
    last: tl.constexpr = (x + n).dtype.primitive_bitwidth - 1
    x = x.to((x + n).dtype)
    return x >> tl.where((n >= 0) & (n < last), n, last)
