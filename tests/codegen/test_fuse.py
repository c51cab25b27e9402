"""`pullback fuse`: what of a recorded graph becomes one op, its spec, and what is said where nothing can be done."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from codegen import emit, fuse, groups, manifest
from codegen.cli import main
from codegen.config import Config
from codegen.diagnostics import Report
from codegen.fused import confirm, member, pattern
from codegen.loader import load, load_text
from codegen.spec import OpSpec

ROOT = Path(__file__).parents[2]
ROWS: list[Any] = ["batch", 64]


class Recording:
    """A graph as a recorder describes it."""

    def __init__(self) -> None:
        self.data: dict[str, Any] = {
            "format": groups.FORMAT,
            "tensors": {},
            "nodes": [],
            "outputs": [],
            "stop_gradient": [],
        }
        self.shapes: dict[str, tuple[list[Any], str]] = {}

    def given(self, name: str, shape: list[Any] = ROWS, role: str = "input", dtype: str = "f32") -> str:
        self.data["tensors"][name] = {"role": role, "dtype": dtype, "shape": shape}
        self.shapes[name] = (shape, dtype)
        return name

    def node(self, op: str, shape: list[Any] | None = None, dtype: str = "", /, **given: Any) -> str:
        """A node whose result has the shape and dtype of its first operand, unless another is given. `_n=3` is an attr,
        `updates=["mean"]` the arguments that it changes in place."""
        more = {"updates": given.pop("updates")} if "updates" in given else {}
        inputs = {k: v for k, v in given.items() if not k.startswith("_")}
        first = next(v for v in inputs.values() if isinstance(v, str))
        name = f"{op}_{sum(n['op'] == op for n in self.data['nodes']) + 1}"
        shape = self.shapes[first][0] if shape is None else shape
        dtype = dtype or self.shapes[first][1]
        attrs = {k[1:]: v for k, v in given.items() if k.startswith("_")}
        made = {"name": f"{name}.y", "dtype": dtype, "shape": shape}
        node = {"name": name, "op": op, "attrs": attrs, "inputs": inputs, "outputs": {"y": made}, **more}
        self.data["nodes"].append(node)
        self.shapes[f"{name}.y"] = (shape, dtype)
        return f"{name}.y"

    def ends(self, *outputs: str, stop: tuple[str, ...] = ()) -> dict[str, Any]:
        return {**self.data, "outputs": list(outputs), "stop_gradient": list(stop)}


@cache
def specs() -> tuple[OpSpec, ...]:
    """The catalogue without ops that stand for others: what they would take is to be composed here."""
    report = Report()
    found = load([ROOT / "specs"], report, ROOT)
    assert not report.errors
    return tuple(op for op in found if not op.fuses)


def found(graph: dict[str, Any], known: tuple[OpSpec, ...] | None = None) -> tuple[fuse.Group, ...]:
    return fuse.find(groups.read(graph), specs() if known is None else known, "specs/fused.yaml")


def only(graph: dict[str, Any]) -> OpSpec:
    """The one new op of a graph."""
    (group,) = found(graph)
    assert group.text, group.reason
    report = Report()
    (op,) = load_text(group.text, report)
    assert not report.errors
    return op


def lines(group: fuse.Group) -> list[str]:
    return [line.strip() for line in group.text.split("\n")]


def fuses(graph: dict[str, Any]) -> list[tuple[str, ...]]:
    return [g.nodes for g in found(graph) if g.op]


def sum_gate(**attrs: Any) -> dict[str, Any]:
    g = Recording()
    s = g.node("add", x=g.given("x"), other=g.given("skip"), _alpha=1.0)
    return g.ends(g.node("gelu", x=s, _approximate="tanh", **attrs))


# ---------------------------------------------------------------------------------------------- what is composed

SUM_GATE = """\
- op: add_gelu
  doc: add and gelu in one kernel.
  inputs: {x: [...], skip: [...]}
  outputs: {y: [...]}
  forward: |
    add_y = x + skip
    z = maximum(add_y, -100)  # the cdf is 0 there, and -inf * 0 would be NaN
    z2 = minimum(z * z, 1e4)  # the cdf is 1 there, and the square would overflow
    u = 2 * sqrt(2 / pi) * z * (1 + 0.044715 * z2)
    cdf = sigmoid(u)
    y = z * cdf
  backward:
    let: |
      du = 2 * sqrt(2 / pi) * (1 + 3 * 0.044715 * z2)
      pdf = du * cdf * sigmoid(-u)
      d_add_y = dy * (cdf + minimum(z, 100) * pdf)
    x: d_add_y
    skip: d_add_y
  reference: torch.nn.functional.gelu(torch.add(x, skip, alpha=1), approximate='tanh')
  fuses: |
    add_y = add(x=x, other=skip, alpha=1)
    y = gelu(x=add_y, approximate="tanh")
"""


def test_a_chain_is_composed_of_its_specs() -> None:
    """The choice is taken, the number that nobody chose is a constant that does nothing, gradients are the specs' own."""
    (group,) = found(sum_gate())
    assert (group.nodes, group.op, group.text) == (("add_1", "gelu_1"), "add_gelu", SUM_GATE)


def test_a_number_that_was_chosen_is_an_attr() -> None:
    g = Recording()
    s = g.node("add", x=g.given("x"), other=g.given("z"), _alpha=0.25)
    op = only(g.ends(g.node("mul", x=s, other=2.5)))
    assert {a.name: a.default.value for a in op.attrs if hasattr(a.default, "value")} == {"alpha": 0.25, "other": 2.5}


def test_what_is_read_outside_is_a_further_output() -> None:
    """Its store is due in any case; nothing is computed twice."""
    g = Recording()
    s = g.node("add", x=g.given("x"), other=g.given("z"), _alpha=1)
    y = g.node("relu", x=s)
    view = g.node("reshape", x=s)
    op = only(g.ends(y, view))
    assert [o.name for o in op.outputs] == ["add_y", "y"]


def test_fan_out_and_fan_in_stay_in_the_group() -> None:
    g = Recording()
    x = g.given("x")
    e = g.node("exp", x=x)
    y = g.node("add", x=g.node("relu", x=e), other=g.node("mul", x=e, other=x), _alpha=1)
    op = only(g.ends(y))
    assert op.name == "exp_relu_mul_add" and [o.name for o in op.outputs] == ["y"]


def test_nothing_is_fused_around_what_needs_it_and_is_needed() -> None:
    """A value that leaves the group must not come back into it."""
    g = Recording()
    s = g.node("exp", x=g.given("x"))
    view = g.node("reshape", x=s)
    y = g.node("add", x=s, other=view, _alpha=1)
    assert found(g.ends(y)) == ()


def test_two_groups_never_wait_for_each_other() -> None:
    g = Recording()
    x, z = g.given("x"), g.given("z")
    a, b = g.node("exp", x=x), g.node("sin", x=z)
    va, vb = g.node("reshape", x=a), g.node("reshape", x=b)
    a2 = g.node("add", x=a, other=vb, _alpha=1)
    b2 = g.node("add", x=b, other=va, _alpha=1)
    graph = groups.read(g.ends(a2, b2))
    made = fuses(g.ends(a2, b2))
    block = list(range(len(graph.nodes)))
    for nodes in made:
        places = [k for k, n in enumerate(graph.nodes) if n.name in nodes]
        block = [places[0] if k in places else n for k, n in enumerate(block)]
    assert len(made) == 1 and groups.in_order(graph, block)


def test_operands_broadcast() -> None:
    """A small operand is stretched; a small result that others read cannot be one of the whole's."""
    g = Recording()
    w = g.node("exp", x=g.given("w", [64]))
    y = g.node("mul", x=g.given("x"), other=w)
    op = only(g.ends(y))
    assert op.name == "exp_mul" and all(t.broadcast for t in op.inputs)
    assert found(g.ends(y, w)) == ()


def test_an_absent_tensor_is_not_there() -> None:
    g = Recording()
    s = g.node("add", x=g.given("x"), other=g.given("z"), _alpha=1)
    y = g.node("rms_norm", x=s, weight=None, _eps=1e-6, _offset=0)
    (group,) = found(g.ends(y))
    assert "y = add_y * rstd" in lines(group)
    assert "y = rms_norm(x=add_y, eps=1e-06, offset=0)" in lines(group)


def test_a_row_op_takes_what_is_before_and_after_it() -> None:
    g = Recording()
    s = g.node("add", x=g.given("x"), other=g.given("z"), _alpha=1)
    n = g.node("rms_norm", x=s, weight=g.given("layers.0.norm.weight", [64], "param"), _eps=1e-5, _offset=0)
    y = g.node("relu", x=g.node("add", x=n, other=g.given("fc.bias", [64], "param"), _alpha=1))
    op = only(g.ends(y))
    assert op.name == "add_rms_norm_add_relu"
    assert [t.name for t in op.inputs] == ["x", "z", "bias"] and [t.name for t in op.params] == ["weight"]
    assert [(a.name, a.default.value) for a in op.attrs if hasattr(a.default, "value")] == [("eps", 1e-5)]


def test_a_result_that_cannot_be_computed_again_is_an_output() -> None:
    """The backward of a softmax reads its result, and what comes after reads it too."""
    g = Recording()
    y = g.node("mul", x=g.node("softmax", x=g.given("x"), _dim=-1), other=g.given("z"))
    assert [o.name for o in only(g.ends(y)).outputs] == ["softmax_y", "y"]


def test_a_reduced_value_stretches_where_its_extent_stays() -> None:
    g = Recording()
    e = g.node("exp", x=g.given("x"))
    y = g.node("div", x=e, other=g.node("sum", ["batch", 1], x=e, _dim=-1, _keepdim=True))
    op = only(g.ends(y))
    assert op.name == "exp_sum_div" and [a.name for a in op.attrs] == ["dim"]


def test_a_square_does_not_hide_which_axis_is_meant() -> None:
    """64 by 64: a sum without its axis aligns with the last axis, not with the rows that it is of."""
    g = Recording()
    x = g.given("x", [64, 64])
    s = g.node("sum", [64], x=x, _dim=-1, _keepdim=False)
    assert found(g.ends(g.node("div", x=x, other=s))) == ()
    rows = Recording()
    weighted = rows.node("mul", x=rows.given("x", [64, 64]), other=rows.given("w", [64]))
    graph = groups.read(rows.ends(rows.node("softmax", x=weighted, _dim=0)))
    members = {k: member(op, node.attrs) for k, node in enumerate(graph.nodes) for op in specs() if op.name == node.op}
    axes = groups.axes_of(graph, {k: m for k, m in members.items() if m is not None}, (0, 1))
    assert axes is not None and (axes["w"], axes["x"]) == ({"..."}, {"...", "N"})


def test_a_place_matches_by_axes_not_by_extents() -> None:
    """An op for weights along the axis of the softmax is not one for weights across it, though the shapes are alike."""
    texts = []
    for dim in (-1, 0):
        g = Recording()
        s = g.node("mul", x=g.given("x", [64, 64]), other=g.given("w", [64]))
        texts.append(g.ends(g.node("softmax", x=s, _dim=dim)))
    (first,) = found(texts[0])
    known = (*specs(), *load_text(first.text, Report()))
    (again,) = found(texts[0], known)
    assert (again.op, again.text) == (first.op, "")
    (other,) = found(texts[1], known)
    assert other.op == "" and "the gradient of what is broadcast is a sum" in other.reason


def test_gradients_stop_where_the_graph_says_so() -> None:
    g = Recording()
    x = g.given("x")
    e = g.node("exp", x=x)
    (group,) = found(g.ends(g.node("mul", x=e, other=x), stop=(e,)))
    assert "y = stop_gradient(exp_y) * x" in lines(group)
    assert "x: dy * stop_gradient(exp_y)" in lines(group)
    assert "exp_y = stop_gradient(exp(x=x))" in lines(group)
    (free,) = found(g.ends("mul_1.y"))
    assert free.text != group.text and free.op == "exp_mul"


def test_a_node_that_stops_a_gradient_is_a_mark_of_what_it_reads() -> None:
    """It is folded into the node before it; several in a row are one."""
    texts = []
    for count in (1, 2):
        g = Recording()
        x = g.given("x")
        e = g.node("exp", x=x)
        for _ in range(count):
            e = g.node("stop_gradient", x=e)
        (group,) = found(g.ends(g.node("mul", x=e, other=x)))
        assert group.nodes == ("exp_1", *(f"stop_gradient_{k + 1}" for k in range(count)), "mul_1")
        texts.append(group.text)
    assert texts[0] == texts[1] and "    exp_y = stop_gradient(exp(x=x))\n" in texts[0]


def test_what_others_see_without_a_gradient_is_stopped_outside() -> None:
    """The op gives the value as it is, so the node stays; a gradient that comes to the op's own output goes through."""
    g = Recording()
    x = g.given("x")
    s = g.node("stop_gradient", x=g.node("exp", x=x))
    (group,) = found(g.ends(g.node("mul", x=s, other=x), s))
    assert group.nodes == (
        "exp_1",
        "mul_1",
    ) and "reference: (torch.exp(x), torch.mul(torch.exp(x).detach(), x))" in lines(group)
    (place,) = occurred(g.ends("mul_1.y", s), group.text)
    assert place.outputs == {"exp_y": "exp_1.y", "y": "mul_1.y"}


def occurred(graph: dict[str, Any], text: str) -> tuple[groups.Occurrence, ...]:
    """Where the op of a spec stands in a graph."""
    known = {op.name: op for op in specs()}
    return groups.occurrences(
        groups.read(graph),
        [pattern(op) for op in load_text(text, Report())],
        lambda node: member(known[node.op], node.attrs) if node.op in known else None,
    )


@pytest.mark.parametrize("reason", ["read by two", "given", "an output"])
def test_a_chain_ends_where_the_value_before_the_stop_is_read_too(reason: str) -> None:
    g = Recording()
    x = g.given("x")
    e = x if reason == "given" else g.node("exp", x=x)
    s = g.node("stop_gradient", x=e)
    y = g.node("mul", x=s, other=e if reason == "read by two" else g.given("z"))
    assert found(g.ends(y, *([e] if reason == "an output" else []))) == ()


def test_ints_have_no_gradient_to_stop() -> None:
    """A mark at what has none makes no other op."""
    texts = []
    for marked in (False, True):
        g = Recording()
        c = g.node("gt", None, "bool", x=g.given("c"), other=0.0)
        c = g.node("stop_gradient", x=c) if marked else c
        (group,) = found(g.ends(g.node("where", None, "f32", condition=c, x=g.given("x"), other=g.given("z"))))
        texts.append(group.text)
    assert texts[0] == texts[1] and "stop_gradient" not in texts[0]


def test_what_no_gradient_reaches_is_said() -> None:
    g = Recording()
    c = g.node("gt", None, "bool", x=g.given("c"), other=0.0)
    f = g.node("floor", x=g.given("f"))
    y = g.node("where", None, "f32", condition=c, x=f, other=g.given("x"))
    (group,) = found(g.ends(y))
    assert {"c: not_differentiable", "f: zero", "x: where(gt_y, 0, dy)"} <= set(lines(group))


def around_an_update(case: str) -> list[tuple[str, ...]]:
    """What is fused of `relu` and `mul` around a norm that updates a running mean."""
    g = Recording()
    x, mean = g.given("x"), g.given("mean", [64], "buffer")

    def norm(x: str, updates: bool = True) -> str:
        more = {"updates": ["running_mean", "running_var"]} if updates else {}
        return g.node("batch_norm", x=x, running_mean=mean, running_var=None, **more)

    if case == "updated before":
        outputs = [norm(x)]
    read = g.node("reshape", x=mean) if case == "read as a view" else mean
    first = g.node("relu", x=x if case.startswith("waits") else read)
    if case.startswith("waits"):
        outputs = [norm(first)]
    elif case != "updated before":
        outputs = [norm(x, updates=case != "only read")]
    if case == "waits with an update":
        outputs.append(g.node("reshape", x=mean))
    return fuses(g.ends(g.node("mul", x=first, other=g.given("w", g.shapes[first][0])), *outputs))


@pytest.mark.parametrize(
    ("case", "joined"),
    [
        ("only read", True), ("updated before", True), ("updated between", False), ("read as a view", False),
        ("waits", True), ("waits with an update", False),
    ],
)  # fmt: skip
def test_no_read_changes_sides_with_an_update(case: str, joined: bool) -> None:
    """A fused op runs where its last node stood: what it reads must be the same there, also through a view; and what waits for
    its results must not update what others have read in the meantime."""
    assert around_an_update(case) == ([("relu_1", "mul_1")] if joined else [])


def test_a_param_begins_as_its_step_has_it() -> None:
    """`init`, or what an absent one stands for; a tensor that is an input has none."""
    g = Recording()
    n = g.node("rms_norm", x=g.given("x"), weight=g.given("norm.weight", [64], "param"), _eps=1e-6, _offset=0)
    (group,) = found(g.ends(g.node("silu", x=n)))
    assert "params: {weight: {axes: [N], init: 1}}" in lines(group)
    (op,) = load_text(group.text, Report())
    assert op.params[0].init is not None and op.params[0].init.value == 1
    h = Recording()
    own = {n: h.given(n, s, "param") for n, s in (("alpha", []), ("weight", [64]), ("bias", [64]))}
    (group,) = found(h.ends(h.node("silu", x=h.node("dyt", x=h.given("x"), **own))))
    wanted = "alpha: {axes: [], init: 0.5}, weight: {axes: [N], init: 1}, bias: {axes: [N], init: 0}"
    assert f"params: {{{wanted}}}" in lines(group)
    k = Recording()
    w = k.given("w", [64], "param")
    n = k.node("rms_norm", x=k.node("mul", x=k.given("x"), other=w), weight=w, _eps=1e-6, _offset=0)
    assert [(t.name, t.init) for t in only(k.ends(n)).inputs] == [("x", None), ("w", None)]


def test_dtypes_that_differ_end_a_chain() -> None:
    """A step in between rounds otherwise than the whole would."""
    g = Recording()
    h = g.node("exp", x=g.given("x", dtype="bf16"))
    assert found(g.ends(g.node("mul", None, "f32", x=h, other=g.given("z")))) == ()


def test_ints_stay_ints() -> None:
    g = Recording()
    s = g.node("add", x=g.given("x", dtype="i64"), other=3, _alpha=2)
    op = only(g.ends(g.node("mul", x=s, other=s)))
    assert [o.dtype for o in op.outputs] == ["int"] and {a.type for a in op.attrs} == {"int"}


def test_ops_of_no_spec_end_a_chain() -> None:
    g = Recording()
    y = g.node("relu", x=g.node("linear", ROWS, x=g.node("exp", x=g.given("x"))))
    assert found(g.ends(y)) == ()


def test_the_largest_part_is_taken_where_the_whole_cannot_be() -> None:
    """A reason is said for the whole."""
    g = Recording()
    y = g.node("celu", x=g.node("relu", x=g.node("exp", x=g.given("x"))), _alpha=0.0)
    whole, part = found(g.ends(y))
    assert (whole.nodes, whole.op, whole.reason) == (("exp_1", "relu_1", "celu_1"), "", "`celu` requires alpha != 0")
    assert (part.nodes, part.op) == (("exp_1", "relu_1"), "exp_relu")


# ---------------------------------------------------------------------------------------------- names


def test_names_are_made_unique_and_plain() -> None:
    """Dotted names, words of the language, Python's keywords, and what is called after another tensor."""
    g = Recording()
    a, b = g.given("block.0.weight", role="param"), g.given("block.1.weight", role="param")
    s = g.node("add", x=g.given("inf"), other=g.given("lambda"), _alpha=1)
    s = g.node("mul", x=g.node("mul", x=s, other=a), other=b)
    s = g.node("add", x=s, other=g.given("dy"), _alpha=1)
    y = g.node("add", x=s, other=g.given("9 Lives!"), _alpha=1)
    op = only(g.ends(y))
    assert [t.name for t in op.inputs] == ["x", "other", "weight", "block_1_weight", "dy_2", "other_2"]
    assert op.name == "add_mul_mul_add_add"


def test_two_steps_of_one_op_keep_their_names_apart() -> None:
    g = Recording()
    y = g.node("silu", x=g.node("silu", x=g.given("x")))
    (group,) = found(g.ends(y))
    assert {"s = sigmoid(x)", "silu_y = x * s", "silu_s = sigmoid(silu_y)", "y = silu_y * silu_s"} <= set(lines(group))


def test_a_long_chain_has_a_short_name() -> None:
    g = Recording()
    y = g.given("x")
    for _ in range(20):
        y = g.node("sigmoid", x=y)
    assert only(g.ends(y)).name == "sigmoid_sigmoid_sigmoid_sigmoid_and_16_more"


def test_one_structure_is_one_op() -> None:
    """Twice in a graph, with other tensors and other numbers; one whose choice differs has a name of its own."""
    g = Recording()
    y = g.given("x")
    for alpha, kind in ((0.5, "tanh"), (0.75, "tanh"), (0.5, "none")):
        y = g.node("add", x=g.node("reshape", x=y), other=g.given(f"z{alpha}{kind}"), _alpha=alpha)
        y = g.node("gelu", x=y, _approximate=kind)
    made = found(g.ends(y))
    assert [(g.op, bool(g.text)) for g in made] == [("add_gelu", True), ("add_gelu", False), ("add_gelu_2", True)]


def test_the_order_of_recording_does_not_matter() -> None:
    g = Recording()
    x, z = g.given("x"), g.given("z")
    y = g.node("mul", x=g.node("exp", x=x), other=g.node("sin", x=z))
    h = Recording()
    x, z = h.given("x"), h.given("z")
    s = h.node("sin", x=z)
    w = h.node("mul", x=h.node("exp", x=x), other=s)
    (group,) = found(g.ends(y))
    (again,) = found(h.ends(w), (*specs(), *load_text(group.text, Report())))
    assert (again.op, again.text) == (group.op, "")


# ---------------------------------------------------------------------------------------------- damaged graphs


def damaged(change: str, value: Any) -> dict[str, Any]:
    """A good graph with one place of it changed; `value` of Ellipsis deletes it."""
    data: Any = json.loads(json.dumps(sum_gate()))
    *way, last = [int(k) if k.isdigit() else k for k in change.split("/")]
    place = data
    for key in way:
        place = place[key]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return dict(data)


DAMAGED = [
    ("format", "pullback-graph 2", "format: it is `pullback-graph 2`, not `pullback-graph 1`"),
    ("nodes", ..., "`nodes` is missing"),
    ("extra", 1, "`extra` is not a key here; keys: format, tensors, nodes, outputs, stop_gradient"),
    ("tensors", [], "tensors: a list is no object"),
    ("tensors/x/role", "state", "tensors.x.role: `state` is none of `input`, `buffer`, `param`"),
    (
        "tensors/x/dtype",
        "float32",
        "tensors.x.dtype: `float32` is no dtype; dtypes: f16, bf16, f32, f64, i32, i64, bool",
    ),
    ("tensors/x/shape", "batch", "tensors.x.shape: `batch` is no list"),
    ("tensors/x/shape", [-1], "tensors.x.shape: -1 is neither an extent nor the name of a size"),
    ("tensors/x/shape", [True], "tensors.x.shape: true is neither an extent nor the name of a size"),
    ("tensors/x/shape", [None], "tensors.x.shape: null is neither an extent nor the name of a size"),
    ("tensors/x/shape", ..., "tensors.x: `shape` is missing"),
    ("nodes/0", 3, "nodes[0]: 3 is no object"),
    ("nodes/0/op", "", "nodes[0].op: `` is no name"),
    ("nodes/1/name", "add_1", "nodes[1].name: two nodes are called `add_1`"),
    ("nodes/0/inputs/x", "nowhere", "nodes[0].inputs.x: `nowhere` is neither given nor made by a node before this one"),
    (
        "nodes/0/inputs/x",
        "gelu_1.y",
        "nodes[0].inputs.x: `gelu_1.y` is neither given nor made by a node before this one",
    ),
    ("nodes/0/inputs/x", True, "nodes[0].inputs.x: true is neither a tensor's name, nor a number, nor null"),
    ("nodes/0/inputs/x", ["x"], "nodes[0].inputs.x: a list is neither a tensor's name, nor a number, nor null"),
    ("nodes/0/updates", "x", "nodes[0].updates: `x` is no list"),
    ("nodes/0/updates", [0], "nodes[0].updates: 0 is no name"),
    ("nodes/0/updates", ["mean"], "nodes[0].updates: `mean` is no input of the node"),
    ("nodes/0/update", ["x"], "nodes[0]: `update` is not a key here; keys: name, op, attrs, inputs, outputs, updates"),
    ("nodes/0/attrs/alpha", {}, "nodes[0].attrs.alpha: an object is no value of an attr"),
    ("nodes/0/attrs/alpha", [[1]], "nodes[0].attrs.alpha: a list is no value of an attr"),
    ("nodes/0/outputs/y/name", "x", "nodes[0].outputs.y.name: two tensors are called `x`"),
    ("nodes/0/outputs/y", "y", "nodes[0].outputs.y: `y` is no object"),
    ("nodes/0/attrs/alpha", 2**63, "nodes[0].attrs.alpha: the number is beyond the range of int64"),
    ("nodes/0/inputs/other", -(2**70), "nodes[0].inputs.other: the number is beyond the range of int64"),
    ("outputs", ["loss"], "outputs: there is no tensor `loss`"),
    ("outputs", [1], "outputs: 1 is no name"),
    ("stop_gradient", None, "stop_gradient: null is no list"),
]


@pytest.mark.parametrize(("change", "value", "text"), DAMAGED, ids=[f"{c} {v}" for c, v, _ in DAMAGED])
def test_a_damaged_graph_is_refused_by_its_place(change: str, value: Any, text: str) -> None:
    with pytest.raises(groups.GraphFault) as fault:
        groups.read(damaged(change, value))
    assert str(fault.value) == text


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "graph.json:1:1: error[not-json]: not JSON: Expecting value"),
        (b'{"format": 1,\n "tensors"', "graph.json:2:11: error[not-json]: not JSON: Expecting ':' delimiter"),
        (b"\xff{}", "graph.json:1:1: error[not-utf8]: byte 0 is not UTF-8"),
        (b"[" * 100000, "graph.json:1:1: error[not-json]: not JSON: "),
        (b"[]", "graph.json:1:1: error[bad-graph]: a list is no object"),
        (b'{"format": 1,\n "format": 2}', "graph.json:1:2: error[bad-graph]: the key `format` is written twice"),
        (b"[" + b"1" * 5000 + b"]", "graph.json:1:1: error[not-json]: not JSON: Exceeds the limit"),
    ],
    ids=["empty", "cut", "bytes", "deep", "list", "twice", "digits"],
)
def test_a_file_that_is_no_graph_is_a_diagnostic(tmp_path: Path, content: bytes, text: str) -> None:
    (tmp_path / "graph.json").write_bytes(content)
    report = Report()
    assert fuse.read(tmp_path / "graph.json", "graph.json", report) is None
    assert report.render().startswith(text)


def test_a_fault_is_shown_where_its_node_is(tmp_path: Path) -> None:
    (tmp_path / "graph.json").write_text(json.dumps(damaged("nodes/1/outputs/y/dtype", "f8"), indent=1))
    report = Report()
    assert fuse.read(tmp_path / "graph.json", "graph.json", report) is None
    (error,) = report.errors
    assert error.text.startswith("nodes[1].outputs.y.dtype: `f8` is no dtype")
    assert '"gelu_1.y"' in report.lines["graph.json"][error.span.line - 1]
    assert fuse.read(tmp_path / "none.json", "none.json", report) is None
    assert report.ordered()[-1].text == "cannot be read: No such file or directory"


WRONG_NODES = [
    ("nodes/0/attrs/beta", 1, "`add_1` has the attr `beta`, which `add` does not"),
    ("nodes/0/inputs/third", "x", "`add_1` gives `third`, which `add` does not take"),
    ("nodes/0/attrs/alpha", "big", "`alpha` of `add_1` is 'big', which `add` does not take"),
    ("nodes/1/attrs/approximate", "cubic", "`approximate` of `gelu_1` is 'cubic', which `gelu` does not take"),
    ("nodes/1/attrs/approximate", None, "`gelu_1` does not tell `approximate` of `gelu`"),
    ("nodes/0/inputs/other", None, "`add_1` leaves out `other` of `add`"),
    ("nodes/0/inputs/x", 2.0, "`add_1` has a number for `x` of `add`, which takes a tensor"),
]


@pytest.mark.parametrize(("change", "value", "text"), WRONG_NODES, ids=[t for _, _, t in WRONG_NODES])
def test_a_node_that_is_not_as_its_spec_is_named(change: str, value: Any, text: str) -> None:
    assert [g.reason for g in found(damaged(change, value))] == [text]


def normed() -> dict[str, Any]:
    g = Recording()
    s = g.node("softmax", x=g.node("exp", x=g.given("x")), _dim=-1)
    return g.ends(s)


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("nodes/1/attrs/dim", "last"), ("nodes/1/attrs/dim", 2), ("nodes/1/attrs/dim", 0.5), ("nodes/1/inputs/more", "x"),
        ("nodes/1/outputs/z", {"name": "z", "dtype": "f32", "shape": [1]}), ("nodes/0/outputs", {}),
        ("nodes/1/outputs/y/shape", ["batch"]), ("nodes/0/outputs/y/dtype", "bool"), ("nodes/0/inputs", {}),
    ],
)  # fmt: skip
def test_a_node_that_cannot_be_is_in_no_group(change: str, value: Any) -> None:
    """It is no fault of the graph's form: whoever runs the graph will say it. Nothing is fused, and nothing breaks."""
    data: Any = json.loads(json.dumps(normed()))
    *way, last = [int(k) if k.isdigit() else k for k in change.split("/")]
    place = data
    for key in way:
        place = place[key]
    place[last] = value
    if change == "nodes/0/outputs":
        data["nodes"][1]["inputs"]["x"] = "x"
    assert all(not group.op for group in found(data))


# ---------------------------------------------------------------------------------------------- the key `fuses`

CHAIN = """\
- op: ramp
  inputs: {x: [...]}
  outputs: {y: [...]}
  forward: y = relu(x)
  backward: {x: auto}
- op: scale
  inputs: {x: [...], by: [...]}
  attrs: {times: {default: 1}}
  outputs: {y: [...]}
  forward: y = times * x * by
  backward: {x: auto, by: auto}
- op: scaled_ramp
  inputs: {x: [...], by: [...]}
  attrs: {times: {default: 1}}
  outputs: {y: [...]}
  forward: y = times * relu(x) * by
  backward: {x: auto, by: auto}
  fuses: |
    r = ramp(x=x)
    y = scale(x=r, by=by, times=times)
"""


def said(text: str) -> list[str]:
    """What the loader and the proof say of the chain's fused op."""
    report = Report()
    ops = {op.name: op for op in load_text(text, report)}
    if not report.errors:
        confirm(ops["scaled_ramp"], ops, report)
    return [d.text for d in report.ordered()]


def test_a_fused_op_may_be_written_by_hand() -> None:
    assert said(CHAIN) == []
    better = CHAIN.replace("forward: y = times * relu(x) * by", "forward: y = where(x <= 0, 0, x) * (by * times)")
    assert said(better) == []


BAD_STEPS = [
    ("y = scale(x=r, by=by, times=times)", "y = scale(r, by)", "a step is one op with its arguments by name"),
    ("y = scale(x=r, by=by, times=times)", "y = 2 * r", "a step is one op with its arguments by name"),
    ("times=times", "times=times + 1", "`times` of a step is a name or one constant"),
    ("x=r, by=by", "x=q, by=by", "`q` is neither of `scaled_ramp` nor an earlier result"),
    ("times=times)", "times=1)", "no step says what `times` is"),
    ("    y = scale", "    w = scale", "no step gives the output `y`"),
    ("r = ramp(x=x)", "by = ramp(x=x)", "`by` is set twice"),
    ("    y = scale", "    q = ramp(x=x)\n    y = scale", "`q` is set and never used"),
    ("r = ramp(x=x)", "r = ramps(x=x)", "`scaled_ramp` cannot stand for its steps: no spec declares `ramps`"),
    ("by=by", "bye=by", "`scaled_ramp` cannot stand for its steps: the step `y` leaves out `by` of `scale`"),
    ("r = ramp(x=x)", "r = ramp(x=x, by=by)", "`scaled_ramp` cannot stand for its steps: `ramp` has no argument `by`"),
    ("times * relu(x)", "times * abs(x)", "`scaled_ramp` computes another thing than its steps"),
    ("r = ramp(x=x)", "r = stop_gradient(ramp(x=x))", "`scaled_ramp` computes another thing than its steps"),
]


@pytest.mark.parametrize(("old", "new", "text"), BAD_STEPS, ids=[f"{n} {t}" for _, n, t in BAD_STEPS])
def test_what_a_fused_op_says_of_itself_is_checked(old: str, new: str, text: str) -> None:
    assert old in CHAIN
    assert text in said(CHAIN.replace(old, new))


def test_the_point_at_which_a_fused_op_differs_is_shown() -> None:
    report = Report()
    ops = {op.name: op for op in load_text(CHAIN.replace("times * relu(x)", "times * abs(x)"), report)}
    confirm(ops["scaled_ramp"], ops, report)
    (error,) = report.errors
    assert error.code == "other-formula" and "of the steps" in error.notes[1].text


def fused_ops(*names: str) -> bytes:
    """The list of a package of `scaled_ramp` under these names, and the ops that it stands for."""
    first = CHAIN.index("- op: scaled_ramp")
    text = CHAIN[:first] + "".join(CHAIN[first:].replace("scaled_ramp", n) for n in names)
    report = Report()
    files = emit.render((), load_text(text, report), Config(tests=""), report)
    assert not report.errors
    (listing,) = [f for f in files.values() if f.path.endswith("/ops/__init__.py")]
    assert listing.listing
    return listing.content


@pytest.mark.parametrize("before", [(), ("middle",)])
def test_the_lists_of_two_branches_merge_line_by_line(tmp_path: Path, before: tuple[str, ...]) -> None:
    """Also where a package had no fused op before. The outcome is a module, with what both have."""
    for name, ops in (("ours", ("alpha", *before)), ("base", before), ("theirs", (*before, "omega", "beta"))):
        (tmp_path / name).write_bytes(fused_ops(*ops))
    merged = subprocess.run(
        ["git", "merge-file", "--union", "-p", "ours", "base", "theirs"], cwd=tmp_path, capture_output=True, check=True
    )
    space: dict[str, Any] = {}
    exec(merged.stdout, space)
    assert sorted(space["FUSED"]) == sorted({"alpha", "beta", "omega", *before})


# ---------------------------------------------------------------------------------------------- the command


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "specs").mkdir()
    wanted = ("add", "gelu", "relu", "mul")
    parts = [part for path in sorted((ROOT / "specs").glob("*.yaml")) for op, part in manifest.split_ops(path.read_text())
             if op in wanted]  # fmt: skip
    (tmp_path / "specs/basic.yaml").write_text("\n\n".join(part.rstrip() for part in parts) + "\n")
    (tmp_path / "pyproject.toml").write_text("[tool.pullback]\n")
    (tmp_path / "graph.json").write_text(json.dumps(sum_gate()))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def pullback(*words: str) -> Result:
    result = CliRunner().invoke(main, words)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_fuse_writes_once_and_keeps_what_is_there(project: Path) -> None:
    mine = "# mine\n- op: own\n  inputs: {x: [...]}\n  outputs: {y: [...]}\n  forward: y = x + 1  # a comment\n  backward: {x: dy}\n"
    (project / "specs/fused.yaml").write_text(mine)
    first = pullback("fuse", "graph.json")
    assert (first.exit_code, first.stdout) == (
        0, "add_gelu: written to specs/fused.yaml, stands for add_1, gelu_1\nnext: pullback generate\n",
    )  # fmt: skip
    assert (project / "specs/fused.yaml").read_text() == f"{mine}\n{SUM_GATE}"
    again = pullback("fuse", "graph.json")
    assert (again.exit_code, again.stdout) == (0, "add_gelu: stands for add_1, gelu_1\n")
    assert (project / "specs/fused.yaml").read_text() == f"{mine}\n{SUM_GATE}"
    assert pullback("verify", "add_gelu").exit_code == 0


def test_dry_run_and_check_write_nothing(project: Path) -> None:
    before = {p: p.read_bytes() for p in project.rglob("*") if p.is_file()}
    dry = pullback("fuse", "graph.json", "--dry-run")
    assert (dry.exit_code, dry.stdout) == (
        0,
        f"{SUM_GATE}next: pullback generate\n".replace("next: pullback generate\n", ""),
    )
    checked = pullback("fuse", "graph.json", "--check")
    assert (checked.exit_code, checked.stdout) == (1, "add_gelu: could stand for add_1, gelu_1\nnext: pullback fuse\n")
    assert {p: p.read_bytes() for p in project.rglob("*") if p.is_file()} == before
    pullback("fuse", "graph.json")
    assert pullback("fuse", "graph.json", "--check").exit_code == 0


def test_nothing_to_fuse_is_said(project: Path) -> None:
    g = Recording()
    (project / "graph.json").write_text(json.dumps(g.ends(g.node("relu", x=g.given("x")))))
    assert pullback("fuse", "graph.json").stdout == "nothing to fuse\n"
    assert not (project / "specs/fused.yaml").exists()


def test_another_file_may_be_named_below_the_specs(project: Path) -> None:
    assert pullback("fuse", "graph.json", "--to", "specs/deep/more.yaml").exit_code == 0
    assert (project / "specs/deep/more.yaml").read_text().endswith(SUM_GATE)
    for path in ("elsewhere/fused.yaml", "specs/fused.txt", "specs/../fused.yaml"):
        result = pullback("fuse", "graph.json", "--to", path)
        assert (result.exit_code, result.stderr) == (
            2, f"error: {path} is no .yaml file below specs: nothing there would be read\n",
        )  # fmt: skip


def test_line_ends_are_those_of_the_file(project: Path) -> None:
    head = b"- op: own\r\n  inputs: {x: [...]}\r\n  outputs: {y: [...]}\r\n  forward: y = x + 1\r\n  backward: {x: dy}"
    (project / "specs/fused.yaml").write_bytes(head)
    assert pullback("fuse", "graph.json").exit_code == 0
    text = (project / "specs/fused.yaml").read_bytes()
    assert text.startswith(head + b"\r\n\r\n- op: add_gelu\r\n") and b"\n" not in text.replace(b"\r\n", b"")


def test_a_file_of_another_layout_is_left_alone(project: Path) -> None:
    own = (
        "  - op: own\n    inputs: {x: [...]}\n    outputs: {y: [...]}\n    forward: y = x + 1\n    backward: {x: dy}\n"
    )
    (project / "specs/fused.yaml").write_text(own)
    result = pullback("fuse", "graph.json")
    assert (
        result.exit_code == 1
        and "error[not-appendable]: ops added at the end of this file would not be read" in result.stderr
    )
    assert (project / "specs/fused.yaml").read_text() == own


def test_a_damaged_graph_ends_the_command(project: Path) -> None:
    (project / "graph.json").write_text("{")
    result = pullback("fuse", "graph.json")
    assert result.exit_code == 1 and result.stderr.startswith("graph.json:1:2: error[not-json]: not JSON: ")
    assert not (project / "specs/fused.yaml").exists()


def test_a_changed_step_is_a_changed_whole(project: Path) -> None:
    """Who corrects an op is told of the fused ops that are no longer what they stand for."""
    pullback("fuse", "graph.json")
    assert pullback("generate").exit_code == 0
    emitted = (project / "generated/ops/add_gelu.py").read_text()
    assert 'Step("add_y", "add", {"x": "x", "other": "skip"}, {"alpha": 1}),' in emitted
    assert 'Step("y", "gelu", {"x": "add_y"}, {"approximate": "tanh"}),' in emitted
    path = project / "specs/basic.yaml"
    path.write_text(path.read_text().replace("0.044715", "0.044716"))
    result = pullback("generate")
    assert (
        result.exit_code == 1
        and "error[other-formula]: `add_gelu` computes another thing than its steps" in result.stderr
    )


def test_the_text_depends_on_the_graph_alone(project: Path) -> None:
    texts = set()
    for seed in ("0", "7"):
        env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed}
        words = [sys.executable, "-m", "codegen", "fuse", "graph.json", "--dry-run"]
        texts.add(subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout)
    assert texts == {SUM_GATE}
