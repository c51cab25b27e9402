"""`RuntimeOp`: the contract between an op and whatever launches it, as far as it goes forward. No torch here.

An instance holds the op's attrs and choices. From the shapes, strides and dtypes of a call it plans what to allocate and
launch; `pack_args` hands a launch's arguments to an `ArgVisitor` by the kernel's own names.

    op = Softcap(cap=30.0)
    plan = op.plan_forward({"x": Meta("bf16", (4, 8), (8, 1))})
    plan.outputs["y"]                  # Meta("bf16", (4, 8), (8, 1))
    plan.launches[0].grid              # (1, 1, 1)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any, ClassVar

from . import layout
from .abi import ArgVisitor
from .groups import Step
from .layout import Axis, Operand, ShapeError, Space
from .plan import Call, Given, Launch, Meta, Plan, Stage, Tensor, TooManyDims, active
from .views import FLOATS, INTS, TensorView, dense_strides, promote

Size = Callable[..., int]
"""The product of the extents of axes and packs, by their names."""
There = Callable[[str], bool]
"""Whether a tensor is given, by its name."""
View = TensorView | float | int | None
"""An argument as a host hands it over: a tensor, a number given for one, or nothing."""


KEPT = 2048
"""Of what is kept by a key the most; then the oldest goes."""


def remember(cache: dict[Any, Any], key: Any, value: Any) -> None:
    """Keeps a value by its key."""
    if len(cache) >= KEPT:
        cache.pop(next(iter(tuple(cache))), None)
    cache[key] = value


def told_apart(value: Any) -> Any:
    """A key of a value: True, 1 and 1.0 are equal, as are 0.0 and -0.0."""
    return type(value), value, type(value) is float and math.copysign(1.0, value)


class UnknownExtent(ShapeError):
    """An extent that what is given does not tell."""


class RuntimeOp:
    """What every generated op is. Subclasses state their tensors, attrs and kernels."""

    name: ClassVar[str]
    inputs: ClassVar[tuple[Tensor, ...]] = ()
    params: ClassVar[tuple[Tensor, ...]] = ()
    buffers: ClassVar[tuple[Tensor, ...]] = ()
    state: ClassVar[tuple[Tensor, ...]] = ()
    """What a step updates in place; such ops are `stepwise.StepOp`s, without outputs."""
    outputs: tuple[Tensor, ...] = ()
    """Of an instance, those that its choices have, with the dims that these give."""
    saved: ClassVar[tuple[Tensor, ...]] = ()
    """Statistics that the forward writes for the backward alone."""
    scratch: ClassVar[tuple[Tensor, ...]] = ()
    """What a stage writes for a later one of the same call."""
    updates: ClassVar[Mapping[str, Mapping[str, tuple[Any, ...]]]] = {}
    """Buffers that the forward writes in place, each with the choices under which it does."""
    forward: ClassVar[tuple[Stage, ...]] = ()
    has_backward: ClassVar[bool] = False
    """Whether it is a `DifferentiableOp` with gradients."""
    without: ClassVar[str] = "its spec says `not_differentiable`, or the package was generated for inference"
    """Why it has no backward, where it has none."""
    elementwise: ClassVar[bool] = True
    """Whether all stages are."""
    floats_of_ints: ClassVar[bool] = False
    """Whether ints and truth values are computed with as floats where there is nothing else."""
    sliced: ClassVar[tuple[str, ...]] = ()
    """Axes of fixed extent that a kernel reads and writes part by part."""
    needs_elements: ClassVar[tuple[str, ...]] = ()
    """Axes that must have elements, as those of a maximum."""
    kinds: ClassVar[Mapping[str, str | tuple[str, ...]]] = {}
    """What each attr is: float, int or bool, with `?` where it may be None and `*2` for a pair; or its choices."""

    sized: ClassVar[Mapping[str, str]] = {}
    """Axes and packs whose extents an attr gives, with its name."""

    named: ClassVar[Mapping[str, str]] = {}
    """Public names of attrs, where they are not their own."""

    fuses: ClassVar[tuple[Step, ...]] = ()
    """The ops that a fused op stands for, step by step."""

    plans_floats: ClassVar[bool] = False
    """Whether checks or plans may depend on the values of attrs that are floats: where an op has functions of its own beside
    `scalars`, which is asked at each call."""
    plans_numbers: ClassVar[bool] = False
    """Whether they depend on the values of numbers that are given for tensors."""

    ready: ClassVar[dict[Any, Any]]
    """What `binding` keeps of calls."""

    _plans: ClassVar[dict[Any, Plan]]

    def __init__(self, /, **attrs: Any) -> None:
        self.attrs = {n: _repeated(_plain(v), self.kinds.get(n, "")) for n, v in attrs.items()}
        computed = type(self).complete is not RuntimeOp.complete
        if computed and all(isinstance(k, tuple) or _is_kind(self.attrs.get(n), k) for n, k in self.kinds.items()):
            self.complete()  # what is no number is for `require` to refuse
        if any(t.chosen or t.when for t in self.outputs):
            self.require()
            choices = self.choices()
            there = [t for t in self.outputs if all(choices[n] in values for n, values in t.when)]
            self.outputs = tuple(_of_choice(t, choices) for t in there)

    def __init_subclass__(cls) -> None:
        cls._plans, cls.ready = {}, {}
        package = __name__.rpartition(".")[0]
        own = {
            n
            for c in cls.__mro__
            if c.__module__.rpartition(".")[0] != package
            for n, v in vars(c).items()
            if isinstance(v, FunctionType)
        }
        cls.plans_floats = cls.plans_numbers or bool(own - {"scalars"})
        cls.elementwise = all(s.elementwise for s in cls.stages())

    @classmethod
    def stages(cls) -> tuple[Stage, ...]:
        """Those of every direction that it has."""
        return cls.forward

    # -------------------------------------------------------------------------------- what subclasses give

    def complete(self) -> None:
        """Gives attrs that are None the values that the spec computes of others."""

    def scalars(self) -> dict[str, float]:
        """Run-time numbers of the kernels, in float64, by parameter name: the attrs, unless a subclass adds to them."""
        return {
            n: 0.0 if v is None else float(v) for n, v in self.attrs.items() if v is None or isinstance(v, (int, float))
        }

    def choices(self) -> dict[str, Any]:
        """Compile-time constants of the kernels, by parameter name."""
        return {n: self.attrs[n] for n, kind in self.kinds.items() if isinstance(kind, tuple)}

    def choices_by_size(self, size: Size) -> dict[str, Any]:
        """Compile-time constants that depend on the extents of a call, by parameter name."""
        return {}

    @property
    def derives(self) -> bool:
        """Whether extents follow from others."""
        return type(self).derived is not RuntimeOp.derived

    def derived(self, size: Size, there: There) -> Iterator[tuple[str, int]]:
        """The extents that neither a tensor nor an attr gives, by those that are known and those before them."""
        return iter(())

    def require(self) -> None:
        """Raises TypeError where an attr is of another kind, ValueError where it is not among its choices."""
        for name, kind in self.kinds.items():
            value, counted = self.attrs[name], name in self.sized.values() and kind == "int"
            name = self.named.get(name, name)
            if isinstance(kind, tuple):
                if value not in kind:
                    raise ValueError(f"{self.name}: `{name}` is {value!r}; choices: {', '.join(kind)}")
            elif not _is_kind(value, kind):
                raise TypeError(f"{self.name}: `{name}` is {value!r:.40}; it takes {_taken(value, kind)}")
            elif counted and value < 1:
                raise ValueError(f"{self.name}: `{name}` is {value}; it is the extent of an axis")

    def require_given(self, size: Size, there: There) -> None:
        """Raises ValueError where tensors are not as the spec requires: `size` has the product of the extents of axes and packs,
        `there` whether a tensor is given."""

    def axis_position(self) -> tuple[str, int | tuple[int, ...] | None, bool] | None:
        """The axis or pack that an attr places, where (None: everywhere), and whether extents of 1 stay where it was reduced."""
        return None

    # -------------------------------------------------------------------------------- planning

    def plan_forward(self, given: Mapping[str, Given]) -> Plan:
        """Outputs to allocate and the launches. Raises TypeError or ValueError naming op and argument."""
        key = self._key("forward", given)
        found = self._plans.get(key)
        if found is None:
            self._check_dtypes(given)
        if type(self).require_given is not RuntimeOp.require_given:  # attrs beside the extents are no part of the key
            self._require_given(given)
        if found is None:
            found = self._remember(key, self._plan_forward(given))
        if found.compute in INTS:
            self._check_integral(found.compute, given)
        return found

    def _require_given(self, given: Mapping[str, Given]) -> None:
        there = [t for t in self.tensors if isinstance(given.get(t.name), Meta)]
        extents = self.extents(self.bind(there, given), there)
        names = {t.name for t in there}
        self.require_given(lambda *axes: math.prod(n for a, n in extents.items() if a[0] in axes), names.__contains__)

    def chosen(self, given: Mapping[str, Given]) -> dict[str, Any]:
        """The choices of a call: those of the attrs, and those of its extents."""
        if type(self).choices_by_size is RuntimeOp.choices_by_size:
            return self.choices()
        made = [t for o in self.outputs for t in (o, replace(o, name=f"d{o.name}"))]  # all that a backward may have
        there = [t for t in (*self.tensors, *made) if isinstance(given.get(t.name), Meta)]
        extents = self.extents(self.bind(there, given), there)
        return {**self.choices(), **self.choices_by_size(self._size_of(extents, there))}

    def _argument_extents(self, given: Mapping[str, Given]) -> dict[Axis, int]:
        """The extents that the arguments of a call give, and what is derived from them."""
        there = [t for t in self.tensors if isinstance(given.get(t.name), Meta)]
        return self.extents(self.bind(there, given), there)

    def _size_of(self, extents: Mapping[Axis, int], tensors: Sequence[Tensor]) -> Size:
        """The extents as `size` of a formula. Raises UnknownExtent for an axis that none of the tensors has and nothing else tells."""
        known = {n for t in tensors for n in layout.names(t.dims)}
        sized = {axis: math.prod(_extents_of(self.attrs[attr])) for axis, attr in self.sized.items()}

        def size(*axes: str) -> int:
            for axis in axes:
                if axis not in known and axis not in sized and (axis, 0) not in extents:
                    raise UnknownExtent(f"{self.name}: the extent of `{axis}` does not follow from its arguments")
            return math.prod(n for a, n in extents.items() if a[0] in axes) * math.prod(
                sized[a] for a in axes if a in sized and a not in known
            )

        return size

    def _derive(self, extents: dict[Axis, int], tensors: Sequence[Tensor]) -> None:
        """Adds the extents that follow from others, unless what they follow from is unknown still. Raises ShapeError where a
        tensor has another extent there."""
        there = {t.name for t in tensors}
        try:
            for name, extent in self.derived(self._size_of(extents, tensors), there.__contains__):
                if extent < 0:
                    raise ShapeError(f"{self.name}: the extent of `{name}` would be {extent}")
                stretching = any(t.broadcast and name in layout.names(t.dims) for t in tensors)
                own = extents.get((name, 0), extent)
                if own != extent and not (stretching and own == 1):
                    raise ShapeError(f"{self.name}: the extent of `{name}` is {extent} here, and a tensor has {own}")
                extents[(name, 0)] = extent
        except UnknownExtent:
            return

    def _plan_forward(self, given: Mapping[str, Given]) -> Plan:
        compute = self.compute_dtype(given)
        updated = self.updated(given)
        wanted = {t.name: self.output_dtype(t, given, compute) for t in (*self.outputs, *self.saved, *self.scratch)}
        declared = {t.name: t for t in (*self.tensors, *self.outputs, *self.saved, *self.scratch)}
        call = Call(self, dict(given), declared, wanted, compute)
        own = [t.name for t in (*self.outputs, *self.saved)]
        self._run(call, self.forward, [*own, *updated])
        result, saved = (
            {t.name: call.outputs[t.name] for t in ts if t.name in call.outputs} for ts in (self.outputs, self.saved)
        )
        return Plan(
            result, call.scratch, tuple(call.launches), compute, tuple(call.zeros), saved, tuple(updated), call.metas()
        )

    def planned(
        self, plan: Callable[[Mapping[str, Given]], Plan], given: Mapping[str, Given],
        copied: Callable[[str, tuple[int, ...]], Given],
    ) -> Plan:  # fmt: skip
        """The plan of one direction; where dims do not merge into what a kernel takes, that of dense copies of the operands.

        Args:
            plan: makes it: `plan_forward`, or the like for the other direction.
            copied: called by name and shape for each operand of many dims; copies it to dense memory, stretched to that shape,
                and returns what is known of the copy. Of what no kernel reads it returns that alone. A gradient of what was
                stretched is then one of the copy: the caller sums it back.
        """
        try:
            return plan(given)
        except TooManyDims:
            return plan({**given, **{n: copied(n, shape) for n, shape in self._many(given).items()}})

    def _many(self, given: Mapping[str, Given]) -> dict[str, tuple[int, ...]]:
        """The operands of so many dims that they may not merge, with their shapes: those that NumPy's rules stretch, stretched."""
        metas = {n: m for n, m in given.items() if isinstance(m, Meta)}
        there = [t for t in self.tensors if t.name in metas]
        extents = self.extents(self.bind(there, given), there)
        whole = tuple(extents[a] for a in sorted(a for a in extents if a[0] == "..."))
        free = {t.name for t in there if t.dims == "..."}
        return {n: whole if n in free else m.shape for n, m in metas.items() if len(m.shape) >= layout.RANK}

    def updated(self, given: Mapping[str, Given]) -> list[str]:
        """The buffers that are given and written in place."""
        choices = self.chosen(given) if self.updates else {}
        return [
            name
            for name, when in self.updates.items()
            if isinstance(given.get(name), Meta) and all(choices[n] in values for n, values in when.items())
        ]

    def _run(self, call: Call, stages: Sequence[Stage], wanted: Sequence[str]) -> None:
        scratch = [t.name for t in self.scratch if not isinstance(call.given.get(t.name), Meta)]  # unless it was kept
        given = {f"{n}_ptr": isinstance(call.given.get(n), Meta) for n in call.declared}
        running = active(stages, wanted, scratch, {**call.choices, **given})
        kept = {t.name for t in self.saved}
        for name in scratch:  # what one stage alone names is handed to no other
            if name not in kept and sum(name in s.names for s in running) < 2:
                call.wanted.pop(name, None)
        for stage in running:
            stage.plan(call)

    def numbers(self, given: Mapping[str, Any]) -> dict[str, float]:
        """The run-time numbers of a call: the scalars, and the Python numbers given for tensors."""
        taken = {f"{t.name}_number": v for t in self.tensors if t.scalar for v in (given.get(t.name),)}
        for name, value in self.attrs.items():
            whole = str(self.kinds.get(name)).startswith("int") and isinstance(value, int)
            if whole and not (-(2**63) <= value < 2**63 and int(float(value)) == value):
                public = self.named.get(name, name)
                raise ValueError(f"{self.name}: `{public}` is {value}; it travels in float64, which does not hold it")
        try:
            own = {n: float(v) for n, v in self.scalars().items()}  # an int of 1 would become a constant of the kernel
            return {**own, **{n: float(v) if isinstance(v, (int, float)) else 0.0 for n, v in taken.items()}}
        except OverflowError:
            raise ValueError(f"{self.name}: a number is beyond the range of float64") from None

    def _remember(self, key: Any, plan: Plan) -> Plan:
        """Plans are kept by everything they depend on; values of numbers are not among it."""
        remember(self._plans, key, plan)
        return plan

    def attrs_key(self) -> tuple[Any, ...]:
        """What checks and plans depend on of the attrs: names, types and values."""
        out: list[Any] = [*self.attrs]
        for value in self.attrs.values():
            if type(value) is float and not self.plans_floats:
                out.append(float)
            elif type(value) is tuple:
                out += map(told_apart, value)
                out.append(tuple)
            else:
                out.append(told_apart(value))
        return tuple(out)

    def _key(self, direction: str, given: Mapping[str, Given], *more: Any) -> Any:
        metas = tuple((n, type(v) if isinstance(v, (int, float)) else v) for n, v in given.items())
        sized = tuple(self.attrs[n] for n in self.sized.values())
        return (
            direction,
            metas,
            tuple(self.choices().items()),
            self.axis_position(),
            sized,
            self._extents_key(given),
            *more,
        )

    def _extents_key(self, given: Mapping[str, Given]) -> Any:
        """What attrs make of the extents; where these do not fit one another planning says so."""
        if type(self).choices_by_size is RuntimeOp.choices_by_size and not self.derives:
            return None
        try:
            return tuple(self._argument_extents(given).items()), tuple(self.chosen(given).items())
        except ShapeError:
            return None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.inputs + self.params + self.buffers

    # -------------------------------------------------------------------------------- the contract, by name
    #
    # `given` has, by name, what is known of inputs, params and buffers.

    @property
    def n_activation_inputs(self) -> int:
        return len(self.inputs)

    @property
    def param_names(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.params)

    def param_shapes(self, given: Mapping[str, Given]) -> dict[str, tuple[int, ...] | None]:
        """The shapes of the params, of which what is given determines every axis; None of the others.

        Args:
            given: inputs, and params of which the shape is known: they may determine another.

        A pack of a param that may be broadcast has any number of axes: it is for the caller to choose.
        """
        return self._shapes(self.params, given)

    def param_init_data(self) -> dict[str, float | None]:
        """What each param is filled with when a model begins; None where the spec leaves it open."""
        return {p.name: p.init for p in self.params}

    @property
    def buffer_names(self) -> tuple[str, ...]:
        return tuple(b.name for b in self.buffers)

    def buffer_shapes(self, given: Mapping[str, Given]) -> dict[str, tuple[int, ...] | None]:
        """As `param_shapes`."""
        return self._shapes(self.buffers, given)

    def buffer_init_data(self) -> dict[str, float | None]:
        """As `param_init_data`."""
        return {b.name: b.init for b in self.buffers}

    def output_metas(self, given: Mapping[str, Given]) -> dict[str, Meta]:
        """Dtype and shape of each output. Nothing is planned, so extents may be beyond what a device takes.

        Raises:
            TypeError, ValueError: as a call would, naming op and argument.
        """
        self._check_dtypes(given)
        if type(self).require_given is not RuntimeOp.require_given:
            self._require_given(given)
        there = [t for t in self.tensors if isinstance(given.get(t.name), Meta)]
        extents, compute = self.extents(self.bind(there, given), there), self.compute_dtype(given)
        known, out = {a[0] for a in extents}, {}
        for tensor in self.outputs:
            dims = layout.parse_dims(tensor.dims)
            if any(not d.pack and a not in known and not n for d in dims for a, n in zip(d.axes, d.fixed)):
                raise ShapeError(f"{self.name}: the shape of `{tensor.name}` does not follow from its arguments")
            own = {a: n for a, n in extents.items() if a[0] in layout.names(tensor.dims)}
            out[tensor.name] = self.allocated(
                tensor, self.output_dtype(tensor, given, compute), extents, Space(tuple(own), own, (), ())
            )
        return out

    def output_shapes(self, given: Mapping[str, Given]) -> tuple[tuple[int, ...], ...]:
        return tuple(m.shape for m in self.output_metas(given).values())

    def between(self, plan: Plan, training: bool) -> dict[str, Meta]:
        """The scratch of a forward: without training also what its stages hand on to one another that would be kept else."""
        handed = {t.name for t in self.scratch}
        return {**plan.scratch, **{n: m for n, m in plan.saved.items() if n in handed and not training}}

    def scratch_metas(self, given: Mapping[str, Given], training: bool) -> dict[str, Meta]:
        """What a forward takes beside its outputs and gives back at its end."""
        return self.between(self.plan_forward(given), training)

    def n_launches(self, given: Mapping[str, Given]) -> int:
        return len(self.plan_forward(given).launches)

    def block(self, i: int, given: Mapping[str, Given], lanes: int = 32) -> tuple[int, int, int]:
        """The threads of a program of forward launch `i`, on a device whose warps have that many lanes."""
        return self.plan_forward(given).launches[i].warps * lanes, 1, 1

    def grid(self, i: int, given: Mapping[str, Given]) -> tuple[int, int, int]:
        """The programs of forward launch `i`."""
        return self.plan_forward(given).launches[i].grid

    def pack_args(self, i: int, inputs: Sequence[View], params: Sequence[View], buffers: Sequence[View],
                  outputs: Sequence[View], residuals: Sequence[View], scratch: Sequence[View],
                  visitor: ArgVisitor) -> None:  # fmt: skip
        """Visits the arguments of forward launch `i`, each under the kernel parameter's name.

        Args:
            residuals: what the plan calls saved, in its order; None for what is not kept.
            scratch: in the order of the plan's.

        Raises:
            TypeError: where there are more or fewer than the op has.
        """
        views = self._own_views(inputs, params, buffers)
        plan = self.plan_forward({n: meta_of(v) for n, v in views.items()})
        views |= self._named("outputs", plan.outputs, outputs) | self._named("residuals", plan.saved, residuals)
        self.pack(plan.launches[i], {**views, **self._named("scratch", plan.scratch, scratch)}, visitor)

    def pack(self, launch: Launch, views: Mapping[str, View], visitor: ArgVisitor) -> None:
        """Visits the arguments of a launch of this op's plans; `views` are by name what is there of `plan.metas`, and numbers."""
        tensors = {n: v for n, v in views.items() if isinstance(v, TensorView)}
        launch.kernel.abi.visit(launch.arguments(tensors, self.numbers(views)), visitor)

    def _own_views(self, inputs: Sequence[View], params: Sequence[View], buffers: Sequence[View]) -> dict[str, View]:
        views = self._named("inputs", [t.name for t in self.inputs], inputs)
        views |= self._named("params", self.param_names, params)
        return views | self._named("buffers", self.buffer_names, buffers)

    def _named(self, kind: str, names: Collection[str], values: Sequence[View]) -> dict[str, View]:
        if len(names) != len(values):
            raise TypeError(f"{self.name}: {len(values)} {kind}; it has {len(names)}: {', '.join(names) or 'none'}")
        return dict(zip(names, values))

    def _shapes(self, tensors: Sequence[Tensor], given: Mapping[str, Given]) -> dict[str, tuple[int, ...] | None]:
        there = {t.name: m for t in self.tensors if isinstance(m := given.get(t.name), Meta)}
        own = [t for t in self.tensors if t.name in there]
        extents = self.extents(self.bind(own, given), own)
        known = frozenset(n for t in own for n in layout.names(t.dims))
        return {t.name: there[t.name].shape if t.name in there else self._shape(t, extents, known) for t in tensors}

    def _shape(self, tensor: Tensor, extents: Mapping[Axis, int], known: frozenset[str]) -> tuple[int, ...] | None:
        """The shape that extents give a tensor, or None where they say nothing of one of its axes."""
        shape: list[int] = []
        for dim in layout.parse_dims(tensor.dims):
            if dim.pack:
                if dim.axes[0] not in known or tensor.broadcast:
                    return None
                shape += [extents[a] for a in sorted((a for a in extents if a[0] == dim.axes[0]), key=lambda a: a[1])]
                continue
            given = [_extents_of(self.attrs[self.sized[a]])[0] if a in self.sized else 0 for a in dim.axes]
            own = [extents.get((a, 0), fixed or other) for a, fixed, other in zip(dim.axes, dim.fixed, given)]
            if any(a not in known and not n for a, n in zip(dim.axes, own)):
                return None
            shape.append(math.prod(own))
        return tuple(shape)

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

    def _float_dtype(self, given: Mapping[str, Given]) -> str:
        """That of a float result: the inputs' where they have floats, else that of all tensors, else torch's default."""
        found = (self._result_dtype(given, tensors) for tensors in (self.inputs, self.tensors))
        return next((dtype for dtype in found if dtype in FLOATS), "f32")

    def compute_dtype(self, given: Mapping[str, Given]) -> str:
        result = self._result_dtype(given, self.tensors)
        if result in (*INTS, "bool") and not self.floats_of_ints:
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

    def output_dtype(self, tensor: Tensor, given: Mapping[str, Given], compute: str) -> str:
        if tensor.dtype == "float":
            return self._float_dtype(given)
        if tensor.dtype in ("number", "integral", "any"):
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

    def lone(self, ranks: Mapping[str, int]) -> tuple[str, ...]:
        """The tensors that `dim` places an axis in where none of them has dims: as in torch, such a one is an axis of one element.

        Args:
            ranks: of each tensor that is given, how many dims it has.
        """
        placed = self.axis_position()
        if placed is None or placed[0] in self._packs():
            return ()
        moved = [t.name for t in self.tensors if t.name in ranks and self._moves(t) == "moved"]
        return tuple(moved) if moved and not any(ranks[n] for n in moved) else ()

    def _packs(self) -> set[str]:
        return {d.axes[0] for t in (*self.tensors, *self.outputs) for d in layout.parse_dims(t.dims) if d.pack}

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

    def bind(self, tensors: Sequence[Tensor], given: Mapping[str, Given]) -> dict[str, Operand]:
        known = {
            axis: extent
            for tensor in (*self.tensors, *self.outputs)
            for dim in layout.parse_dims(tensor.dims)
            for axis, extent in zip(dim.axes, dim.fixed)
            if extent
        }
        packs = self._packs()
        known |= {axis: _extents_of(self.attrs[attr])[0] for axis, attr in self.sized.items() if axis not in packs}
        if self.derives and not {t.name for t in tensors} <= {t.name for t in self.tensors}:
            known |= {a: n for (a, _), n in self._argument_extents(given).items() if a not in packs}
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

    def extents(self, operands: Mapping[str, Operand], tensors: Sequence[Tensor]) -> dict[Axis, int]:
        stretching = frozenset(t.public for t in tensors if t.broadcast)
        try:
            out = layout.broadcast(list(operands.values()), stretching)
        except ShapeError as error:
            raise ShapeError(f"{self.name}: {error}") from None
        for tensor in tensors:
            own, operand = layout.names(tensor.dims), operands.get(tensor.name)
            missing = [] if operand is None else [a for a in out if a[0] in own and a not in operand.extents]
            if missing and not tensor.broadcast:
                raise ShapeError(f"{self.name}: `{tensor.public}` lacks {len(missing)} dims that another tensor has")
        for tensor in self.outputs:  # an axis of fixed extent may be in no operand
            for dim in layout.parse_dims(tensor.dims):
                for axis, extent in zip(dim.axes, dim.fixed):
                    if extent and axis not in self.sliced:
                        out.setdefault((axis, 0), extent)
        if self.derives:
            self._derive(out, tensors)
        return out

    def axes(self, extents: Mapping[Axis, int]) -> list[Axis]:
        """The axes to run over, in the order of the first output, then what it lacks."""
        out: list[Axis] = []
        for dim in layout.parse_dims(self.outputs[0].dims):
            for name in dim.axes:
                out += sorted((a for a in extents if a[0] == name), key=lambda a: a[1])
        out += [a for a in extents if a not in out]
        return [a for a in out if a[0] not in self.sliced]

    def allocated(self, tensor: Tensor, dtype: str, extents: Mapping[Axis, int], space: Space) -> Meta:
        """A new tensor: dense in the order of iteration, or contiguous where it is written part by part."""
        dims = layout.parse_dims(tensor.dims)
        shape: list[int] = []
        strides: list[int] = []
        sliced = False
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
                if any(a not in extents and not dim.fixed[k] for k, a in enumerate(axes)):
                    raise ShapeError(f"{self.name}: the shape of `{tensor.name}` does not follow from its arguments")
                shape.append(math.prod(extents.get(a, dim.fixed[k]) for k, a in enumerate(axes)))
                own = [(linear[a], extents[a]) for a in axes if a in linear and extents[a] != 1]
                strides.append(own[-1][0] if own else 1)
                # Other dims may lie between the factors of a dim: of one that is a whole, its order is not theirs.
                sliced |= any(outer != step * n for (outer, _), (step, n) in zip(own, own[1:]))
        whole = tuple(shape)
        sliced |= any(n in self.sliced for d in dims for n in d.axes)
        placed = self.axis_position()
        reduced = sum(a[0] == placed[0] for a in extents) if placed else 0
        return self._placed(tensor, Meta(dtype, whole, dense_strides(whole) if sliced else tuple(strides)), reduced)


def _plain(value: Any) -> Any:
    """A scalar of NumPy as Python's number."""
    return value.item() if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0 else value


def _of_choice(tensor: Tensor, choices: Mapping[str, Any]) -> Tensor:
    """The tensor with the dims that it has under these choices."""
    for name, values, dims in tensor.chosen:
        if choices.get(name) in values:
            return replace(tensor, dims=dims)
    return tensor


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


def _taken(value: Any, kind: str) -> str:
    """What a kind takes, in the words of an error: how many where there are more or fewer, else what each is."""
    base, _, count = kind.rstrip("?").partition("*")
    wrong = count and isinstance(value, tuple) and len(value) != int(count)
    return count if wrong else _KINDS[base]


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


def meta_of(view: Any) -> Given:
    """What a plan knows of a view."""
    return Meta(view.dtype, view.shape, view.strides) if isinstance(view, TensorView) else view
