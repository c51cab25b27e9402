"""Loading: what a spec says, as data; files as they come; and each fault as it is printed (`bad_specs.txt`)."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from codegen.diagnostics import Report
from codegen.loader import load, load_text
from codegen.spec import AttrDecl, AxesChoice, Name, Number, OpSpec, Text, spell
from codegen.variants import conditions, formulas, subexpressions

OP = "- op: f\n  inputs: {x: [..., N]}\n  outputs: {y: [..., N]}\n  forward: y = x * 2\n  backward:\n    x: dy * 2\n"

GOOD = """\
# Every form of the language.
- op: pooled
  doc: >
    Two lines
    of words.
  inputs:
    x: [B, (G C), H, R...]
    'idx': {axes: [B], dtype: int, indexes: H, or: ignore}
    value: {axes: [], scalar: true}
    mask: {axes: [..., (S=2 H)], dtype: bool, broadcast: true}
  params:
    weight: {axes: [(G C)], optional: true, default: 1, arg: gain}
    bias: {axes: [C], optional: true, init: 0.5}
  buffers: {mean: {axes: [C], init: 0, when: training}}
  state: {count: {axes: [...], dtype: f32, init: -inf}}
  attrs:
    no: {}
    eps: {default: 1e-5}
    low: {default: -inf}
    scale: {default: 1 / sqrt(size(H))}
    again: {default: eps}
    training: {default: true}
    mode: {enum: [none, on, yes], default: on}
    ignore: {type: int, default: -100}
    pair: {tuple: 2, type: int, default: 0}
    betas: {tuple: 2, default: [0.9, 0.999]}
    kernel: {tuple: 2, type: int, size: [KH, KW]}
    stride: {tuple: 2, type: int, default: kernel}
    groups: {size: G, default: 1}
    dim: {axis: (S H), default: -1}
    dims: {axis: R, default: all}
    keepdim: {keeps: R, default: false}
    limit: {optional: true}
  sizes:
    OH: (size(H) + 2 * pair[0]) // 2 + 1
  requires: |
    0 <= eps < 1      # small
    # of both
    pair[0] >= 0
  domain: {x: [0, inf], eps: [1e-8, 0.1]}
  outputs:
    y: '[B, (G C), H] if mode == "none" else [B, OH] if (no > 0 and eps > 0) else []'
    lse: {axes: [B], dtype: compute, differentiable: false}
    where_max: {axes: [B], dtype: i64, when: training}
  forward: |
    # Above.
    u = at(x, H=stride[0], fill=again * betas[1])  # behind
    lse = sum(u, C, R)
    where_max = argmax(u, C, R)
    y = u if limit is None else where((u > low) & ~isnan(u), u, 0)
  update:
    when: training and mode != "none"
    let: m = mean(u, B)
    mean: m
    count: 'count + 1'
  backward:
    save: [u, lse]
    let: |
      g = dy * scale
    x: g * (1 - u)     # a comment of YAML
    value: zero
    weight: auto
    bias: not_differentiable
  reference: |
    torch.sum(x, dim)
  schedule: none
"""


def one(text: str) -> OpSpec:
    report = Report()
    (op,) = load_text(text, report)
    assert not report.found, report.render()
    return op


def faults(text: str) -> list[tuple[int, int, str]]:
    report = Report()
    load_text(text, report)
    report.render()
    return [(d.span.line, d.span.col, d.code) for d in report.ordered()]


def cases() -> dict[str, tuple[str, str]]:
    out = {}
    for part in (Path(__file__).parent / "bad_specs.txt").read_text(encoding="utf-8").split("=== ")[1:]:
        head, printed = part.split(">>>\n")
        name, text = head.split("\n", 1)
        out[name] = (text, printed.rstrip("\n"))
    return out


CASES = cases()


@pytest.mark.parametrize("name", CASES)
def test_each_fault_is_printed_so(name: str) -> None:
    text, printed = CASES[name]
    report = Report()
    load_text(text, report)
    assert report.render() == printed


# ---------------------------------------------------------------------------------------------- what a spec says


def test_tensors() -> None:
    op = one(GOOD)
    assert [t.name for t in op.inputs] == ["x", "idx", "value", "mask"]
    kinds = [(d.kind, [(f.name, f.fixed) for f in d.factors]) for d in op.tensor("x").axes.dims]
    assert kinds == [
        ("axis", [("B", None)]),
        ("group", [("G", None), ("C", None)]),
        ("axis", [("H", None)]),
        ("pack", [("R", None)]),
    ]
    assert (op.tensor("idx").dtype, op.tensor("idx").indexes, op.tensor("idx").or_else) == ("int", "H", "ignore")
    assert op.tensor("value").scalar and op.tensor("mask").broadcast and not op.tensor("x").broadcast
    weight, bias = op.params
    assert weight.optional and weight.default and weight.default.value == 1 and weight.arg == "gain"
    assert bias.optional and bias.default is None and bias.init and bias.init.value == 0.5 and bias.arg == "bias"
    assert op.buffers[0].when is not None and op.state[0].init is not None and op.state[0].init.text == "-inf"
    assert op.state[0].broadcast, "exactly [...] stretches"
    assert [o.differentiable for o in op.outputs] == [True, False, True]
    assert op.outputs[2].when == Name("training", op.outputs[2].when.span)


def test_axes_that_are_chosen() -> None:
    axes = one(GOOD).outputs[0].axes
    assert isinstance(axes, AxesChoice) and spell(axes.cond) == 'mode == "none"'
    assert isinstance(axes.other, AxesChoice) and spell(axes.other.cond) == "no > 0 and eps > 0"
    line = GOOD.split("\n")[axes.span.line - 1]
    assert line[axes.cond.span.col - 1 : axes.cond.span.end - 1] == 'mode == "none"'
    assert line[axes.other.then.span.col - 1 : axes.other.then.span.end - 1] == "[B, OH]"


ATTRS = {
    "no": ("float", None), "eps": ("float", "1e-5"), "low": ("float", "-inf"), "scale": ("float", "1 / sqrt(size(H))"), "again": ("float", "eps"),
    "training": ("bool", "true"), "mode": ("enum", '"on"'), "ignore": ("int", "-100"), "pair": ("int", "0"), "betas": ("float", "tuple(0.9, 0.999)"),
    "kernel": ("int", None), "stride": ("int", "kernel"), "groups": ("int", "1"), "dim": ("int", "-1"), "dims": ("int", None), "keepdim": ("bool", "false"),
    "limit": ("float", None),
}  # fmt: skip


def test_attrs() -> None:
    attrs = {a.name: a for a in GOOD_OP.attrs}
    assert {n: (a.type, None if a.default is None else spell(a.default)) for n, a in attrs.items()} == ATTRS
    assert attrs["mode"].enum == ("none", "on", "yes") and attrs["limit"].optional
    assert [a.name for a in attrs.values() if a.arity == 2] == ["pair", "betas", "kernel", "stride"]
    assert attrs["kernel"].size == ("KH", "KW") and attrs["groups"].size == ("G",)
    assert attrs["dim"].axis == ("S", "H") and attrs["dims"].axis == ("R",) and attrs["dims"].all_axes
    assert attrs["keepdim"].keeps == "R"
    assert isinstance(attrs["training"].default, Name) and isinstance(attrs["mode"].default, Text)


GOOD_OP = one(GOOD)


def test_everything_else() -> None:
    op = GOOD_OP
    assert op.doc == "Two lines of words." and op.reference == "torch.sum(x, dim)" and op.schedule == "none"
    assert [(s.axis, spell(s.expr)) for s in op.sizes] == [("OH", "(size(H) + 2 * pair[0]) // 2 + 1")]
    assert [r.text for r in op.requires] == ["0 <= eps < 1", "pair[0] >= 0"]
    assert [(d.name, d.low, d.high) for d in op.domain] == [("x", 0, float("inf")), ("eps", 1e-8, 0.1)]
    assert op.signature[:5] == ("x", "idx", "value", "mask", "weight") and op.signature[-1] == "limit"
    assert [(b.name, b.above, b.comment) for b in op.forward][:2] == [("u", ("Above.",), "behind"), ("lse", (), "")]
    assert op.update is not None and op.update.when is not None and [b.name for b in op.update.let] == ["m"]
    assert [(e.name, e.kind) for e in op.update.entries] == [("mean", "formula"), ("count", "formula")]
    assert (
        op.backward is not None and op.backward.save is not None and [s.name for s in op.backward.save] == ["u", "lse"]
    )
    kinds = [(e.name, e.kind) for e in op.backward.entries]
    assert kinds == [("x", "formula"), ("value", "zero"), ("weight", "auto"), ("bias", "not_differentiable")]


def test_the_order_of_arguments_can_be_given() -> None:
    op = one(
        OP.replace("  outputs", "  attrs: {a: {default: 1}}\n  signature: [a, x]\n  outputs").replace("x * 2", "x * a")
    )
    assert op.signature == ("a", "x")


def test_a_whole_op_without_derivatives() -> None:
    op = one(OP.split("  backward")[0] + "  backward: not_differentiable\n")
    assert op.backward is not None and not op.backward.differentiable


def test_texts_are_never_converted() -> None:
    names = "no", "yes", "on", "off", "y2", "null", "nil"
    text = OP.replace("{x: [..., N]}", "{" + ", ".join(f"{n}: [..., N]" for n in names) + "}").replace(
        "x * 2", "no * null"
    )
    text = text.replace("    x: dy * 2\n", "".join(f"    {n}: auto\n" for n in names))
    assert [t.name for t in one(text).inputs] == list(names)


# ---------------------------------------------------------------------------------------------- places

STYLES = {
    "plain": "    x: dy * _q", "single": "    x: 'dy * _q'", "double": '    x: "dy * _q"', "flow": "    x: dy * _q  # why",
    "spaced": "    x:    dy * _q", "literal": "    x: |\n      dy * _q", "stripped": "    x: |-\n        dy * _q",
    "indented": "    x: |2\n        dy * _q", "blank first": "    x: |\n\n      dy * _q", "escaped": '    x: "\\x64y *\\u0020_q"',
    "doubled": "    x: 'where(a == ''k'', _q, 0)'", "folded escape": '    x: "dy \\\n      * _q"', "wide": "    x: '\u00e9\U0001f600 _q'",
}  # fmt: skip


@pytest.mark.parametrize("style", STYLES)
def test_a_fault_stands_at_its_character(style: str) -> None:
    text = OP.replace("    x: dy * 2", STYLES[style])
    found = faults(text)
    if style in ("folded escape", "wide"):
        assert len(found) == 1
        return
    lines = text.split("\n")
    (line,) = [n for n, row in enumerate(lines, 1) if "_q" in row]
    assert found == [(line, lines[line - 1].index("_q") + 1, "bad-name")]


# ---------------------------------------------------------------------------------------------- texts


def test_characters_that_have_no_place() -> None:
    assert faults("\ufeff" + OP) == [(1, 1, "control-character")]
    assert faults(OP.replace("x * 2", "x * 2\0")) == [(4, 21, "control-character")]
    assert faults(OP.replace("x * 2", "x *\u2028 2"))[0] == (4, 19, "control-character")
    assert faults(OP.replace("\n", "\r"))[0] == (1, 8, "control-character")
    assert faults("# \ud800\n" + OP) == [(1, 3, "control-character")]


def test_tabs() -> None:
    assert faults(OP.replace("    x:", "\tx:"))[0] == (6, 1, "tab")
    assert faults(OP.replace("dy * 2", "dy *\t_q")) == [(6, 12, "tab"), (6, 13, "bad-name")]
    assert faults("#\tx\n" + OP) == [(1, 2, "tab")]


def test_windows_line_ends_are_lines() -> None:
    assert one(OP.replace("\n", "\r\n")) == one(OP)
    assert faults(OP.replace("x * 2", "x.a").replace("\n", "\r\n")) == faults(OP.replace("x * 2", "x.a"))


@pytest.mark.parametrize("text", ["", "\n", "# x", "---", "...", "[]", "{}", "- ", "-\n-", "? ", ": ", "|", "[" * 5000, "- " * 5000, "{a: " * 5000, "&a [*a]", "%YAML 3.0\n---\n- op: f", "- op: *x", "- !!python/object:os.system x", "- op: {a: b}", "\x85", "- {}", "- []", "- op: f\n  ? [a]\n  : b"], ids=repr)  # fmt: skip
def test_odd_texts_are_refused_and_nothing_raises(text: str) -> None:
    assert faults(text)


def test_a_faulty_op_leaves_the_others() -> None:
    report = Report()
    text = OP + OP.replace("op: f", "op: g").replace("x * 2", "x.a") + OP.replace("op: f", "op: h")
    assert [op.name for op in load_text(text, report)] == ["f", "h"]
    assert len(report.errors) == 1


def test_one_fault_is_said_once() -> None:
    """What follows from a fault is not a fault of its own."""
    for old, new in (
        ("{x: [..., N]}", "{x: [..., n]}"), ("{x: [..., N]}", "[x]"), ("inputs", "Inputs"), ("x * 2", "x.a"), ("dy * 2", "dy.a"),
        ("y = x * 2", "|"), ("{y: [..., N]}", "{y: [n]}"), ("{x: [..., N]}", "{x: {axes: [N], dtype: flot}}"),
    ):  # fmt: skip
        assert len(faults(OP.replace(old, new, 1))) == 1, (new, faults(OP.replace(old, new, 1)))


# ---------------------------------------------------------------------------------------------- files


def write(folder: Path, files: dict[str, str | bytes]) -> None:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data if isinstance(data, bytes) else data.encode())


def named(name: str) -> str:
    return OP.replace("op: f", f"op: {name}")


def test_folders_are_read_in_the_order_of_names(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "s/b.yaml": named("b"),
            "s/a/z.yml": named("z"),
            "s/a.yaml": named("a"),
            "s/c.txt": "no",
            "t.yaml": named("t"),
        },
    )
    report = Report()
    ops = load([Path("s"), tmp_path / "t.yaml", Path("s/b.yaml")], report, tmp_path)
    assert [(op.name, op.file) for op in ops] == [
        ("a", "s/a.yaml"),
        ("z", "s/a/z.yml"),
        ("b", "s/b.yaml"),
        ("t", "t.yaml"),
    ]
    assert not report.found and sorted(report.lines) == ["s/a.yaml", "s/a/z.yml", "s/b.yaml", "t.yaml"]


def test_what_is_printed_does_not_depend_on_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = []
    for name in ("one", "two/deep"):
        folder = tmp_path / name
        write(folder, {"specs/a.yaml": OP.replace("x * 2", "x.a"), "lib/b.yaml": named("b")[:60]})
        for root, where in (
            (folder, "specs"),
            (folder, folder / "specs"),
            (folder / "lib" / "..", folder / "lib" / ".." / "specs"),
        ):
            report = Report()
            load([Path(where)], report, root)
            printed.append(report.render())
        monkeypatch.chdir(folder)
        report = Report()
        load([Path("specs")], report)
        printed.append(report.render())
    assert len(set(printed)) == 1 and printed[0].startswith("specs/a.yaml:4:16:")


def test_a_fault_in_one_file_leaves_the_others(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "a.yaml": "- op: [",
            "b.yaml": named("b"),
            "c.yaml": b"- op: \xc3\xa9\xff",
            "d.yaml": "",
            "e.yaml": named("e") + "  doc: a: b\n",
        },
    )
    report = Report()
    assert [op.name for op in load([tmp_path], report, tmp_path)] == ["b"]
    assert [(d.span.file, d.span.line, d.span.col, d.code) for d in report.ordered() if d.span.file != "a.yaml"] == [
        ("c.yaml", 1, 8, "not-utf8"),
        ("d.yaml", 1, 1, "empty-file"),
        ("e.yaml", 7, 9, "yaml-syntax"),
    ]
    assert any(d.span.file == "a.yaml" and d.code == "yaml-syntax" for d in report.errors)


def test_links(tmp_path: Path) -> None:
    write(tmp_path, {"out.yaml": named("out"), "s/in.yaml": named("f")})
    for name, target in (("away", "../out.yaml"), ("gone", "nothing.yaml"), ("loop", "loop.yaml"), ("same", "in.yaml")):
        (tmp_path / "s" / f"{name}.yaml").symlink_to(target)
    report = Report()
    ops = load([tmp_path / "s"], report, tmp_path)
    assert [(d.span.file, d.code) for d in report.ordered()] == [
        (f"s/{n}.yaml", "link") for n in ("away", "gone", "loop")
    ]
    assert [op.name for op in ops] == ["f"]


def test_paths_that_hold_no_spec(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "x.yaml").mkdir()
    os.mkfifo(tmp_path / "pipe.yaml")
    report = Report()
    paths = [Path("nowhere"), Path("empty"), Path("pipe.yaml"), Path("a" * 5000), Path("a\0b")]
    assert load(paths, report, tmp_path) == ()
    assert [d.code for d in report.errors] == ["no-such-file", "no-specs", "unreadable", "no-such-file", "no-such-file"]
    report.render()


def test_ops_of_one_name_in_two_files_show_both(tmp_path: Path) -> None:
    write(tmp_path, {"a.yaml": named("ab"), "b.yaml": "\n" + named("ab") + named("aB")})
    report = Report()
    load([tmp_path], report, tmp_path)
    assert [(d.span.file, d.span.line, d.notes[0].span and d.notes[0].span.file) for d in report.ordered()] == [
        ("b.yaml", 2, "a.yaml"),
        ("b.yaml", 8, "a.yaml"),
    ]


def test_a_hundred_ops_load_at_once(tmp_path: Path) -> None:
    write(tmp_path, {f"{k}.yaml": GOOD.replace("op: pooled", f"op: pooled{k}") for k in range(110)})
    report = Report()
    began = time.process_time()
    assert len(load([tmp_path], report, tmp_path)) == 110
    assert time.process_time() - began < 5, "about 0.2 s; the rest is for slow machines"


def test_a_fault_of_yaml_leaves_the_other_ops_of_the_file() -> None:
    report = Report()
    text = OP.replace("dy * 2", "*g") + named("g").replace("x * 2", "x.a") + named("h")
    assert [op.name for op in load_text(text, report)] == ["h"]
    assert [(d.span.line, d.code) for d in report.ordered()] == [(6, "alias"), (10, "not-in-language")]


# ---------------------------------------------------------------------------------------------- random edits


def edited(rng: random.Random, text: str) -> str:
    for _ in range(rng.randint(1, 3)):
        at, to = sorted((rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)))
        lines = text.split("\n")
        row = rng.randrange(len(lines))
        match rng.randrange(7):
            case 0:
                text = text[:at] + text[at + rng.randint(1, 3) :]
            case 1:
                text = (
                    text[:at]
                    + rng.choice("()[]{},:*&|>#'\"-+=.!%@`~? \t\n\r\\09aZ_\0\u00e9\u2028\U0001f600")
                    + text[at:]
                )
            case 2:
                text = text[:at] + text[to : to + 9] + text[at:]
            case 3:
                text = "\n".join(lines[:row] + lines[row + 1 :])
            case 4:
                text = "\n".join(lines[:row] + [rng.choice(lines)] + lines[row:])
            case 5:
                text = text[:to]
            case _:
                text = text[:at] + text[at + 1 : at + 2] + text[at : at + 1] + text[at + 2 :]
    return text


def leaves(op: OpSpec) -> Iterator[Name | Number]:
    for expr in (*formulas(op), *conditions(op)):
        yield from (e for e in subexpressions(expr) if isinstance(e, Name | Number))


@pytest.mark.parametrize("seed", range(10))
def test_random_edits_end_in_faults_or_in_exact_places(seed: int) -> None:
    rng = random.Random(seed)
    pool = [GOOD, GOOD + OP, OP, *(text for text, _ in CASES.values())]
    for _ in range(300):
        text = edited(rng, rng.choice(pool))
        report = Report()
        ops = load_text(text, report)
        report.render()
        lines = report.lines["spec.yaml"]
        assert ops or report.errors
        for fault in report.found:
            assert 1 <= fault.span.line <= len(lines) and 1 <= fault.span.col <= len(lines[fault.span.line - 1]) + 1
        for leaf in (leaf for op in ops for leaf in leaves(op)):
            line = lines[leaf.span.line - 1]
            word = leaf.id if isinstance(leaf, Name) else leaf.text.lstrip("-")
            assert word in line[leaf.span.col - 1 : leaf.span.end - 1] or '"' in line, (word, line)


def test_attr_declarations_are_frozen_data() -> None:
    assert all(isinstance(a, AttrDecl) for a in GOOD_OP.attrs) and hash(GOOD_OP) == hash(one(GOOD))


def test_an_index_may_be_a_number_instead() -> None:
    """`or:` beside `indexes:` names an attr, or is a whole number; nothing else."""
    text = "- op: f\n  inputs: {x: [N], i: {axes: [], dtype: int, indexes: N, or: OR}}\n  outputs: {y: []}\n  forward: y = at(x, N=i, fill=0)\n  backward:\n    x: auto\n"
    assert one(text.replace("OR", "-1")).tensor("i").or_else == -1
    report = Report()
    load_text(text.replace("OR", "-1.5"), report)
    assert "`or: -1.5` is not an attr" in report.render()
