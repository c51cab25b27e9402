"""Schedules: which kernels an op becomes, and why.

Takes a `Verdict` (typed, differentiated, verified), returns an `OpPlan`, or a diagnostic that says what no schedule can do
yet. The choice is a total function of the graph, with a printed reason. `explain` prints this very plan.

    softcap  ->  pointwise: every value has the axes of the output
                 softcap_forward(x) -> y;  softcap_backward(y, dy) -> dx

What an op with state may be, `steps` says.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from codegen import steps
from codegen.diagnostics import Report
from codegen.ir import Graph, Node, Target, Tensor, spell, walk
from codegen.kinds import emitted
from codegen.precision import exacting
from codegen.primitives import TABLE
from codegen.residuals import residuals
from codegen.rows import expanded
from codegen.spec import Axes, Call, Name, OpSpec, of_kernels
from codegen.spec import spell as spelled
from codegen.stages import NoStage, Part, Stage, Store, cut, replaced, settled, shift, stored_tensor, telling
from codegen.variants import Atom, Value, Variant, atoms, axes_conditions, every_axes, subexpressions
from codegen.verify import Verdict

_FREE = ("const", "read", "attr", "size", "largest", "cast", "expand", "replace", "stop_gradient", "stack", "at")


@dataclass(frozen=True)
class OpPlan:
    """How an op is emitted: its stages, and the tensors that are kept or handed between them."""

    op: OpSpec
    graphs: tuple[tuple[Variant, Graph], ...]
    reason: str
    forward: tuple[Stage, ...]
    backward: tuple[Stage, ...]
    gradients: tuple[str, ...]
    """Inputs and params whose gradient a kernel writes."""
    residuals: tuple[str, ...]
    saved: tuple[Tensor, ...] = ()
    """Statements of the forward that are kept for the backward."""
    scratch: tuple[Tensor, ...] = ()
    """What a stage stores for a later one."""
    sliced: tuple[str, ...] = ()
    """Axes of fixed extent, read and written part by part."""
    refused: tuple[tuple[Variant, Graph], ...] = ()
    """Variants that the spec's conditions rule out."""
    needs_elements: tuple[str, ...] = ()
    """Axes that a reduction without an identity is over: there must be something to reduce."""

    @property
    def atoms(self) -> tuple[Atom, ...]:
        """The questions that the op's choices answer."""
        return atoms(self.op, Report())

    @property
    def schedule(self) -> str:
        if any(s.nest == "step" for s in self.forward):
            return "step"
        return "row" if any(s.nest == "rows" for s in (*self.forward, *self.backward)) else "pointwise"

    @property
    def name(self) -> str:
        return self.op.name

    @property
    def floats(self) -> tuple[tuple[Variant, Graph], ...]:
        """The variants that have gradients."""
        return tuple((v, g) for v, g in self.graphs if g.gradients)

    def stages(self, training: bool) -> tuple[Stage, ...]:
        """Those of the forward; without training nothing is kept for a backward."""
        if training:
            return self.forward
        kept = {t.name for t in self.saved} - {t.name for t in self.scratch}
        thinned = [
            replace(s, parts=tuple(
                replace(p, stores=own) for p in s.parts if (own := tuple(x for x in p.stores if x.name not in kept))
            )) for s in self.forward
        ]  # fmt: skip
        return tuple(s for s in thinned if s.parts)


def schedule(verdict: Verdict, report: Report) -> OpPlan | None:
    """Chooses the schedule of a verified op. None where the op is only verified (`schedule: none`) or none fits."""
    op = verdict.op
    if op.schedule == "none":
        return None
    try:
        allowed = emitted(op, [(v, g) for v, g in verdict.graphs if not _ruled_out(g)])
        _check_effects(op)
        _check_extents(op)
        _check_there(op, allowed)
        return replace(
            _step(op, allowed) if op.state else _plan(op, allowed),
            refused=tuple((v, g) for v, g in verdict.graphs if _ruled_out(g)),
        )
    except NoStage as fault:
        refuse(op, fault, report)
        return None


def refuse(op: OpSpec, fault: NoStage, report: Report) -> None:
    """Says what no schedule can do yet."""
    text = f"no schedule can emit `{op.name}` yet: {fault}"
    report.error(op.span, "no-schedule", text, "`schedule: none` verifies an op without emitting it")


def _ruled_out(graph: Graph) -> bool:
    return any(node.op == "const" and not node.params[0] for _, node in graph.requires)


def _check_extents(op: OpSpec) -> None:
    """What depends on the extents of a call is decided when it is planned: the dims of a tensor cannot."""
    for decl in op.tensors:
        for cond in axes_conditions(decl):
            if any(isinstance(e, Call) for e in subexpressions(cond)):
                raise NoStage(f"the shape of `{decl.name}` depends on extents: `{spelled(cond)}`")
    derived = {s.axis for s in op.sizes}
    for decl in op.arguments:
        for dim in (d for axes in every_axes(decl) for d in axes.dims if d.kind == "group"):
            if own := [f.name for f in dim.factors if f.name in derived]:
                raise NoStage(f"`{own[0]}`, which `sizes` gives, is a factor of a dim of `{decl.name}`")


def _check_there(op: OpSpec, graphs: Sequence[tuple[Variant, Graph]]) -> None:
    """Outputs that some choices lack: what a call returns is known before its tensors are."""
    given = {t.name for t in op.arguments}
    for decl in op.outputs:
        if decl.when is not None:
            parts = list(subexpressions(decl.when))
            if any(isinstance(e, Call) or isinstance(e, Name) and e.id in given for e in parts):
                raise NoStage(f"whether `{decl.name}` is there depends on more than attrs: `{spelled(decl.when)}`")
            own = [v for v, g in graphs if decl.name in g.tensors]
            telling(atoms(op, Report()), [v for v, _ in graphs], own, f"`{decl.name}`")
    if op.outputs and not all(g.outputs for _, g in graphs):
        raise NoStage("under some choices none of its outputs is there")
    for decl in op.buffers:
        if decl.when is not None:
            raise NoStage(f"the buffer `{decl.name}` is there under choices alone: write `optional: true`")


def _check_effects(op: OpSpec) -> None:
    if not op.outputs and not op.state:
        raise NoStage("it has no outputs")


def _step(op: OpSpec, graphs: tuple[tuple[Variant, Graph], ...]) -> OpPlan:
    """State updated in place, over many tensors at once."""
    stage = steps.stage(op, graphs)
    if op.schedule not in ("", "step"):
        raise NoStage(f"`{op.schedule}` was asked for, and it updates state")
    reason = "it updates state element by element: one launch takes all tensors of the same dtypes and choices"
    return OpPlan(op, graphs, reason, (stage,), (), (), ())


def _differentiable(op: OpSpec) -> tuple[str, ...]:
    """Inputs and params that have a gradient, in the spec's order."""
    if op.backward is None or not op.backward.differentiable:
        return ()
    entries = {e.name: e.kind for e in op.backward.entries}
    return tuple(
        t.name for t in op.inputs + op.params if entries.get(t.name, "not_differentiable") != "not_differentiable"
    )


def _plan(op: OpSpec, graphs: tuple[tuple[Variant, Graph], ...]) -> OpPlan:
    """Elementwise if every value has the axes of one element, else stages of rows; each direction by itself."""
    if op.schedule == "step":
        raise NoStage("`step` was asked for, and it has no state")
    fault = _elementwise_fault(op, graphs, ("forward", "backward"))
    if fault is None and op.schedule != "row":
        return _pointwise(op, graphs)
    if op.schedule == "pointwise":
        raise NoStage(f"`pointwise` was asked for, and {fault}")
    return _staged(op, graphs)


def _elementwise_fault(
    op: OpSpec, graphs: tuple[tuple[Variant, Graph], ...], directions: Collection[str]
) -> str | None:
    """Why a direction is not elementwise."""
    sliced = _sliced(g for _, g in graphs)
    try:
        for _, graph in graphs:
            if graph.updates:
                raise NoStage("it updates buffers")
            _check_graph(op, graph, sliced, directions)
    except NoStage as fault:
        return str(fault)
    return None


def _staged(op: OpSpec, original: tuple[tuple[Variant, Graph], ...]) -> OpPlan:
    graphs = tuple((v, g) for (v, _), g in zip(original, expanded([g for _, g in original])))
    names = [t.name for t in op.arguments] + [t.name for t in op.outputs] + [f"d{t.name}" for t in op.outputs]
    gradients = _differentiable(op)
    saved = _saved(op, graphs)
    for name in (n for n in _full(graphs, saved) if saved[n].axes):
        raise NoStage(
            f"the backward keeps `{name}`, which is as large as the operands: give what it has of whole rows, such as `rstd`, a line of its own"
        )
    taken = {
        *names,
        *(b.name for _, g in graphs for b in g.statements),
        *(a.name for a in op.attrs),
    }
    later = [(v, *_reading(g, saved)) for v, g in graphs if g.gradients]
    asked = atoms(op, Report())
    again: dict[tuple[Value, ...], set[str]] = {}
    for v, g, _ in later:  # which cotangents there are the forward cannot know
        read = _reads(t.node for t in g.gradients if t.node is not None)
        again.setdefault(_without_cotangents(v, asked), set()).update(read)

    def kept(variant: Variant, graph: Graph) -> Iterable[Store]:
        names = again.get(_without_cotangents(variant, asked), set())
        return (Store(n, node, node.axes, node.kind) for n, node in _kept(graph, saved) if n in names)

    targets = [(v, g, [*_outputs(g), *kept(v, g)]) for v, g in graphs]
    forward, handed = cut(targets, "forward", names, taken, _exacting(op, graphs, False), saved.values())
    exact = _exacting(op, graphs, True)
    summed = any(t.node is not None and t.node.op == "sum_to" for _, g in graphs for t in g.gradients)
    if not later:
        backward: tuple[Stage, ...] = ()
    elif summed:
        if saved:
            raise NoStage(f"the backward keeps `{next(iter(saved))}` beside operands that are broadcast")
        if (fault := _elementwise_fault(op, graphs, ("backward",))) is not None:
            raise NoStage(f"the gradient of what is broadcast is a sum, and {fault}")
        backward = (_elements(op, graphs, "backward", names, gradients, exact),)
    else:
        wanted = [(v, g, list(_gradients(g))) for v, g, _ in later]
        mapped = frozenset().union(
            *(
                {spell(new[n.serial]) for n in walk(g0.roots()) if spell(n) in exact}
                for (_, g0), (_, _, new) in zip([x for x in graphs if x[1].gradients], later)
            )
        )
        backward, more = cut(wanted, "backward", [*names, *saved], {*taken, *handed}, mapped, handed.values())
        handed |= more
    forward = settled(forward, graphs, asked, {v: {s.name for s in stores} for v, _, stores in targets})
    trained = [(v, g) for v, g, _ in later]
    backward = settled(backward, trained, asked, {v: {s.name for s in _gradients(g)} for v, g in trained})
    for stage in (*forward, *backward):
        _check_rows(stage)
        every = [v for v, g in graphs if stage.suffix.startswith("forward") or g.gradients]
        telling(asked, every, [p.variant for p in stage.parts], f"the stage `{stage.suffix}`")
    _check_choices(op, graphs, asked)
    reads = {n for s in backward for n in s.reads}
    cotangents = {f"d{o.name}" for o in op.outputs}
    residual = tuple(n for n in (*names, *saved) if n in reads and n not in cotangents)
    return OpPlan(
        op, graphs, _reason(graphs[0][1], (*forward, *backward)), forward, backward, gradients, residual, tuple(t for t in saved.values() if t.name in residual),
        tuple(handed.values()), needs_elements=_needs_elements(original),
    )  # fmt: skip


def _reason(graph: Graph, stages: Sequence[Stage]) -> str:
    """What the loops run along."""
    ops = {n.op for s in stages if s.nest == "rows" for p in s.parts for n in walk([x.node for x in p.stores])}
    what = " and ".join(w for op, w in (("reduce", "reductions"), ("scan", "scans")) if op in ops) or "reductions"
    over = dict.fromkeys(", ".join(a for a in graph.axes if a in s.reduced) for s in stages if s.nest == "rows")
    if len(over) == 1:
        return (
            f"its {what} are all over ({next(iter(over))}): a program has whole rows, one value of the other axes each"
        )
    return f"its {what} are over {' and '.join(f'({o})' for o in over)}: a stage of rows along each"


def _needs_elements(graphs: Sequence[tuple[Variant, Graph]]) -> tuple[str, ...]:
    found = {
        axis
        for _, g in graphs
        for n in walk(g.roots())
        if n.op == "reduce" and n.params[0] in ("max", "min", "argmax", "argmin")
        for axis in n.params[1]
    }
    return tuple(a for a in graphs[0][1].axes if a in found)


def _outputs(graph: Graph) -> Iterable[Store]:
    for target in (*graph.outputs, *graph.updates):
        if target.node is not None:
            tensor = graph.tensors[target.name]
            yield Store(target.name, target.node, frozenset(tensor.axes), tensor.kind)


def _gradients(graph: Graph) -> Iterable[Store]:
    for target in graph.gradients:
        if target.node is not None:
            axes = frozenset(graph.tensors[target.name].axes)
            yield Store(f"d{target.name}", target.node, axes, "float", target.name)


def _saved(op: OpSpec, graphs: Iterable[tuple[Variant, Graph]]) -> dict[str, Tensor]:
    """The statements of the forward that the backward reads again."""
    out: dict[str, Tensor] = {}
    for _, graph in graphs:
        names = {b.name: b.node for b in graph.bindings}
        for r in residuals(op, graph):
            if r.name in graph.tensors:
                updated = [t.name for t in graph.updates if t.node is not None]
                if r.name in updated:
                    raise NoStage(f"the backward reads `{r.name}`, which the forward overwrites")
                continue
            if r.name not in names:
                raise NoStage(
                    f"the backward reads `{r.name}`, which has no name in the forward to be kept by: give it a line of its own"
                )
            if any(t.name == r.name for t in op.outputs):
                raise NoStage(
                    f"the backward keeps `{r.name}`, which is an output under other choices: name the two apart"
                )
            if what := of_kernels(op, r.name):
                raise NoStage(f"the backward keeps `{r.name}`, which is {what}: give it another name")
            tensor = stored_tensor(r.name, "saved", names[r.name], graph)
            first = out.setdefault(r.name, tensor)
            if first.axes != tensor.axes:
                raise NoStage(f"the backward keeps `{r.name}`, whose axes depend on a choice")
            if first.kind != tensor.kind:
                raise NoStage(f"the backward keeps `{r.name}`, whose kind depends on a choice: name the two apart")
    return out


def _full(graphs: Iterable[tuple[Variant, Graph]], saved: Mapping[str, Tensor]) -> list[str]:
    """Those of the saved values that have all axes of the largest tensor: one value an element."""
    found = []
    for _, graph in graphs:
        whole = max((frozenset(t.axes) for t in graph.tensors.values()), key=len)
        found += [name for name, node in _kept(graph, saved) if node.axes >= whole]
    return list(dict.fromkeys(found))


def _without_cotangents(variant: Variant, asked: Iterable[Atom]) -> tuple[Value, ...]:
    """What a variant has chosen before anything is differentiated."""
    return tuple(variant[a.key] for a in asked if a.kind != "cotangent")


def _kept(graph: Graph, saved: Mapping[str, Tensor]) -> Iterable[tuple[str, Node]]:
    """The statements that are kept under that name: under another choice one of the same name may have other axes."""
    found = ((b.name, b.node) for b in graph.bindings if b.name in saved and b.node.op not in ("read", "const"))
    return [(name, node) for name, node in found if node.axes == frozenset(saved[name].axes)]


def _reading(graph: Graph, saved: Mapping[str, Tensor]) -> tuple[Graph, dict[int, Node]]:
    """The graph of the backward: what was kept is read."""
    known = {node.serial: graph.builder.read(saved[n]) for n, node in _kept(graph, saved)}
    return replaced(graph, known, saved.values())


def _check_rows(stage: Stage) -> None:
    """What a kernel of rows can do."""
    if stage.nest != "rows":
        return
    for part in stage.parts:
        for store in part.stores:
            if store.gradient and part.graph.tensors[store.gradient].broadcast and store.node.op != "const":
                raise NoStage(f"`{store.gradient}` may be broadcast, and its gradient would be a sum")
            if store.partial and store.axes != stage.reduced:
                raise NoStage(f"the gradient of `{store.gradient}` is summed over part of the rows")
            for node in walk([store.node]):
                if node.op == "at" and not _takeable(node, stage):
                    raise NoStage(
                        "`at` of what is no float tensor of the caller, by several axes, or with a `fill` that is not NaN "
                        "where it is no shift along the row"
                    )
                if node.op == "scan":
                    _check_scan(node, stage, part.graph)
                if node.op in ("dot", "add_at", "stack", "uniform", "sum_to"):
                    raise NoStage(f"`{node.op}` in rows has no kernel yet")


def _check_scan(node: Node, stage: Stage, graph: Graph) -> None:
    """A scan needs the order of the elements along its axis: that of a row of one axis, which no memory order changes."""
    axis = node.params[1]
    if graph.axes[axis].pack or axis == "...":
        raise NoStage(f"`{node.params[0]}` along a pack, whose axes a kernel takes in the order of memory")
    if stage.reduced != {axis}:
        raise NoStage(f"`{node.params[0]}` along `{axis}` beside reductions over other axes")


def _takeable(node: Node, stage: Stage) -> bool:
    """Whether one element of a tensor is taken: where its index is out of range there is NaN, or beside a row anything."""
    fill = node.args[2:]
    by = shift(node)
    if by is not None and stage.reduced == {by[0]}:
        return node.kind == node.args[0].kind == "float"
    nan = all(f.op == "const" and f.params[0] != f.params[0] for f in fill)
    return node.args[0].op == "read" and len(node.params[0]) == 1 and nan and node.kind == "float"


def _check_choices(op: OpSpec, graphs: Sequence[tuple[Variant, Graph]], asked: Sequence[Atom]) -> None:
    """What depends on choices must depend on single ones."""
    for decl in op.outputs:
        shapes: dict[tuple[str, ...], list[Variant]] = {}
        every = [(v, g) for v, g in graphs if decl.name in g.tensors]
        for variant, graph in every:
            shapes.setdefault(graph.tensors[decl.name].axes, []).append(variant)
        for part in list(shapes.values())[1:]:
            if len(telling(asked, [v for v, _ in every], part, f"the shape of `{decl.name}`")) != 1:
                raise NoStage(f"the shape of `{decl.name}` depends on several choices")
    for decl in op.buffers:
        there = [v for v, g in graphs if decl.name in g.tensors]
        writing = [v for v, g in graphs if any(t.name == decl.name and t.node is not None for t in g.updates)]
        if writing:
            telling(asked, there, writing, f"the update of `{decl.name}`")


def _pointwise(op: OpSpec, graphs: tuple[tuple[Variant, Graph], ...]) -> OpPlan:
    names = [t.name for t in op.arguments] + [t.name for t in op.outputs] + [f"d{t.name}" for t in op.outputs]
    gradients, sliced = _differentiable(op), _sliced(g for _, g in graphs)
    saved = _saved(op, graphs)
    full = [] if sliced else _full(graphs, saved)
    for name in (n for n in saved if n not in full):
        few = "stands beside parts of an axis" if sliced else "has fewer axes than the op"
        raise NoStage(f"the backward keeps `{name}`, which {few}: leave it out of `save`, to be computed again")
    exact = _exacting(op, graphs, True)
    forward = _elements(op, graphs, "forward", names, gradients, _exacting(op, graphs, False))
    backward = None
    if gradients:
        later = tuple((v, _reading(g, saved)[0]) for v, g in graphs)
        backward = _elements(op, later, "backward", [*names, *saved], gradients, exact)
    if saved and backward is not None:  # what the backward needs in full, the forward computes in full
        forward = _keeping(replace(forward, exacting=forward.exacting | exact), backward, saved, names)
    reads = () if backward is None else backward.reads
    cotangents = {f"d{o.name}" for o in op.outputs}
    return OpPlan(
        op, graphs, "every value has the axes of an output: one element at a time, 1-D over memory", (forward,),
        () if backward is None else (backward,), gradients, tuple(n for n in reads if n not in cotangents),
        tuple(t for t in saved.values() if t.name in reads), sliced=sliced,
    )  # fmt: skip


def _elements(op: OpSpec, graphs: tuple[tuple[Variant, Graph], ...], direction: str, names: Sequence[str], gradients: Sequence[str],
              exact: frozenset[str]) -> Stage:  # fmt: skip
    """The elementwise stage of a direction."""
    sliced = _sliced(g for _, g in graphs)
    read = set[str]()
    parts = []
    for variant, graph in graphs:
        if direction == "forward":
            stores = tuple(_outputs(graph))
            read |= _reads(s.node for s in stores)
        else:
            stores = tuple(_gradients(graph))
            read |= _reads(stripped(t, graph) for t in graph.gradients if t.node is not None)
        if stores:
            parts.append(Part(variant, graph, stores))
    summed = (
        tuple(n for n in gradients if any(_may_sum(op, g, n, sliced) for _, g in graphs))
        if direction == "backward"
        else ()
    )
    return Stage(direction, "elements", tuple(parts), tuple(n for n in names if n in read), exact, summed=summed)


def _keeping(forward: Stage, backward: Stage, saved: Mapping[str, Tensor], names: Sequence[str]) -> Stage:
    """The elementwise forward with what its backward reads of the saved values; its reads are in the order of `names`."""
    read = {n for p in backward.parts for n in _reads(s.node for s in p.stores)}
    parts = []
    for part in forward.parts:
        kept = (Store(n, node, node.axes, node.kind) for n, node in _kept(part.graph, saved) if n in read)
        parts.append(replace(part, stores=(*part.stores, *kept)))
    needed = {n for p in parts for n in _reads(s.node for s in p.stores)}
    return replace(forward, parts=tuple(parts), reads=tuple(n for n in names if n in needed))


def _exacting(op: OpSpec, graphs: Iterable[tuple[Variant, Graph]], backward: bool) -> frozenset[str]:
    """Over all variants: a statement that they share has one text."""
    found: frozenset[str] = frozenset()
    for variant, graph in graphs:
        targets = [t for t in (graph.gradients if backward else graph.outputs) if t.node is not None]
        roots = [stripped(t, graph) if backward else t.node for t in targets]
        found |= exacting(op, variant, graph, [r for r in roots if r is not None])
    return found


def _reads(nodes: Iterable[Node | None]) -> set[str]:
    """The tensors below the nodes."""
    return {n.params[0] for n in walk([r for r in nodes if r is not None]) if n.op in ("read", "largest")}


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


def _check_graph(op: OpSpec, graph: Graph, sliced: tuple[str, ...], directions: Collection[str]) -> None:
    roots = [t.node for t in graph.outputs if t.node is not None] if "forward" in directions else []
    if "backward" in directions:
        roots += [stripped(t, graph) for t in graph.gradients if t.node is not None]
    whole = frozenset[str]().union(*(t.axes for t in graph.tensors.values())) - frozenset(sliced)
    for target in graph.gradients if "backward" in directions else ():
        if target.node is not None:
            _check_sum(target, graph, whole)
    for node in walk(roots):
        if node.op not in TABLE and node.op not in _FREE and node.op != "sum_to":
            raise NoStage(
                f"`{node.params[0] if node.op in ('reduce', 'scan') else node.op}` is no elementwise operation"
            )
        if node.op == "at" and not (
            node.args[0].op == "read" and all(i.op == "const" for i in node.args[1:]) and not node.params[1]
        ):
            raise NoStage("`at` with an index that is not a constant")
        if node.op == "stack" and node not in roots:
            raise NoStage("`stack` inside a formula")
        if node.op == "size" and frozenset(node.params) != whole:
            raise NoStage("`size` of a part of the axes inside a formula")
        if node.op == "read" and set(node.params[2]) & set(sliced) and not _only_sliced(node, roots, sliced):
            raise NoStage(f"`{node.params[0]}` is read both part by part and whole")
    if "forward" in directions:
        _check_axes(graph, sliced)


def _only_sliced(read: Node, roots: list[Node], sliced: tuple[str, ...]) -> bool:
    return all(n.op == "at" or read not in n.args for n in walk(roots)) and read not in roots


def _check_axes(graph: Graph, sliced: tuple[str, ...]) -> None:
    """Everything runs over the axes of the first output."""
    first = frozenset(graph.tensors[graph.outputs[0].name].axes) - frozenset(sliced)
    for tensor in graph.tensors.values():
        extra = frozenset(tensor.axes) - first - frozenset(sliced)
        if extra:
            raise NoStage(f"`{tensor.name}` has the axes {', '.join(sorted(extra))}, which the output lacks")
        if tensor.role == "output" and frozenset(tensor.axes) - frozenset(sliced) != first:
            raise NoStage("its outputs differ in axes")


def _check_sum(target: Target, graph: Graph, whole: frozenset[str]) -> None:
    """A kernel of elements sums a gradient over all axes that its tensor lacks and others have: it must be a sum over them."""
    tensor, node = graph.tensors.get(target.name), target.node
    assert node is not None
    node = node.args[0] if node.op == "sum_to" else node
    summed = frozenset(node.params[1]) if node.op == "reduce" and node.params[0] == "sum" else frozenset[str]()
    lacked = whole - frozenset(tensor.axes) if tensor is not None else frozenset[str]()
    if lacked - summed - (whole - node.axes if node.op == "const" else frozenset()):
        axes = ", ".join(sorted(lacked - summed))
        raise NoStage(f"the gradient of `{target.name}` lacks ({axes}), which others have, and is no sum over it")


def _may_sum(op: OpSpec, graph: Graph, name: str, sliced: tuple[str, ...]) -> bool:
    tensor: Tensor | None = graph.tensors.get(name)
    if tensor is None or frozenset(tensor.axes) & frozenset(sliced):
        return False
    whole = frozenset[str]().union(*(t.axes for t in graph.tensors.values()))
    return (tensor.broadcast and len(op.arguments) > 1) or frozenset(tensor.axes) != whole - frozenset(sliced)


def bytes_per_element(plan: OpPlan, item: int) -> tuple[int, int]:
    """Bytes that forward and backward move an element, every tensor being full; what has one value a row, or a column, is not
    counted, and of what is kept for a backward only that it is read.

    Args:
        item: bytes of a float.
    """
    own = {"bool": 1, "i32": 4, "i64": 8}
    sizes = {}
    for tensor in plan.op.tensors:
        axes = {f.name for d in tensor.axes.dims for f in d.factors} if isinstance(tensor.axes, Axes) else {"..."}
        rows = next((s for s in (*plan.forward, *plan.backward) if s.nest == "rows"), None)
        single = not axes if rows is None else not axes & rows.reduced or not axes & rows.kept and bool(rows.kept)
        kept = tensor.role == "state" and tensor.dtype == "compute"
        sizes[tensor.name] = 0 if single else 4 if kept else own.get(tensor.dtype, item)
        sizes[f"d{tensor.name}"] = sizes[tensor.name]

    def moved(stages: Sequence[Stage]) -> int:
        return sum(sizes.get(n, 0) for s in stages for n in (*s.reads, *s.stored))

    forward = moved(plan.forward)
    if plan.schedule == "pointwise":
        sizes |= {t.name: max(item, 4) if t.dtype == "compute" else own[t.dtype] for t in plan.saved}
    return forward, moved(plan.backward)


def flops(nodes: Iterable[Node]) -> int:
    """Elementwise operations an element."""
    return sum(n.op in TABLE and not n.host for n in walk(list(nodes)))
