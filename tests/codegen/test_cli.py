"""The command line, on a small project of its own: outcomes, texts, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from codegen.cli import main
from codegen.diagnostics import Report
from codegen.explain import explain
from codegen.loader import load

ROOT = Path(__file__).parents[2]
TWICE = """\
- op: twice
  doc: Two times the input.
  inputs: {x: [...]}
  outputs: {y: [...]}
  forward: y = 2 * x
  backward:
    x: 2 * dy
"""
SQUARE = """\
- op: square_of
  doc: The input times itself.
  inputs: {x: [...]}
  outputs: {y: [...]}
  forward: y = x * x
  backward:
    x: 2 * dy * x
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs/basic.yaml").write_text(TWICE)
    (tmp_path / "specs/more.yaml").write_text(SQUARE)
    (tmp_path / "pyproject.toml").write_text("[tool.pullback]\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def pullback(*words: str) -> Result:
    result = CliRunner().invoke(main, words)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def contents(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_generate_writes_and_check_is_clean(project: Path) -> None:
    first = pullback("generate")
    assert first.exit_code == 0, first.output
    assert "wrote generated/ops/twice.py\n" in first.stdout and "wrote generated/MANIFEST.json" not in first.stdout
    assert pullback("check").exit_code == 0 and "as generated" in pullback("check").stdout
    assert pullback("check", "--full").exit_code == 0
    before = contents(project)
    again = pullback("generate")
    assert (again.exit_code, again.stdout) == (0, "all files are up to date\n")
    assert pullback("generate", "--all").stdout == "all files are up to date\n"
    assert contents(project) == before


def test_only_the_edited_op_is_generated(project: Path) -> None:
    pullback("generate")
    (project / "specs/basic.yaml").write_text(TWICE.replace("Two times", "Twice"))
    result = pullback("check")
    assert result.exit_code == 1
    assert "generated/ops/twice.py: stale: the spec specs/basic.yaml#twice has changed\n" in result.stdout
    assert "-    " in result.stdout and "mend: pullback generate" in result.stdout
    assert "square_of" not in result.stdout
    written = pullback("generate").stdout
    assert "wrote generated/ops/twice.py\n" in written and "square_of" not in written
    assert pullback("check", "--full").exit_code == 0


def test_a_named_op_is_generated_alone(project: Path) -> None:
    assert pullback("generate", "twice").exit_code == 0
    assert not (project / "generated/ops/square_of.py").exists()
    result = pullback("check")
    assert result.exit_code == 1 and "generated/ops/square_of.py: missing" in result.stdout
    assert pullback("generate", "square_of").exit_code == 0
    assert pullback("check", "--full").exit_code == 0
    assert (project / "generated/ops/twice.py").exists()


def test_an_op_that_goes_takes_its_files_with_it(project: Path) -> None:
    """C112: a module that nothing declares any more is named by `check` and goes with the next run."""
    pullback("generate")
    (project / "specs/more.yaml").unlink()
    assert "orphaned: `square_of` is no longer declared" in pullback("check").stdout
    assert "removed generated/ops/square_of.py\n" in pullback("generate").stdout
    assert pullback("check", "--full").exit_code == 0


def test_a_hand_edit_is_shown_with_its_diff_and_undone(project: Path) -> None:
    pullback("generate")
    path = project / "generated/ops/twice.py"
    original = path.read_text()
    path.write_text(original + "EDITED = 1\n")
    result = pullback("check")
    assert result.exit_code == 1
    assert "generated/ops/twice.py: edited by hand" in result.stdout and "-EDITED = 1\n" in result.stdout
    assert "(to keep the change, make it in specs/basic.yaml)" in result.stdout
    shared = project / "generated/runtime/plan.py"
    shared.write_text(shared.read_text() + "EDITED = 1\n")
    assert "(to keep the change, copy the file under another name)" in pullback("check").stdout
    result = pullback("generate")
    assert "was edited by hand, and is as generated again" in result.stderr
    assert path.read_text() == original


def test_nothing_is_written_while_a_fault_stands(project: Path) -> None:
    """C117: one bad op among several leaves every file as it was, and the exit code says so."""
    before = contents(project)
    (project / "specs/more.yaml").write_text(SQUARE.replace("x: 2 * dy * x", "x: 2 * dy"))
    result = pullback("generate")
    assert result.exit_code == 1 and "specs/more.yaml:7:" in result.stderr and "error[" in result.stderr
    assert "1 error\n" in result.stderr
    (project / "specs/more.yaml").write_text(SQUARE)
    assert contents(project) == before
    assert pullback("verify").exit_code == 0


def test_a_link_that_leads_nowhere_or_out_is_a_diagnostic(project: Path) -> None:
    (project / "specs/away.yaml").symlink_to(project / "nowhere.yaml")
    (project / "out.yaml").write_text(TWICE.replace("twice", "thrice"))
    (project / "specs/out.yaml").symlink_to(project / "out.yaml")
    for words in (("generate",), ("check",), ("list",)):
        result = pullback(*words)
        assert result.exit_code == 1, words
    assert "specs/away.yaml:1:1: error[" in result.stderr and "specs/out.yaml:1:1: error[link]" in result.stderr
    assert not (project / "generated").exists()


def test_verify_prints_a_line_per_op(project: Path) -> None:
    result = pullback("verify")
    assert result.exit_code == 0
    assert [line.split(":")[0] for line in result.stdout.splitlines()] == ["twice", "square_of"]
    assert "twice: verified, 1 variant, " in result.stdout
    assert pullback("verify", "twice").stdout.count("\n") == 1


def test_list_prints_a_table_and_an_array(project: Path) -> None:
    rows = json.loads(pullback("list", "--json").stdout)
    assert [list(row) for row in rows] == [
        ["op", "family", "inputs", "params", "outputs", "backward", "schedule", "residuals", "file"]
    ] * 2
    assert rows[1] == {
        "op": "square_of",
        "family": "more",
        "inputs": ["x"],
        "params": [],
        "outputs": ["y"],
        "backward": "declared",
        "schedule": "pointwise",
        "residuals": ["x"],
        "file": "specs/more.yaml",
    }
    pullback("generate")
    assert json.loads(pullback("list", "--json").stdout) == rows
    table = pullback("list").stdout.splitlines()
    assert table[0].split() == [
        "OP",
        "FAMILY",
        "INPUTS",
        "PARAMS",
        "OUTPUTS",
        "BACKWARD",
        "SCHEDULE",
        "RESIDUALS",
        "FILE",
    ]
    assert len({line.index(" specs/") for line in table[1:]}) == 1


def test_explain_prints_what_is_known(project: Path) -> None:
    result = pullback("explain", "square_of")
    assert result.exit_code == 0 and "square_of" in result.stdout and "pointwise" in result.stdout


def test_explain_prints_a_plan_for_every_op() -> None:
    """The plan printed is the one emitted, whatever its schedule."""
    report = Report()
    ops = load([ROOT / "specs"], report, ROOT)
    assert not report.errors
    for op in (op for op in ops if op.schedule != "none"):
        text = explain(op, report)
        kernel = f"{op.name}_step" if op.state else f"{op.name}_forward"
        assert kernel in text and "Plan: " in text, op.name


@pytest.mark.parametrize("words", [("generate", "twise"), ("verify", "twise"), ("explain", "twise")])
def test_an_unknown_op_is_misuse(project: Path, words: tuple[str, ...]) -> None:
    before = contents(project)
    result = pullback(*words)
    assert (result.exit_code, result.stderr) == (2, "error: no spec declares `twise`; did you mean `twice`?\n")
    assert contents(project) == before


@pytest.mark.parametrize("words", [("explain",), ("explian", "twice"), ("check", "--ful"), ("list", "--json", "extra")])
def test_a_wrong_call_is_misuse(project: Path, words: tuple[str, ...]) -> None:
    assert pullback(*words).exit_code == 2


def test_faulty_settings_and_no_specs_are_misuse(project: Path) -> None:
    (project / "pyproject.toml").write_text('[tool.pullback]\noutputs = "x"\n')
    result = pullback("check")
    assert result.exit_code == 2 and "did you mean `output`?" in result.stderr
    (project / "pyproject.toml").write_text('[tool.pullback]\nspecs = ["nowhere"]\n')
    result = pullback("generate")
    assert result.exit_code == 2 and "there is no folder nowhere" in result.stderr


def test_the_project_is_found_from_below(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "some/where").mkdir(parents=True)
    monkeypatch.chdir(project / "some/where")
    assert pullback("generate").exit_code == 0
    assert (project / "generated/ops/twice.py").exists() and list((project / "some/where").iterdir()) == []


def test_the_other_settings_are_used(project: Path) -> None:
    (project / "pyproject.toml").write_text(
        '[tool.pullback]\noutput = "src/mine"\npackage = "mine"\ntests = "checks"\nmode = "inference"\n'
    )
    assert pullback("generate").exit_code == 0
    assert (project / "src/mine/ops/twice.py").exists() and (project / "checks/test_twice.py").exists()
    assert pullback("check", "--full").exit_code == 0
    text = (project / "src/mine/ops/twice.py").read_text()
    assert "backward" not in text.lower().replace("has_backward", "")


def test_a_stranger_in_the_way_is_an_error_of_one_line(project: Path) -> None:
    (project / "generated").mkdir()
    (project / "generated/py.typed").write_text("mine\n")
    result = pullback("generate")
    assert result.exit_code == 1
    fault = "Pullback did not write this file, so it is not overwritten; delete it, or move it away"
    assert result.stderr == f"error: generated/py.typed: {fault}\n"


def test_check_imports_nothing_heavy(project: Path) -> None:
    """It is a matter of milliseconds, whatever the machine: hashes alone."""
    pullback("generate")
    code = (
        "import sys\nfrom codegen.cli import main\n"
        "try:\n    main(['check'])\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'numpy', 'jinja2', 'black', 'libcst', 'yaml', 'mpmath', 'torch', 'triton'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_progress_without_a_terminal(project: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "codegen", "generate"], env=env, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_progress_on_a_terminal(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pty

    parent, child = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"}
    code = "from codegen import cli\np = cli.Progress()\np.begun -= 1\np('verifying twice', 0, 2)\np.clear()\n"
    subprocess.run([sys.executable, "-c", code], env=env, stderr=child, check=True)
    os.close(child)
    shown = os.read(parent, 1000).decode()
    os.close(parent)
    assert shown == "\r\x1b[Kverifying twice (1 of 2)\r\x1b[K"
