"""Compiles every function of the runtime in every form for sm_90 (or the target given): a line each, with its size.

The size is the number of PTX instructions beyond those of a kernel that copies its operand.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import primitive_kernels  # noqa: E402
from generated.runtime import math  # noqa: E402

TYPES = {"f32": "fp32", "f64": "fp64", "half": "fp32"}
NAMES = (
    "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan "
    "sinh cosh tanh asinh acosh atanh erf erfc sigmoid softplus tanh_gap atan2 pow hypot fmod mod floordiv"
).split()


def instructions(target: GPUTarget, function: Any, arity: int, form: str) -> int:
    kernel = primitive_kernels.binary if arity == 2 else primitive_kernels.unary
    kinds = {"n": "i32", "F": "constexpr", "SHORT": "constexpr", "BLOCK": "constexpr"}
    constants = {"F": function, "SHORT": form == "half", "BLOCK": 128}
    types = {name: kinds.get(name, "*" + TYPES[form]) for name in kernel.arg_names}
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    built = triton.compile(ASTSource(kernel, types, values), target=target, options={"num_warps": 4})
    text = str(built.asm.get("ptx", ""))
    return len(re.findall(r"^\s+(?:@!?%p\d+ )?(?!mov|bra|ret|bar|ld\.param)[a-z][\w.:]*\s", text, re.M))


def main() -> None:
    kind, _, arch = (sys.argv[1] if len(sys.argv) > 1 else "cuda:90").partition(":")
    target = GPUTarget(kind, int(arch) if arch.isdigit() else arch, 64 if kind == "hip" else 32)
    bare = {
        (a, f): instructions(target, (math.square, math.maximum)[a - 1], a, f) - 1
        for a in (1, 2)
        for f in TYPES
        if f != "half"
    }
    for name in NAMES:
        function = getattr(math, name)
        parameters = list(inspect.signature(function.fn).parameters)
        arity = 2 if len(parameters) > 1 and parameters[1] != "HALF" else 1
        for form in ("f32", "f64", "half"):
            if form != "half" or "HALF" in parameters:
                size = instructions(target, function, arity, form) - bare[arity, "f64" if form == "f64" else "f32"]
                print(f"{name:10s} {form:5s} {size:4d}", flush=True)


if __name__ == "__main__":
    main()
