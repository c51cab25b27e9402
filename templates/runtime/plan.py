"""What a call becomes: declared tensors, what is known of given ones, kernels, stages and launches. No torch here.

An op is a tuple of stages a direction. Each stage is one kernel, or a kernel and one that finishes what its programs have; it
allocates what it is the first to name, and adds its launches to the call.

    Call(op, given, declared, wanted={"y": "f32"})  --stage.plan(call)-->  call.outputs, call.scratch, call.launches
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from .abi import KernelAbi
from .layout import Operand, ShapeError
from .views import FLOATS, INTS, dense_strides

if TYPE_CHECKING:
    from .layout import Axis
    from .op import RuntimeOp

WARPS = 4
_REDUCED = 2048
"""Bytes of shared memory that sums over the warps of a program take."""
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
    """More merged dims than a kernel takes, as a kernel of dense memory alone: the caller copies the operands that are not dense."""


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
    indexes: str = ""
    """The axis whose coordinates its elements are."""
    unless: str | int = ""
    """The attr, or the number, whose value an element may have instead."""
    chosen: tuple[tuple[str, tuple[Any, ...], str], ...] = ()
    """Other dims under a choice: its name, its values, and the dims."""
    init: float | str | None = None
    """What a param, a buffer or state is filled with at first, where the spec says it: a number, or of state the attr that has it."""
    when: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    """Of state and outputs: the choices under which it is there."""

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

    @staticmethod
    def dense(dtype: str, shape: Sequence[int]) -> Meta:
        """Of a row-major tensor."""
        return Meta(dtype, tuple(shape), dense_strides(shape))


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
class Limits:
    """What a device allows a program."""

    warps: int = 32
    shared: int = 64 * 1024
    """Bytes of shared memory; if nothing is known, what every device has."""


@dataclass(frozen=True)
class Launch:
    """One kernel launch. `pointers` maps pointer parameters to names of tensors or scratch; `values` has the rest."""

    kernel: Kernel
    grid: tuple[int, int, int]
    pointers: Mapping[str, str]
    values: Mapping[str, Any]
    warps: int = WARPS
    stages: int = 0
    """Steps of a loop whose loads are under way at a time; 0 leaves it to Triton."""
    scratch: Mapping[str, Meta] = field(default_factory=dict)
    """Scratch that a hand-written kernel asks for, by the names in `pointers`."""
    stage_bytes: int = 0
    """Bytes of shared memory that each of a kernel's `STAGES` takes beyond the first: on a device with less there are fewer."""

    def arguments(self, tensors: Mapping[str, Any], numbers: Mapping[str, float]) -> dict[str, Any]:
        """Every argument by parameter name, pointers looked up in `tensors` (absent: None)."""
        named = {p: tensors.get(name) for p, name in self.pointers.items()}
        absent = {p.name: None for p in self.kernel.abi.params if p.role == "ptr"}
        return {**absent, **numbers, **self.values, **named}

    def on(self, limits: Limits) -> Launch:
        """The launch as a device takes it."""
        values, warps = self.values, min(self.warps, limits.warps)
        if self.stage_bytes:
            most = max(1, 1 + (limits.shared - _REDUCED) // self.stage_bytes)
            if values["STAGES"] > most:
                values = {**values, "STAGES": most}
        return self if values is self.values and warps == self.warps else replace(self, values=values, warps=warps)

    @property
    def options(self) -> dict[str, Any]:
        """What Triton is told beside the arguments. Fusion into fma is said, for its default differs between versions."""
        stages = {"num_stages": self.stages} if self.stages else {}
        return {"num_warps": self.warps, "enable_fp_fusion": True, **stages}


@dataclass(frozen=True)
class Plan:
    """What one call allocates and launches, in order."""

    outputs: Mapping[str, Meta]
    scratch: Mapping[str, Meta] = field(default_factory=dict)
    launches: tuple[Launch, ...] = ()
    compute: str = "f32"
    zeros: tuple[str, ...] = ()
    """Outputs that nothing is summed into: filled with zeros by the caller."""
    saved: Mapping[str, Meta] = field(default_factory=dict)
    """What the forward allocates and writes beside its outputs for the backward, where a gradient is wanted."""
    updated: tuple[str, ...] = ()
    """Tensors of the caller that are written in place."""
    metas: Mapping[str, Meta] = field(default_factory=dict)
    """Every tensor that the launches may name: given, allocated and scratch."""


@dataclass
class Call:
    """One direction of one call while it is planned."""

    op: RuntimeOp
    given: dict[str, Given]
    """By name: arguments; in the backward outputs, residuals and cotangents too; then what stages have allocated."""
    declared: dict[str, Tensor]
    """Every tensor that a stage may read or write, by the name its kernels have for it."""
    wanted: dict[str, str]
    """What is to be written, scratch among it, and the dtype of each."""
    compute: str
    multiprocessors: int = 0
    outputs: dict[str, Meta] = field(default_factory=dict)
    scratch: dict[str, Meta] = field(default_factory=dict)
    launches: list[Launch] = field(default_factory=list)
    zeros: list[str] = field(default_factory=list)
    of_gradients: ClassVar[bool] = False
    """Whether what is written are gradients: they have the axes of their tensors, and are summed over all others."""

    @cached_property
    def choices(self) -> dict[str, Any]:
        """The compile-time constants of its kernels."""
        return self.op.chosen(self.given)

    def add_up(self, name: str, parts_name: str, parts: int, n_kept: int, values: Mapping[str, Any]) -> Launch:
        """The launch that adds up what programs have of a sum over what was broadcast."""
        raise TypeError(f"{self.op.name}: only gradients are summed over what was broadcast, and `{name}` is none")

    def bound(self) -> dict[str, Operand]:
        """Extents and strides of everything that is given, by axis."""
        there = [t for n, t in self.declared.items() if isinstance(self.given.get(n), Meta)]
        return self.op.bind(there, self.given)

    def extents(self, bound: Mapping[str, Operand]) -> dict[Axis, int]:
        return self.op.extents(bound, [self.declared[n] for n in bound])

    def metas(self) -> dict[str, Meta]:
        """Everything that there is when all is planned."""
        every = {**self.given, **self.outputs, **self.scratch}
        return {n: m for n, m in every.items() if isinstance(m, Meta)}

    def allocated(self, name: str, meta: Meta) -> None:
        """Takes in what a stage has allocated."""
        own = {t.name for t in self.op.scratch} - {t.name for t in self.op.saved}
        (self.scratch if name in own else self.outputs)[name] = meta
        self.given[name] = meta


@dataclass(frozen=True)
class Stage(ABC):
    """A kernel of an op and how it is launched."""

    kernel: Kernel
    when: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Choices and the values under which it has something to do; by a pointer's name, whether there must be such a tensor."""
    elementwise: ClassVar[bool] = False
    """Whether every element of what it writes comes of one element of each operand, or is a sum of such."""

    @property
    def names(self) -> frozenset[str]:
        """The tensors that it reads or writes."""
        out = set()
        for param in self.kernel.abi.params:
            if param.role == "ptr":
                stem = param.name.removesuffix("_ptr")
                out |= {stem, stem.removesuffix("_sum"), stem.removesuffix("_part")}
        return frozenset(out)

    def runs(self, choices: Mapping[str, Any]) -> bool:
        return all(choices.get(name) in values for name, values in self.when.items())

    @abstractmethod
    def plan(self, call: Call) -> None:
        """Allocates what of `call.wanted` it is the first to name, and adds its launches."""


def active(
    stages: Sequence[Stage], wanted: Sequence[str], scratch: Sequence[str], choices: Mapping[str, Any]
) -> list[Stage]:
    """The stages that write something wanted, or what such a stage reads."""
    needed, out = set(wanted), []
    for stage in reversed(stages):
        if stage.runs(choices) and needed & stage.names:
            out.append(stage)
            needed |= {n for n in scratch if n in stage.names}
    return out[::-1]


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)
