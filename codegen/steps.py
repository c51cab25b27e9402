"""Steps: ops that update state in place and have no outputs. One launch takes any number of tensors.

Takes an op with state and its typed variants, returns the one `Stage` of its launch, or says what no such launch can do.

    param: param - lr * d; momentum_buffer: b    ->  reads grad, param, momentum_buffer; writes the last two
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from codegen.ir import Graph, Node, walk
from codegen.primitives import TABLE
from codegen.spec import COUNTER, FLOATS, FRESH, PACK, Axes, OpSpec, TensorDecl
from codegen.stages import NoStage, Part, Stage, Store
from codegen.variants import Variant

_TAKEN = ("copy", COUNTER, FRESH)
"""What goes with every parameter, by name."""
_FREE = ("const", "read", "attr", "cast", "expand", "replace", "stop_gradient")


def trained(op: OpSpec) -> TensorDecl:
    """The state that is the caller's own: the one without `init`."""
    return next(t for t in op.state if t.init is None and not t.on_host)


def tensors(op: OpSpec) -> tuple[TensorDecl, ...]:
    """What a step reads and writes in memory, in the spec's order: the gradient, then the state."""
    return (*op.inputs, *(t for t in op.state if not t.on_host))


def stage(op: OpSpec, graphs: Sequence[tuple[Variant, Graph]]) -> Stage:
    """The one stage of a step. Raises NoStage where an op is none."""
    _check_roles(op)
    for decl in tensors(op):
        _check_tensor(decl)
    parts = []
    for variant, graph in graphs:
        _check_updates(op, graph)
        stores = tuple(_stores(op, graph))
        for store in stores:
            _check_nodes([store.node])
        parts.append(Part(variant, graph, stores))
    read = {n.params[0] for p in parts for n in walk([s.node for s in p.stores]) if n.op == "read"}
    reads = tuple(t.name for t in tensors(op) if t.name in read)
    return Stage("step", "step", tuple(parts), reads, frozenset())


def _check_roles(op: OpSpec) -> None:
    if op.outputs:
        raise NoStage("it has state and outputs: a step has no outputs")
    if op.backward is not None and op.backward.differentiable:
        raise NoStage("it has state and a derivative: a step has `backward: not_differentiable`")
    if op.params or op.buffers:
        other = (*op.params, *op.buffers)[0]
        raise NoStage(f"`{other.name}` is a {other.role}: a step has one input, the gradient, and state")
    if len(op.inputs) != 1:
        raise NoStage(f"it has {len(op.inputs)} inputs: a step has one, the gradient")
    own = [t.name for t in op.state if t.init is None and not t.on_host]
    if len(own) != 1:
        names = f": {', '.join(f'`{n}`' for n in own)}" if own else ""
        raise NoStage(
            f"it has {len(own)} tensors of state without `init`{names}; a step has one, the tensor that it trains"
        )
    if trained(op).when is not None:
        raise NoStage(f"`{trained(op).name}`, the tensor that it trains, is not always there")
    for tensor in op.state:
        if tensor.on_host and (tensor.init is None or tensor.when is not None):
            raise NoStage(f"`{tensor.name}` has no axes: such state is a number that is always there, with an `init`")
    if op.update is not None and op.update.when is not None:
        raise NoStage("`when` under `update`: whether a step is taken, the caller says")


def _check_tensor(decl: TensorDecl) -> None:
    axes = decl.axes
    plain = isinstance(axes, Axes) and len(axes.dims) == 1 and axes.dims[0].factors[0].name == PACK
    if not plain:
        raise NoStage(f"`{decl.name}` has other axes than `[...]`: the tensors of a step have one shape")
    if decl.dtype not in ("float", "compute", *FLOATS):
        raise NoStage(f"`{decl.name}` is {decl.dtype}: the tensors of a step are floats")
    if decl.name in _TAKEN:
        raise NoStage(f"`{decl.name}` is a name that optimizers use themselves")
    if decl.optional or decl.scalar:
        raise NoStage(
            f"`{decl.name}` may be {'absent' if decl.optional else 'a number'}: the tensors of a step are there"
        )


def _check_updates(op: OpSpec, graph: Graph) -> None:
    """Everything that is there is written, and what the host keeps is known there."""
    updated = {t.name: t.node for t in graph.updates}
    for decl in op.state:
        if decl.name not in graph.tensors:
            continue
        node = updated.get(decl.name)
        if node is None:
            raise NoStage(f"nothing updates `{decl.name}`")
        if decl.on_host and not node.host:
            raise NoStage(f"`{decl.name}` has no axes, and its update reads tensors: such state is kept on the host")


def _stores(op: OpSpec, graph: Graph) -> Iterable[Store]:
    names = {t.name for t in tensors(op)}
    for target in graph.updates:
        if target.name in names and target.node is not None:
            yield Store(target.name, target.node, frozenset(graph.tensors[target.name].axes), "float")


def _check_nodes(roots: Sequence[Node]) -> None:
    for node in walk(roots):
        if node.op == "size":
            raise NoStage("`size` in the formula of a step, whose tensors have many sizes")
        if node.op not in TABLE and node.op not in _FREE:
            name = node.params[0] if node.op in ("reduce", "scan") else node.op
            raise NoStage(f"`{name}` is no elementwise operation")
