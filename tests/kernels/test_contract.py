"""What a call does beside the arithmetic: allocations, launches, errors, autograd's contract, C layout."""

from __future__ import annotations

import gc
import importlib
import inspect
import struct
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import generated  # noqa: E402
from generated.runtime.abi import PackedC, Recorder  # noqa: E402
from generated.runtime.op import RuntimeOp  # noqa: E402
from generated.runtime.plan import Launch  # noqa: E402
from generated.runtime.prepared import Prepared  # noqa: E402
from generated.runtime.testing import DEVICE, Case  # noqa: E402
from generated.runtime.views import TensorView  # noqa: E402

ROOT = Path(__file__).parents[2]


def op_class(name: str) -> type[RuntimeOp]:
    module = importlib.import_module(f"generated.ops.{name}")
    return next(
        v
        for v in vars(module).values()
        if isinstance(v, type) and issubclass(v, RuntimeOp) and v.__module__ == module.__name__
    )


OPS = [n for n in sorted(dir(generated)) if op_class(n).outputs]
"""All but steps, which are launched otherwise."""


def case(name: str) -> Case:
    return Case(getattr(generated, name), op_class(name), domains={})


def required(name: str) -> dict[str, float]:
    """A value for each attr that has no default."""
    tensors = {t.public for t in (*op_class(name).inputs, *op_class(name).params, *op_class(name).buffers)}
    parameters = inspect.signature(getattr(generated, name)).parameters
    missing = [n for n, p in parameters.items() if n not in tensors and p.default is inspect.Parameter.empty]
    usual = {"int": -1, "dims": -1, "shape": 3}
    return {
        n: 3 if n in op_class(name).sized.values() else usual.get(str(op_class(name).kinds.get(n)), 0.5)
        for n in missing
    }


class Calls(TorchDispatchMode):
    """Records every torch operation by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func).split(".")[1])
        return func(*args, **(kwargs or {}))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels launched; the launches themselves are left out, for the interpreter copies tensors."""
    names: list[str] = []

    def record(self: Prepared, *_: Any) -> None:
        names.extend(launch.name for launch in self.launches)

    monkeypatch.setattr(Prepared, "_launch", record)
    return names


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("layout", ["matrix", "transposed", "expanded", "row", "outer"])
def test_a_call_allocates_its_outputs_and_launches_each_stage_once(name: str, layout: str, launches: list[str]) -> None:
    one = case(name)
    if layout not in one.layouts:
        layout = "cube"
    given = one.inputs(layout, "f32" if "f32" in one.dtypes else one.usual)
    with torch.no_grad(), Calls() as calls:
        outputs = one.call(given, required(name))
    op = op_class(name)(**one._all_attrs(required(name)))
    stages = [s for s in op.forward if s.runs(op.choices())]
    handed = {t.name for t in op.scratch if any(t.name in s.names for s in stages[1:])}
    assert calls.names == ["empty_strided"] * (len(outputs) + len(handed))
    assert launches == [s.kernel.function.fn.__name__ for s in stages] and launches[0] == f"{name}_forward"
    assert not any(p[0] == "d" and p[1:-4] in {t.name for t in op.outputs} for s in stages for p in s.kernel.abi.names)


@pytest.mark.parametrize("name", [n for n in OPS if op_class(n).gradients])
@pytest.mark.parametrize("layout", ["matrix", "transposed", "row", "outer"])
def test_a_backward_allocates_what_is_needed_and_no_more(name: str, layout: str, launches: list[str]) -> None:
    one = case(name)
    if layout not in one.layouts:
        layout = "cube"
    given = one.inputs(layout, "f32" if "f32" in one.dtypes else one.usual)
    for needed in op_class(name).gradients:
        leaves = {n: v.detach().requires_grad_(n == needed) for n, v in given.items()}
        outputs = one.call(leaves, required(name))
        seeds = [torch.ones_like(y) for y in outputs]
        launches.clear()
        with Calls() as calls:
            (grad,) = torch.autograd.grad(outputs, [leaves[needed]], seeds)
        passed = (
            op_class(name)(**one._all_attrs(required(name))).passes().get(needed) is not None
            and grad.shape == outputs[0].shape
        )
        if passed:
            assert launches == [] and "empty_strided" not in calls.names
        else:
            assert launches[0].startswith(f"{name}_backward") and len(launches) <= 1 + len(op_class(name).backward)
            assert calls.names.count("empty_strided") == len(launches)
        assert set(calls.names) <= {"empty_strided", "detach", "view", "alias"}, calls.names


def test_nothing_is_saved_or_recorded_without_a_gradient() -> None:
    x = torch.ones(3, device=DEVICE)
    assert generated.silu(x).grad_fn is None
    with torch.no_grad():
        assert generated.silu(x.requires_grad_()).grad_fn is None


def test_dropped_outputs_free_their_inputs() -> None:
    """C084: residuals are saved by save_for_backward, so nothing outlives the graph."""
    x = torch.ones(3, device=DEVICE, requires_grad=True)
    y = generated.tanh(x)
    context = weakref.ref(y.grad_fn)
    del y
    gc.collect()
    assert context() is None


def test_a_second_backward_equals_the_first() -> None:
    """C078: neither inputs, nor outputs, nor cotangents are written in place."""
    x = torch.randn(4, 5, device=DEVICE, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(4, 5, device=DEVICE, dtype=torch.float64)
    kept = dy.clone()
    y = generated.gelu(x)
    first = torch.autograd.grad(y, x, dy, retain_graph=True)[0].clone()
    second = torch.autograd.grad(y, x, dy)[0]
    assert torch.equal(first, second) and torch.equal(dy, kept)


def test_the_same_tensor_twice() -> None:
    """C013: maximum(a, a) gives a the whole cotangent."""
    a = torch.randn(7, device=DEVICE, requires_grad=True)
    torch.autograd.backward(generated.maximum(a, a), torch.ones(7, device=DEVICE))
    assert torch.equal(a.grad, torch.ones(7, device=DEVICE))


def test_outputs_never_alias_inputs() -> None:
    x = torch.randn(5, device=DEVICE)
    for y in (generated.clamp(x), generated.add(x, 0.0), generated.relu(x.abs())):
        assert y.data_ptr() != x.data_ptr()


PROMOTIONS = [
    (torch.float16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.float64), (torch.int32, torch.int64),
    (torch.int64, torch.float16), (torch.float16, torch.float16),
]  # fmt: skip


@pytest.mark.parametrize(("left", "right"), PROMOTIONS, ids=str)
@pytest.mark.parametrize("zero_dims", [False, True])
def test_promotion_is_torchs(left: Any, right: Any, zero_dims: bool) -> None:
    """C061: bf16 + f32 is f32, bf16 + a 0-d f32 is bf16, bf16 * 1.5 is bf16."""
    a, b = torch.ones(3, device=DEVICE).to(left), torch.ones(() if zero_dims else (3,), device=DEVICE).to(right)
    assert generated.mul(a, b).dtype == torch.mul(a, b).dtype
    assert generated.mul(a, 1.5).dtype == torch.mul(a, 1.5).dtype
    assert generated.mul(a, 2).dtype == torch.mul(a, 2).dtype


@pytest.mark.parametrize("shape", [(4, 5), (3, 4, 5), (2, 3, 4, 5)])
def test_layouts_are_torchs(shape: tuple[int, ...]) -> None:
    """Permuted inputs give permuted outputs, as TensorIterator has it."""
    x = torch.randn(shape, device=DEVICE)
    other = torch.randn(shape[-1], device=DEVICE)
    for order in (tuple(range(len(shape))), tuple(reversed(range(len(shape)))), (0, *range(2, len(shape)), 1)):
        view = x.permute(order)
        assert generated.silu(view).stride() == torch.nn.functional.silu(view).stride()
        assert generated.add(view, view).stride() == torch.add(view, view).stride()
        if view.shape[-1] == other.shape[0]:
            assert generated.add(view, other).stride() == torch.add(view, other).stride()


def test_many_dims_that_do_not_merge() -> None:
    x = (
        torch.randn(2, 3, 2, 3, 2, 2, device=DEVICE, dtype=torch.float64)
        .permute(4, 0, 3, 1, 5, 2)[:, ::2]
        .requires_grad_()
    )
    y = torch.randn(1, 1, 3, 1, 2, 1, device=DEVICE, dtype=torch.float64).requires_grad_()
    assert torch.allclose(generated.mul(x, y), x * y)
    ours = torch.autograd.grad(generated.mul(x, y).sum(), [x, y])
    theirs = torch.autograd.grad((x * y).sum(), [x, y])
    assert all(torch.allclose(a, b) for a, b in zip(ours, theirs))


def test_many_alternating_dims_of_broadcasting() -> None:
    x = torch.randn(2, 2, 2, 2, 2, 2, device=DEVICE, dtype=torch.float64, requires_grad=True)
    y = torch.randn(1, 2, 1, 2, 1, 2, device=DEVICE, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(2, 2, 2, 2, 2, 2, device=DEVICE, dtype=torch.float64)
    ours = torch.autograd.grad(generated.mul(x, y), [x, y], dy)
    theirs = torch.autograd.grad(x * y, [x, y], dy)
    assert all(torch.allclose(a, b) for a, b in zip(ours, theirs))


@pytest.mark.parametrize("name", ["add", "bias_gelu", "mean2"])
def test_gradients_share_no_storage(name: str) -> None:
    """What autograd adopts may be scaled in place: neither another gradient nor the cotangent may change with it."""
    x, o = (torch.ones(5, device=DEVICE, requires_grad=True) for _ in range(2))
    dy = torch.ones(5, device=DEVICE)
    getattr(generated, name)(x, o).backward(dy)
    assert len({x.grad.data_ptr(), o.grad.data_ptr(), dy.data_ptr()}) == 3


def test_equal_gradients_are_written_once(launches: list[str]) -> None:
    x, o = (torch.ones(4, 5, device=DEVICE, requires_grad=True) for _ in range(2))
    y = generated.bias_gelu(x, o)
    with Calls() as calls:
        dx, do = torch.autograd.grad(y, [x, o], torch.ones_like(y))
    assert calls.names.count("empty_strided") == 1 and dx.data_ptr() == do.data_ptr()
    row = torch.ones(5, device=DEVICE, requires_grad=True)
    dx, do = torch.autograd.grad(generated.bias_gelu(x, row).sum(), [x, row])
    assert dx.shape == (4, 5) and do.shape == (5,)
    (alone,) = torch.autograd.grad(generated.bias_gelu(x, o).sum(), [o])
    assert alone.shape == (4, 5)


@pytest.mark.parametrize("view", ["expanded", "unfolded", "overlapping"])
def test_halves_of_overlapping_inputs(view: str) -> None:
    base = torch.randn(20, device=DEVICE, dtype=torch.float64)
    x = {
        "expanded": base[:1].expand(2, 4), "unfolded": base.unfold(0, 4, 2), "overlapping": base.as_strided((3, 4), (2, 1)),
    }[view].detach().requires_grad_()  # fmt: skip
    dy = torch.randn(x.shape[0], 2, device=DEVICE, dtype=torch.float64)
    ours = torch.autograd.grad(generated.glu(x), x, dy)[0]
    theirs = torch.autograd.grad(torch.nn.functional.glu(x), x, dy)[0]
    assert torch.allclose(ours, theirs)


def test_lazily_negated_views_are_read_as_they_mean() -> None:
    z = torch.tensor([1 + 2j, 3 - 1j], device=DEVICE).conj().imag
    assert torch.equal(generated.neg(z), torch.neg(z)) and torch.equal(generated.add(z, z), z + z)


def test_forward_mode_is_refused() -> None:
    import torch.autograd.forward_ad as forward

    with forward.dual_level(), pytest.raises(RuntimeError, match="exp: kernels give reverse-mode"):
        generated.exp(forward.make_dual(torch.ones(1, device=DEVICE), torch.ones(1, device=DEVICE)))


ERRORS = [
    (lambda x: generated.silu(x.int()), TypeError, "silu: `input` is i32; it takes f16, bf16, f32, f64"),
    (lambda x: generated.swiglu(x, 2.0), TypeError, "swiglu: `up` is a number"),
    (lambda x: generated.swiglu(x, [1.0]), TypeError, "swiglu: `up` is a list"),
    (lambda x: generated.add(x, x[:2]), ValueError, "add: `other` has an extent of 2"),
    (lambda x: generated.gelu(x, approximate="erf"), ValueError, "gelu: `approximate` is 'erf'; choices: none, tanh"),
    (lambda x: generated.glu(x), ValueError, "glu: `input` has an extent of 3"),
    (lambda x: generated.glu(torch.ones(2, 4, device=DEVICE), dim=2), IndexError, "glu: `dim` is 2"),
    (lambda x: generated.clamp(x, x, x), TypeError, "clamp: `min` is tensor("),
    (lambda x: generated.softplus(x, beta=None), TypeError, "softplus: `beta` is None; it takes a number"),
    (lambda x: generated.add(x, x, alpha="a"), TypeError, "add: `alpha` is 'a'; it takes a number"),
    (
        lambda x: generated.glu(torch.ones(2, 4, device=DEVICE), dim=1.5),
        TypeError,
        "glu: `dim` is 1.5; it takes a whole number",
    ),
    (lambda x: generated.add(x.long(), 2**53 + 2), ValueError, "add: `other` is 9007199254740994"),
    (lambda x: generated.mul(x.int(), 2**40), ValueError, "mul: `other` is 1099511627776"),
    (lambda x: generated.add(1.0, 2.0), TypeError, "add: "),
    (
        lambda x: generated.add(x.int(), x.int(), alpha=0.5),
        TypeError,
        "add: `alpha` is 0.5; for integer tensors it must be whole",
    ),
    (lambda x: generated.silu(x.to("meta")), ValueError, "silu: `input` is on meta"),
    (lambda x: generated.add(x, x.to("meta")), ValueError, "add: `other` is on meta, `input` on"),
    (lambda x: generated.silu(x.to_sparse()), TypeError, "silu: `input` is torch.sparse_coo"),
    (lambda x: generated.silu(x.to(torch.complex64)), TypeError, "silu: `input` is torch.complex64"),
]


@pytest.mark.parametrize(("call", "kind", "text"), ERRORS, ids=[e[2][:40] for e in ERRORS])
def test_errors_name_op_and_argument(call: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught:
        call(torch.ones(3, device=DEVICE))
    assert text in str(caught.value)


def test_a_cpu_tensor_outside_the_interpreter_is_told_how_to_run() -> None:
    code = "import torch, generated; generated.silu(torch.ones(3))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "silu: `input` is on the CPU" in done.stderr and "TRITON_INTERPRET=1" in done.stderr


def test_an_op_without_a_derivative_says_so() -> None:
    """C080, C120: never a gradient that is silently missing."""
    x = torch.ones(3, device=DEVICE, requires_grad=True)
    assert not generated.eq(x, x).requires_grad
    assert not op_class("eq").gradients


def test_importing_needs_neither_torch_nor_a_gpu() -> None:
    """C074: on a machine without a driver the package imports and can be asked."""
    code = "import sys; sys.modules['torch'] = None; import generated; from generated.ops.gelu import Gelu; print(Gelu(approximate='tanh').has_backward)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "True", done.stderr


def test_the_packed_layout_is_the_one_written_down() -> None:
    view = TensorView(0x1000, "f32", (4, 8), (1, 4))
    out = TensorView(0x2000, "f32", (4, 8), (8, 1))
    packed, recorder = PackedC(), Recorder()
    op = op_class("add")(alpha=0.25)
    for visitor in (packed, recorder):
        op.pack_args(0, [view, 2.5], [], [], [out], [], [], visitor)
    kinds = {"ptr": "Q", "i64": "q", "f64": "d"}
    values = struct.unpack("<" + "".join(kinds[k] for k, _, _ in recorder.visits), packed.buffer)
    named = {name: value for (_, name, _), value in zip(recorder.visits, values)}
    assert named["x_ptr"] == 0x1000 and named["y_ptr"] == 0x2000 and named["other_ptr"] == 0
    assert named["alpha"] == 0.25 and named["other_number"] == 2.5 and named["n"] == 32


def test_a_launch_over_64_bits_is_planned_wide() -> None:
    """C068: an extent times a stride past 2**31 turns index arithmetic to 64 bits."""
    op = op_class("silu")()
    from generated.runtime.plan import Meta

    def wide(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
        (launch,) = op.plan_forward({"x": Meta("bf16", shape, strides)}).launches
        assert isinstance(launch, Launch)
        return bool(launch.values["WIDE"])

    assert not wide((1024, 4096), (4096, 1))
    assert wide((319, 4), (7_864_320, 2)) and wide((65537, 32768), (32768, 1))
    assert not wide((300, 4), (7_000_000, 2))


def test_double_backward_is_refused_for_every_kind_of_gradient() -> None:
    """C083: a second derivative raises; it is not silently 0."""
    x = torch.ones(3, device=DEVICE, requires_grad=True)
    (grad,) = torch.autograd.grad(generated.silu(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        grad.sum().backward()


@pytest.mark.parametrize("name", ["silu", "add"])
def test_vmap_is_refused_clearly(name: str) -> None:
    x = torch.ones(2, 3, device=DEVICE)
    call = (lambda v: generated.silu(v)) if name == "silu" else (lambda v: generated.add(v, v))
    with pytest.raises(RuntimeError, match=name):
        torch.func.vmap(call)(x)


def test_numbers_are_floats_whatever_the_attrs_are() -> None:
    """Triton makes a constant of an int of 1, and another kernel for each."""
    for name, attrs in (("round", {"decimals": 0}), ("add", {"alpha": 1}), ("celu", {"alpha": 2})):
        numbers = op_class(name)(**attrs).numbers({"x": None, "other": 1})
        assert numbers and all(type(v) is float for v in numbers.values()), (name, numbers)
