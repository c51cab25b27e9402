"""Formulas: what the language has becomes a tree with exact places; what it has not is refused where it stands."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from codegen.diagnostics import Report, Span
from codegen.formula import Anchor, identifier_fault, parse_block, parse_expr
from codegen.spec import (
    Binary,
    Call,
    Compare,
    Dots,
    Expr,
    IfElse,
    IsNone,
    Item,
    Logic,
    Name,
    Number,
    Text,
    Unary,
    spell,
)
from codegen.variants import subexpressions

HERE = Anchor("a.yaml", 1, (1,))


def parsed(text: str) -> Expr:
    report = Report()
    expr = parse_expr(text, HERE, report)
    assert expr is not None and not report.found, report.render()
    return expr


def refused(text: str) -> tuple[str, int, str]:
    """Code, column and text of the only fault."""
    report = Report()
    report.add_source("a.yaml", text)
    assert parse_expr(text, HERE, report) is None
    (fault,) = report.errors
    report.render()
    return fault.code, fault.span.col, fault.text + " / " + fault.hint


KINDS = {
    "x": Name, "0.5": Number, "1e-5": Number, ".5": Number, "3": Number, "inf": Number, "nan": Number, "pi": Number, '"tanh"': Text,
    "...": Dots, "-x": Unary, "~m": Unary, "not c": Unary, "a + b": Binary, "a ** b": Binary, "a // b": Binary, "a % b": Binary,
    "a & b": Binary, "a | b": Binary, "a < b": Compare, "a != b": Compare, "a and b": Logic, "a or b": Logic, "a < b < c": Logic,
    "a if c else b": IfElse, "x is None": IsNone, "x is not None": IsNone, "pair[0]": Item, "sum(x, N, ...)": Call,
    'at(x, N=i, fill=-inf)': Call, "stack(a, b, S)": Call,
}  # fmt: skip


@pytest.mark.parametrize("text", KINDS)
def test_each_construct_has_its_kind_and_its_text(text: str) -> None:
    expr = parsed(text)
    assert isinstance(expr, KINDS[text])
    if text != "a < b < c":
        assert spell(expr) == text


def test_numbers_keep_what_was_written() -> None:
    match parsed("1e-5"):
        case Number(value, written, span):
            assert (value, written, span) == (1e-5, "1e-5", Span("a.yaml", 1, 1, 5))
    assert [spell(parsed(t)) for t in ("2.50", "1_000", "inf")] == ["2.50", "1_000", "inf"]
    value = parsed("nan")
    assert isinstance(value, Number) and math.isnan(value.value)


def test_a_chain_is_pairs_joined_by_and() -> None:
    assert spell(parsed("0 <= p < 1")) == "0 <= p and p < 1"
    assert spell(parsed("a < b <= c == d")) == "a < b and b <= c and c == d"


def test_python_binds_as_python_does() -> None:
    for text in ("a - (b - c)", "(-x) ** 2", "-x ** 2", "(a > 0) & (b == c)", "x ** (a - 1)", "(a if c else b) * 2"):
        assert spell(parsed(text)) == text


REFUSED = {
    "x.is_not_none": ("not-in-language", 1), "2 * x.sum(N)": ("not-in-language", 5), "torch.exp(x)": ("not-in-language", 1),
    "lambda x: x": ("not-in-language", 1), "(y := x)": ("not-in-language", 2), "f'{x}'": ("not-in-language", 1), "f(*x)": ("not-in-language", 3),
    "f(**x)": ("not-in-language", 1), "f(x)(y)": ("not-in-language", 1), "x[0:1]": ("not-in-language", 1), "x[i]": ("not-in-language", 1),
    "x[-1]": ("not-in-language", 1), "x[True]": ("not-in-language", 1), "x, y": ("not-in-language", 1), "{x}": ("not-in-language", 1),
    "[i for i in x]": ("not-in-language", 1), "a @ b": ("not-in-language", 1),
    "+x": ("not-in-language", 1), "a in b": ("not-in-language", 1), "a is b": ("not-in-language", 1), "2 is None": ("not-in-language", 1),
    "x == None": ("not-in-language", 6), "1j * x": ("not-in-language", 1), "b'a'": ("not-in-language", 1), "'a' 'b'": ("not-in-language", 1),
    "kind == 'a b'": ("not-in-language", 9), "kind == '\\x61'": ("not-in-language", 9), "yield x": ("syntax-error", 1), "await x": ("not-in-language", 1),
    "_x + 1": ("bad-name", 1), "1 + __import__('os')": ("bad-name", 5), "\xe9 * 2": ("bad-name", 1), "2 * \uff58": ("bad-name", 5),
    "\uff45xp(x)": ("bad-name", 1), "at(x, \uff2e=1)": ("bad-name", 7), "_p[0]": ("bad-name", 1), "_x is None": ("bad-name", 1),
    "x * " + "a" * 61: ("bad-name", 5),
    "a & b == c": ("precedence", 1), "a == b & c": ("precedence", 1), "f(a | b > c)": ("precedence", 3), "(a) & (b) == (c)": ("precedence", 1),
    "a > 1 & ~b == 2": ("precedence", 1), "f(x, N, axis=M, axis=N)": ("keyword-twice", 17),
    "x + 1e999": ("literal-range", 5), "9223372036854775808": ("literal-range", 1), "x + " + "9" * 5000: ("literal-range", 5),
    "x +": ("syntax-error", 4), "(x": ("syntax-error", 1), "x)": ("syntax-error", 2), "x\0y": ("syntax-error", 2), "y = x": ("syntax-error", 3),
    "": ("empty-formula", 1), "   ": ("empty-formula", 1),
    "-" * 100 + "x": ("too-deep", 62), " + ".join("x" * 70): ("too-deep", 1), " and ".join("x" * 5000): ("too-deep", 1),
    " < ".join("x" * 5000): ("too-deep", 1),
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: text[:20])
def test_what_the_language_has_not_is_refused_where_it_stands(text: str) -> None:
    assert refused(text)[:2] == REFUSED[text]


WILD = [
    "(" * 5000 + "x" + ")" * 5000, "-" * 50000 + "x", "x" + "+x" * 50000, "f(" * 3000, "x" + "[0]" * 9000, "x" + ".a" * 9000,
    "not " * 9000 + "x", "x if c else " * 3000 + "x", "\\", "#", "'", '"""', "\ud800", "\u200bx", "x\u00a0+ 1", "1_", "0777", "0x", "5 if",
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(WILD)))
def test_nothing_raises(number: int) -> None:
    text = WILD[number]
    report = Report()
    assert parse_expr(text, HERE, report) is None and report.errors
    assert parse_block(f"y = {text}", HERE, report) == ()


def test_parentheses_make_the_trap_good() -> None:
    for text in ("(a & b) == c", "a == (b & c)", "(a > 0) & (b == c)", "~(a | b)", "a & b"):
        parsed(text)


HINTS = {
    "x ? 1 + 2": "where(a, b, c)", "a && b": "`&`", "!a": "`~`", "a @ b": "dot(a, b, K)", "x.sum(N)": "sum(x, N)",
    "torch.exp(x)": "functions have plain names", "x[i]": "at(x, N=i)", "x == None": "x is None", "x * class": "`class` is a Python keyword", "y = x": "without `name =`",
}  # fmt: skip


@pytest.mark.parametrize("text", HINTS)
def test_hints_say_what_to_write(text: str) -> None:
    assert HINTS[text] in refused(text)[2]


def test_places_count_characters_not_bytes() -> None:
    assert refused("x == '\xe9\xe9'")[:2] == ("not-in-language", 6)
    report = Report()
    parse_block("# \U0001f600\nu = x\ny = u.q  # \xe9", Anchor("a.yaml", 4, (5, 7, 9)), report)
    assert [d.span for d in report.errors] == [Span("a.yaml", 6, 13, 16)]


def test_places_of_indented_and_of_escaped_texts() -> None:
    report = Report()
    parse_expr("  x + _q", Anchor("a.yaml", 3, (10,)), report)
    parse_expr("y + _q", Anchor("a.yaml", 4, (), (5, 9, 10, 11, 12, 13, 14)), report)
    assert [d.span for d in report.errors] == [Span("a.yaml", 3, 16, 18), Span("a.yaml", 4, 12, 14)]


BLOCK = """\
# The mean.
# Of a row.
mu = mean(x, N)  # one

# The rest.
xc = (x  # left
      - mu)  # right
y = xc
# the end
"""


def test_comments_stay_with_their_statements() -> None:
    report = Report()
    formula = parse_block(BLOCK, Anchor("a.yaml", 1, (1,) * 9), report)
    assert not report.found
    assert [(b.name, b.above, b.comment) for b in formula] == [
        ("mu", ("The mean.", "Of a row."), "one"),
        ("xc", ("The rest.",), "left right"),
        ("y", (), ""),
    ]
    assert [b.span for b in formula] == [Span("a.yaml", 3, 1, 3), Span("a.yaml", 6, 1, 3), Span("a.yaml", 8, 1, 2)]


STATEMENTS = {
    "import os": "not-a-statement", "def f(): pass": "not-a-statement", "a, b = x": "not-a-statement", "a = b = x": "not-a-statement",
    "x[0] = y": "not-a-statement", "x.a = y": "not-a-statement", "x += 1": "not-a-statement", "x: int = 1": "not-a-statement", "del x": "not-a-statement",
    "x * 2": "not-a-statement", "y == x": "not-a-statement", "if a: y = x": "not-a-statement", "y = x; z = x": "not-a-statement", "y = x;": "not-a-statement",
    "lambda = x": "bad-name", "None = x": "bad-name", "_y = x": "bad-name", "\uff59 = x": "bad-name", "__class__ = x": "bad-name", "y = x.a": "not-in-language",
}  # fmt: skip


@pytest.mark.parametrize("text", STATEMENTS)
def test_a_statement_is_a_name_and_an_expression(text: str) -> None:
    report = Report()
    good = parse_block(f"a = x\n{text}", Anchor("a.yaml", 1, (1, 1)), report)
    assert {d.code for d in report.errors} == {STATEMENTS[text]} and {d.span.line for d in report.errors} == {2}
    assert [b.name for b in good] in (["a"], ["a", "z"], [])


def test_every_faulty_statement_of_a_block_is_reported() -> None:
    report = Report()
    parse_block("a = x.y\nb = x\nc = x @ b\n_d = x", Anchor("a.yaml", 1, (1,) * 4), report)
    assert [d.span.line for d in report.ordered()] == [1, 3, 4]


def test_plain_names() -> None:
    assert not identifier_fault("x1") and not identifier_fault("match")
    for name in ("", "1x", "x-y", "../x", "class", "None", "_x", "\xe9", "x" * 61, "x\n"):
        assert identifier_fault(name), name


def places(expr: Expr) -> Iterator[tuple[Span, str]]:
    """Each leaf's place and what must stand there."""
    for part in subexpressions(expr):
        match part:
            case Name(id, span):
                yield span, id
            case Number(_, written, span):
                yield span, written
            case Call(func, _, _, _, span):
                yield span, func


def test_every_leaf_stands_where_its_span_says() -> None:
    text = "where((x > 0) & (y <= 1e-3), dy * at(x, N=i + 1), -pi) if kind == 'a' else sum(x * x, N, ...) / size(N)"
    found = list(places(parsed(text)))
    assert len(found) > 15
    for span, word in found:
        assert text[span.col - 1 : span.end - 1] == word
