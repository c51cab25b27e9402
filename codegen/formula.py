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
_BINARY: dict[type, str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**",
    ast.BitAnd: "&", ast.BitOr: "|",
}  # fmt: skip
_UNARY: dict[type, str] = {ast.USub: "-", ast.Invert: "~", ast.Not: "not"}
_COMPARE: dict[type, str] = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}
_NAMED = {"inf": math.inf, "nan": math.nan, "pi": math.pi}
RESERVED = frozenset({*_NAMED, "let", "save", "when", "True", "False", "None", "true", "false", "index", "size"})


@dataclass(frozen=True)
class Anchor:
    """Where a text stands: the line of its first line, and the column of each line's first character."""

    file: str
    line: int
    cols: tuple[int, ...]

    def span(self, line: int, start: int, end: int) -> Span:
        """The span of characters `start` to `end` of the text's line (all counted from 0)."""
        base = self.cols[min(line, len(self.cols) - 1)] if self.cols else 1
        return Span(self.file, self.line + line, base + start, base + max(end, start + 1))


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
    lines = anchor if not shift else Anchor(anchor.file, anchor.line, (anchor.cols[0] + shift, *anchor.cols[1:]))
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
        span = reader.span(statement)
        if (
            not isinstance(statement, ast.Assign)
            or len(statement.targets) != 1
            or not isinstance(statement.targets[0], ast.Name)
        ):
            report.error(span, "not-a-statement", "a statement is `name = expression`")
            continue
        name = statement.targets[0].id
        fault = identifier_fault(name)
        if fault:
            report.error(reader.span(statement.targets[0]), "bad-name", fault)
            continue
        expr = _guarded(reader, statement.value, report)
        if expr is not None:
            comment = " ".join(trailing[k] for k in range(first, last + 1) if k in trailing)
            out.append(Binding(name, expr, reader.span(statement.targets[0]), comment, over))
    return tuple(out)


def _comments(text: str) -> tuple[dict[int, str], dict[int, str]]:
    """Comments by line: those behind a statement, and those that have a line of their own."""
    trailing: dict[int, str] = {}
    above: dict[int, str] = {}
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
    fault: tuple[int, int, str] | None = None
    if "\0" in text:
        fault = (0, 0, "a NUL character")
    try:
        if fault is None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)
                return ast.parse(text, mode=mode)
    except SyntaxError as error:
        fault = ((error.lineno or 1) - 1, max((error.offset or 1) - 1, 0), error.msg)
    except (RecursionError, MemoryError):
        fault = (0, 0, "nested too deeply")
    except ValueError as error:
        fault = (0, 0, str(error))
    assert fault is not None
    line, col, text_of_fault = fault
    report.error(anchor.span(line, col, col + 1), "syntax-error", f"not a formula: {text_of_fault}",
                 "a formula is Python's arithmetic; `a ? b : c` is `where(a, b, c)`")  # fmt: skip
    return None


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

    def read(self, node: ast.expr, depth: int) -> Expr:
        span = self.span(node)
        if depth > _DEEPEST:
            raise _Refused(span, "too-deep", f"nested deeper than {_DEEPEST} levels", "name a part of it")
        match node:
            case ast.Constant():
                return self._constant(node, span)
            case ast.Name(id):
                return self._name(id, span)
            case ast.UnaryOp(op, operand) if type(op) in _UNARY:
                return self._unary(_UNARY[type(op)], self.read(operand, depth + 1), span)
            case ast.BinOp(left, op, right) if type(op) in _BINARY:
                return Binary(_BINARY[type(op)], self.read(left, depth + 1), self.read(right, depth + 1), span)
            case ast.BoolOp(op, values):
                word = "and" if isinstance(op, ast.And) else "or"
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
            case ast.Subscript(ast.Name(id), ast.Constant(int() as index)) if not isinstance(index, bool):
                return Item(Name(id, span), index, span)
        raise _Refused(span, "not-in-language", f"`{ast.unparse(node)[:40]}` is not in the language", _instead(node))

    def _constant(self, node: ast.Constant, span: Span) -> Expr:
        value = node.value
        if isinstance(value, bool):
            return Name(str(value), span)
        if isinstance(value, (int, float)):
            text = self.lines[node.lineno - 1].encode()[node.col_offset : node.end_col_offset].decode()
            if isinstance(value, int) and abs(value) >= 2**63:
                raise _Refused(span, "literal-range", "the number is beyond the range of int64")
            if isinstance(value, float) and not math.isfinite(value):
                raise _Refused(span, "literal-range", f"{text} is beyond the range of float64", "write `inf`")
            return Number(value, text, span)
        if isinstance(value, str):
            return Text(value, span)
        if value is Ellipsis:
            return Dots(span)
        raise _Refused(
            span, "not-in-language", f"`{node.value!r}` is not a number", "ask `x is None` of an optional argument"
        )

    def _name(self, id: str, span: Span) -> Expr:
        if id in _NAMED:
            return Number(_NAMED[id], id, span)
        if not id.isascii():
            raise _Refused(span, "bad-name", f"`{id}` is not a plain identifier")
        return Name(id, span)

    def _unary(self, op: str, operand: Expr, span: Span) -> Expr:
        return Unary(op, operand, span)

    def _joined(self, word: str, parts: list[Expr], span: Span) -> Expr:
        out = parts[0]
        for part in parts[1:]:
            out = Logic(word, out, part, span)
        return out

    def _compare(self, node: ast.Compare, span: Span, depth: int) -> Expr:
        if len(node.ops) == 1 and isinstance(node.ops[0], (ast.Is, ast.IsNot)):
            right = node.comparators[0]
            if isinstance(node.left, ast.Name) and isinstance(right, ast.Constant) and right.value is None:
                return IsNone(Name(node.left.id, self.span(node.left)), isinstance(node.ops[0], ast.IsNot), span)
            raise _Refused(span, "not-in-language", "`is` asks only whether an argument is None")
        operands = [node.left, *node.comparators]
        self._trap(operands, span)
        parts = [self.read(o, depth + 1) for o in operands]
        pairs: list[Expr] = []
        for k, op in enumerate(node.ops):
            if type(op) not in _COMPARE:
                raise _Refused(span, "not-in-language", f"`{ast.unparse(node)[:40]}` is not in the language")
            pairs.append(Compare(_COMPARE[type(op)], parts[k], parts[k + 1], span))
        return self._joined("and", pairs, span)

    def _trap(self, operands: list[ast.expr], span: Span) -> None:
        """`a & b == c` compares `a & b`: whoever wrote it meant something else."""
        for k, operand in enumerate(operands):
            if isinstance(operand, ast.BinOp) and isinstance(operand.op, (ast.BitAnd, ast.BitOr)):
                line = self.lines[(operand.end_lineno or operand.lineno) - 1].encode()
                after = line[operand.end_col_offset :].lstrip()[:1]
                before = self.lines[operand.lineno - 1].encode()[: operand.col_offset].rstrip()[-1:]
                if (after != b")") if k == 0 else (before != b"("):
                    raise _Refused(span, "precedence", "`&` and `|` bind tighter than a comparison",
                                   "parenthesise: `(a > 0) & (b == c)`")  # fmt: skip

    def _call(self, node: ast.Call, span: Span, depth: int) -> Expr:
        if not isinstance(node.func, ast.Name):
            raise _Refused(
                span,
                "not-in-language",
                f"`{ast.unparse(node.func)[:40]}` is not a function",
                "functions have plain names",
            )
        args = []
        for arg in node.args:
            if isinstance(arg, ast.Starred):
                raise _Refused(self.span(arg), "not-in-language", "`*` before an argument is not in the language")
            args.append(self.read(arg, depth + 1))
        words = []
        for word in node.keywords:
            if word.arg is None:
                raise _Refused(span, "not-in-language", "`**` before an argument is not in the language")
            words.append(Keyword(word.arg, self.read(word.value, depth + 1), self.span(word)))
        return Call(node.func.id, tuple(args), tuple(words), span, self.span(node.func))


def _instead(node: ast.expr) -> str:
    match node:
        case ast.Attribute():
            return "there are no attributes: `sum(x, N)`, not `x.sum()`"
        case ast.Subscript():
            return "a tensor is read by `at(x, N=i)`, a tuple attr by `pair[0]`"
        case ast.BinOp(_, ast.BitXor(), _):
            return "a power is `x ** 2`"
        case ast.BinOp(_, ast.MatMult(), _):
            return "a contraction is `dot(a, b, K)`"
        case ast.Set() | ast.Dict() | ast.List() | ast.Tuple():
            return "quote the formula: YAML reads braces and brackets as its own"
    return ""
