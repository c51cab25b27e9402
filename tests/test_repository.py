"""The repository as a whole: what is committed, what must not be, and what ships."""

from __future__ import annotations

import ast
import difflib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from codegen import manifest
from codegen.config import Config, find
from codegen.diagnostics import Report
from codegen.primitives import MONOIDS, SCANS, TABLE

ROOT = Path(__file__).parents[1]
OURS = ("codegen", "templates")
EMITTED = ("generated", "tests/generated")


def run(*words: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, check=False)


def config() -> Config:
    project = find(ROOT, Report())
    assert project is not None and project.root == ROOT
    return project.config


def op_names() -> set[str]:
    return {op for _, text in manifest.spec_texts(ROOT, config()) for op, _ in manifest.split_ops(text)}


def tracked() -> list[Path]:
    """What is committed, or would be: everything that git does not ignore."""
    done = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def sources(*folders: str) -> list[Path]:
    return [p for folder in folders for p in sorted((ROOT / folder).rglob("*")) if p.suffix in (".py", ".pyi", ".j2")]


# ---------------------------------------------------------------------------------------------- no op is known


def test_no_ops_name_is_in_the_generator() -> None:
    """Names that the language itself has, such as `abs`, are words of the primitives' table; all others are nowhere."""
    names = op_names()
    words = {*TABLE, *MONOIDS, *SCANS, *dir(__builtins__), "add", "sub", "mul", "div", "neg", "pow", "eq", "where"}
    math = (ROOT / "templates" / "runtime" / "math.py").read_text()
    words |= set(re.findall(r"^def (\w+)", math, re.MULTILINE))  # what the primitives are written in
    own = sorted(names - words)
    assert len(own) > 5, "the specs were not found"
    # Behind a dot it is a method of torch or a function of NumPy.
    pattern = re.compile(r"(?<![A-Za-z0-9_.])(" + "|".join(map(re.escape, own)) + r")(?![A-Za-z0-9_])", re.IGNORECASE)
    found = []
    for path in sources(*OURS):
        for number, line in enumerate(path.read_text().split("\n"), 1):
            found += [f"{path.relative_to(ROOT)}:{number}: {m.group(1)}" for m in pattern.finditer(line)]
    assert found == []


def test_nothing_branches_on_an_ops_name() -> None:
    found = []
    for path in sources("codegen"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                named = any(re.search(r"\b(op|spec|plan|verdict)(\.op)?\.name$", ast.unparse(side)) for side in sides)
                if named and any(
                    isinstance(n, ast.Constant) and isinstance(n.value, str) for s in sides for n in ast.walk(s)
                ):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert found == []


# ---------------------------------------------------------------------------------------------- what is committed


@pytest.mark.parametrize(
    ("folder", "env"),
    [(".", {"PYTHONHASHSEED": "0"}), ("tests", {"PYTHONHASHSEED": "7", "LANG": "tr_TR.UTF-8", "LC_ALL": "C"})],
)
def test_the_committed_tree_is_what_the_specs_give(folder: str, env: dict[str, str]) -> None:
    """C109: from other folders, hash seeds and languages: the same bytes."""
    done = run(sys.executable, "-m", "codegen", "check", "--full", cwd=ROOT / folder, PYTHONPATH=str(ROOT), **env)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_fast_check_is_clean_and_under_its_bound() -> None:
    done = run(sys.executable, "-X", "importtime", "-m", "codegen", "check")
    assert done.returncode == 0, done.stdout
    for heavy in ("numpy", "jinja2", "black", "libcst", "yaml", "mpmath", "torch", "triton"):
        assert not re.search(rf"\| +{heavy}$", done.stderr, re.MULTILINE), heavy


def test_the_generator_imports_neither_torch_nor_triton_nor_what_it_generates() -> None:
    modules = sorted(
        f"codegen.{p.stem}" for p in (ROOT / "codegen").glob("*.py") if p.stem not in ("__init__", "__main__")
    )
    code = f"import sys, {', '.join(modules)}\nprint(sorted({{'torch', 'triton', 'generated'}} & set(sys.modules)))"
    done = run(sys.executable, "-c", code)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_git_keeps_lf_and_merges_the_lists_line_by_line() -> None:
    names = [*(str(p.relative_to(ROOT)) for p in sources("generated")), "generated/MANIFEST.json"]
    done = run("git", "check-attr", "eol", "merge", "--", *names)
    assert done.stdout.count("eol: lf") == len(names)
    for name in ("generated/MANIFEST.json", "generated/__init__.pyi"):
        assert f"{name}: merge: union\n" in done.stdout
    for path in tracked():
        if path.suffix not in (".png",):
            assert b"\r" not in path.read_bytes(), path


def test_no_forbidden_words() -> None:
    """Nothing that is unfinished, silenced, or speaks of the machine it was made on."""
    words = [
        "TO" + "DO",
        "FIX" + "ME",
        "NotImplemented" + "Error",
        "pytest" + ".skip",
        r"mark\." + "xfail",
        r"mark\." + "skip",
    ]
    words += [
        "type" + ": ignore",
        "/wo" + "rk/",
        "sha" + "red/",
        "/ro" + "ot/",
        r"py" + r"pi\.org",
        "python" + "hosted",
    ]
    pattern = re.compile("|".join(words))
    found = []
    for path in tracked():
        for number, line in enumerate(path.read_bytes().decode("utf-8", "replace").split("\n"), 1):
            if pattern.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    assert found == []


CASES = (
    "C001 C003 C004 C006 C010 C012 C013 C014 C016 C017 C019 C020 C023 C025 C026 C028 C033 C037 C041 C043 C047 C049 "
    "C050 C052 "
    "C053 C054 C056 C059 C061 C062 C064 C067 C068 C070 C071 C072 C073 C074 C075 C078 C080 C081 C083 C084 C085 C087 "
    "C089 C091 "
    "C092 C093 C094 C095 C096 C097 C098 C100 C102 C104 C105 C106 C108 C109 C111 C112 C114 C115 C117 C118 C120"
).split()
"""Kinds of inputs that once broke something: the numbers are in the docstrings of the tests that hold them off."""


def test_no_case_is_lost() -> None:
    found: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found |= set(re.findall(r"\bC\d{3}\b", ast.get_docstring(node) or ""))
    assert set(CASES) <= found, sorted(set(CASES) - found)


# ---------------------------------------------------------------------------------------------- left alone by tools


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The emitted files in a folder without settings, as in a user's repository."""
    for folder in EMITTED:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def emitted(root: Path) -> dict[str, bytes]:
    return {
        p.relative_to(root).as_posix(): p.read_bytes()
        for f in EMITTED
        for p in sorted((root / f).rglob("*"))
        if p.is_file() and "__pycache__" not in p.parts
    }


def changed(before: dict[str, bytes], after: dict[str, bytes]) -> str:
    """A diff of what a tool has changed: two whole trees beside each other would drown the one line that matters."""
    lines: list[str] = []
    for name in sorted(before.keys() | after.keys()):
        old, new = (tree.get(name, b"").decode().splitlines() for tree in (before, after))
        lines += difflib.unified_diff(old, new, name, name, lineterm="")
    return "\n".join(lines)


HOOKS = (
    "end_of_file_fixer",
    "trailing_whitespace_fixer",
    "mixed_line_ending",
    "fix_byte_order_marker",
    "check_ast",
    "check_docstring_first",
    "debug_statement_hook",
    "check_json",
    "check_merge_conflict",
    "check_case_conflict",
)


@pytest.mark.parametrize("hook", HOOKS)
def test_stock_hooks_leave_the_output_alone(copy: Path, hook: str) -> None:
    before = emitted(copy)
    suffixes = {
        "check_json": (".json",),
        "check_ast": (".py",),
        "check_docstring_first": (".py",),
        "debug_statement_hook": (".py",),
    }
    names = [name for name in before if name.endswith(suffixes.get(hook, ""))]
    run("git", "init", "-q", cwd=copy)
    done = run(sys.executable, "-m", f"pre_commit_hooks.{hook}", *names, cwd=copy)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (diff := changed(before, emitted(copy))), diff


@pytest.mark.parametrize(
    "words",
    [("--config", str(ROOT / "pyproject.toml")), ("--isolated", "--select", "E4,E7,E9,F,I,W")],
    ids=["ours", "plain"],
)
def test_ruff_leaves_the_output_alone(copy: Path, words: tuple[str, ...]) -> None:
    before = emitted(copy)
    done = run(sys.executable, "-m", "ruff", "check", "--no-cache", "--fix", *words, *EMITTED, cwd=copy)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (diff := changed(before, emitted(copy))), diff


@pytest.mark.parametrize("words", [(), ("--profile", "black")])
def test_isort_leaves_the_output_alone(copy: Path, words: tuple[str, ...]) -> None:
    before = emitted(copy)
    done = run(sys.executable, "-m", "isort", "--line-length", "120", *words, *EMITTED, cwd=copy)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (diff := changed(before, emitted(copy))), diff


def test_black_leaves_the_output_alone(copy: Path) -> None:
    """C111: the formatter of a user's own hook finds nothing to do."""
    done = run(
        sys.executable,
        "-m",
        "black",
        "--check",
        "-q",
        "--line-length",
        "120",
        "--skip-magic-trailing-comma",
        *EMITTED,
        cwd=copy,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# ---------------------------------------------------------------------------------------------- what ships


def test_the_wheel_generates_where_no_source_tree_is(tmp_path: Path) -> None:
    """Templates, runtime and catalogue travel in the wheel, and give the same bytes as the source tree."""
    done = run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist"))
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tmp_path / "dist").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    project = tmp_path / "project"
    (project / "specs").mkdir(parents=True)
    for name in ("softmaxes.yaml", "reductions.yaml", "optimizers.yaml"):
        shutil.copy(ROOT / "specs" / name, project / "specs")
    shutil.copy(ROOT / "pyproject.toml", project)
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); import codegen.cli as cli; print(cli.__file__); cli.main()"
    done = run(sys.executable, "-I", "-c", code, str(tmp_path / "site"), "generate", cwd=project)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(str(tmp_path / "site"))
    whole, made = emitted(ROOT), emitted(project)
    own = [n for n in made if re.search(r"(/ops/(?!__init__)|/runtime/|/test_)[^/]*$", n)]  # the others list every op
    assert len(own) > 40 and not (diff := changed({n: whole[n] for n in own}, {n: made[n] for n in own})), diff
    (tmp_path / "other").mkdir()
    done = run(sys.executable, "-I", "-c", code, str(tmp_path / "site"), "add", "softmax", cwd=tmp_path / "other")
    assert done.returncode == 0 and "softmax: added to specs/softmaxes.yaml" in done.stdout, done.stderr


def test_the_licence_says_whose_the_output_is() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "What Pullback writes is its users' own." in text
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text
