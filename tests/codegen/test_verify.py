"""Verification: what is right passes, what is wrong is refused at its place, and no single slip gets through."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from codegen import mutate
from codegen.diagnostics import Report
from codegen.evaluate import Env, evaluate
from codegen.loader import load, load_text
from codegen.safety import check_safety
from codegen.schedule import schedule
from codegen.spec import OpSpec, spell
from codegen.verify import Verdict, central, complex_step, verify_op

ROOT = Path(__file__).parents[2]
FOLDERS = ("specs", "tests/ir", "tests/scratch")


def ops(*folders: str) -> list[OpSpec]:
    report = Report()
    found = load([ROOT / f for f in folders], report, ROOT)
    assert not report.found, report.render()
    return list(found)


def named(op: OpSpec) -> str:
    return op.name


def verified(text: str) -> tuple[Verdict, Report]:
    report = Report()
    (op,) = load_text(text, report)
    return verify_op(op, report), report


@pytest.mark.parametrize("op", ops(*FOLDERS), ids=named)
def test_declared_gradients_verify(op: OpSpec) -> None:
    report = Report()
    verdict = verify_op(op, report)
    assert verdict.ok and verdict.checked, report.render()
    differentiable = op.backward is not None and op.backward.differentiable
    assert (
        all(c.points > 0 for c in verdict.checked if c.derived)
        and any(c.derived for c in verdict.checked) == differentiable
    )
    for one in verdict.checked:
        check_safety(op, one.variant, one.graph, report)
    assert not report.errors, report.render()


@pytest.mark.parametrize("path", sorted((ROOT / "tests/wrong").glob("*.yaml")), ids=lambda p: p.stem)
def test_wrong_gradients_are_refused_at_their_entry(path: Path) -> None:
    report = Report()
    (op,) = load([path], report, ROOT)
    verdict = verify_op(op, report)
    assert not verdict.ok
    wanted = path.read_text().split("\n")[0].removeprefix("# wrong:").split(":")[0].strip()
    assert op.backward is not None
    places = {e.value_span.line for e in op.backward.entries if e.name in wanted.replace(",", " ").split()}
    assert {d.code for d in report.errors} == {"wrong-gradient"}
    assert {d.span.line for d in report.errors} & places, report.render()
    assert all("declared" in report.render() and "derived" in report.render() for _ in report.errors)


def mutants(op: OpSpec) -> Iterator[tuple[str, OpSpec]]:
    """Every single mutation of every entry and `let` of an op."""
    backward = op.backward
    if backward is None or not backward.differentiable:
        return
    for k, entry in enumerate(backward.entries):
        for m in mutate.mutations(entry.expr) if entry.expr is not None else ():
            entries = (*backward.entries[:k], replace(entry, expr=m.expr), *backward.entries[k + 1 :])
            yield f"{op.name}.{entry.name}: {spell(m.expr)}", replace(op, backward=replace(backward, entries=entries))
    for k, bound in enumerate(backward.let):
        for m in mutate.mutations(bound.expr):
            let = (*backward.let[:k], replace(bound, expr=m.expr), *backward.let[k + 1 :])
            yield f"{op.name}.let {bound.name}: {spell(m.expr)}", replace(op, backward=replace(backward, let=let))


EQUAL = {row["mutant"] for row in yaml.safe_load((ROOT / "tests/equal_mutants.yaml").read_text())}


@pytest.mark.parametrize("op", [o for o in ops(*FOLDERS) if o.backward and o.backward.differentiable], ids=named)
def test_every_single_mutation_is_refused(op: OpSpec) -> None:
    passed = []
    for text, changed in mutants(op):
        report = Report()
        verify_op(changed, report, search=False)
        if not report.errors:
            passed.append(text)
    assert set(passed) == {m for m in EQUAL if m.startswith(f"{op.name}.")}


def test_the_culprit_is_named() -> None:
    _, report = verified("""\
- op: silu
  inputs: {x: [...]}
  outputs: {y: [...]}
  forward: |
    s = sigmoid(x)
    y = x * s
  backward:
    x: dy * s * (1 - x * (1 - s))
""")
    (diagnostic,) = report.errors
    assert diagnostic.span.line == 8 and diagnostic.code == "wrong-gradient"
    assert any(
        "`-` in `1 - x * (1 - s)` for `+`" in note.text and note.span is not None and note.span.line == 8
        for note in diagnostic.notes
    )


def test_a_forgotten_factor_is_named() -> None:
    _, report = verified("""\
- op: cube
  inputs: {x: [...]}
  outputs: {y: [...]}
  forward: y = x * x * x
  backward:
    x: dy * x * x
""")
    assert "it is 0.333333 times the derivative" in report.render()


@pytest.mark.parametrize(
    ("forward", "entry", "code"),
    [
        ("y = exp(x) / (1 + exp(x))", "dy * y * (1 - y)", "unsafe"),
        ("y = log(1 + exp(x))", "dy * sigmoid(x)", "unsafe"),
        ("y = (exp(2 * x) - 1) / (exp(2 * x) + 1)", "dy * (1 - y * y)", "unsafe"),
    ],
)
def test_formulas_that_overflow_are_reported(forward: str, entry: str, code: str) -> None:
    verdict, report = verified(
        f"- op: f\n  inputs: {{x: [...]}}\n  outputs: {{y: [...]}}\n  forward: {forward}\n  backward:\n    x: {entry}\n"
    )
    assert verdict.ok, report.render()
    check_safety(verdict.op, verdict.checked[0].variant, verdict.checked[0].graph, report)
    assert [d.code for d in report.errors][:1] == [code], report.render()
    assert "true value is" in report.render() and "hint" in report.render()


def test_the_branch_not_taken_cannot_poison() -> None:
    """C012: where(x > 0, sqrt(x), x) at -1 has the derivative 1, not NaN."""
    verdict, report = verified("""\
- op: f
  inputs: {x: [...]}
  outputs: {y: [...]}
  forward: y = where(x > 0, sqrt(x), x)
  backward:
    x: auto
""")
    assert verdict.ok, report.render()
    (one,) = verdict.checked
    env = Env(("...",), {"...": 3}, {"x": np.array([-1.0, -4.0, 4.0]), "dy": np.ones(3)}, {})
    gradient = one.graph.gradients[0].node
    assert gradient is not None
    assert evaluate([gradient], env)[gradient.serial].tolist() == [1.0, 1.0, 0.25]


def test_an_alternative_value_where_there_is_no_derivative() -> None:
    """C023: the norm of a zero vector has no derivative; an author may choose 0 there, as torch does."""
    verdict, report = verified("""\
- op: norm
  inputs: {x: [..., N]}
  outputs: {y: [...]}
  forward: y = sqrt(sum(x * x, N))
  backward:
    x: where(y == 0, 0, dy * x / y)
  schedule: none
""")
    assert verdict.ok, report.render()


def test_numerical_derivatives_agree_with_each_other() -> None:
    verdict, _ = verified(
        "- op: f\n  inputs: {x: [..., N]}\n  outputs: {y: [...]}\n  forward: y = logsumexp(x, N)\n  backward:\n    x: auto\n  schedule: none\n"
    )
    graph = verdict.checked[0].graph
    rng = np.random.default_rng(0)
    env = Env(("...", "N"), {"...": 3, "N": 4}, {"x": rng.normal(size=(3, 4)), "dy": rng.normal(size=(3, 1))}, {})
    exact, sure = complex_step(graph, env, "x")
    close, sure_too = central(graph, env, "x")
    assert sure.all() and sure_too.all() and np.abs(exact - close).max() < 1e-9


UNUSED = "- op: f\n  inputs: {x: [...]}\n  outputs: {y: [...]}\n  forward: y = x\n  backward:\n    let: |\n      spare = dy * 2\n    x: dy\n"


def test_an_unused_let_is_an_error() -> None:
    _, report = verified(UNUSED)
    assert [(d.code, d.span.line) for d in report.errors] == [("unused-name", 7)]


FAR = [
    ("sqrt(minimum(x * x, 1e4) + 1)", "dy * (x / y)"),
    ("sqrt(minimum(x * x, 2e4) + 1)", "dy * (x / y)"),
    ("where(x > 50, 3 * x, x)", "dy"),
    ("where(x > 5000, 3 * x, x)", "dy"),
    ("where(abs(x) > 300, 0, x)", "dy"),
    ("where(floor(x / 700) > 2, 0, x)", "dy"),
]


@pytest.mark.parametrize(("forward", "entry"), FAR)
def test_pieces_far_from_zero_are_reached(forward: str, entry: str) -> None:
    _, report = verified(
        f"- op: f\n  inputs: {{x: [...]}}\n  outputs: {{y: [...]}}\n  forward: y = {forward}\n  backward:\n    x: {entry}\n"
    )
    assert [d.code for d in report.errors] == ["wrong-gradient"]


REACHED = [
    ("[...]", "type: int, default: 2", "p: [0, 10]", "where(p > 5, 2 * x, x)", "dy"),
    ("[...]", "default: 2", "p: [0, 100]", "x * where(p > 4, 3, 1)", "dy"),
    ("[..., N]", "default: 2", "p: [1, 2]", "p * where(index(N) >= 64, 2 * x, x)", "p * dy"),
    ("[..., N]", "default: 2", "p: [1, 2]", "p * where(mean(x, N) > 150, 2 * x, x)", "p * dy"),
    ("[...]", "default: 2", "p: [1, 2]", "p * sqrt(x * x * x * x)", "p * where(x == 0, 77 * dy, 2 * x * dy)"),
    ("[...]", "default: 2", "p: [0, 100]", "p * x * x", "p * (3 * x * dy if p == 37 else 2 * x * dy)"),
    ("[..., N]", "default: 2", "p: [1, 2]", "p * x * x", "p * (3 * x * dy if size(N) > 64 else 2 * x * dy)"),
]


@pytest.mark.parametrize(("axes", "attr", "domain", "forward", "entry"), REACHED)
def test_every_branch_is_reached(axes: str, attr: str, domain: str, forward: str, entry: str) -> None:
    _, report = verified(
        f"- op: f\n  inputs: {{x: {axes}}}\n  attrs: {{p: {{{attr}}}}}\n  domain: {{{domain}}}\n  outputs: {{y: {axes}}}\n"
        f"  forward: y = {forward}\n  backward:\n    x: {entry}\n"
    )
    assert [d.code for d in report.errors] == ["wrong-gradient"], report.render()


def test_a_branch_that_no_sample_reaches_is_not_verified() -> None:
    _, report = verified(
        "- op: f\n  inputs: {x: [...]}\n  attrs: {p: {default: 2}}\n  domain: {p: [0, 5]}\n  outputs: {y: [...]}\n"
        "  forward: y = p * x\n  backward:\n    x: p * dy if p < 7 else 3 * dy\n"
    )
    assert [d.code for d in report.errors] == ["unreached-branch"], report.render()


def test_auto_of_a_per_channel_weight_is_pointwise() -> None:
    verdict, report = verified("""\
- op: f
  inputs: {x: [B, C, ...]}
  params: {weight: [C]}
  outputs: {y: [B, C, ...]}
  forward: y = where(x > 0, x, weight * x)
  backward:
    x: auto
    weight: auto
""")
    assert verdict.ok and schedule(verdict, report) is not None, report.render()


@pytest.mark.parametrize(
    ("forward", "gradient"),
    [
        ("log(x)", "dy / x"),
        ("sqrt(x)", "dy / (2 * y)"),
        ("rsqrt(x)", "-0.5 * dy * y * y * y"),
        ("atanh(x)", "dy / (1 - x * x)"),
    ],
)
def test_a_right_gradient_is_accepted_without_a_domain(forward: str, gradient: str) -> None:
    """Elements beyond the domain are NaN, and spoil no other's numerical derivative: a logarithm goes on in the complex plane."""
    report = Report()
    (op,) = load_text(
        f"- op: f\n  inputs: {{x: [...]}}\n  outputs: {{y: [...]}}\n  forward: y = {forward}\n  backward: {{x: '{gradient}'}}\n",
        report,
    )
    assert verify_op(op, report).ok, report.render()


def test_what_follows_from_a_fault_is_not_reported() -> None:
    report = Report()
    (op,) = load_text(
        "- op: f\n  inputs: {x: [...]}\n  attrs: {alpha: {default: 1}}\n  outputs: {y: [...]}\n"
        "  forward: |\n    t = tanh(alhpa * x)\n    y = t\n  backward: {x: alpha * dy}\n", report,
    )  # fmt: skip
    verify_op(op, report)
    assert [d.code for d in report.errors] == ["unknown-name"], report.render()


@pytest.mark.parametrize("reverse", ["", ", reverse=True"])
@pytest.mark.parametrize("axes", ["[..., N]", "[N]", "[...]", "[]"])
def test_the_derivatives_of_a_recurrence(axes: str, reverse: str) -> None:
    """Also where its factor is the same along the scan, or along what is beside it."""
    verdict, report = verified(
        f"- op: f\n  inputs: {{a: {axes.replace('...', 'M')}, b: [M, N]}}\n  outputs: {{y: [M, N]}}\n  forward: y = linear(a, b, N{reverse})\n"
        "  backward: {a: auto, b: auto}\n  schedule: none\n"
    )
    assert verdict.ok and verdict.checked[0].numeric > 0, report.render()


def test_a_recurrence_has_no_exclusive_form() -> None:
    _, report = verified(
        "- op: f\n  inputs: {a: [M, N], b: [M, N]}\n  outputs: {y: [M, N]}\n  forward: y = linear(a, b, N, exclusive=True)\n"
        "  backward: {a: auto, b: auto}\n  schedule: none\n"
    )
    assert [d.code for d in report.errors] == ["unknown-keyword"], report.render()


SIZED = [
    ("[..., N]", "  requires: size(N) <= 8\n", "2 * x"),
    ("[N]", "  requires: size(N) <= 8\n", "2 * x"),
    ("[M, N]", "  requires: size(M, N) <= 40\n", "2 * x"),
    ("[..., N]", "  requires: size(N) >= 700\n", "2 * x"),
    ("[..., N]", "", "2 * x if size(N) > 3 else x"),
    ("[N]", "", "2 * x if size(N) > 3 else x"),
    ("[M, N]", "", "2 * x if size(M) < size(N) else x"),
    ("[..., N]", "", "2 * x if size(N) > 1000 else x"),
    ("[..., N]", "", "2 * x if size(N) <= 1000 else x"),
]


@pytest.mark.parametrize(("axes", "requires", "forward"), SIZED)
def test_points_are_found_at_every_extent_that_a_spec_allows(axes: str, requires: str, forward: str) -> None:
    verdict, report = verified(
        f"- op: f\n  inputs: {{x: {axes}}}\n{requires}  outputs: {{y: {axes}}}\n  forward: y = {forward}\n  backward: {{x: auto}}\n"
    )
    assert verdict.ok and len(verdict.checked) == len(verdict.graphs), report.render()


def test_extents_that_no_call_can_have_are_no_sample() -> None:
    _, report = verified(
        "- op: f\n  inputs: {x: [N]}\n  requires: size(N) < 1\n  outputs: {y: [N]}\n  forward: y = 2 * x\n  backward: {x: auto}\n"
    )
    assert [d.code for d in report.errors] == ["no-sample"], report.render()
