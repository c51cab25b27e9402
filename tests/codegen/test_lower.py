"""Lowering: what formulas become, where it is easily wrong. Host expressions mean what the formula means, at every edge."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import math
import sys
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest

from codegen.diagnostics import Report
from codegen.emit import by_formula
from codegen.loader import load_text
from codegen.lower import Module, python
from codegen.lower_rows import lowered
from codegen.primitives import TABLE, Primitive
from codegen.schedule import schedule
from codegen.verify import typed

ROOT = Path(__file__).parents[2]


def module(text: str) -> Module:
    """The lowered module of one op."""
    report = Report()
    (op,) = load_text("- op: f\n" + text, report)
    plan = schedule(typed(op, report), report)
    assert plan is not None, report.render()
    return lowered(plan)


def body(text: str) -> str:
    return "\n".join(module(text).forward[0].kernel.body)


def runtime_host() -> Any:
    """`runtime/host.py`, which imports nothing of the package."""
    spec = importlib.util.spec_from_file_location("host_under_test", ROOT / "templates" / "runtime" / "host.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules["host_under_test"] = found
    spec.loader.exec_module(found)
    return found


HOST = runtime_host()
PLAIN = "  inputs: {x: [...]}\n  outputs: {y: [...]}\n"


@pytest.mark.parametrize(
    ("attrs", "first", "second"),
    [
        ("{a: {type: int, default: 1}, b: {type: int, default: 2}, c: {type: int, default: 3}}", "(a + b) * c == 9", "a + b * c == 9"),
        ("{a: {type: int, default: 1}, b: {type: int, default: 2}, a_b: {type: int, default: 1}}", "a % b == 1", "a_b == 1"),
        ("{aB: {default: 1}, ab: {default: 2}}", "aB == 1", "ab == 1"),
        ("{aB: {optional: true}, ab: {optional: true}}", "aB is None", "ab is None"),
        ("{n: {type: int, default: 1}, m: {type: int, default: 1}}", "2 * n > m", "n + 1 > m"),
    ],
)  # fmt: skip
def test_each_question_has_a_name_of_its_own(attrs: str, first: str, second: str) -> None:
    m = module(
        PLAIN + f"  attrs: {attrs}\n  forward: |\n    u = x if {first} else 2 * x\n    y = u if {second} else 3 * u\n"
        "  backward: {x: auto}\n"
    )
    names = [n for n, _ in m.choices]
    assert len(names) == len(set(names)) == 2 and all(n.isidentifier() for n in names)
    assert len({t for _, t in m.choices}) == 2
    for _, expression in m.choices:
        ast.parse(expression, mode="eval")


def test_a_statement_stands_before_what_reads_it_in_every_variant() -> None:
    text = body(
        "  inputs: {x: [...], z: [...], w: {axes: [...], optional: true, default: 0}}\n"
        "  attrs: {s: {default: 1.25}, mode: {enum: [a, b, c], default: b}, flag: {type: bool, default: false}}\n"
        "  outputs: {y: [...]}\n  forward: |\n"
        '    v0 = round(x) if mode == "c" and s == 1 else 3\n    v1 = sign(x) if flag else tanh(z * v0)\n'
        "    v3 = z * v0 + v1 if w is None else v0 * w\n    y = v3 + x * z + w\n"
        "  backward: {x: auto, z: auto, w: auto}\n"
    )
    assert text.index("v0 = ") < text.index("v1 = ") < text.index("v3 = ")


def test_a_tensor_of_which_only_the_presence_or_the_dtype_is_asked_is_a_parameter() -> None:
    m = module(
        "  inputs: {x: [...], w: {axes: [...], optional: true}}\n  outputs: {y: [...]}\n"
        "  forward: y = x if w is None else 2 * x\n  backward: {x: auto, w: zero}\n"
    )
    assert "w_ptr" in m.forward[0].kernel.params
    m = module(
        "  inputs: {x: [...], z: [...]}\n  outputs: {y: [...]}\n  forward: y = minimum(z, largest(x))\n"
        "  backward: {x: zero, z: auto}\n"
    )
    assert "x_ptr" in m.forward[0].kernel.params


def test_a_float_beside_whole_numbers_keeps_its_gradient() -> None:
    m = module(
        "  inputs: {x: {axes: [...], dtype: integral}, z: [...]}\n  outputs: {y: [...]}\n"
        "  forward: y = where(cast(x, bool), tanh(z), 0)\n  backward: {z: auto}\n"
    )
    assert "dz_ptr" in m.backward[0].kernel.params


@pytest.mark.parametrize(
    ("forward", "attrs", "inputs", "output", "want"),
    [
        ("y = where((s > 1) & (x > 0), x, 2 * x)", "{s: {default: 2}}", "[...]", "[...]", "!= 0"),
        ("y = 1 << x", "", "{axes: [...], dtype: int}", "{axes: [...], dtype: int}", "scalar(1, COMPUTE)"),
        ("y = cast(x, int) * 3", "", "{axes: [...], dtype: float}", "{axes: [...], dtype: i64}", "x.to(tl.int64)"),
        ("y = cast(cast(x / 3, int), float)", "", "[...]", "[...]", "divide("),
    ],
)
def test_the_text_of_a_statement(forward: str, attrs: str, inputs: str, output: str, want: str) -> None:
    given = f"  attrs: {attrs}\n" if attrs else ""
    derived = "not_differentiable" if "int" in output + inputs or "cast" in forward else "{x: auto}"
    text = (
        f"  inputs: {{x: {inputs}}}\n{given}  outputs: {{y: {output}}}\n  forward: {forward}\n  backward: {derived}\n"
    )
    if "i64" in output or "int" in output:
        text = text.replace("  backward: not_differentiable\n", "")
    assert want in body(text)


# ---------------------------------------------------------------------------------------------- host

POINTS = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, -1.5, 1000.0, -1000.0, math.inf, -math.inf, math.nan]
HOSTED = [r for r in TABLE.values() if r.triton.startswith(("math.", "tl.")) and r.name not in ("where", "shl", "shr")]


@pytest.mark.parametrize("row", [*HOSTED, TABLE["div"]], ids=lambda r: r.name)
def test_every_primitive_has_its_meaning_on_the_host(row: Primitive) -> None:
    """As NumPy has it: the same infinities and NaN, and no exception."""
    function = getattr(HOST, "abs_" if row.name == "abs" else row.name)
    for point in itertools.product(POINTS, repeat=row.arity):
        if row.name == "clamp" and not point[1] <= point[2]:
            continue
        with np.errstate(all="ignore"):
            want = row.numpy(*(np.float64(p) for p in point))
        got = function(*point)
        if row.name in ("mod", "floordiv", "pow") and any(math.isinf(p) for p in point):
            continue  # NumPy and C differ there
        assert np.allclose(float(got), float(want), rtol=1e-13, atol=0, equal_nan=True), (point, got, want)


def test_whole_numbers_stay_whole_on_the_host() -> None:
    assert (
        HOST.pow(3, 4) == 81 and isinstance(HOST.pow(3, 4), int) and HOST.floordiv(-7, 2) == -4 and HOST.mod(-7, 2) == 1
    )
    assert HOST.floordiv(1, 0) == HOST.mod(1, 0) == 0
    assert [HOST.shl(1, n) for n in (0, 3, 63, 64, -1)] == [1, 8, -(2**63), 0, 0] and HOST.shr(-8, 1) == -4
    with pytest.raises(ValueError, match="no whole number"):
        HOST.whole(math.nan)


@pytest.mark.parametrize(
    "formula", ["x * sigmoid(a)", "x * cast(~n, float)", "x * exp2(a) * rsqrt(a)", "x * clamp(a, 0, n)"]
)
def test_host_expressions_are_python(formula: str) -> None:
    m = module(
        PLAIN
        + f"  attrs: {{a: {{default: 0.75}}, n: {{type: int, default: 3}}}}\n  forward: y = {formula} + 0 * a + 0 * n\n"
        "  backward: {x: auto}\n"
    )
    attrs = {"a": 0.75, "n": 3}

    class Op:
        def __init__(self) -> None:
            self.attrs = attrs

    found = {n: eval(t, {"self": Op(), "host": HOST, "float": float}) for n, t in m.scalars}  # noqa: S307
    want = {"sigmoid": mpmath.sigmoid(0.75) if hasattr(mpmath, "sigmoid") else 1 / (1 + math.exp(-0.75)), "~n": -4.0,
            "exp2": 2**0.75 / math.sqrt(0.75), "clamp": 0.75}  # fmt: skip
    target = next(v for k, v in want.items() if k in formula)
    values = [float(v) for n, v in found.items() if n not in attrs]
    assert any(
        abs(v - float(target)) < 1e-12 for v in [*values, *(u * v for u, v in itertools.combinations(values, 2))]
    ), (found, target)


def test_the_printed_host_functions_exist() -> None:
    report = Report()
    (op,) = load_text(
        "- op: f\n" + PLAIN + "  attrs: {a: {default: 2}}\n  forward: y = x * (abs(a) + sign(a) + trunc(a) + log1p(a))\n"
        "  backward: {x: auto}\n", report,
    )  # fmt: skip
    (_, graph), *_ = typed(op, report).graphs
    texts = [python(n) for n in graph.builder._table.values() if n.host and n.op in TABLE]
    for text in texts:
        for name in (w.split("(")[0] for w in text.split("host.")[1:]):
            assert hasattr(HOST, name), name


def test_an_op_without_a_reference_is_compared_with_its_formula() -> None:
    """Else the emitted tests would compare layouts with each other alone."""
    (op,) = load_text(
        "- op: f\n  inputs: {x: [...], z: [...]}\n  attrs: {a: {default: 2}, kind: {enum: [p, q], default: p}}\n  outputs: {y: [...]}\n"
        '  forward: |\n    u = exp(-a * x) if kind == "p" else log(2) * z\n    y = maximum(u, pi)\n  backward: {x: auto, z: auto}\n', Report(),
    )  # fmt: skip
    plan = schedule(typed(op, Report()), Report())
    assert plan is not None
    assert by_formula(plan) == [
        'u = F.exp(-a * x) if kind == "p" else F.log(2) * z', "y = F.maximum(u, pi)", "return y",
    ]  # fmt: skip
