"""A model with numbers for its sizes: every launch of forward and backward in order, and where in memory each tensor is. No torch.

    program = build(model, {"batch": 64}, multiprocessors=132)
    program.memory.arena, program.memory.lower_bound    # bytes

Launches come of the ops' own contract: `plan_forward` and `plan_backward` say what to allocate, `pack_args` and
`pack_backward_args` hand over the arguments. A tensor that is not a param, a buffer, an input or a gradient lives in one arena, from
the task that writes it to the last that reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import moves
from .abi import ArgVisitor
from .graph import Node
from .lowering import LoweringMode, Model
from .op import RuntimeOp
from .plan import Given, Launch, Meta, Plan, TooManyDims
from .shaping import Reshape, Shaping
from .views import ITEM_SIZES, TensorView, dense_strides

ALIGNMENT = 256
"""Bytes that every tensor begins at a multiple of."""

Views = Mapping[str, TensorView]
Pack = Callable[[int, Views, ArgVisitor], None]


@dataclass(frozen=True)
class Value:
    """A tensor of a run: what is known of it, and whose memory it is."""

    meta: Meta
    storage: str


@dataclass
class Storage:
    """Memory of one tensor, and of those that are views of it."""

    nbytes: int
    fixed: bool = False
    """Whether it is outside the arena."""
    first: int = 0
    last: int = 0
    """The tasks between which it is live."""
    offset: int = -1


@dataclass(frozen=True)
class Task:
    """What one node does in one direction: launches, after some results are zeroed."""

    label: str
    launches: tuple[Launch, ...]
    metas: Mapping[str, Meta]
    """Of what the launches name, by the names that they have for it."""
    pack: Pack
    """Visits the arguments of a launch, given every tensor."""
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    """Everything that must have memory while it runs, scratch among it."""
    zeros: tuple[str, ...] = ()


@dataclass(frozen=True)
class Memory:
    """Bytes of the arena, and of what is live at the worst moment: no plan needs less."""

    arena: int
    lower_bound: int


@dataclass
class Program:
    """Tasks of both directions, tensors and their places."""

    model: Model
    sizes: Mapping[str, int]
    values: dict[str, Value] = field(default_factory=dict)
    storages: dict[str, Storage] = field(default_factory=dict)
    forward: list[Task] = field(default_factory=list)
    backward: list[Task] = field(default_factory=list)
    gradients: dict[str, str] = field(default_factory=dict)
    """For each param and input that has one, the tensor that holds the gradient of one run."""
    memory: Memory = Memory(0, 0)


def build(model: Model, sizes: Mapping[str, int], multiprocessors: int) -> Program:
    """Plans every launch and every byte.

    Raises:
        ValueError: a size is missing, is none of the graph, or an op refuses it; names the node.
    """
    graph = model.graph
    missing, surplus = [n for n in graph.sizes if n not in sizes], [n for n in sizes if n not in graph.sizes]
    if missing or surplus:
        raise ValueError(
            f"sizes of the model: missing: {', '.join(missing) or 'none'}; not in the graph: {', '.join(surplus) or 'none'}"
        )
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise ValueError(f"size `{name}` is {size!r}; it is a number of elements")
    program = Program(model, dict(sizes))
    builder = _Builder(program, multiprocessors)
    builder.leaves()
    for node in model.nodes:
        builder.forward(node)
    if model.mode is LoweringMode.TRAINING:
        builder.backwards()
    _live(program)
    _place(program)
    return program


class _Builder:
    """Adds tasks to a program, node by node."""

    def __init__(self, program: Program, multiprocessors: int) -> None:
        self.program, self.model = program, program.model
        self.multiprocessors = multiprocessors
        self.plans: dict[str, Plan] = {}
        self.operands: dict[str, dict[str, str | float | int | None]] = {}
        """Of each node the tensors that its launches read: the recorded ones, or dense copies of them."""
        self.cotangents: dict[str, list[str]] = {}

    # -------------------------------------------------------------------------------- tensors

    def leaves(self) -> None:
        graph, used = self.model.graph, {n for node in self.model.nodes for n in node.operands}
        for tensor in graph.tensors.values():
            if tensor.role != "value" and (tensor.name in used or tensor.name in self.model.outputs):
                self._new(tensor.name, graph.meta(tensor.name, self.program.sizes), fixed=True)

    def _new(self, name: str, meta: Meta, fixed: bool = False) -> str:
        assert name not in self.program.values, name
        self.program.values[name] = Value(meta, name)
        self.program.storages[name] = Storage(_nbytes(meta), fixed)
        return name

    def _view(self, name: str, of: str, meta: Meta) -> str:
        self.program.values[name] = Value(meta, self.program.values[of].storage)
        return name

    def meta(self, name: str) -> Meta:
        return self.program.values[name].meta

    def _given(self, names: Mapping[str, str | float | int | None]) -> dict[str, Given]:
        return {t: self.meta(v) if isinstance(v, str) else v for t, v in names.items()}

    # -------------------------------------------------------------------------------- moves

    def _move(self, tasks: list[Task], label: str, launch: Launch, names: Mapping[str, str]) -> None:
        def pack(i: int, views: Views, visitor: ArgVisitor) -> None:
            launch.kernel.abi.visit(launch.arguments({k: views[n] for k, n in names.items()}, {}), visitor)

        reads = tuple(n for k, n in names.items() if k != "out")
        metas = {k: self.meta(n) for k, n in names.items()}
        tasks.append(Task(label, (launch,) if launch.grid[0] else (), metas, pack, reads, (names["out"],)))

    def _dense(self, tasks: list[Task], name: str, label: str) -> str:
        """A dense copy of a tensor."""
        meta = self.meta(name)
        copy = f"{name}.dense_{sum(n.startswith(f'{name}.dense_') for n in self.program.values)}"
        self._new(copy, _dense_meta(meta))
        self._move(tasks, f"{label}: dense memory", moves.copy(meta, self.meta(copy)), {"x": name, "out": copy})
        return copy

    # -------------------------------------------------------------------------------- forward

    def forward(self, node: Node) -> None:
        if isinstance(node.op, Shaping):
            (source,), (out,) = node.operands, node.outputs.values()
            self._shape(self.program.forward, node, source, out)
            return
        names = dict(node.inputs)
        try:
            plan = self._planned(node.op, names, node.label)
        except (TypeError, ValueError, IndexError) as error:
            raise type(error)(f"{node.label}: {error}") from error
        self.plans[node.name], self.operands[node.name] = plan, names
        for tensor, meta in plan.outputs.items():
            self._new(node.outputs[tensor], meta)
        saved = {n: self._new(f"{node.name}.{n}", m) for n, m in plan.saved.items() if self._kept(node, n, plan)}
        scratch = [self._new(f"{node.name}.{n}", m) for n, m in plan.scratch.items()]
        self.program.forward.append(self._forward_task(node, plan, names, saved, scratch))

    def _planned(self, op: RuntimeOp, names: dict[str, Any], label: str) -> Plan:
        """The forward's plan; operands of more dims than a kernel takes are copied, and `names` has the copies."""
        try:
            return op.plan_forward(self._given(names))
        except TooManyDims:
            for tensor, name in names.items():
                if isinstance(name, str) and self.meta(name) != _dense_meta(self.meta(name)):
                    names[tensor] = self._dense(self.program.forward, name, label)
            return op.plan_forward(self._given(names))

    def _kept(self, node: Node, name: str, plan: Plan) -> bool:
        """Whether what a forward writes for its backward is read: by that, or by a later launch of the same forward."""
        trains = any(v in self.model.requires for v in node.outputs.values())
        return trains or sum(name in launch.pointers.values() for launch in plan.launches) > 1

    def _forward_task(
        self, node: Node, plan: Plan, names: Mapping[str, Any], saved: Mapping[str, str], scratch: Sequence[str]
    ) -> Task:
        op = node.op
        assert isinstance(op, RuntimeOp)
        groups = _groups(op, names)

        def pack(i: int, views: Views, visitor: ArgVisitor) -> None:
            results = [views[node.outputs[t]] for t in plan.outputs]
            kept = [views[saved[n]] if n in saved else None for n in plan.saved]
            op.pack_args(i, *_views(groups, views), results, kept, [views[n] for n in scratch], visitor)

        reads = tuple(v for v in names.values() if isinstance(v, str))
        writes = (*(node.outputs[t] for t in plan.outputs), *saved.values(), *scratch)
        zeros = tuple(node.outputs[z] for z in plan.zeros if z in node.outputs)
        metas = {**_metas(self._given(names)), **plan.outputs, **plan.saved, **plan.scratch}
        return Task(node.label, plan.launches, metas, pack, reads, writes, zeros)

    def _shape(self, tasks: list[Task], node: Node, source: str, out: str) -> None:
        shaping = node.op
        assert isinstance(shaping, Shaping)
        if isinstance(shaping, Reshape):  # in numbers: -1 was solved when it was recorded
            shaping = Reshape(self.model.graph.tensors[node.outputs["y"]].shape or ())
        meta = shaping.meta(self.meta(source), self.program.sizes)
        if meta is None:
            source = self._dense(tasks, source, node.label)
            meta = shaping.meta(self.meta(source), self.program.sizes)
        assert meta is not None
        self._view(out, source, meta)

    # -------------------------------------------------------------------------------- backward

    def backwards(self) -> None:
        for name in self.model.seeds:
            seed = self._new(f"d{name}", _dense_meta(self.meta(name)), fixed=True)
            self.cotangents.setdefault(name, []).append(seed)
        for node in reversed(self.model.nodes):
            found = {t: self._gathered(v) for t, v in node.outputs.items() if v in self.model.requires}
            if any(found.values()):
                self._backward(node, found)
        for leaf in self.model.wanted:
            own = self._gathered(leaf)
            if own is not None:
                self.program.gradients[leaf] = own

    def _gathered(self, name: str) -> str | None:
        """The sum of the cotangents that a tensor has got from those that read it."""
        parts = self.cotangents.pop(name, [])
        while len(parts) > 1:
            first, second, *rest = parts
            total = self._new(f"d{name}.sum_{len(rest)}", _dense_meta(self.meta(name)))
            launch = moves.add(self.meta(first), self.meta(second), self.meta(total))
            self._move(
                self.program.backward, f"gradients of `{name}`", launch, {"x": first, "other": second, "out": total}
            )
            parts = [total, *rest]
        return parts[0] if parts else None

    def _backward(self, node: Node, found: Mapping[str, str | None]) -> None:
        if isinstance(node.op, Shaping):
            (source,), (cotangent,) = node.operands, found.values()
            if source in self.model.requires and cotangent is not None:
                self._unshape(node, source, cotangent)
            return
        op = node.op
        names, plan = self.operands[node.name], self.plans[node.name]
        needed = [n for n in op.gradients if isinstance(v := node.inputs.get(n), str) and v in self.model.requires]
        results = {t: node.outputs[t] for t in plan.outputs}
        kept = {n: f"{node.name}.{n}" for n in plan.saved}
        cotangents = {f"d{t.name}": found.get(t.name) for t in op.outputs}
        made = self._passed(op, names, cotangents, needed)
        rest = [n for n in needed if n not in made]
        shared = {n: o for n, o in op.equals.items() if n in rest and o in rest and self._alike(names[n], names[o])}
        rest = [n for n in rest if n not in shared]
        if rest:
            made |= self._differentiate(node, op, {**names, **results, **kept, **cotangents}, rest)
        for name in needed:
            self.cotangents.setdefault(str(node.inputs[name]), []).append(made[shared.get(name, name)])

    def _alike(self, a: Any, b: Any) -> bool:
        first, second = self.meta(a), self.meta(b)
        return (first.shape, first.dtype) == (second.shape, second.dtype)

    def _passed(
        self, op: RuntimeOp, names: Mapping[str, Any], cotangents: Mapping[str, str | None], needed: Sequence[str]
    ) -> dict[str, str]:
        """The gradients that are a cotangent as it is."""
        out = {}
        for name, cotangent in op.passes().items():
            own = cotangents.get(cotangent)
            if name in needed and own is not None and self._alike(own, names[name]):
                out[name] = own
        return out

    def _differentiate(
        self, node: Node, op: RuntimeOp, known: Mapping[str, Any], needed: Sequence[str]
    ) -> dict[str, str]:
        """The backward's task of one node; the gradients by operand."""
        given = self._given(known)
        plan = op.plan_backward(given, needed, self.multiprocessors)
        grads = {n: self._new(f"{node.name}.d{n}", plan.outputs[f"d{n}"]) for n in needed}
        scratch = [self._new(f"{node.name}.backward.{n}", m) for n, m in plan.scratch.items()]
        groups = _groups(op, known)

        def pack(i: int, views: Views, visitor: ArgVisitor) -> None:
            def all_of(tensors: Sequence[Any], prefix: str = "") -> list[Any]:
                return [views[v] if isinstance(v := known.get(f"{prefix}{t.name}"), str) else v for t in tensors]

            own = [[views[grads[t.name]] if t.name in grads else None for t in ts] for ts in (op.inputs, op.params)]
            op.pack_backward_args(
                i, *_views(groups, views), all_of(op.outputs), all_of(op.saved), all_of(op.outputs, "d"), *own,
                [views[n] for n in scratch], visitor, self.multiprocessors,
            )  # fmt: skip

        touched = {n for launch in plan.launches for n in launch.pointers.values()}
        reads = tuple(dict.fromkeys(v for n, v in known.items() if isinstance(v, str) and n in touched))
        zeros = tuple(grads[z[1:]] for z in plan.zeros)
        metas = {**_metas(given), **plan.outputs, **plan.scratch}
        self.program.backward.append(
            Task(f"backward of {node.label}", plan.launches, metas, pack, reads, (*grads.values(), *scratch), zeros)
        )
        return grads

    def _unshape(self, node: Node, source: str, cotangent: str) -> None:
        shaping = node.op
        assert isinstance(shaping, Shaping)
        meta = shaping.back(self.meta(cotangent), self.meta(source))
        if meta is None:
            cotangent = self._dense(self.program.backward, cotangent, f"backward of {node.label}")
            meta = shaping.back(self.meta(cotangent), self.meta(source))
        assert meta is not None
        own = self._view(f"{node.name}.dx", cotangent, meta)
        self.cotangents.setdefault(source, []).append(own)


# ---------------------------------------------------------------------------------------------- packing

_Groups = tuple[list[Any], list[Any], list[Any]]


def _groups(op: RuntimeOp, names: Mapping[str, Any]) -> _Groups:
    """What is given for inputs, params and buffers, in the order of the contract."""
    inputs, params, buffers = ([names.get(t.name) for t in ts] for ts in (op.inputs, op.params, op.buffers))
    return inputs, params, buffers


def _views(groups: _Groups, views: Views) -> Iterator[list[Any]]:
    for group in groups:
        yield [views[v] if isinstance(v, str) else v for v in group]


# ---------------------------------------------------------------------------------------------- memory


def _nbytes(meta: Meta) -> int:
    if 0 in meta.shape:
        return 0
    return (1 + sum((n - 1) * s for n, s in zip(meta.shape, meta.strides))) * ITEM_SIZES[meta.dtype]


def _metas(given: Mapping[str, Given]) -> dict[str, Meta]:
    return {n: m for n, m in given.items() if isinstance(m, Meta)}


def _dense_meta(meta: Meta) -> Meta:
    return Meta(meta.dtype, meta.shape, dense_strides(meta.shape))


def _live(program: Program) -> None:
    """From the task that writes a tensor first to the last that touches it; outputs and gradients to the end."""
    tasks = [*program.forward, *program.backward]
    seen: set[str] = set()
    for moment, task in enumerate(tasks):
        for name in (*task.writes, *task.reads):
            storage = program.storages[program.values[name].storage]
            if program.values[name].storage not in seen:
                seen.add(program.values[name].storage)
                storage.first = moment
            storage.last = moment
    for name in (*program.model.outputs, *program.gradients.values()):
        program.storages[program.values[name].storage].last = len(tasks)


def _place(program: Program) -> None:
    """Offsets in the arena: the largest first, each at the lowest place that is free while it lives (Pisarchyk and Lee, Efficient
    memory management for deep neural net inference, 2020)."""
    inside = [s for s in program.storages.values() if not s.fixed and s.nbytes]
    placed: list[Storage] = []
    for storage in sorted(inside, key=lambda s: -s.nbytes):
        taken = sorted(
            (p.offset, p.offset + p.nbytes) for p in placed if p.first <= storage.last and storage.first <= p.last
        )
        offset = 0
        for start, end in taken:
            if offset + storage.nbytes <= start:
                break
            offset = max(offset, -(-end // ALIGNMENT) * ALIGNMENT)
        storage.offset = offset
        placed.append(storage)
    moments = len(program.forward) + len(program.backward) + 1
    live = [sum(s.nbytes for s in inside if s.first <= m <= s.last) for m in range(moments)]
    program.memory = Memory(max((s.offset + s.nbytes for s in inside), default=0), max(live, default=0))
