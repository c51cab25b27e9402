"""Scans and places of extremes: where steps meet, what a NaN, a zero or an infinity reaches, ties, and the form that a GPU runs."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import generated  # noqa: E402
from generated.runtime import rows  # noqa: E402
from generated.runtime.rowwise import CHUNK, TILE, WHOLE  # noqa: E402
from generated.runtime.testing import DEVICE  # noqa: E402
from tests.kernels import test_cases as cases  # noqa: E402
from tests.kernels.test_rows import SCANNING, agree, attrs_of, filled, last, launches, pair, tensors  # noqa: E402

tensor = cases.tensor
NAN, INF = math.nan, math.inf
PLACES = cases.present("argmax", "argmin")


def test_which_ops_scan() -> None:
    assert set(SCANNING) == {"cumsum", "cumprod", "linear_recurrence"}


# ---------------------------------------------------------------------------------------------- steps


@pytest.mark.parametrize("name", SCANNING)
@pytest.mark.parametrize("width", [WHOLE - 1, WHOLE, WHOLE + 1, WHOLE + CHUNK, 3 * CHUNK - 1, 3 * CHUNK + 1], ids=str)
def test_where_steps_meet(name: str, width: int) -> None:
    """Rows that end with a step, one element before and one after: in reverse the last step comes first."""
    agree(name, filled(name, (2, width)), last(name))


@pytest.mark.parametrize("name", SCANNING)
def test_a_step_goes_on_from_the_one_before(name: str) -> None:
    """Whole numbers, in which nothing is rounded: across steps, either way, in every layout, the bits are torch's."""
    count, width = 3, TILE + 5
    x = torch.arange(count * width, device=DEVICE).reshape(count, width) % 5 - 2.0
    given = {t.name: x.double() for t in tensors(name)}
    if name != "cumsum":  # a product of signs, and a state that a 0 ends now and then
        given[tensors(name)[0].name] = torch.where(x == 0, 1.0, x.sign()).double()
    for turned in (False, True):
        views = {n: v.mT.contiguous().mT if turned else v for n, v in given.items()}
        for _, got, want in pair(name, views, last(name), lambda out: [torch.ones_like(y) for y in out]):
            assert torch.equal(got.cpu(), want)


def test_a_long_sum_keeps_its_digits() -> None:
    """The sum of halves is in float32 and exact; in half precision each result is rounded once."""
    x = torch.full((1, 1 << 16), 0.5, device=DEVICE, dtype=torch.float16)
    want = torch.arange(1, (1 << 16) + 1, device=DEVICE).float() / 2
    assert torch.equal(generated.cumsum(x, 1)[0], want.half())
    assert torch.equal(generated.cumsum(x.float(), 1)[0], want)


# ---------------------------------------------------------------------------------------------- NaN, zeros, infinities


@pytest.mark.parametrize("name", SCANNING)
@pytest.mark.parametrize("place", [0, 4, CHUNK - 1, CHUNK, WHOLE])
def test_a_nan_reaches_what_follows(name: str, place: int) -> None:
    """Forwards what comes after it, in the gradient what comes before it; in whichever step it is."""
    key = tensors(name)[-1].name
    given = filled(name, (2, WHOLE + 3))
    clean = cases.case(name).call(given, last(name))[0]
    stained = given[key].clone()
    stained[0, place] = NAN
    y = cases.case(name).call({**given, key: stained}, last(name))[0]
    assert torch.equal(y[1], clean[1]) and torch.equal(y[0, :place], clean[0, :place])
    assert y[0, place:].isnan().all()
    leaves = {n: v.detach().requires_grad_() for n, v in given.items()}
    (y,) = cases.case(name).call(leaves, last(name))
    dy = torch.ones_like(y)
    dy[0, place] = NAN
    found = torch.autograd.grad(y, leaves[key], dy)[0]
    assert (
        found[0, : place + 1].isnan().all() and not found[0, place + 1 :].isnan().any() and not found[1].isnan().any()
    )


@pytest.mark.parametrize("shape", [(3, 7), (2, WHOLE + 2)], ids=str)
def test_a_product_with_zeros(shape: tuple[int, int]) -> None:
    """Nothing is divided: one 0, two, and none, and the gradient of each."""
    x = 0.5 + torch.rand(shape, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    x[0, 2], x[1, 1], x[1, 4] = 0, 0, 0
    agree("cumprod", {"x": x}, last("cumprod"))


def test_a_recurrence_ends_and_begins_again() -> None:
    """A factor of 0 forgets; what stands before the first element is 0, whatever its factor."""
    a, b = tensor([[9.0, 2, 0, 3]]), tensor([[1.0, 1, 5, 1]])
    assert generated.linear_recurrence(a, b).tolist() == [[1, 3, 5, 16]]
    a, b = (v.requires_grad_() for v in (a, b))
    da, db = torch.autograd.grad(generated.linear_recurrence(a, b), (a, b), tensor([[1.0, 1, 1, 1]]))
    assert da.tolist() == [[0, 1, 12, 5]] and db.tolist() == [[3, 1, 4, 1]]


def test_infinities_of_a_sum() -> None:
    x = tensor([[1.0, INF, 2, -INF, 1]])
    assert str(generated.cumsum(x, 1).tolist()) == str(torch.cumsum(x.cpu(), 1).tolist())


# ---------------------------------------------------------------------------------------------- the form that a GPU runs


@pytest.mark.parametrize("name", SCANNING)
def test_the_compiler_s_own_scan(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter scans a recurrence in another way, for it takes its time for each element: few are enough here."""
    if DEVICE == "cpu":
        monkeypatch.setattr(rows, "INTERPRETED", False)
    for shape in ((1, 1), (3, 5), (2, 33)):
        agree(name, filled(name, shape), last(name))
        given = {n: v.mT.contiguous().mT for n, v in filled(name, shape).items()}
        agree(name, given, last(name))


@pytest.mark.parametrize("name", SCANNING)
def test_a_row_has_one_program(name: str) -> None:
    for shape in ((1, WHOLE + 1), (1, 2**24), (5, 3), (70, 40)):
        for launch in launches(name, shape):
            values = launch.values
            assert launch.grid[1] == 1 and launch.grid[0] * values["BLOCK_K"] >= shape[0]


# ---------------------------------------------------------------------------------------------- places of extremes


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("width", [5, 300, WHOLE + 7])
def test_the_first_of_equal_ones(name: str, width: int) -> None:
    """Whatever tile they are in; of zeros of either sign; of infinities; a NaN before all."""
    sign = 1 if name == "argmax" else -1
    x = torch.zeros(6, width, device=DEVICE)
    x[0, 3], x[0, -1] = sign, sign
    x[1, 0], x[1, 1:] = -0.0, 0.0
    x[2] = -sign * INF
    x[3, 2], x[3, -2] = NAN, NAN
    x[4, 1], x[4, -1] = sign * INF, NAN
    x[5, -1] = sign * INF
    want = [3, 0, 0, 2, width - 1, width - 1]
    assert getattr(generated, name)(x, 1).tolist() == want
    assert getattr(generated, name)(x.mT.contiguous().mT, 1).tolist() == want
    assert getattr(generated, name)(x).item() == 3 * width + 2
    for dtype in ("f64", "f16", "bf16"):
        assert getattr(generated, name)(x.to(cases.TORCH[dtype]), 1).tolist() == want


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("dtype", ["i32", "i64"])
def test_places_of_integers(name: str, dtype: str) -> None:
    """Compared as integers: in floats the largest ones would be equal; the ends of the range are numbers like others."""
    info = torch.iinfo(cases.TORCH[dtype])
    x = torch.tensor(
        [[info.max - 1, info.max, info.max], [info.min + 1, info.min, info.min], [info.min] * 3, [info.max] * 3],
        device=DEVICE, dtype=cases.TORCH[dtype],
    )  # fmt: skip
    assert torch.equal(getattr(generated, name)(x, 1), getattr(torch, name)(x, 1))
    assert getattr(generated, name)(x.T, (0, 1)).item() == getattr(torch, name)(x.T).item()
    y = getattr(generated, name)(x, 0, keepdim=True)
    assert y.dtype == torch.int64 and y.shape == (1, 3)


@pytest.mark.parametrize("name", PLACES)
def test_places_in_the_caller_s_order(name: str) -> None:
    """Row-major over the dims as they are, wherever they lie in memory."""
    x = torch.randint(0, 4, (3, 4, 5), generator=torch.Generator().manual_seed(2)).to(DEVICE).float()
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1)):
        back = [order.index(d) for d in range(3)]
        view = x.permute(order).contiguous().permute(back)
        given: dict[str, Any] = {"x": view}
        for dim in (None, (0, 2), (2, 1), 1):
            agree(name, given, {**attrs_of(name), "dim": dim})


WIDE = [((3, 65537), "f32"), ((2, 262144), "f32"), ((100003, 40), "f32"), ((2, 131073), "bf16"), ((7, 70001), "f64")]


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*SCANNING, *PLACES])
@pytest.mark.parametrize(("shape", "dtype"), WIDE, ids=str)
def test_many_steps_and_many_rows(name: str, shape: tuple[int, int], dtype: str) -> None:
    given = filled(name, shape, dtype)
    if name == "linear_recurrence":  # of gates: a state that does not outgrow what is added
        given["a"] = given["a"].abs().clamp(max=0.99)
    agree(name, given, last(name), dtype)
    agree(name, {n: v.mT.contiguous().mT for n, v in given.items()}, last(name), dtype)
