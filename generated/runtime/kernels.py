"""What the kernels of all ops call: tiles, coordinates, offsets, scalars.

`sizes` are the extents of merged dims 1 to 3 and then their inverses, `strides` those of dims 0 to 3, in elements; absent
dims have extent 1. RAGGED says that rows hold no whole number of vectors.
A tensor that is dense in the order of iteration has `strides` None: it is read at the linear index.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import layout

SIDE = tl.constexpr(layout.SIDE)
"""The width of a patch: the host counts programs by it."""
VECTOR = tl.constexpr(layout.VECTOR)


@triton.jit
def scalar(value, COMPUTE: tl.constexpr):
    """A host number in the compute dtype.

    Of one element and one dim: Triton's interpreter forgets that a comparison of values without dims is a truth value.
    """
    return tl.full([1], value, COMPUTE)


@triton.jit
def largest(ptr, COMPUTE: tl.constexpr):
    """The largest finite number of the dtype that a tensor is stored in."""
    if ptr.dtype.element_ty == tl.float16:
        return tl.full([1], 65504.0, COMPUTE)
    elif ptr.dtype.element_ty == tl.bfloat16:
        return tl.full([1], 3.3895313892515355e38, COMPUTE)
    elif ptr.dtype.element_ty == tl.float32:
        return tl.full([1], 3.4028234663852886e38, COMPUTE)
    else:
        return tl.full([1], 1.7976931348623157e308, COMPUTE)


@triton.jit
def lanes(BLOCK: tl.constexpr, RAGGED: tl.constexpr):
    """0 to BLOCK - 1. RAGGED: one element at a time, lane by lane, for a vector would straddle the end of a row.

    The compiler takes vectors apart where their mask may cut them, and then each lane steps over its neighbours' elements.
    """
    k = tl.arange(0, BLOCK)
    if RAGGED:
        k = tl.max_contiguous(k, 1)
    return k


@triton.jit
def tile(n, patch_sizes, WIDE: tl.constexpr, RAGGED: tl.constexpr, BLOCK: tl.constexpr):
    """The linear indices of this program, and which of them exist: BLOCK in a row, or a square patch.

    A patch serves tensors whose memory runs along different dims: each is read in whole sectors. `patch_sizes` are the
    extents of the dim along which another tensor is dense, of what lies between, and of the last dim.
    """
    pid = tl.program_id(0)
    if WIDE:
        pid = pid.to(tl.int64)
    k = lanes(BLOCK, RAGGED)
    if patch_sizes is None:
        i = pid * BLOCK + k
        return i, i < n
    else:
        rows, between, columns = patch_sizes
        across, down = tl.cdiv(columns, SIDE), tl.cdiv(rows, BLOCK // SIDE)
        column = pid % across * SIDE + k % SIDE
        pid = pid // across
        row = pid % down * (BLOCK // SIDE) + k // SIDE
        pid = pid // down
        i = ((pid // between * rows + row) * between + pid % between) * columns + column
        return i, (row < rows) & (column < columns)


@triton.jit
def divided(i, size, inverse, RAGGED: tl.constexpr):
    """Quotient and rest of i / size; an extent of 1 is a constant, and divides nothing.

    By the extent's inverse, for a division costs some 20 instructions (Granlund and Montgomery, 1994); below 2**31.
    """
    if isinstance(size, tl.tensor):
        if i.dtype == tl.int64:
            q = i // size
        else:
            multiplier, shift = (inverse >> 5).to(tl.uint32), (inverse & 31).to(tl.uint32)
            q = tl.umulhi(i.to(tl.uint32) * 2, multiplier) >> shift
        if not RAGGED:  # whole vectors lie in one row: the compiler does not see it through a product
            if len(i.shape) == 1:
                q = tl.max_constancy(q, VECTOR)
            elif i.shape[1] >= VECTOR:
                q = tl.max_constancy(q, [1, VECTOR])
        q = q.to(i.dtype)
        return q, i - q * size
    else:
        return i, tl.zeros_like(i)


@triton.jit
def coordinates(i, sizes, RAGGED: tl.constexpr):
    """The place of linear index `i` in each of the four dims; where all tensors are dense nothing asks for it."""
    if sizes is None:
        return i
    else:
        i, fourth = divided(i, sizes[2], sizes[5], RAGGED)
        i, third = divided(i, sizes[1], sizes[4], RAGGED)
        first, second = divided(i, sizes[0], sizes[3], RAGGED)
        return first, second, third, fourth


@triton.jit
def offset(i, at, strides):
    """Where a tensor of these strides keeps the element of linear index `i` and coordinates `at`."""
    if strides is None:
        return i
    else:
        return at[0] * strides[0] + at[1] * strides[1] + at[2] * strides[2] + at[3] * strides[3]
