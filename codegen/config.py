"""Configuration: `[tool.pullback]` of the nearest pyproject.toml.

Takes a folder to begin at, returns the project's root and a frozen `Config`, or diagnostics with their place.

    [tool.pullback]
    specs = ["specs"]             # folders of *.yaml
    output = "generated"          # the folder of the package that is written
    package = "generated"         # its import name; the last part of `output` by default
    mode = "training"             # or "inference": nothing of a backward, no optimizers
    tests = "tests/generated"     # the folder of the tests that are written
"""

from __future__ import annotations

import keyword
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from codegen.diagnostics import Report, Span, nearest

FILE = "pyproject.toml"
TABLE = "[tool.pullback]"
KEYS = ("specs", "output", "package", "mode", "tests")
MODES = ("training", "inference")
_HEADER = re.compile(r"^\s*\[\s*tool\s*\.\s*pullback\s*\]")


@dataclass(frozen=True)
class Config:
    """The settings of a project; all folders are posix paths relative to its root."""

    specs: tuple[str, ...] = ("specs",)
    output: str = "generated"
    package: str = "generated"
    mode: str = "training"
    tests: str = "tests/generated"

    @property
    def emitted(self) -> tuple[tuple[str, str], ...]:
        """The settings that emitted bytes depend on."""
        return (("output", self.output), ("package", self.package), ("mode", self.mode), ("tests", self.tests))


@dataclass(frozen=True)
class Project:
    root: Path
    config: Config


def find(start: Path, report: Report) -> Project | None:
    """The project that `start` lies in: the nearest folder whose pyproject.toml has the table. Without one, the nearest
    folder with a pyproject.toml, or `start` itself, and the defaults. None where the settings have faults."""
    start = start.resolve()
    plain: Path | None = None
    for folder in (start, *start.parents):
        file = folder / FILE
        if not file.is_file():
            continue
        text, table = _table(file, report)
        if report.errors:
            return None
        if table is not None:
            config = read(table, text, report)
            return Project(folder, config) if config is not None else None
        plain = plain or folder
    return Project(plain or start, Config())


def _table(file: Path, report: Report) -> tuple[str, Mapping[str, object] | None]:
    """The file's text, and the table where it has one."""
    try:
        text = file.read_bytes().decode("utf-8").replace("\r\n", "\n")
        report.add_source(FILE, text)
        tool = tomllib.loads(text).get("tool", {})
    except UnicodeDecodeError:
        report.error(Span(FILE, 1, 1), "not-utf8", f"{file} is not UTF-8")
        return "", None
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"line (\d+), column (\d+)", str(error))
        span = Span(FILE, int(place.group(1)), int(place.group(2))) if place else Span(FILE, 1, 1)
        report.error(span, "toml", str(error).split(" (at ")[0])
        return text, None
    table = tool.get("pullback") if isinstance(tool, dict) else None
    if table is None or isinstance(table, dict):
        return text, table
    report.error(_place(text, "pullback"), "config", "`tool.pullback` is a table")
    return text, None


def read(table: Mapping[str, object], text: str, report: Report) -> Config | None:
    """The settings of a table, with every fault of it in `report`."""
    before = len(report.errors)
    for key in table:
        if key not in KEYS:
            hint = nearest(key, KEYS) or f"the keys are {', '.join(KEYS)}"
            report.error(_place(text, key), "unknown-key", f"`[tool.pullback]` has no key `{key}`", hint)
    specs = _folders(table, text, report)
    output = _folder(table, "output", Config.output, text, report)
    package = _text(table, "package", output.rsplit("/", 1)[-1], text, report)
    mode = _text(table, "mode", Config.mode, text, report)
    tests = _folder(table, "tests", Config.tests, text, report)
    if len(report.errors) == before:
        _check_package(package, "package" if "package" in table else "output", text, report)
        if mode not in MODES:
            report.error(_place(text, "mode"), "config", f"`mode` is {' or '.join(MODES)}", nearest(mode, MODES))
        _check_apart(specs, output, tests, text, report)
    return Config(specs, output, package, mode, tests) if len(report.errors) == before else None


def _text(table: Mapping[str, object], key: str, default: str, text: str, report: Report) -> str:
    value = table.get(key, default)
    if isinstance(value, str):
        return value
    report.error(_place(text, key), "config", f"`{key}` is a string")
    return default


def _folder(table: Mapping[str, object], key: str, default: str, text: str, report: Report) -> str:
    value = _text(table, key, default, text, report).removesuffix("/")
    fault = _path_fault(value)
    if fault:
        report.error(_place(text, key), "config", f"`{key}` {fault}")
    return value


def _folders(table: Mapping[str, object], text: str, report: Report) -> tuple[str, ...]:
    value = table.get("specs", list(Config.specs))
    if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
        report.error(_place(text, "specs"), "config", "`specs` is a list of folders", 'write `specs = ["specs"]`')
        return Config.specs
    folders = tuple(v.removesuffix("/") for v in value)
    for folder in folders:
        fault = _path_fault(folder)
        if fault:
            report.error(_place(text, "specs"), "config", f"`specs` {fault}")
    return folders


def _path_fault(path: str) -> str:
    if path.startswith("/") or re.match(r"[A-Za-z]:", path):
        return "is a path relative to this file, not an absolute one"
    if "\\" in path:
        return "has `/` between folders on every system"
    if any(part in ("", ".", "..") for part in path.split("/")):
        return "names a folder inside the project, without `.` and `..`"
    return ""


def _check_package(package: str, key: str, text: str, report: Report) -> None:
    for part in package.split("."):
        if not part.isidentifier() or not part.isascii() or keyword.iskeyword(part):
            hint = 'give it as `package = "..."`' if key == "output" else ""
            report.error(_place(text, key), "config", f"`{package}` is no import name", hint)
            return


def _check_apart(specs: tuple[str, ...], output: str, tests: str, text: str, report: Report) -> None:
    if output == tests or output.startswith(f"{tests}/"):
        report.error(_place(text, "tests"), "config", "`tests` is a folder of its own, `output` does not lie in it")
    for folder in specs:
        for key, other in (("output", output), ("tests", tests)):
            if f"{folder}/".startswith(f"{other}/") or f"{other}/".startswith(f"{folder}/"):
                report.error(_place(text, key), "config", f"`{key}` and the specs in `{folder}` lie in each other")


def _place(text: str, key: str) -> Span:
    """Where a key of the table stands. tomllib keeps no positions, so the line is looked up."""
    inside = False
    pattern = re.compile(rf"""^(\s*)(["']?){re.escape(key)}\2\s*=""")
    dotted = re.compile(rf"^(\s*(?:tool\.)?pullback\.?){re.escape(key)}\s*=")
    for number, line in enumerate(text.split("\n"), 1):
        if line.lstrip().startswith("["):
            inside = bool(_HEADER.match(line))
        match = (pattern if inside else dotted).match(line)
        if match:
            col = len(match.group(1)) + 1
            return Span(FILE, number, col, col + len(key))
    return Span(FILE, 1, 1)
