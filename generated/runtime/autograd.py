"""torch's autograd over ops: what is saved of a call, and how its backward runs.

One `torch.autograd.Function` is there for all ops. `DifferentiableOp.with_autograd` brings a call here where a gradient is wanted.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from . import binding
from .differentiable import DifferentiableOp
from .plan import Given, Meta
from .views import FLOATS

if TYPE_CHECKING:
    import torch


def apply(op: DifferentiableOp, given: dict[str, Any]) -> tuple[Any, ...]:
    """The outputs of an op on tensors and numbers by name, of which one or more want a gradient."""
    outputs: tuple[Any, ...] = _function().apply(op, tuple(given), *given.values())
    return outputs[: len(op.outputs)]


def run_backward(
    op: DifferentiableOp, given: dict[str, Any], needed: Sequence[str], device: torch.device, lib: binding.Torch
) -> dict[str, torch.Tensor]:
    """The gradients that are needed, as `d<name>`; `given` has residuals, cotangents and the shapes of all inputs."""
    metas: dict[str, Given] = binding.metas_of(given, lib)
    processors = lib.multiprocessors(device)
    dense: dict[str, torch.Tensor] = {}
    plan = op.planned(
        lambda known: op.plan_backward(known, needed, processors),
        metas,
        lambda name, shape: binding.copied(given[name], name, shape, dense, lib),
    )
    grads = binding.allocate(plan.outputs, device, lib)
    for name in plan.zeros:
        grads[name].zero_()
    if plan.launches:
        tensors = {**binding.tensors_of(given, lib), **dense, **grads, **binding.allocate(plan.scratch, device, lib)}
        binding.launch(op, plan, tensors, given, device, lib)
    wanted = {f"d{n}": own.shape for n in needed if isinstance(own := metas[n], Meta)}
    # Operands of more dims than a kernel takes were stretched: their gradients are summed back.
    return {n: g if tuple(g.shape) == wanted[n] else g.sum_to_size(wanted[n]) for n, g in grads.items()}


@cache
def _function() -> Any:
    """The autograd.Function, made when torch is there."""
    import torch

    class Pullback(torch.autograd.Function):
        """Forward and backward of any op. Saves what the backward kernels read, and only if a gradient is needed."""

        @staticmethod
        def forward(op: DifferentiableOp, names: tuple[str, ...], *values: Any) -> tuple[torch.Tensor, ...]:
            return binding.run_forward(op, dict(zip(names, values)), binding.torch_library(), saving=True)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
            op, names, *values = inputs
            lib = binding.torch_library()
            given = dict(zip(names, values))
            ctx.op, ctx.names = op, names
            ctx.metas = binding.metas_of(given, lib)
            ctx.device = output[0].device
            ctx.set_materialize_grads(False)
            outputs = dict(zip((t.name for t in (*op.outputs, *op.saved)), output))
            ctx.mark_non_differentiable(
                *(o for t, o in zip(op.outputs, output) if not t.differentiable or not o.is_floating_point()),
                *output[len(op.outputs) :],
            )
            everything = {**given, **outputs}
            # A buffer that this call has overwritten is not what its backward reads.
            written = op.updated(ctx.metas) if op.updates else ()
            kept = [n for n in op.residuals if isinstance(everything.get(n), torch.Tensor) and n not in written]
            ctx.kept = kept
            ctx.output_metas = {n: m for n, m in binding.metas_of(outputs, lib).items()}
            ctx.save_for_backward(*(everything[n] for n in kept))

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            raise RuntimeError(binding.NO_JVP.format(ctx.op.name))

        @staticmethod
        def vmap(info: Any, in_dims: Any, op: DifferentiableOp, *values: Any) -> Any:
            raise RuntimeError(binding.NO_VMAP.format(op.name))

        @staticmethod
        def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
            op: DifferentiableOp = ctx.op
            lib = binding.torch_library()
            wanted = [n for n, need in zip(ctx.names, ctx.needs_input_grad[2:]) if need]
            for name in wanted:
                if name not in op.gradients:
                    raise RuntimeError(
                        f"{op.name}: the gradient of `{name}` is declared `not_differentiable`: detach it"
                    )
            needed = [n for n in wanted if ctx.metas[n].dtype in FLOATS]
            if not needed or all(c is None for c in cotangents):
                return (None,) * (len(ctx.names) + 2)
            given: dict[str, Any] = {**ctx.output_metas, **ctx.metas, **{f"d{t.name}": None for t in op.outputs}}
            supplied = {f"d{t.name}": binding.plain(c, lib) for t, c in zip(op.outputs, cotangents) if c is not None}
            tensors = {**dict(zip(ctx.kept, ctx.saved_tensors)), **supplied}
            ways = op.ways({**ctx.metas, **binding.metas_of(supplied, lib)}, needed)
            # Autograd itself gets a cotangent that is passed, or one gradient twice, and clones where it must.
            by_name = {n: supplied[dy] for n, dy in ways.passed.items()}
            if ways.launched:
                own = _Once.apply(op, given, ways.launched, ctx.device, tuple(tensors), *tensors.values())
                by_name |= zip(ways.launched, own)
            by_name |= {n: by_name[other] for n, other in ways.shared.items()}
            return (None, None, *(by_name.get(n) for n in ctx.names))

    class _Once(torch.autograd.Function):
        """The backward as a function whose own backward is refused: kernels have no second derivative."""

        @staticmethod
        def forward(
            op: DifferentiableOp,
            given: dict[str, Any],
            needed: tuple[str, ...],
            device: Any,
            names: tuple[str, ...],
            *tensors: Any,
        ) -> tuple[Any, ...]:
            grads = run_backward(op, {**given, **dict(zip(names, tensors))}, needed, device, binding.torch_library())
            return tuple(grads[f"d{n}"] for n in needed)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
            ctx.name = inputs[0].name

        @staticmethod
        def backward(ctx: Any, *cotangents: Any) -> Any:
            raise RuntimeError(f"{ctx.name} was differentiated twice: its kernels give first derivatives only")

    # At each call torch asks for the signature and binds all to it, which is half of what it takes: this one is known, and short.
    every = inspect.Signature([inspect.Parameter("values", inspect.Parameter.VAR_POSITIONAL)])
    for function in (Pullback, _Once):
        function.forward.__signature__ = every
    return Pullback
