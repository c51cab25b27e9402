"""torch's autograd over ops: what is saved of a call, and how its backward runs.

`DifferentiableOp.with_autograd` brings a call here where a gradient is wanted. What calls of one key come to is a `PreparedCall`, with
what their backward comes to beside it: one for each set of gradients and layout of cotangents that was asked for.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from . import binding
from .device import Torch, torch_library
from .differentiable import DifferentiableOp
from .op import remember
from .plan import Given, Meta
from .prepared import Prepared
from .views import FLOATS

if TYPE_CHECKING:
    import torch


def apply(op: DifferentiableOp, given: dict[str, Any], key: Any = None) -> Sequence[Any]:
    """The outputs of an op on tensors and numbers by name, of which one or more want a gradient.

    Args:
        key: what `binding` keeps the call by; None where it does not.

    Raises:
        TypeError, ValueError: as a call does, naming op and argument.
    """
    lib = torch_library()
    if lib.transformed():
        outputs: tuple[Any, ...] = _functions()[1].apply(op, tuple(given), *given.values())
        return outputs[: len(op.outputs)]
    call = PreparedCall(op, given, lib)
    made = call.run(op, tuple(given.values()))
    binding.keep(op, key, given, call.forward, call)
    return made


class PreparedCall:
    """Calls of one key that want a gradient: their forward, what they save, and their backwards."""

    def __init__(self, op: DifferentiableOp, given: Mapping[str, Any], lib: Torch) -> None:
        self.forward = binding.forward(op, given, lib, saving=True)
        plan = self.forward.plan
        self.names = tuple(given)
        self.metas: dict[str, Given] = lib.metas(given)
        self.outputs = {**plan.outputs, **plan.saved}
        every = [*self.names, *self.outputs]
        there = {n for n, v in {**self.metas, **self.outputs}.items() if isinstance(v, Meta)}
        # A buffer that a call has overwritten is not what its backward reads.
        self.kept = {n: every.index(n) for n in op.residuals if n in there and n not in plan.updated}
        self.numbers = {n: k for k, n in enumerate(self.names) if isinstance(self.metas[n], (int, float))}
        smooth = {t.name for t in op.outputs if t.differentiable}
        self._fixed = [k for k, (n, m) in enumerate(self.outputs.items()) if n not in smooth or m.dtype not in FLOATS]
        self._count = len(plan.outputs)
        self._backwards: dict[Any, PreparedBackward] = {}

    def run(self, op: DifferentiableOp, values: tuple[Any, ...]) -> Sequence[Any]:
        """The outputs, on torch's tape."""
        outputs: tuple[Any, ...] = _functions()[0].apply(self, op, *values)
        return outputs[: self._count]

    def save(self, ctx: Any, op: DifferentiableOp, values: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Saves of a call what its backward reads."""
        ctx.call, ctx.op = self, op
        ctx.set_materialize_grads(False)
        if self._fixed:
            ctx.mark_non_differentiable(*[outputs[k] for k in self._fixed])
        every = (*values, *outputs)
        ctx.numbers = [values[k] for k in self.numbers.values()]
        ctx.save_for_backward(*[every[k] for k in self.kept.values()])

    def backward_of(
        self, op: DifferentiableOp, needs: tuple[bool, ...], saved: Sequence[Any], cotangents: Mapping[str, Any]
    ) -> PreparedBackward:
        """The backward to the gradients that `needs` says, for cotangents by name."""
        # What was saved is looked at too: a hook may have laid it out anew.
        key = needs, tuple(cotangents), tuple([(v.dtype, v.shape, v.stride()) for v in (*saved, *cotangents.values())])
        found = self._backwards.get(key)
        if found is None:
            found = PreparedBackward(self, op, needs, saved, cotangents, torch_library())
            remember(self._backwards, key, found)
        return found


class PreparedBackward:
    """How a call's gradients come about: by launches, as a cotangent that is handed on, or as another gradient."""

    def __init__(
        self, call: PreparedCall, op: DifferentiableOp, needs: tuple[bool, ...], saved: Sequence[Any], cotangents: Mapping[str, Any], lib: Torch,
    ) -> None:  # fmt: skip
        wanted = [n for n, need in zip(call.names, needs) if need]
        for name in wanted:
            if name not in op.gradients:
                raise RuntimeError(f"{op.name}: the gradient of `{name}` is declared `not_differentiable`: detach it")
        metas = {n: m for n in wanted if isinstance(m := call.metas[n], Meta) and m.dtype in FLOATS}
        supplied = lib.metas(cotangents)
        ways = op.ways({**call.metas, **supplied}, [*metas])
        self.backward: Prepared | None = None
        self._summed: list[tuple[int, tuple[int, ...]]] = []
        if ways.launched:
            tensors = {**dict(zip(call.kept, saved)), **cotangents}
            given = {**call.outputs, **call.metas, **{f"d{t.name}": None for t in op.outputs}, **tensors}
            device = call.forward.device
            self.backward = Prepared.of(
                op, lambda known: op.plan_backward(known, ways.launched, lib.multiprocessors(device)), given,
                (*tensors, *call.numbers), device, lambda plan: {f"d{n}": plan.outputs[f"d{n}"] for n in ways.launched}, lambda plan: plan.scratch, lib,
            )  # fmt: skip
            made = self.backward.plan.outputs
            # Operands of more dims than a kernel takes were stretched: their gradients are summed back.
            self._summed = [
                (k, metas[n].shape) for k, n in enumerate(ways.launched) if made[f"d{n}"].shape != metas[n].shape
            ]
        # Where each gradient is, among those that were launched for and the cotangents behind them.
        places = {n: k for k, n in enumerate(ways.launched)}
        places |= {n: len(ways.launched) + list(cotangents).index(dy) for n, dy in ways.passed.items()}
        places |= {n: places[other] for n, other in ways.shared.items()}
        self.places = [places.get(n) for n in call.names]

    def run(self, op: DifferentiableOp, numbers: Sequence[float], *tensors: Any) -> tuple[torch.Tensor, ...]:
        """The gradients that are launched for, each like its tensor, of what was saved and the cotangents."""
        assert self.backward is not None
        made = self.backward.run(op, (*tensors, *numbers))
        for k, shape in self._summed:
            made[k] = made[k].sum_to_size(shape)
        return tuple(made)


def _backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
    """The gradients of a call's values."""
    call: PreparedCall = ctx.call
    op: DifferentiableOp = ctx.op
    needs = ctx.needs_input_grad[2:]
    lib = torch_library()
    supplied = {f"d{t.name}": binding.plain(c, lib) for t, c in zip(op.outputs, cotangents) if c is not None}
    if not supplied:
        return (None,) * len(ctx.needs_input_grad)
    for cotangent in supplied.values():
        if cotangent.layout is not lib.torch.strided:
            raise TypeError(f"{op.name}: a cotangent is {cotangent.layout}; kernels take strided tensors")
    saved = [binding.plain(v, lib) for v in ctx.saved_tensors]  # a hook may have handed back a lazily negated view
    prepared = call.backward_of(op, needs, saved, supplied)
    made: tuple[Any, ...] = ()
    if prepared.backward is not None:
        if any(map(lib.batched, supplied.values())):
            raise RuntimeError(binding.NO_VMAP.format(op.name))
        run = partial(prepared.run, op, ctx.numbers)
        tensors = (*saved, *supplied.values())
        again = lib.transformed() or (lib.torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
        made = _functions()[2].apply(op, run, *tensors) if again else run(*tensors)
    # Autograd itself gets a cotangent that is passed, or one gradient twice, and clones where it must.
    every = (*made, *supplied.values())
    return None, None, *(None if k is None else every[k] for k in prepared.places)


@cache
def _functions() -> tuple[Any, Any, Any]:
    """The functions of torch's autograd, made when torch is there: of a call, of one under torch.func, and of a backward."""
    import torch

    class Pullback(torch.autograd.Function):
        """Forward and backward of any op. Saves what the backward kernels read, and only if a gradient is needed."""

        @staticmethod
        def forward(ctx: Any, call: PreparedCall, op: DifferentiableOp, *values: Any) -> tuple[torch.Tensor, ...]:
            outputs = call.forward.run(op, values)
            call.save(ctx, op, values, outputs)
            return tuple(outputs)

        @staticmethod
        def backward(ctx: Any, *cotangents: Any) -> Any:
            return _backward(ctx, *cotangents)

    class Transformed(torch.autograd.Function):
        """The same in the form that torch.func asks for, which takes torch twice the time."""

        @staticmethod
        def forward(op: DifferentiableOp, names: tuple[str, ...], *values: Any) -> tuple[torch.Tensor, ...]:
            return tuple(binding.forward(op, dict(zip(names, values)), torch_library(), saving=True).run(op, values))

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
            op, names, *values = inputs
            PreparedCall(op, dict(zip(names, values)), torch_library()).save(ctx, op, values, output)

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            raise RuntimeError(binding.NO_JVP.format(ctx.op.name))

        @staticmethod
        def vmap(info: Any, in_dims: Any, op: DifferentiableOp, *values: Any) -> Any:
            raise RuntimeError(binding.NO_VMAP.format(op.name))

        @staticmethod
        def backward(ctx: Any, *cotangents: Any) -> Any:
            return _backward(ctx, *cotangents)

    class Once(torch.autograd.Function):
        """The backward as a function whose own backward is refused: kernels have no second derivative."""

        @staticmethod
        def forward(op: DifferentiableOp, run: Any, *tensors: Any) -> Any:
            return run(*tensors)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
            ctx.name = inputs[0].name

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            raise RuntimeError(binding.NO_JVP.format(ctx.name))

        @staticmethod
        def vmap(info: Any, in_dims: Any, op: DifferentiableOp, *more: Any) -> Any:
            raise RuntimeError(binding.NO_VMAP.format(op.name))

        @staticmethod
        def backward(ctx: Any, *cotangents: Any) -> Any:
            raise RuntimeError(f"{ctx.name} was differentiated twice: its kernels give first derivatives only")

    # At each call torch asks for the signature and binds all to it, which is half of what it takes: this one is known, and short.
    every = inspect.Signature([inspect.Parameter("values", inspect.Parameter.VAR_POSITIONAL)])
    for function in (Transformed, Once):
        function.forward.__signature__ = every
    return Pullback, Transformed, Once
