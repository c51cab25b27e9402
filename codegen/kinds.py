"""What a call computes in that is given ints and truth values alone.

Takes the graph of one variant, says whether its forward computes with floats. Elements of class `any` are moved as they are, and
constants have no dtype: neither is computed with.

    y = t / 2       True: the ints are computed with as floats
    y = t + 2       False
"""

from __future__ import annotations

from collections.abc import Sequence

from codegen.ir import Graph, Node, Target, walk
from codegen.spec import FLOATS, OpSpec
from codegen.variants import KINDS, NUMBER_KIND, Variant

_MOVES = ("where", "at", "expand", "stack", "replace", "stop_gradient")


def computes_floats(graph: Graph) -> bool:
    """Whether a value of the forward is a float, and neither a constant nor an element that is only moved."""
    moved: set[int] = set()
    for node in walk(t.node for t in (*graph.outputs, *graph.updates) if t.node is not None):
        if node.kind != "float" or node.op == "const":
            continue
        if _is_moved(graph, node, moved):
            moved.add(node.serial)
        else:
            return True
    return False


def _is_moved(graph: Graph, node: Node, moved: set[int]) -> bool:
    if node.op == "read":
        return graph.tensors[node.params[0]].dtype == "any"
    if node.op not in _MOVES:
        return False
    return all(a.op == "const" or a.serial in moved for a in node.args if a.kind == "float")


def may_lack_floats(op: OpSpec) -> bool:
    """Whether there is a call of the op with ints and truth values alone."""
    floats = [t for t in op.arguments if t.dtype in ("float", *FLOATS)]
    return len(floats) < len(op.arguments) and all(t.optional or t.scalar for t in floats)


def floats_of_ints(op: OpSpec, graphs: Sequence[tuple[Variant, Graph]]) -> bool:
    """Whether what is given as ints or truth values alone is computed with as floats: also where `emitted` has left no other variant."""
    whole = [g for v, g in graphs if v.get(NUMBER_KIND, "") != "float"]
    return may_lack_floats(op) and (not whole or any(computes_floats(g) for g in whole))


def emitted(op: OpSpec, graphs: Sequence[tuple[Variant, Graph]]) -> tuple[tuple[Variant, Graph], ...]:
    """The variants that kernels are of: where ints are computed with as floats, those of floats do for them too."""
    whole = not floats_of_ints(op, graphs)
    return tuple((v, g) for v, g in graphs if whole or v.get(NUMBER_KIND, "float") == "float")


def mixed(op: OpSpec, variant: Variant, graph: Graph) -> Target | None:
    """A result that stays of the kind of tensors of class `number` or `integral`, where these are also computed with as floats.

    A kernel computes in one dtype, and tells by it which kind they are.
    """
    if variant.get(NUMBER_KIND, "float") == "float" or not may_lack_floats(op) or not computes_floats(graph):
        return None
    classes = [t.dtype for t in op.arguments if t.dtype in KINDS]
    kept = (t for t in (*graph.outputs, *graph.updates) if "integral" in classes or op.tensor(t.name).dtype in KINDS)
    return next(kept, None)
