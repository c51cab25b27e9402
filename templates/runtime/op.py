"""`RuntimeOp`: the contract between an op and whatever launches it. No torch here.

An instance holds the op's attrs and choices. From the shapes, strides and dtypes of a call it plans what to allocate and
launch; `pack_args` hands a launch's arguments to an `ArgVisitor` by the kernel's own names.

    op = Softcap(cap=30.0)
    plan = op.plan_forward({"x": Meta("bf16", (4, 8), (8, 1))})
    plan.outputs["y"]                  # Meta("bf16", (4, 8), (8, 1))
    plan.launches[0].grid              # (1, 1, 1)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from . import layout
from .abi import ArgVisitor, KernelAbi
from .layout import Axis, Operand, ShapeError, Space
from .views import FLOATS, INTS, ITEM_SIZES, TensorView, dense_strides, promote

BLOCK = 1024
WARPS = 4
_WIDE = 2**31
_CLASSES = {
    "float": FLOATS,
    "int": INTS,
    "bool": ("bool",),
    "number": FLOATS + INTS,
    "integral": (*INTS, "bool"),
    "any": (*FLOATS, *INTS, "bool"),
    "compute": FLOATS,
}


class TooManyDims(ShapeError):
    """More merged dims than a kernel takes: the caller copies the operands that are not dense."""


@dataclass(frozen=True)
class Tensor:
    """A declared tensor. `dims` in the spec's spelling, `dtype` a class or one dtype."""

    name: str
    dims: str
    dtype: str = "float"
    broadcast: bool | None = None
    """Whether a dim may have extent 1, and `...` fewer axes. Where it is not said: if the dims are `...` alone."""
    scalar: bool = False
    optional: bool = False
    arg: str = ""
    differentiable: bool = True

    def __post_init__(self) -> None:
        if self.broadcast is None:
            object.__setattr__(self, "broadcast", self.dims == "...")

    @property
    def dtypes(self) -> tuple[str, ...]:
        return _CLASSES.get(self.dtype, (self.dtype,))

    @property
    def public(self) -> str:
        return self.arg or self.name


@dataclass(frozen=True)
class Meta:
    """What a plan knows of a tensor: dtype, shape, strides in elements. A Python number is a `float` or an `int`."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


Given = Meta | float | int | None


@dataclass(frozen=True)
class Kernel:
    """A jit function and its parameters."""

    function: Any
    abi: KernelAbi

    @staticmethod
    def of(function: Any) -> Kernel:
        return Kernel(function, KernelAbi.of(function))


@dataclass(frozen=True)
class Launch:
    """One kernel launch. `pointers` maps pointer parameters to names of tensors or scratch; `values` has the rest."""

    kernel: Kernel
    grid: tuple[int, int, int]
    pointers: Mapping[str, str]
    values: Mapping[str, Any]
    warps: int = WARPS

    def arguments(self, tensors: Mapping[str, Any], numbers: Mapping[str, float]) -> dict[str, Any]:
        """Every argument by parameter name, pointers looked up in `tensors` (absent: None)."""
        named = {p: tensors.get(name) for p, name in self.pointers.items()}
        absent = {p.name: None for p in self.kernel.abi.params if p.role == "ptr"}
        return {**absent, **numbers, **self.values, **named}


@dataclass(frozen=True)
class Plan:
    """What one call allocates and launches, in order."""

    outputs: Mapping[str, Meta]
    scratch: Mapping[str, Meta] = field(default_factory=dict)
    launches: tuple[Launch, ...] = ()
    compute: str = "f32"
    zeros: tuple[str, ...] = ()
    """Outputs that nothing is summed into: filled with zeros."""
    saved: Mapping[str, Meta] = field(default_factory=dict)
    """What the forward allocates and writes beside its outputs for the backward, where a gradient is wanted."""


class RuntimeOp:
    """What every generated op is. Subclasses state their tensors, attrs and kernels."""

    name: ClassVar[str]
    inputs: ClassVar[tuple[Tensor, ...]] = ()
    params: ClassVar[tuple[Tensor, ...]] = ()
    buffers: ClassVar[tuple[Tensor, ...]] = ()
    outputs: ClassVar[tuple[Tensor, ...]] = ()
    saved: ClassVar[tuple[Tensor, ...]] = ()
    """Statistics that the forward writes for the backward alone."""
    residuals: ClassVar[tuple[str, ...]] = ()
    """Inputs, params, outputs and statistics that the backward kernels read."""
    gradients: ClassVar[tuple[str, ...]] = ()
    """Inputs and params that have a gradient, in the spec's order."""
    equals: ClassVar[Mapping[str, str]] = {}
    """Gradients that are the gradient of another tensor where the two tensors have one shape and dtype: written once."""
    elementwise: ClassVar[bool] = True
    """Whether an element of a gradient comes of one element of each cotangent."""
    needs_elements: ClassVar[bool] = False
    """Whether there must be something to reduce, as for a maximum."""
    kinds: ClassVar[Mapping[str, str | tuple[str, ...]]] = {}
    """What each attr is: float, int or bool, with `?` where it may be None and `*2` for a pair; or its choices."""

    sized: ClassVar[Mapping[str, str]] = {}
    """Axes and packs whose extents an attr gives, with its name."""

    named: ClassVar[Mapping[str, str]] = {}
    """Public names of attrs, where they are not their own."""

    _plans: ClassVar[dict[Any, Plan]]

    def __init__(self, /, **attrs: Any) -> None:
        self.attrs = {n: _repeated(_plain(v), self.kinds.get(n, "")) for n, v in attrs.items()}

    def __init_subclass__(cls) -> None:
        cls._plans = {}

    # -------------------------------------------------------------------------------- what subclasses give

    def scalars(self) -> dict[str, float]:
        """Run-time numbers of the kernels, in float64, by parameter name: the attrs, unless a subclass adds to them."""
        return {n: float(v or 0) for n, v in self.attrs.items() if v is None or isinstance(v, (int, float))}

    def choices(self) -> dict[str, Any]:
        """Compile-time constants of the kernels, by parameter name."""
        return {n: self.attrs[n] for n, kind in self.kinds.items() if isinstance(kind, tuple)}

    def require(self) -> None:
        """Raises TypeError where an attr is of another kind, ValueError where it is not among its choices."""
        for name, kind in self.kinds.items():
            value = self.attrs[name]
            name = self.named.get(name, name)
            if isinstance(kind, tuple):
                if value not in kind:
                    raise ValueError(f"{self.name}: `{name}` is {value!r}; choices: {', '.join(kind)}")
            elif not _is_kind(value, kind):
                raise TypeError(
                    f"{self.name}: `{name}` is {value!r:.40}; it takes {_KINDS[kind.partition('*')[0].rstrip('?')]}"
                )

    def passes(self) -> dict[str, str]:
        """Gradients that are a cotangent as it is, with its name: nothing is launched for them where shapes agree."""
        return {}

    def axis_position(self) -> tuple[str, int | tuple[int, ...] | None, bool] | None:
        """The axis or pack that an attr places, where (None: everywhere), and whether extents of 1 stay where it was reduced."""
        return None

    # -------------------------------------------------------------------------------- planning

    def plan_forward(self, given: Mapping[str, Given]) -> Plan:
        raise TypeError(f"{self.name}: no kernel")

    def plan_backward(self, given: Mapping[str, Given], needed: Sequence[str], multiprocessors: int) -> Plan:
        raise TypeError(f"{self.name} has no backward: its spec says `not_differentiable`")

    def numbers(self, given: Mapping[str, Any]) -> dict[str, float]:
        """The run-time numbers of a call: the scalars, and the Python numbers given for tensors."""
        taken = {f"{t.name}_number": v for t in self.tensors if t.scalar for v in (given.get(t.name),)}
        try:
            own = {n: float(v) for n, v in self.scalars().items()}  # an int of 1 would become a constant of the kernel
            return {**own, **{n: float(v) if isinstance(v, (int, float)) else 0.0 for n, v in taken.items()}}
        except OverflowError:
            raise ValueError(f"{self.name}: a number is beyond the range of float64") from None

    def _remember(self, key: Any, plan: Plan) -> Plan:
        """Plans are kept by everything they depend on; values of numbers are not among it."""
        if len(self._plans) >= 4096:
            self._plans.clear()
        self._plans[key] = plan
        return plan

    def _key(self, direction: str, given: Mapping[str, Given], *more: Any) -> Any:
        metas = tuple((n, type(v) if isinstance(v, (int, float)) else v) for n, v in given.items())
        sized = tuple(self.attrs[n] for n in self.sized.values())
        return (direction, metas, tuple(self.choices().items()), self.axis_position(), sized, *more)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.inputs + self.params + self.buffers

    @property
    def n_activation_inputs(self) -> int:
        return len(self.inputs)

    @property
    def param_names(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.params)

    @property
    def has_backward(self) -> bool:
        return bool(self.gradients)

    def output_shapes(self, given: Mapping[str, Given]) -> tuple[tuple[int, ...], ...]:
        return tuple(m.shape for m in self.plan_forward(given).outputs.values())

    def residual_shapes(self, given: Mapping[str, Given]) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors that the backward reads again; nothing else is kept."""
        plan = self.plan_forward(given)
        kept = {n: {**given, **plan.outputs, **plan.saved}.get(n) for n in self.residuals}
        return {n: m.shape for n, m in kept.items() if isinstance(m, Meta)}

    def pack_args(self, i: int, inputs: Sequence[TensorView | float | None], params: Sequence[TensorView | None],
                  buffers: Sequence[TensorView | None], outputs: Sequence[TensorView], residuals: Sequence[TensorView],
                  scratch: Sequence[TensorView], visitor: ArgVisitor) -> None:  # fmt: skip
        """Visits the arguments of forward launch `i`, each under the kernel parameter's name."""
        views = dict(zip((t.name for t in self.tensors), (*inputs, *params, *buffers)))
        plan = self.plan_forward({n: _meta(v) for n, v in views.items()})
        views |= dict(zip(plan.outputs, outputs)) | dict(zip(plan.scratch, scratch)) | dict(zip(plan.saved, residuals))
        self._visit(plan, i, views, visitor)

    def pack_backward_args(self, i: int, inputs: Sequence[TensorView | float | None], params: Sequence[TensorView | None],
                           buffers: Sequence[TensorView | None], outputs: Sequence[TensorView], residuals: Sequence[TensorView],
                           grad_outputs: Sequence[TensorView | None], grad_inputs: Sequence[TensorView | None],
                           grad_params: Sequence[TensorView | None], scratch: Sequence[TensorView], visitor: ArgVisitor,
                           multiprocessors: int = 132) -> None:  # fmt: skip
        """Visits the arguments of backward launch `i`; a gradient that is not needed is None."""
        views: dict[str, Any] = dict(zip((t.name for t in self.tensors), (*inputs, *params, *buffers)))
        views |= dict(zip((t.name for t in self.outputs), outputs))
        views |= dict(zip((t.name for t in self.saved), residuals))
        views |= dict(zip((f"d{t.name}" for t in self.outputs), grad_outputs))
        grads = dict(zip((t.name for t in self.inputs + self.params), (*grad_inputs, *grad_params)))
        needed = tuple(n for n in self.gradients if grads.get(n) is not None)
        plan = self.plan_backward({n: _meta(v) for n, v in views.items()}, needed, multiprocessors)
        views |= {f"d{n}": v for n, v in grads.items()} | dict(zip(plan.scratch, scratch))
        self._visit(plan, i, views, visitor)

    def _visit(self, plan: Plan, i: int, views: Mapping[str, Any], visitor: ArgVisitor) -> None:
        launch = plan.launches[i]
        tensors = {n: v for n, v in views.items() if isinstance(v, TensorView)}
        launch.kernel.abi.visit(launch.arguments(tensors, self.numbers(views)), visitor)


def _plain(value: Any) -> Any:
    """A scalar of NumPy as Python's number."""
    return value.item() if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0 else value


def _repeated(value: Any, kind: str | tuple[str, ...]) -> Any:
    """A number given for a tuple stands for each of its items."""
    if isinstance(value, list) or (kind == "shape" and isinstance(value, tuple)):
        value = tuple(value)  # torch.Size too
    if not isinstance(kind, str) or "*" not in kind or value is None:
        return value
    return (value,) * int(kind.rstrip("?").partition("*")[2]) if isinstance(value, (int, float)) else tuple(value)


_KINDS = {
    "float": "a number",
    "int": "a whole number",
    "bool": "True or False",
    "dims": "a whole number or a tuple of them",
    "shape": "an extent or a tuple of them",
}


def _is_kind(value: Any, kind: str) -> bool:
    if value is None:
        return kind.endswith("?")
    base, _, count = kind.rstrip("?").partition("*")
    if base in ("dims", "shape"):
        return all(_is_kind(v, "int") for v in (value if isinstance(value, tuple) else (value,)))
    if isinstance(value, (tuple, list)):
        return bool(count) and len(value) == int(count) and all(_is_kind(v, base) for v in value)
    if base == "bool" or isinstance(value, bool):
        return base == "bool" and isinstance(value, bool)
    return isinstance(value, int) or (base == "float" and isinstance(value, float))


def _extents_of(value: Any) -> tuple[int, ...]:
    return value if isinstance(value, tuple) else (value,)


def _category(dtype: str) -> int:
    """torch's order of kinds: nothing, bool, int, float."""
    return 3 if dtype in FLOATS else 2 if dtype in INTS else 1 if dtype else 0


def _meta(view: Any) -> Given:
    return Meta(view.dtype, view.shape, view.strides) if isinstance(view, TensorView) else view


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


class PointwiseOp(RuntimeOp):
    """An op whose outputs are computed element by element, with gradients that may be summed over broadcast axes."""

    forward: ClassVar[Kernel]
    backward: ClassVar[Kernel | None] = None
    sliced: ClassVar[tuple[str, ...]] = ()
    """Axes of fixed extent that a kernel reads and writes part by part."""

    def plan_forward(self, given: Mapping[str, Given]) -> Plan:
        """Outputs to allocate and the launch. Raises TypeError or ValueError naming op and argument."""
        key = self._key("forward", given)
        found = self._plans.get(key)
        if found is None:
            self._check_dtypes(given)
            found = self._remember(key, self._plan_forward(given))
        if found.compute in INTS:
            self._check_integral(found.compute, given)
        return found

    def plan_backward(self, given: Mapping[str, Given], needed: Sequence[str], multiprocessors: int) -> Plan:
        """Gradients to allocate, scratch and launches. `given` has the cotangents as `d<output>`."""
        if self.backward is None:
            return super().plan_backward(given, needed, multiprocessors)
        key = self._key("backward", given, tuple(needed), multiprocessors)
        found = self._plans.get(key)
        if found is None:
            found = self._remember(key, self._plan_backward(given, needed, multiprocessors))
        return found

    # -------------------------------------------------------------------------------- dtypes

    def _check_dtypes(self, given: Mapping[str, Given]) -> None:
        for tensor in self.tensors:
            value = given.get(tensor.name)
            if value is None and not tensor.optional:
                raise TypeError(f"{self.name}: `{tensor.public}` is missing")
            if isinstance(value, (int, float)) and not tensor.scalar:
                raise TypeError(f"{self.name}: `{tensor.public}` is a number; it takes a tensor")
            if isinstance(value, float) and not set(tensor.dtypes) & {*FLOATS}:
                raise TypeError(f"{self.name}: `{tensor.public}` is {value}; it takes whole numbers")
            if isinstance(value, Meta) and value.dtype not in tensor.dtypes:
                raise TypeError(f"{self.name}: `{tensor.public}` is {value.dtype}; it takes {', '.join(tensor.dtypes)}")

    def _result_dtype(self, given: Mapping[str, Given], voters: Sequence[Tensor]) -> str:
        """torch's promotion: tensors with dims, then 0-d tensors, then numbers, each only by a higher category.

        Masks, and tensors of one declared dtype, have no vote; of class `int` only where there is nothing else.
        """
        voters = [t for t in voters if t.dtype not in ("bool", *INTS)]
        voters = [t for t in voters if t.dtype != "int"] or voters
        metas = [m for t in voters if isinstance(m := given.get(t.name), Meta)]
        numbers = [v for t in voters if isinstance(v := given.get(t.name), (int, float))]
        result = ""
        for group in ([m.dtype for m in metas if m.shape], [m.dtype for m in metas if not m.shape]):
            candidate = promote(tuple(group)) if group else ""
            if candidate and _category(candidate) > _category(result):
                result = candidate
        if _category(result) < 3 and any(isinstance(v, float) for v in numbers):
            return "f32"
        if _category(result) < 2 and numbers:
            return "i64"
        return result or ("f32" if any(isinstance(v, float) for v in numbers) else "i64")

    def _compute_dtype(self, given: Mapping[str, Given]) -> str:
        result = self._result_dtype(given, self.tensors)
        if result in (*INTS, "bool"):
            return result
        wide = any(isinstance(m, Meta) and m.dtype == "f64" for m in given.values())
        return "f64" if wide else "f32"

    def _check_integral(self, compute: str, given: Mapping[str, Given]) -> None:
        """In integers a number must be whole, and exact in the float64 that carries it: nothing is rounded in silence."""
        public = {t.name: t.public for t in self.tensors}
        numbers = [
            *((self.named.get(n, n), v) for n, v in self.attrs.items()),
            *((public[n], v) for n, v in given.items() if n in public),
        ]
        most = 2**31 if compute == "i32" else 2**53
        for name, value in numbers:
            if isinstance(value, (int, float)) and not float(value).is_integer():
                raise TypeError(f"{self.name}: `{name}` is {value}; for integer tensors it must be whole")
            if isinstance(value, (int, float)) and not -most <= value <= most - (most == 2**31):
                raise ValueError(
                    f"{self.name}: `{name}` is {value}; with {compute} tensors a number lies within 2**{31 if most == 2**31 else 53}"
                )

    def _output_dtype(self, tensor: Tensor, given: Mapping[str, Given], compute: str) -> str:
        if tensor.dtype in ("float", "number", "integral", "any"):
            return self._result_dtype(given, self.inputs)
        if tensor.dtype == "int" and any(t.dtype == "int" for t in self.inputs):
            return self._result_dtype(given, [t for t in self.inputs if t.dtype == "int"])
        return compute if tensor.dtype == "compute" else {"int": "i64"}.get(tensor.dtype, tensor.dtype)

    # -------------------------------------------------------------------------------- shapes

    def _places(self, rank: int) -> tuple[int, ...]:
        """The dims that the placed axis or pack has in a tensor of this rank, in order."""
        placed = self.axis_position()
        assert placed is not None
        given = placed[1]
        if given is None or given == ():
            return tuple(range(rank))
        out = []
        for dim in given if isinstance(given, tuple) else (given,):
            if not -max(rank, 1) <= dim < max(rank, 1):
                raise IndexError(f"{self.name}: `dim` is {dim}, out of range for {rank} dims")
            if dim % max(rank, 1) in out:
                raise ValueError(f"{self.name}: `dim` names {dim % rank} twice")
            out.append(dim % max(rank, 1))
        return tuple(sorted(out)) if rank else ()

    def _moves(self, tensor: Tensor) -> str:
        """What the placed axis does to a tensor: `moved` where it has it, `kept` where extents of 1 stand for it, or nothing."""
        placed = self.axis_position()
        if placed is None or "..." not in [d.strip() for d in tensor.dims.split(",")]:
            return ""
        if any(placed[0] in d.axes for d in layout.parse_dims(tensor.dims)):
            return "moved"
        own = {t.name for t in self.outputs} | {f"d{t.name}" for t in self.outputs}
        return "kept" if placed[2] and tensor.name in own else ""

    def _declared(self, tensor: Tensor, meta: Meta) -> Meta:
        """The tensor with its placed axis moved to where the spec has it."""
        how, rank = self._moves(tensor), len(meta.shape)
        if not how:
            return meta
        order = self._order(tensor, rank, how == "moved")
        return Meta(meta.dtype, tuple(meta.shape[k] for k in order), tuple(meta.strides[k] for k in order))

    def _order(self, tensor: Tensor, rank: int, moved: bool) -> list[int]:
        """The caller's dims in the order of the declaration; without those that are placed where they are not `moved`."""
        places = self._places(rank)
        order = [k for k in range(rank) if k not in places]
        placed = self.axis_position()
        if moved and placed is not None:
            dims = layout.parse_dims(tensor.dims)
            behind = len(dims) - 1 - next(k for k, d in enumerate(dims) if placed[0] in d.axes)
            order[len(order) - behind : len(order) - behind] = places
        return order

    def _placed(self, tensor: Tensor, meta: Meta, reduced: int = 0) -> Meta:
        """The inverse of `_declared`, for a tensor that is allocated; `reduced` dims were reduced."""
        how, rank = self._moves(tensor), len(meta.shape)
        if not how:
            return meta
        if how == "kept":
            places = self._places(rank + reduced)
            own = iter(zip(meta.shape, meta.strides))
            pairs = [(1, 1) if k in places else next(own) for k in range(rank + reduced)]
            return Meta(meta.dtype, tuple(n for n, _ in pairs), tuple(s for _, s in pairs))
        order = self._order(tensor, rank, True)
        back = [order.index(k) for k in range(rank)]
        return Meta(meta.dtype, tuple(meta.shape[k] for k in back), tuple(meta.strides[k] for k in back))

    def _ranks(self, given: Mapping[str, Given]) -> dict[str, int]:
        """How many dims the packs have that the caller counts: those whose extents it gives, and the one that `dim` places."""
        out = {axis: len(_extents_of(self.attrs[attr])) for axis, attr in self.sized.items()}
        placed = self.axis_position()
        for tensor in self.tensors if placed is not None else ():
            meta = given.get(tensor.name)
            if self._moves(tensor) == "moved" and isinstance(meta, Meta) and placed is not None:
                out[placed[0]] = len(self._places(len(meta.shape)))
        return out

    def _check_sizes(self, operands: Mapping[str, Operand], tensors: Sequence[Tensor]) -> None:
        """The extents that attrs give are those of the tensors."""
        for axis, attr in self.sized.items():
            wanted = _extents_of(self.attrs[attr])
            for tensor in tensors:
                operand = operands.get(tensor.name)
                own = (
                    [] if operand is None else sorted((a for a in operand.extents if a[0] == axis), key=lambda a: a[1])
                )
                found = tuple(operand.extents[a] for a in own) if operand is not None else ()
                if own and found != wanted:
                    raise ShapeError(
                        f"{self.name}: `{self.named.get(attr, attr)}` is {wanted}, `{tensor.public}` has {found} there"
                    )

    def _bind(self, tensors: Sequence[Tensor], given: Mapping[str, Given]) -> dict[str, Operand]:
        known = {
            axis: extent
            for tensor in (*self.tensors, *self.outputs)
            for dim in layout.parse_dims(tensor.dims)
            for axis, extent in zip(dim.axes, dim.fixed)
            if extent
        }
        out = {}
        ranks = self._ranks(given)
        for tensor in tensors:
            meta = given.get(tensor.name)
            if isinstance(meta, Meta):
                meta = self._declared(tensor, meta)
                try:
                    out[tensor.name] = layout.bind(
                        tensor.public, layout.parse_dims(tensor.dims), meta.shape, meta.strides, known, ranks
                    )
                except ShapeError as error:
                    raise ShapeError(f"{self.name}: {error}") from None
        self._check_sizes(out, tensors)
        return out

    def _extents(self, operands: Mapping[str, Operand], tensors: Sequence[Tensor]) -> dict[Axis, int]:
        stretching = frozenset(t.public for t in tensors if t.broadcast)
        try:
            return layout.broadcast(list(operands.values()), stretching)
        except ShapeError as error:
            raise ShapeError(f"{self.name}: {error}") from None

    def _axes(self, extents: Mapping[Axis, int]) -> list[Axis]:
        """The axes to run over, in the order of the first output, then what it lacks."""
        out: list[Axis] = []
        for dim in layout.parse_dims(self.outputs[0].dims):
            for name in dim.axes:
                out += sorted((a for a in extents if a[0] == name), key=lambda a: a[1])
        out += [a for a in extents if a not in out]
        return [a for a in out if a[0] not in self.sliced]

    def _allocated(self, tensor: Tensor, dtype: str, extents: Mapping[Axis, int], space: Space) -> Meta:
        """A new tensor: dense in the order of iteration, or contiguous where it is written part by part."""
        dims = layout.parse_dims(tensor.dims)
        shape: list[int] = []
        strides: list[int] = []
        linear = space.linear()
        for dim in dims:
            axes = (
                sorted((a for a in extents if a[0] == dim.axes[0]), key=lambda a: a[1])
                if dim.pack
                else [(n, 0) for n in dim.axes]
            )
            if dim.pack:
                shape += [extents[a] for a in axes]
                strides += [linear[a] for a in axes]
            else:
                shape.append(math.prod(extents.get(a, dim.fixed[k]) for k, a in enumerate(axes)))
                strides.append(linear.get(axes[-1], 1))
        whole = tuple(shape)
        sliced = any(n in self.sliced for d in dims for n in d.axes)
        placed = self.axis_position()
        reduced = sum(a[0] == placed[0] for a in extents) if placed else 0
        return self._placed(tensor, Meta(dtype, whole, dense_strides(whole) if sliced else tuple(strides)), reduced)

    # -------------------------------------------------------------------------------- launches

    def _common(self, kernel: Kernel, operands: Mapping[str, Operand], space: Space, compute: str, written: Mapping[str, Operand],
                stored: Iterable[str]) -> dict[str, Any]:  # fmt: skip
        """The values of every parameter but pointers: sizes, strides, scalars, choices. `stored`: the dtypes of what is written."""
        import triton.language as tl

        dtypes = {"f32": tl.float32, "f64": tl.float64, "i32": tl.int32, "i64": tl.int64, "bool": tl.int1}
        values: dict[str, Any] = {
            "n": space.count,
            "COMPUTE": dtypes[compute],
            "sizes": None,
            "patch_sizes": None,
            **self.choices(),
        }
        reach = space.count
        for param in kernel.abi.params:
            name, _, kind = param.name.rpartition("_")
            operand = operands.get(name) or written.get(name)
            if kind == "strides":
                strides = None if operand is None or self._dense(operand, space) else space.strides(operand)
                values[param.name] = strides
                if strides is not None:
                    if len(space.dims) > layout.RANK:
                        raise TooManyDims(
                            f"{self.name}: {len(space.dims)} dims that do not merge; a kernel takes {layout.RANK}"
                        )
                    values["sizes"] = layout.divisors(space.sizes)
                    reach = max(reach, 1 + sum((n - 1) * abs(s) for n, s in zip(space.sizes, strides)))
            elif "_stride_" in param.name:
                tensor, _, axis = param.name.partition("_stride_")
                whole = operands.get(tensor) or written.get(tensor)
                values[param.name] = whole.strides[(axis, 0)] if whole is not None else 0
                reach = max(
                    reach, sum((n - 1) * abs(whole.strides[a]) for a, n in whole.extents.items()) if whole else 0
                )
        values["WIDE"] = reach + 2 * BLOCK >= _WIDE
        values["RAGGED"] = space.ragged
        values["HALF"] = all(dtype in ("f16", "bf16") for dtype in stored)
        return values

    @staticmethod
    def _tiles(space: Space, operands: Sequence[Operand]) -> tuple[tuple[int, int, int] | None, int]:
        """The sizes of the patches that the space is cut into, or None for tiles in a row; and how many programs there are."""
        patch = layout.patch(space, operands)
        if patch is None:
            return None, cdiv(space.count, BLOCK)
        rows, between, columns = patch
        return patch, space.count // (rows * columns) * cdiv(rows, BLOCK // layout.SIDE) * cdiv(columns, layout.SIDE)

    @staticmethod
    def _dense(operand: Operand, space: Space) -> bool:
        linear = space.linear()
        return all(operand.strides.get(a, 0) == linear[a] for a in space.order if space.extents[a] != 1)

    def _plan_forward(self, given: Mapping[str, Given]) -> Plan:
        operands = self._bind(self.tensors, given)
        extents = self._extents(operands, self.tensors)
        read = {p.name[:-4] for p in self.forward.abi.params if p.role == "ptr"}
        operands = {n: layout.stretched(o, extents) for n, o in operands.items() if n in read}
        plain = not any(" " in d for t in self.outputs for d in re_groups(t.dims))
        space = layout.iterate(self._axes(extents), extents, list(operands.values()), reorder=plain)
        compute = self._compute_dtype(given)
        outputs = {
            t.name: self._allocated(t, self._output_dtype(t, given, compute), extents, space) for t in self.outputs
        }
        if space.count == 0:
            return Plan(outputs, compute=compute)
        written = self._bind(self.outputs, outputs)
        if self.sliced:  # what is written part by part has strides of its own, which must merge too
            space = layout.iterate(space.order, extents, [*operands.values(), *written.values()], reorder=False)
        stored = [m.dtype for m in outputs.values()]
        values = {**self._common(self.forward, operands, space, compute, written, stored), "BLOCK": BLOCK}
        pointers = {f"{n}_ptr": n for n in (*operands, *outputs)}
        values["patch_sizes"], programs = self._tiles(space, [*operands.values(), *written.values()])
        launch = Launch(self.forward, (programs, 1, 1), pointers, values)
        return Plan(outputs, launches=(launch,), compute=compute)

    def _plan_backward(self, given: Mapping[str, Given], needed: Sequence[str], multiprocessors: int) -> Plan:
        assert self.backward is not None
        cotangents = [
            replace(t, name=f"d{t.name}")
            for t in self.outputs
            if t.differentiable and t.dtype in ("float", "number", "any", "compute")
        ]
        bound = self._bind((*self.tensors, *self.outputs, *cotangents), given)
        extents = self._extents(bound, (*self.tensors, *self.outputs, *cotangents))
        bound = {n: layout.stretched(o, extents) for n, o in bound.items()}
        read = {p.name[:-4] for p in self.backward.abi.params if p.role == "ptr"}
        operands = {n: o for n, o in bound.items() if n in read}
        axes = self._axes(extents)
        patterns = {
            n: frozenset(a for a in axes if extents[a] != 1 and bound[n].extents.get(a, 1) == 1) for n in needed
        }
        plain = not any(" " in d for t in self.tensors for d in re_groups(t.dims))
        order = layout.iterate(axes, extents, [o for n, o in operands.items() if not patterns.get(n)], reorder=plain)
        targets = {t.name: t for t in self.tensors}
        grads = {}
        for name in needed:
            own = {a: bound[name].extents[a] for a in bound[name].extents}
            kept = Space(
                tuple(a for a in order.order if a in own), {a: own[a] for a in order.order if a in own}, (), ()
            )
            meta = given[name]
            assert isinstance(meta, Meta)
            grads[f"d{name}"] = self._allocated(targets[name], meta.dtype, own, kept)
        if order.count == 0:
            return Plan(grads, zeros=tuple(grads))
        return self._backward_launches(given, operands, extents, order, patterns, grads, multiprocessors)

    def _backward_launches(self, given: Mapping[str, Given], operands: Mapping[str, Operand], extents: Mapping[Axis, int], order: Space,
                           patterns: Mapping[str, frozenset[Axis]], grads: Mapping[str, Meta], multiprocessors: int) -> Plan:  # fmt: skip
        assert self.backward is not None
        compute = self._compute_dtype(given)
        whole = [n for n in patterns if not patterns[n]]
        groups: dict[frozenset[Axis], list[str]] = {}
        for name, pattern in patterns.items():
            if pattern:
                groups.setdefault(pattern, []).append(name)
        targets = [replace(t, name=f"d{t.name}") for t in self.tensors if t.name in whole]
        written = self._bind(targets, grads)
        reads = {f"{n}_ptr": n for n in operands}
        strided = list(written.values()) if self.sliced else []
        full = {f"d{n}_ptr": f"d{n}" for n in whole}
        if not groups:
            space = layout.iterate(order.order, extents, [*operands.values(), *strided], reorder=False)
            flat = {"n_kept": space.count, "n_reduced": 1, "span": 1, "kept_sizes": None, "kept_strides": None, "reduced_sizes": None,
                    "reduced_strides": None, "BLOCK_K": BLOCK, "BLOCK_R": 1, "BLOCK": BLOCK}  # fmt: skip
            stored = [m.dtype for m in grads.values()]
            values = {**self._common(self.backward, operands, space, compute, written, stored), **flat}
            values["patch_sizes"], programs = self._tiles(space, [*operands.values(), *strided])
            launch = Launch(self.backward, (programs, 1, 1), {**reads, **full}, values)
            return Plan(grads, launches=(launch,))
        launches: list[Launch] = []
        scratch: dict[str, Meta] = {}
        for pattern, names in groups.items():
            space = layout.iterate(order.order, extents, [*operands.values(), *strided], (pattern,), reorder=False)
            launches += self._sum_launches(
                operands, space, pattern, names, {**reads, **full}, compute, written, grads, scratch, multiprocessors
            )
            full = {}
        return Plan(grads, scratch, tuple(launches))

    def _sum_launches(self, operands: Mapping[str, Operand], space: Space, pattern: frozenset[Axis], names: Sequence[str],
                      pointers: dict[str, str], compute: str, written: Mapping[str, Operand], grads: Mapping[str, Meta],
                      scratch: dict[str, Meta], multiprocessors: int) -> list[Launch]:  # fmt: skip
        """One pass that sums the gradients `names` over the axes of `pattern`, and the second stage where it has parts."""
        from .sums import sum_partials

        assert self.backward is not None
        split = split_space(space, pattern)
        block_k, block_r, parts = split.shape(multiprocessors)
        span = cdiv(cdiv(split.n_reduced, parts), block_r) * block_r
        parts = cdiv(split.n_reduced, span)
        stored = [m.dtype for m in grads.values()]
        warps = WARPS
        if block_k == 1 and any(t.dtype == "bool" for t in self.tensors if t.name in operands):
            # Of bytes a thread reads 16 where it has as many elements; what it stores would be exchanged through shared memory first.
            warps = block_r * max(ITEM_SIZES[dtype] for dtype in stored) // (32 * 16)
        values = {**self._common(self.backward, operands, space, compute, written, stored), **split.values(),
                  "span": span, "BLOCK_K": block_k, "BLOCK_R": block_r,
                  "RAGGED": space.ragged or (block_k > 1 and not split.inner_kept)}  # fmt: skip
        finish = []
        for name in names:
            total = f"d{name}"
            if parts > 1:
                total = f"d{name}_parts"
                scratch[total] = Meta(compute, (parts, split.n_kept), (split.n_kept, 1))
                finish.append(name)
            pointers[f"d{name}_sum_ptr"] = total
        out = [Launch(self.backward, (cdiv(split.n_kept, block_k), parts, 1), pointers, values, warps)]
        # Few sums are added up by one program each: in as few steps as can be, for each waits for its loads.
        last_k, last_r, warps = (128, 16, WARPS) if split.n_kept >= 64 else (1, 8192, 16)
        second = Kernel.of(sum_partials)
        for name in finish:
            settings = {"n_parts": parts, "n_kept": split.n_kept, "COMPUTE": values["COMPUTE"], "WIDE": values["WIDE"],
                        "BLOCK_K": last_k, "BLOCK_R": last_r}  # fmt: skip
            out.append(
                Launch(
                    second,
                    (cdiv(split.n_kept, last_k), 1, 1),
                    {"part_ptr": f"d{name}_parts", "total_ptr": f"d{name}"},
                    settings,
                    warps,
                )
            )
        return out


@dataclass(frozen=True)
class Split:
    """An iteration space split into kept and reduced dims: extents and linear strides of each."""

    kept: tuple[tuple[int, int], ...]
    reduced: tuple[tuple[int, int], ...]
    inner_kept: bool

    @property
    def n_kept(self) -> int:
        return math.prod(n for n, _ in self.kept)

    @property
    def n_reduced(self) -> int:
        return math.prod(n for n, _ in self.reduced)

    def values(self) -> dict[str, Any]:
        out: dict[str, Any] = {"n_kept": self.n_kept, "n_reduced": self.n_reduced}
        for name, dims in (("kept", self.kept), ("reduced", self.reduced)):
            if len(dims) > layout.RANK:
                raise ShapeError(f"broadcasting over {len(dims)} separate dims; a kernel takes {layout.RANK}")
            out[f"{name}_sizes"] = layout.divisors([n for n, _ in dims])
            out[f"{name}_strides"] = tuple((*(s for _, s in dims), 0, 0, 0, 0)[: layout.RANK])
        return out

    def shape(self, multiprocessors: int) -> tuple[int, int, int]:
        """BLOCK_K, BLOCK_R and the number of parts: wide along memory, enough programs to fill the device evenly."""
        if self.inner_kept:
            block_k, block_r, each = (128, 16, 32) if self.n_kept >= 64 else (16, 128, 32)
        elif self.n_reduced >= 256 or self.n_kept < 64:
            block_k, block_r, each = 1, 2048 if self.n_reduced >= 4096 else 1024, 64
        else:
            block_k, block_r, each = 128, 16, 32
        tiles = cdiv(self.n_kept, block_k)
        parts = max(1, min(cdiv(each * multiprocessors, tiles), cdiv(self.n_reduced, 2 * block_r), 65535))
        return block_k, block_r, parts


def split_space(space: Space, pattern: frozenset[Axis]) -> Split:
    """Kept and reduced merged dims with their strides in the linear index."""
    kept, reduced, step = [], [], 1
    for group, size in zip(reversed(space.dims), reversed(space.sizes)):
        (reduced if group[0] in pattern else kept).insert(0, (size, step))
        step *= size
    return Split(tuple(kept), tuple(reduced), not space.dims or space.dims[-1][0] not in pattern)


def re_groups(dims: str) -> list[str]:
    """The grouped dims of a declaration: `..., (S N)` has one."""
    return [part.split(")")[0] for part in dims.split("(")[1:]]
