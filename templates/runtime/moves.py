"""Copies and sums of tensors of one shape, whatever their strides and dtypes: what a graph needs between its ops.

add(Meta("f32", ...), out=..., other=...)    # Launch: out = x + other, added in float32 or wider, rounded once
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import layout
from .elementwise import BLOCK, tiles, triton_dtype
from .kernels import coordinates, offset, tile
from .layout import Operand
from .plan import Kernel, Launch, Meta, TooManyDims


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


_KERNEL = Kernel.of(move)


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
    extents = dict(zip(axes, shape))
    space = layout.iterate(axes, extents, [operands["out"], *operands.values()])
    linear, reach = space.linear(), space.count
    values: dict[str, object] = {
        "sizes": None, "n": space.count, "COMPUTE": triton_dtype({"f16": "f32", "bf16": "f32"}.get(compute, compute)),
        "RAGGED": space.ragged, "BLOCK": BLOCK, "other_strides": None,
    }  # fmt: skip
    for name, operand in operands.items():
        strides = None
        if any(operand.strides[a] != linear[a] for a in axes if extents[a] != 1):
            strides = space.strides(operand)
            if len(space.dims) > layout.RANK:
                raise TooManyDims(f"{len(space.dims)} dims that do not merge; a copy takes {layout.RANK}")
            values["sizes"] = layout.divisors(space.sizes)
            reach = max(reach, 1 + sum((extents[a] - 1) * abs(operand.strides[a]) for a in axes))
        values[f"{name}_strides"] = strides
    values["WIDE"] = reach + 2 * BLOCK >= 2**31
    values["patch_sizes"], programs = tiles(space, list(operands.values()))
    return Launch(_KERNEL, (programs, 1, 1), {f"{n}_ptr": n for n in metas}, values)
