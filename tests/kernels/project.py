"""Ops of a spec's text, generated into a package of their own and imported: for tests of what the catalogue has no op for."""

from __future__ import annotations

import importlib
import itertools
import sys
from pathlib import Path
from typing import Any

from codegen import pipeline
from codegen.config import Config
from codegen.diagnostics import Report
from codegen.loader import load_text
from codegen.tree import GeneratedFile

_PACKAGES = itertools.count()


def emitted(text: str, config: Config) -> tuple[dict[str, GeneratedFile], Report]:
    """The files of the ops of a text; none where one is refused."""
    report = Report()
    ops = load_text(text, report)
    verdicts = [] if report.errors else list(pipeline.verify_ops(ops, report).values())
    files = {} if report.errors else dict(pipeline.render(verdicts, [], config, report))
    return ({} if report.errors else files), report


class Package:
    """A package in a folder, to which ops are added."""

    def __init__(self, folder: Path) -> None:
        self.name = f"scratch_package_{next(_PACKAGES)}"
        self.config = Config(output=self.name, package=self.name, tests="")
        self.folder = folder
        sys.path.insert(0, str(folder))
        self.write(dict(pipeline.render([], [], self.config, Report())))

    def close(self) -> None:
        sys.path.remove(str(self.folder))

    def write(self, files: dict[str, GeneratedFile]) -> None:
        """What all ops share is written once."""
        for path, file in files.items():
            there = self.folder / path
            there.parent.mkdir(parents=True, exist_ok=True)
            if not there.exists():
                there.write_bytes(file.content)
        importlib.invalidate_caches()

    def module(self, name: str) -> Any:
        return importlib.import_module(f"{self.name}.{name}")

    def op(self, text: str) -> Any:
        """The module of the one op of a text, which must be accepted."""
        files, report = emitted(text, self.config)
        assert files, report.render()
        self.write(files)
        (own,) = (p for p in files if "/ops/" in p and not p.endswith("__init__.py"))
        return self.module(f"ops.{Path(own).stem}")
