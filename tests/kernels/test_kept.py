"""`save:` of ops of elements: what the forward keeps for the backward, and when."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from generated.runtime.testing import DEVICE  # noqa: E402
from tests.kernels.project import Package, emitted  # noqa: E402

GATE = """\
- op: gate
  inputs: {x: [...], other: [...]}
  outputs: {y: [...]}
  forward: |
    opened = x > other
    steep = tanh(x)
    y = where(opened, steep * other, 0)
  backward:
    save: [KEPT]
    x: where(opened, (1 - steep * steep) * other * dy, 0)
    other: where(opened, steep * dy, 0)
  reference: torch.where(x > other, torch.tanh(x) * other, torch.zeros((), dtype=x.dtype, device=x.device))
"""
RUNTIME = ("runtime.binding", "runtime.device")
OWN = {"opened": torch.bool, "steep": torch.float32}
SHAPES = [((4, 33), (4, 33)), ((4, 33), (33,)), ((4, 1), (1, 33)), ((3, 0), (3, 1)), ((), ()), ((5000,), (5000,))]


@pytest.fixture(scope="module", params=["opened", "opened, steep", "steep, x", "other, x"])
def gate(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[str], Any]]:
    package = Package(tmp_path_factory.mktemp("kept"))
    yield [n for n in request.param.split(", ") if n in OWN], package.op(GATE.replace("KEPT", request.param))
    package.close()


def agree(module: Any, x: Any, other: Any, rtol: float = 1e-5) -> None:
    expected = torch.where(x > other, torch.tanh(x) * other, torch.zeros((), dtype=x.dtype, device=x.device))
    y = module.gate(x, other)
    torch.testing.assert_close(y, expected, rtol=rtol, atol=rtol)
    dy = torch.linspace(-2, 2, y.numel(), device=DEVICE, dtype=y.dtype).reshape(y.shape)
    found, right = (torch.autograd.grad(v, [x, other], dy, retain_graph=True) for v in (y, expected))
    for own, true in zip(found, right, strict=True):
        torch.testing.assert_close(own, true, rtol=rtol, atol=5 * rtol)
    for own, again in zip(found, torch.autograd.grad(y, [x, other], dy), strict=True):
        assert torch.equal(own, again)


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_gradients_of_what_was_kept(gate: tuple[list[str], Any], shapes: tuple[tuple[int, ...], ...]) -> None:
    torch.manual_seed(5)
    agree(gate[1], *(torch.randn(s, device=DEVICE, requires_grad=True) for s in shapes))


def test_of_halves(gate: tuple[list[str], Any]) -> None:
    """A float is kept in what is computed with."""
    torch.manual_seed(6)
    agree(gate[1], *(torch.randn(3, 2049, device=DEVICE).bfloat16().requires_grad_() for _ in range(2)), rtol=1e-2)


def test_of_strides_that_are_no_rows(gate: tuple[list[str], Any]) -> None:
    torch.manual_seed(7)
    x, other = (torch.randn(7, 6, 10, device=DEVICE) for _ in range(2))
    agree(gate[1], x[:, :, ::2].permute(2, 0, 1).requires_grad_(), other.permute(2, 0, 1)[::2].requires_grad_())


def test_what_is_listed_is_kept_and_only_with_gradients(gate: tuple[list[str], Any]) -> None:
    names, module = gate
    assert [t.name for t in module.Gate.saved] == names
    given = torch.randn(64, device=DEVICE)
    wanting = given.clone().requires_grad_()
    y = module.gate(wanting, given)
    there = (given.data_ptr(), wanting.data_ptr())
    assert {t.dtype for t in y.grad_fn.saved_tensors if t.data_ptr() not in there} == {OWN[n] for n in names}
    with torch.no_grad():
        assert torch.equal(module.gate(wanting, given), y)
    binding, device = (importlib.import_module(f"{module.__package__}.{n}".replace(".ops.", ".")) for n in RUNTIME)
    for saving, count in ((False, 1), (True, 1 + len(names))):
        call = binding.forward(module.Gate(), {"x": given, "other": given}, device.torch_library(), saving)
        assert len(call.run(module.Gate(), (given, given))) == count == len(call._new)


def refused(text: str, folder: Path) -> str:
    package = Package(folder)
    files, report = emitted(text, package.config)
    package.close()
    assert not files
    return report.render()


def spec(inputs: str, forward: str, save: str, entries: str, outputs: str = "{y: [..., N]}") -> str:
    lines = "".join(f"    {line}\n" for line in forward.split("; "))
    return f"- op: gate\n  inputs: {inputs}\n  outputs: {outputs}\n  forward: |\n{lines}  backward:\n    save: [{save}]\n{entries}"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (spec("{x: [..., N]}", "opened = x > 0; y = where(opened, x, 0) * sum(x, N)", "opened", "    x: auto\n"),
         "`opened`, which is as large as the operands"),
        (spec("{x: [..., N]}", "wave = sin(x); y = wave * wave * sum(x, N)", "wave", "    x: auto\n"),
         "`wave`, which is as large as the operands"),
        (spec("{x: [B, N], w: [N]}", "there = w > 0; y = where(there, x * w, 0)", "there", "    x: auto\n    w: auto\n", "{y: [B, N]}"),
         "`there`, which has fewer axes than the op"),
        (spec("{x: [...]}", "dx = x > 0; y = where(dx, x, 0)", "dx", "    x: where(dx, dy, 0)\n", "{y: [...]}"),
         "`dx`, which is the gradient of `x`"),
        (spec("{x: [..., N]}", "dx = rsqrt(mean(x * x, N) + 1); y = x * dx", "dx, x", "    x: auto\n"), "`dx`, which is the gradient of `x`"),
        (spec("{x: [...]}", "kept = x > 0; y = where(kept, x, 0)", "kept", "    x: where(kept, dy, 0)\n", "{y: [...]}"),
         "`kept`, which is a word of the kernels' own"),
        (spec("{x: [...], s: []}", "t = s > 0; y = where(t, x, 0)", "t", "    x: where(t, dy, 0)\n    s: zero\n", "{y: [...]}"),
         "`t`, which has fewer axes than the op"),
        (spec("{x: [...]}\n  attrs: {kind: {enum: [a, b], default: a}}", 't = x > 0 if kind == "a" else tanh(x); y = where(t, x, 0) if kind == "a" else t',
              "t", '    x: where(t, dy, 0) if kind == "a" else dy * (1 - t * t)\n', "{y: [...]}"),
         "`t`, whose kind depends on a choice"),
        (spec("{x: [...]}", "y = x * x", "mine", "    let: mine = 2 * x\n    x: mine * dy\n", "{y: [...]}"),
         "`mine` is the backward's own"),
    ],
    ids=["beside a sum", "a float beside a sum", "one a column", "a gradient's name", "the same of a row", "a kernel's word", "one alone", "of two kinds", "of the backward"],
)  # fmt: skip
def test_what_cannot_be_kept_is_named(text: str, reason: str, tmp_path: Path) -> None:
    assert reason in refused(text, tmp_path)


def test_what_stages_hand_on_may_be_called_as_a_gradient(tmp_path: Path) -> None:
    """It gets another name; the gradient has its own."""
    package = Package(tmp_path)
    module = package.op(
        spec("{x: [A, N]}", "q = sum(x * x, N); t = sum(q * q, A); y = x * t", "x, q, t",
             "    let: |\n      dx = sum(dy * x, N)\n      u = sum(dx, A)\n    x: dy * t + 4 * x * q * u\n", "{y: [A, N]}")
    )  # fmt: skip
    package.close()
    torch.manual_seed(8)
    x, dy = torch.randn(3, 8, device=DEVICE, requires_grad=True), torch.randn(3, 8, device=DEVICE)
    expected = x * ((x * x).sum(1) ** 2).sum()
    for own, true in (
        (module.gate(x), expected),
        *zip(*(torch.autograd.grad(v, x, dy) for v in (module.gate(x), expected))),
    ):
        torch.testing.assert_close(own, true, rtol=1e-5, atol=1e-4)


def test_a_kept_float_is_as_exact_as_the_backward_needs_it(tmp_path: Path) -> None:
    """Near 0 of x the gradient of x * tanh(x) magnifies what a cheaper form is off by."""
    text = spec("{x: [...]}", "t = tanh(x); y = x * t", "t, x", "    x: dy * (t + x * (1 - t * t))\n", "{y: [...]}")
    calls = []
    for own in (text, text.replace("    save: [t, x]\n", "")):
        package = Package(tmp_path)
        files, report = emitted(own, package.config)
        package.close()
        assert files, report.render()
        source = next(f.content for p, f in files.items() if p.endswith("ops/gate.py")).decode()
        calls.append(re.findall(r"tanh\(x(, HALF)?\)", source))
    assert calls == [[""], [", HALF", ""]]
