"""`pullback add`: ops of the catalogue in a project of one's own."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from codegen import catalogue
from codegen.cli import main
from codegen.diagnostics import Report
from codegen.loader import load_text

ROOT = Path(__file__).parents[2]
OWN = "- op: own\n  inputs: {x: [...]}\n  outputs: {y: [...]}\n  forward: y = x + 1\n  backward: {x: dy}\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def pullback(*words: str) -> Result:
    result = CliRunner().invoke(main, words)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_what_is_added_is_generated_as_in_the_catalogue(project: Path) -> None:
    """From an empty folder, with the steps of a fused op before it, and to the same bytes as here."""
    result = pullback("add", "softmax", "add_silu", "adamw")
    assert (result.exit_code, result.stdout) == (0, (
        "softmax: added to specs/softmaxes.yaml\nadd: added to specs/arithmetic.yaml\nsilu: added to specs/activations.yaml\n"
        "add_silu: added to specs/fused.yaml\nadamw: added to specs/optimizers.yaml\nnext: pullback generate\n"
    ))  # fmt: skip
    assert pullback("generate").exit_code == 0 and pullback("check", "--full").exit_code == 0
    made = sorted(p.name for p in (project / "generated/ops").glob("*.py"))
    assert made == ["__init__.py", "adamw.py", "add.py", "add_silu.py", "silu.py", "softmax.py"]
    for name in made[1:]:
        assert (project / "generated/ops" / name).read_bytes() == (ROOT / "generated/ops" / name).read_bytes()


def test_what_is_declared_is_left_as_it_is(project: Path) -> None:
    """C112: an op of the same name may be another one by now; it is the project's."""
    (project / "specs").mkdir()
    mine = OWN.replace("own", "silu")
    (project / "specs/mine.yaml").write_text(mine)
    result = pullback("add", "silu", "relu", "--to", "specs/mine.yaml")
    assert result.exit_code == 0
    assert result.stdout.startswith("relu: added to specs/mine.yaml\nsilu: declared already, left as it is\n")
    text = (project / "specs/mine.yaml").read_text()
    assert text == f"{mine}\n{catalogue.texts()['relu'].text}"
    again = pullback("add", "relu")
    assert (again.exit_code, again.stdout) == (0, "relu: declared already, left as it is\n")
    assert (project / "specs/mine.yaml").read_text() == text and len(list((project / "specs").iterdir())) == 1


def test_refusals_write_nothing(project: Path) -> None:
    (project / "specs").mkdir()
    result = pullback("add", "relu", "sofmax")
    assert (result.exit_code, result.stderr) == (2, "error: the catalogue has no `sofmax`; did you mean `softmax`?\n")
    assert "`pullback list --catalogue` prints it" in pullback("add", "qqqqqq").stderr
    for path in ("elsewhere.yaml", "specs/mine.txt", "specs/../mine.yaml"):
        result = pullback("add", "relu", "--to", path)
        assert result.exit_code == 2 and f"error: {path} is no .yaml file below specs" in result.stderr
    assert pullback("add").exit_code == 2
    assert not list((project / "specs").iterdir())
    (project / "specs/broken.yaml").write_text(OWN.replace("forward: y = x + 1", "forward: y = x +"))
    result = pullback("add", "relu")
    assert result.exit_code == 1 and "specs/broken.yaml:4:" in result.stderr
    indented = "".join(f"  {line}\n" for line in OWN.splitlines())
    (project / "specs/broken.yaml").write_text(indented)
    result = pullback("add", "relu", "--to", "specs/broken.yaml")
    assert result.exit_code == 1 and "error[not-appendable]" in result.stderr
    assert (project / "specs/broken.yaml").read_text() == indented
    (project / "specs/broken.yaml").rename(project / "specs/activations.yaml")
    result = pullback("add", "softmax", "relu")  # one file could take its op
    assert result.exit_code == 1 and "specs/activations.yaml:" in result.stderr
    assert [p.name for p in (project / "specs").iterdir()] == ["activations.yaml"]


def test_line_ends_are_those_of_the_file(project: Path) -> None:
    (project / "specs").mkdir()
    (project / "specs/activations.yaml").write_bytes(OWN.replace("\n", "\r\n").encode())
    assert pullback("add", "relu").exit_code == 0
    text = (project / "specs/activations.yaml").read_bytes()
    assert b"- op: relu\r\n" in text and b"\n" not in text.replace(b"\r\n", b"")


def test_each_op_stands_by_itself() -> None:
    """The text of an op alone, as it is copied, is the op of its file."""
    known, whole = catalogue.texts(), {op.name: op for op in catalogue.ops()}
    assert list(known) == list(whole) and len(known) > 150
    for name, one in known.items():
        report = Report()
        (op,) = load_text(one.text, report, one.file)
        assert not report.errors and (op.name, op.doc, op.file) == (name, whole[name].doc, one.file)
        assert [t.name for t in op.tensors] == [t.name for t in whole[name].tensors]


def test_the_catalogue_is_listed(project: Path) -> None:
    """Where there is no project at all."""
    lines = pullback("list", "--catalogue").stdout.splitlines()
    assert lines[0].split() == ["OP", "FILE", "BACKWARD", "DOC"] and len(lines) == len(catalogue.texts()) + 1
    assert any(line.split()[:3] == ["argmax", "reductions.yaml", "none"] for line in lines)
