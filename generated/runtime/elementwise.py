"""The elementwise stage: every element of what is written comes of one element of each operand, or is a sum of such.

Runs 1-D over memory where all operands are dense in one order, over at most four merged dims otherwise. What lacks axes that
the operands have, or was stretched, is summed over them in the same pass, once a pattern of such axes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from . import layout
from .layout import Axis, Operand, Space
from .plan import WARPS, Call, Kernel, Launch, Meta, Stage, TooManyDims, cdiv
from .views import ITEM_SIZES

BLOCK = 1024
_WIDE = 2**31


@dataclass(frozen=True)
class Elementwise(Stage):
    """One element at a time, with gradients that may be summed over what was broadcast."""

    long: bool = False
    """Whether its forms for results in 16 bits are long: it is bound by arithmetic, not by memory."""
    elementwise: ClassVar[bool] = True

    @staticmethod
    def of(function: Any, when: Mapping[str, tuple[Any, ...]] | None = None, long: bool = False) -> Elementwise:
        return Elementwise(Kernel.of(function), when or {}, long)

    def plan(self, call: Call) -> None:
        """Allocates in the order of iteration; launches once, or once a pattern of axes that something is summed over."""
        bound = call.bound()
        extents = call.extents(bound)
        names = [n for n in call.wanted if n in self.names]
        whole = {n: layout.stretched(o, extents) for n, o in bound.items()}
        operands = {n: o for n, o in whole.items() if n in self.names}
        axes = call.op.axes(extents)
        own = {n: self._own(call, n, extents, bound) for n in names}
        patterns = {n: frozenset(a for a in axes if extents[a] != 1 and own[n].get(a, 1) == 1) for n in names}
        plain = not any(d.grouped for n in names for d in layout.parse_dims(call.declared[n].dims))
        summed = {n[1:] for n in names if patterns[n]} if call.of_gradients else set()
        order = layout.iterate(axes, extents, [o for n, o in operands.items() if n not in summed], reorder=plain)
        for name in names:
            kept = Space(
                tuple(a for a in order.order if a in own[name]),
                {a: own[name][a] for a in order.order if a in own[name]},
                (),
                (),
            )
            call.allocated(name, call.op.allocated(call.declared[name], call.wanted[name], own[name], kept))
        if order.count == 0:
            call.zeros += [n for n in names if math.prod(call.outputs[n].shape)]
            return
        self._launches(call, operands, extents, order, patterns)

    @staticmethod
    def _own(call: Call, name: str, extents: Mapping[Axis, int], bound: Mapping[str, Operand]) -> dict[Axis, int]:
        """The extents of what is written: a gradient's are those of its tensor, with 1 where that was stretched."""
        if call.of_gradients and name[1:] in bound:
            return bound[name[1:]].extents
        known = layout.names(call.declared[name].dims)
        return {a: n for a, n in extents.items() if a[0] in known}

    def _launches(self, call: Call, operands: Mapping[str, Operand], extents: Mapping[Axis, int], order: Space,
                  patterns: Mapping[str, frozenset[Axis]]) -> None:  # fmt: skip
        full = [n for n in patterns if not patterns[n]]
        groups: dict[frozenset[Axis], list[str]] = {}
        for name, pattern in patterns.items():
            if pattern:
                groups.setdefault(pattern, []).append(name)
        written = call.op.bind([call.declared[n] for n in full], call.given)
        strided = list(written.values()) if call.op.sliced else []
        pointers = {f"{n}_ptr": n for n in (*operands, *full)}
        if not groups:
            space = layout.iterate(order.order, extents, [*operands.values(), *strided], reorder=False)
            flat = {"n_kept": space.count, "n_reduced": 1, "span": 1, "kept_sizes": None, "kept_strides": None, "reduced_sizes": None,
                    "reduced_strides": None, "BLOCK_K": BLOCK, "BLOCK_R": 1, "BLOCK": BLOCK}  # fmt: skip
            values = {**self._common(call, operands, space, written), **flat}
            crossed = [*operands.values(), *(strided or ([] if call.of_gradients else written.values()))]
            values["patch_sizes"], programs = tiles(space, crossed)
            if self.long and values["HALF"] and values["patch_sizes"] is None and values["sizes"] is None:
                # What a program does once, as its decision for a whole tile, counts half. Not beside strides: their indices take
                # the registers.
                values |= {"BLOCK": 2 * BLOCK, "BLOCK_K": 2 * BLOCK}
                programs = cdiv(space.count, 2 * BLOCK)
            call.launches.append(Launch(self.kernel, (programs, 1, 1), pointers, values))
            return
        for pattern, names in groups.items():
            space = layout.iterate(order.order, extents, [*operands.values(), *strided], (pattern,), reorder=False)
            self._sum_launches(call, operands, space, pattern, names, pointers, written)
            pointers = {p: n for p, n in pointers.items() if n not in full}

    def _sum_launches(self, call: Call, operands: Mapping[str, Operand], space: Space, pattern: frozenset[Axis], names: Sequence[str],
                      pointers: Mapping[str, str], written: Mapping[str, Operand]) -> None:  # fmt: skip
        """One pass that sums `names` over the axes of `pattern`, and the second stage where it has parts."""
        split = split_space(space, pattern)
        block_k, block_r, parts = split.shape(call.multiprocessors)
        span = cdiv(cdiv(split.n_reduced, parts), block_r) * block_r
        parts = cdiv(split.n_reduced, span)
        values = {**self._common(call, operands, space, written), **split.values(), "span": span, "BLOCK_K": block_k,
                  "BLOCK_R": block_r, "RAGGED": space.ragged or (block_k > 1 and not split.inner_kept)}  # fmt: skip
        named, finish = dict(pointers), []
        for name in names:
            total = name
            if parts > 1:
                total = f"{name}_parts"
                call.scratch[total] = Meta(call.compute, (parts, split.n_kept), (split.n_kept, 1))
                finish.append(call.add_up(name, total, parts, split.n_kept, values))
            named[f"{name}_sum_ptr"] = total
        warps = WARPS
        if block_k == 1 and any(call.declared[n].dtype == "bool" for n in operands):
            # Of bytes a thread reads 16 where it has as many elements; what it stores would be exchanged through shared memory first.
            stored = [call.wanted[n] for n in call.outputs]
            warps = block_r * max(ITEM_SIZES[dtype] for dtype in stored) // (32 * 16)
        call.launches.append(Launch(self.kernel, (cdiv(split.n_kept, block_k), parts, 1), named, values, warps))
        call.launches += finish

    def _common(
        self, call: Call, operands: Mapping[str, Operand], space: Space, written: Mapping[str, Operand]
    ) -> dict[str, Any]:
        """The values of every parameter but pointers: sizes, strides, scalars, choices."""
        values: dict[str, Any] = {
            "n": space.count,
            "COMPUTE": triton_dtype(call.compute),
            "sizes": None,
            "patch_sizes": None,
            **call.choices,
        }
        reach = space.count
        for param in self.kernel.abi.params:
            name, _, kind = param.name.rpartition("_")
            operand = operands.get(name) or written.get(name)
            if kind == "strides":
                strides = None if operand is None or self._dense(operand, space) else space.strides(operand)
                values[param.name] = strides
                if strides is not None:
                    if len(space.dims) > layout.RANK:
                        raise TooManyDims(
                            f"{call.op.name}: {len(space.dims)} dims that do not merge; a kernel takes {layout.RANK}"
                        )
                    values["sizes"] = layout.divisors(space.sizes)
                    reach = max(reach, 1 + sum((n - 1) * abs(s) for n, s in zip(space.sizes, strides)))
            elif "_stride_" in param.name:
                tensor, _, axis = param.name.partition("_stride_")
                whole = operands.get(tensor) or written.get(tensor)
                values[param.name] = whole.strides[(axis, 0)] if whole is not None else 0
                reach = max(
                    reach, sum((n - 1) * abs(whole.strides[a]) for a, n in whole.extents.items()) if whole else 0
                )
        values["WIDE"] = reach + 2 * BLOCK >= _WIDE
        values["RAGGED"] = space.ragged
        values["HALF"] = stored_in_half(call)
        return values

    @staticmethod
    def _dense(operand: Operand, space: Space) -> bool:
        linear = space.linear()
        return all(operand.strides.get(a, 0) == linear[a] for a in space.order if space.extents[a] != 1)


def tiles(space: Space, operands: Sequence[Operand]) -> tuple[tuple[int, int, int] | None, int]:
    """The sizes of the patches that the space is cut into, or None for tiles in a row; and how many programs there are."""
    patch = layout.patch(space, operands)
    if patch is None:
        return None, cdiv(space.count, BLOCK)
    rows, between, columns = patch
    return patch, space.count // (rows * columns) * cdiv(rows, BLOCK // layout.SIDE) * cdiv(columns, layout.SIDE)


def triton_dtype(name: str) -> Any:
    """A dtype as Triton has it: what a kernel computes in, or a tensor is stored in."""
    import triton.language as tl

    return {
        "f16": tl.float16,
        "bf16": tl.bfloat16,
        "f32": tl.float32,
        "f64": tl.float64,
        "i32": tl.int32,
        "i64": tl.int64,
        "bool": tl.int1,
    }[name]


def stored_in_half(call: Call) -> bool:
    """Whether all results of the call are stored in half precision."""
    own = {t.name for t in call.op.outputs}
    return all(dtype in ("f16", "bf16") for n, dtype in call.wanted.items() if (n in own) != call.of_gradients)


@dataclass(frozen=True)
class Split:
    """An iteration space split into kept and reduced dims: extents and linear strides of each."""

    kept: tuple[tuple[int, int], ...]
    reduced: tuple[tuple[int, int], ...]
    inner_kept: bool

    @property
    def n_kept(self) -> int:
        return math.prod(n for n, _ in self.kept)

    @property
    def n_reduced(self) -> int:
        return math.prod(n for n, _ in self.reduced)

    def values(self) -> dict[str, Any]:
        out: dict[str, Any] = {"n_kept": self.n_kept, "n_reduced": self.n_reduced}
        for name, dims in (("kept", self.kept), ("reduced", self.reduced)):
            if len(dims) > layout.RANK:
                raise TooManyDims(f"broadcasting over {len(dims)} separate dims; a kernel takes {layout.RANK}")
            out[f"{name}_sizes"] = layout.divisors([n for n, _ in dims])
            out[f"{name}_strides"] = tuple((*(s for _, s in dims), 0, 0, 0, 0)[: layout.RANK])
        return out

    def shape(self, multiprocessors: int) -> tuple[int, int, int]:
        """BLOCK_K, BLOCK_R and the number of parts: wide along memory, enough programs to fill the device evenly."""
        if self.inner_kept:
            block_k, block_r, each = (128, 16, 32) if self.n_kept >= 64 else (16, 128, 32)
        elif self.n_reduced >= 256 or self.n_kept < 64:
            block_k, block_r, each = 1, 2048 if self.n_reduced >= 4096 else 1024, 64
        else:
            block_k, block_r, each = 128, 16, 32
        tiles = cdiv(self.n_kept, block_k)
        parts = max(1, min(cdiv(each * multiprocessors, tiles), cdiv(self.n_reduced, 2 * block_r), 65535))
        return block_k, block_r, parts


def split_space(space: Space, pattern: frozenset[Axis]) -> Split:
    """Kept and reduced merged dims with their strides in the linear index."""
    kept, reduced, step = [], [], 1
    for group, size in zip(reversed(space.dims), reversed(space.sizes)):
        (reduced if group[0] in pattern else kept).insert(0, (size, step))
        step *= size
    return Split(tuple(kept), tuple(reduced), not space.dims or space.dims[-1][0] not in pattern)
