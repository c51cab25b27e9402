"""From measured rows to Markdown. Needs neither torch nor a GPU."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

GOOD_SHARE = 0.95
SLOWER = 1.03
GOOD_LAYOUT = 0.5
MAIN_MB = 512
UNEXPLAINED = "unexplained"
REASONS: dict[str, str] = {
    "mixed": "the operands' orders differ: one of them is read across its rows",
    "unaligned": "addresses off 16 bytes: narrower loads",
    "column backward": "the column's gradient is a sum along each row",
    "row backward": "the row's gradient is a sum over all rows, in two stages",
}
"""By layout and direction, or by layout alone, why a layout may be slower than dense."""
_ORDER = ("bf16", "f16", "f32")
DIRECTIONS = ("forward", "backward", "training")
_MOST = 200
"""Lines of one list of the summary; the JSON has all."""


def reason(layout: str, direction: str) -> str:
    return REASONS.get(f"{layout} {direction}", REASONS.get(layout, UNEXPLAINED))


class Cells:
    """Rows by what they measured."""

    def __init__(self, rows: Iterable[Row]) -> None:
        rows = list(rows)
        self.good = [r for r in rows if "error" not in r]
        self.errors = [r for r in rows if "error" in r and not r.get("unable")]
        self.by = {self._key(r): r for r in self.good}
        sizes = {r["mb"] for r in self.good if r["layout"] == "dense"} or {r["mb"] for r in self.good}
        self.main: float = MAIN_MB if MAIN_MB in sizes or not sizes else max(sizes)
        self.dtypes = sorted({r["dtype"] for r in self.good}, key=lambda d: (_ORDER.index(d) if d in _ORDER else 9, d))
        self.sizes = sorted({r["mb"] for r in self.good})

    @staticmethod
    def _key(row: Row) -> tuple[Any, ...]:
        return tuple(row[n] for n in ("op", "direction", "dtype", "layout", "mb", "peer"))

    def get(self, op: str, direction: str, dtype: str, layout: str, mb: float, peer: str, what: str = "share") -> Any:
        row = self.by.get((op, direction, dtype, layout, mb, peer))
        return None if row is None else row[what]

    def lines(self, layouts: Sequence[str] | None = None) -> list[tuple[str, str]]:
        """Each op and direction that has a cell, in the order of measuring."""
        kept = [r for r in self.good if layouts is None or r["layout"] in layouts]
        pairs = dict.fromkeys((r["op"], r["direction"]) for r in kept)
        ops = list(dict.fromkeys(op for op, _ in pairs))
        return sorted(pairs, key=lambda p: (ops.index(p[0]), DIRECTIONS.index(p[1])))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def grid(head: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    body = [f"| {' | '.join(line)} |" for line in lines]
    return [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *body] if body else ["none"]


def dense(cells: Cells) -> list[str]:
    """Ours, then in brackets eager and compiled torch."""
    lines = []
    for op, direction in cells.lines(("dense",)):
        line = [f"{op} {direction}"]
        for dtype in cells.dtypes:
            ours, eager, compiled = (
                _number(cells.get(op, direction, dtype, "dense", cells.main, p))
                for p in ("pullback", "eager", "compiled")
            )
            line.append("" if (ours, eager, compiled) == ("-",) * 3 else f"{ours} [{eager}, {compiled}]")
        if any(line[1:]):
            lines.append(line)
    return grid(["Op", *cells.dtypes], lines)


def layouts(cells: Cells) -> list[str]:
    """Our share in a layout relative to that of dense operands of the same size; below the bound, with a reason."""
    names = [n for n in dict.fromkeys(r["layout"] for r in cells.good) if n != "dense"]
    lines = []
    for op, direction in cells.lines(names):
        for layout in names:
            for mb in cells.sizes:
                ratios = [_relative(cells, op, direction, dtype, layout, mb) for dtype in cells.dtypes]
                if any(r is not None for r in ratios):
                    low = any(r is not None and r < GOOD_LAYOUT for r in ratios)
                    marks = [_number(r) + (" **!**" if r is not None and r < GOOD_LAYOUT else "") for r in ratios]
                    why = reason(layout, direction) if low else ""
                    lines.append([f"{op} {direction}", layout, f"{mb:g}", *marks, why])
    return grid(["Op", "Layout", "MB", *cells.dtypes, f"Why below {GOOD_LAYOUT:g}"], lines)


def _relative(cells: Cells, op: str, direction: str, dtype: str, layout: str, mb: float) -> float | None:
    here = cells.get(op, direction, dtype, layout, mb, "pullback")
    there = cells.get(op, direction, dtype, "dense", mb, "pullback")
    return here / there if here is not None and there else None


def spread(cells: Cells) -> list[str]:
    """Our share in each layout relative to dense: the median over the ops, and the three lowest."""
    found: dict[tuple[str, str, str], list[tuple[float, str]]] = {}
    for r in cells.good:
        if r["peer"] == "pullback" and r["layout"] != "dense":
            ratio = _relative(cells, r["op"], r["direction"], r["dtype"], r["layout"], r["mb"])
            if ratio is not None:
                found.setdefault((r["layout"], r["direction"], r["dtype"]), []).append((ratio, r["op"]))
    lines = []
    for (layout, direction, dtype), ratios in sorted(found.items()):
        lowest = ", ".join(f"{op} {ratio:.2f}" for ratio, op in sorted(ratios)[:3])
        lines.append(
            [layout, direction, dtype, str(len(ratios)), f"{statistics.median(r for r, _ in ratios):.2f}", lowest]
        )
    return grid(["Layout", "Direction", "dtype", "Ops", "Median", "Lowest"], lines)


def sizes(cells: Cells) -> list[str]:
    """Median shares over all ops, ours and eager torch's, by size."""
    lines = []
    for direction in DIRECTIONS:
        for mb in cells.sizes:
            line = [direction, f"{mb:g}"]
            for dtype in cells.dtypes:
                medians = []
                for peer in ("pullback", "eager"):
                    where = (direction, dtype, "dense", mb, peer)
                    shares = [r["share"] for r in cells.good if Cells._key(r)[1:] == where]
                    medians.append(_number(statistics.median(shares) if shares else None))
                line.append(f"{medians[0]} [{medians[1]}]")
            lines.append(line)
    return grid(["Direction", "MB", *cells.dtypes], lines)


def host(cells: Cells) -> list[str]:
    """Microseconds a call."""
    lines = []
    for op, direction in cells.lines(("dense",)):
        rows = [r for r in cells.good if (r["op"], r["direction"]) == (op, direction) and r.get("host_us") is not None]
        found = {r["peer"]: f"{r['host_us']:.0f}" for r in rows}
        if found:
            lines.append([f"{op} {direction}", *(found.get(p, "-") for p in ("pullback", "eager", "compiled"))])
    return grid(["Op", "Pullback", "torch eager", "torch.compile"], lines)


def below(cells: Cells) -> list[Row]:
    """Our dense cells under the bound, from the main size on: smaller tensors do not fill the device."""
    kept = [
        r
        for r in cells.good
        if r["peer"] == "pullback" and r["layout"] == "dense" and r["mb"] >= cells.main and r["share"] < GOOD_SHARE
    ]
    return sorted(kept, key=lambda r: float(r["share"]))


def slower(cells: Cells) -> list[tuple[float, Row, Row]]:
    """Cells in which the better peer is quicker by more than the bound: how much, ours, the peer's.

    A backward alone does not count where the whole of forward and backward was measured: a peer may have a shorter backward
    for a longer forward, which stores a mask or a quotient for it.
    """
    out = []
    whole = {Cells._key(r)[:1] + Cells._key(r)[2:] for r in cells.good if r["direction"] == "training"}
    for row in cells.good:
        if row["peer"] == "pullback":
            if row["direction"] == "backward" and Cells._key(row)[:1] + Cells._key(row)[2:] in whole:
                continue
            where = Cells._key(row)[:-1]
            others = [o for p in ("eager", "compiled") if (o := cells.by.get((*where, p))) is not None]
            best = min(others, key=lambda o: float(o["ms"]), default=None)
            if best is not None and row["ms"] > SLOWER * best["ms"]:
                out.append((row["ms"] / best["ms"], row, best))
    return sorted(out, key=lambda found: -found[0])


def _place(row: Row) -> list[str]:
    return [f"{row['op']} {row['direction']}".strip(), str(row["dtype"]), str(row["layout"]), f"{row['mb']:g}"]


def summary(cells: Cells) -> list[str]:
    low, late = below(cells), slower(cells)
    ours = [r for r in cells.good if r["peer"] == "pullback"]
    whole = [r for r in ours if r["layout"] == "dense" and r["mb"] >= cells.main]
    out = [f"{len(cells.good)} cells measured, {len(cells.errors)} failed.", ""]
    out += [f"Dense, from {cells.main:g} MB, below {GOOD_SHARE:g}: {len(low)} of {len(whole)} cells.", ""]
    out += grid(["Op", "dtype", "Layout", "MB", "Share"], [[*_place(r), f"{r['share']:.3f}"] for r in low[:_MOST]])
    out += ["", f"Slower than the better peer by more than {SLOWER - 1:.0%}: {len(late)} of {len(ours)} cells.", ""]
    lines = [
        [*_place(r), f"{r['ms']:.4f}", f"{p['ms']:.4f} {p['peer']}", f"{times:.2f}"] for times, r, p in late[:_MOST]
    ]
    out += grid(["Op", "dtype", "Layout", "MB", "Ours, ms", "Peer, ms", "Times"], lines)
    flagged = Counter(_flags(cells))
    out += ["", f"Layouts below {GOOD_LAYOUT:g} of dense: {sum(flagged.values())} cells.", ""]
    out += grid(["Layout", "Cells", "Why"], [[where, str(n), why] for (where, why), n in sorted(flagged.items())])
    return out


def _flags(cells: Cells) -> list[tuple[str, str]]:
    out = []
    for row in cells.good:
        if row["peer"] == "pullback" and row["layout"] != "dense":
            ratio = _relative(cells, row["op"], row["direction"], row["dtype"], row["layout"], row["mb"])
            if ratio is not None and ratio < GOOD_LAYOUT:
                out.append((f"{row['layout']} {row['direction']}", reason(row["layout"], row["direction"])))
    return out


def errors(cells: Cells) -> list[str]:
    lines = []
    for row in cells.errors:
        text = " ".join(str(row["error"]).split()).replace("|", "\\|")
        lines.append([*_place(row), str(row["peer"]), text[:200]])
    return grid(["Op", "dtype", "Layout", "MB", "Peer", "Error"], lines)


def left_out(rows: Sequence[Row]) -> list[str]:
    """What the time did not reach: by layout and size, which ops in which dtypes."""
    groups: dict[tuple[str, float], dict[str, list[str]]] = {}
    for row in rows:
        groups.setdefault((row["layout"], row["mb"]), {}).setdefault(row["op"], []).append(row["dtype"])
    out = []
    for (layout, mb), ops in groups.items():
        words = [f"{op} ({', '.join(dict.fromkeys(dtypes))})" for op, dtypes in ops.items()]
        out.append([layout, f"{mb:g}", str(len(ops)), ", ".join(words)])
    return grid(["Layout", "MB", "Ops", "Which"], out)


def markdown(result: Mapping[str, Any]) -> str:
    """All tables of a result as it stands in the JSON."""
    cells = Cells(result["rows"])
    bandwidth = result["copy_bytes_per_second"] / 1e12
    out = [
        "# Pointwise ops",
        "",
        f"{result['machine']}, torch {result['torch']}, triton {result['triton']}. A figure is the bandwidth that was reached"
        f" as a share of that of a large copy in the same run, {bandwidth:.2f} TB/s.",
    ]
    sections = [
        ("Summary", summary(cells)),
        (f"Dense, {cells.main:g} MB an operand: Pullback [eager, compiled]", dense(cells)),
        ("Layouts: Pullback's share relative to dense", layouts(cells)),
        ("Sizes, dense: median share over the ops, Pullback [eager]", sizes(cells)),
        ("Host, microseconds a call, dense, bf16", host(cells)),
        ("Failed cells", errors(cells)),
        ("Left out for lack of time", left_out(result.get("left_out", ()))),
    ]
    for title, lines in sections:
        out += ["", f"## {title}", "", *lines]
    return "\n".join(out) + "\n"
