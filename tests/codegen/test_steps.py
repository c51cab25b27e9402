"""Steps: each reason why an op that updates state is none, as it is printed (`bad_steps.txt`); what one becomes; names that clash."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from codegen.config import Config
from codegen.diagnostics import Report
from codegen.emit import render
from codegen.explain import explain
from codegen.loader import load_text
from codegen.lower_rows import lowered
from codegen.lower_step import StepText
from codegen.schedule import OpPlan, bytes_per_element, schedule
from codegen.verify import typed, verify_op

HEAD = "- op: f\n  inputs: {grad: [...]}\n"
TAIL = "  backward: not_differentiable\n"


def cases() -> dict[str, tuple[str, str]]:
    out = {}
    for part in (Path(__file__).parent / "bad_steps.txt").read_text(encoding="utf-8").split("=== ")[1:]:
        head, printed = part.split(">>>\n")
        name, text = head.split("\n", 1)
        out[name] = (text, printed.rstrip("\n"))
    return out


CASES = cases()


@pytest.mark.parametrize("name", CASES)
def test_each_fault_is_printed_so(name: str) -> None:
    text, printed = CASES[name]
    report = Report()
    for op in load_text(text, report):
        verdict = verify_op(op, report)
        if verdict.ok:
            schedule(verdict, report)
    assert printed and report.render() == printed


def plan(text: str) -> OpPlan:
    report = Report()
    (op,) = load_text(HEAD + text + TAIL, report)
    found = schedule(typed(op, report), report)
    assert found is not None, report.render()
    return found


def kernel(text: str) -> StepText:
    found = lowered(plan(text)).forward[0].kernel
    assert isinstance(found, StepText)
    return found


def module(text: str) -> str:
    report = Report()
    (op,) = load_text(HEAD + text + TAIL, report)
    files = render([verify_op(op, report)], (), Config(), report)
    assert not report.errors, report.render()
    return files["generated/ops/f.py"].content.decode()


MOMENTUM = """\
  state:
    param: [...]
    m: {axes: [...], dtype: compute, init: 0, when: momentum != 0}
    total: {axes: [], init: lr}
  attrs:
    step: {type: int}
    lr: {default: 1e-2}
    momentum: {default: 0}
  update:
    let: |
      rate = lr / (1 + step)  # smaller and smaller
      b = momentum * m + grad if momentum != 0 else grad
    param: param - rate * total * b
    m: b
    total: total * rate
"""


def test_numbers_of_the_host_keep_their_names_and_stand_in_a_table() -> None:
    text = kernel(MOMENTUM)
    assert text.numbers == ("momentum", "c2")  # the second, `rate * total`, has no name in the spec
    assert not any("float64" in p for p in (*text.params, *text.update.params))
    assert text.addresses == 4  # copy, grad, param, m
    plain = kernel(
        "  state: {param: [...]}\n  attrs: {lr: {}}\n  update:\n    let: half = lr / 2\n    param: param - half * grad\n"
    )
    assert plain.numbers == ("half",)


def test_everything_is_read_before_anything_is_written() -> None:
    body = kernel(MOMENTUM).update.body
    loads = [k for k, line in enumerate(body) if "tl.load(" in line]
    stores = [k for k, line in enumerate(body) if "tl.store(" in line]
    assert max(loads) < min(stores) and len(loads) == 3 and len(stores) == 3


def test_a_tensor_takes_the_name_that_its_formula_has() -> None:
    body = "\n".join(kernel(MOMENTUM).update.body)
    assert "    tl.store(m_ptr + i, b, mask=mask)" in body


def test_the_class_states_when_state_is_there_and_what_it_begins_with() -> None:
    text = module(MOMENTUM)
    assert 'Tensor("m", "...", "compute", init=0.0, when=(("MOMENTUM_IS_NOT_0", (True,)),))' in text
    assert 'Tensor("total", "", init="lr")' in text
    assert "def f(params: Params, lr: float = 1e-2, momentum: float = 0) -> Optimizer:" in text
    tree = ast.parse(text)
    (cls,) = [n for n in tree.body if isinstance(n, ast.ClassDef)]
    assert {n.name for n in cls.body if isinstance(n, ast.FunctionDef)} == {"scalars", "choices", "advanced"}


@pytest.mark.parametrize(
    "name", ["i", "mask", "start", "n", "row", "numbers", "scale", "steps", "copy_", "new_param", "host", "c0", "work"]
)
def test_no_name_of_a_spec_hides_the_kernels_own(name: str) -> None:
    """State, flags and statements may be called as what a kernel has itself; emission checks that each name is known."""
    made = []
    if name not in ("host", "steps"):
        made.append(
            module(
                f"  state: {{param: [...], {name}: {{axes: [...], init: 0}}}}\n  attrs: {{lr: {{default: 1}}}}\n"
                f"  update: {{param: param - lr * {name}, {name}: {name} + grad}}\n"
            )
        )
    made.append(
        module(
            f"  state: {{param: [...]}}\n  attrs: {{{name}: {{default: true}}, lr: {{default: 1}}}}\n"
            f"  update: {{param: '(param - lr * grad) if {name} else param + lr * grad'}}\n"
        )
    )
    for function in (n for text in made for n in ast.parse(text).body[:-2] if isinstance(n, ast.FunctionDef)):
        args = [a.arg for a in function.args.args]
        targets = [(t, n.value) for n in ast.walk(function) if isinstance(n, ast.Assign) for t in n.targets]
        names = [t.id for x, _ in targets for t in ast.walk(x) if isinstance(t, ast.Name)]
        assert (
            len(args) == len(set(args))
            and set(names) & set(args) <= {"numbers_ptr"}
            and names.count("numbers_ptr") <= 1
        )
        pointers = {(ast.unparse(x), ast.unparse(v)) for x, v in targets if "steps.address(" in ast.unparse(v)}
        assert len({x for x, _ in pointers}) == len(pointers), "two tensors have one pointer"


def test_the_account_of_a_step() -> None:
    report = Report()
    (op,) = load_text(HEAD + MOMENTUM + TAIL, report)
    text = explain(op, report)
    assert "Plan: step" in text and "1 launch for all tensors of the same dtypes and choices, f_step" in text
    assert "Forward" not in text
    assert bytes_per_element(plan(MOMENTUM), 2) == (2 + 2 * 2 + 2 * 4, 0)
