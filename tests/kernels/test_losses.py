"""Losses: every reduction, shapes and layouts, classes that are ignored, peaked or out of range, sums of many programs.

The numbers in the docstrings name the cases.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import generated  # noqa: E402
from generated.runtime import rowwise  # noqa: E402
from generated.runtime.testing import DEVICE, TORCH  # noqa: E402
from tests.kernels import test_rows as rows  # noqa: E402

op_class, case, tensors, attrs_of = rows.op_class, rows.case, rows.tensors, rows.attrs_of
NAN, INF = math.nan, math.inf
LOSSES = [n for n in rows.ROWS if "reduction" in op_class(n).kinds]
STRETCHING = [n for n in LOSSES if all(t.broadcast for t in tensors(n))]
CLASSES = [n for n in LOSSES if any(t.unless == "ignore_index" for t in tensors(n))]


def reductions(name: str) -> tuple[str, ...]:
    kind = op_class(name).kinds["reduction"]
    assert isinstance(kind, tuple)
    return kind


def seeds(outputs: list[Any]) -> list[Any]:
    """A cotangent for each element; of a mean or sum one number, which is no power of two."""
    return [y.new_tensor(1.375 * SCALE[0]) if y.dim() == 0 else v for y, v in zip(outputs, rows.cotangents(outputs))]


SCALE = [1.0]
"""What a mean's cotangent is multiplied by, so that gradients are of one size whatever is averaged."""


def agree(name: str, given: dict[str, Any], attrs: dict[str, Any], dtype: str = "f32", **more: Any) -> None:
    """Against torch in float64 of the same numbers, a mean's gradient as it were a sum's."""
    count = max(v.numel() for v in given.values() if v is not None)
    mean = attrs["reduction"] in ("mean", "batchmean") and dtype in ("f32", "f64", "bf16")
    SCALE[0] = float(count) if mean else 1.0
    try:
        rows.agree(name, given, attrs, dtype, **{"seeds": seeds, **more})
    finally:
        SCALE[0] = 1.0


def each(name: str) -> list[dict[str, Any]]:
    """The attrs with each reduction."""
    return [{**attrs_of(name), "reduction": r} for r in reductions(name)]


# ---------------------------------------------------------------------------------------------- every loss


SHAPES = [(1,), (2,), (5, 1), (5, 2), (5, 3), (3, 127), (2, 129), (257, 3), (1, 4097)]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum", "batchmean"])
def test_values_and_gradients(name: str, reduction: str) -> None:
    """Each reduction, one row and many, one element a row and more than a tile has."""
    if reduction in reductions(name):
        for shape in SHAPES:
            agree(name, rows.filled(name, shape), {**attrs_of(name), "reduction": reduction})


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", ["f64", "f16", "bf16"])
def test_dtypes(name: str, dtype: str) -> None:
    """One rounding at the store; integers beside floats of any kind."""
    for attrs in each(name):
        agree(name, rows.filled(name, (4, 37), dtype), attrs, dtype)


@pytest.mark.parametrize("name", LOSSES)
def test_layouts(name: str) -> None:
    """Transposed, sliced, every second element, operands of different layouts; the cotangent repeated or one value a row."""
    given = rows.filled(name, (4, 5, 6))
    views = {n: list(rows.layouts(v)) if v.dim() else [v] * 5 for n, v in given.items()}
    for turn, attrs in zip(range(5), itertools.cycle(each(name))):
        agree(name, {n: v[(turn + 2 * k) % 5] for k, (n, v) in enumerate(views.items())}, attrs)
        agree(name, {n: v[turn] for n, v in views.items()}, {**attrs, "reduction": "none"}, seeds=rows.stretched)


@pytest.mark.parametrize("name", LOSSES)
def test_only_what_is_needed(name: str) -> None:
    """Every subset of the gradients, with each reduction, equals what all of them together give."""
    given, gradients = rows.filled(name, (3, 7)), op_class(name).gradients
    for attrs in each(name):
        whole = {k: got for k, got, _ in rows.pair(name, given, attrs, seeds)}
        for needed in (c for n in range(len(gradients)) for c in itertools.combinations(gradients, n)):
            found = {k: got for k, got, _ in rows.pair(name, given, attrs, seeds, needed)}
            assert {k[1:] for k in found if k[0] == "d"} == set(needed)
            assert all(torch.equal(v, whole[k]) for k, v in found.items())


@pytest.mark.parametrize("name", LOSSES)
def test_nothing_to_reduce(name: str) -> None:
    """C054: of no element the mean is NaN, the sum 0, and the gradient empty."""
    for shape in ((0, 3), (0,) if name in STRETCHING else (0, 1), (2, 0, 3)):
        for attrs in each(name):
            agree(name, rows.filled(name, shape), attrs)


@pytest.mark.parametrize("name", LOSSES)
def test_many_programs_and_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """C041: a few thousand rows and one long row: sums of several programs, the same bits over ten runs, in memory full of NaN
    every second time; where programs run one after the other, over two."""
    attrs = {**attrs_of(name), "reduction": "mean"}
    for shape, runs in (((3001, 2), 10 if torch.device(DEVICE).type == "cuda" else 2), ((1, 100_003), 2)):
        given = rows.filled(name, shape)
        agree(name, given, attrs)
        found = []
        for run in range(runs):
            monkeypatch.setenv("PULLBACK_DEBUG", str(run % 2))
            found.append(once(name, given, attrs))
        monkeypatch.setenv("PULLBACK_DEBUG", "0")
        assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def once(name: str, given: dict[str, Any], attrs: dict[str, Any]) -> list[Any]:
    """The outputs and the gradients."""
    names = case(name)._differentiable(given)
    leaves = {n: v.detach().requires_grad_(n in names) for n, v in given.items()}
    outputs = list(rows.call(name, leaves, attrs))
    return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, [leaves[n] for n in names], seeds(outputs))]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_one_bad_element(name: str, bad: float) -> None:
    """C016: a NaN reaches the mean and the sum; of no reduction, and in the gradient, rows beside it keep their bits."""
    clean = rows.filled(name, (5, 6))
    key = tensors(name)[0].name
    stained = {**clean, key: clean[key].clone()}
    stained[key][2, slice(None) if name in CLASSES else 3] = bad  # whatever class is the target
    others = torch.arange(5, device=DEVICE) != 2
    for attrs in each(name):
        plain, found = (once(name, v, attrs) for v in (clean, stained))
        if attrs["reduction"] != "none":
            assert not math.isnan(bad) or found[0].isnan()
            continue
        assert not math.isnan(bad) or found[0][2].isnan().any()
        assert all(torch.equal(a[others], b[others]) for a, b in zip(found, plain) if a.shape[:1] == (5,))


BROADCASTS = [((4, 1), (1, 6)), ((6,), (4, 6)), ((4, 6), (6,)), ((), (4, 6)), ((4, 6), ()), ((2, 1, 3, 4), (2, 1, 3, 1)),
              ((300, 3), (3,))]  # fmt: skip


@pytest.mark.parametrize("name", STRETCHING)
@pytest.mark.parametrize("shapes", BROADCASTS, ids=str)
def test_operands_that_stretch(name: str, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """C050: the gradient of what was broadcast is the sum over what it was stretched along, with each reduction."""
    given = {}
    for k, t in enumerate(tensors(name)):
        given[t.name] = rows.filled(name, shapes[k % 2], seed=k)[t.name]
    for attrs in each(name):
        agree(name, given, attrs)


# ---------------------------------------------------------------------------------------------- losses of classes


def logits(name: str, shape: tuple[int, ...], dtype: str = "f32", seed: int = 0) -> Any:
    """Of a loss that takes log-probabilities, these."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2
    return (torch.log_softmax(x, 1) if name == "nll_loss" else x).to(DEVICE, TORCH[dtype])


def whole(values: Any, dtype: Any = torch.int64) -> Any:
    return torch.tensor(values, device=DEVICE, dtype=dtype)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize(
    "shape", [(3, 5), (2, 5, 4), (2, 5, 3, 4), (0, 5), (2, 5, 0), (1, 1), (3, 1, 2), (4, 130)], ids=str
)
def test_classes_at_the_second_dim(name: str, shape: tuple[int, ...]) -> None:
    """Whatever dims follow, and in channels-last memory; targets of 32 and 64 bits, some ignored; with weights and without."""
    x, target = logits(name, shape), torch.randint(0, shape[1], (shape[0], *shape[2:]), device=DEVICE)
    weight = torch.rand(shape[1], device=DEVICE) + 0.5
    target = torch.where(torch.rand(target.shape, device=DEVICE) < 0.3, -100, target)
    for view in (x, x.movedim(1, -1).contiguous().movedim(-1, 1), torch.cat([x, x], 1)[:, : shape[1]]):
        for attrs, kind in zip(each(name), itertools.cycle((torch.int32, torch.int64))):
            for w in (weight, None):
                given = {"x": view, "target": target.to(kind), "weight": w}
                agree(name, given, attrs)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("ignored", [-100, 1, 7, -1])
def test_every_target_is_ignored(name: str, ignored: int) -> None:
    """C037: the mean is NaN and its gradient 0, the sum and each loss 0, wherever the ignored index lies."""
    x = logits(name, (4, 3)).requires_grad_()
    target = torch.full((4,), ignored, device=DEVICE)
    for reduction in reductions(name):
        y = getattr(generated, name)(x, target, ignore_index=ignored, reduction=reduction)
        (dx,) = torch.autograd.grad(y, x, torch.full_like(y, 2.0))
        assert y.isnan() if reduction == "mean" else not y.any()
        assert not dx.any() and not dx.isnan().any()


@pytest.mark.parametrize("name", CLASSES)
def test_an_ignored_class_among_the_others(name: str) -> None:
    """One inside the range of classes counts nothing, and has a probability like any other."""
    x, target = logits(name, (5, 4)), whole([0, 1, 2, 1, 3])
    for ignored, attrs in itertools.product((1, 2, -7, 4), each(name)):
        agree(name, {"x": x, "target": target, "weight": None}, {**attrs, "ignore_index": ignored})
        agree(name, {"x": x, "target": target, "weight": tensor_of_weights(4)}, {**attrs, "ignore_index": ignored})


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("ignored", [2**24, -(2**24), 2**31 - 2, 2**40, -(2**63)])
def test_an_ignored_class_that_float32_does_not_hold(name: str, ignored: int, kind: Any) -> None:
    """Whole numbers are compared as such: one more than it is another class, and none that exists."""
    beside = [v for v in (ignored + 1, ignored - 1) if -(2**31) <= v < 2**31 or kind is torch.int64 and -(2**63) <= v]
    there = [ignored] if kind is torch.int64 or -(2**31) <= ignored < 2**31 else []
    target = whole([1, *there, *beside], kind)
    x = logits(name, (len(target), 3))
    y = getattr(generated, name)(x, target, ignore_index=ignored, reduction="none")
    assert y[0].isfinite() and not y[1 : 1 + len(there)].any() and y[1 + len(there) :].isnan().all()
    with pytest.raises(ValueError, match="`ignore_index` is 9007199254740993; it travels in float64"):
        getattr(generated, name)(x, target, ignore_index=2**53 + 1)


def tensor_of_weights(count: int) -> Any:
    return torch.linspace(0.5, 2.0, count, device=DEVICE)


OPTIONS = [
    {"label_smoothing": 0.1}, {"label_smoothing": 1.0}, {"z_loss": 1e-2}, {"softcap": 3.0},
    {"label_smoothing": 0.25, "z_loss": 0.1, "softcap": 2.0},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_smoothing_z_loss_and_softcap(options: dict[str, float]) -> None:
    """Each alone and all of them, with weights and without, some targets ignored, in one tile and over several."""
    for shape in ((5, 7), (2, 6, 3), (2, rows.WHOLE + 5)):
        target = torch.randint(0, shape[1], (shape[0], *shape[2:]), device=DEVICE)
        target[0] = -100
        for weight, attrs in itertools.product(
            (None, tensor_of_weights(shape[1])), each("cross_entropy")[: 3 if shape[1] < 9 else 2]
        ):
            agree("cross_entropy", {"x": logits("", shape), "target": target, "weight": weight}, {**attrs, **options})


def test_the_gradient_of_each_row_is_scaled_by_its_own_cotangent() -> None:
    """C038: without a reduction and with a cotangent other than 1."""
    x = torch.tensor([[1.0, 2, 3], [1, 2, 3]], device=DEVICE, requires_grad=True)
    y = generated.cross_entropy(x, whole([2, 0]), reduction="none")
    (dx,) = torch.autograd.grad(y, x, torch.tensor([2.0, 3.0], device=DEVICE))
    right = torch.tensor([[0.1801, 0.4895, -0.6695], [-2.7299, 0.7342, 1.9957]], device=DEVICE)
    assert torch.allclose(dx, right, atol=1e-4)
    half = x.detach().bfloat16().requires_grad_()
    (dh,) = torch.autograd.grad(generated.cross_entropy(half, whole([2, 0])) * 0.1, half)
    (ds,) = torch.autograd.grad(generated.cross_entropy(x, whole([2, 0])) * 0.1, x)
    assert torch.allclose(dh.float(), ds, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(("classes", "low"), [(5, -20.0), (129920, -20.0), (129920, -1e4)])
def test_padding_has_no_probability(classes: int, low: float) -> None:
    """C030: one class far above the others: columns beyond the last would take most of the sum."""
    x = torch.full((2, classes), low, device=DEVICE, dtype=torch.float32)
    x[0, 3], x[1, classes - 1] = low + 18, low + 18
    for target in (whole([3, classes - 1]), whole([0, 1])):
        agree(
            "cross_entropy",
            {"x": x, "target": target, "weight": None},
            {**attrs_of("cross_entropy"), "reduction": "none"},
        )
        agree(
            "cross_entropy_soft",
            {"x": x[:, :999], "target": torch.softmax(x[:, :999], 1), "weight": None},
            {**attrs_of("cross_entropy_soft"), "reduction": "none"},
        )


def test_logits_far_from_zero() -> None:
    """C033: of +-1e4, and of minus infinity, which is a class without a chance."""
    x = torch.tensor([[1e4, -1e4, 0.0, 9.999e3], [-1e4, -1e4, -1e4, -1e4], [-INF, 0.0, 1.0, -INF]], device=DEVICE)
    target = whole([3, 0, 2])
    for reduction in ("none", "mean", "sum"):
        agree(
            "cross_entropy",
            {"x": x, "target": target, "weight": None},
            {**attrs_of("cross_entropy"), "reduction": reduction},
        )
    leaf = x.requires_grad_()
    y = generated.cross_entropy(leaf, whole([3, 0, 0]), reduction="none")
    assert y[2].item() == INF and y[:2].isfinite().all()
    (dx,) = torch.autograd.grad(y, leaf, torch.ones(3, device=DEVICE))
    assert not dx.isnan().any() and dx[2].tolist()[0] == -1


INDEXED = [n for n in LOSSES if any(t.indexes for t in tensors(n))]
"""Losses that take one element a row by an index."""


def indices(name: str) -> Any:
    return next(t for t in tensors(name) if t.indexes)


def walled(value: Any) -> Any:
    """The numbers inside memory of large ones: whoever reads beside them is found out."""
    if not value.is_floating_point():
        return value
    memory = torch.full([n + 2 for n in value.shape], 1e30, device=DEVICE, dtype=value.dtype)
    inside = memory[tuple(slice(1, -1) for _ in value.shape)]
    return inside.copy_(value)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.25}, {"z_loss": 1e-4}, {"softcap": 2e4}], ids=str)
@pytest.mark.parametrize("shape", [(6, 40), (2, rows.WHOLE + 5)], ids=str)
def test_digits_of_logits_far_from_zero(options: dict[str, float], shape: tuple[int, int]) -> None:
    """C033: 1e4 away from 0 the loss of each row, which is about 4, and the gradient keep the digits that float32 has."""
    x = (logits("", shape) + whole([1e4, -1e4], torch.float32).repeat(shape[0] // 2)[:, None]).bfloat16().float()
    x += logits("", shape).round()
    attrs = {**attrs_of("cross_entropy"), "reduction": "none", **options}
    weight = tensor_of_weights(shape[1])
    for given in ({"x": x, "target": whole([3, 39] * (shape[0] // 2)), "weight": w} for w in (None, weight)):
        for key, got, want in rows.pair("cross_entropy", given, attrs):
            size = want.abs().max().item()
            inside = (
                1e4 * options["softcap"] / 1e4 if "softcap" in options else 0.0
            )  # the bent logits are themselves rounded
            allowed = 64 * 2.0**-23 * (size + inside * (size if key == "dx" else 1))
            assert (got.cpu().double() - want).abs().max() <= allowed, (key, options, got, want)


@pytest.mark.parametrize("name", INDEXED)
@pytest.mark.parametrize("wrong", [3, -1, 4, 2**31 - 1, -(2**31), 2**40])
def test_a_class_that_does_not_exist(name: str, wrong: int) -> None:
    """C031: its loss is NaN, and neither a neighbour's row nor the memory around is read: the others are as ever."""
    key = indices(name)
    if isinstance(key.unless, int) and wrong < 0:
        return  # none is meant
    good = {n: walled(v) for n, v in rows.filled(name, (4, 3)).items()}
    bad = {**good, key.name: good[key.name].clone()}
    good[key.name][1:2], bad[key.name][1, ...] = 0, wrong
    others = whole([0, 2, 3])
    for attrs, weighted in itertools.product(each(name), (True, False)):
        absent = {t.name: None for t in tensors(name) if t.optional and not weighted}
        found, usual = ({**v, **absent} for v in (bad, good))
        if attrs["reduction"] != "none":
            assert rows.call(name, found, attrs)[0].isnan()
            continue
        results = []
        for given in (found, usual):
            leaves = rows.leaves(given, op_class(name).gradients)
            (y,) = rows.call(name, leaves, attrs)
            (dx,) = torch.autograd.grad(y[others].sum(), leaves["x"])
            results.append((y.detach(), dx))
        assert results[0][0][1].isnan() and results[1][0].isfinite().all()
        assert all(torch.equal(a[others], b[others]) for a, b in zip(*results))
        assert results[0][1][others].abs().max() < 10


@pytest.mark.parametrize("name", [n for n in INDEXED if n not in CLASSES])
def test_debugging_names_an_index_without_a_place(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """C019: as for the losses that ignore a class; a number that means none is no fault."""
    key, given = indices(name), rows.filled(name, (4, 3))
    monkeypatch.setenv("PULLBACK_DEBUG", "1")
    rows.call(name, given, attrs_of(name))
    for wrong in (9, -2, 3):
        target = given[key.name].to(torch.int32)
        target[(2,) + (1,) * (target.dim() - 1)] = wrong
        place = "(2,)" if target.dim() == 1 else "(2, 1)"
        other = f", or {key.unless}" if isinstance(key.unless, int) else ""
        with pytest.raises(IndexError) as caught:
            rows.call(name, {**given, key.name: target}, attrs_of(name))
        assert str(caught.value) == f"{name}: `{key.public}` is {wrong} at {place}; it takes 0 to 2{other}"


@pytest.mark.parametrize("name", CLASSES)
def test_debugging_names_a_class_that_does_not_exist(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """C019: with PULLBACK_DEBUG the op, the argument, the value, its place, and what is allowed; an ignored one is no fault."""
    x, function = logits(name, (2, 3, 2)), getattr(generated, name)
    function(x, whole([[0, 9], [1, 2]]))
    monkeypatch.setenv("PULLBACK_DEBUG", "1")
    function(x, whole([[0, -100], [1, 2]]))
    function(x, whole([[0, 77], [1, 2]]), ignore_index=77)
    function(x[:0], whole([[0, 1]])[:0])
    for wrong in (9, -1, 3):
        for leaf in (x, x.requires_grad_()):
            with pytest.raises(IndexError) as caught:
                function(leaf, whole([[0, 1], [wrong, 2]], torch.int32))
            text = f"{name}: `target` is {wrong} at (1, 0); it takes 0 to 2, or `ignore_index`, which is -100"
            assert str(caught.value) == text


# ---------------------------------------------------------------------------------------------- pairs of targets and classes


@pytest.mark.parametrize("name", rows.PAIRING)
def test_targets_before_the_first_negative_one(name: str) -> None:
    """None, one, all, the same one twice, and what stands behind the first negative one, which counts nothing."""
    x = logits(name, (6, 5))
    target = whole(
        [[-1, 2, 3, 1, 0], [4, -1, 4, 4, 4], [0, 1, 2, 3, 4], [2, 2, -1, 0, 0], [1, 3, 1, 3, -1], [0, 0, 0, 0, 0]]
    )
    for attrs, kind in itertools.product(each(name), (torch.int32, torch.int64)):
        agree(name, {"x": x, "target": target.to(kind)}, attrs)
    x = torch.zeros_like(x)
    y = getattr(generated, name)(x, target, "none")
    assert y[0] == 0 and y[2] == 0 and (y[[1, 3, 4, 5]] > 0).all()
    assert torch.equal(getattr(generated, name)(x[1], target[1]), y[1])  # a row alone


@pytest.mark.parametrize("name", rows.PAIRING)
@pytest.mark.parametrize(("shape", "turned"), [((1, 33), False), ((2, 70), True)], ids=str)
def test_pairs_in_steps_and_shares(
    name: str, shape: tuple[int, int], turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of several steps, and those that several programs share, forward and backward; the same bits every time."""
    monkeypatch.setattr(rowwise, "SHARE", 64)
    given = rows.filled(name, shape)
    given = {n: v.mT.contiguous().mT if turned else v for n, v in given.items()}
    attrs = {**attrs_of(name), "reduction": "none"}
    agree(name, given, attrs)
    runs = [once(name, given, attrs) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    metas = {n: rows.meta(v) for n, v in given.items()}
    plan = op_class(name)(reduction="none").plan_forward(metas)
    assert turned or any(x.kernel.function.fn.__name__.endswith("_finish") for x in plan.launches)
    assert any(x.values.get("LOOP") for x in plan.launches)
