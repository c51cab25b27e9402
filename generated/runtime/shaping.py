"""Nodes of a graph that move no data: other shapes and orders of dims of the same memory, and where gradients end.

Permute((1, 0)).meta(Meta("f32", (2, 3), (3, 1)))      # Meta("f32", (3, 2), (1, 3))
Reshape((6,)).meta(Meta("f32", (3, 2), (1, 3)))        # None: no strides reach it, the memory has to be copied
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from . import extents
from .extents import Extent, Size
from .layout import ShapeError
from .plan import Meta


@dataclass(frozen=True)
class Shaping(ABC):
    """A node whose result is its operand's memory."""

    name: ClassVar[str]

    @abstractmethod
    def shape(self, shape: Sequence[Size]) -> tuple[Size, ...]:
        """The result's shape. Raises ShapeError."""

    @abstractmethod
    def meta(self, meta: Meta, sizes: Mapping[str, int]) -> Meta | None:
        """The result's strides, or None where no strides reach it."""

    @abstractmethod
    def back(self, cotangent: Meta, primal: Meta) -> Meta | None:
        """The cotangent of the operand, over the memory of the result's; None where no strides reach it."""

    @property
    def attrs(self) -> dict[str, object]:
        return {}


@dataclass(frozen=True)
class Reshape(Shaping):
    """The same elements in row-major order under another shape."""

    name: ClassVar[str] = "reshape"
    to: tuple[Size, ...]

    def shape(self, shape: Sequence[Size]) -> tuple[Size, ...]:
        for n in self.to:
            if not isinstance(n, Extent) and (type(n) is not int or n < -1):
                raise ShapeError(f"reshape: {n!r} is no extent: a number, -1, or an extent of another shape")
        whole, unknown = extents.product(shape), [k for k, n in enumerate(self.to) if n == -1]
        if len(unknown) > 1:
            raise ShapeError(f"reshape: {extents.text(self.to)} has more than one -1")
        given = extents.product(n for n in self.to if n != -1)
        if unknown:
            if given == 0:
                raise ShapeError(f"reshape: -1 in {extents.text(self.to)} may be anything")
            rest = extents.quotient(whole, given)
            out = tuple(rest if n == -1 else n for n in self.to)
            if isinstance(rest, int) or rest.powers:
                return out
        elif given == whole:
            return self.to
        raise ShapeError(f"reshape: {extents.text(shape)} does not fill {extents.text(self.to)}")

    def meta(self, meta: Meta, sizes: Mapping[str, int]) -> Meta | None:
        return reshaped(
            meta, extents.concrete(self.shape(meta.shape), sizes) if -1 in self.to else extents.concrete(self.to, sizes)
        )

    def back(self, cotangent: Meta, primal: Meta) -> Meta | None:
        return reshaped(cotangent, primal.shape)

    @property
    def attrs(self) -> dict[str, object]:
        return {"shape": [n if isinstance(n, int) else str(n) for n in self.to]}


@dataclass(frozen=True)
class Permute(Shaping):
    """The dims in another order."""

    name: ClassVar[str] = "permute"
    dims: tuple[int, ...]

    def shape(self, shape: Sequence[Size]) -> tuple[Size, ...]:
        rank = len(shape)
        whole = all(type(d) is int and -rank <= d < rank for d in self.dims)
        if not whole or sorted(d % rank for d in self.dims) != list(range(rank)):
            raise ShapeError(f"permute: {list(self.dims)} does not name each of {len(shape)} dims once")
        return tuple(shape[d] for d in self.dims)

    def meta(self, meta: Meta, sizes: Mapping[str, int]) -> Meta | None:
        return Meta(meta.dtype, tuple(meta.shape[d] for d in self.dims), tuple(meta.strides[d] for d in self.dims))

    def back(self, cotangent: Meta, primal: Meta) -> Meta | None:
        place = {d % len(self.dims): k for k, d in enumerate(self.dims)}
        order = [place[d] for d in range(len(self.dims))]
        return Meta(
            cotangent.dtype, tuple(cotangent.shape[k] for k in order), tuple(cotangent.strides[k] for k in order)
        )

    @property
    def attrs(self) -> dict[str, object]:
        return {"dims": list(self.dims)}


@dataclass(frozen=True)
class StopGradient(Shaping):
    """The same value; no gradient goes through it, as the author wants."""

    name: ClassVar[str] = "stop_gradient"

    def shape(self, shape: Sequence[Size]) -> tuple[Size, ...]:
        return tuple(shape)

    def meta(self, meta: Meta, sizes: Mapping[str, int]) -> Meta | None:
        return meta

    def back(self, cotangent: Meta, primal: Meta) -> Meta | None:
        raise TypeError("no gradient goes through a stop_gradient")


def reshaped(meta: Meta, shape: Sequence[int]) -> Meta | None:
    """The strides with which the same memory has another shape, as torch's `view` finds them; None where none do."""
    if math.prod(meta.shape) != math.prod(shape):
        raise ShapeError(f"reshape: {list(meta.shape)} does not fill {list(shape)}")
    if 0 in shape:
        return Meta(meta.dtype, tuple(shape), (1,) * len(shape))
    groups = _runs(meta)
    strides: list[int] = []
    wanted = list(shape)
    for extent, step in reversed(groups):  # from the innermost run of memory outwards
        left = extent
        while left > 1 or (wanted and wanted[-1] == 1):
            size = wanted.pop() if wanted else 0
            if size == 0 or left % size:
                return None
            strides.insert(0, step)
            step *= size
            left //= size
    return Meta(meta.dtype, tuple(shape), tuple([1] * len(wanted) + strides))


def _runs(meta: Meta) -> list[tuple[int, int]]:
    """Neighbouring dims that are one run of memory: extent and innermost stride of each; without extents of 1."""
    out: list[tuple[int, int]] = []
    for extent, stride in zip(meta.shape, meta.strides):
        if extent == 1:
            continue
        if out and out[-1][1] == extent * stride:
            out[-1] = (out[-1][0] * extent, stride)
        else:
            out.append((extent, stride))
    return out or [(1, 1)]
