"""What an op makes of the extents of a call: axes whose extents `sizes:` gives, and choices by conditions over extents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from generated.runtime.testing import DEVICE  # noqa: E402
from tests.kernels.project import Package, emitted  # noqa: E402

Reference = Callable[..., Any]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Package]:
    made = Package(tmp_path_factory.mktemp("extents"))
    yield made
    made.close()


def spec(name: str, rest: str, inputs: str = "{x: [..., N]}", backward: str = "not_differentiable") -> str:
    return f"- op: {name}\n  doc: Of extents.\n  inputs: {inputs}\n{rest}  backward: {backward}\n"


def ramp(n: int) -> Any:
    return torch.arange(n, dtype=torch.float64, device=DEVICE)


SIZED: dict[str, tuple[str, Reference, list[dict[str, Any]]]] = {
    "halved": (
        spec("halved", "  sizes: {M: size(N) // 2}\n  outputs: {y: [..., M]}\n  forward: y = at(x, N=2 * index(M) + 1)\n"),
        lambda x: x[..., 1::2],
        [{}],
    ),
    "strided": (
        spec(
            "strided",
            "  attrs: {first: {type: int, default: 0}, step: {type: int, default: 2}}\n"
            "  sizes: {M: (size(N) - first - 1) // step + 1}\n  requires: |\n    step > 0\n    first >= 0\n"
            "  outputs: {y: [..., M]}\n  forward: y = at(x, N=step * index(M) + first)\n",
        ),
        lambda x, first=0, step=2: x[..., first::step],
        [{}, {"step": 3}, {"first": 1}, {"first": 2, "step": 1}],
    ),
    "one_by_another": (
        spec("one_by_another", "  sizes:\n    M: size(N) // 2\n    L: size(M) + 1\n  outputs: {y: [..., L]}\n  forward: y = at(x, N=index(L))\n"),
        lambda x: x[..., : x.shape[-1] // 2 + 1],
        [{}],
    ),
    "beside_others": (
        spec("beside_others", "  attrs: {m: {type: int, default: 3}}\n  sizes: {M: m}\n  outputs: {y: [..., M]}\n  forward: y = 2 * x\n",
             "{x: [...]}"),
        lambda x, m=3: (2 * x)[..., None].expand(*x.shape, m),
        [{}, {"m": 5}, {"m": 0}],
    ),
    "with_gradient": (
        spec("with_gradient", "  attrs: {m: {type: int, default: 3}}\n  sizes: {M: m}\n  outputs: {y: [B, M]}\n"
             "  forward: y = x * x * (index(M) + 1)\n", "{x: [B]}", "{x: auto}"),
        lambda x, m=3: (x * x)[:, None] * (ramp(m) + 1),
        [{}, {"m": 5}],
    ),
    "reduced": (
        spec("reduced", "  sizes: {M: size(N) // 2}\n  outputs: {y: [...]}\n  forward: y = sum(at(x, N=index(M)) * (index(M) + 1), M)\n"),
        lambda x: (x[..., : x.shape[-1] // 2] * (ramp(x.shape[-1] // 2) + 1)).sum(-1),
        [{}],
    ),
    "by_choice": (
        spec(
            "by_choice",
            "  attrs: {half: {default: false}}\n  sizes: {M: size(N) // 2 if half else size(N)}\n  outputs: {y: [..., M]}\n"
            "  forward: y = at(x, N=index(M))\n",
        ),
        lambda x, half=False: x[..., : x.shape[-1] // 2] if half else x,
        [{}, {"half": True}],
    ),
    "a_factor": (
        spec("a_factor", "  sizes: {M: size(N) // 2}\n  outputs: {y: [B, (M K=2)]}\n  forward: y = at(x, N=index(M)) * (index(K) + 1)\n",
             "{x: [B, N]}"),
        lambda x: (x[:, : x.shape[1] // 2, None] * (ramp(2) + 1)).flatten(1),
        [{}],
    ),
    "inner_factor": (
        spec("inner_factor", "  sizes: {M: size(N) // 2}\n  outputs: {y: [(B M)]}\n  forward: y = at(x, N=index(M))\n", "{x: [B, N]}"),
        lambda x: x[:, : x.shape[1] // 2].flatten(),
        [{}],
    ),
}  # fmt: skip


SHAPES = {1: [(5,), (1,), (0,)], 2: [(3, 7), (1, 1), (4, 2), (2, 33), (0, 6), (3, 0)]}
NONE_LEFT = {"strided": [(3, 7), (4, 3), (2, 33), (0, 6)], "one_by_another": SHAPES[2][:-1]}
"""Of shapes that give an extent below 0, or an element that there is not, the others."""


def all_of(made: Any) -> tuple[Any, ...]:
    return made if isinstance(made, tuple) else (made,)


@pytest.mark.parametrize("name", SIZED)
def test_extents_that_no_tensor_has_are_computed_at_each_call(package: Package, name: str) -> None:
    text, reference, cases = SIZED[name]
    module = package.op(text)
    op = getattr(module, name)
    differentiable = name == "with_gradient"
    for shape in NONE_LEFT.get(name, SHAPES[text.partition("x: [")[2].partition("]")[0].count(",") + 1]):
        for attrs in cases:
            x = torch.randn(shape, dtype=torch.float64, device=DEVICE)
            ours, theirs = (x.clone().requires_grad_(differentiable) for _ in range(2))
            made, wanted = all_of(op(ours, **attrs)), all_of(reference(theirs, **attrs))
            for got, want in zip(made, wanted, strict=True):
                torch.testing.assert_close(got.detach(), want.detach(), rtol=1e-12, atol=1e-12, msg=f"{shape} {attrs}")
            if differentiable:
                g = torch.randn_like(wanted[0])
                grads = [torch.autograd.grad(y[0], leaf, g)[0] for y, leaf in ((made, ours), (wanted, theirs))]
                torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12, msg=f"{shape} {attrs}")


@pytest.mark.parametrize("name", SIZED)
def test_the_contract_tells_the_shapes_and_a_plan_has_them(package: Package, name: str) -> None:
    text, reference, cases = SIZED[name]
    module = package.op(text)
    kind = getattr(module, "".join(w.capitalize() for w in name.split("_")))
    dims = text.partition("x: [")[2].partition("]")[0].count(",") + 1
    for attrs in cases:
        defaults = {"first": 0, "step": 2} if name == "strided" else {"m": 3} if "m: " in text else {}
        op = kind(**{**defaults, **({"half": False} if name == "by_choice" else {}), **attrs})
        x = torch.zeros(*(3, 8)[-dims:], dtype=torch.float64, device=DEVICE)
        meta = package.module("runtime.plan").Meta.dense("f64", tuple(x.shape))
        shapes = tuple(tuple(y.shape) for y in all_of(reference(x, **attrs)))
        assert op.output_shapes({"x": meta}) == shapes
        assert tuple(m.shape for m in op.plan_forward({"x": meta}).outputs.values()) == shapes


def recorded(package: Package, name: str, size: int | str, **attrs: Any) -> Any:
    x, _ = package.module("runtime.graph").SymTensor.input("f64", (3, size))
    return getattr(package.op(SIZED[name][0]), name)(x, **attrs)


def test_a_recorded_graph_knows_the_extents_or_says_that_it_does_not(package: Package) -> None:
    assert recorded(package, "halved", 7).shape == (3, 3)
    assert recorded(package, "strided", 7, step=3).shape == (3, 3)
    assert str(recorded(package, "halved", "n").shape[1]) == "n/2"  # an odd n is refused when it is known
    for name, attrs in (("strided", {"first": 1, "step": 1}), ("one_by_another", {})):
        with pytest.raises(ValueError, match="no product of the sizes"):
            recorded(package, name, "n", **attrs)


ROUNDED = spec(
    "rounded", "  sizes: {M: size(N) // 4 * 4}\n  outputs: {y: [..., M]}\n  forward: y = at(x, N=index(M))\n"
)


def test_a_graph_takes_no_rounded_extent_for_a_whole_one(package: Package) -> None:
    x, _ = package.module("runtime.graph").SymTensor.input("f64", (3, "n"))
    with pytest.raises(ValueError, match="no product of the sizes"):
        package.op(ROUNDED).rounded(x)


def test_an_extent_below_zero_or_another_than_that_of_a_tensor_is_an_error(package: Package) -> None:
    x = torch.zeros(3, 1, dtype=torch.float64, device=DEVICE)
    with pytest.raises(ValueError, match="strided: the extent of `M` would be -1"):
        package.op(SIZED["strided"][0]).strided(x, first=2, step=1)
    beside = package.op(
        spec("beside", "  sizes: {M: size(N) // 2}\n  outputs: {y: [M]}\n  forward: y = 2 * w\n", "{x: [N], w: [M]}")
    )
    x = torch.zeros(6, dtype=torch.float64, device=DEVICE)
    assert beside.beside(x, x[:3]).shape == (3,)
    with pytest.raises(ValueError, match="the extent of `M` is 3 here, and a tensor has 6"):
        beside.beside(x, x)


def test_outputs_of_different_axes_are_written_whole_or_the_call_is_refused(package: Package) -> None:
    op = package.op(
        spec(
            "two",
            "  sizes: {M: size(N) // 2, L: size(N)}\n  outputs: {y: [..., M], z: [..., L]}\n"
            "  forward: |\n    y = at(x, N=index(M))\n    z = at(x, N=index(L))\n",
        )
    ).two
    for shape in [(3, 7), (2, 2), (0, 5), (3, 0)]:
        x = torch.randn(shape, dtype=torch.float64, device=DEVICE)
        y, z = op(x)
        assert torch.equal(y, x[:, : shape[1] // 2]) and torch.equal(z, x)
    with pytest.raises(ValueError, match=r"two: `z` has elements, and \(M\), which it lacks, has none"):
        op(torch.zeros(3, 1, dtype=torch.float64, device=DEVICE))


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("width", [5, 40_000])
def test_what_all_rows_have_in_common_is_there_without_a_row(package: Package, count: int, width: int) -> None:
    """Results that lack the axis of the rows, with and without elements of their own, on one program and shared by several."""
    text = (
        "  outputs: {y: [B], total: [], squares: [N]}\n"
        "  forward: |\n    y = sum(x * w, N)\n    total = sum(w * w, N)\n    squares = w * w\n"
    )
    op = package.op(spec("in_common", text, "{x: [B, N], w: [N]}")).in_common
    x, w = (torch.randn(shape, dtype=torch.float64, device=DEVICE) for shape in ((count, width), (width,)))
    y, total, squares = op(x, w)
    assert y.shape == (count,) and torch.allclose(y, x @ w)
    assert torch.allclose(total, (w * w).sum()) and torch.equal(squares, w * w)


REFUSED = {
    "a factor of an operand": (
        spec("f", "  sizes: {M: size(N) // 2}\n  outputs: {y: [N]}\n  forward: y = x + sum(w, M, K)\n", "{x: [N], w: [(M K)]}"),
        "`M`, which `sizes` gives, is a factor of a dim of `w`",
    ),
    "dims by extents": (
        spec("f", "  outputs: {y: '[N] if size(N) > 3 else []'}\n  forward: y = x if size(N) > 3 else sum(x, N)\n", "{x: [N]}"),
        "the shape of `y` depends on extents: `size(N) > 3`",
    ),
    "no whole number": (
        spec("f", "  sizes: {M: size(N) / 2}\n  outputs: {y: [M]}\n  forward: y = at(x, N=index(M))\n", "{x: [N]}"),
        "the extent of `M` is no int",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_kernel_can_do_is_a_diagnostic(package: Package, name: str) -> None:
    files, report = emitted(REFUSED[name][0], package.config)
    assert not files and REFUSED[name][1] in report.render(), report.render()


CHOSEN: dict[str, tuple[str, Reference, list[dict[str, Any]]]] = {
    "of_a_row": (
        spec("of_a_row", "  outputs: {y: [..., N]}\n  forward: y = x - sum(x, N) if size(N) > 20 else x\n", backward="{x: auto}"),
        lambda x: x - x.sum(-1, keepdim=True) if x.shape[-1] > 20 else x * 1,
        [{}],
    ),
    "of_elements": (
        spec("of_elements", "  outputs: {y: [..., N]}\n  forward: y = x * x if size(N) > 4 else 3 * x\n", backward="{x: auto}"),
        lambda x: x * x if x.shape[-1] > 4 else 3 * x,
        [{}],
    ),
    "of_two_axes": (
        spec("of_two_axes", "  outputs: {y: [B, N]}\n  forward: y = x * x if size(B) < size(N) else 3 * x\n", "{x: [B, N]}", "{x: auto}"),
        lambda x: x * x if x.shape[0] < x.shape[1] else 3 * x,
        [{}],
    ),
    "of_all_axes": (
        spec("of_all_axes", "  outputs: {y: [...]}\n  forward: y = x * x if size(...) % 2 == 0 else 3 * x\n", "{x: [...]}", "{x: auto}"),
        lambda x: x * x if x.numel() % 2 == 0 else 3 * x,
        [{}],
    ),
    "with_an_attr": (
        spec("with_an_attr", "  attrs: {k: {type: int, default: 4}}\n  outputs: {y: [..., N]}\n"
             "  forward: y = x * mean(x, N) if size(N) >= k else 3 * x\n", backward="{x: auto}"),
        lambda x, k=4: x * x.mean(-1, keepdim=True) if x.shape[-1] >= k else 3 * x,
        [{}, {"k": 6}, {"k": 40}],
    ),
    "with_a_choice": (
        spec("with_a_choice", "  attrs: {flag: {default: false}}\n  outputs: {y: [..., N]}\n"
             "  forward: y = x * mean(x, N) if size(N) >= 5 and not flag else 3 * x\n", backward="{x: auto}"),
        lambda x, flag=False: x * x.mean(-1, keepdim=True) if x.shape[-1] >= 5 and not flag else 3 * x,
        [{}, {"flag": True}],
    ),
    "of_a_derived": (
        spec("of_a_derived", "  attrs: {m: {type: int, default: 2}}\n  sizes: {M: m * size(B)}\n  outputs: {y: [B, M]}\n"
             "  forward: y = x * x * (index(M) + 1) if size(M) > 5 else x * (index(M) + 1)\n", "{x: [B]}", "{x: auto}"),
        lambda x, m=2: (x * x if m * x.shape[0] > 5 else x)[:, None] * (ramp(m * x.shape[0]) + 1),
        [{}, {"m": 3}, {"m": 1}],
    ),
    "of_a_gradient": (
        spec("of_a_gradient", "  outputs: {y: [..., N]}\n  forward: y = x * x\n",
             backward="\n    x: 2 * x * dy if size(N) > 4 else (x + x) * dy"),
        lambda x: x * x,
        [{}],
    ),
    "that_passes": (
        spec("that_passes", "  outputs: {y: [..., N]}\n  forward: y = x if size(N) > 4 else x + 1\n", backward="{x: dy}"),
        lambda x: x * 1 if x.shape[-1] > 4 else x + 1,
        [{}],
    ),
    "of_a_scaled": (
        spec("of_a_scaled", "  outputs: {y: [..., N]}\n  forward: y = x * size(N) if size(N) > 4 else x / size(N)\n", backward="{x: auto}"),
        lambda x: x * x.shape[-1] if x.shape[-1] > 4 else x / x.shape[-1],
        [{}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHOSEN)
def test_a_condition_over_extents_is_decided_at_each_call(package: Package, name: str) -> None:
    text, reference, cases = CHOSEN[name]
    op = getattr(package.op(text), name)
    dims = text.partition("x: [")[2].partition("]")[0].count(",") + 1
    for shape in (
        [(3,), (5,), (2,), (6,)] if dims == 1 and "..." not in text else [(3, 4), (3, 5), (5, 3), (2, 21), (2, 50)]
    ):
        for attrs in cases:
            x = torch.randn(shape, dtype=torch.float64, device=DEVICE)
            ours, theirs = (x.clone().requires_grad_() for _ in range(2))
            made, wanted = op(ours, **attrs), reference(theirs, **attrs)
            g = torch.randn_like(wanted)
            grads = [torch.autograd.grad(y, leaf, g)[0] for y, leaf in ((made, ours), (wanted, theirs))]
            for got, want in ((made, wanted), grads):
                torch.testing.assert_close(got.detach(), want.detach(), rtol=1e-12, atol=1e-12, msg=f"{shape} {attrs}")


def test_a_buffer_may_be_updated_under_a_condition_over_extents(package: Package) -> None:
    op = package.op(
        "- op: counted\n  doc: Of extents.\n  inputs: {x: [B, N]}\n  buffers: {total: [N]}\n  outputs: {y: [B, N]}\n  forward: y = 2 * x\n"
        "  update:\n    when: size(B) > 2\n    total: total + sum(x, B)\n  backward: {x: 2 * dy}\n"
    )
    for rows in (2, 3):
        x, total = torch.ones(rows, 4, dtype=torch.float64, device=DEVICE), torch.zeros(
            4, dtype=torch.float64, device=DEVICE
        )
        op.counted(x, total)
        assert total.tolist() == [3.0 * (rows > 2)] * 4


@pytest.mark.parametrize("size", [4, 30])
def test_a_model_that_is_trained_decides_it_too(package: Package, size: int) -> None:
    x, graph = package.module("runtime.graph").SymTensor.input("f64", (3, "n"))
    y = package.op(CHOSEN["of_a_row"][0]).of_a_row(x)
    run = graph.lower([y], input_gradients=[x]).load(DEVICE, n=size)
    given = torch.randn(3, size, dtype=torch.float64, device=DEVICE)
    leaf, g = given.clone().requires_grad_(), torch.randn_like(given)
    want = CHOSEN["of_a_row"][1](leaf)
    made = run.forward_train(given)
    torch.testing.assert_close(made, want.detach())
    run.backward({y.name: g})
    want.backward(g)
    torch.testing.assert_close(run.input_grads["x"], leaf.grad)
