"""Products of matrices and lookups of rows: hand-written kernels under the contract of all ops.

    from generated.runtime.linalg import linear

    y = linear(x, weight, bias)    # [..., I], [O, I], [O] -> [..., O]

Tensors may have any strides: a transposed or sliced view is read where it lies. Sums are taken in float32, of float64 in float64;
always in the same order, without atomics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from . import layout
from .binding import call, interpreted
from .custom import CustomOp, Scratch
from .elementwise import add_up, triton_dtype
from .kernels import coordinates
from .plan import Given, Launch, Meta, Tensor, cdiv
from .views import ITEM_SIZES

if TYPE_CHECKING:
    import torch

GROUP = 8
"""Rows of tiles that are walked side by side: what they share stays in the L2."""
FULL = 128
"""Tiles that fill a device: with fewer of the large ones, smaller ones are taken."""
CHUNK = 512
"""Indices that a program of a lookup's backward looks through at a time."""


# ---------------------------------------------------------------------------------------------- kernels


@triton.jit
def grouped(pid, n_rows, n_columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """Row and column of a program's tile: down GROUP rows of tiles, then on to the next column."""
    down, across = tl.cdiv(n_rows, BLOCK_M).to(tl.int32), tl.cdiv(n_columns, BLOCK_N).to(tl.int32)
    first = pid // (GROUP * across) * GROUP
    height = tl.minimum(down - first, GROUP)
    within = pid % (GROUP * across)
    return first + within % height, within // height


@triton.jit
def indices(start, n, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK indices from `start` on, and which of them exist."""
    i = start + tl.arange(0, BLOCK)
    if WIDE:
        i = i.to(tl.int64)
    return i, i < n


@triton.jit
def place(tile, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """The first index of a tile."""
    if WIDE:
        return tile.to(tl.int64) * BLOCK
    else:
        return tile * BLOCK


@triton.jit
def narrowed(n, WIDE: tl.constexpr):
    """A bound of a loop: counted in 32 bits where these suffice."""
    if WIDE:
        return n
    else:
        return n.to(tl.int32)


@triton.jit
def rows_at(m, row_sizes, strides):
    """Where rows lie: over up to three dims that do not merge; the last stride is that of the elements of a row."""
    at = coordinates(m, row_sizes, True)
    return at[0] * strides[0] + at[1] * strides[1] + at[2] * strides[2]


@triton.jit
def product(
    a_rows, a_stride, b_columns, b_stride, m_there, n_there, n_inner, OPERAND: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of the sums over k of a[m, k] * b[k, n]: from where its rows of a and columns of b begin, and the strides of k."""
    acc = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    for start in range(0, narrowed(n_inner, WIDE), BLOCK_K):
        k, k_there = indices(start, n_inner, WIDE, BLOCK_K)
        a = tl.load(a_rows[:, None] + k[None, :] * a_stride, mask=m_there[:, None] & k_there[None, :], other=0.0)
        b = tl.load(b_columns[None, :] + k[:, None] * b_stride, mask=k_there[:, None] & n_there[None, :], other=0.0)
        acc = tl.dot(a.to(OPERAND), b.to(OPERAND), acc, input_precision=PRECISION, out_dtype=ACC)
    return acc


@triton.jit
def rows_by_matrix(
    a_ptr, a_strides, b_ptr, b_strides, bias_ptr, bias_strides, c_ptr, c_strides, row_sizes, n_rows: tl.int64,
    n_inner: tl.int64, n_columns: tl.int64, OPERAND: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """c[m, n] = the sum over k of a[m, k] * b[k, n], plus bias[n]."""
    row, column = grouped(tl.program_id(0), n_rows, n_columns, BLOCK_M, BLOCK_N, GROUP)
    m, m_there = indices(place(row, WIDE, BLOCK_M), n_rows, WIDE, BLOCK_M)
    n, n_there = indices(place(column, WIDE, BLOCK_N), n_columns, WIDE, BLOCK_N)
    a_rows, b_columns = a_ptr + rows_at(m, row_sizes, a_strides), b_ptr + n * b_strides[1]
    acc = product(
        a_rows, a_strides[3], b_columns, b_strides[0], m_there, n_there, n_inner, OPERAND, ACC, PRECISION, WIDE,
        BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n * bias_strides[0], mask=n_there, other=0.0).to(ACC)[None, :]
    c = c_ptr + rows_at(m, row_sizes, c_strides)[:, None] + n[None, :] * c_strides[3]
    tl.store(c, acc, mask=m_there[:, None] & n_there[None, :])


@triton.jit
def product_over_rows(
    a_ptr, a_strides, b_ptr, b_strides, total_ptr, row_sizes, n_rows: tl.int64, n_first: tl.int64,
    n_second: tl.int64, span: tl.int64, OPERAND: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """total[p, i, j] = the sum over the rows m of share p of a[m, i] * b[m, j]."""
    row, column = grouped(tl.program_id(0), n_first, n_second, BLOCK_M, BLOCK_N, GROUP)
    i, i_there = indices(place(row, WIDE, BLOCK_M), n_first, WIDE, BLOCK_M)
    j, j_there = indices(place(column, WIDE, BLOCK_N), n_second, WIDE, BLOCK_N)
    first = tl.program_id(1) * span
    last = tl.minimum(first + span, n_rows)
    acc = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    for start in range(narrowed(first, WIDE), narrowed(last, WIDE), BLOCK_K):
        m, m_there = indices(start, last, WIDE, BLOCK_K)
        a_at = rows_at(m, row_sizes, a_strides)[None, :] + i[:, None] * a_strides[3]
        b_at = rows_at(m, row_sizes, b_strides)[:, None] + j[None, :] * b_strides[3]
        a = tl.load(a_ptr + a_at, mask=i_there[:, None] & m_there[None, :], other=0.0)
        b = tl.load(b_ptr + b_at, mask=m_there[:, None] & j_there[None, :], other=0.0)
        acc = tl.dot(a.to(OPERAND), b.to(OPERAND), acc, input_precision=PRECISION, out_dtype=ACC)
    total = total_ptr + tl.program_id(1) * n_first * n_second + i[:, None] * n_second + j[None, :]
    tl.store(total, acc, mask=i_there[:, None] & j_there[None, :])


@triton.jit
def sum_over_rows(
    a_ptr, a_strides, total_ptr, row_sizes, n_rows: tl.int64, n_columns: tl.int64, span: tl.int64, ACC: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """total[p, n] = the sum over the rows m of share p of a[m, n]."""
    n, n_there = indices(place(tl.program_id(0), WIDE, BLOCK_N), n_columns, WIDE, BLOCK_N)
    first = tl.program_id(1) * span
    last = tl.minimum(first + span, n_rows)
    acc = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    for start in range(narrowed(first, WIDE), narrowed(last, WIDE), BLOCK_M):
        m, m_there = indices(start, last, WIDE, BLOCK_M)
        at = rows_at(m, row_sizes, a_strides)[:, None] + n[None, :] * a_strides[3]
        acc += tl.load(a_ptr + at, mask=m_there[:, None] & n_there[None, :], other=0.0).to(ACC)
    tl.store(total_ptr + tl.program_id(1) * n_columns + n, tl.sum(acc, axis=0), mask=n_there)


@triton.jit
def batched_product(
    a_ptr, a_strides, b_ptr, b_strides, c_ptr, c_strides, n_inner_batch: tl.int64, n_rows: tl.int64,
    n_inner: tl.int64, n_columns: tl.int64, OPERAND: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """c[s, m, n] = the sum over k of a[s, m, k] * b[s, k, n]; strides over two dims of the batch, then over a matrix."""
    tiles = (tl.cdiv(n_rows, BLOCK_M) * tl.cdiv(n_columns, BLOCK_N)).to(tl.int32)
    batch = tl.program_id(0) // tiles
    row, column = grouped(tl.program_id(0) % tiles, n_rows, n_columns, BLOCK_M, BLOCK_N, GROUP)
    m, m_there = indices(place(row, WIDE, BLOCK_M), n_rows, WIDE, BLOCK_M)
    n, n_there = indices(place(column, WIDE, BLOCK_N), n_columns, WIDE, BLOCK_N)
    outer, inner = batch // n_inner_batch, batch % n_inner_batch  # in 64 bits, as the divisor is
    a_rows = a_ptr + outer * a_strides[0] + inner * a_strides[1] + m * a_strides[2]
    b_columns = b_ptr + outer * b_strides[0] + inner * b_strides[1] + n * b_strides[3]
    acc = product(
        a_rows, a_strides[3], b_columns, b_strides[2], m_there, n_there, n_inner, OPERAND, ACC, PRECISION, WIDE,
        BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    c = c_ptr + outer * c_strides[0] + inner * c_strides[1] + m[:, None] * c_strides[2] + n[None, :] * c_strides[3]
    tl.store(c, acc, mask=m_there[:, None] & n_there[None, :])


@triton.jit
def rows_by_index(
    idx_ptr, idx_strides, weight_ptr, weight_strides, y_ptr, y_strides, row_sizes, n_rows: tl.int64,
    n_values: tl.int64, n_columns: tl.int64, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y[m] = weight[idx[m]]: NaN where the index is out of range."""
    m, m_there = indices(place(tl.program_id(0), WIDE, BLOCK_M), n_rows, WIDE, BLOCK_M)
    n, n_there = indices(place(tl.program_id(1), WIDE, BLOCK_N), n_columns, WIDE, BLOCK_N)
    idx = tl.load(idx_ptr + rows_at(m, row_sizes, idx_strides), mask=m_there, other=0).to(tl.int64)[:, None]
    valid = (idx >= 0) & (idx < n_values)
    mask = m_there[:, None] & n_there[None, :]
    row = tl.load(weight_ptr + idx * weight_strides[0] + n[None, :] * weight_strides[1], mask=mask & valid, other=0.0)
    y = tl.where(valid, row, float("nan")).to(row.dtype)
    tl.store(y_ptr + rows_at(m, row_sizes, y_strides)[:, None] + n[None, :] * y_strides[3], y, mask=mask)


@triton.jit
def sum_by_index(
    idx_ptr, idx_strides, dy_ptr, dy_strides, total_ptr, row_sizes, n_rows: tl.int64, n_values: tl.int64,
    n_columns: tl.int64, span: tl.int64, ACC: tl.constexpr, WIDE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """total[p, v] = the sum of dy[m] over the rows m of share p with idx[m] = v, in the order of the rows."""
    low = place(tl.program_id(0), WIDE, BLOCK_V)
    v, v_there = indices(low, n_values, WIDE, BLOCK_V)
    n, n_there = indices(place(tl.program_id(1), WIDE, BLOCK_N), n_columns, WIDE, BLOCK_N)
    first = tl.program_id(2) * span
    last = narrowed(tl.minimum(first + span, n_rows), WIDE)
    acc = tl.zeros([BLOCK_V, BLOCK_N], ACC)
    for start in range(narrowed(first, WIDE), last, CHUNK):
        near, near_there = indices(start, last, WIDE, CHUNK)
        named = tl.load(idx_ptr + rows_at(near, row_sizes, idx_strides), mask=near_there, other=-1)
        own = (named >= low) & (named < low + BLOCK_V)
        if tl.max(own.to(tl.int32), axis=0) > 0:  # most chunks name no row of this program
            for part in range(start, tl.minimum(start + CHUNK, last), BLOCK_M):
                m, m_there = indices(part, last, WIDE, BLOCK_M)
                idx = tl.load(idx_ptr + rows_at(m, row_sizes, idx_strides), mask=m_there, other=-1)
                hit = v[:, None] == idx[None, :]
                if tl.max(tl.max(hit.to(tl.int32), axis=1), axis=0) > 0:
                    at = rows_at(m, row_sizes, dy_strides)[:, None] + n[None, :] * dy_strides[3]
                    dy = tl.load(dy_ptr + at, mask=m_there[:, None] & n_there[None, :], other=0.0).to(ACC)
                    # Chosen, not multiplied by 0 or 1: a NaN stays in its own row.
                    acc += tl.sum(tl.where(hit[:, :, None], dy[None, :, :], 0.0), axis=1)
    total = total_ptr + tl.program_id(2) * n_values * n_columns + v[:, None] * n_columns + n[None, :]
    tl.store(total, acc, mask=v_there[:, None] & n_there[None, :])


# ---------------------------------------------------------------------------------------------- tiles


@dataclass(frozen=True)
class Tile:
    """A program's tile of a product, and the step of its sums."""

    m: int
    n: int
    k: int
    warps: int
    stages: int

    @staticmethod
    def of(rows: int, columns: int, inner: int, dtype: str, batch: int = 1) -> Tile:
        """As large as registers and 96 KiB of shared memory allow, smaller where tiles are few or a matrix is small."""
        many = batch * cdiv(rows, 128) * cdiv(columns, 128) >= FULL
        if ITEM_SIZES[dtype] == 2:
            most = Tile(128, 128, 64, 8, 3) if many else Tile(64, 64, 64, 4, 4)
        elif ITEM_SIZES[dtype] == 4:
            most = Tile(128, 128, 32, 8, 3) if many else Tile(64, 64, 32, 4, 3)
        else:
            most = Tile(64, 64, 16, 4, 2)
        m, n, k = (
            min(most_, max(16, _power(size))) for most_, size in ((most.m, rows), (most.n, columns), (most.k, inner))
        )
        warps = max(2, most.warps * m * n // (most.m * most.n))
        return Tile(m, n, k, warps, most.stages)

    def tiles(self, rows: int, columns: int) -> int:
        return cdiv(rows, self.m) * cdiv(columns, self.n)

    @property
    def blocks(self) -> dict[str, int]:
        """As the kernels have it."""
        return {"BLOCK_M": self.m, "BLOCK_N": self.n, "BLOCK_K": self.k, "GROUP": GROUP}


def _power(size: int) -> int:
    """The power of two that is not smaller."""
    return 1 << max(size - 1, 0).bit_length()


def _shares(count: int, programs: int, wanted: int, step: int, least: int) -> tuple[int, int]:
    """How many programs share a sum over `count`, and how much of it each has: whole steps, and `least` of them at least."""
    parts = max(1, min(cdiv(wanted, programs), count // (step * least), 65535))
    span = max(1, cdiv(cdiv(count, parts), step)) * step
    return max(1, cdiv(count, span)), span


def _wide(*metas: Given) -> bool:
    """Whether an offset may pass 2**31, with what a tile reaches beyond the end."""
    sizes = [m for m in metas if isinstance(m, Meta)]
    reach = [sum((n - 1) * abs(s) for n, s in zip(m.shape, m.strides)) for m in sizes]
    steps = [max((abs(s) for s in m.strides), default=1) for m in sizes]
    return any(r + 1024 * s >= 2**31 for r, s in zip(reach, steps)) or any(math.prod(m.shape) >= 2**31 for m in sizes)


def _meta(given: Mapping[str, Given], name: str) -> Meta:
    found = given[name]
    assert isinstance(found, Meta)
    return found


def _accumulated(dtype: str) -> str:
    return "f64" if dtype == "f64" else "f32"


class _Product(CustomOp):
    """What products share: the dtypes and the precision of their factors and sums."""

    kinds = {"precision": ("ieee", "tf32")}

    def _dtypes(self, dtype: str) -> dict[str, Any]:
        """As the kernels have them, in their order. Triton's interpreter would multiply the bits of bf16."""
        operand = "f32" if dtype == "bf16" and interpreted() else dtype
        halves = {"f16": tl.float16, "bf16": tl.bfloat16}
        return {
            "OPERAND": halves.get(operand) or triton_dtype(operand), "ACC": triton_dtype(_accumulated(dtype)),
            "PRECISION": self.attrs["precision"],
        }  # fmt: skip


class _Rows(CustomOp):
    """What ops over rows share: the merged dims of `...`."""

    def _rows(self, given: Mapping[str, Given], *names: str) -> tuple[tuple[int, ...], dict[str, tuple[int, ...]], int]:
        """The sizes of the rows as kernels take them, strides of each tensor over them and its last dim, and how many there are."""
        sizes, strides = self.merged("...", names, given, 3)
        whole = {n: (*s, self._last(given, n)) for n, s in strides.items()}
        return layout.divisors((*sizes, 1)), whole, math.prod(sizes)

    def _last(self, given: Mapping[str, Given], name: str) -> int:
        """The stride of the elements of a row; 0 where a row is one element."""
        return _meta(given, name).strides[-1] if len(layout.parse_dims(self._tensor(name).dims)) > 1 else 0

    def _added_up(self, name: str, first: Launch, parts: int, count: int, acc: str, wide: bool) -> list[Launch]:
        """A launch whose programs have parts of a sum, and where there are several, the one that adds them up."""
        if parts == 1:
            return [first]
        return [first, add_up(name, f"{name}_part", parts, count, {"COMPUTE": triton_dtype(acc), "WIDE": wide})]

    @staticmethod
    def _into(name: str, parts: int, acc: str, shape: tuple[int, ...]) -> str | Scratch:
        """Where a sum goes: to its tensor, or in parts."""
        return name if parts == 1 else Scratch(f"{name}_part", acc, (parts, *shape))


# ---------------------------------------------------------------------------------------------- linear


class Linear(_Rows, _Product):
    """How `linear` is launched."""

    name = "linear"
    inputs = (Tensor("x", "..., I"),)
    params = (Tensor("weight", "O, I"), Tensor("bias", "O", optional=True, init=0))
    outputs = (Tensor("y", "..., O"),)
    gradients = ("x", "weight", "bias")
    residuals = ("x", "weight")

    def lower(self, given: Mapping[str, Given], outputs: Mapping[str, Meta]) -> Sequence[Launch]:
        weight = _meta(given, "weight")
        return [self._by_matrix({**given, **outputs}, "x", "y", weight.strides[::-1], weight.shape[::-1], "bias")]

    def lower_backward_source(
        self, given: Mapping[str, Given], grads: Mapping[str, Meta], multiprocessors: int
    ) -> Sequence[Launch]:
        known = {**given, **grads}
        weight = _meta(given, "weight")
        out: list[Launch] = []
        if "dx" in grads:
            out.append(self._by_matrix(known, "dy", "dx", weight.strides, weight.shape, None))
        if "dweight" in grads:
            out += self._over_rows(known, multiprocessors)
        if "dbias" in grads:
            out += self._summed(known, multiprocessors)
        return out

    def _by_matrix(self, known: Mapping[str, Given], a: str, c: str, strides: tuple[int, ...], shape: tuple[int, ...],
                   bias: str | None) -> Launch:  # fmt: skip
        """The rows of `a` times a matrix [K, N] that the weight is, as it lies or transposed."""
        row_sizes, steps, rows = self._rows(known, a, c)
        (inner, columns), dtype, own = shape, _meta(known, a).dtype, known.get("bias") if bias else None
        tile = Tile.of(rows, columns, inner, dtype)
        return self.launch(
            rows_by_matrix, tile.tiles(rows, columns), a_ptr=a, a_strides=steps[a], b_ptr="weight", b_strides=(*strides, 0, 0),
            bias_ptr=bias if own is not None else None, bias_strides=(*own.strides, 0, 0, 0) if isinstance(own, Meta) else None,
            c_ptr=c, c_strides=steps[c], row_sizes=row_sizes, n_rows=rows, n_inner=inner, n_columns=columns,
            **self._dtypes(dtype), WIDE=_wide(known[a], known["weight"], known[c]), **tile.blocks, warps=tile.warps,
            stages=tile.stages,
        )  # fmt: skip

    def _over_rows(self, known: Mapping[str, Given], multiprocessors: int) -> list[Launch]:
        """dweight[o, i] = the sum over rows of dy[m, o] * x[m, i]: over shares of the rows where tiles are few."""
        row_sizes, steps, rows = self._rows(known, "dy", "x")
        first, second = shape = _meta(known, "weight").shape
        dtype = _meta(known, "dy").dtype
        acc, tile = _accumulated(dtype), Tile.of(first, second, rows, dtype)
        wide = _wide(known["dy"], known["x"], known["weight"])
        tiles = tile.tiles(first, second)
        parts, span = _shares(rows, tiles, 2 * multiprocessors, tile.k, 8)
        launch = self.launch(
            product_over_rows, (tiles, parts), a_ptr="dy", a_strides=steps["dy"], b_ptr="x", b_strides=steps["x"],
            total_ptr=self._into("dweight", parts, acc, shape), row_sizes=row_sizes, n_rows=rows, n_first=first, n_second=second,
            span=span, **self._dtypes(dtype), WIDE=wide, **tile.blocks, warps=tile.warps, stages=tile.stages,
        )  # fmt: skip
        return self._added_up("dweight", launch, parts, first * second, acc, wide)

    def _summed(self, known: Mapping[str, Given], multiprocessors: int) -> list[Launch]:
        """dbias[o] = the sum over rows of dy[m, o]."""
        row_sizes, steps, rows = self._rows(known, "dy")
        dy = _meta(known, "dy")
        columns, acc, wide = dy.shape[-1], _accumulated(dy.dtype), _wide(dy)
        programs = cdiv(columns, 64)
        parts, span = _shares(rows, programs, 4 * multiprocessors, 32, 4)
        launch = self.launch(
            sum_over_rows, (programs, parts), a_ptr="dy", a_strides=steps["dy"],
            total_ptr=self._into("dbias", parts, acc, (columns,)), row_sizes=row_sizes, n_rows=rows, n_columns=columns, span=span,
            ACC=triton_dtype(acc), WIDE=wide, BLOCK_M=32, BLOCK_N=64,
        )  # fmt: skip
        return self._added_up("dbias", launch, parts, columns, acc, wide)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, precision: str = "ieee"
) -> torch.Tensor:
    """x @ weight.T + bias, as torch.nn.functional.linear.

    Args:
        x: [..., I], f16, bf16, f32 or f64.
        weight: [O, I], of any of these dtypes: it is multiplied in the dtype of x.
        bias: [O], may be absent.
        precision: of products of float32: `ieee`, or `tf32`, which keeps 10 bits of each factor.

    Returns:
        [..., O], in the dtype of x; the gradients are in the dtypes of their tensors.

    Raises:
        TypeError, ValueError: on a wrong dtype, shape or device, naming the argument.
    """
    return call(Linear(precision=precision), {"x": x, "weight": weight, "bias": bias})


# ---------------------------------------------------------------------------------------------- batched matmul


class BatchedMatmul(_Product):
    """How `batched_matmul` is launched."""

    name = "batched_matmul"
    inputs = (Tensor("a", "..., M, K"), Tensor("b", "..., K, N"))
    outputs = (Tensor("y", "..., M, N"),)
    gradients = ("a", "b")
    residuals = ("a", "b")

    def _check_dtypes(self, given: Mapping[str, Given]) -> None:
        super()._check_dtypes(given)
        a, b = _meta(given, "a"), _meta(given, "b")
        if a.dtype != b.dtype:
            raise TypeError(f"{self.name}: `b` is {b.dtype}, `a` is {a.dtype}; they are multiplied in one dtype")

    def lower(self, given: Mapping[str, Given], outputs: Mapping[str, Meta]) -> Sequence[Launch]:
        return [self._product({**given, **outputs}, "a", "b", "y", False, False)]

    def lower_backward_source(
        self, given: Mapping[str, Given], grads: Mapping[str, Meta], multiprocessors: int
    ) -> Sequence[Launch]:
        known = {**given, **grads}
        out = [self._product(known, "dy", "b", "da", False, True)] if "da" in grads else []
        return out + ([self._product(known, "a", "dy", "db", True, False)] if "db" in grads else [])

    def _product(self, known: Mapping[str, Given], a: str, b: str, c: str, turn_a: bool, turn_b: bool) -> Launch:
        """c = a @ b, with a or b transposed."""
        sizes, batches = self.merged("...", (a, b, c), known, 2)
        strides, shapes = {}, {}
        for name, turned in ((a, turn_a), (b, turn_b), (c, False)):
            meta = _meta(known, name)
            order = -1 if turned else 1
            strides[name], shapes[name] = (*batches[name], *meta.strides[-2:][::order]), meta.shape[-2:][::order]
        (rows, inner), columns, dtype = shapes[a], shapes[b][1], _meta(known, a).dtype
        batch = math.prod(sizes)
        tile = Tile.of(rows, columns, inner, dtype, batch)
        return self.launch(
            batched_product, batch * tile.tiles(rows, columns), a_ptr=a, a_strides=strides[a], b_ptr=b, b_strides=strides[b],
            c_ptr=c, c_strides=strides[c], n_inner_batch=sizes[1], n_rows=rows, n_inner=inner, n_columns=columns,
            **self._dtypes(dtype), WIDE=_wide(known[a], known[b], known[c]),
            **tile.blocks, warps=tile.warps, stages=tile.stages,
        )  # fmt: skip


def batched_matmul(a: torch.Tensor, b: torch.Tensor, precision: str = "ieee") -> torch.Tensor:
    """a @ b for each matrix of a batch.

    Args:
        a: [..., M, K], f16, bf16, f32 or f64.
        b: [..., K, N], of the same dtype. The dims before the last two are those of `a`: expand what is to be broadcast.
        precision: of products of float32: `ieee`, or `tf32`, which keeps 10 bits of each factor.

    Returns:
        [..., M, N], in the dtype of the inputs.

    Raises:
        TypeError, ValueError: on a wrong dtype, shape or device, naming the argument.
    """
    return call(BatchedMatmul(precision=precision), {"a": a, "b": b})


# ---------------------------------------------------------------------------------------------- embedding


class Embedding(_Rows):
    """How `embedding` is launched."""

    name = "embedding"
    inputs = (Tensor("idx", "...", "int", broadcast=False, indexes="V"),)
    params = (Tensor("weight", "V, D"),)
    outputs = (Tensor("y", "..., D"),)
    gradients = ("weight",)
    residuals = ("idx",)

    def lower(self, given: Mapping[str, Given], outputs: Mapping[str, Meta]) -> Sequence[Launch]:
        known = {**given, **outputs}
        row_sizes, steps, rows = self._rows(known, "idx", "y")
        weight = _meta(given, "weight")
        values, columns = weight.shape
        block_n = min(256, _power(columns))
        block_m = max(1, 1024 // block_n)
        return [
            self.launch(
                rows_by_index, (cdiv(rows, block_m), cdiv(columns, block_n)), idx_ptr="idx", idx_strides=steps["idx"],
                weight_ptr="weight", weight_strides=(*weight.strides, 0, 0), y_ptr="y", y_strides=steps["y"],
                row_sizes=row_sizes, n_rows=rows, n_values=values, n_columns=columns,
                WIDE=_wide(known["idx"], known["y"], weight), BLOCK_M=block_m, BLOCK_N=block_n,
            )
        ]  # fmt: skip

    def lower_backward_source(
        self, given: Mapping[str, Given], grads: Mapping[str, Meta], multiprocessors: int
    ) -> Sequence[Launch]:
        row_sizes, steps, rows = self._rows(given, "idx", "dy")
        values, columns = shape = grads["dweight"].shape
        acc, wide = _accumulated(_meta(given, "dy").dtype), _wide(given["idx"], given["dy"], grads["dweight"])
        block_n = min(64, _power(columns))
        tiles = cdiv(values, 16), cdiv(columns, block_n)
        parts, span = _shares(rows, math.prod(tiles), 4 * multiprocessors, CHUNK, 1)
        launch = self.launch(
            sum_by_index, (*tiles, parts), idx_ptr="idx", idx_strides=steps["idx"], dy_ptr="dy", dy_strides=steps["dy"],
            total_ptr=self._into("dweight", parts, acc, shape), row_sizes=row_sizes, n_rows=rows, n_values=values,
            n_columns=columns, span=span, ACC=triton_dtype(acc), WIDE=wide, CHUNK=CHUNK, BLOCK_V=16, BLOCK_M=16, BLOCK_N=block_n,
        )  # fmt: skip
        return self._added_up("dweight", launch, parts, values * columns, acc, wide)


def embedding(idx: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The rows of `weight` that `idx` names, as torch.nn.functional.embedding.

    Args:
        idx: [...], i32 or i64, each in 0 to V - 1. One that is out of range gives NaN and no gradient.
        weight: [V, D], f16, bf16, f32 or f64.

    Returns:
        [..., D], in the dtype of `weight`.

    Raises:
        TypeError, ValueError: on a wrong dtype, shape or device, naming the argument.
    """
    return call(Embedding(), {"idx": idx, "weight": weight})
