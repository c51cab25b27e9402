"""Ops that the catalogue lacks: a project of its own generates, checks clean and passes its emitted tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{cwd}"}
    return subprocess.run([sys.executable, *words], cwd=cwd, env=env, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scratch")
    shutil.copytree(ROOT / "tests/scratch", folder / "ops")
    settings = '[tool.pullback]\nspecs = ["ops"]\noutput = "mine/kernels"\npackage = "mine.kernels"\ntests = "checks"\n'
    (folder / "pyproject.toml").write_text(settings)
    shutil.copy(ROOT / "tests/conftest.py", folder)
    done = run("-m", "codegen", "generate", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_it_checks_clean(project: Path) -> None:
    for words in (("check",), ("check", "--full")):
        done = run("-m", "codegen", *words, cwd=project)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("specs", sorted(p.name for p in (ROOT / "tests/scratch").iterdir()))
def test_its_own_tests_pass(project: Path, specs: str) -> None:
    ops = re.findall(r"(?m)^- op: (\w+)", (project / "ops" / specs).read_text())
    found = [path for op in ops if (project / (path := f"checks/test_{op}.py")).exists()]
    assert found
    done = run("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *found, cwd=project)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]


def test_a_number_may_stand_for_a_scalar_tensor_beside_rows(project: Path) -> None:
    """A scalar of a row op: a number and a tensor give the same, forward and backward."""
    code = """
import torch
from mine.kernels import scaled_less_mean as op
x = torch.randn(3, 5, dtype=torch.float64, device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))
found = []
for scale in (2.5, torch.tensor(2.5, dtype=torch.float64, device=x.device), torch.tensor(2.5).numpy()):
    leaf = x.clone().requires_grad_()
    y = op(leaf, scale)
    y.square().sum().backward()
    assert torch.allclose(y, leaf * 2.5 - leaf.mean(-1, keepdim=True), rtol=1e-12, atol=1e-12)
    found.append((y, leaf.grad))
assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other))
"""
    done = run("-c", code, cwd=project)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_star_imports_every_op(project: Path) -> None:
    done = run("-c", "from mine.kernels import *\nprint(less_last.__name__, scaled_less_mean.__name__)", cwd=project)
    assert (done.returncode, done.stdout) == (0, "less_last scaled_less_mean\n"), done.stderr[-2000:]
