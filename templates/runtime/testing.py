"""How the emitted tests check an op: forward, dtypes, layouts, and every gradient against numbers.

A gradient is compared, element by element in float64, with a fourth-order central difference of the op's own forward; an
element where two step sizes disagree lies at a kink and is left out. Runs on a GPU, or on a CPU in Triton's interpreter.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .abi import PackedC, Recorder
from .layout import parse_dims
from .op import RuntimeOp
from .plan import Meta, Tensor
from .views import FLOATS, INTS, TensorView, dense_strides

TORCH = {
    "f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64, "i32": torch.int32,
    "i64": torch.int64, "bool": torch.bool,
}  # fmt: skip
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = {"f16": 2.0**-10, "bf16": 2.0**-7, "f32": 2.0**-23, "f64": 2.0**-52}
ROUNDINGS = {"f16": 4, "bf16": 4, "f32": 64, "f64": 64}
"""How many units in the last place of 1 + |value| a result may be off: one rounding, and what a formula of dozens adds."""

_SHAPES: dict[str, tuple[int, ...]] = {
    "no dims": (), "empty": (0,), "one": (1,), "no columns": (3, 0), "prime": (13,), "past a power of two": (1025,), "matrix": (5, 7),
    "cube": (3, 4, 5),
}  # fmt: skip
_LAYOUTS = ("transposed", "sliced", "expanded", "channels last")
_BROADCASTS = ("row", "column", "outer", "zero dims", "leading", "tall")
_THOROUGH = ("empty", "matrix", "row")
"""Layouts that are combined with every choice of attrs."""


class Formula:
    """The functions of formulas in torch, on tensors and numbers: an op without a reference is compared with its own formula."""

    _WHOLE = ("abs", "sign", "square", "relu", "maximum", "minimum", "fmod", "where")
    """Functions of which ints are ints; all others are computed in float64."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(torch, name)
        if name in self._WHOLE:
            return lambda *values: function(*map(_lifted, values))
        return lambda *values: function(*(_lifted(float(v) if isinstance(v, int) else v) for v in values))

    def softplus(self, x: Any) -> torch.Tensor:
        """log(1 + exp(x)), for every x."""
        return torch.logaddexp(_lifted(x), torch.zeros_like(_lifted(x)))

    def clamp(self, x: Any, low: Any, high: Any) -> torch.Tensor:
        """minimum(maximum(x, low), high)."""
        return torch.minimum(torch.maximum(_lifted(x), _lifted(low)), _lifted(high))

    def cast(self, x: Any, kind: type) -> torch.Tensor:
        """To bool, to a 64-bit int or to float64."""
        return _lifted(x).to({bool: torch.bool, int: torch.int64, float: torch.float64}[kind])


F = Formula()


def _lifted(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    small = (
        isinstance(value, int) and not isinstance(value, bool) and -(2**31) <= value < 2**31
    )  # a number does not widen what it stands beside
    dtype = torch.float64 if isinstance(value, float) else torch.int32 if small else None
    return torch.tensor(value, dtype=dtype, device=DEVICE)


class Case:
    """One op under test. `domains` bounds inputs by name; `reference` takes the spec's names."""

    def __init__(self, function: Callable[..., Any], op: type[RuntimeOp], domains: Mapping[str, tuple[float, float]],
                 reference: Callable[..., Any] | None = None) -> None:  # fmt: skip
        self.function, self.op, self.domains, self.reference = function, op, domains, reference
        self.tensors: tuple[Tensor, ...] = (*op.inputs, *op.params, *op.buffers)
        stretching = [t for t in self.tensors if t.broadcast]
        crossed = ("crossed",) if len(self.tensors) > 1 else ()
        packs = {d.axes[0] for t in self.tensors for d in parse_dims(t.dims) if d.pack}
        shapes = [n for n, shape in _SHAPES.items() if 0 not in shape or packs.isdisjoint(op.needs_elements)]
        self.layouts = (*shapes, *_LAYOUTS, *crossed, *(_BROADCASTS if len(stretching) > 1 else ()))
        kinds = {t.dtype for t in self.tensors}
        self.dtypes: tuple[str, ...] = FLOATS if kinds & {"float", "number", "any"} else ()
        self.dtypes += INTS if kinds & {"number", "any", "integral"} or not self.dtypes else ()
        self.dtypes += ("bool",) if kinds & {"any", "integral"} else ()
        self.usual = "f64" if "f64" in self.dtypes else "i64"
        placed = self._instance().axis_position()
        self.placed = placed[0] if placed else ""

    def combinations(self, attrs: Sequence[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
        """Layouts with attrs to run them with: some layouts with all of them, each other with one in turn."""
        out: list[tuple[str, Mapping[str, Any]]] = []
        for k, layout in enumerate(self.layouts):
            whole = len(attrs) <= 2 or layout in _THOROUGH
            out += [(layout, a) for a in (attrs if whole else (attrs[k % len(attrs)],))]
        return out

    # -------------------------------------------------------------------------------- inputs

    def _shape(self, tensor: Tensor, pack: tuple[int, ...]) -> tuple[int, ...]:
        shape: list[int] = []
        for dim in parse_dims(tensor.dims):
            if dim.pack and (dim.axes[0] == "..." or dim.axes[0] != self.placed):
                shape += pack if dim.axes[0] == "..." else (3,)
            elif not dim.pack:
                shape.append(math.prod(f or 3 for f in dim.fixed))
        return tuple(shape)  # a pack that `dim` places is a part of `...`

    def _values(self, tensor: Tensor, shape: tuple[int, ...], dtype: str, seed: int, below: int = 3) -> torch.Tensor:
        """Random elements within the domain; of a tensor that indexes an axis, `below` the extent of that, which is 3 here."""
        generator = torch.Generator().manual_seed(seed)
        if "bool" in (tensor.dtype, dtype) and "bool" in tensor.dtypes:
            return (torch.rand(shape, generator=generator) < 0.5).to(DEVICE)
        if tensor.indexes:
            places = torch.randint(0, below, shape, generator=generator)
            if isinstance(tensor.unless, int):
                places = torch.where(torch.rand(shape, generator=generator) < 0.3, tensor.unless, places)
            return places.to(DEVICE)
        if tensor.dtype in ("int", *INTS) or (dtype in INTS and dtype in tensor.dtypes):
            low, high = self.domains.get(tensor.name, (-9, 9))
            whole = torch.randint(int(max(low, -9)), int(min(high, 9)) + 1, shape, generator=generator)
            kind = tensor.dtype if tensor.dtype in INTS else dtype if dtype in INTS else "i64"
            return whole.to(DEVICE, TORCH[kind])
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64) * 1.5
        low, high = self.domains.get(tensor.name, (-math.inf, math.inf))
        if math.isfinite(low) and math.isfinite(high):
            drawn = low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64)
        elif math.isfinite(low):
            drawn = low + drawn.abs() + 0.05
        elif math.isfinite(high):
            drawn = high - drawn.abs() - 0.05
        out = drawn.to(TORCH[dtype])  # rounding may leave the domain
        out = torch.where(out.double() > high, torch.nextafter(out, out.new_tensor(-math.inf)), out)
        out = torch.where(out.double() < low, torch.nextafter(out, out.new_tensor(math.inf)), out)
        return out.to(DEVICE)

    def inputs(self, layout: str, dtype: str = "") -> dict[str, Any]:
        """Arguments by the spec's names, in a layout; leaves, so that gradients can be asked of them."""
        dtype = dtype or self.usual
        out = {}
        for k, tensor in enumerate(self.tensors):
            out[tensor.name] = self._laid_out(tensor, k, layout, dtype)
        return out

    def _laid_out(self, tensor: Tensor, k: int, layout: str, dtype: str) -> torch.Tensor:
        if layout in _SHAPES:
            # Rows have other axes beside: an interpreter takes its time for each program.
            pack = tuple(n if self.op.elementwise else min(n, 129) for n in _SHAPES[layout])
            return self._values(tensor, self._shape(tensor, pack), dtype, k)
        if layout in _BROADCASTS:
            return self._values(tensor, self._shape(tensor, self._stretched(tensor, k, layout)), dtype, k)
        crossed = layout == "crossed"
        shape = self._shape(tensor, (6, 5) if not crossed else (40, 37) if self.op.elementwise else (9, 8))
        if len(shape) < 2 or (crossed and k % 2 == 0):
            return self._values(tensor, shape, dtype, k)
        if layout == "transposed" or crossed:
            return self._values(tensor, shape[::-1], dtype, k).permute(*reversed(range(len(shape))))
        if layout == "sliced":
            wide = self._values(tensor, (*shape[:-1], shape[-1] + 2), dtype, k)
            return wide[..., 1:-1]
        if layout == "expanded":
            return self._values(tensor, (1, *shape[1:]), dtype, k).expand(shape)
        tall = self._values(tensor, (shape[0], *shape[2:], shape[1]), dtype, k)
        return tall.movedim(-1, 1)

    def _stretched(self, tensor: Tensor, k: int, layout: str) -> tuple[int, ...]:
        if not tensor.broadcast:
            return (3, 5) if layout != "tall" else (300, 3)
        first = k % 2 == 0
        return {
            "row": (3, 5) if first else (5,), "column": (3, 5) if first else (3, 1), "outer": (3, 1) if first else (1, 5),
            "zero dims": (3, 5) if first else (), "leading": (3, 5) if first else (2, 1, 5), "tall": (300, 3) if first else (3,),
        }[layout]  # fmt: skip

    def refused(self, layout: str, attrs: Mapping[str, Any]) -> bool:
        """Whether the op's spec asks for more elements than this layout has; then a call says so."""
        if math.prod(_SHAPES.get(layout, (2,))) > 1:
            return False
        try:
            self.call(self.inputs(layout), attrs)
        except ValueError as error:
            assert " requires " in str(error), error
            return True
        return False

    def call(self, given: Mapping[str, Any], attrs: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        """The op on arguments by the spec's names."""
        public = {t.public: given[t.name] for t in self.tensors}
        out = self.function(**public, **self._attrs(given, attrs))
        return out if isinstance(out, tuple) else (out,)

    def _attrs(self, given: Mapping[str, Any], attrs: Mapping[str, Any]) -> dict[str, Any]:
        return {self.op.named.get(n, n): v for n, v in attrs.items()}

    # -------------------------------------------------------------------------------- checks

    def forward(self, layout: str, attrs: Mapping[str, Any]) -> None:
        """Values, shape and dtype against the reference in float64, and against the op itself on contiguous copies."""
        if self.refused(layout, attrs):
            return
        given = self.inputs(layout)
        if self.reference is not None:
            expected = self._expected(given, attrs)
            for result, want in zip(self.call(given, attrs), expected, strict=True):
                assert result.dtype == want.dtype and result.shape == want.shape
                _close(result, want, "f64")
        plain = {n: v.contiguous() for n, v in given.items()}
        for result, again in zip(self.call(given, attrs), self.call(plain, attrs)):
            if self.op.elementwise:
                assert torch.equal(result.nan_to_num(7.0), again.nan_to_num(7.0)), "the layout changed a value"
            else:  # a sum in another order
                _close(result, again, "f64")

    def _expected(self, given: Mapping[str, Any], attrs: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        """The reference's outputs, computed on the CPU: some of torch's CUDA kernels hold constants in float32 for float64."""
        assert self.reference is not None
        own = {n: v.cpu() if isinstance(v, torch.Tensor) else v for n, v in given.items()}
        out = self.reference(**own, **self._reference_attrs(attrs))
        device = next(v.device for v in given.values() if isinstance(v, torch.Tensor))
        return tuple(o.to(device) for o in (out if isinstance(out, tuple) else (out,)))

    def _reference_attrs(self, attrs: Mapping[str, Any]) -> dict[str, Any]:
        assert self.reference is not None
        known = inspect.signature(self.reference).parameters
        return {k: v for k, v in attrs.items() if k in known}

    def dtype(self, dtype: str, attrs: Mapping[str, Any]) -> None:
        """Forward and gradients in one dtype, in every layout, against float64 on the same numbers."""
        for layout in self.layouts:
            if dtype not in FLOATS:
                self._integers(dtype, layout, attrs)
            else:
                self._floats(dtype, layout, attrs)

    def _integers(self, dtype: str, layout: str, attrs: Mapping[str, Any]) -> None:
        if dtype != "bool":
            attrs = {n: int(v) if isinstance(v, float) and math.isfinite(v) else v for n, v in attrs.items()}
        given = self.inputs(layout, dtype)
        results = self.call(given, attrs)
        if self.reference is not None:
            for result, want in zip(results, self._expected(given, attrs), strict=True):
                assert result.dtype == want.dtype and torch.equal(result, want), layout

    def _floats(self, dtype: str, layout: str, attrs: Mapping[str, Any]) -> None:
        low = self.inputs(layout, dtype)
        if not self.op.elementwise and set(self.op.residuals) & {t.name for t in self.op.outputs}:
            # The backward reads an output as it was stored: of eighths a sum is stored exactly.
            low = {n: ((v * 8).round() / 8).to(v.dtype) if v.is_floating_point() else v for n, v in low.items()}
        high = {n: v.double() if v.is_floating_point() else v for n, v in low.items()}
        ours, exact = (self._with_gradients(values, attrs, dtype) for values in (low, high))
        for (name, got), (_, want) in zip(ours.items(), exact.items()):
            if got.is_floating_point():
                assert got.dtype == TORCH[dtype], f"{name} is {got.dtype}"
                _close(got, want, dtype, not self.op.elementwise)
            else:
                assert torch.equal(got, want), (name, layout)

    def _differentiable(self, given: Mapping[str, Any]) -> list[str]:
        return [n for n in self.op.gradients if isinstance(given[n], torch.Tensor) and given[n].is_floating_point()]

    def _with_gradients(
        self, given: Mapping[str, Any], attrs: Mapping[str, Any], dtype: str = "f64"
    ) -> dict[str, torch.Tensor]:
        names = self._differentiable(given)
        leaves = {
            n: v.detach().requires_grad_(n in names) if isinstance(v, torch.Tensor) else v for n, v in given.items()
        }
        outputs = self.call(leaves, attrs)
        out = {f"output {k}": y.detach() for k, y in enumerate(outputs)}
        if names:
            seeds = [_seed(y, k).to(TORCH[dtype]).to(y.dtype) for k, y in enumerate(outputs)]
            grads = torch.autograd.grad(outputs, [leaves[n] for n in names], seeds)
            out |= {f"gradient of {n}": g for n, g in zip(names, grads)}
        return out

    def gradients(self, layout: str, attrs: Mapping[str, Any]) -> None:
        """Each gradient against central differences; upstream gradients random, sliced, and of stride 0."""
        if self.refused(layout, attrs):
            return
        given = self.inputs(layout)
        names = self._differentiable(given)
        leaves = {n: v.detach().requires_grad_(n in names) for n, v in given.items()}
        outputs = self.call(leaves, attrs)
        random = [_seed(y, k) for k, y in enumerate(outputs)]
        wide = [torch.stack([s, s], dim=-1)[..., 0] for s in random]  # every second element of its memory
        found = torch.autograd.grad(outputs, [leaves[n] for n in names], random, retain_graph=True)
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
        seeds: list[torch.Tensor],
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
        for k, seed in enumerate(seeds):
            wide = (8 * (steps[5e-5][k] - steps[-5e-5][k]) - (steps[1e-4][k] - steps[-1e-4][k])) / 6e-4
            tight = (8 * (steps[2.5e-5][k] - steps[-2.5e-5][k]) - (steps[5e-5][k] - steps[-5e-5][k])) / 3e-4
            total, size = total + seed * tight, size + (seed * tight).abs()
            lost = (wide - tight).abs() > 1e-3 * (1 + tight.abs())  # a kink or a pole within the step
            if not self.op.elementwise:  # at a tie each side has a derivative of its own, whatever the step
                up, down = steps[2.5e-5][k] - here[k], here[k] - steps[-2.5e-5][k]
                lost |= (up - down).abs() > 2.5e-5 * 0.05 * (1 + tight.abs())
            error = error + torch.where(lost, math.inf, (seed * (wide - tight)).abs())
        got = grad * direction
        if whole:
            got, want, size, error = (v.sum() for v in (got, total, size, error))
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
            given = self.inputs(layout)
            names = self._differentiable(given)
            whole = self._with_gradients(given, attrs)
            for count in range(1, len(names) + 1):
                for chosen in itertools.combinations(names, count):
                    leaves = {n: v.detach().requires_grad_(n in chosen) for n, v in given.items()}
                    outputs = self.call(leaves, attrs)
                    torch.autograd.backward(outputs, [_seed(y, k) for k, y in enumerate(outputs)])
                    for name in names:
                        assert (leaves[name].grad is not None) == (name in chosen)
                        if name in chosen:
                            _close(leaves[name].grad, whole[f"gradient of {name}"], "f64")

    def twice(self, attrs: Mapping[str, Any]) -> None:
        """A second derivative is refused, not silently wrong."""
        given = self.inputs("matrix")
        names = self._differentiable(given)
        leaves = {n: v.detach().requires_grad_(n in names) for n, v in given.items()}
        outputs = self.call(leaves, attrs)
        seeds = [_seed(y, k).requires_grad_() for k, y in enumerate(outputs)]
        grads = torch.autograd.grad(outputs, [leaves[n] for n in names], seeds, create_graph=True)
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

    def _instance(self) -> RuntimeOp:
        """The op with its defaults, and a number for what has none."""
        kinds = self.op.kinds
        values = self._all_attrs({}).items()
        whole = {n: {"int": -1, "dims": -1, "shape": 3}.get(str(kinds.get(n)), 0.5) for n, _ in values}
        return self.op(**{n: whole[n] if v is inspect.Parameter.empty else v for n, v in values})

    def _all_attrs(self, attrs: Mapping[str, Any]) -> dict[str, Any]:
        arguments = {t.public for t in self.tensors}
        own = {public: name for name, public in self.op.named.items()}
        parameters = inspect.signature(self.function).parameters
        defaults = {own.get(n, n): p.default for n, p in parameters.items() if n not in arguments}
        return {**defaults, **attrs}

    def parameters(self) -> None:
        """Each visit has the kernel's own name and its own value: sentinels show that none is swapped."""
        op = self._instance()
        views = {t.name: self._view(t, 1000 + 16 * k) for k, t in enumerate(self.tensors)}
        given = {n: Meta(v.dtype, v.shape, v.strides) for n, v in views.items()}
        plan = op.plan_forward(given)
        outputs = _laid_out_at(5000, plan.outputs)
        sides = [[views[t.name] for t in group] for group in (op.inputs, op.params, op.buffers)]
        scratch, named = _laid_out_at(9000, plan.scratch), views | dict(zip(plan.outputs, outputs))
        named |= dict(zip(plan.scratch, scratch))
        absent = [None] * len(plan.saved)
        for i, launch in enumerate(plan.launches):
            recorder, packed = Recorder(), PackedC()
            op.pack_args(i, *sides, outputs, absent, scratch, recorder)
            op.pack_args(i, *sides, outputs, absent, scratch, packed)
            _check_visits(launch, recorder, packed, {n: v.address for n, v in named.items()})
        if op.has_backward:
            self._backward_parameters(op, sides, outputs, named)

    def _backward_parameters(
        self, op: RuntimeOp, sides: list[list[TensorView]], outputs: list[TensorView], named: dict[str, TensorView]
    ) -> None:
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
        metas = {n: Meta(v.dtype, v.shape, v.strides) for n, v in named.items()}
        absent = [None] * len(op.saved)
        plan = op.plan_backward({**metas, **{t.name: None for t in op.saved}}, op.gradients, 132)
        scratch = _laid_out_at(9000, plan.scratch)
        named |= dict(zip(plan.scratch, scratch))
        for i, launch in enumerate(plan.launches):
            recorder, packed = Recorder(), PackedC()
            for visitor in (recorder, packed):
                op.pack_backward_args(i, *sides, outputs, absent, cotangents, *grads, scratch, visitor, 132)
            _check_visits(launch, recorder, packed, {n: v.address for n, v in named.items()})

    def _view(self, tensor: Tensor, address: int) -> TensorView:
        shape = self._shape(tensor, (4, 8))
        dtype = "f32" if any(d in FLOATS for d in tensor.dtypes) else tensor.dtypes[0]
        return TensorView(address, dtype, shape, dense_strides(shape))


def _laid_out_at(first: int, metas: Mapping[str, Meta]) -> list[TensorView]:
    """Views of made-up addresses, from the first on."""
    return [TensorView(first + 16 * k, m.dtype, m.shape, m.strides) for k, m in enumerate(metas.values())]


def _check_visits(launch: Any, recorder: Recorder, packed: PackedC, addresses: Mapping[str, int]) -> None:
    own = list(inspect.signature(launch.kernel.function.fn).parameters)
    expected = [p for p in launch.kernel.abi.params if p.role != "constexpr"]
    visited = list(dict.fromkeys(name.partition("[")[0] for _, name, _ in recorder.visits))
    assert visited == [p.name for p in expected] == [n for n in own if n not in launch.kernel.abi.constexprs]
    for kind, name, value in recorder.visits:
        if kind == "ptr" and value:
            assert addresses[launch.pointers[name]] == value, f"{name} has the address of another tensor"
            if launch.kernel.function.fn.__name__ != "sum_partials":
                assert name.removesuffix("_ptr").removesuffix("_sum") == launch.pointers[name].removesuffix("_parts")
    assert len(packed.buffer) == 8 * len(recorder.visits)


def _seed(y: torch.Tensor, k: int) -> torch.Tensor:
    return (torch.randn(y.shape, generator=torch.Generator().manual_seed(70 + k), dtype=torch.float64) + 0.25).to(
        y.device, y.dtype
    )


def _sum_to(value: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return value.sum_to_size(shape) if value.shape != shape else value


def _close(got: torch.Tensor, want: torch.Tensor, dtype: str, sums: bool = False) -> None:
    """Within the dtype's roundings; NaN with NaN, inf with inf. `sums`: of operands that were rounded when they were stored."""
    assert got.shape == want.shape
    if not got.is_floating_point():
        assert torch.equal(got, want)
        return
    a, b = got.double(), want.double()
    same = (a == b) | (a.isnan() & b.isnan()) | (a.isinf() & (b.abs() > 0.99 * torch.finfo(got.dtype).max))
    # In half precision the one rounding at the store counts; in the others what cancels inside, as large as the largest.
    scale = (
        b.abs()
        if dtype in ("f16", "bf16") and not sums
        else b.nan_to_num(0.0, 0.0, 0.0).abs().max() if b.numel() else b
    )
    near = (a - b).abs() <= ROUNDINGS[dtype] * EPS[dtype] * (1 + scale)
    if not (same | near).all():
        bad = ~(same | near)
        raise AssertionError(
            f"{int(bad.sum())} of {a.numel()} differ, first {a[bad][0].item()!r} from {b[bad][0].item()!r}"
        )
