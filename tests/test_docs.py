"""The docs are true: generated sections are current, examples load and verify, commands and links exist."""

from __future__ import annotations

import json
import re
import runpy
import textwrap
from pathlib import Path
from typing import Any

import pytest

from codegen import fuse, groups
from codegen.cli import main
from codegen.diagnostics import Report
from codegen.infer import FUNCTIONS
from codegen.loader import load, load_text
from codegen.verify import verify_op

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/README.md",
    "docs/ops.md",
    "docs/accuracy.md",
    "docs/speed.md",
    "docs/cases.md",
    "docs/architecture.md",
    "docs/custom.md",
    "docs/fusion.md",
    "docs/spec.md",
)


def _page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def _tables() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs" / "tables.py"))


def _examples() -> list[Any]:
    found = []
    for name in ("README.md", "docs/spec.md"):
        for block in re.findall(r"^ *```yaml\n(.*?)^ *```", _page(name), re.DOTALL | re.MULTILINE):
            text = textwrap.dedent(block)
            if text.startswith("- op:"):
                found.append(pytest.param(text, id=f"{name}:{text.splitlines()[0][6:]}"))
    return found


def test_generated_sections_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    code = _tables()["main"](["--check"])
    assert code == 0, capsys.readouterr().out


def test_a_stale_section_is_named_and_mended() -> None:
    tables = _tables()
    page, sections = _page("docs/spec.md"), tables["PAGES"]["docs/spec.md"]
    stale = page.replace("| `tanh(x)` |", "| `tahn(x)` |")
    assert stale != page
    assert tables["rewritten"](stale, sections) == page


@pytest.mark.parametrize("text", _examples())
def test_examples_load_and_verify(text: str) -> None:
    report = Report()
    ops = load_text(text, report)
    assert ops, report.render()
    for op in ops:
        assert verify_op(op, report).ok, report.render()
    assert not report.found, report.render()


def test_there_are_examples() -> None:
    assert len(_examples()) >= 7


@pytest.mark.parametrize("name", PAGES)
def test_commands_exist(name: str) -> None:
    text = _page(name)
    targets = set(re.findall(r"^([a-z][a-z-]*):", _page("Makefile"), re.MULTILINE))
    assert set(re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE)) <= targets
    used = re.findall(r"(?:`|/)pullback ([a-z]+)((?: --?[a-z]+)*)", text)
    for command, options in used:
        assert command in main.commands, command
        known = {o for p in main.commands[command].params for o in p.opts} | {"--help", "-h"}
        assert set(options.split()) <= known, f"{command}{options}"


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", _page(name)):
        if "://" not in target:
            assert ((ROOT / name).parent / target).exists(), target


def test_hooks_exist() -> None:
    for hook in re.findall(r"pullback-[a-z]+", _page("README.md")):
        assert f"- id: {hook}\n" in _page(".pre-commit-hooks.yaml")


def test_every_module_is_described() -> None:
    generator, runtime = (_page("docs/architecture.md").partition(f"## {title}")[2].partition("\n## ")[0]
                          for title in ("The modules", "The runtime beyond one op"))  # fmt: skip
    described = set(re.findall(r"^\| `([a-z_]+)` \|", generator, re.MULTILINE))
    assert described == {p.stem for p in (ROOT / "codegen").glob("*.py")} - {"__init__", "__main__"}
    beside = {n for row in re.findall(r"^\| (`.*?`) \|", runtime, re.MULTILINE) for n in re.findall(r"`(\w+)`", row)}
    assert beside and all((ROOT / "templates" / "runtime" / f"{name}.py").exists() for name in beside)


def test_every_function_is_described() -> None:
    text = _page("docs/spec.md")
    assert [f for f in FUNCTIONS if f"`{f}(" not in text] == []


def test_the_page_on_fusion_shows_what_is_written() -> None:
    page = _page("docs/fusion.md")
    (graph,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    (text,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    ops = load([ROOT / "specs"], Report(), ROOT)
    (group,) = fuse.find(groups.read(json.loads(graph)), ops, "specs/fused.yaml")
    assert group.text == text
