"""Recording graphs: shapes, names, text, JSON, errors; the gradients that lowering finds lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import generated
from generated.runtime.extents import Extent, Trials, concrete, product, quotient
from generated.runtime.graph import Graph, Init, SymTensor
from generated.runtime.layout import ShapeError
from generated.runtime.lowering import LoweringMode
from generated.runtime.paths import GradientPathError
from generated.runtime.plan import Meta
from generated.runtime.shaping import reshaped

ROOT = Path(__file__).parents[2]


def shape(x: SymTensor) -> list[str]:
    return [str(n) for n in x.shape]


# ---------------------------------------------------------------------------------------------- extents


def test_extents_are_products_of_numbers_and_names() -> None:
    batch, tokens = Extent.named("batch"), Extent.named("tokens")
    assert str(product((2, batch, tokens, 3))) == "6*batch*tokens"
    assert product((2, 3)) == 6 and product(()) == 1
    assert quotient(product((batch, 12)), 6) == product((2, batch))
    assert quotient(product((batch, tokens)), tokens) == batch
    assert str(quotient(batch, 2)) == "batch/2" and quotient(batch, batch) == 1
    assert concrete((product((2, batch)), 3), {"batch": 5}) == (10, 3)
    with pytest.raises(ShapeError, match="batch/2 is 5/2 where batch is 5"):
        concrete([quotient(batch, 2)], {"batch": 5})


def test_trials_find_what_an_extent_is_made_of() -> None:
    trials = Trials.of(("batch", "tokens"))
    found = [[s["batch"] * 3, s["tokens"] // 2, 7, s["batch"] * s["tokens"], 0] for s in trials.sizes]
    assert [str(n) for n in trials.recover(found)] == ["3*batch", "tokens/2", "7", "batch*tokens", "0"]
    with pytest.raises(ShapeError, match="no product of the sizes"):
        trials.recover([[s["batch"] + 1] for s in trials.sizes])


@pytest.mark.parametrize("given", [(2, 3, 4), (4, 1, 6), (24,), (1, 24, 1), (2, 2, 6), (3, 8), (1, 1, 24), ()])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0), (0, 2, 1)])
def test_strides_of_another_shape_are_torchs(given: tuple[int, ...], order: tuple[int, ...]) -> None:
    """A view wherever torch's `view` has one, with memory in the same places, and nowhere else."""
    torch = pytest.importorskip("torch")
    for source in (
        torch.arange(24).reshape(2, 3, 4),
        torch.arange(96).reshape(4, 6, 4)[::2, ::2],
        torch.zeros(2, 1, 1).expand(2, 3, 4),
    ):
        x = source.permute(order)
        if not given:
            continue
        meta = reshaped(Meta("i64", tuple(x.shape), x.stride()), given)
        try:
            wanted = x.view(given)
        except RuntimeError:
            assert meta is None
        else:
            assert meta is not None and torch.equal(x.as_strided(meta.shape, meta.strides), wanted)


# ---------------------------------------------------------------------------------------------- recording


def test_shapes_follow_from_the_ops_own_axes() -> None:
    x, graph = SymTensor.input("f32", (None, 784))
    assert shape(generated.gelu(x)) == ["batch", "784"]
    assert shape(generated.glu(x)) == ["batch", "392"]
    assert shape(generated.sum(x, dim=1)) == ["batch"] and shape(generated.sum(x, dim=0, keepdim=True)) == ["1", "784"]
    y, rstd = generated.var(x, dim=1), graph.input("f32", ("tokens", 1), "y")
    assert shape(y) == ["batch"]
    assert shape(generated.add(x.reshape(1, -1), rstd)) == ["tokens", "784*batch"]
    assert shape(x.reshape(-1, 7, 112).transpose(1, 2)) == ["batch", "112", "7"]
    assert generated.gt(x, 0.0).dtype == "bool" and generated.argmax(x, dim=1).dtype == "i64"


def test_dtypes_are_promoted_as_in_torch() -> None:
    x, graph = SymTensor.input("bf16", (None, 8))
    assert generated.add(x, graph.input("f32", (8,), "y")).dtype == "f32"
    assert generated.add(x, 2.0).dtype == "bf16"
    torch = pytest.importorskip("torch")
    assert graph.input(torch.float16, (8,), "z").dtype == "f16"


def test_several_results_and_one_tensor_read_twice() -> None:
    x, graph = SymTensor.input("f32", (None, 8))
    total, normed = generated.add_rms_norm(x, x, graph.param("norm.weight"))[:2]
    assert shape(total) == shape(normed) == ["batch", "8"]
    assert graph.tensors["norm.weight"].shape == (8,)
    assert len(graph.nodes) == 1 and graph.nodes[0].operands == ("x", "norm.weight")


def test_a_param_gets_the_shape_that_its_op_gives_it() -> None:
    x, graph = SymTensor.input("f32", (None, 6, None))
    with pytest.raises(ShapeError, match="has no shape before an op uses it"):
        _ = graph.param("early").shape
    weight = graph.param("norm.weight")
    with pytest.raises(
        ShapeError, match=r"node `rms_norm_1`: rms_norm: the shape of param `norm.weight` does not follow"
    ):
        generated.rms_norm(x, weight)  # as many as the batch has
    generated.rms_norm(x.transpose(1, 2), weight)
    assert weight.shape == (6,)


def test_extents_that_no_trial_mistakes() -> None:
    """Constants are what they are, and sizes may be beyond what a device takes at once."""
    for count in (101, 103, 50304, 48, 5040, 2**21):
        x, graph = SymTensor.input("f32", (None, "rows", "columns", 8))
        y = generated.mul(x.reshape(None, -1), 2.0)
        assert shape(y) == ["batch", "8*columns*rows"]
        assert shape(generated.add(graph.input("f32", (count, None), "y"), 1.0)) == [str(count), "batch"]


def test_params_and_buffers_begin_with_what_their_op_says() -> None:
    x, graph = SymTensor.input("f32", (None, 4, 6))
    mean, var = graph.buffer("mean"), graph.buffer("var")
    generated.batch_norm(x, mean, var, graph.param("weight"), graph.param("bias"), training=True)
    assert [graph.tensors[n].init for n in ("mean", "var", "weight", "bias")] == [
        Init("constant", v) for v in (0.0, 1.0, 1.0, 0.0)
    ]
    assert all(graph.tensors[n].shape == (4,) for n in ("mean", "var", "weight", "bias"))


def test_text_json_and_picture() -> None:
    x, graph = SymTensor.input("f32", (None, 8), "pixels")
    y = generated.add(generated.relu(x), graph.param("bias", (8,)).stop_gradient(), alpha=0.5)
    assert str(graph) == (
        "input pixels: f32[batch, 8]\nparam bias: f32[8]\nrelu_1.y: f32[batch, 8] = relu(x=pixels)\n"
        "stop_gradient_1.y: f32[8] = stop_gradient(x=bias)\n"
        "add_1.y: f32[batch, 8] = add(x=relu_1.y, other=stop_gradient_1.y, alpha=0.5)"
    )
    whole = json.loads(graph.to_json([y]))
    assert whole["format"] == "pullback-graph 1" and whole["outputs"] == ["add_1.y"] and whole["stop_gradient"] == []
    assert whole["tensors"]["pixels"] == {"role": "input", "dtype": "f32", "shape": ["batch", 8]}
    assert [n["op"] for n in whole["nodes"]] == ["relu", "stop_gradient", "add"]
    assert whole["nodes"][2]["attrs"] == {"alpha": 0.5}
    text = graph.dot()
    assert text.startswith("digraph {") and '"relu_1" -> "add_1"' in text and text.count("shape=box") == 3


def test_a_picture_is_drawn_by_graphviz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a program `dot` that takes the text, its format and the place, as graphviz's does."""
    program = tmp_path / "dot"
    program.write_text('#!/bin/sh\n(echo "$1"; cat) > "$3"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    x, graph = SymTensor.input("f32", (None, 8), 'a"name"')
    generated.relu(x)
    drawn = graph.draw(tmp_path / "graph.svg").read_text()
    assert drawn == "-Tsvg\n" + graph.dot() and r'"a\"name\""' in drawn


def test_a_picture_without_graphviz_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FileNotFoundError, match="graphviz's `dot` is not on the PATH"):
        Graph().draw(tmp_path / "graph.svg")


def test_recording_needs_no_torch() -> None:
    """Nor does lowering."""
    code = (
        "import os, sys; sys.modules['torch'] = None; sys.path.insert(0, os.getcwd())\n"
        "import generated\n"
        "from generated.runtime.graph import SymTensor\n"
        "x, graph = SymTensor.input('f32', (None, 8))\n"
        "y = generated.sum(generated.mul(x, graph.param('w', (8,), init=1)), dim=None)\n"
        "print(y, graph.lower(y).wanted)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "SymTensor(sum_1.y: f32[]) ('w',)\n", done.stderr


# ---------------------------------------------------------------------------------------------- errors


def recorded() -> tuple[SymTensor, Graph]:
    return SymTensor.input("f32", (None, 8))


def _other() -> Any:
    return generated.add(recorded()[0], recorded()[0])


def _tensor() -> Any:
    torch = pytest.importorskip("torch")
    return generated.add(recorded()[0], torch.zeros(8))


def _buffer() -> Any:
    x, graph = SymTensor.input("f32", (None, 4, 8))
    return generated.batch_norm(x, graph.param("mean", (4,)), graph.param("var", (4,)), training=True)


def _twice() -> Any:
    graph = recorded()[1]
    return graph.param("x", (8,))


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda: generated.add(recorded()[0], recorded()[0].reshape(8, -1)), ValueError, "node `add_1`: add: `other` is of another graph"),
        (_other, ValueError, "node `add_1`: add: `other` is of another graph"),
        (_tensor, TypeError, "node `add_1`: add: `other` is a Tensor beside recorded tensors: make it an input, a param or a buffer"),
        (_buffer, TypeError, "`running_mean` is updated in place; `mean` is no buffer of the graph"),
        (_twice, ValueError, "the graph has a tensor `x` already"),
        (lambda: generated.rms_norm(recorded()[0], recorded()[1].param("w", (8,))), ValueError, "`weight` is of another graph"),
        (lambda: generated.relu(SymTensor.input("i64", (None,))[0]), TypeError, "node `relu_1`: relu: `input` is i64; it takes f16"),
        (lambda: generated.rms_norm(SymTensor.input("f32", ())[0]), ValueError, "node `rms_norm_1`: rms_norm: `input` has 0 dims"),
        (lambda: generated.softmax(recorded()[0], dim=2), IndexError, "node `softmax_1`: softmax: `dim` is 2, out of range for 2 dims"),
        (lambda: generated.kl_div(*([recorded()[0]] * 2), reduction="most"), ValueError, "`reduction` is 'most'; choices"),
        (lambda: recorded()[0].reshape(7, -1, -1), ShapeError, "more than one -1"),
        (lambda: recorded()[0].reshape(-1, 3), None, ""),
        (lambda: recorded()[0].reshape(8), ShapeError, r"node `reshape_1` on `x`: reshape: \[batch, 8\] does not fill \[8\]"),
        (lambda: recorded()[0].permute(0, 0), ShapeError, "does not name each of 2 dims once"),
        (lambda: SymTensor.input("f8", (1,)), TypeError, "f8 is no dtype of a graph"),
        (lambda: SymTensor.input("f32", (-1,)), ShapeError, "-1 is no extent"),
        (lambda: SymTensor.input("f32", ("a b",)), ShapeError, "'a b' is no extent"),
        (lambda: recorded()[1].param("w", (None, 3)), ShapeError, r"param `w` is \[batch, 3\]: its extents are numbers"),
        (lambda: Init("norml"), ValueError, "kind is 'norml'"),
        (lambda: bool(recorded()[0]), TypeError, "has no value to decide by"),
        (lambda: recorded()[0] + 1, TypeError, "it has no operators, call the ops' functions"),
        (lambda: recorded()[0].reshape(2.0, -1), ShapeError, "2.0 is no extent"),
        (lambda: recorded()[0].reshape(-2, -2), ShapeError, "-2 is no extent"),
        (lambda: recorded()[0].permute(0, 3), ShapeError, "does not name each of 2 dims once"),
        (lambda: recorded()[0].transpose(0, 5), ShapeError, "transpose of `x`: 0 and 5 of 2 dims"),
        (lambda: SymTensor.input("f32", 8), ShapeError, "8 is no shape"),
        (lambda: SymTensor.input("f32", ("device",)), ShapeError, "'device' is no extent"),
        (lambda: recorded()[1].param("a b"), ValueError, "'a b' is no name of a tensor"),
        (lambda: recorded()[1].param("w", init="normal"), TypeError, "`w`: init is a str; it takes a number or an Init"),
        (lambda: recorded()[1].lower("x"), TypeError, "'x' is no recorded tensor"),
        (lambda: recorded()[1].lower([]), ValueError, "a model has outputs"),
        (lambda: recorded()[1].lower(recorded()[0], "train"), ValueError, "'train' is not a valid LoweringMode"),
        (lambda: generated.add(*(lambda x, g: (x, g.input("f32", ("other", 8), "o")))(*recorded())), ValueError,
         "`other` has an extent of other in dim -2, `input` has batch"),
    ],
)  # fmt: skip
def test_errors_name_node_and_argument(call: Any, kind: type[Exception] | None, text: str) -> None:
    if kind is None:
        call()
        return
    with pytest.raises(kind, match=text):
        call()


# ---------------------------------------------------------------------------------------------- gradients that would be lost


def lost(outputs: Any, **more: Any) -> dict[str, str]:
    graph = outputs.graph
    with pytest.raises(GradientPathError) as caught:
        graph.lower(outputs, LoweringMode.TRAINING, **more)
    return caught.value.lost


def test_executor_gradient_path_names_the_node_that_stops_it() -> None:
    """An op without a backward in the middle of a graph: training refuses, inference runs."""
    x, graph = SymTensor.input("f32", (None, 8))
    w = graph.param("w", (8,), init=1)
    y = generated.sum(generated.mul(x, generated.argmax(generated.mul(x, w), dim=1).reshape(-1, 1)), dim=None)
    assert lost(y) == {"w": "node `argmax_1` (argmax) has no backward"}
    graph.lower(y, LoweringMode.INFERENCE)


def test_executor_gradient_path_through_whole_numbers_is_none() -> None:
    """A truth has no gradient to lose; a param that reaches the loss through truths alone is lost."""
    x, graph = SymTensor.input("f32", (None, 8))
    w, v = graph.param("w", (8,), init=1), graph.param("v", (8,), init=1)
    mask = generated.gt(x, w)
    y = generated.sum(generated.masked_fill(generated.mul(x, v), mask, 0.0), dim=None)
    assert lost(y) == {"w": "node `gt_1` (gt) has no backward"}
    both = generated.sum(generated.add(y, generated.mul(w, w)), dim=None)
    assert set(graph.lower(both).wanted) == {"w", "v"}


def test_executor_gradient_path_that_ends_where_the_graph_says_so() -> None:
    x, graph = SymTensor.input("f32", (None, 8))
    w, v = graph.param("w", (8,), init=1), graph.param("v", (8,), init=1)
    y = generated.sum(generated.mul(generated.mul(x, w).stop_gradient(), v), dim=None)
    model = graph.lower(y)
    assert model.wanted == ("v",)


def test_executor_gradient_path_of_a_param_that_nothing_uses() -> None:
    x, graph = SymTensor.input("f32", (None, 8))
    graph.param("idle", (8,), init=1)
    y = generated.sum(generated.mul(x, graph.param("w", (8,), init=1)), dim=None)
    assert lost(y) == {"idle": "no output that a backward begins with depends on it"}
    graph2 = Graph()
    z = generated.sum(generated.mul(graph2.input("f32", (8,)), graph2.param("w", (8,), init=1)), dim=None)
    graph2.param("idle", (8,), trainable=False, init=1)
    assert graph2.lower(z).wanted == ("w",)


def test_executor_gradient_path_to_an_argument_without_a_gradient() -> None:
    """The class weights of a loss have none: to train them would lose it in silence."""
    x, graph = SymTensor.input("f32", (None, 8))
    target, w = graph.input("i64", (None,), "target"), graph.param("class_weight", (8,), init=1)
    loss = generated.cross_entropy(x, target, w)
    assert lost(loss, input_gradients=[x]) == {
        "class_weight": "node `cross_entropy_1` (cross_entropy) has no gradient for `weight`"
    }


def test_seeds_and_outputs_are_checked() -> None:
    x, graph = SymTensor.input("f32", (None, 8))
    y = generated.mul(x, graph.param("w", (8,), init=1))
    total, best = generated.sum(y, dim=None), generated.argmax(y, dim=1)
    assert graph.lower([y, total, best]).seeds == (total.name,)
    with pytest.raises(ValueError, match="several outputs are of one value: sum_1.y, mean_1.y; say by `seeds=`"):
        graph.lower([total, generated.mean(y, dim=None)])
    with pytest.raises(ValueError, match="seeds name an output twice"):
        graph.lower([y], seeds=[y, y])
    assert graph.lower([y, best]).seeds == (y.name,)
    assert graph.lower([y, total], seeds=[y, total]).seeds == (y.name, total.name)
    with pytest.raises(ValueError, match="is no output of floats"):
        graph.lower([y, best], seeds=[best])
    with pytest.raises(ValueError, match="no output is of floats"):
        graph.lower(best)
    with pytest.raises(ValueError, match="is of another graph"):
        graph.lower(recorded()[0])
    with pytest.raises(ValueError, match="an inference model has no gradients"):
        graph.lower(y, LoweringMode.INFERENCE, input_gradients=[x])
