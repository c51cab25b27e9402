"""Schedules: which kernels an op becomes, and why.

Takes a `Verdict` (typed, differentiated, verified), returns an `OpPlan`, or a diagnostic that says what no schedule can do
yet. The choice is a total function of the graph, with a printed reason. `explain` prints this very plan.

    softcap  ->  pointwise: every value has the axes of the output
                 softcap_forward(x) -> y;  softcap_backward(y, dy) -> dx
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from codegen.diagnostics import Report
from codegen.ir import Graph, Node, Target, Tensor, walk
from codegen.precision import exacting
from codegen.primitives import TABLE
from codegen.rows import NoRows, Rows, rows
from codegen.spec import Axes, OpSpec
from codegen.variants import Variant
from codegen.verify import Verdict

_FREE = ("const", "read", "attr", "size", "largest", "cast", "expand", "replace", "stop_gradient", "stack", "at")


@dataclass(frozen=True)
class OpPlan:
    """How an op is emitted: tensors by their part in each kernel, in the spec's order."""

    op: OpSpec
    graphs: tuple[tuple[Variant, Graph], ...]
    reason: str
    sliced: tuple[str, ...]
    """Axes of fixed extent, read and written part by part."""
    forward_reads: tuple[str, ...]
    backward_reads: tuple[str, ...]
    """Inputs and params, residual outputs, cotangents, in this order."""
    gradients: tuple[str, ...]
    """Inputs and params whose gradient a kernel writes."""
    summed: tuple[str, ...]
    """Those that can be broadcast, or lack axes: their gradient may be a sum."""
    residuals: tuple[str, ...]
    exacting: tuple[frozenset[str], frozenset[str]]
    """Calls of the forward and of the backward kernel that keep full precision where results are stored in half."""
    rows: Rows | None = None
    """The loops of an op that reduces; None where every element stands for itself."""

    @property
    def schedule(self) -> str:
        return "pointwise" if self.rows is None else "row"

    @property
    def name(self) -> str:
        return self.op.name

    @property
    def floats(self) -> tuple[tuple[Variant, Graph], ...]:
        """The variants that have gradients."""
        return tuple((v, g) for v, g in self.graphs if g.gradients)


class _NoSchedule(Exception):
    pass


def schedule(verdict: Verdict, report: Report) -> OpPlan | None:
    """Chooses the schedule of a verified op. None where the op is only verified (`schedule: none`) or none fits."""
    op = verdict.op
    if op.schedule == "none":
        return None
    try:
        reduces = any(n.op == "reduce" for _, g in verdict.graphs for n in walk([t.node for t in g.outputs if t.node]))
        if op.schedule == "pointwise" and reduces:
            raise _NoSchedule("`pointwise` was asked for, and it reduces")
        return _rows(verdict) if reduces or op.schedule == "row" else _pointwise(verdict)
    except (_NoSchedule, NoRows) as fault:
        report.error(op.span, "no-schedule", f"no schedule can emit `{op.name}` yet: {fault}",
                     "`schedule: none` verifies an op without emitting it")  # fmt: skip
        return None


def _check_effects(op: OpSpec) -> None:
    if op.buffers or op.state or op.update is not None:
        raise _NoSchedule("it updates buffers or state")
    if not op.outputs:
        raise _NoSchedule("it has no outputs")


def _differentiable(op: OpSpec) -> tuple[str, ...]:
    """Inputs and params that have a gradient, in the spec's order."""
    if op.backward is None or not op.backward.differentiable:
        return ()
    entries = {e.name: e.kind for e in op.backward.entries}
    return tuple(
        t.name for t in op.inputs + op.params if entries.get(t.name, "not_differentiable") != "not_differentiable"
    )


def _rows(verdict: Verdict) -> OpPlan:
    op = verdict.op
    _check_effects(op)
    shape, written = rows(op, [g for _, g in verdict.graphs])
    graphs = tuple((v, g) for (v, _), g in zip(verdict.graphs, written))
    forward, backward = set[str](), set[str]()
    for _, graph in graphs:
        keeps = {b.node.serial for b in graph.bindings if b.name in shape.saved}
        forward |= _reads(
            [*(t.node for t in graph.outputs), *(b.node for b in graph.bindings if b.name in shape.saved)]
        )
        backward |= _reads((t.node for t in graph.gradients), keeps)
    names = [t.name for t in op.arguments] + [t.name for t in op.outputs] + [f"d{t.name}" for t in op.outputs]
    reads = tuple(n for n in names if n in backward)
    cotangents = {f"d{o.name}" for o in op.outputs}
    over = ", ".join(a for a in graphs[0][1].axes if a in shape.reduced)
    return OpPlan(
        op, graphs, f"its reductions are all over ({over}): a program has whole rows, one value of the other axes each", (),
        tuple(n for n in names if n in forward), reads, _differentiable(op), shape.partial,
        (*(n for n in reads if n not in cotangents), *shape.saved), (_exacting(op, graphs, False), _exacting(op, graphs, True)), shape,
    )  # fmt: skip


def _pointwise(verdict: Verdict) -> OpPlan:
    op = verdict.op
    _check_effects(op)
    sliced = _sliced(g for _, g in verdict.graphs)
    forward, backward = set[str](), set[str]()
    for _, graph in verdict.graphs:
        _check_graph(op, graph, sliced)
        forward |= _reads(t.node for t in graph.outputs)
        backward |= _reads(stripped(t, graph) for t in graph.gradients if t.node is not None)
    gradients = _differentiable(op)
    names = [t.name for t in op.arguments] + [t.name for t in op.outputs] + [f"d{t.name}" for t in op.outputs]
    reads = tuple(n for n in names if n in backward)
    graph = verdict.graphs[0][1]
    return OpPlan(
        op, verdict.graphs, "every value has the axes of an output: one element at a time, 1-D over memory", sliced,
        tuple(n for n in names if n in forward), reads, gradients,
        tuple(n for n in gradients if _may_sum(op, graph, n, sliced)),
        tuple(n for n in reads if not (n.startswith("d") and any(n == f"d{o.name}" for o in op.outputs))),
        (_exacting(op, verdict.graphs, False), _exacting(op, verdict.graphs, True)),
    )  # fmt: skip


def _exacting(op: OpSpec, graphs: Iterable[tuple[Variant, Graph]], backward: bool) -> frozenset[str]:
    """Over all variants: a statement that they share has one text."""
    found: frozenset[str] = frozenset()
    for variant, graph in graphs:
        targets = [t for t in (graph.gradients if backward else graph.outputs) if t.node is not None]
        roots = [stripped(t, graph) if backward else t.node for t in targets]
        found |= exacting(op, variant, graph, [r for r in roots if r is not None])
    return found


def _reads(nodes: Iterable[Node | None], keeps: Collection[int] = ()) -> set[str]:
    """The tensors below the nodes; `keeps` are the serials of values that are read again themselves."""
    seen, pending, out = set[int](), [r for r in nodes if r is not None], set[str]()
    while pending:
        node = pending.pop()
        if node.serial in seen or node.serial in keeps:
            continue
        seen.add(node.serial)
        pending += node.args
        if node.op in ("read", "largest"):
            out.add(node.params[0])
    return out


def _sliced(graphs: Iterable[Graph]) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for graph in graphs:
        for node in walk(graph.roots()):
            if node.op == "at":
                found |= dict.fromkeys(node.params[0])
            elif node.op == "stack":
                found |= dict.fromkeys(node.params)
    return tuple(found)


def stripped(target: Target, graph: Graph) -> Node:
    """The gradient before it is summed over the axes that its tensor lacks: the kernels sum the rest."""
    node = target.node
    assert node is not None
    if node.op == "sum_to":
        node = node.args[0]
    if node.op == "reduce" and node.params[0] == "sum":
        node = node.args[0]
    return node


def _check_graph(op: OpSpec, graph: Graph, sliced: tuple[str, ...]) -> None:
    roots = [t.node for t in graph.outputs if t.node is not None]
    roots += [stripped(t, graph) for t in graph.gradients if t.node is not None]
    for node in walk(roots):
        if node.op not in TABLE and node.op not in _FREE and node.op != "sum_to":
            raise _NoSchedule(
                f"`{node.params[0] if node.op in ('reduce', 'scan') else node.op}` is no elementwise operation"
            )
        if node.op == "at" and not (
            node.args[0].op == "read" and all(i.op == "const" for i in node.args[1:]) and not node.params[1]
        ):
            raise _NoSchedule("`at` with an index that is not a constant")
        if node.op == "stack" and node not in roots:
            raise _NoSchedule("`stack` inside a formula")
        if node.op == "size":
            raise _NoSchedule("`size` inside a formula")
        if node.op == "read" and set(node.params[2]) & set(sliced) and not _only_sliced(node, roots, sliced):
            raise _NoSchedule(f"`{node.params[0]}` is read both part by part and whole")
    _check_axes(graph, sliced)


def _only_sliced(read: Node, roots: list[Node], sliced: tuple[str, ...]) -> bool:
    return all(n.op == "at" or read not in n.args for n in walk(roots)) and read not in roots


def _check_axes(graph: Graph, sliced: tuple[str, ...]) -> None:
    """Everything runs over the axes of the first output."""
    first = frozenset(graph.tensors[graph.outputs[0].name].axes) - frozenset(sliced)
    for tensor in graph.tensors.values():
        extra = frozenset(tensor.axes) - first - frozenset(sliced)
        if extra:
            raise _NoSchedule(f"`{tensor.name}` has the axes {', '.join(sorted(extra))}, which the output lacks")
        if tensor.role == "output" and frozenset(tensor.axes) - frozenset(sliced) != first:
            raise _NoSchedule("its outputs differ in axes")


def _may_sum(op: OpSpec, graph: Graph, name: str, sliced: tuple[str, ...]) -> bool:
    tensor: Tensor | None = graph.tensors.get(name)
    if tensor is None or frozenset(tensor.axes) & frozenset(sliced):
        return False
    whole = frozenset(graph.tensors[graph.outputs[0].name].axes)
    return (tensor.broadcast and len(op.arguments) > 1) or frozenset(tensor.axes) != whole - frozenset(sliced)


def bytes_per_element(plan: OpPlan, item: int) -> tuple[int, int]:
    """Bytes that forward and backward move an element, every tensor being full; what has one value a row, or a column, is not
    counted.

    Args:
        item: bytes of a float.
    """
    own = {"bool": 1, "i32": 4, "i64": 8}
    sizes = {}
    for tensor in plan.op.tensors:
        axes = {f.name for d in tensor.axes.dims for f in d.factors} if isinstance(tensor.axes, Axes) else {"..."}
        single = (
            not axes
            if plan.rows is None
            else not axes & plan.rows.reduced or not axes & plan.rows.kept and bool(plan.rows.kept)
        )
        sizes[tensor.name] = 0 if single else own.get(tensor.dtype, item)
        sizes[f"d{tensor.name}"] = sizes[tensor.name]
    forward = [*plan.forward_reads, *(o.name for o in plan.op.outputs)]
    backward = [*plan.backward_reads, *(f"d{n}" for n in plan.gradients)]
    return sum(sizes[n] for n in forward), sum(sizes[n] for n in backward)


def flops(nodes: Iterable[Node]) -> int:
    """Elementwise operations an element."""
    return sum(n.op in TABLE and not n.host for n in walk(list(nodes)))
