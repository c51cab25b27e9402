"""Spec files of a project as the commands write them: which file is meant, and ops added at its end.

Takes the texts of ops, appends them to a file whose other bytes stay as they are, or reports why it cannot.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from codegen.config import Project
from codegen.diagnostics import Report, Span
from codegen.loader import load_text


def target(project: Project, given: str | None, usual: str) -> str:
    """The spec file that new ops go to, relative to the project.

    Args:
        given: a path, relative to the project.
        usual: the file's name in the first folder of specs, where none is given.

    Raises:
        ValueError: where a given path is no YAML file below the project's specs.
    """
    folders = project.config.specs
    first = next((f for f in folders if not (project.root / f).is_file()), None)
    if given is None:
        return f"{first}/{usual}" if first is not None else folders[0]
    path = Path(os.path.normpath(project.root / given)).as_posix()
    for folder in folders:
        place = Path(os.path.normpath(project.root / folder))
        if Path(path) == place or Path(path).is_relative_to(place) and path.endswith((".yaml", ".yml")):
            return Path(path).relative_to(project.root).as_posix()
    raise ValueError(f"{given} is no .yaml file below {' or '.join(folders)}: nothing there would be read")


def append(project: Project, head: str, files: Mapping[str, Mapping[str, str]], report: Report) -> None:
    """Adds ops at the end of files; what is there stays as it is. Where one cannot take them, it is reported and none is written.

    Args:
        head: what a new file begins with.
        files: the texts of the ops of each file, by name.
    """
    texts = {file: _appended(project.root / file, file, head, ops, report) for file, ops in files.items()}
    for file, text in texts.items() if not report.errors else ():
        path = project.root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        staged = path.with_name(f".{path.name}.new")
        staged.write_bytes(text.encode())
        os.replace(staged, path)


def _appended(path: Path, file: str, head: str, ops: Mapping[str, str], report: Report) -> str:
    """The file's text with the ops at its end."""
    before = path.read_bytes().decode("utf-8") if path.exists() else head
    ends = "\r\n" if "\r\n" in before else "\n"
    text = before if before.endswith("\n") else before + ends
    text += "".join(f"\n{own}".replace("\n", ends) for own in ops.values())
    faults = Report()
    found = load_text(text, faults, file)
    if faults.errors or not set(ops) <= {op.name for op in found}:
        report.error(Span(file, before.count("\n") + 1, 1), "not-appendable", "ops added at the end of this file would not be read",
                     "name another file by `--to`")  # fmt: skip
    return text
