"""Device time of ops of rows beside eager and compiled torch and Liger, by the width of a row, as a share of a large copy.

    python -m benchmarks.rows [--warm 16] [--seconds-limit 240] [--out rows.json] [--table rows.md]

Clocks as for pointwise ops. What is timed is first held against float64. All of ours comes before the peers, so that a run
that is cut short has it. Liger is measured where it is installed; a width that it refuses is a row that says so. Its cross
entropy makes the gradient in its forward, over the logits: beside it stands `training`, forward and backward in one. Exit
code 1 if a cell of ours failed or was wrong; no time is judged.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import inspect
import itertools
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import cases, peers
from benchmarks.cases import Entry, Operands
from benchmarks.pointwise import some
from benchmarks.report import grid
from benchmarks.timing import DeviceClock, copy_bandwidth, no_device
from benchmarks.warm import warm
from generated.runtime.testing import Case
from generated.runtime.views import ITEM_SIZES

OPS = ("rms_norm", "layer_norm", "softmax", "log_softmax", "cross_entropy")
"""Those that the catalogue lacks are left out."""
WIDTHS = (4096, 8192, 1024, 32768, 131072)
CLASSES = (32000, 128256)
"""Widths of ops that take one of the classes of each row: vocabularies."""
DTYPES = ("bf16", "f32")
PEERS = ("pullback", "eager", "compiled", "liger")
DIRECTIONS = ("forward", "backward")
BOTH = "training"
ALLOWED = {"f32": 1e-5, "bf16": 1e-2, "f16": 2e-3}
"""Of the norm of the difference from float64, relative to the norm."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One op at one width, by one peer: forward and backward."""

    op: str
    width: int
    dtype: str
    peer: str
    mb: float

    def key(self) -> Row:
        return dataclasses.asdict(self)

    @property
    def rows(self) -> int:
        return max(1, int(self.mb * 2**20) // ITEM_SIZES[self.dtype] // self.width)


def there(ops: Iterable[str]) -> tuple[str, ...]:
    return tuple(n for n in ops if (cases.ROOT / "tests" / "generated" / f"test_{n}.py").exists())


def cells(ops: Sequence[str], widths: Sequence[int], dtypes: Sequence[str], chosen: Sequence[str], mb: float) -> list[Cell]:  # fmt: skip
    """Ours first, and of each peer the usual widths first."""
    out = []
    for peer, k in itertools.product(chosen, range(max(len(widths), len(CLASSES)))):
        for op in there(ops):
            own = CLASSES if classes(cases.entries(only=(op,))[0].case) else widths
            out += [Cell(op, width, dtype, peer, mb) for width in own[k : k + 1] for dtype in dtypes]
    return out


def classes(case: Case) -> bool:
    return any(t.indexes for t in case.tensors)


@functools.cache
def entry(op: str, width: int) -> Entry:
    """The op for rows of so many elements; where the caller gives the extents of a row, with those."""
    found = cases.entries(only=(op,))[0]
    if classes(found.case):
        return OfClasses(op, op, found.case, {t.public: None for t in found.case.tensors if t.optional})
    return dataclasses.replace(found, attrs={**found.attrs, **{n: width for n in found.sizes}})


class OfClasses(Entry):
    """An op on a matrix of classes by rows, with the defaults of its function and nothing that may be absent."""

    @property
    def tensors(self) -> tuple[Any, ...]:
        return tuple(t for t in self.case.tensors if not t.optional)

    @functools.cached_property
    def instance(self) -> Any:
        known = inspect.signature(self.case.function).parameters
        return self.case.op(**{n: known[n].default for n in self.case.op.kinds})

    def shape(self, tensor: Any, rows: int, cols: int, layout: str = "dense") -> tuple[int, ...]:
        return (rows,) if tensor.indexes else (rows, cols)


# ---------------------------------------------------------------------------------------------- peers


def function(cell: Cell) -> peers.Function | None:
    own = entry(cell.op, cell.width)
    if cell.peer == "liger":
        return _liger(cell.op, own)
    plain = _PLAIN.get(cell.op)
    if plain is not None and cell.peer != "pullback":
        own = dataclasses.replace(own, case=Case(own.case.function, own.case.op, own.case.domains, plain))
    return peers.function(own, cell.peer)


def _plain_cross_entropy(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(x, target)


_PLAIN = {"cross_entropy": _plain_cross_entropy}
"""What peers run where a test's reference does more than the op with its defaults."""
_LIGER = {
    "cross_entropy": ("cross_entropy", "LigerCrossEntropyFunction"),
    "rms_norm": ("rms_norm", "LigerRMSNormFunction"),
    "layer_norm": ("layer_norm", "LigerLayerNormFunction"),
    "softmax": ("softmax", "LigerSoftmaxFunction"),
}


def _liger(op: str, own: Entry) -> peers.Function | None:
    """With its own defaults; among them that of writing the norm's gradient over the cotangent."""
    if op not in _LIGER:
        return None
    try:
        apply = getattr(importlib.import_module(f"liger_kernel.ops.{_LIGER[op][0]}"), _LIGER[op][1]).apply
    except ImportError:
        return None
    more = {"rms_norm": (1e-6,), "layer_norm": (1e-5,), "cross_entropy": (None,)}.get(op, ())
    return lambda *tensors: _first(apply(*tensors, *more))


def _first(out: Any) -> tuple[torch.Tensor]:
    return (out if isinstance(out, torch.Tensor) else out[0],)


# ---------------------------------------------------------------------------------------------- truth


def deviation(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """The largest norm of a difference relative to the norm of what is wanted; NaN counts as infinite."""
    worst = 0.0
    for got, want in zip(found, wanted, strict=True):
        share = ((got.double() - want).norm() / want.norm().clamp(min=1e-30)).item()
        worst = max(worst, share if math.isfinite(share) else math.inf)
    return worst


def truth(
    own: Entry, given: Mapping[str, torch.Tensor], seeds: Sequence[torch.Tensor | None]
) -> list[list[torch.Tensor]]:
    """Outputs and gradients of the reference in float64, of the operands as they are stored."""
    exact = peers.function(own, "eager")
    assert exact is not None
    wide = {n: v.double() if v.is_floating_point() else v for n, v in given.items()}
    return _results(own, exact, wide, [s.double() for s in seeds if s is not None])


def _results(
    own: Entry, run: peers.Function, given: Mapping[str, torch.Tensor], seeds: Any
) -> list[list[torch.Tensor]]:
    (operands,) = peers.leaves(own, [given])
    outputs = run(*operands.values())
    leaves = [v for v in operands.values() if v.requires_grad]
    gradients = torch.autograd.grad([y for y in outputs if y.requires_grad], leaves, seeds)
    return [[y.detach() for y in outputs], list(gradients)]


# ---------------------------------------------------------------------------------------------- the run


def operands(cell: Cell, sets: int | None = None, device: str = "cuda") -> list[dict[str, torch.Tensor]]:
    own = entry(cell.op, cell.width)
    count = sets or Operands.sets_for(own, cell.dtype, cell.rows, cell.width)
    out = Operands(own, cell.dtype, cell.rows, cell.width, count, device).views("dense")
    for tensor, given in itertools.product((t for t in own.tensors if t.indexes), out):
        given[tensor.name].random_(cell.width)
    return out


def measure(cell: Cell, clock: Any, bandwidth: float, device: str = "cuda", directions: Sequence[str] = DIRECTIONS) -> list[Row]:  # fmt: skip
    """A row for each direction; a fault is one too."""
    try:
        run = function(cell)
        if run is None:
            return []
        own, sets = entry(cell.op, cell.width), operands(cell, device=device)
        if isinstance(own, OfClasses):
            over = cell.peer == "liger"  # its forward has the gradient, and its backward alone is nothing
            directions = [d for d in (*directions, BOTH) if not (over and d == "backward")]
        found = dict(zip((t.name for t in own.case.op.outputs), run(*_copies(sets[0]).values())))
        seeds = peers.cotangents(found, len(sets))
        copies = [None if s is None else s.clone() for s in seeds[0]]  # a peer may write over what it is given
        results = _results(own, run, _copies(sets[0]), [s for s in copies if s is not None])
        errors = dict(zip(DIRECTIONS, map(deviation, results, truth(own, sets[0], seeds[0]))))
        moved = {d: cases.moved(own.instance, d, sets[0], found) for d in directions}
        errors[BOTH] = max(errors.values())
        del results, copies, found
        out = []
        for direction in directions:
            if direction == "forward":
                call = peers.forward(run, sets)
            else:
                call = peers.backward(own, run, sets, seeds, rebuild=direction == BOTH)
            seconds = clock.device(call)
            out.append({
                **cell.key(), "direction": direction, "ms": seconds * 1e3, "bytes": moved[direction],
                "share": moved[direction] / seconds / bandwidth, "deviation": errors[direction],
                "wrong": errors[direction] > ALLOWED[cell.dtype],
            })  # fmt: skip
        return out
    except Exception as error:
        if device == "cuda":
            torch.cuda.synchronize()  # raises where the device is lost: nothing that follows would mean anything
            torch.cuda.empty_cache()
        return [{**cell.key(), "direction": "", "error": f"{type(error).__name__}: {error}".strip()[:500]}]


def _copies(given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {n: v.clone() for n, v in given.items()}


def fill(cell: Cell) -> str:
    """Compiles what a cell needs, in a process of its own. Returns what went wrong."""
    torch.set_num_threads(1)
    peers.configure()
    try:
        run = function(cell)
        if run is not None:
            own, sets = entry(cell.op, cell.width), operands(cell, sets=1)
            peers.forward(run, sets)(0)
            found = dict(zip((t.name for t in own.case.op.outputs), run(*sets[0].values())))
            call = peers.backward(own, run, sets, peers.cotangents(found, 1))
            if call is not None:
                call(0)
            torch.cuda.synchronize()
    except Exception as error:
        return f"{cell}: {type(error).__name__}: {error}"
    torch.cuda.empty_cache()
    return ""


# ---------------------------------------------------------------------------------------------- tables


def table(rows: Iterable[Row]) -> list[str]:
    """Shares by op, direction and width: ours, then in brackets the peers'."""
    good = [r for r in rows if "error" not in r]
    by = {(r["op"], r["direction"], r["width"], r["dtype"], r["peer"]): r for r in good}
    dtypes = [d for d in (*DTYPES, "f16") if any(r["dtype"] == d for r in good)]
    lines = []
    for op, direction in itertools.product(dict.fromkeys(r["op"] for r in good), (*DIRECTIONS, BOTH)):
        for width in sorted({r["width"] for r in good if (r["op"], r["direction"]) == (op, direction)}):
            line = [f"{op} {direction}", str(width)]
            for dtype in dtypes:
                shown = [_shown(by.get((op, direction, width, dtype, peer))) for peer in PEERS]
                line.append(f"{shown[0]} [{', '.join(shown[1:])}]")
            lines.append(line)
    return grid(["Op", "Width", *dtypes], lines)


def _shown(row: Row | None) -> str:
    return "-" if row is None else f"{row['share']:.2f}" + (" wrong" if row["wrong"] else "")


def faults(rows: Iterable[Row]) -> list[str]:
    lines = []
    for r in rows:
        text = r.get("error") or (f"off by {r['deviation']:.2e} {r['direction']}" if r["wrong"] else "")
        if text:
            shown = " ".join(text.split()).replace("|", "\\|")[:160]
            lines.append([r["op"], str(r["width"]), r["dtype"], r["peer"], shown])
    return grid(["Op", "Width", "dtype", "Peer", "Fault"], lines)


def markdown(result: Mapping[str, Any]) -> str:
    rows, bandwidth = result["rows"], result["copy_bytes_per_second"] / 1e12
    out = [
        "# Ops of rows", "",
        f"{result['machine']}, torch {result['torch']}, triton {result['triton']}. A figure is the bandwidth that was reached"
        f" as a share of that of a large copy in the same run, {bandwidth:.2f} TB/s: ours [{', '.join(PEERS[1:])}].",
        "", *table(rows), "", "## Faults", "", *faults(rows),
    ]  # fmt: skip
    if result.get("left_out"):
        words = ", ".join(f"{c['op']} {c['width']} {c['dtype']} {c['peer']}" for c in result["left_out"])
        out += ["", f"Left out for lack of time: {words}."]
    return "\n".join(out) + "\n"


# ---------------------------------------------------------------------------------------------- command


def _widths(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(w) for w in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of widths") from None
    if not all(n >= 1 for n in found):
        raise argparse.ArgumentTypeError("a width is at least 1")
    return found


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser("python -m benchmarks.rows", description="Times ops of rows.")
    out.add_argument("--ops", type=some(OPS), default=OPS)
    out.add_argument("--widths", type=_widths, default=WIDTHS)
    out.add_argument("--dtypes", type=some(cases.DTYPES), default=DTYPES)
    out.add_argument("--peers", type=some(PEERS), default=PEERS)
    out.add_argument("--mb", type=float, default=256.0, help="megabytes of an operand that has rows")
    out.add_argument("--warm", type=int, default=0, metavar="N", help="first compile in so many processes")
    out.add_argument("--cache", type=Path, help="folder of compiled kernels; default: a temporary one")
    out.add_argument("--round-ms", type=float, default=3.0, help="device time that a round aims at")
    out.add_argument("--rounds", type=int, default=5)
    out.add_argument("--seconds-limit", type=float, default=240.0, help="stop early, and say what was left out")
    out.add_argument("--out", type=Path, help="JSON of all rows")
    out.add_argument("--table", type=Path, help="Markdown of the table")
    return out


def _measured(args: argparse.Namespace, cache: Path, began: float) -> dict[str, Any]:
    import triton

    peers.environment(cache)
    todo = cells(args.ops, args.widths, args.dtypes, args.peers, args.mb)
    if args.warm > 0:
        left = args.seconds_limit - (time.monotonic() - began)
        slow = sorted((c for c in todo if c.peer != "eager"), key=lambda c: c.peer == "liger")
        for fault in warm(slow, args.warm, left / 2, fill):
            print(f"warm: {fault:.300}", flush=True)
    peers.configure()
    clock = DeviceClock(args.round_ms, args.rounds)
    bandwidth = copy_bandwidth(clock)
    rows: list[Row] = []
    result: dict[str, Any] = {
        "machine": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "copy_bytes_per_second": bandwidth, "rows": rows, "left_out": [],
    }  # fmt: skip
    print(f"{result['machine']}, copy {bandwidth / 1e12:.2f} TB/s; {len(todo)} cells", flush=True)
    for k, cell in enumerate(todo):
        if time.monotonic() - began > args.seconds_limit:
            result["left_out"] = [c.key() for c in todo[k:]]
            break
        rows += measure(cell, clock, bandwidth)
        if k + 1 == len(todo) or todo[k + 1].peer != cell.peer:
            print(f"{time.monotonic() - began:6.0f} s  {cell.peer} done", flush=True)
            _save(args, result)
    result["seconds"] = time.monotonic() - began
    return result


def _save(args: argparse.Namespace, result: Mapping[str, Any]) -> None:
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    if args.table:
        args.table.write_text(markdown(result))


def main(argv: Sequence[str] | None = None) -> int:
    began = time.monotonic()
    args = parser().parse_args(argv)
    if no_device():
        return 2
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        cache = args.cache or Path(folder)
        cache.mkdir(parents=True, exist_ok=True)
        result = _measured(args, cache.resolve(), began)
    _save(args, result)
    print(markdown(result))
    print(f"{result['seconds']:.0f} s, {os.cpu_count()} processors", flush=True)
    return int(any(r["peer"] == "pullback" and ("error" in r or r["wrong"]) for r in result["rows"]))


if __name__ == "__main__":
    sys.exit(main())
