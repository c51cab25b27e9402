"""How the emitted tests check a backward: every gradient against numbers.

A gradient is compared, element by element in float64, with a fourth-order central difference of the op's own forward; an
element where two step sizes disagree lies at a kink and is left out. Runs on a GPU, or on a CPU in Triton's interpreter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .abi import PackedC, Recorder
from .differentiable import DifferentiableOp
from .plan import Meta
from .testing import TORCH, Case, _close, check_visits, laid_out_at
from .views import TensorView


class GradientCase(Case):
    """One op with a backward under test."""

    op: type[DifferentiableOp]

    def _differentiable(self, given: Mapping[str, Any]) -> list[str]:
        return [n for n in self.op.gradients if isinstance(given[n], torch.Tensor) and given[n].is_floating_point()]

    def _stored_exactly(self, given: dict[str, Any]) -> dict[str, Any]:
        """A backward reads an output as it was stored: of eighths a sum is stored exactly."""
        if self.op.elementwise or set(self.op.residuals).isdisjoint(t.name for t in self.op.outputs):
            return given
        return {n: ((v * 8).round() / 8).to(v.dtype) if v.is_floating_point() else v for n, v in given.items()}

    def _results(
        self, given: Mapping[str, Any], attrs: Mapping[str, Any], dtype: str = "f64"
    ) -> dict[str, torch.Tensor]:
        names = self._differentiable(given)
        leaves = {
            n: v.detach().requires_grad_(n in names) if isinstance(v, torch.Tensor) else v for n, v in given.items()
        }
        outputs = self.call(leaves, attrs)
        out = {f"output {k}": y.detach() for k, y in enumerate(outputs)}
        if names:
            seeds = {k: seed.to(TORCH[dtype]).to(outputs[k].dtype) for k, seed in seeds_of(outputs).items()}
            grads = torch.autograd.grad([outputs[k] for k in seeds], [leaves[n] for n in names], list(seeds.values()))
            out |= {f"gradient of {n}": g for n, g in zip(names, grads)}
        return out

    def gradients(self, layout: str, attrs: Mapping[str, Any]) -> None:
        """Each gradient against central differences; upstream gradients random, sliced, and of stride 0."""
        if self.refused(layout, attrs):
            return
        given = self.inputs(layout, attrs=attrs)
        names = self._differentiable(given)
        leaves = {n: v.detach().requires_grad_(n in names) for n, v in given.items()}
        every = self.call(leaves, attrs)
        random = seeds_of(every)
        outputs = [every[k] for k in random]
        wide = [torch.stack([s, s], dim=-1)[..., 0] for s in random.values()]  # every second element of its memory
        found = torch.autograd.grad(outputs, [leaves[n] for n in names], list(random.values()), retain_graph=True)
        again = torch.autograd.grad(outputs, [leaves[n] for n in names], wide, retain_graph=True)
        for name, grad, other in zip(names, found, again):
            assert grad.shape == given[name].shape and grad.dtype == given[name].dtype, name
            _close(other, grad, "f64")
            self._numerically(name, grad, given, random, attrs)
        ones = [torch.ones_like(y) for y in outputs]
        plain = torch.autograd.grad(outputs, [leaves[n] for n in names], ones, retain_graph=True)
        summed = torch.autograd.grad(sum(y.sum() for y in outputs), [leaves[n] for n in names])
        for grad, other in zip(plain, summed):
            _close(other, grad, "f64")

    def _numerically(
        self,
        name: str,
        grad: torch.Tensor,
        given: Mapping[str, Any],
        seeds: Mapping[int, torch.Tensor],
        attrs: Mapping[str, Any],
    ) -> None:
        x = given[name]
        if x.numel() == 0:
            return
        dims = next(t.dims for t in self.tensors if t.name == name)
        aligned = dims in ("...", "") or dims == self.op.outputs[0].dims
        whole = (
            bool(getattr(self.op, "sliced", ())) or not aligned or not self.op.elementwise
        )  # elements do not line up: the sum is compared
        direction = (
            torch.rand(x.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(x.device) + 0.5
        )

        def moved(h: float) -> list[torch.Tensor]:
            return list(self.call({**given, name: x + h * direction}, attrs))

        steps = {h: moved(h) for h in (1e-4, -1e-4, 5e-5, -5e-5, 2.5e-5, -2.5e-5)}
        here = moved(0.0)
        total = size = error = torch.zeros((), dtype=torch.float64, device=x.device)
        for k, seed in seeds.items():
            wide = (8 * (steps[5e-5][k] - steps[-5e-5][k]) - (steps[1e-4][k] - steps[-1e-4][k])) / 6e-4
            tight = (8 * (steps[2.5e-5][k] - steps[-2.5e-5][k]) - (steps[5e-5][k] - steps[-5e-5][k])) / 3e-4
            lost = (wide - tight).abs() > 1e-3 * (1 + tight.abs())  # a kink or a pole within the step
            if not self.op.elementwise:  # at a tie each side has a derivative of its own, whatever the step
                up, down = steps[2.5e-5][k] - here[k], here[k] - steps[-2.5e-5][k]
                lost |= (up - down).abs() > 2.5e-5 * 0.05 * (1 + tight.abs())
            own = (seed * tight, (seed * tight).abs(), torch.where(lost, math.inf, (seed * (wide - tight)).abs()))
            parts = [v.sum() if whole else v for v in own]  # outputs may differ in axes
            total, size, error = (a + b for a, b in zip((total, size, error), parts))
        got = grad * direction
        if whole:
            got, want = got.sum(), total
        else:
            want, size, error = (_sum_to(v, x.shape) for v in (total, size, error))
        # At a kink the two steps differ: it is left out by its own uncertainty, which must be small somewhere.
        bound = 1e-6 * (1 + size) + 2 * error
        finite = want.isfinite() & got.isfinite() & bound.isfinite()
        assert not finite.any() or (bound <= 1e-3 * (1 + size))[finite].any(), f"no element of {name} could be checked"
        bad = finite & ~((got - want).abs() <= bound)
        assert not bad.any(), f"gradient of {name}: {got[bad][0]}, numerical {want[bad][0]}"

    def subsets(self, attrs: Mapping[str, Any]) -> None:
        """Every subset of the gradients may be all that is needed; the others stay None."""
        layouts = ("matrix", "row") if "row" in self.layouts else ("matrix",)
        for layout in layouts:
            given = self.inputs(layout, attrs=attrs)
            names = self._differentiable(given)
            whole = self._results(given, attrs)
            for count in range(1, len(names) + 1):
                for chosen in itertools.combinations(names, count):
                    leaves = {n: v.detach().requires_grad_(n in chosen) for n, v in given.items()}
                    outputs = self.call(leaves, attrs)
                    seeds = seeds_of(outputs)
                    torch.autograd.backward([outputs[k] for k in seeds], list(seeds.values()))
                    for name in names:
                        assert (leaves[name].grad is not None) == (name in chosen)
                        if name in chosen:
                            _close(leaves[name].grad, whole[f"gradient of {name}"], "f64")

    def twice(self, attrs: Mapping[str, Any]) -> None:
        """A second derivative is refused, not silently wrong."""
        given = self.inputs("matrix", attrs=attrs)
        names = self._differentiable(given)
        leaves = {n: v.detach().requires_grad_(n in names) for n, v in given.items()}
        outputs = self.call(leaves, attrs)
        found = seeds_of(outputs)
        seeds = [seed.requires_grad_() for seed in found.values()]
        grads = torch.autograd.grad([outputs[k] for k in found], [leaves[n] for n in names], seeds, create_graph=True)
        passed = set(self.op(**self._all_attrs(attrs)).passes())
        for name, grad in zip(names, grads):
            if name in passed:
                continue
            try:
                torch.autograd.grad(grad.sum(), [leaves[name], *seeds], allow_unused=True)
            except RuntimeError as error:
                assert "first derivatives only" in str(error)
            else:
                raise AssertionError(f"the second derivative by {name} was not refused")

    def parameters(self) -> None:
        """As of the forward; then the same of every launch of the backward."""
        op, sides, outputs, named = self._visited()
        assert isinstance(op, DifferentiableOp)
        cotangents = [TensorView(6000 + 16 * k, v.dtype, v.shape, v.strides) for k, v in enumerate(outputs)]
        grads = [
            [TensorView(7000 + 500 * g + 16 * k, v.dtype, v.shape, v.strides) if t.name in op.gradients else None
             for k, (t, v) in enumerate(zip(group, side))]
            for g, (group, side) in enumerate(zip((op.inputs, op.params), sides))
        ]  # fmt: skip
        named = named | {f"d{t.name}": v for t, v in zip(op.outputs, cotangents)}
        named |= {
            f"d{t.name}": v
            for group, side in zip((op.inputs, op.params), grads)
            for t, v in zip(group, side)
            if v is not None
        }
        own = {t.name for t in op.scratch}  # of the forward: what a stage hands on is gone
        metas = {n: Meta(v.dtype, v.shape, v.strides) for n, v in named.items() if n not in own}
        absent = [None] * len(op.saved)
        plan = op.plan_backward({**metas, **{t.name: None for t in op.saved}}, op.gradients, 132)
        scratch = laid_out_at(9000, plan.scratch)
        named |= dict(zip(plan.scratch, scratch))
        for i, launch in enumerate(plan.launches):
            recorder, packed = Recorder(), PackedC()
            for visitor in (recorder, packed):
                op.pack_backward_args(i, *sides, outputs, absent, cotangents, *grads, scratch, visitor, 132)
            check_visits(launch, recorder, packed, {n: v.address for n, v in named.items()})


def seeds_of(outputs: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Upstream gradients of the outputs that have some, by their places: an index has none."""
    return {k: seed_of(y, k) for k, y in enumerate(outputs) if y.requires_grad}


def seed_of(y: torch.Tensor, k: int) -> torch.Tensor:
    return (torch.randn(y.shape, generator=torch.Generator().manual_seed(70 + k), dtype=torch.float64) + 0.25).to(
        y.device, y.dtype
    )


def _sum_to(value: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return value.sum_to_size(shape) if value.shape != shape else value
