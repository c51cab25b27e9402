"""How the emitted tests check an op: forward, dtypes, layouts, and that arguments reach the kernels by their names.

Runs on a GPU, or on a CPU in Triton's interpreter. `testing_gradients` has what is checked of a backward beside it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from .abi import PackedC, Recorder
from .layout import names, parse_dims
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
    return torch.tensor(value, dtype=dtype)


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
        self.whole = next((t for t in self.tensors if {self.placed, "..."} <= names(t.dims)), None)
        """The tensor that has both the axis or pack that `dim` places and those around it."""

    def combinations(self, attrs: Sequence[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
        """Layouts with attrs to run them with: some layouts with all of them, each other with one in turn.

        The steps of a fused op broadcast by NumPy's rules: what has the placed axis alone lies along it only where `dim` is as
        it was recorded.
        """
        if self.op.fuses and any(self.placed in names(t.dims) and "..." not in names(t.dims) for t in self.tensors):
            recorded = self._instance().axis_position()
            attrs = [a for a in attrs if (self._instance(a).axis_position() or ())[:2] == (recorded or ())[:2]]
        out: list[tuple[str, Mapping[str, Any]]] = []
        for k, layout in enumerate(self.layouts):
            whole = len(attrs) <= 2 or layout in _THOROUGH
            out += [(layout, a) for a in (attrs if whole else (attrs[k % len(attrs)],))]
        return out

    # -------------------------------------------------------------------------------- inputs

    def _shape(self, tensor: Tensor, pack: tuple[int, ...], attrs: Mapping[str, Any]) -> tuple[int, ...]:
        parts = self._parts(tensor, pack, attrs)
        shape: list[int] = []
        for dim in parse_dims(tensor.dims):
            if dim.axes[0] in parts:
                shape += parts[dim.axes[0]]
            elif dim.pack and (dim.axes[0] == "..." or dim.axes[0] != self.placed):
                shape += pack if dim.axes[0] == "..." else (3,)
            elif not dim.pack:
                shape.append(math.prod(f or 3 for f in dim.fixed))
        return tuple(shape)  # a pack that `dim` places is a part of `...`

    def _parts(self, tensor: Tensor, pack: tuple[int, ...], attrs: Mapping[str, Any]) -> dict[str, list[int]]:
        """The extents of a tensor that has only what `dim` places, or only what is around it: which they are, `dim` says."""
        own = {self.placed, "..."} & names(tensor.dims)
        if self.whole is None or len(own) != 1:
            return {}
        shape = self._shape(self.whole, pack, attrs)
        meta = Meta.dense("f64", shape)
        bound = self._instance(attrs).bind([self.whole], {self.whole.name: meta})[self.whole.name]
        return {axis: [n for (a, _), n in sorted(bound.extents.items()) if a == axis] for axis in own}

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

    def inputs(self, layout: str, dtype: str = "", attrs: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
        """Arguments by the spec's names, in a layout; `attrs` are those of the call, where they are not the defaults."""
        dtype = dtype or self.usual
        out = {}
        for k, tensor in enumerate(self.tensors):
            out[tensor.name] = self._laid_out(tensor, k, layout, dtype, attrs)
        return out

    def _laid_out(self, tensor: Tensor, k: int, layout: str, dtype: str, attrs: Mapping[str, Any]) -> torch.Tensor:
        if layout in _SHAPES:
            # Rows have other axes beside: an interpreter takes its time for each program.
            pack = tuple(n if self.op.elementwise else min(n, 129) for n in _SHAPES[layout])
            return self._values(tensor, self._shape(tensor, pack, attrs), dtype, k)
        if layout in _BROADCASTS:
            return self._values(tensor, self._shape(tensor, self._stretched(tensor, k, layout), attrs), dtype, k)
        crossed = layout == "crossed"
        pack = (6, 5) if not crossed else (40, 37) if self.op.elementwise else (9, 8)
        shape = self._shape(tensor, pack, attrs)
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
            self.call(self.inputs(layout, attrs=attrs), attrs)
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
        given = self.inputs(layout, attrs=attrs)
        if self.reference is not None:
            expected = self._expected(given, attrs)
            for result, want in zip(self.call(given, attrs), expected, strict=True):
                assert result.dtype == want.dtype and result.shape == want.shape
                _close(result, want, _precision(result))
        plain = {n: v.contiguous() for n, v in given.items()}
        for result, again in zip(self.call(given, attrs), self.call(plain, attrs)):
            if self.op.elementwise:
                assert torch.equal(result.nan_to_num(7.0), again.nan_to_num(7.0)), "the layout changed a value"
            else:  # a sum in another order
                _close(result, again, _precision(result))

    def _expected(self, given: Mapping[str, Any], attrs: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        """The reference's outputs, computed on the CPU: some of torch's CUDA kernels hold constants in float32 for float64."""
        assert self.reference is not None
        own = {n: v.cpu() if isinstance(v, torch.Tensor) else v for n, v in given.items()}
        out = self.reference(**own, **self._reference_attrs(attrs))
        tensors = [v for v in given.values() if isinstance(v, torch.Tensor)]
        ours = tuple(o.to(tensors[0].device) for o in (out if isinstance(out, tuple) else (out,)))
        if any(v.is_floating_point() for v in tensors):
            return ours
        return tuple(
            o.float() if o.is_floating_point() else o for o in ours
        )  # functions of a formula lift ints to float64

    def _reference_attrs(self, attrs: Mapping[str, Any]) -> dict[str, Any]:
        assert self.reference is not None
        known, values = inspect.signature(self.reference).parameters, self._instance(attrs).attrs
        own = {
            n: v for n, v in values.items() if n in known and n not in attrs and self._all_attrs({}).get(n, v) is None
        }
        return {**own, **{k: v for k, v in attrs.items() if k in known}}

    def dtype(self, dtype: str, attrs: Mapping[str, Any]) -> None:
        """What is computed in one dtype, in every layout, against float64 on the same numbers."""
        for layout in self.layouts:
            if dtype not in FLOATS:
                self._integers(dtype, layout, attrs)
            else:
                self._floats(dtype, layout, attrs)

    def _integers(self, dtype: str, layout: str, attrs: Mapping[str, Any]) -> None:
        if dtype != "bool" and not self.op.floats_of_ints:
            attrs = {n: int(v) if isinstance(v, float) and math.isfinite(v) else v for n, v in attrs.items()}
        given = self.inputs(layout, dtype, attrs)
        results = self.call(given, attrs)
        if self.reference is not None:
            for result, want in zip(results, self._expected(given, attrs), strict=True):
                assert result.dtype == want.dtype, layout
                _close(result, want, _precision(result))

    def _floats(self, dtype: str, layout: str, attrs: Mapping[str, Any]) -> None:
        low = self._stored_exactly(self.inputs(layout, dtype, attrs))
        high = {n: v.double() if v.is_floating_point() else v for n, v in low.items()}
        ours, exact = (self._results(values, attrs, dtype) for values in (low, high))
        for (name, got), (_, want) in zip(ours.items(), exact.items()):
            if got.is_floating_point():
                assert got.dtype == TORCH[dtype], f"{name} is {got.dtype}"
                _close(got, want, dtype, not self.op.elementwise)
            else:
                assert torch.equal(got, want), (name, layout)

    def _stored_exactly(self, given: dict[str, Any]) -> dict[str, Any]:
        """Arguments of which results are stored as they are computed, where another kernel reads them again."""
        return given

    def _results(
        self, given: Mapping[str, Any], attrs: Mapping[str, Any], dtype: str = "f64"
    ) -> dict[str, torch.Tensor]:
        """All that is computed of these arguments, by what it is."""
        return {f"output {k}": y.detach() for k, y in enumerate(self.call(given, attrs))}

    def _instance(self, attrs: Mapping[str, Any] = MappingProxyType({})) -> RuntimeOp:
        """The op with these attrs, else its defaults, and a number for what has none."""
        kinds = self.op.kinds
        values = self._all_attrs(attrs).items()
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
        self._visited()

    def _visited(self) -> tuple[RuntimeOp, list[list[TensorView]], list[TensorView], dict[str, TensorView]]:
        """Checks the visits of every forward launch; the op, and views at made-up addresses: arguments, outputs, all by name."""
        op = self._instance()
        views = {t.name: self._view(t, 1000 + 16 * k) for k, t in enumerate(self.tensors)}
        given = {n: Meta(v.dtype, v.shape, v.strides) for n, v in views.items()}
        plan = op.plan_forward(given)
        outputs = laid_out_at(5000, plan.outputs)
        sides = [[views[t.name] for t in group] for group in (op.inputs, op.params, op.buffers)]
        scratch, named = laid_out_at(9000, plan.scratch), views | dict(zip(plan.outputs, outputs))
        named |= dict(zip(plan.scratch, scratch))
        absent = [None] * len(plan.saved)
        for i, launch in enumerate(plan.launches):
            recorder, packed = Recorder(), PackedC()
            op.pack_args(i, *sides, outputs, absent, scratch, recorder)
            op.pack_args(i, *sides, outputs, absent, scratch, packed)
            check_visits(launch, recorder, packed, {n: v.address for n, v in named.items()})
        return op, sides, outputs, named

    def _view(self, tensor: Tensor, address: int) -> TensorView:
        shape = self._shape(tensor, (4, 8), {})
        dtype = "f32" if any(d in FLOATS for d in tensor.dtypes) else tensor.dtypes[0]
        return TensorView(address, dtype, shape, dense_strides(shape))


def laid_out_at(first: int, metas: Mapping[str, Meta]) -> list[TensorView]:
    """Views of made-up addresses, from the first on."""
    return [TensorView(first + 16 * k, m.dtype, m.shape, m.strides) for k, m in enumerate(metas.values())]


def check_visits(launch: Any, recorder: Recorder, packed: PackedC, addresses: Mapping[str, int]) -> None:
    """The visits are those of the kernel, in its order, and no address is that of another tensor."""
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


def _precision(result: torch.Tensor) -> str:
    """Of a result of operands without rounding: f64, or f32 where floats are computed of ints."""
    return "f64" if result.dtype != torch.float32 else "f32"


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
