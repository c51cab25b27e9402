"""Loading: spec files become `OpSpec`s, all faults of all files at once.

Takes paths (files, or folders of *.yaml), returns the ops in the order of the files. What needs no types is checked
here: keys, names, forms; what does is inference's.

    load([Path("specs")], report, root=Path(".")) -> (OpSpec("abs", ...), OpSpec("add", ...), ...)
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from codegen.diagnostics import Diagnostic, Note, Report, Span, nearest
from codegen.formula import RESERVED, Anchor, identifier_fault, parse_block, parse_expr, reference_fault
from codegen.fusion_steps import check_steps
from codegen.spec import (
    COUNTER,
    DTYPES,
    FRESH,
    INTS,
    PACK,
    AttrDecl,
    Axes,
    AxesChoice,
    Backward,
    Call,
    Compare,
    Dim,
    Domain,
    Dots,
    Entry,
    Expr,
    Factor,
    Formula,
    IsNone,
    Item,
    Name,
    Number,
    OpSpec,
    Requirement,
    Saved,
    SizeDef,
    TensorDecl,
    Text,
    Unary,
    Update,
    class_name,
    of_kernels,
)  # fmt: skip
from codegen.variants import conditions, formulas, late, subexpressions
from codegen.yamltree import Mapping, Scalar, Tree, compose
from codegen.yamltree import Sequence as YamlSequence

OP_KEYS = (
    "op", "doc", "inputs", "params", "buffers", "state", "attrs", "sizes", "requires", "domain", "signature", "outputs",
    "forward", "update", "backward", "reference", "fuses", "schedule",
)  # fmt: skip
TENSOR_KEYS = (
    "axes",
    "dtype",
    "broadcast",
    "scalar",
    "optional",
    "default",
    "indexes",
    "or",
    "init",
    "when",
    "arg",
    "differentiable",
)
ATTR_KEYS = ("type", "default", "enum", "optional", "tuple", "size", "axis", "keeps", "arg")
_ROLES = {"inputs": "input", "params": "param", "buffers": "buffer", "state": "state", "outputs": "output"}
_SPELLED = {
    long: f"write `{short}`"
    for long, short in (("float16", "f16"), ("bfloat16", "bf16"), ("float32", "f32"), ("float64", "f64"), ("int32", "i32"), ("int64", "i64"))
}  # fmt: skip
"""The short names of dtypes that are written out."""
_MISPLACED = {
    "scalar": (("input", "param"), ""),
    "arg": (("input", "param", "buffer", "state"), ""),
    "init": (("param", "buffer", "state"), ""),
    "when": (("buffer", "state", "output"), "write `optional: true`"),
    "optional": (("input", "param", "buffer", "state"), "write `when: COND`"),
    "differentiable": (("output",), "write `not_differentiable` under `backward`"),
}
"""Keys that only some roles have, and what the others write."""
_FLOATING = ("float", "number", "any", "compute", "f16", "bf16", "f32", "f64")
_MODULES = (
    "runtime", "ops", "call", "tile", "offset", "scalar", "share", "kept_tile", "reduced_tile", "largest", "tl", "triton", "torch",
    "math", "host", "steps", "optimizer", "annotations", "importlib", "pkgutil", "pytest", "reference",
)  # fmt: skip
SCHEDULES = ("pointwise", "row", "step", "none")
_CLASSES = (
    "Elementwise",
    "Rowwise",
    "RuntimeOp",
    "StepOp",
    "Tensor",
    "Case",
    "StepCase",
    "Path",
    "Optimizer",
    "Kernel",
)


def load(paths: Sequence[Path], report: Report, root: Path | None = None) -> tuple[OpSpec, ...]:
    """Every op of the files, those with faults left out (the faults are in `report`).

    Args:
        paths: files, or folders whose *.yaml and *.yml are read in the order of their names.
        root: what the printed paths are relative to; the working folder by default.
    """
    root = Path(os.path.abspath(root or Path.cwd()))
    ops: list[OpSpec] = []
    for name, path in _files(paths, root, report):
        text = _text(name, path, report)
        if text is not None:
            ops += _file(name, text, report)
    return _unique(ops, report)


def load_text(text: str, report: Report, file: str = "spec.yaml") -> tuple[OpSpec, ...]:
    """The ops of one text, as if it were a file."""
    checked = _checked(file, text, report)
    return () if checked is None else _unique(_file(file, checked, report), report)


# ---------------------------------------------------------------------------------------------- files


def _files(paths: Sequence[Path], root: Path, report: Report) -> Iterator[tuple[str, Path]]:
    seen: set[Path] = set()
    for path in paths:
        path = path if path.is_absolute() else root / path
        place = Span(_shown(path, root), 1, 1)
        real = _real(path)
        if real is None:
            report.error(place, "no-such-file", "there is no such file or folder")
            continue
        inside = _below(path) if real.is_dir() else [path]
        if not inside:
            report.error(place, "no-specs", "no *.yaml in this folder")
        for file in inside:
            target = _real(file)
            if real.is_dir() and (target is None or not target.is_relative_to(real)):
                away = "leads out of the folder of specs" if target is not None else "leads nowhere"
                report.error(Span(_shown(file, root), 1, 1), "link", f"this link {away}", "copy the file here")
            elif target is not None and target not in seen:
                seen.add(target)
                yield _shown(file, root), file


def _real(path: Path) -> Path | None:
    """What a path leads to, behind its links; None where that is nothing."""
    try:
        return path.resolve(strict=True)
    except (OSError, RuntimeError, ValueError):
        return None


def _below(folder: Path) -> list[Path]:
    found = (p for p in folder.rglob("*") if p.suffix in (".yaml", ".yml") and not p.is_dir())
    return sorted(found, key=lambda p: p.relative_to(folder).as_posix())


def _shown(path: Path, root: Path) -> str:
    """A path as it is printed: from the root, so that no message depends on where the root lies."""
    full = os.path.abspath(path)
    try:
        near = os.path.relpath(full, root)
    except ValueError:  # another drive
        near = full
    name = Path(near).as_posix()
    return "".join(c if c.isprintable() else "?" for c in name)


def _text(name: str, path: Path, report: Report) -> str | None:
    if not path.is_file():
        report.error(Span(name, 1, 1), "unreadable", "cannot be read: it is no file")
        return None
    try:
        data = path.read_bytes()
    except OSError as error:
        report.error(Span(name, 1, 1), "unreadable", f"cannot be read: {error.strerror}")
        return None
    try:
        return _checked(name, data.decode("utf-8"), report)
    except UnicodeDecodeError as error:
        report.add_source(name, data.decode("utf-8", errors="replace").replace("\r\n", "\n"))
        before = data[: error.start]
        line = before.count(b"\n") + 1
        col = len(before[before.rfind(b"\n") + 1 :].decode("utf-8")) + 1
        report.error(Span(name, line, col), "not-utf8", f"byte {error.start} is not UTF-8", "save the file as UTF-8")
        return None


def _checked(name: str, text: str, report: Report) -> str | None:
    """The text with plain line ends, its tabs reported; None where a character of it has no place in any spec."""
    text = text.replace("\r\n", "\n")
    report.add_source(name, text)
    bad = re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]", text)
    if bad is not None:
        span = _place(name, text, bad.start())
        if bad.group() == "\ufeff":
            report.error(span, "control-character", "a byte order mark has no place in a spec",
                         "save the file as UTF-8 without it")  # fmt: skip
        else:
            code = f"the character U+{ord(bad.group()):04X}"
            report.error(span, "control-character", f"{code} has no place in a spec", "delete it")
        return None
    tab = re.search(r"[^ \t\n][^\t\n]*(\t)", text)
    if tab is None:
        return text
    report.error(_place(name, text, tab.start(1)), "tab", "a tab", "write blanks")
    # Those in the indentation are YAML's to refuse; behind it a blank keeps every column.
    return re.sub(r"(?m)^([ \t]*)(.*)$", lambda m: m.group(1) + m.group(2).replace("\t", " "), text)


def _place(name: str, text: str, at: int) -> Span:
    return Span(name, text.count("\n", 0, at) + 1, at - (text.rfind("\n", 0, at) + 1) + 1)


def _file(name: str, text: str, report: Report) -> list[OpSpec]:
    before = len(report.errors)
    tree = compose(name, text, report)
    if tree is None and len(report.errors) > before:
        return []
    if tree is None or (isinstance(tree, Scalar) and not tree.text):
        report.error(Span(name, 1, 1), "empty-file", "there is no op in this file", "a file is a list: `- op: name`")
        return []
    if not isinstance(tree, YamlSequence) or not tree.items:
        report.error(tree.span, "not-a-list", "a spec file is a list of ops", "begin each with `- op: name`")
        return []
    lines = text.split("\n")
    composed = _faulty(name, report.errors[before:])
    starts = [item.span.line for item in tree.items]
    out = []
    for item, start, end in zip(tree.items, starts, [*starts[1:], len(lines) + 1]):
        if any(start <= line < end for line in composed):  # YAML itself is amiss here: the op would only echo it
            continue
        op = _OpReader(name, lines, report).read(item)
        if op is not None and not any(start <= line < end for line in _faulty(name, report.errors)):
            out.append(op)
    return out


def _faulty(name: str, found: Sequence[Diagnostic]) -> set[int]:
    """The lines of a file that have faults."""
    return {d.span.line for d in found if d.span.file == name}


def _unique(ops: list[OpSpec], report: Report) -> tuple[OpSpec, ...]:
    first: dict[str, OpSpec] = {}
    classes: dict[str, OpSpec] = {}
    out = []
    for op in ops:
        other = first.setdefault(op.name.lower(), op)
        if other is op:
            alike = classes.setdefault(class_name(op.name), op)
            if alike is op:
                out.append(op)
                continue
            text = f"ops `{op.name}` and `{alike.name}` would both have the class `{class_name(op.name)}`"
            report.error(op.span, "duplicate-op", text, "", [Note("first here:", alike.span)])
            continue
        text = (
            f"op `{op.name}` is declared twice"
            if other.name == op.name
            else f"ops `{op.name}` and `{other.name}` differ only in case"
        )
        report.error(op.span, "duplicate-op", text, "", [Note("first here:", other.span)])
    return tuple(out)


# ---------------------------------------------------------------------------------------------- one op


class _OpReader:
    """Reads one op; `faulty` is set by any fault of it."""

    def __init__(self, file: str, lines: list[str], report: Report) -> None:
        self.file, self.lines, self.report = file, lines, report
        self.names: dict[str, Span] = {}
        self.axes: dict[str, Span] = {}
        self.started = 0
        """The errors in the report when the op began."""
        self.attrs: list[str] = []
        self.forward: dict[str, Span] = {}
        self.packs: set[str] = {PACK}
        self.written: dict[str, list[str]] = {}
        """The names under each key of the op, faulty ones too: a fault is said once."""
        self.unclear: set[str] = set()
        """Keys of the op of which too little could be read to say what is missing."""

    def fault(self, span: Span, code: str, text: str, hint: str = "", notes: Sequence[Note] = ()) -> None:
        self.report.error(span, code, text, hint, notes)

    def read(self, tree: Tree) -> OpSpec | None:
        self.started = len(self.report.errors)
        if not isinstance(tree, Mapping):
            self.fault(tree.span, "not-an-op", "an op is a map of keys", "begin it with `- op: name`")
            return None
        self._known(tree, OP_KEYS, "an op")
        if any(k.text not in OP_KEYS for k, _ in tree.items):
            self.unclear.update(OP_KEYS)
        self._no_merges(tree)
        name = self._op_name(tree)
        if name is None:
            return None
        groups = {role: self._tensors(tree, key, role) for key, role in
                  (("inputs", "input"), ("params", "param"), ("buffers", "buffer"), ("state", "state"))}  # fmt: skip
        attrs = self._attrs(tree)
        outputs = self._tensors(tree, "outputs", "output")
        forward = self._formula(tree.get("forward"), "forward", self.written.get("outputs", []))
        self.forward = {b.name: b.span for b in forward}
        op = OpSpec(
            name.text, name.span, self.file, self._line(tree, "doc"), groups["input"], groups["param"], groups["buffer"],
            groups["state"], attrs, self._sizes(tree), self._requires(tree), self._domain(tree), self._signature(tree, groups, attrs),
            outputs, forward, self._update(tree), self._backward(tree), self._line(tree, "reference"), self._steps(tree),
            self._line(tree, "schedule"),
        )  # fmt: skip
        self._consistent(op, tree)
        return op if len(self.report.errors) == self.started else None

    # -------------------------------------------------------------------------------- small parts

    def _no_merges(self, tree: Tree) -> None:
        for key, value in tree.items if isinstance(tree, Mapping) else ():
            if key.text == "<<":
                self.fault(key.span, "merge", "`<<` is a YAML merge key", "write the entries out")
            self._no_merges(value)

    def _known(self, tree: Mapping, keys: Sequence[str], what: str) -> None:
        for key, _ in tree.items:
            if key.text not in (*keys, "<<"):
                self.fault(
                    key.span,
                    "unknown-key",
                    f"`{key.text}` is not a key of {what}",
                    nearest(key.text, keys) or f"keys: {', '.join(keys)}",
                )

    def _op_name(self, tree: Mapping) -> Scalar | None:
        name = tree.get("op")
        if not isinstance(name, Scalar):
            self.fault(tree.span, "missing-op", "an op needs a name", "`- op: name`")
            return None
        fault = identifier_fault(name.text)
        if not fault and name.text in _MODULES:
            fault = f"`{name.text}` is a name that the generated package uses itself"
        if not fault and name.text[0].isupper():
            fault = f"`{name.text}` begins with a capital, as the classes of ops do"
        if not fault and class_name(name.text) in _CLASSES:
            fault = f"the class of `{name.text}` would be `{class_name(name.text)}`, which the generated package uses itself"
        if fault:
            self.fault(name.span, "bad-name", fault, "an op's name becomes a Python function")
            return None
        return name

    def _line(self, tree: Mapping, key: str) -> str:
        value = tree.get(key)
        if value is None:
            return ""
        if not isinstance(value, Scalar):
            self.fault(value.span, "not-a-text", f"`{key}` is a text", "quote it")
            return ""
        return " ".join(value.text.split())

    def _map(self, tree: Mapping, key: str) -> Mapping | None:
        value = tree.get(key)
        if value is None or (isinstance(value, Scalar) and not value.text):
            return None
        if not isinstance(value, Mapping):
            self.fault(value.span, "not-a-map", f"`{key}` is a map of names")
            self.unclear.add(key)
            return None
        self.written[key] = [k.text for k, _ in value.items]
        return value

    def _scalar(self, tree: Tree | None, what: str) -> Scalar | None:
        if tree is None or isinstance(tree, Scalar):
            return tree
        kind = "braces" if isinstance(tree, Mapping) else "brackets"
        self.fault(tree.span, "not-a-text", f"{what} is a text; YAML reads {kind} as its own", "quote it: `'...'`")
        return None

    def _define(self, key: Scalar, what: str) -> bool:
        """Records a value's name; false after a fault."""
        fault = identifier_fault(key.text)
        if not fault and key.text in RESERVED:
            fault = f"`{key.text}` is reserved"
        if not fault and key.text[0].isupper():
            fault = f"`{key.text}` begins with a capital, as axes do"
        if fault:
            public = "; `arg:` gives it a public one" if what not in ("attr", "output") else ""
            self.fault(key.span, "bad-name", fault, f"choose another name for the {what}{public}")
            return False
        if key.text in self.names:
            self.fault(
                key.span,
                "name-twice",
                f"`{key.text}` is declared twice",
                "",
                [Note("first here:", self.names[key.text])],
            )
            return False
        self.names[key.text] = key.span
        return True

    def _flag(self, tree: Tree | None) -> bool:
        value = self._scalar(tree, "a flag")
        if value is None:
            return False
        if value.text in ("True", "False"):
            self.fault(value.span, "not-a-flag", f"`{value.text}` is not true or false", f"`{value.text.lower()}`")
            return value.text == "True"
        if value.text not in ("true", "false"):
            self.fault(value.span, "not-a-flag", f"`{value.text}` is not true or false")
        return value.text == "true"

    def _anchor(self, value: Scalar, count: int) -> Anchor:
        """Where the lines of a scalar stand in the file."""
        if value.style in ("|", ">"):
            first = value.span.line + 1
            raw = self.lines[first - 1 : first - 1 + count]
            own = value.text.split("\n")
            cols = [len(r) - len(o) + 1 if r.endswith(o) else 1 for r, o in zip(raw, own)]
            return Anchor(self.file, first, tuple(cols) or (1,))
        if value.style == "plain":
            return Anchor(self.file, value.span.line, (value.span.col,))
        line = self.lines[value.span.line - 1]
        if line[value.span.col : value.span.col + len(value.text) + 1] == value.text + value.style:
            return Anchor(self.file, value.span.line, (value.span.col + 1,))
        return Anchor(self.file, value.span.line, (), _places(line, value.span.col, value.style))

    def expr(self, tree: Tree | None, what: str) -> Expr | None:
        """A formula given by a scalar."""
        value = self._scalar(tree, what)
        if value is None or not self._one_piece(value, what):
            return None
        if value.style == "plain" and value.text in ("", "null", "~"):
            self.fault(
                value.span, "empty-formula", f"{what} is missing", "quote it if it is a text that YAML reads as nothing"
            )
            return None
        return parse_expr(value.text.rstrip("\n"), self._anchor(value, value.text.count("\n") + 1), self.report)

    def _one_piece(self, value: Scalar, what: str) -> bool:
        """Whether each line of a formula is a line of the file: so only does each part have its place."""
        if value.style == ">":
            self.fault(value.span, "folded", f"{what} is folded by `>`, which loses its lines", "write `|`")
            return False
        if value.style != "|" and (value.last_line > value.span.line or "\n" in value.text):
            self.fault(value.span, "several-lines", f"{what} runs over several lines",
                       "write `|` and the formula below it")  # fmt: skip
            return False
        return True

    def block(self, tree: Tree | None, what: str) -> Formula:
        value = self._scalar(tree, what)
        if value is None or not self._one_piece(value, what):
            return ()
        return parse_block(value.text, self._anchor(value, value.text.count("\n") + 1), self.report)

    def _formula(self, tree: Tree | None, what: str, outputs: Collection[str]) -> Formula:
        if tree is None:
            return ()
        before = len(self.report.errors)
        formula = self.block(tree, f"`{what}`")
        if len(self.report.errors) > before:
            self.unclear.add(what)
        elif not formula:
            self.fault(tree.span, "empty-formula", f"`{what}` holds no statement")
            self.unclear.add(what)
        seen: dict[str, Span] = dict(self.forward)
        for binding in formula:
            first = seen.get(binding.name) or (None if binding.name in outputs else self.names.get(binding.name))
            if first is not None:
                self.fault(binding.span, "set-twice", f"`{binding.name}` is set twice", "give each value a name of its own",
                           [Note("first here:", first)])  # fmt: skip
            self._bound_name(binding.name, binding.span)
            seen[binding.name] = binding.span
        return formula

    def _bound_name(self, name: str, span: Span) -> None:
        if name in RESERVED:
            self.fault(span, "bad-name", f"`{name}` is reserved")
        elif name in self.axes or name[0].isupper():
            self.fault(
                span,
                "bad-name",
                f"`{name}` is the name of an axis, or looks like one",
                "values begin with a small letter",
            )

    # -------------------------------------------------------------------------------- tensors

    def _tensors(self, tree: Mapping, key: str, role: str) -> tuple[TensorDecl, ...]:
        group = self._map(tree, key)
        out = []
        for name, value in group.items if group is not None else ():
            if self._define(name, role):
                decl = self._tensor(name, value, role)
                if decl is not None:
                    out.append(decl)
        return tuple(out)

    def _tensor(self, name: Scalar, value: Tree, role: str) -> TensorDecl | None:
        fields = value if isinstance(value, Mapping) else None
        axes_tree = fields.get("axes") if fields is not None else value
        if fields is not None:
            self._known(fields, TENSOR_KEYS, "a tensor")
        if axes_tree is None:
            self.fault(name.span, "missing-axes", f"`{name.text}` has no axes", "`axes: [..., N]`; a scalar has `[]`")
            return None
        axes = self._axes(axes_tree)
        if axes is None:
            return None
        decl = TensorDecl(name.text, role, axes, name.span, broadcast=_is_pack(axes), arg=name.text)
        return decl if fields is None else self._fields(decl, fields)

    def _fields(self, decl: TensorDecl, fields: Mapping) -> TensorDecl:
        changes: dict[str, Any] = {}
        for key in ("broadcast", "scalar", "optional", "differentiable"):
            if fields.get(key) is not None:
                changes[key] = self._flag(fields.get(key))
        if fields.get("broadcast") is not None:
            changes["broadcast"] = bool(changes["broadcast"]) or decl.broadcast
        for key, attribute in (("dtype", "dtype"), ("indexes", "indexes"), ("arg", "arg")):
            value = self._scalar(fields.get(key), f"`{key}`")
            if value is not None:
                changes[attribute] = value.text
        other = self._scalar(fields.get("or"), "`or`")
        if other is not None:
            whole = re.fullmatch(r"[-+]?\d{1,18}", other.text)
            changes["or_else"] = int(other.text) if whole else other.text
        if fields.get("default") is not None:
            changes["default"] = self._number(fields.get("default"), "`default`")
        if fields.get("init") is not None:
            changes["init"] = self._initial(decl, fields.get("init"))
        if fields.get("when") is not None:
            changes["when"] = self.expr(fields.get("when"), "`when`")
        self._field_rules(decl, fields, changes)
        return replace(decl, **changes)

    def _field_rules(self, decl: TensorDecl, fields: Mapping, changes: dict[str, Any]) -> None:
        spans = {k.text: v.span for k, v in fields.items}
        for key, (roles, hint) in _MISPLACED.items():
            if key in spans and decl.role not in roles:
                kinds = ", ".join(k for k, r in _ROLES.items() if r in roles)
                self.fault(spans[key], "misplaced-key", f"`{key}` is for {kinds}", hint)
        if "or" in spans and "indexes" not in spans:
            self.fault(spans["or"], "misplaced-key", "`or` goes with `indexes`")
        dtype = changes.get("dtype", "float")
        if dtype not in DTYPES:
            self.fault(
                spans["dtype"],
                "unknown-dtype",
                f"`{dtype}` is not a dtype",
                _SPELLED.get(str(dtype), "") or nearest(str(dtype), DTYPES) or f"dtypes: {', '.join(DTYPES)}",
            )
        if changes.get("scalar") and (
            not isinstance(decl.axes, Axes)
            or any(d.kind != "pack" or d.factors[0].name != PACK for d in decl.axes.dims)
        ):
            self.fault(spans["scalar"], "scalar-axes", f"`{decl.name}` has named axes, so no number can stand for it")
        if "default" in changes and not changes.get("optional"):
            self.fault(
                spans["default"],
                "default-without-optional",
                f"`{decl.name}` has a default, but is not optional",
                "add `optional: true`",
            )
        if "arg" in changes and identifier_fault(str(changes["arg"])):
            self.fault(spans["arg"], "bad-name", identifier_fault(str(changes["arg"])))

    def _initial(self, decl: TensorDecl, tree: Tree | None) -> Number | Name | None:
        """`init: 0`; of state `init: lr` too."""
        named = isinstance(tree, Scalar) and tree.style == "plain" and not identifier_fault(tree.text)
        if decl.role == "state" and named and isinstance(tree, Scalar) and tree.text not in ("inf", "nan", "pi"):
            return Name(tree.text, tree.span)
        return self._number(tree, "`init`")

    def _number(self, tree: Tree | None, what: str) -> Number | None:
        expr = self.expr(tree, what)
        if isinstance(expr, Unary) and expr.op == "-" and isinstance(expr.operand, Number):
            return Number(-expr.operand.value, f"-{expr.operand.text}", expr.span)
        if isinstance(expr, Number):
            return expr
        if expr is not None:
            self.fault(expr.span, "not-a-number", f"{what} is a number")
        return None

    def _axes(self, tree: Tree) -> Axes | AxesChoice | None:
        if isinstance(tree, YamlSequence):
            dims = [self._dim(item) for item in tree.items]
            if any(d is None for d in dims):
                return None
            return self._checked(Axes(tuple(d for d in dims if d is not None), tree.span))
        if isinstance(tree, Scalar) and re.search(r"\bif\b", tree.text):
            if not self._one_piece(tree, "a choice of axes") or "\n" in tree.text.rstrip("\n"):
                self.fault(tree.span, "not-axes", "a choice of axes stands on one line")
                return None
            text = tree.text.rstrip("\n")
            return self._axes_choice(text, 0, self._anchor(tree, 1))
        self.fault(
            tree.span, "not-axes", "axes are a list: `[..., N]`", "a choice is quoted: `'[...] if COND else []'`"
        )
        return None

    def _axes_choice(self, text: str, at: int, anchor: Anchor) -> Axes | AxesChoice | None:
        """`text` begins at character `at` of the line that the anchor places."""
        span = anchor.span(0, at, at + len(text))
        first = _split(text, "if")
        if first is None:
            return self._axes_text(text, at, anchor)
        rest = text[first[1] :]
        second = _split(rest, "else")
        if second is None:
            self.fault(span, "not-axes", "a choice of axes has an `else`", "`'[...] if COND else []'`")
            return None
        expr = parse_expr(rest[: second[0]], anchor.part(0, at + first[1]), self.report)
        then = self._axes_text(text[: first[0]], at, anchor)
        other = self._axes_choice(rest[second[1] :], at + first[1] + second[1], anchor)
        if expr is None or then is None or other is None:
            return None
        return AxesChoice(expr, then, other, span)

    def _axes_text(self, text: str, at: int, anchor: Anchor) -> Axes | None:
        at += len(text) - len(text.lstrip())
        text = text.strip()
        span = anchor.span(0, at, at + len(text))
        if not (text.startswith("[") and text.endswith("]")):
            self.fault(span, "not-axes", f"`{text}` is not a list of axes", "`[..., N]`")
            return None
        dims = []
        for word in re.finditer(r"[^,\s](?:[^,]*[^,\s])?", text[1:-1]):
            place = anchor.span(0, at + 1 + word.start(), at + 1 + word.end())
            dims.append(self._dim(Scalar(word.group(), "plain", place, True, place.line)))
        return None if None in dims else self._checked(Axes(tuple(d for d in dims if d is not None), span))

    def _dim(self, tree: Tree) -> Dim | None:
        if not isinstance(tree, Scalar):
            self.fault(tree.span, "not-an-axis", "a dim is an axis, a pack, or a group `(G K)`")
            return None
        text, span = tree.text.strip(), tree.span
        if text.startswith("(") and text.endswith(")"):
            factors = [self._factor(w, span) for w in text[1:-1].split()]
            if not factors:
                self.fault(span, "not-an-axis", "an empty group")
            return None if not factors or None in factors else Dim("group", tuple(f for f in factors if f), span)
        if text == PACK:
            return Dim("pack", (Factor(PACK, None, span),), span)
        if text.endswith(PACK):
            factor = self._factor(text[:-3], span)
            self.packs.add(text[:-3])
            return None if factor is None else Dim("pack", (factor,), span)
        factor = self._factor(text, span)
        return None if factor is None else Dim("axis", (factor,), span)

    def _factor(self, text: str, span: Span) -> Factor | None:
        name, _, extent = text.partition("=")
        if "..." in text:
            self.fault(span, "pack-in-group", f"the pack `{text}` stands inside a group", "a group has single axes")
            return None
        fault = identifier_fault(name)
        if fault or not name[0].isupper():
            self.fault(
                span,
                "bad-axis",
                fault or f"`{name}` is not an axis: axes begin with a capital",
                f"`{name[:1].upper()}{name[1:]}`" if not fault else "",
            )
            return None
        if "=" in text and (not extent.isascii() or not extent.isdigit() or not 0 < int(extent) < 1025):
            self.fault(
                span,
                "bad-extent",
                f"`{extent}` is not an extent",
                "a fixed extent is a whole number from 1 to 1024: `S=2`",
            )
            return None
        self.axes.setdefault(name, span)
        return Factor(name, int(extent) if extent else None, span)

    def _checked(self, axes: Axes) -> Axes | None:
        names = [f.name for d in axes.dims for f in d.factors]
        for name in names:
            if names.count(name) > 1:
                text = "two packs `...` in one tensor" if name == PACK else f"the axis `{name}` twice in one tensor"
                self.fault(axes.span, "axis-twice", text, "give one of them another name")
                return None
        return axes

    # -------------------------------------------------------------------------------- attrs

    def _attrs(self, tree: Mapping) -> tuple[AttrDecl, ...]:
        group = self._map(tree, "attrs")
        out = []
        for name, value in group.items if group is not None else ():
            self.attrs.append(name.text)
            if self._define(name, "attr"):
                decl = self._attr(name, value)
                if decl is not None:
                    out.append(decl)
        return tuple(out)

    def _attr(self, name: Scalar, value: Tree) -> AttrDecl | None:
        if not isinstance(value, Mapping):
            self.fault(value.span, "not-a-map", f"`{name.text}` is declared by a map",
                       "`{default: 1e-6}`; `{}` for one without default")  # fmt: skip
            return None
        self._known(value, ATTR_KEYS, "an attr")
        enum = self._words(value.get("enum"), "`enum`")
        default, all_axes = self._default(name, value.get("default"), enum)
        axis, keeps, size = (self._axis_words(value.get(key), key) for key in ("axis", "keeps", "size"))
        public = self._scalar(value.get("arg"), "`arg`")
        if public is not None and identifier_fault(public.text):
            self.fault(public.span, "bad-name", identifier_fault(public.text))
        decl = AttrDecl(
            name.text, self._attr_type(value, default), name.span, default, enum, self._flag(value.get("optional")),
            self._count(value.get("tuple")), size, axis, all_axes, keeps[0] if keeps else None, public.text if public else "",
        )  # fmt: skip
        self._attr_rules(decl, value)
        return decl

    def _attr_rules(self, decl: AttrDecl, value: Mapping) -> None:
        """What the keys of an attr say of each other."""
        spans = {k.text: v.span for k, v in value.items}
        special = [k for k in ("enum", "axis", "keeps", "size") if k in spans]
        if len(special) > 1:
            self.fault(spans[special[1]], "misplaced-key", f"`{special[1]}` does not go with `{special[0]}`")
        fixed = {"enum": (), "axis": ("int",), "size": ("int",), "keeps": ("bool",)}[special[0]] if special else ()
        given = value.get("type")
        if special and isinstance(given, Scalar) and given.text not in fixed:
            self.fault(given.span, "misplaced-key", f"`type` does not go with `{special[0]}`", "leave it out")
        if decl.arity is not None and special and special[0] != "size":
            self.fault(spans["tuple"], "misplaced-key", f"`tuple` does not go with `{special[0]}`")
        elif len(decl.size) > 1 and decl.arity != len(decl.size):
            self.fault(spans["size"], "tuple-length", f"`{decl.name}` gives {len(decl.size)} extents",
                       f"`tuple: {len(decl.size)}`")  # fmt: skip
        if decl.all_axes and not decl.axis:
            self.fault(spans["default"], "bad-default", "`all` is for an attr that gives the `axis` of a pack")
        if decl.default is not None and not decl.enum:
            self._default_type(decl, decl.default)
        if decl.computed:
            self._computed_default(decl, spans["default"])

    def _computed_default(self, decl: AttrDecl, span: Span) -> None:
        """Where the default is an expression, None stands for it, and the value is one of kernels alone."""
        if decl.optional:
            self.fault(span, "bad-default", f"`{decl.name}` may be None, which would also stand for its default",
                       "leave out `optional`, or ask `is None` in the formula")  # fmt: skip
        elif decl.type in ("bool", "enum") or decl.size or decl.axis or decl.keeps:
            self.fault(span, "bad-default", f"`{decl.name}` decides on kernels and extents: its default is a constant")

    def _default_type(self, decl: AttrDecl, default: Expr) -> None:
        items: tuple[Expr, ...] = (default,)
        if isinstance(default, Call) and default.func == "tuple":
            items = default.args
            if decl.arity is None and not decl.axis:
                self.fault(default.span, "tuple-length", f"`{decl.name}` is no tuple", f"`tuple: {len(items)}`")
            elif decl.arity is not None and len(items) != decl.arity:
                self.fault(
                    default.span, "tuple-length", f"`{decl.name}` has {decl.arity} items, its default {len(items)}"
                )
        for item in items:
            flag = isinstance(item, Name) and item.id in ("true", "false")
            number = item.operand if isinstance(item, Unary) else item
            whole = not isinstance(number, Number) or isinstance(number.value, int)
            if flag != (decl.type == "bool") and (flag or isinstance(number, Number)):
                self.fault(item.span, "bad-default", f"`{decl.name}` is {decl.type}, its default is not",
                           "`true` or `false`" if decl.type == "bool" else "")  # fmt: skip
            elif decl.type == "int" and not whole:
                self.fault(item.span, "bad-default", f"`{decl.name}` is int, its default is not")

    def _default(self, name: Scalar, tree: Tree | None, enum: tuple[str, ...]) -> tuple[Expr | None, bool]:
        if tree is None:
            return None, False
        if isinstance(tree, YamlSequence):
            return self._tuple_default(tree), False
        what = f"the default of `{name.text}`"
        value = self._scalar(tree, what)
        if value is None:
            return None, False
        if enum:
            if value.text not in enum:
                self.fault(value.span, "unknown-choice", f"`{value.text}` is not a choice of `{name.text}`",
                           nearest(value.text, enum) or f"choices: {', '.join(enum)}")  # fmt: skip
            return Text(value.text, value.span), False
        if value.text == "all":
            return None, True
        if value.text in ("true", "false"):
            return Name(value.text, value.span), False
        if value.text in ("True", "False", "null", "None", "~", ""):
            hint = {"True": "`true`", "False": "`false`"}.get(
                value.text, "for None write `optional: true` and no default"
            )
            self.fault(value.span, "bad-default", f"{what} is not a number", hint)
            return None, False
        expr = self.expr(value, what)
        if expr is not None:
            self._default_names(expr)
            expr = self._folded(expr, what)
        return expr, False

    def _folded(self, expr: Expr, what: str) -> Expr | None:
        """An expression of constants as the number that it is; what asks extents or attrs as it stands."""
        parts = list(subexpressions(expr))
        plain = isinstance(expr, Number) or isinstance(expr, Unary) and isinstance(expr.operand, Number)
        if plain or any(isinstance(p, Name | Item | Text | Dots | IsNone) for p in parts):
            return expr
        from codegen.infer import Fault, constant_of  # types are no matter of the loader's but here

        try:
            value = constant_of(expr, expr.span)
        except Fault as fault:
            self.fault(fault.span, fault.code, fault.text, fault.hint)
            return None
        if value is None or isinstance(value, bool):
            self.fault(expr.span, "bad-default", f"{what} is no number")
            return None
        size = Number(abs(value), repr(abs(value)), expr.span)
        return Unary("-", size, expr.span) if math.copysign(1, value) < 0 else size

    def _default_names(self, expr: Expr) -> None:
        """A default may ask sizes and the attrs before it."""
        earlier = self.attrs[:-1]
        parts = list(subexpressions(expr))
        compared = {id(t) for p in parts if isinstance(p, Compare) for t in (p.left, p.right)}
        for part in parts:
            name = part.name if isinstance(part, Item | IsNone) else part
            if isinstance(part, Text) and id(part) not in compared:
                self.fault(part.span, "bad-default", "the default is a text, but the attr has no `enum`")
            elif isinstance(name, Name) and not name.id[0].isupper() and name.id not in earlier:
                self.fault(name.span, "bad-default", f"`{name.id}` is not an attr above", nearest(name.id, earlier)
                           or "a default may ask `size(A)` and the attrs before it; for None write `optional: true`")  # fmt: skip

    def _tuple_default(self, tree: YamlSequence) -> Expr | None:
        """`[0.9, 0.999]`, kept as the call `tuple(0.9, 0.999)`."""
        items = [self._number(item, "an item of the default") for item in tree.items]
        if not items or None in items:
            if not items:
                self.fault(tree.span, "tuple-length", "the default is an empty list")
            return None
        return Call("tuple", tuple(i for i in items if i is not None), (), tree.span, tree.span)

    def _attr_type(self, value: Mapping, default: Expr | None) -> str:
        """What the author gave, or what the other keys and the default say."""
        given = self._scalar(value.get("type"), "`type`")
        types = ("float", "int", "bool")
        if given is not None and given.text not in types:
            self.fault(given.span, "unknown-type", f"`{given.text}` is not a type of attrs",
                       nearest(given.text, types) or f"types: {', '.join(types)}")  # fmt: skip
        for key, kind in (("enum", "enum"), ("size", "int"), ("axis", "int"), ("keeps", "bool")):
            if value.get(key) is not None:
                return kind
        if given is not None:
            return given.text
        return "bool" if isinstance(default, Name) and default.id in ("true", "false") else "float"

    def _words(self, tree: Tree | None, what: str) -> tuple[str, ...]:
        if tree is None:
            return ()
        if not isinstance(tree, YamlSequence) or not tree.items or not all(isinstance(i, Scalar) for i in tree.items):
            self.fault(tree.span, "not-a-list", f"{what} is a list of names")
            return ()
        words = tuple(i.text for i in tree.items if isinstance(i, Scalar))
        for item in tree.items:
            if isinstance(item, Scalar) and (not item.text.isascii() or not item.text.isidentifier()):
                self.fault(item.span, "bad-name", f"`{item.text}` is not a plain word")
            elif isinstance(item, Scalar) and words.count(item.text) > 1:
                self.fault(item.span, "name-twice", f"`{item.text}` is listed twice")
        return words

    def _count(self, tree: Tree | None) -> int | None:
        value = self._scalar(tree, "`tuple`")
        if value is None:
            return None
        if not value.text.isascii() or not value.text.isdigit() or not 1 <= int(value.text[:6]) <= 8:
            self.fault(value.span, "bad-extent", f"`{value.text}` is not a number of items from 1 to 8")
            return None
        return int(value.text)

    def _axis_words(self, tree: Tree | None, key: str) -> tuple[str, ...]:
        """The axes of `axis: (A B)`, `size: [A, B]`, `keeps: A`."""
        if tree is None:
            return ()
        items = tree.items if isinstance(tree, YamlSequence) else (tree,)
        words: list[str] = []
        for item in items:
            text = item.text.strip() if isinstance(item, Scalar) else ""
            grouped = re.fullmatch(r"\(([^()]*)\)", text) if key == "axis" else None
            found = grouped.group(1).split() if grouped is not None else [text]
            for word in found or [""]:
                plain = word.removesuffix("...")
                if identifier_fault(plain) or not plain[0].isupper():
                    what = f"`{word}` is not an axis" if word else f"`{key}` wants an axis"
                    self.fault(item.span, "bad-axis", what, "axes begin with a capital")
                elif plain in words:
                    self.fault(item.span, "axis-twice", f"`{plain}` is listed twice")
                else:
                    words.append(plain)
        if key == "keeps" and len(words) > 1:
            self.fault(tree.span, "bad-axis", "`keeps` wants one axis or one pack")
        return tuple(words)

    # -------------------------------------------------------------------------------- sizes, requires, domain, signature

    def _sizes(self, tree: Mapping) -> tuple[SizeDef, ...]:
        group = self._map(tree, "sizes")
        out = []
        for name, value in group.items if group is not None else ():
            if "=" in name.text:
                self.fault(name.span, "bad-axis", f"`{name.text}` is not an axis", "the extent stands behind the colon")
                continue
            factor = self._factor(name.text, name.span)
            expr = self.expr(value, f"the size of `{name.text}`")
            if factor is not None and expr is not None:
                out.append(SizeDef(factor.name, expr, name.span))
        return tuple(out)

    def _requires(self, tree: Mapping) -> tuple[Requirement, ...]:
        value = self._scalar(tree.get("requires"), "`requires`")
        if value is None or not self._one_piece(value, "`requires`"):
            return ()
        lines = value.text.rstrip("\n").split("\n")
        anchor = self._anchor(value, len(lines))
        out = []
        for k, line in enumerate(lines):
            if not line.strip() or line.strip().startswith("#"):
                continue
            expr = parse_expr(line, anchor.part(k, 0), self.report)
            if expr is not None:
                out.append(Requirement(expr, line.split("#")[0].strip(), expr.span))
        return tuple(out)

    def _domain(self, tree: Mapping) -> tuple[Domain, ...]:
        group = self._map(tree, "domain")
        out = []
        for name, value in group.items if group is not None else ():
            known = [n for key in (*_ROLES, "attrs") if key != "outputs" for n in self.written.get(key, [])]
            if name.text not in known:
                self.fault(name.span, "unknown-name", f"`{name.text}` is not an argument", nearest(name.text, known))
                continue
            ends = (
                [self._number(i, "an end of a domain") for i in value.items] if isinstance(value, YamlSequence) else []
            )
            if len(ends) != 2 or any(e is None for e in ends):
                self.fault(value.span, "bad-domain", "a domain is a list of two numbers", "`[0, inf]`")
                continue
            low, high = (float(e.value) for e in ends if e is not None)
            if not low < high:
                self.fault(value.span, "bad-domain", "the domain is empty")
            else:
                out.append(Domain(name.text, low, high, name.span))
        return tuple(out)

    def _signature(
        self, tree: Mapping, groups: dict[str, tuple[TensorDecl, ...]], attrs: tuple[AttrDecl, ...]
    ) -> tuple[str, ...]:
        usual = [t.name for role in ("input", "param", "buffer", "state") for t in groups[role]] + [
            a.name for a in attrs
        ]
        value = tree.get("signature")
        if value is None:
            return tuple(usual)
        if not isinstance(value, YamlSequence):
            self.fault(value.span, "not-a-list", "`signature` is a list of arguments")
            return tuple(usual)
        words = [i.text for i in value.items if isinstance(i, Scalar)]
        known = [n for key in (*_ROLES, "attrs") if key != "outputs" for n in self.written.get(key, [])]
        for k, item in enumerate(value.items):
            text = item.text if isinstance(item, Scalar) else "this"
            if text not in known and not self.unclear & {*_ROLES, "attrs"}:
                self.fault(item.span, "unknown-name", f"`{text}` is not an argument", nearest(text, known))
            elif text in words[:k]:
                self.fault(item.span, "name-twice", f"`{text}` is listed twice")
        for name in usual:
            if name not in words:
                self.fault(value.span, "missing-argument", f"`signature` leaves out `{name}`")
        return tuple(words)

    # -------------------------------------------------------------------------------- update, backward

    def _entries(self, group: Mapping, skip: Sequence[str], words: Sequence[str]) -> tuple[Entry, ...]:
        out = []
        for key, value in group.items:
            if key.text in (*skip, "<<"):
                continue
            if isinstance(value, Scalar) and value.text in words and value.style == "plain":
                out.append(Entry(key.text, value.text, None, key.span, value.span))
                continue
            expr = self.expr(value, f"the formula of `{key.text}`")
            if expr is not None:
                out.append(Entry(key.text, "formula", expr, key.span, expr.span))
        return tuple(out)

    def _let(self, group: Mapping) -> Formula:
        return self._formula(group.get("let"), "let", ())

    def _update(self, tree: Mapping) -> Update | None:
        group = self._map(tree, "update")
        if group is None:
            return None
        when = self.expr(group.get("when"), "`when`") if group.get("when") is not None else None
        return Update(when, self._let(group), self._entries(group, ("when", "let"), ()), group.span)

    def _backward(self, tree: Mapping) -> Backward | None:
        value = tree.get("backward")
        if value is None:
            return None
        if isinstance(value, Scalar):
            if value.text == "not_differentiable":
                return Backward(False, (), (), None, value.span)
            self.fault(value.span, "bad-backward", "`backward` is a map of formulas, or `not_differentiable`",
                       f"a tensor each: `backward: {{x: {value.text}}}`" if value.text in ("auto", "zero")
                       else nearest(value.text, ("not_differentiable",)))  # fmt: skip
            return None
        if not isinstance(value, Mapping):
            self.fault(value.span, "bad-backward", "`backward` is a map of formulas, or `not_differentiable`")
            return None
        saved = value.get("save")
        save: tuple[Saved, ...] | None = None
        if saved is not None:
            items = saved.items if isinstance(saved, YamlSequence) else ()
            if not isinstance(saved, YamlSequence):
                self.fault(saved.span, "not-a-list", "`save` is a list of names")
            save = tuple(Saved(i.text, i.span) for i in items if isinstance(i, Scalar))
            for k, item in enumerate(items):
                if not isinstance(item, Scalar):
                    self.fault(item.span, "not-a-text", "`save` is a list of names")
                elif item.text in [s.name for s in save[:k]]:
                    self.fault(item.span, "name-twice", f"`{item.text}` is listed twice")
        self.written["backward"] = [k.text for k, _ in value.items]
        entries = self._entries(value, ("save", "let"), ("auto", "zero", "not_differentiable"))
        return Backward(True, self._let(value), entries, save, value.span)

    def _steps(self, tree: Mapping) -> Formula:
        """The steps of a fused op. Their results are names of the graph that it stands for, not of its own formula."""
        value = tree.get("fuses")
        if value is None:
            return ()
        before = len(self.report.errors)
        formula = self.block(value, "`fuses`")
        if not formula and len(self.report.errors) == before:
            self.fault(value.span, "empty-formula", "`fuses` holds no statement")
        return formula

    # -------------------------------------------------------------------------------- the whole

    def _consistent(self, op: OpSpec, tree: Mapping) -> None:
        bound = {b.name for b in op.forward}
        for output in op.outputs:
            if output.name not in bound and "forward" not in self.unclear:
                self.fault(
                    output.span,
                    "missing-formula",
                    f"nothing sets the output `{output.name}`",
                    nearest(output.name, bound),
                )
        if not self.written.get("outputs") and op.update is None and not self.unclear & {"outputs", "update"}:
            self.fault(op.span, "no-outputs", f"`{op.name}` has neither outputs nor an update")
        self._reserved_cotangents(op)
        self._placed(op)
        self._reference(op, tree)
        self._indexed(op)
        if op.update is not None:
            self._check_update(op, op.update)
        if op.state:
            self._check_state(op)
        if op.backward is not None and op.backward.differentiable:
            self._check_backward(op, op.backward)
        elif (
            tree.get("backward") is None
            and "backward" not in self.unclear
            and any(o.dtype in _FLOATING for o in op.outputs)
        ):
            self.fault(
                op.span,
                "missing-backward",
                f"`{op.name}` declares no derivative",
                "write formulas, `auto`, or `backward: not_differentiable`",
            )
        self._check_schedule(op, tree)
        if op.fuses and len(self.report.errors) == self.started:
            check_steps(op, self.report)
        public = [(t.arg, t.span) for t in op.arguments] + [(a.public, a.span) for a in op.attrs]
        for place, (name, span) in enumerate(public):
            if name in [n for n, _ in public[:place]]:
                self.fault(span, "name-twice", f"two arguments are called `{name}`")
        if {"number", "integral"} <= {t.dtype for t in op.tensors}:
            self.fault(op.span, "mixed-classes", f"`{op.name}` has tensors of class `number` and of class `integral`",
                       "the tensors of such a class are all of one kind: choose one class")  # fmt: skip

    def _check_schedule(self, op: OpSpec, tree: Mapping) -> None:
        if op.schedule not in ("", *SCHEDULES):
            span = getattr(tree.get("schedule"), "span", op.span)
            self.fault(
                span,
                "unknown-schedule",
                f"`{op.schedule}` is not a schedule",
                nearest(op.schedule, SCHEDULES) or f"schedules: {', '.join(SCHEDULES)}",
            )
        self._public_names(op)
        self._used_attrs(op)
        self._default_domains(op)
        self._late_defaults(op)

    def _public_names(self, op: OpSpec) -> None:
        taken = {
            "call",
            "torch",
            "math",
            "triton",
            "tl",
            "Elementwise",
            "Rowwise",
            "RuntimeOp",
            "StepOp",
            "Tensor",
            "Optimizer",
            class_name(op.name),
            *(("params", "optimizer") if op.state else ()),
        }
        named = [(t.arg, t.span) for t in op.arguments] + [(a.public, a.span) for a in op.attrs]
        for name, span in named:
            if name in taken:
                self.fault(
                    span,
                    "bad-name",
                    f"`{name}` is a name that the generated module uses itself",
                    "choose another name, or give `arg:`",
                )

    def _default_domains(self, op: OpSpec) -> None:
        """What is verified in an interval must not begin outside of it."""
        domains = {d.name: d for d in op.domain}
        for attr in op.attrs:
            sign, number = (-1, attr.default.operand) if isinstance(attr.default, Unary) else (1, attr.default)
            domain = domains.get(attr.name)
            if domain is None or not isinstance(number, Number) or math.isinf(number.value):  # infinity: no bound
                continue
            if not domain.low <= sign * number.value <= domain.high:
                self.fault(domain.span, "default-domain", f"the default of `{attr.name}` lies outside of its domain",
                           "nothing is verified there: widen the domain")  # fmt: skip

    def _late_defaults(self, op: OpSpec) -> None:
        """A default that asks extents is known to the kernel alone: no choice may hang on it, and no number of the host."""
        if op.schedule == "none":
            return
        found = late(op)
        places = [(e.id, e.span) for c in conditions(op) for e in subexpressions(c) if isinstance(e, Name)]
        places += [(e.name.id, e.span) for c in conditions(op) for e in subexpressions(c) if isinstance(e, Item)]
        places += [(str(t.or_else), t.span) for t in op.tensors if t.or_else is not None]
        for name, span in places:
            if name in found:
                self.fault(span, "late-default", f"the default of `{name}` is known in a kernel alone, and this is decided before",
                           "give it a constant default, or one of earlier attrs without a condition")  # fmt: skip
        if op.state:
            for attr in (a for a in op.attrs if a.computed):
                self.fault(
                    attr.span, "bad-default", f"`{attr.name}` is a hyper-parameter of a step: its default is a constant"
                )

    def _used_attrs(self, op: OpSpec) -> None:
        """An attr that nothing reads is a formula that somebody meant to write."""
        if len(self.report.errors) > self.started:  # what cannot be read may well read it
            return
        exprs = [*formulas(op), *conditions(op), *(t.init for t in op.state if isinstance(t.init, Name))]
        read = {e.id for expr in exprs for e in subexpressions(expr) if isinstance(e, Name)}
        read |= {e.name.id for expr in exprs for e in subexpressions(expr) if isinstance(e, Item | IsNone)}
        for attr in op.attrs:
            structural = (
                attr not in op.given
                or attr.size
                or attr.axis
                or attr.keeps
                or any(t.or_else == attr.name for t in op.arguments)
            )
            if attr.name not in read and not structural:
                self.fault(attr.span, "unused-name", f"nothing reads the attr `{attr.name}`", "use it, or delete it")
            default = attr.default
            if (
                isinstance(default, Name)
                and attr.type in ("float", "int")
                and default.id not in {a.name for a in op.attrs}
            ):
                self.fault(
                    default.span,
                    "bad-default",
                    f"the default of `{attr.name}` is `{default.id}`, no number",
                    "for None: `optional: true`",
                )

    def _reference(self, op: OpSpec, tree: Mapping) -> None:
        """The reference goes into a test as it is: one expression of torch over the op's own values, and no more."""
        value = tree.get("reference")
        if not op.reference or not isinstance(value, Scalar):
            return
        known = {"torch", *(t.name for t in op.arguments), *(a.name for a in op.attrs)}
        fault = reference_fault(op.reference, known)
        if fault:
            self.fault(value.span, "bad-reference", fault, nearest(fault.split("`")[1], known) if "`" in fault else "")

    def _reserved_cotangents(self, op: OpSpec) -> None:
        taken = {f"d{o.name}" for o in op.outputs}
        named = (
            [(t.name, t.span) for t in op.tensors]
            + [(a.name, a.span) for a in op.attrs]
            + [(b.name, b.span) for b in op.forward]
        )
        named += [(b.name, b.span) for b in (op.backward.let if op.backward else ())]
        for name, span in named:
            if name in taken:
                self.fault(span, "bad-name", f"`{name}` is the cotangent of `{name[1:]}`", "choose another name")
        self._reserved_gradients(op)

    def _reserved_gradients(self, op: OpSpec) -> None:
        """A gradient, its sum and the parts of its sum travel beside the tensors, each under a name of its own."""
        for tensor in op.tensors:
            if what := of_kernels(op, tensor.name):
                public = "" if tensor.role == "output" else "; `arg:` gives it a public one"
                self.fault(tensor.span, "bad-name", f"`{tensor.name}` is {what}", f"choose another name{public}")

    def _placed(self, op: OpSpec) -> None:
        """`axis` and `keeps` speak of axes that a tensor has; `all` is every axis of a pack."""
        for attr in op.attrs:
            for axis in (*attr.axis, *((attr.keeps,) if attr.keeps else ())):
                if axis not in self.axes and not self.unclear:
                    self.fault(attr.span, "unknown-axis", f"no tensor has the axis `{axis}`", nearest(axis, self.axes))
            if attr.all_axes and attr.axis and attr.axis[0] in self.axes and attr.axis[0] not in self.packs:
                self.fault(attr.span, "bad-default", f"`{attr.axis[0]}` is one axis: `all` is for a pack")

    def _indexed(self, op: OpSpec) -> None:
        attrs = {a.name for a in op.attrs}
        for tensor in op.arguments:
            if isinstance(tensor.or_else, str) and tensor.or_else not in attrs:
                self.fault(
                    tensor.span,
                    "unknown-name",
                    f"`or: {tensor.or_else}` is not an attr",
                    nearest(tensor.or_else, attrs),
                )
            if tensor.indexes is not None and (tensor.indexes not in self.axes or tensor.dtype not in ("int", *INTS)):
                text = (
                    f"`{tensor.indexes}` is not an axis of this op"
                    if tensor.indexes not in self.axes
                    else "an index is an int tensor"
                )
                hint = "`dtype: int`" if tensor.indexes in self.axes else nearest(tensor.indexes, self.axes)
                self.fault(tensor.span, "bad-index", text, hint)

    def _check_update(self, op: OpSpec, update: Update) -> None:
        known = {*self.written.get("buffers", ()), *self.written.get("state", ())}
        for entry in update.entries:
            if entry.name not in known and not self.unclear & {"buffers", "state"}:
                self.fault(
                    entry.span, "unknown-name", f"`{entry.name}` is not a buffer or state", nearest(entry.name, known)
                )

    def _check_state(self, op: OpSpec) -> None:
        """What state begins with is a number or an attr; the attrs that go with it are what their names say."""
        attrs = {a.name: a for a in op.attrs}
        for tensor in op.state:
            if isinstance(tensor.init, Name) and not self.unclear & {"attrs"}:
                attr = attrs.get(tensor.init.id)
                if attr is None:
                    self.fault(tensor.init.span, "unknown-name", f"`{tensor.init.id}` is no number and no attr",
                               nearest(tensor.init.id, attrs))  # fmt: skip
                elif attr.type != "float" or attr.arity is not None or attr.optional:
                    self.fault(tensor.init.span, "bad-default", f"the attr `{attr.name}` is not a number")
        for name, meaning in (
            (COUNTER, "counts the updates of a tensor"),
            (FRESH, "is 1 where the state is new, else 0"),
        ):
            attr = attrs.get(name)
            if attr is not None and (attr.type != "int" or attr.default is not None or attr.arity is not None):
                text = f"in an op with state `{name}` {meaning}"
                self.fault(attr.span, "bad-default", text, f"write `{name}: {{type: int}}`")

    def _check_backward(self, op: OpSpec, backward: Backward) -> None:
        wanted = {t.name: t for t in op.inputs + op.params}
        faulty = {n for key in ("inputs", "params") for n in self.written.get(key, ())} - wanted.keys()
        for entry in backward.entries:
            if entry.name in faulty or (entry.name not in wanted and self.unclear & {"inputs", "params"}):
                continue
            if entry.name not in wanted:
                kind = (
                    "a buffer or state: it has no gradient"
                    if entry.name in {t.name for t in op.buffers + op.state}
                    else "not an input or param"
                )
                self.fault(entry.span, "unknown-input", f"`{entry.name}` is {kind}", nearest(entry.name, wanted))
            elif wanted[entry.name].dtype not in _FLOATING and wanted[entry.name].dtype in DTYPES:
                self.fault(entry.span, "no-gradient", f"`{entry.name}` is {wanted[entry.name].dtype}: it has no gradient",
                           "delete the entry")  # fmt: skip
        for name, tensor in wanted.items():
            if name not in self.written["backward"] and tensor.dtype in _FLOATING and "backward" not in self.unclear:
                self.fault(tensor.span, "missing-derivative", f"`{name}` has no entry under `backward`",
                           "write its formula, `auto`, `zero`, or `not_differentiable`")  # fmt: skip
        if self.unclear & {"forward", "let", "outputs"}:
            return
        known = {b.name for b in op.forward} | {t.name for t in op.tensors}
        for saved in backward.save or ():
            if saved.name in {b.name for b in backward.let}:
                self.fault(saved.span, "unknown-name", f"`{saved.name}` is the backward's own: the forward cannot keep it",
                           "compute it under `forward`")  # fmt: skip
            elif saved.name not in known:
                self.fault(
                    saved.span, "unknown-name", f"`{saved.name}` is not a value of the op", nearest(saved.name, known)
                )


def _is_pack(axes: Axes | AxesChoice) -> bool:
    """`[...]` exactly: NumPy's broadcasting is implied."""
    return isinstance(axes, Axes) and len(axes.dims) == 1 and axes.dims[0].factors[0].name == PACK


def _split(text: str, word: str) -> tuple[int, int] | None:
    """Where a word begins and ends that stands in no bracket and no quotes."""
    depth, quote = 0, ""
    for at, c in enumerate(text):
        if quote:
            quote = "" if c == quote else quote
        elif c in "'\"":
            quote = c
        elif c in "()[]":
            depth += 1 if c in "([" else -1
        elif depth == 0 and re.match(rf"\b{word}\b", text[at:]) and not re.match(r"\w", text[at - 1 : at]):
            return at, at + len(word)
    return None


def _places(line: str, start: int, quote: str) -> tuple[int, ...]:
    """The column of each character of a quoted text whose escapes make it shorter than what was written, and of its end.

    `start` counts the characters of the line up to the first behind the quote.
    """
    token = re.compile(r"''|." if quote == "'" else r"\\(?:x..|u.{4}|U.{8}|.)|.")
    cols = []
    while start < len(line):
        found = token.match(line, start)
        if found is None or found.group() == quote:
            break
        cols.append(start + 1)
        start = found.end()
    return (*cols, start + 1)
