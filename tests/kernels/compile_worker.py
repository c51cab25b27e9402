"""Compiles kernels of the generated package for a target: `compile_worker.py cuda:90 bf16 [OP...]`. A JSON line a kernel."""

from __future__ import annotations

import importlib
import inspect
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).parents[2]))

import generated  # noqa: E402
from generated.runtime.layout import parse_dims  # noqa: E402
from generated.runtime.op import RuntimeOp  # noqa: E402
from generated.runtime.plan import Launch, Limits, Meta, Tensor  # noqa: E402
from generated.runtime.stepwise import BLOCK, StepOp, norm_launches  # noqa: E402
from generated.runtime.views import dense_strides  # noqa: E402

TYPES = {"bf16": "*bf16", "f32": "*fp32", "f64": "*fp64", "bool": "*i1", "i32": "*i32", "i64": "*i64"}
TABLES = {
    "work": "i32", "table": "i64", "numbers": "f64", "scale": "f32", "found_inf": "f32", "part": "f64", "limit": "f64", "unscale": "f32",
    "norm": "f32", "factor": "f32",
}  # fmt: skip
"""What the launches of steps take, with their dtypes."""


def allowed(target: GPUTarget) -> Limits:
    """What the targets that are compiled for allow a program: 227 KiB of shared memory on sm_90, 64 KiB on gfx942."""
    return Limits(1024 // target.warp_size, (227 if target.backend == "cuda" else 64) * 1024)


def signature(launch: Launch, metas: dict[str, Meta]) -> tuple[dict[str, Any], dict[Any, Any], dict[Any, Any]]:
    """What Triton's own launcher would make of the arguments: types, constants, divisibility."""
    values = launch.arguments({n: n for n in launch.pointers.values()}, {})
    types: dict[str, Any] = {}
    constants: dict[Any, Any] = {}
    attrs: dict[Any, Any] = {}
    for k, param in enumerate(launch.kernel.abi.params):
        value = values.get(param.name, 0.0)
        if param.role == "constexpr" or (value is None):
            types[param.name], constants[(k,)] = "constexpr", value
        elif param.role == "ptr":
            types[param.name] = TYPES[metas[value].dtype]
            attrs[(k,)] = [["tt.divisibility", 16]]
        elif param.role == "tuple":
            types[param.name] = tuple("constexpr" if v == 1 else "i32" if v < 2**31 else "i64" for v in value)
            constants |= {(k, j): 1 for j, v in enumerate(value) if v == 1}
            attrs |= {(k, j): [["tt.divisibility", 16]] for j, v in enumerate(value) if v % 16 == 0}
        else:
            types[param.name] = "fp64" if param.role == "f64" else "i64"
            if param.role == "i64" and isinstance(value, int) and value % 16 == 0:
                attrs[(k,)] = [["tt.divisibility", 16]]
    return types, constants, attrs


def shape_of(tensor: Tensor, placed: str, named: bool) -> tuple[int, ...]:
    """64 by 128; beside named dims, 128 each, the others are 64."""
    out: list[int] = []
    for dim in parse_dims(tensor.dims):
        if not (dim.pack and dim.axes[0] == placed):
            out += ([64] if named else [64, 128]) if dim.pack and dim.axes[0] == "..." else [128]
    return tuple(out)


def launches(op: RuntimeOp, dtype: str) -> list[tuple[str, Launch, dict[str, Meta]]]:
    """Forward and backward of an op over dense tensors, and where it can be, with its last input broadcast."""
    out = []
    for layout in ("dense", "row"):
        metas = {}
        stretching = [t for t in op.tensors if t.broadcast]
        if layout == "row" and len(stretching) < 2:
            continue
        placed = (op.axis_position() or ("", None, False))[0]
        axes = {
            d.axes[0] for t in op.tensors for d in parse_dims(t.dims) if not (d.pack and d.axes[0] in ("...", placed))
        }
        for tensor in op.tensors:
            shape = shape_of(tensor, placed, bool(axes))
            if layout == "row" and tensor is stretching[-1]:
                shape = (128,)
            metas[tensor.name] = Meta(
                dtype if "f32" in tensor.dtypes else tensor.dtypes[0], shape, dense_strides(shape)
            )
        plan = op.plan_forward(metas)
        named = {**metas, **plan.outputs, **plan.saved, **plan.scratch}
        out += [(layout, launch, named) for launch in plan.launches]
        if op.has_backward:
            named |= {f"d{n}": m for n, m in plan.outputs.items()}
            plan = op.plan_backward(named, op.gradients, 132)
            out += [(layout, launch, {**named, **plan.outputs, **plan.scratch}) for launch in plan.launches]
    return out


def step_launches(op: StepOp, dtype: str) -> list[Launch]:
    """The step of gradients in `dtype` and float32 parameters, with a copy where that is half; and the norm of the gradients."""
    dtypes = {t.name: "f32" for t in op.stored() if op.there(t)} | {op.inputs[0].name: dtype}
    dtypes |= {"copy": dtype} if dtype != "f32" else {}
    return [op.step_launch(64, dtypes), *norm_launches(type(op), [64], [dtypes])]


def whole_loads(op: StepOp, launch: Launch, dtype: str) -> int:
    """How many vectors a thread loads of a whole tile: 128 bits each."""
    tensors = [dtype, *("f32" for t in op.stored()[1:] if op.there(t))]
    tensors = tensors if launch.kernel is op.kernel else tensors[:1]
    bits = {"bf16": 16, "f32": 32, "f64": 64}
    return sum(BLOCK * bits[d] // (128 * 32 * launch.warps) for d in tensors)


def report_step(name: str, op: StepOp, dtype: str, target: GPUTarget) -> None:
    """A row a kernel. A tile that is cut is loaded by elements: what counts is that a whole one is in vectors of 128 bits."""
    for launch in (one.on(allowed(target)) for one in step_launches(op, dtype)):
        metas = {n: Meta(TABLES[n.rstrip("0")], (64,), (1,)) for n in launch.pointers.values()}
        types, constants, hints = signature(launch, metas)
        source = ASTSource(launch.kernel.function, types, constants, hints)
        built = triton.compile(source, target=target, options=launch.options)
        wide = len(re.findall(r"ld\.global\S*\.v4\.b32", str(built.asm.get("ptx", ""))))
        needed = whole_loads(op, launch, dtype) if "BLOCK" in launch.values and "work" in str(launch.pointers) else 0
        row = {
            "op": name,
            "kernel": launch.kernel.function.fn.__name__,
            "layout": "step",
            "loads": wide,
            "narrow": max(0, needed - wide),
        }
        print(json.dumps(row), flush=True)


def loads(ptx: str) -> tuple[int, int]:
    """Loads from global memory, into registers or ahead into shared memory, and those of less than two words."""
    found = []
    for line in ptx.splitlines():
        if "ld.global" in line and "ld.global.nc" not in line:  # which is of a table that libdevice has
            found.append(not re.search(r"\.v[24]\.", line) and ".b8" not in line)
        elif (
            ahead := re.search(r"cp\.async\.c[ag]\.shared\.global \[.*?\], \[.*?\], 0x([0-9a-f]+)", line)
        ) is not None:
            found.append(int(ahead[1], 16) < 8)
    return len(found), sum(found)


def beside_rows(ttgir: str, rows: set[str]) -> int:
    """How many values a thread loads that are no elements of rows, but one a row, one for several elements, or by an index."""
    layouts = dict(re.findall(r"^(#\w+) = #ttg\.blocked<\{(.*?)\}>", ttgir, re.MULTILINE))
    total = 0
    for line in ttgir.splitlines():
        found = re.match(r"\s*%([A-Za-z]\w*?)(?:_\d+)? = (?:tt\.load|ttg\.async_copy_global_to_local) ", line)
        if found is None or found[1] in rows:
            continue
        tensor = re.search(r": tensor<([\dx]+)x!tt\.ptr<\w+>, (#\w+)>", line)
        if tensor is None:
            total += 1
            continue
        shape = [int(n) for n in tensor[1].split("x")]
        sizes = dict(re.findall(r"(\w+) = \[([\d, ]+)\]", layouts[tensor[2]]))
        own, threads, warps = (
            map(int, sizes[key].split(",")) for key in ("sizePerThread", "threadsPerWarp", "warpsPerCTA")
        )
        total += math.prod(o * -(-n // (o * t * w)) for n, o, t, w in zip(shape, own, threads, warps))
    return total


def main() -> None:
    kind, _, arch = sys.argv[1].partition(":")
    target = GPUTarget(kind, int(arch) if arch.isdigit() else arch, 64 if kind == "hip" else 32)
    dtype, names = sys.argv[2], sys.argv[3:] or dir(generated)
    for name in names:
        module = importlib.import_module(f"generated.ops.{name}")
        cls = next(
            v
            for v in vars(module).values()
            if isinstance(v, type) and issubclass(v, RuntimeOp) and v.__module__ == module.__name__
        )
        function = getattr(module, name)
        arguments = {t.public for t in cls.inputs + cls.params}
        own = {public: n for n, public in cls.named.items()}
        parameters = inspect.signature(function).parameters
        given = {own.get(n, n): p.default for n, p in parameters.items() if n not in arguments}
        if issubclass(cls, StepOp):
            attrs = {n: given.get(n, 1) for n in cls.kinds}
            report_step(name, cls(**attrs), dtype, target)
            report_step(
                name,
                cls(
                    **{
                        n: True if kind == "bool" else v or 0.5 if kind == "float" else v
                        for (n, v), kind in zip(attrs.items(), cls.kinds.values())
                    }
                ),
                dtype,
                target,
            )
            continue
        choices = [given] + [
            {**given, n: v}
            for n, values in cls.kinds.items()
            if isinstance(values, tuple)
            for v in values
            if v != given[n]
        ]
        for attrs in choices:
            missing = inspect.Parameter.empty
            whole = {"int": -1, "dims": -1, "shape": 128}
            attrs = {n: whole.get(str(cls.kinds.get(n)), 0.5) if v is missing else v for n, v in attrs.items()}
            attrs |= {n: 4 for n in cls.sized.values() if cls.kinds[n] == "int"}
            for layout, planned, metas in launches(cls(**attrs), dtype):
                launch = planned.on(allowed(target))
                types, constants, hints = signature(launch, metas)
                source = ASTSource(launch.kernel.function, types, constants, hints)
                built = triton.compile(source, target=target, options=launch.options)
                count, narrow = loads(str(built.asm.get("ptx", "")))
                if not cls.elementwise:
                    most = max(math.prod(m.shape) for m in metas.values())
                    whole = {n for n, m in metas.items() if math.prod(m.shape) == most}
                    narrow = max(0, narrow - beside_rows(str(built.asm["ttgir"]), whole))
                plain = all(launch.values.get(k) is None for k in ("sizes", "kept_sizes", "n_parts"))
                layout = "dense" if plain and layout == "dense" else "strided"
                row = {
                    "op": name,
                    "kernel": launch.kernel.function.fn.__name__,
                    "layout": layout if cls.elementwise else "rows",
                    "loads": count,
                    "narrow": narrow,
                }
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
