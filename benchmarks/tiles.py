"""Device time of row kernels under tiles beside the one that the runtime chooses: where its rule should change.

    python -m benchmarks.tiles [--ops layer_norm] [--widths 8192] [--dtypes f32] [--warm 16] [--out tiles.json]

The clock and the operands are those of `benchmarks.rows`. Each kernel whose tile `Tile.of` chooses is run under every combination of
half, the same and twice its warps and rows a program; where a program has many rows or steps, of tiles in hand and with `--columns` of the
columns of a step; where gradients are summed over rows, of programs a multiprocessor. Every result is held against float64, for a tile
that is quick and wrong is none. Exit code 1 where one was wrong; no time is judged.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks import cases, peers, rows
from benchmarks.pointwise import some
from benchmarks.report import grid
from benchmarks.rows import Cell, Row
from benchmarks.timing import DeviceClock, copy_bandwidth, no_device
from benchmarks.warm import warm
from generated.runtime.plan import cdiv
from generated.runtime.rowwise import Split, Tile

MOST = 2**15
"""Elements of a tile at most."""
WARPS = (1, 32)
HANDS = (1, 2, 3, 4)
PROGRAMS = (1, 2, 3, 4, 6, 8)
"""A multiprocessor's, where gradients are summed over rows."""


@dataclass(frozen=True)
class Change:
    """What is done to a tile: factors of two of its warps and rows; other loads in hand and programs, or those that it has."""

    warps: int = 0
    rows: int = 0
    stages: int | None = None
    programs: int | None = None
    columns: int = 0
    """Of a step, where a row is walked over in several."""

    def __str__(self) -> str:
        factors = ("warps", self.warps), ("rows", self.rows), ("columns", self.columns)
        words = [f"{name} x {2.0**k:g}" for name, k in factors if k]
        words += [f"{n} in hand" for n in (self.stages,) if n is not None]
        words += [f"{n} programs" for n in (self.programs,) if n is not None]
        return ", ".join(words) or "as chosen"

    def of(self, tile: Tile, split: Split, partial: int, multiprocessors: int) -> Tile | None:
        """The other tile; None where there is no such. What a tile does not have is left out of it."""
        columns = self.columns if tile.loop and not partial else 0
        factors = (tile.warps, self.warps), (tile.block_k, self.rows), (tile.block_r, columns)
        warps, block_k, block_r = (int(n * 2.0**k) for n, k in factors)
        if not WARPS[0] <= warps <= WARPS[1] or block_k < 1 or block_k * block_r > MOST:
            return None
        count = cdiv(split.n_kept, block_k)
        if not partial:
            stages = (self.stages if tile.loop else None) or tile.stages
            return replace(
                tile, block_k=block_k, block_r=block_r, warps=warps, span=block_k, parts=count, stages=stages
            )
        parts = max(1, min(count, (self.programs or cdiv(tile.parts, multiprocessors)) * multiprocessors))
        span = cdiv(count, parts) * block_k
        return Tile(
            block_k, tile.block_r, tile.loop, warps, span, max(1, cdiv(split.n_kept, span)), self.stages or tile.stages
        )


def changes(
    warps: Sequence[int] = (-1, 0, 1), row_counts: Sequence[int] = (-1, 0, 1), hands: Sequence[int] = HANDS, programs: Sequence[int] = PROGRAMS,
    columns: Sequence[int] = (0,),
) -> tuple[Change, ...]:  # fmt: skip
    """None, and every other combination of these."""
    words = itertools.product(warps, row_counts, (None, *hands), (None, *programs), columns)
    return Change(), *(Change(*w) for w in words if any(v not in (0, None) for v in w))


CHANGES = changes()


@contextmanager
def changed(cell: Cell, change: Change, seen: set[Tile | None]) -> Iterator[None]:
    """Plans of the op within take other tiles; `seen` has what they took, None among it where there is no such tile."""
    chosen = Tile.of

    def of(split: Split, partial: int, multiprocessors: int, *more: Any) -> Tile:
        tile = chosen(split, partial, multiprocessors, *more)
        other = change.of(tile, split, partial, multiprocessors)
        seen.add(other)
        return other or tile

    op = rows.entry(cell.op, cell.width).case.op
    with (
        mock.patch.object(Tile, "of", staticmethod(of)),
        mock.patch.object(op, "_plans", {}),
        mock.patch.object(op, "ready", {}),
    ):
        yield


def tiles(
    cell: Cell, directions: Sequence[str], device: str = "cuda", among: Sequence[Change] = CHANGES
) -> list[tuple[str, Change]]:
    """The directions and changes that come to tiles of their own."""
    operands = rows.operands(cell, sets=1, device=device)
    out, known = [], set()
    for direction, change in itertools.product(directions, among):
        seen: set[Tile | None] = set()
        with changed(cell, change, seen), mock.patch("generated.runtime.prepared.PreparedLaunch.__call__"):
            call = _calls(cell, operands, (direction,))
            seen.clear()  # a backward has its forward before it
            call[direction](0)
        if None not in seen and seen and (key := (direction, frozenset(seen))) not in known:
            known.add(key)
            out.append((direction, change))
    return out


def _calls(
    cell: Cell, sets: Sequence[dict[str, torch.Tensor]], directions: Sequence[str]
) -> dict[str, Callable[[int], Any]]:
    run, own = rows.function(cell), rows.entry(cell.op, cell.width)
    assert run is not None
    out = {"forward": peers.forward(run, sets)}
    if "backward" in directions:
        found = dict(zip((t.name for t in own.case.op.outputs), run(*sets[0].values())))
        backward = peers.backward(own, run, sets, peers.cotangents(found, len(sets)))
        assert backward is not None
        out["backward"] = backward
    return out


def fill(task: tuple[Cell, str, Change]) -> str:
    """Compiles one tile, in a process of its own."""
    cell, direction, change = task
    try:
        call = _calls(cell, rows.operands(cell, sets=1), (direction,))
        with changed(cell, change, set()):
            call[direction](0)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{cell} {direction} {change}: {type(error).__name__}: {error}"
    torch.cuda.empty_cache()
    return ""


def measure(cell: Cell, direction: str, change: Change, clock: Any, bandwidth: float, device: str = "cuda") -> Row:
    """The row of `benchmarks.rows` under a change, with the tile."""
    seen: set[Tile | None] = set()
    with changed(cell, change, seen):
        row, *_ = rows.measure(cell, clock, bandwidth, device, (direction,))
    words = [f"{t.block_k} x {t.block_r}, {t.warps} warps, {t.stages} in hand, {t.parts} programs" for t in seen if t]
    return {**row, "direction": direction, "change": str(change), "tiles": sorted(words)}


def table(found: Sequence[Row]) -> list[str]:
    """Of each cell and direction the tile as chosen, and those that are quicker, the quickest first."""
    by: dict[tuple[Any, ...], list[Row]] = {}
    for row in found:
        by.setdefault((row["op"], row["direction"], row["width"], row["dtype"]), []).append(row)
    lines = []
    for key, group in by.items():
        chosen = next((r for r in group if r["change"] == str(Change())), None)
        least = chosen["share"] if chosen and "error" not in chosen else 0.0
        better = sorted((r for r in group if r.get("share", 0.0) > least), key=lambda r: -r["share"])[:4]
        for row in ([chosen] if chosen else []) + better:
            shown = row["error"][:60] if "error" in row else f"{row['share']:.3f}" + (" wrong" if row["wrong"] else "")
            lines.append([f"{key[0]} {key[1]}", str(key[2]), key[3], row["change"], "; ".join(row["tiles"]), shown])
    return grid(["Op", "Width", "dtype", "Tile", "Tiles", "Share"], lines)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(",") if word)


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser("python -m benchmarks.tiles", description="Times row kernels under other tiles.")
    out.add_argument("--ops", type=some(rows.OPS), default=("layer_norm",))
    out.add_argument("--widths", type=rows._widths, default=(8192,))
    out.add_argument("--dtypes", type=some(cases.DTYPES), default=("f32",))
    out.add_argument("--directions", type=some(rows.DIRECTIONS), default=rows.DIRECTIONS)
    out.add_argument(
        "--warps",
        type=_numbers,
        default=(-1, 0, 1),
        help="powers of two that the warps are taken times; below 0 with an equals sign: --warps=-1,0",
    )
    out.add_argument("--rows", type=_numbers, default=(-1, 0, 1), help="the same of the rows of a program")
    out.add_argument("--columns", type=_numbers, default=(0,), help="the same of the columns of a row's step")
    out.add_argument("--hands", type=_numbers, default=HANDS, help="tiles in hand, where rows or steps are many")
    out.add_argument("--programs", type=_numbers, default=PROGRAMS, help="programs a multiprocessor, likewise")
    out.add_argument("--mb", type=float, default=256.0, help="megabytes of an operand that has rows")
    out.add_argument("--warm", type=int, default=0, metavar="N", help="first compile in so many processes")
    out.add_argument("--seconds-limit", type=float, default=240.0, help="stop early")
    out.add_argument("--out", type=Path, help="JSON of all rows")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    began = time.monotonic()
    args = parser().parse_args(argv)
    if no_device():
        return 2
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        peers.environment(Path(folder))
        cells = rows.cells(args.ops, args.widths, args.dtypes, ("pullback",), args.mb)
        among = changes(args.warps, args.rows, args.hands, args.programs, args.columns)
        todo = [(cell, *one) for cell in cells for one in tiles(cell, args.directions, among=among)]
        if args.warm:
            for fault in warm(todo, args.warm, args.seconds_limit / 2, fill):
                print(f"warm: {fault:.300}", flush=True)
        clock = DeviceClock()
        bandwidth = copy_bandwidth(clock)
        found: list[Row] = []
        for cell, direction, change in todo:
            if time.monotonic() - began > args.seconds_limit:
                print(f"stopped with {len(todo) - len(found)} of {len(todo)} tiles left", flush=True)
                break
            found.append(measure(cell, direction, change, clock, bandwidth))
    if args.out:
        args.out.write_text(json.dumps({"machine": torch.cuda.get_device_name(), "copy_bytes_per_second": bandwidth, "rows": found}, indent=1) + "\n")  # fmt: skip
    print("\n".join(table(found)))
    return int(any(r.get("wrong") for r in found))


if __name__ == "__main__":
    sys.exit(main())
