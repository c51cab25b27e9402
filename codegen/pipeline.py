"""The whole way: from a project's specs to its tree.

Takes a `Project` and names of ops, calls one stage after the other, returns what was found or written. Every stage
reports into one `Report`; while it holds an error, nothing is written.

    generate(project, (), report)  ->  Written(changed=("generated/ops/twice.py",), ...)

The stages are imported where they are called: `check` of an unchanged tree needs none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from codegen import manifest, tree
from codegen.config import Config, Project
from codegen.diagnostics import Report, guarded
from codegen.tree import Finding, GeneratedFile, Written

if TYPE_CHECKING:
    from codegen.fuse import Group
    from codegen.spec import OpSpec
    from codegen.verify import Verdict

Tick = Callable[[str, int, int], None]
"""Called with what is being done, how many of it are done, and how many there are."""


class UnknownOp(Exception):
    """A name that no spec declares: text and hint."""


class BadTarget(Exception):
    """A path to which no spec can be written."""


def quiet(text: str, done: int, total: int) -> None:
    """No progress."""


# ---------------------------------------------------------------------------------------------- stages


def load_specs(config: Config, root: Path, report: Report) -> tuple[OpSpec, ...]:
    """Every op that the project declares."""
    from codegen import loader

    return loader.load([root / folder for folder in config.specs], report, root)


def verify_ops(
    ops: Sequence[OpSpec], report: Report, tick: Tick = quiet, known: Sequence[OpSpec] = ()
) -> dict[str, Verdict]:
    """The verdict of each op, by its name.

    Args:
        known: every op that is declared, among them those that fused ops stand for.
    """
    from codegen.verify import Verdict

    named = {op.name: op for op in (*known, *ops)}
    verdicts = {}
    for done, op in enumerate(ops):
        tick(f"verifying {op.name}", done, len(ops))
        verdicts[op.name] = Verdict(op, False)
        with guarded(op, "verifying", report):
            verdicts[op.name] = _verify_op(op, named, report)
    return verdicts


def _verify_op(op: OpSpec, named: Mapping[str, OpSpec], report: Report) -> Verdict:
    from codegen import fused, safety, verify

    before = len(report.errors)
    verdict = verify.verify_op(op, report)
    if verdict.ok:
        fused.confirm(op, named, report)
        verdict = replace(verdict, ok=len(report.errors) == before)
    for one in verdict.checked if verdict.ok else ():
        unsafe = safety.check_safety(op, one.variant, one.graph, Report() if op.fuses else report)
        if op.fuses and unsafe:
            accepted = fused.unsafe(op, one.variant, named)
            safety.check_safety(op, one.variant, one.graph, report, accepted)
    return verdict


def render(
    verdicts: Sequence[Verdict], kept: Sequence[OpSpec], config: Config, report: Report
) -> Mapping[str, GeneratedFile]:
    """The files of the verified ops, and those that all share. The own files of `kept` ops stay as they are."""
    from codegen import emit

    return emit.render(verdicts, kept, config, report)


def explain(op: OpSpec, report: Report) -> str:
    from codegen import explain as printer

    text = ""
    with guarded(op, "explaining", report):
        text = printer.explain(op, report)
    return text


# ---------------------------------------------------------------------------------------------- commands


def selected(ops: Sequence[OpSpec], names: Sequence[str]) -> tuple[OpSpec, ...]:
    """The ops of these names, in the order of the specs; all of them where no name is given."""
    from codegen.diagnostics import nearest

    known = {op.name for op in ops}
    for name in names:
        if name not in known:
            hint = nearest(name, known)
            raise UnknownOp(f"no spec declares `{name}`" + (f"; {hint}" if hint else ""))
    return tuple(op for op in ops if not names or op.name in names)


def generate(
    project: Project, names: Sequence[str], report: Report, everything: bool = False, tick: Tick = quiet
) -> Written | None:
    """Writes the output of the named ops; without names, of those whose hashes say that it is not up to date.

    None, and nothing written, where a spec has a fault.
    """
    inputs = manifest.inputs(project.root, project.config)
    ops = load_specs(project.config, project.root, report)
    if report.errors:
        return None
    fresh = set() if names or everything else set(tree.fresh_ops(project, inputs))
    chosen = with_fused(ops, [op for op in selected(ops, names) if op.name not in fresh])
    kept = _kept(project, ops, chosen)
    files = _built(project, ops, chosen, kept, report, tick)
    if files is None:
        return None
    tick("writing", 0, 1)
    return tree.write(project, files, tree.paths_of(project, [op.name for op in kept]), inputs)


def with_fused(ops: Sequence[OpSpec], chosen: Sequence[OpSpec]) -> list[OpSpec]:
    """The chosen ops, and the fused ones that stand for one of them: a change of a step is one of the whole."""
    from codegen.fusion_steps import steps

    names = {op.name for op in chosen}
    return [op for op in ops if op.name in names or any(s.op in names for s in steps(op))]


def _kept(project: Project, ops: Sequence[OpSpec], chosen: Sequence[OpSpec]) -> list[OpSpec]:
    """The declared ops that have output and are not to be generated now."""
    now = {op.name for op in chosen}
    written = tree.written_ops(project)
    return [op for op in ops if op.name in written and op.name not in now]


def _built(
    project: Project,
    ops: Sequence[OpSpec],
    chosen: Sequence[OpSpec],
    kept: Sequence[OpSpec],
    report: Report,
    tick: Tick,
) -> Mapping[str, GeneratedFile] | None:
    """The files of the chosen ops, and those that all ops share; None where something is wrong."""
    verdicts = verify_ops(chosen, report, tick, ops)
    if report.errors:
        _report_schedules(verdicts.values(), report)
        return None
    tick("rendering", 0, 1)
    files = render(tuple(verdicts.values()), kept, project.config, report)
    return None if report.errors else files


def _report_schedules(verdicts: Iterable[Verdict], report: Report) -> None:
    """What the good ops lack is printed in the same run."""
    from codegen.schedule import schedule

    for verdict in verdicts:
        if verdict.ok:
            with guarded(verdict.op, "scheduling", report):
                schedule(verdict, report)


@dataclass(frozen=True)
class Checked:
    findings: tuple[Finding, ...]
    files: int
    """How many were compared."""


def check(project: Project, report: Report, full: bool = False, tick: Tick = quiet) -> Checked:
    """What differs. The fast way compares hashes; only what it finds is generated in memory, for the diff."""
    inputs = manifest.inputs(project.root, project.config)
    findings = tree.check(project, inputs)
    count = len(manifest.read(project.root / project.config.output / manifest.NAME).paths)
    if not full and (not findings or count == 0):
        return Checked(findings, count)
    ops = load_specs(project.config, project.root, report)
    if report.errors:
        return Checked(findings, count)
    only = None if full else {op for finding in findings for op in finding.ops}
    chosen = [op for op in ops if only is None or op.name in only]
    files = _built(project, ops, chosen, _kept(project, ops, chosen), report, tick)
    if files is None:
        return Checked(findings, count)
    return Checked(tree.compare(project, files, findings, only, inputs), max(count, len(files)))


@dataclass(frozen=True)
class Fused:
    """The groups of a graph's nodes, and the spec file that new ops go to."""

    groups: tuple[Group, ...] = ()
    file: str = ""

    @property
    def new(self) -> tuple[Group, ...]:
        """Those whose op was not there."""
        return tuple(g for g in self.groups if g.text)


def fuse(
    project: Project, graph: Path, to: str | None, report: Report, write: bool = True, tick: Tick = quiet
) -> Fused:
    """Finds what of a recorded graph can be one op, and writes the specs of such ops as are not there yet.

    Raises:
        BadTarget: where `to` is no spec file of the project.
    """
    from codegen import fuse as fusing
    from codegen import spec_files

    file = _target(project, to, "fused.yaml")
    recorded = fusing.read(graph, graph.as_posix(), report)
    specs = load_specs(project.config, project.root, report)
    if recorded is None or report.errors:
        return Fused(file=file)
    found = Fused(fusing.find(recorded, specs, file, tick), file)
    if write and found.new:
        spec_files.append(project, fusing.HEAD, {file: {g.op: g.text for g in found.new}}, report)
    return found


def _target(project: Project, to: str | None, usual: str) -> str:
    from codegen import spec_files

    try:
        return spec_files.target(project, to, usual)
    except ValueError as fault:
        raise BadTarget(str(fault)) from None


def add(project: Project, names: Sequence[str], to: str | None, report: Report) -> dict[str, str]:
    """Copies ops of the catalogue into the project's specs, and with a fused op those that it stands for.

    Args:
        to: the spec file; that of the same name as the catalogue's by default.

    Returns:
        For each op that was written the file, in the order of writing. One that the project declares already is left as it is.

    Raises:
        UnknownOp: a name that the catalogue lacks.
        BadTarget: where `to` is no spec file of the project.
    """
    from codegen import catalogue, spec_files
    from codegen.diagnostics import nearest

    known = catalogue.texts()
    for name in names:
        if name not in known:
            raise UnknownOp(
                f"the catalogue has no `{name}`; {nearest(name, known) or '`pullback list --catalogue` prints it'}"
            )
    chosen = {name: _target(project, to, known[name].file) for name in catalogue.with_steps(names, known)}
    there = {op.name for op in load_specs(project.config, project.root, report)} if _has_specs(project) else set()
    if report.errors:
        return {}
    files: dict[str, dict[str, str]] = {}
    for name, file in chosen.items():
        if name not in there:
            files.setdefault(file, {})[name] = known[name].text
    spec_files.append(project, catalogue.HEAD, files, report)
    return {} if report.errors else {name: file for name, file in chosen.items() if name not in there}


def _has_specs(project: Project) -> bool:
    """Whether there is a spec file: a project may begin with what it takes of the catalogue."""
    return next(iter(manifest.spec_texts(project.root, project.config)), None) is not None


def shipped() -> list[dict[str, object]]:
    """One row per op of the catalogue, as `list --catalogue --json` prints it."""
    from codegen import catalogue

    return [{"op": op.name, "file": op.file, "backward": _backward(op), "doc": op.doc} for op in catalogue.ops()]


def table(project: Project, report: Report, tick: Tick = quiet) -> list[dict[str, object]]:
    """One row per op, as `list --json` prints it."""
    ops = load_specs(project.config, project.root, report)
    if report.errors:
        return []
    fresh = tree.fresh_ops(project, manifest.inputs(project.root, project.config))
    rows = []
    for done, op in enumerate(ops):
        tick(f"reading {op.name}", done, len(ops))
        rows.append(_row(op, fresh.get(op.name), report))
    return rows


def _row(op: OpSpec, facts: Mapping[str, object] | None, report: Report) -> dict[str, object]:
    """The manifest knows schedule and residuals of an op that is up to date; the others are planned anew."""
    if facts is None:
        from codegen import explain as printer

        facts = {}
        with guarded(op, "planning", report):
            facts = printer.facts(op, report)
    return {
        "op": op.name,
        "family": op.family,
        "inputs": [t.name for t in op.inputs],
        "params": [t.name for t in op.params],
        "outputs": [t.name for t in op.outputs],
        "backward": _backward(op),
        "schedule": facts.get("schedule"),
        "residuals": facts.get("residuals", []),
        "file": op.file,
    }


def _backward(op: OpSpec) -> str:
    if op.backward is None or not op.backward.differentiable:
        return "none"
    kinds = {entry.kind for entry in op.backward.entries}
    return "declared" if "formula" in kinds else "auto" if "auto" in kinds else "zero" if "zero" in kinds else "none"


def verdict_line(verdict: Verdict) -> str:
    """`twice: verified, 2 variants, 5120 points, worst 3.1e-15, complex step`."""
    checked = verdict.checked
    if not checked:
        return f"{verdict.op.name}: {'not differentiable' if verdict.ok else 'refused'}"
    points, worst = sum(c.points for c in checked), max(c.worst for c in checked)
    methods = ", ".join(sorted({c.method for c in checked if c.method}))
    variants = f"{len(checked)} of {len(verdict.graphs)} variants" if len(verdict.graphs) > 1 else "1 variant"
    word = "verified" if verdict.ok else "refused"
    if not points:
        return f"{verdict.op.name}: {word}, {variants}; nothing to differentiate"
    return f"{verdict.op.name}: {word}, {variants}, {points} points, worst {worst:.1e}, {methods}"
