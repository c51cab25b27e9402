"""What kernels of rows call: tiles of rows and columns, the ends of reductions, and sums over the rows.

A program has BLOCK_K rows and walks over them BLOCK_R elements at a time; where a row fits in one tile (not LOOP) each walk is
one step, the compiler sees that its loads are those of the walk before, and the row is read once. What is summed over the rows
of wide rows is summed by programs that have BLOCK_R columns of many rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .kernels import lanes
from .math import INTERPRETED, divide, exp, isinf, log, maximum


@triton.jit
def start(WIDE: tl.constexpr, BLOCK_K: tl.constexpr):
    """The first row of this program."""
    pid = tl.program_id(0)
    if WIDE:
        pid = pid.to(tl.int64)
    return pid * BLOCK_K


@triton.jit
def tile(first, n_kept, WIDE: tl.constexpr, BLOCK_K: tl.constexpr):
    """The rows of this step as a column [BLOCK_K, 1], and which of them exist."""
    k = first + tl.arange(0, BLOCK_K)[:, None]
    if WIDE:
        k = k.to(tl.int64)
    return k, k < n_kept


@triton.jit
def places(k, sizes):
    """The place of each row in each of the four dims. Divisions, for there is one of each a row; of them the compiler sees which
    rows lie side by side."""
    if sizes is None:
        return k
    else:
        return (
            k // sizes[2] // sizes[1] // sizes[0],
            k // sizes[2] // sizes[1] % sizes[0],
            k // sizes[2] % sizes[1],
            k % sizes[2],
        )


@triton.jit
def columns(n_reduced, LOOP: tl.constexpr, BLOCK_R: tl.constexpr):
    """How far a walk over a row goes: one step, known at compile time, where the row fits in a tile."""
    if LOOP:
        return n_reduced
    else:
        return BLOCK_R


@triton.jit
def last_step(n_reduced, LOOP: tl.constexpr, BLOCK_R: tl.constexpr):
    """Where the last step over a row begins: a walk from its end begins there."""
    if LOOP:
        return (n_reduced - 1) // BLOCK_R * BLOCK_R
    else:
        return 0


@triton.jit
def column_share(n_reduced, span, LOOP: tl.constexpr, BLOCK_R: tl.constexpr):
    """First and last element of this program's share of a row; all of it where it fits in a tile."""
    if LOOP:
        first = tl.program_id(1) * span
        return first, tl.minimum(first + span, n_reduced)
    else:
        return 0, BLOCK_R


@triton.jit
def column_tile(first, n_reduced, WIDE: tl.constexpr, RAGGED: tl.constexpr, BLOCK_R: tl.constexpr):
    """The elements of this step as a row [1, BLOCK_R], and which of them exist."""
    r = first + lanes(BLOCK_R, RAGGED)
    if WIDE:
        r = r.to(tl.int64)
    else:
        r, n_reduced = r.to(tl.int32), n_reduced.to(tl.int32)  # a comparison in 64 bits is two
    return r[None, :], r[None, :] < n_reduced


@triton.jit
def own_columns(start, n_reduced, WIDE: tl.constexpr, RAGGED: tl.constexpr, LOOP: tl.constexpr, BLOCK_R: tl.constexpr):
    """The elements of this step. Where it is one step: those of this program, for some columns alone can be summed."""
    if LOOP:
        return column_tile(start, n_reduced, WIDE, RAGGED, BLOCK_R)
    else:
        return column_tile(tl.program_id(1) * BLOCK_R, n_reduced, WIDE, RAGGED, BLOCK_R)


@triton.jit
def take(row, index, stride, size, mask, COMPUTE: tl.constexpr):
    """The element of a row at an index; NaN where the index is out of range, so that no neighbour's row is read."""
    index = index + tl.zeros([1], tl.int64)  # one that all rows share may be a constant
    there = mask & (index >= 0) & (index < size)
    return tl.load(row + index * stride, mask=there, other=float("nan")).to(COMPUTE)


@triton.jit
def shifted(row, at, strides, n_reduced, mask, fill, COMPUTE: tl.constexpr):
    """The elements of a row at shifted columns; `fill` where the row has none."""
    there = mask & (at >= 0) & (at < n_reduced)
    if strides is None:
        value = tl.load(row + at, mask=there)
    else:  # a row of one axis has one stride
        value = tl.load(row + at * strides[0], mask=there)
    return tl.where(there, value.to(COMPUTE), fill)


# ---------------------------------------------------------------------------------------------- ends of reductions


@triton.jit
def total(acc):
    """[BLOCK_K, BLOCK_R] -> [BLOCK_K, 1]."""
    return tl.sum(acc, axis=1, keep_dims=True)


@triton.jit
def mean(acc, n_reduced):
    """[BLOCK_K, BLOCK_R] -> [BLOCK_K, 1], rounded once: of equal elements it is that element, if their sum is exact."""
    return divide(total(acc), tl.full([1, 1], n_reduced, acc.dtype))


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _times(a, b):
    return a * b


@triton.jit
def largest(acc):
    """The largest; NaN where there is one, which `tl.max` would drop on a GPU."""
    if acc.dtype.is_int():
        return tl.max(acc, axis=1, keep_dims=True)
    elif INTERPRETED:  # it reduces by functions of its own one by one
        nan = tl.max((acc != acc).to(tl.int32), axis=1, keep_dims=True)
        return tl.where(nan > 0, float("nan"), tl.max(acc, axis=1, keep_dims=True))
    else:
        return tl.reduce(acc, 1, _larger, keep_dims=True)


@triton.jit
def smallest(acc):
    """The smallest; NaN where there is one."""
    if acc.dtype.is_int():
        return tl.min(acc, axis=1, keep_dims=True)
    elif INTERPRETED:
        nan = tl.max((acc != acc).to(tl.int32), axis=1, keep_dims=True)
        return tl.where(nan > 0, float("nan"), tl.min(acc, axis=1, keep_dims=True))
    else:
        return tl.reduce(acc, 1, _smaller, keep_dims=True)


# ---------------------------------------------------------------------------------------------- sums of exponentials
# Beside a sum stands the largest value so far, which was taken out of every exponent, so that in one pass nothing overflows.
# Where a row is walked over in steps there are LANES of them, one a thread (of warps of 32), which waits for no other until the end.


@triton.jit
def no_exponentials(COMPUTE: tl.constexpr, BLOCK_K: tl.constexpr, LANES: tl.constexpr):
    """What sums begin with, [BLOCK_K * LANES, 1]: the largest, and the sum."""
    top = tl.full([BLOCK_K * LANES, 1], float("-inf"), COMPUTE)
    return top, tl.zeros([BLOCK_K * LANES, 1], COMPUTE)


@triton.jit
def in_lanes(value, LANES: tl.constexpr, GROUP: tl.constexpr):
    """[BLOCK_K, BLOCK_R] -> [BLOCK_K * LANES, BLOCK_R // LANES]: the elements of a lane as a row. GROUP of them are neighbours, for
    that many a thread loads at once."""
    if LANES == 1:
        return value
    else:
        rounds: tl.constexpr = value.shape[1] // (LANES * GROUP)
        parts = tl.permute(tl.reshape(value, [value.shape[0], rounds, LANES, GROUP]), (0, 2, 1, 3))
        return tl.reshape(parts, [value.shape[0] * LANES, rounds * GROUP])


@triton.jit
def exponentials(top, acc, value, mask, LANES: tl.constexpr, GROUP: tl.constexpr):
    """Takes a tile into the sums. What is raised is a difference: a product less a product would lose all digits of large values."""
    value = in_lanes(tl.where(mask, value, float("-inf")), LANES, GROUP)
    larger = maximum(top, largest(value))
    return larger, acc * fall(top, larger) + total(raised(value - tl.where(isinf(larger), 0.0, larger)))


@triton.jit
def raised(x):
    """exp(x) for x <= 0 in a sum whose largest term is 1: in f32 one `exp2`."""
    if x.dtype == tl.float64:
        return exp(x)
    else:
        return tl.exp2(x * 1.4426950408889634)


@triton.jit
def fall(top, larger):
    """What a sum beside `top` is multiplied by to stand beside a `larger`."""
    same = (top == larger) | isinf(larger)  # an infinity less itself would be NaN, as would 0 times one
    return raised(tl.where(same, 0.0, top - larger))


@triton.jit
def together(top, acc, LANES: tl.constexpr):
    """The largest and the sum of whole rows, [BLOCK_K, 1] each."""
    if LANES == 1:
        return top, acc
    else:
        top = tl.reshape(top, [top.shape[0] // LANES, LANES])
        larger = largest(top)
        return larger, total(tl.reshape(acc, [top.shape[0], LANES]) * fall(top, larger))


@triton.jit
def logarithm(top, acc, LANES: tl.constexpr):
    """The logarithm of the sum of exponentials of which the largest was taken out, [BLOCK_K, 1]."""
    top, acc = together(top, acc, LANES)
    return log(acc) + tl.where(isinf(top), 0.0, top)


@triton.jit
def logarithm_beside_largest(top, acc, LANES: tl.constexpr):
    """The largest, and the logarithm of the sum beside it; an infinity less itself is no number."""
    top, acc = together(top, acc, LANES)
    return top, tl.where(isinf(top), float("nan"), log(acc))


@triton.jit
def beside_largest(
    top, acc, value, mask, LOOP: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr
):
    """`exponentials`. Where a row is one tile they are those that the pass after this one needs again: the compiler has them once."""
    if LOOP:
        return exponentials(top, acc, value, mask, LANES, GROUP)
    else:
        larger = largest(tl.where(mask, value, float("-inf")))
        return larger, total(tl.where(mask, exp(value - larger, HALF), 0.0))


@triton.jit
def sum_beside_largest(top, acc, LANES: tl.constexpr):
    """The largest, and the sum of exp(value - largest); an infinity less itself is no number."""
    top, acc = together(top, acc, LANES)
    return top, tl.where(isinf(top), float("nan"), acc)


@triton.jit
def product(acc):
    """The product."""
    return tl.reduce(acc, 1, _times, keep_dims=True)


@triton.jit
def holds(acc):
    """Whether one of them holds."""
    return tl.max(acc.to(tl.int32), axis=1, keep_dims=True) > 0


# ---------------------------------------------------------------------------------------------- scans
# Each takes a tile and what the steps before it came to, [BLOCK_K, 1], and returns the tile's part of the scan and what
# the next step goes on from. What came before joins the first element: a NaN reaches what follows it and nothing else.


@triton.jit
def _first(value, REVERSE: tl.constexpr):
    """[1, BLOCK_R]: whether a scan begins at this column of the tile."""
    columns: tl.constexpr = value.shape[1]
    return tl.arange(0, columns)[None, :] == (columns - 1 if REVERSE else 0)


@triton.jit
def _begun(value, first, REVERSE: tl.constexpr):
    """The tile with another first element."""
    return tl.where(_first(value, REVERSE), first, value)


@triton.jit
def _end(scanned, REVERSE: tl.constexpr):
    """The element that a scan comes to last, [BLOCK_K, 1]."""
    return tl.sum(tl.where(_first(scanned, not REVERSE), scanned, 0), axis=1, keep_dims=True)


@triton.jit
def _before(value, by, REVERSE: tl.constexpr):
    """Each element's `by`-th predecessor, and whether it has one; for the interpreter, which scans by functions of its own one
    by one."""
    columns: tl.constexpr = value.shape[1]
    column = tl.arange(0, columns)[None, :] + tl.zeros_like(value).to(tl.int32)
    source = column + by if REVERSE else column - by
    there = (source >= 0) & (source < columns)
    return tl.gather(value, tl.where(there, source, 0), 1), there


@triton.jit
def _add_before(sum_a, before_a, sum_b, before_b):
    return sum_a + sum_b, sum_a + before_b


@triton.jit
def _multiply_before(product_a, before_a, product_b, before_b):
    return product_a * product_b, product_a * before_b


@triton.jit
def _follow(factor_a, state_a, factor_b, state_b):
    return factor_a * factor_b, factor_b * state_a + state_b


@triton.jit
def running_sum(value, carry, mask, LOOP: tl.constexpr, REVERSE: tl.constexpr = False, EXCLUSIVE: tl.constexpr = False):
    """The sum of all elements up to each; EXCLUSIVE: of all before it."""
    value = tl.where(mask, value, 0)
    if LOOP:
        value = _begun(value, carry + value, REVERSE)
    if not EXCLUSIVE:
        through = tl.cumsum(value, axis=1, reverse=REVERSE)
        out = through
    elif INTERPRETED:
        through = tl.cumsum(value, axis=1, reverse=REVERSE)
        before, there = _before(through, 1, REVERSE)
        out = tl.where(there, before, carry)
    else:
        before = _begun(tl.zeros_like(value), carry, REVERSE)
        through, out = tl.associative_scan((value, before), 1, _add_before, reverse=REVERSE)
    if LOOP:
        carry = _end(through, REVERSE)
    return out, carry


@triton.jit
def running_product(
    value, carry, mask, LOOP: tl.constexpr, REVERSE: tl.constexpr = False, EXCLUSIVE: tl.constexpr = False
):
    """The product of all elements up to each; EXCLUSIVE: of all before it."""
    value = tl.where(mask, value, 1)
    if LOOP:
        value = _begun(value, carry * value, REVERSE)
    if not EXCLUSIVE:
        through = tl.cumprod(value, axis=1, reverse=REVERSE)
        out = through
    elif INTERPRETED:
        through = tl.cumprod(value, axis=1, reverse=REVERSE)
        before, there = _before(through, 1, REVERSE)
        out = tl.where(there, before, carry)
    else:
        before = _begun(tl.full(value.shape, 1, value.dtype), carry, REVERSE)
        through, out = tl.associative_scan((value, before), 1, _multiply_before, reverse=REVERSE)
    if LOOP:
        carry = _end(through, REVERSE)
    return out, carry


@triton.jit
def recurrence(a, b, carry, mask, LOOP: tl.constexpr, REVERSE: tl.constexpr = False):
    """b plus a times what it came to before, which is 0 at first."""
    factor, state = tl.where(mask, a, 1).to(carry.dtype), tl.where(mask, b, 0).to(carry.dtype)
    state = _begun(state, factor * carry + state, REVERSE)
    if INTERPRETED:
        step = 1
        while step < state.shape[1]:
            before, there = _before(state, step, REVERSE)
            state = tl.where(there, factor * before + state, state)
            before, there = _before(factor, step, REVERSE)
            factor = tl.where(there, before * factor, factor)
            step *= 2
    else:
        factor, state = tl.associative_scan((factor, state), 1, _follow, reverse=REVERSE)
    if LOOP:
        carry = _end(state, REVERSE)
    return state, carry


# ---------------------------------------------------------------------------------------------- sums over the rows


@triton.jit
def share(n_kept, span, WIDE: tl.constexpr):
    """First and last row of this program."""
    first = tl.program_id(0) * span
    last = tl.minimum(first + span, n_kept)
    if WIDE:
        return first, last
    else:
        return first.to(tl.int32), last.to(tl.int32)


@triton.jit
def add_columns(acc, value, mask, part_ptr, r, within, again, n_reduced, LOOP: tl.constexpr):
    """Takes a tile into the sum over the rows: in registers, or where a row is no single tile in the program's own part of
    memory, so that no two programs meet. `again` says that the part has been begun."""
    if part_ptr is None:
        return acc
    elif LOOP:
        at = part_ptr + tl.program_id(0) * n_reduced + r
        part = tl.sum(tl.where(mask, value, 0.0), axis=0, keep_dims=True)
        tl.debug_barrier()  # other lanes of this program wrote it
        part += tl.where(again, tl.load(at, mask=within, other=0.0), 0.0)
        tl.store(at, part, mask=within)
        return acc
    else:
        return acc + tl.where(mask, value, 0.0)


@triton.jit
def store_columns(acc, part_ptr, n_reduced, WIDE: tl.constexpr, LOOP: tl.constexpr, BLOCK_R: tl.constexpr):
    """Writes the program's part of a sum over the rows, unless it is there already."""
    if part_ptr is not None:
        if not LOOP:
            r, within = own_columns(0, n_reduced, WIDE, False, LOOP, BLOCK_R)
            tl.store(part_ptr + tl.program_id(0) * n_reduced + r, tl.sum(acc, axis=0, keep_dims=True), mask=within)
