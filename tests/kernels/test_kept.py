"""`save:` of ops of elements: what the forward keeps for the backward, and when."""

from __future__ import annotations

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
SHAPES = [((4, 33), (4, 33)), ((4, 33), (33,)), ((4, 1), (1, 33)), ((3, 0), (3, 1)), ((), ())]


@pytest.fixture(scope="module", params=["opened", "opened, steep", "steep, x", "other, x"])
def gate(request, tmp_path_factory):  # type: ignore[no-untyped-def]
    package = Package(tmp_path_factory.mktemp("kept"))
    yield request.param.split(", "), package.op(GATE.replace("KEPT", request.param))
    package.close()


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_gradients_of_what_was_kept(gate, shapes) -> None:  # type: ignore[no-untyped-def]
    _, module = gate
    torch.manual_seed(5)
    x, other = (torch.randn(s, device=DEVICE, requires_grad=True) for s in shapes)
    y = module.gate(x, other)
    expected = torch.where(x > other, torch.tanh(x) * other, torch.zeros((), device=DEVICE))
    dy = torch.randn(y.shape, device=DEVICE)
    for own, true in zip(torch.autograd.grad(y, [x, other], dy), torch.autograd.grad(expected, [x, other], dy)):
        torch.testing.assert_close(own, true, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)


def test_of_strides_that_are_no_rows(gate) -> None:  # type: ignore[no-untyped-def]
    _, module = gate
    x, other = (torch.randn(7, 6, 5, device=DEVICE) for _ in range(2))
    x, other = x.permute(2, 0, 1).requires_grad_(), other[:, ::2].permute(2, 0, 1).repeat(1, 1, 2).requires_grad_()
    dy = torch.randn(5, 6, 7, device=DEVICE).transpose(1, 2)
    expected = torch.where(x > other, torch.tanh(x) * other, torch.zeros((), device=DEVICE))
    for own, true in zip(
        torch.autograd.grad(module.gate(x, other), [x, other], dy), torch.autograd.grad(expected, [x, other], dy)
    ):
        torch.testing.assert_close(own, true, rtol=1e-5, atol=1e-6)


def test_what_is_listed_is_kept_and_only_with_gradients(gate) -> None:  # type: ignore[no-untyped-def]
    names, module = gate
    given = torch.randn(64, device=DEVICE)
    wanting = given.clone().requires_grad_()
    y = module.gate(wanting, given)
    kept = {t.dtype for t in y.grad_fn.saved_tensors if t.data_ptr() not in (given.data_ptr(), wanting.data_ptr())}
    assert kept == {torch.bool if n == "opened" else torch.float32 for n in names if n in ("opened", "steep")}
    assert module.Gate.saved == tuple(t for t in module.Gate.saved if t.name in names)
    with torch.no_grad():
        assert torch.equal(module.gate(wanting, given), y)


@pytest.mark.parametrize("name", ["opened", "steep"])
def test_beside_a_reduction_it_has_fewer_axes(name: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    text = f"""\
- op: gate
  inputs: {{x: [..., N]}}
  outputs: {{y: [..., N]}}
  forward: |
    opened = x > 0
    steep = sin(x)
    y = where(opened, steep * steep, 0) * sum(x, N)
  backward:
    save: [{name}]
    x: auto
"""
    package = Package(tmp_path)
    files, report = emitted(text, package.config)
    package.close()
    assert not files and f"`{name}`, which is as large as the operands" in report.render()
