"""Single mutations of a formula: the slips that people make.

Takes an expression, returns every expression that differs by one slip, with a word for it. Verification uses them to
name the term at fault (the mutation that repairs it); the tests use them to show that no slip passes.

    dy * y * (1 - y)  ->  -(dy * y * (1 - y)) "sign"; y * (1 - y) "dropped `dy`"; dy * y * (1 + y) "`-` became `+`"; ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from codegen.diagnostics import Span
from codegen.primitives import TABLE
from codegen.spec import Binary, Call, Compare, Expr, Name, Number, Unary, spell

SWAPS = {
    "+": ("-",),
    "-": ("+",),
    "*": ("/",),
    "/": ("*",),
    "**": ("*",),
    "//": ("%",),
    "%": ("//",),
    "&": ("|",),
    "|": ("&",),
    "^": ("|",),
    "<<": (">>",),
    ">>": ("<<",),
}
COMPARES = {"<": (">", "<="), "<=": (">=", "<"), ">": ("<", ">="), ">=": ("<=", ">"), "==": ("!=",), "!=": ("==",)}
REDUCTIONS = {"sum": "mean", "mean": "sum", "max": "min", "min": "max"}


@dataclass(frozen=True)
class Mutation:
    """A changed formula: the slip in words, where, and the whole expression with it."""

    kind: str
    text: str
    span: Span
    expr: Expr


def mutations(expr: Expr) -> Iterator[Mutation]:
    """Every single mutation of the expression, the outermost first."""
    yield Mutation("sign", f"the sign of `{spell(expr)}`", expr.span, Unary("-", expr, expr.span))
    yield Mutation("factor", f"a factor 1.001 on `{spell(expr)}`", expr.span,
                   Binary("*", Number(1.001, "1.001", expr.span), expr, expr.span))  # fmt: skip
    for kind, text, changed in _inside(expr):
        yield Mutation(kind, text[0], text[1], changed)


def _inside(expr: Expr) -> Iterator[tuple[str, tuple[str, Span], Expr]]:
    for kind, text, changed in _here(expr):
        yield kind, (text, expr.span), changed
    for child, put in _children(expr):
        for kind, where, changed in _inside(child):
            yield kind, where, put(changed)


def _children(expr: Expr) -> Iterator[tuple[Expr, Callable[[Expr], Expr]]]:
    """Each value operand with a function that puts another in its place; axes and conditions are left alone."""
    if isinstance(expr, Call):
        for k, arg in enumerate(expr.args):
            if not (isinstance(arg, Name) and arg.id[:1].isupper()):
                yield arg, partial(_with_argument, expr, k)
        for k, word in enumerate(expr.keywords):
            if word.name[:1].isupper():
                continue
            yield word.value, partial(_with_keyword, expr, k)
        return
    for field in fields(expr):
        value = getattr(expr, field.name)
        if isinstance(value, Expr) and field.name != "cond" and not (field.name == "name"):
            yield value, partial(_with_field, expr, field.name)


def _with_argument(call: Call, k: int, new: Expr) -> Expr:
    return replace(call, args=(*call.args[:k], new, *call.args[k + 1 :]))


def _with_keyword(call: Call, k: int, new: Expr) -> Expr:
    word = replace(call.keywords[k], value=new)
    return replace(call, keywords=(*call.keywords[:k], word, *call.keywords[k + 1 :]))


def _with_field(expr: Expr, name: str, new: Expr) -> Expr:
    changes: dict[str, Any] = {name: new}
    return replace(expr, **changes)


def _here(expr: Expr) -> Iterator[tuple[str, str, Expr]]:
    match expr:
        case Binary(op, left, right, span):
            for other in SWAPS.get(op, ()):
                yield "operator", f"`{op}` in `{spell(expr)}` for `{other}`", replace(expr, op=other)
            if op in ("-", "/", "**") and left != right:
                yield "operands", f"the operands of `{spell(expr)}`", replace(expr, left=right, right=left)
            if op in ("+", "-", "*", "/"):
                yield "dropped", f"`{spell(right)}` in `{spell(expr)}`", left
                yield "dropped", f"`{spell(left)}` in `{spell(expr)}`", Unary("-", right, span) if op == "-" else right
            if op in ("+", "-"):
                yield "sign", f"the sign of `{spell(left)}`", replace(expr, left=Unary("-", left, span))
        case Unary("-", operand, _):
            yield "sign", f"the sign of `{spell(operand)}`", operand
        case Compare(op, left, right, _):
            for other in COMPARES.get(op, ()):
                yield "comparison", f"`{op}` in `{spell(expr)}` for `{other}`", replace(expr, op=other)
        case Call(func, args, _, _, _):
            neighbour = TABLE[func].neighbour if func in TABLE else REDUCTIONS.get(func, "")
            if neighbour:
                yield "function", f"`{func}` for `{neighbour}`", replace(expr, func=neighbour)
            if func == "where" and len(args) == 3:
                yield "operands", f"the branches of `{spell(expr)}`", replace(expr, args=(args[0], args[2], args[1]))
            if func == "stack" and len(args) == 3:
                yield "operands", f"the parts of `{spell(expr)}`", replace(expr, args=(args[1], args[0], args[2]))
        case Number(value, _, span) if isinstance(value, (int, float)) and value != 0:
            yield "factor", f"`{spell(expr)}`", Number(value * 1.001, repr(value * 1.001), span)
