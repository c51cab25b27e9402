"""Faults of specs: each has its place, its code, its line with a caret, and a hint; and no text ever ends in a traceback."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from codegen.config import Config
from codegen.diagnostics import Report
from codegen.emit import render
from codegen.loader import load, load_text
from codegen.schedule import schedule
from codegen.verify import verify_op

ROOT = Path(__file__).parents[2]

OP = "- op: f\n  inputs: {x: [..., N]}\n  outputs: {y: [..., N]}\n  forward: y = x * 2\n  backward:\n    x: dy * 2\n  schedule: none\n"


def check(text: str, emitting: bool = False) -> Report:
    """All that the generator finds in a text; with `emitting`, what is good is rendered in memory too."""
    report = Report()
    for op in load_text(text, report):
        verdict = verify_op(op, report)
        if verdict.ok:
            plan = schedule(verdict, report)
            if emitting and plan is not None:
                assert render([verdict], [], Config(), report)
    report.render()
    return report


def swap(old: str, new: str) -> str:
    assert OP.count(old) >= 1, old
    return OP.replace(old, new, 1)


def defaulted(attr: str) -> str:
    """The op times an attr, of this declaration, and one before it."""
    return (
        swap("  outputs", f"  attrs: {{b: {{default: 2}}, {attr}}}\n  outputs")
        .replace("x * 2", "x * a * b")
        .replace("dy * 2", "dy * a * b")
    )


CASES = {
    "unknown key": (swap("  inputs:", "  input:"), 2, 3, "unknown-key", "did you mean `inputs`?"),
    "unknown name": (swap("y = x * 2", "y = z * 2"), 4, 16, "unknown-name", ""),
    "near name": (
        swap("y = x * 2", "y = x * epss").replace("dy * 2", "dy * eps").replace("  outputs", "  attrs: {eps: {default: 1e-5}}\n  outputs"),
        5, 20, "unknown-name", "did you mean `eps`?"),
    "used before it is set": (swap("forward: y = x * 2", "forward: |\n    y = a * 2\n    a = x"), 5, 9, "unknown-name", "line 6"),
    "set twice": (swap("forward: y = x * 2", "forward: |\n    y = x * 2\n    y = x"), 6, 5, "set-twice", ""),
    "keyword as a name": (swap("{x:", "{lambda:"), 2, 12, "bad-name", ""),
    "syntax error": (swap("x * 2", "x * * 2"), 4, 20, "syntax-error", ""),
    "ternary of C": (swap("y = x * 2", "y = x ? 1 + 2"), 4, 18, "syntax-error", "where"),
    "unknown function": (swap("x * 2", "sigmoyd(x)"), 4, 16, "unknown-function", "did you mean `sigmoid`?"),
    "wrong arity": (swap("x * 2", "sigmoid(x, x)"), 4, 16, "wrong-arity", ""),
    "undeclared axis": (swap("x * 2", "x - mean(x, M)"), 4, 28, "unknown-axis", ""),
    "axis that is absent": (swap("x * 2", "x - mean(mean(x, N), N)"), 4, 20, "absent-axis", "axes"),
    "axis as a value": (swap("x * 2", "x * N"), 4, 20, "axis-as-value", "size(N)"),
    "extra axes": (swap("{y: [..., N]}", "{y: [...]}"), 4, 16, "extra-axes", "sum(..., N)"),
    "missing derivative": (swap("{x: [..., N]}", "{x: [..., N], w: [N]}"), 2, 25, "missing-derivative", ""),
    "derivative of an unknown input": (swap("    x: dy", "    xx: dy"), 6, 5, "unknown-input", "did you mean `x`?"),
    "no backward": (swap("  backward:\n    x: dy * 2\n", ""), 1, 7, "missing-backward", ""),
    "wrong dtype": (swap("{x: [..., N]}", "{x: {axes: [..., N], dtype: f23}}"), 2, 39, "unknown-dtype", ""),
    "float for a bool output": (swap("{y: [..., N]}", "{y: {axes: [..., N], dtype: bool}}").replace("  backward:\n    x: dy * 2\n", "  backward: not_differentiable\n"), 4, 16, "wrong-kind", ""),
    "ints that stay ints and are floats too": (
        swap("{x: [..., N]}", "{x: {axes: [..., N], dtype: number}}").replace("{y: [..., N]}", "{y: {axes: [..., N], dtype: number}, z: [..., N]}")
        .replace("forward: y = x * 2", "forward: |\n    y = x * 2\n    z = x / 2").replace("dy * 2", "dy * 2 + dz / 2").replace("  schedule: none\n", ""),
        5, 9, "mixed-kinds", "`y` is int of int tensors, which the formula also computes with as floats"),
    "truth values that are floats": (
        swap("{x: [..., N]}", "{x: {axes: [..., N], dtype: integral}}").replace("y = x * 2", "y = where(cast(x, bool), 1, 0) / 3").replace("  backward:\n    x: dy * 2\n  schedule: none\n", "  backward: not_differentiable\n"),
        4, 16, "mixed-kinds", "a kernel computes in one dtype: give both an op of their own, or the tensors the class `float` or `int`"),
    "a default that may be None too": (
        defaulted("a: {optional: true, default: b}"),
        3, 57, "bad-default", "`a` may be None, which would also stand for its default"),
    "a flag with a computed default": (
        defaulted("a: {type: bool, default: b}"),
        3, 53, "bad-default", "`a` decides on kernels and extents: its default is a constant"),
    "a whole number with half a default": (
        defaulted("a: {type: int, default: b / 2}"),
        3, 52, "bad-default", "`a` is int here, its default is float"),
    "a default that is a truth value": (
        defaulted("a: {default: 1 < b}"),
        3, 41, "bad-default", "`a` is float here, its default is bool"),
    "a default of a later attr": (
        defaulted("a: {default: c}"),
        3, 41, "bad-default", "`c` is not an attr above"),
    "a default of elements": (
        defaulted("a: {default: 'sum(size(N), N)'}"),
        3, 42, "absent-axis", ""),
    "a condition over a default that a kernel has": (
        defaulted("a: {default: size(N)}").replace("y = x * a * b", "y = x * a if a > b else x * b").replace("  schedule: none\n", ""),
        5, 25, "late-default", "the default of `a` is known in a kernel alone, and this is decided before"),
    "a default outside of its domain": (swap("  outputs", "  attrs: {a: {default: 0}}\n  domain: {a: [1, 4]}\n  outputs").replace("x * 2", "x * a").replace("dy * 2", "dy * a"), 4, 12, "default-domain", "widen"),
    "a power written with ^": (swap("x * 2", "x ^ 2"), 4, 16, "logic-on-numbers", "x ** 2"),
    "a shift of floats": (swap("x * 2", "x << 2"), 4, 16, "shift-of-numbers", "exp2"),
    "the largest number of a value": (swap("x * 2", "x * largest(x + 1)"), 4, 28, "not-a-tensor", ""),
    "arithmetic on bool": (swap("x * 2", "x * (x > 0)"), 4, 16, "bool-arithmetic", "where"),
    "if on elements": (swap("x * 2", "x if x > 0 else 0"), 4, 21, "tensor-condition", "where"),
    "and on elements": (swap("x * 2", "where(0 < x < 1, x, 0)"), 4, 22, "logic-on-tensors", "parentheses"),
    "precedence": (swap("x * 2", "where(x > 0 & x == 1, x, 0)"), 4, 22, "precedence", "parenthesise"),
    "duplicate key": (OP + "  schedule: none\n", 8, 3, "duplicate-key", "first here"),
    "duplicate op": (OP + OP, 8, 7, "duplicate-op", "first here"),
    "alias": (swap("dy * 2", "*g"), 6, 8, "alias", "quote"),
    "braces": (swap("x: dy * 2", "x: {a}"), 6, 8, "not-a-text", "quote"),
    "cut formula": (swap("backward:\n    x: dy * 2", "backward: {x: where(x > 0, dy, 0)}"), 5, 17, "cut-formula", "quote"),
    "folded": (swap("forward: y = x * 2", "forward: >\n    y = x * 2"), 4, 12, "folded", "|"),
    "indicator": (swap("dy * 2", "> 0"), 6, 10, "yaml-syntax", ""),
    "tab": (swap("    x: dy", "\tx: dy"), 6, 1, "tab", "blanks"),
    "unused let": (swap("    x: dy * 2", "    let: a = dy\n    x: dy * 2"), 6, 10, "unused-name", ""),
    "empty file": ("", 1, 1, "empty-file", ""),
    "attribute": (swap("x * 2", "x.sum()"), 4, 16, "not-in-language", ""),
    "default without optional": (swap("{x: [..., N]}", "{x: {axes: [..., N], default: 1}}"), 2, 41, "default-without-optional", ""),
    "two packs": (swap("{x: [..., N]}", "{x: [..., ...]}"), 2, 15, "axis-twice", ""),
    "unknown choice": (swap("  outputs", "  attrs: {kind: {enum: [a, b], default: c}}\n  outputs"), 3, 41, "unknown-choice", ""),
    "a choice with a sign": (swap("  outputs", "  attrs: {kind: {enum: [a, b], default: a}}\n  outputs").replace("x * 2", 'x if -kind == "a" else 2 * x'), 5, 22, "enum-as-value", 'if kind == "a"'),
    "float index": (swap("x * 2", "at(x, N=x)"), 4, 16, "float-index", "cast"),
    "shouting": (swap("x * 2", "x * 1e999"), 4, 20, "literal-range", ""),
    "op named like a helper": (swap("op: f", "op: tile"), 1, 7, "bad-name", "function"),
    "argument named like an import": (swap("{x:", "{call: [...], x:"), 2, 12, "bad-name", "another name"),
    "unused attr": (swap("  outputs", "  attrs: {eps: {default: 1}}\n  outputs"), 3, 11, "unused-name", "delete"),
    "condition of literals": (swap("x * 2", "x if 1 < 2 else -x"), 4, 21, "constant-condition", ""),
    "requires of a tensor": (swap("  outputs", "  requires: x > 0\n  outputs"), 3, 13, "not-on-the-host", ""),
    "reference that is none": (swap("  schedule", "  reference: torch.exp(q)\n  schedule"), 7, 14, "bad-reference", "argument"),
    "undetermined axis": (swap("{y: [..., N]}", "{y: [..., N, M]}"), 3, 25, "undetermined-axis", ""),
    "no schedule": (swap("x * 2", "cumsum(x, ...)").replace("dy * 2", "auto").replace("  schedule: none\n", ""), 1, 7, "no-schedule", "schedule: none"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_each_fault_has_its_place(name: str) -> None:
    text, line, col, code, hint = CASES[name]
    report = check(text)
    found = [(d.span.line, d.span.col, d.code) for d in report.errors]
    assert (line, col, code) in found, report.render()
    printed = report.render()
    assert f"spec.yaml:{line}:{col}: error[{code}]" in printed and hint in printed, printed
    if text:
        assert "^" in printed


def test_texts_stay_texts() -> None:
    """C095, C097: 1e-5 is a number, and `no`, `yes`, `on`, `null` are names like any other."""
    text = (
        OP.replace("{x: [..., N]}", "{no: [..., N], on: [..., N]}")
        .replace("x * 2", "no * on * eps")
        .replace("    x: dy * 2", "    no: dy * on * eps\n    on: dy * no * eps")
    )
    report = check(text.replace("  outputs", "  attrs: {eps: {default: 1e-5}}\n  outputs"))
    assert not report.errors, report.render()


def test_all_faults_of_a_run_at_once() -> None:
    report = check(
        swap("y = x * 2", "y = z * q").replace("dy * 2", "dy * nope")
        + OP.replace("op: f", "op: g").replace("inputs", "inpits")
    )
    assert len({d.span.line for d in report.errors}) >= 3
    places = [(d.span.line, d.span.col) for d in report.ordered()]
    assert places == sorted(places)


def test_not_utf8_links_and_missing_files(tmp_path: Path) -> None:
    folder = tmp_path / "specs"
    folder.mkdir()
    (folder / "bad.yaml").write_bytes(b"- op: f\xff\n")
    (tmp_path / "outside.yaml").write_text(OP)
    (folder / "link.yaml").symlink_to(tmp_path / "outside.yaml")
    (folder / "nul.yaml").write_bytes(b"- op: a\0b\n")
    report = Report()
    assert load([folder, tmp_path / "nowhere"], report, tmp_path) == ()
    assert {d.code for d in report.errors} == {"not-utf8", "link", "control-character", "no-such-file"}


def test_duplicate_ops_across_files_show_both_places(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(OP.replace("op: f", "op: ab"))
    (tmp_path / "b.yaml").write_text(OP.replace("op: f", "op: aB"))
    report = Report()
    load([tmp_path], report, tmp_path)
    assert "b.yaml:1:7: error[duplicate-op]" in report.render() and "a.yaml:1:7: first here" in report.render()


def sources() -> list[str]:
    return [
        p.read_text()
        for folder in ("specs", "tests/ir", "tests/scratch")
        for p in sorted((ROOT / folder).glob("*.yaml"))
    ]


def ops_of(text: str) -> list[str]:
    return ["- op:" + part for part in text.split("- op:")[1:]]


def edited(rng: random.Random, text: str, all_text: str) -> str:
    """A text with one to three random edits: of characters, words or lines."""
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(text) + 1)
        kind = rng.randrange(7)
        if kind == 0:
            text = text[:at] + text[at + rng.randint(1, 4) :]
        elif kind == 1:
            text = text[:at] + rng.choice("()[]{},:*&|>#'\"-+=.!%@`~ \t\n\\09aZ_\0é\u2028") + text[at:]
        elif kind == 2:
            start = rng.randrange(len(all_text) - 30)
            text = text[:at] + all_text[start : start + rng.randint(1, 30)] + text[at:]
        elif kind == 3:
            lines = text.split("\n")
            del lines[rng.randrange(len(lines))]
            text = "\n".join(lines)
        elif kind == 4:
            lines = text.split("\n")
            rng.shuffle(lines)
            text = "\n".join(lines) if rng.random() < 0.2 else text
        elif kind == 5:
            text = text[:at]
        else:
            words = text.split(" ")
            i, j = rng.randrange(len(words)), rng.randrange(len(words))
            words[i], words[j] = words[j], words[i]
            text = " ".join(words)
    return text


@pytest.mark.parametrize("seed", range(20))
def test_random_edits_end_in_a_diagnostic_or_in_success(seed: int) -> None:
    """10,000 edited ops in all, 500 a seed."""
    rng = random.Random(seed)
    texts = sources()
    pool = [op for text in texts for op in ops_of(text)]
    everything = "".join(texts)
    for k in range(500):
        text = edited(rng, rng.choice(pool), everything)
        try:
            report = check(text, emitting=k % 10 == 0)
        except Exception as fault:
            raise AssertionError(f"a traceback: {fault!r} for:\n{text}") from fault
        assert all(d.span.line >= 1 and d.span.col >= 1 for d in report.errors)
