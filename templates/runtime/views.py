"""Tensors without torch: an address, a dtype, a shape and strides.

TensorView(address=0x7f00, dtype="bf16", shape=(4, 8), strides=(8, 1), device="cuda:0")
"""

from __future__ import annotations

from dataclasses import dataclass

ITEM_SIZES = {"f16": 2, "bf16": 2, "f32": 4, "f64": 8, "i32": 4, "i64": 8, "bool": 1}
FLOATS = ("f16", "bf16", "f32", "f64")
INTS = ("i32", "i64")


@dataclass(frozen=True)
class TensorView:
    """A tensor as a host sees it. Strides are in elements."""

    address: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: str = "cuda:0"


def promote(dtypes: tuple[str, ...]) -> str:
    """The dtype that torch gives a mix of dtypes of tensors with dims: f16 and bf16 make f32; a float beats an int."""
    floats = [d for d in dtypes if d in FLOATS]
    kinds = set(floats or dtypes)
    if kinds == {"f16", "bf16"}:
        return "f32"
    return max(kinds, key=lambda d: (ITEM_SIZES[d], d)) if kinds else "f32"


def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether elements lie row-major and without gaps; the stride of a dim of extent 1 says nothing."""
    return 0 in shape or all(n == 1 or s == d for n, s, d in zip(shape, strides, dense_strides(shape)))
