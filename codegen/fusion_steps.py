"""The key `fuses` of a spec: the ops that a fused op stands for, one step a line.

Takes an `OpSpec` with the key, returns its `groups.Step`s, or reports what is wrong with their form.

    s = sum_of(x=x, other=residual, alpha=1)   ->   Step("s", "sum_of", {"x": "x", "other": "residual"}, {"alpha": 1})
    y = gate(x=s, kind="tanh")                      Step("y", "gate", {"x": "s"}, {"kind": "tanh"})
"""

from __future__ import annotations

from typing import Any

from codegen.diagnostics import Report, Span, nearest
from codegen.groups import Step
from codegen.spec import Call, Expr, Name, Number, OpSpec, Text, Unary


def steps(op: OpSpec, report: Report | None = None) -> tuple[Step, ...]:
    """The steps under `fuses`, each fault of their form in the report."""
    report = report or Report()
    out: list[Step] = []
    for binding in op.fuses:
        call, stopped = binding.expr, False
        if isinstance(call, Call) and call.func == "stop_gradient" and len(call.args) == 1 and not call.keywords:
            call, stopped = call.args[0], True
        if not isinstance(call, Call) or call.args:
            report.error(binding.expr.span, "bad-step", "a step is one op with its arguments by name",
                         "`y = op(x=x, alpha=1)`")  # fmt: skip
            continue
        names: dict[str, str] = {}
        constants: dict[str, Any] = {}
        for word in call.keywords:
            if isinstance(word.value, Name) and word.value.id.lower() not in ("true", "false"):
                names[word.name] = word.value.id
            elif (value := constant(word.value)) is not None:
                constants[word.name] = value
            else:
                report.error(word.span, "bad-step", f"`{word.name}` of a step is a name or one constant")
        out.append(Step(binding.name, call.func, names, constants, stopped))
    return tuple(out)


def constant(expr: Expr) -> Any:
    """The value of a constant; None where it is none."""
    match expr:
        case Number(value, _, _) | Text(value, _):
            return value
        case Name(id, _) if id.lower() in ("true", "false"):
            return id.lower() == "true"
        case Unary("-", Number(value, _, _), _):
            return -value
        case Call("tuple", args, (), _, _):
            items = tuple(constant(a) for a in args)
            return None if None in items else items
    return None


def check_steps(op: OpSpec, report: Report) -> None:
    """What the key says of the op itself: its names, and that each of them is told."""
    own = {t.name for t in op.arguments} | {a.name for a in op.attrs}
    told: set[str] = set()
    results: dict[str, Span] = {}
    made = steps(op, report)
    if len(made) < len(op.fuses):
        return
    if op.buffers or op.state:
        report.error(op.fuses[0].span, "bad-step", f"`{op.name}` updates buffers: it stands for no steps")
    for binding, step in zip(op.fuses, made):
        for name in step.names.values():
            if name not in own and name not in results:
                report.error(binding.expr.span, "unknown-name", f"`{name}` is neither of `{op.name}` nor an earlier result",
                             nearest(name, [*own, *results]))  # fmt: skip
        told |= set(step.names.values())
        if step.result in own or step.result in results:
            report.error(binding.span, "set-twice", f"`{step.result}` is set twice")
        results[step.result] = binding.span
    outputs = {o.name for o in op.outputs}
    for name in sorted(own - told):
        report.error(op.fuses[0].span, "bad-step", f"no step says what `{name}` is",
                     "a fused op is called with what the graph tells of its steps")  # fmt: skip
    for name in sorted(outputs - results.keys()):
        report.error(op.fuses[0].span, "bad-step", f"no step gives the output `{name}`", nearest(name, results))
    for name, span in results.items():
        if name not in outputs and name not in told:
            report.error(span, "unused-name", f"`{name}` is set and never used", "use it, or delete the step")
