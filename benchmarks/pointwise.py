"""Device and host time of every generated op beside eager and compiled torch, in one run, as a share of a large copy.

    python -m benchmarks.pointwise [--warm 16] [--out results.json] [--table results.md]

Device time: launches are queued behind a sleeping kernel and timed by events, so that the host does not count; the median
of several rounds, operands rotated so that the L2 does not serve. Host time: microseconds a call until it returns. Without
options: dense operands at every size, the other layouts at 128 MB an operand, compiled torch dense at 128 MB. Exit code 1
if a cell failed; nothing is judged.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import cases, peers, report
from benchmarks.measure import Choice, Run, Setting, settings
from benchmarks.timing import DeviceClock, copy_bandwidth, no_device
from benchmarks.warm import Task, warm


def some(known: Sequence[str]) -> Any:
    """A list with commas between, of known words."""

    def parse(text: str) -> tuple[str, ...]:
        words = tuple(w.strip() for w in text.split(",") if w.strip())
        unknown = [w for w in words if w not in known]
        if unknown or not words:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown) or 'nothing'}; there are: {', '.join(known)}")
        return words

    return parse


def _sizes(text: str) -> tuple[float, ...]:
    """Megabytes, with commas between."""
    try:
        found = tuple(float(w) for w in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of megabytes") from None
    if not all(0.01 <= mb <= 8192 for mb in found):
        raise argparse.ArgumentTypeError("a size is between 0.01 and 8192 megabytes")
    return found


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser("python -m benchmarks.pointwise", description="Times every generated op.")
    plain = Choice()
    out.add_argument("--ops", help="names of ops or of entries such as 'op(choice=word)', with ';' or ',' between")
    out.add_argument("--layouts", type=some(cases.LAYOUTS), default=plain.layouts)
    out.add_argument("--sizes", type=_sizes, default=plain.sizes, help="megabytes an operand")
    out.add_argument("--dtypes", type=some(cases.DTYPES), default=plain.dtypes)
    out.add_argument("--peers", type=some(cases.PEERS), default=plain.peers)
    out.add_argument("--directions", type=some(cases.DIRECTIONS), default=plain.directions)
    out.add_argument("--dense-only", action="store_true", help="all ops and peers, dense, 128 MB an operand")
    out.add_argument("--everything", action="store_true", help="each layout at each size, compiled torch in all: hours")
    out.add_argument("--warm", type=int, default=0, metavar="N", help="first compile in so many processes")
    out.add_argument("--cache", type=Path, help="folder of compiled kernels; default: a temporary one")
    out.add_argument("--round-ms", type=float, default=3.0, help="device time that a round aims at")
    out.add_argument("--rounds", type=int, default=5)
    out.add_argument("--seconds-limit", type=float, default=math.inf, help="stop early, and say what was left out")
    out.add_argument("--out", type=Path, help="JSON of all rows")
    out.add_argument("--table", type=Path, help="Markdown of the tables")
    return out


def _words(text: str | None) -> tuple[str, ...]:
    """Names; a comma inside brackets belongs to the name."""
    words, depth = [""], 0
    for char in text or "":
        depth += (char == "(") - (char == ")")
        if char == ";" or (char == "," and depth == 0):
            words.append("")
        else:
            words[-1] += char
    return tuple(w.strip() for w in words if w.strip())


def chosen(args: argparse.Namespace) -> Choice:
    layouts, sizes = (("dense",), (float(cases.MAIN_MB),)) if args.dense_only else (args.layouts, args.sizes)
    return Choice(layouts, sizes, args.dtypes, args.peers, args.directions, args.everything)


def tasks(todo: Sequence[Setting], choice: Choice) -> list[Task]:
    """Work for warming: each entry and dtype once, in sizes up to the main one; larger ones use the same kernels."""
    groups: dict[tuple[str, str], list[tuple[str, float, tuple[str, ...]]]] = {}
    for setting in todo:
        kept = tuple(p for p in setting.peers if p != "eager")
        if kept and setting.mb <= choice.main:
            key = (setting.entry.name, setting.dtype)
            groups.setdefault(key, []).append((setting.layout, setting.mb, kept))
    out = [(name, dtype, tuple(found), choice.directions) for (name, dtype), found in groups.items()]
    return sorted(out, key=lambda task: -len(task[2]))


def _save(args: argparse.Namespace, result: dict[str, Any]) -> None:
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    if args.table:
        args.table.write_text(report.markdown(result))


def _measured(args: argparse.Namespace, cache: Path, began: float) -> dict[str, Any]:
    import triton

    peers.environment(cache)
    choice = chosen(args)
    todo = settings(cases.entries(only=_words(args.ops)), choice)
    if args.warm > 0:
        left = args.seconds_limit - (time.monotonic() - began)
        for fault in warm(tasks(todo, choice), args.warm, min(left / 2, 1e6)):
            print(f"warm: {fault:.300}", flush=True)
    peers.configure()
    clock = DeviceClock(args.round_ms, args.rounds)
    result: dict[str, Any] = {
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "copy_bytes_per_second": copy_bandwidth(clock),
    }
    print(
        f"{result['machine']}, copy {result['copy_bytes_per_second'] / 1e12:.2f} TB/s; {len(todo)} settings", flush=True
    )
    run = Run(choice, clock, result["copy_bytes_per_second"])
    result |= {"rows": run.rows, "left_out": run.left_out}
    saved = time.monotonic()

    def progress(text: str) -> None:
        nonlocal saved
        print(text, flush=True)
        if time.monotonic() - saved > 60:  # so that a run that is stopped leaves something
            _save(args, result)
            saved = time.monotonic()

    run.all(todo, began + args.seconds_limit, progress)
    result |= {"rounds_not_queued": clock.late, "seconds": time.monotonic() - began}
    return result


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
    cells = report.Cells(result["rows"])
    print("\n".join(["", *report.summary(cells)]))
    if result["left_out"]:
        print("\n".join(["", "Left out for lack of time:", "", *report.left_out(result["left_out"])]))
    if cells.errors:
        print("\n".join(["", "Failed:", "", *report.errors(cells)]))
    print(f"\n{result['seconds']:.0f} s, {os.cpu_count()} processors", flush=True)
    return 1 if cells.errors else 0


if __name__ == "__main__":
    sys.exit(main())
