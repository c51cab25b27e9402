"""A package for inference, made of a slice of the catalogue: no kernel, member or import of training is in it, and it runs."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from codegen.emit import TRAINING_ONLY  # noqa: E402
from codegen.manifest import split_ops  # noqa: E402
from generated.runtime.testing import DEVICE  # noqa: E402

ROOT = Path(__file__).parents[2]
SLICE = (
    "add",
    "sub",
    "mul",
    "relu",
    "silu",
    "rms_norm",
    "layer_norm",
    "batch_norm",
    "softmax",
    "argmax",
    "gt",
    "mean",
    "nan_to_num",
    "sgd",
    "adam",
)
STEPS = ("sgd", "adam")
LIBRARY = ("math.py", "rows.py", "polynomials.py")
"""Functions that any spec may call: what is there does not depend on the ops."""


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{cwd}", "TRITON_INTERPRET": str(int(DEVICE == "cpu"))}
    return subprocess.run([sys.executable, *words], cwd=cwd, env=env, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inference")
    texts = {
        n: part for f in sorted((ROOT / "specs").glob("*.yaml")) for n, part in split_ops(f.read_text(encoding="utf-8"))
    }
    (folder / "ops").mkdir()
    (folder / "ops/slice.yaml").write_text("\n\n".join(texts[n].rstrip() for n in SLICE) + "\n", encoding="utf-8")
    settings = (
        '[tool.pullback]\nspecs = ["ops"]\noutput = "mine"\npackage = "mine"\ntests = "checks"\nmode = "inference"\n'
    )
    (folder / "pyproject.toml").write_text(settings)
    done = run("-m", "codegen", "generate", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in STEPS:
        assert (
            f"`{name}` is left out: it updates the state of an optimizer, and the package is for inference"
            in done.stderr
        )
    return folder


def modules(folder: Path) -> Iterator[tuple[str, ast.Module]]:
    for path in sorted((folder / "mine").rglob("*.py")):
        yield path.relative_to(folder).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def members(tree: ast.AST) -> Iterator[str]:
    """Every function, method, class and class member that a module defines."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        for item in node.body if isinstance(node, ast.ClassDef) else ():
            targets = (
                item.targets
                if isinstance(item, ast.Assign)
                else [item.target] if isinstance(item, ast.AnnAssign) else []
            )
            yield from (t.id for t in targets if isinstance(t, ast.Name))


def imported(tree: ast.AST) -> Iterator[str]:
    """The last words of all modules and names that are imported, wherever the import stands."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (a.name.rpartition(".")[2] for a in node.names)
            yield (getattr(node, "module", None) or "").rpartition(".")[2]


def own_members(file: str, name: str) -> set[str]:
    """What a class of a template defines itself."""
    tree = ast.parse((ROOT / "templates/runtime" / file).read_text(encoding="utf-8"))
    (own,) = (c for c in tree.body if isinstance(c, ast.ClassDef) and c.name == name)
    names = {t.name for t in own.body if isinstance(t, ast.FunctionDef)}
    return names | {t.target.id for t in own.body if isinstance(t, ast.AnnAssign) and isinstance(t.target, ast.Name)}


def test_no_member_of_training_is_in_it(project: Path) -> None:
    training = own_members("differentiable.py", "DifferentiableOp") - own_members("op.py", "RuntimeOp")
    assert {
        "backward",
        "gradients",
        "residuals",
        "equals",
        "passes",
        "plan_backward",
        "pack_backward_args",
        "ways",
    } <= training
    for path, tree in modules(project):
        found = {m for m in members(tree) if m in training or "backward" in m} - {"has_backward"}
        assert not found, (path, found)


def test_no_module_of_training_is_in_it_or_imported(project: Path) -> None:
    there = dict(modules(project))
    assert not {f"mine/runtime/{n}" for n in TRAINING_ONLY} & set(there) and not {
        f"mine/ops/{n}.py" for n in STEPS
    } & set(there)
    assert {f"mine/ops/{n}.py" for n in SLICE if n not in STEPS} <= set(there)
    for path, tree in there.items():
        assert not {n.removesuffix(".py") for n in TRAINING_ONLY} & set(imported(tree)), path


def test_every_kernel_is_one_of_a_forward(project: Path) -> None:
    """From the kernels that ops and launches name on, through what these call, every `@triton.jit` function is reached."""
    kernels: dict[str, list[tuple[str, ast.FunctionDef]]] = {}
    reached: set[str] = set()
    for path, tree in modules(project):
        jits = [
            n
            for n in ast.walk(tree)
            if isinstance(n, ast.FunctionDef) and "triton.jit" in map(ast.unparse, n.decorator_list)
        ]
        for jit in jits:
            kernels.setdefault(jit.name, []).append((path, jit))
        inside = {id(n) for jit in jits for n in ast.walk(jit)}
        reached |= {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and id(n) not in inside}
    todo = [n for n in kernels if n in reached]
    while todo:
        texts = kernels[todo.pop()]
        called = {n.id for _, jit in texts for n in ast.walk(jit) if isinstance(n, ast.Name)} & set(kernels)
        todo += called - reached
        reached |= called
    paths = {
        n: [p for p, _ in texts if Path(p).name not in LIBRARY] for n, texts in kernels.items() if n not in reached
    }
    assert not {n: own for n, own in paths.items() if own}
    assert {"add_forward", "rows_by_matrix", "rms_norm_forward"} <= reached


def test_it_checks_clean_and_its_own_tests_pass(project: Path) -> None:
    for words in (("check",), ("check", "--full")):
        done = run("-m", "codegen", *words, cwd=project)
        assert done.returncode == 0, done.stdout + done.stderr
    files = [f"checks/test_{n}.py" for n in ("add", "rms_norm", "argmax")]
    done = run("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files, cwd=project)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]


RUNS = """
import torch
import mine
from mine.runtime.linalg import batched_matmul, embedding, linear

device = "cuda" if torch.cuda.is_available() else "cpu"
x, w, b = (torch.randn(s, device=device) for s in ((5, 8), (3, 8), (3,)))
close = torch.testing.assert_close
close(linear(x, w, b), torch.nn.functional.linear(x, w, b))
close(batched_matmul(x[None], w.T[None]), (x @ w.T)[None])
close(embedding(torch.tensor([2, 0], device=device), w), w[[2, 0]])
close(mine.rms_norm(x, w[0]), torch.nn.functional.rms_norm(x, (8,), w[0], 1e-6))
wide = torch.randn(2, 3, 2, 3, 2, 3, device=device).permute(5, 4, 3, 2, 1, 0)
close(mine.add(wide, wide[:1, :, :1, :, :1]), wide + wide[:1, :, :1, :, :1])
try:
    linear(x.requires_grad_(), w, b)
except RuntimeError as error:
    assert "linear has no backward" in str(error) and "generated for inference" in str(error), error
else:
    raise AssertionError("a gradient was lost")
"""


def test_it_runs(project: Path) -> None:
    done = run("-W", "ignore", "-c", RUNS, cwd=project)
    assert done.returncode == 0, done.stderr


GRAPH = """
import torch
import mine
from mine.runtime.graph import SymTensor
from mine.runtime.linalg import linear
from mine.runtime.lowering import LoweringMode

device = "cuda" if torch.cuda.is_available() else "cpu"
x, graph = SymTensor.input("f32", (None, 8))
y = mine.rms_norm(mine.relu(linear(x, graph.param("w", (4, 8), init=0.5), graph.param("b", (4,), init=-1.0))), graph.param("n", (4,), init=2.0))
run = graph.lower(y, LoweringMode.INFERENCE).load(device, 5)
value = torch.randn(5, 8, device=device)
want = torch.nn.functional.rms_norm(torch.relu(value @ run.params["w"].T + run.params["b"]), (4,), run.params["n"], 1e-6)
torch.testing.assert_close(run.forward(value), want)
"""


def test_a_graph_runs_in_it(project: Path) -> None:
    done = run("-W", "ignore", "-c", GRAPH, cwd=project)
    assert done.returncode == 0, done.stderr
