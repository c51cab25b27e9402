"""Stages: one direction of an op cut into kernels, each over one set of kept and one set of reduced axes.

Takes the typed variants of an op and what a direction stores, returns its `Stage`s in the order of their launches. A reduction
over other axes than those below it begins a new stage, which reads what the stage before it stored.

    loss = mean(l, B), l = logsumexp(x, C) - ...   ->  rows along C store l;  one row along B reads it
    dx and dweight of a norm over groups           ->  rows along a group;    rows along everything but a channel
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from codegen.diagnostics import Span
from codegen.ir import Graph, Node, Tensor, spell, walk
from codegen.spec import PACK, Dim, Factor
from codegen.variants import Atom, Value, Variant


class NoStage(Exception):
    """Why no kernel can do what an op asks for."""


@dataclass(frozen=True)
class Store:
    """What a kernel writes: a value and the tensor that takes it."""

    name: str
    """As the kernel's parameter has it: `y`, `rstd`, `dx`."""
    node: Node
    axes: frozenset[str]
    kind: str
    gradient: str = ""
    """The tensor whose gradient it is."""
    partial: bool = False
    """Whether it is added up over the rows: `node` is what is added."""


@dataclass(frozen=True)
class Part:
    """What a stage does in one variant. What earlier stages have stored is read in `graph` like any tensor."""

    variant: Variant
    graph: Graph
    stores: tuple[Store, ...]


@dataclass(frozen=True)
class Stage:
    """One kernel. `nest` is `elements` (every element stands for itself) or `rows`."""

    suffix: str
    nest: str
    parts: tuple[Part, ...]
    reads: tuple[str, ...]
    """In the spec's order, then what was stored before."""
    exacting: frozenset[str]
    """Calls that keep full precision where results are stored in half."""
    kept: frozenset[str] = frozenset()
    reduced: frozenset[str] = frozenset()
    summed: tuple[str, ...] = ()
    """Of elements: tensors whose gradient may be a sum, for they may be broadcast or lack axes."""
    given: tuple[tuple[str, bool], ...] = ()
    """Tensors and cotangents that must be there, or must not, for it to have something to do."""

    @property
    def stored(self) -> tuple[str, ...]:
        """What is written in any variant."""
        return tuple(dict.fromkeys(s.name for p in self.parts for s in p.stores))

    @property
    def partial(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(s.name for p in self.parts for s in p.stores if s.partial))


# ---------------------------------------------------------------------------------------------- passes over a row


def level(node: Node, known: dict[int, int]) -> int:
    """After how many passes over a row the value is known; an element's own, in which pass it can be computed."""
    for part in walk([node]):
        if part.serial not in known:
            top = largest_of(part)
            most = max((known[a.serial] for a in (part if top is None else top).args), default=0)
            known[part.serial] = most + (part.op == "reduce")
    return known[node.serial]


def largest_of(node: Node) -> Node | None:
    """Of `sum(exp(x - max(x, N)), N)`, and of its logarithm, that maximum: one pass knows both, for what was added up before a
    larger x came is scaled down when it comes."""
    if node.op != "reduce" or node.params[0] not in ("sum", "logsumexp"):
        return None
    off = node.args[0]
    if node.params[0] == "sum":
        if off.op != "exp":
            return None
        off = off.args[0]
    top = off.args[1] if off.op == "sub" else node
    alike = top.op == "reduce" and top.params == ("max", node.params[1]) and top.args == off.args[:1]
    return top if alike else None


def depth(part: Part) -> int:
    """How many passes over a row come before the last."""
    levels: dict[int, int] = {}
    return max((level(s.node, levels) for s in part.stores), default=0)


def last_pass(stage: Stage, part: Part) -> int:
    """The pass that stores: the same for all variants if their results have the same axes, so that each is stored in one place."""
    axes: dict[str, set[frozenset[str]]] = {}
    for p in stage.parts:
        for s in p.stores:
            axes.setdefault(s.name, set()).add(s.axes)
    alike = all(len(found) == 1 for found in axes.values())
    return max(depth(p) for p in stage.parts) if alike else depth(part)


def scans(stage: Stage) -> dict[int, list[Node]]:
    """The scans of each pass over a row that has some; all of them go one way, for those that do not are in other stages."""
    out: dict[int, list[Node]] = {}
    for part in stage.parts:
        last, levels = last_pass(stage, part), dict[int, int]()
        depth_of = {n.serial: level(n, levels) for n in walk([s.node for s in part.stores])}
        reductions = [n for n in walk([s.node for s in part.stores]) if n.op == "reduce"]
        for number in range(last + 1):
            roots = [n.args[0] for n in reductions if depth_of[n.serial] == number + 1]
            roots += [s.node for s in part.stores if s.axes & stage.reduced] if number == last else []
            seen = set[int]()
            while roots:
                node = roots.pop()
                if node.serial not in seen and node.axes & stage.reduced:
                    seen.add(node.serial)
                    roots += node.args
                    if node.op == "scan":
                        out.setdefault(number, []).append(node)
    assert all(len({n.params[2] for n in found}) == 1 for found in out.values())
    return out


def shift(node: Node) -> tuple[str, int] | None:
    """The axis and the number of elements by which a read is shifted: `at(x, N=index(N) + 1, fill=0)`."""
    if node.op != "at" or node.args[0].op != "read" or len(node.params[0]) != 1:
        return None
    (axis,), index = node.params[0], node.args[1]
    here = ("index", (axis,))
    if (index.op, index.params) == here:
        return axis, 0
    if index.op not in ("add", "sub"):
        return None
    a, b = index.args
    if (a.op, a.params) == here and b.op == "const":
        return axis, b.params[0] if index.op == "add" else -b.params[0]
    if (b.op, b.params) == here and a.op == "const" and index.op == "add":
        return axis, a.params[0]
    return None


def telling(
    atoms: Iterable[Atom], every: Sequence[Variant], part: Sequence[Variant], what: str
) -> tuple[tuple[Atom, tuple[Value, ...]], ...]:
    """The choices that tell some variants from all, with their values. Whether a tensor is there is known by itself."""
    asked = [a for a in atoms if a.kind not in ("tensor", "cotangent", "number")]
    out = []
    for atom in asked:
        values = tuple(x for x in atom.values if any(v[atom.key] == x for v in part))
        if len(values) < len({v[atom.key] for v in every}):
            out.append((atom, values))
    chosen = {tuple(v[a.key] for a in asked) for v in every if all(v[a.key] in values for a, values in out)}
    if chosen != {tuple(v[a.key] for a in asked) for v in part}:
        raise NoStage(f"{what} is there under choices that no one value of each tells apart")
    return tuple(out)


def settled(stages: Sequence[Stage], every: Sequence[tuple[Variant, Graph]], asked: Sequence[Atom],
            targets: Mapping[Variant, Collection[str]]) -> tuple[Stage, ...]:  # fmt: skip
    """The stages, each with what must be given for it to run.

    What a stage has no part in is kept from it by choices, else by what is given. Where neither tells, the stage runs, and has
    a part that stores nothing.

    Args:
        every: the variants of a direction.
        targets: by variant what the direction is to store in the end.
    """
    choices_first = sorted(asked, key=lambda a: a.kind in ("tensor", "cotangent"))
    out: list[Stage] = []
    runs: list[set[Variant]] = []
    for stage in reversed(stages):
        own = [p.variant for p in stage.parts]
        read = {v: {n for later, vs in zip(out, runs) if v in vs for n in later.reads} for v, _ in every}
        others = [(v, g) for v, g in every if v not in own and {*stage.stored} & ({*targets[v]} | read[v])]
        given = []
        for atom in choices_first:
            values = {v[atom.key] for v in own}
            left = [(v, g) for v, g in others if v[atom.key] in values]
            if atom.kind in ("tensor", "cotangent") and len(left) < len(others):
                given.append((atom.name, True in values))
            others = left
        parts = {p.variant: p for p in stage.parts} | {v: Part(v, g, ()) for v, g in others}
        ordered = tuple(parts[v] for v, _ in every if v in parts)
        out.insert(0, replace(stage, parts=ordered, given=tuple(given)))
        runs.insert(0, set(parts))
    return tuple(out)


@dataclass(frozen=True)
class _Place:
    """Which stage a value belongs to: how many sets of reduced axes lie below it, the last of them, and from which end its scans
    go over a row."""

    level: int = 0
    axes: frozenset[str] | None = None
    reverse: bool | None = None


def stored_tensor(name: str, role: str, node: Node, graph: Graph) -> Tensor:
    """A tensor that the kernels make themselves: dims in the order of the op's axes."""
    span = Span("", 0, 0, 0)
    dims = tuple(
        Dim("pack" if axis.pack or axis.name == PACK else "axis", (Factor(axis.name, axis.fixed, span),), span)
        for axis in graph.axes.values()
        if axis.name in node.axes
    )
    return Tensor(
        name, role, dims, node.kind, "compute" if node.kind == "float" else "i64" if node.kind == "int" else "bool"
    )


def replaced(graph: Graph, known: Mapping[int, Node], tensors: Iterable[Tensor]) -> tuple[Graph, dict[int, Node]]:
    """The graph with other nodes for those in `known`, by serial, and every old node's new one."""
    b = graph.builder
    new = dict(known)
    for node in walk([s.node for s in graph.statements] + graph.roots()):
        if node.serial not in new:
            args = tuple(new[a.serial] for a in node.args)
            new[node.serial] = node if args == node.args else b.node(node.op, args, node.params)
    return replace(graph.mapped(new), tensors={**graph.tensors, **{t.name: t for t in tensors}}), new


# ---------------------------------------------------------------------------------------------- cutting


def places(roots: Iterable[Node], lift: Mapping[frozenset[str], int] | None = None) -> dict[int, _Place]:
    """The place of every node below the roots, by serial. `lift` has the least level of reductions over a set of axes."""
    out: dict[int, _Place] = {}
    rows: dict[int, frozenset[str]] = {}  # the axes of the rows that are reduced at a node's level
    for node in walk(list(roots)):
        below = [out[a.serial] for a in node.args]
        level = max((p.level for p in below), default=0)
        sets = {p.axes for p in below if p.level == level and p.axes is not None}
        ways = {p.reverse for p in below if p.level == level and p.reverse is not None}
        kept = {rows[a.serial] for a, p in zip(node.args, below) if p.level == level and a.serial in rows}
        if node.op in ("reduce", "scan"):
            own = frozenset(node.params[1]) if node.op == "reduce" else frozenset({node.params[1]})
            way = {node.params[2]} if node.op == "scan" else ways
            wider = _wider(node.args[0].axes - own, kept)
            above = max(level + (not (sets <= {own} and ways <= way) or wider), (lift or {}).get(own, 0))
            way = way if node.op == "scan" or above == level else set()
            out[node.serial] = _Place(above, own, next(iter(way), None))
            rows[node.serial] = node.args[0].axes - own
        elif len(sets) > 1 or len(ways) > 1:
            out[node.serial] = _Place(level + 1)
        else:
            out[node.serial] = _Place(level, next(iter(sets), None), next(iter(ways), None))
            if kept:
                rows[node.serial] = frozenset[str]().union(*kept)
    return {serial: _Place(p.level, p.axes, _way(out, p)) for serial, p in out.items()}


def _wider(rows: frozenset[str], below: Collection[frozenset[str]]) -> bool:
    """Whether rows have an axis that none of those has which are reduced before them: what these come to is known once, not
    once for each element of that axis."""
    return bool(below) and not any(rows <= b for b in below)


def _way(known: Mapping[int, _Place], place: _Place) -> bool | None:
    """From which end a stage goes over a row; what has no scan below it is in the first that there is."""
    if place.reverse is not None or place.axes is None:
        return place.reverse
    ways = {p.reverse for p in known.values() if (p.level, p.axes) == (place.level, place.axes)} - {None}
    return min(ways, default=None, key=bool)


@dataclass
class _Cut:
    """One variant's stores by the place of the stage they belong to, and what each stage reads of earlier ones, by serial."""

    variant: Variant
    graph: Graph
    stores: dict[_Place, list[Store]]
    handed: dict[_Place, dict[int, Tensor]]


@dataclass
class _Names:
    """What the values are called that stages hand on: one name a value, whatever variant it is in and however many read it."""

    tensors: Collection[str]
    """The tensors of the op, which have their names already."""
    taken: Collection[str]
    given: dict[tuple[object, ...], str] = field(default_factory=dict)

    def of(self, node: Node, statement: str | None, reader: str) -> str:
        """Of a value that a statement has, that statement's; of another, one made of what reads it first."""
        key = (statement or spell(node), tuple(sorted(node.axes)), node.kind)
        if key not in self.given:
            others = {*self.tensors, *self.given.values()}
            own = statement or f"{reader}_term"
            if own in others or not statement:  # a statement's own name is among those that are taken
                others |= {*self.taken}
            self.given[key] = next(
                n for n in (own, *(f"{own}{k}" for k in range(2, len(others) + 3))) if n not in others
            )
        return self.given[key]


def cut(variants: Sequence[tuple[Variant, Graph, Sequence[Store]]], suffix: str, order: Sequence[str], taken: Collection[str],
        exacting: Collection[str], before: Iterable[Tensor] = ()) -> tuple[tuple[Stage, ...], dict[str, Tensor]]:  # fmt: skip
    """The row stages of a direction, and the tensors that are handed between them.

    Args:
        order: the names of all tensors, as parameters follow one another.
        taken: names that nothing new may have.
        exacting: the spelling of the calls that keep full precision.
        before: what is handed on or kept by names of its own already.
    """
    main = _main(variants)
    lift = _lift(variants, main)
    sums = _sums(variants, main, lift)
    stored = [s.name for _, _, stores in variants for s in stores]  # gradients among them
    names = _Names([*order, *stored], taken, {(t.name, tuple(sorted(t.axes)), t.kind): t.name for t in before})
    cuts = [_assign(v, g, stores, main, lift, sums, names) for v, g, stores in variants]
    stages = sorted(
        {p for c in cuts for p in c.stores},
        key=lambda p: (p.level, p.axes != main.get(p.level), sorted(p.axes or ()), bool(p.reverse)),
    )
    handed = {t.name: t for c in cuts for reads in c.handed.values() for t in reads.values()}
    for name in handed:
        if len({p for c in cuts for p, stores in c.stores.items() if any(s.name == name for s in stores)}) > 1:
            raise NoStage(f"`{name}` is handed on by a stage that depends on choices")
    out: list[Stage] = []
    for place in stages:
        parts, exact = [], set[str]()
        for one in (c for c in cuts if c.stores.get(place)):
            reads = one.handed.get(place, {})
            known = {serial: one.graph.builder.read(t) for serial, t in reads.items()}
            graph, new = replaced(one.graph, known, reads.values())
            own = one.stores[place]
            exact |= {spell(new[n.serial]) for n in walk([s.node for s in own]) if spell(n) in exacting}
            parts.append(Part(one.variant, graph, tuple(replace(s, node=new[s.node.serial]) for s in own)))
        name = suffix if not out else unlike(f"{suffix}_{parts[0].stores[0].name}", [s.suffix for s in out])
        out.append(_stage(name, place, parts, [*order, *handed], exact))
    return tuple(out), handed


def _stage(suffix: str, place: _Place, parts: Sequence[Part], order: Sequence[str], exacting: Collection[str]) -> Stage:
    reduced = place.axes if place.axes is not None else _free_axes(parts)
    kept = frozenset[str]().union(*(_below(p) for p in parts)) - reduced
    reads = {n.params[0] for p in parts for n in walk([s.node for s in p.stores]) if n.op in ("read", "largest")}
    return Stage(
        suffix, "rows", tuple(parts), tuple(n for n in order if n in reads), frozenset(exacting), kept, reduced
    )


def _plain(store: Store) -> bool:
    """Whether a store is more than a sum over what its tensor lacks."""
    return not (store.gradient and store.node.op == "reduce" and store.node.params[0] == "sum")


def _main(variants: Sequence[tuple[Variant, Graph, Sequence[Store]]]) -> dict[int, frozenset[str]]:
    """The axes that values of each level are reduced over first: if it can be, those of what is not the sum of a gradient."""
    out: dict[int, frozenset[str]] = {}
    every = [s for _, _, stores in variants for s in stores]
    for store in sorted(every, key=lambda s: not _plain(s)):
        for place in places([store.node]).values():
            if place.axes is not None:
                out.setdefault(place.level, place.axes)
    return out


def _lift(
    variants: Sequence[tuple[Variant, Graph, Sequence[Store]]], main: Mapping[int, frozenset[str]]
) -> dict[frozenset[str], int]:
    """The last level that a set of axes is reduced at: what could be reduced over it before waits, and shares a kernel."""
    found = [p for _, _, stores in variants for p in places(s.node for s in stores).values() if p.axes is not None]
    return {
        p.axes: max(q.level for q in found if q.axes == p.axes)
        for p in found
        if p.axes is not None and p.axes != main.get(0)
    }


def _sums(
    variants: Sequence[tuple[Variant, Graph, Sequence[Store]]],
    main: Mapping[int, frozenset[str]],
    lift: Mapping[frozenset[str], int],
) -> dict[str, _Place]:
    """What is added up over the rows, with its stage: in every variant, unless it is a constant there."""
    out, others = dict[str, _Place](), set[str]()
    for _, _, stores in variants:
        known = places((s.node for s in stores), lift)
        for place, store in (_home(s, known, main) for s in stores):
            if store.partial:
                out[store.name] = place
            elif store.node.op != "const":
                others.add(store.name)
    return {name: place for name, place in out.items() if name not in others}


def _assign(variant: Variant, graph: Graph, stores: Sequence[Store], main: Mapping[int, frozenset[str]],
            lift: Mapping[frozenset[str], int], sums: Mapping[str, _Place], names: _Names) -> _Cut:  # fmt: skip
    """Each store in its stage; what a stage reads of an earlier one is stored there."""
    known = places((s.node for s in stores), lift)
    out: dict[_Place, list[Store]] = {}
    for store in stores:
        if store.name in sums and store.node.op == "const":
            place, store = sums[store.name], replace(store, partial=True)
        else:
            place, store = _home(store, known, main, store.name in sums)
        out.setdefault(place, []).append(store)
    bound = {s.node.serial: s.name for s in reversed(graph.statements)}
    handed: dict[_Place, dict[int, Tensor]] = {}

    def later(place: _Place) -> tuple[int, bool]:
        return -place.level, not place.reverse

    pending = sorted(out, key=later)
    while pending:
        place = pending.pop(0)
        for store in out[place]:
            for node in _frontier(store.node, place, known):
                name = names.of(node, bound.get(node.serial), store.name)
                handed.setdefault(place, {})[node.serial] = stored_tensor(name, "scratch", node, graph)
                home = known[node.serial]
                if home not in out:
                    pending = sorted([*pending, home], key=later)
                if all(s.name != name for s in out.setdefault(home, [])):
                    out[home].append(Store(name, node, node.axes, node.kind))
    return _Cut(variant, graph, out, handed)


def _home(
    store: Store, known: Mapping[int, _Place], main: Mapping[int, frozenset[str]], summed: bool = True
) -> tuple[_Place, Store]:
    """The stage of a store; what is a sum over the rows of a stage is added up there if it may be `summed`."""
    place = known[store.node.serial]
    if summed and not _plain(store):
        inner, axes = known[store.node.args[0].serial], frozenset(store.node.params[1])
        along = inner.axes if inner.axes is not None else main.get(inner.level)
        if along is not None and along == store.axes and not axes & along:
            own = _Place(inner.level, along, inner.reverse)
            return replace(own, reverse=_way(known, own)), replace(store, node=store.node.args[0], partial=True)
    if place.axes is None:
        place = _Place(place.level, main.get(place.level))
        place = replace(place, reverse=_way(known, place))
    return place, store


def unlike(name: str, others: Iterable[str]) -> str:
    """The name, with as many `_` behind it as make it none of the others."""
    taken = set(others)
    while name in taken:
        name += "_"
    return name


def _frontier(root: Node, place: _Place, known: Mapping[int, _Place]) -> Iterable[Node]:
    """The values below a store that an earlier stage has: the largest ones that are one value a row there."""
    seen, pending = set[int](), [root]
    while pending:
        node = pending.pop()
        if node.serial in seen:
            continue
        seen.add(node.serial)
        own = known[node.serial]
        earlier = own.axes is not None and (
            own.level < place.level or (own.axes, own.reverse) != (place.axes, place.reverse)
        )
        if earlier and own.axes is not None and not node.axes & own.axes and node is not root:
            yield node
        elif earlier and node.op == "scan" and node is not root:  # it has elements there, and is stored as a whole
            yield node
        elif earlier and node.op == "reduce" and node is not root:
            raise NoStage(
                f"a reduction over ({', '.join(sorted(node.params[1]))}) keeps axes that its own operand reduces"
            )
        else:
            pending += node.args


def _below(part: Part) -> frozenset[str]:
    """The axes of everything that a part computes; of a tensor that is only indexed, without those that it is indexed along."""
    axes = frozenset[str]().union(*(s.axes for s in part.stores))
    seen, pending = set[int](), [s.node for s in part.stores]
    while pending:
        node = pending.pop()
        if node.serial in seen:
            continue
        seen.add(node.serial)
        axes |= node.axes
        picked = node.op == "at" and node.args[0].op == "read"
        pending += node.args[1:] if picked else node.args
    return axes


def _free_axes(parts: Sequence[Part]) -> frozenset[str]:
    """Where nothing is reduced: the axes that most tensors lack, so that these have one value a row."""
    whole = frozenset[str]().union(*(_below(p) for p in parts))
    lacking = [whole - n.axes for p in parts for n in walk([s.node for s in p.stores]) if n.op == "read" and n.axes]
    found = [a for a in lacking if a and a != whole]
    return max(found, key=lambda a: (found.count(a), len(a))) if found else whole
