"""Device and host time of pointwise ops beside eager and compiled torch, in one run, as a share of a large copy.

    python benchmarks/pointwise.py [--out results.json] [--rows 8192 --cols 16384]

Device time: launches are queued behind a sleeping kernel and timed by events, so the host does not count; the median of
several rounds, operands rotated so that the L2 does not serve. Host time: microseconds a call until it returns, small
tensors. Reports; judges nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
F = torch.nn.functional
generated: Any = importlib.import_module("generated")

OPS: dict[str, tuple[int, Callable[..., Any], Callable[..., Any]]] = {
    "gelu (tanh)": (1, lambda x: generated.gelu(x, approximate="tanh"), lambda x: F.gelu(x, approximate="tanh")),
    "silu": (1, lambda x: generated.silu(x), F.silu),
    "swiglu": (2, lambda a, b: generated.swiglu(a, b), lambda a, b: F.silu(a) * b),
    "add": (2, lambda a, b: generated.add(a, b), torch.add),
}


def device_time(call: Callable[[int], Any], rounds: int = 7, repeats: int = 6) -> float:
    """Median seconds a call, launches queued behind a sleep."""
    for k in range(3):
        call(k)
    torch.cuda.synchronize()
    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(40_000_000)
        start.record()
        for k in range(repeats):
            call(k)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / repeats / 1e3)
    return statistics.median(times)


def host_time(call: Callable[[], Any], repeats: int = 300) -> float:
    """Median seconds that a call keeps the host."""
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        before = time.perf_counter()
        call()
        times.append(time.perf_counter() - before)
        if len(times) % 50 == 0:
            torch.cuda.synchronize()
    return statistics.median(times)


def copy_bandwidth(count: int) -> float:
    """Bytes a second of a large device-to-device copy, read and written."""
    sources = [torch.randn(count, device="cuda") for _ in range(2)]
    target = torch.empty_like(sources[0])
    return 8 * count / device_time(lambda k: target.copy_(sources[k % 2]))


def measure(name: str, dtype: torch.dtype, rows: int, cols: int, bandwidth: float) -> list[dict[str, Any]]:
    """Forward and backward rows of one op."""
    arity, ours, eager = OPS[name]
    torch.manual_seed(0)
    sets = [[torch.randn(rows, cols, device="cuda", dtype=dtype) for _ in range(arity)] for _ in range(2)]
    small = [torch.randn(64, 64, device="cuda", dtype=dtype) for _ in range(arity)]
    cotangents = [torch.randn(rows, cols, device="cuda", dtype=dtype) for _ in range(2)]
    item = sets[0][0].element_size() * rows * cols
    moved = {"forward": (arity + 1) * item, "backward": ((1 if name == "add" else arity + 1) + arity) * item}
    out = []
    for peer, function in (("pullback", ours), ("eager", eager), ("compiled", torch.compile(eager))):
        with torch.no_grad():
            forward = device_time(lambda k: function(*sets[k % 2]))
            host = host_time(lambda: function(*small))
        leaves = [[t.detach().requires_grad_() for t in tensors] for tensors in sets]
        results = [function(*tensors) for tensors in leaves]
        backward = device_time(
            lambda k: torch.autograd.grad(results[k % 2], leaves[k % 2], cotangents[k % 2], retain_graph=True)
        )
        small_leaves = [t.detach().requires_grad_() for t in small]
        ones = torch.ones_like(small[0])
        both = host_time(lambda: torch.autograd.grad(function(*small_leaves), small_leaves, ones))
        for direction, seconds, host_seconds in (("forward", forward, host), ("backward", backward, both)):
            share = moved[direction] / seconds / bandwidth
            out.append({"op": name, "dtype": str(dtype).removeprefix("torch."), "direction": direction, "peer": peer,
                        "ms": seconds * 1e3, "share": share, "host_us": host_seconds * 1e6})  # fmt: skip
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--cols", type=int, default=16384)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    import triton

    bandwidth = copy_bandwidth(512 * 2**20)
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"
    print(
        f"{machine}; copy {bandwidth / 1e12:.2f} TB/s; ({args.rows}, {args.cols}); host time at (64, 64), backward: forward and backward"
    )
    print(f"{'op':12} {'dtype':9} {'direction':9} " + "".join(f"{p:>28}" for p in ("pullback", "eager", "compiled")))
    rows: list[dict[str, Any]] = []
    for name in OPS:
        for dtype in (torch.bfloat16, torch.float32):
            found = measure(name, dtype, args.rows, args.cols, bandwidth)
            rows += found
            for direction in ("forward", "backward"):
                cells = [r for r in found if r["direction"] == direction]
                text = "".join(f"{r['ms']:9.3f} ms {r['share']:5.2f} {r['host_us']:6.1f} us" for r in cells)
                print(f"{name:12} {str(dtype).removeprefix('torch.'):9} {direction:9} {text}", flush=True)
    if args.out:
        args.out.write_text(
            json.dumps({"machine": machine, "copy_bytes_per_second": bandwidth, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
