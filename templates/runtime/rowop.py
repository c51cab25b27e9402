"""Ops that reduce along one set of axes: what their kernels are launched with.

The axes split into kept ones, a row each, and reduced ones. Both are merged as memory allows; a program has whole rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from . import layout
from . import op as base
from .layout import Axis, Operand, Space
from .op import Given, Kernel, Launch, Meta, Plan, PointwiseOp, Tensor, cdiv
from .views import ITEM_SIZES

TILE = 8192
"""Elements of a tile at most, where it is beside others of its size: sums over the rows, or 64 bits."""
WHOLE = 32768
"""Elements of a tile at most else: what a row may have to be read once."""
CHUNK = 16384
"""Elements of a step where a row is longer: many warps, so that few rows are at work, and the second pass meets the L2."""
ROW_BYTES = 8192
"""Bytes that a program of many rows reads in a step at least."""
STAGES = 3
"""Tiles that a program of many rows has in hand at most."""
SHARED = 96 * 1024
"""Bytes of shared memory that a program takes for them at most: what every device has."""
IN_FLIGHT = 32 * 1024
"""Bytes that the programs of a multiprocessor load at a time: with more of them none is quicker, and there are more parts."""
SHARE = 16384
"""Elements of a program's share at least, where few rows are shared by several programs."""
BUSY = 8192
"""Warps that fill a device: below that rows are shared."""


class RowOp(PointwiseOp):
    """An op whose values are rows along `reduced`, and one value a row."""

    elementwise = False
    finish: ClassVar[Kernel | None] = None
    """The second stage where several programs share a row."""
    reduced: ClassVar[tuple[str, ...]] = ()

    @property
    def _own_outputs(self) -> tuple[Tensor, ...]:
        return (*self.outputs, *self.saved)

    def _plan_forward(self, given: Mapping[str, Given]) -> Plan:
        operands = self._bind(self.tensors, given)
        extents = self._extents(operands, self.tensors)
        compute = self._compute_dtype(given)
        space = self._space(extents, list(operands.values()))
        outputs = {
            t.name: self._allocated(t, self._output_dtype(t, given, compute), extents, self._within(space, t, extents))
            for t in self._own_outputs
        }
        result = {t.name: outputs[t.name] for t in self.outputs}
        kept = {t.name: outputs[t.name] for t in self.saved}
        self._refuse_empty(extents)
        if not any(math.prod(m.shape) for m in outputs.values()):
            return Plan(result, saved=kept, compute=compute)
        bound = {**operands, **self._bind(self._own_outputs, {**given, **outputs})}
        launch = self._launch(self.forward, bound, space, compute, [m.dtype for m in result.values()], 0)
        if self.finish is not None and (shares := self._shares(launch)) > 1:
            return self._shared(self.finish, launch, shares, result, kept, compute)
        return Plan(result, launches=(self._spread(launch),), compute=compute, saved=kept)

    def _spread(self, launch: Launch) -> Launch:
        """Without a reduction programs may share the elements of a row as they are."""
        names = launch.kernel.abi.names
        if "span" not in names or any(n.endswith("_part_ptr") for n in names):
            return launch
        values = launch.values
        span = cdiv(cdiv(values["n_reduced"], self._shares(launch)), values["BLOCK_R"]) * values["BLOCK_R"]
        parts = max(1, cdiv(values["n_reduced"], max(span, 1))) if values["LOOP"] else 1
        return replace(launch, grid=(launch.grid[0], parts, 1), values={**values, "span": span})

    @staticmethod
    def _shares(launch: Launch) -> int:
        """How many programs share a row: rows are few, and long."""
        values = launch.values
        if not values["LOOP"]:
            return 1
        return max(
            1,
            min(cdiv(BUSY, launch.grid[0] * launch.warps), cdiv(values["n_reduced"] * values["BLOCK_K"], SHARE), 65535),
        )

    def _shared(self, finish: Kernel, launch: Launch, shares: int, result: Mapping[str, Meta], kept: Mapping[str, Meta],
                compute: str) -> Plan:  # fmt: skip
        """Two launches: each program reduces its share of a row, then one program adds up what they have."""
        values = launch.values
        n_kept, block_r = values["n_kept"], values["BLOCK_R"]
        span = cdiv(cdiv(values["n_reduced"], shares), block_r) * block_r
        parts = cdiv(values["n_reduced"], span)
        scratch = {
            p.name[:-4]: Meta(self._part_dtype(compute), (parts, n_kept), (n_kept, 1))
            for p in finish.abi.params
            if p.name.endswith("_part_ptr")
        }
        pointers = {**launch.pointers, **{f"{n}_ptr": n for n in scratch}}
        first = replace(launch, grid=(launch.grid[0], parts, 1), pointers=pointers, values={**values, "span": span})
        block = min(1024, 1 << (parts - 1).bit_length())
        block_k = max(1, min(1024 // block, 1 << (n_kept - 1).bit_length()))
        own = {n: v for n, v in values.items() if n not in ("reduced_sizes", "span")}
        own |= {"n_parts": parts, "BLOCK_R": block, "BLOCK_K": block_k, "RAGGED": True}
        second = Launch(
            finish, (cdiv(n_kept, block_k), 1, 1), {p: n for p, n in pointers.items() if p in finish.abi.names}, own
        )
        return Plan(result, scratch, (first, second), compute, saved=kept)

    def _part_dtype(self, compute: str) -> str:
        """What a program keeps of a reduction: truths, counts, or values."""
        kinds = {t.dtype for t in self.outputs}
        return "bool" if kinds == {"bool"} else "i64" if kinds == {"i64"} else compute

    def _plan_backward(self, given: Mapping[str, Given], needed: Sequence[str], multiprocessors: int) -> Plan:
        assert self.backward is not None
        cotangents = [
            replace(t, name=f"d{t.name}")
            for t in self.outputs
            if t.differentiable and t.dtype in ("float", "number", "any", "compute")
        ]
        everything = (*self.tensors, *self._own_outputs, *cotangents)
        bound = self._bind(everything, given)
        extents = self._extents(bound, everything)
        targets = [replace(t, name=f"d{t.name}") for t in self.tensors if t.name in needed]
        compute = self._compute_dtype(given)
        # What is not read, as an input whose output is, has a shape, and strides that are nobody's.
        known = {p.name[:-4] for p in self.backward.abi.params if p.role == "ptr"}
        read = [o for n, o in bound.items() if n in known]
        space = self._space(extents, read, list(bound.values()))
        grads: dict[str, Meta] = {}
        for target in targets:
            meta = given[target.name[1:]]
            assert isinstance(meta, Meta)
            grads[target.name] = self._allocated(target, meta.dtype, extents, self._within(space, target, extents))
        if space.count == 0:
            return Plan(grads, zeros=tuple(grads))
        partial = [n for n in grads if f"{n}_part_ptr" in self.backward.abi.names]
        names = {**bound, **self._bind(targets, {**given, **grads})}
        row_bytes = sum(
            ITEM_SIZES[m.dtype]
            for n, m in given.items()
            if n in known and n in bound and isinstance(m, Meta) and len(bound[n].extents) == len(extents)
        )
        launch = self._launch(
            self.backward, names, space, compute, [m.dtype for m in grads.values()], multiprocessors, partial, row_bytes
        )
        n_reduced, parts = launch.values["n_reduced"], launch.grid[0]
        if not partial:
            return Plan(grads, launches=(self._spread(launch),))
        scratch = {f"{n}_part": Meta(compute, (parts, n_reduced), (n_reduced, 1)) for n in partial}
        return Plan(grads, scratch, (launch, *(self._finish(n, parts, n_reduced, launch) for n in partial)))

    # -------------------------------------------------------------------------------- spaces

    def _extents(self, operands: Mapping[str, Operand], tensors: Sequence[Tensor]) -> dict[Axis, int]:
        """Rows are not broadcast: what lacks dims of `...` that another has would be a sum in the backward."""
        extents = super()._extents(operands, tensors)
        for tensor in tensors:
            own, operand = self._names(tensor), operands.get(tensor.name)
            missing = [] if operand is None else [a for a in extents if a[0] in own and a not in operand.extents]
            if missing and not tensor.broadcast:
                raise layout.ShapeError(
                    f"{self.name}: `{tensor.public}` lacks {len(missing)} dims that another tensor has"
                )
        return extents

    def _refuse_empty(self, extents: Mapping[Axis, int]) -> None:
        """What has the axes of a row is empty where they are, as in torch; one value a row there would have to be."""
        single = any(set(self.reduced).isdisjoint(self._names(t)) for t in self.outputs)
        if single and self.needs_elements and any(n == 0 for a, n in extents.items() if a[0] in self.reduced):
            raise IndexError(
                f"{self.name}: nothing to reduce: an extent is 0, and a maximum or minimum of nothing has no value"
            )

    @staticmethod
    def _names(tensor: Tensor) -> frozenset[str]:
        """The axes and packs that a tensor is declared with."""
        return frozenset(n for d in layout.parse_dims(tensor.dims) for n in d.axes)

    def _pattern(self, axes: Sequence[Axis]) -> frozenset[Axis]:
        return frozenset(a for a in axes if a[0] in self.reduced)

    def _space(self, extents: Mapping[Axis, int], operands: Sequence[Operand], others: Sequence[Operand] = ()) -> Space:
        """In the order of the operands that have the axes of a row; where none has, of the `others` that have."""
        axes = self._axes(extents)
        pattern = self._pattern(axes)
        whole = next(
            (w for group in (operands, others) if (w := [o for o in group if any(a in pattern for a in o.strides)])),
            list(operands),
        )
        ordered = layout.iterate(axes, extents, whole, (pattern,))
        return layout.iterate(ordered.order, extents, operands, (pattern,), reorder=False)

    def _within(self, space: Space, tensor: Tensor, extents: Mapping[Axis, int]) -> Space:
        """The part of the space that a tensor has, in the same order."""
        own = self._names(tensor)
        order = tuple(a for a in space.order if a[0] in own)
        return Space(order, {a: extents[a] for a in order}, (), ())

    # -------------------------------------------------------------------------------- launches

    def _launch(self, kernel: Kernel, bound: Mapping[str, Operand], space: Space, compute: str, stored: Sequence[str],
                multiprocessors: int, partial: Sequence[str] = (), row_bytes: int = 1) -> Launch:  # fmt: skip
        import triton.language as tl

        dtypes = {"f32": tl.float32, "f64": tl.float64, "i32": tl.int32, "i64": tl.int64, "bool": tl.int1}
        axes = {a for a in space.order if space.extents[a] != 1}
        pattern = self._pattern(list(axes))
        split = base.split_space(space, pattern)
        tile = Tile.of(split, bool(partial), multiprocessors, row_bytes, compute in ("f32", "i32", "bool"))
        of_rows = kernel is self.backward and any(n.endswith("_part_ptr") for n in kernel.abi.names)
        values: dict[str, Any] = {
            **self.choices(), "n_kept": split.n_kept, "n_reduced": split.n_reduced, "kept_sizes": None, "reduced_sizes": None,
            "span": tile.span if of_rows else split.n_reduced, "COMPUTE": dtypes[compute], "LOOP": tile.loop, "BLOCK_K": tile.block_k,
            "BLOCK_R": tile.block_r, "RAGGED": split.reduced[-1][0] % layout.VECTOR != 0 if split.reduced else True,
            "STAGES": tile.stages, "HALF": all(dtype in ("f16", "bf16") for dtype in stored),
        }  # fmt: skip
        groups = {
            "kept": [g for g in space.dims if g[0] not in pattern],
            "reduced": [g for g in space.dims if g[0] in pattern],
        }
        sizes = {"kept": [n for n, _ in split.kept], "reduced": [n for n, _ in split.reduced]}
        reach = max(split.n_kept + tile.block_k, split.n_reduced + tile.block_r, tile.parts * split.n_reduced)
        for param in kernel.abi.params:
            for part in ("kept", "reduced"):
                if param.name.endswith(f"_{part}_strides"):
                    operand = bound.get(param.name.removesuffix(f"_{part}_strides"))
                    steps = [] if operand is None else [operand.strides.get(g[-1], 0) for g in groups[part]]
                    values[param.name] = strides = self._strides(steps, sizes[part])
                    if strides is not None:
                        values[f"{part}_sizes"] = layout.divisors(sizes[part])
            if param.role == "ptr" and (whole := bound.get(param.name[:-4])) is not None:
                reach = max(reach, 1 + sum((n - 1) * abs(whole.strides[a]) for a, n in whole.extents.items()))
        values["WIDE"] = reach + tile.block_r >= 2**31
        there = {*bound, *(f"{n}_part" for n in partial)}
        pointers = {p.name: p.name[:-4] for p in kernel.abi.params if p.role == "ptr" and p.name[:-4] in there}
        programs = tile.parts if partial else cdiv(split.n_kept, tile.block_k)
        return Launch(kernel, (programs, 1, 1), pointers, values, tile.warps)

    def _strides(self, steps: list[int], sizes: list[int]) -> tuple[int, ...] | None:
        """Strides over merged dims; None where they are those of the linear index itself. Without dims nothing is added to an
        address: the compiler sees that it stays aligned."""
        if not sizes:
            return (0,) * layout.RANK
        linear, step = [], 1
        for size in reversed(sizes):
            linear.insert(0, step)
            step *= size
        if steps == linear:
            return None
        if len(steps) > layout.RANK:
            raise base.TooManyDims(f"{self.name}: {len(steps)} dims that do not merge; a kernel takes {layout.RANK}")
        return tuple((*steps, 0, 0, 0, 0)[: layout.RANK])

    def _finish(self, name: str, parts: int, n_reduced: int, launch: Launch) -> Launch:
        """Adds up what the programs have, in the order of their numbers."""
        from .sums import sum_partials

        block_k, block_r = (32, 64) if n_reduced >= 32 else (1, 1024)  # columns are few: they need many programs
        settings = {"n_parts": parts, "n_kept": n_reduced, "COMPUTE": launch.values["COMPUTE"], "WIDE": launch.values["WIDE"],
                    "BLOCK_K": block_k, "BLOCK_R": block_r}  # fmt: skip
        pointers = {"part_ptr": f"{name}_part", "total_ptr": name}
        return Launch(Kernel.of(sum_partials), (cdiv(n_reduced, block_k), 1, 1), pointers, settings)


@dataclass(frozen=True)
class Tile:
    """The tile of a program, and its share where gradients are summed over the rows."""

    block_k: int
    block_r: int
    loop: bool
    """Whether a row is longer than the tile."""
    warps: int
    span: int
    """Rows of a program."""
    parts: int
    """Programs."""
    stages: int = 1
    """Tiles that a program has in hand: one that it computes, others on their way into shared memory."""

    @staticmethod
    def of(split: base.Split, partial: bool, multiprocessors: int, row_bytes: int, single: bool) -> Tile:
        """Memory runs along the elements of a row, or along the rows; then a tile has many rows side by side.

        Args:
            row_bytes: of an element, in all tensors that have rows and are read.
            single: whether what is computed has 32 bits.
        """
        width = max(1, split.n_reduced)
        padded = 1 << (width - 1).bit_length()
        most = 1 << (max(split.n_kept, 1) - 1).bit_length()
        if split.inner_kept and split.n_kept > 1:
            block_k = min(64, most)
            block_r = min(padded, max(1, TILE // 4 // block_k))
        else:
            whole = WHOLE if single and not partial else TILE
            block_r = padded if padded <= whole else min(CHUNK if single else TILE // 2, padded // 2)
            few = ROW_BYTES // row_bytes if partial else 2048 if block_r < 1024 else 1
            block_k = max(1, min(1 << (few // block_r).bit_length() >> 1, most))
        loop = split.n_reduced > block_r or split.n_reduced == 0
        warps = min(32 if block_r > TILE else 16, max(2, block_k * block_r // 512))
        rows = cdiv(split.n_kept, block_k)
        if not partial:
            return Tile(block_k, block_r, loop, warps, block_k, rows)
        size = row_bytes * block_k * block_r
        stages = 1 if loop else max(1, min(STAGES, 1 + SHARED // size))
        parts = max(1, min(rows, max(1, min(3, IN_FLIGHT // size)) * multiprocessors))
        span = cdiv(rows, parts) * block_k
        return Tile(block_k, block_r, loop, warps, span, cdiv(split.n_kept, span) if span else 1, stages)
