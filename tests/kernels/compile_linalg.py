"""Compiles the hand-written kernels for a target: `compile_linalg.py cuda:90 bf16`. A JSON line a kernel."""

from __future__ import annotations

import json
import sys

import triton
from compile_worker import TYPES, signature
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from generated.runtime.custom import CustomOp
from generated.runtime.linalg import BatchedMatmul, Embedding, Linear
from generated.runtime.plan import Meta
from generated.runtime.views import dense_strides

SHAPES: list[tuple[CustomOp, dict[str, tuple[int, ...]]]] = [
    (Linear(precision="ieee"), {"x": (4096, 1024), "weight": (2048, 1024), "bias": (2048,)}),
    (Linear(precision="tf32"), {"x": (64, 784), "weight": (10, 784), "bias": (10,)}),
    (BatchedMatmul(precision="ieee"), {"a": (8, 512, 256), "b": (8, 256, 512)}),
    (Embedding(), {"idx": (8, 512), "weight": (256, 128)}),
]


def main() -> None:
    kind, _, arch = sys.argv[1].partition(":")
    target = GPUTarget(kind, int(arch) if arch.isdigit() else arch, 64 if kind == "hip" else 32)
    dtype = sys.argv[2]
    TYPES.setdefault("f16", "*fp16")
    for op, shapes in SHAPES:
        metas = {n: Meta("i64" if n == "idx" else dtype, s, dense_strides(s)) for n, s in shapes.items()}
        plans = [op.plan_forward(metas), op.plan_backward(op.backward_given(metas), op.gradients, 132)]
        for plan in plans:
            for launch in plan.launches:
                types, constants, hints = signature(launch, dict(plan.metas))
                source = ASTSource(launch.kernel.function, types, constants, hints)
                built = triton.compile(source, target=target, options=launch.options)
                ptx = str(built.asm.get("ptx", ""))
                row = {
                    "op": op.name,
                    "kernel": launch.kernel.function.fn.__name__,
                    "tensor_cores": "wgmma.mma_async" in ptx or "mma.sync" in ptx,
                    "shared": built.metadata.shared,
                }
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
