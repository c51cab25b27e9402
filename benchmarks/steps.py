"""Device time of a step over many tensors beside torch's fused, foreach and single-tensor optimizers, as a share of a large copy.

    python -m benchmarks.steps [--op NAME] [--tensors 300] [--mb 1024] [--out steps.json]

The tensors are a model's: a few large matrices, most of them small ones, and vectors, of odd sizes too, so that the last tile of many is cut.
What is timed is first held against torch's own step in float64. Bytes are those that a step must read and write: gradient, parameter
and state once each. Exit code 1 if a step of ours is wrong; no time is judged.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import DeviceClock, copy_bandwidth, no_device
from generated.runtime.stepwise import StepOp

ROOT = Path(__file__).resolve().parent.parent
PAIRS = (("f32", "f32"), ("bf16", "bf16"), ("bf16", "f32"))
"""Dtypes of gradients and of parameters; the last with a copy of the parameters in that of the gradients."""
TORCH = {"f32": torch.float32, "bf16": torch.bfloat16}
ALLOWED = {"f32": 1e-6, "bf16": 1e-2}
"""Of the norm of the difference from float64, relative to the norm."""

Row = dict[str, Any]


def step_class(name: str) -> type[StepOp] | None:
    """The class of a step; None of what is no step."""
    module = importlib.import_module(f"generated.ops.{name}")
    own = [v for v in vars(module).values() if isinstance(v, type) and v.__module__ == module.__name__]
    return next((v for v in own if issubclass(v, StepOp)), None)


def ops() -> list[str]:
    """The steps of the package."""
    names = sorted(p.stem for p in (ROOT / "generated" / "ops").glob("*.py") if p.stem != "__init__")
    return [n for n in names if step_class(n) is not None]


def shapes(count: int, elements: int) -> list[tuple[int, ...]]:
    """Of `count` tensors of so many elements in all: in each six of a layer two large matrices, a smaller one, and three vectors."""
    layers = max(1, count // 6)
    width = max(8, int((elements / layers / 9) ** 0.5) // 8 * 8)
    layer = [(4 * width, width), (width, 4 * width), (width, width), (width,), (4 * width,), (width + 1,)]
    return [layer[k % 6] for k in range(count)]


def tensors(sizes: Sequence[tuple[int, ...]], dtype: str, device: str, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    return [torch.randn(s, generator=generator, device=device).to(TORCH[dtype]) for s in sizes]


def moved(optimizer: torch.optim.Optimizer, grad: str) -> int:
    """Bytes that a step must move: the gradient is read, parameter and state are read and written, a copy is written."""
    total = 0
    for param in optimizer.param_groups[0]["params"]:
        item = TORCH[grad].itemsize
        copy = item if getattr(optimizer, "op", None) is not None and TORCH[grad] != param.dtype else 0
        state = [v for v in optimizer.state[param].values() if isinstance(v, torch.Tensor) and v.shape == param.shape]
        total += param.numel() * (item + copy) + 2 * param.nbytes + 2 * sum(v.nbytes for v in state)
    return total


# ---------------------------------------------------------------------------------------------- peers


def ours(name: str, sizes: Sequence[tuple[int, ...]], grad: str, param: str, device: str) -> Any:
    """An optimizer of ours with its gradients in place."""
    package = importlib.import_module("generated")
    params = tensors(sizes, param, device, 1)
    optimizer = getattr(package, name)(params)
    for tensor, own in zip(params, tensors(sizes, grad, device, 2)):
        optimizer.bind(tensor, own, tensor.to(TORCH[grad]) if grad != param else None)
    return optimizer


def torch_class(name: str) -> Any:
    """torch's optimizer of that name; None where it has none."""
    return next((v for n, v in vars(torch.optim).items() if n.lower() == name and isinstance(v, type)), None)


def theirs(
    name: str, sizes: Sequence[tuple[int, ...]], dtype: torch.dtype, seeds: str, device: str, **flags: bool
) -> Any:
    """torch's optimizer on the same numbers."""
    params = [p.to(dtype) for p in tensors(sizes, seeds, device, 1)]
    for tensor, own in zip(params, tensors(sizes, seeds, device, 2)):
        tensor.grad = own.to(dtype)
    return torch_class(name)(params, **flags)


def peers(
    name: str, sizes: Sequence[tuple[int, ...]], grad: str, param: str, device: str
) -> Iterator[tuple[str, Any, Callable[[], Any]]]:
    """Each with its optimizer and its step. torch's gradients have the dtype of the parameters."""
    optimizer = ours(name, sizes, grad, param, device)
    optimizer.prepare()
    yield "pullback", optimizer, optimizer.launch
    if torch_class(name) is None or grad != param:
        return
    for flag in ("fused", "foreach"):
        try:
            peer = theirs(name, sizes, TORCH[param], param, device, **{flag: True})
            peer.step()
        except torch.OutOfMemoryError:
            raise
        except (TypeError, RuntimeError):  # torch has no such form of it; on a device it may find that out as it steps
            continue
        yield flag, peer, peer.step


# ---------------------------------------------------------------------------------------------- cells


def error(name: str, sizes: Sequence[tuple[int, ...]], grad: str, param: str, device: str) -> float:
    """Of two steps, the norm of the difference from torch in float64, relative to the norm; 0 where torch has no such optimizer."""
    if torch_class(name) is None:
        return 0.0
    mine, exact = ours(name, sizes, grad, param, device), theirs(name, sizes, torch.float64, param, device)
    if grad != param:
        for tensor, own in zip(exact.param_groups[0]["params"], tensors(sizes, grad, device, 2)):
            tensor.grad = own.double()
    for optimizer in (mine, exact, mine, exact):
        optimizer.step()
    pairs = list(zip(mine.param_groups[0]["params"], exact.param_groups[0]["params"]))
    off = sum(float((a.double() - b).square().sum()) for a, b in pairs)
    return float((off / sum(float(b.square().sum()) for _, b in pairs)) ** 0.5)


def measure(name: str, args: argparse.Namespace, clock: DeviceClock, bandwidth: float) -> Iterator[Row]:
    for grad, param in PAIRS:
        sizes = shapes(args.tensors, int(args.mb * 2**20) // TORCH[param].itemsize)
        wrong = error(name, sizes[:12], grad, param, "cuda") > ALLOWED[param]
        for peer, optimizer, step in peers(name, sizes, grad, param, "cuda"):

            def call(k: int, step: Callable[[], Any] = step) -> None:
                step()

            def whole(k: int, step: Callable[[], Any] = optimizer.step) -> None:
                step()

            seconds, host = clock.device(call), clock.host(whole, 20)  # on the host a step is more than its launch
            share = moved(optimizer, grad) / seconds / bandwidth
            yield {
                "op": name, "grad": grad, "param": param, "peer": peer, "seconds": seconds, "host_seconds": host,
                "share": share, "tensors": len(sizes), "mb": args.mb, "wrong": wrong and peer == "pullback",
            }  # fmt: skip


def markdown(rows: Sequence[Row]) -> str:
    lines = [
        "| Step | Gradient / parameter | Peer | Milliseconds | Share of a copy | Host, milliseconds |",
        "|---|---|---|---|---|---|",
    ]
    for r in rows:
        cells = (
            r["op"],
            f"{r['grad']} / {r['param']}",
            r["peer"],
            f"{r['seconds'] * 1e3:.3f}",
            f"{r['share']:.2f}",
            f"{r['host_seconds'] * 1e3:.2f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="python -m benchmarks.steps", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    out.add_argument("--op", action="append", choices=ops(), help="may be given several times; default: all")
    out.add_argument("--tensors", type=int, default=300)
    out.add_argument("--mb", type=float, default=1024.0, help="megabytes of the parameters in all")
    out.add_argument("--seconds-limit", type=float, default=240.0, help="stop early, and say what was left out")
    out.add_argument("--out", type=Path, help="JSON of all rows")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    began = time.monotonic()
    args = parser().parse_args(argv)
    if no_device():
        return 2
    clock = DeviceClock()
    bandwidth = copy_bandwidth(clock)
    rows: list[Row] = []
    left = [*(args.op or ops())]
    result = {
        "machine": torch.cuda.get_device_name(), "torch": torch.__version__, "copy_bytes_per_second": bandwidth,
        "rows": rows, "left_out": left,
    }  # fmt: skip
    print(f"{result['machine']}, copy {bandwidth / 1e12:.2f} TB/s", flush=True)
    while left and time.monotonic() - began < args.seconds_limit:
        own = [*measure(left[0], args, clock, bandwidth)]
        rows += own
        del left[0]
        torch.cuda.empty_cache()
        # Said and saved as it comes: a run that is stopped leaves something.
        print("\n".join(markdown(own).splitlines()[2 if len(rows) > len(own) else 0 :]), flush=True)
        if args.out:
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    if left:
        print(f"left out for lack of time: {', '.join(left)}")
    return int(any(r["wrong"] for r in rows))


if __name__ == "__main__":
    sys.exit(main())
