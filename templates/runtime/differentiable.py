"""`DifferentiableOp`: what an op has for training beside `RuntimeOp`, which is all that inference has. No torch here.

op = Softcap(cap=30.0)
given = op.backward_given({"x": x})                    # what is known in the backward: {"x": x, "y": ..., "dy": ...}
op.plan_backward(given, ("x",), 132).outputs["dx"]     # Meta("bf16", (4, 8), (8, 1))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from .abi import ArgVisitor
from .op import RuntimeOp, View, meta_of
from .plan import Call, Given, Launch, Meta, Plan, Stage


@dataclass(frozen=True)
class Ways:
    """How each needed gradient comes about."""

    launched: tuple[str, ...]
    """Those that kernels compute: `plan_backward` is asked for them."""
    passed: Mapping[str, str]
    """Those that are a cotangent as it is: by the tensor's name, that of the cotangent. It may be handed on, or copied."""
    shared: Mapping[str, str]
    """Those that equal a launched one: by the tensor's name, that of the other tensor."""


class DifferentiableOp(RuntimeOp):
    """What every op of a package for training is; one without `gradients` has no backward.

    In what follows `given` has, by name, what is known of inputs, params and buffers, of outputs, of what the forward saved, and of
    the cotangents, as `d<output>`: `backward_given` makes it of what is known in the forward.
    """

    backward: ClassVar[tuple[Stage, ...]] = ()
    residuals: ClassVar[tuple[str, ...]] = ()
    """Inputs, params, outputs and statistics that the backward kernels read."""
    gradients: ClassVar[tuple[str, ...]] = ()
    """Inputs and params that have a gradient, in the spec's order."""
    equals: ClassVar[Mapping[str, str]] = {}
    """Gradients that are the gradient of another tensor where the two tensors have one shape and dtype: written once."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.has_backward = bool(cls.gradients)

    @classmethod
    def stages(cls) -> tuple[Stage, ...]:
        return (*cls.forward, *cls.backward)

    def passes(self) -> dict[str, str]:
        """Gradients that are a cotangent as it is, with its name: nothing is launched for them where shapes agree."""
        return {}

    # -------------------------------------------------------------------------------- planning

    def plan_backward(self, given: Mapping[str, Given], needed: Sequence[str], multiprocessors: int) -> Plan:
        """Gradients to allocate, scratch and launches.

        Args:
            given: what is known in the backward, by name, the cotangents as `d<output>`.
            needed: the inputs and params whose gradients are to be computed; those that `ways` says are launched.

        Raises:
            TypeError, ValueError: naming op and argument.
        """
        if not self.has_backward:
            raise TypeError(f"{self.name} has no backward: {self.without}")
        key = self._key("backward", given, tuple(needed), multiprocessors)
        found = self._plans.get(key)
        if found is None:
            found = self._remember(key, self._plan_backward(given, needed, multiprocessors))
        return found

    def _plan_backward(self, given: Mapping[str, Given], needed: Sequence[str], multiprocessors: int) -> Plan:
        compute = self.compute_dtype(given)
        cotangents = [
            replace(t, name=f"d{t.name}")
            for t in self.outputs
            if t.differentiable and t.dtype in ("float", "number", "any", "compute")
        ]
        grads = {n: replace(t, name=f"d{n}") for t in self.tensors if (n := t.name) in needed}
        wanted = {g.name: meta.dtype for n, g in grads.items() if isinstance(meta := given[n], Meta)}
        declared = {
            t.name: t for t in (*self.tensors, *self.outputs, *self.saved, *cotangents, *grads.values(), *self.scratch)
        }
        known = {n: v for n, v in given.items() if n in declared and n not in wanted}
        scratch = {t.name: self.output_dtype(t, given, compute) for t in self.scratch}
        call = GradientCall(self, known, declared, {**wanted, **scratch}, compute, multiprocessors)
        self._run(call, self.backward, list(wanted))
        outputs = {n: call.outputs[n] for n in wanted}
        return Plan(outputs, call.scratch, tuple(call.launches), compute, tuple(call.zeros), metas=call.metas())

    def ways(self, given: Mapping[str, Given], needed: Sequence[str]) -> Ways:
        """What is launched for, and what is a cotangent or another gradient as it is, where shapes and dtypes agree."""

        def alike(one: str, other: str) -> bool:
            a, b = given.get(one), given.get(other)
            return isinstance(a, Meta) and isinstance(b, Meta) and (a.shape, a.dtype) == (b.shape, b.dtype)

        passed = {n: dy for n, dy in self.passes().items() if n in needed and alike(n, dy)}
        rest = [n for n in needed if n not in passed]
        shared = {n: o for n, o in self.equals.items() if n in rest and o in rest and alike(n, o)}
        return Ways(tuple(n for n in rest if n not in shared), passed, shared)

    # -------------------------------------------------------------------------------- the contract, by name

    def residual_shapes(self, given: Mapping[str, Given]) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors that the backward reads again; nothing else is kept."""
        plan = self.plan_forward(given)
        kept = {n: {**given, **plan.outputs, **plan.saved}.get(n) for n in self.residuals if n not in plan.updated}
        return {n: m.shape for n, m in kept.items() if isinstance(m, Meta)}

    def backward_given(self, given: Mapping[str, Given]) -> dict[str, Given]:
        """What is known in the backward of a forward with `given`, cotangents being laid out like the outputs."""
        plan = self.plan_forward(given)
        return {**given, **plan.outputs, **plan.saved, **{f"d{n}": m for n, m in plan.outputs.items()}}

    def backward_scratch_metas(
        self, given: Mapping[str, Given], needed: Sequence[str], multiprocessors: int
    ) -> dict[str, Meta]:
        """What a backward takes beside the gradients and gives back at its end."""
        return dict(self.plan_backward(given, needed, multiprocessors).scratch)

    def n_backward_launches(self, given: Mapping[str, Given], needed: Sequence[str], multiprocessors: int) -> int:
        return len(self.plan_backward(given, needed, multiprocessors).launches)

    def backward_block(self, i: int, given: Mapping[str, Given], needed: Sequence[str], multiprocessors: int,
                       lanes: int = 32) -> tuple[int, int, int]:  # fmt: skip
        """The threads of a program of backward launch `i`."""
        return self.plan_backward(given, needed, multiprocessors).launches[i].warps * lanes, 1, 1

    def backward_grid(
        self, i: int, given: Mapping[str, Given], needed: Sequence[str], multiprocessors: int
    ) -> tuple[int, int, int]:
        """The programs of backward launch `i`."""
        return self.plan_backward(given, needed, multiprocessors).launches[i].grid

    def pack_backward_args(self, i: int, inputs: Sequence[View], params: Sequence[View], buffers: Sequence[View],
                           outputs: Sequence[View], residuals: Sequence[View], grad_outputs: Sequence[View],
                           grad_inputs: Sequence[View], grad_params: Sequence[View], scratch: Sequence[View],
                           visitor: ArgVisitor, multiprocessors: int) -> None:  # fmt: skip
        """Visits the arguments of backward launch `i`; a gradient that is not needed is None, and so is an absent cotangent."""
        views = self._own_views(inputs, params, buffers)
        views |= self._named("outputs", [t.name for t in self.outputs], outputs)
        views |= self._named("residuals", [t.name for t in self.saved], residuals)
        views |= self._named("grad_outputs", [f"d{t.name}" for t in self.outputs], grad_outputs)
        grads = self._named("grad_inputs", [t.name for t in self.inputs], grad_inputs)
        grads |= self._named("grad_params", self.param_names, grad_params)
        needed = tuple(n for n in self.gradients if grads.get(n) is not None)
        plan = self.plan_backward({n: meta_of(v) for n, v in views.items()}, needed, multiprocessors)
        views |= {f"d{n}": v for n, v in grads.items()} | self._named("scratch", plan.scratch, scratch)
        self.pack(plan.launches[i], views, visitor)

    # -------------------------------------------------------------------------------- torch

    def with_autograd(self, given: dict[str, Any], key: Any = None) -> Sequence[Any]:
        """The outputs for tensors of torch, of which one wants a gradient; `key` is what `binding` keeps the call by."""
        from .autograd import apply

        return apply(self, given, key)


class GradientCall(Call):
    """A backward while it is planned: what it writes are gradients, which are summed over what was broadcast."""

    of_gradients = True

    def add_up(self, name: str, parts_name: str, parts: int, n_kept: int, values: Mapping[str, Any]) -> Launch:
        from .sums import add_up

        return add_up(name, parts_name, parts, n_kept, values)
