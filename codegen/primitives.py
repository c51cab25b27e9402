"""The one table: what each primitive is typed, means, differentiates to, and is called in Triton.

Takes nothing; gives `TABLE` (a row a primitive) and `RULES` (type rules of every graph operation). A new elementwise
primitive is one row here, and a function in `templates/runtime/math.py` where `tl` has none.

    TABLE["tanh"]   Primitive(arity=1, rule=_float, numpy=np.tanh, mp=mp.tanh, triton="math.tanh",
                              vjp=lambda b, g, a, y: (g * (1 - y * y),))

A `vjp` sees the builder, the cotangent g, the operands and the answer y, and gives one part per operand: a node, None
where no gradient flows, or a pair (condition, node) that stands for `where(condition, node, 0)`. Conventions at the
edges are in `docs/spec.md`; where torch has the function they are torch's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mpmath
import numpy as np

from codegen.ir import HOST_OPS, Builder, Node, Type, TypeFault, TypeRule

Array = np.ndarray[Any, Any]
Part = Node | tuple[Node, Node] | None
Vjp = Callable[[Builder, Node, tuple[Node, ...], Node], tuple[Part, ...]]


@dataclass(frozen=True)
class Primitive:
    """One elementwise primitive."""

    name: str
    arity: int
    rule: TypeRule
    numpy: Callable[..., Any]
    """Its float64 meaning; the same function on float32 arrays is its float32 meaning."""
    mp: Callable[..., Any]
    """Its meaning on mpmath numbers."""
    triton: str
    """`tl.exp`, `math.erfc` (of the runtime), or an infix sign."""
    vjp: Vjp | None = None
    """None where no gradient flows (steps, predicates)."""
    analytic: bool = True
    """Whether the numpy function continues to complex numbers (for the complex step)."""
    doc: str = ""
    edges: str = ""
    listed: bool = True
    """Whether authors write it by name (operators are spelled by their sign)."""
    coarse: float = 0.0
    """Where its Triton function has a cheaper form for results in half precision, chosen by a last parameter `HALF`: that
    form's largest error, in units in the last place of float16 (at most 1/8). 0: there is none."""
    long: bool = False
    """Whether that form has so many instructions, more than about 14, that a kernel of it is bound by them and not by memory. Not of
    `mod` and `fmod`, whose way for large quotients takes the registers."""
    neighbour: str = ""
    """A function that is easily mistaken for it: what mutation tests try in its place."""
    domain: tuple[float, float] = (-math.inf, math.inf)
    """Between which values of the first operand it is real and smooth (of a periodic one: the piece around 0)."""
    plain: bool = True
    """Whether its Triton function takes plain numbers beside tensors."""


# ---------------------------------------------------------------------------------------------- type rules


def _union(args: tuple[Node, ...]) -> frozenset[str]:
    return frozenset().union(*(a.axes for a in args))


def _no_bool(args: tuple[Node, ...]) -> None:
    if any(a.kind == "bool" for a in args):
        raise TypeFault("bool-arithmetic", "arithmetic on a truth value", "write `where(condition, value, 0)`")


def _arith(b: Builder, args: tuple[Node, ...], params: tuple[Any, ...]) -> Type:
    _no_bool(args)
    return Type("float" if any(a.kind == "float" for a in args) else "int", _union(args))


def _float(b: Builder, args: tuple[Node, ...], params: tuple[Any, ...]) -> Type:
    _no_bool(args)
    return Type("float", _union(args))


def _power(b: Builder, args: tuple[Node, ...], params: tuple[Any, ...]) -> Type:
    """int ** number >= 0 stays int; every other power of integers is computed in float (a negative exponent is legal)."""
    _no_bool(args)
    base, exponent = args
    whole = exponent.op == "const" and isinstance(exponent.params[0], int) and exponent.params[0] >= 0
    return Type("int" if base.kind == "int" and whole else "float", _union(args))


def _compare(b: Builder, args: tuple[Node, ...], params: tuple[Any, ...]) -> Type:
    kinds = {a.kind for a in args}
    if "bool" in kinds and kinds != {"bool"}:
        raise TypeFault(
            "bool-arithmetic", "a truth value compared with a number", "use the condition itself, or `~` of it"
        )
    return Type("bool", _union(args))


def _predicate(b: Builder, args: tuple[Node, ...], params: tuple[Any, ...]) -> Type:
    _no_bool(args)
    return Type("bool", _union(args))


def _logic(b: Builder, args: tuple[Node, ...], params: tuple[Any, ...]) -> Type:
    kinds = {a.kind for a in args}
    if len(kinds) > 1 or "float" in kinds:
        raise TypeFault(
            "logic-on-numbers", "`& | ^ ~` take truth values, or whole numbers",
            "compare first, in parentheses: `(a > 0) & (b > 0)`; a power is `x ** 2`",
        )  # fmt: skip
    return Type(args[0].kind, _union(args))


def _shift(b: Builder, args: tuple[Node, ...], params: tuple[Any, ...]) -> Type:
    if any(a.kind != "int" for a in args):
        raise TypeFault("shift-of-numbers", "`<<` and `>>` take whole numbers", "a power of two is `exp2(x)`")
    return Type("int", _union(args))


def _where(b: Builder, args: tuple[Node, ...], params: tuple[Any, ...]) -> Type:
    if args[0].kind != "bool":
        raise TypeFault(
            "not-a-condition", f"the condition of `where` is {args[0].kind}, not bool", "compare it: `x != 0`"
        )
    kinds = {a.kind for a in args[1:]}
    if "bool" in kinds and kinds != {"bool"}:
        raise TypeFault("bool-arithmetic", "`where` between a truth value and a number")
    kind = "bool" if kinds == {"bool"} else "float" if "float" in kinds else "int"
    return Type(kind, _union(args))


# ---------------------------------------------------------------------------------------------- float64 meaning


def _real(x: Any) -> Any:
    return x.real if np.iscomplexobj(x) else x


def _np_sigmoid(x: Array) -> Array:
    e = np.exp(np.where(_real(x) > 0, -x, x))
    return np.where(_real(x) > 0, 1 / (1 + e), e / (1 + e))


def _np_tanh_gap(x: Any) -> Any:
    z = np.where(np.abs(x) < 1, x * x, 0)  # the continued fraction of Lambert (to 17), less its first term
    high = 11486475 + z * (810810 + z * (12870 + 44 * z))
    low = 34459425 + z * (16216200 + z * (945945 + z * (13860 + 45 * z)))
    return np.where(np.abs(x) < 1, x * z * (high / low), x - np.tanh(x))


def _np_softplus(x: Array) -> Array:
    up = _real(x) > 0
    return np.where(up, x, 0 * x if np.iscomplexobj(x) else np.zeros_like(x)) + np.log1p(np.exp(np.where(up, -x, x)))


def _np_relu(x: Array) -> Array:
    return np.where(_real(x) <= 0, np.zeros_like(x), x)


def _elementwise(scalar: Callable[[float], float]) -> Callable[[Array], Array]:
    def apply(x: Array) -> Array:
        x = np.asarray(x)
        flat = [scalar(float(v)) if math.isfinite(v) else scalar_at_edge(scalar, float(v)) for v in x.ravel()]
        return np.array(flat, dtype=x.dtype if x.dtype.kind == "f" else np.float64).reshape(x.shape)

    return apply


def scalar_at_edge(scalar: Callable[[float], float], v: float) -> float:
    return math.nan if v != v else scalar(v)


def _np_pow(x: Any, e: Any) -> Any:
    if np.asarray(x).dtype.kind in "iu" and np.asarray(e).dtype.kind in "iu" and np.any(np.asarray(e) < 0):
        return np.power(np.asarray(x, np.float64), e)
    return np.power(x, e)


def _np_div(a: Any, b: Any) -> Any:
    return np.true_divide(a, b)


def _np_compare(f: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda a, b: f(_real(a), _real(b))


def _np_floordiv(a: Any, b: Any) -> Any:
    return np.asarray(a) // b


def _np_shl(x: Any, n: Any) -> Any:
    n = np.asarray(n)
    return np.where((n >= 0) & (n < 64), np.left_shift(x, np.clip(n, 0, 63)), 0)


def _np_shr(x: Any, n: Any) -> Any:
    n = np.asarray(n)
    return np.right_shift(x, np.where((n >= 0) & (n < 63), n, 63))


# ---------------------------------------------------------------------------------------------- mpmath meaning

_mp = mpmath.mp
_INF = mpmath.inf


def _is_nan(x: Any) -> bool:
    return bool(mpmath.isnan(x))


def _lifted(f: Callable[..., Any]) -> Callable[..., Any]:
    """NaN in, NaN out; a value that mpmath refuses (a pole, a complex root) is NaN."""

    def apply(*args: Any) -> Any:
        if any(_is_nan(a) for a in args):
            return mpmath.nan
        try:
            value = f(*args)
        except (ZeroDivisionError, ValueError, OverflowError):
            return mpmath.nan
        return mpmath.nan if isinstance(value, mpmath.mpc) and value.imag != 0 else mpmath.re(value)

    return apply


def _mp_div(a: Any, b: Any) -> Any:
    if b == 0:
        return mpmath.nan if a == 0 else mpmath.sign(a) * _INF
    return mpmath.mpf(a) / b


def _mp_exp(x: Any) -> Any:
    if x == -_INF or x < -1e9:
        return mpmath.mpf(0)
    return _INF if x > 1e9 else mpmath.exp(x)


def _mp_sigmoid(x: Any) -> Any:
    return 1 / (1 + _mp_exp(-x)) if x > -1e9 else mpmath.mpf(0)


def _mp_softplus(x: Any) -> Any:
    return x if x > 1e6 else mpmath.log1p(_mp_exp(x))


def _mp_tanh(x: Any) -> Any:
    return mpmath.sign(x) if abs(x) > 1e6 else mpmath.tanh(x)


def _mp_tanh_gap(x: Any) -> Any:
    if abs(x) > 1e6:
        return x - mpmath.sign(x)
    with mpmath.workprec(mpmath.mp.prec + 2 * max(0, -mpmath.mag(x)) + 8 if x else mpmath.mp.prec):
        return x - mpmath.tanh(x)


def _mp_erfc(x: Any) -> Any:
    return mpmath.mpf(0) if x > 1e6 else mpmath.mpf(2) if x < -1e6 else mpmath.erfc(x)


def _mp_pow(x: Any, e: Any) -> Any:
    if e == 0 or x == 1:
        return mpmath.mpf(1)
    if x == 0:
        return mpmath.mpf(0) if e > 0 else _INF
    if mpmath.isinf(e):
        return _INF if (abs(x) > 1) == (e > 0) else mpmath.mpf(0)
    if abs(e) > 1e9 and mpmath.isint(e):  # mpmath would write such an exponent out, bit by bit
        size = _mp_exp(e * mpmath.log(abs(x)))
        return -size if x < 0 and e % 2 else size
    return mpmath.power(x, e)


def _mp_sinh(x: Any) -> Any:
    return mpmath.sinh(x) if abs(x) < 1e6 else mpmath.sign(x) * _mp_exp(abs(x)) / 2


def _mp_cosh(x: Any) -> Any:
    return mpmath.cosh(x) if abs(x) < 1e6 else _mp_exp(abs(x)) / 2


def _mp_periodic(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: mpmath.nan if mpmath.isinf(x) else f(x)


def _mp_fmod(a: Any, b: Any) -> Any:
    if mpmath.isinf(a) or b == 0:
        return mpmath.nan
    return mpmath.mpf(a) if mpmath.isinf(b) else mpmath.sign(a) * mpmath.fmod(abs(a), abs(b))


def _mp_log(x: Any) -> Any:
    return -_INF if x == 0 else mpmath.nan if x < 0 else mpmath.log(x)


def _mp_mul(a: Any, b: Any) -> Any:
    return mpmath.mpf(a) * b


def _mp_where(c: Any, a: Any, b: Any) -> Any:
    return a if c else b


def _mp_select(pick: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda a, b: mpmath.nan if _is_nan(a) or _is_nan(b) else pick(a, b)


# ---------------------------------------------------------------------------------------------- VJPs


def _vjp_pow(b: Builder, g: Node, args: tuple[Node, ...], y: Node) -> tuple[Part, ...]:
    x, e = args
    if e.op == "const":
        n = e.params[0]
        if n == 0:
            return None, None
        lower = x if n == 2 else b.op("pow", x, n - 1)
        return (g if n == 1 else b.op("mul", b.op("mul", g, n), lower)), None
    flows = b.op("not", b.op("eq", e, 0))
    dx = b.op("mul", b.op("mul", g, e), b.op("pow", x, b.op("sub", e, 1)))
    at_zero = b.op("and", b.op("eq", x, 0), b.op("ge", e, 0))
    de = b.op("mul", b.op("mul", g, y), b.op("log", x))
    return (flows, dx), (b.op("not", at_zero), de)


def _vjp_extreme(less: str) -> Vjp:
    """Of two equal operands each takes half of the cotangent."""

    def vjp(b: Builder, g: Node, args: tuple[Node, ...], y: Node) -> tuple[Part, ...]:
        p, q = args
        shared = b.op("where", b.op("eq", p, q), b.op("mul", 0.5, g), g)
        return (b.op("not", b.op(less, p, q)), shared), (b.op("not", b.op(less, q, p)), shared)

    return vjp


def _vjp_clamp(b: Builder, g: Node, args: tuple[Node, ...], y: Node) -> tuple[Part, ...]:
    x, low, high = args
    inside = b.op("and", b.op("ge", x, low), b.op("le", x, high))
    under = b.op("and", b.op("lt", x, low), b.op("le", low, high))
    over = b.op("or", b.op("gt", x, high), b.op("gt", low, high))
    return (inside, g), (under, g), (over, g)


def _vjp_div(b: Builder, g: Node, args: tuple[Node, ...], y: Node) -> tuple[Part, ...]:
    return b.op("div", g, args[1]), b.op("neg", b.op("div", b.op("mul", g, y), args[1]))


def _vjp_quotient(b: Builder, g: Node, args: tuple[Node, ...], y: Node) -> tuple[Part, ...]:
    """Of `x - y * q` with a whole q, found from what it leaves: x / y itself may round up to the next."""
    whole = b.op("round", b.op("div", b.op("sub", args[0], y), args[1]))
    return g, b.op("neg", b.op("mul", g, whole))


def _vjp_hypot(b: Builder, g: Node, args: tuple[Node, ...], y: Node) -> tuple[Part, ...]:
    away = b.op("not", b.op("eq", y, 0))
    p, q = (b.op("mul", g, b.op("div", a, y)) for a in args)
    return (away, p), (away, q)


def _vjp_atan2(b: Builder, g: Node, args: tuple[Node, ...], y: Node) -> tuple[Part, ...]:
    """Twice divided by the radius: its square may overflow, or be 0."""
    r = b.op("hypot", *args)
    away = b.op("not", b.op("eq", r, 0))
    up, across = (b.op("mul", g, b.op("div", b.op("div", a, r), r)) for a in args)
    return (away, across), (away, b.op("neg", up))


def _times(partial: Callable[[Builder, Node, Node], Node]) -> Vjp:
    """A unary primitive from its partial, given as a function of operand and answer."""
    return lambda b, g, args, y: (b.op("mul", g, partial(b, args[0], y)),)


_TWO_OVER_SQRT_PI = 1.1283791670955126
_LN2 = 0.6931471805599453
_LN10 = 2.302585092994046


def _bell(b: Builder, x: Node) -> Node:
    return b.op("mul", _TWO_OVER_SQRT_PI, b.op("exp", b.op("neg", b.op("mul", x, x))))


def _bow(b: Builder, x: Node) -> Node:
    return b.op("rsqrt", b.op("mul", b.op("sub", 1, x), b.op("add", 1, x)))


def _row(*args: Any, **kw: Any) -> Primitive:
    return Primitive(*args, **kw)


_ROWS = (
    # operators
    _row("add", 2, _arith, np.add, _lifted(lambda a, b: a + b), "+", lambda b, g, a, y: (g, g), listed=False),
    _row("sub", 2, _arith, np.subtract, _lifted(lambda a, b: a - b), "-",
         lambda b, g, a, y: (g, b.op("neg", g)), listed=False),
    _row("mul", 2, _arith, np.multiply, _lifted(_mp_mul), "*",
         lambda b, g, a, y: (b.op("mul", g, a[1]), b.op("mul", g, a[0])), listed=False),
    _row("div", 2, _float, _np_div, _lifted(_mp_div), "/", _vjp_div, listed=False, plain=False),
    _row("floordiv", 2, _arith, _np_floordiv, _lifted(lambda a, b: mpmath.floor(_mp_div(a, b))), "math.floordiv",
         analytic=False, listed=False, edges="of floats: that of the true quotient, where `floor(x / y)` is of the rounded one"),
    _row("mod", 2, _arith, np.mod, _lifted(lambda a, b: a - b * mpmath.floor(a / b)), "math.mod",
         _vjp_quotient, analytic=False, listed=False, edges="the sign is that of the divisor, as in Python", coarse=0.001),
    _row("fmod", 2, _arith, np.fmod, _lifted(_mp_fmod), "math.fmod", _vjp_quotient, analytic=False, plain=False,
         doc="what `x / y`, rounded toward 0, leaves", edges="the sign is that of x, as in C", coarse=0.001),
    _row("pow", 2, _power, _np_pow, _lifted(_mp_pow), "math.pow", _vjp_pow, analytic=False, listed=False, plain=False,
         domain=(0.0, math.inf),
         edges="x ** 0 is 1; at base 0 the gradient of the exponent is 0 where the exponent is not negative", coarse=0.03, long=True),
    _row("neg", 1, _arith, np.negative, _lifted(lambda a: -a), "-", lambda b, g, a, y: (b.op("neg", g),), listed=False),
    _row("lt", 2, _compare, _np_compare(np.less), lambda a, b: a < b, "<", listed=False),
    _row("le", 2, _compare, _np_compare(np.less_equal), lambda a, b: a <= b, "<=", listed=False),
    _row("gt", 2, _compare, _np_compare(np.greater), lambda a, b: a > b, ">", listed=False),
    _row("ge", 2, _compare, _np_compare(np.greater_equal), lambda a, b: a >= b, ">=", listed=False),
    _row("eq", 2, _compare, _np_compare(np.equal), lambda a, b: a == b, "==", listed=False),
    _row("ne", 2, _compare, _np_compare(np.not_equal), lambda a, b: a != b, "!=", listed=False),
    _row("and", 2, _logic, np.bitwise_and, lambda a, b: a and b, "&", listed=False),
    _row("or", 2, _logic, np.bitwise_or, lambda a, b: a or b, "|", listed=False),
    _row("xor", 2, _logic, np.bitwise_xor, lambda a, b: a != b, "^", listed=False),
    _row("not", 1, _logic, np.invert, lambda a: not a, "~", listed=False),
    _row("shl", 2, _shift, _np_shl, lambda x, n: x * 2**n if n >= 0 else 0, "math.shift_left", listed=False, plain=False,
         edges="0 where the shift is negative or not below the width"),
    _row("shr", 2, _shift, _np_shr, lambda x, n: mpmath.floor(x / 2**n) if n >= 0 else (-1 if x < 0 else 0),
         "math.shift_right", listed=False, plain=False,
         edges="arithmetic; all sign bits where the shift is negative or not below the width"),
    # steps and signs
    _row("abs", 1, _arith, np.abs, _lifted(abs), "tl.abs",
         _times(lambda b, x, y: b.op("sign", x)), analytic=False, doc="|x|", edges="derivative 0 at 0"),
    _row("sign", 1, _arith, np.sign, _lifted(mpmath.sign), "math.sign", analytic=False,
         doc="-1, 0 or 1", edges="sign(0) = 0; NaN stays; derivative 0"),
    _row("floor", 1, _float, np.floor, _lifted(mpmath.floor), "tl.floor", analytic=False,
         doc="the largest integer not above x", edges="derivative 0"),
    _row("ceil", 1, _float, np.ceil, _lifted(mpmath.ceil), "tl.ceil", analytic=False,
         doc="the smallest integer not below x", edges="derivative 0"),
    _row("round", 1, _float, np.round, _lifted(mpmath.nint), "math.round", analytic=False,
         doc="the nearest integer", edges="half to even; derivative 0"),
    _row("trunc", 1, _float, np.trunc, _lifted(lambda x: mpmath.sign(x) * mpmath.floor(abs(x))), "math.trunc",
         analytic=False, doc="the integer part", edges="derivative 0"),
    # exponentials, logarithms, roots
    _row("exp", 1, _float, np.exp, _lifted(_mp_exp), "math.exp", _times(lambda b, x, y: y), doc="e ** x", neighbour="exp2", coarse=0.01),
    _row("exp2", 1, _float, np.exp2, _lifted(lambda x: _mp_exp(x * mpmath.log(2))), "math.exp2",
         _times(lambda b, x, y: b.op("mul", _LN2, y)), analytic=False, doc="2 ** x", neighbour="exp", coarse=0.001),
    _row("expm1", 1, _float, np.expm1, _lifted(lambda x: mpmath.expm1(x) if abs(x) < 1e6 else _mp_exp(x) - 1),
         "math.expm1", _times(lambda b, x, y: b.op("exp", x)), doc="e ** x - 1, accurate near 0", neighbour="exp", coarse=0.03),
    _row("log", 1, _float, np.log, _lifted(_mp_log), "math.log",
         lambda b, g, a, y: (b.op("div", g, a[0]),), doc="natural logarithm", neighbour="log2",
         domain=(0.0, math.inf), coarse=0.02, long=True),
    _row("log2", 1, _float, np.log2, _lifted(lambda x: _mp_log(x) / mpmath.log(2)), "math.log2",
         lambda b, g, a, y: (b.op("div", g, b.op("mul", _LN2, a[0])),), analytic=False, doc="logarithm to base 2",
         neighbour="log", domain=(0.0, math.inf), coarse=0.02, long=True),
    _row("log10", 1, _float, np.log10, _lifted(lambda x: _mp_log(x) / mpmath.log(10)), "math.log10",
         lambda b, g, a, y: (b.op("div", g, b.op("mul", _LN10, a[0])),), doc="logarithm to base 10",
         neighbour="log", domain=(0.0, math.inf), coarse=0.025, long=True),
    _row("log1p", 1, _float, np.log1p, _lifted(lambda x: _mp_log(1 + x) if abs(x) > 0.5 else mpmath.log1p(x)),
         "math.log1p", lambda b, g, a, y: (b.op("div", g, b.op("add", 1, a[0])),), doc="log(1 + x), accurate near 0",
         neighbour="log", domain=(-1.0, math.inf), coarse=0.02, long=True),
    _row("sqrt", 1, _float, np.sqrt, _lifted(lambda x: mpmath.nan if x < 0 else mpmath.sqrt(x)), "math.sqrt",
         lambda b, g, a, y: (b.op("div", g, b.op("mul", 2, y)),), doc="square root", edges="derivative inf at 0",
         neighbour="rsqrt", domain=(0.0, math.inf)),
    _row("rsqrt", 1, _float, lambda x: 1 / np.sqrt(x), _lifted(
        lambda x: mpmath.nan if x < 0 else _INF if x == 0 else 1 / mpmath.sqrt(x)), "math.rsqrt",
         _times(lambda b, x, y: b.op("mul", -0.5, b.op("mul", y, b.op("mul", y, y)))), doc="1 / sqrt(x)",
         edges="inf at 0, derivative -inf", neighbour="sqrt", domain=(0.0, math.inf)),
    _row("square", 1, _arith, np.square, _lifted(lambda x: x * x), "math.square",
         _times(lambda b, x, y: b.op("mul", 2, x)), doc="x * x"),
    _row("hypot", 2, _float, np.hypot, _lifted(mpmath.hypot), "math.hypot", _vjp_hypot, analytic=False, plain=False,
         doc="sqrt(x * x + y * y), without overflow", edges="derivatives 0 where both are 0"),
    # trigonometric and hyperbolic, and their inverses
    _row("sin", 1, _float, np.sin, _lifted(_mp_periodic(mpmath.sin)), "math.sin",
         _times(lambda b, x, y: b.op("cos", x)), doc="sine of radians", neighbour="cos", coarse=0.004, long=True),
    _row("cos", 1, _float, np.cos, _lifted(_mp_periodic(mpmath.cos)), "math.cos",
         _times(lambda b, x, y: b.op("neg", b.op("sin", x))), doc="cosine of radians", neighbour="sin", coarse=0.004, long=True),
    _row("tan", 1, _float, np.tan, _lifted(_mp_periodic(mpmath.tan)), "math.tan",
         _times(lambda b, x, y: b.op("add", 1, b.op("mul", y, y))), doc="tangent of radians", neighbour="tanh",
         domain=(-0.5 * math.pi, 0.5 * math.pi), coarse=0.012, long=True),
    _row("asin", 1, _float, np.arcsin, _lifted(mpmath.asin), "math.asin",
         lambda b, g, a, y: (b.op("mul", g, _bow(b, a[0])),), doc="inverse sine", edges="derivative inf at -1 and 1",
         neighbour="acos", domain=(-1.0, 1.0), coarse=0.08, long=True),
    _row("acos", 1, _float, np.arccos, _lifted(mpmath.acos), "math.acos",
         lambda b, g, a, y: (b.op("neg", b.op("mul", g, _bow(b, a[0]))),), doc="inverse cosine, in [0, pi]",
         edges="derivative -inf at -1 and 1", neighbour="asin", domain=(-1.0, 1.0), coarse=0.08, long=True),
    _row("atan", 1, _float, np.arctan, _lifted(mpmath.atan), "math.atan",
         lambda b, g, a, y: (b.op("div", g, b.op("add", 1, b.op("mul", a[0], a[0]))),), doc="inverse tangent",
         neighbour="tanh", coarse=0.08, long=True),
    _row("atan2", 2, _float, np.arctan2, _lifted(mpmath.atan2), "math.atan2", _vjp_atan2, analytic=False, plain=False,
         doc="angle of the point (x, y), in [-pi, pi]", edges="derivatives 0 where both are 0", coarse=0.08, long=True),
    _row("sinh", 1, _float, np.sinh, _lifted(_mp_sinh), "math.sinh", _times(lambda b, x, y: b.op("cosh", x)),
         doc="hyperbolic sine", neighbour="cosh", coarse=0.01),
    _row("cosh", 1, _float, np.cosh, _lifted(_mp_cosh), "math.cosh", _times(lambda b, x, y: b.op("sinh", x)),
         doc="hyperbolic cosine", neighbour="sinh", coarse=0.01),
    _row("asinh", 1, _float, np.arcsinh, _lifted(mpmath.asinh), "math.asinh",
         lambda b, g, a, y: (b.op("div", g, b.op("hypot", a[0], 1.0)),), doc="inverse hyperbolic sine", neighbour="asin", coarse=0.015, long=True),
    _row("acosh", 1, _float, np.arccosh, _lifted(mpmath.acosh), "math.acosh",
         lambda b, g, a, y: (b.op("mul", b.op("mul", g, b.op("rsqrt", b.op("sub", a[0], 1))),
                                  b.op("rsqrt", b.op("add", a[0], 1))),),
         doc="inverse hyperbolic cosine", edges="NaN below 1; derivative inf at 1", neighbour="asinh",
         domain=(1.0, math.inf), coarse=0.02, long=True),
    _row("atanh", 1, _float, np.arctanh, _lifted(mpmath.atanh), "math.atanh",
         lambda b, g, a, y: (b.op("div", g, b.op("mul", b.op("sub", 1, a[0]), b.op("add", 1, a[0]))),),
         doc="inverse hyperbolic tangent", edges="infinite at -1 and 1, NaN beyond", neighbour="atan", domain=(-1.0, 1.0), coarse=0.02, long=True),
    # sigmoids
    _row("tanh", 1, _float, np.tanh, _lifted(_mp_tanh), "math.tanh",
         _times(lambda b, x, y: b.op("sub", 1, b.op("mul", y, y))), doc="hyperbolic tangent", neighbour="sigmoid", coarse=0.027),
    _row("tanh_gap", 1, _float, _np_tanh_gap, _lifted(_mp_tanh_gap), "math.tanh_gap",
         _times(lambda b, x, y: b.op("square", b.op("tanh", x))), analytic=False, doc="x - tanh(x), accurate near 0",
         neighbour="tanh", coarse=0.06, long=True),
    _row("sigmoid", 1, _float, _np_sigmoid, _lifted(_mp_sigmoid), "math.sigmoid",
         _times(lambda b, x, y: b.op("mul", y, b.op("sub", 1, y))), doc="1 / (1 + exp(-x)), without overflow",
         neighbour="tanh", coarse=0.01),
    _row("softplus", 1, _float, _np_softplus, _lifted(_mp_softplus), "math.softplus",
         _times(lambda b, x, y: b.op("sigmoid", x)), doc="log(1 + exp(x)), without overflow", neighbour="relu", coarse=0.025, long=True),
    _row("erf", 1, _float, _elementwise(math.erf), _lifted(lambda x: 1 - _mp_erfc(x) if abs(x) > 30 else mpmath.erf(x)),
         "math.erf", _times(lambda b, x, y: _bell(b, x)), analytic=False, doc="error function", neighbour="erfc", coarse=0.07),
    _row("erfc", 1, _float, _elementwise(math.erfc), _lifted(_mp_erfc), "math.erfc",
         _times(lambda b, x, y: b.op("neg", _bell(b, x))), analytic=False, doc="1 - erf(x), accurate in the tail",
         neighbour="erf", coarse=0.06, long=True),
    # pieces
    _row("relu", 1, _arith, _np_relu, _lifted(lambda x: mpmath.mpf(0) if x <= 0 else x), "math.relu",
         lambda b, g, a, y: ((b.op("not", b.op("le", a[0], 0)), g),), doc="x where x > 0, else 0",
         edges="NaN stays; derivative 0 at 0", neighbour="softplus"),
    _row("maximum", 2, _arith, np.maximum, _mp_select(lambda a, b: a if a > b else b), "math.maximum", _vjp_extreme("lt"),
         analytic=False, doc="the larger", edges="NaN stays; equal operands share the cotangent", neighbour="minimum"),
    _row("minimum", 2, _arith, np.minimum, _mp_select(lambda a, b: a if a < b else b), "math.minimum", _vjp_extreme("gt"),
         analytic=False, doc="the smaller", edges="NaN stays; equal operands share the cotangent", neighbour="maximum"),
    _row("clamp", 3, _arith, lambda x, low, high: np.minimum(np.maximum(x, low), high),
         _lifted(lambda x, low, high: min(max(x, low), high)), "math.clamp", _vjp_clamp, analytic=False,
         doc="minimum(maximum(x, low), high)", edges="NaN stays; the bounds pass the cotangent"),
    _row("where", 3, _where, np.where, _mp_where, "tl.where",
         lambda b, g, a, y: (None, (a[0], g), (b.op("not", a[0]), g)), doc="a where the condition holds, else b",
         edges="the derivative is that of the branch taken"),
    # predicates
    _row("isnan", 1, _predicate, np.isnan, lambda x: _is_nan(x), "math.isnan", doc="whether x is NaN"),
    _row("isinf", 1, _predicate, np.isinf, lambda x: bool(mpmath.isinf(x)), "math.isinf", doc="whether x is infinite"),
    _row("isfinite", 1, _predicate, np.isfinite, lambda x: not (_is_nan(x) or mpmath.isinf(x)), "math.isfinite",
         doc="whether x is neither infinite nor NaN"),
)  # fmt: skip

TABLE: Mapping[str, Primitive] = {row.name: row for row in _ROWS}
HOST_OPS |= set(TABLE) | {"cast"}

# ---------------------------------------------------------------------------------------------- structural rules

MONOIDS = ("sum", "mean", "max", "min", "prod", "any", "all", "argmax", "argmin", "logsumexp", "var")
SCANS = ("cumsum", "cumprod", "linear")


def _rule_reduce(b: Builder, args: tuple[Node, ...], params: tuple[Any, ...]) -> Type:
    name, axes = params
    x = args[0]
    _has_axes(b, name, x, axes)
    if name in ("any", "all") and x.kind != "bool":
        raise TypeFault("not-a-condition", f"`{name}` takes truth values, this is {x.kind}", "compare it: `x != 0`")
    if x.kind == "bool" and name not in ("sum", "any", "all"):
        raise TypeFault("bool-arithmetic", f"`{name}` of truth values", "count them with `sum`")
    if name in ("argmax", "argmin"):
        kind = "int"
    elif name in ("mean", "logsumexp", "var"):
        kind = "float"
    else:
        kind = "int" if name == "sum" and x.kind == "bool" else x.kind
    return Type(kind, x.axes - frozenset(axes))


def _has_axes(b: Builder, name: str, x: Node, axes: tuple[str, ...]) -> None:
    for axis in axes:
        if axis not in x.axes:
            there = ", ".join(sorted(x.axes)) or "none"
            raise TypeFault("absent-axis", f"`{name}` over `{axis}`, which its operand lacks", f"its axes: {there}")


def _rule_dot(b: Builder, args: tuple[Node, ...], params: tuple[Any, ...]) -> Type:
    _no_bool(args)
    axes = _union(args)
    for axis in params:
        if axis not in axes:
            raise TypeFault(
                "absent-axis", f"`dot` over `{axis}`, which its operands lack", f"axes: {', '.join(sorted(axes))}"
            )
    return Type(_arith(b, args, ()).kind, axes - frozenset(params))


def _rule_scan(b: Builder, args: tuple[Node, ...], params: tuple[Any, ...]) -> Type:
    _no_bool(args)
    if params[1] not in _union(args):
        there = ", ".join(sorted(_union(args))) or "none"
        raise TypeFault(
            "absent-axis", f"`{params[0]}` along `{params[1]}`, which its operand lacks", f"its axes: {there}"
        )
    return Type(_arith(b, args, ()).kind, _union(args))


def _whole(index: tuple[Node, ...]) -> None:
    if any(i.kind != "int" for i in index):
        raise TypeFault("float-index", "an index must be an int", "write `cast(i, int)`, or `//` for `/`")


def _rule_at(b: Builder, args: tuple[Node, ...], params: tuple[Any, ...]) -> Type:
    names, filled = params
    x, index = args[0], args[1 : 1 + len(names)]
    _whole(index)
    _has_axes(b, "at", x, names)
    kind = x.kind
    if filled and args[-1].kind != kind:
        kind = "float" if {args[-1].kind, kind} == {"int", "float"} else kind
        if args[-1].kind == "bool" or x.kind == "bool":
            raise TypeFault("bool-arithmetic", "`fill` and the tensor are of different kinds")
    return Type(kind, (x.axes - frozenset(names)) | _union(index))


def _rule_add_at(b: Builder, args: tuple[Node, ...], params: tuple[Any, ...]) -> Type:
    summed, names = params
    g, index = args[0], args[1:]
    _no_bool((g,))
    _whole(index)
    axes = g.axes | _union(index)
    for axis in summed:
        if axis not in axes:
            there = ", ".join(sorted(axes))
            raise TypeFault("absent-axis", f"`add_at` sums over `{axis}`, which its operands lack", f"axes: {there}")
    left = axes - frozenset(summed)
    for axis in names:
        if axis in left:
            raise TypeFault(
                "index-axis", f"`add_at` onto `{axis}`, which its operand has", f"list it as summed: `{axis}, {axis}=`"
            )
    return Type(g.kind, left | frozenset(names))


def _rule_stack(b: Builder, args: tuple[Node, ...], params: tuple[Any, ...]) -> Type:
    axis = b.axes[params[0]]
    if axis.fixed != len(args):
        extent = "no fixed extent" if axis.fixed is None else f"extent {axis.fixed}"
        raise TypeFault("stack-extent", f"`stack` of {len(args)} values along `{axis.name}`, which has {extent}")
    if axis.name in _union(args):
        raise TypeFault("axis-twice", f"`stack` along `{axis.name}`, which an operand already has")
    kinds = {a.kind for a in args}
    if "bool" in kinds and len(kinds) > 1:
        raise TypeFault("bool-arithmetic", "`stack` of truth values and numbers")
    return Type("bool" if "bool" in kinds else _arith(b, args, ()).kind, _union(args) | {axis.name})


def _rule_replace(b: Builder, args: tuple[Node, ...], params: tuple[Any, ...]) -> Type:
    x, v = args
    if x.axes != v.axes:
        raise TypeFault("replace-axes", f"`replace` of a value over {x.type} by one over {v.type}: the axes must agree")
    return v.type


def _rule_uniform(b: Builder, args: tuple[Node, ...], params: tuple[Any, ...]) -> Type:
    if args[0].kind != "int" or args[0].axes:
        raise TypeFault("seed", f"the seed of `uniform` is {args[0].type}, it must be one int")
    return Type("float", frozenset(params[0]))


RULES: dict[str, TypeRule] = {
    **{row.name: row.rule for row in _ROWS},
    "const": lambda b, a, p: Type(
        "bool" if isinstance(p[0], bool) else "int" if isinstance(p[0], int) else "float", frozenset(p[1])
    ),
    "read": lambda b, a, p: Type(p[1], frozenset(p[2])),
    "attr": lambda b, a, p: Type(p[1]),
    "size": lambda b, a, p: Type("int"),
    "largest": lambda b, a, p: Type("float"),
    "index": lambda b, a, p: Type("int", frozenset(p)),
    "cast": lambda b, a, p: Type(p[0], a[0].axes),
    "expand": lambda b, a, p: Type(a[0].kind, a[0].axes | frozenset(p)),
    "sum_to": lambda b, a, p: a[0].type,
    "reduce": _rule_reduce,
    "dot": _rule_dot,
    "scan": _rule_scan,
    "at": _rule_at,
    "add_at": _rule_add_at,
    "stack": _rule_stack,
    "replace": _rule_replace,
    "stop_gradient": lambda b, a, p: a[0].type,
    "uniform": _rule_uniform,
}
