"""Groups of a recorded graph's nodes that one kernel can do, and the places of a graph where a fused op stands for its steps.

Takes a graph as it is recorded (a mapping, or the JSON of one) and what is known of its ops, returns groups of nodes and
occurrences of patterns. Pure functions, nothing but the standard library: the generator composes ops by them, and the
emitted runtime, into which this file is copied as it is, finds the same places again.

    read({"format": "pullback-graph 1", ...})   -> Graph
    groups(graph, member)                       -> ((3, 4, 7), ...): nodes by their place
    occurrences(graph, patterns)                -> (Occurrence(nodes=(3, 4), ...), ...)
"""

from __future__ import annotations

import heapq
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

FORMAT = "pullback-graph 1"
PACK = "..."
DTYPES = ("f16", "bf16", "f32", "f64", "i32", "i64", "bool")
FLOATS = DTYPES[:4]
STOP = "stop_gradient"
"""The node that gives its operand `x` as it is, without a gradient."""
VIEWS = ("reshape", "permute", STOP)
"""Nodes whose result may be the memory of their operand."""

Extent = int | str
Shape = tuple[Extent, ...]
Operand = str | int | float | None
"""The name of a tensor, a number in its place, or None where it is absent."""
_MISSING = object()

# ---------------------------------------------------------------------------------------------- the graph


class GraphFault(Exception):
    """What is wrong with a graph, and where: `nodes[2].inputs.x`. `near` is a name that stands there."""

    def __init__(self, where: str, text: str, near: str = "") -> None:
        super().__init__(f"{where}: {text}" if where else text)
        self.where, self.text, self.near = where, text, near


@dataclass(frozen=True)
class Value:
    """A tensor. Each extent is a number, or the name of a size that is not yet known."""

    name: str
    dtype: str
    shape: Shape
    role: str = "node"
    """`input` or `param` of one that is given, `node` of one that a node makes."""


@dataclass(frozen=True)
class Node:
    name: str
    op: str
    attrs: Mapping[str, Any]
    inputs: Mapping[str, Operand]
    outputs: Mapping[str, str]
    """The op's output, and the tensor that it makes."""
    updates: tuple[str, ...] = ()
    """The arguments whose tensors it changes in place."""
    at: int = 0
    """Where it stood as it was recorded."""


@dataclass(frozen=True)
class Graph:
    """Nodes in an order in which they can run. A node is known by its place in `nodes`."""

    tensors: Mapping[str, Value]
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]
    stopped: frozenset[str]
    """Floats through which no gradient goes."""
    stops: Mapping[str, tuple[Node, ...]] = field(default_factory=dict)
    """By tensor, the nodes that stop its gradient and are not among `nodes`: what makes the tensor stands for them too."""
    updated: Mapping[str, Mapping[int, bool]] = field(default_factory=dict)
    """By tensor that is changed in place: the nodes that use its memory, and whether they change it."""
    makers: Mapping[str, int] = field(default_factory=dict)
    readers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def unstopped(self, tensor: str) -> str:
        """The tensor of the same value before its gradient is stopped by nodes."""
        return str(self.stops[tensor][0].inputs["x"]) if tensor in self.stops else tensor


def read(data: object) -> Graph:
    """The graph that a mapping describes.

    Raises:
        GraphFault: on anything that the format does not have, naming the place.
    """
    top = _record(data, "", ("format", "tensors", "nodes", "outputs", "stop_gradient"))
    if top["format"] != FORMAT:
        raise GraphFault("format", f"it is {_shown(top['format'])}, not `{FORMAT}`")
    tensors: dict[str, Value] = {}
    for name, value in _mapping(top["tensors"], "tensors").items():
        fields = _record(value, f"tensors.{name}", ("role", "dtype", "shape"), name)
        role = {"input": "input", "buffer": "input", "param": "param"}.get(str(fields["role"]))
        if role is None:
            raise GraphFault(
                f"tensors.{name}.role", f"{_shown(fields['role'])} is none of `input`, `buffer`, `param`", name
            )
        tensors[name] = _value(name, fields, f"tensors.{name}", role)
    recorded: list[Node] = []
    for place, item in enumerate(_list(top["nodes"], "nodes")):
        recorded.append(_node(item, place, tensors, {n.name for n in recorded}))
    outputs, marked = (_names(top[key], key, tensors) for key in ("outputs", "stop_gradient"))
    nodes, stops = _folded(recorded, tensors, outputs)
    stopped = frozenset(t for t in (*marked, *stops) if tensors[t].dtype in FLOATS)
    makers = {t: place for place, node in enumerate(nodes) for t in node.outputs.values()}
    readers: dict[str, list[int]] = {name: [] for name in tensors}
    for place, node in enumerate(nodes):
        for tensor in _read_by(node):
            readers[tensor].append(place)
    found = {n: tuple(r) for n, r in readers.items()}
    return Graph(tensors, nodes, outputs, stopped, stops, _updated(nodes), makers, found)


def _read_by(node: Node) -> tuple[str, ...]:
    """The tensors that a node reads, each once."""
    return tuple(dict.fromkeys(t for t in node.inputs.values() if isinstance(t, str)))


def _folded(
    recorded: Sequence[Node], tensors: Mapping[str, Value], outputs: Sequence[str]
) -> tuple[tuple[Node, ...], dict[str, tuple[Node, ...]]]:
    """The nodes without those that only stop the gradient of what nothing else reads, and these by the tensor that they give.

    Others that stop a gradient stay, as nodes of an op that no group has: a chain ends there.
    """
    readers = Counter(t for node in recorded for t in _read_by(node))
    nodes: list[Node] = []
    makers: dict[str, int] = {}
    stops: dict[str, tuple[Node, ...]] = {}
    for node in recorded:
        before, after = node.inputs.get("x"), next(iter(node.outputs.values()), "")
        alone = node.op == STOP and len(node.inputs) == len(node.outputs) == 1 and not node.attrs
        if (
            alone and isinstance(before, str) and before in makers and readers[before] == 1 and before not in outputs
            and replace(tensors[after], name=before) == tensors[before]
        ):  # fmt: skip
            k = makers[after] = makers[before]
            given = {n: after if t == before else t for n, t in nodes[k].outputs.items()}
            nodes[k] = replace(nodes[k], outputs=given)
            stops[after] = (*stops.pop(before, ()), node)
        else:
            makers |= dict.fromkeys(node.outputs.values(), len(nodes))
            nodes.append(node)
    return tuple(nodes), stops


def _updated(nodes: Sequence[Node]) -> dict[str, dict[int, bool]]:
    """By tensor that a node changes in place: the nodes that use its memory, in order, and whether they change it."""
    memory: dict[str, str] = {}
    uses: dict[str, dict[int, bool]] = {}
    for k, node in enumerate(nodes):
        changed = {memory.get(t, t) for n in node.updates if isinstance(t := node.inputs[n], str)}
        for tensor in _read_by(node):
            root = memory.get(tensor, tensor)
            uses.setdefault(root, {})[k] = root in changed
            memory |= dict.fromkeys(node.outputs.values(), root) if node.op in VIEWS else {}
    return {t: by for t, by in uses.items() if any(by.values())}


def _node(item: object, at: int, tensors: dict[str, Value], taken: set[str]) -> Node:
    """One node; the tensors that it makes are added."""
    where = f"nodes[{at}]"
    fields = _record(item, where, ("name", "op", "attrs", "inputs", "outputs"), optional=("updates",))
    name, op = (_text(fields[key], f"{where}.{key}") for key in ("name", "op"))
    if name in taken:
        raise GraphFault(f"{where}.name", f"two nodes are called `{name}`", name)
    attrs = {k: _attr(v, f"{where}.attrs.{k}", name) for k, v in _mapping(fields["attrs"], f"{where}.attrs").items()}
    inputs = _operands(fields["inputs"], f"{where}.inputs", name, tensors)
    outputs: dict[str, str] = {}
    for key, value in _mapping(fields["outputs"], f"{where}.outputs").items():
        place = f"{where}.outputs.{key}"
        made = _record(value, place, ("name", "dtype", "shape"), name)
        tensor = _text(made["name"], f"{place}.name", name)
        if tensor in tensors:
            raise GraphFault(f"{place}.name", f"two tensors are called `{tensor}`", name)
        tensors[tensor] = _value(tensor, made, place, "node")
        outputs[key] = tensor
    updates = _updates(fields.get("updates", ()), f"{where}.updates", name, inputs)
    return Node(name, op, attrs, inputs, outputs, updates, at)


def _operands(value: object, where: str, near: str, tensors: Mapping[str, Value]) -> dict[str, Operand]:
    """What a node is given, by its op's arguments."""
    found: dict[str, Operand] = {}
    for key, operand in _mapping(value, where).items():
        place = f"{where}.{key}"
        if isinstance(operand, bool) or not (operand is None or isinstance(operand, (str, int, float))):
            raise GraphFault(place, f"{_shown(operand)} is neither a tensor's name, nor a number, nor null", near)
        _check_whole(operand, place, near)
        if isinstance(operand, str) and operand not in tensors:
            raise GraphFault(place, f"`{operand}` is neither given nor made by a node before this one", near)
        found[key] = operand
    return found


def _updates(value: object, where: str, near: str, inputs: Mapping[str, Operand]) -> tuple[str, ...]:
    """The arguments that a node changes in place; of one that is absent there is nothing to change."""
    found = tuple(_text(v, where, near) for v in _list(value, where))
    for key in found:
        if key not in inputs:
            raise GraphFault(where, f"`{key}` is no input of the node", near)
        if isinstance(inputs[key], (int, float)):
            raise GraphFault(where, f"`{key}` is a number, which is not updated", near)
    return found


def _value(name: str, fields: Mapping[str, object], where: str, role: str) -> Value:
    dtype = fields["dtype"]
    if dtype not in DTYPES:
        raise GraphFault(f"{where}.dtype", f"{_shown(dtype)} is no dtype; dtypes: {', '.join(DTYPES)}", name)
    shape: list[Extent] = []
    for extent in _list(fields["shape"], f"{where}.shape"):
        number = isinstance(extent, int) and not isinstance(extent, bool) and extent >= 0
        if not isinstance(extent, (int, str)) or not (number or (isinstance(extent, str) and extent)):
            raise GraphFault(f"{where}.shape", f"{_shown(extent)} is neither an extent nor the name of a size", name)
        shape.append(extent)
    return Value(name, str(dtype), tuple(shape), role)


def _attr(value: object, where: str, near: str) -> Any:
    if isinstance(value, (list, tuple)):
        items = tuple(_attr(v, where, near) for v in value)
        if not any(v is None or isinstance(v, tuple) for v in items):
            return items
    elif value is None or isinstance(value, (bool, int, float, str)):
        _check_whole(value, where, near)
        return value
    raise GraphFault(where, f"{_shown(value)} is no value of an attr", near)


def _check_whole(value: object, where: str, near: str) -> None:
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise GraphFault(where, "the number is beyond the range of int64", near)


def _record(
    value: object, where: str, keys: Sequence[str], near: str = "", optional: Sequence[str] = ()
) -> Mapping[str, object]:
    """A mapping of exactly these keys, and of the optional ones."""
    found = _mapping(value, where, near)
    for key in found:
        if key not in (*keys, *optional):
            raise GraphFault(where, f"`{key}` is not a key here; keys: {', '.join((*keys, *optional))}", near or key)
    for key in keys:
        if key not in found:
            raise GraphFault(where, f"`{key}` is missing", near)
    return found


def _mapping(value: object, where: str, near: str = "") -> Mapping[str, object]:
    if not isinstance(value, Mapping) or not all(isinstance(k, str) for k in value):
        raise GraphFault(where, f"{_shown(value)} is no object", near)
    return value


def _list(value: object, where: str) -> Sequence[object]:
    if not isinstance(value, (list, tuple)):
        raise GraphFault(where, f"{_shown(value)} is no list")
    return value


def _text(value: object, where: str, near: str = "") -> str:
    if not isinstance(value, str) or not value:
        raise GraphFault(where, f"{_shown(value)} is no name", near)
    return value


def _names(value: object, where: str, tensors: Mapping[str, Value]) -> tuple[str, ...]:
    names = tuple(_text(v, where) for v in _list(value, where))
    for name in names:
        if name not in tensors:
            raise GraphFault(where, f"there is no tensor `{name}`", name)
    return names


def _shown(value: object) -> str:
    """A value as a message shows it: a text in quotes, a container by its kind."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, (list, tuple)):
        return "a list"
    if isinstance(value, str):
        return f"`{value:.40}`"
    return "null" if value is None else repr(value).lower()


# ---------------------------------------------------------------------------------------------- what is known of an op


@dataclass(frozen=True)
class Argument:
    """A tensor of an op: its dims as words (`...`, `N`, `N...`), and what may be given for it."""

    name: str
    dims: tuple[str, ...]
    dtypes: tuple[str, ...]
    role: str = "input"
    broadcast: bool = False
    optional: bool = False
    scalar: bool = False

    @property
    def labels(self) -> frozenset[str]:
        return frozenset(map(label, self.dims))


@dataclass(frozen=True)
class Member:
    """What an op with its attrs is to a group."""

    arguments: tuple[Argument, ...]
    outputs: tuple[Argument, ...]
    axis: str = ""
    """The axis or pack that an attr places."""
    at: int | tuple[int, ...] | None = None
    """Where; None: every axis."""
    keeps: bool = False
    """Whether an extent of 1 stays where that axis was."""
    ranks: Mapping[str, int] = field(default_factory=dict)
    """How many axes a pack has, where an attr tells."""

    @property
    def plain(self) -> bool:
        """Whether every tensor is `...`, broadcast by NumPy's rules: it works over any axes."""
        return all(t.dims == (PACK,) for t in (*self.arguments, *self.outputs))

    @property
    def tensors(self) -> tuple[Argument, ...]:
        return (*self.arguments, *self.outputs)


def words(dims: str) -> tuple[str, ...] | None:
    """The words of dims in the spec's spelling; None where one is a group of factors or has a fixed extent."""
    found = tuple(w.strip() for w in dims.split(",") if w.strip())
    return found if all(re.fullmatch(r"\.\.\.|[A-Za-z]\w*(\.\.\.)?", w) for w in found) else None


def argument(
    name: str, dims: str, dtypes: tuple[str, ...], role: str, broadcast: bool, optional: bool, scalar: bool
) -> Argument | None:
    """A tensor as its op declares it; None where it has dims that no group has."""
    found = words(dims)
    return None if found is None else Argument(name, found, dtypes, role, broadcast, optional, scalar)


Placed = tuple[str, int | tuple[int, ...] | None, bool]
"""The axis or pack that an attr places, where (None: everywhere), and whether an extent of 1 stays where it was."""


def declared(
    arguments: Iterable[Argument | None],
    outputs: Iterable[Argument | None],
    placed: Placed | None,
    extents: Mapping[str, object],
) -> Member | None:
    """An op by its declaration; None where one of its tensors can be in no group.

    Args:
        extents: the attr that gives the extents of an axis or pack, by its name: a number, a tuple, or None where it does not.
    """
    taken, given = tuple(arguments), tuple(outputs)
    known = [a for a in (*taken, *given) if a is not None]
    if len(known) < len(taken) + len(given):
        return None
    ranks = {a: len(v) if isinstance(v, tuple) else 1 for a, v in extents.items() if v is not None}
    return Member(tuple(known[: len(taken)]), tuple(known[len(taken) :]), *(placed or ("", None, False)), ranks)


def label(word: str) -> str:
    """The axis or pack of a word."""
    return word if word == PACK else word.removesuffix(PACK)


Space = tuple[tuple[str, Extent], ...]
"""The dims of the largest tensor, each with the axis or pack that it belongs to."""


def space(member: Member, shapes: Mapping[str, Shape]) -> Space | None:
    """What the shapes say of the member's axes; None where they contradict its dims."""
    present = [t for t in member.tensors if t.name in shapes]
    if not present:
        return None
    whole = max(present, key=lambda t: len(t.dims))
    shape = shapes[whole.name]
    if member.axis and whole.labels == {PACK, member.axis}:
        return _placed(member, shape)
    ranks = {w: 1 for w in whole.dims if not w.endswith(PACK)}
    packs = [w for w in whole.dims if w.endswith(PACK)]
    known = {t.dims[0]: len(shapes[t.name]) for t in present if len(t.dims) == 1 and t.dims != (PACK,)}
    for pack in packs:
        told = member.ranks.get(label(pack), known.get(pack))
        if told is not None:
            ranks[pack] = told
    free = [p for p in packs if p not in ranks]
    rest = len(shape) - sum(ranks.values())
    if len(free) > 1 or rest < 0 or (rest and not free):
        return None
    ranks |= dict.fromkeys(free, rest)
    names = [label(w) for w in whole.dims for _ in range(ranks[w])]
    return tuple(zip(names, shape, strict=True))


def _placed(member: Member, shape: Shape) -> Space | None:
    """The axes where an attr places one of them."""
    every = tuple(range(len(shape)))
    at = every if member.at is None else member.at if isinstance(member.at, tuple) else (member.at,)
    if any(not isinstance(k, int) or not -len(shape) <= k < len(shape) for k in at):
        return None
    inside = {k % len(shape) for k in at}
    return tuple((member.axis if k in inside else PACK, n) for k, n in enumerate(shape))


def expected(labels: frozenset[str], where: Space, kept: str = "") -> Shape:
    """The shape of a tensor that has these axes; `kept` names the one that leaves an extent of 1."""
    return tuple(n if a in labels else 1 for a, n in where if a in labels or a == kept)


def fits(member: Member, shapes: Mapping[str, Shape]) -> bool:
    """Whether tensors of these shapes can be given to the op, and come out of it."""
    if member.plain:
        made = broadcast([shapes[t.name] for t in member.arguments if t.name in shapes])
        return made is not None and all(shapes[t.name] == made for t in member.outputs if t.name in shapes)
    where = space(member, shapes)
    if where is None:
        return False
    results = {t.name for t in member.outputs}
    for tensor in member.tensors:
        shape = shapes.get(tensor.name)
        if shape is None:
            continue
        wanted = expected(tensor.labels, where, member.axis if member.keeps and tensor.name in results else "")
        stretched = tensor.broadcast and tensor.name not in results
        if shape != wanted and not (stretched and broadcast([shape, wanted]) == wanted):
            return False
    return True


def broadcast(shapes: Iterable[Shape]) -> Shape | None:
    """The shape that NumPy's rules give; None where extents differ, or may."""
    out: list[Extent] = []
    for shape in shapes:
        aligned = [1] * (len(shape) - len(out)) + out
        for k in range(1, len(shape) + 1):
            if aligned[-k] == 1:
                aligned[-k] = shape[-k]
            elif shape[-k] not in (1, aligned[-k]):
                return None
        out = aligned
    return tuple(out)


# ---------------------------------------------------------------------------------------------- groups

Knows = Callable[[Node], Member | None]
"""What is known of a node's op: None where it cannot be in a group."""


def groups(graph: Graph, member: Knows) -> tuple[tuple[int, ...], ...]:
    """The largest groups of two nodes or more, each by the places of its nodes, in the order of the graph.

    Neighbours are joined as long as one kernel can do them: a group works over one set of axes, has at most one op that is
    not plain, and what it needs is known before it begins. No node is in two.
    """
    known = {k: m for k, node in enumerate(graph.nodes) if (m := member(node)) is not None}
    block = list(range(len(graph.nodes)))
    for _ in graph.nodes:
        before = list(block)
        for tensor, first in graph.makers.items():
            for second in graph.readers[tensor]:
                if first in known and second in known and block[first] != block[second]:
                    _join(graph, known, block, block[first], block[second])
        if block == before:
            break
    found: dict[int, list[int]] = {}
    for k, b in enumerate(block):
        found.setdefault(b, []).append(k)
    return tuple(tuple(nodes) for nodes in found.values() if len(nodes) > 1)


def _join(graph: Graph, known: Mapping[int, Member], block: list[int], one: int, other: int) -> None:
    low, high = min(one, other), max(one, other)
    joined = [low if b == high else b for b in block]
    nodes = tuple(k for k, b in enumerate(joined) if b == low)
    if not any(k not in known for k in nodes) and is_group(graph, known, nodes) and in_order(graph, joined):
        block[:] = joined


def is_group(graph: Graph, known: Mapping[int, Member], nodes: Sequence[int]) -> bool:
    """Whether dtypes and axes let one kernel do these nodes. That they can run as one is `in_order`'s to say."""
    apart = [k for k in nodes if not known[k].plain]
    if len(apart) > 1 or not alike(graph, known, nodes):
        return False
    if apart:
        return axes_of(graph, known, nodes) is not None
    outside, visible = boundary(graph, nodes)
    made = broadcast([graph.tensors[t].shape for t in outside])
    return made is not None and all(graph.tensors[t].shape == made for t in visible)


def boundary(graph: Graph, nodes: Sequence[int]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The tensors that a group reads, and those of its own that others read or the graph gives."""
    made = [t for k in nodes for t in graph.nodes[k].outputs.values()]
    read = dict.fromkeys(t for k in nodes for t in graph.nodes[k].inputs.values() if isinstance(t, str))
    inside = set(nodes)
    visible = [t for t in made if t in graph.outputs or not graph.readers[t] or set(graph.readers[t]) - inside]
    return tuple(t for t in read if t not in made), tuple(visible)


def recorded(graph: Graph, nodes: Sequence[int]) -> tuple[str, ...]:
    """The names of a group's nodes as they were recorded, in their order; among them those that stop a gradient within it."""
    visible = boundary(graph, nodes)[1]
    own = [graph.nodes[k] for k in nodes]
    inner = [t for node in own for t in node.outputs.values() if t not in visible]
    whole = [*own, *(stop for t in inner for stop in graph.stops.get(t, ()))]
    return tuple(node.name for node in sorted(whole, key=lambda n: n.at))


def alike(graph: Graph, known: Mapping[int, Member], nodes: Sequence[int]) -> bool:
    """Whether ops take the dtypes, and the floats among inputs and results have one dtype, and the ints: then no step rounds
    otherwise than the whole. Params do not count."""
    dtypes = set[str]()
    for k in nodes:
        for tensor in known[k].tensors:
            name = graph.nodes[k].outputs.get(tensor.name, graph.nodes[k].inputs.get(tensor.name))
            if isinstance(name, str):
                dtype = graph.tensors[name].dtype
                dtypes |= set() if tensor.role == "param" else {dtype}
                if dtype not in tensor.dtypes:
                    return False
    return len(dtypes & set(FLOATS)) <= 1 and len(dtypes & {"i32", "i64"}) <= 1


def in_order(graph: Graph, block: Sequence[int]) -> bool:
    """Whether the nodes can run with each block as one, where the last of its nodes stood: no block needs what comes of itself,
    and whoever uses a tensor that is changed in place does so on the same side of each change as before."""
    rank = _ranks(graph, block)
    if rank is None:
        return False
    for uses in graph.updated.values():
        for change in (k for k, changes in uses.items() if changes):
            for k in uses:
                if k != change and (
                    block[k] == block[change] or (rank[block[k]] < rank[block[change]]) != (k < change)
                ):
                    return False
    return True


def _ranks(graph: Graph, block: Sequence[int]) -> dict[int, int] | None:
    """When each block runs: of those whose operands are there, that whose last node comes first. None where one needs itself."""
    after: dict[int, set[int]] = {b: set() for b in block}
    for tensor, first in graph.makers.items():
        for second in graph.readers[tensor]:
            if block[first] != block[second]:
                after[block[first]].add(block[second])
    waiting = Counter(b for targets in after.values() for b in targets)
    last = {b: k for k, b in enumerate(block)}
    ready = [(last[b], b) for b in after if not waiting[b]]
    heapq.heapify(ready)
    rank: dict[int, int] = {}
    while ready:
        done = heapq.heappop(ready)[1]
        rank[done] = len(rank)
        for b in after[done]:
            waiting[b] -= 1
            if not waiting[b]:
                heapq.heappush(ready, (last[b], b))
    return rank if len(rank) == len(after) else None


def axes_of(graph: Graph, known: Mapping[int, Member], nodes: Sequence[int]) -> dict[str, frozenset[str]] | None:
    """The axes of each tensor of a group around one op that is not plain, in that op's names; None where they are not those."""
    anchor = next(k for k in nodes if not known[k].plain)
    member, tensors = known[anchor], _tensors(graph, anchor, known[anchor])
    shapes = {n: graph.tensors[t].shape for n, t in tensors.items()}
    where = space(member, shapes)
    if where is None or not fits(member, shapes):
        return None
    found: dict[str, frozenset[str]] = {}
    for argument in member.tensors:
        name = tensors.get(argument.name)
        if name is not None and found.setdefault(name, argument.labels) != argument.labels:
            return None
    for k in sorted(nodes):
        if k != anchor and not _aligned(graph, graph.nodes[k], where, found):
            return None
    kept = member.axis if member.keeps else ""
    outside, visible = boundary(graph, nodes)
    stored = [(t, "") for t in outside] + [(t, kept) for t in visible]
    good = all(t in found and graph.tensors[t].shape == expected(found[t], where, keep) for t, keep in stored)
    return found if good else None


def _tensors(graph: Graph, k: int, member: Member) -> dict[str, str]:
    """The tensors of a node, by the names that its op has for them."""
    node = graph.nodes[k]
    given = {t.name: node.inputs.get(t.name) or node.outputs.get(t.name) for t in member.tensors}
    return {n: t for n, t in given.items() if isinstance(t, str)}


def _aligned(graph: Graph, node: Node, where: Space, found: dict[str, frozenset[str]]) -> bool:
    """Whether a plain node's broadcasting is the union of axes; those of its tensors are added to `found`."""
    operands = [t for t in node.inputs.values() if isinstance(t, str)]
    (result,) = node.outputs.values()
    shape = graph.tensors[result].shape
    twins = {graph.tensors[t].shape: found[t] for t in (*operands, result) if t in found}
    for name in operands:
        if name not in found:
            own = graph.tensors[name].shape
            told = twins[own] if own in twins else aligned(own, where)
            if told is None:
                return False
            found[name] = told
    union = frozenset[str]().union(*(found[t] for t in operands))
    if found.setdefault(result, union) != union:
        return False
    same = all(graph.tensors[t].shape == shape for t in operands if found[t] == union)
    apart = [t for t in operands if found[t] != union]
    return same and all(
        aligned(graph.tensors[t].shape, where) == found[t] for t in (*apart, *([result] if apart else []))
    )


def aligned(shape: Shape, where: Space) -> frozenset[str] | None:
    """The axes of a tensor that NumPy's rules align with the space; None where it is none, or has a pack in part."""
    if len(shape) > len(where):
        return None
    there: dict[str, list[bool]] = {}
    padded = (None,) * (len(where) - len(shape)) + shape
    for (axis, extent), own in zip(where, padded):
        if own not in (extent, 1, None):
            return None
        there.setdefault(axis, []).append(own == extent)
    if any(len(set(places)) > 1 for places in there.values()):
        return None
    return frozenset(a for a, places in there.items() if places[0])


# ---------------------------------------------------------------------------------------------- patterns


@dataclass(frozen=True)
class Step:
    """One op of those that a fused op stands for.

    `names` has, by its arguments and attrs, what each is: a tensor or attr of the fused op, or the result of an earlier step.
    `constants` has those that are one value. What neither names is absent. Where `stopped`, no gradient passes its result.
    """

    result: str
    op: str
    names: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    stopped: bool = False


@dataclass(frozen=True)
class Pattern:
    """What a fused op stands for; `member` says what it is with its attrs."""

    op: str
    steps: tuple[Step, ...]
    outputs: tuple[str, ...]
    attrs: tuple[str, ...]
    member: Callable[[Mapping[str, Any]], Member | None]


@dataclass(frozen=True)
class Occurrence:
    """Nodes that a fused op can stand for, with what becomes of its attrs and tensors."""

    pattern: Pattern
    nodes: tuple[int, ...]
    attrs: Mapping[str, Any]
    operands: Mapping[str, Operand]
    outputs: Mapping[str, str]
    """By the op's outputs: the tensor of the graph, before nodes stop its gradient."""


def occurrences(graph: Graph, patterns: Iterable[Pattern], member: Knows) -> tuple[Occurrence, ...]:
    """Places where fused ops stand for nodes, no node in two, in the order of the graph.

    Patterns of more steps come first, then those of fewer results, then by name; places in the order of the graph.
    """
    ordered = sorted(patterns, key=lambda p: (-len(p.steps), len(p.outputs), p.op))
    block = list(range(len(graph.nodes)))
    taken: set[int] = set()
    found = []
    for pattern in ordered:
        for place in places(graph, pattern, member):
            joined = [min(place.nodes) if k in place.nodes else b for k, b in enumerate(block)]
            if not taken & set(place.nodes) and in_order(graph, joined):
                taken |= set(place.nodes)
                block = joined
                found.append(place)
    return tuple(sorted(found, key=lambda o: o.nodes))


def places(graph: Graph, pattern: Pattern, member: Knows, among: Collection[int] | None = None) -> Iterator[Occurrence]:
    """Every place where a fused op could stand, also where they overlap; `among` some nodes alone."""
    seen: set[tuple[int, ...]] = set()
    order = _connected(pattern)
    for seed in range(len(graph.nodes)) if among is None else sorted(among):
        if graph.nodes[seed].op != order[0].op:
            continue
        for bound, nodes in _extended(graph, order, {}, (), (seed,)):
            found = _occurrence(graph, pattern, bound, tuple(sorted(nodes)), member)
            if found is not None and found.nodes not in seen:
                seen.add(found.nodes)
                yield found


def _connected(pattern: Pattern) -> tuple[Step, ...]:
    """The steps in an order in which each after the first shares a result with one before it."""
    order = [pattern.steps[0]]
    while len(order) < len(pattern.steps):
        known = {s.result for s in order} | {n for s in order for n in s.names.values()}
        rest = [s for s in pattern.steps if s not in order]
        order.append(next((s for s in rest if {s.result, *s.names.values()} & known), rest[0]))
    return tuple(order)


Bound = dict[str, tuple[str, Any]]
"""What each name of a pattern is in the graph: a tensor, or a value."""


def _extended(
    graph: Graph, order: Sequence[Step], bound: Bound, nodes: tuple[int, ...], tried: Iterable[int]
) -> Iterator[tuple[Bound, tuple[int, ...]]]:
    """The ways to go on from the first `len(nodes)` steps, the next being one of the nodes `tried`."""
    for k in tried:
        again = _unified(order[len(nodes)], graph.nodes[k], bound) if k not in nodes else None
        if again is None:
            continue
        done = (*nodes, k)
        if len(done) == len(order):
            yield again, done
        else:
            yield from _extended(graph, order, again, done, _next_to(graph, order[len(done)], again))


def _next_to(graph: Graph, step: Step, bound: Bound) -> Iterable[int]:
    """The nodes that a step may be, by the tensors that are known of it."""
    if step.result in bound:
        return (graph.makers[bound[step.result][1]],) if bound[step.result][1] in graph.makers else ()
    read = [bound[n][1] for n in step.names.values() if n in bound and bound[n][0] == "tensor"]
    return graph.readers[read[0]] if read else range(len(graph.nodes))


def _unified(step: Step, node: Node, bound: Bound) -> Bound | None:
    """The names with what this node tells of them; None where it is not the step."""
    if node.op != step.op or len(node.outputs) != 1:
        return None
    told = dict(bound)
    for key in {**node.inputs, **node.attrs, **step.names, **step.constants}:
        given = node.inputs.get(key, node.attrs.get(key, _MISSING))
        if key in step.constants:
            if not same(given, step.constants[key]) or (key in node.inputs and isinstance(given, str)):
                return None
        elif key not in step.names:
            if given is not None and given is not _MISSING:
                return None
        elif given is _MISSING:
            return None
        else:
            kind = "tensor" if key in node.inputs and isinstance(given, str) else "value"
            first = told.setdefault(step.names[key], (kind, given))
            if first[0] != kind or not same(first[1], given):
                return None
    (made,) = node.outputs.values()
    return told if told.setdefault(step.result, ("tensor", made)) == ("tensor", made) else None


def same(one: object, other: object) -> bool:
    """Whether two values of an attr are one: 1 is 1.0 but not true, NaN is NaN."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other))
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    nan = all(isinstance(v, float) and math.isnan(v) for v in (one, other))
    return nan or one == other


def _occurrence(
    graph: Graph, pattern: Pattern, bound: Bound, nodes: tuple[int, ...], known: Knows
) -> Occurrence | None:
    """The occurrence, if the graph lets the fused op stand there."""
    results = {s.result: bound[s.result][1] for s in pattern.steps}
    attrs = {n: bound[n][1] for n in pattern.attrs if n in bound and bound[n][0] == "value"}
    operands = {n: v for n, (_, v) in bound.items() if n not in results and n not in pattern.attrs}
    outputs = {n: results[n] for n in pattern.outputs}
    if len(attrs) < len(pattern.attrs) or set(results.values()) & {v for v in operands.values() if isinstance(v, str)}:
        return None
    if not set(boundary(graph, nodes)[1]) <= set(outputs.values()):
        return None
    inner = {n for s in pattern.steps for n in s.names.values()} & results.keys()
    if any(s.stopped != (results[s.result] in graph.stopped) for s in pattern.steps if s.result in inner):
        return None
    member = pattern.member(attrs)
    steps = {k: m for k in nodes if (m := known(graph.nodes[k])) is not None}
    if member is None or len(steps) < len(nodes) or not _takes(graph, member, steps, operands, outputs):
        return None
    block = [min(nodes) if k in nodes else k for k in range(len(graph.nodes))]
    given = {n: graph.unstopped(t) for n, t in outputs.items()}
    return Occurrence(pattern, nodes, attrs, operands, given) if in_order(graph, block) else None


def _takes(
    graph: Graph,
    member: Member,
    steps: Mapping[int, Member],
    operands: Mapping[str, Operand],
    outputs: Mapping[str, str],
) -> bool:
    """Whether a fused op takes these operands, and its results are those of its steps."""
    named: dict[str, str] = {}
    for tensor in member.tensors:
        value = outputs.get(tensor.name, operands.get(tensor.name))
        if isinstance(value, str):
            named[tensor.name] = value
            if graph.tensors[value].dtype not in tensor.dtypes:
                return False
        elif not (tensor.optional if value is None else tensor.scalar and not isinstance(value, bool)):
            return False
    shapes = {n: graph.tensors[t].shape for n, t in named.items()}
    return (
        alike(graph, steps, tuple(steps)) and fits(member, shapes) and _same_axes(graph, member, steps, named, shapes)
    )


def _same_axes(
    graph: Graph, member: Member, steps: Mapping[int, Member], named: Mapping[str, str], shapes: Mapping[str, Shape]
) -> bool:
    """Whether each tensor has the axes in the fused op that it has in the steps; shapes alone may agree by chance."""
    apart = [k for k in steps if not steps[k].plain]
    if member.plain or len(apart) > 1:
        return not apart
    where = space(member, shapes)
    if where is None:
        return False
    if not apart:
        return all(aligned(shapes[t.name], where) == t.labels for t in member.tensors if t.name in named)
    found = axes_of(graph, steps, sorted(steps))
    own = _tensors(graph, apart[0], steps[apart[0]])
    theirs = space(steps[apart[0]], {n: graph.tensors[t].shape for n, t in own.items()})
    if found is None or theirs is None or [n for _, n in theirs] != [n for _, n in where]:
        return False
    pairs = {(mine, other) for (mine, _), (other, _) in zip(where, theirs)}
    renamed = {t.name: {other for mine, other in pairs if mine in t.labels} for t in member.tensors if t.name in named}
    return all(found[named[n]] & {other for _, other in pairs} == axes for n, axes in renamed.items())
