"""Formulas: text in a spec file becomes `spec.Expr`, every part with its place.

Takes the text and where it stands (`Anchor`), returns expressions, or reports why there are none. Python's own parser
reads the text; an allow-list admits what the language has and nothing else, and nothing is ever executed.

    parse_expr("x * rsqrt(v + eps)", anchor, report) -> Binary("*", Name("x"), Call("rsqrt", ...))
"""

from __future__ import annotations

import ast
import io
import keyword
import math
import re
import tokenize
import warnings
from dataclasses import dataclass

from codegen.diagnostics import Report, Span
from codegen.spec import (
    Binary,
    Binding,
    Call,
    Compare,
    Dots,
    Expr,
    Formula,
    IfElse,
    IsNone,
    Item,
    Keyword,
    Logic,
    Name,
    Number,
    Text,
    Unary,
)  # fmt: skip

_DEEPEST = 60
_LONGEST = 60
_MOST_DIGITS = 400
_BINARY: dict[type, str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**",
    ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^", ast.LShift: "<<", ast.RShift: ">>",
}  # fmt: skip
_UNARY: dict[type, str] = {ast.USub: "-", ast.Invert: "~", ast.Not: "not"}
_COMPARE: dict[type, str] = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}
_WORDS = ("and", "or", "not", "if", "else", "is", "None", "True", "False")
"""The keywords that a formula may hold."""
_NAMED = {"inf": math.inf, "nan": math.nan, "pi": math.pi}
RESERVED = frozenset({*_NAMED, "let", "save", "when", "True", "False", "None", "true", "false", "index", "size",
                      "auto", "zero", "not_differentiable"})  # fmt: skip


@dataclass(frozen=True)
class Anchor:
    """Where a text stands: the line of its first line, and the column of each line's first character.

    A quoted text with escapes has `places` instead: the column of each of its characters, and of its end.
    """

    file: str
    line: int
    cols: tuple[int, ...]
    places: tuple[int, ...] = ()

    def span(self, line: int, start: int, end: int) -> Span:
        """The span of characters `start` to `end` of the text's line (all counted from 0)."""
        if self.places:
            last = len(self.places) - 1
            first = self.places[min(start, last)]
            return Span(self.file, self.line, first, max(self.places[min(end, last)], first + 1))
        base = self.cols[min(line, len(self.cols) - 1)] if self.cols else 1
        return Span(self.file, self.line + line, base + start, base + max(end, start + 1))

    def part(self, line: int, start: int) -> Anchor:
        """Where the text from character `start` of a line stands, taken for itself."""
        if self.places:
            return Anchor(self.file, self.line, (), self.places[min(start, len(self.places) - 1) :])
        base = self.cols[min(line, len(self.cols) - 1)] if self.cols else 1
        return Anchor(self.file, self.line + line, (base + start, *self.cols[line + 1 :]))


class _Refused(Exception):
    def __init__(self, span: Span, code: str, text: str, hint: str = "") -> None:
        super().__init__(text)
        self.span, self.code, self.text, self.hint = span, code, text, hint


def identifier_fault(name: str) -> str:
    """Why a text is no plain name, or an empty string."""
    if not name.isascii() or not name.isidentifier():
        return f"`{name}` is not a plain identifier"
    if keyword.iskeyword(name):
        return f"`{name}` is a Python keyword"
    if name.startswith("_"):
        return f"`{name}` begins with an underscore: such names are the generator's own"
    if len(name) > _LONGEST:
        return f"`{name[:20]}...` is longer than {_LONGEST} characters"
    return ""


_REFERENCE_NODES = (
    ast.Expression, ast.Name, ast.Attribute, ast.Call, ast.keyword, ast.Constant, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare,
    ast.IfExp, ast.Subscript, ast.Slice, ast.Tuple, ast.List, ast.Dict, ast.operator, ast.unaryop, ast.boolop, ast.cmpop,
    ast.expr_context, ast.Lambda, ast.arguments, ast.arg,
)  # fmt: skip


def reference_fault(text: str, known: set[str]) -> str:
    """Why a text is no reference (one Python expression over the known names), or an empty string."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"the reference is not an expression: {getattr(error, 'msg', error)}"
    known = known | {"tuple", "list", "int", "float", "len", "range", "min", "max", "abs", "sum"}
    known |= {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}
    for node in ast.walk(tree):
        if not isinstance(node, _REFERENCE_NODES):
            return f"the reference holds a {type(node).__name__}: it is one expression of torch"
        if isinstance(node, ast.Name) and node.id not in known:
            return f"the reference names `{node.id}`, which is neither torch nor an argument"
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            return f"the reference reaches for `{node.attr}`"
    return ""


def parse_expr(text: str, anchor: Anchor, report: Report) -> Expr | None:
    """One expression. None after a fault, which is in `report`."""
    stripped = text.lstrip(" ")
    shift = len(text) - len(stripped)
    lines = anchor.part(0, shift) if shift else anchor
    if not stripped.strip():
        report.error(anchor.span(0, 0, 1), "empty-formula", "a formula is missing here")
        return None
    tree = _parsed(stripped.rstrip(), lines, report, "eval")
    if not isinstance(tree, ast.Expression):
        return None
    return _guarded(_Reader(stripped, lines), tree.body, report)


def parse_block(text: str, anchor: Anchor, report: Report) -> Formula:
    """Statements `name = expression`, one a line, with their comments. Faulty ones are reported and left out."""
    tree = _parsed(text, anchor, report, "exec")
    if not isinstance(tree, ast.Module):
        return ()
    reader = _Reader(text, anchor)
    trailing, above = _comments(text)
    out: list[Binding] = []
    previous = 0
    for statement in tree.body:
        first, last = statement.lineno, statement.end_lineno or statement.lineno
        over = tuple(above[k] for k in range(previous + 1, first) if k in above)
        previous = last
        target = _target(reader, statement, report)
        if target is None or not isinstance(statement, ast.Assign):
            continue
        expr = _guarded(reader, statement.value, report)
        if expr is not None:
            comment = " ".join(trailing[k] for k in range(first, last + 1) if k in trailing)
            out.append(Binding(target.id, expr, reader.span(target), comment, over))
    return tuple(out)


def _target(reader: _Reader, statement: ast.stmt, report: Report) -> ast.Name | None:
    """The name that a statement sets; None where it is no `name = expression` on lines of its own."""
    span = reader.span(statement)
    match statement:
        case ast.Assign([ast.Name() as target]):
            fault = identifier_fault(reader.source(target))
            if fault:
                report.error(reader.span(target), "bad-name", fault)
                return None
            if reader.follows(statement, ";"):
                report.error(span, "not-a-statement", "a statement has a line of its own", "no `;`")
                return None
            return target
        case ast.Expr(ast.Compare(ast.Name(), [ast.Eq()])):
            hint = "`=` sets, `==` compares"
        case ast.Expr():
            hint = "give the value a name: that of an output, or one of your own"
        case ast.AugAssign() | ast.AnnAssign():
            hint = "each value is set once, by `=`"
        case ast.If():
            hint = "a choice is an expression: `y = a if COND else b`"
        case _:
            hint = ""
    report.error(span, "not-a-statement", "a statement is `name = expression`", hint)
    return None


def _comments(text: str) -> tuple[dict[int, str], dict[int, str]]:
    """Comments by line: those behind a statement, and those that have a line of their own."""
    trailing: dict[int, str] = {}
    above: dict[int, str] = {}
    if "#" not in text:
        return trailing, above
    lines = text.split("\n")
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                row, col = token.start
                own = not lines[row - 1][:col].strip()
                (above if own else trailing)[row] = token.string.lstrip("#").strip()
    except (tokenize.TokenError, SyntaxError, IndexError):
        pass
    return trailing, above


def _parsed(text: str, anchor: Anchor, report: Report, mode: str) -> ast.AST | None:
    digits = re.search(rf"[0-9]{{{_MOST_DIGITS}}}", text)
    if "\0" in text or digits is not None:
        at = digits.start() if digits is not None else text.index("\0")
        line = text.count("\n", 0, at)
        col = at - (text.rfind("\n", 0, at) + 1)
        code, fault = (
            ("literal-range", "a number of so many digits") if digits is not None else ("syntax-error", "a NUL")
        )
        report.error(anchor.span(line, col, col + 1), code, f"{fault} has no place in a formula")
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            return ast.parse(text, mode=mode)
    except SyntaxError as error:
        lines = text.split("\n")
        line = max((error.lineno or 1) - 1, 0)
        col = (error.offset or 0) - 1
        if line >= len(lines) or col < 0:  # Python missed something behind the end
            line, col = len(lines) - 1, len(lines[-1])
        col = min(col, len(lines[line]))
        said = error.msg.split(". ")[0]
    except (RecursionError, MemoryError):
        line, col, said = 0, 0, "nested too deeply"
    except ValueError as error:
        line, col, said = 0, 0, str(error)
    whole = text.split("\n")[line].split("#")[0]
    name = re.match(r" *([A-Za-z]+) *=(?!=)", whole)
    if name is not None and keyword.iskeyword(name.group(1)):
        span = anchor.span(line, name.start(1), name.end(1))
        report.error(span, "bad-name", f"`{name.group(1)}` is a Python keyword", "choose another name")
        return None
    hint = _mended(text, whole)
    if mode == "eval" and re.match(r"\s*\w+\s*=(?!=)", text):
        hint = "an expression stands here, without `name =`; `==` compares"
    report.error(anchor.span(line, col, col + 1), "syntax-error", f"not a formula: {said}", hint)
    return None


def _mended(text: str, line: str) -> str:
    """What a text that is not Python may have meant; `line` is the one at fault."""
    for word in re.findall(r"[A-Za-z]+", line):
        if keyword.iskeyword(word) and word not in _WORDS:
            return f"`{word}` is a Python keyword"
    if "?" in text:
        return "`a ? b : c` is `where(a, b, c)`, or `b if a else c` where `a` is no tensor"
    if "&&" in text or "||" in text or re.search(r"!(?!=)", text):
        return "truth values combine by `&`, `|` and `~`"
    if any(line.rstrip().endswith(("+", "-", "*", "/")) for line in text.split("\n")[:-1]):
        return "a formula of several lines stands in parentheses"
    return "a formula is Python's arithmetic"


def _guarded(reader: _Reader, node: ast.expr, report: Report) -> Expr | None:
    try:
        return reader.read(node, 0)
    except _Refused as refused:
        report.error(refused.span, refused.code, refused.text, refused.hint)
        return None


class _Reader:
    """Turns Python's tree into the language's, refusing what the language has not."""

    def __init__(self, text: str, anchor: Anchor) -> None:
        self.lines = text.split("\n")
        self.anchor = anchor

    def span(self, node: ast.expr | ast.stmt | ast.keyword) -> Span:
        start = self._chars(node.lineno, node.col_offset)
        end = (
            self._chars(node.lineno, node.end_col_offset or 0)
            if node.end_lineno == node.lineno
            else len(self.lines[node.lineno - 1])
        )
        return self.anchor.span(node.lineno - 1, start, end)

    def _chars(self, line: int, offset: int) -> int:
        """Python counts bytes; people count characters."""
        return len(self.lines[line - 1].encode()[:offset].decode(errors="ignore"))

    def source(self, node: ast.expr | ast.keyword) -> str:
        """What the author wrote for a node of one line: Python's names are normalised, these are not."""
        return self.lines[node.lineno - 1].encode()[node.col_offset : node.end_col_offset].decode(errors="replace")

    def follows(self, node: ast.stmt, mark: str) -> bool:
        rest = self.lines[(node.end_lineno or node.lineno) - 1].encode()[node.end_col_offset or 0 :]
        return rest.decode(errors="replace").lstrip().startswith(mark)

    def read(self, node: ast.expr, depth: int) -> Expr:
        span = self.span(node)
        if depth > _DEEPEST:
            raise _Refused(span, "too-deep", f"nested deeper than {_DEEPEST} levels", "name a part of it")
        match node:
            case ast.Constant():
                return self._constant(node, span)
            case ast.Name(id) if id in _NAMED:
                return Number(_NAMED[id], id, span)
            case ast.Name():
                return self._name(node)
            case ast.UnaryOp(op, operand) if type(op) in _UNARY:
                return Unary(_UNARY[type(op)], self.read(operand, depth + 1), span)
            case ast.BinOp(left, op, right) if type(op) in _BINARY:
                return Binary(_BINARY[type(op)], self.read(left, depth + 1), self.read(right, depth + 1), span)
            case ast.BoolOp(op, values):
                word = "and" if isinstance(op, ast.And) else "or"
                self._short(len(values), depth, span)
                parts = [self.read(v, depth + 1) for v in values]
                return self._joined(word, parts, span)
            case ast.Compare():
                return self._compare(node, span, depth)
            case ast.IfExp(test, body, orelse):
                return IfElse(
                    self.read(test, depth + 1), self.read(body, depth + 1), self.read(orelse, depth + 1), span
                )
            case ast.Call():
                return self._call(node, span, depth)
            case ast.Subscript(ast.Name() as name, ast.Constant(int() as index)) if not isinstance(index, bool):
                return Item(self._name(name), index, span)
        raise _Refused(span, "not-in-language", f"`{_shown(node)}` is not in the language", _instead(node))

    def _constant(self, node: ast.Constant, span: Span) -> Expr:
        value = node.value
        if isinstance(value, bool):
            return Name(str(value), span)
        if isinstance(value, (int, float)):
            text = self.source(node)
            if isinstance(value, int) and abs(value) >= 2**63:
                raise _Refused(span, "literal-range", "the number is beyond the range of int64")
            if isinstance(value, float) and not math.isfinite(value):
                raise _Refused(span, "literal-range", f"{text} is beyond the range of float64", "write `inf`")
            return Number(value, text, span)
        if isinstance(value, str):
            if self.source(node)[1:-1] != value or not re.fullmatch(r"[A-Za-z0-9_]*", value):
                raise _Refused(span, "not-in-language", "a text is one plain word in quotes", 'as in `kind == "tanh"`')
            return Text(value, span)
        if value is Ellipsis:
            return Dots(span)
        hint = "ask `x is None` of an optional argument" if value is None else ""
        raise _Refused(span, "not-in-language", f"`{_shown(node)}` is not a number", hint)

    def _name(self, node: ast.Name) -> Name:
        span, written = self.span(node), self.source(node)
        fault = identifier_fault(written)
        if fault:
            raise _Refused(span, "bad-name", fault)
        return Name(written, span)

    def _short(self, count: int, depth: int, span: Span) -> None:
        """Chains become nested pairs, so they count as depth."""
        if depth + count > _DEEPEST:
            raise _Refused(
                span, "too-deep", f"a chain of {count} conditions: more than {_DEEPEST} levels", "name a part of it"
            )

    def _joined(self, word: str, parts: list[Expr], span: Span) -> Expr:
        out = parts[0]
        for part in parts[1:]:
            out = Logic(word, out, part, span)
        return out

    def _compare(self, node: ast.Compare, span: Span, depth: int) -> Expr:
        if len(node.ops) == 1 and isinstance(node.ops[0], (ast.Is, ast.IsNot)):
            right = node.comparators[0]
            if isinstance(node.left, ast.Name) and isinstance(right, ast.Constant) and right.value is None:
                return IsNone(self._name(node.left), isinstance(node.ops[0], ast.IsNot), span)
            raise _Refused(span, "not-in-language", "`is` asks only whether an argument is None")
        operands = [node.left, *node.comparators]
        self._short(len(operands), depth, span)
        self._trap(operands, span)
        parts = [self.read(o, depth + 1) for o in operands]
        pairs: list[Expr] = []
        for k, op in enumerate(node.ops):
            if type(op) not in _COMPARE:
                raise _Refused(span, "not-in-language", f"`{_shown(node)}` is not in the language")
            pairs.append(Compare(_COMPARE[type(op)], parts[k], parts[k + 1], span))
        return self._joined("and", pairs, span)

    def _trap(self, operands: list[ast.expr], span: Span) -> None:
        """`a & b == c` compares `a & b`: whoever wrote it meant something else."""
        for k, operand in enumerate(operands):
            if isinstance(operand, ast.BinOp) and isinstance(operand.op, (ast.BitAnd, ast.BitOr, ast.BitXor)):
                line = self.lines[(operand.end_lineno or operand.lineno) - 1].encode()
                after = line[operand.end_col_offset :].lstrip()[:1]
                before = self.lines[operand.lineno - 1].encode()[: operand.col_offset].rstrip()[-1:]
                if (after != b")") if k == 0 else (before != b"("):
                    raise _Refused(span, "precedence", "`&`, `|` and `^` bind tighter than a comparison",
                                   "parenthesise: `(a > 0) & (b == c)`")  # fmt: skip

    def _call(self, node: ast.Call, span: Span, depth: int) -> Expr:
        if not isinstance(node.func, ast.Name):
            hint = _instead(node.func) or "functions have plain names"
            raise _Refused(span, "not-in-language", f"`{_shown(node.func)}` is not a function", hint)
        func = self._name(node.func)
        args = []
        for arg in node.args:
            if isinstance(arg, ast.Starred):
                raise _Refused(self.span(arg), "not-in-language", "`*` before an argument is not in the language")
            args.append(self.read(arg, depth + 1))
        words: list[Keyword] = []
        for word in node.keywords:
            if word.arg is None:
                raise _Refused(span, "not-in-language", "`**` before an argument is not in the language")
            at = self.span(word)
            if not self.source(word).startswith(word.arg):
                raise _Refused(at, "bad-name", f"`{word.arg}` is not written as a plain identifier")
            if any(k.name == word.arg for k in words):
                raise _Refused(at, "keyword-twice", f"`{word.arg}=` is given twice")
            words.append(Keyword(word.arg, self.read(word.value, depth + 1), at))
        return Call(func.id, tuple(args), tuple(words), span, func.span)


def _shown(node: ast.expr) -> str:
    """The start of what a node says; an empty text where it is nested too deeply to say."""
    try:
        return ast.unparse(node)[:40]
    except RecursionError:
        return "..."


def _instead(node: ast.expr) -> str:
    match node:
        case ast.Attribute(ast.Name("torch" | "tl" | "np" | "numpy" | "math")):
            return "functions have plain names: `exp(x)`"
        case ast.Attribute():
            return "there are no attributes: `sum(x, N)`, not `x.sum()`"
        case ast.Subscript():
            return "a tensor is read by `at(x, N=i)`, a tuple attr by `pair[0]`"
        case ast.Compare(_, [ast.In() | ast.NotIn(), *_]):
            return "compare one by one: `(a == b) | (a == c)`"
        case ast.UnaryOp(ast.UAdd(), _):
            return "leave the `+` out"
        case ast.BinOp(_, ast.MatMult(), _):
            return "a contraction is `dot(a, b, K)`"
        case ast.Tuple():
            return "a formula has one value"
        case ast.Lambda() | ast.NamedExpr() | ast.ListComp() | ast.GeneratorExp() | ast.SetComp() | ast.DictComp():
            return "name the parts in statements of their own"
    return ""
