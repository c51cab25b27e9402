"""The forward of products of matrices and of lookups of rows: their kernels and launches. `linalg` has the functions.

Sums are taken in float32, of float64 in float64; always in the same order, without atomics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from . import layout
from .custom import CustomOp
from .device import interpreted
from .elementwise import triton_dtype
from .kernels import coordinates
from .plan import Given, Launch, Meta, Tensor, cdiv
from .views import ITEM_SIZES

GROUP = 8
"""Rows of tiles that are walked side by side: what they share stays in the L2."""
FULL = 128
"""Tiles that fill a device: with fewer of the large ones, smaller ones are taken."""


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
            min(most_, max(16, power(size))) for most_, size in ((most.m, rows), (most.n, columns), (most.k, inner))
        )
        warps = max(2, most.warps * m * n // (most.m * most.n))
        return Tile(m, n, k, warps, most.stages)

    def tiles(self, rows: int, columns: int) -> int:
        return cdiv(rows, self.m) * cdiv(columns, self.n)

    @property
    def blocks(self) -> dict[str, int]:
        """As the kernels have it."""
        return {"BLOCK_M": self.m, "BLOCK_N": self.n, "BLOCK_K": self.k, "GROUP": GROUP}


def power(size: int) -> int:
    """The power of two that is not smaller."""
    return 1 << max(size - 1, 0).bit_length()


def is_wide(*metas: Given) -> bool:
    """Whether an offset may pass 2**31, with what a tile reaches beyond the end."""
    sizes = [m for m in metas if isinstance(m, Meta)]
    reach = [sum((n - 1) * abs(s) for n, s in zip(m.shape, m.strides)) for m in sizes]
    steps = [max((abs(s) for s in m.strides), default=1) for m in sizes]
    return any(r + 1024 * s >= 2**31 for r, s in zip(reach, steps)) or any(math.prod(m.shape) >= 2**31 for m in sizes)


def meta_of(given: Mapping[str, Given], name: str) -> Meta:
    """Of a tensor that is there."""
    found = given[name]
    assert isinstance(found, Meta)
    return found


def accumulated(dtype: str) -> str:
    """The dtype that sums are taken in."""
    return "f64" if dtype == "f64" else "f32"


class Product(CustomOp):
    """What products share: the dtypes and the precision of their factors and sums."""

    strided = True
    kinds = {"precision": ("ieee", "tf32")}

    def _dtypes(self, dtype: str) -> dict[str, Any]:
        """As the kernels have them, in their order. Triton's interpreter would multiply the bits of bf16."""
        operand = "f32" if dtype == "bf16" and interpreted() else dtype
        halves = {"f16": tl.float16, "bf16": tl.bfloat16}
        return {
            "OPERAND": halves.get(operand) or triton_dtype(operand), "ACC": triton_dtype(accumulated(dtype)),
            "PRECISION": self.attrs["precision"],
        }  # fmt: skip


class Rows(CustomOp):
    """What ops over rows share: the merged dims of `...`."""

    strided = True

    def _rows(self, given: Mapping[str, Given], *names: str) -> tuple[tuple[int, ...], dict[str, tuple[int, ...]], int]:
        """The sizes of the rows as kernels take them, strides of each tensor over them and its last dim, and how many there are."""
        sizes, strides = self.merged("...", names, given, 3)
        whole = {n: (*s, self._last(given, n)) for n, s in strides.items()}
        return layout.divisors((*sizes, 1)), whole, math.prod(sizes)

    def _last(self, given: Mapping[str, Given], name: str) -> int:
        """The stride of the elements of a row; 0 where a row is one element."""
        return meta_of(given, name).strides[-1] if len(layout.parse_dims(self._tensor(name).dims)) > 1 else 0


# ---------------------------------------------------------------------------------------------- linear


class LinearForward(Rows, Product):
    """How `linear` is launched forward."""

    name = "linear"
    inputs = (Tensor("x", "..., I"),)
    params = (Tensor("weight", "O, I"), Tensor("bias", "O", optional=True, init=0))
    outputs = (Tensor("y", "..., O"),)

    def lower(self, given: Mapping[str, Given], outputs: Mapping[str, Meta]) -> Sequence[Launch]:
        weight = meta_of(given, "weight")
        return [self._by_matrix({**given, **outputs}, "x", "y", weight.strides[::-1], weight.shape[::-1], "bias")]

    def _by_matrix(self, known: Mapping[str, Given], a: str, c: str, strides: tuple[int, ...], shape: tuple[int, ...],
                   bias: str | None) -> Launch:  # fmt: skip
        """The rows of `a` times a matrix [K, N] that the weight is, as it lies or transposed."""
        row_sizes, steps, rows = self._rows(known, a, c)
        (inner, columns), dtype, own = shape, meta_of(known, a).dtype, known.get("bias") if bias else None
        tile = Tile.of(rows, columns, inner, dtype)
        return self.launch(
            rows_by_matrix, tile.tiles(rows, columns), a_ptr=a, a_strides=steps[a], b_ptr="weight", b_strides=(*strides, 0, 0),
            bias_ptr=bias if own is not None else None, bias_strides=(*own.strides, 0, 0, 0) if isinstance(own, Meta) else None,
            c_ptr=c, c_strides=steps[c], row_sizes=row_sizes, n_rows=rows, n_inner=inner, n_columns=columns,
            **self._dtypes(dtype), WIDE=is_wide(known[a], known["weight"], known[c], known.get("bias")), **tile.blocks, warps=tile.warps,
            stages=tile.stages,
        )  # fmt: skip


# ---------------------------------------------------------------------------------------------- batched matmul


class BatchedMatmulForward(Product):
    """How `batched_matmul` is launched forward."""

    name = "batched_matmul"
    inputs = (Tensor("a", "..., M, K"), Tensor("b", "..., K, N"))
    outputs = (Tensor("y", "..., M, N"),)

    def _check_dtypes(self, given: Mapping[str, Given]) -> None:
        super()._check_dtypes(given)
        a, b = meta_of(given, "a"), meta_of(given, "b")
        if a.dtype != b.dtype:
            raise TypeError(f"{self.name}: `b` is {b.dtype}, `a` is {a.dtype}; they are multiplied in one dtype")

    def lower(self, given: Mapping[str, Given], outputs: Mapping[str, Meta]) -> Sequence[Launch]:
        return [self._product({**given, **outputs}, "a", "b", "y", False, False)]

    def _product(self, known: Mapping[str, Given], a: str, b: str, c: str, turn_a: bool, turn_b: bool) -> Launch:
        """c = a @ b, with a or b transposed."""
        sizes, batches = self.merged("...", (a, b, c), known, 2)
        strides, shapes = {}, {}
        for name, turned in ((a, turn_a), (b, turn_b), (c, False)):
            meta = meta_of(known, name)
            order = -1 if turned else 1
            strides[name], shapes[name] = (*batches[name], *meta.strides[-2:][::order]), meta.shape[-2:][::order]
        (rows, inner), columns, dtype = shapes[a], shapes[b][1], meta_of(known, a).dtype
        batch = math.prod(sizes)
        tile = Tile.of(rows, columns, inner, dtype, batch)
        return self.launch(
            batched_product, batch * tile.tiles(rows, columns), a_ptr=a, a_strides=strides[a], b_ptr=b, b_strides=strides[b],
            c_ptr=c, c_strides=strides[c], n_inner_batch=sizes[1], n_rows=rows, n_inner=inner, n_columns=columns,
            **self._dtypes(dtype), WIDE=is_wide(known[a], known[b], known[c]),
            **tile.blocks, warps=tile.warps, stages=tile.stages,
        )  # fmt: skip


# ---------------------------------------------------------------------------------------------- embedding


class EmbeddingForward(Rows):
    """How `embedding` is launched forward."""

    name = "embedding"
    inputs = (Tensor("idx", "...", "int", broadcast=False, indexes="V"),)
    params = (Tensor("weight", "V, D"),)
    outputs = (Tensor("y", "..., D"),)

    def lower(self, given: Mapping[str, Given], outputs: Mapping[str, Meta]) -> Sequence[Launch]:
        known = {**given, **outputs}
        row_sizes, steps, rows = self._rows(known, "idx", "y")
        weight = meta_of(given, "weight")
        values, columns = weight.shape
        block_n = min(256, power(columns))
        block_m = max(1, 1024 // block_n)
        return [
            self.launch(
                rows_by_index, (cdiv(rows, block_m), cdiv(columns, block_n)), idx_ptr="idx", idx_strides=steps["idx"],
                weight_ptr="weight", weight_strides=(*weight.strides, 0, 0), y_ptr="y", y_strides=steps["y"],
                row_sizes=row_sizes, n_rows=rows, n_values=values, n_columns=columns,
                WIDE=is_wide(known["idx"], known["y"], weight), BLOCK_M=block_m, BLOCK_N=block_n,
            )
        ]  # fmt: skip
