"""What kernels call whose gradients are summed over what was broadcast: tiles of kept and reduced indices, and the second
stage of the sums.

A program sums its share of the reduced indices for a tile of kept ones; `sum_partials` adds up the shares, always in the
same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

from .kernels import coordinates, lanes, offset, tile
from .plan import WARPS, Kernel, Launch, cdiv


@triton.jit
def kept_tile(
    n_kept, patch_sizes, WIDE: tl.constexpr, RAGGED: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr
):
    """The kept indices of this program, and which of them exist: a row [1, BLOCK_K] beside a column of reduced ones.

    Where one of the two is single all is of one dim: with two, the loads of one tile would get different layouts.
    """
    k, exists = tile(n_kept, patch_sizes, WIDE, RAGGED, BLOCK_K)
    if BLOCK_K == 1 or BLOCK_R == 1:
        return k, exists
    else:
        return k[None, :], exists[None, :]


@triton.jit
def share(n_reduced, reduced_strides, span, WIDE: tl.constexpr):
    """First and last reduced index of this program. Where nothing is reduced: one step, a loop that compiles away."""
    if reduced_strides is None:
        return 0, 1
    else:
        first = tl.program_id(1) * span
        last = tl.minimum(first + span, n_reduced)
        if WIDE:
            return first, last
        else:
            return first.to(tl.int32), last.to(tl.int32)  # 64-bit division is slow


@triton.jit
def reduced_tile(
    start, n_reduced, WIDE: tl.constexpr, RAGGED: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr
):
    """The reduced indices of this step, and which of them exist: a column [BLOCK_R, 1] beside a row of kept ones."""
    r = start + lanes(BLOCK_R, RAGGED)
    if WIDE:
        r = r.to(tl.int64)
    if BLOCK_K == 1 or BLOCK_R == 1:
        return r, r < n_reduced
    else:
        return r[:, None], r[:, None] < n_reduced


@triton.jit
def element(k, r, kept_sizes, kept_strides, reduced_sizes, reduced_strides, RAGGED: tl.constexpr):
    """The linear indices of a tile of kept and reduced indices. In two dims memory runs along the kept ones."""
    kept = offset(k, coordinates(k, kept_sizes, RAGGED), kept_strides)
    if len(r.shape) == 1:
        return kept + offset(r, coordinates(r, reduced_sizes, RAGGED), reduced_strides)
    else:
        return kept + offset(r, coordinates(r, reduced_sizes, True), reduced_strides)


@triton.jit
def zeros(COMPUTE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr):
    """A sum for each element of a tile: they are added up at the end."""
    if BLOCK_K == 1 or BLOCK_R == 1:
        return tl.zeros([BLOCK_K * BLOCK_R], COMPUTE)
    else:
        return tl.zeros([BLOCK_R, BLOCK_K], COMPUTE)


@triton.jit
def added_up(sums, BLOCK_R: tl.constexpr):
    """The sums over the reduced indices of a tile, in the shape of its kept indices."""
    if BLOCK_R == 1:
        return sums
    else:
        return tl.sum(sums, axis=0, keep_dims=True)


@triton.jit
def sum_partials(
    part_ptr,
    total_ptr,
    n_parts: tl.int64,
    n_kept: tl.int64,
    COMPUTE: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """total[k] = the sum over p of part[p, k]: always in the same order."""
    k, exists = kept_tile(n_kept, None, WIDE, False, BLOCK_K, BLOCK_R)
    total = zeros(COMPUTE, BLOCK_K, BLOCK_R)
    for start in range(0, n_parts, BLOCK_R):
        p, within = reduced_tile(start, n_parts, WIDE, False, BLOCK_K, BLOCK_R)
        total += tl.load(part_ptr + p * n_kept + k, mask=within & exists, other=0.0)
    tl.store(total_ptr + k, added_up(total, BLOCK_R), mask=exists)


def add_up(name: str, parts_name: str, parts: int, n_kept: int, values: Mapping[str, Any]) -> Launch:
    """The launch that adds up what programs have of a sum, in the order of their numbers.

    Args:
        name: the sum, [n_kept], after a launch that writes `parts_name`, [parts, n_kept].
        values: `COMPUTE`, Triton's dtype of the parts, and `WIDE`, whether offsets are of 64 bits.
    """
    # Few sums are added up by one program each: in as few steps as can be, for each waits for its loads.
    block_k, block_r, warps = (32, 64, WARPS) if n_kept >= 64 else (1, 8192, 16)
    settings = {"n_parts": parts, "n_kept": n_kept, "COMPUTE": values["COMPUTE"], "WIDE": values["WIDE"], "BLOCK_K": block_k,
                "BLOCK_R": block_r}  # fmt: skip
    pointers = {"part_ptr": parts_name, "total_ptr": name}
    return Launch(Kernel.of(sum_partials), (cdiv(n_kept, block_k), 1, 1), pointers, settings, warps)
