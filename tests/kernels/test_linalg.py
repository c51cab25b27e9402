"""The hand-written ops against torch in float64: shapes, dtypes, layouts, gradients, and what they compile to."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from generated.runtime.linalg import BatchedMatmul, Embedding, Linear, batched_matmul, embedding, linear  # noqa: E402
from generated.runtime.op import RuntimeOp  # noqa: E402
from generated.runtime.plan import Meta  # noqa: E402
from generated.runtime.testing import DEVICE, TORCH, _close  # noqa: E402
from generated.runtime.views import dense_strides  # noqa: E402
from tests.kernels.test_packed import Host, moved_by_name, same_bits  # noqa: E402

ROOT = Path(__file__).parents[2]
FLOATS = ("f64", "f32", "bf16", "f16")


def values(shape: Sequence[int], dtype: str, layout: str, seed: int) -> Any:
    """Random elements, with the memory in another order, with gaps, or repeated along the first dim."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(shape: Sequence[int]) -> Any:
        return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(DEVICE, TORCH[dtype])

    if layout == "transposed":
        return drawn(tuple(shape)[::-1]).permute(*reversed(range(len(shape))))
    if layout == "sliced":
        return drawn([2 * n + 1 for n in shape])[tuple(slice(1, None, 2) for _ in shape)]
    if layout == "expanded":
        return drawn((1, *shape[1:])).expand(tuple(shape))
    return drawn(shape)


def compared(
    ours: Callable[..., Any], theirs: Callable[..., Any], tensors: Sequence[Any], dtype: str, fixed: Sequence[Any] = ()
) -> None:
    """Results and gradients, against torch on the same numbers in float64; of a seed that has gaps too.

    torch computes on the CPU: on a GPU its own gradient of a lookup reads what is not there where rows have no elements.
    """
    leaves = [t.detach().requires_grad_() for t in tensors]
    exact = [t.detach().double().cpu().requires_grad_() for t in tensors]
    y, want = ours(*fixed, *leaves), theirs(*(t.cpu() for t in fixed), *exact)
    assert y.dtype == leaves[0].dtype
    _close(y.cpu(), want, dtype, sums=True)
    wide = values((*y.shape, 2), dtype, "dense", 9)
    for dy in (wide[..., 0], wide[..., 1].contiguous()):
        found = torch.autograd.grad(y, leaves, dy, retain_graph=True)
        expected = torch.autograd.grad(want, exact, dy.double().cpu(), retain_graph=True)
        for leaf, grad, right in zip(leaves, found, expected, strict=True):
            assert grad.dtype == leaf.dtype
            _close(grad.cpu(), right, dtype, sums=True)


# ---------------------------------------------------------------------------------------------- linear

SIZES = [(1, 1, 1), (3, 17, 129), (129, 3, 17), (17, 129, 1), (0, 3, 5), (3, 0, 5), (3, 5, 0), (0, 0, 3)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "inner", "columns"), SIZES)
def test_linear(rows: int, inner: int, columns: int, dtype: str) -> None:
    shapes = ((rows, inner), (columns, inner), (columns,))
    compared(linear, torch.nn.functional.linear, [values(s, dtype, "dense", k) for k, s in enumerate(shapes)], dtype)


@pytest.mark.parametrize("layouts", itertools.product(["dense", "transposed", "sliced", "expanded"], repeat=2), ids=str)
def test_linear_of_any_strides(layouts: tuple[str, str]) -> None:
    x, weight, bias = (
        values((5, 3, 7), "f64", layouts[0], 0),
        values((6, 7), "f64", layouts[1], 1),
        values((6,), "f64", "sliced", 2),
    )
    compared(linear, torch.nn.functional.linear, [x, weight, bias], "f64")


@pytest.mark.parametrize("lead", [(), (4,), (2, 3), (2, 3, 2), (2, 2, 2, 2, 2)], ids=str)
def test_linear_of_rows_in_any_number_of_dims(lead: tuple[int, ...]) -> None:
    x, weight = values((*lead, 5), "f64", "sliced", 0), values((3, 5), "f64", "dense", 1)
    compared(linear, torch.nn.functional.linear, [x, weight], "f64")


@pytest.mark.parametrize("needed", [n for c in (1, 2, 3) for n in itertools.combinations(range(3), c)], ids=str)
def test_linear_gives_the_gradients_that_are_needed(needed: tuple[int, ...]) -> None:
    shapes = ((4, 5), (3, 5), (3,))
    leaves = [values(s, "f64", "dense", k).requires_grad_(k in needed) for k, s in enumerate(shapes)]
    own = [leaves[k] for k in needed]
    dy = values((4, 3), "f64", "dense", 9)
    ours = torch.autograd.grad(linear(*leaves), own, dy)
    theirs = torch.autograd.grad(torch.nn.functional.linear(*leaves), own, dy)
    assert all(torch.allclose(a, b, rtol=1e-13, atol=1e-13) for a, b in zip(ours, theirs, strict=True))


def test_few_large_sums_are_shared_and_added_up() -> None:
    """dweight and dbias over many rows: several programs have a part of each, and a second kernel adds them up."""
    op = Linear(precision="ieee")
    metas = {n: Meta("f64", s, dense_strides(s)) for n, s in (("x", (300, 5)), ("weight", (3, 5)), ("bias", (3,)))}
    plan = op.plan_backward(op.backward_given(metas), ("weight", "bias"), 4)
    assert [launch.kernel.function.fn.__name__ for launch in plan.launches] == [
        "product_over_rows", "sum_partials", "sum_over_rows", "sum_partials",
    ]  # fmt: skip
    assert set(plan.scratch) == {"dweight_part", "dbias_part"}
    tensors = [values(metas[n].shape, "f64", "dense", k) for k, n in enumerate(metas)]
    compared(linear, torch.nn.functional.linear, tensors, "f64")


def test_a_weight_of_another_dtype_is_multiplied_in_that_of_x() -> None:
    """Master weights: bf16 in, bf16 out, and gradients of float32 for them."""
    x, weight, bias = (
        values((9, 7), "bf16", "dense", 0),
        values((5, 7), "f32", "dense", 1),
        values((5,), "f32", "dense", 2),
    )
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    y = linear(*leaves)
    rounded = weight.detach().bfloat16().double()
    assert y.dtype == torch.bfloat16
    _close(y, torch.nn.functional.linear(x.double(), rounded, bias.double()), "bf16", sums=True)
    dy = values((9, 5), "bf16", "dense", 3)
    dx, dweight, dbias = torch.autograd.grad(y, leaves, dy)
    assert (dx.dtype, dweight.dtype, dbias.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    _close(dweight, dy.double().T @ x.detach().double(), "f32", sums=True)
    _close(dbias, dy.double().sum(0), "f32", sums=True)
    _close(dx, dy.double() @ rounded, "bf16", sums=True)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_gradients_of_linear_numerically(which: int) -> None:
    tensors = [values(s, "f64", "dense", k) for k, s in enumerate(((4, 5), (3, 5), (3,)))]
    seed, step = values((4, 3), "f64", "dense", 7), values(tensors[which].shape, "f64", "dense", 8)

    def moved(h: float) -> Any:
        return (linear(*(t + h * step if k == which else t for k, t in enumerate(tensors))) * seed).sum()

    leaves = [t.clone().requires_grad_() for t in tensors]
    (grad,) = torch.autograd.grad((linear(*leaves) * seed).sum(), [leaves[which]])
    assert math.isclose((grad * step).sum().item(), ((moved(1e-4) - moved(-1e-4)) / 2e-4).item(), rel_tol=1e-8)


# ---------------------------------------------------------------------------------------------- batched matmul


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("rows", "inner", "columns"), [(1, 1, 1), (3, 17, 33), (65, 3, 17), (0, 3, 5), (3, 0, 5), (3, 5, 0)]
)
def test_batched_matmul(rows: int, inner: int, columns: int, dtype: str) -> None:
    shapes = ((2, rows, inner), (2, inner, columns))
    compared(batched_matmul, torch.matmul, [values(s, dtype, "dense", k) for k, s in enumerate(shapes)], dtype)


@pytest.mark.parametrize("layouts", itertools.product(["dense", "transposed", "sliced", "expanded"], repeat=2), ids=str)
def test_batched_matmul_of_any_strides(layouts: tuple[str, str]) -> None:
    a, b = values((2, 3, 4, 5), "f64", layouts[0], 0), values((2, 3, 5, 2), "f64", layouts[1], 1)
    compared(batched_matmul, torch.matmul, [a, b], "f64")


@pytest.mark.parametrize("lead", [(), (0,), (4,), (2, 2, 2)], ids=str)
def test_batched_matmul_of_any_batch(lead: tuple[int, ...]) -> None:
    a, b = values((*lead, 4, 5), "f64", "sliced", 0), values((*lead, 5, 2), "f64", "transposed", 1)
    compared(batched_matmul, torch.matmul, [a, b], "f64")


# ---------------------------------------------------------------------------------------------- embedding


def looked_up(idx: Any, weight: Any) -> Any:
    return torch.nn.functional.embedding(idx, weight)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("shape", "many", "columns"), [((), 1, 1), ((3, 5), 17, 129), ((40,), 3, 5), ((0,), 3, 5), ((3,), 4, 0)], ids=str
)
def test_embedding(shape: tuple[int, ...], many: int, columns: int, dtype: str) -> None:
    idx = torch.randint(0, many, shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    compared(embedding, looked_up, [values((many, columns), dtype, "dense", 2)], dtype, [idx])


@pytest.mark.parametrize("layout", ["transposed", "sliced"])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
def test_embedding_of_any_strides(layout: str, kind: Any) -> None:
    idx = torch.randint(0, 5, (7, 6, 4), generator=torch.Generator().manual_seed(1)).to(DEVICE, kind)
    idx = idx.permute(2, 0, 1) if layout == "transposed" else idx[::2, 1:, ::3]
    compared(embedding, looked_up, [values((5, 6), "f64", layout, 2)], "f64", [idx])


def test_many_tokens_are_shared_and_added_up() -> None:
    idx = torch.randint(0, 9, (1100,), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    op, metas = Embedding(), {"idx": Meta("i64", (1100,), (1,)), "weight": Meta("f64", (9, 3), (3, 1))}
    assert len(op.plan_backward(op.backward_given(metas), ("weight",), 4).launches) == 2
    compared(embedding, looked_up, [values((9, 3), "f64", "dense", 2)], "f64", [idx])


def test_an_index_out_of_range_is_nan_and_has_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    idx, weight = torch.tensor([1, -1, 3, 0], device=DEVICE), values((3, 2), "f32", "dense", 1).requires_grad_()
    y = embedding(idx, weight)
    assert y.isnan().all(dim=1).tolist() == [False, True, True, False]
    (grad,) = torch.autograd.grad(y, weight, torch.ones_like(y))
    assert grad.tolist() == [[1, 1], [1, 1], [0, 0]]
    monkeypatch.setenv("PULLBACK_DEBUG", "1")
    with pytest.raises(IndexError, match=r"embedding: `idx` is -1 at \(1,\); it takes 0 to 2"):
        embedding(idx, weight)


def test_what_is_not_finite_stays_in_its_row() -> None:
    idx, weight = torch.tensor([0, 1, 2, 1], device=DEVICE), torch.ones(3, 2, device=DEVICE, requires_grad=True)
    dy = torch.tensor([[1.0, 1], [math.inf, math.nan], [2, 2], [1, 1]], device=DEVICE)
    (grad,) = torch.autograd.grad(embedding(idx, weight), weight, dy)
    assert grad[0].tolist() == [1, 1] and grad[2].tolist() == [2, 2]
    assert grad[1, 0] == math.inf and grad[1, 1].isnan()


# ---------------------------------------------------------------------------------------------- the contract

OPS: dict[str, tuple[Callable[..., Any], RuntimeOp, dict[str, tuple[int, ...]]]] = {
    "linear": (linear, Linear(precision="ieee"), {"x": (2, 5, 7), "weight": (3, 7), "bias": (3,)}),
    "linear without bias": (linear, Linear(precision="ieee"), {"x": (600, 7), "weight": (3, 7), "bias": ()}),
    "batched_matmul": (batched_matmul, BatchedMatmul(precision="ieee"), {"a": (2, 5, 7), "b": (2, 7, 3)}),
    "embedding": (embedding, Embedding(), {"idx": (4, 300), "weight": (9, 5)}),
}


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_launches_from_a_packed_buffer_give_the_bits_of_the_torch_path(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from generated.runtime.device import Torch

    function, op, shapes = OPS[name]
    monkeypatch.setattr(Torch, "multiprocessors", lambda self, device: 2)
    monkeypatch.setattr(type(op), "ready", {})  # what was planned for another number is not to be found
    given = {
        n: torch.randint(0, 9, s).to(DEVICE) if n == "idx" else values(s, dtype, "dense", k) if s else None
        for k, (n, s) in enumerate(shapes.items())
    }
    needed = [n for n in op.gradients if given[n] is not None]
    leaves = {n: v.detach().requires_grad_(n in needed) if v is not None else None for n, v in given.items()}
    y, host = function(**leaves), Host(op, given)
    assert same_bits(host.forward()[0], y)
    dy = values(y.shape, dtype, "dense", 5)
    theirs = torch.autograd.grad(y, [leaves[n] for n in needed], dy)
    assert all(same_bits(a, b) for a, b in zip(host.backward([dy], needed), theirs, strict=True))


@pytest.mark.parametrize("name", OPS)
def test_no_two_addresses_are_swapped(name: str) -> None:
    _, op, shapes = OPS[name]
    kinds = {n: "i64" if n == "idx" else "f32" for n in shapes}
    moved_by_name(op, {n: Meta(kinds[n], s, dense_strides(s)) for n, s in shapes.items() if s})


def test_shapes_of_params_are_those_that_the_inputs_determine() -> None:
    op = Linear(precision="ieee")
    x, weight = Meta("f32", (2, 5), (5, 1)), Meta("f32", (3, 5), (5, 1))
    assert op.param_shapes({"x": x}) == {"weight": None, "bias": None} and op.param_init_data() == {
        "weight": None,
        "bias": 0,
    }
    assert op.param_shapes({"x": x, "weight": weight}) == {"weight": (3, 5), "bias": (3,)}
    assert op.output_shapes({"x": x, "weight": weight, "bias": None}) == ((2, 3),)


def test_offsets_that_pass_31_bits_are_planned_wide() -> None:
    op, weight = Linear(precision="ieee"), Meta("bf16", (128, 4096), (4096, 1))

    def wide(rows: int) -> bool:
        x = Meta("bf16", (rows, 4096), (4096, 1))
        return bool(op.plan_forward({"x": x, "weight": weight, "bias": None}).launches[0].values["WIDE"])

    assert wide(2**19) and not wide(2**18)


ERRORS = [
    (lambda x: linear(x, x[:, :2]), ValueError, "linear: `weight` has an extent of 2 in axis I, `x` has 3"),
    (lambda x: linear(x, x, x), ValueError, "linear: `bias` has 2 dims, 1 are declared"),
    (lambda x: linear(x, x.int()), TypeError, "linear: `weight` is i32; it takes f16, bf16, f32, f64"),
    (lambda x: linear(x, x, precision="fast"), ValueError, "linear: `precision` is 'fast'; choices: ieee, tf32"),
    (lambda x: linear(x, None), TypeError, "linear: `weight` is missing"),
    (lambda x: batched_matmul(x, x.double()), TypeError, "batched_matmul: `b` is f64, `a` is f32; they are multiplied in one dtype"),
    (lambda x: batched_matmul(x, x[:2]), ValueError, "batched_matmul: `b` has an extent of 2 in axis K, `a` has 3"),
    (lambda x: batched_matmul(x.expand(2, 3, 3), x), ValueError, "batched_matmul: `b` lacks 1 dims that another tensor has"),
    (lambda x: batched_matmul(x.expand(2, 3, 3), x.expand(1, 3, 3)), ValueError, "batched_matmul: `b` has an extent of 1 in dim"),
    (lambda x: embedding(x, x), TypeError, "embedding: `idx` is f32; it takes i32, i64"),
    (lambda x: embedding(x.long(), x[0]), ValueError, "embedding: `weight` has 1 dims, 2 are declared"),
]  # fmt: skip


@pytest.mark.parametrize(("run", "kind", "text"), ERRORS, ids=[e[2][:50] for e in ERRORS])
def test_errors_name_op_and_argument(run: Callable[[Any], Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught:
        run(torch.ones(3, 3, device=DEVICE))
    assert text in str(caught.value)


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_products_compile_for_sm_90_to_tensor_cores(dtype: str) -> None:
    """Of bf16; float32 is multiplied exactly, and on tensor cores only where tf32 is asked for."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).parent / "compile_linalg.py"), "cuda:90", dtype], cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    products = [r for r in rows if r["kernel"] in ("rows_by_matrix", "product_over_rows", "batched_product")]
    assert {r["op"] for r in rows} == {"linear", "batched_matmul", "embedding"} and len(products) == 9
    assert [r["tensor_cores"] for r in products] == [dtype == "bf16"] * 3 + [True] * 3 + [dtype == "bf16"] * 3
    assert all(r["shared"] <= 99 * 1024 for r in rows)


@pytest.mark.parametrize("name", ["x", "weight", "bias"])
def test_offsets_past_two_to_the_31_are_wide(name: str) -> None:
    """Whichever operand has them: nothing is launched, the plan says it."""
    shapes = {"x": (2, 2), "weight": (3, 2), "bias": (3,)}
    given = {n: Meta("f16", s, (2**30,) * len(s) if n == name else dense_strides(s)) for n, s in shapes.items()}
    narrow = {n: Meta("f16", s, dense_strides(s)) for n, s in shapes.items()}
    wide = [Linear(precision="ieee").plan_forward(metas).launches[0].values["WIDE"] for metas in (given, narrow)]
    assert wide == [True, False]
