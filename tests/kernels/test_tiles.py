"""What a program takes: elements of long forms for halves, and lanes of a walk over a row."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import generated  # noqa: E402
from generated.ops.add import Add  # noqa: E402
from generated.ops.atan2 import Atan2  # noqa: E402
from generated.ops.pow import Pow  # noqa: E402
from generated.ops.sin import Sin  # noqa: E402
from generated.runtime.elementwise import Split  # noqa: E402
from generated.runtime.plan import Launch, Meta  # noqa: E402
from generated.runtime.rowwise import WHOLE, Load, Tile  # noqa: E402
from generated.runtime.testing import DEVICE  # noqa: E402
from generated.runtime.views import dense_strides  # noqa: E402

INF, NAN = math.inf, math.nan


def metas(
    op: Any, dtype: str, shape: tuple[int, ...], *others: tuple[tuple[int, ...], tuple[int, ...]]
) -> dict[str, Meta]:
    layouts = [(shape, dense_strides(shape)), *others]
    return {t.name: Meta(dtype, *(layouts[k] if k < len(layouts) else layouts[0])) for k, t in enumerate(op.tensors)}


def blocks(launch: Launch) -> set[int]:
    return {launch.values[n] for n in ("BLOCK", "BLOCK_K") if n in {p.name for p in launch.kernel.abi.params}}


@pytest.mark.parametrize(
    ("op", "dtype", "layouts", "size"),
    [
        (Sin(), "bf16", (), 2048), (Sin(), "f16", (), 2048), (Sin(), "f32", (), 1024), (Sin(), "f64", (), 1024), (Add(alpha=1), "bf16", (), 1024),
        (Atan2(), "bf16", (), 2048), (Atan2(), "bf16", (((64, 96), (1, 64)),), 1024), (Atan2(), "bf16", (((96,), (1,)),), 1024),
    ],
    ids=lambda v: getattr(v, "name", None) or str(v),
)  # fmt: skip
def test_a_long_form_of_dense_halves_has_twice_the_elements(op: Any, dtype: str, layouts: Any, size: int) -> None:
    given = metas(op, dtype, (64, 96), *layouts)
    (launch,) = op.plan_forward(given).launches
    assert blocks(launch) == {size}
    if launch.values["patch_sizes"] is None:
        assert launch.grid == (-(-64 * 96 // size), 1, 1)


def test_gradients_too_unless_they_are_sums() -> None:
    op = Pow()
    for layouts, dense in (((), True), ((((96,), (1,)),), False)):
        given = metas(op, "bf16", (64, 96), *layouts)
        outputs = op.plan_forward(given).outputs
        known = {**given, **outputs, **{f"d{n}": m for n, m in outputs.items()}}
        launch = op.plan_backward(known, op.gradients, 132).launches[0]
        assert ((launch.values["BLOCK_K"], launch.values["BLOCK_R"]) == (2048, 1)) == dense


@pytest.mark.parametrize("count", [1, 2047, 2048, 2049, 4097])
def test_every_element_is_written_once(count: int) -> None:
    x, y = (torch.linspace(-3, 3, count, device=DEVICE).bfloat16().requires_grad_() for _ in range(2))
    dy = torch.ones(count, device=DEVICE).bfloat16()
    for own, true in ((generated.sin(x), torch.sin(x)), (generated.atan2(x, y + 4), torch.atan2(x, y + 4))):
        torch.testing.assert_close(own, true, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(*(torch.autograd.grad(v, x, dy)[0] for v in (own, true)), rtol=2e-2, atol=2e-2)


# ---------------------------------------------------------------------------------------------- lanes


def test_lanes_and_groups_fill_a_step() -> None:
    flags = itertools.product((1, 2, 4, 8, 24), (False, True), (False, True), (False, True))
    for (item, single, once, gradient), n, rows in itertools.product(
        flags, (0, 1, 600, 8193, 32769, 2**20), (1, 5, 300, 10**6)
    ):
        tile = Tile.of(
            Split(((rows, n),), ((n, 1),), False), 0, 132, Load(item, 0, single=single, once=once, gradient=gradient)
        )
        for group in (1, 2, 4, 8, 16):
            lanes, own = tile.lanes(group)
            assert lanes >= 1 and own >= 1 and tile.block_r % (lanes * own) == 0
            assert lanes == own == 1 or (tile.loop and tile.block_k == 1)


ROWS: dict[str, list[tuple[Any, float]]] = {
    "finite": [],
    "all are -inf": [(slice(None), -INF)],
    "a lane is -inf": [(slice(8, None, 1024), -INF)],
    "all but one are -inf": [(slice(None, -1), -INF)],
    "one is inf": [(5, INF)],
    "two are inf": [(5, INF), (-3, INF)],
    "one is NaN": [(40000, NAN)],
    "the largest is last": [(-1, 90.0)],
    "all are large": [(slice(0, None, 3), 8e4)],
    "most are masked": [(slice(None, -3000), -1e30)],
    "all but two are masked": [(slice(None), -1e30), (7, 1.0), (9, 2.0)],
    "masked by the least number": [(slice(None, -3000), -3.3e38)],
    "the largest is huge": [(slice(None, None, 2), 3.1e9)],
}


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("width", [4 * WHOLE - 32, 2 * WHOLE + 7])
def test_a_walk_by_lanes(kind: str, dtype: str, width: int) -> None:
    """Vectors, and elements one by one; the row alone, shared by programs, and beside others that hide nothing of it."""
    torch.manual_seed(3)
    x = torch.randn(2, width, dtype=getattr(torch, dtype), device=DEVICE)
    for place, value in ROWS[kind]:
        x[1, place] = value
    wide, target = x.double().cpu(), torch.tensor([7, width - 1], device=DEVICE)
    rtol = {"float32": 2e-5, "float64": 1e-12, "bfloat16": 1e-2}[dtype]
    for own, true in (
        (generated.logsumexp(x, -1), torch.logsumexp(wide, -1)),
        (generated.softmax(x, -1), torch.softmax(wide, -1)),
        (generated.log_softmax(x, -1), torch.log_softmax(wide, -1)),
        (generated.cross_entropy(x, target, reduction="none"),
         torch.nn.functional.cross_entropy(wide, target.cpu(), reduction="none")),
    ):  # fmt: skip
        torch.testing.assert_close(own.cpu().double(), true, rtol=rtol, atol=rtol, equal_nan=True)
