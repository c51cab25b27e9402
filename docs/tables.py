"""The generated parts of the docs: the table of primitives, and what the README quotes.

Takes `codegen.primitives.TABLE`, specs and generated files, rewrites what stands between a pair of marker comments.

    <!-- primitives: begin -->  ...  <!-- primitives: end -->

    python docs/tables.py            # rewrite
    python docs/tables.py --check    # exit 1 where a page differs
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import report  # noqa: E402
from codegen.diagnostics import Report  # noqa: E402
from codegen.ir import walk  # noqa: E402
from codegen.loader import load  # noqa: E402
from codegen.primitives import TABLE, Primitive  # noqa: E402
from codegen.schedule import bytes_per_element, schedule  # noqa: E402
from codegen.spec import OpSpec, spell  # noqa: E402
from codegen.verify import Verdict, typed, verify_op  # noqa: E402

WRONG = ROOT / "tests" / "wrong" / "rms_norm_weight.yaml"
SHOWN = "silu"
_OPERANDS = ("x", "y")
_SPELLING = {
    "add": "x + y", "sub": "x - y", "mul": "x * y", "div": "x / y", "floordiv": "x // y", "mod": "x % y",
    "pow": "x ** y", "neg": "-x", "lt": "x < y", "le": "x <= y", "gt": "x > y", "ge": "x >= y", "eq": "x == y",
    "ne": "x != y", "and": "x & y", "or": "x | y", "xor": "x ^ y", "not": "~x", "shl": "x << y", "shr": "x >> y",
}  # fmt: skip
_MEANING = {
    "add": "sum", "sub": "difference", "mul": "product", "div": "quotient", "floordiv": "quotient rounded down",
    "mod": "remainder of `x / y` rounded down", "pow": "power", "neg": "negative", "and": "both, of ints bit by bit", "or": "either, of ints bit by bit", "xor": "exactly one, of ints bit by bit",
    "not": "not, of ints bit by bit", "shl": "bits moved up", "shr": "bits moved down, the sign staying",
    "lt": "less", "le": "less or equal", "gt": "greater", "ge": "greater or equal", "eq": "equal", "ne": "unequal",
}  # fmt: skip
_NAMES = {"where": "condition, a, b", "clamp": "x, low, high", "atan2": "y, x"}
_KINDS = {
    "_arith": "number", "_float": "float", "_power": "number", "_compare": "bool",
    "_predicate": "bool", "_logic": "bool or int", "_shift": "int", "_where": "any",
}  # fmt: skip


def spelling(row: Primitive) -> str:
    """How an author writes it."""
    if row.name in _SPELLING:
        return _SPELLING[row.name]
    return f"{row.name}({_NAMES.get(row.name) or ', '.join(_OPERANDS[: row.arity])})"


def primitives() -> str:
    """The rows of the table as Markdown, in the order of `TABLE`."""
    lines = ["| Written | Result | Meaning | Derivative | At the edges |", "|---|---|---|---|---|"]
    for row in TABLE.values():
        derivative = "yes" if row.vjp is not None else "none"
        cells = (f"`{spelling(row)}`", _KINDS[row.rule.__name__], row.doc or _MEANING[row.name], derivative, row.edges)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def wrong() -> str:
    """The wrong spec that opens the README."""
    return _fenced("yaml", WRONG.read_text(encoding="utf-8"))


def refused() -> str:
    """What is printed of it."""
    report = Report()
    for op in load([WRONG], report, root=ROOT):
        verify_op(op, report)
    return _fenced("", report.render())


def spec() -> str:
    """The op that the README shows, as it stands in its file."""
    ops = (ROOT / "specs" / "activations.yaml").read_text(encoding="utf-8").split("\n\n")
    return _fenced("yaml", next(text for text in ops if text.startswith(f"- op: {SHOWN}\n")))


def kernel() -> str:
    """Its kernels."""
    module = (ROOT / "generated" / "ops" / f"{SHOWN}.py").read_text(encoding="utf-8")
    return _fenced("python", module[module.index("@triton.jit") : module.index("class ")].replace("\n\n\n", "\n\n"))


def custom() -> str:
    """A hand-written kernel and its op: the forward, and of the backward what chooses its launches."""
    forward, whole = (
        (ROOT / "generated/runtime" / name).read_text(encoding="utf-8")
        for name in ("linalg_forward.py", "linalg_ops.py")
    )
    kernel = forward[forward.index("@triton.jit\ndef rows_by_matrix(") :].partition("\n\n\n")[0]
    first = forward[forward.index("class LinearForward(") :].partition("\n\n\n")[0].rstrip()
    second = whole[whole.index("class Linear(") :].partition("    def _over_rows")[0].rstrip()
    return _fenced("python", f"{kernel}\n\n\n{first}\n\n\n{second}\n")


def _fenced(language: str, text: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```"


def ops() -> str:
    """Every op of the specs: signature, formula, derivative, domain, edges, residuals, traffic."""
    found = load([ROOT / "specs"], Report(), root=ROOT)
    families: dict[str, list[OpSpec]] = {}
    for op in found:
        families.setdefault(op.family, []).append(op)
    index = [
        f"* **{name}**: {', '.join(f'[`{op.name}`](#{op.name})' for op in members)}"
        for name, members in families.items()
    ]
    parts = [f"{len(found)} ops in {len(families)} files.", "\n".join(index)]
    for name, members in families.items():
        parts.append(f"## specs/{name}.yaml")
        parts += [_op(op) for op in members]
    return "\n\n".join(parts)


def accuracy() -> str:
    """The measured errors of the runtime's functions, by form: a GPU's and the interpreter's."""
    runs = json.loads((ROOT / "docs" / "accuracy.json").read_text(encoding="utf-8"))
    forms = ("f32", "f64", "half")
    machines = [f"{run['machine']}, torch {run['torch']}, triton {run['triton']}" for run in runs]
    lines = [f"{'; '.join(machines)}.", "", f"| Function | {' | '.join(forms)} | Bound of half |", "|---" * 5 + "|"]
    found = [{(r["primitive"], r["form"]): r for r in run["rows"]} for run in runs]
    for name in dict.fromkeys(r["primitive"] for r in runs[-1]["rows"]):
        cells = []
        for form in forms:
            digits = 3 if form == "half" else 2
            errors = [f"{rows[name, form]['max_ulp']:.{digits}f}" if (name, form) in rows else "-" for rows in found]
            cells.append(" / ".join(errors))
        half = found[-1].get((name, "half"))
        lines.append(f"| `{name}` | {' | '.join(cells)} | {half['bound'] if half else '-'} |")
    return "\n".join(lines)


def _measured() -> tuple[dict[str, Any], report.Cells]:
    data = json.loads((ROOT / "docs" / "speed.json").read_text(encoding="utf-8"))
    return data, report.Cells(dict(zip(data["columns"], row)) for row in data["rows"])


def speed() -> str:
    """Shares of the copy bandwidth, beside both peers, of every op."""
    data, cells = _measured()
    head = f"{data['machine']}, torch {data['torch']}, triton {data['triton']}; a large copy moves {data['copy_bytes_per_second'] / 1e12:.2f} TB/s."
    return "\n".join([head, "", *report.dense(cells)])


def shown() -> str:
    """The ops that the README shows: forward, backward, and both one after the other."""
    cells = _measured()[1]
    lines = ["| Op | Pullback | torch eager | torch.compile |", "|---|---|---|---|"]
    for op in (
        "gelu(approximate=tanh)",
        "gelu(approximate=none)",
        "silu",
        "elu",
        "mish",
        "geglu(approximate=none)",
        "add",
    ):
        for direction in report.DIRECTIONS:
            shares = [
                [cells.get(op, direction, d, "dense", cells.main, peer) for d in ("bf16", "f32")]
                for peer in ("pullback", "eager", "compiled")
            ]
            if all(v is not None for pair in shares for v in pair):
                lines.append(f"| {op} {direction} | " + " | ".join(f"{a:.2f} / {b:.2f}" for a, b in shares) + " |")
    return "\n".join(lines)


def rows() -> str:
    """Shares of the copy bandwidth of ops of rows, beside each peer."""
    data = json.loads((ROOT / "docs" / "rows.json").read_text(encoding="utf-8"))
    found: dict[tuple[str, int], dict[tuple[str, str], float]] = {}
    for op, width, dtype, direction, peer, _, share, _ in data["rows"]:
        found.setdefault((f"{op} {direction}", width), {})[dtype, peer] = share
    peers, names = ("eager", "compiled", "liger"), list(dict.fromkeys(name for name, _ in found))
    lines = ["| Op | Width | bf16 | f32 |", "|---|---|---|---|"]
    for name, width in sorted(found, key=lambda k: (names.index(k[0]), k[1])):
        cell = found[name, width]
        texts = []
        for dtype in ("bf16", "f32"):
            own = [f"{cell[dtype, p]:.2f}" if (dtype, p) in cell else "-" for p in ("pullback", *peers)]
            texts.append(f"{own[0]} [{', '.join(own[1:])}]")
        lines.append(f"| {name} | {width} | {' | '.join(texts)} |")
    return "\n".join(lines)


def slow() -> str:
    """Where a peer is quicker."""
    lines = ["| Op | dtype | Times the peer's time | Peer |", "|---|---|---|---|"]
    for times, row, peer in report.slower(_measured()[1]):
        lines.append(f"| {row['op']} {row['direction']} | {row['dtype']} | {times:.2f} | {peer['peer']} |")
    return "\n".join(lines)


def layouts() -> str:
    """Layouts relative to dense operands."""
    return "\n".join(report.spread(_measured()[1]))


def cases() -> str:
    """Each kind of input that the tests hold off, by number, with the tests that name it."""
    found: dict[int, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            head = re.match(r"((?:C\d{3}(?:, )?)+): (.*)", " ".join((text or "").split()))
            for number in re.findall(r"C(\d{3})", head[1]) if head else ():
                found.setdefault(int(number), []).append(f"`{node.name}`: {head[2]}" if head else "")
    lines = ["| Case | Held off by |", "|---|---|"]
    lines += [f"| C{n:03d} | {'<br>'.join(texts)} |".replace("\\|", "|") for n, texts in sorted(found.items())]
    return "\n".join(lines)


def _op(op: OpSpec) -> str:
    verdict = typed(op, Report())
    plan = schedule(verdict, Report())
    lines = [f"{b.name} = {spell(b.expr)}" for b in op.forward]
    if op.backward is not None and op.backward.differentiable:
        lines.append("")
        lines += [f"{b.name} = {spell(b.expr)}" for b in op.backward.let]
        lines += [f"d{e.name} = {spell(e.expr) if e.expr is not None else e.kind}" for e in op.backward.entries]
    if op.state and op.update is not None:
        lines += [f"{b.name} = {spell(b.expr)}" for b in op.update.let]
        lines += [f"{e.name} <- {spell(e.expr)}" for e in op.update.entries if e.expr is not None]
    facts = []
    if op.state:
        facts.append(f"State: {', '.join(f'`{t.name}`' for t in op.state)}, updated in place.")
    if op.domain:
        facts.append("Domain: " + ", ".join(f"`{d.name}` in [{d.low:g}, {d.high:g}]" for d in op.domain) + ".")
    if edges := _edges(verdict):
        facts.append("Edges: " + "; ".join(edges) + ".")
    if plan is not None and plan.gradients:
        facts.append(f"Residuals: {', '.join(f'`{n}`' for n in plan.residuals) or 'none'}.")
    if plan is not None:
        (half, half_back), (single, single_back) = (bytes_per_element(plan, item) for item in (2, 4))
        word = "a step" if op.state else "forward"
        traffic = f"Bytes an element in bf16 / f32: {half} / {single} {word}"
        facts.append(traffic + (f", {half_back} / {single_back} backward." if plan.gradients else "."))
    if not op.state and (op.backward is None or not op.backward.differentiable):
        facts.append("No derivative.")
    if op.reference:
        facts.append(f"Checked against `{op.reference}`.")
    return f"### {op.name}\n\n{op.doc}\n\n{_fenced('', chr(10).join(lines))}\n\n{chr(10).join(f'* {fact}' for fact in facts)}"


def _edges(verdict: Verdict) -> list[str]:
    """What the primitives of the formulas do at their edges, each once."""
    used: dict[str, str] = {}
    for _, graph in verdict.graphs:
        for node in walk(t.node for t in graph.outputs if t.node is not None):
            if node.op in TABLE and TABLE[node.op].edges:
                used[node.op] = f"`{spelling(TABLE[node.op])}`: {TABLE[node.op].edges}"
    return list(used.values())


PAGES: dict[str, tuple[Callable[[], str], ...]] = {
    "docs/spec.md": (primitives,),
    "docs/ops.md": (ops,),
    "docs/accuracy.md": (accuracy,),
    "docs/cases.md": (cases,),
    "docs/custom.md": (custom,),
    "docs/speed.md": (slow, rows, layouts, speed),
    "README.md": (wrong, refused, spec, kernel, shown),
}


def rewritten(page: str, sections: tuple[Callable[[], str], ...]) -> str:
    """The page with its sections as they now are."""
    for section in sections:
        begin, end = (f"<!-- {section.__name__}: {word} -->" for word in ("begin", "end"))
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        found = pattern.findall(page)
        if len(found) != 1:
            raise SystemExit(f"a page has {len(found)} sections between {begin} and {end}")
        page = page.replace(found[0], f"{begin}\n{section()}\n{end}")
    return page


def main(arguments: list[str]) -> int:
    """Rewrites the pages, or names those that differ."""
    stale = 0
    for name, sections in PAGES.items():
        path = ROOT / name
        page = path.read_text(encoding="utf-8")
        new = rewritten(page, sections)
        if page == new:
            continue
        if "--check" in arguments:
            print(f"{name}: a generated section is out of date; mend: python docs/tables.py")
            stale = 1
        else:
            path.write_text(new, encoding="utf-8", newline="\n")
    return stale


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
