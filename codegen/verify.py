"""Verification: the declared gradient against the derived one, the derived one against numbers.

Takes an `OpSpec`, returns a `Verdict` (or diagnostics with a counterexample). All in float64, at random points of every
piece of the domain, with ties and at every kink that an input can be moved to. It is no proof.

    verify_op(spec, report) -> Verdict(op="a_norm", variants=2, points=5120, worst=3e-15, ...)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from codegen import autodiff, mutate
from codegen.diagnostics import Note, Report
from codegen.evaluate import Env, OutOfRange, evaluate, full
from codegen.infer import Usage, infer, report_unused
from codegen.ir import Graph, Node, Target, walk
from codegen.primitives import TABLE, Array
from codegen.sample import NoSample, Sampler, at_kink, kinks
from codegen.spec import OpSpec
from codegen.variants import Atom, Variant, atoms, variants

AGREE = 1e-9
"""Declared against derived: the largest relative difference in float64."""
NUMERIC = 1e-6
"""Derived against a numerical derivative."""
_SEED = 20260101


@dataclass(frozen=True)
class Checked:
    """One verified variant."""

    variant: Variant
    graph: Graph
    derived: dict[str, Node | None]
    points: int
    """Gradient elements compared with the derived form."""
    numeric: int
    """Gradient elements compared with a numerical derivative."""
    worst: float
    """The largest relative difference between declared and derived."""
    method: str
    """`complex step` or `central differences`."""


@dataclass(frozen=True)
class Verdict:
    """What was verified of an op. `graphs` has every variant, `checked` those that were compared."""

    op: OpSpec
    ok: bool
    graphs: tuple[tuple[Variant, Graph], ...] = ()
    checked: tuple[Checked, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass
class _Tally:
    points: int = 0
    numeric: int = 0
    worst: float = 0.0
    method: str = "complex step"
    confirmed: set[str] = field(default_factory=set)


def typed(op: OpSpec, report: Report) -> Verdict:
    """Every variant of the op, typed and with its gradients filled in; nothing is compared. No graphs after a fault."""
    before = len(report.errors)
    questions = atoms(op, report)
    if len(report.errors) > before:
        return Verdict(op, False)
    usage = Usage()
    graphs = [(v, infer(op, v, report, usage)) for v in variants(op, questions, report)]
    if len(report.errors) == before:
        report_unused(usage, report)
    if len(report.errors) > before or not graphs:
        return Verdict(op, False)
    return Verdict(op, False, tuple((v, autodiff.complete(g)) for v, g in graphs if g is not None))


def verify_op(op: OpSpec, report: Report, search: bool = True) -> Verdict:
    """Types every variant of the op and verifies its declared gradients. Faults go to `report`.

    Args:
        search: whether to look for the term at fault where a gradient is refused.
    """
    before = len(report.errors)
    done = dict(typed(op, report).graphs)
    if not done:
        return Verdict(op, False)
    questions = atoms(op, Report())
    every = tuple(done)
    checked = []
    skipped = 0
    for variant in every:
        try:
            one = _verify_variant(op, variant, done[variant], report, search)
        except NoSample:
            skipped += 1
            continue
        if one is None:
            break
        checked.append(one)
    for atom in questions if checked and len(report.errors) == before else ():
        for value in atom.values:
            if not any(one.variant[atom.key] == value for one in checked):
                _unreached(op, atom, value, report)
    if not checked and len(report.errors) == before:
        report.error(
            op.span,
            "no-sample",
            f"no attrs and extents satisfy the requirements of `{op.name}`",
            "see `requires:` and `sizes:`",
        )
    notes = (f"{skipped} combinations of choices cannot occur",) if skipped else ()
    return Verdict(op, len(report.errors) == before, tuple(done.items()), tuple(checked), notes)


def _unreached(op: OpSpec, atom: Atom, value: object, report: Report) -> None:
    """A branch that no point was found for is not verified, so it is not accepted."""
    span = atom.expr.span if atom.expr is not None else op.span
    text = f"no attrs and extents were found for which `{atom.key}` is {value}"
    report.error(span, "unreached-branch", text, "widen `domain:`, or delete the branch that cannot be")


# ---------------------------------------------------------------------------------------------- one variant


def _verify_variant(op: OpSpec, variant: Variant, graph: Graph, report: Report, search: bool) -> Checked | None:
    sampler = Sampler(op, variant, graph, _SEED)
    tally = _Tally()
    if not graph.gradients:  # declared so, or there is no float among the operands of this variant
        env = _drawn(op, sampler, graph, "normal", 1.0, False, report)
        return None if env is None else Checked(variant, graph, {}, 0, 0, 0.0, "")
    derived = autodiff.derive(graph)
    smooth = []
    varied = op.attrs or any(t.kind == "int" for t in graph.tensors.values())
    more = ((("normal", 1.0, False),) * 12 + (("lattice", 1.0, False),) * 8) if varied else ()
    for mode, scale, stretch in (*_TRIALS, *more):
        try:
            env = _drawn(op, sampler, graph, mode, scale, stretch, report)
        except NoSample:
            if mode != "crowd":
                raise
            continue  # what the spec allows is no crowd
        if env is None:
            return None
        if mode == "normal" and scale <= 2.0 and max((t.size for t in env.tensors.values()), default=0) <= 600:
            smooth.append(env)
        if not _agrees(op, variant, graph, derived, env, sampler, tally, report, search):
            return None
    roots = graph.roots() + [d for d in derived.values() if d is not None]
    reads_outputs = {t.name for t in graph.tensors.values() if t.role == "output"}
    for difference in [
        d for d in kinks(graph, roots) if not any(n.op == "read" and n.params[0] in reads_outputs for n in walk([d]))
    ]:
        for env in at_kink(sampler, smooth[0], difference) if smooth else ():
            if not _agrees(op, variant, graph, derived, env, sampler, tally, report, search):
                return None
    for env in smooth[:3]:
        if not _numerically(op, variant, graph, derived, env, tally, report):
            return None
    return Checked(variant, graph, derived, tally.points, tally.numeric, tally.worst, tally.method)


_TRIALS = (
    ("normal", 1.0, False), ("normal", 2.0, True), ("normal", 0.3, True), ("lattice", 1.0, False), ("lattice", 1.0, True),
    ("normal", 10.0, False), ("normal", 40.0, False), ("crowd", 1.0, False),
)  # fmt: skip


def _drawn(
    op: OpSpec, sampler: Sampler, graph: Graph, mode: str, scale: float, stretch: bool, report: Report
) -> Env | None:
    """An environment in which forward and backward can be evaluated; an index out of range is a fault of the spec."""
    env = sampler.draw(mode, scale, stretch)
    try:
        evaluate(graph.roots(), with_outputs(graph, env))
    except OutOfRange as fault:
        report.error(op.span, "index-out-of-range", f"an index along {fault} of `{op.name}` leaves its axis",
                     "give `fill=`, or bound it: `requires:`, `indexes:`", [Note(_host_text(env))])  # fmt: skip
        return None
    return env


def compared(graph: Graph, derived: dict[str, Node | None], env: Env) -> Iterator[tuple[Target, Array, Array]]:
    """Declared and derived gradient of each target, both in the shape that the tensor has in `env`."""
    b = graph.builder
    env = with_outputs(graph, env)
    targets = [t for t in graph.gradients if t.kind != "not_differentiable" and t.node is not None]
    pairs = [(t, t.node, derived.get(t.name) or b.const(0.0)) for t in targets if t.node is not None]
    values = evaluate([n for _, declared, other in pairs for n in (declared, other)], env)
    for target, declared, other in pairs:
        shape = env.tensors[target.name].shape
        yield target, _shaped(values[declared.serial], shape), _shaped(values[other.serial], shape)


def with_outputs(graph: Graph, env: Env) -> Env:
    """`env` with the outputs, computed: gradients may read them."""
    nodes = {t.name: t.node for t in graph.outputs if t.node is not None}
    values = evaluate(nodes.values(), env)
    made = {n: full(values[node.serial], graph.tensors[n].axes, env) for n, node in nodes.items()}
    return replace(env, tensors={**env.tensors, **made})


def _shaped(value: Array, shape: tuple[int, ...]) -> Array:
    return np.broadcast_to(np.asarray(value, dtype=np.float64), shape)


def differing(declared: Array, derived: Array) -> Array:
    """Where the two disagree. Inf agrees with the same inf; where the derived form is NaN (the norm of a zero vector) there
    is no derivative, and the author may choose the value."""
    with np.errstate(all="ignore"):
        finite = derived[np.isfinite(derived)]
        floor = 1e-13 + 1e-12 * float(np.max(np.abs(finite), initial=0.0))
        gap = np.abs(declared - derived)
        near = np.isfinite(declared) & (gap <= AGREE * np.maximum(np.abs(declared), np.abs(derived)) + floor)
    same = (declared == derived) | np.isnan(derived)
    return np.asarray(~(near | same))


def _agrees(op: OpSpec, variant: Variant, graph: Graph, derived: dict[str, Node | None], env: Env, sampler: Sampler,
            tally: _Tally, report: Report, search: bool) -> bool:  # fmt: skip
    good = True
    for target, declared, other in compared(graph, derived, env):
        wrong = differing(declared, other)
        lost = np.isnan(other) & np.isfinite(declared)
        if lost.any():  # the derived form is 0/0 there: where numbers settle, they decide
            small = env.tensors[target.name].size <= 600
            value, sure = central(graph, env, target.name) if small else (other, np.zeros(other.shape, bool))
            with np.errstate(all="ignore"):
                off = sure & (np.abs(declared - value) > 1e-4 * (1 + np.abs(value)))
            wrong, other = wrong | (lost & off), np.where(lost & off, value, other)
        tally.points += declared.size
        if wrong.any():
            good = False
            where = _telling(declared, other, wrong)
            _report_wrong(op, variant, graph, derived, env, sampler, target, declared, other, where, report, search)
        elif declared.size:
            with np.errstate(all="ignore"):
                gap = np.abs(declared - other) / np.maximum(np.abs(other), 1e-300)
            finite = gap[np.isfinite(gap) & (np.abs(other) > 1e-6)]
            tally.worst = max(tally.worst, float(np.max(finite, initial=0.0)))
    return good


def _telling(declared: Array, derived: Array, wrong: Array) -> tuple[int, ...]:
    """The element to show: a finite one with a plain difference, if there is one."""
    with np.errstate(all="ignore"):
        score = np.where(
            wrong & np.isfinite(declared) & np.isfinite(derived),
            1 + np.minimum(np.abs(declared - derived), 1e3),
            wrong * 0.5,
        )
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(score)), score.shape))


# ---------------------------------------------------------------------------------------------- the counterexample


def _report_wrong(op: OpSpec, variant: Variant, graph: Graph, derived: dict[str, Node | None], env: Env, sampler: Sampler,
                  target: Target, declared: Array, other: Array, where: tuple[int, ...], report: Report, search: bool) -> None:  # fmt: skip
    notes = [Note(f"at {point_text(graph, env, target.name, where)}:"),
             Note(f"declared {declared[where]:.12g}, derived {other[where]:.12g}")]  # fmt: skip
    if variant.values:
        notes.insert(0, Note(f"with {variant}"))
    slip = culprit(op, variant, target.name, [env]) if search else None
    hint = ""
    if slip is not None:
        notes.append(Note(f"the derivative comes out right with another choice here: {slip.text}", slip.span))
    else:
        hint = (
            _proportion(declared, other) or "derive it again, or write `auto` and read what `pullback explain` prints"
        )
    report.error(
        target.span, "wrong-gradient", f"the declared gradient of `{target.name}` is not the derivative", hint, notes
    )


def _proportion(declared: Array, derived: Array) -> str:
    """A constant ratio is a forgotten factor."""
    wrong = differing(declared, derived)
    if not wrong.all():
        return f"they differ at {int(wrong.sum())} of {wrong.size} elements: look at ties, kinks, and the branch taken there"
    good = np.isfinite(declared) & np.isfinite(derived) & (derived != 0) & (declared != 0)
    if good.sum() < 2:
        return ""
    ratio = declared[good] / derived[good]
    return f"it is {ratio[0]:.6g} times the derivative" if np.ptp(ratio) <= 1e-9 * abs(ratio[0]) else ""


def point_text(graph: Graph, env: Env, target: str, where: tuple[int, ...]) -> str:
    """The inputs at one element: `x[1, 2] = 0.25, dy = -1.5, eps = 1e-06`."""
    words = []
    for tensor in graph.tensors.values():
        if tensor.name not in env.tensors:
            continue
        array = env.tensors[tensor.name]
        index = tuple(min(i, n - 1) for i, n in zip(where, array.shape))
        place = [str(i) for i, n in zip(index, array.shape) if n > 1]
        words.append(f"{tensor.name}{'[' + ', '.join(place) + ']' if place else ''} = {array[index]:.9g}")
    return ", ".join(words + ([_host_text(env)] if env.attrs else []))


def _host_text(env: Env) -> str:
    attrs = [f"{k} = {v if not isinstance(v, float) else format(v, '.9g')}" for k, v in env.attrs.items()]
    return ", ".join(attrs) or ", ".join(f"{a}: {n}" for a, n in env.extents.items())


def culprit(op: OpSpec, variant: Variant, name: str, envs: list[Env]) -> mutate.Mutation | None:
    """The single mutation of the entry, or of a `let` it reads, that makes it the derivative."""
    assert op.backward is not None
    entry = next(e for e in op.backward.entries if e.name == name)
    for mutation, changed in mutants(op, name):
        if mutation.kind == "factor" or entry.expr is None:
            continue
        graph = infer(changed, variant, Report())
        if graph is None:
            continue
        try:
            repaired = autodiff.derive(graph)
            if any(
                differing(a, b).any() for env in envs for t, a, b in compared(graph, repaired, env) if t.name == name
            ):
                continue
        except OutOfRange:
            continue
        again = Report()
        verify_op(changed, again, search=False)
        if not any(f"`{name}`" in d.text for d in again.errors):
            return mutation
    return None


def mutants(op: OpSpec, name: str) -> Iterator[tuple[mutate.Mutation, OpSpec]]:
    """The op with one slip in the entry of `name`, or in one of the `let` statements."""
    backward = op.backward
    assert backward is not None
    for k, entry in enumerate(backward.entries):
        if entry.name == name and entry.expr is not None:
            for m in mutate.mutations(entry.expr):
                entries = backward.entries[:k] + (replace(entry, expr=m.expr),) + backward.entries[k + 1 :]
                yield m, replace(op, backward=replace(backward, entries=entries))
    for k, binding in enumerate(backward.let):
        for m in mutate.mutations(binding.expr):
            let = backward.let[:k] + (replace(binding, expr=m.expr),) + backward.let[k + 1 :]
            yield m, replace(op, backward=replace(backward, let=let))


# ---------------------------------------------------------------------------------------------- numerical derivatives


def _numerically(op: OpSpec, variant: Variant, graph: Graph, derived: dict[str, Node | None], env: Env, tally: _Tally,
                 report: Report) -> bool:  # fmt: skip
    roots = [t.node for t in graph.outputs if t.node is not None]
    smooth = is_analytic(roots)
    tally.method = "complex step" if smooth else "central differences"
    env = _defined(graph, env)
    base = evaluate([*roots, *(d for d in derived.values() if d is not None)], env)
    anchored = [a for n in walk(roots) if n.op in ("replace", "stop_gradient") for a in n.args]
    env = replace(env, anchors={a.serial: base[a.serial] for a in anchored})
    for name, node in derived.items():
        shape = env.tensors[name].shape
        exact = _shaped(base[node.serial], shape) if node is not None else np.zeros(shape)
        value, sure = (complex_step if smooth else central)(graph, env, name)
        with np.errstate(all="ignore"):
            wrong = sure & np.isfinite(exact) & (np.abs(exact - value) > NUMERIC * (1 + np.abs(exact)))
        tally.numeric += int(sure.sum())
        if wrong.any():
            where = tuple(int(i) for i in np.argwhere(wrong)[0])
            span = next((t.span for t in graph.gradients if t.name == name), op.span)
            report.error(span, "derivative-mismatch", f"the derivative of `{op.name}` by `{name}` is not what its values do",
                         "a jump of the forward that is not declared as a condition, or a fault of Pullback: please report it",
                         [*([Note(f"with {variant}")] if variant.values else []), Note(f"at {point_text(graph, env, name, where)}:"),
                          Note(f"derived {exact[where]:.12g}, numerical {value[where]:.12g}")])  # fmt: skip
            return False
    return True


def _defined(graph: Graph, env: Env) -> Env:
    """No cotangent where an output is NaN: beyond the domain there is no derivative to compare, and a logarithm, say, goes on
    in the complex plane."""
    values = evaluate([t.node for t in graph.outputs if t.node is not None], env)
    tensors = dict(env.tensors)
    for target in graph.outputs:
        cotangent = tensors.get(f"d{target.name}")
        if cotangent is not None and target.node is not None:
            value = full(values[target.node.serial], graph.tensors[target.name].axes, env)
            tensors[f"d{target.name}"] = np.where(np.isnan(value), 0.0, cotangent)
    return replace(env, tensors=tensors)


def is_analytic(roots: list[Node]) -> bool:
    """Whether numpy continues every node to complex numbers."""
    for node in walk(roots):
        row = TABLE.get(node.op)
        if row is not None and not row.analytic:
            power = node.op == "pow" and node.args[1].op == "const" and isinstance(node.args[1].params[0], int)
            if not power and not node.host:
                return False
        if node.op == "reduce" and node.params[0] not in ("sum", "mean", "var", "prod", "logsumexp"):
            return False
        if node.op == "cast" and not node.host:
            return False
    return True


def _loss(graph: Graph, env: Env, probes: int) -> Array:
    """The sum of output times cotangent, one number a probe; elements that are NaN take no part."""
    roots = [t.node for t in graph.outputs if t.node is not None]
    values = evaluate(roots, env)
    total: Array = np.zeros(probes)
    for target in graph.outputs:
        cotangent = env.tensors.get(f"d{target.name}")
        if cotangent is None or target.node is None:
            continue
        with np.errstate(all="ignore"):  # infinities of both signs
            value = full(values[target.node.serial], graph.tensors[target.name].axes, env) * cotangent
            value = np.broadcast_to(value, (probes, *value.shape[value.ndim - len(env.order) :]))
            total = total + np.nansum(value.reshape(probes, -1), axis=1)
    return total


def _probed(env: Env, name: str, steps: Array) -> Env:
    """`env` with a leading dim of probes: one element of the tensor moved in each."""
    x = env.tensors[name]
    moves = np.zeros((len(steps), x.size, x.size), dtype=steps.dtype)
    moves[:, np.arange(x.size), np.arange(x.size)] = steps
    moved = x.reshape(1, -1) + moves.reshape(-1, x.size)
    return replace(env, tensors={**env.tensors, name: moved.reshape(-1, *x.shape)})


def complex_step(graph: Graph, env: Env, name: str) -> tuple[Array, Array]:
    """Im f(x + ih) / h: exact to rounding (Squire and Trapp, 1998)."""
    x = env.tensors[name]
    h = 1e-40
    value = _loss(graph, _probed(env, name, np.full((1, x.size), 1j * h)), x.size).imag / h
    return value.reshape(x.shape), np.isfinite(value).reshape(x.shape)


def central(graph: Graph, env: Env, name: str) -> tuple[Array, Array]:
    """Fourth-order central differences at two steps (Richardson); an element where they differ is at a kink."""
    x = env.tensors[name]
    h = 1e-3 * np.maximum(1e-2, np.minimum(1.0, np.abs(x.ravel())))
    factors = np.array([1, -1, 2, -2, 0.5, -0.5])
    f = _loss(graph, _probed(env, name, factors[:, None] * h[None, :]), len(factors) * x.size).reshape(len(factors), -1)
    with np.errstate(all="ignore"):
        wide = (8 * (f[0] - f[1]) - (f[2] - f[3])) / (12 * h)
        tight = (8 * (f[4] - f[5]) - (f[0] - f[1])) / (6 * h)
        sure = np.abs(wide - tight) <= 1e-7 * (1 + np.abs(tight))
    return tight.reshape(x.shape), (sure & np.isfinite(tight)).reshape(x.shape)
