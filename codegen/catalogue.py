"""The catalogue: the specs that come with Pullback, to be copied into a project that wants some of them.

Reads the shipped spec files, returns ops by name as text, each as it stands there.

    texts()   ->   {"twice": Shipped("basic.yaml", "- op: twice\\n  doc: ..."), ...}
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from codegen.diagnostics import Report
from codegen.fusion_steps import steps
from codegen.loader import load, load_text
from codegen.manifest import shipped, split_ops
from codegen.spec import OpSpec

HEAD = "# Ops of Pullback's catalogue, copied by `pullback add`. They are yours to edit.\n"


@dataclass(frozen=True)
class Shipped:
    """An op of the catalogue: its file's name there, and its own text."""

    file: str
    text: str


def folder() -> Path:
    """Where the shipped specs are."""
    return shipped("specs")


def texts() -> Mapping[str, Shipped]:
    """Every op by name, in the catalogue's order."""
    found = {}
    for path in sorted(folder().glob("*.yaml")):
        for name, text in split_ops(path.read_bytes().decode("utf-8").replace("\r\n", "\n")):
            found[name] = Shipped(path.name, f"{text.rstrip()}\n")
    return found


def ops() -> tuple[OpSpec, ...]:
    """Every op as it is loaded."""
    return load([folder()], Report(), folder())


def with_steps(names: Iterable[str], known: Mapping[str, Shipped]) -> Iterator[str]:
    """The named ops, each after those that it stands for where it is a fused one: it is proved to be what they compute."""
    done: dict[str, None] = {}
    pending = list(names)[::-1]
    while pending:
        name = pending.pop()
        (op,) = load_text(known[name].text, Report(), known[name].file)
        before = [s.op for s in steps(op) if s.op not in done and s.op in known]
        if before:
            pending += [name, *before[::-1]]
        else:
            done.setdefault(name)
    yield from done
