"""What kernels of steps call: a tile of one of many tensors, the addresses of that tensor, its numbers; and the norm of all
gradients.

`table` has a row of 64-bit words a tensor: how many elements it has, its first tile, whether all its addresses are those of
vectors, where its numbers begin; then the addresses, that of its copy first. `work` has the row of each tile: a tensor's tiles
follow one another, and none has a part of two tensors.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .kernels import scalar

OWN = tl.constexpr(4)
"""The words of a row before the addresses."""


@triton.jit
def tile(work_ptr, table_ptr, found_inf_ptr, ADDRESSES: tl.constexpr, BLOCK: tl.constexpr):
    """This program's row of the table, the first element of its tile, and how many it has.

    Where an infinity was found no tile has any element.
    """
    pid = tl.program_id(0)
    row_ptr = table_ptr + tl.load(work_ptr + pid) * (OWN + ADDRESSES)
    start = (pid - tl.load(row_ptr + 1)) * BLOCK
    count = tl.minimum(tl.load(row_ptr) - start, BLOCK)
    if found_inf_ptr is not None:
        count = tl.where(tl.load(found_inf_ptr) != 0, 0, count)
    return row_ptr, start, count


@triton.jit
def whole(row_ptr, n, BLOCK: tl.constexpr):
    """Whether a tile of n elements is one of vectors: aligned, and no lane masked."""
    return (n == BLOCK) & (tl.load(row_ptr + 2) != 0)


@triton.jit
def address(row_ptr, k: tl.constexpr, start, DTYPES: tl.constexpr, ALIGNED: tl.constexpr):
    """Where element `start` of a tensor lies; `k` counts the addresses of a row, whose tensors have these dtypes."""
    ptr = tl.load(row_ptr + OWN + k).to(tl.pointer_type(DTYPES[k]))
    if ALIGNED:
        ptr = tl.multiple_of(ptr, 16)
    return ptr + start


@triton.jit
def own(row_ptr, numbers_ptr):
    """Where the numbers of this program's tensor begin."""
    return numbers_ptr + tl.load(row_ptr + 3)


@triton.jit
def number(numbers_ptr, k: tl.constexpr, COMPUTE: tl.constexpr):
    """A host number in the compute dtype."""
    return scalar(tl.load(numbers_ptr + k), COMPUTE)


@triton.jit
def scaled(x, scale_ptr):
    """x times the number on the device, if there is one."""
    if scale_ptr is None:
        return x
    else:
        return x * scalar(tl.load(scale_ptr), x.dtype)


@triton.jit
def square_sum(
    row_ptr, k: tl.constexpr, start, i, mask, DTYPES: tl.constexpr, COMPUTE: tl.constexpr, ALIGNED: tl.constexpr
):
    """The sum of the squares of a tile; of a masked one, lanes beyond it are 0."""
    ptr = address(row_ptr, k, start, DTYPES, ALIGNED) + i
    if mask is None:
        x = tl.load(ptr).to(COMPUTE)
    else:
        x = tl.load(ptr, mask=mask, other=0.0).to(COMPUTE)
    return tl.sum(x * x)


@triton.jit
def square_sums(
    work_ptr,
    table_ptr,
    part_ptr,
    k: tl.constexpr,
    ADDRESSES: tl.constexpr,
    DTYPES: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """part[p] = the sum of the squares of tile p of the tensors whose addresses are the `k`-th of their rows."""
    row_ptr, start, n = tile(work_ptr, table_ptr, None, ADDRESSES, BLOCK)
    i = tl.arange(0, BLOCK)
    if whole(row_ptr, n, BLOCK):
        total = square_sum(row_ptr, k, start, i, None, DTYPES, COMPUTE, True)
    else:
        total = square_sum(row_ptr, k, start, i, i < n, DTYPES, COMPUTE, False)
    tl.store(part_ptr + tl.program_id(0), total)


@triton.jit
def clip_factor(part_ptr, limit_ptr, unscale_ptr, norm_ptr, factor_ptr, n_parts: tl.int64, BLOCK: tl.constexpr):
    """norm = the root of all parts, added up in the order of the tiles; factor = what the gradients are to be multiplied by, so
    that their norm is the limit at most. `unscale` is a factor that the gradients have in them, and that both take out.
    """
    k = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, n_parts, BLOCK):
        total += tl.load(part_ptr + start + k, mask=start + k < n_parts, other=0.0)
    norm = tl.sqrt(tl.sum(total))
    scale = tl.full([], 1.0, tl.float64)
    if unscale_ptr is not None:
        scale = tl.load(unscale_ptr).to(tl.float64)
    norm = norm / scale
    factor = tl.load(limit_ptr) / (norm + 1e-6)
    tl.store(norm_ptr, norm)
    tl.store(factor_ptr, tl.where(factor > 1.0, 1.0, factor) / scale)
