"""Copies and sums of tensors of one shape, whatever their strides and dtypes: what a graph needs between its ops.

add(Meta("f32", ...), other, out)    # Launch: out = x + other, added in float32 or wider, rounded once
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import layout
from .elementwise import BLOCK, tiles, triton_dtype
from .kernels import coordinates, offset, tile
from .layout import Operand, Space
from .plan import Kernel, Launch, Meta, TooManyDims, cdiv

DEEP = 8
"""Dims that do not merge, of a copy at most."""


@triton.jit
def move(
    x_ptr, x_strides, other_ptr, other_strides, out_ptr, out_strides, sizes, patch_sizes, n: tl.int64, COMPUTE: tl.constexpr,
    WIDE: tl.constexpr, RAGGED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i, mask = tile(n, patch_sizes, WIDE, RAGGED, BLOCK)
    at = coordinates(i, sizes, RAGGED)
    value = tl.load(x_ptr + offset(i, at, x_strides), mask=mask).to(COMPUTE)
    if other_ptr is not None:
        value += tl.load(other_ptr + offset(i, at, other_strides), mask=mask).to(COMPUTE)
    tl.store(out_ptr + offset(i, at, out_strides), value.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def place(i, extents, steps):
    """Where a tensor of these strides keeps the element of linear index `i`."""
    at = i * 0
    for k in tl.static_range(7, -1, -1):
        at += i % extents[k] * steps[k]
        i = i // extents[k]
    return at


@triton.jit
def move_deep(
    x_ptr, x_steps, other_ptr, other_steps, out_ptr, out_steps, extents, n: tl.int64, COMPUTE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same over more dims, by divisions of 64 bits: rare, and slow."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    value = tl.load(x_ptr + place(i, extents, x_steps), mask=mask).to(COMPUTE)
    if other_ptr is not None:
        value += tl.load(other_ptr + place(i, extents, other_steps), mask=mask).to(COMPUTE)
    tl.store(out_ptr + place(i, extents, out_steps), value.to(out_ptr.dtype.element_ty), mask=mask)


def copy(x: Meta, out: Meta) -> Launch:
    """out = x, cast. Pointers: `x`, `out`. Raises TooManyDims."""
    return _launch({"x": x, "out": out}, x.dtype)


def add(x: Meta, other: Meta, out: Meta) -> Launch:
    """out = x + other, which `out` may be: each element is read before it is written. Pointers: `x`, `other`, `out`."""
    wide = "f64" if "f64" in (x.dtype, other.dtype, out.dtype) else "f32"
    return _launch({"x": x, "other": other, "out": out}, wide)


def _launch(metas: dict[str, Meta], compute: str) -> Launch:
    shape = metas["out"].shape
    axes = [("...", k - len(shape)) for k in range(len(shape))]
    operands = {n: Operand(n, dict(zip(axes, m.shape)), dict(zip(axes, m.strides))) for n, m in metas.items()}
    space = layout.iterate(axes, dict(zip(axes, shape)), [operands["out"], *operands.values()])
    number = triton_dtype({"f16": "f32", "bf16": "f32"}.get(compute, compute))
    values = {"n": space.count, "COMPUTE": number, "BLOCK": BLOCK}
    pointers = {f"{n}_ptr": n for n in metas}
    strided = {n for n, o in operands.items() if not _linear(o, space)}
    if strided and len(space.dims) > layout.RANK:
        if len(space.dims) > DEEP:
            raise TooManyDims(f"{len(space.dims)} dims that do not merge; a copy takes {DEEP}")
        more = {f"{n}_steps": _steps(operands.get(n), space) for n in ("x", "other", "out")}
        values |= {**more, "extents": (*(1,) * (DEEP - len(space.sizes)), *space.sizes)}
        return Launch(Kernel.of(move_deep), (cdiv(space.count, BLOCK), 1, 1), pointers, values)
    reach = max(
        [space.count, *(1 + sum((n - 1) * abs(o.strides[a]) for a, n in o.extents.items()) for o in operands.values())]
    )
    values |= {f"{n}_strides": space.strides(operands[n]) if n in strided else None for n in ("x", "other", "out")}
    patch, programs = tiles(space, list(operands.values()))
    values |= {
        "sizes": layout.divisors(space.sizes) if strided else None, "patch_sizes": patch, "RAGGED": space.ragged,
        "WIDE": reach + 2 * BLOCK >= 2**31,
    }  # fmt: skip
    return Launch(Kernel.of(move), (programs, 1, 1), pointers, values)


def _linear(operand: Operand, space: Space) -> bool:
    linear = space.linear()
    return all(operand.strides[a] == linear[a] for a in space.order if space.extents[a] != 1)


def _steps(operand: Operand | None, space: Space) -> tuple[int, ...]:
    own = [operand.strides[g[-1]] if operand is not None else 0 for g in space.dims]
    return (*(0,) * (DEEP - len(own)), *own)
