"""A model with numbers for its sizes: every launch in order, and where in memory each tensor is. No torch.

    program = build(model, {"batch": 64}, multiprocessors=132)
    program.memory.arena, program.memory.lower_bound    # bytes

Launches come of the ops' own contract: `plan_forward` says what to allocate and to launch, `pack_args` hands over the arguments. A
tensor that is not a param, a buffer or an input lives in one arena, from the task that writes it to the last that reads it.
Tensors of a run that the graph does not name have names with a space, which no tensor of a graph has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from . import moves
from .abi import ArgVisitor
from .extents import Extent
from .graph import Node
from .lowering import Model
from .op import RuntimeOp
from .plan import Given, Launch, Meta, Plan
from .shaping import Reshape, Shaping
from .views import ITEM_SIZES, TensorView

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
    op: RuntimeOp | None = None
    """Of a forward: the op, and what it is given."""
    operands: Mapping[str, str | float | int | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Memory:
    """Bytes of the arena, and of what is live at the worst moment: no plan needs less."""

    arena: int
    lower_bound: int


@dataclass
class Program:
    """Tasks, tensors and their places."""

    model: Model
    sizes: Mapping[str, int]
    values: dict[str, Value] = field(default_factory=dict)
    storages: dict[str, Storage] = field(default_factory=dict)
    forward: list[Task] = field(default_factory=list)
    memory: Memory = Memory(0, 0)

    @property
    def tasks(self) -> list[Task]:
        """All, in the order in which they run."""
        return list(self.forward)

    @property
    def lasting(self) -> list[str]:
        """The tensors that are read after the last task."""
        return list(self.model.outputs)


def build(model: Model, sizes: Mapping[str, int], multiprocessors: int) -> Program:
    """Plans every launch and every byte.

    Raises:
        TypeError, ValueError, IndexError: a size is missing, is none of the graph, or an op refuses it; names the node.
    """
    program = Program(model, dict(sizes))
    begin(program, multiprocessors)
    place(program)
    return program


def begin(program: Program, multiprocessors: int) -> Builder:
    """Adds the tasks of the forward. Raises as `build` does."""
    graph, model, sizes = program.model.graph, program.model, program.sizes
    needed = dict.fromkeys(
        n for t in _leaves(model) for e in graph.tensors[t].shape or () if isinstance(e, Extent) for n in e.names
    )
    missing, surplus = [n for n in needed if n not in sizes], [n for n in sizes if n not in graph.sizes]
    if missing or surplus:
        raise ValueError(
            f"sizes of the model: missing: {', '.join(missing) or 'none'}; not in the graph: {', '.join(surplus) or 'none'}"
        )
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise ValueError(f"size `{name}` is {size!r}; it is a number of elements")
    builder = Builder(program, multiprocessors)
    for name in _leaves(model):
        builder.new(name, graph.meta(name, program.sizes), fixed=True)
    for node in model.nodes:
        with named(node.label):
            builder.forward(node)
    return builder


def _leaves(model: Model) -> list[str]:
    """Inputs, params and buffers that the model's nodes read, or that it returns."""
    used = {*model.outputs, *(n for node in model.nodes for n in node.operands)}
    return [t.name for t in model.graph.tensors.values() if t.role != "value" and t.name in used]


@contextmanager
def named(label: str) -> Iterator[None]:
    """Errors of what is done within name the node."""
    try:
        yield
    except (TypeError, ValueError, IndexError) as error:
        raise error if label in str(error) else type(error)(f"{label}: {error}") from error


class Builder:
    """Adds tasks to a program, node by node.

    Attributes:
        plans: of each node its forward's plan.
        operands: of each node the tensors that its launches read: the recorded ones, or copies of them.
        kept: of each node what its forward writes for its backward alone.
    """

    def __init__(self, program: Program, multiprocessors: int) -> None:
        self.program, self.model = program, program.model
        self.multiprocessors = multiprocessors
        self.plans: dict[str, Plan] = {}
        self.operands: dict[str, dict[str, str | float | int | None]] = {}
        self.kept: dict[str, dict[str, str]] = {}

    # -------------------------------------------------------------------------------- tensors

    def new(self, name: str, meta: Meta, fixed: bool = False) -> str:
        """A tensor with memory of its own."""
        if name in self.program.values:
            raise ValueError(f"two tensors of a run are called `{name}`")
        self.program.values[name] = Value(meta, name)
        self.program.storages[name] = Storage(_nbytes(meta), fixed)
        return name

    def view(self, name: str, of: str, meta: Meta) -> str:
        """A tensor over the memory of another."""
        self.program.values[name] = Value(meta, self.program.values[of].storage)
        return name

    def meta(self, name: str) -> Meta:
        return self.program.values[name].meta

    def row_major(self, name: str) -> Meta:
        """What `meta` would be of a dense copy."""
        meta = self.meta(name)
        return Meta.dense(meta.dtype, meta.shape)

    def given(self, names: Mapping[str, str | float | int | None]) -> dict[str, Given]:
        return {t: self.meta(v) if isinstance(v, str) else v for t, v in names.items()}

    def trains(self, node: Node) -> bool:
        return any(v in self.model.requires for v in node.outputs.values())

    # -------------------------------------------------------------------------------- moves

    def move(self, tasks: list[Task], label: str, launch: Launch, names: Mapping[str, str]) -> None:
        """Adds a task that copies or adds; `names` are the tensors of the launch's pointers."""

        def pack(i: int, views: Views, visitor: ArgVisitor) -> None:
            launch.kernel.abi.visit(launch.arguments({k: views[n] for k, n in names.items()}, {}), visitor)

        metas = {k: self.meta(n) for k, n in names.items()}
        reads = tuple(n for k, n in names.items() if k != "out")
        tasks.append(Task(label, (launch,) if launch.grid[0] else (), metas, pack, reads, (names["out"],)))

    def dense(self, tasks: list[Task], name: str, label: str, shape: tuple[int, ...] | None = None) -> str:
        """A dense copy of a tensor, stretched to a shape by NumPy's rules where one is given."""
        count = sum(n.startswith(f"{name} copy ") for n in self.program.values)
        meta = self.meta(name) if shape is None else stretched(self.meta(name), shape)
        source = name if meta == self.meta(name) else self.view(f"{name} stretched {count}", name, meta)
        copy = self.new(f"{name} copy {count}", Meta.dense(meta.dtype, meta.shape))
        self.move(tasks, label, moves.copy(meta, self.meta(copy)), {"x": source, "out": copy})
        return copy

    def copied(self, tasks: list[Task], names: dict[str, Any], label: str) -> Callable[[str, tuple[int, ...]], Given]:
        """What `RuntimeOp.planned` copies operands with: `names` gets the copies, `tasks` what makes them."""

        def copy(tensor: str, shape: tuple[int, ...]) -> Given:
            name = names[tensor]
            if not isinstance(name, str):
                return name
            if self.meta(name) != Meta.dense(self.meta(name).dtype, shape):
                names[tensor] = self.dense(tasks, name, f"{label}: dense memory", shape)
            return self.meta(names[tensor])

        return copy

    # -------------------------------------------------------------------------------- forward

    def forward(self, node: Node) -> None:
        if isinstance(node.op, Shaping):
            (source,), (out,) = node.operands, node.outputs.values()
            shaping: Shaping = node.op
            if isinstance(shaping, Reshape):  # -1 was solved when it was recorded
                shaping = Reshape(self.model.graph.tensors[out].shape or ())
            meta = shaping.meta(self.meta(source), self.program.sizes)
            if meta is None:
                source = self.dense(self.program.forward, source, f"{node.label}: dense memory")
                meta = shaping.meta(self.meta(source), self.program.sizes)
            assert meta is not None
            self.view(out, source, meta)
            return
        op, names = node.op, dict(node.inputs)
        plan = self._planned(op, names, node.label)
        self.plans[node.name], self.operands[node.name] = plan, names
        for buffer in plan.updated:
            self._keep_from(str(names[buffer]), node.label)
        for tensor, meta in plan.outputs.items():
            self.new(node.outputs[tensor], meta)
        training = self.trains(node)
        saved = {n: self.new(f"{node.name} {n}", m) for n, m in plan.saved.items() if training}
        scratch = {n: self.new(f"{node.name} {n}", m) for n, m in op.between(plan, training).items()}
        self.kept[node.name] = saved
        self.program.forward.append(self._forward_task(node, op, plan, names, {**saved, **scratch}))

    def _planned(self, op: RuntimeOp, names: dict[str, Any], label: str) -> Plan:
        """The forward's plan; operands of more dims than a kernel takes are copied, and `names` has the copies."""
        return op.planned(op.plan_forward, self.given(names), self.copied(self.program.forward, names, label))

    def _keep_from(self, buffer: str, label: str) -> None:
        """Before a buffer is updated: what it holds is copied for the backwards of the nodes that have read it."""
        storage, copies = self.program.values[buffer].storage, dict[str, str]()
        for node in self.model.nodes:
            if node.name not in self.plans or not self.trains(node):
                continue
            op, names = node.op, self.operands[node.name]
            for tensor, name in names.items():
                if not isinstance(name, str) or not isinstance(op, RuntimeOp) or tensor not in op.residuals:
                    continue
                if self.program.values[name].storage == storage and tensor not in self.plans[node.name].updated:
                    if name not in copies:
                        copies[name] = self.dense(self.program.forward, name, f"{label}: `{buffer}` as it was")
                    names[tensor] = copies[name]

    def _forward_task(
        self, node: Node, op: RuntimeOp, plan: Plan, names: Mapping[str, Any], own: Mapping[str, str]
    ) -> Task:
        groups = grouped(op, names)

        def pack(i: int, views: Views, visitor: ArgVisitor) -> None:
            results = [views[node.outputs[t]] for t in plan.outputs]
            kept = [views[own[n]] if n in own else None for n in plan.saved]
            scratch = [views[own[n]] for n in plan.scratch]
            op.pack_args(i, *seen(groups, views), results, kept, scratch, visitor)

        reads = tuple(v for v in names.values() if isinstance(v, str))
        writes = (*(node.outputs[t] for t in plan.outputs), *own.values())
        zeros = tuple(node.outputs[z] for z in plan.zeros if z in node.outputs)
        return Task(node.label, plan.launches, plan.metas, pack, reads, writes, zeros, op, dict(names))


# ---------------------------------------------------------------------------------------------- packing

Groups = tuple[list[Any], list[Any], list[Any]]


def grouped(op: RuntimeOp, names: Mapping[str, Any]) -> Groups:
    """What is given for inputs, params and buffers, in the order of the contract."""
    inputs, params, buffers = ([names.get(t.name) for t in ts] for ts in (op.inputs, op.params, op.buffers))
    return inputs, params, buffers


def seen(groups: Groups, views: Views) -> Iterator[list[Any]]:
    """The groups as the contract takes them."""
    for group in groups:
        yield [views[v] if isinstance(v, str) else v for v in group]


# ---------------------------------------------------------------------------------------------- memory


def stretched(meta: Meta, shape: tuple[int, ...]) -> Meta:
    """A tensor as one of this shape, by NumPy's rules: what is stretched has the stride 0."""
    lead = len(shape) - len(meta.shape)
    own = zip(meta.shape, meta.strides, shape[lead:])
    return Meta(meta.dtype, shape, (*(0,) * lead, *(0 if n == 1 != whole else s for n, s, whole in own)))


def _nbytes(meta: Meta) -> int:
    if 0 in meta.shape:
        return 0
    return (1 + sum((n - 1) * s for n, s in zip(meta.shape, meta.strides))) * ITEM_SIZES[meta.dtype]


def place(program: Program) -> None:
    """Finds out from when to when each tensor lives, and gives it a place in the arena."""
    tasks = program.tasks
    _live(program, tasks)
    inside = [s for s in program.storages.values() if not s.fixed and s.nbytes]
    _place(inside)
    live = [sum(s.nbytes for s in inside if s.first <= m <= s.last) for m in range(len(tasks) + 1)]
    program.memory = Memory(max((s.offset + s.nbytes for s in inside), default=0), max(live, default=0))


def _live(program: Program, tasks: list[Task]) -> None:
    """From the task that writes a tensor first to the last that touches it; what lasts to the end."""
    seen: set[str] = set()
    for moment, task in enumerate(tasks):
        for name in (*task.writes, *task.reads):
            storage = program.storages[program.values[name].storage]
            if program.values[name].storage not in seen:
                seen.add(program.values[name].storage)
                storage.first = moment
            storage.last = moment
    for name in program.lasting:
        program.storages[program.values[name].storage].last = len(tasks)


def _place(inside: list[Storage]) -> None:
    """Offsets in the arena: the largest first, each at the lowest place that is free while it lives (Pisarchyk and Lee, Efficient
    memory management for deep neural net inference, 2020)."""
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
