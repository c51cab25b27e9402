"""`CustomOp`: a kernel written by hand is held to its signature, and has all that a generated op has."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

import generated  # noqa: E402
from generated.runtime.abi import KernelAbi  # noqa: E402
from generated.runtime.accesses import Accesses, accesses  # noqa: E402
from generated.runtime.binding import call  # noqa: E402
from generated.runtime.custom import CustomOp, Scratch  # noqa: E402
from generated.runtime.elementwise import triton_dtype  # noqa: E402
from generated.runtime.graph import Init, SymTensor  # noqa: E402
from generated.runtime.plan import Given, Launch, Meta, Tensor, cdiv  # noqa: E402
from generated.runtime.sums import add_up  # noqa: E402
from generated.runtime.testing import DEVICE  # noqa: E402
from tests.kernels.test_packed import Host, same_bits  # noqa: E402

BLOCK = 16


@triton.jit
def unit_forward(
    x_ptr, weight_ptr, y_ptr, norm_ptr, n: tl.int64, factor: tl.float64, COMPUTE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * n + k, mask=k < n, other=0.0).to(COMPUTE)
    weight = tl.load(weight_ptr + k, mask=k < n, other=0.0).to(COMPUTE)
    norm = tl.sqrt(tl.sum(x * x))
    tl.store(y_ptr + row * n + k, x * weight / norm * tl.full([1], factor, COMPUTE), mask=k < n)
    if norm_ptr is not None:
        tl.store(norm_ptr + row, norm)


@triton.jit
def unit_backward(
    x_ptr, weight_ptr, norm_ptr, dy_ptr, dx_ptr, part_ptr, n: tl.int64, factor: tl.float64, COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * n + k, mask=k < n, other=0.0).to(COMPUTE)
    weight = tl.load(weight_ptr + k, mask=k < n, other=0.0).to(COMPUTE)
    dy = tl.load(dy_ptr + row * n + k, mask=k < n, other=0.0).to(COMPUTE) * tl.full([1], factor, COMPUTE)
    norm = tl.load(norm_ptr + row)
    g = dy * weight
    if dx_ptr is not None:
        dx = (g - x * (tl.sum(g * x) / (norm * norm))) / norm
        tl.store(dx_ptr + row * n + k, dx, mask=k < n)
    if part_ptr is not None:
        tl.store(part_ptr + row * n + k, dy * x / norm, mask=k < n)


def of_rows(self: CustomOp, given: Mapping[str, Given], outputs: Mapping[str, Meta]) -> list[Launch]:
    rows, n = outputs["y"].shape
    return [
        self.launch(
            unit_forward, rows, x_ptr="x", weight_ptr="weight", y_ptr="y", norm_ptr="norm", n=n,
            factor=self.attrs["factor"], COMPUTE=triton_dtype(self.compute_dtype(given)), BLOCK=BLOCK,
        )
    ]  # fmt: skip


class Unit(CustomOp):
    """Rows of length `factor`, times a weight. Of dense tensors alone."""

    name = "unit"
    inputs = (Tensor("x", "B, N"),)
    params = (Tensor("weight", "N", init=1),)
    outputs = (Tensor("y", "B, N"),)
    saved = (Tensor("norm", "B", "compute"),)
    gradients = ("x", "weight")
    residuals = ("x", "weight", "norm")
    kinds = {"factor": "float"}

    def lower(self, given: Mapping[str, Given], outputs: Mapping[str, Meta]) -> Sequence[Launch]:
        return of_rows(self, given, outputs)

    def lower_backward_source(
        self, given: Mapping[str, Given], grads: Mapping[str, Meta], multiprocessors: int
    ) -> Sequence[Launch]:
        dy, compute = given["dy"], self.compute_dtype(given)
        assert isinstance(dy, Meta)
        part = Scratch("parts", compute, dy.shape)
        own = self.launch(
            unit_backward, dy.shape[0], x_ptr="x", weight_ptr="weight", norm_ptr="norm", dy_ptr="dy",
            dx_ptr="dx" if "dx" in grads else None, part_ptr=part if "dweight" in grads else None, n=dy.shape[1],
            factor=self.attrs["factor"], COMPUTE=triton_dtype(compute), BLOCK=BLOCK,
        )  # fmt: skip
        values = {"COMPUTE": triton_dtype(compute), "WIDE": False}
        return [own, *([add_up("dweight", "parts", *dy.shape, values)] if "dweight" in grads else [])]


def reference(x: Any, weight: Any, factor: float) -> Any:
    return x / x.norm(dim=-1, keepdim=True) * weight * factor


def tensors(rows: int = 5, n: int = 13, dtype: Any = torch.float64) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, n, generator=generator, dtype=torch.float64)
    weight = torch.randn(n, generator=generator, dtype=torch.float64)
    return x.to(DEVICE, dtype).requires_grad_(), weight.to(DEVICE, dtype).requires_grad_()


def test_it_is_called_like_a_generated_op_with_autograd() -> None:
    x, weight = tensors()
    for factor in (2.0, 3.0):  # a plan for each: numbers stand in it
        y = call(Unit(factor=factor), {"x": x, "weight": weight})
        want = reference(x, weight, factor)
        assert torch.allclose(y, want)
        dy = torch.randn_like(y)
        for needed in ([x], [weight], [x, weight]):
            ours = torch.autograd.grad(y, needed, dy, retain_graph=True)
            theirs = torch.autograd.grad(want, needed, dy, retain_graph=True)
            assert all(torch.allclose(a, b) for a, b in zip(ours, theirs, strict=True))
    with torch.no_grad():
        assert call(Unit(factor=2.0), {"x": x, "weight": weight}).grad_fn is None


def test_it_has_the_whole_contract() -> None:
    x, weight = tensors(dtype=torch.float32)
    y = call(Unit(factor=2.0), {"x": x, "weight": weight})
    host = Host(Unit(factor=2.0), {"x": x.detach(), "weight": weight.detach()})
    assert same_bits(host.forward()[0], y)
    dy = torch.randn_like(y)
    theirs = torch.autograd.grad(y, [x, weight], dy)
    assert all(same_bits(a, b) for a, b in zip(host.backward([dy], ["x", "weight"]), theirs, strict=True))
    op, given = host.op, host.given
    assert op.output_shapes(given) == ((5, 13),) and op.residual_shapes(given) == {
        "x": (5, 13),
        "weight": (13,),
        "norm": (5,),
    }
    assert op.param_shapes({"x": given["x"]}) == {"weight": (13,)} and op.param_init_data() == {"weight": 1}
    assert op.grid(0, given) == (5, 1, 1) and op.block(0, given) == (128, 1, 1)
    assert op.backward_scratch_metas(op.backward_given(given), ["weight"], 2) == {
        "parts": Meta("f32", (5, 13), (13, 1))
    }


def test_the_gradient_of_what_is_absent_is_refused() -> None:
    op, x = Unit(factor=2.0), Meta("f32", (5, 13), (13, 1))
    with pytest.raises(TypeError, match="unit: the gradient of `weight` is needed, which is not given"):
        op.plan_backward({"x": x, "y": x, "dy": x}, ("weight",), 2)


def test_nothing_is_launched_where_nothing_has_elements() -> None:
    x, weight = tensors(0)
    y = call(Unit(factor=2.0), {"x": x, "weight": weight})
    assert (
        y.shape == (0, 13)
        and Unit(factor=2.0).plan_forward(Host(Unit(factor=2.0), {"x": x, "weight": weight}).given).launches == ()
    )


def test_axes_are_checked_as_in_a_generated_op() -> None:
    x, weight = tensors()
    with pytest.raises(ValueError, match="unit: `weight` has an extent of 12 in axis N, `x` has 13"):
        call(Unit(factor=2.0), {"x": x, "weight": weight[1:]})
    with pytest.raises(TypeError, match="unit: `factor` is 'a'; it takes a number"):
        call(Unit(factor="a"), {"x": x, "weight": weight})
    with pytest.raises(TypeError, match="unit: `weight` is missing"):
        call(Unit(factor=1.0), {"x": x, "weight": None})
    with pytest.raises(TypeError, match="unit: `factor` is missing, `scale` is no attr of it"):
        Unit(scale=2.0)


def test_the_example_of_the_page_runs_as_it_stands(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/custom.md").read_text(encoding="utf-8")
    first, second = re.findall(r"^```python\n(.*?)^```", page.partition("`linear`")[0], re.DOTALL | re.MULTILINE)
    (tmp_path / "example.py").write_text(first, encoding="utf-8")  # Triton reads a kernel's source from its file
    spec = importlib.util.spec_from_file_location("example", tmp_path / "example.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    x = torch.arange(32.0, device=DEVICE).reshape(8, 4).T
    known = {**vars(module), "x": x}
    exec(compile(second, "docs/custom.md", "exec"), known)
    assert torch.equal(known["y"], 2 * x) and known["total"].item() == 2 * x.sum().item()
    assert torch.equal(known["dx"], torch.full_like(x, 2.0))
    leaf = x.clone().requires_grad_()
    call(module.Scale(factor=-3.0), {"x": leaf.mT}).sum().backward()
    assert torch.equal(leaf.grad, torch.full_like(x, -3.0))


# ---------------------------------------------------------------------------------------------- operands that are not dense


@triton.jit
def flat(x_ptr, other_ptr, y_ptr, n: tl.int64, BLOCK: tl.constexpr):
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(
        y_ptr + k, tl.load(x_ptr + k, mask=k < n, other=0.0) * tl.load(other_ptr + k, mask=k < n, other=0.0), mask=k < n
    )


class Times(CustomOp):
    """x * other, of one shape, by a kernel that knows of no strides."""

    name = "times"
    inputs = (Tensor("x", "...", broadcast=False), Tensor("other", "...", broadcast=False))
    outputs = (Tensor("y", "...", broadcast=False),)
    gradients = ("x", "other")
    residuals = ("x", "other")

    def lower(self, given: Mapping[str, Given], outputs: Mapping[str, Meta]) -> Sequence[Launch]:
        return [self._product("x", "other", "y", outputs["y"])]

    def lower_backward_source(
        self, given: Mapping[str, Given], grads: Mapping[str, Meta], multiprocessors: int
    ) -> Sequence[Launch]:
        read = {"dx": "other", "dother": "x"}
        return [self._product("dy", read[name], name, meta) for name, meta in grads.items()]

    def _product(self, x: str, other: str, y: str, meta: Meta) -> Launch:
        n = math.prod(meta.shape)
        return self.launch(flat, cdiv(n, BLOCK), x_ptr=x, other_ptr=other, y_ptr=y, n=n, BLOCK=BLOCK)


VIEWS: dict[str, Callable[[Any], Any]] = {
    "dense": lambda t: t,
    "transposed": lambda t: t.mT,
    "sliced": lambda t: t[1:-1, ::2],
    "expanded": lambda t: t[:1].expand(6, 9),
    "one row of many columns": lambda t: t[:, 2:3].mT,
    "five dims": lambda t: t.reshape(2, 3, 3, 3, 1).permute(3, 1, 4, 2, 0),
}


def products(view: Callable[[Any], Any]) -> tuple[Any, Any, Any, Any]:
    """A view and the dense tensor behind it, a dense tensor of its shape, and a cotangent that lies as the view does."""
    generator = torch.Generator().manual_seed(5)
    whole, grad = (torch.randn(6, 9, generator=generator, dtype=torch.float64).to(DEVICE) for _ in range(2))
    x = view(whole.requires_grad_())
    other = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(DEVICE).requires_grad_()
    return whole, x, other, view(grad)


@pytest.mark.parametrize("what", VIEWS)
def test_a_flat_kernel_is_given_dense_memory(what: str) -> None:
    whole, x, other, dy = products(VIEWS[what])
    y = call(Times(), {"x": x, "other": other})
    assert torch.equal(y, x * other)
    for own, want in ((y, x * other), (y.sum(), (x * other).sum())):  # the cotangent of a sum has strides of 0
        cotangent = dy if own.dim() else None
        ours = torch.autograd.grad(own, [whole, other], cotangent, retain_graph=True)
        theirs = torch.autograd.grad(want, [whole, other], cotangent)
        assert all(torch.allclose(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_flat_kernel_is_given_dense_memory_in_a_graph() -> None:
    """A view as an operand, and a view's cotangent; a cotangent that is expanded comes of a sum."""
    x, graph = SymTensor.input("f32", (3, 4))
    w = graph.param("w", (4, 3), "f32", Init("uniform", 1.0))
    v = graph.param("v", (4, 3), "f32", Init("uniform", 1.0))
    own = call(Times(), {"x": x.transpose(0, 1), "other": w})
    again = call(Times(), {"x": own.transpose(0, 1), "other": v.transpose(0, 1)})
    run = graph.lower([generated.sum(again.transpose(0, 1))], input_gradients=[x]).load(DEVICE)
    values = torch.arange(12.0, device=DEVICE).reshape(3, 4).requires_grad_()
    loss = run.forward_train(x=values.detach())
    run.backward()
    leaves = {n: p.detach().clone().requires_grad_() for n, p in run.params.items()}
    want = (values.T * leaves["w"] * leaves["v"]).sum()
    want.backward()
    assert torch.allclose(loss, want)
    assert torch.allclose(run.input_grads["x"], values.grad)
    assert all(torch.allclose(run.grads[n], p.grad) for n, p in leaves.items())


def test_a_plan_of_what_is_not_dense_is_refused_with_the_way_out() -> None:
    """A host of another language copies by itself."""
    turned = Meta("f32", (3, 2), (1, 3))
    given = {"x": turned, "other": Meta("f32", (3, 2), (2, 1))}
    with pytest.raises(ValueError, match=r"times: `x` is of shape \(3, 2\) with strides \(1, 3\); .* `strided = True`"):
        Times().plan_forward(given)

    class Strided(Times):
        strided = True

    assert Strided().plan_forward(given).launches
    dense = Meta("f32", (3, 2), (2, 1))
    with pytest.raises(ValueError, match="times: `dy` is of shape"):
        Times().plan_backward({"x": dense, "other": dense, "y": dense, "dy": turned}, ("x",), 2)


def test_a_buffer_that_is_written_in_place_is_not_copied() -> None:
    class Wide(Counting):
        inputs = (Tensor("x", "N"),)
        buffers = (Tensor("count", "2", init=0),)

    count = torch.zeros(4, device=DEVICE)[::2]
    with pytest.raises(ValueError, match="counting: `count` is of shape .* it is written in place"):
        call(Wide(training="yes"), {"x": torch.ones(2, device=DEVICE)[::2].expand(3), "count": count})


# ---------------------------------------------------------------------------------------------- what is refused

WHOLE: dict[str, Any] = {"x_ptr": "x", "weight_ptr": "weight", "y_ptr": "y", "norm_ptr": "norm", "n": 13, "factor": 1.0,
         "COMPUTE": tl.float32, "BLOCK": BLOCK}  # fmt: skip


def swapped(arguments: Mapping[str, Any], one: str, other: str) -> dict[str, Any]:
    """The same arguments with two of them in each other's place."""
    names = [{one: other, other: one}.get(n, n) for n in arguments]
    return {n: arguments[n] for n in names}


@triton.jit
def unannotated(x_ptr, weight_ptr, y_ptr, norm_ptr, n, factor: tl.float64, COMPUTE: tl.constexpr, BLOCK: tl.constexpr):
    tl.store(y_ptr, n)


@triton.jit
def narrow(
    x_ptr, weight_ptr, y_ptr, norm_ptr, n: tl.int32, factor: tl.float64, COMPUTE: tl.constexpr, BLOCK: tl.constexpr
):
    tl.store(y_ptr, n)


@triton.jit
def put(at, n, BLOCK: tl.constexpr):
    k = tl.arange(0, BLOCK)
    tl.store(at + k, tl.load(at + k, mask=k < n), mask=k < n)


@triton.jit
def through(
    x_ptr, weight_ptr, y_ptr, norm_ptr, n: tl.int64, factor: tl.float64, COMPUTE: tl.constexpr, BLOCK: tl.constexpr
):
    where, other = (weight_ptr, x_ptr) if factor > 0 else (weight_ptr, norm_ptr)
    put(where, n, BLOCK)


@triton.jit
def adding(
    x_ptr, weight_ptr, y_ptr, norm_ptr, n: tl.int64, factor: tl.float64, COMPUTE: tl.constexpr, BLOCK: tl.constexpr
):
    tl.store(norm_ptr, factor)
    for k in range(0, n):
        tl.atomic_add(y_ptr + k, tl.load(x_ptr + k))


REFUSED = {
    "swapped": (unit_forward, swapped(WHOLE, "x_ptr", "weight_ptr"), 1,
                "unit: kernel `unit_forward`: swapped: weight_ptr where the kernel has x_ptr; x_ptr where the kernel has weight_ptr"),
    "missing": (unit_forward, {n: v for n, v in WHOLE.items() if n != "n"}, 1, "unit: kernel `unit_forward`: missing: n; surplus: none"),
    "surplus": (unit_forward, {**WHOLE, "m": 3}, 1, "unit: kernel `unit_forward`: missing: none; surplus: m"),
    "no tensor": (unit_forward, {**WHOLE, "y_ptr": "z"}, 1, "unit: kernel `unit_forward`: `y_ptr`: `z` is no tensor of the op"),
    "an input written": (unit_forward, {**WHOLE, "y_ptr": "x"}, 1, "unit: kernel `unit_forward`: `y_ptr`: it writes `x`, which is not its to write"),
    "input and output swapped": (unit_forward, {**WHOLE, "x_ptr": "y", "y_ptr": "x"}, 1,
                                 "unit: kernel `unit_forward`: `x_ptr`: it reads `y`, which nothing has written before"),
    "written through another kernel": (through, WHOLE, 1, "unit: kernel `through`: `weight_ptr`: it writes `weight`, which is not its to write"),
    "added to": (adding, WHOLE, 1, "unit: kernel `adding`: `y_ptr`: it reads `y`, which nothing has written before"),
    "not written": (unit_forward, {**WHOLE, "norm_ptr": None}, 1, "unit: no launch of `lower` writes `norm`"),
    "not annotated": (unannotated, WHOLE, 1, "unit: kernel unannotated: `n` needs an annotation: tl.int64, tl.float64 or tl.constexpr"),
    "narrow": (narrow, WHOLE, 1, "unit: kernel narrow: `n` needs an annotation"),
    "no number": (unit_forward, {**WHOLE, "n": 1.5}, 1, "unit: kernel `unit_forward`: `n` is 1.5; it takes a whole number"),
    "a truth": (unit_forward, {**WHOLE, "factor": True}, 1, "unit: kernel `unit_forward`: `factor` is True; it takes a number"),
    "no name": (unit_forward, {**WHOLE, "x_ptr": 4096}, 1, "unit: kernel `unit_forward`: `x_ptr` is 4096; it takes the name of a tensor"),
    "scratch": (unit_forward, {**WHOLE, "norm_ptr": Scratch("x", "f32", (3,))}, 1, "unit: the scratch `x` has the name of another tensor"),
    "no program": (unit_forward, WHOLE, 0, "unit: kernel `unit_forward`: a grid of 0"),
    "a scratch of no dtype": (unit_forward, {**WHOLE, "norm_ptr": Scratch("s", "float32", (3,))}, 1,
                              "unit: kernel `unit_forward`: `norm_ptr`: the scratch `s` is of dtype 'float32'; dtypes: f16, bf16, f32"),
    "a scratch of no extents": (unit_forward, {**WHOLE, "norm_ptr": Scratch("s", "f32", 3)}, 1,
                                "unit: kernel `unit_forward`: `norm_ptr`: the scratch `s` is of shape 3; it takes a tuple of extents"),
    "a plain function": (swapped, WHOLE, 1, "unit: kernel `swapped` is no function under `@triton.jit` itself"),
    "a float of programs": (unit_forward, WHOLE, 2.0, "unit: kernel `unit_forward`: a grid of 2.0; it is a whole number, or a tuple of up to three"),
    "no grid": (unit_forward, WHOLE, None, "unit: kernel `unit_forward`: a grid of None; it is a whole number"),
    "a grid of a function": (unit_forward, WHOLE, len, "unit: kernel `unit_forward`: a grid of <built-in function len>; it is a whole number"),
    "a grid of a truth": (unit_forward, WHOLE, True, "unit: kernel `unit_forward`: a grid of True; it is a whole number"),
    "a grid of nothing": (unit_forward, WHOLE, (), "unit: kernel `unit_forward`: a grid of ()"),
    "an odd number of warps": (unit_forward, {**WHOLE, "warps": 3}, 1, "unit: kernel `unit_forward`: `warps` is 3; it takes 1, 2, 4, 8, 16, 32"),
    "no number of warps": (unit_forward, {**WHOLE, "warps": "4"}, 1, "unit: kernel `unit_forward`: `warps` is '4'; it takes a whole number"),
    "stages below none": (unit_forward, {**WHOLE, "stages": -1}, 1, "unit: kernel `unit_forward`: `stages` is -1"),
    "Triton's own word": (unit_forward, {**WHOLE, "num_warps": 8}, 1, "unit: kernel `unit_forward`: `num_warps` is called `warps` here"),
    "too many": (unit_forward, WHOLE, (1, 70000), "unit: kernel `unit_forward`: a grid of (1, 70000)"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_a_launch_that_does_not_fit_is_refused_by_name(what: str) -> None:
    kernel, arguments, grid, text = REFUSED[what]

    class Wrong(Unit):
        def lower(self, given: Mapping[str, Given], outputs: Mapping[str, Meta]) -> Sequence[Launch]:
            return [self.launch(kernel, grid, **arguments)]

    x, weight = tensors()
    with pytest.raises((TypeError, ValueError)) as caught:
        call(Wrong(factor=1.0), {"x": x, "weight": weight})
    assert text in str(caught.value)


@pytest.mark.parametrize("given", [None, "launch", ["launch"], {}], ids=str)
def test_what_is_no_list_of_launches_is_refused(given: Any) -> None:
    class Wrong(Unit):
        def lower(self, given_: Mapping[str, Given], outputs: Mapping[str, Meta]) -> Any:
            return given

    x, weight = tensors()
    with pytest.raises(TypeError, match="unit: `lower` gives .*; it gives a list of launches"):
        call(Wrong(factor=1.0), {"x": x, "weight": weight})


def test_one_launch_is_no_list_of_launches() -> None:
    class Wrong(Unit):
        def lower(self, given: Mapping[str, Given], outputs: Mapping[str, Meta]) -> Any:
            return of_rows(self, given, outputs)[0]

        def lower_backward_source(self, given: Any, grads: Any, multiprocessors: int) -> Any:
            return None

    x, weight = Meta("f64", (5, 13), (13, 1)), Meta("f64", (13,), (1,))
    op, given = Wrong(factor=1.0), {"x": x, "weight": weight}
    with pytest.raises(TypeError, match="unit: `lower` gives Launch.*; it gives a list of launches"):
        op.plan_forward(given)
    with pytest.raises(TypeError, match="unit: `lower_backward_source` gives None; it gives a list of launches"):
        op.plan_backward({**given, "y": x, "norm": Meta("f64", (5,), (1,)), "dy": x}, ("x",), 2)


def test_a_class_is_called_by_an_instance() -> None:
    x, weight = tensors()
    wrong: Any = Unit
    with pytest.raises(TypeError, match=r"unit: `call` was given the class; .*: Unit\(\.\.\.\)"):
        call(wrong, {"x": x, "weight": weight})


def test_a_backward_that_reads_what_is_not_kept_is_refused() -> None:
    class Forgetful(Unit):
        residuals = ("x", "norm")

    x, weight = tensors()
    y = call(Forgetful(factor=1.0), {"x": x, "weight": weight})
    with pytest.raises(TypeError, match="`weight_ptr`: the backward reads `weight`, which is not among the residuals"):
        y.sum().backward()


def test_a_gradient_that_no_launch_writes_is_refused() -> None:
    class Lazy(Unit):
        def lower_backward_source(self, given: Any, grads: Any, multiprocessors: int) -> Sequence[Launch]:
            return super().lower_backward_source(given, {"dx": grads["dx"]}, multiprocessors)

    x, weight = tensors()
    with pytest.raises(TypeError, match="unit: no launch of `lower_backward_source` writes `dweight`"):
        call(Lazy(factor=1.0), {"x": x, "weight": weight}).sum().backward()


@triton.jit
def counting(x_ptr, count_ptr, y_ptr, n: tl.int64):
    k = tl.program_id(0)
    tl.store(y_ptr + k, tl.load(x_ptr + k) + tl.load(count_ptr))
    tl.store(count_ptr, tl.load(count_ptr) + 1)


class Counting(CustomOp):
    """Adds what a buffer counts, which counts on in training."""

    name = "counting"
    inputs = (Tensor("x", "N"),)
    buffers = (Tensor("count", "1", init=0),)
    outputs = (Tensor("y", "N"),)
    kinds = {"training": ("yes", "no")}
    updates = {"count": {"training": ("yes",)}}

    def lower(self, given: Mapping[str, Given], outputs: Mapping[str, Meta]) -> Sequence[Launch]:
        return [self.launch(counting, 1, x_ptr="x", count_ptr="count", y_ptr="y", n=1)]


def test_a_buffer_is_written_where_updates_say_so_and_nowhere_else() -> None:
    x, count = torch.ones(1, device=DEVICE), torch.zeros(1, device=DEVICE)
    assert call(Counting(training="yes"), {"x": x, "count": count}).item() == 1
    assert count.item() == 1 and count._version == 1
    with pytest.raises(
        TypeError,
        match="counting: kernel `counting`: `count_ptr`: it writes the buffer `count`, which `updates` leaves",
    ):
        call(Counting(training="no"), {"x": x, "count": count})

    class Silent(Counting):
        updates = {}

    with pytest.raises(TypeError, match="it writes the buffer `count`, which is not in `updates`"):
        call(Silent(training="yes"), {"x": x, "count": count})


def test_scratch_is_written_before_it_is_read() -> None:
    class Hasty(Unit):
        def lower_backward_source(self, given: Any, grads: Any, multiprocessors: int) -> Sequence[Launch]:
            return super().lower_backward_source(given, grads, multiprocessors)[::-1]

    x, weight = tensors()
    with pytest.raises(
        TypeError, match="kernel `sum_partials`: `part_ptr`: it reads `parts`, which nothing has written before"
    ):
        call(Hasty(factor=1.0), {"x": x, "weight": weight}).sum().backward()


def test_an_op_without_gradients_says_why_it_has_no_backward() -> None:
    op, x = Counting(training="no"), Meta("f32", (1,), (1,))
    assert not op.has_backward
    with pytest.raises(TypeError, match="counting has no backward: it declares no `gradients`"):
        op.plan_backward({"x": x, "y": x, "dy": x}, ("x",), 2)


def test_what_a_kernel_accesses_is_read_off_its_source() -> None:
    assert accesses(counting) == Accesses(frozenset({"count_ptr", "y_ptr"}), frozenset({"x_ptr", "count_ptr"}))
    assert accesses(unit_forward) == Accesses(frozenset({"y_ptr", "norm_ptr"}), frozenset({"x_ptr", "weight_ptr"}))
    assert accesses(through) == Accesses(frozenset({"weight_ptr"}), frozenset({"weight_ptr"}))
    assert accesses(adding) == Accesses(frozenset({"norm_ptr", "y_ptr"}), frozenset({"x_ptr", "y_ptr"}))


def test_what_every_kernel_of_the_package_stores_to_is_what_its_op_writes() -> None:
    """The reading of sources, held to hundreds of kernels whose pointers say by their names what they are."""
    seen = 0
    for name in dir(generated):
        module = importlib.import_module(f"generated.ops.{name}")
        op = next(v for v in vars(module).values() if isinstance(v, type) and v.__module__ == module.__name__)
        given = {t.name for t in op.tensors.fget(op)} - {*op.updates}
        passed = {n for n, _ in getattr(op, "equals", {}).items()}
        for direction, results in (
            ("forward", [t.name for t in op.outputs]),
            ("backward", [f"d{n}" for n in getattr(op, "gradients", ())]),
        ):
            kept = given | (
                {t.name for t in op.outputs} | {f"d{t.name}" for t in op.outputs} if direction == "backward" else set()
            )
            kernels = [
                k for s in getattr(op, direction, ()) for k in (s.kernel, getattr(s, "finish", None)) if k is not None
            ]
            written = set().union(*(accesses(k.function).written for k in kernels))
            assert written.isdisjoint(f"{n}_ptr" for n in kept), (name, direction)
            stems = {p.removesuffix("_ptr").removesuffix("_sum").removesuffix("_part") for p in written}
            assert not kernels or stems >= {*results} - {f"d{n}" for n in passed}, (name, direction)
            seen += len(kernels)
    assert seen > 200


DECLARATIONS: dict[str, tuple[dict[str, Any], str]] = {
    "no outputs": ({"outputs": ()}, "odd: it has no outputs"),
    "no lower": ({"lower": CustomOp.lower}, "odd: it has no `lower`"),
    "no backward": ({"lower_backward_source": CustomOp.lower_backward_source}, "odd: it has gradients, but no `lower_backward_source`"),
    "an unknown gradient": ({"gradients": ("y",)}, "odd: `y` of its gradients is no tensor that it has there"),
    "an update of nothing": ({"updates": {"cuont": {}}}, "odd: `cuont` of its updates is none of its buffers"),
    "an update of an input": ({"updates": {"x": {}}}, "odd: `x` of its updates is none of its buffers"),
    "an unknown choice": (
        {"buffers": (Tensor("count", "N"),), "updates": {"count": {"mode": ("a",)}}},
        "odd: `mode`, under which it updates `count`, is no choice among its kinds",
    ),
    "no comma": ({"inputs": Tensor("x", "B, N")}, "odd: its `inputs` are one Tensor, `x`; they are a tuple: `(Tensor(...),)`"),
    "no tensors": ({"inputs": ("x",)}, "odd: its `inputs` are ('x',); they are a tuple: `(Tensor(...),)`"),
    "no comma behind a gradient": ({"gradients": "x"}, "odd: its `gradients` are 'x'; they are a tuple of names"),
    "an unknown kind": (
        {"kinds": {"factor": "number"}},
        "odd: the kind of `factor` is 'number'; kinds: 'float', 'int', 'bool', with '?' where it may be None, or a tuple of choices",
    ),
    "a type for a kind": (
        {"kinds": {"factor": float}},
        "odd: the kind of `factor` is <class 'float'>; kinds: 'float', 'int', 'bool', with '?' where it may be None, or a tuple of choices",
    ),
    "kinds without kinds": ({"kinds": ("factor",)}, "odd: its `kinds` are ('factor',); they are a dict, by the names of attrs"),
    "two of a name among inputs": ({"inputs": (Tensor("x", "B, N"), Tensor("x", "B, N"))}, "odd: two of its tensors are called `x`"),
    "two of a name": ({"outputs": (Tensor("x", "B, N"),)}, "odd: two of its tensors are called `x`"),
    "the name of a gradient": ({"buffers": (Tensor("dx", "N"),)}, "odd: its tensor `dx` has the name of the gradient of `x`"),
    "the name of a cotangent": ({"buffers": (Tensor("dy", "N"),)}, "odd: its tensor `dy` has the name of the gradient of `y`"),
    "an unknown residual": ({"residuals": ("z",)}, "odd: `z` of its residuals is no tensor that it has there"),
}  # fmt: skip


@pytest.mark.parametrize("what", DECLARATIONS)
def test_a_class_that_is_not_whole_is_refused_when_it_is_made(what: str) -> None:
    members, text = DECLARATIONS[what]
    with pytest.raises(TypeError) as caught:
        type("Odd", (Unit,), {"name": "odd", **members})
    assert str(caught.value) == text


def test_annotations_may_be_values_too() -> None:
    def kernel(a_ptr, n, eps, N):  # type-free: what Triton sees where annotations are not postponed
        return None

    kernel.__annotations__ = {"n": tl.int64, "eps": tl.float64, "N": tl.constexpr}
    made: Callable[[Any], KernelAbi] = KernelAbi.of
    assert [p.role for p in made(SimpleNamespace(fn=kernel)).params] == ["ptr", "i64", "f64", "constexpr"]


@triton.jit
def scaled_forward(x_ptr, w_ptr, y_ptr, n: tl.int64, w: tl.float64, BLOCK: tl.constexpr):
    k = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + k, mask=k < n, other=0.0)
    if w_ptr is None:
        factor = tl.full([1], w, x.dtype)
    else:
        factor = tl.load(w_ptr + k * 0)
    tl.store(y_ptr + k, x * factor, mask=k < n)


class Scaled(CustomOp):
    """x * w, where w may be a number."""

    name = "scaled"
    inputs = (Tensor("x", "N"), Tensor("w", "", scalar=True))
    outputs = (Tensor("y", "N"),)
    gradients = ("x",)
    residuals = ("w",)

    def _times(self, source: str, to: str, given: Mapping[str, Given]) -> list[Launch]:
        w = given["w"]
        number = float(w) if isinstance(w, (int, float)) else 0.0
        x = given["x"]
        assert isinstance(x, Meta)
        return [
            self.launch(
                scaled_forward, 1, x_ptr=source, w_ptr="w" if isinstance(w, Meta) else None, y_ptr=to, n=x.shape[0], w=number, BLOCK=BLOCK
            )
        ]  # fmt: skip

    def lower(self, given: Mapping[str, Given], outputs: Mapping[str, Meta]) -> list[Launch]:
        return self._times("x", "y", given)

    def lower_backward_source(
        self, given: Mapping[str, Given], grads: Mapping[str, Meta], multiprocessors: int
    ) -> list[Launch]:
        return self._times("dy", "dx", given)


def test_a_number_that_a_custom_op_is_given_is_that_of_each_call() -> None:
    """Its launches may have the number among their values: no call may find those of another."""
    op, x = Scaled(), torch.arange(5.0, device=DEVICE).requires_grad_()
    for w in (2.0, 3.0, 4, torch.tensor(5.0, device=DEVICE), 2.0):
        y = call(op, {"x": x, "w": w})
        torch.testing.assert_close(y.detach(), x.detach() * w)
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
        torch.testing.assert_close(dx, torch.ones(5, device=DEVICE) * w)
        with torch.no_grad():
            torch.testing.assert_close(call(op, {"x": x, "w": w}), x * w)
