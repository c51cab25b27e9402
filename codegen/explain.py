"""`explain`: all that is known of an op, as text.

Takes an `OpSpec`, returns its variants, graphs, gradients, verdict, residuals and plan. The plan printed is the very one
that is emitted.
"""

from __future__ import annotations

from collections.abc import Sequence

from codegen import autodiff
from codegen.diagnostics import Report
from codegen.ir import Bound, Graph, Node, Target, pretty, spell, walk
from codegen.lower import StageText
from codegen.lower_rows import lowered
from codegen.precision import coarse_calls
from codegen.residuals import residuals
from codegen.rewrite import tidy
from codegen.safety import check_safety
from codegen.schedule import OpPlan, bytes_per_element, flops, schedule
from codegen.spec import OpSpec
from codegen.stages import Stage, scans
from codegen.verify import Verdict, verify_op

_ITEMS = (("bf16", 2), ("f32", 4))
_DTYPES = {"compute": "f32 (f64 of f64)"}


def facts(op: OpSpec, report: Report) -> dict[str, object]:
    """What the manifest records of an op: its schedule and the names of its residuals."""
    return facts_of(verify_op(op, report), report)


def facts_of(verdict: Verdict, report: Report) -> dict[str, object]:
    plan = schedule(verdict, report) if verdict.ok else None
    return {"schedule": plan.schedule if plan is not None else "none", "residuals": residual_names(verdict, plan)}


def residual_names(verdict: Verdict, plan: OpPlan | None) -> list[str]:
    """What is kept in any variant: by the plan; of an op without one, what its formulas would have kept."""
    found = dict.fromkeys(r.name for _, graph in verdict.graphs for r in residuals(verdict.op, graph))
    return [name for name in found if plan is None or name in plan.residuals]


def explain(op: OpSpec, report: Report) -> str:
    """The whole account of an op; empty where it has faults."""
    verdict = verify_op(op, report)
    if not verdict.ok:
        return ""
    parts = [_head(op), _variants(verdict)]
    variant, graph = verdict.graphs[0]
    if graph.outputs:
        title = f"Forward ({variant})" if variant.values else "Forward"
        parts.append(_section(title, pretty(_read(graph), graph.outputs)))
    if graph.updates:
        parts.append(_section("Update", pretty(graph.update_let, graph.updates, graph.bindings)))
    if graph.gradients:
        if _declares(op):
            parts.append(_section("Declared gradient", pretty(graph.let, graph.gradients, graph.bindings)))
        parts.append(_section("Derived gradient", _derived(graph)))
    plan = schedule(verdict, report)
    parts += [_verdict(verdict), _safety(verdict), _residuals(verdict, plan), _plan(verdict, plan)]
    return "\n\n".join(p for p in parts if p)


def _read(graph: Graph) -> list[Bound]:
    """The statements of a forward that something reads in this variant."""
    targets = (*graph.outputs, *graph.updates, *graph.gradients)
    used = {node.serial for node in walk(t.node for t in targets if t.node is not None)}
    return [b for b in graph.bindings if b.node.serial in used and (b.node.op != "const" or b.node.args)]


def _section(title: str, text: str) -> str:
    return f"{title}\n" + "\n".join(f"  {line}" for line in text.split("\n"))


def _head(op: OpSpec) -> str:
    return f"{op.name}  ({op.file}:{op.span.line})" + (f"\n  {op.doc}" if op.doc else "")


def _variants(verdict: Verdict) -> str:
    if len(verdict.graphs) == 1:
        return ""
    checked = {c.variant for c in verdict.checked}
    lines = [f"{v}{'' if v in checked else '   (cannot occur)'}" for v, _ in verdict.graphs]
    return _section(f"Variants: {len(verdict.graphs)}, of which {len(checked)} verified", "\n".join(lines))


def _derived(graph: Graph) -> str:
    """The derived gradients with the forward's and the author's names where they occur."""
    found = {n: node for n, node in autodiff.derive(graph).items() if node is not None}
    b = graph.builder
    new = tidy(b, found.values())
    names = {
        bound.node.serial: bound.name
        for bound in reversed((*graph.bindings, *graph.let))
        if bound.node.op not in ("const", "read")
    }
    return "\n".join(f"{n} = {spell(new[node.serial], names)}" for n, node in found.items()) or "none"


def _verdict(verdict: Verdict) -> str:
    if not any(c.derived for c in verdict.checked):
        return _section("Verdict", "typed; not differentiable")
    lines = []
    for one in verdict.checked:
        if one.derived:
            label = f"{one.variant}: " if one.variant.values else ""
            lines.append(f"{label}{one.points} elements against the derived form, largest relative difference {one.worst:.1e}; "
                         f"{one.numeric} against {one.method}")  # fmt: skip
    title = (
        "declared and derived gradient agree" if _declares(verdict.op) else "the derived gradient agrees with numbers"
    )
    return _section(f"Verdict: {title}", "\n".join([*lines, *verdict.notes]))


def _declares(op: OpSpec) -> bool:
    return op.backward is not None and any(e.kind != "auto" for e in op.backward.entries)


def _safety(verdict: Verdict) -> str:
    """What overflows in float32 although the true value is fine; nothing is generated while it does."""
    found = Report()
    for one in verdict.checked:
        check_safety(verdict.op, one.variant, one.graph, found)
    return _section("Float32", found.render()) if found.found else ""


def _residuals(verdict: Verdict, plan: OpPlan | None) -> str:
    rows: dict[str, str] = {}
    names = residual_names(verdict, plan)
    for _, graph in verdict.graphs:
        for r in residuals(verdict.op, graph):
            sizes = ", ".join(f"{r.bytes_per_element(item)} B in {dtype}" for dtype, item in _ITEMS)
            rows.setdefault(r.name, f"{r.name}  [{', '.join(r.axes)}]  {r.why}; an element: {sizes}")
    if not any(g.gradients for _, g in verdict.graphs):
        return ""
    return _section("Residuals", "\n".join(rows[n] for n in names) or "none")


def _nodes(targets: tuple[Target, ...]) -> list[Node]:
    return [t.node for t in targets if t.node is not None]


def _plan(verdict: Verdict, plan: OpPlan | None) -> str:
    if verdict.op.schedule == "none":
        return _section("Plan", "none: verified only (`schedule: none`)")
    return "" if plan is None else _section(f"Plan: {plan.schedule}", plan_text(plan))


def _half(direction: str, stages: Sequence[Stage]) -> list[str]:
    """Which calls take their cheaper form where the results are stored in half precision, and which may not."""
    cheap: dict[str, None] = {}
    full: dict[str, None] = {}
    for part, node, may in (found for stage in stages for found in coarse_calls(stage)):
        bound = (*part.graph.bindings, *part.graph.update_let, *part.graph.let)
        names = {b.node.serial: b.name for b in reversed(bound) if b.node is not node}
        (cheap if may else full)[spell(node, names)] = None
    words = [f"cheaper forms of {', '.join(cheap)}"] if cheap else []
    words += [f"in full, for the result magnifies an error: {', '.join(full)}"] if full else []
    return [f"{direction} in half precision: {'; '.join(words)}"] if words else []


def plan_text(plan: OpPlan) -> str:
    """Reason, launches, allocations, traffic and arithmetic."""
    module = lowered(plan)
    graph = plan.graphs[0][1]
    lines = [f"why: {plan.reason}"]
    for direction, stages in (("forward", module.forward), ("backward", module.backward)):
        if stages:
            lines += _launches(plan, direction, stages)
        if direction == "forward" and plan.saved and module.backward:
            names = ", ".join(f"{t.name} in {_DTYPES.get(t.dtype, t.dtype)}" for t in plan.saved)
            fewer = "" if plan.schedule == "pointwise" else "; fewer values than the operands have"
            lines.append(f"  kept for the backward, if a gradient is wanted: {names}{fewer}")
    for name, cotangent, test in module.passes:
        lines.append(
            f"  d{name} is {cotangent} itself{f', if {test}' if test else ''}: nothing is launched or allocated for it"
        )
    for dtype, item in _ITEMS:
        forward, backward = bytes_per_element(plan, item)
        lines.append(
            f"bytes an element in {dtype}: {forward} {'a step' if graph.updates and not graph.outputs else 'forward'}"
            + (f", {backward} backward" if module.backward else "")
        )
    lines += _half("forward", plan.forward)
    lines += _half("backward", plan.backward)
    lines.append(
        f"operations an element: {flops(_nodes(graph.outputs) or _nodes(graph.updates))} {'forward' if graph.outputs else 'a step'}"
        + (f", {flops(_nodes(graph.gradients))} backward" if module.backward else "")
    )
    return "\n".join(lines)


def _launches(plan: OpPlan, direction: str, stages: Sequence[StageText]) -> list[str]:
    """The launches of a direction, stage by stage: what each reads and writes, and how it walks."""
    lines = [f"{direction}: {len(stages)} launches" if len(stages) > 1 else f"{direction}: 1 launch"]
    for text in stages:
        stage = text.stage
        if stage.nest == "step":
            lines = [f"step: 1 launch for all tensors of the same dtypes and choices, {text.kernel.name}: reads {', '.join(stage.reads)}; "
                     f"writes {', '.join(stage.stored)} in place"]  # fmt: skip
            lines.append(f"  numbers, read from a table on the device: {', '.join(text.kernel.numbers) or 'none'}")
            continue
        when = " and ".join(f"{n} is {' or '.join(v)}" for n, v in text.when)
        lines.append(
            f"  {text.kernel.name}{f', only if {when}' if when else ''}: reads {', '.join(stage.reads) or 'nothing'}; {_written(plan, stage, direction)}"
        )
        lines += [f"  {line}" for line in (_rows(plan, text) if stage.nest == "rows" else [])]
        if stage.summed:
            lines.append(f"    where {', '.join(stage.summed)} is broadcast its gradient is summed in the same pass into f32 partials, one launch a pattern of "
                         "broadcasting, and one more, sum_partials, where a sum has several parts")  # fmt: skip
    return lines


def _written(plan: OpPlan, stage: Stage, direction: str) -> str:
    """What a stage writes: new tensors, and buffers in place."""
    buffers = {t.name for t in plan.op.buffers}
    new, own = [n for n in stage.stored if n not in buffers], [n for n in stage.stored if n in buffers]
    words = (
        [f"writes {', '.join(new)}{', each only if it is needed' if direction == 'backward' else ''}"] if new else []
    )
    return " and ".join([*words, *([f"updates {', '.join(own)} in place"] if own else [])])


def _rows(plan: OpPlan, text: StageText) -> list[str]:
    """How a stage of rows walks, and who shares what."""
    stage, kernel = text.stage, text.kernel
    order = [a for a in plan.graphs[0][1].axes]
    along, each = (", ".join(a for a in order if a in axes) for axes in (stage.reduced, stage.kept))
    count = len(getattr(kernel, "passes", ()))
    whole = (
        f"a row runs along ({along}), and there is one for each of ({each})"
        if each
        else f"everything along ({along}) is one row"
    )
    long = (
        "once too, in steps"
        if count == 1
        else f"{count} times, in steps: what one pass has summed up the next one needs"
    )
    lines = [f"  {whole}; one that fits in a tile is read once, a longer one {long}"]
    names = {
        b.node.serial: b.name for p in stage.parts for b in (*p.graph.bindings, *p.graph.let) if b.node.op != "read"
    }
    for number, found in scans(stage).items():
        of = ", ".join(dict.fromkeys(names.get(n.serial) or spell(n, names) for n in found))
        end = "from the last element back" if found[0].params[2] else "from the first element on"
        lines.append(
            f"  pass {number + 1} goes {end}, for {of}: a tile at a time, and what it came to is carried to the next"
        )
    if text.finish is not None:
        lines.append(
            f"  few long rows are shared by several programs: 2 launches, the second, {text.finish.name}, adds up what each has"
        )
    handed = [t.name for t in plan.scratch if t.name in stage.stored]
    if handed:
        lines.append(f"  {', '.join(handed)}: scratch, for the next launch")
    if stage.partial:
        lines.append(
            f"  {', '.join(stage.partial)}: each program adds up its rows and writes one partial row; one launch of sum_partials each adds these, always in the same order"
        )
    return lines
