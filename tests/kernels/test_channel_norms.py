"""Norms of channels: numerics of the statistics, running statistics in place, absent weights, memory that is turned.

The numbers in the docstrings name the cases.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import generated  # noqa: E402
from generated.runtime.testing import DEVICE, TORCH  # noqa: E402

F = torch.nn.functional
SHAPES = [(4, 6), (4, 6, 5), (3, 6, 5, 4), (2, 6, 2, 3, 2)]
DTYPES = {"f64": 1e-12, "f32": 2e-5, "bf16": 4e-2, "f16": 4e-3}


def drawn(shape: tuple[int, ...], dtype: str = "f64", seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(
        DEVICE, TORCH[dtype]
    )


def near(got: Any, want: Any, tolerance: float = 1e-12) -> bool:
    return torch.allclose(got.double(), want.double(), rtol=tolerance, atol=tolerance)


def both(ours: Any, theirs: Any, tensors: list[Any], dy: Any, tolerance: float = 1e-12) -> None:
    """Values and every gradient of two functions of the same tensors; theirs in float64."""
    leaves = [v if v is None else v.detach().requires_grad_() for v in tensors]
    exact = [v if v is None else v.detach().double().contiguous().requires_grad_() for v in tensors]
    y, want = ours(*leaves), theirs(*exact)
    assert y.shape == want.shape and y.dtype == leaves[0].dtype and near(y, want, tolerance)
    there = [k for k, v in enumerate(tensors) if v is not None]
    found = torch.autograd.grad(y, [leaves[k] for k in there], dy)
    right = torch.autograd.grad(want, [exact[k] for k in there], dy.double())
    for k, got, grad in zip(there, found, right):
        assert got.dtype == leaves[k].dtype and near(got, grad, tolerance * (1 if k == 0 else 8)), k


def params(count: int, weighted: bool, biased: bool, dtype: str = "f64") -> list[Any]:
    return [drawn((count,), dtype, 1).abs() + 0.5 if weighted else None, drawn((count,), dtype, 2) if biased else None]


PRESENT = list(itertools.product((True, False), repeat=2))


# ---------------------------------------------------------------------------------------------- of a batch


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("weighted", "biased"), PRESENT)
@pytest.mark.parametrize("training", [True, False])
def test_batches_of_any_rank(shape: tuple[int, ...], weighted: bool, biased: bool, training: bool) -> None:
    """Training and inference, with weight and bias and without, in dense memory and channels last."""
    # On a GPU torch has no gradient of a bias without a weight.
    ones = torch.ones(6, dtype=torch.float64, device=DEVICE)
    mean, var = drawn((6,), seed=3), drawn((6,), seed=4).abs() + 0.1
    for view in (
        lambda v: v,
        lambda v: v.movedim(1, -1).contiguous().movedim(-1, 1),
        lambda v: torch.cat([v, v])[1 : 1 + len(v)],
    ):
        both(
            lambda x, w, b: generated.batch_norm(x, mean.clone(), var.clone(), w, b, training),
            lambda x, w, b: F.batch_norm(x, mean.clone(), var.clone(), ones if w is None else w, b, training),
            [view(drawn(shape)), *params(6, weighted, biased)], view(drawn(shape, seed=9)),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [("bf16", "f32"), ("f16", "f32"), ("f16", "f64"), ("bf16", "f64"), ("f32", "f64"), ("f64", "f32"), ("f64", "bf16")],
)
@pytest.mark.parametrize("training", [True, False])
def test_buffers_of_another_dtype(dtype: str, kind: str, training: bool) -> None:
    """C062: activations in half precision, statistics in float32 or float64: each keeps its own dtype."""
    x, (weight, bias) = drawn((7, 5, 9), dtype), params(5, True, True, dtype)
    ours = [torch.stack([v, v], 1)[:, 1] for v in (drawn((5,), kind, 3), drawn((5,), kind, 4).abs())]  # with strides
    theirs = [v.double() for v in ours]
    both(
        lambda x, w, b: generated.batch_norm(x, *ours, w, b, training, 0.3),
        lambda x, w, b: F.batch_norm(x, *theirs, w, b, training, 0.3),
        [x, weight, bias], drawn((7, 5, 9), dtype, 9), DTYPES[dtype],
    )  # fmt: skip
    for got, want in zip(ours, theirs):
        assert got.dtype == TORCH[kind] and near(got, want, 8e-3 if kind == "bf16" else 1e-5)


@pytest.mark.parametrize("momentum", [0.1, 0.0, 1.0, 0.37])
def test_running_statistics_after_three_steps(momentum: float) -> None:
    """They move by the momentum, the variance unbiased, in place and where autograd sees it; in inference nothing moves."""
    ours = [drawn((4,), seed=3), drawn((4,), seed=4).abs()]
    theirs = [v.clone() for v in ours]
    memory, versions = [v.data_ptr() for v in ours], [v._version for v in ours]
    for step in range(3):
        x = drawn((3, 4, 5), seed=step) * (step + 1) + step
        for wanting in (False, True):
            y = generated.batch_norm(x.detach().requires_grad_(wanting), *ours, training=True, momentum=momentum)
            want = F.batch_norm(x, *theirs, training=True, momentum=momentum)
            assert near(y.detach(), want) and all(near(a, b) for a, b in zip(ours, theirs))
    assert [v.data_ptr() for v in ours] == memory
    assert [v._version for v in ours] == [n + 6 for n in versions]
    kept = [v.clone() for v in ours]
    generated.batch_norm(drawn((3, 4, 5)).requires_grad_(), *ours, training=False, momentum=momentum).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(ours, kept)) and [v._version for v in ours] == [
        n + 6 for n in versions
    ]


def test_strided_buffers_are_written_where_they_are() -> None:
    """Each a column of one tensor, with memory beside it that nothing may touch."""
    table = torch.full((4, 3), 7.0, device=DEVICE, dtype=torch.float64)
    table[:, 0], table[:, 2] = 0.0, 1.0
    theirs = [torch.zeros(4, device=DEVICE).double(), torch.ones(4, device=DEVICE).double()]
    x = drawn((3, 4, 5))
    generated.batch_norm(x, table[:, 0], table[:, 2], training=True)
    F.batch_norm(x, *theirs, training=True)
    assert near(table[:, 0], theirs[0]) and near(table[:, 2], theirs[1]) and (table[:, 1] == 7).all()


@pytest.mark.parametrize("training", [True, False])
def test_a_backward_after_the_buffers_have_moved_on(training: bool) -> None:
    """In training the backward reads what its own forward kept, whatever later steps do to the buffers; by running statistics it
    reads the buffers themselves, and one that has changed is an error, as in torch."""
    mean, var = drawn((4,), seed=3), drawn((4,), seed=4).abs() + 0.1
    (x, dy), (w, b) = (drawn((3, 4, 5), seed=s) for s in (0, 9)), (drawn((4,), seed=5), drawn((4,), seed=6))
    leaves = [v.detach().requires_grad_() for v in (x, w, b)]
    exact = [v.detach().requires_grad_() for v in (x, w, b)]
    want = torch.autograd.grad(F.batch_norm(exact[0], mean.clone(), var.clone(), *exact[1:], training), exact, dy)
    y = generated.batch_norm(leaves[0], mean, var, *leaves[1:], training)
    for step in range(2):
        generated.batch_norm(drawn((3, 4, 5), seed=20 + step) * 5, mean, var, training=True)
    mean.fill_(100.0)
    if training:
        assert all(near(a, b) for a, b in zip(torch.autograd.grad(y, leaves, dy), want))
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(y, leaves, dy)


@pytest.mark.parametrize("shape", [(1, 4), (1, 4, 1)], ids=str)
def test_one_value_has_no_variance(shape: tuple[int, ...]) -> None:
    """An error in training that names the op, nothing written; by running statistics it is a value like any other."""
    mean, var = torch.zeros(4, device=DEVICE), torch.ones(4, device=DEVICE)
    with pytest.raises(ValueError, match=r"batch_norm requires \(size"):
        generated.batch_norm(torch.ones(shape, device=DEVICE), mean, var, training=True)
    assert not mean.any() and (var == 1).all()
    x = torch.full(shape, 3.0, device=DEVICE)
    assert near(generated.batch_norm(x, mean, var), F.batch_norm(x, mean, var), 1e-5)


# ---------------------------------------------------------------------------------------------- of groups


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("groups", [1, 2, 3, 6])
@pytest.mark.parametrize(("weighted", "biased"), PRESENT)
def test_groups_of_any_number(shape: tuple[int, ...], groups: int, weighted: bool, biased: bool) -> None:
    """Of one channel and of all; in dense memory, channels last and transposed, with a cotangent of another layout."""
    for view in (lambda v: v, lambda v: v.movedim(1, -1).contiguous().movedim(-1, 1), lambda v: v.mT.contiguous().mT):
        both(
            lambda x, w, b: generated.group_norm(x, groups, w, b), lambda x, w, b: F.group_norm(x, groups, x.new_ones(x.shape[1]) if w is None else w, b),
            [view(drawn(shape)), *params(6, weighted, biased)], drawn(shape, seed=9), 1e-11 if shape[2:] or groups < 6 else 1e-7,
        )  # fmt: skip


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_groups_in_each_dtype(dtype: str) -> None:
    both(
        lambda x, w, b: generated.group_norm(x, 2, w, b), lambda x, w, b: F.group_norm(x, 2, w, b),
        [drawn((5, 6, 7), dtype), *params(6, True, True, dtype)], drawn((5, 6, 7), dtype, 9), DTYPES[dtype],
    )  # fmt: skip


@pytest.mark.parametrize("strides", [(3, 1), (1, 1), (0, 1), (1, 0), (5, 2)], ids=str)
@pytest.mark.parametrize("groups", [2, 3, 4, 12])
def test_groups_whose_memory_overlaps(strides: tuple[int, int], groups: int) -> None:
    """Rows that share elements: in the order of memory the batch lies between a group and its channels."""
    both(
        lambda x, w, b: generated.group_norm(x, groups, w, b), lambda x, w, b: F.group_norm(x, groups, x.new_ones(x.shape[1]) if w is None else w, b),
        [drawn((60,)).as_strided((4, 12), strides), *params(12, True, True)], drawn((4, 12), seed=9), 1e-6,
    )  # fmt: skip


def test_groups_that_do_not_divide_the_channels() -> None:
    for groups in (4, 7, 0, -1):
        with pytest.raises(ValueError, match="group_norm"):
            generated.group_norm(torch.ones(2, 6, 3, device=DEVICE), groups)


# ---------------------------------------------------------------------------------------------- numerics


def normed(x: Any, name: str) -> Any:
    """[groups, elements] normalised along each row."""
    if name == "batch_norm":
        zero, one = torch.zeros(len(x), device=DEVICE), torch.ones(len(x), device=DEVICE)
        return generated.batch_norm(x.t().contiguous(), zero, one, training=True).t()
    return generated.group_norm(x[None], len(x))[0] if name == "group_norm" else generated.layer_norm(x, x.shape[-1:])


NORMS = ["batch_norm", "group_norm", "layer_norm"]


@pytest.mark.parametrize("name", NORMS)
def test_far_from_zero(name: str) -> None:
    """C028: four numbers about 80000: the mean of squares less the square of the mean would be -512."""
    y = normed(torch.tensor([[80000.0, 80001, 80002, 80003]] * 2, device=DEVICE), name)
    right = torch.tensor([-1.3416, -0.4472, 0.4472, 1.3416], device=DEVICE).expand(2, 4)
    assert torch.allclose(y, right, atol=1e-4)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("width", [2, 3, 17, 127, 256])
def test_constant_rows(name: str, width: int) -> None:
    """C028, C029: 0 exactly, and gradients without NaN, whatever lanes of a tile do not exist."""
    for value in (1234.0, 0.1, 0.0):
        x = torch.full((2, width), value, device=DEVICE, requires_grad=True)
        y = normed(x, name)
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
        exact = value != 0.1  # whose sum is none
        assert y.abs().max() <= (0 if exact else 1e-4) and dx.isfinite().all()


@pytest.mark.parametrize("name", ["batch_norm", "group_norm"])
def test_gradients_of_weights_are_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """C041: ten runs, every second in memory full of NaN."""
    x, dy = drawn((65, 4, 21), "f32").requires_grad_(), drawn((65, 4, 21), "f32", 9)
    w, b = (v.requires_grad_() for v in params(4, True, True, "f32"))
    buffers = [torch.zeros(4, device=DEVICE), torch.ones(4, device=DEVICE)]
    y = generated.batch_norm(x, *buffers, w, b, True) if name == "batch_norm" else generated.group_norm(x, 2, w, b)
    found = []
    for run in range(10):
        monkeypatch.setenv("PULLBACK_DEBUG", str(run % 2))
        found.append(torch.autograd.grad(y, [x, w, b], dy, retain_graph=True))
    assert all(torch.equal(p, q) for other in found[1:] for p, q in zip(found[0], other))


@pytest.mark.parametrize("name", ["batch_norm", "group_norm"])
def test_a_nan_stays_in_its_group(name: str) -> None:
    """The channel, or the group of one example, is NaN; no bit of another changes."""
    buffers = [torch.zeros(6, device=DEVICE), torch.ones(6, device=DEVICE)]
    clean = drawn((3, 6, 5), "f32")
    stained = clean.clone()
    stained[1, 2, 3] = torch.nan
    results = []
    for x in (clean, stained):
        leaf = x.requires_grad_()
        y = (
            generated.batch_norm(leaf, *buffers, training=True)
            if name == "batch_norm"
            else generated.group_norm(leaf, 3)
        )
        results.append([y.detach(), *torch.autograd.grad(y, leaf, drawn((3, 6, 5), "f32", 9))])
    bad = torch.zeros(3, 6, 5, device=DEVICE, dtype=torch.bool)
    bad[:, 2] = name == "batch_norm"
    bad[1, 2:4] |= name == "group_norm"
    for plain, found in zip(*results):
        assert torch.equal(found[~bad], plain[~bad]) and found[bad].isnan().all()
