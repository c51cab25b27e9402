"""Products of matrices and lookups of rows with their gradients: what `linalg` calls in a package for training.

Sums over rows are shared by several programs where tiles are few. Each writes its part, and the parts are added up in the order of
the programs, without atomics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import triton
import triton.language as tl

from . import linalg_forward as forward
from .custom import Scratch
from .elementwise import triton_dtype
from .linalg_forward import grouped, indices, narrowed, place, rows_at
from .plan import Given, Launch, Meta, cdiv
from .sums import add_up

CHUNK = 512
"""Indices that a program of a lookup's backward looks through at a time."""


# ---------------------------------------------------------------------------------------------- kernels


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


# ---------------------------------------------------------------------------------------------- sums over rows


def _shares(count: int, programs: int, wanted: int, step: int, least: int) -> tuple[int, int]:
    """How many programs share a sum over `count`, and how much of it each has: whole steps, and `least` of them at least."""
    parts = max(1, min(cdiv(wanted, programs), count // (step * least), 65535))
    span = max(1, cdiv(cdiv(count, parts), step)) * step
    return max(1, cdiv(count, span)), span


def _added_up(name: str, first: Launch, parts: int, count: int, acc: str, wide: bool) -> list[Launch]:
    """A launch whose programs have parts of a sum, and where there are several, the one that adds them up."""
    if parts == 1:
        return [first]
    return [first, add_up(name, f"{name}_part", parts, count, {"COMPUTE": triton_dtype(acc), "WIDE": wide})]


def _into(name: str, parts: int, acc: str, shape: tuple[int, ...]) -> str | Scratch:
    """Where a sum goes: to its tensor, or in parts."""
    return name if parts == 1 else Scratch(f"{name}_part", acc, (parts, *shape))


# ---------------------------------------------------------------------------------------------- ops


class Linear(forward.LinearForward):
    """How `linear` is launched."""

    gradients = ("x", "weight", "bias")
    residuals = ("x", "weight")

    def lower_backward_source(
        self, given: Mapping[str, Given], grads: Mapping[str, Meta], multiprocessors: int
    ) -> Sequence[Launch]:
        known = {**given, **grads}
        weight = forward.meta_of(given, "weight")
        out: list[Launch] = []
        if "dx" in grads:
            out.append(self._by_matrix(known, "dy", "dx", weight.strides, weight.shape, None))
        if "dweight" in grads:
            out += self._over_rows(known, multiprocessors)
        if "dbias" in grads:
            out += self._summed(known, multiprocessors)
        return out

    def _over_rows(self, known: Mapping[str, Given], multiprocessors: int) -> list[Launch]:
        """dweight[o, i] = the sum over rows of dy[m, o] * x[m, i]: over shares of the rows where tiles are few."""
        row_sizes, steps, rows = self._rows(known, "dy", "x")
        first, second = shape = forward.meta_of(known, "weight").shape
        dtype = forward.meta_of(known, "dy").dtype
        acc, tile = forward.accumulated(dtype), forward.Tile.of(first, second, rows, dtype)
        wide = forward.is_wide(known["dy"], known["x"], known["weight"])
        tiles = tile.tiles(first, second)
        parts, span = _shares(rows, tiles, 2 * multiprocessors, tile.k, 8)
        launch = self.launch(
            product_over_rows, (tiles, parts), a_ptr="dy", a_strides=steps["dy"], b_ptr="x", b_strides=steps["x"],
            total_ptr=_into("dweight", parts, acc, shape), row_sizes=row_sizes, n_rows=rows, n_first=first, n_second=second,
            span=span, **self._dtypes(dtype), WIDE=wide, **tile.blocks, warps=tile.warps, stages=tile.stages,
        )  # fmt: skip
        return _added_up("dweight", launch, parts, first * second, acc, wide)

    def _summed(self, known: Mapping[str, Given], multiprocessors: int) -> list[Launch]:
        """dbias[o] = the sum over rows of dy[m, o]."""
        row_sizes, steps, rows = self._rows(known, "dy")
        dy = forward.meta_of(known, "dy")
        columns, acc, wide = dy.shape[-1], forward.accumulated(dy.dtype), forward.is_wide(dy)
        programs = cdiv(columns, 64)
        parts, span = _shares(rows, programs, 4 * multiprocessors, 32, 4)
        launch = self.launch(
            sum_over_rows, (programs, parts), a_ptr="dy", a_strides=steps["dy"],
            total_ptr=_into("dbias", parts, acc, (columns,)), row_sizes=row_sizes, n_rows=rows, n_columns=columns, span=span,
            ACC=triton_dtype(acc), WIDE=wide, BLOCK_M=32, BLOCK_N=64,
        )  # fmt: skip
        return _added_up("dbias", launch, parts, columns, acc, wide)


class BatchedMatmul(forward.BatchedMatmulForward):
    """How `batched_matmul` is launched."""

    gradients = ("a", "b")
    residuals = ("a", "b")

    def lower_backward_source(
        self, given: Mapping[str, Given], grads: Mapping[str, Meta], multiprocessors: int
    ) -> Sequence[Launch]:
        known = {**given, **grads}
        out = [self._product(known, "dy", "b", "da", False, True)] if "da" in grads else []
        return out + ([self._product(known, "a", "dy", "db", True, False)] if "db" in grads else [])


class Embedding(forward.EmbeddingForward):
    """How `embedding` is launched."""

    gradients = ("weight",)
    residuals = ("idx",)

    def lower_backward_source(
        self, given: Mapping[str, Given], grads: Mapping[str, Meta], multiprocessors: int
    ) -> Sequence[Launch]:
        row_sizes, steps, rows = self._rows(given, "idx", "dy")
        values, columns = shape = grads["dweight"].shape
        acc, wide = forward.accumulated(forward.meta_of(given, "dy").dtype), forward.is_wide(
            given["idx"], given["dy"], grads["dweight"]
        )
        block_n = min(64, forward.power(columns))
        tiles = cdiv(values, 16), cdiv(columns, block_n)
        parts, span = _shares(rows, math.prod(tiles), 4 * multiprocessors, CHUNK, 1)
        launch = self.launch(
            sum_by_index, (*tiles, parts), idx_ptr="idx", idx_strides=steps["idx"], dy_ptr="dy", dy_strides=steps["dy"],
            total_ptr=_into("dweight", parts, acc, shape), row_sizes=row_sizes, n_rows=rows, n_values=values,
            n_columns=columns, span=span, ACC=triton_dtype(acc), WIDE=wide, CHUNK=CHUNK, BLOCK_V=16, BLOCK_M=16, BLOCK_N=block_n,
        )  # fmt: skip
        return _added_up("dweight", launch, parts, values * columns, acc, wide)
