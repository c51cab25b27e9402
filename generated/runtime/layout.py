"""From shapes and strides to the iteration space of a pointwise kernel.

Takes declared dims and actual shapes, returns a `Space`: at most four merged dims in memory order, and for every tensor its
strides over them (None where it is dense in that order, so that the kernel reads it at the linear index).

    x (4, 8) contiguous, bias (8,)  ->  sizes (4, 8); x: None, bias: (0, 1)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

RANK = 4
"""Merged dims that a kernel takes."""
SIDE = 16
"""The width of a patch, in elements along the last dim."""
VECTOR = 16
"""Rows of a multiple of it never cut a vector of elements."""

Axis = tuple[str, int]
"""A named axis, or one of the axes that a pack stands for."""


class ShapeError(ValueError):
    """Shapes that do not fit the declaration, or one another."""


@dataclass(frozen=True)
class Dim:
    """A declared dim: its axes, slow first, and the fixed extent of each or 0. `pack` for `...` and `R...`."""

    axes: tuple[str, ...]
    fixed: tuple[int, ...]
    pack: bool = False

    @property
    def grouped(self) -> bool:
        return len(self.axes) > 1


@cache
def parse_dims(text: str) -> tuple[Dim, ...]:
    """From the spec's spelling: `..., (S=2 N)`."""
    dims = []
    for word in re.findall(r"\([^)]*\)|[^,\s]+", text):
        factors = [f.partition("=") for f in word.strip("()").split()]
        if word.endswith("...") and "(" not in word:
            dims.append(Dim((word if word == "..." else word[:-3],), (0,), True))
        else:
            dims.append(Dim(tuple(f[0] for f in factors), tuple(int(f[2] or 0) for f in factors)))
    return tuple(dims)


def names(dims: str) -> frozenset[str]:
    """The axes and packs of a declaration."""
    return frozenset(n for d in parse_dims(dims) for n in d.axes)


@dataclass(frozen=True)
class Operand:
    """A tensor over the axes of the op: extent and stride by axis."""

    name: str
    extents: dict[Axis, int]
    strides: dict[Axis, int]


@dataclass(frozen=True)
class Space:
    """The merged iteration space. `order` are the unmerged axes in memory order, `extents` theirs."""

    order: tuple[Axis, ...]
    extents: dict[Axis, int]
    dims: tuple[tuple[Axis, ...], ...]
    """Each merged dim with the axes in it."""
    sizes: tuple[int, ...]

    @property
    def count(self) -> int:
        total = 1
        for axis in self.order:
            total *= self.extents[axis]
        return total

    @property
    def ragged(self) -> bool:
        """Whether the last dim holds no whole number of vectors."""
        return bool(self.sizes) and self.sizes[-1] % VECTOR != 0

    def strides(self, operand: Operand) -> tuple[int, ...]:
        """Over the merged dims; absent ones 0."""
        own = [operand.strides.get(group[-1], 0) for group in self.dims]
        return tuple((*own, 0, 0, 0, 0)[:RANK])

    def linear(self) -> dict[Axis, int]:
        """The strides of a tensor that is dense in this order."""
        out, step = {}, 1
        for axis in reversed(self.order):
            out[axis] = step
            step *= max(1, self.extents[axis])
        return out


def divisors(sizes: Sequence[int]) -> tuple[int, ...]:
    """What `coordinates` divides by: the extents of merged dims 1 to 3, absent ones 1, then the inverse of each."""
    inner = (*sizes[1:], 1, 1, 1)[: RANK - 1]
    return (*inner, *(inverse(size) for size in inner))


def inverse(size: int) -> int:
    """2**(31 + s) / size rounded up, below 2**32, with the shift s in its last 5 bits: for i < 2**31 the product with i has
    floor(i / size) above bit 31 + s (Granlund and Montgomery, Division by invariant integers using multiplication, 1994).
    """
    size = max(size, 1)  # nothing is divided by an extent of 0
    shift = (size - 1).bit_length()
    return -(-(1 << (31 + shift)) // size) << 5 | shift


def bind(name: str, dims: Sequence[Dim], shape: Sequence[int], strides: Sequence[int], known: dict[str, int],
         ranks: Mapping[str, int] | None = None) -> Operand:  # fmt: skip
    """The extents and strides of a tensor by axis. `known` holds fixed and given extents and gains what is solved.

    Args:
        ranks: how many dims the packs have that the caller counts; one more pack takes the rest.
    """
    ranks = ranks or {}
    counted = sum(ranks.get(d.axes[0], 0) for d in dims if d.pack)
    packs = [d for d in dims if d.pack and d.axes[0] not in ranks]
    rank = len(shape) - counted - sum(not d.pack for d in dims)
    if rank < 0 or (not packs and rank != 0):
        raise ShapeError(
            f"`{name}` has {len(shape)} dims, {'at least ' if packs else ''}{len(shape) - rank} are declared"
        )
    extents: dict[Axis, int] = {}
    steps: dict[Axis, int] = {}
    place = 0
    for dim in dims:
        if dim.pack:
            count = ranks.get(dim.axes[0], rank)
            for k in range(count):  # counted from the right, as broadcasting aligns
                extents[(dim.axes[0], k - count)], steps[(dim.axes[0], k - count)] = shape[place], strides[place]
                place += 1
            continue
        step = strides[place]
        for axis, extent in reversed(list(zip(dim.axes, _factors(name, dim, shape[place], known)))):
            extents[(axis, 0)], steps[(axis, 0)] = extent, step
            step *= extent
        place += 1
    return Operand(name, extents, steps)


def _factors(name: str, dim: Dim, extent: int, known: dict[str, int]) -> list[int]:
    if len(dim.axes) == 1:
        known.setdefault(dim.axes[0], extent)
        return [extent]
    factors = [fixed or known.get(axis, 0) for axis, fixed in zip(dim.axes, dim.fixed)]
    product = 1
    for factor in factors:
        product *= factor or 1
    if 0 in factors and extent % product == 0:
        factors[factors.index(0)] = extent // product
        product = extent
    if product != extent or 0 in factors and extent:
        raise ShapeError(
            f"`{name}` has an extent of {extent} where ({' '.join(dim.axes)}) needs a multiple of {product}"
        )
    return factors


def broadcast(operands: Sequence[Operand], stretching: frozenset[str]) -> dict[Axis, int]:
    """The common extents. Only the operands in `stretching` may have 1 where another has more."""
    out: dict[Axis, int] = {}
    owner: dict[Axis, str] = {}
    for operand in operands:
        for axis, extent in operand.extents.items():
            if axis not in out or (out[axis] == 1 and owner[axis] in stretching):
                out[axis], owner[axis] = extent, operand.name
    for operand in operands:
        for axis, extent in operand.extents.items():
            if extent != out[axis] and not (extent == 1 and operand.name in stretching):
                where = f"dim {axis[1]}" if axis[1] else f"axis {axis[0]}"
                raise ShapeError(
                    f"`{operand.name}` has an extent of {extent} in {where}, `{owner[axis]}` has {out[axis]}"
                )
    return out


def stretched(operand: Operand, extents: Mapping[Axis, int]) -> Operand:
    """The operand with stride 0 wherever it is repeated."""
    strides = {a: 0 if operand.extents[a] == 1 else s for a, s in operand.strides.items()}
    return Operand(operand.name, operand.extents, strides)


def _later(a: Axis, b: Axis, operands: Sequence[Operand], extents: Mapping[Axis, int]) -> bool:
    """Whether axis a should come after (inside) b: torch's TensorIterator order, the first operand with an opinion."""
    for operand in operands:
        first, second = operand.strides.get(a, 0), operand.strides.get(b, 0)
        if first == 0 or second == 0 or extents[a] == 1 or extents[b] == 1:
            continue
        if first != second:
            return first < second
    return False


def iterate(axes: Sequence[Axis], extents: Mapping[Axis, int], operands: Sequence[Operand], kinds: Sequence[frozenset[Axis]] = (),
            reorder: bool = True) -> Space:  # fmt: skip
    """The merged iteration space of the operands.

    Args:
        axes: the axes to run over, in the order of the first output.
        kinds: sets of axes that a gradient is summed over; axes of different kinds do not merge.
        reorder: whether the order may follow the memory of the operands.
    """
    order = list(axes)
    for k in range(1, len(order) if reorder else 0):  # insertion sort keeps the order of what has no opinion
        j = k
        while j > 0 and _later(order[j - 1], order[j], operands, extents):
            order[j - 1], order[j] = order[j], order[j - 1]
            j -= 1
    groups: list[list[Axis]] = []
    for axis in (a for a in order if extents[a] != 1):
        if groups and _merges(groups[-1][-1], axis, operands, extents, kinds):
            groups[-1].append(axis)
        else:
            groups.append([axis])
    sizes = []
    for group in groups:
        size = 1
        for axis in group:
            size *= extents[axis]
        sizes.append(size)
    return Space(tuple(order), {a: extents[a] for a in order}, tuple(tuple(g) for g in groups), tuple(sizes))


def patch(space: Space, operands: Sequence[Operand]) -> tuple[int, int, int] | None:
    """Where an operand's memory runs along another dim than the last: the extents of that dim, of what lies between, and of
    the last. None where all run along the last dim, or where one of the two is too short to gain by it."""
    if len(space.sizes) < 2 or space.sizes[-1] < SIDE:
        return None
    for operand in operands:
        steps = [abs(s) for s in space.strides(operand)[: len(space.sizes)]]
        dense = min((d for d, s in enumerate(steps) if s), key=lambda d: steps[d], default=-1)
        if 0 <= dense < len(steps) - 1 and steps[-1] and space.sizes[dense] >= 2 * SIDE:
            between = 1
            for size in space.sizes[dense + 1 : -1]:
                between *= size
            return space.sizes[dense], between, space.sizes[-1]
    return None


def _merges(
    outer: Axis, inner: Axis, operands: Sequence[Operand], extents: Mapping[Axis, int], kinds: Sequence[frozenset[Axis]]
) -> bool:
    if any((outer in kind) != (inner in kind) for kind in kinds):
        return False
    return all(o.strides.get(outer, 0) == o.strides.get(inner, 0) * extents[inner] for o in operands)
