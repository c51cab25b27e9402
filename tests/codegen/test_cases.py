"""Specs that break generators, each as a kind: YAML, the language, names, templates, output. The numbers name the
cases.
"""

from __future__ import annotations

import ast
import importlib
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jinja2
import numpy as np
import pytest

from codegen import emit, manifest
from codegen.config import Config
from codegen.diagnostics import Report
from codegen.emit import formatted, render
from codegen.evaluate import Env, evaluate
from codegen.formula import Anchor, parse_expr
from codegen.loader import load, load_text
from codegen.lower_rows import lowered
from codegen.safety import check_safety
from codegen.schedule import schedule
from codegen.spec import Number, spell
from codegen.tree import GeneratedFile
from codegen.verify import Verdict, verify_op

ROOT = Path(__file__).parents[2]


def checked(text: str) -> tuple[list[Verdict], Report]:
    """All that is found up to rendering."""
    report = Report()
    verdicts = [verify_op(op, report) for op in load_text(text, report)]
    for verdict in verdicts if not report.errors else ():
        for one in verdict.checked:
            check_safety(verdict.op, one.variant, one.graph, report)
        schedule(verdict, report)
    return verdicts, report


def codes(text: str) -> list[str]:
    return [d.code for d in checked(text)[1].errors]


def spec(forward: str, entry: str = "auto", inputs: str = "x: [...]", more: str = "") -> str:
    names = re.findall(r"(\w+):", inputs)
    entries = "".join(f"    {n}: {entry}\n" for n in names)
    return (
        f"- op: f\n  inputs: {{{inputs}}}\n{more}  outputs: {{y: [...]}}\n  forward: {forward}\n  backward:\n{entries}"
    )


def gradient(text: str, name: str, tensors: Mapping[str, Any], attrs: Mapping[str, float] | None = None) -> list[float]:
    """A verified gradient in float64 at points, its cotangent 1."""
    (verdict,), report = checked(text)
    assert not report.errors, report.render()
    graph = verdict.checked[0].graph
    given = {n: np.asarray(v) for n, v in tensors.items()}
    count = len(next(iter(given.values())))
    env = Env(("...",), {"...": count}, {**given, "dy": np.ones(count)}, dict(attrs or {}))
    node = next(t.node for t in graph.gradients if t.name == name)
    assert node is not None
    found = np.broadcast_to(evaluate([node], env)[node.serial], (count,))
    return [float(v) for v in found]


# ---------------------------------------------------------------------------------------------- numerics of formulas

OVERFLOWING = {
    "sigmoid by exp": ("y = exp(x) / (1 + exp(x))", "dy * y * (1 - y)"),
    "its derivative by exp": ("y = sigmoid(x)", "dy * exp(-x) / ((1 + exp(-x)) * (1 + exp(-x)))"),
    "silu by exp": ("y = x / (1 + exp(-x))", "dy * (1 + exp(-x) + x * exp(-x)) / ((1 + exp(-x)) * (1 + exp(-x)))"),
    "slope times exp": ("y = sigmoid(25 * x)", "dy * 25 * exp(-25 * x) / square(1 + exp(-25 * x))"),
    "tanh by exp": ("y = (exp(2 * x) - 1) / (exp(2 * x) + 1)", "dy * (1 - y * y)"),
    "softplus by log and exp": ("y = log(1 + exp(x))", "dy * sigmoid(x)"),
    "softplus with a slope": ("y = log(1 + exp(5 * x)) / 5", "dy * sigmoid(5 * x)"),
    "a slope behind": ("y = log(1 + exp(x * 2)) / 2", "dy * sigmoid(x * 2)"),
    "a whole power": ("y = exp(x) / (1 + exp(x) ** 2)", "auto"),
    "logistic loss": ("y = -log(sigmoid(x))", "-dy * (1 - sigmoid(x))"),
    "length by squares": ("y = sqrt(x * x + 1)", "dy * x / y"),
}


@pytest.mark.parametrize("name", OVERFLOWING)
def test_formulas_that_overflow_are_refused_before_any_kernel(name: str) -> None:
    """C001, C003, C004: forms of exp and of squares that give inf / inf far from zero, in forward or in backward
    alone.
    """
    forward, entry = OVERFLOWING[name]
    _, report = checked(spec(forward, entry))
    assert {d.code for d in report.errors} & {"unsafe", "wrong-gradient"}, report.render()
    assert re.search(r"at x(\[\d+\])? = -?[\d.e+]+", report.render())


STABLE = {
    "y = sigmoid(x)": "dy * y * (1 - y)",
    "y = x * sigmoid(x)": "dy * sigmoid(x) * (1 + x * (1 - sigmoid(x)))",
    "y = maximum(x, 0) + log1p(exp(-abs(x)))": "dy * sigmoid(x)",
    "y = tanh(x)": "dy * (1 - y * y)",
}


@pytest.mark.parametrize("forward", STABLE)
def test_stable_forms_are_accepted(forward: str) -> None:
    """C001, C003, C004: the forms that hold."""
    assert codes(spec(forward, STABLE[forward])) == []


BRANCHES = [
    ("where(x > 0, sqrt(x), x)", [-1.0, -4.0, 4.0], [1.0, 1.0, 0.25]),
    ("where(x > 2, log2(x), 2 * x)", [0.0, 4.0], [2.0, 1 / (4 * np.log(2))]),
    ("where(x <= 10, exp(x), 1)", [1e10, 0.0], [0.0, 1.0]),
    ("where(x != 0, 1 / x, 0)", [0.0, 2.0], [0.0, -0.25]),
    ("where(x > 0, log(x), 0)", [0.0, -1.0, 2.0], [0.0, 0.0, 0.5]),
]


@pytest.mark.parametrize(("formula", "points", "right"), BRANCHES)
def test_derived_gradients_select_their_branch_last(formula: str, points: list[float], right: list[float]) -> None:
    """C012: the branch that is not taken has an infinite derivative, or none, and nothing of it shows."""
    with np.errstate(all="ignore"):
        assert gradient(spec(f"y = {formula}"), "x", {"x": points}) == pytest.approx(right)


POWERS = [
    ("2 ** e", "m * 2 ** e", [-1, 0, 3], [0.5, 1.0, 8.0]),
    ("1 / n", "m / e", [2, 4, -8], [0.5, 0.25, -0.125]),
    ("square of an int", "m * e ** 2", [-3, 2, 0], [9.0, 4.0, 0.0]),
    ("root of an int", "m * sqrt(e)", [4, 9, 2], [2.0, 3.0, 2**0.5]),
    ("whole negative power", "m * e ** -1", [2, 4, -8], [0.5, 0.25, -0.125]),
]


@pytest.mark.parametrize(("formula", "whole", "right"), [p[1:] for p in POWERS], ids=[p[0] for p in POWERS])
def test_formulas_of_ints_are_computed_in_floats(formula: str, whole: list[int], right: list[float]) -> None:
    """C020: two to a negative whole power is 0.5, not the 0 of integer arithmetic."""
    text = spec(f"y = {formula}", inputs="m: [...], e: {axes: [...], dtype: int}").replace("    e: auto\n", "")
    text = text.replace("    axes: auto\n", "").replace("    dtype: auto\n", "")
    domain = (
        "  domain: {e: [1, 9]}\n"
        if "/ e" in formula or "sqrt" in formula or "-1" in formula
        else "  domain: {e: [-9, 9]}\n"
    )
    text = text.replace("  outputs", domain + "  outputs")
    assert gradient(text, "m", {"m": [0.5, 1.5, 2.0], "e": np.array(whole)}) == pytest.approx(right)


def test_division_of_ints_needs_the_rounding_said() -> None:
    """C019: `/` of ints gives floats, `//` the floor; neither has a derivative with respect to an int."""
    assert codes(spec("y = x // 2")) == []
    assert codes(spec("y = x / n", inputs="x: [...], n: {axes: [...], dtype: int}").replace("    n: auto\n", "")) != []


WRONG = [
    ("amax_ties", "x"), ("max_pool_ties", "x"), ("maximum_ties", "x"), ("rms_norm_weight", "x"),
    ("layer_norm_weight", "x"),
    ("cross_entropy_ignored", "x"), ("cross_entropy_mean", "x"), ("swiglu_swapped", "gate"), ("softmax_sum", "x"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "entry"), WRONG)
def test_published_slips_are_refused_at_their_entry(name: str, entry: str) -> None:
    """C013, C014, C037, C049, C118: ties counted twice, a weight outside the correction, a mean over ignored rows."""
    report = Report()
    (op,) = load([ROOT / f"tests/wrong/{name}.yaml"], report, ROOT)
    verdict = verify_op(op, report)
    assert not verdict.ok and {d.code for d in report.errors} == {"wrong-gradient"}
    assert op.backward is not None
    lines = {e.value_span.line for e in op.backward.entries} | {b.span.line for b in op.backward.let}
    assert {d.span.line for d in report.errors} <= lines


def test_a_norms_weight_inside_the_correction_is_accepted() -> None:
    """C118: what is refused differs from what is right by nothing but the place of the weight."""
    text = (ROOT / "tests/wrong/rms_norm_weight.yaml").read_text()
    slip = "rstd * weight * (dy - xhat * mean(dy * weight * xhat, N))"
    right = "rstd * (dy * weight - xhat * mean(dy * weight * xhat, N))"
    assert slip in text and codes(text) == ["wrong-gradient"]
    assert codes(text.replace(slip, right)) == []


REDUCED = {
    "ties of the largest": ("max(x, N)", [[2.0, 2, 1]], [2.0], [[0.5, 0.5, 0]]),
    "softmax of far numbers": ("logsumexp(x, N)", [[1000.0, 0]], [1000.0], [[1.0, 0]]),
    "a NaN in a row": ("max(x, N)", [[np.nan, np.inf]], [np.nan], [[np.nan, np.nan]]),
    "constant rows": ("var(x, N, correction=0)", [[1234.0] * 256], [0.0], [[0.0] * 256]),
    "far from zero": (
        "var(x, N, correction=0)",
        [[80000.0, 80001, 80002, 80003]],
        [1.25],
        [[-0.75, -0.25, 0.25, 0.75]],
    ),
}


@pytest.mark.parametrize("name", REDUCED)
def test_reductions_mean_what_mathematics_says(name: str) -> None:
    """C014, C016, C028, C033: value and derived gradient, no one-pass variance, no exponential without its maximum."""
    formula, rows, value, grads = REDUCED[name]
    text = spec(f"y = {formula}", inputs="x: [..., N]", more="").replace("    N: auto\n", "") + "  schedule: none\n"
    report = Report()
    (op,) = load_text(text, report)
    verdict = verify_op(op, report)
    assert verdict.ok, report.render()
    graph = verdict.checked[0].graph
    env = Env(("...", "N"), {"...": 1, "N": len(rows[0])}, {"x": np.array(rows), "dy": np.ones((1, 1))}, {})
    output, grad = graph.outputs[0].node, graph.gradients[0].node
    assert output is not None and grad is not None
    with np.errstate(all="ignore"):
        found = evaluate([output, grad], env)
    assert np.allclose(found[output.serial].ravel(), value, equal_nan=True)
    assert np.allclose(np.broadcast_to(found[grad.serial], (1, len(rows[0]))), grads, equal_nan=True)


DIVISIONS = ["floor(a / b)", "round(a / b)", "trunc(a / b)", "where(a / b >= 5, a, b)", "ceil(a / b)"]


@pytest.mark.parametrize("formula", DIVISIONS)
def test_quotients_that_are_rounded_or_compared_are_exact(formula: str) -> None:
    """C026: an approximate 5.0000005 before a floor is another number; there the kernel divides by IEEE's rule."""
    text = spec(f"y = {formula}", inputs="a: [...], b: [...]", more="  domain: {a: [1, 9], b: [1, 9]}\n")
    (verdict,), report = checked(text)
    assert not report.errors, report.render()
    plan = schedule(verdict, report)
    assert plan is not None
    assert "divide(a, b)" in "\n".join(lowered(plan).forward[0].kernel.body) and " / " not in "\n".join(
        lowered(plan).forward[0].kernel.body
    )


# ---------------------------------------------------------------------------------------------- YAML


@pytest.mark.parametrize(
    "written", ["1e-5", "1E-5", "1e+5", "1.e-5", "1.0e-5", ".5", "1_000.0", "0x10", "1:30", "0o17", "+1.5"]
)
def test_numbers_are_numbers_or_refused(written: str) -> None:
    """C095: `1e-5` is a float here although YAML 1.1 calls it a text; what Python would not read is refused, not
    guessed.
    """
    more = f"  attrs: {{eps: {{default: {written}}}}}\n"
    text = spec("y = x * eps", "dy * eps", more=more)
    report = Report()
    ops = load_text(text, report)
    if report.errors:
        assert written in ("1:30", "+1.5"), report.render()
        return
    default = ops[0].attrs[0].default
    assert isinstance(default, Number) and default.value == eval(written) and written not in ("1:30", "+1.5")


DUPLICATES = {
    "derivative": ("    x: auto\n", "    x: auto\n    x: dy\n"),
    "input": ("{x: [...]}", "{x: [...], x: [...]}"),
    "key": ("  forward", "  doc: One.\n  doc: Two.\n  forward"),
    "inner key": ("{x: [...]}", "{x: {axes: [...], axes: [...]}}"),
}


@pytest.mark.parametrize("name", DUPLICATES)
def test_a_key_that_is_given_twice_shows_both_places(name: str) -> None:
    """C096: YAML readers keep the last in silence."""
    old, new = DUPLICATES[name]
    text = spec("y = x").replace(old, new)
    assert text.count(new) == 1
    _, report = checked(text)
    assert "duplicate-key" in {d.code for d in report.errors} and "first here" in report.render()


@pytest.mark.parametrize("name", ["no", "on", "off", "yes", "null", "n", "y_", "Null_", "true_", "nan_", "none"])
def test_words_that_yaml_converts_are_names(name: str) -> None:
    """C097: an input called `no` or `null` is an input, as `x` is; a name that the language has itself is said to
    be one.
    """
    text = spec(f"y = 2 * {name}", "2 * dy", inputs=f"{name}: [...]")
    if name == "Null_":
        assert codes(text) == ["bad-name"]
        return
    (verdict,), report = checked(text)
    assert not report.errors, report.render()
    assert [t.name for t in verdict.op.inputs] == [name]


@pytest.mark.parametrize("name", ["~", "true", "false", "inf", "nan", "None", "True", "1", "1.5", "x y", "x-y", "é"])
def test_what_is_no_name_is_refused_by_name(name: str) -> None:
    """C097: with its place and as it was written, never as what YAML made of it."""
    _, report = checked(
        f"- op: f\n  inputs: {{{name}: [...]}}\n  outputs: {{y: [...]}}\n  forward: y = 1\n"
        f"  backward: not_differentiable\n"
    )
    assert {d.code for d in report.errors} & {"bad-name", "yaml-syntax"}, report.render()
    assert report.errors[0].span.line == 2 and f"{{{name}:" in report.render()


INDICATORS = [
    "*g",
    "- dy",
    "{a}",
    "[x, y]",
    "null",
    "~",
    "",
    "> 0",
    "|x|",
    "!x",
    "%x",
    "@x",
    "`x`",
    "a: b",
    "x ? 1 : 2",
    "&a dy",
    "? dy",
]


@pytest.mark.parametrize("entry", INDICATORS)
def test_formulas_that_yaml_reads_as_its_own_are_refused_with_the_remedy(entry: str) -> None:
    """C098: aliases, tags, braces, nothing: an error at the formula, and the advice to quote it; never a silent
    None.
    """
    _, report = checked(spec("y = x", entry))
    first, *_ = report.errors
    assert first.span.line == 6 and first.span.col >= 5, report.render()
    assert "quote" in first.hint, report.render()


@pytest.mark.parametrize("entry", ["'*g'", '"{a}"', "'dy * x # tail'"])
def test_quoted_formulas_reach_the_formula_parser(entry: str) -> None:
    """C098: once quoted it is a formula, right or wrong, and no longer YAML's business."""
    assert set(codes(spec("y = x", entry))) <= {"syntax-error", "not-in-language", "unknown-name", "wrong-gradient"}
    assert codes(spec("y = x", entry)) != []


def test_a_comment_cuts_no_formula_in_silence() -> None:
    """C098: what follows ` #` is a comment, of which the formula's own check knows: what is left must be the
    derivative.
    """
    assert codes(spec("y = x * x", "dy * 2 * x # the rest")) == []
    assert codes(spec("y = x * x", "dy * 2 # * x")) == ["wrong-gradient"]
    assert codes(spec("y = x * x", "dy * 2 * # x")) == ["syntax-error"]


# ---------------------------------------------------------------------------------------------- the language

ENTRIES = {
    "misspelt": ("    xx: dy\n", {"unknown-input", "missing-derivative"}),
    "absent": ("    w: dy * x\n", {"missing-derivative"}),
    "of an int": ("    x: dy * w\n    w: dy * x\n    n: dy\n", {"no-gradient"}),
    "of an output": ("    x: dy * w\n    w: dy * x\n    y: dy\n", {"unknown-input"}),
    "a let of no one": ("    let: q = dy\n    x: dy * w\n    w: dy * x\n", {"unused-name"}),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_every_derivative_is_given_and_every_entry_matches(name: str) -> None:
    """C100: never a gradient that is absent because its name was misspelt, nor an entry that nothing reads."""
    entries, wanted = ENTRIES[name]
    text = (
        "- op: f\n  inputs: {x: [...], w: [...], n: {axes: [...], dtype: int}}\n  outputs: {y: [...]}\n"
        f"  forward: y = x * w + 0 * n\n  backward:\n{entries}"
    )
    _, report = checked(text)
    assert {d.code for d in report.errors} & wanted, report.render()


def test_the_states_of_a_derivative_are_said() -> None:
    """C100: a formula, derived, zero, or not differentiable; an op that says nothing is refused."""
    assert codes(spec("y = floor(x)", "zero")) == [] and codes(spec("y = x * x", "auto")) == []
    none = "- op: f\n  inputs: {x: [...]}\n  outputs: {y: [...]}\n  forward: y = x * x\n"
    assert codes(none) == ["missing-backward"]
    assert codes(none + "  backward: not_differentiable\n") == []
    assert codes(spec("y = x * x", "zero")) == ["wrong-gradient"]


PARENTHESES = [
    "a - (b - c)", "a - b - c", "a / (b / c)", "a / b / c", "-(a + b)", "(-a) ** 2", "-a ** 2", "2 * (b * a + 1)",
    "-alpha * a",
    "a - -b", "a * (b + c) * -alpha", "(a - b) * (a + b)", "-(-a)", "a - (b + c)", "(a + b) / (b - 3 * c)",
    "a % b - c", "a - b % c",
    "a * (b / c)", "(a ** 2) ** 2", "where((a > b) & (c > b), a, -c)", "where((a > b) | ~(c > b), -a, c)",
    "where(~((a > b) & (c > b)), a, c)", "a / -b", "(a + b) * alpha - (alpha - c)", "(alpha - 1) * (a - alpha)",
    "1 - (1 - a)",
]  # fmt: skip


def run(text: str, tensors: Mapping[str, float], attrs: Mapping[str, float]) -> float:
    """The emitted forward statements, executed as Python on numbers."""
    (verdict,), report = checked(text)
    assert not [d for d in report.errors if d.code != "unsafe"], report.render()
    plan = schedule(verdict, report)
    assert plan is not None
    module = lowered(plan)
    tl = SimpleNamespace(where=lambda c, a, b: a if c else b)
    names: dict[str, Any] = {n: np.float64(v) for n, v in tensors.items()}
    host = type("Host", (), {"attrs": dict(attrs)})()
    names |= {n: np.float64(eval(t, {"self": host})) for n, t in module.scalars}
    names |= {"HALF": False} | {n: eval(t, {"self": host}) for n, t in module.choices}
    names |= {
        "tl": tl,
        "square": lambda v: v * v,
        "remainder": lambda a, b: a % b,
        "mod": lambda a, b, half=False: a % b,
    }
    lines = [line for line in module.forward[0].kernel.body if "tl.load" not in line and " = scalar(" not in line]
    store = next(k for k, line in enumerate(lines) if line.startswith("tl.store(y_ptr + i, "))
    lines[store] = "result = " + lines[store].removeprefix("tl.store(y_ptr + i, ").removesuffix(", mask=mask)")
    exec("\n".join(lines), names)
    return float(names["result"])


@pytest.mark.parametrize("formula", PARENTHESES)
@pytest.mark.parametrize("inlined", [True, False])
def test_a_formula_is_printed_as_it_is_meant(formula: str, inlined: bool) -> None:
    """C102: parentheses by the tree: the emitted statements give what Python gives for the formula, at uneven
    numbers.
    """
    inner = formula if inlined else f"(t := {formula})"
    whole = f"2 * ({formula}) - a" if inlined else "2 * t - a"
    forward = f"y = {whole}" if inlined else f"|\n    t = {formula}\n    y = {whole}"
    used = "alpha" in formula
    more = "  attrs: {alpha: {default: -1}}\n" if used else ""
    text = spec(forward, inputs="a: [...], b: [...], c: [...]", more=more).replace(
        "  outputs", "  domain: {b: [1, 9]}\n  outputs"
    )
    text = (
        text.replace("    a: auto\n", "")
        .replace("    b: auto\n", "")
        .replace("    c: auto\n", "")
        .replace("  backward:\n", "  backward: not_differentiable\n")
    )
    read = [n for n in "abc" if re.search(rf"\b{n}\b", formula + " a")]
    text = text.replace("{a: [...], b: [...], c: [...]}", "{" + ", ".join(f"{n}: [...]" for n in read) + "}")
    if "b" not in read:
        text = text.replace("  domain: {b: [1, 9]}\n", "")
    for a, b, c in ((0.5, 3.0, -1.75), (-2.0, 1.25, 4.5), (7.0, 6.5, 2.0)):
        values = {n: v for n, v in zip("abc", (a, b, c)) if n in read}
        python = formula.replace("&", " and ").replace("|", " or ").replace("~", " not ")
        env = {**values, "alpha": -1.0, "where": lambda c, x, y: x if c else y}
        want = 2 * eval(python, env) - a
        assert run(text, values, {"alpha": -1.0} if used else {}) == pytest.approx(want, rel=1e-12), (inner, values)


@pytest.mark.parametrize("formula", PARENTHESES)
def test_a_formula_is_spelt_as_it_was_parsed(formula: str) -> None:
    """C102: what messages and the emitted comments quote reads back as the same formula."""
    report = Report()
    tree = parse_expr(formula, Anchor("f", 1, (1,)), report)
    assert tree is not None and not report.errors
    again = parse_expr(spell(tree), Anchor("f", 1, (1,)), report)
    assert again is not None and spell(again) == spell(tree)
    assert re.sub(r"[()\s]", "", spell(tree)) == re.sub(r"[()\s]", "", formula)


def test_a_mask_without_parentheses_is_refused() -> None:
    """C102: `a > b & c > d` is not what it looks like."""
    assert codes(spec("y = where(a > b & b > a, a, b)", inputs="a: [...], b: [...]")) == ["precedence"]


SLIPS = {
    "a small term": ("x * x + 1e-3 * x", "dy * 2 * x"),
    "a kink at a whole number": ("abs(x - 3)", "dy * where(x >= 3, 1, -1)"),
    "right for a cotangent of ones": ("x * 2", "where(dy == 1, 2, 3)"),
    "right for whole numbers": ("sin(pi * x)", "dy * pi * cos(pi * round(x))"),
    "right where both are equal": ("x * x", "dy * (x + abs(x))"),
    "right to five digits": ("exp(x)", "dy * y * 1.00001"),
}


@pytest.mark.parametrize("name", SLIPS)
def test_points_at_which_a_slip_shows_are_drawn(name: str) -> None:
    """C105: kinks and whole numbers, cotangents that are not all ones, float64 instead of coarse differences."""
    forward, entry = SLIPS[name]
    assert codes(spec(f"y = {forward}", entry))[:1] == ["wrong-gradient"]


# ---------------------------------------------------------------------------------------------- names


ALREADY = [
    "mask", "pid", "x_ptr", "grad", "self", "ctx", "e", "i", "k", "n", "r", "part", "first", "last", "start", "span",
    "share",
    "tile", "at", "coordinates", "element", "zeros", "added_up", "offset", "scalar", "largest", "sizes", "kept_sizes", "reduced_sizes", "patch_sizes", "n_kept",
    "x_strides", "y_ptr",
    "dy_strides", "print", "abs", "exp", "sigmoid", "range", "float", "type", "super", "dict", "given", "op", "attrs",
    "name",
    "num_warps", "num_stages", "enable_fp_fusion", "grid", "warmup", "debug", "n_", "i_", "x1", "c0", "x_at",
    "x_sum_", "dw", "no", "null",
]  # fmt: skip
def crowded(op: str, tensor: str, attr: str, value: str) -> str:
    return (
        f"- op: {op}\n  inputs: {{{tensor}: [...], b: {{axes: [...], scalar: true}}}}\n"
        f"  attrs: {{{attr}: {{default: 2}}}}\n"
        f"  outputs: {{y: [...]}}\n  forward: |\n    {value} = 2 * {tensor} * sigmoid(b)\n"
        f"    y = {value} * {attr}\n  backward:\n"
        f"    {tensor}: dy * 2 * sigmoid(b) * {attr}\n"
        f"    b: dy * 2 * {tensor} * {attr} * sigmoid(b) * (1 - sigmoid(b))\n"
    )


@pytest.mark.parametrize("part", range(4))
def test_names_that_kernels_use_themselves_do_not_collide(part: int) -> None:
    """C104: as an input, an attr and a statement: no parameter twice, and nothing assigned that a kernel still
    needs.
    """
    count = len(ALREADY)
    ops = {f"op{k}": [ALREADY[(k + s) % count] for s in range(3)] for k in range(part, count, 4)}
    report = Report()
    verdicts = [
        verify_op(op, report) for op in load_text("".join(crowded(n, *names) for n, names in ops.items()), report)
    ]
    files = render(verdicts, (), Config(tests=""), report)
    assert not report.errors, report.render()
    for op, names in ops.items():
        tree = ast.parse(files[f"generated/ops/{op}.py"].content)
        kernels = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.decorator_list]
        assert len(kernels) == 2
        for kernel in kernels:
            compile(ast.Module([kernel], []), op, "exec")  # a parameter twice is a SyntaxError
            params = {a.arg for a in kernel.args.args}
            floats = {a.arg for a in kernel.args.args if a.annotation and "float64" in ast.unparse(a.annotation)}
            used = [n for n in ast.walk(kernel) if isinstance(n, ast.Name)]
            stored = {n.id for n in used if isinstance(n.ctx, ast.Store)}
            called = {n.func.id for n in ast.walk(kernel) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
            assert not stored & (params - floats), (names, stored & params)
            assert not called & (stored | params) and not {"tl", "COMPUTE"} & stored, names
            assert not {"num_warps", "enable_fp_fusion", "grid", "warmup", "debug"} & params


REFUSED = [
    ("x", "dx", "y"), ("dx", "x", "y"), ("x", "x_sum", "y"), ("x", "dx_sum", "y"), ("x", "x_parts", "y"),
    ("x", "w", "dw"),
    ("x", "w", "dx"), ("x", "dy", "y"), ("x", "y", "y"), ("x", "X", "y"), ("x", "lambda", "y"), ("x", "in", "y"),
    ("x", "from", "y"),
    ("x", "tl", "y"), ("x", "torch", "y"), ("x", "BLOCK_SIZE", "y"), ("x", "inf", "y"), ("x", "__x", "y"),
    ("x", "call", "y"),
]  # fmt: skip


@pytest.mark.parametrize("names", REFUSED, ids=" ".join)
def test_names_that_can_only_collide_are_refused_in_the_spec(names: tuple[str, str, str]) -> None:
    """C104: a tensor that is called like another's gradient, or like its sum; keywords; two names that are one."""
    a, b, y = names
    text = (
        f"- op: f\n  inputs: {{{a}: [...], {b}: [...]}}\n  outputs: {{{y}: [...]}}\n  forward: {y} = {a} * {b}\n"
        f"  backward:\n"
        f"    {a}: d{y} * {b}\n    {b}: d{y} * {a}\n"
    )
    found = codes(text)
    assert found and set(found) <= {"bad-name", "name-twice", "syntax-error", "set-twice", "duplicate-key"}, found


TAKEN = [
    "F", "Elementwise", "rowwise", "tensor", "runtime_op", "largest", "reference", "pytest", "importlib", "torch", "tl", "call",
    "lambda", "in", "runtime", "case", "__init__", "_f",
]  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
def test_names_of_ops_that_the_package_needs_are_refused(name: str) -> None:
    """C104: an op's name is a module, a function and, with capitals, a class: none of them may hide another."""
    assert codes(spec("y = x", "dy").replace("op: f", f"op: {name}")) == ["bad-name"]


@pytest.mark.parametrize("names", [("f", "f"), ("ab", "aB"), ("f_g", "fG"), ("f_g", "f__g")], ids=" ".join)
def test_two_ops_of_one_name_are_refused_with_both_places(names: tuple[str, str]) -> None:
    """C096, C104: also where they differ in case only, or give the same class."""
    text = "".join(spec("y = x", "dy").replace("op: f", f"op: {n}") for n in names)
    _, report = checked(text)
    assert [d.code for d in report.errors] == ["duplicate-op"] and "first here" in report.render()


@pytest.mark.parametrize(
    "name", ["print", "abs_of", "list", "no", "x", "y", "n", "mask", "sigmoid", "e", "forward", "range"]
)
def test_ops_may_be_called_like_anything_else(name: str) -> None:
    """C104: builtins, functions of the language and a kernel's own words are fine as names of ops."""
    text = spec("y = x * sigmoid(x)", "dy * sigmoid(x) * (1 + x * (1 - sigmoid(x)))").replace("op: f", f"op: {name}")
    verdicts, report = checked(text)
    files = render(verdicts, (), Config(tests=""), report)
    assert not report.errors, report.render()
    content = files[f"generated/ops/{name}.py"].content.decode()
    compile(content, name, "exec")
    assert f"def {name}(x: torch.Tensor)" in content and f"def {name}_forward" in content
    assert ("sigmoid as _sigmoid" in content) == (name == "sigmoid")


# ---------------------------------------------------------------------------------------------- templates and output


@pytest.mark.parametrize(
    "text",
    ["{{ missing }}", "{% if mising %}a{% endif %}", "{{ op.missing }}", "{% for x in missing %}{{ x }}{% endfor %}"],
)
def test_an_undefined_word_of_a_template_raises(text: str) -> None:
    """C106: a slot that nothing fills is an error, in a condition, an attribute and a loop too."""
    with pytest.raises(jinja2.UndefinedError):
        emit._environment().from_string(text).render(op={})


def test_no_template_hides_an_undefined_word() -> None:
    """C106: `|default` would."""
    for path in sorted(manifest.templates().glob("*.j2")):
        assert not re.search(r"\|\s*d(efault)?\b|is (un)?defined", path.read_text()), path


def test_templates_keep_lines_indents_and_signs() -> None:
    """C108: the last newline stays, a block's tag leaves no line, inserted lines are indented, `<` is `<`."""
    environment = emit._environment()
    assert environment.from_string("x = 1\n").render() == "x = 1\n"
    assert environment.from_string("{% if true %}\nx\n{% endif %}\n").render() == "x\n"
    assert environment.from_string("{{ a }}\n").render(a="x < 1 & 'y'") == "x < 1 & 'y'\n"
    verdicts, report = checked(spec("|\n    t = where(x < 1, x, 1)\n    y = t * t", "auto"))
    (content,) = (
        f.content.decode() for p, f in render(verdicts, (), Config(tests=""), report).items() if p.endswith("ops/f.py")
    )
    assert "x < 1" in content and "&lt;" not in content


@pytest.fixture(scope="module")
def everything() -> dict[str, GeneratedFile]:
    report = Report()
    ops = load([ROOT / "tests/scratch"], report, ROOT)
    files = render([verify_op(op, report) for op in ops], (), Config(), report)
    assert not report.errors, report.render()
    return files


def test_every_file_ends_in_one_newline(everything: dict[str, GeneratedFile]) -> None:
    """C108: no blank at a line's end, no tab, no carriage return, one newline at the end: hooks have nothing to
    mend.
    """
    for path, file in everything.items():
        text = file.content.decode()
        assert not text or (text.endswith("\n") and not text.endswith("\n\n")), path
        assert not re.search(r"[ \t]+$|\t|\r", text, re.MULTILINE), path


def test_formatting_what_was_emitted_changes_nothing(everything: dict[str, GeneratedFile]) -> None:
    """C111: the formatter is a library of one version, with settings of our own, and its output is a fixed point of
    it.
    """
    for path, file in everything.items():
        if path.endswith(".py") and "/runtime/" not in path:
            assert formatted(file.content.decode()) == file.content.decode(), path
    pinned = re.search(r'"black==([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert pinned is not None and importlib.import_module("black").__version__ == pinned.group(1)


SEEDED = """\
import hashlib, sys
from pathlib import Path
from codegen.config import Config
from codegen.diagnostics import Report
from codegen.emit import render
from codegen.loader import load
from codegen.verify import verify_op
report = Report()
root = Path(sys.argv[1])
ops = [op for op in load([root / "tests/scratch"], report, root) if op.name in ("squash", "scale_shift", "add_tanh")]
files = render([verify_op(op, report) for op in ops], (), Config(), report)
assert not report.errors, report.render()
print(hashlib.sha256(b"".join(p.encode() + files[p].content for p in files)).hexdigest(), list(files))
"""


def test_bytes_and_their_order_do_not_depend_on_hash_seeds_or_the_working_folder(tmp_path: Path) -> None:
    """C109: four seeds, two working folders, two languages: the same files in the same order."""
    found = set()
    for seed, folder in zip("0123", itertools.cycle((ROOT, tmp_path))):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT), "LC_ALL": ("C", "C.UTF-8")[int(seed) % 2]}
        done = subprocess.run(
            [sys.executable, "-c", SEEDED, str(ROOT)], cwd=folder, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        found.add(done.stdout)
    assert len(found) == 1


def test_diagnostics_do_not_depend_on_hash_seeds(tmp_path: Path) -> None:
    """C109: nor does what is printed of faults."""
    (tmp_path / "bad.yaml").write_text(
        spec("y = x * q + z", "dy * w") + spec("y = x", "2 * dy").replace("op: f", "op: g")
    )
    code = SEEDED.split("root = Path")[0] + (
        f"for op in load([Path({str(tmp_path)!r})], report, Path({str(tmp_path)!r})):\n    verify_op(op, report)\n"
        f"print(report.render())"
    )
    found = set()
    for seed in "0123":
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and "error[" in done.stdout, done.stderr
        found.add(done.stdout)
    assert len(found) == 1


def test_kernels_live_in_files(everything: dict[str, GeneratedFile]) -> None:
    """C075: a jit function needs a file to be read from: every kernel is text of a module, and nothing is executed
    from a text.
    """
    for path, file in everything.items():
        text = file.content.decode()
        assert not re.search(r"\b(exec|eval)\(", text), path
        if "/ops/" in path and not path.endswith("__init__.py") and "tests/" not in path:
            assert "@triton.jit\ndef " in text


def test_nothing_of_a_device_is_asked_at_import() -> None:
    """C074: the emitted package imports with no torch at all; no decorator asks for a driver."""
    code = (
        "import sys\nsys.modules['torch'] = None\nimport generated\n"
        "for name in dir(generated):\n    getattr(generated, name)\nprint(len(dir(generated)))"
    )
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and int(done.stdout) > 30, done.stderr


# ---------------------------------------------------------------------------------------------- the committed tree

SQUARE = spec("y = x * x", "2 * dy * x").replace("op: f", "op: square_of")
CUBE = spec("y = x * x * x", "3 * dy * x * x").replace("op: f", "op: cube_of")


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    return subprocess.run(["git", *identity, *words], cwd=folder, capture_output=True, text=True, check=True).stdout


def pullback(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "codegen", *words], cwd=folder, env=env, capture_output=True, text=True, check=False
    )


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with one op, generated and committed."""
    folder = tmp_path / "project"
    (folder / "specs").mkdir(parents=True)
    (folder / "specs/basic.yaml").write_text(SQUARE)
    (folder / "pyproject.toml").write_text("[tool.pullback]\n")
    (folder / ".gitignore").write_text("__pycache__/\n.pullback/\n")
    assert pullback(folder, "generate").returncode == 0
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "One op")
    return folder


def test_a_module_that_was_never_added_is_missed_by_nobody(project: Path, tmp_path: Path) -> None:
    """C114: `git diff` says nothing of untracked and of staged files; the check compares with the list of what
    there must be.
    """
    (project / "specs/more.yaml").write_text(CUBE)
    assert pullback(project, "check").returncode == 1
    assert pullback(project, "generate").returncode == 0
    git(project, "add", "-u")
    git(project, "add", "specs")
    git(project, "commit", "-qm", "Another op, its module forgotten")
    assert git(project, "diff") == "" and pullback(project, "check").returncode == 0  # here the files do exist
    git(tmp_path, "clone", "-q", str(project), "clone")
    found = pullback(tmp_path / "clone", "check")
    assert found.returncode == 1 and "generated/ops/cube_of.py: missing" in found.stdout
    (project / "generated/ops/cube_of.py").write_text("edited\n")
    git(project, "add", "-A")
    assert (
        git(project, "diff") == "" and "generated/ops/cube_of.py: edited by hand" in pullback(project, "check").stdout
    )


@pytest.mark.parametrize("words", [("check",), ("check", "--full"), ("generate",)])
def test_no_command_stages_a_file(project: Path, words: tuple[str, ...]) -> None:
    """C115: what somebody has staged, and what not, stays so; the command that mends it is printed."""
    (project / "specs/basic.yaml").write_text(SQUARE.replace("y = x * x", "y = x * x + 0"))
    (project / "notes.txt").write_text("mine\n")
    (project / "staged.txt").write_text("mine\n")
    git(project, "add", "staged.txt")
    before = git(project, "diff", "--cached", "--name-only")
    done = pullback(project, *words)
    assert git(project, "diff", "--cached", "--name-only") == before == "staged.txt\n"
    if words[0] == "check":
        assert done.returncode == 1 and "pullback generate" in done.stdout
    assert not [p for p in (ROOT / "codegen").glob("*.py") if re.search(r"""["']git["'],""", p.read_text())]


def test_one_fault_among_several_ops_leaves_every_file(project: Path) -> None:
    """C117: all faults are printed, none of the good ops is written, and nothing is half written."""
    before = {p: p.read_bytes() for p in project.rglob("*") if p.is_file() and ".git" not in p.parts}
    bad = spec("y = x * x", "3 * dy * x")
    (project / "specs/more.yaml").write_text(CUBE + bad + bad.replace("op: f", "op: g") + CUBE.replace("cube_of", "h"))
    done = pullback(project, "generate")
    assert done.returncode == 1 and done.stderr.count("error[") == 2
    (project / "specs/more.yaml").unlink()
    assert before == {p: p.read_bytes() for p in project.rglob("*") if p.is_file() and ".git" not in p.parts}
