"""What `pullback fuse` does: a recorded graph becomes fused ops in the user's specs.

Takes the JSON of a graph and the specs, returns for each group of nodes the fused op that is there or could be, proved by the
same stages as any op.

    find(graph, specs)  -> Found(groups=(Group(nodes=("add_1", "relu_1"), op="add_relu", text="- op: add_relu\\n..."),))
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from codegen import groups
from codegen.compose import Composition, compose, op_name
from codegen.diagnostics import Report, Span, guarded
from codegen.fused import NotFused, computed, member, pattern
from codegen.groups import Graph, GraphFault, Member, Node, Pattern
from codegen.loader import load_text
from codegen.pipeline import Tick, quiet, verify_ops
from codegen.schedule import schedule
from codegen.spec import OpSpec, Text

_TRIES = 64
"""Parts of a group that are tried, where the whole cannot be one op."""
HEAD = "# Ops composed by `pullback fuse`: each stands for the steps under `fuses`. They are yours to edit.\n"


@dataclass(frozen=True)
class Group:
    """Nodes that one op can stand for."""

    nodes: tuple[str, ...]
    op: str = ""
    """The op that stands for them; empty where there can be none."""
    text: str = ""
    """Its spec, where it is new."""
    reason: str = ""
    """Why the nodes are no one op."""


# ---------------------------------------------------------------------------------------------- the graph's file


def read(path: Path, shown: str, report: Report) -> Graph | None:
    """The graph of a JSON file; None after a fault, which is in the report."""
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        report.error(Span(shown, 1, 1), "unreadable", f"cannot be read: {error.strerror}")
        return None
    except UnicodeDecodeError as error:
        report.error(Span(shown, 1, 1), "not-utf8", f"byte {error.start} is not UTF-8")
        return None
    report.add_source(shown, text)
    try:
        return groups.read(json.loads(text, object_pairs_hook=_once))
    except json.JSONDecodeError as error:
        report.error(Span(shown, error.lineno, error.colno), "not-json", f"not JSON: {error.msg}")
    except GraphFault as fault:
        line, col = _place(text, fault.near)
        report.error(Span(shown, line, col), "bad-graph", str(fault), "docs/fusion.md says what a graph is")
    except (RecursionError, ValueError) as error:
        report.error(Span(shown, 1, 1), "not-json", f"not JSON: {str(error).partition(';')[0]}")
    return None


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise GraphFault("", f"the key `{key}` is written twice", key)
        found[key] = value
    return found


def _place(text: str, near: str) -> tuple[int, int]:
    """Line and column where a name first stands, else the beginning."""
    at = text.find(json.dumps(near)) if near else -1
    return (text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)) if at >= 0 else (1, 1)


# ---------------------------------------------------------------------------------------------- groups and their ops


def find(graph: Graph, specs: Sequence[OpSpec], file: str, tick: Tick = quiet) -> tuple[Group, ...]:
    """The groups of a graph, each with its op or the reason why it has none.

    Args:
        file: the path under which new ops are loaded and verified.
    """
    return _Finder(graph, specs, file, tick).find()


@dataclass
class _Finder:
    graph: Graph
    specs: Sequence[OpSpec]
    file: str
    tick: Tick
    known: dict[str, OpSpec] = field(default_factory=dict)
    patterns: list[Pattern] = field(default_factory=list)
    proofs: dict[str, str] = field(default_factory=dict)
    """Why a composition was refused, by its text."""

    def __post_init__(self) -> None:
        self.known = {op.name: op for op in self.specs}
        self.patterns = [pattern(op) for op in self.specs if op.fuses]
        every = ((k, self._member(node)) for k, node in enumerate(self.graph.nodes))
        self.members = {k: m for k, m in every if m is not None}

    def find(self) -> tuple[Group, ...]:
        found: list[Group] = []
        whole = self._groups(self.members)
        for done, nodes in enumerate(whole):
            self.tick("composing", done, len(whole))
            found += self._settled(nodes)
        return tuple(found)

    def _member(self, node: Node) -> Member | None:
        op = self.known.get(node.op)
        if (
            op is None
            or op.update is not None
            or [o.name for o in op.outputs] != list(node.outputs)
            or len(op.outputs) != 1
        ):
            return None
        usual = {
            a.name: a.default.value if isinstance(a.default, Text) else computed(a.default)
            for a in op.attrs if a.default is not None
        }  # fmt: skip
        return member(op, {**usual, **node.attrs})

    def _groups(self, members: Mapping[int, Member]) -> tuple[tuple[int, ...], ...]:
        places = {node.name: k for k, node in enumerate(self.graph.nodes)}
        return groups.groups(self.graph, lambda node: members.get(places[node.name]))

    def _settled(self, nodes: tuple[int, ...]) -> Iterator[Group]:
        """The group's op; where it cannot be one, that of its largest part, and of what is left beside."""
        reason = ""
        for part in _parts(self.graph, self.members, nodes):
            found = self._op(part)
            if not found.reason:
                if reason:
                    yield Group(self._named(nodes), reason=reason)
                yield found
                rest = {k: self.members[k] for k in nodes if k not in part}
                for left in self._groups(rest):
                    yield from self._settled(left)
                return
            reason = reason or found.reason
        yield Group(self._named(nodes), reason=reason)

    def _op(self, nodes: tuple[int, ...]) -> Group:
        """The op that stands for exactly these nodes, or why there is none."""
        named = self._named(nodes)
        there = self._there(nodes, self.patterns)
        if there:
            return Group(named, there)
        reason = ""
        for derived, kept in ((False, False), (True, False), (False, True)):
            try:
                made = compose(self.graph, nodes, self.known, self.members, derived, kept)
            except NotFused as fault:
                reason = reason or str(fault)
                continue
            if made.body not in self.proofs:
                op, self.proofs[made.body] = self._proved(made, nodes)
                if op is not None:
                    self.known[op.name] = op
                    self.patterns.append(pattern(op))
                    return Group(named, op.name, made.text(op.name))
            reason = reason or self.proofs[made.body]
        return Group(named, reason=reason)

    def _there(self, nodes: tuple[int, ...], patterns: Iterable[Pattern]) -> str:
        for one in sorted(patterns, key=lambda p: (len(p.outputs), p.op)):
            if len(one.steps) == len(nodes) and any(
                o.nodes == nodes for o in groups.places(self.graph, one, self._member, nodes)
            ):
                return one.op
        return ""

    def _proved(self, made: Composition, nodes: tuple[int, ...]) -> tuple[OpSpec | None, str]:
        """The composed op as every stage takes it, or why one does not."""
        name = op_name(made.words, self.known)
        self.tick(f"verifying {name}", 0, 1)
        report = Report()
        ops = load_text(made.text(name), report, self.file)
        verdicts = verify_ops(ops, report, known=tuple(self.known.values())) if not report.errors else {}
        for verdict in verdicts.values():
            if not report.errors:
                with guarded(verdict.op, "scheduling", report):
                    schedule(verdict, report)
        if report.errors:
            return None, report.ordered()[0].text
        if not self._there(nodes, [pattern(ops[0])]):
            return None, f"`{name}` is not found again where it came from"
        return ops[0], ""

    def _named(self, nodes: Sequence[int]) -> tuple[str, ...]:
        return groups.recorded(self.graph, nodes)


def _parts(graph: Graph, members: Mapping[int, Member], nodes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The group itself, then parts of it that are groups too, the largest first."""
    waiting = [(-len(nodes), nodes)]
    seen = {nodes}
    for _ in range(_TRIES):
        if not waiting:
            return
        part = heapq.heappop(waiting)[1]
        yield part
        for k in part:
            for smaller in _connected(graph, [n for n in part if n != k]):
                block = [smaller[0] if n in smaller else n for n in range(len(graph.nodes))] if len(smaller) > 1 else []
                if (
                    block
                    and smaller not in seen
                    and groups.is_group(graph, members, smaller)
                    and groups.in_order(graph, block)
                ):
                    seen.add(smaller)
                    heapq.heappush(waiting, (-len(smaller), smaller))


def _connected(graph: Graph, nodes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The pieces into which nodes fall by what they hand on."""
    left = set(nodes)
    while left:
        piece, pending = set[int](), [min(left)]
        while pending:
            k = pending.pop()
            if k not in left:
                continue
            left.discard(k)
            piece.add(k)
            pending += [r for t in graph.nodes[k].outputs.values() for r in graph.readers[t]]
            pending += [
                graph.makers[t] for t in graph.nodes[k].inputs.values() if isinstance(t, str) and t in graph.makers
            ]
        yield tuple(sorted(piece))
