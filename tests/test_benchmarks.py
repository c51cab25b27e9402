"""The benchmark without a GPU: its cases, the bytes it counts, the tables it draws. Nothing here looks at a clock."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import cases, measure, peers, pointwise, report, rows, steps, tiles
from benchmarks.cases import Operands

ROOT = Path(__file__).parents[1]
ENTRIES = cases.entries()
ROWS, COLS = 8, 16


def entry(name: str) -> cases.Entry:
    return next(e for e in ENTRIES if e.name == name)


def two_tensors() -> list[cases.Entry]:
    return [e for e in ENTRIES if "row" in e.layouts]


def laid_out(name: cases.Entry, layout: str, dtype: str = "bf16") -> dict[str, torch.Tensor]:
    return Operands(name, name.dtypes((dtype,))[0], ROWS, COLS, 1, "cpu").views(layout)[0]


# ---------------------------------------------------------------------------------------------- every op


def test_every_op_of_the_package_is_measured() -> None:
    ops = {p.stem for p in (ROOT / "generated" / "ops").glob("*.py")} - {"__init__"}
    assert {e.op for e in ENTRIES} | set(steps.ops()) == ops
    names = [e.name for e in ENTRIES]
    assert len(names) == len(set(names))
    for reference in (e.case.reference for e in ENTRIES if e.case.reference is not None):
        assert vars(sys.modules[reference.__module__])[reference.__name__] is reference  # torch.compile looks there


@pytest.mark.parametrize("case", ENTRIES, ids=[e.name for e in ENTRIES])
def test_operands_are_valid_in_every_layout(case: cases.Entry) -> None:
    """The op plans its launch on them, the reference takes them, and both agree on what comes out."""
    dtype = case.dtypes(("bf16",))[0]
    operands = Operands(case, dtype, ROWS, COLS, 1, "cpu")
    from generated.runtime.plan import Meta

    names = {v: k for k, v in cases.TORCH.items()}
    reference = peers.function(case, "eager")
    for layout in case.layouts:
        given = operands.views(layout)[0]
        metas = {n: Meta(names[v.dtype], tuple(v.shape), v.stride()) for n, v in given.items()}
        plan = case.instance.plan_forward(metas)
        assert plan.launches
        outputs = {n: torch.empty(m.shape, dtype=cases.TORCH[m.dtype], device="meta") for n, m in plan.outputs.items()}
        if reference is not None:
            expected = reference(*given.values())
            assert [(y.shape, y.dtype) for y in expected] == [(y.shape, y.dtype) for y in outputs.values()], layout
        assert cases.moved(case.instance, "forward", given, outputs) > 0
        backward = cases.moved(case.instance, "backward", given, outputs)
        assert (backward > 0) <= bool(case.instance.gradients)
        for tensor in case.tensors:
            low, high = case.case.domains.get(tensor.name, (-math.inf, math.inf))
            assert bool(((given[tensor.name] >= low) & (given[tensor.name] <= high)).all()), tensor.name


@pytest.mark.parametrize("case", [two_tensors()[0], ENTRIES[0]], ids=lambda e: e.name)
def test_layouts_are_what_they_say(case: cases.Entry) -> None:
    layouts = {layout: list(laid_out(case, layout).values()) for layout in case.layouts}
    size = layouts["dense"][0].element_size()
    assert all(t.is_contiguous() and t.shape == (ROWS, COLS) for t in layouts["dense"])
    assert all(t.stride() == (1, ROWS) and t.shape == (ROWS, COLS) for t in layouts["transposed"])
    assert all(t.storage_offset() == 1 and (t.storage_offset() * size) % 16 for t in layouts["unaligned"])
    if "mixed" in layouts:
        assert [t.stride() for t in layouts["mixed"]] == [(1, ROWS), *[(COLS, 1)] * (len(case.tensors) - 1)]
        assert [t.shape for t in layouts["row"]] == [(ROWS, COLS)] * (len(case.tensors) - 1) + [(COLS,)]
        assert [t.shape for t in layouts["column"]] == [(ROWS, COLS)] * (len(case.tensors) - 1) + [(ROWS, 1)]


def test_layouts_share_memory_and_sets_do_not() -> None:
    operands = Operands(two_tensors()[0], "f32", ROWS, COLS, 2, "cpu")
    first = [{t.untyped_storage().data_ptr() for t in operands.views(n)[0].values()} for n in ("dense", "unaligned")]
    other = {t.untyped_storage().data_ptr() for t in operands.views("dense")[1].values()}
    assert first[0] == first[1] and not first[0] & other


def test_sizes_are_bytes_an_operand() -> None:
    for mb in (1, 16, 128, 1024):
        for dtype in cases.DTYPES:
            rows, cols = cases.extents(mb, dtype)
            assert rows * cols * cases.ITEM_SIZES[dtype] == mb * 2**20 and rows % 16 == cols % 16 == 0
    small = Operands.sets_for(ENTRIES[0], "f32", *cases.extents(1, "f32"))
    assert small == 64 and Operands.sets_for(ENTRIES[0], "f32", *cases.extents(1024, "f32")) == 2


def test_choices_are_entries_of_their_own() -> None:
    with_choices = [e for e in ENTRIES if any(isinstance(k, tuple) for k in e.case.op.kinds.values())]
    assert with_choices
    for case in with_choices:
        for name, kind in case.case.op.kinds.items():
            if isinstance(kind, tuple):
                assert {e.attrs[name] for e in ENTRIES if e.op == case.op} == set(kind)
                assert f"{name}={case.attrs[name]}" in case.name


def test_an_unknown_op_is_named() -> None:
    with pytest.raises(ValueError, match="no such op: nothing_like_it"):
        cases.entries(only=("nothing_like_it",))
    assert [e.name for e in cases.entries(only=(ENTRIES[-1].op,))] == [
        e.name for e in ENTRIES if e.op == ENTRIES[-1].op
    ]


# ---------------------------------------------------------------------------------------------- bytes


class Pointer:
    def __init__(self, name: str) -> None:
        self.name = name


class Kernel:
    def __init__(self, *names: str) -> None:
        self.kernel = self.abi = self
        self.params = [Pointer(n) for n in names]


class Op:
    """Two inputs, one output."""

    gradients = ("a", "b")
    residuals: tuple[str, ...] = ("a",)
    backward: Any = (Kernel("a_ptr", "dy_ptr", "da_ptr", "db_ptr"),)
    passed: dict[str, str] = {}

    def passes(self) -> dict[str, str]:
        return self.passed


def made(a: Any, b: Any, dtype: torch.dtype = torch.float32) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    shape = torch.broadcast_shapes(a, b)
    tensors = {"a": torch.empty(a, dtype=dtype), "b": torch.empty(b, dtype=dtype)}
    return tensors, {"y": torch.empty(shape, dtype=dtype)}


def test_bytes_forward() -> None:
    assert cases.moved(Op(), "forward", *made((4, 8), (4, 8))) == 3 * 32 * 4
    assert cases.moved(Op(), "forward", *made((4, 8), (8,), torch.bfloat16)) == (2 * 32 + 8) * 2
    given, _ = made((4, 8), (4, 8))
    assert cases.moved(Op(), "forward", given, {"y": torch.empty((4, 8), dtype=torch.bool)}) == 2 * 32 * 4 + 32


def test_bytes_backward() -> None:
    full = 32 * 4
    assert cases.moved(Op(), "backward", *made((4, 8), (4, 8))) == 4 * full  # a and dy read, da and db written
    op = Op()
    op.residuals = ()
    assert cases.moved(op, "backward", *made((4, 8), (4, 8))) == 3 * full
    op.residuals = ("y",)
    assert cases.moved(op, "backward", *made((4, 8), (4, 1))) == 3 * full + 4 * 4
    given, outputs = made((4, 8), (4, 8))
    given["b"] = given["b"].long()
    assert cases.moved(op, "backward", given, outputs) == 3 * full  # an integer has no gradient


def test_bytes_backward_of_what_is_passed_on() -> None:
    full = 32 * 4
    op = Op()
    op.residuals, op.passed = (), {"a": "dy"}
    assert cases.moved(op, "backward", *made((4, 8), (4, 8))) == 2 * full
    op.passed = {"a": "dy", "b": "dy"}
    assert cases.moved(op, "backward", *made((4, 8), (4, 8))) == 0
    assert cases.moved(op, "backward", *made((4, 8), (8,))) == full + 8 * 4  # summed over the rows
    op.passed, op.backward = {}, (Kernel("da_ptr", "db_ptr"),)
    assert cases.moved(op, "backward", *made((4, 8), (4, 8))) == 2 * full  # a cotangent that no kernel reads


# ---------------------------------------------------------------------------------------------- the run


class Clock:
    """Runs a call once, and says that it took a millisecond."""

    def device(self, call: Callable[[int], Any]) -> float:
        call(0)
        call(1)
        return 1e-3

    def host(self, call: Callable[[int], Any]) -> float:
        call(0)
        return 5e-6


def small_run(choice: measure.Choice) -> measure.Run:
    return measure.Run(choice, Clock(), 1e6, "cpu", lambda mb, dtype: (ROWS, COLS))


def test_a_run_from_operands_to_tables() -> None:
    choice = measure.Choice(sizes=(128,), dtypes=("bf16",), peers=("pullback", "eager"))
    run = small_run(choice)
    run.all(measure.settings([two_tensors()[0]], choice), math.inf, lambda text: None)
    assert not [r for r in run.rows if "error" in r]
    layouts = {r["layout"] for r in run.rows}
    assert layouts == set(cases.LAYOUTS)
    for row in run.rows:
        assert row["share"] == pytest.approx(row["bytes"] / 1e-3 / 1e6)
        assert (row["host_us"] is not None) == (row["layout"] == "dense")
    result = {"machine": "m", "torch": "2", "triton": "3", "copy_bytes_per_second": 1e6, "rows": run.rows}
    assert json.loads(json.dumps(result)) == result
    assert "| unaligned | 128 |" in report.markdown(result)


def test_a_failing_cell_is_a_row_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    found = peers.function

    def broken(case: cases.Entry, peer: str) -> Any:
        def fails(*tensors: torch.Tensor) -> Any:
            raise RuntimeError("it | broke\nhere")

        return fails if peer == "pullback" else found(case, peer)

    monkeypatch.setattr(peers, "function", broken)
    choice = measure.Choice(("dense",), (128,), ("f32",), ("pullback", "eager"), ("forward",))
    run = small_run(choice)
    run.all(measure.settings([ENTRIES[0]], choice), math.inf, lambda text: None)
    assert [(r["peer"], r.get("error")) for r in run.rows] == [
        ("pullback", "RuntimeError: it | broke\nhere"),
        ("eager", None),
    ]
    assert "RuntimeError: it \\| broke here" in "\n".join(report.errors(report.Cells(run.rows)))


def test_what_the_time_does_not_reach_is_named() -> None:
    choice = measure.Choice(("dense",), (128,), ("f32", "bf16"), ("eager",))
    todo = measure.settings(ENTRIES[:2], choice)
    run = small_run(choice)
    run.all(todo, -math.inf, lambda text: None)
    assert run.rows == [] and len(run.left_out) == len(todo)
    lines = report.left_out(run.left_out)
    assert lines[-1].startswith("| dense | 128 | 2 |") and f"{ENTRIES[0].name} (f32, bf16)" in lines[-1]


def test_the_order_is_what_matters_most_first() -> None:
    case = two_tensors()[0]
    todo = measure.settings([case], measure.Choice(dtypes=("f32",)))
    assert [(s.layout, s.mb) for s in todo] == [
        ("dense", 512),
        *((n, 512) for n in cases.LAYOUTS[1:]),
        *(("dense", mb) for mb in (1, 16, 128, 1024)),
    ]
    assert [s for s in todo if "compiled" in s.peers] == todo[:1]
    whole = measure.settings([case], measure.Choice(dtypes=("f32",), everything=True))
    assert len(whole) == 5 * len(cases.LAYOUTS) and all("compiled" in s.peers for s in whole)
    assert measure.settings([case], measure.Choice(dtypes=("f32",), peers=("compiled",))) == [
        s for s in measure.settings([case], measure.Choice(dtypes=("f32",), peers=("compiled",))) if s.layout == "dense"
    ]


def test_options() -> None:
    args = pointwise.parser().parse_args(["--dense-only", "--dtypes", "bf16,f32", "--ops", "one,two(a=b, c=d);three"])
    choice = pointwise.chosen(args)
    assert (choice.layouts, choice.sizes, choice.dtypes) == (("dense",), (512.0,), ("bf16", "f32"))
    assert pointwise._words(args.ops) == ("one", "two(a=b, c=d)", "three")
    work = pointwise.tasks(measure.settings(ENTRIES[:1], choice), choice)
    settings = (("dense", 512.0, ("pullback", "compiled")),)
    assert work == [(ENTRIES[0].name, d, settings, cases.DIRECTIONS) for d in ("bf16", "f32")]
    for wrong in (["--dtypes", "f8"], ["--sizes", "big"], ["--layouts", ""], ["--sizes", "0"]):
        with pytest.raises(SystemExit):
            pointwise.parser().parse_args(wrong)


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pointwise.main([]) == 2
    assert "no GPU" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------- tables


def cell(op: str, peer: str, share: float, **other: Any) -> dict[str, Any]:
    plain = {"direction": "forward", "dtype": "bf16", "layout": "dense", "mb": 512, "host_us": None}
    return {"op": op, "peer": peer, "ms": 1 / share, "share": share, **plain, **other}


def body(lines: list[str]) -> list[str]:
    return lines[2:]


def test_the_dense_table() -> None:
    rows = [
        cell("f", "pullback", 0.98),
        cell("f", "eager", 0.5),
        cell("f", "compiled", 0.9),
        cell("f", "pullback", 1.01, dtype="f32"),
        cell("f", "pullback", 0.7, direction="backward"),
        cell("f", "pullback", 0.2, mb=1),
    ]
    lines = report.dense(report.Cells(rows))
    assert lines[0] == "| Op | bf16 | f32 |"
    assert body(lines) == [
        "| f forward | 0.98 [0.50, 0.90] | 1.01 [-, -] |",
        "| f backward | 0.70 [-, -] |  |",
    ]


def test_the_layout_table_flags_and_explains() -> None:
    rows = [cell("f", "pullback", 1.0), cell("f", "pullback", 1.0, dtype="f32")]
    rows += [cell("f", "pullback", 0.25, layout="mixed"), cell("f", "pullback", 0.75, layout="mixed", dtype="f32")]
    rows += [cell("f", "pullback", 0.4, layout="transposed"), cell("f", "pullback", 0.9, layout="row")]
    cells = report.Cells(rows)
    assert body(report.layouts(cells)) == [
        f"| f forward | mixed | 512 | 0.25 **!** | 0.75 | {report.REASONS['mixed']} |",
        "| f forward | transposed | 512 | 0.40 **!** | - | unexplained |",
        "| f forward | row | 512 | 0.90 | - |  |",
    ]
    text = "\n".join(report.summary(cells))
    assert "Layouts below 0.5 of dense: 2 cells." in text
    assert f"| mixed forward | 1 | {report.REASONS['mixed']} |" in text


def test_reasons_are_looked_up_by_direction_then_by_layout() -> None:
    assert report.reason("row", "backward") == report.REASONS["row backward"]
    assert report.reason("mixed", "backward") == report.REASONS["mixed"]
    assert report.reason("row", "forward") == report.UNEXPLAINED
    assert {k.split()[0] for k in report.REASONS} <= set(cases.LAYOUTS)


def test_the_summary() -> None:
    rows = [
        cell("low", "pullback", 0.9),
        cell("low", "eager", 0.91),
        cell("late", "pullback", 0.96),
        cell("late", "eager", 0.97),
        cell("late", "compiled", 1.2),
        cell("small", "pullback", 0.1, mb=1),
        cell("large", "pullback", 0.949, mb=1024),
        {
            "op": "bad",
            "direction": "forward",
            "dtype": "f16",
            "layout": "row",
            "mb": 512,
            "peer": "eager",
            "error": "E",
        },
    ]
    cells = report.Cells(rows)
    assert [r["op"] for r in report.below(cells)] == ["low", "large"]
    found = report.slower(cells)
    assert [(round(times, 2), row["op"], best["peer"]) for times, row, best in found] == [(1.25, "late", "compiled")]
    text = "\n".join(report.summary(cells))
    assert "7 cells measured, 1 failed." in text and "below 0.95: 2 of 3 cells." in text
    assert "more than 3%: 1 of 4 cells." in text and "| late forward | bf16 | dense | 512 |" in text
    assert body(report.errors(cells)) == ["| bad forward | f16 | row | 512 | eager | E |"]


def test_sizes_and_host() -> None:
    rows = [cell(op, "pullback", share, mb=mb) for op, share in (("f", 0.5), ("g", 0.7)) for mb in (1, 512)]
    rows += [cell("f", "eager", 0.9, host_us=12.4), cell("f", "compiled", 0.9, host_us=30)]
    cells = report.Cells(rows)
    assert "| forward | 512 | 0.60 [0.90] |" in report.sizes(cells)
    assert body(report.host(cells)) == ["| f forward | - | 12 | 30 |"]


def test_a_result_without_rows_has_all_sections() -> None:
    empty = {"machine": "m", "torch": "2", "triton": "3", "copy_bytes_per_second": 4e12, "rows": []}
    titles = re.findall(r"^## (\w+)", report.markdown(empty), re.MULTILINE)
    assert titles == ["Summary", "Dense", "Layouts", "Sizes", "Host", "Failed", "Left"]


def tables(text: str) -> Iterator[list[int]]:
    for block in text.split("\n\n"):
        if block.startswith("|"):
            yield [len(re.findall(r"(?<!\\)\|", line)) for line in block.strip().split("\n")]


def test_every_table_is_rectangular() -> None:
    rows = [cell("f", p, 0.9, layout=n, dtype=d) for p in cases.PEERS for n in cases.LAYOUTS for d in cases.DTYPES]
    rows.append({**cell("f", "eager", 1), "error": "a | b"})
    text = report.markdown(
        {"machine": "m", "torch": "2", "triton": "3", "copy_bytes_per_second": 4e12, "rows": rows, "left_out": rows[:2]}
    )
    counts = list(tables(text))
    assert len(counts) >= 6 and all(len(set(lines)) == 1 for lines in counts)


def test_a_shorter_backward_for_a_longer_forward_is_not_slower() -> None:
    rows = [
        cell("f", "pullback", 0.7, direction="backward"),
        cell("f", "compiled", 0.9, direction="backward"),
        cell("g", "pullback", 0.7, direction="backward"),
        cell("g", "compiled", 0.9, direction="backward"),
        cell("g", "pullback", 0.7, direction="training"),
        cell("g", "compiled", 0.7, direction="training"),
    ]
    assert [row["op"] for _, row, _ in report.slower(report.Cells(rows))] == ["f"]
    rows.append(cell("g", "eager", 0.8, direction="training"))
    found = report.slower(report.Cells(rows))
    assert {(row["op"], row["direction"]) for _, row, _ in found} == {("f", "backward"), ("g", "training")}


def test_a_peer_without_a_derivative_is_no_failure() -> None:
    def refuse(peer: str) -> measure.Row:
        error = RuntimeError("derivative for aten::floor_divide is not implemented")
        run = measure.Run(measure.Choice(), None, 1.0, device="cpu")
        return run._fault(measure.Setting(ENTRIES[0], "f32", "dense", 1, ()), "backward", peer, error)

    cells = report.Cells([refuse("eager"), refuse("pullback")])
    assert [r["peer"] for r in cells.errors] == ["pullback"]


def test_bytes_of_training_are_those_of_both() -> None:
    op, tensors = Op(), made((4, 8), (4, 8))
    both = cases.moved(op, "forward", *tensors) + cases.moved(op, "backward", *tensors)
    assert cases.moved(op, "training", *tensors) == both > 0


# ---------------------------------------------------------------------------------------------- rows


def row_cells(*chosen: str) -> list[rows.Cell]:
    return rows.cells(("rms_norm", "layer_norm", "softmax"), (256,), ("bf16", "f32"), chosen, 0.005)


def test_rows_are_held_against_float64_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager torch is right; a peer that is off by a hundredth says so in its row."""
    monkeypatch.setattr(Operands, "sets_for", staticmethod(lambda *a: 2))
    found = [r for c in row_cells("eager") for r in rows.measure(c, Clock(), 1e6, "cpu")]
    assert [r["direction"] for r in found] == [*rows.DIRECTIONS] * 6 and not any(r.get("wrong", True) for r in found)
    assert all(r["share"] == pytest.approx(r["bytes"] / 1e-3 / 1e6) for r in found)
    right = rows.function

    def off_by_a_little(cell: rows.Cell) -> Any:
        run = right(cell)
        assert run is not None
        return lambda *tensors: tuple(1.02 * y for y in run(*tensors))

    monkeypatch.setattr(rows, "function", off_by_a_little)
    off = rows.measure(row_cells("eager")[0], Clock(), 1e6, "cpu")
    assert all(r["wrong"] and r["deviation"] > 0.01 for r in off)
    result = {"machine": "m", "torch": "2", "triton": "3", "copy_bytes_per_second": 1e6, "rows": [*found[2:], *off]}
    text = rows.markdown(json.loads(json.dumps(result)))
    assert " wrong" in text and "off by" in text and all(len(set(lines)) == 1 for lines in tables(text))


def test_bytes_of_rows() -> None:
    """Of a norm of 5 rows: x and y and the weight; then x, dy, dx, both of the weight's, and a statistic a row."""
    cell = dataclasses.replace(row_cells("eager")[1], mb=5 * 256 * 4 / 2**20)
    assert (cell.op, cell.rows, cell.dtype) == ("rms_norm", 5, "f32")
    forward, backward = (r["bytes"] for r in rows.measure(cell, Clock(), 1e6, "cpu"))
    assert forward == 4 * (2 * 5 * 256 + 256) and backward == 4 * (3 * 5 * 256 + 2 * 256 + 5)


def test_rows_of_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix of logits and a class a row, the mean of their losses, and both directions in one beside each alone."""
    monkeypatch.setattr(Operands, "sets_for", staticmethod(lambda *a: 2))
    monkeypatch.setattr(rows, "CLASSES", (96,))
    cell = rows.cells(("cross_entropy",), (256, 64), ("f32",), ("eager",), 5 * 96 * 4 / 2**20)[0]
    given, _ = rows.operands(cell, device="cpu")
    assert given["x"].shape == (5, 96) and given["target"].shape == (5,) and 0 <= int(given["target"].min())
    found = rows.measure(cell, Clock(), 1e6, "cpu")
    assert [r["direction"] for r in found] == ["forward", "backward", "training"] and not any(r["wrong"] for r in found)
    forward, backward, both = (r["bytes"] for r in found)
    assert forward == 5 * 96 * 4 + 5 * 8 + 4 and backward == 2 * 5 * 96 * 4 + 5 * 8 + 4 + 2 * 5 * 4 + 4
    assert both == forward + (2 * 5 * 4 + 4) + backward  # three statistics are kept
    assert "cross_entropy training" in "\n".join(rows.table(found))


def test_a_peer_that_refuses_a_width_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(cell: rows.Cell) -> Any:
        raise RuntimeError("too wide")

    monkeypatch.setattr(rows, "function", refuses)
    (row,) = rows.measure(row_cells("eager")[0], Clock(), 1e6, "cpu")
    assert "too wide" in row["error"] and "RuntimeError: too wide" in "\n".join(rows.faults([row]))
    assert rows.table([row]) == ["none"]


def test_rows_order_and_options() -> None:
    """Ours first; ops that are not there are left out; a width is a number."""
    todo = rows.cells(rows.OPS, (64, 32), ("f32",), ("pullback", "eager"), 1.0)
    assert [c.peer for c in todo] == sorted((c.peer for c in todo), reverse=True)
    assert {c.op for c in todo} == set(rows.there(rows.OPS)) and rows.there(["no_such_op"]) == ()
    assert rows.parser().parse_args(["--widths", "7,9"]).widths == (7, 9)
    for wrong in (["--widths", "wide"], ["--widths", "0"], ["--peers", "nobody"]):
        with pytest.raises(SystemExit):
            rows.parser().parse_args(wrong)


# ---------------------------------------------------------------------------------------------- tiles


@pytest.mark.parametrize("op", ["softmax", "layer_norm"])
def test_other_tiles_are_taken_and_give_the_same(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each that is listed is a tile of its own; a kernel run under it agrees with float64; after it the rule is the old one."""
    monkeypatch.setattr(Operands, "sets_for", staticmethod(lambda *a: 2))
    cell = rows.Cell(op, 96, "f32", "pullback", 0.02)
    todo = tiles.tiles(cell, rows.DIRECTIONS, "cpu")
    assert [c for _, c in todo].count(tiles.Change()) == 2 and len(set(todo)) == len(todo) > 8
    programs = [c for d, c in todo if c.programs or c.stages]
    assert bool(programs) == (op == "layer_norm"), "only where gradients are summed over rows"
    found = [tiles.measure(cell, *one, Clock(), 1e6, "cpu") for one in [*todo[:4], *todo[-4:]]]
    assert not any(r.get("wrong", True) for r in found), found
    taken = [(r["direction"], *r["tiles"]) for r in found]
    assert len(set(taken)) == len(taken) and all(len(t) > 1 for t in taken)
    again = tiles.measure(cell, "forward", tiles.Change(), Clock(), 1e6, "cpu")
    assert again["tiles"] == found[0]["tiles"]


def test_steps_of_a_long_row_vary_too() -> None:
    """Where a row is walked over in several steps, their columns and how many are in hand; where it is one tile, neither."""
    split = tiles.Split(((300, 10000),), ((10000, 1),), False)
    steps_of = tiles.Tile(1, 2048, True, 4, 1, 300, 3)
    change = tiles.Change(warps=1, stages=2, columns=-1)
    assert str(change) == "warps x 2, columns x 0.5, 2 in hand"
    assert change.of(steps_of, split, 0, 132) == tiles.Tile(1, 1024, True, 8, 1, 300, 2)
    whole = tiles.Tile(1, 16384, False, 16, 1, 300, 1)
    assert tiles.Change(stages=2, columns=-1).of(whole, split, 0, 132) == whole
    assert tiles.Change(columns=5).of(steps_of, split, 0, 132) is None
    assert tiles.Change(columns=1) in tiles.changes(columns=(-1, 1)) and tiles.Change(columns=1) not in tiles.CHANGES


def test_quicker_tiles_are_listed_below_the_chosen_one() -> None:
    row = {"op": "softmax", "direction": "forward", "width": 8, "dtype": "f32", "tiles": ["t"], "wrong": False}
    found = [{**row, "change": str(c), "share": s} for c, s in zip(tiles.CHANGES, (0.8, 0.7, 0.9, 0.85))]
    found[2]["wrong"] = True
    text = tiles.table([*found, {**row, "change": "broken", "error": "OutOfResources"}])
    assert [line.split("|")[-2].strip() for line in text[2:]] == ["0.800", "0.900 wrong", "0.850"]
    assert tiles.table([{**row, "change": "as chosen", "error": "OutOfResources"}])[2].count("OutOfResources") == 1


# ---------------------------------------------------------------------------------------------- steps


def test_a_run_of_steps_says_what_it_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was measured is printed and saved as it comes; a wrong step of ours is the exit code."""
    now = iter(range(100))
    monkeypatch.setattr(steps, "time", SimpleNamespace(monotonic=lambda: next(now)))
    monkeypatch.setattr(steps, "no_device", lambda: False)
    monkeypatch.setattr(steps, "DeviceClock", Clock)
    monkeypatch.setattr(steps, "copy_bandwidth", lambda clock: 1e12)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a device")

    def measured(name: str, *_: Any) -> Any:
        yield {
            "op": name, "grad": "f32", "param": "f32", "peer": "pullback", "seconds": 1e-3, "host_seconds": 1e-5, "share": 0.5,
            "tensors": 3, "mb": 1.0, "wrong": name == "lion",
        }  # fmt: skip

    monkeypatch.setattr(steps, "measure", measured)
    out = tmp_path / "steps.json"
    words = [w for name in ("adamw", "sgd", "lion") for w in ("--op", name)]
    assert steps.main([*words, "--out", str(out), "--seconds-limit", "3"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("| Step |") == 1 and "| adamw |" in printed and "| sgd |" in printed
    assert printed.endswith("left out for lack of time: lion\n")
    found = json.loads(out.read_text())
    assert [r["op"] for r in found["rows"]] == ["adamw", "sgd"] and found["left_out"] == ["lion"]
    assert steps.main(["--op", "lion"]) == 1
