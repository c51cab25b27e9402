"""Fused ops run: what `pullback fuse` composes, generated and put in the place of its steps, has their values and gradients."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from codegen import manifest  # noqa: E402
from generated.runtime.testing import DEVICE  # noqa: E402

ROOT = Path(__file__).parents[2]
OPS = "add mul relu gelu silu exp sum div softmax rms_norm layer_norm where gt bias_add".split()
PACKAGE = "fused_in_a_test"
BATCH, COLUMNS = 5, 37


class Recording:
    """A graph as a recorder describes it."""

    def __init__(self) -> None:
        self.data: dict[str, Any] = {
            "format": "pullback-graph 1", "tensors": {}, "nodes": [], "outputs": [], "stop_gradient": [],
        }  # fmt: skip

    def given(self, name: str, *shape: Any, role: str = "input") -> str:
        self.data["tensors"][name] = {"role": role, "dtype": "f64", "shape": list(shape) or ["batch", COLUMNS]}
        return name

    def node(self, op: str, *shape: Any, dtype: str = "f64", inputs: dict[str, Any], **attrs: Any) -> str:
        name = f"{op}_{len(self.data['nodes'])}"
        made = {"name": f"{name}.y", "dtype": dtype, "shape": list(shape) or ["batch", COLUMNS]}
        self.data["nodes"].append({"name": name, "op": op, "attrs": attrs, "inputs": inputs, "outputs": {"y": made}})
        return f"{name}.y"


def chain() -> Recording:
    """Elementwise, with a broadcast operand, a number, a value that is read twice, and one that is an output too."""
    g = Recording()
    w = g.given("gain", COLUMNS, role="param")
    s = g.node("add", inputs={"x": g.given("x"), "other": g.given("skip")}, alpha=0.5)
    h = g.node("gelu", inputs={"x": g.node("mul", inputs={"x": s, "other": w})}, approximate="tanh")
    y = g.node("add", inputs={"x": h, "other": g.node("mul", inputs={"x": s, "other": 0.25})}, alpha=1)
    g.data["outputs"] = [y, s]
    return g


def stopped() -> Recording:
    g = Recording()
    x = g.given("x")
    gate = g.node("silu", inputs={"x": x})
    kept = g.node("gt", dtype="bool", inputs={"x": x, "other": 0.1})
    y = g.node(
        "where", inputs={"condition": kept, "x": g.node("mul", inputs={"x": gate, "other": x}), "other": g.given("z")}
    )
    g.data |= {"outputs": [y], "stop_gradient": [gate]}
    return g


def norm() -> Recording:
    """A norm between a residual and a bias; what is normalised is read again."""
    g = Recording()
    weight, bias = g.given("norm.weight", COLUMNS, role="param"), g.given("bias", COLUMNS, role="param")
    s = g.node("add", inputs={"x": g.given("x"), "other": g.given("skip")}, alpha=1)
    n = g.node("rms_norm", inputs={"x": s, "weight": weight}, eps=1e-5, offset=0)
    y = g.node("relu", inputs={"x": g.node("add", inputs={"x": n, "other": bias}, alpha=1)})
    g.data["outputs"] = [y, s]
    return g


def layers() -> Recording:
    g = Recording()
    weight, scale = g.given("weight", COLUMNS, role="param"), g.given("scale", COLUMNS, role="param")
    s = g.node("mul", inputs={"x": g.given("x"), "other": scale})
    y = g.node("layer_norm", inputs={"x": s, "weight": weight, "bias": None}, normalized_shape=[COLUMNS], eps=1e-5)
    g.data["outputs"] = [g.node("mul", inputs={"x": y, "other": 2.0})]
    return g


def weights() -> Recording:
    """A softmax whose result its own backward reads, scaled."""
    g = Recording()
    s = g.node("mul", inputs={"x": g.given("x"), "other": 0.5})
    y = g.node("softmax", inputs={"x": s}, dim=-1)
    g.data["outputs"] = [g.node("mul", inputs={"x": y, "other": g.given("z")})]
    return g


def by_hand() -> Recording:
    """A softmax of three ops: what is reduced stretches again."""
    g = Recording()
    e = g.node("exp", inputs={"x": g.given("x")})
    total = g.node("sum", "batch", 1, inputs={"x": e}, dim=-1, keepdim=True)
    g.data["outputs"] = [g.node("div", inputs={"x": e, "other": total})]
    return g


def channels() -> Recording:
    g = Recording()
    shape = ("batch", 3, 7)
    s = g.node("bias_add", *shape, inputs={"x": g.given("x", *shape), "bias": g.given("bias", 3, role="param")})
    g.data["outputs"] = [g.node("relu", *shape, inputs={"x": s})]
    return g


GRAPHS = {f.__name__: f for f in (chain, stopped, norm, layers, weights, by_hand, channels)}


def run(*words: str, cwd: Path) -> str:
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{cwd}"}
    done = subprocess.run([sys.executable, *words], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The ops of a project into which every graph was fused, by name."""
    folder = tmp_path_factory.mktemp("fusion")
    (folder / "specs").mkdir()
    texts = [p.read_text() for p in sorted((ROOT / "specs").glob("*.yaml"))]
    parts = [part.rstrip() for text in texts for op, part in manifest.split_ops(text) if op in OPS]
    (folder / "specs/basic.yaml").write_text("\n\n".join(parts) + "\n")
    settings = f'[tool.pullback]\noutput = "{PACKAGE}"\npackage = "{PACKAGE}"\n'
    (folder / "pyproject.toml").write_text(settings)
    for name, graph in GRAPHS.items():
        (folder / f"{name}.json").write_text(json.dumps(graph().data))
        run("-m", "codegen", "fuse", f"{name}.json", cwd=folder)
    run("-m", "codegen", "generate", cwd=folder)
    sys.path.insert(0, str(folder))
    made = importlib.import_module(PACKAGE)
    yield {n: getattr(made, "".join(w.capitalize() for w in n.split("_"))) for n in dir(made)}
    sys.path.remove(str(folder))


def tensors(graph: Mapping[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    shapes = {n: [BATCH if e == "batch" else e for e in t["shape"]] for n, t in graph["tensors"].items()}
    made = {n: torch.randn(*shape, dtype=torch.float64, device=DEVICE) for n, shape in shapes.items()}
    return {n: t.requires_grad_() for n, t in made.items()}


def computed(graph: Mapping[str, Any], ops: Mapping[str, Any], found: tuple[Any, ...] = ()) -> list[Any]:
    """The outputs and the gradients of all that is given, with fused ops in the place of what they stand for."""
    call = importlib.import_module(f"{PACKAGE}.runtime.binding").call
    given = tensors(graph)
    known: dict[str, Any] = dict(given)
    last = {one.nodes[-1]: one for one in found}
    replaced = {name for one in found for name in one.nodes}
    for node in graph["nodes"]:
        if node["name"] in last:
            one = last[node["name"]]
            operands = {n: known[v] if isinstance(v, str) else v for n, v in one.operands.items()}
            results = call(one.op(**one.attrs), operands)
            results = results if isinstance(results, tuple) else (results,)
            known |= {one.outputs[t.name]: r for t, r in zip(one.op.outputs, results)}
        elif node["name"] not in replaced:
            operands = {n: known[v] if isinstance(v, str) else v for n, v in node["inputs"].items()}
            attrs = {n: tuple(v) if isinstance(v, list) else v for n, v in node["attrs"].items()}
            value = call(ops[node["op"]](**attrs), operands)
            made = node["outputs"]["y"]["name"]
            known[made] = value.detach() if made in graph["stop_gradient"] else value
    outputs = [known[n] for n in graph["outputs"]]
    seeds = [
        torch.randn(o.shape, dtype=o.dtype, generator=torch.Generator().manual_seed(1)).to(o.device) for o in outputs
    ]
    grads = torch.autograd.grad(outputs, list(given.values()), seeds, allow_unused=True)
    return [*outputs, *grads]


@pytest.mark.parametrize("name", GRAPHS)
def test_a_fused_op_is_its_steps(package: dict[str, Any], name: str) -> None:
    """In float64, so that nothing but the order of sums may differ."""
    fusion = importlib.import_module(f"{PACKAGE}.runtime.fusion")
    graph = GRAPHS[name]().data
    found = fusion.matches(graph, package)
    assert [len(one.nodes) for one in found] == [len(graph["nodes"])], found
    assert fusion.candidates(graph, package) == ()
    for fused, plain in zip(computed(graph, package, found), computed(graph, package), strict=True):
        assert (fused is None) == (plain is None)
        if plain is not None:
            torch.testing.assert_close(fused, plain, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", GRAPHS)
def test_without_fused_ops_the_runtime_names_what_could_be_one(package: dict[str, Any], name: str) -> None:
    fusion = importlib.import_module(f"{PACKAGE}.runtime.fusion")
    graph = GRAPHS[name]().data
    plain = {n: op for n, op in package.items() if not op.fuses}
    assert fusion.matches(graph, plain) == ()
    assert fusion.candidates(graph, plain) == (tuple(n["name"] for n in graph["nodes"]),)


def test_numbers_and_names_may_differ_choices_may_not(package: dict[str, Any]) -> None:
    """A fused op stands for other numbers than those that it was composed of, and for no other choice."""
    fusion = importlib.import_module(f"{PACKAGE}.runtime.fusion")
    graph = chain().data
    graph["nodes"][0]["attrs"]["alpha"] = 3
    (one,) = fusion.matches(graph, package)
    assert one.attrs["alpha"] == 3 and one.operands["skip"] == "skip"
    graph["nodes"][2]["attrs"]["approximate"] = "none"
    assert all(len(one.nodes) < 5 for one in fusion.matches(graph, package))


def test_what_others_read_must_be_an_output(package: dict[str, Any]) -> None:
    fusion = importlib.import_module(f"{PACKAGE}.runtime.fusion")
    graph = by_hand().data
    graph["outputs"].append("exp_0.y")
    assert fusion.matches(graph, package) == ()
    assert fusion.candidates(graph, package) == (("exp_0", "sum_1", "div_2"),)


def test_a_damaged_graph_is_refused_by_its_place(package: dict[str, Any]) -> None:
    fusion = importlib.import_module(f"{PACKAGE}.runtime.fusion")
    fault = importlib.import_module(f"{PACKAGE}.runtime.groups").GraphFault
    graph = chain().data
    graph["nodes"][1]["inputs"]["x"] = "nowhere"
    for find in (fusion.matches, fusion.candidates):
        with pytest.raises(fault, match="nodes.1..inputs.x: `nowhere` is neither given nor made"):
            find(graph, package)
