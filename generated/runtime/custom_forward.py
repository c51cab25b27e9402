"""`CustomForward`: kernels that are written by hand, under the contract of all ops. `custom.CustomOp` is what one derives from.

Here is what such an op has whether a package is for training or for inference: its declaration, its launches, and what is checked of
them. A launch writes what is the op's to write, and reads nothing that no launch before it has written.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from . import layout
from .abi import KernelAbi, Param
from .accesses import accesses
from .layout import ShapeError
from .op import RuntimeOp, told_apart
from .plan import WARPS, Given, Kernel, Launch, Meta, Plan, Tensor, TooManyDims
from .views import ITEM_SIZES, is_dense

_MOST_PROGRAMS = (2**31 - 1, 65535, 65535)
"""What CUDA and HIP take of a grid."""
_WARPS = (1, 2, 4, 8, 16, 32)
"""What Triton takes, up to the 1024 threads of a program."""
_TENSORS = ("inputs", "params", "buffers", "outputs", "saved")
"""Members that declare tensors."""
_KIND = re.compile(r"(float|int|bool)(\?)?")


@dataclass(frozen=True)
class Scratch:
    """Memory that a launch asks for, in place of a tensor's name; a later launch of the call names it by its name."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def meta(self) -> Meta:
        return Meta.dense(self.dtype, self.shape)


class CustomForward(RuntimeOp):
    """A hand-written op as far as it goes forward.

    Results are allocated row-major; axes have the extents that the inputs and params give them. Plans are kept by shapes, strides,
    dtypes and attrs: `lower` must depend on nothing else.
    """

    plans_numbers = True  # `lower` has them, as it has the attrs

    strided: ClassVar[bool] = False
    """Whether its kernels take operands as they lie, by the strides that `given` has. Else what is not row-major is copied before."""
    without = "it declares no `gradients`, or the package was generated for inference"

    def __init__(self, /, **attrs: Any) -> None:
        super().__init__(**attrs)
        wrong = [*(f"`{n}` is missing" for n in self.kinds if n not in attrs)]
        wrong += [f"`{n}` is no attr of it" for n in attrs if n not in self.kinds]
        if wrong:
            raise TypeError(f"{self.name}: {', '.join(wrong)}")

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.elementwise = False
        if hasattr(cls, "name"):  # else it is a base of others
            cls.check_declaration()

    @classmethod
    def check_declaration(cls) -> None:
        """Raises TypeError where the class is not whole, when it is made."""
        cls._check_members()
        every = [t.name for member in _TENSORS for t in getattr(cls, member)]
        twice = next((n for k, n in enumerate(every) if n in every[:k]), None)
        if twice is not None:
            raise TypeError(f"{cls.name}: two of its tensors are called `{twice}`")
        if not cls.outputs:
            raise TypeError(f"{cls.name}: it has no outputs")
        if cls.lower is CustomForward.lower:
            raise TypeError(f"{cls.name}: it has no `lower`")
        choices = [n for n, kind in cls.kinds.items() if isinstance(kind, tuple)]
        for name, when in cls.updates.items():
            if name not in [b.name for b in cls.buffers]:
                raise TypeError(f"{cls.name}: `{name}` of its updates is none of its buffers")
            for choice in when if cls.choices is RuntimeOp.choices else ():
                if choice not in choices:
                    raise TypeError(
                        f"{cls.name}: `{choice}`, under which it updates `{name}`, is no choice among its kinds"
                    )

    @classmethod
    def _check_members(cls) -> None:
        """Raises TypeError where a member is not of its kind."""
        for member in _TENSORS:
            value = getattr(cls, member)
            if not isinstance(value, tuple) or not all(isinstance(t, Tensor) for t in value):
                what = f"one Tensor, `{value.name}`" if isinstance(value, Tensor) else f"{value!r:.60}"
                raise TypeError(f"{cls.name}: its `{member}` are {what}; they are a tuple: `(Tensor(...),)`")
        if not isinstance(cls.kinds, Mapping):
            raise TypeError(f"{cls.name}: its `kinds` are {cls.kinds!r:.60}; they are a dict, by the names of attrs")
        for name, kind in cls.kinds.items():
            if isinstance(kind, tuple):
                known = bool(kind) and all(isinstance(c, str) for c in kind)
            else:
                known = isinstance(kind, str) and _KIND.fullmatch(kind) is not None
            if not known:
                raise TypeError(
                    f"{cls.name}: the kind of `{name}` is {kind!r:.40}; kinds: 'float', 'int', 'bool', with '?' where it "
                    "may be None, or a tuple of choices"
                )

    def lower(self, given: Mapping[str, Given], outputs: Mapping[str, Meta]) -> Sequence[Launch]:
        """The launches of the forward, in order.

        Args:
            given: what is known of inputs, params and buffers, by name: a `Meta`, a number, or None.
            outputs: of outputs and of what is saved. A launch may be given a null pointer for what is saved, where nobody trains.
        """
        raise TypeError(f"{self.name} has no `lower`")

    # -------------------------------------------------------------------------------- what subclasses call

    def launch(
        self, kernel: Any, grid: int | tuple[int, ...], /, *, warps: int = WARPS, stages: int = 0, **arguments: Any
    ) -> Launch:
        """A launch, checked against the kernel's own signature.

        Args:
            kernel: a `@triton.jit` function. Pointers are named `..._ptr`, tuples `..._strides` (four items) or `sizes` (six);
                every other parameter is annotated: tl.int64, tl.float64 or tl.constexpr.
            grid: how many programs there are, along up to three dims.
            stages: steps of a loop whose loads are under way at a time; 0 leaves it to Triton.
            arguments: by the kernel's names, all of them, in its order. A pointer is a tensor's name, a `Scratch`, or None.

        Raises:
            TypeError: of an argument that is swapped, missing, surplus or of another kind, naming op, kernel and argument.
            ValueError: of a grid or a number of warps that no device takes.
        """
        function = getattr(kernel, "fn", None)
        if not inspect.isfunction(function):
            own = getattr(kernel, "__name__", repr(kernel))
            raise TypeError(f"{self.name}: kernel `{own:.60}` is no function under `@triton.jit` itself")
        where = f"{self.name}: kernel `{function.__name__}`"
        _check_options(where, warps, stages, [n for n in arguments if n not in inspect.signature(function).parameters])
        try:
            known = Kernel.of(kernel)
        except TypeError as error:
            raise TypeError(f"{self.name}: kernel {error}") from None
        wrong = KernelAbi(tuple(Param(n, "") for n in arguments)).mismatch(known.abi.names)
        if wrong:
            raise TypeError(f"{where}: {wrong}")
        pointers: dict[str, str] = {}
        scratch: dict[str, Meta] = {}
        values: dict[str, Any] = {}
        for param in known.abi.params:
            value = arguments[param.name]
            if param.role != "ptr":
                values[param.name] = _value(where, param, value)
            elif isinstance(value, Scratch):
                _check_scratch(f"{where}: `{param.name}`", value)
                pointers[param.name], scratch[value.name] = value.name, value.meta
            elif isinstance(value, str):
                pointers[param.name] = value
            elif value is not None:
                raise TypeError(
                    f"{where}: `{param.name}` is {value!r:.40}; it takes the name of a tensor, a Scratch or None"
                )
        return Launch(known, _grid(where, grid), pointers, values, warps, stages, scratch)

    def merged(
        self, pack: str, names: Sequence[str], given: Mapping[str, Given], most: int
    ) -> tuple[tuple[int, ...], dict[str, tuple[int, ...]]]:
        """The dims that a pack stands for, merged as far as the memory of all these tensors allows.

        Returns:
            `most` extents, ones behind those that there are, and as many strides for each of `names`: 0 in the absent dims.

        Raises:
            TooManyDims: where more than `most` remain; the caller copies tensors to a dense layout then.
        """
        bound = self.bind([replace(self._tensor(n), name=n) for n in names], given)
        extents = {a: n for o in bound.values() for a, n in o.extents.items() if a[0] == pack}
        axes = sorted(extents, key=lambda a: a[1])
        space = layout.iterate(axes, extents, list(bound.values()), reorder=False)
        count = len(space.sizes)
        if count > most:
            raise TooManyDims(f"{self.name}: {count} dims that do not merge; a kernel takes {most}")
        steps = {n: tuple(o.strides.get(g[-1], 0) for g in space.dims) for n, o in bound.items()}
        return space.sizes + (1,) * (most - count), {n: t + (0,) * (most - count) for n, t in steps.items()}

    # -------------------------------------------------------------------------------- planning

    def output_dtype(self, tensor: Tensor, given: Mapping[str, Given], compute: str) -> str:
        """As of generated ops; a result of class `float` is in the dtype of the float inputs, or else of the params."""
        if tensor.dtype != "float":
            return super().output_dtype(tensor, given, compute)
        voters = [t for t in self.inputs if t.dtype == "float" and given.get(t.name) is not None]
        return self._result_dtype(given, voters or self.params)

    def _key(self, direction: str, given: Mapping[str, Given], *more: Any) -> Any:
        numbers = tuple((n, told_apart(v)) for n, v in given.items() if isinstance(v, (int, float)))
        return (super()._key(direction, given, *more), self.attrs_key(), numbers)

    def _plan_forward(self, given: Mapping[str, Given]) -> Plan:
        there = [t for t in self.tensors if isinstance(given.get(t.name), Meta)]
        extents = self.extents(self.bind(there, given), there)
        known = frozenset(n for t in there for n in layout.names(t.dims))
        compute = self.compute_dtype(given)
        made = {}
        for tensor in (*self.outputs, *self.saved):
            shape = self._shape(tensor, extents, known)
            if shape is None:
                why = (
                    ": `...` alone may be broadcast, unless it is declared `broadcast=False`"
                    if tensor.broadcast
                    else ""
                )
                raise ShapeError(f"{self.name}: the shape of `{tensor.name}` does not follow from its arguments{why}")
            made[tensor.name] = Meta.dense(self.output_dtype(tensor, given, compute), shape)
        updated = self.updated(given)
        written = [n for n, m in {**given, **made}.items() if (n in made or n in updated) and has_elements(m)]
        if written:
            self._require_dense(given)
        launches = self.lower(given, made) if written else ()
        metas = {n: m for n, m in {**given, **made}.items() if isinstance(m, Meta)}
        own = {t.name for t in (*self.tensors, *self.outputs, *self.saved)}
        launches, scratch = self._checked("lower", launches, metas, own, written)
        outputs, saved = ({t.name: made[t.name] for t in ts} for ts in (self.outputs, self.saved))
        return Plan(outputs, scratch, launches, compute, (), saved, tuple(updated), {**metas, **scratch})

    def _require_dense(self, given: Mapping[str, Given]) -> None:
        """Raises where an operand is not row-major, unless the kernels take strides.

        Raises:
            TooManyDims: of what may be copied.
            ValueError: of a buffer that is written in place.
        """
        if self.strided:
            return
        updated = self.updated(given)
        for name, meta in given.items():
            if not isinstance(meta, Meta) or is_dense(meta.shape, meta.strides):
                continue
            lies = f"{self.name}: `{name}` is of shape {meta.shape} with strides {meta.strides}"
            if name in updated:
                raise ValueError(f"{lies}; it is written in place, and these kernels take dense memory")
            raise TooManyDims(f"{lies}; its kernels take dense memory: copy it, or declare `strided = True`")

    def _many(self, given: Mapping[str, Given]) -> dict[str, tuple[int, ...]]:
        """What is not dense is copied, with its shape: nothing is stretched. What is written in place is not copied."""
        metas = {n: m for n, m in given.items() if isinstance(m, Meta) and n not in self.updates}
        return {n: m.shape for n, m in metas.items() if not is_dense(m.shape, m.strides)}

    def _checked(self, method: str, launches: Sequence[Launch], metas: Mapping[str, Meta], there: Collection[str],
                 written: Sequence[str]) -> tuple[tuple[Launch, ...], dict[str, Meta]]:  # fmt: skip
        """The launches, less what is absent, and their scratch.

        Args:
            there: the tensors that they may name, of which those in `metas` have memory.
            written: what must be written; of the others only scratch may be.
        """
        if not isinstance(launches, (list, tuple)) or not all(isinstance(x, Launch) for x in launches):
            raise TypeError(f"{self.name}: `{method}` gives {launches!r:.60}; it gives a list of launches")
        scratch = self._scratch(launches, metas)
        fresh = {*written, *scratch} - {*self.updates}
        """What holds nothing yet."""
        done: set[str] = set()
        for launch in launches:
            used = accesses(launch.kernel.function)
            for param, name in launch.pointers.items():
                where = f"{self.name}: kernel `{launch.kernel.function.fn.__name__}`: `{param}`: "
                if name not in there and name not in scratch:
                    raise TypeError(where + self._stranger(name, metas))
                if (
                    param in used.written
                    and name not in written
                    and name not in scratch
                    and self._has_memory(name, metas)
                ):
                    raise TypeError(where + self._not_to_write(name))
                if param in used.read_first and name in fresh - done:
                    raise TypeError(f"{where}it reads `{name}`, which nothing has written before")
            done |= {n for p, n in launch.pointers.items() if p in used.written}
        for name in written:
            if name not in done:
                raise TypeError(f"{self.name}: no launch of `{method}` writes `{name}`")
        memory = {*metas, *scratch}
        kept = (replace(x, pointers={p: n for p, n in x.pointers.items() if n in memory}) for x in launches)
        return tuple(kept), scratch

    def _scratch(self, launches: Sequence[Launch], metas: Mapping[str, Meta]) -> dict[str, Meta]:
        scratch: dict[str, Meta] = {}
        for launch in launches:
            for name, meta in launch.scratch.items():
                if name in metas or scratch.setdefault(name, meta) != meta:
                    raise TypeError(f"{self.name}: the scratch `{name}` has the name of another tensor")
        return scratch

    @staticmethod
    def _has_memory(name: str, metas: Mapping[str, Meta]) -> bool:
        """What is absent has a null pointer, and what has no elements is not written, whatever a kernel says."""
        return name in metas and math.prod(metas[name].shape) > 0

    def _stranger(self, name: str, metas: Mapping[str, Meta]) -> str:
        """Why a launch may not name a tensor."""
        return f"`{name}` is no tensor of the op"

    def _not_to_write(self, name: str) -> str:
        """Why a launch may not write a tensor."""
        if name in self.updates:
            return f"it writes the buffer `{name}`, which `updates` leaves as it is under these choices"
        if name in self.buffer_names:
            return f"it writes the buffer `{name}`, which is not in `updates`"
        return f"it writes `{name}`, which is not its to write"

    def _tensor(self, name: str) -> Tensor:
        """The declaration of a tensor, or for `d<name>` that of the tensor whose gradient it is."""
        every = {t.name: t for t in (*self.tensors, *self.outputs, *self.saved)}
        return every[name if name in every else name[1:]]


def _value(where: str, param: Param, value: Any) -> Any:
    """An argument that is no pointer, as the kernel's parameter takes it."""
    if param.role == "constexpr":
        return value
    if param.role == "tuple":
        if value is None:
            return None
        if not isinstance(value, tuple) or len(value) != param.length or not all(type(v) is int for v in value):
            raise TypeError(
                f"{where}: `{param.name}` is {value!r:.60}; it takes a tuple of {param.length} whole numbers"
            )
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float) if param.role == "f64" else int):
        kind = "a number" if param.role == "f64" else "a whole number"
        raise TypeError(f"{where}: `{param.name}` is {value!r:.40}; it takes {kind}")
    return float(value) if param.role == "f64" else value


def _check_options(where: str, warps: Any, stages: Any, unknown: Sequence[str]) -> None:
    """Holds what Triton is told beside the arguments to what it takes; `unknown` are arguments that the kernel has not."""
    for name in unknown:
        if name in ("num_warps", "num_stages"):
            raise TypeError(f"{where}: `{name}` is called `{name.removeprefix('num_')}` here")
    for name, value in (("warps", warps), ("stages", stages)):
        if type(value) is not int:
            raise TypeError(f"{where}: `{name}` is {value!r:.40}; it takes a whole number")
    if warps not in _WARPS:
        raise ValueError(f"{where}: `warps` is {warps}; it takes {', '.join(map(str, _WARPS))}")
    if stages < 0:
        raise ValueError(f"{where}: `stages` is {stages}; it takes 1 and more, or 0: as Triton has it")


def _check_scratch(where: str, scratch: Scratch) -> None:
    if scratch.dtype not in ITEM_SIZES:
        raise TypeError(
            f"{where}: the scratch `{scratch.name}` is of dtype {scratch.dtype!r:.40}; dtypes: {', '.join(ITEM_SIZES)}"
        )
    shape = scratch.shape
    if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
        raise TypeError(f"{where}: the scratch `{scratch.name}` is of shape {shape!r:.60}; it takes a tuple of extents")


def _grid(where: str, grid: Any) -> tuple[int, int, int]:
    given = grid if isinstance(grid, (tuple, list)) else (grid,)
    if not all(type(n) is int for n in given):
        raise TypeError(f"{where}: a grid of {grid!r:.60}; it is a whole number, or a tuple of up to three")
    whole = (*given, 1, 1, 1)[:3]
    if not 1 <= len(given) <= 3 or not all(1 <= n <= most for n, most in zip(whole, _MOST_PROGRAMS)):
        raise ValueError(f"{where}: a grid of {grid}; a device takes 1 to {' by '.join(map(str, _MOST_PROGRAMS))}")
    return whole[0], whole[1], whole[2]


def has_elements(meta: Given) -> bool:
    """Whether it is a tensor that is not empty."""
    return isinstance(meta, Meta) and math.prod(meta.shape) > 0
