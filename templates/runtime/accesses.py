"""What a kernel does with its pointers, read off its source: which it stores to, and which it loads before it has stored there.

    accesses(scale_kernel)    # Accesses(written={"y_ptr"}, read_first={"x_ptr"})

Pointers are followed through assignments, arithmetic and the `@triton.jit` functions that the kernel calls. What is loaded is a value,
and points nowhere. Both ways of a branch count, and statements count in the order of the text.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

Roots = frozenset[str] | tuple["Roots", ...]
"""The pointer parameters that a value may point into, or of a tuple those of its items."""

_NOWHERE: frozenset[str] = frozenset()
_LOADS = ("load", "gather", "load_tensor_descriptor")
_STORES = ("store", "scatter", "store_tensor_descriptor")


@dataclass(frozen=True)
class Accesses:
    """Of one kernel, by the names of its parameters."""

    written: frozenset[str]
    """Pointers that it stores to."""
    read_first: frozenset[str]
    """Pointers that it loads from, or adds to, before it stores there."""


def accesses(kernel: Any) -> Accesses:
    """What a `@triton.jit` function reads and writes. Raises OSError where its source cannot be found, which Triton needs too."""
    return _accesses(kernel.fn)


@cache
def _accesses(function: Any) -> Accesses:
    found = _Found([], [])
    names = inspect.signature(function).parameters
    _Body(function, {n: frozenset((n,)) for n in names if n.endswith("_ptr")}, found, ()).run()
    return Accesses(frozenset(found.written), frozenset(found.read_first))


@dataclass
class _Found:
    written: list[str]
    read_first: list[str]

    def read(self, pointers: Roots) -> None:
        self.read_first += [p for p in _flat(pointers) if p not in self.written]

    def write(self, pointers: Roots) -> None:
        self.written += _flat(pointers)


def _flat(roots: Roots) -> frozenset[str]:
    return roots if isinstance(roots, frozenset) else _NOWHERE.union(*map(_flat, roots))


def _either(values: Iterable[Roots]) -> Roots:
    """What one of several values may point into, item by item where all are tuples of one length."""
    every = list(values)
    tuples = [v for v in every if isinstance(v, tuple)]
    if tuples and len(tuples) == len(every) and len({len(t) for t in tuples}) == 1:
        return tuple(_either(items) for items in zip(*tuples))
    return _NOWHERE.union(*map(_flat, every))


class _Body:
    """One function while it is walked through, with what its names point into."""

    def __init__(self, function: Any, names: Mapping[str, Roots], found: _Found, callers: tuple[Any, ...]) -> None:
        self.function, self.names, self.found, self.callers = function, dict(names), found, callers
        self.returned: list[Roots] = []

    def run(self) -> Roots:
        tree = ast.parse(textwrap.dedent(inspect.getsource(self.function))).body[0]
        assert isinstance(tree, ast.FunctionDef)
        self.block(tree.body)
        return _either(self.returned)

    # -------------------------------------------------------------------------------- statements

    def block(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            self.statement(statement)

    def statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Assign(targets=targets, value=value):
                own = self.value(value)
                for target in targets:
                    self.bind(target, own)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self.bind(target, self.value(value))
            case ast.AugAssign(target=target, value=value):
                self.bind(target, _either((self.value(target), self.value(value))))
            case ast.Return(value=ast.expr() as value):
                self.returned.append(self.value(value))
            case ast.If(test=test, body=body, orelse=orelse):
                self.value(test)
                self.branches(body, orelse)
            case ast.For(target=target, iter=iterated, body=body):
                items = self.value(iterated)
                self.bind(target, _flat(items))
                self.loop(body)
            case ast.While(test=test, body=body):
                self.value(test)
                self.loop(body)
            case _:
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.stmt):
                        self.statement(child)
                    elif isinstance(child, ast.expr):
                        self.value(child)

    def branches(self, *bodies: Sequence[ast.stmt]) -> None:
        before, ends = self.names, []
        for body in bodies:
            self.names = dict(before)
            self.block(body)
            ends.append(self.names)
        self.names = {n: _either(e[n] for e in ends if n in e) for n in dict.fromkeys(n for e in ends for n in e)}

    def loop(self, body: Sequence[ast.stmt]) -> None:
        """Until no name points into anything new: a pointer may be set for the next turn."""
        while True:
            before = {n: _flat(v) for n, v in self.names.items()}
            self.branches(body, ())
            if before == {n: _flat(v) for n, v in self.names.items()}:
                return

    def bind(self, target: ast.expr, value: Roots) -> None:
        match target:
            case ast.Name(id=name):
                self.names[name] = value
            case ast.Tuple(elts=items) | ast.List(elts=items):
                fits = isinstance(value, tuple) and len(value) == len(items)
                for place, item in enumerate(items):
                    self.bind(item, value[place] if fits and isinstance(value, tuple) else _flat(value))

    # -------------------------------------------------------------------------------- expressions

    def value(self, node: ast.expr) -> Roots:
        match node:
            case ast.Name(id=name):
                return self.names.get(name, _NOWHERE)
            case ast.Tuple(elts=items) | ast.List(elts=items):
                return tuple(self.value(item) for item in items)
            case ast.Call():
                return self.call(node)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                self.value(test)
                return _either((self.value(body), self.value(orelse)))
            case ast.Subscript(value=value, slice=index):
                own, chosen = self.value(value), index.value if isinstance(index, ast.Constant) else None
                self.value(index)
                inside = isinstance(own, tuple) and isinstance(chosen, int) and -len(own) <= chosen < len(own)
                return own[chosen] if inside and isinstance(own, tuple) and isinstance(chosen, int) else _flat(own)
        inner = [self.value(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        # A comparison is no pointer, and neither is what is known of one: its dtype, say.
        return _NOWHERE if isinstance(node, (ast.Compare, ast.Attribute)) else _NOWHERE.union(*map(_flat, inner))

    def call(self, node: ast.Call) -> Roots:
        function = self.resolved(node.func)
        own = self.value(node.func.value) if function is None and isinstance(node.func, ast.Attribute) else _NOWHERE
        given = [self.value(a.value if isinstance(a, ast.Starred) else a) for a in node.args]
        named = {k.arg or "": self.value(k.value) for k in node.keywords}
        if function is not None and hasattr(function, "fn"):
            return self.inlined(function.fn, given, named)
        word = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(function, "__name__", "")
        # As a function it has the pointer first, as a method of a descriptor the descriptor is what points.
        at = own if _flat(own) else given[0] if given else next(iter(named.values()), _NOWHERE)
        if word in _LOADS or word.startswith("atomic_"):
            self.found.read(at)
        if word in _STORES or word.startswith("atomic_"):
            self.found.write(at)
        if word in (*_LOADS, *_STORES) or word.startswith("atomic_"):
            return _NOWHERE
        return _NOWHERE.union(_flat(own), *map(_flat, given), *map(_flat, named.values()))

    def inlined(self, function: Any, given: Sequence[Roots], named: Mapping[str, Roots]) -> Roots:
        """A call of another `@triton.jit` function, as if its text stood here."""
        if function in self.callers:  # Triton has no recursion
            return _NOWHERE
        names = dict(zip(inspect.signature(function).parameters, given)) | dict(named)
        return _Body(function, names, self.found, (*self.callers, self.function)).run()

    def resolved(self, node: ast.expr) -> Any:
        """What a name stands for outside of the function; None of a local one, or of what is found nowhere."""
        match node:
            case ast.Name(id=name) if name not in self.names:
                cells = dict(zip(self.function.__code__.co_freevars, self.function.__closure__ or ()))
                if name in cells:
                    return cells[name].cell_contents
                return self.function.__globals__.get(name)
            case ast.Attribute(value=value, attr=attr):
                return getattr(self.resolved(value), attr, None)
        return None
