"""The command line: `pullback generate | check | verify | explain | list | add | fuse`.

Takes arguments, prints findings and results, and exits with 0 where all is good, 1 where something was found, 2 where
it was called wrongly. Results go to stdout; progress, warnings and errors to stderr.

    $ pullback check
    generated/ops/twice.py: stale: the spec specs/basic.yaml#twice has changed
       mend: pullback generate
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

import click

from codegen import __version__, pipeline
from codegen.config import TABLE, Project, find
from codegen.diagnostics import Report
from codegen.tree import TreeError, Written

FINDINGS, MISUSE = 1, 2
T = TypeVar("T")


class Progress:
    """One line on stderr that is written over; nothing where stderr is no terminal, or the work is short."""

    def __init__(self) -> None:
        self.shown = False
        self.live = sys.stderr.isatty()
        self.begun = time.monotonic()

    def __call__(self, text: str, done: int, total: int) -> None:
        if self.live and time.monotonic() - self.begun > 0.3:
            count = f" ({done + 1} of {total})" if total > 1 else ""
            sys.stderr.write(f"\r\x1b[K{text}{count}")
            sys.stderr.flush()
            self.shown = True

    def clear(self) -> None:
        if self.shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="pullback")
def main() -> None:
    """Ops declared in YAML become a verified package of Triton kernels.

    Settings stand under [tool.pullback] in pyproject.toml, in this folder or above it.
    """
    # The graphs of all ops are alive at once: looked through less often, they cost a tenth of the time.
    gc.set_threshold(50_000, 20, 100)


@main.command()
@click.argument("ops", nargs=-1, metavar="[OP]...")
@click.option("--all", "everything", is_flag=True, help="Also what is up to date by its hashes.")
def generate(ops: tuple[str, ...], everything: bool) -> None:
    """Verify and write: the named ops, or all that are not up to date."""
    written = _run(lambda project, report, tick: pipeline.generate(project, ops, report, everything, tick))
    assert written is not None
    _print_written(written)


def _print_written(written: Written) -> None:
    for word, paths in (("wrote", written.changed), ("removed", written.removed)):
        for path in paths:
            click.echo(f"{word} {path}")
    for path in written.overwritten:
        click.echo(f"note: {path} was edited by hand, and is as generated again", err=True)
    for path in written.kept:
        click.echo(
            f"note: {path} is no longer generated, but was edited by hand: kept; delete it, or move it away", err=True
        )
    if not written.changed and not written.removed:
        click.echo("all files are up to date")


@main.command()
@click.option("--full", is_flag=True, help="Generate everything in memory and compare bytes, instead of hashes.")
def check(full: bool) -> None:
    """Name every file that is stale, edited by hand, missing or orphaned."""
    faulty, checked = _run(lambda project, report, tick: _checked(project, report, full, tick), ends_on_errors=False)
    for finding in checked.findings:
        click.echo(finding.render())
    if checked.findings:
        click.echo(_count(len(checked.findings), "finding"), err=True)
    if checked.findings or faulty:
        sys.exit(FINDINGS)
    click.echo(f"{_count(checked.files, 'file')} as generated")


def _checked(project: Project, report: Report, full: bool, tick: pipeline.Tick) -> tuple[bool, pipeline.Checked]:
    checked = pipeline.check(project, report, full, tick)
    return bool(report.errors), checked


@main.command()
@click.argument("ops", nargs=-1, metavar="[OP]...")
def verify(ops: tuple[str, ...]) -> None:
    """Compare declared gradients with derived ones, and these with numbers."""

    def work(project: Project, report: Report, tick: pipeline.Tick) -> Sequence[str]:
        specs = pipeline.load_specs(project.config, project.root, report)
        if report.errors:
            return ()
        verdicts = pipeline.verify_ops(pipeline.selected(specs, ops), report, tick, specs)
        return [pipeline.verdict_line(verdict) for verdict in verdicts.values()]

    for line in _run(work):
        click.echo(line)


@main.command()
@click.argument("op", metavar="OP")
def explain(op: str) -> None:
    """Print all that is known of an op: variants, graphs, gradients, verdict, residuals, plan."""

    def work(project: Project, report: Report, tick: pipeline.Tick) -> str:
        specs = pipeline.load_specs(project.config, project.root, report)
        if report.errors:
            return ""
        (spec,) = pipeline.selected(specs, (op,))
        tick(f"reading {op}", 0, 1)
        return pipeline.explain(spec, report)

    click.echo(_run(work).rstrip("\n"))


@main.command(name="list")
@click.option("--json", "as_json", is_flag=True, help="An array of objects.")
@click.option("--catalogue", is_flag=True, help="Those that come with Pullback, which `pullback add` copies.")
def list_(as_json: bool, catalogue: bool) -> None:
    """Print a table of all ops."""
    rows = pipeline.shipped() if catalogue else _run(lambda *given: pipeline.table(*given))
    click.echo(json.dumps(rows, indent=2) if as_json else _table(rows))


@main.command()
@click.argument("ops", nargs=-1, required=True, metavar="OP...")
@click.option(
    "--to", "file", metavar="FILE.yaml", help="The spec file to add to; one named as the catalogue's by default."
)
def add(ops: tuple[str, ...], file: str | None) -> None:
    """Copy ops of the catalogue into your specs.

    They are then ops of your own: `pullback generate` makes their kernels. With a fused op come those that it stands for. What
    your specs declare already stays as it is. `pullback list --catalogue` prints what there is.
    """
    added = _run(lambda project, report, tick: pipeline.add(project, ops, file, report), needs_specs=False)
    for name in dict.fromkeys((*added, *ops)):
        click.echo(f"{name}: added to {added[name]}" if name in added else f"{name}: declared already, left as it is")
    if added:
        click.echo("next: pullback generate")


@main.command()
@click.argument("graph", metavar="GRAPH.json", type=click.Path(path_type=Path))
@click.option(
    "--to", "file", metavar="FILE.yaml", help="The spec file to add to; fused.yaml among the specs by default."
)
@click.option("--dry-run", is_flag=True, help="Print the specs instead of writing them.")
@click.option(
    "--check", "only", is_flag=True, help="Write nothing; exit with 1 where an op could be fused and is not there."
)
def fuse(graph: Path, file: str | None, dry_run: bool, only: bool) -> None:
    """Compose chains of a recorded graph into fused ops in your specs.

    Elementwise ops that follow each other become one op; so does one op along rows or with axes of its own, with the
    elementwise ops before and after it. Each composed op is verified before it is written. `pullback generate` makes its
    kernels; lowering then uses it wherever its steps occur.
    """

    def work(project: Project, report: Report, tick: pipeline.Tick) -> pipeline.Fused:
        return pipeline.fuse(project, graph, file, report, write=not (dry_run or only), tick=tick)

    found = _run(work)
    for group in found.groups:
        if group.reason:
            click.echo(f"note: {', '.join(group.nodes)} cannot be one op: {group.reason}", err=True)
        elif not dry_run:
            word = (
                "stands for"
                if not group.text
                else "could stand for" if only else f"written to {found.file}, stands for"
            )
            click.echo(f"{group.op}: {word} {', '.join(group.nodes)}")
    if dry_run and found.new:
        click.echo("\n".join(group.text for group in found.new).rstrip("\n"))
    elif found.new:
        click.echo(f"next: pullback {'fuse' if only else 'generate'}")
    elif not any(group.op for group in found.groups):
        click.echo("nothing to fuse")
    if only and found.new:
        sys.exit(FINDINGS)


def _table(rows: Sequence[dict[str, object]]) -> str:
    if not rows:
        return "no ops"
    keys = list(rows[0])
    cells = [[key.upper() for key in keys]] + [[_cell(row[key]) for key in keys] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(keys))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells)


def _cell(value: object) -> str:
    return (
        (", ".join(map(str, value)) or "-") if isinstance(value, list | tuple) else "-" if value is None else str(value)
    )


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _run(
    work: Callable[[Project, Report, pipeline.Tick], T], ends_on_errors: bool = True, needs_specs: bool = True
) -> T:
    """Finds the project, does the work, prints what was reported. Exits where the report holds an error."""
    project = _project(needs_specs)
    report, progress = Report(), Progress()
    try:
        result = work(project, report, progress)
    except pipeline.UnknownOp as fault:
        _fail(progress, str(fault), MISUSE)
    except pipeline.BadTarget as fault:
        _fail(progress, str(fault), MISUSE)
    except TreeError as fault:
        _fail(progress, str(fault), FINDINGS)
    except OSError as fault:
        _fail(progress, f"{fault.filename}: {fault.strerror}", FINDINGS)
    except KeyboardInterrupt:
        progress.clear()
        sys.exit(130)
    progress.clear()
    if report.found:
        click.echo(report.render(), err=True)
    if report.errors:
        click.echo(_count(len(report.errors), "error"), err=True)
        if ends_on_errors:
            sys.exit(FINDINGS)
    return result


def _project(needs_specs: bool) -> Project:
    report = Report()
    project = find(Path.cwd(), report)
    if project is None:
        click.echo(report.render(), err=True)
        sys.exit(MISUSE)
    for folder in project.config.specs if needs_specs else ():
        if not (project.root / folder).exists():
            where = f"name yours as `specs` under {TABLE} in pyproject.toml"
            click.echo(f"error: there is no folder {folder} in {project.root}; {where}", err=True)
            sys.exit(MISUSE)
    return project


def _fail(progress: Progress, text: str, code: int) -> NoReturn:
    progress.clear()
    for line in text.split("\n"):
        click.echo(f"error: {line}", err=True)
    sys.exit(code)
