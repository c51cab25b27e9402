"""The row stage: a kernel that reduces along one set of axes, or whose values are rows along it.

The axes split into kept ones, a row each, and reduced ones. Both are merged as memory allows; a program has whole rows, unless
rows are few and long.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from . import layout
from .elementwise import Split, split_space, stored_in_half, triton_dtype
from .layout import Axis, Operand, ShapeError, Space
from .plan import Call, Kernel, Launch, Meta, Stage, Tensor, TooManyDims, cdiv
from .views import ITEM_SIZES

TILE = 8192
"""Elements of a tile at most, where it is beside others of its size: sums over the rows, or 64 bits."""
WHOLE = 32768
"""Elements of a tile at most else: what a row may have to be read once."""
CHUNK = 16384
"""Elements of a step where a row is longer: many warps, so that few rows are at work, and the second pass meets the L2."""
ROW_BYTES = 8192
"""Bytes that a program of many rows reads in a step at least."""
STEP = 8192
"""Bytes that a program reads in a step where it walks once over a long row."""
MANY = 256
"""Rows that are enough for a device where a program of few warps has one."""
STAGES = 3
"""Tiles that a program of many rows, or of one long row, has in hand: one that it computes, and those on their way."""
MORE_STAGES = 4
"""Those of several short rows of halves with two sums over the rows: they take longer to compute than to load."""
COMMON = 32 * 1024
"""Bytes of a program's rows at most where it has twice as many for the sake of what they have in common."""
COLUMNS = 1024
"""Columns of a program that sums over the rows, where a row is no single tile: a launch of its own, that reads the rows again."""
IN_FLIGHT = 32 * 1024
"""Bytes that the programs of a multiprocessor load at a time: with more of them none is quicker, and there are more parts."""
SHARE = 16384
"""Elements of a program's share at least, where few rows are shared by several programs."""
PROGRAMS = 2**31 - 1
"""Programs of a launch at most: of more rows each has several."""
LOADED = 16
"""Bytes that a thread loads at once, where memory allows."""
BUSY = 4096
"""Warps that fill a device: below that rows are shared."""


@dataclass(frozen=True)
class Rowwise(Stage):
    """Rows along `reduced`, one for each element of the `kept` axes."""

    kept: tuple[str, ...] = ()
    reduced: tuple[str, ...] = ()
    finish: Kernel | None = None
    """The second kernel where several programs share a row."""
    by_columns: bool = False
    """Whether what is summed over the rows needs nothing of a whole row."""
    single: bool = False
    """Whether a row is walked over once."""
    part_dtypes: Mapping[str, str] = field(default_factory=dict)
    """What a program has of a reduction that several share, where it is no number like those computed with."""

    @staticmethod
    def of(function: Any, kept: tuple[str, ...], reduced: tuple[str, ...], finish: Any = None, by_columns: bool = False,
           single: bool = False, when: Mapping[str, tuple[Any, ...]] | None = None,
           part_dtypes: Mapping[str, str] | None = None) -> Rowwise:  # fmt: skip
        end = None if finish is None else Kernel.of(finish)
        return Rowwise(Kernel.of(function), when or {}, kept, reduced, end, by_columns, single, part_dtypes or {})

    def plan(self, call: Call) -> None:
        """Allocates in the order of the rows; one launch, two where rows are shared, and one more for each sum over rows."""
        handed = {t.name for t in (*call.op.scratch, *call.op.saved) if t.name in call.given}
        bound = call.bound()
        extents = call.extents(bound)
        extents = {a: n for a, n in extents.items() if a[0] in (*self.kept, *self.reduced)}
        bound = {n: layout.stretched(o, extents) for n, o in bound.items()}
        read = [o for n, o in bound.items() if n in self.names] + self._indices(extents)
        space = self._space(call, extents, read, list(bound.values()))
        names = [n for n in call.wanted if n in self.names and n not in call.given]
        for name in names:
            tensor = call.declared[name]
            meta = call.op.allocated(tensor, call.wanted[name], extents, self._within(space, tensor, extents))
            call.allocated(name, meta)
        if not call.of_gradients:
            self._refuse_empty(call, extents)
        written = self._written(call, handed)
        self._refuse_unwritten(call, extents, written)
        if space.count == 0 and call.of_gradients:
            call.zeros += [n for n in names if n in call.outputs and math.prod(call.outputs[n].shape)]
        if any(math.prod(self._meta(call, n).shape) for n in written):
            self._launches(call, space, written)

    def _refuse_unwritten(self, call: Call, extents: Mapping[Axis, int], written: Collection[str]) -> None:
        """Raises ShapeError where a tensor has elements that no program writes, for an axis that it lacks has none."""
        empty = {a[0] for a, n in extents.items() if n == 0}
        own_stages = (
            call.op.forward if not call.of_gradients else [s for s in call.op.stages() if s not in call.op.forward]
        )
        for name in written if empty else ():
            if sum(name in s.names for s in own_stages) > 1:
                continue  # under these choices another stage may be the one that writes it
            own = layout.names(call.declared[name].dims)
            # What has none of the kept axes is of all rows, and there without one.
            sides = [self.reduced] if call.of_gradients else [self.reduced, self.kept]
            lacked = empty & {a for side in sides if own & {*side} for a in side}
            if lacked and math.prod(self._meta(call, name).shape):
                raise ShapeError(
                    f"{call.op.name}: `{name}` has elements, and ({', '.join(sorted(lacked))}), which it lacks, has none"
                )

    @staticmethod
    def _meta(call: Call, name: str) -> Meta:
        meta = call.given[name]
        assert isinstance(meta, Meta)
        return meta

    def _written(self, call: Call, handed: Collection[str]) -> list[str]:
        """What is written, buffers among it; not what earlier stages have `handed` on."""
        given = [n for n in call.op.updates if isinstance(call.given.get(n), Meta)]
        return [n for n in (*call.wanted, *given) if n in self.names and n in call.given and n not in handed]

    def _launches(self, call: Call, space: Space, written: Collection[str]) -> None:
        whole = call.bound()
        extents = call.extents(whole)
        bound = {n: layout.stretched(o, extents) for n, o in whole.items() if n in self.names} | {
            o.name: o for o in self._indices(extents)
        }
        taken = self.kernel.abi.names
        partial = [n for n in call.outputs if f"{n}_part_ptr" in taken and f"{n}_ptr" not in taken]
        sizes = _sizes(extents)
        launch = self._launch(call, bound, space, partial, sizes)
        if launch.grid[0] == 0:
            return
        if partial:
            n_reduced, parts = launch.values["n_reduced"], launch.grid[0]
            call.scratch |= {f"{n}_part": Meta(call.compute, (parts, n_reduced), (n_reduced, 1)) for n in partial}
            if launch.grid[1] > 1 and any(n in call.outputs and f"{n}_ptr" in taken for n in bound):
                call.launches.append(self._launch(call, bound, space, (), sizes))
                launch = replace(launch, pointers={p: n for p, n in launch.pointers.items() if n not in call.outputs})
            call.launches.append(launch)
            call.launches += [call.add_up(n, f"{n}_part", parts, n_reduced, launch.values) for n in partial]
        elif self.finish is None or not self._sums(call, written):
            call.launches.append(self._spread(launch))
        elif (shares := self._shares(launch)) > 1:
            self._shared(call, self.finish, launch, shares)
        else:
            call.launches.append(launch)

    def _sums(self, call: Call, written: Collection[str]) -> bool:
        """Whether nothing that has elements is written: under some choices an output may be the elements themselves."""
        return all(layout.names(call.declared[n].dims).isdisjoint(self.reduced) for n in written)

    def _spread(self, launch: Launch) -> Launch:
        """Without a reduction programs may share the elements of a row as they are; under some choices there may be one."""
        names = launch.kernel.abi.names
        if "span" not in names or self.finish is None and any(n.endswith("_part_ptr") for n in names):
            return launch
        values = launch.values
        shares = min(65535, cdiv(values["n_reduced"], values["BLOCK_R"]))
        span = cdiv(cdiv(values["n_reduced"], shares), values["BLOCK_R"]) * values["BLOCK_R"] if shares else 0
        parts = max(1, cdiv(values["n_reduced"], max(span, 1))) if values["LOOP"] else 1
        return replace(launch, grid=(launch.grid[0], parts, 1), values={**values, "span": span})

    @staticmethod
    def _shares(launch: Launch) -> int:
        """How many programs share a row: rows are few, and long."""
        values = launch.values
        if not values["LOOP"] or not values["n_kept"]:
            return 1
        return max(
            1,
            min(cdiv(BUSY, launch.grid[0] * launch.warps), cdiv(values["n_reduced"] * values["BLOCK_K"], SHARE), 65535),
        )

    def _shared(self, call: Call, finish: Kernel, launch: Launch, shares: int) -> None:
        """Two launches: each program reduces its share of a row, then one program adds up what they have."""
        values = launch.values
        n_kept, block_r = values["n_kept"], values["BLOCK_R"]
        span = cdiv(cdiv(values["n_reduced"], shares), block_r) * block_r
        parts = cdiv(values["n_reduced"], span)
        scratch = {
            p.name[:-4]: Meta(self.part_dtypes.get(p.name[:-9], call.compute), (parts, n_kept), (n_kept, 1))
            for p in finish.abi.params
            if p.name.endswith("_part_ptr")
        }
        pointers = {**launch.pointers, **{f"{n}_ptr": n for n in scratch}}
        first = replace(launch, grid=(launch.grid[0], parts, 1), pointers=pointers, values={**values, "span": span})
        block = min(1024, 1 << (cdiv(values["n_reduced"], SHARE) - 1).bit_length())  # whatever the number of rows
        block_k = 1024 // block
        own = {n: v for n, v in values.items() if n not in ("reduced_sizes", "span")}
        own |= {"n_parts": parts, "BLOCK_R": block, "BLOCK_K": block_k, "RAGGED": True}
        second = Launch(
            finish, (cdiv(n_kept, block_k), 1, 1), {p: n for p, n in pointers.items() if p in finish.abi.names}, own
        )
        call.scratch |= scratch
        call.launches += [first, second]

    # -------------------------------------------------------------------------------- spaces

    def _refuse_empty(self, call: Call, extents: Mapping[Axis, int]) -> None:
        """What has the axes of a row is empty where they are, as in torch; one value a row there would have to be."""
        single = any(set(self.reduced).isdisjoint(layout.names(t.dims)) for t in call.op.outputs)
        needed = set(self.reduced) & set(call.op.needs_elements)
        if single and any(n == 0 for a, n in extents.items() if a[0] in needed):
            raise IndexError(
                f"{call.op.name}: nothing to reduce: an extent is 0, and a maximum or minimum of nothing has no value"
            )

    def _indices(self, extents: Mapping[Axis, int]) -> list[Operand]:
        """For each axis or pack whose coordinate the kernel asks for, an operand whose offset is that coordinate."""
        out = []
        for param in self.kernel.abi.params:
            if param.name.endswith("_index_strides"):
                axis = param.name.removesuffix("_index_strides")
                own = sorted((a for a in extents if a[0] == axis), key=lambda a: a[1])
                strides, step = {}, 1
                for a in reversed(own):
                    strides[a], step = step, step * extents[a]
                out.append(Operand(f"{axis}_index", {a: extents[a] for a in own}, strides))
        return out

    def _pattern(self, axes: Sequence[Axis]) -> frozenset[Axis]:
        return frozenset(a for a in axes if a[0] in self.reduced)

    def _space(
        self, call: Call, extents: Mapping[Axis, int], operands: Sequence[Operand], others: Sequence[Operand]
    ) -> Space:
        """In the order of the operands that have the axes of a row; where none has, of the `others` that have."""
        axes = call.op.axes(extents)
        pattern = self._pattern(axes)
        whole = next(
            (w for group in (operands, others) if (w := [o for o in group if any(a in pattern for a in o.strides)])),
            list(operands),
        )
        order = layout.iterate(axes, extents, whole, (pattern,)).order
        made = [
            self._dense(call.declared[n], order, extents)
            for n in call.wanted
            if n in self.names and n not in call.given
        ]
        return layout.iterate(order, extents, [*operands, *made], (pattern,), reorder=False)

    def _dense(self, tensor: Tensor, order: Sequence[Axis], extents: Mapping[Axis, int]) -> Operand:
        """What is to be allocated: an axis that it has does not merge with one that it lacks."""
        own = layout.names(tensor.dims)
        axes = tuple(a for a in order if a[0] in own)
        return Operand(tensor.name, {a: extents[a] for a in axes}, Space(axes, dict(extents), (), ()).linear())

    def _within(self, space: Space, tensor: Tensor, extents: Mapping[Axis, int]) -> Space:
        """The part of the space that a tensor has, in the same order."""
        own = layout.names(tensor.dims)
        order = tuple(a for a in space.order if a[0] in own)
        return Space(order, {a: extents[a] for a in order}, (), ())

    # -------------------------------------------------------------------------------- launches

    def _launch(self, call: Call, bound: Mapping[str, Operand], space: Space, partial: Sequence[str],
                sizes_of: Mapping[str, int]) -> Launch:  # fmt: skip
        axes = {a for a in space.order if space.extents[a] != 1}
        pattern = self._pattern(list(axes))
        split = split_space(space, pattern)
        of_rows = self.finish is None and any(n.endswith("_part_ptr") for n in self.kernel.abi.names)
        single = call.compute in ("f32", "i32", "bool")
        items = self._row_items(call, bound, axes)
        row_bytes = max(1, sum(items.values()))
        once = self.single and (split.n_kept >= MANY or "span" in self.kernel.abi.names)
        common = self._common_bytes(call, bound, pattern)
        load = Load(row_bytes, common, single=single, once=once, gradient=call.of_gradients)
        tile, columns = Tile.of(split, len(partial), call.multiprocessors, load), 1
        along = not (split.inner_kept and split.n_kept > 1)  # memory runs along the rows' elements
        if partial and self.by_columns and along and TILE < split.n_reduced <= 65535 * COLUMNS:
            tile, columns = Tile.of_columns(split, call.multiprocessors), cdiv(split.n_reduced, COLUMNS)
        values: dict[str, Any] = {
            **call.choices, "n_kept": split.n_kept, "n_reduced": split.n_reduced, "kept_sizes": None, "reduced_sizes": None,
            "span": tile.span if of_rows else cdiv(split.n_reduced, tile.block_r) * tile.block_r, "COMPUTE": triton_dtype(call.compute), "LOOP": tile.loop, "BLOCK_K": tile.block_k,
            "BLOCK_R": tile.block_r, "RAGGED": split.reduced[-1][0] % layout.VECTOR != 0 if split.reduced else True,
            "STAGES": tile.stages, "HALF": stored_in_half(call),
        }  # fmt: skip
        groups = {
            "kept": [g for g in space.dims if g[0] not in pattern],
            "reduced": [g for g in space.dims if g[0] in pattern],
        }
        sizes = {"kept": [n for n, _ in split.kept], "reduced": [n for n, _ in split.reduced]}
        reach = max(split.n_kept + tile.block_k, split.n_reduced + tile.block_r, tile.parts * split.n_reduced)
        for param in self.kernel.abi.params:
            if (found := self._walked(param.name)) is not None:
                name, part = found
                steps = [bound[name].strides.get(g[-1], 0) for g in groups[part]] if name in bound else []
                values[param.name] = strides = self._strides(call, steps, sizes[part])
                if strides is not None:
                    values[f"{part}_sizes"] = layout.divisors(sizes[part])
            elif param.name.startswith("size_"):
                axis = param.name.removeprefix("size_")
                values[param.name] = sizes_of.get("..." if axis == "others" else axis, 1)
            elif "_stride_" in param.name:
                tensor, _, axis = param.name.partition("_stride_")
                values[param.name] = bound[tensor].strides[(axis, 0)] if tensor in bound else 0
            if param.role == "ptr" and (whole := bound.get(param.name[:-4])) is not None:
                reach = max(reach, 1 + sum((n - 1) * abs(whole.strides[a]) for a, n in whole.extents.items()))
        values["WIDE"] = reach + tile.block_r >= 2**31
        vectors = not values["RAGGED"] and all(values.get(f"{n}_reduced_strides") is None for n in items)
        values["LANES"], values["GROUP"] = tile.lanes(LOADED // min(items.values(), default=LOADED) if vectors else 1)
        there = {*bound, *(f"{n}_part" for n in partial)}
        pointers = {p.name: p.name[:-4] for p in self.kernel.abi.params if p.role == "ptr" and p.name[:-4] in there}
        # Without a row there is what all rows have in common: something that is written has elements.
        programs = tile.parts if partial else max(1, cdiv(split.n_kept, tile.block_k))
        stage_bytes = row_bytes * tile.block_k * tile.block_r if tile.stages > 1 else 0
        return Launch(self.kernel, (programs, columns, 1), pointers, values, tile.warps, stage_bytes=stage_bytes)

    def _row_items(self, call: Call, bound: Mapping[str, Operand], axes: Collection[Axis]) -> dict[str, int]:
        """Bytes of an element in each tensor that is read and has the rows' axes and their own."""
        given = {n: m for n, m in call.given.items() if isinstance(m, Meta) and n in bound and n not in call.wanted}
        return {n: ITEM_SIZES[m.dtype] for n, m in given.items() if set(axes) <= set(bound[n].extents)}

    def _common_bytes(self, call: Call, bound: Mapping[str, Operand], pattern: Collection[Axis]) -> int:
        """The same of those that all rows have in common, as weights: a program reads them again for each tile."""
        found = 0
        for name, operand in bound.items():
            own = {a for a, n in operand.extents.items() if n != 1}
            if name not in call.wanted and own and own <= set(pattern) and isinstance(m := call.given.get(name), Meta):
                found += ITEM_SIZES[m.dtype]
        return found

    def _walked(self, param: str) -> tuple[str, str] | None:
        """The operand whose strides a parameter has, and over which dims: the kept or the reduced ones."""
        if param.endswith("_index_strides"):
            axis = param.removesuffix("_index_strides")
            return f"{axis}_index", "reduced" if axis in self.reduced else "kept"
        parts = (p for p in ("kept", "reduced") if param.endswith(f"_{p}_strides"))
        return next(((param.removesuffix(f"_{p}_strides"), p) for p in parts), None)

    def _strides(self, call: Call, steps: list[int], sizes: list[int]) -> tuple[int, ...] | None:
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
            raise TooManyDims(f"{call.op.name}: {len(steps)} dims that do not merge; a kernel takes {layout.RANK}")
        return tuple((*steps, 0, 0, 0, 0)[: layout.RANK])


def _sizes(extents: Mapping[Axis, int]) -> dict[str, int]:
    """How many elements each axis or pack has."""
    out: dict[str, int] = {}
    for axis, extent in extents.items():
        out[axis[0]] = out.get(axis[0], 1) * extent
    return out


@dataclass(frozen=True)
class Load:
    """What a program has to do for an element of a row."""

    row_bytes: int
    """Of it in all tensors that have rows and are read."""
    common: int
    """Bytes of it in all tensors that rows have in common."""
    single: bool
    """Whether what is computed has 32 bits."""
    once: bool
    """Whether a row is walked over once."""
    gradient: bool
    """Whether what is written are gradients."""


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

    def lanes(self, group: int) -> tuple[int, int]:
        """How many sums a walk over a row has, one a thread of warps of 32, and of how many neighbours a thread takes its elements:
        `group`, or 1. Powers of two, whose product divides `block_r`. Short rows are summed by all threads in one step.
        """
        if not self.loop or self.block_k > 1:
            return 1, 1
        group = min(group, self.block_r)
        return min(32 * self.warps, self.block_r // group), group

    @staticmethod
    def of_columns(split: Split, multiprocessors: int) -> Tile:
        """COLUMNS of a share of the rows: four programs a multiprocessor."""
        rows = cdiv(split.n_kept, 2)
        parts = max(1, min(rows, 4 * multiprocessors // cdiv(split.n_reduced, COLUMNS)))
        span = 2 * cdiv(rows, parts)
        return Tile(2, COLUMNS, False, 4, span, cdiv(split.n_kept, span) if span else 1, STAGES)

    @staticmethod
    def of(split: Split, partial: int, multiprocessors: int, load: Load) -> Tile:
        """Memory runs along the elements of a row, or along the rows; then a tile has many rows side by side.

        Args:
            partial: how many gradients are summed over the rows.
            load: what there is to do for an element of a row.
        """
        row_bytes, single = load.row_bytes, load.single
        width = max(1, split.n_reduced)
        padded = 1 << (width - 1).bit_length()
        most = 1 << (max(split.n_kept, 1) - 1).bit_length()
        least = 1 << (max(cdiv(split.n_kept, PROGRAMS), 1) - 1).bit_length()
        if load.once and split.n_reduced > TILE and not (split.inner_kept and split.n_kept > 1):
            block_r = max(512, min(STEP // 2, 1 << (STEP // row_bytes).bit_length() >> 1))
            return Tile(least, block_r, True, 4, least, cdiv(split.n_kept, least), STAGES)
        if split.inner_kept and split.n_kept > 1:
            block_k = min(64, most)
            while block_k * padded < 1024 and split.n_kept > 1024 * block_k:  # many short rows side by side
                block_k *= 2
            block_r = min(padded, max(1, TILE // 4 // block_k))
        else:
            whole = WHOLE if single and not partial else TILE
            block_r = padded if padded <= whole else min(CHUNK if single else TILE // 2, padded // 2)
            few = ROW_BYTES // row_bytes if partial else 2048 if block_r < 1024 else 1
            block_k = max(1, min(1 << (few // block_r).bit_length() >> 1, most))
        block_k = max(block_k, least)
        loop = split.n_reduced > block_r or split.n_reduced == 0
        most_warps = 32 if block_r > TILE and (row_bytes > 2 or not load.gradient) else 16
        warps = min(most_warps, max(2, block_k * block_r // 512))
        twice = 2 * row_bytes * block_k * block_r <= COMMON and split.n_kept * warps >= 2 * BUSY * block_k
        if load.common > row_bytes and twice and block_r > 1024 and not (partial or loop or split.inner_kept):
            # What rows have in common is more than they are: it is read for twice as many, by the same warps.
            block_k *= 2
        rows = cdiv(split.n_kept, block_k)
        if not partial:
            return Tile(block_k, block_r, loop, warps, block_k, rows)
        size = row_bytes * block_k * block_r
        stages = 1 if loop else STAGES
        if partial > 1 and block_k > 1 and row_bytes <= 4 and not loop and not split.inner_kept:
            stages = MORE_STAGES
        parts = max(1, min(rows, max(1, min(3, IN_FLIGHT // size)) * multiprocessors))
        span = cdiv(rows, parts) * block_k
        return Tile(block_k, block_r, loop, warps, span, cdiv(split.n_kept, span) if span else 1, stages)
