"""Fused ops run: what `pullback fuse` composes, generated and put in the place of its steps, has their values and gradients."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import generated  # noqa: E402
from codegen import manifest  # noqa: E402
from codegen.diagnostics import Report  # noqa: E402
from codegen.fused import member  # noqa: E402
from codegen.loader import load  # noqa: E402
from codegen.spec import class_name  # noqa: E402
from generated.runtime import fusion as generated_fusion  # noqa: E402
from generated.runtime.graph import Graph, SymTensor  # noqa: E402
from generated.runtime.testing import DEVICE  # noqa: E402

ROOT = Path(__file__).parents[2]
OPS = "add mul relu gelu silu exp sum div softmax rms_norm layer_norm where gt bias_add".split()
PACKAGE = "fused_in_a_test"
BATCH, COLUMNS = 5, 37


Recorded = tuple[Graph, list[SymTensor]]


def begun(*shape: int) -> tuple[SymTensor, Graph, Any]:
    """A graph with its input, and what makes more inputs of the same shape."""
    whole = (None, *(shape or (COLUMNS,)))
    x, graph = SymTensor.input("f64", whole)
    return x, graph, lambda name: graph.input("f64", whole, name)


def chain() -> Recorded:
    """Elementwise, with a broadcast operand, a number, a value that is read twice, and one that is an output too."""
    x, graph, more = begun()
    s = generated.add(x, more("skip"), alpha=0.5)
    h = generated.gelu(generated.mul(s, graph.param("gain", (COLUMNS,), "f64")), approximate="tanh")
    return graph, [generated.add(h, generated.mul(s, 0.25)), s]


def stopped() -> Recorded:
    """A gradient that stops within the group: no node of the graph is left."""
    x, graph, more = begun()
    gate = generated.silu(x).stop_gradient()
    kept = generated.gt(x, 0.1)
    return graph, [generated.where(kept, generated.mul(gate, x), more("z"))]


def seen() -> Recorded:
    """What the group reads without a gradient, and others too: that the others get none is still a node's to say."""
    x, graph, more = begun()
    gate = generated.exp(x).stop_gradient()
    return graph, [generated.mul(gate, generated.mul(x, more("z"))), gate]


def ended() -> Recorded:
    """What comes out of the group has no gradient."""
    x, graph, more = begun()
    return graph, [generated.mul(generated.exp(x), more("z")).stop_gradient(), generated.silu(x)]


def norm() -> Recorded:
    """A norm between a residual and a bias; what is normalised is read again."""
    x, graph, more = begun()
    s = generated.add(x, more("skip"))
    n = generated.rms_norm(s, graph.param("norm.weight", (COLUMNS,), "f64"), eps=1e-5)
    return graph, [generated.relu(generated.add(n, graph.param("bias", (COLUMNS,), "f64"))), s]


def layers() -> Recorded:
    x, graph, _ = begun()
    s = generated.mul(x, graph.param("scale", (COLUMNS,), "f64"))
    y = generated.layer_norm(s, (COLUMNS,), graph.param("weight", (COLUMNS,), "f64"))
    return graph, [generated.mul(y, 2.0)]


def weights() -> Recorded:
    """A softmax whose result its own backward reads, scaled."""
    x, graph, more = begun()
    return graph, [generated.mul(generated.softmax(generated.mul(x, 0.5), dim=-1), more("z"))]


def by_hand() -> Recorded:
    """A softmax of three ops: what is reduced stretches again."""
    x, graph, _ = begun()
    e = generated.exp(x)
    return graph, [generated.div(e, generated.sum(e, dim=-1, keepdim=True))]


def channels() -> Recorded:
    x, graph, _ = begun(3, 7)
    return graph, [generated.relu(generated.bias_add(x, graph.param("bias", (3,), "f64")))]


GRAPHS = {f.__name__: f for f in (chain, stopped, seen, ended, norm, layers, weights, by_hand, channels)}
STAY = {"seen": ("stop_gradient_1",), "ended": ("stop_gradient_1", "silu_1")}
"""Nodes that no fused op stands for."""


def described(name: str) -> dict[str, Any]:
    graph, outputs = GRAPHS[name]()
    return graph.to_dict([o.name for o in outputs])


def joined(name: str) -> tuple[str, ...]:
    """The nodes that one op is to stand for."""
    return tuple(n["name"] for n in described(name)["nodes"] if n["name"] not in STAY.get(name, ()))


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
    for name in GRAPHS:
        (folder / f"{name}.json").write_text(json.dumps(described(name)))
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


def run_node(node: Mapping[str, Any], ops: Mapping[str, Any], known: dict[str, Any]) -> None:
    operands = {n: known[v] if isinstance(v, str) else v for n, v in node["inputs"].items()}
    made = node["outputs"]["y"]["name"]
    if node["op"] == "stop_gradient":
        known[made] = operands["x"].detach()
    else:
        attrs = {n: tuple(v) if isinstance(v, list) else v for n, v in node["attrs"].items()}
        known[made] = importlib.import_module(f"{PACKAGE}.runtime.binding").call(ops[node["op"]](**attrs), operands)


def run_fused(one: Any, known: dict[str, Any]) -> None:
    operands = {n: known[v] if isinstance(v, str) else v for n, v in one.operands.items()}
    results = importlib.import_module(f"{PACKAGE}.runtime.binding").call(one.op(**one.attrs), operands)
    results = results if isinstance(results, tuple) else (results,)
    known |= {one.outputs[t.name]: r for t, r in zip(one.op.outputs, results)}


def computed(graph: Mapping[str, Any], ops: Mapping[str, Any], found: tuple[Any, ...] = ()) -> list[Any]:
    """The outputs and the gradients of all that is given, with fused ops in the place of what they stand for: each where the last
    of its nodes stood, and what reads its results after it."""
    given = tensors(graph)
    known: dict[str, Any] = dict(given)
    last = {one.nodes[-1]: one for one in found}
    replaced = {name for one in found for name in one.nodes}
    waiting = [(last.get(n["name"]), n) for n in graph["nodes"] if n["name"] in last or n["name"] not in replaced]
    while waiting:
        operands = [(one.operands if one is not None else node["inputs"]).values() for one, node in waiting]
        k = next(k for k, names in enumerate(operands) if all(v in known for v in names if isinstance(v, str)))
        one, node = waiting.pop(k)
        run_fused(one, known) if one is not None else run_node(node, ops, known)
    outputs = [known[n] for n in graph["outputs"]]
    flowing = [o for o in outputs if o.requires_grad]
    seeds = [
        torch.randn(o.shape, dtype=o.dtype, generator=torch.Generator().manual_seed(1)).to(o.device) for o in flowing
    ]
    grads = torch.autograd.grad(flowing, list(given.values()), seeds, allow_unused=True)
    return [*outputs, *(o.requires_grad for o in outputs), *grads]


@pytest.mark.parametrize("name", GRAPHS)
def test_a_fused_op_is_its_steps(package: dict[str, Any], name: str) -> None:
    """In float64, so that nothing but the order of sums may differ."""
    fusion = importlib.import_module(f"{PACKAGE}.runtime.fusion")
    graph = described(name)
    found = fusion.matches(graph, package)
    assert [one.nodes for one in found] == [joined(name)]
    assert fusion.candidates(graph, package) == ()
    for fused, plain in zip(computed(graph, package, found), computed(graph, package), strict=True):
        if isinstance(plain, torch.Tensor):
            torch.testing.assert_close(fused, plain, rtol=1e-11, atol=1e-12)
        else:
            assert fused is plain


@pytest.mark.parametrize("name", GRAPHS)
def test_without_fused_ops_the_runtime_names_what_could_be_one(package: dict[str, Any], name: str) -> None:
    fusion = importlib.import_module(f"{PACKAGE}.runtime.fusion")
    plain = {n: op for n, op in package.items() if not op.fuses}
    assert fusion.matches(described(name), plain) == ()
    assert fusion.candidates(described(name), plain) == (joined(name),)


def test_numbers_and_names_may_differ_choices_may_not(package: dict[str, Any]) -> None:
    """A fused op stands for other numbers than those that it was composed of, and for no other choice."""
    fusion = importlib.import_module(f"{PACKAGE}.runtime.fusion")
    graph = described("chain")
    graph["nodes"][0]["attrs"]["alpha"] = 3
    (one,) = fusion.matches(graph, package)
    assert one.attrs["alpha"] == 3 and one.operands["skip"] == "skip"
    (gelu,) = [n for n in graph["nodes"] if n["op"] == "gelu"]
    gelu["attrs"]["approximate"] = "none"
    assert all(len(one.nodes) < 5 for one in fusion.matches(graph, package))


def test_a_gradient_must_stop_where_the_steps_say_so(package: dict[str, Any]) -> None:
    """Without the node, and with one elsewhere, the op is another."""
    fusion = importlib.import_module(f"{PACKAGE}.runtime.fusion")
    x, graph, more = begun()
    z, kept = more("z"), generated.gt(x, 0.1)
    free = generated.where(generated.gt(x, 0.1), generated.mul(generated.silu(x), x), z)
    late = generated.where(kept, generated.mul(generated.silu(x), x).stop_gradient(), z)
    found = fusion.matches(graph.to_dict([free.name, late.name]), package)
    assert not any("where" in n for one in found for n in one.nodes)


def test_what_others_read_must_be_an_output(package: dict[str, Any]) -> None:
    fusion = importlib.import_module(f"{PACKAGE}.runtime.fusion")
    graph = described("by_hand")
    graph["outputs"].append("exp_1.y")
    assert fusion.matches(graph, package) == ()
    assert fusion.candidates(graph, package) == (("exp_1", "sum_1", "div_1"),)


def test_a_damaged_graph_is_refused_by_its_place(package: dict[str, Any]) -> None:
    fusion = importlib.import_module(f"{PACKAGE}.runtime.fusion")
    fault = importlib.import_module(f"{PACKAGE}.runtime.groups").GraphFault
    graph = described("chain")
    graph["nodes"][1]["inputs"]["x"] = "nowhere"
    for find in (fusion.matches, fusion.candidates):
        with pytest.raises(fault, match="nodes.1..inputs.x: `nowhere` is neither given nor made"):
            find(graph, package)


def statistics(updates: bool) -> list[tuple[str, ...]]:
    """The places of `reglu` in a graph that reads a running mean before a norm updates it, and multiplies after it."""
    x, graph = SymTensor.input("f32", (None, 4))
    mean, var = graph.buffer("mean", (4,)), graph.buffer("var", (4,), init=1.0)
    read = generated.relu(mean)
    normed = generated.batch_norm(x, mean, var, training=True)
    y = generated.mul(read, graph.param("w", (4,)))
    data = graph.to_dict([normed.name, y.name])
    for node in data["nodes"]:
        node["updates"] = ["running_mean", "running_var"] if updates and node["op"] == "batch_norm" else []
    found = generated_fusion.matches(
        data, {**generated_fusion.installed(), "relu": generated.Relu, "mul": generated.Mul}
    )
    return [one.nodes for one in found]


def test_no_read_moves_past_an_update() -> None:
    """The fused op would stand at the product, where the mean is another one."""
    assert statistics(updates=False) == [("relu_1", "mul_1")]
    assert statistics(updates=True) == []


INSTALLED = """\
import sys
from generated.runtime import fusion
from generated import ops
found = fusion.installed()
assert all(op.fuses and op.name == name for name, op in found.items())
assert sorted(found) == sorted(ops.FUSED)
print(sorted(found), sorted(n.rpartition(".")[2] for n in sys.modules if n.startswith("generated.ops.")) == sorted(found))
"""


def test_the_fused_ops_of_a_package_are_found_in_an_archive_too(tmp_path: Path) -> None:
    """By a list, without a look at the files, and without the import of another op."""
    archive = shutil.make_archive(str(tmp_path / "packed"), "zip", ROOT, "generated")
    env = {**os.environ, "PYTHONPATH": archive, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INSTALLED], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    declared = [op for path in (ROOT / "specs").glob("*.yaml") for op, part in manifest.split_ops(path.read_text())
                if "\n  fuses:" in part]  # fmt: skip
    assert done.stdout.strip() == f"{sorted(declared)} True"


def test_generator_and_runtime_agree_on_every_op() -> None:
    """What an op is to a group is told from its spec, and from its class: the two are one."""
    report = Report()
    compared = 0
    for op in load([ROOT / "specs"], report, ROOT):
        if op.update is not None or op.schedule == "none":
            continue
        attrs = {
            a.name: -1 if a.axis else True if a.keeps else 2 if a.size or a.type == "int" else 0.5 for a in op.attrs
        }
        attrs |= {a.name: a.enum[0] for a in op.attrs if a.enum}
        attrs |= {a.name: True for a in op.attrs if a.type == "bool"}
        both = member(op, attrs), generated_fusion.member(getattr(generated, class_name(op.name)), attrs)
        one, other = (None if found is None else asdict(found) for found in both)
        assert one == other, op.name
        compared += one is not None
    assert not report.errors and compared > 100
