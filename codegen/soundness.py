"""Checks on the text of a module before it is written: what Python would say only when it runs.

Takes a name and a text, returns nothing, raises `EmissionFault` for what is not sound: a fault of a template or of lowering.

    check_module("softcap", "def f(x, x): ...")   ->  EmissionFault: softcap: line 1: duplicate argument 'x' ...
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Collection, Iterator, Sequence

_BUILTINS = frozenset(dir(builtins)) | {"__name__", "__file__", "__doc__"}


class EmissionFault(Exception):
    """What was emitted is not sound."""


def check_module(name: str, text: str) -> None:
    """It compiles, defines no name twice, and reads no name that nothing before has set; what it imports it uses."""
    try:
        compile(text, f"{name}.py", "exec", dont_inherit=True)
    except SyntaxError as fault:
        raise EmissionFault(f"{name}: line {fault.lineno}: {fault.msg}") from None
    tree = ast.parse(text)
    for body in (tree.body, *(n.body for n in ast.walk(tree) if isinstance(n, ast.ClassDef))):
        _check_definitions(name, body)
    _check_imports(name, tree, text)
    outside = _BUILTINS | _set_in(tree.body)
    for where, unknown in (("the module", _unset(tree.body, _BUILTINS)), *_of_functions(tree, outside)):
        if unknown:
            raise EmissionFault(f"{name}: {where} reads names that nothing sets before: {', '.join(sorted(unknown))}")


def _check_imports(name: str, tree: ast.Module, text: str) -> None:
    used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} | ({"torch"} if "torch." in text else set())
    found = [n for n in ast.walk(tree) if isinstance(n, (ast.Import, ast.ImportFrom))]
    unused = {m for n in found if getattr(n, "module", "") != "__future__" for m in _imported(n)} - used
    if unused:
        raise EmissionFault(f"{name}: imported and not used: {', '.join(sorted(unused))}")


def _check_definitions(name: str, body: Sequence[ast.stmt]) -> None:
    names = [n.name for n in body if isinstance(n, (ast.FunctionDef, ast.ClassDef))]
    names += [m for n in body if isinstance(n, (ast.Import, ast.ImportFrom)) for m in _imported(n)]
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise EmissionFault(f"{name}: defined twice: {', '.join(twice)}")


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    return [a.asname or (a.name if isinstance(node, ast.ImportFrom) else a.name.partition(".")[0]) for a in node.names]


# ---------------------------------------------------------------------------------------------- names that are read


def _of_functions(tree: ast.Module, outside: Collection[str]) -> Iterator[tuple[str, set[str]]]:
    """For each function the names that it reads and nothing has set: what is its own is no name of the module in it."""
    for function in (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)):
        own = _parameters(function.args)
        yield f"`{function.name}`", _unset(function.body, own | (set(outside) - _set_in(function.body)))


def _parameters(args: ast.arguments) -> set[str]:
    rest = [a for a in (args.vararg, args.kwarg) if a is not None]
    return {a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs, *rest)}


def _set_in(body: Sequence[ast.stmt]) -> set[str]:
    """Every name that statements set, on whatever path; not those of functions and classes inside."""
    out, pending = set[str](), list[ast.AST](body)
    while pending:
        node = pending.pop()
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                out.add(name)
                continue
            case ast.Import() | ast.ImportFrom():
                out |= set(_imported(node))
            case ast.Name(id=name, ctx=ast.Store()):
                out.add(name)
        pending += ast.iter_child_nodes(node)
    return out


def _unset(body: Sequence[ast.stmt], known: Collection[str]) -> set[str]:
    """The names that statements read, and that are set on no path before."""
    flow = _Flow(set())
    flow.block(body, set(known))
    return flow.unset


class _Flow:
    """Walks statements in their order, with the names that may have been set. A branch does not see what the other sets."""

    def __init__(self, unset: set[str]) -> None:
        self.unset = unset

    def block(self, body: Sequence[ast.stmt], known: set[str]) -> set[str]:
        for statement in body:
            known = self.after(statement, known)
        return known

    def after(self, node: ast.stmt, known: set[str]) -> set[str]:
        """What may be set after a statement."""
        match node:
            case ast.If(test, body, other) | ast.While(test, body, other):
                self.read(test, known)
                return self.block(body, known) | self.block(other, known)
            case ast.For(target, walked, body, other):
                self.read(walked, known)
                return self.block(body, known | _stored(target)) | self.block(other, known)
            case ast.With(items, body):
                for item in items:
                    self.read(item.context_expr, known)
                    known = known | (_stored(item.optional_vars) if item.optional_vars is not None else set())
                return self.block(body, known)
            case ast.Import() | ast.ImportFrom():
                return known | set(_imported(node))
            case ast.FunctionDef(name=name, args=args, decorator_list=around):
                for part in (*around, *args.defaults, *(d for d in args.kw_defaults if d is not None)):
                    self.read(part, known)
                return known | {name}
            case ast.ClassDef(name=name, body=body, bases=bases, decorator_list=around):
                for part in (*around, *bases):
                    self.read(part, known)
                self.block(body, known)
                return known | {name}
            case ast.AnnAssign(target=target, value=value):  # the annotation is not evaluated
                if value is not None:
                    self.read(value, known)
                return known | _stored(target)
            case ast.AugAssign(target=ast.Name(id=name)) if name not in known:
                self.unset.add(name)
        self.read(node, known)
        return known | _stored(node)

    def read(self, node: ast.AST, known: set[str]) -> None:
        names, bound = set[str](), set[str]()
        for part in ast.walk(node):
            match part:
                case ast.Name(id=name, ctx=ast.Load()):
                    names.add(name)
                case ast.comprehension(target=target):
                    bound |= _stored(target)
                case ast.Lambda(args=args):
                    bound |= _parameters(args)
        self.unset |= names - known - bound


def _stored(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
