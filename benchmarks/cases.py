"""What is measured: every op that has an emitted test, its attrs, its operands in each layout, and the bytes it must move.

The emitted tests are the only list of ops: each states the function, the op class, the domains and the reference in torch.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import itertools
import math
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from generated.runtime.layout import parse_dims
from generated.runtime.plan import Meta
from generated.runtime.testing import TORCH, Case
from generated.runtime.views import FLOATS, INTS, ITEM_SIZES, dense_strides

ROOT = Path(__file__).resolve().parent.parent
DTYPES = ("bf16", "f16", "f32")
LAYOUTS = ("dense", "transposed", "mixed", "unaligned", "row", "column")
DIRECTIONS = ("forward", "backward", "training")
PEERS = ("pullback", "eager", "compiled")
MAIN_MB = 512
"""The size at which layouts are compared and compiled torch is measured."""
WIDTH = 4096
"""The extent of a row where an attr gives it."""
_PAD = 16
_OTHER_EXTENT = 4


@dataclass(frozen=True)
class Entry:
    """One op with its attrs."""

    name: str
    op: str
    case: Case
    attrs: Mapping[str, Any]

    @property
    def tensors(self) -> tuple[Any, ...]:
        return self.case.tensors

    @functools.cached_property
    def instance(self) -> Any:
        """The op as its function makes it: defaults and attrs."""
        public = {t.public for t in self.tensors}
        known = inspect.signature(self.case.function).parameters
        return self.case.op(**{n: self.attrs.get(n, p.default) for n, p in known.items() if n not in public})

    @functools.cached_property
    def layouts(self) -> tuple[str, ...]:
        wide = [t for t in self.tensors if len(self.shape(t, 2, 2)) > 1]
        out = ["dense"]
        out += ["transposed"] if wide else []
        out += ["mixed"] if len(wide) > 1 else []
        out += ["unaligned"]
        out += ["row", "column"] if len(self._stretching) > 1 else []
        return tuple(out)

    @property
    def sizes(self) -> list[str]:
        """Attrs that give the extents of a row."""
        return [n for n, kind in self.case.op.kinds.items() if kind == "shape"]

    @property
    def _stretching(self) -> list[Any]:
        return [t for t in self.tensors if t.broadcast]

    def dtypes(self, chosen: Iterable[str]) -> tuple[str, ...]:
        """Those of `chosen`, or the op's own dtype where it takes no floats."""
        if any(set(t.dtypes) & set(FLOATS) for t in self.tensors):
            return tuple(chosen)
        return (_kind(self.tensors[0], ""),)

    def shape(self, tensor: Any, rows: int, cols: int, layout: str = "dense") -> tuple[int, ...]:
        """Of a tensor, so that `...` and named axes together are a matrix of rows x cols."""
        return self._shape(tensor, rows, cols, layout, self._alike)

    @functools.cached_property
    def _alike(self) -> bool:
        """Whether the op refuses named axes of different extents."""
        shapes = {t.name: self._shape(t, 2, 2 * _OTHER_EXTENT, "dense", False) for t in self.tensors}
        metas = {t.name: Meta(_kind(t, "f32"), shapes[t.name], dense_strides(shapes[t.name])) for t in self.tensors}
        try:
            self.instance.output_metas(metas)
        except ValueError as error:
            return " requires " in str(error)
        return False

    def _shape(self, tensor: Any, rows: int, cols: int, layout: str, alike: bool) -> tuple[int, ...]:
        for name in self.sizes:
            rows, cols = max(1, rows * cols // self.attrs[name]), self.attrs[name]
        placed = self.instance.axis_position()
        part = placed[0] if placed else ""  # a pack that is placed is a part of `...`
        named = self._named(part)
        parts = max([1, *(math.prod(f or 1 for f in d.fixed) for t in self.tensors for d in parse_dims(t.dims))])
        shape: list[int] = []
        for dim in parse_dims(tensor.dims):
            if dim.pack and dim.axes[0] == "...":
                shape += (rows,) if named else (rows, cols)
            elif not dim.pack or dim.axes[0] != part:
                known = {a: cols // parts if alike or a == named[-1] else _OTHER_EXTENT for a in named}
                shape.append(math.prod(f or known[a] for a, f in zip(dim.axes, dim.fixed)))
        if layout in ("row", "column") and tensor is self._stretching[-1]:
            return tuple(shape[-1:]) if layout == "row" else (*shape[:-1], 1)
        return tuple(shape)

    def _named(self, placed: str) -> list[str]:
        """Axes that are neither `...`, nor the pack that an attr places, nor of fixed extent."""
        dims = [d for t in self.tensors for d in parse_dims(t.dims) if not d.pack or d.axes[0] not in ("...", placed)]
        return [a for d in dims for a, f in zip(d.axes, d.fixed) if not f]

    def extent(self, axis: str, cols: int) -> int:
        """Of a named axis of extents that nothing fixes."""
        return cols if self._alike or axis == self._named("")[-1] else _OTHER_EXTENT

    def names(self) -> tuple[str, ...]:
        return tuple(t.name for t in self.tensors)

    def differentiable(self, given: Mapping[str, torch.Tensor]) -> list[str]:
        return [n for n in self.case.op.gradients if given[n].is_floating_point()]


# ---------------------------------------------------------------------------------------------- entries


def entries(folder: Path = ROOT / "tests" / "generated", only: Sequence[str] = ()) -> list[Entry]:
    """One for each op and each combination of its choices; `only` names ops or entries."""
    found = []
    for path in sorted(folder.glob("test_*.py")):
        module = _loaded(path)
        case, attrs = getattr(module, "CASE", None), getattr(module, "ATTRS", [{}])
        if isinstance(case, Case):  # steps have a benchmark of their own
            found += variants(path.stem.removeprefix("test_"), case, attrs[0])
    unknown = [n for n in only if not any(n in (e.op, e.name) for e in found)]
    if unknown:
        raise ValueError(f"no such op: {', '.join(unknown)}")
    return [e for e in found if not only or e.op in only or e.name in only]


def variants(op: str, case: Case, base: Mapping[str, Any]) -> list[Entry]:
    kinds = case.op.kinds
    base = {**base, **{n: WIDTH if kinds[n] == "shape" else _OTHER_EXTENT for n in case.op.sized.values()}}
    choices = {n: kind for n, kind in kinds.items() if isinstance(kind, tuple)}
    limits = _limits(case, base)
    out = []
    for values in itertools.product(*choices.values()):
        shown = {**dict(zip(choices, values)), **limits}
        words = ", ".join(f"{n}={v}" for n, v in shown.items())
        out.append(Entry(f"{op}({words})" if words else op, op, case, {**base, **shown}))
    return out


def _limits(case: Case, base: Mapping[str, Any]) -> dict[str, float]:
    """Numbers for attrs that may be None and are: without them an op such as a clamp has nothing to do."""
    names = [n for n, kind in case.op.kinds.items() if kind == "float?" and base.get(n) is None]
    defaults = inspect.signature(case.function).parameters
    names = [n for n in names if n in base or defaults[n].default is None]
    out = {}
    for k, name in enumerate(names):
        low, high = case.domains.get(name, (-math.inf, math.inf))
        out[name] = (low + high) / 2 if math.isfinite(low + high) else k - (len(names) - 1) / 2
    return out


@functools.cache
def _loaded(path: Path) -> types.ModuleType:
    _need_pytest()
    spec = importlib.util.spec_from_file_location(f"_benchmarked_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # torch.compile looks a reference's module up by name
    spec.loader.exec_module(module)
    return module


def _need_pytest() -> None:
    """The tests import pytest for their marks alone: where it is not installed, a stand-in that marks nothing."""
    if importlib.util.find_spec("pytest") is not None:
        return
    stand_in: Any = types.ModuleType("pytest")
    stand_in.__spec__ = importlib.util.spec_from_loader("pytest", None)

    class Mark:
        def __getattr__(self, name: str) -> Callable[..., Any]:
            return lambda *a, **k: lambda function: function

    stand_in.mark = Mark()
    sys.modules["pytest"] = stand_in


# ---------------------------------------------------------------------------------------------- operands


def extents(mb: float, dtype: str) -> tuple[int, int]:
    """Rows and columns of a matrix of so many MiB, near a square."""
    count = int(mb * 2**20) // ITEM_SIZES[dtype]
    cols = 2 ** ((count.bit_length()) // 2)
    return count // cols, cols


def _kind(tensor: Any, dtype: str) -> str:
    if dtype in tensor.dtypes:
        return dtype
    return "i64" if "i64" in tensor.dtypes else str(tensor.dtypes[0])


class Operands:
    """Operands of one op, dtype and size. All layouts and all peers see the same memory."""

    def __init__(self, entry: Entry, dtype: str, rows: int, cols: int, sets: int, device: str) -> None:
        self.entry, self.dtype, self.rows, self.cols, self.sets, self.device = entry, dtype, rows, cols, sets, device
        torch.manual_seed(0)
        self._buffers = [{t.name: self._drawn(t) for t in entry.tensors} for _ in range(sets)]

    @staticmethod
    def sets_for(entry: Entry, dtype: str, rows: int, cols: int) -> int:
        """How many are rotated: together well past the L2, and two at least."""
        each = sum(math.prod(entry.shape(t, rows, cols)) * ITEM_SIZES[_kind(t, dtype)] for t in entry.tensors)
        return max(2, min(64, -(-192 * 2**20 // max(each, 1))))

    def _drawn(self, tensor: Any) -> torch.Tensor:
        kind = _kind(tensor, self.dtype)
        count = math.prod(self.entry.shape(tensor, self.rows, self.cols)) + _PAD
        low, high = self.entry.case.domains.get(tensor.name, (-math.inf, math.inf))
        if kind == "bool":
            return torch.rand(count, device=self.device) < 0.5
        if tensor.indexes:
            below = self.entry.extent(tensor.indexes, self.cols)
            return torch.randint(below, (count,), device=self.device, dtype=TORCH[kind])
        if kind in INTS:
            return torch.randint(
                int(max(low, -9)), int(min(high, 9)) + 1, (count,), device=self.device, dtype=TORCH[kind]
            )
        if math.isfinite(low) and math.isfinite(high):  # off the ends, which a rounding would reach
            unit = torch.rand(count, device=self.device, dtype=TORCH[kind])
            return unit.mul_(0.9 * (high - low)).add_(low + 0.05 * (high - low))
        drawn = torch.randn(count, device=self.device, dtype=TORCH[kind])
        if math.isfinite(low):
            return drawn.abs_().add_(low + 0.05)
        return drawn.abs_().neg_().add_(high - 0.05) if math.isfinite(high) else drawn

    def views(self, layout: str) -> list[dict[str, torch.Tensor]]:
        """The operands of each set by the spec's names."""
        return [{t.name: self._view(t, flat[t.name], layout) for t in self.entry.tensors} for flat in self._buffers]

    def _view(self, tensor: Any, flat: torch.Tensor, layout: str) -> torch.Tensor:
        shape = self.entry.shape(tensor, self.rows, self.cols, layout)
        count = math.prod(shape)
        if layout == "unaligned":
            return flat[1 : count + 1].view(shape)
        turned = layout == "transposed" or (layout == "mixed" and tensor is self._first_wide())
        if turned and len(shape) > 1:
            return flat[:count].view(shape[::-1]).permute(*reversed(range(len(shape))))
        return flat[:count].view(shape)

    def _first_wide(self) -> Any:
        return next(t for t in self.entry.tensors if len(self.entry.shape(t, 2, 2)) > 1)


# ---------------------------------------------------------------------------------------------- bytes


def size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def moved(op: Any, direction: str, given: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> int:
    """The bytes that an op cannot do without: what is read counts once, and so does what is written.

    Backward: residuals and cotangents are read, gradients are written; 0 where every gradient is a cotangent as it is.
    Training is forward, with what it keeps, and backward one after the other, and 0 where backward is.
    """
    if direction == "training":
        back = moved(op, "backward", given, outputs)
        return back and moved(op, "forward", given, outputs) + sum(_saved(op, given).values()) + back
    if direction == "forward":
        return sum(map(size, given.values())) + sum(map(size, outputs.values()))
    launched = [n for n in op.gradients if given[n].is_floating_point() and not _passes(op, n, given, outputs)]
    if not launched:
        return 0
    launched = [n for n in launched if not _shared(op, n, launched, given)]
    everything = {**given, **outputs}
    stages = getattr(op, "backward", ())
    pointers = {p.name for s in stages for p in s.kernel.abi.params} if stages else None
    cotangents = [
        n for n, o in outputs.items() if o.is_floating_point() and (pointers is None or f"d{n}_ptr" in pointers)
    ]
    names = [*op.residuals, *cotangents, *launched]  # a cotangent is as large as its output, a gradient as its input
    saved = _saved(op, given)
    there = [n for n in names if n in saved or n in everything]  # some statistics are kept under some choices alone
    return sum(saved[n] if n in saved else size(everything[n]) for n in there)


def _saved(op: Any, given: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The bytes of each tensor that a forward makes for a backward."""
    kinds = {v: k for k, v in TORCH.items()}
    metas = {n: Meta(kinds[v.dtype], tuple(v.shape), v.stride()) for n, v in given.items()}
    kept = op.plan_forward(metas).saved if getattr(op, "saved", ()) else {}
    return {n: math.prod(m.shape) * ITEM_SIZES[m.dtype] for n, m in kept.items()}


def _shared(op: Any, name: str, launched: Sequence[str], given: Mapping[str, torch.Tensor]) -> bool:
    other = getattr(op, "equals", {}).get(name)
    return other in launched and (given[other].shape, given[other].dtype) == (given[name].shape, given[name].dtype)


def _passes(op: Any, name: str, given: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> bool:
    cotangent = outputs.get(op.passes().get(name, "").removeprefix("d"))
    return cotangent is not None and (cotangent.shape, cotangent.dtype) == (given[name].shape, given[name].dtype)
