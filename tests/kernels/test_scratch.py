"""Ops that the catalogue lacks: a project of its own generates, checks clean and passes its emitted tests."""

from __future__ import annotations

import os
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


def test_its_own_tests_pass(project: Path) -> None:
    done = run("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "checks", cwd=project)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]
