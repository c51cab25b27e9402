"""A kernel's parameters, once: order, names, roles and C types.

A `KernelAbi` is read off the kernel's `def` line; what an `ArgVisitor` receives and what the direct call passes follow it, so
the three agree by construction. The C layout is 8 bytes a parameter in this order, without padding:
pointers, i64 and f64 alike; constexprs are not passed, a tuple of sizes or strides passes its items one by one, an absent
pointer is 0.

    KernelAbi.of(kernel).names   # ("x_ptr", "x_strides", "y_ptr", "sizes", "n", ...)
"""

from __future__ import annotations

import inspect
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

_TUPLES = {"_strides": 4, "patch_sizes": 3, "sizes": 6, "_steps": 8, "extents": 8}
"""Items of the tuples, by how their names end: strides of four dims, sizes of a patch, three extents with their inverses; strides and
extents of eight dims."""


_ROLES = {"constexpr": "constexpr", "int64": "i64", "float64": "f64", "fp64": "f64"}
"""Roles of what is no pointer and no tuple, by its annotation: as text, or as Triton spells the type itself."""


def _annotated(annotation: Any) -> str:
    """The last word of an annotation, whether it is text, a class or a value."""
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return text.rpartition(".")[2]


@dataclass(frozen=True)
class Param:
    """One parameter. `role` is ptr, i64, f64, tuple or constexpr."""

    name: str
    role: str
    length: int = 1
    """Items of a tuple."""


@dataclass(frozen=True)
class KernelAbi:
    """The ordered parameters of one kernel."""

    params: tuple[Param, ...]

    @staticmethod
    def of(function: Any) -> KernelAbi:
        """Read off a jit function's own `def` line: names say pointers, strides and sizes, annotations the rest.

        Raises:
            TypeError: of a number without an annotation, or with another one, naming kernel and argument: Triton would make
                a constant of an int of 1, and a float32 of a float.
        """
        params = []
        for name, param in inspect.signature(function.fn).parameters.items():
            if name.endswith("_ptr"):
                params.append(Param(name, "ptr"))
            elif length := next((n for end, n in _TUPLES.items() if name.endswith(end)), 0):
                params.append(Param(name, "tuple", length))
            elif role := _ROLES.get(_annotated(param.annotation)):
                params.append(Param(name, role))
            else:
                raise TypeError(
                    f"{function.fn.__name__}: `{name}` needs an annotation: tl.int64, tl.float64 or tl.constexpr"
                )
        return KernelAbi(tuple(params))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.params)

    @property
    def constexprs(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.params if p.role == "constexpr")

    @property
    def format(self) -> str:
        """The C layout, as `struct` spells it."""
        words = {"ptr": "Q", "i64": "q", "f64": "d", "constexpr": ""}
        return "<" + "".join("q" * p.length if p.role == "tuple" else words[p.role] for p in self.params)

    def call(self, values: Mapping[str, Any]) -> list[Any]:
        """The arguments of a direct call, in order. KeyError names one that is missing."""
        return [values[p.name] for p in self.params]

    def visit(self, values: Mapping[str, Any], visitor: ArgVisitor) -> None:
        """Hands every run-time argument to the visitor under the kernel's own name for it.

        An absent tensor is a null pointer; the strides of a dense tensor, and the sizes when all are dense, are zeros.
        """
        for param in self.params:
            value = values[param.name]
            if param.role == "ptr":
                visitor.visit_ptr(param.name, 0 if value is None else int(getattr(value, "address", value)))
            elif param.role == "tuple":
                for k, item in enumerate(value if value is not None else (0,) * param.length):
                    visitor.visit_i64(f"{param.name}[{k}]", int(item))
            elif param.role == "f64":
                visitor.visit_f64(param.name, float(value))
            elif param.role == "i64":
                visitor.visit_i64(param.name, int(value))

    def mismatch(self, arg_names: Sequence[str]) -> str:
        """What differs between these parameters and a kernel's own, or an empty string."""
        ours, theirs = list(self.names), list(arg_names)
        missing, surplus = [n for n in theirs if n not in ours], [n for n in ours if n not in theirs]
        if missing or surplus:
            return f"missing: {', '.join(missing) or 'none'}; surplus: {', '.join(surplus) or 'none'}"
        swapped = [f"{a} where the kernel has {b}" for a, b in zip(ours, theirs) if a != b]
        return f"swapped: {'; '.join(swapped)}" if swapped else ""


class ArgVisitor(Protocol):
    """Receives each argument with the kernel parameter's name."""

    def visit_ptr(self, name: str, address: int) -> None: ...

    def visit_i64(self, name: str, value: int) -> None: ...

    def visit_f64(self, name: str, value: float) -> None: ...


class Recorder:
    """Keeps what it is told: (kind, name, value) in order."""

    def __init__(self) -> None:
        self.visits: list[tuple[str, str, int | float]] = []

    def visit_ptr(self, name: str, address: int) -> None:
        self.visits.append(("ptr", name, address))

    def visit_i64(self, name: str, value: int) -> None:
        self.visits.append(("i64", name, value))

    def visit_f64(self, name: str, value: float) -> None:
        self.visits.append(("f64", name, value))


class PackedC:
    """The C layout: little-endian, 8 bytes an argument, no padding."""

    def __init__(self) -> None:
        self.buffer = bytearray()

    def visit_ptr(self, name: str, address: int) -> None:
        self.buffer += struct.pack("<Q", address)

    def visit_i64(self, name: str, value: int) -> None:
        self.buffer += struct.pack("<q", value)

    def visit_f64(self, name: str, value: float) -> None:
        self.buffer += struct.pack("<d", value)
