"""What reductions become: what fits the row schedule, and the reason where nothing does."""

from __future__ import annotations

from pathlib import Path

import pytest

from codegen.diagnostics import Report
from codegen.loader import load
from codegen.lower_rows import RowKernel, lowered
from codegen.schedule import OpPlan, schedule
from codegen.verify import verify_op


def planned(folder: Path, inputs: str, outputs: str, forward: str, more: str = "") -> tuple[OpPlan | None, str]:
    """The plan of an op with derived gradients, and what was reported."""
    names = [w.split(":")[0].strip(" {") for w in inputs.split("],")]
    entries = "".join(f"    {n}: auto\n" for n in names)
    text = (
        f"- op: some_op\n  inputs: {inputs}\n{more}  outputs: {outputs}\n  forward: {forward}\n  backward:\n{entries}"
    )
    (folder / "op.yaml").write_text(text)
    report = Report()
    (op,) = load([folder], report, folder)
    verdict = verify_op(op, report)
    assert verdict.ok, report.render()
    return schedule(verdict, report), report.render()


WHOLE = "{x: [A, B, C]}"
REFUSED = {
    "a scan along a pack": (
        "{x: [A, C...]}",
        "{y: [A, C...]}",
        "y = cumsum(x, C)",
        "`cumsum` along a pack, whose axes",
    ),
    "a scan that is kept": (
        WHOLE,
        "{y: [A, B, C]}",
        "|\n    s = cumsum(x, C)\n    y = s * s",
        "keeps `s`, which is as large",
    ),
    "a shift of a formula": (
        WHOLE,
        "{y: [A, B, C]}",
        "y = at(x * x, C=index(C) - 1, fill=0) / sum(x, C)",
        "`at` of what is no",
    ),
    "another fill": ("{x: [A, C]}", "{y: [A]}", "y = at(x, C=index(A), fill=1) * sum(x, C)", "that is not NaN"),
    "a gradient that is no sum": (  # it would be added up over C, as often as C is long
        "{x: [..., C], z: [...]}",
        "{y: [...]}",
        "y = sum(x, C) * z",
        "the gradient of `z` lacks (C), which others have, and is no sum over it",
    ),
    "broadcast": ("{x: [...], w: [...]}", "{y: [...]}", "y = x * w / sum(w, ...)", "is a sum, and"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_with_its_reason(name: str, tmp_path: Path) -> None:
    inputs, outputs, forward, reason = REFUSED[name]
    plan, text = planned(tmp_path, inputs, outputs, forward)
    assert plan is None and "error[no-schedule]" in text and reason in text, text


@pytest.mark.parametrize(("asked", "forward", "reason"), [
    ("pointwise", "y = x / sum(x, C)", "`pointwise` was asked for, and `sum` is no elementwise operation"),
])  # fmt: skip
def test_an_override_that_cannot_be_is_refused(asked: str, forward: str, reason: str, tmp_path: Path) -> None:
    text = f"- op: some_op\n  inputs: {WHOLE}\n  outputs: {{y: [A, B, C]}}\n  forward: {forward}\n  backward:\n    x: auto\n  schedule: {asked}\n"
    (tmp_path / "op.yaml").write_text(text)
    report = Report()
    (op,) = load([tmp_path], report, tmp_path)
    assert schedule(verify_op(op, report), report) is None and reason in report.render(), report.render()


@pytest.mark.parametrize(("forward", "passes"), [
    ("y = x / sum(x, C)", 2), ("y = exp(x - max(x, C)) / sum(exp(x - max(x, C)), C)", 2),
    ("y = exp(x - max(x, C)) / sum(exp(x + max(x, C)), C)", 3), ("y = exp(x) / sum(exp(2 * x - max(x, C)), C)", 3), ("y = x - mean(x, C) - max(x, C)", 2),
    ("y = (x - mean(x, C)) * rsqrt(var(x, C) + 1)", 3),
])  # fmt: skip
def test_a_row_is_walked_as_often_as_its_reductions_depend_on_each_other(
    forward: str, passes: int, tmp_path: Path
) -> None:
    plan, text = planned(tmp_path, WHOLE, "{y: [A, B, C]}", forward)
    assert plan is not None, text
    kernel = lowered(plan).forward[0].kernel
    assert isinstance(kernel, RowKernel) and len(kernel.passes) == passes


def stages(folder: Path, inputs: str, outputs: str, forward: str) -> tuple[list[str], list[str]]:
    """How the passes of each kernel go, forwards and in the backward."""
    plan, text = planned(folder, inputs, outputs, forward)
    assert plan is not None, text
    module = lowered(plan)
    found = [[k for t in half if isinstance(k := t.kernel, RowKernel)] for half in (module.forward, module.backward)]
    forwards, backwards = (["".join("<" if p.reverse else ">" for p in k.passes) for k in half] for half in found)
    return forwards, backwards


@pytest.mark.parametrize(("forward", "ways"), [
    ("y = cumsum(x, C)", ([">"], ["<"])), ("y = cumsum(x, C, reverse=True)", (["<"], [">"])),
    ("y = cumsum(cumsum(x, C), C)", ([">"], ["<"])),  # one after the other in one pass
    ("y = cumsum(cumsum(x, C), B)", ([">", ">"], ["<", "<"])),  # along different axes
    ("y = cumsum(x, C) - cumsum(x, C, reverse=True)", ([">", "<", ">"], [">", "<", ">"])),
    ("y = cumprod(x, C)", ([">"], [">", "<", ">"])),  # derived: what is before times what is after
    ("|\n    s = sum(cumsum(x, C), C)\n    y = x / s", ([">>"], ["><"])),
], ids=str)  # fmt: skip
def test_scans_of_opposite_ends_are_stages_of_their_own(
    forward: str, ways: tuple[list[str], list[str]], tmp_path: Path
) -> None:
    assert stages(tmp_path, WHOLE, "{y: [A, B, C]}", forward) == ways


def test_rows_that_are_scanned_have_one_program_each(tmp_path: Path) -> None:
    """What would be shared by several is not: each step goes on from the one before."""
    for outputs, forward in (("{y: [A, B, C]}", "y = 2 * cumsum(x, C)"), ("{y: [A, B]}", "y = sum(cumsum(x, C), C)")):
        plan, text = planned(tmp_path, WHOLE, outputs, forward)
        assert plan is not None, text
        assert all("span: tl.int64" not in k.params for k in lowered(plan).kernels)


def test_statistics_with_a_name_are_kept_and_others_computed_again(tmp_path: Path) -> None:
    for forward, saved in (
        ("|\n    r = rsqrt(mean(x * x, C) + 1)\n    y = x * r", ("r",)), ("y = x * rsqrt(mean(x * x, C) + 1)", ()),
    ):  # fmt: skip
        plan, text = planned(tmp_path, WHOLE, "{y: [A, B, C]}", forward)
        assert plan is not None, text
        assert tuple(t.name for t in plan.saved) == saved
        kernels = lowered(plan, "inference").kernels
        assert not lowered(plan, "inference").backward and all("r_ptr" not in k.params for k in kernels)


def test_a_reduction_of_a_later_pass_has_a_name_of_its_own(tmp_path: Path) -> None:
    """It may stand in the same statement as one of an earlier pass, which is read again after it."""
    plan, text = planned(
        tmp_path,
        WHOLE,
        "{y: [A, B, C]}",
        "y = x * sum(x * sum(x, C), C) + sum(x, C) * sum(x * x * sum(x * sum(x, C), C), C)",
    )
    assert plan is not None, text
    for kernel in lowered(plan).kernels:
        assert isinstance(kernel, RowKernel)
        names = [line.split(" = ")[0] for p in kernel.passes for line in p.starts]
        assert len(names) == len(set(names)) > 2, names
