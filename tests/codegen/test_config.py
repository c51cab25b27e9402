"""Configuration: where it is found, its defaults, and every fault of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from codegen.config import Config, Project, find
from codegen.diagnostics import Report


def found(folder: Path) -> Project:
    report = Report()
    project = find(folder, report)
    assert project is not None, report.render()
    return project


def faults(tmp_path: Path, text: str) -> str:
    (tmp_path / "pyproject.toml").write_text(text)
    report = Report()
    assert find(tmp_path, report) is None
    return report.render()


def test_everything_has_a_default(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.pullback]\n")
    assert found(tmp_path) == Project(
        tmp_path, Config(("specs",), "generated", "generated", "training", "tests/generated")
    )


def test_every_key_is_read(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[tool.pullback]\nspecs = ["ops/a", "ops/b/"]\noutput = "src/mine/kernels"\npackage = "mine.kernels"\n'
        'mode = "inference"\ntests = "tests/kernels"\n'
    )
    assert found(tmp_path).config == Config(
        ("ops/a", "ops/b"), "src/mine/kernels", "mine.kernels", "inference", "tests/kernels"
    )


def test_the_package_is_called_as_its_folder(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.pullback]\noutput = "src/kernels"\n')
    assert found(tmp_path).config.package == "kernels"


def test_the_nearest_table_above_counts(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text('[tool.pullback]\noutput = "outer"\n')
    (tmp_path / "a" / "pyproject.toml").write_text('[project]\nname = "other"\n')
    assert found(inner).root == tmp_path and found(inner).config.output == "outer"
    (tmp_path / "a" / "pyproject.toml").write_text('[tool.pullback]\noutput = "inner"\n')
    assert found(inner).root == tmp_path / "a" and found(inner).config.output == "inner"


def test_without_a_table_the_nearest_project_or_the_folder_itself(tmp_path: Path) -> None:
    inner = tmp_path / "a"
    inner.mkdir()
    assert found(inner) == Project(inner, Config())
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "other"\n')
    assert found(inner) == Project(tmp_path, Config())


def test_an_unknown_key_is_named_with_its_place_and_the_nearest(tmp_path: Path) -> None:
    text = '[project]\nspec = 1\n\n[tool.pullback]\n  spec = ["specs"]\n'
    assert faults(tmp_path, text) == (
        "pyproject.toml:5:3: error[unknown-key]: `[tool.pullback]` has no key `spec`\n"
        '      5 |   spec = ["specs"]\n'
        "        |   ^^^^\n"
        "   hint: did you mean `specs`?"
    )


def test_all_faults_come_at_once(tmp_path: Path) -> None:
    text = '[tool.pullback]\nspecs = "specs"\noutput = 1\nmodus = 2\ntests = "../tests"\n'
    shown = faults(tmp_path, text)
    assert [line.split(": ")[0] for line in shown.split("\n") if line.startswith("pyproject")] == [
        f"pyproject.toml:{n}:1" for n in (2, 3, 4, 5)
    ]
    assert 'write `specs = ["specs"]`' in shown and "did you mean `mode`?" in shown


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('output = "/abs"', "`output` is a path relative to this file"),
        ('output = "C:/abs"', "`output` is a path relative to this file"),
        ('output = "a\\\\b"', "`output` has `/` between folders"),
        ('output = "."', "`output` names a folder inside the project"),
        ('output = "a/../../b"', "`output` names a folder inside the project"),
        ('output = ""', "`output` names a folder inside the project"),
        ('specs = ["a", "../b"]', "`specs` names a folder inside the project"),
        ("specs = []", "`specs` is a list of folders"),
        ("specs = [1]", "`specs` is a list of folders"),
        ('output = "my-kernels"', "`my-kernels` is no import name"),
        ('package = "a.class"', "`a.class` is no import name"),
        ('mode = "trainig"', "did you mean `training`?"),
        ("mode = true", "`mode` is a string"),
        ('tests = "generated"', "`tests` is a folder of its own"),
        ('output = "tests/generated/x"', "`tests` is a folder of its own"),
        ('output = "specs/out"', "`output` and the specs in `specs` lie in each other"),
        ('specs = ["generated/specs"]', "`output` and the specs in `generated/specs` lie in each other"),
    ],
)
def test_faults(tmp_path: Path, line: str, text: str) -> None:
    shown = faults(tmp_path, f"[tool.pullback]\n{line}\n")
    assert text in shown and "Traceback" not in shown


def test_toml_trouble_has_its_place(tmp_path: Path) -> None:
    assert faults(tmp_path, "[tool.pullback]\nspecs = [\n").startswith("pyproject.toml:")
    (tmp_path / "pyproject.toml").write_bytes(b"\xff\xfe")
    report = Report()
    assert find(tmp_path, report) is None and "is not UTF-8" in report.render()
    assert "is a table" in faults(tmp_path, "[tool]\npullback = 3\n")


def test_settings_that_no_byte_depends_on_do_not_count() -> None:
    assert Config(specs=("a",)).emitted == Config(specs=("b",)).emitted
    assert Config(mode="inference").emitted != Config().emitted
