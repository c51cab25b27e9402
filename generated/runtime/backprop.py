"""The backward half of a program: reverse mode over the nodes of a model, by the contract of the ops.

    program = build(model, {"batch": 64}, multiprocessors=132)
    program.backward, program.gradients    # the tasks, and where the gradients of a run are

Nodes are gone through in reverse. The cotangents that a tensor has got from those that read it are added up, two at a time; each node
turns those of its results into those of its operands. What a backward reads of the forward lives until then: its launches say what
that is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from . import moves
from .abi import ArgVisitor
from .differentiable import DifferentiableOp
from .elementwise import triton_dtype
from .graph import Node
from .paths import TrainingModel
from .plan import Meta, Plan
from .program import Builder, Program, Task, Views, begin, grouped, named, place, seen
from .shaping import Shaping
from .sums import add_up


@dataclass
class TrainingProgram(Program):
    """A program with a backward."""

    backward: list[Task] = field(default_factory=list)
    gradients: dict[str, str] = field(default_factory=dict)
    """For each param and input that has one, the tensor that holds the gradient of one run."""

    @property
    def tasks(self) -> list[Task]:
        return [*self.forward, *self.backward]

    @property
    def lasting(self) -> list[str]:
        return [*self.model.outputs, *self.gradients.values()]


def build(
    model: TrainingModel, sizes: Mapping[str, int], multiprocessors: int, wide: Collection[str] = ()
) -> TrainingProgram:
    """Plans every launch and every byte of both directions.

    Args:
        wide: params whose gradients are added up in float32, whatever their dtype.

    Raises:
        TypeError, ValueError, IndexError: as `program.build`.
    """
    program = TrainingProgram(model, dict(sizes))
    Backprop(begin(program, multiprocessors), program, model, wide).run()
    place(program)
    return program


def seed_of(output: str) -> str:
    """The name of the cotangent that a backward begins with."""
    return f"{output} seed"


class Backprop:
    """Cotangents by the tensors that they belong to."""

    def __init__(self, builder: Builder, program: TrainingProgram, model: TrainingModel, wide: Collection[str]) -> None:
        self.builder, self.program, self.model, self.wide = builder, program, model, wide
        self.cotangents: dict[str, list[str]] = {}

    def run(self) -> None:
        for name in self.model.seeds:
            seed = self.builder.new(seed_of(name), self.builder.row_major(name), fixed=True)
            self.cotangents.setdefault(name, []).append(seed)
        for node in reversed(self.model.nodes):
            found = {t: self._gathered(v) for t, v in node.outputs.items() if v in self.model.requires}
            if any(found.values()):
                with named(node.label):
                    self._backward(node, found)
        for leaf in self.model.wanted:
            own = self._gathered(leaf)
            if own is not None:
                self.program.gradients[leaf] = own

    def _gathered(self, name: str) -> str | None:
        """The sum of the cotangents that a tensor has got from those that read it."""
        parts = self.cotangents.pop(name, [])
        while len(parts) > 1:
            first, second, *rest = parts
            meta = self.builder.row_major(name)
            meta = replace(meta, dtype="f32") if name in self.wide else meta
            total = self.builder.new(f"{name} gradient of {len(rest) + 2}", meta)
            launch = moves.add(self.builder.meta(first), self.builder.meta(second), meta)
            names = {"x": first, "other": second, "out": total}
            self.builder.move(self.program.backward, f"gradients of `{name}`", launch, names)
            parts = [total, *rest]
        return parts[0] if parts else None

    def _backward(self, node: Node, found: Mapping[str, str | None]) -> None:
        if isinstance(node.op, Shaping):
            (source,), (cotangent,) = node.operands, found.values()
            if source in self.model.requires and cotangent is not None:
                self._unshape(node, node.op, source, cotangent)
            return
        op, names, plan = node.op, self.builder.operands[node.name], self.builder.plans[node.name]
        assert isinstance(op, DifferentiableOp)
        needed = [n for n in op.gradients if isinstance(v := node.inputs.get(n), str) and v in self.model.requires]
        results = {t: node.outputs[t] for t in plan.outputs}
        cotangents = {f"d{t.name}": found.get(t.name) for t in op.outputs}
        known = {**names, **results, **self.builder.kept[node.name], **cotangents}
        ways = op.ways(self.builder.given({**known, **node.inputs}), needed)  # a copy may be stretched
        made = {n: str(known[cotangent]) for n, cotangent in ways.passed.items()}
        if ways.launched:
            made |= self._differentiate(node, op, known, ways.launched)
        for name in needed:
            self.cotangents.setdefault(str(node.inputs[name]), []).append(made[ways.shared.get(name, name)])

    def _differentiate(
        self, node: Node, op: DifferentiableOp, known: dict[str, Any], needed: Sequence[str]
    ) -> dict[str, str]:
        """The backward's task of one node; the gradients by operand."""
        plan, copies = self._planned(node, op, known, needed)
        touched = {n for launch in plan.launches for n in launch.pointers.values()}
        reads = tuple(dict.fromkeys(v for n, v in known.items() if isinstance(v, str) and n in touched))
        self.program.backward += [task for task in copies if task.writes[0] in reads]
        grads = {n: self.builder.new(f"{node.name} d{n}", plan.outputs[f"d{n}"]) for n in needed}
        scratch = [self.builder.new(f"{node.name} backward {n}", m) for n, m in plan.scratch.items()]
        groups, multiprocessors = grouped(op, known), self.builder.multiprocessors

        def pack(i: int, views: Views, visitor: ArgVisitor) -> None:
            def all_of(tensors: Sequence[Any], prefix: str = "") -> list[Any]:
                return [views[v] if isinstance(v := known.get(f"{prefix}{t.name}"), str) else v for t in tensors]

            own = [[views[grads[t.name]] if t.name in grads else None for t in ts] for ts in (op.inputs, op.params)]
            op.pack_backward_args(
                i, *seen(groups, views), all_of(op.outputs), all_of(op.saved), all_of(op.outputs, "d"), *own,
                [views[n] for n in scratch], visitor, multiprocessors,
            )  # fmt: skip

        zeros = tuple(grads[z[1:]] for z in plan.zeros)
        writes = (*grads.values(), *scratch)
        self.program.backward.append(
            Task(f"backward of {node.label}", plan.launches, plan.metas, pack, reads, writes, zeros)
        )
        shapes = {n: self.builder.meta(str(node.inputs[n])) for n in needed}
        alike = {n: self.builder.meta(grads[n]).shape == meta.shape for n, meta in shapes.items()}
        return {
            n: g if alike[n] else self._added_up(g, shapes[n], f"backward of {node.label}") for n, g in grads.items()
        }

    def _planned(
        self, node: Node, op: DifferentiableOp, known: dict[str, Any], needed: Sequence[str]
    ) -> tuple[Plan, list[Task]]:
        """The backward's plan. Tensors of more dims than a kernel takes are copied: `known` has the copies, whose tasks are given."""
        tasks: list[Task] = []
        multiprocessors, label = self.builder.multiprocessors, f"backward of {node.label}"
        plan = op.planned(
            lambda given: op.plan_backward(given, needed, multiprocessors),
            self.builder.given(known),
            self.builder.copied(tasks, known, label),
        )
        return plan, tasks

    def _added_up(self, name: str, meta: Meta, label: str) -> str:
        """The gradient of an operand that was copied stretched: what the copy has is brought into an order in which the axes
        that were stretched come first, and added up over them."""
        whole = self.builder.meta(name)
        lead = len(whole.shape) - len(meta.shape)
        own = (*(1,) * lead, *meta.shape)
        order = sorted(range(len(own)), key=lambda d: own[d] == whole.shape[d])
        turned = Meta(whole.dtype, tuple(whole.shape[d] for d in order), tuple(whole.strides[d] for d in order))
        view = self.builder.view(f"{name} turned", name, turned)
        if turned != self.builder.row_major(view):
            view = self.builder.dense(self.program.backward, view, f"{label}: dense memory")
        total = self.builder.new(f"{name} total", Meta.dense(meta.dtype, meta.shape))
        count = math.prod(meta.shape)
        compute = {"f16": "f32", "bf16": "f32"}.get(meta.dtype, meta.dtype)
        wide = math.prod(whole.shape) >= 2**31
        values = {"COMPUTE": triton_dtype(compute), "WIDE": wide}
        launch = add_up("out", "x", math.prod(whole.shape) // max(count, 1), count, values)
        self.builder.move(self.program.backward, f"{label}: sums", launch, {"x": view, "out": total})
        return total

    def _unshape(self, node: Node, shaping: Shaping, source: str, cotangent: str) -> None:
        meta = shaping.back(self.builder.meta(cotangent), self.builder.meta(source))
        if meta is None:
            cotangent = self.builder.dense(self.program.backward, cotangent, f"backward of {node.label}: dense memory")
            meta = shaping.back(self.builder.meta(cotangent), self.builder.meta(source))
        assert meta is not None
        own = self.builder.view(f"{node.name} dx", cotangent, meta)
        self.cotangents.setdefault(source, []).append(own)
